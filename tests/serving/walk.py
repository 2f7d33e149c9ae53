"""What a service does: python -m tests.serving.walk FOLDER [--keep]

FOLDER holds two models, fitted elsewhere, `gallery.npy` [n, d] and `queries.npy` [m, d].
It searches and writes; with --keep it also does what a maintainer does, where torch
cannot be imported.
"""

import asyncio
import sys
import warnings
from pathlib import Path

import faiss
import numpy as np
import pytest
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


def keep(plain, folder):
    queries = np.load(folder / "queries.npy")
    gallery = np.load(folder / "gallery.npy")
    expected = correct(plain, "photos", folder, "payload")
    store = open_store(plain, "photos", "image")
    point = models.PointStruct(id=2000, vector={"image": gallery[0].tolist()})
    plain.upsert("photos", [point])
    hubplugin.refresh(store)
    found = hubplugin.inspect(store, queries)
    assert found.missing == found.stale == 0
    store.explain(queries[0])
    plain.delete("photos", [2000])
    hubplugin.apply(store, hubplugin.load(folder / "other.hub"))
    hubplugin.rollback(store)
    assert find(plain, "photos", folder) == expected
    truth = [expected[:1], *([] for _ in queries[1:])]
    results = hubplugin.evaluate(store, queries=queries, truth=truth)
    assert results["corrected"].recall[1].value == 1.0
    recorder = hubplugin.Recorder(folder / "queries.recorded")
    recorder.add(queries)
    recorder.close()
    # numpy fits, too; a device of torch says what to install.
    model = hubplugin.fit(gallery, queries)
    np.testing.assert_allclose(model.offsets(gallery), model.fitted, atol=1e-5)
    hubplugin.apply(store, queries, force=True)
    hubplugin.refit(store, queries, force=True)
    hubplugin.diagnose(gallery, queries)
    lacking = r"needs torch, which is not installed; .*pip install '\.\[fit\]'"
    with pytest.raises(hubplugin.InputError, match=lacking):
        model.offsets(gallery, compute=hubplugin.Compute("cpu"))
    index = faiss.index_factory(16, "IVF8,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(gallery)
    index.add(gallery)
    path = folder / "photos.faiss"
    faiss.write_index(index, str(path))
    hubplugin.apply(hubplugin.open_store(f"faiss:{path}"), gallery, "csls", force=True)
    assert faiss.read_index(str(path)).search(gallery[:1], 5)[1].shape == (1, 5)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.modules["hubplugin.calibration"].QUERIES = 6  # local mode searches in Python
    given = Path(sys.argv[1])
    if "--keep" in sys.argv:
        sys.modules["torch"] = None  # type: ignore[assignment]
        keep(QdrantClient(":memory:"), given)
    serve(QdrantClient(":memory:"), given)
    assert sys.modules.get("torch") is None
