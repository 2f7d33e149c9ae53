"""`HubQdrantClient` and `AsyncHubQdrantClient`: qdrant-client's own, with corrected
collections searched corrected.

A corrected method is an operation of `searches` or `writes`, which `run` or
`run_async` drives; it is `like` the plain one, whose signature it has.
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
from hubplugin.registry import without_secrets
from hubplugin.vectors import VectorLike
from hubplugin_qdrant import plain_client, searches, writes
from hubplugin_qdrant.calls import Operation, run, run_async
from hubplugin_qdrant.metadata import CorrectionCache, OfClient
from hubplugin_qdrant.plain_client import Arguments

Client = TypeVar("Client", QdrantClient, AsyncQdrantClient)
Method = TypeVar("Method", bound=Callable[..., Any])


Record: TypeAlias = "str | os.PathLike[str] | Recorder | None"
"""A folder, or a `Recorder` with other settings; None to record nothing."""

Clicked: TypeAlias = "VectorLike | models.Document | str"
"""The query of a click: a vector, a document, or its id."""


def require_client(client: object, kind: type[Client]) -> Client:
    """Return the plain client of `client`, plain or wrapped, which is a `kind` or acts
    like one; InputError for others."""
    other = AsyncQdrantClient if kind is QdrantClient else QdrantClient
    if isinstance(client, other) or not hasattr(client, "query_points"):
        raise InputError(
            f"expected a client of the class {kind.__name__}, plain or wrapped, not {type(client).__name__}; "
            f"connect one to the same place: {kind.__name__}(...)"
        )
    if isinstance(client, (HubQdrantClient, AsyncHubQdrantClient)):
        return client.raw  # type: ignore[return-value]
    return client  # type: ignore[return-value]


def like(plain: Method, operation: OfClient) -> Method:
    """Return a method of the type of `plain`, qdrant-client's own, that does
    `operation` on its arguments."""
    signature = inspect.signature(plain)

    def begin(self: Any, *args: object, **kwargs: object) -> Operation[Any]:
        arguments = signature.bind(self, *args, **kwargs).arguments
        del arguments["self"]
        arguments |= arguments.pop("kwargs", {})  # the plain client refuses these
        return operation(self._corrections, arguments)

    @functools.wraps(plain)
    def method(self: Any, *args: object, **kwargs: object) -> Any:
        return run(begin(self, *args, **kwargs))

    @functools.wraps(plain)
    async def coroutine(self: Any, *args: object, **kwargs: object) -> Any:
        return await run_async(begin(self, *args, **kwargs))

    is_async = inspect.iscoroutinefunction(plain)
    return cast(Method, coroutine if is_async else method)


def in_sync(operation: OfClient) -> OfClient:
    """Return `operation`, an upload, for the async client, whose uploads are no
    coroutines: it goes through a sync client to the same place."""

    def upload(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
        if plain_client.is_local(cache.raw):
            return (yield from operation(cache, arguments))
        sync = QdrantClient(**cache.raw.init_options)
        try:
            return (yield from operation(CorrectionCache(sync), arguments))
        finally:
            sync.close()

    return upload


class _Corrected:
    """What both clients share: how they are made, and what they know of corrections."""

    _plain: ClassVar[type[QdrantClient] | type[AsyncQdrantClient]]
    _corrections: CorrectionCache

    def __init__(self, *args: Any, record: Record = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        raw: Any = plain_client.clone_client(cast(Any, self), self._plain)
        self._corrections = _make_cache(raw, record)

    def __repr__(self) -> str:
        options = self._corrections.raw.init_options
        places = (options.get(name) for name in ("url", "path", "host", "location"))
        place = next(filter(None, places), "localhost")
        return f"<{type(self).__name__}: {without_secrets(str(place))}>"

    @classmethod
    def wrap(cls, client: Any, *, record: Record = None) -> Self:
        """Return a corrected client over the connection of `client`; closing either
        closes both.

        Args:
            client: A plain client, or a wrapped one, sync or async as this class.
            record: As of the class.

        Returns:
            The corrected client.

        Raises:
            InputError: For a client of another kind, or a `record` that is no folder.
        """
        raw: Any = require_client(client, cast("type[QdrantClient]", cls._plain))
        corrections = _make_cache(raw, record)
        wrapped: Any = plain_client.clone_client(raw, cast(Any, cls))
        wrapped._corrections = corrections
        return cast(Self, wrapped)


def _make_cache(raw: Any, record: Record) -> CorrectionCache:
    """Raises InputError for a `record` that is neither a folder nor a `Recorder`."""
    if isinstance(record, (str, os.PathLike)):
        record = Recorder(record)
    if record is not None and not isinstance(record, Recorder):
        raise InputError(
            f"record={record!r}: expected a folder, or a hubplugin.Recorder"
        )
    return CorrectionCache(raw, recorder=record)


class HubQdrantClient(_Corrected, QdrantClient):
    """A QdrantClient that searches corrected collections corrected, and gives offsets
    to what it writes there.

    It takes the arguments of QdrantClient. On a collection without a correction every
    method is QdrantClient's. The manifest of a collection is read on first use and
    again every 10 seconds.

    record: a folder, in which a sample of the dense queries to each collection and
    vector is kept, for a query bank; nothing is kept by default.
    `hubplugin.Recorder(folder, collections=["photos"])` keeps those to "photos" alone,
    and has further settings. See docs/recording.md.
    """

    _plain = QdrantClient

    @property
    def raw(self) -> QdrantClient:
        """The plain client on the same connection, which sees a collection as it lies
        in the store."""
        raw: QdrantClient = self._corrections.raw
        return raw

    def click(
        self,
        collection_name: str,
        query: Clicked,
        target: models.ExtendedPointId,
        using: str | None = None,
    ) -> None:
        """Record that `target` was clicked in the answer to `query`. See
        docs/recording.md.

        Args:
            collection_name: The collection that was searched, or an alias.
            query: A vector, a document that the client embeds, or the id that
                `hubplugin.Recorder.id_of(vector)` returns.
            target: The id of a point.
            using: The name of the vector that was searched.

        Raises:
            InputError: For a client that records nothing; nothing else is ever raised.
        """
        run(searches.click(self._corrections, collection_name, query, target, using))

    def close(self, grpc_grace: float | None = None, **kwargs: Any) -> None:
        """Close as QdrantClient does, with `grpc_grace` and `kwargs`, once recorded
        queries are on disk."""
        if self._corrections.recorder is not None:
            self._corrections.recorder.flush()
        super().close(grpc_grace, **kwargs)

    def __del__(self) -> None:
        """The connection is closed by `raw`, which has no other owner or one outside."""

    def migrate(self, dest_client: QdrantBase, *args: Any, **kwargs: Any) -> None:
        """Migrate as QdrantClient does, to `dest_client`, with `args` and `kwargs`,
        collections as they lie in the store.

        The correction of one is in "<collection>--hub", which must be named, too,
        where names are given.
        """
        if isinstance(dest_client, HubQdrantClient):
            dest_client = dest_client.raw
        self.raw.migrate(dest_client, *args, **kwargs)

    query_points = like(QdrantClient.query_points, searches.query_points)
    query_batch_points = like(
        QdrantClient.query_batch_points, searches.query_batch_points
    )
    query_points_groups = like(
        QdrantClient.query_points_groups, searches.query_points_groups
    )
    retrieve = like(QdrantClient.retrieve, searches.retrieve)
    scroll = like(QdrantClient.scroll, searches.scroll)
    get_collection = like(QdrantClient.get_collection, searches.get_collection)
    upsert = like(QdrantClient.upsert, writes.upsert)
    upload_points = like(QdrantClient.upload_points, writes.upload_points)
    upload_collection = like(QdrantClient.upload_collection, writes.upload_collection)
    update_vectors = like(QdrantClient.update_vectors, writes.update_vectors)
    delete_vectors = like(QdrantClient.delete_vectors, writes.delete_vectors)
    set_payload = like(QdrantClient.set_payload, writes.set_payload)
    overwrite_payload = like(QdrantClient.overwrite_payload, writes.overwrite_payload)
    clear_payload = like(QdrantClient.clear_payload, writes.clear_payload)
    batch_update_points = like(
        QdrantClient.batch_update_points, writes.batch_update_points
    )
    delete_vector_name = like(
        QdrantClient.delete_vector_name, writes.delete_vector_name
    )
    create_collection = like(QdrantClient.create_collection, writes.create_collection)
    recreate_collection = like(
        QdrantClient.recreate_collection, writes.recreate_collection
    )
    delete_collection = like(QdrantClient.delete_collection, writes.delete_collection)
    update_collection_aliases = like(
        QdrantClient.update_collection_aliases, writes.update_collection_aliases
    )


class AsyncHubQdrantClient(_Corrected, AsyncQdrantClient):
    """An AsyncQdrantClient that does what `HubQdrantClient` does; offsets are computed
    in a thread."""

    _plain = AsyncQdrantClient

    @property
    def raw(self) -> AsyncQdrantClient:
        """The plain client on the same connection, which sees a collection as it lies
        in the store."""
        raw: AsyncQdrantClient = self._corrections.raw
        return raw

    async def click(
        self,
        collection_name: str,
        query: Clicked,
        target: models.ExtendedPointId,
        using: str | None = None,
    ) -> None:
        """Do as `HubQdrantClient.click`, with the same `collection_name`, `query`,
        `target` and `using`."""
        await run_async(
            searches.click(self._corrections, collection_name, query, target, using)
        )

    async def close(self, grpc_grace: float | None = None, **kwargs: Any) -> None:
        """Close as AsyncQdrantClient does, with `grpc_grace` and `kwargs`, once
        recorded queries are on disk."""
        if self._corrections.recorder is not None:
            await asyncio.to_thread(self._corrections.recorder.flush)
        await super().close(grpc_grace, **kwargs)

    query_points = like(AsyncQdrantClient.query_points, searches.query_points)
    query_batch_points = like(
        AsyncQdrantClient.query_batch_points, searches.query_batch_points
    )
    query_points_groups = like(
        AsyncQdrantClient.query_points_groups, searches.query_points_groups
    )
    retrieve = like(AsyncQdrantClient.retrieve, searches.retrieve)
    scroll = like(AsyncQdrantClient.scroll, searches.scroll)
    get_collection = like(AsyncQdrantClient.get_collection, searches.get_collection)
    upsert = like(AsyncQdrantClient.upsert, writes.upsert)
    upload_points = like(AsyncQdrantClient.upload_points, in_sync(writes.upload_points))
    upload_collection = like(
        AsyncQdrantClient.upload_collection, in_sync(writes.upload_collection)
    )
    update_vectors = like(AsyncQdrantClient.update_vectors, writes.update_vectors)
    delete_vectors = like(AsyncQdrantClient.delete_vectors, writes.delete_vectors)
    set_payload = like(AsyncQdrantClient.set_payload, writes.set_payload)
    overwrite_payload = like(
        AsyncQdrantClient.overwrite_payload, writes.overwrite_payload
    )
    clear_payload = like(AsyncQdrantClient.clear_payload, writes.clear_payload)
    batch_update_points = like(
        AsyncQdrantClient.batch_update_points, writes.batch_update_points
    )
    delete_vector_name = like(
        AsyncQdrantClient.delete_vector_name, writes.delete_vector_name
    )
    create_collection = like(
        AsyncQdrantClient.create_collection, writes.create_collection
    )
    recreate_collection = like(
        AsyncQdrantClient.recreate_collection, writes.recreate_collection
    )
    delete_collection = like(
        AsyncQdrantClient.delete_collection, writes.delete_collection
    )
    update_collection_aliases = like(
        AsyncQdrantClient.update_collection_aliases, writes.update_collection_aliases
    )
