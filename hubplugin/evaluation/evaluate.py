"""`evaluate`: raw search and corrections compared on queries with known answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from hubplugin.bank import BankLike
from hubplugin.compute import Compute
from hubplugin.errors import InputError, Parameter
from hubplugin.evaluation.plans import PLANS
from hubplugin.evaluation.ranked import Ranked, Ranking, Task, rank_arrays, rank_store
from hubplugin.evaluation.results import MethodResult, Results, usable_best
from hubplugin.evaluation.truth import Names, TruthLike, as_names
from hubplugin.jobs.hubs import NOT_FOUND, count_found, find_hubs
from hubplugin.jobs.naming import Naming
from hubplugin.measures import hubness
from hubplugin.measures.retrieval import ndcg
from hubplugin.measures.significance import Side, adjust, interval
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.results import RAW, Outcome
from hubplugin.store import Id, Store
from hubplugin.vectors import VectorLike, as_vectors


def evaluate(
    targets: VectorLike | Store,
    bank: BankLike | None = None,
    *,
    queries: VectorLike,
    truth: TruthLike = None,
    methods: Sequence[str] | None = None,
    models: Mapping[str, OffsetModel] | None = None,
    k: int = 10,
    condition: str | None = None,
    names: Names | Naming = None,
    query_names: Names = None,
    metric: Metric | str | None = None,
    seed: int = 0,
    compute: Compute = Compute(),
) -> Results:
    """Measure recall and hubness, raw and corrected, on queries with known answers.

    A store is searched raw and corrected; arrays are ranked raw and by every method.

    All additive methods share one product of queries and targets. Memory holds the
    queries, one block of targets and, for each method, k rows per query and one offset
    per target.

    Args:
        targets: Vectors [n, d], which are ranked raw and under each method. Or a store,
            which is searched raw and with its active correction, in the way an
            application does: with index, quantisation and filter. The store is not
            changed.
        bank: For arrays only, as in `hubplugin.fit`.
        queries: The queries [q, d].
        truth: See `TruthLike`; by default row i of the targets answers query i.
        methods: For arrays only, the names of methods, with parameters that differ from
            the defaults ("is", "nnn k=128 alpha=0.75"). These can be additive or
            query-dependent methods (dis, dualdis, dsl, gc), and otn, l2n and hn, which
            need no bank and compare up to 25 million pairs. By default, all additive
            methods that the bank allows.
        models: For arrays only, fitted models by label, such as {"learned":
            hubplugin.fit(..., learn=True)}.
        k: The number of targets that each query finds, also for the k-occurrence and
            nDCG@k; 10 as in the papers.
        condition: For a store only, a filter, see `hubplugin.store.Store.with_filter`.
        names: The names of targets in reports and in a qrels file: a sequence, or a
            file of texts, one per line or in JSON. For a store, a function of ids, such
            as one from `hubplugin.jobs.naming`.
        query_names: The names of queries in reports and in a qrels file.
        metric: For arrays only, as in `hubplugin.fit`.
        seed: The seed of the bootstrap and of samples.
        compute: Device and memory.

    Returns:
        The figures of each ranking, hubs and examples. The raw search comes first.

    Raises:
        InputError: An argument cannot be used, for instance because of a zero vector
            under cosine, or no query finds a true target in a store.
    """
    vectors = as_vectors(queries, "queries")
    if seed < 0:
        raise InputError(Parameter("seed", seed), ": expected 0 or more")
    query_names = as_names(query_names, vectors.rows, "query_names")
    task = Task(vectors, query_names, k, seed, compute)
    if names is not None and callable(names) != isinstance(targets, Store):
        raise InputError(
            Parameter("names"),
            ": expected a function of ids for a store, or one entry for each row of "
            "an array",
        )
    if not isinstance(targets, Store):
        if condition is not None:
            raise InputError(
                "a filter needs a store; arrays and files are searched whole"
            )
        metric = Metric(metric or Metric.COSINE)
        models = models or {}
        ranked = rank_arrays(
            task, targets, truth, cast(Names, names), metric, bank, methods, models
        )
        return results_of(ranked, task)
    for_arrays = {"bank": bank, "methods": methods, "models": models, "metric": metric}
    for name, value in for_arrays.items():
        if value is not None:
            raise InputError(
                Parameter(name),
                " is for arrays and files; a store is searched as it is",
            )
    if truth is None:
        raise InputError("a store needs ids of true targets: pass ", Parameter("truth"))
    ranked = rank_store(task, targets, truth, condition, cast(Naming | None, names))
    return results_of(ranked, task)


EXAMPLES = 3
"""The most examples of won queries, and the most of lost ones."""


def results_of(ranked: Ranked, task: Task) -> Results:
    """Return the results of rankings: figures, hubs and examples."""
    methods = _measure_methods(ranked, task)
    raw = ranked.rankings[0]
    found = {RAW: raw.nearest}
    best = usable_best(methods)  # it may still be worse than the raw search
    right = None
    examples: list[Outcome] = []
    if best is not None:
        corrected = ranked.rankings[methods.index(best)]
        found[best.label] = corrected.nearest
        right = _first_right(ranked, corrected)
        examples += _draw_examples(ranked, corrected, task.seed)

    def describe(rows: list[int]) -> tuple[list[Id], list[str]]:
        """Return the ids and names of the targets in `rows`."""
        ids = [ranked.ids[row] for row in rows]
        return ids, ranked.names(ids)

    size = len(ranked.ids)
    hubs, never = find_hubs(found, size, describe, ranked.asked, right)
    if ranked.count != size:
        never = []  # a store tells only the ids of targets that some query finds
    return Results(
        queries=len(raw.nearest),
        judged=len(ranked.judged),
        k=task.k,
        methods=methods,
        best=best.label if best is not None and best.sign > 0 else None,
        hubs=hubs,
        anti_hubs=never,
        examples=examples,
        **ranked.facts,
    )


def _first_right(ranked: Ranked, corrected: Ranking) -> np.ndarray:
    """Return a true target that comes first for each query [q], in either search.

    It comes from the raw search if possible, otherwise from `corrected`. If neither
    finds a true target first, it is NOT_FOUND.
    """
    raw = ranked.rankings[0]
    right = np.full(len(raw.nearest), NOT_FOUND)
    for ranking in (corrected, raw):  # the raw search comes last, and overwrites
        rows = ranked.judged[ranking.best <= 1]
        right[rows] = ranking.nearest[rows, 0]
    return right


def _measure_methods(ranked: Ranked, task: Task) -> list[MethodResult]:
    """Return the figures of each ranking, those of the raw search first."""
    raw, *others = ranked.rankings
    versus = [Side.of(raw.best <= 1, other.best <= 1) for other in others]
    adjusted = adjust([side.p for side in versus])
    results = [_measure(raw, ranked, task)]
    for ranking, side, p in zip(others, versus, adjusted, strict=True):
        figures = _measure(ranking, ranked, task)
        results.append(replace(figures, versus_raw=side, adjusted_p=p))
        task.compute.report("bootstrap intervals", len(results), len(ranked.rankings))
    return results


def _measure(ranking: Ranking, ranked: Ranked, task: Task) -> MethodResult:
    """Return the figures of a ranking, without a comparison."""
    seed = task.seed
    nearest = ranking.nearest
    occurrence = count_found(nearest, len(ranked.ids))
    recall = {}
    for k in sorted({1, 5, 10, task.k}):
        if k <= task.k:
            recall[k] = interval((ranking.best <= k).astype(np.float64), seed)
    figures: dict[str, Any] = {}
    if ranking.ranks is not None:
        figures = {
            "median_rank": interval(ranking.best, seed, np.median),
            "mean_rank": interval(ranking.best, seed),
            "ndcg": interval(ndcg(ranking.ranks, task.k), seed),
        }
    if ranked.count is None:
        times = hubness.count_targets(occurrence)
        times.pop(0, None)  # the number of targets never found is unknown
    else:
        occurrence = hubness.add_never_found(occurrence, ranked.count)
        times = hubness.count_targets(occurrence)
        figures["hubness"] = hubness.Hubness.of(occurrence, task.k)
    return MethodResult(
        label=ranking.candidate.label,
        method=ranking.candidate.method,
        parameters=ranking.candidate.parameters,
        recall=recall,
        worst=float(occurrence.max()) / len(nearest),
        occurrences=times,
        transductive=ranking.candidate.method in PLANS,
        **figures,
    )


def _draw_examples(ranked: Ranked, corrected: Ranking, seed: int) -> Iterator[Outcome]:
    """Draw up to `EXAMPLES` queries that `corrected` won, and as many that it lost."""
    was_right = ranked.rankings[0].best <= 1
    is_right = corrected.best <= 1
    first = corrected.nearest[ranked.judged, 0]
    rng = np.random.default_rng(seed)
    # A lost query may find nothing, and then has no first target to show.
    for changed in (is_right & ~was_right, was_right & ~is_right & (first >= 0)):
        for place in rng.permutation(np.flatnonzero(changed))[:EXAMPLES].tolist():
            (after,) = ranked.names([ranked.ids[first[place]]])
            query = ranked.asked[ranked.judged[place]]
            yield Outcome(query, after, bool(is_right[place]))
