"""Reductions over a bank for each target, and the answers of a bank.

A fit takes two passes over the similarities. The first finds the nearest target of each
query (`find_answers`), the second reduces what the answers leave (`reduce`,
`sinkhorn`). Values return from a device once a pass.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from hubplugin.compute.device import Array, Library, split, to_host, view
from hubplugin.compute.similarities import MOST_ANSWERS, Similarities
from hubplugin.vectors import Vectors

logger = logging.getLogger(__name__)

GROUP = 8
"""Columns of a group. A card looks at the largest of each group first: the k largest of
a row lie in the k groups with the largest maxima, and in the columns that belong to
none. Columns of a group lie apart, so that a card reads neighbouring groups
together."""


def topk_values(s: Array, k: int, library: Library) -> Array:
    """Return the `k` largest of every row of `s` [b, m], in any order: [b, k]."""
    xp = library.xp
    m = s.shape[1]
    if library.is_on_cpu:
        return xp.asarray(np.partition(view(s), m - k, axis=1)[:, m - k :])
    groups = m // GROUP
    if groups > k:
        grouped = s[:, : groups * GROUP].reshape(len(s), GROUP, groups)
        best = grouped.amax(dim=1).topk(k, dim=1, sorted=False).indices
        starts = groups * xp.arange(GROUP, device=s.device)
        columns = best[:, None, :] + starts[:, None]
        inside = s.gather(1, columns.flatten(1))
        s = xp.concat([inside, s[:, groups * GROUP :]], axis=1)
    return s.topk(k, dim=1, sorted=False).values


def topk_mean(s: Array, k: int, library: Library) -> Array:
    """Return the mean of the `k` largest of every row of `s` [b, m]: [b].

    It is of all that are not hidden if these are fewer.
    """
    xp = library.xp
    values = s if k >= s.shape[1] else topk_values(s, k, library)
    is_there = values > -math.inf
    total = xp.sum(xp.where(is_there, values, 0.0), axis=1)
    # Of none at all it is NaN, which is refused where offsets are checked.
    with np.errstate(invalid="ignore"):
        return total / xp.sum(is_there, axis=1)


def exponentials(x: Array, library: Library) -> tuple[Array, Array]:
    """Return exp(x - peak) in the place of `x` [b, m], and the peak [b] of each row."""
    xp = library.xp
    # The peak stays finite if every entry is hidden: -inf - -inf is NaN.
    peak = xp.clip(xp.max(x, axis=1), min=float(xp.finfo(x.dtype).min))
    x -= peak[:, None]
    return xp.exp(x, out=x), peak


def log_sum_exp(x: Array, library: Library) -> Array:
    """Return LSE over the rows of `x` [b, m], which is overwritten: [b]."""
    values, peak = exponentials(x, library)
    with np.errstate(divide="ignore"):  # the log of 0 is refused with the offsets
        return library.xp.log(library.xp.sum(values, axis=1)) + peak


@dataclass(frozen=True)
class LogSum:
    """LSE_u( s(b_u, t)/tau + log_weights_u ); log_weights [m], 0 where None."""

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
    answers: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Reduce the similarities of every target, in one pass over them.

    Args:
        similarities: Those of the bank.
        targets: [n, d].
        reductions: A `LogSum` may only be the last, since it overwrites the tiles.
        answers: The thresholds of answers, which are hidden, as in `tiles`.

    Returns:
        The value of each reduction for every target: float64 [n] each.
    """
    library = similarities.library
    last = reductions[-1]
    tau = 1.0
    log_weights = None
    if isinstance(last, LogSum):
        if len(reductions) == 1 and answers is None:
            fused = fuse_log_sum(similarities, targets, last)
            if fused is not None:
                return [fused]
        tau = last.tau
        if last.log_weights is not None:
            log_weights = library.matching(last.log_weights)
    # Allocated once: small arrays that are kept between large temporary blocks fragment
    # the memory.
    results = [library.empty((targets.rows,), library.accumulator) for _ in reductions]
    for tile in similarities.tiles(targets, "offsets", scale=1 / tau, answers=answers):
        x = tile.s
        for values, reduction in zip(results, reductions, strict=True):
            if isinstance(reduction, MeanOfLargest):
                values[tile.rows] = topk_mean(x, reduction.k, library) * tau
                continue
            if log_weights is not None:
                x += log_weights(x)
            values[tile.rows] = log_sum_exp(x, library)
    return [to_host(values).astype(np.float64, copy=False) for values in results]


def fuse_log_sum(
    similarities: Similarities, targets: Vectors, log_sum: LogSum
) -> np.ndarray | None:
    """Compute a log-sum-exp by one kernel, in which no similarity reaches memory.

    Returns:
        float64 [n]. None if there is no kernel for the card or it cannot run, and for
        vectors that are not of unit length.
    """
    library = similarities.library
    device = library.device
    is_card = device is not None and device.type == "cuda"
    if not is_card or not similarities.is_unit or find_spec("triton") is None:
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
            if start:
                raise
            logger.warning("no fused kernel on this card, torch serves: %s", error)
            return None
        similarities.compute.report("offsets", stop, targets.rows)
    return to_host(values).astype(np.float64)


# Answers

SMALLEST_LOG = 20
"""Fewest bank queries, and targets, for answers to be hidden: too little would
remain."""


@dataclass(frozen=True)
class Answers:
    """The answers of a bank in a gallery, as far as similarity tells them.

    thresholds: The similarity of each bank query's nearest target, of gallery and
        target bank [m]. What reaches it counts as an answer, also a target that comes
        later.
    weights: 1 over the number of bank queries with the same nearest target [m], so that
        what was asked for in many paraphrases counts once.
    """

    thresholds: np.ndarray
    weights: np.ndarray

    @classmethod
    def by_nearest(cls, thresholds: np.ndarray, nearest: np.ndarray) -> Answers:
        """Return the answers, from what `nearest_targets` returns."""
        _, place, count = np.unique(nearest, return_inverse=True, return_counts=True)
        # A hub is no answer: the queries that find it ask for others.
        count[count > MOST_ANSWERS * len(nearest)] = 1
        return cls(thresholds, 1.0 / count[place.reshape(-1)])


def nearest_targets(
    similarities: Similarities, columns: Sequence[Vectors]
) -> tuple[np.ndarray, np.ndarray]:
    """Find the nearest target of every bank row among all `columns`, in one pass.

    Returns:
        Its similarity and its number, counted through all columns, the first of several
        that are as near (see `ANSWER_SLACK`): float64 and int64 [m].
    """
    library = similarities.library
    xp = library.xp
    similarity = library.full((similarities.m,), -math.inf)
    rows = library.full((similarities.m,), 0, xp.int64)
    first = 0
    for targets in columns:
        for tile in similarities.tiles(targets, "answers of the bank"):
            start = first + tile.rows.start
            highest = xp.astype(xp.max(tile.s, axis=0), library.accumulator)
            least = similarities.lower(highest)
            is_nearer = least > similarity
            if library.is_on_cpu:
                nearer = np.flatnonzero(view(is_nearer))  # few, after the first tiles
                reaches = view(tile.s)[:, nearer] >= view(least)[nearer]
                view(rows)[nearer] = reaches.argmax(axis=0) + start
            else:
                # As bytes: for int64 of a tile's size there is no room.
                reaches = (tile.s >= least).view(xp.uint8)
                rows = xp.where(is_nearer, reaches.argmax(dim=0) + start, rows)
            similarity = xp.maximum(similarity, highest)
        first += targets.rows
    return to_host(similarity).astype(np.float64), to_host(rows)


def find_answers(
    similarities: Similarities, columns: Sequence[Vectors]
) -> Answers | None:
    """Return the answers of a bank among all `columns`, in one pass.

    None if bank or targets are too few.
    """
    if min(similarities.m, sum(part.rows for part in columns)) < SMALLEST_LOG:
        return None
    return Answers.by_nearest(*nearest_targets(similarities, columns))
