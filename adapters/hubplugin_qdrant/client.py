"""`HubQdrantClient` and `AsyncHubQdrantClient`: qdrant-client's own, with corrected collections searched corrected.

Who traces qdrant-client, as OpenTelemetry's instrumentation does, puts layers around the methods of its classes by
`wrapt`. A corrected method runs within those of the plain one that it stands for, so that a call is one span, and what
it asks the plain client for runs beneath them.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

from qdrant_client import AsyncQdrantClient, QdrantClient, models
from qdrant_client.client_base import QdrantBase
from typing_extensions import Self

from hubplugin.errors import InputError
from hubplugin.recording import Recorder
from hubplugin.vectors import VectorLike
from hubplugin_qdrant import plain_client, searches, writes
from hubplugin_qdrant.metadata import CorrectionCache, OfClient, Operation, at_once, run, run_async
from hubplugin_qdrant.plain_client import Arguments

Client = TypeVar("Client", QdrantClient, AsyncQdrantClient)


Record: TypeAlias = "str | os.PathLike[str] | Recorder | None"
"""A folder, or a `Recorder` with other settings than the default's; None to record nothing."""

Clicked: TypeAlias = "VectorLike | models.Document | str"
"""The query of a click: a vector, a document, or its id."""


def recorder_of(record: Record) -> Recorder | None:
    """Raises InputError for what is neither a folder nor a `Recorder`."""
    if record is None or isinstance(record, Recorder):
        return record
    if isinstance(record, (str, os.PathLike)):
        return Recorder(record)
    raise InputError(f"record={record!r}: expected a folder, or a hubplugin.Recorder")


def require_client(client: object, kind: type[Client]) -> Client:
    """`client`, a `kind`, one that is wrapped or one that acts like it, as the plain one; InputError for others."""
    other = AsyncQdrantClient if kind is QdrantClient else QdrantClient
    if isinstance(client, other) or not hasattr(client, "query_points"):
        raise InputError(
            f"expected a client of the class {kind.__name__}, plain or wrapped, not {type(client).__name__}; "
            f"connect one to the same place: {kind.__name__}(...)"
        )
    return client.raw if isinstance(client, (HubQdrantClient, AsyncHubQdrantClient)) else client  # type: ignore[return-value]


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


Drive: TypeAlias = "Callable[[Any, OfClient, Arguments], Any]"
"""What does an operation for a client, with the arguments of a call."""


def _sync(client: Any, operation: OfClient, given: Arguments) -> Any:
    return run(operation(client._corrections, given))


async def _async(client: Any, operation: OfClient, given: Arguments) -> Any:
    return await run_async(operation(client._corrections, given))


def _async_upload(client: Any, operation: OfClient, given: Arguments) -> Any:
    """An upload of the async client is no coroutine: it goes through a sync client to the same place."""
    if plain_client.is_local(client):
        return _without_waiting(operation(replace(client._corrections, compute=at_once), given))
    sync = QdrantClient(**client.init_options)
    try:
        return run(operation(CorrectionCache(Beneath(sync), at_once), given))
    finally:
        sync.close()


def _without_waiting(steps: Operation) -> Any:
    """What `steps` returns, driven by an async client in local mode, whose coroutines never wait."""
    try:
        run_async(steps).send(None)
    except StopIteration as done:
        return done.value


def _corrected(plain: type, name: str, drive: Drive) -> Callable[..., Any]:
    """The method `name` of the class `plain`, done by its operation as `drive` does it."""
    method, operation = getattr(plain, name), OPERATIONS[name]
    arguments = _arguments(method)

    @functools.wraps(method)
    def corrected(self: Any, *args: object, **given: object) -> Any:
        def call(*args: object, **given: object) -> Any:
            return drive(self, operation, arguments(args, given))

        return _within_layers(vars(plain)[name], call, self)(*args, **given)

    if drive is not _async:
        return corrected

    @functools.wraps(method)
    async def awaited(self: Any, *args: object, **given: object) -> Any:
        return await corrected(self, *args, **given)

    return awaited


OPERATIONS: dict[str, OfClient] = {
    "query_points": searches.query_points,
    "query_batch_points": searches.query_batch_points,
    "query_points_groups": searches.query_points_groups,
    "retrieve": searches.retrieve,
    "scroll": searches.scroll,
    "upsert": writes.upsert,
    "upload_points": writes.upload_points,
    "upload_collection": writes.upload_collection,
    "update_vectors": writes.update_vectors,
    "delete_vectors": writes.delete_vectors,
    "set_payload": writes.set_payload,
    "overwrite_payload": writes.overwrite_payload,
    "clear_payload": writes.clear_payload,
    "delete_payload": writes.delete_payload,
    "batch_update_points": writes.batch_update_points,
    "get_collection": searches.get_collection,
    "get_collections": searches.get_collections,
    "delete_vector_name": writes.delete_vector_name,
    "create_collection": writes.create_collection,
    "recreate_collection": writes.recreate_collection,
    "delete_collection": writes.delete_collection,
    "update_collection_aliases": writes.update_collection_aliases,
}
"""The methods of both clients that are done by an operation."""

UPLOADS = ("upload_points", "upload_collection")
"""Those that are no coroutines of the async client."""


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
        self._corrections = self._known_by(raw, oversampling, hnsw_ef, record)

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
        corrections = cls._known_by(raw, oversampling, hnsw_ef, record)
        wrapped: Any = plain_client.over_connection_of(raw, cast(Any, cls))
        wrapped._corrections = corrections
        return cast(Self, wrapped)

    @classmethod
    def _known_by(cls, raw: Any, oversampling: float | None, hnsw_ef: int | None, record: Record) -> CorrectionCache:
        compute: Any = asyncio.to_thread if cls._plain is AsyncQdrantClient else at_once
        return CorrectionCache(Beneath(raw), compute, oversampling, hnsw_ef, recorder_of(record))


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


for _name in OPERATIONS:
    setattr(HubQdrantClient, _name, _corrected(QdrantClient, _name, _sync))
    _drive = _async_upload if _name in UPLOADS else _async
    setattr(AsyncHubQdrantClient, _name, _corrected(AsyncQdrantClient, _name, _drive))
