"""Where the codes of an index lie: in a row, in inverted lists, in memory or on disk, or in the blocks that Faiss scans
fast."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin.vectors import one_line
from hubplugin_faiss.disk import making, take_room


@dataclass(frozen=True)
class Entries:
    """Consecutive codes [b, code_size]; with inverted lists, also the list number and the id of each: int64 [b]."""

    codes: np.ndarray
    lists: np.ndarray | None = None
    ids: np.ndarray | None = None


@dataclass(frozen=True)
class EncodedIndex:
    """A base index that lacks only its codes (`empty`), and these codes; `list_sizes` [nlist] with inverted lists."""

    empty: faiss.Index
    entries: Callable[[], Iterator[Entries]]
    list_sizes: np.ndarray | None = None


Assemble: TypeAlias = Callable[[EncodedIndex], faiss.Index]
"""Puts the codes of an encoded index into it: in memory, or in a file that is written piece by piece."""


def in_memory(encoded: EncodedIndex) -> faiss.Index:
    """The base index of `encoded` with its codes."""
    new = encoded.empty
    if isinstance(new, faiss.IndexIVF):
        return _lists_in_memory(encoded)
    packer = new.get_CodePacker() if isinstance(new, faiss.IndexFastScan) else None
    if packer is None:
        new.codes.resize(int(new.ntotal) * int(new.code_size))
    else:
        blocks = -(-int(new.ntotal) // packer.nvec)
        new.ntotal2 = blocks * packer.nvec
        new.codes.resize(blocks * packer.block_size)
    start = 0
    for entries in encoded.entries():
        if packer is None:
            codes_of(new)[start : start + len(entries.codes)] = entries.codes
        else:
            pack(packer, entries.codes, new.codes.data(), start, int(new.ntotal))
        start += len(entries.codes)
    return new


def _lists_in_memory(encoded: EncodedIndex) -> faiss.Index:
    new = encoded.empty
    assert encoded.list_sizes is not None
    lists = faiss.downcast_InvertedLists(new.invlists)
    packer, filled = getattr(lists, "packer", None), np.zeros(new.nlist, np.int64)
    try:
        for number, size in enumerate(encoded.list_sizes.tolist()):
            lists.resize(number, size)  # at once: a list that grows is given room to spare
    except RuntimeError as error:  # lists on disk lie in a file
        raise StoreError(f"Faiss cannot write inverted lists: {one_line(error)}") from None
    if isinstance(lists, faiss.OnDiskInvertedLists):
        _take_room(lists)
    for entries in encoded.entries():
        assert entries.lists is not None
        assert entries.ids is not None
        for number, ids, codes in runs(entries.lists, entries.ids, entries.codes):
            start, size = int(filled[number]), int(encoded.list_sizes[number])
            if packer is None:
                lists.update_entries(number, start, len(ids), faiss.swig_ptr(ids), faiss.swig_ptr(codes))
            else:
                list_ids(lists, number)[start : start + len(ids)] = ids
                pack(packer, codes, lists.get_codes(number), start, size)
            filled[number] += len(ids)
    if isinstance(new, faiss.IndexIVFPQ | faiss.IndexIVFPQFastScan):
        new.precompute_table()
    return new


def _take_room(lists: faiss.OnDiskInvertedLists) -> None:
    """Makes room on the disk for `lists`, which Faiss writes through the map of a file with holes."""
    slots = [lists.lists.at(number) for number in range(lists.nlist)]
    needed = sum(slot.size for slot in slots) * (lists.code_size + 8)
    with making(lists.filename, needed), open(lists.filename, "rb+") as file:
        for slot in slots:  # codes, and behind the room for all of them the ids
            take_room(file, slot.size * lists.code_size, slot.offset)
            take_room(file, slot.size * 8, slot.offset + slot.capacity * lists.code_size)


def codes_of(index: faiss.Index) -> np.ndarray:
    """The codes of an index that holds them in a row: uint8 [n, code_size], the memory itself."""
    n, size = int(index.ntotal), int(index.code_size)
    if n == 0:
        return np.empty((0, size), np.uint8)
    memory: np.ndarray = faiss.rev_swig_ptr(index.codes.data(), n * size)
    return memory.reshape(n, size)


def list_ids(lists: faiss.InvertedLists, number: int) -> np.ndarray:
    size = lists.list_size(number)
    if size == 0:
        return np.empty(0, np.int64)
    memory: np.ndarray = faiss.rev_swig_ptr(lists.get_ids(number), size)
    return memory


def runs(lists: np.ndarray, ids: np.ndarray, codes: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Entries that are ordered by list, list by list: its number, the ids and the codes."""
    ids, codes = np.ascontiguousarray(ids), np.ascontiguousarray(codes)
    for first, last in itertools.pairwise(np.flatnonzero(np.diff(lists, prepend=-1, append=-1)).tolist()):
        yield int(lists[first]), ids[first:last], codes[first:last]


SCANNED = 32
"""Faiss scans this many codes at a time, which lie side by side also where a block holds several times as many. Its own
packer does not know the latter: it writes, and reconstructs, other codes than are scanned."""


def unpacked(packer: faiss.CodePacker, packed: object, start: int, stop: int) -> np.ndarray:
    """The codes [start, stop) of those at `packed` in the blocks of `packer`: uint8 [stop - start, code_size]."""
    width = packer.code_size
    blocks, codes = _blocks(packer, packed, stop), np.empty((stop - start, width), np.uint8)
    groups, own = _groups(blocks, packer, width), _group_packer(width)
    whole = np.empty((SCANNED, width), np.uint8)
    for row in range(start - start % SCANNED, stop, SCANNED):
        group = np.ascontiguousarray(groups[divmod(row // SCANNED, groups.shape[1])])
        own.unpack_all(faiss.swig_ptr(group), faiss.swig_ptr(whole))
        first, last = max(row, start), min(row + SCANNED, stop)
        codes[first - start : last - start] = whole[first - row : last - row]
    return codes


def pack(packer: faiss.CodePacker, codes: np.ndarray, packed: object, start: int, count: int) -> None:
    """Writes `codes` [n, code_size] as those from `start` on into blocks of `packer`, for `count` in all, at `packed`.
    What lies in the same block behind them becomes 0."""
    width = packer.code_size
    blocks = _blocks(packer, packed, count)
    groups, own, row = _groups(blocks, packer, width), _group_packer(width), 0
    while row < len(codes):
        number, place = divmod(start + row, SCANNED)
        block, group = divmod(number, groups.shape[1])
        part = codes[row : row + SCANNED - place]
        whole = np.zeros((SCANNED, width), np.uint8)
        memory = np.ascontiguousarray(groups[block, group])
        if place:
            kept = np.empty_like(whole)
            own.unpack_all(faiss.swig_ptr(memory), faiss.swig_ptr(kept))
            whole[:place] = kept[:place]
        whole[place : place + len(part)] = part
        own.pack_all(faiss.swig_ptr(whole), faiss.swig_ptr(memory))
        groups[block, group], groups[block, group + 1 :] = memory, 0
        row += len(part)


def add_codes(index: faiss.IndexFastScan, codes: np.ndarray, start: int | None = None) -> None:
    """Puts `codes` [n, code_size] behind those of `index`, or in the place of those from row `start` on."""
    start = int(index.ntotal) if start is None else start
    packer, count = index.get_CodePacker(), start + len(codes)
    blocks = -(-count // packer.nvec)
    index.codes.resize(blocks * packer.block_size)
    index.ntotal, index.ntotal2 = count, blocks * packer.nvec
    pack(packer, codes, index.codes.data(), start, count)


def add_codes_to_list(
    index: faiss.IndexIVFFastScan, number: int, ids: np.ndarray, codes: np.ndarray, start: int | None = None
) -> None:
    """The same for one inverted list of `index`, with the `ids` [n] of the entries. `index.ntotal` stays."""
    lists = faiss.downcast_InvertedLists(index.invlists)
    start = lists.list_size(number) if start is None else start
    count = start + len(codes)
    lists.resize(number, count)
    if count:
        faiss.rev_swig_ptr(lists.get_ids(number), count)[start:] = ids
        pack(lists.packer, codes, lists.get_codes(number), start, count)


def remove_codes(index: faiss.IndexFastScan | faiss.IndexIVFFastScan, ids: np.ndarray) -> None:
    """Removes the entries called `ids` from `index`, and erases their codes; the direct map stays as it is.

    Faiss's own `remove_ids` moves other codes than it scans where blocks hold more than 32, and leaves old codes behind
    the last one, which its `add` does not erase before it writes there.
    """
    if isinstance(index, faiss.IndexFastScan):
        kept = np.setdiff1d(np.arange(index.ntotal), ids)
        add_codes(index, codes_of_blocks(index, 0, int(index.ntotal))[kept], start=0)
        return
    for number in range(index.nlist):
        size = index.invlists.list_size(number)
        if size:
            own = np.array(faiss.rev_swig_ptr(index.invlists.get_ids(number), size))
            kept = np.flatnonzero(~np.isin(own, ids))
            if len(kept) < size:
                add_codes_to_list(index, number, own[kept], codes_of_list(index, number, 0, size)[kept], start=0)
                index.ntotal -= size - len(kept)


def codes_of_blocks(index: faiss.IndexFastScan, start: int, stop: int) -> np.ndarray:
    """The codes of the entries [start, stop): uint8 [stop - start, code_size]."""
    return unpacked(index.get_CodePacker(), index.codes.data(), start, stop)


def codes_of_list(index: faiss.IndexIVFFastScan, number: int, start: int, stop: int) -> np.ndarray:
    """The codes of the entries [start, stop) of one inverted list: uint8 [stop - start, code_size]."""
    lists = faiss.downcast_InvertedLists(index.invlists)
    return unpacked(lists.packer, lists.get_codes(number), start, stop)


def _blocks(packer: faiss.CodePacker, packed: object, count: int) -> np.ndarray:
    """The memory at `packed`, which holds `count` codes: uint8 [blocks, block_size]."""
    blocks = -(-count // packer.nvec)
    if blocks == 0:
        return np.empty((0, packer.block_size), np.uint8)
    memory: np.ndarray = faiss.rev_swig_ptr(packed, blocks * packer.block_size)
    return memory.reshape(blocks, packer.block_size)


def _groups(blocks: np.ndarray, packer: faiss.CodePacker, width: int) -> np.ndarray:
    """What is scanned of `blocks`: uint8 [blocks, groups of `SCANNED` codes, width, SCANNED], the memory itself."""
    scanned = blocks[:, : width * packer.nvec].reshape(len(blocks), width, packer.nvec // SCANNED, SCANNED)
    groups: np.ndarray = scanned.swapaxes(1, 2)
    return groups


@cache
def _group_packer(code_size: int) -> faiss.CodePacker:
    """The packer of blocks that hold one group of codes."""
    return faiss.IndexPQFastScan(2 * code_size, 2 * code_size, 4, faiss.METRIC_L2, SCANNED).get_CodePacker()
