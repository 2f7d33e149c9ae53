"""Requests to a collection, and the meaning of answers and errors.

Requests are repeated while the server is away, and many run at once. `fault_of` gives
the errors of qdrant-client one meaning for REST, gRPC and local mode.
"""

from __future__ import annotations

import copy
import itertools
import logging
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any, TypeAlias, TypeVar

import httpx
from grpc import RpcError, StatusCode
from qdrant_client import QdrantClient, models
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.context_headers import headers
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from hubplugin.errors import HubpluginError, StoreError
from hubplugin.store import Id
from hubplugin.vectors import Progress
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import plain_client
from hubplugin_qdrant.calls import Answer
from hubplugin_qdrant.plain_client import PointId, ShardKey
from hubplugin_qdrant.requests import nothing


class Fault(Enum):
    """The meaning of an error of the client.

    MISSING: There is no such collection or point.
    FORBIDDEN: The api key lacks a right.
    TOO_LARGE: The request, or its answer, is larger than the server or a proxy allows.
    LATE: The answer took too long; a smaller request may be answered in time.
    LIMITED: The server limits the rate: of reads by requests, of writes by points.
    AWAY: The server cannot be reached, is restarting, or lacks a node.
    REFUSED: Any other error that a server answers.
    OTHER: An error that has nothing to do with a connection.
    """

    MISSING = auto()
    FORBIDDEN = auto()
    TOO_LARGE = auto()
    LATE = auto()
    LIMITED = auto()
    AWAY = auto()
    REFUSED = auto()
    OTHER = auto()


PASSING = (Fault.LATE, Fault.LIMITED, Fault.AWAY)
"""Faults that may be over when the same request is made again."""

_BY_STATUS = {
    401: Fault.FORBIDDEN,
    403: Fault.FORBIDDEN,
    404: Fault.MISSING,
    408: Fault.LATE,
    413: Fault.TOO_LARGE,
    429: Fault.LIMITED,
    500: Fault.AWAY,  # a node of a cluster is away, as with INTERNAL below
    502: Fault.AWAY,
    503: Fault.AWAY,
    504: Fault.LATE,
}

_BY_CODE = {
    StatusCode.UNAUTHENTICATED: Fault.FORBIDDEN,
    StatusCode.PERMISSION_DENIED: Fault.FORBIDDEN,
    StatusCode.NOT_FOUND: Fault.MISSING,
    StatusCode.DEADLINE_EXCEEDED: Fault.LATE,
    StatusCode.RESOURCE_EXHAUSTED: Fault.LIMITED,
    StatusCode.UNAVAILABLE: Fault.AWAY,
    StatusCode.INTERNAL: Fault.AWAY,
    StatusCode.FAILED_PRECONDITION: Fault.AWAY,
}


def fault_of(error: BaseException | None) -> Fault:
    """Return the meaning of `error`."""
    if isinstance(error, UnexpectedResponse):
        if error.status_code == 400 and b"larger than allowed" in error.content:
            return Fault.TOO_LARGE
        return _BY_STATUS.get(error.status_code or 0, Fault.REFUSED)
    if isinstance(error, RpcError):
        details = str(error.details())
        if "message larger than" in details or "message length too large" in details:
            return Fault.TOO_LARGE
        return _BY_CODE.get(error.code(), Fault.REFUSED)
    if isinstance(error, ResourceExhaustedResponse):
        return Fault.LIMITED
    if isinstance(error, (ResponseHandlingException, httpx.TransportError)):
        source = getattr(error, "source", error)
        if isinstance(source, (httpx.TimeoutException, TimeoutError)):
            return Fault.LATE
        return Fault.AWAY
    # Local mode raises a ValueError for a collection that is not there.
    if isinstance(error, ValueError) and "not found" in str(error):
        return Fault.MISSING
    return Fault.OTHER


def require_finished(answer: Answer) -> Answer:
    """Return `answer`.

    Raises ResponseHandlingException, as a request without an answer does, if the write
    still waits its turn: from 1.18 on a server says so after a minute.
    """
    results = answer if isinstance(answer, list) else [answer]
    for result in results:
        status = str(getattr(result, "status", ""))
        if status.lower().endswith("wait_timeout"):  # name or value of an enum
            waiting = TimeoutError("the server has not done it yet")
            raise ResponseHandlingException(waiting)
    return answer


ERRORS = (
    ResponseHandlingException,
    ResourceExhaustedResponse,
    httpx.TransportError,
    UnexpectedResponse,
    RpcError,
)
"""The errors that a client raises if a server refuses, or does not answer."""


@contextmanager
def one_line(url: str, doing: str, collection: str) -> Iterator[None]:
    """Turn an error of a client into a StoreError of one line that says what to do.

    The line names `url` and what the client was `doing`.

    collection: The collection that is asked, for the rights that an api key needs.
    """
    try:
        yield
    except HubpluginError:
        raise
    except (*ERRORS, ValueError) as error:
        fault = fault_of(error)
        place = f"{url}: {doing}"
        if fault in PASSING:
            text = f"no answer ({_reason(error)}); is the server running and reachable?"
            if fault is Fault.LATE:
                text += f" If it is slow, {FEWER}"
            raise StoreError(f"{place}: {text}") from None
        text = f"refused: {_reason(error)}"
        if fault is Fault.TOO_LARGE:
            text += f"; {FEWER}"
        elif fault is Fault.FORBIDDEN:
            text = (
                f"the api key may not do this ({_reason(error)}); it is read from "
                "QDRANT_API_KEY, or is that of your client, and needs access to the "
                "collection and to its metadata collection, "
                f"{m.metadata_collection(collection)}: to read both, to write both for "
                "what writes, and to manage for creating or deleting the latter"
            )
        raise StoreError(f"{place}: {text}") from None


def _reason(error: Exception) -> str:
    """Return the reason that a server gives for `error`, in one line."""
    if isinstance(error, UnexpectedResponse):
        status = None
        if error.content.strip().startswith(b"{"):
            status = error.structured().get("status")
        text = status.get("error") if isinstance(status, dict) else None
        return f"{error.status_code} {text or error.reason_phrase}"
    if isinstance(error, RpcError):
        return f"{error.code().name} {error.details()}"
    return " ".join(str(error).split()) or type(error).__name__


Page = TypeVar("Page")
Item = TypeVar("Item")


BATCH = 2000
"""Points read and written at a time, at most: fewer if their vectors are large."""

FEWER = "set hubplugin_qdrant.transport.BATCH, points a request, to fewer"

BATCH_NUMBERS = 1_000_000
"""Numbers read at a time: some 10 MB of JSON. By default a server accepts 32 MB."""

WRITERS = 4
"""Writing requests under way at a time: enough that the server never waits for us."""

QUERIES_AT_ONCE = 64
"""Queries in one request, at most."""

RETRY_SECONDS = 60.0
"""How long a request is repeated while the server does not answer, as in a restart."""

LIMITED_SECONDS = 600.0
"""How long a request is repeated while the server limits the rate, which it counts by
the minute."""

SHORTEST_WAIT = 0.2
LONGEST_WAIT = 10.0
"""A request is repeated after a random wait. Its upper bound doubles with each attempt,
from twice SHORTEST_WAIT up to LONGEST_WAIT."""

SERVER_SECONDS = 600.0
"""How long a server may go on working after its answer, at an index or a vector."""

SLOWEST_BUILD = 200.0
"""Points a second: a graph may take SERVER_SECONDS, and a second more for each so many
points. Two busy cores built graphs at 500 points a second."""

POLL_SECONDS = 0.5
"""The time between two looks whether a server has finished."""

SILENT_SECONDS = 10.0
"""After so long a wait the log says what it is for, if there is no progress callback."""

IdRange: TypeAlias = tuple[PointId | None, PointId | None]
"""Ids from the first on and below the second; None for no bound."""

EVERY_ID: IdRange = (None, None)

logger = logging.getLogger("hubplugin.qdrant")

Search: TypeAlias = Callable[
    [str, list[models.QueryRequest]], list[models.QueryResponse]
]
"""`query_batch_points` of a client, plain or corrected: it takes a collection and
requests."""

Items: TypeAlias = list[tuple[Id, Any]]
"""Ids of points, each with the value to write to the point."""


FORMULAS = (1, 14)
"""The oldest supported version of the server: the first with formulas, which add
offsets to scores."""


class QdrantTransport:
    """The requests of one store to `collection`, which `open` chooses.

    url: The name of the store in errors.
    server: The version of the server, such as (1, 18).
    strict: The limits of strict mode; empty ones if it is off.
    dim: The numbers in each vector that is read; 1 until that is known.
    """

    def __init__(self, client: QdrantClient, url: str):
        self.client = client
        self.url = url
        self.dim = 1
        # Local mode cannot be used from a second thread.
        self.is_local = plain_client.is_local(client)
        self._writers = None if self.is_local else ThreadPoolExecutor(WRITERS)
        self._under_way: deque[Future[None]] = deque()
        self._given_up = threading.Event()

    def open(self, collection: str, name: str) -> None:
        """Use `collection`, the real name of what the user calls `name`.

        Raises StoreError if there is no such collection, or the server is too old.
        """
        client = self.client
        self.collection = collection
        self.one_line = partial(one_line, self.url, collection=collection)
        try:
            self._read(self.describe())
        except Exception as error:
            if fault_of(error) is not Fault.MISSING:
                raise
            every = [each.name for each in client.get_collections().collections]
            names = sorted(each for each in every if not each.endswith("--hub"))
            raise StoreError(
                f"{self.url}: there is no collection {name!r}; there are: "
                f"{', '.join(names) or 'none'}"
            ) from None
        major, minor = map(int, client.info().version.split(".")[:2])
        self.server = (major, minor)
        if self.server < FORMULAS:
            raise StoreError(
                f"{self.url}: the server is Qdrant {major}.{minor}, which has no "
                "formulas; upgrade it to 1.14 or newer"
            )

    def _read(self, info: models.CollectionInfo) -> None:
        """Take in how the server describes the collection."""
        self.opened: models.CollectionInfo = info
        strict: Any = info.config.strict_mode_config
        if strict is None or not strict.enabled:
            strict = models.StrictModeConfig()
        self.strict: models.StrictModeConfig = strict
        self._counted: int | None = None
        self._points_read = 0
        self._seconds_read = 0.0
        self._is_for_job = False

    def for_job(self) -> QdrantTransport:
        """Return a copy for one job, which asks once for the description and the number
        of points, and keeps them."""
        transport = copy.copy(self)
        transport._read(self.describe())
        transport._is_for_job = True
        return transport

    @property
    def info(self) -> models.CollectionInfo:
        """The description of the collection: at the start of this job, or without a job
        as it is now."""
        return self.opened if self._is_for_job else self.describe()

    def count(self) -> int:
        """Return how many points there are; in a job, how many there were at its first
        count.

        It is an estimate if strict mode forbids exact counts.
        """
        if self._counted is not None:
            return self._counted
        with self.one_line("counting"):
            exact = self.strict.search_allow_exact is not False
            answer = self.retry(self.client.count, self.collection, exact=exact)
        count = int(answer.count)
        if self._is_for_job:
            self._counted = count
        return count

    def retry(
        self,
        call: Callable[..., Answer],
        *args: object,
        **kwargs: object,
    ) -> Answer:
        """Return the answer to a request that does no harm if it is made twice.

        It is repeated while its faults are `PASSING`, for RETRY_SECONDS or
        LIMITED_SECONDS, or until `give_up`. Then the last error is raised.
        """
        given_up = self._given_up
        since = time.monotonic()
        for attempt in itertools.count(1):
            try:
                return require_finished(call(*args, **kwargs))
            except Exception as error:
                fault = fault_of(error)
                # A limited request waits its turn among the others under way.
                patience = LIMITED_SECONDS if fault is Fault.LIMITED else RETRY_SECONDS
                is_over = time.monotonic() - since >= patience or given_up.is_set()
                if fault not in PASSING or is_over:
                    raise
                logger.log(
                    logging.WARNING if attempt == 1 else logging.DEBUG,
                    "%s: a request failed (%s: %s), asked again",
                    self.url,
                    type(error).__name__,
                    fault.name.lower(),  # not the server's text: it may hold a secret
                )
                longest = min(LONGEST_WAIT, SHORTEST_WAIT * 2**attempt)
                retry_after = float(getattr(error, "retry_after_s", 0))
                given_up.wait(max(random.uniform(0, longest), retry_after))
        raise AssertionError("unreachable")

    def wait_until(
        self,
        is_done: Callable[[], bool],
        name: str,
        otherwise: str,
        progress: Progress | None = None,
        points: int = 0,
    ) -> None:
        """Wait for the server to finish its work, but no longer than it may take.

        An interrupt loses nothing: the next run goes on from here.

        Args:
            is_done: Asks the server whether the work is finished.
            name: The name of the work, for the log.
            otherwise: What the log says if the work does not finish in time.
            progress: Is told the seconds. Without it a long wait is logged once.
            points: How many points a graph is built of; the wait is longer for many.
        """
        since = time.monotonic()
        patience = SERVER_SECONDS + points / SLOWEST_BUILD
        is_silent = progress is None
        while not is_done():
            waited = time.monotonic() - since
            if waited > patience:
                logger.warning(
                    "%s: %s: not finished after %g s, going on; %s",
                    self.url,
                    name,
                    patience,
                    otherwise,
                )
                return
            if progress is not None:
                progress(f"{name}, in seconds", int(waited), int(patience))
            elif is_silent and waited > SILENT_SECONDS:
                is_silent = False
                text = "%s: %s, for up to %g s; it may be interrupted, and goes on when it is run again"
                logger.warning(text, self.url, name, patience)
            time.sleep(POLL_SECONDS)

    def describe(self) -> models.CollectionInfo:
        """Ask the server to describe the collection as it is now."""
        return self.retry(self.client.get_collection, self.collection)

    def require_right_to_write(self, collection: str) -> None:
        """Raise StoreError if the api key may not write to `collection`.

        Ask the server to delete a point that is not there. It checks the key first, so
        a refusal for any other reason means that the key may write.
        """
        with self.one_line("asking whether it may be written to"):
            try:
                self.retry(self.client.delete, collection, nothing())
            except Exception as error:
                if fault_of(error) is not Fault.REFUSED:
                    raise

    def flush(self, shard_key: ShardKey = None) -> None:
        """Wait until all writes are done that were sent so far, by anybody.

        If points are sharded by keys, this holds for the shards of `shard_key` only.
        """
        self.retry(self.client.delete, self.collection, nothing(shard_key))

    def flush_all(self) -> None:
        """Flush the shards of every key."""
        for shard_key in self.points_of_shards() or [None]:
            self.flush(shard_key)

    def points_of_shards(self) -> dict[Id, int]:
        """Return about how many points each shard key has; empty if points are not
        sharded by keys."""
        if self.info.config.params.sharding_method != models.ShardingMethod.CUSTOM:
            return {}
        with self.one_line("looking for shard keys"):
            cluster: models.CollectionClusterInfo = self.retry(
                self.client.collection_cluster_info, self.collection
            )
            shards: list[Any] = [*cluster.local_shards, *cluster.remote_shards]
            keys = {shard.shard_key for shard in shards} - {None}
            count = partial(self.retry, self.client.count, self.collection, exact=False)
            return {
                key: int(count(shard_key_selector=key).count)
                for key in sorted(keys, key=str)
            }

    def pages(
        self,
        convert: Callable[[list[models.Record]], Page],
        with_vectors: list[str] | bool = False,
        with_payload: list[str] | bool = False,
        between: IdRange = EVERY_ID,
    ) -> Iterator[Page]:
        """Yield all points, page by page, in the order of ids.

        Args:
            convert: Makes a page of records.
            with_vectors, with_payload: The fields to read, as `scroll` takes them.
            between: The range of ids; by default all.
        """
        offset, end = between
        more = True
        while more:
            began = time.monotonic()
            # Servers compress their answers, and compressing vectors takes longer than
            # sending them as they are.
            with self.one_line("reading"), headers({"accept-encoding": "identity"}):
                records, offset = self.retry(
                    self.client.scroll,
                    self.collection,
                    offset=offset,
                    limit=self.page_size,
                    with_vectors=with_vectors,
                    with_payload=with_payload,
                )
            if with_vectors:
                self._points_read += len(records)
                self._seconds_read += time.monotonic() - began
            more = offset is not None
            if end is not None and records and rank(records[-1].id) >= rank(end):
                records = [each for each in records if rank(each.id) < rank(end)]
                more = False
            yield convert(records)

    def seconds_to_read(self) -> float:
        """Return how long reading all points takes, at the speed that this job has read
        at so far."""
        seconds = self._seconds_read / max(self._points_read, 1)
        return seconds * self.count()

    @property
    def page_size(self) -> int:
        """Points read and written at a time, at most, which strict mode may limit."""
        # The limit is in points a minute, and a request that exceeds it is repeated as a
        # whole. A thirtieth of it is two seconds' worth, so little is repeated.
        writes_at_once = (self.strict.write_rate_limit or 0) // 30
        limits = [
            BATCH_NUMBERS // self.dim,
            self.strict.max_query_limit,
            self.strict.upsert_max_batchsize,
            writes_at_once,
        ]
        return max(1, min(BATCH, *(limit for limit in limits if limit)))

    def answers(
        self, requests: list[models.QueryRequest], search: Search | None = None
    ) -> list[models.QueryResponse]:
        """Return the answers to `requests`, sent as many at a time as the server takes.

        search: Makes the requests; by default the plain client.
        """
        search = search or self.client.query_batch_points
        size = min(QUERIES_AT_ONCE, self.strict.search_max_batchsize or QUERIES_AT_ONCE)
        answers = [
            self.retry(search, self.collection, chunk)
            for chunk in chunks(requests, size)
        ]
        return [response for chunk in answers for response in chunk]

    def send(self, items: Items, request: Callable[[Items], object]) -> None:
        """Start to write `items` by `request`, in the order of these calls.

        If too many writes wait their turn, wait for the first one. An error of a write
        is raised by a later call of `send` or `wait`.
        """
        if self._writers is None:
            self._send(items, request)
            return
        while len(self._under_way) >= 2 * WRITERS:
            self._under_way.popleft().result()
        self._under_way.append(self._writers.submit(self._send, items, request))

    def wait(self) -> None:
        """Wait until all items are written that `send` was given."""
        while self._under_way:
            self._under_way.popleft().result()

    def give_up(self) -> None:
        """Cancel the writes that have not begun, and wait for the others without
        repeating them any more."""
        self._given_up.set()
        while self._under_way:
            future = self._under_way.popleft()
            if not future.cancel():
                future.exception()
        self._given_up = threading.Event()

    def _send(self, items: Items, request: Callable[[Items], object]) -> None:
        """Write `items` by `request`.

        A server refuses all of them if a point is gone: then write those that are left.
        """
        with self.one_line("writing"):
            try:
                self.retry(request, items)
            except Exception as error:
                # Local mode raises a KeyError for a point that is gone.
                is_gone = isinstance(error, KeyError)
                if not is_gone and fault_of(error) is not Fault.MISSING:
                    raise
                ids = [point for point, _ in items]
                records = self.retry(
                    self.client.retrieve, self.collection, ids=ids, with_payload=False
                )
                left = {plain_id(record.id) for record in records}
                if len(left) == len(items):
                    raise
                items = [item for item in items if item[0] in left]
                if items:
                    self._send(items, request)


def plain_id(point: Id | uuid.UUID) -> Id:
    """Return the id of a point as a number or text."""
    return point if isinstance(point, int) else str(point)


def rank(point: PointId) -> tuple[int, int]:
    """Return a key that sorts ids as a server lists them: numbers, then UUIDs."""
    if isinstance(point, int):
        return (0, point)
    return (1, uuid.UUID(str(point)).int)


def by_shard(records: Sequence[models.Record]) -> dict[Id | None, list[models.Record]]:
    """Group `records` by shard key."""
    shards: dict[Id | None, list[models.Record]] = {}
    for record in records:
        shards.setdefault(record.shard_key, []).append(record)
    return shards


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield `items` in lists of `size`, the last one maybe shorter."""
    stream = iter(items)
    while chunk := list(itertools.islice(stream, size)):
        yield chunk
