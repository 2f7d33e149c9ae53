"""`TargetFold`: what clicks teach about targets, a shift that a clicked one takes where the stored vector is ours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hubplugin.compute import same_rows
from hubplugin.errors import InputError


@dataclass(frozen=True, eq=False)
class TargetFold:
    """A clicked target t is stored as t + its shift, and its length is part of it; all others as they are.

    A target is known by its vector, as an offset is: what gets another vector is no longer folded, and targets of the
    same vector are folded alike. at: the clicked targets, float32 [c, d], of unit length where the metric is cosine.
    shifts: float32 [c, d]. strength: as the folds chose it. pairs: how many different pairs taught it
    (`hubplugin.learning`).
    """

    at: np.ndarray
    shifts: np.ndarray
    strength: float
    pairs: int

    def __post_init__(self) -> None:
        alike = self.at.ndim == 2 and self.at.shape == self.shifts.shape and self.at.dtype == self.shifts.dtype
        if not alike or not (np.isfinite(self.at).all() and np.isfinite(self.shifts).all()):
            raise ValueError("the targets of a fold and their shifts do not belong together")

    def __call__(self, targets: np.ndarray) -> np.ndarray:
        """What is stored in the place of `targets` [b, d]: float32 [b, d]."""
        rows = self.rows_of(targets)
        folded: np.ndarray = targets.copy()
        folded[rows >= 0] += self.shifts[rows[rows >= 0]]
        return folded

    def __str__(self) -> str:
        return f"{len(self.at)} targets are folded at strength {self.strength:g}, as {self.pairs} pairs taught"

    def rows_of(self, targets: np.ndarray) -> np.ndarray:
        """The row in `at` of each of `targets` [b, d], -1 for those that are not among them: int64 [b]."""
        return same_rows(targets, self.at)


def unfolded(what: str) -> InputError:
    """Says that `what` keeps targets as they are, so that the fold of a model would be left out in silence."""
    return InputError(
        f"learn='fold' moves targets towards what clicks ask for, and {what} keeps them as they are; use learn=True, "
        "or a store whose corrected vectors hubplugin writes: Qdrant with storage='vector', Chroma or LanceDB"
    )
