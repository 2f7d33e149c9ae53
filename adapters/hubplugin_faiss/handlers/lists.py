"""Handlers for indexes with inverted lists, whose coarse quantizers rank the lists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin.measures.hubness import pick_evenly
from hubplugin_faiss.encoding.codecs import Codec
from hubplugin_faiss.encoding.offsets import READ, ExtraDimensions, similarities
from hubplugin_faiss.handlers.base import Added, Changes
from hubplugin_faiss.handlers.codes import BaseIndexHandler, graph_over
from hubplugin_faiss.objects import copy_settings, name_of, pretransform

BESTS = 1 << 23
"""The number of best scores held at once, one for each query and list.

In an index with many lists, fewer queries rank the lists, but at least 40.
"""

FLOAT_QUANTIZERS = faiss.IndexFlat | faiss.IndexHNSWFlat
"""The coarse quantizers that store centroids as floats.

Other quantizers are not changed: a transform in front of them drops the extra
dimensions.
"""

LOAD_LISTS = (
    "load them into memory, then go on: ivf = faiss.extract_index_ivf(index); lists = "
    "faiss.ArrayInvertedLists(ivf.nlist, ivf.code_size); "
    "ivf.invlists.copy_subset_to(lists, faiss.InvertedLists.SUBSET_TYPE_INVLIST, 0, "
    "ivf.nlist); ivf.replace_invlists(lists, True); lists.this.disown()"
)
"""Advice for an index with inverted lists on disk.

The index file stores their path exactly as it was given. A copy of the index file would
share the lists, and an index opened from another folder would lose them.
"""


class InvertedListsHandler(BaseIndexHandler):
    """Handles an index that stores codes in inverted lists.

    An upgrade keeps the lists, the ids and the training. Extra components of the
    centroids rank the lists.
    """

    names: ClassVar[tuple[str, ...]] = (
        "IndexIVFFlat", "IndexIVFScalarQuantizer", "IndexIVFPQ", "IndexIVFPQFastScan",
    )  # fmt: skip

    def __init__(self, index: faiss.IndexIVF, extra: ExtraDimensions | None = None):
        lists = faiss.downcast_InvertedLists(index.invlists)
        if isinstance(lists, faiss.OnDiskInvertedLists):
            raise StoreError(
                f"{name_of(index)} has its inverted lists on disk, in "
                f"{lists.filename!r}; {LOAD_LISTS}"
            )
        super().__init__(index, extra)
        self.quantizer = faiss.downcast_index(index.quantizer)
        # Only a quantizer of floats can store the extra components that rank its lists.
        self.ranks_lists = isinstance(self.quantizer, FLOAT_QUANTIZERS)
        # IndexIVFFlat stores complete vectors, whatever `by_residual` says.
        is_float = isinstance(index, faiss.IndexIVFFlat)
        self.holds_differences = index.by_residual and not is_float
        # True if codes hold differences in the extra dimensions, too.
        self.residual = self.holds_differences and self.ranks_lists

    def centres(self, list_nos: np.ndarray) -> np.ndarray:
        if not self.holds_differences:
            return super().centres(list_nos)
        return self.quantizer.reconstruct_batch(list_nos)

    def nearest(self, vectors: np.ndarray) -> np.ndarray:
        quantizer = self.quantizer
        if self.extra is not None:
            quantizer = narrow_quantizer(quantizer, self.d)
        return quantizer.search(vectors, 1)[1].ravel()

    def empty(self, codec: Codec, centres: np.ndarray | None) -> faiss.Index:
        if centres is None:
            quantizer = narrow_quantizer(self.quantizer, codec.d)
        else:
            quantizer = widen_quantizer(self.quantizer, centres)
        old = self.index
        sizes = (codec.d, old.nlist, *codec.arguments)
        new = type(old)(quantizer, *sizes, old.metric_type)
        new.own_fields = True
        quantizer.this.disown()
        copy_settings(new, old)
        new.direct_map = old.direct_map
        if isinstance(old, faiss.IndexIVFPQ):
            # -1 forbids tables and 0 lets Faiss decide. 1 and 2 are its decisions.
            new.use_precomputed_table = min(old.use_precomputed_table, 0)
        return new

    def pad(self, d: int) -> faiss.Index:
        """Return a copy of the index with `d` components; the additional ones are 0.

        The index must have PQ codes of 8 bits, which get additional parts.
        """
        width = d - self.index.d
        more_parts = (0, width // self.codec.part)
        tables = np.pad(self.codec.tables, (more_parts, (0, 0)))
        centres = np.zeros((len(self.sizes), width))
        return self.rebuild(
            tables, centres, lambda codes, rows: np.pad(codes, ((0, 0), more_parts))
        )

    def centroid_offsets(
        self, offsets: np.ndarray, queries: np.ndarray | None
    ) -> np.ndarray:
        """Return the offset of each list's centroid, which ranks its list: float32 [nlist].

        The result is 0 if the coarse quantizer cannot store extra components. Without
        `queries`, it is the mean offset of the list's entries. Otherwise, the centroid
        c_j with its offset, rank(j), scores like the best entry of the list:

            rank(j) = mean over queries u of
                      ( max over t in list j of ( s(u, t) + offset(t) ) - s(u, c_j) )

        Long lists get higher ranks, and so do lists whose entries lie close together.
        Offsets alone would not suffice: under inner product, centroids have unit
        length, whatever the length of the entries.
        """
        nlist = len(self.sizes)
        if not self.ranks_lists:
            return np.zeros(nlist, np.float32)
        if queries is None:
            sums = np.bincount(self.list_nos, offsets, nlist)
            return (sums / np.maximum(self.sizes, 1)).astype(np.float32)
        queries = pick_evenly(queries, max(BESTS // nlist, 40))
        best_scores = np.full((len(queries), nlist), -np.inf, np.float32)
        for rows in self.row_blocks(READ):
            scores = similarities(queries, self.take(rows)[0], self.euclidean)
            scores += offsets[rows]
            # Entries are sorted by list, so each list has one range of columns.
            list_nos, first = np.unique(self.list_nos[rows], return_index=True)
            in_block = np.fmax.reduceat(scores, first, axis=1)
            best_scores[:, list_nos] = np.fmax(best_scores[:, list_nos], in_block)
        centres = self.quantizer.reconstruct_batch(np.arange(nlist))
        best_scores -= similarities(queries, centres, self.euclidean)
        ranks = np.where(np.isfinite(best_scores), best_scores, 0).mean(
            axis=0, dtype=np.float64
        )
        # Shift all ranks equally, so that the mean rank over entries is the mean offset.
        excess = (ranks * self.sizes).sum() - offsets.sum(dtype=np.float64)
        ranks = np.clip(ranks - excess / self.count, offsets.min(), offsets.max())
        return np.where(self.sizes > 0, ranks, 0).astype(np.float32)

    def ids_of(self, added: Added) -> np.ndarray:
        next_ids = self.count + np.arange(len(added.vectors))
        if added.ids is None:
            if (self.labels() >= self.count).any():  # not numbered by Faiss
                raise StoreError(
                    f"this {name_of(self.index)} has its own ids: pass ids= with the "
                    "vectors"
                )
            return next_ids
        if self._has_array and (added.ids != next_ids).any():
            raise StoreError(
                f"the direct map of this {name_of(self.index)} is an array, which can "
                "only hold the ids 0, 1, 2, ...; add without ids, or call "
                "faiss.extract_index_ivf(index).set_direct_map_type(faiss.DirectMap.Hashtable)"
            )
        return added.ids

    @property
    def _has_array(self) -> bool:
        """True if the direct map is an array, which only knows ids 0, 1, 2, ..."""
        return self.index.direct_map.type == faiss.DirectMap.Array

    def plan_remove(self, ids: np.ndarray, renumbered: bool) -> Changes:
        if self._has_array and not renumbered:
            raise StoreError(
                f"the direct map of this {name_of(self.index)} is an array, which can "
                "have no gaps; to remove entries, call faiss.extract_index_ivf(index)"
                ".set_direct_map_type(faiss.DirectMap.Hashtable), or with NoMap"
            )
        return super().plan_remove(ids, renumbered)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Drop the direct map before a change and rebuild it afterwards."""
        kind = self.index.direct_map.type
        self.index.set_direct_map_type(faiss.DirectMap.NoMap)
        with super().changing():
            yield
        self.index.set_direct_map_type(kind)


def quantizer_like(old: faiss.Index, centres: np.ndarray) -> faiss.Index:
    """Return a coarse quantizer with the type of `old` and `centres` [nlist, d].

    `old` is one of `FLOAT_QUANTIZERS`.
    """
    new = faiss.IndexFlat(centres.shape[1], old.metric_type)
    new.add(centres)
    copy_settings(new, faiss.downcast_index(getattr(old, "storage", old)))
    if isinstance(old, faiss.IndexHNSW):
        return graph_over(new, old)
    return new


def widen_quantizer(quantizer: faiss.Index, components: np.ndarray) -> faiss.Index:
    """Return a coarse quantizer like `quantizer` with w more components.

    components: The additional components of the centroids, [nlist, w]. Only a
        quantizer of floats stores them.
    """
    nlist, width = components.shape
    if isinstance(quantizer, FLOAT_QUANTIZERS):
        centres = quantizer.reconstruct_batch(np.arange(nlist))
        return quantizer_like(quantizer, np.hstack([centres, components]))
    d = quantizer.d
    drop = faiss.RemapDimensionsTransform(d + width, d, False)
    return pretransform([drop], faiss.clone_index(quantizer))


def narrow_quantizer(quantizer: faiss.Index, d: int) -> faiss.Index:
    """Undo `widen_quantizer`: return a coarse quantizer with only `d` components."""
    if not isinstance(quantizer, FLOAT_QUANTIZERS):
        # `widen_quantizer` put a transform in front of it, which drops the components.
        return faiss.clone_index(quantizer.index)
    centres = quantizer.reconstruct_batch(np.arange(quantizer.ntotal))
    return quantizer_like(quantizer, centres[:, :d])
