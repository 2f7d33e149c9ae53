"""Files of our own: written whole or not at all, and never through a link to what is somebody else's."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".tmp"
"""How the name ends that a file has until it is whole: `<name>.<8 hex digits>.tmp`."""


def open_own(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> BinaryIO:
    """The file `path`, opened with these `flags` of os.open, if it is a file of our own.

    Raises OSError for a link, and for what is no regular file: reading a pipe might never end.
    """
    try:
        descriptor = os.open(path, flags | _NO_LINK, 0o600)
    except OSError as error:
        raise (
            OSError(error.errno, "it is a link") if os.path.islink(path) else error
        ) from None
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        code = errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL
        raise OSError(code, os.strerror(code) if code == errno.EISDIR else NOT_REGULAR)
    return os.fdopen(descriptor, "r+b" if flags & os.O_RDWR else "rb")


_NO_LINK = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)


NOT_REGULAR = "it is no regular file"


def lack_of_room(folder: str | os.PathLike[str], needed: int = 0) -> str:
    """Why no file of `needed` bytes can be made in `folder`, as far as that can be told without leaving one; ""
    otherwise. Asked before a work that ends with it."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return error.strerror or str(error)
    short = f"{os.strerror(errno.ENOSPC)}, {needed:,} bytes are needed and {free:,} were free"
    return short if free < needed else ""


@contextmanager
def replacing(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file to write to, which takes the place of the file `path` once all of it is on the disk.

        with replacing("photos.hub") as file:
            file.write(content)

    Until then it lies beside `path` as `<path>.<8 hex digits>.tmp`. That name is taken exclusively: two writers do not
    share it, and nothing that lies there is written to, a link neither. Whatever is raised meanwhile, it is deleted and
    `path` is as it was; only a process that is killed outright leaves it.

    Args:
        path: a link is itself replaced.
        mode: of the new file, less the umask.

    Raises:
        OSError: as where a device or a pipe has the name.
        ValueError: the path has a null byte.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, NOT_REGULAR)
    temporary = Path(f"{os.fspath(path)}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    file = open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write(path: str | os.PathLike[str], content: bytes, mode: int = 0o666) -> None:
    """Replaces the file `path` by one with this `content` and `mode`, as `replacing` does."""
    with replacing(path, mode) as file:
        file.write(content)
