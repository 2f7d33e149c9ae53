"""Indexes that hold codes in a row: Flat, SQ and PQ, scanned fast or not, and graphs over
these."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import ClassVar

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.codecs import (
    Codec,
    Coder,
    ExtraDimensions,
    FloatCodec,
    ProductCodec,
    ScalarCodec,
    UpgradeSpec,
    evenly,
    into,
)
from hubplugin_faiss.encoding.layout import codes_of, write_codes
from hubplugin_faiss.handlers.base import (
    IndexHandler,
    Taken,
    block_rows,
    copy_fields,
    hand_over,
    name_of,
    pretransform,
)

Recoding = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Makes other codes of the codes [b, code_size] of the entries of the numbers [b]."""


class BaseIndexHandler(IndexHandler):
    """An index that holds codes. Upgraded, it has `extra` dimensions, which transforms
    before it append, behind the `d` of its vectors."""

    def __init__(self, index: faiss.Index, extra: ExtraDimensions | None = None):
        super().__init__(index)
        self.extra = extra
        self.extras = [] if extra is None else [extra]
        self.d = int(index.d) - (0 if extra is None else len(extra.query))
        # What has the codes: the index itself, but of a graph what lies under it.
        self.storage = faiss.downcast_index(getattr(index, "storage", index))
        kinds = {"sq": ScalarCodec, "pq": ProductCodec}
        kind = [kinds[part] for part in kinds if hasattr(self.storage, part)]
        # A codec refuses codes without room.
        self.codec: Codec = (kind or [FloatCodec])[0](self.storage)
        self.lossy = self.codec.lossy

    def upgrade(
        self,
        offsets: np.ndarray,
        spec: UpgradeSpec,
        chain: Sequence[faiss.VectorTransform] = (),
    ) -> faiss.Index:
        """Upgrade the index, and put the transforms of `chain` before it."""
        extra, base_index = self.widen(offsets, spec)
        width = len(extra.query)
        remap = faiss.RemapDimensionsTransform(self.d, self.d + width, False)
        centring = faiss.CenteringTransform(self.d + width)
        into(np.concatenate([np.zeros(self.d), -extra.query]), centring.mean)
        centring.is_trained = True
        return pretransform([*chain, remap, centring], base_index)

    @abstractmethod
    def widen(
        self, offsets: np.ndarray, spec: UpgradeSpec
    ) -> tuple[ExtraDimensions, faiss.Index]:
        """Return extra dimensions that suit this index and `spec`, and a new index of
        d + w components that holds `offsets` [n] in them."""

    def downgrade(self) -> faiss.Index:
        new = self._empty(self.d)
        self.codec.narrow(new, self.d)
        return self._fill(new, lambda codes, rows: self.coder.head(codes))

    @abstractmethod
    def _empty(self, d: int) -> faiss.Index:
        """Return an index like this, of `d` components and without entries."""

    @abstractmethod
    def _codes(self, rows: np.ndarray) -> np.ndarray:
        """Return the codes of the entries of the ascending numbers `rows` [b]: uint8
        [b, code_size]."""

    @abstractmethod
    def _fill(self, new: faiss.Index, recode: Recoding) -> faiss.Index:
        """Put all entries into the empty index `new`, with the codes that `recode`
        makes of theirs."""

    def _recoded(self, new: faiss.Index, recode: Recoding) -> Iterator[np.ndarray]:
        """Yield what `recode` makes of the codes of all entries, in blocks that suit
        `new`."""
        for rows in self.row_blocks(block_rows(new.d)):
            yield recode(self._codes(rows), rows)

    @cached_property
    def coder(self) -> Coder:
        """The coder that wrote the extra dimensions into this index."""
        assert self.extra is not None
        return self.codec.coder(self.d, self.extra)

    @abstractmethod
    def decode(self, rows: np.ndarray) -> np.ndarray:
        """Return all components of the entries `rows` [b]: float32 [b, d], or [b, d + w]
        if it is upgraded."""

    def take(self, rows: np.ndarray) -> Taken:
        decoded = self.decode(rows)
        if self.extra is None:
            return decoded, None
        return decoded[:, : self.d], self.extra.offsets(decoded[:, self.d :])

    def as_added(self, vectors: np.ndarray) -> np.ndarray:
        """Return `vectors` [n, d] as plain Faiss adds them: with the query's extra
        components, if it is upgraded."""
        query = np.empty(0) if self.extra is None else self.extra.query
        added = np.broadcast_to(query, (len(vectors), len(query)))
        return np.ascontiguousarray(np.concatenate([vectors, added], 1), np.float32)

    def bases(self, vectors: np.ndarray, rows: np.ndarray | None) -> np.ndarray | None:
        """Return the extra components [n, w] of the centroids of entries, where codes
        hold differences from these, else None.

        vectors, rows: As in `round_offsets`.
        """
        return None

    def round_offsets(
        self, offsets: np.ndarray, vectors: np.ndarray, rows: np.ndarray | None = None
    ) -> np.ndarray:
        components = self.coder.components_for(offsets, self.bases(vectors, rows))
        return self.coder.extra.offsets(components)

    def plan_append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> Callable[[], None]:
        self.require_takes(ids, len(vectors))
        lost = np.abs(self.round_offsets(offsets, vectors) - offsets).max(initial=0)
        if lost > self.most_lost():
            raise StoreError(
                f"offsets from {offsets.min():.4g} to {offsets.max():.4g} find no room "
                f"in the codes of this {name_of(self.index)}, which were made for "
                "others: replace all, index = upgrade(index, model)"
            )
        return lambda: self.append(vectors, offsets, ids)

    def require_takes(self, ids: np.ndarray | None, count: int) -> None:
        """Raises StoreError if `append` could not add `count` entries with these
        `ids`."""
        if ids is not None:
            raise StoreError(
                f"{name_of(self.index)} numbers its entries itself; add without ids"
            )

    @abstractmethod
    def append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> None:
        """Add entries to this upgraded index, as `plan_append` says."""


def base_index_handler(
    index: faiss.Index, extra: ExtraDimensions | None = None
) -> BaseIndexHandler:
    """Return the handler for `index`, which has the `extra` dimensions. Raises
    StoreError if it is no base index."""
    index = faiss.downcast_index(index)
    kind = IndexHandler.registry.get(type(index).__name__)
    if kind is None or not issubclass(kind, BaseIndexHandler):
        raise StoreError(f"{name_of(index)} cannot carry offsets where it stands")
    return kind(index, extra)


CODEBOOK = 65_536
"""A codebook for offsets is trained on at most about this many."""


def sample_rows(
    offsets: np.ndarray, starts: Sequence[int] | np.ndarray = ()
) -> np.ndarray:
    """Return rows of `offsets` [n] to train a codebook on: evenly spread, with the
    extremes and all `starts`."""
    spread = evenly(np.arange(len(offsets)), CODEBOOK)
    ends = [offsets.argmin(), offsets.argmax()]
    return np.unique(np.concatenate([spread, starts, ends]).astype(np.int64))


class FlatCodesHandler(BaseIndexHandler):
    """Codes in a row, one an entry."""

    names: ClassVar[tuple[str, ...]] = (
        "IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexScalarQuantizer", "IndexPQ", "IndexPQFastScan",
    )  # fmt: skip
    exhaustive = True

    def labels(self) -> np.ndarray:
        return np.arange(self.count)

    def widen(
        self, offsets: np.ndarray, spec: UpgradeSpec
    ) -> tuple[ExtraDimensions, faiss.Index]:
        sample = offsets[sample_rows(offsets)]
        coder = self.codec.design(spec, sample, None)
        coder.require_holds(sample, None, name_of(self.index))
        new = self._empty(self.d + len(coder.extra.query))
        self.codec.widen(new, coder)

        def join(codes: np.ndarray, rows: np.ndarray) -> np.ndarray:
            return coder.join(codes, coder.components_for(offsets[rows]))

        return coder.extra, self._fill(new, join)

    def _codes(self, rows: np.ndarray) -> np.ndarray:
        codes = codes_of(self.storage)
        if not len(rows):
            return codes.read(0, 0)
        first = int(rows[0])
        return np.asarray(codes.read(first, int(rows[-1]) + 1)[rows - first])

    def decode(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self.storage.sa_decode(self._codes(rows)))

    def quantise(self, vectors: np.ndarray) -> np.ndarray:
        codes = self.storage.sa_encode(self.as_added(vectors))
        return np.asarray(self.storage.sa_decode(codes)[:, : self.d])

    def append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> None:
        components = self.coder.components_for(offsets)
        codes = self.storage.sa_encode(np.concatenate([vectors, components], axis=1))
        write_codes(self.storage, self.count, self.count + len(vectors), [codes])

    def require_removes(self, *, renumbered: bool = False) -> None:
        """Codes in a row can be removed."""

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        if not isinstance(self.index, faiss.IndexFastScan):
            self.index.remove_ids(faiss.IDSelectorBatch(ids))
            return
        # Faiss's own leaves old codes behind the last one, and its `add` does not erase
        # them before it writes.
        rows = np.setdiff1d(np.arange(self.count), ids)
        codes = codes_of(self.index).read(0, self.count)[rows]
        write_codes(self.index, 0, len(rows), [codes])

    def _empty(self, d: int) -> faiss.Index:
        old = self.storage
        metric = self.index.metric_type
        if isinstance(old, faiss.IndexScalarQuantizer):
            new = faiss.IndexScalarQuantizer(d, old.sq.qtype, metric)
            copy_training(new, old)
        elif isinstance(old, faiss.IndexPQFastScan):
            new = faiss.IndexPQFastScan(d, d // old.pq.dsub, 4, metric)
            copy_fields(new, old, "implem", "skip", "qbs")
        elif isinstance(old, faiss.IndexPQ):
            new = faiss.IndexPQ(d, d // old.pq.dsub, old.pq.nbits, metric)
            copy_fields(new, old, *POLYSEMOUS, "search_type", "encode_signs")
        else:
            new = (faiss.IndexFlatL2 if self.euclidean else faiss.IndexFlatIP)(d)
        copy_fields(new, old)
        return new

    def _fill(self, new: faiss.Index, recode: Recoding) -> faiss.Index:
        write_codes(new, 0, self.count, self._recoded(new, recode))
        return new


POLYSEMOUS = "do_polysemous_training", "polysemous_ht"


def copy_training(new: faiss.Index, old: faiss.Index) -> None:
    """Copy how a scalar quantiser is trained: a downgrade gives back the very bytes."""
    new.sq.rangestat = old.sq.rangestat
    new.sq.rangestat_arg = old.sq.rangestat_arg


class GraphHandler(FlatCodesHandler):
    """Codes under a graph, whose links an upgrade keeps: between raw neighbours, so that
    a downgrade has them back."""

    names = ("IndexHNSWFlat", "IndexHNSWSQ", "IndexHNSWPQ")
    exhaustive = False

    def require_removes(self, *, renumbered: bool = False) -> None:
        raise StoreError(
            f"{name_of(self.index)} cannot remove entries, nor can plain Faiss; build it "
            "anew of the others"
        )

    def append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> None:
        raw = self.downgrade()  # links are drawn by the vectors alone
        raw.add(np.ascontiguousarray(vectors, np.float32))
        super().append(vectors, offsets, ids)
        self.index.hnsw = raw.hnsw
        self.index.ntotal = raw.ntotal

    def _fill(self, new: faiss.Index, recode: Recoding) -> faiss.Index:
        return graph_over(super()._fill(new, recode), self.index)


def graph_over(storage: faiss.Index, like: faiss.IndexHNSW) -> faiss.Index:
    """Return a graph with the links of `like` over `storage`, which it takes over."""
    graph = type(like)()
    copy_fields(graph, like, "init_level0", "keep_max_size_level0")
    graph.d = storage.d
    graph.storage = storage
    graph.hnsw = like.hnsw
    graph.own_fields = hand_over(storage)
    return graph
