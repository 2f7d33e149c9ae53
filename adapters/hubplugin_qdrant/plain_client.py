"""Everything that hubplugin uses of qdrant-client beyond its public interface, in one place.

Each function has a test in tests/qdrant/test_plain_client.py or test_plain_searches.py, and pyproject.toml bounds the
version of qdrant-client above: these names may change in any release.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, cast

import httpx
import numpy as np
from pydantic import BaseModel
from qdrant_client import AsyncQdrantClient, QdrantClient, grpc, models
from qdrant_client.async_qdrant_remote import AsyncQdrantRemote
from qdrant_client.connection import get_channel
from qdrant_client.conversions.conversion import GrpcToRest, RestToGrpc
from qdrant_client.local.async_qdrant_local import AsyncQdrantLocal
from qdrant_client.local.qdrant_local import QdrantLocal
from qdrant_client.qdrant_remote import QdrantRemote

from hubplugin_qdrant.operations import PointId, ShardKey

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
    return _made(type(model), model, fields)


def _made(kind: type[Model], model: BaseModel, fields: dict[str, Any]) -> Model:
    """A `kind` with the values of `model`, but for `fields`."""
    made, put = object.__new__(kind), object.__setattr__
    put(made, "__dict__", {**model.__dict__, **fields})
    put(made, "__pydantic_fields_set__", model.__pydantic_fields_set__ | fields.keys())
    put(made, "__pydantic_extra__", model.__pydantic_extra__)
    put(made, "__pydantic_private__", None)
    return made


_OWN = {
    getattr(kind, name)
    for kind in (QdrantClient, AsyncQdrantClient)
    for name in ("query_points", "query_points_groups", "query_batch_points")
}
"""The clients' own methods. One that a subclass or an instrumentation put in their place is called as it stands."""


def query_points(
    client: QdrantClient | AsyncQdrantClient,
    arguments: dict[str, Any],
    request: models.QueryRequest,
    method: Literal["query_points", "query_points_groups"] = "query_points",
) -> Any:
    """What `method` of `client` returns for `arguments`, where `request` holds the same search.

    The client looks for documents to embed in each number of a vector. A search of vectors alone holds none, so it goes
    past that to the part of the client that speaks to the server; by gRPC as a message, which costs least to make here.
    """
    if not _is_own(client, method) or not _is_of_vectors(request):
        return getattr(client, method)(**arguments)
    prefetches: Any = request.prefetch
    if prefetches and _speaks_grpc(client):
        prefetches = [_message(each) for each in prefetches]
    sent = arguments | {"query": _as_sent(request.query), "prefetch": prefetches}
    return getattr(client._client, method)(**sent)


def query_batch_points(
    client: QdrantClient | AsyncQdrantClient, arguments: dict[str, Any], requests: Sequence[models.QueryRequest]
) -> Any:
    """What `client.query_batch_points(**arguments, requests=requests)` returns; see `query_points`."""
    if not _is_own(client, "query_batch_points") or not all(map(_is_of_vectors, requests)):
        return client.query_batch_points(**arguments | {"requests": requests})
    sent: list[Any] = [changed(each, {"query": _as_sent(each.query)}) for each in requests]
    if _speaks_grpc(client):
        sent = [_whole_message(each, arguments["collection_name"]) for each in sent]
    return client._client.query_batch_points(**arguments | {"requests": sent})


def _is_own(client: QdrantClient | AsyncQdrantClient, method: str) -> bool:
    """Whether `client` speaks to a server, and its `method` is qdrant-client's own."""
    is_remote = isinstance(client._client, (QdrantRemote, AsyncQdrantRemote))
    return is_remote and getattr(getattr(client, method), "__func__", None) in _OWN


def _is_of_vectors(request: models.QueryRequest) -> bool:
    """Whether `request` is for the nearest of a vector, or for a formula over prefetches of vectors."""
    prefetches = request.prefetch or []
    if not (is_vector(request.query) or isinstance(request.query, models.FormulaQuery)):
        return False
    return isinstance(prefetches, list) and all(is_vector(each.query) and not each.prefetch for each in prefetches)


_NEAREST = models.NearestQuery.model_construct()


def _as_sent(query: Any) -> Any:
    """A vector as the client sends it; any other `query` as it is."""
    return _made(models.NearestQuery, _NEAREST, {"nearest": query}) if is_vector(query) else query


def is_vector(query: object) -> bool:
    return isinstance(query, list) and bool(query) and isinstance(query[0], (int, float))


def _message(prefetch: Any) -> grpc.PrefetchQuery:
    """`prefetch`, which is for the nearest of a vector, as a message."""
    message = RestToGrpc.convert_prefetch_query(changed(prefetch, {"query": None}))
    message.query.nearest.dense.data.extend(prefetch.query)
    return message


def _whole_message(request: models.QueryRequest, collection: str) -> grpc.QueryPoints:
    """`request`, which `_is_of_vectors`, as a message."""
    message = RestToGrpc.convert_query_request(changed(request, {"prefetch": None}), collection)
    message.prefetch.extend([_message(each) for each in request.prefetch or ()])
    return message


def embedded(client: QdrantClient | AsyncQdrantClient, written: Any) -> Any:
    """`written`, points or vectors or operations, with its documents embedded as `client` would do it."""
    if client.cloud_inference or not client._inference_inspector.inspect(written):
        return written
    size = client.local_inference_batch_size
    if isinstance(written, models.Batch):
        return next(iter(client._embed_models(written, is_query=False, batch_size=size)))
    return list(client._embed_models(written, is_query=False, batch_size=size))


def has_documents(client: QdrantClient | AsyncQdrantClient, requests: list[models.QueryRequest]) -> bool:
    """Whether `client` would embed documents in `requests`."""
    return not client.cloud_inference and bool(client._inference_inspector.inspect(requests))


def embedded_queries(
    client: QdrantClient | AsyncQdrantClient, requests: list[models.QueryRequest]
) -> list[models.QueryRequest]:
    """`requests` with the documents that they ask for the nearest of embedded as `client` would do it."""
    plain = [each.model_copy(update={"query": client._resolve_query(each.query)}) for each in requests]
    made = client._embed_models(plain, is_query=True, batch_size=client.local_inference_batch_size)
    return cast("list[models.QueryRequest]", list(made))
