"""Index files: upgraded and replaced so that a kill at any moment leaves the old or the new one whole.

The model of `photos.faiss` is `photos.faiss.hub`. A file that is being written has the suffix `.new` until it is whole
and checked; then the index replaces the old one in one step, and the model follows. A kill between the two leaves the
model under its `.new` name, where the fingerprint bits in the index identify it. Inverted lists on disk are files of
their own: `photos.faiss.lists` names those that are being written and those that they replace, and `sweep` removes the
ones that the index does not use.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.vectors import Progress, VectorLike, Vectors
from hubplugin_faiss.calibration import loss_of_recall, warn_of_loss
from hubplugin_faiss.checks import checked_originals, require_upgradable, require_upgraded
from hubplugin_faiss.encoding.layout import Assemble
from hubplugin_faiss.file_lock import note_lists, writing
from hubplugin_faiss.file_reader import MappedGallery, beside, give_back_pages, read_faiss
from hubplugin_faiss.file_writer import write_index_file, write_model
from hubplugin_faiss.gallery import Gallery
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.inverted_lists import free_name
from hubplugin_faiss.index import upgraded_by
from hubplugin_faiss.offsets import Resources, offsets_by, upgrade_spec
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
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
) -> None:
    """Upgrades the index in the file `path` in place, or to the file `out`, and writes `model` beside it as `.hub`.

    An index that is already upgraded gets the offsets of `model` instead of its own. The new file is written beside
    the old one, flushed, read back and searched before it replaces it. A kill at any moment leaves one of the two
    whole, and running this again finishes. Codes in a row or in inverted lists go from the mapped old file to the new
    one piece by piece, and offsets are held in a file meanwhile, so that memory does not grow with the size.

    Args:
        path: the index file.
        model: as in `upgrade`.
        out: the file to write, `path` by default.
        vectors: the originals [ntotal, d], as in `upgrade`.
        rebuild: whether graphs are built anew, as in `upgrade`.
        device: where offsets are computed, as in `hubplugin.fit`.
        memory: how much memory that may take.
        progress: called with a text, what is done and the total.

    Raises:
        StoreError: as in `upgrade`, for a file that Faiss cannot read or write, and for one that another process
            writes.
        InputError: as in `upgrade`.
    """
    target, resources = path if out is None else out, Resources(device, memory, progress)
    with writing(path), writing(target):
        _upgrade_file(Path(path), target, model, resources, vectors, rebuild)


def _upgrade_file(
    path: Path,
    target: str | os.PathLike[str],
    model: OffsetModel,
    resources: Resources,
    vectors: VectorLike | None,
    rebuild: bool | None,
) -> None:
    source, raw, spool = path, beside(target, ".raw"), beside(target, ".spool")
    try:
        index = original = read_faiss(source, mapped=True)
        again = handler_for(index).is_upgraded()
        if again:
            if vectors is None and handler_for(index).two_stage:
                vectors = Gallery(index)
            note_lists(target, [*map(free_name, handler_for(index).files())])
            write_index_file(raw, handler_for(index).downgraded, [source], resources.progress)
            index, source = read_faiss(raw, mapped=True), raw
        require_upgradable(handler_for(index))
        gallery = MappedGallery([source, spool], index, unit=model.metric is Metric.COSINE)
        originals, room = checked_originals(vectors, handler_for(index)), _spooled(spool, gallery.rows)
        offsets = offsets_by(model, gallery, resources, originals, room, tolerant=again)
        obsolete = handler_for(original).files() if path == Path(target) else []
        put(
            Replacement(target, index, [source, spool], model, originals, resources.progress),
            offsets,
            obsolete,
            rebuild,
        )
    finally:
        for name in (raw, spool):
            name.unlink(missing_ok=True)


@dataclass(frozen=True)
class Replacement:
    """What replaces an index file: made of `index`, which is mapped from the first of the files `mapped`.

    model: written beside the file; None removes the one that is there. originals: the vectors [n, d] that a second
    stage is going to hold.
    """

    path: str | os.PathLike[str]
    index: faiss.Index
    mapped: Sequence[Path]
    model: OffsetModel | None = None
    originals: Vectors | None = None
    progress: Progress | None = None


def put(new: Replacement, offsets: np.ndarray, obsolete: Sequence[str], rebuild: bool | None = None) -> None:
    """Replaces a file by `new.index`, upgraded with `offsets` [n] in scan order, and its `.hub` by `new.model`.

    obsolete: the lists files of the replaced index, which `writing` removes.
    """
    handler, model, originals = handler_for(new.index), new.model, new.originals
    assert model is not None
    note_lists(new.path, [*obsolete, *map(free_name, handler.files())])

    if holds_graph(new.index):  # graphs are made in memory, and some of them twice
        graph = upgraded_by(new.index, offsets, model, originals, rebuild)
        _replace(new, lambda _: graph)
        return

    def make(assemble: Assemble) -> faiss.Index:
        return handler.upgraded(offsets, upgrade_spec(offsets, model, assemble, vectors=originals))

    def give_back() -> None:
        give_back_pages(*new.mapped, beside(os.path.realpath(new.path), ".new"))

    def measured(written: faiss.Index) -> None:
        if originals is not None or not handler.exhaustive:
            warn_of_loss(loss_of_recall(new.index, written, model, give_back, originals), written)

    _replace(new, make, measured)


def take_out(path: str | os.PathLike[str], index: faiss.Index, progress: Progress | None = None) -> None:
    """Replaces the file `path`, which holds the upgraded `index`, by the index as it was."""
    handler = handler_for(index)
    require_upgraded(handler)
    note_lists(path, [*handler.files(), *map(free_name, handler.files())])
    _replace(Replacement(path, index, [Path(path)], progress=progress), handler.downgraded)


def _spooled(path: Path, rows: int) -> np.ndarray:
    """Room for offsets [rows] in a file that is mapped."""
    try:
        return np.memmap(path, np.float32, "w+", shape=(rows,))
    except OSError as error:
        raise StoreError(f"cannot write {os.fspath(path)!r}: {error.strerror}") from None


def _replace(
    new: Replacement,
    make: Callable[[Assemble], faiss.Index],
    check: Callable[[faiss.Index], None] = lambda written: None,
) -> None:
    real = os.path.realpath(new.path)  # a link stays one
    path, model_path = beside(real, ".new"), beside(new.path, ".hub")
    new_model = beside(model_path, ".new")
    try:
        write_index_file(path, make, new.mapped, new.progress)
        written = read_faiss(path, mapped=True)
        _require_same(written, new.index, path, new.originals)
        check(written)
        if new.model is not None:
            write_model(new_model, new.model)
        if os.path.isfile(real):  # who may read the old one may read the new one, and nobody else
            for made in (path, new_model) if new.model is not None else (path,):
                shutil.copymode(real, made)
                _give_to(made, os.stat(real))
        os.replace(path, real)
    except OSError as error:
        new_model.unlink(missing_ok=True)
        raise StoreError(f"cannot write {os.fspath(new.path)!r}: {error.strerror}; it is as it was") from None
    finally:
        path.unlink(missing_ok=True)
    failing = f"its model could not be {'removed' if new.model is None else f'moved from {new_model.name!r}'}"
    try:
        if new.model is None:
            model_path.unlink(missing_ok=True)
        else:
            os.replace(new_model, model_path)
        failing = "the folder could not be flushed"
        _flush_folder(Path(real).parent)
    except OSError as error:
        warnings.warn(f"{os.fspath(new.path)!r} is written; {failing}: {error.strerror}", stacklevel=3)


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


def _give_to(path: Path, owner: os.stat_result) -> None:
    with contextlib.suppress(OSError):  # only root may
        os.chown(path, owner.st_uid, owner.st_gid)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
