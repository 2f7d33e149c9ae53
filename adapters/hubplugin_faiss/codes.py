"""How the codes of a quantiser carry a tail. A code is a row of fields of equal size, lowest bit first, so that a
tail is a few more fields behind it, written by a quantiser of the same kind that is only as wide as the tail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hubplugin_faiss.tail import Tail

E = 1e-3
"""The query's tail under inner product, wherever the offsets allow it: scores are shifted by E^2, below rounding, and
a stored offset / E keeps every digit in a float of any size."""


@dataclass(frozen=True)
class Range:
    """The smallest and the largest offset that a tail must be able to express; neutral, 0, lies between them."""

    low: float
    high: float

    @classmethod
    def of(cls, *offsets: float) -> Range:
        return cls(min(0.0, *offsets), max(0.0, *offsets))

    @property
    def size(self) -> float:
        return max(-self.low, self.high)


class Quantiser(Protocol):
    """What Faiss's ScalarQuantizer and ProductQuantizer offer."""

    def compute_codes(self, x: np.ndarray) -> np.ndarray: ...

    def decode(self, codes: np.ndarray) -> np.ndarray: ...


class Floats:
    """float32 components as they are."""

    def compute_codes(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x, np.float32).view(np.uint8)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(codes).view(np.float32)


@dataclass(frozen=True)
class Coder:
    """Writes a tail behind codes of `head_bits` bits as `tail_bits` more, and takes it off again.

    quantiser: codes tails [n, w]. used: how many components of the tail carry the offset; the others are padding.
    """

    tail: Tail
    quantiser: Quantiser
    used: int
    head_bits: int
    tail_bits: int

    @property
    def code_size(self) -> int:
        return -(-(self.head_bits + self.tail_bits) // 8)

    def tails(self, offsets: np.ndarray) -> np.ndarray:
        """The tails [n, w] that come closest to `offsets` [n]."""
        return self.tail.fill(offsets, self._snap, self.used)

    def join(self, heads: np.ndarray, tails: np.ndarray) -> np.ndarray:
        """Codes of vectors [n, bytes] with their tails [n, w] behind them: uint8 [n, code_size]."""
        behind = self.quantiser.compute_codes(tails)
        if self.head_bits % 8 == 0:
            return np.concatenate([heads, behind], axis=1)
        return np.packbits(
            np.concatenate([_bits(heads)[:, : self.head_bits], _bits(behind)[:, : self.tail_bits]], axis=1),
            axis=1,
            bitorder="little",
        )

    def split(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Codes [n, code_size] as the codes that they were without a tail, and their tails [n, w]."""
        if self.head_bits % 8 == 0:
            heads, behind = codes[:, : self.head_bits // 8], codes[:, self.head_bits // 8 :]
        else:
            bits = _bits(codes)
            heads = np.packbits(bits[:, : self.head_bits], axis=1, bitorder="little")
            end = self.head_bits + self.tail_bits
            behind = np.packbits(bits[:, self.head_bits : end], axis=1, bitorder="little")
        return np.ascontiguousarray(heads), self.quantiser.decode(np.ascontiguousarray(behind))

    def _snap(self, i: int, values: np.ndarray) -> np.ndarray:
        tails = np.zeros((len(values), self.tail.width), np.float32)
        tails[:, i] = values
        snapped: np.ndarray = self.quantiser.decode(self.quantiser.compute_codes(tails))[:, i]
        return snapped


def _bits(codes: np.ndarray) -> np.ndarray:
    return np.unpackbits(codes, axis=1, bitorder="little")
