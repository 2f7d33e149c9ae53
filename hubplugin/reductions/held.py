"""Kernels that a worker holds between tasks, as far as its memory budget has room."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hubplugin.reductions.kernel import Kernel
from hubplugin.reductions.similarities import Similarities


@dataclass
class Place:
    """Where one task finds the kernel of a shard, and leaves it to the next. room: bytes that it may hold, 0 where
    nothing stays. of: what the kernel was made of."""

    room: int = 0
    kernel: Kernel | None = None
    of: tuple[Similarities, float, int | None] | None = None
    is_lent: bool = True


class HeldKernels:
    """At most one kernel a shard of a run, none lent to two threads."""

    def __init__(self) -> None:
        self._places: OrderedDict[tuple[str, str], Place] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def place(self, key: tuple[str, str] | None, size: int, bound: int, last: bool = False) -> Iterator[Place]:
        """The place of the shard `key`, of `size` bytes; one without room where all would exceed `bound`. last: it is
        given up afterwards, as it is after an error."""
        place = Place() if key is None else self._lent(key, size, bound)
        keep = False
        try:
            yield place
            keep = not last and place.kernel is not None
        finally:
            with self._lock:
                place.is_lent = False
                if not keep and key is not None and self._places.get(key) is place:
                    del self._places[key]

    def clear(self) -> None:
        with self._lock:
            self._places.clear()

    def _lent(self, key: tuple[str, str], size: int, bound: int) -> Place:
        with self._lock:
            place = self._places.get(key)
            if place is not None and place.is_lent:
                return Place()  # another thread is at it
            if place is not None and place.room == size:
                place.is_lent = True
                return place
            self._places.pop(key, None)
            # Those of another run go first; those of this one stay, since all of them are asked for in turn.
            others = [each for each, found in self._places.items() if each[0] != key[0] and not found.is_lent]
            while others and self._taken + size > bound:
                del self._places[others.pop(0)]
            if self._taken + size > bound:
                return Place()
            self._places[key] = place = Place(size)
            return place

    @property
    def _taken(self) -> int:
        return sum(place.room for place in self._places.values())


KERNELS = HeldKernels()
