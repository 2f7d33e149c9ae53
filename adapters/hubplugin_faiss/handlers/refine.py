"""IndexRefine: candidates from one index, ranked by another."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin.metric import normalise
from hubplugin_faiss.encoding.extra_dimensions import ExtraDimensions
from hubplugin_faiss.encoding.layout import Assemble, UpgradeSpec
from hubplugin_faiss.faiss_objects import copied, copy_fields, handed_over, name_of
from hubplugin_faiss.handlers.base import IndexHandler, handler_for
from hubplugin_faiss.handlers.norm_bias import NormBias, norm_biases
from hubplugin_faiss.handlers.two_stage import K_FACTOR, TwoStageHandler, unranked
from hubplugin_faiss.handlers.wrappers import close_up


class RefineHandler(IndexHandler):
    """Candidates from a base index, ranked by a second stage. Entries are in the order of the latter, that of ids."""

    names = ("IndexRefine", "IndexRefineFlat")

    def check(self) -> None:
        super().check()
        self._base.check()
        self._second.check()

    def upgraded(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        second = self._second.upgraded(offsets, spec)
        if self._base.two_stage:
            base = self._base
            candidates = (
                base.ranked(offsets, spec) if isinstance(base, TwoStageHandler) else copied(self.index.base_index)
            )
            return self._of(candidates, second, self.index.k_factor * K_FACTOR)
        labels = self._base.labels()
        offsets = offsets[labels]
        if spec.unit:  # the two stages have different norm biases
            offsets = offsets + norm_biases(self._second)[labels] - norm_biases(self._base)
        return self._of(self._base.upgraded(offsets, spec), second, self.index.k_factor)

    def downgraded(self, assemble: Assemble) -> faiss.Index:
        if not self._base.two_stage:
            return self._of(self._base.downgraded(assemble), self._second.downgraded(assemble), self.index.k_factor)
        candidates = unranked(self.index.base_index)
        if self.two_stage:
            return candidates
        return self._of(candidates, self._second.downgraded(assemble), self.index.k_factor / K_FACTOR)

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        return self._second.scan(start, size)

    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, unit: bool = False) -> None:
        if ids is not None:
            raise StoreError(f"{name_of(self.index)} numbers its entries itself; add without ids")
        base = offsets
        if unit and not self._base.two_stage:
            first, second = NormBias(self._base, unit), NormBias(self._second, unit)
            base = offsets + second(self._second.coded(vectors)) - first(self._base.coded(vectors))
        if self.two_stage:
            held = self.coded(vectors)
            held = normalise(held, "vectors") if unit else held
        else:
            held = vectors
        self._second.append(held, offsets, None, unit)  # which may refuse them
        self._base.append(vectors, base, None, unit)
        self.index.ntotal = self.index.refine_index.ntotal

    def remove(self, ids: np.ndarray) -> None:
        """Removes entries and closes up the ids of the others, since the second stage finds entries by their row."""
        self._base.remove(ids)
        self._second.remove(ids)
        close_up(self._base, np.unique(ids))
        self.index.ntotal = self.index.refine_index.ntotal

    def coded(self, vectors: np.ndarray) -> np.ndarray:
        if self.two_stage and not self._holds_originals:
            return self._base.coded(vectors)  # among decoded vectors an exact one would win
        return self._second.coded(vectors)

    def norm_bias(self, vectors: np.ndarray, unit: bool) -> np.ndarray | None:
        return None if self.two_stage else self._second.norm_bias(vectors, unit)

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._second.labels(start, stop)

    def order(self) -> np.ndarray | slice:
        return self._second.order()

    def rounding(self, offsets: np.ndarray) -> float:
        return self._second.rounding(offsets)

    def extra_dimensions(self) -> list[ExtraDimensions]:
        return self._base.extra_dimensions() + self._second.extra_dimensions()

    def files(self) -> list[str]:
        return self._base.files()

    @cached_property
    def _base(self) -> IndexHandler:
        return handler_for(self.index.base_index)

    @property
    def lossy(self) -> bool:
        return self._second.lossy or self.two_stage

    @property
    def exhaustive(self) -> bool:
        return False

    @property
    def two_stage(self) -> bool:
        """Whether the second stage came with the upgrade."""
        chain = getattr(self._second.index, "chain", None)
        if chain is None or chain.size() == 0:
            return False
        first = faiss.downcast_VectorTransform(chain.at(0))
        return isinstance(first, faiss.RemapDimensionsTransform) and first.d_in == first.d_out

    @property
    def _holds_originals(self) -> bool:
        """Whether the second stage that came with the upgrade holds other vectors than the first decodes to."""
        for (coded, _), (held, _) in zip(self._base.scan(0, 16), self._second.scan(0, 16), strict=True):
            lengths = np.linalg.norm(coded, axis=1) * np.linalg.norm(held, axis=1)
            return bool(((coded * held).sum(axis=1) < (1 - 1e-4) * lengths).any())
        return False

    @cached_property
    def _second(self) -> IndexHandler:
        return handler_for(self.index.refine_index)

    def _of(self, base: faiss.Index, second: faiss.Index, k_factor: float) -> faiss.Index:
        new = faiss.IndexRefine(base, second)
        new.own_fields, new.own_refine_index, new.k_factor = handed_over(base), handed_over(second), k_factor
        copy_fields(new, self.index)
        return new
