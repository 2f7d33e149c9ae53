"""Indexes with inverted lists, their coarse quantizers and how lists are ranked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.codecs import (
    ExtraDimensions,
    UpgradeSpec,
    evenly,
)
from hubplugin_faiss.encoding.layout import (
    codes_of_list,
    ids_of_list,
    parts_by_list,
    write_entries,
)
from hubplugin_faiss.handlers.base import (
    block_rows,
    copy_fields,
    hand_over,
    name_of,
    pretransform,
)
from hubplugin_faiss.handlers.codes import (
    POLYSEMOUS,
    BaseIndexHandler,
    Recoding,
    copy_training,
    graph_over,
    sample_rows,
)

BESTS = 1 << 23
"""Lists are ranked by fewer queries, down to 40, where the best entry of each list for
each of them would be more numbers than this."""

READ = 1 << 13
"""So many entries at most are compared with the queries at once."""


def list_ranks(
    entries: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]],
    offsets: np.ndarray,
    sizes: np.ndarray,
    centres: np.ndarray,
    queries: np.ndarray,
    euclidean: bool,
) -> np.ndarray:
    """Return what is added to the similarity of a centroid, so that it comes to that of
    the best entry of its list with its offset: float32 [nlist].

        rank(j) = mean over queries u of
                  ( max over t in list j of ( s(u, t) + offset(t) ) - s(u, c_j) )

    That is more for a long list and for one whose entries lie close together, and
    nothing that their offsets tell alone: under inner product centroids have unit
    length, however far from them their entries lie.

    Args:
        entries: Blocks of vectors [b, d], their offsets [b] and their lists [b], which
            ascend.
        offsets: Of all entries [n].
        sizes: How many entries each list has [nlist].
        centres: The centroids [nlist, d].
        queries: Of the bank [m, d].
        euclidean: s is -|u - t|^2 / 2, else u.t.
    """
    best = np.full((len(queries), len(centres)), -np.inf, np.float32)
    for vectors, lifts, lists in entries:
        numbers, first = np.unique(lists, return_index=True)
        scores = similarities(queries, vectors, euclidean) + lifts
        in_block = np.fmax.reduceat(scores, first, axis=1)
        best[:, numbers] = np.fmax(best[:, numbers], in_block)
    best -= similarities(queries, centres, euclidean)
    ranks = np.where(np.isfinite(best), best, 0).mean(axis=0, dtype=np.float64)
    ranks += (offsets.sum(dtype=np.float64) - (ranks * sizes).sum()) / sizes.sum()
    ranks = np.clip(ranks, offsets.min(), offsets.max())
    return np.where(sizes > 0, ranks, 0).astype(np.float32)


def similarities(
    queries: np.ndarray, vectors: np.ndarray, euclidean: bool
) -> np.ndarray:
    """Return the similarities of `queries` [m, d] and `vectors` [b, d]: float32 [m, b];
    where they are `euclidean`, less what depends on the query alone."""
    products = queries @ vectors.T
    if euclidean:
        products -= (vectors**2).sum(axis=1) / 2
    return np.asarray(products)


FLOATS = faiss.IndexFlat | faiss.IndexHNSWFlat
"""The coarse quantizers that hold their centroids as floats. Others stay as they are,
behind a transform that drops the extra dimensions."""


def centroids(quantizer: faiss.Index, numbers: np.ndarray) -> np.ndarray:
    """Return the centroids of the lists `numbers` [n]: float32 [n, d]."""
    return np.asarray(quantizer.reconstruct_batch(np.ascontiguousarray(numbers)))


def quantizer_like(old: faiss.Index, centres: np.ndarray) -> faiss.Index:
    """Return a coarse quantizer like `old`, one of `FLOATS`, that holds `centres`
    [nlist, d]."""
    kinds = {faiss.METRIC_L2: faiss.IndexFlatL2}
    new = kinds.get(old.metric_type, faiss.IndexFlatIP)(centres.shape[1])
    new.add(np.ascontiguousarray(centres))
    copy_fields(new, faiss.downcast_index(getattr(old, "storage", old)))
    return graph_over(new, old) if isinstance(old, faiss.IndexHNSW) else new


def widen_quantizer(quantizer: faiss.Index, components: np.ndarray) -> faiss.Index:
    """Return a coarse quantizer like `quantizer`, of d components, whose centroids have
    the extra `components` [nlist, w], too, if it holds floats."""
    nlist, width = components.shape
    if isinstance(quantizer, FLOATS):
        centres = centroids(quantizer, np.arange(nlist))
        return quantizer_like(quantizer, np.concatenate([centres, components], axis=1))
    d = int(quantizer.d)
    drop = faiss.RemapDimensionsTransform(d + width, d, False)
    return pretransform([drop], faiss.clone_index(quantizer))


def narrow_quantizer(quantizer: faiss.Index, d: int) -> faiss.Index:
    """Return the coarse quantizer of `d` components from which `widen_quantizer` made
    `quantizer`."""
    if not isinstance(quantizer, FLOATS):
        return faiss.clone_index(quantizer.index)
    centres = centroids(quantizer, np.arange(quantizer.ntotal))
    return quantizer_like(quantizer, centres[:, :d])


LOAD_LISTS = (
    "load them into memory, then go on: ivf = faiss.extract_index_ivf(index); lists = "
    "faiss.ArrayInvertedLists(ivf.nlist, ivf.code_size); "
    "ivf.invlists.copy_subset_to(lists, faiss.InvertedLists.SUBSET_TYPE_INVLIST, 0, "
    "ivf.nlist); ivf.replace_invlists(lists, True); lists.this.disown()"
)
"""What to do with lists on disk, whose path an index file keeps as it was given: a copy
of that file, or one that is opened from another folder, would share or lose them."""


class InvertedListsHandler(BaseIndexHandler):
    """Codes in inverted lists. Lists, ids and training stay; extra components of the
    centroids rank the lists."""

    names: ClassVar[tuple[str, ...]] = (
        "IndexIVFFlat", "IndexIVFScalarQuantizer", "IndexIVFPQ", "IndexIVFPQFastScan",
    )  # fmt: skip

    def __init__(self, index: faiss.Index, extra: ExtraDimensions | None = None):
        super().__init__(index, extra)
        self._lists = faiss.downcast_InvertedLists(index.invlists)
        if isinstance(self._lists, faiss.OnDiskInvertedLists):
            raise StoreError(
                f"{name_of(index)} has its inverted lists on disk, in "
                f"{self._lists.filename!r}; {LOAD_LISTS}"
            )
        self._quantizer = faiss.downcast_index(index.quantizer)
        self._ranked = isinstance(self._quantizer, FLOATS)
        is_float = isinstance(index, faiss.IndexIVFFlat)
        self._residual = bool(index.by_residual) and not is_float
        sizes = map(self._lists.list_size, range(index.nlist))
        self._sizes = np.fromiter(sizes, np.int64, index.nlist)
        self._numbers = np.repeat(np.arange(index.nlist), self._sizes)  # of the lists

    def labels(self) -> np.ndarray:
        ids = (ids_of_list(self._lists, n) for n in range(self.index.nlist))
        return np.concatenate([np.empty(0, np.int64), *ids])

    def _codes(self, rows: np.ndarray) -> np.ndarray:
        parts = [np.empty((0, int(self.index.code_size)), np.uint8)]
        starts = np.cumsum(self._sizes) - self._sizes
        for number, part in parts_by_list(self._numbers[rows]):
            places = rows[part] - starts[number]
            first = int(places[0])
            codes = codes_of_list(self._lists, number).read(first, int(places[-1]) + 1)
            parts.append(codes[places - first])
        return np.concatenate(parts)

    def decode(self, rows: np.ndarray) -> np.ndarray:
        return self._decode(self._codes(rows), self._numbers[rows])

    def _decode(self, codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the vectors with all their components that `codes` [b, code_size] in the
        lists `numbers` [b] encode."""
        if isinstance(self.index, faiss.IndexIVFPQFastScan):
            # Faiss decodes through a pointer to the quantiser, which is null in an index
            # that was read from a file.
            vectors = self.index.pq.decode(np.ascontiguousarray(codes))
            if self._residual:
                vectors += centroids(self._quantizer, numbers)
            return np.asarray(vectors)
        vectors = np.empty((len(codes), self.index.d), np.float32)
        arrays = map(faiss.swig_ptr, (codes, numbers, vectors))
        self.index.decode_vectors(len(codes), *arrays)
        return vectors

    def _encode(self, vectors: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the codes [n, code_size] of `vectors` [n, d + w] in the lists `numbers`
        [n]."""
        codes = np.empty((len(vectors), self.index.code_size), np.uint8)
        arrays = map(faiss.swig_ptr, (vectors, numbers, codes))
        self.index.encode_vectors(len(vectors), *arrays, False)
        return codes

    def widen(
        self, offsets: np.ndarray, spec: UpgradeSpec
    ) -> tuple[ExtraDimensions, faiss.Index]:
        starts = np.cumsum(self._sizes) - self._sizes
        rows = sample_rows(offsets, starts[self._sizes > 0])
        numbers = self._numbers[rows]
        ranks = self._ranks(offsets, spec.queries)
        bases = None
        if self._residual and self._ranked:
            bases = ranks[numbers]  # else codes hold all of it
        coder = self.codec.design(spec, offsets[rows], bases)
        centres = coder.centres(ranks)
        quantizer = widen_quantizer(self._quantizer, centres)
        if bases is None:
            centres = np.zeros_like(centres)
        name = name_of(self.index)
        coder.require_holds(offsets[rows], centres[numbers], name)
        new = self._empty(self.d + len(coder.extra.query), quantizer)
        self.codec.widen(new, coder)

        def join(codes: np.ndarray, rows: np.ndarray) -> np.ndarray:
            bases = centres[self._numbers[rows]]
            components = coder.components_for(offsets[rows], bases)
            return coder.join(codes, components - bases)

        return coder.extra, self._fill(new, join)

    def pad(self, d: int, quantizer: faiss.Index) -> faiss.Index:
        """Return a copy with `d` components, as many as it has or, of PQ codes of 8 bits,
        more parts, which hold 0, under a `quantizer` as wide."""
        new = self._empty(d, quantizer)
        behind = (0, (d - int(self.index.d)) // self.codec.part)
        self.codec.train(new, np.pad(self.codec.tables(), (behind, (0, 0))))
        return self._fill(new, lambda codes, rows: np.pad(codes, ((0, 0), behind)))

    def _ranks(self, offsets: np.ndarray, queries: np.ndarray | None) -> np.ndarray:
        """Return `list_ranks` for `offsets` [n] of all entries, by `queries` of the bank;
        without one their mean in each list, and 0 where centroids hold no ranks."""
        nlist = self.index.nlist
        if not self._ranked:
            return np.zeros(nlist, np.float32)
        if queries is None:
            sums = np.bincount(self._numbers, offsets, nlist)
            return (sums / np.maximum(self._sizes, 1)).astype(np.float32)
        entries = (
            (self.decode(rows), offsets[rows], self._numbers[rows])
            for rows in self.row_blocks(min(block_rows(self.d), READ))
        )
        return list_ranks(
            entries,
            offsets,
            self._sizes,
            centroids(self._quantizer, np.arange(nlist)),
            evenly(queries, max(BESTS // nlist, 40)),
            self.euclidean,
        )

    def bases(self, vectors: np.ndarray, rows: np.ndarray | None) -> np.ndarray | None:
        if not self._residual:
            return None
        numbers = self._nearest(vectors) if rows is None else self._numbers[rows]
        distinct, places = np.unique(numbers, return_inverse=True)
        return centroids(self._quantizer, distinct)[places, self.d :]

    def _nearest(self, vectors: np.ndarray) -> np.ndarray:
        """Return the list that each of `vectors` [n, d] has in the raw index, where lists
        have no offsets: int64 [n]."""
        quantizer = self._quantizer
        if self.extra is not None:
            quantizer = narrow_quantizer(quantizer, self.d)
        vectors = np.ascontiguousarray(vectors, np.float32)
        return np.ascontiguousarray(quantizer.search(vectors, 1)[1].ravel())

    def quantise(self, vectors: np.ndarray) -> np.ndarray:
        nearest = self._nearest(vectors)
        codes = self._encode(self.as_added(vectors), nearest)
        return self._decode(codes, nearest)[:, : self.d]

    def require_takes(self, ids: np.ndarray | None, count: int) -> None:
        numbered = self.count + np.arange(count)
        if ids is None:
            if (self.labels() >= self.count).any():
                raise StoreError(
                    f"this {name_of(self.index)} has ids of its own: pass ids= with the "
                    "vectors"
                )
        elif self._has_array and (ids != numbered).any():
            raise StoreError(
                f"the direct map of this {name_of(self.index)} is an array, which holds "
                "no ids but 0, 1, 2, ...; add without ids, or call "
                "faiss.extract_index_ivf(index).set_direct_map_type("
                "faiss.DirectMap.Hashtable)"
            )

    @property
    def _has_array(self) -> bool:
        return bool(self.index.direct_map.type == faiss.DirectMap.Array)

    def append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> None:
        if ids is None:
            ids = self.count + np.arange(len(vectors))
        nearest = self._nearest(vectors)
        components = self.coder.components_for(offsets, self.bases(vectors, None))
        extended = np.ascontiguousarray(np.concatenate([vectors, components], axis=1))
        codes = self._encode(extended, nearest)
        order = np.argsort(nearest, kind="stable")
        with rebuild_map(self.index):
            for number, part in parts_by_list(nearest[order]):
                rows = order[part]
                size = self._lists.list_size(number)
                write_entries(self._lists, number, size, ids[rows], codes[rows])
            self.index.ntotal += len(vectors)

    def require_removes(self, *, renumbered: bool = False) -> None:
        if self._has_array and not renumbered:
            raise StoreError(
                f"the direct map of this {name_of(self.index)} is an array, which can "
                "have no gaps; to remove entries, call faiss.extract_index_ivf(index)"
                ".set_direct_map_type(faiss.DirectMap.Hashtable), or with NoMap"
            )

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        # Faiss's own leaves old codes behind the last one of a list that is scanned
        # fast, and its `add` does not erase them before it writes.
        removed = np.unique(ids)
        with rebuild_map(self.index):
            for number in range(self.index.nlist):
                old = ids_of_list(self._lists, number).copy()
                stays = ~np.isin(old, removed)
                new = old[stays]
                if renumbered:
                    new = new - np.searchsorted(removed, new)
                if not np.array_equal(new, old):
                    codes = codes_of_list(self._lists, number).read(0, len(old))[stays]
                    write_entries(self._lists, number, 0, new, codes)
            self.index.ntotal = self._lists.compute_ntotal()

    def _empty(self, d: int, quantizer: faiss.Index | None = None) -> faiss.Index:
        """Return an index like this, of `d` components and without entries, which takes
        the `quantizer` over, by default that of the raw index."""
        old = self.index
        if quantizer is None:
            quantizer = narrow_quantizer(self._quantizer, d)
        metric = old.metric_type
        if isinstance(old, faiss.IndexIVFScalarQuantizer):
            new = faiss.IndexIVFScalarQuantizer(
                quantizer, d, old.nlist, old.sq.qtype, metric, old.by_residual
            )
            copy_training(new, old)
        elif isinstance(old, faiss.IndexIVFFlat):
            new = faiss.IndexIVFFlat(quantizer, d, old.nlist, metric)
        else:
            parts = d // old.pq.dsub
            kind = type(old)
            new = kind(quantizer, d, old.nlist, parts, old.pq.nbits, metric)
            if kind is faiss.IndexIVFPQ:
                copy_fields(new, old, *POLYSEMOUS, "scan_table_threshold")
                # -1 forbids them, 0 lets Faiss decide.
                new.use_precomputed_table = min(old.use_precomputed_table, 0)
            else:
                copy_fields(new, old, "implem", "skip", "qbs", "qbs2")
        new.own_fields = hand_over(quantizer)
        searched = "nprobe", "max_codes", "parallel_mode"
        copy_fields(new, old, *searched, "by_residual", "quantizer_trains_alone")
        return new

    def _fill(self, new: faiss.Index, recode: Recoding) -> faiss.Index:
        new.direct_map = self.index.direct_map
        lists = faiss.downcast_InvertedLists(new.invlists)
        for number, size in enumerate(self._sizes.tolist()):
            # At once: a list that grows is given room to spare.
            lists.resize(number, size)
        filled = np.zeros(new.nlist, np.int64)
        ids = self.labels()
        row = 0
        for codes in self._recoded(new, recode):
            numbers = self._numbers[row : row + len(codes)]
            for number, part in parts_by_list(numbers):
                names = ids[row + part.start : row + part.stop]
                write_entries(lists, number, int(filled[number]), names, codes[part])
                filled[number] += len(names)
            row += len(codes)
        if isinstance(new, faiss.IndexIVFPQ | faiss.IndexIVFPQFastScan):
            new.precompute_table()
        return new


@contextmanager
def rebuild_map(index: faiss.Index) -> Iterator[None]:
    """On exit, rebuild the direct map of the IVF `index`, if it has one, after its lists
    were changed."""
    kind = index.direct_map.type
    index.set_direct_map_type(faiss.DirectMap.NoMap)
    try:
        yield
    finally:
        index.set_direct_map_type(kind)
