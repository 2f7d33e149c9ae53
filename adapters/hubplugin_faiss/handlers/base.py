"""What an index handler does, and how the handler for an index is found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import faiss
import numpy as np

from hubplugin.errors import InputError, StoreError
from hubplugin_faiss.encoding.extra_dimensions import Tail
from hubplugin_faiss.encoding.layout import Fill, Plan
from hubplugin_faiss.faiss_objects import name_of, reason

ASSEMBLED = {
    "IndexShards": "merge its shards into one index (first.merge_from(second)) and upgrade that, or leave it as it is "
    "and search with hubplugin_faiss.CorrectedSearch(index, offsets)",
    "IndexReplicas": "upgrade one replica, index.at(0), and build the others from what upgrade returns",
}
"""What to do with types that put other indexes together, all of which would need the same extra dimensions."""


SIMILARITY = 0.3
"""About how similar a query is to the targets between which a ranking decides, in units of their length.

Of two targets in one direction the longer one scores higher by its length times that. The tenth nearest of 20,000
and of 3,700 code vectors had 0.44 and 0.41; any value from 0.2 to 0.5 serves every lossy type better than none.
"""

METRICS = {faiss.METRIC_INNER_PRODUCT: "inner product", faiss.METRIC_L2: "L2"}


class Rule(ABC):
    """One index, looked at and never changed, but for `append`.

    Entries are numbered in scan order: row by row, or list by list.
    """

    names: ClassVar[tuple[str, ...]] = ()
    registry: ClassVar[dict[str, type[Rule]]] = {}

    coarse = False
    """Whether codes have no room for an offset, so that it lies in a second stage."""

    def __init_subclass__(cls) -> None:
        for name in cls.names:
            Rule.registry[name] = cls

    exhaustive = False
    """Whether a search looks at every entry."""

    lossy = False
    """Whether what is stored of a vector has no longer its length."""

    owner: Any = None
    """The Python object that owns the index, kept alive: the one that `downcast_index` makes does not own it."""

    def __init__(self, index: Any):
        self.index = index

    @property
    def count(self) -> int:
        return int(self.index.ntotal)

    @property
    def euclidean(self) -> bool:
        return bool(self.index.metric_type == faiss.METRIC_L2)

    def check(self) -> None:
        """Raises StoreError if this index, as it stands, cannot be upgraded."""
        if self.index.metric_type not in METRICS:
            raise StoreError(
                f"{name_of(self.index)} has metric {self.index.metric_type}, neither inner product nor L2; an offset "
                "cannot become one more dimension of it"
            )
        if not self.index.is_trained:
            raise StoreError(f"{name_of(self.index)} is not trained; train it and add vectors, then upgrade it")

    @abstractmethod
    def upgraded(self, offsets: np.ndarray, plan: Plan) -> Any:
        """A new index of the same d with `offsets` [n] in it."""

    @abstractmethod
    def downgraded(self, fill: Fill) -> Any:
        """A new index without offsets, as it was before `upgraded`."""

    @abstractmethod
    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Vectors [b, d] from entry `start` on, b <= size, and their offsets [b] if the index is upgraded."""

    @abstractmethod
    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, unit: bool = False) -> None:
        """Adds `vectors` [n, d] with `offsets` [n] to an upgraded index; `unit` as in `Plan`."""

    def remove(self, ids: np.ndarray) -> None:
        """Takes the entries that a search calls `ids` out of an upgraded index."""
        try:
            self.index.remove_ids(faiss.IDSelectorBatch(ids))
        except RuntimeError as error:
            raise StoreError(f"{name_of(self.index)} cannot remove entries: {reason(error)}") from None

    def coded(self, vectors: np.ndarray) -> np.ndarray:
        """What an upgraded index will make of `vectors` [n, d] once they are added: float32 [n, d]."""
        return vectors

    @abstractmethod
    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """What a search calls the entries [start, stop), all by default: int64 [stop - start]."""

    def order(self) -> np.ndarray | slice:
        """Where the offset of each entry stands in a list by id: a permutation of 0 ... n - 1, int64 [n], or all in
        order, slice(None)."""
        labels = self.labels()
        seen = np.zeros(len(labels), bool)
        if len(labels) and labels.min() >= 0 and labels.max() < len(labels):
            seen[labels] = True
        if not seen.all():
            raise InputError(f"the ids of this {name_of(self.index)} are not 0 ... {len(labels) - 1}: pass a model")
        return labels

    @abstractmethod
    def tails(self) -> list[Tail]:
        """The tails of all leaves that are upgraded."""

    @abstractmethod
    def rounding(self, offsets: np.ndarray) -> float:
        """By how much an upgraded index may round `offsets` [n] when it stores them."""

    def favour(self, vectors: np.ndarray, unit: bool) -> np.ndarray | None:
        """What this index adds to the similarity of `vectors` [b, d] to any query that a model knows nothing of, up to
        a constant: float [b], None for nothing. An offset takes it off again.

        unit: whether the model takes all vectors for unit ones. Codes make them longer or shorter. Longer ones score
        higher, and by L2, which is q.t - |t|^2 / 2, those lie further away.
        """
        if not (unit and self.lossy):
            return None
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
        return np.asarray(SIMILARITY * lengths - (lengths**2 / 2 if self.euclidean else 0))

    def files(self) -> list[str]:
        """The files in which this index keeps its inverted lists, beside its own."""
        return []

    def selecting(self, selector: Any) -> Any:
        """Search parameters that look only at the ids of `selector`; None where this type takes none."""
        return None

    def is_upgraded(self) -> bool:
        return bool(self.tails())


def rule_for(index: Any) -> Rule:
    """The rule for `index`; raises StoreError by the name of its type if there is none."""
    if isinstance(index, faiss.IndexBinary):
        raise StoreError(f"{type(index).__name__} holds bits, and an offset is a real number: it cannot be upgraded")
    if not isinstance(index, faiss.Index):
        raise StoreError(f"expected a faiss index, got {type(index).__name__}")
    name = name_of(index)
    if isinstance(index, getattr(faiss, "GpuIndex", ())):
        raise StoreError(
            f"{name} is on a GPU, where it cannot be upgraded; index = faiss.index_gpu_to_cpu(index) takes it to "
            "the CPU"
        )
    if name in ASSEMBLED:
        raise StoreError(f"{name} cannot carry offsets; {ASSEMBLED[name]}")
    if name not in Rule.registry:
        raise StoreError(f"{name} cannot carry offsets; types that can: {', '.join(sorted(Rule.registry))}")
    rule = Rule.registry[name](faiss.downcast_index(index))
    rule.owner = index
    return rule
