"""Sinkhorn normalisation, over one bank (`sn`) and over two (`dbsn`)."""

from __future__ import annotations

import logging
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import BeforeValidator, Field

from hubplugin.bank import PreparedBank
from hubplugin.compute import Columns, count_cacheable, sinkhorn
from hubplugin.methods.base import Method, Solution
from hubplugin.model import LogSumExp, Setting
from hubplugin.vectors import as_vectors, draw_sample

logger = logging.getLogger(__name__)

SAMPLED_ABOVE = 1_000_000
"""The most targets for which log alpha is computed on all of them by default."""

SAMPLE = 200_000
"""The most targets in a sample; fewer if memory has no room for as many."""

LEAST_CACHED = 10_000
"""The fewest targets for a sample that fits in memory. With fewer, log alpha would be
too coarse, so each iteration is a pass over all targets instead."""

Sample: TypeAlias = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"] | None,
    BeforeValidator(lambda value: None if value == "all" else value),
]
"""The number of targets for log alpha, see `SinkhornNormalisation`; None means all."""


def resolve_sample(sample: Sample, bank: PreparedBank, tau: float) -> int | None:
    """Return the number of targets in a sample, or None for all targets."""
    if sample != "auto":
        return sample
    if bank.targets is None:
        return None
    n = bank.targets.rows
    p = 0 if bank.target_bank is None else len(bank.target_bank)
    room = count_cacheable(len(bank.query_bank), bank.compute, tau) - p
    if room >= LEAST_CACHED:
        return None if n <= min(room, SAMPLED_ABOVE) else min(SAMPLE, room)
    return SAMPLE if n > SAMPLED_ABOVE else None


class SinkhornNormalisation(Method):
    """offset(t) = tau * log beta(t), after `iterations` between query bank and targets.

    DBSN eq. 7-9, algorithm A1 (there hubness = -offset). The last half-step reads only
    log alpha, which belongs to the bank. So the fit is a weighted inverted softmax,
    -tau * LSE_u( s(b_u, t)/tau + log alpha_u ), and extends to targets it never saw.
    The paper uses tau = 0.01 and 10 iterations; the default tau is 0.05, which on
    docstring-to-function pairs gains where 0.01 loses.

    sample: The number of targets, drawn at random with a fixed seed, that represent the
        gallery while log alpha is computed. A fit to a large gallery then costs one
        pass over it instead of `iterations`. "auto", the default, draws a sample if
        there are more than a million targets, or more than fit in `memory` with the
        bank in float16: as many as fit, but at most 200,000. "all" uses all targets. A
        warning states the size of the sample; docs/speed.md states the cost.

    If answers are left out, bank queries with the same nearest target share the mass of
    one query.
    """

    name: ClassVar[str] = "sn"
    dual: ClassVar[bool] = False
    tau: float = Field(0.05, gt=0)
    iterations: int = Field(10, ge=1)
    sample: Sample = "auto"

    def resolve_parameters(self, bank: PreparedBank) -> dict[str, Setting | None]:
        return {"sample": resolve_sample(self.sample, bank, self.tau)}

    def solve(self, bank: PreparedBank, k: int | None = None) -> Solution:
        """Run Sinkhorn.

        With `k`, the first product also gives the mean of the k largest similarities of
        each target.
        """
        targets = bank.require_targets()
        answers = bank.answers if self.answers == "left out" else None
        mass = bank.count / targets.rows
        sample = self.sample if isinstance(self.sample, int) else targets.rows
        is_sampled = sample < targets.rows
        seen = targets
        if is_sampled:
            message = (
                "Sinkhorn runs on a sample of %d of %d targets; sample='all' uses all"
            )
            logger.warning(message, sample, targets.rows)
            rng = np.random.default_rng(0)
            drawn = draw_sample(targets, sample, bank.metric, rng)
            seen = as_vectors(drawn, targets.name)
            mass = mass * targets.rows / sample
            k = None
        columns = [Columns(seen, mass)]
        if self.dual and bank.target_bank is not None:
            columns.append(Columns(bank.answer_vectors))
        scaling = sinkhorn(
            bank.similarities, columns, self.tau, self.iterations, bank.same, answers, k
        )
        raw = None
        if scaling.log_sums is not None and not is_sampled:
            raw = -self.tau * scaling.log_sums
        term = LogSumExp(
            bank.query_bank,
            self.tau,
            -self.tau,
            scaling.log_alpha,
            self.thresholds(bank),
        )
        return Solution((term,), raw, scaling.topk_means)


class DualBankSinkhorn(SinkhornNormalisation):
    """`sn` with the columns [targets ; target bank]: DBSN algorithm A2.

    The target bank narrows the gap between the bank's queries and the gallery (DBSN
    fig. 7). Without a target bank, the method equals `sn`.
    """

    name: ClassVar[str] = "dbsn"
    dual: ClassVar[bool] = True
