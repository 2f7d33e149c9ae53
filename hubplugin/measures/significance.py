"""Tell how sure a figure is, by bootstrap intervals and the paired test of a change.

No result depends on the order of the queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hubplugin.measures.hubness import binomial

RESAMPLES = 1000

TAILS = (0.025, 0.975)
"""The quantiles at the ends of a 95 % interval."""

REJECTED = TAILS[0]
"""The one-sided chance below which the paired test rejects a change."""

PRECISION = 1e-6
"""The precision of the ends of a change's interval."""

DRAWN = 1 << 22
"""The number of values to draw at a time: 32 MiB."""


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
class Side:
    """R@1 of the same queries before and after, 0 to 1.

    error: The standard error of the change.
    queries, what: The number of queries, and their name in messages.
    change: The change with its interval.
    won, lost: The number of queries with a right answer at rank 1 only after, or only
        before.
    p: McNemar's exact test, two-sided, that won and lost are equally likely. It is
        below 0.05 exactly if the interval excludes 0.
    """

    before: float
    after: float
    error: float
    queries: int
    what: str
    change: Figure
    won: int = 0
    lost: int = 0
    p: float = math.nan

    @classmethod
    def of(cls, raw: np.ndarray, corrected: np.ndarray, what: str = "queries") -> Side:
        """Compare R@1 of each query before and after, 0 to 1: [j].

        The test gives the change of each query a random sign (Fisher 1935). For answers
        that are right or wrong, this is McNemar's exact test. The interval holds every
        change d that the same test does not reject. Its lower end is therefore the
        smallest d with a chance of at least 2.5 % that queries drawn with probability
        1/2 change by d or less on average (Hartigan 1969). The interval is exact for
        right and wrong answers. For shares between 0 and 1, each gain counts as the
        mean gain, and each loss as the mean loss.
        """
        change = np.asarray(corrected, np.float64) - raw
        won = int((change > 0).sum())
        lost = int((change < 0).sum())
        at_most = binomial(won + lost, 0.5).cumsum()
        no_gain = float(at_most[lost])
        no_loss = float(at_most[won])
        low = _lower_end(change, no_gain < REJECTED)
        high = -_lower_end(-change, no_loss < REJECTED)
        error = math.nan
        if len(change) > 1:
            error = float(change.std(ddof=1) / math.sqrt(len(change)))
        return cls(
            float(np.mean(raw)),
            float(np.mean(corrected)),
            error,
            len(change),
            what,
            Figure(float(change.mean()), low, high),
            won,
            lost,
            min(1.0, 2 * min(no_gain, no_loss)),
        )

    def __str__(self) -> str:
        low = 100 * self.change.low
        high = 100 * self.change.high
        return (
            f"R@1 {100 * self.before:.1f} -> {100 * self.after:.1f} (95 % interval of "
            f"the change {low:+.1f} to {high:+.1f}, {self.queries} {self.what})"
        )


def interval(
    values: np.ndarray,
    seed: int,
    statistic: Callable[..., np.ndarray] = np.mean,
) -> Figure:
    """Return a figure of queries with its percentile bootstrap interval (Efron 1979).

    Args:
        values: One value per query [j].
        seed: The seed of the resampling.
        statistic: A function that reduces the axis `axis`, such as np.mean.
    """
    values = np.sort(values)
    value = float(statistic(values, axis=0))
    count = len(values)
    if count < 2 or not np.ptp(values):
        return Figure(value, value, value)
    rng = np.random.default_rng(seed)
    drawn = list[np.ndarray]()
    batch = max(1, DRAWN // count)
    for start in range(0, RESAMPLES, batch):
        rows = rng.integers(0, count, (min(batch, RESAMPLES - start), count))
        drawn.append(statistic(values[rows], axis=1))
    low, high = np.quantile(np.concatenate(drawn), TAILS)
    return Figure(value, float(low), float(high))


def _lower_end(change: np.ndarray, is_gain: bool) -> float:
    """Return the lower end of the interval of `Side.of`.

    Args:
        change: The change of each query [j].
        is_gain: True if the test rejects 0, so that 0 is below the lower end.
    """
    won = change[change > 0]
    lost = change[change < 0]
    unchanged = len(change) - len(won) - len(lost)
    # The chance that fewer than i of the unchanged queries are drawn, by i.
    fewer = np.append(0.0, binomial(unchanged, 0.5).cumsum())
    won_drawn, won_chances = _likely_counts(len(won))
    lost_drawn, lost_chances = _likely_counts(len(lost))
    chances = np.outer(won_chances, lost_chances)
    mean_won = won.sum() / max(len(won), 1)
    mean_lost = lost.sum() / max(len(lost), 1)

    def chance_of(d: float) -> float:
        """Return the chance that the drawn queries change by `d` or less on average."""
        won_above = won_drawn * (mean_won - d)
        lost_above = lost_drawn * (mean_lost - d)
        # This number of unchanged queries brings the mean to d.
        needed = np.add.outer(won_above, lost_above) / d
        # A positive d needs that many or more, and a negative d that many or fewer.
        limit = np.ceil(needed) if d > 0 else np.floor(needed) + 1
        chance = fewer[np.clip(limit, 0, unchanged + 1).astype(int)]
        if d > 0:
            chance = 1 - chance
        return float((chances * chance).sum())

    low = 0.0 if is_gain else -1.0
    high = low + 1.0
    while high - low > PRECISION:
        middle = (low + high) / 2
        if chance_of(middle) < REJECTED:
            low = middle
        else:
            high = middle
    return min(high, float(change.mean()))


def _likely_counts(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how many of `count` queries may be drawn, and the chance of each number.

    Each query is drawn with probability 1/2. Numbers with a negligible chance are left
    out.
    """
    chances = binomial(count, 0.5)
    likely = np.flatnonzero(chances > 1e-10)
    return likely, chances[likely]


def adjust(p: Sequence[float]) -> list[float]:
    """Adjust the p-values of several tests for their number.

    Of the tests below a level, at most that share are false on average (Benjamini &
    Hochberg 1995).
    """
    order = np.argsort(p)[::-1]
    scaled = np.asarray(p, np.float64)[order] * len(p) / np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.minimum.accumulate(scaled), 1.0)
    return [float(each) for each in adjusted]
