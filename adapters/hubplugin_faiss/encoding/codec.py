"""How the codes of a quantiser carry extra dimensions.

A code is a row of fields of equal size, lowest bit first. Extra dimensions are a few more fields at its end, written
by a quantiser of the same kind that is only as wide as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.extra_dimensions import ExtraDimensions
from hubplugin_faiss.encoding.layout import UpgradeSpec

E = 1e-3
"""The query's extra component under inner product, wherever the offsets allow it. Scores are shifted by E^2, which is
below rounding, and a stored offset / E keeps every digit in a float of any size."""


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
    """Appends extra dimensions to codes of `head_bits` bits, as `extra_bits` more, and removes them again.

    quantiser: encodes extra components [n, w].
    offset_components: which of them carry the offset; the others are padding.
    limits: the smallest and the largest value that a component may have.
    step: the extra components of centroids are multiples of it, 0 for no such restriction.
    """

    extra: ExtraDimensions
    quantiser: Quantiser
    offset_components: Sequence[int]
    head_bits: int
    extra_bits: int
    limits: tuple[float, float] = (-np.inf, np.inf)
    step: float = 0.0

    @property
    def code_size(self) -> int:
        return -(-(self.head_bits + self.extra_bits) // 8)

    def components_for(self, offsets: np.ndarray, bases: np.ndarray | None = None) -> np.ndarray:
        """The extra components [n, w] that come closest to `offsets` [n] after coding.

        bases [n, w]: extra components of the centroids, where codes hold differences from these.
        """
        about = np.zeros((len(offsets), self.extra.width), np.float32) if bases is None else bases

        def quantise(i: int, values: np.ndarray) -> np.ndarray:
            components = np.zeros((len(values), self.extra.width), np.float32)
            components[:, i] = np.clip(values - about[:, i], *self.limits)
            return np.asarray(self.quantiser.decode(self.quantiser.compute_codes(components))[:, i] + about[:, i])

        return self.extra.components_for(offsets, quantise, self.offset_components)

    def centres(self, offsets: np.ndarray) -> np.ndarray:
        """Extra components [n, w] of centroids whose lists shall rank as if every entry had that of `offsets` [n].

        Where levels are close they lie a whole number of steps from the query's, so that neutral is a level in every
        list.
        """
        components = self.extra.components_for(offsets, exactly, self.offset_components[:1])
        if self.step:
            components[:, 0] = (
                self.extra.query[0] + np.round((components[:, 0] - self.extra.query[0]) / self.step) * self.step
            )
        components[:, 1:] = self.extra.query[1:]
        return components

    def join(self, heads: np.ndarray, components: np.ndarray) -> np.ndarray:
        """Codes `heads` [n, bytes] with the codes of extra `components` [n, w] appended: uint8 [n, code_size]."""
        if isinstance(self.quantiser, faiss.ScalarQuantizer) and self.quantiser.qtype == HALF:
            require_finite(heads.view(np.uint16))
        extra_codes = self.quantiser.compute_codes(components)
        if self.head_bits % 8 == 0:
            return np.concatenate([heads, extra_codes], axis=1)
        return np.packbits(
            np.concatenate([_bits(heads)[:, : self.head_bits], _bits(extra_codes)[:, : self.extra_bits]], axis=1),
            axis=1,
            bitorder="little",
        )

    def head(self, codes: np.ndarray) -> np.ndarray:
        """Codes [n, code_size] without their extra dimensions."""
        if self.head_bits % 8 == 0:
            return np.ascontiguousarray(codes[:, : self.head_bits // 8])
        return np.packbits(_bits(codes)[:, : self.head_bits], axis=1, bitorder="little")


class Codec(ABC):
    """One kind of codes: designs extra dimensions for them, and widens the quantiser that writes them."""

    def __init__(self, index: faiss.Index):
        self.index, self.euclidean = index, index.metric_type == faiss.METRIC_L2

    @property
    @abstractmethod
    def lossy(self) -> bool:
        """Whether codes may change the length of a vector by more than a hundredth."""

    @abstractmethod
    def design(self, spec: UpgradeSpec, sample: np.ndarray, bases: np.ndarray | None) -> Coder:
        """Extra dimensions with room for the offsets of `spec`, and their coder.

        sample: some of the offsets [k]. bases: the offset [k] that the centroid of each one stands for, where codes
        hold differences from centroids.
        """

    @abstractmethod
    def coder(self, d: int, extra: ExtraDimensions) -> Coder:
        """The coder that wrote `extra` behind the d components of this index."""

    def require_fits(self, vectors: np.ndarray) -> None:  # noqa: B027
        """Raises StoreError if codes cannot hold components as large as those of `vectors` [n, d]."""

    @abstractmethod
    def widen(self, new: faiss.Index, coder: Coder) -> None:
        """Gives the widened index `new` the quantiser of this one, extended by that of `coder`."""

    @abstractmethod
    def narrow(self, new: faiss.Index, d: int) -> None:
        """Gives the index `new` the first d components of the quantiser of this one."""

    def _extra(self, spec: UpgradeSpec, query: list[float], width: int, state: bytes) -> ExtraDimensions:
        padded = np.zeros(width, np.float32)
        padded[: len(query)] = query
        return ExtraDimensions(padded, self.euclidean).with_fingerprint(spec.fingerprint, state)


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
