"""Where codes lie: in a row, in inverted lists, or in the blocks that Faiss scans fast.

A row counts as one list, so that all indexes are read and written alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np

MOVED = 1 << 15
"""Codes that are moved at once within a list; whole blocks of them."""


class CodeLists:
    """The codes of an index in inverted lists, each in the blocks of a packer.

    Without a packer, each code is a block of its own.
    """

    def __init__(self, index: faiss.IndexIVF):
        self._lists = faiss.downcast_InvertedLists(index.invlists)
        self._pack_by(self._lists.code_size, getattr(self._lists, "packer", None))

    def _pack_by(self, code_size: int, packer: Any) -> None:
        self._packer = packer
        self._code_size = code_size
        self._block_size = code_size
        self._per_block = 1
        if packer is not None:
            self._code_size = packer.code_size
            self._block_size = packer.block_size
            self._per_block = packer.nvec

    def sizes(self) -> np.ndarray:
        """Return how many codes each list has: int64 [lists]."""
        numbers = range(self._lists.nlist)
        return np.array([self._lists.list_size(number) for number in numbers])

    def ids(self, number: int) -> np.ndarray:
        """Return the ids of the list `number`: int64 [size], to be written to."""
        size = self._lists.list_size(number)
        if not size:  # there may be no memory
            return np.empty(0, np.int64)
        return faiss.rev_swig_ptr(self._lists.get_ids(number), size)

    def resize(self, number: int, size: int) -> None:
        """Make room for so many codes in the list `number`."""
        self._lists.resize(number, size)

    def _memory(self, number: int) -> Any:
        """Return where the blocks of the list `number` begin."""
        return self._lists.get_codes(number)

    def read(self, number: int, start: int, stop: int) -> np.ndarray:
        """Return the codes from `start` to before `stop` of the list `number`: uint8
        [stop - start, bytes].

        Without a packer they are the memory itself.
        """
        blocks = self._blocks(number, start, stop)
        if self._packer is None:
            return blocks
        codes = self._unpacked(blocks)
        for block, part in zip(blocks, codes, strict=True):
            self._packer.unpack_all(faiss.swig_ptr(block), faiss.swig_ptr(part))
        first = start % self._per_block
        return codes.reshape(-1, self._code_size)[first : first + stop - start]

    def write(self, number: int, start: int, codes: np.ndarray) -> None:
        """Write `codes` [n, bytes], for which there is room, from `start` on.

        The rest of the last block becomes 0.
        """
        blocks = self._blocks(number, start, start + len(codes))
        if self._packer is None:
            blocks[:] = codes
            return
        first = start % self._per_block
        whole = self._unpacked(blocks)
        rows = whole.reshape(-1, self._code_size)
        rows[:first] = self.read(number, start - first, start)
        rows[first : first + len(codes)] = codes
        for part, block in zip(whole, blocks, strict=True):
            self._packer.pack_all(faiss.swig_ptr(part), faiss.swig_ptr(block))

    def keep(self, number: int, rows: np.ndarray) -> None:
        """Move the codes of the ascending `rows` [n] of a list to its front."""
        for start in range(0, len(rows), MOVED):
            part = rows[start : start + MOVED]
            first = int(part[0])
            codes = self.read(number, first, int(part[-1]) + 1)
            self.write(number, start, codes[part - first])

    def _blocks(self, number: int, start: int, stop: int) -> np.ndarray:
        """Return the blocks with the codes from `start` to before `stop`: uint8
        [blocks, bytes], the memory itself."""
        first = start // self._per_block
        last = -(-stop // self._per_block)
        if last == 0:  # there may be no memory
            return np.empty((0, self._block_size), np.uint8)
        whole = faiss.rev_swig_ptr(self._memory(number), last * self._block_size)
        return whole.reshape(last, self._block_size)[first:]

    def _unpacked(self, blocks: np.ndarray) -> np.ndarray:
        """Return zeros, with room for the codes of `blocks`."""
        return np.zeros((len(blocks), self._per_block, self._code_size), np.uint8)


class OneRow(CodeLists):
    """The one list of an index without lists, which numbers its entries itself."""

    def __init__(self, index: faiss.Index):
        self._index = index
        packer = None
        if isinstance(index, faiss.IndexFastScan):
            packer = index.get_CodePacker()
        self._pack_by(index.code_size, packer)

    def sizes(self) -> np.ndarray:
        return np.array([self._index.ntotal])

    def ids(self, number: int) -> np.ndarray:
        return np.arange(self._index.ntotal)

    def resize(self, number: int, size: int) -> None:
        blocks = -(-size // self._per_block)
        self._index.ntotal = size
        self._index.codes.resize(blocks * self._block_size)
        if self._packer is not None:
            self._index.ntotal2 = blocks * self._per_block

    def _memory(self, number: int) -> Any:
        return self._index.codes.data()


def parts_by_list(numbers: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yield each list among the ordered `numbers` [n] of lists, and the slice of the
    entries that lie in it."""
    ends = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1)).tolist()
    for first, last in itertools.pairwise(ends):
        yield int(numbers[first]), slice(first, last)
