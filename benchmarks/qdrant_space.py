"""What offsets take of a server's memory and disk: python -m benchmarks.qdrant_space [--points N] [--executable qdrant]

Starts the executable on a folder of its own and fills a collection. Before a correction and after it, by each storage,
the server is restarted, all points are read once and some queries are searched. So everything is in memory that is ever
there. Then its resident memory and the bytes of its folder are read. Per million points, beside what `plan` tells.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from qdrant_client import QdrantClient, models

import hubplugin
import hubplugin_qdrant
from hubplugin_qdrant import HubQdrantClient

NAME, VECTOR, PAGE, QUERIES = "hubplugin-space", "image", 1000, 200


class Server:
    """The executable on `folder`, with no log and on ports that the system had free."""

    def __init__(self, executable: str, folder: Path):
        self._executable, self.folder = executable, folder
        self._ports = [_free_port(), _free_port()]
        self._start()

    def _start(self) -> None:
        settings = {
            "QDRANT__STORAGE__STORAGE_PATH": str(self.folder / "storage"),
            "QDRANT__SERVICE__HTTP_PORT": str(self._ports[0]),
            "QDRANT__SERVICE__GRPC_PORT": str(self._ports[1]),
            "QDRANT__TELEMETRY_DISABLED": "true",
        }
        self._running = subprocess.Popen(
            [self._executable],
            cwd=self.folder,
            env=os.environ | settings,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.client = QdrantClient(port=self._ports[0], timeout=120, check_compatibility=False)
        for _ in range(600):
            try:
                self.client.get_collections()
                return
            except Exception:
                time.sleep(0.2)
        raise SystemExit(f"{self._executable} does not answer")

    def stop(self) -> None:
        self._running.terminate()
        self._running.wait()

    def restart(self) -> None:
        self.stop()
        self._start()

    def bytes_of_memory(self) -> int:
        lines = Path(f"/proc/{self._running.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    def bytes_of_disk(self) -> int:
        """Blocks that are in use: files are made larger than what is in them."""
        return sum(512 * path.stat().st_blocks for path in self.folder.rglob("*") if path.is_file())


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def fill(client: QdrantClient, points: int, dim: int) -> None:
    rng = np.random.default_rng(0)
    client.create_collection(NAME, {VECTOR: models.VectorParams(size=dim, distance=models.Distance.COSINE)})
    for first in range(0, points, PAGE):
        ids: list[int | str] = list(range(first, min(first + PAGE, points)))
        rows = rng.normal(size=(len(ids), dim)).astype(np.float32).tolist()
        client.upsert(NAME, models.Batch(ids=ids, vectors={VECTOR: rows}), wait=True)
    settle(client)


def settle(client: QdrantClient) -> None:
    """Waits for the graph. A server that was restarted is grey and builds nothing before somebody writes."""
    while client.get_collection(NAME).status == models.CollectionStatus.YELLOW:
        time.sleep(0.5)


def taken(server: Server, dim: int) -> np.ndarray:
    """Bytes of memory and of disk, once all that is ever in memory is there."""
    settle(server.client)
    server.restart()
    settle(server.client)
    following, more = None, True
    while more:
        _, following = server.client.scroll(NAME, limit=PAGE, offset=following, with_vectors=True)
        more = following is not None
    hub = HubQdrantClient.wrap(server.client)
    for query in np.random.default_rng(1).normal(size=(QUERIES, dim)):
        hub.query_points(NAME, query=query, using=VECTOR, limit=10)
    return np.array([server.bytes_of_memory(), server.bytes_of_disk()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--executable", default="qdrant")
    given = parser.parse_args()
    bank = np.random.default_rng(2).normal(size=(500, given.dim)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(given.executable, Path(folder))
        try:
            fill(server.client, given.points, given.dim)
            print(f"{given.points:,} points of {given.dim} dimensions; MB for each million points")
            print(f"{'':<10}{'memory':>10}{'disk':>10}   what a dry run tells")
            raw = taken(server, given.dim)
            print(f"{'raw':<10}{_millions(raw, given.points)}", flush=True)
            for storage in ("payload", "vector"):
                store = hubplugin_qdrant.open_store(server.client, NAME, vector=VECTOR, storage=storage)
                told = next(line for line in store.plan() if "would take" in line)
                hubplugin_qdrant.apply(
                    server.client, NAME, bank, vector=VECTOR, method="nnn", storage=storage, force=True
                )
                more = taken(server, given.dim) - raw
                print(f"{storage:<10}{_millions(more, given.points)}   {told}", flush=True)
                hubplugin.remove(hubplugin_qdrant.open_store(server.client, NAME, vector=VECTOR))
        finally:
            server.stop()


def _millions(taken: np.ndarray, points: int) -> str:
    return "".join(f"{each / points:>10.0f}" for each in taken)


if __name__ == "__main__":
    main()
