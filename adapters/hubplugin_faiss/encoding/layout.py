"""What is to be done with an index, and the leaf that comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from hubplugin.vectors import Vectors


@dataclass(frozen=True)
class Entries:
    """Some codes [b, code_size] of a leaf in order, and where it has inverted lists, of each its list number and id."""

    codes: np.ndarray
    lists: np.ndarray | None = None
    ids: np.ndarray | None = None


@dataclass(frozen=True)
class Body:
    """A leaf that is whole but for its codes, and those; `list_sizes` [nlist] where it has inverted lists."""

    shell: Any
    entries: Callable[[], Iterator[Entries]]
    list_sizes: np.ndarray | None = None


Fill: TypeAlias = Callable[[Body], Any]
"""Makes an index of a body: in memory, or for a file that is written piece by piece."""


@dataclass(frozen=True)
class Plan:
    """What all parts of one index share when it is upgraded.

    low, high: the offsets that must find room; neutral, 0, lies between them. fingerprint: names the model, "" where
    there is none. fill: makes an index of a leaf and its codes. unit: whether the model takes all vectors for unit
    ones, so that what codes do to their lengths is to be taken off again. rebuild: build graphs anew. vectors: the
    originals, where codes are too coarse to rank by.
    """

    low: float
    high: float
    fingerprint: str
    fill: Fill
    unit: bool = False
    rebuild: bool = False
    vectors: Vectors | None = None

    @property
    def size(self) -> float:
        return max(-self.low, self.high)

    @property
    def longest(self) -> float:
        """The largest sqrt(2 (high - offset)), which is what a Euclidean tail holds."""
        return float(np.sqrt(2 * (self.high - self.low)))
