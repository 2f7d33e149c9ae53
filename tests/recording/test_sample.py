"""The sample of recorded queries: what is kept, and with what probability."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hubplugin.recording.sample import ALL, Sample, digest_of, joined


def vector(number: int) -> bytes:
    return np.array([number, 1.0], np.float32).tobytes()


def sample_of(numbers: list[int], size: int) -> Sample:
    sample = Sample(size)
    for time, number in enumerate(numbers):
        sample.add(vector(number), float(time))
    return sample


NUMBERS = st.lists(st.integers(0, 60), max_size=120)


@settings(max_examples=60, deadline=None)
@given(NUMBERS, st.integers(1, 20))
def test_the_smallest_digests_of_all_different_queries_are_kept(numbers: list[int], size: int) -> None:
    sample = sample_of(numbers, size)
    assert sorted(sample.kept) == sorted({digest_of(vector(number)) for number in numbers})[:size]
    assert sample.seen == len(numbers)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NUMBERS, st.integers(1, 20)), min_size=1, max_size=4))
def test_parts_joined_hold_all_queries_up_to_the_limit_that_they_share(parts: list[tuple[list[int], int]]) -> None:
    samples = [sample_of(numbers, size) for numbers, size in parts]
    found = joined(samples)
    asked = {digest_of(vector(number)) for numbers, _ in parts for number in numbers}
    assert set(found.kept) == {digest for digest in asked if digest <= min(sample.limit for sample in samples)}
    assert len(found.kept) >= min(len(asked), *(size for _, size in parts)), "no fewer than the smallest would keep"
    assert found.seen == sum(len(numbers) for numbers, _ in parts)


@settings(max_examples=40, deadline=None)
@given(NUMBERS, NUMBERS, st.integers(1, 20), st.integers(1, 20))
def test_a_thinned_sample_goes_on_as_if_it_had_always_been_thin(
    before: list[int], after: list[int], size: int, thin: int
) -> None:
    thinned = sample_of(before, size).thinned(min(size, thin))
    for number in after:
        thinned.add(vector(number), 0.0)
    assert thinned.kept.keys() == sample_of(before + after, min(size, thin)).kept.keys()


def test_all_are_kept_with_the_same_probability_however_often_they_are_asked() -> None:
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


def test_the_number_of_different_queries_is_estimated_within_its_standard_error() -> None:
    n, k = 5_000, 200
    estimates = []
    for run in range(5):
        sample = Sample(k)
        for number in range(n):
            sample.add(np.array([run, number], np.int32).view(np.float32).tobytes(), 0.0)
        estimates.append(sample.different / n - 1)
    assert abs(np.mean(estimates)) < 4 / math.sqrt(5 * k), "the relative error of one is 1/sqrt(k)"
    assert sample_of([1, 2, 2], 10).different == 2


def test_a_query_that_is_no_direction_is_counted_and_not_kept() -> None:
    sample = Sample(10)
    for values in ([0, 0], [np.nan, 1], [np.inf, 1], [1, 2]):
        sample.add(np.array(values, np.float32).tobytes(), 1.0)
    assert (sample.seen, len(sample.kept), sample.limit) == (4, 1, ALL)


def test_a_query_that_is_asked_again_has_its_last_time_and_keeps_its_text() -> None:
    sample = Sample(10)
    sample.add(vector(1), 1.0, "red shoes")
    sample.add(vector(1), 2.0)
    (asked,) = sample.kept.values()
    assert (asked.time, asked.text) == (2.0, "red shoes")
