"""A linear map of the query from known answers: one closed step, as strong as held-out answers allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Field, InstanceOf, computed_field

from hubplugin.bank import PreparedBank, own_share
from hubplugin.errors import CorrectionRefused, InputError, Parameter
from hubplugin.guard import FEWEST_PARAPHRASES
from hubplugin.measures.significance import Side
from hubplugin.methods import FitInput, Method
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, QueryMap
from hubplugin.validation import (
    Fold,
    Margins,
    OffsetsAndMap,
    Training,
    change_of,
    cross_validate,
    folds_within,
    make_folds,
)
from hubplugin.vectors import Vectors, draw_sample, prepare_blocks

FEWEST_PAIRS, FEWEST_TARGETS = 50, 10
"""Different pairs, and different targets in them, below which nothing is learned. From 50 on the map gains in five of
six kinds of data, and loses up to 0.7 points of what nobody asked for in the sixth (benchmarks/learning.py)."""

NEARER = 0.75
"""A bank is refused if a smaller share of its queries is nearer to its own answer than to another's: 0.5 is chance."""

STRENGTHS = 0.0, 0.25, 0.5, 1.0
"""Strengths of the map that are tried."""

SHARES = 1.0, 0.5, 0.0
"""Shares of the offsets that are tried. The share is 1 unless a smaller one is ahead by `ERRORS` standard errors on
every side. On ICD's titles, where offsets lose, that gains 2 to 4 points of what nobody asked for."""

FOLDS, PROBES = 3, 1_500
"""Folds of each side, and how many pairs all of them hold out."""

FEWEST_JUDGED = 50
"""Judged pairs, below which they are refused."""

SOFTNESS = 0.4
"""A query counts as right to the degree sigmoid(margin / (SOFTNESS tau))."""

APART, ERRORS = 0.85, 2.0
"""No side may be behind by more than so many standard errors with a whitening or a strength: a few hundred pairs are
too few to show what these gain. Where `own_share` is `APART` or more, as across modalities and languages, all sides
must be ahead by as many, for there held-out pairs do not see all that is lost (docs/measurements/methods.md)."""

KEPT = 0.9
"""How much of the identity a whitening keeps."""

PRODUCTS = 1 << 22
"""Similarities of one block: 16 MiB, which a cache has room for."""


def find_pairs(bank: PreparedBank, name: str = "the bank", fewest: int = FEWEST_PAIRS) -> np.ndarray:
    """The rows [m] of the different pairs of a bank.

    Args:
        bank: A bank with known answers.
        name: What errors call it.
        fewest: How many different pairs it must have.

    Raises:
        InputError: The bank has fewer.
        CorrectionRefused: They are no pairs of this gallery.
    """
    answers = bank.known_answers
    if answers is None:
        raise InputError("learn=True learns from what each query asks for: pass a Bank with ", Parameter("answers"))
    rows = np.flatnonzero(answers >= 0)
    first = {(bank.query_bank[row].tobytes(), int(answers[row])): row for row in rows[::-1]}
    rows = np.sort(np.fromiter(first.values(), np.int64, len(first)))
    queries, answer, targets = Training(bank, bank, rows).pairs
    if len(rows) < fewest or len(targets) < FEWEST_TARGETS:
        raise InputError(
            f"{name} has {len(rows)} different pairs of {len(targets)} targets; learn=True needs {fewest} pairs of "
            f"{FEWEST_TARGETS} targets: collect more, or leave ",
            Parameter("learn"),
            " out",
        )
    other = (answer + np.random.default_rng(0).integers(1, len(targets), len(answer))) % len(targets)
    nearer = float(((queries * (targets[answer] - targets[other])).sum(axis=1) > 0).mean())
    if nearer < NEARER:
        raise CorrectionRefused(
            f"the answers of {name} do not belong to its queries: {nearer:.0%} of these are nearer to their own than "
            f"to another's ({NEARER:.0%} is needed, 50% is chance); nothing was changed: pass answers of this gallery "
            "to queries of its model"
        )
    return rows


@dataclass(frozen=True)
class MapFit:
    """How offsets and a map are fitted together.

    method, share: of the offsets. strength, tau, whitening: of the map.
    """

    method: Method
    strength: float
    tau: float
    whitening: np.ndarray | None = None
    share: float = 1.0

    def whiten(self, queries: np.ndarray) -> np.ndarray:
        return queries if self.whitening is None else queries @ self.whitening.T

    def compose_map(self, w: np.ndarray, pairs: int) -> QueryMap | None:
        """(I + s W) Z, with W = `w` [d, d] of `pairs` pairs and Z the whitening; None for I."""
        if not self.strength and self.whitening is None:
            return None
        eye = np.eye(len(w), dtype=np.float32)
        z = eye if self.whitening is None else self.whitening
        step = (eye + np.float32(self.strength) * w) @ z - eye
        return QueryMap(step, self.strength, pairs, self.whitening is not None)

    def learn(self, queries: np.ndarray, answer: np.ndarray, targets: np.ndarray) -> QueryMap | None:
        """The map that pairs teach, from `queries`, `answer` and `targets` as in `solve_map`."""
        if not self.strength:
            return self.compose_map(np.zeros((queries.shape[1],) * 2, np.float32), len(queries))
        return self.compose_map(solve_map(self.whiten(queries), answer, targets, self.tau), len(queries))

    @property
    def offsets(self) -> Method:
        """The method with the share of its offsets."""
        return self.method.model_copy(update={"strength": self.share * float(str(self.method.parameters["strength"]))})

    def fit(self, fit_input: FitInput, query_map: QueryMap | None) -> OffsetModel:
        """The method fitted on the bank of `fit_input` behind `query_map`. The model holds the bank as it was before
        the map."""
        if query_map is None:
            return self.offsets.fit(fit_input)
        mapped = query_map.of_bank(fit_input.query_bank)
        model = self.offsets.fit(replace(fit_input, query_bank=mapped))
        terms = tuple(replace(term, bank=fit_input.query_bank) if term.bank is mapped else term for term in model.terms)
        return model.replace(terms=terms, query_map=query_map, bank_fingerprint=fit_input.fingerprint)

    def __call__(self, training: Training) -> list[OffsetsAndMap]:
        """The map that the pairs of a fold teach, and the offsets of its mapped bank."""
        query_map = self.learn(*training.pairs)
        model = self.fit(training.fit_input, query_map)
        return [(model.raw_offsets(training.fit_input.require_targets("learn"), training.fit_input.compute), query_map)]


NOTHING = "the pairs taught nothing beyond the offsets: queries are not mapped"


@dataclass(frozen=True)
class LearnedMap:
    """What the known answers of a bank taught.

    model: has a query map, unless held-out answers gain nothing by it. how: the method, and what was chosen. asked: R@1
    without and with the map, of held-out paraphrases whose target stays asked for; None where there are few. other: R@1
    of held-out pairs whose target nobody else asks for.
    """

    model: OffsetModel
    how: Annotated[InstanceOf[MapFit], Field(exclude=True)]
    asked: Side | None
    other: Side

    @computed_field  # type: ignore[prop-decorator]
    @property
    def strength(self) -> float:
        """The strength of the map, 0 where none was learned."""
        return self.how.strength

    @computed_field  # type: ignore[prop-decorator]
    @property
    def whitened(self) -> bool:
        """Whether queries are whitened before they are mapped."""
        return self.how.whitening is not None

    @property
    def notes(self) -> list[str]:
        if self.model.query_map is None:
            return [NOTHING]
        sides = [("asked before", self.asked), ("not asked before", self.other)]
        changes = "; ".join(f"{name}: {side}" for name, side in sides if side is not None)
        offsets = {1.0: "", 0.0: ", without offsets"}.get(self.how.share, f", with {self.how.share:g} of the offsets")
        return [f"{self.model.query_map}{offsets}; over the offsets alone, {changes}"]


def learn_query_map(configuration: Method, bank: PreparedBank, judged: PreparedBank | None = None) -> LearnedMap:
    """`configuration` fitted on `bank`, with the query map that its known answers teach.

    Args:
        configuration: The method of the offsets.
        bank: A bank with known answers, and its gallery.
        judged: Clicks that somebody has looked at. They choose strength and whitening in the place of the bank's.

    Raises:
        InputError: One of the banks has too few answers.
        CorrectionRefused: The answers do not belong to the queries.
    """
    rows, rng, gallery = find_pairs(bank), np.random.default_rng(0), bank.require_targets("learn")
    subset = draw_sample(gallery, len(bank.query_bank), bank.metric, rng)
    apart = own_share(bank.query_bank, subset, bank.compute, rng) >= APART
    bases = []
    for z in (None, compute_whitening(bank.query_bank, gallery, bank.metric)):
        whitened = bank if z is None else replace(bank, query_bank=bank.query_bank @ z.T)
        method = configuration.resolve(whitened)
        bases.append(MapFit(method, 0.0, float(str(method.parameters["tau"])), z))
    both, sides = draw_sides(bank, rows, judged)
    fits = [fit_all_strengths(base) for base in bases]
    margins = {side: cross_validate(fits, both, folds) for side, folds in sides.items()}
    best = choose([split_by_base(part) for part in margins.values()], bases[0].tau, ERRORS if apart else -ERRORS)
    number = int(np.ravel_multi_index(best, (len(bases), len(STRENGTHS), len(SHARES))))
    changes = {side: change_of([part], 0, number, LABELS[side]) for side, part in margins.items()}
    how = replace(bases[best[0]], strength=STRENGTHS[best[1]], share=SHARES[best[2]])
    query_map = how.learn(*Training(bank, bank, rows).pairs)
    if query_map is not None:
        how = replace(how, method=configuration.resolve(replace(bank, query_bank=query_map.of_bank(bank.query_bank))))
    other = changes["other"]
    assert other is not None
    return LearnedMap(how.fit(bank, query_map), how, changes.get("asked"), other)


LABELS = {"asked": "other wordings", "other": "pairs"}
"""What results call the held-out pairs of each side."""


def split_by_base(margins: Margins) -> np.ndarray:
    """[bases, strengths, shares, probes]."""
    assert margins.margins is not None
    return margins.margins.reshape(-1, len(STRENGTHS), len(SHARES), margins.margins.shape[1])


def fit_all_strengths(base: MapFit) -> Callable[[Training], list[OffsetsAndMap]]:
    """All strengths of a map, each with all shares of the offsets that the bank has without a strength."""

    def fit(training: Training) -> list[OffsetsAndMap]:
        queries, answer, targets = training.pairs
        offsets = base.method.raw_offsets(
            replace(training.fit_input, query_bank=base.whiten(training.fit_input.query_bank))
        )
        w = solve_map(base.whiten(queries), answer, targets, base.tau)
        maps = [replace(base, strength=strength).compose_map(w, len(queries)) for strength in STRENGTHS]
        return [(share * offsets, query_map) for query_map in maps for share in SHARES]

    return fit


def draw_sides(
    bank: PreparedBank, rows: np.ndarray, judged: PreparedBank | None = None
) -> tuple[PreparedBank, dict[str, list[Fold]]]:
    """A bank, and by side its folds.

    In "other" the target of a held-out query was never among the learned. In "asked", which is there if it has enough
    queries, held-out queries are paraphrases: their target stays asked for.

    Args:
        bank: A bank with known answers.
        rows: Its pairs, of which a map is learned.
        judged: If given, its pairs are held out in the place of the bank's.
    """
    assert bank.known_answers is not None
    rng, both, held = np.random.default_rng(0), bank, rows
    if judged is not None:
        if bank.clicks is None or judged.clicks is None:
            raise InputError(Parameter("judged"), " is for logs: pass ids or rows as answers, in both banks")
        held = len(bank.query_bank) + find_pairs(judged, "the judged bank", FEWEST_JUDGED)
        queries = np.concatenate([bank.query_bank, judged.query_bank])
        both = replace(bank, query_bank=queries, clicks=np.concatenate([bank.clicks, judged.clicks]))
    answers, order = both.known_answers, rng.permutation(held)
    assert answers is not None
    numbers, target = np.unique(answers, return_inverse=True)
    fold_of = (rng.permutation(len(numbers)) % FOLDS)[target.reshape(-1)]
    parts = [order[fold_of[order] == number][: PROBES // FOLDS] for number in range(FOLDS)]
    other = [Fold(rows[fold_of[rows] != number], part) for number, part in enumerate(parts)]
    if judged is None:
        again = make_folds(order, folds_within(answers[order], FOLDS), PROBES)
    else:
        judged_queries = {query.tobytes() for query in both.query_bank[held]}
        seen = rows[[query.tobytes() not in judged_queries for query in both.query_bank[rows]]]
        again = [Fold(seen, order[np.isin(answers[order], answers[seen])][:PROBES])]
    unanswered = np.flatnonzero(bank.known_answers < 0)  # of which offsets are fitted, too
    other, again = ([Fold(np.union1d(fold.train, unanswered), fold.test) for fold in side] for side in (other, again))
    enough = sum(len(fold.test) for fold in again) >= FEWEST_PARAPHRASES
    return both, {"other": other, "asked": again} if enough else {"other": other}


def choose(sides: list[np.ndarray], tau: float, errors: float) -> tuple[int, int, int]:
    """Chooses base, strength and share of a map.

    Base and strength are the last whose soft R@1, with all of the offsets, is ahead of the first base without a map on
    every side. The folds of a log with one wording a target say nothing of queries that are asked again, and there the
    strongest map gains most. Less of the offsets, beside a map, must be ahead of all of them by `ERRORS`.

    Args:
        sides: the margins of each side [bases, strengths, shares, probes].
        tau: the temperature of the margins.
        errors: by how many standard errors they must be ahead; if it is negative, they may be behind by so many.

    Returns:
        Their numbers.
    """
    soft = [soft_recall(margins, tau) for margins in sides]

    def ahead(this: tuple[int, int, int], other: tuple[int, int, int], errors: float) -> bool:
        return all(is_ahead(each[this] - each[other], errors) for each in soft)

    first = (0, 0, 0)
    base = max((number for number in range(1, len(soft[0])) if ahead((number, 0, 0), first, errors)), default=0)
    strength = max((s for s in range(1, len(STRENGTHS)) if ahead((base, s, 0), first, errors)), default=0)
    best = 0
    for share in range(1, len(SHARES)) if base or strength else ():  # without a map there is nothing beside them
        if ahead((base, strength, share), (base, strength, best), ERRORS):
            best = share
    return base, strength, best


def soft_recall(margins: np.ndarray, tau: float) -> np.ndarray:
    """To which degree probes with these `margins` count as right, by a sigmoid of width `SOFTNESS` times `tau`: from 0
    to 1."""
    right: np.ndarray = 1 / (1 + np.exp(np.clip(-margins / (SOFTNESS * tau), -30, 30)))
    return right


def is_ahead(gains: np.ndarray, errors: float) -> bool:
    """Whether the mean of `gains` [p] is at least `errors` standard errors of it; equal ones are not ahead."""
    return bool(gains.mean() >= errors * gains.std() / len(gains) ** 0.5) and (errors < 0 or bool(gains.any()))


def solve_map(queries: np.ndarray, answer: np.ndarray, targets: np.ndarray, tau: float) -> np.ndarray:
    """W [d, d] of one step of ridge regression from `queries` [m, d] to what their cross-entropy asks of them.

        p = softmax(Q T' / tau),  R = T[answer] - p T,  W = R' Q (Q' Q + r I)^-1,  r the mean eigenvalue of Q' Q

    Q are the queries, `answer` [m] the row of each one's answer in T, at the temperature `tau`. T are the `targets` [c,
    d] that were asked for, and no others: with the whole gallery, what nobody asked for would only ever be pushed away.
    Float32 products, a float64 solution.
    """
    residual = np.empty_like(queries)
    size = max(PRODUCTS // len(targets), 1)
    for start in range(0, len(queries), size):
        rows = slice(start, start + size)
        p = (queries[rows] / np.float32(tau)) @ targets.T
        p -= p.max(axis=1, keepdims=True)
        np.exp(p, out=p)
        residual[rows] = targets[answer[rows]] - (p @ targets) / p.sum(axis=1, keepdims=True)
    gram = (queries.T @ queries).astype(np.float64)
    ridge = np.trace(gram) / len(gram) * np.eye(len(gram))
    solution = np.linalg.solve(gram + ridge, (queries.T @ residual).astype(np.float64))
    return np.ascontiguousarray(solution.T, np.float32)


def compute_whitening(bank: np.ndarray, gallery: Vectors, metric: Metric) -> np.ndarray:
    """Z [d, d], a mild whitening of queries, which needs no answers:

        Z = t (k t I + (1 - k) C)^-1,  C the covariance of `bank` [m, d] and `gallery`, each about its own mean

    t is the mean of the diagonal of C, and k is `KEPT`. The gallery is prepared for `metric`.
    """
    dim, count, total = bank.shape[1], 0, np.zeros(bank.shape[1])
    products = np.zeros((dim, dim))
    for block in prepare_blocks(gallery, metric):
        products += block.T @ block
        total += block.sum(axis=0, dtype=np.float64)
        count += len(block)
    centred = bank - bank.mean(axis=0)
    products += centred.T @ centred - np.outer(total, total) / count
    covariance = products / (count + len(bank))
    size = max(float(np.trace(covariance)) / dim, 1e-30)
    z = size * np.linalg.inv(KEPT * size * np.eye(dim) + (1 - KEPT) * covariance)
    return np.ascontiguousarray(z, np.float32)


def require_learnable(learn: bool, method: str, metric: Metric | str, targets: object, **others: object) -> None:
    """Raises InputError for `learn`, `method`, `metric` and `targets` of a fit under which a map was not measured, or
    would not be applied, and for `others` that are set."""
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
