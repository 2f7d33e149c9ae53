"""Where the codes of an index lie: in a row, in inverted lists, or in the blocks that
Faiss scans fast."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import faiss
import numpy as np


class CodeArray:
    """Codes at `memory`: of `size` bytes each in a row, or in the blocks of `packer`."""

    def __init__(self, memory: Any, size: int, packer: Any = None):
        self.memory = memory
        self.packer = packer
        self.size = int(size if packer is None else packer.code_size)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the codes from `start` to before `stop`: uint8 [stop - start, size]; of
        codes in a row the memory itself."""
        if stop == 0:
            return np.empty((0, self.size), np.uint8)
        if self.packer is None:
            whole = faiss.rev_swig_ptr(self.memory, stop * self.size)
            return np.asarray(whole.reshape(stop, self.size)[start:])
        first, place = divmod(start, self.packer.nvec)
        blocks = self._blocks(first, stop)
        codes = np.empty((len(blocks) * self.packer.nvec, self.size), np.uint8)
        for number, block in enumerate(blocks):
            part = codes[number * self.packer.nvec :]
            self.packer.unpack_all(faiss.swig_ptr(block), faiss.swig_ptr(part))
        return codes[place : place + stop - start]

    def write(self, start: int, codes: np.ndarray) -> None:
        """Write `codes` [n, size], for which there is room, from `start` on. What lies
        in the same block behind them becomes 0."""
        stop = start + len(codes)
        if stop == 0:
            return
        if self.packer is None:
            whole = faiss.rev_swig_ptr(self.memory, stop * self.size)
            whole.reshape(stop, self.size)[start:] = codes
            return
        first, place = divmod(start, self.packer.nvec)
        blocks = self._blocks(first, stop)
        whole = np.zeros((len(blocks) * self.packer.nvec, self.size), np.uint8)
        whole[:place] = self.read(start - place, start)
        whole[place : place + len(codes)] = codes
        for number, block in enumerate(blocks):
            part = whole[number * self.packer.nvec :]
            self.packer.pack_all(faiss.swig_ptr(part), faiss.swig_ptr(block))

    def _blocks(self, first: int, count: int) -> np.ndarray:
        """Return the blocks from number `first` on of those that hold `count` codes:
        uint8 [blocks, bytes]."""
        last = -(-count // self.packer.nvec)
        size = self.packer.block_size
        whole = faiss.rev_swig_ptr(self.memory, last * size)
        return np.asarray(whole.reshape(last, size)[first:])


def codes_of(index: faiss.Index) -> CodeArray:
    """Return the codes of an index that has no lists."""
    packer = index.get_CodePacker() if isinstance(index, faiss.IndexFastScan) else None
    return CodeArray(index.codes.data(), index.code_size, packer)


def codes_of_list(lists: faiss.InvertedLists, number: int) -> CodeArray:
    packer = getattr(lists, "packer", None)
    return CodeArray(lists.get_codes(number), lists.code_size, packer)


def ids_of_list(lists: faiss.InvertedLists, number: int) -> np.ndarray:
    """Return the ids in the list `number` of inverted `lists`: int64 [size], the memory
    itself."""
    size = lists.list_size(number)
    if not size:
        return np.empty(0, np.int64)
    return np.asarray(faiss.rev_swig_ptr(lists.get_ids(number), size))


def write_codes(
    index: faiss.Index, start: int, count: int, blocks: Iterable[np.ndarray]
) -> None:
    """Write codes into `index` from row `start` on, so that it has `count` of them;
    `blocks` are [b, code_size]."""
    index.ntotal = count
    if isinstance(index, faiss.IndexFastScan):
        packer = index.get_CodePacker()
        number = -(-count // packer.nvec)
        index.codes.resize(number * packer.block_size)
        index.ntotal2 = number * packer.nvec
    else:
        index.codes.resize(count * int(index.code_size))
    array = codes_of(index)
    for codes in blocks:
        array.write(start, codes)
        start += len(codes)


def write_entries(
    lists: faiss.InvertedLists,
    number: int,
    start: int,
    ids: np.ndarray,
    codes: np.ndarray,
) -> None:
    """Write the last entries of an inverted list.

    Args:
        lists: The inverted lists.
        number: Which of them.
        start: The place of the first new entry; what the list has from there on is
            replaced.
        ids, codes: Of the entries [b], [b, code_size].
    """
    lists.resize(number, start + len(ids))
    ids_of_list(lists, number)[start:] = ids
    codes_of_list(lists, number).write(start, codes)


def parts_by_list(numbers: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yield each list among the ordered `numbers` [n] of lists, and which entries lie in
    it."""
    ends = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1)).tolist()
    for first, last in itertools.pairwise(ends):
        yield int(numbers[first]), slice(first, last)
