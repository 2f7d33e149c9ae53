"""Index files as they lie on a disk: told apart, read by Faiss, and written piece by piece."""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin.vectors import Progress
from hubplugin_faiss.disk import making, take_room
from hubplugin_faiss.encoding.layout import Assemble, EncodedIndex, in_memory
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.base import reason

PAGES_KEPT = 64 << 20
"""The pages of a mapped file are given back each time that about this much of it has been read."""


ENDS = 64 << 10
"""Bytes at the head and at the end of a file that tell it from another one of the same size and time."""


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
        index = faiss.read_index(os.fspath(path), faiss.IO_FLAG_MMAP_IFC if mapped else 0)
    except (RuntimeError, MemoryError) as error:
        raise StoreError(f"Faiss cannot read {os.fspath(path)!r}: {reason(error)}") from None
    for what, found, expected in sizes(index):
        if found != expected:
            raise StoreError(f"{os.fspath(path)!r} is damaged: {what} {found}, expected {expected}; restore it")
    return index


def sizes(given: faiss.Index) -> Iterator[tuple[str, int, int]]:
    """What in an index has a size, that size, and the one that it must have. Faiss reads a file whose parts do not fit,
    and then reads memory that is none of theirs."""
    index = faiss.downcast_index(given)
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
        yield f"bytes of codes of its {name}:", index.codes.size(), -(-n // packer.nvec) * packer.block_size
    elif isinstance(index, faiss.IndexFlatCodes):
        yield f"bytes of codes of its {name}:", index.codes.size(), n * int(index.code_size)
    if isinstance(index, faiss.IndexHNSW):
        yield f"nodes of its {name}:", index.hnsw.levels.size(), n
    for quantiser in (getattr(index, part) for part in ("sq", "pq") if hasattr(index, part)):
        yield f"dimensions of the quantiser of its {name}:", int(quantiser.d), d
    if hasattr(index, "pq"):
        yield f"codebooks of its {name}:", index.pq.centroids.size(), d * int(index.pq.ksub)


def sizes_of_transform(link: faiss.VectorTransform) -> Iterator[tuple[str, int, int]]:
    """The same of a transform."""
    name = type(link).__name__
    if isinstance(link, faiss.RemapDimensionsTransform):
        kept = faiss.vector_to_array(link.map)
        yield f"dimensions of its {name}:", len(kept), link.d_out
        yield f"unknown dimensions in its {name}:", int((kept >= link.d_in).sum()), 0
    elif isinstance(link, faiss.CenteringTransform):
        yield f"dimensions of its {name}:", link.mean.size(), link.d_in
    elif isinstance(link, faiss.LinearTransform):
        yield f"numbers in its {name}:", link.A.size(), link.d_in * link.d_out
        yield f"numbers in the shift of its {name}:", link.b.size(), link.d_out if link.have_bias else link.b.size()


def give_back_pages(*paths: Path) -> None:
    """Lets the kernel drop pages of the mapped files `paths`, so that files larger than memory do not fill it.

    Pages that are needed again are read again. Files of less than `PAGES_KEPT` stay: to find where a file is mapped
    takes longer than to search a small one.
    """
    small = sum(path.stat().st_size for path in paths if path.exists()) <= PAGES_KEPT
    if small or not sys.platform.startswith("linux"):
        return
    libc, names = ctypes.CDLL(None), tuple(os.path.realpath(path) for path in paths)
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip("\n").endswith(names):
                first, _, last = line.split(maxsplit=1)[0].partition("-")
                start = int(first, 16)
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(int(last, 16) - start), 4)  # MADV_DONTNEED


def write_index_file(
    path: Path, make: Callable[[Assemble], faiss.Index], mapped: Sequence[Path], progress: Progress | None
) -> None:
    """Writes what `make` makes to the file `path`, and its inverted lists to their files, and flushes them.

    Codes are replaced by a random placeholder, Faiss serialises the rest, and the codes are streamed in at the position
    of the placeholder. Room on the disk is taken first. Raises StoreError if the file cannot be written.
    """
    placeholders: list[tuple[EncodedIndex, bytes]] = []

    def with_placeholder(encoded: EncodedIndex) -> faiss.Index:
        placeholder = _placeholder(encoded)
        if placeholder is None:
            return in_memory(encoded)
        placeholders.append((encoded, placeholder))
        return encoded.empty

    index = make(with_placeholder)
    if not placeholders:
        _write_whole(index, path)
        for name in handler_for(index).files():
            with open(name, "rb+") as written:
                os.fsync(written.fileno())
        return
    frame = faiss.serialize_index(index).tobytes()
    places = sorted((_place(frame, placeholder), number) for number, (_, placeholder) in enumerate(placeholders))
    done, total = 0, sum(int(encoded.empty.ntotal) for encoded, _ in placeholders)
    needed = len(frame) + sum(_size(encoded) for encoded, _ in placeholders)
    with making(path, needed), path.open("wb") as file:
        take_room(file, needed)
        position = 0
        for place, number in places:
            encoded, placeholder = placeholders[number]
            file.write(frame[position:place])
            for count in _write_codes(encoded, file):
                done += count
                give_back_pages(*mapped)
                if progress is not None:
                    progress("writing the index", done, total)
            position = place + len(placeholder)
        file.write(frame[position:])
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def _write_whole(index: faiss.Index, path: Path) -> None:
    """Writes `index` as Faiss does: first to nowhere, to learn its size."""
    sizes: list[int] = []
    faiss.write_index(index, faiss.PyCallbackIOWriter(lambda content: sizes.append(len(content))))
    with making(path, sum(sizes)), path.open("wb") as file:
        take_room(file, sum(sizes))
        try:
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))
        except RuntimeError as error:
            raise StoreError(f"Faiss cannot write {os.fspath(path)!r}: {reason(error)}") from None
        file.flush()
        os.fsync(file.fileno())


def _placeholder(encoded: EncodedIndex) -> bytes | None:
    """What Faiss writes in place of the codes of an empty base index; None if it writes them elsewhere."""
    empty = encoded.empty
    if isinstance(empty, faiss.IndexIVF):
        if not isinstance(faiss.downcast_InvertedLists(empty.invlists), faiss.ArrayInvertedLists):
            return None
        return struct.pack("<4sQQ4sQ", b"ilar", empty.nlist, empty.code_size, b"sprs", 0)
    if isinstance(empty, faiss.IndexFastScan):
        return None
    placeholder = os.urandom(64)
    empty.codes.resize(len(placeholder))
    faiss.rev_swig_ptr(empty.codes.data(), len(placeholder))[:] = np.frombuffer(placeholder, np.uint8)
    return struct.pack("<Q", len(placeholder) // _unit(empty)) + placeholder


def _place(frame: bytes, placeholder: bytes) -> int:
    """Where `placeholder` is in `frame`. A short one may occur there by chance; the file then fails its check."""
    place = frame.rfind(placeholder)
    if place < 0:
        raise StoreError("this version of Faiss writes indexes in another way than is known; nothing was changed")
    return place


def _write_codes(encoded: EncodedIndex, file: BinaryIO) -> Iterator[int]:
    """Writes the codes of `encoded` as Faiss does, piece by piece, and yields the number of entries of each."""
    empty = encoded.empty
    if not isinstance(empty, faiss.IndexIVF):
        file.write(struct.pack("<Q", int(empty.ntotal) * int(empty.code_size) // _unit(empty)))
        for entries in encoded.entries():
            file.write(np.ascontiguousarray(entries.codes).data)
            yield len(entries.codes)
        return
    assert encoded.list_sizes is not None
    sizes = encoded.list_sizes.astype(np.uint64)
    file.write(struct.pack("<4sQQ", b"ilar", empty.nlist, empty.code_size))
    filled = np.flatnonzero(sizes)
    if len(filled) > empty.nlist // 2:
        listed, kind = sizes, b"full"
    else:
        listed, kind = np.stack([filled.astype(np.uint64), sizes[filled]], axis=1).ravel(), b"sprs"
    file.write(struct.pack("<4sQ", kind, len(listed)) + listed.tobytes())
    held: list[np.ndarray] = []  # ids follow the codes of their whole list
    left = 0
    for entries in encoded.entries():
        assert entries.lists is not None
        assert entries.ids is not None
        edges = np.flatnonzero(np.diff(entries.lists, prepend=-1, append=-1))
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            left = left or int(sizes[entries.lists[first]])
            file.write(np.ascontiguousarray(entries.codes[first:last]).data)
            held.append(entries.ids[first:last])
            left -= last - first
            if left == 0:
                file.write(np.concatenate(held).tobytes())
                held.clear()
        yield len(entries.codes)


def _size(encoded: EncodedIndex) -> int:
    """Bytes that `_write_codes` writes at most."""
    empty, codes = encoded.empty, int(encoded.empty.ntotal) * int(encoded.empty.code_size)
    if not isinstance(empty, faiss.IndexIVF):
        return codes + 8
    return codes + 8 * int(empty.ntotal) + 16 * int(empty.nlist) + 64


def _unit(empty: faiss.Index) -> int:
    """The unit in bytes in which Faiss counts the codes of a base index: a float or a byte."""
    return 4 if isinstance(empty, faiss.IndexFlat) else 1
