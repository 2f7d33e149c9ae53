"""Run Sinkhorn in the log domain, with one pass over the similarities per iteration.

`Kernel` computes exp( s(b_u, t_j)/tau + log alpha_u ) block by block, and keeps it
between iterations if there is room. `sinkhorn` iterates, and does not depend on how the
kernel is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hubplugin.compute.device import Array, Compute, multiply, to_host
from hubplugin.compute.reductions import Answers, exponentials, topk_mean
from hubplugin.compute.similarities import Similarities
from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin.vectors import Vectors

SAFE_DRIFT = {4: 20.0, 2: 12.0}
"""The largest change of log alpha up to which kept exponentials can be used.

The key is the number of bytes per exponential. Exponentials that fell below the range
of their type, compared with their column's peak (87 in the exponent, or 26 for halves),
stay far below that peak."""

HALF_TERMS = 256
"""The fewest targets, and different bank rows, for halves. These round each exponential
by up to 5e-4, which averages out: log alpha is within 1e-5 of the float64 result (see
the tests)."""

HALF_TAU = 0.1
"""The largest temperature for halves. A log sum dominated by one term is off by up to
5e-4, and an offset by tau times that."""

NARROW = 40.0
"""The largest exponents that do not vanish beside a row's peak in float32, whose range
ends at exp(-87)."""

KEPT_SHARE = 0.8
"""Share of the memory for the exponentials kept between iterations. The rest is for the
sample, blocks of targets and tiles."""

BLOCK_BYTES = 1 << 20
"""Bytes of float32 exponentials that a thread reads at a time, so that the second
product of an iteration finds them in the cache of a core. With a cache of 2 MiB (Intel,
AMX), 0.5 to 1.5 MiB are equally fast, and 2 MiB are a tenth slower."""


@dataclass(frozen=True)
class Columns:
    """Targets that Sinkhorn scales.

    mass: How many targets each of them stands for, if they are a sample.
    """

    targets: Vectors
    mass: float = 1.0


@dataclass(frozen=True)
class Scaling:
    """The result of `sinkhorn`.

    log_alpha: The log of alpha, float64 [m].
    log_sums: LSE_u( s(b_u, t)/tau + log_alpha_u ) of the first columns, float64 [n],
        within 5e-4 if exponentials were kept in halves. None if none were kept.
    topk_means: The mean of the k largest s(b_u, t) of the first columns, float64 [n].
        None without k.
    """

    log_alpha: np.ndarray
    log_sums: np.ndarray | None
    topk_means: np.ndarray | None


def count_cacheable(m: int, compute: Compute, tau: float) -> int:
    """Return how many targets fit in memory with a bank of `m` queries at `tau`.

    One matrix product then serves all iterations.
    """
    width = 2 if tau <= HALF_TAU else 4
    return int(KEPT_SHARE * compute.bytes()) // (m * width)


class Kernel:
    """K = exp( s(b_u, t_j)/tau + log alpha_u ) [n, m], block by block.

    K is kept if memory has room for all of it, in float32 or else in halves (see
    `HALF_TERMS`). Later iterations then multiply it by two vectors, K w and K' beta
    with w = exp(change of log alpha), instead of multiplying matrices.

    Args:
        similarities: The similarities of the bank.
        columns: The targets; the first are the gallery.
        tau: The temperature.
        answers: The thresholds [m] of the answers to hide, as in `Similarities.tiles`.
            The largest other entries are hidden in the gallery only.
        k: The k of `Scaling.topk_means`.
        distinct: The number of distinct bank rows.
    """

    def __init__(
        self,
        similarities: Similarities,
        columns: Sequence[Columns],
        tau: float,
        answers: np.ndarray | None,
        k: int | None,
        distinct: int,
    ):
        self._similarities = similarities
        self._library = library = similarities.library
        self._columns = columns
        self._tau = tau
        self._answers = answers
        self._k = k
        sizes = [part.targets.rows for part in columns]
        masses = np.array([part.mass for part in columns], np.float32)
        self._gallery = sizes[0]
        self._n = sum(sizes)
        self._mass = library.to_device(np.repeat(masses, sizes))
        self._log_scale = library.empty((self._n,), library.accumulator)
        self.topk_means: Array = None
        if k is not None:
            self.topk_means = library.empty((self._gallery,), library.accumulator)
        self._reference = np.zeros(similarities.m)  # log alpha of the kept exponentials
        self._drift = 0.0  # the safe change of log alpha; 0 if nothing is kept
        types = {4: library.xp.float32}
        if min(self._n, distinct) >= HALF_TERMS and tau <= HALF_TAU:
            types[2] = library.half
        room = KEPT_SHARE * similarities.compute.bytes() / (self._n * similarities.m)
        for width, dtype in types.items():
            if width <= room:
                self._kept = library.empty((self._n, similarities.m), dtype)
                self._drift = SAFE_DRIFT[width]
                break

    def first_log_sums(self) -> np.ndarray:
        """Return LSE_j( s(b_u, t_j)/tau + log w_j ) of each bank row: float64 [m].

        It is -inf if a whole row is hidden.
        """
        library = self._library
        xp = library.xp
        sums = library.full((self._similarities.m,), -math.inf)
        is_cosine = self._similarities.metric is Metric.COSINE
        is_narrow = is_cosine and self._similarities.longest / self._tau <= NARROW
        for rows, x in self._exponents("Sinkhorn iteration 1"):
            if self._k is not None and rows.stop <= self._gallery:
                self.topk_means[rows] = topk_mean(x, self._k, library) * self._tau
            mass = self._mass[rows]
            if is_narrow:  # one exponential serves both directions
                values, log_scale = exponentials(x, library)
                weights = xp.astype(mass * xp.exp(log_scale), values.dtype)
                log_share = xp.log(multiply(values.T, weights))
            else:
                peak = xp.clip(xp.max(x, axis=0), min=float(xp.finfo(x.dtype).min))
                share = multiply(xp.exp(x - peak).T, xp.astype(mass, x.dtype))
                log_share = xp.log(share) + peak
                values, log_scale = exponentials(x, library)
            sums = xp.logaddexp(sums, log_share)
            self._keep(rows, values, log_scale)
        return to_host(sums).astype(np.float64)

    def shares(self, log_alpha: np.ndarray, label: str) -> np.ndarray:
        """Return each bank row's share of the mass of all targets: float64 [m].

        Args:
            log_alpha: The log of alpha [m].
            label: The name of this step in progress reports.
        """
        total = self._library.full((self._similarities.m,), 0.0)
        for rows, values, weights in self._blocks(log_alpha, label):
            n_beta = self._mass[rows] / multiply(values, weights)
            total += multiply(values.T, n_beta) * weights
        return to_host(total).astype(np.float64)

    def log_sums(self, log_alpha: np.ndarray) -> np.ndarray | None:
        """Return LSE_u( s(b_u, t)/tau + log_alpha_u ) of the gallery [n].

        Return None if that would need matrix products.
        """
        if not self._serves(log_alpha):
            return None
        sums = self._library.empty((self._n,), self._library.accumulator)
        for rows, values, weights in self._blocks(log_alpha, "log-sum-exp"):
            if rows.start < self._gallery:
                log_sums = self._library.xp.log(multiply(values, weights))
                sums[rows] = log_sums + self._log_scale[rows]
        change = float((log_alpha - self._reference).max())
        return to_host(sums[: self._gallery]) + change

    def _serves(self, log_alpha: np.ndarray) -> bool:
        """Return True if the kept exponentials can be used for `log_alpha`."""
        change = float(np.ptp(log_alpha - self._reference))
        return self._drift > 0 and change <= self._drift

    def _blocks(
        self, log_alpha: np.ndarray, label: str
    ) -> Iterator[tuple[slice, Array, Array]]:
        """Yield K in order, as rows, values [b, m] and weights w [m].

        values * w is K up to a factor for each row, see `_log_scale`, and one for all.
        A block may overwrite the previous one.
        """
        library = self._library
        m = self._similarities.m
        if not self._serves(log_alpha):
            self._reference = log_alpha
            added = library.matching(log_alpha)
            for rows, x in self._exponents(label):
                x += added(x)
                values, log_scale = exponentials(x, library)
                yield rows, values, library.xp.ones_like(values[0])
                self._keep(rows, values, log_scale)
            return
        height = self._similarities.tile_rows()
        if library.is_on_cpu:
            height = max(BLOCK_BYTES * library.threads // (4 * m), 1)
        float32 = library.xp.float32
        change = log_alpha - self._reference
        weights = library.to_device(np.exp(change - change.max()), float32)
        scratch = None
        if self._kept.dtype != float32:
            scratch = library.empty((min(height, self._n), m), float32)
        for start in range(0, self._n, height):
            rows = slice(start, min(start + height, self._n))
            values = self._kept[rows]
            if scratch is not None:
                library.from_halves(values, scratch[: len(values)])
                values = scratch[: len(values)]
            yield rows, values, weights
            self._similarities.compute.report(label, rows.stop, self._n)

    def _exponents(self, label: str) -> Iterator[tuple[slice, Array]]:
        """Yield the rows and s/tau [b, m] of all columns; hidden entries are -inf."""
        first = 0
        for part in self._columns:
            for tile in self._similarities.tiles(
                part.targets,
                label,
                scale=1 / self._tau,
                answers=self._answers,
                largest=not first,
            ):
                rounding = tile.bound * self._library.xp.finfo(tile.s.dtype).eps
                if not rounding < 1:  # also if it is NaN
                    raise InputError(
                        f"tau={self._tau:.4g} is too small for the similarities of "
                        "these vectors: it is below their rounding error; use a larger "
                        "tau, such as the default"
                    )
                yield slice(first + tile.rows.start, first + tile.rows.stop), tile.s
            first += part.targets.rows

    def _keep(self, rows: slice, values: Array, log_scale: Array) -> None:
        """Keep a block of K if there is room; `values` may be overwritten."""
        if not self._drift:
            return
        library = self._library
        self._log_scale[rows] = log_scale
        if self._kept.dtype == library.xp.float32:
            self._kept[rows] = values
            return
        self._log_scale[rows] -= math.log(library.half_peak)
        values = library.xp.astype(values, library.xp.float32, copy=False)
        library.to_halves(values, self._kept[rows])


def sinkhorn(
    similarities: Similarities,
    columns: Sequence[Columns],
    tau: float,
    iterations: int,
    same: np.ndarray,
    answers: Answers | None = None,
    k: int | None = None,
) -> Scaling:
    """Run Sinkhorn over all columns: DBSN algorithm A1 in the log domain.

    Start from log beta_j = log w_j, and iterate:

        log alpha_u = log v_u - LSE_j( s(b_u, t_j)/tau + log beta_j )
        log beta_j  = log(w_j / n) - LSE_u( s(b_u, t_j)/tau + log alpha_u )

    v_u is the mass of bank row u: 1/m, or in proportion to the weights of `answers`.
    w_j is the mass of target j, and n is the sum of all w_j.

    The log beta of the last iteration depends only on log alpha. It is a weighted
    log-sum-exp over any targets, and is left to the caller.

    One pass over the similarities is one iteration: a block of K gives its beta = w /
    (n K 1), and K' beta is the block's share of the next log alpha. No row of that
    product can underflow: each log alpha gives every bank row a share of 1/m over n
    columns, so some target holds at least 1/(m n) of it, in a column whose total is at
    most 1.

    Args:
        similarities: The similarities of the bank.
        columns: The targets; the first are the gallery.
        tau: The temperature, in units of the similarity.
        iterations: The number of passes.
        same: The first bank row that equals each bank row, [m].
        answers: The answers, which all sums leave out. In the gallery, sums also leave
            out the largest other entry of each target.
        k: If given, the first pass also computes the mean of the k largest entries of
            each target.

    Returns:
        log alpha, and the other results of the passes.

    Raises:
        InputError: tau is below the rounding error of the similarities, so that a row
            may underflow.
    """
    n = sum(part.targets.rows * part.mass for part in columns)
    thresholds = None
    weights = np.ones(similarities.m)
    if answers is not None:
        thresholds = answers.thresholds
        weights = answers.weights
    kernel = Kernel(similarities, columns, tau, thresholds, k, len(np.unique(same)))
    log_mass = np.log(weights / weights.sum())
    with np.errstate(divide="ignore"):  # an entirely hidden bank row has no share
        log_alpha = _balance(log_mass, kernel.first_log_sums(), same)
        for iteration in range(2, iterations + 1):
            label = f"Sinkhorn iteration {iteration} of {iterations}"
            log_shares = np.log(kernel.shares(log_alpha, label) / n)
            log_alpha = _balance(log_alpha + log_mass, log_shares, same)
    means = kernel.topk_means
    if means is not None:
        means = to_host(means).astype(np.float64)
    return Scaling(log_alpha, kernel.log_sums(log_alpha), means)


def _balance(
    log_alpha: np.ndarray, log_sums: np.ndarray, same: np.ndarray
) -> np.ndarray:
    """Return `log_alpha` minus `log_sums` [m], made equal for all copies of a query.

    If two copies are both the largest entry of a target, chance decides which one is
    hidden, and later use of the model may hide the other. Equal weights for all copies,
    from the mean of their sums, make the choice irrelevant. An entirely hidden row has
    an infinite weight, which no sum uses; the smallest weight replaces it.

    same: The first bank row that equals each bank row, [m].
    """
    total = np.full(len(same), -math.inf)
    np.logaddexp.at(total, same, log_sums)
    copies = np.bincount(same, minlength=len(same))[same]
    balanced: np.ndarray = log_alpha - (total[same] - np.log(copies))
    is_hidden = balanced == math.inf
    if is_hidden.any():
        balanced[is_hidden] = min(balanced[np.isfinite(balanced)], default=0.0)
    return balanced
