"""How well a search finds the targets that are true for a query: every figure is a function of their ranks.

A query may have any number of true targets. Figures come for each judged query [j], so that their mean, their
interval and a paired test need nothing else. Ranks start at 1 and are expected ranks: within a group of tied
scores every order is as likely, so constant scores are no perfect recall.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Truth:
    """Pairs of a query and a target that is true for it, ordered by query: [p] each.

    grades: how relevant the target is, above 0; 1 where nothing else is known. Used by nDCG alone.
    """

    query_rows: np.ndarray
    target_rows: np.ndarray
    grades: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """The first pair of each judged query: [j]."""
        return np.flatnonzero(np.diff(self.query_rows, prepend=-1))

    @property
    def counts(self) -> np.ndarray:
        """The number of true targets of each judged query: [j]."""
        return np.diff(np.append(self.starts, len(self.query_rows)))

    @property
    def judged(self) -> np.ndarray:
        """Rows of the queries that have a true target: [j]."""
        judged: np.ndarray = self.query_rows[self.starts]
        return judged


@dataclass(frozen=True)
class Ranks:
    """Expected ranks [p] of the true targets, and their grades [p]: ascending within each query."""

    truth: Truth
    values: np.ndarray
    grades: np.ndarray

    @property
    def best(self) -> np.ndarray:
        """Rank of each judged query's first true target: float64 [j]."""
        best: np.ndarray = self.values[self.truth.starts]
        return best


def rank_pairs(truth: Truth, greater: np.ndarray, equal: np.ndarray) -> Ranks:
    """Ranks of the true targets in `truth`, from the number of other targets that score higher, `greater` [p], and that
    tie, `equal` [p].

    r of the N targets of a tied group are true; the i-th of them to come stands, on average over all orders of the
    group, at greater + i (N + 1) / (r + 1). For r = 1 that is the middle of the group. Within a group the lower grade
    comes first, the worst case.
    """
    order = np.lexsort((truth.grades, greater, truth.query_rows))
    greater, equal, queries = greater[order], equal[order], truth.query_rows
    first = np.flatnonzero(np.diff(queries, prepend=-1) | np.diff(greater, prepend=-1))
    sizes = np.diff(np.append(first, len(queries)))
    place = np.arange(len(queries)) - np.repeat(first, sizes) + 1
    return Ranks(
        truth,
        greater + place * (equal + 2) / (np.repeat(sizes, sizes) + 1),
        truth.grades[order],
    )


def average_precision(ranks: Ranks, k: int) -> np.ndarray:
    """AP@k of `ranks`: sum over the true targets among the first `k` of precision at their rank, over the number of
    true targets; float64 [j]. Its mean is mAP@k."""
    place = (
        np.arange(len(ranks.values))
        - np.repeat(ranks.truth.starts, ranks.truth.counts)
        + 1
    )
    precision = np.where(ranks.values <= k, place / ranks.values, 0.0)
    mean: np.ndarray = (
        np.add.reduceat(precision, ranks.truth.starts) / ranks.truth.counts
    )
    return mean


def ndcg(ranks: Ranks, k: int) -> np.ndarray:
    """nDCG@k of `ranks`: sum of grade / log2(1 + rank) over the first `k`, over the same sum of the best order; float64
    [j].

    The gain is the grade itself (Järvelin & Kekäläinen 2002), as trec_eval has it.
    """
    gains = np.where(ranks.values <= k, ranks.grades / np.log2(1 + ranks.values), 0.0)
    truth = ranks.truth
    best = truth.grades[np.lexsort((-truth.grades, truth.query_rows))]
    place = np.arange(len(best)) - np.repeat(truth.starts, truth.counts) + 1
    ideal = np.where(place <= k, best / np.log2(1 + place), 0.0)
    normalised: np.ndarray = np.add.reduceat(gains, truth.starts) / np.add.reduceat(
        ideal, truth.starts
    )
    return normalised
