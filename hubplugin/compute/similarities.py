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
    bank_halves,
    multiplies_halves,
    multiply,
    multiply_halves,
    to_host,
    view,
)
from hubplugin.errors import InputError
from hubplugin.metric import Metric, unit_length
from hubplugin.vectors import BLOCK_ROWS, Vectors, prepare_blocks

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

UNIT = 1.001
"""The largest length of bank vectors whose products are computed in halves."""

FLOAT32_SIMILARITY = 16.0
"""The largest similarity that is computed in float32, with an error below 1e-5. Larger
ones are computed in float64."""

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

    squares: |b_u|^2 [m]; for Euclidean distance, b_u is taken from the bank's mean.
    longest: The largest |b_u|: 1 by cosine, unless a query map changed the lengths.
    is_unit: True if products may be computed in halves.
    """

    def __init__(self, bank: np.ndarray, metric: Metric, compute: Compute):
        self.bank = bank
        self.metric = metric
        self.compute = compute
        self.library = compute.library()
        self.m = len(bank)
        self.dim = int(bank.shape[1])
        self._origin: Any = None
        shifted = bank
        if metric is Metric.EUCLIDEAN:
            # Far from the origin, rounding of |b|^2 and |t|^2 would hide the distance.
            self._origin = bank.mean(axis=0, dtype=np.float64)
            shifted = bank - self._origin
        self.squares = np.einsum("jd,jd->j", shifted, shifted).astype(np.float64)
        self.longest = math.sqrt(self.squares.max())
        self._bank = self.library.matching(shifted)
        self._bias = self.library.matching(-self.squares / 2)
        is_short = metric is Metric.COSINE and self.longest <= UNIT
        self.is_unit = is_short and compute.precision == "auto"

    def tiles(
        self,
        targets: Vectors,
        label: str,
        *,
        scale: float = 1.0,
        answers: np.ndarray | None = None,
        largest: bool = True,
    ) -> Iterator[Tile]:
        """Yield tiles over all targets, in order.

        Args:
            targets: The targets [n, d].
            label: The name of this step in progress reports.
            scale: The factor of all similarities.
            answers: The thresholds [m] of answers, which are set to -inf, except as
                `MOST_ANSWERS` says.
            largest: If `answers` are given, also set the largest other entry of each
                target to -inf.
        """
        library = self.library
        xp = library.xp
        height = min(self.tile_rows(), targets.rows)
        if answers is not None:
            thresholds = library.matching(scale * self.lower(answers))
        halves = None
        if self.is_unit and multiplies_halves(library.device):
            halves = bank_halves(self._bank(library.empty((0,), xp.float32)))
        outs: dict[Any, Array] = {}
        size = max(height, self._block_rows() // height * height)
        for start, block in self.blocks(targets, size):
            bound, squares = self._measure(block)
            is_double = bound > FLOAT32_SIMILARITY or self.compute.precision != "auto"
            dtype = xp.float32
            if is_double and library.has_float64:
                dtype = xp.float64
            bound *= abs(scale)
            if squares is not None:
                bound *= 2
                bias = squares * (-scale / 2)
            if dtype not in outs:
                outs[dtype] = library.empty((height, self.m), dtype)
            if halves is None:
                block = xp.astype(block, dtype, copy=False) * scale
            for first in range(0, len(block), height):
                part = block[first : first + height]
                out = outs[dtype][: len(part)]
                if halves is None:
                    s = multiply(part, self._bank(out).T, out)
                else:  # halves have no room for the scale
                    s = multiply_halves(part, halves, out)
                    s *= scale
                if squares is not None:
                    s += self._bias(s) * scale
                    s += xp.astype(bias[first : first + height], dtype)[:, None]
                if answers is not None:
                    self._hide(s, thresholds(s), largest)
                stop = start + first + len(s)
                yield Tile(slice(start + first, stop), s, bound)
                self.compute.report(label, stop, targets.rows)

    def _measure(self, block: Array) -> tuple[float, Array | None]:
        """Return a bound of |s(b_u, t)| in a block, and |t|^2 if distance needs it."""
        if self.metric is Metric.COSINE:
            return self.longest, None
        exact = self.library.xp.astype(block, self.library.accumulator)
        squares = self.library.xp.sum(exact * exact, axis=1)
        length = math.sqrt(float(self.library.xp.max(squares)))
        if self.metric is Metric.EUCLIDEAN:
            return max(self.longest, length) ** 2, squares
        return self.longest * length, None

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
            checked = prepare_blocks(targets, self.metric, size)
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
        is_broken = library.full((), False, xp.bool)
        for block in library.upload(targets.shaped_blocks(size), size, self.dim):
            if self.metric is Metric.COSINE:
                block, lengths = unit_length(xp, block)
                is_usable = xp.isfinite(lengths) & (lengths > 0)
            else:
                is_usable = xp.isfinite(block)
            is_broken |= ~xp.all(is_usable)
            yield block
        if bool(to_host(is_broken)):
            for _ in prepare_blocks(targets, self.metric, size):
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

    def tile_rows(self) -> int:
        """Return how many targets a tile holds.

        On a CPU, two copies of a tile fit in memory, and one fits in the cache.
        """
        room = int(self.compute.bytes() * TILE_SHARE) // TILE_COPIES
        if self.library.is_on_cpu:
            room = min(self.compute.bytes() // 2, CACHE_BYTES)
        return min(max(room // (self.m * 4), 1), BLOCK_ROWS)

    def _block_rows(self) -> int:
        """Return how many targets to read at a time; on a CPU, they fit the cache."""
        if not self.library.is_on_cpu:
            return BLOCK_ROWS
        return min(BLOCK_ROWS, max(CACHE_BYTES // (4 * self.dim), 1))

    def _hide(self, s: Array, thresholds: Array, largest: bool) -> None:
        """Set answers in `s` [b, m] to -inf, then each row's largest; see `tiles`."""
        most = MOST_ANSWERS * self.m
        if not self.library.is_on_cpu:  # counting the answers would make a GPU wait
            answers = s >= thresholds
            answers &= answers.sum(dim=1, keepdim=True) <= most
            s.masked_fill_(answers, -math.inf)
            if largest:
                s.scatter_(1, s.argmax(dim=1, keepdim=True), -math.inf)
            return
        s = view(s)
        thresholds = view(thresholds)
        reached = np.flatnonzero(s.max(axis=0) >= thresholds)  # usually few columns
        rows, columns = np.nonzero(s[:, reached] >= thresholds[reached])
        is_answer = np.bincount(rows, minlength=len(s))[rows] <= most
        s[rows[is_answer], reached[columns[is_answer]]] = -math.inf
        if largest:
            np.put_along_axis(s, s.argmax(axis=1)[:, None], -math.inf, axis=1)


def dense(similarities: Similarities, targets: Vectors) -> np.ndarray:
    """Return s(b_u, t) of every bank row and target as one matrix: float64 [m, n]."""
    matrix = np.empty((similarities.m, targets.rows))
    for tile in similarities.tiles(targets, "comparing queries with targets"):
        matrix[:, tile.rows] = to_host(tile.s).T
    return matrix
