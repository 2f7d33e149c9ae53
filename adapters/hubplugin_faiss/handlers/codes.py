"""Handlers for indexes that store codes: Flat, SQ, PQ, their fast-scan variants and
graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import ClassVar

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin.measures.hubness import pick_evenly
from hubplugin_faiss.encoding.codecs import (
    Codec,
    OffsetCoder,
    ProductCodec,
    ScalarCodec,
    set_floats,
)
from hubplugin_faiss.encoding.layout import CodeLists, OneRow, parts_by_list
from hubplugin_faiss.encoding.offsets import ExtraDimensions, UpgradeSpec
from hubplugin_faiss.handlers.base import Added, Changes, IndexHandler
from hubplugin_faiss.objects import copy_settings, name_of, pretransform

CODEBOOK = 65_536
"""The number of entries picked evenly to train the codebooks of offsets."""

Recoding = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A function that takes codes [b, bytes] and their rows [b], and returns new codes."""


class BaseIndexHandler(IndexHandler):
    """Handles an index that stores codes in lists around centroids.

    Contiguous codes count as one list around 0. An upgraded index has the `extra`
    dimensions after the `d` dimensions of its vectors. The transforms in front of the
    index append them.
    """

    lists_in: ClassVar[type[CodeLists]] = CodeLists
    """The class that finds the codes of an index."""

    residual = False
    """True if codes store differences from centroids, including the extra dimensions."""

    def __init__(self, index: faiss.Index, extra: ExtraDimensions | None = None):
        super().__init__(index)
        self.extra = extra
        self.extras = []
        self.d = index.d
        if extra is not None:
            self.extras = [extra]
            self.d -= len(extra.query)
        # A graph keeps its codes in the index under it, other types in themselves.
        self.storage = faiss.downcast_index(getattr(index, "storage", index))
        self.codec: Codec
        if hasattr(self.storage, "sq"):
            self.codec = ScalarCodec(self.storage.sq)
        elif hasattr(self.storage, "pq"):
            self.codec = ProductCodec(self.storage.pq)
        else:
            self.codec = Codec(index.d)
        self.lossy = self.codec.lossy
        self.lists = self.lists_in(self.storage)
        self.sizes = self.lists.sizes()
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.list_nos = np.repeat(np.arange(len(self.sizes)), self.sizes)
        self._taken = np.empty(0, int), np.empty((0, index.d), np.float32)

    def labels(self) -> np.ndarray:
        return np.concatenate([self.lists.ids(n) for n in range(len(self.sizes))])

    def codes(self, rows: np.ndarray) -> np.ndarray:
        """Return the codes of the entries `rows` [b], ascending: uint8 [b, bytes]."""
        blocks = [self.lists.read(0, 0, 0)]  # an empty array, in case `rows` is empty
        for list_no, part in parts_by_list(self.list_nos[rows]):
            places = rows[part] - self.starts[list_no]
            first = int(places[0])
            codes = self.lists.read(list_no, first, int(places[-1]) + 1)
            blocks.append(codes[places - first])
        return np.concatenate(blocks)

    def centres(self, list_nos: np.ndarray) -> np.ndarray:
        """Return the centroids [b, d + w] of the lists `list_nos` [b].

        The vector of an entry is its decoded code plus its centroid. If codes do not
        store differences, return zeros [1, d + w].
        """
        return np.zeros((1, self.index.d), np.float32)

    def nearest(self, vectors: np.ndarray) -> np.ndarray:
        """Return the raw index's list for each of `vectors` [n, d]: int64 [n]."""
        return np.zeros(len(vectors), np.int64)

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # An upgrade takes the only block of a small index several times.
        taken_rows, decoded = self._taken
        if not np.array_equal(taken_rows, rows):
            decoded = self.codec.decode(self.codes(rows))
            decoded = decoded + self.centres(self.list_nos[rows])
            self._taken = rows, decoded
        vectors = decoded[:, : self.d].copy()
        if self.extra is None:
            return vectors, np.full(len(rows), np.nan, np.float32)
        return vectors, self.extra.offsets(decoded[:, self.d :])

    def upgrade(
        self,
        offsets: np.ndarray,
        spec: UpgradeSpec,
        transforms: Sequence[faiss.VectorTransform] = (),
    ) -> faiss.Index:
        """Return the upgraded index, with every code extended by its offset.

        Args:
            offsets: The offsets of all entries in scan order, [n].
            spec: The specification of the extra dimensions.
            transforms: Transforms to put first. After them, two more transforms append
                the extra components to each query.
        """
        # Sample entries evenly, and add the entries with the most extreme offsets and
        # one entry of each list.
        spread = pick_evenly(np.arange(self.count), CODEBOOK)
        extremes = [offsets.argmin(), offsets.argmax()]
        firsts = self.starts[self.sizes > 0]
        sample = np.unique(np.concatenate([spread, extremes, firsts]))
        list_nos = self.list_nos[sample]

        # Design the coder of the extra dimensions.
        centroid_offsets = self.centroid_offsets(offsets, spec.queries)
        sample_bases = centroid_offsets[list_nos] if self.residual else None
        coder = self.codec.design(spec, offsets[sample], sample_bases)
        centroid_components = coder.centres(centroid_offsets)
        # The components [lists, w] from which codes store differences.
        bases = np.zeros_like(centroid_components)
        if self.residual:
            bases = centroid_components
        coder.require_holds(offsets[sample], bases[list_nos], self.index)

        # Append the extra dimensions to all codes, and to all queries.
        def recode(codes: np.ndarray, rows: np.ndarray) -> np.ndarray:
            """Append the offsets of the entries `rows` to their codes."""
            base = bases[self.list_nos[rows]]
            components = coder.components_for(offsets[rows], base)
            return coder.join(codes, components - base)

        tables = np.concatenate([self.codec.tables, coder.codec.tables])
        new = self.rebuild(tables, centroid_components, recode)
        append_zeros = faiss.RemapDimensionsTransform(self.d, new.d, False)
        # A centring transform subtracts its mean, so mean -q appends q to each query.
        append_query = faiss.CenteringTransform(new.d)
        set_floats(append_query.mean, np.pad(-coder.extra.query, (self.d, 0)))
        append_query.is_trained = True
        return pretransform([*transforms, append_zeros, append_query], new)

    def centroid_offsets(
        self, offsets: np.ndarray, queries: np.ndarray | None
    ) -> np.ndarray:
        """Return the offset of each centroid, which ranks its list: float32 [lists].

        Args:
            offsets: The offsets of all entries, [n].
            queries: Queries from the bank, [m, d], mapped if there is a query map. None
                without a bank.
        """
        return np.zeros(1, np.float32)

    def downgrade(self) -> faiss.Index:
        tables = self.codec.tables[: self.d // self.codec.part]
        return self.rebuild(tables, None, lambda codes, rows: self.coder.head(codes))

    def rebuild(
        self, tables: np.ndarray, centres: np.ndarray | None, recode: Recoding
    ) -> faiss.Index:
        """Return a new index of this type with all entries, recoded by `recode`.

        Args:
            tables: The tables of the new codec, for all components.
            centres: The extra components of the centroids, [lists, w]. None for a raw
                index.
            recode: The function that changes the codes.
        """
        codec = self.codec.with_tables(tables)
        new = self.empty(codec, centres)
        codec.install(new)
        lists = self.lists_in(new)
        for list_no, size in enumerate(self.sizes.tolist()):
            # Resize once: a list that grows step by step reserves spare memory.
            lists.resize(list_no, size)
            lists.ids(list_no)[:] = self.lists.ids(list_no)
        for rows in self.row_blocks():
            codes = recode(self.codes(rows), rows)
            for list_no, part in parts_by_list(self.list_nos[rows]):
                place = int(rows[part.start] - self.starts[list_no])
                lists.write(list_no, place, codes[part])
        return new

    def empty(self, codec: Codec, centres: np.ndarray | None) -> faiss.Index:
        """Return a new index of this type for the codes of `codec`, without entries.

        centres: As in `rebuild`.
        """
        raise NotImplementedError

    @cached_property
    def coder(self) -> OffsetCoder:
        """The coder that wrote the extra dimensions into this index."""
        assert self.extra is not None
        codec = self.codec.with_tables(self.codec.tables[self.d // self.codec.part :])
        return OffsetCoder(self.extra, codec, self.codec.bits - codec.bits)

    def quantise(self, vectors: np.ndarray) -> np.ndarray:
        extended = vectors
        if self.extra is not None:
            # The codec takes extended vectors. The values of their extra components do
            # not matter here, since they are cut off: take those that Faiss appends.
            components = np.tile(self.extra.query, (len(vectors), 1))
            extended = np.hstack([vectors, components])
        centres = self.centres(self.nearest(vectors))
        codes = self.codec.encode(extended - centres)
        return (self.codec.decode(codes) + centres)[:, : self.d]

    def round_offsets(
        self, offsets: np.ndarray, vectors: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        bases = self.centres(self.list_nos[rows])[:, self.d :]
        components = self.coder.components_for(offsets, bases)
        return self.coder.extra.offsets(components)

    def plan_append(self, added: Added) -> Changes:
        ids = self.ids_of(added)
        list_nos = self.nearest(added.vectors)
        centres = self.centres(list_nos)
        components = self.coder.components_for(added.offsets, centres[:, self.d :])
        held_offsets = self.coder.extra.offsets(components)
        if np.abs(held_offsets - added.offsets).max(initial=0) > self.largest_loss:
            raise StoreError(
                f"offsets from {added.offsets.min():.4g} to {added.offsets.max():.4g} "
                f"do not fit the codes of this {name_of(self.index)}, which were made "
                "for other offsets: replace all, index = upgrade(index, model)"
            )
        codes = self.codec.encode(np.hstack([added.vectors, components]) - centres)
        return [partial(self.append, list_nos, ids, codes)]

    def ids_of(self, added: Added) -> np.ndarray:
        """Return the ids of entries to add: int64 [n].

        Raises StoreError if ids are given but not allowed, or required but not given.
        """
        if added.ids is not None:
            raise StoreError(
                f"{name_of(self.index)} numbers its entries itself; add without ids"
            )
        return self.count + np.arange(len(added.vectors))

    def append(self, list_nos: np.ndarray, ids: np.ndarray, codes: np.ndarray) -> None:
        """Append entries with `ids` [n] and `codes` [n, bytes] to lists `list_nos` [n]."""
        order = np.argsort(list_nos, kind="stable")
        with self.changing():
            for list_no, part in parts_by_list(list_nos[order]):
                rows = order[part]
                size = int(self.sizes[list_no])
                self.lists.resize(list_no, size + len(rows))
                self.lists.ids(list_no)[size:] = ids[rows]
                self.lists.write(list_no, size, codes[rows])

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Update the number of entries after the lists have been changed."""
        yield
        self.index.ntotal = int(self.lists.sizes().sum())

    def plan_remove(self, ids: np.ndarray, renumbered: bool) -> Changes:
        return [partial(self.remove, np.unique(ids), renumbered)]

    def remove(self, removed: np.ndarray, renumbered: bool) -> None:
        """Remove the entries with the ids `removed`, ascending; see `plan_remove`."""
        # Faiss's own remove_ids leaves stale codes after the last entry of a fast-scan
        # list, and a later `add` does not clear them.
        with self.changing():
            for list_no, size in enumerate(self.sizes.tolist()):
                old_ids = self.lists.ids(list_no).copy()
                kept = np.flatnonzero(~np.isin(old_ids, removed))
                ids_kept = old_ids[kept]
                if renumbered:
                    # Subtract the number of removed ids below each.
                    ids_kept = ids_kept - np.searchsorted(removed, ids_kept)
                if len(kept) < size:
                    codes = self.lists.read(list_no, 0, size)[kept]
                    self.lists.resize(list_no, len(kept))
                    self.lists.write(list_no, 0, codes)
                self.lists.ids(list_no)[:] = ids_kept


class FlatCodesHandler(BaseIndexHandler):
    """Handles an index that stores the codes of all entries contiguously."""

    names: ClassVar[tuple[str, ...]] = (
        "IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexScalarQuantizer", "IndexPQ", "IndexPQFastScan",
    )  # fmt: skip
    exhaustive = True
    lists_in = OneRow

    def empty(self, codec: Codec, centres: np.ndarray | None) -> faiss.Index:
        old = self.storage
        kind = faiss.IndexFlat  # not IndexFlatIP, which takes no metric
        if not isinstance(old, faiss.IndexFlat):
            kind = type(old)
        new = kind(codec.d, *codec.arguments, old.metric_type)
        copy_settings(new, old)
        return new


class GraphHandler(FlatCodesHandler):
    """Handles an index that stores codes under a graph.

    Links join neighbours by their vectors alone. An upgrade keeps them, so a downgrade
    restores the same graph.
    """

    names = ("IndexHNSWFlat", "IndexHNSWSQ", "IndexHNSWPQ")
    exhaustive = False

    def plan_remove(self, ids: np.ndarray, renumbered: bool) -> Changes:
        raise StoreError(
            f"{name_of(self.index)} cannot remove entries, nor can plain Faiss; build a "
            "new index from the entries that stay"
        )

    def plan_append(self, added: Added) -> Changes:
        # Adding to the raw index links the new entries by their vectors alone.
        raw = self.downgrade()
        raw.add(added.vectors)

        def link() -> None:
            self.index.hnsw = raw.hnsw

        return [*super().plan_append(added), link]

    def rebuild(
        self, tables: np.ndarray, centres: np.ndarray | None, recode: Recoding
    ) -> faiss.Index:
        return graph_over(super().rebuild(tables, centres, recode), self.index)


def graph_over(storage: faiss.Index, like: faiss.IndexHNSW) -> faiss.Index:
    """Return a graph over `storage` with the links of `like`.

    The graph takes ownership of `storage`.
    """
    graph = type(like)()
    copy_settings(graph, like)
    graph.d = storage.d
    graph.storage = storage
    graph.hnsw = like.hnsw
    graph.own_fields = True
    storage.this.disown()
    return graph
