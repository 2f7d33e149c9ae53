"""What a handler of an index type is, and those of indexes that hold codes themselves: Flat, SQ and PQ. Helpers for the
objects of Faiss: their names, errors, fields and owners."""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import ClassVar

import faiss
import numpy as np

from hubplugin.errors import InputError, StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, QueryMap
from hubplugin_faiss.encoding.codecs import ASKED, Coder, ExtraDimensions, UpgradeSpec, codec_of, evenly
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


def pretransform(chain: list[faiss.VectorTransform], index: faiss.Index) -> faiss.Index:
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


def some_entries(handler: IndexHandler, runs: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A block of vectors [b, d] in an index, in runs that begin evenly over it, but for those that are not finite, with
    their offsets [b], NaN where it is not upgraded, and their rows [b]."""
    count, size = handler.count, block_rows(handler.index.d)
    runs = 1 if count <= size else runs
    found, held, rows = [np.empty((0, int(handler.index.d)), np.float32)], [np.empty(0, np.float32)], [np.arange(0)]
    for start in range(0, count, -(-count // runs) if count else 1):
        for vectors, offsets in itertools.islice(handler.scan(start, max(size // runs, 1)), 1):
            found.append(vectors)
            held.append(np.full(len(vectors), np.nan, np.float32) if offsets is None else offsets)
            rows.append(np.arange(start, start + len(vectors)))
    vectors = np.concatenate(found)
    finite = np.isfinite(vectors).all(axis=1)
    return vectors[finite], np.concatenate(held)[finite], np.concatenate(rows)[finite]


def most_lost(handler: IndexHandler, offsets: np.ndarray) -> float:
    """The most that codes may lose of an offset that fits them: a tenth of the range of those that they hold, as
    `Coder.require_holds` has it; of `offsets` [n] where they hold none."""
    held = some_entries(handler, RUNS)[1]
    return max(float(np.ptp(held if len(held) else offsets)) / 10, 1e-6)


CENTRE = 0.02
"""The mean norm bias is left in, so that offsets stay centred: as a multiple of it, which a few entries more keep."""


READ_OFF = 500
"""How many entries of an index say which scale its offsets have."""


class IndexScale:
    """Offsets of a model on the scale of an index's own similarities, whose codes change the lengths of vectors.

    A target of length L scores L (q.t), and q.t under L2 less L^2 / 2. With the offset L o and without the norm bias it
    scores L (q.t + o), less the same for all: as by cosine where two targets are as near as `nearness`.

    nearness: how similar a query is to the targets between which a ranking decides, see `nearness_of`; None where the
    model does not take all vectors for unit vectors. mean: of the norm bias; by default that of some entries.
    """

    def __init__(self, handler: IndexHandler, nearness: float | None, mean: float | None = None):
        self._handler, self.nearness = handler, nearness
        if mean is None:
            bias = handler.lengths_and_bias(some_entries(handler)[0], nearness)[1]
            mean = float(np.mean(bias)) if np.size(bias) else 0.0
        self._mean = CENTRE * round(mean / CENTRE)

    @classmethod
    def of(cls, handler: IndexHandler, model: OffsetModel) -> IndexScale:
        """The scale on which an index holds offsets of `model`. One that holds none gets a scale for them, by its
        entries; one that does keeps its own, whatever is added, or all that it holds would be wrong at once. It is read
        off some entries, as the scale by which most of them hold what codes make of what the model gives."""
        nearness = nearness_of(handler, model)
        if not handler.holds_offsets_of(model):
            return cls(handler, nearness)
        vectors, stored, rows = some_entries(handler, RUNS)
        some = evenly(np.flatnonzero(handler.with_zeros(vectors).any(axis=1)), READ_OFF)
        vectors, stored, rows = vectors[some], stored[some], rows[some]
        if not len(vectors) or not np.ndim(handler.lengths_and_bias(vectors, nearness)[1]):
            return cls(handler, nearness)
        offsets, agreeing = model.offsets(vectors), []
        for tried in [nearness] if nearness is None else [nearness, *(STEP * np.arange(-20, 21))]:
            lengths, bias = handler.lengths_and_bias(vectors, tried)
            wanted = lengths * offsets - bias
            mean = CENTRE * round(float(np.median(stored - wanted)) / CENTRE)
            apart = np.abs(handler.rounded((wanted + mean).astype(np.float32), rows) - stored)
            agreeing.append((int((apart <= 1e-5 + 1e-6 * np.abs(stored)).sum()), tried, mean))
        return cls(handler, *max(agreeing, key=lambda each: each[0])[1:])  # of several as good the first

    def stored(self, offsets: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """What the index holds for `offsets` [b] of `vectors` [b, d], as it reconstructs them: float64 [b]."""
        lengths, bias = self._lengths_and_bias(vectors)
        return np.asarray(lengths * offsets - bias)

    def of_model(self, stored: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """The offsets of the model for which it holds `stored` [b]: float64 [b]."""
        lengths, bias = self._lengths_and_bias(vectors)
        return np.asarray((stored + bias) / lengths)

    def unbiased(self, offsets: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """`stored` for offsets that are on the scale of the index already: float64 [b]."""
        return np.asarray(offsets - self._lengths_and_bias(vectors)[1])

    def _lengths_and_bias(self, vectors: np.ndarray) -> tuple[np.ndarray | float, np.ndarray | float]:
        """Lengths, and the norm bias less its mean. A zero vector has no length that codes could have changed."""
        lengths, bias = self._handler.lengths_and_bias(vectors, self.nearness)
        bias = bias - self._mean
        if self.nearness is None or not np.ndim(bias):
            return lengths, bias
        directed = self._handler.with_zeros(vectors).any(axis=1)
        return np.where(directed, lengths, 1.0), np.where(directed, bias, 0.0)


BLOCK = 32
"""How many codes a block of an index holds that is scanned fast, by default."""

ASSEMBLED = {
    "IndexShards": "merge its shards into one index (first.merge_from(second)) and upgrade that, or leave it as it is "
    "and search with hubplugin_faiss.CorrectedSearch(index, offsets)",
    "IndexReplicas": "upgrade one replica, index.at(0), and build the others from what upgrade returns",
}
"""What to do with types that put other indexes together, all of which would need the same extra dimensions."""


RANK, RUNS = 10, 16
"""The rank of the target by whose similarity `nearness_of` goes, and the runs of entries looked at."""

STEP = 0.05
"""`nearness_of` is a multiple of it, so that a few entries more or less change no offset. Code vectors, whose own is
0.35 to 0.45, are served by any value from 0.2 to 0.5."""


def nearness_of(handler: IndexHandler, model: OffsetModel) -> float | None:
    """About the mean similarity of a query of the bank of `model` and its tenth nearest target, by some of the entries;
    None if the model does not take all vectors for unit vectors.

    Of two targets in one direction the longer one scores higher by its length times that. Embedding models differ in
    it: it was 0.25 between captions and images, and 0.85 across languages.
    """
    if model.metric is not Metric.COSINE:
        return None
    vectors = some_entries(handler, RUNS)[0] if handler.lossy_inside else np.empty(0)
    if not len(vectors):  # all lengths are what they were
        return 0.0
    asked = model.queries(evenly(model.terms[0].bank, ASKED))
    lengths = np.maximum(np.linalg.norm(vectors, axis=1), 1e-30)
    rank = min(max(round(RANK * len(vectors) / handler.count), 1), len(vectors))
    similarities = np.partition(asked @ (vectors / lengths[:, None]).T, -rank, axis=1)[:, -rank]
    return STEP * round(float(similarities.mean(dtype=np.float64)) / STEP)


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
    def exhaustive(self) -> bool:
        """Whether a search compares the query with every entry."""

    @property
    @abstractmethod
    def lossy(self) -> bool:
        """Whether codes may change the length of a vector."""

    @property
    def lossy_inside(self) -> bool:
        """Whether those of any stage may."""
        return self.lossy

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

    def require_takes(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, nearness: float | None = None
    ) -> None:
        """Raises StoreError if `append` could not add `vectors` [n, d] with `offsets` [n]. Nothing is changed."""
        raise self._not_upgraded

    def append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, nearness: float | None = None
    ) -> None:
        """Adds `vectors` [n, d] with `offsets` [n], after `require_takes`; `nearness` as in `UpgradeSpec`."""
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
        seen = np.zeros(len(labels), bool)
        if len(labels) and labels.min() >= 0 and labels.max() < len(labels):
            seen[labels] = True
        if not seen.all():
            raise InputError(f"the ids of this {name_of(self.index)} are not 0 ... {len(labels) - 1}: pass a model")
        return labels

    @abstractmethod
    def extra_dimensions(self) -> list[ExtraDimensions]:
        """The extra dimensions of all upgraded base indexes in this index."""

    def rounded(
        self, offsets: np.ndarray, rows: np.ndarray | None = None, vectors: np.ndarray | None = None
    ) -> np.ndarray:
        """What codes of an upgraded index make of `offsets` [n], with its entries `rows` [n], or with `vectors` [n, d]
        that are new: [n]."""
        return offsets

    def lengths_and_bias(
        self, vectors: np.ndarray, nearness: float | None
    ) -> tuple[np.ndarray | float, np.ndarray | float]:
        """The lengths [b] to which codes changed unit vectors, 1 where they did not, and the norm bias [b]: what the
        index adds to the similarity of each of `vectors` [b, d] to every query, up to a constant. The model knows of
        neither, so `IndexScale` puts its offsets right.

        nearness: as in `IndexScale`. A longer vector scores higher by inner product, and by L2, which is
        q.t - |t|^2 / 2, it is further away.
        """
        if nearness is None or not self.lossy:
            return 1.0, 0.0
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
        lengths[lengths == 0] = 1  # no query tells such a vector from its offset
        return lengths, np.asarray(nearness * lengths - (lengths**2 / 2 if self.euclidean else 0))

    def is_upgraded(self) -> bool:
        return bool(self.extra_dimensions())

    def holds_offsets_of(self, model: OffsetModel | None) -> bool:
        """Whether it is upgraded, with offsets of `model`, or where that is None with offsets of no model."""
        extra = self.extra_dimensions()
        fingerprint = model.fingerprint if extra and model is not None else ""
        return bool(extra) and all(each.has_fingerprint(fingerprint) for each in extra)


def handler_for(index: faiss.Index) -> IndexHandler:
    """The handler for `index`, or for what lies behind its query map, since targets are not mapped; raises StoreError,
    which names its type, if there is none."""
    if isinstance(index, faiss.IndexBinary):
        raise StoreError(f"{type(index).__name__} holds bits, and an offset is a real number: it cannot be upgraded")
    if not isinstance(index, faiss.Index):
        raise StoreError(f"expected a faiss index, got {type(index).__name__}")
    owner, index = index, behind_map(index)
    name = name_of(index)
    if isinstance(index, getattr(faiss, "GpuIndex", ())):
        raise StoreError(
            f"{name} is on a GPU, where it cannot be upgraded; index = faiss.index_gpu_to_cpu(index) takes it to "
            "the CPU"
        )
    if name in ASSEMBLED:
        raise StoreError(f"{name} cannot carry offsets; {ASSEMBLED[name]}")
    if name not in IndexHandler.registry:
        raise StoreError(
            f"{name} cannot carry offsets; leave it as it is and search with "
            "hubplugin_faiss.CorrectedSearch(index, model, vectors=vectors); "
            f"types that can: {', '.join(sorted(IndexHandler.registry))}"
        )
    index = faiss.downcast_index(index)
    if getattr(index, "bbs", BLOCK) != BLOCK:
        raise StoreError(
            f"{name} scans blocks of {index.bbs} codes and cannot carry offsets: blocks of {BLOCK}, the default, can; "
            "leave it as it is and search with hubplugin_faiss.CorrectedSearch(index, model, vectors=vectors)"
        )
    handler = IndexHandler.registry[name](index)
    handler.owner = owner
    return handler


class BaseIndexHandler(IndexHandler):
    """An index that holds codes. Upgraded, it has w more components, which transforms before it append."""

    @property
    def exhaustive(self) -> bool:
        return False

    @property
    def lossy(self) -> bool:
        return codec_of(self.index).lossy

    def upgraded(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        return self.upgraded_behind([], offsets, spec)

    def upgraded_behind(
        self, chain: list[faiss.VectorTransform], offsets: np.ndarray, spec: UpgradeSpec
    ) -> faiss.Index:
        """The upgraded index behind the transforms of `chain` and those that append its extra dimensions."""
        extra, base_index = self.widened(offsets, spec)
        return pretransform([*chain, *appending(int(self.index.d), extra)], base_index)

    def check(self) -> None:
        super().check()
        codec_of(self.index)  # which refuses codes without room

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        codec_of(self.index)  # Faiss cannot decode all that it refuses
        for vectors in self.decoded(start, size):
            yield vectors, None

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
        return codec_of(self.index).coder(self.index.d - extra.width, extra)

    def bases(self, extra: ExtraDimensions, rows: np.ndarray | None, vectors: np.ndarray | None) -> np.ndarray | None:
        """Extra components [n, w] of the centroids of the lists of `rows` or `vectors`, as in `rounded`, where codes
        hold differences from centroids, else None."""
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
        codec_of(self.index).require_fits(vectors)

    @abstractmethod
    def append_extended(
        self, extra: ExtraDimensions, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> None:
        """Adds `vectors` [n, d] with `offsets` [n] to this index of d + w components."""


def appending(d: int, extra: ExtraDimensions) -> list[faiss.VectorTransform]:
    """The transforms from d components x to [x, q]."""
    remap = faiss.RemapDimensionsTransform(d, d + extra.width, False)
    centring = faiss.CenteringTransform(d + extra.width)
    faiss.copy_array_to_vector(np.concatenate([np.zeros(d, np.float32), -extra.query]), centring.mean)
    centring.is_trained = True
    return [remap, centring]


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


SAMPLE = 65_536
"""A codebook for offsets is trained on at most about this many."""


def sample_rows(offsets: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Rows of `offsets` [n] to train a codebook on: evenly spread, with the extremes and all `starts`."""
    spread = np.linspace(0, len(offsets) - 1, min(len(offsets), SAMPLE)).astype(np.int64)
    return np.unique(np.concatenate([spread, starts, [offsets.argmin(), offsets.argmax()]]))


class FlatCodesHandler(BaseIndexHandler):
    """Codes in a row, one an entry."""

    names: ClassVar[tuple[str, ...]] = ("IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexScalarQuantizer", "IndexPQ")

    @property
    def exhaustive(self) -> bool:
        return True

    def widened(self, offsets: np.ndarray, spec: UpgradeSpec) -> tuple[ExtraDimensions, faiss.Index]:
        codec = codec_of(self.index)
        sample = offsets[sample_rows(offsets, np.empty(0, np.int64))]
        coder = codec.design(spec, sample, None)
        coder.require_holds(sample, None, name_of(self.index))
        return coder.extra, self._widened(coder, lambda rows: coder.components_for(offsets[rows]))

    def widened_by(self, coder: Coder, components: np.ndarray) -> faiss.Index:
        """A new index with extra `components` [n, w] in its codes."""
        return self._widened(coder, lambda rows: components[rows])

    def narrowed(self, d: int, extra: ExtraDimensions) -> faiss.Index:
        codec = codec_of(self.index)
        coder, new = codec.coder(d, extra), self._empty(d)
        codec.narrow(new, d)
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

    def _widened(self, coder: Coder, components: Callable[[slice], np.ndarray]) -> faiss.Index:
        """A new index with extra components in its codes; `components` gives those of some rows: [b, w]."""
        new = self._empty(self.index.d + coder.extra.width)
        codec_of(self.index).widen(new, coder)
        fill(new, (coder.join(codes, components(rows)) for codes, rows in self._blocks(block_rows(new.d))))
        return new

    def _blocks(self, size: int) -> Iterator[tuple[np.ndarray, slice]]:
        """Codes [b, code_size] and rows of all entries, b <= size."""
        for start in range(0, self.count, size):
            rows = slice(start, min(start + size, self.count))
            yield self._codes(rows.start, rows.stop), rows

    def _codes(self, start: int, stop: int) -> np.ndarray:
        """The codes of the entries [start, stop): uint8 [stop - start, code_size]."""
        return codes_of(self.index)[start:stop]
