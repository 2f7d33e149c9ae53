"""A folder of recorded queries: `part-N.safetensors`, one for each process that records at the same time.

A process holds a lock on `part-N.lock` while it lives. The next one takes up the first part that nobody holds, so there
are never more parts than there were processes at one time. Nothing in the folder is unpickled.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import math
import os
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import numpy as np

from hubplugin import atomic
from hubplugin.atomic import TEMPORARY
from hubplugin.errors import InputError, StoreError
from hubplugin.recording.sample import ALL, MOST_TARGETS, Asked, Sample, Target, as_target, digest_of, id_of, joined
from hubplugin.vectors import Sliceable, one_line

try:
    import fcntl
except ImportError:  # where there are no locks, each process makes a new part
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

FORMAT, WITHOUT_CLICKS = 2, 1
"""Versions of a part. A reader leaves alone what a newer version wrote."""

SUFFIX = ".safetensors"

_FIRST_DAY, _LAST_DAY = -62_135_596_800, 253_402_300_799
"""The years 1 to 9999 in Unix seconds."""


class UnreadablePart(Exception):
    """A part that is damaged, or that a newer version wrote."""


class Recorded(Sliceable):
    """Recorded queries as a query bank: float32 [rows, dim], all different.

    times: when each was asked last, Unix seconds [rows]. texts: theirs [rows], None for those that came without; None
    if all did. seen: how many queries were asked in all; different: how many of them differ, an estimate once there
    are more than are kept. first, last: when, Unix seconds. clicks: how often each target was clicked, by query [rows].
    answers: the id of each query's most frequent one, of equally frequent ones the first, object [rows], -1 for none;
    None if nothing was clicked. `hubplugin.Bank(recorded, recorded.answers)` is a bank that knows them.
    """

    def __init__(self, folder: Path, sample: Sample):
        asked = list(sample.kept.values())
        vectors = np.frombuffer(b"".join(each.vector for each in asked), np.float32).reshape(len(asked), -1)
        super().__init__(f"recorded queries ({folder})", vectors, vectors.shape, np.asarray)
        self.times = np.array([each.time for each in asked])
        self.ids = [id_of(digest) for digest in sample.kept]
        texts = [each.text for each in asked]
        self.texts = texts if any(text is not None for text in texts) else None
        self.seen, self.different = sample.seen, sample.different
        self.first, self.last = sample.first, sample.last
        self.clicks = [sample.clicks.get(digest, {}) for digest in sample.kept]
        self.answers: np.ndarray | None = None
        if any(self.clicks):
            self.answers = np.full(len(asked), -1, object)
            for row, counts in enumerate(self.clicks):
                if counts:
                    self.answers[row] = max(counts, key=lambda target: counts[target])


def folder_within(folder: str | os.PathLike[str], *names: str) -> Path:
    """The folder for the queries to what is called `names`, inside of `folder`; an empty name adds nothing."""
    quoted = (quote(name, safe="") for name in names if name)
    return Path(folder, *(f"%2E{name[1:]}" if name.startswith(".") else name for name in quoted))


def read(folder: str | os.PathLike[str], dim: int | None = None, since: float | None = None) -> Recorded | None:
    """What is recorded in `folder`, by whichever processes, as one uniform sample; None if that is nothing.

    dim: leaves out queries of other dimensions, which an earlier model has embedded; by default those that were asked
    last are read. since: leaves out what was not asked after that moment (Unix seconds).
    A part that cannot be read is left out with a warning in the log.
    """
    found = joined(sample for _, sample in _alike(Path(folder), dim))
    if since is not None:
        found.kept = {digest: asked for digest, asked in found.kept.items() if asked.time >= since}
    return Recorded(Path(folder), found) if found.kept else None


def clear(folder: str | os.PathLike[str]) -> None:
    """Deletes what is recorded in `folder`, and what killed processes left half-written. Recorders that are running
    notice, and begin anew."""
    for path in (*_files(Path(folder)), *Path(folder).glob(f"part-*{TEMPORARY}")):
        path.unlink(missing_ok=True)


def thin(folder: str | os.PathLike[str], size: int) -> None:
    """Keeps `size` of the queries recorded in `folder`, drawn at random, and no more of those to come than belong to
    as thin a sample. Recorders that are running notice."""
    if size < 1:
        raise InputError(f"cannot keep {size} queries; at least 1 is needed")
    with writing_alone(Path(folder)):
        samples = _alike(Path(folder))
        limit = joined(sample for _, sample in samples).thinned(size).limit
        for path, sample in samples:
            save(path, replace(sample, limit=min(limit, sample.limit)))


def forget(folder: str | os.PathLike[str], digests: Collection[int]) -> int:
    """Deletes the queries of these digests that are recorded in `folder`, with their clicks, and what killed processes
    left half-written; returns how many queries there were.

    Every part is written anew, so that recorders which are running notice, and drop what came since they wrote last.
    Raises StoreError where a part cannot be read, and deletes nothing then.
    """
    found = set[int]()
    with writing_alone(Path(folder)):
        try:
            samples = [(path, load(path)) for path in _files(Path(folder))]
        except UnreadablePart as error:
            raise StoreError(f"recorded queries: {error}; nothing was forgotten there: mend or delete it") from None
        for path, sample in samples:
            there = {digest for digest in digests if digest in sample.kept or digest in sample.clicks}
            kept = {digest: each for digest, each in sample.kept.items() if digest not in there}
            clicks = {digest: each for digest, each in sample.clicks.items() if digest not in there}
            save(path, replace(sample, kept=kept, clicks=clicks))
            found |= there
        for left in Path(folder).glob(f"part-*{TEMPORARY}"):
            left.unlink(missing_ok=True)
    return len(found)


PATIENCE = 5.0
"""Seconds to wait for others who write to the folder; a part is written in some milliseconds."""


@contextmanager
def writing_alone(folder: Path) -> Iterator[None]:
    """Keeps others from writing to any part in `folder` meanwhile. Raises OSError where they do not end."""
    if fcntl is None or not folder.is_dir():
        yield
        return
    held, end = os.open(folder, os.O_RDONLY), time.monotonic() + PATIENCE
    try:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise OSError(errno.EBUSY, "others are writing to it, try again", str(folder)) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(held)


def folders(folder: Path) -> list[Path]:
    """`folder`, and those in it for collections and vectors, see `folder_within`."""
    return sorted({folder, *(path.parent for path in folder.rglob(f"part-*{SUFFIX}"))})


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"part-*{SUFFIX}"))


def _alike(folder: Path, dim: int | None = None) -> list[tuple[Path, Sample]]:
    """The parts in `folder` that hold queries of `dim` dimensions, or of those that were asked last."""
    samples = [(path, sample) for path, sample in _samples(folder) if sample.kept or sample.clicks]
    if dim is None and samples:
        dim = (max((sample for _, sample in samples), key=lambda sample: sample.last).width or 0) // 4
    alike = (None, 4 * (dim or 0))  # clicks alone have no dimensions, and belong to whichever query has their digest
    return [(path, sample) for path, sample in samples if sample.width in alike]


def _samples(folder: Path) -> Iterator[tuple[Path, Sample]]:
    for path in _files(folder):
        try:
            yield path, load(path)
        except FileNotFoundError:
            continue  # cleared meanwhile
        except UnreadablePart as error:
            logger.warning("recorded queries: %s; left out", error)


def save(path: Path, sample: Sample) -> None:
    """Puts `sample` in the place of the file `path`, in one step. Only its owner may read it."""
    from safetensors.numpy import save as packed

    asked = list(sample.kept.values())
    texts = json.dumps([each.text for each in asked]).encode() if any(each.text for each in asked) else b""
    vectors = np.frombuffer(b"".join(each.vector for each in asked), np.float32)
    tensors: dict[str, np.ndarray] = {
        "vectors": vectors.reshape(len(asked), (sample.width or 4) // 4),
        "digests": np.array(list(sample.kept), np.uint64),
        "times": np.array([each.time for each in asked], np.float64),
        "texts": np.frombuffer(texts, np.uint8),
    }
    about: dict[str, Any] = {"format": WITHOUT_CLICKS, "size": sample.size, "limit": sample.limit, "seen": sample.seen}
    if sample.seen:
        about |= {"first": sample.first, "last": sample.last}
    if sample.clicks:
        clicks = json.dumps([[digest, [*counts.items()]] for digest, counts in sample.clicks.items()]).encode()
        tensors["clicks"] = np.frombuffer(clicks, np.uint8)
        about |= {"format": FORMAT, "clicks": digest_of(clicks)}
    content = packed(tensors, {"hubplugin": json.dumps(about)})
    atomic.write(path, content, mode=0o600)


def load(path: Path) -> Sample:
    """The sample in the file `path`. Raises FileNotFoundError or UnreadablePart."""
    from safetensors import safe_open

    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("it is no file")
        with safe_open(path, framework="np") as file:
            about = json.loads((file.metadata() or {})["hubplugin"])
            if about["format"] > FORMAT:
                raise UnreadablePart(f"{path} has format {about['format']}, of a newer version; upgrade hubplugin")
            names = ["vectors", "digests", "times", "texts"] + ["clicks"] * ("clicks" in about)
            return _sample(about, {name: file.get_tensor(name) for name in names})
    except (FileNotFoundError, UnreadablePart):
        raise
    except PermissionError as error:
        raise UnreadablePart(f"{path} cannot be read ({error.strerror})") from None
    except Exception as error:  # whatever a wrong byte leads to, in JSON, safetensors or numpy
        raise UnreadablePart(f"{path} is damaged ({one_line(error)})") from None


def _sample(about: dict[str, Any], tensors: dict[str, np.ndarray]) -> Sample:
    """A part's content as a sample; ValueError where it is not what `save` writes."""
    vectors, digests, times = tensors["vectors"], tensors["digests"], tensors["times"]
    arrays = [(tensor.dtype.str, tensor.ndim) for tensor in (vectors, digests, times, tensors["texts"])]
    if arrays != [("<f4", 2), ("<u8", 1), ("<f8", 1), ("|u1", 1)] or not len(vectors) == len(digests) == len(times):
        raise ValueError("its arrays do not belong together")
    if any(digest_of(vector.tobytes()) != digest for vector, digest in zip(vectors, digests.tolist(), strict=True)):
        raise ValueError("a vector is not the one that was written")
    if not np.isfinite(vectors).all() or not vectors.shape[1]:
        raise ValueError("a vector has no number, or one that is not finite")
    size, limit, seen = (about[name] for name in ("size", "limit", "seen"))
    if not all(type(count) is int for count in (size, limit, seen)) or size < 1 or not 0 <= limit <= ALL or seen < 0:
        raise ValueError(f"it has the size {size!r}, the limit {limit!r}, and {seen!r} queries seen")
    first, last = (float(about[name]) for name in ("first", "last")) if seen else (math.inf, -math.inf)
    if not all(_FIRST_DAY <= moment <= _LAST_DAY for moment in ((first, last) if seen else ()) + tuple(times.tolist())):
        raise ValueError("a time in it is no date")
    texts = json.loads(tensors["texts"].tobytes() or "null") or [None] * len(digests)
    if not isinstance(texts, list) or not all(text is None or isinstance(text, str) for text in texts):
        raise ValueError("a text in it is none")
    kept = {
        digest: Asked(vector.tobytes(), time, text)
        for digest, vector, time, text in zip(digests.tolist(), vectors, times.tolist(), texts, strict=True)
    }
    return Sample(size, limit, seen, first, last, kept, _clicks(about, tensors["clicks"]) if "clicks" in about else {})


def _clicks(about: dict[str, Any], content: np.ndarray) -> dict[int, dict[Target, int]]:
    """The clicks of a part; ValueError where they are not what `save` writes."""
    if (content.dtype.str, content.ndim) != ("|u1", 1) or digest_of(content.tobytes()) != about["clicks"]:
        raise ValueError("its clicks are not those that were written")
    clicks = {digest: dict(counts) for digest, counts in json.loads(content.tobytes())}
    for digest, counts in clicks.items():
        whole = type(digest) is int and 0 <= digest <= ALL and 0 < len(counts) <= MOST_TARGETS
        if not whole or not all(type(count) is int and count > 0 for count in counts.values()):
            raise ValueError("a click in it is none")
        if any(as_target(target) != target for target in counts):
            raise ValueError("an id in it is none")
    return clicks


class Slot:
    """A part that this process holds: no other writes to it."""

    def __init__(self, path: Path, lock: IO[bytes] | None):
        self.path, self._lock, self._written = path, lock, _stamp(path)

    @classmethod
    def free(cls, folder: Path) -> tuple[Slot, Sample | None]:
        """The first part in `folder` that nobody holds, and what an earlier process left in it."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in itertools.count():
            name = number if fcntl is not None else f"{os.getpid()}-{number}"
            path = folder / f"part-{name}{SUFFIX}"
            lock = _lock(path)
            if lock is None:
                continue
            for left in folder.glob(f"{path.name}.*{TEMPORARY}"):  # by a process that was killed while it wrote
                left.unlink(missing_ok=True)
            try:
                return cls(path, lock), load(path)
            except FileNotFoundError:
                return cls(path, lock), None
            except UnreadablePart:  # nothing to write over
                lock.close()
        raise AssertionError("unreachable")

    def is_changed(self) -> bool:
        """Whether the part is not as this process left it: it was cleared or thinned."""
        return _stamp(self.path) != self._written

    def load(self) -> Sample | None:
        """What others have left of the part, None if it is gone. Raises UnreadablePart."""
        self._written = _stamp(self.path)
        try:
            return load(self.path)
        except FileNotFoundError:
            return None

    def save(self, sample: Sample) -> None:
        save(self.path, sample)
        self._written = _stamp(self.path)

    def close(self) -> None:
        """Lets go of the part. (After a fork the parent still holds it.)"""
        if self._lock is not None:
            self._lock.close()


def _lock(path: Path) -> IO[bytes] | None:
    """The lock of the part `path`, until it is closed or the process ends; None while another has it."""
    lock = open(path.with_suffix(".lock"), "ab")  # noqa: SIM115
    try:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
