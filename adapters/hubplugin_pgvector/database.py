"""A connection to PostgreSQL, opened when first needed, with errors of one line."""

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
"""The seconds that a statement waits for a lock, unless lock_timeout is set."""

WAIT_FOR_TABLE = 5
"""The seconds that a change of the table waits for a lock. While it waits, statements
of others wait behind it."""

LIMIT_WAIT = """
SELECT CASE WHEN current_setting('lock_timeout') = '0'
    THEN set_config('lock_timeout', %s, %s) END
"""

UNREADABLE = (
    "a postgresql:// URL is not readable: in a name or password write / ? # @ [ ] % as "
    "%2F %3F %23 %40 %5B %5D %25, or keep the password in PGPASSFILE"
)


NO_BYTE = re.compile("%00|%(?![0-9A-Fa-f]{2})")
"""Matches % escapes that libpq rejects with an error that repeats the secret."""


def parse_url(url: str) -> tuple[str, str, dict[str, str]]:
    """Split a URL into the parts for libpq, for error messages and for this adapter.

    Returns:
        The URL for libpq, the URL without secrets, and the options listed in `OPTIONS`.

    Raises:
        StoreError: The URL cannot be split safely, perhaps because of characters in a
            password. The message does not repeat any of it.
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
            "with a plain colon"
        )
    own_options = {name: options.pop(name) for name in OPTIONS if name in options}
    # urlunsplit would drop the slashes of a URL without a host, which names a local
    # server.
    place = f"{parts.scheme}://{parts.netloc}{parts.path}"
    for_libpq = f"{place}?{urlencode(options, quote_via=quote)}"
    return for_libpq, without_secrets(url), own_options


class TemporaryFault(StoreError):
    """Raised for faults that may pass: a lock, a server that stops, or a full disk."""


class Deadlock(TemporaryFault):
    """Raised if two transactions waited for each other and the server ended this one."""


WAITS = 0.2, 1.0, 3.0
"""The seconds before each retry after a deadlock. PostgreSQL detects deadlocks after a
second."""

Args = ParamSpec("Args")
Result = TypeVar("Result")


def retry_deadlocks(method: Callable[Args, Result]) -> Callable[Args, Result]:
    """Return `method`, repeated after deadlocks: the server has undone the transaction.

    Deadlocks happen with another run, or with a statement that the server still
    executes for a killed run.
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
    """A database that is used through one connection.

    Outside `transaction`, each statement is a separate transaction. Errors name `url`.
    """

    def __init__(self, conninfo: str, url: str):
        self._conninfo = conninfo
        self.url = url
        self._connection: psycopg.Connection[Any] | None = None

    def run(self, statement: str, parameters: Parameters = ()) -> list[Any]:
        """Run a statement and return its rows as tuples. Without rows, return []."""
        with self.transaction():
            cursor = self._connect().cursor(binary=True)
            cursor.execute(cast(Any, statement), parameters)
            if cursor.description is None:
                return []
            return cursor.fetchall()

    def run_alone(self, statement: str) -> None:
        """Run a statement outside a transaction, such as CREATE INDEX CONCURRENTLY.

        It waits up to `WAIT` seconds for older transactions, then restores the
        session's settings.
        """
        with self._translate_errors():
            connection = self._connect()
            # The last parameter of `set_config`: False for the session.
            connection.execute(LIMIT_WAIT, (f"{WAIT}s", False))
            try:
                connection.execute(cast(Any, statement), ())
            finally:
                with suppress(psycopg.Error):
                    connection.execute("RESET lock_timeout")

    @contextmanager
    def transaction(self, *, wait: float | None = None) -> Iterator[None]:
        """Run the block in a transaction, or in the one that is already open.

        wait: The maximum seconds to wait for a lock, by default `WAIT`. The limit ends
            with the transaction, since a pooler may share the session.
        """
        with self._translate_errors():
            connection = self._connect()
            if connection.info.transaction_status != TransactionStatus.IDLE:
                yield
                return
            with connection.transaction():
                connection.execute(LIMIT_WAIT, (f"{wait or WAIT}s", True))
                yield

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn PostgreSQL's errors into StoreErrors."""
        try:
            yield
        except psycopg.Error as error:
            raise as_store_error(error, self.url) from None

    def _connect(self) -> psycopg.Connection[Any]:
        """Return the connection, and open it if necessary."""
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(
                self._conninfo,
                autocommit=True,
                application_name="hubplugin",
                prepare_threshold=None,  # a pooler may share the session's statements
            )
        return self._connection


def quote_name(*parts: str) -> str:
    """Return a quoted name for a statement. Empty parts are left out.

    Each % is doubled, since psycopg and Django use % for parameters.
    """
    name = sql.Identifier(*filter(None, parts))
    return name.as_string(None).replace("%", "%%")


def quote_text(text: str) -> str:
    """Return a quoted text for a statement, with each % doubled."""
    return sql.Literal(text).as_string(None).replace("%", "%%")


ADVICE: dict[type[psycopg.Error], str] = {
    errors.InsufficientPrivilege: (
        "run it as the owner of the table, who may create a schema in the database"
    ),
    errors.LockNotAvailable: (
        "others are using the table, run it again, or set a longer lock_timeout by "
        "PGOPTIONS"
    ),
    errors.QueryCanceled: (
        "set a longer statement_timeout by PGOPTIONS or for the role, and run it again"
    ),
    errors.UndefinedColumn: (
        "if somebody dropped or renamed the column of offsets, run `hubplugin remove` "
        "and apply again"
    ),
    errors.DiskFull: (
        "the offsets written so far are kept: make room on the server, and run it again"
    ),
    # Last, since some of the others are of this type: the connection fails or is lost.
    psycopg.OperationalError: "once the server answers, run it again",
}
TEMPORARY_STATES = ("08", "40", "53", "55P03", "57", "58", "XX")
"""The first characters of SQLSTATEs for temporary faults.

They stand for faults of the connection, rollbacks, exhausted resources, locks,
interventions by an operator, system errors and internal errors of the server.
"""


def as_store_error(error: psycopg.Error, url: str) -> StoreError:
    """Return a StoreError of one line with `url`, the fault and advice."""
    message = error.diag.message_primary or str(error) or type(error).__name__
    line = f"{url}: {message}"
    if error.diag.message_detail:
        line += f" ({error.diag.message_detail})"
    for kind, advice in ADVICE.items():
        if isinstance(error, kind):
            line += f"; {advice}"
            break
    line = " ".join(line.split())
    if isinstance(error, errors.DeadlockDetected):
        return Deadlock(line)
    # Errors raised by the client, such as a lost connection, have no SQLSTATE.
    if error.sqlstate is None or error.sqlstate.startswith(TEMPORARY_STATES):
        return TemporaryFault(line)
    return StoreError(line)
