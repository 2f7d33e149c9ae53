"""The base class of handlers, and the function that finds the handler of an index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import ClassVar, NamedTuple, TypeAlias

import faiss
import numpy as np

from hubplugin.errors import InputError, StoreError
from hubplugin.measures.hubness import pick_evenly
from hubplugin.metric import Metric
from hubplugin.store import Batch
from hubplugin_faiss.encoding.offsets import ExtraDimensions, UpgradeSpec
from hubplugin_faiss.objects import is_mapped, name_of

BLOCK_BYTES = 8 << 20
"""The approximate size of the blocks in which codes and vectors are processed."""

BLOCK = 32
"""The default number of codes in a block of a fast-scan index."""

SAMPLED = 4096
"""The number of entries in a sample of an index."""

Changes: TypeAlias = list[Callable[[], None]]
"""The steps of a planned change, in order. Everything was checked while planning."""


class Added(NamedTuple):
    """Entries to add.

    vectors: The vectors, [n, d].
    offsets: The offsets, [n].
    ids: The ids, [n]. None if no ids were given.
    """

    vectors: np.ndarray
    offsets: np.ndarray
    ids: np.ndarray | None


class IndexHandler:
    """Reads, upgrades and downgrades one index.

    A subclass lists the Faiss types that it handles in `names`. Entries are numbered in
    scan order: row by row, or list by list. If the index wraps another index, methods
    that the subclass does not define call `inner`, the handler of the wrapped index. A
    handler must not be used again after the steps of `plan_append` or `plan_remove`
    have changed the index.
    """

    names: ClassVar[tuple[str, ...]] = ()
    registry: ClassVar[dict[str, type[IndexHandler]]] = {}

    owner: faiss.Index
    """The index that was passed to `handler_for`, which owns all parts inside it."""

    inner: IndexHandler

    extras: list[ExtraDimensions]
    """The extra dimensions of all base indexes in this index, if it is upgraded."""

    exhaustive = False
    """True if a search compares the query with every entry."""

    lossy = False
    """True if codes may change the length of a vector."""

    def __init_subclass__(cls) -> None:
        for name in cls.__dict__.get("names", ()):  # inherited names do not count
            IndexHandler.registry[name] = cls

    def __init__(self, index: faiss.Index):
        self.index = index
        self.count: int = index.ntotal
        self.euclidean: bool = index.metric_type == faiss.METRIC_L2
        self.metric = Metric.EUCLIDEAN if self.euclidean else Metric.DOT

    def check(self) -> None:
        """Raise StoreError if this index cannot be upgraded in its current state."""
        metric = self.index.metric_type
        fault = ""
        if metric not in (faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2):
            fault = (
                f"has metric {metric}, neither inner product nor L2; an offset cannot "
                "become one more dimension"
            )
        elif not self.index.is_trained:
            fault = "is not trained; train it and add vectors, then upgrade it"
        elif not self.count:
            fault = "is empty; add vectors, then upgrade it"
        if fault:
            raise StoreError(f"{name_of(self.index)} {fault}")

    def upgrade(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        """Return a new index of the same d with `offsets` [n], following `spec`."""
        raise NotImplementedError

    def downgrade(self) -> faiss.Index:
        """Return a new index without offsets, as it was before `upgrade`."""
        raise NotImplementedError

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the vectors [b, d] and offsets [b] of the entries `rows` [b].

        The rows ascend. Offsets are NaN if the index is not upgraded.
        """
        return self.inner.take(rows)

    def row_blocks(self, most: int | None = None) -> Iterator[np.ndarray]:
        """Yield the numbers of all entries in blocks of about `BLOCK_BYTES`.

        most: The maximum number of entries in a block.
        """
        size = max(1, BLOCK_BYTES // (4 * self.index.d))
        if most is not None:
            size = min(size, most)
        for first in range(0, self.count, size):
            yield np.arange(first, min(first + size, self.count))

    def scan(self, most: int | None = None) -> Iterator[Batch]:
        """Yield all entries in the blocks of `row_blocks`.

        The `place` of a batch is the number of its first entry.
        """
        labels = self.labels()
        for rows in self.row_blocks(most):
            vectors, offsets = self.take(rows)
            ids = labels[rows].tolist()
            yield Batch(ids, vectors, offsets, place=int(rows[0]))

    def plan_append(self, added: Added) -> Changes:
        """Plan to add entries. Raises StoreError if they cannot be added."""
        return self.inner.plan_append(added)

    def plan_remove(self, ids: np.ndarray, renumbered: bool) -> Changes:
        """Plan to remove the entries with the ids `ids`, as returned by a search.

        With `renumbered`, the remaining entries in inverted lists are renumbered to
        0, 1, 2, ..., as contiguous codes always are. Raises StoreError if the index
        does not support removal.
        """
        return self.inner.plan_remove(ids, renumbered)

    def quantise(self, vectors: np.ndarray) -> np.ndarray:
        """Return `vectors` as the index will reconstruct them, once added: [n, d]."""
        return self.inner.quantise(vectors)

    _zero: np.ndarray | None = None
    """The reconstruction of a zero vector, once `with_zeros` needs it: [1, d]."""

    def with_zeros(self, vectors: np.ndarray) -> np.ndarray:
        """Return reconstructed `vectors` [b, d] with zero vectors restored.

        Codes may reconstruct a zero vector as another vector.
        """
        if self._zero is None:
            self._zero = self.quantise(np.zeros((1, vectors.shape[1]), np.float32))
        is_zero = np.abs(vectors - self._zero).max(axis=1) <= 1e-6
        return np.where(is_zero[:, None], np.float32(0), vectors)

    def labels(self) -> np.ndarray:
        """Return the ids that a search returns for the entries: int64 [n]."""
        return self.inner.labels()

    def order(self) -> np.ndarray:
        """Return each entry's row in an array ordered by id: int64 [n].

        Raises InputError if the ids are not 0 ... n - 1.
        """
        labels = self.labels()
        if not np.array_equal(np.sort(labels), np.arange(len(labels))):
            raise InputError(
                f"the ids of this {name_of(self.index)} are not 0 ... "
                f"{len(labels) - 1}: pass a model"
            )
        return labels

    def round_offsets(
        self, offsets: np.ndarray, vectors: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        """Return the values of `offsets` after coding in an upgraded index: [b].

        Args:
            offsets: The offsets, [b].
            vectors, rows: The vectors [b, d] and numbers [b] of their entries.
        """
        return self.inner.round_offsets(offsets, vectors, rows)

    @cached_property
    def largest_loss(self) -> float:
        """The largest error of a decoded offset that counts as rounding by the codes.

        It is a tenth of the range of the stored offsets, estimated from a sample.
        """
        _, offsets = self.take(pick_evenly(np.arange(self.count), SAMPLED))
        finite = offsets[np.isfinite(offsets)]
        if not finite.size:
            return 1e-6
        return max(float(np.ptp(finite)) / 10, 1e-6)

    def holds_offsets_of(self, fingerprint: str) -> bool:
        """Return True if the index has offsets from the model with `fingerprint`.

        The fingerprint "" stands for offsets that do not come from a model.
        """
        return bool(self.extras) and all(
            extra.has_fingerprint(fingerprint) for extra in self.extras
        )


def handler_for(index: faiss.Index) -> IndexHandler:
    """Return the handler for `index`, or for the index behind a query map.

    Targets are not mapped, so a handler ignores the query map. Raises StoreError if no
    handler exists for the type of the index.
    """
    if not isinstance(index, faiss.Index):
        raise StoreError(
            f"expected a faiss.Index of real numbers, got {type(index).__name__}"
        )
    inner = faiss.downcast_index(index)
    if is_mapped(index):
        inner = faiss.downcast_index(inner.index)
    name = type(inner).__name__
    kind = IndexHandler.registry.get(name)
    advice = (
        "leave it as it is and search with "
        "hubplugin_faiss.CorrectedSearch(index, model, vectors=vectors)"
    )
    if kind is None:
        raise StoreError(
            f"{name} cannot carry offsets; {advice}; types that can, on a CPU: "
            f"{', '.join(sorted(IndexHandler.registry))}"
        )
    if getattr(inner, "bbs", BLOCK) != BLOCK:
        raise StoreError(
            f"{name} scans blocks of {inner.bbs} codes and cannot carry offsets; only "
            f"blocks of {BLOCK}, the default, can; {advice}"
        )
    handler = kind(inner)
    handler.owner = index
    return handler
