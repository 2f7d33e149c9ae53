"""Index files: upgraded and replaced so that a kill at any moment leaves the old or the new one whole.

A new file is written to the folder of the index (`hub_folder`), read back and searched. Then it replaces the old one
in one step (`Run.switch`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.vectors import Progress, VectorLike, Vectors
from hubplugin_faiss.calibration import is_exact, loss_of_recall, require_recall
from hubplugin_faiss.checks import checked_originals, require_upgradable, require_upgraded
from hubplugin_faiss.disk import room_for_offsets
from hubplugin_faiss.encoding.extra_dimensions import Assemble
from hubplugin_faiss.file_reader import MappedGallery, give_back_pages, read_faiss, read_file, require_unchanged
from hubplugin_faiss.file_writer import write_index_file
from hubplugin_faiss.gallery import Gallery
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.lists import free_name
from hubplugin_faiss.hub_folder import MODEL, HubFolder
from hubplugin_faiss.index import upgraded_by
from hubplugin_faiss.offsets import Resources, offsets_by, upgrade_spec
from hubplugin_faiss.run import Run
from hubplugin_faiss.search_settings import holds_graph

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
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
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
        device: where offsets are computed, as in `hubplugin.fit`.
        memory: how much memory that may take.
        progress: called with a text, what is done and the total.

    Raises:
        StoreError: as in `upgrade`; for a file that Faiss cannot read or write, that another run of hubplugin writes,
            or that another program changes meanwhile; and where the disk has no room.
        InputError: as in `upgrade`.
        CorrectionRefused: as in `upgrade`; the file is as it was.
    """
    target, resources = Path(path if out is None else out), Resources(device, memory, progress)
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
            write_index_file(pending / "raw.faiss", handler_for(index).downgraded, [mapped], progress)
            mapped = pending / "raw.faiss"
            index = read_faiss(mapped, mapped=True)
        require_upgradable(handler_for(index))
        room = pending / "room"
        gallery = MappedGallery([mapped, room], index, Path(path).name, unit=model.metric is Metric.COSINE)
        originals = checked_originals(vectors, handler_for(index))
        into = room_for_offsets(room, gallery.rows)
        offsets = offsets_by(model, gallery, resources, originals, into, tolerant=again)
        replaced = handler_for(original).files() if run.folder.index == Path(os.path.realpath(path)) else []
        new = Replacement(run, index, [mapped, room], unchanged, originals, progress)
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
