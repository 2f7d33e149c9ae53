"""What a corrected `query_points` costs in Python above the raw one: python -m benchmarks.qdrant_overhead

The server is taken out: each request is built, encoded and answered with ten points in memory. The goal is at most
50 microseconds above the raw call, at 384 dimensions.
"""

from __future__ import annotations

import platform
import time

import httpx
import numpy as np
from qdrant_client import QdrantClient, models

import hubplugin_qdrant

DIM, CALLS = 384, 2000


def answered_client() -> QdrantClient:
    """A client whose every request is answered at once with ten points."""
    points = [{"id": row, "version": 0, "score": 0.5, "payload": {}} for row in range(10)]
    answer = httpx.MockTransport(
        lambda request: httpx.Response(200, json={"result": {"points": points}, "status": "ok", "time": 0.0})
    )
    client = QdrantClient(url="http://localhost", check_compatibility=False)
    client.http.client._client = httpx.Client(transport=answer, base_url="http://localhost")
    return client


def corrected_collection(rng: np.random.Generator) -> QdrantClient:
    client = QdrantClient(":memory:")
    client.create_collection("photos", models.VectorParams(size=DIM, distance=models.Distance.COSINE))
    client.upload_collection("photos", rng.normal(size=(100, DIM)))
    hubplugin_qdrant.apply(client, "photos", rng.normal(size=(50, DIM)), method="is", force=True)
    return client


def microseconds(clients: tuple[QdrantClient, QdrantClient], collection: str, query: object) -> np.ndarray:
    """Times of one call of each client, in turns, so that a busy machine slows both: [CALLS, 2]."""
    times = np.empty((CALLS, 2))
    for row in times:
        for column, client in enumerate(clients):
            started = time.perf_counter()
            client.query_points(collection, query=query, limit=10)
            row[column] = 1e6 * (time.perf_counter() - started)
    return times


def main() -> None:
    rng = np.random.default_rng(0)
    store = hubplugin_qdrant.QdrantStore(corrected_collection(rng), "photos")
    manifest = store.metadata.read_manifest()
    raw = answered_client()
    corrected = hubplugin_qdrant.HubQdrantClient.wrap(raw)
    corrected._corrections.keep("photos", manifest)
    corrected._corrections.keep("other", None)
    vector = rng.normal(size=DIM).astype(np.float32)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}; microseconds a call")
    print(f"{'query':<28}{'raw: median':>14}{'above it: median':>18}{'quickest tenth':>16}")
    for name, collection, query in (
        ("list", "photos", vector.tolist()),
        ("numpy array", "photos", vector),
        ("NearestQuery", "photos", models.NearestQuery(nearest=vector.tolist())),
        ("collection not corrected", "other", vector),
    ):
        median, quick = (np.quantile(microseconds((raw, corrected), collection, query), q, axis=0) for q in (0.5, 0.1))
        print(f"{name:<28}{median[0]:>14.1f}{median[1] - median[0]:>18.1f}{quick[1] - quick[0]:>16.1f}")


if __name__ == "__main__":
    main()
