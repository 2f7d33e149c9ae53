"""What is kept of corrections in a database: documents in a table in a schema of ours.

Document 0 of a vector column is its manifest, any other the model of the version of that number. They belong to a table
and a column as PostgreSQL knows them, by oid and number, which stay under other names. A dump that is read back has
others, and there the names count.
"""

from __future__ import annotations

from psycopg import sql

from hubplugin.corrections import Manifest, Version
from hubplugin.errors import StoreError
from hubplugin_pgvector.schema import OFFSET, Table
from hubplugin_pgvector.transport import Transport, name_of, short

MADE_BY = "made by hubplugin; it goes with the last correction"
CREATE_SCHEMA = ("CREATE SCHEMA hubplugin", f"COMMENT ON SCHEMA hubplugin IS '{MADE_BY}'")
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
OURS = f"target = %s AND EXISTS (SELECT FROM pg_attribute WHERE attrelid = target AND attnum = %s AND {SAME})"
DROPPED = "NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = target)"
GONE = f"""
NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = target AND attnum > 0 AND NOT attisdropped AND {SAME})
"""
RENAME = f"""
UPDATE hubplugin.corrections SET vector = attname, oid = target::oid::bigint, attribute = attnum
    FROM pg_attribute WHERE attrelid = target AND attnum > 0 AND NOT attisdropped AND {SAME}
    AND (vector <> attname OR oid <> target::oid::bigint)
"""


class Column(Version):
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


class Metadata:
    """The documents of one vector column."""

    def __init__(self, transport: Transport, table: Table):
        self._transport, self._table = transport, table
        self._which = (table.oid, table.number)

    def exists(self) -> bool:
        """Whether there are documents. Raises StoreError for what an earlier version of hubplugin has made."""
        # By a query, since to_regclass may know nothing of what another run has just made.
        tables = dict(self._transport.rows(TABLES))
        earlier = next((name for name in ("versions", "corrections") if tables.get(name, True) is False), None)
        if earlier is not None:
            raise StoreError(
                f"{self._transport.url}: the table hubplugin.{earlier} is of an earlier version of hubplugin; drop the "
                f"schema hubplugin and the columns {OFFSET}... of {self._table.name}, and apply again"
            )
        return "corrections" in tables

    def lock(self, how: str) -> None:
        """Waits until no other run writes or changes this correction, FOR SHARE or FOR UPDATE."""
        self._transport.rows(f"SELECT FROM hubplugin.corrections WHERE {OURS} {how}", self._which)

    def read(self, number: int) -> bytes | None:
        with self._transport.transaction():
            if not self.exists():
                return None
            query = f"SELECT content FROM hubplugin.corrections WHERE {OURS} AND number = %s"
            rows = self._transport.rows(query, (*self._which, number))
            return bytes(rows[0][0]) if rows else None

    def write(self, number: int, content: bytes) -> None:
        if not self.exists():
            is_schema_there = self._transport.rows("SELECT FROM pg_namespace WHERE nspname = 'hubplugin'")
            for statement in (*(() if is_schema_there else CREATE_SCHEMA), CREATE_TABLE):
                self._transport.run(statement, what="making a table for the model")
        self._transport.run(
            "INSERT INTO hubplugin.corrections VALUES (%s, %s, %s, %s, %s, %s)"
            " ON CONFLICT (target, vector, number) DO UPDATE SET content = excluded.content",
            (self._table.oid, self._table.vector, *self._which, number, content),
        )

    def delete(self, number: int) -> None:
        self._transport.run(f"DELETE FROM hubplugin.corrections WHERE {OURS} AND number = %s", (*self._which, number))

    def delete_place(self) -> None:
        """Deletes the table of documents, and the schema, where nothing is left in it."""
        if self._transport.rows("SELECT FROM hubplugin.corrections LIMIT 1"):
            return
        self._transport.run("DROP TABLE hubplugin.corrections")
        ours = "SELECT WHERE obj_description(to_regnamespace('hubplugin'), 'pg_namespace') = %s"
        if self._transport.rows(ours, (MADE_BY,)):
            self._transport.run("DROP SCHEMA hubplugin")

    def tidy(self) -> None:
        """Notes what was renamed, and deletes what is of no table or column any more. Until the end of the transaction
        no other run changes any correction."""
        self._transport.rows("SELECT pg_advisory_xact_lock(hashtext('hubplugin'))::text")
        if not self.exists():
            return
        self._transport.run(RENAME)
        self._transport.run(f"DELETE FROM hubplugin.corrections WHERE {DROPPED}")
        for vector, columns in _gone(self._transport, self._table.oid):
            for column in columns:
                self.drop_column(column)
            query = "DELETE FROM hubplugin.corrections WHERE target = %s AND vector = %s"
            self._transport.run(query, (self._table.oid, vector))

    def next_number(self) -> int:
        """No document of the table has it, of whatever column."""
        query = "SELECT coalesce(max(number), 0) + 1 FROM hubplugin.corrections WHERE target = %s"
        return int(self._transport.rows(query, (self._table.oid,))[0][0])

    def base(self) -> str:
        """What a first version calls its column: another name where one more vector of the table is corrected."""
        others = self.exists() and self._transport.rows(
            f"SELECT FROM hubplugin.corrections WHERE target = %s AND NOT ({OURS})", (self._table.oid, *self._which)
        )
        return f"{short(self._table.vector, 40)}_{OFFSET}" if others else OFFSET

    def add_column(self, name: str) -> None:
        self._alter("ADD COLUMN {} real", name)

    def drop_column(self, name: str) -> None:
        self._alter("DROP COLUMN IF EXISTS {}", name)

    def rename_column(self, name: str, to: str) -> None:
        self._alter("RENAME COLUMN {} TO {}", name, to)

    def _alter(self, what: str, *names: str) -> None:
        change = f"ALTER TABLE {self._table.identifier} {what.format(*map(name_of, names))}"
        self._transport.run(change, what="changing the table")


def read_manifest(content: bytes, url: str) -> Manifest[Column]:
    mend = "drop the schema hubplugin and the columns hub_offset... of the table, and apply again"
    return Manifest[Column].read(content, f"{url}: hubplugin.corrections", mend)


def _gone(transport: Transport, oid: int) -> list[tuple[str, list[str]]]:
    """The vector columns of a table that are gone and have a correction, and the columns of its offsets."""
    query = f"SELECT vector, content FROM hubplugin.corrections WHERE target = %s AND number = 0 AND {GONE}"
    found = [(row[0], read_manifest(row[1], transport.url)) for row in transport.rows(query, (oid,))]
    return [(vector, [each.column for each in manifest.everything]) for vector, manifest in found]


def left_behind(transport: Transport, table: str) -> str:
    """What `hubplugin.corrections` keeps of tables that are gone, and of columns of `table` that are, and how to delete
    it: for the line that says why `table` cannot be opened. Empty where that is nothing."""
    try:
        here = transport.rows("SELECT to_regclass(%s)::oid::bigint", (table,))[0][0]
        dropped = transport.rows(f"SELECT DISTINCT target::oid::bigint FROM hubplugin.corrections WHERE {DROPPED}")
        gone = [] if here is None else _gone(transport, here)
    except StoreError:  # there is no such table, or the role may not read it
        return ""
    columns = [f"DROP COLUMN IF EXISTS {name}" for _, names in gone for name in names]
    statements = [f"ALTER TABLE {table} {', '.join(columns)}"] if columns else []
    those = [f"target::oid = {oid}" for (oid,) in dropped]
    those += [f"target::oid = {here} AND vector = {sql.Literal(vector).as_string(None)}" for vector, _ in gone]
    if not those:
        return ""
    statements += [f"DELETE FROM hubplugin.corrections WHERE {' OR '.join(those)}"]
    return f"; hubplugin.corrections still has models of what is gone; to delete them: {'; '.join(statements)}"
