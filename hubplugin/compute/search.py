"""Compare every query with every target, in one pass.

The gallery is read in blocks, which `similarities` multiplies with the queries. A pass
feeds collectors, such as `TopK`, for any number of candidate corrections at once. On a
GPU, all results stay on the device until the pass is over.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from hubplugin.compute.device import Array, Compute, to_host
from hubplugin.compute.similarities import Similarities
from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin.vectors import BLOCK_ROWS, Vectors, take_rows

TIE = 8
"""Float steps, at the size of the largest score, within which two scores tie. A product
gives copies of a vector slightly different bits, depending on their place in the
matrix."""


@dataclass(frozen=True)
class Scores:
    """Corrected scores of all queries against some targets, under one candidate.

    candidate: The number of the candidate.
    start: The row of the first target.
    s: The scores [q, b].
    tie: The largest difference of two scores that tie, see `TIE`.
    """

    candidate: int
    start: int
    s: Array
    tie: float


def topk(s: Array, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `k` <= m largest of every row of `s` [b, m], the largest first.

    Returns:
        The values and their columns, [b, k] each.
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


class Collector(ABC):
    """A figure that is computed from the scores of a search."""

    @abstractmethod
    def begin(
        self, similarities: Similarities, targets: Vectors, offsets: np.ndarray
    ) -> None:
        """Prepare for a search.

        Args:
            similarities: The similarities of the queries.
            targets: The targets [n, d].
            offsets: One row per candidate correction, [c, n].
        """

    @abstractmethod
    def update(self, scores: Scores) -> None:
        """Process the scores of one tile under one candidate."""

    @abstractmethod
    def end(self) -> None:
        """Copy the result to the host, after the last tile."""


class TopK(Collector):
    """The k best targets of every candidate and query.

    The order of tied targets is arbitrary. In a gallery of fewer than k targets, k is
    their number.

    rows: The rows of the targets, the best first, int64 [c, q, k].
    scores: Their scores, float64 [c, q, k].
    """

    scores: np.ndarray
    rows: np.ndarray

    def __init__(self, k: int):
        if k < 1:
            raise InputError(f"k={k}: expected 1 or more")
        self.k = k

    def begin(
        self, similarities: Similarities, targets: Vectors, offsets: np.ndarray
    ) -> None:
        self._library = library = similarities.library
        self.k = min(self.k, targets.rows)
        shape = (len(offsets), similarities.m, self.k)
        self._scores = library.to_device(np.full(shape, -math.inf))
        self._rows = library.to_device(np.full(shape, -1))

    def update(self, scores: Scores) -> None:
        best = self._scores[scores.candidate]
        rows = self._rows[scores.candidate]
        count = min(self.k, scores.s.shape[1])
        if self._library.is_on_cpu:
            self._update_on_cpu(to_host(best), to_host(rows), scores, count)
            return
        xp = self._library.xp
        values, columns = scores.s.topk(count, dim=1)
        values = xp.concat([best, xp.astype(values, best.dtype)], axis=1)
        columns = xp.concat([rows, columns + scores.start], axis=1)
        best[...], order = values.topk(self.k, dim=1)
        rows[...] = columns.gather(1, order)

    def _update_on_cpu(
        self, best: np.ndarray, rows: np.ndarray, scores: Scores, count: int
    ) -> None:
        """Merge the `count` best of a tile into `best` and `rows` [q, k], in place."""
        s = to_host(scores.s)
        # Finding a row's maximum costs a tenth of finding its k best, and most later
        # tiles contain none of the k best.
        changed = np.flatnonzero(s.max(axis=1) > best[:, -1])
        if not len(changed):
            return
        values, columns = topk(s[changed], count)
        values = np.concatenate([best[changed], values], axis=1)
        columns = np.concatenate([rows[changed], columns + scores.start], axis=1)
        order = np.argsort(-values, axis=1, kind="stable")[:, : self.k]
        best[changed] = np.take_along_axis(values, order, axis=1)
        rows[changed] = np.take_along_axis(columns, order, axis=1)

    def end(self) -> None:
        self.scores = to_host(self._scores).astype(np.float64, copy=False)
        self.rows = to_host(self._rows)


class TruthCounts(Collector):
    """Counts of the targets that score as high as a true one, or higher.

    greater: For every candidate and true pair, the number of *other* targets that score
        higher than the true target, int64 [c, p].
    equal: The number of other targets that tie with the true target, int64 [c, p].

    Args:
        query_rows, target_rows: The true pairs [p], ordered by query. A query may have
            any number of them.
    """

    greater: np.ndarray
    equal: np.ndarray

    def __init__(self, query_rows: np.ndarray, target_rows: np.ndarray):
        self.query_rows = np.asarray(query_rows, np.int64)
        self.target_rows = np.asarray(target_rows, np.int64)
        if (np.diff(self.query_rows) < 0).any():
            raise InputError("true pairs must be ordered by query")

    def begin(
        self, similarities: Similarities, targets: Vectors, offsets: np.ndarray
    ) -> None:
        self._library = library = similarities.library
        scores = self._score_pairs(similarities, targets)
        self._true = scores + offsets[:, self.target_rows]
        zeros = np.zeros(self._true.shape, np.int64)
        self._greater = library.to_device(zeros)
        self._reached = library.to_device(zeros.copy())

    def _score_pairs(self, similarities: Similarities, targets: Vectors) -> np.ndarray:
        """Compute s(q, t) of each pair separately, in double precision: float64 [p]."""
        rows, place = np.unique(self.target_rows, return_inverse=True)
        vectors = take_rows(targets, rows, similarities.metric)
        scores = np.empty(len(place))
        for start in range(0, len(scores), BLOCK_ROWS):
            pairs = slice(start, start + BLOCK_ROWS)
            q = similarities.bank[self.query_rows[pairs]].astype(np.float64)
            t = vectors[place[pairs]].astype(np.float64)
            if similarities.metric is Metric.EUCLIDEAN:
                scores[pairs] = -np.sum((q - t) ** 2, axis=1) / 2
            else:
                scores[pairs] = np.sum(q * t, axis=1)
        return scores

    def update(self, scores: Scores) -> None:
        library = self._library
        xp = library.xp
        height, width = scores.s.shape
        # As many pairs at a time as there are queries: `rivals` is then no larger than
        # the tile.
        for start in range(0, len(self.query_rows), height):
            pairs = slice(start, start + height)
            columns = self.target_rows[pairs] - scores.start
            rivals = scores.s[library.to_device(self.query_rows[pairs])]
            inside = np.flatnonzero((columns >= 0) & (columns < width))
            # The true target itself is no rival.
            own = library.to_device(inside), library.to_device(columns[inside])
            rivals[own] = -math.inf
            true = self._true[scores.candidate, pairs]
            highest_tie = library.to_device(true + scores.tie, rivals.dtype)[:, None]
            lowest_tie = library.to_device(true - scores.tie, rivals.dtype)[:, None]
            # Summing floats of 0 and 1 is exact below 2^24 and several times as fast as
            # summing booleans.
            flags = xp.empty_like(rivals)
            greater = xp.greater(rivals, highest_tie, out=flags).sum(1)
            self._greater[scores.candidate, pairs] += xp.astype(greater, xp.int64)
            reached = xp.greater_equal(rivals, lowest_tie, out=flags).sum(1)
            self._reached[scores.candidate, pairs] += xp.astype(reached, xp.int64)

    def end(self) -> None:
        self.greater = to_host(self._greater)
        self.equal = to_host(self._reached) - self.greater


def search(
    queries: np.ndarray,
    targets: Vectors,
    metric: Metric,
    compute: Compute,
    *collectors: Collector,
    offsets: np.ndarray | None = None,
    label: str = "ranking",
) -> None:
    """Pass all scores s(q, t) + offsets[c, t] to every collector, in one pass.

    Each similarity is computed once for all candidates and collectors. Targets are read
    in blocks while the queries stay in memory, together with one block, one tile and
    the results of the collectors.

    Args:
        queries: The prepared queries [q, d]; mapped queries keep their length.
        targets: The targets [n, d].
        metric: The similarity.
        compute: Device, memory and progress.
        *collectors: The collectors that receive the scores.
        offsets: One row per candidate correction, [c, n]; by default a row of zeros.
        label: The name of this step in progress reports.
    """
    if offsets is None:
        offsets = np.zeros((1, targets.rows), np.float32)
    offsets = np.atleast_2d(offsets)
    if offsets.shape[1] != targets.rows:
        raise InputError(
            f"offsets have shape {offsets.shape}; expected one per target, "
            f"[candidates, {targets.rows}]"
        )
    similarities = Similarities(queries, metric, compute)
    library = similarities.library
    for collector in collectors:
        collector.begin(similarities, targets, offsets)
    largest_offset = float(np.abs(offsets).max())
    for tile in similarities.tiles(targets, label):
        step = float(library.xp.finfo(tile.s.dtype).eps)
        tie = TIE * step * (tile.bound + largest_offset)
        s = library.empty((len(queries), len(tile.s)), tile.s.dtype)
        s[...] = tile.s.T  # a copy, so that each query's row is contiguous
        for candidate, shift in enumerate(offsets):
            shift = library.to_device(shift[tile.rows], tile.s.dtype)
            scores = Scores(candidate, tile.rows.start, s + shift, tie)
            for collector in collectors:
                collector.update(scores)
    for collector in collectors:
        collector.end()
