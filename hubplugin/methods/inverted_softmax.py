"""Inverted softmax over one bank (`is`) and over two (`dualis`)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hubplugin.bank import PreparedBank
from hubplugin.methods.base import Method, Solution
from hubplugin.model import LogSumExp


class InvertedSoftmax(Method):
    """offset(t) = -tau * LSE_u( s(b_u, t) / tau ).

    Smith et al. 2017; QB-Norm eq. 1; DBSN eq. 3. The papers use tau = 0.02 and 0.05
    (beta = 20). The default is 0.05: on docstring-to-function pairs 0.02 ranks worse
    than no correction at all.
    """

    name: ClassVar[str] = "is"
    tau: float = Field(0.05, gt=0)

    def solve(self, bank: PreparedBank) -> Solution:
        answers = self.thresholds(bank)
        return Solution(
            (LogSumExp(bank.query_bank, self.tau, -self.tau, answers=answers),)
        )


class DualInvertedSoftmax(Method):
    """`is` over two banks.

    offset(t) = -lambda ( LSE_u( s(b_u, t)/tau_query ) + LSE_v( s(c_v, t)/tau_target ) )

    b is the query bank, c the target bank, and lambda = tau_query tau_target /
    (tau_query + tau_target). DBSN eq. 17-18; NNN eq. 3-5. The papers sweep both
    temperatures. By default, tau_query is that of `is`, and tau_target is ten times as
    large: on docstring-to-function pairs, equal temperatures rank worse than no
    correction.
    """

    name: ClassVar[str] = "dualis"
    tau_query: float = Field(0.05, gt=0)
    tau_target: float = Field(0.5, gt=0)

    def require_banks(self, bank: PreparedBank) -> None:
        bank.require_target_bank()

    def solve(self, bank: PreparedBank) -> Solution:
        # -lambda
        scale = -self.tau_query * self.tau_target / (self.tau_query + self.tau_target)
        answers = self.thresholds(bank)
        queries = LogSumExp(bank.query_bank, self.tau_query, scale, answers=answers)
        targets = LogSumExp(bank.require_target_bank(), self.tau_target, scale)
        return Solution((queries, targets))
