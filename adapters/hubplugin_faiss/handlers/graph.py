"""Graph indexes: HNSW over Flat, SQ or PQ codes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.codecs import Coder, ExtraDimensions, UpgradeSpec
from hubplugin_faiss.encoding.layout import codes_of
from hubplugin_faiss.handlers.base import (
    BaseIndexHandler,
    FlatCodesHandler,
    base_index_handler,
    block_rows,
    copy_fields,
    handed_over,
    name_of,
)


class GraphHandler(BaseIndexHandler):
    """Codes under a graph, whose links an upgrade keeps: between raw neighbours, so that a downgrade has them back."""

    names = ("IndexHNSWFlat", "IndexHNSWSQ", "IndexHNSWPQ")

    def __init__(self, index: faiss.Index):
        super().__init__(index)
        self._storage = base_index_handler(index.storage)
        self.codec = self._storage.codec

    def check(self) -> None:
        super().check()
        self._storage.check()

    def widened(self, offsets: np.ndarray, spec: UpgradeSpec) -> tuple[ExtraDimensions, faiss.Index]:
        extra, storage = self._storage.widened(offsets, spec)
        return extra, self._over(storage)

    def widened_by(self, coder: Coder, components: Callable[[slice], np.ndarray]) -> faiss.Index:
        """As that of its storage."""
        storage = self._storage
        assert isinstance(storage, FlatCodesHandler)
        return self._over(storage.widened_by(coder, components))

    def narrowed(self, d: int, extra: ExtraDimensions) -> faiss.Index:
        return self._over(self._storage.narrowed(d, extra))

    def decoded(self, start: int, size: int) -> Iterator[np.ndarray]:
        return self._storage.decoded(start, size)

    def coded(self, vectors: np.ndarray) -> np.ndarray:
        return self._storage.coded(vectors)

    def require_removes(self, *, renumbered: bool = False) -> None:
        raise StoreError(
            f"{name_of(self.index)} cannot remove entries, nor can plain Faiss; build it anew of the others"
        )

    def append_extended(
        self, extra: ExtraDimensions, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> None:
        # Links are drawn by the vectors alone, as in the raw index: meanwhile every offset is neutral.
        storage = faiss.downcast_index(self.index.storage)
        coder, old = self.coder(extra), self.count
        first = coder.head_bits // 8
        components = codes_of(storage)[:, first:].copy()
        try:
            self._write_components(storage, coder, 0, np.broadcast_to(extra.query, (old, extra.width)))
            queries = np.broadcast_to(extra.query, (len(vectors), extra.width))
            self.index.add(np.ascontiguousarray(np.concatenate([vectors, queries], axis=1)))
        finally:
            codes_of(storage)[:old, first:] = components
        self._write_components(storage, coder, old, coder.components_for(offsets))

    @staticmethod
    def _write_components(storage: faiss.Index, coder: Coder, start: int, components: np.ndarray) -> None:
        codes, size = codes_of(storage), block_rows(storage.d)
        for first in range(0, len(components), size):
            part = codes[start + first : start + first + size]
            part[:] = coder.join(coder.head(part), components[first : first + size])

    def _over(self, storage: faiss.Index) -> faiss.Index:
        """An index like this one over another storage."""
        new = type(self.index)()
        copy_fields(new, self.index, "init_level0", "keep_max_size_level0")
        new.d, new.storage, new.hnsw = storage.d, storage, self.index.hnsw
        new.own_fields = handed_over(storage)
        return new
