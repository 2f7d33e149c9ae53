"""The handler of an index that holds codes itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.codec import Coder
from hubplugin_faiss.encoding.extra_dimensions import Tail
from hubplugin_faiss.encoding.layout import Fill, Plan
from hubplugin_faiss.faiss_objects import appending, name_of, pretransform
from hubplugin_faiss.handlers.base import Rule, rule_for


class Leaf(Rule):
    """An index that holds codes itself. Upgraded, it has w more components and stands behind what appends them."""

    def upgraded(self, offsets: np.ndarray, plan: Plan) -> Any:
        return self.behind([], offsets, plan)

    def behind(self, chain: list[Any], offsets: np.ndarray, plan: Plan) -> Any:
        """The upgraded leaf behind the transforms of `chain` and those that append its tail."""
        tail, leaf = self.widened(offsets, plan)
        return pretransform([*chain, *appending(int(self.index.d), tail)], leaf)

    def downgraded(self, fill: Fill) -> Any:
        raise StoreError(f"{name_of(self.index)} is not upgraded")

    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, unit: bool = False) -> None:
        raise StoreError(f"{name_of(self.index)} is not upgraded")

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        for vectors in self.decoded(start, size):
            yield vectors, None

    def rounding(self, offsets: np.ndarray) -> float:
        return 0.0

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.arange(start, self.count if stop is None else stop)

    def order(self) -> np.ndarray | slice:
        return slice(None)

    def tails(self) -> list[Tail]:
        return []

    @abstractmethod
    def widened(self, offsets: np.ndarray, plan: Plan) -> tuple[Tail, Any]:
        """A tail that suits this leaf, and a new leaf of d + w components with `offsets` [n] in its tails."""

    @abstractmethod
    def narrowed(self, d: int, tail: Tail, fill: Fill) -> Any:
        """Of this leaf with `tail` behind its d components: a new one without."""

    @abstractmethod
    def coder(self, d: int, tail: Tail) -> Coder:
        """Of this leaf with `tail` behind its d components: what wrote it."""

    @abstractmethod
    def bases(self, d: int, count: int) -> np.ndarray | None:
        """Tails [count, w] of centroids that codes of this leaf differ from, None where they do not."""

    @abstractmethod
    def decoded(self, start: int, size: int) -> Iterator[np.ndarray]:
        """All components of the entries from `start` on, b <= size: float32 [b, d], or [b, d + w] with a tail."""

    @abstractmethod
    def coded_tailed(self, tail: Tail, vectors: np.ndarray) -> np.ndarray:
        """What this leaf, which has `tail` behind its d components, will make of `vectors` [n, d]."""

    @abstractmethod
    def append_tailed(self, d: int, tail: Tail, vectors: np.ndarray, offsets: np.ndarray, ids: Any) -> None:
        """Adds `vectors` [n, d] with `offsets` [n] to this leaf, which has `tail` behind its d components."""


def leaf_for(index: Any) -> Leaf:
    rule = rule_for(index)
    if not isinstance(rule, Leaf):
        raise StoreError(f"{name_of(index)} cannot carry offsets where it stands")
    return rule


def with_query(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """`vectors` [n, d] with the tail of a query behind each: float32 [n, d + w]."""
    tails = np.broadcast_to(query, (len(vectors), len(query)))
    return np.ascontiguousarray(np.concatenate([vectors, tails], axis=1), np.float32)
