"""Chroma and LanceDB, where candidates are ranked again: what others do to the vectors."""

import numpy as np
import pytest

import hubplugin
from hubplugin.metric import Metric
from tests.keepers import DIM, InChroma, InLanceDB
from tests.refusals import refused

pytestmark = pytest.mark.slow

COUNT = 300


def unit(rng, count):
    vectors = rng.normal(size=(6, DIM))[rng.integers(6, size=count)]
    vectors = vectors + rng.normal(size=(count, DIM))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(params=[InChroma, InLanceDB])
def gallery(request, tmp_path, rng):
    """The user, a store that was opened before it was corrected, its model, and vectors by id."""
    user, vectors = request.param(str(tmp_path), Metric.COSINE), unit(rng, COUNT)
    user.create()
    ids = [user.key(number) for number in range(COUNT)]
    user.put(ids, vectors)
    store = user.open()
    model = hubplugin.fit(vectors, unit(rng, 100), "is")
    hubplugin.apply(user.open(), model, force=True)
    return user, store, model, dict(zip(ids, vectors, strict=True))


def offsets_of(model, vectors):
    rows = np.stack(list(vectors.values()))
    return dict(zip(vectors, model.offsets(rows).astype(np.float64), strict=True))


def assert_ranked(store, vectors, offsets, queries):
    """The scores are those of `vectors` and `offsets` in float64 and the best of them, but
    for the candidates that were not asked for. Offsets that are not given are 0."""
    rows = np.stack(list(vectors.values())).astype(np.float64)
    all_offsets = np.array([offsets.get(key, 0.0) for key in vectors])
    distances = 1 - queries.astype(np.float64) @ rows.T - all_offsets
    place = {key: number for number, key in enumerate(vectors)}
    found = store.search(queries, 10)
    named = [
        [distances[query, place[key]] for key in line]
        for query, line in enumerate(found.ids)
    ]
    np.testing.assert_allclose(found.scores, named, atol=2e-5)
    largest = np.sort(distances, axis=1)[:, 9:10] + 2e-5
    assert (np.array(named) <= largest).mean() >= 0.97


def test_hubs_of_before_that_were_deleted_leave_full_lists(gallery, rng):
    user, store, model, vectors = gallery
    gone = set(store.search(unit(rng, 1), 60).ids[0])
    user.delete(sorted(gone))
    fresh = dict(zip(["a", "b", "c"], unit(rng, 3), strict=True))
    user.put(list(fresh), np.stack(list(fresh.values())))
    left = {key: vector for key, vector in vectors.items() if key not in gone}
    now = left | fresh
    assert_ranked(store, now, offsets_of(model, left), unit(rng, 20))
    hubplugin.refresh(store)
    assert_ranked(store, now, offsets_of(model, now), unit(rng, 20))


def test_a_store_whose_targets_were_all_deleted_is_inspected_searched_and_filled_anew(
    gallery, rng
):
    user, store, model, vectors = gallery
    user.delete(list(vectors))
    assert store.search(unit(rng, 2), 10).ids == [[], []]
    report = hubplugin.inspect(user.open())
    assert (report.count, report.missing, report.stale) == (0, 0, 0)
    assert hubplugin.refresh(user.open()).scanned == 0
    user.put(list(vectors), np.stack(list(vectors.values())))
    hubplugin.refresh(user.open())
    assert_ranked(store, vectors, offsets_of(model, vectors), unit(rng, 10))
    user.delete(list(vectors))
    hubplugin.remove(user.open())
    assert user.open().correction() is None


def test_a_search_whose_correction_another_process_replaces_or_removes_answers(
    gallery, rng, monkeypatch
):
    user, store, model, vectors = gallery
    queries, rows = unit(rng, 10), np.stack(list(vectors.values()))
    newer = hubplugin.fit(rows, unit(rng, 80), "nnn")
    fetch, left = type(store).fetch, [newer]

    def replace_and_fetch(self, *args):
        if left:
            hubplugin.apply(user.open(), left.pop(), force=True)
        return fetch(self, *args)

    monkeypatch.setattr(type(store), "fetch", replace_and_fetch)
    assert_ranked(store, vectors, offsets_of(model, vectors), queries)  # the old, whole
    assert_ranked(store, vectors, offsets_of(newer, vectors), queries)
    hubplugin.remove(user.open())
    assert store.search(queries, 10) == store.search(queries, 10, raw=True)


def test_queries_recorded_in_a_folder_behind_the_url_are_the_bank(
    gallery, rng, tmp_path
):
    _, store, _, _ = gallery
    folder = tmp_path / "queries"
    assert "?record=FOLDER behind the URL" in store.how_to_record
    recorder = hubplugin.Recorder(folder)
    recorder.add(unit(rng, 150))
    recorder.close()
    named = hubplugin.open_store(f"{store.url}?record={folder}")
    hubplugin.apply(named, hubplugin.Bank(), force=True)
    assert len(store.correction().model.terms[0].bank) == 150


def test_what_somebody_else_has_under_our_name_is_kept_and_told(tmp_path, rng):
    for kind, theirs in ((InChroma, "photos--hub"), (InLanceDB, "photos__hubplugin")):
        user = kind(str(tmp_path), Metric.COSINE)
        user.create()
        ids = [user.key(number) for number in range(40)]
        vectors = unit(rng, 40)
        user.put(ids, vectors)
        user.create(theirs)
        store = user.open()
        with refused(hubplugin.StoreError, f"{theirs} holds something of yours"):
            hubplugin.apply(store, vectors, "is", force=True)
        hubplugin.remove(store)
        assert [row[0] for row in store.search(vectors, 1).ids] == ids
        assert len(user.left()) == 1


def test_a_field_is_read_and_a_misspelt_one_lists_those_there_are(gallery, rng):
    user, store, _, vectors = gallery
    user.mark(list(vectors)[:2])
    values = [value for batch in store.scan("seen") for value in batch.values]
    assert sorted(values, key=str) == [1, 1, *[None] * (COUNT - 2)]
    with refused(hubplugin.HubpluginError, r"there are .*seen"):
        hubplugin.Bank.from_field(store, "sene", "module:embed")
