"""What an upgrade asks for, how extra dimensions carry an offset, and codes put into an empty index in memory."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin.vectors import Vectors, one_line
from hubplugin_faiss.disk import making, take_room
from hubplugin_faiss.encoding.packed_codes import pack

Quantise: TypeAlias = Callable[[int, np.ndarray], np.ndarray]
"""quantise(i, values): what a quantiser makes of `values` [n] in extra dimension i."""

MODEL_BITS, STATE_BITS = 12, 8
"""How many of the last bits of the query's last extra component name the model, and how many its quantiser's state."""

PADDING = 1e-20
"""A component that holds no more than these bits: its square is nothing beside any similarity."""


@dataclass(frozen=True)
class ExtraDimensions:
    """The constant extra components of every query. They define how a target's extra components encode its offset.

    With q the extra components [w] of a query and t those of a target, they add to the similarity, up to a constant,

        inner product    offset(t) = q.t - q.q
        Euclidean        offset(t) = (q.q - |q - t|^2) / 2

    A vector that is added through plain Faiss gets q as well. Under inner product that is the neutral
    offset 0, whatever q is. Under Euclidean nothing can lie nearer to a query, so it is the largest offset.
    """

    query: np.ndarray
    euclidean: bool

    @property
    def width(self) -> int:
        return len(self.query)

    def with_fingerprint(self, fingerprint: str, state: bytes) -> ExtraDimensions:
        """The same with fingerprint bits in the query's last component: they name a model and a quantiser's `state`.

        Where that is padding it is next to nothing; else it becomes a little longer. Some kernels of Faiss round a
        query to bf16 (on CPUs with AVX512_SPR), so that the components that carry offsets may need all their bits.

        So an index and the model beside it are known to belong together, and Faiss itself, which compares the
        transforms, refuses to merge indexes whose codes do not mean the same.
        """
        query = self.query.astype(np.float32)
        query[-1] = query[-1] or PADDING
        bits, size = query[-1:].view(np.uint32), MODEL_BITS + STATE_BITS
        fingerprint_bits = _crc(fingerprint.encode(), MODEL_BITS) | _crc(state, STATE_BITS) << MODEL_BITS
        bits[:] = (bits >> size << size) + np.uint32((1 << size) + fingerprint_bits)
        return replace(self, query=query)

    def has_fingerprint(self, fingerprint: str) -> bool:
        """Whether the fingerprint bits are those of `fingerprint`."""
        found = int(self.query[-1:].astype(np.float32).view(np.uint32)[0])
        return found & ((1 << MODEL_BITS) - 1) == _crc(fingerprint.encode(), MODEL_BITS)

    def offsets(self, components: np.ndarray) -> np.ndarray:
        """The offsets that the extra `components` [n, w] of targets stand for: float32 [n]."""
        q, t = self.query.astype(np.float64), components.astype(np.float64)
        values = (q @ q - ((q - t) ** 2).sum(axis=1)) / 2 if self.euclidean else t @ q - q @ q
        return values.astype(np.float32)

    def components_for(self, offsets: np.ndarray, quantise: Quantise, dimensions: Sequence[int]) -> np.ndarray:
        """Extra components [n, w] for `offsets` [n], written into `dimensions`, which are in ascending order.

        Each dimension takes what is left of the offset, less the q_i^2 that the later ones hold in reserve, as far
        as its quantiser can express it, and leaves the rest to the next one. The neutral offset fills every dimension
        with its reserve.
        """
        q = self.query.astype(np.float64)
        components = np.zeros((len(offsets), self.width), np.float32)
        left = q @ q - 2 * offsets.astype(np.float64) if self.euclidean else offsets.astype(np.float64) + q @ q
        for i in dimensions:
            wanted = left - q[i + 1 :] @ q[i + 1 :]
            exact = q[i] + np.sqrt(np.maximum(wanted, 0)) if self.euclidean else wanted / q[i]
            components[:, i] = quantise(i, exact)
            left -= (components[:, i] - q[i]) ** 2 if self.euclidean else components[:, i] * q[i]
        return components


def _crc(content: bytes, bits: int) -> int:
    return zlib.crc32(content) & ((1 << bits) - 1)


@dataclass(frozen=True)
class Entries:
    """Consecutive codes [b, code_size]; with inverted lists, also the list number and the id of each: int64 [b]."""

    codes: np.ndarray
    lists: np.ndarray | None = None
    ids: np.ndarray | None = None


@dataclass(frozen=True)
class EncodedIndex:
    """A base index that lacks only its codes (`empty`), and these codes; `list_sizes` [nlist] with inverted lists."""

    empty: faiss.Index
    entries: Callable[[], Iterator[Entries]]
    list_sizes: np.ndarray | None = None


Assemble: TypeAlias = Callable[[EncodedIndex], faiss.Index]
"""Puts the codes of an encoded index into it: in memory, or in a file that is written piece by piece."""


@dataclass(frozen=True)
class UpgradeSpec:
    """What the handlers of one index share when it is upgraded.

    low, high: the range of offsets that must find room; the neutral offset 0 lies in it.
    fingerprint: that of the model, "" where offsets come from no model.
    assemble: puts codes into a base index.
    unit: whether the model takes all vectors for unit vectors; offsets then compensate what codes do to lengths.
    rebuild: build graphs anew.
    vectors: the originals [n, d], for the second stage of a two-stage index.
    """

    low: float
    high: float
    fingerprint: str
    assemble: Assemble
    unit: bool = False
    rebuild: bool = False
    vectors: Vectors | None = None

    @property
    def size(self) -> float:
        return max(-self.low, self.high)

    @property
    def longest(self) -> float:
        """The largest sqrt(2 (high - offset)), which is what Euclidean extra dimensions hold."""
        return float(np.sqrt(2 * (self.high - self.low)))


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
    try:
        for number, size in enumerate(encoded.list_sizes.tolist()):
            lists.resize(number, size)  # at once: a list that grows is given room to spare
    except RuntimeError as error:  # lists on disk lie in a file
        raise StoreError(f"Faiss cannot write inverted lists: {one_line(error)}") from None
    if isinstance(lists, faiss.OnDiskInvertedLists):
        _take_room(lists)
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


def _take_room(lists: faiss.OnDiskInvertedLists) -> None:
    """Makes room on the disk for `lists`, which Faiss writes through the map of a file with holes."""
    slots = [lists.lists.at(number) for number in range(lists.nlist)]
    needed = sum(slot.size for slot in slots) * (lists.code_size + 8)
    with making(lists.filename, needed), open(lists.filename, "rb+") as file:
        for slot in slots:  # codes, and behind the room for all of them the ids
            take_room(file, slot.size * lists.code_size, slot.offset)
            take_room(file, slot.size * 8, slot.offset + slot.capacity * lists.code_size)


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
