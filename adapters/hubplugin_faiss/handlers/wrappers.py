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
    block_rows,
    copy_fields,
    handed_over,
    handler_for,
    is_mapped,
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

    @property
    def exhaustive(self) -> bool:  # type: ignore[override]
        return self._inner.exhaustive

    @property
    def lossy(self) -> bool:
        return self._inner.lossy

    def check(self) -> None:
        super().check()
        self._inner.check()

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        return self._inner.scan(start, size)

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._inner.labels(start, stop)

    def order(self) -> np.ndarray | slice:
        return self._inner.order()

    def rounded(self, offsets: np.ndarray, vectors: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        return self._inner.rounded(offsets, vectors, rows)

    def extra_dimensions(self) -> list[ExtraDimensions]:
        return self._inner.extra_dimensions()

    def coded(self, vectors: np.ndarray) -> np.ndarray:
        return self._inner.coded(vectors)

    @cached_property
    def coded_zeros(self) -> np.ndarray:
        return self._inner.coded_zeros


class IdMapHandler(WrapperHandler):
    """Ids of the user over an index that numbers its entries itself."""

    names = ("IndexIDMap", "IndexIDMap2")

    def check(self) -> None:
        super().check()
        self.labels()

    def upgraded(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        return self.around(self._inner.upgraded(offsets, spec))

    def downgraded(self) -> faiss.Index:
        return self.around(self._inner.downgraded())

    def require_takes(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None) -> None:
        if ids is None:
            raise StoreError(f"{name_of(self.index)} has ids of its own: pass ids= with the vectors")
        self._inner.require_takes(vectors, offsets, None)

    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None) -> None:
        self._inner.append(vectors, offsets, None)
        self._set_ids(np.concatenate([self._ids, ids]))

    def require_removes(self, *, renumbered: bool = False) -> None:
        self._inner.require_removes(renumbered=True)

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        own, gone = self._ids, np.isin(self._ids, ids)
        self._inner.remove(np.flatnonzero(gone), renumbered=True)
        self._set_ids(own[~gone])

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

    def _set_ids(self, ids: np.ndarray) -> None:
        """The inner index has entries with these `ids` now."""
        faiss.copy_array_to_vector(ids, self.index.id_map)
        self.index.ntotal = self.index.index.ntotal
        if isinstance(self.index, faiss.IndexIDMap2):
            self.index.construct_rev_map()

    def around(self, part: faiss.Index) -> faiss.Index:
        """An index of this kind, with the same ids, over `part`, which it takes over."""
        part.ntotal = 0  # Faiss puts ids only over what looks empty
        new = type(self.index)(part)
        new.own_fields = handed_over(part)
        part.ntotal = self.count
        copy_fields(new, self.index)
        IdMapHandler(new)._set_ids(self._ids)
        return new


class PreTransformHandler(WrapperHandler):
    """Transforms before an inner index. Extra dimensions of a base index behind them are appended in the same chain.

    Under inner product transforms x -> A x + b, such as a PCA, rank by (A q + b).(A t + b), so that the raw index adds
    b.(A t + b) to the similarity of each target, up to a constant. No model knows of this norm bias, which is about 0
    in the mean. It may outweigh all offsets, so that an index holds those of a model less their norm bias.
    """

    names = ("IndexPreTransform",)
    AFFINE = (faiss.LinearTransform, faiss.RemapDimensionsTransform, faiss.CenteringTransform)

    def __init__(self, index: faiss.Index):
        super().__init__(index)
        links = [faiss.downcast_VectorTransform(index.chain.at(number)) for number in range(index.chain.size())]
        if links and appends_by_linear(links[-1]):
            raise StoreError("this copy was made for a GPU, for searches alone; use the index that for_gpu was given")
        self._extra = extra_dimensions_of(links, self.euclidean)
        self._links = links if self._extra is None else links[:-2]  # but those that append extra dimensions
        self._width = int(self._links[-1].d_out if self._links else index.d)

    def check(self) -> None:
        self._reversed(np.zeros((1, self._width), np.float32))
        super().check()

    def upgraded(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        chain = self.copied_chain()
        if spec.queries is not None:
            spec = replace(spec, queries=self._transformed(spec.queries))
        if spec.fingerprint and self._shift is not None:
            bias = [self._norm_bias(inner) for inner, _ in self._inner.scan(0, block_rows(self.index.d))]
            offsets = (offsets - np.concatenate(bias)).astype(np.float32)
            spec = spec.covering(offsets)
        if isinstance(self._inner, BaseIndexHandler):
            return self._inner.upgraded(offsets, spec, chain)
        return pretransform(chain, self._inner.upgraded(offsets, spec))

    def downgraded(self) -> faiss.Index:
        chain = self.copied_chain()
        if self._extra is None:
            return pretransform(chain, self._inner.downgraded())
        base_index = self._base.narrowed(self._width, self._extra)
        return pretransform(chain[:-2], base_index) if chain[:-2] else base_index

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        extra = self._extra
        for inner, offsets in self._inner.scan(start, size):
            held = offsets if extra is None else extra.offsets(inner[:, -extra.width :])
            yield self._reversed(inner), None if held is None else np.float32(held + self._norm_bias(inner))

    def coded(self, vectors: np.ndarray) -> np.ndarray:
        return self._reversed(self._coded_inner(self._transformed(vectors)))

    def _coded_inner(self, inner: np.ndarray) -> np.ndarray:
        """What the inner index makes of transformed vectors [n, d]."""
        return self._inner.coded(inner) if self._extra is None else self._base.coded_extended(self._extra, inner)

    @cached_property
    def coded_zeros(self) -> np.ndarray:
        zero = np.zeros((1, int(self.index.d)), np.float32)
        if self._extra is None:
            return self.coded(zero)
        by_plain_faiss = self._base.coded(with_query(self._transformed(zero), self._extra.query))
        return np.concatenate([self.coded(zero), self._reversed(by_plain_faiss)])  # which may choose another list

    def require_takes(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None) -> None:
        """As far as codes do not lose too much of `offsets` [n]."""
        inner = self._transformed(vectors)
        if self._extra is None:
            self._inner.require_takes(inner, offsets - self._norm_bias(self._coded_inner(inner)), ids)
            return
        self._base.require_takes_extended(inner, ids)
        if len(offsets) and np.abs(self.rounded(offsets, vectors) - offsets).max() > self.most_lost():
            raise StoreError(
                f"offsets from {offsets.min():.4g} to {offsets.max():.4g} find no room in the codes of this "
                f"{name_of(self._inner.index)}, which were made for others: replace all, index = upgrade(index, model)"
            )

    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None) -> None:
        inner = self._transformed(vectors)
        offsets = offsets - self._norm_bias(self._coded_inner(inner))
        if self._extra is None:
            self._inner.append(inner, offsets, ids)
        else:
            self._base.append_extended(self._extra, inner, offsets, ids)
        self.index.ntotal = self.index.index.ntotal

    def require_removes(self, *, renumbered: bool = False) -> None:
        self._inner.require_removes(renumbered=renumbered)

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        self._inner.remove(ids, renumbered=renumbered)
        self.index.ntotal = self.index.index.ntotal

    def rounded(self, offsets: np.ndarray, vectors: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        inner = self._transformed(vectors)
        bias = self._norm_bias(self._coded_inner(inner) if rows is None else inner)
        if self._extra is None:
            return self._inner.rounded(offsets - bias, inner, rows) + bias
        bases = self._base.bases(self._extra, inner, rows)
        return self._extra.offsets(self._base.coder(self._extra).components_for(offsets - bias, bases)) + bias

    def extra_dimensions(self) -> list[ExtraDimensions]:
        return self._inner.extra_dimensions() if self._extra is None else [self._extra]

    @property
    def lossy(self) -> bool:
        return self._inner.lossy or any(link.d_out < link.d_in for link in self._links)

    @property
    def _base(self) -> BaseIndexHandler:
        """The inner index, which has the extra dimensions of this chain."""
        if not isinstance(self._inner, BaseIndexHandler):
            raise StoreError(f"{name_of(self._inner.index)} cannot carry offsets where it stands")
        return self._inner

    @cached_property
    def _shift(self) -> np.ndarray | None:
        """The b of transforms x -> A x + b under inner product: float64; None where there is none."""
        affine = itertools.dropwhile(lambda link: isinstance(link, faiss.NormalizationTransform), self._links)
        if self.euclidean or not all(isinstance(link, self.AFFINE) for link in affine):
            return None
        shift = self._transformed(np.zeros((1, self.index.d)))[0].astype(np.float64)
        return shift if shift.any() else None

    def _norm_bias(self, inner: np.ndarray) -> np.ndarray | float:
        """That of transformed vectors `inner` [b, d or more]: [b]. Offsets that were given as numbers stay as they
        are."""
        if self._shift is None or self.holds_offsets_of(""):
            return 0.0
        return np.asarray(inner[:, : self._width] @ self._shift)

    def _transformed(self, vectors: np.ndarray) -> np.ndarray:
        """`vectors` [b, d] behind all transforms but those that append extra dimensions."""
        for link in self._links:
            vectors = link.apply(np.ascontiguousarray(vectors, np.float32))
        return vectors

    def _reversed(self, inner: np.ndarray) -> np.ndarray:
        """The vectors [b, d] that the transforms map to about `inner` [b, at least as many as they give]."""
        vectors = np.ascontiguousarray(inner[:, : self._width], np.float32)
        for link in reversed(self._links):
            try:
                vectors = link.reverse_transform(vectors)
            except RuntimeError:
                raise StoreError(
                    f"the {type(link).__name__} before this {name_of(self._inner.index)} cannot be turned back, so "
                    "that its vectors cannot be read; it cannot be upgraded"
                ) from None
        return vectors

    def copied_chain(self) -> list[faiss.VectorTransform]:
        """Copies of the transforms, made through Faiss's writer: its cloner knows few of them."""
        chain = []
        for number in range(self.index.chain.size()):
            writer, reader = faiss.VectorIOWriter(), faiss.VectorIOReader()
            faiss.write_VectorTransform(self.index.chain.at(number), writer)
            faiss.copy_array_to_vector(faiss.vector_to_array(writer.data), reader.data)
            chain.append(faiss.read_VectorTransform(reader))
        return chain


def extra_dimensions_of(links: list[faiss.VectorTransform], euclidean: bool) -> ExtraDimensions | None:
    """The extra dimensions that a chain appends; None if it does not end in the two transforms that do so."""
    remap, centring = links[-2:] if len(links) > 1 else (None, None)
    if not isinstance(remap, faiss.RemapDimensionsTransform) or not isinstance(centring, faiss.CenteringTransform):
        return None
    d, mapped, mean = remap.d_in, faiss.vector_to_array(remap.map), faiss.vector_to_array(centring.mean)
    if remap.d_out <= d or (mapped[:d] != np.arange(d)).any() or (mapped[d:] >= 0).any() or mean[:d].any():
        return None
    return ExtraDimensions(-mean[d:], euclidean)


def appends_by_linear(link: faiss.VectorTransform) -> bool:
    """Whether `link` appends constants to its input by a matrix, as that of `for_gpu` does."""
    if not isinstance(link, faiss.LinearTransform) or not link.have_bias or link.d_out <= link.d_in:
        return False
    matrix = faiss.vector_to_array(link.A).reshape(link.d_out, link.d_in)
    return bool((matrix == np.eye(link.d_out, link.d_in)).all())
