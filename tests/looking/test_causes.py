"""Causes that are not hubness, each on data that has it and on the example set, which has hubness and nothing else."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubplugin.bank import Bank
from hubplugin.causes import (
    Finding,
    check_collapse,
    check_cut_off,
    check_model,
    check_shift,
    check_short_texts,
    distance_above,
    effective_dimensions,
    mean_cosine,
)
from hubplugin.compute import Compute, TopK, search
from hubplugin.jobs.diagnose import DEEP, Diagnosis, find_causes
from hubplugin.measures.hubness import Hubness
from hubplugin.metric import Metric
from tests.galleries import unit

QUERIES = 300


@pytest.fixture(scope="module")
def example(real):
    return unit(real["test_queries"][:QUERIES]), unit(real["test_targets"])


def projected(vectors, dimensions):
    """Onto as many random axes, in the space that they were in."""
    rng = np.random.default_rng(3)
    axes = np.linalg.qr(rng.normal(size=(vectors.shape[1], dimensions)))[0]
    return unit(vectors @ axes @ axes.T + 1e-4 * rng.normal(size=vectors.shape))


def rotated(vectors):
    """As another model of the same size would embed the same texts: nothing lies where it lay."""
    turn = np.linalg.qr(np.random.default_rng(5).normal(size=(vectors.shape[1],) * 2))[
        0
    ]
    return unit(vectors @ turn)


def near(vectors):
    """Copies that differ by a word: a hundredth of the usual squared distance away."""
    noise = (
        np.random.default_rng(1).normal(size=vectors.shape) / vectors.shape[1] ** 0.5
    )
    return unit(vectors + 0.08 * noise)


def axis(dimensions):
    return unit(np.random.default_rng(9).normal(size=(1, dimensions)))


def found(queries, targets, metric="cosine", clicks=None, texts=None):
    """The causes that are there, by name; and all findings."""
    banks = Bank(queries, clicks).prepare(metric, Compute("cpu")).against(targets)
    nearest = TopK(DEEP)
    search(banks.query_bank, banks.targets, Metric(metric), banks.compute, nearest)
    findings = find_causes(
        banks, nearest.rows[0], texts, lambda rows: rows.tolist(), seed=0
    )
    return {finding.cause for finding in findings if finding.found}, findings


def test_the_example_set_has_no_other_cause_than_hubness(example):
    assert found(*example)[0] == set()


@pytest.mark.parametrize("copied", [lambda x: x, near], ids=["exact", "near"])
def test_copies_are_seen_by_the_places_that_they_take(example, copied):
    queries, targets = example
    causes, told = found(queries, np.concatenate([targets, copied(targets[:400])]))
    assert causes == {"copies"}
    assert "keep one of each" in str(next(each for each in told if each.found))


@pytest.mark.parametrize("dimensions", [3, 12])
def test_a_collapsed_space_is_seen(example, dimensions):
    queries, targets = example
    assert (
        "collapsed space"
        in found(projected(queries, dimensions), projected(targets, dimensions))[0]
    )


def test_a_vector_common_to_all_is_no_collapse(example):
    common = 3 * axis(384)
    causes, told = found(*(unit(part + common) for part in example))
    assert causes == set()
    (finding,) = [each for each in told if each.cause == "collapsed space"]
    assert "thresholds on scores mean little" in finding.says


def test_queries_of_another_model_are_seen(example):
    queries, targets = example
    assert "another model" in found(rotated(queries), targets)[0]


def test_queries_in_another_language_whose_answers_are_not_there_are_no_other_model(
    example,
):
    queries, targets = example
    causes, _ = found(unit(queries + axis(384)), unit(targets[QUERIES:] - axis(384)))
    assert "another model" not in causes


def test_of_documents_that_lie_anywhere_nothing_tells_another_model():
    rng = np.random.default_rng(1)
    assert (
        found(unit(rng.normal(size=(200, 64))), unit(rng.normal(size=(900, 64))))[0]
        == set()
    )


def test_queries_that_all_lack_a_prefix_are_told_from_others(example):
    queries, targets = example
    shift = [
        each
        for each in found(unit(queries + axis(384)), targets)[1]
        if each.cause == "prefix or shift"
    ]
    assert shift[0].found is None
    assert "'query: '" in str(shift[0])
    assert check_shift(queries, targets).found is False


def test_vectors_that_win_by_their_length_are_seen(example):
    queries, targets = example
    long = targets * np.random.default_rng(2).lognormal(0, 1, len(targets))[:, None]
    assert "lengths" in found(queries, long, metric="dot")[0]
    assert "lengths" not in found(queries, targets, metric="dot")[0]
    assert "lengths" not in found(queries, long, metric="cosine")[0]


def test_short_texts_that_push_others_out_are_seen(example):
    queries, targets = example
    hub = unit(queries.mean(axis=0, keepdims=True))
    boilerplate = unit(hub + 0.03 * np.random.default_rng(4).normal(size=(30, 384)))
    gallery = np.concatenate([targets, boilerplate])

    def texts(ids):
        return ["See also." if key >= len(targets) else "x" * 300 for key in ids]

    assert "short texts" in found(queries, gallery, texts=texts)[0]
    assert (
        "short texts"
        not in found(queries, gallery, texts=lambda ids: ["x" * 300 for _ in ids])[0]
    )
    assert (
        "short texts"
        not in found(
            queries, targets, texts=lambda ids: ["x" * (1 + key % 300) for key in ids]
        )[0]
    )


def test_answers_just_behind_the_first_ten_are_seen(example):
    queries, targets = example
    chunks = unit(
        np.repeat(targets, 15, axis=0)
        + 0.02 * np.random.default_rng(6).normal(size=(15 * 1200, 384))
    )
    clicks = 15 * np.arange(QUERIES) + np.random.default_rng(7).integers(
        15, size=QUERIES
    )
    assert "k too small" in found(queries, chunks, clicks=clicks)[0]
    assert "k too small" not in found(queries, targets, clicks=np.arange(QUERIES))[0]


def test_what_cannot_be_told_says_what_is_needed():
    assert "pass texts=" in str(check_short_texts([], []))
    assert "--answers" in str(check_cut_off(None, 10, 50))
    assert check_collapse(np.eye(20)).found is None
    assert (
        check_model(
            np.eye(10),
            np.eye(10),
            Metric.COSINE,
            Compute("cpu"),
            np.random.default_rng(0),
        ).found
        is None
    )


@pytest.mark.parametrize(
    ("skewness", "causes", "says"),
    [
        (2.0, [], "there is hubness"),
        (
            2.0,
            ["copies"],
            "there is hubness, and there is more than that: copies; mend that first",
        ),
        (0.3, ["copies", "lengths"], "this is not hubness, but: copies, lengths"),
        (0.3, [], "there is no hubness, and no other cause was found"),
    ],
)
def test_the_verdict_says_when_the_trouble_is_not_hubness(skewness, causes, says):
    found = [Finding(cause, True, "seen") for cause in causes] + [
        Finding("short texts", False, "not seen")
    ]
    told = diagnosis_of(hubness=Hubness(10, skewness, 0, 0, 9, 0, 0), findings=found)
    assert told.verdict == says


def diagnosis_of(**fields):
    """A diagnosis of 1,000 targets and 1,000 queries, of which only `fields` are looked at."""
    filled = {
        field.name: fields.get(field.name) for field in dataclasses.fields(Diagnosis)
    }
    return Diagnosis(**{**filled, "targets": 1_000, "queries": 1_000})


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(2, 12), st.integers(1, 9))
def test_figures_of_causes_are_those_of_their_formulas(seed, rows, dim):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(rows, dim))
    expected = [
        min(
            (((vectors[i] - vectors[j]) ** 2).sum() / 2 for j in range(i)),
            default=np.inf,
        )
        for i in range(rows)
    ]
    np.testing.assert_allclose(distance_above(vectors), expected)
    centred = vectors - vectors.mean(axis=0)
    variances = np.linalg.eigvalsh(centred.T @ centred)
    np.testing.assert_allclose(
        effective_dimensions(vectors), variances.sum() ** 2 / (variances**2).sum()
    )
    cosines = np.corrcoef(
        np.hstack([vectors, -vectors])
    )  # of rows with mean 0, a correlation is a cosine
    np.testing.assert_allclose(
        mean_cosine(vectors), cosines[~np.eye(rows, dtype=bool)].mean(), atol=1e-12
    )
