"""Everything that hubplugin uses of qdrant-client beyond its public interface, in one place.

Each function has a test in tests/qdrant/test_plain_client.py, and pyproject.toml bounds the version of qdrant-client
above: these names may change in any release.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from uuid import UUID, uuid4

import numpy as np
from pydantic import BaseModel
from qdrant_client import AsyncQdrantClient, QdrantClient, models
from qdrant_client import qdrant_client as client_module
from qdrant_client.local.async_qdrant_local import AsyncQdrantLocal
from qdrant_client.local.qdrant_local import QdrantLocal

PointId: TypeAlias = models.ExtendedPointId

ShardKey: TypeAlias = models.ShardKeySelector | None

Arguments: TypeAlias = dict[str, Any]
"""The arguments of a client's method, by name."""

Kind = TypeVar("Kind", bound="QdrantClient | AsyncQdrantClient")
Model = TypeVar("Model", bound=BaseModel)


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


def copy_with(model: Model, fields: dict[str, Any]) -> Model:
    """`model` as `model_copy` returns it with new `fields`, in half of its time: a search makes several."""
    copy, put = object.__new__(type(model)), object.__setattr__
    put(copy, "__dict__", {**model.__dict__, **fields})
    put(copy, "__pydantic_fields_set__", model.__pydantic_fields_set__ | fields.keys())
    put(copy, "__pydantic_extra__", model.__pydantic_extra__)
    put(copy, "__pydantic_private__", None)
    return copy


_NEAREST = models.NearestQuery(nearest=[])


def resolve(query: Any) -> Any:
    """What the client makes of the `query` of its search methods before anything else: a vector, an id or a document
    becomes a NearestQuery. Raises what the client raises for what cannot be one."""
    if (
        type(query) is np.ndarray and query.ndim == 1 and query.dtype.kind == "f"
    ):  # which need not be validated
        return copy_with(_NEAREST, {"nearest": query.tolist()})
    return QdrantClient._resolve_query(query)


def resolve_prefetches(client: Any, collection: str, prefetches: Any) -> Any:
    """`prefetches` of groups in `collection` as `client` takes them: in local mode up to 1.18 with vectors in the place
    of ids."""
    return (
        client._client._resolve_prefetches_input(prefetches, collection)
        if is_local(client)
        else prefetches
    )


UNREADABLE = (AttributeError, TypeError, ValueError)
"""What `read_rows` raises for columns that are the plain client's own to refuse."""


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


def bodies_of(operations: Any) -> list[Any]:
    """Return what each of the update `operations` says, in its only field."""
    bodies = []
    for operation in operations if isinstance(operations, Sequence) else ():
        fields = operation
        if not isinstance(operation, dict):
            fields = getattr(operation, "__dict__", {})
        bodies += list(fields.values())[:1]
    return bodies


def read_rows(vectors: Any, ids: Any, payload: Any) -> Iterator[models.PointStruct]:
    """The points of `upload_collection`, as far as that takes `vectors`, `ids` and `payload`.

    Raises ValueError where ids or payloads end before vectors, of which the number is known; a client before 1.20
    writes the shorter number.
    """
    if isinstance(vectors, dict):
        counts = {column.shape[0] for column in vectors.values()}
        if len(counts) != 1 or not any(
            isinstance(column, np.ndarray) for column in vectors.values()
        ):
            raise ValueError("expected arrays of one length")
        vectors = [
            dict(zip(vectors, row, strict=True))
            for row in zip(*vectors.values(), strict=True)
        ]
    checks: Any = client_module
    count = (
        checks.vectors_length(vectors) if hasattr(checks, "require_length") else None
    )
    if count is not None:
        ids = checks.require_length(ids, count, "ids")
        payload = checks.require_length(payload, count, "payload")
    new_ids = (str(uuid4()) for _ in itertools.count())
    columns = (
        iter(vectors),
        new_ids if ids is None else iter(ids),
        itertools.repeat(None) if payload is None else payload,
    )
    return (
        models.PointStruct.model_construct(
            id=key, vector=_without_arrays(vector), payload=row
        )
        for vector, key, row in zip(*columns, strict=False)
    )


def _without_arrays(vector: Any) -> Any:
    """A vector, or vectors by name, as lists."""
    if isinstance(vector, dict):
        return {name: _without_arrays(value) for name, value in vector.items()}
    return vector.tolist() if isinstance(vector, np.ndarray) else vector


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
