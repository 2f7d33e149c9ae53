"""Where the codes of an index lie: in a row, in inverted lists, or in the blocks that Faiss scans fast."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import faiss
import numpy as np


def fill(new: faiss.Index, blocks: Iterable[np.ndarray]) -> None:
    """Puts codes, in blocks [b, code_size], into the index `new`, which lacks only these and keeps them in a row."""
    if isinstance(new, faiss.IndexFastScan):
        new.ntotal = 0
        for codes in blocks:
            add_codes(new, codes)
        return
    new.codes.resize(int(new.ntotal) * int(new.code_size))
    start = 0
    for codes in blocks:
        codes_of(new)[start : start + len(codes)] = codes
        start += len(codes)


def fill_lists(
    new: faiss.IndexIVF, sizes: np.ndarray, blocks: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> None:
    """Puts entries into the inverted lists of `new`, which lacks only these and gets `sizes` [nlist] of them. Of each
    block, which is ordered by list: list numbers [b], ids [b] and codes [b, code_size]."""
    lists, filled = faiss.downcast_InvertedLists(new.invlists), np.zeros(new.nlist, np.int64)
    for number, size in enumerate(sizes.tolist()):
        lists.resize(number, size)  # at once: a list that grows is given room to spare
    for block in blocks:
        for number, ids, codes in runs(*block):
            put(lists, number, int(filled[number]), ids, codes)
            filled[number] += len(ids)
    if isinstance(new, faiss.IndexIVFPQ | faiss.IndexIVFPQFastScan):
        new.precompute_table()


def put(lists: faiss.InvertedLists, number: int, start: int, ids: np.ndarray, codes: np.ndarray) -> None:
    """Writes entries into one of inverted `lists`, as those from `start` on, for which there is room."""
    if not hasattr(lists, "packer"):
        lists.update_entries(number, start, len(ids), faiss.swig_ptr(ids), faiss.swig_ptr(codes))
    elif len(ids):
        list_ids(lists, number)[start : start + len(ids)] = ids
        pack(lists.packer, codes, lists.get_codes(number), start)


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


def unpacked(packer: faiss.CodePacker, packed: object, start: int, stop: int) -> np.ndarray:
    """The codes [start, stop) of those at `packed` in the blocks of `packer`: uint8 [stop - start, code_size]."""
    first, place = divmod(start, packer.nvec)
    blocks = _blocks(packer, packed, stop)[first:]
    whole = np.empty((len(blocks) * packer.nvec, packer.code_size), np.uint8)
    for number, block in enumerate(blocks):
        packer.unpack_all(faiss.swig_ptr(block), faiss.swig_ptr(whole[number * packer.nvec :]))
    return whole[place : place + stop - start]


def pack(packer: faiss.CodePacker, codes: np.ndarray, packed: object, start: int) -> None:
    """Writes `codes` [n, code_size] as those from `start` on into blocks of `packer` at `packed`. What lies in the same
    block behind them becomes 0."""
    first, place = divmod(start, packer.nvec)
    blocks = _blocks(packer, packed, start + len(codes))[first:]
    whole = np.zeros((len(blocks) * packer.nvec, packer.code_size), np.uint8)
    whole[:place] = unpacked(packer, packed, start - place, start)
    whole[place : place + len(codes)] = codes
    for number, block in enumerate(blocks):
        packer.pack_all(faiss.swig_ptr(whole[number * packer.nvec :]), faiss.swig_ptr(block))


def add_codes(index: faiss.IndexFastScan, codes: np.ndarray, start: int | None = None) -> None:
    """Puts `codes` [n, code_size] behind those of `index`, or in the place of those from row `start` on."""
    start = int(index.ntotal) if start is None else start
    packer, count = index.get_CodePacker(), start + len(codes)
    blocks = -(-count // packer.nvec)
    index.codes.resize(blocks * packer.block_size)
    index.ntotal, index.ntotal2 = count, blocks * packer.nvec
    pack(packer, codes, index.codes.data(), start)


def _blocks(packer: faiss.CodePacker, packed: object, count: int) -> np.ndarray:
    """The memory at `packed`, which holds `count` codes: uint8 [blocks, block_size]."""
    blocks = -(-count // packer.nvec)
    if blocks == 0:
        return np.empty((0, packer.block_size), np.uint8)
    memory: np.ndarray = faiss.rev_swig_ptr(packed, blocks * packer.block_size)
    return memory.reshape(blocks, packer.block_size)
