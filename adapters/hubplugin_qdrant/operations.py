"""An operation is a generator that yields what the plain client's methods return, and is sent their results.

It is written once and driven by both clients, as httpx drives an `auth_flow`: by the sync client, for which those are
the results themselves, and by the async one, which awaits them.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

from qdrant_client import models

Operation: TypeAlias = Generator[Any, Any, Any]

Arguments: TypeAlias = dict[str, Any]
"""The arguments of a client's method, by name."""

PointId: TypeAlias = models.ExtendedPointId

Points: TypeAlias = models.Batch | list[models.PointStruct]
"""What `upsert` takes, as REST structures."""

Written: TypeAlias = list[models.PointStruct] | list[models.PointVectors]
"""The points of an operation that writes vectors."""

ShardKey: TypeAlias = models.ShardKeySelector | None

GivenVector: TypeAlias = Any
"""A vector as a client gives it: a list, an array, a document to embed, a dict of these by name, or None."""


def listed_id(key: PointId) -> int | str:
    """`key` as the server writes it: a UUID has several forms."""
    if isinstance(key, int):
        return key
    try:
        return str(uuid.UUID(str(key)))
    except ValueError:  # the server's to refuse
        return str(key)


def at_once(function: Callable[[], Any]) -> Any:
    """What `function` returns, computed here and now; the async client computes in a thread."""
    return function()


def run(steps: Operation) -> Any:
    """What `steps` returns, driven by a sync client."""
    sent = None
    while True:
        try:
            sent = steps.send(sent)
        except StopIteration as done:
            return done.value


async def run_async(steps: Operation) -> Any:
    """What `steps` returns, driven by an async client."""
    try:
        step = next(steps)
        while True:
            try:
                sent = await step if inspect.isawaitable(step) else step
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(sent)
    except StopIteration as done:
        return done.value
