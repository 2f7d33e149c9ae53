"""`Bound`: in how much of the bank a target may stand among the nearest, however it was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hubplugin.metric import Metric
from hubplugin.model.terms import Dot, Term
from hubplugin.vectors import Vectors

if TYPE_CHECKING:
    from hubplugin.reductions import Compute

WIDER = 1.4
"""The temperature of newcomers, as a multiple of that of members: near misses count for more, so that less is gained by
a vector that was made to stay just below the levels of a known bank (benchmarks/planted.py)."""


@dataclass(frozen=True)
class Bound:
    """The bound of a robust model. It keeps targets out of most of the bank's lists of the 10 nearest.

    levels: [m], the corrected score of each bank query's 10th nearest target in the gallery of the fit: a target with
    the offset o stands among the 10 nearest of the bank query u if s(b_u, t) + o >= levels_u. With the temperature tau,
    `lowered` lowers o until

        sum_u sigmoid( (s(b_u, t) + o - levels_u) / tau ) <= share * m / 2

    Each list that t stands in adds at least 1/2 to the sum, so t stands in no more than `share` of them. Near misses
    count, too. No list counts for more than 1, so that a target which lies very near to few queries keeps its offset.

    share: of a newcomer. members_share: of a target of the gallery of the fit; answers of the bank are left out of its
    sum. tau: of members; that of newcomers is `WIDER`. floor: an offset with which a target is not found. largest,
    largest_within: the largest share of bank queries that one target of the gallery had at the fit, and the largest
    within one cluster of them. for_members: whether offsets are lowered as those of members.
    """

    share: float
    members_share: float
    tau: float
    levels: np.ndarray
    floor: float
    largest: float
    largest_within: float
    for_members: bool = False

    def lowered(
        self, offsets: np.ndarray, first: Term, metric: Metric, targets: Vectors, compute: Compute
    ) -> np.ndarray:
        """`offsets` [n] of `targets`, within the bound: float32 [n]. first: a term over the bank."""
        from hubplugin.reductions import LeftOut, Limit

        share, tau, left_out = self.share, WIDER * self.tau, None
        if self.for_members:
            share, tau = self.members_share, self.tau
            answers = None if isinstance(first, Dot) else first.answers
            left_out = None if answers is None else LeftOut(answers)
        limit = Limit(self.levels, tau, share * len(self.levels) / 2, left_out)
        return limit.lowered(compute.similarities(first.bank, metric), targets, offsets).astype(np.float32)
