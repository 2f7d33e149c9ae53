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
from hubplugin_faiss.encoding.offsets import (
    ExtraDimensions,
    UpgradeSpec,
    evenly,
    nearness_of,
)
from hubplugin_faiss.handlers.base import IndexHandler, Taken, handler_for
from hubplugin_faiss.handlers.codes import BaseIndexHandler
from hubplugin_faiss.objects import (
    copy_settings,
    copy_transforms,
    is_mapped,
    name_of,
    pretransform,
    transforms_of,
)

SOME = 512
"""Entries from which an addition takes the share of the first stage. On six settings
256 to 2,048 give the same to 0.01."""


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

    def __init__(self, index: faiss.IndexIDMap):
        super().__init__(index)
        self._ids = faiss.vector_to_array(index.id_map)

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
        all_ids = np.concatenate([self._ids, ids])
        append = self.inner.plan_append(vectors, offsets, None)

        def append_with_ids() -> None:
            append()
            set_ids(self.index, all_ids)

        return append_with_ids

    def require_removes(self, *, renumbered: bool = False) -> None:
        self.inner.require_removes(renumbered=True)

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        is_removed = np.isin(self._ids, ids)
        self.inner.remove(np.flatnonzero(is_removed), renumbered=True)
        set_ids(self.index, self._ids[~is_removed])

    def labels(self) -> np.ndarray:
        rows = self.inner.labels()
        if len(rows) and rows.max() >= len(self._ids):
            raise StoreError(
                f"this {name_of(self.index)} has lost which entry has which id, as "
                "Faiss's own remove_ids over inverted lists does; build it anew, and use "
                "hubplugin_faiss.remove_ids"
            )
        return self._ids[rows]

    def order(self) -> np.ndarray:
        """Return the order in which vectors were added, whatever their ids."""
        return self.inner.order()


def set_ids(index: faiss.IndexIDMap, ids: np.ndarray) -> None:
    """Give the entries of what lies in `index` these `ids`."""
    faiss.copy_array_to_vector(ids, index.id_map)
    index.ntotal = len(ids)
    if isinstance(index, faiss.IndexIDMap2):
        index.construct_rev_map()


def id_map_like(index: faiss.IndexIDMap, part: faiss.Index) -> faiss.Index:
    """Return an index like `index`, with the same ids, over `part`, which it takes
    over."""
    part.ntotal = 0  # Faiss puts ids only over what looks empty
    new = type(index)(part)
    new.own_fields = True
    part.this.disown()
    part.ntotal = index.ntotal
    copy_settings(new, index)
    set_ids(new, faiss.vector_to_array(index.id_map))
    return new


class PreTransformHandler(WrapperHandler):
    """Transforms before an inner index.

    The last two of an upgraded one append the extra dimensions of a base index, and are
    left to the handler of that.

    Under inner product transforms x -> A x + b, such as a PCA, rank by
    (A q + b).(A t + b), so that the raw index adds b.(A t + b) to the similarity of
    each target, up to a constant. No model knows of this norm bias, which is about 0 in
    the mean. It may outweigh all offsets, so that an index holds those of a model less
    their norm bias.
    """

    names = ("IndexPreTransform",)
    AFFINE = (
        faiss.LinearTransform,
        faiss.RemapDimensionsTransform,
        faiss.CenteringTransform,
    )

    def __init__(self, index: faiss.IndexPreTransform):
        self._transforms = transforms_of(index)
        inner = None
        extra = self._take_extra(index.metric_type == faiss.METRIC_L2)
        if extra is not None:
            part = faiss.downcast_index(index.index)
            kind = IndexHandler.registry.get(type(part).__name__)
            if kind is None or not issubclass(kind, BaseIndexHandler):
                raise StoreError(
                    f"{name_of(part)} cannot carry offsets where it stands"
                )
            inner = kind(part, extra)
        super().__init__(index, inner)
        self.lossy |= any(step.d_out < step.d_in for step in self._transforms)

    def _take_extra(self, euclidean: bool) -> ExtraDimensions | None:
        """Take the two transforms that append extra dimensions off the chain.

        Returns these dimensions, or None if the chain does not end in such transforms.
        """
        if len(self._transforms) < 2:
            return None
        remap, centring = self._transforms[-2:]
        appends = isinstance(remap, faiss.RemapDimensionsTransform)
        if not appends or not isinstance(centring, faiss.CenteringTransform):
            return None
        d = remap.d_in
        mapped = faiss.vector_to_array(remap.map)
        mean = faiss.vector_to_array(centring.mean)
        keeps = np.array_equal(mapped[:d], np.arange(d)) and not mean[:d].any()
        if not keeps or remap.d_out <= d or (mapped[d:] >= 0).any():
            return None
        del self._transforms[-2:]
        return ExtraDimensions(-mean[d:], euclidean)

    def check(self) -> None:
        width = self.index.d
        if self._transforms:
            width = self._transforms[-1].d_out
        self._reverse(np.zeros((1, width)))
        super().check()

    def upgrade(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        if spec.queries is not None:
            spec = replace(spec, queries=self._transform(spec.queries))
        if spec.fingerprint and self._shift is not None:
            bias = [batch.vectors @ self._shift for batch in self.inner.scan()]
            offsets = (offsets - np.concatenate(bias)).astype(np.float32)
            spec = spec.cover(offsets)
        transforms = copy_transforms(self.index)
        if isinstance(self.inner, BaseIndexHandler):
            return self.inner.upgrade(offsets, spec, transforms)
        return pretransform(transforms, self.inner.upgrade(offsets, spec))

    def downgrade(self) -> faiss.Index:
        transforms = copy_transforms(self.index)[: len(self._transforms)]
        inner = self.inner.downgrade()
        if not transforms and isinstance(self.inner, BaseIndexHandler):
            return inner
        return pretransform(transforms, inner)

    def take(self, rows: np.ndarray) -> Taken:
        inner, offsets = self.inner.take(rows)
        if not self._transforms:
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
        return self.inner.plan_append(inner, offsets - bias, ids)

    def round_offsets(
        self, offsets: np.ndarray, vectors: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        inner = self._transform(vectors)
        bias = self._norm_bias(inner)
        return self.inner.round_offsets(offsets - bias, inner, rows) + bias

    @cached_property
    def _shift(self) -> np.ndarray | None:
        """The b of transforms x -> A x + b under inner product: float64; None where
        there is none."""
        transforms = itertools.dropwhile(
            lambda step: isinstance(step, faiss.NormalizationTransform),
            self._transforms,
        )
        if self.euclidean or not all(isinstance(t, self.AFFINE) for t in transforms):
            return None
        shift = self._transform(np.zeros((1, self.index.d)))[0].astype(np.float64)
        if not shift.any():
            return None
        return shift

    def _norm_bias(self, inner: np.ndarray) -> np.ndarray | float:
        """Return the norm bias [b] of transformed vectors `inner` [b, d].

        Offsets that were given as numbers have none taken off.
        """
        if self._shift is None or self.holds_offsets_of(""):
            return 0.0
        return inner @ self._shift

    def _transform(self, vectors: np.ndarray) -> np.ndarray:
        """Return `vectors` [b, d] behind all transforms but those that append extra
        dimensions."""
        for step in self._transforms:
            vectors = step.apply(np.ascontiguousarray(vectors, np.float32))
        return vectors

    def _reverse(self, inner: np.ndarray) -> np.ndarray:
        """Return the vectors [b, d] that the transforms map to about `inner`."""
        vectors = inner
        for step in reversed(self._transforms):
            vectors = np.ascontiguousarray(vectors, np.float32)
            try:
                vectors = step.reverse_transform(vectors)
            except RuntimeError:
                raise StoreError(
                    f"the {type(step).__name__} before this {name_of(self.index.index)} "
                    "cannot be turned back, so that its vectors cannot be read; it "
                    "cannot be upgraded"
                ) from None
        return vectors


class RefineHandler(WrapperHandler):
    """Candidates from a base index, ranked by a second stage, the inner index.

    Entries are in the order of the second stage, that of ids.
    Codes of the first stage shrink similarities, by `slope`, and change lengths. So for
    a target with the offset o, which it decodes as t and the second stage as u, it
    holds

        share o - nearness (|t| - slope |u|), and by L2 (|t|^2 - slope |u|^2) / 2 more,

    with the square of the slope as share: what sets a right answer apart is shrunk by
    more than the slope. On six settings (text to code twice, packages, commands,
    languages, images) that is within 0.2 points of R@1 of the share by which decoded
    similarity and offset predict the scores of the second stage best. Offsets as they
    are cost a coarse first stage up to 3 points of R@10.
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
        ids = self._base.labels()
        of_first = lengths_in(self._base)
        of_second = lengths_in(self.inner)[ids]
        longer, cost = self._excess(of_first, of_second, shrunk)
        of_base = shrunk**2 * offsets[ids] - nearness * longer + cost
        of_base = of_base.astype(np.float32)
        # Less the same for all: codes of few bits would spend theirs on it.
        of_base -= np.float32(of_base.mean(dtype=np.float64))
        base = self._base.upgrade(of_base, spec.cover(of_base))
        return self._of(base, self.inner.upgrade(offsets, spec))

    def downgrade(self) -> faiss.Index:
        return self._of(self._base.downgrade(), self.inner.downgrade())

    def _of(self, base: faiss.Index, second: faiss.Index) -> faiss.Index:
        """Return an index like this, of two stages that it takes over."""
        new = faiss.IndexRefine(base, second)
        new.own_fields = True
        new.own_refine_index = True
        base.this.disown()
        second.this.disown()
        copy_settings(new, self.index)
        return new

    def plan_append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> Callable[[], None]:
        if ids is not None:
            raise StoreError(
                f"{name_of(self.index)} numbers its entries itself; add without ids"
            )
        of_base = self._offsets_of_base(vectors, offsets)
        append_to_second = self.inner.plan_append(vectors, offsets, None)
        append_to_base = self._base.plan_append(vectors, of_base, None)

        def append() -> None:
            append_to_second()
            append_to_base()

        return append

    def require_removes(self, *, renumbered: bool = False) -> None:
        for stage in (self._base, self.inner):
            stage.require_removes(renumbered=True)

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        """Remove `ids` and close up the others, `renumbered` or not, since the second
        stage finds entries by their row."""
        for stage in (self._base, self.inner):
            stage.remove(ids, renumbered=True)

    def recount(self) -> int:
        self._base.recount()
        self.index.ntotal = self.inner.recount()
        return self.index.ntotal

    def _offsets_of_base(self, vectors: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the offsets [n] in the base index of `vectors` [n, d] with `offsets`
        [n].

        Those of its entries go by theirs and by lengths in a way that the upgrade has
        settled, whatever is added: it is found by least squares.
        """
        first, of_first, second, of_second = self._sample()
        if not len(first):
            return offsets
        shrunk = slope(second, first)

        def columns(
            first: np.ndarray, second: np.ndarray, offsets: np.ndarray
        ) -> tuple[np.ndarray, np.ndarray | float]:
            longer, cost = self._excess(
                np.linalg.norm(first, axis=1), np.linalg.norm(second, axis=1), shrunk
            )
            return np.stack([offsets, longer, np.ones(len(first))], axis=1), cost

        known, cost = columns(first, second, of_second)
        shares = np.linalg.lstsq(known, of_first - cost, rcond=1e-6)[0]
        added_first = self._base.quantise(vectors)
        added_second = self.inner.quantise(vectors)
        added, cost = columns(added_first, added_second, offsets)
        return (added @ shares + cost).astype(np.float32)

    def _excess(
        self, of_first: np.ndarray, of_second: np.ndarray, shrunk: float
    ) -> tuple[np.ndarray, np.ndarray | float]:
        """Return the excess length of what the first stage decodes, and its cost by L2.

        of_first, of_second: The lengths that the stages decode [n].
        """
        longer = of_first - shrunk * of_second
        if not self.euclidean:
            return longer, 0.0
        return longer, (of_first**2 - shrunk * of_second**2) / 2

    def _sample(self) -> list[np.ndarray]:
        """Return what both stages hold of some entries whose vectors are finite.

        These are vectors and offsets of the first stage, then of the second, with zeros
        where there are no offsets.
        """
        labels = self._base.labels()
        names = np.sort(evenly(labels, SOME))
        rows = np.flatnonzero(np.isin(labels, names))
        first, of_first = self._base.take(rows)
        second, of_second = self.inner.take(names)
        if of_first is None or of_second is None:
            of_first = of_second = np.zeros(len(rows))
        places = np.searchsorted(names, labels[rows])
        held = first, of_first, second[places], of_second[places]
        finite = np.isfinite(first).all(axis=1) & np.isfinite(held[2]).all(axis=1)
        return [part[finite] for part in held]


def lengths_in(stage: IndexHandler) -> np.ndarray:
    """Return the lengths of all that `stage` decodes: [n]."""
    lengths = [np.linalg.norm(batch.vectors, axis=1) for batch in stage.scan()]
    return np.concatenate(lengths)


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Return the slope of `y` on `x`, both [n, d], each less its mean; 1 where `x` does
    not vary."""
    x = x - x.mean(axis=0, dtype=np.float64)
    y = y - y.mean(axis=0, dtype=np.float64)
    spread = (x**2).sum()
    if not spread:
        return 1.0
    return float((x * y).sum() / spread)
