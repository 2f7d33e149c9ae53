"""A LanceDB table as a `Store`: `lancedb:FOLDER/TABLE`.

The table has a column `id` and a column `vector`, compared by cosine. A correction of `photos` is a copy of its
vectors, the table `photos__hubplugin_1`, which LanceDB's own search ranks by inner product, and its model,
`photos__hubplugin_1_model`. The table `photos__hubplugin` says which copy searches use. `photos` itself is never
written to, so that each of its versions is its user's.
"""

from __future__ import annotations

import re
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
from hubplugin.errors import StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.registry import without_secrets
from hubplugin.store import Batch, Hits, Id, Told, require_ungrouped, told
from hubplugin.vectors import Progress

BATCH_ROWS = 4096
ERRORS = (RuntimeError, ValueError, OSError, LookupError)
OURS = {b"hubplugin": b"1"}
"""Metadata of the schemas of our tables."""

LIST = pa.schema(
    [
        ("number", pa.int64()),
        ("state", pa.string()),
        ("made", pa.string()),
        ("fingerprint", pa.string()),
        ("dim", pa.int64()),
    ],
    OURS,
)
COPY = [name for name in LIST.names if name != "dim"]
MODEL = pa.schema([("model", pa.large_binary())], OURS)

READING = timedelta(minutes=10)
"""How long a search may still read a version of our tables that has been written over."""


def open_url(url: str) -> LanceStore:
    """The store behind `lancedb:FOLDER/TABLE`; raises StoreError if there is no such table."""
    folder, _, table = url.removeprefix("lancedb:").rpartition("/")
    if not Path(folder).is_dir() or table not in _tables(lancedb.connect(folder)):
        raise StoreError(f"{without_secrets(url)}: there is no such table; expected lancedb:FOLDER/TABLE")
    return LanceStore(folder, table)


class LanceStore(CopyStore):
    """See `hubplugin.store.Store`, which says what each method does."""

    metric = Metric.COSINE
    shared = True

    def __init__(self, folder: str, table: str):
        self.url, self.folder, self._name = f"lancedb:{folder}/{table}", Path(folder), f"{table}__hubplugin"
        newest = timedelta(0)  # each request reads what was written last, by whomever
        self._database = Told(lancedb, self.url, ERRORS).connect(folder, read_consistency_interval=newest)
        self.table = self._database.open_table(table)
        columns = {name: self.table.schema.field(name).type for name in self.table.schema.names}
        if "id" not in columns or not pa.types.is_fixed_size_list(columns.get("vector", pa.null())):
            raise StoreError(f"{self.url} has the columns {', '.join(columns)}; expected an id and a vector among them")
        self.dim = columns["vector"].list_size

    def count(self) -> int:
        return int(self.table.count_rows("vector IS NOT NULL"))

    def batches(self, copy: Copy | None, group_by: str | None, ids: Sequence[Id] | None = None) -> Iterator[Batch]:
        require_ungrouped(self, group_by)
        table = None if copy is None else self._named(copy.number)
        held = {} if table is None else self._rows(table, ids)
        if ids is None:
            read = self._read(self.table.search().where("vector IS NOT NULL").select(["id", "vector"]))
        else:  # a condition on vectors would read all of them
            read = self._taken(self.table, [*self._rows(self.table, ids).values()])
        for batch in read:
            there = batch.filter(batch.column("vector").is_valid())
            keys, stored = there.column("id").to_pylist(), dict[Id, Sequence[float]]()
            for part in self._taken(table, [held[key] for key in keys if key in held]):
                stored |= zip(part.column("id").to_pylist(), _matrix(part.column("vector")), strict=True)
            yield self.batch(copy, keys, _matrix(there.column("vector")), stored)

    def _rows(self, table: Any, ids: Sequence[Id] | None) -> dict[Id, int]:
        """Where `table` has its targets, or `ids` of them: LanceDB's numbers of the rows."""
        search = table.search().select(["id"]).with_row_id(True)
        read = self._read(search if ids is None else search.where(_among(ids)))
        columns = ((batch.column(name).to_pylist() for name in ("id", "_rowid")) for batch in read)
        return {key: row for keys, rows in columns for key, row in zip(keys, rows, strict=True)}

    def _taken(self, table: Any, rows: Sequence[int]) -> Iterator[pa.RecordBatch]:
        return table.take_row_ids(rows).select(["id", "vector"]).to_arrow().to_batches() if rows else iter(())

    def nearest(self, copy: Copy | None, queries: np.ndarray, k: int, among: Collection[Id] | None) -> Hits:
        table, how = (self.table, "cosine") if copy is None else (self._named(copy.number), "dot")
        search = table.search([*queries], vector_column_name="vector").distance_type(how).limit(k)
        search = search.select(["id", "_distance"])
        hits = Hits([[] for _ in queries], [[] for _ in queries])
        for row in (search if among is None else search.where(_among(among))).to_list():
            place = row.get("query_index", 0)  # which LanceDB leaves out of the answer to one query
            hits.ids[place].append(row["id"])
            hits.scores[place].append(row["_distance"])
        return hits

    def require_writable(self, *, dry_run: bool = False) -> None:
        super().require_writable(dry_run=dry_run)
        ids = [
            key for batch in self._read(self.table.search().select(["id"])) for key in batch.column("id").to_pylist()
        ]
        wrong = Counter(ids) - Counter(set(ids) - {None})
        if wrong:
            names = ", ".join(map(repr, list(wrong)[:3]))
            raise StoreError(
                f"{self.url}: each row needs an id of its own, which {names} is not; mend the ids, then apply"
            )

    def copies(self) -> list[Copy]:
        rows = self._named().search().to_list() if self._is_there(self._name) else []
        return [Copy(**{name: row[name] for name in COPY}) for row in rows if row["dim"] == self.dim]

    def list_copies(self, copies: Sequence[Copy]) -> None:
        rows = pa.Table.from_pylist([{"dim": self.dim, **vars(copy)} for copy in copies], LIST)
        self._create(None, rows)
        self._named().optimize(cleanup_older_than=READING)
        kept = {self._name, *(f"{self._name}_{copy.number}_model" for copy in copies)}
        self._sweep(kept | {f"{self._name}_{copy.number}" for copy in copies if copy.state != "previous"})

    def create_copy(self, copy: Copy, model: OffsetModel) -> None:
        self._create(f"{copy.number}_model", pa.Table.from_pylist([{"model": model.to_bytes()}], MODEL))
        ids, vectors = self.table.schema.field("id"), pa.field("vector", pa.list_(pa.float32(), self.dim + 1))
        self._create(copy.number, pa.schema([ids, vectors], OURS).empty_table())

    def stored_model(self, copy: Copy) -> OffsetModel:
        (row,) = self._named(f"{copy.number}_model").search().to_list()
        return OffsetModel.from_bytes(bytes(row["model"]), self.url)

    def write_copy(self, copy: Copy, ids: Sequence[Id], vectors: np.ndarray) -> None:
        table = self._named(copy.number)
        column = pa.FixedSizeListArray.from_arrays(vectors.ravel(), self.dim + 1)
        rows = pa.table([pa.array(ids, table.schema.field("id").type), column], table.schema)
        table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(rows)

    def activate(self, copy: Copy) -> None:
        """Its table is made compact before; a version that a search may still read stays for a while."""
        table = self._named(copy.number)
        there = {key for batch in self.batches(None, None) for key in batch.ids}
        gone = [key for key in self._rows(table, None) if key not in there]
        for start in range(0, len(gone), BATCH):
            table.delete(_among(gone[start : start + BATCH]))
        self._compact(table, READING if copy.state == "active" else timedelta(0))
        super().activate(copy)

    def notes(self) -> Sequence[str]:
        copy = self.copy_in("active")
        return [] if copy is None else [f"searches use the table {self._name}_{copy.number}"]

    def remove(self, progress: Progress | None = None) -> None:
        """LanceDB deletes a table file by file. So the list is emptied first, and only that version of it is left: a
        kill while it is deleted leaves an empty list, or none."""
        if self._is_there(self._name):
            self.list_copies([])
            self._compact(self._named())
        self._sweep(set())

    def _named(self, part: int | str | None = None) -> Any:
        """A copy, its model, or the list of them."""
        return self._database.open_table(self._name if part is None else f"{self._name}_{part}")

    def _create(self, part: int | str | None, rows: pa.Table) -> None:
        name = self._name if part is None else f"{self._name}_{part}"
        self._database.create_table(name, rows, mode="overwrite" if self._is_there(name) else "create")

    def _is_there(self, name: str) -> bool:
        """Whether there is this table of ours; raises StoreError if there is one of the user's."""
        if name not in _tables(self._database):
            return False
        try:
            schema = self._database.open_table(name).schema
        except StoreError as error:
            if "not found" in str(error).lower():  # files that a kill has left of a table that was dropped
                return False
            raise
        if (schema.metadata or {}).items() >= OURS.items():
            return True
        raise StoreError(f"{self.url}: the table {name} holds something of yours; rename it, or drop it")

    @staticmethod
    def _compact(table: Any, older_than: timedelta = timedelta(0)) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of readers of older versions, where nobody can read them
            table.optimize(cleanup_older_than=older_than)

    def _sweep(self, kept: Collection[str]) -> None:
        """Drops the tables of this correction but `kept`, the list of copies first."""
        ours = re.compile(rf"{re.escape(self._name)}(_\d+(_model)?)?").fullmatch
        for name in sorted(name for name in _tables(self._database) if ours(name) and name not in kept):
            self._is_there(name)
            self._database.drop_table(name, ignore_missing=True)

    def _read(self, search: Any) -> Iterator[pa.RecordBatch]:
        try:
            yield from search.to_batches(BATCH_ROWS)
        except ERRORS as error:
            raise told(error, self.url) from error


def _among(ids: Collection[Id]) -> str:
    """The condition of a row whose id is one of `ids`."""
    words = (str(key) if isinstance(key, int) else "'" + key.replace("'", "''") + "'" for key in ids)
    return f"id IN ({', '.join(words)})" if ids else "false"


def _tables(database: Any) -> list[str]:
    names: list[str] = database.list_tables(limit=10_000).tables
    return names


def _matrix(column: pa.FixedSizeListArray) -> np.ndarray:
    values: np.ndarray = column.flatten().to_numpy(zero_copy_only=False)
    return values.reshape(len(column), -1)
