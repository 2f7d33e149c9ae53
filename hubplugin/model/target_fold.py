"""`TargetFold`: what clicks teach about targets, a shift that a clicked one takes where the stored vector is ours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hubplugin.errors import InputError

SAME = 1e-3
"""Vectors that differ by less, of their length, are the same: float16 moves one by half of that."""

PROJECTIONS = 4
"""Numbers by which the vectors that may be the same are found."""


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
        directions, known, order = self._known
        keys = targets @ directions
        room = SAME * np.linalg.norm(targets, axis=1)
        first = np.searchsorted(known[:, 0], keys[:, 0] - room)
        counts = np.searchsorted(known[:, 0], keys[:, 0] + room, "right") - first
        row = np.repeat(np.arange(len(targets)), counts)
        place = np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)
        near = (np.abs(keys[row] - known[place]) <= room[row, None]).all(axis=1)
        row, place = row[near], order[place[near]]
        apart = np.linalg.norm(targets[row] - self.at[place], axis=1)
        nearest_last = np.argsort(-apart, kind="stable")
        nearest_last = nearest_last[(apart <= room[row])[nearest_last]]
        rows = np.full(len(targets), -1, np.int64)
        rows[row[nearest_last]] = place[nearest_last]
        return rows

    @cached_property
    def _known(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Directions of length 1 [d, p], and `at` along them [c, p] in the order [c] of the first."""
        directions = np.random.default_rng(0).normal(size=(self.at.shape[1], PROJECTIONS))
        directions = (directions / np.linalg.norm(directions, axis=0)).astype(np.float32)
        keys = self.at @ directions
        order = np.argsort(keys[:, 0], kind="stable")
        return directions, keys[order], order


def unfolded(what: str) -> InputError:
    """Says that `what` keeps targets as they are, so that the fold of a model would be left out in silence."""
    return InputError(
        f"learn='fold' moves targets towards what clicks ask for, and {what} keeps them as they are; use learn=True, "
        "or a store whose corrected vectors hubplugin writes: Qdrant with storage='vector', Chroma or LanceDB"
    )
