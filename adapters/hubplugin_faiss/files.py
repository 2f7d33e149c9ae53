"""Index files as they lie on a disk: told apart, read by Faiss into memory, and written whole."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import faiss

from hubplugin.atomic import open_own
from hubplugin.errors import StoreError
from hubplugin_faiss.handlers.base import reason

ENDS = 64 << 10
"""Bytes at the head and at the end of a file that tell it from another one of the same size and time."""


def stamp_of(path: str | os.PathLike[str]) -> str:
    """What tells the file `path` from any other that takes its place: its number, size and time, and a hash of its head
    and end. "" where there is none."""
    try:
        with open_own(os.path.realpath(path)) as file:
            status, ends = os.fstat(file.fileno()), hashlib.sha256(file.read(ENDS))
            file.seek(max(status.st_size - ENDS, 0))
            ends.update(file.read(ENDS))
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StoreError(
            f"{os.fspath(path)!r} cannot be read: {error.strerror}"
        ) from None
    return (
        f"{status.st_ino}|{status.st_size}|{status.st_mtime_ns}|{ends.hexdigest()[:16]}"
    )


def require_unchanged(path: str | os.PathLike[str], stamp: str) -> None:
    """Raises StoreError unless the file `path` still has this `stamp`."""
    if stamp_of(path) != stamp:
        raise StoreError(
            f"{os.fspath(path)!r} was changed by another program since it was read; it stays as that program left it: "
            "run this again"
        )


LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"
"""Where a container finds how much memory it may have."""


def available_memory() -> int | None:
    """The bytes of memory that this process may still take; None where the system does not say."""
    try:
        with open("/proc/meminfo") as lines:
            free = next(
                int(line.split()[1]) << 10
                for line in lines
                if line.startswith("MemAvailable:")
            )
    except (OSError, StopIteration):
        return None
    for path in LIMITS:
        with suppress(OSError, ValueError):  # ValueError: "max" stands for no limit
            free = min(free, int(Path(path).read_text()))
    return free


def require_memory(path: str | os.PathLike[str], copies: int, work: str) -> None:
    """Raises StoreError if there is no memory for `copies` of the index in the file `path`, which `work` takes."""
    needed, free = copies * os.path.getsize(path), available_memory()
    if free is not None and needed > free:
        raise StoreError(
            f"{work} {os.fspath(path)!r} takes {needed:,} bytes of memory, and {free:,} are available; do it on a "
            "machine with more, or split the index into several files"
        )


def read_faiss(path: str | os.PathLike[str]) -> faiss.Index:
    """The index in the file `path`; raises StoreError, one line, if there is none, memory has no room for it, or Faiss
    refuses it."""
    if not Path(path).is_file():
        fault = (
            "is a folder, not an index file"
            if Path(path).is_dir()
            else "does not exist"
        )
        raise StoreError(f"{os.fspath(path)!r} {fault}")
    require_memory(path, 1, "reading")
    try:
        index = faiss.read_index(os.fspath(path))
    except (RuntimeError, MemoryError) as error:
        raise StoreError(
            f"Faiss cannot read {os.fspath(path)!r}: {reason(error)}"
        ) from None
    for name, size, expected in sizes(index):
        if size != expected:
            raise StoreError(
                f"{os.fspath(path)!r} is damaged: {name} {size}, expected {expected}; restore it"
            )
    return index


def sizes(index: faiss.Index) -> Iterator[tuple[str, int, int]]:
    """What in an index has a size, that size, and the one that it must have. Faiss reads a file whose parts do not fit,
    and then reads memory that is none of theirs."""
    index = faiss.downcast_index(index)
    name, d, n = type(index).__name__, int(index.d), int(index.ntotal)
    if n:
        yield f"training of its {name}:", int(index.is_trained), 1
    for part in ("index", "base_index", "refine_index", "storage"):
        if hasattr(index, part):
            inner = faiss.downcast_index(getattr(index, part))
            yield f"entries within its {name}:", int(inner.ntotal), n
            if not isinstance(index, faiss.IndexPreTransform):
                yield f"dimensions within its {name}:", int(inner.d), d
            yield from sizes(inner)
    if isinstance(index, faiss.IndexPreTransform):
        for number in range(index.chain.size()):
            link = faiss.downcast_VectorTransform(index.chain.at(number))
            yield f"dimensions before its {type(link).__name__}:", link.d_in, d
            yield from sizes_of_transform(link)
            d = link.d_out
        yield f"dimensions behind the transforms of its {name}:", int(index.index.d), d
    if isinstance(index, faiss.IndexIDMap):
        yield f"ids of its {name}:", index.id_map.size(), n
    if isinstance(index, faiss.IndexIVF):
        quantizer, lists = faiss.downcast_index(index.quantizer), index.invlists
        yield f"centroids of its {name}:", int(quantizer.ntotal), int(index.nlist)
        yield f"dimensions of the centroids of its {name}:", int(quantizer.d), d
        yield f"inverted lists of its {name}:", int(lists.nlist), int(index.nlist)
        yield f"entries in the lists of its {name}:", int(lists.compute_ntotal()), n
        yield from sizes(quantizer)
    elif isinstance(index, faiss.IndexFastScan):
        packer = index.get_CodePacker()
        yield (
            f"bytes of codes of its {name}:",
            index.codes.size(),
            -(-n // packer.nvec) * packer.block_size,
        )
    elif isinstance(index, faiss.IndexFlatCodes):
        yield (
            f"bytes of codes of its {name}:",
            index.codes.size(),
            n * int(index.code_size),
        )
    if isinstance(index, faiss.IndexHNSW):
        yield f"nodes of its {name}:", index.hnsw.levels.size(), n
    for quantiser in (
        getattr(index, part) for part in ("sq", "pq") if hasattr(index, part)
    ):
        yield f"dimensions of the quantiser of its {name}:", int(quantiser.d), d
    if hasattr(index, "pq"):
        yield (
            f"codebooks of its {name}:",
            index.pq.centroids.size(),
            d * int(index.pq.ksub),
        )


def sizes_of_transform(link: faiss.VectorTransform) -> Iterator[tuple[str, int, int]]:
    """The same of a transform."""
    name = type(link).__name__
    if isinstance(link, faiss.RemapDimensionsTransform):
        sources = faiss.vector_to_array(link.map)
        yield f"dimensions of its {name}:", len(sources), link.d_out
        yield f"unknown dimensions in its {name}:", int((sources >= link.d_in).sum()), 0
    elif isinstance(link, faiss.CenteringTransform):
        yield f"dimensions of its {name}:", link.mean.size(), link.d_in
    elif isinstance(link, faiss.LinearTransform):
        yield f"numbers in its {name}:", link.A.size(), link.d_in * link.d_out
        yield (
            f"numbers in the shift of its {name}:",
            link.b.size(),
            link.d_out if link.have_bias else link.b.size(),
        )


def write_index_file(path: Path, index: faiss.Index, like: Path) -> None:
    """Writes an index to a file, and flushes it.

    Args:
        path: where nothing may lie yet.
        index: any index.
        like: who may read this file may read the new one, and nobody else.

    Raises:
        StoreError: the file cannot be written.
    """
    opener = functools.partial(os.open, mode=0o600)
    with making(path, like.stat().st_size), open(path, "xb", opener=opener) as file:
        try:
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))
        except RuntimeError as error:
            raise StoreError(
                f"Faiss cannot write {os.fspath(path)!r}: {reason(error)}"
            ) from None
        file.flush()
        os.fsync(file.fileno())
        permit(file.fileno(), like)


def permit(descriptor: int, like: Path) -> None:
    """Gives an open file or folder, by its `descriptor`, the mode and the owner of the file `like`; a name might lead
    elsewhere by now. Raises OSError."""
    status = like.stat()
    mode = status.st_mode & 0o777
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        mode |= 0o700 | (mode & 0o444) >> 2  # who reads a folder also enters it
    os.fchmod(descriptor, mode)
    with suppress(OSError):  # only root may
        os.fchown(descriptor, status.st_uid, status.st_gid)


FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
"""What the system says where a disk, a quota or the largest size of a file leaves no room."""


@contextmanager
def making(path: Path, needed: int | None = None) -> Iterator[None]:
    """While `path` is written: an OSError becomes a StoreError of one line, which says where room lacks how many bytes
    are `needed`."""
    free = None
    try:
        free = shutil.disk_usage(path.parent).free
        yield
    except OSError as error:
        text = f"cannot write {str(path)!r}: {error.strerror or error}"
        if error.errno in FULL and needed is not None and free is not None:
            text += f", {needed:,} bytes are needed and {free:,} were free"
        raise StoreError(f"{text}; nothing was changed") from None


def flush_names(*folders: Path) -> str:
    """Waits until the names in `folders` are on the disk; why that cannot be, "" where it can."""
    try:
        for folder in folders:
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        return f"the folder could not be flushed: {error.strerror}"
    return ""
