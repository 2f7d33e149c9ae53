"""The connection to a PostgreSQL server: opened when it is first needed, and what goes wrong told in one line."""

from __future__ import annotations

import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar, cast
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import psycopg
from psycopg import errors, sql
from psycopg.pq import TransactionStatus

from hubplugin.errors import StoreError

logger = logging.getLogger("hubplugin.pgvector")

OURS = ("table", "vector", "key", "metric", "index", "record")
SHOWN = (*OURS, "host", "hostaddr", "port", "dbname", "user", "service", "sslmode", "connect_timeout", "options")
"""What a message shows of a URL's options: another name may be a password, misspelt or in capitals."""
WORD, WAIT, WAIT_FOR_TABLE = 5, 20, 5
"""Seconds after which a line says for whom a statement waits, after which it gives up where no lock_timeout is set, and
after which a change of the table gives up, since whoever comes behind it waits as long."""

LIMITED = """
SELECT pg_backend_pid(), CASE WHEN current_setting('lock_timeout') = '0' THEN set_config('lock_timeout', %s, true) END
"""
BLOCKERS = """
SELECT DISTINCT blocker, coalesce(nullif(other.application_name, ''), 'unnamed'), coalesce(other.state, 'unknown')
    FROM pg_stat_activity AS own, unnest(pg_blocking_pids(own.pid)) AS blocker
    LEFT JOIN pg_stat_activity AS other ON other.pid = blocker WHERE own.wait_event_type = 'Lock' AND {}
"""

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
    if "%3a" in user.partition(":")[0].lower():  # a server would repeat it as a name
        raise StoreError("a postgresql:// URL has an encoded colon in its name: write NAME:PASSWORD@ with a plain one")
    shown = urlencode([pair for pair in given if pair[0] in SHOWN], quote_via=quote, safe="/,.")
    # By hand: urlunsplit takes the slashes off a URL without a host, which is how a local server is named.
    return (
        f"{parts.scheme}://{parts.netloc}{parts.path}?{for_libpq}",
        f"{parts.scheme}://{user.partition(':')[0]}{at}{hosts}{parts.path}?{shown}",
        {name: value for name, value in given if name in OURS},
    )


class Passing(StoreError):
    """Another run may get past it: what others hold, a server that stops, a disk that is full."""


class Deadlock(Passing):
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

    def rows(self, query: str, parameters: Sequence[object] = (), what: str = "reading") -> list[Any]:
        """The rows that a query gives, each a tuple."""
        with self.transaction(what):
            cursor = self._connected().cursor(binary=True)
            return cursor.execute(cast(Any, query), parameters).fetchall()

    def run(self, query: str, parameters: Sequence[object] = (), what: str = "writing") -> None:
        """Runs a statement that gives no rows."""
        with self.transaction(what):
            self._connected().execute(cast(Any, query), parameters)

    def run_alone(self, statement: str, what: str) -> None:
        """Runs a statement that no transaction can hold, such as CREATE INDEX CONCURRENTLY.

        A lock_timeout of ours would stay in the session, which may be a pooler's: what waits too long is cancelled."""
        limited = self.rows("SELECT reset_val <> '0' FROM pg_settings WHERE name = 'lock_timeout'")[0][0]
        own = "left(own.query, 100) = left(%s, 100)", statement.replace("%%", "%")
        with self.one_line(what), self._watched(what, *own, limit=None if limited else WAIT) as gave_up:
            try:
                self._connected().execute(cast(Any, statement), ())
            except errors.QueryCanceled:
                if not gave_up:
                    raise
                raise Passing(
                    f"{self.url}: {what}: waited {WAIT} s for {gave_up[0]}; run it again when that has ended: what was "
                    "written stays"
                ) from None

    @contextmanager
    def transaction(self, what: str = "writing", *, wait: float | None = None) -> Iterator[None]:
        """All or nothing; within another one, a part of that. wait: so many seconds for a lock, at most, by default
        `WAIT`. Nothing is set for longer than that, since a pooler gives the session to others."""
        with self.one_line(what):
            connection = self._connected()
            if connection.info.transaction_status != TransactionStatus.IDLE:
                yield
                return
            with connection.transaction():
                given = f"{WAIT if wait is None else wait}s"
                (pid, _) = connection.execute(LIMITED, (given,)).fetchone() or (0, "")
                with self._watched(what, "own.pid = %s", pid):
                    yield

    @contextmanager
    def reading(self, **settings: str) -> Iterator[None]:
        """A transaction that can change nothing, with `settings` for its time."""
        with self.transaction("searching"):
            self.run("SET TRANSACTION READ ONLY")
            for name, value in settings.items():
                self.rows("SELECT set_config(%s, %s, true)", (name.replace("__", "."), value))
            yield

    @contextmanager
    def _watched(self, what: str, own: str, value: object, limit: float | None = None) -> Iterator[list[str]]:
        """Says in one line for whom the statement of which `own` holds waits, and cancels it when it has waited so many
        seconds. In the list that it gives stands then for whom it waited."""
        over, gave_up = threading.Event(), list[str]()

        def watch() -> None:
            whom, waited = "", WORD
            with psycopg.connect(self._conninfo, autocommit=True, application_name="hubplugin") as other:
                while not over.is_set():
                    blockers = other.execute(cast(Any, BLOCKERS.format(own)), (value,)).fetchall()
                    waited = waited + 1 if blockers else WORD
                    if blockers and not whom:
                        whom = ", ".join(
                            f"process {pid} ({name}, {state})" if pid else "a prepared transaction"
                            for pid, name, state in blockers
                        )
                        logger.warning("%s: %s waits for %s", self.url, what, whom)
                    if limit is not None and waited > limit and not over.is_set():
                        gave_up.append(whom)
                        self._connected().cancel()
                        return
                    over.wait(1)

        def watch_when_slow() -> None:
            with suppress(psycopg.Error):  # who may not open a second connection is told nothing
                if not over.wait(WORD):
                    watch()

        threading.Thread(target=watch_when_slow, daemon=True).start()
        try:
            yield gave_up
        finally:
            over.set()

    @contextmanager
    def one_line(self, what: str) -> Iterator[None]:
        """Raises StoreError, one line, for what the server says."""
        try:
            yield
        except psycopg.Error as error:
            raise _kind(error)(f"{self.url}: {what}: {reason(error)}") from None

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            # Prepared statements stay in a session, which may be a pooler's.
            self._connection = psycopg.connect(
                self._conninfo, autocommit=True, application_name="hubplugin", prepare_threshold=None
            )
        return self._connection


def name_of(*parts: str) -> str:
    """A name as it stands in a statement, in which a % is doubled, as psycopg and Django read statements with
    parameters."""
    return sql.Identifier(*parts).as_string(None).replace("%", "%%")


def short(name: str, most: int) -> str:
    """At most so many bytes of a name; PostgreSQL cuts names behind 63."""
    return name.encode()[:most].decode(errors="ignore")


ADVICE: dict[type[psycopg.Error], str] = {
    errors.InsufficientPrivilege: "run it as the owner of the table, who may create a schema in the database",
    errors.LockNotAvailable: "others are using the table, run it again, or set a longer lock_timeout by PGOPTIONS",
    errors.QueryCanceled: (
        "what was written stays: set a longer statement_timeout by PGOPTIONS or for the role, and run it again"
    ),
    errors.UndefinedColumn: (
        "where somebody dropped or renamed the column of offsets, `hubplugin remove` and apply again"
    ),
    errors.DiskFull: "what was written stays: make room on the server, and run it again",
}


def reason(error: psycopg.Error) -> str:
    """What went wrong and what to do, in one line."""
    said = error.diag.message_primary or " ".join(str(error).split()) or type(error).__name__
    detail = f" ({' '.join(error.diag.message_detail.split())})" if error.diag.message_detail else ""
    lost = "once the server answers, run it again: it goes on where it stopped" if _is_lost(error) else ""
    advice = next((text for kind, text in ADVICE.items() if isinstance(error, kind)), lost)
    return f"{said}{detail}{f'; {advice}' if advice else ''}"


PASSING = ("08", "40", "53", "55P03", "57", "58", "XX")
"""How a SQLSTATE begins: the connection, a rollback, what is used up, a lock of others, what an operator or the system
did, and faults of the server itself."""


def _kind(error: psycopg.Error) -> type[StoreError]:
    if isinstance(error, errors.DeadlockDetected):
        return Deadlock
    return Passing if _is_lost(error) or (error.sqlstate or "").startswith(PASSING) else StoreError


def _is_lost(error: psycopg.Error) -> bool:
    """Whether the server is gone, or not yet there: an error without a code is the connection's own."""
    stopped = isinstance(error, (errors.AdminShutdown, errors.CrashShutdown, errors.CannotConnectNow))
    return stopped or (isinstance(error, psycopg.OperationalError) and error.sqlstate is None)
