"""Chroma and LanceDB, which keep a copy of each vector: what others do to the vectors is seen in the next search."""

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
    vectors = rng.normal(size=(6, DIM))[rng.integers(6, size=count)] + rng.normal(
        size=(count, DIM)
    )
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


class InChroma:
    """The collection `photos` as its user changes it, past hubplugin."""

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


def assert_exact(store, model, vectors, neutral, queries):
    """The ranking is that of the vectors of now, in float64, where the `neutral` ones have no offset."""
    ids, rows = list(vectors), np.stack(list(vectors.values()))
    offsets = np.where([key in neutral for key in ids], 0, model.offsets(rows)).astype(
        np.float64
    )
    scores = queries.astype(np.float64) @ rows.T.astype(np.float64) + offsets
    found = store.search(queries, 10)
    expected = np.sort(1 - scores, axis=1)[:, :10]
    np.testing.assert_allclose(found.scores, expected, atol=2e-5)
    at = {key: place for place, key in enumerate(ids)}
    named = [
        [1 - scores[row, at[key]] for key in line] for row, line in enumerate(found.ids)
    ]
    np.testing.assert_allclose(named, expected, atol=2e-5)


def change(user, vectors, ids, fresh, how):
    if how == "update":
        user.update(ids, fresh)
    else:
        user.delete(ids)
        user.add(ids, fresh)
    return {**vectors, **dict(zip(ids, fresh, strict=True))}


@pytest.mark.parametrize("how", ["update", "delete and add"])
@pytest.mark.parametrize("count", [1, 20, COUNT])
def test_a_vector_that_others_change_is_found_by_what_it_is_now(
    gallery, rng, how, count
):
    user, store, model, vectors = gallery
    ids, fresh = (
        list(vectors)[3 : 3 + count] if count < COUNT else list(vectors),
        unit(rng, count),
    )
    store.search(fresh[:1], 10)
    now = change(user, vectors, ids, fresh, how)
    assert_exact(
        store, model, now, set(ids), np.concatenate([fresh[:10], unit(rng, 10)])
    )
    report = hubplugin.inspect(store, queries=0)
    assert (report.count, report.missing, report.stale) == (COUNT, 0, count)
    hubplugin.refresh(user.store())
    assert_exact(store, model, now, set(), np.concatenate([fresh[:10], unit(rng, 10)]))
    report = hubplugin.inspect(store, queries=0)
    assert (report.missing, report.stale) == (0, 0)


def test_a_search_says_once_that_vectors_were_changed(gallery, rng, caplog):
    user, store, _, vectors = gallery
    fresh = unit(rng, 2)
    store.search(fresh, 10)
    assert not caplog.messages
    user.update(list(vectors)[:2], fresh)
    for _ in range(2):
        store.search(fresh, 10)
    assert len(caplog.messages) == 1
    assert "run hubplugin refresh" in caplog.messages[0]


def test_hubs_of_before_that_were_deleted_leave_full_lists(gallery, rng):
    user, store, model, vectors = gallery
    gone = set(store.search(unit(rng, 1), 60).ids[0])
    user.delete(sorted(gone))
    fresh = dict(zip(["a", "b", "c"], unit(rng, 3), strict=True))
    user.add(list(fresh), np.stack(list(fresh.values())))
    now = {
        **{key: vector for key, vector in vectors.items() if key not in gone},
        **fresh,
    }
    assert_exact(store, model, now, set(fresh), unit(rng, 20))
    hubplugin.refresh(store)
    assert_exact(store, model, now, set(), unit(rng, 20))


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
    assert_exact(store, model, vectors, set(), unit(rng, 10))
    user.delete(list(vectors))
    hubplugin.remove(user.store())
    assert user.store().correction() is None


def test_a_search_whose_correction_another_process_replaces_or_removes_answers(
    gallery, rng
):
    user, store, _, vectors = gallery
    queries, newer = (
        unit(rng, 10),
        hubplugin.fit(np.stack(list(vectors.values())), unit(rng, 80), "nnn"),
    )
    store.search(queries, 10)
    hubplugin.apply(user.store(), newer, force=True)
    assert_exact(store, newer, vectors, set(), queries)
    hubplugin.remove(user.store())
    assert store.search(queries, 10).ids == store.search(queries, 10, raw=True).ids


def test_a_search_under_way_while_the_correction_is_replaced_is_done_again(
    gallery, rng, monkeypatch
):
    user, store, _, vectors = gallery
    newer, near = (
        hubplugin.fit(np.stack(list(vectors.values())), unit(rng, 80), "nnn"),
        type(store).nearest,
    )
    left = [newer]

    def replace_and_search(self, *args):
        if left:
            hubplugin.apply(user.store(), left.pop(), force=True)
        return near(self, *args)

    monkeypatch.setattr(type(store), "nearest", replace_and_search)
    assert_exact(store, newer, vectors, set(), unit(rng, 5))


def test_inspect_names_where_the_copy_lies(gallery):
    user, store, _, _ = gallery
    name = "photos--hub-1" if isinstance(user, InChroma) else "photos__hubplugin_1"
    assert any(name in note for note in hubplugin.inspect(store, queries=0).notes)


def test_a_zero_vector_is_counted_and_keeps_the_offset_0(gallery, rng):
    user, _, _, vectors = gallery
    user.add(["none"], np.zeros((1, DIM), np.float32))
    done = hubplugin.apply(user.store(), unit(rng, 100), "is", force=True)
    assert done.model.gallery.count == COUNT
    for report in (
        done,
        hubplugin.refresh(user.store()),
        hubplugin.inspect(user.store()),
    ):
        assert (
            "1 with vectors that the model cannot judge, those of length 0 have the offset 0"
            in str(report)
        )
        assert report.invalid_vectors.named == {"none": "length 0"}
    offsets = {
        key: offset
        for batch in user.store().scan()
        for key, offset in zip(batch.ids, batch.offsets, strict=True)
    }
    assert offsets["none"] == 0
    assert_exact(
        user.store(),
        done.model,
        vectors | {"none": np.zeros(DIM, np.float32)},
        {"none"},
        unit(rng, 10),
    )


@pytest.mark.parametrize("gone", ["copy", "copy and model"])
def test_a_kill_before_the_copy_or_its_model_was_made_is_gone_on_with(
    gallery, rng, gone
):
    user, store, _, vectors = gallery
    newer = hubplugin.fit(np.stack(list(vectors.values())), unit(rng, 80), "nnn")
    user.store().begin(newer)
    fresh = user.store()
    fresh.drop(fresh.name_of(2))
    if (
        gone == "copy and model"
    ):  # as the manifest has it that names both before either is there
        manifest = fresh.read_manifest()
        fresh.write_manifest(manifest.give_up())
        fresh.drop(fresh.name_of(2, "model"))
    hubplugin.apply(user.store(), newer, force=True)
    assert_exact(store, newer, vectors, set(), unit(rng, 5))
    report = hubplugin.inspect(user.store(), queries=0)
    assert (report.missing, report.stale, report.previous.method) == (0, 0, "is")


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
