"""The folder in which everything lies that hubplugin keeps beside an index, and the right to write there.

photos.faiss.hub/manifest.json     which model is active, which was before it, and what is being written
photos.faiss.hub/3.model           the model of version 3
photos.faiss.hub/3.offsets         its offsets, until they are in the index
photos.faiss.hub/index.faiss       the new index, until it takes the place of the old one
photos.faiss.hub/model.hub         the model of an index that was upgraded in memory, where its user has put it
photos.faiss.hub/lock              locked by the run that writes

An index has one folder, beside its real name, whatever links lead to it. One run at a time writes there.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Collection
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hubplugin.atomic import alone, kind_of, open_own, replacing
from hubplugin.corrections import Manifest, Version
from hubplugin.errors import StoreError
from hubplugin.store import require_room
from hubplugin_faiss.files import making, permit

try:
    import fcntl
except ImportError:  # where there is none, nobody is kept away
    fcntl = None  # type: ignore[assignment]

OURS = re.compile(
    r"((\d+)\.(model|offsets)|manifest\.json|index\.faiss|model\.hub)(\.[0-9a-f]{8}\.tmp)?"
)
"""The names of what lies in the folder, but for the lock. At the end: of a file that is not whole yet."""


class FaissVersion(Version):
    """stamp: of the index file that the offsets are for. index: of the new file, from right before it takes the place
    of that one: so it is known to have done so, whether or not the manifest says it yet."""

    stamp: str = ""
    index: str = ""


class HubFolder:
    """The folder of the index in the file `path`, where there is one. `index`: the real name of that file."""

    def __init__(self, path: str | os.PathLike[str]):
        self.index = Path(os.path.realpath(path))
        self.path = Path(f"{self.index}.hub")
        self.manifest, self.lock = self.path / "manifest.json", self.path / "lock"
        self.new_index, self.given_model = (
            self.path / "index.faiss",
            self.path / "model.hub",
        )

    def model(self, version: FaissVersion) -> Path:
        return (
            self.path / f"{version.number}.model"
            if version.number
            else self.given_model
        )

    def offsets(self, version: FaissVersion) -> Path:
        return self.path / f"{version.number}.offsets"

    def files(self) -> list[Path]:
        """All that lies here under a name of ours, but for the lock."""
        there = sorted(self.path.iterdir()) if kind_of(self.path) == "a folder" else []
        return [path for path in there if OURS.fullmatch(path.name)]

    def read_manifest(self) -> Manifest[FaissVersion]:
        """The manifest as it lies here, an empty one if there is none. Raises StoreError."""
        try:
            with open_own(self.manifest) as file:
                content = file.read()
        except FileNotFoundError:
            return Manifest[FaissVersion]()
        except OSError as error:
            self.require()
            raise StoreError(
                f"{str(self.manifest)!r} cannot be read: {error.strerror}"
            ) from None
        mend = f"delete the folder {str(self.path)!r}, and take the correction out: hubplugin remove faiss:{self.index}"
        return Manifest[FaissVersion].read(content, repr(str(self.manifest)), mend)

    def write(self, path: Path, content: bytes) -> None:
        """Replaces the file `path` by one with this `content`, in one step. Who may read the index may read it, and
        nobody else. Raises StoreError."""
        with making(path, len(content)), replacing(path, 0o600) as file:
            file.write(content)
            permit(file.fileno(), self.index)

    def delete_file(self, path: Path) -> None:
        """Deletes the file `path`, if there is one. Raises StoreError."""
        with making(path):
            path.unlink(missing_ok=True)

    def has_offsets(self, version: FaissVersion, rows: int) -> bool:
        path = self.offsets(version)
        return alone(path) and path.stat().st_size == 4 * rows

    def map_offsets(self, version: FaissVersion, rows: int) -> np.memmap:
        """The offsets of `version`, mapped: float32 [rows], NaN where none is written yet. Raises StoreError where the
        file is not of as many `rows`."""
        path = self.offsets(version)
        if not self.has_offsets(version, rows):
            raise StoreError(
                f"{str(path)!r} has no offsets for {rows} targets; run apply again"
            )
        with making(path), open_own(path, os.O_RDWR) as file:
            return np.memmap(file, np.float32, "r+", shape=(rows,))

    def require(self) -> None:
        """Raises StoreError if something else has the name of the folder or of what lies in it. A link might lead to
        what is somebody else's, so that it would be written to, given away or deleted."""
        for path in (self.path, self.lock, *self.files()):
            kind, expected = (
                kind_of(path),
                "a folder" if path == self.path else "a file",
            )
            if kind not in ("", expected):
                raise StoreError(
                    f"{str(path)!r} is {kind}, where hubplugin keeps {expected}; move it away"
                )

    def require_room(self, needed: int) -> None:
        """Raises StoreError if no files of so many bytes can be made here. What is half-written goes before, or is part
        of them."""
        freed = sum(
            path.stat().st_size
            for path in self.files()
            if path.suffix in (".offsets", ".faiss")
        )
        for folder in (self.index.parent, self.path):
            if folder.is_dir():
                require_room(folder, needed - freed)

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

    def keep(self, models: Collection[int], offsets: Collection[int]) -> None:
        """Deletes what no run needs: new files, and all but the `models` and `offsets` of versions with these numbers.
        What somebody else has put here stays. Raises OSError."""
        for path in self.files():
            name = OURS.fullmatch(path.name)
            assert name is not None
            needed = {"model": models, "offsets": offsets}.get(name[3])
            if (
                path == self.new_index
                or name[4]
                or (needed is not None and int(name[2]) not in needed)
            ):
                path.unlink()

    def delete(self) -> None:
        """Deletes all that lies here under a name of ours, but for the lock. Raises OSError."""
        for path in self.files():
            path.unlink()

    def delete_if_empty(self) -> None:
        """Deletes the folder if nothing but the lock is in it. Raises OSError."""
        if self.path.is_dir() and not [
            path for path in self.path.iterdir() if path != self.lock
        ]:
            self.lock.unlink(missing_ok=True)
            self.path.rmdir()


def date_of(place: Path) -> str:
    """When the file `place` was written, as `Correction.made` has it."""
    return datetime.fromtimestamp(place.stat().st_mtime, timezone.utc).isoformat(
        timespec="seconds"
    )


TRIES = 100
"""How often the lock is asked for again because another run has just deleted it with its folder."""


def lock_folder(folder: HubFolder) -> BinaryIO:
    """The lock of `folder`, opened and locked until it is closed, or the process is killed. Waits for nobody: raises
    StoreError if another run has it."""
    for _ in range(TRIES):
        folder.make()
        with making(folder.lock):
            try:
                lock = open_own(folder.lock, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:
                continue  # another run has deleted the folder
        if fcntl is None:
            return lock
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.lock.exists() and os.path.samestat(
                os.fstat(lock.fileno()), folder.lock.lstat()
            ):
                if alone(folder.lock):
                    with contextlib.suppress(
                        OSError
                    ):  # it is there all the same, only without a name
                        lock.truncate(0)
                        os.write(
                            lock.fileno(),
                            f"process {os.getpid()} on {socket.gethostname()}".encode(),
                        )
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
            raise StoreError(
                f"{str(folder.lock)!r} cannot be locked: {error.strerror}; nothing was changed"
            ) from None
        lock.close()
    raise StoreError(
        f"{str(folder.path)!r} is deleted again and again by other runs; nothing was changed"
    )
