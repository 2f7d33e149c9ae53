"""The folder in which everything lies that hubplugin keeps beside an index, and the right to write there.

photos.faiss.hub/model.hub         the model of the offsets in the index
photos.faiss.hub/previous.hub      the model before it, which a rollback writes
photos.faiss.hub/lock              locked by the run that writes
photos.faiss.hub/pending/          what this run has made, until it is put in its place

An index has one folder, beside its real name, whatever links lead to it. One run at a time writes there.

An index file and its model are two names, which no single step changes. So the index is replaced first (`Run.switch`):
until then all is as before, and from then on all is new, though the models still lie where they did. The index says by
12 bits which model is its own (`IndexHandler.holds_offsets_of`). A reader looks for that wherever it may lie, the
likeliest place first (`HubFolder.models`), and the next run moves the models to their places (`Run.settle`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
import weakref
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO

import numpy as np
from pydantic import BaseModel

from hubplugin.atomic import alone, kind_of, opened
from hubplugin.errors import ModelFileError, StoreError
from hubplugin.model import OffsetModel, load
from hubplugin.store import require_room
from hubplugin_faiss.files import flushed, making, new_file, permit
from hubplugin_faiss.handlers.base import IndexHandler

try:
    import fcntl
except ImportError:  # where there is none, nobody is kept away
    fcntl = None  # type: ignore[assignment]


class HubFolder:
    """The folder of the index in the file `path`, where there is one. `index`: the real name of that file."""

    def __init__(self, path: str | os.PathLike[str]):
        self.index = Path(os.path.realpath(path))
        self.path = Path(f"{self.index}.hub")
        self.model, self.previous = self.path / "model.hub", self.path / "previous.hub"
        self.lock = self.path / "lock"
        self.pending = self.path / "pending"
        self.pending_model, self.offsets = self.pending / "model.hub", self.pending / "offsets"
        self.claim, self.new_index = self.pending / "claim.json", self.pending / "index.faiss"
        # The model first: where it is deleted last, a kill leaves it without the claim, and it is taken for the active.
        self._of_pending = self.pending_model, self.offsets, self.claim, self.new_index

    def models(self) -> Iterator[tuple[Path, OffsetModel]]:
        """The models that lie here and can be read, and where. The pending one comes first after a switch, and last
        before. So two models of the same 12 bits are not mistaken for each other; and models move in this order, so
        that whoever reads meanwhile misses none."""
        places = [self.model, self.previous]
        places.insert(2 if self.claim.exists() or self.new_index.exists() else 0, self.pending_model)
        for place in places:
            model = self.read_model(place)
            if isinstance(model, OffsetModel):
                yield place, model

    def read_model(self, place: Path) -> OffsetModel | ModelFileError | None:
        """The model in the file `place`, or why it cannot be read; None if there is none."""
        if place.is_symlink():
            return ModelFileError(f"{str(place)!r} is a link, where hubplugin keeps a file; move it away")
        try:
            return load(place) if place.exists() else None
        except ModelFileError as error:
            return error

    def claimed(self) -> Claim | None:
        """What is pending; None where nothing is, or nothing that this version knows."""
        try:
            with opened(self.claim) as file:
                claim = Claim.model_validate_json(file.read())
        except (OSError, ValueError):
            return None
        return claim if claim.format == FORMAT else None

    def half_written(self, rows: int, stamp: str) -> OffsetModel | None:
        """The model whose offsets [rows] are pending for the index file with this `stamp`; None if there is none."""
        claim = self.claimed()
        if claim is None or claim.stamp != stamp or not self._has_offsets(rows):
            return None
        model = self.read_model(self.pending_model)
        return model if isinstance(model, OffsetModel) and model.fingerprint == claim.model else None

    def pending_offsets(self, rows: int) -> np.memmap:
        """float32 [rows], mapped, NaN where none is written yet. Raises StoreError where there are none for so many."""
        if not self._has_offsets(rows):
            raise StoreError(f"{str(self.offsets)!r} has no offsets for {rows} targets; run apply again")
        with making(self.offsets), opened(self.offsets, os.O_RDWR) as file:
            return np.memmap(file, np.float32, "r+", shape=(rows,))

    def _has_offsets(self, rows: int) -> bool:
        return alone(self.offsets) and self.offsets.stat().st_size == 4 * rows

    def require(self) -> None:
        """Raises StoreError if something else has the name of the folder or of what lies in it. A link might lead to
        what is somebody else's, so that it would be written to, given away or deleted."""
        folders, files = (self.path, self.pending), (self.model, self.previous, self.lock, *self._of_pending)
        for path in (*folders, *files):
            found, expected = kind_of(path), "a folder" if path in folders else "a file"
            if found not in ("", expected):
                raise StoreError(f"{str(path)!r} is {found}, where hubplugin keeps {expected}; move it away")
        if (earlier := self.path / "versions.json").exists():
            raise StoreError(
                f"{str(earlier)!r} is of an earlier version of hubplugin, and no rollback reads it now; delete it, and "
                "the files *.offsets beside it"
            )

    def require_room(self, needed: int) -> None:
        """Raises StoreError if no files of so many bytes can be made here. What is pending goes before, or is part of
        them."""
        there = [path for path in (self.index.parent, self.path, self.pending) if path.is_dir()]
        pending = sum(path.stat().st_size for path in self._of_pending if path.is_file())
        for folder in there:
            require_room(folder, needed - pending)

    def make(self) -> None:
        """Makes the folder, if there is none. Who may read the index may read it, and nobody else."""
        self.require()
        with making(self.path):
            try:
                self.path.mkdir(mode=0o700)
            except FileExistsError:
                return
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                permit(descriptor, self.index)
            finally:
                os.close(descriptor)

    def write(self, path: Path, content: bytes) -> None:
        """Writes `content` to a `new_file`. Raises StoreError."""
        with new_file(path, len(content), self.index) as file:
            file.write(content)

    def delete(self) -> None:
        """Deletes all that is named above, but for the lock. What else somebody has put there stays. Raises OSError."""
        for path in (self.model, self.previous):
            path.unlink(missing_ok=True)
        self.delete_pending()  # last: as long as it is there, the next run knows that the rest is to go

    def delete_pending(self) -> None:
        """Likewise what is pending. Raises OSError."""
        for path in self._of_pending:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody else has put something there
            self.pending.rmdir()

    def delete_if_empty(self) -> None:
        """Deletes the folder if nothing but the lock is in it. Raises OSError."""
        if self.path.is_dir() and not [path for path in self.path.iterdir() if path != self.lock]:
            self.lock.unlink(missing_ok=True)
            self.path.rmdir()


def date_of(place: Path) -> str | None:
    """When the file `place` was written, as `Correction.made` has it; None if there is none."""
    try:
        return datetime.fromtimestamp(place.stat().st_mtime, timezone.utc).isoformat(timespec="seconds")
    except OSError:
        return None


FORMAT = 2
"""Of a `Claim`. A run does not go on with what an earlier version has left."""


class Claim(BaseModel):
    """What is pending: the offsets of the model with this fingerprint, or where that is "" that the correction goes.
    stamp: of the index file that it is for."""

    format: int = FORMAT
    model: str
    stamp: str


class Run:
    """The lock of `folder`, from the beginning until `close`, and what is pending there. A kill gives the lock back.

    Raises StoreError if another run has the lock.
    """

    def __init__(self, folder: HubFolder):
        self.folder = folder
        self._release = weakref.finalize(self, _locked(folder).close)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Deletes what no later run can go on with, and gives the lock back."""
        if not self._release.alive:
            return
        with contextlib.suppress(OSError):  # else it is the next run's to delete
            self._tidy()
            self.folder.delete_if_empty()
        self._release()

    def settle(self, handler: IndexHandler) -> None:
        """Finishes the switch that a killed run has begun, and deletes what no run can go on with. handler: of the
        index as it lies there. Raises StoreError."""
        folder, claim = self.folder, self.folder.claimed()
        own = next((place for place, model in folder.models() if handler.holds_offsets_of(model)), None)
        with making(folder.pending):
            if claim is not None and not claim.model and not handler.is_upgraded():
                folder.delete()
            elif own == folder.pending_model:
                self._move_models()
            else:
                if own == folder.previous:  # somebody has put the old index back
                    os.replace(folder.previous, folder.model)
                self._tidy()

    def begin(self, model: OffsetModel | None, rows: int, stamp: str) -> None:
        """Deletes what is pending, and makes room for the offsets [rows] of `model`, NaN where none is written yet, and
        for a new index. None: the correction is going to be taken out. stamp: of the index file. Raises StoreError."""
        folder = self.folder
        with making(folder.pending):
            folder.delete_pending()
            folder.pending.mkdir(exist_ok=True)
        if model is not None:  # offsets have their room now: a map that finds none later ends the process
            folder.write(folder.offsets, np.full(rows, np.nan, np.float32).tobytes())
        claim = Claim(model="" if model is None else model.fingerprint, stamp=stamp)
        folder.write(folder.claim, claim.model_dump_json().encode())
        if model is not None:  # last: without it the rest is nobody's, and without the claim it is taken for active
            folder.write(folder.pending_model, model.to_bytes())

    def forget(self) -> None:
        """Leaves what is pending to nobody, so that it goes with this run."""
        self.folder.pending_model.unlink(missing_ok=True)

    def switch(self, unchanged: Callable[[], None], *, remove: bool) -> None:
        """Puts the new index in the place of the old one, and then the pending model beside it; with `remove`, deletes
        what lies in the folder instead. After a kill between the two the next run does the second.

        unchanged: called right before; raises StoreError if the index is another one than was read.
        """
        folder = self.folder
        with making(folder.index):
            if not remove:
                folder.claim.unlink()  # from here on the pending model is not half-written
            flushed(folder.pending, folder.path, folder.index.parent)  # the index must not be there without its model
            unchanged()
            os.replace(folder.new_index, folder.index)
        failed = flushed(folder.index.parent)
        try:
            folder.delete() if remove else self._move_models()
            failed = failed or ("" if remove else flushed(folder.path))
        except OSError as error:
            failed = f"what lies in {str(folder.pending)!r} could not be put in its place: {error.strerror}"
        if failed:
            warnings.warn(f"{str(folder.index)!r} is written; {failed}", stacklevel=4)

    def _move_models(self) -> None:
        """Puts the pending model, which the index holds the offsets of, in its place, and that which was there in the
        place of the one before. Goes on where a kill has cut it off. Raises OSError."""
        folder = self.folder
        model, former = (folder.read_model(place) for place in (folder.pending_model, folder.model))
        assert isinstance(model, OffsetModel)
        if not isinstance(former, OffsetModel):
            os.replace(folder.pending_model, folder.model)
        elif former.fingerprint != model.fingerprint:  # else it was amended, and has the date of its first writing
            os.replace(folder.model, folder.previous)
            os.replace(folder.pending_model, folder.model)
        folder.delete_pending()

    def _tidy(self) -> None:
        """Deletes what is pending, but for offsets that a later run can go on with. Raises OSError."""
        folder = self.folder
        claim, model = folder.claimed(), folder.read_model(folder.pending_model)
        if claim is not None and isinstance(model, OffsetModel) and alone(folder.offsets):
            folder.new_index.unlink(missing_ok=True)
        else:
            folder.delete_pending()


TRIES = 100
"""How often the lock is asked for again because another run has just deleted it with its folder."""


def _locked(folder: HubFolder) -> BinaryIO:
    """The lock of `folder`, opened and locked. Waits for nobody."""
    for _ in range(TRIES):
        folder.make()
        with making(folder.lock):
            try:
                lock = opened(folder.lock, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:
                continue  # another run has deleted the folder
        if fcntl is None:
            return lock
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.lock.exists() and os.path.samestat(os.fstat(lock.fileno()), folder.lock.lstat()):
                if alone(folder.lock):
                    with contextlib.suppress(OSError):  # it is there all the same, only without a name
                        lock.truncate(0)
                        os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
                        permit(lock.fileno(), folder.index)
                    return lock
                folder.lock.unlink()  # it has a name elsewhere, too: what lies there must stay as it is
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read(200).decode(errors="replace").strip()
            lock.close()
            raise StoreError(
                f"{str(folder.index)!r} is being written by another run{f' ({holder})' if holder else ''}; nothing was "
                "changed: wait until it ends"
            ) from None
        except OSError as error:
            lock.close()
            raise StoreError(f"{str(folder.lock)!r} cannot be locked: {error.strerror}; nothing was changed") from None
        lock.close()
    raise StoreError(f"{str(folder.path)!r} is deleted again and again by other runs; nothing was changed")
