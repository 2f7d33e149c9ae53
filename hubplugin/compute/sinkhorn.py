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

from hubplugin.compute.device import Array, multiply, to_host
from hubplugin.compute.reductions import NARROW, Answers, exponentials, topk_mean
from hubplugin.compute.similarities import KEPT_SHARE, Similarities, Tile
from hubplugin.errors import InputError
from hubplugin.vectors import Vectors

SAFE_DRIFT = {4: 20.0, 2: 12.0}
"""The largest change of log alpha up to which kept exponentials can be used.

The key is the number of bytes per exponential. Exponentials that fell below the range
of their type, compared with their target's peak (87 in the exponent, or 26 for halves),
stay far below that peak."""

HALF_TERMS = 256
"""The fewest targets, and the fewest distinct bank rows, for halves. Halves round each
exponential by up to 5e-4, which averages out: log alpha is within 1e-5 of the float64
result (see the tests)."""

HALF_TAU = 0.1
"""The largest temperature for halves. A log sum dominated by one term is off by up to
5e-4, and an offset by tau times that."""

CONVERGED = 1e-6
"""Iterations end early if those that remain change no offset by more than this, a tenth
of the error of an offset."""


@dataclass(frozen=True)
class Scaling:
    """The result of `sinkhorn`.

    log_alpha: The log of alpha, float64 [m].
    log_sums: LSE_u( s(b_u, t)/tau + log_alpha_u ) of the gallery, float64 [g], within
        5e-4 if exponentials were kept in halves. None if none were kept.
    topk_means: The mean of the k largest s(b_u, t) of each target of the gallery,
        float64 [g]. None without k.
    """

    log_alpha: np.ndarray
    log_sums: np.ndarray | None
    topk_means: np.ndarray | None


class Kernel:
    """K = exp( s(b_u, t_j)/tau + log alpha_u ) [n, m], block by block.

    A row of K belongs to a target, and a column to a bank row. The targets are the n
    columns of DBSN, of which the first g are the gallery. Each row of K is divided by
    exp( log_scale_j ), which keeps its entries in range.

    K is kept if memory has room for all of it, in float32 or else in halves (see
    `HALF_TERMS`). Later iterations then multiply it by two vectors, K w and K' beta
    with w = exp(change of log alpha), instead of multiplying matrices.

    Args:
        similarities: The similarities of the bank. The kernel takes over their
            `products`, and the first pass turns these into K in place.
        columns: The targets; the first part is the gallery.
        mass: The number of targets that each target of the gallery stands for.
        tau: The temperature.
        thresholds: The similarities from which answers are hidden, see `Answers`. In
            the gallery, the largest other entry of each target is hidden, too.
        k: The k of `Scaling.topk_means`.
        distinct: The number of distinct bank rows.
    """

    def __init__(
        self,
        similarities: Similarities,
        columns: Sequence[Vectors],
        mass: float,
        tau: float,
        thresholds: np.ndarray | None,
        k: int | None,
        distinct: int,
    ):
        self._similarities = similarities
        self._library = library = similarities.library
        self._columns = columns
        self._tau = tau
        self._k = k
        self._thresholds: Array = None
        if thresholds is not None:
            scaled = similarities.lower(thresholds) * (1 / tau)
            self._thresholds = library.to_device(scaled)
        self._gallery = columns[0].rows
        self._n = sum(targets.rows for targets in columns)
        masses = np.ones(self._n, np.float32)
        masses[: self._gallery] = mass
        self._mass = library.to_device(masses)
        self._log_scale = library.empty((self._n,), library.accumulator)
        self.topk_means: Array = None
        if k is not None:
            self.topk_means = library.empty((self._gallery,), library.accumulator)
        self._kept = similarities.products
        self._has_products = self._kept is not None
        similarities.products = None
        # The memory for each entry of K: float32 takes 4 bytes, and halves take 2. If
        # there are products, they have that memory already.
        shape = (self._n, similarities.m)
        bytes_each = KEPT_SHARE * similarities.compute.bytes() / math.prod(shape)
        may_halve = min(self._n, distinct) >= HALF_TERMS and tau <= HALF_TAU
        self._in_halves = 2 <= bytes_each < 4 and may_halve
        if self._in_halves:
            self._kept = library.empty(shape, library.half)
        elif bytes_each >= 4 and not self._has_products:
            self._kept = library.empty(shape, library.xp.float32)
        if self._kept is None:
            self._safe_change = -1.0  # no change is safe
        else:
            self._safe_change = SAFE_DRIFT[self._kept.itemsize]
        self._kept_log_alpha = np.zeros(similarities.m)

    def first_log_sums(self) -> np.ndarray:
        """Return LSE_j( s(b_u, t_j)/tau + log w_j ) of each bank row: float64 [m].

        w_j is the mass of target j. A bank row that is hidden entirely gets -inf. This
        pass also fills `topk_means`, and keeps K for log alpha = 0.
        """
        library = self._library
        xp = library.xp
        sums = library.to_device(np.full(self._similarities.m, -math.inf))
        for tile in self._exponents("Sinkhorn iteration 1"):
            rows = tile.rows
            x = tile.s
            mass = xp.astype(self._mass[rows], x.dtype, copy=False)
            # No tile has targets of the gallery and others.
            if self._k is not None and rows.stop <= self._gallery:
                self.topk_means[rows] = topk_mean(x, self._k, library) * self._tau
            if tile.bound <= NARROW:
                # Without peaks, sums over targets and over bank rows share their terms.
                values, peaks = exponentials(x, tile.bound, library)
                tile_sums = xp.log(multiply(values.T, mass))
            else:
                lowest = float(xp.finfo(x.dtype).min)
                bank_peaks = xp.clip(xp.max(x, axis=0), min=lowest)
                values = xp.exp(x - bank_peaks)
                tile_sums = xp.log(multiply(values.T, mass)) + bank_peaks
                # K has the peak of each target instead.
                _, peaks = exponentials(x, tile.bound, library)
            sums = xp.logaddexp(sums, tile_sums)
            self._log_scale[rows] = peaks
        return to_host(sums).astype(np.float64)

    def shares(self, log_alpha: np.ndarray, label: str) -> np.ndarray:
        """Return each bank row's share of the mass of all targets: float64 [m].

        Args:
            log_alpha: The log of alpha [m].
            label: The name of this step in progress reports.
        """
        library = self._library
        change = self._change(log_alpha)
        if change is None:
            change = np.zeros_like(log_alpha)
            blocks = self._new_blocks(log_alpha, label)
        else:
            blocks = self._kept_blocks(label)
        weights = library.to_device(np.exp(change - change.max()), library.xp.float32)
        total = library.to_device(np.zeros_like(change))
        for rows, values in blocks:
            w = library.xp.astype(weights, values.dtype, copy=False)
            # n beta_j, but for the scale of row j, which the product with K' cancels.
            beta = self._mass[rows] / multiply(values, w)
            total += multiply(values.T, beta)
        return to_host(total * weights).astype(np.float64)

    def log_sums(self, log_alpha: np.ndarray) -> np.ndarray | None:
        """Return LSE_u( s(b_u, t)/tau + log_alpha_u ) of the gallery: float64 [g].

        Return None if nothing is kept, or if `log_alpha` has changed too much to reuse
        it.
        """
        library = self._library
        xp = library.xp
        change = self._change(log_alpha)
        if change is None:
            return None
        peak = float(change.max())
        weights = library.to_device(np.exp(change - peak), xp.float32)
        # For all n targets, since a kept block may reach beyond the gallery.
        sums = library.empty((self._n,), library.accumulator)
        for rows, values in self._kept_blocks("log-sum-exp"):
            if rows.start < self._gallery:
                log_sums = xp.log(multiply(values, weights))
                sums[rows] = log_sums + self._log_scale[rows]
        return to_host(sums[: self._gallery]) + peak

    def _change(self, log_alpha: np.ndarray) -> np.ndarray | None:
        """Return the change of log alpha since K was kept: float64 [m].

        Return None if K is not kept, or if log alpha has changed too unevenly to reuse
        it. An even change only rescales K.
        """
        change = log_alpha - self._kept_log_alpha
        if np.ptp(change) <= self._safe_change:  # False if the change is NaN
            return change
        return None

    def _new_blocks(
        self, log_alpha: np.ndarray, label: str
    ) -> Iterator[tuple[slice, Array]]:
        """Compute K for `log_alpha`, and yield it as `_kept_blocks` does."""
        library = self._library
        self._kept_log_alpha = log_alpha
        addend = library.to_device(log_alpha)
        largest = float(np.abs(log_alpha).max())
        for tile in self._exponents(label):
            x = tile.s
            x += library.xp.astype(addend, x.dtype, copy=False)
            bound = tile.bound + largest
            values, self._log_scale[tile.rows] = exponentials(x, bound, library)
            yield tile.rows, values

    def _kept_blocks(self, label: str) -> Iterator[tuple[slice, Array]]:
        """Yield K as it was kept, in order: a slice of rows, and their values [b, m].

        Let change be the change of log alpha since K was kept, and w = exp( change -
        max(change) ). Row j of the present K is then its kept values * w * exp(
        log_scale_j + max(change) ). A block may overwrite the one before.
        """
        library = self._library
        progress = self._similarities.compute.progress
        height = min(self._similarities.tile_rows, self._n)
        if self._in_halves:
            scratch = library.empty((height, self._similarities.m), library.xp.float32)
        for start in range(0, self._n, height):
            rows = slice(start, min(start + height, self._n))
            values = self._kept[rows]
            if self._in_halves:
                library.from_halves(values, scratch[: len(values)])
                values = scratch[: len(values)]
            yield rows, values
            if progress is not None:
                progress(label, rows.stop, self._n)

    def _exponents(self, label: str) -> Iterator[Tile]:
        """Yield s/tau of all targets, in order; hidden entries are -inf.

        The caller must turn each tile into exponentials, in place, before it asks for
        the next tile: the exponentials are then kept if there is room.
        """
        similarities = self._similarities
        library = self._library
        float32 = library.xp.float32
        scale = 1 / self._tau
        out = None
        first = 0
        for targets in self._columns:
            if self._kept is not None and not self._in_halves:
                out = self._kept[first : first + targets.rows]
            if self._has_products:  # in `_kept`, before the first pass
                tiles = similarities.scale_tiles(out, scale)
            else:
                tiles = similarities.tiles(targets, label, scale=scale, out=out)
            for tile in tiles:
                s = tile.s
                if not tile.bound * library.xp.finfo(s.dtype).eps < 1:  # also if NaN
                    raise InputError(
                        f"tau={self._tau:.4g} is too small for the similarities of "
                        "these vectors: it is below their rounding error; use a larger "
                        "tau, such as the default"
                    )
                if self._thresholds is not None:
                    similarities.hide(s, self._thresholds, largest=first == 0)
                rows = slice(first + tile.rows.start, first + tile.rows.stop)
                yield Tile(rows, s, tile.bound)
                # The tile now holds exponentials, see above.
                if self._in_halves:
                    s = library.xp.astype(s, float32, copy=False)
                    self._log_scale[rows] += library.to_halves(s, self._kept[rows])
                elif out is not None and s.dtype != float32:
                    self._kept[rows] = s
            first += targets.rows
        self._has_products = False


def sinkhorn(
    similarities: Similarities,
    columns: Sequence[Vectors],
    tau: float,
    iterations: int,
    same: np.ndarray,
    answers: Answers | None = None,
    k: int | None = None,
    mass: float = 1.0,
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
    (n K 1), and K' beta is the block's share of the next log alpha. No row of K' beta
    can underflow: after each log alpha, the entries of every bank row sum to 1/m over n
    columns. So one of them is at least 1/(m n), in a column whose sum is at most 1.

    An iteration moves log alpha no further than the iteration before did: Sinkhorn's
    maps do not expand the range of a difference (Birkhoff 1957). The iterations
    therefore end early if all that remain cannot change an offset, see `CONVERGED`.

    Args:
        similarities: The similarities of the bank.
        columns: The targets; the first part is the gallery.
        tau: The temperature, in units of the similarity.
        iterations: The number of passes, at most.
        same: The first bank row that equals each bank row, [m].
        answers: The answers, which all sums leave out. In the gallery, sums also leave
            out the largest other entry of each target.
        k: If given, the first pass also computes the mean of the k largest entries of
            each target.
        mass: The number of targets that each target of the gallery stands for, if it is
            a sample.

    Returns:
        log alpha, and the other results of the passes.

    Raises:
        InputError: tau is below the rounding error of the similarities.
    """
    n = mass * columns[0].rows + sum(targets.rows for targets in columns[1:])
    thresholds = None
    weights = np.ones(similarities.m)
    if answers is not None:
        thresholds = answers.thresholds
        weights = answers.weights
    distinct = len(np.unique(same))
    kernel = Kernel(similarities, columns, mass, tau, thresholds, k, distinct)
    log_mass = np.log(weights / weights.sum())
    with np.errstate(divide="ignore"):  # an entirely hidden bank row has no share
        log_alpha = _balance(log_mass, kernel.first_log_sums(), same)
        for iteration in range(2, iterations + 1):
            label = f"Sinkhorn iteration {iteration} of {iterations}"
            log_shares = np.log(kernel.shares(log_alpha, label) / n)
            previous = log_alpha
            log_alpha = _balance(previous + log_mass, log_shares, same)
            change = tau * float(np.ptp(log_alpha - previous))
            if change * (iterations - iteration) <= CONVERGED:
                break
    means = kernel.topk_means
    if means is not None:
        means = to_host(means).astype(np.float64)
    return Scaling(log_alpha, kernel.log_sums(log_alpha), means)


def _balance(
    log_alpha: np.ndarray, log_sums: np.ndarray, same: np.ndarray
) -> np.ndarray:
    """Return `log_alpha` minus `log_sums` [m], made equal for all copies of a query.

    If two copies are both the largest entry of a target, chance decides which copy is
    hidden, and later use of the model may hide the other copy. Equal weights for all
    copies, from the mean of their sums, make the choice irrelevant. An entirely hidden
    row gets an infinite weight, which no sum uses; the smallest weight replaces it.

    Args:
        log_alpha, log_sums: The two terms, [m].
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
