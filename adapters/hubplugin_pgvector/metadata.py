"""What a database keeps of corrections: documents in a table in a schema of ours.

Document 0 of a vector column is its manifest, any other the model of the version of that number. They belong to a table
and a column as PostgreSQL knows them, by oid and number, which stay under other names. A dump that is read back has
others, and there the names count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from psycopg import sql

from hubplugin.corrections import Manifest, ManifestStore, Version
from hubplugin.errors import StoreError
from hubplugin.model import OffsetModel
from hubplugin.vectors import Progress
from hubplugin_pgvector.database import WAIT_FOR_TABLE, Database, quote_name, truncate
from hubplugin_pgvector.requests import scale_of
from hubplugin_pgvector.schema import OFFSET, VectorTable, index_name

MADE_BY = "made by hubplugin; it goes with the last correction"
CREATE_SCHEMA = f"CREATE SCHEMA hubplugin; COMMENT ON SCHEMA hubplugin IS '{MADE_BY}'"
CREATE_TABLE = """
CREATE TABLE hubplugin.corrections (
    target regclass, vector text, oid bigint NOT NULL, attribute int NOT NULL, number int, content bytea NOT NULL,
    PRIMARY KEY (target, vector, number))
"""
TABLES = """
SELECT relname::text, EXISTS (SELECT FROM pg_attribute WHERE attrelid = c.oid AND attname = 'content')
    FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = 'hubplugin' AND relkind = 'r'
"""
SAME = "CASE WHEN oid = target::oid::bigint THEN attnum = attribute ELSE attname = vector END"
COLUMN = f"SELECT FROM pg_attribute WHERE attrelid = target AND attnum > 0 AND NOT attisdropped AND {SAME}"
OURS = f"target = %(oid)s AND EXISTS ({COLUMN} AND attnum = %(attribute)s)"
DROPPED = "NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = target)"
RENAME = f"""
UPDATE hubplugin.corrections SET vector = attname, oid = target::oid::bigint, attribute = attnum
    FROM pg_attribute WHERE attrelid = target AND attnum > 0 AND NOT attisdropped AND {SAME}
    AND (vector <> attname OR oid <> target::oid::bigint)
"""
MANIFEST = 0
"""The number of its document."""
MEND = "drop the schema hubplugin and the columns hub_offset... of the table, and apply again"


class ColumnVersion(Version):
    """A version, whose offsets lie in the column `column`: `base` once it is active. index: over vector and offset.
    scale: see `requests`. ef_search: with which that index finds as much as the user's own, None where it has none."""

    base: str
    column: str
    index: str
    scale: float
    ef_search: int | None = None

    @property
    def numbered(self) -> str:
        """What its column is called while it is not active."""
        return f"{self.base}_v{self.number}"


class DocumentStore(ManifestStore[ColumnVersion]):
    """A store whose manifest and models are documents of one vector column, and whose offsets lie in columns beside it.

    A change of the manifest and of the columns is one transaction.
    """

    database: Database
    table: VectorTable

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Notes what was renamed, and deletes what is of no table or column any more. Until the end no other run
        changes any correction."""
        with self.database.transaction(wait=WAIT_FOR_TABLE):
            self.database.run("SELECT pg_advisory_xact_lock(hashtext('hubplugin'))")
            if self.has_documents():
                self.database.run(RENAME)
                self.database.run(f"DELETE FROM hubplugin.corrections WHERE {DROPPED}")
                for vector, columns in find_dropped(
                    self.database, self.table.oid
                ).items():
                    self._drop_columns(columns)
                    delete = "DELETE FROM hubplugin.corrections WHERE target = %s AND vector = %s"
                    self.database.run(delete, (self.table.oid, vector))
                self.lock("FOR UPDATE")
            yield

    def has_documents(self) -> bool:
        """Whether their table is there. Raises StoreError for what an earlier version of hubplugin has made."""
        # By a query, since to_regclass may know nothing of what another run has just made.
        tables = dict(self.database.rows(TABLES))
        for name in ("versions", "corrections"):
            if not tables.get(name, True):
                raise StoreError(
                    f"{self.url}: the table hubplugin.{name} is of an earlier version of hubplugin; drop the schema "
                    f"hubplugin and the columns {OFFSET}... of {self.table.name}, and apply again"
                )
        return "corrections" in tables

    def lock(self, mode: str) -> None:
        """Waits until no other run writes or changes this correction, FOR SHARE or FOR UPDATE."""
        self.database.rows(
            f"SELECT FROM hubplugin.corrections WHERE {OURS} {mode}", self._column()
        )

    def read_manifest(self) -> Manifest[ColumnVersion]:
        content = self._read(MANIFEST)
        return (
            Manifest[ColumnVersion]()
            if content is None
            else parse_manifest(content, self.url)
        )

    def write_manifest(self, manifest: Manifest[ColumnVersion]) -> None:
        self._write(MANIFEST, manifest.model_dump_json().encode())

    def delete_manifest(self) -> None:
        """Deletes the table of documents, too, and the schema, where nothing is left in it."""
        if not self.has_documents():
            return
        self._delete(MANIFEST)
        if self.database.rows("SELECT FROM hubplugin.corrections LIMIT 1"):
            return
        self.database.run("DROP TABLE hubplugin.corrections")
        is_ours = "SELECT WHERE obj_description(to_regnamespace('hubplugin'), 'pg_namespace') = %s"
        if self.database.rows(is_ours, (MADE_BY,)):
            self.database.run("DROP SCHEMA hubplugin")

    def read_model(self, version: ColumnVersion) -> OffsetModel:
        return OffsetModel.from_bytes(self._read(version.number) or b"", self.url)

    def write_model(self, version: ColumnVersion, model: OffsetModel) -> None:
        self._write(version.number, model.to_bytes())
        self._alter("ADD COLUMN {} real", version.column)

    def make_room(self, version: ColumnVersion) -> None:
        """`write_model` has added the column, in the same transaction."""

    def delete_model(self, version: ColumnVersion) -> None:
        self._delete(version.number)

    def delete_offsets(
        self, versions: Sequence[ColumnVersion], progress: Progress | None
    ) -> None:
        self._drop_columns([version.column for version in versions])

    def next_number(self, manifest: Manifest[ColumnVersion]) -> int:
        """A number that no document of the table has, of whatever column."""
        query = "SELECT coalesce(max(number), 0) + 1 FROM hubplugin.corrections WHERE target = %s"
        return (
            int(self.database.rows(query, (self.table.oid,))[0][0])
            if self.has_documents()
            else 1
        )

    def base_column(self) -> str:
        """What a first version calls its column: another name where one more vector of the table is corrected."""
        query = (
            f"SELECT FROM hubplugin.corrections WHERE target = %(oid)s AND NOT ({OURS})"
        )
        has_others = self.has_documents() and self.database.rows(query, self._column())
        return f"{truncate(self.table.vector, 40)}_{OFFSET}" if has_others else OFFSET

    def new_version(self, model: OffsetModel, number: int) -> ColumnVersion:
        manifest = self.read_manifest()
        current, active = manifest.find_current()[0], manifest.active.get("")
        base = self.base_column() if current is None else current.base
        index = index_name(self.table.name, self.table.oid, number)
        scale = scale_of(model, None if active is None else active.scale)
        version = ColumnVersion.of(
            model, number, base=base, column=base, index=index, scale=scale
        )
        return version.replace(column=version.numbered)

    def switch(self, version: ColumnVersion) -> None:
        """In one transaction with the columns: the column of the previous version goes, and the column of this one
        takes its name, so that SQL which names it stays as it is."""
        with self.changing():
            manifest, previous = self.require_owner(version), self.active()
            if previous is None or previous.number != version.number:
                if previous is not None:
                    self._alter(
                        "RENAME COLUMN {} TO {}", previous.column, previous.numbered
                    )
                    aside = {"": previous.replace(column=previous.numbered)}
                    self.write_manifest(manifest.replace(active=aside))
                self._alter("RENAME COLUMN {} TO {}", version.column, version.base)
            super().switch(version.replace(column=version.base))
            self.clear()

    def _column(self, **more: object) -> dict[str, object]:
        """The parameters of `OURS`, and `more`."""
        return {"oid": self.table.oid, "attribute": self.table.number, **more}

    def _read(self, number: int) -> bytes | None:
        with self.database.transaction():
            query = f"SELECT content FROM hubplugin.corrections WHERE {OURS} AND number = %(number)s"
            rows = (
                self.database.rows(query, self._column(number=number))
                if self.has_documents()
                else []
            )
            return bytes(rows[0][0]) if rows else None

    def _write(self, number: int, content: bytes) -> None:
        if not self.has_documents():
            if not self.database.rows(
                "SELECT FROM pg_namespace WHERE nspname = 'hubplugin'"
            ):
                self.database.run(CREATE_SCHEMA, task="making a table for the model")
            self.database.run(CREATE_TABLE, task="making a table for the model")
        self.database.run(
            "INSERT INTO hubplugin.corrections VALUES (%s, %s, %s, %s, %s, %s)"
            " ON CONFLICT (target, vector, number) DO UPDATE SET content = excluded.content",
            (
                self.table.oid,
                self.table.vector,
                self.table.oid,
                self.table.number,
                number,
                content,
            ),
        )

    def _delete(self, number: int) -> None:
        statement = (
            f"DELETE FROM hubplugin.corrections WHERE {OURS} AND number = %(number)s"
        )
        self.database.run(statement, self._column(number=number))

    def _drop_columns(self, names: Sequence[str]) -> None:
        for name in names:
            self._alter("DROP COLUMN IF EXISTS {}", name)

    def _alter(self, change: str, *names: str) -> None:
        statement = f"ALTER TABLE {self.table.identifier} {change.format(*map(quote_name, names))}"
        self.database.run(statement, task="changing the table")


def parse_manifest(content: bytes, url: str) -> Manifest[ColumnVersion]:
    return Manifest[ColumnVersion].read(content, f"{url}: hubplugin.corrections", MEND)


def find_dropped(database: Database, oid: int) -> dict[str, list[str]]:
    """The vector columns of the table `oid` of `database` that are gone and have a correction, each with the columns of
    its offsets."""
    query = "SELECT vector, content FROM hubplugin.corrections WHERE target = %s AND number = 0"
    rows = database.rows(f"{query} AND NOT EXISTS ({COLUMN})", (oid,))
    manifests = {
        vector: parse_manifest(content, database.url) for vector, content in rows
    }
    return {
        vector: [version.column for version in manifest.everything]
        for vector, manifest in manifests.items()
    }


def describe_leftovers(database: Database, table: str) -> str:
    """The end of the line that says why `table` cannot be opened: what the `database` keeps of tables that are gone and
    of columns of this one, and how to delete it. Empty where it keeps nothing."""
    try:
        oid = database.rows("SELECT to_regclass(%s)::oid::bigint", (table,))[0][0]
        tables = database.rows(
            f"SELECT DISTINCT target::oid::bigint FROM hubplugin.corrections WHERE {DROPPED}"
        )
        vectors = {} if oid is None else find_dropped(database, oid)
    except StoreError:  # there is no such table, or the role may not read it
        return ""
    conditions = [f"target::oid = {row[0]}" for row in tables]
    conditions += [
        f"target::oid = {oid} AND vector = {sql.Literal(vector).as_string(None)}"
        for vector in vectors
    ]
    if not conditions:
        return ""
    drops = ", ".join(
        f"DROP COLUMN IF EXISTS {column}"
        for columns in vectors.values()
        for column in columns
    )
    alter = f"ALTER TABLE {table} {drops}; " if drops else ""
    delete = f"DELETE FROM hubplugin.corrections WHERE {' OR '.join(conditions)}"
    return f"; hubplugin.corrections still has models of what is gone; to delete them: {alter}{delete}"
