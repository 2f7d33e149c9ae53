"""The folder in which everything lies that hubplugin keeps beside an index.

photos.faiss.hub/model.hub         the model of the offsets in the index
photos.faiss.hub/versions.json     the versions of the correction
photos.faiss.hub/N.offsets         version N, which is kept
photos.faiss.hub/quarantine.json   the targets that must not be found
photos.faiss.hub/lock              locked by the run that writes
photos.faiss.hub/pending/          what this run has made, until one step puts it in its place

An index has one folder, beside its real name, whatever links lead to it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from hubplugin.errors import StoreError
from hubplugin_faiss.disk import making

MODEL, OFFSETS, CLAIM = "model.hub", "offsets", "claim.json"
"""The names of a model, in the folder and among what is pending, of its offsets there, and of what says whose they
are."""


class HubFolder:
    """The folder of the index in the file `path`, where there is one. `index`: the real name of that file."""

    def __init__(self, path: str | os.PathLike[str]):
        self.index = Path(os.path.realpath(path))
        self.path = Path(f"{self.index}.hub")
        self.model, self.versions = self.path / MODEL, self.path / "versions.json"
        self.quarantine, self.lock = self.path / "quarantine.json", self.path / "lock"
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
        return [self.model, self.versions, self.quarantine, *self.path.glob("*.offsets")]

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
