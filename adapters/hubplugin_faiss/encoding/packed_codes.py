"""Codes that Faiss packs: the blocks that it scans fast, and RaBitQ with all of its bits.

Faiss's own decoder of RaBitQ reads the first bit alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import faiss
import numpy as np

from hubplugin.errors import StoreError

SCANNED = 32
"""Faiss scans this many codes at a time, which lie side by side also where a block holds several times as many. Its own
packer does not know the latter: it writes, and reconstructs, other codes than are scanned."""


def unpacked(packer: faiss.CodePacker, packed: object, start: int, stop: int, scanned: int | None = None) -> np.ndarray:
    """The codes [start, stop) of those that lie at `packed` in the blocks of `packer`: uint8 [stop - start, code_size].

    scanned: how many bytes of a code are scanned; what else belongs to each lies behind those of the whole block, as in
    RaBitQ. All of them, by default.
    """
    width = packer.code_size if scanned is None else scanned
    blocks, codes = _blocks(packer, packed, stop), np.empty((stop - start, packer.code_size), np.uint8)
    groups, own = _groups(blocks, packer, width), _group_packer(width)
    whole = np.empty((SCANNED, width), np.uint8)
    for row in range(start - start % SCANNED, stop, SCANNED):
        group = np.ascontiguousarray(groups[divmod(row // SCANNED, groups.shape[1])])
        own.unpack_all(faiss.swig_ptr(group), faiss.swig_ptr(whole))
        first, last = max(row, start), min(row + SCANNED, stop)
        codes[first - start : last - start, :width] = whole[first - row : last - row]
    rows = np.arange(start, stop)
    codes[:, width:] = _factors(blocks, packer, width)[rows // packer.nvec, rows % packer.nvec]
    return codes


def pack(
    packer: faiss.CodePacker, codes: np.ndarray, packed: object, start: int, count: int, scanned: int | None = None
) -> None:
    """Writes `codes` [n, code_size] as those from `start` on into blocks of `packer`, for `count` in all, at `packed`.
    What lies in the same block behind them becomes 0. scanned: as in `unpacked`."""
    width = packer.code_size if scanned is None else scanned
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
        whole[place : place + len(part)] = part[:, :width]
        own.pack_all(faiss.swig_ptr(whole), faiss.swig_ptr(memory))
        groups[block, group], groups[block, group + 1 :] = memory, 0
        row += len(part)
    rows = start + np.arange(len(codes))
    _factors(blocks, packer, width)[rows // packer.nvec, rows % packer.nvec] = codes[:, width:]


def add_codes(index: faiss.IndexFastScan, codes: np.ndarray, start: int | None = None) -> None:
    """Puts `codes` [n, code_size] behind those of `index`, or in the place of those from row `start` on."""
    start = int(index.ntotal) if start is None else start
    packer, count = index.get_CodePacker(), start + len(codes)
    blocks = -(-count // packer.nvec)
    index.codes.resize(blocks * packer.block_size)
    index.ntotal, index.ntotal2 = count, blocks * packer.nvec
    pack(packer, codes, index.codes.data(), start, count, scanned_bytes(index))


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
        pack(lists.packer, codes, lists.get_codes(number), start, count, scanned_bytes(index))


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


def erase_removed(index: faiss.IndexFastScan | faiss.IndexIVFFastScan, lists: np.ndarray) -> None:
    """Erases what Faiss's own `remove_ids` has left behind the last codes of `index`, or of its inverted `lists` [k],
    before Faiss adds others there."""
    if isinstance(index, faiss.IndexFastScan):
        if index.ntotal:
            add_codes(index, codes_of_blocks(index, int(index.ntotal) - 1, int(index.ntotal)), int(index.ntotal) - 1)
        return
    for number in lists.tolist():
        last = index.invlists.list_size(number) - 1
        if last >= 0:
            ids = np.array(faiss.rev_swig_ptr(index.invlists.get_ids(number), last + 1))[last:]
            add_codes_to_list(index, number, ids, codes_of_list(index, number, last, last + 1), start=last)


def codes_of_blocks(index: faiss.IndexFastScan, start: int, stop: int) -> np.ndarray:
    """The codes of the entries [start, stop): uint8 [stop - start, code_size]."""
    return unpacked(index.get_CodePacker(), index.codes.data(), start, stop, scanned_bytes(index))


def codes_of_list(index: faiss.IndexIVFFastScan, number: int, start: int, stop: int) -> np.ndarray:
    """The codes of the entries [start, stop) of one inverted list: uint8 [stop - start, code_size]."""
    lists = faiss.downcast_InvertedLists(index.invlists)
    return unpacked(lists.packer, lists.get_codes(number), start, stop, scanned_bytes(index))


def scanned_bytes(index: faiss.Index) -> int | None:
    """As `unpacked` takes it: of RaBitQ the signs are scanned, one bit a component."""
    return (int(index.d) + 7) // 8 if hasattr(index, "rabitq") else None


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


def _factors(blocks: np.ndarray, packer: faiss.CodePacker, width: int) -> np.ndarray:
    """What else `blocks` hold of each code: uint8 [blocks, codes, code_size - width], the memory itself."""
    behind: np.ndarray = blocks[:, width * packer.nvec :]
    return behind.reshape(len(blocks), packer.nvec, packer.code_size - width)


@cache
def _group_packer(code_size: int) -> faiss.CodePacker:
    """The packer of blocks that hold one group of codes."""
    return faiss.IndexPQFastScan(2 * code_size, 2 * code_size, 4, faiss.METRIC_L2, SCANNED).get_CodePacker()


TRIED, AGREES = 16, 1e-3
"""So many codes are decoded and compared with the scores that Faiss gives them, to within this share of these."""


@dataclass(frozen=True)
class RaBitQDecoder:
    """Decodes codes of `quantizer`, the RaBitQuantizer of an index of d dimensions.

    A code holds the sign of each component of the residual r = t - c, about the centre c, and with b > 1 bits another
    b - 1 of its size: a number u in 0 ... 2^b - 1 for each component. The residual is read off as f (u - 2^(b-1) + 1/2)
    with the factor f of the code, so that its product with r is |r|^2. It is therefore longer than r, by some 25 % with
    one bit. Under L2 that would push targets away from every query, the more the further they lie from their centre.
    There codes hold |r|^2 as well, and the residual gets its length back; under inner product they do not.
    """

    quantizer: faiss.RaBitQuantizer
    d: int

    def decoded(self, codes: np.ndarray, centres: np.ndarray) -> np.ndarray:
        """The vectors that `codes` [n, code_size] stand for, about `centres` [n, d] or [d]: float32 [n, d]."""
        residuals, squares = self._residuals(codes)
        if squares is not None:
            lengths = np.sqrt(np.maximum(squares, 0)) / np.maximum(np.linalg.norm(residuals, axis=1), 1e-30)
            residuals = residuals * lengths[:, None].astype(np.float32)
        return np.asarray(residuals + centres, np.float32)

    def check(self, codes: np.ndarray, centres: np.ndarray) -> None:
        """Raises StoreError if the scores that Faiss computes from `codes` [n, code_size] are others than those of the
        residuals that are read off them: then another version of Faiss made them."""
        codes, centres = codes[:TRIED], np.ascontiguousarray(np.broadcast_to(centres, (len(codes), self.d))[:TRIED])
        residuals = self._residuals(codes)[0].astype(np.float64)
        rng = np.random.default_rng(0)
        for code, centre, residual in zip(codes, centres, residuals, strict=True):
            computer = self.quantizer.get_distance_computer(0, faiss.swig_ptr(centre), False)
            away = 4 * np.linalg.norm(residual) * rng.normal(size=(2, self.d)) / np.sqrt(self.d)
            queries, scores = np.ascontiguousarray(centre + away, np.float32), []
            for query in queries:
                computer.set_query(faiss.swig_ptr(query))
                score = computer.distance_to_code(faiss.swig_ptr(code))
                euclidean = self.quantizer.metric_type == faiss.METRIC_L2
                scores.append((((query - centre) ** 2).sum() - score) / 2 if euclidean else score - query @ centre)
            of_residual = (queries - centre) @ residual
            scale = np.abs(of_residual).max() + np.linalg.norm(residual) ** 2 + 1e-30
            if abs(np.diff(scores)[0] - np.diff(of_residual)[0]) > AGREES * scale:
                raise StoreError(
                    "this version of Faiss lays out the codes of RaBitQ in another way than is known, so they cannot "
                    "be decoded; use faiss-cpu 1.15, or another type of index"
                )

    def _residuals(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Residuals [n, d], float32, and where the codes hold them the squared lengths [n] that they should have."""
        more, euclidean = int(self.quantizer.nb_bits) - 1, self.quantizer.metric_type == faiss.METRIC_L2
        size = (self.d + 7) // 8
        signs = _unpacked(codes[:, :size], 1, self.d)
        if more == 0:  # signs, |r|^2 under L2, factor
            factors = _floats(codes[:, size : size + 8])
            residuals = (signs - np.float32(0.5)) * (factors[:, 1:] * np.float32(2 / np.sqrt(self.d)))
        else:  # signs, three floats of the one bit, the other bits, |r|^2 under L2, factor
            first = size + 12
            last = first + (self.d * more + 7) // 8
            factors = _floats(codes[:, last : last + 8])
            levels = signs * 2**more + _unpacked(codes[:, first:last], more, self.d)
            scale = factors[:, 1:] / np.float32(-2 if euclidean else 1)
            residuals = (levels - np.float32(2**more - 0.5)) * scale
        return residuals, factors[:, 0] if euclidean else None


def _unpacked(packed: np.ndarray, width: int, count: int) -> np.ndarray:
    """The first `count` numbers of `width` bits in each row of `packed`, the lowest bit first: float32 [n, count]."""
    bits = np.unpackbits(packed, axis=1, bitorder="little")[:, : width * count].reshape(len(packed), count, width)
    numbers = np.zeros((len(packed), count), np.float32)
    for place in range(width):
        numbers += bits[:, :, place] * np.float32(2**place)
    return numbers


def _floats(memory: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(memory).view(np.float32)
