"""The contract of a store, on a real PostgreSQL: each metric, by the planner's choice and by the index."""

import pytest

from hubplugin import open_store
from hubplugin.metric import Metric
from hubplugin.testing import StoreConformance

pytestmark = pytest.mark.slow


class TestTable(StoreConformance):
    @pytest.fixture(autouse=True)
    def _database(self, database):
        self.database = database

    def create(self, ids, vectors):
        self.database.create(vectors)
        return self.database.open(metric=self.metric.value)

    def reopen(self, store):
        return open_store(store.url)

    def insert_plain(self, store, ids, vectors):
        self.database.fill(vectors, ids)
        return open_store(store.url)


class TestEuclidean(TestTable):
    metric = Metric.EUCLIDEAN


class TestIndexed(TestTable):
    """The planner is told to use the index, which it would not for so few rows."""

    metric = Metric.DOT
    recall = 0.98

    def create(self, ids, vectors):
        # Wide enough that what a row leaves behind in the index when its offset is written changes no ranking.
        self.database.setting(enable_seqscan="off", **{"hnsw.ef_search": "400"})
        return super().create(ids, vectors)
