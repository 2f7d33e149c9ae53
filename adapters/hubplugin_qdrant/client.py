"""`HubQdrantClient` and `AsyncHubQdrantClient`: qdrant-client's own, with corrected collections searched corrected."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from qdrant_client import AsyncQdrantClient, QdrantClient
from qdrant_client.client_base import QdrantBase

from hubplugin.admission import Admission
from hubplugin.errors import InputError
from hubplugin_qdrant import collection_operations as collections
from hubplugin_qdrant import plain_client
from hubplugin_qdrant import search_operations as searches
from hubplugin_qdrant import write_operations as writes
from hubplugin_qdrant.cached_manifest import CorrectionCache, OfClient
from hubplugin_qdrant.newcomers import at_once
from hubplugin_qdrant.operations import Arguments, Operation, run, run_async
from hubplugin_qdrant.recorded_queries import Record, recorder_of
from hubplugin_qdrant.shadow import Hook, TaskShadow, ThreadShadow

Method = TypeVar("Method", bound=Callable[..., object])
Client = TypeVar("Client", QdrantClient, AsyncQdrantClient)


def require_client(client: object, kind: type[Client]) -> Client:
    """`client`, a `kind`, one that is wrapped or one that acts like it, as the plain one; InputError for others."""
    other = AsyncQdrantClient if kind is QdrantClient else QdrantClient
    if isinstance(client, other) or not hasattr(client, "query_points"):
        raise InputError(
            f"expected a client of the class {kind.__name__}, plain or wrapped, not {type(client).__name__}; "
            f"connect one to the same place: {kind.__name__}(...)"
        )
    return client.raw if isinstance(client, (HubQdrantClient, AsyncHubQdrantClient)) else client  # type: ignore[return-value]


def _corrections(
    raw: QdrantClient | AsyncQdrantClient, shadow: bool | Hook, record: Record, **settings: Any
) -> CorrectionCache:
    """What a corrected client over `raw` knows and does; the async one computes in a thread. settings: further fields
    of the CorrectionCache."""
    is_async = isinstance(raw, AsyncQdrantClient)
    kind = TaskShadow if is_async else ThreadShadow
    compute = asyncio.to_thread if is_async else at_once
    asked = None if shadow is False else kind(None if shadow is True else shadow)
    return CorrectionCache(raw, compute, shadow=asked, recorder=recorder_of(record), **settings)


def _arguments(method: Callable[..., object]) -> Callable[[tuple[object, ...], Arguments], Arguments]:
    """What makes of the arguments of a call of `method` one dict of them by name, as Python would; raises TypeError
    where one is unknown, missing or given twice. qdrant-client itself takes any keyword, and then refuses it."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    named = [each for each in parameters if each.kind is not each.VAR_KEYWORD]
    names = [each.name for each in named]
    known, required = frozenset(names), frozenset(each.name for each in named if each.default is each.empty)
    signature = inspect.Signature(named)

    def arguments(args: tuple[object, ...], given: Arguments) -> Arguments:
        found = dict(zip(names, args, strict=False)) | given
        if len(found) < len(args) + len(given) or not required <= found.keys() <= known:
            try:
                signature.bind(*args, **given)
            except TypeError as error:
                raise TypeError(f"{method.__name__}() {error}") from None
        return found

    return arguments


def _corrected(method: Method, operation: OfClient) -> Method:
    """`method` of the plain client, done by `operation`."""
    arguments = _arguments(method)

    @functools.wraps(method)
    def corrected(self: Any, *args: object, **given: object) -> Any:
        return run(operation(self._corrections, arguments(args, given)))

    return corrected  # type: ignore[return-value]


def _async_corrected(method: Method, operation: OfClient) -> Method:
    arguments = _arguments(method)

    @functools.wraps(method)
    async def corrected(self: Any, *args: object, **given: object) -> Any:
        return await run_async(operation(self._corrections, arguments(args, given)))

    return corrected  # type: ignore[return-value]


def _upload_corrected(method: Method, operation: OfClient) -> Method:
    """An upload of the async client, which is no coroutine: it goes through a sync client to the same place."""
    arguments = _arguments(method)

    @functools.wraps(method)
    def corrected(self: Any, *args: object, **given: object) -> Any:
        given = arguments(args, given)
        if plain_client.is_local(self):  # whose coroutines never wait
            return run(_driven(operation(self._corrections, given)))
        client = QdrantClient(**self.init_options)
        try:
            return run(operation(CorrectionCache(client, at_once, admission=self._corrections.admission), given))
        finally:
            client.close()

    return corrected  # type: ignore[return-value]


def _driven(steps: Operation) -> Operation:
    """`steps` with each coroutine that it yields run to its end."""
    sent: Any = None
    while True:
        try:
            step = steps.send(sent)
        except StopIteration as done:
            return done.value
        if not inspect.iscoroutine(step):
            sent = yield step
            continue
        try:
            step.send(None)
        except StopIteration as done:
            sent = done.value


class HubQdrantClient(QdrantClient):
    """A QdrantClient that searches corrected collections corrected, and gives offsets to what it writes there.

    It takes the arguments of QdrantClient. On a collection without a correction every method is QdrantClient's.
    oversampling: candidates for each result asked for, with offsets in payloads; hnsw_ef: how widely the graph is
    searched, with offsets in vectors, where a query names none itself. Both are by default what was calibrated when the
    correction was applied, which is as little as reaches the raw index's own recall. The manifest of a collection is
    read on first use and again every 10 seconds.

    share: of the searches of corrected collections, how many are answered corrected, from 0 to 1; a hash of the vector
    picks them, so that a query is always answered the same way. By default all are. shadow: True asks each of these
    searches the other way, too, behind the answer, and logs at level INFO under `hubplugin.shadow` how far the two
    agree; a function gets each `ShadowedSearch` besides, in the thread, or the event loop, of the shadow. So
    `share=0, shadow=True` answers raw and logs what corrected would have found. Raises InputError for another share.

    record: a folder, in which a sample of the dense queries to each collection and vector is kept, for a query bank;
    nothing is kept by default. `hubplugin.Recorder(folder, collections=["photos"])` keeps those to "photos" alone, and
    has further settings. See docs/recording.md.

    admission: what becomes of written vectors that look planted, a `hubplugin.admission.Admission`; None looks at
    nothing. What its policy "quarantine" keeps out is in the quarantine list of the collection before it is written.
    A write that is refused writes nothing, of a batch of operations too. An upload is read whole before its first point
    is written. See docs/security.md.
    """

    def __init__(
        self,
        *args: Any,
        oversampling: float | None = None,
        hnsw_ef: int | None = None,
        share: float = 1.0,
        shadow: bool | Hook = False,
        record: Record = None,
        admission: Admission | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        raw = plain_client.over_connection_of(self, QdrantClient)
        settings = {"oversampling": oversampling, "hnsw_ef": hnsw_ef, "share": share, "admission": admission}
        self._corrections = _corrections(raw, shadow, record, **settings)

    @classmethod
    def wrap(
        cls,
        client: QdrantClient,
        *,
        oversampling: float | None = None,
        hnsw_ef: int | None = None,
        share: float = 1.0,
        shadow: bool | Hook = False,
        record: Record = None,
        admission: Admission | None = None,
    ) -> HubQdrantClient:
        """A corrected client over the connection of `client`; closing either closes both."""
        raw = require_client(client, QdrantClient)
        wrapped = plain_client.over_connection_of(raw, cls)
        settings = {"oversampling": oversampling, "hnsw_ef": hnsw_ef, "share": share, "admission": admission}
        wrapped._corrections = _corrections(raw, shadow, record, **settings)
        return wrapped

    @property
    def raw(self) -> QdrantClient:
        """The plain client on the same connection, which sees a collection as it lies in the store."""
        raw: QdrantClient = self._corrections.raw
        return raw

    def close(self, grpc_grace: float | None = None, **kwargs: Any) -> None:
        """QdrantClient's, once recorded queries are on disk; shadow searches that wait are left out."""
        if self._corrections.shadow is not None:
            self._corrections.shadow.stop()
        if self._corrections.recorder is not None:
            self._corrections.recorder.flush()
        super().close(grpc_grace, **kwargs)

    def __del__(self) -> None:
        """The connection is closed by `raw`, which has no other owner or one outside."""

    def migrate(self, dest_client: QdrantBase, *args: Any, **kwargs: Any) -> None:
        """QdrantClient's, of collections as they lie in the store; the correction of one is in
        `<collection>--hub`, which must be named, too, where names are given."""
        self.raw.migrate(dest_client.raw if isinstance(dest_client, HubQdrantClient) else dest_client, *args, **kwargs)

    query_points = _corrected(QdrantClient.query_points, searches.query_points)
    query_batch_points = _corrected(QdrantClient.query_batch_points, searches.query_batch_points)
    query_points_groups = _corrected(QdrantClient.query_points_groups, searches.query_points_groups)
    retrieve = _corrected(QdrantClient.retrieve, searches.retrieve)
    scroll = _corrected(QdrantClient.scroll, searches.scroll)
    upsert = _corrected(QdrantClient.upsert, writes.upsert)
    upload_points = _corrected(QdrantClient.upload_points, writes.upload_points)
    upload_collection = _corrected(QdrantClient.upload_collection, writes.upload_collection)
    update_vectors = _corrected(QdrantClient.update_vectors, writes.update_vectors)
    delete_vectors = _corrected(QdrantClient.delete_vectors, writes.delete_vectors)
    set_payload = _corrected(QdrantClient.set_payload, writes.set_payload)
    overwrite_payload = _corrected(QdrantClient.overwrite_payload, writes.overwrite_payload)
    clear_payload = _corrected(QdrantClient.clear_payload, writes.clear_payload)
    delete_payload = _corrected(QdrantClient.delete_payload, writes.delete_payload)
    batch_update_points = _corrected(QdrantClient.batch_update_points, writes.batch_update_points)
    get_collection = _corrected(QdrantClient.get_collection, collections.get_collection)
    get_collections = _corrected(QdrantClient.get_collections, collections.get_collections)
    delete_vector_name = _corrected(QdrantClient.delete_vector_name, collections.delete_vector_name)
    create_collection = _corrected(QdrantClient.create_collection, collections.create_collection)
    recreate_collection = _corrected(QdrantClient.recreate_collection, collections.recreate_collection)
    delete_collection = _corrected(QdrantClient.delete_collection, collections.delete_collection)
    update_collection_aliases = _corrected(
        QdrantClient.update_collection_aliases, collections.update_collection_aliases
    )


class AsyncHubQdrantClient(AsyncQdrantClient):
    """An AsyncQdrantClient that does what `HubQdrantClient` does; offsets are computed in a thread."""

    def __init__(
        self,
        *args: Any,
        oversampling: float | None = None,
        hnsw_ef: int | None = None,
        share: float = 1.0,
        shadow: bool | Hook = False,
        record: Record = None,
        admission: Admission | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        raw = plain_client.over_connection_of(self, AsyncQdrantClient)
        settings = {"oversampling": oversampling, "hnsw_ef": hnsw_ef, "share": share, "admission": admission}
        self._corrections = _corrections(raw, shadow, record, **settings)

    @classmethod
    def wrap(
        cls,
        client: AsyncQdrantClient,
        *,
        oversampling: float | None = None,
        hnsw_ef: int | None = None,
        share: float = 1.0,
        shadow: bool | Hook = False,
        record: Record = None,
        admission: Admission | None = None,
    ) -> AsyncHubQdrantClient:
        """A corrected client over the connection of `client`; closing either closes both."""
        raw = require_client(client, AsyncQdrantClient)
        wrapped = plain_client.over_connection_of(raw, cls)
        settings = {"oversampling": oversampling, "hnsw_ef": hnsw_ef, "share": share, "admission": admission}
        wrapped._corrections = _corrections(raw, shadow, record, **settings)
        return wrapped

    @property
    def raw(self) -> AsyncQdrantClient:
        """The plain client on the same connection, which sees a collection as it lies in the store."""
        raw: AsyncQdrantClient = self._corrections.raw
        return raw

    async def close(self, grpc_grace: float | None = None, **kwargs: Any) -> None:
        """AsyncQdrantClient's, once recorded queries are on disk; shadow searches that wait are left out."""
        if self._corrections.shadow is not None:
            self._corrections.shadow.stop()
        if self._corrections.recorder is not None:
            await asyncio.to_thread(self._corrections.recorder.flush)
        await super().close(grpc_grace, **kwargs)

    query_points = _async_corrected(AsyncQdrantClient.query_points, searches.query_points)
    query_batch_points = _async_corrected(AsyncQdrantClient.query_batch_points, searches.query_batch_points)
    query_points_groups = _async_corrected(AsyncQdrantClient.query_points_groups, searches.query_points_groups)
    retrieve = _async_corrected(AsyncQdrantClient.retrieve, searches.retrieve)
    scroll = _async_corrected(AsyncQdrantClient.scroll, searches.scroll)
    upsert = _async_corrected(AsyncQdrantClient.upsert, writes.upsert)
    upload_points = _upload_corrected(AsyncQdrantClient.upload_points, writes.upload_points)
    upload_collection = _upload_corrected(AsyncQdrantClient.upload_collection, writes.upload_collection)
    update_vectors = _async_corrected(AsyncQdrantClient.update_vectors, writes.update_vectors)
    delete_vectors = _async_corrected(AsyncQdrantClient.delete_vectors, writes.delete_vectors)
    set_payload = _async_corrected(AsyncQdrantClient.set_payload, writes.set_payload)
    overwrite_payload = _async_corrected(AsyncQdrantClient.overwrite_payload, writes.overwrite_payload)
    clear_payload = _async_corrected(AsyncQdrantClient.clear_payload, writes.clear_payload)
    delete_payload = _async_corrected(AsyncQdrantClient.delete_payload, writes.delete_payload)
    batch_update_points = _async_corrected(AsyncQdrantClient.batch_update_points, writes.batch_update_points)
    get_collection = _async_corrected(AsyncQdrantClient.get_collection, collections.get_collection)
    get_collections = _async_corrected(AsyncQdrantClient.get_collections, collections.get_collections)
    delete_vector_name = _async_corrected(AsyncQdrantClient.delete_vector_name, collections.delete_vector_name)
    create_collection = _async_corrected(AsyncQdrantClient.create_collection, collections.create_collection)
    recreate_collection = _async_corrected(AsyncQdrantClient.recreate_collection, collections.recreate_collection)
    delete_collection = _async_corrected(AsyncQdrantClient.delete_collection, collections.delete_collection)
    update_collection_aliases = _async_corrected(
        AsyncQdrantClient.update_collection_aliases, collections.update_collection_aliases
    )
