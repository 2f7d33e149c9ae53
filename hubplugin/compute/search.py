"""Every query against every target, once.

The gallery streams past the queries in blocks, which `similarities` multiplies. What a
pass is to find out is a collector, such as the nearest targets; any number of candidate
corrections are looked at together. On a card all of it stays there until the pass is over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hubplugin.compute.device import Array, Compute, Library, to_host, view
from hubplugin.compute.similarities import Similarities
from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin.vectors import BLOCK_ROWS, Vectors, take_rows

TIE = 8
"""Two scores tie where they differ by less than this many float steps at the size of the largest score: a
product gives copies of one vector slightly different bits, depending on where in the matrix they stand."""


@dataclass(frozen=True)
class Scores:
    """Corrected scores of all queries against some targets, under one candidate.

    candidate: its number. start: the first of the targets. s: [q, b]. tie: scores that
    differ by less cannot be told apart.
    """

    candidate: int
    start: int
    s: Array
    tie: float
    library: Library


def topk(s: Array, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `k` largest of every row of `s` [b, m], the largest first, k <= m.

    Returns:
        Values and columns, [b, k] each.
    """
    s = to_host(s)
    if k == 1:
        columns = s.argmax(axis=1)[:, None]
        return np.take_along_axis(s, columns, axis=1), columns
    columns = np.argpartition(s, s.shape[1] - k, axis=1)[:, -k:]
    values = np.take_along_axis(s, columns, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    values = np.take_along_axis(values, order, axis=1)
    return values, np.take_along_axis(columns, order, axis=1)


class Collector(Protocol):
    """A figure that a search is to find out."""

    def begin(
        self,
        candidates: int,
        queries: np.ndarray,
        targets: Vectors,
        metric: Metric,
        library: Library,
    ) -> None: ...

    def update(self, scores: Scores, offsets: np.ndarray) -> None:
        """Take the `scores` of a tile; `offsets` are the candidate's, of all targets [n]."""

    def end(self) -> None:
        """Bring what was found to the host, after the last tile."""


class TopK:
    """Collects, for every candidate and query, the k best targets.

    rows: int64 [c, q, k], the best first. scores: float64 [c, q, k]. They have fewer than
    k columns where the gallery is smaller. Which of two tied targets comes first is
    arbitrary.
    """

    scores: np.ndarray
    rows: np.ndarray

    def __init__(self, k: int):
        if k < 1:
            raise InputError(
                f"k={k}: at least the one nearest target must be asked for"
            )
        self.k = k

    def begin(
        self,
        candidates: int,
        queries: np.ndarray,
        targets: Vectors,
        metric: Metric,
        library: Library,
    ) -> None:
        self.k = min(self.k, targets.rows)
        shape = (candidates, len(queries), self.k)
        self._scores = library.full(shape, -math.inf)
        self._rows = library.full(shape, -1, library.xp.int64)

    def update(self, scores: Scores, offsets: np.ndarray) -> None:
        if scores.library.is_on_cpu:
            self._update_on_cpu(scores)
            return
        xp = scores.library.xp
        best = self._scores[scores.candidate]
        rows = self._rows[scores.candidate]
        few = min(self.k, scores.s.shape[1])
        values, columns = scores.s.topk(few, dim=1)
        values = xp.concat([best, xp.astype(values, best.dtype)], axis=1)
        columns = xp.concat([rows, columns + scores.start], axis=1)
        best[...], order = values.topk(self.k, dim=1)
        rows[...] = columns.gather(1, order)

    def _update_on_cpu(self, scores: Scores) -> None:
        best = view(self._scores)[scores.candidate]
        rows = view(self._rows)[scores.candidate]
        s = view(scores.s)
        # Finding a row's maximum costs a tenth of finding its k best, and most later tiles hold none of them.
        changed = np.flatnonzero(s.max(axis=1) > best[:, -1])
        if not len(changed):
            return
        values, columns = topk(s[changed], min(self.k, s.shape[1]))
        values = np.concatenate([best[changed], values], axis=1)
        numbers = np.concatenate([rows[changed], columns + scores.start], axis=1)
        order = np.argsort(-values, axis=1, kind="stable")[:, : self.k]
        best[changed] = np.take_along_axis(values, order, axis=1)
        rows[changed] = np.take_along_axis(numbers, order, axis=1)

    def end(self) -> None:
        self.scores = to_host(self._scores).astype(np.float64, copy=False)
        self.rows = to_host(self._rows)


class TruthCounts:
    """Counts the targets that stand before a true one, for every candidate.

    Of every pair of a query and a target that is true for it, `greater` counts the
    *other* targets that score higher and `equal` those that tie: int64 [c, p].

    query_rows, target_rows: [p], ordered by query; any number of pairs a query.
    """

    greater: np.ndarray
    equal: np.ndarray

    def __init__(self, query_rows: np.ndarray, target_rows: np.ndarray):
        self.query_rows = np.asarray(query_rows, np.int64)
        self.target_rows = np.asarray(target_rows, np.int64)
        if (np.diff(self.query_rows) < 0).any():
            raise InputError("true pairs must be ordered by query")

    def begin(
        self,
        candidates: int,
        queries: np.ndarray,
        targets: Vectors,
        metric: Metric,
        library: Library,
    ) -> None:
        self._true = pair_scores(
            queries, targets, self.query_rows, self.target_rows, metric
        )
        shape = (candidates, len(self._true))
        self._greater = library.full(shape, 0, library.xp.int64)
        self._reached = library.full(shape, 0, library.xp.int64)

    def update(self, scores: Scores, offsets: np.ndarray) -> None:
        library = scores.library
        height, width = scores.s.shape
        for start in range(0, len(self._true), height):
            pairs = slice(start, start + height)
            columns = self.target_rows[pairs] - scores.start
            rivals = scores.s[library.to_device(self.query_rows[pairs])]
            inside = np.flatnonzero((columns >= 0) & (columns < width))
            no_rivals = library.to_device(inside), library.to_device(columns[inside])
            rivals[no_rivals] = -math.inf  # no rival of itself
            true = self._true[pairs] + offsets[self.target_rows[pairs]]
            above = library.to_device(true + scores.tie, rivals.dtype)[:, None]
            least = library.to_device(true - scores.tie, rivals.dtype)[:, None]
            # Summing truth values as floats is exact below 2^24 and several times as fast as summing booleans.
            truth = library.xp.empty_like(rivals)
            for count, reaches in (
                (self._greater, library.xp.greater(rivals, above, out=truth).sum(1)),
                (
                    self._reached,
                    library.xp.greater_equal(rivals, least, out=truth).sum(1),
                ),
            ):
                count[scores.candidate, pairs] += library.xp.astype(
                    reaches, library.xp.int64
                )

    def end(self) -> None:
        self.greater = to_host(self._greater)
        self.equal = to_host(self._reached) - self.greater


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
    if offsets is None:
        offsets = np.zeros((1, targets.rows), np.float32)
    offsets = np.atleast_2d(offsets)
    if offsets.shape[1] != targets.rows:
        raise InputError(
            f"offsets have shape {offsets.shape}; expected one a target, [candidates, {targets.rows}]"
        )
    similarities = Similarities(queries, metric, compute)
    library = similarities.library
    for collector in collectors:
        collector.begin(len(offsets), queries, targets, metric, library)
    largest = float(np.abs(offsets).max())
    for tile in similarities.tiles(targets, label):
        step = float(library.xp.finfo(tile.s.dtype).eps)
        tie = TIE * step * (tile.bound + largest)
        s = library.empty((len(queries), len(tile.s)), tile.s.dtype)
        s[...] = tile.s.T  # so that the rows of queries are contiguous
        for candidate, shift in enumerate(offsets):
            shift = library.to_device(shift[tile.rows], tile.s.dtype)
            corrected = s + shift
            scores = Scores(candidate, tile.rows.start, corrected, tie, library)
            for collector in collectors:
                collector.update(scores, offsets[candidate])
    for collector in collectors:
        collector.end()
