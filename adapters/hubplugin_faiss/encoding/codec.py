"""How the codes of a quantiser carry extra dimensions.

A code is a row of fields of equal size, lowest bit first. Extra dimensions are a few more fields at its end, written
by a quantiser of the same kind that is only as wide as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.extra_dimensions import Tail
from hubplugin_faiss.encoding.layout import Plan

E = 1e-3
"""The query's tail under inner product, wherever the offsets allow it: scores are shifted by E^2, below rounding, and
a stored offset / E keeps every digit in a float of any size."""


HALF = faiss.ScalarQuantizer.QT_fp16


LARGEST = 65504.0
"""The largest number in the 16 bits of an fp16; what is larger becomes infinite there, and scores become NaN."""


class Quantiser(Protocol):
    """What Faiss's ScalarQuantizer and ProductQuantizer offer."""

    def compute_codes(self, x: np.ndarray) -> np.ndarray: ...

    def decode(self, codes: np.ndarray) -> np.ndarray: ...


class Floats:
    """float32 components as they are."""

    def __init__(self, width: int):
        self._width = width

    def compute_codes(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x, np.float32).view(np.uint8).reshape(len(x), 4 * self._width)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(codes).view(np.float32).reshape(len(codes), self._width)


@dataclass(frozen=True)
class Coder:
    """Writes a tail behind codes of `head_bits` bits as `tail_bits` more, and takes it off again.

    quantiser: codes tails [n, w]. components: those of the tail that carry the offset; the others are padding.
    limits: the smallest and largest value that a component may have. step: what the tails of centroids are multiples
    of, 0 for nothing.
    """

    tail: Tail
    quantiser: Quantiser
    components: Sequence[int]
    head_bits: int
    tail_bits: int
    limits: tuple[float, float] = (-np.inf, np.inf)
    step: float = 0.0

    @property
    def code_size(self) -> int:
        return -(-(self.head_bits + self.tail_bits) // 8)

    def tails(self, offsets: np.ndarray, bases: np.ndarray | None = None) -> np.ndarray:
        """The tails [n, w] that come closest to `offsets` [n], where codes hold how they differ from `bases` [n, w]."""
        about = np.zeros((len(offsets), self.tail.width), np.float32) if bases is None else bases

        def snap(i: int, values: np.ndarray) -> np.ndarray:
            tails = np.zeros((len(values), self.tail.width), np.float32)
            tails[:, i] = np.clip(values - about[:, i], *self.limits)
            return np.asarray(self.quantiser.decode(self.quantiser.compute_codes(tails))[:, i] + about[:, i])

        return self.tail.fill(offsets, snap, self.components)

    def centres(self, offsets: np.ndarray) -> np.ndarray:
        """Tails [n, w] of centroids whose lists are to rank as if every entry had that offset.

        Where levels are close they lie a whole number of steps from the query's, so that neutral is a level in every
        list.
        """
        tails = self.tail.fill(offsets, exactly, self.components[:1])
        if self.step:
            tails[:, 0] = self.tail.query[0] + np.round((tails[:, 0] - self.tail.query[0]) / self.step) * self.step
        tails[:, 1:] = self.tail.query[1:]
        return tails

    def join(self, heads: np.ndarray, tails: np.ndarray) -> np.ndarray:
        """Codes of vectors [n, bytes] with the codes of `tails` [n, w] behind them: uint8 [n, code_size]."""
        if isinstance(self.quantiser, faiss.ScalarQuantizer) and self.quantiser.qtype == HALF:
            require_finite(heads.view(np.uint16))
        behind = self.quantiser.compute_codes(tails)
        if self.head_bits % 8 == 0:
            return np.concatenate([heads, behind], axis=1)
        return np.packbits(
            np.concatenate([_bits(heads)[:, : self.head_bits], _bits(behind)[:, : self.tail_bits]], axis=1),
            axis=1,
            bitorder="little",
        )

    def head(self, codes: np.ndarray) -> np.ndarray:
        """Codes [n, code_size] as they were without a tail."""
        if self.head_bits % 8 == 0:
            return np.ascontiguousarray(codes[:, : self.head_bits // 8])
        return np.packbits(_bits(codes)[:, : self.head_bits], axis=1, bitorder="little")


class Codec(ABC):
    """The kind of codes that a leaf holds: how a tail is chosen for them, and the leaf's quantiser widened."""

    lossy = False
    """Whether codes keep less of a vector than its length to within a hundredth."""

    def __init__(self, index: Any):
        self.index, self.euclidean = index, index.metric_type == faiss.METRIC_L2

    @abstractmethod
    def plan(self, plan: Plan, sample: np.ndarray, bases: np.ndarray | None) -> Coder:
        """A tail with room for what `plan` says. `sample` [k] are some of the offsets; `bases` [k], where codes hold
        differences from a centroid, the offset that the tail of each one's centroid stands for."""

    @abstractmethod
    def coder(self, d: int, tail: Tail) -> Coder:
        """Of an index that has `tail` behind its d components: what wrote it."""

    def require_fits(self, vectors: np.ndarray) -> None:  # noqa: B027
        """Raises StoreError if codes cannot hold components as large as those of `vectors` [n, d]."""

    @abstractmethod
    def widen(self, new: Any, coder: Coder) -> None:
        """Gives the widened leaf `new` the quantiser of this one with that of the tail behind it."""

    @abstractmethod
    def narrow(self, new: Any, d: int) -> None:
        """Gives the leaf `new` the first d components of the quantiser of this one."""

    def _tail(self, plan: Plan, query: list[float], width: int, state: bytes) -> Tail:
        padded = np.zeros(width, np.float32)
        padded[: len(query)] = query
        return Tail(padded, self.euclidean).marked(plan.fingerprint, state)


def require_finite(halves: np.ndarray) -> None:
    """Raises StoreError if one of the fp16 numbers whose bits are `halves` is infinite."""
    if ((halves & 0x7FFF) == 0x7C00).any():
        raise StoreError(
            f"components beyond {LARGEST:,.0f} are infinite in codes of 16 bits; scale the vectors down before they "
            "are indexed, or give them a type with room for them, such as Flat"
        )


def exactly(component: int, values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)


def _bits(codes: np.ndarray) -> np.ndarray:
    return np.unpackbits(codes, axis=1, bitorder="little")
