"""What a handler of an index type does, and how one is found."""

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
"""Codes and vectors are handled in blocks of about this size, whatever the size of the
index."""

BLOCK = 32
"""Codes in a block of an index that is scanned fast, by default."""

SAMPLED = 4096
"""Entries of an index that stand for all of them."""

Taken: TypeAlias = tuple[np.ndarray, np.ndarray | None]
"""Vectors [b, d], and their offsets [b] if the index is upgraded."""

Changes: TypeAlias = list[Callable[[], None]]
"""The steps of a planned change, in order: by then nothing can be wrong with them."""


class Added(NamedTuple):
    """Entries to add: vectors [n, d], offsets [n], and ids [n], or None where the index
    numbers its entries itself."""

    vectors: np.ndarray
    offsets: np.ndarray
    ids: np.ndarray | None


class IndexHandler:
    """Reads, upgrades and downgrades one index.

    A subclass names the Faiss types that it handles in `names`. Entries are numbered in
    scan order: row by row, or list by list. A handler of an index around another one
    leaves what it does not do itself to the handler of that, `inner`. After
    `plan_append` or `plan_remove` has changed the index, it is not used again.
    """

    names: ClassVar[tuple[str, ...]] = ()
    registry: ClassVar[dict[str, type[IndexHandler]]] = {}

    owner: faiss.Index
    """The index as it was given, which owns all inside it."""

    inner: IndexHandler

    extras: list[ExtraDimensions]
    """The extra dimensions of all base indexes in this index, if it is upgraded."""

    exhaustive = False
    """True if a search compares the query with every entry."""

    lossy = False
    """True if codes may change the length of a vector."""

    def __init_subclass__(cls) -> None:
        for name in cls.__dict__.get("names", ()):  # a subclass takes over no type
            IndexHandler.registry[name] = cls

    def __init__(self, index: faiss.Index):
        self.index = index
        self.count: int = index.ntotal
        self.euclidean: bool = index.metric_type == faiss.METRIC_L2
        self.metric = Metric.EUCLIDEAN if self.euclidean else Metric.DOT

    def check(self) -> None:
        """Raise StoreError if this index, as it stands, cannot be upgraded."""
        metric = self.index.metric_type
        fault = ""
        if metric not in (faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2):
            fault = (
                f"has metric {metric}, neither inner product nor L2; an offset cannot "
                "become one more dimension of it"
            )
        elif not self.index.is_trained:
            fault = "is not trained; train it and add vectors, then upgrade it"
        elif not self.count:
            fault = "is empty; add vectors, then upgrade it"
        if fault:
            raise StoreError(f"{name_of(self.index)} {fault}")

    def upgrade(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        """Return a new index of the same d with `offsets` [n] in it, made for
        `spec`."""
        raise NotImplementedError

    def downgrade(self) -> faiss.Index:
        """Return a new index without offsets, as it was before `upgrade`."""
        raise NotImplementedError

    def take(self, rows: np.ndarray) -> Taken:
        """Return the entries of the ascending numbers `rows` [b]."""
        return self.inner.take(rows)

    def row_blocks(self, most: int | None = None) -> Iterator[np.ndarray]:
        """Yield the numbers of all entries, in blocks of about `BLOCK_BYTES`, and of at
        most so many."""
        size = max(1, BLOCK_BYTES // (4 * self.index.d))
        if most is not None:
            size = min(size, most)
        for first in range(0, self.count, size):
            yield np.arange(first, min(first + size, self.count))

    def scan(self, most: int | None = None) -> Iterator[Batch]:
        """Yield all entries, in blocks as `row_blocks` does.

        Their offsets are NaN if the index is not upgraded. `place` is the number of the
        first.
        """
        labels = self.labels()
        for rows in self.row_blocks(most):
            vectors, offsets = self.take(rows)
            if offsets is None:
                offsets = np.full(len(rows), np.nan, np.float32)
            ids = labels[rows].tolist()
            yield Batch(ids, vectors, offsets, place=int(rows[0]))

    def sample(self, most: int = SAMPLED) -> np.ndarray:
        """Return the numbers of at most so many entries, evenly drawn."""
        return pick_evenly(np.arange(self.count), most)

    def plan_append(self, added: Added) -> Changes:
        """Plan to add entries. Raises StoreError if they cannot be added."""
        return self.inner.plan_append(added)

    def plan_remove(self, ids: np.ndarray, renumbered: bool) -> Changes:
        """Plan to remove the entries that a search calls `ids`.

        If entries are `renumbered`, the ids of inverted lists close up to 0, 1, 2, ...,
        as those of codes in a row do of themselves. Raises StoreError if the index
        removes nothing.
        """
        return self.inner.plan_remove(ids, renumbered)

    def quantise(self, vectors: np.ndarray) -> np.ndarray:
        """Return `vectors` [n, d] as this index reconstructs them once they are added
        by `plan_append`: float32 [n, d]."""
        return self.inner.quantise(vectors)

    _zero: np.ndarray | None = None

    def with_zeros(self, vectors: np.ndarray) -> np.ndarray:
        """Return `vectors` [b, d] of the index with zeros for what stands for these.

        Codes may give a zero vector any direction.
        """
        if self._zero is None:
            self._zero = self.quantise(np.zeros((1, vectors.shape[1]), np.float32))
        is_zero = np.abs(vectors - self._zero).max(axis=1) <= 1e-6
        return np.where(is_zero[:, None], np.float32(0), vectors)

    def labels(self) -> np.ndarray:
        """Return the ids that a search returns for the entries: int64 [n]."""
        return self.inner.labels()

    def order(self) -> np.ndarray:
        """Return the row of each entry in an array that is ordered by id: int64 [n].

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
        """Return what codes of an upgraded index make of other offsets: [b].

        Args:
            offsets: [b].
            vectors, rows: The entries [b, d] and their numbers [b].
        """
        return self.inner.round_offsets(offsets, vectors, rows)

    @cached_property
    def most_lost(self) -> float:
        """The most that codes may lose of an offset that fits them.

        It is a tenth of the range of those that they hold, as in
        `OffsetCoder.require_holds`.
        """
        offsets = self.take(self.sample())[1]
        assert offsets is not None
        finite = offsets[np.isfinite(offsets)]
        if not finite.size:
            return 1e-6
        return max(float(np.ptp(finite)) / 10, 1e-6)

    def holds_offsets_of(self, fingerprint: str) -> bool:
        """Return True if the index has offsets of the model `fingerprint`.

        "" stands for offsets of no model.
        """
        return bool(self.extras) and all(
            extra.has_fingerprint(fingerprint) for extra in self.extras
        )


def handler_for(index: faiss.Index) -> IndexHandler:
    """Return the handler for `index`, or for what lies behind its query map, since
    targets are not mapped.

    Raises StoreError, which names its type, if there is none.
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
    instead = (
        "leave it as it is and search with "
        "hubplugin_faiss.CorrectedSearch(index, model, vectors=vectors)"
    )
    if kind is None:
        raise StoreError(
            f"{name} cannot carry offsets; {instead}; types that can, on a CPU: "
            f"{', '.join(sorted(IndexHandler.registry))}"
        )
    if getattr(inner, "bbs", BLOCK) != BLOCK:
        raise StoreError(
            f"{name} scans blocks of {inner.bbs} codes and cannot carry offsets: blocks "
            f"of {BLOCK}, the default, can; {instead}"
        )
    handler = kind(inner)
    handler.owner = index
    return handler
