"""What is known of the corrections in a database: a table in a schema of ours, a row for each version.

A version belongs to a table and a column as PostgreSQL knows them, by oid and number, which stay under other names. A
dump that is read back has others, and there the names count.

The offsets of the active version lie in the column `hub_offset` of the user's table, those of version 3 while it is
half-written in `hub_offset_v3`. To activate is to drop the one and rename the other, in one transaction, so that SQL
which names `hub_offset` stays as it is. Of the version that was active before the row with its model stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from psycopg import sql
from psycopg.types.json import Json

from hubplugin.errors import StoreError
from hubplugin.model import GroupedModel, OffsetModel
from hubplugin.store import now
from hubplugin_pgvector.schema import OFFSET, Table, index_name
from hubplugin_pgvector.transport import Transport, name_of, short

MADE_BY = "made by hubplugin; it goes with the last correction"
CREATE_SCHEMA = ("CREATE SCHEMA hubplugin", f"COMMENT ON SCHEMA hubplugin IS '{MADE_BY}'")
CREATE_TABLE = """
CREATE TABLE hubplugin.corrections (
    target regclass, vector text, number int, state text NOT NULL, made text NOT NULL, owner text NOT NULL,
    base text NOT NULL, index text NOT NULL, scale float8 NOT NULL, facts json NOT NULL,
    model bytea NOT NULL, PRIMARY KEY (target, number))
"""
COLUMNS = "number, state, made, owner, base, index, scale, facts"
SAME = """
CASE WHEN facts->>'table' = target::oid::text THEN attnum = (facts->>'column')::int ELSE attname = vector END
"""
OURS = f"target = %s AND EXISTS (SELECT FROM pg_attribute WHERE attrelid = target AND attnum = %s AND {SAME})"
GONE = f"""
NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = target AND attnum > 0 AND NOT attisdropped AND {SAME})
"""
RENAME = f"""
UPDATE hubplugin.corrections SET vector = attname,
    facts = (facts::jsonb || jsonb_build_object('table', target::oid::bigint, 'column', attnum))::json
    FROM pg_attribute WHERE attrelid = target AND attnum > 0 AND NOT attisdropped AND {SAME}
    AND (vector <> attname OR facts->>'table' IS DISTINCT FROM target::oid::text)
"""


@dataclass(frozen=True)
class Version:
    """One row. made: when its writing began. owner: the run that writes it. base: what the column of the active version
    is called. scale: see `requests`."""

    number: int
    state: Literal["active", "half-written", "previous"]
    made: str
    owner: str
    base: str
    index: str
    scale: float
    facts: dict[str, object]

    @property
    def column(self) -> str:
        return self.base if self.state == "active" else f"{self.base}_v{self.number}"

    @property
    def fingerprint(self) -> object:
        return self.facts["model"]

    @property
    def group_by(self) -> str | None:
        key = self.facts["group_by"]
        return None if key is None else str(key)


class Metadata:
    """The versions of one vector column."""

    def __init__(self, transport: Transport, table: Table):
        self._transport, self._table = transport, table
        self._which = (table.oid, table.number)

    def exists(self) -> bool:
        """Whether the table is there. Raises StoreError where an earlier version of hubplugin has made it."""
        # By a query, since to_regclass may know nothing of what another run has just made.
        found = (
            "SELECT relname::text FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = 'hubplugin'"
        )
        tables = {row[0] for row in self._transport.rows(found)}
        if "versions" in tables:
            raise StoreError(
                f"{self._transport.url}: the table hubplugin.versions is of an earlier version of hubplugin; drop the "
                f"schema hubplugin and the columns {OFFSET}... of {self._table.name}, and apply again"
            )
        return "corrections" in tables

    def versions(self, lock: str = "") -> Sequence[Version]:
        """In the order of their numbers. lock: FOR SHARE or FOR UPDATE, until the end of the transaction."""
        with self._transport.transaction():
            if not self.exists():
                return []
            query = f"SELECT {COLUMNS} FROM hubplugin.corrections WHERE {OURS} ORDER BY number {lock}"
            return [Version(*row) for row in self._transport.rows(query, self._which)]

    def active(self) -> Version | None:
        return next((version for version in self.versions() if version.state == "active"), None)

    def model(self, version: Version) -> OffsetModel:
        query = f"SELECT model FROM hubplugin.corrections WHERE {OURS} AND number = %s"
        rows = self._transport.rows(query, (*self._which, version.number))
        return OffsetModel.from_bytes(rows[0][0], self._transport.url)

    def create(self) -> None:
        """Makes the place for versions, and keeps all others from changing any until the end of the transaction. What
        was renamed is noted, and what is of no table or column any more is deleted."""
        self._transport.rows("SELECT pg_advisory_xact_lock(hashtext('hubplugin'))::text")
        is_schema_there = self._transport.rows("SELECT FROM pg_namespace WHERE nspname = 'hubplugin'")
        for statement in () if is_schema_there else CREATE_SCHEMA:
            self._transport.run(statement, what="making a schema for the model")
        if not self.exists():
            self._transport.run(CREATE_TABLE, what="making a table for the model")
        self._transport.run(RENAME)
        self.delete_gone()

    def next_number(self) -> int:
        """The number of a version that begins: no other of the table has it, of whatever column."""
        query = "SELECT coalesce(max(number), 0) + 1 FROM hubplugin.corrections WHERE target = %s"
        return int(self._transport.rows(query, (self._table.oid,))[0][0])

    def base(self) -> str:
        """What a first version calls its column: another name where one more vector of the table is corrected."""
        others = self.exists() and self._transport.rows(
            "SELECT FROM hubplugin.corrections WHERE target = %s AND base = %s", (self._table.oid, OFFSET)
        )
        return f"{short(self._table.vector, 40)}_{OFFSET}" if others else OFFSET

    def add(self, version: Version, model: OffsetModel) -> None:
        self._transport.run(
            f"INSERT INTO hubplugin.corrections (target, vector, {COLUMNS}, model) VALUES ({', '.join(['%s'] * 11)})",
            (
                self._table.oid,
                self._table.vector,
                *list(vars(version).values())[:-1],
                Json(version.facts),
                model.to_bytes(),
            ),
        )

    def change(self, version: Version, **fields: Any) -> None:
        """Sets `fields` of `version`, and renames its column if it is called otherwise then."""
        self._set(version, **fields)
        changed = replace(version, **fields)
        if changed.column != version.column:
            self._alter("RENAME COLUMN {} TO {}", version.column, changed.column)

    def retire(self, version: Version) -> None:
        """Drops the column of the active `version`, whose model stays."""
        self._alter("DROP COLUMN IF EXISTS {}", version.column)
        self._set(version, state="previous")

    def _set(self, version: Version, **fields: Any) -> None:
        assignments = sql.SQL(", ").join(sql.SQL("{} = %s").format(name_of(name)) for name in fields)
        self._transport.run(
            sql.SQL("UPDATE hubplugin.corrections SET {} WHERE target = %s AND number = %s").format(assignments),
            (*fields.values(), self._table.oid, version.number),
        )

    def add_column(self, version: Version) -> None:
        self._alter("ADD COLUMN {} real", version.column)

    def delete(self, versions: Sequence[Version]) -> None:
        """Deletes `versions` and their columns, whose indexes go with them."""
        for version in versions:
            self._alter("DROP COLUMN IF EXISTS {}", version.column)
            self._transport.run(
                "DELETE FROM hubplugin.corrections WHERE target = %s AND number = %s", (self._table.oid, version.number)
            )

    def delete_gone(self) -> None:
        """Deletes the versions of tables that are gone, and those of columns of this table that are, with their own."""
        self._transport.run(
            "DELETE FROM hubplugin.corrections WHERE NOT EXISTS (SELECT FROM pg_class WHERE oid = target)"
        )
        query = f"SELECT {COLUMNS} FROM hubplugin.corrections WHERE target = %s AND {GONE}"
        self.delete([Version(*row) for row in self._transport.rows(query, (self._table.oid,))])

    def delete_place(self) -> None:
        """Deletes the table of corrections, and the schema, where nothing is left in it."""
        if self._transport.rows("SELECT FROM hubplugin.corrections LIMIT 1"):
            return
        self._transport.run("DROP TABLE hubplugin.corrections")
        ours = "SELECT WHERE obj_description(to_regnamespace('hubplugin'), 'pg_namespace') = %s"
        if self._transport.rows(ours, (MADE_BY,)):
            self._transport.run("DROP SCHEMA hubplugin")

    def _alter(self, what: str, *names: str) -> None:
        change = sql.SQL(what).format(*map(name_of, names))
        self._transport.run(
            sql.SQL("ALTER TABLE {} ").format(self._table.identifier) + change, what="changing the table"
        )


def begun(model: OffsetModel, number: int, owner: str, base: str, table: Table, scale: float) -> Version:
    """The row of a version that begins now."""
    facts: dict[str, object] = {
        "model": model.fingerprint,
        "group_by": model.key if isinstance(model, GroupedModel) else None,
        "mapped": model.query_map is not None,
        "table": table.oid,
        "column": table.number,
    }
    index = index_name(table.name, table.oid, number)
    return Version(number, "half-written", now(), owner, base, index, scale, facts)


def left_behind(transport: Transport, table: str) -> str:
    """What `hubplugin.corrections` keeps of tables that are gone, and of columns of `table` that are, and how to delete
    it: for the line that says why `table` cannot be opened. Empty where that is nothing."""
    query = (
        "SELECT coalesce(to_regclass(%s) = target, false), target::oid::bigint, base, state, number"
        " FROM hubplugin.corrections"
        f" WHERE NOT EXISTS (SELECT FROM pg_class WHERE oid = target) OR to_regclass(%s) = target AND {GONE}"
    )
    try:
        found = transport.rows(query, (table, table))
    except StoreError:  # there is no such table, or the role may not read it
        return ""
    if not found:
        return ""
    columns = [base if state == "active" else f"{base}_v{number}" for here, _, base, state, number in found if here]
    drop = f"ALTER TABLE {table} {', '.join(f'DROP COLUMN IF EXISTS {each}' for each in columns)}; " if columns else ""
    those = ", ".join(f"({oid}, {number})" for _, oid, *_, number in found)
    return (
        "; hubplugin.corrections still has models of what is gone; to delete them: "
        f"{drop}DELETE FROM hubplugin.corrections WHERE (target::oid, number) IN ({those})"
    )
