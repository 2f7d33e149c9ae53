"""A vector column of a PostgreSQL table as a `hubplugin.store.Store`.

Its URL is `postgresql://user@host/db?table=photos`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hubplugin.errors import InputError, StoreError
from hubplugin.metric import Metric, normalise
from hubplugin.model import OffsetModel
from hubplugin.store import Batch, Explanation, Found, Hits, Id, Writing
from hubplugin.vectors import Progress
from hubplugin_pgvector import requests, schema
from hubplugin_pgvector.database import (
    Database,
    TemporaryFault,
    parse_url,
    quote_name,
    retry_deadlocks,
)
from hubplugin_pgvector.metadata import ColumnVersion, DocumentStore
from hubplugin_pgvector.requests import Order

try:
    from pgvector import Vector
except (
    ImportError
):  # before 0.4; LangChain's PostgreSQL package requires such a version
    from pgvector.utils import Vector  # type: ignore[import-not-found,no-redef]

HAS_PGVECTOR = """
SELECT FROM pg_extension
    WHERE extname = 'vector' AND string_to_array(extversion, '.')::int[] >= '{0, 8}'
"""
PAGE = 2048
"""The number of rows that one statement reads or writes."""


def open_url(url: str) -> PgvectorStore:
    """Open the store behind a URL.

    An example is `postgresql://user@host/db?table=photos&vector=embedding&key=id`.
    Passwords are best kept in PGPASSFILE or a service file. The URL may have these
    options besides the options of libpq:

        table   as in SQL, with its schema if that is not on the search path
        vector  the column, by default the only one of type vector or halfvec
        key     the column that identifies rows, by default the primary key
        metric  cosine, dot or euclidean, by default that of the index on the column
        index   the type of the corrected index, "vector" or "halfvec", by default that
                of the column; "none" for no index
        record  the folder of a `hubplugin.Recorder`

    Raises StoreError if the server cannot be reached, or if the column does not exist
    or cannot carry offsets.
    """
    return PgvectorStore(url)


class PgvectorStore(DocumentStore):
    """A vector column as a store.

    See `open_url` for its URL and `hubplugin.store.Store` for its methods.
    """

    shared = True
    maps_queries = True
    how_to_record = (
        "call hubplugin.Recorder(FOLDER).add(queries) at each search, and append "
        "&record=FOLDER to the URL"
    )

    def __init__(self, url: str):
        conninfo, self.url, options = parse_url(url)
        self.database = Database(conninfo, self.url)
        if not self.database.run(HAS_PGVECTOR):
            raise StoreError(
                f"{self.url}: the database needs pgvector 0.8 or later: CREATE EXTENSION "
                "vector, or ALTER EXTENSION vector UPDATE"
            )
        self.table = schema.read(self.database, options)
        self.metric = self.table.metric
        self.dim = self.table.dim
        if options.get("record"):
            self.record = Path(options["record"])
        self._condition = self.table.has_vector

    def count(self) -> int:
        table = self.table
        query = f"SELECT count(*) FROM {table.identifier} WHERE {table.has_vector}"
        return int(self.database.run(query)[0][0])

    def how_to_search(self) -> tuple[str, str]:
        key = quote_name(self.table.key.name)
        order = self.order(self.require_active())
        parts = ["the query", *map(str, order.components)]
        return (
            f"SELECT {key} FROM {self.table.identifier} ORDER BY {order.distance} "
            f"LIMIT 10 -- %s: {' and then '.join(parts)}",
            "hubplugin_pgvector.order_by maps each query",
        )

    def read_fields(self, ids: Sequence[Id]) -> list[Mapping[str, Any]]:
        key = self.table.key
        rows = self.database.run(
            f"SELECT {key.id('target')}, to_jsonb(target) - %(vector)s"
            f" FROM {self.table.identifier} AS target"
            f" WHERE {quote_name('target', key.name)}"
            f" = ANY(%(ids)s::text[]::{key.type}[])",
            {"ids": list(map(str, ids)), "vector": self.table.vector},
        )
        fields = dict(rows)
        return [fields.get(id, {}) for id in ids]

    def scan(self, field: str | None = None) -> Iterator[Batch]:
        if field is not None:
            self.require_field(field)
        active = self.active()
        return self.batches(active.column if active else None, field)

    def fields(self) -> Sequence[str]:
        return list(schema.read_columns(self.database, self.table.oid))

    def batches(self, offset: str | None, field: str | None = None) -> Iterator[Batch]:
        """Yield all targets, ordered by key.

        Each batch is read by a separate statement. So even a scan of several hours does
        not hold up vacuums and index builds.

        Args:
            offset: The column of the offsets. If it is None, the offsets are NaN.
            field: The column of the values. If it is None, the values are None.
        """
        table = self.table
        key = quote_name("target", table.key.name)
        columns = (
            table.key.id("target"),
            f"{quote_name(table.vector)}::vector",
            "NULL::real" if offset is None else quote_name(offset),
            "NULL" if field is None else quote_name(field),
        )
        select = f"SELECT {', '.join(columns)} FROM {table.identifier} AS target"
        order = f"ORDER BY {key} LIMIT {PAGE}"
        after_last = ""
        parameters: dict[str, str] = {}
        while True:
            rows = self.database.run(
                f"{select} WHERE {table.has_vector} {after_last} {order}", parameters
            )
            if not rows:
                return
            ids, binary_vectors, offsets, values = zip(*rows, strict=True)
            vectors = [
                Vector.from_binary(vector).to_numpy() for vector in binary_vectors
            ]
            yield Batch(
                ids,
                np.array(vectors, np.float32),
                np.array(offsets, np.float32),  # None becomes NaN
                values=values,
            )
            after_last = f"AND {key} > %(id)s::text::{table.key.type}"
            parameters = {"id": str(ids[-1])}

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raise StoreError if offsets cannot be written to every row.

        Another column may have the name of the offset column, or the role may lack a
        right or not see all rows.
        """
        fault = "".join(self.attention())
        if self.base_column() in self.marked_columns():
            fault = ""  # `write_model` replaces columns whose manifest was lost
        if not fault and not dry_run:
            fault = self.describe(schema.LACKING)
        if fault:
            raise StoreError(f"{self.url}: {fault}")

    def attention(self) -> Sequence[str]:
        """Return a line if a column has the name of the offsets without a correction."""
        base = self.base_column()
        if base not in self.fields() or self.read_manifest().stored_versions:
            return []
        if base in self.marked_columns():
            return [
                f"the column {base} has offsets without their correction, as in a backup "
                "that was restored without the schema hubplugin; `hubplugin apply` "
                "replaces them, `hubplugin remove` drops them"
            ]
        return [
            f"the column {base} holds data that are not hubplugin's, or offsets under a "
            "former name of the table or of the vector; restore that name, or rename or "
            "drop the column"
        ]

    def describe(self, query: str) -> str:
        """Return the text that `schema.LACKING` or `TRIGGERS` selects, or ""."""
        rows = self.database.run(query, {"oid": self.table.oid})
        return rows[0][0] or ""

    @retry_deadlocks
    def begin(
        self, model: OffsetModel, progress: Progress | None = None
    ) -> PgvectorWriting:
        return PgvectorWriting(self, *self.start_version(model))

    def notes(self) -> Sequence[str]:
        version = self.active()
        if version is None:
            return []
        place = f"offsets in the column {version.column} of {self.table.name}"
        if self.table.index == "none":
            return [f"{place}; no index (index=none)"]
        query = np.full(self.dim, self.dim**-0.5, np.float32)
        order = self.order(version)
        plan = self.database.run(
            f"EXPLAIN (FORMAT JSON) {self._select(order, 10)}",
            order.by(query).parameters,
        )
        # A node of the plan has the index as "Index Name", if any node uses it.
        is_used = f'"{version.index}"' in json.dumps(plan)
        if is_used:
            return [f"{place}; a search uses the index {version.index}"]
        return [
            f"{place}; a search reads all rows and not the index {version.index}: if "
            "somebody dropped it, hubplugin refresh builds a new one"
        ]

    def plan(self) -> Sequence[str]:
        steps = [
            f"would add the column {self.base_column()} to {self.table.name}, update "
            "every row once, and build an index beside it"
        ]
        triggers = self.describe(schema.TRIGGERS)
        if triggers:
            steps.append(f"the update of every row fires {triggers}")
        return steps

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        hits = Hits([], [])
        run = self.database.run
        with self.database.transaction():
            run("SET TRANSACTION READ ONLY")
            # Let a filtered search continue in the index until it has enough rows.
            run("SET LOCAL hnsw.iterative_scan = 'strict_order'")
            # The lock prevents a switch between reading the manifest and the rows.
            run(f"LOCK TABLE {self.table.identifier} IN ACCESS SHARE MODE")
            order = requests.raw_order(self.table)
            version = None if raw else self.active()
            if version is not None:
                order = self.order(version)
                queries = self.map_queries(queries, version)
            statement = self._select(order, k)
            for query in queries:
                rows = run(statement, order.by(query).parameters)
                hits.ids.append([key for _, key in rows])
                hits.scores.append([order.score(distance) for distance, _ in rows])
        return hits

    def _select(self, order: Order, k: int) -> str:
        """Return the statement that searches for `k` rows by `order`."""
        return (
            f"SELECT {order.distance}, {self.table.key.id()} FROM {self.table.identifier}"
            f" WHERE {self._condition} ORDER BY 1 LIMIT {k}"
        )

    def order(self, version: ColumnVersion, alias: str = "") -> Order:
        """Return the ranking for searches corrected by `version`.

        alias: The name of the table in the search; "" if it needs none.
        """
        if self.table.index == "none":
            return requests.exact_order(self.table, version.column, alias)
        return requests.indexed_order(self.table, version.column, version.scale, alias)

    def map_queries(self, queries: np.ndarray, version: ColumnVersion) -> np.ndarray:
        """Return `queries` [m, d] prepared for `order` and `version`.

        Queries are normalised for cosine, and mapped if `version` has a query map.
        """
        if version.mapped:
            return self.model(version).queries(queries)
        if self.metric is Metric.COSINE:
            return normalise(queries, "queries")
        return queries

    def map_query(self, query: np.ndarray, version: ColumnVersion) -> np.ndarray:
        """Apply `map_queries` to one `query` [d].

        Raises InputError if the query has another shape.
        """
        query = np.asarray(query, np.float32)
        if query.shape != (self.dim,):
            raise InputError(
                f"a query has shape {query.shape}, but {self.url} has vectors of "
                f"{self.dim} dimensions"
            )
        mapped: np.ndarray = self.map_queries(query[None], version)[0]
        return mapped

    def explain(self, query: np.ndarray, k: int = 10) -> Explanation:
        version = self.require_active()
        return requests.explain(
            self.table,
            self.order(version),
            requests.exact_order(self.table, version.column),
            self.map_query(query, version),
            k,
            is_mapped=version.mapped,
        )

    def with_filter(self, condition: str) -> PgvectorStore:
        """Return a store that only searches the rows that satisfy a condition.

        Args:
            condition: The SQL after WHERE.

        Raises:
            InputError: PostgreSQL does not understand the condition.
        """
        other = copy.copy(self)
        other._condition = f"{self._condition} AND ({condition.replace('%', '%%')})"
        try:
            other.search(np.zeros((1, self.dim), np.float32), 0, raw=True)
        except StoreError as error:
            raise InputError(
                f"{error}; a filter is the condition after WHERE: \"tenant = 'a'\""
            ) from None
        return other

    remove = retry_deadlocks(DocumentStore.remove)  # type: ignore[arg-type]


@dataclass(eq=False)
class PgvectorWriting(Writing):
    """A run that writes the offsets of `version` to the version's column.

    Only the run that began last writes; an older one stops.
    """

    store: PgvectorStore
    version: ColumnVersion
    found: Found

    def scan(self) -> Iterator[Batch]:
        return self.store.batches(self.version.column)

    @retry_deadlocks
    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Write offsets to the rows of a batch.

        Args:
            batch: The targets.
            offsets: Their offsets [b].

        Raises:
            StoreError: A trigger, a rule or a constraint interfered with the write. The
                write is undone.
        """
        store = self.store
        with store.database.transaction():
            store.lock("FOR SHARE")
            store.require_owner(self.version)
            triggers = store.describe(schema.TRIGGERS)
            try:
                self._update(batch, offsets)
            except TemporaryFault:
                raise
            except StoreError as error:
                message = f"{error}; the write was undone"
                if triggers:
                    message += (
                        f"; these fire on update: {triggers}; disable them, run again, "
                        "then re-enable them"
                    )
                raise StoreError(message) from None

    def _update(self, batch: Batch, offsets: np.ndarray) -> None:
        """Write `offsets` [b] to the rows of `batch`.

        Raises StoreError if a vector has changed as well, or a row lacks its offset.
        """
        run = self.store.database.run
        table = self.store.table
        vector = quote_name("target", table.vector)
        column = quote_name("target", self.version.column)
        target = f"{table.identifier} AS target"
        # SQL expressions; `new` has the row to write for each id.
        new = "unnest(%(ids)s::text[], %(offsets)s::real[], %(digests)s::bytea[])"
        new = f"{new} AS new (id, hub, digest)"
        same_row = f"{quote_name('target', table.key.name)} = new.id::{table.key.type}"
        digest = f"sha256({table.type}_send({vector}))"
        lacks_offset = f"{column} IS DISTINCT FROM new.hub"
        ids = list(map(str, batch.ids))
        # The first statement runs before the digests are known, and does not read them.
        values = {"ids": ids, "offsets": offsets.tolist(), "digests": []}

        # Lock the rows, so that only this update can change them, and read the digests
        # of their vectors.
        locked_rows = run(
            f"SELECT new.id, {digest} FROM {target}, {new} WHERE {same_row}"
            " FOR NO KEY UPDATE OF target",
            values,
        )
        digests = dict(locked_rows)
        values["digests"] = [digests.get(id) for id in ids]
        # Rows that already have their offset are not updated: an update would insert
        # them into each index of the table again.
        run(
            f"UPDATE {target} SET {quote_name(self.version.column)} = new.hub"
            f" FROM {new} WHERE {same_row} AND {lacks_offset}",
            values,
        )
        # Make constraint triggers that are deferred to the end of the transaction fire.
        run("SET CONSTRAINTS ALL IMMEDIATE")
        counts = run(
            f"SELECT count(*) FILTER (WHERE {digest} IS DISTINCT FROM new.digest),"
            f" count(*) FILTER (WHERE {lacks_offset})"
            f" FROM {new} LEFT JOIN {target} ON {same_row}"
            " WHERE new.digest IS NOT NULL",
            values,
        )
        changed, lacking = counts[0]
        if changed or lacking:
            raise StoreError(
                f"{self.store.url}: after offsets were written, {changed} of "
                f"{len(locked_rows)} rows have another vector or are gone, and "
                f"{lacking} lack their offset"
            )

    @retry_deadlocks
    def activate(self) -> None:
        store = self.store
        version = self.version
        store.require_writable()
        store.require_owner(version)
        table = store.table
        if table.index != "none":
            expression = requests.indexed_expression(
                table, version.column, version.scale
            )
            schema.build_index(store.database, table, version.index, expression)
        store.switch(version)
