"""Indexes around one other index: ids of the user, and transforms before it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.codecs import ExtraDimensions, UpgradeSpec
from hubplugin_faiss.handlers.base import (
    BaseIndexHandler,
    IndexHandler,
    base_index_handler,
    copy_fields,
    handed_over,
    handler_for,
    is_mapped,
    most_lost,
    name_of,
    pretransform,
    with_query,
)


class WrapperHandler(IndexHandler):
    """An index around one other. Its handler passes on to that of the inner index what it does not do itself."""

    @cached_property
    def _inner(self) -> IndexHandler:
        if is_mapped(self.index.index):
            raise StoreError(
                f"a query map stands within this {name_of(self.index)}, where it would be lost; put it around "
                "index = hubplugin_faiss.downgrade(index), and upgrade that"
            )
        return handler_for(self.index.index)

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        return self._inner.scan(start, size)

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._inner.labels(start, stop)

    def order(self) -> np.ndarray | slice:
        return self._inner.order()

    def rounded(
        self, offsets: np.ndarray, rows: np.ndarray | None = None, vectors: np.ndarray | None = None
    ) -> np.ndarray:
        return self._inner.rounded(offsets, rows, vectors)

    def extra_dimensions(self) -> list[ExtraDimensions]:
        return self._inner.extra_dimensions()

    def lengths_and_bias(
        self, vectors: np.ndarray, nearness: float | None
    ) -> tuple[np.ndarray | float, np.ndarray | float]:
        return self._inner.lengths_and_bias(vectors, nearness)

    def coded(self, vectors: np.ndarray) -> np.ndarray:
        return self._inner.coded(vectors)

    @cached_property
    def coded_zeros(self) -> np.ndarray:
        return self._inner.coded_zeros

    @property
    def exhaustive(self) -> bool:
        return self._inner.exhaustive

    @property
    def lossy(self) -> bool:
        return self._inner.lossy

    @property
    def lossy_inside(self) -> bool:
        return self.lossy or self._inner.lossy_inside


class IdMapHandler(WrapperHandler):
    """Ids of the user over an index that numbers its entries itself."""

    names = ("IndexIDMap", "IndexIDMap2")

    def check(self) -> None:
        super().check()
        self._inner.check()
        self.labels()

    def upgraded(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        return self.around(self._inner.upgraded(offsets, spec))

    def downgraded(self) -> faiss.Index:
        return self.around(self._inner.downgraded())

    def require_takes(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, nearness: float | None = None
    ) -> None:
        if ids is None:
            raise StoreError(f"{name_of(self.index)} has ids of its own: pass ids= with the vectors")
        self._inner.require_takes(vectors, offsets, None, nearness)

    def append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, nearness: float | None = None
    ) -> None:
        self._inner.append(vectors, offsets, None, nearness)
        faiss.copy_array_to_vector(np.concatenate([self._ids, ids]), self.index.id_map)
        self.index.ntotal = self.index.index.ntotal
        if isinstance(self.index, faiss.IndexIDMap2):
            self.index.construct_rev_map()

    def require_removes(self, *, renumbered: bool = False) -> None:
        self._inner.require_removes(renumbered=True)

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        own, gone = self._ids, np.isin(self._ids, ids)
        self._inner.remove(np.flatnonzero(gone), renumbered=True)
        self.index.ntotal = self.index.index.ntotal
        faiss.copy_array_to_vector(own[~gone], self.index.id_map)
        if isinstance(self.index, faiss.IndexIDMap2):
            self.index.construct_rev_map()

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        own, ids = self._inner.labels(start, stop), self._ids
        if len(own) and own.max() >= len(ids):
            raise StoreError(
                f"this {name_of(self.index)} has lost which entry has which id, as Faiss's own remove_ids over "
                "inverted lists does; build it anew, and use hubplugin_faiss.remove_ids"
            )
        return np.asarray(ids[own])

    @property
    def _ids(self) -> np.ndarray:
        return np.asarray(faiss.vector_to_array(self.index.id_map))

    def around(self, part: faiss.Index) -> faiss.Index:
        """An index of this kind, with the same ids, over `part`, which it takes over."""
        part.ntotal = 0  # Faiss puts ids only over what looks empty
        new = type(self.index)(part)
        new.own_fields = handed_over(part)
        part.ntotal = self.count
        copy_fields(new, self.index)
        faiss.copy_array_to_vector(self._ids, new.id_map)
        if isinstance(new, faiss.IndexIDMap2):
            new.construct_rev_map()
        return new


class PreTransformHandler(WrapperHandler):
    """Transforms before an inner index. Extra dimensions of a base index behind them are appended in the same chain."""

    names = ("IndexPreTransform",)
    AFFINE = (faiss.LinearTransform, faiss.RemapDimensionsTransform, faiss.CenteringTransform)

    def __init__(self, index: faiss.Index):
        super().__init__(index)
        links = index.chain.size()
        if links and appends_by_linear(faiss.downcast_VectorTransform(index.chain.at(links - 1))):
            raise StoreError("this copy was made for a GPU, for searches alone; use the index that for_gpu was given")

    def check(self) -> None:
        super().check()
        self._require_way_back()
        self._inner.check()

    def _require_way_back(self) -> None:
        for link in self._links:
            try:
                link.reverse_transform(np.zeros((1, link.d_out), np.float32))
            except RuntimeError:
                raise StoreError(
                    f"the {type(link).__name__} before this {name_of(self._inner.index)} cannot be turned back, so "
                    "that its vectors cannot be read; it cannot be upgraded"
                ) from None

    def upgraded(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        part, chain = self._inner, self.copied_chain()
        spec = replace(spec, queries=None if spec.queries is None else self._transformed(spec.queries))
        if isinstance(part, BaseIndexHandler):
            return part.upgraded_behind(chain, offsets, spec)
        spec = replace(spec, nearness=spec.nearness if self._keeps_lengths else None)
        return pretransform(chain, part.upgraded(offsets, spec))

    def downgraded(self) -> faiss.Index:
        extra, chain = self._extra(), self.copied_chain()
        if extra is None:
            return pretransform(chain, self._inner.downgraded())
        base_index = base_index_handler(self.index.index).narrowed(self._width() - extra.width, extra)
        return pretransform(chain[:-2], base_index) if chain[:-2] else base_index

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        self._require_way_back()
        extra = self._extra()
        for inner, offsets in self._inner.scan(start, size):
            yield self._reversed(inner), offsets if extra is None else extra.offsets(inner[:, -extra.width :])

    def lengths_and_bias(
        self, vectors: np.ndarray, nearness: float | None
    ) -> tuple[np.ndarray | float, np.ndarray | float]:
        """Transforms x -> A x + b rank by (A q).(A t) + b.(A t) under inner product; the last term is norm bias."""
        lengths, bias = IndexHandler.lengths_and_bias(self, vectors, nearness)
        shift = self._shift
        if self.euclidean or shift is None or not shift.any():
            return lengths, bias
        return lengths, np.asarray((self._transformed(vectors) - shift) @ shift + bias)

    def coded(self, vectors: np.ndarray) -> np.ndarray:
        extra, inner = self._extra(), self._transformed(vectors)
        if extra is None:
            inner = self._inner.coded(inner)
        else:
            inner = base_index_handler(self.index.index).coded_extended(extra, inner)
            inner = np.concatenate([inner, np.broadcast_to(extra.query, (len(inner), extra.width))], axis=1)
        return self._reversed(inner)

    @cached_property
    def coded_zeros(self) -> np.ndarray:
        extra, zero = self._extra(), np.zeros((1, int(self.index.d)), np.float32)
        if extra is None:
            return self.coded(zero)
        by_plain_faiss = base_index_handler(self.index.index).coded(with_query(self._transformed(zero), extra.query))
        return np.concatenate([self.coded(zero), self._reversed(by_plain_faiss)])  # which may choose another list

    def require_takes(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, nearness: float | None = None
    ) -> None:
        if self._extra() is None:
            self._inner.require_takes(self._transformed(vectors), offsets, ids, nearness)
            return
        base_index_handler(self.index.index).require_takes_extended(self._transformed(vectors), ids)
        self._require_room(offsets, vectors)

    def _require_room(self, offsets: np.ndarray, vectors: np.ndarray) -> None:
        """Raises StoreError if codes lose too much of `offsets` [n] of `vectors` [n, d]."""
        if len(offsets) and np.abs(self.rounded(offsets, vectors=vectors) - offsets).max() > most_lost(self, offsets):
            raise StoreError(
                f"offsets from {offsets.min():.4g} to {offsets.max():.4g} find no room in the codes of this "
                f"{name_of(self._inner.index)}, which were made for others: replace all, index = upgrade(index, model)"
            )

    def append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, nearness: float | None = None
    ) -> None:
        extra, vectors = self._extra(), self._transformed(vectors)
        if extra is None:
            self._inner.append(vectors, offsets, ids, nearness)
        else:
            base_index_handler(self.index.index).append_extended(extra, vectors, offsets, ids)
        self.index.ntotal = self.index.index.ntotal

    def require_removes(self, *, renumbered: bool = False) -> None:
        self._inner.require_removes(renumbered=renumbered)

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        self._inner.remove(ids, renumbered=renumbered)
        self.index.ntotal = self.index.index.ntotal

    def rounded(
        self, offsets: np.ndarray, rows: np.ndarray | None = None, vectors: np.ndarray | None = None
    ) -> np.ndarray:
        extra, inner = self._extra(), None if vectors is None else self._transformed(vectors)
        if extra is None:
            return self._inner.rounded(offsets, rows, inner)
        base_index = base_index_handler(self.index.index)
        bases = base_index.bases(extra, rows, inner)
        return extra.offsets(base_index.coder(extra).components_for(offsets, bases))

    def extra_dimensions(self) -> list[ExtraDimensions]:
        extra = self._extra()
        return self._inner.extra_dimensions() if extra is None else [extra]

    @property
    def lossy(self) -> bool:
        return self._inner.lossy or any(link.d_out < link.d_in for link in self._links)

    @property
    def _links(self) -> list[faiss.VectorTransform]:
        """The transforms but those that append extra dimensions."""
        return [faiss.downcast_VectorTransform(self.index.chain.at(number)) for number in range(self._own_links)]

    @property
    def _shift(self) -> np.ndarray | None:
        """The transform of the vector 0: float64. None if the transforms are not affine."""
        affine = itertools.dropwhile(lambda link: isinstance(link, faiss.NormalizationTransform), self._links)
        if not all(isinstance(link, self.AFFINE) for link in affine):
            return None
        return np.asarray(self._transformed(np.zeros((1, self.index.d)))[0], np.float64)

    @property
    def _keeps_lengths(self) -> bool:
        shift, links = self._shift, self._links
        return shift is not None and not shift.any() and all(link.d_out >= link.d_in for link in links)

    @property
    def _own_links(self) -> int:
        """How many transforms there are before those that append extra dimensions."""
        return int(self.index.chain.size()) - (0 if self._extra() is None else 2)

    def _transformed(self, vectors: np.ndarray) -> np.ndarray:
        """`vectors` [b, d] behind all transforms but those that append extra dimensions."""
        for number in range(self._own_links):
            vectors = self.index.chain.at(number).apply(np.ascontiguousarray(vectors, np.float32))
        return vectors

    def _reversed(self, inner: np.ndarray) -> np.ndarray:
        """The vectors [b, d] that the transforms map to about `inner`."""
        outer, inner = np.empty((len(inner), self.index.d), np.float32), np.ascontiguousarray(inner)
        self.index.reverse_chain(len(inner), faiss.swig_ptr(inner), faiss.swig_ptr(outer))
        return outer

    def _width(self) -> int:
        return int(self.index.index.d)

    def _extra(self) -> ExtraDimensions | None:
        """The extra dimensions that this chain appends; None if it does not end in the two transforms that do so."""
        links = self.index.chain.size()
        if links < 2:
            return None
        remap, centring = (
            faiss.downcast_VectorTransform(self.index.chain.at(number)) for number in (links - 2, links - 1)
        )
        if not isinstance(remap, faiss.RemapDimensionsTransform) or not isinstance(centring, faiss.CenteringTransform):
            return None
        d, width = remap.d_in, remap.d_out - remap.d_in
        mapped, mean = faiss.vector_to_array(remap.map), faiss.vector_to_array(centring.mean)
        if width < 1 or (mapped[:d] != np.arange(d)).any() or (mapped[d:] >= 0).any() or mean[:d].any():
            return None
        return ExtraDimensions(-mean[d:], self.euclidean)

    def copied_chain(self) -> list[faiss.VectorTransform]:
        """Copies of the transforms, made through Faiss's writer: its cloner knows few of them."""
        chain = []
        for number in range(self.index.chain.size()):
            writer, reader = faiss.VectorIOWriter(), faiss.VectorIOReader()
            faiss.write_VectorTransform(self.index.chain.at(number), writer)
            faiss.copy_array_to_vector(faiss.vector_to_array(writer.data), reader.data)
            chain.append(faiss.read_VectorTransform(reader))
        return chain


def appends_by_linear(link: faiss.VectorTransform) -> bool:
    """Whether `link` appends constants to its input by a matrix, as that of `for_gpu` does."""
    if not isinstance(link, faiss.LinearTransform) or not link.have_bias or link.d_out <= link.d_in:
        return False
    matrix = faiss.vector_to_array(link.A).reshape(link.d_out, link.d_in)
    return bool((matrix == np.eye(link.d_out, link.d_in)).all())
