"""Waiting for a condition, instead of for a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenacity import retry, retry_if_result, stop_after_delay, wait_fixed


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Returns as soon as `condition()` is true; raises tenacity.RetryError after `seconds`."""
    retry(retry=retry_if_result(lambda met: not met), stop=stop_after_delay(seconds), wait=wait_fixed(0.05))(
        condition
    )()
