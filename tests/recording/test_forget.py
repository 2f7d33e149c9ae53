"""Who takes a query back finds it nowhere: not in what is recorded, not in a model, not in a version that is kept."""

from __future__ import annotations

import chromadb
import faiss
import numpy as np
import pytest
from typer.testing import CliRunner

import hubplugin
from hubplugin import InputError, Recorder, StoreError, learning
from hubplugin.abilities import versions_of
from hubplugin.cli import app
from hubplugin.recording import forget as forget_recorded
from hubplugin.recording import read

N, D, CLICKS = 500, 16, 420


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def log(rng):
    targets = unit(rng.normal(size=(N, D)))
    answers = np.tile(rng.permutation(N)[: CLICKS // 3], 3)
    words = 0.8 * rng.normal(size=(N, D)) / D**0.5
    return targets, unit(targets[answers] + words[answers] + 0.4 * rng.normal(size=(CLICKS, D)) / D**0.5), answers


def recorded(folder, queries, answers):
    recorder = Recorder(folder)
    recorder.add(queries)
    for query, answer in zip(queries, answers.tolist(), strict=True):
        recorder.click(query, answer)
    recorder.close()


@pytest.fixture
def index(log, tmp_path):
    targets, queries, answers = log
    made = faiss.IndexFlatIP(D)
    made.add(targets)
    faiss.write_index(made, str(tmp_path / "photos.faiss"))
    recorded(tmp_path / "photos.faiss.queries", queries, answers)
    return f"faiss:{tmp_path / 'photos.faiss'}"


def known(store, queries):
    """Which of `queries` are in the bank of the active model."""
    bank = store.correction().model.terms[0].bank
    return [bool((np.abs(bank - query).max(axis=1) < 1e-4).any()) for query in unit(queries)]


def test_a_query_is_in_no_record_no_correction_and_no_version_before(index, log):
    _, queries, _ = log
    store = hubplugin.open_store(index)
    hubplugin.apply(store, hubplugin.Bank(), force=True)
    hubplugin.apply(hubplugin.open_store(index), hubplugin.Bank(), "is", force=True)
    store = hubplugin.open_store(index)
    assert len(versions_of(store)) == 2
    assert known(store, queries[:6]) == [True] * 6
    gone = [Recorder.id_of(query) for query in queries[:5]]
    done = hubplugin.forget(store, gone)
    assert done.queries == 5
    store = hubplugin.open_store(index)
    assert known(store, queries[:6]) == [False] * 5 + [True]
    assert [version.state for version in versions_of(store)] == ["active"]
    assert store.correction().model.method == "is"
    left = read(store.record)
    assert left.rows == CLICKS - 5
    assert not set(gone) & set(left.ids)
    assert sum(map(len, left.clicks)) == CLICKS - 5
    again = hubplugin.forget(store, gone)
    assert (again.queries, again.refitted) == (0, None)


def test_what_its_clicks_have_folded_is_folded_anew(log, tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "chosen_fold", lambda *given: 4)
    targets, queries, answers = log
    photos = chromadb.PersistentClient(str(tmp_path / "db")).create_collection(
        "photos", configuration={"hnsw": {"space": "ip"}}
    )
    photos.add(ids=[str(row) for row in range(N)], embeddings=targets)
    store = hubplugin.open_store(f"chroma:{tmp_path / 'db'}/photos")
    store.record = tmp_path / "queries"
    recorded(store.record, queries, answers)
    hubplugin.apply(store, hubplugin.Bank(), learn="fold", force=True)
    folded = store.correction().model.fold
    alone = answers == answers[0]  # all who asked for this target
    row = int(folded.rows_of(targets[answers[:1]])[0])
    assert row >= 0
    assert np.abs(folded.shifts[row]).max() > 0
    done = hubplugin.forget(store, [Recorder.id_of(query) for query in queries[alone]])
    assert done.refitted is not None
    model = store.correction().model
    assert model.fold.rows_of(targets[answers[:1]]).tolist() == [-1]
    np.testing.assert_array_equal(model.targets(targets[answers[:1]]), targets[answers[:1]])
    assert (model.fold.rows_of(targets[np.unique(answers[~alone])]) >= 0).all()


def test_where_too_few_pairs_stay_the_correction_has_offsets_alone(index, log):
    _, queries, _ = log
    store = hubplugin.open_store(index)
    hubplugin.apply(store, hubplugin.Bank(), learn=True, force=True)
    assert store.correction().model.query_map is not None
    done = hubplugin.forget(store, [Recorder.id_of(query) for query in queries[:230]])
    assert any("190 different pairs" in note and "nothing was learned" in note for note in done.refitted.notes)
    assert hubplugin.open_store(index).correction().model.query_map is None
    assert not any(known(hubplugin.open_store(index), queries[:230]))


def test_a_correction_of_another_bank_stays_as_it_is(index, log, rng):
    _, queries, _ = log
    store = hubplugin.open_store(index)
    model = hubplugin.apply(store, unit(rng.normal(size=(300, D))), force=True).model
    done = hubplugin.forget(store, [Recorder.id_of(queries[0])])
    assert (done.queries, done.refitted) == (1, None)
    assert hubplugin.open_store(index).correction().model.fingerprint == model.fingerprint


def test_where_no_query_would_stay_nothing_is_changed(index, log):
    _, queries, _ = log
    store = hubplugin.open_store(index)
    hubplugin.apply(store, hubplugin.Bank(), force=True)
    with pytest.raises(StoreError, match=r"no query would stay .*hubplugin remove"):
        hubplugin.forget(store, [Recorder.id_of(query) for query in queries])
    assert read(store.record).rows == CLICKS


def test_a_run_that_was_cut_off_is_forgotten_with_its_queries(index, log):
    _, queries, _ = log
    store = hubplugin.open_store(index)
    model = hubplugin.apply(store, hubplugin.Bank(), force=True, dry_run=True).model
    with store.begin(model) as writing:
        for batch in writing.scan():
            writing.write(batch, model.offsets(batch.vectors))
    assert not hubplugin.open_store(index).correction().active
    assert hubplugin.forget(hubplugin.open_store(index), [Recorder.id_of(queries[0])]).queries == 1
    assert hubplugin.open_store(index).correction() is None


def test_what_cannot_be_forgotten_is_refused_in_one_line(index, tmp_path):
    store = hubplugin.open_store(index)
    with pytest.raises(InputError, match="16 hexadecimal digits; got a text of 5 characters"):
        hubplugin.forget(store, ["today"])
    (tmp_path / "photos.faiss.queries").rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="no queries are recorded that could be forgotten"):
        hubplugin.forget(store, ["0" * 16])


def test_a_recorder_that_runs_drops_what_was_forgotten_and_goes_on(tmp_path, rng):
    queries = unit(rng.normal(size=(20, D)))
    recorder = Recorder(tmp_path / "queries", seconds=1000)
    recorder.add(queries)
    recorder.click(queries[3], 7)
    recorder.flush()
    assert forget_recorded(tmp_path / "queries", [Recorder.id_of(queries[3]), "0" * 16]) == 1
    recorder.flush()
    recorder.add(unit(rng.normal(size=(1, D))))
    recorder.flush()
    left = read(tmp_path / "queries")
    assert left.rows == 20
    assert Recorder.id_of(queries[3]) not in left.ids
    assert not any(left.clicks)
    recorder.close()


def test_the_command_forgets_and_says_so(index, log):
    _, queries, _ = log
    hubplugin.apply(hubplugin.open_store(index), hubplugin.Bank(), force=True)
    named = ["--forget", Recorder.id_of(queries[0]), "--forget", Recorder.id_of(queries[1])]
    said = CliRunner().invoke(app, ["bank", index, *named, "--dry-run"])
    assert f"would keep {CLICKS - 2}" in said.stdout
    assert read(f"{index.partition(':')[2]}.queries").rows == CLICKS
    said = CliRunner().invoke(app, ["bank", index, *named])
    assert said.exit_code == 0, said.output
    assert f"kept: {CLICKS - 2}" in said.stdout
    assert "2 queries forgotten, with their clicks; the correction knew them" in said.output
    assert not any(known(hubplugin.open_store(index), queries[:2]))
    said = CliRunner().invoke(app, ["bank", index, *named, "--thin", "3"])
    assert said.exit_code == 1
