"""What the methods of an evaluation find, and the figures of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hubplugin.evaluation.candidates import Candidate
from hubplugin.evaluation.plans import PLANS
from hubplugin.evaluation.result import SIGNIFICANT, MethodResult
from hubplugin.evaluation.scene import Scene
from hubplugin.measures import hubness
from hubplugin.measures.retrieval import Ranks, average_precision, expected_ranks, ndcg, recall
from hubplugin.measures.significance import compare, hubness_interval, interval
from hubplugin.search import TIE, TopK, TruthCounts, search

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
    from scipy.stats import false_discovery_control

    raw_ranks, seed, k = outcomes[0].ranks.best, scene.seed, scene.k
    versus = [compare(raw_ranks, outcome.ranks.best, seed) for outcome in outcomes[1:]]
    adjusted = false_discovery_control([comparison.p for comparison in versus]) if versus else []
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
                adjusted_p=float(adjusted[number - 1]) if number else None,
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
