"""Everything that hubplugin uses of qdrant-client beyond its public interface, in one place.

Each function has a test in tests/qdrant/test_plain_client.py, and pyproject.toml bounds the version of qdrant-client
above: these names may change in any release.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar, cast

import httpx
from pydantic import BaseModel
from qdrant_client import AsyncQdrantClient, QdrantClient, grpc, models
from qdrant_client.client_base import QdrantBase
from qdrant_client.conversions.conversion import RestToGrpc
from qdrant_client.local.async_qdrant_local import AsyncQdrantLocal
from qdrant_client.local.qdrant_local import QdrantLocal
from qdrant_client.qdrant_remote import QdrantRemote

Kind = TypeVar("Kind", bound="QdrantClient | AsyncQdrantClient")
Model = TypeVar("Model", bound=BaseModel)


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


def uncompressed(client: QdrantClient) -> QdrantBase:
    """Scrolls as `client` does, over its connection, but asks by REST for pages that are not compressed: a server takes
    four times as long to compress a page of vectors as to send it."""
    if not isinstance(client._client, QdrantRemote):
        return client
    # Of the client itself a copy would close the connection when it is forgotten.
    remote = copy.copy(client._client)
    apis, rest = copy.copy(remote.openapi_client), copy.copy(remote.openapi_client.client)
    rest.add_middleware(_as_it_is)
    apis.points_api = type(apis.points_api)(rest)
    remote.openapi_client = apis
    return remote


def _as_it_is(request: httpx.Request, send: Callable[[httpx.Request], httpx.Response]) -> httpx.Response:
    request.headers["Accept-Encoding"] = "identity"
    return send(request)


def changed(model: Model, fields: dict[str, Any]) -> Model:
    """What `model.model_copy(update=fields)` returns, in half of its time: a search makes several."""
    made, put = object.__new__(type(model)), object.__setattr__
    put(made, "__dict__", {**model.__dict__, **fields})
    put(made, "__pydantic_fields_set__", model.__pydantic_fields_set__ | fields.keys())
    put(made, "__pydantic_extra__", model.__pydantic_extra__)
    put(made, "__pydantic_private__", None)
    return made


def sendable(
    client: QdrantClient | AsyncQdrantClient, prefetches: list[models.Prefetch]
) -> list[models.Prefetch] | list[grpc.PrefetchQuery]:
    """`prefetches` in the form that costs `client` least: where it speaks gRPC, those of vectors as messages, which it
    does not look through for documents and converts no more."""
    if not getattr(client._client, "_prefer_grpc", False):
        return prefetches
    vectors = [each.query for each in prefetches if is_vector(each.query) and not each.prefetch]
    if len(vectors) < len(prefetches):
        return prefetches
    return [_message(each, cast("list[float]", vector)) for each, vector in zip(prefetches, vectors, strict=True)]


def is_vector(query: object) -> bool:
    return isinstance(query, list) and bool(query) and isinstance(query[0], (int, float))


def _message(prefetch: models.Prefetch, vector: list[float]) -> grpc.PrefetchQuery:
    """`prefetch`, for the nearest of `vector`; its numbers are put where they belong and copied no more."""
    message = RestToGrpc.convert_prefetch_query(changed(prefetch, {"query": None}))
    message.query.nearest.dense.data.extend(vector)
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
