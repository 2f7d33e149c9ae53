"""Index files: read, upgraded and replaced so that a kill at any moment leaves the old or the new one whole.

Beside `photos.faiss` lies its model, `photos.faiss.hub`. Whatever is being written has the suffix `.new` until it is
whole and checked; then the index takes its place in one step, and the model follows. A kill between the two leaves
the model under its `.new` name, where it is found by the mark in the index.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from hubplugin.errors import ModelFileError, StoreError
from hubplugin.model import OffsetModel, load
from hubplugin.vectors import Progress
from hubplugin_faiss.augment import carries_mark_of, refresh, upgrade
from hubplugin_faiss.rule import rule_for

PROBES = 16
"""A file that was written is read back and searched with this many of its own vectors before it takes its place."""


def upgrade_file(
    path: str | os.PathLike[str],
    model: OffsetModel,
    out: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    memory: int | str = "512MiB",
    progress: Progress | None = None,
) -> None:
    """Upgrades the index in the file `path` in place, or to the file `out`, and lays `model` beside it as `.hub`.

    An index that is already upgraded gets the offsets of `model` instead of its own. The new file is written beside,
    flushed, read back and searched before it takes the place of the old one; a kill at any moment leaves one of the
    two whole, and running this again finishes.

    Raises StoreError or InputError as `upgrade` does, and StoreError for a file that Faiss cannot read.
    """
    index = read_faiss(path)
    change = refresh if rule_for(index).is_upgraded() else upgrade
    replace(path if out is None else out, change(index, model, device=device, memory=memory, progress=progress), model)


def read_index(path: str | os.PathLike[str]) -> tuple[Any, OffsetModel | None]:
    """The index in the file `path`, and the model that its offsets are from (None if they came from no model, or
    the index is not upgraded).

    Raises StoreError for a file that Faiss cannot read, or whose model is missing or is another one.
    """
    index = read_faiss(path)
    return index, model_of(path, index)


def model_of(path: str | os.PathLike[str], index: Any) -> OffsetModel | None:
    """The model beside the file `path` that holds `index`; see `read_index`."""
    rule = rule_for(index)
    if not rule.is_upgraded() or carries_mark_of(rule, ""):
        return None
    model_path = beside(path, ".hub")
    found = [candidate for candidate in (model_path, beside(model_path, ".new")) if candidate.exists()]
    damaged = None
    for candidate in found:
        try:
            model = load(candidate)
        except ModelFileError as error:
            damaged = error
            continue
        if carries_mark_of(rule, model.fingerprint):
            return model
    if damaged is not None:
        raise StoreError(str(damaged))
    what = f"{model_path.name} is the model of another index" if found else f"its model {model_path.name} is missing"
    raise StoreError(f"{os.fspath(path)} is upgraded, but {what}; put the right one beside it, or downgrade the index")


def replace(path: str | os.PathLike[str], index: Any, model: OffsetModel | None) -> None:
    """Puts `index` and its `model` in the place of what the file `path` and its `.hub` hold."""
    new, model_path = beside(path, ".new"), beside(path, ".hub")
    new_model = beside(model_path, ".new")
    try:
        _write(new, index)
        _require_same(new, index)
        if model is not None:
            model.save(new_model)
        os.replace(new, path)
        if model is None:
            model_path.unlink(missing_ok=True)
        else:
            os.replace(new_model, model_path)
        _flush_folder(Path(path).parent)
    except OSError as error:
        raise StoreError(f"cannot write {os.fspath(path)!r}: {error.strerror}; it is as it was") from None
    finally:
        new.unlink(missing_ok=True)


def beside(path: str | os.PathLike[str], suffix: str) -> Path:
    return Path(f"{os.fspath(path)}{suffix}")


def read_faiss(path: str | os.PathLike[str]) -> Any:
    """The index in the file `path`; raises StoreError, one line, if there is none or Faiss refuses it."""
    if not Path(path).is_file():
        raise StoreError(f"there is no file {os.fspath(path)!r}")
    try:
        return faiss.read_index(os.fspath(path))
    except RuntimeError as error:
        raise StoreError(f"Faiss cannot read {os.fspath(path)!r}: {_reason(error)}") from None


def _write(path: Path, index: Any) -> None:
    try:
        faiss.write_index(index, os.fspath(path))
    except RuntimeError as error:
        raise StoreError(f"Faiss cannot write {os.fspath(path)!r}: {_reason(error)}") from None
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _require_same(path: Path, index: Any) -> None:
    """Raises StoreError unless the file `path` searches as `index` does."""
    written = read_faiss(path)
    probes, _ = next(rule_for(index).scan(0, PROBES))
    k = min(10, index.ntotal)
    for ours, theirs in zip(index.search(probes, k), written.search(probes, k), strict=True):
        if not np.array_equal(ours, theirs):
            raise StoreError(f"{os.fspath(path)!r} does not read back as it was written; the disk may be failing")


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: RuntimeError) -> str:
    """What Faiss says, without the signature of the function that said it."""
    return " ".join(str(error).rpartition("Error: ")[2].split())
