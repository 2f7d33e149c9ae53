"""A Faiss file as a `Store`: URL `faiss:photos.faiss`; offsets on their way into it, by one process or by several.

An index file and the manifest beside it are two names, which no single step changes. So the index is replaced first
(`FaissStore._replace`): until then all is as before, and from then on all is new, though the manifest may not say so
yet. The index says by 12 bits which model its offsets are of. Whoever reads both goes by the index
(`FaissStore._find_manifest`), and the next run writes it down (`FaissStore._settle`).
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qs

import faiss
import numpy as np

from hubplugin.atomic import kind_of
from hubplugin.corrections import Manifest, ManifestStore
from hubplugin.errors import HubpluginError, InputError, ModelFileError, StoreError
from hubplugin.executors import even_ranges
from hubplugin.jobs.write import UNIT
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, load
from hubplugin.registry import without_secrets
from hubplugin.store import (
    Batch,
    Explanation,
    Found,
    Hits,
    Id,
    LabelledQueries,
    Share,
    Store,
    StoreShard,
    Writing,
)
from hubplugin.vectors import Progress
from hubplugin_faiss.calibration import is_exact, parts, require_answers
from hubplugin_faiss.files import (
    flush_names,
    making,
    read_faiss,
    require_memory,
    require_unchanged,
    stamp_of,
    write_index_file,
)
from hubplugin_faiss.folder import FaissVersion, HubFolder, date_of, lock_folder
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.base import block_rows, is_mapped, reason
from hubplugin_faiss.index import (
    normalises_queries,
    require_unit,
    require_upgradable,
    upgrade_by,
)
from hubplugin_faiss.scale import IndexScale

ADD_BEHIND_MAP = (
    "a query map stands before the index, which plain Faiss would put what it adds through, too: add with "
    "hubplugin_faiss.add, or behind it, to faiss.downcast_index(index.index), and set index.ntotal"
)

SPREADS = {"scalar": 0.12, "codes": 0.45, "reduced": 0.65}
"""How far apart an index may bring the lengths of unit vectors, from the 5 % quantile to that of 95 %, over the median:
codes of each component, others, and where a transform has left out dimensions. Seen were at most 0.09, 0.28 and 0.47,
of 16 to 768 dimensions."""


def spread_of_unit(index: faiss.Index) -> float:
    if any(part.d < index.d for part in parts(index)):
        return SPREADS["reduced"]
    is_scalar = any(
        hasattr(faiss.downcast_index(getattr(part, "storage", part)), "sq")
        for part in parts(index)
    )
    return SPREADS["scalar" if is_scalar else "codes"]


TRIES = 3
"""How often a file is read that another program replaces meanwhile."""


class Entry(int):
    """An id of the index that remembers in which row it was read: ids need not be unique."""

    row: int


def rows_of(batch: Batch) -> list[int]:
    return [entry.row for entry in batch.ids if isinstance(entry, Entry)]


class FaissStore(ManifestStore[FaissVersion]):
    """One index file, and what lay beside it, as both were when it was read: a run begins only if the file is still so.
    Its queries are recorded beside it: photos.faiss.queries. metric: overrules what the index looks like.
    """

    def __init__(self, path: str | os.PathLike[str], metric: Metric | None = None):
        self.path, self.url, self.folder = (
            Path(path),
            f"faiss:{os.fspath(path)}",
            HubFolder(path),
        )
        self._metric = metric
        for _ in range(TRIES):
            stamp = stamp_of(path)
            self._take(read_faiss(path), stamp)
            if stamp_of(path) == stamp:
                break
        else:
            raise StoreError(
                f"{os.fspath(path)!r} is being changed by another program; wait until it ends"
            )
        self.dim = int(self.index.d)
        self.record = Path(f"{os.fspath(path)}.queries")
        self.how_to_record = (
            f"hubplugin.Recorder({str(self.record)!r}).add(queries) beside each search"
        )

    def _take(self, index: faiss.Index, stamp: str) -> None:
        self.index, self.stamp, self.handler = index, stamp, handler_for(index)
        for name in ("raw", "_most_lost"):
            self.__dict__.pop(name, None)  # of the file before
        self._scale: tuple[str, IndexScale] | None = None
        self.read_anew()

    def read_anew(self) -> None:
        """Takes what lies beside the file now. What cannot be read is told by whatever needs it."""
        self._manifest: Manifest[FaissVersion] | StoreError
        try:
            self._manifest = self._find_manifest()
            if (version := self.active()) is not None:
                self.model(version)  # now: another run may replace all of it
        except StoreError as error:
            self._manifest = error

    def _find_manifest(self) -> Manifest[FaissVersion]:
        """The manifest, as the index says that it is: a run may have been killed before it wrote that down, and
        somebody may have put another index in the place of the file. Raises StoreError if no model of its offsets is
        known."""
        manifest, handler = self.folder.read_manifest(), self.handler
        if (writing := manifest.writing) is not None:
            if writing.index == self.stamp:
                return manifest.activate(writing)
            try:
                usable = writing.stamp == self.stamp and self.model(writing) is not None
            except StoreError:
                usable = False
            manifest = manifest if usable else manifest.give_up()
        if not handler.is_upgraded() or handler.holds_offsets_of(""):
            return manifest.withdraw() if manifest.active else manifest
        active, previous = manifest.active.get(""), manifest.previous.get("")
        if active is not None and handler.holds_offsets_of(active.model):
            return manifest
        retired = manifest.retired if active is None else (*manifest.retired, active)
        if previous is not None and handler.holds_offsets_of(
            previous.model
        ):  # somebody has put the old index back
            return manifest.replace(active={"": previous}, previous={}, retired=retired)
        place = self.folder.given_model
        if (model := self._load_model(place)) is not None and handler.holds_offsets_of(
            model.fingerprint
        ):
            version = FaissVersion.of(model, 0, stamp=self.stamp).replace(
                made=date_of(place)
            )
            return manifest.replace(active={"": version}, previous={}, retired=retired)
        raise self._model_error(place if active is None else self.folder.model(active))

    def _load_model(self, place: Path) -> OffsetModel | None:
        """The model in the file `place`; None if there is none. Raises StoreError if it cannot be read."""
        if kind_of(place) == "a link":
            raise StoreError(
                f"{str(place)!r} is a link, where hubplugin keeps a file; move it away"
            )
        try:
            return load(place) if place.exists() else None
        except ModelFileError as error:
            raise self._model_error(place, str(error)) from None

    def _model_error(self, place: Path, why: str = "") -> StoreError:
        if not why:
            file = repr(str(place))
            why = (
                f"{file} is the model of another index"
                if place.exists()
                else f"its model {file} is missing"
            )
        return StoreError(
            f"{os.fspath(self.path)!r} is corrected, but {why}; put the right one there, or take the correction out: "
            f"hubplugin remove {self.url}"
        )

    def read_manifest(self) -> Manifest[FaissVersion]:
        if isinstance(self._manifest, StoreError):
            raise self._manifest
        return self._manifest

    def write_manifest(self, manifest: Manifest[FaissVersion]) -> None:
        self.folder.write(self.folder.manifest, manifest.model_dump_json().encode())
        self._manifest = manifest

    def delete_manifest(self) -> None:
        self.folder.delete_file(self.folder.manifest)
        self._manifest = Manifest[FaissVersion]()

    def new_version(self, model: OffsetModel, number: int) -> FaissVersion:
        return FaissVersion.of(model, number, stamp=self.stamp)

    def read_model(self, version: FaissVersion) -> OffsetModel:
        model = self._load_model(self.folder.model(version))
        if model is not None and model.fingerprint == version.model:
            return model
        raise self._model_error(self.folder.model(version))

    def write_model(self, version: FaissVersion, model: OffsetModel) -> None:
        self.folder.write(self.folder.model(version), model.to_bytes())

    def delete_model(self, version: FaissVersion) -> None:
        self.folder.delete_file(self.folder.model(version))

    def make_room(self, version: FaissVersion) -> None:
        half_written = (
            self.read_manifest().writing == version
            and self.folder.has_offsets(version, self.count())
        )
        if not half_written:  # an amendment finds out anew which offsets are wrong
            # Offsets have their room now: a map that finds none later ends the process.
            self.folder.write(
                self.folder.offsets(version),
                np.full(self.count(), np.nan, np.float32).tobytes(),
            )

    def delete_offsets(
        self, versions: Sequence[FaissVersion], progress: Progress | None
    ) -> None:
        for version in versions:
            self.folder.delete_file(self.folder.offsets(version))

    def is_readable(self, version: FaissVersion) -> bool:
        manifest = self.read_manifest()
        return manifest.writing != version or self.folder.has_offsets(
            version, self.count()
        )

    def _acquire(self, *, settle: bool = True) -> BinaryIO:
        """The right to write, until it is closed. Raises StoreError if another run has it, or the file has changed."""
        lock = lock_folder(self.folder)
        try:
            require_unchanged(self.path, self.stamp)
            if settle:
                self.read_anew()
                self._settle()
        except BaseException:
            with contextlib.suppress(OSError):
                self.folder.delete_if_empty()
            lock.close()
            raise
        return lock

    def _settle(self) -> None:
        """Writes down what the index says, and deletes what no run needs."""
        manifest = self.read_manifest()
        if manifest != self.folder.read_manifest():
            self.write_manifest(manifest)
        self._tidy(self.clear())

    def _tidy(self, manifest: Manifest[FaissVersion]) -> None:
        writing = [] if manifest.writing is None else [manifest.writing.number]
        models = (
            version.number
            for version in (*manifest.active.values(), *manifest.previous.values())
        )
        with making(self.folder.path):
            self.folder.keep([*writing, *models], writing)

    def release(self, lock: BinaryIO) -> None:
        """Deletes what no later run can go on with, and gives the right to write back."""
        with contextlib.suppress(
            OSError, StoreError
        ):  # else it is the next run's to delete
            self._tidy(self.read_manifest())
            self.folder.delete_if_empty()
        lock.close()

    def give_up(self, previous: Manifest[FaissVersion]) -> None:
        """Puts back the manifest that was there before this run, which leaves nothing."""
        with contextlib.suppress(
            StoreError
        ):  # the disk may be full: then it is the next run's
            if previous.everything or previous.previous:
                self.write_manifest(previous)
            else:
                self.delete_manifest()

    @cached_property
    def metric(self) -> Metric:  # type: ignore[override]
        """That of the active model. Without one cosine if vectors are of unit length, as far as codes leave it, else
        dot or, for L2, euclidean; always that for L2 and exact codes.

        Codes change lengths, and by L2 similarities with them. By cosine an upgrade takes that off. What lengths unit
        vectors come out with is measured (`SPREADS`)."""
        if self._metric is not None:
            return self._metric
        if (version := self.active()) is not None:
            return version.metric
        handler = self.handler
        other, sample = (
            Metric.EUCLIDEAN if handler.euclidean else Metric.DOT,
            next(handler.scan(0, 1000), None),
        )
        refined = any(isinstance(part, faiss.IndexRefine) for part in parts(self.index))
        if sample is None or (handler.euclidean and not handler.lossy and not refined):
            return other
        lengths = np.linalg.norm(sample[0], axis=1)[
            handler.with_zeros(sample[0]).any(axis=1)
        ]
        if not len(lengths):
            return other
        if not handler.lossy:
            return Metric.COSINE if (np.abs(lengths - 1) <= UNIT).all() else other
        low, middle, high = np.quantile(lengths, [0.05, 0.5, 0.95])
        is_unit = (
            0.4 < middle < 1.6 and high - low < spread_of_unit(self.index) * middle
        )  # PQ makes them shorter
        return Metric.COSINE if is_unit else other

    @property
    def unit(self) -> bool:  # type: ignore[override]
        """Whether a correction holds only for vectors of unit length."""
        return self.metric is Metric.COSINE and not self.handler.lossy

    @property
    def maps_queries(self) -> bool:  # type: ignore[override]
        """By a linear transform before the index, so that the file stays plain Faiss."""
        return not normalises_queries(self.index)

    def _rounding(
        self,
        version: FaissVersion,
        rows: np.ndarray,
        vectors: np.ndarray,
        offsets: np.ndarray,
    ) -> np.ndarray:
        """How far from an offset lies what codes hold of it, or of one beside it, as far as it fits them (`most_lost`).
        What does not is stale: a refresh makes codes with room for it."""
        scale = self.scale(self.model(version))
        right = scale.to_index(offsets.astype(np.float64), vectors)

        def error(shift: float) -> np.ndarray:
            errors = np.abs(
                self.handler.round_offsets(right + shift, vectors, rows) - right
            )
            return np.asarray(
                np.minimum(np.nan_to_num(errors), self._most_lost)
            )  # NaN of a vector that is not finite

        errors = error(0)
        quarter = float(
            errors.mean()
        )  # of the distance between levels, where they are as far apart
        largest = np.max(
            [errors, *(error(shift * quarter) for shift in (-2, -1, 1, 2))], axis=0
        )
        return (
            np.asarray(scale.to_model(right + largest, vectors) - offsets)
            + self.precision
        )

    def scale(self, model: OffsetModel) -> IndexScale:
        """Between offsets of `model` and those that the index holds."""
        if self._scale is None or self._scale[0] != model.fingerprint:
            self._scale = model.fingerprint, IndexScale.of(self.handler, model)
        return self._scale[1]

    @cached_property
    def _most_lost(self) -> float:
        return self.handler.most_lost()

    def count(self) -> int:
        return self.handler.count

    def scan(self, field: str | None = None) -> Iterator[Batch]:
        if field is not None:
            raise StoreError(
                f"{self.url}: its targets are vectors alone, without a field {field!r}"
            )
        return self.scan_rows(0, self.count())

    @cached_property
    def raw(self) -> faiss.Index:
        """The index without offsets."""
        return self.handler.downgrade() if self.handler.is_upgraded() else self.index

    def scan_rows(self, start: int, stop: int) -> Iterator[Batch]:
        """The entries of the rows from `start` to `stop`, as the index reconstructs them, each id an `Entry`."""
        row, version = (
            start,
            None if isinstance(self._manifest, StoreError) else self.active(),
        )
        for vectors, offsets in self.handler.scan(start, block_rows(self.dim)):
            if row >= stop:
                return
            vectors = vectors[: stop - row]
            if self.metric is Metric.COSINE:
                vectors = self.handler.with_zeros(vectors)
            if self.unit and not self.handler.is_upgraded():
                require_unit(vectors, self.url, row)
            ids = [
                Entry(label)
                for label in self.handler.labels(row, row + len(vectors)).tolist()
            ]
            rows, rounding = np.arange(row, row + len(ids)), None
            for place, entry in enumerate(ids, row):
                entry.row = place
            row += len(ids)
            offsets = (
                np.full(len(ids), np.nan, np.float32)
                if offsets is None
                else offsets[: len(ids)]
            )
            if version is not None:
                offsets = (
                    self.scale(self.model(version))
                    .to_model(offsets, vectors)
                    .astype(np.float32)
                )
                rounding = partial(self._rounding, version, rows, vectors)
            yield Batch(ids, vectors, offsets, rounding=rounding)

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raises StoreError if the index cannot carry offsets, if memory has no room for what is going to be beside
        what is, or the folder has none. Asked before a gallery is fitted for an hour."""
        if not self.handler.is_upgraded():
            require_upgradable(self.handler)
        require_memory(
            self.path, 2 if self.handler.is_upgraded() else 1, "replacing the index in"
        )
        if not dry_run:
            self.folder.require()
            self.folder.require_room(4 * self.count() + os.path.getsize(self.path))

    def begin(
        self, model: OffsetModel, progress: Progress | None = None
    ) -> FaissWriting:
        """Begins to write `model`, as of every store, and tells `progress`. Raises StoreError if another run writes the
        file, or another program has changed it since it was read."""
        lock = self._acquire()
        previous = self.read_manifest()
        try:
            if not self.count():
                raise StoreError(f"{self.url} is empty; add vectors, then correct it")
            self.require_writable()
            version, found = self.start_version(model, progress)
            self._known = model
            return FaissWriting(self, model, version, found, begun=(lock, previous))
        except BaseException:
            self.give_up(previous)
            self.release(lock)
            raise

    def upgrade(
        self,
        version: FaissVersion,
        model: OffsetModel,
        offsets: np.ndarray,
        labelled: LabelledQueries | None = None,
        force: bool = False,
    ) -> None:
        """Replaces the file by the upgraded index. The file is as it was if an error is raised.

        Args:
            version: the version of `model`.
            model: gives the offsets.
            offsets: as the index holds them [n].
            labelled: queries with known answers, which the index is tried with, too.
            force: only warn where the index finds too little.

        Raises:
            CorrectionRefused: the upgraded index finds too little.
        """
        handler, scale = handler_for(self.raw), self.scale(model)
        upgraded = upgrade_by(handler, offsets, model, scale, force)
        if not is_exact(handler):
            require_answers(self.raw, upgraded, model, scale, labelled, force)
        self._replace(upgraded, version)

    def _replace(self, index: faiss.Index, version: FaissVersion | None) -> None:
        """Puts `index`, with the offsets of `version` or without any, in the place of the file: the one step from which
        on all is new."""
        folder = self.folder
        folder.delete_file(folder.new_index)  # of a run that was killed
        write_index_file(folder.new_index, index, folder.index)
        stamp = stamp_of(folder.new_index)  # which a new name does not change
        if (
            version is not None
            and (manifest := self.require_owner(version)).writing is not None
        ):
            self.write_manifest(manifest.replace(writing=version.replace(index=stamp)))
        with making(folder.index):
            flush_names(
                folder.path, folder.index.parent
            )  # the index must not be there without its model
            require_unchanged(self.path, self.stamp)
            os.replace(folder.new_index, folder.index)
        failed = flush_names(folder.index.parent)
        self._take(index, stamp)
        try:
            self._settle() if version is not None else folder.delete()
        except (OSError, StoreError) as error:
            failed = f"what lies in {str(folder.path)!r} could not be brought up to date: {error}"
        if failed:
            warnings.warn(f"{str(folder.index)!r} is written; {failed}", stacklevel=4)

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        index = self.raw if raw else self.index
        try:
            scores, ids = index.search(np.ascontiguousarray(queries, np.float32), k)
        except (RuntimeError, MemoryError) as error:
            raise StoreError(
                f"{self.url}: Faiss cannot search it: {reason(error)}"
            ) from None
        hits = ids >= 0
        return Hits(
            *(
                [row[hit].tolist() for row, hit in zip(values, hits, strict=True)]
                for values in (ids, scores)
            )
        )

    def notes(self) -> Sequence[str]:
        notes = [ADD_BEHIND_MAP] if is_mapped(self.index) else []
        tells_no_lengths = (
            self.handler.lossy and spread_of_unit(self.index) > SPREADS["scalar"]
        )
        if self._metric is None and self.metric is Metric.COSINE and tells_no_lengths:
            other = "euclidean" if self.handler.euclidean else "dot"
            notes.append(
                "cosine is assumed, since these codes do not tell whether lengths of vectors differ; if they do, and "
                f"matter, remove this correction and apply with metric={other}"
            )
        return notes

    def explain(self, asked: np.ndarray | Id, k: int = 10) -> Explanation:
        """The same for every query: `asked` and `k` are what they always were."""
        extra = self.handler.extra_dimensions()
        if not extra:
            raise StoreError(
                f"{self.url}: no correction is active; run `hubplugin apply` first"
            )
        appended = [
            float(str(component)) for component in extra[0].query.astype(np.float32)
        ]
        scores = (
            "|q - t|^2 - 2 offset, plus a constant"
            if extra[0].euclidean
            else "similarity + offset"
        )
        mapped = is_mapped(self.index)
        first = "maps q by a linear transform and then" if mapped else "itself"
        text = (
            "Plain Faiss, in any language, searches this file corrected: read_index, then search(q, k) with queries\n"
            f"of {self.dim} components as before. The index {first} turns q into [q, {str(appended)[1:-1]}], whose\n"
            f"extra components meet those that store each target's offset. A score is {scores}."
        )
        text += f"\n{ADD_BEHIND_MAP}" if mapped else ""
        return Explanation(text, {"dim": self.dim, "appended": appended})

    def remove(self, progress: Progress | None = None) -> None:
        """The model is not needed: it may be missing or damaged."""
        if not self.handler.is_upgraded() and not self.folder.path.is_dir():
            return
        lock = self._acquire(settle=False)
        try:
            if self.handler.is_upgraded():
                require_memory(self.path, 1, "replacing the index in")
                self._replace(self.raw, None)
            with making(self.folder.path):
                self.folder.delete()
            self._manifest = Manifest[FaissVersion]()
        finally:
            self.release(lock)

    def shards(self, count: int | None) -> list[FaissShard]:
        """Ranges of about as many rows each. The machines that read them see the same file system."""
        rows, url = (
            self.count(),
            f"faiss:{self.path.absolute()}?metric={self.metric.value}",
        )
        cuts = [
            (start // PAGE * PAGE, stop if stop == rows else stop // PAGE * PAGE)
            for start, stop in even_ranges(rows, count)
        ]
        return [
            FaissShard(
                f"{self.url}, shard {number} (from row {start} on)",
                url,
                self.stamp,
                start,
                stop,
            )
            for number, (start, stop) in enumerate(cuts)
            if stop > start
        ]


def open_store(
    path: str | os.PathLike[str], *, metric: str | Metric | None = None
) -> FaissStore:
    """An index file as a store, for every job: `hubplugin.apply(store, bank)`, or a fitted model in place of the bank.

    A job replaces the file in one step. A kill at any moment leaves the old or the new one whole, and running the job
    again finishes. The file is read into memory, which must have room for it twice where it is corrected, and three
    times where it is corrected already.

    Args:
        path: the index file; what belongs to it lies beside it, for photos.faiss in the folder photos.faiss.hub.
        metric: overrules what the index looks like: "cosine" if its vectors are of unit length, also as codes leave
            them, else "dot", or "euclidean" for L2. For L2 it is "euclidean", too, where codes change no lengths.

    Raises:
        StoreError: there is no such file, memory has no room for it, Faiss cannot read it, or its type cannot carry
            offsets.
        InputError: the metric is none.
    """
    return FaissStore(path, None if metric is None else Metric.parse(metric))


def read_index(path: str | os.PathLike[str]) -> tuple[faiss.Index, OffsetModel | None]:
    """Reads the index in the file `path`, and its model.

    Returns:
        The index, and the model that its offsets are from; None if they are from no model or it is not upgraded.

    Raises:
        StoreError: Faiss cannot read the file, or its model is missing or belongs to another index.
    """
    store = FaissStore(path)
    version = store.active()
    return store.index, None if version is None else store.model(version)


def open_url(url: str) -> FaissStore:
    """The store behind `faiss:PATH`, or `faiss:PATH?metric=dot`, which overrules what the index looks like.

    Raises StoreError if there is no such file, or Faiss cannot read it, or its type cannot carry offsets.
    """
    path, _, query = url.removeprefix("faiss:").partition("?")
    if path.startswith("//") and not os.path.exists(
        path
    ):  # faiss://FILE, as other URLs are written
        path = path[2:]
    options = parse_qs(query)
    metric = options.pop("metric", [None])[0]
    if options:
        raise InputError(
            f"{without_secrets(url)!r}: unknown option {next(iter(options))!r}; the only one is metric"
        )
    return open_store(path, metric=metric)


class FaissWriting(Writing):
    """The offsets of `version`, of `model`, for some `rows` of `store`, all by default, on their way into it.

    begun: the right to write, which goes with it, and the manifest to put back where it comes to nothing; None for a
    part of what another process has begun.
    """

    def __init__(
        self,
        store: FaissStore,
        model: OffsetModel,
        version: FaissVersion,
        found: Found,
        *,
        begun: tuple[BinaryIO, Manifest[FaissVersion]] | None = None,
        rows: range | None = None,
    ):
        self._store, self._model, self._version, self.found, self._begun = (
            store,
            model,
            version,
            found,
            begun,
        )
        self._release = (
            None if begun is None else weakref.finalize(self, begun[0].close)
        )
        self._offsets = store.folder.map_offsets(version, store.count())
        self._rows = range(store.count()) if rows is None else rows
        self.takes_all = (
            found == "active"
        )  # codes are made anew, and would round what is rounded already

    def scan(self) -> Iterator[Batch]:
        missing = np.flatnonzero(
            np.isnan(self._offsets[self._rows.start : self._rows.stop])
        )
        row = self._rows.start + int(missing[0]) if len(missing) else self._rows.stop
        for batch in self._store.scan_rows(row, self._rows.stop):
            if self.found != "active":
                written = self._store.scale(self._model).to_model(
                    self._offsets[rows_of(batch)], batch.vectors
                )
                batch = replace(batch, offsets=written.astype(np.float32))
            yield batch

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        self._offsets[rows_of(batch)] = self._store.scale(self._model).to_index(
            offsets, batch.vectors
        )

    def wait(self) -> None:
        self._offsets.flush()

    def share(self) -> Share:
        store = self._store
        return FaissShare(
            store.shards(1)[0].url, store.stamp, self._version, self.found
        )

    def activate(self) -> None:
        assert self._begun is not None
        if self.found == "active" and self.wrong == 0:
            return  # all were right as they were
        offsets = np.asarray(self._offsets)
        if missing := int(np.isnan(offsets).sum()):
            raise StoreError(
                f"{self._store.url}: {missing} targets have no offset yet; run apply again"
            )
        try:
            force = self.forced or self.found == "active"
            self._store.upgrade(
                self._version, self._model, offsets, self.labelled, force
            )
        except HubpluginError:
            # Nothing of it would serve a later run, and the disk may be full.
            self._store.give_up(self._begun[1].replace(writing=None))
            raise

    def close(self) -> None:
        if (
            self._begun is not None
            and self._release is not None
            and self._release.alive
        ):
            self._store.release(self._begun[0])
            self._release.detach()


PAGE = 1024
"""Offsets on a page of memory: they gather in a mapped file, of which two machines must not write one page."""


@dataclass(frozen=True)
class FaissShard(StoreShard):
    """The rows of an index file from `start` to `stop`. stamp: what the file system says of the store."""

    name: str
    url: str
    stamp: str
    start: int
    stop: int

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.stop - self.start

    def scan(self) -> Iterator[Batch]:
        yield from _open_once(self.url, self.stamp).scan_rows(self.start, self.stop)


@dataclass(frozen=True)
class FaissShare(Share):
    """The writing of `version` into an index file, beside which it lies."""

    url: str
    stamp: str
    version: FaissVersion
    found: Found

    def join(self, shard: StoreShard) -> tuple[Store, Writing, OffsetModel]:
        assert isinstance(shard, FaissShard)
        store = _open_once(self.url, self.stamp)
        store.read_anew()
        store.require_owner(self.version)
        model = store.model(self.version)
        return (
            store,
            FaissWriting(
                store,
                model,
                self.version,
                self.found,
                rows=range(shard.start, shard.stop),
            ),
            model,
        )


@lru_cache(maxsize=1)
def _open_once(url: str, stamp: str) -> FaissStore:
    """Read once in a process as long as the file stays as it is."""
    store = open_url(url)
    if store.stamp != stamp:
        raise StoreError(
            f"{store.url}: the file was changed by another program meanwhile; run it again"
        )
    return store
