"""The folder in which everything lies that hubplugin keeps beside an index, and the right to write there.

photos.faiss.hub/model.hub         the model of the offsets in the index
photos.faiss.hub/versions.json     the versions of the correction
photos.faiss.hub/N.offsets         version N, which is kept
photos.faiss.hub/lock              locked by the run that writes
photos.faiss.hub/pending/          what this run has made, until one step puts it in its place

An index has one folder, beside its real name, whatever links lead to it. One run at a time writes there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from hubplugin.errors import StoreError
from hubplugin_faiss.disk import cannot_write, making
from hubplugin_faiss.files import read_faiss
from hubplugin_faiss.handlers import handler_for

try:
    import fcntl
except ImportError:  # where there is none, nobody is kept away
    fcntl = None  # type: ignore[assignment]


MODEL, OFFSETS, CLAIM = "model.hub", "offsets", "claim.json"
"""The names of a model, in the folder and among what is pending, of its offsets there, and of what says whose they
are."""


class HubFolder:
    """The folder of the index in the file `path`, where there is one. `index`: the real name of that file."""

    def __init__(self, path: str | os.PathLike[str]):
        self.index = Path(os.path.realpath(path))
        self.path = Path(f"{self.index}.hub")
        self.model, self.versions = self.path / MODEL, self.path / "versions.json"
        self.lock = self.path / "lock"
        self.pending = self.path / "pending"

    def offsets_of(self, number: int) -> Path:
        return self.path / f"{number}.offsets"

    def require(self) -> None:
        """Raises StoreError if something else has the name of the folder, a folder that of a file in it, or the other
        way round."""
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise StoreError(
                f"{str(self.path)!r} is a file, where hubplugin keeps a folder; if it is the model that an earlier "
                f"version wrote, rename it, make the folder, and move it there as {MODEL!r}"
            )
        for path in (*self._files(), self.lock, self.pending):
            if path.exists() and path.is_dir() is not (path == self.pending):
                belongs = "a file, where a folder" if path == self.pending else "a folder, where a file"
                raise StoreError(f"{str(path)!r} is {belongs} belongs; move it away")

    def make(self) -> None:
        """Makes the folder, if there is none. Who may read the index may read it, and nobody else."""
        self.require()
        with making(self.path):
            try:
                self.path.mkdir(mode=0o700)
            except FileExistsError:
                return
            if self.index.is_file():
                mode = self.index.stat().st_mode & 0o777
                self.path.chmod(0o700 | mode | (mode & 0o444) >> 2)  # who reads a folder also enters it
                _give_to_owner_of(self.index, self.path)

    def write(self, path: Path, content: bytes) -> None:
        """Puts a file of `content` in the place of `path`, in one step. Raises StoreError where it cannot."""
        made = Path(f"{path}.tmp")
        with making(made, len(content)):
            with made.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            self.permit(made)
            os.replace(made, path)

    def permit(self, path: Path) -> None:
        """Lets those read the file `path` who may read the index, and nobody else."""
        if self.index.is_file():
            shutil.copymode(self.index, path)
            _give_to_owner_of(self.index, path)

    def delete(self) -> None:
        """Deletes all that is named above. What else somebody has put there stays, and the folder with it."""
        for path in (*self._files(), *self.path.glob("*.tmp")):
            path.unlink(missing_ok=True)
        if self.pending.is_dir():  # last: as long as it is there, the next run knows that the rest is to go
            shutil.rmtree(self.pending)
        self.delete_if_empty()

    def _files(self) -> list[Path]:
        """Where files lie, or may lie, but for the lock."""
        return [self.model, self.versions, *self.path.glob("*.offsets")]

    def delete_if_empty(self) -> None:
        """Deletes the folder if nothing but the lock is in it."""
        if [path for path in self.path.iterdir() if path != self.lock]:
            return
        self.lock.unlink(missing_ok=True)
        self.path.rmdir()


def _give_to_owner_of(index: Path, path: Path) -> None:
    owner = index.stat()
    with contextlib.suppress(OSError):  # only root may
        os.chown(path, owner.st_uid, owner.st_gid)


KEPT = CLAIM, MODEL, OFFSETS
"""What a later run can go on with, if it is all there; see `writing`."""


TRIES = 100
"""How often the lock is asked for again because another run has just deleted it with its folder."""


class Run:
    """The lock of `folder`, from the beginning until `close`, and what is pending there. A kill gives the lock back.

    All that a run makes lies in `pending`, but for inverted lists on disk: these lie beside those that they replace,
    and are noted in `pending`. So the next run knows what a kill has left.

    Raises StoreError if another run has the lock.
    """

    def __init__(self, folder: HubFolder):
        self.folder, self.pending = folder, folder.pending
        while True:
            self._release = weakref.finalize(self, _locked(folder).close)
            try:
                self._settle()
            except OSError as error:
                self._release()
                raise cannot_write(self.pending, error) from None
            if folder.lock.exists():
                break
            self._release()  # what a kill had left was a removal, and the lock went with it

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def new_index(self) -> Path:
        """The index file that is going to be, until `switch`."""
        return self.pending / "index.faiss"

    def close(self) -> None:
        """Deletes what no later run can go on with, and gives the lock back."""
        if not self._release.alive:
            return
        with contextlib.suppress(OSError):  # else it is the next run's to delete
            self._settle()
            if self.folder.path.is_dir():
                self.folder.delete_if_empty()
        self._release()

    def begin_anew(self) -> Path:
        """Deletes what is pending, and returns the empty folder for what is to be."""
        try:
            self._delete_pending()
            self.pending.mkdir()
        except OSError as error:
            raise cannot_write(self.pending, error) from None
        return self.pending

    def forget(self) -> None:
        """Leaves what is pending to nobody, so that it goes with this run."""
        (self.pending / CLAIM).unlink(missing_ok=True)

    def delete_folder(self) -> None:
        """Deletes all that lies in the folder."""
        try:
            if self.folder.path.is_dir():
                self.folder.delete()
        except OSError as error:
            raise cannot_write(self.folder.path, error) from None

    def note_lists(self, made: Iterable[str] = (), replaced: Iterable[str] = ()) -> None:
        """Notes files of inverted lists: those that are about to be made, and those that the index does not need once
        it is replaced."""
        noted = [*(("made", name) for name in made), *(("replaced", name) for name in replaced)]
        if not noted:
            return
        try:
            with (self.pending / "lists").open("a") as journal:
                journal.writelines(json.dumps([what, os.path.realpath(name)]) + "\n" for what, name in noted)
                journal.flush()
                os.fsync(journal.fileno())
        except OSError as error:
            raise cannot_write(self.pending / "lists", error) from None

    def switch(self, lists: Iterable[str], unchanged: Callable[[], None], *, remove: bool = False) -> None:
        """Puts `new_index`, which uses the files `lists`, in the place of the index, and then the pending model beside
        it; with `remove`, deletes the folder instead. After a kill between the two the next run does the second.

        unchanged: called right before; raises StoreError if the index is another one than was read.
        """
        folder = self.folder
        plan = {"remove": remove, "lists": [os.path.realpath(name) for name in lists]}
        folder.write(self.pending / "switch.json", json.dumps(plan).encode())
        try:
            folder.permit(self.new_index)
            unchanged()
            os.replace(self.new_index, folder.index)
        except OSError as error:
            raise cannot_write(folder.index, error) from None
        failing = f"what lies in {str(self.pending)!r} could not be put in its place"
        try:
            self._settle()
            failing = "the folder could not be flushed"
            for path in (folder.path, folder.index.parent):
                if path.is_dir():
                    flush_folder(path)
        except OSError as error:
            warnings.warn(f"{str(folder.index)!r} is written; {failing}: {error.strerror}", stacklevel=4)

    def _settle(self) -> None:
        """After `switch`, finishes it. Before, deletes what was made for it, and all that no later run can go on with.

        Raises OSError.
        """
        if not self.pending.is_dir():
            return
        plan = self._switched()
        self._delete_lists(plan)
        if plan is not None and plan["remove"]:
            self.folder.delete()
            return
        if plan is not None and (self.pending / MODEL).exists():
            os.replace(self.pending / MODEL, self.folder.model)
        if plan is None and all((self.pending / name).is_file() for name in KEPT):
            self._delete_pending(*KEPT)
        else:
            self._delete_pending()

    def _switched(self) -> dict[str, Any] | None:
        """What `switch` had planned; None if it has not replaced the index."""
        if self.new_index.exists():
            return None
        try:
            plan: dict[str, Any] = json.loads((self.pending / "switch.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return plan

    def _delete_lists(self, plan: dict[str, Any] | None) -> None:
        """Deletes the noted files of inverted lists that the index in place does not use."""
        made, replaced = self._noted("made"), self._noted("replaced")
        gone = made if plan is None else made - {*plan["lists"]} | replaced
        if gone and self.folder.index.exists():
            try:  # it may have been replaced once more since, or a kill has taken the plan before these notes
                gone -= {
                    os.path.realpath(name) for name in handler_for(read_faiss(self.folder.index, mapped=True)).files()
                }
            except StoreError:
                gone = set()  # an index that cannot be read may use any of them
        for name in gone:
            Path(name).unlink(missing_ok=True)

    def _noted(self, what: str) -> set[str]:
        journal, names = self.pending / "lists", set()
        for line in journal.read_bytes().splitlines() if journal.exists() else ():
            with contextlib.suppress(ValueError):  # a kill may cut off the last line, whose file was not yet made
                kind, name = json.loads(line)
                names |= {name} if kind == what else set()
        return names

    def _delete_pending(self, *but: str) -> None:
        """Deletes what is pending, but for the files named `but`."""
        if not self.pending.is_dir():
            return
        (self.pending / "switch.json").unlink(missing_ok=True)  # first: without it nothing counts as switched
        for path in self.pending.iterdir():
            if path.name not in but:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not but:
            self.pending.rmdir()


def _locked(folder: HubFolder) -> IO[str]:
    """The lock of `folder`, opened and locked. Waits for nobody."""
    for _ in range(TRIES):
        folder.make()
        try:
            lock = folder.lock.open("a+")
        except FileNotFoundError:
            continue  # another run has deleted the folder
        except OSError as error:
            raise cannot_write(folder.lock, error) from None
        if fcntl is None:
            return lock
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.lock.exists() and os.path.samestat(os.fstat(lock.fileno()), folder.lock.stat()):
                with contextlib.suppress(OSError):  # it is there all the same, only without a name
                    folder.permit(folder.lock)
                    lock.truncate(0)
                    os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
                return lock
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read(200).strip()
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


def flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
