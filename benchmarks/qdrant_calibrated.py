"""Corrected searches of a server as they are calibrated: python -m benchmarks.qdrant_calibrated URL [--grpc-port 6334]

Prints, for each method and storage, the recall of the corrected top 10 and of the raw one against float64 brute force.
Beside it stands the median time of a query through the wrapped client over that of the plain one, asked in turns, by
REST and gRPC. The data are functions and docstrings: `HUBPLUGIN_CODE_SEARCH` where that is there, else `examples/data`.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from qdrant_client import QdrantClient, models

import hubplugin
import hubplugin_qdrant
from benchmarks.tables import CODE_SEARCH, EXAMPLES
from hubplugin_qdrant import HubQdrantClient

NAME, VECTOR, K, BANK, HELD_OUT = "hubplugin-calibrated", "code", 10, 1500, 200
METHODS = (("dbsn", {"tau": 0.05}), ("nnn", {}), ("is", {"tau": 0.02}))


def unit(*paths: Path) -> np.ndarray:
    rows = np.concatenate([np.load(path).astype(np.float32) for path in paths])
    unit_rows: np.ndarray = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit_rows


def recall(found: list[list[int]], scores: np.ndarray) -> float:
    best = np.argsort(-scores, axis=1)[:, :K]
    return float(np.mean([len(set(row.tolist()) & set(ids)) / K for row, ids in zip(best, found, strict=True)]))


class Measured:
    """A collection on a server, and what its searches find and take."""

    def __init__(self, url: str, grpc_port: int, gallery: np.ndarray, queries: np.ndarray):
        parts = urlsplit(url)
        self.options = {"host": parts.hostname, "port": parts.port or 6333, "grpc_port": grpc_port, "timeout": 120}
        self.client = QdrantClient(**self.options, check_compatibility=False)
        self.queries = queries.tolist()
        self.scores = queries.astype(np.float64) @ gallery.astype(np.float64).T
        self.client.create_collection(
            NAME,
            {VECTOR: models.VectorParams(size=gallery.shape[1], distance=models.Distance.COSINE)},
            hnsw_config=models.HnswConfigDiff(full_scan_threshold=100),
            optimizers_config=models.OptimizersConfigDiff(indexing_threshold=100),
        )
        self.client.upload_collection(NAME, {VECTOR: gallery}, ids=range(len(gallery)), batch_size=500, wait=True)
        self.settled()

    def settled(self) -> None:
        while self.client.get_collection(NAME).status != models.CollectionStatus.GREEN:
            time.sleep(0.5)

    def found(self, clients: list[QdrantClient]) -> tuple[list[list[list[int]]], np.ndarray]:
        """The ids that each client finds, and its median seconds a query."""
        ids: list[list[list[int]]] = [[] for _ in clients]
        seconds = np.empty((len(self.queries), len(clients)))
        for row, query in enumerate(self.queries):
            for column, client in enumerate(clients):
                started = time.perf_counter()
                points = client.query_points(NAME, query=query, using=VECTOR, limit=K, with_payload=False).points
                seconds[row, column] = time.perf_counter() - started
                ids[column].append([int(point.id) for point in points])
        return ids, np.median(seconds, axis=0)

    def line(self, offsets: np.ndarray) -> str:
        grpc = {**self.options, "prefer_grpc": True, "check_compatibility": False}
        rest = {**self.options, "check_compatibility": False}
        ids, seconds = self.found(
            [QdrantClient(**rest), HubQdrantClient(**rest), QdrantClient(**grpc), HubQdrantClient(**grpc)]
        )
        corrected, raw = recall(ids[1], self.scores + offsets), recall(ids[0], self.scores)
        return f"{corrected:.3f} | {raw:.3f} | {seconds[1] / seconds[0]:.2f} | {seconds[3] / seconds[2]:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="a server, such as http://localhost:6333")
    parser.add_argument("--grpc-port", type=int, default=6334)
    parser.add_argument("--methods", nargs="+", default=[name for name, _ in METHODS])
    parser.add_argument("--storages", nargs="+", default=["vector", "payload"])
    parser.add_argument("--agreement", type=float, help="share of the raw recall; by default that of apply")
    given = parser.parse_args()
    data = CODE_SEARCH if CODE_SEARCH.exists() else EXAMPLES
    gallery = unit(*(data / name for name in ("bank_targets.npy", "test_targets.npy") if (data / name).exists()))
    bank, queries = unit(data / "bank_queries.npy")[:BANK], unit(data / "test_queries.npy")[:HELD_OUT]
    measured = Measured(given.url, given.grpc_port, gallery, queries)
    try:
        print("| method, storage | recall of the corrected top 10 | of the raw one | REST | gRPC |")
        print("|---|---|---|---|---|")
        for method, parameters in ((name, each) for name, each in METHODS if name in given.methods):
            for storage in given.storages:
                asked = {"method": method, "storage": storage, "agreement": given.agreement, **parameters}
                applied = hubplugin_qdrant.apply(measured.client, NAME, bank, vector=VECTOR, force=True, **asked)
                measured.settled()
                searched = re.search(r"hnsw_ef \d+|[\d.]+ candidates a result", " ".join(applied.notes))
                how = f"{storage}, {searched[0] if searched else 'hnsw_ef of the server'}"
                print(f"| `{method}`, {how} | {measured.line(applied.model.offsets(gallery))}", flush=True)
                hubplugin.remove(hubplugin_qdrant.open_store(measured.client, NAME, vector=VECTOR))
    finally:
        for name in (NAME, f"{NAME}--hub"):
            measured.client.delete_collection(name)


if __name__ == "__main__":
    main()
