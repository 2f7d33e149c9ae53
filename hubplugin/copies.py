"""For a store that keeps a correction as a copy of its vectors with one more dimension, in a table or a
collection of its own: what is the same in each of them. An adapter says where copies lie, and how they are searched."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hubplugin.calibration import largest_offset, query_component
from hubplugin.corrections import Manifest, ManifestStore, Version
from hubplugin.errors import StoreError
from hubplugin.metric import Metric, augment_queries, augment_targets, unit_or_zero
from hubplugin.model import OffsetModel, Value
from hubplugin.store import Batch, Found, Hits, Id, Writing, require_room
from hubplugin.vectors import Progress

logger = logging.getLogger(__name__)

BATCH = 500
"""The most vectors in one request: a server takes some 32 MB."""

ROUNDING = 1e-5
"""By how much, of its largest component, a vector in a copy may differ from its target's and still be that; likewise
scores."""

REMEMBERED = 100
"""How many targets that lack their offset are looked at again with each search, until they have it."""


class Copy(Version):
    """One correction. gallery: what tells the gallery from another that had its name before."""

    gallery: str


class CopyStore(ManifestStore[Copy]):
    """A store of copies. Searches go to the copy that is active, with s(q, t) + offset(t) as its score:

    inner product, cosine of unit vectors   [t + S't, offset / e], searched with [q, e]: q + Sq is the query map
    squared Euclidean distance              [t, sqrt(2 (cap - offset))], searched with [q, 0]

    The manifest, each copy and each model have a place of their own, a table or a collection, called by `name_of`.
    """

    name: str
    """Of the place of the manifest."""

    joint: str = "-"
    place: str
    """What a place is: "table"."""

    gallery: str
    """See `Copy`."""

    folder: Path | None = None
    """In which the store lies, where that is a folder of this machine."""

    _e: tuple[OffsetModel, float] | None = None
    _wrong: frozenset[Id] = frozenset()
    _warned = False

    @abstractmethod
    def read_text(self) -> str | None:
        """The manifest as it was written, JSON; None if there is none."""

    @abstractmethod
    def drop(self, name: str) -> None:
        """Deletes a place of ours, which may be gone, or half deleted by a run that was killed."""

    @abstractmethod
    def batches(
        self, copy: Copy | None, field: str | None, ids: Sequence[Id] | None = None
    ) -> Iterator[Batch]:
        """Scans as `scan` does.

        Args:
            copy: the copy whose offsets are read.
            field: as in `scan`.
            ids: reads these targets alone, as far as they are there.
        """

    @abstractmethod
    def nearest(
        self,
        copy: Copy | None,
        queries: np.ndarray,
        k: int,
        among: Collection[Id] | None,
    ) -> Hits:
        """Searches in a copy, or among the targets themselves.

        Args:
            copy: None for the targets.
            queries: at most `BATCH` [m, d].
            k: how many of each.
            among: finds these ids alone.

        Returns:
            The hits; scores are distances.
        """

    @abstractmethod
    def write_copy(self, copy: Copy, ids: Sequence[Id], vectors: np.ndarray) -> None:
        """Puts vectors into a copy.

        Args:
            copy: Into which one.
            ids: Of the targets.
            vectors: Theirs, with the offset behind them [b, d + 1].
        """

    def name_of(self, *parts: int | str) -> str:
        """What the place of the manifest is called, of a copy by its number, and of its model by that and "model"."""
        return self.joint.join((self.name, *map(str, parts)))

    def read_manifest(self) -> Manifest[Copy]:
        text = self.read_text()
        if text is None:
            return Manifest[Copy]()
        mend = f"delete each {self.place} whose name begins so, and apply again"
        manifest = Manifest[Copy].read(
            text, f"{self.url}: the {self.place} {self.name}", mend
        )
        versions = (*manifest.maintained, *manifest.previous.values())
        is_anew = any(copy.gallery != self.gallery for copy in versions)
        return manifest.withdraw() if is_anew else manifest

    def new_version(self, model: OffsetModel, number: int) -> Copy:
        return Copy.of(model, number, gallery=self.gallery)

    def delete_manifest(self) -> None:
        self.drop(self.name_of())

    def delete_model(self, version: Copy) -> None:
        self.drop(self.name_of(version.number, "model"))

    def delete_offsets(
        self, versions: Sequence[Copy], progress: Progress | None
    ) -> None:
        for copy in versions:
            self.drop(self.name_of(copy.number))

    def begin(
        self, model: OffsetModel, progress: Progress | None = None
    ) -> CopyWriting:
        return CopyWriting(self, model, *self.start_version(model, progress))

    def notes(self) -> Sequence[str]:
        copy = self.active(anew=True)
        return (
            []
            if copy is None
            else [f"searches use the {self.place} {self.name_of(copy.number)}"]
        )

    def active(self, *, anew: bool = False) -> Copy | None:
        """The copy that searches use. anew: looked up, where a store remembers it for a while."""
        return super().active()

    def is_fresh(self, copy: Copy) -> bool:
        """Whether a search need not ask if others have changed targets: as long as a store has just looked."""
        return False

    how_to_record = (
        "hubplugin.Recorder(FOLDER).add(queries) beside each search, and "
        "?record=FOLDER behind the URL of the store"
    )

    @property
    def maps_queries(self) -> bool:  # type: ignore[override]
        return self.metric is not Metric.EUCLIDEAN

    def scan(self, field: str | None = None) -> Iterator[Batch]:
        copy = self.active(anew=True)
        return self.batches(copy, field)

    def batch(
        self,
        copy: Copy | None,
        ids: Sequence[Id],
        vectors: np.ndarray,
        stored: Mapping[Id, Sequence[float]],
        values: Sequence[Value] | None = None,
    ) -> Batch:
        """Makes a batch as `batches` has it.

        Args:
            copy: the copy whose offsets are wanted.
            ids: of the targets.
            vectors: of the targets [b, d].
            stored: what `copy` holds of the targets that it has, by id.
            values: of the targets.
        """
        offsets = np.full(len(vectors), np.nan, np.float32)
        rows = [row for row, key in enumerate(ids) if key in stored]
        if copy is not None and rows:
            components = np.asarray([stored[ids[row]] for row in rows], np.float32)
            offsets[rows] = self.offsets_of(self.model(copy), vectors[rows], components)
        return Batch(ids, vectors, offsets, values=values)

    def search(
        self,
        queries: np.ndarray,
        k: int,
        *,
        raw: bool = False,
        among: Collection[Id] | None = None,
    ) -> Hits:
        """Searches as every store does.

        Args:
            queries: [m, d].
            k: How many results each has.
            raw: Without the correction.
            among: The ids that may be found; by default all.

        Returns:
            Scores are distances: 1 - s by inner product and cosine, else |q - t|^2; corrected ones are less by the
            offset, under squared Euclidean distance by twice the offset.
        """
        hits = Hits([], [])
        for row in range(0, len(queries), BATCH):
            part = self._search_copy(
                queries[row : row + BATCH], k, among, None if raw else self.active()
            )
            hits.ids.extend(part.ids)
            hits.scores.extend(part.scores)
        return hits

    def _search_copy(
        self,
        queries: np.ndarray,
        k: int,
        among: Collection[Id] | None,
        copy: Copy | None,
    ) -> Hits:
        if copy is None:
            return self.nearest(None, queries, k, among)
        try:
            return self._search_corrected(copy, queries, k, among)
        except StoreError:
            now = self.active(anew=True)
            if now == copy:
                raise
            return self._search_copy(
                queries, k, among, now
            )  # another correction has taken its place meanwhile

    def _search_corrected(
        self, copy: Copy, queries: np.ndarray, k: int, among: Collection[Id] | None
    ) -> Hits:
        """The k best of what is near in `copy` and of what is near among the targets, each by its vector of now.

        Others may have added, changed and deleted targets since. What is in neither list scores no higher than the last
        of that in which it would stand, so the lists grow until the k-th best scores as high as that.
        """
        model = self.model(copy)
        mapped, augmented = model.queries(queries), self.augment_queries(model, queries)
        constant, scale = (
            (2 * largest_offset(model), 2)
            if self.metric is Metric.EUCLIDEAN
            else (0.0, 1)
        )
        if self.is_fresh(copy):
            copy_hits = self.nearest(copy, augmented, k, among)
            return Hits(
                copy_hits.ids,
                [[score - constant for score in row] for row in copy_hits.scores],
            )
        # By cosine, a store divides what a map has made of a query by its length.
        lengths = (
            np.linalg.norm(mapped, axis=1)
            if self.metric is Metric.COSINE
            else np.ones(len(mapped))
        )
        hits = Hits([[] for _ in queries], [[] for _ in queries])
        rows, wide, offsets = np.arange(len(queries)), k, dict[Id, float]()
        while len(rows):
            copy_hits = self.nearest(copy, augmented[rows], wide, among)
            raw_hits = self.nearest(None, mapped[rows], 4 * wide, among)
            ids = {key for row in (*copy_hits.ids, *raw_hits.ids) for key in row}
            offsets |= self.read_offsets(copy, ids - offsets.keys())
            shift = {
                key: offset if np.isfinite(offset) else 0.0
                for key, offset in offsets.items()
            }
            unsure = list[int]()
            for place, row in enumerate(rows.tolist()):
                by_copy = {
                    key: score - constant for score, key in _pairs(copy_hits, place)
                }
                by_raw = {
                    key: 1 - lengths[row] * (1 - score)
                    for score, key in _pairs(raw_hits, place)
                }
                scores = {
                    key: score
                    for key, score in by_copy.items()
                    if np.isfinite(offsets.get(key, np.nan))
                }
                scores |= {
                    key: score - scale * shift[key]
                    for key, score in by_raw.items()
                    if key in shift
                }
                best = sorted(scores.items(), key=lambda pair: pair[1])[:k]
                hits.ids[row], hits.scores[row] = (
                    [key for key, _ in best],
                    [float(score) for _, score in best],
                )
                kth = (
                    best[-1][1] - ROUNDING * max(1, abs(best[-1][1]))
                    if len(best) == k
                    else np.inf
                )
                ends = [max(by_raw.values(), default=np.inf)]
                ends += (
                    [max(by_copy.values())] if len(copy_hits.ids[place]) == wide else []
                )
                if len(raw_hits.ids[place]) == 4 * wide and kth > min(ends):
                    unsure.append(row)
            rows, wide = np.array(unsure, int), 4 * wide
        return hits

    def read_offsets(self, copy: Copy, ids: Collection[Id]) -> dict[Id, float]:
        """Reads offsets. A warning names the first vector that has changed since it was copied.

        Args:
            copy: Of which copy.
            ids: Of which targets.

        Returns:
            The offsets as `Batch` has them, without targets that are gone.
        """
        wanted, offsets = [*{*ids, *self._wrong}], dict[Id, float]()
        for start in range(0, len(wanted), BATCH):
            for batch in self.batches(copy, None, wanted[start : start + BATCH]):
                offsets |= dict(zip(batch.ids, batch.offsets.tolist(), strict=True))
        self._wrong = frozenset(
            [key for key, offset in offsets.items() if not np.isfinite(offset)][
                :REMEMBERED
            ]
        )
        changed = next(
            (key for key, offset in offsets.items() if np.isinf(offset)), None
        )
        if changed is not None and not self._warned:
            self._warned = True
            logger.warning(
                "%s: vectors were changed after the correction was written, such as that of %r; such targets are found "
                "by their new vector, with no offset: run hubplugin refresh",
                self.url,
                changed,
            )
        return offsets

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raises StoreError if the folder has no room for another copy."""
        if self.folder is not None and not dry_run:
            require_room(self.folder, 4 * (self.dim + 1) * self.count())

    def augment(
        self, model: OffsetModel, vectors: np.ndarray, offsets: np.ndarray
    ) -> np.ndarray:
        """What a copy holds of targets.

        Args:
            model: Whose query map they have.
            vectors: Of the targets [b, d]. A zero vector stays zero.
            offsets: [b].

        Returns:
            float32 [b, d + 1].
        """
        if self.metric is Metric.COSINE:
            vectors = unit_or_zero(vectors)
        if model.query_map is not None:
            vectors = model.query_map.on_targets(vectors)
        return augment_targets(
            vectors,
            offsets,
            self.metric,
            e=self._e_of(model),
            max_offset=largest_offset(model),
        )

    def augment_queries(self, model: OffsetModel, queries: np.ndarray) -> np.ndarray:
        """What a copy is searched with.

        Args:
            model: Whose offsets it has.
            queries: [m, d].

        Returns:
            float32 [m, d + 1].
        """
        plain = model if model.query_map is None else replace(model, query_map=None)
        return augment_queries(plain.queries(queries), self.metric, e=self._e_of(model))

    def _e_of(self, model: OffsetModel) -> float:
        """`query_component`, which reads the whole bank, once a model."""
        if self._e is None or self._e[0] is not model:
            self._e = model, query_component(model)
        return self._e[1]

    def offsets_of(
        self, model: OffsetModel, vectors: np.ndarray, stored: np.ndarray
    ) -> np.ndarray:
        """The offsets in what a copy has stored.

        Args:
            model: Whose offsets these are.
            vectors: Of the targets, as they are now [b, d].
            stored: What the copy has of them [b, d + 1].

        Returns:
            float32 [b], infinite where the vector has changed since.
        """
        extra = stored[:, -1].astype(np.float64)
        offsets = (
            largest_offset(model) - extra**2 / 2
            if self.metric is Metric.EUCLIDEAN
            else self._e_of(model) * extra
        )
        expected = self.augment(model, vectors, offsets)[:, :-1]
        distance = np.abs(stored[:, :-1] - expected).max(axis=1)
        changed = distance > ROUNDING * np.maximum(1, np.abs(expected).max(axis=1))
        return np.where(changed, np.inf, offsets).astype(np.float32)


class CopyWriting(Writing):
    """The offsets of `model` on their way into a copy, which no search reads before it is activated."""

    def __init__(self, store: CopyStore, model: OffsetModel, copy: Copy, found: Found):
        self._store, self._model, self._copy, self.found = store, model, copy, found

    def scan(self) -> Iterator[Batch]:
        return self._store.batches(self._copy, None)

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        self._store.write_copy(
            self._copy,
            batch.ids,
            self._store.augment(self._model, batch.vectors, offsets),
        )

    def activate(self) -> None:
        self._store.switch(self._copy)
        self._store.clear()


def _pairs(hits: Hits, row: int) -> Iterator[tuple[float, Id]]:
    return zip(hits.scores[row], hits.ids[row], strict=True)
