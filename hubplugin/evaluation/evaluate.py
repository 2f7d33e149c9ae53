"""`evaluate`: raw search and corrections side by side, on queries of known answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np

from hubplugin.bank import BankLike
from hubplugin.compute import Compute
from hubplugin.errors import InputError, Parameter
from hubplugin.evaluation.plans import PLANS
from hubplugin.evaluation.ranked import Ranked, Ranking, Task, rank_arrays, rank_store
from hubplugin.evaluation.results import (
    Answer,
    Example,
    MethodResult,
    Results,
    usable_best,
)
from hubplugin.evaluation.truth import Names, TruthLike, as_names
from hubplugin.jobs.naming import Naming
from hubplugin.measures import hubness
from hubplugin.measures.retrieval import average_precision, ndcg
from hubplugin.measures.significance import (
    adjust,
    hubness_interval,
    interval,
    measure_change,
)
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.results import NAMED, Hub, Misled
from hubplugin.store import Store
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
    """Measure whether a correction helps: recall and hubness, on queries with known answers.

    A store is searched raw and corrected; arrays are ranked raw and by every method.

    All additive methods share one product of queries and targets. Memory holds the
    queries, one block of targets, and k rows a query and one offset a target for each
    method. Under cosine zero vectors, which have no direction, are left out of queries
    and of arrays of targets, and counted in the log; so are pairs of the truth that
    name them.

    Args:
        targets: [n, d], ranked raw and under each method. Or a store, which is searched
            as it is, raw and by its active correction, as an application does it:
            index, quantisation and filter included. Nothing is changed.
        bank: For arrays only, as in `hubplugin.fit`.
        queries: [q, d].
        truth: See `TruthLike`; by default row i of the targets is the true one of query
            i.
        methods: For arrays only: names, with parameters where they differ from the
            defaults ("is", "nnn k=128 alpha=0.75"). They are the additive methods, the
            query-dependent ones (dis, dualdis, dsl, gc), and otn, l2n and hn, which
            need no bank and compare up to 25 million pairs. By default every additive
            method that the bank allows.
        models: For arrays only: fitted models by label, as {"learned":
            hubplugin.fit(..., learn=True)}.
        k: How many targets a query finds, of the k-occurrence, mAP@k and nDCG@k; 10 as
            in the papers.
        condition: For a store only, a filter, see `hubplugin.store.Store.with_filter`.
        names: What reports and a qrels file call targets: a sequence, or a text file
            with one a line. For a store a function of ids, as `hubplugin.jobs.naming`
            gives it.
        query_names: What they call queries.
        metric: For arrays only, as in `hubplugin.fit`.
        seed: The seed of the bootstrap and of samples.
        compute: Device and memory.

    Returns:
        Figures of each ranking, hubs and examples; the raw search comes first.

    Raises:
        InputError: Something cannot be used as given, or no query finds a true target
            of a store.
    """
    vectors = as_vectors(queries, "queries")
    if seed < 0:
        raise InputError(Parameter("seed", seed), ": expected 0 or more")
    called = as_names(query_names, vectors.rows, "query_names")
    task = Task(vectors, called, k, seed, compute)
    if names is not None and callable(names) != isinstance(targets, Store):
        raise InputError(
            Parameter("names"),
            ": expected a function of ids for a store, or one for each row of an array",
        )
    if not isinstance(targets, Store):
        if condition is not None:
            raise InputError(
                "a filter is for a store; arrays and files are searched whole"
            )
        ranked = rank_arrays(
            task,
            targets,
            truth,
            cast(Names, names),
            Metric.parse(metric or Metric.COSINE),
            bank,
            methods,
            models or {},
        )
        return results_of(ranked, task)
    given = {"bank": bank, "methods": methods, "models": models, "metric": metric}
    for name, value in given.items():
        if value is not None:
            raise InputError(
                Parameter(name),
                " is for arrays and files; a store is searched as it is",
            )
    if truth is None:
        raise InputError("a store needs ids of true targets: pass ", Parameter("truth"))
    naming = cast(Naming | None, names)
    return results_of(rank_store(task, targets, truth, condition, naming), task)


HUBS = 20
"""The most hubs, and the most targets never found, that results name."""

EXAMPLES = 3
"""The most examples of won queries, of lost queries, and of queries that a hub misled."""


def results_of(ranked: Ranked, task: Task) -> Results:
    """Return the results of the rankings: figures, hubs and examples."""
    size = len(ranked.ids)
    occurrences = []
    for ranking in ranked.rankings:
        found = ranking.nearest[ranking.nearest >= 0]
        occurrences.append(hubness.k_occurrence(found, size))
    methods = _measure_methods(ranked, occurrences, task)
    best = usable_best(methods)
    rows = hubness.hubs(occurrences[0], HUBS).tolist()
    never: list[int] = []
    if ranked.count == size:  # all targets are known by name
        unfound = np.flatnonzero(occurrences[0] == 0)
        never = hubness.pick_evenly(unfound, HUBS).tolist()
    misled: dict[int, list[int]] = {}
    first = ranked.rankings[0].nearest[ranked.judged, 0]
    after = first
    if best is not None:
        after = ranked.rankings[methods.index(best)].nearest[ranked.judged, 0]
        wrong = (ranked.rankings[0].best > 1) & (after >= 0)
        for row in rows[:NAMED]:
            places = np.flatnonzero(wrong & (first == row))
            misled[row] = hubness.pick_evenly(places, EXAMPLES).tolist()
    shown = [*rows, *never]
    for rows_of_hub in misled.values():
        shown += after[rows_of_hub].tolist()
    names = ranked.names([ranked.ids[row] for row in shown])
    name_of = dict(zip(shown, names, strict=True))
    hubs = []
    for row in rows:
        found_by = {}
        for method, occurrence in zip(methods, occurrences, strict=True):
            found_by[method.label] = int(occurrence[row])
        examples_of_hub = []
        for place in misled.get(row, ()):
            query = task.name(int(ranked.queries[ranked.judged[place]]))
            instead = int(after[place])
            is_right = ranked.ids[instead] in ranked.true[place]
            examples_of_hub.append(Misled(query, name_of[instead], is_right))
        hubs.append(Hub(ranked.ids[row], name_of[row], found_by, examples_of_hub))
    recommended = None
    examples: list[Example] = []
    if best is not None:
        if best.sign > 0:
            recommended = best.label
        corrected = ranked.rankings[methods.index(best)]
        examples += _draw_examples(ranked, corrected, "won", task)
        examples += _draw_examples(ranked, corrected, "lost", task)
    return Results(
        queries=len(ranked.queries),
        judged=len(ranked.judged),
        k=task.k,
        seed=task.seed,
        methods=methods,
        best=recommended,
        hubs=hubs,
        anti_hubs=[name_of[row] for row in never],
        examples=examples,
        **ranked.facts,
    )


def _measure_methods(
    ranked: Ranked, occurrences: Sequence[np.ndarray], task: Task
) -> list[MethodResult]:
    raw, *others = ranked.rankings
    versus = [measure_change(raw.best <= 1, other.best <= 1) for other in others]
    adjusted = adjust([comparison.p for comparison in versus])
    recall_at = [k for k in (1, 5, 10) if k < task.k] + [task.k]
    results = []
    for number, ranking in enumerate(ranked.rankings):
        candidate = ranking.candidate
        occurrence = occurrences[number]
        recall = {}
        for k in recall_at:
            recall[k] = interval((ranking.best <= k).astype(np.float64), task.seed)
        figures = _measure_whole_gallery(ranking, len(ranked.ids), task)
        if ranked.count is None:
            times = hubness.count_targets(occurrence)
            times.pop(0, None)  # nobody knows how many there are that no query finds
        else:
            of_all = hubness.add_never_found(occurrence, ranked.count)
            times = hubness.count_targets(of_all)
            figures["hubness"] = hubness.Hubness.of(of_all, task.k)
            figures["most_found"] = hubness.share_of_most_found(of_all)
        if number:
            figures["versus_raw"] = versus[number - 1]
            figures["adjusted_p"] = adjusted[number - 1]
        results.append(
            MethodResult(
                label=candidate.label,
                method=candidate.method,
                parameters=candidate.parameters,
                recall=recall,
                worst=float(occurrence.max()) / len(ranking.nearest),
                occurrences=times,
                storable=candidate.scores is None,
                transductive=candidate.method in PLANS,
                best_ranks=ranking.best,
                **figures,
            )
        )
        task.compute.report("bootstrap intervals", number + 1, len(ranked.rankings))
    return results


def _measure_whole_gallery(
    ranking: Ranking, targets: int, task: Task
) -> dict[str, Any]:
    """Return the figures that need the ranks of all true targets; none for a store."""
    ranks = ranking.ranks
    if ranks is None:
        return {}
    seed = task.seed
    return {
        "median_rank": interval(ranks.best, seed, np.median),
        "mean_rank": interval(ranks.best, seed),
        "mean_average_precision": interval(average_precision(ranks, task.k), seed),
        "ndcg": interval(ndcg(ranks, task.k), seed),
        "skewness": hubness_interval(ranking.nearest, targets, hubness.skewness, seed),
    }


def _draw_examples(
    ranked: Ranked, corrected: Ranking, outcome: Literal["won", "lost"], task: Task
) -> Iterator[Example]:
    """Yield up to `EXAMPLES` judged queries, at random, that `corrected` has won or lost."""
    raw = ranked.rankings[0]
    winner, loser = (corrected, raw) if outcome == "won" else (raw, corrected)
    happened = np.flatnonzero((winner.best <= 1) & (loser.best > 1))
    rng = np.random.default_rng(task.seed)
    for place in rng.permutation(happened)[:EXAMPLES].tolist():
        true = ranked.true[place]
        judged = ranked.judged[place]
        answers = []
        for ranking in (raw, corrected):
            rows = ranking.nearest[judged]
            ids = [ranked.ids[row] for row in rows[rows >= 0].tolist()]
            named = zip(ids, ranked.names(ids), strict=True)
            answers.append([Answer(name, key in true) for key, name in named])
        query = task.name(int(ranked.queries[judged]))
        yield Example(outcome, query, ranked.names(true), *answers)
