"""Intervals and the paired test against scipy and against simulated truth."""

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import confusion_matrix

from hubplugin.measures.hubness import skewness
from hubplugin.measures.significance import adjusted, compare, hubness_interval, interval


@pytest.mark.parametrize("statistic", [np.mean, np.median])
@pytest.mark.parametrize("count", [2, 7, 5000])
def test_the_interval_is_scipys_percentile_bootstrap(rng, count, statistic):
    values = rng.exponential(size=count)
    found = interval(values, 3, statistic)
    judge = stats.bootstrap(
        (values,), statistic, n_resamples=1000, batch=100, method="percentile", rng=np.random.default_rng(3)
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((judge.low, judge.high), rel=1e-2 if count == 5000 else 1e-12)


def test_p_of_several_tests_are_corrected_as_benjamini_and_hochberg_say(rng):
    p = np.append(rng.random(9) ** 3, [1.0, 0.0])
    assert adjusted(p) == pytest.approx(stats.false_discovery_control(p))
    assert adjusted([]) == []


def test_the_interval_of_skewness_holds_what_another_sample_of_queries_gives(rng):
    popularity = rng.dirichlet(np.full(200, 0.7))

    def found():
        return rng.choice(200, (400, 5), p=popularity)

    def of(rows):
        return skewness(np.bincount(rows.ravel(), minlength=200))

    typical = np.mean([of(found()) for _ in range(200)])
    held = 0
    for seed in range(60):
        figure = hubness_interval(found(), 200, skewness, seed, resamples=100)
        held += figure.low <= typical <= figure.high
    assert held / 60 > 0.85


def test_a_figure_without_spread_has_an_interval_of_no_width():
    found = interval(np.ones(10), 0)
    assert (found.value, found.low, found.high) == (1, 1, 1)


def test_the_paired_test_is_mcnemars(rng):
    first, second = rng.integers(1, 4, 300).astype(float), rng.integers(1, 3, 300).astype(float)
    found = compare(first, second, 0)
    (_, won), (lost, _) = confusion_matrix(first == 1, second == 1)
    assert (found.won, found.lost) == (won, lost)
    smaller = min(won, lost)
    assert found.p == pytest.approx(stats.binomtest(smaller, won + lost).pvalue)
    assert found.difference.value == pytest.approx((won - lost) / 300)


def test_a_method_against_itself_shows_nothing():
    ranks = np.array([1.0, 2.0, 1.0])
    found = compare(ranks, ranks, 0)
    assert (found.won, found.lost, found.p, found.difference.value) == (0, 0, 1.0, 0.0)
