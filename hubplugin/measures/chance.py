"""What the k-occurrence would be if each query found any k of the targets: binomial, of q draws with p = k / n."""

from __future__ import annotations

import math

import numpy as np

MOST = 0.01
"""The share of the targets that "the most found" are, in words for users."""


def most_found(targets: int) -> int:
    """How many targets the most found `MOST` of them are: at least one."""
    return max(1, round(MOST * targets))


def share_of_most_found(occurrence: np.ndarray) -> float:
    """The share of all places that the most found `MOST` of the targets take, 0 to 1."""
    total, count = occurrence.sum(), most_found(len(occurrence))
    largest = np.partition(occurrence, len(occurrence) - count)[len(occurrence) - count :]
    return float(largest.sum() / total) if total else 0.0


def share_of_most_found_by_chance(queries: int, k: int, targets: int) -> float:
    """`share_of_most_found` as it is expected where nothing but chance is at work."""
    left, taken = most_found(targets) / targets, 0.0
    chances = _binomial(queries, min(k, targets) / targets)
    for found in range(queries, -1, -1):
        part = min(float(chances[found]), left)
        taken, left = taken + part * found, left - part
        if left <= 0:
            break
    return taken * targets / (queries * min(k, targets))


def never_found_by_chance(queries: int, k: int, targets: int) -> float:
    """The share of the targets that no query finds, as it is expected where nothing but chance is at work."""
    return float((1 - min(k, targets) / targets) ** queries)


def _binomial(draws: int, p: float) -> np.ndarray:
    """The chance of 0, 1, ... `draws` successes: [draws + 1]."""
    if p >= 1:
        return np.append(np.zeros(draws), 1.0)
    successes = np.arange(draws + 1)
    # lgamma(draws + 1) - lgamma(i + 1) - lgamma(draws - i + 1), summed up instead of called.
    steps = np.log(np.arange(draws, 0, -1)) - np.log(np.arange(1, draws + 1))
    choose = np.concatenate([[0.0], np.cumsum(steps)])
    chances: np.ndarray = np.exp(choose + successes * math.log(p) + (draws - successes) * math.log1p(-p))
    return chances
