"""The sample of recorded queries: what is kept, and with what probability."""

import math
import tempfile

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hubplugin import Recorder
from hubplugin.recording import read, thin
from tests.recording.recorders import recorded


def vectors(numbers):
    numbers = np.asarray(numbers, np.float32)
    return np.stack([numbers, np.ones_like(numbers)], axis=1)


def ids(numbers):
    return sorted({Recorder.id_of(vector) for vector in vectors(numbers)})


NUMBERS = st.lists(st.integers(0, 60), max_size=120)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans(), NUMBERS), max_size=6),
    st.integers(1, 20),
)
def test_the_smallest_ids_of_all_different_queries_are_kept_whoever_was_asked(
    turns, size
):
    with tempfile.TemporaryDirectory() as folder:
        recorders = [Recorder(folder, size, seconds=1000) for _ in range(3)]
        for each, restarts, numbers in turns:
            if restarts:
                recorders[each] = Recorder(folder, size, seconds=1000)
            for vector in vectors(numbers):
                recorders[each].add(vector)
            recorders[each].flush()
        found, asked = (
            read(folder),
            [number for *_, numbers in turns for number in numbers],
        )
        kept = ([], 0) if found is None else (found.ids, found.seen)
        assert kept == (ids(asked)[:size] if asked else [], len(asked))


@settings(max_examples=30, deadline=None)
@given(NUMBERS, NUMBERS, st.integers(1, 20), st.integers(1, 20))
def test_a_thinned_sample_goes_on_as_if_it_had_always_been_thin(
    before, after, size, fewer
):
    with tempfile.TemporaryDirectory() as folder:
        recorder = recorded(folder, vectors(before), size)
        thin(folder, fewer)
        recorder.add(vectors(after))
        recorder.flush()
        found, least = read(folder), min(size, fewer)
        bound = ids(before)[least] if len(ids(before)) > least else "g"
        assert (found.ids if found else []) == [
            id for id in ids(before + after) if id < bound
        ][:size]


def test_all_are_kept_with_the_same_probability_however_often_they_are_asked(tmp_path):
    """k of n: each is kept with probability k/n, with the variance of draws without replacement. Nor is the estimate of
    n biased."""
    n, k, runs = 40, 10, 60
    often, kept, estimates = np.arange(n) % 7 + 1, np.zeros(n), []
    for run in range(runs):
        numbers = np.repeat(run * n + np.arange(n), often)
        folder = tmp_path / str(run)
        for part in (
            numbers % 3 > 0,
            (numbers % 3 == 0) | (numbers % 5 == 0),
        ):  # two processes, with some in both
            recorded(folder, vectors(numbers[part]), k)
        found = read(folder)
        kept[found.array()[:, 0].astype(int) - run * n] += 1
        estimates.append(found.different / n - 1)
    p = k / n
    # The counts add up to runs * k, which takes one degree of freedom and (n - 1)/n of the variance of each.
    statistic = ((kept - runs * p) ** 2 / (runs * p * (1 - p)) * (n - 1) / n).sum()
    assert abs(statistic - (n - 1)) < 4 * math.sqrt(2 * (n - 1)), (
        "chi-square with n - 1 degrees of freedom"
    )
    assert abs(np.mean(estimates)) < 4 / math.sqrt(runs * (k - 1)), (
        "the relative error of one is 1/sqrt(k - 1)"
    )


def test_a_query_that_is_asked_again_has_its_last_time_and_keeps_its_text(tmp_path):
    recorder = Recorder(tmp_path, texts=True)
    recorder.add([1.0, 2.0], "red shoes")
    recorder.flush()
    before = read(tmp_path)
    for _ in range(2):
        recorder.add([1.0, 2.0])
    recorder.close()
    found = read(tmp_path)
    assert found.texts == before.texts == ["red shoes"]
    assert found.times[0] > before.times[0]


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 40), st.integers(0, 3)),
    max_size=100,
)
"""In which of three processes a query was asked, or else a target of it clicked."""


@settings(max_examples=25, deadline=None)
@given(EVENTS)
def test_each_query_that_is_kept_has_its_clicks_whoever_heard_of_them_and_when(events):
    """So the clicked ones among the kept are the clicked ones of the smallest ids: a uniform sample of them."""
    with tempfile.TemporaryDirectory() as folder:
        recorders, asked, clicked = (
            [Recorder(folder, 50) for _ in range(3)],
            set(),
            dict[str, dict[int, int]](),
        )
        for process, asks, number, target in events:
            (vector,) = vectors([number])
            id = Recorder.id_of(vector)
            if asks:
                recorders[process].add(vector)
                asked.add(id)
            else:
                recorders[process].click(vector, target)
                counts = clicked.setdefault(id, {})
                counts[target] = counts.get(target, 0) + 1
            if target < 2:
                recorders[process].flush()
            if target == 0:
                recorders[process] = Recorder(folder, 50)
        for each in recorders:
            each.close()
        found = read(folder)
        expected = {id: clicked.get(id, {}) for id in sorted(asked)}
        assert (
            {} if found is None else dict(zip(found.ids, found.clicks, strict=True))
        ) == expected


def test_a_query_with_many_targets_keeps_those_that_are_clicked_most_and_the_last(
    tmp_path,
):
    recorder = Recorder(tmp_path)
    recorder.add([1.0, 2.0])
    for number in range(100):
        for target in (number, "often", "often", "often"):
            recorder.click([1.0, 2.0], target)
        if number % 10 == 0:
            recorder.flush()
    recorder.flush()
    (counts,) = read(tmp_path).clicks
    assert len(counts) == 8
    assert counts["often"] == 300
    for _ in range(9):
        recorder.click([1.0, 2.0], "new")
        recorder.flush()
    (counts,) = read(tmp_path).clicks
    assert counts["new"] == 9, "a new target comes to its place"


def test_made_up_ids_of_queries_push_no_click_of_a_real_one_out(tmp_path):
    recorder = recorded(tmp_path, vectors(range(1000)), 1000)
    for forged in range(1, 5001):
        recorder.click(f"{forged:016x}", 8)
    for id in read(tmp_path).ids:
        recorder.click(id, 7)
    recorder.flush()
    assert read(tmp_path).clicks == [{7: 1}] * 1000
    assert (
        Recorder(tmp_path).forget([f"{forged:016x}" for forged in range(1, 5001)])
        == 1000
    ), "no more are held"


def test_what_is_not_in_the_sample_has_no_clicks_and_takes_none_away(tmp_path):
    recorder = recorded(tmp_path, vectors(range(40)), 5)
    for id in ids(range(40)):
        recorder.click(id, 7)
    recorder.flush()
    thin(tmp_path, 2)
    found = read(tmp_path)
    assert (found.ids, found.clicks) == (ids(range(40))[:2], [{7: 1}] * 2)
    assert recorder.forget(ids(range(40))) == 2
