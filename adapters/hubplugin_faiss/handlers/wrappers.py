"""Handlers for indexes that wrap others: id maps, transforms and refined indexes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin.measures.hubness import pick_evenly
from hubplugin_faiss.encoding.offsets import (
    ExtraDimensions,
    UpgradeSpec,
    nearness_of,
)
from hubplugin_faiss.handlers.base import (
    Added,
    Changes,
    IndexHandler,
    handler_for,
)
from hubplugin_faiss.handlers.codes import BaseIndexHandler
from hubplugin_faiss.objects import (
    copy_settings,
    copy_transforms,
    is_mapped,
    name_of,
    pretransform,
    transforms_of,
)

STAGE_SAMPLE = 512
"""The number of entries sampled to compare two stages (`RefineHandler._sample`).

In six settings, the coefficients from 256 to 2,048 entries differed by 0.01 at most.
"""


class WrapperHandler(IndexHandler):
    """Handles an index that wraps one other index.

    inner: The handler of the wrapped index, by default from `handler_for`.
    """

    def __init__(self, index: faiss.Index, inner: IndexHandler | None = None):
        super().__init__(index)
        if inner is None:
            if is_mapped(index.index):
                raise StoreError(
                    f"a query map inside this {name_of(index)} would be lost; downgrade "
                    "what it holds (hubplugin_faiss.downgrade), put the map around the "
                    "whole, and upgrade that"
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
    """Handles a map from entries to the user's ids."""

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

    def plan_append(self, added: Added) -> Changes:
        if added.ids is None:
            raise StoreError(
                f"{name_of(self.index)} has its own ids: pass ids= with the vectors"
            )
        append = self.inner.plan_append(added._replace(ids=None))
        all_ids = np.concatenate([self._ids, added.ids])
        return [*append, partial(set_ids, self.index, all_ids)]

    def plan_remove(self, ids: np.ndarray, renumbered: bool) -> Changes:
        # In the wrapped index, the id of an entry is its place in the id map.
        is_removed = np.isin(self._ids, ids)
        rows = np.flatnonzero(is_removed)
        remove = self.inner.plan_remove(rows, renumbered=True)
        return [*remove, partial(set_ids, self.index, self._ids[~is_removed])]

    def labels(self) -> np.ndarray:
        rows = self.inner.labels()
        if len(rows) and rows.max() >= len(self._ids):
            raise StoreError(
                f"this {name_of(self.index)} no longer knows which entry has which id, "
                "because Faiss's own remove_ids was used on inverted lists; build a new "
                "index, and use hubplugin_faiss.remove_ids"
            )
        return self._ids[rows]

    def order(self) -> np.ndarray:
        """Return the order in which vectors were added, regardless of their ids."""
        return self.inner.order()


def set_ids(index: faiss.IndexIDMap, ids: np.ndarray) -> None:
    """Set the ids of the entries in the wrapped index to `ids`."""
    faiss.copy_array_to_vector(ids, index.id_map)
    index.ntotal = len(ids)
    if isinstance(index, faiss.IndexIDMap2):
        index.construct_rev_map()


def id_map_like(index: faiss.IndexIDMap, part: faiss.Index) -> faiss.Index:
    """Return an id map like `index`, with the same ids, over `part`.

    The new index takes ownership of `part`.
    """
    part.ntotal = 0  # Faiss only accepts an empty index here
    new = type(index)(part)
    new.own_fields = True
    part.this.disown()
    part.ntotal = index.ntotal
    copy_settings(new, index)
    set_ids(new, faiss.vector_to_array(index.id_map))
    return new


class PreTransformHandler(WrapperHandler):
    """Handles transforms in front of an inner index.

    An upgrade puts two transforms right in front of a base index, which append its
    extra dimensions. This handler leaves them to the handler of the base index.

    With transforms x -> A x + b, such as a PCA, an inner product index ranks by
    (A q + b).(A t + b). Up to a constant, the raw index so adds the norm bias
    b.(A t + b) to the similarity of each target. Models are fitted without the norm
    bias. Its mean is about 0, but it may outweigh all offsets, so an index holds
    offset - norm bias. Offsets that do not come from a model are stored unchanged.
    """

    names = ("IndexPreTransform",)

    def __init__(self, index: faiss.IndexPreTransform):
        chain = transforms_of(index)
        part = faiss.downcast_index(index.index)
        kind = IndexHandler.registry.get(type(part).__name__, IndexHandler)
        inner = None
        if issubclass(kind, BaseIndexHandler):
            extra = extra_dimensions_of(chain, index.metric_type == faiss.METRIC_L2)
            if extra is not None:
                chain = chain[:-2]  # the last two were added by the upgrade
                inner = kind(part, extra)
        super().__init__(index, inner)
        self._transforms = chain
        self.lossy |= any(step.d_out < step.d_in for step in chain)

    def check(self) -> None:
        super().check()
        # Raise StoreError if a transform has no inverse.
        self.quantise(np.zeros((1, self.index.d)))

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
        # The transforms that an upgrade added come last.
        transforms = copy_transforms(self.index)[: len(self._transforms)]
        inner = self.inner.downgrade()
        if not transforms and isinstance(self.inner, BaseIndexHandler):
            # Only the upgrade has wrapped this base index.
            return inner
        return pretransform(transforms, inner)

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inner, offsets = self.inner.take(rows)
        if not self._transforms:
            return inner, offsets
        return self._reverse(inner), np.float32(offsets + self._norm_bias(inner))

    def quantise(self, vectors: np.ndarray) -> np.ndarray:
        return self._reverse(self.inner.quantise(self._transform(vectors)))

    def plan_append(self, added: Added) -> Changes:
        vectors = self._transform(added.vectors)
        bias = self._norm_bias(self.inner.quantise(vectors))
        return self.inner.plan_append(Added(vectors, added.offsets - bias, added.ids))

    def round_offsets(
        self, offsets: np.ndarray, vectors: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        inner = self._transform(vectors)
        bias = self._norm_bias(inner)
        return self.inner.round_offsets(offsets - bias, inner, rows) + bias

    @cached_property
    def _shift(self) -> np.ndarray | None:
        """The b of the transforms x -> A x + b together: float64 [d].

        None under L2, if b is 0, or if a later transform normalises vectors.
        """
        later_transforms = self._transforms[1:]
        normalises = any(
            isinstance(t, faiss.NormalizationTransform) for t in later_transforms
        )
        if self.euclidean or normalises:
            return None
        shift = self._transform(np.zeros((1, self.index.d)))[0].astype(np.float64)
        if not shift.any():
            return None
        return shift

    def _norm_bias(self, inner: np.ndarray) -> np.ndarray | float:
        """Return the norm bias [b] of transformed vectors `inner` [b, d].

        Return 0 if there is none, or if the offsets do not come from a model.
        """
        if self._shift is None or self.holds_offsets_of(""):
            return 0.0
        return inner @ self._shift

    def _transform(self, vectors: np.ndarray) -> np.ndarray:
        """Apply all transforms to `vectors` [b, d], except the two that append extra
        dimensions."""
        for step in self._transforms:
            vectors = step.apply(vectors)
        return vectors

    def _reverse(self, inner: np.ndarray) -> np.ndarray:
        """Return vectors [b, d] that the transforms map approximately to `inner`.

        Raises StoreError if a transform has no inverse.
        """
        vectors = inner
        for step in reversed(self._transforms):
            try:
                vectors = step.reverse_transform(vectors)
            except RuntimeError:
                raise StoreError(
                    f"the {type(step).__name__} before this {name_of(self.index.index)} "
                    "cannot be inverted, so its vectors cannot be read, and it cannot "
                    "be upgraded"
                ) from None
        return vectors


def extra_dimensions_of(
    chain: Sequence[faiss.VectorTransform], euclidean: bool
) -> ExtraDimensions | None:
    """Return the extra dimensions that the last two transforms of a chain append.

    Return None unless these two only append constants and change nothing else: the
    first appends zeros, which have a source below 0, and the second subtracts its mean.
    """
    match chain:
        case [
            *_,
            faiss.RemapDimensionsTransform() as remap,
            faiss.CenteringTransform() as centring,
        ]:
            d = remap.d_in
            source = faiss.vector_to_array(remap.map)
            mean = faiss.vector_to_array(centring.mean)
            keeps_vector = (
                np.array_equal(source[:d], np.arange(d)) and not mean[:d].any()
            )
            if keeps_vector and len(source) > d and (source[d:] < 0).all():
                return ExtraDimensions(-mean[d:], euclidean)
    return None


class RefineHandler(WrapperHandler):
    """Handles a base index whose candidates are ranked by a second, inner index.

    Entries are in the order of the second stage, which is the order of ids.

    The codes of the base stage change lengths, and multiply similarities by a factor,
    the shrinkage (see `slope`). Let o be the offset of a target that the base stage
    decodes as t and the second stage as u. The base index holds the offset

        shrinkage^2 o - nearness (|t| - shrinkage |u|)
                      + (|t|^2 - shrinkage |u|^2) / 2      (the last term with L2 only)

    The factor of o is shrinkage^2 because the codes shrink the difference between
    correct and other answers by more than the shrinkage. In six settings (text to code
    twice, packages, commands, languages, images), it was compared with the best factor,
    from a regression of the refined scores on decoded similarity and offset: R@1 was
    within 0.2 points. With factor 1, a coarse base stage loses up to 3 points of R@10.
    """

    names = ("IndexRefine", "IndexRefineFlat")

    def __init__(self, index: faiss.IndexRefine):
        super().__init__(index, handler_for(index.refine_index))
        self._base = handler_for(index.base_index)
        self.extras = self._base.extras + self.inner.extras
        self.exhaustive = False

    def upgrade(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        base_vectors, _, refined_vectors, _ = self._sample()
        shrinkage = slope(refined_vectors, base_vectors)
        nearness = 0.0
        if spec.queries is not None:
            nearness = nearness_of(spec.queries, base_vectors, len(offsets))
        ids = self._base.labels()
        refined_lengths = lengths_in(self.inner)[ids]
        excess, cost = self._excess(lengths_in(self._base), refined_lengths, shrinkage)
        base_offsets = shrinkage**2 * offsets[ids] - nearness * excess + cost
        base_offsets = base_offsets.astype(np.float32)
        # A constant changes no ranking, but would waste part of the range of codes.
        base_offsets -= np.float32(base_offsets.mean(dtype=np.float64))
        base = self._base.upgrade(base_offsets, spec.cover(base_offsets))
        return self._with_stages(base, self.inner.upgrade(offsets, spec))

    def downgrade(self) -> faiss.Index:
        return self._with_stages(self._base.downgrade(), self.inner.downgrade())

    def _with_stages(self, base: faiss.Index, second: faiss.Index) -> faiss.Index:
        """Return an index like this one that owns the stages `base` and `second`."""
        new = faiss.IndexRefine(base, second)
        new.own_fields = True
        new.own_refine_index = True
        base.this.disown()
        second.this.disown()
        copy_settings(new, self.index)
        return new

    def plan_append(self, added: Added) -> Changes:
        base_offsets = self._base_offsets(added.vectors, added.offsets)
        return [
            *self.inner.plan_append(added),
            *self._base.plan_append(added._replace(offsets=base_offsets)),
        ]

    def plan_remove(self, ids: np.ndarray, renumbered: bool) -> Changes:
        """Plan the removal, and always renumber the remaining entries.

        The second stage finds entries by their row, so `renumbered` has no effect.
        """
        return [
            *self._base.plan_remove(ids, renumbered=True),
            *self.inner.plan_remove(ids, renumbered=True),
        ]

    def _base_offsets(self, vectors: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return base offsets [n] for new `vectors` [n, d] with `offsets` [n].

        In the upgrade, each base offset minus its cost (see `_excess`) was a linear
        function of the refined offset and of the excess length. The coefficients are
        recovered by least squares from a sample, then applied to the new entries.
        """
        base_vectors, base_offsets, refined_vectors, refined_offsets = self._sample()
        if not len(base_vectors):
            return offsets
        shrinkage = slope(refined_vectors, base_vectors)
        excess, cost = self._excess(
            np.linalg.norm(base_vectors, axis=1),
            np.linalg.norm(refined_vectors, axis=1),
            shrinkage,
        )
        sampled = np.stack([refined_offsets, excess, np.ones(len(excess))], axis=1)
        coefficients = np.linalg.lstsq(sampled, base_offsets - cost, rcond=1e-6)[0]
        excess, cost = self._excess(
            np.linalg.norm(self._base.quantise(vectors), axis=1),
            np.linalg.norm(self.inner.quantise(vectors), axis=1),
            shrinkage,
        )
        added = np.stack([offsets, excess, np.ones(len(excess))], axis=1)
        return (added @ coefficients + cost).astype(np.float32)

    def _excess(
        self, base_lengths: np.ndarray, refined_lengths: np.ndarray, shrinkage: float
    ) -> tuple[np.ndarray, np.ndarray | float]:
        """Return the excess lengths [n] of base vectors t, and their cost.

        The excess is over the shrunk length of the refined vector u:
        |t| - shrinkage |u|. Under L2, the similarity to a query is q.t - |t|^2 / 2. The
        cost is the excess of the last term, (|t|^2 - shrinkage |u|^2) / 2. Under inner
        product, there is no such term, and the cost is 0.

        Args:
            base_lengths, refined_lengths: The lengths |t| and |u| of the vectors that
                the two stages decode, [n].
            shrinkage: The factor by which the base stage multiplies similarities.
        """
        excess = base_lengths - shrinkage * refined_lengths
        if not self.euclidean:
            return excess, 0.0
        return excess, (base_lengths**2 - shrinkage * refined_lengths**2) / 2

    def _sample(self) -> list[np.ndarray]:
        """Sample base vectors, base offsets, refined vectors and refined offsets.

        Entries with a vector that is not finite are omitted. The offsets are NaN if the
        index is not upgraded.
        """
        rows = pick_evenly(np.arange(self.count), STAGE_SAMPLE)
        # The second stage stores entries in the order of ids, the base stage may not.
        ids, places = np.unique(self._base.labels()[rows], return_inverse=True)
        base_vectors, base_offsets = self._base.take(rows)
        refined_vectors, refined_offsets = self.inner.take(ids)
        refined_vectors = refined_vectors[places]
        refined_offsets = refined_offsets[places]
        vectors = np.hstack([base_vectors, refined_vectors])
        finite = np.isfinite(vectors).all(axis=1)
        parts = (base_vectors, base_offsets, refined_vectors, refined_offsets)
        return [part[finite] for part in parts]


def lengths_in(stage: IndexHandler) -> np.ndarray:
    """Return the lengths of all vectors that `stage` decodes: [n]."""
    lengths = [np.linalg.norm(batch.vectors, axis=1) for batch in stage.scan()]
    return np.concatenate(lengths)


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Return the slope of a regression of `y` [n, d] on `x` [n, d], both centred.

    Return 1 if `x` does not vary.
    """
    x = x - x.mean(axis=0, dtype=np.float64)
    y = y - y.mean(axis=0, dtype=np.float64)
    spread = (x**2).sum()
    if not spread:
        return 1.0
    return float((x * y).sum() / spread)
