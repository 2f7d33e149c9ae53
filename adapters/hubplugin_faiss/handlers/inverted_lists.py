"""Indexes with inverted lists: IVFFlat, IVFSQ and IVFPQ."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.assemble import list_ids
from hubplugin_faiss.encoding.codec import HALF, Coder, require_finite
from hubplugin_faiss.encoding.codecs import codec_of
from hubplugin_faiss.encoding.extra_dimensions import ExtraDimensions
from hubplugin_faiss.encoding.layout import Assemble, EncodedIndex, Entries, UpgradeSpec
from hubplugin_faiss.encoding.scalar_codec import ScalarCodec
from hubplugin_faiss.faiss_objects import block_rows, copy_fields, handed_over, name_of
from hubplugin_faiss.handlers.base import IndexHandler
from hubplugin_faiss.handlers.base_index import BaseIndexHandler, with_query
from hubplugin_faiss.handlers.coarse_quantizer import FLOATS, narrowed_quantizer, nearest_lists, widened_quantizer
from hubplugin_faiss.handlers.flat import sample_rows
from hubplugin_faiss.handlers.list_ranking import list_ranks


class InvertedListsHandler(BaseIndexHandler):
    """Codes in inverted lists. Lists, ids and training stay; extra components of the centroids rank the lists."""

    names: ClassVar[tuple[str, ...]] = ("IndexIVFFlat", "IndexIVFScalarQuantizer", "IndexIVFPQ")

    def widened(self, offsets: np.ndarray, spec: UpgradeSpec) -> tuple[ExtraDimensions, faiss.Index]:
        codec, starts = codec_of(self.index), self._starts()
        if isinstance(codec, ScalarCodec) and codec.kind == HALF:
            for _, codes, _, _ in self._blocks(0, block_rows(self.index.d)):
                require_finite(codes.view(np.uint16))
        rows = sample_rows(offsets, starts[:-1][np.diff(starts) > 0])
        ranks = list_ranks(offsets, starts, self._spreads(rows) if self.euclidean else None)
        of_rows = np.searchsorted(starts, rows, "right") - 1
        based = self._residual and name_of(self.index.quantizer) in FLOATS  # else codes hold all of it
        coder = codec.design(spec, offsets[rows], ranks[of_rows] if based else None)
        quantizer, centres = widened_quantizer(self.index.quantizer, coder, ranks)
        new = self._empty(self.index.d + coder.extra.width, quantizer)
        codec.widen(new, coder)

        def code(numbers: np.ndarray, codes: np.ndarray, rows: slice) -> np.ndarray:
            bases = centres[numbers] if self._residual else None
            components = coder.components_for(offsets[rows], bases)
            return coder.join(codes, components if bases is None else components - bases)

        return coder.extra, spec.assemble(self._encoded(new, code))

    def narrowed(self, d: int, extra: ExtraDimensions, assemble: Assemble) -> faiss.Index:
        codec = codec_of(self.index)
        coder = codec.coder(d, extra)
        new = self._empty(d, narrowed_quantizer(self.index.quantizer, d, extra))
        codec.narrow(new, d)
        return assemble(self._encoded(new, lambda numbers, codes, rows: coder.head(codes)))

    def coder(self, d: int, extra: ExtraDimensions) -> Coder:
        return codec_of(self.index).coder(d, extra)

    def bases(self, d: int, count: int) -> np.ndarray | None:
        if not self._residual:
            return None
        return np.stack([self.index.quantizer.reconstruct(number % self.index.nlist)[d:] for number in range(count)])

    def decoded(self, start: int, size: int) -> Iterator[np.ndarray]:
        for numbers, codes, _, _ in self._blocks(start, size):
            yield self._decode(codes, numbers)

    def coded_extended(self, extra: ExtraDimensions, vectors: np.ndarray) -> np.ndarray:
        nearest = nearest_lists(self.index.quantizer, vectors, extra)
        codes = self._encode(with_query(vectors, extra.query), nearest)
        return self._decode(codes, nearest)[:, : vectors.shape[1]]

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        lists, starts = self.index.invlists, self._starts()
        parts = _parts(starts, start, self.count if stop is None else stop)
        return np.concatenate([np.empty(0, np.int64), *(list_ids(lists, number)[part] for number, part in parts)])

    def order(self) -> np.ndarray | slice:
        return IndexHandler.order(self)

    def append_extended(
        self, d: int, extra: ExtraDimensions, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> None:
        codec_of(self.index).require_fits(vectors)
        ids = self._ids_to_add(ids, len(vectors))
        nearest, extended = self._placed(d, extra, vectors, offsets)
        given = None if self.index.direct_map.type == faiss.DirectMap.Array else faiss.swig_ptr(ids)
        self.index.add_core(len(extended), faiss.swig_ptr(extended), given, faiss.swig_ptr(nearest))

    def files(self) -> list[str]:
        lists = faiss.downcast_InvertedLists(self.index.invlists)
        return [str(lists.filename)] if isinstance(lists, faiss.OnDiskInvertedLists) else []

    def selecting(self, selector: faiss.IDSelector) -> faiss.SearchParameters:
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

    def _placed(
        self, d: int, extra: ExtraDimensions, vectors: np.ndarray, offsets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The lists [n] that `vectors` [n, d] have in the raw index, and the vectors with their extra components."""
        coder, quantizer, bases = codec_of(self.index).coder(d, extra), self.index.quantizer, None
        nearest = nearest_lists(quantizer, vectors, extra)
        if self._residual:
            bases = np.stack([quantizer.reconstruct(int(number))[d:] for number in nearest])
        return nearest, np.ascontiguousarray(np.concatenate([vectors, coder.components_for(offsets, bases)], axis=1))

    def _extend(self, number: int, ids: np.ndarray, codes: np.ndarray) -> None:
        """Adds entries to one list."""
        self.index.invlists.add_entries(number, len(ids), faiss.swig_ptr(ids), faiss.swig_ptr(codes))

    def _encode(self, vectors: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The codes [n, code_size] of `vectors` [n, d + w] in the lists `numbers` [n]."""
        codes = np.empty((len(vectors), self.index.code_size), np.uint8)
        self.index.encode_vectors(len(vectors), *map(faiss.swig_ptr, (vectors, numbers, codes)), False)
        return codes

    def _decode(self, codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The vectors with all their components that `codes` [b, code_size] in the lists `numbers` [b] encode."""
        vectors = np.empty((len(codes), self.index.d), np.float32)
        self.index.decode_vectors(len(codes), *map(faiss.swig_ptr, (codes, numbers, vectors)))
        return vectors

    def _blocks(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, slice]]:
        """List numbers [b], codes [b, code_size], ids [b] and rows of the entries from `start` on, b <= size."""
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

    def _empty(self, d: int, quantizer: faiss.Index) -> faiss.Index:
        old, metric = self.index, self.index.metric_type
        if isinstance(old, faiss.IndexIVFScalarQuantizer):
            new = faiss.IndexIVFScalarQuantizer(quantizer, d, old.nlist, old.sq.qtype, metric, old.by_residual)
            new.sq.rangestat, new.sq.rangestat_arg = old.sq.rangestat, old.sq.rangestat_arg
        elif isinstance(old, faiss.IndexIVFPQ):
            new = faiss.IndexIVFPQ(quantizer, d, old.nlist, d // old.pq.dsub, old.pq.nbits, metric)
            copy_fields(new, old, "do_polysemous_training", "scan_table_threshold", "polysemous_ht")
            if new.polysemous_ht:
                new.polysemous_ht += (d // old.pq.dsub - old.pq.M) * old.pq.nbits
        else:
            new = faiss.IndexIVFFlat(quantizer, d, old.nlist, metric)
        new.own_fields = handed_over(quantizer)
        copy_fields(new, old, "nprobe", "max_codes", "parallel_mode", "by_residual", "quantizer_trains_alone")
        if isinstance(new, faiss.IndexIVFPQ):
            new.use_precomputed_table = min(old.use_precomputed_table, 0)  # -1 forbids them, 0 lets Faiss decide
        if self.files():
            lists = faiss.OnDiskInvertedLists(old.nlist, new.code_size, free_name(self.files()[0]))
            new.replace_invlists(lists, handed_over(lists))
        return new

    def _encoded(self, new: faiss.Index, code: Callable[[np.ndarray, np.ndarray, slice], np.ndarray]) -> EncodedIndex:
        new.direct_map = self.index.direct_map

        def entries() -> Iterator[Entries]:
            for numbers, codes, ids, rows in self._blocks(0, block_rows(new.d)):
                yield Entries(code(numbers, codes, rows), numbers, ids)

        return EncodedIndex(new, entries, np.diff(self._starts()))


def free_name(path: str) -> str:
    """An unused file name for lists that replace the file `path`: its name without or with a suffix `.hub<number>`."""
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


@contextmanager
def mapped_anew(index: faiss.Index) -> Iterator[None]:
    """On exit, rebuilds the direct map of the IVF `index`, if it has one, after entries were added to its lists."""
    kind = index.direct_map.type
    index.set_direct_map_type(faiss.DirectMap.NoMap)
    try:
        yield
    finally:
        index.set_direct_map_type(kind)
