"""Distribution normalisation (`dn`)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from hubplugin.bank import PreparedBank
from hubplugin.methods.base import OnePassMethod
from hubplugin.model import Dot, Term, TopKMean


class DistributionNormalisation(OnePassMethod):
    """offset(t) = -lam * mean(B_q).t.

    It ranks like (q - lam mean(B_q)).(t - lam mean(B_t)) in NNN appendix A3, which also
    uses lam = 0.5. The mean is not normalised. For Euclidean distance, the product
    becomes s(mean(B_q), t).
    """

    name: ClassVar[str] = "dn"
    lam: float = Field(0.5, gt=0)

    def terms(self, bank: PreparedBank, answers: np.ndarray | None) -> tuple[Term, ...]:
        queries = bank.query_bank
        if answers is not None:
            # Take the mean of all entries of a target that are not left out.
            return (TopKMean(queries, len(queries), -self.lam, answers),)
        # Far from the origin, float32 would round too much.
        mean = queries.mean(axis=0, dtype=np.float64, keepdims=True)
        return (Dot(mean, -self.lam),)
