"""`evaluate`: raw search and corrections side by side, on queries whose true targets are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np

from hubplugin.bank import BankLike
from hubplugin.compute import Compute
from hubplugin.errors import InputError, Parameter
from hubplugin.evaluation.ranked import Ranked, RankedArrays, RankedStore, Ranking
from hubplugin.evaluation.results import MethodResult, Results, best_of, usable_best
from hubplugin.evaluation.truth import Names, TrueIds, TruthLike, as_names
from hubplugin.jobs.naming import Naming
from hubplugin.measures import hubness
from hubplugin.measures.retrieval import average_precision, ndcg
from hubplugin.measures.significance import Side, adjust, compare, hubness_interval, interval
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.report import Answer, Example, Histogram, Hub
from hubplugin.store import Store
from hubplugin.vectors import VectorLike, as_vectors


def evaluate(
    targets: VectorLike | Store,
    bank: BankLike | None = None,
    *,
    queries: VectorLike,
    truth: TruthLike | TrueIds = None,
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
    """Ranks targets for queries whose true targets are known, raw and corrected, and measures recall and hubness.

    targets: [n, d], ranked raw and under each method. Or a store, which is searched as it is, raw and by its active
    correction, as an application does it: index, quantisation and filter included. Nothing is changed.
    queries: [q, d]. truth: see `TruthLike`; by default row i of the targets is the true one of query i. Of a store it
    is ids, see `TrueIds`.
    k: how many targets a query finds, of the k-occurrence, mAP@k and nDCG@k; 10 as in the papers.
    names, query_names: what reports and a qrels file call targets and queries; a sequence, or a text file with one a
        line. Of a store names is a function of ids, as `hubplugin.jobs.naming` gives it.
    seed: of the bootstrap and of samples.

    Of arrays only: bank, metric: as in `hubplugin.fit`.
    methods: names, with parameters where they differ from the defaults ("is", "nnn k=128 alpha=0.75"): the additive
        methods, the query-dependent ones (dis, dualdis, dsl, gc), and otn, l2n and hn, which need no bank and compare
        up to 25 million pairs. By default every additive method that the given bank allows.
    models: fitted models besides, by the label that they get, as {"learned": hubplugin.fit(..., learn=True)}.
    Of a store only: condition, a filter, see `hubplugin.store.Store.with_filter`.

    All additive methods share one product of queries and targets. Memory holds the queries, one block of targets, and
    k rows a query and one offset a target for each method.

    Under cosine zero vectors, which have no direction, are left out of queries and of arrays of targets, and counted
    in the log; so are pairs of the truth that name them.

    Raises InputError, one line, for anything that cannot be used as given, and where no query finds a true target of a
    store.
    """
    asking = as_vectors(queries, "queries")
    if seed < 0:
        raise InputError(Parameter("seed", seed), ": expected 0 or more")
    called = as_names(query_names, asking.rows, "query_names")
    if names is not None and callable(names) != isinstance(targets, Store):
        raise InputError(
            Parameter("names"), ": expected a function of ids for a store, or one for each row of an array"
        )
    ranked: Ranked
    if isinstance(targets, Store):
        for_arrays = {"bank": bank, "methods": methods, "models": models, "metric": metric}
        for name, value in for_arrays.items():
            if value is not None:
                raise InputError(Parameter(name), " is for arrays and files; a store is searched as it is")
        if truth is None:
            raise InputError("a store needs ids of true targets: pass ", Parameter("truth"))
        ranked = RankedStore(
            targets,
            asking,
            cast(TrueIds, truth),
            k=k,
            condition=condition,
            names=cast(Naming | None, names),
            query_names=called,
            compute=compute,
        )
    else:
        if condition is not None:
            raise InputError("a filter is for a store; arrays and files are searched whole")
        ranked = RankedArrays(
            targets,
            bank,
            asking,
            cast(TruthLike, truth),
            methods=methods,
            models=models or {},
            k=k,
            names=cast(Names, names),
            query_names=called,
            metric=metric or Metric.COSINE,
            seed=seed,
            compute=compute,
        )
    return results_of(ranked, called, k, seed, compute)


HUBS = 20
"""Hubs and anti-hubs that are named, at most."""

EXAMPLES = 3
"""Examples of won and of lost queries."""

BINS = 40
"""Of the distribution of offsets."""


def results_of(ranked: Ranked, query_names: Sequence[object] | None, k: int, seed: int, compute: Compute) -> Results:
    """What the rankings come to: all figures, and by name what is worth looking at."""
    rankings = list(ranked.rankings())
    occurrences = [hubness.k_occurrence(each.nearest[each.nearest >= 0], len(ranked.ids)) for each in rankings]
    methods = _methods(ranked, rankings, occurrences, k, seed, compute)
    best, raw = best_of(methods), rankings[0]
    shown = usable_best(methods, best)
    other = next((ranking for ranking, method in zip(rankings, methods, strict=True) if method is shown), None)
    hubs, never = hubness.hubs(occurrences[0], HUBS).tolist(), list[int]()
    if ranked.count == len(ranked.ids):  # all targets are known by name
        never = hubness.pick_evenly(np.flatnonzero(occurrences[0] == 0), HUBS).tolist()
    names = ranked.names([ranked.ids[row] for row in [*hubs, *never]])
    parts: dict[str, Any] = {}
    if other is not None:
        parts["examples"] = list(_examples(ranked, raw, other, query_names, seed))
        if other.offsets is not None:
            counts, edges = np.histogram(other.offsets, BINS)
            parts["offsets"] = Histogram(other.label, edges.tolist(), counts.tolist())
        if (first := ranked.found_first()) is not None:
            parts["found_first"] = _side(raw, other, first, "found first by the bank")
            parts["not_found_first"] = _side(raw, other, ~first, "others")
    return Results(
        queries=len(ranked.queries),
        judged=len(ranked.judged),
        k=k,
        seed=seed,
        methods=methods,
        best=best,
        hubs=[
            Hub(
                id=ranked.ids[row],
                name=name,
                found_by={each.label: int(found[row]) for each, found in zip(rankings, occurrences, strict=True)},
            )
            for row, name in zip(hubs, names, strict=False)  # behind them stand those that are never found
        ],
        anti_hubs=names[len(hubs) :],
        **parts,
        **ranked.facts(),
    )


def _methods(
    ranked: Ranked, rankings: Sequence[Ranking], occurrences: Sequence[np.ndarray], k: int, seed: int, compute: Compute
) -> list[MethodResult]:
    versus = [compare(rankings[0].best, ranking.best) for ranking in rankings[1:]]
    corrected = adjust([comparison.p for comparison in versus])
    results = []
    for number, (ranking, occurrence) in enumerate(zip(rankings, occurrences, strict=True)):
        times, known = hubness.count_targets(occurrence, ranked.count), dict[str, Any]()
        if ranked.count is None:
            times.pop(0, None)  # nobody knows how many there are that no query finds
        else:
            known["hubness"] = hubness.Hubness.of(np.array([*times]), k, np.array([*times.values()]))
            known["most_found"] = hubness.share_of_most_found(occurrence, ranked.count)
        if ranking.ranks is not None:  # of the whole gallery
            known |= {
                "median_rank": interval(ranking.best, seed, np.median),
                "mean_rank": interval(ranking.best, seed),
                "mean_average_precision": interval(average_precision(ranking.ranks, k), seed),
                "ndcg": interval(ndcg(ranking.ranks, k), seed),
                "skewness": hubness_interval(ranking.nearest, len(ranked.ids), hubness.skewness, seed),
            }
        if number:
            known |= {"versus_raw": versus[number - 1], "adjusted_p": corrected[number - 1]}
        cut_offs = sorted({1, k, *ranked.recall_at})
        results.append(
            MethodResult(
                label=ranking.label,
                method=ranking.method,
                parameters=ranking.parameters,
                recall={at: interval((ranking.best <= at).astype(np.float64), seed) for at in cut_offs},
                worst=float(occurrence.max()) / len(ranking.nearest),
                occurrences=times,
                storable=ranking.storable,
                transductive=ranking.transductive,
                best_ranks=ranking.best,
                **known,
            )
        )
        compute.report("bootstrap intervals", number + 1, len(rankings))
    return results


def _side(raw: Ranking, other: Ranking, some: np.ndarray, what: str) -> Side | None:
    """R@1 of `some` of the judged queries; None where there are none."""
    before, after = ((each.best[some] <= 1).astype(np.float64) for each in (raw, other))
    return Side.of(before, after, what) if some.any() else None


def _examples(
    ranked: Ranked, raw: Ranking, other: Ranking, query_names: Sequence[object] | None, seed: int
) -> Iterator[Example]:
    """Some judged queries that were won, and some that were lost, drawn at random."""
    rng, before, after = np.random.default_rng(seed), raw.best <= 1, other.best <= 1
    outcomes: tuple[tuple[Literal["won", "lost"], np.ndarray], ...]
    outcomes = (("won", after & ~before), ("lost", before & ~after))
    for outcome, happened in outcomes:
        for place in rng.permutation(np.flatnonzero(happened))[:EXAMPLES].tolist():
            true, answers = ranked.true_targets(place), list[list[Answer]]()
            for ranking in (raw, other):
                ids = [ranked.ids[row] for row in ranking.nearest[ranked.judged[place]].tolist() if row >= 0]
                answers.append([Answer(name, key in true) for key, name in zip(ids, ranked.names(ids), strict=True)])
            row = int(ranked.queries[ranked.judged[place]])
            query = f"query {row}" if query_names is None else str(query_names[row])
            yield Example(outcome, query, ranked.names(true), *answers)
