"""IndexRefine: candidates from one index, ranked by another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin.metric import normalise
from hubplugin_faiss.encoding.extra_dimensions import Tail
from hubplugin_faiss.encoding.layout import Fill, Plan
from hubplugin_faiss.faiss_objects import alike, copied, handed_over, name_of
from hubplugin_faiss.handlers.base import Rule, rule_for
from hubplugin_faiss.handlers.norm_bias import Favour, norm_biases
from hubplugin_faiss.handlers.two_stage import K_FACTOR, Coarse, unranked
from hubplugin_faiss.handlers.wrappers import close_up


class Refined(Rule):
    """Candidates from one part, ranked by another. Entries are in the order of the second, which is that of ids."""

    names = ("IndexRefine", "IndexRefineFlat")

    def check(self) -> None:
        super().check()
        self._base.check()
        self._second.check()

    def upgraded(self, offsets: np.ndarray, plan: Plan) -> Any:
        second = self._second.upgraded(offsets, plan)
        if self._base.coarse:
            base = self._base
            candidates = base.ranked(offsets, plan) if isinstance(base, Coarse) else copied(self.index.base_index)
            return self._of(candidates, second, self.index.k_factor * K_FACTOR)
        labels = self._base.labels()
        offsets = offsets[labels]
        if plan.unit:  # the two stages favour different vectors
            offsets = offsets + norm_biases(self._second)[labels] - norm_biases(self._base)
        return self._of(self._base.upgraded(offsets, plan), second, self.index.k_factor)

    def downgraded(self, fill: Fill) -> Any:
        if not self._base.coarse:
            return self._of(self._base.downgraded(fill), self._second.downgraded(fill), self.index.k_factor)
        candidates = unranked(self.index.base_index)
        if self._staged:
            return candidates
        return self._of(candidates, self._second.downgraded(fill), self.index.k_factor / K_FACTOR)

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        return self._second.scan(start, size)

    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, unit: bool = False) -> None:
        if ids is not None:
            raise StoreError(f"{name_of(self.index)} numbers its entries itself; add without ids")
        base = offsets
        if unit and not self._base.coarse:
            first, second = Favour(self._base, unit), Favour(self._second, unit)
            base = offsets + second(self._second.coded(vectors)) - first(self._base.coded(vectors))
        if self._staged:
            held = self.coded(vectors)
            held = normalise(held, "vectors") if unit else held
        else:
            held = vectors
        self._second.append(held, offsets, None, unit)  # which may refuse them
        self._base.append(vectors, base, None, unit)
        self.index.ntotal = self.index.refine_index.ntotal

    def remove(self, ids: np.ndarray) -> None:
        """The ids of those that stay close up, as in a Flat index: the second stage finds them by their place."""
        self._base.remove(ids)
        self._second.remove(ids)
        close_up(self._base, np.unique(ids))
        self.index.ntotal = self.index.refine_index.ntotal

    def coded(self, vectors: np.ndarray) -> np.ndarray:
        """Vectors and what codes make of others must not meet in one second stage: the former would win."""
        return self._base.coded(vectors) if self._staged and not self._holds_originals else self._second.coded(vectors)

    def favour(self, vectors: np.ndarray, unit: bool) -> np.ndarray | None:
        return None if self._staged else self._second.favour(vectors, unit)

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._second.labels(start, stop)

    def order(self) -> np.ndarray | slice:
        return self._second.order()

    def rounding(self, offsets: np.ndarray) -> float:
        return self._second.rounding(offsets)

    def tails(self) -> list[Tail]:
        return self._base.tails() + self._second.tails()

    def files(self) -> list[str]:
        return self._base.files()

    @property
    def coarse(self) -> bool:  # type: ignore[override]
        return self._staged

    @property
    def _base(self) -> Rule:
        return rule_for(self.index.base_index)

    @property
    def lossy(self) -> bool:  # type: ignore[override]
        return self._second.lossy or self._staged

    @property
    def _staged(self) -> bool:
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

    @property
    def _second(self) -> Rule:
        return rule_for(self.index.refine_index)

    def _of(self, base: Any, second: Any, k_factor: float) -> Any:
        new = faiss.IndexRefine(base, second)
        new.own_fields, new.own_refine_index, new.k_factor = handed_over(base), handed_over(second), k_factor
        alike(new, self.index)
        return new
