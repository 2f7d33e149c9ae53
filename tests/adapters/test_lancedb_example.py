"""A third adapter, over somebody else's store and through its entry point, passes the conformance suite."""

from __future__ import annotations

import lancedb
import pyarrow as pa
import pytest

import hubplugin
from hubplugin.store import open_store
from hubplugin.testing import StoreConformance


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
