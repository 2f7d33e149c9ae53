"""Writes an index file in Faiss's format, the codes piece by piece."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin.vectors import Progress
from hubplugin_faiss.encoding.assemble import in_memory
from hubplugin_faiss.encoding.layout import Body, Fill
from hubplugin_faiss.faiss_objects import reason
from hubplugin_faiss.file_reader import give_back_pages
from hubplugin_faiss.handlers import rule_for


def write_index_file(
    path: Path, make: Callable[[Fill], Any], mapped: Sequence[Path], progress: Progress | None
) -> None:
    """Writes what `make` makes to the file `path`, and its inverted lists to their files, and flushes them.

    Faiss's own writer writes everything but the codes: leaves get a plug instead, which is then found in what was
    written, and the codes go in its place as they come.
    """
    plugs: list[tuple[Body, bytes]] = []

    def plugged(body: Body) -> Any:
        plug = _plug(body)
        if plug is None:
            return in_memory(body)
        plugs.append((body, plug))
        return body.shell

    index = make(plugged)
    if not plugs:
        try:
            faiss.write_index(index, os.fspath(path))
        except RuntimeError as error:
            raise StoreError(f"Faiss cannot write {os.fspath(path)!r}: {reason(error)}") from None
        for name in (os.fspath(path), *rule_for(index).files()):
            with open(name, "rb+") as written:
                os.fsync(written.fileno())
        return
    frame = faiss.serialize_index(index).tobytes()
    places = sorted((_place(frame, plug), number) for number, (_, plug) in enumerate(plugs))
    done, total = 0, sum(int(body.shell.ntotal) for body, _ in plugs)
    with path.open("wb") as file:
        position = 0
        for place, number in places:
            body, plug = plugs[number]
            file.write(frame[position:place])
            for count in _pour(body, file):
                done += count
                give_back_pages(*mapped)
                if progress is not None:
                    progress("writing the index", done, total)
            position = place + len(plug)
        file.write(frame[position:])
        file.flush()
        os.fsync(file.fileno())


def _plug(body: Body) -> bytes | None:
    """What Faiss writes in the place of the codes of a leaf without them; None if it writes them elsewhere."""
    shell = body.shell
    if isinstance(shell, faiss.IndexIVF):
        if not isinstance(faiss.downcast_InvertedLists(shell.invlists), faiss.ArrayInvertedLists):
            return None
        return struct.pack("<4sQQ4sQ", b"ilar", shell.nlist, shell.code_size, b"sprs", 0)
    if isinstance(shell, faiss.IndexFastScan):
        return None
    plug = os.urandom(64)
    shell.codes.resize(len(plug))
    faiss.rev_swig_ptr(shell.codes.data(), len(plug))[:] = np.frombuffer(plug, np.uint8)
    return struct.pack("<Q", len(plug) // _unit(shell)) + plug


def _place(frame: bytes, plug: bytes) -> int:
    """Where `plug` is in `frame`. A short one may stand there by chance: then what was written will not read back."""
    place = frame.rfind(plug)
    if place < 0:
        raise StoreError("this version of Faiss writes indexes in another way than is known; nothing was changed")
    return place


def _pour(body: Body, file: BinaryIO) -> Iterator[int]:
    """Writes the codes of `body` as Faiss does, and yields how many they are, piece by piece."""
    shell = body.shell
    if not isinstance(shell, faiss.IndexIVF):
        file.write(struct.pack("<Q", int(shell.ntotal) * int(shell.code_size) // _unit(shell)))
        for entries in body.entries():
            file.write(np.ascontiguousarray(entries.codes).data)
            yield len(entries.codes)
        return
    assert body.list_sizes is not None
    sizes = body.list_sizes.astype(np.uint64)
    file.write(struct.pack("<4sQQ", b"ilar", shell.nlist, shell.code_size))
    filled = np.flatnonzero(sizes)
    if len(filled) > shell.nlist // 2:
        listed, kind = sizes, b"full"
    else:
        listed, kind = np.stack([filled.astype(np.uint64), sizes[filled]], axis=1).ravel(), b"sprs"
    file.write(struct.pack("<4sQ", kind, len(listed)) + listed.tobytes())
    held: list[np.ndarray] = []  # ids follow the codes of their whole list
    left = 0
    for entries in body.entries():
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


def _unit(shell: Any) -> int:
    """In what Faiss counts the codes of a leaf: floats or bytes."""
    return 4 if isinstance(shell, faiss.IndexFlat) else 1
