"""Every query against every target, once: the nearest targets, and the ranks of the true ones.

The gallery is read in blocks and multiplied by `similarities`; what a pass is to find out is a collector, and any
number of candidate corrections are looked at together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hubplugin.compute.device import Array, Compute, Library, host
from hubplugin.compute.similarities import Similarities
from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin.vectors import BLOCK_ROWS, Vectors, as_vectors, prepare_blocks

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


def largest(s: Array, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest of every row of s [b, m], the largest first, k <= m: values and columns, [b, k] each."""
    s = host(s)
    if k == 1:
        columns = s.argmax(axis=1)[:, None]
        return np.take_along_axis(s, columns, axis=1), columns
    some = np.argpartition(s, s.shape[1] - k, axis=1)[:, -k:]
    values = np.take_along_axis(s, some, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(values, order, axis=1), np.take_along_axis(some, order, axis=1)


class TopK:
    """Collects, for every candidate and query, the k best targets: `rows` int64 and `scores` float64, [c, q, k].

    Best first; fewer than k where the gallery is smaller. Which of two tied targets comes first is arbitrary.
    """

    def __init__(self, k: int):
        if k < 1:
            raise InputError(f"k={k}: at least the one nearest target must be asked for")
        self.k = k

    def begin(self, candidates: int, queries: np.ndarray, targets: Vectors, metric: Metric) -> None:
        self.k = min(self.k, targets.rows)
        shape = (candidates, len(queries), self.k)
        self.scores = np.full(shape, -math.inf)
        self.rows = np.full(shape, -1, np.int64)

    def take(self, part: Scores, offsets: np.ndarray) -> None:
        known, rows = self.scores[part.candidate, part.rows], self.rows[part.candidate, part.rows]
        # Finding a row's maximum costs a tenth of finding its k best, and most later tiles hold none of them.
        changed = np.flatnonzero(host(part.library.xp.max(part.s, axis=1)) > known[:, -1])
        if not len(changed):
            return
        values, columns = largest(part.s[changed], min(self.k, part.s.shape[1]))
        scores = np.concatenate([known[changed], values], axis=1)
        numbers = np.concatenate([rows[changed], columns + part.start], axis=1)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self.k]
        known[changed] = np.take_along_axis(scores, best, axis=1)
        rows[changed] = np.take_along_axis(numbers, best, axis=1)


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

    def take(self, part: Scores, offsets: np.ndarray) -> None:
        first, last = np.searchsorted(self.query_rows, [part.rows.start, part.rows.stop])
        height, width = part.s.shape
        for start in range(first, last, height):  # as many pairs at a time as the tile has rows
            pairs = slice(start, min(start + height, last))
            local = self.query_rows[pairs] - part.rows.start
            true = self._true[pairs] + offsets[self.target_rows[pairs]]
            one_each = len(local) == height and (local == np.arange(height)).all()
            scores, xp = part.s if one_each else part.s[local], part.library.xp
            above, below = (
                part.library.put(limit, scores.dtype)[:, None] for limit in (true + part.tie, true - part.tie)
            )
            here = self.target_rows[pairs] - part.start
            inside = np.flatnonzero((here >= 0) & (here < width))
            itself = scores[inside, here[inside]][:, None]
            # Summing truth values as floats is exact below 2^24 and several times as fast as summing booleans.
            truth = xp.empty_like(scores)
            counts = []
            for compare, limit in ((xp.greater, above), (xp.greater_equal, below)):
                count = host(compare(scores, limit, out=truth).sum(1)).astype(np.int64)
                count[inside] -= host(compare(itself, limit[inside])[:, 0]).astype(np.int64)  # no rival of itself
                counts.append(count)
            self.greater[part.candidate, pairs] += counts[0]
            self.equal[part.candidate, pairs] += counts[1] - counts[0]


def search(
    queries: np.ndarray,
    targets: Vectors,
    metric: Metric,
    compute: Compute,
    *collectors: TopK | TruthCounts,
    offsets: np.ndarray | None = None,
    what: str = "ranking",
) -> None:
    """Shows every collector all scores s(q, t) + offsets[c, t], in one pass over queries x targets.

    queries: prepared, [q, d]; what a query map gives keeps its length. offsets: [c, n], one row a candidate correction
    (one row of zeros by default). However many candidates and collectors there are, each similarity is computed once.
    Targets are read in blocks, queries stay resident; memory holds one block, one tile and what the collectors keep.
    """
    offsets = np.zeros((1, targets.rows), np.float32) if offsets is None else np.atleast_2d(offsets)
    if offsets.shape[1] != targets.rows:
        raise InputError(f"offsets have shape {offsets.shape}; expected one a target, [candidates, {targets.rows}]")
    for collector in collectors:
        collector.begin(len(offsets), queries, targets, metric)
    largest = np.abs(offsets).max()
    quiet, asked, start = compute.without_progress, as_vectors(queries, "queries"), 0
    of_prepared = Metric.DOT if metric is Metric.COSINE else metric
    for block in prepare_blocks(targets, metric):
        similarities = Similarities(block, of_prepared, quiet)
        shifts = offsets[:, start : start + len(block)]
        for tile in similarities.tiles(asked, what):
            step = float(similarities.library.xp.finfo(tile.s.dtype).eps)
            tie = TIE * step * (tile.bound + float(largest))
            for candidate, shift in enumerate(shifts):
                corrected = tile.s + similarities.library.put(shift, tile.s.dtype)
                part = Scores(candidate, slice(tile.start, tile.stop), start, corrected, tie, similarities.library)
                for collector in collectors:
                    collector.take(part, offsets[candidate])
            compute.report(what, start + len(block) * tile.stop // len(queries), targets.rows)
        start += len(block)


def pair_scores(
    queries: np.ndarray, targets: Vectors, query_rows: np.ndarray, target_rows: np.ndarray, metric: Metric
) -> np.ndarray:
    """s(q, t) of single pairs, each by itself and in double precision: float64 [p].

    queries: prepared, [q, d]. query_rows, target_rows: [p], in any order.
    """
    result, start = np.empty(len(query_rows)), 0
    order = np.argsort(target_rows, kind="stable")
    for block in prepare_blocks(targets, metric):
        first, last = np.searchsorted(target_rows[order], [start, start + len(block)])
        for pairs in np.array_split(order[first:last], max(1, (last - first) // BLOCK_ROWS)):
            q, t = queries[query_rows[pairs]], block[target_rows[pairs] - start]
            if metric is Metric.EUCLIDEAN:
                difference = q.astype(np.float64) - t
                result[pairs] = -np.einsum("pd,pd->p", difference, difference) / 2
            else:
                result[pairs] = np.einsum("pd,pd->p", q, t, dtype=np.float64)
        start += len(block)
    return result
