"""Corrected search for a store that cannot add an offset to a score.

The store's search finds more candidates than requested, and they are reranked with
their offsets. The offsets are kept beside the gallery, in a log that each process reads
into memory, so the gallery itself is never changed. An adapter implements the search
and the storage of the log; `CandidateStore` does the rest.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from pydantic import Field

from hubplugin.calibration import FIRST, choose_queries
from hubplugin.corrections import Manifest, ManifestStore, Version
from hubplugin.errors import HubpluginError, StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, Value
from hubplugin.store import Batch, Found, Hits, Id, Writing, require_room
from hubplugin.vectors import Progress

AGREEMENT = 0.995
"""The share of the calibration queries' corrected top ten that must be candidates."""

SMALL = 200
"""In a gallery of at most this many targets, all are candidates."""

WIDEST = 10_240
"""The maximum number of candidates that a search reranks."""

BYTES_PER_TARGET = 50
"""The approximate size of an offset in the log."""

MARK = "hubplugin"
"""The metadata key that marks a place as created by a correction.

In the manifest's place, its value is the manifest.
"""

PER_REQUEST = 20_000
"""The maximum number of candidates per request: SQLite accepts at most 32,766 ids."""


class CandidateVersion(Version):
    """The version of a correction.

    gallery: The identifier of the gallery. A gallery that is deleted and created anew
        under the same name has another one.
    oversampling: The number of candidates per result.
    """

    gallery: str
    oversampling: float = Field(default=1.0, gt=0, le=WIDEST)

    def candidates(self, k: int) -> int:
        """Return the number of candidates that a search for `k` results reranks."""
        wanted = math.ceil(self.oversampling * max(k, FIRST))
        return max(k, min(wanted, WIDEST))


Candidates: TypeAlias = dict[str, Any]
"""One query's results from the store's search: lists of equal length, nearest first.

The lists "ids" and "distances" are required. The list "vectors" shows which targets
have changed. Other lists are returned in the new order.
"""

Fetch: TypeAlias = Callable[[np.ndarray, int], list[Candidates]]
"""The store's search: takes queries [m, d] and the number of candidates for each."""


@dataclass
class Snapshot:
    """The data with which searches rerank.

    offsets: The offset of each target, and the checksum of the vector it belongs to.
    texts_read: The number of texts read from the log.
    """

    version: CandidateVersion | None = None
    model: OffsetModel | None = None
    offsets: dict[Id, tuple[float, int]] = field(default_factory=dict)
    texts_read: int = 0

    def offsets_of(
        self, ids: Sequence[Id], vectors: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the offsets of targets [b].

        NaN marks a target without an offset. With `vectors` [b, d], infinity marks an
        offset that was computed for another vector.
        """
        entries = [self.offsets.get(key, (math.nan, 0)) for key in ids]
        offsets = np.array([offset for offset, _ in entries], np.float32)
        if vectors is not None:
            stored = [checksum for _, checksum in entries]
            has_changed = np.not_equal(stored, checksums(vectors))
            offsets[has_changed & ~np.isnan(offsets)] = np.inf
        return offsets


def checksums(vectors: np.ndarray) -> list[int]:
    """Return the checksum of each of `vectors` [b, d]."""
    return [zlib.crc32(row.tobytes()) for row in np.asarray(vectors, np.float32)]


class CandidateStore(ManifestStore[CandidateVersion]):
    """A store whose search results are reranked. Scores are distances.

    The manifest, each log and each model are kept in separate places, which are tables
    or collections; `name_of` names them. A log and a model are ordered lists of texts.
    """

    name: str
    """The name of the manifest's place. The names of other places begin with it."""

    separator: str
    """The separator between the parts of a place's name."""

    place: str
    """The word for a place in messages, such as "table"."""

    gallery: str
    """See `CandidateVersion`."""

    folder: Path | None = None
    """The folder of the store, if it is on this machine."""

    snapshot_seconds: float = 0.0
    """The seconds for which searches use the same `Snapshot`."""

    how_to_record = (
        "call hubplugin.Recorder(FOLDER).add(queries) at each search, and append "
        "?record=FOLDER to the URL of the store"
    )

    _snapshot = Snapshot()
    _next_read = -math.inf

    @abstractmethod
    def fetch(self, queries: np.ndarray, count: int) -> list[Candidates]:
        """Search without a correction.

        Args:
            queries: The queries, [m, d].
            count: The number of targets for each query.
        """

    @abstractmethod
    def read_targets(self, field: str | None = None) -> Iterator[Batch]:
        """Yield the same batches as `scan`, without offsets."""

    @abstractmethod
    def find_place(self, name: str) -> Any:
        """Return a place, whoever created it, or None if it does not exist."""

    @abstractmethod
    def make_place(self, name: str, mark: str) -> Any:
        """Create a place with a mark, in one step.

        If a correction has created the place before, its mark is replaced.

        Args:
            name: The name of the place.
            mark: The value of `MARK` in its metadata.

        Returns:
            The place, as `find_place` returns it.
        """

    @abstractmethod
    def mark(self, place: Any) -> str | bytes | None:
        """Return the value of `MARK` in a place's metadata, or None if it has none."""

    @abstractmethod
    def read_texts(self, place: Any, start: int) -> list[str]:
        """Return the texts of a place, in order.

        Args:
            place: The place, as `find_place` returns it.
            start: The number of the first text.
        """

    @abstractmethod
    def append_text(self, place: Any, text: str) -> None:
        """Append a text to a place.

        Args:
            place: The place, as `find_place` returns it.
            text: The text.
        """

    @abstractmethod
    def drop(self, name: str) -> None:
        """Delete a correction's place, even if it is half deleted or does not exist."""

    def open_place(self, name: str) -> Any:
        """Return a place that a correction created, or None if there is none."""
        place = self.find_place(name)
        if place is None or self.mark(place) is None:
            return None
        return place

    def read_log(self, name: str, start: int = 0) -> list[str]:
        """Return the texts that were appended to a place, in order.

        Args:
            name: The name of the place. A place that does not exist has no texts.
            start: The number of the first text.
        """
        place = self.open_place(name)
        return [] if place is None else self.read_texts(place, start)

    def append(self, name: str, text: str) -> None:
        """Append a text to a place.

        Args:
            name: The name of the place. Raises StoreError if it does not exist: another
                run has deleted it, and nobody would delete it again.
            text: The text.
        """
        place = self.open_place(name)
        if place is None:
            raise self.overtaken()
        self.append_text(place, text)

    @property
    def maps_queries(self) -> bool:  # type: ignore[override]
        return self.metric is not Metric.EUCLIDEAN

    def name_of(self, version: CandidateVersion, *parts: str) -> str:
        """Return the name of a place.

        Args:
            version: The version to which the place belongs.
            *parts: Nothing for the log, "model" for the model.
        """
        return self.separator.join((self.name, version.word, *parts))

    def read_manifest(self) -> Manifest[CandidateVersion]:
        place = self.open_place(self.name)
        if place is None:
            return Manifest[CandidateVersion]()
        mend = f"delete each {self.place} whose name begins with it, then run apply"
        description = f"{self.url}: the {self.place} {self.name}"
        text = self.mark(place) or ""
        manifest = Manifest[CandidateVersion].read(text, description, mend)
        versions = (*manifest.maintained, *manifest.previous.values())
        if any(version.gallery != self.gallery for version in versions):
            # They belong to a deleted gallery of the same name.
            return manifest.withdraw()
        return manifest

    def write_manifest(self, manifest: Manifest[CandidateVersion]) -> None:
        self.make_place(self.name, manifest.model_dump_json())
        self._next_read = -math.inf  # the next search reads it

    def delete_manifest(self) -> None:
        self.drop(self.name)

    def new_version(self, model: OffsetModel, number: int) -> CandidateVersion:
        return CandidateVersion.of(model, number, gallery=self.gallery)

    def read_model(self, version: CandidateVersion) -> OffsetModel:
        texts = self.read_log(self.name_of(version, "model"))
        return OffsetModel.from_texts(texts, self.url)

    def write_model(self, version: CandidateVersion, model: OffsetModel) -> None:
        name = self.name_of(version, "model")
        self.make_place(name, "log")
        for text in model.to_texts():
            self.append(name, text)

    def delete_model(self, version: CandidateVersion) -> None:
        self.drop(self.name_of(version, "model"))

    def make_room(self, version: CandidateVersion) -> None:
        name = self.name_of(version)
        if self.open_place(name) is None:
            self.make_place(name, "log")

    def delete_offsets(self, versions: Sequence[CandidateVersion]) -> None:
        for version in versions:
            self.drop(self.name_of(version))

    def begin(self, model: OffsetModel, progress: Progress | None = None) -> Writing:
        return CandidateWriting(self, *self.start_version(model))

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raise StoreError if the manifest's name is taken or the folder lacks room."""
        place = self.find_place(self.name)
        if place is not None and self.mark(place) is None:
            raise StoreError(
                f"{self.url}: the {self.place} {self.name} holds data that are not "
                "hubplugin's; rename it, or delete it"
            )
        if self.folder is not None and not dry_run:
            require_room(self.folder, BYTES_PER_TARGET * self.count())

    def notes(self) -> Sequence[str]:
        version = self.active()
        if version is None:
            return []
        count = version.candidates(FIRST)
        return [f"a search for {FIRST} results reranks {count} candidates"]

    def get_snapshot(self, *, anew: bool = False) -> Snapshot:
        """Return the snapshot, at most `snapshot_seconds` old, or new if `anew`."""
        if anew or time.monotonic() >= self._next_read:
            self._snapshot = self._read_snapshot()
            self._next_read = time.monotonic() + self.snapshot_seconds
        return self._snapshot

    def _read_snapshot(self) -> Snapshot:
        """Read the active version, its offsets and its model.

        If another correction replaces the version meanwhile, read that one.
        """
        version = self.active()
        if version is None:
            return Snapshot()
        try:
            return replace(self.read_offsets(version), model=self.model(version))
        except HubpluginError:
            if self.active() == version:
                raise
            return self._read_snapshot()  # another correction has replaced the version

    def read_offsets(self, version: CandidateVersion) -> Snapshot:
        """Return a snapshot with the offsets of `version`; the caller adds the model.

        If the last snapshot is of the same version, only new texts of its log are read.
        """
        snapshot = Snapshot(version)
        cached = self._snapshot
        if cached.version is not None and cached.version.word == version.word:
            snapshot = replace(cached, version=version)
        texts = self.read_log(self.name_of(version), snapshot.texts_read)
        if texts:
            # Copy the offsets: searches in other threads still use the last snapshot.
            snapshot = replace(snapshot, offsets=dict(snapshot.offsets))
        # An offset that was written later takes the place of an earlier one.
        for text in texts:
            for key, offset, checksum in json.loads(text):
                snapshot.offsets[key] = offset, checksum
            snapshot.texts_read += 1
        return snapshot

    def scan(self, field: str | None = None) -> Iterator[Batch]:
        return with_offsets(self.read_targets(field), self.get_snapshot(anew=True))

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        """Search as every store does.

        Args:
            queries: The queries, [m, d].
            k: The number of results for each query.
            raw: True to search without the correction.

        Returns:
            The hits. Scores are distances: for inner product and cosine, 1 - s minus
            the offset; for squared Euclidean distance, |q - t|^2 minus twice the
            offset.
        """
        rows = self.rank(queries, k, self.fetch, raw=raw)
        return Hits([row["ids"] for row in rows], [row["distances"] for row in rows])

    def rank(
        self, queries: np.ndarray, k: int, fetch: Fetch, *, raw: bool = False
    ) -> list[Candidates]:
        """Return the `k` best candidates for each query after reranking.

        Args:
            queries: The queries, [m, d].
            k: The number of candidates for each query.
            fetch: The store's search.
            raw: True to rank without the correction.
        """
        snapshot = Snapshot() if raw else self.get_snapshot()
        version = snapshot.version
        count = k if version is None else version.candidates(k)
        ranked = list[Candidates]()
        for candidates in self._fetch_corrected(snapshot, queries, count, fetch):
            best = np.argsort(candidates["distances"], kind="stable")[:k].tolist()
            ranked.append(
                {
                    name: [values[row] for row in best]
                    for name, values in candidates.items()
                }
            )
        return ranked

    def _fetch_corrected(
        self, snapshot: Snapshot, queries: np.ndarray, count: int, fetch: Fetch
    ) -> Iterator[Candidates]:
        """Yield `count` candidates for each of `queries` [m, d].

        The candidates have corrected distances, but are in the order of `fetch`.
        """
        mapped = queries
        lengths = np.ones(len(queries))
        if snapshot.model is not None:
            mapped = snapshot.model.queries(queries)
            if self.metric is Metric.COSINE:  # the store divides by these lengths
                lengths = np.linalg.norm(mapped, axis=1)
        step = max(1, PER_REQUEST // count)
        for start in range(0, len(queries), step):
            results = fetch(mapped[start : start + step], count)
            # `results` ends before `lengths[start:]` does, except in the last step.
            for length, candidates in zip(lengths[start:], results, strict=False):
                vectors = candidates.pop("vectors", None)  # no part of the results
                offsets = snapshot.offsets_of(candidates["ids"], vectors)
                known_offsets = np.where(np.isfinite(offsets), offsets, 0.0)
                raw = np.asarray(candidates["distances"])
                if self.metric is Metric.EUCLIDEAN:
                    corrected = raw - 2 * known_offsets
                else:
                    # `raw` is 1 minus the similarity, without the length of the mapped
                    # query.
                    corrected = 1 - length * (1 - raw) - known_offsets
                yield {**candidates, "distances": corrected.tolist()}

    def calibrate(self, version: CandidateVersion) -> float:
        """Return the number of candidates that a search needs per result.

        Calibration queries are reranked among `WIDEST` candidates. The returned number
        suffices for the share `AGREEMENT` of the corrected top ten that they find
        there. In a gallery of at most `SMALL` targets, all are candidates.
        """
        most = min(self.count(), WIDEST)
        if most <= SMALL:
            return SMALL / FIRST
        model = self.model(version)
        queries = choose_queries(model, self.read_targets())
        snapshot = replace(self.read_offsets(version), model=model)
        # The places of each query's corrected top ten in the raw order, from 0.
        raw_ranks = list[int]()
        for candidates in self._fetch_corrected(snapshot, queries, most, self.fetch):
            raw_ranks.extend(np.argsort(candidates["distances"], kind="stable")[:FIRST])
        last_rank = np.quantile(raw_ranks, AGREEMENT, method="inverted_cdf")
        return max(1.0, (float(last_rank) + 1) / FIRST)


def plain_batch(
    ids: Sequence[Id], vectors: np.ndarray, values: Sequence[Value] | None = None
) -> Batch:
    """Return a batch of targets with `vectors` [b, d] but without offsets."""
    vectors = np.asarray(vectors, np.float32)
    offsets = np.full(len(vectors), np.nan, np.float32)
    return Batch(ids, vectors, offsets, values=values)


def with_offsets(batches: Iterator[Batch], snapshot: Snapshot) -> Iterator[Batch]:
    """Yield `batches` with the offsets of `snapshot`."""
    for batch in batches:
        yield replace(batch, offsets=snapshot.offsets_of(batch.ids, batch.vectors))


class CandidateWriting(Writing):
    """A run that writes the offsets of `version` to its log."""

    def __init__(self, store: CandidateStore, version: CandidateVersion, found: Found):
        self._store = store
        self._version = version
        self.found = found

    def scan(self) -> Iterator[Batch]:
        return with_offsets(
            self._store.read_targets(), self._store.read_offsets(self._version)
        )

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        sums = checksums(batch.vectors)
        rows = list(zip(batch.ids, offsets.tolist(), sums, strict=True))
        self._store.append(self._store.name_of(self._version), json.dumps(rows))

    def activate(self) -> None:
        self._store.require_owner(self._version)
        oversampling = self._store.calibrate(self._version)
        self._store.switch(self._version.replace(oversampling=oversampling))
        self._store.clear()
