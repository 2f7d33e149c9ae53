"""What a search costs, and what it finds, where candidates are ranked again (Chroma).

    python -m benchmarks.candidates

First recall@10 against the exact corrected ranking on six galleries, with Chroma's HNSW
(ef_search 100) and the candidates that `apply` has chosen; raw is the index itself
against the exact raw ranking, and time is the processor's, corrected over raw, for ids
alone. Then how long a corrected query takes beside a raw one: examples/data, one query a
call, ten results, three pairs of turns, the ratio of the middle one and the range.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chromadb
import numpy as np
from chromadb.api import ClientAPI

import hubplugin
from benchmarks.bank_settings import files
from benchmarks.tables import EXAMPLES, machine, markdown
from hubplugin.store import Hits, Store
from hubplugin_chroma import HubCollection, open_store

BATCH = 400
WAYS: dict[str, dict[str, Any]] = {
    "all content": {},
    "ids": {"include": ["distances"]},
    "filter": {"where": {"even": True}},
}


@dataclass(frozen=True)
class Gallery:
    """Targets [n, d] that are searched with queries [m, d]; offsets [n] are those of
    `model`, or others that are written in their place."""

    name: str
    model: hubplugin.OffsetModel
    targets: np.ndarray
    queries: np.ndarray
    offsets: np.ndarray


def unit(vectors: np.ndarray) -> np.ndarray:
    return np.asarray(
        vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32
    )


def galleries() -> Iterator[Gallery]:
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
        name = f"examples/data, {method}"
        yield Gallery(name, model, targets, queries, model.offsets(targets))
    centres = unit(rng.normal(size=(40, 128)))

    def clustered(count: int, noise: float) -> np.ndarray:
        return unit(
            centres[rng.integers(40, size=count)]
            + noise * unit(rng.normal(size=(count, 128)))
        )

    near, bank, queries = clustered(4000, 0.6), clustered(600, 0.9), clustered(300, 0.9)
    model = hubplugin.fit(near, bank, "sn", tau=0.02)
    yield Gallery("clusters, sn", model, near, queries, model.offsets(near))
    far = near * rng.uniform(0.5, 3, size=(4000, 1)).astype(np.float32)
    model = hubplugin.fit(far, bank, "is", metric="dot", tau=0.2)
    name = "clusters of many lengths, is, dot"
    yield Gallery(name, model, far, queries, model.offsets(far))
    lengths = rng.uniform(0.5, 3, size=(3000, 1))
    spread = (unit(rng.normal(size=(3000, 32))) * lengths).astype(np.float32)
    queries = rng.normal(size=(200, 32)).astype(np.float32)
    offsets = (3 * rng.normal(size=3000)).astype(np.float32)
    bank = rng.normal(size=(300, 32)).astype(np.float32)
    model = hubplugin.fit(spread, bank, "nnn", metric="dot")
    name = "lengths and offsets at random, dot"
    yield Gallery(name, model, spread, queries, offsets)


def create(client: ClientAPI, targets: np.ndarray, space: str) -> chromadb.Collection:
    """The collection `photos` of `targets`, under their row numbers."""
    photos = client.create_collection(
        "photos",
        configuration={"hnsw": {"space": space, "ef_search": 100}},
    )
    for start in range(0, len(targets), BATCH):
        rows = range(start, min(start + BATCH, len(targets)))
        ids = [str(row) for row in rows]
        metadatas = [{"even": row % 2 == 0} for row in rows]
        photos.add(ids, targets[rows], metadatas=metadatas, documents=ids)
    return photos


def correct(store: Store, gallery: Gallery) -> None:
    """Writes the offsets of `gallery` into `store`, also where they are not those of its model."""
    with store.begin(gallery.model) as writing:
        for batch in writing.scan():
            rows = [int(key) for key in batch.ids]
            writing.write(batch, gallery.offsets[rows])
        writing.activate()


def recall(hits: Hits, scores: np.ndarray) -> float:
    """The share of the first ten by exact `scores` [m, n] that is found."""
    exact = np.argsort(-scores, axis=1)[:, :10]
    shares = [
        len({int(key) for key in ids} & set(best)) / 10
        for ids, best in zip(hits.ids, exact.tolist(), strict=True)
    ]
    return float(np.mean(shares))


def six_galleries() -> str:
    lines = []
    for gallery in galleries():
        client = chromadb.EphemeralClient()
        space = "ip" if gallery.model.metric.value == "dot" else "cosine"
        photos = create(client, gallery.targets, space)
        store = open_store(client, photos)
        correct(store, gallery)
        similarity = gallery.queries.astype(np.float64) @ gallery.targets.T
        raw = recall(store.search(gallery.queries, 10, raw=True), similarity)
        scores = similarity + gallery.offsets
        corrected = recall(store.search(gallery.queries, 10), scores)
        version = store.active()
        assert version is not None
        both = (photos, HubCollection(client, photos))
        how = {"include": ["distances"]}
        ratio, _ = compare(both, gallery.queries, how, time.process_time)
        lines.append(
            [
                gallery.name,
                f"{len(gallery.targets):,}",
                f"{raw:.4f}",
                f"{corrected:.4f}",
                str(version.candidates(10)),
                ratio,
            ]
        )
        store.remove()
        client.delete_collection("photos")
    head = ["data", "targets", "raw", "corrected", "candidates", "time"]
    return markdown(head, lines)


def median(
    search: Callable[[list[float]], object],
    queries: np.ndarray,
    clock: Callable[[], float],
) -> float:
    """Milliseconds."""
    seconds = []
    for query in queries.tolist():
        start = clock()
        search(query)
        seconds.append(clock() - start)
    return 1000 * float(np.median(seconds))


def compare(
    both: Sequence[chromadb.Collection],
    queries: np.ndarray,
    how: dict[str, Any],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[str, float]:
    """What the second of `both` costs, times the first, and the milliseconds of that."""

    def ask(collection: chromadb.Collection) -> float:
        return median(
            lambda query: collection.query([query], n_results=10, **how),
            queries[:150],
            clock,
        )

    turns = [[ask(each) for each in both] for _ in range(3)]
    ratios = sorted(after / before for before, after in turns)
    return f"{ratios[1]:.2f} ({ratios[0]:.2f}-{ratios[2]:.2f})", turns[1][0]


def costs(place: str, client: ClientAPI) -> Iterator[list[str]]:
    targets, bank, queries = files(
        EXAMPLES, "test_targets", "bank_queries", "test_queries"
    )
    photos = create(client, targets, "cosine")
    hubplugin.apply(open_store(client, photos), bank)
    both = (photos, HubCollection(client, photos))
    for name, how in WAYS.items():
        ratio, raw = compare(both, queries, how)
        yield [place, name, f"{raw:.2f} ms", ratio]


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """HOST:PORT of a Chroma server of its own package."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("chroma")
    command = [program, "run", "--path", folder, "--port", str(port)]
    with (
        open(f"{folder}.log", "wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            for _ in range(600):
                with socket.socket() as probe:
                    if probe.connect_ex(("localhost", port)) == 0:
                        break
                time.sleep(0.1)
            yield f"localhost:{port}"
        finally:
            process.terminate()


def main() -> None:
    print(six_galleries())
    with tempfile.TemporaryDirectory() as folder, server(Path(folder, "s")) as remote:
        lines = [
            *costs("folder", chromadb.PersistentClient(f"{folder}/embedded")),
            *costs("server", chromadb.HttpClient(*remote.split(":"))),
        ]
    print(
        markdown(["Chroma", "result", "raw", "corrected, times raw"], lines)
        + f"\n{machine(1)}"
    )


if __name__ == "__main__":
    main()
