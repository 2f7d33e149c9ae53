"""What known answers teach: a linear map of the query, one closed step, as strong as held-out answers allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from hubplugin.bank import PreparedBank, own_share
from hubplugin.errors import CorrectionRefused, InputError, Parameter
from hubplugin.measures.significance import Side
from hubplugin.methods import FitInput, Method
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, QueryMap
from hubplugin.vectors import Vectors, as_vectors, prepared_blocks, sampled, spool, taken

FEWEST_PAIRS, FEWEST_TARGETS = 200, 10
"""Different pairs, and different targets in them, below which nothing is learned: the map gains nothing there."""

NEARER = 0.75
"""The share of pairs whose query is nearer to its own answer than to another's, below which they are no pairs of this
model and gallery. It is 0.5 by chance."""

STRENGTHS = 0.0, 0.25, 0.5, 1.0

FOLDS, PROBES = 3, 500
"""Folds, and the pairs of each that are tried on either side."""

FEWEST_JUDGED = 50
"""Judged pairs, below which they do not choose."""

FEWEST_WORDINGS = 50
"""Other wordings of targets that stay asked for, below which nothing is said of what was asked before."""

SOFTNESS = 0.4
"""A probe counts as right to the degree sigmoid((own score - best other score) / (SOFTNESS tau))."""

APART, ERRORS = 0.85, 2.0
"""No side may be behind by more than so many standard errors with a whitening or a strength: a few hundred pairs are
too few to show what these gain. Where `own_share` is `APART` or more, as across modalities and languages, all sides
must be ahead by as many, for there held-out pairs do not see all that is lost (docs/measurements/methods.md)."""

KEPT = 0.9
"""How much of the identity a whitening keeps."""

PRODUCTS = 1 << 22
"""Similarities that are held at once: 16 MiB, which a cache has room for."""


@dataclass(frozen=True)
class KnownPairs:
    """The different pairs of a bank. queries: [m, d]. own: the row of each query's target among `targets` [c, d], which
    are different rows of `candidates`: `numbers` [c]."""

    queries: np.ndarray
    own: np.ndarray
    targets: np.ndarray
    numbers: np.ndarray

    @classmethod
    def of(cls, given: PreparedBank, what: str = "the bank", fewest: int = FEWEST_PAIRS) -> KnownPairs:
        """Raises InputError where the bank has less than `fewest`, CorrectionRefused where they are no pairs of this
        gallery. what: what errors call it."""
        known = given.known
        if known is None:
            raise InputError("learn=True learns from what each query asks for: pass a Bank with ", Parameter("answers"))
        rows = np.flatnonzero(known >= 0)
        first = {(given.query_bank[row].tobytes(), int(known[row])): row for row in rows[::-1]}
        rows = np.sort(np.fromiter(first.values(), np.int64, len(first)))
        numbers, own = np.unique(known[rows], return_inverse=True)
        if len(rows) < fewest or len(numbers) < FEWEST_TARGETS:
            raise InputError(
                f"{what} has {len(rows)} different pairs of {len(numbers)} targets; learn=True needs {fewest} "
                f"pairs of {FEWEST_TARGETS} targets: collect more, or leave ",
                Parameter("learn"),
                " out",
            )
        if given.pairs is not None:
            targets = given.require_target_bank("learn")[numbers]
        else:
            targets = taken(given.require_targets("learn"), numbers, given.metric)
        pairs = cls(given.query_bank[rows], own.reshape(-1), targets, numbers)
        if (nearer := pairs.nearer) < NEARER:
            raise CorrectionRefused(
                f"the answers of {what} do not belong to its queries: {nearer:.0%} of these are nearer to their own "
                f"than to another's ({NEARER:.0%} is needed, 50% is chance); nothing was changed: pass answers of "
                "this gallery to queries of its model"
            )
        return pairs

    @property
    def nearer(self) -> float:
        """Share of the pairs whose query is nearer to its own target than to one drawn from the others."""
        other = (self.own + np.random.default_rng(0).integers(1, len(self.targets), len(self.own))) % len(self.targets)
        ahead = (self.queries * (self.targets[self.own] - self.targets[other])).sum(axis=1)
        return float((ahead > 0).mean())

    def some(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries, own and targets of the pairs `rows`, as `learned` takes them."""
        clicked, own = np.unique(self.own[rows], return_inverse=True)
        return self.queries[rows], own.reshape(-1), self.targets[clicked]


@dataclass(frozen=True)
class Learning:
    """How offsets and a map are fitted together: a `method`; strength, temperature and whitening of the map."""

    method: Method
    strength: float
    tau: float
    whitening: np.ndarray | None = None

    def query_map(self, queries: np.ndarray, own: np.ndarray, targets: np.ndarray) -> QueryMap | None:
        """What pairs teach, see `learned`: (I + s W) Z, with Z the whitening. None for I."""
        if not self.strength and self.whitening is None:
            return None
        eye = np.eye(queries.shape[1], dtype=np.float32)
        first = eye if self.whitening is None else self.whitening
        w = learned(queries @ first.T, own, targets, self.tau) if self.strength else np.zeros_like(eye)
        step = (eye + np.float32(self.strength) * w) @ first - eye
        return QueryMap(step, self.strength, len(queries), self.whitening is not None)

    def fit(self, given: FitInput, query_map: QueryMap) -> OffsetModel:
        """The method fitted on the bank of `given`, mapped. The model has the bank as it was given."""
        asked = query_map.of_bank(given.query_bank)
        model = self.method.fit(replace(given, query_bank=asked))
        terms = tuple(replace(term, bank=given.query_bank) if term.bank is asked else term for term in model.terms)
        return model.having(terms=terms, query_map=query_map, bank_fingerprint=given.fingerprint)


NOTHING = "the pairs taught nothing beyond the offsets: queries are not mapped"


@dataclass(frozen=True)
class Lesson:
    """What the known answers of a bank taught. model: with a query map, or without one where held-out answers gain
    nothing by it. how: its method, and what was chosen. asked, other: R@1 of held-out pairs without and with the map,
    of other wordings of targets that stay asked for, None where there are few, and of targets that nobody else asks
    for."""

    model: OffsetModel
    how: Learning
    asked: Side | None
    other: Side

    @property
    def notes(self) -> list[str]:
        if self.model.query_map is None:
            return [NOTHING]
        sides = [("asked before", self.asked), ("not asked before", self.other)]
        said = "; ".join(f"{name}: {side}" for name, side in sides if side is not None)
        return [f"{self.model.query_map}; over the offsets alone, {said}"]


@dataclass(frozen=True)
class Base:
    """Before a map is learned. how: the offsets alone, or with a whitening. offsets: of all candidates, float32 [n]."""

    how: Learning
    model: OffsetModel
    offsets: np.ndarray

    def queries(self, queries: np.ndarray) -> np.ndarray:
        whitening = self.how.whitening
        return queries if whitening is None else queries @ whitening.T


def taught(configuration: Method, given: PreparedBank, judged: PreparedBank | None = None) -> Lesson:
    """`configuration` fitted on `given`, with the query map that the known answers of the bank teach.

    judged: clicks that somebody has looked at, by which strength and whitening are chosen in the place of the bank's.
    Raises InputError where either has too few answers, CorrectionRefused where these do not belong to the queries.
    """
    pairs, rng, gallery = KnownPairs.of(given), np.random.default_rng(0), given.require_targets("learn")
    tried = pairs
    if judged is not None:
        if given.clicks is None or judged.clicks is None:
            raise InputError(Parameter("judged"), " is for logs: pass ids or rows as answers, in both banks")
        tried = KnownPairs.of(judged, "the judged bank", FEWEST_JUDGED)
    some = sampled(gallery, len(given.query_bank), given.metric, rng)
    apart = own_share(given.query_bank, some, given.compute, rng) >= APART
    bases = [
        base_of(configuration, given, first) for first in (None, whitening(given.query_bank, gallery, given.metric))
    ]
    sides = sides_of(pairs, tried)
    tries = {
        name: np.stack([margins_of(pairs, tried, each, base, given) for base in bases]) for name, each in sides.items()
    }
    number, strength = chosen(list(tries.values()), bases[0].how.tau, ERRORS if apart else -ERRORS)
    base = bases[number]
    how = replace(base.how, strength=STRENGTHS[strength])
    before, after = ({name: each[place] for name, each in tries.items()} for place in ((0, 0), (number, strength)))
    figures = {
        name: Side.of((before[name] > 0).astype(float), (after[name] > 0).astype(float), WHAT[name]) for name in sides
    }
    model = bases[0].model
    query_map = how.query_map(pairs.queries, pairs.own, pairs.targets)
    if query_map is not None:
        asked = replace(given, query_bank=query_map.of_bank(given.query_bank))
        how = replace(how, method=configuration.resolved(asked))
        model = how.fit(given, query_map)
    return Lesson(model, how, figures.get("asked"), figures["other"])


WHAT = {"asked": "other wordings", "other": "pairs"}
"""What the held-out pairs of each side are."""


def chosen(sides: list[np.ndarray], tau: float, errors: float) -> tuple[int, int]:
    """The base and the strength, by their numbers, from the margins [bases, strengths, probes] of each side.

    Both are the last whose soft R@1 is ahead of that of the first base without a map by so many standard `errors` on
    every side, or behind by no more than that where it is a negative number. Of what is asked again the folds of a log
    with one wording a target see nothing, and there the strongest map gains most.
    """
    gains = [each - each[:1, :1] for each in (soft_right(margins, tau) for margins in sides)]

    def ahead(base: int, strength: int) -> bool:
        return all(is_ahead(each[base, strength], errors) for each in gains)

    base = max((number for number in range(1, len(gains[0])) if ahead(number, 0)), default=0)
    return base, max((s for s in range(1, len(STRENGTHS)) if ahead(base, s)), default=0)


def soft_right(margins: np.ndarray, tau: float) -> np.ndarray:
    """To which degree probes count as right."""
    right: np.ndarray = 1 / (1 + np.exp(np.clip(-margins / (SOFTNESS * tau), -30, 30)))
    return right


def is_ahead(gains: np.ndarray, errors: float) -> bool:
    """Whether the mean of `gains` [p] is not below so many standard errors of it."""
    return bool(gains.mean() >= errors * gains.std() / len(gains) ** 0.5)


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
        p = (queries[rows] / np.float32(tau)) @ targets.T
        p -= p.max(axis=1, keepdims=True)
        np.exp(p, out=p)
        residual[rows] = targets[own[rows]] - (p @ targets) / p.sum(axis=1, keepdims=True)
    gram = (queries.T @ queries).astype(np.float64)
    ridge = np.trace(gram) / len(gram) * np.eye(len(gram))
    solution = np.linalg.solve(gram + ridge, (queries.T @ residual).astype(np.float64))
    return np.ascontiguousarray(solution.T, np.float32)


def whitening(bank: np.ndarray, gallery: Vectors, metric: Metric) -> np.ndarray:
    """Z [d, d], a mild whitening of what is searched with, which needs no answers:

        Z = t (k t I + (1 - k) C)^-1,  C the covariance of `bank` [m, d] and `gallery`, each about its own mean

    t is the mean of the diagonal of C, and k is `KEPT`.
    """
    dim, count, total = bank.shape[1], 0, np.zeros(bank.shape[1])
    products = np.zeros((dim, dim))
    for block in prepared_blocks(gallery, metric):
        products += block.T @ block
        total += block.sum(axis=0, dtype=np.float64)
        count += len(block)
    centred = bank - bank.mean(axis=0)
    products += centred.T @ centred - np.outer(total, total) / count
    covariance = products / (count + len(bank))
    size = max(float(np.trace(covariance)) / dim, 1e-30)
    z = size * np.linalg.inv(KEPT * size * np.eye(dim) + (1 - KEPT) * covariance)
    return np.ascontiguousarray(z, np.float32)


def base_of(configuration: Method, given: PreparedBank, first: np.ndarray | None) -> Base:
    """A fit on the bank, `first` whitened."""
    if first is not None:
        given = replace(given, query_bank=given.query_bank @ first.T)
    method = configuration.resolved(given)
    model, how = method.fit(given), Learning(method, 0.0, float(str(method.parameters["tau"])), first)
    if given.pairs is None:
        offsets = model.raw_offsets(given.require_targets("learn"), given.compute)
    else:  # answers are part of the gallery, so that they stand no worse beside it than the answers of a search will
        together = as_vectors(spool(_candidates(given), "targets and answers"), "targets")
        offsets = method.raw_offsets(replace(given, targets=together, target_bank=None, pairs=None))
    return Base(how, model, offsets.astype(np.float32))


def _candidates(given: PreparedBank) -> Iterator[np.ndarray]:
    """What a probe is searched among, in blocks: the target bank, where answers are vectors, and the gallery."""
    gallery = prepared_blocks(given.require_targets("learn"), given.metric)
    return gallery if given.pairs is None else chain([given.require_target_bank("learn")], gallery)


Folds = list[tuple[np.ndarray, np.ndarray]]
"""Of each fold the rows that are tried, and the rows of the pairs that are learned from."""


def sides_of(pairs: KnownPairs, tried: KnownPairs) -> dict[str, Folds]:
    """What is tried of pairs among `tried`, by side: "other", where the target of a probe was never among the learned;
    and "asked", other wordings of targets that stay asked for, where there are enough."""
    rng, numbers = np.random.default_rng(0), np.union1d(pairs.numbers, tried.numbers)
    fold = rng.permutation(len(numbers)) % FOLDS
    of_tried, of_pairs = (fold[np.searchsorted(numbers, each.numbers)][each.own] for each in (tried, pairs))
    sides = {"other": _folds(of_tried, of_pairs, rng)}
    if tried is pairs:
        within = folds_within(pairs.own, FOLDS)
        again = _folds(within, within, rng)
    else:
        known = {query.tobytes() for query in tried.queries}
        seen = np.array([query.tobytes() not in known for query in pairs.queries])
        still = np.isin(tried.numbers[tried.own], pairs.numbers[pairs.own[seen]])
        again = [(np.flatnonzero(still), np.flatnonzero(seen))]
    if sum(len(rows) for rows, _ in again) >= FEWEST_WORDINGS:
        sides["asked"] = again
    return sides


def _folds(tried: np.ndarray, learned_from: np.ndarray, rng: np.random.Generator) -> Folds:
    """From the fold that holds out each pair that may be tried, and each that may be learned from, -1 for none."""
    probes = [rng.permutation(np.flatnonzero(tried == held))[:PROBES] for held in range(FOLDS)]
    return [(rows, np.flatnonzero(learned_from != held)) for held, rows in enumerate(probes)]


def margins_of(pairs: KnownPairs, tried: KnownPairs, folds: Folds, base: Base, given: PreparedBank) -> np.ndarray:
    """How far the own target of each probe is ahead of the best other candidate at each strength of the map:
    [strengths, p]."""
    steps = []
    for rows, seen in folds:
        queries, own, targets = pairs.some(seen)
        step = learned(base.queries(queries), own, targets, base.how.tau)
        steps.append(base.queries(tried.queries[rows]) @ step.T)
    chosen, stepped = np.concatenate([rows for rows, _ in folds]), np.concatenate(steps)
    queries, number = base.queries(tried.queries[chosen]), tried.numbers[tried.own[chosen]]
    moved_own = np.full((len(STRENGTHS), len(queries)), np.nan)
    best, start = np.full((len(STRENGTHS), len(queries)), -np.inf), 0
    for block in _candidates(given):
        size = max(PRODUCTS // len(block), 1)
        for some in (slice(first, min(first + size, len(queries))) for first in range(0, len(queries), size)):
            scores = queries[some] @ block.T + base.offsets[start : start + len(block)]
            gained, here = stepped[some] @ block.T, number[some] - start
            inside = np.flatnonzero((here >= 0) & (here < len(block)))
            for row, strength in enumerate(STRENGTHS):
                moved = scores + np.float32(strength) * gained
                moved_own[row, some.start + inside] = moved[inside, here[inside]]
                moved[inside, here[inside]] = -np.inf
                best[row, some] = np.maximum(best[row, some], moved.max(axis=1))
        start += len(block)
    return np.asarray(moved_own - best)


def folds_within(answer: np.ndarray, folds: int) -> np.ndarray:
    """The fold of each query, of those whose answer [m] is that of others too; -1 for others and where it is -1. The
    wordings of one target are spread over the folds, so that each fold leaves some of them."""
    by_target = np.argsort(answer, kind="stable")
    _, first, group, count = np.unique(answer[by_target], return_index=True, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    fold_of = np.empty(len(answer), np.int64)
    fold_of[by_target] = (np.arange(len(answer)) - first[group] + group) % folds
    fold_of[by_target[count[group] < 2]] = -1
    fold_of[answer < 0] = -1
    return fold_of


def require_learnable(learn: bool, method: str, metric: Metric | str, targets: object, **others: object) -> None:
    """Raises InputError for what was not measured together with what is learned, or does not apply it. others:
    parameters of a fit that must not be set."""
    if learn is not True:
        raise InputError(Parameter("learn", learn), ": expected True or False")
    if method != "blend":
        raise InputError("learn=True goes with the default method, not with ", Parameter("method", method))
    if Metric.parse(metric) is Metric.EUCLIDEAN:
        raise InputError("learn=True is for inner products, not for ", Parameter("metric", "euclidean"))
    if targets is None:
        raise InputError("learn=True is tried on the gallery: pass ", Parameter("targets"))
    for name, value in others.items():
        if value:
            raise InputError("learn=True does not go with ", Parameter(name), ": leave one of the two out")
