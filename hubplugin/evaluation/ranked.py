"""What ranks targets for queries: a store by its own search, and arrays under each method that was asked for.

Transport plans between all queries and all targets (DBSN table 6) are for comparison, since no search knows its queries
beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from hubplugin.bank import Bank, BankLike
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
    TrueIds,
    TruthLike,
    as_names,
    as_true_ids,
    as_truth,
)
from hubplugin.jobs.naming import Naming, display_names
from hubplugin.measures.hubness import pick_evenly
from hubplugin.measures.retrieval import Ranks, Truth, rank_pairs
from hubplugin.methods import METHODS, build_method
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, QueryMap, Setting
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
    """How a candidate ranks targets for all queries.

    nearest [q, k]: the first k of each query, as places in the `ids` of what is ranked; -1 where there are fewer.
    best [j]: the rank of the first true target of each judged query, infinite where it is not among those that were
    asked for. ranks: of all true targets, where the whole gallery was ranked.
    """

    candidate: Candidate
    nearest: np.ndarray
    best: np.ndarray
    ranks: Ranks | None = None

    @property
    def label(self) -> str:
        return self.candidate.label


CORRECTED = "corrected"

MOST_BANK_QUERIES = 5_000
"""Bank queries whose first targets are looked up, at most: one search each."""

BATCH = 256
"""Queries that are searched at one time."""


class RankedStore:
    """`store`, searched for the queries of `task` as an application does it: index, quantisation and filter included.

    So it sees what is lost on the way from the formula to the answer. `condition`: a filter. Without an active
    correction it is searched raw only. Its attributes and methods are those of `RankedArrays`; `ids` are of the targets
    that some query finds, and `count` is None under a filter, where nobody knows it.
    """

    recall_at: tuple[int, ...] = ()

    def __init__(
        self,
        task: Task,
        store: Store,
        truth: TrueIds,
        condition: str | None,
        naming: Naming | None,
    ):
        if task.queries.dim != store.dim:
            raise InputError(
                f"{task.queries.name} have {task.queries.dim} dimensions, {store.url} has {store.dim}"
            )
        if task.k < 1:
            raise InputError(f"k={task.k}: expected at least 1")
        if not store.count():
            raise InputError(f"{store.url} is empty; add vectors, then evaluate it")
        queries = Directed.of(task.queries, store.metric, log=True)
        true = as_true_ids(truth, task.queries.rows, task.query_names)
        self._task, self._store, self._condition, self._naming = (
            task,
            store,
            condition,
            naming,
        )
        self._searched = store if condition is None else store.with_filter(condition)
        self.queries, self._vectors = original_rows(queries), queries.array()
        self._true = [true[row] for row in self.queries]
        self.judged = np.flatnonzero([bool(ids) for ids in self._true])
        if not len(self.judged):
            raise nothing_judged(queries.name)
        correction = store.correction()
        self._model = (
            correction.model if correction is not None and correction.active else None
        )
        self.ids: Sequence[Id] = ()
        self.count = store.count() if condition is None else None

    def rankings(self) -> Iterator[Ranking]:
        hits = {RAW: self._search(self._vectors, self._task.k, raw=True)}
        if self._model is not None:
            hits[CORRECTED] = self._search(self._vectors, self._task.k, raw=False)
        if not any(
            str(key) in true
            for ids, true in zip(hits[RAW], self._true, strict=True)
            for key in ids
        ):
            example = next((repr(ids[0]) for ids in hits[RAW] if ids), "nothing")
            named = next(next(iter(true)) for true in self._true if true)
            raise InputError(
                f"no query finds a true target in {self._store.url}, whose searches find ids such as {example}; ground "
                f"truth names {named!r}: expected ids of the store, in the order of the queries"
            )
        self.ids = list(
            dict.fromkeys(chain.from_iterable(chain.from_iterable(hits.values())))
        )
        places = {key: number for number, key in enumerate(self.ids)}
        for label, lists in hits.items():
            nearest, best = (
                np.full((len(lists), self._task.k), -1, np.int64),
                np.full(len(self.judged), np.inf),
            )
            for row, ids in enumerate(lists):
                nearest[row, : len(ids)] = [places[key] for key in ids]
            for number, row in enumerate(self.judged.tolist()):
                ranks = (
                    rank
                    for rank, key in enumerate(lists[row], 1)
                    if str(key) in self._true[row]
                )
                best[number] = next(ranks, np.inf)
            model = self._model if label == CORRECTED else None
            method, parameters = (
                (RAW, {}) if model is None else (model.method, model.parameters)
            )
            yield Ranking(Candidate(label, method, parameters), nearest, best)

    def _search(self, queries: np.ndarray, k: int, raw: bool) -> list[list[Id]]:
        hits: list[list[Id]] = []
        for start in range(0, len(queries), BATCH):
            hits += self._searched.search(
                queries[start : start + BATCH], k, raw=raw
            ).ids
            self._task.compute.report(
                f"searching {RAW if raw else CORRECTED}", len(hits), len(queries)
            )
        return hits

    def true_targets(self, place: int) -> Sequence[Id]:
        by_text = {str(key): key for key in self.ids}
        return [by_text.get(key, key) for key in sorted(self._true[self.judged[place]])]

    def names(self, ids: Sequence[Id]) -> list[str]:
        hits = set(self.ids)
        in_store = [key for key in dict.fromkeys(ids) if key in hits]
        names = dict(zip(in_store, display_names(in_store, self._naming), strict=True))
        return [names.get(key, str(key)) for key in ids]

    def mark_found_by_bank(self) -> np.ndarray | None:
        if self._model is None or len(bank := self._model.terms[0].bank) < 2:
            return None
        hits = self._search(pick_evenly(bank, MOST_BANK_QUERIES), 1, raw=True)
        nearest = {str(ids[0]) for ids in hits if ids}
        return np.array([bool(self._true[row] & nearest) for row in self.judged])

    def facts(self) -> dict[str, Any]:
        return {
            "metric": self._store.metric.value,
            "targets": self._store.count(),
            "store": self._store.url,
            "correction": None if self._model is None else str(self._model),
            "condition": self._condition,
        }


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


class RankedArrays:
    """`targets` [n, d], ranked for the queries of `task` by their similarity, and under each method: by default every
    additive one that the bank allows.

    ids: of the targets. count: how many there are. queries [q]: the rows, as they were given, of those that are not
    left out. judged [j]: which of these have a true target. recall_at: the k of R@k, beside 1 and the cut-off.
    """

    recall_at: tuple[int, ...] = (1, 5, 10)

    def __init__(
        self,
        task: Task,
        targets: VectorLike,
        truth: TruthLike,
        names: Names,
        metric: Metric,
        bank: BankLike | None,
        methods: Sequence[str] | None,
        models: Mapping[str, OffsetModel],
    ):
        queries, whole = task.queries, as_vectors(targets, "targets")
        if queries.dim != whole.dim:
            raise InputError(
                f"{queries.name} have {queries.dim} dimensions, {whole.name} have {whole.dim}; embed both with the "
                "same model"
            )
        test_queries, gallery = (
            Directed.of(queries, metric, log=True),
            Directed.of(whole, metric, log=True),
        )
        if not 1 <= task.k <= gallery.rows:
            raise InputError(
                Parameter("k", task.k),
                f" is not between 1 and the {gallery.rows} targets of the gallery",
            )
        for label in (label for label in models if label == RAW or not label.strip()):
            raise InputError(
                f"a model cannot be labelled {label!r}; name it by another word than {RAW!r}"
            )
        self._task, self._targets, self._metric = task, gallery, metric
        self._names = as_names(names, whole.rows, "names")
        self._bank = None
        if bank is not None:
            prepared = Bank.of(bank).prepare(metric, task.compute)
            self._bank = replace(prepared, clicks=None).against(gallery)
        pairs = as_truth(truth, queries.rows, whole.rows, task.query_names, self._names)
        self._truth = among(pairs, test_queries, gallery)
        self._queries = prepare(test_queries, metric)
        self.ids: Sequence[Id] = (
            range(whole.rows) if gallery is whole else original_rows(gallery).tolist()
        )
        self.count: int | None = gallery.rows
        self.queries, self.judged = original_rows(test_queries), self._truth.judged
        if methods is None:
            dual = self._bank is not None and self._bank.target_bank is not None
            methods = (
                []
                if self._bank is None
                else [name for name in METHODS if name != "dualis" or dual]
            )
        raw = Candidate(RAW, RAW, {}, np.zeros(gallery.rows, np.float32))
        candidates = [
            self._by_method(method)
            for method in ([methods] if isinstance(methods, str) else methods)
        ]
        candidates += [self._by_model(label, model) for label, model in models.items()]
        self._candidates = list(
            {candidate.label: candidate for candidate in (raw, *candidates)}.values()
        )

    def _by_method(self, method: str) -> Candidate:
        name, *settings = method.split() or [""]
        parameters: dict[str, Setting] = {}
        for key, equals, value in (setting.partition("=") for setting in settings):
            if not equals:
                raise InputError(
                    f"method {method!r}: {key!r} is no parameter; expected NAME=VALUE, as in 'is tau=0.05'"
                )
            parameters[key] = value
        if name in PLANS:
            if parameters:
                raise InputError(
                    f"method {name!r} takes no parameters, got {', '.join(parameters)}"
                )
            require_solvable(name, len(self._queries), self._targets.rows)
            return Candidate(
                method,
                name,
                {},
                scores=lambda rows: PLANS[name](self._similarities(slice(None)))[rows],
            )
        bank = self._bank
        if name not in {**METHODS, **QUERY_METHODS}:
            raise InputError(
                f"unknown method {name!r}: use one of {', '.join([*METHODS, *QUERY_METHODS, *PLANS])}"
            )
        if bank is None:
            raise InputError(
                f"method {name!r} needs example queries: pass ", Parameter("bank")
            )
        if name in METHODS:
            return self._by_model(
                method, build_method(METHODS, name, parameters).fit(bank)
            )
        query_dependent = build_method(QUERY_METHODS, name, parameters)
        rule = query_dependent.rule(bank)
        numbers = rule.keep(self._targets)

        def scores(rows: slice) -> np.ndarray:
            corrected: np.ndarray = rule.rescore(self._similarities(rows), numbers)
            return corrected

        return Candidate(method, name, query_dependent.model_dump(), scores=scores)

    def _by_model(self, label: str, model: OffsetModel) -> Candidate:
        if model.metric is not self._metric:
            raise InputError(
                f"model {label!r} is for {model.metric.value}, the evaluation for {self._metric.value}"
            )
        offsets = model.offsets(self._targets, compute=self._task.compute)
        return Candidate(
            label, model.method, model.parameters, offsets, query_map=model.query_map
        )

    def _similarities(self, rows: slice) -> np.ndarray:
        product = Similarities(
            self._queries[rows], self._metric, self._task.compute.without_progress
        )
        scores: np.ndarray = dense(product, self._targets)
        return scores

    def rankings(self) -> Iterator[Ranking]:
        """The raw search first. Those with offsets share one search; a model that maps queries has its own."""
        mapped = [
            candidate
            for candidate in self._candidates
            if candidate.query_map is not None
        ]
        shared = [
            item
            for item in self._candidates
            if item.scores is None and item.query_map is None
        ]
        searches = (
            self._search(group)
            for group in (shared, *([candidate] for candidate in mapped))
        )
        counted = dict(chain.from_iterable(counts.items() for counts in searches))
        for candidate in self._candidates:
            greater, equal, nearest = counted.get(
                candidate.label
            ) or self._rank_by_scores(candidate)
            ranks = rank_pairs(self._truth, greater, equal)
            yield Ranking(candidate, nearest, ranks.best, ranks)

    def _search(self, candidates: Sequence[Candidate]) -> dict[str, Counts]:
        """By label, of candidates with offsets and one query map, if any, in common."""
        top, counts = (
            TopK(self._task.k),
            TruthCounts(self._truth.query_rows, self._truth.target_rows),
        )
        query_map = candidates[0].query_map
        queries = self._queries if query_map is None else query_map(self._queries)
        offsets = np.stack(
            [
                candidate.offsets
                for candidate in candidates
                if candidate.offsets is not None
            ]
        )
        search(
            queries,
            self._targets,
            self._metric,
            self._task.compute,
            top,
            counts,
            offsets=offsets,
        )
        labels = (candidate.label for candidate in candidates)
        return dict(
            zip(
                labels,
                zip(counts.greater, counts.equal, top.rows, strict=True),
                strict=True,
            )
        )

    def _rank_by_scores(self, candidate: Candidate) -> Counts:
        """Of a method that gives scores and no offsets: as many queries at a time as memory allows."""
        assert candidate.scores is not None
        truth, count, compute = self._truth, len(self._queries), self._task.compute
        greater, equal = (
            np.empty(len(truth.query_rows), np.int64),
            np.empty(len(truth.query_rows), np.int64),
        )
        nearest = np.empty((count, self._task.k), np.int64)
        whole = candidate.method in PLANS
        height = (
            count if whole else max(1, compute.bytes() // (8 * 8 * self._targets.rows))
        )
        generator = np.random.default_rng(self._task.seed)
        for start in range(0, count, height):
            rows = slice(start, min(start + height, count))
            scores = candidate.scores(rows)
            first, last = np.searchsorted(truth.query_rows, [rows.start, rows.stop])
            for pair in range(first, last):
                row, true = (
                    scores[truth.query_rows[pair] - start],
                    truth.target_rows[pair],
                )
                tie = TIE * np.finfo(np.float32).eps * abs(row[true])
                greater[pair] = (row > row[true] + tie).sum()
                equal[pair] = (row >= row[true] - tie).sum() - greater[pair] - 1
            if whole:  # nearly all of a plan ties at zero; which of those are found must not depend on their rows
                scores = (
                    scores
                    + generator.random(scores.shape) * scores[scores > 0].min() * 1e-3
                )
            nearest[rows] = topk(scores, self._task.k)[1]
            compute.report(f"ranking by {candidate.label}", rows.stop, count)
        return greater, equal, nearest

    def true_targets(self, place: int) -> Sequence[Id]:
        """Of the judged query at `place`."""
        first = self._truth.starts[place]
        return [
            self.ids[row]
            for row in self._truth.target_rows[
                first : first + self._truth.counts[place]
            ].tolist()
        ]

    def names(self, ids: Sequence[Id]) -> list[str]:
        """What targets are called."""
        return [
            f"target {row}" if self._names is None else str(self._names[int(row)])
            for row in ids
        ]

    def mark_found_by_bank(self) -> np.ndarray | None:
        """Of each judged query [j], whether some bank query finds one of its true targets first in the raw search; None
        without a bank."""
        if self._nearest_to_bank is None:
            return None
        return np.logical_or.reduceat(
            np.isin(self._truth.target_rows, self._nearest_to_bank), self._truth.starts
        )

    @cached_property
    def _nearest_to_bank(self) -> np.ndarray | None:
        """The targets that are the nearest of some bank query. What no bank query comes near, no bank query can tell
        to be a hub; m bank rows cover at most m / n of the gallery."""
        if self._bank is None:
            return None
        nearest, bank = TopK(1), self._bank.query_bank
        search(
            bank,
            self._targets,
            self._metric,
            self._task.compute,
            nearest,
            label="coverage of the gallery",
        )
        return np.unique(nearest.rows)

    def facts(self) -> dict[str, Any]:
        """The fields of `Results` that it knows of itself."""
        bank, nearest = self._bank, self._nearest_to_bank
        answers = None if bank is None else bank.target_bank
        return {
            "metric": self._metric.value,
            "targets": self.count,
            "query_bank": None if bank is None else len(bank.query_bank),
            "target_bank": None if answers is None else len(answers),
            "coverage": None if nearest is None else len(nearest) / len(self.ids),
        }


Ranked: TypeAlias = RankedStore | RankedArrays
