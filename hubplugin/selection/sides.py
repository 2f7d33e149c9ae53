"""What a correction does to both sides of a log: to targets that were asked for before, and to those that were not.

Queries are held out and tried: for *asked*, single wordings of targets that the log asks for in others, too; for *not
asked*, all wordings of a target at once. What a query asks for is known from clicks or pairs. Otherwise it is guessed:
queries that share a nearest target which stands out ask for it. They find it, so they show what is lost, and no gain.

Where each target has one wording, *stand-ins* take the place of others: bank queries whose nearest target stands out,
moved towards another bank query, drawn at random, until one in ten loses that target. Nearer to their bank query than
other wordings are, they show harm three to four times too large (docs/choosing.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hubplugin.methods import FitInput, Method
from hubplugin.reductions import MOST_ANSWERS, Compute, Nearest, Similarities, dense, taken
from hubplugin.selection.experiment import FOLDS, Experiment, folds_within, with_rows
from hubplugin.selection.trials import standard_error
from hubplugin.vectors import Vectors, as_vectors

FOUND = 0.9
"""Share of the stand-ins that find their target in the raw search. With fewer, all corrections look better than they
are; with more there is little left to win."""

ROWS = 2_048
"""Bank queries that are looked at."""

FEWEST = 100
"""Bank queries below which nothing is said."""

FEWEST_WORDINGS = 50
"""Held-out wordings of targets that stay asked for, below which stand-ins take their place."""

SHARED = 1 / 3
"""Share of the queries with a clear nearest target that have it in common with another, from which on these are taken
for wordings: where each target has one, hubs alone are shared, by 0.14; in logs of several wordings it is 0.55 to 0.71
(benchmarks/both_sides.py)."""

STAND_INS = "stand-ins"


@dataclass(frozen=True)
class Side:
    """R@1 of `probes` queries, 0 to 1, before and after, and the standard error of the change; what the probes are."""

    before: float
    after: float
    error: float
    probes: int
    what: str

    def __str__(self) -> str:
        return f"{100 * self.before:.1f} -> {100 * self.after:.1f} ({self.probes} {self.what})"


@dataclass(frozen=True)
class Sides:
    """asked: targets that the bank of the fit asks for. other: what it does not ask for. offset: mean offset of the
    bank's answers less that of the other targets, in units of the similarity; strongly negative where what was asked
    for is taken for a hub. known: whether clicks or pairs say what the probes ask for."""

    asked: Side
    other: Side
    offset: float
    known: bool

    def __str__(self) -> str:
        return (
            f"asked before: {self.asked}; not asked: {self.other}; "
            f"mean offset of what was asked for, beside the rest: {self.offset:+.4f}"
        )


@dataclass(frozen=True)
class _Log:
    """Some distinct queries of the bank [m, d], and of its gallery a sample together with all answers [n, d].

    answer: [m], the place of each query's answer among the targets, or -1. clear: [m], whether the answer is known, or
    else stands out. found: [m], whether the query finds its answer, by a clear margin.
    """

    given: FitInput
    queries: np.ndarray
    gallery: Vectors
    answer: np.ndarray
    clear: np.ndarray
    found: np.ndarray
    scores: torch.Tensor
    known: bool


def both_sides(experiment: Experiment, method: Method) -> Sides | None:
    """See `Sides`; None for a bank of less than `FEWEST` queries. method: resolved on the whole bank and gallery."""
    if experiment.distinct < FEWEST:
        return None
    log, rng = _look(experiment), np.random.default_rng(experiment.seed)
    together = rng.integers(0, FOLDS, log.gallery.rows)[log.answer]  # all that asked for a target in one fold
    together[log.answer < 0] = -1
    apart = np.full(len(log.queries), -1)
    apart[log.clear] = folds_within(log.answer[log.clear])
    again, whole = apart >= 0, _offsets(log, method, np.ones(len(log.queries), bool))
    if again.sum() >= FEWEST_WORDINGS and (log.known or again.sum() >= SHARED * log.clear.sum()):
        what, scores, tried = "other wordings" if log.known else "guessed wordings", log.scores, again
        asked = _held_out(log, method, scores, again, apart, what)
    elif log.found.sum() < FEWEST_WORDINGS // 2:
        return None  # nearly all of it finds one hub
    else:
        what, scores, tried = STAND_INS, _stand_ins(log, rng), log.found
        asked = _side(log, scores, [(np.flatnonzero(tried), whole)], what)
    if log.known:
        what, scores, tried = "queries", log.scores, log.clear
    other = _held_out(log, method, scores, tried, together, what)
    answered = np.zeros(log.gallery.rows, bool)
    answered[log.answer[log.answer >= 0]] = True
    offset = 0.0 if answered.all() else float(whole[answered].mean() - whole[~answered].mean())
    return Sides(asked, other, offset, log.known)


def _look(experiment: Experiment) -> _Log:
    given, rows = experiment.given, np.sort(experiment.split.rows[:ROWS])
    queries, known = given.query_bank[rows], experiment.banks.known
    targets, answer = experiment.targets, np.full(len(rows), -1)
    if known is not None:
        asking = np.flatnonzero(known[rows] >= 0)
        targets, answer[asking] = with_rows(targets, experiment.answers(rows[asking]))
    else:
        targets, answer = with_rows(targets, _nearest_of(given, queries))
    gallery = as_vectors(targets, "targets")
    scores = dense(Similarities(queries, given.metric, given.compute), gallery)
    first, second = scores.topk(2, dim=1).values.numpy().T
    own = scores.numpy()[np.arange(len(rows)), answer]
    hubs = np.bincount(answer[answer >= 0], minlength=len(targets)) > MOST_ANSWERS * len(rows)
    found = (answer >= 0) & (own >= first) & (first - second >= np.median(first - second)) & ~hubs[answer]
    clear = found if known is None else answer >= 0
    return _Log(given, queries, gallery, answer, clear, found, scores, known is not None)


def _nearest_of(given: FitInput, queries: np.ndarray) -> np.ndarray:
    """The nearest target of each of `queries` [m, d] in the whole gallery: [m, d]."""
    gallery, nearest = given.require_targets("auto"), Nearest(len(queries))
    for tile in given.compute.similarities(queries, given.metric).tiles(gallery, "answers of the bank"):
        nearest.see(tile, 0)
    rows, place = np.unique(nearest.rows, return_inverse=True)
    found: np.ndarray = taken(gallery, rows, given.metric)[place.reshape(-1)]
    return found


def _offsets(log: _Log, method: Method, kept: np.ndarray) -> np.ndarray:
    """Raw offsets [n] of a fit on the queries `kept` [m]."""
    compute = Compute(log.given.compute.device, log.given.compute.memory, precision=log.given.compute.precision)
    return method.raw_offsets(FitInput(log.queries[kept], log.gallery, None, log.given.metric, compute))


def _held_out(
    log: _Log, method: Method, scores: torch.Tensor, probes: np.ndarray, fold_of: np.ndarray, what: str
) -> Side:
    """The `probes` of each fold on a fit without it. probes: bool [m]. fold_of: [m], -1 for what all fits see."""
    parts = []
    for fold in range(FOLDS):
        tried, kept = np.flatnonzero(probes & (fold_of == fold)), fold_of != fold
        if len(tried) and kept.any():
            parts.append((tried, _offsets(log, method, kept)))
    return _side(log, scores, parts, what)


def _side(log: _Log, scores: torch.Tensor, parts: list[tuple[np.ndarray, np.ndarray]], what: str) -> Side:
    """Of probes and the offsets that each is tried with."""
    before, after = [], []
    for probes, offsets in parts:
        part = scores[probes]
        before.append((part.argmax(dim=1).numpy() == log.answer[probes]).astype(float))
        after.append(((part + torch.from_numpy(offsets)).argmax(dim=1).numpy() == log.answer[probes]).astype(float))
    raw, corrected = np.concatenate(before), np.concatenate(after)
    return Side(float(raw.mean()), float(corrected.mean()), standard_error(corrected - raw), len(raw), what)


def _stand_ins(log: _Log, rng: np.random.Generator) -> torch.Tensor:
    """The similarities [m, n]; queries that find their answers were moved so far that `FOUND` of them still do."""
    rows, scores = np.flatnonzero(log.found), log.scores.clone()
    start = log.queries[rows]
    towards = log.queries[rng.integers(0, len(log.queries), len(rows))] - start
    lengths = np.linalg.norm(start, axis=1, keepdims=True)
    low, high = 0.0, 1.0
    for _ in range(10):
        step = (low + high) / 2
        moved = start + step * towards
        moved = (moved * lengths / np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-30)).astype(np.float32)
        scores[rows] = dense(Similarities(moved, log.given.metric, log.given.compute), log.gallery)
        found = scores[rows].argmax(dim=1).numpy() == log.answer[rows]
        low, high = (step, high) if found.mean() > FOUND else (low, step)
    return scores
