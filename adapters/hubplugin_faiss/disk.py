"""Room on the disk: taken before it is used, and one line that says how much lacked."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hubplugin.errors import StoreError

FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
"""What the system says where a disk, a quota or the largest size of a file leaves no room."""

UNKNOWN = errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP
"""What it says where a file system cannot give room in advance."""


@contextmanager
def making(path: str | os.PathLike[str], needed: int | None = None) -> Iterator[None]:
    """While `path` is made, a file of `needed` bytes. An OSError removes it, and becomes a StoreError of one line."""
    free = None
    try:
        free = shutil.disk_usage(Path(path).parent).free
        yield
    except OSError as error:
        if Path(path).is_file():
            os.unlink(path)
        raise cannot_write(path, error, needed, free) from None


def cannot_write(
    path: str | os.PathLike[str], error: OSError, needed: int | None = None, free: int | None = None
) -> StoreError:
    """The error to raise where `path` cannot be written. needed, free: bytes, to be told where room lacks."""
    text = f"cannot write {os.fspath(path)!r}: {error.strerror or error}"
    if error.errno in FULL and needed is not None and free is not None:
        text += f", {needed:,} bytes are needed and {free:,} were free"
    return StoreError(f"{text}; nothing was changed")


def take_room(file: BinaryIO, size: int, start: int = 0) -> None:
    """Makes room on the disk for the bytes [start, start + size) of `file`. A map of a file with holes ends the process
    where the disk is full. Raises OSError."""
    if not size:
        return
    try:
        os.posix_fallocate(file.fileno(), start, size)
        return
    except AttributeError:  # not every system has it
        pass
    except OSError as error:
        if error.errno not in UNKNOWN:
            raise
    file.seek(start)
    for first in range(0, size, 1 << 20):
        file.write(bytes(min(1 << 20, size - first)))
    file.flush()


def room_for_offsets(path: Path, rows: int) -> np.ndarray:
    """A file of float32 [rows] with room for all of them, mapped."""
    with making(path, 4 * rows):
        with path.open("wb") as file:
            take_room(file, 4 * rows)
        return np.memmap(path, np.float32, "r+", shape=(rows,))
