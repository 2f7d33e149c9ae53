"""The three kinds of term over bank x targets, tiled, on a device. The only place that multiplies matrices.

Every similarity is an inner product plus one number a bank row plus one number a target (the last two
are zero but for Euclidean, where s = b.t - |b|^2/2 - |t|^2/2), so a tile [targets, bank] is one `addmm`
and every reduction runs along its contiguous rows. A tile is as large as the memory budget and the cache
allow; nothing of size bank x targets is held unless the budget has room for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from pydantic import ByteSize, TypeAdapter, ValidationError

from hubplugin.errors import InputError, Parameter
from hubplugin.metric import Metric, normalise
from hubplugin.vectors import BLOCK_ROWS, Progress, Vectors, as_vectors

CACHE_BYTES = 8 << 20
"""On a CPU a tile is at most this large, so that the reductions find it in cache. Measured: within 5 %
of the best from 4 to 16 MiB on two machines; a tile of 512 MiB is a third slower."""

FLOAT32_SIMILARITY = 16.0
"""Similarities up to this size lose less than 1e-5 in a float32 product; larger ones are done in float64."""

SAFE_EXPONENT = 60.0
"""exp(+-60) summed over a bank of any size stays inside float32, so no maximum need be taken out first."""


_SIZE = TypeAdapter(ByteSize)

SAFE_DRIFT = {torch.float64: 20.0, torch.float32: 20.0, torch.float16: 12.0}
"""While no log alpha has moved from another by more, held exponentials lose nothing that counts: what lies below the
type's range beside its column's peak (87 in the exponent, for float16 under `HALF_PEAK` 26) stays far below it."""

HALF_PEAK = 2.0**14
"""The largest float16 of a target: its range then ends at 4e-12 of that. What is rounded off each term, up to 5e-4 of
it, averages out over the bank and the targets: log alpha comes within 1e-5 of float64's (see the tests)."""

HALF_TERMS = 256
"""Targets, and bank rows, below which what float16 rounds off is not taken to average out."""

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


def prepared_blocks(vectors: Vectors, metric: Metric, size: int = BLOCK_ROWS) -> Iterator[np.ndarray]:
    """Checked blocks of `vectors`, at unit length where the metric is cosine."""
    row = 0
    for block in vectors.blocks(size):
        yield normalise(block, vectors.name, row) if metric is Metric.COSINE else block
        row += len(block)


def prepared(vectors: Vectors, metric: Metric) -> np.ndarray:
    """All of a bank, checked and at unit length where the metric is cosine: float32 [m, d]."""
    return np.concatenate(list(prepared_blocks(vectors, metric)))


def sampled(vectors: Vectors, count: int, metric: Metric, rng: np.random.Generator) -> np.ndarray:
    """At most `count` rows at random, in order, prepared: float32 [min(count, n), d]."""
    return taken(vectors, np.sort(rng.permutation(vectors.rows)[:count]), metric)


def taken(vectors: Vectors, rows: np.ndarray, metric: Metric) -> np.ndarray:
    """The given rows, prepared: float32 [len(rows), d]. `rows` are ascending."""
    parts, start = [], 0
    for block in prepared_blocks(vectors, metric):
        inside = rows[(rows >= start) & (rows < start + len(block))]
        parts.append(block[inside - start])
        start += len(block)
    return np.concatenate(parts)


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


SMALLEST_LOG = 20
"""Bank queries, and targets, below which nothing is left out: too little would remain."""


@dataclass(frozen=True)
class Answers:
    """The answers of a bank in a gallery, as far as similarity tells them.

    levels: [m], the similarity of each bank query's nearest target, of gallery and target bank: what reaches it counts
    as an answer, also a target that comes later. weights: [m], 1 over the number of bank queries with the same
    nearest target, so that what was asked for in many wordings counts once.
    """

    levels: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, levels: np.ndarray, rows: np.ndarray) -> Answers:
        """From each query's largest similarity and the number of its target: float64 [m] and int64 [m]."""
        _, place, count = np.unique(rows, return_inverse=True, return_counts=True)
        return cls(levels, 1.0 / count[place.reshape(-1)])


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
        self.metric, self.compute, self.device = metric, compute, compute.torch_device()
        self.m, self.dim = len(bank), int(bank.shape[1])
        # Far from the origin |b|^2 and |t|^2 swallow the distance; it stays what it is when both are moved there.
        self._origin = bank.mean(axis=0, dtype=np.float64) if metric is Metric.EUCLIDEAN else None
        self._source = self._moved(bank)
        squares = np.ones(self.m) if metric is Metric.COSINE else _squares(self._source)
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
        bias, middle, largest = _around_zero(torch.zeros(self.m, dtype=torch.float64) if weights is None else weights)
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
        bias, middle, largest_bias = _around_zero(bias)
        height = min(self.tile_rows(), targets.rows)
        buffers: dict[torch.dtype, torch.Tensor] = {}
        done = 0
        for read in prepared_blocks(targets, self.metric, max(height, BLOCK_ROWS // height * height)):
            block = self._moved(read)
            squares = np.ones(len(block)) if self.metric is Metric.COSINE else _squares(block)
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
            on_device = _tensor(block).to(dtype).to(self.device) * scale
            for start in range(0, len(block), height):
                part = on_device[start : start + height]
                s = buffers[dtype][: len(part)]
                _product(torch.addmm, block_bias, part, self._bank(dtype).T, out=s)
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
            self._banks[dtype] = _tensor(np.ascontiguousarray(self._source)).to(dtype).to(self.device)
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
        bias, middle, largest_bias = _around_zero(bias)
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


def _around_zero(bias: torch.Tensor) -> tuple[torch.Tensor, float, float]:
    """`bias` less its middle, the middle, and the largest that is left: so the exponents of a tile stay small."""
    low, high = float(bias.min()), float(bias.max())
    middle = (low + high) / 2
    return bias - middle, middle, (high - low) / 2


def _leave_out(tile: Tile, left_out: LeftOut, scale: float) -> None:
    """Sets to -inf, in place, the entries of a tile of `scale` * s(b_u, t) that are left out."""
    levels = torch.from_numpy(left_out.levels)
    levels = scale * (levels - ANSWER_SLACK * levels.abs().clamp(min=1.0))
    if bool((tile.own == tile.own[0]).all()):  # all metrics but Euclidean
        answers = tile.s >= (levels - tile.own[0]).to(tile.s)
    else:
        answers = tile.s >= (levels[None, :] - tile.own[:, None]).to(tile.s)
    count = answers.sum(dim=1)
    answers &= (count <= MOST_ANSWERS * tile.s.shape[1])[:, None]
    tile.s.masked_fill_(answers, -math.inf)
    if left_out.largest:
        _leave_largest_out(tile)


def _leave_largest_out(tile: Tile) -> None:
    tile.s.scatter_(1, tile.s.argmax(dim=1, keepdim=True), -math.inf)


def _squares(vectors: np.ndarray) -> np.ndarray:
    """|v|^2 of every row: float64 [b]."""
    squares: np.ndarray = np.einsum("jd,jd->j", vectors, vectors, dtype=np.float64)
    return squares


def _tensor(array: np.ndarray) -> torch.Tensor:
    # What a memory map or a model file gives is read-only, of which torch would warn.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _product(multiply: Callable[..., torch.Tensor], *factors: torch.Tensor, out: Any = None) -> torch.Tensor:
    """multiply(*factors) at the full precision of their type, written to `out` where there is one.

    A program may have allowed TF32 or bfloat16 products for its own training; ten bits of mantissa over tau are not
    enough here. The setting belongs to the whole process, so it is read and never changed: where it allows less than
    float32, the product is done in float64. It is read again afterwards, since another thread may have changed it.
    """
    if not _reduces_precision(factors[0]):
        result = multiply(*factors, out=out)
        if not _reduces_precision(factors[0]):
            return result
    exact = multiply(*(factor.double() for factor in factors)).to(factors[0].dtype)
    return exact if out is None else out.copy_(exact)


def _reduces_precision(factor: torch.Tensor) -> bool:
    """Whether torch may now multiply such tensors at less than their own precision."""
    if factor.dtype is not torch.float32 or factor.device.type not in ("cpu", "cuda"):
        return False
    backend = torch.backends.cuda if factor.device.type == "cuda" else torch.backends.mkldnn
    # From torch 2.9 on each backend has a setting of its own, and to ask for the common one can be an error.
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if precision is None:
        return torch.get_float32_matmul_precision() != "highest"
    return precision not in ("none", "ieee")


def _exponentials(tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(tile - peak) in place and the peak [b] (float64): zero where the exponents are small anyway."""
    if tile.bound <= SAFE_EXPONENT:
        return tile.s.exp_(), torch.zeros(len(tile.s), dtype=torch.float64)
    peak = tile.s.amax(dim=1, keepdim=True)
    return tile.s.sub_(peak).exp_(), peak[:, 0].cpu().double()


@dataclass(frozen=True)
class LogSum:
    """LSE_u( s(b_u, t)/tau + log_weights_u ); log_weights [m], 0 where None."""

    tau: float
    log_weights: np.ndarray | None = None

    @property
    def weights(self) -> torch.Tensor | None:
        return None if self.log_weights is None else _tensor(np.asarray(self.log_weights, np.float64))

    def of_exponents(self, tile: Tile) -> torch.Tensor:
        """Of a tile of s/tau + log_weights, which is overwritten: float64 [b]."""
        exponentials, peak = _exponentials(tile)
        return exponentials.sum(dim=1).cpu().double().log() + peak + tile.own

    def of(self, tile: Tile) -> torch.Tensor:
        """Of a tile of s, which stays as it is: float64 [b]."""
        weights = torch.zeros(tile.s.shape[1], dtype=torch.float64) if self.weights is None else self.weights
        bias, middle, largest = _around_zero(weights)
        s = torch.add(bias.to(tile.s), tile.s, alpha=1 / self.tau)
        return self.of_exponents(Tile(tile.start, s, tile.own / self.tau + middle, tile.bound / self.tau + largest))


@dataclass(frozen=True)
class MeanOfLargest:
    """Mean of the k largest s(b_u, t); of all that are not left out, where they are fewer."""

    k: int

    def of(self, tile: Tile) -> torch.Tensor:
        """Of a tile of s, which is overwritten: float64 [b]."""
        largest = _k_largest(tile.s, min(self.k, tile.s.shape[1]))
        there = largest > -math.inf
        mean = largest.where(there, 0.0).sum(dim=1).double() / there.sum(dim=1)
        return mean.cpu() + tile.own


def reduce(
    similarities: Similarities,
    targets: Vectors,
    reductions: Sequence[LogSum | MeanOfLargest],
    left_out: LeftOut | None = None,
    what: str = "offsets",
) -> list[np.ndarray]:
    """The value of each of `reductions` for every target, in one pass over the similarities: float64 [n] each."""
    results = [np.empty(targets.rows) for _ in reductions]
    only = reductions[0]
    if len(reductions) == 1 and isinstance(only, LogSum):  # the product itself can scale and add
        scale = 1 / only.tau
        for tile in similarities.tiles(targets, what, scale=scale, weights=only.weights, left_out=left_out):
            results[0][tile.start : tile.stop] = only.of_exponents(tile).numpy()
        return results
    # What overwrites its tile comes last.
    order = sorted(range(len(reductions)), key=lambda i: isinstance(reductions[i], MeanOfLargest))
    for tile in similarities.tiles(targets, what, left_out=left_out):
        for i in order:
            last = i == order[-1]
            results[i][tile.start : tile.stop] = (
                reductions[i].of(tile if last else replace(tile, s=tile.s.clone())).numpy()
            )
    return results


def reduce_and_seek(
    similarities: Similarities,
    targets: Vectors,
    reductions: Sequence[LogSum | MeanOfLargest],
    others: Sequence[Vectors] = (),
    what: str = "offsets",
) -> tuple[list[np.ndarray], Answers | None]:
    """`reduce` with the answers left out, which the same pass finds in `targets` (the gallery) and `others`. Only the
    targets that are an answer are multiplied again: at most as many as the bank has rows."""
    if not _may_be_log(similarities, [targets, *others]):
        return reduce(similarities, targets, reductions, what=what), None
    found, first = Nearest(similarities.m), targets.rows
    results = [np.empty(targets.rows) for _ in reductions]
    for tile in similarities.tiles(targets, what):
        found.see(tile, 0)
        _leave_largest_out(tile)
        for reduction, result in zip(reductions, results, strict=True):
            result[tile.start : tile.stop] = reduction.of(replace(tile, s=tile.s.clone())).numpy()
    for part in others:
        for tile in similarities.tiles(part, "answers of the bank"):
            found.see(tile, first)
        first += part.rows
    rows = np.unique(found.rows)
    rows = rows[rows < targets.rows]
    if rows.size:
        some = as_vectors(taken(targets, rows, similarities.metric), targets.name)
        again = reduce(similarities, some, reductions, LeftOut(found.answers.levels), what)
        for result, values in zip(results, again, strict=True):
            result[rows] = values
    return results, found.answers


def log_sum_exp(
    similarities: Similarities,
    targets: Vectors,
    tau: float,
    log_weights: np.ndarray | None = None,
    what: str = "log-sum-exp",
) -> np.ndarray:
    """LSE_u( s(b_u, t)/tau + log_weights_u ) for every target: float64 [n]. `log_weights` [m], 0 by default."""
    return reduce(similarities, targets, [LogSum(tau, log_weights)], what=what)[0]


def _k_largest(s: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest of every row of `s`, which is overwritten, in any order: [b, k]."""
    if s.device.type != "cpu":
        return torch.topk(s, k, dim=1, sorted=False).values
    # On a CPU numpy's partition takes one time for any k: 0.7 of torch.topk's at k = 10, a fifth at k = 128.
    s.numpy().partition(s.shape[1] - k, axis=1)
    return s[:, s.shape[1] - k :]


def dot(similarities: Similarities, targets: Vectors, what: str = "similarity to the mean") -> np.ndarray:
    """s(v, t) for every target, where the bank is the one vector v: float64 [n]."""
    result = np.empty(targets.rows)
    for tile in similarities.tiles(targets, what):
        result[tile.start : tile.stop] = (tile.s[:, 0].cpu().double() + tile.own).numpy()
    return result


class Nearest:
    """The nearest target of every bank row among the tiles seen so far. similarity: float64 [m]; rows: int64 [m]."""

    def __init__(self, m: int):
        self._similarity = torch.full((m,), -math.inf, dtype=torch.float64)
        self._rows = torch.zeros(m, dtype=torch.int64)

    def see(self, tile: Tile, first: int, scale: float = 1.0) -> None:
        """A tile of `scale` * s, whose targets are numbered from `first` + tile.start on."""
        s = _with_own(tile)
        highest = s.amax(dim=0).cpu().double() / scale
        nearer = (highest > self._similarity).nonzero()[:, 0]  # ever fewer, so that their rows cost next to nothing
        self._similarity[nearer] = highest[nearer]
        self._rows[nearer] = first + tile.start + s[:, nearer.to(s.device)].argmax(dim=0).cpu()

    @property
    def rows(self) -> np.ndarray:
        return self._rows.numpy()

    @property
    def answers(self) -> Answers:
        return Answers.of(self._similarity.numpy(), self.rows)


def find_answers(similarities: Similarities, columns: Sequence[Vectors]) -> Answers | None:
    """The answers of the bank of `similarities` among the targets of all `columns`, in one pass; None where bank or
    targets are too few."""
    if not _may_be_log(similarities, columns):
        return None
    found, first = Nearest(similarities.m), 0
    for targets in columns:
        for tile in similarities.tiles(targets, "answers of the bank"):
            found.see(tile, first)
        first += targets.rows
    return found.answers


def _may_be_log(similarities: Similarities, columns: Sequence[Vectors]) -> bool:
    return min(similarities.m, sum(part.rows for part in columns)) >= SMALLEST_LOG


@dataclass(frozen=True)
class Survey:
    """How bank queries see a gallery. largest: [m, k], the k largest similarities of each, the largest first.
    deviation: the standard deviation of all similarities."""

    largest: np.ndarray
    deviation: float


def survey(similarities: Similarities, targets: Vectors, k: int) -> Survey:
    """Of all bank rows and `targets`, in one pass: see `Survey`."""
    largest = torch.empty((0, similarities.m), dtype=torch.float64)
    count, total, squares, origin = 0, 0.0, 0.0, None
    for tile in similarities.tiles(targets, "looking at the bank"):
        s = _with_own(tile).cpu().double()
        origin = float(s.mean()) if origin is None else origin  # so that squares keep their digits
        count, total = count + s.numel(), total + float((s - origin).sum())
        squares += float(((s - origin) ** 2).sum())
        part = s.topk(min(k, len(s)), dim=0).values
        largest = torch.cat([largest, part]).topk(min(k, len(largest) + len(part)), dim=0).values
    return Survey(largest.T.numpy(), math.sqrt(max(squares / count - (total / count) ** 2, 0.0)))


def _with_own(tile: Tile) -> torch.Tensor:
    """s(b_u, t) of a tile, in new memory where it differs from what the tile holds."""
    return tile.s + tile.own.to(tile.s.device, tile.s.dtype)[:, None] if tile.own.any() else tile.s


def kth_largest(similarities: Similarities, targets: Vectors, k: int) -> np.ndarray:
    """The k-th largest s(b_u, t) over the targets for every bank row, k <= n: float64 [m]."""
    device = _accumulator_device(similarities)
    largest = torch.empty((0, similarities.m), dtype=torch.float64, device=device)
    for tile in similarities.tiles(targets, "activation set"):
        s = tile.s.to(device, torch.float64) + tile.own.to(device)[:, None]
        both = torch.cat([largest, s])
        largest = both.topk(min(k, len(both)), dim=0).values
    return largest[-1].cpu().numpy()


def reaches(similarities: Similarities, targets: Vectors, thresholds: np.ndarray) -> np.ndarray:
    """Whether s(b_u, t) is at least `thresholds` [m] for some bank row, to float32 rounding: bool [n]."""
    levels = torch.from_numpy(np.asarray(thresholds, np.float64))
    slack = 1e-6 * max(1.0, float(levels.abs().max()))
    result = np.empty(targets.rows, bool)
    for tile in similarities.tiles(targets, "activation set", weights=-levels):
        result[tile.start : tile.stop] = (tile.s.amax(dim=1).cpu().double() + tile.own >= -slack).numpy()
    return result


def count_larger(similarities: Similarities, targets: Vectors, levels: np.ndarray) -> np.ndarray:
    """How many of s(b_1, t) ... s(b_m, t) are larger than `levels` [c, n], for every target: int64 [c, n]."""
    result = np.empty(levels.shape, np.int64)
    for tile in similarities.tiles(targets, "ranks in the bank"):
        part = slice(tile.start, tile.stop)
        own = tile.own.to(tile.s.device, tile.s.dtype)
        asked = torch.from_numpy(np.ascontiguousarray(levels[:, part].T)).to(tile.s) - own[:, None]
        below = torch.searchsorted(tile.s.sort(dim=1).values, asked.contiguous(), right=True)
        result[:, part] = similarities.m - below.cpu().numpy().T
    return result


@dataclass(frozen=True)
class Scaling:
    """What `sinkhorn` found. log_alpha: [m], float64. log_sums: LSE_u( s(b_u, t)/tau + log_alpha_u ) of the first
    columns [n], float64, to 1e-4 where the exponentials were held; None where they were not. answers: what was left
    out. k_means: the mean of the k largest s(b_u, t) of the first columns [n], float64, if asked for."""

    log_alpha: np.ndarray
    log_sums: np.ndarray | None
    answers: Answers | None = None
    k_means: np.ndarray | None = None


def sinkhorn(
    similarities: Similarities,
    columns: list[Vectors],
    tau: float,
    iterations: int,
    masses: list[float] | None = None,
    answers: Answers | Literal["seek"] | None = None,
    k: int | None = None,
) -> Scaling:
    """log alpha after `iterations` of Sinkhorn over the targets in `columns` taken together.

    DBSN algorithm A1 in the log domain, from log beta_j = log w_j:

        log alpha_u = log v_u - LSE_j( s(b_u, t_j)/tau + log beta_j )
        log beta_j  = log(w_j / n) - LSE_u( s(b_u, t_j)/tau + log alpha_u )

    v is the mass of each bank row, 1/m, or in proportion to the weights of `answers`. w_j is the mass of the part t_j
    is in, 1 by default: how many targets each of a sample stands for; n is their sum. What `answers` leaves out (in the
    first of `columns`, the gallery, each target's largest, too) has no part in any sum; "seek" finds them in the first
    pass. k: the first pass gives the mean of the k largest, too.

    The log beta that ends the last iteration reads only log alpha, so it is a weighted `log_sum_exp` over
    any targets and is left to the caller. One pass over the similarities is one iteration: a tile's
    exponentials e = exp(s/tau + log alpha) give its beta = w / (n sum_u e), and e @ beta is the same tile's
    share of the next log alpha. No row of that product can underflow: each log alpha gives every bank row a
    share of 1/m over n columns, so some target holds at least 1/(m n) of it beside a column total of at most 1.

    Raises InputError where tau is below the rounding of the similarities, for which that does not hold.
    """
    m, masses = similarities.m, masses or [1.0] * len(columns)
    n = sum(part.rows * mass for part, mass in zip(columns, masses, strict=True))
    kernel = _Kernel(similarities, columns, tau, k)
    if answers == "seek":
        if not _may_be_log(similarities, columns):
            answers = None
        elif kernel.serves_first_iteration:
            answers = kernel.seek()
        else:
            answers = find_answers(similarities, columns)
    kernel.answers = answers
    weights = np.ones(m) if answers is None else answers.weights
    log_mass = torch.from_numpy(np.log(weights / weights.sum()))
    if kernel.serves_first_iteration:
        total = _accumulator(similarities)
        for tile in kernel.tiles(torch.zeros(m, dtype=torch.float64), "Sinkhorn iteration 1"):
            total += tile.row_sums().to(total) * masses[tile.part]
        log_sum = total.cpu().log()
    else:
        log_sum = kernel.log_sum_over_targets(masses)
    log_alpha = _shares(log_mass - log_sum)
    for iteration in range(2, iterations + 1):
        total = _accumulator(similarities)
        for tile in kernel.tiles(log_alpha, f"Sinkhorn iteration {iteration} of {iterations}"):
            n_beta = masses[tile.part] / _product(torch.matmul, tile.exponentials, tile.weights)
            total += (_product(torch.matmul, n_beta, tile.exponentials) * tile.weights).to(total)
        log_alpha = _shares(log_alpha + log_mass - (total.cpu() / n).log())
    return Scaling(log_alpha.numpy(), kernel.held_log_sums(log_alpha), answers, kernel.k_means)


def _shares(log_alpha: torch.Tensor) -> torch.Tensor:
    """`log_alpha` [m] with the smallest in the place of what is infinite: a bank row has no share where all its entries
    are left out, as those of a query that is there many times, and then no sum reads its weight."""
    finite = torch.isfinite(log_alpha)
    smallest = log_alpha[finite].min() if finite.any() else torch.zeros((), dtype=log_alpha.dtype)
    return torch.where(log_alpha == math.inf, smallest, log_alpha)


@dataclass(frozen=True)
class _Exponentials:
    """exp( s(b_u, t_j)/tau + log alpha_u ) of some targets of a part of the columns: `exponentials` [b, m] x
    `weights` [m] x exp(`log_scale`) [b]."""

    part: int
    exponentials: torch.Tensor
    weights: torch.Tensor
    log_scale: torch.Tensor

    def row_sums(self) -> torch.Tensor:
        """Their sum over the targets: [m]. At log alpha = 0 alone, where no value is too large."""
        scale = self.log_scale.exp().to(self.exponentials)
        return _product(torch.matmul, scale, self.exponentials) * self.weights


class _Kernel:
    """exp( s(b_u, t_j)/tau + log alpha_u ), tile by tile.

    Where the memory budget has room for all of it, the tiles of one iteration serve the next ones too, with
    weights exp(change of log alpha); so an iteration costs two products with a vector instead of one with a matrix.
    They are held in float32 or, where that has no room and similarities are not large, in float16: see `HALF_PEAK`.

    answers: the entries that are left out, once they are known. k_means: see `Scaling`, after the first product.
    """

    def __init__(self, similarities: Similarities, columns: list[Vectors], tau: float, k: int | None):
        self._similarities, self._columns, self._tau = similarities, columns, tau
        self._rows = sum(part.rows for part in columns)
        size, compute = self._rows * similarities.m, similarities.compute
        enough = min(self._rows, similarities.m) >= HALF_TERMS
        dtypes = [dtype for dtype in compute.dtypes() if dtype is not torch.float16 or enough]
        self._dtype = next((dtype for dtype in dtypes if size * dtype.itemsize <= compute.bytes()), None)
        self._held: list[_Exponentials] = []
        self._reference = torch.zeros(0)
        self.answers: Answers | None = None
        self._nearest: Nearest | None = None
        self._k, self.k_means = k, None if k is None else np.empty(columns[0].rows)

    @property
    def serves_first_iteration(self) -> bool:
        """Whether exponentials at log alpha = 0 neither overflow nor vanish over all targets."""
        return self._similarities.metric is Metric.COSINE and 1 / self._tau <= SAFE_EXPONENT

    def tiles(self, log_alpha: torch.Tensor, what: str) -> Iterator[_Exponentials]:
        """All columns, in order. A tile is overwritten by the next."""
        if not self._serves(log_alpha):
            yield from self._multiplied(log_alpha, what)
            return
        change = log_alpha - self._reference
        largest, done = change.max(), 0
        dtype = self._held[0].exponentials.dtype
        weights = (change - largest).exp().to(torch.float32 if dtype is torch.float16 else dtype)
        weights = weights.to(self._similarities.device)
        scratch = torch.empty(0)
        for held in self._held:
            exponentials = held.exponentials
            if exponentials.dtype is torch.float16:
                if scratch.shape != exponentials.shape:
                    scratch = torch.empty_like(exponentials, dtype=torch.float32)
                exponentials = scratch.copy_(exponentials)
            yield _Exponentials(held.part, exponentials, weights, held.log_scale + largest)
            done += len(exponentials)
            self._similarities.compute.report(what, done, self._rows)

    def held_log_sums(self, log_alpha: torch.Tensor) -> np.ndarray | None:
        """LSE_u( s(b_u, t)/tau + log_alpha_u ) for the first columns, if that needs no multiplication."""
        if not self._serves(log_alpha):
            return None
        tiles = itertools.takewhile(lambda tile: tile.part == 0, self.tiles(log_alpha, "log-sum-exp"))
        totals = ((_product(torch.matmul, tile.exponentials, tile.weights), tile.log_scale) for tile in tiles)
        sums = [total.cpu().double().log() + log_scale for total, log_scale in totals]
        self._similarities.compute.report("log-sum-exp", self._rows, self._rows)
        return torch.cat(sums).numpy()

    def _serves(self, log_alpha: torch.Tensor) -> bool:
        if not self._held:
            return False
        change = log_alpha - self._reference
        return float(change.max() - change.min()) <= SAFE_DRIFT[self._held[0].exponentials.dtype]

    def seek(self) -> Answers:
        """The answers, found in a product that holds exponentials at log alpha = 0. Those of the targets that are an
        answer are multiplied again, with what is then left out; of all others only the largest is, at once."""
        self._nearest = Nearest(self._similarities.m)
        for _ in self.tiles(torch.zeros(self._similarities.m, dtype=torch.float64), "answers of the bank"):
            pass
        found, self._nearest = self._nearest, None
        self.answers = found.answers
        if self._held:
            self._multiply_again(np.unique(found.rows))
        return self.answers

    def _multiply_again(self, rows: np.ndarray) -> None:
        """Overwrites what is held of some targets, numbered through all columns, ascending."""
        assert self._room is not None
        first = 0
        for part, targets in enumerate(self._columns):
            inside = rows[(rows >= first) & (rows < first + targets.rows)]
            if inside.size:
                some = as_vectors(taken(targets, inside - first, self._similarities.metric), targets.name)
                for tile in self._scaled_tiles(part, some, "answers of the bank", None, inside - first):
                    exponentials, log_scale = self._holdable(*_exponentials(tile), tile)
                    places = torch.from_numpy(inside[tile.start : tile.stop])
                    self._room[places.to(self._room.device)] = exponentials.to(self._room.dtype)
                    self._log_scales[places] = log_scale
            first += targets.rows

    def log_sum_over_targets(self, masses: list[float]) -> torch.Tensor:
        """LSE_j( s(b_u, t_j)/tau + log w_j ) for every bank row: float64 [m], carried from tile to tile with its
        peak."""
        total = _accumulator(self._similarities)
        peak = torch.full_like(total, -math.inf)
        for part, (targets, mass) in enumerate(zip(self._columns, masses, strict=True)):
            for tile in self._scaled_tiles(part, targets, "Sinkhorn iteration 1", None):
                s = tile.s.add_(tile.own.to(tile.s.device, tile.s.dtype)[:, None])
                # A row may have nothing but what is left out so far: -inf less itself would be no number.
                highest = torch.maximum(peak, s.amax(dim=0).to(peak)).clamp(min=torch.finfo(s.dtype).min)
                share = s.sub_(highest.to(s)).exp_().sum(dim=0).to(total) * mass
                total = total * (peak - highest).exp() + share
                peak = highest
        return (peak + total.log()).cpu()

    def _scaled_tiles(
        self,
        part: int,
        targets: Vectors,
        what: str,
        log_alpha: torch.Tensor | None,
        numbers: np.ndarray | None = None,
    ) -> Iterator[Tile]:
        """Tiles of s/tau + log alpha over `targets` of a part, less what is left out. Without log alpha they also serve
        who asked for the nearest or for the mean of the k largest. numbers: of the targets, if not 0, 1, 2 ..."""
        out = None if self.answers is None else LeftOut(self.answers.levels, largest=part == 0)
        scale, first = 1 / self._tau, sum(columns.rows for columns in self._columns[:part])
        for tile in self._similarities.tiles(targets, what, scale=scale, weights=log_alpha, left_out=out):
            _require_resolution(tile, self._tau)
            if log_alpha is None and self._nearest is not None:
                self._nearest.see(tile, first, scale)
                if part == 0:
                    _leave_largest_out(tile)
            if log_alpha is None and self._k is not None and self.k_means is not None and part == 0:
                where = slice(tile.start, tile.stop) if numbers is None else numbers[tile.start : tile.stop]
                mean = MeanOfLargest(self._k).of(replace(tile, s=tile.s.clone()))
                self.k_means[where] = (mean * self._tau).numpy()
            yield tile

    def _multiplied(self, log_alpha: torch.Tensor, what: str) -> Iterator[_Exponentials]:
        self._held, self._reference = [], log_alpha
        ones = torch.ones(self._similarities.m, device=self._similarities.device)
        weights, room, done = log_alpha if bool(log_alpha.any()) else None, self._room, 0
        for part, targets in enumerate(self._columns):
            for tile in self._scaled_tiles(part, targets, what, weights):
                exponentials, peak = _exponentials(tile)
                yield _Exponentials(part, exponentials, ones.to(exponentials.dtype), peak + tile.own)
                if room is None:
                    continue
                if room.dtype is torch.float16 and exponentials.dtype is torch.float64:
                    self._held, room = [], None  # what is too large for float32 is so for float16
                    continue
                exponentials, log_scale = self._holdable(exponentials, peak, tile)
                rows = slice(done, done + len(exponentials))
                kept, self._log_scales[rows] = room[rows].copy_(exponentials), log_scale
                self._held.append(_Exponentials(part, kept, ones, self._log_scales[rows]))
                done = rows.stop

    def _holdable(
        self, exponentials: torch.Tensor, peak: torch.Tensor, tile: Tile
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exponentials, overwritten, in the range of the type they are held in, and the log of their scale [b]."""
        log_scale = peak + tile.own
        if self._dtype is not torch.float16:
            return exponentials, log_scale
        largest = exponentials.amax(dim=1, keepdim=True)
        return exponentials.mul_(HALF_PEAK / largest), log_scale + (largest[:, 0].cpu().double() / HALF_PEAK).log()

    @cached_property
    def _log_scales(self) -> torch.Tensor:
        return torch.zeros(self._rows, dtype=torch.float64)

    @cached_property
    def _room(self) -> torch.Tensor | None:
        if self._dtype is None:
            return None
        return torch.empty((self._rows, self._similarities.m), dtype=self._dtype, device=self._similarities.device)


def _require_resolution(tile: Tile, tau: float) -> None:
    """Raises InputError where rounding alone can move an exponent by 1 and more. Then a bank row's share, in exact
    arithmetic at least 1/(m n) of some target, can round to 0, and whether it does differs from one CPU to another."""
    if not tile.bound * torch.finfo(tile.s.dtype).eps < 1:  # nor is it NaN
        raise InputError(
            f"tau={tau:.4g} is out of proportion to the similarities of these vectors: it is below their rounding; "
            "use a larger one, such as the default"
        )


def _accumulator(similarities: Similarities) -> torch.Tensor:
    return torch.zeros(similarities.m, dtype=torch.float64, device=_accumulator_device(similarities))


def _accumulator_device(similarities: Similarities) -> torch.device:
    return torch.device("cpu") if similarities.device.type == "mps" else similarities.device
