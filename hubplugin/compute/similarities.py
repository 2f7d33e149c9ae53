"""Compute the similarities of a bank and targets, tile by tile.

A tile [targets, bank] is one matrix product; for Euclidean distance, s = b.t - |b|^2/2
- |t|^2/2. Every reduction runs along the contiguous rows of a tile. A tile is as large
as memory and cache allow; nothing of size bank x targets is held unless memory has room
for it.

An answer is not a hub. A *log* holds queries that people asked of this very gallery.
Each query is near its answer because it asks for it, not because the answer is a hub.
The entry of an answer therefore says nothing about hubness, and all sums leave it out:
t is an answer of the bank query u if s(b_u, t) reaches a threshold of u. The true
answer may be a target other than the nearest. Hiding each target's largest other entry
covers most of these cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hubplugin.compute.device import (
    Array,
    Compute,
    Library,
    bank_halves,
    multiply,
    multiply_halves,
    to_host,
)
from hubplugin.errors import InputError
from hubplugin.metric import Metric, unit_length
from hubplugin.vectors import BLOCK_NUMBERS, BLOCK_ROWS, Vectors

CACHE_BYTES = 8 << 20
"""The largest tile on a CPU, so that the reductions find it in the cache. Tiles of 4 to
16 MiB are within 5 % of the best on two machines; a tile of 512 MiB is a third
slower."""

TILE_SHARE = 0.2
"""Share of a GPU's memory for a tile and the arrays computed from it. The rest is for
the arrays that a Sinkhorn fit keeps."""

TILE_COPIES = 6
"""Float32 arrays of a tile's size that a GPU holds at once, according to the peaks that
`python -m benchmarks.gpu` counts."""

KEPT_SHARE = 0.8
"""Share of the memory for the arrays that a Sinkhorn fit keeps. The rest is for the
sample, blocks of targets and tiles."""

UNIT = 1.001
"""The largest length of bank vectors whose products are computed in halves."""

FLOAT32_SIMILARITY = 16.0
"""The largest similarity that is computed in float32, with an error below 1e-5. Larger
similarities are computed in float64."""

ANSWER_SLACK = 1e-5
"""How far below a threshold a similarity still reaches it, relative to the larger of 1
and the threshold. Products of other shapes, or on other processors, differ by up to
1e-6, and so do copies of a text that were embedded in other batches. With the slack,
all copies of an answer are answers, however they were rounded (docs/speed.md)."""

MOST_ANSWERS = 0.1
"""The largest share of the bank's queries that one target may answer. A target that is
nearest to more of them is a hub, whatever made it one, and keeps its entries."""


@dataclass(frozen=True)
class Tile:
    """The similarities of the targets `rows` and every bank row.

    s: The similarities [b, m]. A reader may overwrite them, and the next tile does.
    bound: A bound that no |s| exceeds.
    """

    rows: slice
    s: Array
    bound: float


class Similarities:
    """A bank [m, d] in memory that yields tiles of `scale * s(b_u, t)` for targets.

    tile_rows: The number of targets in a tile. On a CPU, two tiles fit in memory, and
        one fits in the cache.
    squares: |b_u|^2 [m]; for Euclidean distance, b_u is taken from the bank's mean.
    longest: The largest |b_u|: 1 by cosine, unless a query map changed the lengths.
    may_use_halves: True if products may be computed in half precision.
    keeps_products: True if the next search for answers is to keep its products.
    products: These products [n, m], float32; None if they were not kept.
    products_bound: A bound that none of them exceeds.
    """

    def __init__(self, bank: np.ndarray, metric: Metric, compute: Compute):
        self.bank = bank
        self.metric = metric
        self.compute = compute
        self.library = Library(compute)
        self.m = len(bank)
        self.dim = int(bank.shape[1])
        if self.library.is_on_cpu:
            tile_bytes = min(compute.bytes() // 2, CACHE_BYTES)
            block_rows = min(BLOCK_ROWS, BLOCK_NUMBERS // self.dim)
        else:
            tile_bytes = int(compute.bytes() * TILE_SHARE) // TILE_COPIES
            block_rows = BLOCK_ROWS
        self.tile_rows = min(max(tile_bytes // (self.m * 4), 1), BLOCK_ROWS)
        # Targets are read in blocks, and each block is compared tile by tile: round a
        # block down to whole tiles, but at least one.
        self._block_rows = max(block_rows // self.tile_rows, 1) * self.tile_rows
        self._origin: Any = None
        self._shifted = bank
        if metric is Metric.EUCLIDEAN:
            # Far from the origin, rounding of |b|^2 and |t|^2 would hide the distance.
            self._origin = bank.mean(axis=0, dtype=np.float64)
            self._shifted = bank - self._origin
        squares = np.einsum("jd,jd->j", self._shifted, self._shifted)
        self.squares = squares.astype(np.float64)
        self.longest = math.sqrt(self.squares.max())
        self._banks: dict[Any, Array] = {}  # the shifted bank on the device, by dtype
        self._bias = self.library.to_device(-self.squares / 2)
        # Larger products are computed in float64, if the device has it.
        if not self.library.has_float64:
            self.largest_float32 = math.inf
        elif compute.precision == "auto":
            self.largest_float32 = FLOAT32_SIMILARITY
        else:
            self.largest_float32 = 0.0
        has_unit_length = metric is Metric.COSINE and self.longest <= UNIT
        self.may_use_halves = has_unit_length and compute.precision == "auto"
        self.keeps_products = False
        self.products: Array = None
        self.products_bound = 0.0

    def make_room(self, count: int) -> Array:
        """Return memory for the products with `count` targets: float32 [count, m].

        Return None if the products are not to be kept, or if there is too little memory.
        """
        has_room = 4 * count * self.m <= KEPT_SHARE * self.compute.bytes()
        if not (self.keeps_products and self.largest_float32 and has_room):
            return None
        return self.library.empty((count, self.m), self.library.xp.float32)

    def tiles(
        self, targets: Vectors, label: str, *, scale: float = 1.0, out: Array = None
    ) -> Iterator[Tile]:
        """Yield tiles over all targets, in order.

        Args:
            targets: The targets [n, d].
            label: The name of this step in progress reports.
            scale: The factor of all similarities.
            out: Float32 memory [n, m] for all tiles. By default, each tile overwrites
                the one before. A float64 tile always does so.
        """
        library = self.library
        xp = library.xp
        progress = self.compute.progress
        is_euclidean = self.metric is Metric.EUCLIDEAN
        height = min(self.tile_rows, targets.rows)
        halves = None
        if self.may_use_halves and library.multiplies_halves:
            halves = bank_halves(library.to_device(self.bank, xp.float32))
        tile_memory: dict[Any, Array] = {}
        for start, block in self.blocks(targets, self._block_rows):
            bound = self.longest  # becomes a bound of |b.t|
            if is_euclidean:
                exact = xp.astype(block, library.accumulator)
                squares = xp.sum(exact * exact, axis=1)
                # This bound also holds for |b|^2/2 + |t|^2/2.
                bound = max(bound**2, float(xp.max(squares)))
            elif self.metric is Metric.DOT:
                with np.errstate(over="ignore"):
                    length = float(xp.max(xp.linalg.vector_norm(block, axis=1)))
                if not 1e-15 < length < math.inf:  # beyond the squares of float32
                    exact = xp.astype(block, library.accumulator)
                    length = float(xp.max(xp.linalg.vector_norm(exact, axis=1)))
                bound *= length
            dtype = xp.float32
            if bound > self.largest_float32:
                dtype = xp.float64
            if dtype not in self._banks:
                self._banks[dtype] = library.to_device(self._shifted, dtype)
            bound *= abs(scale)
            if is_euclidean:
                bound *= 2  # of the sum of both
                bank_bias = xp.astype(self._bias, dtype) * scale
                bias = xp.astype(squares * (-scale / 2), dtype)[:, None]
            if halves is None:
                block = xp.astype(block, dtype, copy=False) * scale
            for first in range(0, len(block), height):
                part = block[first : first + height]
                rows = slice(start + first, start + first + len(part))
                if out is not None and dtype == xp.float32:
                    s = out[rows]
                else:
                    if dtype not in tile_memory:
                        tile_memory[dtype] = library.empty((height, self.m), dtype)
                    s = tile_memory[dtype][: len(part)]
                if halves is None:
                    multiply(part, self._banks[dtype].T, s)
                else:  # the range of halves has no room for the scale
                    multiply_halves(part, halves, s)
                    s *= scale
                if is_euclidean:
                    s += bank_bias
                    s += bias[first : first + height]
                yield Tile(rows, s, bound)
                if progress is not None:
                    progress(label, rows.stop, targets.rows)

    def scale_tiles(self, products: Array, scale: float) -> Iterator[Tile]:
        """Yield tiles of products [n, m] that are in memory, scaled in place."""
        for start in range(0, len(products), self.tile_rows):
            rows = slice(start, min(start + self.tile_rows, len(products)))
            s = products[rows]
            s *= scale
            yield Tile(rows, s, self.products_bound * abs(scale))

    def blocks(
        self, targets: Vectors, size: int = BLOCK_ROWS
    ) -> Iterator[tuple[int, Array]]:
        """Yield the first row of each block of up to `size` targets, and the block.

        Blocks are validated, normalised for cosine, and shifted by the bank's mean for
        Euclidean distance. On a GPU, invalid vectors are reported only after the last
        block, to avoid a synchronisation after each one.
        """
        if targets.dim != self.dim:
            raise InputError(
                f"{targets.name} has {targets.dim} dimensions, the bank has {self.dim}; "
                "embed both with the same model"
            )
        if self.library.is_on_cpu:
            checked = targets.blocks(size, self.metric)
            blocks: Iterator[Array] = map(self.library.to_device, checked)
        else:
            blocks = self._upload(targets, size)
        start = 0
        for block in blocks:
            if self._origin is not None:
                origin = self.library.to_device(self._origin)
                block = self.library.xp.astype(block, origin.dtype) - origin
            yield start, block
            start += len(block)

    def _upload(self, targets: Vectors, size: int) -> Iterator[Array]:
        """Yield blocks on a GPU, and raise after the last one if any is invalid."""
        library = self.library
        xp = library.xp
        is_broken = xp.zeros((), dtype=xp.bool, device=library.device)
        for block in library.upload(targets.shaped_blocks(size), size, self.dim):
            if self.metric is Metric.COSINE:
                block, lengths = unit_length(xp, block)
                is_usable = xp.isfinite(lengths) & (lengths > 0)
            else:
                is_usable = xp.isfinite(block)
            is_broken |= ~xp.all(is_usable)
            yield block
        if bool(to_host(is_broken)):
            for _ in targets.blocks(size, self.metric):
                pass  # raises an error that names the row
            raise InputError(f"{targets.name} changed while it was read; read it again")

    def lower(self, thresholds: Array) -> Array:
        """Return `thresholds` [m] lowered by the slack, see `ANSWER_SLACK`.

        The result is in memory or on the device, like `thresholds`. For Euclidean
        distance, the slack is at least that of |b|^2, where b is the bank row: rounding
        |b|^2 makes such a similarity wrong, however near the target is to b.
        """
        floor: Any = 1.0
        if self.metric is Metric.EUCLIDEAN:
            floor = np.maximum(self.squares, 1.0)
            if not isinstance(thresholds, np.ndarray):
                floor = self.library.to_device(floor, thresholds.dtype)
        return thresholds - ANSWER_SLACK * abs(thresholds).clip(floor)

    def hide(self, s: Array, thresholds: Array, largest: bool = True) -> None:
        """Set the entries of answers to -inf.

        A target that reaches the thresholds of more than `MOST_ANSWERS` of the bank is
        a hub, and keeps its entries.

        Args:
            s: The scaled similarities of a tile [b, m].
            thresholds: The scaled similarity from which an entry is an answer, [m].
            largest: Also set the largest other entry of each row to -inf.
        """
        most_answers = MOST_ANSWERS * self.m
        thresholds = self.library.xp.astype(thresholds, s.dtype, copy=False)
        if not self.library.is_on_cpu:  # counting the answers would make a GPU wait
            is_answer = s >= thresholds
            is_answer &= is_answer.sum(dim=1, keepdim=True) <= most_answers
            s.masked_fill_(is_answer, -math.inf)
            if largest:
                s.scatter_(1, s.argmax(dim=1, keepdim=True), -math.inf)
            return
        s = to_host(s)
        thresholds = to_host(thresholds)
        reached = np.flatnonzero(s.max(axis=0) >= thresholds)  # usually few columns
        rows, columns = np.nonzero(s[:, reached] >= thresholds[reached])
        is_answer = np.bincount(rows, minlength=len(s))[rows] <= most_answers
        s[rows[is_answer], reached[columns[is_answer]]] = -math.inf
        if largest:
            np.put_along_axis(s, s.argmax(axis=1)[:, None], -math.inf, axis=1)


def dense(similarities: Similarities, targets: Vectors) -> np.ndarray:
    """Return s(b_u, t) of every bank row and target as one matrix: float64 [m, n]."""
    matrix = np.empty((similarities.m, targets.rows))
    for tile in similarities.tiles(targets, "comparing queries with targets"):
        matrix[:, tile.rows] = to_host(tile.s).T
    return matrix
