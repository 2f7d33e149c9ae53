"""A PostgreSQL database, connected to when it is first needed; each error is one line."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import psycopg
from psycopg import errors, sql
from psycopg.pq import TransactionStatus

from hubplugin.errors import StoreError
from hubplugin.registry import without_secrets

Parameters: TypeAlias = Sequence[object] | Mapping[str, object]

OPTIONS = ("table", "vector", "key", "metric", "index", "record")
WAIT = 20
"""Seconds that a statement waits for a lock before it gives up, if no lock_timeout is set."""

WAIT_FOR_TABLE = 5
"""The same for a change of the table: whoever comes behind it waits as long."""

LIMIT_WAIT = """
SELECT CASE WHEN current_setting('lock_timeout') = '0'
    THEN set_config('lock_timeout', %s, %s) END
"""

UNREADABLE = (
    "a postgresql:// URL is not readable: in a name or password write / ? # @ [ ] % as %2F %3F %23 %40 %5B %5D %25, "
    "or keep the password in PGPASSFILE"
)


NO_BYTE = re.compile("%00|%(?![0-9A-Fa-f]{2})")
"""What libpq refuses, and repeats."""


def parse_url(url: str) -> tuple[str, str, dict[str, str]]:
    """Return the URL for libpq, `url` without its secrets, and those of its options
    that are `OPTIONS`.

    Raises StoreError for a URL that a password may have cut in two, without repeating
    any of it.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise StoreError(UNREADABLE) from None
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    behind_host = parts.path + parts.fragment + "".join(options)
    if "@" in behind_host or NO_BYTE.search(parts.netloc):
        raise StoreError(UNREADABLE)
    user = parts.netloc.rpartition("@")[0].partition(":")[0]
    if "%3a" in user.lower():  # a server would repeat it as a name
        raise StoreError(
            "a postgresql:// URL has an encoded colon in its name: write NAME:PASSWORD@ "
            "with a plain one"
        )
    ours = {name: options.pop(name) for name in OPTIONS if name in options}
    # By hand: urlunsplit takes the slashes off a URL without a host, which is how a
    # local server is named.
    place = f"{parts.scheme}://{parts.netloc}{parts.path}"
    for_libpq = f"{place}?{urlencode(options, quote_via=quote)}"
    return for_libpq, without_secrets(url), ours


class Passing(StoreError):
    """Another run may get past it: what others hold, a server that stops, a disk that is full."""


class Deadlock(Passing):
    """Two transactions waited for each other, and the server ended this one."""


WAITS = 0.2, 1.0, 3.0
"""Seconds before what ended in a deadlock is tried again; PostgreSQL looks for deadlocks once a second."""

Args = ParamSpec("Args")
Result = TypeVar("Result")


def retry_deadlocks(method: Callable[Args, Result]) -> Callable[Args, Result]:
    """Return `method`, whose transactions do all or nothing, tried again after deadlocks.

    They happen with another run, or with what the server still does for a run that was
    killed.
    """

    @functools.wraps(method)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        for wait in WAITS:
            try:
                return method(*args, **kwargs)
            except Deadlock:
                time.sleep(wait)
        return method(*args, **kwargs)

    return run


class Database:
    """The database at `conninfo`, by one connection.

    Each statement is a transaction of its own. Errors name `url`, and the `task` that a
    statement was for.
    """

    def __init__(self, conninfo: str, url: str):
        self._conninfo = conninfo
        self.url = url
        self._connection: psycopg.Connection[Any] | None = None

    def rows(
        self, query: str, parameters: Parameters = (), task: str = "reading"
    ) -> list[Any]:
        """Return the rows that `query` gives with `parameters`, each a tuple."""
        with self.transaction(task):
            cursor = self._connect().cursor(binary=True)
            return cursor.execute(cast(Any, query), parameters).fetchall()

    def run(
        self, statement: str, parameters: Parameters = (), task: str = "writing"
    ) -> None:
        """Run a `statement` that gives no rows, with `parameters`."""
        with self.transaction(task):
            self._connect().execute(cast(Any, statement), parameters)

    def run_alone(self, statement: str, task: str) -> None:
        """Run a `statement` that no transaction can hold, such as CREATE INDEX
        CONCURRENTLY.

        It has no parameters. It waits for older transactions as long as `WAIT` says,
        and gives the session back as it was.
        """
        with self._translate_errors(task):
            connection = self._connect()
            connection.execute(LIMIT_WAIT, (f"{WAIT}s", False))
            try:
                connection.execute(cast(Any, statement), ())
            finally:
                with suppress(psycopg.Error):
                    connection.execute("RESET lock_timeout")

    @contextmanager
    def transaction(
        self, task: str = "writing", *, wait: float = WAIT
    ) -> Iterator[None]:
        """Do all or nothing; within another transaction, be a part of it.

        wait: The most seconds to wait for a lock. Nothing is set for longer than the
            transaction, since a pooler gives the session to others.
        """
        with self._translate_errors(task):
            connection = self._connect()
            if connection.info.transaction_status != TransactionStatus.IDLE:
                yield
                return
            with connection.transaction():
                connection.execute(LIMIT_WAIT, (f"{wait}s", True))
                yield

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Open a transaction that can change nothing, and in which a filtered search goes
        on in the index until it has found enough."""
        with self.transaction("searching"):
            self.run("SET TRANSACTION READ ONLY")
            self.run("SET LOCAL hnsw.iterative_scan = 'strict_order'")
            yield

    @contextmanager
    def _translate_errors(self, task: str) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise as_store_error(error, f"{self.url}: {task}") from None

    def _connect(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(
                self._conninfo,
                autocommit=True,
                application_name="hubplugin",
                prepare_threshold=None,  # they stay in a session, which may be a pooler's
            )
        return self._connection


def quote_name(*parts: str) -> str:
    """Return a name as it stands in a statement.

    Each % is doubled, as psycopg and Django read statements with parameters.
    """
    return sql.Identifier(*parts).as_string(None).replace("%", "%%")


def truncate(name: str, most: int) -> str:
    """Return at most `most` bytes of `name`: PostgreSQL cuts names behind 63."""
    return name.encode()[:most].decode(errors="ignore")


ADVICE: dict[type[psycopg.Error], str] = {
    errors.InsufficientPrivilege: "run it as the owner of the table, who may create a schema in the database",
    errors.LockNotAvailable: "others are using the table, run it again, or set a longer lock_timeout by PGOPTIONS",
    errors.QueryCanceled: "set a longer statement_timeout by PGOPTIONS or for the role, and run it again",
    errors.UndefinedColumn: (
        "where somebody dropped or renamed the column of offsets, `hubplugin remove` and apply again"
    ),
    errors.DiskFull: "what was written stays: make room on the server, and run it again",
}
LOST = "once the server answers, run it again"
PASSING = ("08", "40", "53", "55P03", "57", "58", "XX")
"""How a SQLSTATE begins: the connection, a rollback, what is used up, a lock of others, what an operator or the system
did, and faults of the server itself."""
STOPPED = ("57P01", "57P02", "57P03")
"""The SQLSTATE of a server that stops, or is not yet there."""


def as_store_error(error: psycopg.Error, context: str) -> StoreError:
    """Return a StoreError of one line: `context`, what went wrong, what to do."""
    code = error.sqlstate or ""
    is_lost = code in STOPPED
    if not code:
        is_lost = isinstance(error, psycopg.OperationalError)
    line = f"{context}: {error.diag.message_primary or as_line(error)}"
    if error.diag.message_detail:
        line += f" ({as_line(error.diag.message_detail)})"
    advice = LOST if is_lost else ADVICE.get(type(error))
    if advice:
        line += f"; {advice}"
    if isinstance(error, errors.DeadlockDetected):
        return Deadlock(line)
    if is_lost or code.startswith(PASSING):
        return Passing(line)
    return StoreError(line)


def as_line(message: object) -> str:
    """Return the text of `message` without line breaks."""
    return " ".join(str(message).split()) or type(message).__name__
