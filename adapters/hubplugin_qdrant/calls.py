"""How an operation of a corrected client is written once and driven by both clients: as httpx drives an `auth_flow`.

An operation is a generator that yields each `Call` that it wants made, and is sent the answer, or thrown the error.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Generator
from typing import Any, TypeAlias, TypeVar

Answer = TypeVar("Answer")


class Call(functools.partial[Any]):
    """A call of a method of the plain client, with its arguments."""


class Computing(Call):
    """A call of a function that asks no server: for the async client a thread makes it."""


Operation: TypeAlias = Generator[Call, Any, Answer]
"""What makes an `Answer` of what its calls return."""


async def run_async(operation: Operation[Answer], in_thread: bool = True) -> Answer:
    """What `operation` returns, driven by an async client; a thread computes if `in_thread`."""
    try:
        call = next(operation)
        while True:
            try:
                answer = (
                    await asyncio.to_thread(call)
                    if in_thread and isinstance(call, Computing)
                    else call()
                )
                answer = await answer if inspect.isawaitable(answer) else answer
            except Exception as error:
                call = operation.throw(error)
            else:
                call = operation.send(answer)
    except StopIteration as done:
        returned: Answer = done.value
        return returned


def run(operation: Operation[Answer]) -> Answer:
    """What `operation` returns, driven by a sync client, or by an async one in local mode: nothing is waited for."""
    try:
        run_async(operation, in_thread=False).send(None)
    except StopIteration as done:
        returned: Answer = done.value
        return returned
    raise RuntimeError("an operation that was to run at once has waited")
