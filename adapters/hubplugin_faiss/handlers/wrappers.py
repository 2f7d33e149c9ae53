"""The rules of indexes that hold other indexes: each keeps itself and hands on to its parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin.metric import normalise
from hubplugin.vectors import Vectors
from hubplugin_faiss.encoding.extra_dimensions import Tail
from hubplugin_faiss.encoding.layout import Fill, Plan
from hubplugin_faiss.handlers.base import (
    Favour,
    Leaf,
    Rule,
    alike,
    block_rows,
    handed_over,
    leaf_for,
    name_of,
    pretransform,
    rule_for,
)
from hubplugin_faiss.handlers.inverted_lists import (
    in_memory,
    list_ids,
    list_ranks,
    ranked_quantizer,
    unranked_quantizer,
)

K_FACTOR = 4
"""How many candidates for each result a stage without offsets hands on. Of 20,000 code vectors the corrected 10 best
were among the raw 40 best in 99.4 % of all cases. 16 for each add at most 0.002 to the recall of RaBitQ and of additive
quantisers, and 0.01 to that of LSH, which is above the raw index's as it is."""


class IdMap(Rule):
    """The user's ids over a part that numbers its entries itself."""

    names = ("IndexIDMap", "IndexIDMap2")

    def check(self) -> None:
        super().check()
        self._part.check()
        self.labels()

    def upgraded(self, offsets: np.ndarray, plan: Plan) -> Any:
        return self._around(self._part.upgraded(offsets, plan))

    def downgraded(self, fill: Fill) -> Any:
        return self._around(self._part.downgraded(fill))

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        return self._part.scan(start, size)

    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, unit: bool = False) -> None:
        if ids is None:
            raise StoreError(f"{name_of(self.index)} has ids of its own: pass ids= with the vectors")
        self._part.append(vectors, offsets, None, unit)
        faiss.copy_array_to_vector(np.concatenate([self._ids, ids]), self.index.id_map)
        self.index.ntotal = self.index.index.ntotal
        if isinstance(self.index, faiss.IndexIDMap2):
            self.index.construct_rev_map()

    def remove(self, ids: np.ndarray) -> None:
        own, gone = self._ids, np.isin(self._ids, ids)
        self._part.remove(np.flatnonzero(gone))
        _close_up(self._part, np.flatnonzero(gone))
        self.index.ntotal = self.index.index.ntotal
        faiss.copy_array_to_vector(own[~gone], self.index.id_map)
        if isinstance(self.index, faiss.IndexIDMap2):
            self.index.construct_rev_map()

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        own, ids = self._part.labels(start, stop), self._ids
        if len(own) and own.max() >= len(ids):
            raise StoreError(
                f"this {name_of(self.index)} has lost which entry has which id, as Faiss's own remove_ids over "
                "inverted lists does; build it anew, and use hubplugin_faiss.remove_ids"
            )
        return np.asarray(ids[own])

    def order(self) -> np.ndarray | slice:
        return self._part.order()

    def rounding(self, offsets: np.ndarray) -> float:
        return self._part.rounding(offsets)

    def tails(self) -> list[Tail]:
        return self._part.tails()

    def files(self) -> list[str]:
        return self._part.files()

    def favour(self, vectors: np.ndarray, unit: bool) -> np.ndarray | None:
        return self._part.favour(vectors, unit)

    def coded(self, vectors: np.ndarray) -> np.ndarray:
        return self._part.coded(vectors)

    def selecting(self, selector: Any) -> Any:
        return self._part.selecting(selector)

    @property
    def coarse(self) -> bool:  # type: ignore[override]
        return self._part.coarse

    @property
    def exhaustive(self) -> bool:  # type: ignore[override]
        return self._part.exhaustive

    @property
    def lossy(self) -> bool:  # type: ignore[override]
        return self._part.lossy

    @property
    def _part(self) -> Rule:
        return rule_for(self.index.index)

    @property
    def _ids(self) -> np.ndarray:
        return np.asarray(faiss.vector_to_array(self.index.id_map))

    def _around(self, part: Any) -> Any:
        part.ntotal = 0  # Faiss puts ids only over what looks empty
        new = type(self.index)(part)
        new.own_fields = handed_over(part)
        part.ntotal = self.count
        alike(new, self.index)
        faiss.copy_array_to_vector(self._ids, new.id_map)
        if isinstance(new, faiss.IndexIDMap2):
            new.construct_rev_map()
        return new


class Chain(Rule):
    """Transforms before a part. The tail of a leaf behind them joins the same chain."""

    names = ("IndexPreTransform",)
    AFFINE = (faiss.LinearTransform, faiss.RemapDimensionsTransform, faiss.CenteringTransform)

    def check(self) -> None:
        super().check()
        for link in self._links:
            try:
                link.reverse_transform(np.zeros((1, link.d_out), np.float32))
            except RuntimeError:
                raise StoreError(
                    f"the {type(link).__name__} before this {name_of(self._part.index)} cannot be turned back, so that "
                    "its vectors cannot be read; it cannot be upgraded"
                ) from None
        self._part.check()

    def upgraded(self, offsets: np.ndarray, plan: Plan) -> Any:
        part, chain = self._part, self._copied_chain()
        if isinstance(part, Leaf):
            return part.behind(chain, offsets, plan)
        given = None if plan.vectors is None else Transformed(plan.vectors, self)
        plan = replace(plan, vectors=given, unit=plan.unit and self._keeps_lengths)
        return pretransform(chain, part.upgraded(offsets, plan))

    def downgraded(self, fill: Fill) -> Any:
        tail, chain = self._tail(), self._copied_chain()
        if tail is None:
            return pretransform(chain, self._part.downgraded(fill))
        leaf = leaf_for(self.index.index).narrowed(self._width() - tail.width, tail, fill)
        return pretransform(chain[:-2], leaf) if chain[:-2] else leaf

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        tail = self._tail()
        for inner, offsets in self._part.scan(start, size):
            yield self._reversed(inner), offsets if tail is None else tail.offsets(inner[:, -tail.width :])

    def favour(self, vectors: np.ndarray, unit: bool) -> np.ndarray | None:
        """By inner product, one that shifts all vectors to A t + b ranks by (A q).(A t) + b.(A t)."""
        # A second stage takes care of lengths itself, where they are the same behind the transforms.
        own = None if self.coarse and self._keeps_lengths else super().favour(vectors, unit)
        shift = self._shift
        if self.euclidean or shift is None or not shift.any():
            return own
        return np.asarray((self._transformed(vectors) - shift) @ shift + (0 if own is None else own))

    def coded(self, vectors: np.ndarray) -> np.ndarray:
        if not self.lossy:
            return vectors
        tail, inner = self._tail(), self._transformed(vectors)
        if tail is None:
            inner = self._part.coded(inner)
        else:
            inner = leaf_for(self.index.index).coded_tailed(tail, inner)
            inner = np.concatenate([inner, np.broadcast_to(tail.query, (len(inner), tail.width))], axis=1)
        return self._reversed(inner)

    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, unit: bool = False) -> None:
        tail, vectors = self._tail(), self._transformed(vectors)
        if tail is None:
            self._part.append(vectors, offsets, ids, unit)
        else:
            leaf_for(self.index.index).append_tailed(vectors.shape[1], tail, vectors, offsets, ids)
        self.index.ntotal = self.index.index.ntotal

    def remove(self, ids: np.ndarray) -> None:
        self._part.remove(ids)
        self.index.ntotal = self.index.index.ntotal

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._part.labels(start, stop)

    def order(self) -> np.ndarray | slice:
        return self._part.order()

    def rounding(self, offsets: np.ndarray) -> float:
        tail = self._tail()
        if tail is None:
            return self._part.rounding(offsets)
        leaf, d = leaf_for(self.index.index), self._width() - tail.width
        stored = leaf.coder(d, tail).tails(offsets, leaf.bases(d, len(offsets)))
        return float(np.abs(tail.offsets(stored) - offsets).max())

    def tails(self) -> list[Tail]:
        tail = self._tail()
        return self._part.tails() if tail is None else [tail]

    @property
    def coarse(self) -> bool:  # type: ignore[override]
        return self._part.coarse

    def files(self) -> list[str]:
        return self._part.files()

    def selecting(self, selector: Any) -> Any:
        return self._part.selecting(selector)

    @property
    def exhaustive(self) -> bool:  # type: ignore[override]
        return self._part.exhaustive

    @property
    def lossy(self) -> bool:  # type: ignore[override]
        return self._part.lossy or any(link.d_out < link.d_in for link in self._links)

    @property
    def _links(self) -> list[Any]:
        """The transforms but those that append a tail."""
        return [faiss.downcast_VectorTransform(self.index.chain.at(number)) for number in range(self._own_links)]

    @property
    def _shift(self) -> np.ndarray | None:
        """What the transforms make of 0: float64. None if they do more to vectors than turn, cut and shift them."""
        affine = itertools.dropwhile(lambda link: isinstance(link, faiss.NormalizationTransform), self._links)
        if not all(isinstance(link, self.AFFINE) for link in affine):
            return None
        return np.asarray(self._transformed(np.zeros((1, self.index.d)))[0], np.float64)

    @property
    def _keeps_lengths(self) -> bool:
        shift, links = self._shift, self._links
        return shift is not None and not shift.any() and all(link.d_out >= link.d_in for link in links)

    @property
    def _part(self) -> Rule:
        return rule_for(self.index.index)

    @property
    def _own_links(self) -> int:
        """How many transforms there are before those that append a tail."""
        return int(self.index.chain.size()) - (0 if self._tail() is None else 2)

    def _transformed(self, vectors: np.ndarray) -> np.ndarray:
        """`vectors` [b, d] behind all transforms but those that append a tail."""
        for number in range(self._own_links):
            vectors = self.index.chain.at(number).apply(np.ascontiguousarray(vectors, np.float32))
        return vectors

    def _reversed(self, inner: np.ndarray) -> np.ndarray:
        """The vectors [b, d] of which all transforms make about `inner`."""
        outer, inner = np.empty((len(inner), self.index.d), np.float32), np.ascontiguousarray(inner)
        self.index.reverse_chain(len(inner), faiss.swig_ptr(inner), faiss.swig_ptr(outer))
        return outer

    def _width(self) -> int:
        return int(self.index.index.d)

    def _tail(self) -> Tail | None:
        """The tail that this chain appends, if it ends in the two transforms that append one."""
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
        return Tail(-mean[d:], self.euclidean)

    def _copied_chain(self) -> list[Any]:
        """Copies of the transforms, made through Faiss's writer: its cloner knows few of them."""
        chain = []
        for number in range(self.index.chain.size()):
            writer, reader = faiss.VectorIOWriter(), faiss.VectorIOReader()
            faiss.write_VectorTransform(self.index.chain.at(number), writer)
            faiss.copy_array_to_vector(faiss.vector_to_array(writer.data), reader.data)
            chain.append(faiss.read_VectorTransform(reader))
        return chain


class Transformed(Vectors):
    """Vectors as they are behind the transforms of a chain."""

    def __init__(self, vectors: Vectors, chain: Chain):
        super().__init__(vectors.name, vectors.rows, chain._width())
        self._vectors, self._chain = vectors, chain

    def _raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        for block in self._vectors.blocks(size):
            yield self._chain._transformed(block)


class Refined(Rule):
    """Candidates from one part, ranked by another. Entries are in the order of the second, which is that of ids."""

    names = ("IndexRefine", "IndexRefineFlat")

    def check(self) -> None:
        super().check()
        self._base.check()
        self._second.check()

    def upgraded(self, offsets: np.ndarray, plan: Plan) -> Any:
        second = self._second.upgraded(offsets, plan)
        if self._base.coarse:
            base = self._base
            candidates = base.ranked(offsets, plan) if isinstance(base, Coarse) else copied(self.index.base_index)
            return self._of(candidates, second, self.index.k_factor * K_FACTOR)
        labels = self._base.labels()
        offsets = offsets[labels]
        if plan.unit:  # the two stages favour different vectors
            offsets = offsets + _favours(self._second)[labels] - _favours(self._base)
        return self._of(self._base.upgraded(offsets, plan), second, self.index.k_factor)

    def downgraded(self, fill: Fill) -> Any:
        if not self._base.coarse:
            return self._of(self._base.downgraded(fill), self._second.downgraded(fill), self.index.k_factor)
        candidates = unranked(self.index.base_index)
        if self._staged:
            return candidates
        return self._of(candidates, self._second.downgraded(fill), self.index.k_factor / K_FACTOR)

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        return self._second.scan(start, size)

    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, unit: bool = False) -> None:
        if ids is not None:
            raise StoreError(f"{name_of(self.index)} numbers its entries itself; add without ids")
        base = offsets
        if unit and not self._base.coarse:
            first, second = Favour(self._base, unit), Favour(self._second, unit)
            base = offsets + second(self._second.coded(vectors)) - first(self._base.coded(vectors))
        if self._staged:
            held = self.coded(vectors)
            held = normalise(held, "vectors") if unit else held
        else:
            held = vectors
        self._second.append(held, offsets, None, unit)  # which may refuse them
        self._base.append(vectors, base, None, unit)
        self.index.ntotal = self.index.refine_index.ntotal

    def remove(self, ids: np.ndarray) -> None:
        """The ids of those that stay close up, as in a Flat index: the second stage finds them by their place."""
        self._base.remove(ids)
        self._second.remove(ids)
        _close_up(self._base, np.unique(ids))
        self.index.ntotal = self.index.refine_index.ntotal

    def coded(self, vectors: np.ndarray) -> np.ndarray:
        """Vectors and what codes make of others must not meet in one second stage: the former would win."""
        return self._base.coded(vectors) if self._staged and not self._holds_originals else self._second.coded(vectors)

    def favour(self, vectors: np.ndarray, unit: bool) -> np.ndarray | None:
        return None if self._staged else self._second.favour(vectors, unit)

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._second.labels(start, stop)

    def order(self) -> np.ndarray | slice:
        return self._second.order()

    def rounding(self, offsets: np.ndarray) -> float:
        return self._second.rounding(offsets)

    def tails(self) -> list[Tail]:
        return self._base.tails() + self._second.tails()

    def files(self) -> list[str]:
        return self._base.files()

    @property
    def coarse(self) -> bool:  # type: ignore[override]
        return self._staged

    @property
    def _base(self) -> Rule:
        return rule_for(self.index.base_index)

    @property
    def lossy(self) -> bool:  # type: ignore[override]
        return self._second.lossy or self._staged

    @property
    def _staged(self) -> bool:
        """Whether the second stage came with the upgrade."""
        chain = getattr(self._second.index, "chain", None)
        if chain is None or chain.size() == 0:
            return False
        first = faiss.downcast_VectorTransform(chain.at(0))
        return isinstance(first, faiss.RemapDimensionsTransform) and first.d_in == first.d_out

    @property
    def _holds_originals(self) -> bool:
        """Whether the second stage that came with the upgrade holds other vectors than the first decodes to."""
        for (coded, _), (held, _) in zip(self._base.scan(0, 16), self._second.scan(0, 16), strict=True):
            lengths = np.linalg.norm(coded, axis=1) * np.linalg.norm(held, axis=1)
            return bool(((coded * held).sum(axis=1) < (1 - 1e-4) * lengths).any())
        return False

    @property
    def _second(self) -> Rule:
        return rule_for(self.index.refine_index)

    def _of(self, base: Any, second: Any, k_factor: float) -> Any:
        new = faiss.IndexRefine(base, second)
        new.own_fields, new.own_refine_index, new.k_factor = handed_over(base), handed_over(second), k_factor
        alike(new, self.index)
        return new


class Coarse(Rule):
    """Codes that have no room for one more component.

    Candidates are found by them as ever, in lists that are ranked by the offsets of their entries, and ranked by a
    second stage that holds what the codes decode to, at unit length where the model takes it so, and the offsets, in
    16 bits a component. It numbers its entries 0, 1, 2, ..., so a search must return those.
    """

    names = (
        "IndexLSH",
        "IndexRaBitQ",
        "IndexRaBitQFastScan",
        "IndexIVFRaBitQ",
        "IndexIVFRaBitQFastScan",
        *(
            f"Index{form}Quantizer{fast}"
            for product in ("", "Product")
            for kind in ("Residual", "LocalSearch")
            for form, fast in ((product + kind, ""), (product + kind, "FastScan"), ("IVF" + product + kind, ""))
        ),
    )  # not those that are both IVF and fast-scan: Faiss ends the process when it decodes one that was read back

    coarse = True
    lossy = True

    def check(self) -> None:
        super().check()
        if isinstance(self.index, faiss.IndexIVF):
            lists = self.index.invlists
            ids = np.concatenate([list_ids(lists, number) for number in range(self.index.nlist)])
            if (np.sort(ids) != np.arange(self.count)).any():
                raise StoreError(
                    f"the ids of this {name_of(self.index)} are not 0 ... {self.count - 1}, and its second stage finds "
                    "entries by no others; keep ids of your own in an IndexIDMap2 over it"
                )

    def upgraded(self, offsets: np.ndarray, plan: Plan) -> Any:
        d, metric = self.index.d, self.index.metric_type
        stage = faiss.IndexScalarQuantizer(d, faiss.ScalarQuantizer.QT_fp16, metric)
        given = (
            (vectors for vectors, _ in self.scan(0, block_rows(d))) if plan.vectors is None else plan.vectors.blocks()
        )
        for vectors in given:
            stage.add(normalise(vectors, "index") if plan.unit else vectors)
        # A first transform that changes nothing tells this second stage from one that the index had before.
        same = faiss.RemapDimensionsTransform(d, d, False)
        second = leaf_for(stage).behind([same], offsets, replace(plan, fill=in_memory))
        new = faiss.IndexRefine(base := self.ranked(offsets, plan), second)
        new.own_fields, new.own_refine_index, new.k_factor = handed_over(base), handed_over(second), K_FACTOR
        return new

    def downgraded(self, fill: Fill) -> Any:
        return unranked(self.index)

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        for first in range(start, self.count, size):
            yield self.index.reconstruct_n(first, min(size, self.count - first)), None

    def favour(self, vectors: np.ndarray, unit: bool) -> np.ndarray | None:
        return None  # it does not rank what it finds

    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, unit: bool = False) -> None:
        with self._unranked():
            self.index.add(vectors)

    def coded(self, vectors: np.ndarray) -> np.ndarray:
        with self._unranked():
            return np.asarray(self.index.sa_decode(self.index.sa_encode(np.ascontiguousarray(vectors))))

    @contextmanager
    def _unranked(self) -> Iterator[None]:
        """In it vectors are placed in lists by themselves alone, as in the raw index."""
        if not isinstance(self.index, faiss.IndexIVF):
            yield
            return
        ranked, raw = faiss.downcast_index(self.index.quantizer), unranked_quantizer(self.index.quantizer)
        self.index.quantizer = raw
        try:
            yield
        finally:
            self.index.quantizer = ranked
            raw.this.acquire()  # assigned, it had become the index's

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.arange(start, self.count if stop is None else stop)

    def order(self) -> np.ndarray | slice:
        return slice(None)

    def rounding(self, offsets: np.ndarray) -> float:
        return 0.0

    def tails(self) -> list[Tail]:
        return []

    def ranked(self, offsets: np.ndarray, plan: Plan) -> Any:
        """A copy of the index whose lists, if it has any, rank by the offsets of their entries."""
        new = copied(self.index)
        if isinstance(new, faiss.IndexIVF):
            lists = [list_ids(new.invlists, number) for number in range(new.nlist)]
            starts, apart = np.cumsum([0, *map(len, lists)]), self._spreads(lists, plan) if self.euclidean else None
            ranks = list_ranks(offsets[np.concatenate(lists)], starts, apart)
            replace_quantizer(new, ranked_quantizer(new.quantizer, ranks, plan))
        return new

    def _spreads(self, lists: list[np.ndarray], plan: Plan) -> np.ndarray:
        """The mean squared distance of the entries `lists` from the centroid of each: float64 [nlist]."""
        centres = self.index.quantizer.reconstruct_n(0, self.index.nlist)
        if plan.unit:  # 1 - |c|^2 about their mean, whatever codes make of their distances
            return np.asarray(1 - (centres.astype(np.float64) ** 2).sum(axis=1))
        sums, numbers, first = np.zeros(len(lists)), np.empty(self.count, np.int64), 0
        numbers[np.concatenate(lists)] = np.repeat(np.arange(len(lists)), [len(own) for own in lists])
        for vectors, _ in self.scan(0, block_rows(self.index.d)):
            own = numbers[first : first + len(vectors)]
            sums += np.bincount(own, ((vectors - centres[own]) ** 2).sum(axis=1), minlength=len(lists))
            first += len(vectors)
        return np.asarray(sums / np.maximum([len(own) for own in lists], 1))


def _favours(rule: Rule) -> np.ndarray:
    """What an index favours of each entry, in scan order: float32 [n]."""
    favour, row, values = Favour(rule, True), 0, np.zeros(rule.count, np.float32)
    for vectors, _ in rule.scan(0, block_rows(rule.index.d)):
        values[row : row + len(vectors)] = favour(vectors)
        row += len(vectors)
    return values


def _close_up(part: Rule, gone: np.ndarray) -> None:
    """Numbers what is left of a part anew where inverted lists, unlike codes in a row, kept the numbers they had.
    `gone`: those that were removed, in ascending order."""
    while isinstance(part, Chain):
        part = part._part
    if isinstance(part.index, faiss.IndexIVF):
        for number in range(part.index.nlist):
            own = list_ids(part.index.invlists, number)
            own -= np.searchsorted(gone, own)


def replace_quantizer(index: Any, quantizer: Any) -> None:
    """Gives the IVF `index`, which owns its coarse quantizer, another one."""
    old = faiss.downcast_index(index.quantizer)
    index.quantizer = quantizer  # which it owns from now on
    old.this.acquire()


def unranked(index: Any) -> Any:
    """A copy of an index without room for offsets, whose lists rank by their vectors alone again."""
    new = copied(index)
    if isinstance(new, faiss.IndexIVF):
        replace_quantizer(new, unranked_quantizer(new.quantizer))
    return new


def copied(index: Any) -> Any:
    """A copy made through Faiss's writer: its cloner knows few transforms."""
    return faiss.deserialize_index(faiss.serialize_index(index))
