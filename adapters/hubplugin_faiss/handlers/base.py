"""What a rule is: how one type of index is read, upgraded and downgraded, and how the rule for an index is found."""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import faiss
import numpy as np

from hubplugin.errors import InputError, StoreError
from hubplugin_faiss.encoding.codec import Coder
from hubplugin_faiss.encoding.extra_dimensions import Tail
from hubplugin_faiss.encoding.layout import Fill, Plan

BLOCK_BYTES = 8 << 20
"""Codes and vectors are handled in blocks of about this size, whatever the size of the index."""

SIMILARITY = 0.3
"""About how similar a query is to the targets between which a ranking decides, in units of their length.

Of two targets in one direction the longer one scores higher by its length times that. The tenth nearest of 20,000
and of 3,700 code vectors had 0.44 and 0.41; any value from 0.2 to 0.5 serves every lossy type better than none.
"""

ASSEMBLED = {
    "IndexShards": "merge its shards into one index (first.merge_from(second)) and upgrade that, or leave it as it is "
    "and search with hubplugin_faiss.CorrectedSearch(index, offsets)",
    "IndexReplicas": "upgrade one replica, index.at(0), and build the others from what upgrade returns",
}
"""What to do with types that put other indexes together, all of which would need the same extra dimensions."""

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


class Favour:
    """What an index favours, less what it favours in the mean of its first entries: offsets stay centred."""

    def __init__(self, rule: Rule, unit: bool):
        self._rule, self._unit, self._mean = rule, unit, 0.0
        for vectors, _ in itertools.islice(rule.scan(0, block_rows(rule.index.d)), 1):
            own = rule.favour(vectors, unit)
            self._mean = 0.0 if own is None else float(own.mean())

    def __call__(self, vectors: np.ndarray) -> np.ndarray | float:
        """Of `vectors` [b, d], as the index reconstructs them: float64 [b], or 0."""
        own = self._rule.favour(vectors, self._unit)
        return 0.0 if own is None else own - self._mean


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


def leaf_for(index: Any) -> Leaf:
    rule = rule_for(index)
    if not isinstance(rule, Leaf):
        raise StoreError(f"{name_of(index)} cannot carry offsets where it stands")
    return rule


def name_of(index: Any) -> str:
    return type(faiss.downcast_index(index)).__name__


def reason(error: RuntimeError) -> str:
    """What Faiss says, without the signature of the function that said it."""
    return " ".join(re.sub(r"^Error in .+? at \S+:\d+: (Error: )?", "", str(error), flags=re.DOTALL).split())


def block_rows(d: int) -> int:
    """How many vectors of d components make a block."""
    return max(1, BLOCK_BYTES // (4 * int(d)))


def pretransform(chain: list[Any], index: Any) -> Any:
    """`index` behind the transforms of `chain`, all of which it takes over."""
    new = faiss.IndexPreTransform(index)
    new.own_fields = handed_over(index)
    for transform in reversed(chain):
        new.prepend_transform(transform)
        transform.this.disown()
    new.ntotal, new.is_trained = index.ntotal, True
    return new


def appending(d: int, tail: Tail) -> list[Any]:
    """The transforms from d components x to [x, q]."""
    remap = faiss.RemapDimensionsTransform(d, d + tail.width, False)
    centring = faiss.CenteringTransform(d + tail.width)
    faiss.copy_array_to_vector(np.concatenate([np.zeros(d, np.float32), -tail.query]), centring.mean)
    centring.is_trained = True
    return [remap, centring]


def handed_over(part: Any) -> bool:
    """Gives `part` to the C++ object that is to own it, which says so by own_fields = True."""
    part.this.disown()
    return True


def alike(new: Any, old: Any, *fields: str) -> None:
    """Copies what every index has, and `fields`."""
    for field in ("ntotal", "verbose", "is_trained", "metric_type", "metric_arg", *fields):
        setattr(new, field, getattr(old, field))
