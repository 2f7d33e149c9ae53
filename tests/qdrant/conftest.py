"""A small collection with hubs, in local mode, and its exact corrected ranking."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import OffsetModel
from hubplugin_qdrant import HubQdrantClient, QdrantStore
from hubplugin_qdrant.manifest import Manifest, Version

ROWS, DIM = 120, 8


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
    storage: str = "payload"

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
        hubplugin_qdrant.apply(self.plain, "photos", self.bank, using=self.using, **(self.settings() | given))
        return HubQdrantClient.wrap(self.plain)

    def settings(self):
        return {"method": "is", "force": True, "storage": self.storage}

    @property
    def model(self) -> OffsetModel:
        found = QdrantStore(self.plain, "photos", self.using).correction()
        assert found is not None
        return found.model

    @property
    def version(self) -> Version:
        payload = self.plain.retrieve("photos--hub", [0])[0].payload
        return Manifest.model_validate(payload).active[self.using]

    def mark(self, key) -> dict:
        """What a point holds of ours: payload under our key, or second vectors."""
        point = self.plain.retrieve("photos", [key], with_vectors=True)[0]
        if self.storage == "payload":
            return (point.payload or {}).get("hub_offset", {})
        return {name: vector for name, vector in point.vector.items() if name.startswith("hub_")}

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


COLLECTIONS = [
    ("", models.Distance.COSINE, "payload"),
    ("image", models.Distance.DOT, "payload"),
    ("", models.Distance.EUCLID, "payload"),
    ("image", models.Distance.COSINE, "vector"),
    ("image", models.Distance.EUCLID, "vector"),
]


@pytest.fixture(params=COLLECTIONS, ids=lambda of: f"{of[0] or 'unnamed'}-{of[1].value}-{of[2]}")
def photos(request) -> Photos:
    """Unnamed and named vectors, each distance, both storages."""
    return Photos(QdrantClient(":memory:"), *request.param)


@pytest.fixture(params=COLLECTIONS[:3], ids=lambda of: of[1].value)
def in_payload(request) -> Photos:
    """The same with offsets as payload only."""
    return Photos(QdrantClient(":memory:"), *request.param)


@pytest.fixture
def cosine() -> Photos:
    return Photos(QdrantClient(":memory:"), "", models.Distance.COSINE)
