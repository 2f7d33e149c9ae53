"""An index and its offsets: one rule for each type of index, which says how its codes carry one more number.

A rule looks at one index and never changes it, but for `append`. Leaves hold codes; containers hand on to the rules
of their parts. The upgraded index takes vectors of the same d: before each leaf stands an `IndexPreTransform` whose
chain appends the tail, so that plain Faiss, in any language, searches the corrected ranking.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.codes import Coder, E, Floats, Range
from hubplugin_faiss.tail import Tail

BLOCK_BYTES = 64 << 20
"""Codes and vectors are handled in blocks of about this size, whatever the size of the index."""

METRICS = {faiss.METRIC_INNER_PRODUCT: "inner product", faiss.METRIC_L2: "squared L2"}


@dataclass(frozen=True)
class Plan:
    """What all parts of one index share when it is upgraded.

    offsets: their extremes. fingerprint: names the model, "" where there is none.
    """

    offsets: Range
    fingerprint: str = ""


class Rule(ABC):
    """How one type of index is read, upgraded and downgraded. Entries are in scan order: by row, or list by list."""

    names: ClassVar[tuple[str, ...]]
    registry: ClassVar[dict[str, type[Rule]]] = {}

    def __init_subclass__(cls) -> None:
        for name in getattr(cls, "names", ()):
            Rule.registry[name] = cls

    def __init__(self, index: Any):
        self.index = index

    @property
    def count(self) -> int:
        return int(self.index.ntotal)

    def check(self) -> None:
        """Raises StoreError if this index, as it stands, cannot be upgraded."""
        if self.index.metric_type not in METRICS:
            raise StoreError(
                f"{name_of(self.index)} has metric {self.index.metric_type}, which is neither inner product nor L2; "
                "an offset cannot become a dimension of it"
            )
        if not self.index.is_trained:
            raise StoreError(f"{name_of(self.index)} is not trained; train it and add vectors, then upgrade it")

    @abstractmethod
    def upgraded(self, offsets: np.ndarray, plan: Plan) -> Any:
        """A new index with `offsets` [n] in it."""

    @abstractmethod
    def downgraded(self) -> Any:
        """A new index without offsets, as it was before `upgraded`."""

    @abstractmethod
    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Vectors [b, d] from entry `start` on, b <= size, and their offsets [b] if the index is upgraded."""

    @abstractmethod
    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None) -> None:
        """Adds `vectors` [n, d] with `offsets` [n] to an upgraded index."""

    def labels(self) -> np.ndarray:
        """What a search calls each entry: int64 [n]."""
        return np.arange(self.count)

    def is_upgraded(self) -> bool:
        return False

    def tails(self) -> list[Tail]:
        """The tails of all upgraded leaves."""
        return []


def rule_for(index: Any) -> Rule:
    """The rule for `index`; raises StoreError by the name of its type if there is none."""
    if isinstance(index, faiss.IndexBinary):
        raise StoreError(f"{type(index).__name__} holds bits, and an offset is a real number: it cannot be upgraded")
    if not isinstance(index, faiss.Index):
        raise StoreError(f"expected a faiss index, got {type(index).__name__}")
    index = faiss.downcast_index(index)
    name = type(index).__name__
    if name not in Rule.registry:
        raise StoreError(f"{name} is of a type that cannot carry offsets; known: {', '.join(sorted(Rule.registry))}")
    return Rule.registry[name](index)


def name_of(index: Any) -> str:
    return type(faiss.downcast_index(index)).__name__


def block_rows(index: Any) -> int:
    """How many vectors of `index` make a block."""
    return max(1, BLOCK_BYTES // (4 * int(index.d)))


class Leaf(Rule):
    """An index that holds codes of d components."""

    def upgraded(self, offsets: np.ndarray, plan: Plan) -> Any:
        return self.behind([], offsets, plan)

    def behind(self, chain: list[Any], offsets: np.ndarray, plan: Plan) -> Any:
        """The upgraded leaf behind the transforms of `chain` and those that append its tail."""
        coder = self.plan(offsets, plan)
        leaf = self.widened(coder, offsets)
        return _pretransform([*chain, *_append_tail(self.index.d, coder.tail)], leaf)

    def downgraded(self) -> Any:
        raise StoreError(f"{name_of(self.index)} is not upgraded")

    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None) -> None:
        raise StoreError(f"{name_of(self.index)} is not upgraded; upgrade it, then add to it")

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        for vectors in self.decoded(start, size):
            yield vectors, None

    @abstractmethod
    def plan(self, offsets: np.ndarray, plan: Plan) -> Coder:
        """The tail that suits the codes of this leaf."""

    @abstractmethod
    def coder(self, d: int, tail: Tail) -> Coder:
        """Of this leaf with a tail behind its d components: what wrote the tail."""

    @abstractmethod
    def widened(self, coder: Coder, offsets: np.ndarray) -> Any:
        """A new leaf of d + w components with `offsets` [n] in its tails."""

    @abstractmethod
    def narrowed(self, d: int, coder: Coder) -> Any:
        """Of this leaf with a tail behind its d components: a new one without."""

    @abstractmethod
    def decoded(self, start: int, size: int) -> Iterator[np.ndarray]:
        """All components of the entries from `start` on, b <= size: float32 [b, d], or [b, d + w] with a tail."""

    @abstractmethod
    def append_tailed(self, vectors: np.ndarray, tails: np.ndarray, ids: np.ndarray | None) -> None:
        """Adds `vectors` [n, d] and their `tails` [n, w] to this leaf with a tail."""


class Flat(Leaf):
    """float32 codes in a row: one more component, exact."""

    names = ("IndexFlat", "IndexFlatIP", "IndexFlatL2")

    def plan(self, offsets: np.ndarray, plan: Plan) -> Coder:
        euclidean = self.index.metric_type == faiss.METRIC_L2
        query = -np.sqrt(2 * plan.offsets.high) if euclidean else max(E, plan.offsets.size * 1e-30)
        return self.coder(self.index.d, Tail(np.array([query], np.float32), euclidean).marked(plan.fingerprint))

    def coder(self, d: int, tail: Tail) -> Coder:
        return Coder(tail, Floats(), 1, 32 * d, 32 * tail.width)

    def widened(self, coder: Coder, offsets: np.ndarray) -> Any:
        def code(old: np.ndarray, rows: slice) -> np.ndarray:
            return coder.join(old, coder.tails(offsets[rows]))

        return self._recoded(self.index.d + coder.tail.width, code)

    def narrowed(self, d: int, coder: Coder) -> Any:
        return self._recoded(d, lambda codes, rows: coder.split(codes)[0])

    def decoded(self, start: int, size: int) -> Iterator[np.ndarray]:
        codes = _codes(self.index)
        for first in range(start, self.count, size):
            yield np.asarray(self.index.sa_decode(codes[first : first + size]))

    def append_tailed(self, vectors: np.ndarray, tails: np.ndarray, ids: np.ndarray | None) -> None:
        _add(self.index, np.concatenate([vectors, tails], axis=1), ids)

    def _recoded(self, d: int, code: Any) -> Any:
        kind = faiss.IndexFlatL2 if self.index.metric_type == faiss.METRIC_L2 else faiss.IndexFlatIP
        new = kind(d)
        _alike(new, self.index)
        new.codes.resize(self.count * new.code_size)
        old_codes, new_codes, size = _codes(self.index), _codes(new), block_rows(new)
        for start in range(0, self.count, size):
            rows = slice(start, start + size)
            new_codes[rows] = code(old_codes[rows], rows)
        return new


class IdMap(Rule):
    """A container that gives its part's entries the user's ids."""

    names = ("IndexIDMap", "IndexIDMap2")

    def check(self) -> None:
        super().check()
        self._part.check()

    def upgraded(self, offsets: np.ndarray, plan: Plan) -> Any:
        return self._around(self._part.upgraded(offsets, plan))

    def downgraded(self) -> Any:
        return self._around(self._part.downgraded())

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        # The ids belong to what the part calls 0, 1, 2, ..., which need not be its scan order.
        return self._part.scan(start, size)

    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None) -> None:
        if ids is None:
            raise StoreError(f"{name_of(self.index)} has ids of its own: pass ids= with the vectors")
        self._part.append(vectors, offsets, None)
        faiss.copy_array_to_vector(np.concatenate([faiss.vector_to_array(self.index.id_map), ids]), self.index.id_map)
        self.index.ntotal = self.index.index.ntotal
        if isinstance(self.index, faiss.IndexIDMap2):
            self.index.construct_rev_map()

    def labels(self) -> np.ndarray:
        return np.asarray(faiss.vector_to_array(self.index.id_map))[self._part.labels()]

    def is_upgraded(self) -> bool:
        return self._part.is_upgraded()

    def tails(self) -> list[Tail]:
        return self._part.tails()

    @property
    def _part(self) -> Rule:
        return rule_for(self.index.index)

    def _around(self, part: Any) -> Any:
        part.ntotal = 0  # Faiss wraps only what looks empty
        new = type(self.index)(part)
        new.own_fields = _handed_over(part)
        part.ntotal = self.count
        _alike(new, self.index)
        faiss.copy_array_to_vector(faiss.vector_to_array(self.index.id_map), new.id_map)
        if isinstance(new, faiss.IndexIDMap2):
            new.construct_rev_map()
        return new


class Chain(Rule):
    """Transforms before an index. The upgrade of a leaf behind one joins its tail to the same chain."""

    names = ("IndexPreTransform",)

    def check(self) -> None:
        super().check()
        self._part.check()

    def upgraded(self, offsets: np.ndarray, plan: Plan) -> Any:
        part, chain = self._part, _copied_chain(self.index)
        if isinstance(part, Leaf):
            return part.behind(chain, offsets, plan)
        return _pretransform(chain, part.upgraded(offsets, plan))

    def downgraded(self) -> Any:
        found, chain = self._tail(), _copied_chain(self.index)
        if found is None:
            return _pretransform(chain, self._part.downgraded())
        d, tail = found
        leaf = self._leaf.narrowed(d, self._leaf.coder(d, tail))
        return _pretransform(chain[:-2], leaf) if chain[:-2] else leaf

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        found = self._tail()
        for inner, offsets in self._part.scan(start, size):
            outer = np.empty((len(inner), self.index.d), np.float32)
            self.index.reverse_chain(len(inner), faiss.swig_ptr(np.ascontiguousarray(inner)), faiss.swig_ptr(outer))
            yield outer, offsets if found is None else found[1].offsets(inner[:, found[0] :])

    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None) -> None:
        found = self._tail()
        for number in range(self.index.chain.size() - (2 if found else 0)):
            vectors = self.index.chain.at(number).apply(np.ascontiguousarray(vectors, np.float32))
        if found is None:
            self._part.append(vectors, offsets, ids)
        else:
            self._leaf.append_tailed(vectors, self._leaf.coder(found[0], found[1]).tails(offsets), ids)
        self.index.ntotal = self.index.index.ntotal

    def labels(self) -> np.ndarray:
        return self._part.labels()

    def is_upgraded(self) -> bool:
        return self._tail() is not None or self._part.is_upgraded()

    def tails(self) -> list[Tail]:
        found = self._tail()
        return self._part.tails() if found is None else [found[1]]

    @property
    def _part(self) -> Rule:
        return rule_for(self.index.index)

    @property
    def _leaf(self) -> Leaf:
        part = self._part
        assert isinstance(part, Leaf)
        return part

    def _tail(self) -> tuple[int, Tail] | None:
        """The d before the tail, and the tail, if this chain ends in what appends one."""
        links = self.index.chain.size()
        if links < 2:
            return None
        remap, centring = (
            faiss.downcast_VectorTransform(self.index.chain.at(number)) for number in (links - 2, links - 1)
        )
        if not isinstance(remap, faiss.RemapDimensionsTransform) or not isinstance(centring, faiss.CenteringTransform):
            return None
        d, width = remap.d_in, remap.d_out - remap.d_in
        mapped, mean = faiss.vector_to_array(remap.map), faiss.vector_to_array(centring.mean)
        if width < 1 or (mapped[:d] != np.arange(d)).any() or (mapped[d:] >= 0).any() or mean[:d].any():
            return None
        return d, Tail(-mean[d:], self.index.metric_type == faiss.METRIC_L2)


def carries_mark_of(rule: Rule, fingerprint: str) -> bool:
    """Whether the offsets in an upgraded index are those of the model called `fingerprint`, "" for none."""
    return all(tail.carries(fingerprint) for tail in rule.tails())


def _append_tail(d: int, tail: Tail) -> list[Any]:
    """The transforms from d components x to [x, q]."""
    remap = faiss.RemapDimensionsTransform(d, d + tail.width, False)
    centring = faiss.CenteringTransform(d + tail.width)
    faiss.copy_array_to_vector(np.concatenate([np.zeros(d, np.float32), -tail.query]), centring.mean)
    centring.is_trained = True
    return [remap, centring]


def _pretransform(chain: list[Any], index: Any) -> Any:
    new = faiss.IndexPreTransform(index)
    new.own_fields = _handed_over(index)
    for transform in reversed(chain):
        new.prepend_transform(transform)
        transform.this.disown()
    new.ntotal, new.is_trained = index.ntotal, True
    return new


def _copied_chain(index: Any) -> list[Any]:
    """Copies of the transforms of `index`, made through Faiss's writer: its cloner knows few of them."""
    chain = []
    for number in range(index.chain.size()):
        writer = faiss.VectorIOWriter()
        faiss.write_VectorTransform(index.chain.at(number), writer)
        reader = faiss.VectorIOReader()
        faiss.copy_array_to_vector(faiss.vector_to_array(writer.data), reader.data)
        chain.append(faiss.read_VectorTransform(reader))
    return chain


def _handed_over(part: Any) -> bool:
    """Gives `part` to the C++ object that is to own it, which says so by own_fields = True."""
    part.this.disown()
    return True


def _alike(new: Any, old: Any) -> None:
    for field in ("ntotal", "verbose", "is_trained", "metric_type", "metric_arg"):
        setattr(new, field, getattr(old, field))


def _codes(index: Any) -> np.ndarray:
    """The codes of an index that holds them in a row: uint8 [n, code_size], the memory itself."""
    n, size = int(index.ntotal), int(index.code_size)
    if n == 0:
        return np.empty((0, size), np.uint8)
    memory: np.ndarray = faiss.rev_swig_ptr(index.codes.data(), n * size)
    return memory.reshape(n, size)


def _add(index: Any, vectors: np.ndarray, ids: np.ndarray | None) -> None:
    if ids is None:
        index.add(vectors)
    else:
        index.add_with_ids(vectors, ids)
