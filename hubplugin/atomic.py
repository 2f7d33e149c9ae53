"""Files of our own: written whole or not at all, and never through a link."""

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
"""End of the name of a file until it is whole: `<name>.<8 hex digits>.tmp`."""


NOT_REGULAR = "it is no regular file"


def open_own(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a file of our own with these `flags` of os.open.

    Raises OSError for a link, and for what is no regular file: reading a pipe might
    never end.
    """
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # none is on all systems
        flags |= getattr(os, name, 0)
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if os.path.islink(path):
            raise OSError(error.errno, "it is a link") from None
        raise
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFREG:
        return os.fdopen(descriptor, "r+b" if flags & os.O_RDWR else "rb")
    os.close(descriptor)
    if kind == stat.S_IFDIR:
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, NOT_REGULAR)


def lack_of_room(folder: str | os.PathLike[str], needed: int = 0) -> str:
    """Return why no file of `needed` bytes can be made in `folder`, "" if it can.

    No file is left behind. It is asked before a work that ends with such a file.
    """
    try:
        tempfile.TemporaryFile(dir=folder).close()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return error.strerror or str(error)
    if free >= needed:
        return ""
    full = os.strerror(errno.ENOSPC)
    return f"{full}, {needed:,} bytes are needed and {free:,} were free"


@contextmanager
def replacing(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a new file that replaces the file `path` once all of it is on the disk.

        with replacing("photos.hub") as file:
            file.write(content)

    Until then it lies beside `path` as `<path>.<8 hex digits>.tmp`. That name is taken
    exclusively: two writers do not share it, and nothing that lies there is written to,
    a link neither. Whatever is raised meanwhile, it is deleted and `path` is as it was;
    only a process that is killed outright leaves it.

    Args:
        path: A link is itself replaced.
        mode: The mode of the new file, less the umask.

    Raises:
        OSError: It cannot be written, or a device or a pipe has the name.
        ValueError: The path has a null byte.
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


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace the file `path` by one with this `content`, as `replacing` does."""
    with replacing(path) as file:
        file.write(content)
