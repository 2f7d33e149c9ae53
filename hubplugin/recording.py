"""Queries and clicks recorded as they come: a bounded, uniform sample for a query bank.

The sample is one SQLite file that any number of processes read and write. A query's id
is a hash of its vector, as evenly spread as a random number, and the file keeps the
queries with the smallest ids. So a query that is asked a thousand times counts once,
and any two different queries are equally likely to be kept, whichever process recorded
them: the bottom-k sketch of Cohen and Kaplan (PODC 2007). A click stores the id of its
query, and is kept by the same rule.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import UUID

import numpy as np

from hubplugin.errors import InputError, StoreError
from hubplugin.vectors import Sliceable, one_line

if TYPE_CHECKING:
    from hubplugin.vectors import VectorLike

FILE = "record.sqlite"
MOST_WITHIN = 64  # recorders inside another one; each has a thread and a sample
MOST_UNWRITTEN = 10_000  # rows per table in memory; more are written without waiting
LONGEST_ID = 200  # characters in the id of a target; a longer one is probably prose
NO_TARGET = "-1"  # in answers, -1 means that the query has none
WAIT_SECONDS = 5.0  # for other writers, which need a few milliseconds
NO_BOUND = "g"  # a bound above every id
QUERIES = "queries are"  # the subject and verb of "... not recorded"
SCHEMA = [
    # The table `queries` has every query of `dim` dimensions with an id below `bound`.
    "CREATE TABLE IF NOT EXISTS samples (dim INTEGER PRIMARY KEY, bound TEXT, "
    "seen INTEGER, first REAL, last REAL)",
    "CREATE TABLE IF NOT EXISTS queries (dim INTEGER, id TEXT, vector BLOB, "
    "time REAL, text TEXT, PRIMARY KEY (dim, id))",
    # `id` is that of the query, and `target` that of the clicked target.
    "CREATE TABLE IF NOT EXISTS clicks (id TEXT, target TEXT, count INTEGER, "
    "time REAL, PRIMARY KEY (id, target))",
]
ADD_SAMPLE = (
    f"INSERT INTO samples VALUES (?, '{NO_BOUND}', ?, ?, ?) ON CONFLICT DO UPDATE SET "
    "seen = seen + excluded.seen, first = min(first, excluded.first), "
    "last = max(last, excluded.last)"
)
ADD_QUERY = (
    "INSERT INTO queries VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
    "time = max(time, excluded.time), text = ifnull(excluded.text, text)"
)
ADD_CLICK = (
    "INSERT INTO clicks VALUES (?, ?, 1, ?) ON CONFLICT DO UPDATE SET "
    "count = count + 1, time = max(time, excluded.time)"
)
KEEP = [
    # Lower `bound` to the first id that exceeds the size of the sample.
    "UPDATE samples SET bound = ifnull((SELECT id FROM queries WHERE dim = samples.dim "
    "AND id < bound ORDER BY id LIMIT 1 OFFSET :size), bound)",
    "DELETE FROM queries WHERE id >= "
    "(SELECT bound FROM samples WHERE samples.dim = queries.dim)",
    # A click may come before its query. Anyone can make up ids, so clicks without a
    # query are limited separately, to the latest ones.
    "DELETE FROM clicks WHERE id NOT IN (SELECT id FROM queries) AND ("
    "id >= (SELECT max(bound) FROM samples) OR rowid NOT IN ("
    "SELECT rowid FROM clicks WHERE id NOT IN (SELECT id FROM queries) "
    "ORDER BY time DESC LIMIT :size))",
    # Keep 8 targets per query: the most clicked ones, and the latest among equals.
    "DELETE FROM clicks WHERE rowid IN (SELECT rowid FROM (SELECT rowid, row_number() "
    "OVER (PARTITION BY id ORDER BY count DESC, time DESC) AS place FROM clicks) "
    "WHERE place > 8)",
]


class Recorded(Sliceable):
    """Recorded queries as a query bank: float32 [rows, dim], all different.

    `hubplugin.Bank(recorded, recorded.answers)` is a bank with clicked answers.

    Attributes:
        ids: The id of each query [rows].
        texts: The text of each query [rows], None for a query without one; None if no
            query has a text.
        seen: The number of all queries asked, repetitions included.
        first, last: The times of the first and the last query, in Unix seconds.
        clicks: The number of clicks on each target, for each query [rows].
        answers: The most clicked target of each query, object [rows], -1 for none. None
            if there are no clicks.
    """

    def __init__(
        self,
        name: str,
        sample: tuple[Any, ...],  # dim, seen, first, last
        rows: list[Any],  # the id, vector and text of each query
        clicks: dict[str, dict[int | str, int]],
    ):
        dim, self.seen, self.first, self.last = sample
        self.ids, contents, texts = map(list, zip(*rows, strict=True))
        vectors = np.frombuffer(b"".join(contents), np.float32).reshape(-1, dim)
        # `_transaction` turns this into an error about the file.
        if [_id(vector) for vector in contents] != self.ids:
            raise ValueError("a vector does not match its id")
        super().__init__(name, vectors, vectors.shape, np.asarray)
        self.texts = texts if any(texts) else None
        self.clicks = [clicks.get(id, {}) for id in self.ids]
        self.answers = None
        if any(self.clicks):
            answers = []
            for counts in self.clicks:
                answers.append(max(counts, key=counts.__getitem__, default=-1))
            self.answers = np.array(answers, object)


def folder_within(folder: str | os.PathLike[str], *names: str) -> Path:
    """Return the folder inside `folder` for queries to a place with these `names`.

    Each name that is not empty adds one level.
    """
    path = Path(folder)
    for name in filter(None, names):
        quoted = quote(name, safe="")
        # A name such as ".." must stay inside the folder.
        path /= f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted
    return path


def read(
    folder: str | os.PathLike[str], dim: int | None = None, since: float | None = None
) -> Recorded | None:
    """Read the recorded queries in a folder as one uniform sample.

    Args:
        folder: The folder of a `Recorder`.
        dim: The dimensions of the queries to read; another embedding model may have
            others. By default, the dimensions of the latest query.
        since: Leave out queries that were last asked before this time (Unix seconds).

    Returns:
        The sample, or None if it is empty.

    Raises:
        StoreError: The file is damaged or cannot be read.
    """
    if not os.path.lexists(Path(folder, FILE)):
        return None
    with _transaction(Path(folder), "BEGIN") as record:
        sample = record.execute(
            "SELECT dim, seen, first, last FROM samples "
            "WHERE dim = ifnull(?, dim) ORDER BY last DESC",
            (dim,),
        ).fetchone()
        if sample is None:
            return None
        rows = record.execute(
            "SELECT id, vector, text FROM queries "
            "WHERE dim = ? AND time >= ifnull(?, time) ORDER BY id",
            (sample[0], since),
        ).fetchall()
        if not rows:
            return None
        clicks = defaultdict[str, dict[int | str, int]](dict)
        # A record of an earlier version may have clicks on -1.
        for id, target, count in record.execute(
            f"SELECT id, target, count FROM clicks WHERE target <> '{NO_TARGET}' "
            "ORDER BY rowid"
        ):
            clicks[id][as_target_id(target)] = count
        return Recorded(f"recorded queries ({folder})", sample, rows, clicks)


@contextmanager
def _transaction(
    folder: Path, begin: str = "BEGIN IMMEDIATE"
) -> Iterator[sqlite3.Connection]:
    """Open the record in `folder` for one transaction. Create the file if necessary.

    `begin` is the statement that begins the transaction. By default, it locks out other
    writers at once; "BEGIN" suffices to read. There is no write-ahead log, which would
    need memory shared by all writers. Raises StoreError, or OSError if no file can be
    created in `folder`.
    """
    path = folder / FILE
    is_new = not os.path.lexists(path)
    if not is_new and (path.is_symlink() or not path.is_file()):
        raise StoreError(
            f"{path} is a link, or not a file; delete it: a record is only a sample"
        )
    try:
        with closing(
            sqlite3.connect(path, WAIT_SECONDS, isolation_level=None)
        ) as record:
            # Overwrite deleted content, so that a forgotten query cannot be recovered.
            record.execute("PRAGMA secure_delete = ON")
            record.execute(begin)
            for table in SCHEMA:
                record.execute(table)
            if is_new:
                path.chmod(0o600)
            yield record
            record.execute("COMMIT")
    # Damaged content raises ValueError or TypeError in the `with` block of the caller.
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise StoreError(
            f"{path} cannot be used ({one_line(error)}); try again, or delete it: "
            "it is only a sample"
        ) from None


def _vectors(queries: Any) -> np.ndarray:
    """Return one query [d] or several [m, d] as float32 [m, d]."""
    values = np.asarray(queries, np.float32)
    if values.ndim not in (1, 2) or not values.size:
        raise InputError(
            f"expected a query [d], or several [m, d]; got shape {values.shape}"
        )
    return np.atleast_2d(values)


def _id(vector: bytes) -> str:
    """Return the id of a query with these float32 bytes, in hexadecimal digits.

    It is made of the first 8 bytes of the SHA-256, the last of these bytes first.
    """
    return sha256(vector).digest()[7::-1].hex()


def as_id(search: str) -> str:
    """Return `search` if it is the id of a query.

    Otherwise raises InputError. The message does not repeat the text: it may be
    private.
    """
    if not re.fullmatch("[0-9a-f]{16}", search):
        raise InputError(
            "expected a query's vector, or its id of 16 hexadecimal digits; got a text "
            f"of {len(search)} characters"
        )
    return search


def as_target_id(target: object) -> int | str:
    """Check the id of a target, and return it in the form of `plain_id`.

    Raises InputError for anything else, and for -1, which stands for no target. The
    message does not repeat `target`, which may be private.
    """
    text = ""
    if isinstance(target, (str, UUID)):
        text = str(target)
    elif isinstance(target, (int, np.integer)) and not isinstance(target, bool):
        text = str(int(target))
    if not 0 < len(text) <= LONGEST_ID or text == NO_TARGET:
        raise InputError(
            "expected the id of a target: an integer other than -1, or a text of 1 to "
            f"{LONGEST_ID} characters; got {type(target).__name__}"
        )
    return plain_id(text)


def plain_id(id: int | str) -> int | str:
    """Return an id as a number if it is the usual text of one, as "17" is.

    Other digits stay a text: "042" may be a barcode.
    """
    text = str(id)
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdecimal() and len(text) < 40:
        number = int(text)
        if str(number) == text:
            return number
    return id


class Recorder:
    """Records a sample of an application's queries on disk, for use as a query bank.

        recorder = hubplugin.Recorder("photos.faiss.queries")
        recorder.add(queries)  # beside each index.search(queries, k)
        recorder.click(query, 4711)  # when somebody clicks a result

    Recording never raises an error. If the folder cannot be written, one line is
    logged, and queries are dropped until it can be written again.

    Args:
        folder: The folder of the sample, on a local disk, since file locks on network
            disks are not reliable. Any number of processes may record to it, and
            continue after a restart. `hubplugin.apply` and `hubplugin bank` read it.
        size: The number of different queries to keep, drawn at random from all queries
            ever asked; 10,000 take 15 MB at 384 dimensions. There is one sample for
            each number of dimensions.
        texts: True to keep the texts that come with queries. By default they are
            dropped, since people write private things.
        seconds: The time between two writes to the disk, made by a background thread.
        collections: The names of the collections for which a Qdrant client keeps
            queries; all by default.

    Raises:
        InputError: `size` or `seconds` is not above 0, `collections` is a single text,
            or `folder` is a file.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        size: int = 10_000,
        *,
        texts: bool = False,
        seconds: float = 60.0,
        collections: Iterable[str] | None = None,
    ):
        if isinstance(collections, str):
            raise InputError(
                f"collections={collections!r}: expected a list of names, as "
                f"[{collections!r}]"
            )
        if size < 1 or seconds <= 0:
            raise InputError(
                "a recorder needs a size and seconds above 0; "
                f"given: size={size!r}, seconds={seconds!r}"
            )
        # Make it absolute: the program may change its working directory before it ends.
        self.folder = Path(folder).absolute()
        if self.folder.is_file():
            raise InputError(
                f"{self.folder} is a file; queries are recorded in a folder: name "
                "another"
            )
        self.size = size
        self.texts = texts
        self.seconds = seconds
        self.collections = None if collections is None else frozenset(collections)
        self._subrecorders: dict[tuple[str, ...], Recorder] = {}
        self._reported = set[str]()
        self._begin()
        atexit.register(self.flush)
        if hasattr(os, "register_at_fork"):
            # A forked process lacks the thread, and may get locks that nobody releases.
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Set up the locks, and start with nothing in memory."""
        self._adding = threading.Lock()
        self._writing = threading.Lock()
        self._timer: threading.Timer | None = None
        # For each number of dimensions, a bound above all ids of the sample.
        self._bounds: dict[int, str] = {}
        # Rows that are not on disk yet, by the SQL statement that inserts them.
        self._unwritten = defaultdict[str, list[tuple[Any, ...]]](list)

    def add(self, queries: VectorLike, text: str | None = None) -> None:
        """Record queries. Never raises.

        This takes microseconds per query: its bytes are hashed, and usually dropped.

        Args:
            queries: One query [d], or several [m, d].
            text: The text of the query, if there is only one.
        """
        try:
            if not self.texts:
                text = None
            elif text is not None:
                # SQLite refuses lone surrogates.
                text = text.encode(errors="replace").decode()
            vectors = _vectors(queries)
            count, dim = vectors.shape
            now = time.time()
            # Count every query, but keep only finite ones that are not zero.
            has_direction = np.isfinite(vectors).all(axis=1) & vectors.any(axis=1)
            rows = []
            for vector in vectors[has_direction]:
                content = vector.tobytes()
                id = _id(content)
                # The sample has only ids below the bound that the last write found.
                if id < self._bounds.get(dim, NO_BOUND):
                    rows.append((dim, id, content, now, text))
            self._hold(ADD_SAMPLE, (dim, count, now, now))
            self._hold(ADD_QUERY, *rows)
        except Exception as error:
            self.fail(error)

    def _hold(self, statement: str, *rows: tuple[Any, ...]) -> None:
        """Keep rows in memory until the next write. Write now if there are many.

        Args:
            statement: The SQL statement that will insert the rows.
            *rows: The values of the statement, one row each.
        """
        with self._adding:
            unwritten = self._unwritten[statement]
            unwritten += rows
            if self._timer is None:
                self._timer = threading.Timer(self.seconds, self.flush)
                self._timer.daemon = True
                self._timer.start()
        # While another thread writes, the next write will take these rows.
        if len(unwritten) > MOST_UNWRITTEN and not self._writing.locked():
            self.flush()

    @staticmethod
    def id_of(query: VectorLike) -> str:
        """Return the id of a query [d], 16 hexadecimal digits.

        An HTTP service can send the id with the results, so that `click` needs no
        vector. The id is a hash of the float32 bytes, the same on every machine. Raises
        InputError if `query` is not a single query.
        """
        vectors = _vectors(query)
        if len(vectors) != 1:
            raise InputError(f"expected one query [d]; got {len(vectors)}")
        return _id(vectors[0].tobytes())

    def click(self, query: VectorLike | str, target: int | str | UUID) -> None:
        """Record a click. Never raises.

        If the sample drops a query, it drops the query's clicks, too: the remaining
        clicks are as uniform as the queries. Any process may record a click.

        Args:
            query: The query [d], or the id that `id_of` returned for it.
            target: The store's id of the clicked target.
        """
        try:
            id = as_id(query) if isinstance(query, str) else self.id_of(query)
            clicked = str(as_target_id(target))
            clicked.encode()  # refuse a lone surrogate here: SQLite would drop all rows
            self._hold(ADD_CLICK, (id, clicked, time.time()))
        except Exception as error:
            self.fail(error, "a click is")

    def forget(self, ids: Collection[str]) -> int:
        """Delete queries and their clicks, whichever process recorded them.

        Another process may hold such a query in memory for its `seconds`, and write it
        later: call `forget` again then. A correction that was fitted on a query keeps
        the query until the next refit.

        Args:
            ids: The ids of the queries, as `id_of` returns them.

        Returns:
            The number of ids found, counted separately in `folder` and each subfolder.

        Raises:
            InputError: An id is malformed.
            StoreError: A file cannot be read or written. It is left unchanged.
        """
        checked_ids = {as_id(id) for id in ids}
        self.flush()  # otherwise a query in memory would be written after its deletion
        count = 0
        for path in sorted(self.folder.rglob(FILE)):
            with _transaction(path.parent) as record:
                for id in checked_ids:
                    queries = record.execute("DELETE FROM queries WHERE id = ?", (id,))
                    clicks = record.execute("DELETE FROM clicks WHERE id = ?", (id,))
                    if queries.rowcount + clicks.rowcount > 0:
                        count += 1
        return count

    def flush(self) -> None:
        """Write all rows in memory. Never raises.

        This includes the rows of all recorders that `within` has returned.
        """
        for recorder in (self, *self._subrecorders.values()):
            try:
                recorder._write()
            except Exception as error:
                recorder.fail(error)

    def _write(self) -> None:
        """Write the rows in memory, and reduce the sample to `size`.

        `add` and `click` wait only while this method takes the rows, not for the disk.
        """
        with self._writing:
            with self._adding:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = None
                rows_of = self._unwritten.copy()
                self._unwritten.clear()
            if not rows_of:
                return
            has_queries = ADD_SAMPLE in rows_of
            if not has_queries and not os.path.lexists(self.folder / FILE):
                # A click in a misspelt collection must not create a folder for it.
                self.fail(InputError("no query was recorded there"), "a click is")
                return
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _transaction(self.folder) as record:
                for statement, rows in rows_of.items():
                    record.executemany(statement, rows)
                for statement in KEEP:
                    record.execute(statement, {"size": self.size})
                bounds = dict(record.execute("SELECT dim, bound FROM samples"))
        with self._adding:
            self._bounds = bounds
        self._reported.discard(QUERIES)

    def fail(self, error: Exception, what: str = QUERIES) -> None:
        """Log that queries or clicks are not recorded.

        A failure of queries is logged once until a write succeeds, any other once.

        Args:
            error: The reason.
            what: The subject and verb of the message, such as "a click is".
        """
        if what not in self._reported:
            self._reported.add(what)
            logging.getLogger(__name__).warning(
                "%s not recorded in %s: %s; searches go on", what, self.folder, error
            )

    def close(self) -> None:
        """Write all rows in memory. This happens automatically when Python exits."""
        self.flush()

    def within(self, *names: str) -> Recorder:
        """Return a recorder with the same settings that records to a subfolder.

        Args:
            names: The names of the place that its queries search, such as a collection
                and a vector.

        Raises:
            InputError: There are 64 such recorders already.
        """
        recorder = self._subrecorders.get(names)
        if recorder is not None:
            return recorder
        if len(self._subrecorders) >= MOST_WITHIN:
            raise InputError(
                f"it holds {MOST_WITHIN} samples already; {'/'.join(names)} is left out"
            )
        folder = folder_within(self.folder, *names)
        recorder = Recorder(folder, self.size, texts=self.texts, seconds=self.seconds)
        # If another thread was first, its recorder counts.
        return self._subrecorders.setdefault(names, recorder)
