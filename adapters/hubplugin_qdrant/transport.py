"""Send requests to a collection, and interpret answers and errors.

Requests are repeated while the server is away, and several run at once. `fault_of`
classifies the errors of qdrant-client in the same way for REST, gRPC and local mode.
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import Any, TypeAlias, TypeVar

import httpx
from grpc import RpcError, StatusCode
from qdrant_client import QdrantClient, models
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.context_headers import headers
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from hubplugin.errors import HubpluginError, StoreError
from hubplugin.store import Hits, Id
from hubplugin.vectors import Progress
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import plain_client
from hubplugin_qdrant.calls import Answer
from hubplugin_qdrant.plain_client import PointId, ShardKey
from hubplugin_qdrant.requests import nothing


class Fault(Enum):
    """The kind of an error of the client.

    The values are the statuses of REST and gRPC for this kind. REJECTED and OTHER have
    no statuses of their own.

    MISSING: The collection or the point does not exist.
    FORBIDDEN: The api key lacks a right.
    TOO_LARGE: The request, or its answer, is larger than the server or a proxy allows.
    LATE: The answer took too long; a smaller request may be answered in time.
    LIMITED: The server limits the rate of read requests, or of written points.
    AWAY: The server cannot be reached, is restarting, or lacks a node.
    REJECTED: The server rejected the request for any other reason.
    OTHER: The error does not come from a server or a connection.
    """

    MISSING = (404, StatusCode.NOT_FOUND)
    FORBIDDEN = (401, 403, StatusCode.UNAUTHENTICATED, StatusCode.PERMISSION_DENIED)
    TOO_LARGE = (413,)
    LATE = (408, 504, StatusCode.DEADLINE_EXCEEDED)
    LIMITED = (429, StatusCode.RESOURCE_EXHAUSTED)
    AWAY = (
        502,
        503,
        StatusCode.UNAVAILABLE,
        StatusCode.FAILED_PRECONDITION,
        # A node of a cluster is away.
        500,
        StatusCode.INTERNAL,
    )
    REJECTED = ("rejected",)
    OTHER = ("other",)


PASSING = (Fault.LATE, Fault.LIMITED, Fault.AWAY)
"""The faults that may pass: the same request may succeed later."""


def fault_of(error: BaseException | None) -> Fault:
    """Return the kind of `error`."""
    if isinstance(error, Refusal):
        return error.fault
    if isinstance(error, UnexpectedResponse):
        if error.status_code == 400 and b"larger than allowed" in error.content:
            return Fault.TOO_LARGE
        return _fault_by_status(error.status_code)
    if isinstance(error, RpcError):
        details = str(error.details())
        if "message larger than" in details or "message length too large" in details:
            return Fault.TOO_LARGE
        return _fault_by_status(error.code())
    if isinstance(error, ResourceExhaustedResponse):
        return Fault.LIMITED
    if isinstance(error, (ResponseHandlingException, httpx.TransportError)):
        source = getattr(error, "source", error)
        if isinstance(source, (httpx.TimeoutException, TimeoutError)):
            return Fault.LATE
        return Fault.AWAY
    # Local mode raises a ValueError if a collection does not exist.
    if isinstance(error, ValueError) and "not found" in str(error):
        return Fault.MISSING
    return Fault.OTHER


def _fault_by_status(status: object) -> Fault:
    for fault in Fault:
        if status in fault.value:
            return fault
    return Fault.REJECTED


def require_finished(answer: Answer) -> Answer:
    """Return `answer`, unless it says that the write is still waiting.

    A server from 1.18 on returns such an answer after a minute. Then this raises
    ResponseHandlingException, like a request without an answer.
    """
    results = answer if isinstance(answer, list) else [answer]
    for result in results:
        status = str(getattr(result, "status", ""))
        if status.lower().endswith("wait_timeout"):  # the name or the value of an enum
            waiting = TimeoutError("the server has not done it yet")
            raise ResponseHandlingException(waiting)
    return answer


ERRORS = (
    ResponseHandlingException,
    ResourceExhaustedResponse,
    httpx.TransportError,
    UnexpectedResponse,
    RpcError,
    ValueError,  # raised by local mode
)
"""The errors that a client raises if a server rejects a request or does not answer."""


class Refusal(StoreError):
    """An error of a client as one line that says what to do.

    fault: The kind of the error.
    """

    def __init__(self, error: Exception, place: str, collection: str):
        self.fault = fault = fault_of(error)
        reason = _reason(error)
        text = f"refused: {reason}"
        if fault in PASSING:
            text = f"no answer ({reason}); is the server running and reachable?"
        if fault is Fault.LATE:
            text += f" If it is slow, {FEWER}"
        elif fault is Fault.TOO_LARGE:
            text += f"; {FEWER}"
        elif fault is Fault.FORBIDDEN:
            text = (
                f"the api key may not do this ({reason}); it is read from "
                "QDRANT_API_KEY, or comes from your client. It must be able to read the "
                "collection and its metadata collection, "
                f"{m.metadata_collection(collection)}; jobs that write must be able to "
                "write both, and to create and delete the latter"
            )
        super().__init__(f"{place}: {text}")


def _reason(error: Exception) -> str:
    """Return the server's reason for `error` in one line."""
    if isinstance(error, UnexpectedResponse):
        status = None
        if error.content.strip().startswith(b"{"):
            status = error.structured().get("status")
        text = status.get("error") if isinstance(status, dict) else None
        return f"{error.status_code} {text or error.reason_phrase}"
    if isinstance(error, RpcError):
        return f"{error.code().name} {error.details()}"
    return " ".join(str(error).split()) or type(error).__name__


Item = TypeVar("Item")


BATCH = 2000
"""The largest number of points read or written at a time, with small vectors."""

FEWER = "set hubplugin_qdrant.transport.BATCH to fewer points per request"

BATCH_NUMBERS = 100_000
"""The largest number of vector components read at a time, about 1 MB of JSON.

With ten times as many, reading 100,000 points of 384 dimensions took 8 s instead of 6,
and the 95th percentile of searches by others was 27 ms instead of 10."""

WRITERS = 4
"""The number of concurrent writing requests, enough to keep the server busy."""

BRIEF_SECONDS = 0.02
"""The time that one request with several queries should take. Searches by others wait
for the request. Afterwards, the server is left to them for the same time."""

RETRY_SECONDS = 60.0
"""How long a request is repeated while the server does not answer, for example during a
restart."""

LIMITED_SECONDS = 600.0
"""How long a request is repeated while the server limits the rate. Servers count the
rate per minute."""

SHORTEST_WAIT = 0.2
LONGEST_WAIT = 10.0
"""A request is repeated after a random wait. The upper bound of the wait doubles with
each attempt, from twice SHORTEST_WAIT to LONGEST_WAIT."""

SERVER_SECONDS = 600.0
"""How long a server may continue to work on an index or a vector after its answer."""

SLOWEST_BUILD = 200.0
"""The slowest expected build of a graph, in points per second. A graph may take
SERVER_SECONDS plus the time at this rate. Two busy cores built graphs at 500 points per
second."""

POLL_SECONDS = 0.5
"""The time between two checks of whether a server has finished."""

SILENT_SECONDS = 10.0
"""The time after which a wait is logged, if there is no progress callback."""

IdRange: TypeAlias = tuple[PointId | None, PointId | None]
"""A range of ids, first <= id < second; None for no bound."""

EVERY_ID: IdRange = (None, None)

logger = logging.getLogger("hubplugin.qdrant")

Change: TypeAlias = Callable[[list[Id]], list[models.UpdateOperation]]
"""A function that returns the operations to change the given points."""

MANY = 3
"""The smallest number of operations that one request sends without waiting for each."""


FORMULAS = (1, 14)
"""The oldest supported version of the server: the first with formulas, which add
offsets to scores."""


class QdrantTransport:
    """Sends the requests of one store to its collection.

    Errors of the client are raised as `Refusal`.

    url: The name of the store in error messages.
    collection: The name of the collection. It may be an alias until `open` is called.
    server: The version of the server, such as (1, 18).
    strict: The limits of strict mode; without any limits if it is off.
    dim: The dimension of the vectors to read; 1 until it is known.
    pace: The number of points to write before each wait for the graph; None for a part
        of all points.
    """

    pace: float | None = None

    def __init__(self, client: QdrantClient, url: str, collection: str):
        self.client = client
        self.url = url
        self.collection = collection
        self.dim = 1
        # Local mode cannot be used from a second thread.
        self.is_local = plain_client.is_local(client)
        self._writers = None if self.is_local else ThreadPoolExecutor(WRITERS)
        self._under_way: deque[Future[None]] = deque()
        self._given_up = threading.Event()

    def open(self, collection: str) -> None:
        """Use `collection`, the real name behind a possible alias.

        Raises StoreError if the collection does not exist, or the server is too old.
        """
        requested = self.collection  # may be an alias
        self.collection = collection
        try:
            self._keep_description(self.describe())
        except Refusal as error:
            if error.fault is not Fault.MISSING:
                raise
            collections = self.retry("opening", self.client.get_collections).collections
            names = sorted(
                each.name for each in collections if not each.name.endswith("--hub")
            )
            raise StoreError(
                f"{self.url}: there is no collection {requested!r}; there are: "
                f"{', '.join(names) or 'none'}"
            ) from None
        version = self.retry("opening", self.client.info).version
        major, minor = map(int, version.split(".")[:2])
        self.server = (major, minor)
        if self.server < FORMULAS:
            raise StoreError(
                f"{self.url}: the server is Qdrant {major}.{minor}, which has no "
                "formulas; upgrade it to 1.14 or newer"
            )

    def _keep_description(self, info: models.CollectionInfo) -> None:
        """Keep the server's description of the collection, and reset the counts."""
        self.opened: models.CollectionInfo = info
        strict: Any = info.config.strict_mode_config
        if strict is None or not strict.enabled:
            strict = models.StrictModeConfig()
        self.strict: models.StrictModeConfig = strict
        self._counted: int | None = None
        self._points_read = 0
        self._seconds_read = 0.0

    def for_job(self) -> QdrantTransport:
        """Return a copy for one job.

        The copy keeps the description and the number of points from the start of the
        job.
        """
        transport = copy.copy(self)
        transport._keep_description(self.describe())
        transport._counted = transport.count()
        return transport

    def count(self) -> int:
        """Return the number of points; in a job, the number at the start of the job.

        The number is an estimate if strict mode forbids exact counts.
        """
        if self._counted is not None:
            return self._counted
        exact = self.strict.search_allow_exact is not False
        return int(self.ask("count", exact=exact).count)

    def ask(self, method: str, *args: object, **kwargs: object) -> Any:
        """Call the client's `method` for the collection, as `retry` does."""
        call = getattr(self.client, method)
        return self.retry(method, call, self.collection, *args, **kwargs)

    def retry(
        self,
        doing: str,
        call: Callable[..., Answer],
        *args: object,
        **kwargs: object,
    ) -> Answer:
        """Make a request, repeat it while it fails, and return the answer.

        The request must be harmless if it is made twice. It is repeated while the
        faults are `PASSING`, for RETRY_SECONDS or LIMITED_SECONDS, or until `give_up`
        is called. Then the last error is raised, with `doing` in the message.
        """
        given_up = self._given_up  # `give_up` sets this event and makes a new one
        since = time.monotonic()
        longest_wait = 2 * SHORTEST_WAIT
        level = logging.WARNING  # for the first failure only
        while True:
            try:
                return require_finished(call(*args, **kwargs))
            except HubpluginError:
                raise
            except ERRORS as error:
                fault = fault_of(error)
                # A limited request may have to wait for others under way.
                patience = LIMITED_SECONDS if fault is Fault.LIMITED else RETRY_SECONDS
                is_over = time.monotonic() - since >= patience or given_up.is_set()
                if fault not in PASSING or is_over:
                    place = f"{self.url}: {doing}"
                    raise Refusal(error, place, self.collection) from None
                logger.log(
                    level,
                    "%s: a request failed (%s: %s) and is repeated",
                    self.url,
                    type(error).__name__,
                    fault.name.lower(),  # not the server's text: it may hold a secret
                )
                retry_after = float(getattr(error, "retry_after_s", 0))
                given_up.wait(max(random.uniform(0, longest_wait), retry_after))
            longest_wait = min(LONGEST_WAIT, 2 * longest_wait)
            level = logging.DEBUG

    def wait_until(
        self,
        is_done: Callable[[], bool],
        name: str,
        otherwise: str,
        progress: Progress | None = None,
        points: int = 0,
    ) -> None:
        """Wait until the server has finished its work, or until a time limit.

        Nothing is lost if the wait is interrupted: the next run continues from here.

        Args:
            is_done: A function that asks the server if the work is finished.
            name: The name of the work, for the log.
            otherwise: The consequence to log if the work does not finish in time.
            progress: A callback for the seconds. Without it, a long wait is logged.
            points: The number of points in a graph that is built. More points allow a
                longer wait.
        """
        since = time.monotonic()
        patience = SERVER_SECONDS + points / SLOWEST_BUILD
        is_logged = False
        while not is_done():
            waited = time.monotonic() - since
            if waited > patience:
                text = "%s: %s: not finished after %g s, continuing; %s"
                logger.warning(text, self.url, name, patience, otherwise)
                return
            if progress is not None:
                progress(f"{name}, in seconds", int(waited), int(patience))
            elif waited > SILENT_SECONDS and not is_logged:
                is_logged = True
                logger.warning(
                    "%s: %s, for up to %g s; you can interrupt it, and continue by "
                    "running it again",
                    self.url,
                    name,
                    patience,
                )
            time.sleep(POLL_SECONDS)

    def describe(self) -> models.CollectionInfo:
        """Return the server's current description of the collection."""
        info: models.CollectionInfo = self.ask("get_collection")
        return info

    def require_right_to_write(self, collection: str) -> None:
        """Raise StoreError if the api key may not write to `collection`.

        This asks the server to delete a point that does not exist. The server checks
        the key before it looks at the request. So if it rejects the request itself, the
        key may write.
        """
        doing = "checking whether it may be written to"
        try:
            self.retry(doing, self.client.delete, collection, nothing())
        except Refusal as error:
            if error.fault is not Fault.REJECTED:
                raise

    def flush(self, shard_key: ShardKey = None) -> None:
        """Wait until all writes sent so far, by any client, are done.

        If points are sharded by keys, wait for the shards of `shard_key` only.
        """
        # A server does writes in order: see `nothing`.
        self.ask("delete", nothing(shard_key))

    def flush_all(self) -> None:
        """Wait until all writes sent so far are done on every shard."""
        for shard_key in self.points_of_shards() or [None]:
            self.flush(shard_key)

    def points_of_shards(self) -> dict[Id, int]:
        """Return an estimate of the number of points of each shard key.

        The result is empty if points are not sharded by keys.
        """
        if self.opened.config.params.sharding_method != models.ShardingMethod.CUSTOM:
            return {}
        cluster = self.ask("collection_cluster_info")
        shards = [*cluster.local_shards, *cluster.remote_shards]
        keys = {shard.shard_key for shard in shards} - {None}
        return {
            key: self.ask("count", exact=False, shard_key_selector=key).count
            for key in sorted(keys, key=str)
        }

    def pages(
        self,
        with_vectors: list[str] | bool = False,
        with_payload: list[str] | bool = False,
        between: IdRange = EVERY_ID,
    ) -> Iterator[list[models.Record]]:
        """Yield all points, page by page, in the order of ids.

        Args:
            with_vectors, with_payload: The fields to read, as in `scroll`.
            between: The range of ids; by default, all ids.
        """
        # The offset of a page is its first id, and None after the last page.
        offset, end = between
        has_more = True
        limit = self.page_size
        if with_vectors:
            limit = max(1, min(limit, BATCH_NUMBERS // self.dim))
        while has_more:
            began = time.monotonic()
            # Ask for uncompressed answers: compressing vectors takes longer than
            # sending them.
            with headers({"accept-encoding": "identity"}):
                records, offset = self.ask(
                    "scroll",
                    offset=offset,
                    limit=limit,
                    with_vectors=with_vectors,
                    with_payload=with_payload,
                )
            if with_vectors:
                self._points_read += len(records)
                self._seconds_read += time.monotonic() - began
            has_more = offset is not None
            if end is not None and records and rank(records[-1].id) >= rank(end):
                records = [each for each in records if rank(each.id) < rank(end)]
                has_more = False
            yield records

    def seconds_to_read(self) -> float:
        """Estimate the time to read all points from the reads of this job so far."""
        seconds_per_point = self._seconds_read / max(self._points_read, 1)
        return seconds_per_point * self.count()

    @property
    def page_size(self) -> int:
        """The largest number of points to read or write at a time."""
        # The rate limit is in points per minute, and a request that exceeds the limit
        # is repeated as a whole. A thirtieth of the limit, two seconds' worth, repeats
        # little.
        writes_at_once = (self.strict.write_rate_limit or 0) // 30
        limits = [
            self.strict.max_query_limit,
            self.strict.upsert_max_batchsize,
            writes_at_once,
        ]
        return min([BATCH, *(limit for limit in limits if limit)])

    def answers(
        self, requests: list[models.QueryRequest], search: Callable[..., Any]
    ) -> list[models.QueryResponse]:
        """Return the answers to `requests`, sent in batches that the server accepts.

        On a server, a batch takes about `BRIEF_SECONDS`, and a pause follows for the
        searches of others. The first batch has one request.

        search: The method `query_batch_points` of a plain or corrected client.
        """
        largest_size = self.strict.search_max_batchsize or len(requests)
        answers: list[models.QueryResponse] = []
        size = largest_size if self.is_local else 1
        while len(answers) < len(requests):
            chunk = requests[len(answers) : len(answers) + size]
            began = time.monotonic()
            answers += self.retry("searching", search, self.collection, chunk)
            if not self.is_local:
                seconds = time.monotonic() - began
                time.sleep(min(seconds, POLL_SECONDS))
                size = max(1, min(largest_size, int(size * BRIEF_SECONDS / seconds)))
        return answers

    def send(self, points: list[Id], change: Change, shard_key: ShardKey) -> None:
        """Start to `change` the `points` of one shard key, in the order of calls.

        If too many writes are pending, wait for the first one. A later call of `send`
        or `wait` raises the error of a failed write.
        """
        if self._writers is None:
            self._send(points, change, shard_key)
            return
        while len(self._under_way) >= 2 * WRITERS:
            self._under_way.popleft().result()
        future = self._writers.submit(self._send, points, change, shard_key)
        self._under_way.append(future)

    def wait(self) -> None:
        """Wait until all changes passed to `send` are written."""
        while self._under_way:
            self._under_way.popleft().result()

    def give_up(self) -> None:
        """Cancel the writes that have not begun, and wait for the writes that have.

        The latter are not repeated if they fail.
        """
        self._given_up.set()
        while self._under_way:
            future = self._under_way.popleft()
            if not future.cancel():
                future.exception()
        self._given_up = threading.Event()

    def _send(self, points: list[Id], change: Change, shard_key: ShardKey) -> None:
        """Change `points`, or only the ones that still exist.

        A server rejects the whole request if one point is gone. Then the request is
        repeated for the remaining points.
        """
        operations = change(points)
        # With wait=True, a server waits after each operation. So send many operations
        # without waiting, and flush once.
        wait = self.is_local or len(operations) < MANY
        try:
            self.ask("batch_update_points", operations, wait=wait)
            if not wait:
                self.flush(shard_key)
        except (Refusal, KeyError) as error:
            # Local mode raises a KeyError for a point that is gone.
            if isinstance(error, Refusal) and error.fault is not Fault.MISSING:
                raise
            records = self.ask("retrieve", ids=points, with_payload=False)
            found = {plain_id(record.id) for record in records}
            remaining = [point for point in points if point in found]
            if len(remaining) == len(points):  # the error has another cause
                raise
            if remaining:
                self._send(remaining, change, shard_key)


def as_hits(found: Iterable[list[models.ScoredPoint]]) -> Hits:
    """Return the points `found` by each query as `Hits`."""
    rows = list(found)
    return Hits(
        [[plain_id(point.id) for point in row] for row in rows],
        [[point.score for point in row] for row in rows],
    )


def plain_id(point: Id | uuid.UUID) -> Id:
    """Return the id of a point as an int or str."""
    return point if isinstance(point, int) else str(point)


def rank(point: PointId) -> tuple[int, int]:
    """Return a key that sorts ids in the order of a server: numbers, then UUIDs."""
    if isinstance(point, int):
        return (0, point)
    return (1, uuid.UUID(str(point)).int)


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield `items` in lists of `size`; the last list may be shorter."""
    stream = iter(items)
    while chunk := list(itertools.islice(stream, size)):
        yield chunk
