"""Sinkhorn in the log domain: one pass over the similarities an iteration.

`Kernel` is exp( s(b_u, t_j)/tau + log alpha_u ), tile by tile, held between the iterations where there is room;
`sinkhorn` iterates, and never asks how the kernel is kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hubplugin.compute.answers import Answers
from hubplugin.compute.similarities import (
    SAFE_EXPONENT,
    Compute,
    LeftOut,
    Similarities,
    Tile,
    exponentials_of,
    full_product,
    torch,
)
from hubplugin.compute.terms import MeanOfLargest
from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin.vectors import Vectors

SAFE_DRIFT = {"float64": 20.0, "float32": 20.0, "float16": 12.0}
"""While no log alpha has moved from another by more, held exponentials lose nothing that counts: what lies below the
type's range beside its column's peak (87 in the exponent, for float16 under `HALF_PEAK` 26) stays far below it."""


HALF_PEAK = 2.0**14
"""The largest float16 of a target: its range then ends at 4e-12 of that. What is rounded off each term, up to 5e-4 of
it, averages out over the bank and the targets: log alpha comes within 1e-5 of float64's (see the tests)."""


BLOCK_BYTES = 1 << 20
"""A thread reads exponentials in blocks of so many bytes of float32, so that the second product of an iteration finds
them in the cache of a core. Measured where that is 2 MiB (Intel, AMX): 0.5 to 1.5 MiB are alike, 2 a tenth slower."""


HALF_TERMS = 256
"""Targets, and bank rows, below which what float16 rounds off is not taken to average out."""


HALF_TAU = 0.1
"""The largest temperature at which log sums of what is held in float16, off by up to 1e-4, are offsets within 1e-5."""


@dataclass(frozen=True)
class Columns:
    """Some of the targets that Sinkhorn scales. mass: how many targets each of them stands for, where it is one of a
    sample."""

    targets: Vectors
    mass: float = 1.0


@dataclass(frozen=True)
class Exponentials:
    """exp( s(b_u, t_j)/tau + log alpha_u ) of some targets of a part of the columns: `exponentials` [b, m] x
    `weights` [m] x exp(`log_scale`) [b]."""

    part: int
    exponentials: torch.Tensor
    weights: torch.Tensor
    log_scale: torch.Tensor

    def row_sums(self) -> torch.Tensor:
        """Their sum over the targets: [m]. At log alpha = 0 alone, where no value is too large."""
        scale = self.log_scale.exp().to(self.weights)
        return full_product(_over_targets, scale, self.exponentials) * self.weights


def most_held(m: int, compute: Compute) -> int:
    """How many targets find room beside a bank of m, so that one product serves all iterations."""
    return compute.bytes() // (m * (8 if compute.precision == "float64" else 2))


class Kernel:
    """exp( s(b_u, t_j)/tau + log alpha_u ), tile by tile.

    Where the memory budget has room for all of it, the tiles of one iteration serve the next ones too, with
    weights exp(change of log alpha). So an iteration costs two products with a vector instead of one with a matrix.
    They are held in float32 or, where that has no room and similarities are not large, in float16: see `HALF_PEAK`.

    left_out: the entries that are left out; the largest of a target in the first columns alone.
    k_means: see `Scaling`, NaN before a product at log alpha = 0.
    """

    def __init__(
        self,
        similarities: Similarities,
        columns: Sequence[Columns],
        tau: float,
        left_out: LeftOut | None,
        k: int | None,
    ):
        self._similarities, self._tau = similarities, tau
        self._columns, self._masses = [part.targets for part in columns], [part.mass for part in columns]
        self._rows = sum(part.rows for part in self._columns)
        size, room = self._rows * similarities.m, similarities.compute.bytes()
        dtypes = [torch.float64]
        if similarities.compute.precision != "float64":
            averages_out = min(self._rows, similarities.m) >= HALF_TERMS
            dtypes = [torch.float32, torch.float16] if averages_out else [torch.float32]
        self._dtype = next((dtype for dtype in dtypes if size * dtype.itemsize <= room), None)
        self._held: list[Exponentials] = []
        self._reference = torch.zeros(0)
        self._left_out = left_out
        self._k, self.k_means = k, None if k is None else np.full(self._columns[0].rows, np.nan)

    def first_log_sums(self) -> torch.Tensor:
        """LSE_j( s(b_u, t_j)/tau + log w_j ) for every bank row: float64 [m]."""
        if not serves_first_iteration(self._similarities, self._tau):
            return self._log_sums_over_targets()
        total = self._no_sums()
        for tile in self._tiles(torch.zeros(self._similarities.m, dtype=torch.float64), "Sinkhorn iteration 1"):
            total += tile.row_sums().to(total) * self._masses[tile.part]
        return total.cpu().log()

    def shares(self, log_alpha: torch.Tensor, what: str) -> torch.Tensor:
        """What each bank row has of the targets, each of which has its mass w_j to give: float64 [m]."""
        total = self._no_sums()
        for tile in self._tiles(log_alpha, what):
            total += (full_product(_shares_of, tile.weights, tile.exponentials) * self._masses[tile.part]).to(total)
        return total.cpu()

    def _no_sums(self) -> torch.Tensor:
        return torch.zeros(self._similarities.m, dtype=torch.float64, device=self._similarities.sums_device)

    def _tiles(self, log_alpha: torch.Tensor, what: str) -> Iterator[Exponentials]:
        """All columns, in order. A tile is overwritten by the next."""
        if not self._serves(log_alpha):
            yield from self._multiplied(log_alpha, what)
            return
        change = log_alpha - self._reference
        largest, done = change.max(), 0
        dtype = self._held[0].exponentials.dtype
        weights = (change - largest).exp().to(torch.float32 if dtype is torch.float16 else dtype)
        weights = weights.to(self._similarities.device)
        for held in self._held:
            yield replace(held, weights=weights, log_scale=held.log_scale + largest)
            done += len(held.exponentials)
            self._similarities.compute.report(what, done, self._rows)

    def held_log_sums(self, log_alpha: torch.Tensor) -> np.ndarray | None:
        """LSE_u( s(b_u, t)/tau + log_alpha_u ) for the first columns, if that needs no multiplication."""
        if not self._serves(log_alpha):
            return None
        if self._held[0].exponentials.dtype is torch.float16 and self._tau > HALF_TAU:
            return None
        tiles = itertools.takewhile(lambda tile: tile.part == 0, self._tiles(log_alpha, "log-sum-exp"))
        totals = ((full_product(_sums_of, tile.weights, tile.exponentials), tile.log_scale) for tile in tiles)
        sums = [total.cpu().double().log() + log_scale for total, log_scale in totals]
        self._similarities.compute.report("log-sum-exp", self._rows, self._rows)
        return torch.cat(sums).numpy()

    def _serves(self, log_alpha: torch.Tensor) -> bool:
        if not self._held:
            return False
        change, dtype = log_alpha - self._reference, self._held[0].exponentials.dtype
        return float(change.max() - change.min()) <= SAFE_DRIFT[str(dtype).removeprefix("torch.")]

    def _log_sums_over_targets(self) -> torch.Tensor:
        """LSE_j( s(b_u, t_j)/tau + log w_j ) for every bank row: float64 [m], carried from tile to tile with its
        peak."""
        total = self._no_sums()
        peak = torch.full_like(total, -math.inf)
        for part, (targets, mass) in enumerate(zip(self._columns, self._masses, strict=True)):
            for tile in self._scaled_tiles(part, targets, "Sinkhorn iteration 1", None):
                s = tile.s.add_(tile.own.to(tile.s.device, tile.s.dtype)[:, None])
                # A row may have nothing but what is left out so far: -inf less itself would be no number.
                highest = torch.maximum(peak, s.amax(dim=0).to(peak)).clamp(min=torch.finfo(s.dtype).min)
                share = s.sub_(highest.to(s)).exp_().sum(dim=0).to(total) * mass
                total = total * (peak - highest).exp() + share
                peak = highest
        return (peak + total.log()).cpu()

    def _scaled_tiles(self, part: int, targets: Vectors, what: str, log_alpha: torch.Tensor | None) -> Iterator[Tile]:
        """Tiles of s/tau + log alpha over `targets` of a part, less what is left out. Without log alpha they also give
        the mean of the k largest, if asked for."""
        out = self._left_out if self._left_out is None or part == 0 else replace(self._left_out, largest=False)
        scale, weights = 1 / self._tau, None if log_alpha is None else log_alpha.cpu().numpy()
        for tile in self._similarities.tiles(targets, what, scale=scale, weights=weights, left_out=out):
            if not tile.resolves_its_exponents():
                raise InputError(
                    f"tau={self._tau:.4g} is out of proportion to the similarities of these vectors: it is below their "
                    "rounding; use a larger one, such as the default"
                )
            if log_alpha is None and self._k is not None and self.k_means is not None and part == 0:
                self.k_means[tile.start : tile.stop] = MeanOfLargest(self._k).of(tile) * self._tau
            yield tile

    def _multiplied(self, log_alpha: torch.Tensor, what: str) -> Iterator[Exponentials]:
        self._held, self._reference = [], log_alpha
        ones = torch.ones(self._similarities.m, device=self._similarities.device)
        weights, holds = log_alpha if bool(log_alpha.any()) else None, self._dtype is not None
        for part, targets in enumerate(self._columns):
            for tile in self._scaled_tiles(part, targets, what, weights):
                exponentials, peak = exponentials_of(tile)
                log_scale = peak + tile.own
                yield Exponentials(part, exponentials, ones.to(exponentials.dtype), log_scale)
                if self._dtype is torch.float16 and exponentials.dtype is torch.float64:
                    self._held, holds = [], False  # what is too large for float32 is so for float16
                if not holds:
                    continue
                if self._dtype is torch.float16:
                    largest = exponentials.amax(dim=1, keepdim=True)
                    exponentials.mul_(HALF_PEAK / largest)
                    log_scale = log_scale + (largest[:, 0].cpu().double() / HALF_PEAK).log()
                self._held.append(Exponentials(part, exponentials.to(self._dtype, copy=True), ones, log_scale))


def serves_first_iteration(similarities: Similarities, tau: float) -> bool:
    """Whether exponentials at log alpha = 0 neither overflow nor vanish over all targets."""
    # A bank that a query map has mapped has lengths of its own; what rounding adds to a length of 1 does not count.
    return similarities.metric is Metric.COSINE and similarities.longest / tau <= 1.001 * SAFE_EXPONENT


def _shares_of(weights: torch.Tensor, exponentials: torch.Tensor, out: None = None) -> torch.Tensor:
    """What each bank row has of the beta = 1 / sum_u of some targets [b, m]: [m]."""
    total = torch.zeros_like(weights)
    for _, block in _blocks(exponentials, weights):
        n_beta = torch.mv(block, weights).reciprocal_()
        torch.addmv(total, block.T, n_beta, out=total)
    return total.mul_(weights)


def _sums_of(weights: torch.Tensor, exponentials: torch.Tensor, out: None = None) -> torch.Tensor:
    """sum_u of some targets [b, m]: [b]."""
    return torch.cat([torch.mv(block, weights) for _, block in _blocks(exponentials, weights)])


def _over_targets(scale: torch.Tensor, exponentials: torch.Tensor, out: None = None) -> torch.Tensor:
    """The sum over some targets [b, m] of `scale` [b] times their exponentials: [m]."""
    total = scale.new_zeros(exponentials.shape[1])
    for rows, block in _blocks(exponentials, scale):
        torch.addmv(total, block.T, scale[rows], out=total)
    return total


def _blocks(exponentials: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """`exponentials` [b, m] in the type of the `other` factor, on a CPU in blocks, and the rows of each. It may
    overwrite the one before."""
    height = len(exponentials)
    if other.device.type == "cpu":
        size = BLOCK_BYTES * torch.get_num_threads()
        height = min(height, max(size // (exponentials.shape[1] * other.itemsize), 1))
    scratch = None
    if exponentials.dtype != other.dtype:
        scratch = torch.empty_like(exponentials[:height], dtype=other.dtype)
    for start in range(0, len(exponentials), height):
        block = exponentials[start : start + height]
        yield slice(start, start + height), block if scratch is None else scratch[: len(block)].copy_(block)


@dataclass(frozen=True)
class Scaling:
    """What `sinkhorn` found. log_alpha: [m], float64. log_sums: LSE_u( s(b_u, t)/tau + log_alpha_u ) of the first
    columns [n], float64, to 1e-4 where the exponentials were held; None where they were not. k_means: the mean of the k
    largest s(b_u, t) of the first columns [n], float64, if asked for."""

    log_alpha: np.ndarray
    log_sums: np.ndarray | None
    k_means: np.ndarray | None = None


def sinkhorn(
    similarities: Similarities,
    columns: Sequence[Columns],
    tau: float,
    iterations: int,
    same: np.ndarray,
    answers: Answers | None = None,
    k: int | None = None,
) -> Scaling:
    """log alpha after `iterations` of Sinkhorn over the targets in `columns` taken together.

    DBSN algorithm A1 in the log domain, from log beta_j = log w_j:

        log alpha_u = log v_u - LSE_j( s(b_u, t_j)/tau + log beta_j )
        log beta_j  = log(w_j / n) - LSE_u( s(b_u, t_j)/tau + log alpha_u )

    v is the mass of each bank row, 1/m, or in proportion to the weights of `answers`. w_j is the mass of target j; n is
    the sum of them. What `answers` leaves out (in the first of `columns`, the gallery, each target's largest, too) has
    no part in any sum. k: the first pass gives the mean of the k largest, too. same: the first bank row that is the
    same as each [m].

    The log beta that ends the last iteration reads only log alpha, so it is a weighted `log_sum_exp` over
    any targets and is left to the caller. One pass over the similarities is one iteration: a tile's
    exponentials e = exp(s/tau + log alpha) give its beta = w / (n sum_u e), and e @ beta is the same tile's
    share of the next log alpha. No row of that product can underflow: each log alpha gives every bank row a
    share of 1/m over n columns, so some target holds at least 1/(m n) of it beside a column total of at most 1.

    Raises InputError where tau is below the rounding of the similarities, for which that does not hold.
    """
    n = sum(part.targets.rows * part.mass for part in columns)
    kernel = Kernel(similarities, columns, tau, None if answers is None else LeftOut(answers.levels), k)
    weights = np.ones(similarities.m) if answers is None else answers.weights
    log_mass = torch.from_numpy(np.log(weights / weights.sum()))
    log_alpha = _balanced(log_mass, kernel.first_log_sums(), same)
    for iteration in range(2, iterations + 1):
        shares = kernel.shares(log_alpha, f"Sinkhorn iteration {iteration} of {iterations}")
        log_alpha = _balanced(log_alpha + log_mass, (shares / n).log(), same)
    return Scaling(log_alpha.numpy(), kernel.held_log_sums(log_alpha), kernel.k_means)


def _balanced(log_alpha: torch.Tensor, log_sums: torch.Tensor, same: np.ndarray) -> torch.Tensor:
    """`log_alpha` less `log_sums` [m], the same for all copies of a query, with the smallest in the place of what is
    infinite. same: see `sinkhorn`.

    Where a query that is there twice is the largest of a target, it is chance which copy is left out, and another one
    where the model is asked later. With one weight for all copies, by the mean of their sums, that changes nothing. A
    bank row has no share where all its entries are left out, as those of a query that is there many times. Then no sum
    reads its weight.
    """
    total = np.full(len(same), -math.inf)
    np.logaddexp.at(total, same, log_sums.numpy())
    found = log_alpha - torch.from_numpy(total[same] - np.log(np.bincount(same, minlength=len(same))[same]))
    finite = torch.isfinite(found)
    smallest = found[finite].min() if finite.any() else torch.zeros((), dtype=found.dtype)
    return torch.where(found == math.inf, smallest, found)
