"""`evaluate`: raw search and corrections side by side, on queries whose true targets are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np

from hubplugin.bank import BankLike
from hubplugin.compute import Compute
from hubplugin.errors import InputError, Parameter
from hubplugin.evaluation.ranked import (
    PLANS,
    Ranked,
    RankedArrays,
    RankedStore,
    Ranking,
    Task,
)
from hubplugin.evaluation.results import (
    Answer,
    Example,
    MethodResult,
    Results,
    usable_best,
)
from hubplugin.evaluation.truth import Names, TrueIds, TruthLike, as_names
from hubplugin.jobs.naming import Naming
from hubplugin.measures import hubness
from hubplugin.measures.retrieval import average_precision, ndcg
from hubplugin.measures.significance import (
    Side,
    adjust,
    compare,
    hubness_interval,
    interval,
)
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.results import Histogram, Hub
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

    All additive methods share one product of queries and targets. Memory holds the queries, one block of targets, and
    k rows a query and one offset a target for each method. Under cosine zero vectors, which have no direction, are left
    out of queries and of arrays of targets, and counted in the log; so are pairs of the truth that name them.

    Args:
        targets: [n, d], ranked raw and under each method. Or a store, which is searched as it is, raw and by its active
            correction, as an application does it: index, quantisation and filter included. Nothing is changed.
        bank: of arrays only, as in `hubplugin.fit`.
        queries: [q, d].
        truth: see `TruthLike`; by default row i of the targets is the true one of query i. Of a store ids, see
            `TrueIds`.
        methods: of arrays only: names, with parameters where they differ from the defaults ("is",
            "nnn k=128 alpha=0.75"). They are the additive methods, the query-dependent ones (dis, dualdis, dsl, gc),
            and otn, l2n and hn, which need no bank and compare up to 25 million pairs. By default every additive method
            that the bank allows.
        models: of arrays only: fitted models by label, as {"learned": hubplugin.fit(..., learn=True)}.
        k: how many targets a query finds, of the k-occurrence, mAP@k and nDCG@k; 10 as in the papers.
        condition: of a store only, a filter, see `hubplugin.store.Store.with_filter`.
        names: what reports and a qrels file call targets: a sequence, or a text file with one a line. Of a store a
            function of ids, as `hubplugin.jobs.naming` gives it.
        query_names: what they call queries.
        metric: of arrays only, as in `hubplugin.fit`.
        seed: of the bootstrap and of samples.
        compute: device and memory.

    Raises:
        InputError: for anything that cannot be used as given, and where no query finds a true target of a store.
    """
    vectors = as_vectors(queries, "queries")
    if seed < 0:
        raise InputError(Parameter("seed", seed), ": expected 0 or more")
    task = Task(
        vectors, as_names(query_names, vectors.rows, "query_names"), k, seed, compute
    )
    if names is not None and callable(names) != isinstance(targets, Store):
        raise InputError(
            Parameter("names"),
            ": expected a function of ids for a store, or one for each row of an array",
        )
    if isinstance(targets, Store):
        for_arrays = {
            "bank": bank,
            "methods": methods,
            "models": models,
            "metric": metric,
        }
        for name, value in for_arrays.items():
            if value is not None:
                raise InputError(
                    Parameter(name),
                    " is for arrays and files; a store is searched as it is",
                )
        if truth is None:
            raise InputError(
                "a store needs ids of true targets: pass ", Parameter("truth")
            )
        naming = cast(Naming | None, names)
        return results_of(
            RankedStore(task, targets, cast(TrueIds, truth), condition, naming), task
        )
    if condition is not None:
        raise InputError("a filter is for a store; arrays and files are searched whole")
    metric = Metric.parse(metric or Metric.COSINE)
    rows = cast(TruthLike, truth), cast(Names, names)
    return results_of(
        RankedArrays(task, targets, *rows, metric, bank, methods, models or {}), task
    )


HUBS = 20
"""Hubs and anti-hubs that are named, at most."""

EXAMPLES = 3
"""Examples of won and of lost queries."""

BINS = 40
"""Of the distribution of offsets."""


def results_of(ranked: Ranked, task: Task) -> Results:
    """All figures of the rankings in `ranked` for the queries of `task`, and by name the targets that are worth looking
    at."""
    rankings = list(ranked.rankings())
    occurrences = [
        hubness.k_occurrence(each.nearest[each.nearest >= 0], len(ranked.ids))
        for each in rankings
    ]
    methods = _measure_methods(ranked, rankings, occurrences, task)
    best, raw = usable_best(methods), rankings[0]
    shown = next(
        (
            ranking
            for ranking, method in zip(rankings, methods, strict=True)
            if method is best
        ),
        None,
    )
    hubs, never = hubness.hubs(occurrences[0], HUBS).tolist(), list[int]()
    if ranked.count == len(ranked.ids):  # all targets are known by name
        never = hubness.pick_evenly(np.flatnonzero(occurrences[0] == 0), HUBS).tolist()
    names = ranked.names([ranked.ids[row] for row in [*hubs, *never]])
    parts: dict[str, Any] = {}
    if shown is not None:
        parts["examples"] = list(_examples(ranked, raw, shown, task))
        if shown.candidate.offsets is not None:
            counts, edges = np.histogram(shown.candidate.offsets, BINS)
            parts["offsets"] = Histogram(shown.label, edges.tolist(), counts.tolist())
        if (first := ranked.mark_found_by_bank()) is not None:
            parts["found_first"] = _side(raw, shown, first, "found first by the bank")
            parts["not_found_first"] = _side(raw, shown, ~first, "others")
    return Results(
        queries=len(ranked.queries),
        judged=len(ranked.judged),
        k=task.k,
        seed=task.seed,
        methods=methods,
        best=best.label if best is not None and best.sign > 0 else None,
        hubs=[
            Hub(
                id=ranked.ids[row],
                name=name,
                found_by={
                    each.label: int(counts[row])
                    for each, counts in zip(rankings, occurrences, strict=True)
                },
            )
            for row, name in zip(
                hubs, names, strict=False
            )  # behind them stand those that are never found
        ],
        anti_hubs=names[len(hubs) :],
        **parts,
        **ranked.facts(),
    )


def _measure_methods(
    ranked: Ranked,
    rankings: Sequence[Ranking],
    occurrences: Sequence[np.ndarray],
    task: Task,
) -> list[MethodResult]:
    k, seed, results = task.k, task.seed, list[MethodResult]()
    versus = [compare(rankings[0].best, ranking.best) for ranking in rankings[1:]]
    adjusted = adjust([comparison.p for comparison in versus])
    for number, (ranking, occurrence) in enumerate(
        zip(rankings, occurrences, strict=True)
    ):
        times, figures = (
            hubness.count_targets(occurrence, ranked.count),
            dict[str, Any](),
        )
        if ranked.count is None:
            times.pop(0, None)  # nobody knows how many there are that no query finds
        else:
            figures["hubness"] = hubness.Hubness.of(
                np.array([*times]), k, np.array([*times.values()])
            )
            figures["most_found"] = hubness.share_of_most_found(
                occurrence, ranked.count
            )
        if ranking.ranks is not None:  # of the whole gallery
            figures |= {
                "median_rank": interval(ranking.best, seed, np.median),
                "mean_rank": interval(ranking.best, seed),
                "mean_average_precision": interval(
                    average_precision(ranking.ranks, k), seed
                ),
                "ndcg": interval(ndcg(ranking.ranks, k), seed),
                "skewness": hubness_interval(
                    ranking.nearest, len(ranked.ids), hubness.skewness, seed
                ),
            }
        if number:
            figures |= {
                "versus_raw": versus[number - 1],
                "adjusted_p": adjusted[number - 1],
            }
        results.append(
            MethodResult(
                label=ranking.label,
                method=ranking.candidate.method,
                parameters=ranking.candidate.parameters,
                recall={
                    at: interval((ranking.best <= at).astype(np.float64), seed)
                    for at in sorted({1, k, *ranked.recall_at})
                },
                worst=float(occurrence.max()) / len(ranking.nearest),
                occurrences=times,
                storable=ranking.candidate.scores is None,
                transductive=ranking.candidate.method in PLANS,
                best_ranks=ranking.best,
                **figures,
            )
        )
        task.compute.report("bootstrap intervals", number + 1, len(rankings))
    return results


def _side(raw: Ranking, shown: Ranking, part: np.ndarray, label: str) -> Side | None:
    """R@1 of the judged queries in `part`; None where there are none."""
    right, right_now = (
        (ranking.best[part] <= 1).astype(np.float64) for ranking in (raw, shown)
    )
    return Side.of(right, right_now, label) if part.any() else None


def _examples(
    ranked: Ranked, raw: Ranking, shown: Ranking, task: Task
) -> Iterator[Example]:
    """Some judged queries that were won, and some that were lost, drawn at random."""
    rng, right, right_now = (
        np.random.default_rng(task.seed),
        raw.best <= 1,
        shown.best <= 1,
    )
    outcomes: tuple[tuple[Literal["won", "lost"], np.ndarray], ...]
    outcomes = (("won", right_now & ~right), ("lost", right & ~right_now))
    for outcome, happened in outcomes:
        for place in rng.permutation(np.flatnonzero(happened))[:EXAMPLES].tolist():
            true, answers = ranked.true_targets(place), list[list[Answer]]()
            for ranking in (raw, shown):
                ids = [
                    ranked.ids[row]
                    for row in ranking.nearest[ranked.judged[place]].tolist()
                    if row >= 0
                ]
                answers.append(
                    [
                        Answer(name, key in true)
                        for key, name in zip(ids, ranked.names(ids), strict=True)
                    ]
                )
            row = int(ranked.queries[ranked.judged[place]])
            query = (
                f"query {row}"
                if task.query_names is None
                else str(task.query_names[row])
            )
            yield Example(outcome, query, ranked.names(true), *answers)
