"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".tmp"
"""How the name ends that a file has until it is whole: `<name>.<8 hex digits>.tmp`."""


@contextmanager
def replacing(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file to write to, which takes the place of the file `path` once all of it is on the disk.

        with replacing("photos.hub") as file:
            file.write(content)

    Until then it lies beside `path` under a name of its own, `<path>.<8 hex digits>.tmp`. That name is taken
    exclusively: two writers do not share it, and nothing that lies there is written to, a link neither. Whatever is
    raised meanwhile, it is deleted and `path` is as it was; only a process that is killed outright leaves it.
    A link at `path` is itself replaced. mode: of the new file, less the umask.
    Raises OSError, and ValueError for a path with a null byte.
    """
    beside = Path(f"{os.fspath(path)}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    file = open(beside, "xb", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write(path: str | os.PathLike[str], content: bytes, mode: int = 0o666) -> None:
    """Puts a file with this content in the place of the file `path`, as `replacing` does."""
    with replacing(path, mode) as file:
        file.write(content)
