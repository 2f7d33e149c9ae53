"""Distribution normalisation (`dn`)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from hubplugin.bank import PreparedBank
from hubplugin.methods.base import Method, Solution
from hubplugin.model import Dot, TopKMean


class DistributionNormalisation(Method):
    """offset(t) = -lam * mean(B_q).t.

    It ranks like (q - lam mean(B_q)).(t - lam mean(B_t)) in NNN appendix A3, which also
    uses lam = 0.5. The mean is not normalised. For Euclidean distance, the product
    becomes s(mean(B_q), t).
    """

    name: ClassVar[str] = "dn"
    lam: float = Field(0.5, gt=0)

    def solve(self, bank: PreparedBank) -> Solution:
        queries = bank.query_bank
        answers = self.thresholds(bank)
        if answers is not None:
            # The mean of a target's m largest similarities is that of all m, without
            # those that are left out.
            return Solution((TopKMean(queries, len(queries), -self.lam, answers),))
        # Use float64: far from the origin, float32 would round too much.
        mean = queries.mean(axis=0, dtype=np.float64, keepdims=True)
        return Solution((Dot(mean, -self.lam),))
