"""What known answers teach: a linear map of the query, one closed step, as strong as held-out answers allow."""

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
"""The share of pairs whose query is nearer to its own answer than to another's, below which they are no pairs of this
model and gallery. It is 0.5 by chance."""

STRENGTHS = 0.0, 0.25, 0.5, 1.0
"""Of the map."""

SHARES = 1.0, 0.5, 0.0
"""Of the offsets. They are as they are without a map, unless less is ahead by `ERRORS` standard errors on every side.
On ICD's titles, where offsets lose, that gains 2 to 4 points of what nobody asked for (benchmarks/learning.py)."""

FOLDS, PROBES = 3, 1_500
"""On either side, and how many of the pairs these try."""

FEWEST_JUDGED = 50
"""Judged pairs, below which they do not choose."""

SOFTNESS = 0.4
"""A query counts as right to the degree sigmoid(margin / (SOFTNESS tau))."""

APART, ERRORS = 0.85, 2.0
"""No side may be behind by more than so many standard errors with a whitening or a strength: a few hundred pairs are
too few to show what these gain. Where `own_share` is `APART` or more, as across modalities and languages, all sides
must be ahead by as many, for there held-out pairs do not see all that is lost (docs/measurements/methods.md)."""

KEPT = 0.9
"""How much of the identity a whitening keeps."""

PRODUCTS = 1 << 22
"""Similarities that are held at once: 16 MiB, which a cache has room for."""


def pairs_of(bank: PreparedBank, what: str = "the bank", fewest: int = FEWEST_PAIRS) -> np.ndarray:
    """The rows [m] of the different pairs of a bank. what: what errors call it.

    Raises InputError where it has less than `fewest`, CorrectionRefused where they are no pairs of this gallery.
    """
    known = bank.known_answers
    if known is None:
        raise InputError("learn=True learns from what each query asks for: pass a Bank with ", Parameter("answers"))
    rows = np.flatnonzero(known >= 0)
    first = {(bank.query_bank[row].tobytes(), int(known[row])): row for row in rows[::-1]}
    rows = np.sort(np.fromiter(first.values(), np.int64, len(first)))
    queries, own, targets = Training(bank, bank, rows).pairs
    if len(rows) < fewest or len(targets) < FEWEST_TARGETS:
        raise InputError(
            f"{what} has {len(rows)} different pairs of {len(targets)} targets; learn=True needs {fewest} pairs of "
            f"{FEWEST_TARGETS} targets: collect more, or leave ",
            Parameter("learn"),
            " out",
        )
    other = (own + np.random.default_rng(0).integers(1, len(targets), len(own))) % len(targets)
    nearer = float(((queries * (targets[own] - targets[other])).sum(axis=1) > 0).mean())
    if nearer < NEARER:
        raise CorrectionRefused(
            f"the answers of {what} do not belong to its queries: {nearer:.0%} of these are nearer to their own than "
            f"to another's ({NEARER:.0%} is needed, 50% is chance); nothing was changed: pass answers of this gallery "
            "to queries of its model"
        )
    return rows


@dataclass(frozen=True)
class Learning:
    """How offsets and a map are fitted together: a `method` and the share of its offsets; strength, temperature and
    whitening of the map."""

    method: Method
    strength: float
    tau: float
    whitening: np.ndarray | None = None
    share: float = 1.0

    def whitened(self, queries: np.ndarray) -> np.ndarray:
        return queries if self.whitening is None else queries @ self.whitening.T

    def map_by(self, w: np.ndarray, pairs: int) -> QueryMap | None:
        """(I + s W) Z, with Z the whitening; None for I."""
        if not self.strength and self.whitening is None:
            return None
        eye = np.eye(len(w), dtype=np.float32)
        first = eye if self.whitening is None else self.whitening
        step = (eye + np.float32(self.strength) * w) @ first - eye
        return QueryMap(step, self.strength, pairs, self.whitening is not None)

    def query_map(self, queries: np.ndarray, own: np.ndarray, targets: np.ndarray) -> QueryMap | None:
        """What pairs teach, see `learned`."""
        if not self.strength:
            return self.map_by(np.zeros((queries.shape[1],) * 2, np.float32), len(queries))
        return self.map_by(learned(self.whitened(queries), own, targets, self.tau), len(queries))

    @property
    def offsets(self) -> Method:
        """The method with that share of its offsets."""
        return self.method.model_copy(update={"strength": self.share * float(str(self.method.parameters["strength"]))})

    def fit(self, given: FitInput, query_map: QueryMap | None) -> OffsetModel:
        """The method fitted on the bank of `given`, mapped. The model has the bank as it was given."""
        if query_map is None:
            return self.offsets.fit(given)
        asked = query_map.of_bank(given.query_bank)
        model = self.offsets.fit(replace(given, query_bank=asked))
        terms = tuple(replace(term, bank=given.query_bank) if term.bank is asked else term for term in model.terms)
        return model.replace(terms=terms, query_map=query_map, bank_fingerprint=given.fingerprint)

    def __call__(self, left: Training) -> list[OffsetsAndMap]:
        """What the pairs that a fold leaves teach, and the offsets of its bank as they map it."""
        query_map = self.query_map(*left.pairs)
        model = self.fit(left.fit_input, query_map)
        return [(model.raw_offsets(left.fit_input.require_targets("learn"), left.fit_input.compute), query_map)]


NOTHING = "the pairs taught nothing beyond the offsets: queries are not mapped"


@dataclass(frozen=True)
class Lesson:
    """What the known answers of a bank taught. model: with a query map, or without one where held-out answers gain
    nothing by it. how: its method, and what was chosen. asked, other: R@1 of held-out pairs without and with the map,
    of other wordings of targets that stay asked for, None where there are few, and of targets that nobody else asks
    for."""

    model: OffsetModel
    how: Annotated[InstanceOf[Learning], Field(exclude=True)]
    asked: Side | None
    other: Side

    @computed_field  # type: ignore[prop-decorator]
    @property
    def strength(self) -> float:
        """Of the map of the query, 0 where none was learned."""
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
        said = "; ".join(f"{name}: {side}" for name, side in sides if side is not None)
        offsets = {1.0: "", 0.0: ", without offsets"}.get(self.how.share, f", with {self.how.share:g} of the offsets")
        return [f"{self.model.query_map}{offsets}; over the offsets alone, {said}"]


def taught(configuration: Method, bank: PreparedBank, judged: PreparedBank | None = None) -> Lesson:
    """`configuration` fitted on `bank`, with the query map that its known answers teach.

    judged: clicks that somebody has looked at, by which strength and whitening are chosen in the place of the bank's.
    Raises InputError where either has too few answers, CorrectionRefused where these do not belong to the queries.
    """
    rows, rng, gallery = pairs_of(bank), np.random.default_rng(0), bank.require_targets("learn")
    some = draw_sample(gallery, len(bank.query_bank), bank.metric, rng)
    apart = own_share(bank.query_bank, some, bank.compute, rng) >= APART
    hows = []
    for first in (None, whitening(bank.query_bank, gallery, bank.metric)):
        asked = bank if first is None else replace(bank, query_bank=bank.query_bank @ first.T)
        method = configuration.resolve(asked)
        hows.append(Learning(method, 0.0, float(str(method.parameters["tau"])), first))
    tried, sides = sides_of(bank, rows, judged)
    margins = {side: cross_validate([strengths_of(how) for how in hows], tried, each) for side, each in sides.items()}
    best = chosen([_by_base(each) for each in margins.values()], hows[0].tau, ERRORS if apart else -ERRORS)
    number = int(np.ravel_multi_index(best, (len(hows), len(STRENGTHS), len(SHARES))))
    figures = {side: change_of([each], 0, number, WHAT[side]) for side, each in margins.items()}
    how = replace(hows[best[0]], strength=STRENGTHS[best[1]], share=SHARES[best[2]])
    query_map = how.query_map(*Training(bank, bank, rows).pairs)
    if query_map is not None:
        how = replace(how, method=configuration.resolve(replace(bank, query_bank=query_map.of_bank(bank.query_bank))))
    model = how.fit(bank, query_map)
    other = figures["other"]
    assert other is not None
    return Lesson(model, how, figures.get("asked"), other)


WHAT = {"asked": "other wordings", "other": "pairs"}
"""What the held-out pairs of each side are."""


def _by_base(margins: Margins) -> np.ndarray:
    """[bases, strengths, shares, probes]."""
    assert margins.margins is not None
    return margins.margins.reshape(-1, len(STRENGTHS), len(SHARES), margins.margins.shape[1])


def strengths_of(how: Learning) -> Callable[[Training], list[OffsetsAndMap]]:
    """All strengths of a map, each beside all shares of the offsets of the bank as it is, or whitened."""

    def tried(left: Training) -> list[OffsetsAndMap]:
        queries, own, targets = left.pairs
        offsets = how.method.raw_offsets(replace(left.fit_input, query_bank=how.whitened(left.fit_input.query_bank)))
        w = learned(how.whitened(queries), own, targets, how.tau)
        maps = [replace(how, strength=each).map_by(w, len(queries)) for each in STRENGTHS]
        return [(share * offsets, each) for each in maps for share in SHARES]

    return tried


def sides_of(
    bank: PreparedBank, rows: np.ndarray, judged: PreparedBank | None = None
) -> tuple[PreparedBank, dict[str, list[Fold]]]:
    """The pairs that are learned from and tried, and by side their folds: "other", where the target of a query was
    never among the learned; and "asked", other wordings of targets that stay asked for, where there are enough.
    rows: of the bank's pairs. judged: of whose pairs is tried what is learned from the bank's."""
    assert bank.known_answers is not None
    rng, both, tried = np.random.default_rng(0), bank, rows
    if judged is not None:
        if bank.clicks is None or judged.clicks is None:
            raise InputError(Parameter("judged"), " is for logs: pass ids or rows as answers, in both banks")
        tried = len(bank.query_bank) + pairs_of(judged, "the judged bank", FEWEST_JUDGED)
        queries = np.concatenate([bank.query_bank, judged.query_bank])
        both = replace(bank, query_bank=queries, clicks=np.concatenate([bank.clicks, judged.clicks]))
    known, order = both.known_answers, rng.permutation(tried)
    assert known is not None
    numbers, target = np.unique(known, return_inverse=True)
    fold_of = (rng.permutation(len(numbers)) % FOLDS)[target.reshape(-1)]
    held = [order[fold_of[order] == number][: PROBES // FOLDS] for number in range(FOLDS)]
    other = [Fold(rows[fold_of[rows] != number], each) for number, each in enumerate(held)]
    if judged is None:
        again = make_folds(order, folds_within(known[order], FOLDS), PROBES)
    else:
        looked_at = {query.tobytes() for query in both.query_bank[tried]}
        seen = rows[[query.tobytes() not in looked_at for query in both.query_bank[rows]]]
        again = [Fold(seen, order[np.isin(known[order], known[seen])][:PROBES])]
    unanswered = np.flatnonzero(bank.known_answers < 0)  # of which offsets are fitted, too
    other, again = ([Fold(np.union1d(each.train, unanswered), each.test) for each in side] for side in (other, again))
    enough = sum(len(fold.test) for fold in again) >= FEWEST_PARAPHRASES
    return both, {"other": other, "asked": again} if enough else {"other": other}


def chosen(sides: list[np.ndarray], tau: float, errors: float) -> tuple[int, int, int]:
    """Base, strength and share, by their numbers, from the margins [bases, strengths, shares, probes] of each side.

    Base and strength are the last whose soft R@1, with all of the offsets, is ahead of that of the first base without a
    map by so many standard `errors` on every side, or behind by no more than that where it is a negative number. Of
    what is asked again the folds of a log with one wording a target see nothing, and there the strongest map gains
    most. Less of the offsets, beside a map, must be ahead of that by `ERRORS`.
    """
    soft = [soft_right(margins, tau) for margins in sides]

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


def soft_right(margins: np.ndarray, tau: float) -> np.ndarray:
    """To which degree probes count as right."""
    right: np.ndarray = 1 / (1 + np.exp(np.clip(-margins / (SOFTNESS * tau), -30, 30)))
    return right


def is_ahead(gains: np.ndarray, errors: float) -> bool:
    """Whether the mean of `gains` [p] is not below so many standard errors of it; equal ones are not ahead."""
    return bool(gains.mean() >= errors * gains.std() / len(gains) ** 0.5) and (errors < 0 or bool(gains.any()))


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
