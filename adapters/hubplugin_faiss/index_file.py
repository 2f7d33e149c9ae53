"""One index file: read, with the model that belongs to it; its entries in batches; and what takes its place.

A new file is written to the folder of the index, read back and searched. Then it replaces the old one in one step
(`Run.switch`), so that a kill at any moment leaves the old or the new one whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import faiss
import numpy as np

from hubplugin.errors import ModelFileError, StoreError
from hubplugin.jobs.write import UNIT
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, load
from hubplugin.store import Batch
from hubplugin.vectors import Progress, VectorLike, Vectors
from hubplugin_faiss.calibration import Asked, holds_graph, is_exact, require_recall, spread_of_unit, trial_of
from hubplugin_faiss.encoding.codecs import upgrade_spec
from hubplugin_faiss.encoding.layout import Assemble
from hubplugin_faiss.files import (
    PAGES_KEPT,
    give_back_pages,
    read_faiss,
    require_file,
    require_unchanged,
    stamp_of,
    write_index_file,
)
from hubplugin_faiss.folder import MODEL, HubFolder, Run
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.base import IndexScale, block_rows, with_map
from hubplugin_faiss.handlers.lists import free_name
from hubplugin_faiss.index import (
    checked_originals,
    downgrade,
    require_unit,
    require_upgraded,
    upgraded_by,
)

MAPPED = 1 << 30
"""Files of more bytes are mapped, not read: whoever overwrites one in place that is mapped ends this process."""


TRIES = 3
"""How often a file is read that another program replaces meanwhile."""


def read_index(path: str | os.PathLike[str]) -> tuple[faiss.Index, OffsetModel | None]:
    """Reads the index in the file `path`, and its model.

    Returns:
        The index, and the model that its offsets are from; None if they are from no model or it is not upgraded.

    Raises:
        StoreError: Faiss cannot read the file, or its model is missing or belongs to another index.
    """
    read = read_file(path, mapped=False)
    return read.index, read.require_model()


@dataclass(frozen=True)
class Read:
    """What was in an index file when it had this `stamp`. model: that of the offsets, or why there is none to be had;
    None if the index is not upgraded, or by offsets of no model."""

    index: faiss.Index
    model: OffsetModel | StoreError | None
    stamp: str

    def require_model(self) -> OffsetModel | None:
        if isinstance(self.model, StoreError):
            raise self.model
        return self.model


def read_file(path: str | os.PathLike[str], *, mapped: bool | None = None) -> Read:
    """Reads the index in the file `path`, and its model. mapped: by default, if the file is large.

    Raises StoreError as `read_faiss` does, and if the file changes whenever it is read.
    """
    for _ in range(TRIES):
        require_file(path)
        stamp = stamp_of(path)
        index = read_faiss(path, mapped=os.path.getsize(path) > MAPPED if mapped is None else mapped)
        model = _model_of(path, index)
        if stamp_of(path) == stamp:
            return Read(index, model, stamp)
    raise StoreError(f"{os.fspath(path)!r} is being changed by another program; wait until it ends")


def _model_of(path: str | os.PathLike[str], index: faiss.Index) -> OffsetModel | StoreError | None:
    """The model of the `index` in the file `path`; see `Read`."""
    handler, folder = handler_for(index), HubFolder(path)
    if not handler.is_upgraded() or handler.holds_offsets_of(None):
        return None
    why = f"its model {str(folder.model)!r} is missing"
    for place in (folder.model, folder.pending / MODEL):
        if not place.exists():
            continue
        try:
            model = load(place)
        except ModelFileError as error:
            why = str(error)
            continue
        if handler.holds_offsets_of(model):
            return model
        why = f"{str(place)!r} is the model of another index"
    try:
        folder.require()
    except StoreError as error:
        return error
    return StoreError(
        f"{os.fspath(path)!r} is upgraded, but {why}; put the right one there, or take the correction out: "
        f"hubplugin remove faiss:{os.fspath(path)}"
    )


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
        self._load()
        self._originals = checked_originals(vectors, self.handler)

    def _load(self) -> None:
        self._read = read_file(self.path)
        self.index, self.stamp, self.handler = self._read.index, self._read.stamp, handler_for(self._read.index)
        for cached in ("raw", "content"):
            self.__dict__.pop(cached, None)
        self._scales: dict[str, IndexScale] = {}

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

    @cached_property
    def raw(self) -> faiss.Index:
        """The index without offsets."""
        if not self.handler.is_upgraded():
            return self.index
        raw = downgrade(self.index)
        for name in handler_for(raw).files():
            os.unlink(name)  # lists on disk live on as long as they are mapped
        return raw

    def scale(self, model: OffsetModel) -> IndexScale:
        """Between offsets of `model` and those that the index holds."""
        if model.fingerprint not in self._scales:
            self._scales[model.fingerprint] = IndexScale.of(self.handler, model)
        return self._scales[model.fingerprint]

    @cached_property
    def content(self) -> str:
        """Names what is in the index, to the last bit: ids and vectors, in their order."""
        digest = hashlib.sha256()
        for rows, vectors, _ in self.blocks():
            digest.update(np.ascontiguousarray(self.handler.labels(rows.start, rows.stop), np.int64).data)
            digest.update(np.ascontiguousarray(vectors, np.float32).data)
        return digest.hexdigest()

    def blocks(self, first: int = 0) -> Iterator[tuple[slice, np.ndarray, np.ndarray | None]]:
        """The entries from row `first` on: rows, vectors [b, d] as the index reconstructs them, and offsets [b] as
        they are stored, None without. Pages of the mapped file are given back as they are read."""
        row, read = first, 0
        for vectors, offsets in self.handler.scan(first, block_rows(int(self.index.d))):
            rows = slice(row, row + len(vectors))
            yield rows, vectors, offsets
            row, read = rows.stop, read + vectors.nbytes
            if read > PAGES_KEPT:
                give_back_pages(self.path)
                read = 0

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

    def upgrade(
        self,
        run: Run,
        model: OffsetModel,
        offsets: np.ndarray,
        scale: IndexScale,
        mapped: Sequence[Path],
        asked: Asked,
        progress: Progress | None = None,
    ) -> None:
        """Puts the index with `offsets` [n] of `model`, on `scale`, in the place of the file. mapped: what they lie in.
        Raises CorrectionRefused, and the file is as it was, if it finds too little of what is `asked`."""
        again = self.handler.is_upgraded()
        run.note_lists(made=[free_name(name) for name in self.handler.files()])
        if again and os.path.getsize(self.path) > MAPPED:
            raw = run.pending / "raw.faiss"
            write_index_file(raw, self.handler.downgraded, [self.path], progress)
            index, mapped = read_faiss(raw, mapped=True), [raw, *mapped]
        else:
            index, mapped = self.raw, [self.path, *mapped]
        new = Replacement(run, index, mapped, self.require_unchanged, self._originals, progress)
        put(new, model, offsets, scale, self.handler.files(), asked)
        self._load()

    def downgrade(self, run: Run) -> None:
        """Puts the index as it was in the place of an upgraded one, and deletes the folder."""
        run.begin_anew()
        take_out(Replacement(run, self.index, [self.path], self.require_unchanged))
        self._load()


SAMPLED = 16
"""A file that was written is read back and searched with this many of its own vectors before it takes its place."""


ROUNDING = 2.0**-10
"""The largest error that a component may have which is read back, relative to the largest component."""


@dataclass(frozen=True)
class Replacement:
    """What replaces the index of a `run`: made of `index`, which is mapped from the first of the files `mapped`.

    unchanged: called before the last step, see `Run.switch`. originals: of the entries [n, d], by which
    recall is measured.
    """

    run: Run
    index: faiss.Index
    mapped: Sequence[Path]
    unchanged: Callable[[], None]
    originals: Vectors | None = None
    progress: Progress | None = None


def put(
    new: Replacement,
    model: OffsetModel,
    offsets: np.ndarray,
    scale: IndexScale,
    replaced: Sequence[str],
    asked: Asked,
) -> None:
    """Replaces an index file by `new.index`, upgraded with `offsets` [n] in scan order and on `scale`, and its model by
    `model`.

    replaced: the files of inverted lists of the replaced index, which are deleted then. asked: as in
    `IndexFile.upgrade`, which raises CorrectionRefused likewise.
    """
    handler, originals = handler_for(new.index), new.originals
    new.run.note_lists(map(free_name, handler.files()), replaced)
    new.run.folder.write(new.run.pending / MODEL, model.to_bytes())

    if holds_graph(new.index):  # graphs are made in memory, some of them twice
        made = upgraded_by(new.index, offsets, model, scale, originals, None, asked.force)
        _replace(new, lambda _: made, lambda written: asked.require_found(new.index, written, model, scale, originals))
        return

    between = partial(give_back_pages, *new.mapped)
    spec = upgrade_spec(offsets, model, nearness=scale.nearness, between=between)

    def make(assemble: Assemble) -> faiss.Index:
        return with_map(handler.upgraded(offsets, replace(spec, assemble=assemble)), model.query_map)

    def measured(written: faiss.Index) -> None:
        if originals is not None or not is_exact(new.index):
            give_back = partial(give_back_pages, *new.mapped, new.run.new_index)
            trial = trial_of(new.index, written, model, scale, give_back, originals)
            if trial is not None:
                require_recall(trial, trial.recall(written), new.index, written, asked.force)
            asked.require_found(new.index, written, model, scale, originals)

    _replace(new, make, measured)


def take_out(new: Replacement) -> None:
    """Replaces an index file, which holds the upgraded `new.index`, by the index as it was, and deletes its folder."""
    handler = handler_for(new.index)
    require_upgraded(handler)
    new.run.note_lists(map(free_name, handler.files()), handler.files())
    _replace(new, handler.downgraded, remove=True)


def _replace(
    new: Replacement,
    make: Callable[[Assemble], faiss.Index],
    check: Callable[[faiss.Index], None] = lambda written: None,
    *,
    remove: bool = False,
) -> None:
    path = new.run.new_index
    write_index_file(path, make, new.mapped, new.progress)
    written = read_faiss(path, mapped=True)
    _require_same(written, new.index, path)
    check(written)
    new.run.switch(handler_for(written).files(), new.unchanged, remove=remove)


def _require_same(written: faiss.Index, index: faiss.Index, path: Path) -> None:
    """Raises StoreError unless `written`, read back from `path`, holds the first and last vectors of `index` and finds
    them. Only they are searched, so that a large file is not read as a whole."""
    before, after = handler_for(index), handler_for(written)
    same = before.count == after.count
    if same:
        starts = (0, max(0, before.count - SAMPLED))
        labels = [after.labels(start, min(start + SAMPLED, before.count)) for start in starts]
        selector = faiss.IDSelectorBatch(np.concatenate(labels))
        parameters = after.selecting(selector)
        for start in starts:
            (asked, _), (found, _) = next(before.scan(start, SAMPLED)), next(after.scan(start, SAMPLED))
            scores, names = written.search(asked, 1, params=parameters)
            asked, found = np.nan_to_num(asked), np.nan_to_num(found)
            near = np.allclose(asked, found, rtol=0, atol=ROUNDING * float(np.abs(asked).max()))
            same &= near and bool((names >= 0).any() and np.isfinite(scores[names >= 0]).all())
    if not same:
        raise StoreError(f"{os.fspath(path)!r} does not read back as it was written; the disk may be failing")
