"""Sinkhorn normalisation over the targets (`sn`), and over the targets and a target bank (`dbsn`)."""

from __future__ import annotations

import logging
import math
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import BeforeValidator, Field

from hubplugin.compute import Answers, Columns, Half, Scaling, Similarities, most_held, sinkhorn, sinkhorn_on_sample
from hubplugin.methods.base import FitInput, Method, Solution
from hubplugin.model import LogSumExp, Setting
from hubplugin.vectors import Spread, as_vectors, sampled, spool

logger = logging.getLogger(__name__)

SAMPLED_ABOVE = 1_000_000
"""Targets above which log alpha is sought on a sample, unless all are asked for."""

SAMPLE = 200_000
"""Targets of such a sample, or all where they are fewer."""

LEAST_HELD = 10_000
"""Targets that must find room if log alpha is to be sought on those that do: of fewer it would be too coarse, and
each iteration is a pass over all."""

Sample: TypeAlias = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"] | None,
    BeforeValidator(lambda given: None if given == "all" else given),
]
"""How many targets stand for the gallery while log alpha is sought, see `SinkhornNormalisation`; None is all."""


def resolved_sample(sample: Sample, given: FitInput) -> int | None:
    """`sample` without "auto"."""
    if sample != "auto" or given.targets is None:
        return None if sample == "auto" else sample
    n, held = given.targets.rows, most_held(len(given.query_bank), given.compute)
    return min(SAMPLE, n) if n > SAMPLED_ABOVE or n > held >= LEAST_HELD else None


class SinkhornNormalisation(Method):
    """offset(t) = tau * log beta(t), after `iterations` of Sinkhorn between the query bank and the targets.

    DBSN eq. 7-9, algorithm A1 (there hubness = -offset). The last half-step reads only log alpha, which
    belongs to the bank, so the fit is a weighted inverted softmax, -tau * LSE_u( s(b_u, t)/tau + log alpha_u ),
    and extends to targets it never saw. The paper uses tau = 0.01 and 10 iterations; the default tau is 0.05,
    which on docstring-to-function pairs gains where 0.01 loses.

    sample: how many targets, drawn at random with a fixed seed, stand for the whole gallery while log alpha is sought.
    A fit to a large gallery then costs one pass over it instead of `iterations`. "auto", the default, takes 200,000
    where there are more than a million, or more than `memory` has room for beside the bank in float16; "all" takes
    all of any number. All iterations but the last two are over as many of the sample as have room. A warning tells the
    error, see `compute.SampleError`.

    Where answers are left out, bank queries with the same nearest target share the mass of one.
    """

    name: ClassVar[str] = "sn"
    tau: float = Field(0.05, gt=0)
    iterations: int = Field(10, ge=1)
    sample: Sample = "auto"

    def found_in(self, given: FitInput) -> dict[str, Setting | None]:
        return {"sample": resolved_sample(self.sample, given)}

    def solve(self, given: FitInput) -> Solution:
        term, raw, _ = self.scaled(given)
        return Solution((term,), raw)

    def scaled(self, given: FitInput, k: int | None = None) -> tuple[LogSumExp, np.ndarray | None, Scaling]:
        """The term, its values on the targets [n] where they came along the way, and what Sinkhorn found. k: with the
        mean of the k largest similarities of each target."""
        similarities = Similarities.of(given.query_bank, given.metric, given.compute)
        targets = given.require_targets(self.name)
        answers: Answers | Literal["seek"] | None = "seek" if self.answers == "left out" else None
        sample, m = resolved_sample(self.sample, given), similarities.m
        is_sampled = sample is not None and (
            sample < targets.rows or targets.rows > most_held(m, given.compute) >= LEAST_HELD
        )
        if sample is not None and is_sampled:
            # An answer need not be in the sample.
            found = self._on_sample(given, similarities, sample, given.answers if answers else None)
        else:
            # Iterations read all of what lies in shards again and again, so it is brought here.
            here = spool(targets.blocks(), targets.name) if isinstance(targets, Spread) else targets
            columns = [Columns(here)]
            if self.name == "dbsn" and given.target_bank is not None:
                columns.append(Columns(given.target_bank_vectors))
            found = sinkhorn(similarities, columns, self.tau, self.iterations, given.same, answers, k)
        raw = None if is_sampled or found.log_sums is None else -self.tau * found.log_sums
        levels = None if found.answers is None else found.answers.levels
        return LogSumExp(given.query_bank, self.tau, -self.tau, found.log_alpha, levels), raw, found

    def _on_sample(self, given: FitInput, similarities: Similarities, sample: int, answers: Answers | None) -> Scaling:
        targets, rng = given.require_targets(self.name), np.random.default_rng(0)
        drawn = [sampled(targets, sample, given.metric, rng)]
        masses = [targets.rows / len(drawn[0])]
        if self.name == "dbsn" and given.target_bank is not None:
            drawn, masses = [*drawn, given.target_bank], [*masses, 1.0]
        whole, held = sum(map(len, drawn)), most_held(similarities.m, given.compute)
        if whole <= held:
            columns = [Columns(as_vectors(rows, targets.name), mass) for rows, mass in zip(drawn, masses, strict=True)]
            return sinkhorn(similarities, columns, self.tau, self.iterations, given.same, answers)
        # The sample itself takes room, too.
        share = min(max(held * (1 - drawn[0].nbytes / given.compute.bytes()), LEAST_HELD) / (whole / 2), 1.0)
        halves = []
        for number in range(2):
            few, half = [], []
            for rows, mass in zip(drawn, masses, strict=True):
                mine = rows[number::2]
                some = mine[np.sort(rng.permutation(len(mine))[: math.ceil(share * len(mine))])]
                half.append(Columns(as_vectors(mine, targets.name), mass))
                few.append(Columns(as_vectors(some, targets.name), mass * len(mine) / len(some)))
            halves.append(Half(few, half))
        found = sinkhorn_on_sample(similarities, halves, self.tau, self.iterations, given.same, answers)
        assert found.error is not None
        logger.warning(
            "Sinkhorn ran on a sample of %d of %d targets, %d at a time: the last marginal was off by %.2g %%, and "
            "offsets by the halves of the sample differ by at most %.2g; sample='all' takes all",
            len(drawn[0]),
            targets.rows,
            sum(part.targets.rows for part in halves[0].few),
            100 * found.error.marginal,
            found.error.change,
        )
        return found


class DualBankSinkhorn(SinkhornNormalisation):
    """As `sn`, with the columns [targets ; target bank]: DBSN algorithm A2.

    The target bank narrows the gap between the bank's queries and the gallery (DBSN fig. 7). Without one it
    is `sn`.
    """

    name: ClassVar[str] = "dbsn"
