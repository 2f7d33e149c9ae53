"""Similarities of a bank and targets, tile by tile: the one place that multiplies matrices.

A tile [targets, bank] is one product; under Euclidean, s = b.t - |b|^2/2 - |t|^2/2. Every reduction runs along its
contiguous rows. A tile is as large as the memory budget and the cache allow; nothing of size bank x targets is held
unless the budget has room for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hubplugin.compute.device import Array, Compute, host, multiply
from hubplugin.errors import InputError
from hubplugin.metric import Metric, unit_length
from hubplugin.vectors import BLOCK_ROWS, Vectors, prepare_blocks

CACHE_BYTES = 8 << 20
"""On a CPU a tile is at most this large, so that the reductions find it in cache. Measured: within 5 %
of the best from 4 to 16 MiB on two machines; a tile of 512 MiB is a third slower."""

FLOAT32_SIMILARITY = 16.0
"""Similarities up to this size lose less than 1e-5 in a float32 product; larger ones are done in float64."""

ANSWER_SLACK = 1e-5
"""By how much a similarity may lie below a level and still count as at it, beside the larger of 1 and the level.
Products of other shapes, and on other processors, differ by up to 1e-6, and so do copies of a text that were embedded
in other batches. So all copies of an answer are answers, however they were rounded (docs/speed.md)."""


@dataclass(frozen=True)
class Tile:
    """Targets [start, start + b) against every bank row: `s` [b, m], which whoever holds it may overwrite and the next
    tile does. `bound` is at least every |s|."""

    start: int
    s: Array
    bound: float

    @property
    def stop(self) -> int:
        return self.start + len(self.s)


class Similarities:
    """A resident bank [m, d] that answers targets with tiles of `scale * s(b_u, t)`."""

    def __init__(self, bank: np.ndarray, metric: Metric, compute: Compute):
        self.bank, self.metric, self.compute = bank, metric, compute
        self.library = compute.library()
        self.m, self.dim = len(bank), int(bank.shape[1])
        # Far from the origin |b|^2 and |t|^2 swallow the distance; it stays what it is when both are moved there.
        self._origin = bank.mean(axis=0, dtype=np.float64) if metric is Metric.EUCLIDEAN else None
        self._source = bank if self._origin is None else bank - self._origin
        # But for distances they are bounds alone, for which float32 sums will do.
        of = np.float64 if metric is Metric.EUCLIDEAN else None
        self.squares = np.asarray(np.einsum("jd,jd->j", self._source, self._source, dtype=of), np.float64)
        self.longest = math.sqrt(self.squares.max())  # by cosine 1, but for what a query map gives
        self._banks: dict[bool, tuple[Array, Array | None]] = {}

    def tiles(self, targets: Vectors, what: str, *, scale: float = 1.0) -> Iterator[Tile]:
        """Tiles over all of `targets`, in order."""
        height = min(self.tile_rows(), targets.rows)
        outs: dict[bool, Array] = {}
        for start, block in self.blocks(targets, max(height, BLOCK_ROWS // height * height)):
            size, own = self.longest, None
            if self.metric is not Metric.COSINE:
                xp, exact = self.library.xp, self.library.xp.astype(block, self.library.accumulator)
                squares = xp.sum(exact * exact, axis=1)
                longest = math.sqrt(float(xp.max(squares)))
                size = self.longest * longest
                if self.metric is Metric.EUCLIDEAN:
                    size, own = max(self.longest, longest) ** 2, squares * (-scale / 2)
            wide = self._needs_float64(size)
            bank, of_bank = self._bank(wide)
            dtype = bank.dtype
            if wide not in outs:
                outs[wide] = self.library.empty((height, self.m), dtype)
            block = self.library.xp.astype(block, dtype, copy=False) * scale
            for first in range(0, len(block), height):
                part = block[first : first + height]
                s = multiply(part, bank.T, outs[wide][: len(part)])
                if own is not None and of_bank is not None:
                    s += of_bank * scale
                    s += self.library.xp.astype(own[first : first + height], dtype)[:, None]
                yield Tile(start + first, s, size * abs(scale) * (2 if own is not None else 1))
                self.compute.report(what, start + first + len(part), targets.rows)

    def blocks(self, targets: Vectors, size: int = BLOCK_ROWS) -> Iterator[tuple[int, Array]]:
        """Checked blocks of `targets` on the device, with the number of the first row: at unit length where the metric
        is cosine, and moved as the bank is.

        What cannot be used is found on a card after all have been read, so that it need not wait after each.
        """
        if targets.dim != self.dim:
            raise InputError(
                f"{targets.name} has {targets.dim} dimensions, the bank has {self.dim}; embed both with one model"
            )
        library, start = self.library, 0
        xp, origin = library.xp, None
        if self._origin is not None:
            origin = library.put(self._origin)
        if library.on_cpu:
            for block in prepare_blocks(targets, self.metric, size):
                moved = block if origin is None else block - self._origin
                yield start, library.put(moved)
                start += len(block)
            return
        broken = library.zeros((), xp.bool)
        for block in library.uploaded(targets.raw_blocks(size), size, self.dim):
            if self.metric is Metric.COSINE:
                block, lengths = unit_length(xp, block)
                broken |= ~xp.all(xp.isfinite(lengths) & (lengths > 0))
            else:
                broken |= ~xp.all(xp.isfinite(block))
            yield start, block if origin is None else xp.astype(block, origin.dtype) - origin
            start += len(block)
        if bool(host(broken)):
            for _ in prepare_blocks(targets, self.metric, size):  # which names the row
                pass

    def reached(self, levels: Array) -> Array:
        """The similarities [m] from which on an entry counts as at its level [m], here or on the device: see
        `ANSWER_SLACK`. A Euclidean entry is off by what |b|^2 loses, however near the target is to the bank row b."""
        xp, smallest = np if isinstance(levels, np.ndarray) else self.library.xp, np.ones(self.m)
        if self.metric is Metric.EUCLIDEAN:
            smallest = np.maximum(smallest, self.squares)
        if not isinstance(levels, np.ndarray):
            smallest = self.library.put(smallest, levels.dtype)
        return levels - ANSWER_SLACK * xp.maximum(xp.abs(levels), smallest)

    def tile_rows(self) -> int:
        """How many targets a tile holds: two copies of it fit the budget, and on a CPU one fits the cache."""
        budget = self.compute.bytes() // 2
        if self.library.on_cpu:
            budget = min(budget, CACHE_BYTES)
        return int(min(max(budget // (self.m * 4), 1), BLOCK_ROWS))

    def _needs_float64(self, size: float) -> bool:
        wide = size > FLOAT32_SIMILARITY or self.compute.precision == "float64"
        return wide and self.library.has_float64

    def _bank(self, wide: bool) -> tuple[Array, Array | None]:
        """The bank on the device, and -|b|^2/2 under Euclidean."""
        if wide not in self._banks:
            dtype = self.library.xp.float64 if wide else self.library.xp.float32
            own = self.library.put(-self.squares / 2, dtype) if self.metric is Metric.EUCLIDEAN else None
            self._banks[wide] = self.library.put(self._source, dtype), own
        return self._banks[wide]


def dense(similarities: Similarities, targets: Vectors) -> np.ndarray:
    """s(b_u, t) of every bank row and target: float64 [m, n], for sets that fit in memory."""
    parts = [host(tile.s).astype(np.float64) for tile in similarities.tiles(targets, "similarities")]
    whole: np.ndarray = np.concatenate(parts).T
    return whole
