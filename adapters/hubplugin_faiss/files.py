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
from pathlib import Path
from typing import Any

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
from hubplugin_faiss.file_writer import write_index_file
from hubplugin_faiss.gallery import Gallery
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.inverted_lists import free_name
from hubplugin_faiss.index import upgraded_by
from hubplugin_faiss.offsets import offsets_by, upgrade_spec
from hubplugin_faiss.search_settings import holds_graph

SAMPLED = 16
"""A file that was written is read back and searched with this many of its own vectors before it takes its place."""


HALF = 2.0**-10
"""What a second stage of 16 bits may change in a vector, relative to its largest component."""


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
    """Upgrades the index in the file `path` in place, or to the file `out`, and lays `model` beside it as `.hub`.

    An index that is already upgraded gets the offsets of `model` instead of its own. The new file is written beside,
    flushed, read back and searched before it takes the place of the old one; a kill at any moment leaves one of the
    two whole, and running this again finishes. Codes in a row or in inverted lists go from the mapped old file to the
    new one piece by piece, and offsets lie in a file meanwhile, so that memory does not grow with the size. vectors:
    the originals, rebuild: whether graphs are built anew, both as in `upgrade`.

    Raises StoreError or InputError as `upgrade` does, and StoreError for a file that Faiss cannot read.
    """
    with writing(path), writing(path if out is None else out):
        _upgrade_file(Path(path), model, path if out is None else out, vectors, rebuild, device, memory, progress)


def _upgrade_file(
    path: Path,
    model: OffsetModel,
    target: str | os.PathLike[str],
    vectors: VectorLike | None,
    rebuild: bool | None,
    device: str,
    memory: int | str,
    progress: Progress | None,
) -> None:
    source, raw, spool = path, beside(target, ".raw"), beside(target, ".spool")
    try:
        index = original = read_faiss(source, mapped=True)
        again = handler_for(index).is_upgraded()
        if again:
            if vectors is None and handler_for(index).two_stage:
                vectors = Gallery(index)
            note_lists(target, [*map(free_name, handler_for(index).files())])
            write_index_file(raw, handler_for(index).downgraded, [source], progress)
            index, source = read_faiss(raw, mapped=True), raw
        require_upgradable(handler_for(index))
        gallery = MappedGallery([source, spool], index, unit=model.metric is Metric.COSINE)
        originals, room = checked_originals(vectors, handler_for(index)), _spooled(spool, gallery.rows)
        offsets = offsets_by(model, index, gallery, originals, device, memory, progress, room, tolerant=again)
        obsolete = handler_for(original).files() if path == Path(target) else []
        put(target, index, offsets, model, [source, spool], obsolete, progress, originals, rebuild)
    finally:
        for name in (raw, spool):
            name.unlink(missing_ok=True)


def put(
    path: str | os.PathLike[str],
    index: Any,
    offsets: np.ndarray,
    model: OffsetModel,
    mapped: Sequence[Path],
    obsolete: list[str],
    progress: Progress | None = None,
    originals: Vectors | None = None,
    rebuild: bool | None = None,
) -> None:
    """Upgrades `index` with `offsets` [n] in scan order, and puts it and its `model` in the place of what the file
    `path` and its `.hub` hold. obsolete: the lists files of the replaced index, which `writing` removes. mapped: the
    files from which index and offsets are mapped."""
    handler = handler_for(index)
    note_lists(path, [*obsolete, *map(free_name, handler.files())])

    if holds_graph(index):  # graphs are made in memory, and some of them twice
        graph = upgraded_by(index, offsets, model, originals, rebuild)
        _replace(path, lambda _: graph, index, model, mapped, progress, lambda written: None, originals)
        return

    def make(assemble: Assemble) -> Any:
        return handler.upgraded(offsets, upgrade_spec(offsets, model, assemble, vectors=originals))

    def give_back() -> None:
        give_back_pages(*mapped, beside(os.path.realpath(path), ".new"))

    def checked(written: Any) -> None:
        if originals is not None or not handler.exhaustive:
            warn_of_loss(loss_of_recall(index, written, model, give_back, originals), written)

    _replace(path, make, index, model, mapped, progress, checked, originals)


def take_out(path: str | os.PathLike[str], index: Any, progress: Progress | None = None) -> None:
    """Replaces the file `path`, which holds the upgraded `index`, by the index as it was."""
    handler = handler_for(index)
    require_upgraded(handler)
    note_lists(path, [*handler.files(), *map(free_name, handler.files())])
    _replace(path, handler.downgraded, index, None, [Path(path)], progress, lambda written: None)


def _spooled(path: Path, rows: int) -> np.ndarray:
    """Room for offsets [rows] in a file that is mapped."""
    try:
        return np.memmap(path, np.float32, "w+", shape=(rows,))
    except OSError as error:
        raise StoreError(f"cannot write {os.fspath(path)!r}: {error.strerror}") from None


def _replace(
    path: str | os.PathLike[str],
    make: Callable[[Assemble], Any],
    index: Any,
    model: OffsetModel | None,
    mapped: Sequence[Path],
    progress: Progress | None,
    checked: Callable[[Any], None],
    originals: Vectors | None = None,
) -> None:
    real = os.path.realpath(path)  # a link stays one
    new, model_path = beside(real, ".new"), beside(path, ".hub")
    new_model = beside(model_path, ".new")
    try:
        write_index_file(new, make, mapped, progress)
        written = read_faiss(new, mapped=True)
        _require_same(written, index, new, originals)
        checked(written)
        if model is not None:
            model.save(new_model)
        if os.path.isfile(real):  # who may read the old one may read the new one, and nobody else
            for made in (new, new_model) if model is not None else (new,):
                shutil.copymode(real, made)
                _give_to(made, os.stat(real))
        os.replace(new, real)
    except OSError as error:
        raise StoreError(f"cannot write {os.fspath(path)!r}: {error.strerror}; it is as it was") from None
    finally:
        new.unlink(missing_ok=True)
    failing = f"its model could not be {'removed' if model is None else f'moved from {new_model.name!r}'}"
    try:
        if model is None:
            model_path.unlink(missing_ok=True)
        else:
            os.replace(new_model, model_path)
        failing = "the folder could not be flushed"
        _flush_folder(Path(real).parent)
    except OSError as error:
        warnings.warn(f"{os.fspath(path)!r} is written; {failing}: {error.strerror}", stacklevel=3)


def _require_same(written: Any, index: Any, path: Path, originals: Vectors | None) -> None:
    """Raises StoreError unless `written`, read back from `path`, holds some vectors of `index` and finds them, or of
    the `originals`, where a second stage holds those.

    It is searched among those only, so that a large file is not read as a whole.
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
