"""`blend`, the default: half Sinkhorn and half nearest neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from hubplugin.bank import PreparedBank
from hubplugin.methods.base import AnswersRule, Method, Solution
from hubplugin.methods.sinkhorn import DualBankSinkhorn, Sample
from hubplugin.model import Setting, Term, TopKMean

SPREAD_SHARE = 0.5
"""The temperature as a share of the standard deviation of the similarities between bank
and gallery. 0.35 and 0.7 gain as much on average, but 0.35 loses 0.17 points of R@1 in
the worst setting (benchmarks/settings.py)."""

HALF_STRENGTH = 100
"""The number of bank queries at which offsets have half their strength: m / (m + 100).
Fewer queries say less about each target, so offsets are drawn towards the neutral 0.
With 50, the mean R@1 of seventeen settings is 0.07 points higher and the worst 0.12
lower; with 200, the mean is 0.07 lower and the worst 0.23 higher
(benchmarks/settings.py)."""

ITERATIONS = 3
"""Sinkhorn iterations. Three rank as well as the papers' ten: R@1 gains 1.83 points on
average over seventeen settings (1.80 with ten), and 1.38 over 24 more (1.33 with ten).
No setting loses more than 0.04 (`python -m benchmarks.settings`, the first three
draws)."""


class Blend(Method):
    """offset(t) = strength * ( share * dbsn(t) + (1 - share) * nnn(t) ), centred.

    The mean of two offsets is again an offset. Sinkhorn (`dbsn`) gains most if the bank
    is large and clean. The nearest neighbours (`nnn`) lose least if the bank is small,
    or if people ask for some targets again and again.

    tau: The temperature of `dbsn`; by default, half the standard deviation of the
        similarities, in which embedding models differ by a factor of five.
    iterations, sample: The parameters of `dbsn`.
    k, alpha: The parameters of `nnn`.
    share: The share of `dbsn`: 0 is `nnn` alone, and 1 is `dbsn` alone.
    strength: The factor of all offsets; by default, m / (m + 100) for a bank of m
        different queries.
    answers: By default, left out unless the target bank holds them.

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
        tau = self.tau
        if tau is None:
            tau = SPREAD_SHARE * bank.deviation
        strength = self.strength
        if strength is None:
            m = len(bank.distinct)  # a repeated query adds nothing
            strength = m / (m + HALF_STRENGTH)
        # Round to four digits, which `describe_method` shows, too.
        tau = float(f"{max(tau, 1e-12):.4g}")
        strength = float(f"{strength:.4g}")
        dbsn = DualBankSinkhorn(tau=tau, iterations=self.iterations, sample=self.sample)
        sample = dbsn.resolve_parameters(bank)["sample"]
        return {"tau": tau, "strength": strength, "sample": sample}

    def solve(self, bank: PreparedBank) -> Solution:
        resolved = self.model_dump()
        nnn_scale = -resolved["strength"] * (1 - self.share) * self.alpha
        if not self.share:
            thresholds = self.thresholds(bank)
            return Solution((TopKMean(bank.query_bank, self.k, nnn_scale, thresholds),))
        shared = ("tau", "iterations", "sample", "answers")
        dbsn = DualBankSinkhorn(**{name: resolved[name] for name in shared})
        # If `nnn` is needed, too, the first product of the fit serves both terms.
        solution = dbsn.solve(bank, self.k if self.share < 1 else None)
        (term,) = solution.terms
        scale = resolved["strength"] * self.share
        terms: tuple[Term, ...] = (replace(term, scale=scale * term.scale),)
        # The raw offsets are known only if `dbsn` has computed its own and the means.
        raw = None
        if solution.raw is not None:
            raw = scale * solution.raw
        if self.share == 1:
            return Solution(terms, raw)
        terms += (TopKMean(bank.query_bank, self.k, nnn_scale, term.answers),)
        if raw is None or solution.topk_means is None:
            return Solution(terms)
        return Solution(terms, raw + nnn_scale * solution.topk_means)
