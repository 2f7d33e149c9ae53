"""Indexes around others: ids of the user, transforms, and a second stage that ranks
candidates again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.codecs import ExtraDimensions, UpgradeSpec
from hubplugin_faiss.handlers.base import (
    IndexHandler,
    Taken,
    copy_fields,
    hand_over,
    handler_for,
    is_mapped,
    name_of,
    nearness_of,
    pretransform,
)
from hubplugin_faiss.handlers.codes import BaseIndexHandler, base_index_handler


class WrapperHandler(IndexHandler):
    """An index around one other."""

    def __init__(self, index: faiss.Index, inner: IndexHandler | None = None):
        super().__init__(index)
        if inner is None:
            if is_mapped(index.index):
                raise StoreError(
                    f"a query map stands within this {name_of(index)}, where it would be "
                    "lost; put it around index = hubplugin_faiss.downgrade(index), and "
                    "upgrade that"
                )
            inner = handler_for(index.index)
        self.inner = inner
        self.extras = inner.extras
        self.exhaustive = inner.exhaustive
        self.lossy = inner.lossy

    def check(self) -> None:
        super().check()
        self.inner.check()


class IdMapHandler(WrapperHandler):
    """Ids of the user over an index that numbers its entries itself."""

    names = ("IndexIDMap", "IndexIDMap2")

    def check(self) -> None:
        super().check()
        self.labels()

    def upgrade(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        return id_map_like(self.index, self.inner.upgrade(offsets, spec))

    def downgrade(self) -> faiss.Index:
        return id_map_like(self.index, self.inner.downgrade())

    def plan_append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> Callable[[], None]:
        if ids is None:
            raise StoreError(
                f"{name_of(self.index)} has ids of its own: pass ids= with the vectors"
            )
        append = self.inner.plan_append(vectors, offsets, None)
        all_ids = np.concatenate([self._ids, ids])

        def append_with_ids() -> None:
            append()
            set_ids(self.index, all_ids)

        return append_with_ids

    def require_removes(self, *, renumbered: bool = False) -> None:
        self.inner.require_removes(renumbered=True)

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        all_ids = self._ids
        is_removed = np.isin(all_ids, ids)
        self.inner.remove(np.flatnonzero(is_removed), renumbered=True)
        set_ids(self.index, all_ids[~is_removed])

    def labels(self) -> np.ndarray:
        rows = self.inner.labels()
        ids = self._ids
        if len(rows) and rows.max() >= len(ids):
            raise StoreError(
                f"this {name_of(self.index)} has lost which entry has which id, as "
                "Faiss's own remove_ids over inverted lists does; build it anew, and use "
                "hubplugin_faiss.remove_ids"
            )
        return np.asarray(ids[rows])

    def order(self) -> np.ndarray:
        """Return the order in which vectors were added, whatever their ids."""
        return self.inner.order()

    @property
    def _ids(self) -> np.ndarray:
        return np.asarray(faiss.vector_to_array(self.index.id_map))


def set_ids(index: faiss.IndexIDMap, ids: np.ndarray) -> None:
    """Give the entries of what lies in `index` these `ids`."""
    faiss.copy_array_to_vector(ids, index.id_map)
    index.ntotal = index.index.ntotal
    if isinstance(index, faiss.IndexIDMap2):
        index.construct_rev_map()


def id_map_like(index: faiss.IndexIDMap, part: faiss.Index) -> faiss.Index:
    """Return an index like `index`, with the same ids, over `part`, which it takes
    over."""
    part.ntotal = 0  # Faiss puts ids only over what looks empty
    new = type(index)(part)
    new.own_fields = hand_over(part)
    part.ntotal = index.ntotal
    copy_fields(new, index)
    set_ids(new, faiss.vector_to_array(index.id_map))
    return new


class PreTransformHandler(WrapperHandler):
    """Transforms before an inner index. The last two of an upgraded one append the extra
    dimensions of a base index, and are left to the handler of that.

    Under inner product transforms x -> A x + b, such as a PCA, rank by
    (A q + b).(A t + b), so that the raw index adds b.(A t + b) to the similarity of each
    target, up to a constant. No model knows of this norm bias, which is about 0 in the
    mean. It may outweigh all offsets, so that an index holds those of a model less their
    norm bias.
    """

    names = ("IndexPreTransform",)
    AFFINE = (
        faiss.LinearTransform,
        faiss.RemapDimensionsTransform,
        faiss.CenteringTransform,
    )

    def __init__(self, index: faiss.IndexPreTransform):
        links = [
            faiss.downcast_VectorTransform(index.chain.at(number))
            for number in range(index.chain.size())
        ]
        extra = extra_dimensions_of(links, index.metric_type == faiss.METRIC_L2)
        inner = None
        if extra is not None:
            inner = base_index_handler(index.index, extra)
            links = links[:-2]
        super().__init__(index, inner)
        self._links = links
        self.lossy |= any(link.d_out < link.d_in for link in links)

    def check(self) -> None:
        width = self._links[-1].d_out if self._links else self.index.d
        self._reverse(np.zeros((1, width)))
        super().check()

    def upgrade(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        if spec.queries is not None:
            spec = replace(spec, queries=self._transform(spec.queries))
        if spec.fingerprint and self._shift is not None:
            bias = np.concatenate(
                [batch.vectors @ self._shift for batch in self.inner.scan()]
            )
            offsets = (offsets - bias).astype(np.float32)
            spec = spec.cover(offsets)
        chain = copy_chain(self.index)
        if isinstance(self.inner, BaseIndexHandler):
            return self.inner.upgrade(offsets, spec, chain)
        return pretransform(chain, self.inner.upgrade(offsets, spec))

    def downgrade(self) -> faiss.Index:
        chain = copy_chain(self.index)[: len(self._links)]
        inner = self.inner.downgrade()
        if not chain and isinstance(self.inner, BaseIndexHandler):
            return inner
        return pretransform(chain, inner)

    def take(self, rows: np.ndarray) -> Taken:
        inner, offsets = self.inner.take(rows)
        if not self._links:
            return inner, offsets
        if offsets is not None:
            offsets = np.float32(offsets + self._norm_bias(inner))
        return self._reverse(inner), offsets

    def quantise(self, vectors: np.ndarray) -> np.ndarray:
        return self._reverse(self.inner.quantise(self._transform(vectors)))

    def plan_append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> Callable[[], None]:
        inner = self._transform(vectors)
        bias = self._norm_bias(self.inner.quantise(inner))
        append = self.inner.plan_append(inner, offsets - bias, ids)

        def append_and_count() -> None:
            append()
            self.index.ntotal = self.index.index.ntotal

        return append_and_count

    def round_offsets(
        self, offsets: np.ndarray, vectors: np.ndarray, rows: np.ndarray | None = None
    ) -> np.ndarray:
        inner = self._transform(vectors)
        held = inner if rows is not None else self.inner.quantise(inner)
        bias = self._norm_bias(held)
        return self.inner.round_offsets(offsets - bias, inner, rows) + bias

    @cached_property
    def _shift(self) -> np.ndarray | None:
        """The b of transforms x -> A x + b under inner product: float64; None where there
        is none."""
        links = itertools.dropwhile(
            lambda link: isinstance(link, faiss.NormalizationTransform), self._links
        )
        if self.euclidean or not all(isinstance(link, self.AFFINE) for link in links):
            return None
        shift = self._transform(np.zeros((1, self.index.d)))[0].astype(np.float64)
        return shift if shift.any() else None

    def _norm_bias(self, inner: np.ndarray) -> np.ndarray | float:
        """Return the norm bias [b] of transformed vectors `inner` [b, d]. Offsets that
        were given as numbers stay as they are."""
        if self._shift is None or self.holds_offsets_of(""):
            return 0.0
        return np.asarray(inner @ self._shift)

    def _transform(self, vectors: np.ndarray) -> np.ndarray:
        """Return `vectors` [b, d] behind all transforms but those that append extra
        dimensions."""
        for link in self._links:
            vectors = link.apply(np.ascontiguousarray(vectors, np.float32))
        return vectors

    def _reverse(self, inner: np.ndarray) -> np.ndarray:
        """Return the vectors [b, d] that the transforms map to about `inner`."""
        vectors = np.ascontiguousarray(inner, np.float32)
        for link in reversed(self._links):
            try:
                vectors = link.reverse_transform(vectors)
            except RuntimeError:
                raise StoreError(
                    f"the {type(link).__name__} before this {name_of(self.index.index)} "
                    "cannot be turned back, so that its vectors cannot be read; it "
                    "cannot be upgraded"
                ) from None
        return vectors


def copy_chain(index: faiss.IndexPreTransform) -> list[faiss.VectorTransform]:
    """Return copies of the transforms of `index`, made through Faiss's writer: its cloner
    knows few of them."""
    chain = []
    for number in range(index.chain.size()):
        writer, reader = faiss.VectorIOWriter(), faiss.VectorIOReader()
        faiss.write_VectorTransform(index.chain.at(number), writer)
        faiss.copy_array_to_vector(faiss.vector_to_array(writer.data), reader.data)
        chain.append(faiss.read_VectorTransform(reader))
    return chain


SOME = 512
"""From how many entries an addition takes the share. On six settings 256 to 2,048 give
the same to 0.01."""


class RefineHandler(WrapperHandler):
    """Candidates from a base index, ranked by a second stage, the inner index. Entries
    are in the order of the latter, that of ids.

    Codes of the first stage shrink similarities, by `slope`, and change lengths. So for a
    target with the offset o, which it decodes as t and the second stage as u, it holds

        share o - nearness (|t| - slope |u|), and by L2 (|t|^2 - slope |u|^2) / 2 more,

    with the square of the slope as share: what sets a right answer apart is shrunk by
    more than the slope. On six settings (text to code twice, packages, commands,
    languages, images) that is within 0.2 points of R@1 of the share by which decoded
    similarity and offset predict the scores of the second stage best. Offsets as they are
    cost a coarse first stage up to 3 points of R@10.
    """

    names = ("IndexRefine", "IndexRefineFlat")

    def __init__(self, index: faiss.IndexRefine):
        super().__init__(index, handler_for(index.refine_index))
        self._base = handler_for(index.base_index)
        self.extras = self._base.extras + self.inner.extras
        self.exhaustive = False

    def check(self) -> None:
        super().check()
        self._base.check()

    def upgrade(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        first, _, second, _ = self._sample()
        shrunk = slope(second, first)
        nearness = 0.0
        if spec.queries is not None:
            nearness = nearness_of(spec.queries, first, len(offsets))
        lengths = self._lengths(self.inner)
        ids = self._base.labels()
        longer, bias = self._excess(self._lengths(self._base), lengths[ids], shrunk)
        of_base = (shrunk**2 * offsets[ids] - nearness * longer + bias).astype(
            np.float32
        )
        # Less the same for all: codes of few bits would spend theirs on it.
        of_base -= np.float32(of_base.mean(dtype=np.float64))
        base = self._base.upgrade(of_base, spec.cover(of_base))
        return self._of(base, self.inner.upgrade(offsets, spec))

    def downgrade(self) -> faiss.Index:
        return self._of(self._base.downgrade(), self.inner.downgrade())

    def plan_append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> Callable[[], None]:
        if ids is not None:
            raise StoreError(
                f"{name_of(self.index)} numbers its entries itself; add without ids"
            )
        of_base = self._offsets_of_base(vectors, offsets)
        stages = [
            self.inner.plan_append(vectors, offsets, None),
            self._base.plan_append(vectors, of_base, None),
        ]

        def append() -> None:
            for stage in stages:
                stage()
            self.index.ntotal = self.index.refine_index.ntotal

        return append

    def require_removes(self, *, renumbered: bool = False) -> None:
        for stage in (self._base, self.inner):
            stage.require_removes(renumbered=True)

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        """Remove `ids` and close up the others, `renumbered` or not, since the second
        stage finds entries by their row."""
        for stage in (self._base, self.inner):
            stage.remove(ids, renumbered=True)
        self.index.ntotal = self.index.refine_index.ntotal

    def _offsets_of_base(self, vectors: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the offsets [n] in the base index of `vectors` [n, d] with `offsets`
        [n]: as those of its entries go by theirs and by lengths, which the upgrade has
        settled, whatever is added."""
        first, of_first, second, of_second = self._sample()
        if not len(first):
            return offsets
        shrunk = slope(second, first)

        def columns(
            first: np.ndarray, second: np.ndarray, offsets: np.ndarray
        ) -> tuple[np.ndarray, np.ndarray | float]:
            of_second = np.linalg.norm(second, axis=1)
            longer, bias = self._excess(
                np.linalg.norm(first, axis=1), of_second, shrunk
            )
            return np.stack([offsets, longer, np.ones(len(first))], axis=1), bias

        known, bias = columns(first, second, of_second)
        shares = np.linalg.lstsq(known, of_first - bias, rcond=1e-6)[0]
        stages = self._base.quantise(vectors), self.inner.quantise(vectors)
        added, bias = columns(*stages, offsets)
        return np.asarray(added @ shares + bias, np.float32)

    def _excess(
        self, of_first: np.ndarray, of_second: np.ndarray, shrunk: float
    ) -> tuple[np.ndarray, np.ndarray | float]:
        """Return by how much what the first stage decodes is longer [n] than it is taken
        for, and what that costs by L2."""
        cost = (of_first**2 - shrunk * of_second**2) / 2 if self.euclidean else 0.0
        return of_first - shrunk * of_second, cost

    @staticmethod
    def _lengths(stage: IndexHandler) -> np.ndarray:
        """Return the lengths of all that `stage` decodes: [n]."""
        return np.concatenate(
            [np.linalg.norm(batch.vectors, axis=1) for batch in stage.scan()]
        )

    def _sample(self) -> list[np.ndarray]:
        """Return what the first and the second stage hold of some entries whose vectors
        are finite: vectors and offsets of each, zeros where there are none."""
        labels = self._base.labels()
        names = np.sort(labels[self._base.sample(SOME)])
        rows = np.flatnonzero(np.isin(labels, names))
        places = np.searchsorted(names, labels[rows])
        first, of_first = self._base.take(rows)
        second, of_second = self.inner.take(names)
        if of_first is None or of_second is None:
            of_first = of_second = np.zeros(len(rows))
        second = second[places]
        finite = np.isfinite(first).all(axis=1) & np.isfinite(second).all(axis=1)
        held = first, of_first, second, of_second[places]
        return [part[finite] for part in held]

    def _of(self, base: faiss.Index, second: faiss.Index) -> faiss.Index:
        new = faiss.IndexRefine(base, second)
        new.own_fields = hand_over(base)
        new.own_refine_index = hand_over(second)
        copy_fields(new, self.index, "k_factor")
        return new


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Return the slope of `y` on `x`, both [n, d], each less its mean; 1 where `x` does
    not vary."""
    x = x - x.mean(axis=0, dtype=np.float64)
    y = y - y.mean(axis=0, dtype=np.float64)
    spread = float((x**2).sum())
    return float((x * y).sum()) / spread if spread else 1.0


def extra_dimensions_of(
    links: list[faiss.VectorTransform], euclidean: bool
) -> ExtraDimensions | None:
    """Return the extra dimensions that a chain of `links` appends, of an index that is
    `euclidean` or not; None if it does not end in the two transforms that do so."""
    if len(links) < 2:
        return None
    remap, centring = links[-2:]
    appends = isinstance(remap, faiss.RemapDimensionsTransform)
    if not appends or not isinstance(centring, faiss.CenteringTransform):
        return None
    d = remap.d_in
    mapped = faiss.vector_to_array(remap.map)
    mean = faiss.vector_to_array(centring.mean)
    keeps = np.array_equal(mapped[:d], np.arange(d)) and not mean[:d].any()
    if not keeps or remap.d_out <= d or (mapped[d:] >= 0).any():
        return None
    return ExtraDimensions(-mean[d:], euclidean)
