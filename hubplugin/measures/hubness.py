"""How unevenly a search finds its targets: statistics of the k-occurrence.

The k-occurrence N_k(t) is the number of queries that have the target t among their k nearest (Radovanovic et al.
2010). Over n targets and q queries its mean is always k q / n; the rest of its distribution is hubness.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hubplugin.errors import InputError


def k_occurrence(hits: np.ndarray, targets: int) -> np.ndarray:
    """N_k of every target: int64 [targets], from `hits` [q, k], the rows of the `targets` targets that each query
    finds."""
    return np.bincount(np.asarray(hits).reshape(-1), minlength=targets)


def skewness(occurrence: np.ndarray, times: np.ndarray | None = None) -> float:
    """Third standardised moment of N, mean((N - mean)^3) / std^3 with the population's std; 0 where all N are equal.

    The definition of Radovanovic et al. 2010, and of QB-Norm table 3 and DBSN table 5, which use it; it is
    scipy.stats.skew with its default bias=True. 0 is symmetric; what users call hubness is above 1.

    Args:
        occurrence: N, the k-occurrence of targets [n].
        times: how many targets have each N [n], here and below; by default one.
    """
    return _moment(occurrence, 3, times)


def skewness_by_chance(queries: int, k: int, targets: int) -> float:
    """`skewness` of the k-occurrence where each of `queries` finds any `k` of `targets`: of the binomial distribution,
    (1 - 2p) / sqrt(q p (1 - p)) with p = k / n.

    No correction comes below it for long; with few queries it is large.
    """
    p = min(k, targets) / targets
    spread = queries * p * (1 - p)
    return float((1 - 2 * p) / spread**0.5) if spread else 0.0


def skewness_of_hits(occurrence: np.ndarray, targets: int) -> float:
    """`skewness` of the k-occurrence over `targets`, from the `occurrence` of those that are found at all."""
    parts = count_targets(occurrence, targets)
    return skewness(np.array([*parts]), np.array([*parts.values()]))


def kurtosis(occurrence: np.ndarray, times: np.ndarray | None = None) -> float:
    """Fourth standardised moment of `occurrence`, `times` as in `skewness`, less 3, so that a normal distribution has 0
    (Fisher): NNN table 3."""
    return _moment(occurrence, 4, times) - 3.0 if np.ptp(occurrence) else 0.0


def mean_absolute_error(
    occurrence: np.ndarray, times: np.ndarray | None = None
) -> float:
    """mean |N - mean(N)| of N = `occurrence`, in queries, `times` as in `skewness`: NNN table 3, where N should be the
    same for every target."""
    return float(
        np.average(
            np.abs(occurrence - np.average(occurrence, weights=times)), weights=times
        )
    )


def robin_hood(occurrence: np.ndarray, times: np.ndarray | None = None) -> float:
    """Share of all finds in `occurrence` that would have to move for every target to be found equally often, 0 to 1;
    `times` as in `skewness`.

    sum |N - mean(N)| / (2 sum N), the Hoover index (Feldbauer et al. 2018).
    """
    mean = float(np.average(occurrence, weights=times))
    return mean_absolute_error(occurrence, times) / (2 * mean) if mean else 0.0


def anti_hub_share(occurrence: np.ndarray, times: np.ndarray | None = None) -> float:
    """Share of the targets of `occurrence` that no query finds, 0 to 1; `times` as in `skewness`."""
    return float(np.average(occurrence == 0, weights=times))


def count_targets(occurrence: np.ndarray, targets: int | None = None) -> dict[int, int]:
    """Count the targets that have each k-occurrence N.

    Args:
        occurrence: N of targets [n].
        targets: how many targets there are, where `occurrence` has only those that are found.
    """
    values, times = np.unique(occurrence, return_counts=True)
    counts = dict(zip(values.tolist(), times.tolist(), strict=True))
    never = counts.pop(0, 0) + (0 if targets is None else targets - len(occurrence))
    return {0: never} | counts if never else counts


def pick_evenly(rows: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of `rows`, evenly over all of them."""
    picked: np.ndarray = rows[
        np.linspace(0, len(rows) - 1, min(len(rows), count)).astype(int)
    ]
    return picked


def hubs(occurrence: np.ndarray, count: int = 20) -> np.ndarray:
    """Rows of the targets with the highest `occurrence`, the highest first: int64 [min(count, n)], at most `count`;
    equals in row order."""
    return np.argsort(-occurrence, kind="stable")[:count]


@dataclass(frozen=True)
class Hubness:
    """Statistics of the k-occurrence; each field is the function of that name over it, `largest` its maximum."""

    k: int
    skewness: float
    kurtosis: float
    mean_absolute_error: float
    largest: int
    robin_hood: float
    anti_hub_share: float

    @classmethod
    def of(
        cls, occurrence: np.ndarray, k: int, times: np.ndarray | None = None
    ) -> Hubness:
        """The statistics of `occurrence`, counted among the `k` nearest, `times` as in `skewness`. Raises InputError
        where it is empty."""
        if not occurrence.size:
            raise InputError(
                "hubness of no targets is not defined; expected a k-occurrence [n], n at least 1"
            )
        return cls(
            k,
            skewness(occurrence, times),
            kurtosis(occurrence, times),
            mean_absolute_error(occurrence, times),
            int(occurrence.max()),
            robin_hood(occurrence, times),
            anti_hub_share(occurrence, times),
        )


def _moment(occurrence: np.ndarray, order: int, times: np.ndarray | None) -> float:
    if not np.ptp(occurrence):
        return 0.0
    centred = occurrence - np.average(occurrence, weights=times)
    variance = np.average(centred**2, weights=times)
    return float(np.average(centred**order, weights=times) / variance ** (order / 2))


MOST = 0.01
"""The share of the targets that "the most found" are, in words for users."""


def most_found(targets: int) -> int:
    """Return how many targets the most found `MOST` of them are: at least one."""
    return max(1, round(MOST * targets))


def share_of_most_found(occurrence: np.ndarray, targets: int | None = None) -> float:
    """The share of all places that the most found `MOST` of the targets take, 0 to 1; `occurrence` and `targets` as in
    `count_targets`."""
    total, count = (
        occurrence.sum(),
        min(most_found(targets or len(occurrence)), len(occurrence)),
    )
    top = np.partition(occurrence, len(occurrence) - count)[len(occurrence) - count :]
    return float(top.sum() / total) if total else 0.0


def share_of_most_found_by_chance(queries: int, k: int, targets: int) -> float:
    """`share_of_most_found` of `targets` as it is expected where `queries` find any `k` of them."""
    share = most_found(targets) / targets
    chances = binomial(queries, min(k, targets) / targets)[
        ::-1
    ]  # of the largest k-occurrence first
    counted = np.diff(np.minimum(chances.cumsum(), share), prepend=0.0)
    return (
        float(counted @ np.arange(queries, -1, -1))
        * targets
        / (queries * min(k, targets))
    )


def never_found_by_chance(queries: int, k: int, targets: int) -> float:
    """The share of `targets` that no query finds, as it is expected where `queries` find any `k` of them."""
    return float((1 - min(k, targets) / targets) ** queries)


def binomial(draws: int, p: float) -> np.ndarray:
    """The chance of 0, 1, ... `draws` successes, where each has the chance `p`: [draws + 1]."""
    if p >= 1:
        return np.append(np.zeros(draws), 1.0)
    successes = np.arange(draws + 1)
    # lgamma(draws + 1) - lgamma(i + 1) - lgamma(draws - i + 1), summed up instead of called.
    steps = np.log(np.arange(draws, 0, -1)) - np.log(np.arange(1, draws + 1))
    choose = np.concatenate([[0.0], np.cumsum(steps)])
    chances: np.ndarray = np.exp(
        choose + successes * math.log(p) + (draws - successes) * math.log1p(-p)
    )
    return chances
