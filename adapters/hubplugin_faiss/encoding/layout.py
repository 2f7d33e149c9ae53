"""Where the codes of an index lie: in a row, in inverted lists, or in the blocks that Faiss scans fast."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import faiss
import numpy as np


class CodeArray:
    """Codes at `memory`: of `size` bytes each in a row, or in the blocks of `packer`."""

    def __init__(self, memory: Any, size: int, packer: Any = None):
        self.memory, self.packer = memory, packer
        self.size = int(size if packer is None else packer.code_size)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The codes from `start` to before `stop`: uint8 [stop - start, size]; of codes in a row the memory itself."""
        if stop == 0:
            return np.empty((0, self.size), np.uint8)
        if self.packer is None:
            return np.asarray(
                faiss.rev_swig_ptr(self.memory, stop * self.size).reshape(
                    stop, self.size
                )[start:]
            )
        first, place = divmod(start, self.packer.nvec)
        blocks = self._blocks(first, stop)
        codes = np.empty((len(blocks) * self.packer.nvec, self.size), np.uint8)
        for number, block in enumerate(blocks):
            self.packer.unpack_all(
                faiss.swig_ptr(block),
                faiss.swig_ptr(codes[number * self.packer.nvec :]),
            )
        return codes[place : place + stop - start]

    def write(self, start: int, codes: np.ndarray) -> None:
        """Writes `codes` [n, size], for which there is room, from `start` on. What lies in the same block behind them
        becomes 0."""
        stop = start + len(codes)
        if self.packer is None or stop == 0:
            self.read(start, stop)[:] = codes
            return
        first, place = divmod(start, self.packer.nvec)
        blocks = self._blocks(first, stop)
        whole = np.zeros((len(blocks) * self.packer.nvec, self.size), np.uint8)
        whole[:place] = self.read(start - place, start)
        whole[place : place + len(codes)] = codes
        for number, block in enumerate(blocks):
            self.packer.pack_all(
                faiss.swig_ptr(whole[number * self.packer.nvec :]),
                faiss.swig_ptr(block),
            )

    def _blocks(self, first: int, count: int) -> np.ndarray:
        """The blocks from number `first` on of those that hold `count` codes: uint8 [blocks, bytes]."""
        last, size = -(-count // self.packer.nvec), self.packer.block_size
        return np.asarray(
            faiss.rev_swig_ptr(self.memory, last * size).reshape(last, size)[first:]
        )


def codes_of(index: faiss.Index) -> CodeArray:
    """The codes of an index that has no lists."""
    packer = index.get_CodePacker() if isinstance(index, faiss.IndexFastScan) else None
    return CodeArray(index.codes.data(), index.code_size, packer)


def codes_of_list(lists: faiss.InvertedLists, number: int) -> CodeArray:
    return CodeArray(
        lists.get_codes(number), lists.code_size, getattr(lists, "packer", None)
    )


def ids_of_list(lists: faiss.InvertedLists, number: int) -> np.ndarray:
    """The ids in the list `number` of inverted `lists`: int64 [size], the memory itself."""
    size = lists.list_size(number)
    return (
        np.asarray(faiss.rev_swig_ptr(lists.get_ids(number), size))
        if size
        else np.empty(0, np.int64)
    )


def write_codes(
    index: faiss.Index, start: int, count: int, blocks: Iterable[np.ndarray]
) -> None:
    """Writes codes into `index` from row `start` on, so that it has `count` of them; `blocks` are [b, code_size]."""
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
    """Writes the last entries of an inverted list.

    Args:
        lists: the inverted lists.
        number: which of them.
        start: the place of the first new entry; what the list has from there on is replaced.
        ids, codes: of the entries [b], [b, code_size].
    """
    lists.resize(number, start + len(ids))
    ids_of_list(lists, number)[start:] = ids
    codes_of_list(lists, number).write(start, codes)


def fill_lists(
    new: faiss.IndexIVF,
    sizes: np.ndarray,
    blocks: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]],
) -> None:
    """Puts entries into the inverted lists of an index that lacks only these.

    Args:
        new: the index.
        sizes: how many entries each list gets [nlist].
        blocks: entries, ordered by list: list numbers [b], ids [b] and codes [b, code_size].
    """
    lists, filled = (
        faiss.downcast_InvertedLists(new.invlists),
        np.zeros(new.nlist, np.int64),
    )
    for number, size in enumerate(sizes.tolist()):
        lists.resize(number, size)  # at once: a list that grows is given room to spare
    for numbers, ids, codes in blocks:
        for number, part in parts_by_list(numbers):
            write_entries(lists, number, int(filled[number]), ids[part], codes[part])
            filled[number] += part.stop - part.start
    if isinstance(new, faiss.IndexIVFPQ | faiss.IndexIVFPQFastScan):
        new.precompute_table()


def parts_by_list(numbers: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Each list among the ordered `numbers` [n] of lists, and which entries lie in it."""
    for first, last in itertools.pairwise(
        np.flatnonzero(np.diff(numbers, prepend=-1, append=-1)).tolist()
    ):
        yield int(numbers[first]), slice(first, last)
