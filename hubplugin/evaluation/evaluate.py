"""`evaluate`: every method side by side on queries whose true targets are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from hubplugin.compute import TIE, TopK, TruthCounts, prepared, search
from hubplugin.errors import InputError, Parameter
from hubplugin.evaluation.candidates import PLANS, Candidate, Scene, candidates_of
from hubplugin.evaluation.report import Evaluation
from hubplugin.evaluation.result import (
    RAW,
    SIGNIFICANT,
    Answer,
    Example,
    Histogram,
    Hub,
    MethodResult,
    Share,
    shares,
    shown_of,
)
from hubplugin.evaluation.truth import Names, TruthLike, as_names, as_truth
from hubplugin.measures import hubness
from hubplugin.measures.retrieval import Ranks, average_precision, expected_ranks, ndcg, recall
from hubplugin.measures.significance import adjusted, compare, hubness_interval, interval
from hubplugin.methods import FitInput
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.resources import Compute
from hubplugin.vectors import VectorLike, Vectors, as_vectors


def coverage(bank: np.ndarray, targets: Vectors, metric: Metric, compute: Compute) -> float:
    """Share of the gallery that is the nearest target of some bank row, 0 to 1. `bank` is prepared, [m, d].

    What no bank query comes near, no bank query can tell to be a hub. m bank rows cover at most m / n.
    """
    nearest = TopK(1)
    search(bank, targets, metric, compute, nearest, what="coverage of the gallery")
    return len(np.unique(nearest.rows)) / targets.rows


EACH = 3
"""Examples of won and of lost queries."""


def drawn(raw_ranks: np.ndarray, ranks: np.ndarray, seed: int) -> list[tuple[Literal["won", "lost"], int]]:
    """The places of some queries, among those with ranks [j], that were won, and of some that were lost."""
    rng, before, after = np.random.default_rng(seed), raw_ranks <= 1, ranks <= 1
    outcomes: tuple[tuple[Literal["won", "lost"], np.ndarray], ...] = (
        ("won", after & ~before),
        ("lost", before & ~after),
    )
    return [
        (outcome, int(place))
        for outcome, happened in outcomes
        for place in rng.permutation(np.flatnonzero(happened))[:EACH]
    ]


def example_of(
    outcome: Literal["won", "lost"],
    query: str,
    truth: Sequence[object],
    raw: Sequence[object],
    corrected: Sequence[object],
    called: Callable[[object], str],
) -> Example:
    """truth, raw, corrected: targets, by what `called` knows them by."""
    known = {str(each) for each in truth}
    before, after = (
        [Answer(name=called(each), true=str(each) in known) for each in found] for found in (raw, corrected)
    )
    return Example(outcome=outcome, query=query, truth=list(map(called, truth)), raw=before, corrected=after)


HUBS = 20


def worst_hubs(occurrences: Mapping[str, np.ndarray], names: Sequence[object] | None) -> list[Hub]:
    """The targets that the raw search finds most often. occurrences: the k-occurrence [n] under each method."""
    return [
        Hub(
            id=int(row),
            name=str(names[row]) if names is not None else f"target {row}",
            found_by={label: int(occurrence[row]) for label, occurrence in occurrences.items()},
        )
        for row in hubness.hubs(occurrences[RAW], HUBS)
    ]


def anti_hubs(occurrence: np.ndarray, names: Sequence[object] | None) -> list[str]:
    """Some of the targets that no query finds, by name. occurrence: the k-occurrence [n] of the raw search."""
    never = np.flatnonzero(occurrence == 0)
    some = never[np.linspace(0, len(never) - 1, min(len(never), HUBS)).astype(int)]
    return [str(names[row]) if names is not None else f"target {row}" for row in some.tolist()]


RECALL_AT = (1, 5, 10)


@dataclass(frozen=True)
class Outcome:
    ranks: Ranks
    found: np.ndarray


def outcomes_of(candidates: Sequence[Candidate], scene: Scene) -> Iterator[Outcome]:
    """In the order of the candidates; those with offsets share one search."""
    truth, top = scene.truth, TopK(scene.k)
    counts = TruthCounts(truth.query_rows, truth.target_rows)
    offsets = np.stack([candidate.offsets for candidate in candidates if candidate.offsets is not None])
    search(scene.queries, scene.targets, scene.metric, scene.compute, top, counts, offsets=offsets)
    searched = iter(
        [
            Outcome(expected_ranks(truth, greater, equal), found)
            for greater, equal, found in zip(counts.greater, counts.equal, top.rows, strict=True)
        ]
    )
    for candidate in candidates:
        yield next(searched) if candidate.scores is None else _scored(candidate, scene)


def _scored(candidate: Candidate, scene: Scene) -> Outcome:
    """Ranks and nearest of a method that gives scores and no offsets, as many queries at a time as memory allows."""
    assert candidate.scores is not None
    truth, count = scene.truth, len(scene.queries)
    greater, equal = np.empty(len(truth.query_rows), np.int64), np.empty(len(truth.query_rows), np.int64)
    found = np.empty((count, scene.k), np.int64)
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
        found[rows] = torch.topk(torch.from_numpy(scores), scene.k, dim=1).indices.numpy()
        scene.compute.report(f"ranking by {candidate.label}", rows.stop, count)
    return Outcome(expected_ranks(truth, greater, equal), found)


def results_of(candidates: Sequence[Candidate], outcomes: Sequence[Outcome], scene: Scene) -> list[MethodResult]:
    raw_ranks, seed, k = outcomes[0].ranks.best, scene.seed, scene.k
    versus = [compare(raw_ranks, outcome.ranks.best, seed) for outcome in outcomes[1:]]
    corrected = adjusted([comparison.p for comparison in versus])
    results = []
    for number, (candidate, outcome) in enumerate(zip(candidates, outcomes, strict=True)):
        ranks, occurrence = outcome.ranks, hubness.k_occurrence(outcome.found, scene.targets.rows)
        values, targets = np.unique(occurrence, return_counts=True)
        results.append(
            MethodResult(
                label=candidate.label,
                method=candidate.method,
                parameters=candidate.parameters,
                recall={at: interval(recall(ranks, at), seed) for at in sorted({*RECALL_AT, k})},
                median_rank=interval(ranks.best, seed, np.median),
                mean_rank=interval(ranks.best, seed),
                mean_average_precision=interval(average_precision(ranks, k), seed),
                ndcg=interval(ndcg(ranks, k), seed),
                skewness=hubness_interval(outcome.found, scene.targets.rows, hubness.skewness, seed),
                hubness=hubness.Hubness.of(occurrence, k),
                occurrences=dict(zip(values.tolist(), targets.tolist(), strict=True)),
                storable=candidate.offsets is not None,
                transductive=candidate.method in PLANS,
                versus_raw=versus[number - 1] if number else None,
                adjusted_p=corrected[number - 1] if number else None,
                best_ranks=ranks.best,
            )
        )
        scene.compute.report("bootstrap intervals", number + 1, len(candidates))
    return results


def best(results: Sequence[MethodResult]) -> str | None:
    """The highest R@1 among the methods that a search can use, if it is better than the raw search beyond chance."""
    usable = [result for result in results[1:] if not result.transductive]
    if not usable:
        return None
    best = max(usable, key=lambda result: (result.recall[1].value, -result.hubness.skewness))
    gained = best.recall[1].value > results[0].recall[1].value
    return best.label if gained and best.adjusted_p is not None and best.adjusted_p < SIGNIFICANT else None


BINS = 40
"""Of the distribution of offsets."""

Called: TypeAlias = Sequence[object] | None


def details(
    candidate: Candidate, raw: Outcome, shown: Outcome, scene: Scene, names: tuple[Called, Called]
) -> dict[str, Any]:
    """Fields of `Results`. names: of targets and of queries."""
    return {
        **_sides(raw, shown, scene),
        "offsets": None if candidate.offsets is None else histogram(candidate.label, candidate.offsets),
        "examples": _examples(raw, shown, scene, *names),
    }


def histogram(label: str, offsets: np.ndarray) -> Histogram:
    """The distribution of `offsets` [n]."""
    counts, edges = np.histogram(offsets, BINS)
    return Histogram(label=label, edges=edges.tolist(), counts=counts.tolist())


def _sides(raw: Outcome, shown: Outcome, scene: Scene) -> dict[str, Share]:
    """R@1 of queries whose true target some bank query finds first, and of the others."""
    if scene.given is None:
        return {}
    nearest, truth = TopK(1), scene.truth
    search(scene.given.query_bank, scene.targets, scene.metric, scene.compute, nearest, what="answers of the bank")
    found_first = np.logical_or.reduceat(np.isin(truth.target_rows, nearest.rows), truth.starts)
    return shares(found_first, raw.ranks.best, shown.ranks.best, scene.seed)


def _examples(raw: Outcome, shown: Outcome, scene: Scene, targets: Called, queries: Called) -> list[Example]:
    truth = scene.truth

    def called(row: object) -> str:
        return f"target {row}" if targets is None else str(targets[int(str(row))])

    examples = []
    for outcome, place in drawn(raw.ranks.best, shown.ranks.best, scene.seed):
        row, first = int(truth.judged[place]), truth.starts[place]
        true = truth.target_rows[first : first + truth.counts[place]].tolist()
        query = f"query {row}" if queries is None else str(queries[row])
        found = (raw.found[row].tolist(), shown.found[row].tolist())
        examples.append(example_of(outcome, query, true, *found, called))
    return examples


def evaluate(
    queries: VectorLike,
    targets: VectorLike,
    truth: TruthLike = None,
    query_bank: VectorLike | None = None,
    target_bank: VectorLike | None = None,
    methods: Sequence[str] | None = None,
    models: Mapping[str, OffsetModel] | None = None,
    k: int = 10,
    names: Names = None,
    query_names: Names = None,
    metric: Metric | str = "cosine",
    seed: int = 0,
    compute: Compute = Compute(),
) -> Evaluation:
    """Ranks all targets for all queries, raw and under each method, and measures recall and hubness.

    queries [q, d], targets [n, d], query_bank [m, d], target_bank [p, d]: as in `hubplugin.fit`.
    truth: see `TruthLike`; by default row i of the targets is the true one of query i.
    methods: names, with parameters where they differ from the defaults ("is", "nnn k=128 alpha=0.75"): the additive
        methods, the query-dependent ones (dis, dualdis, dsl, gc), and, for comparison on up to 25 million pairs,
        otn, l2n and hn, which need no bank. By default every additive method that the given banks allow.
    models: fitted models besides, by the label that they get, as {"auto": hubplugin.fit(..., method="auto")}.
    k: of the k-occurrence, mAP@k and nDCG@k; 10 as in the papers. R@k is given beside R@1, R@5 and R@10.
    names, query_names: what reports and a qrels file call the targets and the queries; a sequence, or a text file with
        one a line.
    seed: of the bootstrap and of samples. compute: as in `hubplugin.fit`.

    All additive methods share one product of queries and targets. Memory holds the queries, one block of targets, and
    k rows a query and one offset a target for each method.

    Raises InputError, one line, for anything that cannot be used as given.
    """
    metric = Metric.parse(metric)
    asked, gallery = as_vectors(queries, "queries"), as_vectors(targets, "targets")
    _require_usable(asked, gallery, k, seed, models or {})
    if target_bank is not None and query_bank is None:
        raise InputError("a target bank was given without example queries: pass ", Parameter("query_bank"))
    names = as_names(names, gallery.rows, "names")
    query_names = as_names(query_names, asked.rows, "query_names")
    given = None
    if query_bank is not None:
        given = FitInput.read(query_bank, gallery, target_bank, metric, compute)
    true_pairs = as_truth(truth, asked.rows, gallery.rows, query_names, names)
    scene = Scene(prepared(asked, metric), gallery, true_pairs, given, metric, compute, k, seed)
    candidates = candidates_of(methods, models, scene)
    return _evaluation(candidates, list(outcomes_of(candidates, scene)), scene, (names, query_names))


def _evaluation(
    candidates: Sequence[Candidate], found: Sequence[Outcome], scene: Scene, names: tuple[Called, Called]
) -> Evaluation:
    """names: of targets and of queries."""
    given, results = scene.given, results_of(candidates, found, scene)
    winner = best(results)
    shown = next((row for row, result in enumerate(results) if result is shown_of(results, winner)), None)
    occurrences = {
        candidate.label: hubness.k_occurrence(outcome.found, scene.targets.rows)
        for candidate, outcome in zip(candidates, found, strict=True)
    }
    return Evaluation(
        metric=scene.metric.value,
        queries=len(scene.queries),
        judged=len(scene.truth.judged),
        targets=scene.targets.rows,
        query_bank=None if given is None else len(given.query_bank),
        target_bank=None if given is None or given.target_bank is None else len(given.target_bank),
        k=scene.k,
        seed=scene.seed,
        methods=results,
        hubs=worst_hubs(occurrences, names[0]),
        coverage=None if given is None else coverage(given.query_bank, scene.targets, scene.metric, scene.compute),
        best=winner,
        anti_hubs=anti_hubs(occurrences[RAW], names[0]),
        **({} if shown is None else details(candidates[shown], found[0], found[shown], scene, names)),
    )


def _require_usable(asked: Vectors, gallery: Vectors, k: int, seed: int, models: Mapping[str, OffsetModel]) -> None:
    if asked.dim != gallery.dim:
        raise InputError(
            f"{asked.name} have {asked.dim} dimensions, {gallery.name} have {gallery.dim}; "
            "embed both with the same model"
        )
    if not 1 <= k <= gallery.rows:
        raise InputError(Parameter("k", k), f" is not between 1 and the {gallery.rows} targets of the gallery")
    if seed < 0:
        raise InputError(Parameter("seed", seed), ": expected 0 or more")
    unlabelled = [label for label in models if label == RAW or not label.strip()]
    if unlabelled:
        raise InputError(f"a model cannot be labelled {unlabelled[0]!r}; name it by another word than {RAW!r}")
