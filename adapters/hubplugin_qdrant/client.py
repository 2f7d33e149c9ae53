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
    return client.raw if isinstance(client, (HubQdrantClient, AsyncHubQdrantClient)) else client  # type: ignore[return-value]


def make_method(plain: Method, operation: OfClient, run_inline: bool = False) -> Method:
    """A method that stands for `plain`, one of qdrant-client's, with its signature, and runs `operation`.

    Who traces qdrant-client, as OpenTelemetry's instrumentation does, puts layers around the methods of its classes by
    `wrapt`. The method runs within those of `plain`, so that a call is one span, and what it asks runs beneath them.
    run_inline: of an async client, a method that is no coroutine.
    """
    name, parameters = plain.__name__, inspect.signature(plain).parameters.values()
    # qdrant-client itself takes any keyword, and then refuses it.
    signature = inspect.Signature([p for p in parameters if p.kind is not p.VAR_KEYWORD])
    is_async = inspect.iscoroutinefunction(plain)
    drive: Callable[..., Any] = run_async if is_async else run

    @functools.wraps(plain)
    def method(self: Any, *args: object, **kwargs: object) -> Any:
        def call(*args: object, **kwargs: object) -> Any:
            try:
                arguments = signature.bind(self, *args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{name}() {error}") from None
            del arguments["self"]
            return _upload(self, operation, arguments) if run_inline else drive(operation(self._corrections, arguments))

        return _within_layers(vars(self._plain)[name], call, self)(*args, **kwargs)

    @functools.wraps(plain)
    async def coroutine(self: Any, *args: object, **kwargs: object) -> Any:
        return await method(self, *args, **kwargs)

    return cast(Method, coroutine if is_async else method)


def _upload(client: Any, operation: OfClient, arguments: Arguments) -> Any:
    """An upload of the async client is no coroutine: it goes through a sync client to the same place."""
    if plain_client.is_local(client):
        return run(operation(client._corrections, arguments))
    sync = QdrantClient(**client.init_options)
    try:
        return run(operation(CorrectionCache(Unwrapped(sync)), arguments))
    finally:
        sync.close()


def _within_layers(method: Any, call: Callable[..., Any], client: object) -> Callable[..., Any]:
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


def _make_cache(raw: Any, oversampling: float | None, hnsw_ef: int | None, record: Record) -> CorrectionCache:
    """Raises InputError for a `record` that is neither a folder nor a `Recorder`."""
    if isinstance(record, (str, os.PathLike)):
        record = Recorder(record)
    if record is not None and not isinstance(record, Recorder):
        raise InputError(f"record={record!r}: expected a folder, or a hubplugin.Recorder")
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
        self, collection_name: str, query: Clicked, target: models.ExtendedPointId, using: str | None = None
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

    query_points = make_method(QdrantClient.query_points, searches.query_points)
    query_batch_points = make_method(QdrantClient.query_batch_points, searches.query_batch_points)
    query_points_groups = make_method(QdrantClient.query_points_groups, searches.query_points_groups)
    retrieve = make_method(QdrantClient.retrieve, searches.retrieve)
    scroll = make_method(QdrantClient.scroll, searches.scroll)
    get_collection = make_method(QdrantClient.get_collection, searches.get_collection)
    get_collections = make_method(QdrantClient.get_collections, searches.get_collections)
    upsert = make_method(QdrantClient.upsert, writes.upsert)
    upload_points = make_method(QdrantClient.upload_points, writes.upload_points)
    upload_collection = make_method(QdrantClient.upload_collection, writes.upload_collection)
    update_vectors = make_method(QdrantClient.update_vectors, writes.update_vectors)
    delete_vectors = make_method(QdrantClient.delete_vectors, writes.delete_vectors)
    set_payload = make_method(QdrantClient.set_payload, writes.set_payload)
    overwrite_payload = make_method(QdrantClient.overwrite_payload, writes.overwrite_payload)
    clear_payload = make_method(QdrantClient.clear_payload, writes.clear_payload)
    delete_payload = make_method(QdrantClient.delete_payload, writes.delete_payload)
    batch_update_points = make_method(QdrantClient.batch_update_points, writes.batch_update_points)
    delete_vector_name = make_method(QdrantClient.delete_vector_name, writes.delete_vector_name)
    create_collection = make_method(QdrantClient.create_collection, writes.create_collection)
    recreate_collection = make_method(QdrantClient.recreate_collection, writes.recreate_collection)
    delete_collection = make_method(QdrantClient.delete_collection, writes.delete_collection)
    update_collection_aliases = make_method(QdrantClient.update_collection_aliases, writes.update_collection_aliases)


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

    query_points = make_method(AsyncQdrantClient.query_points, searches.query_points)
    query_batch_points = make_method(AsyncQdrantClient.query_batch_points, searches.query_batch_points)
    query_points_groups = make_method(AsyncQdrantClient.query_points_groups, searches.query_points_groups)
    retrieve = make_method(AsyncQdrantClient.retrieve, searches.retrieve)
    scroll = make_method(AsyncQdrantClient.scroll, searches.scroll)
    get_collection = make_method(AsyncQdrantClient.get_collection, searches.get_collection)
    get_collections = make_method(AsyncQdrantClient.get_collections, searches.get_collections)
    upsert = make_method(AsyncQdrantClient.upsert, writes.upsert)
    upload_points = make_method(AsyncQdrantClient.upload_points, writes.upload_points, run_inline=True)
    upload_collection = make_method(AsyncQdrantClient.upload_collection, writes.upload_collection, run_inline=True)
    update_vectors = make_method(AsyncQdrantClient.update_vectors, writes.update_vectors)
    delete_vectors = make_method(AsyncQdrantClient.delete_vectors, writes.delete_vectors)
    set_payload = make_method(AsyncQdrantClient.set_payload, writes.set_payload)
    overwrite_payload = make_method(AsyncQdrantClient.overwrite_payload, writes.overwrite_payload)
    clear_payload = make_method(AsyncQdrantClient.clear_payload, writes.clear_payload)
    delete_payload = make_method(AsyncQdrantClient.delete_payload, writes.delete_payload)
    batch_update_points = make_method(AsyncQdrantClient.batch_update_points, writes.batch_update_points)
    delete_vector_name = make_method(AsyncQdrantClient.delete_vector_name, writes.delete_vector_name)
    create_collection = make_method(AsyncQdrantClient.create_collection, writes.create_collection)
    recreate_collection = make_method(AsyncQdrantClient.recreate_collection, writes.recreate_collection)
    delete_collection = make_method(AsyncQdrantClient.delete_collection, writes.delete_collection)
    update_collection_aliases = make_method(
        AsyncQdrantClient.update_collection_aliases, writes.update_collection_aliases
    )
