"""The sample of recorded queries: what is kept, and with what probability."""

import math
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hubplugin.recording.sample import ALL, MOST_TARGETS, Sample, digest_of, joined


def vector(number):
    return np.array([number, 1.0], np.float32).tobytes()


def sample_of(numbers, size):
    sample = Sample(size)
    for time, number in enumerate(numbers):
        sample.add(vector(number), float(time))
    return sample


NUMBERS = st.lists(st.integers(0, 60), max_size=120)


@settings(max_examples=60, deadline=None)
@given(NUMBERS, st.integers(1, 20))
def test_the_smallest_digests_of_all_different_queries_are_kept(numbers, size):
    sample = sample_of(numbers, size)
    assert sorted(sample.kept) == sorted({digest_of(vector(number)) for number in numbers})[:size]
    assert sample.seen == len(numbers)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NUMBERS, st.integers(1, 20)), min_size=1, max_size=4))
def test_parts_joined_hold_all_queries_up_to_the_limit_that_they_share(parts):
    samples = [sample_of(numbers, size) for numbers, size in parts]
    found = joined(samples)
    asked = {digest_of(vector(number)) for numbers, _ in parts for number in numbers}
    assert set(found.kept) == {digest for digest in asked if digest <= min(sample.limit for sample in samples)}
    assert len(found.kept) >= min(len(asked), *(size for _, size in parts)), "no fewer than the smallest would keep"
    assert found.seen == sum(len(numbers) for numbers, _ in parts)


@settings(max_examples=40, deadline=None)
@given(NUMBERS, NUMBERS, st.integers(1, 20), st.integers(1, 20))
def test_a_thinned_sample_goes_on_as_if_it_had_always_been_thin(before, after, size, thin):
    thinned = sample_of(before, size).thinned(min(size, thin))
    for number in after:
        thinned.add(vector(number), 0.0)
    assert thinned.kept.keys() == sample_of(before + after, min(size, thin)).kept.keys()


def test_all_are_kept_with_the_same_probability_however_often_they_are_asked():
    """k of n: each is kept with probability k/n, with the variance of draws without replacement."""
    n, k, runs = 40, 10, 800
    often = np.arange(n) % 7 + 1
    kept = np.zeros(n)
    for run in range(runs):
        first, second = Sample(k), Sample(k)  # two processes, of which each sees a part, with some in both
        for number in range(n):
            for _ in range(often[number]):
                (first if number % 3 else second).add(vector(run * n + number), 0.0)
            if number % 5 == 0:
                second.add(vector(run * n + number), 0.0)
        smallest = sorted(joined([first, second]).kept)[:k]
        numbers = {digest_of(vector(run * n + number)): number for number in range(n)}
        kept[[numbers[digest] for digest in smallest]] += 1
    p = k / n
    # The counts add up to runs * k, which takes one degree of freedom and (n - 1)/n of the variance of each.
    statistic = ((kept - runs * p) ** 2 / (runs * p * (1 - p)) * (n - 1) / n).sum()
    assert abs(statistic - (n - 1)) < 4 * math.sqrt(2 * (n - 1)), "chi-square with n - 1 degrees of freedom"


def test_the_number_of_different_queries_is_estimated_within_its_standard_error():
    n, k = 5_000, 200
    estimates = []
    for run in range(5):
        sample = Sample(k)
        for number in range(n):
            sample.add(np.array([run, number], np.int32).view(np.float32).tobytes(), 0.0)
        estimates.append(sample.different / n - 1)
    assert abs(np.mean(estimates)) < 4 / math.sqrt(5 * k), "the relative error of one is 1/sqrt(k)"
    assert sample_of([1, 2, 2], 10).different == 2


def test_a_query_that_is_no_direction_is_counted_and_not_kept():
    sample = Sample(10)
    for values in ([0, 0], [np.nan, 1], [np.inf, 1], [1, 2]):
        sample.add(np.array(values, np.float32).tobytes(), 1.0)
    assert (sample.seen, len(sample.kept), sample.limit) == (4, 1, ALL)


EVENTS = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 40), st.integers(0, 3)), max_size=150)
"""In which of three processes a query was asked, or else a target of it clicked."""


@settings(max_examples=80, deadline=None)
@given(EVENTS, st.integers(1, 20))
def test_clicks_stay_of_what_was_asked_and_of_the_smallest_digests(events, size):
    parts = [Sample(size) for _ in range(3)]
    given = [dict[int, Counter[int | str]]() for _ in range(3)]
    asked = [set[int]() for _ in range(3)]
    for process, asks, number, target in events:
        digest = digest_of(vector(number))
        if asks:
            parts[process].add(vector(number), 0.0)
            asked[process] |= {digest} - set(given[process])
        else:
            parts[process].click(digest, target)
            given[process].setdefault(digest, Counter())[target] += 1
    for part, each, before in zip(parts, given, asked, strict=True):
        found = part.copy().clicks
        wanted = [*sorted(each)[:size], *(before & set(each) & set(part.kept))]
        assert {digest: found[digest] for digest in wanted if digest <= part.limit} == {
            digest: each[digest] for digest in wanted if digest <= part.limit
        }
        assert max(map(len, (found, part.clicks)), default=0) <= 3 * size
        assert len(set(found) - set(part.kept)) <= size
    together = joined(part.copy() for part in parts)
    expected = dict[int, Counter[int | str]]()
    for part in parts:
        for digest, counts in part.copy().clicks.items():
            if digest <= together.limit:
                expected.setdefault(digest, Counter()).update(counts)
    assert together.clicks == expected


@settings(max_examples=60, deadline=None)
@given(NUMBERS, st.sets(st.integers(0, 60)), st.integers(1, 20))
def test_each_query_that_is_kept_has_its_clicks_and_no_other_has(numbers, clicked, size):
    """So the clicked ones among the kept are the clicked ones of the smallest digests: a uniform sample of them."""
    searching, told = sample_of(numbers, size), Sample(size)
    clicked &= set(numbers)
    for number in clicked:
        told.click(digest_of(vector(number)), number)
    found = joined([searching, told])
    kept = set(found.kept)
    assert kept & set(found.clicks) == kept & {digest_of(vector(number)) for number in clicked}


def test_a_query_with_many_targets_keeps_those_that_are_clicked_most():
    sample = Sample(10)
    digest = digest_of(vector(1))
    for number in range(100):
        for target in (number, "often", "often", -1 - number):
            sample.click(digest, target)
    counts = sample.clicks[digest]
    assert len(counts) == MOST_TARGETS
    assert counts["often"] == max(counts.values()) == 200
    assert sample.clicked == 400


def test_made_up_ids_of_queries_push_no_click_of_a_real_one_out():
    sample = sample_of(list(range(1000)), 1000)
    for digest in sample.kept:
        sample.click(digest, 7)
    for forged in range(1, 5001):
        sample.click(forged, 8)
    for found in (sample.copy(), joined([sample.copy()], 1000)):
        assert set(sample.kept) <= set(found.clicks)
        assert len(found.clicks) == 2000
