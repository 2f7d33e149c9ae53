"""A vector column of a PostgreSQL table as a `hubplugin.store.Store`: `postgresql://user@host/db?table=photos`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from psycopg import sql
from psycopg.types.json import Json

from hubplugin.abilities import Explanation
from hubplugin.calibration import FIRST, chosen_queries, first_that, ratios, recall
from hubplugin.errors import InputError, StoreError
from hubplugin.metric import Metric, normalise
from hubplugin.model import OffsetModel, Value
from hubplugin.store import Batch, Correction, Found, Hits, Id, Store, Writing
from hubplugin.vectors import Progress
from hubplugin_pgvector import schema
from hubplugin_pgvector.metadata import Metadata, Version, begun
from hubplugin_pgvector.requests import OrderBy, Ranking, as_text, explanation, order_by, scale_of
from hubplugin_pgvector.transport import Transport, name_of, parted, retried_after_deadlock, short

try:
    from pgvector import HalfVector, Vector
except ImportError:  # before 0.4, which LangChain's package for PostgreSQL asks for
    from pgvector.utils import HalfVector, Vector  # type: ignore[import-not-found,no-redef]

UPDATE_TRIGGERS = """
SELECT tgname::text FROM pg_trigger
    WHERE tgrelid = %s AND NOT tgisinternal AND tgenabled <> 'D' AND tgtype & 16 > 0
"""
NOTHING = sql.SQL("")
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


class PgvectorStore(Store):
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
        if not version or tuple(map(int, version[0][0].split(".")[:2])) < (0, 8):
            has = f"pgvector {version[0][0]}" if version else "no pgvector"
            raise StoreError(f"{self.url}: the database has {has}, and 0.8 is needed: ALTER EXTENSION vector UPDATE")
        self.table = schema.read(self.transport, given)
        self.metric, self.dim = self.table.metric, self.table.dim
        self.metadata = Metadata(self.transport, self.table)
        self.record = Path(given["record"]) if given.get("record") else None
        self._condition: sql.Composable = NOTHING
        self._model: OffsetModel | None = None

    def count(self) -> int:
        query = sql.SQL("SELECT count(*) FROM {} WHERE {}").format(self.table.identifier, self.table.vectors_there())
        return int(self.transport.rows(query)[0][0])

    def scan(self, group_by: str | None = None) -> Iterator[Batch]:
        active = self.metadata.active()
        group_by = group_by or (active.group_by if active else None)
        return self.batches(active.column if active else None, group_by)

    def batches(self, offset: str | None, group_by: str | None) -> Iterator[Batch]:
        """All targets, in the order of their key, with the offsets in the column `offset`. Each batch is a statement of
        its own, so that a scan of hours keeps no vacuum from its work and no index from being built."""
        key, head = self.table.key, self._selected(offset, group_by)
        behind = sql.SQL(" AND ({}) > ({})").format(key.listed("target"), key.placeholders())
        tail = sql.SQL(" ORDER BY {} LIMIT {}").format(key.listed("target"), sql.Literal(PAGE))
        rows = self.transport.rows(head + tail)
        while rows:
            batch = self._batch(rows)
            yield batch
            rows = self.transport.rows(head + behind + tail, key.values_of(batch.ids[-1]))

    def _selected(self, offset: str | None, group_by: str | None) -> sql.Composed:
        """The head of a query for rows as `_batch` reads them."""
        if group_by is not None and group_by not in self.table.columns:
            raise StoreError(f"{self.url} has no column {group_by!r} to group by")
        return sql.SQL("SELECT {}, {}, {}, {} FROM {} AS target WHERE {}").format(
            name_of(self.table.vector),
            sql.SQL("NULL::real") if offset is None else name_of(offset),
            sql.SQL("NULL") if group_by is None else name_of(group_by),
            self.table.key.selected(),
            self.table.identifier,
            self.table.vectors_there(),
        )

    def _batch(self, rows: Sequence[tuple[object, ...]]) -> Batch:
        kind = Vector if self.table.type == "vector" else HalfVector
        vectors = np.stack([kind.from_binary(row[0]).to_numpy() for row in rows]).astype(np.float32)  # type: ignore[arg-type]
        offsets = np.array([np.nan if row[1] is None else row[1] for row in rows], np.float32)
        return Batch(
            [self.table.key.id_of(row[3:]) for row in rows], vectors, offsets, groups=[_value(row[2]) for row in rows]
        )

    def correction(self) -> Correction | None:
        versions = self.metadata.versions()
        for state in ("active", "half-written"):
            for version in versions:
                if version.state == state:
                    return Correction(self.metadata.model(version), state == "active", version.made)
        return None

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raises StoreError where the role may not change the table, or has a column where offsets would lie."""
        if not self.metadata.exists() or not self.metadata.versions():
            base = self.metadata.base()
            if base in self.table.columns:
                raise StoreError(f"{self.url}: the column {base} holds something of yours; rename it, or drop it")
        if dry_run:
            return
        owns, may_index, may_create = self.transport.rows(
            "SELECT pg_has_role(relowner, 'USAGE'), has_schema_privilege(relnamespace, 'CREATE'),"
            " CASE WHEN to_regnamespace('hubplugin') IS NULL THEN has_database_privilege(current_database(), 'CREATE')"
            " ELSE has_schema_privilege('hubplugin', 'USAGE') END FROM pg_class WHERE oid = %s",
            (self.table.oid,),
        )[0]
        if not owns:
            raise StoreError(
                f"{self.url}: only the owner of {self.table.name} may add a column to it; connect as that role"
            )
        if not may_index:
            raise StoreError(
                f"{self.url}: the role may not create an index: GRANT CREATE ON SCHEMA {self.table.schema}"
            )
        if not may_create:
            raise StoreError(f"{self.url}: the role may not create the schema hubplugin: GRANT CREATE ON DATABASE")

    @retried_after_deadlock
    def begin(self, model: OffsetModel, progress: Progress | None = None) -> PgvectorWriting:
        self.require_writable()
        owner = uuid.uuid4().hex
        with self.transport.transaction(changes_table=True):
            self.metadata.create()
            versions = self.metadata.versions("FOR UPDATE")
            same = [each for each in versions if each.fingerprint == model.fingerprint and each.state != "previous"]
            if same:
                found: Found = "active" if same[0].state == "active" else "half-written"
                self.metadata.change(same[0], owner=owner)
                return PgvectorWriting(self, replace(same[0], owner=owner), found)
            self.metadata.delete([each for each in versions if each.state == "half-written"])
            number = max((each.number for each in versions), default=0) + 1
            base = versions[0].base if versions else self.metadata.base()
            before = next((each.scale for each in versions if each.state == "active"), None)
            version = begun(model, number, owner, base, self.table, scale_of(model, before))
            self.metadata.add(version, model)
            self.metadata.add_column(version)
        return PgvectorWriting(self, version, "nothing")

    def notes(self) -> Sequence[str]:
        version = self.metadata.active()
        if version is None:
            return []
        where = f"offsets in the column {version.column} of {self.table.name}"
        if self.table.index == "none":
            return [f"{where}; no index, as index=none says"]
        name = name_of(self.table.schema, version.index).as_string(None).replace("%%", "%")
        size = self.transport.rows(
            "SELECT sum(pg_relation_size(relid))::bigint FROM pg_partition_tree(to_regclass(%s))"
            " UNION ALL SELECT pg_relation_size(to_regclass(%s))",
            (name, name),
        )
        bytes_of_index = next((row[0] for row in size if row[0]), 0)
        if not bytes_of_index:
            return [f"{where}; its index {version.index} is gone, so that searches read all rows: hubplugin refresh"]
        width = version.facts.get("ef_search")
        wide = f"; with hnsw.ef_search = {width} it finds as much as a raw one did" if width else ""
        used = "uses" if self._uses(version) else "sorts all rows rather than use"
        return [f"{where}; a search {used} the index {version.index} ({bytes_of_index / 2**20:.1f} MB){wide}"]

    def _uses(self, version: Version) -> bool:
        """Whether the planner has a search use the index of `version`, or those of its partitions."""
        ranking, query = self._ranking(version), np.full((1, self.dim), self.dim**-0.5, np.float32)
        statement = sql.SQL("EXPLAIN (FORMAT JSON) ") + self._searched(ranking.distance(), 10)
        plan = self.transport.rows(statement, (as_text(ranking.queries(query)[0]),))[0][0]
        return json.dumps(short(version.index, 50))[:-1] in json.dumps(plan)

    def plan(self) -> Sequence[str]:
        column = self.metadata.base()
        triggers = self.transport.rows(UPDATE_TRIGGERS, (self.table.oid,))
        named = ", ".join(row[0] for row in triggers)
        return [
            f"would add the column {column} to {self.table.name}, update every row once, and build an index beside it",
            *([f"these triggers fire on the update of every row: {named}"] if named else []),
        ]

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        return self._found(None if raw else self.metadata.active(), queries, k)

    def _found(self, version: Version | None, queries: np.ndarray, k: int, **settings: str) -> Hits:
        """What a search by `version`, or a raw one, finds with `settings` of the server."""
        ids, scores = [], []
        if version is None:
            ranking = Ranking(self.table, schema.OFFSET, 1.0)
            statement, score, asked = self._searched(ranking.raw(), k), ranking.raw_score, queries
        else:
            ranking = self._ranking(version)
            statement, score = self._searched(ranking.distance(), k), ranking.score
            asked = ranking.queries(self.asked(queries, version))
        with self.transport.reading(hnsw__iterative_scan="strict_order", **settings):
            for query in asked:
                rows = self.transport.rows(statement, (as_text(query),))
                ids.append([self.table.key.id_of(row[1:]) for row in rows])
                scores.append([score(row[0]) for row in rows])
        return Hits(ids, scores)

    def width(self, version: Version) -> int | None:
        """The least hnsw.ef_search with which corrected searches for queries of the bank find as much of the exact
        results as raw searches do as the server is set. None where the user has no HNSW index to compare with."""
        if not any(
            row[2] == "hnsw" for row in self.transport.rows(schema.INDEXES, (self.table.oid, self.table.vector))
        ):
            return None
        queries = chosen_queries(self.model(version), self.batches(None, None))
        exact = {"enable_indexscan": "off"}
        raw = recall(self._found(None, queries, FIRST), self._found(None, queries, 2 * FIRST, **exact))
        truth = self._found(version, queries, 2 * FIRST, **exact)
        least = int(self.transport.rows("SELECT current_setting('hnsw.ef_search', true)")[0][0] or DEFAULT_EF)
        widths = [round(least * ratio) for ratio in ratios(max(LARGEST_EF / least, 1.0))]

        def reaches(number: int) -> bool:
            found = self._found(version, queries, FIRST, hnsw__ef_search=str(widths[number]))
            return recall(found, truth) >= raw

        return widths[first_that(reaches, len(widths))]

    def _searched(self, distance: sql.Composable, k: int) -> sql.Composed:
        return sql.SQL("SELECT {}, {} FROM {} WHERE {}{} ORDER BY 1 LIMIT {}").format(
            distance,
            self.table.key.selected(),
            self.table.identifier,
            sql.SQL("{} IS NOT NULL").format(name_of(self.table.vector)),
            self._condition,
            sql.Literal(k),
        )

    def _ranking(self, version: Version, alias: str = "") -> Ranking:
        return Ranking(self.table, version.column, version.scale, alias)

    def asked(self, queries: np.ndarray, version: Version) -> np.ndarray:
        """`queries` [m, d] as they are searched with: of unit length where the metric is cosine, and mapped."""
        if version.facts["mapped"]:
            return self.model(version).queries(queries)
        return normalise(queries, "queries") if self.metric is Metric.COSINE else queries

    def model(self, version: Version) -> OffsetModel:
        """That of `version`, read once."""
        if self._model is None or self._model.fingerprint != version.fingerprint:
            self._model = self.metadata.model(version)
        return self._model

    def active_version(self) -> Version:
        """Raises StoreError where no correction is active."""
        version = self.metadata.active()
        if version is None:
            raise StoreError(f"{self.url}: no correction is active; run `hubplugin apply` first")
        return version

    def order_by(self, query: np.ndarray, alias: str = "") -> OrderBy:
        """See `hubplugin_pgvector.order_by`."""
        version = self.active_version()
        return order_by(self._ranking(version, alias), self.asked(self._query(query)[None], version)[0])

    def explain(self, asked: np.ndarray | Id, k: int = 10) -> Explanation:
        version = self.active_version()
        query = self._query(asked) if isinstance(asked, np.ndarray) else self._vector_of(asked)
        query = self.asked(query[None], version)[0]
        width = version.facts.get("ef_search")
        return explanation(self._ranking(version), query, k, bool(version.facts["mapped"]), width)

    def _query(self, query: np.ndarray) -> np.ndarray:
        query = np.asarray(query, np.float32)
        if query.shape != (self.dim,):
            raise InputError(f"a query of shape {query.shape}, and {self.url} has vectors of {self.dim} dimensions")
        return query

    def _vector_of(self, key: Id) -> np.ndarray:
        these = sql.SQL(" AND ({}) = ({})").format(self.table.key.listed(), self.table.key.placeholders())
        rows = self.transport.rows(self._selected(None, None) + these, self.table.key.values_of(key))
        if not rows:
            raise StoreError(f"{self.url} has no target with the id {key!r}")
        vector: np.ndarray = self._batch(rows).vectors[0]
        return vector

    def filtered(self, condition: str) -> PgvectorStore:
        """`condition`: what stands behind WHERE."""
        other = PgvectorStore.__new__(PgvectorStore)
        vars(other).update(vars(self))
        other._condition = (
            self._condition
            + sql.SQL(" AND (" + condition.replace("{", "{{").replace("}", "}}").replace("%", "%%") + ")").format()
        )
        ranking = Ranking(self.table, schema.OFFSET, 1.0)
        zero = as_text(np.zeros(self.dim, np.float32))
        try:
            with self.transport.reading():
                self.transport.rows(sql.SQL("EXPLAIN ") + other._searched(ranking.raw(), 1), (zero,), "the filter")
        except StoreError as error:
            raise InputError(f"{error}; a filter is what stands behind WHERE: \"tenant = 'a'\"") from None
        return other

    def previous(self) -> OffsetModel | None:
        version = next((each for each in self.metadata.versions() if each.state == "previous"), None)
        return None if version is None else self.metadata.model(version)

    @retried_after_deadlock
    def remove(self, progress: Progress | None = None) -> None:
        if not self.metadata.exists():
            return
        with self.transport.transaction(changes_table=True):
            self.metadata.delete(self.metadata.versions("FOR UPDATE"))
            self.metadata.delete_place()


class PgvectorWriting(Writing):
    """The offsets of `version` on their way into its column. The run that began last writes; an older one stops."""

    def __init__(self, store: PgvectorStore, version: Version, found: Found):
        self._store, self._version, self.found = store, version, found

    def scan(self) -> Iterator[Batch]:
        return self._store.batches(self._version.column, self._version.group_by)

    @retried_after_deadlock
    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        store, key = self._store, self._store.table.key
        columns = list(zip(*(key.values_of(each) for each in batch.ids), strict=True))
        given = sql.SQL(", ").join(sql.SQL("%s::text[]") for _ in columns)
        same = sql.SQL(" AND ").join(
            sql.SQL("target.{} = given.{}::{}").format(name_of(name), name_of(f"k{i}"), sql.SQL(kind))
            for i, (name, kind) in enumerate(zip(key.columns, key.types, strict=True))
        )
        # A row that has its offset already is left alone: an update would put it into each index of the table anew.
        query = sql.SQL(
            "UPDATE {} AS target SET {column} = given.hub FROM unnest({}, %s::real[]) AS given ({}, hub)"
            " WHERE {} AND target.{column} IS DISTINCT FROM given.hub"
        ).format(
            store.table.identifier,
            given,
            sql.SQL(", ").join(name_of(f"k{i}") for i in range(len(columns))),
            same,
            column=name_of(self._version.column),
        )
        with store.transport.transaction():
            self._undisturbed("FOR SHARE")
            store.transport.run(query, [*map(list, columns), offsets.tolist()], "writing offsets")

    @retried_after_deadlock
    def activate(self) -> None:
        store = self._store
        self._undisturbed("")
        if store.table.index != "none":
            ranking = Ranking(store.table, self._version.column, self._version.scale)
            schema.build_index(store.transport, store.table, self._version.index, ranking.opclass())
            self._version.facts["ef_search"] = store.width(self._version)
        with store.transport.transaction(changes_table=True):
            versions = self._undisturbed("FOR UPDATE")
            store.metadata.change(self._version, facts=Json(self._version.facts))
            if self._version.state == "active":
                return
            active = next((each for each in versions if each.state == "active"), None)
            if active is not None:
                store.metadata.delete([each for each in versions if each.state == "previous"])
                store.metadata.retire(active)
            store.metadata.change(self._version, state="active")

    def _undisturbed(self, lock: str) -> Sequence[Version]:
        """All versions. Raises StoreError where another run has begun to write this one, or deleted it."""
        versions = self._store.metadata.versions(lock)
        if any((each.number, each.owner) == (self._version.number, self._version.owner) for each in versions):
            return versions
        raise StoreError(
            f"{self._store.url}: another run has begun since, and this one stops; searches use nothing that it wrote"
        )


def _value(value: object) -> Value | None:
    return value if value is None or isinstance(value, (int, str)) else str(value)
