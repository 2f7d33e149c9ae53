"""Indexes that hold codes: Flat, SQ and PQ, scanned fast or not, and graphs over
these."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import ClassVar

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.codecs import Codec, OffsetCoder, codec_of, set_floats
from hubplugin_faiss.encoding.layout import CodeLists, OneRow, parts_by_list
from hubplugin_faiss.encoding.offsets import ExtraDimensions, UpgradeSpec, evenly
from hubplugin_faiss.handlers.base import IndexHandler, Taken
from hubplugin_faiss.objects import copy_settings, name_of, pretransform

CODEBOOK = 65_536
"""Entries on whose offsets a codebook is trained."""

Recoding = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Makes other codes of the codes [b, bytes] of the entries of the numbers [b]."""


class BaseIndexHandler(IndexHandler):
    """An index that holds codes, in lists around centroids.

    Codes in a row count as one list around 0. Upgraded, the index has `extra`
    dimensions, which transforms before it append, behind the `d` of its vectors.
    """

    lists_in: ClassVar[type[CodeLists]] = CodeLists
    """Finds the codes of an index."""

    residual = False
    """True if codes hold differences from centroids, in the extra dimensions, too."""

    def __init__(self, index: faiss.Index, extra: ExtraDimensions | None = None):
        super().__init__(index)
        self.extra = extra
        self.extras = []
        self.d = index.d
        if extra is not None:
            self.extras = [extra]
            self.d -= len(extra.query)
        # What has the codes: the index itself, but of a graph what lies under it.
        self.storage = faiss.downcast_index(getattr(index, "storage", index))
        self.codec = codec_of(self.storage)
        self.lossy = self.codec.lossy
        self.lists = self.lists_in(self.storage)
        self.sizes = self.lists.sizes()
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.numbers = np.repeat(np.arange(len(self.sizes)), self.sizes)

    def labels(self) -> np.ndarray:
        return np.concatenate([self.lists.ids(n) for n in range(len(self.sizes))])

    def codes(self, rows: np.ndarray) -> np.ndarray:
        """Return the codes of the entries of the ascending numbers `rows` [b]: uint8
        [b, bytes]."""
        found = []
        for number, part in parts_by_list(self.numbers[rows]):
            places = rows[part] - self.starts[number]
            first = int(places[0])
            codes = self.lists.read(number, first, int(places[-1]) + 1)
            found.append(codes[places - first])
        if not found:
            return self.lists.read(0, 0, 0)
        return np.concatenate(found)

    def centres(self, numbers: np.ndarray) -> np.ndarray:
        """Return the centroids from which codes in the lists `numbers` [b] differ.

        They are [b, d + w], or [1, d + w] where they are 0 for all.
        """
        return np.zeros((1, self.index.d), np.float32)

    def nearest(self, vectors: np.ndarray) -> np.ndarray:
        """Return the list that each of `vectors` [n, d] has in the raw index: int64
        [n]."""
        return np.zeros(len(vectors), np.int64)

    def take(self, rows: np.ndarray) -> Taken:
        decoded = self.codec.decode(self.codes(rows))
        decoded = decoded + self.centres(self.numbers[rows])
        if self.extra is None:
            return decoded, None
        return decoded[:, : self.d], self.extra.offsets(decoded[:, self.d :])

    def upgrade(
        self,
        offsets: np.ndarray,
        spec: UpgradeSpec,
        transforms: Sequence[faiss.VectorTransform] = (),
    ) -> faiss.Index:
        """Upgrade the index, and put `transforms` before it."""
        # Codebooks are trained on some entries: the extremes, and one of each list.
        spread = evenly(np.arange(self.count), CODEBOOK)
        ends = [offsets.argmin(), offsets.argmax()]
        rows = np.unique(np.concatenate([spread, ends, self.starts[self.sizes > 0]]))
        numbers = self.numbers[rows]
        ranks = self.ranks(offsets, spec.queries)
        ranks_of_rows = None
        if self.residual:
            ranks_of_rows = ranks[numbers]
        coder = self.codec.design(spec, offsets[rows], ranks_of_rows)
        centres = coder.centres(ranks)
        bases = centres  # from which codes hold differences
        if not self.residual:
            bases = np.zeros_like(centres)
        coder.require_holds(offsets[rows], bases[numbers], name_of(self.index))
        width = len(coder.extra.query)
        new = self.empty(self.d + width, centres)
        tables = np.concatenate([self.codec.tables, coder.codec.tables])
        self.codec.with_tables(tables).install(new)

        def append(codes: np.ndarray, rows: np.ndarray) -> np.ndarray:
            about = bases[self.numbers[rows]]
            components = coder.components_for(offsets[rows], about)
            return coder.join(codes, components - about)

        remap = faiss.RemapDimensionsTransform(self.d, self.d + width, False)
        centring = faiss.CenteringTransform(self.d + width)
        set_floats(centring.mean, np.pad(-coder.extra.query, (self.d, 0)))
        centring.is_trained = True
        return pretransform([*transforms, remap, centring], self.fill(new, append))

    def ranks(self, offsets: np.ndarray, queries: np.ndarray | None) -> np.ndarray:
        """Return what is added to the similarity of each centroid: float32 [lists].

        Args:
            offsets: Of all entries [n].
            queries: Of the bank, behind a query map [m, d]; None if there is none.
        """
        return np.zeros(1, np.float32)

    def downgrade(self) -> faiss.Index:
        new = self.empty(self.d, None)
        self.raw_codec.install(new)
        return self.fill(new, lambda codes, rows: self.coder.head(codes))

    @abstractmethod
    def empty(self, d: int, centres: np.ndarray | None) -> faiss.Index:
        """Return an index like this, of `d` components, with room for no codes yet.

        centres: The extra components [lists, w] of its centroids; None for a raw index.
        """

    def fill(self, new: faiss.Index, recode: Recoding) -> faiss.Index:
        """Put all entries into the empty index `new`, with the codes that `recode`
        makes of theirs."""
        lists = self.lists_in(new)
        for number, size in enumerate(self.sizes.tolist()):
            # At once: a list that grows is given room to spare.
            lists.resize(number, size)
            lists.ids(number)[:] = self.lists.ids(number)
        for rows in self.row_blocks():
            codes = recode(self.codes(rows), rows)
            for number, part in parts_by_list(self.numbers[rows]):
                place = int(rows[part.start] - self.starts[number])
                lists.write(number, place, codes[part])
        return new

    @property
    def raw_codec(self) -> Codec:
        """The codec of the raw index."""
        return self.codec.with_tables(self.codec.tables[: self.d // self.codec.part])

    @cached_property
    def coder(self) -> OffsetCoder:
        """The coder that wrote the extra dimensions into this index."""
        assert self.extra is not None
        codec = self.codec.with_tables(self.codec.tables[self.d // self.codec.part :])
        return OffsetCoder(self.extra, codec, self.raw_codec.bits)

    def quantise(self, vectors: np.ndarray) -> np.ndarray:
        centres = self.centres(self.nearest(vectors))
        added = vectors  # by plain Faiss: with the query's extra components
        if self.extra is not None:
            extra = np.tile(self.extra.query, (len(vectors), 1))
            added = np.concatenate([vectors, extra], axis=1)
        decoded = self.codec.decode(self.codec.encode(added - centres)) + centres
        return decoded[:, : self.d]

    def round_offsets(
        self, offsets: np.ndarray, vectors: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        bases = self.centres(self.numbers[rows])[:, self.d :]
        components = self.coder.components_for(offsets, bases)
        return self.coder.extra.offsets(components)

    def plan_append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> Callable[[], None]:
        self.require_takes(ids, len(vectors))
        if ids is None:
            ids = self.count + np.arange(len(vectors))
        numbers = self.nearest(vectors)
        centres = self.centres(numbers)
        components = self.coder.components_for(offsets, centres[:, self.d :])
        lost = np.abs(self.coder.extra.offsets(components) - offsets).max(initial=0)
        if lost > self.most_lost():
            raise StoreError(
                f"offsets from {offsets.min():.4g} to {offsets.max():.4g} find no room "
                f"in the codes of this {name_of(self.index)}, which were made for "
                "others: replace all, index = upgrade(index, model)"
            )
        extended = np.concatenate([vectors, components], axis=1)
        codes = self.codec.encode(extended - centres)
        return partial(self.append, numbers, ids, codes)

    def require_takes(self, ids: np.ndarray | None, count: int) -> None:
        """Raise StoreError if `count` entries with these `ids` cannot be added."""
        if ids is not None:
            raise StoreError(
                f"{name_of(self.index)} numbers its entries itself; add without ids"
            )

    def append(self, numbers: np.ndarray, ids: np.ndarray, codes: np.ndarray) -> None:
        """Add entries with `ids` [n] and `codes` [n, bytes] to the lists `numbers`
        [n]."""
        order = np.argsort(numbers, kind="stable")
        for number, part in parts_by_list(numbers[order]):
            rows = order[part]
            size = len(self.lists.ids(number))
            self.lists.resize(number, size + len(rows))
            self.lists.ids(number)[size:] = ids[rows]
            self.lists.write(number, size, codes[rows])

    def require_removes(self, *, renumbered: bool = False) -> None:
        """Do nothing: codes can be removed."""

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        # Faiss's own leaves old codes behind the last one of what is scanned fast, and
        # its `add` does not erase them before it writes.
        removed = np.unique(ids)
        for number in range(len(self.sizes)):
            old = self.lists.ids(number).copy()
            stays = np.flatnonzero(~np.isin(old, removed))
            new = old[stays]
            if renumbered:
                new = new - np.searchsorted(removed, new)
            if len(new) < len(old):
                self.lists.keep(number, stays)
                self.lists.resize(number, len(new))
            self.lists.ids(number)[:] = new

    def recount(self) -> int:
        self.index.ntotal = int(self.lists.sizes().sum())
        return self.index.ntotal


class FlatCodesHandler(BaseIndexHandler):
    """Codes in a row, one an entry."""

    names: ClassVar[tuple[str, ...]] = (
        "IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexScalarQuantizer", "IndexPQ", "IndexPQFastScan",
    )  # fmt: skip
    exhaustive = True
    lists_in = OneRow

    def empty(self, d: int, centres: np.ndarray | None) -> faiss.Index:
        old = self.storage
        metric = old.metric_type
        match old:
            case faiss.IndexScalarQuantizer():
                new = faiss.IndexScalarQuantizer(d, old.sq.qtype, metric)
            case faiss.IndexPQFastScan():
                new = faiss.IndexPQFastScan(d, d // old.pq.dsub, 4, metric)
            case faiss.IndexPQ():
                new = faiss.IndexPQ(d, d // old.pq.dsub, old.pq.nbits, metric)
            case _:
                new = faiss.IndexFlat(d, metric)
        copy_settings(new, old)
        return new


class GraphHandler(FlatCodesHandler):
    """Codes under a graph, whose links an upgrade keeps: between raw neighbours, so
    that a downgrade has them back."""

    names = ("IndexHNSWFlat", "IndexHNSWSQ", "IndexHNSWPQ")
    exhaustive = False

    def require_removes(self, *, renumbered: bool = False) -> None:
        raise StoreError(
            f"{name_of(self.index)} cannot remove entries, nor can plain Faiss; build it "
            "anew of the others"
        )

    def plan_append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> Callable[[], None]:
        append = super().plan_append(vectors, offsets, ids)

        def append_and_link() -> None:
            raw = self.downgrade()  # links are drawn by the vectors alone
            raw.add(np.ascontiguousarray(vectors, np.float32))
            append()
            self.index.hnsw = raw.hnsw

        return append_and_link

    def fill(self, new: faiss.Index, recode: Recoding) -> faiss.Index:
        return graph_over(super().fill(new, recode), self.index)


def graph_over(storage: faiss.Index, like: faiss.IndexHNSW) -> faiss.Index:
    """Return a graph with the links of `like` over `storage`, which it takes over."""
    graph = type(like)()
    copy_settings(graph, like)
    graph.d = storage.d
    graph.storage = storage
    graph.hnsw = like.hnsw
    graph.own_fields = True
    storage.this.disown()
    return graph
