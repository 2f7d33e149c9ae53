"""Refined indexes: candidates of a first stage, ranked by a second, and the first one's share of the offsets."""

from __future__ import annotations

from functools import cached_property

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.codecs import ExtraDimensions, UpgradeSpec
from hubplugin_faiss.handlers.base import (
    RUNS,
    IndexHandler,
    block_rows,
    copy_fields,
    handed_over,
    handler_for,
    name_of,
    nearness_of,
)
from hubplugin_faiss.handlers.wrappers import WrapperHandler

SOME = 512
"""From how many entries the share is taken. On six settings 256 to 2,048 give the same to 0.01."""


class RefineHandler(WrapperHandler):
    """Candidates from a base index, ranked by a second stage, the inner index. Entries are in the order of the latter,
    that of ids.

    Codes of the first stage shrink similarities, by `slope`, and change lengths. So for a target with the offset o,
    which it decodes as t and the second stage as u, it holds

        share o - nearness (|t| - slope |u|), and by L2 (|t|^2 - slope |u|^2) / 2 more,

    with the square of the slope as share: what sets a right answer apart is shrunk by more than the slope. On six
    settings (text to code twice, packages, commands, languages, images) that is within 0.2 points of R@1 of the share
    by which decoded similarity and offset predict the scores of the second stage best. Offsets as they are cost a
    coarse first stage up to 3 points of R@10.
    """

    names = ("IndexRefine", "IndexRefineFlat")
    exhaustive = False

    @cached_property
    def _base(self) -> IndexHandler:
        return handler_for(self.index.base_index)

    @cached_property
    def _inner(self) -> IndexHandler:
        return handler_for(self.index.refine_index)

    def check(self) -> None:
        super().check()
        self._base.check()

    def upgraded(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        blocks = self._inner.scan(0, block_rows(self.index.d))
        of_second = np.concatenate([np.linalg.norm(vectors, axis=1) for vectors, _ in blocks])
        first, second, *_ = self._some()
        shrunk = slope(second, first)
        nearness = 0.0 if spec.queries is None else nearness_of(spec.queries, first, len(offsets))
        labels, of_base, row = self._base.labels(), np.empty(len(offsets), np.float32), 0
        for vectors, _ in self._base.scan(0, block_rows(self.index.d)):
            own = labels[row : row + len(vectors)]
            longer, bias = self._lengths(np.linalg.norm(vectors, axis=1), of_second[own], shrunk)
            of_base[row : row + len(own)] = shrunk**2 * offsets[own] - nearness * longer + bias
            row += len(own)
        # Less the same for all: codes of few bits would spend theirs on it.
        of_base -= np.float32(of_base.mean(dtype=np.float64)) if len(of_base) else 0
        second_stage = self._inner.upgraded(offsets, spec)
        return self._of(self._base.upgraded(of_base, spec.covering(of_base)), second_stage)

    def downgraded(self) -> faiss.Index:
        return self._of(self._base.downgraded(), self._inner.downgraded())

    def require_takes(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None) -> None:
        if ids is not None:
            raise StoreError(f"{name_of(self.index)} numbers its entries itself; add without ids")
        self._inner.require_takes(vectors, offsets, None)
        self._base.require_takes(vectors, self._offsets_of_base(vectors, offsets), None)

    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None) -> None:
        of_base = self._offsets_of_base(vectors, offsets)
        self._inner.append(vectors, offsets, None)
        self._base.append(vectors, of_base, None)
        self.index.ntotal = self.index.refine_index.ntotal

    def require_removes(self, *, renumbered: bool = False) -> None:
        for stage in (self._base, self._inner):
            stage.require_removes(renumbered=True)

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        """Removes entries and closes up the ids of the others, since the second stage finds entries by their row."""
        for stage in (self._base, self._inner):
            stage.remove(ids, renumbered=True)
        self.index.ntotal = self.index.refine_index.ntotal

    def extra_dimensions(self) -> list[ExtraDimensions]:
        return self._base.extra_dimensions() + self._inner.extra_dimensions()

    def _offsets_of_base(self, vectors: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """The offsets [n] in the base index of `vectors` [n, d] with `offsets` [n]: as those of its entries go by
        theirs and by lengths, which the upgrade has settled, whatever is added."""
        first, second, of_first, of_second = self._some()
        if not len(first):
            return offsets
        shrunk = slope(second, first)

        def lengths(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray | float]:
            return self._lengths(np.linalg.norm(first, axis=1), np.linalg.norm(second, axis=1), shrunk)

        longer, bias = lengths(first, second)
        held = np.linalg.lstsq(np.stack([of_second, longer, np.ones(len(first))], axis=1), of_first - bias, rcond=1e-6)
        longer, bias = lengths(self._base.coded(vectors), self._inner.coded(vectors))
        return np.asarray(np.stack([offsets, longer, np.ones(len(vectors))], axis=1) @ held[0] + bias, np.float32)

    def _lengths(
        self, of_first: np.ndarray, of_second: np.ndarray, shrunk: float
    ) -> tuple[np.ndarray, np.ndarray | float]:
        """By how much what the first stage decodes is longer [n] than it is taken for, and what that costs by L2."""
        return of_first - shrunk * of_second, (of_first**2 - shrunk * of_second**2) / 2 if self.euclidean else 0.0

    def _some(self) -> tuple[np.ndarray, ...]:
        """What the first and the second stage decode of some entries [n, d], in runs that begin evenly, and their
        offsets [n] in each, NaN where there are none."""
        length = min(self._base.count, SOME // RUNS)
        starts = np.unique(np.linspace(0, self._base.count - length, RUNS).astype(np.int64)).tolist() if length else []
        labels = [label for start in starts for label in self._base.labels(start, start + length).tolist()]
        of_first = [next(self._base.scan(start, length)) for start in starts]
        parts = []
        for found in (of_first, [next(self._inner.scan(label, 1)) for label in labels]):
            parts.append(np.concatenate([np.empty((0, int(self.index.d))), *(vectors for vectors, _ in found)]))
            nan = [np.full(len(vectors), np.nan) if offsets is None else offsets for vectors, offsets in found]
            parts.append(np.concatenate([np.empty(0), *nan]))
        finite = np.isfinite(parts[0]).all(axis=1) & np.isfinite(parts[2]).all(axis=1)
        first, of_first, second, of_second = (part[finite] for part in parts)
        return first, second, of_first, of_second

    def _of(self, base: faiss.Index, second: faiss.Index) -> faiss.Index:
        new = faiss.IndexRefine(base, second)
        new.own_fields, new.own_refine_index = handed_over(base), handed_over(second)
        copy_fields(new, self.index, "k_factor")
        return new


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """The slope of `y` on `x`, both [n, d], each less its mean; 1 where `x` does not vary."""
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    spread = float((x**2).sum())
    return float((x * y).sum()) / spread if spread else 1.0
