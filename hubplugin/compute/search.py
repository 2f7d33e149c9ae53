"""Every query against every target, once.

The gallery is read in blocks and multiplied by `similarities`; what a pass is to find out is a collector, such as the
nearest targets, and any number of candidate corrections are looked at together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hubplugin.compute.device import Array, Compute, Library, to_host
from hubplugin.compute.similarities import Similarities
from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin.vectors import BLOCK_ROWS, Vectors, as_vectors, prepare_blocks, take_rows

TIE = 8
"""Two scores tie where they differ by less than this many float steps at the size of the largest score: a
product gives copies of one vector slightly different bits, depending on where in the matrix they stand."""


@dataclass(frozen=True)
class Scores:
    """Corrected scores `s` [b, w] of queries [rows] against the targets from `start` on, under candidate number
    `candidate`. Scores nearer than `tie` cannot be told apart."""

    candidate: int
    rows: slice
    start: int
    s: Array
    tie: float
    library: Library


def topk(s: Array, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The `k` largest of every row of `s` [b, m], the largest first, k <= m: values and columns, [b, k] each."""
    s = to_host(s)
    if k == 1:
        columns = s.argmax(axis=1)[:, None]
        return np.take_along_axis(s, columns, axis=1), columns
    columns = np.argpartition(s, s.shape[1] - k, axis=1)[:, -k:]
    values = np.take_along_axis(s, columns, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(values, order, axis=1), np.take_along_axis(
        columns, order, axis=1
    )


class Collector(Protocol):
    """A figure that a search is to find out."""

    def begin(
        self, candidates: int, queries: np.ndarray, targets: Vectors, metric: Metric
    ) -> None: ...

    def update(self, scores: Scores, offsets: np.ndarray) -> None:
        """Takes the `scores` of a tile. `offsets` are those of the candidate, for all targets [n]."""


class TopK:
    """Collects, for every candidate and query, the k best targets: `rows` int64 and `scores` float64, [c, q, k].

    Best first; fewer than k where the gallery is smaller. Which of two tied targets comes first is arbitrary.
    """

    def __init__(self, k: int):
        if k < 1:
            raise InputError(
                f"k={k}: at least the one nearest target must be asked for"
            )
        self.k = k

    def begin(
        self, candidates: int, queries: np.ndarray, targets: Vectors, metric: Metric
    ) -> None:
        self.k = min(self.k, targets.rows)
        shape = (candidates, len(queries), self.k)
        self.scores = np.full(shape, -math.inf)
        self.rows = np.full(shape, -1, np.int64)

    def update(self, scores: Scores, offsets: np.ndarray) -> None:
        best, rows = (
            self.scores[scores.candidate, scores.rows],
            self.rows[scores.candidate, scores.rows],
        )
        # Finding a row's maximum costs a tenth of finding its k best, and most later tiles hold none of them.
        changed = np.flatnonzero(
            to_host(scores.library.xp.max(scores.s, axis=1)) > best[:, -1]
        )
        if not len(changed):
            return
        values, columns = topk(scores.s[changed], min(self.k, scores.s.shape[1]))
        values = np.concatenate([best[changed], values], axis=1)
        numbers = np.concatenate([rows[changed], columns + scores.start], axis=1)
        order = np.argsort(-values, axis=1, kind="stable")[:, : self.k]
        best[changed] = np.take_along_axis(values, order, axis=1)
        rows[changed] = np.take_along_axis(numbers, order, axis=1)


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

    def begin(
        self, candidates: int, queries: np.ndarray, targets: Vectors, metric: Metric
    ) -> None:
        self._true = pair_scores(
            queries, targets, self.query_rows, self.target_rows, metric
        )
        self.greater = np.zeros((candidates, len(self._true)), np.int64)
        self.equal = np.zeros_like(self.greater)

    def update(self, scores: Scores, offsets: np.ndarray) -> None:
        first, last = np.searchsorted(
            self.query_rows, [scores.rows.start, scores.rows.stop]
        )
        library, (height, width) = scores.library, scores.s.shape
        for start in range(
            first, last, height
        ):  # as many pairs at a time as the tile has rows
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
            greater = to_host(
                library.xp.greater(rivals, above, out=truth).sum(1)
            ).astype(np.int64)
            reached = to_host(
                library.xp.greater_equal(rivals, least, out=truth).sum(1)
            ).astype(np.int64)
            self.greater[scores.candidate, pairs] += greater
            self.equal[scores.candidate, pairs] += reached - greater


def pair_scores(
    queries: np.ndarray,
    targets: Vectors,
    query_rows: np.ndarray,
    target_rows: np.ndarray,
    metric: Metric,
) -> np.ndarray:
    """s(q, t) of single pairs, each by itself and in double precision.

    Args:
        queries: prepared [q, d].
        targets: [n, d].
        query_rows, target_rows: of the pairs [p], in any order.
        metric: the similarity.

    Returns:
        float64 [p].
    """
    scores, (rows, place) = (
        np.empty(len(query_rows)),
        np.unique(target_rows, return_inverse=True),
    )
    vectors = take_rows(targets, rows, metric)
    for start in range(0, len(scores), BLOCK_ROWS):
        pairs = slice(start, start + BLOCK_ROWS)
        q, t = (
            queries[query_rows[pairs]].astype(np.float64),
            vectors[place[pairs]].astype(np.float64),
        )
        scores[pairs] = (
            -np.sum((q - t) ** 2, axis=1) / 2
            if metric is Metric.EUCLIDEAN
            else np.sum(q * t, axis=1)
        )
    return scores


def search(
    queries: np.ndarray,
    targets: Vectors,
    metric: Metric,
    compute: Compute,
    *collectors: Collector,
    offsets: np.ndarray | None = None,
    label: str = "ranking",
) -> None:
    """Shows every collector all scores s(q, t) + offsets[c, t], in one pass over queries x targets.

    However many candidates and collectors there are, each similarity is computed once. Targets are read in blocks,
    queries stay resident; memory holds one block, one tile and what the collectors keep.

    Args:
        queries: prepared [q, d]; what a query map gives keeps its length.
        targets: [n, d].
        metric: the similarity.
        compute: device, memory and progress.
        *collectors: what is to be found out.
        offsets: one row a candidate correction [c, n]; by default one row of zeros.
        label: the name of the work, for progress.
    """
    offsets = (
        np.zeros((1, targets.rows), np.float32)
        if offsets is None
        else np.atleast_2d(offsets)
    )
    if offsets.shape[1] != targets.rows:
        raise InputError(
            f"offsets have shape {offsets.shape}; expected one a target, [candidates, {targets.rows}]"
        )
    for collector in collectors:
        collector.begin(len(offsets), queries, targets, metric)
    largest, start, of_queries = (
        float(np.abs(offsets).max()),
        0,
        as_vectors(queries, "queries"),
    )
    of_prepared = Metric.DOT if metric is Metric.COSINE else metric
    for block in prepare_blocks(targets, metric):
        similarities = Similarities(block, of_prepared, compute.without_progress)
        shifts = offsets[:, start : start + len(block)]
        for tile in similarities.tiles(of_queries, label):
            step = float(similarities.library.xp.finfo(tile.s.dtype).eps)
            tie = TIE * step * (tile.bound + largest)
            for candidate, shift in enumerate(shifts):
                corrected = tile.s + similarities.library.to_device(shift, tile.s.dtype)
                scores = Scores(
                    candidate, tile.rows, start, corrected, tie, similarities.library
                )
                for collector in collectors:
                    collector.update(scores, offsets[candidate])
            compute.report(
                label, start + len(block) * tile.rows.stop // len(queries), targets.rows
            )
        start += len(block)
