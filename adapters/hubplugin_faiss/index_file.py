"""An index file and the model that belongs to it, as they are read."""

from __future__ import annotations

import os
from dataclasses import dataclass

import faiss

from hubplugin.errors import StoreError
from hubplugin.model import OffsetModel
from hubplugin_faiss.files import read_faiss, stamp_of
from hubplugin_faiss.folder import HubFolder, date_of
from hubplugin_faiss.handlers import handler_for

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
    for place, model in folder.models():
        if handler.holds_offsets_of(model):
            return model, date_of(place)
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
