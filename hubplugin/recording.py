"""Queries and clicks recorded as they come: a bounded, uniform sample for a query bank.

The sample is one SQLite file that any number of processes read and write. A query's id
is a hash of its vector, as evenly spread as a random number, and the file keeps the
queries of the smallest ids. So a query that is asked a thousand times counts once, and
any two different queries are equally likely to be kept, whichever process heard them:
the bottom-k sketch of Cohen and Kaplan (PODC 2007). A click names its query by the id
and is kept by the same rule.
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
MOST_WITHIN = 64  # recorders within one: each has a thread and a sample
MOST_HELD = 10_000  # rows of a table in memory, which are written at once then
LONGEST = 200  # characters of the id of a target: what is longer is a text
PATIENCE = 5.0  # seconds to wait for other writers, who need some milliseconds
ALL = "g"  # a bound above every id
QUERIES = "queries are"  # of what fails, with its verb
SCHEMA = [
    # The queries of `dim` dimensions whose ids are below `bound` are all there.
    "CREATE TABLE IF NOT EXISTS samples (dim INTEGER PRIMARY KEY, bound TEXT, "
    "seen INTEGER, first REAL, last REAL)",
    "CREATE TABLE IF NOT EXISTS queries (dim INTEGER, id TEXT, vector BLOB, "
    "time REAL, text TEXT, PRIMARY KEY (dim, id))",
    "CREATE TABLE IF NOT EXISTS clicks (id TEXT, target TEXT, count INTEGER, "
    "time REAL, PRIMARY KEY (id, target))",
]
ADD_SAMPLE = (
    f"INSERT INTO samples VALUES (?, '{ALL}', ?, ?, ?) ON CONFLICT DO UPDATE SET "
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
    "UPDATE samples SET bound = ifnull((SELECT id FROM queries WHERE dim = samples.dim "
    "AND id < bound ORDER BY id LIMIT 1 OFFSET :size), bound)",
    "DELETE FROM queries WHERE id >= "
    "(SELECT bound FROM samples WHERE samples.dim = queries.dim)",
    # A click may come before its query. Ids are easily made up, so such clicks have
    # room of their own.
    "DELETE FROM clicks WHERE id NOT IN (SELECT id FROM queries) AND ("
    "id >= (SELECT max(bound) FROM samples) OR rowid NOT IN ("
    "SELECT rowid FROM clicks WHERE id NOT IN (SELECT id FROM queries) "
    "ORDER BY time DESC LIMIT :size))",
    # Keep 8 targets of a query: those that were clicked most, and of these the latest.
    "DELETE FROM clicks WHERE rowid IN (SELECT rowid FROM (SELECT rowid, row_number() "
    "OVER (PARTITION BY id ORDER BY count DESC, time DESC) AS place FROM clicks) "
    "WHERE place > 8)",
]


class Recorded(Sliceable):
    """Recorded queries as a query bank: float32 [rows, dim], all different.

    `hubplugin.Bank(recorded, recorded.answers)` is a bank that knows what was clicked.

    Attributes:
        ids: The id of each query [rows].
        texts: Their texts [rows], None for a query without; None if no query has one.
        seen: How many queries were asked in all.
        first, last: When the first and the last query was asked, Unix seconds.
        clicks: How often each target was clicked, by query [rows].
        answers: The most frequently clicked target of each query, object [rows], -1
            for none; None if nothing was clicked.
    """

    def __init__(
        self,
        name: str,
        sample: tuple[Any, ...],
        rows: list[Any],
        clicks: dict[str, dict[int | str, int]],
    ):
        dim, self.seen, self.first, self.last = sample
        self.ids, contents, texts = map(list, zip(*rows, strict=True))
        vectors = np.frombuffer(b"".join(contents), np.float32).reshape(-1, dim)
        if [_id(vector) for vector in contents] != self.ids:
            raise ValueError("a vector is not the one that was written")
        super().__init__(name, vectors, vectors.shape, np.asarray)
        self.texts = texts if any(texts) else None
        self.clicks = [clicks.get(id, {}) for id in self.ids]
        self.answers = None
        if any(self.clicks):
            most = [max(each, key=each.__getitem__, default=-1) for each in self.clicks]
            self.answers = np.array(most, object)


def folder_within(folder: str | os.PathLike[str], *names: str) -> Path:
    """Return the folder inside `folder` for the queries to what is called `names`.

    Empty names add nothing.
    """
    path = Path(folder)
    for name in filter(None, names):
        quoted = quote(name, safe="")
        path /= f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted
    return path


def read(
    folder: str | os.PathLike[str], dim: int | None = None, since: float | None = None
) -> Recorded | None:
    """Read what was recorded in a folder as one uniform sample.

    Args:
        folder: The folder of a `Recorder`.
        dim: Leaves out queries of other dimensions, which another model has embedded.
            By default the dimension that was asked last is read.
        since: Leaves out what was not asked after that moment (Unix seconds).

    Returns:
        The sample, None if it is empty.

    Raises:
        StoreError: The file is damaged, or cannot be read.
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
        for id, target, count in record.execute(
            "SELECT id, target, count FROM clicks ORDER BY rowid"
        ):
            clicks[id][as_target(target)] = count
        return Recorded(f"recorded queries ({folder})", sample, rows, clicks)


@contextmanager
def _transaction(
    folder: Path, begin: str = "BEGIN IMMEDIATE"
) -> Iterator[sqlite3.Connection]:
    """Open the record in `folder` for one transaction; a file is made where none is.

    There is no write-ahead log, which needs memory that all writers share. Raises
    StoreError, and OSError for a folder in which no file can be made.
    """
    path = folder / FILE
    is_new = not os.path.lexists(path)
    if not is_new and (path.is_symlink() or not path.is_file()):
        raise StoreError(
            f"{path} is a link, or no file; delete it: a record is only a sample"
        )
    try:
        with closing(sqlite3.connect(path, PATIENCE, isolation_level=None)) as record:
            # What is forgotten is overwritten.
            record.execute("PRAGMA secure_delete = ON")
            record.execute(begin)
            for table in SCHEMA:
                record.execute(table)
            if is_new:
                path.chmod(0o600)
            yield record
            record.execute("COMMIT")
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
    return sha256(vector).digest()[7::-1].hex()


def as_id(search: str) -> str:
    """Return the id of a query as it was given.

    Raises InputError for other texts, without repeating what somebody may have written.
    """
    if not re.fullmatch("[0-9a-f]{16}", search):
        raise InputError(
            "expected a query's vector, or its id of 16 hexadecimal digits; got a text "
            f"of {len(search)} characters"
        )
    return search


def as_target(target: object) -> int | str:
    """Return the id of a target as it is kept: digits are a number.

    Digits that begin with 0 stay a text. Raises InputError for what is no id, without
    repeating it: it may be what somebody wrote.
    """
    is_id = isinstance(target, (str, UUID))
    if isinstance(target, (int, np.integer)):
        is_id = int(target) >= 0 and not isinstance(target, bool)
    text = str(target)
    if not is_id or not 0 < len(text) <= LONGEST:
        raise InputError(
            "expected the id of a target, 0 or more or up to "
            f"{LONGEST} characters; got {type(target).__name__}"
        )
    return plain_id(text)


def plain_id(id: int | str) -> int | str:
    """Return an id with digits as a number, unless they begin with 0, as a barcode may."""
    text = str(id)
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdecimal() and len(text) < 40:
        number = int(text)
        if str(number) == text:
            return number
    return id


class Recorder:
    """A sample of the queries that are asked, on disk, to be used as a query bank.

        recorder = hubplugin.Recorder("photos.faiss.queries")
        recorder.add(queries)  # beside each index.search(queries, k)
        recorder.click(query, 4711)  # where somebody clicked what the search found

    Nothing that goes wrong while recording is raised: a folder that cannot be written is
    one line in the log, and what was asked meanwhile is dropped.

    Args:
        folder: Where the sample lies, on a disk of this machine: the locks of network
            disks cannot be trusted. Any number of processes may record to it, and go on
            after a restart. `hubplugin.apply` and `hubplugin bank` read it.
        size: How many different queries are kept, drawn at random from all that were
            ever asked; 10,000 take 15 MB at 384 dimensions. Vectors of each dimension
            have a sample of their own.
        texts: Whether the texts that come with queries are kept, too. By default they
            are not, since people write private things.
        seconds: Between two writings to the disk, by a thread of its own.
        collections: Names of collections of a Qdrant client whose queries are kept; all
            by default.

    Raises:
        InputError: `size` or `seconds` is not above 0, `collections` is one text, or the
            place of `folder` is a file.
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
            given = f"collections={collections!r}"
            raise InputError(f"{given}: expected a list of names, as [{collections!r}]")
        if size < 1 or seconds <= 0:
            raise InputError(
                "a recorder needs a size and seconds above 0; "
                f"given: size={size!r}, seconds={seconds!r}"
            )
        # Absolute, since a program may change its folder before it ends.
        self.folder = Path(folder).absolute()
        if self.folder.is_file():
            expected = "queries are recorded in a folder: name another"
            raise InputError(f"{self.folder} is a file; {expected}")
        self.size = size
        self.texts = texts
        self.seconds = seconds
        self.collections = None if collections is None else frozenset(collections)
        self._within: dict[tuple[str, ...], Recorder] = {}
        self._failed = set[str]()
        self._begin()
        atexit.register(self.flush)
        if hasattr(os, "register_at_fork"):
            # A forked process has other threads, and locks that nobody may release.
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._adding = threading.Lock()
        self._writing = threading.Lock()
        self._timer: threading.Timer | None = None
        self._bounds: dict[int, str] = {}
        # Rows that are not on disk yet, by the statement that adds them.
        self._heard = defaultdict[str, list[tuple[Any, ...]]](list)

    def add(self, queries: VectorLike, text: str | None = None) -> None:
        """Record queries that were asked. Never raises.

        It takes microseconds a query: the bytes are hashed, and almost always dropped.

        Args:
            queries: One query [d], or several [m, d].
            text: The text of one query.
        """
        try:
            if not self.texts:
                text = None
            elif text is not None:
                text = text.encode(errors="replace").decode()
            vectors = _vectors(queries)
            count, dim = vectors.shape
            now = time.time()
            # Others are counted, and no example.
            has_direction = np.isfinite(vectors).all(axis=1) & vectors.any(axis=1)
            kept = []
            for vector in vectors[has_direction]:
                content = vector.tobytes()
                id = _id(content)
                if id < self._bounds.get(dim, ALL):
                    kept.append((dim, id, content, now, text))
            self._hold(ADD_SAMPLE, (dim, count, now, now))
            self._hold(ADD_QUERY, *kept)
        except Exception as error:
            self.fail(error)

    def _hold(self, statement: str, *rows: tuple[Any, ...]) -> None:
        """Hold rows until the next writing, which begins now if there are many."""
        with self._adding:
            held = self._heard[statement]
            held += rows
            if self._timer is None:
                self._timer = threading.Timer(self.seconds, self.flush)
                self._timer.daemon = True
                self._timer.start()
        if len(held) > MOST_HELD and not self._writing.locked():
            self.flush()

    @staticmethod
    def id_of(query: VectorLike) -> str:
        """Return the id of a query [d], 16 hexadecimal digits.

        With it in an answer over HTTP, `click` needs no vector. It is a hash of the
        float32 bytes, the same everywhere. Raises InputError for what is no query.
        """
        vectors = _vectors(query)
        if len(vectors) != 1:
            raise InputError(f"expected one query [d]; got {len(vectors)}")
        return _id(vectors[0].tobytes())

    def click(self, query: VectorLike | str, target: int | str | UUID) -> None:
        """Record a click. Never raises.

        Clicks of queries that the sample drops are dropped, so those that stay are as
        uniform as the queries. Any process may be told of a click.

        Args:
            query: The query that was asked [d], or its `id_of`.
            target: The id in the store of what was clicked.
        """
        try:
            id = as_id(query) if isinstance(query, str) else self.id_of(query)
            clicked = str(as_target(target))
            clicked.encode()  # a lone surrogate would keep all other clicks out
            self._hold(ADD_CLICK, (id, clicked, time.time()))
        except Exception as error:
            self.fail(error, "a click is")

    def forget(self, ids: Collection[str]) -> int:
        """Delete queries with their clicks, whichever process has recorded them.

        What another process heard within its last `seconds` it writes later: forget it
        again then. A correction that was fitted on it keeps it until the next refit.

        Args:
            ids: Those of the queries, which `id_of` gives.

        Returns:
            How many there were, in the folder and the folders in it.

        Raises:
            InputError: One of them is no id.
            StoreError: A file cannot be read or written, and is left as it is.
        """
        forgotten = {as_id(id) for id in ids}
        self.flush()  # or what is in memory would be written after it was forgotten
        count = 0
        for path in sorted(self.folder.rglob(FILE)):
            with _transaction(path.parent) as record:
                for id in forgotten:
                    queries = record.execute("DELETE FROM queries WHERE id = ?", (id,))
                    clicks = record.execute("DELETE FROM clicks WHERE id = ?", (id,))
                    count += queries.rowcount + clicks.rowcount > 0
        return count

    def flush(self) -> None:
        """Write what is not on disk yet, here and `within`. Never raises."""
        for recorder in (self, *self._within.values()):
            try:
                recorder._write()
            except Exception as error:
                recorder.fail(error)

    def _write(self) -> None:
        """Write what was heard since the last writing, and cut the sample to `size`.

        `add` and `click` wait only while it takes their lists over, not for the disk.
        """
        with self._writing:
            with self._adding:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = None
                heard = self._heard.copy()
                self._heard.clear()
            if not heard:
                return
            if ADD_SAMPLE not in heard and not os.path.lexists(self.folder / FILE):
                # A click in a misspelt collection must not make a folder for it.
                self.fail(InputError("no query was recorded there"), "a click is")
                return
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _transaction(self.folder) as record:
                for statement, rows in heard.items():
                    record.executemany(statement, rows)
                for statement in KEEP:
                    record.execute(statement, {"size": self.size})
                bounds = dict(record.execute("SELECT dim, bound FROM samples"))
        with self._adding:
            self._bounds = bounds
        self._failed.discard(QUERIES)

    def fail(self, error: Exception, what: str = QUERIES) -> None:
        """Log that something is not recorded: once, until it is written again.

        Args:
            error: The reason.
            what: What is not recorded, with its verb.
        """
        if what not in self._failed:
            self._failed.add(what)
            message = "%s not recorded in %s: %s; searches go on"
            logging.getLogger(__name__).warning(message, what, self.folder, error)

    def close(self) -> None:
        """Write what is not on disk yet. It happens by itself where Python ends."""
        self.flush()

    def within(self, *names: str) -> Recorder:
        """Return a recorder of the same settings in a folder inside this one's.

        Args:
            names: What its queries are asked of, such as a collection and its vector.

        Raises:
            InputError: There are 64 of them already.
        """
        found = self._within.get(names)
        if found is not None:
            return found
        if len(self._within) >= MOST_WITHIN:
            raise InputError(
                f"{MOST_WITHIN} samples are kept in it already; "
                f"{'/'.join(names)} is left out"
            )
        folder = folder_within(self.folder, *names)
        made = Recorder(folder, self.size, texts=self.texts, seconds=self.seconds)
        return self._within.setdefault(names, made)
