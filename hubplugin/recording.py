"""Queries recorded as they are asked, for a query bank: a sample that is bounded, uniform, and free of repetitions.

It lies in a SQLite file, which any number of processes read and write. Each query has an id: a hash of its vector, as
evenly spread as a random number. The file keeps the queries of the smallest ids. So a query that is asked a thousand
times counts once. Any two different queries are equally likely to be kept, whenever and by whichever process they were
asked. It is the bottom-k sketch of Cohen and Kaplan (PODC 2007).

A click names its query by the id, and is kept by the same rule. So it may come before the query does.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import sqlite3
import struct
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import UUID

import numpy as np

from hubplugin.atomic import alone, lack_of_room
from hubplugin.errors import InputError, StoreError
from hubplugin.vectors import Sliceable, one_line

if TYPE_CHECKING:
    from hubplugin.vectors import VectorLike

FILE = "record.sqlite"
MOST_WITHIN = 64  # recorders within one: each has a thread and a sample, and tenants with a collection each may be many
MOST_CLICKS = 100_000  # in memory between two writings; further ones are dropped
LONGEST = 200  # characters of the id of a target: what is longer is a text
PATIENCE = (
    5.0  # seconds to wait for others who write, which takes them some milliseconds
)
JOURNAL_OF_SEVERAL = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"  # ends a journal of several databases, and names one more
ALL = "g"  # a bound above every id
MOMENT = "BETWEEN -62135596800 AND 253402300799"  # the years 1 to 9999 in Unix seconds
SCHEMA = [  # A file with other tables is of another version. user_version: another after each `clear` and `forget`.
    # All queries of `dim` dimensions that were seen, and whose id is below `bound`, are there.
    "CREATE TABLE samples (dim INTEGER PRIMARY KEY CHECK (dim > 0), bound TEXT NOT NULL CHECK (bound = 'g' OR "
    "length(bound) = 16 AND bound NOT GLOB '*[^0-9a-f]*'), seen INTEGER CHECK (typeof(seen) = 'integer' AND seen > 0), "
    f"first REAL NOT NULL CHECK (first {MOMENT}), last REAL NOT NULL CHECK (last {MOMENT}))",
    "CREATE TABLE queries (dim INTEGER, id TEXT, vector BLOB CHECK (typeof(vector) = 'blob' AND length(vector) = "
    f"4 * dim), time REAL NOT NULL CHECK (time {MOMENT}), text TEXT CHECK (typeof(text) IN ('text', 'null')), "
    "PRIMARY KEY (dim, id))",
    "CREATE TABLE clicks (id TEXT, target TEXT CHECK (typeof(target) = 'text'), count INTEGER CHECK (typeof(count) = "
    f"'integer' AND count > 0), time REAL NOT NULL CHECK (time {MOMENT}), PRIMARY KEY (id, target))",
]
ADD = {
    "samples": "INSERT INTO samples VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET bound = min(bound, "
    "excluded.bound), seen = seen + excluded.seen, first = min(first, excluded.first), last = max(last, excluded.last)",
    "queries": "INSERT INTO queries VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
    "time = max(time, excluded.time), text = ifnull(excluded.text, text)",
    "clicks": "INSERT INTO clicks VALUES (?, ?, 1, ?) ON CONFLICT DO UPDATE SET "
    "count = count + 1, time = max(time, excluded.time)",
}
KEEP = [
    # Two models may take turns; what an earlier one has embedded goes.
    "DELETE FROM samples WHERE dim NOT IN (SELECT dim FROM samples ORDER BY last DESC LIMIT 2)",
    "UPDATE samples SET bound = ifnull((SELECT id FROM queries WHERE dim = samples.dim AND id < bound "
    "ORDER BY id LIMIT 1 OFFSET :size), bound)",
    "DELETE FROM queries WHERE NOT EXISTS (SELECT 1 FROM samples WHERE dim = queries.dim AND bound > queries.id)",
    # Anybody can make up the id of a query, and a small one. So clicks alone take no room from clicks of queries.
    "DELETE FROM clicks WHERE id NOT IN (SELECT id FROM queries) AND (id >= (SELECT max(bound) FROM samples) OR id NOT "
    "IN (SELECT DISTINCT id FROM clicks WHERE id NOT IN (SELECT id FROM queries) ORDER BY id LIMIT :size))",
    # 8 targets of a query: the last, which may become one of the others, and those that were clicked most.
    "DELETE FROM clicks WHERE rowid IN (SELECT rowid FROM (SELECT rowid, row_number() OVER (PARTITION BY id ORDER BY "
    "time = (SELECT max(time) FROM clicks AS each WHERE each.id = clicks.id) DESC, count DESC, time DESC) AS place "
    "FROM clicks) WHERE place > 8)",
]


class Recorded(Sliceable):
    """Recorded queries as a query bank: float32 [rows, dim], all different.

    times: when each was asked last, Unix seconds [rows]. texts: theirs [rows], None for those that came without; None
    if all did. seen: how many queries were asked in all; different: how many of them differ, an estimate once there
    are more than are kept. first, last: when, Unix seconds. clicks: how often each target was clicked, by query [rows].
    answers: the id of each query's most frequent one, of equally frequent ones the first, object [rows], -1 for none;
    None if nothing was clicked. `hubplugin.Bank(recorded, recorded.answers)` is a bank that knows them.
    """

    def __init__(
        self,
        name: str,
        sample: tuple[Any, ...],
        rows: list[Any],
        clicks: dict[str, dict[int | str, int]],
    ):
        dim, bound, self.seen, self.first, self.last = sample
        ids, contents, times, texts = (
            list(column) for column in zip(*rows, strict=True)
        )
        vectors = np.frombuffer(b"".join(contents), np.float32).reshape(len(rows), dim)
        super().__init__(name, vectors, vectors.shape, np.asarray)
        self.ids, self.times = ids, np.array(times)
        self.texts = texts if any(text is not None for text in texts) else None
        self.different = (
            len(rows)
            if bound == ALL
            else round(len(rows) * 2**64 / (int(bound, 16) or 1))
        )
        self.clicks = [clicks.get(id, {}) for id in ids]
        most = [
            max(counts, key=lambda target: counts[target], default=-1)
            for counts in self.clicks
        ]
        self.answers = np.array(most, object) if any(self.clicks) else None


def folder_within(folder: str | os.PathLike[str], *names: str) -> Path:
    """The folder for the queries to what is called `names`, inside of `folder`; an empty name adds nothing."""
    quoted = (quote(name, safe="") for name in names if name)
    return Path(
        folder, *(f"%2E{name[1:]}" if name.startswith(".") else name for name in quoted)
    )


def read(
    folder: str | os.PathLike[str], dim: int | None = None, since: float | None = None
) -> Recorded | None:
    """Reads what was recorded in a folder, by whichever processes, as one uniform sample; None if that is nothing.

    Args:
        folder: the folder of a `Recorder`.
        dim: leaves out queries of other dimensions, which an earlier model has embedded. By default the dimension that
            was asked last is read.
        since: leaves out what was not asked after that moment (Unix seconds).

    Raises:
        StoreError: the file is damaged, or cannot be read.
    """
    with _transaction(Path(folder), "BEGIN") as record:
        latest = "SELECT * FROM samples WHERE dim = ifnull(?, dim) ORDER BY last DESC LIMIT 1"
        sample = None if record is None else record.execute(latest, (dim,)).fetchone()
        if record is None or sample is None:
            return None
        (check,) = record.execute(
            "PRAGMA quick_check(1)"
        ).fetchone()  # which looks at each CHECK of the tables, too
        if check != "ok":
            raise ValueError(check)
        queries = "SELECT id, vector, time, text FROM queries WHERE dim = ? AND time >= ifnull(?, time) ORDER BY id"
        rows = record.execute(queries, (sample[0], since)).fetchall()
        if any(_id(vector) != id for id, vector, *_ in rows):
            raise ValueError("a vector is not the one that was written")
        clicks = defaultdict[str, dict[int | str, int]](dict)
        for id, target, count in record.execute(
            "SELECT id, target, count FROM clicks ORDER BY rowid"
        ):
            clicks[id][as_target(target)] = count
        return (
            Recorded(f"recorded queries ({folder})", sample, rows, clicks)
            if rows
            else None
        )


def clear(folder: str | os.PathLike[str]) -> None:
    """Deletes what is recorded in `folder`. Recorders that are running notice, and begin anew."""
    with _transaction(Path(folder)) as record:
        if record is not None:
            for table in ADD:
                record.execute(f"DELETE FROM {table}")
            _begin_anew(record)


def thin(folder: str | os.PathLike[str], size: int) -> None:
    """Keeps `size` of the queries recorded in `folder`, drawn at random, and no more of those to come than belong to
    as thin a sample."""
    if size < 1:
        raise InputError(f"cannot keep {size} queries; at least 1 is needed")
    with _transaction(Path(folder)) as record:
        if record is not None:
            _keep(record, size)


def _keep(record: sqlite3.Connection, size: int) -> None:
    for statement in KEEP:
        record.execute(statement, {"size": size})


def _begin_anew(record: sqlite3.Connection) -> None:
    record.execute(f"PRAGMA user_version = {random.randrange(1, 2**31)}")


@contextmanager
def _transaction(
    folder: Path, begin: str = "BEGIN IMMEDIATE", create: bool = False
) -> Iterator[sqlite3.Connection | None]:
    """The record in `folder`, in one transaction; None where there is none, unless it is to be made.

    No connection outlives its transaction, so that none is carried over a fork. There is no WAL, which needs memory
    that all writers share. Raises StoreError, and OSError where no file can be made.
    """
    path = folder / FILE
    with _creating:
        if create:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.touch(0o600, exist_ok=False)  # which follows no link
    if not os.path.lexists(path):
        yield None
        return
    _require_own(path)
    try:
        url = f"{path.absolute().as_uri()}?mode=rw"
        with closing(
            sqlite3.connect(url, PATIENCE, isolation_level=None, uri=True)
        ) as record:
            record.text_factory = bytes.decode  # whose error tells of damage
            record.execute("PRAGMA trusted_schema = OFF")
            record.execute(
                "PRAGMA secure_delete = ON"
            )  # what is forgotten is overwritten
            record.execute(begin)
            tables = [
                sql
                for (sql,) in record.execute(
                    "SELECT sql FROM sqlite_master WHERE sql NOT NULL"
                )
            ]
            if create and not tables:
                for table in SCHEMA:
                    record.execute(table)
                _begin_anew(record)
            elif tables and tables != SCHEMA:
                raise ValueError("its tables are not those of this version")
            yield record if tables or create else None
            record.execute("COMMIT")
    except sqlite3.OperationalError as error:
        raise StoreError(f"{path} cannot be used now ({error}); try again") from None
    except (sqlite3.Error, ValueError) as error:
        raise StoreError(
            f"{path} is damaged ({one_line(error)}); delete it: it is only a sample"
        ) from None


def _require_own(path: Path) -> None:
    """Raises StoreError for what is somebody else's: SQLite would write to it, give it away, or delete it."""
    journal = path.with_name(f"{FILE}-journal")
    for file in (
        path,
        path.with_name(f"{FILE}-wal"),
        path.with_name(f"{FILE}-shm"),
        journal,
    ):
        if not alone(file, missing=True):
            raise StoreError(
                f"{file} is a link, or no file; delete it: a record is only a sample"
            )
    with suppress(FileNotFoundError):  # another process may have finished with it
        if journal.read_bytes().endswith(JOURNAL_OF_SEVERAL):
            raise StoreError(
                f"{journal} names another file, which SQLite would delete; delete the journal"
            )


def _has_direction(vector: bytes) -> bool:
    """Whether its numbers are finite, and one is not 0: else it is no example of any query."""
    values = np.frombuffer(vector, np.float32)
    return bool(np.isfinite(values).all() and values.any())


def _vectors(queries: Any) -> list[bytes]:
    """The vectors of one query [d] or several [m, d], as bytes of float32."""
    if (
        isinstance(queries, (list, tuple))
        and queries
        and isinstance(queries[0], (float, int))
    ):
        return [
            struct.pack(f"={len(queries)}f", *queries)
        ]  # four times as fast as numpy
    values = np.asarray(queries, np.float32)
    if values.ndim not in (1, 2) or not values.size:
        raise InputError(
            f"expected a query [d], or several [m, d]; got shape {values.shape}"
        )
    return [row.tobytes() for row in np.atleast_2d(values)]


def _id(vector: bytes) -> str:
    return sha256(vector).digest()[7::-1].hex()


def as_id(search: str) -> str:
    """The id of a search, as it was given; raises InputError for other texts, without repeating them."""
    if len(search) != 16 or not set(search) <= set("0123456789abcdef"):
        expected = "a query's vector, or its id of 16 hexadecimal digits"
        raise InputError(f"expected {expected}; got a text of {len(search)} characters")
    return search


def as_target(target: object) -> int | str:
    """The id of a target as it is kept: digits are a number, as in a file of clicks, but for those that begin with 0
    and would lose it. Raises InputError for what is no id, without repeating it: it may be what somebody wrote."""
    text = (
        str(target)
        if isinstance(target, (int, np.integer, str, UUID))
        and not isinstance(target, bool)
        else ""
    )
    if not 0 < len(text) <= LONGEST or (text[0] == "-" and not isinstance(target, str)):
        kind = type(target).__name__
        raise InputError(
            f"expected the id of a target, 0 or more or up to {LONGEST} characters; got {kind}"
        )
    is_number = (
        text.isascii()
        and text.isdecimal()
        and str(int(text)) == text
        and int(text) < 2**64
    )
    return int(text) if is_number else text


@dataclass
class Unwritten:
    """Queries of one dimension that a recorder has not written: how many were `seen`, from `first` to `last`, and those
    whose ids are below `bound`, as rows of the table by their ids."""

    bound: str = ALL
    seen: int = 0
    first: float = 0.0
    last: float = 0.0
    rows: dict[str, tuple[int, str, bytes, float, str | None]] = field(
        default_factory=dict
    )


class Recorder:
    """A sample of the queries that are asked, on disk, to be used as a query bank.

        recorder = hubplugin.Recorder("photos.faiss.queries")
        recorder.add(queries)                         # beside each index.search(queries, k)
        recorder.click(query, 4711)                   # where somebody clicked what the search found

    Nothing that goes wrong while recording is raised: a folder that cannot be written is one line in the log.

    Args:
        folder: where the sample lies, on a disk of this machine: the locks of network disks cannot be trusted. Any
            number of processes may record to it at the same time, and go on after a restart. `hubplugin.apply` and
            `hubplugin bank` read it.
        size: how many different queries are kept, drawn at random from all that were ever asked, each counted once;
            10,000 take 15 MB at 384 dimensions.
        texts: whether the texts that come with queries are kept, too. By default they are not, since people write
            private things.
        seconds: between one writing to the disk and the next, which a thread of its own does.
        collections: of a Qdrant client, those whose queries are kept, by their names or as searches name them; all by
            default.

    Raises:
        InputError: `size` or `seconds` is not above 0, or `collections` is one text.
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
                f"collections={collections!r}: expected a list of names, such as [{collections!r}]"
            )
        if size < 1 or seconds <= 0:
            raise InputError(
                f"a recorder needs a size and seconds above 0; given: size={size!r}, seconds={seconds!r}"
            )
        self.folder = Path(
            folder
        ).absolute()  # a program may change its folder before it ends
        self.size, self.texts, self.seconds = size, texts, seconds
        self.collections = None if collections is None else frozenset(collections)
        self._within: dict[tuple[str, ...], Recorder] = {}
        self._begin()
        _ALL.add(self)
        there = next(
            path for path in (self.folder, *self.folder.parents) if path.is_dir()
        )
        if lack := lack_of_room(there):
            self.fail(StoreError(f"cannot write in {str(there)!r}: {lack}"))

    def _begin(self) -> None:
        """Nothing is heard yet: in a new process, or in the child of a fork."""
        self._adding, self._writing = threading.Lock(), threading.Lock()
        self._timer: threading.Timer | None = None
        self._failed = set[str]()
        self._epoch: int | None = (
            None  # the user_version of the record that it goes on with
        )
        self._unwritten = defaultdict[int, Unwritten](Unwritten)  # by dimension
        self._clicks = list[tuple[str, str, float]]()

    def add(self, queries: VectorLike, text: str | None = None) -> None:
        """Takes note of queries that were asked. Never raises.

        It takes microseconds a query: the bytes are hashed, and almost always dropped.

        Args:
            queries: One query [d], or several [m, d].
            text: The text of one query.
        """
        try:
            if self.texts and not isinstance(text, (str, type(None))):
                self.fail(
                    InputError(f"expected a str, got {type(text).__name__}"),
                    "the text of a query is",
                )
            text = (
                text.encode(errors="replace").decode()
                if self.texts and isinstance(text, str)
                else None
            )
            for vector in _vectors(queries):
                self._add(vector, text)
        except Exception as error:
            self.fail(error)

    def _add(self, vector: bytes, text: str | None) -> None:
        id, dim, now = _id(vector), len(vector) // 4, time.time()
        with self._adding:
            part = self._unwritten[dim]
            part.seen, part.first, part.last = part.seen + 1, part.first or now, now
            if id < part.bound and _has_direction(vector):
                previous = part.rows.get(id)
                part.rows[id] = (
                    dim,
                    id,
                    vector,
                    now,
                    previous[4] if previous and text is None else text,
                )
                if len(part.rows) > 2 * self.size:
                    ids = sorted(part.rows)
                    part.bound, part.rows = (
                        ids[self.size],
                        {id: part.rows[id] for id in ids[: self.size]},
                    )
            self._write_later()

    def _write_later(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(self.seconds, self.flush)
            self._timer.daemon = True
            self._timer.start()

    @staticmethod
    def id_of(query: VectorLike) -> str:
        """The id of a query [d], 16 hexadecimal digits: with it in an answer over HTTP, `click` needs no vector.

        It is a hash of the vector's float32 bytes: the same in every process, and nothing is kept for it. Raises
        InputError for what is no query.
        """
        vectors = _vectors(query)
        if len(vectors) != 1:
            raise InputError(f"expected one query [d]; got {len(vectors)}")
        return _id(vectors[0])

    def click(self, query: VectorLike | str, target: int | str | UUID) -> None:
        """Takes note of a click. Never raises.

        Args:
            query: The query that was asked [d], or its `id_of`.
            target: The id in the store of what was clicked.

        Clicks of queries that the sample drops are dropped, so that those that stay are as uniform as the queries. Any
        process may be told of a click, whichever answered the query.
        """
        try:
            id, clicked = (
                as_id(query if isinstance(query, str) else self.id_of(query)),
                str(as_target(target)),
            )
            clicked.encode()  # what no database takes would keep all other clicks out
            with self._adding:
                if len(self._clicks) < MOST_CLICKS:
                    self._clicks.append((id, clicked, time.time()))
                self._write_later()
        except Exception as error:
            self.fail(error, "a click is")

    def forget(self, ids: Collection[str]) -> int:
        """Deletes the queries of these ids, which `id_of` gives, with their clicks: from the folder and the folders in
        it, by whichever process they were recorded. Returns how many there were.

        Recorders that run in other processes drop what came since they wrote last. A correction that was fitted on
        these queries keeps them until the next `hubplugin.refit`.

        Raises InputError for what is no id, StoreError where a file cannot be read or written, which is then left as
        it is, and OSError where none can be made.
        """
        forgotten, count = {as_id(id) for id in ids}, 0
        for recorder in (self, *self._within.values()):
            recorder._write()  # or what is in memory would be written after it was forgotten
        for folder in sorted(
            {self.folder, *(path.parent for path in self.folder.rglob(FILE))}
        ):
            with _transaction(folder) as record:
                if record is not None:
                    _begin_anew(record)
                    for id in forgotten:
                        rows = record.execute(
                            "DELETE FROM queries WHERE id = ?", (id,)
                        ).rowcount
                        clicks = record.execute(
                            "DELETE FROM clicks WHERE id = ?", (id,)
                        ).rowcount
                        count += rows + clicks > 0
        self.flush()
        return count

    def flush(self) -> None:
        """Writes what is not on disk yet, here and `within`. Never raises."""
        for recorder in (self, *list(self._within.values())):
            try:
                recorder._write()
                recorder._failed.clear()
            except Exception as error:
                recorder.fail(error)

    def _write(self) -> None:
        with self._writing:
            with self._adding:
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
                parts = {
                    dim: replace(part, rows=dict(part.rows))
                    for dim, part in self._unwritten.items()
                    if part.seen
                }
                clicks = list(self._clicks)
            if self._epoch is None and not (parts or clicks):
                return  # no folder is made for nothing
            with _transaction(self.folder, create=True) as record:
                assert record is not None
                (epoch,) = record.execute("PRAGMA user_version").fetchone()
                cleared = self._epoch not in (
                    None,
                    epoch,
                )  # by others, or a query was forgotten
                if not cleared and (parts or clicks):
                    for dim, part in parts.items():
                        record.execute(
                            ADD["samples"],
                            (dim, part.bound, part.seen, part.first, part.last),
                        )
                        record.executemany(ADD["queries"], part.rows.values())
                    record.executemany(ADD["clicks"], clicks)
                    _keep(record, self.size)
                bounds = dict(record.execute("SELECT dim, bound FROM samples"))
            with self._adding:
                self._epoch = epoch
                if cleared:
                    self._unwritten.clear()
                    self._clicks.clear()
                else:  # what was heard meanwhile is written the next time, and all of it where this fails
                    del self._clicks[: len(clicks)]
                    for dim, written in parts.items():
                        part = self._unwritten[dim]
                        part.seen -= written.seen
                        part.rows = {
                            id: row
                            for id, row in part.rows.items()
                            if written.rows.get(id) is not row
                        }
                # Of a model that has left the record nothing stays, or its sample would be as thin when it comes back.
                heard = {
                    dim: part for dim, part in self._unwritten.items() if part.seen
                }
                self._unwritten = defaultdict[int, Unwritten](Unwritten, heard)
                for dim, bound in bounds.items():
                    self._unwritten[dim].bound = min(self._unwritten[dim].bound, bound)

    def fail(self, error: Exception, what: str = "queries are") -> None:
        """Says in the log, once until it goes well again, that something is not recorded.

        Args:
            error: Why.
            what: What is not, with its verb.
        """
        if what not in self._failed:
            self._failed.add(what)
            reason = getattr(error, "strerror", None) or error
            logging.getLogger(__name__).warning(
                "%s not recorded in %s: %s; searches go on", what, self.folder, reason
            )

    def close(self) -> None:
        """Writes what is not on disk yet. It happens by itself where Python ends."""
        self.flush()

    def within(self, *names: str) -> Recorder:
        """A recorder of the same settings for what is called `names`, such as a collection and its vector: its folder
        lies in this one's. Raises InputError for more than 64 of them."""
        if names not in self._within:
            if len(self._within) >= MOST_WITHIN:
                raise InputError(
                    f"{MOST_WITHIN} samples are kept in it already; {'/'.join(names)} is left out"
                )
            folder = folder_within(self.folder, *names)
            self._within.setdefault(
                names,
                Recorder(folder, self.size, texts=self.texts, seconds=self.seconds),
            )
        return self._within[names]


_ALL: weakref.WeakSet[Recorder] = weakref.WeakSet()
_creating = (
    threading.Lock()
)  # closing a file drops the locks that other threads have on it, those of SQLite too


def _flush_all() -> None:
    for recorder in list(_ALL):
        recorder.flush()


def _begin_all() -> None:
    global _creating
    _creating = threading.Lock()
    for recorder in list(_ALL):
        recorder._begin()


atexit.register(_flush_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_all)
