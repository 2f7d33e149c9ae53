"""Measure how well a search finds the true targets of its queries.

A query may have any number of true targets, and every figure is a function of their
ranks. Figures have one value per judged query [j], from which their mean, interval and
paired test are computed. Ranks start at 1 and are expected ranks: within a group of
tied scores, every order is equally likely, so constant scores do not give perfect
recall.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Truth:
    """Pairs of a query and a true target, ordered by query: [p] each.

    grades: The relevance of each target, above 0, and 1 by default. Only nDCG uses it.
    """

    query_rows: np.ndarray
    target_rows: np.ndarray
    grades: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """The first pair of each judged query: [j]."""
        return np.flatnonzero(np.diff(self.query_rows, prepend=-1))

    @property
    def numbers(self) -> np.ndarray:
        """The position of each pair among the pairs of its query, from 1: [p]."""
        pairs = np.arange(len(self.query_rows))
        query = np.searchsorted(self.starts, pairs, "right") - 1
        numbers: np.ndarray = pairs - self.starts[query] + 1
        return numbers

    @property
    def judged(self) -> np.ndarray:
        """Rows of the queries that have a true target: [j]."""
        judged: np.ndarray = self.query_rows[self.starts]
        return judged


@dataclass(frozen=True)
class Ranks:
    """Expected ranks [p] of the true targets, and their grades [p].

    Within each query, both are in ascending order of rank.
    """

    truth: Truth
    values: np.ndarray
    grades: np.ndarray

    @property
    def best(self) -> np.ndarray:
        """The rank of each judged query's first true target: float64 [j]."""
        best: np.ndarray = self.values[self.truth.starts]
        return best


def rank_pairs(truth: Truth, greater: np.ndarray, equal: np.ndarray) -> Ranks:
    """Return the expected ranks of the true targets.

    If r of the N targets in a tied group are true, the i-th true target has the rank
    greater + i (N + 1) / (r + 1), averaged over all orders of the group. For r = 1,
    this is the middle of the group. Within a group, the lower grade comes first, which
    is the worst case.

    Args:
        truth: The true targets.
        greater: The number of other targets that score higher than each one [p].
        equal: The number of other targets that tie with each one [p].
    """
    order = np.lexsort((truth.grades, greater, truth.query_rows))
    greater = greater[order]
    equal = equal[order]
    queries = truth.query_rows
    # The true targets of a query with equal `greater` are tied: here such groups start.
    starts = np.flatnonzero(np.diff(queries, prepend=-1) | np.diff(greater, prepend=-1))
    sizes = np.diff(np.append(starts, len(queries)))
    number = np.arange(len(queries)) - np.repeat(starts, sizes) + 1
    # N = equal + 1, since `equal` counts the other targets.
    values = greater + number * (equal + 2) / (np.repeat(sizes, sizes) + 1)
    return Ranks(truth, values, truth.grades[order])


def ndcg(ranks: Ranks, k: int) -> np.ndarray:
    """Return nDCG@k: float64 [j].

    It is the sum of grade / log2(1 + rank) over the first `k`, divided by the same sum
    for the best order. The gain is the grade itself (Järvelin & Kekäläinen 2002), as in
    trec_eval.
    """
    truth = ranks.truth
    # In the best order, the target of the highest grade has rank 1, and so on.
    by_grade = np.lexsort((-truth.grades, truth.query_rows))
    gain = _discounted(ranks.grades, ranks.values, k, truth)
    best_gain = _discounted(truth.grades[by_grade], truth.numbers, k, truth)
    share: np.ndarray = gain / best_gain
    return share


def _discounted(
    grades: np.ndarray, ranks: np.ndarray, k: int, truth: Truth
) -> np.ndarray:
    """Return the sum of grade / log2(1 + rank) up to rank `k`, for each query [j]."""
    gains = np.where(ranks <= k, grades / np.log2(1 + ranks), 0.0)
    total: np.ndarray = np.add.reduceat(gains, truth.starts)
    return total
