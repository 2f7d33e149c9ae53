"""The components that an upgraded index appends to the d of its user, and how they hold an offset."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

Quantise: TypeAlias = Callable[[int, np.ndarray], np.ndarray]
"""quantise(i, values): what a quantiser makes of `values` [n] in extra dimension i."""

MODEL_BITS, STATE_BITS = 12, 8
"""How many of the last bits of the query's last extra component name the model, and how many its quantiser's state."""

PADDING = 1e-20
"""A component that holds no more than these bits: its square is nothing beside any similarity."""


@dataclass(frozen=True)
class ExtraDimensions:
    """The constant extra components of every query. They define how a target's extra components encode its offset.

    With q the extra components [w] of a query and t those of a target, they add to the similarity, up to a constant,

        inner product    offset(t) = q.t - q.q
        Euclidean        offset(t) = (q.q - |q - t|^2) / 2

    A vector that is added through plain Faiss gets q as well. Under inner product that is the neutral
    offset 0, whatever q is. Under Euclidean nothing can lie nearer to a query, so it is the largest offset.
    """

    query: np.ndarray
    euclidean: bool

    @property
    def width(self) -> int:
        return len(self.query)

    def with_fingerprint(self, fingerprint: str, state: bytes) -> ExtraDimensions:
        """The same with fingerprint bits in the query's last component: they name a model and a quantiser's `state`.

        Where that is padding it is next to nothing; else it becomes a little longer. Some kernels of Faiss round a
        query to bf16 (on CPUs with AVX512_SPR), so that the components that carry offsets may need all their bits.

        So an index and the model beside it are known to belong together, and Faiss itself, which compares the
        transforms, refuses to merge indexes whose codes do not mean the same.
        """
        query = self.query.astype(np.float32)
        query[-1] = query[-1] or PADDING
        bits, size = query[-1:].view(np.uint32), MODEL_BITS + STATE_BITS
        fingerprint_bits = _crc(fingerprint.encode(), MODEL_BITS) | _crc(state, STATE_BITS) << MODEL_BITS
        bits[:] = (bits >> size << size) + np.uint32((1 << size) + fingerprint_bits)
        return replace(self, query=query)

    def has_fingerprint(self, fingerprint: str) -> bool:
        """Whether the fingerprint bits are those of `fingerprint`."""
        found = int(self.query[-1:].astype(np.float32).view(np.uint32)[0])
        return found & ((1 << MODEL_BITS) - 1) == _crc(fingerprint.encode(), MODEL_BITS)

    def offsets(self, components: np.ndarray) -> np.ndarray:
        """The offsets that the extra `components` [n, w] of targets stand for: float32 [n]."""
        q, t = self.query.astype(np.float64), components.astype(np.float64)
        values = (q @ q - ((q - t) ** 2).sum(axis=1)) / 2 if self.euclidean else t @ q - q @ q
        return values.astype(np.float32)

    def components_for(self, offsets: np.ndarray, quantise: Quantise, dimensions: Sequence[int]) -> np.ndarray:
        """Extra components [n, w] for `offsets` [n], written into `dimensions`, which are in ascending order.

        Each dimension takes what is left of the offset, less the q_i^2 that the later ones hold in reserve, as far
        as its quantiser can express it, and leaves the rest to the next one. The neutral offset fills every dimension
        with its reserve.
        """
        q = self.query.astype(np.float64)
        components = np.zeros((len(offsets), self.width), np.float32)
        left = q @ q - 2 * offsets.astype(np.float64) if self.euclidean else offsets.astype(np.float64) + q @ q
        for i in dimensions:
            wanted = left - q[i + 1 :] @ q[i + 1 :]
            exact = q[i] + np.sqrt(np.maximum(wanted, 0)) if self.euclidean else wanted / q[i]
            components[:, i] = quantise(i, exact)
            left -= (components[:, i] - q[i]) ** 2 if self.euclidean else components[:, i] * q[i]
        return components


def _crc(content: bytes, bits: int) -> int:
    return zlib.crc32(content) & ((1 << bits) - 1)
