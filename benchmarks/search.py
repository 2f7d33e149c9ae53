"""Search before and after a correction, in every type of Faiss index and in both storages of Qdrant, in one table.

    python -m benchmarks.search [TYPE ...] [--rounds 600]      # some types: their rows alone are taken anew

Raw and corrected searches take turns on the same queries, one thread each, k = 10. Recall@10 of the raw search is
against the exact raw ranking, of the corrected one against the exact corrected ranking (DBSN, tau 0.05). Qdrant is its
engine in this process (Edge), over a graph; `vector` is the query that a server gets for storage="vector", on a shard
that holds the second vector. Writes benchmarks/results/search.json and the table of docs/speed.md.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import faiss
import numpy as np
import qdrant_edge as edge
import typer
from rich.console import Console
from rich.progress import track

import hubplugin
import hubplugin_faiss
from benchmarks.faiss_types import TYPES, built, exact, load, set_search
from benchmarks.tables import CODE_SEARCH, EXAMPLES, RESULTS, ROOT, machine, markdown, write_table
from hubplugin.jobs.write import write
from hubplugin.metric import Metric, augment_queries, augment_targets
from hubplugin_qdrant.edge import EdgeStore

K, BATCH = 10, 100
QDRANT = "Qdrant Edge"
Search = Callable[[np.ndarray], object]
"""Queries [q, d] to whatever the engine gives."""


@dataclass(frozen=True)
class Searched:
    """Milliseconds a single query (median, 95th and 99th percentile), queries a second in batches, recall@10."""

    p50: float
    p95: float
    p99: float
    per_second: float
    recall: float


def measured(
    searches: tuple[Search, Search], ids: Callable[[object], np.ndarray], truths: tuple[np.ndarray, ...],
    queries: np.ndarray, rounds: int,
) -> tuple[Searched, Searched]:  # fmt: skip
    single: list[list[float]] = [[], []]
    batched: list[list[float]] = [[], []]
    for times, size, count in ((single, 1, rounds), (batched, BATCH, rounds // 20)):
        for number in range(count):
            start = number * size % (len(queries) - size + 1)
            part = queries[start : start + size]
            for which in (0, 1) if number % 2 else (1, 0):
                begin = time.perf_counter()
                searches[which](part)
                times[which].append(time.perf_counter() - begin)
    results = []
    for which, search in enumerate(searches):
        found = ids(search(queries))
        hits = [len(np.intersect1d(a, b)) / K for a, b in zip(found, truths[which], strict=True)]
        quantiles = [float(1e3 * np.quantile(single[which], share)) for share in (0.5, 0.95, 0.99)]
        results.append(Searched(*quantiles, BATCH / float(np.median(batched[which])), float(np.mean(hits))))
    return results[0], results[1]


def qdrant(
    gallery: np.ndarray, model: hubplugin.OffsetModel, folder: Path
) -> Iterator[tuple[str, tuple[Search, Search]]]:
    """Searches of a shard over a graph: raw, and corrected in each storage."""
    n, d = gallery.shape
    offsets = model.offsets(gallery)
    vectors = {"": edge.EdgeVectorParams(d, edge.Distance.Cosine)}
    vectors["hub"] = edge.EdgeVectorParams(d + 1, edge.Distance.Dot)
    shard = edge.EdgeShard.create(str(folder), edge.EdgeConfig(vectors))
    second = augment_targets(gallery, offsets, Metric.COSINE)
    for start in range(0, n, 1_000):
        rows = range(start, min(start + 1_000, n))
        points = [edge.Point(row, {"": gallery[row].tolist(), "hub": second[row].tolist()}, {}) for row in rows]
        shard.update(edge.UpdateOperation.upsert_points(points))
    shard.optimize()
    store = EdgeStore(shard, folder)

    def raw(queries: np.ndarray) -> object:
        return [[point.id for point in store.query(query, K, raw=True)] for query in queries]

    def through(vector: str, asked: Callable[[np.ndarray], np.ndarray]) -> Search:
        def search(queries: np.ndarray) -> object:
            nearest = (edge.Query.Nearest(query.tolist(), vector or None) for query in asked(queries))
            return [[point.id for point in shard.query(edge.QueryRequest(K, 0, query))] for query in nearest]

        return search

    yield (
        f"{QDRANT}, vector",
        (through("", lambda queries: queries), through("hub", lambda queries: augment_queries(queries, Metric.COSINE))),
    )
    write(store, model)
    shard.optimize()

    def corrected(queries: np.ndarray) -> object:
        return [[point.id for point in store.query(query, K)] for query in queries]

    yield f"{QDRANT}, payload", (raw, corrected)
    shard.close()


def main(
    types: Annotated[
        list[str] | None, typer.Argument(help="Factory strings, L2: in front for Euclidean; or Qdrant Edge.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Single queries timed.")] = 600,
) -> None:
    folder = CODE_SEARCH if CODE_SEARCH.is_dir() else EXAMPLES
    faiss.omp_set_num_threads(1)
    bank, queries, gallery = load(folder)
    queries = queries[:1_000]
    model = hubplugin.fit(gallery, bank[:4_000], "dbsn", tau=0.05)
    truths = tuple(exact(queries, gallery, offsets) for offsets in (np.zeros(len(gallery)), model.offsets(gallery)))
    page, stored = ROOT / "docs" / "speed.md", RESULTS / "search.json"
    results: dict[str, tuple[Searched, Searched]] = {}
    if types and stored.exists():
        known = json.loads(stored.read_text())["stores"]
        results = {name: (Searched(**raw), Searched(**corrected)) for name, (raw, corrected) in known.items()}
    kinds = [kind for kind in types or TYPES if kind != QDRANT]
    for kind in track(kinds, "Faiss", console=Console(stderr=True), transient=True):
        raw = built(kind, gallery)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the losses that it warns of stand in the table
            corrected = hubplugin_faiss.upgrade(raw, model)
        set_search(corrected)
        searches = tuple(lambda part, index=index: index.search(part, K) for index in (raw, corrected))
        results[kind] = measured(searches, lambda found: found[1], truths, queries, rounds)
    if not types or QDRANT in types:
        with tempfile.TemporaryDirectory() as place:
            for name, searches in qdrant(gallery, model, Path(place)):
                results[name] = measured(searches, np.array, truths, queries, rounds)
    head = ["store", "recall raw", "corrected", "ms raw p50", "p95", "p99", "ms corrected p50", "p95", "p99", "times",
            "a second, raw", "corrected", "times"]  # fmt: skip
    lines = [
        [
            name, f"{a.recall:.4f}", f"{b.recall:.4f}", f"{a.p50:.3f}", f"{a.p95:.3f}", f"{a.p99:.3f}", f"{b.p50:.3f}",
            f"{b.p95:.3f}", f"{b.p99:.3f}", f"{b.p50 / a.p50:.2f}", f"{a.per_second:,.0f}", f"{b.per_second:,.0f}",
            f"{a.per_second / b.per_second:.2f}",
        ]
        for name, (a, b) in results.items()
    ]  # fmt: skip
    command = f"python -m benchmarks.search --rounds {rounds}"
    about = f"{len(gallery):,} targets of {folder.name}, {len(queries):,} queries, {gallery.shape[1]} dimensions"
    found = {name: [asdict(side) for side in sides] for name, sides in results.items()}
    text = json.dumps({"machine": machine(1), "command": command, "about": about, "stores": found}, indent=1)
    RESULTS.mkdir(exist_ok=True)
    stored.write_text(text + "\n")
    table = markdown(head, lines)
    print(table)
    write_table(page, "search", f"{about}; {machine(1)}; `{command}`\n\n{table}")


if __name__ == "__main__":
    typer.run(main)
