"""`evaluate` as a user calls it: figures against the whole matrix in float64."""

import numpy as np
import pytest
from scipy import stats

from hubplugin import Bank, InputError, evaluate, fit
from hubplugin.rerank import fit_rule
from tests.core.formulas import offsets, similarity
from tests.galleries import each_metric, normal, with_map
from tests.refusals import refused

RULES = ["dis", "dualdis", "dsl", "gc"]
PLANS = ["otn", "l2n", "hn"]


@pytest.fixture(scope="module")
def scene():
    """Pairs and a bank of others, some targets drawn towards one direction more."""
    rng = np.random.default_rng(11)
    pull = rng.normal(size=12)
    meaning = rng.normal(size=(550, 12))
    noise = 0.35 * rng.normal(size=(550, 12))
    queries = meaning + 0.5 * pull + noise
    targets = meaning + rng.exponential(0.5, (550, 1)) * pull
    bank = Bank(queries[150:], targets[150:])
    return {"queries": queries[:150], "targets": targets[:150], "bank": bank}


@pytest.fixture(scope="module")
def evaluation(scene):
    methods = ["is", "dbsn", "nnn k=5", *RULES, *PLANS]
    return evaluate(**scene, methods=methods, k=5)


def ranks_in(scores, true=None):
    """Return the rank of the first true target [q] by `scores` [q, n]."""
    true = np.arange(len(scores))[:, None] if true is None else true
    own = np.take_along_axis(scores, true, axis=1).max(axis=1)
    return 1 + (scores > own[:, None]).sum(axis=1)


def skewness_in(scores, k):
    found = np.argpartition(-scores, k, axis=1)[:, :k]
    return stats.skew(np.bincount(found.ravel(), minlength=scores.shape[1]))


def assert_figures(result, scores, true=None):
    """`result` has the figures of ranking by `scores` [q, n].

    Float32 may put two targets that are nearly equal the other way round.
    """
    ranks = ranks_in(scores, true)
    for k in (1, 5, 10):
        assert result.recall[k].value == pytest.approx((ranks <= k).mean())
    assert result.median_rank.value == np.median(ranks)
    assert result.mean_rank.value == pytest.approx(ranks.mean(), rel=1e-3)
    skewness = skewness_in(scores, 10)
    assert result.hubness.skewness == pytest.approx(skewness, rel=1e-2)


@each_metric
def test_raw_and_corrected_figures_are_those_of_the_whole_matrix(scene, metric, rng):
    """Of more targets than one block, and two true ones for each query."""
    bank = scene["bank"]
    queries = scene["queries"]
    targets = np.concatenate([scene["targets"], rng.normal(size=(17_000, 12))])
    true = np.stack([np.arange(150), rng.integers(0, 17_150, 150)], axis=1)
    given = {"queries": queries, "truth": true, "metric": metric}
    found = evaluate(targets, bank, **given, methods=["is tau=0.5"])
    raw = similarity(queries, targets, metric)
    assert_figures(found.raw, raw, true)
    corrected = offsets("is", bank.queries, targets, metric, tau=0.5)
    assert_figures(found["is tau=0.5"], raw + corrected, true)


def test_a_model_with_a_query_map_is_ranked_by_mapped_queries_beside_others(scene, rng):
    targets = scene["targets"]
    plain = fit(targets, scene["bank"], "is")
    step = 0.2 * normal(rng, 12, 12)
    mapped = with_map(plain, step).centre_on(targets)
    found = evaluate(
        targets,
        queries=scene["queries"],
        methods=[],
        models={"mapped": mapped, "plain": plain},
    )
    raw = similarity(scene["queries"], targets, "cosine")
    assert_figures(found.raw, raw)
    assert_figures(found["plain"], raw + plain.offsets(targets))
    turned = similarity(scene["queries"], targets, "cosine", mapped.query_map)
    assert_figures(found["mapped"], turned + mapped.offsets(targets))
    assert found["mapped"].mean_rank.value != found["plain"].mean_rank.value


def test_every_kind_of_method_stands_in_the_result(evaluation):
    labels = ["raw", "is", "dbsn", "nnn k=5", *RULES, *PLANS]
    assert [each.label for each in evaluation.methods] == labels
    assert evaluation["nnn k=5"].parameters == {"k": 5, "alpha": 0.5}


def test_a_query_dependent_rule_is_ranked_by_its_own_scores(scene, evaluation):
    rule = fit_rule(scene["targets"], scene["bank"], "dsl")
    raw = similarity(scene["queries"], scene["targets"], "cosine")
    scores = rule.rescore(raw, rule.keep(scene["targets"]))
    found = evaluation["dsl"]
    first = (ranks_in(scores) == 1).mean()
    assert found.recall[1].value == pytest.approx(first, abs=0.007)
    assert found.hubness.skewness == pytest.approx(skewness_in(scores, 5), abs=0.02)


def test_the_zeros_of_a_sparse_plan_are_no_hits(evaluation):
    found = evaluation["hn"]
    matched = found.recall[1].value
    middle_of_the_rest = (150 + 1 + 2) / 2 - 0.5
    assert found.recall[5].value == matched
    expected = matched + (1 - matched) * middle_of_the_rest
    assert found.mean_rank.value == pytest.approx(expected, abs=0.6)


def test_a_transductive_plan_is_never_recommended(evaluation):
    assert evaluation["otn"].recall[1].value > evaluation["is"].recall[1].value
    assert evaluation.best not in PLANS


def test_on_real_pairs_the_helpful_method_is_chosen_and_the_harmful_one_named(real):
    found = evaluate(
        real["test_targets"],
        Bank(real["bank_queries"], real["bank_targets"]),
        queries=real["test_queries"],
        methods=["is tau=0.02", "dbsn"],
    )
    first = 100 * found["dbsn"].recall[1].value
    headline = str(found).splitlines()[0]
    assert found.best == "dbsn"
    assert found["dbsn"].versus_raw.change.low > 0
    assert headline.startswith("Dbsn")
    assert f"to {first:.1f}%" in headline
    harmful = next(row for row in str(found).splitlines() if "is tau=0.02" in row)
    assert harmful.endswith("worse")


def test_nothing_is_chosen_where_nothing_helps(rng):
    vectors = np.eye(60) + 0.01 * rng.normal(size=(60, 60))
    given = {"queries": vectors, "methods": ["is", "nnn"]}
    found = evaluate(vectors, vectors[::-1], **given)
    assert found.best is None
    assert "neither helps nor harms" in str(found)


def test_the_same_seed_gives_the_same_result(scene):
    first = evaluate(**scene, methods=["is"], seed=4)
    second = evaluate(**scene, methods=["is"], seed=4)
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
        ({"methods": ["is tau"]}, "'tau' has no value; write NAME=VALUE"),
        ({"methods": ["otn tau=1"]}, "takes no parameters"),
        ({"methods": ["is"], "bank": None}, "needs example queries"),
        ({"models": {"raw": None}}, "cannot be labelled 'raw'"),
        ({"seed": -1}, "seed=-1: expected 0 or more"),
        ({"names": ["a"]}, "names has 1 entries for 150 vectors"),
        ({"queries": np.ones((150, 3))}, "3 dimensions"),
        ({"zero": 3}, "targets: row 3 is a zero vector, which has no cosine"),
        ({"queries": np.zeros((150, 12))}, "queries: row 0 is a zero vector"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(scene, change, said):
    given = {**scene, "methods": ["is"], **change}
    given["targets"] = given["targets"].copy()
    if "zero" in given:
        given["targets"][given.pop("zero")] = 0
    with refused(InputError, said):
        evaluate(**given)
