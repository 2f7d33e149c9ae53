"""What is reduced over a bank for each target: a log-sum-exp, a mean of the k largest; and the answers of a bank.

A fit takes two passes over the similarities: the first finds the nearest target of each query (`find_answers`), the
second reduces what the answers leave (`reduce`, `sinkhorn`). Values return from a device once a pass.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from hubplugin.compute.device import Array, Library, split, to_host, view
from hubplugin.compute.similarities import MOST_ANSWERS, AnswerMask, Similarities
from hubplugin.vectors import Vectors

logger = logging.getLogger(__name__)

CAPABILITIES = (8, 9, 10)
"""Compute capabilities of the cards that the kernel is compiled and tried for."""

GROUP = 8
"""Columns of a group, of which a card looks at the largest first: the k largest of a row lie in the k groups with the
largest maxima, and in the columns that belong to none. Columns of a group lie apart, so that a card reads neighbouring
groups together."""


def topk_values(s: Array, k: int, library: Library) -> Array:
    """The values of the `k` largest of every row of `s` [b, m] in `library`, in any order, on the device: [b, k]. k <=
    m."""
    xp, m = library.xp, s.shape[1]
    if library.is_on_cpu:
        return xp.asarray(np.partition(view(s), m - k, axis=1)[:, m - k :])
    groups = m // GROUP
    if groups <= k:
        return s.topk(k, dim=1, sorted=False).values
    best = (
        s[:, : groups * GROUP]
        .reshape(len(s), GROUP, groups)
        .amax(dim=1)
        .topk(k, dim=1, sorted=False)
        .indices
    )
    columns = best[:, None, :] + groups * xp.arange(GROUP, device=s.device)[:, None]
    inside = s.gather(1, columns.flatten(1))
    return (
        xp.concat([inside, s[:, groups * GROUP :]], axis=1)
        .topk(k, dim=1, sorted=False)
        .values
    )


def topk_mean(s: Array, k: int, library: Library) -> Array:
    """The mean of the `k` largest of every row of `s` [b, m] in `library`; of all that are not hidden, where they are
    fewer: [b]."""
    xp = library.xp
    values = s if k >= s.shape[1] else topk_values(s, k, library)
    is_there = values > -math.inf
    with np.errstate(
        invalid="ignore"
    ):  # of none at all: NaN, which is told where offsets are checked
        return xp.sum(xp.where(is_there, values, 0.0), axis=1) / xp.sum(
            is_there, axis=1
        )


def exponentials(x: Array, library: Library) -> tuple[Array, Array]:
    """exp(x - peak) in the place of `x` [b, m] in `library`, and the peak [b] of each row."""
    xp = library.xp
    # Of a row of which all is hidden the peak is finite, too: -inf less itself would be no number.
    peak = xp.clip(xp.max(x, axis=1), min=float(xp.finfo(x.dtype).min))
    x -= peak[:, None]
    return xp.exp(x, out=x), peak


def log_sum_exp(x: Array, library: Library) -> Array:
    """LSE over the rows of `x` [b, m] in `library`, which is overwritten: [b]. Offsets are checked later for the log of
    0."""
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
    """The mean of the k largest s(b_u, t)."""

    k: int


def reduce(
    similarities: Similarities,
    targets: Vectors,
    reductions: Sequence[LogSum | MeanOfLargest],
    mask: AnswerMask | None = None,
) -> list[np.ndarray]:
    """Reduces the similarities of every target, in one pass over them.

    Args:
        similarities: those of the bank.
        targets: [n, d].
        reductions: at most one of them is a `LogSum`.
        mask: hides answers; by default nothing is hidden.

    Returns:
        The value of each reduction for every target: float64 [n] each.
    """
    log_sum = next(
        (reduction for reduction in reductions if isinstance(reduction, LogSum)), None
    )
    if log_sum is not None and len(reductions) == 1 and (mask is None or mask.largest):
        fused = fuse_log_sum(similarities, targets, log_sum, mask)
        if fused is not None:
            return [fused]
    library, tau = similarities.library, 1.0 if log_sum is None else log_sum.tau
    log_weights = (
        None
        if log_sum is None or log_sum.log_weights is None
        else library.like(log_sum.log_weights)
    )
    # Not in parts: small arrays that stay, between blocks that go, would leave the memory of all blocks in pieces.
    results = [library.empty((targets.rows,), library.accumulator) for _ in reductions]
    for tile in similarities.tiles(targets, "offsets", scale=1 / tau, mask=mask):
        x = tile.s
        for values, reduction in zip(results, reductions, strict=True):
            if isinstance(reduction, MeanOfLargest):
                values[tile.rows] = topk_mean(x, reduction.k, library) * tau
        if log_sum is not None:  # last, since it overwrites the tile
            if log_weights is not None:
                x += log_weights(x)
            results[reductions.index(log_sum)][tile.rows] = log_sum_exp(x, library)
    return [to_host(values).astype(np.float64, copy=False) for values in results]


def has_kernel(similarities: Similarities) -> bool:
    """Return True if the fused kernel serves: unit vectors, on a card it was made for."""
    if not similarities.is_unit or find_spec("triton") is None:
        return False
    device = similarities.library.device
    if device is None or device.type != "cuda":
        return False
    import torch

    if torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] in CAPABILITIES


def fuse_log_sum(
    similarities: Similarities,
    targets: Vectors,
    log_sum: LogSum,
    mask: AnswerMask | None,
) -> np.ndarray | None:
    """Compute a log-sum-exp by one kernel, in which no similarity reaches memory.

    Args:
        similarities, targets, mask: as in `reduce`.
        log_sum: the reduction.

    Returns:
        float64 [n]. None where there is no kernel, or it cannot run: torch serves.
    """
    if not has_kernel(similarities):
        return None
    from hubplugin.compute import kernels

    library = similarities.library
    bank = split(library.to_device(similarities.bank, library.xp.float32))
    weights = log_sum.log_weights
    if weights is None:
        weights = np.zeros(similarities.m)
    bias = library.to_device(weights)
    values = library.empty((targets.rows,), library.xp.float32)
    thresholds = None
    if mask is not None:
        thresholds = library.to_device(similarities.lower(mask.thresholds))
    hub = MOST_ANSWERS * similarities.m
    for start, block in similarities.blocks(targets):
        stop = start + len(block)
        try:
            values[start:stop] = kernels.log_sum_exp(
                split(block), bank, bias, 1 / log_sum.tau, thresholds, hub
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
"""Bank queries, and targets, below which nothing is hidden: too little would remain."""


@dataclass(frozen=True)
class Answers:
    """The answers of a bank in a gallery, as far as similarity tells them.

    thresholds: [m], the similarity of each bank query's nearest target, of gallery and target bank: what reaches it
    counts as an answer, also a target that comes later. weights: [m], 1 over the number of bank queries with the same
    nearest target, so that what was asked for in many paraphrases counts once.
    """

    thresholds: np.ndarray
    weights: np.ndarray

    @staticmethod
    def of(thresholds: np.ndarray, rows: np.ndarray) -> Answers:
        """The answers whose `thresholds` [m] are the similarities of each query's nearest target, and `rows` [m] that
        target's number, as `nearest_targets` gives them."""
        _, place, count = np.unique(rows, return_inverse=True, return_counts=True)
        count[count > MOST_ANSWERS * len(rows)] = (
            1  # a hub, not an answer: the queries that find it ask for others
        )
        return Answers(thresholds, 1.0 / count[place.reshape(-1)])


def nearest_targets(
    similarities: Similarities, columns: Sequence[Vectors]
) -> tuple[np.ndarray, np.ndarray]:
    """The nearest target of every bank row of `similarities` among the targets of all `columns`, in one pass.

    Returns its similarity and its number, counted through all columns, the first of several that are as near (see
    `ANSWER_SLACK`): float64 and int64 [m].
    """
    library, xp, first = similarities.library, similarities.library.xp, 0
    similarity = library.full((similarities.m,), -math.inf)
    rows = library.full((similarities.m,), 0, xp.int64)
    for targets in columns:
        for tile in similarities.tiles(targets, "answers of the bank"):
            highest, start = (
                xp.astype(xp.max(tile.s, axis=0), library.accumulator),
                first + tile.rows.start,
            )
            least = similarities.lower(highest)
            is_nearer = least > similarity
            if library.is_on_cpu:
                nearer = np.flatnonzero(view(is_nearer))  # few, after the first tiles
                view(rows)[nearer] = (
                    view(tile.s)[:, nearer] >= view(least)[nearer]
                ).argmax(axis=0) + start
            else:
                # The first that reaches it, as bytes: of int64 a tile has no room.
                reaches = (tile.s >= least).view(xp.uint8)
                reached = reaches.argmax(dim=0) + start
                rows = xp.where(is_nearer, reached, rows)
            similarity = xp.maximum(similarity, highest)
        first += targets.rows
    return to_host(similarity).astype(np.float64), to_host(rows)


def find_answers(
    similarities: Similarities, columns: Sequence[Vectors]
) -> Answers | None:
    """The answers of the bank of `similarities` among the targets of all `columns`, in one pass; None where bank or
    targets are too few."""
    if min(similarities.m, sum(part.rows for part in columns)) < SMALLEST_LOG:
        return None
    return Answers.of(*nearest_targets(similarities, columns))
