"""What writing the offsets of a collection costs beside a bare loop: python -m benchmarks.qdrant_scale [--points N]

The bare loop scrolls the same points with their vectors and sets one number in the payload of each, in the same
engine and pages, and computes nothing. Without --url the engine is a Qdrant Edge shard on disk, in this process and by
one thread; with it, a server's, whose requests `apply` has several of under way. The fit is not timed; what is: the
offsets of every point, their writing, the closing scan (on a server), the index, and the calibration.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import qdrant_edge as edge
from qdrant_client import QdrantClient, models

from hubplugin import fit
from hubplugin.jobs.writing import write
from hubplugin.progress import bars
from hubplugin.store import Store
from hubplugin_qdrant import QdrantStore
from hubplugin_qdrant.edge import EdgeStore
from hubplugin_qdrant.requests.offsets_in_writes import set_offsets

PAGE, NAME = 1000, "hubplugin-benchmark"


def blocks(points: int, dim: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    for first in range(0, points, PAGE):
        yield rng.normal(size=(min(PAGE, points - first), dim)).astype(np.float32)


def shard(folder: Path, points: int, dim: int) -> tuple[Store, Callable[[], None]]:
    """A store over a new shard, and the bare loop on it."""
    folder.mkdir()
    filled = edge.EdgeShard.create(
        os.fspath(folder), edge.EdgeConfig(vectors=edge.EdgeVectorParams(dim, edge.Distance.Cosine, on_disk=True))
    )
    for page, block in enumerate(blocks(points, dim)):
        rows = [edge.Point(page * PAGE + row, vector, {}) for row, vector in enumerate(block.tolist())]
        filled.update(edge.UpdateOperation.upsert_points(rows))
    filled.flush()

    def bare() -> None:
        following, more = None, True
        while more:
            records, following = filled.scroll(edge.ScrollRequest(following, PAGE, with_vector=True))
            for record in records:
                filled.update(edge.UpdateOperation.set_payload([record.id], {"v0": 0.5}, "bare"))
            filled.flush()
            more = following is not None

    return EdgeStore(filled, folder), bare


def collection(client: QdrantClient, points: int, dim: int) -> tuple[Store, Callable[[], None]]:
    """A store over a new collection, and the bare loop on it."""
    client.create_collection(NAME, models.VectorParams(size=dim, distance=models.Distance.COSINE))
    for page, block in enumerate(blocks(points, dim)):
        ids: list[int | str] = list(range(page * PAGE, page * PAGE + len(block)))
        client.upsert(NAME, models.Batch(ids=ids, vectors=block.tolist()), wait=True)

    def bare() -> None:
        following, more = None, True
        while more:
            records, following = client.scroll(NAME, limit=PAGE, offset=following, with_vectors=True)
            operations = [set_offsets(record.id, {"v0": 0.5}, key="bare") for record in records]
            client.batch_update_points(NAME, operations, wait=True)
            more = following is not None

    return QdrantStore(client, NAME), bare


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measured(store: Store, bare: Callable[[], None], points: int, dim: int, bank: int) -> None:
    queries = np.random.default_rng(1).normal(size=(bank, dim)).astype(np.float32)
    model = fit(queries, "nnn", next(blocks(points, dim)), metric=store.metric)
    before = seconds(bare)
    with bars() as progress:
        taken = seconds(lambda: write(store, model, progress=progress))
    print(f"{platform.processor() or platform.machine()}, {points:,} points of {dim} dimensions, bank of {bank:,}")
    print(f"bare scroll and write {before:8.1f} s {points / before:10,.0f} points/s")
    print(f"offsets written       {taken:8.1f} s {points / taken:10,.0f} points/s   ratio {taken / before:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--bank", type=int, default=1000)
    parser.add_argument("--url", help="a server, such as http://localhost:6333; or :memory: for local mode")
    given = parser.parse_args()
    if given.url is None:
        with tempfile.TemporaryDirectory() as folder:
            store, bare = shard(Path(folder) / "shard", given.points, given.dim)
            measured(store, bare, given.points, given.dim, given.bank)
        return
    local = given.url == ":memory:"
    client = QdrantClient(given.url) if local else QdrantClient(url=given.url, timeout=60)
    try:
        measured(*collection(client, given.points, given.dim), given.points, given.dim, given.bank)
    finally:
        for name in (NAME, f"{NAME}--hub"):
            client.delete_collection(name)


if __name__ == "__main__":
    main()
