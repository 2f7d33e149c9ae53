"""What a handler of an index type is; and helpers for the objects of Faiss: their names, errors, fields and owners."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import ClassVar

import faiss
import numpy as np

from hubplugin.errors import InputError, StoreError
from hubplugin.model import QueryMap
from hubplugin_faiss.encoding.codecs import ExtraDimensions, UpgradeSpec

BLOCK_BYTES = 8 << 20
"""Codes and vectors are handled in blocks of about this size, whatever the size of the index."""


def name_of(index: faiss.Index) -> str:
    return type(faiss.downcast_index(index)).__name__


def reason(error: RuntimeError | MemoryError) -> str:
    """The message of an error of Faiss, without the signature of the function that raised it, and without the first
    bytes of a file that is no index: it may be any file."""
    text = " ".join(
        re.sub(
            r"^Error in .+? at \S+:\d+: (Error: )?", "", str(error), flags=re.DOTALL
        ).split()
    )
    return re.sub(
        r"Index type 0x\w+ \(.*\) not recognized",
        "it is no index, or of a type unknown to this Faiss",
        text,
    )


def block_rows(d: int) -> int:
    """How many vectors of d components make a block."""
    return max(1, BLOCK_BYTES // (4 * int(d)))


def pretransform(
    chain: Sequence[faiss.VectorTransform], index: faiss.Index, *, one: bool = False
) -> faiss.Index:
    """An IndexPreTransform that takes over what it is made of.

    Args:
        chain: the transforms.
        index: the index behind them.
        one: `index` is an IndexPreTransform itself, whose chain becomes longer.
    """
    new = index if one else faiss.IndexPreTransform(index)
    new.own_fields = True if one else hand_over(index)
    for transform in reversed(chain):
        new.prepend_transform(transform)
        transform.this.disown()
    new.ntotal, new.is_trained = index.ntotal, True
    return new


def is_mapped(index: faiss.Index) -> bool:
    """Whether a query map stands before an index. Its mark, which a file keeps and no training leaves, is a linear
    transform alone, with the bias -0 throughout."""
    part = faiss.downcast_index(index)
    if not isinstance(part, faiss.IndexPreTransform) or part.chain.size() != 1:
        return False
    link = faiss.downcast_VectorTransform(part.chain.at(0))
    if type(link) is not faiss.LinearTransform or not link.have_bias:
        return False
    bias = faiss.vector_to_array(link.b)
    return bool(not bias.any() and np.signbit(bias).all())


def behind_map(index: faiss.Index) -> faiss.Index:
    """What lies behind the query map of `index`, which owns it; `index` itself where there is none."""
    return (
        faiss.downcast_index(faiss.downcast_index(index).index)
        if is_mapped(index)
        else index
    )


def with_map(index: faiss.Index, query_map: QueryMap | None) -> faiss.Index:
    """`index` behind a linear transform that maps queries by `query_map`, and that must not map what is added; `index`
    itself without a map."""
    if query_map is None:
        return index
    d = int(index.d)
    transform = faiss.LinearTransform(d, d, True)
    faiss.copy_array_to_vector(query_map.whole.ravel(), transform.A)
    faiss.copy_array_to_vector(np.full(d, -0.0, np.float32), transform.b)
    transform.is_trained = True
    return pretransform([transform], index)


def hand_over(part: faiss.Index) -> bool:
    """Releases `part` to the C++ object that takes it over, and returns True for the field own_fields of that."""
    part.this.disown()
    return True


def copy_fields(new: faiss.Index, old: faiss.Index, *fields: str) -> None:
    """Copies from `old` to `new` the fields that every index has, and `fields`."""
    for field in (
        "ntotal",
        "verbose",
        "is_trained",
        "metric_type",
        "metric_arg",
        *fields,
    ):
        setattr(new, field, getattr(old, field))


BLOCK = 32
"""How many codes a block of an index holds that is scanned fast, by default."""

ASSEMBLED = {
    "IndexShards": "merge its shards into one index (first.merge_from(second)) and upgrade that, or leave it as it is "
    "and search with hubplugin_faiss.CorrectedSearch(index, offsets)",
    "IndexReplicas": "upgrade one replica, index.at(0), and build the others from what upgrade returns",
}
"""What to do with types that put other indexes together, all of which would need the same extra dimensions."""

METRICS = faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2

SAMPLED, RUNS = 4096, 16
"""How many entries of an index stand for all of them, in runs that begin evenly over it."""


RANK = 10
"""The rank of the target by whose similarity `nearness_of` goes."""


def nearness_of(queries: np.ndarray, vectors: np.ndarray, count: int) -> float:
    """The mean similarity of queries and the direction of their tenth nearest target.

    Of two targets in one direction the longer one scores higher by its length times that. Embedding models differ in
    it: it was 0.25 between captions and images, and 0.85 across languages.

    Args:
        queries: [m, d].
        vectors: a sample of the targets [n, d].
        count: how many targets there are.
    """
    rank = min(max(round(RANK * len(vectors) / count), 1), len(vectors))
    lengths = np.maximum(np.linalg.norm(vectors, axis=1), 1e-30)
    return float(
        np.partition(queries @ (vectors / lengths[:, None]).T, -rank, axis=1)[
            :, -rank
        ].mean()
    )


class IndexHandler(ABC):
    """Reads, upgrades and downgrades one index, which only `append` and `remove` change.

    A subclass names the Faiss types that it handles in `names`. Entries are numbered in scan order: row by row, or
    list by list.
    """

    names: ClassVar[tuple[str, ...]] = ()
    registry: ClassVar[dict[str, type[IndexHandler]]] = {}

    owner: object = None
    """The Python object that owns the index, kept alive: the one that `downcast_index` makes does not own it."""

    exhaustive = False
    """Whether a search compares the query with every entry."""

    lossy = False
    """Whether codes may change the length of a vector."""

    def __init_subclass__(cls) -> None:
        for name in cls.__dict__.get(
            "names", ()
        ):  # its own: a subclass without names takes over no type
            IndexHandler.registry[name] = cls

    def __init__(self, index: faiss.Index):
        self.index, self.euclidean = index, bool(index.metric_type == faiss.METRIC_L2)

    @property
    def count(self) -> int:
        return int(self.index.ntotal)

    def check(self) -> None:
        """Raises StoreError if this index, as it stands, cannot be upgraded."""
        if self.index.metric_type not in METRICS:
            raise StoreError(
                f"{name_of(self.index)} has metric {self.index.metric_type}, neither inner product nor L2; an offset "
                "cannot become one more dimension of it"
            )
        if not self.index.is_trained:
            raise StoreError(
                f"{name_of(self.index)} is not trained; train it and add vectors, then upgrade it"
            )

    @abstractmethod
    def upgrade(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        """A new index of the same d with `offsets` [n] in it, made for `spec`."""

    def downgrade(self) -> faiss.Index:
        """A new index without offsets, as it was before `upgrade`."""
        raise self._not_upgraded

    @abstractmethod
    def scan(
        self, start: int, size: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Vectors [b, d] from entry `start` on, of which a block has at most `size`, and their offsets [b] if the index
        is upgraded."""

    def sample(self) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """`scan` of some entries, in runs that begin evenly."""
        most = min(SAMPLED, block_rows(self.index.d))
        runs = 1 if self.count <= most else RUNS
        for start in range(0, self.count, max(-(-self.count // runs), 1)):
            yield next(self.scan(start, max(most // runs, 1)))

    def plan_append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> Callable[[], None]:
        """Plans an addition of entries. Until the result is called nothing is changed.

        Args:
            vectors: [n, d].
            offsets: [n].
            ids: [n], or None where the index numbers its entries itself.

        Returns:
            Adds the entries when it is called.

        Raises:
            StoreError: the entries cannot be added.
        """
        raise self._not_upgraded

    @property
    def _not_upgraded(self) -> StoreError:
        return StoreError(f"{name_of(self.index)} is not upgraded")

    def require_removes(self, *, renumbered: bool = False) -> None:  # noqa: B027
        """Raises StoreError if `remove` could not remove entries. Nothing is changed."""

    @abstractmethod
    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        """Removes the entries that a search calls `ids` from an upgraded index, after `require_removes`. If they are
        `renumbered`, the ids of inverted lists close up to 0, 1, 2, ..., as those of codes in a row do of themselves.
        """

    @abstractmethod
    def quantise(
        self, vectors: np.ndarray, *, by_plain_faiss: bool = False
    ) -> np.ndarray:
        """`vectors` [n, d] as this index reconstructs them once they are added: float32 [n, d]. If they are added
        `by_plain_faiss`, and not by `plan_append`, they may be in another list."""

    @cached_property
    def _zeros(self) -> np.ndarray:
        """What this index may hold of a zero vector: float32 [2, d]."""
        zero = np.zeros((1, int(self.index.d)), np.float32)
        return np.concatenate(
            [self.quantise(zero), self.quantise(zero, by_plain_faiss=True)]
        )

    def with_zeros(self, vectors: np.ndarray) -> np.ndarray:
        """`vectors` [b, d] as the index reconstructs them, but zero where it holds what codes make of a zero vector.
        They may give it any direction, which it does not have."""
        is_zero = np.any(
            [np.abs(vectors - zero).max(axis=1) <= 1e-6 for zero in self._zeros], axis=0
        )
        return np.where(is_zero[:, None], np.float32(0), vectors)

    @abstractmethod
    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The ids that a search returns for the entries from `start` to before `stop`, by default to the last: int64
        [stop - start]."""

    def order(self) -> np.ndarray | slice:
        """The row of each entry in an array that is ordered by id: int64 [n], or slice(None) if entries are in order.

        Raises InputError if the ids are not 0 ... n - 1.
        """
        labels = self.labels()
        if not np.array_equal(np.sort(labels), np.arange(len(labels))):
            raise InputError(
                f"the ids of this {name_of(self.index)} are not 0 ... {len(labels) - 1}: pass a model"
            )
        return labels

    @abstractmethod
    def extra_dimensions(self) -> list[ExtraDimensions]:
        """The extra dimensions of all upgraded base indexes in this index."""

    def round_offsets(
        self, offsets: np.ndarray, vectors: np.ndarray, rows: np.ndarray | None = None
    ) -> np.ndarray:
        """What codes of an upgraded index make of offsets.

        Args:
            offsets: [n].
            vectors: [n, d].
            rows: of these [n], where they are entries already.

        Returns:
            [n].
        """
        return offsets

    def most_lost(self) -> float:
        """The most that codes may lose of an offset that fits them: a tenth of the range of those that they hold, as
        `Coder.require_holds` has it."""
        blocks = [offsets for _, offsets in self.sample() if offsets is not None]
        offsets = np.concatenate([np.empty(0, np.float32), *blocks])
        finite = offsets[np.isfinite(offsets)]
        return max(float(np.ptp(finite)) / 10, 1e-6) if finite.size else 1e-6

    def is_upgraded(self) -> bool:
        return bool(self.extra_dimensions())

    def holds_offsets_of(self, fingerprint: str) -> bool:
        """Whether it is upgraded, with offsets of the model of this `fingerprint`, or where that is "" of no model."""
        extra = self.extra_dimensions()
        return bool(extra) and all(
            dimensions.has_fingerprint(fingerprint) for dimensions in extra
        )


def handler_for(index: faiss.Index) -> IndexHandler:
    """The handler for `index`, or for what lies behind its query map, since targets are not mapped; raises StoreError,
    which names its type, if there is none."""
    if isinstance(index, faiss.IndexBinary):
        raise StoreError(
            f"{type(index).__name__} holds bits, and an offset is a real number: it cannot be upgraded"
        )
    if not isinstance(index, faiss.Index):
        raise StoreError(f"expected a faiss index, got {type(index).__name__}")
    owner, index = index, faiss.downcast_index(behind_map(index))
    name = type(index).__name__
    if isinstance(index, getattr(faiss, "GpuIndex", ())):
        raise StoreError(
            f"{name} is on a GPU, where it cannot be upgraded; index = faiss.index_gpu_to_cpu(index) takes it to "
            "the CPU"
        )
    if name in ASSEMBLED:
        raise StoreError(f"{name} cannot carry offsets; {ASSEMBLED[name]}")
    instead = "leave it as it is and search with hubplugin_faiss.CorrectedSearch(index, model, vectors=vectors)"
    if name not in IndexHandler.registry:
        can = ", ".join(sorted(IndexHandler.registry))
        raise StoreError(
            f"{name} cannot carry offsets; {instead}; types that can: {can}"
        )
    if getattr(index, "bbs", BLOCK) != BLOCK:
        raise StoreError(
            f"{name} scans blocks of {index.bbs} codes and cannot carry offsets: blocks of {BLOCK}, the default, can; "
            f"{instead}"
        )
    handler = IndexHandler.registry[name](index)
    handler.owner = owner
    return handler
