"""A vector column of a PostgreSQL table as a `hubplugin.store.Store`: `postgresql://user@host/db?table=photos`."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from hubplugin.calibration import FIRST, choose_queries, first_that, ratios, recall
from hubplugin.errors import InputError, StoreError
from hubplugin.metric import Metric, normalise
from hubplugin.model import OffsetModel, Value
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
from hubplugin_pgvector.metadata import ColumnVersion, DocumentStore, describe_leftovers
from hubplugin_pgvector.requests import (
    ExactOrder,
    IndexedOrder,
    RawOrder,
    as_text,
    explain,
    order_by,
)

try:
    from pgvector import HalfVector, Vector
except ImportError:  # before 0.4, which LangChain's package for PostgreSQL asks for
    from pgvector.utils import HalfVector, Vector  # type: ignore[import-not-found,no-redef]

logger = logging.getLogger("hubplugin.pgvector")

INDEXES = """
SELECT relname::text, pg_relation_size(c.oid), indisvalid FROM pg_class c JOIN pg_index ON indexrelid = c.oid
    WHERE c.oid IN (SELECT to_regclass(%(name)s) UNION SELECT relid FROM pg_partition_tree(to_regclass(%(name)s)))
"""
RIGHTS = """
SELECT current_setting('transaction_read_only') = 'off', pg_has_role(relowner, 'USAGE'),
    has_schema_privilege(relnamespace, 'CREATE'),
    CASE WHEN to_regnamespace('hubplugin') IS NULL THEN has_database_privilege(current_database(), 'CREATE')
    ELSE has_schema_privilege('hubplugin', 'USAGE') END FROM pg_class WHERE oid = %s
"""
SOUND = 0, 8, 4
"""The first pgvector whose vacuum leaves HNSW indexes whole."""
DEFAULT_EF, LARGEST_EF = 40, 1000
"""hnsw.ef_search of a server where it is not set, and the largest that it takes."""
PAGE = 2048
"""Rows in one statement, of reads and of writes."""


def open_url(url: str) -> PgvectorStore:
    """The store behind a URL such as `postgresql://user@host/db?table=photos&vector=embedding&key=id`.

    Options of the URL, beside those of libpq; passwords are best kept in PGPASSFILE or a service file:

        table   as in SQL, with its schema where it is not on the search path
        vector  the column, by default the only one of type vector or halfvec
        key     the columns that tell rows apart, by default the primary key
        metric  cosine, dot or euclidean, by default that of the index on the column
        index   the type of the corrected index, "vector" or "halfvec", by default that of the column; "none": no index
        record  the folder of a `hubplugin.Recorder`

    Raises StoreError for what is not there or cannot carry offsets, and for a server that cannot be reached.
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
        rows = self.database.rows(
            "SELECT extversion FROM pg_extension WHERE extname = 'vector'",
            task="connecting",
        )
        self._pgvector = (
            tuple(map(int, re.findall(r"\d+", rows[0][0])[:3])) if rows else ()
        )
        try:
            if self._pgvector < (0, 8):
                has = f"pgvector {rows[0][0]}" if rows else "no pgvector"
                raise StoreError(
                    f"{self.url}: the database has {has}, and 0.8 is needed: ALTER EXTENSION vector UPDATE"
                )
            self.table = schema.read(self.database, options)
        except StoreError as error:
            raise StoreError(
                f"{error}{describe_leftovers(self.database, options.get('table', ''))}"
            ) from None
        self.metric, self.dim = self.table.metric, self.table.dim
        self.record = Path(options["record"]) if options.get("record") else None
        self._condition = self.table.has_vector

    def count(self) -> int:
        query = f"SELECT count(*) FROM {self.table.identifier} WHERE {self.table.has_vector}"
        return int(self.database.rows(query)[0][0])

    def scan(self, field: str | None = None) -> Iterator[Batch]:
        active = self.active()
        return self.batches(active.column if active else None, field)

    def batches(self, offset: str | None, field: str | None) -> Iterator[Batch]:
        """All targets, in the order of their key, with the offsets in the column `offset` and their values of
        `field`.

        Each batch is a statement of its own, so that a scan of hours keeps no vacuum from its work and no index from
        being built.
        """
        key = self.table.key
        behind = f"({key.names('target')}) > ({key.values('%(id)s::text')})"
        order = f"ORDER BY {key.names('target')} LIMIT {PAGE}"
        batch = self._read_batch(order, {}, offset, field)
        while batch.ids:
            yield batch
            batch = self._read_batch(
                f"AND {behind} {order}", {"id": str(batch.ids[-1])}, offset, field
            )

    def _read_batch(
        self,
        clauses: str,
        parameters: dict[str, str],
        offset: str | None = None,
        field: str | None = None,
    ) -> Batch:
        """The targets that a query with the `clauses` behind its WHERE gives."""
        if field is not None and field not in self.table.columns:
            raise StoreError(f"{self.url} has no column {field!r}")
        table = self.table
        columns = (
            table.key.id("target"),
            quote_name(table.vector),
            "NULL::real" if offset is None else quote_name(offset),
            "NULL" if field is None else quote_name(field),
        )
        rows = self.database.rows(
            f"SELECT {', '.join(columns)} FROM {table.identifier} AS target WHERE {table.has_vector} {clauses}",
            parameters,
        )
        ids, contents, offsets, values = (
            zip(*rows, strict=True) if rows else ((), (), (), ())
        )
        kind = Vector if table.type == "vector" else HalfVector
        vectors = [kind.from_binary(content).to_numpy() for content in contents]
        return Batch(
            ids,
            np.array(vectors, np.float32).reshape(-1, self.dim),
            np.array(offsets, np.float32),  # None becomes NaN
            values=[_as_value(value) for value in values],
        )

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raises StoreError where the role may not change the table, or has a column where offsets would lie."""
        if self.read_manifest().find_current()[0] is None:
            base = self.base_column()
            if base in self.table.columns:
                raise StoreError(
                    f"{self.url}: the column {base} holds something of yours; rename it, or drop it"
                )
        if dry_run:
            return
        self.require_sight()
        lacks = (
            "the server, or this role, only reads; name one that may write",
            f"only the owner of {self.table.name} may add a column to it; connect as that role",
            f"the role may not create an index: GRANT CREATE ON SCHEMA {self.table.schema}",
            "the role may not create the schema hubplugin: GRANT CREATE ON DATABASE",
        )
        for has_right, lack in zip(
            self.database.rows(RIGHTS, (self.table.oid,))[0], lacks, strict=True
        ):
            if not has_right:
                raise StoreError(f"{self.url}: {lack}")

    def require_sight(self) -> None:
        """Raises StoreError where rows may be hidden from the role, which would stay without offsets."""
        if policies := schema.describe_policies(self.database, self.table.oid):
            raise StoreError(
                f"{self.url}: {policies} may hide rows of {self.table.name} from this role; connect as one with "
                "BYPASSRLS, or as the owner of the table, without FORCE ROW LEVEL SECURITY"
            )

    @retry_deadlocks
    def begin(
        self, model: OffsetModel, progress: Progress | None = None
    ) -> PgvectorWriting:
        self.require_writable()
        writing = PgvectorWriting(self, *self.start_version(model, progress))
        if writing.found == "nothing" and (triggers := self.triggers()):
            logger.warning(
                "%s: these fire on the update of every row: %s", self.url, triggers
            )
        return writing

    def triggers(self) -> str:
        return ", ".join(schema.list_triggers(self.database, self.table.oid))

    def notes(self) -> Sequence[str]:
        manifest = self.read_manifest()
        version = manifest.active.get("")
        if version is None:
            return []
        notes = [
            f"offsets in the column {version.column} of {self.table.name}; {self._describe_index(version)}"
        ]
        if policies := schema.describe_policies(self.database, self.table.oid):
            notes.append(
                f"{policies} may hide rows from this role: only those it sees are counted"
            )
        if manifest.writing is not None:
            half = f"{manifest.writing.column}, and its index where there is one"
            notes.append(
                f"{half}, are of a run that goes on or was cut off: run it again"
            )
        if self.table.index != "none" and self._pgvector < SOUND:
            notes.append(
                f"pgvector {'.'.join(map(str, self._pgvector))}: before 0.8.4 a vacuum can damage HNSW indexes: "
                "install a newer one, then ALTER EXTENSION vector UPDATE and REINDEX"
            )
        return notes

    def _describe_index(self, version: ColumnVersion) -> str:
        if self.table.index == "none":
            return "no index, as index=none says"
        name = quote_name(self.table.schema, version.index).replace("%%", "%")
        indexes = self.database.rows(INDEXES, {"name": name})
        if not indexes or not all(is_valid for *_, is_valid in indexes):
            state = "not whole" if indexes else "gone"
            return f"its index {version.index} is {state}, so that searches read all rows: hubplugin refresh"
        order, query = (
            self.order(version),
            np.full(self.dim, self.dim**-0.5, np.float32),
        )
        statement = f"EXPLAIN (FORMAT JSON) {self._select(order, 10)}"
        plan = json.dumps(
            self.database.rows(statement, order_by(order, query).parameters)[0][0]
        )
        use = (
            "uses"
            if any(json.dumps(name) in plan for name, *_ in indexes)
            else "sorts all rows rather than use"
        )
        size = sum(size for _, size, _ in indexes) / 2**20
        width = version.ef_search
        hint = (
            f"; with hnsw.ef_search = {width} it finds as much as a raw one did"
            if width
            else ""
        )
        return f"a search {use} the index {version.index} ({size:.1f} MB){hint}"

    def plan(self) -> Sequence[str]:
        column, triggers = self.base_column(), self.triggers()
        return [
            f"would add the column {column} to {self.table.name}, update every row once, and build an index beside it",
            *(
                [f"these fire on the update of every row: {triggers}"]
                if triggers
                else []
            ),
        ]

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        return self.search_by(None if raw else self.active(), queries, k)

    def search_by(
        self,
        version: ColumnVersion | None,
        queries: np.ndarray,
        k: int,
        **settings: str,
    ) -> Hits:
        """Searches by a version.

        Args:
            version: the version, or None for a raw search.
            queries: [m, d].
            k: how many results of each.
            settings: of the server.
        """
        order = RawOrder(self.table)
        if version is not None:
            order, queries = self.order(version), self.map_queries(queries, version)
        statement, hits = self._select(order, k), Hits([], [])
        with self.database.read_only(hnsw__iterative_scan="strict_order", **settings):
            for query in order.queries(queries):
                rows = self.database.rows(statement, (as_text(query),))
                hits.ids.append([key for _, key in rows])
                hits.scores.append([order.score(distance) for distance, _ in rows])
        return hits

    def choose_width(self, version: ColumnVersion) -> int | None:
        """The least hnsw.ef_search with which corrected searches for queries of the bank find as much of the exact
        results as raw searches do as the server is set. None where the user has no HNSW index to compare with."""
        indexes = self.database.rows(
            schema.INDEXES, (self.table.oid, self.table.vector)
        )
        if not any(method == "hnsw" for *_, method in indexes):
            return None
        queries = choose_queries(self.model(version), self.batches(None, None))
        exact = {"enable_indexscan": "off"}
        raw = recall(
            self.search_by(None, queries, FIRST),
            self.search_by(None, queries, 2 * FIRST, **exact),
        )
        truth = self.search_by(version, queries, 2 * FIRST, **exact)
        least = int(
            self.database.rows("SELECT current_setting('hnsw.ef_search', true)")[0][0]
            or DEFAULT_EF
        )
        widths = [
            round(least * ratio) for ratio in ratios(max(LARGEST_EF / least, 1.0))
        ]

        def reaches(number: int) -> bool:
            hits = self.search_by(
                version, queries, FIRST, hnsw__ef_search=str(widths[number])
            )
            return recall(hits, truth) >= raw

        return widths[first_that(reaches, len(widths))]

    def _select(self, order: RawOrder, k: int) -> str:
        table = self.table
        columns = f"{order.distance()}, {table.key.id()}"
        return f"SELECT {columns} FROM {table.identifier} WHERE {self._condition} ORDER BY 1 LIMIT {k}"

    def order(self, version: ColumnVersion, alias: str = "") -> ExactOrder:
        """What searches by `version` rank by, where they call the table `alias`."""
        if self.table.index == "none":
            return ExactOrder(self.table, alias, version.column)
        return IndexedOrder(self.table, alias, version.column, version.scale)

    def map_queries(self, queries: np.ndarray, version: ColumnVersion) -> np.ndarray:
        """`queries` [m, d] as `order` takes them for `version`: of unit length where the metric is cosine, and
        mapped."""
        if version.mapped:
            return self.model(version).queries(queries)
        return (
            normalise(queries, "queries") if self.metric is Metric.COSINE else queries
        )

    def map_query(self, query: np.ndarray, version: ColumnVersion) -> np.ndarray:
        """One `query` [d] as `map_queries` has it for `version`. Raises InputError for a query of another shape."""
        query = np.asarray(query, np.float32)
        if query.shape != (self.dim,):
            raise InputError(
                f"a query of shape {query.shape}, and {self.url} has vectors of {self.dim} dimensions"
            )
        mapped: np.ndarray = self.map_queries(query[None], version)[0]
        return mapped

    def explain(self, asked: np.ndarray | Id, k: int = 10) -> Explanation:
        version = self.require_active()
        query = self.map_query(
            asked if isinstance(asked, np.ndarray) else self._read_vector(asked),
            version,
        )
        return explain(
            self.order(version),
            query,
            k,
            is_mapped=version.mapped,
            width=version.ef_search,
        )

    def _read_vector(self, id: Id) -> np.ndarray:
        key = self.table.key
        batch = self._read_batch(
            f"AND ({key.names('target')}) = ({key.values('%(id)s::text')})",
            {"id": str(id)},
        )
        if not batch.ids:
            raise StoreError(f"{self.url} has no target with the id {id!r}")
        vector: np.ndarray = batch.vectors[0]
        return vector

    def with_filter(self, condition: str) -> PgvectorStore:
        """`condition`: what stands behind WHERE."""
        other, order = copy.copy(self), RawOrder(self.table)
        other._condition = f"{self._condition} AND ({condition.replace('%', '%%')})"
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
    """What the table did with a write is not what was written."""


class PgvectorWriting(Writing):
    """The offsets of `version` on their way into its column. The run that began last writes; an older one stops."""

    def __init__(self, store: PgvectorStore, version: ColumnVersion, found: Found):
        self._store, self._version, self.found = store, version, found

    def scan(self) -> Iterator[Batch]:
        return self._store.batches(self._version.column, None)

    @retry_deadlocks
    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Writes `offsets` to the rows of `batch`, and checks that they have them then and that nothing else of the
        table changed.

        Raises StoreError, with all of it undone, where a trigger, a rule or a constraint is in the way.
        """
        store = self._store
        try:
            with store.database.transaction():
                store.require_sight()
                store.lock("FOR SHARE")
                store.require_owner(self._version)
                self._update(batch, offsets)
        except Refused as refused:
            self._withdraw()
            triggers = store.triggers()
            way = (
                f"; on an update fires {triggers}: disable it, run it again, and enable it"
                if triggers
                else ""
            )
            raise StoreError(f"{refused}; it was undone{way}") from None

    def _update(self, batch: Batch, offsets: np.ndarray) -> None:
        """Raises Refused where the rows of `batch` are not as they were, but for `offsets`."""
        database, table, column = (
            self._store.database,
            self._store.table,
            quote_name(self._version.column),
        )
        target = f"{table.identifier} AS target"
        same = f"({table.key.names('target')}) = ({table.key.values('new.id')})"
        news = "unnest(%(ids)s::text[], %(offsets)s::real[], %(digests)s::bytea[]) AS new (id, hub, digest)"
        digest = f"sha256({table.type}_send(target.{quote_name(table.vector)}))"
        has_another = f"target.{column} IS DISTINCT FROM new.hub"
        values = {
            "ids": list(map(str, batch.ids)),
            "offsets": offsets.tolist(),
            "digests": [],
        }

        # Of what others delete or change meanwhile nothing is said: the rows are locked from here on.
        rows = database.rows(
            f"SELECT new.id, new.hub, {digest}, {has_another} FROM {target}, {news} WHERE {same}"
            " FOR NO KEY UPDATE OF target",
            values,
        )
        if not rows:
            return
        changes = schema.count_changes(database, table.oid)
        values["ids"], values["offsets"], values["digests"], changing = map(
            list, zip(*rows, strict=True)
        )
        try:
            # A row that has its offset already is left alone: an update would put it into each index of the table anew.
            database.run(
                f"UPDATE {target} SET {column} = new.hub FROM {news} WHERE {same} AND {has_another}",
                values,
                "writing offsets",
            )
            database.run(
                "SET CONSTRAINTS ALL IMMEDIATE", task="writing offsets"
            )  # fires what waits for the end
        except Passing:
            raise
        except StoreError as error:
            raise Refused(str(error)) from None
        is_moved = f"{digest} IS DISTINCT FROM new.digest"
        ((moved, lack),) = database.rows(
            f"SELECT count(*) FILTER (WHERE {is_moved}), count(*) FILTER (WHERE NOT {is_moved} AND {has_another})"
            f" FROM {news} LEFT JOIN {target} ON {same}",
            values,
        )
        more = schema.count_changes(database, table.oid) - changes - sum(changing)
        wrong = (
            [f"{moved} of {len(rows)} rows have another vector or are gone"]
            if moved
            else []
        )
        wrong += [f"{lack} of {len(rows)} rows lack their offset"] if lack else []
        wrong += [f"{more} further changes were made to the table"] if more > 0 else []
        if wrong:
            raise Refused(
                f"{self._store.url}: after offsets were written, {' and '.join(wrong)}"
            )

    def _withdraw(self) -> None:
        """Takes out a version that is half-written. Where that has to wait, `remove` does it."""
        store = self._store
        if self.found == "active":
            return
        with suppress(StoreError), store.changing():
            store.write_manifest(store.require_owner(self._version).give_up())
            if store.clear().find_current()[0] is None:
                store.delete_manifest()

    @retry_deadlocks
    def activate(self) -> None:
        store, version = self._store, self._version
        store.require_sight()
        store.require_owner(version)
        order = store.order(version)
        if isinstance(order, IndexedOrder):
            schema.build_index(
                store.database, store.table, version.index, version.number, order.index
            )
            self._version = version = version.replace(
                ef_search=store.choose_width(version)
            )
        store.switch(version)


def _as_value(value: object) -> Value | None:
    return value if value is None or isinstance(value, (int, str)) else str(value)
