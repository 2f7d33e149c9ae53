"""A Faiss file as a `Store`: URL `faiss:photos.faiss`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import faiss
import numpy as np

from hubplugin.errors import InputError, ModelFileError, StoreError
from hubplugin.jobs.unjudged import UNIT
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, load
from hubplugin.store import Batch, Correction, Hits, Id, Store
from hubplugin_faiss.checks import require_unit, require_upgradable
from hubplugin_faiss.faiss_objects import block_rows
from hubplugin_faiss.file_lock import note_lists, writing
from hubplugin_faiss.file_reader import beside, model_of, read_faiss
from hubplugin_faiss.files import HALF, Replacement, put, take_out
from hubplugin_faiss.gallery import Gallery
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.inverted_lists import free_name
from hubplugin_faiss.handlers.norm_bias import NormBias
from hubplugin_faiss.index import downgrade

MAPPED = 1 << 30
"""Files of more bytes are mapped, not read."""


class _Entry(int):
    """An id of the index that remembers in which row it was read: ids need not be unique."""

    row: int


class FaissStore(Store):
    """One index file. Offsets gather in `<name>.offsets` until they are activated all at once."""

    def __init__(self, path: str | os.PathLike[str], metric: Metric | None = None):
        self.url = f"faiss:{os.fspath(path)}"
        self._path, self._given_metric = Path(path), metric
        self._model_path, self._pending_path = beside(path, ".hub.new"), beside(path, ".offsets")
        self._load()
        self.dim = int(self._index.d)
        self._writing: OffsetModel | None = None

    @cached_property
    def metric(self) -> Metric:  # type: ignore[override]
        """euclidean for an L2 index; for inner product cosine if its vectors are of unit length, else dot."""
        if self._given_metric is not None:
            return self._given_metric
        model = model_of(self._path, self._index)
        if model is not None:
            return model.metric
        if self._index.metric_type == faiss.METRIC_L2:
            return Metric.EUCLIDEAN
        sample = next(self._handler.scan(0, 1000), None)
        if sample is None:
            return Metric.DOT
        lengths = np.linalg.norm(sample[0], axis=1)
        if self._handler.lossy:  # of unit vectors PQ makes shorter ones, down to a half, and RaBitQ longer ones
            low, middle, high = np.quantile(lengths, [0.05, 0.5, 0.95])
            return Metric.COSINE if 0.4 < middle < 1.6 and high - low < middle else Metric.DOT
        return Metric.COSINE if (np.abs(lengths - 1) <= UNIT).all() else Metric.DOT

    @cached_property
    def precision(self) -> float:  # type: ignore[override]
        """A quantiser rounds offsets: twice its largest error over the range of the model's offsets is added."""
        model = model_of(self._path, self._index)
        if model is None or model.gallery is None:
            return Store.precision
        tried = np.linspace(model.gallery.smallest, model.gallery.largest, 1000, dtype=np.float32)
        # A second stage that an upgrade added rounds the vectors, too, and so what a model gives for them.
        return Store.precision + 2 * (self._handler.rounding(tried) + (HALF if self._handler.two_stage else 0.0))

    @property
    def unit(self) -> bool:  # type: ignore[override]
        return self.metric is Metric.COSINE and not self._handler.lossy

    def count(self) -> int:
        return self._handler.count

    def scan(self, after: Id | None = None) -> Iterator[Batch]:
        row = int(after or 0)
        for vectors, offsets in self._handler.scan(row, block_rows(self.dim)):
            if self.unit and not self._handler.is_upgraded():
                require_unit(vectors, self.url, row)
            ids = []
            for label in self._handler.labels(row, row + len(vectors)).tolist():
                ids.append(_Entry(label))
                ids[-1].row = row
                row += 1
            known = np.full(len(vectors), np.nan, np.float32) if offsets is None else offsets
            yield Batch(ids, vectors, (known + self._norm_bias(vectors)).astype(np.float32), row)

    def correction(self) -> Correction | None:
        model = model_of(self._path, self._index)
        if model is not None:
            return Correction(model, active=True)
        pending = self._pending_model()
        return None if pending is None else Correction(pending, active=False)

    def begin(self, model: OffsetModel) -> Id | None:
        if not self._handler.is_upgraded():
            require_upgradable(self._handler)
        half = self._pending_model()
        self._writing = model
        if half is not None and half.fingerprint == model.fingerprint:
            missing = np.isnan(self._pending("r"))
            return int(missing.argmax()) if missing.any() else self.count()
        model.save(self._model_path)
        try:
            self._pending("w+")[:] = np.nan
        except OSError as error:
            raise StoreError(f"cannot write {str(self._pending_path)!r}: {error.strerror}") from None
        return None

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        rows = [entry.row for entry in batch.ids if isinstance(entry, _Entry)]
        self._pending("r+")[rows] = offsets - self._norm_bias(batch.vectors)

    def activate(self) -> None:
        if self._writing is None:
            raise StoreError(f"{self.url}: nothing has been written that could be activated")
        offsets = self._pending("r")
        if not (self._handler.is_upgraded() and np.isnan(offsets).all()):  # else all were right as they were
            if self._handler.is_upgraded():
                offsets = np.where(np.isnan(offsets), self._stored_offsets(), offsets)
            missing = int(np.isnan(offsets).sum())
            if missing:
                raise StoreError(f"{self.url}: {missing} targets have no offset yet; run apply again")
            mapped = [self._path, self._pending_path]
            held = Gallery(self._index) if self._handler.is_upgraded() and self._handler.two_stage else None
            with writing(self._path):
                note_lists(self._path, [free_name(name) for name in self._handler.files()])
                new = Replacement(self._path, self._raw, mapped, self._writing, held)
                put(new, offsets, self._handler.files())
            self._load()
        self._writing = None
        for path in (self._pending_path, self._model_path):
            path.unlink(missing_ok=True)

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        index = self._raw if raw else self._index
        scores, ids = index.search(np.ascontiguousarray(queries, np.float32), k)
        found = ids >= 0
        return Hits(
            [row[keep].tolist() for row, keep in zip(ids, found, strict=True)],
            [row[keep].tolist() for row, keep in zip(scores, found, strict=True)],
        )

    def remove(self) -> None:
        if self._handler.is_upgraded():
            with writing(self._path):
                take_out(self._path, self._index)
            self._load()
        for path in (self._pending_path, self._model_path):
            path.unlink(missing_ok=True)

    def _load(self) -> None:
        # A file that fits is read, since whoever overwrites one in place that is mapped ends this process.
        self._index = read_faiss(self._path, mapped=self._path.is_file() and self._path.stat().st_size > MAPPED)
        self._handler = handler_for(self._index)
        for cached in ("_raw", "_norm_bias", "precision"):
            self.__dict__.pop(cached, None)

    @cached_property
    def _raw(self) -> Any:
        if not self._handler.is_upgraded():
            return self._index
        raw = downgrade(self._index)
        for name in handler_for(raw).files():
            os.unlink(name)  # lists on disk live on as long as they are mapped
        return raw

    @cached_property
    def _norm_bias(self) -> NormBias:
        return NormBias(self._handler, self.metric is Metric.COSINE)

    def _stored_offsets(self) -> np.ndarray:
        stored = [offsets for _, offsets in self._handler.scan(0, block_rows(self.dim)) if offsets is not None]
        return np.concatenate(stored)

    def _pending(self, mode: Any) -> np.ndarray:
        return np.memmap(self._pending_path, np.float32, mode, shape=(self.count(),))

    def _pending_model(self) -> OffsetModel | None:
        """The model whose offsets are half-written, unless the index has changed since."""
        try:
            pending = self._pending_path.stat()
            if pending.st_size != 4 * self.count() or pending.st_mtime_ns < self._path.stat().st_mtime_ns:
                return None
            return load(self._model_path)
        except (OSError, ModelFileError):
            return None


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
    return FaissStore(path, None if metric is None else Metric.parse(metric))
