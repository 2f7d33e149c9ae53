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


def add_never_found(occurrence: np.ndarray, targets: int) -> np.ndarray:
    """Return the k-occurrence of all `targets`, from that of those found at all."""
    never = np.zeros(max(targets - len(occurrence), 0), np.int64)
    return np.concatenate([occurrence.astype(np.int64), never])


def skewness(occurrence: np.ndarray) -> float:
    """Third standardised moment of N, mean((N - mean)^3) / std^3 with the population's std; 0 where all N are equal.

    The definition of Radovanovic et al. 2010, and of QB-Norm table 3 and DBSN table 5, which use it; it is
    scipy.stats.skew with its default bias=True. 0 is symmetric; what users call hubness is above 1.
    """
    return _moment(occurrence, 3)


def skewness_by_chance(queries: int, k: int, targets: int) -> float:
    """`skewness` of the k-occurrence where each of `queries` finds any `k` of `targets`: of the binomial distribution,
    (1 - 2p) / sqrt(q p (1 - p)) with p = k / n.

    No correction comes below it for long; with few queries it is large.
    """
    p = min(k, targets) / targets
    spread = queries * p * (1 - p)
    return float((1 - 2 * p) / spread**0.5) if spread else 0.0


def kurtosis(occurrence: np.ndarray) -> float:
    """Fourth standardised moment of `occurrence` less 3, so that a normal distribution has 0 (Fisher): NNN table 3."""
    return _moment(occurrence, 4) - 3.0 if np.ptp(occurrence) else 0.0


def mean_absolute_error(occurrence: np.ndarray) -> float:
    """mean |N - mean(N)| of N = `occurrence`, in queries: NNN table 3, where N should be the same for every target."""
    return float(np.abs(occurrence - occurrence.mean()).mean())


def robin_hood(occurrence: np.ndarray) -> float:
    """Share of all finds in `occurrence` that would have to move for every target to be found equally often, 0 to 1.

    sum |N - mean(N)| / (2 sum N), the Hoover index (Feldbauer et al. 2018).
    """
    mean = float(occurrence.mean())
    return mean_absolute_error(occurrence) / (2 * mean) if mean else 0.0


def anti_hub_share(occurrence: np.ndarray) -> float:
    """Share of the targets of `occurrence` that no query finds, 0 to 1."""
    return float((occurrence == 0).mean())


def count_targets(occurrence: np.ndarray) -> dict[int, int]:
    """Return how many targets have each k-occurrence N in `occurrence` [n], by N."""
    values, times = np.unique(occurrence, return_counts=True)
    return dict(zip(values.tolist(), times.tolist(), strict=True))


def pick_evenly(rows: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of `rows`, evenly over all of them."""
    places = np.linspace(0, len(rows) - 1, min(len(rows), count)).astype(int)
    picked: np.ndarray = rows[places]
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
    def of(cls, occurrence: np.ndarray, k: int) -> Hubness:
        """Return the statistics of `occurrence`, counted among the `k` nearest. Raises InputError where it is empty."""
        if not occurrence.size:
            raise InputError(
                "hubness of no targets is not defined; expected a k-occurrence [n], n at least 1"
            )
        return cls(
            k,
            skewness(occurrence),
            kurtosis(occurrence),
            mean_absolute_error(occurrence),
            int(occurrence.max()),
            robin_hood(occurrence),
            anti_hub_share(occurrence),
        )


def _moment(occurrence: np.ndarray, order: int) -> float:
    if not np.ptp(occurrence):
        return 0.0
    centred = occurrence - occurrence.mean()
    variance = (centred**2).mean()
    return float((centred**order).mean() / variance ** (order / 2))


MOST = 0.01
"""The share of the targets that "the most found" are, in words for users."""


def most_found(targets: int) -> int:
    """Return how many targets the most found `MOST` of them are: at least one."""
    return max(1, round(MOST * targets))


def share_of_most_found(occurrence: np.ndarray) -> float:
    """Return the share of all places that the most found `MOST` of the targets take, 0 to 1."""
    total = occurrence.sum()
    top = np.sort(occurrence)[-most_found(len(occurrence)) :]
    return float(top.sum() / total) if total else 0.0


def share_of_most_found_by_chance(queries: int, k: int, targets: int) -> float:
    """`share_of_most_found` of `targets` as it is expected where `queries` find any `k` of them."""
    share = most_found(targets) / targets
    p = min(k, targets) / targets
    chances = binomial(queries, p)[::-1]  # of the largest k-occurrence first
    counted = np.diff(np.minimum(chances.cumsum(), share), prepend=0.0)
    return float(counted @ np.arange(queries, -1, -1)) / (queries * p)


def never_found_by_chance(queries: int, k: int, targets: int) -> float:
    """The share of `targets` that no query finds, as it is expected where `queries` find any `k` of them."""
    return float((1 - min(k, targets) / targets) ** queries)


def largest_by_chance(queries: int, k: int, targets: int) -> int:
    """Return the largest k-occurrence that one of `targets` has by chance, where `queries` find any `k` of them.

    One in twenty such galleries has a larger one.
    """
    chances = binomial(queries, min(k, targets) / targets)
    as_large = chances[::-1].cumsum()[::-1]
    return int(np.flatnonzero(targets * as_large >= 0.05)[-1])


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
