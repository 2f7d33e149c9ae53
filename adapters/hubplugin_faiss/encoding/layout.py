"""Access to codes stored contiguously, in inverted lists or in fast-scan blocks.

Contiguous codes count as one list, so all indexes are read and written alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np


class CodeLists:
    """The codes of an index with inverted lists.

    Fast-scan indexes pack several codes into a block. In other indexes, each block has
    one code.
    """

    def __init__(self, index: Any):
        self._index = index
        self._packer = index.get_CodePacker()
        self._is_packed = self._packer.nvec > 1

    def sizes(self) -> np.ndarray:
        """Return the number of codes in each list: int64 [lists]."""
        lists = self._index.invlists
        return np.array([lists.list_size(list_no) for list_no in range(lists.nlist)])

    def ids(self, list_no: int) -> np.ndarray:
        """Return a view of the ids in the list `list_no`: int64 [size]."""
        lists = self._index.invlists
        size = lists.list_size(list_no)
        if not size:  # an empty list may have no memory to point to
            return np.empty(0, np.int64)
        return faiss.rev_swig_ptr(lists.get_ids(list_no), size)

    def resize(self, list_no: int, size: int) -> None:
        """Resize the list `list_no` to `size` codes."""
        self._index.invlists.resize(list_no, size)

    def pointer(self, list_no: int) -> Any:
        """Return a pointer to the first code of the list `list_no`."""
        return self._index.invlists.get_codes(list_no)

    def read(self, list_no: int, start: int, stop: int) -> np.ndarray:
        """Return the codes `start` to `stop` - 1 of a list: uint8 [stop - start, bytes].

        Unless codes are packed, the result is a view: writing to it changes the index.
        """
        blocks = self._blocks(list_no, start, stop)
        if not self._is_packed:
            return blocks
        codes = self._empty_codes(blocks)
        for block, block_codes in zip(blocks, codes, strict=True):
            self._packer.unpack_all(faiss.swig_ptr(block), faiss.swig_ptr(block_codes))
        first = start % self._packer.nvec
        return codes.reshape(-1, self._packer.code_size)[first : first + stop - start]

    def write(self, list_no: int, start: int, codes: np.ndarray) -> None:
        """Write `codes` [n, bytes] to the list `list_no`, beginning at `start`.

        The list must have been resized for them. The rest of the last block becomes 0.
        """
        blocks = self._blocks(list_no, start, start + len(codes))
        if not self._is_packed:
            blocks[:] = codes
            return
        # A packer writes complete blocks: keep the codes before `start` in the first.
        first = start % self._packer.nvec
        unpacked = self._empty_codes(blocks)
        rows = unpacked.reshape(-1, self._packer.code_size)
        rows[:first] = self.read(list_no, start - first, start)
        rows[first : first + len(codes)] = codes
        for block_codes, block in zip(unpacked, blocks, strict=True):
            self._packer.pack_all(faiss.swig_ptr(block_codes), faiss.swig_ptr(block))

    def _blocks(self, list_no: int, start: int, stop: int) -> np.ndarray:
        """Return a view of the blocks with the codes `start` to `stop` - 1.

        The view is uint8 [blocks, bytes]. Writing to it changes the index.
        """
        packer = self._packer
        end = -(-stop // packer.nvec)
        if end == 0:  # an empty list may have no memory to point to
            return np.empty((0, packer.block_size), np.uint8)
        memory = faiss.rev_swig_ptr(self.pointer(list_no), end * packer.block_size)
        return memory.reshape(end, packer.block_size)[start // packer.nvec :]

    def _empty_codes(self, blocks: np.ndarray) -> np.ndarray:
        """Return zeros with space for the codes of `blocks` [b, ...].

        The result is uint8 [b, codes in a block, bytes].
        """
        packer = self._packer
        return np.zeros((len(blocks), packer.nvec, packer.code_size), np.uint8)


class OneRow(CodeLists):
    """The codes of an index without lists, as one list with ids 0, 1, 2, ..."""

    def sizes(self) -> np.ndarray:
        return np.array([self._index.ntotal])

    def ids(self, list_no: int) -> np.ndarray:
        return np.arange(self._index.ntotal)

    def pointer(self, list_no: int) -> Any:
        return self._index.codes.data()

    def resize(self, list_no: int, size: int) -> None:
        blocks = -(-size // self._packer.nvec)
        self._index.ntotal = size
        self._index.codes.resize(blocks * self._packer.block_size)
        if self._is_packed:
            self._index.ntotal2 = blocks * self._packer.nvec


def parts_by_list(list_nos: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yield each list number in `list_nos` [n], with the slice of entries that have it.

    `list_nos` has the list of each entry, in ascending order.
    """
    ends = np.flatnonzero(np.diff(list_nos, prepend=-1, append=-1)).tolist()
    for first, end in itertools.pairwise(ends):
        yield int(list_nos[first]), slice(first, end)
