"""What is reduced over a bank for each target: log-sum-exp, mean of the k largest, dot product; with answers left out.

A fit takes two passes over the similarities: the first finds the nearest target of each query (`find_answers`), the
second reduces what is left (`reduce`, `sinkhorn`). Values come back from a device once a pass.

An answer is no hub. A *log* holds queries that people asked of this very gallery. Each is near its answer because it
was asked for it, not because the answer is a hub, so the answer's entry says nothing about hubness and is left out of
the sums. Where the answer is another target than the nearest, leaving out each target's largest entry takes care of
most of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from hubplugin.compute.device import Array, Library, Placed, host, view
from hubplugin.compute.similarities import Similarities, Tile
from hubplugin.metric import Metric
from hubplugin.vectors import Vectors

GROUP = 8
"""Columns of a group, of which a card looks at the largest first: the k largest of a row lie in the k groups with the
largest maxima, and in the columns that belong to none. Columns of a group lie apart, so that a card reads neighbouring
groups together."""


def largest_values(s: Array, k: int, library: Library) -> Array:
    """The values of the k largest of every row of s [b, m], in any order, on the device: [b, k]. k <= m."""
    xp, m = library.xp, s.shape[1]
    if library.on_cpu:
        return xp.asarray(np.partition(view(s), m - k, axis=1)[:, m - k :])
    groups = m // GROUP
    if groups <= k:
        return s.topk(k, dim=1, sorted=False).values
    best = s[:, : groups * GROUP].reshape(len(s), GROUP, groups).amax(dim=1).topk(k, dim=1, sorted=False).indices
    columns = best[:, None, :] + groups * xp.arange(GROUP, device=s.device)[:, None]
    inside = s.gather(1, columns.flatten(1))
    return xp.concat([inside, s[:, groups * GROUP :]], axis=1).topk(k, dim=1, sorted=False).values


# What is left out

MOST_ANSWERS = 0.1
"""A target may be the answer of this share of the bank's queries. One that is nearest to more of them is a hub, however
it came to be one, and keeps all its entries."""


@dataclass(frozen=True)
class LeftOut:
    """Entries of bank x targets that a reduction does not see: an answer is no hub.

    levels: [m], float64. t is an answer of the bank query u if s(b_u, t) >= levels_u. largest: whether each target also
    loses the largest of what is left, which is the answer's entry where a query's nearest target is another.
    """

    levels: np.ndarray
    largest: bool = True


class Leaver:
    """Sets to -inf, in place, what `left_out` names in tiles of `scale` times the similarities, but for answers of a
    hub."""

    def __init__(self, similarities: Similarities, left_out: LeftOut, scale: float = 1.0):
        self._on_cpu, self._largest = similarities.library.on_cpu, left_out.largest
        self._levels = Placed(similarities.library, scale * similarities.reached(left_out.levels))

    def __call__(self, s: Array) -> None:
        if self._on_cpu:
            self._few(view(s), view(self._levels.like(s)))
        else:
            self._all(s, self._levels.like(s))

    def _few(self, s: np.ndarray, levels: np.ndarray) -> None:
        some = np.flatnonzero(s.max(axis=0) >= levels)  # most columns have none
        rows, columns = np.nonzero(s[:, some] >= levels[some])
        out = np.bincount(rows, minlength=len(s))[rows] <= MOST_ANSWERS * s.shape[1]
        s[rows[out], some[columns[out]]] = -math.inf
        if self._largest:
            np.put_along_axis(s, s.argmax(axis=1)[:, None], -math.inf, axis=1)

    def _all(self, s: Array, levels: Array) -> None:
        """Without asking how many there are, for which a card would have to wait."""
        answers = s >= levels
        answers &= answers.sum(dim=1, keepdim=True) <= MOST_ANSWERS * s.shape[1]
        s.masked_fill_(answers, -math.inf)
        if self._largest:
            s.scatter_(1, s.argmax(dim=1, keepdim=True), -math.inf)


# The reductions


def exponentials(x: Array, library: Library) -> tuple[Array, Array]:
    """exp(x - peak) in the place of x [b, m], and the peak [b] of each row."""
    xp = library.xp
    # Of a row of which all is left out the peak is finite, too: -inf less itself would be no number.
    peak = xp.clip(xp.max(x, axis=1), min=float(xp.finfo(x.dtype).min))
    x -= peak[:, None]
    return xp.exp(x, out=x), peak


def log_sum(x: Array, library: Library) -> Array:
    """LSE over the rows of x [b, m], which is overwritten: [b]. The log of 0 is told where offsets are checked."""
    values, peak = exponentials(x, library)
    with np.errstate(divide="ignore"):
        return library.xp.log(library.xp.sum(values, axis=1)) + peak


@dataclass(frozen=True)
class LogSum:
    """LSE_u( s(b_u, t)/tau + log_weights_u ); log_weights [m], 0 where None."""

    tau: float
    log_weights: np.ndarray | None = None


@dataclass(frozen=True)
class MeanOfLargest:
    """Mean of the k largest s(b_u, t); of all that are not left out, where they are fewer."""

    k: int

    def of(self, s: Array, library: Library) -> Array:
        """Of a tile of s [b, m], in which nothing changes: [b]."""
        xp = library.xp
        values = s if self.k >= s.shape[1] else largest_values(s, self.k, library)
        there = values > -math.inf
        with np.errstate(invalid="ignore"):  # of none at all: NaN, which is told where offsets are checked
            return xp.sum(xp.where(there, values, 0.0), axis=1) / xp.sum(there, axis=1)


def reduce(
    similarities: Similarities,
    targets: Vectors,
    reductions: Sequence[LogSum | MeanOfLargest],
    left_out: LeftOut | None = None,
) -> list[np.ndarray]:
    """The value of each of `reductions`, of which at most one is a `LogSum`, for every target, in one pass over the
    similarities: float64 [n] each."""
    of_sums = next((each for each in reductions if isinstance(each, LogSum)), None)
    if of_sums is not None and len(reductions) == 1:
        fused = fused_log_sum(similarities, targets, of_sums, left_out)
        if fused is not None:
            return [fused]
    library, scale = similarities.library, 1.0 if of_sums is None else 1 / of_sums.tau
    leave_out = None if left_out is None else Leaver(similarities, left_out, scale)
    weights = None if of_sums is None or of_sums.log_weights is None else Placed(library, of_sums.log_weights)
    # Not in parts: small arrays that stay, between blocks that go, would leave the memory of all blocks in pieces.
    found = [library.empty((targets.rows,), library.accumulator) for _ in reductions]
    for tile in similarities.tiles(targets, "offsets", scale=scale):
        if leave_out is not None:
            leave_out(tile.s)
        for values, each in zip(found, reductions, strict=True):
            if isinstance(each, MeanOfLargest):
                values[tile.start : tile.stop] = each.of(tile.s, library) / scale
        if of_sums is not None:  # last, since it overwrites the tile
            x = tile.s
            if weights is not None:
                x += weights.like(x)
            found[reductions.index(of_sums)][tile.start : tile.stop] = log_sum(x, library)
    return [host(values).astype(np.float64, copy=False) for values in found]


def fused_log_sum(
    similarities: Similarities, targets: Vectors, of: LogSum, left_out: LeftOut | None
) -> np.ndarray | None:
    """The log-sum-exp of unit vectors on a card by one kernel, in which no similarity reaches memory: float64 [n].
    None where there is no card, no triton, or vectors have lengths of their own."""
    kernels = kernels_for(similarities)
    if kernels is None:
        return None
    library, m = similarities.library, similarities.m
    bank = kernels.halves(library.put(similarities.bank, library.xp.float32))
    bias = library.put(np.zeros(m) if of.log_weights is None else np.asarray(of.log_weights, np.float64))
    levels = None if left_out is None else library.put(similarities.reached(left_out.levels))
    values = library.empty((targets.rows,), library.xp.float32)
    for start, block in similarities.blocks(targets):
        stop, halves = start + len(block), kernels.halves(block)
        values[start:stop] = kernels.log_sum_exp(halves, bank, bias, 1 / of.tau, levels, MOST_ANSWERS * m)
        similarities.compute.report("offsets", stop, targets.rows)
    return host(values).astype(np.float64)


def kernels_for(similarities: Similarities) -> Any:
    """The module of fused kernels where it serves: vectors of length 1 on a card, with triton. None elsewhere."""
    device = similarities.library.device
    if device is None or device.type != "cuda" or similarities.compute.precision != "auto":
        return None
    if similarities.metric is not Metric.COSINE or similarities.longest > 1.001 or find_spec("triton") is None:
        return None
    from hubplugin.compute import kernels

    return kernels


def dot(similarities: Similarities, targets: Vectors) -> np.ndarray:
    """s(v, t) for every target, where the bank is the one vector v: float64 [n]."""
    values = similarities.library.empty((targets.rows,), similarities.library.accumulator)
    for tile in similarities.tiles(targets, "offsets"):
        values[tile.start : tile.stop] = tile.s[:, 0]
    return host(values).astype(np.float64, copy=False)


# Answers

SMALLEST_LOG = 20
"""Bank queries, and targets, below which nothing is left out: too little would remain."""


@dataclass(frozen=True)
class Answers:
    """The answers of a bank in a gallery, as far as similarity tells them.

    levels: [m], the similarity of each bank query's nearest target, of gallery and target bank: what reaches it counts
    as an answer, also a target that comes later. weights: [m], 1 over the number of bank queries with the same
    nearest target, so that what was asked for in many wordings counts once.
    """

    levels: np.ndarray
    weights: np.ndarray

    @staticmethod
    def of(levels: np.ndarray, rows: np.ndarray) -> Answers:
        """levels, rows: what `nearest_targets` found."""
        _, place, count = np.unique(rows, return_inverse=True, return_counts=True)
        count[count > MOST_ANSWERS * len(rows)] = 1  # a hub, not an answer: the queries that find it ask for others
        return Answers(levels, 1.0 / count[place.reshape(-1)])


def nearest_targets(similarities: Similarities, columns: Sequence[Vectors]) -> tuple[np.ndarray, np.ndarray]:
    """Of every bank row its similarity to the nearest target of all `columns`, in one pass, and that target's number,
    counted through all of them, the first of several that are as near (see `ANSWER_SLACK`): float64 and int64 [m]."""
    library, m, first = similarities.library, similarities.m, 0
    xp = library.xp
    similarity = library.zeros((m,), library.accumulator) - math.inf
    rows = library.zeros((m,), xp.int64)
    for targets in columns:
        for tile in similarities.tiles(targets, "answers of the bank"):
            highest = xp.astype(xp.max(tile.s, axis=0), library.accumulator)
            least = similarities.reached(highest)
            _note_first(rows, tile, first, least, least > similarity, library)
            similarity = xp.maximum(similarity, highest)
        first += targets.rows
    return host(similarity).astype(np.float64), host(rows)


def _note_first(rows: Array, tile: Tile, first: int, least: Array, nearer: Array, library: Library) -> None:
    """Writes the number of the first target that reaches `least` [m] to those of `rows` [m] that are `nearer`."""
    xp, start = library.xp, first + tile.start
    if library.on_cpu:
        some = np.flatnonzero(view(nearer))
        view(rows)[some] = (view(tile.s)[:, some] >= view(least)[some]).argmax(axis=0) + start
        return
    numbers = xp.arange(len(tile.s), device=library.device)[:, None]
    reaching = xp.where(tile.s >= least, numbers, len(tile.s)).amin(dim=0) + start
    rows.copy_(xp.where(nearer, reaching, rows))


def find_answers(similarities: Similarities, columns: Sequence[Vectors]) -> Answers | None:
    """The answers of the bank of `similarities` among the targets of all `columns`, in one pass; None where bank or
    targets are too few."""
    if min(similarities.m, sum(part.rows for part in columns)) < SMALLEST_LOG:
        return None
    return Answers.of(*nearest_targets(similarities, columns))


def topk_similarities(similarities: Similarities, targets: Vectors, k: int) -> np.ndarray:
    """The k largest similarities of every bank row, the largest first, in one pass: float64 [m, min(k, n)]."""
    library, most = similarities.library, None
    for tile in similarities.tiles(targets, "looking at the bank"):
        both = tile.s if most is None else library.xp.concat([most, tile.s])
        if len(both) <= k:
            most = library.xp.asarray(both, copy=True)
        elif library.on_cpu:
            most = library.xp.asarray(np.partition(view(both), len(both) - k, axis=0)[len(both) - k :])
        else:
            most = both.topk(k, dim=0).values
    return np.sort(host(most).astype(np.float64).T, axis=1)[:, ::-1]


# What query-dependent corrections ask


def reaches(similarities: Similarities, targets: Vectors, thresholds: np.ndarray) -> np.ndarray:
    """Whether s(b_u, t) is at least `thresholds` [m] for some bank row, to float32 rounding: bool [n]."""
    slack = 1e-6 * max(1.0, float(np.abs(thresholds).max()))
    xp = similarities.library.xp
    levels = Placed(similarities.library, np.asarray(thresholds, np.float64) - slack)
    tiles = similarities.tiles(targets, "activation set")
    parts = [xp.any(tile.s >= levels.like(tile.s), axis=1) for tile in tiles]
    return host(xp.concat(parts))


def count_larger(similarities: Similarities, targets: Vectors, levels: np.ndarray) -> np.ndarray:
    """How many of s(b_1, t) ... s(b_m, t) are larger than `levels` [c, n], for every target: int64 [c, n]."""
    xp, put, parts = similarities.library.xp, similarities.library.put, []
    for tile in similarities.tiles(targets, "ranks in the bank"):
        part = levels[:, tile.start : tile.stop]
        parts.append(xp.stack([xp.sum(tile.s > put(level, tile.s.dtype)[:, None], axis=1) for level in part]))
    return host(xp.concat(parts, axis=1))
