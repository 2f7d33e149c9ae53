"""The adapter for LanceDB, through its entry point, passes the conformance suite."""

import re

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from lancedb.index import IvfPq

from hubplugin import (
    InputError,
    StoreError,
    apply,
    inspect,
    open_store,
    refit,
    refresh,
    remove,
)
from hubplugin.testing import StoreConformance
from tests.galleries import normal
from tests.refusals import refused

pytestmark = pytest.mark.slow


def table(ids, vectors):
    rows = pa.FixedSizeListArray.from_arrays(vectors.ravel(), vectors.shape[1])
    return pa.table({"id": ids, "vector": rows})


def create(folder, vectors, ids=None, **options):
    """The store of a table `photos` of `vectors` [n, d] under the ids 0, 1, ..."""
    rows = table(list(range(len(vectors))) if ids is None else ids, vectors)
    lancedb.connect(folder).create_table("photos", rows, **options)
    return open_store(f"lancedb:{folder}/photos")


def draw(rng, count=50):
    return normal(rng, count, 8)


def left_in(folder):
    return [path.name for path in folder.iterdir()]


class TestLanceStore(StoreConformance):
    rows = 190  # all are candidates, and five more

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.path = tmp_path

    def create(self, ids, vectors):
        return create(self.path, vectors, ids)

    def reopen(self, store):
        return open_store(store.url)

    def insert_plain(self, store, ids, vectors):
        lancedb.connect(self.path).open_table("photos").add(table(ids, vectors))
        return open_store(store.url)


def test_a_table_that_is_not_there_is_named(tmp_path):
    with refused(StoreError, r"lancedb:.*/photos: there is no such table"):
        open_store(f"lancedb:{tmp_path}/photos")


def test_rows_without_a_vector_are_left_out(tmp_path, rng):
    vectors = draw(rng, 60)
    with_gaps = vectors.copy()
    with_gaps[[3, 7]] = np.nan
    store = create(tmp_path, with_gaps, on_bad_vectors="null")
    model = apply(store, draw(rng, 40), "is", force=True).model
    batches = list(store.scan())
    ids = [key for batch in batches for key in batch.ids]
    assert sorted(ids) == [key for key in range(60) if key not in (3, 7)]
    assert store.count() == model.gallery.count == 58
    found = np.concatenate([batch.vectors for batch in batches])
    np.testing.assert_array_equal(found, vectors[ids])
    assert not {3, 7} & set(store.search(vectors[:1], 60).ids[0])


@pytest.fixture
def corrected(tmp_path, rng):
    """A store of 50 rows, and the folder in which it is corrected."""
    store = create(tmp_path, draw(rng))
    apply(store, draw(rng, 40), "is", force=True)
    return tmp_path, store


def test_only_two_models_are_kept_and_a_removal_leaves_the_folder_as_it_was(
    corrected, rng
):
    folder, store = corrected
    for seed in range(3):
        refit(store, draw(rng, 40 + seed), force=True)
    assert len(list(folder.glob("photos__hubplugin_*_model.lance"))) == 2
    store.remove()
    assert left_in(folder) == ["photos.lance"]
    assert len(lancedb.connect(folder).open_table("photos").list_versions()) == 1


@pytest.mark.parametrize(
    "left", ["_versions/latest_version_hint.json", "data/0101.lance"]
)
def test_what_a_kill_leaves_of_a_dropped_table_is_no_table(corrected, left):
    folder, store = corrected
    model = store.correction().model
    store.remove()
    path = folder / "photos__hubplugin.lance" / left
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert inspect(store).correction is None
    apply(store, model, force=True)
    assert inspect(store, queries=0).missing == 0
    store.remove()
    assert left_in(folder) == ["photos.lance"]


def test_a_table_with_the_default_index_ranks_no_worse_than_plain(tmp_path, real):
    bank, gallery, queries = (
        real[name].astype(np.float32)
        for name in ("bank_queries", "test_targets", "test_queries")
    )
    store = create(tmp_path, gallery)
    photos = lancedb.connect(tmp_path).open_table("photos")
    config = IvfPq(distance_type="cosine", num_partitions=1)
    photos.create_index("vector", config=config)
    version = photos.version
    apply(store, bank[:800], "nnn")

    def count_right(**options):
        ids = store.search(queries[:300], 1, **options).ids
        return sum(row[0] == number for number, row in enumerate(ids))

    assert count_right() > count_right(raw=True)
    photos.checkout_latest()
    assert photos.version == version
    assert photos.index_stats("vector_idx").num_unindexed_rows == 0


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        (pa.int64(), [-(2**63), *range(49)]),
        (pa.string(), [f"k{number}" for number in range(50)]),
    ],
)
def test_odd_ids_are_found_and_a_row_without_one_is_no_error(tmp_path, rng, kind, ids):
    vectors = draw(rng)
    store = create(tmp_path, vectors, pa.array(ids, kind))
    apply(store, draw(rng, 40), "is", force=True)
    assert [row[0] for row in store.search(vectors[:3], 1).ids] == ids[:3]
    photos = lancedb.connect(tmp_path).open_table("photos")
    photos.add(table(pa.array([None], kind), vectors[:1]))
    assert {None, ids[0]} <= set(store.search(vectors[:1], 3).ids[0])
    assert inspect(store).missing == 1
    with refused(StoreError, "ids are missing or repeated: None"):
        refresh(store)


@pytest.mark.parametrize("kind", [pa.float64(), pa.binary(), pa.timestamp("s")])
def test_ids_that_are_neither_numbers_nor_texts_are_refused_at_once(
    tmp_path, rng, kind
):
    ids = pa.array([str(number) for number in range(50)])
    if kind != pa.binary():
        ids = pa.array(range(50))
    with refused(StoreError, f"ids of the type {re.escape(str(kind))}; expected"):
        create(tmp_path, draw(rng), ids.cast(kind))


def test_a_filter_keeps_to_its_rows(corrected, rng):
    _, store = corrected
    found = store.with_filter("id >= 40").search(draw(rng, 3), 10)
    assert all(sorted(row) == [*range(40, 50)] for row in found.ids)
    with refused(InputError, "nowhere"):
        store.with_filter("nowhere = 1")


@pytest.mark.parametrize("dim", [8, 6])
def test_a_table_that_is_made_anew_is_searched_and_corrected(corrected, rng, dim):
    folder, store = corrected
    fresh = normal(rng, 60, dim)
    fresh /= np.linalg.norm(fresh, axis=1, keepdims=True)
    database = lancedb.connect(folder)
    database.create_table("photos", table(list(range(60)), fresh), mode="overwrite")
    anew = open_store(store.url)
    for each in (store, anew) if dim == 8 else (anew,):
        assert [row[0] for row in each.search(fresh[:5], 1).ids] == [0, 1, 2, 3, 4]
    assert (anew.correction() is None) == (dim == 6)
    apply(anew, fresh[:40], "is", force=True)
    report = inspect(anew, queries=0)
    assert (report.count, report.missing, report.stale) == (60, 0, 0)
    anew.remove()
    assert left_in(folder) == ["photos.lance"]


def test_a_table_that_is_restored_is_brought_up_to_date_by_a_refresh(corrected, rng):
    folder, store = corrected
    photos = lancedb.connect(folder).open_table("photos")
    photos.add(table([50], draw(rng, 1)))
    refresh(store)
    photos.restore(1)
    assert refresh(store).scanned == inspect(store, queries=0).count == 50


def test_rows_that_share_an_id_are_refused_before_anything_is_written(tmp_path, rng):
    vectors = draw(rng, 53)
    store = create(tmp_path, vectors, [1, 1, *range(10, 61)])
    with refused(
        StoreError, "ids are missing or repeated: 1; give each row its own id"
    ):
        apply(store, vectors[:40] + 0.1, "is", force=True)
    assert left_in(tmp_path) == ["photos.lance"]


def test_a_manifest_that_cannot_be_read_is_refused_in_one_line_and_never_written_over(
    corrected,
):
    folder, store = corrected
    model, database = store.correction().model, lancedb.connect(folder)
    manifest = store.read_manifest()
    version = manifest.active[""].replace(oversampling=1e308)
    for text in ("{", manifest.replace(active={"": version}).model_dump_json()):
        schema = pa.schema([("number", pa.int64())], {"hubplugin": text})
        database.create_table("photos__hubplugin", schema=schema, mode="overwrite")
        for job in (remove, inspect, lambda store: apply(store, model, force=True)):
            with refused(
                StoreError,
                r"table photos__hubplugin is damaged.*then run apply$",
            ):
                job(open_store(store.url))
        assert database.open_table("photos__hubplugin").schema == schema
