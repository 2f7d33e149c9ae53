"""A vector column of a PostgreSQL table as a `hubplugin.store.Store`: `postgresql://user@host/db?table=photos`."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hubplugin.errors import InputError, StoreError
from hubplugin.metric import Metric, normalise
from hubplugin.model import OffsetModel
from hubplugin.store import Batch, Explanation, Found, Hits, Id, Writing
from hubplugin.vectors import Progress
from hubplugin_pgvector import schema
from hubplugin_pgvector.database import (
    Database,
    Passing,
    parse_url,
    quote_name,
    retry_deadlocks,
)
from hubplugin_pgvector.metadata import ColumnVersion, DocumentStore
from hubplugin_pgvector.requests import (
    ExactOrder,
    IndexedOrder,
    RawOrder,
    as_text,
    explain,
    order_by,
)

try:
    from pgvector import Vector
except ImportError:  # before 0.4, which LangChain's package for PostgreSQL asks for
    from pgvector.utils import Vector  # type: ignore[import-not-found,no-redef]

MAY_WRITE = "current_setting('transaction_read_only') = 'off'"
OWNS_TABLE = "pg_has_role(relowner, 'USAGE')"
MAY_CREATE_INDEX = "has_schema_privilege(relnamespace, 'CREATE')"
HAS_OUR_SCHEMA = """
CASE WHEN to_regnamespace('hubplugin') IS NULL
    THEN has_database_privilege(current_database(), 'CREATE')
    ELSE has_schema_privilege('hubplugin', 'USAGE') END
"""
PAGE = 2048
"""Rows in one statement, of reads and of writes."""


def open_url(url: str) -> PgvectorStore:
    """Open the store behind a URL such as
    `postgresql://user@host/db?table=photos&vector=embedding&key=id`.

    Options of the URL, beside those of libpq; passwords are best kept in PGPASSFILE or a
    service file:

        table   as in SQL, with its schema where it is not on the search path
        vector  the column, by default the only one of type vector or halfvec
        key     the column that tells rows apart, by default the primary key
        metric  cosine, dot or euclidean, by default that of the index on the column
        index   the type of the corrected index, "vector" or "halfvec", by default that
                of the column; "none": no index
        record  the folder of a `hubplugin.Recorder`

    Raises StoreError if the server cannot be reached, or the column is not there or
    cannot carry offsets.
    """
    return PgvectorStore(url)


class PgvectorStore(DocumentStore):
    """See `open_url`, and `hubplugin.store.Store`, which says what each method does."""

    shared = True
    maps_queries = True
    how_to_record = (
        "hubplugin.Recorder(FOLDER).add(queries) beside each search, and name it "
        "behind the table: &record=FOLDER"
    )

    def __init__(self, url: str):
        conninfo, self.url, options = parse_url(url)
        self.database = Database(conninfo, self.url)
        self._require_pgvector()
        self.table = schema.read(self.database, options)
        self.metric, self.dim = self.table.metric, self.table.dim
        self.record = Path(options["record"]) if options.get("record") else None
        self._condition = self.table.has_vector

    def _require_pgvector(self) -> None:
        """Raise StoreError if the database has no pgvector, or too old a one."""
        query = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
        rows = self.database.rows(query, task="connecting")
        if not rows:
            raise StoreError(
                f"{self.url}: the database has no pgvector: CREATE EXTENSION vector"
            )
        major, minor = re.findall(r"\d+", rows[0][0])[:2]
        if (int(major), int(minor)) < (0, 8):
            raise StoreError(
                f"{self.url}: the database has pgvector {rows[0][0]}, and 0.8 is needed: ALTER EXTENSION vector UPDATE"
            )

    def count(self) -> int:
        query = f"SELECT count(*) FROM {self.table.identifier} WHERE {self.table.has_vector}"
        return int(self.database.rows(query)[0][0])

    def how_to_search(self) -> tuple[str, str]:
        key, table = quote_name(self.table.key.name), self.table.identifier
        distance = self.order(self.require_active()).distance()
        return (
            f"SELECT {key} FROM {table} ORDER BY {distance} LIMIT 10",
            "hubplugin_pgvector.order_by maps each query",
        )

    def read_fields(self, ids: Sequence[Id]) -> list[Mapping[str, Any]]:
        key = self.table.key
        wanted = f"%(ids)s::text[]::{key.type}[]"
        rows = self.database.rows(
            f"SELECT {key.id('target')}, to_jsonb(target) - %(vector)s FROM {self.table.identifier} AS target "
            f"WHERE {quote_name('target', key.name)} = ANY({wanted})",
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
        return sorted(schema.read_columns(self.database, self.table.oid))

    def batches(self, offset: str | None, field: str | None = None) -> Iterator[Batch]:
        """Yield all targets, in the order of their key.

        Each batch is a statement of its own, so that a scan of hours keeps no vacuum from
        its work and no index from being built.

        Args:
            offset: The column of the offsets; without one they are NaN.
            field: The column of the values; without one they are None.
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
        behind = ""
        last: dict[str, str] = {}
        while True:
            rows = self.database.rows(
                f"{select} WHERE {table.has_vector} {behind} {order}", last
            )
            if not rows:
                return
            vectors = [Vector.from_binary(row[1]).to_numpy() for row in rows]
            yield Batch(
                [row[0] for row in rows],
                np.array(vectors, np.float32),
                np.array([row[2] for row in rows], np.float32),  # None becomes NaN
                values=[row[3] for row in rows],
            )
            behind = f"AND {key} > {table.key.value('%(id)s::text')}"
            last = {"id": str(rows[-1][0])}

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raise StoreError if the role may not change the table, or a column of another
        origin lies where offsets would."""
        taken = self.attention()
        if taken:
            raise StoreError(f"{self.url}: {taken[0]}")
        if dry_run:
            return
        self.require_sight()
        table = self.table
        messages = {
            MAY_WRITE: "the server, or this role, only reads; name one that may write",
            OWNS_TABLE: f"only the owner of {table.name} may add a column to it; connect "
            "as that role",
            MAY_CREATE_INDEX: "the role may not create an index: GRANT CREATE ON SCHEMA "
            f"{table.schema}",
            HAS_OUR_SCHEMA: "the role may not create the schema hubplugin: GRANT CREATE "
            "ON DATABASE",
        }
        query = f"SELECT {', '.join(messages)} FROM pg_class WHERE oid = %s"
        rights = self.database.rows(query, (table.oid,))[0]
        for has_right, message in zip(rights, messages.values(), strict=True):
            if not has_right:
                raise StoreError(f"{self.url}: {message}")

    def attention(self) -> Sequence[str]:
        """Return a line on a column that lies where offsets would and belongs to no
        correction; empty without such a column."""
        base = self.base_column()
        columns = schema.read_columns(self.database, self.table.oid)
        if base not in columns or self.read_manifest().everything:
            return []
        if columns[base][0] == "float4":
            what = (
                "offsets without their correction, as in a table that was renamed, or "
                "restored without the schema hubplugin; restore that, or drop the column"
            )
        else:
            what = "something of yours; rename it, or drop it"
        return [f"the column {base} holds {what}"]

    def require_sight(self) -> None:
        """Raise StoreError if rows may be hidden from the role: they would stay without
        offsets."""
        if policies := schema.describe(self.database, schema.POLICIES, self.table.oid):
            raise StoreError(
                f"{self.url}: {policies} may hide rows of {self.table.name} from this role; connect as one with "
                "BYPASSRLS, or as the owner of the table, without FORCE ROW LEVEL SECURITY"
            )

    @retry_deadlocks
    def begin(
        self, model: OffsetModel, progress: Progress | None = None
    ) -> PgvectorWriting:
        self.require_writable()
        return PgvectorWriting(self, *self.start_version(model, progress))

    def triggers(self) -> str:
        return schema.describe(self.database, schema.TRIGGERS, self.table.oid)

    def notes(self) -> Sequence[str]:
        version = self.active()
        if version is None:
            return []
        place = f"offsets in the column {version.column} of {self.table.name}"
        return [f"{place}; {self._describe_index(version)}"]

    def _describe_index(self, version: ColumnVersion) -> str:
        if self.table.index == "none":
            return "no index, as index=none says"
        query = np.full(self.dim, self.dim**-0.5, np.float32)
        order = self.order(version)
        plan = self.database.rows(
            f"EXPLAIN (FORMAT JSON) {self._select(order, 10)}",
            order_by(order, query).parameters,
        )
        if json.dumps(version.index) in json.dumps(plan[0][0]):
            return f"a search uses the index {version.index}"
        return (
            f"a search reads all rows and not the index {version.index}: where somebody "
            "dropped it, hubplugin refresh builds it anew"
        )

    def plan(self) -> Sequence[str]:
        steps = [
            f"would add the column {self.base_column()} to {self.table.name}, update "
            "every row once, and build an index beside it"
        ]
        triggers = self.triggers()
        if triggers:
            steps.append(f"these fire on the update of every row: {triggers}")
        return steps

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        hits = Hits([], [])
        with self.database.read_only():
            # The lock keeps a switch from coming between the manifest and the rows.
            self.database.run(
                f"LOCK TABLE {self.table.identifier} IN ACCESS SHARE MODE"
            )
            version = None if raw else self.active()
            order = RawOrder(self.table)
            if version is not None:
                order = self.order(version)
                queries = self.map_queries(queries, version)
            statement = self._select(order, k)
            for query in order.queries(queries):
                rows = self.database.rows(statement, (as_text(query),))
                hits.ids.append([key for _, key in rows])
                hits.scores.append([order.score(distance) for distance, _ in rows])
        return hits

    def _select(self, order: RawOrder, k: int) -> str:
        table = self.table
        columns = f"{order.distance()}, {table.key.id()}"
        return f"SELECT {columns} FROM {table.identifier} WHERE {self._condition} ORDER BY 1 LIMIT {k}"

    def order(self, version: ColumnVersion, alias: str = "") -> ExactOrder:
        """Return how searches by `version` rank, which call the table `alias`; "" if
        they need no name for it."""
        if self.table.index == "none":
            return ExactOrder(self.table, alias, version.column)
        return IndexedOrder(self.table, alias, version.column, version.scale)

    def map_queries(self, queries: np.ndarray, version: ColumnVersion) -> np.ndarray:
        """Return `queries` [m, d] as `order` takes them for `version`: of unit length
        for cosine, and mapped if it has a query map."""
        if version.mapped:
            return self.model(version).queries(queries)
        if self.metric is Metric.COSINE:
            return normalise(queries, "queries")
        return queries

    def map_query(self, query: np.ndarray, version: ColumnVersion) -> np.ndarray:
        """Return one `query` [d] as `map_queries` has it for `version`.

        Raises InputError for a query of another shape.
        """
        query = np.asarray(query, np.float32)
        if query.shape != (self.dim,):
            raise InputError(
                f"a query of shape {query.shape}, and {self.url} has vectors of {self.dim} dimensions"
            )
        mapped: np.ndarray = self.map_queries(query[None], version)[0]
        return mapped

    def explain(self, query: np.ndarray, k: int = 10) -> Explanation:
        version = self.require_active()
        mapped = self.map_query(query, version)
        return explain(self.order(version), mapped, k, is_mapped=version.mapped)

    def with_filter(self, condition: str) -> PgvectorStore:
        """Return a store that only searches the rows with `condition`, which stands
        behind WHERE. Raises InputError if PostgreSQL does not understand it."""
        other = copy.copy(self)
        other._condition = f"{self._condition} AND ({condition.replace('%', '%%')})"
        order = RawOrder(self.table)
        zero = as_text(np.zeros(self.dim, np.float32))
        try:
            with self.database.read_only():
                self.database.rows(
                    f"EXPLAIN {other._select(order, 1)}", (zero,), "the filter"
                )
        except StoreError as error:
            raise InputError(
                f"{error}; a filter is what stands behind WHERE: \"tenant = 'a'\""
            ) from None
        return other

    @retry_deadlocks
    def remove(self, progress: Progress | None = None) -> None:
        super().remove(progress)


class Refused(StoreError):
    """Raised if a trigger, a rule or a constraint did something else with a write."""


class PgvectorWriting(Writing):
    """The offsets of `version` on their way into its column.

    The run that began last writes; an older one stops.
    """

    def __init__(self, store: PgvectorStore, version: ColumnVersion, found: Found):
        self._store = store
        self._version = version
        self.found = found

    def scan(self) -> Iterator[Batch]:
        return self._store.batches(self._version.column)

    @retry_deadlocks
    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Write offsets to the rows of a batch.

        Args:
            batch: The targets.
            offsets: Their offsets [b].

        Raises:
            StoreError: A trigger, a rule or a constraint did something else with the
                write. The write is undone.
        """
        store = self._store
        try:
            with store.database.transaction():
                store.lock("FOR SHARE")
                store.require_owner(self._version)
                self._update(batch, offsets)
        except Refused as refused:
            message = f"{refused}; the write was undone"
            if triggers := store.triggers():
                message += (
                    f"; these fire on update: {triggers}; disable them, run again, then "
                    "re-enable them"
                )
            raise StoreError(message) from None

    def _update(self, batch: Batch, offsets: np.ndarray) -> None:
        """Write `offsets` [b] to the rows of `batch`, and read them back.

        Raises Refused if anything but the offsets has changed, or a row lacks its
        offset.
        """
        database = self._store.database
        table = self._store.table
        column = quote_name("target", self._version.column)
        target = f"{table.identifier} AS target"
        news = "unnest(%(ids)s::text[], %(offsets)s::real[]) AS new (id, hub)"
        same = f"{quote_name('target', table.key.name)} = {table.key.value('new.id')}"
        digest = f"sha256({table.type}_send({quote_name('target', table.vector)}))"
        lacks = f"{column} IS DISTINCT FROM new.hub"
        values = {"ids": list(map(str, batch.ids)), "offsets": offsets.tolist()}
        read = f"SELECT new.id, {digest}, {lacks} FROM {target}, {news} WHERE {same}"

        # The rows are locked from here on, so only this update can change them.
        before = database.rows(f"{read} FOR NO KEY UPDATE OF target", values)
        try:
            # A row that already has its offset is left alone: an update would insert it
            # into each index of the table again.
            database.run(
                f"UPDATE {target} SET {quote_name(self._version.column)} = new.hub"
                f" FROM {news} WHERE {same} AND {lacks}",
                values,
                "writing offsets",
            )
            # Constraint triggers deferred to the end of the transaction fire now.
            database.run("SET CONSTRAINTS ALL IMMEDIATE", task="writing offsets")
        except Passing:
            raise
        except StoreError as error:
            raise Refused(str(error)) from None
        after = {
            id: (digest, lacking) for id, digest, lacking in database.rows(read, values)
        }
        moved = 0
        lack = 0
        for id, old_digest, _ in before:
            new_digest, lacking = after.get(id, (None, False))
            moved += new_digest != old_digest
            lack += lacking
        if moved or lack:
            raise Refused(
                f"{self._store.url}: after offsets were written, {moved} of {len(before)} rows have "
                f"another vector or are gone, and {lack} lack their offset"
            )

    @retry_deadlocks
    def activate(self) -> None:
        store = self._store
        version = self._version
        store.require_sight()
        store.require_owner(version)
        order = store.order(version)
        if isinstance(order, IndexedOrder):
            schema.build_index(store.database, store.table, version.index, order.index)
        store.switch(version)
