"""Waiting for a condition, instead of for a time."""

from collections.abc import Callable
from typing import Any

import httpx
from qdrant_client.http.exceptions import ResponseHandlingException
from tenacity import (
    retry,
    retry_if_exception_type,
    retry_if_result,
    stop_after_delay,
    wait_fixed,
)

PATIENCE_SECONDS = 600.0
"""Nothing takes so long, on a busy machine either: whoever has waited for it waits in vain."""


def wait_until(condition: Callable[[], Any]) -> None:
    """Returns as soon as `condition()` is true: of a server that does not answer in time it is not. Fails when it has
    waited for PATIENCE_SECONDS."""
    unmet = retry_if_result(lambda met: not met)
    unanswered = retry_if_exception_type(
        (httpx.TransportError, ResponseHandlingException)
    )
    retry(
        retry=unmet | unanswered,
        stop=stop_after_delay(PATIENCE_SECONDS),
        wait=wait_fixed(0.05),
    )(condition)()
