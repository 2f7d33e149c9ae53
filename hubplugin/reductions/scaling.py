"""Sinkhorn in the log domain: one pass over the similarities an iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from hubplugin.reductions.answers import Answers
from hubplugin.reductions.kernel import Columns, Kernel
from hubplugin.reductions.similarities import LeftOut, Similarities
from hubplugin.reductions.spread import SpreadKernel
from hubplugin.vectors import Spread


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
    columns: Sequence[Columns],
    tau: float,
    iterations: int,
    answers: Answers | Literal["seek"] | None = None,
    k: int | None = None,
) -> Scaling:
    """log alpha after `iterations` of Sinkhorn over the targets in `columns` taken together.

    DBSN algorithm A1 in the log domain, from log beta_j = log w_j:

        log alpha_u = log v_u - LSE_j( s(b_u, t_j)/tau + log beta_j )
        log beta_j  = log(w_j / n) - LSE_u( s(b_u, t_j)/tau + log alpha_u )

    v is the mass of each bank row, 1/m, or in proportion to the weights of `answers`. w_j is the mass of target j; n is
    the sum of them. What `answers` leaves out (in the
    first of `columns`, the gallery, each target's largest, too) has no part in any sum; "seek" finds them in the first
    pass. k: the first pass gives the mean of the k largest, too.

    The log beta that ends the last iteration reads only log alpha, so it is a weighted `log_sum_exp` over
    any targets and is left to the caller. One pass over the similarities is one iteration: a tile's
    exponentials e = exp(s/tau + log alpha) give its beta = w / (n sum_u e), and e @ beta is the same tile's
    share of the next log alpha. No row of that product can underflow: each log alpha gives every bank row a
    share of 1/m over n columns, so some target holds at least 1/(m n) of it beside a column total of at most 1.

    Raises InputError where tau is below the rounding of the similarities, for which that does not hold.
    """
    m, n = similarities.m, sum(part.targets.rows * part.mass for part in columns)
    spread = isinstance(columns[0].targets, Spread)
    kernel = (SpreadKernel if spread else Kernel)(similarities, columns, tau, k)
    if answers == "seek":
        answers = kernel.find_answers()
    kernel.left_out = None if answers is None else LeftOut(answers.levels)
    weights = np.ones(m) if answers is None else answers.weights
    log_mass = torch.from_numpy(np.log(weights / weights.sum()))
    log_alpha = _finite(log_mass - kernel.first_log_sums())
    for iteration in range(2, iterations + 1):
        shares = kernel.shares(log_alpha, f"Sinkhorn iteration {iteration} of {iterations}")
        log_alpha = _finite(log_alpha + log_mass - (shares / n).log())
    return Scaling(log_alpha.numpy(), kernel.held_log_sums(log_alpha), answers, kernel.k_means)


def _finite(log_alpha: torch.Tensor) -> torch.Tensor:
    """`log_alpha` [m] with the smallest in the place of what is infinite: a bank row has no share where all its entries
    are left out, as those of a query that is there many times, and then no sum reads its weight."""
    finite = torch.isfinite(log_alpha)
    smallest = log_alpha[finite].min() if finite.any() else torch.zeros((), dtype=log_alpha.dtype)
    return torch.where(log_alpha == math.inf, smallest, log_alpha)
