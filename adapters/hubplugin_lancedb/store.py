"""A LanceDB table as a `Store`: `lancedb:FOLDER/TABLE`.

The table has a column `id` and a column `vector`, compared by cosine. A correction is one more column, `hubplugin_1`,
the next `hubplugin_2`, which LanceDB's own search ranks by inner product. The table `TABLE__hubplugin` holds the
models, a row each, and says which column searches use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.query import LanceVectorQueryBuilder

from hubplugin.copies import Copy, CopyStore, State
from hubplugin.errors import StoreError
from hubplugin.metric import Metric, normalise
from hubplugin.model import OffsetModel
from hubplugin.registry import without_secrets
from hubplugin.store import Batch, Hits, Id, require_ungrouped
from hubplugin.vectors import Progress

BATCH_ROWS = 4096
OURS = re.compile(r"hubplugin_\d+").fullmatch
BOOK = pa.schema(
    [
        ("number", pa.int64()),
        ("place", pa.int64()),  # in the list of versions; -1: not listed
        ("state", pa.string()),
        ("made", pa.string()),
        ("fingerprint", pa.string()),
        ("model", pa.large_binary()),
    ]
)


def open_url(url: str) -> LanceStore:
    """The store behind `lancedb:FOLDER/TABLE`; raises StoreError if there is no such table."""
    folder, _, table = url.removeprefix("lancedb:").rpartition("/")
    if not Path(folder).is_dir() or table not in _tables(lancedb.connect(folder)):
        raise StoreError(f"{without_secrets(url)}: there is no such table; expected lancedb:FOLDER/TABLE")
    return LanceStore(folder, table)


class LanceStore(CopyStore):
    """See `hubplugin.store.Store`, which says what each method does."""

    metric = Metric.COSINE

    def __init__(self, folder: str, table: str):
        self.url, self.folder = f"lancedb:{folder}/{table}", Path(folder)
        self._database = lancedb.connect(folder)
        self.table = self._database.open_table(table)
        self._book_name = f"{table}__hubplugin"
        columns = {name: self.table.schema.field(name).type for name in self.table.schema.names}
        if "id" not in columns or not pa.types.is_fixed_size_list(columns.get("vector", pa.null())):
            raise StoreError(f"{self.url} has the columns {', '.join(columns)}; expected an id and a vector among them")
        self.dim = columns["vector"].list_size
        for name, kind in columns.items():
            if OURS(name) and kind != pa.list_(pa.float32(), self.dim + 1):
                raise StoreError(f"{self.url}: the column {name} holds something of yours; rename it, or drop it")

    def count(self) -> int:
        return self.table.count_rows("vector IS NOT NULL")

    def batches(self, copy: Copy | None, group_by: str | None) -> Iterator[Batch]:
        require_ungrouped(self, group_by)
        wanted = ["id", "vector", *([] if copy is None else [_column(copy)])]
        for read in self.table.search().select(wanted).to_batches(BATCH_ROWS):
            batch = read.filter(read.column("vector").is_valid())
            ids, stored = batch.column("id").to_pylist(), {}
            if copy is not None:
                there = batch.filter(batch.column(_column(copy)).is_valid())
                rows = _matrix(there.column(_column(copy)), self.dim + 1)
                stored = dict(zip(there.column("id").to_pylist(), rows, strict=True))
            yield self.batch(copy, ids, _matrix(batch.column("vector"), self.dim), stored)

    def nearest(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        copy, unit = None if raw else self.copy_in("active"), normalise(queries, "queries")
        if copy is None:
            return self._found(unit, "vector", "cosine", k)
        model, column = self.model_of(copy), _column(copy)
        asked = model.queries(unit)
        found = self._found(self.augmented_queries(model, unit), column, "dot", k, f"{column} IS NOT NULL")
        neutral = self._found(asked, "vector", "cosine", k, f"{column} IS NULL")  # what other programs added
        return self.corrected(model, asked, k, found, neutral)

    def _found(
        self, queries: np.ndarray, column: str, metric: Literal["cosine", "dot"], k: int, where: str | None = None
    ) -> Hits:
        hits = Hits([], [])
        for query in queries:
            search = cast(LanceVectorQueryBuilder, self.table.search(query, vector_column_name=column))
            search = search.distance_type(metric).select(["id", "_distance"]).limit(k)
            rows = (search.where(where) if where else search).to_list()
            hits.ids.append([row["id"] for row in rows])
            hits.scores.append([row["_distance"] for row in rows])
        return hits

    def copies(self) -> list[Copy]:
        listed = sorted((row for row in self._rows() if row["place"] >= 0), key=lambda row: row["place"])
        return [Copy(row["number"], cast(State, row["state"]), row["made"], row["fingerprint"]) for row in listed]

    def list_copies(self, copies: Sequence[Copy]) -> None:
        models = {row["number"]: row["model"] for row in self._rows(model=True)}
        rows = [{"place": place, "model": models[copy.number], **vars(copy)} for place, copy in enumerate(copies)]
        self._database.create_table(self._book_name, rows, schema=BOOK, mode="overwrite")
        columns = {_column(copy) for copy in copies if copy.state != "previous"}
        gone = [name for name in self.table.schema.names if OURS(name) and name not in columns]
        if gone:
            self.table.drop_columns(gone)

    def create_copy(self, copy: Copy, model: OffsetModel) -> None:
        self._book().add([{"place": -1, "model": model.to_bytes(), **vars(copy)}])
        self.table.add_columns(pa.field(_column(copy), pa.list_(pa.float32(), self.dim + 1)))

    def stored_model(self, copy: Copy) -> OffsetModel:
        content = next(bytes(row["model"]) for row in self._rows(model=True) if row["number"] == copy.number)
        return OffsetModel.from_bytes(content, self.url)

    def write_copy(self, copy: Copy, ids: Sequence[Id], vectors: np.ndarray) -> None:
        column = pa.FixedSizeListArray.from_arrays(vectors.ravel(), self.dim + 1)
        update = pa.table({"id": pa.array(ids), _column(copy): column})
        self.table.merge_insert("id").when_matched_update_all().execute(update)

    def remove(self, progress: Progress | None = None) -> None:
        if self._book_name in _tables(self._database):
            self.list_copies([])  # searches are raw from here on
            self._database.drop_table(self._book_name)

    def _rows(self, model: bool = False) -> list[dict[str, Any]]:
        """What the book says; with the models themselves only if asked for."""
        if self._book_name not in _tables(self._database):
            return []
        wanted = [name for name in BOOK.names if model or name != "model"]
        rows: list[dict[str, Any]] = self._book().search().select(wanted).limit(1000).to_list()
        return rows

    def _book(self) -> lancedb.table.Table:
        return self._database.open_table(self._book_name)


def _column(copy: Copy) -> str:
    return f"hubplugin_{copy.number}"


def _tables(database: lancedb.DBConnection) -> list[str]:
    names: list[str] = database.list_tables(limit=10_000).tables
    return names


def _matrix(column: pa.Array, width: int) -> np.ndarray:
    values: np.ndarray = column.flatten().to_numpy(zero_copy_only=False)
    return values.reshape(-1, width)
