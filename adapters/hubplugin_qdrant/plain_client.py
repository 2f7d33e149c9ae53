"""Everything that hubplugin uses of qdrant-client beyond its public interface, in one place.

pyproject.toml bounds the version of qdrant-client above: these names may change in any
release.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from uuid import UUID, uuid4

import numpy as np
from qdrant_client import AsyncQdrantClient, QdrantClient, models
from qdrant_client.local.async_qdrant_local import AsyncQdrantLocal
from qdrant_client.local.qdrant_local import QdrantLocal

PointId: TypeAlias = models.ExtendedPointId

ShardKey: TypeAlias = models.ShardKeySelector | None

Arguments: TypeAlias = dict[str, Any]
"""The arguments of a client's method, by name."""

Kind = TypeVar("Kind", bound="QdrantClient | AsyncQdrantClient")


def is_local(client: QdrantClient | AsyncQdrantClient) -> bool:
    """Whether `client` is qdrant-client's local mode, which searches in this process and has no server."""
    return isinstance(client._client, (QdrantLocal, AsyncQdrantLocal))


def folder_of(client: QdrantClient) -> Path | None:
    """The folder of a local mode that keeps what it holds; None of a server, and in memory."""
    local = client._client
    return (
        Path(local.location)
        if isinstance(local, QdrantLocal) and local.persistent
        else None
    )


def address(client: QdrantClient) -> str:
    """Where the HTTP interface of the server of `client` is; where it would be by default, in local mode."""
    return str(getattr(client._client, "rest_uri", "http://localhost:6333")).rstrip("/")


def clone_client(client: QdrantClient | AsyncQdrantClient, kind: type[Kind]) -> Kind:
    """A client of the class `kind` on the connection of `client`, sharing all that it has."""
    clone = kind.__new__(kind)
    clone.__dict__.update(client.__dict__)
    return clone


def resolve(query: Any) -> Any:
    """What the client makes of the `query` of its search methods before anything else: a vector, an id or a document
    becomes a NearestQuery. Raises what the client raises for what cannot be one."""
    if (
        type(query) is np.ndarray and query.ndim == 1 and query.dtype.kind == "f"
    ):  # which need not be validated
        return models.NearestQuery.model_construct(nearest=query.tolist())
    return QdrantClient._resolve_query(query)


def field_of(of: Any, name: str) -> Any:
    """Return the field `name` of a structure or a dict, None if it has none."""
    return of.get(name) if isinstance(of, dict) else getattr(of, name, None)


def ids_of(points: Any) -> list[PointId]:
    """Return the ids of `points`, or of a batch, or the ids themselves.

    What is no id is left out: the plain client refuses it.
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


def listen(ids: Iterable[Any] | None, heard: list[PointId]) -> Iterator[Any]:
    """Yield `ids`, new ones where there are none, and note in `heard` what is taken."""
    for key in iter(uuid4, None) if ids is None else ids:
        each = str(key) if ids is None else key
        heard += ids_of([each])
        yield each


def bodies_of(operations: Any) -> list[Any]:
    """Return what each of the update `operations` says, in its only field."""
    bodies = []
    for operation in operations if isinstance(operations, Sequence) else ():
        fields = operation
        if not isinstance(operation, dict):
            fields = getattr(operation, "__dict__", {})
        bodies += list(fields.values())[:1]
    return bodies


def embed(
    client: QdrantClient | AsyncQdrantClient, items: list[Any], is_query: bool = False
) -> list[Any]:
    """`items` with their documents embedded as `client` would do it; they are requests if `is_query`, else points or
    vectors or operations."""
    if client.cloud_inference or not client._inference_inspector.inspect(items):
        return items
    return list(
        client._embed_models(
            items, is_query=is_query, batch_size=client.local_inference_batch_size
        )
    )
