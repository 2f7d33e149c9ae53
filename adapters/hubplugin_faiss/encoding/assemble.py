"""Puts codes into an empty index in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import faiss
import numpy as np

from hubplugin_faiss.encoding.fast_scan_codes import pack
from hubplugin_faiss.encoding.layout import EncodedIndex


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
    for number, size in enumerate(encoded.list_sizes.tolist()):
        lists.resize(number, size)  # at once: a list that grows is given room to spare
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
