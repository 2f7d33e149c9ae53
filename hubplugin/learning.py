"""What known answers teach: a linear map of the query, one closed step, as strong as held-out targets allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from hubplugin.bank import PreparedBank, own_share
from hubplugin.errors import InputError, Parameter
from hubplugin.methods import FitInput, Method
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, QueryMap
from hubplugin.vectors import as_vectors, prepared_blocks, sampled, spool, taken

FEWEST_PAIRS, FEWEST_TARGETS = 200, 10
"""Different pairs, and different targets in them, below which nothing is learned: the map gains nothing there."""

STRENGTHS = 0.0, 0.25, 0.5, 1.0
FOLDS, PROBES = 3, 300
"""Folds over targets, and the pairs of each that are tried. The target of a probe was never among the learned."""

SOFTNESS = 0.4
"""A probe counts as right to the degree sigmoid((own score - best other score) / (SOFTNESS tau))."""

SMALLEST_GAIN = 0.001
"""A smaller gain over the folds counts as none."""

APART, ERRORS, ERRORS_APART = 0.85, 1.0, 2.0
"""So many standard errors a strength must be ahead of none, and so many where `own_share` is `APART` or more: across
modalities and languages, where logs lose if they are not held to it (benchmarks/learning.py)."""

PRODUCTS = 1 << 24
"""Similarities that are held at once."""


@dataclass(frozen=True)
class KnownPairs:
    """The different pairs of a bank. queries: [m, d]. own: the row of each query's target among `targets` [c, d], which
    are different rows of `candidates`: `numbers` [c]."""

    queries: np.ndarray
    own: np.ndarray
    targets: np.ndarray
    numbers: np.ndarray

    @classmethod
    def of(cls, given: PreparedBank) -> KnownPairs:
        """Raises InputError where the bank has too few."""
        known = given.known
        if known is None:
            raise InputError("learn=True learns from what each query asks for: pass a Bank with ", Parameter("answers"))
        rows = np.flatnonzero(known >= 0)
        first = {(given.query_bank[row].tobytes(), int(known[row])): row for row in rows[::-1]}
        rows = np.sort(np.fromiter(first.values(), np.int64, len(first)))
        numbers, own = np.unique(known[rows], return_inverse=True)
        if len(rows) < FEWEST_PAIRS or len(numbers) < FEWEST_TARGETS:
            raise InputError(
                f"the bank has {len(rows)} different pairs of {len(numbers)} targets; learn=True needs {FEWEST_PAIRS} "
                f"pairs of {FEWEST_TARGETS} targets: collect more, or leave ",
                Parameter("learn"),
                " out",
            )
        if given.pairs is not None:
            targets = given.require_target_bank("learn")[numbers]
        else:
            targets = taken(given.require_targets("learn"), numbers, given.metric)
        return cls(given.query_bank[rows], own.reshape(-1), targets, numbers)


def require_learnable(method: str, metric: Metric | str, targets: object, **others: object) -> None:
    """Raises InputError for what was not measured together with a query map, or does not apply it. others: parameters
    of a fit that must not be set."""
    if method not in ("blend", "auto"):
        raise InputError("learn=True goes with the default method, not with ", Parameter("method", method))
    if Metric.parse(metric) is Metric.EUCLIDEAN:
        raise InputError("learn=True is for inner products, not for ", Parameter("metric", "euclidean"))
    if targets is None:
        raise InputError("learn=True is tried on the gallery: pass ", Parameter("targets"))
    for name, value in others.items():
        if value:
            raise InputError("learn=True does not go with ", Parameter(name), ": leave one of the two out")


@dataclass(frozen=True)
class Learning:
    """How offsets and a map are fitted together: a `method`, and the strength and temperature of the map."""

    method: Method
    strength: float
    tau: float

    def query_map(self, queries: np.ndarray, own: np.ndarray, targets: np.ndarray) -> QueryMap:
        """What pairs teach; see `learned`."""
        step = np.float32(self.strength) * learned(queries, own, targets, self.tau)
        return QueryMap(step, self.strength, len(queries))

    def fit(self, given: FitInput, query_map: QueryMap) -> OffsetModel:
        """The method fitted on the bank of `given`, mapped. The model has the bank as it was given."""
        asked = query_map.of_bank(given.query_bank)
        model = self.method.fit(replace(given, query_bank=asked))
        terms = tuple(replace(term, bank=given.query_bank) if term.bank is asked else term for term in model.terms)
        return model.having(terms=terms, query_map=query_map, bank_fingerprint=given.fingerprint)


NOTHING = "the pairs taught nothing beyond the offsets: the model has no query map"


@dataclass(frozen=True)
class Lesson:
    """What the known answers of a bank taught. model: with a query map, or without one where held-out targets gain
    nothing by it. how: its method, with the strength that was chosen."""

    model: OffsetModel
    how: Learning

    @property
    def notes(self) -> list[str]:
        found = self.model.query_map
        if found is None:
            return [NOTHING]
        return [f"queries are mapped: {found.pairs} pairs taught it, at strength {found.strength:g}"]


def taught(configuration: Method, given: PreparedBank) -> Lesson:
    """`configuration` fitted on `given`, with the query map that the known answers of the bank teach.

    Raises InputError where the bank knows too few answers.
    """
    pairs, method = KnownPairs.of(given), configuration.resolved(given)
    model, tau = method.fit(given), float(str(method.parameters["tau"]))
    strength = chosen_strength(pairs, tau, given, _raw_offsets(model, method, given))
    how = Learning(method, strength, tau)
    if strength == 0:
        return Lesson(model, how)
    query_map = how.query_map(pairs.queries, pairs.own, pairs.targets)
    asked = replace(given, query_bank=query_map.of_bank(given.query_bank))
    how = replace(how, method=configuration.resolved(asked))
    return Lesson(how.fit(given, query_map), how)


def learned(queries: np.ndarray, own: np.ndarray, targets: np.ndarray, tau: float) -> np.ndarray:
    """W [d, d] of one step of ridge regression from `queries` [m, d] to what their cross-entropy asks of them.

        p = softmax(Q T' / tau),  R = T[own] - p T,  W = R' Q (Q' Q + r I)^-1,  r the mean eigenvalue of Q' Q

    T are the targets [c, d] that were asked for, and no others: with the whole gallery, what nobody asked for would
    only ever be pushed away. Float32 products, a float64 solution.
    """
    residual = np.empty_like(queries)
    size = max(PRODUCTS // len(targets), 1)
    for start in range(0, len(queries), size):
        rows = slice(start, start + size)
        p = queries[rows] @ targets.T
        p -= p.max(axis=1, keepdims=True)
        p /= np.float32(tau)
        np.exp(p, out=p)
        p /= p.sum(axis=1, keepdims=True)
        residual[rows] = targets[own[rows]] - p @ targets
    gram = (queries.T @ queries).astype(np.float64)
    ridge = np.trace(gram) / len(gram) * np.eye(len(gram))
    solution = np.linalg.solve(gram + ridge, (queries.T @ residual).astype(np.float64))
    return np.ascontiguousarray(solution.T, np.float32)


def chosen_strength(pairs: KnownPairs, tau: float, given: PreparedBank, offsets: np.ndarray) -> float:
    """The largest of `STRENGTHS` that is ahead of none by enough on pairs whose targets were held out."""
    gains = _gains(pairs, tau, given, offsets)
    rng, gallery = np.random.default_rng(0), given.require_targets("learn")
    shares = own_share(given.query_bank, sampled(gallery, len(given.query_bank), given.metric, rng), given.compute, rng)
    errors = ERRORS_APART if shares >= APART else ERRORS
    needed = np.maximum(errors * gains.std(axis=1) / gains.shape[1] ** 0.5, SMALLEST_GAIN)
    return max((s for s, ok in zip(STRENGTHS[1:], gains.mean(axis=1) >= needed, strict=True) if ok), default=0.0)


def _gains(pairs: KnownPairs, tau: float, given: PreparedBank, offsets: np.ndarray) -> np.ndarray:
    """What each strength above 0 gains on each probe, over strength 0: [strengths, probes]."""
    rng = np.random.default_rng(0)
    fold = (rng.permutation(len(pairs.targets)) % FOLDS)[pairs.own]
    probes = [rng.permutation(np.flatnonzero(fold == held))[:PROBES] for held in range(FOLDS)]
    steps = []
    for held, rows in enumerate(probes):
        seen = fold != held
        clicked, own = np.unique(pairs.own[seen], return_inverse=True)
        step = learned(pairs.queries[seen], own.reshape(-1), pairs.targets[clicked], tau)
        steps.append(pairs.queries[rows] @ step.T)
    chosen, stepped = np.concatenate(probes), np.concatenate(steps)
    queries, number = pairs.queries[chosen], pairs.numbers[pairs.own[chosen]]
    strengths = np.array(STRENGTHS, np.float32)[:, None]
    own_vectors = pairs.targets[pairs.own[chosen]]
    own_scores = (queries * own_vectors).sum(1) + offsets[number] + strengths * (stepped * own_vectors).sum(1)
    best, start = np.full(own_scores.shape, -np.inf), 0
    for block in _candidates(given):
        scores = queries @ block.T + offsets[start : start + len(block)].astype(np.float32)
        further = stepped @ block.T
        inside = np.flatnonzero((number >= start) & (number < start + len(block)))
        scores[inside, number[inside] - start] = -np.inf
        for row, strength in enumerate(STRENGTHS):
            best[row] = np.maximum(best[row], (scores + np.float32(strength) * further).max(axis=1))
        start += len(block)
    right = 1 / (1 + np.exp(np.clip((best - own_scores) / (SOFTNESS * tau), -30, 30)))
    return np.asarray(right[1:] - right[0])


def _candidates(given: PreparedBank) -> Iterator[np.ndarray]:
    """What a probe is searched among, in blocks: the target bank, where answers are vectors, and the gallery."""
    gallery = prepared_blocks(given.require_targets("learn"), given.metric)
    return gallery if given.pairs is None else chain([given.require_target_bank("learn")], gallery)


def _raw_offsets(model: OffsetModel, configuration: Method, given: PreparedBank) -> np.ndarray:
    """Offsets of all candidates [n]. Where answers are vectors, of a fit for which they are part of the gallery, so
    that they stand no worse beside it than the answers of a search will."""
    if given.pairs is None:
        return model.raw_offsets(given.require_targets("learn"), given.compute)
    together = spool(_candidates(given), "targets and answers")
    return configuration.raw_offsets(
        replace(given, targets=as_vectors(together, "targets"), target_bank=None, pairs=None)
    )
