"""The raw offsets of a fit's own gallery, kept with the model, so that to ask for them after a fit costs no pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hubplugin.vectors import Spread, Vectors

KEPT_BYTES = 32 << 20
"""Offsets of larger galleries, above four million targets, are not kept: a model's memory does not grow with them."""


@dataclass(frozen=True)
class KeptOffsets:
    """raw: float64 [n], of the targets that `fingerprint` names, computed in `precision`."""

    raw: np.ndarray
    fingerprint: str
    precision: str

    @classmethod
    def of(cls, raw: np.ndarray, targets: Vectors, precision: str) -> KeptOffsets | None:
        """`raw` [n] of `targets`; None where it is too large to keep, or the targets are not here to be compared."""
        if raw.nbytes > KEPT_BYTES or isinstance(targets, Spread):
            return None
        raw = raw.copy()
        raw.flags.writeable = False
        return cls(raw, targets.fingerprint(), precision)

    def for_targets(self, targets: Vectors, precision: str) -> np.ndarray | None:
        """What is kept, float64 [n], read-only, if these are the same targets to the last bit; None otherwise."""
        same = len(self.raw) == targets.rows and self.precision == precision
        return self.raw if same and self.fingerprint == targets.fingerprint() else None
