"""Similarities of a bank and targets, tile by tile: all products of matrices.

A tile [targets, bank] is one product; under Euclidean, s = b.t - |b|^2/2 - |t|^2/2.
Every reduction runs along its contiguous rows. A tile is as large as the memory and the
cache allow; nothing of size bank x targets is held unless the memory has room for it.

An answer is no hub. A *log* holds queries that people asked of this very gallery. Each
is near its answer because it was asked for it, not because the answer is a hub, so the
answer's entry says nothing about hubness, and no sum sees it: t is an answer of the
bank query u if s(b_u, t) reaches a threshold of u. The answer may be another target
than the nearest; hiding each target's largest other entry takes care of most of these.
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
"""The largest tile on a CPU, so that the reductions find it in cache. Measured: within
5 % of the best from 4 to 16 MiB on two machines; a tile of 512 MiB is a third
slower."""

TILE_SHARE = 0.2
"""Share of a card's memory for a tile and what is made of it. The rest is for what a
Sinkhorn fit keeps."""

TILE_COPIES = 6
"""Float32 arrays of a tile's size that a card holds at once: peaks counted by
`python -m benchmarks.gpu`."""

UNIT = 1.001
"""The largest length of bank vectors whose products are made of halves."""

FLOAT32_SIMILARITY = 16.0
"""The largest similarity for float32 products, which then lose less than 1e-5. Larger
ones are computed in float64."""

ANSWER_SLACK = 1e-5
"""How far below its threshold a similarity still reaches it, beside the larger of 1 and
the threshold. Products of other shapes, and on other processors, differ by up to 1e-6,
and so do copies of a text that were embedded in other batches. So all copies of an
answer are answers, however they were rounded (docs/speed.md)."""

MOST_ANSWERS = 0.1
"""The largest share of the bank's queries that a target may be the answer of. A target
that is nearest to more of them is a hub, however it came to be one, and keeps its
entries."""


@dataclass(frozen=True)
class Tile:
    """The targets `rows` against every bank row.

    s: [b, m]; its reader may overwrite it, and the next tile does.
    bound: At least every |s|.
    """

    rows: slice
    s: Array
    bound: float


class Similarities:
    """A resident bank [m, d] that answers targets with tiles of `scale * s(b_u, t)`.

    squares: |b_u|^2 [m], about the mean of the bank for distances.
    longest: The largest |b_u|: 1 by cosine, but for what a query map gives.
    is_unit: True if products may be made of halves.
    """

    def __init__(self, bank: np.ndarray, metric: Metric, compute: Compute):
        self.bank = bank
        self.metric = metric
        self.compute = compute
        self.library = compute.library()
        self.m = len(bank)
        self.dim = int(bank.shape[1])
        self._origin: Any = None
        moved = bank
        if metric is Metric.EUCLIDEAN:
            # Far from the origin |b|^2 and |t|^2 would swallow the distance.
            self._origin = bank.mean(axis=0, dtype=np.float64)
            moved = bank - self._origin
        self.squares = np.einsum("jd,jd->j", moved, moved).astype(np.float64)
        self.longest = math.sqrt(self.squares.max())
        self._bank = self.library.matching(moved)
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
            targets: [n, d].
            label: The name of the work, for progress.
            scale: The factor of all similarities.
            answers: The thresholds [m] of answers, which become -inf; but see
                `MOST_ANSWERS`.
            largest: With answers, the largest other entry of each target becomes -inf.
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
                else:  # which have no room for the scale
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
        """Return a bound of |s(b_u, t)| in a block, and |t|^2 for distances."""
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
        """Yield blocks of at most `size` targets on the device, with their first row.

        They are checked, at unit length if the metric is cosine, and moved as the bank
        is. A card finds what cannot be used after all blocks have been read, so that it
        need not wait after each.
        """
        if targets.dim != self.dim:
            raise InputError(
                f"{targets.name} has {targets.dim} dimensions, the bank has {self.dim}; "
                "embed both with one model"
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
        """Yield blocks on a card, and raise in the end if one cannot be used."""
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
                pass  # until it raises an error that names the row
            raise InputError(f"{targets.name} changed while it was read; read it again")

    def lower(self, thresholds: Array) -> Array:
        """Return `thresholds` [m] lowered by their slack, see `ANSWER_SLACK`.

        The result lies where they do, in memory or on the device. By Euclidean distance
        the slack is at least that of |b|^2, b being the row of the bank: rounding |b|^2
        is what makes such a similarity wrong, however near the target is to b.
        """
        floor: Any = 1.0
        if self.metric is Metric.EUCLIDEAN:
            floor = np.maximum(self.squares, 1.0)
            if not isinstance(thresholds, np.ndarray):
                floor = self.library.to_device(floor, thresholds.dtype)
        return thresholds - ANSWER_SLACK * abs(thresholds).clip(floor)

    def tile_rows(self) -> int:
        """Return how many targets a tile holds.

        On a CPU two copies fit the memory and one fits the cache.
        """
        room = int(self.compute.bytes() * TILE_SHARE) // TILE_COPIES
        if self.library.is_on_cpu:
            room = min(self.compute.bytes() // 2, CACHE_BYTES)
        return min(max(room // (self.m * 4), 1), BLOCK_ROWS)

    def _block_rows(self) -> int:
        """Return how many targets are read at a time; on a CPU they fit the cache."""
        if not self.library.is_on_cpu:
            return BLOCK_ROWS
        return min(BLOCK_ROWS, max(CACHE_BYTES // (4 * self.dim), 1))

    def _hide(self, s: Array, thresholds: Array, largest: bool) -> None:
        """Set answers in `s` [b, m] to -inf, then each row's largest; see `tiles`."""
        most = MOST_ANSWERS * self.m
        if not self.library.is_on_cpu:  # a card would have to wait for their number
            answers = s >= thresholds
            answers &= answers.sum(dim=1, keepdim=True) <= most
            s.masked_fill_(answers, -math.inf)
            if largest:
                s.scatter_(1, s.argmax(dim=1, keepdim=True), -math.inf)
            return
        s = view(s)
        thresholds = view(thresholds)
        reached = np.flatnonzero(s.max(axis=0) >= thresholds)  # few columns are
        rows, columns = np.nonzero(s[:, reached] >= thresholds[reached])
        is_answer = np.bincount(rows, minlength=len(s))[rows] <= most
        s[rows[is_answer], reached[columns[is_answer]]] = -math.inf
        if largest:
            np.put_along_axis(s, s.argmax(axis=1)[:, None], -math.inf, axis=1)


def dense(similarities: Similarities, targets: Vectors) -> np.ndarray:
    """Return s(b_u, t) of every bank row and target at once: float64 [m, n]."""
    whole = np.empty((similarities.m, targets.rows))
    for tile in similarities.tiles(targets, "comparing queries with targets"):
        whole[:, tile.rows] = to_host(tile.s).T
    return whole
