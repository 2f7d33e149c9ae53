"""`HubQdrantClient` and `AsyncHubQdrantClient`: qdrant-client's own, with corrected collections searched corrected.

A corrected method is an operation of `searches` or `writes`, which `run` or `run_async` drives; it is `like` the plain
one, whose signature and arguments it has.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

from qdrant_client import AsyncQdrantClient, QdrantClient, models
from qdrant_client.client_base import QdrantBase
from typing_extensions import Self

from hubplugin.errors import InputError
from hubplugin.recording import Recorder
from hubplugin.vectors import VectorLike
from hubplugin_qdrant import plain_client, searches, writes
from hubplugin_qdrant.calls import Operation, run, run_async
from hubplugin_qdrant.metadata import CorrectionCache, OfClient
from hubplugin_qdrant.plain_client import Arguments

Client = TypeVar("Client", QdrantClient, AsyncQdrantClient)
Method = TypeVar("Method", bound=Callable[..., Any])


Record: TypeAlias = "str | os.PathLike[str] | Recorder | None"
"""A folder, or a `Recorder` with other settings than the default's; None to record nothing."""

Clicked: TypeAlias = "VectorLike | models.Document | str"
"""The query of a click: a vector, a document, or its id."""


def require_client(client: object, kind: type[Client]) -> Client:
    """`client`, a `kind`, one that is wrapped or one that acts like it, as the plain one; InputError for others."""
    other = AsyncQdrantClient if kind is QdrantClient else QdrantClient
    if isinstance(client, other) or not hasattr(client, "query_points"):
        raise InputError(
            f"expected a client of the class {kind.__name__}, plain or wrapped, not {type(client).__name__}; "
            f"connect one to the same place: {kind.__name__}(...)"
        )
    return client.raw if isinstance(client, (HubQdrantClient, AsyncHubQdrantClient)) else client  # type: ignore[return-value]


def like(plain: Method) -> Callable[[Callable[[Any, Arguments], Any]], Method]:
    """Makes a method that stands for `plain`, one of qdrant-client's, of one that takes the arguments by name.

    Who traces qdrant-client, as OpenTelemetry's instrumentation does, puts layers around the methods of its classes by
    `wrapt`. The method runs within those of `plain`, so that a call is one span, and what it asks runs beneath them.
    """
    name, parameters = plain.__name__, inspect.signature(plain).parameters.values()
    # qdrant-client itself takes any keyword, and then refuses it.
    signature = inspect.Signature([each for each in parameters if each.kind is not each.VAR_KEYWORD])

    def made(method: Callable[[Any, Arguments], Any]) -> Any:
        def call(self: Any, *args: object, **given: object) -> Any:
            try:
                by_name = signature.bind(self, *args, **given).arguments
            except TypeError as error:
                raise TypeError(f"{name}() {error}") from None
            return method(by_name.pop("self"), by_name)

        @functools.wraps(plain)
        def corrected(self: Any, *args: object, **given: object) -> Any:
            return _within_layers(vars(self._plain)[name], functools.partial(call, self), self)(*args, **given)

        if not inspect.iscoroutinefunction(method):
            return corrected

        @functools.wraps(plain)
        async def awaited(self: Any, *args: object, **given: object) -> Any:
            return await corrected(self, *args, **given)

        return awaited

    return made


def _within_layers(method: Any, call: Callable[..., Any], client: object) -> Callable[..., Any]:
    """`call` within the layers around `method`, a function of a class of qdrant-client; `client` is whose it is."""
    layer = getattr(method, "_self_wrapper", None)
    if layer is None:
        return call
    inner = _within_layers(method.__wrapped__, call, client)
    return lambda *args, **given: layer(inner, client, args, given)


class Beneath:
    """A client, with its methods beneath the layers around them."""

    def __init__(self, client: Any):
        self.client = client

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.client, name)
        while hasattr(found, "_self_wrapper"):
            found = found.__wrapped__
        return found


class _Corrected:
    """What both clients have in common: how they are made, and what they know of corrections."""

    _plain: ClassVar[type[QdrantClient] | type[AsyncQdrantClient]]
    _corrections: CorrectionCache

    def __init__(
        self,
        *args: Any,
        oversampling: float | None = None,
        hnsw_ef: int | None = None,
        record: Record = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        raw: Any = plain_client.over_connection_of(cast(Any, self), self._plain)
        self._corrections = _known_by(raw, oversampling, hnsw_ef, record)

    @classmethod
    def wrap(
        cls,
        client: Any,
        *,
        oversampling: float | None = None,
        hnsw_ef: int | None = None,
        record: Record = None,
    ) -> Self:
        """A corrected client over the connection of `client`; closing either closes both."""
        raw: Any = require_client(client, cast("type[QdrantClient]", cls._plain))
        corrections = _known_by(raw, oversampling, hnsw_ef, record)
        wrapped: Any = plain_client.over_connection_of(raw, cast(Any, cls))
        wrapped._corrections = corrections
        return cast(Self, wrapped)


def _known_by(raw: Any, oversampling: float | None, hnsw_ef: int | None, record: Record) -> CorrectionCache:
    """Raises InputError for a `record` that is neither a folder nor a `Recorder`."""
    if isinstance(record, (str, os.PathLike)):
        record = Recorder(record)
    if record is not None and not isinstance(record, Recorder):
        raise InputError(f"record={record!r}: expected a folder, or a hubplugin.Recorder")
    return CorrectionCache(Beneath(raw), oversampling, hnsw_ef, record)


class HubQdrantClient(_Corrected, QdrantClient):
    """A QdrantClient that searches corrected collections corrected, and gives offsets to what it writes there.

    It takes the arguments of QdrantClient. On a collection without a correction every method is QdrantClient's.
    oversampling: candidates for each result asked for, with offsets in payloads; hnsw_ef: how widely the graph is
    searched, with offsets in vectors, where a query names none itself. Both are by default what was calibrated when the
    correction was applied, which is as little as reaches the raw index's own recall. The manifest of a collection is
    read on first use and again every 10 seconds.

    record: a folder, in which a sample of the dense queries to each collection and vector is kept, for a query bank;
    nothing is kept by default. `hubplugin.Recorder(folder, collections=["photos"])` keeps those to "photos" alone, and
    has further settings. See docs/recording.md.
    """

    _plain = QdrantClient

    @property
    def raw(self) -> QdrantClient:
        """The plain client on the same connection, which sees a collection as it lies in the store."""
        raw: QdrantClient = self._corrections.raw.client
        return raw

    def click(
        self, collection_name: str, query: Clicked, target: models.ExtendedPointId, using: str | None = None
    ) -> None:
        """`target`, the id of a point, was clicked in the answer to `query`, a vector, a document that the client
        embeds, or `hubplugin.Recorder.id_of` the vector. using: the name of the vector that was searched.

        Never raises but for InputError, of a client that records nothing. See docs/recording.md.
        """
        run(searches.click(self._corrections, collection_name, query, target, using))

    def close(self, grpc_grace: float | None = None, **kwargs: Any) -> None:
        """QdrantClient's, once recorded queries are on disk."""
        if self._corrections.recorder is not None:
            self._corrections.recorder.flush()
        super().close(grpc_grace, **kwargs)

    def __del__(self) -> None:
        """The connection is closed by `raw`, which has no other owner or one outside."""

    def migrate(self, dest_client: QdrantBase, *args: Any, **kwargs: Any) -> None:
        """QdrantClient's, of collections as they lie in the store; the correction of one is in
        `<collection>--hub`, which must be named, too, where names are given."""
        self.raw.migrate(dest_client.raw if isinstance(dest_client, HubQdrantClient) else dest_client, *args, **kwargs)

    @like(QdrantClient.query_points)
    def query_points(self, given: Arguments) -> Any:
        return run(searches.query_points(self._corrections, given))

    @like(QdrantClient.query_batch_points)
    def query_batch_points(self, given: Arguments) -> Any:
        return run(searches.query_batch_points(self._corrections, given))

    @like(QdrantClient.query_points_groups)
    def query_points_groups(self, given: Arguments) -> Any:
        return run(searches.query_points_groups(self._corrections, given))

    @like(QdrantClient.retrieve)
    def retrieve(self, given: Arguments) -> Any:
        return run(searches.retrieve(self._corrections, given))

    @like(QdrantClient.scroll)
    def scroll(self, given: Arguments) -> Any:
        return run(searches.scroll(self._corrections, given))

    @like(QdrantClient.get_collection)
    def get_collection(self, given: Arguments) -> Any:
        return run(searches.get_collection(self._corrections, given))

    @like(QdrantClient.get_collections)
    def get_collections(self, given: Arguments) -> Any:
        return run(searches.get_collections(self._corrections, given))

    @like(QdrantClient.upsert)
    def upsert(self, given: Arguments) -> Any:
        return run(writes.upsert(self._corrections, given))

    @like(QdrantClient.upload_points)
    def upload_points(self, given: Arguments) -> Any:
        return run(writes.upload_points(self._corrections, given))

    @like(QdrantClient.upload_collection)
    def upload_collection(self, given: Arguments) -> Any:
        return run(writes.upload_collection(self._corrections, given))

    @like(QdrantClient.update_vectors)
    def update_vectors(self, given: Arguments) -> Any:
        return run(writes.update_vectors(self._corrections, given))

    @like(QdrantClient.delete_vectors)
    def delete_vectors(self, given: Arguments) -> Any:
        return run(writes.delete_vectors(self._corrections, given))

    @like(QdrantClient.set_payload)
    def set_payload(self, given: Arguments) -> Any:
        return run(writes.set_payload(self._corrections, given))

    @like(QdrantClient.overwrite_payload)
    def overwrite_payload(self, given: Arguments) -> Any:
        return run(writes.overwrite_payload(self._corrections, given))

    @like(QdrantClient.clear_payload)
    def clear_payload(self, given: Arguments) -> Any:
        return run(writes.clear_payload(self._corrections, given))

    @like(QdrantClient.delete_payload)
    def delete_payload(self, given: Arguments) -> Any:
        return run(writes.delete_payload(self._corrections, given))

    @like(QdrantClient.batch_update_points)
    def batch_update_points(self, given: Arguments) -> Any:
        return run(writes.batch_update_points(self._corrections, given))

    @like(QdrantClient.delete_vector_name)
    def delete_vector_name(self, given: Arguments) -> Any:
        return run(writes.delete_vector_name(self._corrections, given))

    @like(QdrantClient.create_collection)
    def create_collection(self, given: Arguments) -> Any:
        return run(writes.create_collection(self._corrections, given))

    @like(QdrantClient.recreate_collection)
    def recreate_collection(self, given: Arguments) -> Any:
        return run(writes.recreate_collection(self._corrections, given))

    @like(QdrantClient.delete_collection)
    def delete_collection(self, given: Arguments) -> Any:
        return run(writes.delete_collection(self._corrections, given))

    @like(QdrantClient.update_collection_aliases)
    def update_collection_aliases(self, given: Arguments) -> Any:
        return run(writes.update_collection_aliases(self._corrections, given))


class AsyncHubQdrantClient(_Corrected, AsyncQdrantClient):
    """An AsyncQdrantClient that does what `HubQdrantClient` does; offsets are computed in a thread."""

    _plain = AsyncQdrantClient

    @property
    def raw(self) -> AsyncQdrantClient:
        """The plain client on the same connection, which sees a collection as it lies in the store."""
        raw: AsyncQdrantClient = self._corrections.raw.client
        return raw

    async def click(
        self, collection_name: str, query: Clicked, target: models.ExtendedPointId, using: str | None = None
    ) -> None:
        """As of `HubQdrantClient`."""
        await run_async(searches.click(self._corrections, collection_name, query, target, using))

    async def close(self, grpc_grace: float | None = None, **kwargs: Any) -> None:
        """AsyncQdrantClient's, once recorded queries are on disk."""
        if self._corrections.recorder is not None:
            await asyncio.to_thread(self._corrections.recorder.flush)
        await super().close(grpc_grace, **kwargs)

    @like(AsyncQdrantClient.query_points)
    async def query_points(self, given: Arguments) -> Any:
        return await run_async(searches.query_points(self._corrections, given))

    @like(AsyncQdrantClient.query_batch_points)
    async def query_batch_points(self, given: Arguments) -> Any:
        return await run_async(searches.query_batch_points(self._corrections, given))

    @like(AsyncQdrantClient.query_points_groups)
    async def query_points_groups(self, given: Arguments) -> Any:
        return await run_async(searches.query_points_groups(self._corrections, given))

    @like(AsyncQdrantClient.retrieve)
    async def retrieve(self, given: Arguments) -> Any:
        return await run_async(searches.retrieve(self._corrections, given))

    @like(AsyncQdrantClient.scroll)
    async def scroll(self, given: Arguments) -> Any:
        return await run_async(searches.scroll(self._corrections, given))

    @like(AsyncQdrantClient.get_collection)
    async def get_collection(self, given: Arguments) -> Any:
        return await run_async(searches.get_collection(self._corrections, given))

    @like(AsyncQdrantClient.get_collections)
    async def get_collections(self, given: Arguments) -> Any:
        return await run_async(searches.get_collections(self._corrections, given))

    @like(AsyncQdrantClient.upsert)
    async def upsert(self, given: Arguments) -> Any:
        return await run_async(writes.upsert(self._corrections, given))

    @like(AsyncQdrantClient.upload_points)
    def upload_points(self, given: Arguments) -> Any:
        return _uploaded(self, writes.upload_points, given)

    @like(AsyncQdrantClient.upload_collection)
    def upload_collection(self, given: Arguments) -> Any:
        return _uploaded(self, writes.upload_collection, given)

    @like(AsyncQdrantClient.update_vectors)
    async def update_vectors(self, given: Arguments) -> Any:
        return await run_async(writes.update_vectors(self._corrections, given))

    @like(AsyncQdrantClient.delete_vectors)
    async def delete_vectors(self, given: Arguments) -> Any:
        return await run_async(writes.delete_vectors(self._corrections, given))

    @like(AsyncQdrantClient.set_payload)
    async def set_payload(self, given: Arguments) -> Any:
        return await run_async(writes.set_payload(self._corrections, given))

    @like(AsyncQdrantClient.overwrite_payload)
    async def overwrite_payload(self, given: Arguments) -> Any:
        return await run_async(writes.overwrite_payload(self._corrections, given))

    @like(AsyncQdrantClient.clear_payload)
    async def clear_payload(self, given: Arguments) -> Any:
        return await run_async(writes.clear_payload(self._corrections, given))

    @like(AsyncQdrantClient.delete_payload)
    async def delete_payload(self, given: Arguments) -> Any:
        return await run_async(writes.delete_payload(self._corrections, given))

    @like(AsyncQdrantClient.batch_update_points)
    async def batch_update_points(self, given: Arguments) -> Any:
        return await run_async(writes.batch_update_points(self._corrections, given))

    @like(AsyncQdrantClient.delete_vector_name)
    async def delete_vector_name(self, given: Arguments) -> Any:
        return await run_async(writes.delete_vector_name(self._corrections, given))

    @like(AsyncQdrantClient.create_collection)
    async def create_collection(self, given: Arguments) -> Any:
        return await run_async(writes.create_collection(self._corrections, given))

    @like(AsyncQdrantClient.recreate_collection)
    async def recreate_collection(self, given: Arguments) -> Any:
        return await run_async(writes.recreate_collection(self._corrections, given))

    @like(AsyncQdrantClient.delete_collection)
    async def delete_collection(self, given: Arguments) -> Any:
        return await run_async(writes.delete_collection(self._corrections, given))

    @like(AsyncQdrantClient.update_collection_aliases)
    async def update_collection_aliases(self, given: Arguments) -> Any:
        return await run_async(writes.update_collection_aliases(self._corrections, given))


def _uploaded(client: AsyncHubQdrantClient, operation: OfClient, given: Arguments) -> Any:
    """An upload of the async client is no coroutine: it goes through a sync client to the same place."""
    if plain_client.is_local(client):
        return _without_waiting(operation(client._corrections, given))
    sync = QdrantClient(**client.init_options)
    try:
        return run(operation(CorrectionCache(Beneath(sync)), given))
    finally:
        sync.close()


def _without_waiting(operation: Operation[Any]) -> Any:
    """What `operation` returns, driven by an async client in local mode, whose coroutines never wait."""
    try:
        run_async(operation, in_thread=False).send(None)
    except StopIteration as done:
        return done.value
