"""Files that hubplugin owns: written completely or not at all, never through a link."""

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
"""The suffix of an incomplete file: `<name>.<8 hex digits>.tmp`."""

NOT_REGULAR = "it is not a regular file"


def open_own(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a file that hubplugin owns with these `flags` of os.open.

    Raises OSError for a link, and for anything else that is not a regular file: reading
    a pipe might never end.
    """
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # some systems lack one
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


def reason(error: Exception) -> str:
    """Return the words of an error, without its number and without a temporary name."""
    return getattr(error, "strerror", None) or str(error)


def lack_of_room(folder: str | os.PathLike[str], needed: int = 0) -> str:
    """Return why a file of `needed` bytes cannot be created in `folder`, or "".

    No file is left behind. Call this before long work whose result is such a file.
    """
    try:
        tempfile.TemporaryFile(dir=folder).close()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return reason(error)
    if free >= needed:
        return ""
    full = os.strerror(errno.ENOSPC)
    return f"{full}, {needed:,} bytes are needed and {free:,} were free"


@contextmanager
def replacing(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a new file that replaces the file `path` once it is completely on disk.

        with replacing("photos.hub") as file:
            file.write(content)

    Until then, the file is beside `path`, as `<path>.<8 hex digits>.tmp`. It is created
    exclusively: two writers never share it, and no existing file or link is written to.
    If an error is raised, the new file is deleted and `path` stays unchanged. The new
    file is left behind only if the process is killed.

    Args:
        path: The file to replace. If it is a link, the link is replaced.
        mode: The mode of the new file, before the umask.

    Raises:
        OSError: The file cannot be written, or `path` is a device or a pipe.
        ValueError: The path contains a null byte.
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
    """Replace the file `path` by one with this `content`. See `replacing`."""
    with replacing(path) as file:
        file.write(content)
