"""What a handler of an index type is, and those of indexes that hold codes themselves: Flat, SQ and PQ. Helpers for the
objects of Faiss: their names, errors, fields and owners."""

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
from hubplugin_faiss.encoding.codecs import Coder, ExtraDimensions, UpgradeSpec, codec_of
from hubplugin_faiss.encoding.layout import codes_of, fill

BLOCK_BYTES = 8 << 20
"""Codes and vectors are handled in blocks of about this size, whatever the size of the index."""


def name_of(index: faiss.Index) -> str:
    return type(faiss.downcast_index(index)).__name__


def reason(error: RuntimeError | MemoryError) -> str:
    """The message of an error of Faiss, without the signature of the function that raised it, and without the first
    bytes of a file that is no index: it may be any file."""
    text = " ".join(re.sub(r"^Error in .+? at \S+:\d+: (Error: )?", "", str(error), flags=re.DOTALL).split())
    return re.sub(r"Index type 0x\w+ \(.*\) not recognized", "it is no index, or of a type unknown to this Faiss", text)


def block_rows(d: int) -> int:
    """How many vectors of d components make a block."""
    return max(1, BLOCK_BYTES // (4 * int(d)))


def pretransform(chain: Sequence[faiss.VectorTransform], index: faiss.Index) -> faiss.Index:
    """An IndexPreTransform of the transforms `chain` and `index`, which takes all of them over."""
    new = faiss.IndexPreTransform(index)
    new.own_fields = handed_over(index)
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
    return faiss.downcast_index(faiss.downcast_index(index).index) if is_mapped(index) else index


def with_map(index: faiss.Index, query_map: QueryMap | None) -> faiss.Index:
    """`index` behind a linear transform that maps queries, and that must not map what is added; `index` itself without
    a map."""
    if query_map is None:
        return index
    d = int(index.d)
    transform = faiss.LinearTransform(d, d, True)
    faiss.copy_array_to_vector(query_map.whole.ravel(), transform.A)
    faiss.copy_array_to_vector(np.full(d, -0.0, np.float32), transform.b)
    transform.is_trained = True
    return pretransform([transform], index)


def handed_over(part: faiss.Index) -> bool:
    """Releases `part` to the C++ object that takes it over, and returns True for the field own_fields of that."""
    part.this.disown()
    return True


def copy_fields(new: faiss.Index, old: faiss.Index, *fields: str) -> None:
    """Copies from `old` to `new` the fields that every index has, and `fields`."""
    for field in ("ntotal", "verbose", "is_trained", "metric_type", "metric_arg", *fields):
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
    """The mean similarity of `queries` [m, d] and the direction of their tenth nearest target, by `vectors` [n, d] of
    `count` targets. Of two targets in one direction the longer one scores higher by its length times that. Embedding
    models differ in it: it was 0.25 between captions and images, and 0.85 across languages."""
    rank = min(max(round(RANK * len(vectors) / count), 1), len(vectors))
    lengths = np.maximum(np.linalg.norm(vectors, axis=1), 1e-30)
    return float(np.partition(queries @ (vectors / lengths[:, None]).T, -rank, axis=1)[:, -rank].mean())


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

    def __init_subclass__(cls) -> None:
        for name in cls.__dict__.get("names", ()):  # its own: a subclass without names takes over no type
            IndexHandler.registry[name] = cls

    def __init__(self, index: faiss.Index):
        self.index = index

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

    def downgraded(self) -> faiss.Index:
        """A new index without offsets, as it was before `upgraded`."""
        raise self._not_upgraded

    @abstractmethod
    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Vectors [b, d] from entry `start` on, b <= size, and their offsets [b] if the index is upgraded."""

    def sample(self) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """`scan` of some entries, in runs that begin evenly."""
        most = min(SAMPLED, block_rows(self.index.d))
        runs = 1 if self.count <= most else RUNS
        for start in range(0, self.count, max(-(-self.count // runs), 1)):
            yield next(self.scan(start, max(most // runs, 1)))

    def require_takes(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None) -> None:
        """Raises StoreError if `append` could not add `vectors` [n, d] with `offsets` [n]. Nothing is changed."""
        raise self._not_upgraded

    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None) -> None:
        """Adds `vectors` [n, d] with `offsets` [n], after `require_takes`."""
        raise self._not_upgraded

    @property
    def _not_upgraded(self) -> StoreError:
        return StoreError(f"{name_of(self.index)} is not upgraded")

    def require_removes(self, *, renumbered: bool = False) -> None:  # noqa: B027
        """Raises StoreError if `remove` could not remove entries. Nothing is changed."""

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        """Removes the entries that a search calls `ids` from an upgraded index, after `require_removes`.

        renumbered: the ids of inverted lists close up to 0, 1, 2, ..., as those of codes in a row do of themselves.
        """
        self.index.remove_ids(faiss.IDSelectorBatch(ids))

    @abstractmethod
    def coded(self, vectors: np.ndarray) -> np.ndarray:
        """`vectors` [n, d] as this index reconstructs them once they are added: float32 [n, d]."""

    @cached_property
    def coded_zeros(self) -> np.ndarray:
        """What this index may hold of a zero vector: float32 [k, d]."""
        return self.coded(np.zeros((1, int(self.index.d)), np.float32))

    def with_zeros(self, vectors: np.ndarray) -> np.ndarray:
        """`vectors` [b, d] as the index reconstructs them, but zero where it holds what codes make of a zero vector.
        They may give it any direction, which it does not have."""
        is_zero = np.any([np.abs(vectors - each).max(axis=1) <= 1e-6 for each in self.coded_zeros], axis=0)
        return np.where(is_zero[:, None], np.float32(0), vectors)

    @abstractmethod
    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The ids that a search returns for the entries [start, stop), all by default: int64 [stop - start]."""

    def order(self) -> np.ndarray | slice:
        """The row of each entry in an array that is ordered by id: int64 [n], or slice(None) if entries are in order.

        Raises InputError if the ids are not 0 ... n - 1.
        """
        labels = self.labels()
        if not np.array_equal(np.sort(labels), np.arange(len(labels))):
            raise InputError(f"the ids of this {name_of(self.index)} are not 0 ... {len(labels) - 1}: pass a model")
        return labels

    @abstractmethod
    def extra_dimensions(self) -> list[ExtraDimensions]:
        """The extra dimensions of all upgraded base indexes in this index."""

    def rounded(self, offsets: np.ndarray, vectors: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """What codes of an upgraded index make of `offsets` [n] of `vectors` [n, d]: [n]. rows: of these, where they
        are entries already."""
        return offsets

    def most_lost(self) -> float:
        """The most that codes may lose of an offset that fits them: a tenth of the range of those that they hold, as
        `Coder.require_holds` has it."""
        held = [offsets for _, offsets in self.sample() if offsets is not None]
        return max(float(np.ptp(finite(np.concatenate(held)))) / 10, 1e-6) if held else 1e-6

    def is_upgraded(self) -> bool:
        return bool(self.extra_dimensions())

    def holds_offsets_of(self, fingerprint: str) -> bool:
        """Whether it is upgraded, with offsets of the model of this `fingerprint`, or where that is "" of no model."""
        extra = self.extra_dimensions()
        return bool(extra) and all(each.has_fingerprint(fingerprint) for each in extra)


def finite(values: np.ndarray) -> np.ndarray:
    """Those of `values` [n] that are finite, or 0 alone where none is."""
    return values[np.isfinite(values)] if np.isfinite(values).any() else np.zeros(1)


def handler_for(index: faiss.Index) -> IndexHandler:
    """The handler for `index`, or for what lies behind its query map, since targets are not mapped; raises StoreError,
    which names its type, if there is none."""
    if isinstance(index, faiss.IndexBinary):
        raise StoreError(f"{type(index).__name__} holds bits, and an offset is a real number: it cannot be upgraded")
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
        raise StoreError(f"{name} cannot carry offsets; {instead}; types that can: {can}")
    if getattr(index, "bbs", BLOCK) != BLOCK:
        raise StoreError(
            f"{name} scans blocks of {index.bbs} codes and cannot carry offsets: blocks of {BLOCK}, the default, can; "
            f"{instead}"
        )
    handler = IndexHandler.registry[name](index)
    handler.owner = owner
    return handler


class BaseIndexHandler(IndexHandler):
    """An index that holds codes. Upgraded, it has w more components, which transforms before it append."""

    def __init__(self, index: faiss.Index):
        super().__init__(index)
        self.codec = codec_of(index)  # which refuses codes without room

    @property
    def lossy(self) -> bool:
        return self.codec.lossy

    def upgraded(
        self, offsets: np.ndarray, spec: UpgradeSpec, chain: Sequence[faiss.VectorTransform] = ()
    ) -> faiss.Index:
        """chain: transforms before those that append the extra dimensions."""
        extra, base_index = self.widened(offsets, spec)
        d = int(self.index.d)
        remap = faiss.RemapDimensionsTransform(d, d + extra.width, False)
        centring = faiss.CenteringTransform(d + extra.width)
        faiss.copy_array_to_vector(np.concatenate([np.zeros(d, np.float32), -extra.query]), centring.mean)
        centring.is_trained = True
        return pretransform([*chain, remap, centring], base_index)

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        return ((vectors, None) for vectors in self.decoded(start, size))

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.arange(start, self.count if stop is None else stop)

    def order(self) -> np.ndarray | slice:
        return slice(None)

    def extra_dimensions(self) -> list[ExtraDimensions]:
        return []

    @abstractmethod
    def widened(self, offsets: np.ndarray, spec: UpgradeSpec) -> tuple[ExtraDimensions, faiss.Index]:
        """Extra dimensions that suit this index, and a new one of d + w components that holds `offsets` [n] in them."""

    @abstractmethod
    def narrowed(self, d: int, extra: ExtraDimensions) -> faiss.Index:
        """A new index of d components without the `extra` ones that this one has."""

    def coder(self, extra: ExtraDimensions) -> Coder:
        """The coder that wrote the extra dimensions `extra` into this index."""
        return self.codec.coder(self.index.d - extra.width, extra)

    def bases(self, extra: ExtraDimensions, vectors: np.ndarray, rows: np.ndarray | None) -> np.ndarray | None:
        """Extra components [n, w] of the centroids of the lists of `vectors`, as in `rounded`, where codes hold
        differences from centroids, else None."""
        return None

    @abstractmethod
    def decoded(self, start: int, size: int) -> Iterator[np.ndarray]:
        """All components of the entries from `start` on, b <= size: float32 [b, d], or [b, d + w] if it is upgraded."""

    def coded_extended(self, extra: ExtraDimensions, vectors: np.ndarray) -> np.ndarray:
        """What the codes of this index, which has extra dimensions, make of `vectors` [n, d]: float32 [n, d]."""
        return self.coded(with_query(vectors, extra.query))[:, : vectors.shape[1]]

    def require_takes_extended(self, vectors: np.ndarray, ids: np.ndarray | None) -> None:
        """Raises StoreError if `append_extended` could not add `vectors` [n, d], whatever their offsets."""
        if ids is not None:
            raise StoreError(f"{name_of(self.index)} numbers its entries itself; add without ids")
        self.codec.require_fits(vectors)

    @abstractmethod
    def append_extended(
        self, extra: ExtraDimensions, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> None:
        """Adds `vectors` [n, d] with `offsets` [n] to this index of d + w components."""


def base_index_handler(index: faiss.Index) -> BaseIndexHandler:
    """The handler for `index`; raises StoreError if it is no base index."""
    handler = handler_for(index)
    if not isinstance(handler, BaseIndexHandler):
        raise StoreError(f"{name_of(index)} cannot carry offsets where it stands")
    return handler


def with_query(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """`vectors` [n, d] with the extra components `query` [w] behind each: float32 [n, d + w]."""
    components = np.broadcast_to(query, (len(vectors), len(query)))
    return np.ascontiguousarray(np.concatenate([vectors, components], axis=1), np.float32)


CODEBOOK = 65_536
"""A codebook for offsets is trained on at most about this many."""


def sample_rows(offsets: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Rows of `offsets` [n] to train a codebook on: evenly spread, with the extremes and all `starts`."""
    spread = np.linspace(0, len(offsets) - 1, min(len(offsets), CODEBOOK)).astype(np.int64)
    return np.unique(np.concatenate([spread, starts, [offsets.argmin(), offsets.argmax()]]))


class FlatCodesHandler(BaseIndexHandler):
    """Codes in a row, one an entry."""

    names: ClassVar[tuple[str, ...]] = ("IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexScalarQuantizer", "IndexPQ")
    exhaustive = True

    def widened(self, offsets: np.ndarray, spec: UpgradeSpec) -> tuple[ExtraDimensions, faiss.Index]:
        sample = offsets[sample_rows(offsets, np.empty(0, np.int64))]
        coder = self.codec.design(spec, sample, None)
        coder.require_holds(sample, None, name_of(self.index))
        return coder.extra, self.widened_by(coder, lambda rows: coder.components_for(offsets[rows]))

    def widened_by(self, coder: Coder, components: Callable[[slice], np.ndarray]) -> faiss.Index:
        """A new index with extra components in its codes; `components` gives those of some rows: [b, w]."""
        new = self._empty(self.index.d + coder.extra.width)
        self.codec.widen(new, coder)
        fill(new, (coder.join(codes, components(rows)) for codes, rows in self._blocks(block_rows(new.d))))
        return new

    def narrowed(self, d: int, extra: ExtraDimensions) -> faiss.Index:
        coder, new = self.codec.coder(d, extra), self._empty(d)
        self.codec.narrow(new, d)
        fill(new, (coder.head(codes) for codes, _ in self._blocks(block_rows(new.d))))
        return new

    def decoded(self, start: int, size: int) -> Iterator[np.ndarray]:
        for first in range(start, self.count, size):
            yield np.asarray(self.index.sa_decode(self._codes(first, min(first + size, self.count))))

    def coded(self, vectors: np.ndarray) -> np.ndarray:
        return np.asarray(self.index.sa_decode(self.index.sa_encode(np.ascontiguousarray(vectors))))

    def append_extended(
        self, extra: ExtraDimensions, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> None:
        self._add(np.concatenate([vectors, self.coder(extra).components_for(offsets)], axis=1))

    def _add(self, extended: np.ndarray) -> None:
        self.index.add(extended)

    def _empty(self, d: int) -> faiss.Index:
        """An index like this one, of d components and without codes."""
        old, metric = self.index, self.index.metric_type
        if isinstance(old, faiss.IndexScalarQuantizer):
            new = faiss.IndexScalarQuantizer(d, old.sq.qtype, metric)
            new.sq.rangestat, new.sq.rangestat_arg = old.sq.rangestat, old.sq.rangestat_arg
        elif isinstance(old, faiss.IndexPQ):
            new = faiss.IndexPQ(d, d // old.pq.dsub, old.pq.nbits, metric)
            copy_fields(new, old, "do_polysemous_training", "search_type", "encode_signs", "polysemous_ht")
            if old.search_type in (faiss.IndexPQ.ST_polysemous, faiss.IndexPQ.ST_polysemous_generalize):
                # The extra bits say nothing about the nearness of vectors: let through what they may add.
                new.polysemous_ht += (d // old.pq.dsub - old.pq.M) * old.pq.nbits
        else:
            new = (faiss.IndexFlatL2 if self.euclidean else faiss.IndexFlatIP)(d)
        copy_fields(new, old)
        return new

    def _blocks(self, size: int) -> Iterator[tuple[np.ndarray, slice]]:
        """Codes [b, code_size] and rows of all entries, b <= size."""
        for start in range(0, self.count, size):
            rows = slice(start, min(start + size, self.count))
            yield self._codes(rows.start, rows.stop), rows

    def _codes(self, start: int, stop: int) -> np.ndarray:
        """The codes of the entries [start, stop): uint8 [stop - start, code_size]."""
        return codes_of(self.index)[start:stop]
