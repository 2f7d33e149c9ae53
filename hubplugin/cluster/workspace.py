"""What tasks have found, a file for each step and shard: a run that is started again does none of it again."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import re
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from hubplugin import atomic
from hubplugin.compute import ShardResult
from hubplugin.errors import ClusterError

try:
    import fcntl
except ImportError:  # where there is none, nobody is kept away
    fcntl = None  # type: ignore[assignment]


MADE = b"made by hubplugin"
"""What the lock of a folder says that goes with it."""


STEP, FOUND = re.compile(".*-[0-9a-f]{16}").fullmatch, re.compile(r"\d{5}-[0-9a-f]{16}\.npz.*").fullmatch
"""The names of the folder of a step, and of what a task has found in a shard; a kill may have left it half-written."""


class Workspace:
    """The folder of one run, which goes when the run ends well. folder: None is one in the temporary folder, which goes
    in every case.

    Raises ClusterError if the folder cannot be written, or another run is at work in it.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None):
        self._is_own = folder is None
        try:
            self.path = Path(tempfile.mkdtemp(prefix="hubplugin-") if folder is None else folder).absolute()
            is_new = self._is_own or not self.path.is_dir()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = atomic.opened(self.path / "lock", os.O_RDWR | os.O_CREAT)
            if self._lock.read(len(MADE) + 1) not in (b"", MADE) or not atomic.alone(self.path / "lock"):
                raise OSError(errno.EEXIST, "its file 'lock' is somebody else's; name another folder")
            if is_new:
                self._lock.write(MADE)
                self._lock.flush()
        except OSError as error:
            raise ClusterError(
                f"cannot write in {os.fspath(folder or tempfile.gettempdir())!r}: {error.strerror}"
            ) from None
        if fcntl is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._lock.close()
                raise ClusterError(f"another run is at work in {str(self.path)!r}; wait until it ends") from None

    def read(self, step: str, shard: str) -> ShardResult | None:
        """What a task found before; None where it did not run, or its file is damaged."""
        try:
            with atomic.opened(self._file(step, shard)) as file, np.load(file, allow_pickle=False) as found:
                return {name: found[name] for name in found.files}
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
            return None

    def write(self, step: str, shard: str, found: ShardResult) -> None:
        """Whole or not at all."""
        file = self._file(step, shard)
        try:
            file.parent.mkdir(exist_ok=True)
            if file.parent.is_symlink():
                raise OSError(errno.ELOOP, f"{file.parent.name} is a link")
            with atomic.replacing(file) as opened:
                np.savez(opened, **found)  # type: ignore[arg-type]
        except OSError as error:
            raise ClusterError(
                f"{str(self.path)!r} cannot keep what the workers found: {error.strerror}; make room, and run it "
                "again: what is there is not done again"
            ) from None

    def _file(self, step: str, shard: str) -> Path:
        return self.path / step / f"{shard}.npz"

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Removes what runs have left here if nothing went wrong; else what was found stays for the next run."""
        if error is None or self._is_own:
            for folder in self.path.iterdir():
                if atomic.kind_of(folder) == "a folder" and STEP(folder.name):
                    with contextlib.suppress(OSError):  # somebody else has put something there
                        for file in filter(lambda file: FOUND(file.name), folder.iterdir()):
                            file.unlink()
                        folder.rmdir()
            self._lock.seek(0)
            made = self._lock.read() == MADE
            (self.path / "lock").unlink(missing_ok=True)
            if made:
                with contextlib.suppress(OSError):  # somebody else has put something there
                    self.path.rmdir()
        self._lock.close()


def step_name(what: str, *parts: object) -> str:
    """A folder for all that is done of `what`: another one where any of `parts` is another."""
    digest = hashlib.sha256()
    for part in parts:
        _add(digest, part)
    return f"{re.sub('[^a-z0-9]+', '-', what.lower())}-{digest.hexdigest()[:16]}"


def _add(digest: hashlib._Hash, part: object) -> None:
    """Adds what `part` is: its type, and an array or a dataclass by its content."""
    digest.update(f"{type(part).__name__}:".encode())
    if isinstance(part, np.ndarray):
        digest.update(repr((part.shape, part.dtype.str)).encode())
        digest.update(np.ascontiguousarray(part).data)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            if field.compare:
                _add(digest, getattr(part, field.name))
    elif isinstance(part, (tuple, list)):
        for each in part:
            _add(digest, each)
    else:
        digest.update(repr(part).encode())
    digest.update(b";")
