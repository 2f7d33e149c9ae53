"""The adapter for LanceDB, through its entry point, passes the conformance suite."""

import lancedb
import numpy as np
import pyarrow as pa
import pytest

import hubplugin
from hubplugin.jobs.correct import apply
from hubplugin.registry import open_store
from hubplugin.testing import StoreConformance

pytestmark = pytest.mark.slow


def table(ids, vectors):
    return pa.table({"id": ids, "vector": pa.FixedSizeListArray.from_arrays(vectors.ravel(), vectors.shape[1])})


class TestLanceStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.path = tmp_path

    def create(self, ids, vectors):
        lancedb.connect(self.path).create_table("photos", table(ids, vectors))
        return open_store(f"lancedb:{self.path}/photos")

    def reopen(self, store):
        return open_store(store.url)

    def insert_plain(self, store, ids, vectors):
        lancedb.connect(self.path).open_table("photos").add(table(ids, vectors))
        return open_store(store.url)


def test_a_table_that_is_not_there_is_named(tmp_path):
    with pytest.raises(hubplugin.StoreError, match=r"lancedb:.*/photos: there is no such table"):
        open_store(f"lancedb:{tmp_path}/photos")


def test_a_run_cut_off_is_finished_with_its_own_model_though_the_gallery_grew(tmp_path, rng):
    vectors = rng.normal(size=(60, 8)).astype("float32")
    lancedb.connect(tmp_path).create_table("photos", table(list(range(50)), vectors[:50]))
    store = open_store(f"lancedb:{tmp_path}/photos")
    asked = {"bank": vectors[:20] + 0.1, "method": "sn", "force": True}

    def cut_off(what, done, total):
        if what == "writing offsets":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apply(store, **asked, compute=hubplugin.Compute(progress=cut_off))
    begun = open_store(store.url).correction()
    assert not begun.active
    lancedb.connect(tmp_path).open_table("photos").add(table(list(range(50, 60)), vectors[50:]))

    applied = apply(open_store(store.url), **asked)
    assert applied.model.fingerprint == begun.model.fingerprint
    assert applied.scanned == 60
    another = apply(open_store(store.url), **{**asked, "tau": 0.1})
    assert another.model.parameters["tau"] == 0.1


def test_rows_without_a_vector_are_left_out(tmp_path, rng):
    vectors = rng.normal(size=(60, 8)).astype(np.float32)
    given = vectors.copy()
    given[[3, 7]] = np.nan
    lancedb.connect(tmp_path).create_table("photos", table(list(range(60)), given), on_bad_vectors="null")
    store = open_store(f"lancedb:{tmp_path}/photos")
    model = apply(store, rng.normal(size=(40, 8)).astype(np.float32), "is", force=True).model
    batches = list(store.scan())
    ids = [key for batch in batches for key in batch.ids]
    assert sorted(ids) == [each for each in range(60) if each not in (3, 7)]
    assert store.count() == model.gallery.count == 58
    np.testing.assert_array_equal(np.concatenate([batch.vectors for batch in batches]), vectors[ids])
    assert not {3, 7} & set(store.search(vectors[:1], 60).ids[0])


def test_a_column_of_somebody_else_is_never_dropped(tmp_path, rng):
    rows = table(list(range(9)), rng.normal(size=(9, 8)).astype(np.float32)).append_column("hubplugin_1", [range(9)])
    lancedb.connect(tmp_path).create_table("photos", rows)
    with pytest.raises(hubplugin.StoreError, match="the column hubplugin_1 holds something of yours"):
        open_store(f"lancedb:{tmp_path}/photos")


def test_what_an_earlier_version_kept_beside_the_active_column_is_refused_and_removed(tmp_path, rng):
    lancedb.connect(tmp_path).create_table("photos", table(list(range(50)), rng.normal(size=(50, 8)).astype("float32")))
    store = open_store(f"lancedb:{tmp_path}/photos")
    apply(store, rng.normal(size=(40, 8)).astype("float32"), "is", force=True)
    lancedb.connect(tmp_path).open_table("photos__hubplugin").update(values={"state": "kept"})
    with pytest.raises(
        hubplugin.StoreError, match=r"correction 1 is kept, as an earlier .*: run hubplugin remove, and"
    ):
        open_store(store.url).correction()
    open_store(store.url).remove()
    assert lancedb.connect(tmp_path).open_table("photos").schema.names == ["id", "vector"]
