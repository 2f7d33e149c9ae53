"""The sample of recorded queries: what is kept, and with what probability."""

import tempfile
import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hubplugin import Recorder
from hubplugin.recording import read
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
        found = read(folder)
        asked = [number for *_, numbers in turns for number in numbers]
        assert (found is None) is (not asked)
        if asked:
            assert (found.ids, found.seen) == (ids(asked)[:size], len(asked))


def test_a_query_that_is_asked_again_has_its_last_time_and_keeps_its_text(tmp_path):
    recorder = Recorder(tmp_path, texts=True)
    recorder.add([1.0, 2.0], "red shoes")
    recorder.flush()
    before = read(tmp_path)
    moment = time.time()
    for _ in range(2):
        recorder.add([1.0, 2.0])
    recorder.close()
    found = read(tmp_path)
    assert found.texts == before.texts == ["red shoes"]
    assert read(tmp_path, since=moment).rows == 1


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
        recorders = [recorded(folder, vectors([41]), 50) for _ in range(3)]
        asked = set(ids([41]))
        clicked: dict[str, dict[int, int]] = {}
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
        assert dict(zip(found.ids, found.clicks, strict=True)) == expected


def test_a_query_with_many_targets_keeps_the_most_clicked_and_of_these_the_latest(
    tmp_path,
):
    recorder = recorded(tmp_path, vectors([1]))
    (id,) = ids([1])
    for number in range(100):
        recorder.click(id, number)
        recorder.click(id, "often")
        recorder.flush()
    assert read(tmp_path).clicks == [{"often": 100} | dict.fromkeys(range(93, 100), 1)]


def test_made_up_ids_of_queries_push_no_click_of_a_real_one_out(tmp_path):
    recorder = recorded(tmp_path, vectors(range(1000)), 1000)
    made_up = [f"{forged:016x}" for forged in range(1, 5001)]
    for id in made_up:
        recorder.click(id, 8)
    for id in read(tmp_path).ids:
        recorder.click(id, 7)
    recorder.flush()
    assert read(tmp_path).clicks == [{7: 1}] * 1000
    assert recorder.forget(made_up) == 1000, "no more are held"


def test_what_is_not_in_the_sample_has_no_clicks_and_takes_none_away(tmp_path):
    recorder = recorded(tmp_path, vectors(range(40)), 5)
    for id in ids(range(40)):
        recorder.click(id, 7)
    recorder.flush()
    assert read(tmp_path).clicks == [{7: 1}] * 5
    assert recorder.forget(ids(range(40))) == 5
