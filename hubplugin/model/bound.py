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

MEMBERS = 8.0
"""A target of the fit's own gallery may have so many times the share of a newcomer, so that its ranking stays nearly as
it was: `benchmarks/planted.py` prints R@1 of honest queries with and without the bound."""


@dataclass(frozen=True)
class Bound:
    """The bound of a robust model. Its `limits` keep targets out of most of the bank's lists of the 10 nearest.

    levels: [m], the corrected score of each bank query's 10th nearest target in the gallery of the fit: a target with
    the offset o stands among the 10 nearest of the bank query u if s(b_u, t) + o >= levels_u. With the temperature tau,

        limit(t) = tau * ( log(share * m) - LSE_u( (s(b_u, t) - levels_u) / tau ) )

    makes the sum of exp((s(b_u, t) + limit(t) - levels_u) / tau) over the bank share * m. Each list that t stands in
    adds at least 1 to it, so t stands in no more than `share` of them. Near misses count too, so that little is gained
    by a vector that was made to stay just below the levels of a known bank.

    floor: an offset with which a target is not found. largest, largest_within: the largest share of bank queries that
    one target of the gallery had at the fit, and the largest within one cluster of them. for_members: whether the
    limits are those of the gallery of the fit, who have `MEMBERS` times the share, answers of the bank left out.
    """

    share: float
    tau: float
    levels: np.ndarray
    floor: float
    largest: float
    largest_within: float
    for_members: bool = False

    def limits(self, first: Term, metric: Metric, targets: Vectors, compute: Compute) -> np.ndarray:
        """The largest offset that each of `targets` may have: float64 [n]. first: a term over the bank."""
        from hubplugin.reductions import LeftOut, LogSum, reduce

        share, left_out = self.share, None
        if self.for_members:
            share *= MEMBERS
            answers = None if isinstance(first, Dot) else first.answers
            left_out = None if answers is None else LeftOut(answers)
        log_sum = LogSum(self.tau, -self.levels / self.tau)
        (sums,) = reduce(compute.similarities(first.bank, metric), targets, [log_sum], left_out, "bounding offsets")
        limits: np.ndarray = self.tau * (np.log(share * len(self.levels)) - sums)
        return limits
