"""What a worker does: one task on one shard. A worker keeps the banks and the shards that it has met."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hubplugin.compute import Compute, ShardResult, Similarities, Task
from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin.vectors import Shard, Vectors

KEPT_SHARDS = 64
"""Shards that a worker keeps open. What had to be fetched or unpacked lies on its disk so long, in a file without a
name, which goes with the process: what is killed leaves nothing behind."""

KEPT_BANKS = 4

IDLE_SECONDS = 600.0
"""After so long without work a worker lets go of all that it keeps."""

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Bank:
    """A bank by name, and how it is multiplied. rows: [m, d], where the worker is not expected to know it."""

    key: str
    metric: Metric
    compute: Compute
    rows: np.ndarray | None = None


class Reading(ABC):
    """A task that needs no bank."""

    what: str

    @abstractmethod
    def __call__(self, order: Order) -> ShardResult: ...


@dataclass(frozen=True)
class Order:
    """`task` on `shard`. run: names the run, of which a worker keeps what it has read: the next one reads it anew.
    attempt: an engine that knows orders by their content takes the next one for another."""

    shard: Shard
    task: Task | Reading
    bank: Bank | None
    run: str
    attempt: int = 1


def work(order: Order) -> ShardResult | None:
    """What the task of `order` finds; None if the worker has to be sent the bank."""
    try:
        return _found(order)
    finally:
        _IDLE.again()


def _found(order: Order) -> ShardResult | None:
    if isinstance(order.task, Reading):
        return order.task(order)
    assert order.bank is not None
    similarities = _known(order.bank)
    if similarities is None:
        return None
    vectors = opened(order)
    assert vectors is not None
    return order.task(similarities, vectors)


def opened(order: Order) -> Vectors | None:
    """The vectors of its shard in this process; None if it has none."""
    return _SHARDS.get(repr((order.run, order.shard.identity)), lambda: _readable(order))


def _readable(order: Order) -> Vectors | None:
    try:
        return order.shard.vectors()
    except OSError as error:
        raise InputError(f"{order.shard.name} cannot be read: {error.strerror or error}") from None


def _known(bank: Bank) -> Similarities | None:
    rows = bank.rows
    make = None if rows is None else lambda: Similarities(rows, bank.metric, bank.compute)
    return _BANKS.get(repr((bank.key, bank.metric, bank.compute)), make)


class _LastUsed:
    """The `count` values that were asked for last."""

    def __init__(self, count: int):
        self._count, self._values, self._lock = count, OrderedDict[str, object](), threading.Lock()

    def get(self, key: str, make: Callable[[], Kept | None] | None) -> Kept | None:
        """The value of `key`, made if it is not there and `make` is not None."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]  # type: ignore[return-value]
        value = None if make is None else make()  # outside of the lock: another thread may make another meanwhile
        if value is not None:
            with self._lock:
                self._values[key] = value
                while len(self._values) > self._count:
                    self._values.popitem(last=False)
        return value

    def clear(self) -> None:
        with self._lock:
            self._values.clear()


_SHARDS, _BANKS = _LastUsed(KEPT_SHARDS), _LastUsed(KEPT_BANKS)


def let_go() -> None:
    """Keeps nothing any more of what other tasks have met."""
    for kept in (_SHARDS, _BANKS):
        kept.clear()


class _Alarm:
    """Does `what` when nobody has called `again` for some seconds."""

    def __init__(self, seconds: float, what: Callable[[], None]):
        self._seconds, self._what, self._timer = seconds, what, threading.Timer(0, what)

    def again(self) -> None:
        self._timer.cancel()
        self._timer = threading.Timer(self._seconds, self._what)
        self._timer.daemon = True
        self._timer.start()


_IDLE = _Alarm(IDLE_SECONDS, let_go)
