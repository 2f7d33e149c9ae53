"""A collection in local mode does what every store must: in memory and on disk, by each distance."""

import uuid

import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin.metric import Metric
from hubplugin.testing import StoreConformance

DISTANCES = {
    Metric.COSINE: models.Distance.COSINE,
    Metric.DOT: models.Distance.DOT,
    Metric.EUCLIDEAN: models.Distance.EUCLID,
}


def points(ids, vectors, using=""):
    rows = vectors.tolist()
    return [
        models.PointStruct(id=key, vector={using: row} if using else row)
        for key, row in zip(ids, rows, strict=True)
    ]


class TestUnnamedCosine(StoreConformance):
    using = ""
    storage: str = "payload"
    rows = 200
    recall = 0.97  # candidates are chosen for 0.99, and by other queries

    def create(self, ids, vectors):
        self.client = QdrantClient(":memory:")
        parameters = models.VectorParams(size=self.dim, distance=DISTANCES[self.metric])
        self.client.create_collection(
            "photos", {self.using: parameters} if self.using else parameters
        )
        self.client.upsert("photos", points(ids, vectors, self.using))
        return hubplugin_qdrant.open_store(
            self.client, "photos", vector=self.using, storage=self.storage
        )

    def reopen(self, store):
        return hubplugin_qdrant.open_store(
            self.client, "photos", vector=self.using, storage=self.storage
        )

    def insert_plain(self, store, ids, vectors):
        self.client.upsert("photos", points(ids, vectors, self.using))
        return self.reopen(store)


@pytest.mark.slow
class TestEuclideanWithUuids(TestUnnamedCosine):
    metric = Metric.EUCLIDEAN
    recall = 0.93  # by the six queries that tests calibrate with; by 32 it is 1

    def ids(self):
        return [str(uuid.UUID(int=number)) for number in range(self.rows)]

    def insert_plain(self, store, ids, vectors):
        pytest.skip("the suite's new ids are no UUIDs; the other classes cover it")


class TestSecondVector(TestUnnamedCosine):
    """storage="vector" ranks exactly, whatever the offsets."""

    using = "image"
    metric = Metric.DOT
    storage = "vector"
    recall = 1.0
