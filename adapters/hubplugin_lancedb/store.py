"""A LanceDB table as a `Store`: `lancedb:FOLDER/TABLE`.

The table has a column `id` and a column `vector`, compared by cosine. For a table
"photos", the offsets are in the table "photos__hubplugin_WORD", the model is in
"photos__hubplugin_WORD_model", and the manifest is in the schema of
"photos__hubplugin". Nothing is written to "photos", so all its versions are the user's.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hubplugin.candidates import MARK, Candidates, CandidateStore, plain_batch
from hubplugin.errors import InputError, StoreError
from hubplugin.metric import Metric
from hubplugin.registry import without_secrets
from hubplugin.store import Batch, ErrorTranslator, Id, as_store_error

BATCH_ROWS = 4096
ERRORS = (RuntimeError, ValueError, OSError, LookupError)


def open_url(url: str) -> LanceStore:
    """Open the store behind `lancedb:FOLDER/TABLE`, which may end in `?record=FOLDER`.

    Raises:
        StoreError: The table does not exist.
    """
    path, _, record = url.removeprefix("lancedb:").partition("?record=")
    folder, _, table = path.rpartition("/")
    if not (Path(folder) / f"{table}.lance").is_dir():
        raise StoreError(
            f"{without_secrets(url)}: there is no such table; expected "
            "lancedb:FOLDER/TABLE, optionally followed by ?record=FOLDER"
        )
    store = LanceStore(folder, table)
    if record:
        store.record = Path(record)
    return store


class LanceStore(CandidateStore):
    """A LanceDB table as a store. See `hubplugin.store.Store` for its methods."""

    metric = Metric.COSINE
    shared = True
    separator = "_"
    place = "table"
    folder: Path

    _condition: str | None = None

    def __init__(self, folder: str, table: str):
        self.url = f"lancedb:{folder}/{table}"
        self.folder = Path(folder)
        self.name = f"{table}__hubplugin"
        database = ErrorTranslator(lancedb, self.url, ERRORS)
        newest = timedelta(0)  # each request reads the latest version from any writer
        self._database = database.connect(folder, read_consistency_interval=newest)
        self.table = self._database.open_table(table)
        columns = dict(zip(self.fields(), self.table.schema.types, strict=True))
        vector = columns.get("vector", pa.null())
        if "id" not in columns or not pa.types.is_fixed_size_list(vector):
            raise StoreError(
                f"{self.url} has the columns {', '.join(columns)}; expected an id and a "
                "vector among them"
            )
        if not is_id(columns["id"]):
            raise StoreError(
                f"{self.url} has ids of the type {columns['id']}; expected integers or "
                "texts"
            )
        self.dim = vector.list_size
        # Tables have no id. The dimension tells at least some replaced tables apart.
        self.gallery = f"of {self.dim} dimensions"

    def count(self) -> int:
        return int(self.table.count_rows("vector IS NOT NULL"))

    def read_targets(self, field: str | None = None) -> Iterator[Batch]:
        columns = {"id", "vector"}
        if field is not None:
            self.require_field(field)
            columns.add(field)
        search = self.table.search().where("vector IS NOT NULL")
        try:
            for rows in search.select([*columns]).to_batches(BATCH_ROWS):
                values = None
                if field is not None:
                    values = rows[field].to_pylist()
                vectors = as_matrix(rows["vector"])
                yield plain_batch(rows["id"].to_pylist(), vectors, values)
        except ERRORS as error:
            raise as_store_error(error, self.url) from error

    def fields(self) -> Sequence[str]:
        return list(self.table.schema.names)

    def read_fields(self, ids: Sequence[Id]) -> list[Mapping[str, Any]]:
        columns = [name for name in self.fields() if name != "vector"]
        rows = self.table.search().where(f"id IN ({', '.join(map(as_literal, ids))})")
        found = rows.select(columns).limit(len(ids)).to_list()
        fields = {row["id"]: row for row in found}
        return [fields.get(id, {}) for id in ids]

    def fetch(self, queries: np.ndarray, count: int) -> list[Candidates]:
        search = self.table.search([*queries], vector_column_name="vector")
        # With a refine factor, an index of codes returns the distances of the original
        # vectors.
        search = search.distance_type("cosine").limit(count).refine_factor(1)
        search = search.select(["id", "vector", "_distance"]).where(self._condition)
        answer = search.to_arrow().sort_by("_distance")
        found = list[Candidates]()
        for query in range(len(queries)):
            rows = answer
            if len(queries) > 1:  # a single query has no query_index
                rows = answer.filter(pc.field("query_index") == query)
            found.append(
                {
                    "ids": rows["id"].to_pylist(),
                    "distances": rows["_distance"].to_pylist(),
                    "vectors": as_matrix(rows["vector"]),
                }
            )
        return found

    def with_filter(self, condition: str) -> LanceStore:
        try:
            self.table.count_rows(condition)
        except StoreError as error:
            raise InputError(str(error)) from None
        filtered = copy.copy(self)
        filtered._condition = condition
        return filtered

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raise StoreError if ids are missing or not unique, or a write would fail.

        A write fails if the folder lacks room for the offsets.
        """
        super().require_writable(dry_run=dry_run)
        rows = self.table.search().where("vector IS NOT NULL").select(["id"])
        ids = Counter(rows.to_arrow()["id"].to_pylist())
        unusable = [key for key, count in ids.items() if key is None or count > 1]
        if unusable:
            names = ", ".join(map(repr, unusable[:3]))
            raise StoreError(
                f"{self.url}: ids are missing or repeated: {names}; give each row its "
                "own id, then apply"
            )

    def find_place(self, name: str) -> Any:
        try:
            return self._database.open_table(name)
        except StoreError as error:
            if "not found" in str(error).lower():
                return None
            raise

    def make_place(self, name: str, mark: str) -> Any:
        schema = pa.schema([("text", pa.large_string())], {MARK: mark})
        mode = "create" if self.open_place(name) is None else "overwrite"
        return self._database.create_table(name, schema=schema, mode=mode)

    def mark(self, place: Any) -> str | bytes | None:
        return (place.schema.metadata or {}).get(MARK.encode())

    def read_texts(self, place: Any, start: int) -> list[str]:
        if place.count_rows() == start:
            return []
        texts: list[str] = place.to_arrow()["text"].to_pylist()
        return texts[start:]

    def append_text(self, place: Any, text: str) -> None:
        place.add([{"text": text}])

    def drop(self, name: str) -> None:
        place = self.find_place(name)
        if place is not None:
            if self.mark(place) is None:  # not the place of a correction
                return
            # A table is dropped file by file, so a kill could bring back an older
            # version: delete the old versions first. LanceDB warns that their readers
            # may fail.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                place.optimize(cleanup_older_than=timedelta(0))
        # The folder of a half-dropped table may be left.
        if (self.folder / f"{name}.lance").is_dir():
            self._database.drop_table(name, ignore_missing=True)


def as_matrix(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return a column of vectors as an array [n, d]."""
    values: np.ndarray = pc.list_flatten(column).to_numpy(zero_copy_only=False)
    return values.reshape(len(column), column.type.list_size)


def is_id(kind: pa.DataType) -> bool:
    """Return True if values of a column of this type can be ids of targets."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string)
    return any(test(kind) for test in tests)


def as_literal(id: Id | None) -> str:
    """Return an id as a literal for a filter; NULL if another program left it out."""
    if id is None:
        return "NULL"
    if isinstance(id, int) and id < 0:
        # LanceDB reads the digits before the sign, and 2^63 is no BIGINT, but -2^63 is.
        return f"CAST('{id}' AS BIGINT)"
    if isinstance(id, int):
        return str(id)
    return "'" + id.replace("'", "''") + "'"
