"""The documents that a database keeps of corrections, in a table in a schema of ours.

Document 0 of a vector column is its manifest, any other the model of the version of
that number. A column is known by the name of its table, with the schema, and its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import Field

from hubplugin.corrections import Manifest, ManifestStore, Version
from hubplugin.model import OffsetModel
from hubplugin.vectors import Progress
from hubplugin_pgvector.database import WAIT_FOR_TABLE, Database, quote_name
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
OURS = "target = %(target)s AND vector = %(vector)s"
ONE = f"{OURS} AND number = %(number)s"
MANIFEST = 0
"""The number of its document."""
MEND = "drop the schema hubplugin and the columns hub_offset... of the table, and apply again"
BASE = rf"^(.+_)?{OFFSET}$"
COLUMN = rf"^(.+_)?{OFFSET}(_v\d+)?$"
"""What columns of ours are called: `remove` drops nothing else."""


class ColumnVersion(Version):
    """A version, whose offsets lie in a column of the table.

    base: what the column is called while the version is active. column: what it is
    called now. scale: see `requests`.
    """

    base: str = Field(pattern=BASE)
    column: str = Field(pattern=COLUMN)
    scale: float = Field(gt=0, allow_inf_nan=False)

    @property
    def index(self) -> str:
        """The name of the index over vector and offset."""
        return f"{OFFSET}_{self.word}"


class DocumentStore(ManifestStore[ColumnVersion]):
    """A store whose manifest and models are documents of one vector column.

    Its offsets lie in columns beside that. A change of the manifest and of the columns
    is one transaction.
    """

    database: Database
    table: VectorTable

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Keep other runs from changing any correction until the end."""
        with self.database.transaction(wait=WAIT_FOR_TABLE):
            self.database.run("SELECT pg_advisory_xact_lock(hashtext('hubplugin'))")
            self.lock("FOR UPDATE")
            yield

    def lock(self, mode: str) -> None:
        """Wait until no other run writes or changes this correction.

        mode: FOR SHARE or FOR UPDATE.
        """
        self._documents("number", f"{OURS} {mode}")

    def read_manifest(self) -> Manifest[ColumnVersion]:
        content = self._read(MANIFEST)
        if content is None:
            return Manifest[ColumnVersion]()
        place = f"{self.url}: hubplugin.corrections"
        return Manifest[ColumnVersion].read(content, place, MEND)

    def write_manifest(self, manifest: Manifest[ColumnVersion]) -> None:
        self._write(MANIFEST, manifest.model_dump_json().encode())

    def delete_manifest(self) -> None:
        """Delete the manifest, and the table and its schema if nothing else is left."""
        if not self.has_documents():
            return
        self._delete(MANIFEST)
        if self._documents("number", "true LIMIT 1"):
            return
        self.database.run("DROP TABLE hubplugin.corrections")
        if self.database.run(IS_OURS, (MADE_BY,)):
            self.database.run("DROP SCHEMA hubplugin")

    def read_model(self, version: ColumnVersion) -> OffsetModel:
        return OffsetModel.from_bytes(self._read(version.number) or b"", self.url)

    def write_model(self, version: ColumnVersion, model: OffsetModel) -> None:
        self._write(version.number, model.to_bytes())
        self._alter("ADD COLUMN {} real", version.column)

    def make_room(self, version: ColumnVersion) -> None:
        """Do nothing: `write_model` has added the column, in the same transaction."""

    def delete_model(self, version: ColumnVersion) -> None:
        self._delete(version.number)

    def delete_offsets(
        self, versions: Sequence[ColumnVersion], progress: Progress | None
    ) -> None:
        used = {version.column for version in self.read_manifest().maintained}
        for version in versions:
            if version.column not in used:
                self._alter("DROP COLUMN IF EXISTS {}", version.column)

    def base_column(self) -> str:
        """Return what a first version calls its column.

        It has another name where one more vector of the table is corrected.
        """
        others = "target = %(target)s AND vector <> %(vector)s"
        if not self._documents("number", others):
            return OFFSET
        # PostgreSQL cuts names behind 63 bytes.
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
        """Activate a version, in one transaction with the columns.

        The column of the previous version goes, and the column of this one takes its
        name, so that SQL which names it stays as it is.
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
        """Return True if their table is there."""
        # By a query: to_regclass may know nothing of what another run has just made.
        return bool(self.database.run(EXISTS))

    def _names(self, **more: object) -> dict[str, object]:
        """Return the parameters of `OURS`, and `more`."""
        target = f"{self.table.schema}.{self.table.name}"
        return {"target": target, "vector": self.table.vector, **more}

    def _documents(self, columns: str, condition: str, **more: object) -> list[Any]:
        """Return `columns` of the documents with `condition`."""
        if not self.has_documents():
            return []
        query = f"SELECT {columns} FROM hubplugin.corrections WHERE {condition}"
        return self.database.run(query, self._names(**more))

    def _read(self, number: int) -> bytes | None:
        for row in self._documents("content", ONE, number=number):
            return bytes(row[0])
        return None

    def _write(self, number: int, content: bytes) -> None:
        if not self.has_documents():
            # Not IF NOT EXISTS: that asks for the right to create it all the same.
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
        statement = f"DELETE FROM hubplugin.corrections WHERE {ONE}"
        self.database.run(statement, self._names(number=number))

    def _alter(self, change: str, *names: str) -> None:
        change = change.format(*map(quote_name, names))
        self.database.run(f"ALTER TABLE {self.table.identifier} {change}")
