"""The adapter for Chroma passes the conformance suite: embedded and on a server, under each of Chroma's spaces."""

import chromadb
import pytest

from hubplugin import open_store
from hubplugin.metric import Metric
from hubplugin.testing import StoreConformance

pytestmark = pytest.mark.slow


class TestChroma(StoreConformance):
    space = "cosine"
    rows = 190  # all are candidates, and five more
    recall = 0.99

    @pytest.fixture(autouse=True)
    def client(self, tmp_path):
        self.place = f"chroma:{tmp_path}"
        self.chroma = chromadb.PersistentClient(tmp_path)

    def create(self, ids, vectors):
        configuration = {"hnsw": {"space": self.space, "ef_search": 300}}
        self.chroma.create_collection("photos", configuration=configuration).add(
            ids=ids, embeddings=vectors
        )
        return open_store(f"{self.place}/photos")

    def reopen(self, store):
        return open_store(store.url)

    def insert_plain(self, store, ids, vectors):
        self.chroma.get_collection("photos").add(ids=ids, embeddings=vectors)
        return store

    def ids(self):
        return [f"photo-{number}" for number in range(self.rows)]

    def fresh_ids(self):
        return [f"new-{number}" for number in range(5)]


class TestChromaByInnerProduct(TestChroma):
    space, metric = "ip", Metric.DOT


class TestChromaByDistance(TestChroma):
    space, metric = "l2", Metric.EUCLIDEAN


class TestChromaServer(TestChroma):
    @pytest.fixture(autouse=True)
    def client(self, server):
        self.place = f"chroma://{server}"
        self.chroma = chromadb.HttpClient(*server.split(":"))
        for collection in self.chroma.list_collections():
            self.chroma.delete_collection(collection.name)
