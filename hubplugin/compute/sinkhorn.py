"""Sinkhorn in the log domain: one pass over the similarities an iteration.

`Kernel` is exp( s(b_u, t_j)/tau + log alpha_u ), tile by tile, held between the iterations where there is room;
`sinkhorn` iterates, and never asks how the kernel is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hubplugin.compute.device import Array, Compute, Placed, host, multiply
from hubplugin.compute.reductions import Answers, Leaver, LeftOut, MeanOfLargest, exponentials
from hubplugin.compute.similarities import Similarities
from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin.vectors import Vectors

SAFE_DRIFT = {4: 20.0, 2: 12.0}
"""By bytes of a number: while no log alpha has moved from another by more, held exponentials lose nothing that counts.
What lies below the type's range beside its column's peak (87 in the exponent, for halves under `HALF_PEAK` 26) stays
far below it."""

HALF_PEAK = 2.0**14
"""The largest half-precision number of a target: its range then ends at 4e-12 of that. What is rounded off each term,
up to 5e-4 of it, averages out over the bank and the targets: log alpha comes within 1e-5 of float64's (the tests)."""

HALF_TERMS = 256
"""Targets, and different bank rows, below which what half precision rounds off is not taken to average out."""

HALF_LARGEST = 0.5
"""The largest temperature with which anything is held in halves: what they round off log alpha is times tau in an
offset."""

HALF_TAU = 0.1
"""The largest temperature at which log sums of what is held in halves, off by up to 1e-4, are offsets within 1e-5."""

NARROW = 40.0
"""Exponents of at most this size: beside a row's largest none vanishes in float32, which ends at exp(-87)."""

BLOCK_BYTES = 1 << 20
"""A thread reads exponentials in blocks of so many bytes of float32, so that the second product of an iteration finds
them in the cache of a core. Measured where that is 2 MiB (Intel, AMX): 0.5 to 1.5 MiB are alike, 2 a tenth slower."""


@dataclass(frozen=True)
class Columns:
    """Some of the targets that Sinkhorn scales. mass: how many targets each of them stands for, where it is one of a
    sample."""

    targets: Vectors
    mass: float = 1.0


@dataclass(frozen=True)
class Scaling:
    """What `sinkhorn` found. log_alpha: [m], float64. log_sums: LSE_u( s(b_u, t)/tau + log_alpha_u ) of the first
    columns [n], float64, to 1e-4 where the exponentials were held; None where they were not. k_means: the mean of the k
    largest s(b_u, t) of the first columns [n], float64, if asked for."""

    log_alpha: np.ndarray
    log_sums: np.ndarray | None
    k_means: np.ndarray | None


@dataclass(frozen=True)
class Exponentials:
    """exp( s(b_u, t_j)/tau + log alpha_u ) of some targets of some columns: `values` [b, m] times exp(`log_scale`)
    [b]."""

    columns: Columns
    values: Array
    log_scale: Array


def count_cacheable(m: int, compute: Compute, tau: float) -> int:
    """How many targets find room beside a bank of m, so that one product serves all iterations."""
    return compute.bytes() // (m * (2 if tau <= HALF_LARGEST else 4))


class Kernel:
    """exp( s(b_u, t_j)/tau + log alpha_u ), tile by tile.

    Where the memory budget has room for all of it, the tiles of one iteration serve the next ones too, with
    weights exp(change of log alpha). So an iteration costs two products with a vector instead of one with a matrix.
    They are held in float32 or, where that has no room, in halves: see `HALF_PEAK`.

    left_out: the entries that are left out; the largest of a target in the first columns alone. k: see `Scaling`.
    distinct: how many of the bank rows differ.
    """

    def __init__(
        self,
        similarities: Similarities,
        columns: Sequence[Columns],
        tau: float,
        left_out: LeftOut | None,
        k: int | None,
        distinct: int,
    ):
        self._similarities, self._library = similarities, similarities.library
        self._tau, self._columns, self._left_out, self._k = tau, columns, left_out, k
        self._rows, m = sum(part.targets.rows for part in columns), similarities.m
        widths = [4, 2] if min(self._rows, distinct) >= HALF_TERMS and tau <= HALF_LARGEST else [4]
        room = similarities.compute.bytes()
        self._width = next((width for width in widths if self._rows * m * width <= room), 0)  # 0: nothing is held
        self._held: list[Exponentials] = []
        self._room: Array | None = None  # in one array: parts of their own would leave the memory of tiles in pieces
        self._reference = np.zeros(m)
        self._k_means: list[Array] = []

    @property
    def k_means(self) -> np.ndarray | None:
        return host(self._library.xp.concat(self._k_means)).astype(np.float64) if self._k_means else None

    def first_log_sums(self) -> np.ndarray:
        """LSE_j( s(b_u, t_j)/tau + log w_j ) for every bank row: float64 [m]. -inf where all of it is left out."""
        xp, total = self._library.xp, self._no_sums()
        narrow = self._similarities.metric is Metric.COSINE and self._similarities.longest / self._tau <= NARROW
        peak = total + (0.0 if narrow else float(xp.finfo(xp.float32).min))  # carried from tile to tile, and finite

        def look(columns: Columns, s: Array) -> None:
            nonlocal total, peak
            if self._k is not None and columns is self._columns[0]:
                self._k_means.append(MeanOfLargest(self._k).of(s, self._library) * self._tau)
            if not narrow:
                highest = xp.maximum(peak, xp.astype(xp.max(s, axis=0), peak.dtype))
                share = xp.sum(xp.exp(s - xp.astype(highest, s.dtype)), axis=0) * columns.mass
                total, peak = total * xp.exp(peak - highest) + share, highest

        for part in self._multiplied(np.zeros(self._similarities.m), "Sinkhorn iteration 1", look):
            if narrow:  # the exponentials that are held serve these sums, too
                total += multiply(part.values.T, xp.exp(part.log_scale)) * part.columns.mass
        with np.errstate(divide="ignore"):
            return host(peak + xp.log(total)).astype(np.float64)

    def shares(self, log_alpha: np.ndarray, what: str) -> np.ndarray:
        """What each bank row has of the targets, each of which has its mass w_j to give: float64 [m]."""
        total = self._no_sums()
        for part, weights in self._parts(log_alpha, what):
            for block in self._blocks(part.values, weights):
                n_beta = part.columns.mass / multiply(block, weights)
                total += multiply(block.T, n_beta) * weights
        return host(total).astype(np.float64)

    def held_log_sums(self, log_alpha: np.ndarray) -> np.ndarray | None:
        """LSE_u( s(b_u, t)/tau + log_alpha_u ) for the first columns, if that needs no multiplication."""
        if not self._serves(log_alpha) or (self._width == 2 and self._tau > HALF_TAU):
            return None
        sums, xp = [], self._library.xp
        for part, weights in self._parts(log_alpha, "log-sum-exp"):
            if part.columns is self._columns[0]:
                total = xp.concat([multiply(block, weights) for block in self._blocks(part.values, weights)])
                sums.append(xp.log(total) + part.log_scale)
        return host(xp.concat(sums)) + float((log_alpha - self._reference).max())

    def _no_sums(self) -> Array:
        return self._library.zeros((self._similarities.m,), self._library.accumulator)

    def _serves(self, log_alpha: np.ndarray) -> bool:
        return bool(self._held) and float(np.ptp(log_alpha - self._reference)) <= SAFE_DRIFT[self._width]

    def _parts(self, log_alpha: np.ndarray, what: str) -> Iterator[tuple[Exponentials, Array]]:
        """All columns, in order, of which one may overwrite the one before; and with each the weights [m] of the bank
        rows, up to a factor that all have."""
        xp = self._library.xp
        if not self._serves(log_alpha):
            for part in self._multiplied(log_alpha, what):
                yield part, xp.ones_like(part.values[0])
            return
        change, done = log_alpha - self._reference, 0
        weights = self._library.put(np.exp(change - change.max()), xp.float32)
        for part in self._held:
            yield part, weights
            done += len(part.values)
            self._similarities.compute.report(what, done, self._rows)

    def _multiplied(
        self, log_alpha: np.ndarray, what: str, look: Callable[[Columns, Array], None] | None = None
    ) -> Iterator[Exponentials]:
        """By products with the targets; what there is room for is held from then on. look: is shown each tile of
        s/tau [b, m], less what is left out, and changes nothing in it."""
        self._held, self._reference, library = [], log_alpha, self._library
        placed, scale = Placed(library, log_alpha), 1 / self._tau
        for columns in self._columns:
            leave_out = None
            if self._left_out is not None:
                largest = self._left_out.largest and columns is self._columns[0]
                leave_out = Leaver(self._similarities, replace(self._left_out, largest=largest), scale)
            for tile in self._similarities.tiles(columns.targets, what, scale=scale):
                if not tile.bound * library.xp.finfo(tile.s.dtype).eps < 1:  # which NaN is not
                    raise InputError(
                        f"tau={self._tau:.4g} is out of proportion to the similarities of these vectors: it is below "
                        "their rounding; use a larger one, such as the default"
                    )
                s = tile.s
                if leave_out is not None:
                    leave_out(s)
                if look is not None:
                    look(columns, s)
                else:
                    s += placed.like(s)
                part = Exponentials(columns, *exponentials(s, library))
                yield part
                if self._width:
                    self._hold(part)

    def _hold(self, part: Exponentials) -> None:
        """Keeps a copy in the type that is held; `part` is overwritten."""
        if self._room is None:
            dtype = self._library.xp.float32 if self._width == 4 else self._library.half
            self._room = self._library.empty((self._rows, self._similarities.m), dtype)
        start, made, log_scale = sum(len(each.values) for each in self._held), part.values, part.log_scale
        if self._width == 2:
            made *= HALF_PEAK
            log_scale = log_scale - math.log(HALF_PEAK)
        values = self._room[start : start + len(made)]
        values[:] = made
        self._held.append(Exponentials(part.columns, values, log_scale))

    def _blocks(self, values: Array, weights: Array) -> Iterator[Array]:
        """`values` [b, m] in the type of the weights; on a CPU in blocks, of which one may overwrite the one before."""
        height, library = len(values), self._library
        if library.on_cpu:
            height = max(BLOCK_BYTES * library.threads // (values.shape[1] * 4), 1)
        scratch = None
        if values.dtype != weights.dtype:
            scratch = library.empty((min(height, len(values)), values.shape[1]), weights.dtype)
        for start in range(0, len(values), height):
            block = values[start : start + height]
            if scratch is not None:
                scratch[: len(block)] = block
                block = scratch[: len(block)]
            yield block


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
    kernel = Kernel(
        similarities, columns, tau, None if answers is None else LeftOut(answers.levels), k, len(np.unique(same))
    )
    weights = np.ones(similarities.m) if answers is None else answers.weights
    log_mass = np.log(weights / weights.sum())
    log_alpha = _balanced(log_mass, kernel.first_log_sums(), same)
    for iteration in range(2, iterations + 1):
        shares = kernel.shares(log_alpha, f"Sinkhorn iteration {iteration} of {iterations}")
        with np.errstate(divide="ignore"):  # a bank row of which all is left out has no share
            log_alpha = _balanced(log_alpha + log_mass, np.log(shares / n), same)
    return Scaling(log_alpha, kernel.held_log_sums(log_alpha), kernel.k_means)


def _balanced(log_alpha: np.ndarray, log_sums: np.ndarray, same: np.ndarray) -> np.ndarray:
    """`log_alpha` less `log_sums` [m], the same for all copies of a query, with the smallest in the place of what is
    infinite. same: see `sinkhorn`.

    Where a query that is there twice is the largest of a target, it is chance which copy is left out, and another one
    where the model is asked later. With one weight for all copies, by the mean of their sums, that changes nothing. A
    bank row has no share where all its entries are left out, as those of a query that is there many times. Then no sum
    reads its weight.
    """
    total = np.full(len(same), -math.inf)
    np.logaddexp.at(total, same, log_sums)
    balanced = log_alpha - (total[same] - np.log(np.bincount(same, minlength=len(same))[same]))
    finite = np.isfinite(balanced)
    smallest = balanced[finite].min() if finite.any() else 0.0
    return np.where(balanced == math.inf, smallest, balanced)
