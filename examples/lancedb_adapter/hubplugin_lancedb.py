"""A hubplugin adapter for LanceDB tables, to show how little one is: `lancedb:FOLDER/TABLE`.

The table has a column `id` and a column `vector`, compared by cosine. A correction adds one column of d + 1
components, [t, offset], which LanceDB's own search ranks by inner product with [q, 1]. A second table holds the
models and says which of them is active. It keeps no earlier version, so it is no `Versioned` store.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.query import LanceVectorQueryBuilder

from hubplugin.errors import StoreError
from hubplugin.metric import Metric, augment_queries, augment_targets, normalise
from hubplugin.model import OffsetModel
from hubplugin.store import Batch, Correction, Hits, Id, Store, Writing, require_ungrouped
from hubplugin.vectors import Progress

BATCH_ROWS = 4096
BOOK = pa.schema(
    [
        ("column", pa.string()),
        ("activated", pa.int64()),  # 0: half-written; the largest is active
        ("model", pa.binary()),
    ]
)


def open_url(url: str) -> LanceStore:
    """The store behind `lancedb:FOLDER/TABLE`; raises StoreError if there is no such table."""
    folder, _, table = url.removeprefix("lancedb:").rpartition("/")
    if not Path(folder).is_dir() or table not in _tables(lancedb.connect(folder)):
        raise StoreError(f"{url}: there is no such table; expected lancedb:FOLDER/TABLE")
    return LanceStore(folder, table)


class LanceStore(Store):
    """See `hubplugin.store.Store`, which says what each method does."""

    metric = Metric.COSINE

    def __init__(self, folder: str, table: str):
        self.url = f"lancedb:{folder}/{table}"
        self._database = lancedb.connect(folder)
        self.table = self._database.open_table(table)
        self._book_name = f"{table}__hubplugin"
        self.dim = self.table.schema.field("vector").type.list_size

    def count(self) -> int:
        return self.table.count_rows()

    def scan(self, group_by: str | None = None) -> Iterator[Batch]:
        require_ungrouped(self, group_by)
        row = self._row("active")
        return self.batches(row["column"] if row else None)

    def batches(self, column: str | None) -> Iterator[Batch]:
        """The targets with the offsets in `column`."""
        for batch in self.table.search().select(["id", "vector", *([column] if column else [])]).to_batches(BATCH_ROWS):
            vectors = _matrix(batch.column("vector"), self.dim)
            offsets = np.full(len(vectors), np.nan, np.float32)
            if column:
                stored = batch.column(column)
                there = stored.is_valid().to_numpy(zero_copy_only=False)
                offsets[there] = _matrix(stored.drop_null(), self.dim + 1)[:, -1]
            yield Batch(batch.column("id").to_pylist(), vectors, offsets)

    def correction(self) -> Correction | None:
        row = self._row("active") or self._row("half-written")
        return Correction(OffsetModel.from_bytes(row["model"], self.url), row["state"] == "active") if row else None

    def begin(self, model: OffsetModel, progress: Progress | None = None) -> LanceWriting:
        column = f"hub_{model.fingerprint}"
        if self._book_name not in _tables(self._database):
            self._database.create_table(self._book_name, schema=BOOK)
        if column not in {row["column"] for row in self._rows()}:
            self._book.add([{"column": column, "model": model.to_bytes(), "activated": 0}])
        if column not in self.table.schema.names:
            self.table.add_columns(pa.field(column, pa.list_(pa.float32(), self.dim + 1)))
        return LanceWriting(self, column)

    def activate(self, column: str) -> None:
        """Searches use `column` from now on; all others are deleted."""
        last = max(row["activated"] for row in self._rows())
        self._book.update(where=f"column = '{column}'", values={"activated": last + 1})
        for row in self._rows():
            if row["column"] != column:
                self._forget(row["column"])

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        row, unit = self._row("active"), normalise(queries, "queries")
        ids, scores = [], []
        for query, longer in zip(unit, augment_queries(unit, self.metric), strict=True):
            if row is None or raw:
                found = self._nearest(query, "vector", "cosine", k)
            else:  # what another program added has no offset yet: it is found by its raw similarity
                found = self._nearest(longer, row["column"], "dot", k, f"{row['column']} IS NOT NULL")
                found += self._nearest(query, "vector", "cosine", k, f"{row['column']} IS NULL")
            best = sorted(found, key=lambda hit: -hit[1])[:k]
            ids.append([key for key, _ in best])
            scores.append([score for _, score in best])
        return Hits(ids, scores)

    def remove(self, progress: Progress | None = None) -> None:
        for row in self._rows():
            self._forget(row["column"])
        if self._book_name in _tables(self._database):
            self._database.drop_table(self._book_name)

    def _nearest(
        self, query: np.ndarray, column: str, metric: Literal["cosine", "dot"], k: int, where: str | None = None
    ) -> list[tuple[Id, float]]:
        search = cast(LanceVectorQueryBuilder, self.table.search(query, vector_column_name=column))
        search = search.distance_type(metric).select(["id", "_distance"]).limit(k)
        rows = (search.where(where) if where else search).to_list()
        return [(row["id"], 1 - row["_distance"]) for row in rows]  # LanceDB's distance is 1 - s for cosine and dot

    def _rows(self) -> list[dict[str, Any]]:
        if self._book_name not in _tables(self._database):
            return []
        rows: list[dict[str, Any]] = self._book.to_arrow().to_pylist()
        last = max((row["activated"] for row in rows), default=0)
        for row in rows:
            row["state"] = "active" if row["activated"] == last > 0 else "half-written"
        return rows

    def _row(self, state: str) -> dict[str, Any] | None:
        return next((row for row in self._rows() if row["state"] == state), None)

    @property
    def _book(self) -> lancedb.table.Table:
        return self._database.open_table(self._book_name)

    def _forget(self, column: str) -> None:
        self._book.delete(f"column = '{column}'")
        if column in self.table.schema.names:
            self.table.drop_columns([column])


class LanceWriting(Writing):
    """The offsets in `column`, which no search reads before it is activated."""

    def __init__(self, store: LanceStore, column: str):
        self._store, self._column = store, column

    def scan(self) -> Iterator[Batch]:
        return self._store.batches(self._column)

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        rows = augment_targets(normalise(batch.vectors, self._store.url), offsets, self._store.metric)
        column = pa.FixedSizeListArray.from_arrays(rows.ravel(), self._store.dim + 1)
        update = pa.table({"id": pa.array(batch.ids), self._column: column})
        self._store.table.merge_insert("id").when_matched_update_all().execute(update)

    def activate(self) -> None:
        self._store.activate(self._column)


def _tables(database: lancedb.DBConnection) -> list[str]:
    names: list[str] = database.list_tables(limit=10_000).tables
    return names


def _matrix(column: pa.Array, width: int) -> np.ndarray:
    values: np.ndarray = column.flatten().to_numpy(zero_copy_only=False)
    return values.reshape(-1, width)
