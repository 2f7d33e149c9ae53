"""What `diagnose` says: the forecast, who the hubs are."""

import numpy as np
import pytest

import hubplugin
from hubplugin import Bank
from hubplugin.measures.hubness import k_occurrence
from tests.galleries import unit

QUERIES = 300


@pytest.fixture(scope="module")
def example(real):
    return unit(real["test_queries"][:QUERIES]), unit(real["test_targets"][:600])


def test_without_answers_it_says_what_would_tell(example):
    diagnosis = hubplugin.diagnose(example[1], example[0])
    assert "--answers" in str(diagnosis)
    assert diagnosis.helps is None
    assert diagnosis.as_json()["lesson"] is None


def test_with_answers_it_says_what_was_measured_on_held_out_queries(example):
    bank = Bank(example[0], np.arange(QUERIES))
    diagnosis = hubplugin.diagnose(example[1], bank, learn=True)
    right, lesson = diagnosis.trial.right, diagnosis.lesson
    said = str(diagnosis)
    for note in lesson.notes:
        assert f"with learn: {note}" in said
    interval = f"{100 * right.change.low:+.1f} to {100 * right.change.high:+.1f}"
    for part in (100 * right.before, 100 * right.after):
        assert f"{part:.1f} %" in said
    assert interval in said
    assert diagnosis.helps == (right.change.low > 0)
    assert diagnosis.as_json()["lesson"]["other"]["after"] == lesson.other.after


def test_the_headline_says_what_the_default_would_do(real):
    """Skewness and R@1 may go apart: both are in the first line, and so is a refusal."""
    diagnosis = hubplugin.diagnose(
        real["test_targets"], Bank(real["bank_queries"], real["bank_targets"])
    )
    headline = str(diagnosis).splitlines()[0]
    assert "There is hubness" in headline
    assert diagnosis.trial.outlook() in headline


def test_hubs_are_those_of_the_matrix_with_their_own_names(example):
    queries, targets = example
    nearest = np.argsort(-(queries @ targets.T), axis=1)[:, :10]
    occurrence = k_occurrence(nearest, len(targets))
    zero = np.zeros((1, targets.shape[1]), np.float32)
    with_zero = np.concatenate([zero, targets])
    plain = hubplugin.diagnose(targets, queries)
    shifted = hubplugin.diagnose(with_zero, queries)
    assert [hub.found_by["raw"] for hub in plain.hubs] == [
        occurrence[hub.id] for hub in plain.hubs
    ]
    assert plain.hubness.largest == occurrence.max()
    assert [hub.id - 1 for hub in shifted.hubs] == [hub.id for hub in plain.hubs]
