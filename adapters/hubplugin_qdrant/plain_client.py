"""Everything that hubplugin uses of qdrant-client beyond its public interface, in one place.

Each function has a test in tests/qdrant/test_plain_client.py, and pyproject.toml bounds the version of qdrant-client
above: these names may change in any release.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast
from uuid import UUID, uuid4

import httpx
import numpy as np
from pydantic import BaseModel
from qdrant_client import AsyncQdrantClient, QdrantClient, grpc, models
from qdrant_client import qdrant_client as client_module
from qdrant_client.connection import get_channel
from qdrant_client.conversions.conversion import GrpcToRest, RestToGrpc
from qdrant_client.local.async_qdrant_local import AsyncQdrantLocal
from qdrant_client.local.qdrant_local import QdrantLocal
from qdrant_client.qdrant_remote import QdrantRemote

PointId: TypeAlias = models.ExtendedPointId

ShardKey: TypeAlias = models.ShardKeySelector | None

Arguments: TypeAlias = dict[str, Any]
"""The arguments of a client's method, by name."""

Kind = TypeVar("Kind", bound="QdrantClient | AsyncQdrantClient")
Model = TypeVar("Model", bound=BaseModel)

PAGE_SECONDS = 60.0
"""For how long a page of vectors may be under way by gRPC, where the client's own limit, 5 s by default, is for the
whole page. By REST it is for each piece of it."""

Scrolled: TypeAlias = tuple[list[models.Record], PointId | None]
Scroll: TypeAlias = Callable[..., Scrolled]


def is_local(client: QdrantClient | AsyncQdrantClient) -> bool:
    """Whether `client` is qdrant-client's local mode, which searches in this process and has no server."""
    return isinstance(client._client, (QdrantLocal, AsyncQdrantLocal))


def folder_of(client: QdrantClient) -> Path | None:
    """The folder of a local mode that keeps what it holds; None of a server, and in memory."""
    local = client._client
    return Path(local.location) if isinstance(local, QdrantLocal) and local.persistent else None


def address(client: QdrantClient) -> str:
    """Where the HTTP interface of the server of `client` is; where it would be by default, in local mode."""
    return str(getattr(client._client, "rest_uri", "http://localhost:6333")).rstrip("/")


def over_connection_of(client: QdrantClient | AsyncQdrantClient, kind: type[Kind]) -> Kind:
    """A client of the class `kind` on the connection of `client`, sharing all that it has."""
    made = kind.__new__(kind)
    made.__dict__.update(client.__dict__)
    return made


def scrolling(client: QdrantClient) -> Scroll:
    """`client.scroll`, made for many vectors: it takes a collection, a filter and all of `limit`, `offset`,
    `with_vectors` and `with_payload`. Dense vectors that came by gRPC are arrays.

    Servers compress what they answer for clients that take it, by REST and gRPC; with vectors that takes four times as
    long as to send them. So answers are asked for as they are.
    """
    remote = client._client
    if not isinstance(remote, QdrantRemote):
        return client.scroll
    return _ScrollByGrpc(remote) if _speaks_grpc(client) else _uncompressed(remote).scroll


def _uncompressed(remote: QdrantRemote) -> QdrantRemote:
    """A copy of `remote`, over its connection, that asks for answers that are not compressed."""
    # Of the client itself a copy would close the connection when it is forgotten.
    remote = copy.copy(remote)
    apis, rest = copy.copy(remote.openapi_client), copy.copy(remote.openapi_client.client)
    rest.add_middleware(_as_it_is)
    apis.points_api = type(apis.points_api)(rest)
    remote.openapi_client = apis
    return remote


def _as_it_is(request: httpx.Request, send: Callable[[httpx.Request], httpx.Response]) -> httpx.Response:
    request.headers["Accept-Encoding"] = "identity"
    return send(request)


class _ScrollByGrpc:
    """Scrolls by gRPC over a connection of its own, which closes when this is forgotten. Vectors become arrays without
    the client's conversion, from protobuf 7.34 on without a Python number for each."""

    def __init__(self, remote: Any):
        self._seconds = _page_seconds(remote)
        channel = get_channel(
            remote._host,
            remote._grpc_port,
            remote._https,
            remote._grpc_headers,
            {**remote._grpc_options, "grpc.compression_enabled_algorithms_bitset": 1},  # none but identity
            auth_token_provider=remote._auth_token_provider,
        )
        self._points: Any = grpc.PointsStub(channel)  # type: ignore[no-untyped-call]

    def __call__(self, collection: str, chosen: models.Filter | None = None, **asked: Any) -> Scrolled:
        offset = asked["offset"]
        request = grpc.ScrollPoints(
            collection_name=collection,
            filter=RestToGrpc.convert_filter(chosen) if chosen is not None else None,
            limit=asked["limit"],
            offset=RestToGrpc.convert_extended_point_id(offset) if offset is not None else None,
            with_vectors=RestToGrpc.convert_with_vectors(asked["with_vectors"]),
            with_payload=RestToGrpc.convert_with_payload_interface(asked["with_payload"]),
        )
        found = self._points.Scroll(request, timeout=self._seconds)
        following = GrpcToRest.convert_point_id(found.next_page_offset) if found.HasField("next_page_offset") else None
        return [_record(point) for point in found.result], following


def _page_seconds(remote: QdrantRemote) -> float:
    """PAGE_SECONDS, or the limit of `remote` where that is longer."""
    return max(remote._timeout or 0, PAGE_SECONDS)


def _record(point: grpc.RetrievedPoint) -> models.Record:
    shard_key = GrpcToRest.convert_shard_key(point.shard_key) if point.HasField("shard_key") else None
    return models.Record.model_construct(
        id=GrpcToRest.convert_point_id(point.id),
        payload=GrpcToRest.convert_payload(point.payload),
        vector=_vectors(point.vectors),
        shard_key=shard_key,
    )


def _vectors(given: grpc.VectorsOutput) -> Any:
    """A vector, a dict of them by name, or None for none."""
    if given.WhichOneof("vectors_options") == "vectors":
        return {name: _array(vector) for name, vector in given.vectors.vectors.items()}
    return _array(given.vector) if given.HasField("vector") else None


def _array(given: grpc.VectorOutput) -> Any:
    """A dense vector as an array; anything else, also a dense vector from a server before 1.16, as the client converts
    it."""
    if given.WhichOneof("vector") == "dense":
        return np.array(given.dense.data, np.float32)
    return GrpcToRest.convert_vector_output(given)


def update_vectors(
    client: QdrantClient,
    collection: str,
    name: str,
    vectors: Sequence[tuple[PointId, list[float]]],
    shard_key: ShardKey = None,
) -> models.UpdateResult:
    """Gives points their vectors `name`, by id, and waits for it; by gRPC nearly three times as fast as the client."""
    if not _speaks_grpc(client):
        points = [models.PointVectors.model_construct(id=point, vector={name: vector}) for point, vector in vectors]
        return client.update_vectors(collection, points, wait=True, shard_key_selector=shard_key)
    key = RestToGrpc.convert_shard_key_selector(shard_key) if shard_key is not None else None
    message = grpc.UpdatePointVectors(collection_name=collection, wait=True, shard_key_selector=key)
    for point, vector in vectors:
        update = message.points.add(id=RestToGrpc.convert_extended_point_id(point))
        update.vectors.vectors.vectors[name].dense.data.extend(vector)
    remote = cast(QdrantRemote, client._client)
    answer = remote.grpc_points.UpdateVectors(message, timeout=_page_seconds(remote))
    return GrpcToRest.convert_update_result(answer.result)


def scores(
    client: QdrantClient, collection: str, request: models.QueryRequest, queries: Sequence[list[float]]
) -> list[list[tuple[PointId, float]]]:
    """The id and score of each point that `request` finds for each of `queries`. By gRPC it is converted once, not for
    each, and so is no more of a point than these two."""
    if not _speaks_grpc(client):
        found = client.query_batch_points(collection, [changed(request, {"query": query}) for query in queries])
        return [[(point.id, point.score) for point in each.points] for each in found]
    asked = grpc.QueryBatchPoints(collection_name=collection)
    alike = RestToGrpc.convert_query_request(request, collection)
    for query in queries:
        message = asked.query_points.add()
        message.CopyFrom(alike)
        message.query.nearest.dense.data.extend(query)
    remote = cast(QdrantRemote, client._client)
    answer = remote.grpc_points.QueryBatch(asked, timeout=_page_seconds(remote))
    return [[(point.id.uuid or point.id.num, point.score) for point in each.result] for each in answer.result]


def _speaks_grpc(client: QdrantClient | AsyncQdrantClient) -> bool:
    return bool(getattr(client._client, "_prefer_grpc", False))


def changed(model: Model, fields: dict[str, Any]) -> Model:
    """What `model.model_copy(update=fields)` returns, in half of its time: a search makes several."""
    made, put = object.__new__(type(model)), object.__setattr__
    put(made, "__dict__", {**model.__dict__, **fields})
    put(made, "__pydantic_fields_set__", model.__pydantic_fields_set__ | fields.keys())
    put(made, "__pydantic_extra__", model.__pydantic_extra__)
    put(made, "__pydantic_private__", None)
    return made


def resolved(query: Any) -> Any:
    """What the client makes of the `query` of its search methods before anything else: a vector, an id or a document
    becomes a NearestQuery. Raises what the client raises for what cannot be one."""
    return QdrantClient._resolve_query(query)


def with_vectors(client: Any, collection: str, prefetches: Any) -> Any:
    """`prefetches` of groups as `client` takes them: in local mode up to 1.18 with vectors in the place of ids."""
    return client._client._resolve_prefetches_input(prefetches, collection) if is_local(client) else prefetches


UNREADABLE = (AttributeError, TypeError, ValueError)
"""What the three functions below raise for what the client does not take. It is the client's own to refuse."""


def points_taken(client: QdrantClient | AsyncQdrantClient, points: Any) -> list[models.PointStruct]:
    """`points` one by one, with their documents embedded, as far as `upsert` of `client` takes them: local mode
    whatever has an id, a vector and a payload; a client by gRPC its messages, too; one by REST dicts as well."""
    if isinstance(points, models.Batch):
        return embedded(client, structs_of(points))
    messages = _speaks_grpc(client) and isinstance(points, Collection)
    if not isinstance(points, list) and not (messages and all(isinstance(each, grpc.PointStruct) for each in points)):
        raise TypeError(f"expected a Batch or a list of points, got {type(points).__name__}")
    return embedded(client, [_point(client, each) for each in points])


def structs_of(batch: models.Batch) -> list[models.PointStruct]:
    """The points of `batch`. Raises ValueError where it has not as many of each: that is the client's own to refuse."""
    vectors: Any = batch.vectors
    if isinstance(vectors, dict):
        rows = zip(*vectors.values(), strict=True)
        vectors = [dict(zip(vectors, row, strict=True)) for row in rows]
    payloads = [None] * len(batch.ids) if batch.payloads is None else batch.payloads
    return [
        models.PointStruct.model_construct(id=key, vector=vector, payload=payload)
        for key, vector, payload in zip(batch.ids, vectors, payloads, strict=True)
    ]


def _point(client: QdrantClient | AsyncQdrantClient, given: Any) -> models.PointStruct:
    if isinstance(given, models.PointStruct):
        return given
    if is_local(client):
        return point_of(given)
    if isinstance(given, grpc.PointStruct):
        return GrpcToRest.convert_point_struct(given)
    if isinstance(given, dict) and not _speaks_grpc(client):
        return models.PointStruct.model_validate(given)
    raise TypeError(f"expected a point, got {type(given).__name__}")


def point_of(given: Any) -> models.PointStruct:
    """Whatever has an id, a vector and a payload as a structure: an upload takes nothing else."""
    return models.PointStruct.model_construct(id=given.id, vector=given.vector, payload=given.payload)


def updates_taken(client: QdrantClient | AsyncQdrantClient, points: Any) -> list[models.PointVectors]:
    """`points`, with their documents embedded, as far as `update_vectors` of `client` takes them: whatever has an id
    and a vector; by REST nothing but structures and dicts."""
    points = _listed(client, points)
    if is_local(client) or _speaks_grpc(client):
        taken = [models.PointVectors.model_construct(id=each.id, vector=each.vector) for each in points]
    else:
        taken = models.UpdateVectors(points=points).points
    if not all(isinstance(each.id, (int, str, UUID)) for each in taken):
        raise TypeError("expected ids")
    return embedded(client, taken)


def operations_taken(client: QdrantClient | AsyncQdrantClient, operations: Any) -> list[models.UpdateOperation]:
    """`operations`, with their documents embedded and batches as points one by one, as far as `batch_update_points` of
    `client` takes them: by REST also dicts. By gRPC and in local mode what is no operation stays where it is: local
    mode does those before it."""
    taken = _listed(client, operations)
    if not is_local(client) and not _speaks_grpc(client):
        taken = models.UpdateOperations(operations=taken).operations
    return embedded(client, [_one_by_one(each) for each in taken])


def _one_by_one(operation: models.UpdateOperation) -> models.UpdateOperation:
    """`operation`; an upsert of a batch as one of points, unless the batch is the client's own to refuse."""
    given = getattr(operation, "upsert", None)
    if not isinstance(given, models.PointsBatch):
        return operation
    options = {name: value for name, value in given.__dict__.items() if name != "batch"}
    try:
        return models.UpsertOperation(
            upsert=models.PointsList.model_construct(points=structs_of(given.batch), **options)
        )
    except UNREADABLE:
        return operation


def _listed(client: QdrantClient | AsyncQdrantClient, items: Any) -> list[Any]:
    """`items` as a list. Local mode takes no stream; of one to a server the client itself loses what it looks at."""
    if is_local(client) and not isinstance(items, Collection):
        raise TypeError(f"expected a list, got {type(items).__name__}")
    return list(items)


def rows_taken(vectors: Any, ids: Any, payload: Any) -> Iterator[models.PointStruct]:
    """The points of `upload_collection`, as far as that takes them. Raises ValueError where ids or payloads end before
    vectors, of which the number is known; a client before 1.20 writes the shorter number."""
    if isinstance(vectors, dict):
        counts = {column.shape[0] for column in vectors.values()}
        if len(counts) != 1 or not any(isinstance(column, np.ndarray) for column in vectors.values()):
            raise ValueError("expected arrays of one length")
        vectors = [dict(zip(vectors, row, strict=True)) for row in zip(*vectors.values(), strict=True)]
    checks: Any = client_module
    count = checks.vectors_length(vectors) if hasattr(checks, "require_length") else None
    if count is not None:
        ids = checks.require_length(ids, count, "ids")
        payload = checks.require_length(payload, count, "payload")
    made_up = (str(uuid4()) for _ in itertools.count())
    columns = (
        iter(vectors),
        made_up if ids is None else iter(ids),
        itertools.repeat(None) if payload is None else payload,
    )
    return (
        models.PointStruct.model_construct(id=key, vector=_listed_vector(vector), payload=beside)
        for vector, key, beside in zip(*columns, strict=False)
    )


def _listed_vector(vector: Any) -> Any:
    """A vector, or vectors by name, without arrays."""
    if isinstance(vector, dict):
        return {name: _listed_vector(each) for name, each in vector.items()}
    return vector.tolist() if isinstance(vector, np.ndarray) else vector


def embedded(client: QdrantClient | AsyncQdrantClient, written: list[Any]) -> list[Any]:
    """`written`, points or vectors or operations, with its documents embedded as `client` would do it."""
    if client.cloud_inference or not client._inference_inspector.inspect(written):
        return written
    return list(client._embed_models(written, is_query=False, batch_size=client.local_inference_batch_size))


def has_documents(client: QdrantClient | AsyncQdrantClient, requests: list[models.QueryRequest]) -> bool:
    """Whether `client` would embed documents in `requests`."""
    return not client.cloud_inference and bool(client._inference_inspector.inspect(requests))


def embedded_queries(
    client: QdrantClient | AsyncQdrantClient, requests: list[models.QueryRequest]
) -> list[models.QueryRequest]:
    """`requests` with the documents that they ask for the nearest of embedded as `client` would do it."""
    plain = [each.model_copy(update={"query": resolved(each.query)}) for each in requests]
    made = client._embed_models(plain, is_query=True, batch_size=client.local_inference_batch_size)
    return cast("list[models.QueryRequest]", list(made))
