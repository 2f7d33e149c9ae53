"""Indexes with one code an entry, in a row: Flat, SQ and PQ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.assemble import codes_of, in_memory
from hubplugin_faiss.encoding.codec import Coder
from hubplugin_faiss.encoding.codecs import codec_of
from hubplugin_faiss.encoding.extra_dimensions import ExtraDimensions
from hubplugin_faiss.encoding.layout import Assemble, EncodedIndex, Entries, UpgradeSpec
from hubplugin_faiss.faiss_objects import block_rows, copy_fields, name_of
from hubplugin_faiss.handlers.base_index import BaseIndexHandler, with_query

SAMPLE = 65_536
"""A codebook for offsets is trained on at most about this many."""


def sample_rows(offsets: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Rows of `offsets` [n] to train a codebook on: evenly spread, with the extremes and all `starts`."""
    spread = np.linspace(0, len(offsets) - 1, min(len(offsets), SAMPLE)).astype(np.int64)
    return np.unique(np.concatenate([spread, starts, [offsets.argmin(), offsets.argmax()]]))


class FlatCodesHandler(BaseIndexHandler):
    """Codes in a row, one an entry."""

    names: ClassVar[tuple[str, ...]] = ("IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexScalarQuantizer", "IndexPQ")

    @property
    def exhaustive(self) -> bool:
        return True

    def widened(self, offsets: np.ndarray, spec: UpgradeSpec) -> tuple[ExtraDimensions, faiss.Index]:
        codec = codec_of(self.index)
        coder = codec.design(spec, offsets[sample_rows(offsets, np.empty(0, np.int64))], None)
        return coder.extra, spec.assemble(self._encoded_with(coder, lambda rows: coder.components_for(offsets[rows])))

    def widened_by(self, coder: Coder, components: np.ndarray) -> faiss.Index:
        """A new index with extra `components` [n, w] in its codes."""
        return in_memory(self._encoded_with(coder, lambda rows: components[rows]))

    def narrowed(self, d: int, extra: ExtraDimensions, assemble: Assemble) -> faiss.Index:
        codec = codec_of(self.index)
        coder, new = codec.coder(d, extra), self._empty(d)
        codec.narrow(new, d)
        return assemble(self._encoded(new, lambda codes, rows: coder.head(codes)))

    def coder(self, d: int, extra: ExtraDimensions) -> Coder:
        return codec_of(self.index).coder(d, extra)

    def bases(self, d: int, count: int) -> np.ndarray | None:
        return None

    def decoded(self, start: int, size: int) -> Iterator[np.ndarray]:
        for first in range(start, self.count, size):
            yield np.asarray(self.index.sa_decode(self._codes(first, min(first + size, self.count))))

    def coded_extended(self, extra: ExtraDimensions, vectors: np.ndarray) -> np.ndarray:
        codes = self.index.sa_encode(with_query(vectors, extra.query))
        return np.asarray(self.index.sa_decode(codes)[:, : vectors.shape[1]])

    def selecting(self, selector: faiss.IDSelector) -> faiss.SearchParameters:
        return None if hasattr(self.index, "pq") else faiss.SearchParameters(sel=selector)

    def append_extended(
        self, d: int, extra: ExtraDimensions, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> None:
        if ids is not None:
            raise StoreError(f"{name_of(self.index)} numbers its entries itself; add without ids")
        codec = codec_of(self.index)
        codec.require_fits(vectors)
        self.index.add(np.concatenate([vectors, codec.coder(d, extra).components_for(offsets)], axis=1))

    def _empty(self, d: int) -> faiss.Index:
        """An index like this one, of d components and without codes."""
        old, metric = self.index, self.index.metric_type
        if isinstance(old, faiss.IndexScalarQuantizer):
            new = faiss.IndexScalarQuantizer(d, old.sq.qtype, metric)
            new.sq.rangestat, new.sq.rangestat_arg = old.sq.rangestat, old.sq.rangestat_arg
        elif isinstance(old, faiss.IndexPQ):
            new = faiss.IndexPQ(d, d // old.pq.dsub, old.pq.nbits, metric)
            copy_fields(new, old, "do_polysemous_training", "search_type", "encode_signs", "polysemous_ht")
            if old.search_type in (faiss.IndexPQ.ST_polysemous, faiss.IndexPQ.ST_polysemous_generalize):
                # The extra bits say nothing about the nearness of vectors: let through what they may add.
                new.polysemous_ht += (d // old.pq.dsub - old.pq.M) * old.pq.nbits
        else:
            new = (faiss.IndexFlatL2 if self.euclidean else faiss.IndexFlatIP)(d)
        copy_fields(new, old)
        return new

    def _encoded_with(self, coder: Coder, components: Callable[[slice], np.ndarray]) -> EncodedIndex:
        new = self._empty(self.index.d + coder.extra.width)
        codec_of(self.index).widen(new, coder)
        return self._encoded(new, lambda codes, rows: coder.join(codes, components(rows)))

    def _encoded(self, new: faiss.Index, code: Callable[[np.ndarray, slice], np.ndarray]) -> EncodedIndex:
        def entries() -> Iterator[Entries]:
            size = block_rows(new.d)
            for start in range(0, self.count, size):
                rows = slice(start, min(start + size, self.count))
                yield Entries(code(self._codes(rows.start, rows.stop), rows))

        return EncodedIndex(new, entries)

    def _codes(self, start: int, stop: int) -> np.ndarray:
        """The codes of the entries [start, stop): uint8 [stop - start, code_size]."""
        return codes_of(self.index)[start:stop]
