"""Measure how unevenly a search finds its targets, from the k-occurrence.

The k-occurrence N_k(t) is the number of queries that have the target t among their k
nearest (Radovanovic et al. 2010). Over n targets and q queries its mean is always
k q / n; the rest of its distribution is hubness.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


def k_occurrence(hits: np.ndarray, targets: int) -> np.ndarray:
    """Count how often each target is found: int64 [targets].

    Args:
        hits: The rows of the targets that each query finds [q, k].
        targets: The number of targets.
    """
    return np.bincount(np.asarray(hits).reshape(-1), minlength=targets)


def add_never_found(occurrence: np.ndarray, targets: int) -> np.ndarray:
    """Return `occurrence` with zeros added up to the number of `targets`."""
    return np.pad(occurrence, (0, max(targets - len(occurrence), 0)))


def skewness(occurrence: np.ndarray) -> float:
    """Return the third standardised moment of N; 0 if all N are equal.

    It is mean((N - mean)^3) / std^3 with the population's std, as in Radovanovic et al.
    2010, QB-Norm table 3 and DBSN table 5; scipy.stats.skew computes it with the
    default bias=True. 0 means symmetric, and users speak of hubness above 1.
    """
    if not np.ptp(occurrence):
        return 0.0
    centred = occurrence - occurrence.mean()
    variance = (centred**2).mean()
    return float((centred**3).mean() / variance**1.5)


def skewness_by_chance(queries: int, k: int, targets: int) -> float:
    """Return the skewness expected if each query finds `k` of the `targets` at random.

    N is then binomial, with the skewness (1 - 2p) / sqrt(q p (1 - p)) for p = k / n.
    This value is large for few queries, and 0 if every query finds all targets. A
    correction can get below it only by luck.
    """
    p = min(k, targets) / targets
    variance = queries * p * (1 - p)
    if not variance:
        return 0.0
    return float((1 - 2 * p) / variance**0.5)


def anti_hub_share(occurrence: np.ndarray) -> float:
    """Return the share of the targets that no query finds, 0 to 1."""
    return float((occurrence == 0).mean())


@dataclass(frozen=True)
class Hubness:
    """Statistics of the `k`-occurrence N; see `skewness` and `anti_hub_share`.

    largest: The largest N.
    """

    k: int
    skewness: float
    largest: int
    anti_hub_share: float

    @classmethod
    def of(cls, occurrence: np.ndarray, k: int) -> Hubness:
        """Return the statistics of `occurrence` [n]."""
        return cls(
            k,
            skewness(occurrence),
            int(occurrence.max()),
            anti_hub_share(occurrence),
        )


def count_targets(occurrence: np.ndarray) -> dict[int, int]:
    """Return the number of targets for each N in `occurrence` [n]."""
    values, counts = np.unique(occurrence, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def hubs(occurrence: np.ndarray, count: int) -> np.ndarray:
    """Return the rows of the `count` targets with the largest N, the largest first.

    Targets with equal N keep the order of their rows: int64 [min(count, n)].
    """
    return np.argsort(-occurrence, kind="stable")[:count]


def pick_evenly(rows: np.ndarray, count: int) -> np.ndarray:
    """Return at most `count` of `rows`, evenly spaced."""
    places = np.linspace(0, len(rows) - 1, min(len(rows), count)).astype(int)
    picked: np.ndarray = rows[places]
    return picked


MOST_FOUND = 0.01
"""The share of the targets that messages call "the most found"."""


def most_found(targets: int) -> int:
    """Return how many of `targets` count as "the most found": at least one."""
    return max(1, round(MOST_FOUND * targets))


def share_of_most_found(occurrence: np.ndarray) -> float:
    """Return the share of all results that are among the most found targets, 0 to 1."""
    total = occurrence.sum()
    if not total:
        return 0.0
    top = np.sort(occurrence)[-most_found(len(occurrence)) :]
    return float(top.sum() / total)


def share_of_most_found_by_chance(queries: int, k: int, targets: int) -> float:
    """Return `share_of_most_found` as expected if queries find `k` random targets."""
    share = most_found(targets) / targets
    p = min(k, targets) / targets
    occurrences = np.arange(queries, -1, -1)  # the largest N comes first
    chances = binomial(queries, p)[occurrences]
    # The share of targets that are among the most found and have each N: all targets
    # with the largest N, and so on, until `share` is full.
    shares = np.diff(np.minimum(chances.cumsum(), share), prepend=0.0)
    return float(shares @ occurrences) / (queries * p)


def never_found_by_chance(queries: int, k: int, targets: int) -> float:
    """Return `anti_hub_share` as expected if queries find `k` random targets."""
    return float((1 - min(k, targets) / targets) ** queries)


def largest_by_chance(queries: int, k: int, targets: int) -> int:
    """Return the largest N to expect if queries find `k` random targets.

    Fewer than one in twenty such galleries have a larger N.
    """
    chances = binomial(queries, min(k, targets) / targets)
    # The chance that a target is found at least N times, by N.
    at_least = chances[::-1].cumsum()[::-1]
    return int(np.flatnonzero(targets * at_least >= 0.05)[-1])


def binomial(draws: int, p: float) -> np.ndarray:
    """Return the chances of 0 to `draws` successes, each of chance `p`: [draws + 1]."""
    if p >= 1:
        return np.append(np.zeros(draws), 1.0)
    successes = np.arange(draws + 1)
    # log(draws choose successes), as a cumulative sum.
    steps = np.log(np.arange(draws, 0, -1)) - np.log(np.arange(1, draws + 1))
    log_choose = np.concatenate([[0.0], np.cumsum(steps)])
    failures = draws - successes
    chances: np.ndarray = np.exp(
        log_choose + successes * math.log(p) + failures * math.log1p(-p)
    )
    return chances
