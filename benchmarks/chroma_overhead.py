"""What a corrected query of Chroma costs beside a raw one: medians in turns, in a folder and on a server of its own.

    python -m benchmarks.chroma_overhead

examples/data, one query a call, ten results; three pairs of turns, the ratio of the middle one and the range.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chromadb
import numpy as np

import hubplugin
from benchmarks.tables import EXAMPLES
from hubplugin_chroma import ChromaStore, HubCollection

WAYS: dict[str, dict[str, Any]] = {
    "all content": {},
    "ids": {"include": ["distances"]},
    "filter": {"where": {"even": True}},
}


def median(search: Callable[[list[float]], object], queries: np.ndarray) -> float:
    """Milliseconds."""
    seconds = []
    for query in queries.tolist():
        start = time.perf_counter()
        search(query)
        seconds.append(time.perf_counter() - start)
    return 1000 * float(np.median(seconds))


def measure(place: str, client: chromadb.ClientAPI) -> None:
    gallery, bank, queries = (
        np.load(EXAMPLES / f"{name}.npy").astype("float32") for name in ("test_targets", "bank_queries", "test_queries")
    )
    photos = client.create_collection("photos", configuration={"hnsw": {"space": "cosine"}})
    for start in range(0, len(gallery), 400):
        rows = range(start, min(start + 400, len(gallery)))
        ids, metadatas = [str(row) for row in rows], [{"even": row % 2 == 0} for row in rows]
        photos.add(ids=ids, embeddings=gallery[rows], metadatas=metadatas, documents=ids)
    hubplugin.apply(ChromaStore(client, photos), bank)
    corrected = HubCollection(client, photos)
    for name, how in WAYS.items():
        turns = [
            [
                median(lambda query: each.query(query_embeddings=[query], n_results=10, **how), queries[:150])  # noqa: B023
                for each in (photos, corrected)
            ]
            for _ in range(3)
        ]
        ratios = sorted(after / before for before, after in turns)
        print(
            f"| {place} | {name} | {turns[1][0]:.2f} ms | {ratios[1]:.2f} ({ratios[0]:.2f}-{ratios[2]:.2f}) |",
            flush=True,
        )


def main() -> None:
    print("| Chroma | result | raw | corrected, times raw |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        measure("folder", chromadb.PersistentClient(f"{folder}/embedded"))
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        program = Path(sys.executable).parent / "chroma"
        command = [program, "run", "--path", f"{folder}/server", "--host", "localhost", "--port", str(port)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(10)
            measure("server", chromadb.HttpClient("localhost", port))
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
