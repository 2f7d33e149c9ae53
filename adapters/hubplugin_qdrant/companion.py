"""The companion collection, read and written: the manifest, the models in parts, and the errors of a connection."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from grpc import RpcError, StatusCode
from qdrant_client import QdrantClient, models
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from hubplugin.errors import HubpluginError, StoreError
from hubplugin.model import OffsetModel
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant.manifest import Manifest, Version

logger = logging.getLogger("hubplugin_qdrant")

PASSING_CODES = (
    StatusCode.UNAVAILABLE,
    StatusCode.DEADLINE_EXCEEDED,
    StatusCode.RESOURCE_EXHAUSTED,
    StatusCode.INTERNAL,  # a node of a cluster that is away; over HTTP 500
    StatusCode.FAILED_PRECONDITION,
)


def is_missing(error: Exception) -> bool:
    """Whether `error` says that a collection is not there."""
    if isinstance(error, UnexpectedResponse):
        return error.status_code == 404
    if isinstance(error, RpcError):
        return bool(error.code() == StatusCode.NOT_FOUND)
    return isinstance(error, ValueError) and "not found" in str(error)  # local mode


def is_forbidden(error: Exception) -> bool:
    """Whether `error` says that the api key lacks a right."""
    if isinstance(error, UnexpectedResponse):
        return error.status_code in (401, 403)
    return isinstance(error, RpcError) and error.code() in (StatusCode.PERMISSION_DENIED, StatusCode.UNAUTHENTICATED)


def is_passing(error: BaseException) -> bool:
    """Whether `error` may be gone when the request is made again: a lost connection, a busy or restarting server."""
    if isinstance(error, UnexpectedResponse):
        return error.status_code in (408, 429, 500, 502, 503, 504)
    if isinstance(error, RpcError):
        return error.code() in PASSING_CODES
    return isinstance(error, (ResponseHandlingException, ResourceExhaustedResponse, httpx.TransportError))


def is_answer(error: Exception) -> bool:
    """Whether `error` is what a server that is there has answered."""
    if isinstance(error, RpcError):
        return error.code() is not StatusCode.UNAVAILABLE
    return isinstance(error, (UnexpectedResponse, ResourceExhaustedResponse))


def is_late(error: Exception) -> bool:
    """Whether an answer took too long, so that less at a time would help."""
    if isinstance(error, UnexpectedResponse):
        return error.status_code in (408, 504)
    if isinstance(error, RpcError):
        return bool(error.code() == StatusCode.DEADLINE_EXCEEDED)
    return isinstance(getattr(error, "source", error), (httpx.TimeoutException, TimeoutError))


def is_limited(error: BaseException | None) -> bool:
    """Whether a rate is limited: that of reading by requests, that of writing by points."""
    if isinstance(error, UnexpectedResponse):
        return error.status_code == 429
    if isinstance(error, RpcError):
        return bool(error.code() == StatusCode.RESOURCE_EXHAUSTED) and not is_too_large(error)
    return isinstance(error, ResourceExhaustedResponse)


def finished(answer: Any) -> Any:
    """`answer`, unless it says that a write is still waiting its turn, as a server does after a minute from 1.18 on:
    then ResponseHandlingException, as if there were none."""
    for result in answer if isinstance(answer, list) else [answer]:
        if str(getattr(result, "status", "")).endswith(("WAIT_TIMEOUT", "wait_timeout")):
            raise ResponseHandlingException(TimeoutError("the server has not done it yet"))
    return answer


def is_too_large(error: BaseException) -> bool:
    """Whether `error` refuses a request, or its answer, for its size: the server, or a proxy before it."""
    if isinstance(error, UnexpectedResponse):
        return error.status_code == 413 or (error.status_code == 400 and b"larger than allowed" in error.content)
    said = str(error.details()) if isinstance(error, RpcError) else ""
    return "message larger than" in said or "message length too large" in said


def lacks_points(error: Exception) -> bool:
    """Whether `error` may say that a point to be changed is not there (any more)."""
    return is_missing(error) or isinstance(error, KeyError)  # local mode


@contextmanager
def one_line(url: str, doing: str, collection: str) -> Iterator[None]:
    """Turns what a client raises into a StoreError of one line that says what to do."""
    try:
        yield
    except HubpluginError:
        raise
    except (
        ResponseHandlingException, ResourceExhaustedResponse, httpx.TransportError, UnexpectedResponse, RpcError,
        ValueError,
    ) as error:  # fmt: skip
        if is_passing(error):
            raise StoreError(
                f"{url}: {doing}: no answer ({_reason(error)}); is the server running and reachable?"
            ) from None
        if is_forbidden(error):
            raise StoreError(
                f"{url}: {doing}: the api key may not do this; it needs write access to the collection and to its "
                f"companion, {m.companion(collection)}, and to create and delete the latter the right to manage"
            ) from None
        raise StoreError(f"{url}: {doing}: refused: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, UnexpectedResponse):
        status = (error.structured() if error.content.strip().startswith(b"{") else {}).get("status")
        text = status.get("error") if isinstance(status, dict) else None
        return f"{error.status_code} {text or error.reason_phrase}"
    if isinstance(error, RpcError):
        return f"{error.code().name} {error.details()}"
    return " ".join(str(error).split()) or type(error).__name__


def read_manifest(client: QdrantClient, collection: str) -> Manifest | None:
    """The manifest of `collection` (no alias), or None if it has none."""
    try:
        found = client.retrieve(m.companion(collection), ids=[m.MANIFEST_ID], with_payload=True)
    except Exception as error:
        if is_missing(error):
            return None
        raise
    return m.parse(found[0].payload or {}, collection) if found else None


def real_name(client: QdrantClient, name: str) -> str:
    """The collection behind an alias; `name` itself where it is none, or where the aliases may not be read."""
    try:
        aliases = client.get_aliases().aliases
    except Exception as error:
        if is_forbidden(error):
            return name
        raise
    return next((alias.collection_name for alias in aliases if alias.alias_name == name), name)


def write_manifest(client: QdrantClient, collection: str, manifest: Manifest) -> None:
    """Puts `manifest` in the place of the one before, in one step."""
    point = models.PointStruct(id=m.MANIFEST_ID, vector={}, payload=manifest.model_dump(mode="json"))
    client.upsert(m.companion(collection), [point], wait=True)


def create(client: QdrantClient, collection: str, replication_factor: int | None) -> None:
    """The companion of `collection`, as well replicated as that, if it is not there."""
    if client.collection_exists(m.companion(collection)):
        return
    try:
        client.create_collection(
            m.companion(collection),
            vectors_config={},
            shard_number=1,
            replication_factor=replication_factor,
            on_disk_payload=True,
            strict_mode_config=models.StrictModeConfig(enabled=False),  # the limits of a server may be its default
        )
    except Exception:
        if not client.collection_exists(m.companion(collection)):  # another run has been quicker
            raise


def write_model(client: QdrantClient, collection: str, model: OffsetModel) -> int:
    """Lays `model` in the companion; returns in how many parts."""
    content = model.to_bytes()
    parts = range(0, len(content), m.PART_BYTES)
    for number, start in enumerate(parts):
        part = base64.b64encode(content[start : start + m.PART_BYTES]).decode()
        point = models.PointStruct(id=m.part_id(model.fingerprint, number), vector={}, payload={"part": part})
        client.upsert(m.companion(collection), [point], wait=True)
    return len(parts)


def read_model(client: QdrantClient, collection: str, version: Version) -> OffsetModel:
    """The model of `version`. Raises StoreError if a part is missing, ModelFileError if one is damaged."""
    return model_of(
        [client.retrieve(m.companion(collection), ids=[part]) for part in part_ids(version)], version, collection
    )


def part_ids(version: Version) -> list[str]:
    return [m.part_id(version.model, number) for number in range(version.parts)]


def model_of(found: list[list[Any]], version: Version, collection: str) -> OffsetModel:
    """The model whose parts were retrieved, one by one, as `found`."""
    if not all(found):
        raise StoreError(f"the model of {collection!r} is incomplete in {m.companion(collection)!r}; apply again")
    content = b"".join(base64.b64decode(records[0].payload["part"]) for records in found)
    return OffsetModel.from_bytes(content, f"the model in collection {m.companion(collection)!r}")


def delete_model(client: QdrantClient, collection: str, version: Version) -> None:
    client.delete(
        m.companion(collection), points_selector=models.PointIdsList(points=list(part_ids(version))), wait=True
    )
