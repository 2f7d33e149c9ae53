"""One index file: read, with the model that belongs to it; its entries in batches; and what takes its place.

A new file is written to the folder of the index, read back and searched. Then it replaces the old one in one step
(`Run.switch`), so that a kill at any moment leaves the old or the new one whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import faiss
import numpy as np

from hubplugin.errors import ModelFileError, StoreError
from hubplugin.jobs.write import UNIT
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, load
from hubplugin.resources import Compute
from hubplugin.store import Batch
from hubplugin.vectors import Progress, VectorLike, Vectors
from hubplugin_faiss.calibration import holds_graph, is_exact, loss_of_recall, require_recall
from hubplugin_faiss.disk import room_for_offsets
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
from hubplugin_faiss.handlers.base import NormBias, block_rows
from hubplugin_faiss.handlers.lists import free_name
from hubplugin_faiss.index import (
    Gallery,
    checked_originals,
    downgrade,
    has_fingerprint,
    offsets_by,
    require_unit,
    require_upgradable,
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
    if not handler.is_upgraded() or has_fingerprint(handler, ""):
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
        if has_fingerprint(handler, model.fingerprint):
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


class MappedGallery(Gallery):
    """The vectors of an index that is mapped from a file. Pages of the files `mapped` are given back as it is read."""

    def __init__(self, mapped: Sequence[Path], index: faiss.Index, name: str, *, unit: bool):
        super().__init__(index, name, unit=unit)
        self._mapped = mapped

    def _raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        read = 0
        for block in super()._raw_blocks(size):
            yield block
            read += block.nbytes
            if read > PAGES_KEPT:
                give_back_pages(*self._mapped)
                read = 0


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


SAMPLED = 16
"""A file that was written is read back and searched with this many of its own vectors before it takes its place."""


HALF = 2.0**-10
"""The largest error that 16 bits make in a component of a second stage, relative to the largest component."""


def upgrade_file(
    path: str | os.PathLike[str],
    model: OffsetModel,
    out: str | os.PathLike[str] | None = None,
    *,
    vectors: VectorLike | None = None,
    rebuild: bool | None = None,
    force: bool = False,
    compute: Compute = Compute(),
) -> None:
    """Upgrades the index in the file `path` in place, or to the file `out`, and writes `model` beside it: for
    photos.faiss, to photos.faiss.hub/model.hub.

    An index that is already upgraded gets the offsets of `model` instead of its own. The new file is written beside
    the old one, flushed, read back and searched before it replaces it. A kill at any moment leaves one of the two
    whole, and running this again finishes. A file above 1 GiB is mapped: codes in a row or in inverted lists go from
    it to the new one piece by piece, and offsets are held in a file meanwhile, so that memory does not grow with it.

    Args:
        path: the index file.
        model: as in `upgrade`.
        out: the file to write, `path` by default.
        vectors: the originals [ntotal, d], as in `upgrade`.
        rebuild: whether graphs are built anew, as in `upgrade`.
        force: as in `upgrade`.
        compute: where offsets are computed, and within what memory.

    Raises:
        StoreError: as in `upgrade`; for a file that Faiss cannot read or write, that another run of hubplugin writes,
            or that another program changes meanwhile; and where the disk has no room.
        InputError: as in `upgrade`.
        CorrectionRefused: as in `upgrade`; the file is as it was.
    """
    target = Path(path if out is None else out)
    read = read_file(path)
    index, unchanged = read.index, partial(require_unchanged, path, read.stamp)
    with Run(HubFolder(target)) as run:
        unchanged()
        pending = run.begin_anew()
        original, again, mapped = index, handler_for(index).is_upgraded(), Path(path)
        if again:
            if vectors is None and handler_for(index).two_stage:
                vectors = Gallery(index)
            run.note_lists(made=map(free_name, handler_for(index).files()))
            write_index_file(pending / "raw.faiss", handler_for(index).downgraded, [mapped], compute.progress)
            mapped = pending / "raw.faiss"
            index = read_faiss(mapped, mapped=True)
        require_upgradable(handler_for(index))
        room = pending / "room"
        gallery = MappedGallery([mapped, room], index, Path(path).name, unit=model.metric is Metric.COSINE)
        originals = checked_originals(vectors, handler_for(index))
        into = room_for_offsets(room, gallery.rows)
        offsets = offsets_by(model, gallery, compute, originals, into, tolerant=again)
        replaced = handler_for(original).files() if run.folder.index == Path(os.path.realpath(path)) else []
        new = Replacement(run, index, [mapped, room], unchanged, originals, compute.progress)
        put(new, model, offsets, replaced, rebuild, force)


@dataclass(frozen=True)
class Replacement:
    """What replaces the index of a `run`: made of `index`, which is mapped from the first of the files `mapped`.

    unchanged: called before the last step, see `Run.switch`. originals: the vectors [n, d] that a second stage is going
    to hold.
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
    replaced: Sequence[str],
    rebuild: bool | None = None,
    force: bool = False,
) -> None:
    """Replaces an index file by `new.index`, upgraded with `offsets` [n] in scan order, and its model by `model`.

    replaced: the files of inverted lists of the replaced index, which are deleted then. rebuild, force: as in
    `upgrade`; raises CorrectionRefused like that, and the file is as it was.
    """
    handler, originals = handler_for(new.index), new.originals
    new.run.note_lists(map(free_name, handler.files()), replaced)
    new.run.folder.write(new.run.pending / MODEL, model.to_bytes())

    if holds_graph(new.index) or handler.two_stage:  # these are made in memory, and some graphs twice
        made = upgraded_by(new.index, offsets, model, originals, rebuild, force)
        _replace(new, lambda _: made)
        return

    def make(assemble: Assemble) -> faiss.Index:
        return handler.upgraded(offsets, upgrade_spec(offsets, model, assemble, vectors=originals))

    def measured(written: faiss.Index) -> None:
        if originals is not None or not is_exact(new.index):
            give_back = partial(give_back_pages, *new.mapped, new.run.new_index)
            recall = loss_of_recall(new.index, written, model, give_back, originals)
            require_recall(recall, new.index, written, force)

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
    _require_same(written, new.index, path, new.originals)
    check(written)
    new.run.switch(handler_for(written).files(), new.unchanged, remove=remove)


def _require_same(written: faiss.Index, index: faiss.Index, path: Path, originals: Vectors | None) -> None:
    """Raises StoreError unless `written`, read back from `path`, holds the first and last vectors and finds them.

    They are compared with those of `index`, or with `originals` where a second stage holds these. Only they are
    searched, so that a large file is not read as a whole.
    """
    before, after = handler_for(index), handler_for(written)
    same = before.count == after.count
    if same:
        starts = (0, max(0, before.count - SAMPLED))
        labels = [after.labels(start, min(start + SAMPLED, before.count)) for start in starts]
        selector = faiss.IDSelectorBatch(np.concatenate(labels))
        parameters = after.selecting(selector)
        for start in starts:
            (asked, _), (found, _) = next(before.scan(start, SAMPLED)), next(after.scan(start, SAMPLED))
            if originals is not None and after.two_stage:
                asked, found = next(originals.blocks(SAMPLED)), next(after.scan(0, SAMPLED))[0]
            scores, names = written.search(asked, 1, params=parameters)
            if after.two_stage:  # a second stage may hold them at unit length
                lengths = np.linalg.norm(asked, axis=1) / np.maximum(np.linalg.norm(found, axis=1), 1e-30)
                found = found * lengths[:, None]
            asked, found = np.nan_to_num(asked), np.nan_to_num(found)
            near = np.allclose(asked, found, rtol=0, atol=HALF * float(np.abs(asked).max()))
            same &= near and bool((names >= 0).any() and np.isfinite(scores[names >= 0]).all())
    if not same:
        raise StoreError(f"{os.fspath(path)!r} does not read back as it was written; the disk may be failing")
