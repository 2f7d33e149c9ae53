"""A query log as the bank, through real stores: R@1 of other wordings of what was asked, and of what never was.

    python -m benchmarks.log_in_stores [--data FOLDER] [--splits 2] [--url http://localhost:6333]
                                       [--write docs/banks.md]

Each log corrects a Faiss file, searched by plain Faiss, a Qdrant shard (Qdrant Edge) and, with `--url`, a collection on
a Qdrant server, searched by the wrapped client, as `hubplugin apply` does and with nothing else said. Where the guard
refuses, that is shown, and the correction is applied all the same (`force`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import faiss
import numpy as np
import qdrant_edge
import torch
from qdrant_client import QdrantClient, models

import hubplugin
import hubplugin_qdrant
from benchmarks.bank_settings import Family, Setting, package_log, popular, wordings_log
from benchmarks.tables import SHARED, machine, markdown, write_table
from hubplugin.store import Store
from hubplugin_qdrant import HubQdrantClient

Searched = dict[str, list[float]]
"""R@1 in percent, raw and corrected, by test."""


def recall(found: np.ndarray, truth: np.ndarray) -> float:
    return 100 * float((found == truth).mean())


def applied(store: Store, bank: np.ndarray) -> bool:
    """Corrects the store in place; whether the guard let it."""
    try:
        hubplugin.apply(store, bank)
    except hubplugin.CorrectionRefused as refusal:
        print(f"{len(bank)} logged queries: {refusal}", file=sys.stderr, flush=True)
        hubplugin.apply(store, bank, force=True)
        return False
    return True


def through_faiss(setting: Setting, folder: Path) -> tuple[Searched, bool]:
    file = str(folder / "gallery.faiss")
    index = faiss.IndexFlatIP(setting.targets.shape[1])
    index.add(setting.targets)
    faiss.write_index(index, file)

    def search() -> Searched:
        index = faiss.read_index(file)
        tests = setting.tests.items()
        return {name: [recall(index.search(queries, 1)[1][:, 0], truth)] for name, (queries, truth) in tests}

    return before_and_after(search, partial(applied, hubplugin.open_store(f"faiss:{file}"), setting.bank))


def through_qdrant(setting: Setting, folder: Path) -> tuple[Searched, bool]:
    path = folder / "qdrant"
    path.mkdir()
    size = setting.targets.shape[1]
    configuration = qdrant_edge.EdgeConfig(qdrant_edge.EdgeVectorParams(size, qdrant_edge.Distance.Cosine))
    shard = qdrant_edge.EdgeShard.create(str(path), configuration)
    points = [qdrant_edge.Point(row, vector.tolist(), {}) for row, vector in enumerate(setting.targets)]
    shard.update(qdrant_edge.UpdateOperation.upsert_points(points))
    shard.close()
    store = hubplugin.open_store(f"qdrant-edge:{path}")

    def search() -> Searched:
        tests = setting.tests.items()
        found = {name: np.array(store.search(queries, 1).ids)[:, 0] for name, (queries, _) in tests}
        return {name: [recall(found[name], truth)] for name, (_, truth) in tests}

    try:
        return before_and_after(search, partial(applied, store, setting.bank))
    finally:
        store.shard.close()


def through_server(url: str, setting: Setting, folder: Path) -> tuple[Searched, bool]:
    client = QdrantClient(url=url)
    name = f"log-{uuid.uuid4().hex[:8]}"
    vectors = {"text": models.VectorParams(size=setting.targets.shape[1], distance=models.Distance.COSINE)}
    client.create_collection(name, vectors)
    client.upload_collection(name, {"text": setting.targets}, ids=range(len(setting.targets)), wait=True)

    def search() -> Searched:
        wrapped, found = HubQdrantClient.wrap(client), {}  # a new one: an old one looks for corrections every 10 s
        for test, (queries, truth) in setting.tests.items():
            requests = [models.QueryRequest(query=query, using="text", limit=1) for query in queries.tolist()]
            answers = [answer for part in batched(requests, 100) for answer in wrapped.query_batch_points(name, part)]
            found[test] = [recall(np.array([answer.points[0].id for answer in answers]), truth)]
        return found

    try:
        return before_and_after(
            search, partial(applied, hubplugin_qdrant.open_store(client, name, vector="text"), setting.bank)
        )
    finally:
        for each in (name, f"{name}--hub"):
            client.delete_collection(each)


def batched(requests: list[models.QueryRequest], size: int) -> Iterator[list[models.QueryRequest]]:
    return (requests[start : start + size] for start in range(0, len(requests), size))


def before_and_after(search: Callable[[], Searched], correct: Callable[[], bool]) -> tuple[Searched, bool]:
    before = search()
    passed = correct()
    after = search()
    return {name: before[name] + after[name] for name in before}, passed


def logs(data: Path) -> list[Family]:
    """The smaller a log, the more draws: only its own targets are tested as asked."""
    debian, tldr = data / "debian", data / "tldr_log"
    found = [
        Family(f"packages, log of {log:,}", "log", debian, splits, partial(package_log, debian, log))
        for log, splits in ((1500, 1), (300, 3), (100, 6))
    ]
    return [*found, Family("commands, popular log", "popular log", tldr, 1, partial(wordings_log, tldr, popular))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=SHARED, help="folder of debian and tldr_log")
    parser.add_argument("--splits", type=int, default=99, help="at most so many draws a log")
    parser.add_argument("--url", help="of a Qdrant server, as a third store")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    given = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    stores = [("Faiss file", through_faiss), ("Qdrant shard", through_qdrant)]
    if given.url:
        stores.append(("Qdrant collection", partial(through_server, given.url)))
    lines = []
    for family in logs(given.data):
        if not family.source.is_dir():
            print(f"{family.name}: no folder {family.source}; pass --data", file=sys.stderr)
            continue
        for store, through in stores:
            results, passed = [], []
            for seed in range(min(given.splits, family.splits)):
                with tempfile.TemporaryDirectory() as folder:
                    searched, let_through = through(family.draw(seed), Path(folder))
                results.append(searched)
                passed.append(let_through)
            cells = []
            for name in ("asked", "not asked"):
                raw, corrected = np.mean([searched[name] for searched in results], axis=0)
                cells.append(f"{raw:.1f} -> {corrected:.1f} ({corrected - raw:+.1f})")
            lines.append([family.name, store, str(len(results)), *cells, f"{sum(passed)} of {len(passed)}"])
            print(lines[-1], file=sys.stderr, flush=True)
    head = ["bank", "store", "draws", "R@1, asked before", "R@1, not asked", "passed by the guard"]
    table = f"{machine(1)}\n\n" + markdown(head, lines)
    print(table)
    if given.write:
        write_table(given.write, "log in stores", table)


if __name__ == "__main__":
    main()
