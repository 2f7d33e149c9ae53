"""The ranks of true targets in a search: how many other targets score higher, and how many tie."""

from __future__ import annotations

import math

import numpy as np

from hubplugin.compute import Scores
from hubplugin.compute.device import to_host
from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin.vectors import BLOCK_ROWS, Vectors, take_rows


class TruthCounts:
    """Counts, for every candidate and every pair of a query and a target that is true for it, the *other* targets
    that score higher (`greater`) and those that tie (`equal`): int64 [c, p].

    query_rows, target_rows: [p], ordered by query; any number of pairs a query.
    """

    def __init__(self, query_rows: np.ndarray, target_rows: np.ndarray):
        self.query_rows = np.asarray(query_rows, np.int64)
        self.target_rows = np.asarray(target_rows, np.int64)
        if (np.diff(self.query_rows) < 0).any():
            raise InputError("true pairs must be ordered by query")

    def begin(self, candidates: int, queries: np.ndarray, targets: Vectors, metric: Metric) -> None:
        self._true = pair_scores(queries, targets, self.query_rows, self.target_rows, metric)
        self.greater = np.zeros((candidates, len(self._true)), np.int64)
        self.equal = np.zeros_like(self.greater)

    def update(self, scores: Scores, offsets: np.ndarray) -> None:
        first, last = np.searchsorted(self.query_rows, [scores.rows.start, scores.rows.stop])
        library, (height, width) = scores.library, scores.s.shape
        for start in range(first, last, height):  # as many pairs at a time as the tile has rows
            pairs = slice(start, min(start + height, last))
            columns = self.target_rows[pairs] - scores.start
            rivals = scores.s[self.query_rows[pairs] - scores.rows.start]
            is_inside = np.flatnonzero((columns >= 0) & (columns < width))
            rivals[is_inside, columns[is_inside]] = -math.inf  # no rival of itself
            true = self._true[pairs] + offsets[self.target_rows[pairs]]
            above = library.to_device(true + scores.tie, rivals.dtype)[:, None]
            least = library.to_device(true - scores.tie, rivals.dtype)[:, None]
            # Summing truth values as floats is exact below 2^24 and several times as fast as summing booleans.
            truth = library.xp.empty_like(rivals)
            greater = to_host(library.xp.greater(rivals, above, out=truth).sum(1)).astype(np.int64)
            reached = to_host(library.xp.greater_equal(rivals, least, out=truth).sum(1)).astype(np.int64)
            self.greater[scores.candidate, pairs] += greater
            self.equal[scores.candidate, pairs] += reached - greater


def pair_scores(
    queries: np.ndarray, targets: Vectors, query_rows: np.ndarray, target_rows: np.ndarray, metric: Metric
) -> np.ndarray:
    """s(q, t) of single pairs, each by itself and in double precision: float64 [p].

    queries: prepared, [q, d]. query_rows, target_rows: [p], in any order.
    """
    scores, (rows, place) = np.empty(len(query_rows)), np.unique(target_rows, return_inverse=True)
    vectors = take_rows(targets, rows, metric)
    for start in range(0, len(scores), BLOCK_ROWS):
        pairs = slice(start, start + BLOCK_ROWS)
        q, t = queries[query_rows[pairs]].astype(np.float64), vectors[place[pairs]].astype(np.float64)
        scores[pairs] = -np.sum((q - t) ** 2, axis=1) / 2 if metric is Metric.EUCLIDEAN else np.sum(q * t, axis=1)
    return scores
