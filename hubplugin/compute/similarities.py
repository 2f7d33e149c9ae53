"""With what to compute; and similarities of a bank and targets, tile by tile.

Every similarity is an inner product plus
one number a bank row plus one number a target. The last two are zero but for Euclidean, where
s = b.t - |b|^2/2 - |t|^2/2. So a tile [targets, bank] is one `addmm` and every reduction runs along its contiguous
rows. A tile is as large as the memory budget and the cache allow; nothing of size bank x targets is held unless the
budget has room for it. Products have the full precision of their type, whatever a program has allowed for its training.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from hubplugin.compute.largest import ANSWER_SLACK, Array, largest, reaching
from hubplugin.errors import InputError, Parameter, install
from hubplugin.metric import Metric
from hubplugin.vectors import BLOCK_ROWS, Progress, Vectors, prepared_blocks

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        """Stands for the module, which is imported when it is first used: fits need it, and a process that only serves
        need not have it. Raises InputError, one line, where it is not installed."""

        def __getattr__(self, name: str) -> Any:
            try:
                import torch
            except ImportError:
                raise InputError(f"this computes with torch, which is not installed; {install('fit')}") from None
            return getattr(torch, name)

    torch = _Torch()

LEAST, SAFE = 1 << 20, 1 << 30
"""Bytes: what any work needs, and the default, which is a bound on a small machine, too."""

FEW = 1e10
"""Products of two numbers that numpy does before an import of torch is over, which takes some 3 s: an upsert of 1,000
vectors of 384 dimensions against a bank of 15,000 takes 6e9 (benchmarks/serving.py)."""

Precision: TypeAlias = Literal["auto", "float64"]


@cache
def has_torch() -> bool:
    """Whether torch is installed; it is not imported."""
    return find_spec("torch") is not None


@dataclass(frozen=True)
class Compute:
    """Where, within what memory and how precisely to compute. Everything that computes takes it as `compute`.

    device: "auto" (cuda, then mps, then cpu), any torch device name, or "numpy". Where torch is not installed, and for
        the offsets of few targets (see `FEW`), "auto" is "numpy". Fits need torch.
    memory: bytes, or text such as "512MiB", from 1MiB to what the machine has, or `SAFE` where that is more. It bounds
        what is held of similarities beyond the bank itself. A Sinkhorn fit that finds room for m x n in float16 takes
        the time of two or three products, else of `iterations`.
    progress: called as progress(what, done, total).
    precision: "auto" is within 1e-5 of exact arithmetic, or of 1e-4 of the temperature where that is more: float32,
        and float64 by itself where similarities are large. "float64" computes so throughout, at twice the time.

    Raises InputError for an unknown precision, and for an amount of memory that is no bound here.
    """

    device: str = "auto"
    memory: int | str = SAFE
    progress: Progress | None = None
    precision: Precision = "auto"

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise InputError(f"precision={self.precision!r} is unknown; use one of {', '.join(get_args(Precision))}")
        self.bytes()

    @property
    def by_numpy(self) -> bool:
        """Whether numpy computes."""
        return self.device == "numpy" or (self.device == "auto" and not has_torch())

    def for_products(self, count: float) -> Compute:
        """The same for so many products of two numbers: by numpy where they are few."""
        return replace(self, device="numpy") if self.device == "auto" and count <= FEW else self

    def torch_device(self) -> torch.device:
        """The device; raises InputError where it cannot be used here."""
        if self.device == "numpy":
            raise InputError("a fit computes with torch: device 'numpy' has offsets and searches; use 'auto' or 'cpu'")
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
        """`memory` as a number; raises InputError for what is no size, and for one that is no bound here."""
        if self.memory == SAFE:
            return SAFE
        from pydantic import ByteSize, TypeAdapter, ValidationError

        given = Parameter("memory", self.memory)
        try:
            size = int(TypeAdapter(ByteSize).validate_python(self.memory))
        except ValidationError:
            raise InputError(given, " is not a size; write it like '512MiB' or '2GiB'") from None
        if size < LEAST:
            raise InputError(given, f" is too little; expected {LEAST >> 20}MiB or more")
        if size > SAFE and size > (most := self._installed()):
            raise InputError(given, f" is more than this machine has; expected {max(most, SAFE) >> 30}GiB or less")
        return size

    def _installed(self) -> int:
        """The bytes of memory that this machine has, or its device if that has more."""
        own = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else sys.maxsize
        if self.by_numpy or (device := self.torch_device()).type != "cuda":
            return own
        return max(own, torch.cuda.get_device_properties(device).total_memory)

    @property
    def quiet(self) -> Compute:
        """The same, and nobody is told how far it is."""
        return replace(self, progress=None)

    def report(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(what, done, total)


def module_of(array: Array) -> ModuleType:
    """numpy or torch."""
    return np if isinstance(array, np.ndarray) else sys.modules["torch"]


def host(array: Array) -> np.ndarray:
    """`array` in memory of the processor, as float64."""
    array = array if isinstance(array, np.ndarray) else array.cpu().numpy()
    return np.asarray(array, np.float64)


def copy_of(array: Array) -> Array:
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


def like(values: np.ndarray, array: Array) -> Array:
    """`values` as `array` is: its kind, its type, and where it lies."""
    return values.astype(array.dtype, copy=False) if isinstance(array, np.ndarray) else as_tensor(values).to(array)


def squared_lengths(vectors: np.ndarray, metric: Metric) -> np.ndarray:
    """|v|^2 of every row: float64 [b]. But for distances they are bounds alone, for which float32 sums will do."""
    squares = np.einsum("jd,jd->j", vectors, vectors, dtype=np.float64 if metric is Metric.EUCLIDEAN else None)
    return np.asarray(squares, np.float64)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    # What a memory map or a model file gives is read-only, of which torch would warn.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def full_product(
    multiply: Callable[..., torch.Tensor], *factors: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """multiply(*factors) at the full precision of their type, written to `out` where there is one.

    A program may have allowed TF32 or bfloat16 products for its own training; ten bits of mantissa over tau are not
    enough here. The setting belongs to the whole process, so it is read and never changed: where it allows less than
    float32, the product is done in float64. It is read again afterwards, since another thread may have changed it.
    """
    if not reduces_precision(factors[0]):
        result = multiply(*factors, out=out)
        if not reduces_precision(factors[0]):
            return result
    exact = multiply(*(factor.double() for factor in factors)).to(factors[0].dtype)
    return exact if out is None else out.copy_(exact)


def reduces_precision(factor: torch.Tensor) -> bool:
    """Whether torch may now multiply such tensors at less than their own precision."""
    if factor.dtype is not torch.float32 or factor.device.type not in ("cpu", "cuda"):
        return False
    backend = torch.backends.cuda if factor.device.type == "cuda" else torch.backends.mkldnn
    # From torch 2.9 on each backend has a setting of its own, and to ask for the common one can be an error.
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if precision is None:
        return torch.get_float32_matmul_precision() != "highest"
    return precision not in ("none", "ieee")


CACHE_BYTES = 8 << 20
"""On a CPU a tile is at most this large, so that the reductions find it in cache. Measured: within 5 %
of the best from 4 to 16 MiB on two machines; a tile of 512 MiB is a third slower."""


FLOAT32_SIMILARITY = 16.0
"""Similarities up to this size lose less than 1e-5 in a float32 product; larger ones are done in float64."""


SAFE_EXPONENT = 60.0
"""exp(+-60) summed over a bank of any size stays inside float32, so no maximum need be taken out first."""


MOST_ANSWERS = 0.1
"""A target may be the answer of this share of the bank's queries. One that is nearest to more of them is a hub, however
it came to be one, and keeps all its entries."""


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
    s: Array
    own: Array
    bound: float

    @property
    def stop(self) -> int:
        return self.start + len(self.s)

    def resolves_its_exponents(self) -> bool:
        """Whether rounding moves no exponent of a tile of s/tau by 1 or more. Where it does, a bank row's share, in
        exact arithmetic at least 1/(m n) of some target, can round to 0, and whether it does differs between CPUs."""
        return self.bound * step_of(self.s) < 1  # which NaN is not


def step_of(array: Array) -> float:
    """The distance from 1 to the next larger number of the type of `array`."""
    return float(module_of(array).finfo(array.dtype).eps)


class Similarities:
    """A resident bank [m, d] that answers targets with tiles of `scale * s(b_u, t) + weight_u`."""

    def __init__(self, bank: np.ndarray, metric: Metric, compute: Compute):
        self.bank, self.metric, self.compute = bank, metric, compute
        self.device = None if compute.by_numpy else compute.torch_device()
        # Where torch sums in float64, which mps does not have.
        self.sums_device = "cpu" if self.device is None or self.device.type == "mps" else self.device
        self.m, self.dim = len(bank), int(bank.shape[1])
        # Far from the origin |b|^2 and |t|^2 swallow the distance; it stays what it is when both are moved there.
        self._origin = bank.mean(axis=0, dtype=np.float64) if metric is Metric.EUCLIDEAN else None
        self._source = self._moved(bank)
        squares = squared_lengths(self._source, metric)
        self.longest = math.sqrt(squares.max())  # by cosine 1, but for what a query map gives
        self._own = -squares / 2 if metric is Metric.EUCLIDEAN else np.zeros(self.m)
        self._banks: dict[str, Array] = {}

    def tiles(
        self,
        targets: Vectors,
        what: str,
        *,
        scale: float = 1.0,
        weights: np.ndarray | None = None,
        left_out: LeftOut | None = None,
    ) -> Iterator[Tile]:
        """Tiles over all of `targets` in order. `weights` [m] float64 is added to each bank row; what is left out is
        -inf."""
        if left_out is None:
            yield from self._multiplied(targets, what, scale, weights)
            return
        bias, middle, largest = around_zero(np.zeros(self.m) if weights is None else weights)
        for tile in self._multiplied(targets, what, scale, None):
            _leave_out(tile, scale * self.reached(left_out.levels), left_out.largest)
            if weights is not None:
                s = tile.s
                s += like(bias, s)
            yield replace(tile, own=tile.own + middle, bound=tile.bound + largest)

    def _multiplied(self, targets: Vectors, what: str, scale: float, weights: np.ndarray | None) -> Iterator[Tile]:
        """`tiles` with nothing left out."""
        if targets.dim != self.dim:
            raise InputError(
                f"{targets.name} has {targets.dim} dimensions, the bank has {self.dim}; embed both with one model"
            )
        bias = self._own * scale if weights is None else self._own * scale + weights
        bias, middle, largest_bias = around_zero(bias)
        height = min(self.tile_rows(), targets.rows)
        buffers: dict[bool, Array] = {}
        done = 0
        for read in prepared_blocks(targets, self.metric, max(height, BLOCK_ROWS // height * height)):
            block = self._moved(read)
            squares = np.ones(len(block)) if self.metric is Metric.COSINE else squared_lengths(block, self.metric)
            similarity = self.longest * math.sqrt(squares.max())
            wide = self._needs_float64(
                similarity if self.metric is not Metric.EUCLIDEAN else max(self.longest**2, squares.max())
            )
            shift = middle - (squares / 2 * scale if self.metric is Metric.EUCLIDEAN else np.zeros(len(block)))
            bank = self._bank("float64" if wide else "float32")
            own: Array = shift if self.device is None else torch.from_numpy(shift)
            given, bank_bias = like(block, bank) * scale, like(bias, bank)
            if wide not in buffers:
                shape = (height, self.m)
                buffers[wide] = np.empty(shape, bank.dtype) if self.device is None else bank.new_empty(shape)
            for start in range(0, len(block), height):
                part = given[start : start + height]
                s = buffers[wide][: len(part)]
                product(bank_bias, part, bank.T, s)
                bound = similarity * abs(scale) + largest_bias
                yield Tile(done + start, s, own[start : start + height], bound)
                self.compute.report(what, done + start + len(part), targets.rows)
            done += len(block)

    def reached(self, levels: np.ndarray) -> np.ndarray:
        """The similarities [m] from which on an entry counts as at its level [m]: see `ANSWER_SLACK`. A Euclidean entry
        is off by what |b|^2 loses, however near the target is to the bank row b."""
        least: np.ndarray = levels - ANSWER_SLACK * np.maximum(np.maximum(np.abs(levels), -2 * self._own), 1.0)
        return least

    def tile_rows(self) -> int:
        """How many targets a tile holds: two copies of it fit the budget, and on a CPU one fits the cache."""
        budget = self.compute.bytes() // 2
        if self.device is None or self.device.type == "cpu":
            budget = min(budget, CACHE_BYTES)
        return int(min(max(budget // (self.m * 4), 1), BLOCK_ROWS))

    def _needs_float64(self, similarity: float) -> bool:
        wide = similarity > FLOAT32_SIMILARITY or self.compute.precision == "float64"
        return wide and (self.device is None or self.device.type != "mps")  # which has no float64

    def _moved(self, vectors: np.ndarray) -> np.ndarray:
        return vectors if self._origin is None else vectors - self._origin

    def _bank(self, dtype: str) -> Array:
        if dtype not in self._banks:
            source = np.ascontiguousarray(self._source)
            self._banks[dtype] = (
                source.astype(dtype, copy=False)
                if self.device is None
                else as_tensor(source).to(getattr(torch, dtype)).to(self.device)
            )
        return self._banks[dtype]


def product(bias: Array, rows: Array, columns: Array, out: Array) -> Array:
    """`bias` [m] + `rows` [b, d] times `columns` [d, m], in `out` [b, m]."""
    if not isinstance(rows, np.ndarray):
        return full_product(torch.addmm, bias, rows, columns, out=out)
    np.matmul(rows, columns, out=out)
    out += bias
    return out


def dense(similarities: Similarities, targets: Vectors) -> torch.Tensor:
    """s(b_u, t) of every bank row and target: float64 [m, n], for sets that fit in memory."""
    return torch.from_numpy(dense_array(similarities, targets))


def dense_array(similarities: Similarities, targets: Vectors) -> np.ndarray:
    """`dense`, as an array."""
    parts = [host(tile.s) + host(tile.own)[:, None] for tile in similarities.tiles(targets, "similarities")]
    whole: np.ndarray = np.concatenate(parts).T
    return whole


def around_zero(bias: np.ndarray) -> tuple[np.ndarray, float, float]:
    """`bias` less its middle, the middle, and the largest that is left: so the exponents of a tile stay small."""
    low, high = float(bias.min()), float(bias.max())
    middle = (low + high) / 2
    return bias - middle, middle, (high - low) / 2


def _leave_out(tile: Tile, levels: np.ndarray, largest_too: bool) -> None:
    """Sets to -inf, in place, the entries of a tile that are at least their column's level [m], but for those of a hub,
    and then each target's largest."""
    s = with_own(tile)
    rows, columns = reaching(s, like(levels, s))
    out = np.bincount(rows, minlength=len(s))[rows] <= MOST_ANSWERS * s.shape[1]
    tile.s[rows[out], columns[out]] = -math.inf
    if largest_too:
        columns = largest(tile.s, 1)[1]
        if isinstance(tile.s, np.ndarray):
            np.put_along_axis(tile.s, columns, -math.inf, axis=1)
        else:
            tile.s.scatter_(1, columns, -math.inf)


def exponentials_of(tile: Tile) -> tuple[Array, Array]:
    """exp(tile - peak) in place and the peak [b] (float64): zero where the exponents are small anyway."""
    module = module_of(tile.s)
    if tile.bound <= SAFE_EXPONENT:
        return module.exp(tile.s, out=tile.s), module.zeros(len(tile.s), dtype=module.float64)
    peak = module.amax(tile.s, axis=1, keepdims=True)
    exponentials = module.exp(module.subtract(tile.s, peak, out=tile.s), out=tile.s)
    return exponentials, host(peak[:, 0]) if module is np else peak[:, 0].cpu().double()


def with_own(tile: Tile) -> Array:
    """s(b_u, t) of a tile, in new memory where it differs from what the tile holds."""
    return tile.s + like(host(tile.own), tile.s)[:, None] if tile.own.any() else tile.s
