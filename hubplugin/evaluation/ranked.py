"""Rankings for an evaluation: by a store's search, or of arrays under each method."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from hubplugin.bank import Bank, BankLike, PreparedBank, compare
from hubplugin.compute import (
    TIE,
    Compute,
    TopK,
    TruthCounts,
    search,
    topk,
)
from hubplugin.errors import InputError, Parameter
from hubplugin.evaluation.plans import PLANS, require_solvable
from hubplugin.evaluation.truth import (
    Names,
    TruthLike,
    as_names,
    as_truth,
    read_truth,
)
from hubplugin.jobs.hubs import NOT_FOUND, search_store
from hubplugin.jobs.naming import Naming, display_names
from hubplugin.measures.retrieval import Ranks, Truth, rank_pairs
from hubplugin.measures.significance import Figure
from hubplugin.methods import METHODS, build_method
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, QueryMap, Setting, describe_method
from hubplugin.rerank import QUERY_METHODS
from hubplugin.results import CORRECTED, RAW
from hubplugin.store import Id, Store
from hubplugin.vectors import (
    VectorLike,
    Vectors,
    as_vectors,
    prepare,
)

Scoring: TypeAlias = Callable[[slice], np.ndarray]
"""A function from a slice of the rows of the queries to their scores of all targets,
[rows, n]."""

Counts: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
"""`greater` and `equal` of `TruthCounts` [p], and the rows of `TopK` [q, k]."""


@dataclass(frozen=True)
class Task:
    """The queries of an evaluation, and how they are searched.

    queries: The queries [q, d].
    query_names: The names of the queries in reports.
    k: The number of targets that each query finds.
    seed: The seed of samples and of the noise that breaks ties.
    """

    queries: Vectors
    query_names: Sequence[object] | None
    k: int
    seed: int
    compute: Compute


@dataclass(frozen=True)
class Candidate:
    """A way to rank targets.

    The targets of an array are ranked either by `scores` or by `offsets` [n], with
    queries mapped by `query_map` if there is one. For a store all three are None, since
    the store's own search ranks.
    """

    label: str
    method: str
    parameters: dict[str, Setting]
    offsets: np.ndarray | None = None
    query_map: QueryMap | None = None
    scores: Scoring | None = None


@dataclass(frozen=True)
class Ranking:
    """The first targets of each query under a candidate, and the ranks of true targets.

    nearest: The first k targets of each query [q, k], as places in `Ranked.ids`; padded
        with -1 if the query finds fewer.
    best: The rank of the first true target of each judged query [j]; infinite if a
        store does not find it among the first k.
    ranks: The ranks of all true targets; None for a store, which ranks only k targets.
    """

    candidate: Candidate
    nearest: np.ndarray
    best: np.ndarray
    ranks: Ranks | None = None


@dataclass(frozen=True)
class Ranked:
    """Rankings of the queries of a task, with the facts for figures and reports.

    rankings: One ranking for each candidate; the raw one comes first.
    ids: The ids of targets by their place, to which `Ranking.nearest` refers: all
        targets of an array, or the targets of a store that some query finds.
    count: The number of targets; None under a filter, since a store does not count the
        targets that pass it.
    judged: The rows of the queries that have a true target [j].
    asked: The names of all queries [q].
    names: A function from the ids of targets to their names.
    facts: The fields of `Results` that describe the gallery, such as metric and size.
    """

    rankings: list[Ranking]
    ids: Sequence[Id]
    count: int | None
    judged: np.ndarray
    asked: list[str]
    names: Callable[[Sequence[Id]], list[str]]
    facts: dict[str, Any]


def rank_store(
    task: Task,
    store: Store,
    truth: TruthLike,
    condition: str | None,
    naming: Naming | None,
) -> Ranked:
    """Search a store for the queries of a task as an application does.

    The searches use index, quantisation and filter, so the rankings show their losses.
    Without an active correction, the store is searched raw only.

    Args:
        task: The queries and the number of targets that each finds.
        store: The store, which is not changed.
        truth: The ids of the true targets of each query.
        condition: A filter.
        naming: The function that names targets.

    Raises:
        InputError: An argument does not match the store, or no query finds a true
            target.
    """
    if task.queries.dim != store.dim:
        raise InputError(
            f"{task.queries.name} have {task.queries.dim} dimensions, "
            f"{store.url} has {store.dim}; embed the queries with the gallery's model"
        )
    if task.k < 1:
        raise InputError(f"k={task.k}: expected at least 1")
    count = store.count()
    if not count:
        raise InputError(f"{store.url} is empty; add vectors, then evaluate it")
    prepare(task.queries, store.metric)  # raises for zero vectors
    true_ids = read_truth(truth, task.queries.rows, task.query_names)
    judged = np.flatnonzero([bool(each) for each in true_ids])
    facts: dict[str, Any] = {
        "metric": store.metric.value,
        "targets": count,
        "store": store.url,
        "condition": condition,
    }
    candidates = [Candidate(RAW, RAW, {})]
    correction = store.correction()
    if correction is not None and correction.active:
        model = correction.model
        facts["correction"] = describe_method(model.method, model.parameters)
        at_fit = model.hubness_at_fit
        if at_fit is not None and at_fit.right is not None:
            _before, _after, *change = at_fit.right
            facts["forecast"] = Figure(*change)
        candidates.append(Candidate(CORRECTED, model.method, model.parameters))
    searched = store if condition is None else store.with_filter(condition)
    vectors = task.queries.array()
    place_of: dict[Id, int] = {}
    found = []
    for each in candidates:
        nearest = search_store(
            searched, vectors, task.k, each.label, task.compute, place_of
        )
        found.append(nearest)
    # Ids that are numbers in the store may be texts in a file.
    by_text = {str(id): place for id, place in place_of.items()}
    true_places = []
    for row in judged:
        true_places.append([by_text.get(str(key), NOT_FOUND) for key in true_ids[row]])
    rankings = []
    for candidate, nearest in zip(candidates, found, strict=True):
        best = np.full(len(judged), math.inf)
        for number, places in enumerate(true_places):
            ranks = np.flatnonzero(np.isin(nearest[judged[number]], places)) + 1.0
            best[number] = ranks.min(initial=math.inf)
        rankings.append(Ranking(candidate, nearest, best))
    if np.isinf(rankings[0].best).all():
        example = next(iter(place_of), None)
        expected = next(iter(true_ids[judged[0]]))
        raise InputError(
            f"no query finds a true target in {store.url}: its searches find ids such "
            f"as {example!r}, the ground truth names {expected!r}; expected ids of the "
            "store, in the order of the queries"
        )
    return Ranked(
        rankings,
        [*place_of],
        count if condition is None else None,
        judged,
        _name_rows(task.query_names, "query", range(task.queries.rows)),
        lambda keys: display_names(keys, naming),
        facts,
    )


def rank_arrays(
    task: Task,
    targets: VectorLike,
    truth: TruthLike,
    names: Names,
    metric: Metric,
    bank: BankLike | None,
    methods: Sequence[str] | None,
    models: Mapping[str, OffsetModel],
) -> Ranked:
    """Rank targets [n, d] for the queries of a task, raw and by each method and model.

    `methods` defaults to every additive method that the bank allows. Raises InputError
    if the arguments do not match one another.
    """
    gallery = as_vectors(targets, "targets")
    if task.queries.dim != gallery.dim:
        raise InputError(
            f"{task.queries.name} have {task.queries.dim} dimensions, {gallery.name} "
            f"have {gallery.dim}; embed both with the same model"
        )
    queries = prepare(task.queries, metric)
    if not 1 <= task.k <= gallery.rows:
        raise InputError(
            Parameter("k", task.k),
            f" is not between 1 and the {gallery.rows} targets of the gallery",
        )
    if RAW in models:
        raise InputError(f"a model cannot be labelled {RAW!r}; choose another label")
    names = as_names(names, gallery.rows, "names")
    prepared = None
    if bank is not None:
        # No method uses clicks, and they may be ids that an array lacks.
        prepared = Bank.of(bank).prepare(metric, task.compute)
        prepared = replace(prepared, clicks=None).against(gallery)
        if methods is None:
            has_answers = prepared.target_bank is not None
            methods = [name for name in METHODS if name != "dualis" or has_answers]
    pairs = as_truth(truth, len(queries), gallery.rows, task.query_names, names)
    arrays = Arrays(queries, gallery, metric, task, pairs, prepared)
    # The keys of a dictionary are unique, so a method named twice is ranked once.
    candidates = {RAW: Candidate(RAW, RAW, {}, np.zeros(gallery.rows, np.float32))}
    for method in methods or ():
        candidates[method] = arrays.by_method(method)
    for label, model in models.items():
        candidates[label] = arrays.by_model(label, model)
    return Ranked(
        arrays.rank([*candidates.values()]),
        range(gallery.rows),
        gallery.rows,
        pairs.judged,
        _name_rows(task.query_names, "query", range(len(queries))),
        partial(_name_rows, names, "target"),
        {"metric": metric.value, "targets": gallery.rows},
    )


def _name_rows(
    names: Sequence[object] | None, kind: str, rows: Iterable[Any]
) -> list[str]:
    """Return the names in reports of the queries or targets in `rows`."""
    if names is None:
        return [f"{kind} {row}" for row in rows]
    return [str(names[row]) for row in rows]


@dataclass(frozen=True)
class Arrays:
    """Prepared queries [q, d], targets, the true pairs and the bank of an evaluation."""

    queries: np.ndarray
    targets: Vectors
    metric: Metric
    task: Task
    truth: Truth
    bank: PreparedBank | None

    def by_method(self, method: str) -> Candidate:
        """Return the candidate of a method in its typed form, such as 'is tau=0.05'.

        Raises InputError for an unknown method or parameter, or a missing bank.
        """
        name, *settings = method.split() or [""]
        parameters: dict[str, Setting] = {}
        for setting in settings:
            key, _, value = setting.partition("=")
            if not value:
                raise InputError(
                    f"method {method!r}: {key!r} has no value; write NAME=VALUE, as in "
                    "'is tau=0.05'"
                )
            parameters[key] = value
        if name in PLANS:
            if parameters:
                raise InputError(f"method {name!r} takes no parameters")
            require_solvable(name, len(self.queries), self.targets.rows)

            def plan(rows: slice) -> np.ndarray:
                """Return the plan's entries for the queries in `rows`."""
                return PLANS[name](self._similarities(slice(None)))[rows]

            return Candidate(method, name, {}, scores=plan)
        if name not in METHODS and name not in QUERY_METHODS:
            known = ", ".join([*METHODS, *QUERY_METHODS, *PLANS])
            raise InputError(f"unknown method {name!r}: use one of {known}")
        if self.bank is None:
            raise InputError(
                f"method {name!r} needs example queries: pass ", Parameter("bank")
            )
        if name in METHODS:
            model = build_method(METHODS, name, parameters).fit(self.bank)
            return self.by_model(method, model)
        configuration = build_method(QUERY_METHODS, name, parameters)
        rule = configuration.rule(self.bank)
        kept = rule.keep(self.targets)

        def scores(rows: slice) -> np.ndarray:
            """Return the scores under the rule for the queries in `rows`."""
            return rule.rescore(self._similarities(rows), kept)

        return Candidate(method, name, configuration.model_dump(), scores=scores)

    def by_model(self, label: str, model: OffsetModel) -> Candidate:
        """Return the candidate of a model. Raises InputError if the metrics differ."""
        if model.metric is not self.metric:
            raise InputError(
                f"model {label!r} is for {model.metric.value}, but the evaluation is "
                f"for {self.metric.value}; fit with ",
                Parameter("metric", self.metric.value),
            )
        offsets = model.offsets(self.targets, compute=self.task.compute)
        return Candidate(
            label, model.method, model.parameters, offsets, model.query_map
        )

    def _similarities(self, rows: slice) -> np.ndarray:
        """Return the similarities of the queries in `rows` to all targets."""
        quiet = self.task.compute.without_progress
        return compare(self.queries[rows], self.targets, self.metric, quiet)

    def rank(self, candidates: Sequence[Candidate]) -> list[Ranking]:
        """Rank by each candidate.

        Candidates with offsets share one search, but a model with a query map needs a
        search of its own.
        """
        shared = []
        counted: dict[str, Counts] = {}
        for candidate in candidates:
            if candidate.scores is not None:
                counted[candidate.label] = self._rank_by(candidate, candidate.scores)
            elif candidate.query_map is not None:
                counted |= self._search([candidate])
            else:
                shared.append(candidate)
        counted |= self._search(shared)
        rankings = []
        for candidate in candidates:
            greater, equal, nearest = counted[candidate.label]
            ranks = rank_pairs(self.truth, greater, equal)
            rankings.append(Ranking(candidate, nearest, ranks.best, ranks))
        return rankings

    def _search(self, candidates: Sequence[Candidate]) -> dict[str, Counts]:
        """Rank by offsets. All `candidates` have the same query map, or none."""
        top = TopK(self.task.k)
        counts = TruthCounts(self.truth.query_rows, self.truth.target_rows)
        query_map = candidates[0].query_map
        search(
            self.queries if query_map is None else query_map(self.queries),
            self.targets,
            self.metric,
            self.task.compute,
            top,
            counts,
            offsets=np.stack([np.asarray(each.offsets) for each in candidates]),
        )
        found = zip(counts.greater, counts.equal, top.rows, strict=True)
        labels = [candidate.label for candidate in candidates]
        return dict(zip(labels, found, strict=True))

    def _rank_by(self, candidate: Candidate, scores: Scoring) -> Counts:
        """Rank by scores, for as many queries at a time as memory allows.

        A plan ranks all queries at once, since each of its scores depends on all of
        them.
        """
        truth = self.truth
        compute = self.task.compute
        count = len(self.queries)
        greater = np.empty(len(truth.query_rows), np.int64)
        equal = np.empty_like(greater)
        nearest = np.empty((count, self.task.k), np.int64)
        is_plan = candidate.method in PLANS
        height = count
        if not is_plan:
            # A rule may hold eight copies of the scores in float64.
            height = max(1, compute.bytes() // (8 * 8 * self.targets.rows))
        rng = np.random.default_rng(self.task.seed)
        for start in range(0, count, height):
            rows = slice(start, min(start + height, count))
            s = scores(rows)
            # True pairs are ordered by query.
            first, last = np.searchsorted(truth.query_rows, [start, rows.stop])
            for pair in range(first, last):
                row = s[truth.query_rows[pair] - start]
                own = row[truth.target_rows[pair]]
                tie = TIE * np.finfo(np.float32).eps * abs(own)
                greater[pair] = (row > own + tie).sum()
                # The true target ties with itself, and is not counted.
                equal[pair] = (row >= own - tie).sum() - greater[pair] - 1
            if is_plan:
                # Nearly all scores of a plan are 0. Break these ties at random, or the
                # first rows would win them all. The noise is far below any other score.
                smallest = s[s > 0].min()
                s = s + rng.random(s.shape) * smallest * 1e-3
            nearest[rows] = topk(s, self.task.k)[1]
            compute.report(f"ranking by {candidate.label}", rows.stop, count)
        return greater, equal, nearest
