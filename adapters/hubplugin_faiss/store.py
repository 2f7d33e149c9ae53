"""A `Store` in a Faiss index file, with a URL such as `faiss:photos.faiss`.

photos.faiss.hub/manifest.json   the active, the previous and the half-written version
photos.faiss.hub/3.model         the model of version 3
photos.faiss.hub/index.faiss     the new index, until it replaces the old one
photos.faiss.hub/lock            locked by the run that writes

One run writes at a time. It collects offsets in memory and replaces the index file in
one step; until then the file does not change. Right before that step, the run writes a
manifest that identifies the content of the new file. A run may be killed between these
two steps, so the index file decides which version is active
(`FaissStore.read_manifest`).
After a kill, the next run starts again with the model that was already fitted.

Other files are written, read and deleted only inside this folder, which must not be a
link: `os.replace` puts complete files there, and files are opened without following
links.
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
from hubplugin_faiss.index import check_batches, upgrade_by
from hubplugin_faiss.objects import is_mapped, normalises_queries, reason
from hubplugin_faiss.scale import IndexScale

ENDS = 64 << 10
"""The number of bytes at each end of a file that identify its content."""

OURS = re.compile(r"(\d+\.model|manifest\.json|index\.faiss)(\.[0-9a-f]{8}\.tmp)?")
"""Matches the names of files in the folder, except the lock.

The ending .tmp marks an incomplete file.
"""

NOTHING = -1
"""The id that Faiss returns if it has found fewer targets than requested."""


class FaissVersion(Version):
    """A version of a correction, with the stamps of the files it belongs to.

    stamp: The `FileState.stamp` of the file on which the model was fitted.
    index: The `FileState.stamp` of the file with the offsets. "" until that file is
        complete.
    """

    stamp: str = ""
    index: str = ""


class FileState(NamedTuple):
    """The state of a file when it was read.

    stamp: The size of the file and a hash of both ends, which identify its content.
    inode: The number of the inode.
    changed: The time of the last change, in nanoseconds.
    """

    stamp: str
    inode: int
    changed: int


class FaissStore(ManifestStore[FaissVersion]):
    """An index file, which is read into memory.

    The file is read again if another program has changed it. Recorded queries are kept
    beside it, in photos.faiss.queries.

    Args:
        path: The index file.
        metric: The metric of the index. By default, the metric of the active or
            half-written model; without a model, dot, or euclidean for L2.
    """

    def __init__(self, path: str | os.PathLike[str], metric: Metric | None = None):
        self.url = f"faiss:{os.fspath(path)}"
        self.path = Path(os.path.realpath(path))
        self.hub = Path(f"{self.path}.hub")
        self.record = Path(f"{os.fspath(path)}.queries")
        self.how_to_record = (
            f"call hubplugin.Recorder({str(self.record)!r}).add(queries) at each search"
        )
        self._given_metric = metric
        self._is_writing = False
        self._scanned: FileState | None = None  # the file that the last `scan` began on
        self._read()

    def _read(self) -> None:
        """Read the file. Raises StoreError if another program changes it meanwhile."""
        state = read_state(self.path)
        try:
            index = faiss.read_index(str(self.path))
        except (RuntimeError, MemoryError) as error:
            raise StoreError(
                f"Faiss cannot read {str(self.path)!r}: {reason(error)}"
            ) from None
        self._hold(index, state)
        self._require_unchanged()

    def _hold(self, index: faiss.Index, state: FileState) -> None:
        """Keep `index`, the content of the file in this `state`."""
        self.index = index
        self.handler = handler_for(index)
        self.dim = int(index.d)
        self._state = state
        self._model_metric: Metric | None = None
        vars(self).pop("raw", None)  # cached for the previous index

    def _reread_if_changed(self) -> None:
        """Read the file again if another program has changed it.

        Do nothing while a run of this store writes: its offsets belong to the entries
        that were read before.
        """
        if not self._is_writing and read_state(self.path) != self._state:
            self._read()

    def _require_unchanged(self, state: FileState | None = None) -> None:
        """Raise StoreError if the file is not in this `state`.

        By default, this is the state in which the file was read.
        """
        if read_state(self.path) != (state or self._state):
            raise StoreError(
                f"{str(self.path)!r} was changed by another program since it was read; "
                "it stays as that program left it: run this again"
            )

    def read_manifest(self) -> Manifest[FaissVersion]:
        """Return the manifest, corrected to match the offsets in the index.

        The manifest may not match if a run was killed before it updated the manifest,
        or if somebody restored an older index. Raises StoreError if the index has
        offsets from a model that is not in the manifest.
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
            if writing.index == self._state.stamp:
                return manifest.activate(writing)  # a run was killed after the switch
            if writing.stamp != self._state.stamp:
                manifest = manifest.give_up()  # its model was fitted on another file
        holds = self.handler.holds_offsets_of
        if not self.handler.extras or holds(""):
            # No offsets come from a model. If a version is active, somebody replaced
            # the corrected index.
            return manifest.withdraw() if manifest.active else manifest
        active = tuple(manifest.active.values())
        if any(holds(version.model) for version in active):
            return manifest
        if writing is not None and holds(writing.model):
            # A run was killed after the switch, and entries were added since.
            return manifest.activate(writing)
        for version in manifest.previous.values():
            if holds(version.model):
                # Somebody restored the index from before the last switch.
                return manifest.replace(
                    active={"": version},
                    previous={},
                    retired=(*manifest.retired, *active),
                )
        raise StoreError(
            f"{str(self.path)!r} is corrected, but its model is not in "
            f"{str(self.hub)!r}; copy that folder along with the index, or remove the "
            f"correction: hubplugin remove {self.url}"
        )

    def write_manifest(self, manifest: Manifest[FaissVersion]) -> None:
        self._write_file("manifest.json", manifest.model_dump_json().encode())

    def delete_manifest(self) -> None:
        self._delete_file("manifest.json")

    def new_version(self, model: OffsetModel, number: int) -> FaissVersion:
        return FaissVersion.of(model, number, stamp=self._state.stamp)

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
            f"remove the correction: hubplugin remove {self.url}"
        )

    def write_model(self, version: FaissVersion, model: OffsetModel) -> None:
        self._write_file(f"{version.number}.model", model.to_bytes())

    def delete_model(self, version: FaissVersion) -> None:
        self._delete_file(f"{version.number}.model")

    def make_room(self, version: FaissVersion) -> None:
        """Do nothing: offsets are collected in memory."""

    def delete_offsets(self, versions: Sequence[FaissVersion]) -> None:
        """Do nothing: offsets are only stored in the index."""

    def _place(self, name: str) -> Path:
        """Return the path of a file in the folder.

        Raises StoreError if the folder is a link.
        """
        if self.hub.is_symlink():
            raise StoreError(
                f"{str(self.hub)!r} is a link, but hubplugin keeps a folder there; move "
                "it away"
            )
        return self.hub / name

    def _read_file(self, name: str) -> bytes:
        """Return the content of a file in the folder, or b"" if it does not exist."""
        path = self._place(name)
        if not os.path.lexists(path):
            return b""
        with as_store_error(path, doing="read"), open_own(path) as file:
            return file.read()

    def _write_file(self, name: str, content: bytes) -> None:
        """Write a file in the folder, in one step."""
        with self._new_file(name, len(content)) as file:
            file.write(content)

    @contextlib.contextmanager
    def _new_file(self, name: str, size: int) -> Iterator[BinaryIO]:
        """Open a new file in the folder for `size` bytes.

        The file gets its name once it is complete.
        """
        path = self._place(name)
        with as_store_error(path, needed=size), replacing(path, 0o600) as file:
            yield file
            permit(file.fileno(), self.path)

    def _delete_file(self, name: str) -> None:
        """Delete a file in the folder, if it exists."""
        path = self._place(name)
        with as_store_error(path):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the store for writing, and clean up at the end.

        The lock is also released if the process dies. Raises StoreError if another run
        holds it.
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
                # A run that ends deletes the lock file, so the file locked here may be
                # gone by now, or another one may have its name.
                is_ours = os.path.samestat(os.fstat(lock.fileno()), path.lstat())
            except OSError:  # another run holds the lock, or the file is gone
                is_ours = False
            if not is_ours:
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
        """Update the manifest to match the index, and delete files no longer needed."""
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
        """The metric that was given, or by default the metric of the model.

        Without a model, it is the metric that the index computes.
        """
        chosen = self._given_metric or self._model_metric
        if chosen is not None:
            return chosen
        version = self.active()
        return self.handler.metric if version is None else version.metric

    def takes_metric(self, metric: Metric) -> bool:
        """Return True if a model for `metric` suits the index.

        If no metric was given to the store, it uses `metric` from then on.
        """
        if metric in (self.handler.metric, Metric.COSINE):
            self._model_metric = metric
        return metric is self.metric

    @property
    def unit(self) -> bool:  # type: ignore[override]
        """True if a correction is only valid for vectors of unit length."""
        return self.metric is Metric.COSINE and not self.handler.lossy

    @property
    def maps_queries(self) -> bool:  # type: ignore[override]
        """True if a linear transform in front of the index can map queries.

        Plain Faiss can then search the file.
        """
        return not normalises_queries(self.index)

    def _rounding(
        self, scale: IndexScale, batch: Batch, offsets: np.ndarray
    ) -> np.ndarray:
        """Return the largest rounding error that codes may cause in `offsets` [b]: [b].

        Nearby offsets are rounded as well, and the largest error counts. Errors are
        clipped at `IndexHandler.largest_loss`. A stored offset with a larger error is
        stale, and a refresh makes new codes.
        """
        vectors = batch.vectors
        rows = int(batch.place or 0) + np.arange(len(vectors))
        exact = scale.to_index(offsets.astype(np.float64), vectors)
        largest_errors = np.zeros(len(exact))
        quarter_distance = 0.0
        for shift in (0, -2, -1, 1, 2):
            nearby = exact + shift * quarter_distance
            held = self.handler.round_offsets(nearby, vectors, rows)
            errors = np.nan_to_num(np.abs(held - exact))  # NaN: not a finite vector
            errors = np.minimum(errors, self.handler.largest_loss)
            largest_errors = np.maximum(largest_errors, errors)
            if shift == 0:
                # A mean rounding error is a quarter of the distance between two levels.
                quarter_distance = float(errors.mean())
        rounded = scale.to_model(exact + largest_errors, vectors)
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

    def view_manifest(self) -> Manifest[FaissVersion]:
        self._reread_if_changed()
        return self.read_manifest()

    def scan(self, field: str | None = None) -> Iterator[Batch]:
        """Yield all entries in order, with vectors reconstructed by the index.

        Raises StoreError if `field` is given: entries have no fields.
        """
        if field is not None:
            raise StoreError(
                f"{self.url}: its targets are only vectors, without a field {field!r}"
            )
        self._reread_if_changed()
        # A model may be fitted on this scan. `begin` raises if the file has changed
        # since then.
        self._scanned = self._state
        return self.read_batches()

    def how_to_search(self) -> tuple[str, str]:
        path = self.url.removeprefix("faiss:")
        return f"index = faiss.read_index({path!r})", "it maps each query"

    def read_batches(self) -> Iterator[Batch]:
        """Yield all entries of the index in memory, even if the file has changed."""
        version = self.active()
        batches = self.handler.scan()
        if self.metric is Metric.COSINE:
            is_corrected = bool(self.handler.extras)
            batches = check_batches(
                batches, self.handler, self.url, tolerant=is_corrected
            )
        if version is None:
            yield from batches
            return
        scale = IndexScale.of(self.handler, self.model(version))
        for batch in batches:
            offsets = scale.to_model(batch.offsets, batch.vectors).astype(np.float32)
            rounding = partial(self._rounding, scale, batch)
            yield replace(batch, offsets=offsets, rounding=rounding)

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raise StoreError if the index cannot carry offsets or the disk lacks room.

        A job calls it before it spends an hour on fitting a model.
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
                version, found = self.start_version(model)
            except BaseException:
                self.give_up(previous)
                raise
            end = run.pop_all().close  # `FaissWriting.close` unlocks the store
            return FaissWriting(self, model, version, previous, end, found)

    def give_up(self, previous: Manifest[FaissVersion]) -> None:
        """Restore `previous`, the manifest from before a failed run."""
        with contextlib.suppress(StoreError):
            if previous.stored_versions or previous.previous:
                self.write_manifest(previous)
            else:
                self.delete_manifest()

    def replace(self, index: faiss.Index, version: FaissVersion | None) -> None:
        """Replace the index file.

        Args:
            index: The new index.
            version: The version whose offsets the new index has, or None for an index
                without offsets.
        """
        new = self._place("index.faiss")
        try:
            with self._new_file(new.name, self.path.stat().st_size) as file:
                faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))
            state = read_state(new)  # `os.replace` does not change it
            if version is not None:
                manifest = self.require_owner(version)
                # In a refresh of this version, `writing` may be another version.
                writing = manifest.writing
                if writing is not None and writing.number == version.number:
                    # Before the file is replaced, write its stamp to the manifest. If
                    # the run is killed after the replacement, `read_manifest` finds
                    # that the file has this stamp, and activates the version.
                    complete = version.replace(index=state.stamp)
                    self.write_manifest(manifest.replace(writing=complete))
            # The model must be on the disk before the index that needs it.
            flush_names(self.hub)
            self._require_unchanged()
            with as_store_error(self.path):
                os.replace(new, self.path)
        finally:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
        flush_names(self.path.parent)
        self._hold(index, state)
        self._scanned = None

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        self._reread_if_changed()
        index = self.raw if raw else self.index
        if queries.shape[1] != index.d:
            raise InputError(
                f"queries have {queries.shape[1]} dimensions, {self.url} has {index.d}; "
                "search with vectors of the model that embedded its targets"
            )
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
        if not is_mapped(self.index):
            return []
        return [
            "a query map comes before the index, and plain Faiss would also map the "
            "vectors that it adds: use hubplugin_faiss.add, or add to "
            "faiss.downcast_index(index.index) and set index.ntotal"
        ]

    def remove(self, progress: Progress | None = None) -> None:
        """Remove the correction, even if its model is missing or damaged."""
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
    """A run that writes the offsets of `version` to the file of `store`.

    model: The model that gives the offsets.
    previous: The manifest to restore if the run fails.
    end: The function that unlocks the store.
    found: See `Writing`.
    """

    takes_all = True  # an upgrade makes new codes for all entries

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
        """Keep the `offsets` [b] of a complete batch from `scan`."""
        first = int(batch.place or 0)
        held = self._scale.to_index(offsets, batch.vectors)
        self._offsets[first : first + len(held)] = held

    def activate(self) -> None:
        store = self.store
        is_amended = self.found == "active"
        if is_amended and self.wrong == 0:
            return  # all offsets in the file are correct
        missing = int(np.isnan(self._offsets).sum())
        if missing:
            raise StoreError(
                f"{store.url}: {missing} targets have no offset yet; run apply again"
            )
        raw = handler_for(store.raw)
        # For an active version, a loss of recall only gives a warning.
        force = self.forced or is_amended
        try:
            upgraded = upgrade_by(raw, self._offsets, self.model, self._scale, force)
            store.replace(upgraded, self.version)
        except HubpluginError:
            store.give_up(self.previous.replace(writing=None))
            raise

    def close(self) -> None:
        self.end()


def read_state(path: Path) -> FileState:
    """Return the current state of the file `path`.

    Raises StoreError if it is not a regular file.
    """
    if not path.exists():
        raise StoreError(f"{str(path)!r} does not exist")
    with as_store_error(path, doing="read"), open_own(path) as file:
        status = os.fstat(file.fileno())
        ends = hashlib.sha256(file.read(ENDS))
        file.seek(max(status.st_size - ENDS, 0))
        ends.update(file.read(ENDS))
    stamp = f"{status.st_size}|{ends.hexdigest()[:16]}"
    return FileState(stamp, status.st_ino, status.st_mtime_ns)


def permit(descriptor: int, like: Path) -> None:
    """Give an open file or folder the mode and the owner of the file `like`.

    The files contain queries, which may be confidential.
    """
    status = like.stat()
    mode = status.st_mode & 0o777
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        mode |= 0o700 | (mode & 0o444) >> 2  # whoever may read the folder may enter it
    # Only the owner may change the mode, and only root may change the owner.
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, mode)
        os.fchown(descriptor, status.st_uid, status.st_gid)


@contextlib.contextmanager
def as_store_error(
    path: Path, doing: str = "write", needed: int | None = None
) -> Iterator[None]:
    """Turn an OSError into a StoreError of one line.

    Args:
        path: The file, for the error message.
        doing: The operation on the file, for the error message.
        needed: The number of bytes to write, for the error message. None if unknown.
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
    """Wait until the names in `folder` are on the disk, if the file system can."""
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

    A job replaces the file in one step. If it is killed at any moment, either the old
    or the new file is complete, and running the job again finishes it. A job needs
    memory for two copies of the index, or three if the index is already corrected.

    Args:
        path: The index file. The files of a correction are kept beside it: for
            photos.faiss, in the folder photos.faiss.hub.
        metric: "cosine" if the vectors have unit length, which is checked; otherwise
            "dot", or "euclidean" for L2. By default, the metric of the model; without a
            model, the metric that the index computes.

    Raises:
        StoreError: The file does not exist, Faiss cannot read it, or its type cannot
            carry offsets.
        InputError: The metric does not exist.
    """
    return FaissStore(path, None if metric is None else Metric(metric))


def read_index(path: str | os.PathLike[str]) -> tuple[faiss.Index, OffsetModel | None]:
    """Read the index in the file `path`, and its model.

    Returns:
        The index and the model that its offsets come from. The model is None if the
        index is not upgraded or its offsets do not come from a model.

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
        StoreError: The file does not exist, Faiss cannot read it, or its type cannot
            carry offsets.
        InputError: The metric does not exist, or the URL has another option.
    """
    place = url.removeprefix("faiss:")
    readings: list[tuple[str, str, str]] = []
    for name in (place, place.removeprefix("//")):  # faiss://FILE is accepted, too
        # A file name may contain question marks. Each reading has a path, a separator
        # and a query.
        readings += [(name, "", ""), name.rpartition("?"), name.partition("?")]
    # If no file exists, the last reading gives the error.
    existing = [reading for reading in readings if os.path.isfile(reading[0])]
    path, _, query = (existing or readings[-1:])[0]
    options = parse_qs(query)
    metric = options.pop("metric", [None])[0]
    if options:
        raise InputError(f"{without_secrets(url)!r}: the only option is metric")
    return open_store(path, metric=metric)
