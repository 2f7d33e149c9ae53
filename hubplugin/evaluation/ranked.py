"""What ranks targets for queries: a store by its own search, and arrays under each method that was asked for.

Transport plans between all queries and all targets (DBSN table 6) are for comparison, since no search knows its queries
beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from hubplugin.bank import Bank, BankLike, PreparedBank
from hubplugin.compute import (
    TIE,
    Compute,
    Similarities,
    TopK,
    TruthCounts,
    dense,
    search,
    topk,
)
from hubplugin.errors import InputError, Parameter, install
from hubplugin.evaluation.truth import (
    Names,
    TruthLike,
    as_names,
    as_truth,
    read_truth,
)
from hubplugin.jobs.naming import Naming, display_names
from hubplugin.measures.retrieval import Ranks, Truth, rank_pairs
from hubplugin.measures.significance import Figure, Side
from hubplugin.methods import METHODS, build_method
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, QueryMap, Setting, describe_method
from hubplugin.rerank import QUERY_METHODS
from hubplugin.store import Id, Store
from hubplugin.vectors import (
    Directed,
    VectorLike,
    Vectors,
    as_vectors,
    locate_rows,
    original_rows,
    prepare,
)

RAW = "raw"


@dataclass(frozen=True)
class Task:
    """Queries [q, d], what reports call them, how many targets each finds, and the seed of samples."""

    queries: Vectors
    query_names: Sequence[object] | None
    k: int
    seed: int
    compute: Compute

    def name(self, row: int) -> str:
        """Return what the query in a row is called."""
        if self.query_names is None:
            return f"query {row}"
        return str(self.query_names[row])


@dataclass(frozen=True)
class Candidate:
    """One way to rank targets. Of arrays its offsets [n] are known, and the query map of its model; or else its scores
    for some of the queries (rows -> [rows, n])."""

    label: str
    method: str
    parameters: dict[str, Setting]
    offsets: np.ndarray | None = None
    scores: Callable[[slice], np.ndarray] | None = None
    query_map: QueryMap | None = None


@dataclass(frozen=True)
class Ranking:
    """The targets that a candidate ranks first for each query, and the ranks of the true ones.

    nearest [q, k]: the first k of each query, as places in the `ids` of what is ranked; -1 where there are fewer.
    best [j]: the rank of the first true target of each judged query, infinite where it is not among those that were
    asked for. ranks: of all true targets, where the whole gallery was ranked.
    """

    candidate: Candidate
    nearest: np.ndarray
    best: np.ndarray
    ranks: Ranks | None = None


@dataclass(frozen=True)
class Ranked:
    """Rankings of the queries of a task, the raw one first, and what is known of them.

    Attributes:
        rankings: One a candidate.
        ids: Of the targets that `nearest` names by their place: of arrays all, of a
            store those that some query finds.
        count: How many targets there are; None under a filter, where nobody knows it.
        queries: The rows, as they were given, of the queries that are not left out [q].
        judged: Which of these have a true target [j].
        true: The ids of the true targets of each judged query [j].
        names: What targets are called, by their ids.
        facts: The fields of `Results` that follow from what is ranked.
    """

    rankings: list[Ranking]
    ids: Sequence[Id]
    count: int | None
    queries: np.ndarray
    judged: np.ndarray
    true: list[list[Id]]
    names: Callable[[Sequence[Id]], list[str]]
    facts: dict[str, Any]


CORRECTED = "corrected"

BATCH = 256
"""Queries that are searched at one time."""


def rank_store(
    task: Task,
    store: Store,
    truth: TruthLike,
    condition: str | None,
    naming: Naming | None,
) -> Ranked:
    """Search `store` for the queries of `task` as an application does.

    Index, quantisation and filter are included, so what is lost on the way from the
    formula to the answer is seen. Without an active correction it is searched raw only.

    Args:
        task: queries, and how many targets each finds.
        store: is searched and not changed.
        truth: ids of true targets.
        condition: a filter.
        naming: what targets are called.

    Raises:
        InputError: for what does not fit the store, and if no query finds a true target.
    """
    if task.queries.dim != store.dim:
        raise InputError(
            f"{task.queries.name} have {task.queries.dim} dimensions, "
            f"{store.url} has {store.dim}"
        )
    if task.k < 1:
        raise InputError(f"k={task.k}: expected at least 1")
    if not store.count():
        raise InputError(f"{store.url} is empty; add vectors, then evaluate it")
    queries = Directed.of(task.queries, store.metric, log=True)
    numbers = original_rows(queries)
    of_given = read_truth(truth, task.queries.rows, task.query_names)
    judged = np.flatnonzero([bool(of_given[number]) for number in numbers])
    if not len(judged):
        raise nothing_judged(queries.name)
    true = [list(of_given[number]) for number in numbers[judged]]
    searched = store if condition is None else store.with_filter(condition)
    correction = store.correction()
    model = None
    if correction is not None and correction.active:
        model = correction.model

    vectors = queries.array()
    hits = {RAW: _search_store(searched, vectors, task, RAW)}
    if model is not None:
        hits[CORRECTED] = _search_store(searched, vectors, task, CORRECTED)
    ids = list(dict.fromkeys(chain.from_iterable(chain.from_iterable(hits.values()))))
    # Files may say as text what is a number in the store.
    by_text = {str(key): key for key in ids}
    true = [[by_text.get(str(key), key) for key in keys] for keys in true]
    places = {key: place for place, key in enumerate(ids)}
    rankings = []
    for label, lists in hits.items():
        nearest = np.full((len(lists), task.k), -1, np.int64)
        for row, line in enumerate(lists):
            nearest[row, : len(line)] = [places[key] for key in line]
        best = np.full(len(judged), np.inf)
        for number, row in enumerate(judged.tolist()):
            found = [key in true[number] for key in lists[row]]
            if any(found):
                best[number] = 1 + found.index(True)
        candidate = Candidate(label, RAW, {})
        if model is not None and label == CORRECTED:
            candidate = Candidate(label, model.method, model.parameters)
        rankings.append(Ranking(candidate, nearest, best))
    if np.isinf(rankings[0].best).all():
        example = repr(ids[0]) if ids else "nothing"
        raise InputError(
            f"no query finds a true target in {store.url}, whose searches find ids such "
            f"as {example}; ground truth names {true[0][0]!r}: expected ids of the "
            "store, in the order of the queries"
        )

    def names(keys: Sequence[Id]) -> list[str]:
        known = [key for key in dict.fromkeys(keys) if key in places]
        called = dict(zip(known, display_names(known, naming), strict=True))
        return [called.get(key, str(key)) for key in keys]

    return Ranked(
        rankings,
        ids,
        store.count() if condition is None else None,
        numbers,
        judged,
        true,
        names,
        {
            "metric": store.metric.value,
            "targets": store.count(),
            "store": store.url,
            "correction": None
            if model is None
            else describe_method(model.method, model.parameters),
            "forecast": None if model is None else _forecast(model),
            "condition": condition,
        },
    )


def _forecast(model: OffsetModel) -> Side | None:
    """Return what the fit of `model` foretold of R@1."""
    at_fit = model.hubness_at_fit
    if at_fit is None or at_fit.right is None:
        return None
    before, after, *change = at_fit.right
    return Side(before, after, math.nan, 0, "queries", Figure(*change))


def _search_store(
    store: Store, queries: np.ndarray, task: Task, label: str
) -> list[list[Id]]:
    hits: list[list[Id]] = []
    for start in range(0, len(queries), BATCH):
        batch = queries[start : start + BATCH]
        hits += store.search(batch, task.k, raw=label == RAW).ids
        task.compute.report(f"searching {label}", len(hits), len(queries))
    return hits


LARGEST_PLAN = 25_000_000
"""Pairs: 200 MB a matrix, of which a solver holds several. Each plan takes less than a minute on one core."""


def optimal_transport(similarities: np.ndarray) -> np.ndarray:
    """`otn`: argmax <S, P> over the transport plans P, DBSN eq. 4 under eq. 7. [q, n] -> [q, n]."""
    import ot

    queries, targets = similarities.shape
    plan: np.ndarray = ot.emd(
        ot.unif(queries), ot.unif(targets), -similarities, numItermax=10_000_000
    )
    return plan


def l2_transport(similarities: np.ndarray) -> np.ndarray:
    """`l2n`: argmax <S, P> - c/2 |P|_F^2 over the transport plans P, DBSN eq. 5 under eq. 7. [q, n] -> [q, n].

    The paper asks for "an appropriate coefficient" c; it is taken relative to the size of an even plan's entries,
    c = spread of S / max(1/q, 1/n), so that the plan spreads over a few targets a query at any size.
    """
    import ot

    queries, targets = similarities.shape
    if (
        np.ptp(similarities) <= 1e-6 * np.abs(similarities).max()
    ):  # all plans are worth the same
        return np.full_like(similarities, 1 / similarities.size)
    coefficient = float(similarities.std()) * min(queries, targets)
    plan: np.ndarray = ot.smooth.smooth_ot_dual(
        ot.unif(queries),
        ot.unif(targets),
        -similarities,
        coefficient,
        reg_type="l2",
        numItermax=2000,
    )
    return plan


def hungarian(similarities: np.ndarray) -> np.ndarray:
    """`hn`: 1 where the assignment of largest total similarity matches query and target, else 0. [q, n] -> [q, n].

    Each target serves at most one query; where there are more queries than targets, the rest match nothing.
    """
    from scipy.optimize import linear_sum_assignment

    plan = np.zeros_like(similarities)
    plan[linear_sum_assignment(similarities, maximize=True)] = 1
    return plan


PLANS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "otn": optimal_transport,
    "l2n": l2_transport,
    "hn": hungarian,
}


def require_solvable(method: str, queries: int, targets: int) -> None:
    """Raises InputError where the solver of `method` is missing, or a plan over `queries` x `targets` is out of
    reach."""
    module, package = ("scipy", "scipy") if method == "hn" else ("ot", "POT")
    if find_spec(module) is None:
        raise InputError(f"method {method!r} needs {package}; {install('evaluation')}")
    if queries * targets > LARGEST_PLAN:
        raise InputError(
            f"method {method!r} solves one transport problem over all {queries} x {targets} pairs; at most "
            f"{LARGEST_PLAN:,} are accepted: leave it out, or evaluate on a sample"
        )


def among(truth: Truth, queries: Vectors, targets: Vectors) -> Truth:
    """The pairs of `truth` whose query and target are there, by their rows in `queries` and `targets`, which may lack
    zero vectors. Raises InputError where there is none."""
    query_rows, target_rows = (
        locate_rows(queries, truth.query_rows),
        locate_rows(targets, truth.target_rows),
    )
    there = (query_rows >= 0) & (target_rows >= 0)
    if not there.any():
        raise nothing_judged(f"{queries.name} or {targets.name}")
    return Truth(query_rows[there], target_rows[there], truth.grades[there])


def nothing_judged(name: str) -> InputError:
    return InputError(
        f"{name}: every pair of the ground truth has a zero vector, which has no cosine similarity; expected at least "
        "one pair without: embed what it names anew"
    )


Counts: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
"""What `TruthCounts` and `TopK` give of one candidate."""


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
    """Rank `targets` [n, d] for the queries of `task` by similarity and each method.

    By default the methods are every additive one that the bank allows. Raises
    InputError for what does not fit together.
    """
    whole = as_vectors(targets, "targets")
    if task.queries.dim != whole.dim:
        raise InputError(
            f"{task.queries.name} have {task.queries.dim} dimensions, {whole.name} have "
            f"{whole.dim}; embed both with the same model"
        )
    queries = Directed.of(task.queries, metric, log=True)
    gallery = Directed.of(whole, metric, log=True)
    if not 1 <= task.k <= gallery.rows:
        raise InputError(
            Parameter("k", task.k),
            f" is not between 1 and the {gallery.rows} targets of the gallery",
        )
    if RAW in models:
        raise InputError(f"a model cannot be labelled {RAW!r}; name it by another word")
    called = as_names(names, whole.rows, "names")
    prepared = None
    if bank is not None:
        prepared = Bank.of(bank).prepare(metric, task.compute)
        prepared = replace(prepared, clicks=None).against(gallery)
    pairs = as_truth(truth, task.queries.rows, whole.rows, task.query_names, called)
    pairs = among(pairs, queries, gallery)
    arrays = Arrays(prepare(queries, metric), gallery, metric, task, pairs, prepared)
    rankings = arrays.rank(_list_candidates(arrays, methods, models))
    ids: Sequence[Id] = range(whole.rows)
    if gallery is not whole:
        ids = original_rows(gallery).tolist()

    facts: dict[str, Any] = {"metric": metric.value, "targets": gallery.rows}
    if prepared is not None:
        facts["query_bank"] = len(prepared.query_bank)
        if prepared.target_bank is not None:
            facts["target_bank"] = len(prepared.target_bank)
    true = []
    for rows in np.split(pairs.target_rows, pairs.starts[1:]):
        true.append([ids[row] for row in rows.tolist()])

    def name_all(keys: Sequence[Id]) -> list[str]:
        if called is None:
            return [f"target {key}" for key in keys]
        return [str(called[int(key)]) for key in keys]

    return Ranked(
        rankings,
        ids,
        gallery.rows,
        original_rows(queries),
        pairs.judged,
        true,
        name_all,
        facts,
    )


def _list_candidates(
    arrays: Arrays, methods: Sequence[str] | None, models: Mapping[str, OffsetModel]
) -> list[Candidate]:
    """Return the raw search and each method and model once, by label."""
    if methods is None:
        methods = []
        if arrays.bank is not None:
            dual = arrays.bank.target_bank is not None
            methods = [name for name in METHODS if name != "dualis" or dual]
    raw = Candidate(RAW, RAW, {}, np.zeros(arrays.targets.rows, np.float32))
    candidates = {RAW: raw}
    for method in methods:
        candidates[method] = arrays.by_method(method)
    for label, model in models.items():
        candidates[label] = arrays.by_model(label, model)
    return list(candidates.values())


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
        """Return the candidate of a method with its parameters, as 'is tau=0.05'."""
        name, *settings = method.split() or [""]
        parameters: dict[str, Setting] = {}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals:
                raise InputError(
                    f"method {method!r}: {key!r} is no parameter; expected NAME=VALUE, "
                    "as in 'is tau=0.05'"
                )
            parameters[key] = value
        if name in PLANS:
            if parameters:
                raise InputError(
                    f"method {name!r} takes no parameters, got {', '.join(parameters)}"
                )
            require_solvable(name, len(self.queries), self.targets.rows)
            return Candidate(
                method,
                name,
                {},
                scores=lambda rows: PLANS[name](self._similarities(slice(None)))[rows],
            )
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
        query_dependent = build_method(QUERY_METHODS, name, parameters)
        rule = query_dependent.rule(self.bank)
        kept = rule.keep(self.targets)
        return Candidate(
            method,
            name,
            query_dependent.model_dump(),
            scores=lambda rows: rule.rescore(self._similarities(rows), kept),
        )

    def by_model(self, label: str, model: OffsetModel) -> Candidate:
        if model.metric is not self.metric:
            raise InputError(
                f"model {label!r} is for {model.metric.value}, the evaluation for "
                f"{self.metric.value}"
            )
        offsets = model.offsets(self.targets, compute=self.task.compute)
        return Candidate(
            label, model.method, model.parameters, offsets, query_map=model.query_map
        )

    def _similarities(self, rows: slice) -> np.ndarray:
        quiet = self.task.compute.without_progress
        return dense(Similarities(self.queries[rows], self.metric, quiet), self.targets)

    def rank(self, candidates: list[Candidate]) -> list[Ranking]:
        """Rank by each candidate.

        Those with offsets share one search; a model that maps queries has its own.
        """
        shared = []
        counted: dict[str, Counts] = {}
        for candidate in candidates:
            if candidate.scores is not None:
                counted[candidate.label] = self._rank_by_scores(candidate)
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

    def _search(self, candidates: list[Candidate]) -> dict[str, Counts]:
        """Rank by offsets, of candidates with one query map, if any, in common."""
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
        return {
            candidate.label: (counts.greater[row], counts.equal[row], top.rows[row])
            for row, candidate in enumerate(candidates)
        }

    def _rank_by_scores(self, candidate: Candidate) -> Counts:
        """Rank by scores, as many queries at a time as memory allows."""
        assert candidate.scores is not None
        truth = self.truth
        count = len(self.queries)
        compute = self.task.compute
        greater = np.empty(len(truth.query_rows), np.int64)
        equal = np.empty_like(greater)
        nearest = np.empty((count, self.task.k), np.int64)
        is_plan = candidate.method in PLANS
        height = max(1, compute.bytes() // (8 * 8 * self.targets.rows))
        if is_plan:
            height = count
        generator = np.random.default_rng(self.task.seed)
        for start in range(0, count, height):
            stop = min(start + height, count)
            scores = candidate.scores(slice(start, stop))
            first, last = np.searchsorted(truth.query_rows, [start, stop])
            for pair in range(first, last):
                row = scores[truth.query_rows[pair] - start]
                own = row[truth.target_rows[pair]]
                tie = TIE * np.finfo(np.float32).eps * abs(own)
                greater[pair] = (row > own + tie).sum()
                equal[pair] = (row >= own - tie).sum() - greater[pair] - 1
            if is_plan:
                # Nearly all of a plan ties at zero; which of those are found must not
                # depend on their rows.
                smallest = scores[scores > 0].min()
                scores = scores + generator.random(scores.shape) * smallest * 1e-3
            nearest[start:stop] = topk(scores, self.task.k)[1]
            compute.report(f"ranking by {candidate.label}", stop, count)
        return greater, equal, nearest
