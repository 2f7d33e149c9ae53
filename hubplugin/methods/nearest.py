"""Corrections by the mean of the nearest bank queries: `nnn` and `csls`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hubplugin.bank import PreparedBank
from hubplugin.methods.base import Method, Solution
from hubplugin.model import TopKMean


class NearestNeighbourNormalisation(Method):
    """offset(t) = -alpha * mean of the k largest s(b_u, t): NNN eq. 1-2.

    The paper uses alpha = 0.75 and k = 128, tuned for each model and data set; the
    defaults, alpha = 0.5 and k = 16, gain more on docstring-to-function pairs. A k
    larger than the bank takes the whole bank.
    """

    name: ClassVar[str] = "nnn"
    k: int = Field(16, ge=1)
    alpha: float = Field(0.5, gt=0)

    def solve(self, bank: PreparedBank) -> Solution:
        answers = self.thresholds(bank)
        return Solution((TopKMean(bank.query_bank, self.k, -self.alpha, answers),))


class CrossDomainLocalScaling(Method):
    """offset(t) = -1/2 * mean of the k largest s(b_u, t).

    It ranks like 2 s(q, t) - r(q) - r(t) in QB-Norm section 3.4. k = 10 as there and in
    Lample et al. 2018.
    """

    name: ClassVar[str] = "csls"
    k: int = Field(10, ge=1)

    def solve(self, bank: PreparedBank) -> Solution:
        answers = self.thresholds(bank)
        return Solution((TopKMean(bank.query_bank, self.k, -0.5, answers),))
