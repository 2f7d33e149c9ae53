"""`Recorder`: keeps a sample of the queries that an application asks, without ever being in its way."""

from __future__ import annotations

import atexit
import logging
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np

from hubplugin.errors import InputError
from hubplugin.recording.parts import Slot, UnreadablePart, folder_within, folders, forget, writing_alone
from hubplugin.recording.sample import Sample, as_digest, as_target, digest_of, id_of, joined

if TYPE_CHECKING:
    from hubplugin.vectors import VectorLike

logger = logging.getLogger(__name__)

SIZE = 10_000
"""Queries kept: as many as there are targets is a good number for a bank, and more than some thousands add little
(docs/banks.md). At 384 dimensions they take 15 MB, at 1,536 61 MB."""

MOST_WITHIN = 64
"""Recorders within one: each has a thread and a sample in memory, and tenants with a collection each may be many."""

SECONDS = 60.0
"""Between one writing and the next: what a killed process loses."""


class Recorder:
    """A sample of the queries that are asked, on disk, to be used as a query bank.

        recorder = hubplugin.Recorder("photos.faiss.queries")
        recorder.add(queries)                         # beside each index.search(queries, k)
        recorder.click(query, 4711)                   # where somebody clicked what the search found

    folder: where the sample lies; `hubplugin.apply` and `hubplugin bank` read it. Any number of processes may record to
    it at the same time, and go on after a restart. size: how many different queries are kept, drawn at random from all
    that were ever asked, each counted once; 10,000, or 15 MB at 384 dimensions. texts: whether the texts that come with
    queries are kept, too; by default they are not, since people write private things. seconds: between one writing to
    the disk and the next, which a thread of its own does. collections: of a Qdrant client, those whose queries are
    kept, by their names or as searches name them; all by default.

    Nothing that goes wrong while recording is raised: a folder that cannot be written is one line in the log.
    Raises InputError for a `size` or `seconds` that is not above 0, and for one text as `collections`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        size: int = SIZE,
        *,
        texts: bool = False,
        seconds: float = SECONDS,
        collections: Iterable[str] | None = None,
    ):
        if isinstance(collections, str):
            raise InputError(f"collections={collections!r}: expected a list of names, such as [{collections!r}]")
        if size < 1 or seconds <= 0:
            raise InputError(f"a recorder needs a size and seconds above 0; given: size={size!r}, seconds={seconds!r}")
        self.folder, self.size, self.texts, self.seconds = Path(folder), size, texts, seconds
        self.collections = None if collections is None else frozenset(collections)
        self._within: dict[tuple[str, ...], Recorder] = {}
        self._begin()
        _ALL.add(self)

    def _begin(self) -> None:
        """Nothing is kept yet, and nothing held: in a new process, or in the child of a fork."""
        self._sample = Sample(self.size)
        self._adding, self._flushing = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._slot: Slot | None = None
        self._written: tuple[int, int] | None = (0, 0)
        self._width = 0
        self._failed = set[str]()
        self._failed_text = False

    def add(self, queries: VectorLike, text: str | None = None) -> None:
        """One query [d] was asked, or several [m, d]. Never raises.

        Takes microseconds a query: the bytes are hashed, and almost always dropped. text: that of one query.
        """
        if self._stop.is_set():
            return
        try:
            if self.texts and text is not None and not isinstance(text, str):
                text = self._no_text(text)
            for vector in _vectors(queries):
                self._add(vector, text if self.texts else None)
        except Exception as error:
            self.fail(error)

    @staticmethod
    def id_of(query: VectorLike) -> str:
        """The id of a query [d], 16 hexadecimal digits: with it in an answer over HTTP, `click` needs no vector.

        It is a hash of the vector's float32 bytes: the same in every process, and nothing is kept for it. Raises
        InputError for what is no query.
        """
        vectors = _vectors(query)
        if len(vectors) != 1:
            raise InputError(f"expected one query [d]; got {len(vectors)}")
        return id_of(digest_of(vectors[0]))

    def click(self, query: VectorLike | str, target: int | str | UUID) -> None:
        """`target`, an id in the store, was clicked by somebody who asked `query`: [d], or its `id_of`. Never raises.

        Clicks of queries that the sample drops are dropped, so that those that stay are as uniform as the queries. Any
        process may be told of a click, whichever answered the query.
        """
        if self._stop.is_set():
            return
        try:
            digest = as_digest(query if isinstance(query, str) else self.id_of(query))
            clicked = as_target(target)
            with self._adding:
                self._sample.click(digest, clicked)
            if self._thread is None:
                self._start()
        except Exception as error:
            self.fail(error, "a click is")

    def _add(self, vector: bytes, text: str | None) -> None:
        with self._adding:
            if len(vector) != self._width:
                self._widen(len(vector))
            self._sample.add(vector, time.time(), text)
        if self._thread is None:
            self._start()

    def _widen(self, width: int) -> None:
        """Queries are of `width` bytes from now on: another model embeds them, or these are the first."""
        if self._sample.width not in (None, width):
            self._sample, self._written = Sample(self.size), None
        self._width = width

    def _start(self) -> None:
        with self._flushing:
            if self._thread is None and not self._stop.is_set():
                given = (weakref.ref(self), self._stop, self.seconds)
                self._thread = threading.Thread(
                    target=_keep_flushing, args=given, name="hubplugin-recorder", daemon=True
                )
                self._thread.start()

    def forget(self, ids: Collection[str]) -> int:
        """Deletes the queries of these ids, which `id_of` gives, with their clicks: from the folder and the folders in
        it, by whichever process they were recorded. Returns how many there were.

        Recorders that run in other processes drop what came since they wrote last. A correction that was fitted on
        these queries keeps them until the next `hubplugin.refit`.

        Raises InputError for what is no id, StoreError where a part cannot be read, whose folder is then left as it is,
        and OSError where the folder cannot be written.
        """
        digests = [as_digest(each) for each in ids]
        for recorder in (self, *self._within.values()):
            with recorder._flushing:
                recorder._write()  # or what is in memory would be written after it was forgotten
        count = sum(forget(folder, digests) for folder in folders(self.folder))
        self.flush()
        return count

    def flush(self) -> None:
        """Writes what is not on disk yet, here and `within`. Never raises."""
        self._flush()
        for recorder in list(self._within.values()):
            recorder.flush()

    def _flush(self) -> None:
        with self._flushing:
            try:
                self._write()
                self._failed.clear()
            except Exception as error:
                self.fail(error)

    def _write(self) -> None:
        if self._sample.counts == (0, 0):
            return  # no folder is made for nothing
        with writing_alone(self.folder):
            if self._slot is None:
                slot, before = Slot.free(self.folder)
                self._slot = slot
                with self._adding:
                    own = self._sample
                    if before is not None and own.width in (None, before.width):
                        self._sample = joined([before, own], self.size)
            elif self._slot.is_changed():
                self._take_up(self._slot)
            with self._adding:
                taken = self._sample.copy()
            if taken.counts != self._written:
                self._slot.save(taken)
                self._written = taken.counts

    def _take_up(self, slot: Slot) -> None:
        """Goes on with what others have left of the part: it was cleared, thinned, or damaged."""
        try:
            found = slot.load()
        except UnreadablePart as error:  # what is in memory is whole, and takes its place
            logger.warning("recorded queries: %s; written anew", error)
            self._written = None
            return
        with self._adding:
            self._sample = Sample(self.size) if found is None else joined([found], self.size)
            self._written = self._sample.counts

    def fail(self, error: Exception, what: str = "queries are") -> None:
        """Says in the log, once until it goes well again, that `what` not recorded."""
        if what not in self._failed:
            self._failed.add(what)
            reason = getattr(error, "strerror", None) or error
            logger.warning("%s not recorded in %s: %s; searches go on", what, self.folder, reason)

    def _no_text(self, text: object) -> None:
        """Says in the log, once, that a query is recorded without the `text` that came with it."""
        if not self._failed_text:
            self._failed_text = True
            logger.warning(
                "queries are recorded in %s without their texts: expected a str, got %s",
                self.folder,
                type(text).__name__,
            )

    def close(self) -> None:
        """Writes what is not on disk yet, and ends. It happens by itself where Python ends."""
        self._stop.set()
        self._flush()
        for recorder in list(self._within.values()):
            recorder.close()
        with self._flushing:
            if self._slot is not None:
                self._slot.close()
                self._slot = None
                self._sample, self._written = Sample(self.size), (0, 0)
            _ALL.discard(self)

    def __del__(self) -> None:
        if hasattr(self, "_stop"):  # else its settings were refused
            self.close()

    def within(self, *names: str) -> Recorder:
        """A recorder of the same settings for what is called `names`, such as a collection and its vector: its folder
        lies in this one's. Raises InputError for more than 64 of them."""
        found = self._within.get(names)
        if found is None:
            if len(self._within) >= MOST_WITHIN:
                raise InputError(f"{MOST_WITHIN} samples are kept in it already; {'/'.join(names)} is left out")
            made = Recorder(folder_within(self.folder, *names), self.size, texts=self.texts, seconds=self.seconds)
            found = self._within.setdefault(names, made)
        return found


def _keep_flushing(reference: weakref.ref[Recorder], stop: threading.Event, seconds: float) -> None:
    while not stop.wait(seconds):
        recorder = reference()
        if recorder is None:
            return
        recorder._flush()
        del recorder  # whoever had it may let go of it while this waits


def _vectors(queries: Any) -> list[bytes]:
    """The vectors of one query [d] or several [m, d], as bytes of float32."""
    if isinstance(queries, (list, tuple)) and queries and isinstance(queries[0], (float, int)):
        return [_packed(len(queries))(*queries)]  # four times as fast as numpy
    values = np.asarray(queries, np.float32)
    if values.ndim == 1:
        return [values.tobytes()]
    if values.ndim != 2:
        raise InputError(f"expected a query [d], or several [m, d]; got shape {values.shape}")
    return [row.tobytes() for row in values]


@lru_cache
def _packed(dim: int) -> Callable[..., bytes]:
    """What makes bytes of `dim` numbers."""
    return struct.Struct(f"={dim}f").pack


_ALL: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _close_all() -> None:
    for recorder in list(_ALL):
        recorder.close()


def _begin_all() -> None:
    for recorder in list(_ALL):
        if recorder._slot is not None:
            recorder._slot.close()
        recorder._begin()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_all)
