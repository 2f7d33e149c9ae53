"""Sinkhorn normalisation, over one bank (`sn`) and over two (`dbsn`)."""

from __future__ import annotations

import logging
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import BeforeValidator, Field

from hubplugin.bank import PreparedBank
from hubplugin.compute import HALF_TAU, KEPT_SHARE, sinkhorn
from hubplugin.methods.base import Method, Solution
from hubplugin.model import LogSumExp, Setting
from hubplugin.vectors import as_vectors, draw_sample

logger = logging.getLogger(__name__)

SAMPLED_ABOVE = 1_000_000
"""The most targets of a gallery from which no sample is drawn by default."""

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


class SinkhornNormalisation(Method):
    """offset(t) = tau * log beta(t), after `iterations` between query bank and targets.

    DBSN eq. 7-9, algorithm A1 (there hubness = -offset). The last half-step reads only
    log alpha, which belongs to the bank. So the offset is a weighted inverted softmax,
    -tau * LSE_u( s(b_u, t)/tau + log alpha_u ), and is defined for targets that the fit
    never saw.
    The paper uses tau = 0.01 and 10 iterations; the default tau is 0.05, which on
    docstring-to-function pairs gains where 0.01 loses.

    sample: The number of targets, drawn at random with a fixed seed, that represent the
        gallery while log alpha is computed. A fit to a large gallery then costs one
        pass over it instead of `iterations`. "auto", the default, draws a sample if
        there are more than a million targets, or more than fit in `memory` with the
        bank in float16: as many as fit, but at most 200,000. "all" uses all targets. A
        warning states the size of the sample; docs/speed.md states the cost.

    iterations: The number of iterations. The last ones are left out if they could not
        change an offset by 1e-6.

    If answers are left out, bank queries with the same nearest target share the mass of
    one query.
    """

    name: ClassVar[str] = "sn"
    dual: ClassVar[bool] = False
    tau: float = Field(0.05, gt=0)
    iterations: int = Field(10, ge=1)
    sample: Sample = "auto"

    def resolve_parameters(self, bank: PreparedBank) -> dict[str, Setting | None]:
        if self.sample != "auto":
            return {"sample": self.sample}
        if bank.targets is None:
            return {"sample": None}
        width = 2 if self.tau <= HALF_TAU else 4  # bytes of a stored exponential
        memory = int(KEPT_SHARE * bank.compute.bytes())
        # The number of targets whose exponentials fit in memory.
        room = memory // (len(bank.query_bank) * width)
        if bank.target_bank is not None:
            room -= len(bank.target_bank)
        # If not even `LEAST_CACHED` targets fit, memory does not limit the sample: each
        # iteration is a pass over the vectors, whatever their number.
        most = SAMPLED_ABOVE
        sample = SAMPLE
        if room >= LEAST_CACHED:
            most = min(room, most)
            sample = min(room, sample)
        return {"sample": sample if bank.targets.rows > most else None}

    def solve(self, bank: PreparedBank, k: int | None = None) -> Solution:
        """Run Sinkhorn.

        With `k`, the first product also gives the mean of the k largest similarities of
        each target.
        """
        targets = bank.require_targets()
        fitted = targets
        mass = 1.0  # the number of targets that each target of the fit stands for
        if bank.whole is not None:  # the targets are themselves a sample
            mass = bank.whole.count / targets.rows
        sample = targets.rows
        if isinstance(self.sample, int):
            sample = min(self.sample, targets.rows)
        is_sampled = sample < targets.rows
        if is_sampled:
            logger.warning(
                "Sinkhorn runs on a sample of %d of %d targets; sample='all' uses all",
                sample,
                targets.rows,
            )
            rng = np.random.default_rng(0)
            drawn = draw_sample(targets, sample, bank.metric, rng)
            fitted = as_vectors(drawn, targets.name)
            mass *= targets.rows / sample
            k = None  # the first product lacks most targets
        columns = [fitted]
        if self.dual and bank.target_bank is not None:
            columns.append(bank.answer_vectors)
        similarities = bank.similarities
        answers = None
        if self.answers == "left out":
            # `bank.answers` multiplies the bank by the gallery and the target bank. If
            # these are the columns of the fit, the fit reuses the products.
            has_all = self.dual or bank.target_bank is None
            similarities.keeps_products = has_all and not is_sampled
            answers = bank.answers
        scaling = sinkhorn(
            similarities,
            columns,
            self.tau,
            self.iterations,
            bank.same,
            answers,
            k,
            mass,
        )
        raw = None
        # With a sample, the log sums are not those of all targets.
        if scaling.log_sums is not None and not is_sampled:
            raw = -self.tau * scaling.log_sums
        thresholds = None if answers is None else answers.thresholds
        term = LogSumExp(
            bank.query_bank, self.tau, -self.tau, scaling.log_alpha, thresholds
        )
        return Solution((term,), raw, scaling.topk_means)


class DualBankSinkhorn(SinkhornNormalisation):
    """`sn` with the columns [targets ; target bank]: DBSN algorithm A2.

    The target bank narrows the gap between the bank's queries and the gallery (DBSN
    fig. 7). Without a target bank, the method equals `sn`.
    """

    name: ClassVar[str] = "dbsn"
    dual: ClassVar[bool] = True
