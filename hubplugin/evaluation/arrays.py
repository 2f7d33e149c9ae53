"""Arrays as something that ranks: all targets for all queries, raw and under each method that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from hubplugin.bank import Bank, BankLike
from hubplugin.compute import TIE, Compute, Similarities, TopK, TruthCounts, dense, prepared, search, torch
from hubplugin.errors import InputError, Parameter
from hubplugin.evaluation.plans import PLANS, require_solvable
from hubplugin.evaluation.ranking import RAW, Ranking
from hubplugin.evaluation.truth import Names, TruthLike, as_names, as_truth
from hubplugin.measures.retrieval import Truth, expected_ranks
from hubplugin.methods import METHODS, FitInput, configured
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, Setting
from hubplugin.query_dependent import QUERY_METHODS
from hubplugin.store import Id
from hubplugin.vectors import VectorLike, Vectors, as_vectors


@dataclass(frozen=True)
class Scene:
    """queries [q, d] are prepared; bank: None without example queries; k: how many targets are found for a query."""

    queries: np.ndarray
    targets: Vectors
    truth: Truth
    bank: FitInput | None
    metric: Metric
    compute: Compute
    k: int
    seed: int


class RankedArrays:
    """`targets` [n, d], ranked for `queries` [q, d] by their similarity, and under each method."""

    recall_at: tuple[int, ...] = (1, 5, 10)

    def __init__(
        self,
        targets: VectorLike,
        bank: BankLike | None,
        queries: Vectors,
        truth: TruthLike,
        *,
        methods: Sequence[str] | None,
        models: Mapping[str, OffsetModel],
        k: int,
        names: Names,
        query_names: Sequence[object] | None,
        metric: Metric | str,
        seed: int,
        compute: Compute,
    ):
        metric, gallery = Metric.parse(metric), as_vectors(targets, "targets")
        _require_usable(queries, gallery, k, models)
        self._names = as_names(names, gallery.rows, "names")
        given = None if bank is None else Bank.of(bank).read(metric, compute, targets=gallery)
        pairs = as_truth(truth, queries.rows, gallery.rows, query_names, self._names)
        self._scene = Scene(prepared(queries, metric), gallery, pairs, given, metric, compute, k, seed)
        self._candidates = candidates_of(methods, models, self._scene)
        self.ids: Sequence[Id] = range(gallery.rows)
        self.count: int | None = gallery.rows
        self.judged = pairs.judged

    def rankings(self) -> Iterator[Ranking]:
        """Those with offsets share one search."""
        scene, top = self._scene, TopK(self._scene.k)
        counts = TruthCounts(scene.truth.query_rows, scene.truth.target_rows)
        offsets = np.stack([each.offsets for each in self._candidates if each.offsets is not None])
        search(scene.queries, scene.targets, scene.metric, scene.compute, top, counts, offsets=offsets)
        searched = iter(zip(counts.greater, counts.equal, top.rows, strict=True))
        for candidate in self._candidates:
            greater, equal, nearest = next(searched) if candidate.scores is None else _scored(candidate, scene)
            ranks = expected_ranks(scene.truth, greater, equal)
            yield Ranking(
                label=candidate.label, method=candidate.method, parameters=candidate.parameters, nearest=nearest,
                best=ranks.best, ranks=ranks, offsets=candidate.offsets, storable=candidate.offsets is not None,
                transductive=candidate.method in PLANS,
            )  # fmt: skip

    def true_targets(self, place: int) -> Sequence[Id]:
        truth = self._scene.truth
        first = truth.starts[place]
        true: list[Id] = truth.target_rows[first : first + truth.counts[place]].tolist()
        return true

    def names(self, ids: Sequence[Id]) -> list[str]:
        return [f"target {row}" if self._names is None else str(self._names[int(row)]) for row in ids]

    def found_first(self) -> np.ndarray | None:
        if self._nearest_to_bank is None:
            return None
        truth = self._scene.truth
        return np.logical_or.reduceat(np.isin(truth.target_rows, self._nearest_to_bank), truth.starts)

    @cached_property
    def _nearest_to_bank(self) -> np.ndarray | None:
        """The targets that are the nearest of some bank query. What no bank query comes near, no bank query can tell
        to be a hub; m bank rows cover at most m / n of the gallery."""
        scene, nearest = self._scene, TopK(1)
        if scene.bank is None:
            return None
        bank = scene.bank.query_bank
        search(bank, scene.targets, scene.metric, scene.compute, nearest, what="coverage of the gallery")
        return np.unique(nearest.rows)

    def facts(self) -> dict[str, Any]:
        bank, nearest = self._scene.bank, self._nearest_to_bank
        second = None if bank is None else bank.target_bank
        return {
            "metric": self._scene.metric.value,
            "targets": self.count,
            "query_bank": None if bank is None else len(bank.query_bank),
            "target_bank": None if second is None else len(second),
            "coverage": None if nearest is None else len(nearest) / len(self.ids),
        }


def _require_usable(queries: Vectors, gallery: Vectors, k: int, models: Mapping[str, OffsetModel]) -> None:
    if queries.dim != gallery.dim:
        raise InputError(
            f"{queries.name} have {queries.dim} dimensions, {gallery.name} have {gallery.dim}; "
            "embed both with the same model"
        )
    if not 1 <= k <= gallery.rows:
        raise InputError(Parameter("k", k), f" is not between 1 and the {gallery.rows} targets of the gallery")
    unlabelled = [label for label in models if label == RAW or not label.strip()]
    if unlabelled:
        raise InputError(f"a model cannot be labelled {unlabelled[0]!r}; name it by another word than {RAW!r}")


@dataclass(frozen=True)
class Candidate:
    """A method that was asked for. Either its offsets [n] are known, or its scores for some of the queries
    (rows -> [rows, n])."""

    label: str
    method: str
    parameters: dict[str, Setting]
    offsets: np.ndarray | None = None
    scores: Callable[[slice], np.ndarray] | None = None


def _scored(candidate: Candidate, scene: Scene) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `TruthCounts` and `TopK` give, of a method that gives scores and no offsets: as many queries at a time as
    memory allows."""
    assert candidate.scores is not None
    truth, count = scene.truth, len(scene.queries)
    greater, equal = np.empty(len(truth.query_rows), np.int64), np.empty(len(truth.query_rows), np.int64)
    nearest = np.empty((count, scene.k), np.int64)
    whole = candidate.method in PLANS
    height = count if whole else max(1, scene.compute.bytes() // (8 * 8 * scene.targets.rows))
    generator = np.random.default_rng(scene.seed)
    for start in range(0, count, height):
        rows = slice(start, min(start + height, count))
        scores = candidate.scores(rows)
        first, last = np.searchsorted(truth.query_rows, [rows.start, rows.stop])
        for pair in range(first, last):
            row, own = scores[truth.query_rows[pair] - start], truth.target_rows[pair]
            tie = TIE * np.finfo(np.float32).eps * abs(row[own])
            greater[pair] = (row > row[own] + tie).sum()
            equal[pair] = (row >= row[own] - tie).sum() - greater[pair] - 1
        if whole:  # nearly all of a plan ties at zero; which of those are found must not depend on their rows
            scores = scores + generator.random(scores.shape) * scores[scores > 0].min() * 1e-3
        nearest[rows] = torch.topk(torch.from_numpy(scores), scene.k, dim=1).indices.numpy()
        scene.compute.report(f"ranking by {candidate.label}", rows.stop, count)
    return greater, equal, nearest


def candidates_of(methods: Sequence[str] | None, models: Mapping[str, OffsetModel], scene: Scene) -> list[Candidate]:
    """The raw search, the methods (None: every additive one that the bank allows) and the models, once each."""
    bank = scene.bank
    if methods is None:
        dual = bank is not None and bank.target_bank is not None
        methods = [] if bank is None else [name for name in METHODS if name != "dualis" or dual]
    raw = Candidate(RAW, RAW, {}, np.zeros(scene.targets.rows, np.float32))
    of_methods = [candidate_of(method, scene) for method in ([methods] if isinstance(methods, str) else methods)]
    of_models = [fitted(label, model, scene) for label, model in models.items()]
    return list({candidate.label: candidate for candidate in (raw, *of_methods, *of_models)}.values())


def fitted(label: str, model: OffsetModel, scene: Scene) -> Candidate:
    if model.metric is not scene.metric:
        raise InputError(f"model {label!r} is for {model.metric.value}, the evaluation for {scene.metric.value}")
    compute = scene.compute
    offsets = model.members.offsets(scene.targets, compute=compute)
    return Candidate(label, model.method, model.parameters, offsets)


def candidate_of(method: str, scene: Scene) -> Candidate:
    name, *settings = method.split() or [""]
    parameters: dict[str, Setting] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise InputError(
                f"method {method!r}: {setting!r} is no parameter; expected NAME=VALUE, as in 'is tau=0.05'"
            )
        parameters[key] = value
    if name in PLANS:
        if parameters:
            raise InputError(f"method {name!r} takes no parameters, got {', '.join(parameters)}")
        require_solvable(name, len(scene.queries), scene.targets.rows)
        return Candidate(method, name, {}, scores=partial(_plan_scores, name, scene))
    if name == "auto":
        raise InputError("method 'auto' is a fit: pass models={'auto': hubplugin.fit(targets, bank, 'auto')}")
    known = {**METHODS, **QUERY_METHODS}
    if name not in known:
        raise InputError(f"unknown method {name!r}: use one of {', '.join([*known, *PLANS])}")
    if scene.bank is None:
        raise InputError(f"method {name!r} needs example queries: pass ", Parameter("bank"))
    if name in METHODS:
        configuration = configured(METHODS, name, parameters)
        return fitted(method, configuration.fit(scene.bank), scene)
    query_dependent = configured(QUERY_METHODS, name, parameters)
    rule = query_dependent.rule(scene.bank)
    kept = rule.keep(scene.targets)

    def scores(rows: slice) -> np.ndarray:
        corrected: np.ndarray = rule.rescore(similarities(rows, scene), kept)
        return corrected

    return Candidate(method, name, query_dependent.model_dump(), scores=scores)


def similarities(rows: slice, scene: Scene) -> np.ndarray:
    product = Similarities(scene.queries[rows], scene.metric, scene.compute.quiet)
    scores: np.ndarray = dense(product, scene.targets).numpy()
    return scores


def _plan_scores(name: str, scene: Scene, rows: slice) -> np.ndarray:
    return PLANS[name](similarities(slice(None), scene))[rows]
