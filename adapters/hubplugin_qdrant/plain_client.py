"""Everything that hubplugin uses of qdrant-client beyond its public interface, in one place.

Each function has a test in tests/qdrant/test_plain_client.py, and pyproject.toml bounds the version of qdrant-client
above: these names may change in any release.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from uuid import UUID, uuid4

import numpy as np
from pydantic import BaseModel
from qdrant_client import AsyncQdrantClient, QdrantClient, grpc, models
from qdrant_client import qdrant_client as client_module
from qdrant_client.conversions.conversion import GrpcToRest
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


def _speaks_grpc(client: QdrantClient | AsyncQdrantClient) -> bool:
    return bool(getattr(client._client, "_prefer_grpc", False))


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
"""What `read_points`, `read_updates`, `read_operations` and `read_rows` raise for what the client does not take. It is
the client's own to refuse."""


def read_points(
    client: QdrantClient | AsyncQdrantClient, points: Any
) -> list[models.PointStruct]:
    """`points` one by one, with their documents embedded, as far as `upsert` of `client` takes them: local mode
    whatever has an id, a vector and a payload; a client by gRPC its messages, too; one by REST dicts as well."""
    if isinstance(points, models.Batch):
        return embed(client, structs_of(points))
    messages = _speaks_grpc(client) and isinstance(points, Collection)
    if not isinstance(points, list) and not (
        messages and all(isinstance(point, grpc.PointStruct) for point in points)
    ):
        raise TypeError(
            f"expected a Batch or a list of points, got {type(points).__name__}"
        )

    def read(point: Any) -> models.PointStruct:
        if isinstance(point, models.PointStruct):
            return point
        if is_local(client):
            return as_struct(point)
        if isinstance(point, grpc.PointStruct):
            return GrpcToRest.convert_point_struct(point)
        if isinstance(point, dict) and not _speaks_grpc(client):
            return models.PointStruct.model_validate(point)
        raise TypeError(f"expected a point, got {type(point).__name__}")

    return embed(client, [read(point) for point in points])


def structs_of(batch: models.Batch) -> list[models.PointStruct]:
    """The points of `batch`. Raises ValueError where it has not as many of each: that is the client's own to refuse."""
    vectors: Any = batch.vectors
    if isinstance(vectors, dict):
        vectors = [
            dict(zip(vectors, row, strict=True))
            for row in zip(*vectors.values(), strict=True)
        ]
    payloads = [None] * len(batch.ids) if batch.payloads is None else batch.payloads
    return [
        models.PointStruct.model_construct(id=key, vector=vector, payload=payload)
        for key, vector, payload in zip(batch.ids, vectors, payloads, strict=True)
    ]


def as_struct(point: Any) -> models.PointStruct:
    """Whatever has an id, a vector and a payload as a structure: an upload takes nothing else."""
    return models.PointStruct.model_construct(
        id=point.id, vector=point.vector, payload=point.payload
    )


def read_updates(
    client: QdrantClient | AsyncQdrantClient, points: Any
) -> list[models.PointVectors]:
    """`points`, with their documents embedded, as far as `update_vectors` of `client` takes them: whatever has an id
    and a vector; by REST nothing but structures and dicts."""
    updates = _as_list(client, points)
    if is_local(client) or _speaks_grpc(client):
        updates = [
            models.PointVectors.model_construct(id=point.id, vector=point.vector)
            for point in updates
        ]
    else:
        updates = models.UpdateVectors(points=updates).points
    if not all(isinstance(update.id, (int, str, UUID)) for update in updates):
        raise TypeError("expected ids")
    return embed(client, updates)


def read_operations(
    client: QdrantClient | AsyncQdrantClient, operations: Any
) -> list[models.UpdateOperation]:
    """`operations`, with their documents embedded and batches as points one by one, as far as `batch_update_points` of
    `client` takes them: by REST also dicts. By gRPC and in local mode what is no operation stays where it is: local
    mode does those before it."""
    operations = _as_list(client, operations)
    if not is_local(client) and not _speaks_grpc(client):
        operations = models.UpdateOperations(operations=operations).operations
    return embed(client, [_one_by_one(operation) for operation in operations])


def _one_by_one(operation: models.UpdateOperation) -> models.UpdateOperation:
    """`operation`; an upsert of a batch as one of points, unless the batch is the client's own to refuse."""
    upsert = getattr(operation, "upsert", None)
    if not isinstance(upsert, models.PointsBatch):
        return operation
    options = {
        name: value for name, value in upsert.__dict__.items() if name != "batch"
    }
    try:
        points = models.PointsList.model_construct(
            points=structs_of(upsert.batch), **options
        )
    except UNREADABLE:
        return operation
    return models.UpsertOperation(upsert=points)


def _as_list(client: QdrantClient | AsyncQdrantClient, items: Any) -> list[Any]:
    """`items` as a list. Local mode takes no stream; of one to a server the client itself loses what it looks at."""
    if is_local(client) and not isinstance(items, Collection):
        raise TypeError(f"expected a list, got {type(items).__name__}")
    return list(items)


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
