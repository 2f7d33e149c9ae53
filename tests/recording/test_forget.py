"""Who takes a query back finds it nowhere in the record, and after the next refit in no correction."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from typer.testing import CliRunner

import hubplugin
from hubplugin import InputError, Recorder, StoreError
from hubplugin.cli import app
from hubplugin.recording import read
from tests.galleries import flat_index, unit

N, D, CLICKS = 500, 16, 420


@pytest.fixture
def log(rng):
    targets = unit(rng.normal(size=(N, D)))
    answers = np.tile(rng.permutation(N)[: CLICKS // 3], 3)
    words = 0.8 * rng.normal(size=(N, D)) / D**0.5
    return targets, unit(targets[answers] + words[answers] + 0.4 * rng.normal(size=(CLICKS, D)) / D**0.5), answers


@pytest.fixture
def index(log, tmp_path):
    targets, queries, answers = log
    recorder = Recorder(tmp_path / "photos.faiss.queries")
    recorder.add(queries)
    for query, answer in zip(queries, answers.tolist(), strict=True):
        recorder.click(query, answer)
    recorder.close()
    return flat_index(tmp_path / "photos.faiss", targets)


def known(url, queries):
    """Which of `queries` are in the bank of the active model."""
    bank = hubplugin.open_store(url).correction().model.terms[0].bank
    return [bool((np.abs(bank - query).max(axis=1) < 1e-4).any()) for query in unit(queries)]


def test_a_query_and_its_clicks_are_in_no_record_and_after_a_refit_in_no_correction(index, log):
    _, queries, _ = log
    store = hubplugin.open_store(index)
    hubplugin.apply(store, hubplugin.Bank(), force=True)
    gone = [Recorder.id_of(query) for query in queries[:5]]
    recorder = Recorder(store.record)
    assert recorder.forget(gone) == 5
    left = read(store.record)
    assert left.rows == CLICKS - 5
    assert not set(gone) & set(left.ids)
    assert sum(map(len, left.clicks)) == CLICKS - 5
    assert known(index, queries[:6]) == [True] * 6, "the docs say so: until the next refit"
    hubplugin.refit(hubplugin.open_store(index), force=True)
    assert known(index, queries[:6]) == [False] * 5 + [True]
    assert recorder.forget(gone) == 0


def test_clicks_alone_and_queries_of_other_dimensions_are_forgotten_too(tmp_path, rng):
    """Clicks of a query that was not kept, and queries of other dimensions."""
    longer = unit(rng.normal(size=(3, 2 * D)))
    first, second = Recorder(tmp_path / "queries"), Recorder(tmp_path / "queries")
    first.add(longer)
    first.flush()
    second.add(unit(rng.normal(size=(9, D))))
    second.click("0" * 16, 4)
    second.close()
    first.close()
    gone = [Recorder.id_of(longer[0]), "0" * 16]
    assert Recorder(tmp_path / "queries").forget(gone) == 2
    assert Recorder(tmp_path / "queries").forget(gone) == 0


def test_a_query_is_forgotten_in_the_samples_of_all_collections_and_in_memory(tmp_path, rng):
    queries = unit(rng.normal(size=(4, D)))
    recorder = Recorder(tmp_path / "queries", seconds=1000)
    recorder.within("photos").add(queries)
    recorder.within("photos", "image").add(queries[:1])
    assert recorder.forget([Recorder.id_of(queries[0])]) == 2, "of what no thread has written yet"
    recorder.close()
    assert read(tmp_path / "queries" / "photos").rows == 3
    assert read(tmp_path / "queries" / "photos" / "image") is None
    assert Recorder(tmp_path / "queries").forget([Recorder.id_of(query) for query in queries]) == 3, "after a restart"
    assert read(tmp_path / "queries" / "photos") is None


def test_what_cannot_be_forgotten_is_refused_in_one_line(tmp_path):
    with pytest.raises(InputError, match="16 hexadecimal digits; got a text of 5 characters"):
        Recorder(tmp_path / "queries").forget(["today"])
    (tmp_path / "queries").mkdir()
    (tmp_path / "queries" / "record.sqlite").write_bytes(b"cut")
    with pytest.raises(StoreError, match=r"record.sqlite is damaged .*; delete it: it is only a sample"):
        Recorder(tmp_path / "queries").forget(["0" * 16])


def test_a_recorder_that_runs_drops_what_was_forgotten_and_goes_on(tmp_path, rng):
    queries = unit(rng.normal(size=(20, D)))
    running = Recorder(tmp_path / "queries", seconds=1000)
    running.add(queries)
    running.click(queries[3], 7)
    running.flush()
    other = Recorder(tmp_path / "queries", seconds=1000)
    other.add(queries[3:4])
    other.flush()
    other.add(unit(rng.normal(size=(1, D))))
    assert Recorder(tmp_path / "queries").forget([Recorder.id_of(queries[3]), "0" * 16]) == 1
    assert queries[3].tobytes() not in (tmp_path / "queries" / "record.sqlite").read_bytes(), "nor is it on the disk"
    other.close()
    running.flush()
    running.add(unit(rng.normal(size=(1, D))))
    running.flush()
    left = read(tmp_path / "queries")
    assert Recorder.id_of(queries[3]) not in left.ids
    assert left.rows == 20, "19, and one that came later; what was not on disk is gone"
    assert not any(left.clicks)
    running.close()


def test_forgetting_twice_at_once_loses_neither(tmp_path, rng):
    queries = unit(rng.normal(size=(40, D)))
    recorder = Recorder(tmp_path / "queries", seconds=1000)
    recorder.add(queries)
    recorder.close()
    gone = [Recorder.id_of(query) for query in queries[:20]]
    with ThreadPoolExecutor(len(gone)) as pool:
        list(pool.map(lambda each: Recorder(tmp_path / "queries").forget([each]), gone))
    assert read(tmp_path / "queries").rows == 20


def test_the_command_forgets_and_says_so(index, log):
    _, queries, _ = log
    named = ["--forget", Recorder.id_of(queries[0]), "--forget", Recorder.id_of(queries[1])]
    said = CliRunner().invoke(app, ["bank", index, *named, "--dry-run"])
    assert f"would keep {CLICKS - 2}" in said.stdout
    assert read(f"{index.partition(':')[2]}.queries").rows == CLICKS
    said = CliRunner().invoke(app, ["bank", index, *named])
    assert said.exit_code == 0, said.output
    assert f"kept: {CLICKS - 2}" in said.stdout
    assert "2 recorded queries forgotten, with their clicks" in said.output
    said = CliRunner().invoke(app, ["bank", index, *named, "--thin", "3"])
    assert said.exit_code == 1
    for options in (["--dry-run"], []):
        said = CliRunner().invoke(app, ["bank", index, "--forget", "today", *options])
        assert "16 hexadecimal digits" in said.output
        assert said.exit_code == 1
