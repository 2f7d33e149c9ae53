"""Whether a bank can speak for a gallery: how it lies towards it, whatever the correction."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from hubplugin.methods import FitInput
from hubplugin.metric import Metric
from hubplugin.reductions import Similarities, dense, kth_largest
from hubplugin.vectors import as_vectors

SMALLEST_PAIRED, SMALLEST = 200, 400
"""Distinct bank queries below which nothing can be told: with 100 pairs, R@1 rises or falls by chance. Without pairs
more are needed: with 300, hubness falls whether recall rises or not."""

FOREIGN = 0.6
"""Share of nearest neighbours from the own set above which target bank and gallery are two populations."""

AGREEMENT, COVERAGE = 0.4, 0.75
"""Without a target bank: how well bank and gallery must agree on the hubs, and how much of the gallery the bank must
reach beside what the gallery's own vectors reach."""

COPIES, COPY = 0.5, 1e-3
"""Share of the bank above which it is made of targets instead of queries, and how far off a copy may lie, as a share of
|t|^2: what a store's codes change. On the example set the gallery as its own bank costs 2.7 points of R@1."""


@dataclass(frozen=True)
class Bank:
    """Whether a bank can speak for a gallery.

    distinct: bank queries that differ. foreign: share of nearest neighbours from the own set, of target bank and
    gallery taken together (0.5 if they are alike, 1 if they are apart; Schilling 1986); None without a target bank.
    agreement: correlation between how near the bank and how near the gallery itself comes to each target; coverage:
    share of the gallery that is nearest to a bank query, beside the share nearest to as many of its own vectors.
    Both are None with a target bank. copies: share of the bank queries that are targets of the gallery themselves.
    """

    distinct: int
    copies: float
    foreign: float | None = None
    agreement: float | None = None
    coverage: float | None = None

    def objections(self, paired: bool) -> list[str]:
        small = objection_to_size(self.distinct, paired)
        found = [small] if small else []
        if self.copies > COPIES:
            found.append(
                f"{self.copies:.0%} of the bank queries are targets of the gallery; it takes queries asked of it"
            )
        if self.foreign is not None and self.foreign > FOREIGN:
            found.append(
                f"the target bank is not like the gallery: {self.foreign:.0%} of nearest neighbours come from the own "
                f"set, where alike sets have 50% and {FOREIGN:.0%} is allowed"
            )
        if self.agreement is not None and not self.agreement >= AGREEMENT:  # NaN where all targets are alike
            found.append(
                f"bank and gallery do not agree on the hubs: correlation {self.agreement:.3f}, {AGREEMENT} is needed; "
                "a target bank tells more"
            )
        if self.coverage is not None and self.coverage < COVERAGE:
            found.append(
                f"the bank reaches {self.coverage:.0%} of what the gallery's own vectors reach, "
                f"{COVERAGE:.0%} is needed"
            )
        return found

    def __str__(self) -> str:
        parts = [f"{self.distinct} distinct queries"]
        if self.foreign is not None:
            parts.append(f"{self.foreign:.0%} of nearest neighbours from the own set (alike: 50%)")
        if self.agreement is not None and self.coverage is not None:
            parts.append(
                f"agreement on the hubs {self.agreement:.3f}, reach beside the gallery's own {self.coverage:.0%}"
            )
        return ", ".join(parts)


def objection_to_size(distinct: int, paired: bool) -> str | None:
    """What there is to say against a bank of `distinct` queries, if anything."""
    smallest = SMALLEST_PAIRED if paired else SMALLEST
    return f"the bank has {distinct} distinct queries, of which {smallest} are needed" if distinct < smallest else None


def share_of_copies(queries: np.ndarray, targets: np.ndarray, given: FitInput) -> float:
    """Share of `queries` [m, d] that are one of `targets` [n, d]."""
    nearest = kth_largest(Similarities(queries, Metric.EUCLIDEAN, given.compute), as_vectors(targets, "targets"), 1)
    squares = np.einsum("jd,jd->j", targets, targets, dtype=np.float64)
    return float((nearest >= -COPY / 2 * np.median(squares)).mean())


def foreign(targets: np.ndarray, second: np.ndarray, given: FitInput, rng: np.random.Generator) -> float:
    """Share of the 5 nearest neighbours that come from the own set, in equal shares of both sets taken together."""
    size = min(len(targets), len(second), 1_024)
    both = np.concatenate([rng.permutation(targets)[:size], rng.permutation(second)[:size]])
    similarities = dense(Similarities(both, Metric.EUCLIDEAN, given.compute), as_vectors(both, "targets"))
    similarities.fill_diagonal_(-math.inf)
    nearest = similarities.topk(min(5, 2 * size - 1), dim=1).indices
    own = (nearest >= size) == (torch.arange(2 * size) >= size)[:, None]
    return float(own.double().mean())


def agreement_and_coverage(
    queries: np.ndarray, targets: np.ndarray, given: FitInput, rng: np.random.Generator
) -> tuple[float, float]:
    """See `Bank`."""
    targets = rng.permutation(targets)[:2_048]
    queries, moved = _as_queries(queries, targets, given.metric)
    vectors = as_vectors(targets, "targets")
    from_bank = dense(Similarities(queries, given.metric, given.compute), vectors)
    from_gallery = dense(Similarities(moved, given.metric, given.compute), vectors)
    from_gallery.fill_diagonal_(-math.inf)
    near = [part.topk(min(16, len(part) - 1), dim=0).values.mean(dim=0) for part in (from_bank, from_gallery)]
    count = min(len(queries), len(targets))
    reached = [len(set(part[:count].argmax(dim=1).tolist())) for part in (from_bank, from_gallery)]
    agreement = float(torch.corrcoef(torch.stack(near))[0, 1])
    return agreement, reached[0] / reached[1]


def _as_queries(queries: np.ndarray, targets: np.ndarray, metric: Metric) -> tuple[np.ndarray, np.ndarray]:
    """`queries` [m, d], and the gallery's own vectors [n, d] in the place of queries: moved by the distance of the two
    means, which is most of what sets two modalities apart (Liang et al. 2022).

    All are of one length where the length of a query changes no ranking, or where queries have one anyway: the
    same vectors are then judged the same by every metric and on every scale.
    """
    lengths = np.linalg.norm(queries, axis=1)
    length, own = np.median(lengths), np.median(np.linalg.norm(targets, axis=1))
    free = metric is not Metric.EUCLIDEAN
    scaled = targets * (length / max(own, 1e-30)) if free else targets
    moved = scaled - scaled.mean(axis=0) + queries.mean(axis=0)
    if free or np.ptp(lengths) <= 0.01 * length:
        queries, moved = (
            part * (length / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-30))
            for part in (queries, moved)
        )
    return np.ascontiguousarray(queries, np.float32), np.ascontiguousarray(moved, np.float32)
