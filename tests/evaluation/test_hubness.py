"""Hubness statistics against scipy and against counts done by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from hubplugin.measures import hubness

occurrences = arrays(np.int64, st.integers(2, 60), elements=st.integers(0, 400)).filter(
    lambda n: n.max() > n.min()
)


@settings(deadline=None)
@given(occurrences)
def test_skewness_is_that_of_scipy(occurrence):
    expected = stats.skew(occurrence)
    assert hubness.skewness(occurrence) == pytest.approx(expected, abs=1e-9)


def test_evenly_found_targets_have_no_hubness_at_all():
    even = hubness.Hubness.of(np.full(7, 10), 10)
    assert even == hubness.Hubness(10, 0.0, 10, 0.0)


@pytest.mark.parametrize(
    ("queries", "k", "targets"),
    [(200, 10, 20_000), (1000, 10, 300), (5, 1, 2), (40, 10, 8)],
)
def test_skewness_by_chance_is_that_of_the_binomial_distribution(queries, k, targets):
    expected = 0.0
    if k < targets:
        expected = float(stats.binom(queries, k / targets).stats("s"))
    assert hubness.skewness_by_chance(queries, k, targets) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("queries", "k", "targets"), [(300, 10, 200), (50, 5, 1_000), (40, 10, 10)]
)
def test_what_is_found_by_chance_is_that_of_random_searches(queries, k, targets, rng):
    most, never, largest = [], [], []
    for _ in range(60):
        found = np.argsort(rng.random((queries, targets)), axis=1)[:, :k]
        occurrence = np.bincount(found.ravel(), minlength=targets)
        most.append(hubness.share_of_most_found(occurrence))
        never.append((occurrence == 0).mean())
        largest.append(occurrence.max())
    given = (queries, k, targets)
    share = hubness.share_of_most_found_by_chance(*given)
    assert share == pytest.approx(np.mean(most), rel=0.06)
    share = hubness.never_found_by_chance(*given)
    assert share == pytest.approx(np.mean(never), abs=0.01)
    limit = hubness.largest_by_chance(*given)
    assert (np.array(largest) > limit).mean() <= 0.1
    assert limit <= max(largest) + 1


def test_the_most_found_are_one_in_a_hundred_and_at_least_one():
    occurrence = np.array([0] * 150 + [1] * 48 + [10, 30])
    assert hubness.share_of_most_found(occurrence) == 40 / 88
    assert hubness.share_of_most_found(np.array([3, 1])) == 3 / 4
