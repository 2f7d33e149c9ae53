"""What stores of copies (Chroma, LanceDB) rest on: the size of a query's last component, and what a query costs.

    python -m benchmarks.copies

First recall@10 of Chroma's HNSW (ef_search 100) over copies [t, offset / e], against the exact corrected ranking. 1 x
is where the last component of the targets spreads as far as any other of a query; `hubplugin.copies.e_of` takes 2 x.
"raw" has no offsets. Then what a corrected query of Chroma costs beside a raw one: examples/data, one query a call, ten
results, three pairs of turns, the ratio of the middle one and the range.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chromadb
import numpy as np

import hubplugin
from benchmarks.bank_settings import files
from benchmarks.tables import EXAMPLES, machine, markdown
from hubplugin_chroma import HubCollection, open_store

TIMES = (0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)
BATCH = 400
WAYS: dict[str, dict[str, Any]] = {
    "all content": {},
    "ids": {"include": ["distances"]},
    "filter": {"where": {"even": True}},
}

Gallery = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Targets [n, d], queries [m, d] and offsets [n]."""


def unit(vectors: np.ndarray) -> np.ndarray:
    return np.asarray(
        vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32
    )


def galleries() -> Iterator[tuple[str, Gallery]]:
    rng = np.random.default_rng(1)
    targets, bank, queries = files(
        EXAMPLES, "test_targets", "bank_queries", "test_queries"
    )
    for method, settings in {
        "is": {"tau": 0.05},
        "sn": {"tau": 0.05},
        "nnn": {"k": 16, "alpha": 0.5},
    }.items():
        model = hubplugin.fit(targets, bank, method, **settings)
        yield f"examples/data, {method}", (targets, queries, model.offsets(targets))
    centres = unit(rng.normal(size=(40, 128)))

    def clustered(count: int, noise: float) -> np.ndarray:
        return unit(
            centres[rng.integers(40, size=count)]
            + noise * unit(rng.normal(size=(count, 128)))
        )

    near, bank, queries = clustered(4000, 0.6), clustered(600, 0.9), clustered(300, 0.9)
    yield (
        "clusters, sn",
        (near, queries, hubplugin.fit(near, bank, "sn", tau=0.02).offsets(near)),
    )
    far = near * rng.uniform(0.5, 3, size=(4000, 1)).astype(np.float32)
    offsets = hubplugin.fit(far, bank, "is", metric="dot", tau=0.2).offsets(far)
    yield "clusters of many lengths, is, dot", (far, queries, offsets)
    spread = (
        unit(rng.normal(size=(3000, 32))) * rng.uniform(0.5, 3, size=(3000, 1))
    ).astype(np.float32)
    yield (
        "lengths and offsets at random, dot",
        (spread, rng.normal(size=(200, 32)), 3 * rng.normal(size=3000)),
    )


def recall(client: chromadb.ClientAPI, gallery: Gallery, e: float) -> float:
    targets, queries, offsets = gallery
    scores = queries.astype(np.float64) @ targets.T.astype(np.float64) + offsets
    exact = np.argsort(-scores, axis=1)[:, :10]
    index = {"hnsw": {"space": "ip", "ef_search": 100}}
    collection = client.create_collection(
        "tried", configuration=index, embedding_function=None
    )
    stored = np.concatenate([targets, offsets[:, None] / e], axis=1).astype(np.float32)
    for start in range(0, len(stored), BATCH):
        part = stored[start : start + BATCH]
        collection.add(
            ids=[str(start + row) for row in range(len(part))], embeddings=part
        )
    asked = np.concatenate([queries, np.full((len(queries), 1), e)], axis=1).astype(
        np.float32
    )
    found = collection.query(query_embeddings=asked, n_results=10, include=[])["ids"]
    client.delete_collection("tried")
    pairs = zip(found, exact.tolist(), strict=True)
    return float(
        np.mean([len(set(map(int, ids)) & set(best)) / 10 for ids, best in pairs])
    )


def last_component() -> str:
    client, lines = chromadb.EphemeralClient(), []
    for name, (targets, queries, offsets) in galleries():
        once = float(np.std(offsets)) / float(np.sqrt(np.square(queries).mean()))
        raw = recall(client, (targets, queries, 0 * offsets), 1.0)
        tried = [
            recall(client, (targets, queries, offsets), times * once) for times in TIMES
        ]
        lines.append([name, *(f"{each:.4f}" for each in (raw, *tried))])
    return markdown(["data", "raw", *(f"{times:g} x" for times in TIMES)], lines)


def median(search: Callable[[list[float]], object], queries: np.ndarray) -> float:
    """Milliseconds."""
    seconds = []
    for query in queries.tolist():
        start = time.perf_counter()
        search(query)
        seconds.append(time.perf_counter() - start)
    return 1000 * float(np.median(seconds))


def costs(place: str, client: chromadb.ClientAPI) -> Iterator[list[str]]:
    gallery, bank, queries = files(
        EXAMPLES, "test_targets", "bank_queries", "test_queries"
    )
    photos = client.create_collection(
        "photos", configuration={"hnsw": {"space": "cosine"}}
    )
    for start in range(0, len(gallery), BATCH):
        rows = range(start, min(start + BATCH, len(gallery)))
        ids, metadatas = (
            [str(row) for row in rows],
            [{"even": row % 2 == 0} for row in rows],
        )
        photos.add(
            ids=ids, embeddings=gallery[rows], metadatas=metadatas, documents=ids
        )
    hubplugin.apply(open_store(client, photos), bank)
    both = (photos, HubCollection(client, photos))
    for name, how in WAYS.items():

        def asked(collection: Any, how: dict[str, Any] = how) -> float:
            return median(
                lambda query: collection.query(
                    query_embeddings=[query], n_results=10, **how
                ),
                queries[:150],
            )

        turns = [[asked(each) for each in both] for _ in range(3)]
        ratios = sorted(after / before for before, after in turns)
        yield [
            place,
            name,
            f"{turns[1][0]:.2f} ms",
            f"{ratios[1]:.2f} ({ratios[0]:.2f}-{ratios[2]:.2f})",
        ]


@contextmanager
def server(folder: str) -> Iterator[chromadb.ClientAPI]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).parent / "chroma"
    command = [
        program,
        "run",
        "--path",
        folder,
        "--host",
        "localhost",
        "--port",
        str(port),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(10)
        yield chromadb.HttpClient("localhost", port)
    finally:
        process.terminate()


def main() -> None:
    print(last_component())
    with tempfile.TemporaryDirectory() as folder, server(f"{folder}/server") as remote:
        lines = [
            *costs("folder", chromadb.PersistentClient(f"{folder}/embedded")),
            *costs("server", remote),
        ]
    print(
        markdown(["Chroma", "result", "raw", "corrected, times raw"], lines)
        + f"\n{machine(1)}"
    )


if __name__ == "__main__":
    main()
