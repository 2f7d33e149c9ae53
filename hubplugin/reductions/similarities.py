"""Similarities of a bank and targets, tile by tile, on a device.

Every similarity is an inner product plus one number a bank row plus one number a target (the last two
are zero but for Euclidean, where s = b.t - |b|^2/2 - |t|^2/2), so a tile [targets, bank] is one `addmm`
and every reduction runs along its contiguous rows. A tile is as large as the memory budget and the cache
allow; nothing of size bank x targets is held unless the budget has room for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from pydantic import ByteSize, TypeAdapter, ValidationError

from hubplugin.errors import InputError, Parameter
from hubplugin.metric import Metric
from hubplugin.reductions.largest import largest, reaching
from hubplugin.reductions.preparation import prepared_blocks
from hubplugin.reductions.products import as_tensor, full_product, squared_lengths
from hubplugin.vectors import BLOCK_ROWS, Progress, Vectors

CACHE_BYTES = 8 << 20
"""On a CPU a tile is at most this large, so that the reductions find it in cache. Measured: within 5 %
of the best from 4 to 16 MiB on two machines; a tile of 512 MiB is a third slower."""


FLOAT32_SIMILARITY = 16.0
"""Similarities up to this size lose less than 1e-5 in a float32 product; larger ones are done in float64."""


SAFE_EXPONENT = 60.0
"""exp(+-60) summed over a bank of any size stays inside float32, so no maximum need be taken out first."""


_SIZE = TypeAdapter(ByteSize)


Precision: TypeAlias = Literal["float32", "float64"]


@dataclass(frozen=True)
class Compute:
    """Where and within what memory to compute.

    device: "auto" (cuda, then mps, then cpu) or any torch device name. memory: bytes, or text such as
    "512MiB"; bounds what is held of similarities beyond the bank itself. progress: see `vectors.Progress`.
    precision: "float32", which goes over to float64 by itself where similarities are large, or "float64" throughout.
    """

    device: str = "auto"
    memory: int | str = "1GiB"
    progress: Progress | None = None
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise InputError(f"precision={self.precision!r} is unknown; use one of {', '.join(get_args(Precision))}")

    def torch_device(self) -> torch.device:
        double = self.precision == "float64"
        if self.device == "auto":
            if torch.cuda.is_available():
                return torch.device("cuda")
            return torch.device("mps" if torch.backends.mps.is_available() and not double else "cpu")
        try:
            device = torch.device(self.device)
            torch.empty(1, device=device).cpu()
        except (RuntimeError, AssertionError, TypeError) as error:
            reason = str(error).splitlines()[0].partition(". ")[0]
            if "device type" in reason:  # torch lists all it has ever heard of
                reason = "known are cuda, mps and cpu"
            raise InputError(f"device {self.device!r} is not usable here ({reason}); use 'auto' or 'cpu'") from None
        if double and device.type == "mps":
            raise InputError("precision='float64' is not to be had on mps; use device='cpu'")
        return device

    def bytes(self) -> int:
        try:
            return max(int(_SIZE.validate_python(self.memory)), 1 << 20)
        except ValidationError:
            raise InputError(
                Parameter("memory", self.memory), " is not a size; write it like '512MiB' or '2GiB'"
            ) from None

    def dtypes(self) -> tuple[torch.dtype, ...]:
        """What exponentials may be held in between iterations, the best first."""
        return (torch.float64,) if self.precision == "float64" else (torch.float32, torch.float16)

    def report(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(what, done, total)

    def similarities(self, bank: np.ndarray, metric: Metric) -> Similarities:
        return Similarities(bank, metric, self)


MOST_ANSWERS = 0.1
"""A target may be the answer of this share of the bank's queries. One that is nearest to more of them is a hub, however
it came to be one, and keeps all its entries."""


ANSWER_SLACK = 1e-6
"""By how much a similarity may lie below a level and still count as at it, beside the larger of 1 and the level: what
float32 products of other shapes differ by."""


@dataclass(frozen=True)
class LeftOut:
    """Entries of bank x targets that a reduction does not see: an answer is no hub.

    levels: [m], float64. t is an answer of the bank query u if s(b_u, t) >= levels_u. largest: whether each target also
    loses the largest of what is left, which is the answer's entry where a query's nearest target is another.
    """

    levels: np.ndarray
    largest: bool = True


@dataclass(frozen=True)
class Tile:
    """Targets [start, start + b) against every bank row: their values are `s` [b, m] + `own` [b] (float64).

    `own` is one number a target, kept apart for precision. `s` may be overwritten by whoever holds it and is
    overwritten by the next tile. `bound` is at least every |s|."""

    start: int
    s: torch.Tensor
    own: torch.Tensor
    bound: float

    @property
    def stop(self) -> int:
        return self.start + len(self.s)


class Similarities:
    """A resident bank [m, d] that answers targets with tiles of `scale * s(b_u, t) + weight_u`."""

    def __init__(self, bank: np.ndarray, metric: Metric, compute: Compute):
        self.bank, self.metric, self.compute, self.device = bank, metric, compute, compute.torch_device()
        self.m, self.dim = len(bank), int(bank.shape[1])
        # Far from the origin |b|^2 and |t|^2 swallow the distance; it stays what it is when both are moved there.
        self._origin = bank.mean(axis=0, dtype=np.float64) if metric is Metric.EUCLIDEAN else None
        self._source = self._moved(bank)
        squares = np.ones(self.m) if metric is Metric.COSINE else squared_lengths(self._source)
        self._norm = math.sqrt(squares.max())
        self._own = torch.from_numpy(-squares / 2 if metric is Metric.EUCLIDEAN else np.zeros(self.m))
        self._banks: dict[torch.dtype, torch.Tensor] = {}

    def tiles(
        self,
        targets: Vectors,
        what: str,
        *,
        scale: float = 1.0,
        weights: torch.Tensor | None = None,
        left_out: LeftOut | None = None,
    ) -> Iterator[Tile]:
        """Tiles over all of `targets` in order. `weights` [m] float64 is added to each bank row; what is left out is
        -inf."""
        if left_out is None:
            yield from self._multiplied(targets, what, scale, weights)
            return
        bias, middle, largest = around_zero(torch.zeros(self.m, dtype=torch.float64) if weights is None else weights)
        for tile in self._multiplied(targets, what, scale, None):
            _leave_out(tile, left_out, scale)
            if weights is not None:
                tile.s.add_(bias.to(tile.s))
            yield replace(tile, own=tile.own + middle, bound=tile.bound + largest)

    def _multiplied(self, targets: Vectors, what: str, scale: float, weights: torch.Tensor | None) -> Iterator[Tile]:
        """`tiles` with nothing left out."""
        if targets.dim != self.dim:
            raise InputError(
                f"{targets.name} has {targets.dim} dimensions, the bank has {self.dim}; embed both with one model"
            )
        bias = self._own * scale if weights is None else self._own * scale + weights
        bias, middle, largest_bias = around_zero(bias)
        height = min(self.tile_rows(), targets.rows)
        buffers: dict[torch.dtype, torch.Tensor] = {}
        done = 0
        for read in prepared_blocks(targets, self.metric, max(height, BLOCK_ROWS // height * height)):
            block = self._moved(read)
            squares = np.ones(len(block)) if self.metric is Metric.COSINE else squared_lengths(block)
            similarity = self._norm * math.sqrt(squares.max())
            dtype = self._dtype(
                similarity if self.metric is not Metric.EUCLIDEAN else max(self._norm**2, squares.max())
            )
            own = torch.from_numpy(
                middle - (squares / 2 * scale if self.metric is Metric.EUCLIDEAN else np.zeros(len(block)))
            )
            block_bias = bias.to(dtype).to(self.device)
            if dtype not in buffers:
                buffers[dtype] = torch.empty((height, self.m), dtype=dtype, device=self.device)
            on_device = as_tensor(block).to(dtype).to(self.device) * scale
            for start in range(0, len(block), height):
                part = on_device[start : start + height]
                s = buffers[dtype][: len(part)]
                full_product(torch.addmm, block_bias, part, self._bank(dtype).T, out=s)
                yield Tile(done + start, s, own[start : start + height], similarity * abs(scale) + largest_bias)
                self.compute.report(what, done + start + len(part), targets.rows)
            done += len(block)

    def tile_rows(self) -> int:
        """How many targets a tile holds: two copies of it fit the budget, and on a CPU one fits the cache."""
        budget = self.compute.bytes() // 2
        if self.device.type == "cpu":
            budget = min(budget, CACHE_BYTES)
        return int(min(max(budget // (self.m * 4), 1), BLOCK_ROWS))

    def _dtype(self, similarity: float) -> torch.dtype:
        wide = similarity > FLOAT32_SIMILARITY or self.compute.precision == "float64"
        wide = wide and self.device.type != "mps"  # which has no float64
        return torch.float64 if wide else torch.float32

    def _moved(self, vectors: np.ndarray) -> np.ndarray:
        return vectors if self._origin is None else vectors - self._origin

    def _bank(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._banks:
            self._banks[dtype] = as_tensor(np.ascontiguousarray(self._source)).to(dtype).to(self.device)
        return self._banks[dtype]


class HeldSimilarities(Similarities):
    """Multiplies a set of targets once and holds the product, for passes at many temperatures over the same sets.

    The caller sees to it that the products fit in memory."""

    def __init__(self, bank: np.ndarray, metric: Metric, compute: Compute):
        super().__init__(bank, metric, compute)
        self._products: dict[int, tuple[Vectors, list[Tile]]] = {}

    def _multiplied(self, targets: Vectors, what: str, scale: float, weights: torch.Tensor | None) -> Iterator[Tile]:
        if id(targets) not in self._products:
            tiles = [replace(tile, s=tile.s.clone()) for tile in super()._multiplied(targets, what, 1.0, None)]
            self._products[id(targets)] = (targets, tiles)  # holds on to the targets too, so that the id stays theirs
        bias = torch.zeros(self.m, dtype=torch.float64) if weights is None else weights
        bias, middle, largest_bias = around_zero(bias)
        for tile in self._products[id(targets)][1]:
            s = torch.mul(tile.s, scale).add_(bias.to(tile.s.dtype).to(tile.s.device))
            yield Tile(tile.start, s, tile.own * scale + middle, tile.bound * abs(scale) + largest_bias)


@dataclass(frozen=True)
class HoldingCompute(Compute):
    """A `Compute` whose similarities are held, one set a bank: see `HeldSimilarities`."""

    _banks: dict[int, tuple[np.ndarray, HeldSimilarities]] = field(default_factory=dict, compare=False)

    def release(self) -> None:
        """Lets go of all that is held, which otherwise stays until the garbage collector comes by."""
        self._banks.clear()

    def similarities(self, bank: np.ndarray, metric: Metric) -> Similarities:
        if id(bank) not in self._banks:
            self._banks[id(bank)] = (bank, HeldSimilarities(bank, metric, self))
        return self._banks[id(bank)][1]


def dense(similarities: Similarities, targets: Vectors) -> torch.Tensor:
    """s(b_u, t) of every bank row and target: float64 [m, n], for sets that fit in memory."""
    parts = [tile.s.cpu().double() + tile.own[:, None] for tile in similarities.tiles(targets, "similarities")]
    return torch.cat(parts).T


def around_zero(bias: torch.Tensor) -> tuple[torch.Tensor, float, float]:
    """`bias` less its middle, the middle, and the largest that is left: so the exponents of a tile stay small."""
    low, high = float(bias.min()), float(bias.max())
    middle = (low + high) / 2
    return bias - middle, middle, (high - low) / 2


def reached(levels: torch.Tensor) -> torch.Tensor:
    """The similarities [m] from which on an entry counts as at its level: see `ANSWER_SLACK`."""
    return levels - ANSWER_SLACK * levels.abs().clamp(min=1.0)


def _leave_out(tile: Tile, left_out: LeftOut, scale: float) -> None:
    """Sets to -inf, in place, the entries of a tile of `scale` * s(b_u, t) that are left out."""
    levels = scale * reached(torch.from_numpy(left_out.levels))
    s = with_own(tile)
    rows, columns = reaching(s, levels.to(s), s.amax(dim=0))
    few = rows.bincount(minlength=len(tile.s))[rows] <= MOST_ANSWERS * tile.s.shape[1]
    tile.s[rows[few], columns[few]] = -math.inf
    if left_out.largest:
        leave_largest_out(tile, largest(tile.s, 1)[1])


def leave_largest_out(tile: Tile, columns: torch.Tensor) -> None:
    """columns: of the largest of each target [b, 1]."""
    tile.s.scatter_(1, columns, -math.inf)


def exponentials_of(tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(tile - peak) in place and the peak [b] (float64): zero where the exponents are small anyway."""
    if tile.bound <= SAFE_EXPONENT:
        return tile.s.exp_(), torch.zeros(len(tile.s), dtype=torch.float64)
    peak = tile.s.amax(dim=1, keepdim=True)
    return tile.s.sub_(peak).exp_(), peak[:, 0].cpu().double()


def with_own(tile: Tile) -> torch.Tensor:
    """s(b_u, t) of a tile, in new memory where it differs from what the tile holds."""
    return tile.s + tile.own.to(tile.s.device, tile.s.dtype)[:, None] if tile.own.any() else tile.s


def accumulator(similarities: Similarities) -> torch.Tensor:
    return torch.zeros(similarities.m, dtype=torch.float64, device=accumulator_device(similarities))


def accumulator_device(similarities: Similarities) -> torch.device:
    return torch.device("cpu") if similarities.device.type == "mps" else similarities.device
