"""A Faiss file as a `Store`: URL `faiss:photos.faiss`; offsets on their way into it, by one process or by several."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np

from hubplugin.abilities import Explanation, Share, StoreShard
from hubplugin.errors import HubpluginError, InputError, StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, load
from hubplugin.store import Batch, Correction, Found, Hits, Id, Store, Writing, require_ungrouped
from hubplugin.vectors import Progress, VectorLike, even_ranges
from hubplugin_faiss.calibration import Asked
from hubplugin_faiss.folder import Run, date_of
from hubplugin_faiss.handlers.base import is_mapped, reason
from hubplugin_faiss.index import normalises_queries, require_upgradable
from hubplugin_faiss.index_file import Entry, IndexFile

ADD_BEHIND_MAP = (
    "a query map stands before the index, which plain Faiss would put what it adds through, too: add with "
    "hubplugin_faiss.add, or behind it, to faiss.downcast_index(index.index), and set index.ntotal"
)


class FaissStore(Store):
    """One index file. Its queries are recorded beside it: photos.faiss.queries."""

    def __init__(self, path: str | os.PathLike[str], metric: Metric | None = None, vectors: VectorLike | None = None):
        self._file = IndexFile(path, metric, vectors)
        self.url, self.dim = self._file.url, int(self._file.index.d)
        self.record = Path(f"{os.fspath(path)}.queries")
        self.how_to_record = f"hubplugin.Recorder({str(self.record)!r}).add(queries) beside each search"

    @property
    def metric(self) -> Metric:  # type: ignore[override]
        """As `IndexFile` finds it."""
        return self._file.metric

    def rounding(self, batch: Batch, offsets: np.ndarray) -> np.ndarray:
        """Four times what codes lose of an offset, or of one beside it. Those of a version that was returned to had
        rounded it before, and up to twice that loss was seen of what is rounded twice, under ten types."""
        model = self._file.model()
        if model is None:
            return np.zeros(len(offsets))
        scale, handler = self._file.scale(model), self._file.handler
        rows = np.array([entry.row for entry in batch.ids if isinstance(entry, Entry)], np.int64)

        def lost(tried: np.ndarray) -> np.ndarray:
            held = handler.rounded(scale.stored(tried, batch.vectors).astype(np.float32), rows)
            away = np.abs(scale.of_model(held, batch.vectors) - tried)
            return np.asarray(np.nan_to_num(away))  # NaN of a vector that is not finite

        of_own = lost(offsets)
        quarter = float(of_own.mean())  # of the distance between levels, where they are as far apart
        most = np.max([of_own, *(lost(offsets + near * quarter) for near in (-2, -1, 1, 2))], axis=0)
        return np.asarray(4 * most)

    @property
    def unit(self) -> bool:  # type: ignore[override]
        return self._file.unit

    @property
    def maps_queries(self) -> bool:  # type: ignore[override]
        """By a linear transform before the index, so that the file stays plain Faiss."""
        return not normalises_queries(self._file.index)

    def count(self) -> int:
        return self._file.handler.count

    def scan(self, group_by: str | None = None) -> Iterator[Batch]:
        require_ungrouped(self, group_by)
        return self._file.scan()

    def shards(self, count: int | None) -> list[FaissShard]:
        """Ranges of rows. The machines that read them see the same file system."""
        return divided(self._file, count)

    @property
    def stamp(self) -> str:
        return self._file.stamp

    def scan_rows(self, start: int, stop: int) -> Iterator[Batch]:
        """`scan` of some rows."""
        return self._file.scan(start, stop)

    def joined(self, fingerprint: str, rows: range) -> tuple[FaissWriting, OffsetModel]:
        """The part for some rows of a writing that another process has begun, and its model."""
        return FaissWriting.joined(self._file, fingerprint, rows)

    def correction(self) -> Correction | None:
        active = self._file.model()
        if active is not None:
            return Correction(active, True, self._file.made)
        half = self._file.half_written()
        return None if half is None else Correction(half, False, date_of(self._file.folder.pending_model))

    def previous(self) -> OffsetModel | None:
        return self._file.previous()

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Before an hour of fitting it is known whether memory has room for the index that is to be."""
        self._file.require_memory()

    def begin(self, model: OffsetModel, progress: Progress | None = None) -> FaissWriting:
        return FaissWriting.begun(self._file, model)

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        index = self._file.raw if raw else self._file.index
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
        notes = [ADD_BEHIND_MAP] if is_mapped(self._file.index) else []
        if self._file.assumed:
            other = "euclidean" if self._file.handler.euclidean else "dot"
            notes.append(
                "cosine is assumed, since these codes do not tell whether lengths of vectors differ; if they do, and "
                f"matter, remove this correction and apply with metric={other}"
            )
        return notes

    def explain(self, asked: np.ndarray | Id, k: int = 10) -> Explanation:
        """The same for every query: `asked` and `k` are what they always were."""
        extra = self._file.handler.extra_dimensions()
        if not extra:
            raise StoreError(f"{self.url}: no correction is active; run `hubplugin apply` first")
        appended = [float(str(each)) for each in extra[0].query.astype(np.float32)]
        scores = "|q - t|^2 - 2 offset, plus a constant" if extra[0].euclidean else "similarity + offset"
        mapped = is_mapped(self._file.index)
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
        if not self._file.handler.is_upgraded() and not self._file.folder.path.is_dir():
            return
        with self._file.run() as run:
            if self._file.handler.is_upgraded():
                self._file.downgrade(run)
            else:
                run.delete()


def open_store(
    path: str | os.PathLike[str], *, metric: str | Metric | None = None, vectors: VectorLike | None = None
) -> FaissStore:
    """An index file as a store, for every job: `hubplugin.apply(store, bank)`, or a fitted model in place of the bank.

    A job replaces the file in one step. A kill at any moment leaves the old or the new one whole, and running the job
    again finishes. The file is read into memory, which must have room for it twice where it is corrected, and three
    times where it is corrected already.

    Args:
        path: the index file; what belongs to it lies beside it, for photos.faiss in the folder photos.faiss.hub.
        metric: overrules what the index looks like: "cosine" if its vectors are of unit length, else "dot", or
            "euclidean" for L2. For L2 it is "euclidean", too, where codes change no lengths.
        vectors: the originals [ntotal, d], as in `upgrade`.

    Raises:
        StoreError: there is no such file, memory has no room for it, Faiss cannot read it, or its type cannot carry
            offsets.
        InputError: the metric or the vectors do not suit it.
    """
    return FaissStore(path, None if metric is None else Metric.parse(metric), vectors)


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
        raise InputError(f"{url!r}: unknown option {next(iter(options))!r}; the only one is metric")
    return open_store(path, metric=metric)


class FaissWriting(Writing):
    """The offsets of `model` for some `rows` of `file`, all by default, on their way into it.

    run: the one that began the writing, and alone activates it; it is closed with the writing.
    """

    found: Found

    def __init__(
        self,
        file: IndexFile,
        model: OffsetModel,
        offsets: np.memmap,
        rows: range | None = None,
        run: Run | None = None,
    ):
        self._file, self._model, self._offsets, self._run = file, model, offsets, run
        self._rows = range(file.handler.count) if rows is None else rows
        active = file.model()
        self.found = "active" if active is not None and active.fingerprint == model.fingerprint else "nothing"
        self.takes_all = self.found == "active"  # codes are made anew, and would round what is rounded already

    @classmethod
    def begun(cls, file: IndexFile, model: OffsetModel) -> FaissWriting:
        """Raises StoreError if another run writes the file, or another program has changed it since it was read."""
        run, rows = file.run(), file.handler.count
        try:
            active, half = file.model(), file.half_written()
            if not file.handler.is_upgraded():
                require_upgradable(file.handler)
            if not rows:
                raise StoreError(f"{file.url} is empty; add vectors, then correct it")
            file.require_memory()
            amended = active is not None and active.fingerprint == model.fingerprint
            again = not amended and half is not None and half.fingerprint == model.fingerprint
            if not again:  # an amendment finds out anew which offsets are wrong
                run.begin(model, rows, file.stamp)
            writing = cls(file, model, file.folder.pending_offsets(rows), run=run)
        except BaseException:
            run.close()
            raise
        if again:
            writing.found = "half-written"
        return writing

    @classmethod
    def joined(cls, file: IndexFile, fingerprint: str, rows: range) -> tuple[FaissWriting, OffsetModel]:
        """The part for some rows of a writing that another process has begun, and its model."""
        folder = file.folder
        try:
            offsets = folder.pending_offsets(file.handler.count)  # first: a run that begins anew has its own
            model = load(folder.pending_model)
        except HubpluginError:
            model = None
        claim = folder.claimed()
        if model is None or claim is None or not (claim.model == model.fingerprint == fingerprint):
            raise StoreError(f"{file.url}: another run has begun since, and this one stops; the index is unchanged")
        return cls(file, model, offsets, rows), model

    def scan(self) -> Iterator[Batch]:
        missing = np.flatnonzero(np.isnan(self._offsets[self._rows.start : self._rows.stop]))
        row = self._rows.start + int(missing[0]) if len(missing) else self._rows.stop
        for batch in self._file.scan(row, self._rows.stop):
            own = self._offsets[row : row + len(batch.ids)]
            row += len(batch.ids)
            held = batch.offsets if self.found == "active" else np.nan
            offsets = np.where(np.isnan(own), held, self._file.scale(self._model).of_model(own, batch.vectors))
            yield replace(batch, offsets=offsets.astype(np.float32))

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        rows = [entry.row for entry in batch.ids if isinstance(entry, Entry)]
        self._offsets[rows] = self._file.scale(self._model).stored(offsets, batch.vectors)

    def settle(self) -> None:
        self._offsets.flush()

    def share(self) -> Share:
        return FaissShare(url_of(self._file), self._file.stamp, self._model.fingerprint)

    def activate(self) -> None:
        assert self._run is not None
        offsets = np.asarray(self._offsets)
        missing = np.isnan(offsets)
        if self.found == "active":
            offsets = np.where(missing, self._file.stored_offsets(), offsets)
        elif missing.any():
            raise StoreError(f"{self._file.url}: {missing.sum()} targets have no offset yet; run apply again")
        amends = not missing.all() if self.wrong is None else self.wrong > 0
        try:
            if self.found != "active" or amends:  # else all were right as they were
                asked = Asked(self.answered, self.forced or self.found == "active")
                self._file.upgrade(self._run, self._model, offsets, asked)
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
    """The rows of an index file from `start` to `stop`. stamp: what the file system says of the file."""

    name: str
    url: str
    stamp: str
    start: int
    stop: int

    @property
    def identity(self) -> str:
        return f"{self.url}|{self.stamp}|{self.start}|{self.stop}"

    def scan(self) -> Iterator[Batch]:
        yield from _opened(self.url, self.stamp).scan_rows(self.start, self.stop)


@dataclass(frozen=True)
class FaissShare(Share):
    """The writing of the model called `fingerprint` into an index file, beside which it lies."""

    url: str
    stamp: str
    fingerprint: str

    @property
    def key(self) -> str:
        return f"{self.url}|{self.stamp}|{self.fingerprint}"

    def joined(self, shard: StoreShard) -> tuple[Store, Writing, OffsetModel]:
        assert isinstance(shard, FaissShard)
        store = _opened(self.url, self.stamp)
        return store, *store.joined(self.fingerprint, range(shard.start, shard.stop))


def divided(file: IndexFile, count: int | None) -> list[FaissShard]:
    """Ranges of about as many rows each."""
    rows, url = file.handler.count, url_of(file)
    cuts = [
        (start // PAGE * PAGE, stop if stop == rows else stop // PAGE * PAGE)
        for start, stop in even_ranges(rows, count)
    ]
    return [
        FaissShard(f"{file.url}, shard {number} (from row {start} on)", url, file.stamp, start, stop)
        for number, (start, stop) in enumerate(cuts)
        if stop > start
    ]


def url_of(file: IndexFile) -> str:
    """What another process opens the same file by."""
    return f"faiss:{file.path.absolute()}?metric={file.metric.value}"


@lru_cache(maxsize=1)
def _opened(url: str, stamp: str) -> FaissStore:
    """Read once in a process as long as the file stays as it is."""
    store = open_url(url)
    if store.stamp != stamp:
        raise StoreError(f"{store.url}: the file was changed by another program meanwhile; run it again")
    return store
