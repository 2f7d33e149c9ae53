"""Codes of 4 bits in the blocks in which Faiss scans them fast."""

from __future__ import annotations

from functools import cache

import faiss
import numpy as np

SCANNED = 32
"""Faiss scans this many codes at a time, which lie side by side also where a block holds several times as many. Its own
packer does not know the latter: it writes, and reconstructs, other codes than are scanned."""


def unpacked(packer: faiss.CodePacker, packed: object, start: int, stop: int, width: int) -> np.ndarray:
    """The codes [start, stop) of those that lie at `packed` in the blocks of `packer`: uint8 [stop - start, width]."""
    first, last = start // SCANNED, -(-stop // SCANNED)
    groups, own = _groups(packer, packed, stop), _group_packer(packer.code_size)
    codes = np.empty((last - first, SCANNED, packer.code_size), np.uint8)
    for number, part in enumerate(codes, first):
        group = np.ascontiguousarray(groups[divmod(number, groups.shape[1])])
        own.unpack_all(faiss.swig_ptr(group), faiss.swig_ptr(part))
    rows = codes.reshape(-1, packer.code_size)[start - first * SCANNED : stop - first * SCANNED]
    return np.ascontiguousarray(rows[:, :width])


def pack(packer: faiss.CodePacker, codes: np.ndarray, packed: object, start: int, count: int) -> None:
    """Writes `codes` [n, width] as those from `start` on into blocks of `packer`, for `count` in all, at `packed`."""
    groups, own, row = _groups(packer, packed, count), _group_packer(packer.code_size), 0
    while row < len(codes):
        number, place = divmod(start + row, SCANNED)
        block, group = divmod(number, groups.shape[1])
        part = codes[row : row + SCANNED - place]
        whole = np.zeros((SCANNED, packer.code_size), np.uint8)
        memory = np.ascontiguousarray(groups[block, group])
        if place:
            own.unpack_all(faiss.swig_ptr(memory), faiss.swig_ptr(whole))
        elif group == 0:
            groups[block] = 0
        whole[place : place + len(part), : codes.shape[1]] = part
        own.pack_all(faiss.swig_ptr(whole), faiss.swig_ptr(memory))
        groups[block, group] = memory
        row += len(part)


def _groups(packer: faiss.CodePacker, packed: object, count: int) -> np.ndarray:
    """The memory at `packed`, which holds `count` codes: uint8 [blocks, groups of `SCANNED` codes, code_size,
    SCANNED]."""
    blocks = -(-count // packer.nvec)
    memory = faiss.rev_swig_ptr(packed, blocks * packer.block_size)
    groups: np.ndarray = memory.reshape(blocks, packer.code_size, packer.nvec // SCANNED, SCANNED).swapaxes(1, 2)
    return groups


@cache
def _group_packer(code_size: int) -> faiss.CodePacker:
    """The packer of blocks that hold one group of codes."""
    return faiss.IndexPQFastScan(2 * code_size, 2 * code_size, 4, faiss.METRIC_L2, SCANNED).get_CodePacker()
