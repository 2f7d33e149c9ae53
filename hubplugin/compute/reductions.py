"""Reduce a bank's similarities for each target, and find the answers of a bank.

A fit makes two passes over the similarities. The first finds the nearest target of each
query (`find_answers`). The second reduces the similarities without the answers
(`reduce`, `sinkhorn`). Values are copied from a device once per pass.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from hubplugin.compute.device import Array, Library, split, to_host
from hubplugin.compute.similarities import MOST_ANSWERS, Similarities
from hubplugin.vectors import Vectors

logger = logging.getLogger(__name__)

NARROW = 60.0
"""The largest |x| for which exp(x) needs no peak in float32, whose range ends at
exp(87). The rest is for sums of many such exponentials, and for the weights of
`sinkhorn.SAFE_DRIFT`."""

GROUP = 8
"""Columns in a group. A GPU first finds the largest value of each group: the k largest
of a row lie in the k groups with the largest maxima, or in the columns outside all
groups. The columns of a group lie apart, so that a GPU reads neighbouring groups
together."""


def topk_values(s: Array, k: int, library: Library) -> Array:
    """Return the `k` largest of every row of `s` [b, m], in any order: [b, k]."""
    xp = library.xp
    m = s.shape[1]
    if library.is_on_cpu:
        largest = np.partition(to_host(s), m - k, axis=1)[:, m - k :]
        return library.to_device(largest)
    groups = m // GROUP
    if groups > k:
        grouped = s[:, : groups * GROUP].reshape(len(s), GROUP, groups)
        best_groups = grouped.amax(dim=1).topk(k, dim=1, sorted=False).indices
        # Group g has the columns g, g + groups, g + 2 groups ...
        starts = groups * xp.arange(GROUP, device=s.device)
        columns = best_groups[:, None, :] + starts[:, None]
        in_best_groups = s.gather(1, columns.flatten(1))
        s = xp.concat([in_best_groups, s[:, groups * GROUP :]], axis=1)
    return s.topk(k, dim=1, sorted=False).values


def topk_mean(s: Array, k: int, library: Library) -> Array:
    """Return the mean of the `k` largest of every row of `s` [b, m]: [b].

    Hidden entries (-inf) do not count. If fewer than `k` remain, all of them are
    averaged.
    """
    xp = library.xp
    values = s if k >= s.shape[1] else topk_values(s, k, library)
    is_visible = values > -math.inf
    total = xp.sum(xp.where(is_visible, values, 0.0), axis=1)
    # If all are hidden, the mean is NaN, which the check of offsets refuses.
    with np.errstate(invalid="ignore"):
        return total / xp.sum(is_visible, axis=1)


def exponentials(x: Array, bound: float, library: Library) -> tuple[Array, Array]:
    """Overwrite `x` [b, m] with exp(x - peak); return it, and the peak [b] of each row.

    The peak is the largest entry of the row. If `bound`, which no |x| exceeds, is at
    most `NARROW`, the peak is 0 instead, which saves two passes over `x`.
    """
    xp = library.xp
    if bound <= NARROW:
        return xp.exp(x, out=x), xp.zeros_like(x[:, 0])
    # The peak stays finite if every entry is hidden: -inf - -inf is NaN.
    peak = xp.clip(xp.max(x, axis=1), min=float(xp.finfo(x.dtype).min))
    x -= peak[:, None]
    return xp.exp(x, out=x), peak


def log_sum_exp(x: Array, bound: float, library: Library) -> Array:
    """Return the LSE of each row of `x` [b, m], |x| <= `bound`: [b]. Overwrite `x`."""
    values, peak = exponentials(x, bound, library)
    with np.errstate(divide="ignore"):  # the check of offsets refuses a log of 0
        return library.xp.log(library.xp.sum(values, axis=1)) + peak


@dataclass(frozen=True)
class LogSum:
    """LSE_u( s(b_u, t)/tau + log_weights_u ), with log_weights [m]; None means 0."""

    tau: float
    log_weights: np.ndarray | None = None


@dataclass(frozen=True)
class MeanOfLargest:
    """The mean of the k largest s(b_u, t)."""

    k: int


def reduce(
    similarities: Similarities,
    targets: Vectors,
    reductions: Sequence[LogSum | MeanOfLargest],
    thresholds: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Reduce the similarities of every target, in one pass over them.

    Args:
        similarities: The similarities of the bank.
        targets: The targets [n, d].
        reductions: Only the last may be a `LogSum`, since it overwrites the tiles.
        thresholds: The similarity from which a target is an answer of each bank row,
            [m]. Entries at or above these thresholds, and the largest entry below them
            for each target, are left out.

    Returns:
        The value of each reduction for every target: float64 [n] each.
    """
    library = similarities.library
    tau = 1.0
    log_weights = None
    largest_weight = 0.0
    last = reductions[-1]
    if isinstance(last, LogSum):
        is_plain_sum = len(reductions) == 1 and thresholds is None
        if is_plain_sum and similarities.may_use_halves and not library.is_on_cpu:
            fused = fuse_log_sum(similarities, targets, last)
            if fused is not None:
                return [fused]
        tau = last.tau
        if last.log_weights is not None:
            log_weights = library.to_device(last.log_weights)
            largest_weight = float(np.abs(last.log_weights).max())
    scale = 1 / tau
    hidden_from = None
    if thresholds is not None:
        hidden_from = library.to_device(similarities.lower(thresholds) * scale)
    # Allocate once: small arrays kept between large temporary blocks fragment memory.
    results = [library.empty((targets.rows,), library.accumulator) for _ in reductions]
    for tile in similarities.tiles(targets, "offsets", scale=scale):
        x = tile.s
        if hidden_from is not None:
            similarities.hide(x, hidden_from)
        for values, reduction in zip(results, reductions, strict=True):
            if isinstance(reduction, MeanOfLargest):
                mean = topk_mean(x, reduction.k, library)
                values[tile.rows] = mean * tau  # undoes `scale`
                continue
            if log_weights is not None:
                x += library.xp.astype(log_weights, x.dtype, copy=False)
            bound = tile.bound + largest_weight
            values[tile.rows] = log_sum_exp(x, bound, library)
    return [to_host(values).astype(np.float64, copy=False) for values in results]


def fuse_log_sum(
    similarities: Similarities, targets: Vectors, log_sum: LogSum
) -> np.ndarray | None:
    """Compute a log-sum-exp in one kernel that writes no similarity to memory.

    Args:
        similarities: The similarities of a bank of unit length, on a GPU.
        targets: The targets [n, d].
        log_sum: The sum.

    Returns:
        The log-sum-exp of every target, float64 [n]. None if no kernel exists for the
        GPU, or if it cannot run.
    """
    library = similarities.library
    device = library.device
    if device is None or device.type != "cuda" or find_spec("triton") is None:
        return None
    import torch

    from hubplugin.compute import kernels

    capability, _ = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or capability not in kernels.COLUMNS:
        return None
    weights = log_sum.log_weights
    if weights is None:
        weights = np.zeros(similarities.m)
    bias = library.to_device(weights)
    bank = split(library.to_device(similarities.bank, library.xp.float32))
    values = library.empty((targets.rows,), library.xp.float32)
    for start, block in similarities.blocks(targets):
        stop = start + len(block)
        try:
            values[start:stop] = kernels.log_sum_exp(
                split(block), bank, bias, 1 / log_sum.tau
            )
        except Exception as error:
            # A kernel that ran for the first block fails for another reason later.
            if start:
                raise
            logger.warning(
                "no fused kernel on this GPU; torch is used instead: %s", error
            )
            return None
        similarities.compute.report("offsets", stop, targets.rows)
    return to_host(values).astype(np.float64)


SMALLEST_LOG = 20
"""The fewest bank queries, and the fewest targets, with which answers are hidden. With
fewer, too few entries would remain."""


@dataclass(frozen=True)
class Answers:
    """The answers of a bank in a gallery, as far as similarity shows them.

    thresholds: The similarity of each bank query and its nearest target, from gallery
        and target bank [m]. Any target that reaches it counts as an answer, even one
        added later.
    weights: 1 over the number of bank queries with the same nearest target [m], so that
        a target that was asked for in many paraphrases counts once.
    """

    thresholds: np.ndarray
    weights: np.ndarray

    @classmethod
    def by_nearest(cls, thresholds: np.ndarray, nearest: np.ndarray) -> Answers:
        """Return the answers, from the results of `nearest_targets`."""
        _, place, count = np.unique(nearest, return_inverse=True, return_counts=True)
        # A hub is not an answer: the queries that find it ask for other targets, so
        # each of these queries counts in full.
        count[count > MOST_ANSWERS * len(nearest)] = 1
        return cls(thresholds, 1.0 / count[place.reshape(-1)])


def nearest_targets(
    similarities: Similarities, columns: Sequence[Vectors]
) -> tuple[np.ndarray, np.ndarray]:
    """Find the nearest target of every bank row among all `columns`, in one pass.

    The products stay in `similarities.products` if `keeps_products` asks for it and
    memory has room.

    Returns:
        The similarity of the nearest target, float64 [m], and its row, counted across
        all columns, int64 [m]. Of near-equal targets (see `ANSWER_SLACK`), it is the
        first.
    """
    library = similarities.library
    xp = library.xp
    best = library.to_device(np.full(similarities.m, -math.inf))
    best_row = library.to_device(np.zeros(similarities.m, np.int64))
    products = similarities.make_room(sum(targets.rows for targets in columns))
    out = None
    bound = 0.0
    first = 0
    for targets in columns:
        if products is not None:
            out = products[first : first + targets.rows]
        for tile in similarities.tiles(targets, "answers of the bank", out=out):
            bound = max(bound, tile.bound)
            tile_best = xp.astype(xp.max(tile.s, axis=0), library.accumulator)
            # A new row wins only if it beats the best so far by more than the slack, so
            # the first of near-equal targets keeps its place.
            threshold = similarities.lower(tile_best)
            is_nearer = threshold > best
            start = first + tile.rows.start
            tile_rows = start + first_reaching(tile.s, threshold, is_nearer, library)
            best_row = xp.where(is_nearer, tile_rows, best_row)
            best = xp.maximum(best, tile_best)
        first += targets.rows
    # Products that were computed in float64 are not kept.
    if bound <= similarities.largest_float32:
        similarities.products = products
    similarities.products_bound = bound
    return to_host(best).astype(np.float64), to_host(best_row)


def first_reaching(
    s: Array, threshold: Array, is_wanted: Array, library: Library
) -> Array:
    """Return the first row of `s` [b, m] that reaches each column's `threshold`.

    The result is int64 [m]. Only the wanted columns matter: on a CPU, the others get 0.
    """
    xp = library.xp
    if not library.is_on_cpu:
        # Bytes, because int64 numbers of a tile's size would not fit in memory.
        return (s >= threshold).view(xp.uint8).argmax(dim=0)
    rows = np.zeros(s.shape[1], np.int64)
    wanted = np.flatnonzero(to_host(is_wanted))  # few, after the first tiles
    reaches = to_host(s)[:, wanted] >= to_host(threshold)[wanted]
    rows[wanted] = reaches.argmax(axis=0)
    return library.to_device(rows)


def find_answers(
    similarities: Similarities, columns: Sequence[Vectors]
) -> Answers | None:
    """Find the answers of a bank among all `columns`, in one pass.

    Return None if the bank or the targets are too few.
    """
    if min(similarities.m, sum(part.rows for part in columns)) < SMALLEST_LOG:
        return None
    return Answers.by_nearest(*nearest_targets(similarities, columns))
