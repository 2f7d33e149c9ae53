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

HALF = 0.5
"""The probability that a query is in a random half of the queries."""

BATCH_VALUES = 1 << 22
"""The most values in a batch of resamples: 32 MiB."""


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
    """R@1 of the same queries before and after a change, from 0 to 1.

    error: The standard error of the change.
    queries: The number of queries.
    what: The name of the queries in messages.
    change: The change with its interval.
    won, lost: The number of queries with a right answer at rank 1 only after, or only
        before.
    p: The p value of McNemar's exact two-sided test that won and lost are equally
        likely. It is below 0.05 if and only if the interval excludes 0.
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
        smallest d with a chance of at least 2.5 % that a random half of the queries
        changes by d or less on average (Hartigan 1969). Each query is in the half with
        probability 1/2. The interval is exact for right and wrong answers. For shares
        between 0 and 1, each gain counts as the mean gain, and each loss as the mean
        loss.
        """
        change = np.asarray(corrected, np.float64) - raw
        won = int((change > 0).sum())
        lost = int((change < 0).sum())
        # The chance of i or fewer positive signs, by i. A gain has few losses, and a
        # loss few gains.
        at_most = binomial(won + lost, HALF).cumsum()
        p_of_gain = float(at_most[lost])
        p_of_loss = float(at_most[won])
        low = _lower_end(change, p_of_gain < REJECTED)
        high = -_lower_end(-change, p_of_loss < REJECTED)
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
            min(1.0, 2 * min(p_of_gain, p_of_loss)),
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
    resampled = list[np.ndarray]()
    batch = max(1, BATCH_VALUES // count)
    for start in range(0, RESAMPLES, batch):
        rows = rng.integers(0, count, (min(batch, RESAMPLES - start), count))
        resampled.append(statistic(values[rows], axis=1))
    low, high = np.quantile(np.concatenate(resampled), TAILS)
    return Figure(value, float(low), float(high))


def _lower_end(change: np.ndarray, rejects_zero: bool) -> float:
    """Return the lower end of the interval of `Side.of`.

    It is the smallest d with a chance of at least `REJECTED` that a random half of the
    queries changes by d or less on average. Each query is in the half with probability
    1/2, and an empty half counts as d or less. Each gain counts as the mean gain, and
    each loss as the mean loss.

    Args:
        change: The change of each query [j].
        rejects_zero: True if the test rejects d = 0, so that 0 is below the lower end.
    """
    gains = change[change > 0]
    losses = change[change < 0]
    unchanged = len(change) - len(gains) - len(losses)
    # The chance that the half has fewer than i of the unchanged queries, by i.
    fewer = np.append(0.0, binomial(unchanged, HALF).cumsum())
    gain_counts, gain_chances = _likely_counts(len(gains))
    loss_counts, loss_chances = _likely_counts(len(losses))
    chances = np.outer(gain_chances, loss_chances)
    mean_gain = gains.sum() / max(len(gains), 1)
    mean_loss = losses.sum() / max(len(losses), 1)

    def chance_of_fewer(counts: np.ndarray) -> np.ndarray:
        """Return the chance that the half has fewer than `counts` unchanged queries."""
        return fewer.take(counts.astype(int), mode="clip")

    def chance_of(d: float) -> float:
        """Return the chance that the half changes by `d` or less on average."""
        # If the half has G gains, L losses and U unchanged queries, its mean is d or
        # less exactly if G (mean_gain - d) + L (mean_loss - d) <= d U. Division by d
        # bounds U from below if d > 0, and from above if d < 0.
        from_gains = gain_counts * (mean_gain - d)
        bound = np.add.outer(from_gains, loss_counts * (mean_loss - d)) / d
        if d > 0:
            chance = 1 - chance_of_fewer(np.ceil(bound))
        else:
            chance = chance_of_fewer(np.floor(bound) + 1)
        return float((chances * chance).sum())

    low = 0.0 if rejects_zero else -1.0
    high = low + 1.0
    while high - low > PRECISION:
        middle = (low + high) / 2  # never 0
        if chance_of(middle) < REJECTED:
            low = middle
        else:
            high = middle
    # The precision must not put the end beyond the change itself.
    return min(high, float(change.mean()))


def _likely_counts(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how many of `count` queries a random half may have, with the chances.

    Numbers with a negligible chance are left out.

    Returns:
        The numbers of queries, and the chance of each number.
    """
    chances = binomial(count, HALF)
    likely = np.flatnonzero(chances > 1e-10)
    return likely, chances[likely]


def adjust(p: Sequence[float]) -> list[float]:
    """Adjust the p-values of several tests for their number.

    If all tests with an adjusted p below a level count as significant, the share of
    false ones among them is at most this level on average (Benjamini & Hochberg 1995).
    """
    # The largest p comes first, and no later p may be adjusted to a larger value.
    order = np.argsort(p)[::-1]
    scaled = np.asarray(p, np.float64)[order] * len(p) / np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.minimum.accumulate(scaled), 1.0)
    return [float(each) for each in adjusted]
