"""Graph indexes: HNSW and NSG over Flat, SQ or PQ codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.assemble import codes_of, in_memory
from hubplugin_faiss.encoding.codec import Coder
from hubplugin_faiss.encoding.codecs import codec_of
from hubplugin_faiss.encoding.extra_dimensions import Tail
from hubplugin_faiss.encoding.layout import Fill, Plan
from hubplugin_faiss.faiss_objects import alike, block_rows, handed_over, name_of
from hubplugin_faiss.handlers.base_index import Leaf, leaf_for
from hubplugin_faiss.handlers.flat import Row


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
