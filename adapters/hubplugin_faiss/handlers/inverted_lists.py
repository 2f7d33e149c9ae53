"""The rules of indexes that hold codes: in a row, in inverted lists, or under a graph."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, ClassVar

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.codec import HALF, Codec, Coder, FloatCodec, ProductCodec, ScalarCodec, require_finite
from hubplugin_faiss.encoding.extra_dimensions import Tail
from hubplugin_faiss.encoding.layout import Body, Entries, Fill, Plan
from hubplugin_faiss.handlers.base import (
    Leaf,
    Rule,
    alike,
    appending,
    block_rows,
    handed_over,
    leaf_for,
    name_of,
    pretransform,
    rule_for,
)

SAMPLE = 65_536
"""A codebook for offsets is trained on at most about this many."""

SOFTNESS, SOFTNESS_L2 = 0.6, 0.35
"""How far, in standard deviations of all offsets, `list_ranks` looks below the largest offset of a list.

The larger it is, the less recall falls at equal nprobe, and the longer are the lists that are visited: by 4 to 11 %
as it stands, 0 to 7 % by L2, where recall does not fall anyway (20,000 and 3,700 code vectors in 32 to 512 lists).
Ranks that are trained on the queries of the bank find 0.003 more of the former at equal length, none of the latter.
"""


def codec_of(index: Any) -> Codec:
    if hasattr(index, "sq"):
        return ScalarCodec(index)
    if hasattr(index, "pq"):
        return ProductCodec(index)
    return FloatCodec(index)


def sample_rows(offsets: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Rows of `offsets` [n] to train a codebook on: evenly spread, with the extremes and all `starts`."""
    spread = np.linspace(0, len(offsets) - 1, min(len(offsets), SAMPLE)).astype(np.int64)
    return np.unique(np.concatenate([spread, starts, [offsets.argmin(), offsets.argmax()]]))


class Row(Leaf):
    """Codes in a row, one an entry."""

    names: ClassVar[tuple[str, ...]] = ("IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexScalarQuantizer", "IndexPQ")
    exhaustive = True

    @property
    def lossy(self) -> bool:  # type: ignore[override]
        return codec_of(self.index).lossy

    def widened(self, offsets: np.ndarray, plan: Plan) -> tuple[Tail, Any]:
        codec = codec_of(self.index)
        coder = codec.plan(plan, offsets[sample_rows(offsets, np.empty(0, np.int64))], None)
        return coder.tail, plan.fill(self._body_with(coder, lambda rows: coder.tails(offsets[rows])))

    def widened_by(self, coder: Coder, tails: np.ndarray) -> Any:
        """A new index with `tails` [n, w] behind its codes."""
        return in_memory(self._body_with(coder, lambda rows: tails[rows]))

    def narrowed(self, d: int, tail: Tail, fill: Fill) -> Any:
        codec = codec_of(self.index)
        coder, new = codec.coder(d, tail), self._empty(d)
        codec.narrow(new, d)
        return fill(self._body(new, lambda codes, rows: coder.head(codes)))

    def coder(self, d: int, tail: Tail) -> Coder:
        return codec_of(self.index).coder(d, tail)

    def bases(self, d: int, count: int) -> np.ndarray | None:
        return None

    def decoded(self, start: int, size: int) -> Iterator[np.ndarray]:
        for first in range(start, self.count, size):
            yield np.asarray(self.index.sa_decode(self._codes(first, min(first + size, self.count))))

    def coded_tailed(self, tail: Tail, vectors: np.ndarray) -> np.ndarray:
        codes = self.index.sa_encode(_with(vectors, tail.query))
        return np.asarray(self.index.sa_decode(codes)[:, : vectors.shape[1]])

    def selecting(self, selector: Any) -> Any:
        return None if hasattr(self.index, "pq") else faiss.SearchParameters(sel=selector)

    def append_tailed(self, d: int, tail: Tail, vectors: np.ndarray, offsets: np.ndarray, ids: Any) -> None:
        if ids is not None:
            raise StoreError(f"{name_of(self.index)} numbers its entries itself; add without ids")
        codec = codec_of(self.index)
        codec.require_fits(vectors)
        self.index.add(np.concatenate([vectors, codec.coder(d, tail).tails(offsets)], axis=1))

    def _empty(self, d: int) -> Any:
        """An index like this one, of d components and without codes."""
        old, metric = self.index, self.index.metric_type
        if isinstance(old, faiss.IndexScalarQuantizer):
            new = faiss.IndexScalarQuantizer(d, old.sq.qtype, metric)
            new.sq.rangestat, new.sq.rangestat_arg = old.sq.rangestat, old.sq.rangestat_arg
        elif isinstance(old, faiss.IndexPQ):
            new = faiss.IndexPQ(d, d // old.pq.dsub, old.pq.nbits, metric)
            alike(new, old, "do_polysemous_training", "search_type", "encode_signs", "polysemous_ht")
            if old.search_type in (faiss.IndexPQ.ST_polysemous, faiss.IndexPQ.ST_polysemous_generalize):
                # The tail's bits say nothing about the nearness of vectors: let through what they may add.
                new.polysemous_ht += (d // old.pq.dsub - old.pq.M) * old.pq.nbits
        else:
            new = (faiss.IndexFlatL2 if self.euclidean else faiss.IndexFlatIP)(d)
        alike(new, old)
        return new

    def _body_with(self, coder: Coder, tails: Callable[[slice], np.ndarray]) -> Body:
        new = self._empty(self.index.d + coder.tail.width)
        codec_of(self.index).widen(new, coder)
        return self._body(new, lambda codes, rows: coder.join(codes, tails(rows)))

    def _body(self, new: Any, code: Callable[[np.ndarray, slice], np.ndarray]) -> Body:
        def entries() -> Iterator[Entries]:
            size = block_rows(new.d)
            for start in range(0, self.count, size):
                rows = slice(start, min(start + size, self.count))
                yield Entries(code(self._codes(rows.start, rows.stop), rows))

        return Body(new, entries)

    def _codes(self, start: int, stop: int) -> np.ndarray:
        """The codes of the entries [start, stop): uint8 [stop - start, code_size]."""
        return codes_of(self.index)[start:stop]


class Lists(Leaf):
    """Codes in inverted lists. Lists, ids and training stay; each centroid gets a tail, which ranks its list."""

    names: ClassVar[tuple[str, ...]] = ("IndexIVFFlat", "IndexIVFScalarQuantizer", "IndexIVFPQ")

    @property
    def lossy(self) -> bool:  # type: ignore[override]
        return codec_of(self.index).lossy

    def widened(self, offsets: np.ndarray, plan: Plan) -> tuple[Tail, Any]:
        codec, starts = codec_of(self.index), self._starts()
        if isinstance(codec, ScalarCodec) and codec.kind == HALF:
            for _, codes, _, _ in self._blocks(0, block_rows(self.index.d)):
                require_finite(codes.view(np.uint16))
        rows = sample_rows(offsets, starts[:-1][np.diff(starts) > 0])
        ranks = list_ranks(offsets, starts, self._spreads(rows) if self.euclidean else None)
        of_rows = np.searchsorted(starts, rows, "right") - 1
        based = self._residual and name_of(self.index.quantizer) in FLOATS  # others leave all of a tail to the codes
        coder = codec.plan(plan, offsets[rows], ranks[of_rows] if based else None)
        quantizer, centres = widened_quantizer(self.index.quantizer, coder, ranks)
        new = self._empty(self.index.d + coder.tail.width, quantizer)
        codec.widen(new, coder)

        def code(numbers: np.ndarray, codes: np.ndarray, rows: slice) -> np.ndarray:
            bases = centres[numbers] if self._residual else None
            tails = coder.tails(offsets[rows], bases)
            return coder.join(codes, tails if bases is None else tails - bases)

        return coder.tail, plan.fill(self._body(new, code))

    def narrowed(self, d: int, tail: Tail, fill: Fill) -> Any:
        codec = codec_of(self.index)
        coder = codec.coder(d, tail)
        new = self._empty(d, narrowed_quantizer(self.index.quantizer, d, tail))
        codec.narrow(new, d)
        return fill(self._body(new, lambda numbers, codes, rows: coder.head(codes)))

    def coder(self, d: int, tail: Tail) -> Coder:
        return codec_of(self.index).coder(d, tail)

    def bases(self, d: int, count: int) -> np.ndarray | None:
        if not self._residual:
            return None
        return np.stack([self.index.quantizer.reconstruct(number % self.index.nlist)[d:] for number in range(count)])

    def decoded(self, start: int, size: int) -> Iterator[np.ndarray]:
        for numbers, codes, _, _ in self._blocks(start, size):
            yield self._decode(codes, numbers)

    def coded_tailed(self, tail: Tail, vectors: np.ndarray) -> np.ndarray:
        nearest = _nearest(self.index.quantizer, vectors, tail)
        codes = self._encode(_with(vectors, tail.query), nearest)
        return self._decode(codes, nearest)[:, : vectors.shape[1]]

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        lists, starts = self.index.invlists, self._starts()
        parts = _parts(starts, start, self.count if stop is None else stop)
        return np.concatenate([np.empty(0, np.int64), *(list_ids(lists, number)[part] for number, part in parts)])

    def order(self) -> np.ndarray | slice:
        return Rule.order(self)

    def append_tailed(self, d: int, tail: Tail, vectors: np.ndarray, offsets: np.ndarray, ids: Any) -> None:
        codec_of(self.index).require_fits(vectors)
        ids = self._ids_to_add(ids, len(vectors))
        nearest, tailed = self._placed(d, tail, vectors, offsets)
        given = None if self.index.direct_map.type == faiss.DirectMap.Array else faiss.swig_ptr(ids)
        self.index.add_core(len(tailed), faiss.swig_ptr(tailed), given, faiss.swig_ptr(nearest))

    def files(self) -> list[str]:
        lists = faiss.downcast_InvertedLists(self.index.invlists)
        return [str(lists.filename)] if isinstance(lists, faiss.OnDiskInvertedLists) else []

    def selecting(self, selector: Any) -> Any:
        return faiss.SearchParametersIVF(sel=selector, nprobe=min(self.index.nlist, 64))

    def _ids_to_add(self, ids: np.ndarray | None, count: int) -> np.ndarray:
        """The ids of `count` entries that are to be added; raises StoreError if the direct map cannot hold `ids`."""
        numbered = self.count + np.arange(count)
        if ids is None:
            return numbered
        if self.index.direct_map.type == faiss.DirectMap.Array and (ids != numbered).any():
            raise StoreError(
                f"the direct map of this {name_of(self.index)} is an array, which holds no ids but 0, 1, 2, ...; "
                "add without ids, or call faiss.extract_index_ivf(index).set_direct_map_type(faiss.DirectMap.Hashtable)"
            )
        return ids

    @property
    def _residual(self) -> bool:
        return bool(self.index.by_residual) and not isinstance(self.index, faiss.IndexIVFFlat)

    def _starts(self) -> np.ndarray:
        """The first entry of each list, and the count: int64 [nlist + 1]."""
        lists = self.index.invlists
        return np.cumsum([0, *(lists.list_size(number) for number in range(self.index.nlist))])

    def _spreads(self, rows: np.ndarray) -> np.ndarray:
        """The mean squared distance of entries from the centroid of their list, by those in `rows`: float64 [nlist]."""
        starts, nlist, size = self._starts(), self.index.nlist, block_rows(self.index.d)
        numbers = np.searchsorted(starts, rows, "right") - 1
        centres, sums = self.index.quantizer.reconstruct_n(0, nlist), np.zeros(nlist)
        for first in range(0, len(rows), size):
            part = numbers[first : first + size]
            places = rows[first : first + size] - starts[part]
            codes = [self._codes(int(n), int(at), int(at) + 1) for n, at in zip(part, places, strict=True)]
            apart = self._decode(np.concatenate(codes), part) - centres[part]
            sums += np.bincount(part, (apart**2).sum(axis=1), minlength=nlist)
        return np.asarray(sums / np.maximum(np.bincount(numbers, minlength=nlist), 1))

    def _codes(self, number: int, start: int, stop: int) -> np.ndarray:
        """The codes of the entries [start, stop) of one list: uint8 [stop - start, code_size]."""
        lists = self.index.invlists
        memory: np.ndarray = faiss.rev_swig_ptr(lists.get_codes(number), lists.list_size(number) * lists.code_size)
        return memory.reshape(-1, lists.code_size)[start:stop]

    def _placed(self, d: int, tail: Tail, vectors: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The lists [n] of `vectors` [n, d], by these alone, as in the raw index, and those with their tails."""
        coder, quantizer, bases = codec_of(self.index).coder(d, tail), self.index.quantizer, None
        nearest = _nearest(quantizer, vectors, tail)
        if self._residual:
            bases = np.stack([quantizer.reconstruct(int(number))[d:] for number in nearest])
        return nearest, np.ascontiguousarray(np.concatenate([vectors, coder.tails(offsets, bases)], axis=1))

    def _extend(self, number: int, ids: np.ndarray, codes: np.ndarray) -> None:
        """Adds entries to one list."""
        self.index.invlists.add_entries(number, len(ids), faiss.swig_ptr(ids), faiss.swig_ptr(codes))

    def _encode(self, vectors: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The codes [n, code_size] of `vectors` [n, d + w] in the lists `numbers` [n]."""
        codes = np.empty((len(vectors), self.index.code_size), np.uint8)
        self.index.encode_vectors(len(vectors), *map(faiss.swig_ptr, (vectors, numbers, codes)), False)
        return codes

    def _decode(self, codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """All components of what `codes` [b, code_size] in the lists `numbers` [b] stand for."""
        vectors = np.empty((len(codes), self.index.d), np.float32)
        self.index.decode_vectors(len(codes), *map(faiss.swig_ptr, (codes, numbers, vectors)))
        return vectors

    def _blocks(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, slice]]:
        """Of the entries from `start` on, b <= size: list numbers [b], codes [b, code_size], ids [b], which entries."""
        lists, starts = self.index.invlists, self._starts()
        for first in range(start, self.count, size):
            last = min(first + size, self.count)
            parts = list(_parts(starts, first, last))
            yield (
                np.concatenate([np.full(part.stop - part.start, number, np.int64) for number, part in parts]),
                np.concatenate([self._codes(number, part.start, part.stop) for number, part in parts]),
                np.concatenate([list_ids(lists, number)[part] for number, part in parts]),
                slice(first, last),
            )

    def _empty(self, d: int, quantizer: Any) -> Any:
        old, metric = self.index, self.index.metric_type
        if isinstance(old, faiss.IndexIVFScalarQuantizer):
            new = faiss.IndexIVFScalarQuantizer(quantizer, d, old.nlist, old.sq.qtype, metric, old.by_residual)
            new.sq.rangestat, new.sq.rangestat_arg = old.sq.rangestat, old.sq.rangestat_arg
        elif isinstance(old, faiss.IndexIVFPQ):
            new = faiss.IndexIVFPQ(quantizer, d, old.nlist, d // old.pq.dsub, old.pq.nbits, metric)
            alike(new, old, "do_polysemous_training", "scan_table_threshold", "polysemous_ht")
            if new.polysemous_ht:
                new.polysemous_ht += (d // old.pq.dsub - old.pq.M) * old.pq.nbits
        else:
            new = faiss.IndexIVFFlat(quantizer, d, old.nlist, metric)
        new.own_fields = handed_over(quantizer)
        alike(new, old, "nprobe", "max_codes", "parallel_mode", "by_residual", "quantizer_trains_alone")
        if isinstance(new, faiss.IndexIVFPQ):
            new.use_precomputed_table = min(old.use_precomputed_table, 0)  # -1 forbids them, 0 lets Faiss decide
        if self.files():
            lists = faiss.OnDiskInvertedLists(old.nlist, new.code_size, free_name(self.files()[0]))
            new.replace_invlists(lists, handed_over(lists))
        return new

    def _body(self, new: Any, code: Callable[[np.ndarray, np.ndarray, slice], np.ndarray]) -> Body:
        new.direct_map = self.index.direct_map

        def entries() -> Iterator[Entries]:
            for numbers, codes, ids, rows in self._blocks(0, block_rows(new.d)):
                yield Entries(code(numbers, codes, rows), numbers, ids)

        return Body(new, entries, np.diff(self._starts()))


class Graph(Leaf):
    """Codes under a graph, which is kept."""

    names = ("IndexHNSWFlat", "IndexHNSWSQ", "IndexHNSWPQ", "IndexNSGFlat", "IndexNSGSQ", "IndexNSGPQ")
    FIELDS: ClassVar = {
        "HNSW": ("init_level0", "keep_max_size_level0"),
        "NSG": ("GK", "build_type", "nndescent_S", "nndescent_R", "nndescent_L", "nndescent_iter", "is_built"),
    }

    @property
    def lossy(self) -> bool:  # type: ignore[override]
        return self._storage.lossy

    @property
    def _storage(self) -> Leaf:
        return leaf_for(self.index.storage)

    @property
    def _kind(self) -> str:
        return "HNSW" if isinstance(self.index, faiss.IndexHNSW) else "NSG"

    def widened(self, offsets: np.ndarray, plan: Plan) -> tuple[Tail, Any]:
        graph = self._rebuilt(offsets) if plan.rebuild else self.index
        tail, storage = self._storage.widened(offsets, replace(plan, fill=in_memory))
        return tail, self._over(storage, graph)

    def widened_by(self, coder: Coder, tails: np.ndarray) -> Any:
        """A new index with `tails` [n, w] behind the codes of its storage."""
        storage = self._storage
        assert isinstance(storage, Row)
        return self._over(storage.widened_by(coder, tails), self.index)

    def narrowed(self, d: int, tail: Tail, fill: Fill) -> Any:
        return self._over(self._storage.narrowed(d, tail, in_memory), self.index)

    def coder(self, d: int, tail: Tail) -> Coder:
        return self._storage.coder(d, tail)

    def bases(self, d: int, count: int) -> np.ndarray | None:
        return None

    def decoded(self, start: int, size: int) -> Iterator[np.ndarray]:
        return self._storage.decoded(start, size)

    def coded_tailed(self, tail: Tail, vectors: np.ndarray) -> np.ndarray:
        return self._storage.coded_tailed(tail, vectors)

    def append_tailed(self, d: int, tail: Tail, vectors: np.ndarray, offsets: np.ndarray, ids: Any) -> None:
        if self._kind == "NSG":
            raise StoreError(
                f"{name_of(self.index)} takes no more vectors once it is built; nor does it in plain Faiss"
            )
        if ids is not None:
            raise StoreError(f"{name_of(self.index)} numbers its entries itself; add without ids")
        # Links are drawn by the vectors alone, as in the raw index: while they are, every tail is neutral.
        storage = faiss.downcast_index(self.index.storage)
        codec_of(storage).require_fits(vectors)
        coder, old = codec_of(storage).coder(d, tail), self.count
        first = coder.head_bits // 8
        tails = codes_of(storage)[:, first:].copy()
        try:
            self._write_tails(storage, coder, 0, np.broadcast_to(tail.query, (old, tail.width)))
            queries = np.broadcast_to(tail.query, (len(vectors), tail.width))
            self.index.add(np.ascontiguousarray(np.concatenate([vectors, queries], axis=1)))
        finally:
            codes_of(storage)[:old, first:] = tails
        self._write_tails(storage, coder, old, coder.tails(offsets))

    @staticmethod
    def _write_tails(storage: Any, coder: Coder, start: int, tails: np.ndarray) -> None:
        codes, size = codes_of(storage), block_rows(storage.d)
        for first in range(0, len(tails), size):
            part = codes[start + first : start + first + size]
            part[:] = coder.join(coder.head(part), tails[first : first + size])

    def _over(self, storage: Any, graph: Any) -> Any:
        """An index like this one over another storage, with the links of `graph`."""
        new = type(self.index)()
        alike(new, self.index, *self.FIELDS[self._kind])
        new.d, new.storage = storage.d, storage
        new.own_fields = handed_over(storage)
        if self._kind == "HNSW":
            new.hnsw = graph.hnsw
        else:
            new.nsg = graph.nsg
        return new

    def _rebuilt(self, offsets: np.ndarray) -> Any:
        """The graph that Faiss builds over the vectors with their offsets: [t, (c + offset) / sqrt(c)] for inner
        product, c the largest |offset|, so that two of them are as similar as the targets that they are."""
        index, d = self.index, int(self.index.d)
        metric = index.metric_type
        if self._kind == "HNSW":
            graph = faiss.IndexHNSWFlat(d + 1, index.hnsw.nb_neighbors(1), metric)
            graph.hnsw.efConstruction, graph.hnsw.efSearch = index.hnsw.efConstruction, index.hnsw.efSearch
        else:
            graph = faiss.IndexNSGFlat(d + 1, index.nsg.R, metric)
            alike(graph, index, *(field for field in self.FIELDS["NSG"] if field != "is_built"))
            graph.nsg.L, graph.nsg.C, graph.nsg.search_L = index.nsg.L, index.nsg.C, index.nsg.search_L
            graph.ntotal = 0
        largest = max(float(np.abs(offsets).max()), 1e-12)
        tails = np.sqrt(2 * (offsets.max() - offsets)) if self.euclidean else (largest + offsets) / np.sqrt(largest)
        size = block_rows(d) if self._kind == "HNSW" else self.count  # NSG takes all at once
        start = 0
        for vectors in self.decoded(0, size):
            part = tails[start : start + len(vectors), None].astype(np.float32)
            graph.add(np.concatenate([vectors, part], axis=1))
            start += len(vectors)
        return graph


class PackedRow(Row):
    """Codes of 4 bits in the order in which Faiss scans them fast, unpacked as they are read."""

    names = ("IndexPQFastScan",)

    def _codes(self, start: int, stop: int) -> np.ndarray:
        return unpacked(self.index.get_CodePacker(), self.index.codes.data(), start, stop, self.index.pq.code_size)

    def _empty(self, d: int) -> Any:
        old = self.index
        new = faiss.IndexPQFastScan(d, d // old.pq.dsub, 4, old.metric_type, old.bbs)
        alike(new, old, "implem", "skip", "qbs")
        return new


class PackedLists(Lists):
    """The same in inverted lists."""

    names = ("IndexIVFPQFastScan",)

    def append_tailed(self, d: int, tail: Tail, vectors: np.ndarray, offsets: np.ndarray, ids: Any) -> None:
        ids = self._ids_to_add(ids, len(vectors))
        nearest, tailed = self._placed(d, tail, vectors, offsets)
        order = np.argsort(nearest, kind="stable")
        codes = self._encode(tailed, nearest)[order]
        with mapped_anew(self.index):
            for run in _runs(nearest[order], ids[order], codes):
                self._extend(*run)
            self.index.ntotal += len(vectors)

    def _extend(self, number: int, ids: np.ndarray, codes: np.ndarray) -> None:
        lists = faiss.downcast_InvertedLists(self.index.invlists)
        old = lists.list_size(number)
        lists.resize(number, old + len(ids))
        list_ids(lists, number)[old:] = ids
        pack(lists.packer, codes, lists.get_codes(number), old, old + len(ids))

    def _codes(self, number: int, start: int, stop: int) -> np.ndarray:
        lists = faiss.downcast_InvertedLists(self.index.invlists)
        return unpacked(lists.packer, lists.get_codes(number), start, stop, self.index.pq.code_size)

    def _decode(self, codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        vectors = self.index.pq.decode(codes)
        if self.index.by_residual:
            vectors += self._centres[numbers]
        return np.asarray(vectors)

    @cached_property
    def _centres(self) -> np.ndarray:
        return np.asarray(self.index.quantizer.reconstruct_n(0, self.index.nlist))

    def _empty(self, d: int, quantizer: Any) -> Any:
        old = self.index
        new = faiss.IndexIVFPQFastScan(quantizer, d, old.nlist, d // old.pq.dsub, 4, old.metric_type, old.bbs)
        new.own_fields = handed_over(quantizer)
        alike(new, old, "nprobe", "max_codes", "parallel_mode", "by_residual", "quantizer_trains_alone")
        alike(new, old, "implem", "skip", "qbs", "qbs2")
        return new


FLOATS = ("IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexHNSWFlat")
"""The coarse quantizers that hold their centroids as floats."""


def widened_quantizer(quantizer: Any, coder: Coder, ranks: np.ndarray) -> tuple[Any, np.ndarray]:
    """A coarse quantizer of d + w components whose centroids rank as if each had the offset in `ranks` [nlist], and
    their tails [nlist, w].

    One that does not hold its centroids as floats stays as it is behind a transform that drops the tail.
    """
    quantizer = faiss.downcast_index(quantizer)
    rule = Row(quantizer) if name_of(quantizer) in Row.names else Graph(quantizer)
    if name_of(quantizer) in FLOATS:
        centres = coder.centres(ranks)
        floats = FloatCodec(quantizer).coder(quantizer.d, coder.tail)
        return rule.widened_by(floats, centres), centres
    d, width = int(quantizer.d), coder.tail.width
    drop = faiss.RemapDimensionsTransform(d + width, d, False)
    return pretransform([drop], faiss.clone_index(quantizer)), np.zeros((len(ranks), width), np.float32)


def list_ranks(offsets: np.ndarray, starts: np.ndarray, apart: np.ndarray | None) -> np.ndarray:
    """What is added to the similarity of a centroid, so that it comes near that of the best entry of its list:
    float32 [nlist].

    offsets: of all entries, list by list. starts [nlist + 1]: the first entry of each list, and the count. apart
    [nlist]: by L2, the mean squared distance of entries from the centroid of their list. By it they lie further from
    a query than that does.

    A soft maximum of the offsets of a list, a LSE(offsets / a): more for a long list, since the best of many lies
    higher than the best of few.
    """
    sizes, lists = np.diff(starts), np.flatnonzero(np.diff(starts))
    softness = max((SOFTNESS if apart is None else SOFTNESS_L2) * float(offsets.std(dtype=np.float64)), 1e-9)
    peaks, sums, size = np.zeros(len(sizes)), np.zeros(len(sizes)), max(SAMPLE, len(sizes))
    peaks[lists] = np.maximum.reduceat(offsets, starts[lists])
    for first in range(0, len(offsets), size):
        values = offsets[first : first + size].astype(np.float64)
        numbers = np.searchsorted(starts, first + np.arange(len(values)), "right") - 1
        sums += np.bincount(numbers, np.exp((values - peaks[numbers]) / softness), minlength=len(sizes))
    ranks = peaks + softness * np.log(np.maximum(sums, 1)) - (0 if apart is None else apart / 2)
    ranks += offsets.mean(dtype=np.float64) - (ranks * sizes).sum() / sizes.sum()
    return np.where(sizes > 0, np.clip(ranks, offsets.min(), offsets.max()), 0).astype(np.float32)


def ranked_quantizer(quantizer: Any, ranks: np.ndarray, plan: Plan) -> Any:
    """A coarse quantizer of the same d whose centroids rank as if each had the offset in `ranks` [nlist]."""
    if name_of(quantizer) not in FLOATS:
        return faiss.clone_index(quantizer)
    coder = FloatCodec(quantizer).plan(plan, ranks, None)
    return pretransform(appending(int(quantizer.d), coder.tail), widened_quantizer(quantizer, coder, ranks)[0])


def unranked_quantizer(quantizer: Any) -> Any:
    """The coarse quantizer that `ranked_quantizer` was given."""
    if name_of(quantizer) != "IndexPreTransform":
        return faiss.clone_index(quantizer)
    return rule_for(quantizer).downgraded(in_memory)


def narrowed_quantizer(quantizer: Any, d: int, tail: Tail) -> Any:
    """The coarse quantizer of d components that `widened_quantizer` was given."""
    quantizer = faiss.downcast_index(quantizer)
    if isinstance(quantizer, faiss.IndexPreTransform):
        return faiss.clone_index(faiss.downcast_index(quantizer.index))
    return leaf_for(quantizer).narrowed(d, tail, in_memory)


def _nearest(quantizer: Any, vectors: np.ndarray, tail: Tail) -> np.ndarray:
    """The list of each of `vectors` [n, d] by its vector alone: int64 [n]."""
    if tail.euclidean:
        return np.ascontiguousarray(narrowed_quantizer(quantizer, vectors.shape[1], tail).search(vectors, 1)[1].ravel())
    blank = np.zeros((len(vectors), tail.width), np.float32)
    return np.ascontiguousarray(quantizer.search(np.concatenate([vectors, blank], axis=1), 1)[1].ravel())


def free_name(path: str) -> str:
    """A name beside the lists file `path` that no file has: without the suffix of an earlier upgrade, or with one."""
    stem = re.sub(r"\.hub\d+$", "", path)
    names = itertools.chain([stem], (f"{stem}.hub{number}" for number in itertools.count()))
    return next(name for name in names if not os.path.exists(name))


def _parts(starts: np.ndarray, first: int, last: int) -> Iterator[tuple[int, slice]]:
    """Where the entries [first, last) lie: list numbers, and which of the list's entries."""
    numbers = range(int(np.searchsorted(starts, first, "right") - 1), int(np.searchsorted(starts, last, "left")))
    for number in numbers:
        part = slice(max(first - int(starts[number]), 0), min(last, int(starts[number + 1])) - int(starts[number]))
        if part.stop > part.start:
            yield number, part


def _runs(lists: np.ndarray, ids: np.ndarray, codes: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Entries that are ordered by list, list by list: its number, the ids and the codes."""
    ids, codes = np.ascontiguousarray(ids), np.ascontiguousarray(codes)
    for first, last in itertools.pairwise(np.flatnonzero(np.diff(lists, prepend=-1, append=-1)).tolist()):
        yield int(lists[first]), ids[first:last], codes[first:last]


@contextmanager
def mapped_anew(index: Any) -> Iterator[None]:
    """What is added to lists in it is in the direct map of the IVF `index` afterwards, if it has one."""
    kind = index.direct_map.type
    index.set_direct_map_type(faiss.DirectMap.NoMap)
    try:
        yield
    finally:
        index.set_direct_map_type(kind)


def _with(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """`vectors` [n, d] with the tail of a query behind each: float32 [n, d + w]."""
    tails = np.broadcast_to(query, (len(vectors), len(query)))
    return np.ascontiguousarray(np.concatenate([vectors, tails], axis=1), np.float32)


SCANNED = 32
"""Faiss scans this many codes at a time, which lie side by side also where a block holds several times as many. Its own
packer does not know the latter: it writes, and reconstructs, other codes than are scanned."""


def unpacked(packer: Any, packed: Any, start: int, stop: int, width: int) -> np.ndarray:
    """The codes [start, stop) of those that lie at `packed` in the blocks of `packer`: uint8 [stop - start, width]."""
    first, last = start // SCANNED, -(-stop // SCANNED)
    groups, own = _groups(packer, packed, stop), _group_packer(packer.code_size)
    codes = np.empty((last - first, SCANNED, packer.code_size), np.uint8)
    for number, part in enumerate(codes, first):
        group = np.ascontiguousarray(groups[divmod(number, groups.shape[1])])
        own.unpack_all(faiss.swig_ptr(group), faiss.swig_ptr(part))
    rows = codes.reshape(-1, packer.code_size)[start - first * SCANNED : stop - first * SCANNED]
    return np.ascontiguousarray(rows[:, :width])


def pack(packer: Any, codes: np.ndarray, packed: Any, start: int, count: int) -> None:
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


def _groups(packer: Any, packed: Any, count: int) -> np.ndarray:
    """The memory at `packed`, which holds `count` codes: uint8 [blocks, groups of `SCANNED` codes, code_size,
    SCANNED]."""
    blocks = -(-count // packer.nvec)
    memory = faiss.rev_swig_ptr(packed, blocks * packer.block_size)
    groups: np.ndarray = memory.reshape(blocks, packer.code_size, packer.nvec // SCANNED, SCANNED).swapaxes(1, 2)
    return groups


@cache
def _group_packer(code_size: int) -> Any:
    """The packer of blocks that hold one group of codes."""
    return faiss.IndexPQFastScan(2 * code_size, 2 * code_size, 4, faiss.METRIC_L2, SCANNED).get_CodePacker()


def list_ids(lists: Any, number: int) -> np.ndarray:
    size = lists.list_size(number)
    if size == 0:
        return np.empty(0, np.int64)
    memory: np.ndarray = faiss.rev_swig_ptr(lists.get_ids(number), size)
    return memory


def in_memory(body: Body) -> Any:
    """The leaf of `body` with its codes."""
    new = body.shell
    if isinstance(new, faiss.IndexIVF):
        return _lists_in_memory(body)
    packer = new.get_CodePacker() if isinstance(new, faiss.IndexFastScan) else None
    if packer is None:
        new.codes.resize(int(new.ntotal) * int(new.code_size))
    else:
        blocks = -(-int(new.ntotal) // packer.nvec)
        new.ntotal2 = blocks * packer.nvec
        new.codes.resize(blocks * packer.block_size)
    start = 0
    for entries in body.entries():
        if packer is None:
            codes_of(new)[start : start + len(entries.codes)] = entries.codes
        else:
            pack(packer, entries.codes, new.codes.data(), start, int(new.ntotal))
        start += len(entries.codes)
    return new


def _lists_in_memory(body: Body) -> Any:
    new = body.shell
    assert body.list_sizes is not None
    lists = faiss.downcast_InvertedLists(new.invlists)
    packer, filled = getattr(lists, "packer", None), np.zeros(new.nlist, np.int64)
    for number, size in enumerate(body.list_sizes.tolist()):
        lists.resize(number, size)  # at once: a list that grows is given room to spare
    for entries in body.entries():
        assert entries.lists is not None
        assert entries.ids is not None
        for number, ids, codes in _runs(entries.lists, entries.ids, entries.codes):
            start, size = int(filled[number]), int(body.list_sizes[number])
            if packer is None:
                lists.update_entries(number, start, len(ids), faiss.swig_ptr(ids), faiss.swig_ptr(codes))
            else:
                list_ids(lists, number)[start : start + len(ids)] = ids
                pack(packer, codes, lists.get_codes(number), start, size)
            filled[number] += len(ids)
    if isinstance(new, faiss.IndexIVFPQ | faiss.IndexIVFPQFastScan):
        new.precompute_table()
    return new


def codes_of(index: Any) -> np.ndarray:
    """The codes of an index that holds them in a row: uint8 [n, code_size], the memory itself."""
    n, size = int(index.ntotal), int(index.code_size)
    if n == 0:
        return np.empty((0, size), np.uint8)
    memory: np.ndarray = faiss.rev_swig_ptr(index.codes.data(), n * size)
    return memory.reshape(n, size)
