"""How sure a figure is: bootstrap intervals over queries, and the paired test of a change on the same queries.

No figure depends on the order in which the queries come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hubplugin.measures.hubness import binomial, k_occurrence

RESAMPLES = 1000

TAILS = (0.025, 0.975)
"""The quantiles that an interval of 95 % ends at."""

DRAWN = 1 << 22
"""Values that are drawn at one time: 32 MiB."""


@dataclass(frozen=True)
class Figure:
    """A figure and its 95 % interval over the queries."""

    value: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 for a gain and -1 for a loss beyond chance, 0 if the interval holds 0."""
        return int(self.low > 0) - int(self.high < 0)


@dataclass(frozen=True)
class Comparison:
    """Two methods on the same queries: how often a true target comes first.

    won, lost: queries that only the one, or only the other, answers right at rank 1. difference: of R@1, with its
    interval, see `measure_change`. p: McNemar's exact test, two-sided, that won and lost are equally likely; below 0.05
    where the interval leaves out 0, and nowhere else.
    """

    won: int
    lost: int
    difference: Figure
    p: float


@dataclass(frozen=True)
class Side:
    """R@1 of some `queries`, 0 to 1, before and after, the standard error of the change, and the change with its
    interval, see `measure_change`; what the queries are."""

    before: float
    after: float
    error: float
    queries: int
    what: str
    change: Figure

    @classmethod
    def of(cls, raw: np.ndarray, corrected: np.ndarray, label: str) -> Side:
        """The side of the queries that `label` names, from whether each was right, `raw` and `corrected`: [q]."""
        change, queries = measure_change(raw, corrected).difference, len(raw)
        error = (
            float((corrected - raw).std(ddof=1) / math.sqrt(queries))
            if queries > 1
            else math.nan
        )
        return cls(
            float(raw.mean()), float(corrected.mean()), error, queries, label, change
        )

    def __str__(self) -> str:
        return (
            f"R@1 {100 * self.before:.1f} -> {100 * self.after:.1f} (95 % interval of the change "
            f"{100 * self.change.low:+.1f} to {100 * self.change.high:+.1f}, {self.queries} {self.what})"
        )


def interval(
    values: np.ndarray,
    seed: int,
    statistic: Callable[..., np.ndarray] = np.mean,
    resamples: int = RESAMPLES,
) -> Figure:
    """A figure of queries with its percentile bootstrap interval (Efron 1979).

    Args:
        values: of the queries [j].
        seed: of the resampling.
        statistic: reduces the axis that it is given as `axis`, as np.mean does.
        resamples: how many.
    """
    values = np.sort(values)
    value = float(statistic(values, axis=0))
    if len(values) < 2 or not np.ptp(values):
        return Figure(value=value, low=value, high=value)
    generator, drawn = np.random.default_rng(seed), list[np.ndarray]()
    batch = max(1, DRAWN // len(values))
    for start in range(0, resamples, batch):
        rows = generator.integers(
            0, len(values), (min(batch, resamples - start), len(values))
        )
        drawn.append(statistic(values[rows], axis=1))
    low, high = np.quantile(np.concatenate(drawn), TAILS)
    return Figure(value=value, low=float(low), high=float(high))


def hubness_interval(
    hits: np.ndarray,
    targets: int,
    statistic: Callable[[np.ndarray], float],
    seed: int,
    resamples: int = RESAMPLES,
) -> Figure:
    """A figure of the k-occurrence over resampled queries.

    Resampling adds Poisson noise to every count, which moves all figures towards that noise; so the percentiles are
    taken around the figure itself: value + (percentile - mean of the resamples).

    Args:
        hits: the rows that each query finds [q, k].
        targets: how many targets there are.
        statistic: the figure, of the k-occurrence of all targets.
        seed: of the resampling.
        resamples: how many.
    """
    generator, hits = np.random.default_rng(seed), hits[np.lexsort(hits.T)]
    value = statistic(k_occurrence(hits, targets))
    samples = (
        hits[generator.integers(0, len(hits), len(hits))] for _ in range(resamples)
    )
    drawn = np.array([statistic(k_occurrence(sample, targets)) for sample in samples])
    low, high = np.quantile(drawn - drawn.mean(), TAILS)
    return Figure(value=value, low=value + float(low), high=value + float(high))


def measure_change(raw: np.ndarray, corrected: np.ndarray) -> Comparison:
    """The change from the mean of `raw` to that of `corrected`, from 0 to 1 and of the same queries: [j] each.

    The test gives the change of each query a sign at random (Fisher 1935): of right and wrong answers it is McNemar's
    exact test. The interval holds every change d that the same test does not reject. So its lower end is the smallest d
    with a chance of at least 2.5 % that queries drawn with probability 1/2 change by d or less in the mean (Hartigan
    1969). It is exact for right and wrong answers; of shares between them each gain counts as their mean, and each
    loss.
    """
    change = np.asarray(corrected, np.float64) - raw
    won, lost = int((change > 0).sum()), int((change < 0).sum())
    at_most = binomial(won + lost, 0.5).cumsum()
    no_gain, no_loss = float(at_most[lost]), float(at_most[won])
    low, high = (
        _lower_end(change, no_gain < REJECTED),
        -_lower_end(-change, no_loss < REJECTED),
    )
    difference = Figure(value=float(change.mean()), low=low, high=high)
    return Comparison(
        won=won, lost=lost, difference=difference, p=min(1.0, 2 * min(no_gain, no_loss))
    )


REJECTED = TAILS[0]


def _lower_end(change: np.ndarray, gain: bool) -> float:
    """See `measure_change`. gain: whether the test rejects 0, which is then below the lower end."""
    won, lost = change[change > 0], change[change < 0]
    same = np.append(0.0, binomial(len(change) - len(won) - len(lost), 0.5).cumsum())
    drawn = [_likely_counts(len(part)) for part in (won, lost)]
    chances = np.outer(drawn[0][1], drawn[1][1])

    def chance(d: float) -> float:
        sums = [
            count * (part.mean() - d if len(part) else 0.0)
            for (count, _), part in zip(drawn, (won, lost), strict=True)
        ]
        needed = (
            np.add.outer(*sums) / d
        )  # so many that stay the same bring the mean to d
        if d > 0:
            return float(
                (
                    chances
                    * (1 - same[np.clip(np.ceil(needed), 0, len(same) - 1).astype(int)])
                ).sum()
            )
        return float(
            (
                chances
                * same[np.clip(np.floor(needed), -1, len(same) - 2).astype(int) + 1]
            ).sum()
        )

    low, high = (0.0, 1.0) if gain else (-1.0, 0.0)
    while high - low > PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle) < REJECTED else (low, middle)
    return min(high, float(change.mean()))


PRECISION = 1e-6
"""Of the ends of an interval."""


def _likely_counts(count: int) -> tuple[np.ndarray, np.ndarray]:
    """How many of `count` are drawn with probability 1/2, and the chance of each, but for numbers that never come."""
    chances = binomial(count, 0.5)
    likely = np.flatnonzero(chances > 1e-10)
    return likely, chances[likely]


def adjust(p: Sequence[float]) -> list[float]:
    """The p of several tests, so corrected that of those below a level no more than that share are false on average
    (Benjamini & Hochberg 1995)."""
    order = np.argsort(p)[::-1]
    scaled = np.asarray(p, np.float64)[order] * len(p) / np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.minimum.accumulate(scaled), 1.0)
    return list(map(float, adjusted))
