"""How a collection is asked, and what its answers mean.

Requests are repeated while the server is away, and many run at once. What an error of
qdrant-client means is said once, for REST, gRPC and local mode.
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
    """What an error of the client means. MISSING: there is no such collection or point. FORBIDDEN: the api key lacks a
    right. TOO_LARGE: the request, or its answer, is larger than the server or a proxy before it takes. LATE: the answer
    took too long; a smaller request may be answered in time. LIMITED: the server limits the rate, of reading by
    requests, of writing by points. AWAY: it cannot be reached, is restarting, or lacks a node. REFUSED: any other
    answer of a server. OTHER: no error of a connection."""

    MISSING = auto()
    FORBIDDEN = auto()
    TOO_LARGE = auto()
    LATE = auto()
    LIMITED = auto()
    AWAY = auto()
    REFUSED = auto()
    OTHER = auto()


PASSING = (Fault.LATE, Fault.LIMITED, Fault.AWAY)
"""What may be over when the same request is made again."""

_BY_STATUS = {
    401: Fault.FORBIDDEN,
    403: Fault.FORBIDDEN,
    404: Fault.MISSING,
    408: Fault.LATE,
    413: Fault.TOO_LARGE,
    429: Fault.LIMITED,
    500: Fault.AWAY,  # a node of a cluster, as INTERNAL below
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
    """What `error` means."""
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
        late = isinstance(
            getattr(error, "source", error), (httpx.TimeoutException, TimeoutError)
        )
        return Fault.LATE if late else Fault.AWAY
    is_local = isinstance(error, ValueError) and "not found" in str(error)
    return Fault.MISSING if is_local else Fault.OTHER


def require_finished(answer: Answer) -> Answer:
    """`answer`, unless it says that a write is still waiting its turn, as a server does after a minute from 1.18 on:
    then ResponseHandlingException, as if there were none."""
    for result in answer if isinstance(answer, list) else [answer]:
        if str(getattr(result, "status", "")).endswith(
            ("WAIT_TIMEOUT", "wait_timeout")
        ):
            raise ResponseHandlingException(
                TimeoutError("the server has not done it yet")
            )
    return answer


ERRORS = (
    ResponseHandlingException,
    ResourceExhaustedResponse,
    httpx.TransportError,
    UnexpectedResponse,
    RpcError,
)
"""What a client raises where a server refuses, or does not answer."""


@contextmanager
def one_line(url: str, doing: str, collection: str) -> Iterator[None]:
    """Turn what a client raises into a StoreError of one line that says what to do.

    It names `url` and `collection` and what the client was `doing`.
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
"""Points read and written at a time, at most, where their vectors are not too large for it."""

FEWER = "set hubplugin_qdrant.transport.BATCH, points a request, to fewer"

BATCH_NUMBERS = 1_000_000
"""Numbers read at a time: some 10 MB of JSON, where a server by default accepts 32."""

WRITERS = 4
"""Writing requests under way at a time: enough that the server never waits for us."""

QUERIES_AT_ONCE = 64

RETRY_SECONDS, LIMITED_SECONDS = 60.0, 600.0
"""For how long a request is repeated while the server does not answer, as during a restart, and while it limits the
rate, which it counts by the minute."""

SHORTEST_WAIT, LONGEST_WAIT = 0.2, 10.0
"""Before a request is repeated: a random time, on the average twice as long each time."""

SERVER_SECONDS = 600.0
"""For how long a server may take for what it does behind a request: an index, a vector."""

SLOWEST_BUILD = 200.0
"""Points a second: a graph may take SERVER_SECONDS, and a second more for each so many points. Two busy cores built
graphs at 500 points a second."""

POLL_SECONDS = 0.5
"""How often a server is asked whether it has finished."""

SILENT_SECONDS = 10.0
"""After so long a wait it is logged what is waited for, where nobody is told of progress."""

IdRange: TypeAlias = tuple[PointId | None, PointId | None]
"""Ids from the first on and below the second; None is no bound."""

EVERY_ID: IdRange = (None, None)

logger = logging.getLogger("hubplugin.qdrant")

Search: TypeAlias = Callable[
    [str, list[models.QueryRequest]], list[models.QueryResponse]
]
"""`query_batch_points` of a client, plain or corrected: the answers to requests to a collection."""

Items: TypeAlias = list[tuple[Id, Any]]
"""Points by id, each with what is written to it."""


FORMULAS = (1, 14)
"""The oldest version of the server supported: the first whose formulas add offsets to scores."""


class QdrantTransport:
    """The requests of one store to `collection`, which `open` chooses.

    `url` is what errors call it. server: its version, such as (1, 18). strict: what it
    allows. dim: numbers in each vector that is read, once that is known.
    """

    def __init__(self, client: QdrantClient, url: str):
        self.client = client
        self.url = url
        self.dim = 1
        # Local mode is no use from a second thread.
        self.is_local = plain_client.is_local(client)
        self._writers = None if self.is_local else ThreadPoolExecutor(WRITERS)
        self._under_way: deque[Future[None]] = deque()
        self._given_up = threading.Event()

    def open(self, collection: str, name: str) -> None:
        """Use `collection`, which is no alias, and which its user calls `name`.

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
        """Return this transport for one job, which describes and counts once."""
        transport = copy.copy(self)
        transport._read(self.describe())
        transport._is_for_job = True
        return transport

    @property
    def info(self) -> models.CollectionInfo:
        """How the collection was described to this job; as it is now, without one."""
        return self.opened if self._is_for_job else self.describe()

    def count(self) -> int:
        """Return how many points there are, or were for this job.

        It is an estimate where strict mode forbids exact counts.
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

        It is repeated while the server is away, until `give_up`.
        """
        given_up = self._given_up
        since = time.monotonic()
        for attempt in itertools.count(1):
            try:
                return require_finished(call(*args, **kwargs))
            except Exception as error:
                fault = fault_of(error)
                # What is limited waits its turn among the others that are under way.
                patience = LIMITED_SECONDS if fault is Fault.LIMITED else RETRY_SECONDS
                is_over = time.monotonic() - since >= patience or given_up.is_set()
                if fault not in PASSING or is_over:
                    raise
                logger.log(
                    logging.WARNING if attempt == 1 else logging.DEBUG,
                    "%s: a request failed (%s: %s), asked again",
                    self.url,
                    type(error).__name__,
                    fault.name.lower(),  # what the server said may hold a secret
                )
                longest = min(LONGEST_WAIT, SHORTEST_WAIT * 2**attempt)
                asked = float(getattr(error, "retry_after_s", 0))
                given_up.wait(max(random.uniform(0, longest), asked))
        raise AssertionError("unreachable")

    def wait_until(
        self,
        is_done: Callable[[], bool],
        name: str,
        otherwise: str,
        progress: Progress | None = None,
        points: int = 0,
    ) -> None:
        """Waits for the server to finish its work. Whoever interrupts it loses nothing: the next run goes on from here.

        Args:
            is_done: asks whether the work is finished.
            name: of the work, for the program's log.
            otherwise: what is so if it goes on before the work is finished, for the log, too.
            progress: is told the seconds.
            points: how many points a graph is built of; it waits longer for many.
        """
        since, patience = time.monotonic(), SERVER_SECONDS + points / SLOWEST_BUILD
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
        """The collection as it is now."""
        return self.retry(self.client.get_collection, self.collection)

    def require_right_to_write(self, collection: str) -> None:
        """Raises StoreError where the api key may not write to `collection`. It is asked for the deletion of a point
        that is not there: a server looks at the key first."""
        with self.one_line("asking whether it may be written to"):
            try:
                self.retry(self.client.delete, collection, nothing())
            except Exception as error:
                if fault_of(error) is not Fault.REFUSED:
                    raise

    def flush(self, shard_key: ShardKey = None) -> None:
        """Return when all is done that anybody has sent so far without waiting for it.

        Points that are sharded by keys take it for one key at a time.
        """
        self.retry(self.client.delete, self.collection, nothing(shard_key))

    def flush_all(self) -> None:
        for shard_key in self.points_of_shards() or [None]:
            self.flush(shard_key)

    def points_of_shards(self) -> dict[Id, int]:
        """How many points there are by each shard key, about; empty where they are not sharded by keys."""
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
            with_vectors, with_payload: What is read, as `scroll` has it.
            between: The range of ids; by default all.
        """
        offset, last = between
        more = True
        while more:
            began = time.monotonic()
            # Servers compress what they answer, which takes longer than to send vectors
            # as they are.
            with self.one_line("reading"), headers({"accept-encoding": "identity"}):
                records, offset = self.retry(
                    self.client.scroll,
                    self.collection,
                    offset=offset,
                    limit=self.page,
                    with_vectors=with_vectors,
                    with_payload=with_payload,
                )
            if with_vectors:
                self._points_read += len(records)
                self._seconds_read += time.monotonic() - began
            more = offset is not None
            if last is not None and records and rank(records[-1].id) >= rank(last):
                records = [each for each in records if rank(each.id) < rank(last)]
                more = False
            yield convert(records)

    def seconds_to_read(self) -> float:
        """Return how long all points take, by those that this job has read so far."""
        seconds = self._seconds_read / max(self._points_read, 1)
        return seconds * self.count()

    @property
    def page(self) -> int:
        """Points read and written at a time, at most, which strict mode may limit."""
        # A request that meets the limit is made again from its beginning.
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
        """The answers to `requests`, as many at a time as the server takes, by `search`, by default that of the plain
        client."""
        search = search or self.client.query_batch_points
        size = min(QUERIES_AT_ONCE, self.strict.search_max_batchsize or QUERIES_AT_ONCE)
        answers = [
            self.retry(search, self.collection, chunk)
            for chunk in chunks(requests, size)
        ]
        return [response for chunk in answers for response in chunk]

    def send(self, items: Items, request: Callable[[Items], object]) -> None:
        """Starts to give `items` to `request`, which writes, in the order of these calls; a bounded number waits its
        turn. What goes wrong is raised by a later call."""
        if self._writers is None:
            self._send(items, request)
            return
        while len(self._under_way) >= 2 * WRITERS:
            self._under_way.popleft().result()
        self._under_way.append(self._writers.submit(self._send, items, request))

    def wait(self) -> None:
        """Waits for all that was sent."""
        while self._under_way:
            self._under_way.popleft().result()

    def give_up(self) -> None:
        """Ends what was sent; what is being repeated is not repeated any more, and what has not begun is not done."""
        self._given_up.set()
        while self._under_way:
            future = self._under_way.popleft()
            if not future.cancel():
                future.exception()
        self._given_up = threading.Event()

    def _send(self, items: Items, request: Callable[[Items], object]) -> None:
        """Send `items` without points that are gone, for which a server refuses."""
        with self.one_line("writing"):
            try:
                self.retry(request, items)
            except Exception as error:
                # A KeyError is that of local mode.
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
    """The id of a point as a number or text."""
    return point if isinstance(point, int) else str(point)


def rank(point: PointId) -> tuple[int, int]:
    """Where an id stands in the order in which a server lists them: numbers, then UUIDs."""
    return (0, point) if isinstance(point, int) else (1, uuid.UUID(str(point)).int)


def by_shard(records: Sequence[models.Record]) -> dict[Id | None, list[models.Record]]:
    """`records` by shard key."""
    shards: dict[Id | None, list[models.Record]] = {}
    for record in records:
        shards.setdefault(record.shard_key, []).append(record)
    return shards


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    stream = iter(items)
    while chunk := list(itertools.islice(stream, size)):
        yield chunk
