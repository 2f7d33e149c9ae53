"""One index file, opened: the batches of its entries, and what takes its place."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin.jobs.write import UNIT
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.store import Batch
from hubplugin_faiss.checks import require_unit
from hubplugin_faiss.faiss_objects import block_rows
from hubplugin_faiss.file_reader import read_file, require_unchanged, stamp_of
from hubplugin_faiss.files import Replacement, put, take_out
from hubplugin_faiss.gallery import Gallery
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.base import NormBias
from hubplugin_faiss.handlers.lists import free_name
from hubplugin_faiss.hub_folder import HubFolder
from hubplugin_faiss.index import downgrade
from hubplugin_faiss.run import Run

RUNS = 50
"""How many runs of entries make a sample."""


class Entry(int):
    """An id of the index that remembers in which row it was read: ids need not be unique."""

    row: int


class IndexFile:
    """The index in the file `path`. metric: overrules what it looks like. `index`, `handler`: as the file was when it
    was read; a `run` begins only if it is still so."""

    def __init__(self, path: str | os.PathLike[str], metric: Metric | None = None):
        self.path, self.url, self.folder = Path(path), f"faiss:{os.fspath(path)}", HubFolder(path)
        self._given_metric = metric
        self._load()

    def _load(self) -> None:
        self._read = read_file(self.path)
        self.index, self.stamp, self.handler = self._read.index, self._read.stamp, handler_for(self._read.index)
        for cached in ("raw", "norm_bias", "content"):
            self.__dict__.pop(cached, None)

    def run(self) -> Run:
        """The right to write beside the file. Raises StoreError if another run has it, or the file has changed."""
        run = Run(self.folder)
        try:
            self.require_unchanged()
        except StoreError:
            run.close()
            raise
        return run

    def is_changed(self) -> bool:
        return stamp_of(self.path) != self.stamp

    def require_unchanged(self) -> None:
        """Raises StoreError if another program has changed the file since it was read."""
        require_unchanged(self.path, self.stamp)

    @cached_property
    def metric(self) -> Metric:
        """euclidean for an L2 index; for inner product cosine if its vectors are of unit length, else dot."""
        if self._given_metric is not None:
            return self._given_metric
        model = self.model()
        if model is not None:
            return model.metric
        if self.index.metric_type == faiss.METRIC_L2:
            return Metric.EUCLIDEAN
        sample = next(self.handler.scan(0, 1000), None)
        if sample is None:
            return Metric.DOT
        lengths = np.linalg.norm(sample[0], axis=1)
        if self.handler.lossy:  # of unit vectors PQ makes shorter ones, down to a half, and RaBitQ longer ones
            low, middle, high = np.quantile(lengths, [0.05, 0.5, 0.95])
            return Metric.COSINE if 0.4 < middle < 1.6 and high - low < middle else Metric.DOT
        return Metric.COSINE if (np.abs(lengths - 1) <= UNIT).all() else Metric.DOT

    @property
    def unit(self) -> bool:
        """Whether a correction holds only for vectors of unit length."""
        return self.metric is Metric.COSINE and not self.handler.lossy

    def model(self) -> OffsetModel | None:
        """The model of the offsets in the index, None if it is not upgraded. Raises StoreError if it is missing."""
        return self._read.require_model()

    @cached_property
    def raw(self) -> faiss.Index:
        """The index without offsets."""
        if not self.handler.is_upgraded():
            return self.index
        raw = downgrade(self.index)
        for name in handler_for(raw).files():
            os.unlink(name)  # lists on disk live on as long as they are mapped
        return raw

    @cached_property
    def norm_bias(self) -> NormBias:
        """What the index adds to an offset by itself."""
        return NormBias(self.handler, self.metric is Metric.COSINE)

    @cached_property
    def content(self) -> str:
        """Names what is in the index, to the last bit: ids and vectors, in their order."""
        digest, row = hashlib.sha256(), 0
        for vectors, _ in self.handler.scan(0, block_rows(int(self.index.d))):
            digest.update(np.ascontiguousarray(self.handler.labels(row, row + len(vectors)), np.int64).data)
            digest.update(np.ascontiguousarray(vectors, np.float32).data)
            row += len(vectors)
        return digest.hexdigest()

    def scan(self, first: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """The entries from row `first` on, or up to `stop`, each id an `Entry`, with the offsets in the index."""
        row, end = first, self.handler.count if stop is None else stop
        for vectors, offsets in self.handler.scan(row, block_rows(int(self.index.d))):
            if row >= end:
                return
            vectors, offsets = vectors[: end - row], None if offsets is None else offsets[: end - row]
            if self.unit and not self.handler.is_upgraded():
                require_unit(vectors, self.url, row)
            ids = []
            for label in self.handler.labels(row, row + len(vectors)).tolist():
                ids.append(Entry(label))
                ids[-1].row = row
                row += 1
            known = np.full(len(vectors), np.nan, np.float32) if offsets is None else offsets
            yield Batch(ids, vectors, (known + self.norm_bias(vectors)).astype(np.float32))

    def sample(self, count: int) -> Iterator[Batch]:
        """About `count` of the entries, in runs that begin at random rows."""
        total = self.handler.count
        run = max(count // RUNS, 1)
        starts = np.unique(np.random.default_rng().integers(0, max(total - run, 0) + 1, RUNS))
        for start in [0] if total <= count else starts.tolist():
            wanted = count if total <= count else run
            for batch in self.scan(start):
                yield batch.some(np.arange(min(wanted, len(batch.ids))))
                wanted -= len(batch.ids)
                if wanted <= 0:
                    break

    def stored_offsets(self) -> np.ndarray:
        """The offsets in an upgraded index, as they are stored: float32 [n]."""
        blocks = self.handler.scan(0, block_rows(int(self.index.d)))
        return np.concatenate([offsets for _, offsets in blocks if offsets is not None])

    def upgrade(self, run: Run, model: OffsetModel, offsets: np.ndarray, mapped: Sequence[Path] = ()) -> None:
        """Puts the index with the `offsets` [n] of `model` in the place of the file. mapped: the files they lie in."""
        held = Gallery(self.index) if self.handler.is_upgraded() and self.handler.two_stage else None
        run.note_lists(made=[free_name(name) for name in self.handler.files()])
        new = Replacement(run, self.raw, [self.path, *mapped], self.require_unchanged, held)
        put(new, model, offsets, self.handler.files())
        self._load()

    def downgrade(self, run: Run) -> None:
        """Puts the index as it was in the place of an upgraded one, and deletes the folder."""
        run.begin_anew()
        take_out(Replacement(run, self.index, [self.path], self.require_unchanged))
        self._load()
