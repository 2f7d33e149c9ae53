"""An index in a file does what every store must, by each metric."""

import faiss
import pytest

from hubplugin import open_store
from hubplugin.metric import Metric
from hubplugin.testing import StoreConformance
from hubplugin_faiss.handlers import handler_for


class IndexFile(StoreConformance):
    kind = faiss.IndexFlatIP
    resumes = False

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.file = str(tmp_path / "photos.faiss")

    def create(self, ids, vectors):
        index = self.kind(self.dim)
        index.add(vectors)
        faiss.write_index(index, self.file)
        return self.reopen(None)

    def reopen(self, store):
        return open_store(f"faiss:{self.file}?metric={self.metric.value}")

    def insert_plain(self, store, ids, vectors):
        index = faiss.read_index(self.file)
        behind = handler_for(index).index
        behind.add(vectors)
        index.ntotal = behind.ntotal
        faiss.write_index(index, self.file)
        return self.reopen(store)


class TestInnerProduct(IndexFile):
    metric = Metric.DOT


class TestMapsByCosine(IndexFile):
    metric = Metric.COSINE


class TestSquaredDistance(TestInnerProduct):
    metric = Metric.EUCLIDEAN
    kind = faiss.IndexFlatL2
    # Queries and newcomers pass the same transform, so that what plain Faiss adds has the largest offset, not 0.
    test_a_target_without_an_offset_is_neither_lifted_nor_sunk = None


class TestGraph(TestInnerProduct):
    recall = 0.98

    def kind(self, dim):
        index = faiss.IndexHNSWFlat(dim, 32, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efSearch = 64  # enough for the kept links: a graph that was built anew stays after a removal
        return index
