"""The documents about corrections, in the table `hubplugin.corrections`.

Document 0 of a vector column is the manifest. Document n is the model of version n. A
column is identified by its name and by the table's schema and name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import Field

from hubplugin.corrections import Manifest, ManifestStore, Version
from hubplugin.model import OffsetModel
from hubplugin_pgvector.database import (
    WAIT_FOR_TABLE,
    Database,
    quote_name,
    quote_text,
)
from hubplugin_pgvector.requests import scale_of
from hubplugin_pgvector.schema import OFFSET, VectorTable

MADE_BY = "made by hubplugin; it goes with the last correction"
CREATE_TABLE = """
CREATE TABLE hubplugin.corrections (
    target text, vector text, number int, content bytea NOT NULL,
    PRIMARY KEY (target, vector, number))
"""
HAS_SCHEMA = "SELECT FROM pg_namespace WHERE nspname = 'hubplugin'"
EXISTS = """
SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
    WHERE nspname = 'hubplugin' AND relname = 'corrections'
"""
IS_OURS = """
SELECT WHERE obj_description(to_regnamespace('hubplugin'), 'pg_namespace') = %s
"""
MARKED = """
SELECT attname::text FROM pg_attribute WHERE attrelid = %s AND NOT attisdropped
    AND col_description(attrelid, attnum) = %s
"""
"""Selects the columns of a table that have a comment."""
OUR_DOCUMENTS = "target = %(target)s AND vector = %(vector)s"
ONE_DOCUMENT = f"{OUR_DOCUMENTS} AND number = %(number)s"
MANIFEST = 0
"""The number of the manifest's document."""
MEND = "drop the schema hubplugin and the columns hub_offset... of the table, and apply again"
BASE = rf"^(.+_)?{OFFSET}$"
COLUMN = rf"^(.+_)?{OFFSET}(_v\d+)?$"
"""Matches the names of offset columns. A manifest that names others is refused."""


class ColumnVersion(Version):
    """A version whose offsets are stored in a column of the table.

    base: The name of the column while the version is active.
    column: The current name of the column.
    scale: The scale of the extra dimension; see `requests`.
    """

    base: str = Field(pattern=BASE)
    column: str = Field(pattern=COLUMN)
    scale: float = Field(gt=0, le=1e30)

    @property
    def index(self) -> str:
        """The name of the index over vector and offset."""
        return f"{OFFSET}_{self.word}"


class DocumentStore(ManifestStore[ColumnVersion]):
    """A store that keeps the manifest and models of a vector column as documents.

    The offsets are stored in other columns of the table. The manifest and the columns
    change in one transaction.
    """

    database: Database
    table: VectorTable

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Keep other runs from changing any correction until the transaction ends."""
        with self.database.transaction(wait=WAIT_FOR_TABLE):
            # The advisory lock keeps out other changes, even before the table of
            # documents exists. The row lock waits for writes of offsets, which lock
            # the documents FOR SHARE.
            self.database.run("SELECT pg_advisory_xact_lock(hashtext('hubplugin'))")
            self.lock("FOR UPDATE")
            yield

    def lock(self, mode: str) -> None:
        """Lock this correction's documents until the transaction ends.

        mode: "FOR SHARE" to write offsets, "FOR UPDATE" to change the manifest.
        """
        self._documents("number", f"{OUR_DOCUMENTS} {mode}")

    def read_manifest(self) -> Manifest[ColumnVersion]:
        content = self._read(MANIFEST)
        if content is None:
            return Manifest[ColumnVersion]()
        place = f"{self.url}: hubplugin.corrections"
        return Manifest[ColumnVersion].read(content, place, MEND)

    def write_manifest(self, manifest: Manifest[ColumnVersion]) -> None:
        self._write(MANIFEST, manifest.model_dump_json().encode())

    def delete_manifest(self) -> None:
        """Delete the manifest, and drop the table and its schema if nothing is left."""
        self.delete_offsets(())  # drops columns whose manifest was lost
        if not self.has_documents():
            return
        self._delete(MANIFEST)
        if self._documents("number", "true LIMIT 1"):  # another correction has some
            return
        self.database.run("DROP TABLE hubplugin.corrections")
        if self.database.run(IS_OURS, (MADE_BY,)):
            self.database.run("DROP SCHEMA hubplugin")

    def read_model(self, version: ColumnVersion) -> OffsetModel:
        return OffsetModel.from_bytes(self._read(version.number) or b"", self.url)

    def write_model(self, version: ColumnVersion, model: OffsetModel) -> None:
        self.delete_offsets(())  # drops columns whose manifest was lost
        self._write(version.number, model.to_bytes())
        self._alter("ADD COLUMN {} real", version.column)
        column = f"{self.table.identifier}.{quote_name(version.column)}"
        self.database.run(f"COMMENT ON COLUMN {column} IS {quote_text(self._comment)}")

    def make_room(self, version: ColumnVersion) -> None:
        """Do nothing: `write_model` has added the column, in the same transaction."""

    def delete_model(self, version: ColumnVersion) -> None:
        self._delete(version.number)

    def delete_offsets(self, versions: Sequence[ColumnVersion]) -> None:
        """Drop the columns of `versions`, and marked columns that no version names.

        A backup without the schema hubplugin restores columns without a manifest.
        """
        used = {version.column for version in self.read_manifest().maintained}
        columns = {version.column for version in versions} | self.marked_columns()
        for column in columns - used:
            self._alter("DROP COLUMN IF EXISTS {}", column)

    @property
    def _comment(self) -> str:
        """The comment that marks the offset columns of this vector column."""
        target = f"{self.table.schema}.{self.table.name}, {self.table.vector}"
        return f"offsets by hubplugin for {target}"

    def marked_columns(self) -> set[str]:
        """Return the columns that corrections of this vector column have added."""
        rows = self.database.run(MARKED, (self.table.oid, self._comment))
        return {name for (name,) in rows}

    def base_column(self) -> str:
        """Return the name of the offset column for a first version.

        If another vector column of the table is corrected, the name includes the name
        of this vector column.
        """
        of_other_vectors = "target = %(target)s AND vector <> %(vector)s"
        if not self._documents("number", of_other_vectors):
            return OFFSET
        # PostgreSQL truncates names after 63 bytes.
        start = self.table.vector.encode()[:40].decode(errors="ignore")
        return f"{start}_{OFFSET}"

    def new_version(self, model: OffsetModel, number: int) -> ColumnVersion:
        manifest = self.read_manifest()
        active = manifest.active.get("")
        if active is None:
            base = self.base_column()
            scale = scale_of(model)
        else:
            base = active.base
            scale = scale_of(model, active.scale)
        column = f"{base}_v{number}"
        return ColumnVersion.of(model, number, base=base, column=column, scale=scale)

    def switch(self, version: ColumnVersion) -> None:
        """Activate a version and rename its column, in one transaction.

        The column of the previous version is dropped, and the new column takes over its
        name. So SQL that uses the name still works.
        """
        with self.changing():
            manifest = self.require_owner(version)
            if version.column != version.base:
                for previous in manifest.active.values():
                    self._alter("DROP COLUMN {}", previous.column)
                self._alter("RENAME COLUMN {} TO {}", version.column, version.base)
            renamed = version.replace(column=version.base)
            self.write_manifest(manifest.activate(renamed))
            self.clear()

    def has_documents(self) -> bool:
        """Return True if the table of documents exists."""
        # to_regclass might miss a table that another run has just created.
        return bool(self.database.run(EXISTS))

    def _names(self, **more: object) -> dict[str, object]:
        """Return the parameters of `OUR_DOCUMENTS`, and `more`."""
        target = f"{self.table.schema}.{self.table.name}"
        return {"target": target, "vector": self.table.vector, **more}

    def _documents(self, columns: str, condition: str, **more: object) -> list[Any]:
        """Return `columns` of the documents that satisfy `condition`."""
        if not self.has_documents():
            return []
        query = f"SELECT {columns} FROM hubplugin.corrections WHERE {condition}"
        return self.database.run(query, self._names(**more))

    def _read(self, number: int) -> bytes | None:
        """Return the content of a document, or None if it does not exist."""
        for row in self._documents("content", ONE_DOCUMENT, number=number):
            return bytes(row[0])
        return None

    def _write(self, number: int, content: bytes) -> None:
        """Write a document. The first one also creates the table and its schema."""
        if not self.has_documents():
            # IF NOT EXISTS would require the right to create it in any case.
            if not self.database.run(HAS_SCHEMA):
                self.database.run("CREATE SCHEMA hubplugin")
                self.database.run(f"COMMENT ON SCHEMA hubplugin IS '{MADE_BY}'")
            self.database.run(CREATE_TABLE)
        self.database.run(
            "INSERT INTO hubplugin.corrections"
            " VALUES (%(target)s, %(vector)s, %(number)s, %(content)s)"
            " ON CONFLICT (target, vector, number) DO UPDATE SET content = excluded.content",
            self._names(number=number, content=content),
        )

    def _delete(self, number: int) -> None:
        """Delete a document, if it exists."""
        statement = f"DELETE FROM hubplugin.corrections WHERE {ONE_DOCUMENT}"
        self.database.run(statement, self._names(number=number))

    def _alter(self, change: str, *names: str) -> None:
        """Run ALTER TABLE with a `change` in which {} stands for each of `names`."""
        change = change.format(*map(quote_name, names))
        self.database.run(f"ALTER TABLE {self.table.identifier} {change}")
