"""The distance between sets of vectors and the coverage of a gallery, against POT and against hand counts."""

from __future__ import annotations

import numpy as np
import ot
import pytest

from hubplugin import Metric
from hubplugin.evaluation.banks import coverage, earth_movers_distance
from hubplugin.reductions import Compute, sampled
from hubplugin.vectors import as_vectors


def test_the_earth_movers_distance_is_that_of_pot(rng):
    first, second = rng.normal(size=(60, 5)), rng.normal(size=(60, 5)) + 1
    theirs = ot.emd2(ot.unif(60), ot.unif(60), ot.dist(first, second, metric="euclidean"))
    assert earth_movers_distance(first, second, 0) == pytest.approx(theirs)


def test_a_shifted_copy_lies_as_far_as_it_was_shifted(rng):
    vectors = rng.normal(size=(50, 4))
    assert earth_movers_distance(vectors, vectors + np.array([3, 0, 4, 0]), 0) == pytest.approx(5)


def test_sets_of_different_size_are_compared_on_equal_samples(rng):
    large, small = rng.normal(size=(3000, 3)), rng.normal(size=(40, 3)) + 10
    assert earth_movers_distance(large, small, 0) == pytest.approx(10 * 3**0.5, rel=0.1)


def test_a_sample_is_of_rows_that_are_there_each_at_most_once(rng):
    source = np.arange(40_000, dtype=np.float32)[:, None]
    drawn = sampled(as_vectors(source, "targets"), 500, Metric.DOT, np.random.default_rng(0))[:, 0]
    assert len(np.unique(drawn)) == 500
    assert (np.diff(drawn) > 0).all()


def test_coverage_is_the_share_of_targets_that_some_bank_row_finds_first():
    targets = np.eye(8)
    bank = np.array([[1, 0.1, 0, 0, 0, 0, 0, 0], [1, 0, 0.2, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0]], np.float32)
    assert coverage(bank, as_vectors(targets, "targets"), Metric.DOT, Compute("cpu")) == 2 / 8
