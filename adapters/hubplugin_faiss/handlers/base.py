"""What a handler of an index type is; and helpers for the objects of Faiss: their names,
errors, fields and owners."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import faiss
import numpy as np

from hubplugin.errors import InputError, StoreError
from hubplugin.model import QueryMap
from hubplugin.store import Batch
from hubplugin_faiss.encoding.codecs import (
    ExtraDimensions,
    UpgradeSpec,
    evenly,
    into,
)

BLOCK_BYTES = 8 << 20
"""Codes and vectors are handled in blocks of about this size, whatever the size of the
index."""


def name_of(index: faiss.Index) -> str:
    return type(faiss.downcast_index(index)).__name__


def reason(error: RuntimeError | MemoryError) -> str:
    """Return the message of an error of Faiss, without the signature of the function
    that raised it, and without the first bytes of a file that is no index: it may be any
    file."""
    text = re.sub(
        r"^Error in .+? at \S+:\d+: (Error: )?", "", str(error), flags=re.DOTALL
    )
    return re.sub(
        r"Index type 0x\w+ \(.*\) not recognized",
        "it is no index, or of a type unknown to this Faiss",
        " ".join(text.split()),
    )


def block_rows(d: int) -> int:
    """Return how many vectors of d components make a block."""
    return max(1, BLOCK_BYTES // (4 * int(d)))


def pretransform(
    chain: Sequence[faiss.VectorTransform], index: faiss.Index
) -> faiss.IndexPreTransform:
    """Return `index` behind the transforms of `chain`; both belong to it then."""
    new = faiss.IndexPreTransform(index)
    new.own_fields = hand_over(index)
    for transform in reversed(chain):
        new.prepend_transform(transform)
        transform.this.disown()
    new.ntotal = index.ntotal
    new.is_trained = True
    return new


def is_mapped(index: faiss.Index) -> bool:
    """Return True if a query map stands before an index. Its mark, which a file keeps
    and no training leaves, is a linear transform alone, with the bias -0 throughout."""
    part = faiss.downcast_index(index)
    if not isinstance(part, faiss.IndexPreTransform) or part.chain.size() != 1:
        return False
    link = faiss.downcast_VectorTransform(part.chain.at(0))
    if type(link) is not faiss.LinearTransform or not link.have_bias:
        return False
    bias = faiss.vector_to_array(link.b)
    return bool(not bias.any() and np.signbit(bias).all())


def with_map(index: faiss.Index, query_map: QueryMap) -> faiss.Index:
    """Return `index` behind a linear transform that maps queries by `query_map`, and that
    must not map what is added."""
    d = int(index.d)
    transform = faiss.LinearTransform(d, d, True)
    into(query_map.whole, transform.A)
    into(np.full(d, -0.0), transform.b)
    transform.is_trained = True
    return pretransform([transform], index)


def hand_over(part: faiss.Index) -> bool:
    """Release `part` to the C++ object that takes it over, and return True for the field
    own_fields of that."""
    part.this.disown()
    return True


def copy_fields(new: faiss.Index, old: faiss.Index, *fields: str) -> None:
    """Copy from `old` to `new` the fields that every index has, and `fields`."""
    common = "ntotal", "verbose", "is_trained", "metric_type", "metric_arg"
    for field in (*common, *fields):
        setattr(new, field, getattr(old, field))


BLOCK = 32
"""How many codes a block of an index holds that is scanned fast, by default."""

SAMPLED = 4096
"""How many entries of an index stand for all of them."""

RANK = 10
"""The rank of the target by whose similarity `nearness_of` goes."""


def nearness_of(queries: np.ndarray, vectors: np.ndarray, count: int) -> float:
    """Return the mean similarity of queries and the direction of their tenth nearest
    target.

    Of two targets in one direction the longer one scores higher by its length times
    that. Embedding models differ in it: it was 0.25 between captions and images, and
    0.85 across languages.

    Args:
        queries: [m, d].
        vectors: A sample of the targets [n, d].
        count: How many targets there are.
    """
    rank = min(max(round(RANK * len(vectors) / count), 1), len(vectors))
    lengths = np.maximum(np.linalg.norm(vectors, axis=1), 1e-30)
    cosines = queries @ (vectors / lengths[:, None]).T
    return float(np.partition(cosines, -rank, axis=1)[:, -rank].mean())


Taken = tuple[np.ndarray, np.ndarray | None]
"""Vectors [b, d], and their offsets [b] if the index is upgraded."""


class IndexHandler:
    """Reads, upgrades and downgrades one index.

    A subclass names the Faiss types that it handles in `names`. Entries are numbered in
    scan order: row by row, or list by list. A handler of an index around another one
    leaves what it does not do itself to the handler of that, `inner`. After
    `plan_append` or `remove` has changed the index, it is not used again.
    """

    names: ClassVar[tuple[str, ...]] = ()
    registry: ClassVar[dict[str, type[IndexHandler]]] = {}

    owner: faiss.Index
    """The index as it was given, which owns all inside it."""

    inner: IndexHandler

    extras: list[ExtraDimensions]
    """The extra dimensions of all base indexes in this index, if it is upgraded."""

    exhaustive = False
    """Whether a search compares the query with every entry."""

    lossy = False
    """Whether codes may change the length of a vector."""

    def __init_subclass__(cls) -> None:
        for name in cls.__dict__.get("names", ()):  # a subclass takes over no type
            IndexHandler.registry[name] = cls

    def __init__(self, index: faiss.Index):
        self.index = index
        self.count = int(index.ntotal)
        self.euclidean = bool(index.metric_type == faiss.METRIC_L2)

    def check(self) -> None:
        """Raises StoreError if this index, as it stands, cannot be upgraded."""
        metric = self.index.metric_type
        if metric not in (faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2):
            raise StoreError(
                f"{name_of(self.index)} has metric {metric}, neither inner product nor "
                "L2; an offset cannot become one more dimension of it"
            )
        if not self.index.is_trained:
            raise StoreError(
                f"{name_of(self.index)} is not trained; train it and add vectors, then "
                "upgrade it"
            )
        if not self.count:
            raise StoreError(
                f"{name_of(self.index)} is empty; add vectors, then upgrade it"
            )

    def upgrade(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        """Return a new index of the same d with `offsets` [n] in it, made for `spec`."""
        raise NotImplementedError

    def downgrade(self) -> faiss.Index:
        """Return a new index without offsets, as it was before `upgrade`."""
        raise NotImplementedError

    def take(self, rows: np.ndarray) -> Taken:
        """Return the entries of the ascending numbers `rows` [b]."""
        return self.inner.take(rows)

    def row_blocks(self, size: int) -> Iterator[np.ndarray]:
        """Yield the numbers of all entries, in blocks of at most `size`."""
        for first in range(0, self.count, size):
            yield np.arange(first, min(first + size, self.count))

    def scan(self, size: int | None = None) -> Iterator[Batch]:
        """Yield all entries, in blocks of at most `size`, by default of about
        `BLOCK_BYTES`. Their offsets are NaN if the index is not upgraded; `place` is the
        number of the first."""
        labels = self.labels()
        for rows in self.row_blocks(size or block_rows(self.index.d)):
            vectors, offsets = self.take(rows)
            if offsets is None:
                offsets = np.full(len(rows), np.nan, np.float32)
            ids = labels[rows].tolist()
            yield Batch(ids, vectors, offsets, place=int(rows[0]))

    def sample(self, count: int = SAMPLED) -> np.ndarray:
        """Return the numbers of some entries, evenly drawn."""
        return evenly(np.arange(self.count), count)

    def plan_append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> Callable[[], None]:
        """Plan an addition of entries. Until the result is called nothing is changed.

        Args:
            vectors: [n, d].
            offsets: [n].
            ids: [n], or None where the index numbers its entries itself.

        Returns:
            Adds the entries when it is called.

        Raises:
            StoreError: The entries cannot be added.
        """
        raise NotImplementedError

    def require_removes(self, *, renumbered: bool = False) -> None:
        """Raises StoreError if `remove` could not remove entries. Nothing is changed."""
        self.inner.require_removes(renumbered=renumbered)

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        """Remove the entries that a search calls `ids`, after `require_removes`. If they
        are `renumbered`, the ids of inverted lists close up to 0, 1, 2, ..., as those of
        codes in a row do of themselves."""
        self.inner.remove(ids, renumbered=renumbered)
        self.index.ntotal = self.index.index.ntotal

    def quantise(self, vectors: np.ndarray) -> np.ndarray:
        """Return `vectors` [n, d] as this index reconstructs them once they are added by
        `plan_append`: float32 [n, d]."""
        return self.inner.quantise(vectors)

    _zero: np.ndarray | None = None

    def with_zeros(self, vectors: np.ndarray) -> np.ndarray:
        """Return `vectors` [b, d] as the index reconstructs them, but zero where it holds
        what codes make of a zero vector. They may give it any direction, which it does
        not have."""
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
        self, offsets: np.ndarray, vectors: np.ndarray, rows: np.ndarray | None = None
    ) -> np.ndarray:
        """Return what codes of an upgraded index make of offsets: [n].

        Args:
            offsets: [n].
            vectors: [n, d].
            rows: The numbers of these entries [n], where they are entries already.
        """
        return self.inner.round_offsets(offsets, vectors, rows)

    def most_lost(self) -> float:
        """Return the most that codes may lose of an offset that fits them: a tenth of the
        range of those that they hold, as `Coder.require_holds` has it."""
        offsets = self.take(self.sample())[1]
        assert offsets is not None
        finite = offsets[np.isfinite(offsets)]
        return max(float(np.ptp(finite)) / 10, 1e-6) if finite.size else 1e-6

    def holds_offsets_of(self, fingerprint: str) -> bool:
        """Return True if it is upgraded, with offsets of the model of this `fingerprint`,
        or where that is "" of no model."""
        return bool(self.extras) and all(
            extra.has_fingerprint(fingerprint) for extra in self.extras
        )


def handler_for(index: faiss.Index) -> IndexHandler:
    """Return the handler for `index`, or for what lies behind its query map, since
    targets are not mapped. Raises StoreError, which names its type, if there is none."""
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
