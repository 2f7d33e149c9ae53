"""Operations of a corrected client, written once and driven by both clients.

An operation is a generator, like httpx's `auth_flow`. It yields each `Call` that it
needs. The driver makes the call, and sends the answer or throws the error into the
generator.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Generator
from functools import partial
from typing import Any, TypeAlias, TypeVar

Answer = TypeVar("Answer")


class Call(partial[Any]):
    """A call of a method of the plain client, with its arguments."""


class Computing(Call):
    """A call that computes without a server. The async client runs it in a thread."""


Operation: TypeAlias = Generator[Call, Any, Answer]
"""An operation that returns an `Answer`."""


async def run_async(operation: Operation[Answer], threads: bool = True) -> Answer:
    """Drive `operation` with an async client, and return its result.

    threads: True to run each `Computing` call in a thread.
    """
    resume = partial(operation.send, None)
    try:
        while True:
            call = resume()
            try:
                if threads and isinstance(call, Computing):
                    answer = await asyncio.to_thread(call)
                else:
                    answer = call()
                if inspect.isawaitable(answer):
                    answer = await answer
                resume = partial(operation.send, answer)
            except Exception as error:
                resume = partial(operation.throw, error)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def run(operation: Operation[Answer]) -> Answer:
    """Drive `operation` with a sync client, or an async one in local mode.

    Neither client ever waits, so the coroutine ends with its first step.
    """
    coroutine = run_async(operation, threads=False)
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise RuntimeError("an operation that was to run at once has waited")
