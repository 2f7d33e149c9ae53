"""Index handlers: what each of them does, and which one handles a given index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import faiss
import numpy as np

from hubplugin.errors import InputError, StoreError
from hubplugin_faiss.encoding.extra_dimensions import ExtraDimensions
from hubplugin_faiss.encoding.layout import Assemble, UpgradeSpec
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

METRICS = faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2


class IndexHandler(ABC):
    """Reads, upgrades and downgrades one index, which only `append` and `remove` change.

    A subclass names the Faiss types that it handles in `names`. Entries are numbered in scan order: row by row, or
    list by list.
    """

    names: ClassVar[tuple[str, ...]] = ()
    registry: ClassVar[dict[str, type[IndexHandler]]] = {}

    owner: object = None
    """The Python object that owns the index, kept alive: the one that `downcast_index` makes does not own it."""

    def __init_subclass__(cls) -> None:
        for name in cls.__dict__.get("names", ()):  # its own: a subclass without names takes over no type
            IndexHandler.registry[name] = cls

    def __init__(self, index: faiss.Index):
        self.index = index

    @property
    @abstractmethod
    def two_stage(self) -> bool:
        """Whether codes have no room for an offset, so that a second stage holds it."""

    @property
    @abstractmethod
    def exhaustive(self) -> bool:
        """Whether a search compares the query with every entry."""

    @property
    @abstractmethod
    def lossy(self) -> bool:
        """Whether codes may change the length of a vector."""

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
    def upgraded(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        """A new index of the same d with `offsets` [n] in it."""

    @abstractmethod
    def downgraded(self, assemble: Assemble) -> faiss.Index:
        """A new index without offsets, as it was before `upgraded`."""

    @abstractmethod
    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Vectors [b, d] from entry `start` on, b <= size, and their offsets [b] if the index is upgraded."""

    @abstractmethod
    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, unit: bool = False) -> None:
        """Adds `vectors` [n, d] with `offsets` [n] to an upgraded index; `unit` as in `UpgradeSpec`."""

    def remove(self, ids: np.ndarray) -> None:
        """Removes the entries that a search calls `ids` from an upgraded index."""
        try:
            self.index.remove_ids(faiss.IDSelectorBatch(ids))
        except RuntimeError as error:
            raise StoreError(f"{name_of(self.index)} cannot remove entries: {reason(error)}") from None

    def coded(self, vectors: np.ndarray) -> np.ndarray:
        """`vectors` [n, d] as an upgraded index reconstructs them once they are added: float32 [n, d]."""
        return vectors

    @abstractmethod
    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The ids that a search returns for the entries [start, stop), all by default: int64 [stop - start]."""

    def order(self) -> np.ndarray | slice:
        """The row of each entry in an array that is ordered by id: int64 [n], or slice(None) if entries are in order.

        Raises InputError if the ids are not 0 ... n - 1.
        """
        labels = self.labels()
        seen = np.zeros(len(labels), bool)
        if len(labels) and labels.min() >= 0 and labels.max() < len(labels):
            seen[labels] = True
        if not seen.all():
            raise InputError(f"the ids of this {name_of(self.index)} are not 0 ... {len(labels) - 1}: pass a model")
        return labels

    @abstractmethod
    def extra_dimensions(self) -> list[ExtraDimensions]:
        """The extra dimensions of all upgraded base indexes in this index."""

    @abstractmethod
    def rounding(self, offsets: np.ndarray) -> float:
        """The largest error that an upgraded index makes when it stores `offsets` [n]."""

    def norm_bias(self, vectors: np.ndarray, unit: bool) -> np.ndarray | None:
        """What this index adds to the similarity of each of `vectors` [b, d] to every query, up to a constant: float
        [b], None for nothing. The model does not know of it, so offsets compensate it.

        unit: whether the model takes all vectors for unit vectors. Codes make them longer or shorter. A longer vector
        scores higher by inner product, and by L2, which is q.t - |t|^2 / 2, it is further away.
        """
        if not (unit and self.lossy):
            return None
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
        return np.asarray(SIMILARITY * lengths - (lengths**2 / 2 if self.euclidean else 0))

    def files(self) -> list[str]:
        """The files in which this index keeps its inverted lists, beside its own."""
        return []

    def selecting(self, selector: faiss.IDSelector) -> faiss.SearchParameters:
        """Search parameters that look only at the ids of `selector`; None where this type takes none."""
        return None

    def is_upgraded(self) -> bool:
        return bool(self.extra_dimensions())


def handler_for(index: faiss.Index) -> IndexHandler:
    """The handler for `index`; raises StoreError, which names its type, if there is none."""
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
    if name not in IndexHandler.registry:
        raise StoreError(f"{name} cannot carry offsets; types that can: {', '.join(sorted(IndexHandler.registry))}")
    handler = IndexHandler.registry[name](faiss.downcast_index(index))
    handler.owner = index
    return handler
