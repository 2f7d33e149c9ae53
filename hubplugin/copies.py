"""For a store that keeps a correction as a copy of its vectors with one more dimension, in a table or a
collection of its own: what is the same in each of them. An adapter says where copies lie, and how they are searched."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np

from hubplugin.errors import StoreError
from hubplugin.metric import Metric, augment_queries, augment_targets, unit_or_zero
from hubplugin.model import OffsetModel, Value, group_key
from hubplugin.store import Batch, Correction, Found, Hits, Id, Store, Writing, now, require_room
from hubplugin.vectors import Progress

logger = logging.getLogger(__name__)

State: TypeAlias = Literal["active", "half-written", "previous"]
"""Of a previous one only the model is left."""

BATCH = 500
"""The most vectors in one request: a server takes some 32 MB."""

ROUNDING = 1e-5
"""By how much, of its largest component, a vector in a copy may differ from its target's and still be that; likewise
scores."""

REMEMBERED = 100
"""How many targets that lack their offset are looked at again with each search, until they have it."""


@dataclass(frozen=True)
class Copy:
    """One correction; fingerprint: that of its model."""

    number: int
    state: State
    made: str
    fingerprint: str

    def __post_init__(self) -> None:
        if self.state not in get_args(State):
            raise StoreError(
                f"correction {self.number} is {self.state}, as an earlier version of hubplugin wrote it: run hubplugin "
                "remove, and apply again"
            )


class CopyStore(Store):
    """A store of copies. Searches go to the copy that is active, with s(q, t) + offset(t) as its score:

    inner product, cosine of unit vectors   [t + S't, offset / e], searched with [q, e]: q + Sq is the query map
    squared Euclidean distance              [t, sqrt(2 (cap - offset))], searched with [q, 0]
    """

    folder: Path | None = None
    """In which the store lies, where that is a folder of this machine."""

    _model: OffsetModel | None = None
    _e: tuple[OffsetModel, float] | None = None
    _wrong: frozenset[Id] = frozenset()
    _told = False

    @abstractmethod
    def copies(self) -> list[Copy]:
        """The corrections that `list_copies` was given."""

    @abstractmethod
    def list_copies(self, copies: Sequence[Copy]) -> None:
        """Makes `copies` the corrections, in one step. Then deletes what belongs to none of them, and the vectors of a
        previous one."""

    @abstractmethod
    def create_copy(self, copy: Copy, model: OffsetModel) -> None:
        """Makes room for a copy that is not listed yet, and keeps its model."""

    @abstractmethod
    def stored_model(self, copy: Copy) -> OffsetModel:
        """The model of a copy that is listed."""

    @abstractmethod
    def batches(self, copy: Copy | None, group_by: str | None, ids: Sequence[Id] | None = None) -> Iterator[Batch]:
        """As `scan`, with the offsets in `copy`. ids: of these targets alone, as far as they are there."""

    @abstractmethod
    def nearest(self, copy: Copy | None, queries: np.ndarray, k: int, among: Collection[Id] | None) -> Hits:
        """The k nearest of at most `BATCH` queries in `copy`, or among the targets themselves; scores are distances.
        among: of these ids alone."""

    @abstractmethod
    def write_copy(self, copy: Copy, ids: Sequence[Id], vectors: np.ndarray) -> None:
        """Puts `vectors` [b, d + 1] of the targets `ids` into `copy`."""

    def active(self, *, anew: bool = False) -> Copy | None:
        """The correction that searches use. anew: looked up, where a store remembers it for a while."""
        return self.copy_in("active")

    def settled(self, copy: Copy) -> bool:
        """Whether a search need not ask if others have changed targets: as long as a store has just looked."""
        return False

    def readable(self, copy: Copy) -> bool:
        """Whether all of `copy` can be read. One that cannot, which a kill may have left, is begun anew."""
        return True

    @property
    def maps_queries(self) -> bool:  # type: ignore[override]
        return self.metric is not Metric.EUCLIDEAN

    def model_of(self, copy: Copy) -> OffsetModel:
        """`stored_model`, read once."""
        if self._model is None or self._model.fingerprint != copy.fingerprint:
            self._model = self.stored_model(copy)
        return self._model

    def copy_in(self, state: State) -> Copy | None:
        """The correction that is in `state`, if there is one."""
        return next((copy for copy in self.copies() if copy.state == state), None)

    def scan(self, group_by: str | None = None) -> Iterator[Batch]:
        copy = self.copy_in("active")
        return self.batches(copy, group_by or (None if copy is None else group_key(self.model_of(copy))))

    def batch(
        self,
        copy: Copy | None,
        ids: Sequence[Id],
        vectors: np.ndarray,
        stored: Mapping[Id, Sequence[float]],
        groups: Sequence[Value] | None = None,
    ) -> Batch:
        """Targets as `batches` has them. stored: what `copy` holds of those that it has, by id."""
        offsets = np.full(len(vectors), np.nan, np.float32)
        rows = [row for row, key in enumerate(ids) if key in stored]
        if copy is not None and rows:
            found = np.asarray([stored[ids[row]] for row in rows], np.float32)
            offsets[rows] = self.offsets_of(self.model_of(copy), vectors[rows], found)
        return Batch(ids, vectors, offsets, groups=groups)

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False, among: Collection[Id] | None = None) -> Hits:
        """Scores are distances: 1 - s by inner product and cosine, else |q - t|^2; corrected ones are less by the
        offset, under squared Euclidean distance by twice the offset. among: of these ids alone."""
        found = Hits([], [])
        for row in range(0, len(queries), BATCH):
            some = self._searched(queries[row : row + BATCH], k, among, None if raw else self.active())
            found.ids.extend(some.ids)
            found.scores.extend(some.scores)
        return found

    def _searched(self, queries: np.ndarray, k: int, among: Collection[Id] | None, copy: Copy | None) -> Hits:
        if copy is None:
            return self.nearest(None, queries, k, among)
        try:
            return self._corrected(copy, queries, k, among)
        except StoreError:
            now = self.active(anew=True)
            if now == copy:
                raise
            return self._searched(queries, k, among, now)  # another correction has taken its place meanwhile

    def _corrected(self, copy: Copy, queries: np.ndarray, k: int, among: Collection[Id] | None) -> Hits:
        """The k best of what is near in `copy` and of what is near among the targets, each by its vector of now.

        Others may have added, changed and deleted targets since. What is in neither list scores no higher than the last
        of that in which it would stand, so the lists grow until the k-th best scores as high as that.
        """
        model = self.model_of(copy)
        asked, longer = model.queries(queries), self.augmented_queries(model, queries)
        constant, scale = (2 * cap_of(model), 2) if self.metric is Metric.EUCLIDEAN else (0.0, 1)
        if self.settled(copy):
            found = self.nearest(copy, longer, k, among)
            return Hits(found.ids, [[score - constant for score in row] for row in found.scores])
        # By cosine, a store divides what a map has made of a query by its length.
        lengths = np.linalg.norm(asked, axis=1) if self.metric is Metric.COSINE else np.ones(len(asked))
        hits = Hits([[] for _ in queries], [[] for _ in queries])
        rows, wide, offsets = np.arange(len(queries)), k, dict[Id, float]()
        while len(rows):
            found = self.nearest(copy, longer[rows], wide, among)
            near = self.nearest(None, asked[rows], 4 * wide, among)
            offsets |= self.offsets_now(copy, {key for row in (*found.ids, *near.ids) for key in row} - offsets.keys())
            unsure = list[int]()
            for place, row in enumerate(rows.tolist()):
                by_copy = {key: score - constant for score, key in _pairs(found, place)}
                by_raw = {key: 1 - lengths[row] * (1 - score) for score, key in _pairs(near, place)}
                scores = {key: score for key, score in by_copy.items() if np.isfinite(offsets.get(key, np.nan))}
                scores |= {
                    key: score - scale * _finite(offsets[key]) for key, score in by_raw.items() if key in offsets
                }
                best = sorted(scores.items(), key=lambda pair: pair[1])[:k]
                hits.ids[row], hits.scores[row] = [key for key, _ in best], [float(score) for _, score in best]
                kth = best[-1][1] - ROUNDING * max(1, abs(best[-1][1])) if len(best) == k else np.inf
                ends = [max(by_raw.values(), default=np.inf)]
                ends += [max(by_copy.values())] if len(found.ids[place]) == wide else []
                if len(near.ids[place]) == 4 * wide and kth > min(ends):
                    unsure.append(row)
            rows, wide = np.array(unsure, int), 4 * wide
        return hits

    def offsets_now(self, copy: Copy, ids: Collection[Id]) -> dict[Id, float]:
        """The offsets of the targets `ids` as `Batch` has them; those that are gone are left out. The first vector that
        is not the one that was copied is told."""
        asked, offsets = [*{*ids, *self._wrong}], dict[Id, float]()
        for start in range(0, len(asked), BATCH):
            for batch in self.batches(copy, None, asked[start : start + BATCH]):
                offsets |= dict(zip(batch.ids, batch.offsets.tolist(), strict=True))
        self._wrong = frozenset([key for key, offset in offsets.items() if not np.isfinite(offset)][:REMEMBERED])
        changed = next((key for key, offset in offsets.items() if np.isinf(offset)), None)
        if changed is not None and not self._told:
            self._told = True
            logger.warning(
                "%s: vectors were changed after the correction was written, such as that of %r; such targets are found "
                "by their new vector, with no offset: run hubplugin refresh",
                self.url,
                changed,
            )
        return offsets

    def correction(self) -> Correction | None:
        copy = self.copy_in("active") or self.copy_in("half-written")
        return None if copy is None else Correction(self.model_of(copy), copy.state == "active", copy.made)

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raises StoreError if the folder has no room for another copy."""
        if self.folder is not None and not dry_run:
            require_room(self.folder, 4 * (self.dim + 1) * self.count())

    def begin(self, model: OffsetModel, progress: Progress | None = None) -> CopyWriting:
        copies = self.copies()
        mine = (copy for copy in copies if copy.fingerprint == model.fingerprint and copy.state != "previous")
        there = next(mine, None)
        if there is not None and self.readable(there):
            return CopyWriting(self, there, model, "active" if there.state == "active" else "half-written")
        number = 1 + max((copy.number for copy in copies), default=0)
        begun = Copy(number, "half-written", now(), model.fingerprint)
        others = [copy for copy in copies if copy.state != "half-written" and copy is not there]
        self.list_copies(others)
        self.create_copy(begun, model)
        self.list_copies([*others, begun])
        return CopyWriting(self, begun, model, "nothing")

    def previous(self) -> OffsetModel | None:
        copy = self.copy_in("previous")
        return None if copy is None else self.stored_model(copy)

    def activate(self, copy: Copy) -> None:
        """Searches use `copy` from now on; the one that they used, if it is another, is the previous one."""
        others = [each for each in self.copies() if each.number != copy.number]
        replaced = [replace(each, state="previous") for each in others if each.state == "active"]
        gone = {"active", "previous"} if replaced else {"active"}
        left = [each for each in others if each.state not in gone]
        self.list_copies([*left, *replaced, replace(copy, state="active")])

    def augmented(self, model: OffsetModel, vectors: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """What a copy holds of targets [b, d] with `offsets` [b]: float32 [b, d + 1]. A zero vector stays one."""
        if self.metric is Metric.COSINE:
            vectors = unit_or_zero(vectors)
        if model.query_map is not None:
            vectors = model.query_map.on_targets(vectors)
        return augment_targets(vectors, offsets, self.metric, e=self._e_of(model), max_offset=cap_of(model))

    def augmented_queries(self, model: OffsetModel, queries: np.ndarray) -> np.ndarray:
        """What a copy is searched with in the place of `queries` [m, d]: float32 [m, d + 1]."""
        plain = model if model.query_map is None else model.having(query_map=None)
        return augment_queries(plain.queries(queries), self.metric, e=self._e_of(model))

    def _e_of(self, model: OffsetModel) -> float:
        """`e_of`, which reads the whole bank, once a model."""
        if self._e is None or self._e[0] is not model:
            self._e = model, e_of(model)
        return self._e[1]

    def offsets_of(self, model: OffsetModel, vectors: np.ndarray, stored: np.ndarray) -> np.ndarray:
        """The offsets in what a copy has `stored` [b, d + 1] of targets [b, d]: float32 [b], infinite where the vector
        has changed since."""
        extra = stored[:, -1].astype(np.float64)
        offsets = cap_of(model) - extra**2 / 2 if self.metric is Metric.EUCLIDEAN else self._e_of(model) * extra
        expected = self.augmented(model, vectors, offsets)[:, :-1]
        apart = np.abs(stored[:, :-1] - expected).max(axis=1)
        changed = apart > ROUNDING * np.maximum(1, np.abs(expected).max(axis=1))
        return np.where(changed, np.inf, offsets).astype(np.float32)


class CopyWriting(Writing):
    """The offsets of `model` on their way into a copy, which no search reads before it is activated."""

    def __init__(self, store: CopyStore, copy: Copy, model: OffsetModel, found: Found):
        self._store, self._copy, self._model, self.found = store, copy, model, found

    def scan(self) -> Iterator[Batch]:
        return self._store.batches(self._copy, group_key(self._model))

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        self._store.write_copy(self._copy, batch.ids, self._store.augmented(self._model, batch.vectors, offsets))

    def activate(self) -> None:
        self._store.activate(self._copy)


def cap_of(model: OffsetModel) -> float:
    """No offset of `model` is larger; what is stored under Euclidean distance needs a bound."""
    return 0.0 if model.gallery is None else model.gallery.cap


def e_of(model: OffsetModel) -> float:
    """The last component of a query, so that that of the targets, offset / e, spreads half as far as any other.

    A graph (HNSW) by inner product misses neighbours where one component outweighs the others, or weighs nothing:
    `benchmarks/extra_component.py`.
    """
    spread = 0.0 if model.gallery is None else model.gallery.deviation
    bank = model.terms[0].bank
    return 2 * spread / float(np.sqrt(np.square(bank, dtype=np.float64).mean())) if spread > 0 else 1.0


def _finite(offset: float) -> float:
    return offset if np.isfinite(offset) else 0.0


def _pairs(hits: Hits, row: int) -> Iterator[tuple[float, Id]]:
    return zip(hits.scores[row], hits.ids[row], strict=True)
