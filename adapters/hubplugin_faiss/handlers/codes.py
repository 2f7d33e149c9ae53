"""Indexes that hold codes in a row: Flat, SQ and PQ, scanned fast or not, and graphs over these."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.codecs import (
    Coder,
    ExtraDimensions,
    UpgradeSpec,
    codec_of,
)
from hubplugin_faiss.encoding.layout import codes_of, write_codes
from hubplugin_faiss.handlers.base import (
    IndexHandler,
    block_rows,
    copy_fields,
    hand_over,
    handler_for,
    name_of,
    pretransform,
)


class BaseIndexHandler(IndexHandler):
    """An index that holds codes. Upgraded, it has w more components, which transforms before it append."""

    def __init__(self, index: faiss.Index):
        super().__init__(index)
        # What has the codes: the index itself, but of a graph what lies under it.
        self.storage = (
            faiss.downcast_index(index.storage) if hasattr(index, "storage") else index
        )
        self.codec = codec_of(self.storage)  # which refuses codes without room
        self.lossy = self.codec.lossy

    def upgrade(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        extra, base_index = self.widen(offsets, spec)
        d = int(self.index.d)
        remap = faiss.RemapDimensionsTransform(d, d + extra.width, False)
        centring = faiss.CenteringTransform(d + extra.width)
        faiss.copy_array_to_vector(
            np.concatenate([np.zeros(d, np.float32), -extra.query]), centring.mean
        )
        centring.is_trained = True
        return pretransform([remap, centring], base_index)

    def scan(
        self, start: int, size: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        return ((vectors, None) for vectors in self.decode(start, size))

    def extra_dimensions(self) -> list[ExtraDimensions]:
        return []

    @abstractmethod
    def widen(
        self, offsets: np.ndarray, spec: UpgradeSpec
    ) -> tuple[ExtraDimensions, faiss.Index]:
        """Extra dimensions that suit this index and `spec`, and a new index of d + w components that holds `offsets`
        [n] in them."""

    @abstractmethod
    def narrow(self, d: int, extra: ExtraDimensions) -> faiss.Index:
        """A new index of `d` components without the `extra` ones that this one has."""

    def coder(self, extra: ExtraDimensions) -> Coder:
        """The coder that wrote the extra dimensions `extra` into this index."""
        return self.codec.coder(self.index.d - extra.width, extra)

    def bases(
        self, extra: ExtraDimensions, vectors: np.ndarray, rows: np.ndarray | None
    ) -> np.ndarray | None:
        """Extra components of centroids.

        Args:
            extra: the extra dimensions of this index.
            vectors, rows: as in `round_offsets`.

        Returns:
            Those of the lists of `vectors` [n, w] where codes hold differences from centroids, else None.
        """
        return None

    @abstractmethod
    def decode(self, start: int, size: int) -> Iterator[np.ndarray]:
        """All components of the entries from `start` on, in blocks of at most `size`: float32 [b, d], or [b, d + w] if
        it is upgraded."""

    @abstractmethod
    def quantise(
        self,
        vectors: np.ndarray,
        *,
        by_plain_faiss: bool = False,
        extra: ExtraDimensions | None = None,
    ) -> np.ndarray:
        """As of every index, also for `by_plain_faiss`; of an upgraded one `vectors` [n, d + w] have its `extra`
        dimensions."""

    def require_takes(self, vectors: np.ndarray, ids: np.ndarray | None) -> None:
        """Raises StoreError if `append` could not add `vectors` [n, d] with these `ids`, whatever their offsets."""
        if ids is not None:
            raise StoreError(
                f"{name_of(self.index)} numbers its entries itself; add without ids"
            )
        self.codec.require_fits(vectors)

    @abstractmethod
    def append(
        self,
        extra: ExtraDimensions,
        vectors: np.ndarray,
        offsets: np.ndarray,
        ids: np.ndarray | None,
    ) -> None:
        """Adds entries to this index of d + w components.

        Args:
            extra: its extra dimensions.
            vectors: [n, d].
            offsets: [n].
            ids: [n], or None where the index numbers its entries itself.
        """


def base_index_handler(index: faiss.Index) -> BaseIndexHandler:
    """The handler for `index`; raises StoreError if it is no base index."""
    handler = handler_for(index)
    if not isinstance(handler, BaseIndexHandler):
        raise StoreError(f"{name_of(index)} cannot carry offsets where it stands")
    return handler


def with_query(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """`vectors` [n, d] with the extra components `query` [w] behind each: float32 [n, d + w]."""
    components = np.broadcast_to(query, (len(vectors), len(query)))
    return np.ascontiguousarray(
        np.concatenate([vectors, components], axis=1), np.float32
    )


CODEBOOK = 65_536
"""A codebook for offsets is trained on at most about this many."""


def sample_rows(
    offsets: np.ndarray, starts: Sequence[int] | np.ndarray = ()
) -> np.ndarray:
    """Rows of `offsets` [n] to train a codebook on: evenly spread, with the extremes and all `starts`."""
    spread = np.linspace(0, len(offsets) - 1, min(len(offsets), CODEBOOK)).astype(
        np.int64
    )
    return np.unique(
        np.concatenate([spread, starts, [offsets.argmin(), offsets.argmax()]]).astype(
            np.int64
        )
    )


class FlatCodesHandler(BaseIndexHandler):
    """Codes in a row, one an entry."""

    names: ClassVar[tuple[str, ...]] = (
        "IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexScalarQuantizer", "IndexPQ", "IndexPQFastScan",
    )  # fmt: skip
    exhaustive = True

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.arange(start, self.count if stop is None else stop)

    def order(self) -> np.ndarray | slice:
        return slice(None)

    def widen(
        self, offsets: np.ndarray, spec: UpgradeSpec
    ) -> tuple[ExtraDimensions, faiss.Index]:
        sample = offsets[sample_rows(offsets)]
        coder = self.codec.design(spec, sample, None)
        coder.require_holds(sample, None, name_of(self.index))
        return coder.extra, self.widen_by(
            coder, lambda rows: coder.components_for(offsets[rows])
        )

    def widen_by(
        self, coder: Coder, components: Callable[[slice], np.ndarray]
    ) -> faiss.Index:
        """A new index with extra components in its codes by `coder`; `components` gives those of some rows: [b, w]."""
        new = self._empty(self.index.d + coder.extra.width)
        self.codec.widen(new, coder)
        return self._fill(new, lambda codes, rows: coder.join(codes, components(rows)))

    def narrow(self, d: int, extra: ExtraDimensions) -> faiss.Index:
        coder, new = self.codec.coder(d, extra), self._empty(d)
        self.codec.narrow(new, d)
        return self._fill(new, lambda codes, rows: coder.head(codes))

    def decode(self, start: int, size: int) -> Iterator[np.ndarray]:
        for codes, _ in self._blocks(start, size):
            yield np.asarray(self.storage.sa_decode(codes))

    def quantise(
        self,
        vectors: np.ndarray,
        *,
        by_plain_faiss: bool = False,
        extra: ExtraDimensions | None = None,
    ) -> np.ndarray:
        return np.asarray(
            self.storage.sa_decode(
                self.storage.sa_encode(np.ascontiguousarray(vectors))
            )
        )

    def append(
        self,
        extra: ExtraDimensions,
        vectors: np.ndarray,
        offsets: np.ndarray,
        ids: np.ndarray | None,
    ) -> None:
        extended = np.concatenate(
            [vectors, self.coder(extra).components_for(offsets)], axis=1
        )
        write_codes(
            self.index,
            self.count,
            self.count + len(vectors),
            [self.index.sa_encode(extended)],
        )

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        if not isinstance(self.index, faiss.IndexFastScan):
            self.index.remove_ids(faiss.IDSelectorBatch(ids))
            return
        # Faiss's own leaves old codes behind the last one, and its `add` does not erase them before it writes.
        rows = np.setdiff1d(np.arange(self.count), ids)
        write_codes(
            self.index, 0, len(rows), [codes_of(self.index).read(0, self.count)[rows]]
        )

    def _empty(self, d: int) -> faiss.Index:
        """An index like that of the codes, of d components and without codes."""
        old, metric = self.storage, self.index.metric_type
        if isinstance(old, faiss.IndexScalarQuantizer):
            new = faiss.IndexScalarQuantizer(d, old.sq.qtype, metric)
            new.sq.rangestat, new.sq.rangestat_arg = (
                old.sq.rangestat,
                old.sq.rangestat_arg,
            )
        elif isinstance(old, faiss.IndexPQFastScan):
            new = faiss.IndexPQFastScan(d, d // old.pq.dsub, 4, metric)
            copy_fields(new, old, "implem", "skip", "qbs")
        elif isinstance(old, faiss.IndexPQ):
            new = faiss.IndexPQ(d, d // old.pq.dsub, old.pq.nbits, metric)
            copy_fields(
                new,
                old,
                "do_polysemous_training",
                "search_type",
                "encode_signs",
                "polysemous_ht",
            )
            if old.search_type in (
                faiss.IndexPQ.ST_polysemous,
                faiss.IndexPQ.ST_polysemous_generalize,
            ):
                # The extra bits say nothing about the nearness of vectors: let through what they may add.
                new.polysemous_ht += (d // old.pq.dsub - old.pq.M) * old.pq.nbits
        else:
            new = (faiss.IndexFlatL2 if self.euclidean else faiss.IndexFlatIP)(d)
        copy_fields(new, old)
        return new

    def _fill(
        self, new: faiss.Index, code: Callable[[np.ndarray, slice], np.ndarray]
    ) -> faiss.Index:
        """`new` with the entries of this index; `code` makes new codes of old ones [b, code_size] and rows of these."""
        write_codes(
            new,
            0,
            self.count,
            (code(codes, rows) for codes, rows in self._blocks(0, block_rows(new.d))),
        )
        return new

    def _blocks(self, start: int, size: int) -> Iterator[tuple[np.ndarray, slice]]:
        """Codes [b, code_size] and rows of the entries from `start` on, b <= size."""
        codes = codes_of(self.storage)
        for first in range(start, self.count, size):
            rows = slice(first, min(first + size, self.count))
            yield codes.read(rows.start, rows.stop), rows


class GraphHandler(FlatCodesHandler):
    """Codes under a graph, whose links an upgrade keeps: between raw neighbours, so that a downgrade has them back."""

    names = ("IndexHNSWFlat", "IndexHNSWSQ", "IndexHNSWPQ")
    exhaustive = False

    def require_removes(self, *, renumbered: bool = False) -> None:
        raise StoreError(
            f"{name_of(self.index)} cannot remove entries, nor can plain Faiss; build it anew of the others"
        )

    def append(
        self,
        extra: ExtraDimensions,
        vectors: np.ndarray,
        offsets: np.ndarray,
        ids: np.ndarray | None,
    ) -> None:
        # Links are drawn by the vectors alone, as in the raw index: meanwhile every offset is neutral.
        coder, old = self.coder(extra), self.count
        first = coder.head_bits // 8
        components = codes_of(self.storage).read(0, old)[:, first:].copy()
        try:
            self._write_components(
                coder, 0, np.broadcast_to(extra.query, (old, extra.width))
            )
            self.index.add(with_query(vectors, extra.query))
        finally:
            codes_of(self.storage).read(0, old)[:, first:] = components
        self._write_components(coder, old, coder.components_for(offsets))

    def _write_components(
        self, coder: Coder, start: int, components: np.ndarray
    ) -> None:
        size = block_rows(self.index.d)
        for first in range(0, len(components), size):
            part = components[first : first + size]
            codes = codes_of(self.storage).read(
                start + first, start + first + len(part)
            )
            codes[:] = coder.join(coder.head(codes), part)

    def _fill(
        self, new: faiss.Index, code: Callable[[np.ndarray, slice], np.ndarray]
    ) -> faiss.Index:
        storage, graph = super()._fill(new, code), type(self.index)()
        copy_fields(graph, self.index, "init_level0", "keep_max_size_level0")
        graph.d, graph.storage, graph.hnsw = storage.d, storage, self.index.hnsw
        graph.own_fields = hand_over(storage)
        return graph
