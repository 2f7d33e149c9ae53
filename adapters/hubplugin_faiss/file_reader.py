"""Reads index files, and the model that lies beside each."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import faiss
import numpy as np

from hubplugin.errors import ModelFileError, StoreError
from hubplugin.model import OffsetModel, load
from hubplugin_faiss.checks import has_fingerprint
from hubplugin_faiss.faiss_objects import reason
from hubplugin_faiss.gallery import Gallery
from hubplugin_faiss.handlers import handler_for

PAGES_KEPT = 256 << 20
"""The pages of a mapped file are given back each time that about this much of it has been read."""


def beside(path: str | os.PathLike[str], suffix: str) -> Path:
    return Path(f"{os.fspath(path)}{suffix}")


def read_index(path: str | os.PathLike[str]) -> tuple[faiss.Index, OffsetModel | None]:
    """Reads the index in the file `path`, and its model.

    Returns:
        The index, and the model that its offsets are from; None if they are from no model or it is not upgraded.

    Raises:
        StoreError: Faiss cannot read the file, or its model is missing or belongs to another index.
    """
    index = read_faiss(path)
    return index, model_of(path, index)


def model_of(path: str | os.PathLike[str], index: faiss.Index) -> OffsetModel | None:
    """The model beside the file `path` that holds `index`; see `read_index`."""
    handler = handler_for(index)
    if not handler.is_upgraded() or has_fingerprint(handler, ""):
        return None
    model_path = beside(path, ".hub")
    found = [candidate for candidate in (model_path, beside(model_path, ".new")) if candidate.exists()]
    damaged = None
    for candidate in found:
        try:
            model = load(candidate)
        except ModelFileError as error:
            damaged = error
            continue
        if has_fingerprint(handler, model.fingerprint):
            return model
    if damaged is not None:
        raise StoreError(str(damaged))
    what = f"{model_path.name} is the model of another index" if found else f"its model {model_path.name} is missing"
    raise StoreError(f"{os.fspath(path)} is upgraded, but {what}; put the right one beside it, or downgrade the index")


def read_faiss(path: str | os.PathLike[str], *, mapped: bool = False) -> faiss.Index:
    """The index in the file `path`, in memory or mapped; raises StoreError, one line, if there is none or Faiss
    refuses it."""
    if not Path(path).is_file():
        what = "is a folder, not an index file" if Path(path).is_dir() else "does not exist"
        raise StoreError(f"{os.fspath(path)!r} {what}")
    try:
        return faiss.read_index(os.fspath(path), faiss.IO_FLAG_MMAP_IFC if mapped else 0)
    except RuntimeError as error:
        raise StoreError(f"Faiss cannot read {os.fspath(path)!r}: {reason(error)}") from None


class MappedGallery(Gallery):
    """The vectors of an index that is mapped from a file. Pages of the files `mapped` are given back as it is read."""

    def __init__(self, mapped: Sequence[Path], index: faiss.Index, *, unit: bool):
        super().__init__(index, mapped[0].name, unit=unit)
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
