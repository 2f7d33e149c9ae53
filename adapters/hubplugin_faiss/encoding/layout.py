"""What an upgrade asks for, and the encoded index that comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import faiss
import numpy as np

from hubplugin.vectors import Vectors


@dataclass(frozen=True)
class Entries:
    """Consecutive codes [b, code_size]; with inverted lists, also the list number and the id of each: int64 [b]."""

    codes: np.ndarray
    lists: np.ndarray | None = None
    ids: np.ndarray | None = None


@dataclass(frozen=True)
class EncodedIndex:
    """A base index that lacks only its codes (`empty`), and these codes; `list_sizes` [nlist] with inverted lists."""

    empty: faiss.Index
    entries: Callable[[], Iterator[Entries]]
    list_sizes: np.ndarray | None = None


Assemble: TypeAlias = Callable[[EncodedIndex], faiss.Index]
"""Puts the codes of an encoded index into it: in memory, or in a file that is written piece by piece."""


@dataclass(frozen=True)
class UpgradeSpec:
    """What the handlers of one index share when it is upgraded.

    low, high: the range of offsets that must find room; the neutral offset 0 lies in it.
    fingerprint: that of the model, "" where offsets come from no model.
    assemble: puts codes into a base index.
    unit: whether the model takes all vectors for unit vectors; offsets then compensate what codes do to lengths.
    rebuild: build graphs anew.
    vectors: the originals [n, d], for the second stage of a two-stage index.
    """

    low: float
    high: float
    fingerprint: str
    assemble: Assemble
    unit: bool = False
    rebuild: bool = False
    vectors: Vectors | None = None

    @property
    def size(self) -> float:
        return max(-self.low, self.high)

    @property
    def longest(self) -> float:
        """The largest sqrt(2 (high - offset)), which is what Euclidean extra dimensions hold."""
        return float(np.sqrt(2 * (self.high - self.low)))
