"""One index file: read, with the model that belongs to it; its entries in batches; and what takes its place.

A new file is written to the folder of the index, flushed, and replaces the old one in one step (`Run.switch`), so that
a kill at any moment leaves the old or the new one whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import faiss
import numpy as np

from hubplugin.errors import ModelFileError, StoreError
from hubplugin.jobs.write import UNIT
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.store import Batch
from hubplugin.vectors import VectorLike
from hubplugin_faiss.calibration import Asked, is_exact, spread_of_unit
from hubplugin_faiss.files import read_faiss, require_memory, require_unchanged, stamp_of, write_index_file
from hubplugin_faiss.folder import HubFolder, Run, date_of
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.base import IndexScale, block_rows
from hubplugin_faiss.index import checked_originals, downgrade, require_unit, require_upgraded, upgraded_by

TRIES = 3
"""How often a file is read that another program replaces meanwhile."""


def read_index(path: str | os.PathLike[str]) -> tuple[faiss.Index, OffsetModel | None]:
    """Reads the index in the file `path`, and its model.

    Returns:
        The index, and the model that its offsets are from; None if they are from no model or it is not upgraded.

    Raises:
        StoreError: Faiss cannot read the file, or its model is missing or belongs to another index.
    """
    read = read_file(path)
    return read.index, read.require_model()


@dataclass(frozen=True)
class Read:
    """What was in an index file when it had this `stamp`. model: that of the offsets, or why there is none to be had;
    None if the index is not upgraded, or by offsets of no model. made: when the writing of the model began."""

    index: faiss.Index
    model: OffsetModel | StoreError | None
    made: str | None
    stamp: str

    def require_model(self) -> OffsetModel | None:
        if isinstance(self.model, StoreError):
            raise self.model
        return self.model


def read_file(path: str | os.PathLike[str]) -> Read:
    """Reads the index in the file `path`, and its model.

    Raises StoreError as `read_faiss` does, and if the file changes whenever it is read.
    """
    for _ in range(TRIES):
        stamp = stamp_of(path)
        index = read_faiss(path)
        model, made = _model_of(path, index)
        if stamp_of(path) == stamp:
            return Read(index, model, made, stamp)
    raise StoreError(f"{os.fspath(path)!r} is being changed by another program; wait until it ends")


def _model_of(path: str | os.PathLike[str], index: faiss.Index) -> tuple[OffsetModel | StoreError | None, str | None]:
    """The model of the `index` in the file `path`, and when its writing began; see `Read`."""
    handler, folder = handler_for(index), HubFolder(path)
    if not handler.is_upgraded() or handler.holds_offsets_of(None):
        return None, None
    for model, made in folder.models():
        if handler.holds_offsets_of(model):
            return model, made
    try:
        folder.require()
    except StoreError as error:
        return error, None
    there, why = folder.read_model(folder.model), f"{str(folder.model)!r} is the model of another index"
    if not isinstance(there, OffsetModel):
        why = f"its model {str(folder.model)!r} is missing" if there is None else str(there)
    lacking = StoreError(
        f"{os.fspath(path)!r} is upgraded, but {why}; put the right one there, or take the correction out: "
        f"hubplugin remove faiss:{os.fspath(path)}"
    )
    return lacking, None


class Entry(int):
    """An id of the index that remembers in which row it was read: ids need not be unique."""

    row: int


class IndexFile:
    """The index in the file `path`. metric: overrules what it looks like. vectors: the originals [n, d] of its entries,
    in the order of their ids. `index`, `handler`: as the file was when it was read; a `run` begins only if it is still
    so."""

    def __init__(self, path: str | os.PathLike[str], metric: Metric | None = None, vectors: VectorLike | None = None):
        self.path, self.url, self.folder = Path(path), f"faiss:{os.fspath(path)}", HubFolder(path)
        self._given_metric = metric
        self.assumed = False  # whether `metric` was found to be cosine though the codes do not tell
        self._take(read_file(path))
        self._originals = checked_originals(vectors, self.handler)

    def _take(self, read: Read) -> None:
        self._read = read
        self.index, self.stamp, self.handler = read.index, read.stamp, handler_for(read.index)
        self.__dict__.pop("raw", None)
        self._scales: dict[str, IndexScale] = {}

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

    def require_memory(self) -> None:
        """Raises StoreError if there is no memory for the index that is going to be, and for the one without offsets
        that it is made of."""
        require_memory(self.path, 2 if self.handler.is_upgraded() else 1, "replacing the index in")

    @cached_property
    def metric(self) -> Metric:
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
        given = None if self._originals is None else next(self._originals.blocks(1000))
        lengths = np.linalg.norm(sample[0] if given is None else given, axis=1)
        if lossy and given is None:  # of unit vectors PQ makes shorter ones
            low, middle, high = np.quantile(lengths, [0.05, 0.5, 0.95])
            most, told = spread_of_unit(self.index)
            if not (0.4 < middle < 1.6 and high - low < most * middle):
                return other
            self.assumed = not told
            return Metric.COSINE
        return Metric.COSINE if (np.abs(lengths - 1) <= UNIT).all() else other

    @property
    def unit(self) -> bool:
        """Whether a correction holds only for vectors of unit length."""
        return self.metric is Metric.COSINE and not self.handler.lossy

    def model(self) -> OffsetModel | None:
        """The model of the offsets in the index, None if it is not upgraded. Raises StoreError if it is missing."""
        return self._read.require_model()

    @property
    def made(self) -> str | None:
        """When the writing of the active model began."""
        return self._read.made

    def previous(self) -> OffsetModel | None:
        """The model before the active one; None if there is none. Raises StoreError if it cannot be read."""
        active, models = self.model(), (model for model, _ in self.folder.models())
        if active is None or not any(model.fingerprint == active.fingerprint for model in models):
            return None
        behind = next((model for model in models if model.fingerprint != active.fingerprint), None)
        if behind is None and isinstance(error := self.folder.read_model(self.folder.previous), ModelFileError):
            raise StoreError(str(error))
        return behind

    def half_written(self) -> OffsetModel | None:
        """The model whose offsets are on their way into the index as it is now."""
        return self.folder.half_written(self.handler.count, self.stamp)

    @cached_property
    def raw(self) -> faiss.Index:
        """The index without offsets."""
        return downgrade(self.index) if self.handler.is_upgraded() else self.index

    def scale(self, model: OffsetModel) -> IndexScale:
        """Between offsets of `model` and those that the index holds."""
        if model.fingerprint not in self._scales:
            self._scales[model.fingerprint] = IndexScale.of(self.handler, model)
        return self._scales[model.fingerprint]

    def blocks(self, first: int = 0) -> Iterator[tuple[slice, np.ndarray, np.ndarray | None]]:
        """The entries from row `first` on: rows, vectors [b, d] as the index reconstructs them, and offsets [b] as
        they are stored, None without."""
        row = first
        for vectors, offsets in self.handler.scan(first, block_rows(int(self.index.d))):
            rows = slice(row, row + len(vectors))
            yield rows, vectors, offsets
            row = rows.stop

    def scan(self, first: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """The entries from row `first` on, or up to `stop`, each id an `Entry`, with the offsets in the index."""
        end, active = self.handler.count if stop is None else stop, self._read.model
        active = active if isinstance(active, OffsetModel) else None
        for rows, vectors, offsets in self.blocks(first):
            if rows.start >= end:
                return
            rows = slice(rows.start, min(rows.stop, end))
            vectors = vectors[: end - rows.start]
            offsets = None if offsets is None else offsets[: end - rows.start]
            if self.unit and not self.handler.is_upgraded():
                require_unit(vectors, self.url, rows.start)
            ids = [Entry(label) for label in self.handler.labels(rows.start, rows.stop).tolist()]
            for row, entry in enumerate(ids, rows.start):
                entry.row = row
            known = np.full(len(vectors), np.nan, np.float32) if offsets is None else offsets
            if active is not None:
                known = self.scale(active).of_model(known, vectors).astype(np.float32)
            yield Batch(ids, vectors, known)

    def stored_offsets(self) -> np.ndarray:
        """The offsets in an upgraded index, as they are stored: float32 [n]."""
        return np.concatenate([offsets for _, _, offsets in self.blocks() if offsets is not None])

    def upgrade(self, run: Run, model: OffsetModel, offsets: np.ndarray, asked: Asked) -> None:
        """Puts the index with `offsets` [n] of `model`, as they are stored, in the place of the file.

        Raises CorrectionRefused, and the file is as it was, if it finds too little, also of what is `asked`.
        """
        raw, scale = self.raw, self.scale(model)
        made = upgraded_by(raw, offsets, model, scale, self._originals, None, asked.force)
        if self._originals is not None or not is_exact(raw):
            asked.require_found(raw, made, model, scale, self._originals)
        self._replace(run, made, model)

    def downgrade(self, run: Run) -> None:
        """Puts the index as it was in the place of an upgraded one, and deletes what lies in the folder."""
        require_upgraded(self.handler)
        require_memory(self.path, 1, "replacing the index in")
        run.begin(None, self.handler.count, self.stamp)
        self._replace(run, self.raw, None)

    def _replace(self, run: Run, index: faiss.Index, model: OffsetModel | None) -> None:
        write_index_file(self.folder.new_index, index)
        made, stamp = date_of(self.folder.pending_model), stamp_of(self.folder.new_index)  # new names change neither
        read = Read(index, model, made, stamp)
        run.switch(model, lambda: require_unchanged(self.path, self.stamp))
        self._take(read)
