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

    Fast-scan indexes have a packer, which packs several codes into a block. Without a
    packer, each block has one code.
    """

    def __init__(self, index: faiss.IndexIVF):
        self._lists = faiss.downcast_InvertedLists(index.invlists)
        self._pointer_to = self._lists.get_codes
        self._pack_by(getattr(self._lists, "packer", None), self._lists.code_size)

    def _pack_by(self, packer: Any, code_size: int) -> None:
        """Set the layout of blocks.

        Args:
            packer: The packer of a fast-scan index, or None for one code per block.
            code_size: The bytes of a code if there is no packer.
        """
        self._packer = packer
        if packer is None:
            self._code_size = self._block_size = code_size
            self._per_block = 1
        else:
            self._code_size = packer.code_size
            self._block_size = packer.block_size
            self._per_block = packer.nvec

    def sizes(self) -> np.ndarray:
        """Return the number of codes in each list: int64 [lists]."""
        list_nos = range(self._lists.nlist)
        return np.array([self._lists.list_size(list_no) for list_no in list_nos])

    def ids(self, list_no: int) -> np.ndarray:
        """Return a view of the ids in the list `list_no`: int64 [size]."""
        size = self._lists.list_size(list_no)
        if not size:  # an empty list may have no memory to point to
            return np.empty(0, np.int64)
        return faiss.rev_swig_ptr(self._lists.get_ids(list_no), size)

    def resize(self, list_no: int, size: int) -> None:
        """Resize the list `list_no` to `size` codes."""
        self._lists.resize(list_no, size)

    def read(self, list_no: int, start: int, stop: int) -> np.ndarray:
        """Return the codes `start` to `stop` - 1 of a list: uint8 [stop - start, bytes].

        Without a packer they are a view: writing to them changes the index.
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
        """Write `codes` [n, bytes] to the list `list_no`, beginning at `start`.

        The list must have been resized for them. The rest of the last block becomes 0.
        """
        blocks = self._blocks(list_no, start, start + len(codes))
        if self._packer is None:
            blocks[:] = codes
            return
        # A packer writes complete blocks: keep the codes before `start` in the first.
        first = start % self._per_block
        unpacked = self._unpacked(blocks)
        rows = unpacked.reshape(-1, self._code_size)
        rows[:first] = self.read(list_no, start - first, start)
        rows[first : first + len(codes)] = codes
        for block_codes, block in zip(unpacked, blocks, strict=True):
            self._packer.pack_all(faiss.swig_ptr(block_codes), faiss.swig_ptr(block))

    def _blocks(self, list_no: int, start: int, stop: int) -> np.ndarray:
        """Return a view of the blocks with the codes `start` to `stop` - 1.

        They are uint8 [blocks, bytes]. Writing to them changes the index.
        """
        end = -(-stop // self._per_block)
        if end == 0:  # an empty list may have no memory to point to
            return np.empty((0, self._block_size), np.uint8)
        memory = faiss.rev_swig_ptr(self._pointer_to(list_no), end * self._block_size)
        return memory.reshape(end, self._block_size)[start // self._per_block :]

    def _unpacked(self, blocks: np.ndarray) -> np.ndarray:
        """Return zeros with space for the codes of `blocks` [b, ...].

        They are uint8 [b, codes in a block, bytes].
        """
        return np.zeros((len(blocks), self._per_block, self._code_size), np.uint8)


class OneRow(CodeLists):
    """The codes of an index without lists, as one list with ids 0, 1, 2, ..."""

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
    """Yield each list number in `list_nos` [n], with the slice of entries that have it.

    `list_nos` has the list of each entry, in ascending order.
    """
    ends = np.flatnonzero(np.diff(list_nos, prepend=-1, append=-1)).tolist()
    for first, end in itertools.pairwise(ends):
        yield int(list_nos[first]), slice(first, end)
