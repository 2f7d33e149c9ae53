"""A collection in local mode does what every store must: in memory and on disk, by each
distance."""

import uuid

import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin.metric import Metric
from hubplugin.testing import StoreConformance
from tests.qdrant.conftest import COSINE, DOT, EUCLID, named

DISTANCES = {Metric.COSINE: COSINE, Metric.DOT: DOT, Metric.EUCLIDEAN: EUCLID}


class TestUnnamedCosine(StoreConformance):
    using = ""
    storage: str = "payload"
    rows = 200
    recall = 0.97  # candidates are chosen for 0.99, and by other queries

    def create(self, ids, vectors):
        self.client = QdrantClient(":memory:")
        parameters = models.VectorParams(size=self.dim, distance=DISTANCES[self.metric])
        self.client.create_collection("photos", named(self.using, parameters))
        return self.insert_plain(None, ids, vectors)

    def reopen(self, store):
        return hubplugin_qdrant.open_store(
            self.client, "photos", vector=self.using, storage=self.storage
        )

    def insert_plain(self, store, ids, vectors):
        points = [
            models.PointStruct(id=key, vector=named(self.using, row))
            for key, row in zip(ids, vectors.tolist(), strict=True)
        ]
        self.client.upsert("photos", points)
        return self.reopen(store)


@pytest.mark.slow
class TestEuclideanWithUuids(TestUnnamedCosine):
    metric = Metric.EUCLIDEAN
    recall = 0.93  # by the six queries that tests calibrate with; by 32 it is 1

    def ids(self):
        return [str(uuid.UUID(int=number)) for number in range(self.rows)]

    def fresh_ids(self):
        return [str(uuid.UUID(int=self.rows + number)) for number in range(5)]


class TestSecondVector(TestUnnamedCosine):
    """storage="vector" ranks exactly, whatever the offsets."""

    using = "image"
    metric = Metric.DOT
    storage = "vector"
    recall = 1.0
