"""Causes that are not hubness, each on data that has it and on the example set, which has hubness and nothing else."""

import dataclasses

import numpy as np
import pytest

from hubplugin import Bank, Compute
from hubplugin.causes import Finding, check_model, check_shift, distance_to_earlier
from hubplugin.compute import TopK, search
from hubplugin.jobs.diagnose import Chance, Diagnosis, find_causes
from hubplugin.measures.hubness import Hubness
from hubplugin.metric import Metric
from tests.galleries import unit

QUERIES = 300


@pytest.fixture(scope="module")
def example(real):
    return unit(real["test_queries"][:QUERIES]), unit(real["test_targets"])


def rotated(vectors):
    """As another model of the same size would embed the same texts: nothing lies where it lay."""
    square = np.random.default_rng(5).normal(size=(vectors.shape[1],) * 2)
    return unit(vectors @ np.linalg.qr(square)[0])


def near(vectors):
    """Copies that differ by a word: a hundredth of the usual squared distance away."""
    noise = np.random.default_rng(1).normal(size=vectors.shape)
    return unit(vectors + 0.08 * noise / vectors.shape[1] ** 0.5)


def axis(dimensions):
    return unit(np.random.default_rng(9).normal(size=(1, dimensions)))


def findings(queries, targets, metric="cosine"):
    bank = Bank(queries).prepare(metric, Compute("cpu")).against(targets)
    nearest = TopK(10)
    search(bank.query_bank, bank.targets, Metric(metric), bank.compute, nearest)
    return {each.cause: each for each in find_causes(bank, nearest.rows[0], seed=0)}


def found(queries, targets, metric="cosine"):
    seen = findings(queries, targets, metric)
    return {cause for cause, finding in seen.items() if finding.found}


def test_the_example_set_has_no_other_cause_than_hubness(example):
    assert found(*example) == set()


@pytest.mark.parametrize("copied", [lambda x: x, near], ids=["exact", "near"])
def test_copies_are_seen_by_the_places_that_they_take(example, copied):
    queries, targets = example
    gallery = np.concatenate([targets, copied(targets[:400])])
    assert found(queries, gallery) == {"copies"}


def test_near_neighbours_in_few_dimensions_are_no_copies_but_equal_ones_are():
    rng = np.random.default_rng(0)
    for dimensions in (2, 4, 12):
        vectors = unit(rng.normal(size=(400, dimensions)))
        assert "copies" not in found(vectors[:100], vectors[100:])
        twice = np.concatenate([vectors[100:], vectors[100:]])
        assert "copies" in found(vectors[:100], twice)


def test_queries_of_another_model_are_seen(example):
    queries, targets = example
    assert "another model" in found(rotated(queries), targets)


def test_queries_in_another_language_whose_answers_are_not_there_are_no_other_model(
    example,
):
    queries, targets = example
    moved = unit(queries + axis(384)), unit(targets[QUERIES:] - axis(384))
    assert "another model" not in found(*moved)


def test_of_documents_that_lie_anywhere_nothing_tells_another_model():
    rng = np.random.default_rng(1)
    vectors = unit(rng.normal(size=(1100, 64)))
    assert found(vectors[:200], vectors[200:]) == set()


def test_queries_that_all_lack_a_prefix_are_told_from_others(example):
    queries, targets = example
    shift = findings(unit(queries + axis(384)), targets)["prefix or shift"]
    assert shift.found is None
    assert "'query: '" in shift.advice
    assert check_shift(queries, targets).found is False


def test_vectors_that_win_by_their_length_are_seen(example):
    queries, targets = example
    long = targets * np.random.default_rng(2).lognormal(0, 1, len(targets))[:, None]
    assert "lengths" in found(queries, long, metric="dot")
    assert "lengths" not in found(queries, targets, metric="dot")
    assert "lengths" not in found(queries, long, metric="cosine")


def test_of_few_vectors_no_other_model_can_be_told():
    few = np.eye(10)
    rng = np.random.default_rng(0)
    assert check_model(few, few, Metric.COSINE, Compute("cpu"), rng).found is None


@pytest.mark.parametrize(
    ("skewness", "causes", "says"),
    [
        (2.0, [], ["there is hubness"]),
        (2.0, ["copies"], ["there is hubness", "copies", "first"]),
        (0.3, ["copies", "lengths"], ["not hubness", "copies, lengths"]),
        (0.3, [], ["no hubness", "no other cause"]),
    ],
)
def test_the_verdict_says_when_the_trouble_is_not_hubness(skewness, causes, says):
    seen = [Finding(cause, True, "seen") for cause in causes]
    seen.append(Finding("prefix or shift", False, "not seen"))
    fields = dict.fromkeys(field.name for field in dataclasses.fields(Diagnosis))
    fields["hubness"] = Hubness(10, skewness, 9, 0)
    fields["chance"] = Chance(0.3, 0.02, 0.0)
    told = Diagnosis(**{**fields, "targets": 1_000, "queries": 1_000, "findings": seen})
    assert all(part in told.verdict for part in says)


def test_the_distance_to_what_stands_above_is_that_of_its_formula(rng):
    for rows, dim in ((2, 1), (7, 3), (12, 9)):
        vectors = rng.normal(size=(rows, dim))
        expected = [np.inf]
        for row in range(1, rows):
            squares = ((vectors[row] - vectors[:row]) ** 2).sum(axis=1)
            expected.append(squares.min() / 2)
        np.testing.assert_allclose(distance_to_earlier(vectors), expected)
