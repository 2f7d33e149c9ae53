"""A small collection with hubs, in local mode, and its exact corrected ranking."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import OffsetModel
from hubplugin_qdrant import HubQdrantClient, QdrantStore

ROWS, DIM = 200, 8


def clustered(seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(6, DIM))
    return (centres[rng.integers(6, size=count)] + 0.7 * rng.normal(size=(count, DIM))).astype(np.float32)


@dataclass
class Photos:
    """The collection "photos": the vector `using` of 200 points, payload {"n": id, "colour": ...}."""

    plain: QdrantClient
    using: str
    distance: models.Distance

    gallery = clustered(1, ROWS)
    queries = clustered(2, 20)
    bank = clustered(3, 150)

    def __post_init__(self) -> None:
        parameters = models.VectorParams(size=DIM, distance=self.distance)
        self.plain.create_collection("photos", {self.using: parameters} if self.using else parameters)
        self.plain.upload_points("photos", [self.point(row, vector) for row, vector in enumerate(self.gallery)])

    def point(self, key, vector, **payload):
        given = {self.using: vector.tolist()} if self.using else vector.tolist()
        colour = {"n": key, "colour": ["red", "green", "blue"][key % 3]}
        return models.PointStruct(id=key, vector=given, payload=colour | payload)

    def apply(self, **given) -> HubQdrantClient:
        hubplugin_qdrant.apply(
            self.plain, "photos", self.bank, using=self.using, **({"method": "is", "force": True} | given)
        )
        return HubQdrantClient.wrap(self.plain)

    @property
    def model(self) -> OffsetModel:
        found = QdrantStore(self.plain, "photos", self.using).correction()
        assert found is not None
        return found.model

    def mark(self, key) -> dict[str, float]:
        """What the payload of a point holds under our key."""
        return (self.plain.retrieve("photos", [key])[0].payload or {}).get("hub_offset", {})

    def similarities(self, queries) -> np.ndarray:
        """Corrected similarities of the gallery, in float64 and straight from the definition: [m, n]."""
        q, t = np.asarray(queries, np.float64), self.gallery.astype(np.float64)
        if self.distance is models.Distance.COSINE:
            q, t = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, t))
        if self.distance is models.Distance.EUCLID:
            s = -((q[:, None, :] - t[None, :, :]) ** 2).sum(axis=2) / 2
        else:
            s = q @ t.T
        return s + self.model.offsets(self.gallery)

    def best(self, query, count=10, rows=None) -> list[int]:
        scores = self.similarities([query])[0]
        keep = np.arange(ROWS) if rows is None else np.asarray(rows)
        return [int(row) for row in keep[np.argsort(-scores[keep], kind="stable")][:count]]


@pytest.fixture(params=[("", models.Distance.COSINE), ("image", models.Distance.DOT), ("", models.Distance.EUCLID)])
def photos(request) -> Photos:
    """An unnamed cosine vector, a named dot-product one, an unnamed Euclidean one."""
    return Photos(QdrantClient(":memory:"), *request.param)


@pytest.fixture
def cosine() -> Photos:
    return Photos(QdrantClient(":memory:"), "", models.Distance.COSINE)


@pytest.fixture
def euclid() -> Photos:
    return Photos(QdrantClient(":memory:"), "", models.Distance.EUCLID)
