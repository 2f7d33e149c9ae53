"""The components behind the d that a user knows: how an offset is written into them, and read back."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

Snap: TypeAlias = Callable[[int, np.ndarray], np.ndarray]
"""snap(i, values) is what a quantiser makes of `values` [n] in component i of a tail."""

MODEL_BITS, STATE_BITS = 12, 8
"""How many of the last bits of a tail's last component name the model, and how many the state of its quantiser."""

PADDING = 1e-20
"""A component that holds no more than these bits: its square is nothing beside any similarity."""


@dataclass(frozen=True)
class Tail:
    """What every query has behind its d components, and so what a target's components there mean.

    With q the query's tail [w] and t a target's, the tail adds to the similarity of the two, up to a constant,

        inner product    offset(t) = q.t - q.q
        Euclidean        offset(t) = (q.q - |q - t|^2) / 2

    A vector that is added through plain Faiss gets the tail q as well. Under inner product that is the neutral
    offset 0, whatever q is. Under Euclidean nothing can lie nearer to a query, so it is the largest offset.
    """

    query: np.ndarray
    euclidean: bool

    @property
    def width(self) -> int:
        return len(self.query)

    def marked(self, fingerprint: str, state: bytes) -> Tail:
        """This tail with a query whose last component has bits that name a model and the `state` of its quantiser.

        Where that is padding it is next to nothing; else it becomes a little longer. Some kernels of Faiss round a
        query to bf16 (on CPUs with AVX512_SPR), so that the components that carry offsets may need all their bits.

        So an index and the model beside it are known to belong together, and Faiss itself, which compares the
        transforms, refuses to merge indexes whose codes do not mean the same.
        """
        query = self.query.astype(np.float32)
        query[-1] = query[-1] or PADDING
        bits, size = query[-1:].view(np.uint32), MODEL_BITS + STATE_BITS
        mark = _crc(fingerprint.encode(), MODEL_BITS) | _crc(state, STATE_BITS) << MODEL_BITS
        bits[:] = (bits >> size << size) + np.uint32((1 << size) + mark)
        return replace(self, query=query)

    def carries(self, fingerprint: str) -> bool:
        """Whether this tail was marked with `fingerprint`."""
        found = int(self.query[-1:].astype(np.float32).view(np.uint32)[0])
        return found & ((1 << MODEL_BITS) - 1) == _crc(fingerprint.encode(), MODEL_BITS)

    def offsets(self, tails: np.ndarray) -> np.ndarray:
        """The offsets that `tails` [n, w] stand for: float32 [n]."""
        q, t = self.query.astype(np.float64), tails.astype(np.float64)
        values = (q @ q - ((q - t) ** 2).sum(axis=1)) / 2 if self.euclidean else t @ q - q @ q
        return values.astype(np.float32)

    def fill(self, offsets: np.ndarray, snap: Snap, components: Sequence[int]) -> np.ndarray:
        """Tails [n, w] for `offsets` [n], written into `components`, which are in ascending order.

        Each component takes what is left of the offset, less the q_i^2 that the later ones hold in reserve, as far
        as its quantiser can express it, and leaves the rest to the next one. Neutral fills every component with its
        reserve.
        """
        q = self.query.astype(np.float64)
        tails = np.zeros((len(offsets), self.width), np.float32)
        left = q @ q - 2 * offsets.astype(np.float64) if self.euclidean else offsets.astype(np.float64) + q @ q
        for i in components:
            wanted = left - q[i + 1 :] @ q[i + 1 :]
            tails[:, i] = snap(i, q[i] + np.sqrt(np.maximum(wanted, 0)) if self.euclidean else wanted / q[i])
            left -= (tails[:, i] - q[i]) ** 2 if self.euclidean else tails[:, i] * q[i]
        return tails


def _crc(content: bytes, bits: int) -> int:
    return zlib.crc32(content) & ((1 << bits) - 1)
