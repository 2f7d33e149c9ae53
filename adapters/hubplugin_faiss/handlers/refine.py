"""Refined indexes: candidates of a first stage, ranked by a second, and the first one's share of the offsets."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeAlias

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.codecs import ExtraDimensions, UpgradeSpec
from hubplugin_faiss.handlers.base import (
    IndexHandler,
    IndexScale,
    block_rows,
    copy_fields,
    handed_over,
    handler_for,
    name_of,
)
from hubplugin_faiss.handlers.wrappers import WrapperHandler

SHRUNK, RUNS = 512, 16
"""From how many entries the slope of codes is taken, in how many runs. On six settings 256 to 2,048 give the same slope
to 0.01."""

Scanned: TypeAlias = tuple[np.ndarray, np.ndarray | None]
"""Vectors [b, d], and their offsets [b] if the index is upgraded."""


class RefineHandler(WrapperHandler):
    """Candidates from a base index, ranked by a second stage, the inner index. Entries are in the order of the latter,
    that of ids."""

    names = ("IndexRefine", "IndexRefineFlat")

    def check(self) -> None:
        super().check()
        self._base.check()
        self._inner.check()

    def upgraded(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        second = self._inner.upgraded(offsets, spec)
        labels = self._base.labels()
        first, of_second = self._scales(spec.nearness)
        of_model = of_entries(self._inner, of_second.of_model, offsets)
        of_base = of_entries(self._base, first.unbiased, self._share * of_model[labels])
        return self._of(self._base.upgraded(of_base, spec.covering(of_base)), second)

    def downgraded(self) -> faiss.Index:
        return self._of(self._base.downgraded(), self._inner.downgraded())

    def require_takes(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, nearness: float | None = None
    ) -> None:
        if ids is not None:
            raise StoreError(f"{name_of(self.index)} numbers its entries itself; add without ids")
        self._inner.require_takes(vectors, offsets, None, nearness)
        self._base.require_takes(vectors, self._offsets_of_base(vectors, offsets, nearness), None, nearness)

    def append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, nearness: float | None = None
    ) -> None:
        of_base = self._offsets_of_base(vectors, offsets, nearness)
        self._inner.append(vectors, offsets, None, nearness)
        self._base.append(vectors, of_base, None, nearness)
        self.index.ntotal = self.index.refine_index.ntotal

    def _offsets_of_base(self, vectors: np.ndarray, offsets: np.ndarray, nearness: float | None) -> np.ndarray:
        """The offsets [n] in the base index, where the second stage holds `offsets` [n] with `vectors` [n, d]."""
        first, second = self._scales(nearness)
        share, rest = self._share_held(first, second)
        shrunk = share * second.of_model(offsets, self._inner.coded(vectors)) + rest
        return first.unbiased(shrunk, self._base.coded(vectors))

    def _scales(self, nearness: float | None) -> tuple[IndexScale, IndexScale]:
        """Of both stages. That of the first takes the norm bias off alone: lengths are part of its share of offsets."""
        return IndexScale(self._base, nearness), IndexScale(self._inner, nearness)

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

    @cached_property
    def _base(self) -> IndexHandler:
        return handler_for(self.index.base_index)

    @property
    def _share(self) -> float:
        """The share of offsets that the first stage of an index gets: the square of the slope of what it decodes on
        what the second stage holds. Codes shrink similarities by the slope, and what sets a right answer apart by more.

        On six settings (text to code twice, packages, commands, languages, images) the square is within 0.2 points of
        R@1 of the share by which decoded similarity and offset predict the scores of the second stage best.
        """
        (decoded, _), (held, _) = self._some()
        return slope(held, decoded) ** 2

    def _share_held(self, first: IndexScale, second: IndexScale) -> tuple[float, float]:
        """The share of the second stage's offsets that the first stage of an upgraded index has, and what they have
        beside it: the means of the norm bias are those of the upgrade, not of today's entries."""
        if not self._base.count:
            return 1.0, 0.0
        (decoded, shrunk), (held, offsets) = self._some()
        assert shrunk is not None
        assert offsets is not None
        x = second.of_model(offsets, held)
        y = shrunk - first.unbiased(np.zeros(len(shrunk)), decoded)
        share = slope(x, y)
        return share, float(y.mean() - share * x.mean())

    def _some(self) -> tuple[Scanned, Scanned]:
        """What the first and the second stage hold of some entries, in runs that begin evenly."""
        length = min(self._base.count, SHRUNK // RUNS)
        starts = np.unique(np.linspace(0, self._base.count - length, RUNS).astype(np.int64)).tolist()
        labels = np.concatenate([self._base.labels(start, start + length) for start in starts])
        of_first = [next(self._base.scan(start, length)) for start in starts]
        return joined(of_first), joined([next(self._inner.scan(label, 1)) for label in labels.tolist()])

    @property
    def lossy_inside(self) -> bool:
        return self.lossy or self._base.lossy_inside

    @property
    def exhaustive(self) -> bool:
        return False

    @cached_property
    def _inner(self) -> IndexHandler:
        return handler_for(self.index.refine_index)

    def _of(self, base: faiss.Index, second: faiss.Index) -> faiss.Index:
        new = faiss.IndexRefine(base, second)
        new.own_fields, new.own_refine_index = handed_over(base), handed_over(second)
        copy_fields(new, self.index, "k_factor")
        return new


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """The slope of `y` on `x`, both [n] or [n, d], each less its mean; 1 where `x` does not vary."""
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    spread = float((x**2).sum())
    return float((x * y).sum()) / spread if spread else 1.0


def joined(parts: list[Scanned]) -> Scanned:
    """The vectors of all parts, and their offsets, which all parts have or none."""
    offsets = [own for _, own in parts if own is not None]
    return np.concatenate([vectors for vectors, _ in parts]), np.concatenate(offsets) if offsets else None


def of_entries(
    handler: IndexHandler, how: Callable[[np.ndarray, np.ndarray], np.ndarray], offsets: np.ndarray
) -> np.ndarray:
    """What `how`, a method of an `IndexScale`, gives for `offsets` [n] of all entries in scan order: float32 [n]."""
    values, row = np.empty(handler.count, np.float32), 0
    for vectors, _ in handler.scan(0, block_rows(handler.index.d)):
        rows = slice(row, row + len(vectors))
        values[rows] = how(offsets[rows], vectors)
        row = rows.stop
    return values
