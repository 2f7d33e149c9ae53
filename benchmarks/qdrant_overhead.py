"""What a corrected `query_points` costs in Python above the raw one: python -m benchmarks.qdrant_overhead

The server is taken out: each request is built, encoded and answered with ten points in memory. The goal is at most
50 microseconds above the raw call, at 384 dimensions.
"""

from __future__ import annotations

import math
import platform
import statistics
import time

import httpx
import numpy as np
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin_qdrant.flows import Known

DIM, CALLS, ROUNDS = 384, 200, 10


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


def microseconds(client: QdrantClient, collection: str, query: object) -> float:
    """Median time of one call."""
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        client.query_points(collection, query=query, limit=10)
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def main() -> None:
    rng = np.random.default_rng(0)
    store = hubplugin_qdrant.QdrantStore(corrected_collection(rng), "photos")
    manifest = store._manifest()
    raw = answered_client()
    corrected = hubplugin_qdrant.HubQdrantClient.wrap(raw)
    corrected._hub.known = {"photos": Known("photos", manifest, math.inf), "other": Known("other", None, math.inf)}
    vector = rng.normal(size=DIM).astype(np.float32)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}; microseconds a call")
    print(f"{'query':<28}{'raw':>10}{'above it: median':>20}{'least':>10}{'most':>10}")
    for name, collection, query in (
        ("list", "photos", vector.tolist()),
        ("numpy array", "photos", vector),
        ("NearestQuery", "photos", models.NearestQuery(nearest=vector.tolist())),
        ("collection not corrected", "other", vector),
    ):
        raws, above = [], []
        for _ in range(ROUNDS):  # side by side, so that a busy machine slows both
            raws.append(microseconds(raw, collection, query))
            above.append(microseconds(corrected, collection, query) - raws[-1])
        line = (statistics.median(raws), statistics.median(above), min(above), max(above))
        print(f"{name:<28}{line[0]:>10.1f}{line[1]:>20.1f}{line[2]:>10.1f}{line[3]:>10.1f}")


if __name__ == "__main__":
    main()
