"""Who takes a query back finds it nowhere: not in what is recorded, not in a model, not in a version that is kept."""

from __future__ import annotations

from threading import Thread

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
from hubplugin.recording.sample import as_digest

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


@pytest.mark.parametrize("method", ["blend", "dn"])
def test_a_bank_that_is_not_recorded_is_never_thrown_away(index, log, rng, method):
    _, queries, _ = log
    store = hubplugin.open_store(index)
    both = np.concatenate([unit(rng.normal(size=(300, D))), queries[:50]])
    model = hubplugin.apply(store, both, method, force=True).model
    with pytest.raises(StoreError, match="fitted on queries that are not recorded; apply it anew"):
        hubplugin.forget(store, [Recorder.id_of(queries[0])])
    assert hubplugin.open_store(index).correction().model.fingerprint == model.fingerprint
    assert read(store.record).rows == CLICKS


@pytest.mark.parametrize("as_stored", [np.float16, np.float64])
def test_a_query_is_known_in_a_bank_that_was_rounded(index, log, as_stored):
    _, queries, _ = log
    hubplugin.apply(hubplugin.open_store(index), unit(queries.astype(as_stored).astype(np.float32)), force=True)
    assert hubplugin.forget(hubplugin.open_store(index), [Recorder.id_of(queries[0])]).refitted is not None
    assert known(hubplugin.open_store(index), queries[:2]) == [False, True]


def test_what_other_parts_hold_is_forgotten_too(tmp_path, index, log, rng):
    """Clicks of a query that was not kept, queries of other dimensions, and those that a thinner part hides."""
    store = hubplugin.open_store(index)
    longer = unit(rng.normal(size=(3, 2 * D)))
    first, second = Recorder(store.record), Recorder(store.record, size=1)
    first.add(longer)
    first.flush()
    second.add(unit(rng.normal(size=(9, D))))
    second.click("0" * 16, 4)
    second.close()
    first.close()
    gone = [Recorder.id_of(longer[0]), "0" * 16]
    assert hubplugin.forget(store, gone).queries == 2
    assert hubplugin.forget(store, gone).queries == 0


def test_where_no_correction_can_be_fitted_without_them_nothing_is_changed(index, log):
    _, queries, answers = log
    store = hubplugin.open_store(index)
    for part in store.record.glob("part-*"):
        part.unlink()
    recorded(store.record, queries[:12], answers[:12])
    hubplugin.apply(store, hubplugin.Bank(), force=True)
    with pytest.raises(StoreError, match=r"no correction can be fitted without these queries \(.*hubplugin remove"):
        hubplugin.forget(hubplugin.open_store(index), [Recorder.id_of(query) for query in queries[:6]])
    assert read(store.record).rows == 12


def test_a_run_that_was_cut_off_comes_first(index, log):
    _, queries, _ = log
    store = hubplugin.open_store(index)
    model = hubplugin.apply(store, hubplugin.Bank(), force=True, dry_run=True).model
    with store.begin(model) as writing:
        for batch in writing.scan():
            writing.write(batch, model.offsets(batch.vectors))
    assert not hubplugin.open_store(index).correction().active
    with pytest.raises(StoreError, match="a run that was cut off may know these queries"):
        hubplugin.forget(hubplugin.open_store(index), [Recorder.id_of(queries[0])])
    assert read(f"{index.partition(':')[2]}.queries").rows == CLICKS


def test_what_cannot_be_forgotten_is_refused_in_one_line(index, tmp_path):
    store = hubplugin.open_store(index)
    with pytest.raises(InputError, match="16 hexadecimal digits; got a text of 5 characters"):
        hubplugin.forget(store, ["today"])
    store.record = None
    with pytest.raises(InputError, match="nobody has said where its queries are recorded"):
        hubplugin.forget(store, ["0" * 16])
    part = tmp_path / "photos.faiss.queries" / "part-9.safetensors"
    part.write_bytes(b"cut")
    with pytest.raises(StoreError, match=r"part-9.safetensors is damaged .*; nothing was forgotten"):
        hubplugin.forget(hubplugin.open_store(index), ["0" * 16])


def test_a_recorder_that_runs_drops_what_was_forgotten_and_goes_on(tmp_path, rng):
    queries = unit(rng.normal(size=(20, D)))
    recorder = Recorder(tmp_path / "queries", seconds=1000)
    recorder.add(queries)
    recorder.click(queries[3], 7)
    recorder.flush()
    other = Recorder(tmp_path / "queries", seconds=1000)
    other.add(queries[3:4])  # not on disk yet, beside a part that is
    other.flush()
    other.add(unit(rng.normal(size=(1, D))))
    killed = tmp_path / "queries" / "part-0.safetensors.0a1b.tmp"
    killed.write_bytes(queries[3].tobytes())
    assert forget_recorded(tmp_path / "queries", [as_digest(Recorder.id_of(queries[3])), 0]) == 1
    assert not killed.exists()
    other.close()
    recorder.flush()
    recorder.add(unit(rng.normal(size=(1, D))))
    recorder.flush()
    left = read(tmp_path / "queries")
    assert Recorder.id_of(queries[3]) not in left.ids
    assert left.rows == 20, "19, and one that came later; what was not on disk is gone"
    assert not any(left.clicks)
    recorder.close()


def test_forgetting_twice_at_once_loses_neither(tmp_path, rng):
    queries = unit(rng.normal(size=(40, D)))
    recorder = Recorder(tmp_path / "queries", seconds=1000)
    recorder.add(queries)
    recorder.close()
    gone = [as_digest(Recorder.id_of(query)) for query in queries[:20]]
    threads = [Thread(target=forget_recorded, args=(tmp_path / "queries", [digest])) for digest in gone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(tmp_path / "queries").rows == 20


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
    assert "2 recorded queries forgotten, with their clicks; the correction knew them" in said.output
    assert not any(known(hubplugin.open_store(index), queries[:2]))
    said = CliRunner().invoke(app, ["bank", index, *named, "--thin", "3"])
    assert said.exit_code == 1
    for options in (["--dry-run"], []):
        said = CliRunner().invoke(app, ["bank", index, "--forget", "today", *options])
        assert "16 hexadecimal digits" in said.output
        assert said.exit_code == 1
