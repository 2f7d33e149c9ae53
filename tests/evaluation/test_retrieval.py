"""Retrieval figures against ranx where it defines the same, and against hand counts for ties."""

import numpy as np
import pytest
import ranx

from hubplugin.evaluation.truth import as_truth
from hubplugin.measures.retrieval import Truth, ndcg, rank_pairs
from tests.galleries import assert_near

TARGETS = 30


def hit_rate(ranks, k):
    return (ranks.best <= k).astype(float)


def judged_scores(rng, queries):
    """Scores [q, n] without ties, and one to five graded true targets a query."""
    scores = rng.permuted(
        np.tile(np.arange(TARGETS, dtype=np.float64), (queries, 1)), axis=1
    )
    rows = [
        rng.choice(TARGETS, rng.integers(1, 6), replace=False) for _ in range(queries)
    ]
    truth = as_truth(rows, queries, TARGETS)
    return scores, Truth(
        truth.query_rows,
        truth.target_rows,
        rng.integers(1, 4, len(truth.query_rows)).astype(float),
    )


def ranks_of(scores, truth):
    own = scores[truth.query_rows, truth.target_rows][:, None]
    rows = scores[truth.query_rows]
    return rank_pairs(truth, (rows > own).sum(axis=1), (rows == own).sum(axis=1) - 1)


def ranx_values(scores, truth, metric):
    qrels = {f"{q:03}": {} for q in truth.judged}
    for q, t, grade in zip(
        truth.query_rows, truth.target_rows, truth.grades, strict=True
    ):
        qrels[f"{q:03}"][str(t)] = int(grade)
    run = {
        f"{q:03}": {str(t): float(s) for t, s in enumerate(row)}
        for q, row in enumerate(scores)
    }
    found = ranx.evaluate(ranx.Qrels(qrels), ranx.Run(run), metric, return_mean=False)
    return np.atleast_1d(found)


@pytest.mark.parametrize(
    ("function", "theirs"),
    [(hit_rate, "hit_rate"), (ndcg, "ndcg")],
)
def test_figures_of_graded_truth_are_those_of_ranx(function, theirs):
    scores, truth = judged_scores(np.random.default_rng(3), 25)
    for k in (1, 3, 10, TARGETS):
        ours = function(ranks_of(scores, truth), k)
        assert_near(ours, ranx_values(scores, truth, f"{theirs}@{k}"), 1e-9)


def test_tied_true_targets_stand_where_they_stand_on_average_over_all_orders(rng):
    # one target above, then a group of six tied of which two are true
    truth = as_truth([[2, 5]], 1, 9)
    scores = np.array([[3, 2, 2, 2, 2, 2, 2, 1, 1]], float)
    drawn = (
        np.sort([rng.permutation(6)[:2] for _ in range(40_000)], axis=1).mean(axis=0)
        + 2
    )
    assert_near(ranks_of(scores, truth).values, drawn, 0.03)


def test_tied_true_targets_gain_no_more_than_the_best_order():
    ranks = ranks_of(np.ones((1, 2)), as_truth([[0, 1]], 1, 2))
    assert ranks.values.tolist() == [1, 2]
    assert ndcg(ranks, 2).tolist() == [1]
