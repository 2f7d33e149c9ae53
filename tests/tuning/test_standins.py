"""What becomes of targets that a log asked for, and of those that it did not."""

from __future__ import annotations

import numpy as np
import pytest

from hubplugin.methods import FitInput, configure
from hubplugin.metric import Metric
from hubplugin.reductions import Compute
from hubplugin.selection import judge
from hubplugin.selection.stand_ins import FOUND, both_sides


@pytest.fixture(scope="session")
def log(real):
    """300 queries, and a gallery of their answers and 300 targets more."""
    targets = np.concatenate([real["bank_targets"][:300], real["test_targets"][:300]])
    return FitInput.read(real["bank_queries"][:300], targets, None, Metric.COSINE, Compute())


def test_a_method_that_takes_answers_for_hubs_harms_what_was_asked_for_alone(log):
    sides = both_sides(log, log.targets.array(), configure("dbsn", tau=0.02))
    assert sides.before == pytest.approx(FOUND, abs=0.02)
    assert sides.asked < sides.before - 0.1
    assert sides.other > sides.before - 0.05
    assert sides.offset < -0.02


def test_the_default_harms_neither_side(log):
    sides = both_sides(log, log.targets.array(), configure("blend").resolved(log))
    assert sides.asked > sides.before - 0.02
    assert sides.other > sides.before - 0.02


@pytest.mark.parametrize("metric", ["dot", "euclidean"])
def test_the_sides_are_those_of_cosine_where_all_vectors_have_length_one(log, metric):
    gallery = log.targets.take(np.arange(600))
    unit = gallery / np.linalg.norm(gallery.astype(float), axis=1, keepdims=True)
    same = FitInput.read(log.query_bank, unit.astype(np.float32), None, Metric.parse(metric), Compute())
    here, there = (both_sides(given, given.targets.array(), configure("dbsn", tau=0.02)) for given in (log, same))
    assert (there.asked, there.other) == pytest.approx((here.asked, here.other), abs=0.03)


def test_small_banks_have_no_sides(log):
    few = FitInput.read(log.query_bank[:99], log.targets, None, Metric.COSINE, Compute())
    assert both_sides(few, few.targets.array(), configure("dbsn")) is None


def test_the_guard_reports_both_sides_of_a_log_and_of_nothing_else(real, log):
    seen = judge(log.query_bank, log.targets)
    assert seen.bank.kind == "log"
    assert "asked before: 90" in str(seen)
    clean = judge(log.query_bank, real["test_targets"][:300])
    assert clean.bank.kind == "clean"
    assert "asked before" not in str(clean)
