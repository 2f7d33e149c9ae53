"""`blend`, the default: half Sinkhorn and half nearest neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from hubplugin.bank import PreparedBank
from hubplugin.methods.base import AnswersRule, Method, Solution
from hubplugin.methods.sinkhorn import DualBankSinkhorn, Sample, resolve_sample
from hubplugin.model import Setting, Term, TopKMean

SPREAD_SHARE = 0.5
"""The temperature as a share of the standard deviation of the similarities between bank
and gallery. 0.35 and 0.7 gain as much on average, and 0.35 loses 0.17 points of R@1 in
its worst setting (benchmarks/settings.py)."""

HALF_STRENGTH = 100
"""Bank queries with which offsets have half their strength: m / (m + 100). Fewer
queries say less about each target, so an offset is drawn towards the neutral 0. With 50
the mean of seventeen settings is 0.07 points of R@1 higher and the worst 0.12 lower;
with 200 they are 0.07 lower and 0.23 higher (benchmarks/settings.py)."""

ITERATIONS = 3
"""Sinkhorn iterations. Three rank as well as the papers' ten: R@1 gains 1.83 points in
the mean of seventeen settings (1.80 with ten) and 1.38 in 24 further ones (1.33); no
setting is behind by more than 0.04 (`python -m benchmarks.settings`, the first three
draws)."""


class Blend(Method):
    """offset(t) = strength * ( share * dbsn(t) + (1 - share) * nnn(t) ), centred.

    A mean of offsets is an offset. Sinkhorn (`dbsn`) gains most if the bank is large
    and clean. The nearest neighbours (`nnn`) lose least if it is small, or if some
    targets are asked for again and again.

    tau: Of `dbsn`; by default half the standard deviation of the similarities, since
        embedding models differ in it by a factor of five.
    iterations, sample: Of `dbsn`.
    k, alpha: Of `nnn`.
    share: Of `dbsn`; 0 is `nnn` alone, 1 `dbsn` alone.
    strength: By default m / (m + 100) for a bank of m different queries.
    answers: By default left out unless the target bank holds them.

    benchmarks/settings.py measures every default on seventeen real settings.
    """

    name: ClassVar[str] = "blend"
    tau: float | None = Field(None, gt=0)
    iterations: int = Field(ITERATIONS, ge=1)
    k: int = Field(16, ge=1)
    alpha: float = Field(0.5, gt=0)
    share: float = Field(0.5, ge=0, le=1)
    strength: float | None = Field(None, gt=0)
    sample: Sample = "auto"
    answers: AnswersRule = "auto"

    def resolve_parameters(self, bank: PreparedBank) -> dict[str, Setting | None]:
        m = len(bank.distinct)  # a query that is there twice says nothing more
        tau = SPREAD_SHARE * bank.deviation if self.tau is None else self.tau
        strength = m / (m + HALF_STRENGTH) if self.strength is None else self.strength
        return {
            "tau": float(f"{max(tau, 1e-12):.4g}"),
            "strength": float(f"{strength:.4g}"),
            "sample": resolve_sample(self.sample, bank, tau),
        }

    def solve(self, bank: PreparedBank) -> Solution:
        given = self.model_dump()
        of_sinkhorn = given["strength"] * self.share
        of_nearest = -given["strength"] * (1 - self.share) * self.alpha
        means = TopKMean(bank.query_bank, self.k, of_nearest, self.thresholds(bank))
        if not self.share:
            return Solution((means,))
        names = ("tau", "iterations", "sample", "answers")
        sinkhorn = DualBankSinkhorn(**{name: given[name] for name in names})
        # The first product of the fit serves both terms.
        k = self.k if self.share < 1 else None
        first = sinkhorn.solve(bank, k)
        (term,) = first.terms
        terms: tuple[Term, ...] = (replace(term, scale=of_sinkhorn * term.scale),)
        raw = None if first.raw is None else of_sinkhorn * first.raw
        if k is None:
            return Solution(terms, raw)
        terms += (means,)
        if raw is None or first.topk_means is None:
            return Solution(terms)
        return Solution(terms, raw + of_nearest * first.topk_means)
