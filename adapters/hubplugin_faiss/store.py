"""A Faiss file as a `Store`: URL `faiss:photos.faiss`.

photos.faiss.hub/manifest.json   which model is active, which was before it, and which
                                 is being written
photos.faiss.hub/3.model         the model of version 3
photos.faiss.hub/index.faiss     the new index, until it takes the place of the old one
photos.faiss.hub/lock            locked by the run that writes

One run writes at a time. Offsets gather in memory, and the file is replaced in one
step: until then it stays as it was. The manifest is written right before that step and
names the content of the new file. A run may be killed between the two, so the file
decides which version is active (`FaissStore.read_manifest`). A run that was killed
begins again, with the model that it had fitted.

Nothing is written, read or deleted but inside this folder, which must be no link:
`os.replace` puts whole files there, and files are opened without following links.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import parse_qs

import faiss
import numpy as np

from hubplugin.atomic import open_own, replacing
from hubplugin.corrections import Manifest, ManifestStore, Version
from hubplugin.errors import HubpluginError, InputError, ModelFileError, StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.registry import without_secrets
from hubplugin.store import Batch, Found, Hits, Writing, require_room
from hubplugin.vectors import Progress
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.index import as_unit, upgrade_by
from hubplugin_faiss.objects import is_mapped, normalises_queries, reason
from hubplugin_faiss.scale import IndexScale

ADD_BEHIND_MAP = (
    "a query map stands before the index, which plain Faiss would put what it adds "
    "through, too: add with hubplugin_faiss.add, or behind it, to "
    "faiss.downcast_index(index.index), and set index.ntotal"
)

ENDS = 64 << 10
"""Bytes at the head and at the end of a file by which its content is known."""

OURS = re.compile(r"(\d+\.model|manifest\.json|index\.faiss)(\.[0-9a-f]{8}\.tmp)?")
"""Names of files in the folder, other than the lock. The ending .tmp marks a file that
is not whole yet."""

NOTHING = -1
"""The id that Faiss returns in place of a target where it found no more."""


class FaissVersion(Version):
    """A version of a correction, and the files that it knows by their content.

    stamp: The file that its model was fitted on.
    index: The file with its offsets; "" until that file is about to take its place.
    """

    stamp: str = ""
    index: str = ""


class Seen(NamedTuple):
    """The state of a file when it was read.

    content: Its size, and a hash of its ends.
    number: Its inode.
    changed: The time of its last change, in nanoseconds.
    """

    content: str
    number: int
    changed: int


class FaissStore(ManifestStore[FaissVersion]):
    """An index file, read into memory, and again where another program has changed it.

    Queries to it are recorded beside it: photos.faiss.queries.

    Args:
        path: the index file.
        metric: The metric that the index ranks by. By default that of the model that is
            active or being written; without a model dot, or euclidean for L2.
    """

    def __init__(self, path: str | os.PathLike[str], metric: Metric | None = None):
        self.url = f"faiss:{os.fspath(path)}"
        self.path = Path(os.path.realpath(path))
        self.hub = Path(f"{self.path}.hub")
        self.record = Path(f"{os.fspath(path)}.queries")
        self.how_to_record = (
            f"hubplugin.Recorder({str(self.record)!r}).add(queries) beside each search"
        )
        self._given_metric = metric
        self._is_writing = False
        self._scanned: Seen | None = None  # the file that the last `scan` began on
        self._read()

    def _read(self) -> None:
        seen = look_at(self.path)
        try:
            index = faiss.read_index(str(self.path))
        except (RuntimeError, MemoryError) as error:
            raise StoreError(
                f"Faiss cannot read {str(self.path)!r}: {reason(error)}"
            ) from None
        self._take(index, seen)
        self._require_unchanged()

    def _take(self, index: faiss.Index, seen: Seen) -> None:
        self.index = index
        self.handler = handler_for(index)
        self.dim = int(index.d)
        self._seen = seen
        self._model_metric: Metric | None = None
        vars(self).pop("raw", None)  # of the index before

    def _reread_if_changed(self) -> None:
        """Read the file anew if another program has changed it.

        While a run of this store writes it, do nothing: its offsets are for the entries
        that it has read.
        """
        if not self._is_writing and look_at(self.path) != self._seen:
            self._read()

    def _require_unchanged(self, seen: Seen | None = None) -> None:
        if look_at(self.path) != (seen or self._seen):
            raise StoreError(
                f"{str(self.path)!r} was changed by another program since it was read; "
                "it stays as that program left it: run this again"
            )

    def read_manifest(self) -> Manifest[FaissVersion]:
        """Return the manifest, corrected by what the index holds.

        A run may have been killed before it updated the manifest, and somebody may have
        put back an older index. Raises StoreError if the index holds offsets of a model
        that the manifest does not know.
        """
        place = repr(str(self.hub / "manifest.json"))
        mend = (
            f"delete the folder {str(self.hub)!r}, and run hubplugin remove {self.url}"
        )
        content = self._read_file("manifest.json")
        manifest = Manifest[FaissVersion]()
        if content:
            manifest = Manifest[FaissVersion].read(content, place, mend)
        writing = manifest.writing
        if writing is not None:
            if writing.index == self._seen.content:
                return manifest.activate(writing)
            if writing.stamp != self._seen.content:
                manifest = manifest.give_up()
        holds = self.handler.holds_offsets_of
        if not self.handler.extras or holds(""):
            return manifest.withdraw() if manifest.active else manifest
        active = tuple(manifest.active.values())
        if any(holds(version.model) for version in active):
            return manifest
        if writing is not None and holds(writing.model):
            return manifest.activate(writing)  # the file has had additions since
        for version in manifest.previous.values():
            if holds(version.model):
                return manifest.replace(
                    active={"": version},
                    previous={},
                    retired=(*manifest.retired, *active),
                )
        raise StoreError(
            f"{str(self.path)!r} is corrected, but its model is not in "
            f"{str(self.hub)!r}; copy that folder along with the index, or take the "
            f"correction out: hubplugin remove {self.url}"
        )

    def write_manifest(self, manifest: Manifest[FaissVersion]) -> None:
        self._write_file("manifest.json", manifest.model_dump_json().encode())

    def delete_manifest(self) -> None:
        self._delete_file("manifest.json")

    def new_version(self, model: OffsetModel, number: int) -> FaissVersion:
        return FaissVersion.of(model, number, stamp=self._seen.content)

    def read_model(self, version: FaissVersion) -> OffsetModel:
        name = f"{version.number}.model"
        content = self._read_file(name)
        fault = f"its model {name} is missing"
        if content:
            try:
                model = OffsetModel.from_bytes(content, f"its model {name}")
                if model.fingerprint == version.model:
                    return model
                fault = f"{name} is the model of another index"
            except ModelFileError as error:
                fault = str(error)
        raise StoreError(
            f"{self.url}, in {str(self.hub)!r}: {fault}; put the right one there, or "
            f"take the correction out: hubplugin remove {self.url}"
        )

    def write_model(self, version: FaissVersion, model: OffsetModel) -> None:
        self._write_file(f"{version.number}.model", model.to_bytes())

    def delete_model(self, version: FaissVersion) -> None:
        self._delete_file(f"{version.number}.model")

    def make_room(self, version: FaissVersion) -> None:
        """Do nothing: offsets gather in memory."""

    def delete_offsets(
        self, versions: Sequence[FaissVersion], progress: Progress | None
    ) -> None:
        """Do nothing: offsets are in the index, or nowhere."""

    def _place(self, name: str) -> Path:
        """Return the path of a file of ours. Raises StoreError if the folder is a
        link."""
        if self.hub.is_symlink():
            raise StoreError(
                f"{str(self.hub)!r} is a link, where hubplugin keeps a folder; move it "
                "away"
            )
        return self.hub / name

    def _read_file(self, name: str) -> bytes:
        """Return the content of a file of ours, b"" if there is none."""
        path = self._place(name)
        if not os.path.lexists(path):
            return b""
        with as_store_error(path, doing="read"), open_own(path) as file:
            return file.read()

    def _write_file(self, name: str, content: bytes) -> None:
        with self._new_file(name, len(content)) as file:
            file.write(content)

    @contextlib.contextmanager
    def _new_file(self, name: str, size: int) -> Iterator[BinaryIO]:
        """Open a file of ours of `size` bytes, which takes its name once it is
        whole."""
        path = self._place(name)
        with as_store_error(path, needed=size), replacing(path, 0o600) as file:
            yield file
            permit(file.fileno(), self.path)

    def _delete_file(self, name: str) -> None:
        path = self._place(name)
        with as_store_error(path):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the store for writing, and clean up in the end.

        The lock ends with the process, too. Raises StoreError if another run holds it.
        """
        path = self._place("lock")
        with as_store_error(path):
            with contextlib.suppress(FileExistsError):
                self.hub.mkdir(0o700)
                folder = os.open(self.hub, os.O_RDONLY | os.O_NOFOLLOW)
                permit(folder, self.path)
                os.close(folder)
            lock = open_own(path, os.O_RDWR | os.O_CREAT)
            permit(lock.fileno(), self.path)
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another run may have deleted the lock file when it ended.
                is_there = os.path.samestat(os.fstat(lock.fileno()), path.lstat())
            except OSError:
                is_there = False
            if not is_there:
                raise StoreError(
                    f"{str(self.path)!r} is being written by another run; nothing was "
                    "changed: wait until it ends"
                )
            self._is_writing = True
            try:
                yield
            finally:
                self._clean_up()
                self._is_writing = False

    def _clean_up(self) -> None:
        """Write the manifest as the index has it. Delete files that no run needs."""
        with contextlib.suppress(OSError, StoreError):
            self._require_unchanged()
            manifest = self.read_manifest()
            manifest = manifest.clear(manifest.retired)
            kept = (*manifest.maintained, *manifest.previous.values())
            needed = {f"{version.number}.model" for version in kept}
            if kept:
                self.write_manifest(manifest)
                needed.add("manifest.json")
            for name in os.listdir(self._place("")):
                if OURS.fullmatch(name) and name not in needed:
                    self._delete_file(name)
            if os.listdir(self.hub) == ["lock"]:
                self._delete_file("lock")
                self.hub.rmdir()

    @property
    def metric(self) -> Metric:  # type: ignore[override]
        """The metric that was given; else that of the model, and without a model what
        the index computes."""
        known = self._given_metric or self._model_metric
        if known is not None:
            return known
        version = self.active()
        return self.handler.metric if version is None else version.metric

    def takes_metric(self, metric: Metric) -> bool:
        """Return True if a model for `metric` suits the index.

        If no metric was given, `metric` is that of the store from then on.
        """
        if metric in (self.handler.metric, Metric.COSINE):
            self._model_metric = metric
        return metric is self.metric

    @property
    def unit(self) -> bool:  # type: ignore[override]
        """True if a correction holds only for vectors of unit length."""
        return self.metric is Metric.COSINE and not self.handler.lossy

    @property
    def maps_queries(self) -> bool:  # type: ignore[override]
        """True if a linear transform before the index can map queries, so that the file
        stays plain Faiss."""
        return not normalises_queries(self.index)

    def _rounding(
        self, scale: IndexScale, batch: Batch, offsets: np.ndarray
    ) -> np.ndarray:
        """Return how much codes may change `offsets` [b] by rounding: [b].

        Offsets near them are rounded, too, and the largest error counts. Errors are cut
        at what codes may lose of an offset that fits them. A stored offset further off
        is stale: a refresh makes codes with room for it.
        """
        vectors = batch.vectors
        rows = int(batch.place or 0) + np.arange(len(vectors))
        exact = scale.to_index(offsets.astype(np.float64), vectors)
        largest = np.zeros(len(exact))
        quarter = 0.0
        for shift in (0, -2, -1, 1, 2):
            moved = exact + shift * quarter
            held = self.handler.round_offsets(moved, vectors, rows)
            errors = np.nan_to_num(np.abs(held - exact))  # NaN: not a finite vector
            errors = np.minimum(errors, self.handler.most_lost)
            largest = np.maximum(largest, errors)
            if shift == 0:
                # Mean rounding errors are a quarter of the distance between two levels.
                quarter = float(errors.mean())
        rounded = scale.to_model(exact + largest, vectors)
        return np.asarray(rounded - offsets) + self.precision

    def count(self) -> int:
        self._reread_if_changed()
        return self.handler.count

    @cached_property
    def raw(self) -> faiss.Index:
        """The index without offsets."""
        if self.handler.extras:
            return self.handler.downgrade()
        return self.index

    def seen(self) -> Manifest[FaissVersion]:
        self._reread_if_changed()
        return self.read_manifest()

    def scan(self, field: str | None = None) -> Iterator[Batch]:
        """Yield all entries in order, as the index reconstructs them.

        Raises StoreError for a `field`: entries have none.
        """
        if field is not None:
            raise StoreError(
                f"{self.url}: its targets are vectors alone, without a field {field!r}"
            )
        self._reread_if_changed()
        # `begin` refuses if the file changes between this scan and the run that writes
        # what was fitted on it.
        self._scanned = self._seen
        return self.read_batches()

    def how_to_search(self) -> tuple[str, str]:
        path = self.url.removeprefix("faiss:")
        return f"index = faiss.read_index({path!r})", "it maps each query"

    def read_batches(self) -> Iterator[Batch]:
        """Yield all entries of the index in memory, whatever the file holds now."""
        version = self.active()
        batches = self.handler.scan()
        if self.metric is Metric.COSINE:
            is_corrected = bool(self.handler.extras)
            batches = as_unit(batches, self.handler, self.url, tolerant=is_corrected)
        if version is None:
            yield from batches
            return
        scale = IndexScale.of(self.handler, self.model(version))
        for batch in batches:
            offsets = scale.to_model(batch.offsets, batch.vectors).astype(np.float32)
            rounding = partial(self._rounding, scale, batch)
            yield replace(batch, offsets=offsets, rounding=rounding)

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raise StoreError if the index cannot carry offsets, or its folder has no
        room.

        A job asks before it fits a gallery for an hour.
        """
        self._reread_if_changed()
        self._scanned = None
        self.handler.check()
        if not dry_run:
            require_room(self.path.parent, self.path.stat().st_size)

    def begin(
        self, model: OffsetModel, progress: Progress | None = None
    ) -> FaissWriting:
        scanned = self._scanned
        self._scanned = None
        if scanned is None:
            self._reread_if_changed()
        with contextlib.ExitStack() as run:
            run.enter_context(self.locked())
            self._require_unchanged(scanned)
            self.require_writable()
            previous = self.read_manifest()
            try:
                version, found = self.start_version(model, progress)
            except BaseException:
                self.give_up(previous)
                raise
            end = run.pop_all().close
            return FaissWriting(self, model, version, previous, end, found)

    def give_up(self, previous: Manifest[FaissVersion]) -> None:
        """Put back `previous`, the manifest of before a run that has failed."""
        with contextlib.suppress(StoreError):
            if previous.everything or previous.previous:
                self.write_manifest(previous)
            else:
                self.delete_manifest()

    def replace(self, index: faiss.Index, version: FaissVersion | None) -> None:
        """Replace the file with `index`, which holds the offsets of `version`; none if
        `version` is None."""
        new = self._place("index.faiss")
        for left in self.hub.glob(f"{new.name}.*.tmp"):  # by a run that was killed
            left.unlink(missing_ok=True)
        try:
            with self._new_file(new.name, self.path.stat().st_size) as file:
                faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))
            seen = look_at(new)  # `os.replace` does not change it
            if version is not None:
                manifest = self.require_owner(version)
                # A refresh of this version may leave another one half-written.
                writing = manifest.writing
                if writing is not None and writing.number == version.number:
                    named = version.replace(index=seen.content)
                    self.write_manifest(manifest.replace(writing=named))
            # After a power failure, too, the new index has its model.
            flush_names(self.hub)
            self._require_unchanged()
            with as_store_error(self.path):
                os.replace(new, self.path)
        finally:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
        flush_names(self.path.parent)
        self._take(index, seen)
        self._scanned = None

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        self._reread_if_changed()
        index = self.raw if raw else self.index
        try:
            scores, ids = index.search(queries, k)
        except (RuntimeError, MemoryError) as error:
            raise StoreError(
                f"{self.url}: Faiss cannot search it: {reason(error)}"
            ) from None
        hits = Hits([], [])
        for row, values in zip(ids, scores, strict=True):
            found = row != NOTHING
            hits.ids.append(row[found].tolist())
            hits.scores.append(values[found].tolist())
        return hits

    def notes(self) -> Sequence[str]:
        return [ADD_BEHIND_MAP] if is_mapped(self.index) else []

    def remove(self, progress: Progress | None = None) -> None:
        """Take the correction out. The model may be missing or damaged: it is not
        read."""
        self._reread_if_changed()
        if not self.handler.extras and not self.hub.is_dir():
            return
        with self.locked():
            self._require_unchanged()
            if self.handler.extras:
                self.replace(self.raw, None)
            self.delete_manifest()


@dataclass(eq=False)
class FaissWriting(Writing):
    """The offsets of `version`, of `model`, on their way into the file of `store`.

    previous: The manifest to put back if the run fails.
    end: Unlocks the store.
    found: As in `Writing`.
    """

    takes_all = True  # an upgrade makes the codes of all entries anew

    store: FaissStore
    model: OffsetModel
    version: FaissVersion
    previous: Manifest[FaissVersion]
    end: Callable[[], None]
    found: Found

    def __post_init__(self) -> None:
        self._scale = IndexScale.of(self.store.handler, self.model)
        self._offsets = np.full(self.store.count(), np.nan, np.float32)

    def scan(self) -> Iterator[Batch]:
        for batch in self.store.read_batches():
            if self.found != "active":
                batch.offsets[:] = np.nan
            yield batch

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Keep the `offsets` [b] of a whole batch of `scan`."""
        first = int(batch.place or 0)
        held = self._scale.to_index(offsets, batch.vectors)
        self._offsets[first : first + len(held)] = held

    def activate(self) -> None:
        store = self.store
        is_amended = self.found == "active"
        if is_amended and self.wrong == 0:
            return  # all offsets in the file are right
        missing = int(np.isnan(self._offsets).sum())
        if missing:
            raise StoreError(
                f"{store.url}: {missing} targets have no offset yet; run apply again"
            )
        raw = handler_for(store.raw)
        force = self.forced or is_amended
        try:
            upgraded = upgrade_by(raw, self._offsets, self.model, self._scale, force)
            store.replace(upgraded, self.version)
        except HubpluginError:
            store.give_up(self.previous.replace(writing=None))
            raise

    def close(self) -> None:
        self.end()


def look_at(path: Path) -> Seen:
    """Return the state of the file `path` now. Raises StoreError if it is no regular
    file."""
    if not path.exists():
        raise StoreError(f"{str(path)!r} does not exist")
    with as_store_error(path, doing="read"), open_own(path) as file:
        status = os.fstat(file.fileno())
        ends = hashlib.sha256(file.read(ENDS))
        file.seek(max(status.st_size - ENDS, 0))
        ends.update(file.read(ENDS))
    content = f"{status.st_size}|{ends.hexdigest()[:16]}"
    return Seen(content, status.st_ino, status.st_mtime_ns)


def permit(descriptor: int, like: Path) -> None:
    """Give an open file or folder the mode and the owner of the file `like`.

    Our files hold queries, which not everybody may read.
    """
    status = like.stat()
    mode = status.st_mode & 0o777
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        mode |= 0o700 | (mode & 0o444) >> 2  # who may read a folder may enter it
    # Only the owner may change the mode, and only root the owner.
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, mode)
        os.fchown(descriptor, status.st_uid, status.st_gid)


@contextlib.contextmanager
def as_store_error(
    path: Path, doing: str = "write", needed: int | None = None
) -> Iterator[None]:
    """Turn an OSError while `doing` something to `path` into a StoreError of one line.

    needed: How many bytes are written to `path`; the error says so. None if unknown.
    """
    try:
        yield
    except OSError as error:
        room = ""
        if needed is not None:
            free = shutil.disk_usage(path.parent).free
            room = f", {needed:,} bytes are needed and {free:,} were free"
        raise StoreError(
            f"cannot {doing} {str(path)!r}: {error.strerror or error}{room}; nothing "
            "was changed"
        ) from None


def flush_names(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk, if the file system has that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_store(
    path: str | os.PathLike[str], *, metric: str | Metric | None = None
) -> FaissStore:
    """Open an index file as a store, for every job: `hubplugin.apply(store, bank)`.

    A job replaces the file in one step. A kill at any moment leaves the old or the new
    one whole, and running the job again finishes. The file is read into memory, which
    must have room for it twice where it is corrected, and three times where it is
    corrected already.

    Args:
        path: The index file. What belongs to it lies beside it, for photos.faiss in the
            folder photos.faiss.hub.
        metric: "cosine" if its vectors are of unit length, which is checked; else
            "dot", or "euclidean" for L2. By default that of the model, and without a
            model what the index computes.

    Raises:
        StoreError: There is no such file, Faiss cannot read it, or its type cannot
            carry offsets.
        InputError: There is no such metric.
    """
    return FaissStore(path, None if metric is None else Metric.parse(metric))


def read_index(path: str | os.PathLike[str]) -> tuple[faiss.Index, OffsetModel | None]:
    """Read the index in the file `path`, and its model.

    Returns:
        The index, and the model that its offsets are from; None if they are from no
        model or it is not upgraded.

    Raises:
        StoreError: Faiss cannot read the file, or its model is missing or belongs to
            another index.
    """
    store = FaissStore(path)
    version = store.active()
    return store.index, None if version is None else store.model(version)


def open_url(url: str) -> FaissStore:
    """Open the store behind `faiss:PATH` or `faiss:PATH?metric=cosine`.

    Raises:
        StoreError: There is no such file, Faiss cannot read it, or its type cannot
            carry offsets.
        InputError: There is no such metric, or the URL has another option.
    """
    place = url.removeprefix("faiss:")
    readings: list[tuple[str, str, str]] = []
    for name in (place, place.removeprefix("//")):  # faiss://FILE, as URLs are written
        # A name may have a question mark itself.
        readings += [(name, "", ""), name.rpartition("?"), name.partition("?")]
    there = [reading for reading in readings if os.path.isfile(reading[0])]
    path, _, query = (there or readings[-1:])[0]
    options = parse_qs(query)
    metric = options.pop("metric", [None])[0]
    if options:
        raise InputError(f"{without_secrets(url)!r}: the only option is metric")
    return open_store(path, metric=metric)
