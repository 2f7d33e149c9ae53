"""What an error of qdrant-client means for the request that met it, by REST, by gRPC and in local mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import TypeVar

import httpx
from grpc import RpcError, StatusCode
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from hubplugin.errors import HubpluginError, StoreError
from hubplugin_qdrant import manifest as m

Answer = TypeVar("Answer")


class Fault(Enum):
    MISSING = auto()
    """There is no such collection or point."""
    FORBIDDEN = auto()
    """The api key lacks a right."""
    TOO_LARGE = auto()
    """The request, or its answer, is larger than the server or a proxy before it takes."""
    LATE = auto()
    """The answer took too long; a smaller request may be answered in time."""
    LIMITED = auto()
    """The server limits the rate: of reading by requests, of writing by points."""
    AWAY = auto()
    """The server cannot be reached, is restarting, or lacks a node."""
    REFUSED = auto()
    """Any other answer of a server."""
    OTHER = auto()
    """No error of a connection."""


PASSING = (Fault.LATE, Fault.LIMITED, Fault.AWAY)
"""What may be over when the same request is made again."""

_BY_STATUS = {
    401: Fault.FORBIDDEN,
    403: Fault.FORBIDDEN,
    404: Fault.MISSING,
    408: Fault.LATE,
    413: Fault.TOO_LARGE,
    429: Fault.LIMITED,
    500: Fault.AWAY,  # a node of a cluster, as INTERNAL below
    502: Fault.AWAY,
    503: Fault.AWAY,
    504: Fault.LATE,
}

_BY_CODE = {
    StatusCode.UNAUTHENTICATED: Fault.FORBIDDEN,
    StatusCode.PERMISSION_DENIED: Fault.FORBIDDEN,
    StatusCode.NOT_FOUND: Fault.MISSING,
    StatusCode.DEADLINE_EXCEEDED: Fault.LATE,
    StatusCode.RESOURCE_EXHAUSTED: Fault.LIMITED,
    StatusCode.UNAVAILABLE: Fault.AWAY,
    StatusCode.INTERNAL: Fault.AWAY,
    StatusCode.FAILED_PRECONDITION: Fault.AWAY,
}


def fault_of(error: BaseException | None) -> Fault:
    """What `error` means."""
    if isinstance(error, UnexpectedResponse):
        if error.status_code == 400 and b"larger than allowed" in error.content:
            return Fault.TOO_LARGE
        return _BY_STATUS.get(error.status_code or 0, Fault.REFUSED)
    if isinstance(error, RpcError):
        said = str(error.details())
        if "message larger than" in said or "message length too large" in said:
            return Fault.TOO_LARGE
        return _BY_CODE.get(error.code(), Fault.REFUSED)
    if isinstance(error, ResourceExhaustedResponse):
        return Fault.LIMITED
    if isinstance(error, (ResponseHandlingException, httpx.TransportError)):
        late = isinstance(getattr(error, "source", error), (httpx.TimeoutException, TimeoutError))
        return Fault.LATE if late else Fault.AWAY
    local = isinstance(error, ValueError) and "not found" in str(error)
    return Fault.MISSING if local else Fault.OTHER


def finished(answer: Answer) -> Answer:
    """`answer`, unless it says that a write is still waiting its turn, as a server does after a minute from 1.18 on:
    then ResponseHandlingException, as if there were none."""
    for result in answer if isinstance(answer, list) else [answer]:
        if str(getattr(result, "status", "")).endswith(("WAIT_TIMEOUT", "wait_timeout")):
            raise ResponseHandlingException(TimeoutError("the server has not done it yet"))
    return answer


class NoAnswerError(StoreError):
    """A server that did not answer, or cannot now."""


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
        fault = fault_of(error)
        if fault in PASSING:
            raise NoAnswerError(
                f"{url}: {doing}: no answer ({_reason(error)}); is the server running and reachable?"
            ) from None
        if fault is Fault.FORBIDDEN and _is_unknown(error):
            raise StoreError(
                f"{url}: {doing}: the api key is missing, wrong or expired; it is read from QDRANT_API_KEY, or is that "
                "of your client"
            ) from None
        if fault is Fault.FORBIDDEN:
            raise StoreError(
                f"{url}: {doing}: the api key may not do this; it needs access to the collection and to its metadata "
                f"collection, {m.metadata_collection(collection)}: to read both for what reads, to write both for what "
                "writes, and to create or delete the latter the right to manage"
            ) from None
        raise StoreError(f"{url}: {doing}: refused: {_reason(error)}") from None


def _is_unknown(error: Exception) -> bool:
    """Whether a server does not take the api key for one of its own, now: it says so in more than one way."""
    if isinstance(error, RpcError):
        return error.code() is StatusCode.UNAUTHENTICATED or _names_key(str(error.details()))
    return isinstance(error, UnexpectedResponse) and (
        error.status_code == 401 or _names_key(error.content.decode(errors="replace"))
    )


def _names_key(said: str) -> bool:
    return said.strip() == "ExpiredSignature" or "Invalid API key" in said or "Must provide an API key" in said


def _reason(error: Exception) -> str:
    if isinstance(error, UnexpectedResponse):
        status = (error.structured() if error.content.strip().startswith(b"{") else {}).get("status")
        text = status.get("error") if isinstance(status, dict) else None
        return f"{error.status_code} {text or error.reason_phrase}"
    if isinstance(error, RpcError):
        return f"{error.code().name} {error.details()}"
    return " ".join(str(error).split()) or type(error).__name__
