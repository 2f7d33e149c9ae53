"""Offsets on their way into an index file: they gather beside it, and the file is replaced once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from hubplugin.errors import ModelFileError, StoreError
from hubplugin.model import OffsetModel, load
from hubplugin.store import Batch, Share, Writing
from hubplugin_faiss.checks import require_upgradable
from hubplugin_faiss.file_reader import beside
from hubplugin_faiss.file_writer import write_model
from hubplugin_faiss.index_file import Entry, IndexFile
from hubplugin_faiss.kept_versions import KeptVersions
from hubplugin_faiss.shards import FaissShare, url_of


class PendingOffsets:
    """The offsets in `<name>.offsets` of the model in `<name>.hub.new`, by row, NaN where none is written yet."""

    def __init__(self, file: IndexFile):
        self._file = file
        self.path, self._model_path = beside(file.path, ".offsets"), beside(file.path, ".hub.new")

    def array(self, mode: Any = "r") -> np.ndarray:
        """float32 [n], mapped."""
        return np.memmap(self.path, np.float32, mode, shape=(self._file.handler.count,))

    def model(self) -> OffsetModel | None:
        """The model whose offsets are half-written, unless the index has changed since."""
        try:
            pending = self.path.stat()
            changed = pending.st_mtime_ns < self._file.path.stat().st_mtime_ns
            if changed or pending.st_size != 4 * self._file.handler.count:
                return None
            return load(self._model_path)
        except (OSError, ModelFileError):
            return None

    def begin(self, model: OffsetModel) -> None:
        """None of the offsets of `model` is written."""
        try:
            write_model(self._model_path, model)
            self.array("w+")[:] = np.nan
        except OSError as error:
            raise StoreError(f"cannot write {str(self.path)!r}: {error.strerror}") from None

    def delete(self) -> None:
        for path in (self.path, self._model_path):
            path.unlink(missing_ok=True)


class FaissWriting(Writing):
    """The offsets of `model` on their way into `file`. rows: of the entries that `scan` yields; by default all."""

    def __init__(self, file: IndexFile, model: OffsetModel, rows: range | None = None):
        self._file, self._model = file, model
        self._pending, self._versions = PendingOffsets(file), KeptVersions(file)
        self._rows = range(file.handler.count) if rows is None else rows
        active, half = file.model(), self._pending.model()
        if active is None:
            require_upgradable(file.handler)
        if half is None or half.fingerprint != model.fingerprint:
            self._pending.begin(model)
        else:
            self.found = "half-written"
        if active is not None and active.fingerprint == model.fingerprint:
            self.found = "active"
        elif self.found == "nothing":
            self._versions.begin(model)

    def scan(self) -> Iterator[Batch]:
        pending = self._pending.array()
        missing = np.flatnonzero(np.isnan(pending[self._rows.start : self._rows.stop]))
        row = self._rows.start + int(missing[0]) if len(missing) else self._rows.stop
        for batch in self._file.scan(row, self._rows.stop):
            own = pending[row : row + len(batch.ids)]
            row += len(batch.ids)
            held = batch.offsets if self.found == "active" else np.nan
            offsets = np.where(np.isnan(own), held, own + self._file.norm_bias(batch.vectors))
            yield replace(batch, offsets=offsets.astype(np.float32))

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        rows = [entry.row for entry in batch.ids if isinstance(entry, Entry)]
        self._pending.array("r+")[rows] = offsets - self._file.norm_bias(batch.vectors)

    def share(self) -> Share:
        return FaissShare(url_of(self._file), self._file.stamp, self._model.fingerprint)

    def activate(self) -> None:
        offsets = self._pending.array()
        missing = np.isnan(offsets)
        if self.found == "active":
            offsets = np.where(missing, self._file.stored_offsets(), offsets)
        elif missing.any():
            raise StoreError(f"{self._file.url}: {missing.sum()} targets have no offset yet; run apply again")
        if self.found != "active":
            self._versions.keep_active()
        if not missing.all():  # else all were right as they were
            self._file.upgrade(self._model, offsets, [self._pending.path])
        self._pending.delete()
