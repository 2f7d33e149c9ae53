"""A Faiss file as a `Store`: URL `faiss:photos.faiss`; offsets on their way into it, by one process or by several."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from urllib.parse import parse_qs

import faiss
import numpy as np

from hubplugin.abilities import Explanation, Share, StoreShard
from hubplugin.errors import HubpluginError, InputError, ModelFileError, StoreError
from hubplugin.executors import even_ranges
from hubplugin.jobs.write import UNIT
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, load
from hubplugin.registry import without_secrets
from hubplugin.store import Batch, Correction, Found, Hits, Id, Store, Writing, require_ungrouped
from hubplugin.vectors import Progress
from hubplugin_faiss.calibration import Asked, is_exact, spread_of_unit
from hubplugin_faiss.files import making, require_memory, require_unchanged, stamp_of, write_index_file
from hubplugin_faiss.folder import HubFolder, Run, date_of
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.base import IndexScale, block_rows, is_mapped, most_lost, reason
from hubplugin_faiss.index import downgrade, normalises_queries, require_unit, require_upgradable, upgraded_by
from hubplugin_faiss.index_file import Read, read_file

ADD_BEHIND_MAP = (
    "a query map stands before the index, which plain Faiss would put what it adds through, too: add with "
    "hubplugin_faiss.add, or behind it, to faiss.downcast_index(index.index), and set index.ntotal"
)


class Entry(int):
    """An id of the index that remembers in which row it was read: ids need not be unique."""

    row: int


class FaissStore(Store):
    """One index file. Its queries are recorded beside it: photos.faiss.queries.

    metric: overrules what the index looks like. `index`, `handler`, `stamp`: as the file was when it was read; a `run`
    begins only if it is still so.
    """

    def __init__(self, path: str | os.PathLike[str], metric: Metric | None = None):
        self.path, self.url, self.folder = Path(path), f"faiss:{os.fspath(path)}", HubFolder(path)
        self._given_metric = metric
        self._assumed = False  # whether `metric` was found to be cosine though the codes do not tell
        self._take(read_file(path))
        self.dim = int(self.index.d)
        self.record = Path(f"{os.fspath(path)}.queries")
        self.how_to_record = f"hubplugin.Recorder({str(self.record)!r}).add(queries) beside each search"

    def _take(self, read: Read) -> None:
        self._read = read
        self.index, self.stamp, self.handler = read.index, read.stamp, handler_for(read.index)
        for of_file_before in ("raw", "_most_lost"):
            self.__dict__.pop(of_file_before, None)
        self._scales: dict[str, IndexScale] = {}

    @cached_property
    def metric(self) -> Metric:  # type: ignore[override]
        """cosine if vectors are of unit length, else dot or, for L2, euclidean; always that for L2 and exact codes.

        Codes change lengths, and by L2 similarities with them. By cosine an upgrade takes that off. What lengths and
        medians unit vectors come out with is measured (benchmarks/faiss_lengths.py)."""
        if self._given_metric is not None:
            return self._given_metric
        model = self.model()
        if model is not None:
            return model.metric
        euclidean, lossy = self.handler.euclidean, self.handler.lossy
        other, sample = Metric.EUCLIDEAN if euclidean else Metric.DOT, next(self.handler.scan(0, 1000), None)
        if sample is None or (euclidean and not self.handler.lossy_inside):
            return other
        lengths = np.linalg.norm(sample[0], axis=1)
        lengths = lengths[self.handler.with_zeros(sample[0]).any(axis=1)]
        if not len(lengths):
            return other
        if lossy:  # of unit vectors PQ makes shorter ones
            low, middle, high = np.quantile(lengths, [0.05, 0.5, 0.95])
            most, told = spread_of_unit(self.index)
            if not (0.4 < middle < 1.6 and high - low < most * middle):
                return other
            self._assumed = not told
            return Metric.COSINE
        return Metric.COSINE if (np.abs(lengths - 1) <= UNIT).all() else other

    @property
    def unit(self) -> bool:  # type: ignore[override]
        """Whether a correction holds only for vectors of unit length."""
        return self.metric is Metric.COSINE and not self.handler.lossy

    @property
    def maps_queries(self) -> bool:  # type: ignore[override]
        """By a linear transform before the index, so that the file stays plain Faiss."""
        return not normalises_queries(self.index)

    def rounding(self, batch: Batch, offsets: np.ndarray) -> np.ndarray:
        """How far from an offset lies what codes hold of it, or of one beside it, as far as it fits them (`most_lost`).
        What does not is stale: a refresh makes codes with room for it."""
        model = self.model()
        if model is None:
            return np.zeros(len(offsets))
        scale, handler, most = self.scale(model), self.handler, self._most_lost
        rows = np.array([entry.row for entry in batch.ids if isinstance(entry, Entry)], np.int64)
        right = scale.stored(offsets, batch.vectors)

        def lost(beside: float) -> np.ndarray:
            held = handler.rounded((right + beside).astype(np.float32), rows)
            away = np.nan_to_num(np.abs(held - right))  # NaN of a vector that is not finite
            return np.asarray(np.minimum(away, most))

        of_own = lost(0)
        quarter = float(of_own.mean())  # of the distance between levels, where they are as far apart
        away = np.max([of_own, *(lost(near * quarter) for near in (-2, -1, 1, 2))], axis=0)
        return np.asarray(scale.of_model(right + away, batch.vectors) - offsets) + self.precision

    @cached_property
    def _most_lost(self) -> float:
        return most_lost(self.handler, np.zeros(1))

    def count(self) -> int:
        return self.handler.count

    def scan(self, group_by: str | None = None) -> Iterator[Batch]:
        require_ungrouped(self, group_by)
        return self.scan_rows(0, self.count())

    @cached_property
    def raw(self) -> faiss.Index:
        """The index without offsets."""
        return downgrade(self.index) if self.handler.is_upgraded() else self.index

    def scale(self, model: OffsetModel) -> IndexScale:
        """Between offsets of `model` and those that the index holds."""
        if model.fingerprint not in self._scales:
            self._scales[model.fingerprint] = IndexScale.of(self.handler, model)
        return self._scales[model.fingerprint]

    def scan_rows(self, start: int, stop: int) -> Iterator[Batch]:
        """The entries of the rows from `start` to `stop`, as the index reconstructs them, each id an `Entry`."""
        active, row = self._read.model, start
        for vectors, offsets in self.handler.scan(start, block_rows(self.dim)):
            if row >= stop:
                return
            vectors = vectors[: stop - row]
            if self.metric is Metric.COSINE:
                vectors = self.handler.with_zeros(vectors)
            offsets = None if offsets is None else offsets[: stop - row]
            if self.unit and not self.handler.is_upgraded():
                require_unit(vectors, self.url, row)
            ids = [Entry(label) for label in self.handler.labels(row, row + len(vectors)).tolist()]
            for place, entry in enumerate(ids, row):
                entry.row = place
            row += len(ids)
            known = np.full(len(vectors), np.nan, np.float32) if offsets is None else offsets
            if isinstance(active, OffsetModel):
                known = self.scale(active).of_model(known, vectors).astype(np.float32)
            yield Batch(ids, vectors, known)

    def stored_offsets(self) -> np.ndarray:
        """The offsets in an upgraded index, as they are stored: float32 [n]."""
        blocks = self.handler.scan(0, block_rows(self.dim))
        return np.concatenate([offsets for _, offsets in blocks if offsets is not None])

    def shards(self, count: int | None) -> list[FaissShard]:
        """Ranges of rows. The machines that read them see the same file system."""
        return divided(self, count)

    def model(self) -> OffsetModel | None:
        """The model of the offsets in the index, None if it is not upgraded. Raises StoreError if it is missing."""
        return self._read.require_model()

    def correction(self) -> Correction | None:
        active = self.model()
        if active is not None:
            return Correction(active, True, self._read.made)
        half = self.half_written()
        return None if half is None else Correction(half, False, date_of(self.folder.pending_model))

    def half_written(self) -> OffsetModel | None:
        """The model whose offsets are on their way into the index as it is now."""
        return self.folder.half_written(self.handler.count, self.stamp)

    def previous(self) -> OffsetModel | None:
        """The model before the active one; None if there is none. Raises StoreError if it cannot be read."""
        active, models = self.model(), self.folder.models()
        if active is None or not any(model.fingerprint == active.fingerprint for _, model in models):
            return None
        others = (model for place, model in models if place != self.folder.pending_model)
        behind = next((model for model in others if model.fingerprint != active.fingerprint), None)
        if behind is None and isinstance(error := self.folder.read_model(self.folder.previous), ModelFileError):
            raise StoreError(str(error))
        return behind

    def run(self) -> Run:
        """The right to write beside the file. Raises StoreError if another run has it, or the file has changed."""
        run = Run(self.folder)
        try:
            require_unchanged(self.path, self.stamp)
            run.settle(self.handler)
        except BaseException:
            run.close()
            raise
        return run

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raises StoreError if the index cannot carry offsets, if memory has no room for what is going to be beside
        what is, or the folder has none. Asked before a gallery is fitted for an hour."""
        if not self.handler.is_upgraded():
            require_upgradable(self.handler)
        require_memory(self.path, 2 if self.handler.is_upgraded() else 1, "replacing the index in")
        if not dry_run:
            self.folder.require()
            self.folder.require_room(4 * self.count() + os.path.getsize(self.path))

    def begin(self, model: OffsetModel, progress: Progress | None = None) -> FaissWriting:
        return FaissWriting.begun(self, model)

    def upgrade(self, run: Run, model: OffsetModel, offsets: np.ndarray, asked: Asked) -> None:
        """Puts the index with `offsets` [n] of `model`, as they are stored, in the place of the file.

        Raises CorrectionRefused, and the file is as it was, if it finds too little, also of what is `asked`.
        """
        raw, scale = self.raw, self.scale(model)
        made = upgraded_by(raw, offsets, model, scale, asked.force)
        if not is_exact(raw):
            asked.require_found(raw, made, model, scale)
        self._replace(run, made, model)

    def _replace(self, run: Run, index: faiss.Index, model: OffsetModel | None) -> None:
        write_index_file(self.folder.new_index, index, self.folder.index)
        stamp = stamp_of(self.folder.new_index)  # which a new name does not change
        run.switch(lambda: require_unchanged(self.path, self.stamp), remove=model is None)
        self._take(Read(index, model, date_of(self.folder.model), stamp))

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        index = self.raw if raw else self.index
        try:
            scores, ids = index.search(np.ascontiguousarray(queries, np.float32), k)
        except (RuntimeError, MemoryError) as error:
            raise StoreError(f"{self.url}: Faiss cannot search it: {reason(error)}") from None
        found = ids >= 0
        return Hits(
            [row[keep].tolist() for row, keep in zip(ids, found, strict=True)],
            [row[keep].tolist() for row, keep in zip(scores, found, strict=True)],
        )

    def notes(self) -> Sequence[str]:
        notes = [ADD_BEHIND_MAP] if is_mapped(self.index) else []
        if self._assumed:
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
            raise StoreError(f"{self.url}: no correction is active; run `hubplugin apply` first")
        appended = [float(str(each)) for each in extra[0].query.astype(np.float32)]
        scores = "|q - t|^2 - 2 offset, plus a constant" if extra[0].euclidean else "similarity + offset"
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
        with self.run() as run:
            if self.handler.is_upgraded():
                require_memory(self.path, 1, "replacing the index in")
                run.begin(None, self.count(), self.stamp)
                self._replace(run, self.raw, None)
            else:
                with making(self.folder.path):
                    self.folder.delete()


def open_store(path: str | os.PathLike[str], *, metric: str | Metric | None = None) -> FaissStore:
    """An index file as a store, for every job: `hubplugin.apply(store, bank)`, or a fitted model in place of the bank.

    A job replaces the file in one step. A kill at any moment leaves the old or the new one whole, and running the job
    again finishes. The file is read into memory, which must have room for it twice where it is corrected, and three
    times where it is corrected already.

    Args:
        path: the index file; what belongs to it lies beside it, for photos.faiss in the folder photos.faiss.hub.
        metric: overrules what the index looks like: "cosine" if its vectors are of unit length, else "dot", or
            "euclidean" for L2. For L2 it is "euclidean", too, where codes change no lengths.

    Raises:
        StoreError: there is no such file, memory has no room for it, Faiss cannot read it, or its type cannot carry
            offsets.
        InputError: the metric is none.
    """
    return FaissStore(path, None if metric is None else Metric.parse(metric))


def open_url(url: str) -> FaissStore:
    """The store behind `faiss:PATH`, or `faiss:PATH?metric=dot`, which overrules what the index looks like.

    Raises StoreError if there is no such file, or Faiss cannot read it, or its type cannot carry offsets.
    """
    path, _, query = url.removeprefix("faiss:").partition("?")
    if path.startswith("//") and not os.path.exists(path):  # faiss://FILE, as other URLs are written
        path = path[2:]
    options = parse_qs(query)
    metric = options.pop("metric", [None])[0]
    if options:
        raise InputError(f"{without_secrets(url)!r}: unknown option {next(iter(options))!r}; the only one is metric")
    return open_store(path, metric=metric)


class FaissWriting(Writing):
    """The offsets of `model` for some `rows` of `store`, all by default, on their way into it.

    run: the one that began the writing, and alone activates it; it is closed with the writing.
    """

    found: Found

    def __init__(
        self,
        store: FaissStore,
        model: OffsetModel,
        offsets: np.memmap,
        rows: range | None = None,
        run: Run | None = None,
    ):
        self._store, self._model, self._offsets, self._run = store, model, offsets, run
        self._rows = range(store.count()) if rows is None else rows
        active = store.model()
        self.found = "active" if active is not None and active.fingerprint == model.fingerprint else "nothing"
        self.takes_all = self.found == "active"  # codes are made anew, and would round what is rounded already

    @classmethod
    def begun(cls, store: FaissStore, model: OffsetModel) -> FaissWriting:
        """Raises StoreError if another run writes the file, or another program has changed it since it was read."""
        run, rows = store.run(), store.count()
        try:
            active, half = store.model(), store.half_written()
            if not rows:
                raise StoreError(f"{store.url} is empty; add vectors, then correct it")
            store.require_writable()
            amended = active is not None and active.fingerprint == model.fingerprint
            again = not amended and half is not None and half.fingerprint == model.fingerprint
            if not again:  # an amendment finds out anew which offsets are wrong
                run.begin(model, rows, store.stamp)
            writing = cls(store, model, store.folder.pending_offsets(rows), run=run)
        except BaseException:
            run.close()
            raise
        if again:
            writing.found = "half-written"
        return writing

    @classmethod
    def joined(cls, store: FaissStore, fingerprint: str, rows: range) -> tuple[FaissWriting, OffsetModel]:
        """The part for some rows of a writing that another process has begun, and its model."""
        folder = store.folder
        try:
            offsets = folder.pending_offsets(store.count())  # first: a run that begins anew has its own
            model = load(folder.pending_model)
        except HubpluginError:
            model = None
        claim = folder.claimed()
        if model is None or claim is None or not (claim.model == model.fingerprint == fingerprint):
            raise StoreError(f"{store.url}: another run has begun since, and this one stops; the index is unchanged")
        return cls(store, model, offsets, rows), model

    def scan(self) -> Iterator[Batch]:
        missing = np.flatnonzero(np.isnan(self._offsets[self._rows.start : self._rows.stop]))
        row = self._rows.start + int(missing[0]) if len(missing) else self._rows.stop
        for batch in self._store.scan_rows(row, self._rows.stop):
            own = self._offsets[row : row + len(batch.ids)]
            row += len(batch.ids)
            held = batch.offsets if self.found == "active" else np.nan
            offsets = np.where(np.isnan(own), held, self._store.scale(self._model).of_model(own, batch.vectors))
            yield replace(batch, offsets=offsets.astype(np.float32))

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        rows = [entry.row for entry in batch.ids if isinstance(entry, Entry)]
        self._offsets[rows] = self._store.scale(self._model).stored(offsets, batch.vectors)

    def settle(self) -> None:
        self._offsets.flush()

    def share(self) -> Share:
        return FaissShare(url_of(self._store), self._store.stamp, self._model.fingerprint)

    def activate(self) -> None:
        assert self._run is not None
        offsets = np.asarray(self._offsets)
        missing = np.isnan(offsets)
        if self.found == "active":
            offsets = np.where(missing, self._store.stored_offsets(), offsets)
        elif missing.any():
            raise StoreError(f"{self._store.url}: {missing.sum()} targets have no offset yet; run apply again")
        amends = not missing.all() if self.wrong is None else self.wrong > 0
        try:
            if self.found != "active" or amends:  # else all were right as they were
                asked = Asked(self.answered, self.forced or self.found == "active")
                self._store.upgrade(self._run, self._model, offsets, asked)
        except HubpluginError:
            self._run.forget()  # nothing of it would serve a later run, and the disk may be full
            raise

    def close(self) -> None:
        if self._run is not None:
            if self.found == "active":
                self._run.forget()
            self._run.close()


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
        yield from _opened(self.url, self.stamp).scan_rows(self.start, self.stop)


@dataclass(frozen=True)
class FaissShare(Share):
    """The writing of the model called `fingerprint` into an index file, beside which it lies."""

    url: str
    stamp: str
    fingerprint: str

    def joined(self, shard: StoreShard) -> tuple[Store, Writing, OffsetModel]:
        assert isinstance(shard, FaissShard)
        store = _opened(self.url, self.stamp)
        return store, *FaissWriting.joined(store, self.fingerprint, range(shard.start, shard.stop))


def divided(store: FaissStore, count: int | None) -> list[FaissShard]:
    """Ranges of about as many rows each."""
    rows, url = store.count(), url_of(store)
    cuts = [
        (start // PAGE * PAGE, stop if stop == rows else stop // PAGE * PAGE)
        for start, stop in even_ranges(rows, count)
    ]
    return [
        FaissShard(f"{store.url}, shard {number} (from row {start} on)", url, store.stamp, start, stop)
        for number, (start, stop) in enumerate(cuts)
        if stop > start
    ]


def url_of(store: FaissStore) -> str:
    """What another process opens the same file by."""
    return f"faiss:{store.path.absolute()}?metric={store.metric.value}"


@lru_cache(maxsize=1)
def _opened(url: str, stamp: str) -> FaissStore:
    """Read once in a process as long as the file stays as it is."""
    store = open_url(url)
    if store.stamp != stamp:
        raise StoreError(f"{store.url}: the file was changed by another program meanwhile; run it again")
    return store
