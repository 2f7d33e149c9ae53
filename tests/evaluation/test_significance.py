"""Intervals and the paired test against scipy, against simulated truth, and against all parts of the queries."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import confusion_matrix

from hubplugin.measures.significance import Side, adjust, interval


@pytest.mark.parametrize("statistic", [np.mean, np.median])
@pytest.mark.parametrize("count", [2, 7, 5000])
def test_the_interval_is_scipys_percentile_bootstrap(rng, count, statistic):
    values = rng.exponential(size=count)
    found = interval(values, 3, statistic)
    judge = stats.bootstrap(
        (np.sort(values),),
        statistic,
        n_resamples=1000,
        batch=100,
        method="percentile",
        rng=np.random.default_rng(3),
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx(
        (judge.low, judge.high), rel=1e-2 if count == 5000 else 1e-12
    )


def test_p_of_several_tests_are_corrected_as_benjamini_and_hochberg_say(rng):
    p = np.append(rng.random(9) ** 3, [1.0, 0.0])
    assert adjust(p) == pytest.approx(stats.false_discovery_control(p))
    assert adjust([]) == []


def test_a_figure_without_spread_has_an_interval_of_no_width():
    found = interval(np.ones(10), 0)
    assert (found.value, found.low, found.high) == (1, 1, 1)


def test_the_paired_test_is_mcnemars(rng):
    first, second = (
        rng.integers(1, 4, 300).astype(float),
        rng.integers(1, 3, 300).astype(float),
    )
    found = Side.of(first <= 1, second <= 1)
    (_, won), (lost, _) = confusion_matrix(first == 1, second == 1)
    assert (found.won, found.lost) == (won, lost)
    smaller = min(won, lost)
    assert found.p == pytest.approx(stats.binomtest(smaller, won + lost).pvalue)
    assert found.change.value == pytest.approx((won - lost) / 300)


RIGHT = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)
"""Of each query, whether it was right before and after."""


@given(RIGHT, st.randoms(use_true_random=False))
def test_no_figure_depends_on_the_order_of_the_queries(right, random):
    other = random.sample(right, len(right))
    (before, after), (before_2, after_2) = (np.array(each).T for each in (right, other))
    one = Side.of(before, after)
    assert replace(Side.of(before_2, after_2), error=one.error) == one
    assert interval(after.astype(float), 0) == interval(after_2.astype(float), 0)


@pytest.mark.parametrize("lost", range(30))
@pytest.mark.parametrize("count", [60, 400])
def test_interval_and_p_agree_where_one_query_more_or_less_decides(count, lost):
    """From no query won on to a gain that no chance explains, one at a time."""
    for won in range(lost, 30):
        change = np.repeat([1, -1, 0], [won, lost, count - won - lost])
        found = Side.of(np.zeros(count), change)
        assert (found.change.low > 0) == (
            stats.binomtest(lost, max(won + lost, 1)).pvalue < 0.05
        ), (won, lost)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=10))
def test_the_interval_is_that_of_all_parts_of_the_queries(right):
    """The 2.5 % that lie farthest out of the mean changes of all 2^q parts; the empty part lies at either end."""
    before, after = np.array(right, np.float64).T
    change = after - before
    parts = np.array(list(product([0, 1], repeat=len(change))))[1:]
    means = parts @ change / parts.sum(axis=1)
    found = Side.of(before, after).change
    for end, means_so in ((found.low, means), (-found.high, -means)):
        ascending = np.sort(np.append(-1.0, means_so))
        assert end == pytest.approx(
            ascending[np.ceil(0.025 * len(ascending)).astype(int) - 1], abs=1e-5
        )
