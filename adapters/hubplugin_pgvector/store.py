"""A vector column of a PostgreSQL table as a `hubplugin.store.Store`: `postgresql://user@host/db?table=photos`."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from hubplugin.calibration import FIRST, choose_queries, first_that, ratios, recall
from hubplugin.corrections import Manifest, ManifestStore
from hubplugin.errors import InputError, StoreError
from hubplugin.metric import Metric, normalise
from hubplugin.model import OffsetModel, Value
from hubplugin.store import Batch, Explanation, Found, Hits, Id, Writing
from hubplugin.vectors import Progress
from hubplugin_pgvector import schema
from hubplugin_pgvector.metadata import Column, Metadata, left_behind, read_manifest
from hubplugin_pgvector.requests import Ranking, as_text, explanation, scale_of
from hubplugin_pgvector.transport import (
    WAIT_FOR_TABLE,
    Passing,
    Transport,
    name_of,
    parted,
    retried_after_deadlock,
)

try:
    from pgvector import HalfVector, Vector
except ImportError:  # before 0.4, which LangChain's package for PostgreSQL asks for
    from pgvector.utils import HalfVector, Vector  # type: ignore[import-not-found,no-redef]

logger = logging.getLogger("hubplugin.pgvector")

INDEXES = """
SELECT relname::text, pg_relation_size(c.oid), indisvalid FROM pg_class c JOIN pg_index ON indexrelid = c.oid
    WHERE c.oid IN (SELECT to_regclass(%s) UNION SELECT relid FROM pg_partition_tree(to_regclass(%s)))
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

    table: as in SQL, with its schema where it is not on the search path. vector: the column, by default the only one of
    type vector or halfvec. key: the columns that tell rows apart, by default the primary key. metric: cosine, dot or
    euclidean, by default that of the index on the column. index: the type of the corrected index, "vector" or
    "halfvec", by default that of the column; "none" builds no index. record: the folder of a `hubplugin.Recorder`. All
    else in it is libpq's; passwords are best kept in PGPASSFILE or a service file.

    Raises StoreError for what is not there or cannot carry offsets, and for a server that cannot be reached.
    """
    return PgvectorStore(url)


class PgvectorStore(ManifestStore[Column]):
    """See `open_url`, and `hubplugin.store.Store`, which says what each method does."""

    shared = True
    maps_queries = True
    how_to_record = (
        "hubplugin.Recorder(FOLDER).add(queries) beside each search, and name it behind the table: &record=FOLDER"
    )

    def __init__(self, url: str):
        conninfo, self.url, given = parted(url)
        self.transport = Transport(conninfo, self.url)
        version = self.transport.rows("SELECT extversion FROM pg_extension WHERE extname = 'vector'", what="connecting")
        self._pgvector = tuple(map(int, re.findall(r"\d+", version[0][0])[:3])) if version else ()
        try:
            if self._pgvector < (0, 8):
                has = f"pgvector {version[0][0]}" if version else "no pgvector"
                raise StoreError(
                    f"{self.url}: the database has {has}, and 0.8 is needed: ALTER EXTENSION vector UPDATE"
                )
            self.table = schema.read(self.transport, given)
        except StoreError as error:
            raise StoreError(f"{error}{left_behind(self.transport, given.get('table', ''))}") from None
        self.metric, self.dim = self.table.metric, self.table.dim
        self.metadata = Metadata(self.transport, self.table)
        self.record = Path(given["record"]) if given.get("record") else None
        self._condition = ""

    def count(self) -> int:
        query = f"SELECT count(*) FROM {self.table.identifier} WHERE {self.table.vectors_there()}"
        return int(self.transport.rows(query)[0][0])

    def scan(self, group_by: str | None = None) -> Iterator[Batch]:
        active = self.active()
        group_by = group_by or (active.group_by if active else None)
        return self.batches(active.column if active else None, group_by)

    def batches(self, offset: str | None, group_by: str | None) -> Iterator[Batch]:
        """All targets, in the order of their key, with the offsets in the column `offset`. Each batch is a statement of
        its own, so that a scan of hours keeps no vacuum from its work and no index from being built."""
        key, head = self.table.key, self._selected(offset, group_by)
        behind = f" AND ({key.listed('target')}) > ({key.placeholders()})"
        tail = f" ORDER BY {key.listed('target')} LIMIT {PAGE}"
        rows = self.transport.rows(head + tail)
        while rows:
            batch = self._batch(rows)
            yield batch
            rows = self.transport.rows(head + behind + tail, key.values_of(batch.ids[-1]))

    def _selected(self, offset: str | None, group_by: str | None) -> str:
        """The head of a query for rows as `_batch` reads them."""
        if group_by is not None and group_by not in self.table.columns:
            raise StoreError(f"{self.url} has no column {group_by!r} to group by")
        table = self.table
        columns = (
            name_of(table.vector),
            "NULL::real" if offset is None else name_of(offset),
            "NULL" if group_by is None else name_of(group_by),
            table.key.selected(),
        )
        return f"SELECT {', '.join(columns)} FROM {table.identifier} AS target WHERE {table.vectors_there()}"

    def _batch(self, rows: Sequence[tuple[object, ...]]) -> Batch:
        kind = Vector if self.table.type == "vector" else HalfVector
        vectors = np.stack([kind.from_binary(row[0]).to_numpy() for row in rows]).astype(np.float32)  # type: ignore[arg-type]
        offsets = np.array([np.nan if row[1] is None else row[1] for row in rows], np.float32)
        return Batch(
            [self.table.key.id_of(row[3:]) for row in rows], vectors, offsets, groups=[_value(row[2]) for row in rows]
        )

    @contextmanager
    def changing(self) -> Iterator[None]:
        with self.transport.transaction(wait=WAIT_FOR_TABLE):
            self.metadata.tidy()
            if self.metadata.exists():
                self.metadata.lock("FOR UPDATE")
            yield

    def read_manifest(self) -> Manifest[Column]:
        content = self.metadata.read(0)
        return Manifest[Column]() if content is None else read_manifest(content, self.url)

    def write_manifest(self, manifest: Manifest[Column]) -> None:
        self.metadata.write(0, manifest.model_dump_json().encode())

    def delete_manifest(self) -> None:
        if self.metadata.exists():
            self.metadata.delete(0)
            self.metadata.delete_place()

    def new_version(self, model: OffsetModel, number: int) -> Column:
        manifest = self.read_manifest()
        lying, active = manifest.find_current()[0], manifest.active.get("")
        base = self.metadata.base() if lying is None else lying.base
        index = schema.index_name(self.table.name, self.table.oid, number)
        scale = scale_of(model, None if active is None else active.scale)
        version = Column.of(model, number, base=base, column=base, index=index, scale=scale)
        return version.replace(column=version.numbered)

    def next_number(self, manifest: Manifest[Column]) -> int:
        return self.metadata.next_number() if self.metadata.exists() else 1

    def read_model(self, version: Column) -> OffsetModel:
        return OffsetModel.from_bytes(self.metadata.read(version.number) or b"", self.url)

    def write_model(self, version: Column, model: OffsetModel) -> None:
        self.metadata.write(version.number, model.to_bytes())
        self.metadata.add_column(version.column)

    def delete_model(self, version: Column) -> None:
        self.metadata.delete(version.number)

    def make_room(self, version: Column) -> None:
        """`write_model` has added the column, in the same transaction."""

    def delete_offsets(self, versions: Sequence[Column], progress: Progress | None) -> None:
        for version in versions:
            self.metadata.drop_column(version.column)

    def switch(self, version: Column) -> None:
        """In one transaction with the columns: that of the version before goes, and this one's takes its name, so that
        SQL which names it stays as it is."""
        with self.changing():
            manifest, before = self.require_owner(version), self.active()
            if before is None or before.number != version.number:
                if before is not None:
                    self.metadata.rename_column(before.column, before.numbered)
                    aside = {"": before.replace(column=before.numbered)}
                    self.write_manifest(manifest.replace(active=aside))
                self.metadata.rename_column(version.column, version.base)
            super().switch(version.replace(column=version.base))
            self.clear()

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raises StoreError where the role may not change the table, or has a column where offsets would lie."""
        if self.read_manifest().find_current()[0] is None:
            base = self.metadata.base()
            if base in self.table.columns:
                raise StoreError(f"{self.url}: the column {base} holds something of yours; rename it, or drop it")
        if dry_run:
            return
        self.require_sight()
        lacking = [
            "the server, or this role, only reads; name one that may write",
            f"only the owner of {self.table.name} may add a column to it; connect as that role",
            f"the role may not create an index: GRANT CREATE ON SCHEMA {self.table.schema}",
            "the role may not create the schema hubplugin: GRANT CREATE ON DATABASE",
        ]
        for right, lack in zip(self.transport.rows(RIGHTS, (self.table.oid,))[0], lacking, strict=True):
            if not right:
                raise StoreError(f"{self.url}: {lack}")

    def require_sight(self) -> None:
        """Raises StoreError where rows may be hidden from the role, which would stay without offsets."""
        if hidden := schema.hiding(self.transport, self.table):
            raise StoreError(
                f"{self.url}: {hidden} may hide rows of {self.table.name} from this role; connect as one with "
                "BYPASSRLS, or as the owner of the table, without FORCE ROW LEVEL SECURITY"
            )

    @retried_after_deadlock
    def begin(self, model: OffsetModel, progress: Progress | None = None) -> PgvectorWriting:
        self.require_writable()
        writing = PgvectorWriting(self, *self.start_version(model, progress))
        if writing.found == "nothing" and (firing := schema.firing(self.transport, self.table)):
            logger.warning("%s: these fire on the update of every row: %s", self.url, ", ".join(firing))
        return writing

    def notes(self) -> Sequence[str]:
        manifest = self.read_manifest()
        version = manifest.active.get("")
        if version is None:
            return []
        where = f"offsets in the column {version.column} of {self.table.name}"
        hidden = schema.hiding(self.transport, self.table)
        notes = [f"{hidden} may hide rows from this role: only those it sees are counted"] if hidden else []
        if manifest.writing is not None:
            half = f"{manifest.writing.column}, and its index where there is one"
            notes.append(f"{half}, are of a run that goes on or was cut off: run it again")
        if self.table.index == "none":
            return [f"{where}; no index, as index=none says", *notes]
        if self._pgvector < SOUND:
            notes.append(
                f"pgvector {'.'.join(map(str, self._pgvector))}: before 0.8.4 a vacuum can damage HNSW indexes: "
                "install a newer one, then ALTER EXTENSION vector UPDATE and REINDEX"
            )
        name = name_of(self.table.schema, version.index).replace("%%", "%")
        indexes = self.transport.rows(INDEXES, (name, name))
        if not indexes or not all(valid for *_, valid in indexes):
            gone = f"its index {version.index} is {'not whole' if indexes else 'gone'}"
            return [f"{where}; {gone}, so that searches read all rows: hubplugin refresh", *notes]
        width = version.ef_search
        wide = f"; with hnsw.ef_search = {width} it finds as much as a raw one did" if width else ""
        used = "uses" if self._uses(version, [row[0] for row in indexes]) else "sorts all rows rather than use"
        size = sum(row[1] for row in indexes) / 2**20
        return [f"{where}; a search {used} the index {version.index} ({size:.1f} MB){wide}", *notes]

    def _uses(self, version: Column, indexes: Sequence[str]) -> bool:
        """Whether the planner has a search by `version` use one of `indexes`."""
        ranking, query = self.ranking(version), np.full((1, self.dim), self.dim**-0.5, np.float32)
        statement = f"EXPLAIN (FORMAT JSON) {self._searched(ranking.distance(), 10)}"
        plan = self.transport.rows(statement, (as_text(ranking.queries(query)[0]),))[0][0]
        return any(json.dumps(name) in json.dumps(plan) for name in indexes)

    def plan(self) -> Sequence[str]:
        column = self.metadata.base()
        named = ", ".join(schema.firing(self.transport, self.table))
        return [
            f"would add the column {column} to {self.table.name}, update every row once, and build an index beside it",
            *([f"these fire on the update of every row: {named}"] if named else []),
        ]

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        return self._found(None if raw else self.active(), queries, k)

    def _found(self, version: Column | None, queries: np.ndarray, k: int, **settings: str) -> Hits:
        """What a search by `version`, or a raw one, finds with `settings` of the server."""
        ids, scores = [], []
        if version is None:
            ranking = Ranking(self.table, schema.OFFSET, 1.0)
            statement, score, asked = self._searched(ranking.raw(), k), ranking.raw_score, queries
        else:
            ranking = self.ranking(version)
            statement, score = self._searched(ranking.distance(), k), ranking.score
            asked = ranking.queries(self.asked(queries, version))
        with self.transport.reading(hnsw__iterative_scan="strict_order", **settings):
            for query in asked:
                rows = self.transport.rows(statement, (as_text(query),))
                ids.append([self.table.key.id_of(row[1:]) for row in rows])
                scores.append([score(row[0]) for row in rows])
        return Hits(ids, scores)

    def width(self, version: Column) -> int | None:
        """The least hnsw.ef_search with which corrected searches for queries of the bank find as much of the exact
        results as raw searches do as the server is set. None where the user has no HNSW index to compare with."""
        if not any(
            row[2] == "hnsw" for row in self.transport.rows(schema.INDEXES, (self.table.oid, self.table.vector))
        ):
            return None
        queries = choose_queries(self.model(version), self.batches(None, None))
        exact = {"enable_indexscan": "off"}
        raw = recall(self._found(None, queries, FIRST), self._found(None, queries, 2 * FIRST, **exact))
        truth = self._found(version, queries, 2 * FIRST, **exact)
        least = int(self.transport.rows("SELECT current_setting('hnsw.ef_search', true)")[0][0] or DEFAULT_EF)
        widths = [round(least * ratio) for ratio in ratios(max(LARGEST_EF / least, 1.0))]

        def reaches(number: int) -> bool:
            found = self._found(version, queries, FIRST, hnsw__ef_search=str(widths[number]))
            return recall(found, truth) >= raw

        return widths[first_that(reaches, len(widths))]

    def _searched(self, distance: str, k: int) -> str:
        table, where = self.table, self.table.vectors_there() + self._condition
        return f"SELECT {distance}, {table.key.selected()} FROM {table.identifier} WHERE {where} ORDER BY 1 LIMIT {k}"

    def ranking(self, version: Column, alias: str = "") -> Ranking:
        return Ranking(self.table, version.column, version.scale, alias)

    def asked(self, queries: np.ndarray, version: Column) -> np.ndarray:
        """`queries` [m, d] as they are searched with: of unit length where the metric is cosine, and mapped."""
        if version.mapped:
            return self.model(version).queries(queries)
        return normalise(queries, "queries") if self.metric is Metric.COSINE else queries

    def explain(self, asked: np.ndarray | Id, k: int = 10) -> Explanation:
        version = self.require_active()
        query = self.checked(asked) if isinstance(asked, np.ndarray) else self._vector_of(asked)
        query = self.asked(query[None], version)[0]
        width = version.ef_search
        return explanation(self.ranking(version), query, k, version.mapped, width)

    def checked(self, query: np.ndarray) -> np.ndarray:
        query = np.asarray(query, np.float32)
        if query.shape != (self.dim,):
            raise InputError(f"a query of shape {query.shape}, and {self.url} has vectors of {self.dim} dimensions")
        return query

    def _vector_of(self, key: Id) -> np.ndarray:
        these = f" AND ({self.table.key.listed()}) = ({self.table.key.placeholders()})"
        rows = self.transport.rows(self._selected(None, None) + these, self.table.key.values_of(key))
        if not rows:
            raise StoreError(f"{self.url} has no target with the id {key!r}")
        vector: np.ndarray = self._batch(rows).vectors[0]
        return vector

    def with_filter(self, condition: str) -> PgvectorStore:
        """`condition`: what stands behind WHERE."""
        other = PgvectorStore.__new__(PgvectorStore)
        vars(other).update(vars(self))
        other._condition = f"{self._condition} AND ({condition.replace('%', '%%')})"
        ranking = Ranking(self.table, schema.OFFSET, 1.0)
        zero = as_text(np.zeros(self.dim, np.float32))
        try:
            with self.transport.reading():
                self.transport.rows(f"EXPLAIN {other._searched(ranking.raw(), 1)}", (zero,), "the filter")
        except StoreError as error:
            raise InputError(f"{error}; a filter is what stands behind WHERE: \"tenant = 'a'\"") from None
        return other

    @retried_after_deadlock
    def remove(self, progress: Progress | None = None) -> None:
        super().remove(progress)


class Refused(StoreError):
    """What the table did with a write is not what was written."""


class PgvectorWriting(Writing):
    """The offsets of `version` on their way into its column. The run that began last writes; an older one stops."""

    def __init__(self, store: PgvectorStore, version: Column, found: Found):
        self._store, self._version, self.found = store, version, found

    def scan(self) -> Iterator[Batch]:
        return self._store.batches(self._version.column, self._version.group_by)

    @retried_after_deadlock
    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Writes them, and looks whether the rows have them then, and whether nothing else of the table has changed.

        Raises StoreError, with all of it undone, where a trigger, a rule or a constraint is in the way."""
        store = self._store
        try:
            with store.transport.transaction():
                store.require_sight()
                store.metadata.lock("FOR SHARE")
                store.require_owner(self._version)
                self._update(batch, dict(zip(batch.ids, offsets.tolist(), strict=True)))
        except Refused as refused:
            self._withdraw()
            firing = ", ".join(schema.firing(store.transport, store.table))
            way = f"; on an update fires {firing}: disable it, run it again, and enable it" if firing else ""
            raise StoreError(f"{refused}; it was undone{way}") from None

    def _update(self, batch: Batch, offsets: Mapping[Id, float]) -> None:
        """Raises Refused where the rows of `batch` are not as they were, but for `offsets`."""
        store, key = self._store, self._store.table.key
        columns = [list(column) for column in zip(*(key.values_of(each) for each in batch.ids), strict=True)]
        table, column = store.table.identifier, name_of(self._version.column)
        given = ", ".join("%s::text[]" for _ in columns)
        given = f"unnest({given}, %s::real[]) AS given ({', '.join(f'k{i}' for i in range(len(columns)))}, hub)"
        same = " AND ".join(
            f"target.{name_of(name)} = given.k{i}::{kind}"
            for i, (name, kind) in enumerate(zip(key.columns, key.types, strict=True))
        )
        digest = f"sha256({store.table.type}_send(target.{name_of(store.table.vector)}))"
        looked_at = (
            f"SELECT {digest}, target.{column}, {key.selected('target')} FROM {table} AS target, {given} WHERE {same}"
        )
        # A row that has its offset already is left alone: an update would put it into each index of the table anew.
        update = (
            f"UPDATE {table} AS target SET {column} = given.hub FROM {given}"
            f" WHERE {same} AND target.{column} IS DISTINCT FROM given.hub"
        )
        parameters = [*columns, list(offsets.values())]

        def rows(lock: str) -> dict[Id, tuple[bytes, float]]:
            found = store.transport.rows(looked_at + lock, parameters)
            return {key.id_of(row[2:]): (row[0], row[1]) for row in found}

        # Of what others delete or change meanwhile nothing is said: the rows are locked from here on.
        before, touched = rows(" FOR NO KEY UPDATE OF target"), schema.touched(store.transport, store.table)
        try:
            store.transport.run(update, parameters, "writing offsets")
            store.transport.run("SET CONSTRAINTS ALL IMMEDIATE", what="writing offsets")  # fires what waits for the end
        except Passing:
            raise
        except StoreError as error:
            raise Refused(str(error)) from None
        after, touched = rows(""), schema.touched(store.transport, store.table) - touched
        right = {name for name, row in after.items() if name in before and row == (before[name][0], offsets[name])}
        moved = sum(name not in after or after[name][0] != row[0] for name, row in before.items())
        more = touched - sum(row[1] != offsets[name] for name, row in before.items())
        lack = len(before) - len(right) - moved
        wrong = [f"{moved} of {len(before)} rows have another vector or are gone"] if moved else []
        wrong += [f"{lack} of {len(before)} rows lack their offset"] if lack else []
        wrong += [f"{more} further changes were made to the table"] if more > 0 else []
        if wrong:
            raise Refused(f"{store.url}: after offsets were written, {' and '.join(wrong)}")

    def _withdraw(self) -> None:
        """Takes out a version that is half-written. Where that has to wait, `remove` does it."""
        store = self._store
        if self.found == "active":
            return
        with suppress(StoreError), store.changing():
            store.write_manifest(store.require_owner(self._version).give_up())
            if store.clear().find_current()[0] is None:
                store.delete_manifest()

    @retried_after_deadlock
    def activate(self) -> None:
        store = self._store
        store.require_sight()
        store.require_owner(self._version)
        if store.table.index != "none":
            ranking = Ranking(store.table, self._version.column, self._version.scale)
            named = self._version.index, self._version.number
            schema.build_index(store.transport, store.table, *named, ranking.opclass())
            self._version = self._version.replace(ef_search=store.width(self._version))
        store.switch(self._version)


def _value(value: object) -> Value | None:
    return value if value is None or isinstance(value, (int, str)) else str(value)
