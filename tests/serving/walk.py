"""What a service does: python -m tests.serving.walk FOLDER

FOLDER holds a model, fitted elsewhere, `gallery.npy` [n, d] and `queries.npy` [m, d].
"""

import asyncio
import sys
import warnings
from pathlib import Path

import numpy as np
from qdrant_client import AsyncQdrantClient, QdrantClient, models

import hubplugin
from hubplugin_qdrant import AsyncHubQdrantClient, HubQdrantClient, open_store

COSINE = models.VectorParams(size=16, distance=models.Distance.COSINE)


def correct(plain, name, folder, storage):
    """Make a corrected collection; return the best five targets of the first query."""
    gallery = np.load(folder / "gallery.npy")
    plain.create_collection(name, {"image": COSINE})
    plain.upload_collection(name, {"image": gallery}, ids=range(len(gallery)))
    model = hubplugin.load(folder / "model.hub")
    hubplugin.apply(open_store(plain, name, "image", storage=storage), model)
    query = np.load(folder / "queries.npy")[0]
    unit = gallery / np.linalg.norm(gallery, axis=1, keepdims=True)
    scores = unit @ query / np.linalg.norm(query) + model.offsets(gallery)
    return np.argsort(-scores)[:5].tolist()


def find(plain, name, folder):
    query = np.load(folder / "queries.npy")[0]
    client = HubQdrantClient.wrap(plain)
    found = client.query_points(name, query, using="image", limit=5)
    return [point.id for point in found.points]


def serve(plain, folder):
    for storage in ("payload", "vector"):
        expected = correct(plain, storage, folder, storage)
        assert find(plain, storage, folder) == expected
    client = HubQdrantClient.wrap(plain)
    request = models.QueryRequest(query=[1.0] * 16, using="image", limit=5)
    assert len(client.query_batch_points("payload", [request] * 2)) == 2
    gallery = np.load(folder / "gallery.npy")
    client.upload_collection("payload", {"image": gallery}, ids=range(1000, 1200))

    async def search():
        client = AsyncHubQdrantClient.wrap(AsyncQdrantClient(":memory:"))
        await client.create_collection("plain", COSINE)
        await client.query_points("plain", [1.0] * 16)

    asyncio.run(search())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.modules["hubplugin.calibration"].QUERIES = 6  # local mode searches in Python
    serve(QdrantClient(":memory:"), Path(sys.argv[1]))
    assert "torch" not in sys.modules
