"""The clients `HubQdrantClient` and `AsyncHubQdrantClient`, which search corrected.

They are subclasses of `QdrantClient` and `AsyncQdrantClient`. Each method in
`CORRECTED` has the signature of the plain method, and runs an operation of `searches`
or `writes`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

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

Record: TypeAlias = "str | os.PathLike[str] | Recorder | None"
"""A folder, or a `Recorder` with other settings. None turns recording off."""

Clicked: TypeAlias = "VectorLike | models.Document | str"
"""The query of a click: a vector, a document, or the id of the query."""

SEARCHES = (
    "query_points",
    "query_batch_points",
    "query_points_groups",
    "retrieve",
    "scroll",
    "get_collection",
)

WRITES = (
    "upsert",
    "upload_points",
    "upload_collection",
    "update_vectors",
    "delete_vectors",
    "set_payload",
    "overwrite_payload",
    "clear_payload",
    "batch_update_points",
    "delete_vector_name",
    "create_collection",
    "recreate_collection",
    "delete_collection",
    "update_collection_aliases",
)

CORRECTED: dict[str, OfClient] = {
    **{name: getattr(searches, name) for name in SEARCHES},
    **{name: getattr(writes, name) for name in WRITES},
}
"""The methods that a corrected client replaces."""


class _Corrected(Generic[Client]):
    """The base class of both clients.

    _plain: The class of the plain client.
    _corrections: The manifests and models of corrected collections.
    """

    _plain: ClassVar[Any]
    _corrections: CorrectionCache

    def __init__(self, *args: Any, record: Record = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        raw = plain_client.clone_client(self, self._plain)
        self._corrections = _make_cache(raw, record)

    @classmethod
    def wrap(cls, client: Any, *, record: Record = None) -> Self:
        """Return a corrected client over the connection of `client`.

        Closing either client closes both.

        Args:
            client: A plain or corrected client. It must be sync for `HubQdrantClient`,
                and async for `AsyncHubQdrantClient`.
            record: The same as `record` of the class. By default, the queries of a
                corrected client are still recorded.

        Returns:
            The corrected client.

        Raises:
            InputError: If `client` is of another kind, or `record` is neither a folder
                nor a `Recorder`.
        """
        raw = require_client(client, cls._plain)
        if record is None and isinstance(client, _Corrected):
            record = client._corrections.recorder
        corrections = _make_cache(raw, record)
        wrapped = plain_client.clone_client(raw, cls)
        wrapped._corrections = corrections
        return wrapped

    def __repr__(self) -> str:
        options = self._corrections.raw.init_options
        places = [options.get(name) for name in ("url", "path", "host", "location")]
        place = next(filter(None, places), "localhost")
        return f"<{type(self).__name__}: {without_secrets(str(place))}>"

    @property
    def raw(self) -> Client:
        """The plain client on the same connection, which shows the data as stored."""
        raw: Client = self._corrections.raw
        return raw


def require_client(client: Any, kind: type[Client]) -> Client:
    """Return the plain client of `client`, which may be plain or wrapped.

    Raises InputError unless `client` is a `kind` or behaves like one.
    """
    other = AsyncQdrantClient if kind is QdrantClient else QdrantClient
    if isinstance(client, other) or not hasattr(client, "query_points"):
        raise InputError(
            f"expected a client of the class {kind.__name__}, plain or wrapped, not "
            f"{type(client).__name__}; connect one to the same place: "
            f"{kind.__name__}(...)"
        )
    plain: Client = client.raw if isinstance(client, _Corrected) else client
    return plain


def _make_cache(raw: Any, record: Record) -> CorrectionCache:
    """Return the cache of a client over `raw`, with a recorder if one is wanted.

    Raises InputError for a `record` that is neither a folder nor a `Recorder`.
    """
    if isinstance(record, (str, os.PathLike)):
        record = Recorder(record)
    if record is not None and not isinstance(record, Recorder):
        raise InputError(
            f"record={record!r}: expected a folder, or a hubplugin.Recorder"
        )
    return CorrectionCache(raw, recorder=record)


class HubQdrantClient(_Corrected[QdrantClient], QdrantClient):
    """A QdrantClient that applies the correction of a collection to searches.

    It takes the arguments of QdrantClient, and adds offsets to the points that it
    writes to corrected collections. On a collection without a correction, every method
    does the same as in QdrantClient. The manifest of a collection is read on first use
    and again every 10 seconds.

    record: A folder that keeps a sample of the dense queries to each collection and
        vector, for a query bank. By default nothing is recorded. Pass
        `hubplugin.Recorder(folder, collections=["photos"])` to record only the queries
        to "photos", or to change other settings. See docs/recording.md.
    """

    _plain = QdrantClient

    def click(
        self,
        collection_name: str,
        query: Clicked,
        target: models.ExtendedPointId,
        using: str | None = None,
    ) -> None:
        """Record that `target` was clicked in the answer to `query`.

        See docs/recording.md.

        Args:
            collection_name: The collection that was searched, or an alias.
            query: A vector, a document that the client embeds, or the id that
                `hubplugin.Recorder.id_of(vector)` returns.
            target: The id of a point.
            using: The name of the vector that was searched.

        Raises:
            InputError: If the client does not record. No other error is ever raised.
        """
        run(searches.click(self._corrections, collection_name, query, target, using))

    def close(self, grpc_grace: float | None = None, **kwargs: Any) -> None:
        """Write the recorded queries to disk, then close as QdrantClient does."""
        if self._corrections.recorder is not None:
            self._corrections.recorder.flush()
        super().close(grpc_grace, **kwargs)

    def __del__(self) -> None:
        """Do nothing: `raw` closes the connection, and others may still use it."""

    def migrate(self, dest_client: QdrantBase, *args: Any, **kwargs: Any) -> None:
        """Migrate collections as they are stored.

        The correction of a collection is in "<collection>--hub". If you name
        collections, name that one, too.
        """
        if isinstance(dest_client, HubQdrantClient):
            dest_client = dest_client.raw
        self.raw.migrate(dest_client, *args, **kwargs)


class AsyncHubQdrantClient(_Corrected[AsyncQdrantClient], AsyncQdrantClient):
    """An AsyncQdrantClient that corrects searches as `HubQdrantClient` does.

    Offsets are computed in a thread.
    """

    _plain = AsyncQdrantClient

    async def click(
        self,
        collection_name: str,
        query: Clicked,
        target: models.ExtendedPointId,
        using: str | None = None,
    ) -> None:
        """Record a click as `HubQdrantClient.click` does."""
        await run_async(
            searches.click(self._corrections, collection_name, query, target, using)
        )

    async def close(self, grpc_grace: float | None = None, **kwargs: Any) -> None:
        """Write the recorded queries to disk, then close as AsyncQdrantClient does."""
        if self._corrections.recorder is not None:
            await asyncio.to_thread(self._corrections.recorder.flush)
        await super().close(grpc_grace, **kwargs)


def make_method(plain: Any, operation: OfClient) -> Any:
    """Return a method that runs `operation`, with the signature of the method `plain`.

    The method is a coroutine function if `plain` is one.
    """
    signature = inspect.signature(plain)

    def start_operation(self: Any, *args: object, **kwargs: object) -> Operation[Any]:
        arguments = signature.bind(self, *args, **kwargs).arguments
        del arguments["self"]
        # Flatten **kwargs: the plain client raises on names that it does not know.
        arguments |= arguments.pop("kwargs", {})
        return operation(self._corrections, arguments)

    @functools.wraps(plain)
    def method(self: Any, *args: object, **kwargs: object) -> Any:
        return run(start_operation(self, *args, **kwargs))

    @functools.wraps(plain)
    async def coroutine(self: Any, *args: object, **kwargs: object) -> Any:
        return await run_async(start_operation(self, *args, **kwargs))

    return coroutine if inspect.iscoroutinefunction(plain) else method


def in_sync(operation: OfClient) -> OfClient:
    """Return `operation`, an upload, for the async client.

    The uploads of that client are not coroutines, so a sync client to the same server
    runs `operation`.
    """

    def upload(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
        if plain_client.is_local(cache.raw):
            return (yield from operation(cache, arguments))
        sync = QdrantClient(**cache.raw.init_options)
        try:
            return (yield from operation(CorrectionCache(sync), arguments))
        finally:
            sync.close()

    return upload


for kind in (HubQdrantClient, AsyncHubQdrantClient):
    for name, operation in CORRECTED.items():
        plain = getattr(kind._plain, name)
        if kind is AsyncHubQdrantClient and not inspect.iscoroutinefunction(plain):
            operation = in_sync(operation)
        setattr(kind, name, make_method(plain, operation))
