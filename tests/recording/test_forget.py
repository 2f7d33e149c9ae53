"""Who takes a query back finds it nowhere in the record, and after the next refit in no correction."""

import numpy as np
import pytest

import hubplugin
from hubplugin import Recorder
from hubplugin.recording import read
from tests.commands import asked as told
from tests.commands import complains
from tests.galleries import flat_index, unit
from tests.recording.recorders import recorded

N, D, CLICKS = 500, 16, 420


@pytest.fixture
def asked(rng, tmp_path):
    """The URL of an index, and queries that are recorded beside it with a click each."""
    targets = unit(rng.normal(size=(N, D)))
    answers = np.tile(rng.permutation(N)[: CLICKS // 3], 3)
    queries = unit(targets[answers] + 0.9 * rng.normal(size=(CLICKS, D)) / D**0.5)
    recorded(tmp_path / "photos.faiss.queries", queries, clicks=answers)
    return flat_index(tmp_path / "photos.faiss", targets), queries


def known(url, queries):
    """Return which of `queries` are in the bank of the active model."""
    bank = hubplugin.open_store(url).correction().model.terms[0].bank
    return ((unit(queries) @ bank.T).max(axis=1) > 1 - 1e-5).tolist()


def test_a_query_and_its_clicks_are_in_no_record_and_after_a_refit_in_no_correction(
    asked,
):
    index, queries = asked
    store = hubplugin.open_store(index)
    hubplugin.apply(store, hubplugin.Bank(), force=True)
    gone = [Recorder.id_of(query) for query in queries[:5]]
    recorder = Recorder(store.record)
    assert recorder.forget(gone) == 5
    left = read(store.record)
    assert left.rows == CLICKS - 5
    assert not set(gone) & set(left.ids)
    assert sum(map(len, left.clicks)) == CLICKS - 5
    # The docs say so: until the next refit.
    assert known(index, queries[:6]) == [True] * 6
    hubplugin.refit(hubplugin.open_store(index), force=True)
    assert known(index, queries[:6]) == [False] * 5 + [True]
    assert recorder.forget(gone) == 0


def test_a_query_is_forgotten_in_the_samples_of_all_collections_and_in_memory(
    folder, queries
):
    recorder = Recorder(folder, seconds=1000)
    recorder.within("photos").add(queries[:4])
    recorder.within("photos", "image").add(queries[:1])
    # Of what no thread has written yet.
    assert recorder.forget([Recorder.id_of(queries[0])]) == 2
    recorder.close()
    assert read(folder / "photos").rows == 3
    assert read(folder / "photos" / "image") is None
    restarted = Recorder(folder)
    assert restarted.forget(map(Recorder.id_of, queries)) == 3
    assert read(folder / "photos") is None


def test_what_was_forgotten_is_not_on_the_disk_and_a_recorder_that_runs_goes_on(
    folder, queries
):
    running = recorded(folder, queries[:20])
    running.click(queries[3], 7)
    running.flush()
    assert Recorder(folder).forget([Recorder.id_of(queries[3]), "0" * 16]) == 1
    assert queries[3].tobytes() not in (folder / "record.sqlite").read_bytes()
    running.add(queries[21])
    running.close()
    left = read(folder)
    assert Recorder.id_of(queries[3]) not in left.ids
    assert left.rows == 20
    assert not any(left.clicks)


def test_the_command_forgets_and_says_so(asked, tmp_path):
    url, queries = asked
    folder = tmp_path / "photos.faiss.queries"
    one, other = map(Recorder.id_of, queries[:2])
    said = told("bank", url, "--forget", one, "--forget", other)
    assert (said["forgotten"], said["queries"]) == (2, CLICKS - 2)
    assert read(folder).rows == CLICKS - 2
    wrong = Recorder(folder)
    for query in queries[2:5]:
        wrong.click(query, 999_999)  # which is no target of the store
    wrong.close()
    said = told("bank", url)
    assert (said["clicks"], said["unknown"]) == (CLICKS - 2, 3)
    assert said["pairs"] == CLICKS - 2
    complains("bank", url, "--forget", "today", said="16 hexadecimal digits")
