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
from hubplugin_qdrant.calls import run, run_async
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
    return (
        client.raw
        if isinstance(client, (HubQdrantClient, AsyncHubQdrantClient))
        else client
    )  # type: ignore[return-value]


def like(plain: Method) -> Callable[[Callable[[Any, Arguments], Any]], Method]:
    """A method that stands for `plain`, one of qdrant-client's: with its signature, it gets the arguments as a dict.

    Who traces qdrant-client, as OpenTelemetry's instrumentation does, puts layers around the methods of its classes by
    `wrapt`. The method runs within those of `plain`, so that a call is one span, and what it asks runs beneath them.
    """
    name, parameters = plain.__name__, inspect.signature(plain).parameters.values()
    # qdrant-client itself takes any keyword, and then refuses it.
    signature = inspect.Signature(
        [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    )

    def decorate(written: Callable[[Any, Arguments], Any]) -> Method:
        @functools.wraps(plain)
        def method(self: Any, *args: object, **kwargs: object) -> Any:
            def call(*args: object, **kwargs: object) -> Any:
                try:
                    arguments = signature.bind(self, *args, **kwargs).arguments
                except TypeError as error:
                    raise TypeError(f"{name}() {error}") from None
                del arguments["self"]
                return written(self, arguments)

            return _within_layers(vars(self._plain)[name], call, self)(*args, **kwargs)

        @functools.wraps(plain)
        async def coroutine(self: Any, *args: object, **kwargs: object) -> Any:
            return await method(self, *args, **kwargs)

        return cast(
            Method, coroutine if inspect.iscoroutinefunction(written) else method
        )

    return decorate


def _upload(client: Any, operation: OfClient, arguments: Arguments) -> Any:
    """An upload of the async client is no coroutine: it goes through a sync client to the same place."""
    if plain_client.is_local(client):
        return run(operation(client._corrections, arguments))
    sync = QdrantClient(**client.init_options)
    try:
        return run(operation(CorrectionCache(Unwrapped(sync)), arguments))
    finally:
        sync.close()


def _within_layers(
    method: Any, call: Callable[..., Any], client: object
) -> Callable[..., Any]:
    """`call` within the layers around `method`, a function of a class of qdrant-client; `client` is whose it is."""
    layer = getattr(method, "_self_wrapper", None)
    if layer is None:
        return call
    inner = _within_layers(method.__wrapped__, call, client)
    return lambda *args, **kwargs: layer(inner, client, args, kwargs)


class Unwrapped:
    """A client, with its methods beneath the layers around them."""

    def __init__(self, client: Any):
        self.client = client

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.client, name)
        while hasattr(member, "_self_wrapper"):
            member = member.__wrapped__
        return member


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
        raw: Any = plain_client.clone_client(cast(Any, self), self._plain)
        self._corrections = _make_cache(raw, oversampling, hnsw_ef, record)

    @classmethod
    def wrap(
        cls,
        client: Any,
        *,
        oversampling: float | None = None,
        hnsw_ef: int | None = None,
        record: Record = None,
    ) -> Self:
        """A corrected client over the connection of `client`; closing either closes both.

        Args:
            client: A plain client, or a wrapped one, sync or async as this class.
            oversampling, hnsw_ef, record: As of the class.

        Returns:
            The corrected client.

        Raises:
            InputError: For a client of another kind, or a `record` that is no folder.
        """
        raw: Any = require_client(client, cast("type[QdrantClient]", cls._plain))
        corrections = _make_cache(raw, oversampling, hnsw_ef, record)
        wrapped: Any = plain_client.clone_client(raw, cast(Any, cls))
        wrapped._corrections = corrections
        return cast(Self, wrapped)


def _make_cache(
    raw: Any, oversampling: float | None, hnsw_ef: int | None, record: Record
) -> CorrectionCache:
    """Raises InputError for a `record` that is neither a folder nor a `Recorder`."""
    if isinstance(record, (str, os.PathLike)):
        record = Recorder(record)
    if record is not None and not isinstance(record, Recorder):
        raise InputError(
            f"record={record!r}: expected a folder, or a hubplugin.Recorder"
        )
    return CorrectionCache(Unwrapped(raw), oversampling, hnsw_ef, record)


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
        self,
        collection_name: str,
        query: Clicked,
        target: models.ExtendedPointId,
        using: str | None = None,
    ) -> None:
        """Records that `target` was clicked in the answer to `query`. See docs/recording.md.

        Args:
            collection_name: The collection that was searched, or an alias.
            query: A vector, a document that the client embeds, or `hubplugin.Recorder.id_of` the vector.
            target: The id of a point.
            using: The name of the vector that was searched.

        Raises:
            InputError: For a client that records nothing; nothing else is ever raised.
        """
        run(searches.click(self._corrections, collection_name, query, target, using))

    def close(self, grpc_grace: float | None = None, **kwargs: Any) -> None:
        """Closes as QdrantClient does, with `grpc_grace` and `kwargs`, once recorded queries are on disk."""
        if self._corrections.recorder is not None:
            self._corrections.recorder.flush()
        super().close(grpc_grace, **kwargs)

    def __del__(self) -> None:
        """The connection is closed by `raw`, which has no other owner or one outside."""

    def migrate(self, dest_client: QdrantBase, *args: Any, **kwargs: Any) -> None:
        """Migrates as QdrantClient does, to `dest_client`, with `args` and `kwargs`, collections as they lie in the
        store. The correction of one is in "<collection>--hub", which must be named, too, where names are given."""
        self.raw.migrate(
            dest_client.raw
            if isinstance(dest_client, HubQdrantClient)
            else dest_client,
            *args,
            **kwargs,
        )

    @like(QdrantClient.query_points)
    def query_points(self, arguments: Arguments) -> Any:
        return run(searches.query_points(self._corrections, arguments))

    @like(QdrantClient.query_batch_points)
    def query_batch_points(self, arguments: Arguments) -> Any:
        return run(searches.query_batch_points(self._corrections, arguments))

    @like(QdrantClient.query_points_groups)
    def query_points_groups(self, arguments: Arguments) -> Any:
        return run(searches.query_points_groups(self._corrections, arguments))

    @like(QdrantClient.retrieve)
    def retrieve(self, arguments: Arguments) -> Any:
        return run(searches.retrieve(self._corrections, arguments))

    @like(QdrantClient.scroll)
    def scroll(self, arguments: Arguments) -> Any:
        return run(searches.scroll(self._corrections, arguments))

    @like(QdrantClient.get_collection)
    def get_collection(self, arguments: Arguments) -> Any:
        return run(searches.get_collection(self._corrections, arguments))

    @like(QdrantClient.get_collections)
    def get_collections(self, arguments: Arguments) -> Any:
        return run(searches.get_collections(self._corrections, arguments))

    @like(QdrantClient.upsert)
    def upsert(self, arguments: Arguments) -> Any:
        return run(writes.upsert(self._corrections, arguments))

    @like(QdrantClient.upload_points)
    def upload_points(self, arguments: Arguments) -> Any:
        return run(writes.upload_points(self._corrections, arguments))

    @like(QdrantClient.upload_collection)
    def upload_collection(self, arguments: Arguments) -> Any:
        return run(writes.upload_collection(self._corrections, arguments))

    @like(QdrantClient.update_vectors)
    def update_vectors(self, arguments: Arguments) -> Any:
        return run(writes.update_vectors(self._corrections, arguments))

    @like(QdrantClient.delete_vectors)
    def delete_vectors(self, arguments: Arguments) -> Any:
        return run(writes.delete_vectors(self._corrections, arguments))

    @like(QdrantClient.set_payload)
    def set_payload(self, arguments: Arguments) -> Any:
        return run(writes.set_payload(self._corrections, arguments))

    @like(QdrantClient.overwrite_payload)
    def overwrite_payload(self, arguments: Arguments) -> Any:
        return run(writes.overwrite_payload(self._corrections, arguments))

    @like(QdrantClient.clear_payload)
    def clear_payload(self, arguments: Arguments) -> Any:
        return run(writes.clear_payload(self._corrections, arguments))

    @like(QdrantClient.delete_payload)
    def delete_payload(self, arguments: Arguments) -> Any:
        return run(writes.delete_payload(self._corrections, arguments))

    @like(QdrantClient.batch_update_points)
    def batch_update_points(self, arguments: Arguments) -> Any:
        return run(writes.batch_update_points(self._corrections, arguments))

    @like(QdrantClient.delete_vector_name)
    def delete_vector_name(self, arguments: Arguments) -> Any:
        return run(writes.delete_vector_name(self._corrections, arguments))

    @like(QdrantClient.create_collection)
    def create_collection(self, arguments: Arguments) -> Any:
        return run(writes.create_collection(self._corrections, arguments))

    @like(QdrantClient.recreate_collection)
    def recreate_collection(self, arguments: Arguments) -> Any:
        return run(writes.recreate_collection(self._corrections, arguments))

    @like(QdrantClient.delete_collection)
    def delete_collection(self, arguments: Arguments) -> Any:
        return run(writes.delete_collection(self._corrections, arguments))

    @like(QdrantClient.update_collection_aliases)
    def update_collection_aliases(self, arguments: Arguments) -> Any:
        return run(writes.update_collection_aliases(self._corrections, arguments))


class AsyncHubQdrantClient(_Corrected, AsyncQdrantClient):
    """An AsyncQdrantClient that does what `HubQdrantClient` does; offsets are computed in a thread."""

    _plain = AsyncQdrantClient

    @property
    def raw(self) -> AsyncQdrantClient:
        """The plain client on the same connection, which sees a collection as it lies in the store."""
        raw: AsyncQdrantClient = self._corrections.raw.client
        return raw

    async def click(
        self,
        collection_name: str,
        query: Clicked,
        target: models.ExtendedPointId,
        using: str | None = None,
    ) -> None:
        """Does as `HubQdrantClient.click`, with the same `collection_name`, `query`, `target` and `using`."""
        await run_async(
            searches.click(self._corrections, collection_name, query, target, using)
        )

    async def close(self, grpc_grace: float | None = None, **kwargs: Any) -> None:
        """Closes as AsyncQdrantClient does, with `grpc_grace` and `kwargs`, once recorded queries are on disk."""
        if self._corrections.recorder is not None:
            await asyncio.to_thread(self._corrections.recorder.flush)
        await super().close(grpc_grace, **kwargs)

    @like(AsyncQdrantClient.query_points)
    async def query_points(self, arguments: Arguments) -> Any:
        return await run_async(searches.query_points(self._corrections, arguments))

    @like(AsyncQdrantClient.query_batch_points)
    async def query_batch_points(self, arguments: Arguments) -> Any:
        return await run_async(
            searches.query_batch_points(self._corrections, arguments)
        )

    @like(AsyncQdrantClient.query_points_groups)
    async def query_points_groups(self, arguments: Arguments) -> Any:
        return await run_async(
            searches.query_points_groups(self._corrections, arguments)
        )

    @like(AsyncQdrantClient.retrieve)
    async def retrieve(self, arguments: Arguments) -> Any:
        return await run_async(searches.retrieve(self._corrections, arguments))

    @like(AsyncQdrantClient.scroll)
    async def scroll(self, arguments: Arguments) -> Any:
        return await run_async(searches.scroll(self._corrections, arguments))

    @like(AsyncQdrantClient.get_collection)
    async def get_collection(self, arguments: Arguments) -> Any:
        return await run_async(searches.get_collection(self._corrections, arguments))

    @like(AsyncQdrantClient.get_collections)
    async def get_collections(self, arguments: Arguments) -> Any:
        return await run_async(searches.get_collections(self._corrections, arguments))

    @like(AsyncQdrantClient.upsert)
    async def upsert(self, arguments: Arguments) -> Any:
        return await run_async(writes.upsert(self._corrections, arguments))

    @like(AsyncQdrantClient.upload_points)
    def upload_points(self, arguments: Arguments) -> Any:
        return _upload(self, writes.upload_points, arguments)

    @like(AsyncQdrantClient.upload_collection)
    def upload_collection(self, arguments: Arguments) -> Any:
        return _upload(self, writes.upload_collection, arguments)

    @like(AsyncQdrantClient.update_vectors)
    async def update_vectors(self, arguments: Arguments) -> Any:
        return await run_async(writes.update_vectors(self._corrections, arguments))

    @like(AsyncQdrantClient.delete_vectors)
    async def delete_vectors(self, arguments: Arguments) -> Any:
        return await run_async(writes.delete_vectors(self._corrections, arguments))

    @like(AsyncQdrantClient.set_payload)
    async def set_payload(self, arguments: Arguments) -> Any:
        return await run_async(writes.set_payload(self._corrections, arguments))

    @like(AsyncQdrantClient.overwrite_payload)
    async def overwrite_payload(self, arguments: Arguments) -> Any:
        return await run_async(writes.overwrite_payload(self._corrections, arguments))

    @like(AsyncQdrantClient.clear_payload)
    async def clear_payload(self, arguments: Arguments) -> Any:
        return await run_async(writes.clear_payload(self._corrections, arguments))

    @like(AsyncQdrantClient.delete_payload)
    async def delete_payload(self, arguments: Arguments) -> Any:
        return await run_async(writes.delete_payload(self._corrections, arguments))

    @like(AsyncQdrantClient.batch_update_points)
    async def batch_update_points(self, arguments: Arguments) -> Any:
        return await run_async(writes.batch_update_points(self._corrections, arguments))

    @like(AsyncQdrantClient.delete_vector_name)
    async def delete_vector_name(self, arguments: Arguments) -> Any:
        return await run_async(writes.delete_vector_name(self._corrections, arguments))

    @like(AsyncQdrantClient.create_collection)
    async def create_collection(self, arguments: Arguments) -> Any:
        return await run_async(writes.create_collection(self._corrections, arguments))

    @like(AsyncQdrantClient.recreate_collection)
    async def recreate_collection(self, arguments: Arguments) -> Any:
        return await run_async(writes.recreate_collection(self._corrections, arguments))

    @like(AsyncQdrantClient.delete_collection)
    async def delete_collection(self, arguments: Arguments) -> Any:
        return await run_async(writes.delete_collection(self._corrections, arguments))

    @like(AsyncQdrantClient.update_collection_aliases)
    async def update_collection_aliases(self, arguments: Arguments) -> Any:
        return await run_async(
            writes.update_collection_aliases(self._corrections, arguments)
        )
