"""Everything that hubplugin uses of qdrant-client beyond its public interface.

pyproject.toml sets an upper bound on the version of qdrant-client, because these names
may change in any release.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar
from uuid import UUID, uuid4

import numpy as np
from qdrant_client import AsyncQdrantClient, QdrantClient, models
from qdrant_client.local.async_qdrant_local import AsyncQdrantLocal
from qdrant_client.local.qdrant_local import QdrantLocal
from qdrant_client.uploader.uploader import BaseUploader

PointId: TypeAlias = models.ExtendedPointId

ShardKey: TypeAlias = models.ShardKeySelector | None

Arguments: TypeAlias = dict[str, Any]
"""The arguments of a client's method, by name."""

Kind = TypeVar("Kind")


def is_local(client: QdrantClient | AsyncQdrantClient) -> bool:
    """Return True if `client` is in local mode, which has no server."""
    return isinstance(client._client, (QdrantLocal, AsyncQdrantLocal))


def folder_of(client: QdrantClient) -> Path | None:
    """Return the folder in which local mode keeps its points.

    Return None for a server, and for local mode in memory.
    """
    local = client._client
    if isinstance(local, QdrantLocal) and local.persistent:
        return Path(local.location)
    return None


def clone_client(client: Any, kind: type[Kind]) -> Kind:
    """Return a client of the class `kind` with all attributes of `client`.

    The two clients share one connection.
    """
    clone = kind.__new__(kind)
    clone.__dict__.update(client.__dict__)
    return clone


def resolve(query: Any) -> Any:
    """Convert `query` as the client's search methods do.

    A vector, an id or a document becomes a NearestQuery. Raises the same errors as the
    client for a query that it does not know.
    """
    is_array = type(query) is np.ndarray and query.ndim == 1
    if is_array and query.dtype.kind == "f":
        # Skip the validation, which is slow and not needed for floats.
        return models.NearestQuery.model_construct(nearest=query.tolist())
    return QdrantClient._resolve_query(query)


def field_of(owner: Any, name: str) -> Any:
    """Return the field `name` of a structure or a dict, or None."""
    if isinstance(owner, dict):
        return owner.get(name)
    return getattr(owner, name, None)


def ids_of(points: Any) -> list[PointId]:
    """Return the ids of `points`, which may be points, a batch, or a list of ids.

    Items without an id are skipped: the plain client refuses them.
    """
    if isinstance(points, models.Batch):
        return list(points.ids)
    if not isinstance(points, Sequence) or isinstance(points, str):
        return []
    ids: list[PointId] = []
    for point in points:
        key = point if isinstance(point, ID_TYPES) else field_of(point, "id")
        if isinstance(key, ID_TYPES):
            ids.append(key)
    return ids


ID_TYPES = (int, str, UUID)


def points_of_columns(
    client: QdrantClient | AsyncQdrantClient, arguments: Arguments
) -> Iterator[models.PointStruct]:
    """Yield the points that `upload_collection` makes of its `arguments`.

    A clone of `client` checks the arguments and embeds documents. In place of the
    connection, it has functions that return their arguments.
    """
    clone: Any = clone_client(client, type(client))
    clone._client = SimpleNamespace(upload_collection=dict, close=dict)
    columns = clone.upload_collection(**arguments)
    rows = BaseUploader.iterate_batches(
        columns["vectors"], columns["payload"], columns["ids"], batch_size=1
    )
    for ids, (vector,), payloads in rows:
        if isinstance(vector, np.ndarray):
            vector = vector.tolist()
        # A batch has one row; without ids or payloads, these are None.
        (key,) = ids or [str(uuid4())]
        (payload,) = payloads or [None]
        yield models.PointStruct(id=key, vector=vector or {}, payload=payload)


def bodies_of(operations: Any) -> list[Any]:
    """Return the body of each of the update `operations`.

    An operation has a single field, such as `upsert` or `set_payload`, whose value is
    the body. Anything else is skipped: the plain client refuses it.
    """
    if not isinstance(operations, Sequence):
        return []
    bodies: list[Any] = []
    for operation in operations:
        fields = operation
        if not isinstance(operation, dict):
            fields = getattr(operation, "__dict__", {})
        bodies += list(fields.values())[:1]
    return bodies


def embed(client: QdrantClient | AsyncQdrantClient, requests: list[Any]) -> list[Any]:
    """Return `requests` with documents embedded, as `client` would do it."""
    if client.cloud_inference or not client._inference_inspector.inspect(requests):
        return requests
    size = client.local_inference_batch_size
    return list(client._embed_models(requests, is_query=True, batch_size=size))
