"""`blend`: the default, half Sinkhorn and half nearest neighbours, made for banks of any kind and size."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from hubplugin.methods.base import AnswersRule, FitInput, Method
from hubplugin.methods.nearest import NearestNeighbourNormalisation
from hubplugin.methods.sinkhorn import DualBankSinkhorn
from hubplugin.model import Term

SPREAD_SHARE = 0.5
"""The temperature is this share of the standard deviation of the similarities between bank and gallery. 0.35 and 0.7
gain as much on average, 0.35 loses more on small banks, 0.7 gains less on text and code (benchmarks/settings.py)."""

HALF_STRENGTH = 100
"""Bank queries with which offsets have half their strength: m / (m + 100). Fewer queries say less about each target,
so an offset is drawn towards the neutral 0. 50 loses on text and code, 200 gains less with 100 queries."""


class Blend(Method):
    """offset(t) = strength * ( share * dbsn(t) + (1 - share) * nnn(t) ), each of mean 0 over the gallery.

    A mean of offsets is an offset. Sinkhorn (`dbsn`) gains most where the bank is large and clean, the nearest
    neighbours (`nnn`) lose least where it is small, or where some targets are asked for again and again.

    tau: of `dbsn`; by default half the standard deviation of the similarities, since embedding models differ in it by a
        factor of five. iterations: of `dbsn`, as in the paper. k, alpha: of `nnn`. share: of `dbsn`.
    strength: by default m / (m + 100) for a bank of m queries. answers: by default left out unless the
        target bank holds them. benchmarks/settings.py measures every default on seventeen real settings.
    """

    name: ClassVar[str] = "blend"
    tau: float | None = Field(None, gt=0)
    iterations: int = Field(10, ge=1)
    k: int = Field(16, ge=1)
    alpha: float = Field(0.5, gt=0)
    share: float = Field(0.5, gt=0, lt=1)
    strength: float | None = Field(None, gt=0)
    sample: int | None = Field(default=None, ge=1)
    answers: AnswersRule = "auto"

    def resolved(self, given: FitInput) -> Blend:
        m = len(given.query_bank)
        tau = SPREAD_SHARE * given.survey.deviation if self.tau is None else self.tau
        strength = m / (m + HALF_STRENGTH) if self.strength is None else self.strength
        values = {"tau": float(f"{max(tau, 1e-12):.4g}"), "strength": float(f"{strength:.4g}")}
        return super().resolved(given).model_copy(update=values)

    def terms(self, given: FitInput) -> tuple[Term, ...]:
        if self.tau is None or self.strength is None:
            return self.resolved(given).terms(given)
        sinkhorn = DualBankSinkhorn(
            tau=self.tau, iterations=self.iterations, sample=self.sample, answers=self.answers
        ).terms(given)
        nearest = NearestNeighbourNormalisation(k=self.k, alpha=self.alpha, answers=self.answers).terms(given)
        parts = ((self.share, sinkhorn), (1 - self.share, nearest))
        return tuple(
            replace(term, scale=self.strength * share * term.scale) for share, terms in parts for term in terms
        )
