"""What a correction does to both sides of a log: to targets that were asked for before, and to those that were not.

A log without pairs has one wording of each question, so stand-ins take the place of other wordings: bank queries whose
nearest target stands out, moved towards another bank query, drawn at random, until one in ten loses that target.

On logs whose other wordings are known, harm is seen as harm, three to four times too large (docs/choosing.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hubplugin.methods import FitInput, Method
from hubplugin.reductions import Compute, Similarities, dense
from hubplugin.vectors import Vectors, as_vectors

FOUND = 0.9
"""Share of the stand-ins that find their target in the raw search. With fewer, all corrections look better than they
are; with more there is little left to win."""

ROWS = 2_048
"""Bank queries that are looked at."""

FEWEST = 100
"""Bank queries below which nothing is said."""


@dataclass(frozen=True)
class Sides:
    """R@1 of stand-ins, 0 to 1, before and after. asked: their targets were asked for by the bank of the fit. other:
    the bank queries that asked for them were held out. offset: mean offset of the bank's answers less that of the other
    targets, in units of the similarity; strongly negative where what was asked for is taken for a hub."""

    before: float
    asked: float
    other: float
    offset: float

    def __str__(self) -> str:
        before = f"{100 * self.before:.1f}"
        return (
            f"stand-ins for other wordings: asked before: {before} -> {100 * self.asked:.1f}; not asked: {before} -> "
            f"{100 * self.other:.1f}; mean offset of what was asked for, beside the rest: {self.offset:+.4f}"
        )


def both_sides(given: FitInput, targets: np.ndarray, method: Method, seed: int = 0) -> Sides | None:
    """See `Sides`; None for a bank of less than `FEWEST` queries. targets: a sample of the gallery of `given` [n, d].
    method: resolved on the whole of `given`."""
    rng = np.random.default_rng(seed)
    bank = given.query_bank[np.sort(rng.permutation(len(given.query_bank))[:ROWS])]
    if len(bank) < FEWEST:
        return None
    gallery = as_vectors(targets, "targets")
    raw_scores = dense(Similarities(bank, given.metric, given.compute), gallery)
    answers, gaps = raw_scores.argmax(dim=1).numpy(), -raw_scores.topk(2, dim=1).values.diff(dim=1)[:, 0].numpy()
    rows = np.flatnonzero(gaps >= np.median(gaps))
    moved = _moved(bank, rows, answers[rows], gallery, given, rng)
    scores = dense(Similarities(moved, given.metric, given.compute), gallery).numpy()
    truth = answers[rows]

    def offsets(kept: np.ndarray) -> np.ndarray:
        compute = Compute(given.compute.device, given.compute.memory, precision=given.compute.precision)
        fitted = FitInput(bank[kept], gallery, None, given.metric, compute)
        return method.raw_offsets(fitted)

    def hits(of: np.ndarray, offset: np.ndarray) -> np.ndarray:
        found: np.ndarray = (scores[of] + offset).argmax(axis=1) == truth[of]
        return found

    whole, everyone = offsets(np.ones(len(bank), bool)), np.arange(len(rows))
    fold_of = rng.integers(0, 5, len(targets))  # of a target, so that all that asked for it are held out together
    other = [
        hits(np.flatnonzero(fold_of[truth] == fold), offsets(fold_of[answers] != fold))
        for fold in range(5)
        if (fold_of[answers] != fold).any()
    ]
    answered = np.zeros(len(targets), bool)
    answered[answers] = True
    return Sides(
        before=float(hits(everyone, np.zeros(len(targets))).mean()),
        asked=float(hits(everyone, whole).mean()),
        other=float(np.concatenate(other).mean()),
        offset=float(whole[answered].mean() - whole[~answered].mean()) if not answered.all() else 0.0,
    )


def _moved(
    bank: np.ndarray, rows: np.ndarray, answers: np.ndarray, gallery: Vectors, given: FitInput, rng: np.random.Generator
) -> np.ndarray:
    """Bank `rows` [p] moved so far that a share of `FOUND` still find their `answers` [p] first: [p, d]."""
    towards = bank[rng.integers(0, len(bank), len(rows))] - bank[rows]
    lengths = np.linalg.norm(bank[rows], axis=1, keepdims=True)
    low, high = 0.0, 1.0
    moved: np.ndarray = bank[rows]
    for _ in range(10):
        step = (low + high) / 2
        moved = bank[rows] + step * towards
        moved = (moved * lengths / np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-30)).astype(np.float32)
        found = dense(Similarities(moved, given.metric, given.compute), gallery).argmax(dim=1).numpy()
        low, high = (step, high) if (found == answers).mean() > FOUND else (low, step)
    return moved
