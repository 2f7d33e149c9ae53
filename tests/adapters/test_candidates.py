"""Chroma and LanceDB, where candidates are ranked again: what others do to the vectors."""

import chromadb
import lancedb
import numpy as np
import pyarrow as pa
import pytest

import hubplugin
from hubplugin_chroma import open_store

pytestmark = pytest.mark.slow

COUNT, DIM = 200, 16


def unit(rng, count):
    vectors = rng.normal(size=(6, DIM))[rng.integers(6, size=count)]
    vectors = vectors + rng.normal(size=(count, DIM))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


class InChroma:
    """The collection `photos` as its user changes it, past hubplugin."""

    sees_changes = False

    def __init__(self, folder):
        self.client = chromadb.PersistentClient(folder)
        configuration = {"hnsw": {"space": "cosine", "ef_search": COUNT}}
        self.photos = self.client.create_collection(
            "photos", configuration=configuration, embedding_function=None
        )

    def add(self, ids, vectors):
        self.photos.add(ids=ids, embeddings=vectors)

    def update(self, ids, vectors):
        self.photos.update(ids=ids, embeddings=vectors)

    def delete(self, ids):
        self.photos.delete(ids=ids)

    def store(self):
        return open_store(self.client, self.photos)


class InLanceDB:
    sees_changes = True

    def __init__(self, folder):
        self.folder, self.database = folder, lancedb.connect(folder)
        schema = pa.schema(
            [("id", pa.string()), ("vector", pa.list_(pa.float32(), DIM))]
        )
        self.photos = self.database.create_table("photos", schema=schema)

    def rows(self, ids, vectors):
        return pa.table(
            [pa.array(ids), pa.FixedSizeListArray.from_arrays(vectors.ravel(), DIM)],
            self.photos.schema,
        )

    def add(self, ids, vectors):
        self.photos.add(self.rows(ids, vectors))

    def update(self, ids, vectors):
        self.photos.merge_insert("id").when_matched_update_all().execute(
            self.rows(ids, vectors)
        )

    def delete(self, ids):
        doubled = [key.replace("'", "''") for key in ids]
        self.photos.delete(f"""id IN ('{"', '".join(doubled)}')""")

    def store(self):
        return hubplugin.open_store(f"lancedb:{self.folder}/photos")


@pytest.fixture(params=[InChroma, InLanceDB])
def gallery(request, tmp_path, rng):
    """The user, a store that was opened before it was corrected, its model, and vectors by id."""
    user, vectors = request.param(tmp_path), unit(rng, COUNT)
    ids = [f"it's {number}" for number in range(COUNT)]
    user.add(ids, vectors)
    store = user.store()
    model = hubplugin.fit(vectors, unit(rng, 100), "is")
    hubplugin.apply(user.store(), model, force=True)
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


@pytest.mark.parametrize("count", [1, COUNT])
def test_a_vector_that_others_change_is_found_by_what_it_is_now(gallery, rng, count):
    user, store, model, vectors = gallery
    ids, fresh = list(vectors)[:count], unit(rng, count)
    user.update(ids, fresh)
    now = {**vectors, **dict(zip(ids, fresh, strict=True))}
    offsets = offsets_of(model, vectors)
    if user.sees_changes:  # elsewhere a target keeps its offset until a refresh
        offsets = {key: offsets[key] for key in vectors if key not in ids}
    queries = np.concatenate([fresh[:10], unit(rng, 10)])
    assert_ranked(store, now, offsets, queries)
    report = hubplugin.inspect(store, queries=0)
    assert (report.count, report.missing, report.stale) == (COUNT, 0, count)
    hubplugin.refresh(user.store())
    assert_ranked(store, now, offsets_of(model, now), queries)
    report = hubplugin.inspect(store, queries=0)
    assert (report.missing, report.stale) == (0, 0)


def test_hubs_of_before_that_were_deleted_leave_full_lists(gallery, rng):
    user, store, model, vectors = gallery
    gone = set(store.search(unit(rng, 1), 60).ids[0])
    user.delete(sorted(gone))
    fresh = dict(zip(["a", "b", "c"], unit(rng, 3), strict=True))
    user.add(list(fresh), np.stack(list(fresh.values())))
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
    report = hubplugin.inspect(user.store())
    assert (report.count, report.missing, report.stale) == (0, 0, 0)
    assert hubplugin.refresh(user.store()).scanned == 0
    user.add(list(vectors), np.stack(list(vectors.values())))
    hubplugin.refresh(user.store())
    assert_ranked(store, vectors, offsets_of(model, vectors), unit(rng, 10))
    user.delete(list(vectors))
    hubplugin.remove(user.store())
    assert user.store().correction() is None


def test_a_search_whose_correction_another_process_replaces_or_removes_answers(
    gallery, rng, monkeypatch
):
    user, store, model, vectors = gallery
    queries, rows = unit(rng, 10), np.stack(list(vectors.values()))
    newer = hubplugin.fit(rows, unit(rng, 80), "nnn")
    fetch, left = type(store).fetch, [newer]

    def replace_and_fetch(self, *args):
        if left:
            hubplugin.apply(user.store(), left.pop(), force=True)
        return fetch(self, *args)

    monkeypatch.setattr(type(store), "fetch", replace_and_fetch)
    assert_ranked(store, vectors, offsets_of(model, vectors), queries)  # the old, whole
    assert_ranked(store, vectors, offsets_of(newer, vectors), queries)
    hubplugin.remove(user.store())
    assert store.search(queries, 10) == store.search(queries, 10, raw=True)


def test_queries_recorded_in_a_folder_behind_the_url_are_the_bank(
    gallery, rng, tmp_path
):
    user, store, _, _ = gallery
    folder = tmp_path / "queries"
    assert "?record=FOLDER behind the URL" in store.how_to_record
    place = f"chroma:{tmp_path}/photos" if isinstance(user, InChroma) else store.url
    recorder = hubplugin.Recorder(folder)
    recorder.add(unit(rng, 150))
    recorder.close()
    named = hubplugin.open_store(f"{place}?record={folder}")
    hubplugin.apply(named, hubplugin.Bank(), force=True)
    assert len(store.correction().model.terms[0].bank) == 150
