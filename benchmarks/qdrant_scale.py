"""What writing the offsets of a collection costs beside a bare loop: python -m benchmarks.qdrant_scale [--points N]

The bare loop scrolls the same points with their vectors and sets one number in the payload of each, in the same
engine and pages, and computes nothing. Without --url the engine is a Qdrant Edge shard on disk, in this process and by
one thread. With it, a server's: there the loop has as many requests under way as `apply`, writes what the storage does
(a number, or a second vector), and waits as `apply` does until the graph is whole again. The fit is not timed; what is:
the reading of the collection, the offsets of every point, their writing, the look for what others have written
meanwhile (on a server), the index, and the calibration. Of a server, the largest memory of both sides is printed, too.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import qdrant_edge as edge
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import fit
from hubplugin.compute import Compute
from hubplugin.jobs.write import SpooledGallery, written
from hubplugin.model import OffsetModel
from hubplugin.store import Store
from hubplugin_qdrant.edge import EdgeStore
from hubplugin_qdrant.offsets import set_offsets
from hubplugin_qdrant.plain_client import scrolling, update_vectors
from hubplugin_qdrant.schema import Storage
from hubplugin_qdrant.transport import BATCH, WRITERS

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


def collection(
    client: QdrantClient, points: int, dim: int, storage: Storage, graph: models.HnswConfigDiff | None
) -> tuple[Store, Callable[[], None]]:
    """A store over a new collection, and the bare loop on it, which writes what `storage` does from several threads
    and waits until the graph, if there is one, is whole again."""
    vectors = {NAME: models.VectorParams(size=dim, distance=models.Distance.COSINE)}
    none = None if graph else models.OptimizersConfigDiff(indexing_threshold=0)
    client.create_collection(NAME, vectors, hnsw_config=graph, optimizers_config=none)
    for page, block in enumerate(blocks(points, dim)):
        ids: list[int | str] = list(range(page * PAGE, page * PAGE + len(block)))
        client.upsert(NAME, models.Batch(ids=ids, vectors={NAME: block.tolist()}), wait=True)
    until_green(client)

    def write(records: list[models.Record]) -> None:
        if storage == "vector":
            given: list[Any] = [record.vector for record in records]
            plain = [each[NAME] if isinstance(each[NAME], list) else each[NAME].tolist() for each in given]
            rows = [(record.id, [*vector, 0.5]) for record, vector in zip(records, plain, strict=True)]
            update_vectors(client, NAME, "bare", rows)
        else:
            operations: list[models.UpdateOperation] = [
                set_offsets(record.id, {"v0": 0.5}, "bare") for record in records
            ]
            client.batch_update_points(NAME, operations, wait=True)

    scroll = scrolling(client)

    def bare() -> None:
        if storage == "vector":
            dense = models.DenseVectorConfig(size=dim + 1, distance=models.Distance.DOT)
            client.create_vector_name(NAME, "bare", models.DenseVectorNameConfig(dense=dense), wait=True)
        with ThreadPoolExecutor(WRITERS) as pool:
            following, more, under_way = None, True, []
            while more:
                records, following = scroll(
                    NAME, limit=BATCH, offset=following, with_vectors=[NAME], with_payload=False
                )
                under_way.append(pool.submit(write, records))
                more = following is not None
            for each in under_way:
                each.result()
        written = time.perf_counter()
        until_green(client)
        print(f"of the bare loop, the wait for the graph: {time.perf_counter() - written:.1f} s")

    return hubplugin_qdrant.open_store(client, NAME, storage=storage), bare


def connected(url: str, grpc_port: int | None) -> QdrantClient:
    is_grpc = grpc_port is not None
    return QdrantClient(url, grpc_port=grpc_port or 6334, prefer_grpc=is_grpc, timeout=600, check_compatibility=False)


def until_green(client: QdrantClient) -> None:
    while client.get_collection(NAME).status != models.CollectionStatus.GREEN:
        time.sleep(0.2)


def as_it_was(client: QdrantClient, storage: Storage) -> None:
    """Takes out what the bare loop wrote."""
    if storage == "vector":
        client.delete_vector_name(NAME, "bare", wait=True)
    else:
        client.delete_payload(NAME, keys=["bare"], points=models.Filter(), wait=True)
    until_green(client)


class Phases:
    """What was under way when, from what a job reports."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._what, self._since = "before", time.perf_counter()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.perf_counter()
        self._seconds[self._what] = self._seconds.get(self._what, 0.0) + now - self._since
        self._what, self._since = what, now

    def __str__(self) -> str:
        self("", 0, 0)
        return ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self._seconds.items())


class Memory:
    """The largest memory of this process, without pages of files, and the largest resident memory of the server at
    `url`, while it is entered; in MB."""

    def __init__(self, url: str | None):
        self._ended, self._largest = threading.Event(), [0.0, 0.0]
        self._server = None if url is None else httpx.Client(base_url=url, timeout=60)

    def __enter__(self) -> Memory:
        self._watching = threading.Thread(target=self._watch)
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watching.join()

    def _watch(self) -> None:
        while not self._ended.wait(1):
            lines = Path("/proc/self/status").read_text().splitlines()
            here = 1024 * next(float(line.split()[1]) for line in lines if line.startswith("RssAnon"))
            self._largest = [max(pair) for pair in zip(self._largest, (here, self._of_server()), strict=True)]

    def _of_server(self) -> float:
        if self._server is None:
            return 0.0
        lines = self._server.get("/metrics").text.splitlines()
        return max((float(line.split()[1]) for line in lines if line.startswith("memory_resident_bytes")), default=0.0)

    def __str__(self) -> str:
        here, server = (f"{each / 1e6:,.0f} MB" for each in self._largest)
        return f"client {here}" + (f", server {server}" if self._server is not None else "")


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def offsets_written(store: Store, model: OffsetModel, phases: Phases) -> None:
    """As `apply` does it: what others write to is read first, which a fit needs, and is written from what was read."""
    gallery = SpooledGallery(store, phases) if store.shared else None
    written(store, model, gallery, Compute(progress=phases))


def measured(
    store: Store, bare: Callable[[], None], between: Callable[[], None], bank: int, url: str | None = None
) -> None:
    """between: run after the bare loop, before offsets are written; not timed. url: of the server."""
    points, queries = store.count(), np.random.default_rng(1).normal(size=(bank, store.dim)).astype(np.float32)
    model = fit(next(blocks(points, store.dim)), queries, "nnn", metric=store.metric)
    before = seconds(bare)
    between()
    phases = Phases()
    with Memory(url) as memory:
        taken = seconds(lambda: offsets_written(store, model, phases))
    print(
        f"{platform.processor() or platform.machine()}, {points:,} points of {store.dim} dimensions, bank of {bank:,}"
    )
    print(f"bare scroll and write {before:8.1f} s {points / before:10,.0f} points/s")
    print(f"offsets written       {taken:8.1f} s {points / taken:10,.0f} points/s   ratio {taken / before:.2f}")
    print(f"of which: {phases}; memory at most: {memory}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--bank", type=int, default=1000)
    parser.add_argument("--url", help="a server, such as http://localhost:6333; or :memory: for local mode")
    parser.add_argument("--storage", choices=("payload", "vector"), default="payload", help="on a server")
    parser.add_argument("--grpc-port", type=int, help="of the server, to speak gRPC; by default REST")
    parser.add_argument("--no-graph", action="store_true", help="switch the server's index off")
    parser.add_argument("--links", type=int, default=16, help="of each point in the graph: m")
    parser.add_argument("--ef-construct", type=int, default=100, help="of the graph")
    given = parser.parse_args()
    if given.url is None:
        with tempfile.TemporaryDirectory() as folder:
            store, bare = shard(Path(folder) / "shard", given.points, given.dim)
            measured(store, bare, lambda: None, given.bank)
        return
    local = given.url == ":memory:"
    client = QdrantClient(given.url) if local else connected(given.url, given.grpc_port)
    try:
        graph = None if given.no_graph else models.HnswConfigDiff(m=given.links, ef_construct=given.ef_construct)
        store, bare = collection(client, given.points, given.dim, given.storage, graph)
        measured(store, bare, lambda: as_it_was(client, given.storage), given.bank, None if local else given.url)
    finally:
        for name in (NAME, f"{NAME}--hub"):
            client.delete_collection(name)


if __name__ == "__main__":
    main()
