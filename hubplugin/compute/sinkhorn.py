"""Sinkhorn in the log domain: one pass over the similarities an iteration.

`Kernel` is exp( s(b_u, t_j)/tau + log alpha_u ), block by block, kept between the iterations where there is room;
`sinkhorn` iterates, and never asks how the kernel is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hubplugin.compute.device import Array, Compute, multiply, to_host
from hubplugin.compute.reductions import Answers, exponentials, topk_mean
from hubplugin.compute.similarities import AnswerMask, Similarities
from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin.vectors import Vectors

SAFE_DRIFT = {4: 20.0, 2: 12.0}
"""By bytes of a number: while no log alpha has moved from another by more, kept exponentials lose nothing that counts.
What lies below the type's range beside its column's peak (87 in the exponent, for halves 26) stays far below it."""

HALF_TERMS = 256
"""Targets, and different bank rows, from which on halves will do: what they round off each exponential, up to 5e-4 of
it, averages out, and log alpha comes within 1e-5 of float64's (the tests)."""

HALF_TAU = 0.1
"""The largest temperature with which K is kept in halves: a log sum of which one term is nearly all is then off by up
to 5e-4, an offset by tau times that."""

NARROW = 40.0
"""Exponents of at most this size: beside a row's largest none vanishes in float32, which ends at exp(-87)."""

KEPT_SHARE = 0.8
"""Of the memory, for what is kept between iterations: the rest is for the sample, blocks of targets and tiles."""

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
    """The result of `sinkhorn`. log_alpha: [m], float64. log_sums: LSE_u( s(b_u, t)/tau + log_alpha_u ) of the first
    columns [n], float64, to 5e-4 where the exponentials were kept in halves; None where none were. topk_means: the mean
    of the k largest s(b_u, t) of the first columns [n], float64, if asked for."""

    log_alpha: np.ndarray
    log_sums: np.ndarray | None
    topk_means: np.ndarray | None


def count_cacheable(m: int, compute: Compute, tau: float) -> int:
    """How many targets find room in the memory of `compute` beside a bank of `m`, so that one product serves all
    iterations at `tau`."""
    return int(KEPT_SHARE * compute.bytes()) // (m * (2 if tau <= HALF_TAU else 4))


class Kernel:
    """K = exp( s(b_u, t_j)/tau + log alpha_u ) [n, m], block by block.

    Where memory has room for all of K, it is kept: later iterations multiply it by two vectors, K w and K' beta with
    w = exp(change of log alpha), instead of multiplying matrices. It is kept in float32 or, where that has no room, in
    half precision: see `HALF_TERMS`.

    thresholds: those of an `AnswerMask` [m]; its `largest` is hidden in the first columns alone. k: see `Scaling`.
    distinct: how many of the bank rows differ.
    """

    def __init__(
        self,
        similarities: Similarities,
        columns: Sequence[Columns],
        tau: float,
        thresholds: np.ndarray | None,
        k: int | None,
        distinct: int,
    ):
        self._similarities, self._library, self._tau = (
            similarities,
            similarities.library,
            tau,
        )
        self._columns, self._thresholds, self._k = columns, thresholds, k
        library, m, xp = self._library, similarities.m, self._library.xp
        self._gallery, self._n = (
            columns[0].targets.rows,
            sum(part.targets.rows for part in columns),
        )
        self._mass = xp.concat(
            [
                library.full((part.targets.rows,), part.mass, xp.float32)
                for part in columns
            ]
        )
        self._log_scale = library.empty((self._n,), library.accumulator)
        self._topk_means = (
            None if k is None else library.empty((self._gallery,), library.accumulator)
        )
        widths = (
            [4, 2] if min(self._n, distinct) >= HALF_TERMS and tau <= HALF_TAU else [4]
        )
        room = KEPT_SHARE * similarities.compute.bytes() / (self._n * m)
        self._width = next(
            (width for width in widths if width <= room), 0
        )  # bytes of a number; 0: nothing is kept
        self._kept = (
            library.empty((self._n, m), {4: xp.float32, 2: library.half}[self._width])
            if self._width
            else None
        )
        self._reference = np.zeros(m)  # the log alpha of what is kept

    @property
    def topk_means(self) -> np.ndarray | None:
        return (
            None
            if self._topk_means is None
            else to_host(self._topk_means).astype(np.float64)
        )

    def first_log_sums(self) -> np.ndarray:
        """LSE_j( s(b_u, t_j)/tau + log w_j ) for every bank row: float64 [m]. -inf where all of it is hidden."""
        library, xp = self._library, self._library.xp
        sums = library.full((self._similarities.m,), -math.inf)
        is_narrow = (
            self._similarities.metric is Metric.COSINE
            and self._similarities.longest / self._tau <= NARROW
        )
        for rows, x in self._exponents("Sinkhorn iteration 1"):
            if (
                self._topk_means is not None
                and self._k is not None
                and rows.stop <= self._gallery
            ):
                self._topk_means[rows] = topk_mean(x, self._k, library) * self._tau
            mass, peak = self._mass[rows], library.full((), 0.0)
            if not is_narrow:
                peak = xp.clip(xp.max(x, axis=0), min=float(xp.finfo(x.dtype).min))
                share = multiply(xp.exp(x - peak).T, xp.astype(mass, x.dtype))
            values, log_scale = exponentials(x, library)
            if is_narrow:  # one exponential serves both directions
                share = multiply(
                    values.T, xp.astype(mass * xp.exp(log_scale), values.dtype)
                )
            with np.errstate(divide="ignore"):
                sums = xp.logaddexp(sums, xp.log(share) + peak)
            self._keep(rows, values, log_scale)
        return to_host(sums).astype(np.float64)

    def shares(self, log_alpha: np.ndarray, label: str) -> np.ndarray:
        """What each bank row has of the targets under `log_alpha` [m], each of which has its mass w_j to give: float64
        [m]. `label` names the work, for progress."""
        total = self._library.full((self._similarities.m,), 0.0)
        for rows, values, weights in self._blocks(log_alpha, label):
            n_beta = self._mass[rows] / multiply(values, weights)
            total += multiply(values.T, n_beta) * weights
        return to_host(total).astype(np.float64)

    def log_sums(self, log_alpha: np.ndarray) -> np.ndarray | None:
        """LSE_u( s(b_u, t)/tau + log_alpha_u ) for the first columns, if that needs no multiplication of matrices."""
        if not self._serves(log_alpha):
            return None
        sums, xp = (
            self._library.empty((self._n,), self._library.accumulator),
            self._library.xp,
        )
        for rows, values, weights in self._blocks(log_alpha, "log-sum-exp"):
            if rows.start < self._gallery:
                sums[rows] = xp.log(multiply(values, weights)) + self._log_scale[rows]
        return to_host(sums[: self._gallery]) + float(
            (log_alpha - self._reference).max()
        )

    def _serves(self, log_alpha: np.ndarray) -> bool:
        """True if what is kept serves another log alpha."""
        return (
            self._width > 0
            and float(np.ptp(log_alpha - self._reference)) <= SAFE_DRIFT[self._width]
        )

    def _blocks(
        self, log_alpha: np.ndarray, label: str
    ) -> Iterator[tuple[slice, Array, Array]]:
        """K in order, as rows, values [b, m] and weights w [m]: values * w is K but for a factor of each row, see
        `_log_scale`, and one of all. A block may overwrite the one before."""
        library, m = self._library, self._similarities.m
        if not self._serves(log_alpha):
            self._reference, of_tile = log_alpha, library.like(log_alpha)
            for rows, x in self._exponents(label):
                x += of_tile(x)
                values, log_scale = exponentials(x, library)
                yield rows, values, library.xp.ones_like(values[0])
                self._keep(rows, values, log_scale)
            return
        assert self._kept is not None
        change, height = log_alpha - self._reference, self._similarities.tile_rows()
        if library.is_on_cpu:
            height = max(BLOCK_BYTES * library.threads // (4 * m), 1)
        weights = library.to_device(np.exp(change - change.max()), library.xp.float32)
        scratch = (
            None
            if self._width == 4
            else library.empty((min(height, self._n), m), library.xp.float32)
        )
        for start in range(0, self._n, height):
            rows = slice(start, min(start + height, self._n))
            values = self._kept[rows]
            if scratch is not None:
                library.from_halves(values, scratch[: len(values)])
                values = scratch[: len(values)]
            yield rows, values, weights
            self._similarities.compute.report(label, rows.stop, self._n)

    def _exponents(self, label: str) -> Iterator[tuple[slice, Array]]:
        """s/tau of all columns with the rows, tile by tile [b, m], with -inf where it is hidden."""
        first = 0
        for part in self._columns:
            mask = None
            if self._thresholds is not None:
                mask = AnswerMask(self._thresholds, largest=part is self._columns[0])
            for tile in self._similarities.tiles(
                part.targets, label, scale=1 / self._tau, mask=mask
            ):
                if (
                    not tile.bound * self._library.xp.finfo(tile.s.dtype).eps < 1
                ):  # which NaN is not
                    raise InputError(
                        f"tau={self._tau:.4g} is out of proportion to the similarities of these vectors: it is below "
                        "their rounding; use a larger one, such as the default"
                    )
                yield slice(first + tile.rows.start, first + tile.rows.stop), tile.s
            first += part.targets.rows

    def _keep(self, rows: slice, values: Array, log_scale: Array) -> None:
        """Keeps a block of K if there is room; it may overwrite `values`."""
        if self._kept is None:
            return
        self._log_scale[rows] = log_scale
        if self._width == 4:
            self._kept[rows] = values
            return
        self._log_scale[rows] -= math.log(self._library.half_peak)
        self._library.to_halves(
            self._library.xp.astype(values, self._library.xp.float32, copy=False),
            self._kept[rows],
        )


def sinkhorn(
    similarities: Similarities,
    columns: Sequence[Columns],
    tau: float,
    iterations: int,
    same: np.ndarray,
    answers: Answers | None = None,
    k: int | None = None,
) -> Scaling:
    """Runs Sinkhorn over the targets of all columns taken together: DBSN algorithm A1 in the log domain.

    From log beta_j = log w_j:

        log alpha_u = log v_u - LSE_j( s(b_u, t_j)/tau + log beta_j )
        log beta_j  = log(w_j / n) - LSE_u( s(b_u, t_j)/tau + log alpha_u )

    v is the mass of each bank row, 1/m, or in proportion to the weights of `answers`. w_j is the mass of target j; n is
    the sum of them.

    The log beta that ends the last iteration reads only log alpha, so it is a weighted log-sum-exp over any targets and
    is left to the caller. One pass over the similarities is one iteration: a block of K gives its beta = w / (n K 1),
    and K' beta is the same block's share of the next log alpha. No row of that product can underflow: each log alpha
    gives every bank row a share of 1/m over n columns, so some target holds at least 1/(m n) of it beside a column
    total of at most 1.

    Args:
        similarities: those of the bank.
        columns: the targets; the first are the gallery.
        tau: the temperature, in units of the similarity.
        iterations: how many passes.
        same: the first bank row that is the same as each [m].
        answers: the pairs that have no part in any sum; in the gallery each target's largest, too.
        k: the first pass gives the mean of the k largest of each target, too.

    Returns:
        log alpha, and what else the passes gave.

    Raises:
        InputError: tau is below the rounding of the similarities, where a row may underflow.
    """
    n = sum(part.targets.rows * part.mass for part in columns)
    thresholds = None if answers is None else answers.thresholds
    kernel = Kernel(similarities, columns, tau, thresholds, k, len(np.unique(same)))
    weights = np.ones(similarities.m) if answers is None else answers.weights
    log_mass = np.log(weights / weights.sum())
    log_alpha = _balance(log_mass, kernel.first_log_sums(), same)
    for iteration in range(2, iterations + 1):
        shares = kernel.shares(
            log_alpha, f"Sinkhorn iteration {iteration} of {iterations}"
        )
        with np.errstate(
            divide="ignore"
        ):  # a bank row of which all is hidden has no share
            log_alpha = _balance(log_alpha + log_mass, np.log(shares / n), same)
    return Scaling(log_alpha, kernel.log_sums(log_alpha), kernel.topk_means)


def _balance(
    log_alpha: np.ndarray, log_sums: np.ndarray, same: np.ndarray
) -> np.ndarray:
    """`log_alpha` less `log_sums` [m], the same for all copies of a query, with the smallest in the place of what is
    infinite. same: see `sinkhorn`.

    Where a query that is there twice is the largest of a target, it is chance which copy is hidden, and another one
    where the model is asked later. With one weight for all copies, by the mean of their sums, that changes nothing. A
    bank row has no share where all its entries are hidden, as those of a query that is there many times. Then no sum
    reads its weight.
    """
    total = np.full(len(same), -math.inf)
    np.logaddexp.at(total, same, log_sums)
    balanced = log_alpha - (
        total[same] - np.log(np.bincount(same, minlength=len(same))[same])
    )
    finite = np.isfinite(balanced)
    smallest = balanced[finite].min() if finite.any() else 0.0
    return np.where(balanced == math.inf, smallest, balanced)
