"""Similarities of a bank and targets, tile by tile: the one place that multiplies matrices.

A tile [targets, bank] is one product; under Euclidean, s = b.t - |b|^2/2 - |t|^2/2. Every reduction runs along its
contiguous rows. A tile is as large as the memory budget and the cache allow; nothing of size bank x targets is held
unless the budget has room for it.

An answer is no hub. A *log* holds queries that people asked of this very gallery. Each is near its answer because it
was asked for it, not because the answer is a hub, so the answer's entry says nothing about hubness: an `AnswerMask`
hides it from the sums. Where the answer is another target than the nearest, hiding each target's largest entry takes
care of most of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from hubplugin.compute.device import (
    Array,
    Compute,
    beside,
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
"""On a CPU a tile is at most this large, so that the reductions find it in cache. Measured: within 5 %
of the best from 4 to 16 MiB on two machines; a tile of 512 MiB is a third slower."""

TILE_SHARE = 0.2
"""Of the memory of a card, for a tile and what is made of it: the rest is for what a
Sinkhorn fit keeps."""

TILE_COPIES = 6
"""Arrays of the size of a tile in float32 that a card holds at once: peaks counted by
`python -m benchmarks.gpu`."""

UNIT = 1.001
"""The largest length of bank vectors whose products are made of halves."""

FLOAT32_SIMILARITY = 16.0
"""Similarities up to this size lose less than 1e-5 in a float32 product; larger ones are done in float64."""

ANSWER_SLACK = 1e-5
"""By how much a similarity may lie below a threshold and still reach it, beside the larger of 1 and the threshold.
Products of other shapes, and on other processors, differ by up to 1e-6, and so do copies of a text that were embedded
in other batches. So all copies of an answer are answers, however they were rounded (docs/speed.md)."""

MOST_ANSWERS = 0.1
"""A target may be the answer of this share of the bank's queries. One that is nearest to more of them is a hub, however
it came to be one, and keeps all its entries."""


@dataclass(frozen=True)
class AnswerMask:
    """Entries of bank x targets that no sum sees.

    thresholds: [m], float64. t is an answer of the bank query u if s(b_u, t) >= thresholds_u. largest: whether each
    target also loses the largest of its other entries.
    """

    thresholds: np.ndarray
    largest: bool = True


@dataclass(frozen=True)
class Tile:
    """The targets `rows` against every bank row: `s` [b, m], which its reader may overwrite and the next tile does.
    `bound` is at least every |s|."""

    rows: slice
    s: Array
    bound: float


class Similarities:
    """A resident bank [m, d] that answers targets with tiles of `scale * s(b_u, t)`."""

    def __init__(self, bank: np.ndarray, metric: Metric, compute: Compute):
        self.bank, self.metric, self.compute = bank, metric, compute
        self.library = compute.library()
        self.m, self.dim = len(bank), int(bank.shape[1])
        # Far from the origin |b|^2 and |t|^2 swallow the distance; it stays what it is when both are moved there.
        self._origin = (
            bank.mean(axis=0, dtype=np.float64) if metric is Metric.EUCLIDEAN else None
        )
        self._source = bank if self._origin is None else bank - self._origin
        # But for distances they are bounds alone, for which float32 sums will do.
        dtype = np.float64 if metric is Metric.EUCLIDEAN else None
        self.squares = np.asarray(
            np.einsum("jd,jd->j", self._source, self._source, dtype=dtype), np.float64
        )
        self.longest = math.sqrt(
            self.squares.max()
        )  # by cosine 1, but for what a query map gives
        self._bank = self.library.like(self._source)
        self._bias = self.library.like(-self.squares / 2)
        # Halves have room for the components of unit vectors.
        is_cosine = metric is Metric.COSINE
        self.is_unit = (
            is_cosine and self.longest <= UNIT and compute.precision == "auto"
        )
        self._by_halves = self.is_unit and multiplies_halves(self.library.device)

    def tiles(
        self,
        targets: Vectors,
        label: str,
        *,
        scale: float = 1.0,
        mask: AnswerMask | None = None,
    ) -> Iterator[Tile]:
        """Tiles over all targets, in order.

        Args:
            targets: [n, d].
            label: the name of the work, for progress.
            scale: the factor of all similarities.
            mask: what it hides is -inf in the tiles.
        """
        xp, height = self.library.xp, min(self.tile_rows(), targets.rows)
        thresholds = (
            None
            if mask is None
            else self.library.like(scale * self.lower(mask.thresholds))
        )
        outs: dict[bool, Array] = {}
        bank = None
        if self._by_halves:
            bank = beside(
                self._bank(self.library.empty((0,), xp.float32)), of_bank=True
            )
        for start, block in self.blocks(
            targets, max(height, self._block_rows() // height * height)
        ):
            size, bias = self.longest, None
            if self.metric is not Metric.COSINE:
                exact = xp.astype(block, self.library.accumulator)
                squares = xp.sum(exact * exact, axis=1)
                longest = math.sqrt(float(xp.max(squares)))
                size = self.longest * longest
                if self.metric is Metric.EUCLIDEAN:
                    size, bias = max(self.longest, longest) ** 2, squares * (-scale / 2)
            bound = size * abs(scale) * (1 if bias is None else 2)
            is_double = size > FLOAT32_SIMILARITY or self.compute.precision == "float64"
            is_double = is_double and self.library.has_float64
            dtype = xp.float64 if is_double else xp.float32
            if is_double not in outs:
                outs[is_double] = self.library.empty((height, self.m), dtype)
            if bank is None:
                block = xp.astype(block, dtype, copy=False) * scale
            for first in range(0, len(block), height):
                rows = slice(first, first + height)
                out = outs[is_double][: len(block[rows])]
                if bank is None:
                    s = multiply(block[rows], self._bank(out).T, out)
                else:  # split before the scale, which halves have no room for
                    s = multiply_halves(beside(block[rows], of_bank=False), bank, out)
                    s *= scale
                if bias is not None:
                    s += self._bias(s) * scale
                    s += xp.astype(bias[rows], dtype)[:, None]
                if mask is not None and thresholds is not None:
                    self._hide(s, thresholds(s), mask.largest)
                stop = start + first + len(s)
                yield Tile(slice(start + first, stop), s, bound)
                self.compute.report(label, stop, targets.rows)

    def blocks(
        self, targets: Vectors, size: int = BLOCK_ROWS
    ) -> Iterator[tuple[int, Array]]:
        """Checked blocks of `targets` on the device, at most `size` rows each, with the number of the first row: at
        unit length where the metric is cosine, and moved as the bank is.

        What cannot be used is found on a card after all have been read, so that it need not wait after each.
        """
        if targets.dim != self.dim:
            raise InputError(
                f"{targets.name} has {targets.dim} dimensions, the bank has {self.dim}; embed both with one model"
            )
        library, xp, start = self.library, self.library.xp, 0
        if library.is_on_cpu:
            for block in prepare_blocks(targets, self.metric, size):
                yield (
                    start,
                    library.to_device(
                        block if self._origin is None else block - self._origin
                    ),
                )
                start += len(block)
            return
        origin = None if self._origin is None else library.to_device(self._origin)
        is_broken = library.full((), False, xp.bool)
        for block in library.upload(self._raw_blocks(targets, size), size, self.dim):
            if self.metric is Metric.COSINE:
                block, lengths = unit_length(xp, block)
                is_broken |= ~xp.all(xp.isfinite(lengths) & (lengths > 0))
            else:
                is_broken |= ~xp.all(xp.isfinite(block))
            moved = block
            if origin is not None:
                moved = xp.astype(block, origin.dtype) - origin
            yield start, moved
            start += len(block)
        if bool(to_host(is_broken)):
            self._raise_for(targets, size)

    def _raw_blocks(self, targets: Vectors, size: int) -> Iterator[np.ndarray]:
        """Yield blocks whose shapes are checked, as `Vectors.blocks` checks them."""
        rows = 0
        for block in targets.raw_blocks(size):
            rows += len(block)
            if block.ndim != 2 or block.shape[1] != self.dim or rows > targets.rows:
                self._raise_for(targets, size)
            yield block
        if rows != targets.rows:
            self._raise_for(targets, size)

    def _raise_for(self, targets: Vectors, size: int) -> NoReturn:
        """Raise the error of `prepare_blocks`, which names the row."""
        for _ in prepare_blocks(targets, self.metric, size):
            pass
        raise InputError(f"{targets.name} changed while it was read; read it again")

    def lower(self, thresholds: Array) -> Array:
        """The similarities [m] from which on an entry reaches its threshold [m], here or on the device: see
        `ANSWER_SLACK`. A Euclidean entry is off by what |b|^2 loses, however near the target is to the bank row b."""
        xp, smallest = (
            np if isinstance(thresholds, np.ndarray) else self.library.xp,
            np.ones(self.m),
        )
        if self.metric is Metric.EUCLIDEAN:
            smallest = np.maximum(smallest, self.squares)
        if not isinstance(thresholds, np.ndarray):
            smallest = self.library.to_device(smallest, thresholds.dtype)
        return thresholds - ANSWER_SLACK * xp.maximum(xp.abs(thresholds), smallest)

    def tile_rows(self) -> int:
        """Return how many targets a tile holds.

        On a CPU two copies fit the budget and one fits the cache.
        """
        budget = self.compute.bytes()
        if self.library.is_on_cpu:
            budget = min(budget // 2, CACHE_BYTES)
        else:
            budget = int(budget * TILE_SHARE) // TILE_COPIES
        return int(min(max(budget // (self.m * 4), 1), BLOCK_ROWS))

    def _block_rows(self) -> int:
        """Return how many targets are read at a time; on a CPU they fit the cache, too."""
        return (
            min(BLOCK_ROWS, max(CACHE_BYTES // (4 * self.dim), 1))
            if self.library.is_on_cpu
            else BLOCK_ROWS
        )

    def _hide(self, s: Array, thresholds: Array, largest: bool) -> None:
        """Sets to -inf, in `s` [b, m], the answers of all targets but hubs; and then the `largest` entry of each."""
        most = MOST_ANSWERS * self.m
        if self.library.is_on_cpu:
            s, thresholds = view(s), view(thresholds)
            reached = np.flatnonzero(s.max(axis=0) >= thresholds)  # few columns are
            rows, columns = np.nonzero(s[:, reached] >= thresholds[reached])
            is_answer = np.bincount(rows, minlength=len(s))[rows] <= most
            s[rows[is_answer], reached[columns[is_answer]]] = -math.inf
            if largest:
                np.put_along_axis(s, s.argmax(axis=1)[:, None], -math.inf, axis=1)
            return
        answers = s >= thresholds  # a card would have to wait for their number
        answers &= answers.sum(dim=1, keepdim=True) <= most
        s.masked_fill_(answers, -math.inf)
        if largest:
            s.scatter_(1, s.argmax(dim=1, keepdim=True), -math.inf)


def dense(similarities: Similarities, targets: Vectors) -> np.ndarray:
    """s(b_u, t) of every bank row of `similarities` and of `targets`: float64 [m, n], for sets that fit in memory."""
    parts = [
        to_host(tile.s).astype(np.float64)
        for tile in similarities.tiles(targets, "comparing queries with targets")
    ]
    whole: np.ndarray = np.concatenate(parts).T
    return whole
