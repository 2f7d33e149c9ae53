"""Reads index files, and the model that belongs to each."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np

from hubplugin.errors import ModelFileError, StoreError
from hubplugin.model import OffsetModel, load
from hubplugin_faiss.checks import has_fingerprint
from hubplugin_faiss.faiss_objects import reason
from hubplugin_faiss.gallery import Gallery
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.hub_folder import MODEL, HubFolder

PAGES_KEPT = 256 << 20
"""The pages of a mapped file are given back each time that about this much of it has been read."""


MAPPED = 1 << 30
"""Files of more bytes are mapped, not read: whoever overwrites one in place that is mapped ends this process."""

ENDS = 64 << 10
"""Bytes at the head and at the end of a file that tell it from another one of the same size and time."""


TRIES = 3
"""How often a file is read that another program replaces meanwhile."""


def read_index(path: str | os.PathLike[str]) -> tuple[faiss.Index, OffsetModel | None]:
    """Reads the index in the file `path`, and its model.

    Returns:
        The index, and the model that its offsets are from; None if they are from no model or it is not upgraded.

    Raises:
        StoreError: Faiss cannot read the file, or its model is missing or belongs to another index.
    """
    read = read_file(path, mapped=False)
    return read.index, read.require_model()


@dataclass(frozen=True)
class Read:
    """What was in an index file when it had this `stamp`. model: that of the offsets, or why there is none to be had;
    None if the index is not upgraded, or by offsets of no model."""

    index: faiss.Index
    model: OffsetModel | StoreError | None
    stamp: str

    def require_model(self) -> OffsetModel | None:
        if isinstance(self.model, StoreError):
            raise self.model
        return self.model


def read_file(path: str | os.PathLike[str], *, mapped: bool | None = None) -> Read:
    """Reads the index in the file `path`, and its model. mapped: by default, if the file is large.

    Raises StoreError as `read_faiss` does, and if the file changes whenever it is read.
    """
    for _ in range(TRIES):
        require_file(path)
        stamp = stamp_of(path)
        index = read_faiss(path, mapped=os.path.getsize(path) > MAPPED if mapped is None else mapped)
        model = _model_of(path, index)
        if stamp_of(path) == stamp:
            return Read(index, model, stamp)
    raise StoreError(f"{os.fspath(path)!r} is being changed by another program; wait until it ends")


def stamp_of(path: str | os.PathLike[str]) -> str:
    """What tells the file `path` from any other that takes its place: its number, size and time, and a hash of its head
    and end. "" where there is none."""
    try:
        with open(path, "rb") as file:
            status, ends = os.fstat(file.fileno()), hashlib.sha256(file.read(ENDS))
            file.seek(max(status.st_size - ENDS, 0))
            ends.update(file.read(ENDS))
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StoreError(f"{os.fspath(path)!r} cannot be read: {error.strerror}") from None
    return f"{status.st_ino}|{status.st_size}|{status.st_mtime_ns}|{ends.hexdigest()[:16]}"


def require_unchanged(path: str | os.PathLike[str], stamp: str) -> None:
    """Raises StoreError unless the file `path` still has this `stamp`."""
    if stamp_of(path) != stamp:
        raise StoreError(
            f"{os.fspath(path)!r} was changed by another program since it was read; it stays as that program left it: "
            "run this again"
        )


def _model_of(path: str | os.PathLike[str], index: faiss.Index) -> OffsetModel | StoreError | None:
    """The model of the `index` in the file `path`; see `Read`."""
    handler, folder = handler_for(index), HubFolder(path)
    if not handler.is_upgraded() or has_fingerprint(handler, ""):
        return None
    why = f"its model {str(folder.model)!r} is missing"
    for place in (folder.model, folder.pending / MODEL):
        if not place.exists():
            continue
        try:
            model = load(place)
        except ModelFileError as error:
            why = str(error)
            continue
        if has_fingerprint(handler, model.fingerprint):
            return model
        why = f"{str(place)!r} is the model of another index"
    try:
        folder.require()
    except StoreError as error:
        return error
    return StoreError(
        f"{os.fspath(path)!r} is upgraded, but {why}; put the right one there, or take the correction out: "
        f"hubplugin remove faiss:{os.fspath(path)}"
    )


def require_file(path: str | os.PathLike[str]) -> None:
    """Raises StoreError unless `path` is a file."""
    if not Path(path).is_file():
        what = "is a folder, not an index file" if Path(path).is_dir() else "does not exist"
        raise StoreError(f"{os.fspath(path)!r} {what}")


def read_faiss(path: str | os.PathLike[str], *, mapped: bool = False) -> faiss.Index:
    """The index in the file `path`, in memory or mapped; raises StoreError, one line, if there is none or Faiss
    refuses it."""
    require_file(path)
    try:
        return faiss.read_index(os.fspath(path), faiss.IO_FLAG_MMAP_IFC if mapped else 0)
    except RuntimeError as error:
        raise StoreError(f"Faiss cannot read {os.fspath(path)!r}: {reason(error)}") from None


class MappedGallery(Gallery):
    """The vectors of an index that is mapped from a file. Pages of the files `mapped` are given back as it is read."""

    def __init__(self, mapped: Sequence[Path], index: faiss.Index, name: str, *, unit: bool):
        super().__init__(index, name, unit=unit)
        self._mapped = mapped

    def _raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        read = 0
        for block in super()._raw_blocks(size):
            yield block
            read += block.nbytes
            if read > PAGES_KEPT:
                give_back_pages(*self._mapped)
                read = 0


def give_back_pages(*paths: Path) -> None:
    """Lets the kernel drop pages of the mapped files `paths`, so that files larger than memory do not fill it.

    Pages that are needed again are read again.
    """
    if not sys.platform.startswith("linux"):
        return
    libc, names = ctypes.CDLL(None), tuple(os.path.realpath(path) for path in paths)
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip("\n").endswith(names):
                first, _, last = line.split(maxsplit=1)[0].partition("-")
                start = int(first, 16)
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(int(last, 16) - start), 4)  # MADV_DONTNEED
