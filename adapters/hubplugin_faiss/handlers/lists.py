"""Indexes with inverted lists, their coarse quantizers and how lists are ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import ClassVar

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.codecs import (
    HALF,
    QUERIES,
    Coder,
    ExtraDimensions,
    ScalarCodec,
    UpgradeSpec,
    evenly,
    require_finite,
)
from hubplugin_faiss.encoding.layout import (
    codes_of_list,
    fill_lists,
    ids_of_list,
    parts_by_list,
    write_entries,
)
from hubplugin_faiss.handlers.base import (
    block_rows,
    copy_fields,
    hand_over,
    handler_for,
    name_of,
    pretransform,
)
from hubplugin_faiss.handlers.codes import (
    BaseIndexHandler,
    FlatCodesHandler,
    base_index_handler,
    sample_rows,
    with_query,
)

BESTS = 1 << 23
"""Lists are ranked by fewer queries, down to 40, where the best entry of each list for each of them would be more
numbers than this."""

READ = 1 << 13
"""So many entries at most are compared with the queries at once."""


def list_ranks(
    entries: Iterable[tuple[np.ndarray, slice]],
    offsets: np.ndarray,
    lists: np.ndarray,
    centres: np.ndarray,
    bank: tuple[np.ndarray, np.ndarray | None],
    euclidean: bool,
) -> np.ndarray:
    """What is added to the similarity of a centroid, so that it comes to that of the best entry of its list with its
    offset: float32 [nlist].

        rank(j) = mean over queries u of ( max over t in list j of ( s(u, t) + offset(t) ) - s(u, c_j) )

    That is more for a long list and for one whose entries lie close together, and nothing that their offsets tell
    alone: under inner product centroids have unit length, however far from them their entries lie.

    Args:
        entries: vectors [b, d] and their rows.
        offsets, lists: of all entries [n].
        centres: the centroids [nlist, d].
        bank: queries [m, d], and the list [m] that each of them itself lies in, of which it says nothing; None for
            queries from elsewhere.
        euclidean: s is -|u - t|^2 / 2, else u.t.
    """
    queries, home = bank
    best = np.full((len(queries), len(centres)), -np.inf, np.float32)
    for vectors, rows in entries:
        order = np.argsort(lists[rows], kind="stable")
        numbers, first = np.unique(lists[rows][order], return_index=True)
        scores = similarities(queries, vectors[order], euclidean) + offsets[rows][order]
        best[:, numbers] = np.fmax(
            best[:, numbers], np.fmax.reduceat(scores, first, axis=1)
        )
    best -= similarities(queries, centres, euclidean)
    if home is not None:
        best[np.arange(len(queries)), home] = np.nan
    counts = np.isfinite(best)
    ranks = np.where(counts, best, 0).sum(axis=0, dtype=np.float64) / np.maximum(
        counts.sum(axis=0), 1
    )
    sizes = np.bincount(lists, minlength=len(centres))
    ranks += (offsets.sum(dtype=np.float64) - (ranks * sizes).sum()) / sizes.sum()
    return np.where(sizes > 0, np.clip(ranks, offsets.min(), offsets.max()), 0).astype(
        np.float32
    )


def similarities(
    queries: np.ndarray, vectors: np.ndarray, euclidean: bool
) -> np.ndarray:
    """The similarities of `queries` [m, d] and `vectors` [b, d]: float32 [m, b]; where they are `euclidean`, less what
    depends on the query alone."""
    products = queries @ vectors.T
    return np.asarray(
        products - (vectors**2).sum(axis=1) / 2 if euclidean else products
    )


FLOATS = ("IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexHNSWFlat")
"""The coarse quantizers that hold their centroids as floats."""


def widen_quantizer(
    quantizer: faiss.Index,
    coder: Coder,
    ranks: np.ndarray,
    spec: UpgradeSpec,
    residual: bool,
) -> tuple[faiss.Index, np.ndarray]:
    """A coarse quantizer of d + w components whose centroids rank as if each had an offset.

    A quantizer that does not hold its centroids as floats stands behind a transform that drops the extra dimensions,
    and its centroids have none. It has extra dimensions of its own for the ranks.

    Args:
        quantizer: of d components.
        coder: codes the extra components of entries.
        ranks: the offset of each centroid [nlist].
        spec: what all handlers of the index share.
        residual: codes are residual. Then a quantizer without floats stays as it is: Faiss takes the similarity of a
            centroid for a part of that of its entries, and would add the rank to these.

    Returns:
        The quantizer, and the extra components of its centroids [nlist, w].
    """
    if name_of(quantizer) in FLOATS:
        handler = base_index_handler(quantizer)
        assert isinstance(handler, FlatCodesHandler)
        centres = coder.centres(ranks)
        floats = handler.codec.coder(int(quantizer.d), coder.extra)
        return handler.widen_by(floats, lambda rows: centres[rows]), centres
    d, width = int(quantizer.d), coder.extra.width
    drop = faiss.RemapDimensionsTransform(d + width, d, False)
    inner = faiss.clone_index(quantizer)
    if not residual:
        with suppress(StoreError):  # one that cannot be upgraded stays as it is
            ranked = handler_for(quantizer)
            ranked.check()
            inner = ranked.upgrade(ranks[ranked.order()], spec)
    return pretransform([drop], inner), np.zeros((len(ranks), width), np.float32)


def narrow_quantizer(
    quantizer: faiss.Index, d: int, extra: ExtraDimensions
) -> faiss.Index:
    """The coarse quantizer of `d` components from which `widen_quantizer` made `quantizer`, with the `extra`
    dimensions."""
    quantizer = faiss.downcast_index(quantizer)
    if not isinstance(quantizer, faiss.IndexPreTransform):
        return base_index_handler(quantizer).narrow(d, extra)
    with suppress(StoreError):
        if (handler := handler_for(quantizer.index)).is_upgraded():
            return handler.downgrade()
    return faiss.clone_index(quantizer.index)


def nearest_lists(
    quantizer: faiss.Index, vectors: np.ndarray, extra: ExtraDimensions
) -> np.ndarray:
    """The list that each of `vectors` [n, d] has in the raw index, where lists have no offsets: int64 [n]. The `extra`
    dimensions of `quantizer` are left out."""
    if extra.euclidean or name_of(quantizer) not in FLOATS:
        quantizer = narrow_quantizer(quantizer, vectors.shape[1], extra)
    else:
        vectors = with_query(vectors, np.zeros(extra.width))
    return np.ascontiguousarray(
        quantizer.search(np.ascontiguousarray(vectors, np.float32), 1)[1].ravel()
    )


LOAD_LISTS = (
    "load them into memory, then go on: ivf = faiss.extract_index_ivf(index); lists = "
    "faiss.ArrayInvertedLists(ivf.nlist, ivf.code_size); ivf.invlists.copy_subset_to(lists, "
    "faiss.InvertedLists.SUBSET_TYPE_INVLIST, 0, ivf.nlist); ivf.replace_invlists(lists, True); lists.this.disown()"
)
"""What to do with lists on disk, whose path an index file keeps as it was given: a copy of that file, or one that is
opened from another folder, would share or lose them."""


class InvertedListsHandler(BaseIndexHandler):
    """Codes in inverted lists. Lists, ids and training stay; extra components of the centroids rank the lists."""

    names: ClassVar[tuple[str, ...]] = (
        "IndexIVFFlat", "IndexIVFScalarQuantizer", "IndexIVFPQ", "IndexIVFPQFastScan",
    )  # fmt: skip

    def __init__(self, index: faiss.Index):
        super().__init__(index)
        self._lists = faiss.downcast_InvertedLists(index.invlists)
        if isinstance(self._lists, faiss.OnDiskInvertedLists):
            place = self._lists.filename
            raise StoreError(
                f"{name_of(index)} has its inverted lists on disk, in {place!r}; {LOAD_LISTS}"
            )
        self._residual = bool(index.by_residual) and not isinstance(
            index, faiss.IndexIVFFlat
        )

    def widen(
        self, offsets: np.ndarray, spec: UpgradeSpec
    ) -> tuple[ExtraDimensions, faiss.Index]:
        codec, starts = self.codec, self._starts()
        if isinstance(codec, ScalarCodec) and codec.kind == HALF:
            for _, codes, _, _ in self._blocks(0, block_rows(self.index.d)):
                require_finite(codes.view(np.uint16))
        rows = sample_rows(offsets, starts[:-1][np.diff(starts) > 0])
        ranks = self._ranks(offsets, spec)
        of_rows = np.searchsorted(starts, rows, "right") - 1
        based = (
            self._residual and name_of(self.index.quantizer) in FLOATS
        )  # else codes hold all of it
        coder = codec.design(spec, offsets[rows], ranks[of_rows] if based else None)
        quantizer, centres = widen_quantizer(
            self.index.quantizer, coder, ranks, spec, self._residual
        )
        coder.require_holds(
            offsets[rows],
            centres[of_rows] if self._residual else None,
            name_of(self.index),
        )
        new = self._empty(self.index.d + coder.extra.width, quantizer)
        codec.widen(new, coder)

        def code(numbers: np.ndarray, codes: np.ndarray, rows: slice) -> np.ndarray:
            bases = centres[numbers] if self._residual else None
            components = coder.components_for(offsets[rows], bases)
            return coder.join(
                codes, components if bases is None else components - bases
            )

        return coder.extra, self._fill(new, code)

    def narrow(self, d: int, extra: ExtraDimensions) -> faiss.Index:
        coder = self.codec.coder(d, extra)
        new = self._empty(d, narrow_quantizer(self.index.quantizer, d, extra))
        self.codec.narrow(new, d)
        return self._fill(new, lambda numbers, codes, rows: coder.head(codes))

    def pad(self, parts: int, quantizer: faiss.Index) -> faiss.Index:
        """This index of PQ codes with so many `parts`, of which those behind its own hold 0, under a `quantizer` as
        wide."""
        pq = self.index.pq
        new = self._empty(parts * pq.dsub, quantizer)
        self.codec.train(new, np.pad(self.codec.tables(), ((0, parts - pq.M), (0, 0))))
        return self._fill(
            new, lambda numbers, codes, rows: np.pad(codes, ((0, 0), (0, parts - pq.M)))
        )

    def bases(
        self, extra: ExtraDimensions, vectors: np.ndarray, rows: np.ndarray | None
    ) -> np.ndarray | None:
        if rows is None:
            return self._bases_in(
                nearest_lists(self.index.quantizer, vectors, extra), extra
            )
        return self._bases_in(np.searchsorted(self._starts(), rows, "right") - 1, extra)

    def _bases_in(
        self, numbers: np.ndarray, extra: ExtraDimensions
    ) -> np.ndarray | None:
        """`bases` of entries in the lists `numbers` [n]."""
        if not self._residual:
            return None
        distinct, places = np.unique(numbers, return_inverse=True)
        return np.stack(
            [self.index.quantizer.reconstruct(int(n))[-extra.width :] for n in distinct]
        )[places]

    def decode(self, start: int, size: int) -> Iterator[np.ndarray]:
        for numbers, codes, _, _ in self._blocks(start, size):
            yield self._decode(codes, numbers)

    def quantise(
        self,
        vectors: np.ndarray,
        *,
        by_plain_faiss: bool = False,
        extra: ExtraDimensions | None = None,
    ) -> np.ndarray:
        vectors = np.ascontiguousarray(vectors, np.float32)
        if extra is None or by_plain_faiss:
            nearest = np.ascontiguousarray(
                self.index.quantizer.search(vectors, 1)[1].ravel()
            )
        else:
            nearest = nearest_lists(
                self.index.quantizer, vectors[:, : -extra.width], extra
            )
        return self._decode(self._encode(vectors, nearest), nearest)

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        parts = _parts(self._starts(), start, self.count if stop is None else stop)
        ids = (ids_of_list(self._lists, number)[part] for number, part in parts)
        return np.concatenate([np.empty(0, np.int64), *ids])

    def require_takes(self, vectors: np.ndarray, ids: np.ndarray | None) -> None:
        self.codec.require_fits(vectors)
        self._ids_to_add(ids, len(vectors))

    def append(
        self,
        extra: ExtraDimensions,
        vectors: np.ndarray,
        offsets: np.ndarray,
        ids: np.ndarray | None,
    ) -> None:
        nearest = nearest_lists(
            self.index.quantizer, vectors, extra
        )  # those that they have in the raw index
        components = self.coder(extra).components_for(
            offsets, self._bases_in(nearest, extra)
        )
        extended = np.ascontiguousarray(np.concatenate([vectors, components], axis=1))
        ids = self._ids_to_add(ids, len(vectors))
        if not hasattr(self._lists, "packer"):
            names = (
                None
                if self.index.direct_map.type == faiss.DirectMap.Array
                else faiss.swig_ptr(ids)
            )
            self.index.add_core(
                len(extended), faiss.swig_ptr(extended), names, faiss.swig_ptr(nearest)
            )
            return
        order = np.argsort(nearest, kind="stable")
        codes, ids, nearest = (
            self._encode(extended, nearest)[order],
            ids[order],
            nearest[order],
        )
        with rebuild_map(self.index):
            for number, part in parts_by_list(nearest):
                write_entries(
                    self._lists,
                    number,
                    self._lists.list_size(number),
                    ids[part],
                    codes[part],
                )
            self.index.ntotal += len(extended)

    def require_removes(self, *, renumbered: bool = False) -> None:
        if self.index.direct_map.type == faiss.DirectMap.Array and not renumbered:
            raise StoreError(
                f"the direct map of this {name_of(self.index)} is an array, which can have no gaps; to remove entries, "
                "call faiss.extract_index_ivf(index).set_direct_map_type(faiss.DirectMap.Hashtable), or with NoMap"
            )

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        removed = np.unique(ids)
        with rebuild_map(self.index):
            if hasattr(self._lists, "packer"):
                self._remove_packed(removed)
            else:
                self.index.remove_ids(faiss.IDSelectorBatch(removed))
            for number in range(self.index.nlist if renumbered else 0):
                rest = ids_of_list(self._lists, number)
                rest -= np.searchsorted(removed, rest)

    def _remove_packed(self, removed: np.ndarray) -> None:
        """Faiss's own leaves old codes behind the last one of a list, and its `add` does not erase them before it
        writes."""
        for number in range(self.index.nlist):
            old = ids_of_list(self._lists, number).copy()
            stays = removed[np.searchsorted(removed[:-1], old)] != old
            if not stays.all():
                codes = codes_of_list(self._lists, number).read(0, len(old))[stays]
                write_entries(self._lists, number, 0, old[stays], codes)
        self.index.ntotal = self._lists.compute_ntotal()

    def _ids_to_add(self, ids: np.ndarray | None, count: int) -> np.ndarray:
        """The ids of `count` entries that are to be added; raises StoreError if the direct map cannot hold `ids`."""
        numbered = self.count + np.arange(count)
        if ids is None:
            return numbered
        if (
            self.index.direct_map.type == faiss.DirectMap.Array
            and (ids != numbered).any()
        ):
            raise StoreError(
                f"the direct map of this {name_of(self.index)} is an array, which holds no ids but 0, 1, 2, ...; "
                "add without ids, or call faiss.extract_index_ivf(index).set_direct_map_type(faiss.DirectMap.Hashtable)"
            )
        return ids

    def _starts(self) -> np.ndarray:
        """The first entry of each list, and the count: int64 [nlist + 1]."""
        return np.cumsum(
            [0, *(self._lists.list_size(number) for number in range(self.index.nlist))]
        )

    def _ranks(self, offsets: np.ndarray, spec: UpgradeSpec) -> np.ndarray:
        """`list_ranks` for `offsets` [n] of all entries, by queries of the bank; without one by some entries."""
        nlist, queries = self.index.nlist, spec.queries
        most, home = max(BESTS // nlist, 40), None
        starts = self._starts()
        lists = np.repeat(np.arange(nlist), np.diff(starts))
        if queries is None:
            rows = np.linspace(0, self.count - 1, min(QUERIES, most)).astype(np.int64)
            home = lists[rows]
            places = zip(home.tolist(), (rows - starts[home]).tolist(), strict=True)
            codes = [
                codes_of_list(self._lists, number).read(at, at + 1)
                for number, at in places
            ]
            queries = self._decode(np.concatenate(codes), home)
        blocks = self._blocks(0, min(block_rows(self.index.d), READ))
        entries = (
            (self._decode(codes, numbers), rows) for numbers, codes, _, rows in blocks
        )
        centres = self.index.quantizer.reconstruct_n(0, nlist)
        return list_ranks(
            entries,
            offsets,
            lists,
            centres,
            (evenly(queries, most), home),
            self.euclidean,
        )

    def _encode(self, vectors: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The codes [n, code_size] of `vectors` [n, d + w] in the lists `numbers` [n]."""
        codes = np.empty((len(vectors), self.index.code_size), np.uint8)
        self.index.encode_vectors(
            len(vectors), *map(faiss.swig_ptr, (vectors, numbers, codes)), False
        )
        return codes

    def _decode(self, codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The vectors with all their components that `codes` [b, code_size] in the lists `numbers` [b] encode."""
        if isinstance(self.index, faiss.IndexIVFPQFastScan):
            # Faiss decodes through a pointer to the quantiser, which is null in an index that was read from a file.
            vectors = self.index.pq.decode(np.ascontiguousarray(codes))
            return np.asarray(
                vectors + self._centres[numbers] if self._residual else vectors
            )
        vectors = np.empty((len(codes), self.index.d), np.float32)
        self.index.decode_vectors(
            len(codes), *map(faiss.swig_ptr, (codes, numbers, vectors))
        )
        return vectors

    @cached_property
    def _centres(self) -> np.ndarray:
        return np.asarray(self.index.quantizer.reconstruct_n(0, self.index.nlist))

    def _blocks(
        self, start: int, size: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, slice]]:
        """List numbers [b], codes [b, code_size], ids [b] and rows of the entries from `start` on, b <= size."""
        starts = self._starts()
        for first in range(start, self.count, size):
            last = min(first + size, self.count)
            parts = list(_parts(starts, first, last))
            yield (
                np.concatenate(
                    [
                        np.full(part.stop - part.start, number, np.int64)
                        for number, part in parts
                    ]
                ),
                np.concatenate(
                    [
                        codes_of_list(self._lists, number).read(part.start, part.stop)
                        for number, part in parts
                    ]
                ),
                np.concatenate(
                    [ids_of_list(self._lists, number)[part] for number, part in parts]
                ),
                slice(first, last),
            )

    def _empty(self, d: int, quantizer: faiss.Index) -> faiss.Index:
        old, metric = self.index, self.index.metric_type
        if isinstance(old, faiss.IndexIVFScalarQuantizer):
            new = faiss.IndexIVFScalarQuantizer(
                quantizer, d, old.nlist, old.sq.qtype, metric, old.by_residual
            )
            new.sq.rangestat, new.sq.rangestat_arg = (
                old.sq.rangestat,
                old.sq.rangestat_arg,
            )
        elif isinstance(old, faiss.IndexIVFPQFastScan):
            new = faiss.IndexIVFPQFastScan(
                quantizer, d, old.nlist, d // old.pq.dsub, 4, metric
            )
            copy_fields(new, old, "implem", "skip", "qbs", "qbs2")
        elif isinstance(old, faiss.IndexIVFPQ):
            new = faiss.IndexIVFPQ(
                quantizer, d, old.nlist, d // old.pq.dsub, old.pq.nbits, metric
            )
            copy_fields(
                new,
                old,
                "do_polysemous_training",
                "scan_table_threshold",
                "polysemous_ht",
            )
            if new.polysemous_ht:
                new.polysemous_ht += (d // old.pq.dsub - old.pq.M) * old.pq.nbits
        else:
            new = faiss.IndexIVFFlat(quantizer, d, old.nlist, metric)
        new.own_fields = hand_over(quantizer)
        copy_fields(
            new,
            old,
            "nprobe",
            "max_codes",
            "parallel_mode",
            "by_residual",
            "quantizer_trains_alone",
        )
        if isinstance(new, faiss.IndexIVFPQ):
            new.use_precomputed_table = min(
                old.use_precomputed_table, 0
            )  # -1 forbids them, 0 lets Faiss decide
        return new

    def _fill(
        self,
        new: faiss.Index,
        code: Callable[[np.ndarray, np.ndarray, slice], np.ndarray],
    ) -> faiss.Index:
        """`new` with the entries of this index. `code` makes codes of list numbers [b], codes and rows of these."""
        new.direct_map = self.index.direct_map
        blocks = self._blocks(0, block_rows(new.d))
        entries = (
            (numbers, ids, code(numbers, codes, rows))
            for numbers, codes, ids, rows in blocks
        )
        fill_lists(new, np.diff(self._starts()), entries)
        return new


def _parts(starts: np.ndarray, first: int, last: int) -> Iterator[tuple[int, slice]]:
    """Where the entries [first, last) lie: list numbers, and which of the list's entries."""
    numbers = range(
        int(np.searchsorted(starts, first, "right") - 1),
        int(np.searchsorted(starts, last, "left")),
    )
    for number in numbers:
        part = slice(
            max(first - int(starts[number]), 0),
            min(last, int(starts[number + 1])) - int(starts[number]),
        )
        if part.stop > part.start:
            yield number, part


@contextmanager
def rebuild_map(index: faiss.Index) -> Iterator[None]:
    """On exit, rebuilds the direct map of the IVF `index`, if it has one, after its lists were changed."""
    kind = index.direct_map.type
    index.set_direct_map_type(faiss.DirectMap.NoMap)
    try:
        yield
    finally:
        index.set_direct_map_type(kind)
