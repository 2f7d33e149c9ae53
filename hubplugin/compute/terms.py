"""What is summed over a bank for each target: log-sum-exp, mean of the k largest, dot product; counts; limits.

Each is a task over some targets by themselves, so that a gallery in shards is reduced shard by shard.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from hubplugin.compute.largest import largest_values
from hubplugin.compute.similarities import (
    LeftOut,
    Similarities,
    Tile,
    around_zero,
    copy_of,
    exponentials_of,
    host,
    like,
    module_of,
)
from hubplugin.vectors import Spread, Vectors

ShardResult: TypeAlias = dict[str, np.ndarray]
"""What a task found, by name: sums, or a row a target."""


class Task(ABC):
    """A pure function of a shard: done again, anywhere, it finds the same. A frozen dataclass of numbers, texts, arrays
    and others of its kind, which says all that the result depends on but the bank and the shard."""

    what: str
    """The work, for progress."""

    @abstractmethod
    def __call__(self, similarities: Similarities, targets: Vectors) -> ShardResult:
        """Of all of `targets`."""


def over(similarities: Similarities, targets: Vectors, task: Task) -> list[tuple[int, ShardResult]]:
    """What `task` finds in each shard of `targets`, behind the number of its first target. Targets that lie in one
    place are one shard."""
    if isinstance(targets, Spread):
        return targets.each(task, similarities)
    return [(0, task(similarities, targets))]


@dataclass(frozen=True)
class LogSum:
    """LSE_u( s(b_u, t)/tau + log_weights_u ); log_weights [m], 0 where None."""

    tau: float
    log_weights: np.ndarray | None = None

    @property
    def weights(self) -> np.ndarray | None:
        return None if self.log_weights is None else np.asarray(self.log_weights, np.float64)

    def of_exponents(self, tile: Tile) -> np.ndarray:
        """Of a tile of s/tau + log_weights, which is overwritten with what is summed: float64 [b]."""
        exponentials, peak = exponentials_of(tile)
        with np.errstate(divide="ignore"):  # a sum of 0 is told where offsets are checked
            sums: np.ndarray = np.log(host(exponentials.sum(1))) + host(peak) + host(tile.own)
        return sums

    def of(self, tile: Tile) -> np.ndarray:
        """Of a tile of s, which is overwritten with what is summed: float64 [b]."""
        bias, middle, largest = around_zero(np.zeros(tile.s.shape[1]) if self.weights is None else self.weights)
        module, s = module_of(tile.s), tile.s
        module.add(module.multiply(s, 1 / self.tau, out=s), like(bias, s), out=s)
        own, bound = tile.own / self.tau + middle, tile.bound / self.tau + largest
        return self.of_exponents(replace(tile, own=own, bound=bound))


@dataclass(frozen=True)
class MeanOfLargest:
    """Mean of the k largest s(b_u, t); of all that are not left out, where they are fewer."""

    k: int

    def of(self, tile: Tile) -> np.ndarray:
        """Of a tile of s, in which nothing changes: float64 [b]."""
        values = tile.s if self.k >= tile.s.shape[1] else largest_values(tile.s, self.k)
        there = values > -math.inf
        with np.errstate(invalid="ignore"):  # of none at all: NaN, which is told where offsets are checked
            mean: np.ndarray = host(module_of(values).where(there, values, 0.0).sum(1)) / host(there.sum(1))
        mean += host(tile.own)
        return mean


def reduce(
    similarities: Similarities,
    targets: Vectors,
    reductions: Sequence[LogSum | MeanOfLargest],
    left_out: LeftOut | None = None,
) -> list[np.ndarray]:
    """The value of each of `reductions` for every target, in one pass over the similarities: float64 [n] each."""
    names = [str(i) for i in range(len(reductions))]
    return _joined(similarities, targets, ReducedShard(tuple(reductions), left_out), names)


def _joined(similarities: Similarities, targets: Vectors, task: Task, names: Sequence[str]) -> list[np.ndarray]:
    """What `task` finds under each of `names`, of all targets; without a copy where they are one shard."""
    parts = [found for _, found in over(similarities, targets, task)]
    return [parts[0][name] if len(parts) == 1 else np.concatenate([part[name] for part in parts]) for name in names]


@dataclass(frozen=True)
class ReducedShard(Task):
    """`reduce`, the value of each reduction under its number."""

    reductions: tuple[LogSum | MeanOfLargest, ...]
    left_out: LeftOut | None
    what: str = "offsets"

    def __call__(self, similarities: Similarities, targets: Vectors) -> ShardResult:
        reductions, results = self.reductions, [np.empty(targets.rows) for _ in self.reductions]
        only = reductions[0]
        if len(reductions) == 1 and isinstance(only, LogSum):  # the product itself can scale and add
            for tile in similarities.tiles(
                targets, self.what, scale=1 / only.tau, weights=only.weights, left_out=self.left_out
            ):
                results[0][tile.start : tile.stop] = only.of_exponents(tile)
            return {"0": results[0]}
        # What overwrites its tile comes last.
        order = sorted(range(len(reductions)), key=lambda i: isinstance(reductions[i], LogSum))
        for tile in similarities.tiles(targets, self.what, left_out=self.left_out):
            for i in order:
                whole = i == order[-1] or isinstance(reductions[i], MeanOfLargest)
                part = tile if whole else replace(tile, s=copy_of(tile.s))
                results[i][tile.start : tile.stop] = reductions[i].of(part)
        return {str(i): result for i, result in enumerate(results)}


def dot(similarities: Similarities, targets: Vectors) -> np.ndarray:
    """s(v, t) for every target, where the bank is the one vector v: float64 [n]."""
    return _joined(similarities, targets, _DotOfShard(), ["dot"])[0]


@dataclass(frozen=True)
class _DotOfShard(Task):
    what: str = "offsets"

    def __call__(self, similarities: Similarities, targets: Vectors) -> ShardResult:
        result = np.empty(targets.rows)
        for tile in similarities.tiles(targets, self.what):
            result[tile.start : tile.stop] = host(tile.s[:, 0]) + host(tile.own)
        return {"dot": result}


def kth_largest(similarities: Similarities, targets: Vectors, k: int) -> np.ndarray:
    """The k-th largest s(b_u, t) over the targets for every bank row, k <= n: float64 [m]."""
    highest = np.empty((0, similarities.m))
    for tile in similarities.tiles(targets, "activation set"):
        both = np.concatenate([highest, host(tile.s) + host(tile.own)[:, None]])
        highest = np.partition(both, max(len(both) - k, 0), axis=0)[max(len(both) - k, 0) :]
    lowest: np.ndarray = highest.min(axis=0)
    return lowest


def reaches(similarities: Similarities, targets: Vectors, thresholds: np.ndarray) -> np.ndarray:
    """Whether s(b_u, t) is at least `thresholds` [m] for some bank row, to float32 rounding: bool [n]."""
    levels = np.asarray(thresholds, np.float64)
    slack = 1e-6 * max(1.0, float(np.abs(levels).max()))
    result = np.empty(targets.rows, bool)
    for tile in similarities.tiles(targets, "activation set", weights=-levels):
        result[tile.start : tile.stop] = host(module_of(tile.s).amax(tile.s, 1)) + host(tile.own) >= -slack
    return result


def count_larger(similarities: Similarities, targets: Vectors, levels: np.ndarray) -> np.ndarray:
    """How many of s(b_1, t) ... s(b_m, t) are larger than `levels` [c, n], for every target: int64 [c, n]."""
    result = np.empty(levels.shape, np.int64)
    for tile in similarities.tiles(targets, "ranks in the bank"):
        part = slice(tile.start, tile.stop)
        for level, counts in zip(levels[:, part] - host(tile.own), result[:, part], strict=True):
            counts[:] = host((tile.s > like(level, tile.s)[:, None]).sum(1))
    return result
