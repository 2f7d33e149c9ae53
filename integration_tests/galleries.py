"""Something to correct: real embeddings in a collection, with what a scenario asks of
it."""

import json
import uuid
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from qdrant_client import models

import hubplugin_qdrant
from hubplugin import Bank, apply, inspect
from hubplugin.metric import normalise
from integration_tests.servers import wait_until
from tests.core.formulas import similarity
from tests.galleries import assert_near

K = 10

AGREED = 0.95
"""What a corrected search must reach where the raw one is exact: candidates are chosen
for 0.99, by other queries."""

Answer: TypeAlias = list[list[int | str]]
"""The ids found for each query, best first."""

DATA = Path(__file__).parent.parent / "examples" / "data"
_example = {
    path.stem: normalise(np.load(path).astype(np.float32), path.stem)
    for path in DATA.glob("*.npy")
}
NAMES = json.loads((DATA / "names.json").read_text())["test"][:300]
TARGETS, LATER = _example["test_targets"][:300], _example["test_targets"][300:350]
QUERIES = _example["test_queries"][:40]
BANK, OTHER_BANK = _example["bank_queries"][:600], _example["bank_queries"][600:1200]
"""The gallery, targets that come later, the queries of the scenarios, and two banks:
[rows, 384], unit length."""

PAIRS = Bank(_example["bank_queries"], _example["bank_targets"])
"""A bank that knows what its queries ask for."""

FIT: dict[str, Any] = {"method": "dbsn", "tau": 0.05}
EXACT = models.SearchParams(exact=True)
APPLY = FIT | {"force": True}
"""Scenarios that are not about the guard do without it: it costs more than the rest of
them."""


def point_id(row):
    """Return integers and UUIDs by turns."""
    return row if row % 2 else str(uuid.UUID(int=row))


def payload(row):
    """Return one value of every type that a payload can hold."""
    return {
        "name": NAMES[row],
        "module": f"module {row % 40}",
        "row": row,
        "size": row / 7,
        "even": row % 2 == 0,
        "nothing": None,
        "when": "2024-05-06T07:08:09Z",
        "where": {"lon": 13.4, "lat": 52.5},
        "tags": ["a", "b", str(row)],
        "nested": {
            "deep": [{"er": row}, {}],
            "": "an empty key",
            "hub_offset": "not ours",
        },
        "uuid": str(uuid.UUID(int=row + 10_000)),
        "text": "Ünïcödé “text” 🙂",
    }


def exact_scores(queries, vectors, model):
    """Return s(q, t) + offset(t) in double precision, with the map of `model`:
    [queries, targets]."""
    if model is None:
        return similarity(queries, vectors, "cosine")
    mapped = similarity(queries, vectors, "cosine", model.query_map)
    return mapped + model.offsets(vectors)


def assert_same(content, expected):
    """Assert that every point has its payload, and its vectors up to roundings."""
    assert content.keys() == expected.keys()
    for key, (vector, stored) in content.items():
        wanted, payload = expected[key]
        assert stored == payload
        pair = [
            each if isinstance(each, dict) else {"": each} for each in (vector, wanted)
        ]
        assert pair[0].keys() == pair[1].keys()
        for name, values in pair[0].items():
            assert_near(values, pair[1][name], 1e-6)


class Gallery:
    """A collection with one dense vector, `using`, beside what `options` of
    `create_collection` bring: rows 0, 1, ... of TARGETS with `point_id` and `payload`.
    """

    def __init__(
        self, server, *, using="", rows=300, graph=False, vector=None, **options
    ):
        self.name = f"hubplugin-test-{uuid.uuid4().hex[:12]}"
        self.using = using
        self.ids = [point_id(row) for row in range(rows)]
        self.vectors = TARGETS[:rows]
        self.client = server.client()
        self.url = server.url(self.name)
        if using:
            self.url += f"{'&' if '?' in self.url else '?'}using={using}"
        parameters = models.VectorParams(
            size=TARGETS.shape[1], distance=models.Distance.COSINE, **(vector or {})
        )
        if graph:  # thresholds in kB, below the size of the gallery
            options |= {
                "hnsw_config": models.HnswConfigDiff(
                    m=16, ef_construct=100, full_scan_threshold=10
                ),
                "optimizers_config": models.OptimizersConfigDiff(indexing_threshold=10),
            }
        self.client.create_collection(
            self.name, {using: parameters} if using else parameters, **options
        )
        points = [
            self.point(key, TARGETS[row], payload(row))
            for row, key in enumerate(self.ids)
        ]
        # Of so many points the strictest server of a scenario takes a request.
        self.client.upload_points(self.name, points, batch_size=50, wait=True)
        if graph:
            wait_until(self.is_indexed)

    def vector(self, vector):
        """Return `vector` [d] as requests have it."""
        dense = vector.tolist()
        return {self.using: dense} if self.using else dense

    def point(self, key, vector, payload=None):
        return models.PointStruct(id=key, vector=self.vector(vector), payload=payload)

    def moved(self, key, vector):
        return models.PointVectors(id=key, vector=self.vector(vector))

    def is_indexed(self):
        """Tell whether the server is done with its graphs.

        It makes none for a handful of points that lie by themselves.
        """
        info = self.client.get_collection(self.name)
        is_green = info.status == models.CollectionStatus.GREEN
        return is_green and (info.indexed_vectors_count or 0) > len(self.ids) / 2

    def store(self, storage="auto", client=None):
        """Return it as hubplugin's own store, which keeps a new correction as
        `storage`."""
        return hubplugin_qdrant.open_store(
            client or self.client, self.name, vector=self.using, storage=storage
        )

    def correct(self, storage="auto", bank=BANK, **options):
        """Apply a correction, with `options` of `apply`, and return its model."""
        return apply(self.store(storage), bank, **(APPLY | options)).model

    def content(self):
        """Return every point as it lies there: its vector and its whole payload."""
        points, _ = self.client.scroll(self.name, limit=100_000, with_vectors=True)
        return {point.id: (point.vector, point.payload) for point in points}

    def drop(self):
        """Leave nothing behind."""
        for name in (self.name, f"{self.name}--hub"):
            self.client.delete_collection(name)

    def search(self, client, queries=QUERIES, limit=K, **options):
        """Return the points that `client` finds for each query."""
        given = {"using": self.using or None, "limit": limit, **options}
        return [
            client.query_points(self.name, query, **given).points for query in queries
        ]

    def found(self, raw=False):
        """Return the ids that its store finds for each query."""
        return self.store().search(QUERIES, K, raw=raw).ids

    def health(self):
        """Return how many targets there are, and how many of their offsets are missing
        and stale."""
        report = inspect(self.store(), queries=0)
        return report.count, report.missing, report.stale

    def assert_whole(self, model):
        """Assert that every target has its offset, and is found by it."""
        assert self.health() == (len(self.ids), 0, 0)
        assert self.agreement(self.found(), model) >= AGREED

    def agreement(self, answer, model, **options):
        """Return the share of an answer that belongs to the exact first results.

        Args:
            answer: The ids, or the client that finds them.
            model: What corrects the exact results; None for raw ones.
            options: Of `search`.
        """
        if not isinstance(answer, list):
            answer = ids_of(self.search(answer, **options))
        scores = exact_scores(QUERIES, self.vectors, model)
        row = {key: number for number, key in enumerate(self.ids)}
        rows = np.array([[row[key] for key in line] for line in answer])
        last = np.sort(scores, axis=1)[:, -rows.shape[1]][:, None] - 1e-5
        return float((np.take_along_axis(scores, rows, axis=1) >= last).mean())


def ids_of(found):
    """Return the ids of the points that were found for each query."""
    return [[point.id for point in points] for points in found]
