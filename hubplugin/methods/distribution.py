"""Distribution normalisation (`dn`)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from hubplugin.bank import PreparedBank
from hubplugin.methods.base import OnePassMethod
from hubplugin.model import Dot, Term, TopKMean


class DistributionNormalisation(OnePassMethod):
    """offset(t) = -lam * mean(B_q).t, rank-equal to (q - lam mean(B_q)).(t - lam mean(B_t)).

    NNN appendix A3; lam = 0.5 as there. The mean is not normalised. Under Euclidean the product becomes
    s(mean(B_q), t).
    """

    name: ClassVar[str] = "dn"
    lam: float = Field(0.5, gt=0)

    def terms(
        self, bank: PreparedBank, thresholds: np.ndarray | None
    ) -> tuple[Term, ...]:
        if (
            thresholds is not None
        ):  # the mean of all entries of a target but those left out
            return (
                TopKMean(
                    bank.query_bank,
                    len(bank.query_bank),
                    -self.lam,
                    thresholds,
                ),
            )
        # Kept in float64: no bank row, so it is not held by float32, and far from the origin its rounding would show.
        return (
            Dot(
                bank.query_bank.mean(axis=0, dtype=np.float64, keepdims=True),
                -self.lam,
            ),
        )
