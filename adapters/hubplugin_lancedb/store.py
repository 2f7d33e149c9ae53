"""A LanceDB table as a `Store`: `lancedb:FOLDER/TABLE`.

The table has a column `id` and a column `vector`, compared by cosine. A correction of `photos` is a copy of its
vectors, the table `photos__hubplugin_1`, which LanceDB's own search ranks by inner product, and its model,
`photos__hubplugin_1_model`. The manifest in the table `photos__hubplugin` says which copy searches use. `photos` itself
is never written to, so that each of its versions is its user's.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa

from hubplugin.copies import BATCH, Copy, CopyStore
from hubplugin.corrections import Manifest
from hubplugin.errors import StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.registry import without_secrets
from hubplugin.store import (
    Batch,
    ErrorTranslator,
    Hits,
    Id,
    as_store_error,
)

BATCH_ROWS = 4096
ERRORS = (RuntimeError, ValueError, OSError, LookupError)
OURS = {b"hubplugin": b"1"}
"""Metadata of the schemas of our tables."""

DOCUMENT = pa.schema([("content", pa.large_binary())], OURS)
"""Of the manifest and of a model."""

READING = timedelta(minutes=10)
"""How long a search may still read a version of our tables that has been written over."""


def open_url(url: str) -> LanceStore:
    """The store behind `lancedb:FOLDER/TABLE`, which may end in `?record=FOLDER`; raises StoreError if there is no such
    table."""
    path, _, record = url.removeprefix("lancedb:").partition("?record=")
    folder, _, table = path.rpartition("/")
    if not Path(folder).is_dir() or table not in _list_tables(lancedb.connect(folder)):
        raise StoreError(
            f"{without_secrets(url)}: there is no such table; expected lancedb:FOLDER/TABLE, and ?record=FOLDER at most"
        )
    store = LanceStore(folder, table)
    store.record = Path(record) if record else None
    return store


class LanceStore(CopyStore):
    """See `hubplugin.store.Store`, which says what each method does."""

    metric = Metric.COSINE
    shared = True
    joint, place = "_", "table"

    def __init__(self, folder: str, table: str):
        self.url, self.folder, self.name = (
            f"lancedb:{folder}/{table}",
            Path(folder),
            f"{table}__hubplugin",
        )
        newest = timedelta(0)  # each request reads what was written last, by whomever
        self._database = ErrorTranslator(lancedb, self.url, ERRORS).connect(
            folder, read_consistency_interval=newest
        )
        self.table = self._database.open_table(table)
        columns = {
            name: self.table.schema.field(name).type for name in self.table.schema.names
        }
        if "id" not in columns or not pa.types.is_fixed_size_list(
            columns.get("vector", pa.null())
        ):
            raise StoreError(
                f"{self.url} has the columns {', '.join(columns)}; expected an id and a vector among them"
            )
        self.dim = columns["vector"].list_size
        self.gallery = f"of {self.dim} dimensions"

    def count(self) -> int:
        return int(self.table.count_rows("vector IS NOT NULL"))

    def batches(
        self, copy: Copy | None, field: str | None, ids: Sequence[Id] | None = None
    ) -> Iterator[Batch]:
        if field is not None:
            raise StoreError(f"{self.url}: no field {field!r} is read of its targets")
        table = None if copy is None else self._open_copy(copy)
        copied = {} if table is None else self._row_numbers(table, ids)
        if ids is None:
            batches = self._read(
                self.table.search().where("vector IS NOT NULL").select(["id", "vector"])
            )
        else:  # a condition on vectors would read all of them
            batches = self._read_rows(
                self.table, [*self._row_numbers(self.table, ids).values()]
            )
        for batch in batches:
            targets, stored = (
                batch.filter(batch.column("vector").is_valid()),
                dict[Id, Sequence[float]](),
            )
            keys = targets.column("id").to_pylist()
            for part in self._read_rows(
                table, [copied[key] for key in keys if key in copied]
            ):
                stored |= zip(
                    part.column("id").to_pylist(),
                    _matrix(part.column("vector")),
                    strict=True,
                )
            yield self.batch(copy, keys, _matrix(targets.column("vector")), stored)

    def _row_numbers(self, table: Any, ids: Sequence[Id] | None) -> dict[Id, int]:
        """Where `table` has its targets, or `ids` of them: LanceDB's numbers of the rows."""
        search = table.search().select(["id"]).with_row_id(True)
        numbers = dict[Id, int]()
        for batch in self._read(
            search if ids is None else search.where(_is_among(ids))
        ):
            numbers |= zip(
                batch.column("id").to_pylist(),
                batch.column("_rowid").to_pylist(),
                strict=True,
            )
        return numbers

    def _read_rows(
        self, table: Any, numbers: Sequence[int]
    ) -> Iterator[pa.RecordBatch]:
        columns = ["id", "vector"]
        return (
            table.take_row_ids(numbers).select(columns).to_arrow().to_batches()
            if numbers
            else iter(())
        )

    def nearest(
        self,
        copy: Copy | None,
        queries: np.ndarray,
        k: int,
        among: Collection[Id] | None,
    ) -> Hits:
        table, distance = (
            (self.table, "cosine") if copy is None else (self._open_copy(copy), "dot")
        )
        search = (
            table.search([*queries], vector_column_name="vector")
            .distance_type(distance)
            .limit(k)
        )
        search = search.select(["id", "_distance"])
        hits = Hits([[] for _ in queries], [[] for _ in queries])
        for row in (
            search if among is None else search.where(_is_among(among))
        ).to_list():
            query = row.get(
                "query_index", 0
            )  # which LanceDB leaves out of the answer to one query
            hits.ids[query].append(row["id"])
            hits.scores[query].append(row["_distance"])
        return hits

    def require_writable(self, *, dry_run: bool = False) -> None:
        super().require_writable(dry_run=dry_run)
        batches = self._read(self.table.search().select(["id"]))
        ids = Counter(
            key for batch in batches for key in batch.column("id").to_pylist()
        )
        wrong = ids - Counter(ids.keys() - {None})
        if wrong:
            names = ", ".join(map(repr, list(wrong)[:3]))
            raise StoreError(
                f"{self.url}: each row needs an id of its own, which {names} is not; mend the ids, then apply"
            )

    def read_text(self) -> str | None:
        return (
            self._read_document(self.name).decode()
            if self._is_there(self.name)
            else None
        )

    def write_manifest(self, manifest: Manifest[Copy]) -> None:
        self._write_document(self.name, manifest.model_dump_json().encode())
        self._database.open_table(self.name).optimize(cleanup_older_than=READING)

    def delete_manifest(self) -> None:
        """LanceDB deletes a table file by file, so that only its last version is left before: an empty manifest."""
        if self._is_there(self.name):
            self._compact(self._database.open_table(self.name))
        super().delete_manifest()

    def read_model(self, version: Copy) -> OffsetModel:
        return OffsetModel.from_bytes(
            self._read_document(self.name_of(version.number, "model")), self.url
        )

    def write_model(self, version: Copy, model: OffsetModel) -> None:
        self.drop(self.name_of(version.number))
        self._write_document(self.name_of(version.number, "model"), model.to_bytes())

    def make_room(self, version: Copy) -> None:
        if not self._is_there(self.name_of(version.number)):
            columns = [
                self.table.schema.field("id"),
                pa.field("vector", pa.list_(pa.float32(), self.dim + 1)),
            ]
            self._database.create_table(
                self.name_of(version.number), pa.schema(columns, OURS).empty_table()
            )

    def write_copy(self, copy: Copy, ids: Sequence[Id], vectors: np.ndarray) -> None:
        table = self._open_copy(copy)
        column = pa.FixedSizeListArray.from_arrays(vectors.ravel(), self.dim + 1)
        rows = pa.table(
            [pa.array(ids, table.schema.field("id").type), column], table.schema
        )
        table.merge_insert(
            "id"
        ).when_matched_update_all().when_not_matched_insert_all().execute(rows)

    def switch(self, version: Copy) -> None:
        """Its table is made compact before; a version that a search may still read stays for a while."""
        table = self._open_copy(version)
        targets = {key for batch in self.batches(None, None) for key in batch.ids}
        gone = [key for key in self._row_numbers(table, None) if key not in targets]
        for start in range(0, len(gone), BATCH):
            table.delete(_is_among(gone[start : start + BATCH]))
        self._compact(table, READING if version == self.active() else timedelta(0))
        super().switch(version)

    def drop(self, name: str) -> None:
        if name in _list_tables(self._database):
            self._is_there(name)
            self._database.drop_table(name, ignore_missing=True)

    def _open_copy(self, copy: Copy) -> Any:
        return self._database.open_table(self.name_of(copy.number))

    def _read_document(self, name: str) -> bytes:
        rows = self._database.open_table(name).search().to_list()
        return bytes(rows[0].get("content", b"")) if len(rows) == 1 else b""

    def _write_document(self, name: str, content: bytes) -> None:
        rows = pa.Table.from_pylist([{"content": content}], DOCUMENT)
        self._database.create_table(
            name, rows, mode="overwrite" if self._is_there(name) else "create"
        )

    def _is_there(self, name: str) -> bool:
        """Whether there is this table of ours; raises StoreError if there is one of the user's."""
        if name not in _list_tables(self._database):
            return False
        try:
            schema = self._database.open_table(name).schema
        except StoreError as error:
            if (
                "not found" in str(error).lower()
            ):  # files that a kill has left of a table that was dropped
                return False
            raise
        if (schema.metadata or {}).items() >= OURS.items():
            return True
        raise StoreError(
            f"{self.url}: the table {name} holds something of yours; rename it, or drop it"
        )

    @staticmethod
    def _compact(table: Any, older_than: timedelta = timedelta(0)) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of readers of older versions, where nobody can read them
            table.optimize(cleanup_older_than=older_than)

    def _read(self, search: Any) -> Iterator[pa.RecordBatch]:
        try:
            yield from search.to_batches(BATCH_ROWS)
        except ERRORS as error:
            raise as_store_error(error, self.url) from error


def _is_among(ids: Collection[Id]) -> str:
    """The condition of a row whose id is one of `ids`."""
    words = (
        str(key) if isinstance(key, int) else "'" + key.replace("'", "''") + "'"
        for key in ids
    )
    return f"id IN ({', '.join(words)})" if ids else "false"


def _list_tables(database: Any) -> list[str]:
    names: list[str] = database.list_tables(limit=10_000).tables
    return names


def _matrix(column: pa.FixedSizeListArray) -> np.ndarray:
    values: np.ndarray = column.flatten().to_numpy(zero_copy_only=False)
    return values.reshape(len(column), -1)
