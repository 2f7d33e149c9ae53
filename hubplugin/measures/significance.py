"""How sure a figure is: bootstrap intervals over queries, and the paired test of two methods on the same queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from hubplugin.measures.hubness import binomial, k_occurrence

RESAMPLES = 1000
LEVEL = 0.95

AT_ONCE = 1 << 22
"""Values that are drawn at one time: 32 MiB."""


@dataclass(frozen=True)
class Figure:
    """A figure and its 95 % bootstrap interval over the queries."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, error: float) -> Figure:
        """With the interval that its standard error gives."""
        return cls(value=value, low=value - 1.96 * error, high=value + 1.96 * error)


@dataclass(frozen=True)
class Comparison:
    """Two methods on the same queries: how often a true target comes first.

    won, lost: queries that only the one, or only the other, answers right at rank 1. difference: of R@1, with its
    interval. p: McNemar's exact test, two-sided, that won and lost are equally likely.
    """

    won: int
    lost: int
    difference: Figure
    p: float


@dataclass(frozen=True)
class Side:
    """R@1 of some `queries`, 0 to 1, before and after, and the standard error of the change; what the queries are."""

    before: float
    after: float
    error: float
    queries: Annotated[int, Field(serialization_alias="probes")]
    what: str

    @classmethod
    def of(cls, before: np.ndarray, after: np.ndarray, what: str) -> Side:
        """Of the same queries: whether each was right before and after, [q]."""
        return cls(float(before.mean()), float(after.mean()), standard_error(after - before), len(before), what)

    @property
    def change(self) -> Figure:
        """With its 95 % interval."""
        return Figure.of(self.after - self.before, self.error)

    @property
    def is_noise(self) -> bool:
        """Whether the change is none beyond chance."""
        return self.change.low <= 0 <= self.change.high

    def __str__(self) -> str:
        return (
            f"R@1 {100 * self.before:.1f} -> {100 * self.after:.1f} (95 % interval of the change "
            f"{100 * self.change.low:+.1f} to {100 * self.change.high:+.1f}, {self.queries} {self.what})"
        )


def standard_error(differences: np.ndarray) -> float:
    """Of their mean."""
    return float(differences.std(ddof=1) / math.sqrt(len(differences)))


def interval(
    values: np.ndarray, seed: int, statistic: Callable[..., np.ndarray] = np.mean, resamples: int = RESAMPLES
) -> Figure:
    """`statistic` of the queries' values [j], with its percentile bootstrap interval (Efron 1979).

    statistic: reduces the axis that it is given as `axis`, as np.mean does.
    """
    value = float(statistic(values, axis=0))
    if len(values) < 2 or not np.ptp(values):
        return Figure(value=value, low=value, high=value)
    generator, drawn = np.random.default_rng(seed), list[np.ndarray]()
    at_once = max(1, AT_ONCE // len(values))
    for start in range(0, resamples, at_once):
        rows = generator.integers(0, len(values), (min(at_once, resamples - start), len(values)))
        drawn.append(statistic(values[rows], axis=1))
    low, high = np.quantile(np.concatenate(drawn), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Figure(value=value, low=float(low), high=float(high))


def hubness_interval(
    found: np.ndarray, targets: int, statistic: Callable[[np.ndarray], float], seed: int, resamples: int = RESAMPLES
) -> Figure:
    """`statistic` of the k-occurrence of the rows found by each query, `found` [q, k], over resampled queries.

    Resampling adds Poisson noise of its own to every count, which moves all figures towards that noise; so the
    percentiles are taken around the figure itself: value + (percentile - mean of the resamples).
    """
    generator = np.random.default_rng(seed)
    value = statistic(k_occurrence(found, targets))
    drawn = np.array(
        [
            statistic(k_occurrence(found[generator.integers(0, len(found), len(found))], targets))
            for _ in range(resamples)
        ]
    )
    low, high = np.quantile(drawn - drawn.mean(), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Figure(value=value, low=value + float(low), high=value + float(high))


def compare(first: np.ndarray, second: np.ndarray, seed: int) -> Comparison:
    """The method with the best ranks `second` [j] against the one with `first` [j], on the same queries."""
    before, after = first <= 1, second <= 1
    won, lost = int((after & ~before).sum()), int((before & ~after).sum())
    return Comparison(
        won=won,
        lost=lost,
        difference=interval(after.astype(np.float64) - before, seed),
        p=min(1.0, 2 * float(binomial(won + lost, 0.5)[: min(won, lost) + 1].sum())),
    )


def adjusted(p: Sequence[float]) -> list[float]:
    """The p of several tests, so corrected that of those below a level no more than that share are false on average
    (Benjamini & Hochberg 1995)."""
    order = np.argsort(p)[::-1]
    scaled = np.asarray(p, np.float64)[order] * len(p) / np.arange(len(p), 0, -1)
    found = np.empty(len(p))
    found[order] = np.minimum(np.minimum.accumulate(scaled), 1.0)
    corrected: list[float] = found.tolist()
    return corrected
