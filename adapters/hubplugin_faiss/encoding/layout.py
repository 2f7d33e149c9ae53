"""Where codes lie: in a row, in inverted lists, or in the blocks that Faiss scans fast.

A row counts as one list, so that all indexes are read and written alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np


class CodeLists:
    """The codes of an index in inverted lists, each in the blocks of a packer.

    Without a packer, each code is a block of its own.
    """

    def __init__(self, index: faiss.IndexIVF):
        self._lists = faiss.downcast_InvertedLists(index.invlists)
        self._pointer_to = self._lists.get_codes
        self._pack_by(getattr(self._lists, "packer", None), self._lists.code_size)

    def _pack_by(self, packer: Any, code_size: int) -> None:
        """Set how codes lie in blocks: as `packer` has it, or one of `code_size` bytes
        each if it is None."""
        self._packer = packer
        if packer is None:
            self._code_size = self._block_size = code_size
            self._per_block = 1
        else:
            self._code_size = packer.code_size
            self._block_size = packer.block_size
            self._per_block = packer.nvec

    def sizes(self) -> np.ndarray:
        """Return how many codes each list has: int64 [lists]."""
        list_nos = range(self._lists.nlist)
        return np.array([self._lists.list_size(list_no) for list_no in list_nos])

    def ids(self, list_no: int) -> np.ndarray:
        """Return the ids of the list `list_no`: int64 [size]. Writing to them changes
        the list."""
        size = self._lists.list_size(list_no)
        if not size:  # an empty list may have no memory to point to
            return np.empty(0, np.int64)
        return faiss.rev_swig_ptr(self._lists.get_ids(list_no), size)

    def resize(self, list_no: int, size: int) -> None:
        """Give the list `list_no` room for `size` codes."""
        self._lists.resize(list_no, size)

    def read(self, list_no: int, start: int, stop: int) -> np.ndarray:
        """Return the codes from `start` to before `stop` of the list `list_no`: uint8
        [stop - start, bytes].

        Without a packer they are no copy: writing to them changes the index.
        """
        blocks = self._blocks(list_no, start, stop)
        if self._packer is None:
            return blocks
        codes = self._unpacked(blocks)
        for block, block_codes in zip(blocks, codes, strict=True):
            self._packer.unpack_all(faiss.swig_ptr(block), faiss.swig_ptr(block_codes))
        first = start % self._per_block
        return codes.reshape(-1, self._code_size)[first : first + stop - start]

    def write(self, list_no: int, start: int, codes: np.ndarray) -> None:
        """Write `codes` [n, bytes] to the list `list_no`, from the place `start` on.

        `resize` has made room for them. The rest of the last block becomes 0.
        """
        blocks = self._blocks(list_no, start, start + len(codes))
        if self._packer is None:
            blocks[:] = codes
            return
        # A packer writes whole blocks: keep the codes that the first one has already.
        first = start % self._per_block
        unpacked = self._unpacked(blocks)
        rows = unpacked.reshape(-1, self._code_size)
        rows[:first] = self.read(list_no, start - first, start)
        rows[first : first + len(codes)] = codes
        for block_codes, block in zip(unpacked, blocks, strict=True):
            self._packer.pack_all(faiss.swig_ptr(block_codes), faiss.swig_ptr(block))

    def _blocks(self, list_no: int, start: int, stop: int) -> np.ndarray:
        """Return the blocks with the codes from `start` to before `stop`.

        They are uint8 [blocks, bytes], and no copy: writing to them changes the index.
        """
        end = -(-stop // self._per_block)
        if end == 0:  # an empty list may have no memory to point to
            return np.empty((0, self._block_size), np.uint8)
        memory = faiss.rev_swig_ptr(self._pointer_to(list_no), end * self._block_size)
        return memory.reshape(end, self._block_size)[start // self._per_block :]

    def _unpacked(self, blocks: np.ndarray) -> np.ndarray:
        """Return zeros with room for the codes of `blocks` [b, ...]: uint8 [b, codes in
        a block, bytes]."""
        return np.zeros((len(blocks), self._per_block, self._code_size), np.uint8)


class OneRow(CodeLists):
    """The one list of an index without lists, which numbers its entries itself."""

    def __init__(self, index: faiss.Index):
        self._index = index
        self._pointer_to = lambda list_no: index.codes.data()
        packer = None
        if isinstance(index, faiss.IndexFastScan):
            packer = index.get_CodePacker()
        self._pack_by(packer, index.code_size)

    def sizes(self) -> np.ndarray:
        return np.array([self._index.ntotal])

    def ids(self, list_no: int) -> np.ndarray:
        return np.arange(self._index.ntotal)

    def resize(self, list_no: int, size: int) -> None:
        blocks = -(-size // self._per_block)
        self._index.ntotal = size
        self._index.codes.resize(blocks * self._block_size)
        if self._packer is not None:
            self._index.ntotal2 = blocks * self._per_block


def parts_by_list(list_nos: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yield each list in `list_nos` [n], the lists of entries, ascending, and the slice
    of the entries in it."""
    ends = np.flatnonzero(np.diff(list_nos, prepend=-1, append=-1)).tolist()
    for first, end in itertools.pairwise(ends):
        yield int(list_nos[first]), slice(first, end)
