"""`evaluate`: raw search and corrections side by side, on queries whose true targets are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np

from hubplugin.bank import BankLike
from hubplugin.compute import Compute
from hubplugin.errors import InputError, Parameter
from hubplugin.evaluation.ranked import Ranked, RankedArrays, RankedStore, Ranking
from hubplugin.evaluation.results import MethodResult, Results, best_of, shares, shown_of
from hubplugin.evaluation.truth import Names, TrueIds, TruthLike, as_names
from hubplugin.jobs.naming import Naming
from hubplugin.measures import hubness
from hubplugin.measures.retrieval import average_precision, ndcg
from hubplugin.measures.significance import adjusted, compare, hubness_interval, interval
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.report import Answer, Example, Histogram, Hub
from hubplugin.store import Id, Store
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
    Of a store only: condition, a filter, see `hubplugin.abilities.Filtered`.

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


def results_of(ranked: Ranked, query_names: Sequence[object] | None, k: int, seed: int, compute: Compute) -> Results:
    rankings = list(ranked.rankings())
    occurrences = [hubness.k_occurrence(each.nearest[each.nearest >= 0], len(ranked.ids)) for each in rankings]
    methods = _methods(ranked, rankings, occurrences, k, seed, compute)
    winner = best_of(methods)
    shown = shown_of(methods, winner)
    raw = rankings[0]
    other = next((ranking for ranking, method in zip(rankings, methods, strict=True) if method is shown), None)
    sides = [raw] if other is None else [raw, other]
    parts: dict[str, Any] = {}
    if other is not None and (first := ranked.found_first()) is not None:
        parts = dict(shares(first, raw.best, other.best))
    hubs = {ranked.ids[row]: row for row in hubness.hubs(occurrences[0], HUBS)}
    never = _never_found(ranked, occurrences[0])
    examples = [] if other is None else _drawn(raw.best, other.best, seed)
    mentioned = [*hubs, *never]
    for _, place in examples:
        mentioned += [*ranked.true_targets(place), *(key for side in sides for key in _found(ranked, side, place))]
    names = dict(zip(mentioned, ranked.names(mentioned), strict=True))
    return Results(
        queries=len(ranked.queries),
        judged=len(ranked.judged),
        k=k,
        seed=seed,
        methods=methods,
        best=winner,
        hubs=[
            Hub(
                id=key,
                name=names[key],
                found_by={each.label: int(found[row]) for each, found in zip(rankings, occurrences, strict=True)},
            )
            for key, row in hubs.items()
        ],
        anti_hubs=[names[key] for key in never],
        offsets=None if other is None or other.offsets is None else histogram(other.label, other.offsets),
        examples=[_example(ranked, sides, outcome, place, names, query_names) for outcome, place in examples],
        **parts,
        **ranked.facts(),
    )


def _counted(occurrence: np.ndarray, count: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The values of the k-occurrence, and how many of `count` targets have each: those that have no place in
    `occurrence` are never found. Without a count only those that are found."""
    values, times = np.unique(np.append(occurrence, 0), return_counts=True)
    times[0] = 0 if count is None else times[0] + count - len(occurrence) - 1
    return values[times > 0], times[times > 0]


def _methods(
    ranked: Ranked, rankings: Sequence[Ranking], occurrences: Sequence[np.ndarray], k: int, seed: int, compute: Compute
) -> list[MethodResult]:
    versus = [compare(rankings[0].best, ranking.best) for ranking in rankings[1:]]
    corrected = adjusted([comparison.p for comparison in versus])
    results = []
    for number, (ranking, occurrence) in enumerate(zip(rankings, occurrences, strict=True)):
        values, times = _counted(occurrence, ranked.count)
        ranks, known = ranking.ranks, {}
        if ranks is not None:  # of the whole gallery
            known = {
                "median_rank": interval(ranking.best, seed, np.median),
                "mean_rank": interval(ranking.best, seed),
                "mean_average_precision": interval(average_precision(ranks, k), seed),
                "ndcg": interval(ndcg(ranks, k), seed),
                "skewness": hubness_interval(ranking.nearest, len(ranked.ids), hubness.skewness, seed),
            }
        results.append(
            MethodResult(
                label=ranking.label,
                method=ranking.method,
                parameters=ranking.parameters,
                recall={
                    at: interval((ranking.best <= at).astype(np.float64), seed)
                    for at in sorted({1, k, *ranked.recall_at})
                },
                worst=float(occurrence.max()) / len(ranking.nearest),
                most_found=None if ranked.count is None else hubness.share_of_most_found(occurrence, ranked.count),
                hubness=None if ranked.count is None else hubness.Hubness.of(values, k, times),
                occurrences=dict(zip(values.tolist(), times.tolist(), strict=True)),
                storable=ranking.storable,
                transductive=ranking.transductive,
                versus_raw=versus[number - 1] if number else None,
                adjusted_p=corrected[number - 1] if number else None,
                best_ranks=ranking.best,
                **known,
            )
        )
        compute.report("bootstrap intervals", number + 1, len(rankings))
    return results


HUBS = 20
"""Hubs and anti-hubs that are named, at most."""

EXAMPLES = 3
"""Examples of won and of lost queries."""

BINS = 40
"""Of the distribution of offsets."""


def _never_found(ranked: Ranked, occurrence: np.ndarray) -> list[Id]:
    """Some of the targets that no query finds in the raw search, where all are known by name."""
    if ranked.count != len(ranked.ids):
        return []
    never = np.flatnonzero(occurrence == 0)
    return [ranked.ids[row] for row in never[np.linspace(0, len(never) - 1, min(len(never), HUBS)).astype(int)]]


def histogram(label: str, offsets: np.ndarray) -> Histogram:
    """The distribution of `offsets` [n]."""
    counts, edges = np.histogram(offsets, BINS)
    return Histogram(label=label, edges=edges.tolist(), counts=counts.tolist())


Outcome = Literal["won", "lost"]


def _drawn(raw: np.ndarray, other: np.ndarray, seed: int) -> list[tuple[Outcome, int]]:
    """The places of some judged queries, of ranks `raw` and `other` [j], that were won, and of some that were lost."""
    rng, before, after = np.random.default_rng(seed), raw <= 1, other <= 1
    outcomes: tuple[tuple[Outcome, np.ndarray], ...] = (("won", after & ~before), ("lost", before & ~after))
    return [
        (outcome, int(place))
        for outcome, happened in outcomes
        for place in rng.permutation(np.flatnonzero(happened))[:EXAMPLES]
    ]


def _found(ranked: Ranked, ranking: Ranking, place: int) -> list[Id]:
    """What a judged query finds."""
    return [ranked.ids[number] for number in ranking.nearest[ranked.judged[place]].tolist() if number >= 0]


def _example(
    ranked: Ranked,
    sides: Sequence[Ranking],
    outcome: Outcome,
    place: int,
    names: Mapping[Id, str],
    query_names: Sequence[object] | None,
) -> Example:
    true, row = ranked.true_targets(place), int(ranked.queries[ranked.judged[place]])
    before, after = (
        [Answer(name=names[key], true=key in true) for key in _found(ranked, side, place)] for side in sides
    )
    return Example(
        outcome=outcome,
        query=f"query {row}" if query_names is None else str(query_names[row]),
        truth=[names[key] for key in true],
        raw=before,
        corrected=after,
    )
