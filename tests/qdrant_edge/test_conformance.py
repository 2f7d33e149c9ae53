"""A Qdrant Edge shard does what every store must: by each distance, named and unnamed, with a graph and without."""

from __future__ import annotations

import uuid

import pytest

edge = pytest.importorskip("qdrant_edge", reason="pip install '.[edge]' to test Qdrant Edge")

from hubplugin import Metric, open_store  # noqa: E402
from hubplugin.testing import StoreConformance  # noqa: E402
from hubplugin_qdrant.edge import EdgeStore  # noqa: E402

DISTANCES = {
    Metric.COSINE: edge.Distance.Cosine,
    Metric.DOT: edge.Distance.Dot,
    Metric.EUCLIDEAN: edge.Distance.Euclid,
}


def insert(shard, ids, vectors, using=""):
    rows = vectors.tolist()
    shard.update(
        edge.UpdateOperation.upsert_points(
            [edge.Point(key, {using: row} if using else row) for key, row in zip(ids, rows, strict=True)]
        )
    )


class TestUnnamedCosine(StoreConformance):
    recall = 0.95  # candidates are chosen for 0.99, and by other queries
    using = ""
    optimizers = None

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.path = tmp_path / "shard"
        self.path.mkdir()

    def create(self, ids, vectors):
        parameters = edge.EdgeVectorParams(self.dim, DISTANCES[self.metric])
        config = edge.EdgeConfig({self.using: parameters} if self.using else parameters, optimizers=self.optimizers)
        shard = edge.EdgeShard.create(str(self.path), config)
        insert(shard, ids, vectors, self.using)
        shard.optimize()
        return EdgeStore(shard, self.path, self.using)

    def reopen(self, store):
        store.shard.close()
        return open_store(f"qdrant-edge:{self.path}")

    def insert_plain(self, store, ids, vectors):
        insert(store.shard, ids, vectors, self.using)
        return self.reopen(store)


class TestNamedDot(TestUnnamedCosine):
    using = "image"
    metric = Metric.DOT


class TestEuclideanWithUuids(TestUnnamedCosine):
    metric = Metric.EUCLIDEAN

    def ids(self):
        return [str(uuid.UUID(int=number)) for number in range(self.rows)]

    def fresh_ids(self):
        return [str(uuid.UUID(int=self.rows + number)) for number in range(5)]
