"""`evaluate` as a user calls it: figures against the whole matrix in float64, and refusals."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

import hubplugin
from hubplugin import InputError
from hubplugin.model import QueryMap
from hubplugin.rerank import fit_rule
from tests.core.formulas import inverted_softmax, similarity

RULES = ["dis", "dualdis", "dsl", "gc"]


@pytest.fixture(scope="module")
def scene():
    """Pairs and a bank of others, all drawn towards one direction, some targets more than others."""
    rng = np.random.default_rng(11)
    pull = rng.normal(size=12)

    def pairs(rows):
        meaning = rng.normal(size=(rows, 12))
        hubness = rng.exponential(0.5, (rows, 1))
        return meaning + 0.5 * pull + 0.35 * rng.normal(
            size=(rows, 12)
        ), meaning + hubness * pull

    (queries, targets), (query_bank, target_bank) = pairs(150), pairs(400)
    return {
        "queries": queries,
        "targets": targets,
        "bank": hubplugin.Bank(query_bank, target_bank),
    }


@pytest.fixture(scope="module")
def evaluation(scene):
    return hubplugin.evaluate(
        **scene, methods=["is", "dbsn", "nnn k=5", *RULES, "otn", "l2n", "hn"], k=5
    )


def ranks_in(scores):
    own = np.diag(scores)[:, None]
    return 1 + (scores > own).sum(axis=1)


def skewness_in(scores, k):
    found = np.argsort(-scores, axis=1)[:, :k]
    return stats.skew(np.bincount(found.ravel(), minlength=scores.shape[1]))


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean"])
def test_raw_and_corrected_figures_are_those_of_the_whole_matrix(scene, metric):
    found = hubplugin.evaluate(**scene, methods=["is tau=0.5"], metric=metric)
    raw = similarity(scene["queries"], scene["targets"], metric)
    corrected = raw + inverted_softmax(
        scene["bank"].queries, scene["targets"], metric, 0.5
    )
    for result, scores in zip(found.methods, (raw, corrected), strict=True):
        ranks = ranks_in(scores)
        for k in (1, 5, 10):
            assert result.recall[k].value == pytest.approx((ranks <= k).mean())
        assert result.median_rank.value == np.median(ranks)
        assert result.mean_rank.value == pytest.approx(ranks.mean())
        assert result.mean_average_precision.value == pytest.approx(
            np.where(ranks <= 10, 1 / ranks, 0).mean()
        )
        assert result.hubness.skewness == pytest.approx(skewness_in(scores, 10))


def test_a_model_with_a_query_map_is_ranked_by_mapped_queries_beside_others(scene, rng):
    targets, queries = scene["targets"], scene["queries"]
    plain = hubplugin.fit(targets, scene["bank"], "is")
    step = (0.2 * rng.normal(size=(12, 12))).astype(np.float32)
    mapped = replace(plain, query_map=QueryMap(step, 1.0, 200)).centre_on(targets)
    found = hubplugin.evaluate(
        targets,
        queries=queries,
        methods=[],
        models={"mapped": mapped, "plain": plain},
        metric="cosine",
    )
    q = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    for label, asked, model in (
        ("raw", q, None),
        ("mapped", q + q @ step.astype(np.float64).T, mapped),
        ("plain", q, plain),
    ):
        scores = asked @ (targets / np.linalg.norm(targets, axis=1, keepdims=True)).T
        scores += 0 if model is None else model.offsets(targets)
        ranks = ranks_in(scores)
        assert found[label].recall[1].value == pytest.approx((ranks <= 1).mean())
        assert found[label].mean_rank.value == pytest.approx(ranks.mean())
        assert found[label].hubness.skewness == pytest.approx(skewness_in(scores, 10))
    assert found["mapped"].mean_rank.value != found["plain"].mean_rank.value


def test_every_kind_of_method_stands_in_the_result(evaluation):
    assert [m.label for m in evaluation.methods] == [
        "raw",
        "is",
        "dbsn",
        "nnn k=5",
        *RULES,
        "otn",
        "l2n",
        "hn",
    ]
    assert [m.label for m in evaluation.methods if not m.storable] == [
        *RULES,
        "otn",
        "l2n",
        "hn",
    ]
    assert evaluation["nnn k=5"].parameters == {"k": 5, "alpha": 0.5}


def test_a_query_dependent_rule_is_ranked_by_its_own_scores(scene, evaluation):
    rule = fit_rule(scene["targets"], scene["bank"], "dsl")
    scores = rule.rescore(
        similarity(scene["queries"], scene["targets"], "cosine"),
        rule.keep(scene["targets"]),
    )
    assert evaluation["dsl"].recall[1].value == pytest.approx(
        (ranks_in(scores) == 1).mean(), abs=0.007
    )
    assert evaluation["dsl"].hubness.skewness == pytest.approx(
        skewness_in(scores, 5), abs=0.02
    )


def test_the_zeros_of_a_sparse_plan_are_no_hits(evaluation):
    matched = evaluation["hn"].recall[1].value
    middle_of_the_rest = (150 + 1 + 2) / 2 - 0.5
    assert evaluation["hn"].recall[5].value == matched
    assert evaluation["hn"].mean_rank.value == pytest.approx(
        matched + (1 - matched) * middle_of_the_rest, abs=0.6
    )


def test_a_transductive_plan_is_never_recommended(evaluation):
    assert evaluation["otn"].recall[1].value > evaluation["is"].recall[1].value
    assert evaluation.best not in ("otn", "l2n", "hn")


def test_on_real_pairs_the_helpful_method_is_chosen_and_the_harmful_one_named(real):
    found = hubplugin.evaluate(
        real["test_targets"], hubplugin.Bank(real["bank_queries"], real["bank_targets"]), queries=real["test_queries"],
        methods=["is tau=0.02", "dbsn"],
    )  # fmt: skip
    told = " ".join(str(found).split())
    first = 100 * found["dbsn"].recall[1].value
    assert found["dbsn"].versus_raw.difference.low > 0
    assert (
        f"Best is dbsn, because it puts the most true targets first: {first:.1f}"
        in told
    )
    harmful = next(row for row in str(found).splitlines() if "is tau=0.02" in row)
    assert harmful.endswith("worse")


def test_nothing_is_chosen_where_nothing_helps(rng):
    vectors = np.eye(60) + 0.01 * rng.normal(size=(60, 60))
    found = hubplugin.evaluate(
        vectors, vectors[::-1], queries=vectors, methods=["is", "nnn"]
    )
    assert found.best is None
    assert "No correction; no usable" in str(found)


def test_any_two_methods_can_be_compared(evaluation):
    there, back = evaluation.compare("is", "dbsn"), evaluation.compare("dbsn", "is")
    assert (there.won, there.lost) == (back.lost, back.won)
    assert there.p == back.p


def test_the_same_seed_gives_the_same_result(scene):
    first, second = (
        hubplugin.evaluate(**scene, methods=["is"], seed=4) for _ in range(2)
    )
    assert first.as_json() == second.as_json()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k": 151}, "k=151 is not between 1 and the 150 targets"),
        ({"truth": [150] * 150}, "target 150, but there are 150"),
        (
            {"methods": ["magic"]},
            "unknown method 'magic': use one of blend, is, sn, .*gc.*hn",
        ),
        ({"methods": ["is tau=-1"]}, "tau='-1' is refused"),
        ({"methods": ["is tau"]}, "'tau' is no parameter; expected NAME=VALUE"),
        ({"methods": ["otn tau=1"]}, "takes no parameters"),
        ({"methods": ["is"], "bank": None}, "needs example queries"),
        ({"models": {"raw": None}}, "cannot be labelled 'raw'"),
        ({"seed": -1}, "seed=-1: expected 0 or more"),
        ({"names": ["a"]}, "names has 1 entries for 150 vectors"),
        ({"queries": np.ones((150, 3))}, "3 dimensions"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(scene, change, said):
    with pytest.raises(InputError, match=said) as refused:
        hubplugin.evaluate(**{**scene, "methods": ["is"], **change})
    assert "\n" not in str(refused.value)


def test_zero_vectors_among_targets_and_queries_are_left_out_and_counted(scene, caplog):
    targets = np.insert(scene["targets"], [3, 150], 0, axis=0)
    queries = np.insert(scene["queries"], 0, 0, axis=0)
    rows = np.delete(np.arange(152), [3, 151]).tolist()
    truth = [[3], *([row, 3] for row in rows)]
    given = {"bank": scene["bank"], "methods": ["is", "dis", "otn"]}
    found = hubplugin.evaluate(targets, queries=queries, truth=truth, **given)
    assert caplog.messages == [
        "queries: 1 zero vectors, which have no direction, are left out",
        "targets: 2 zero vectors, which have no direction, are left out",
    ]
    expected = hubplugin.evaluate(**scene | given)
    assert (found.queries, found.judged, found.targets) == (150, 150, 150)
    for one, other in zip(found.methods, expected.methods, strict=True):
        assert one.recall == other.recall
    assert [hub.id for hub in found.hubs] == [rows[hub.id] for hub in expected.hubs]


def test_a_ground_truth_of_zero_vectors_alone_is_refused_in_one_line(scene):
    targets = np.insert(scene["targets"], 3, 0, axis=0)
    with pytest.raises(
        InputError,
        match=r"every pair of the ground truth has a zero vector.*embed what it names anew",
    ):
        hubplugin.evaluate(targets, queries=scene["queries"], truth=[[3]] + [[]] * 149)
