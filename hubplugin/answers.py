"""An answer is no hub: whether a bank's answers are in the gallery, and which targets they are.

A *log* holds queries that people asked of this very gallery. Each is near its answer because it was asked for it, not
because the answer is a hub, so the answer's entry says nothing about hubness and is left out of the sums. Where the
answer is another target than the nearest, leaving out each target's largest entry takes care of most of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hubplugin.reductions import LeftOut, Similarities, Survey, nearest, survey
from hubplugin.vectors import Vectors

SURVEYED = 512
"""Bank queries that the kind of a bank is judged by: the spacing ratio then has a standard error of about 0.05."""

SPACINGS = 10
"""Gaps between neighbours in a query's list that the spacing ratio reads: the first, and those it is compared with."""

SMALLEST = 20
"""Bank queries, and targets, below which nothing is left out: too little would remain."""


@dataclass(frozen=True)
class Answers:
    """The answers of a bank in a gallery, as far as similarity tells them.

    levels: [m], the similarity of each bank query's nearest target, of gallery and target bank: what reaches it counts
    as an answer, also a target that comes later. weights: [m], 1 over the number of bank queries with the same
    nearest target, so that what was asked for in many wordings counts once.
    """

    levels: np.ndarray
    weights: np.ndarray

    @property
    def left_out(self) -> LeftOut:
        return LeftOut(self.levels)


def find_answers(similarities: Similarities, columns: Sequence[Vectors]) -> Answers | None:
    """The answers of the bank of `similarities` among the targets of all `columns`, in one pass; None where bank or
    targets are too few."""
    if min(similarities.m, sum(part.rows for part in columns)) < SMALLEST:
        return None
    levels, rows = nearest(similarities, columns)
    _, place, count = np.unique(rows, return_inverse=True, return_counts=True)
    return Answers(levels, 1.0 / count[place.reshape(-1)])


def look(similarities: Similarities, targets: Vectors) -> Survey:
    """What `spacing_ratio` reads, and the spread of the similarities, in one pass."""
    return survey(similarities, targets, SPACINGS + 1)


def spacing_ratio(seen: Survey) -> float:
    """How far the nearest target stands out: about 1 and below where answers are elsewhere, above 1 in a log.

    With s_1 >= s_2 >= ... the similarities of one query, the gaps j (s_j - s_j+1) have one mean for all j if the upper
    end of their distribution is exponential (Renyi's representation of order statistics), and it is less for small j if
    the end is shorter. The ratio is the mean of the first gap over the mean of the others, over all queries: it knows
    neither scale nor metric. An answer makes the first gap larger. 1 where there are fewer than 3 targets.

    Measured (benchmarks/settings.py): banks whose answers are elsewhere 0.60 to 0.95, logs 0.95 to 3.5, on text and
    code, text and images, and across languages.
    """
    gaps = -np.diff(seen.largest, axis=1) * np.arange(1, seen.largest.shape[1])
    if gaps.shape[1] < 2 or not gaps[:, 1:].mean() > 0:
        return 1.0
    return float(gaps[:, 0].mean() / gaps[:, 1:].mean())
