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


def test_one_hub_that_takes_every_find():
    taken = hubness.Hubness.of(np.array([8, 0, 0, 0]), 1)
    assert taken.anti_hub_share == pytest.approx(3 / 4)
    assert taken.largest == 8


@pytest.mark.parametrize(
    ("queries", "k", "targets"),
    [(200, 10, 20_000), (1000, 10, 300), (5, 1, 2), (40, 10, 8)],
)
def test_skewness_by_chance_is_that_of_the_binomial_distribution(queries, k, targets):
    expected = (
        float(stats.binom(queries, min(k, targets) / targets).stats("s"))
        if k < targets
        else 0.0
    )
    assert hubness.skewness_by_chance(queries, k, targets) == pytest.approx(expected)
