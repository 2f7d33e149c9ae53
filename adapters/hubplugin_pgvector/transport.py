"""The connection to a PostgreSQL server: opened when it is first needed, and what goes wrong told in one line."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import psycopg
from psycopg import errors, sql

from hubplugin.errors import StoreError

OURS = ("table", "vector", "key", "metric", "index", "record")
SECRET = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")
LOCK_TIMEOUT = "5s"
"""How long a change of the table waits for others, where no lock_timeout is set: whoever comes behind waits as long."""


UNREADABLE = (
    "a postgresql:// URL is not readable: in a name or password write / ? # @ [ ] % as %2F %3F %23 %40 %5B %5D %25, "
    "or keep the password in PGPASSFILE"
)
NO_BYTE = re.compile("%00|%(?![0-9A-Fa-f]{2})")
"""What libpq refuses, and repeats."""


def parted(url: str) -> tuple[str, str, Mapping[str, str]]:
    """What libpq is given of `url`, `url` without what is secret in it, and the names of `OURS` that stand there.

    Raises StoreError for a URL that a password may have cut in two, without repeating any of it."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise StoreError(UNREADABLE) from None
    given = parse_qsl(parts.query, keep_blank_values=True)
    if "@" in parts.path + parts.fragment + "".join(name for name, _ in given) or NO_BYTE.search(parts.netloc):
        raise StoreError(UNREADABLE)
    for_libpq = urlencode([pair for pair in given if pair[0] not in OURS], quote_via=quote)
    user, at, hosts = parts.netloc.rpartition("@")
    shown = urlencode([pair for pair in given if pair[0] not in SECRET], quote_via=quote, safe="/,.")
    # By hand: urlunsplit takes the slashes off a URL without a host, which is how a local server is named.
    return (
        f"{parts.scheme}://{parts.netloc}{parts.path}?{for_libpq}",
        f"{parts.scheme}://{user.partition(':')[0]}{at}{hosts}{parts.path}?{shown}",
        {name: value for name, value in given if name in OURS},
    )


class Deadlock(StoreError):
    """Two transactions waited for each other, and the server ended this one."""


WAITS = 0.2, 1.0, 3.0
"""Seconds before what ended in a deadlock is tried again; PostgreSQL looks for deadlocks once a second."""

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


def retried_after_deadlock(method: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """`method`, whose transactions do all or nothing, tried again after a deadlock: with another run, or with what the
    server still does for one that was killed."""

    @functools.wraps(method)
    def run(*arguments: Given.args, **named: Given.kwargs) -> Returned:
        for wait in WAITS:
            try:
                return method(*arguments, **named)
            except Deadlock:
                time.sleep(wait)
        return method(*arguments, **named)

    return run


class Transport:
    """A connection by `conninfo`, in which each statement is a transaction of its own; errors name `url`."""

    def __init__(self, conninfo: str, url: str):
        self._conninfo, self.url = conninfo, url
        self._connection: psycopg.Connection[Any] | None = None

    def rows(self, query: sql.Composable | str, parameters: Sequence[object] = (), what: str = "") -> list[Any]:
        """The rows that a query gives, each a tuple."""
        with self.one_line(what or "reading"):
            cursor = self._connected().cursor(binary=True)
            return cursor.execute(cast(Any, query), parameters).fetchall()

    def run(self, query: sql.Composable | str, parameters: Sequence[object] = (), what: str = "") -> int:
        """Runs a statement that gives no rows; how many it changed."""
        with self.one_line(what or "writing"):
            return self._connected().execute(cast(Any, query), parameters).rowcount

    @contextmanager
    def transaction(self, *, changes_table: bool = False) -> Iterator[None]:
        """All or nothing. changes_table: it takes a lock that keeps all others out for a moment."""
        with self.one_line("writing"), self._connected().transaction():
            if changes_table and self.rows("SHOW lock_timeout")[0][0] == "0":
                self.run(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
            yield

    @contextmanager
    def reading(self, **settings: str) -> Iterator[None]:
        """A transaction that can change nothing, with `settings` for its time."""
        with self.one_line("searching"), self._connected().transaction():
            self.run("SET TRANSACTION READ ONLY")
            for name, value in settings.items():
                self.rows("SELECT set_config(%s, %s, true)", (name.replace("__", "."), value))
            yield

    @contextmanager
    def one_line(self, what: str) -> Iterator[None]:
        """Raises StoreError, one line, for what the server says."""
        try:
            yield
        except psycopg.Error as error:
            kind = Deadlock if isinstance(error, errors.DeadlockDetected) else StoreError
            raise kind(f"{self.url}: {what}: {reason(error)}") from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(self._conninfo, autocommit=True, application_name="hubplugin")
        return self._connection


def name_of(*parts: str) -> sql.Identifier:
    """A name in a statement, in which a % is doubled, as psycopg and Django read statements with parameters."""
    return sql.Identifier(*(part.replace("%", "%%") for part in parts))


def short(name: str, most: int) -> str:
    """At most so many bytes of a name; PostgreSQL cuts names behind 63."""
    return name.encode()[:most].decode(errors="ignore")


def reason(error: psycopg.Error) -> str:
    """What went wrong and what to do, in one line."""
    said = error.diag.message_primary or " ".join(str(error).split()) or type(error).__name__
    detail = f" ({' '.join(error.diag.message_detail.split())})" if error.diag.message_detail else ""
    if isinstance(error, errors.InsufficientPrivilege):
        advice = "; run it as the owner of the table, who may create a schema in the database"
    elif isinstance(error, errors.LockNotAvailable):
        advice = "; others are using the table, run it again, or set a longer lock_timeout by PGOPTIONS"
    elif isinstance(error, errors.QueryCanceled):
        advice = "; what was written stays, run it again, or set a longer statement_timeout by PGOPTIONS"
    elif _is_lost(error):
        advice = "; once the server answers, run it again: it goes on where it stopped"
    else:
        advice = ""
    return f"{said}{detail}{advice}"


def _is_lost(error: psycopg.Error) -> bool:
    """Whether the server is gone, or not yet there: an error without a code is the connection's own."""
    stopped = isinstance(error, (errors.AdminShutdown, errors.CrashShutdown, errors.CannotConnectNow))
    return stopped or (isinstance(error, psycopg.OperationalError) and error.sqlstate is None)
