"""Offsets on their way into an index file: they gather in its folder, and the file is replaced once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from pydantic import BaseModel, ValidationError

from hubplugin.abilities import Share
from hubplugin.errors import HubpluginError, ModelFileError, StoreError
from hubplugin.model import OffsetModel, load
from hubplugin.store import Batch, Found, Writing, now
from hubplugin_faiss.checks import require_upgradable
from hubplugin_faiss.disk import room_for_offsets
from hubplugin_faiss.hub_folder import CLAIM, MODEL, OFFSETS
from hubplugin_faiss.index_file import Entry, IndexFile
from hubplugin_faiss.kept_versions import KeptVersions
from hubplugin_faiss.run import Run
from hubplugin_faiss.shards import FaissShare, url_of


class Claim(BaseModel):
    """Whose offsets are pending: of the model with the fingerprint `model`, for an index with this `content`, see
    `IndexFile`. made: when their writing began."""

    format: int = 1
    model: str
    content: str
    made: str


class Pending:
    """What is half-written in the folder of `file`: a model, and its offsets by row, NaN where none is written yet."""

    def __init__(self, file: IndexFile):
        self._file, self._folder = file, file.folder.pending
        self.path = self._folder / OFFSETS

    def offsets(self) -> np.memmap:
        """float32 [n], mapped. Raises StoreError where there are none for so many rows."""
        rows = self._file.handler.count
        if not self.path.is_file() or self.path.stat().st_size != 4 * rows:
            raise StoreError(f"{str(self.path)!r} has no offsets for {rows} targets; run apply again")
        return np.memmap(self.path, np.float32, "r+", shape=(rows,))

    def claim(self) -> Claim | None:
        try:
            return Claim.model_validate_json((self._folder / CLAIM).read_bytes())
        except (OSError, ValidationError):
            return None

    def found(self) -> tuple[OffsetModel, str] | None:
        """The model that is half-written, and when its writing began; None if there is none for what is in the index
        now. Reads all of the index, if something is pending."""
        claim = self.claim()
        if claim is None or claim.content != self._file.content:
            return None
        try:
            self.offsets()
            model = load(self._folder / MODEL)
        except (StoreError, ModelFileError):
            return None
        return (model, claim.made) if model.fingerprint == claim.model else None

    def begin(self, run: Run, model: OffsetModel, content: str) -> None:
        """None of the offsets of `model` is written. content: as of a `Claim`, "" where no later run can go on."""
        folder = run.begin_anew()
        room_for_offsets(self.path, self._file.handler.count)[:] = np.nan
        run.folder.write(folder / MODEL, model.to_bytes())
        claim = Claim(model=model.fingerprint, content=content, made=now())  # last: without it the rest is nobody's
        run.folder.write(folder / CLAIM, claim.model_dump_json().encode())


class FaissWriting(Writing):
    """The offsets of `model` for some `rows` of `file`, all by default, on their way into it.

    run: the one that began the writing, and alone activates it; it is closed with the writing.
    """

    found: Found

    def __init__(
        self,
        file: IndexFile,
        model: OffsetModel,
        offsets: np.memmap,
        rows: range | None = None,
        run: Run | None = None,
    ):
        self._file, self._model, self._offsets, self._run = file, model, offsets, run
        self._rows = range(file.handler.count) if rows is None else rows
        active = file.model()
        self.found = "active" if active is not None and active.fingerprint == model.fingerprint else "nothing"

    @classmethod
    def begun(cls, file: IndexFile, model: OffsetModel) -> FaissWriting:
        """Raises StoreError if another run writes the file, or another program has changed it since it was read."""
        run, pending = file.run(), Pending(file)
        try:
            active = file.model()
            if active is None:
                require_upgradable(file.handler)
            if not file.handler.count:
                raise StoreError(f"{file.url} is empty; add vectors, then correct it")
            KeptVersions(file).settle()
            amended, half = active is not None and active.fingerprint == model.fingerprint, pending.found()
            again = not amended and half is not None and half[0].fingerprint == model.fingerprint
            if not again:  # an amendment finds out anew which offsets are wrong
                pending.begin(run, model, "" if amended else file.content)
            writing = cls(file, model, pending.offsets(), run=run)
        except BaseException:
            run.close()
            raise
        if again:
            writing.found = "half-written"
        return writing

    @classmethod
    def joined(cls, file: IndexFile, fingerprint: str, rows: range) -> tuple[FaissWriting, OffsetModel]:
        """The part for some rows of a writing that another process has begun, and its model."""
        pending = Pending(file)
        try:
            offsets = pending.offsets()  # before it is known whose they are: a run that begins anew has its own
            model = load(file.folder.pending / MODEL)
        except HubpluginError:
            model = None
        claim = pending.claim()
        if model is None or claim is None or not (claim.model == model.fingerprint == fingerprint):
            raise StoreError(f"{file.url}: another run has begun since, and this one stops; the index is unchanged")
        return cls(file, model, offsets, rows), model

    def scan(self) -> Iterator[Batch]:
        missing = np.flatnonzero(np.isnan(self._offsets[self._rows.start : self._rows.stop]))
        row = self._rows.start + int(missing[0]) if len(missing) else self._rows.stop
        for batch in self._file.scan(row, self._rows.stop):
            own = self._offsets[row : row + len(batch.ids)]
            row += len(batch.ids)
            held = batch.offsets if self.found == "active" else np.nan
            offsets = np.where(np.isnan(own), held, own + self._file.norm_bias(batch.vectors))
            yield replace(batch, offsets=offsets.astype(np.float32))

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        rows = [entry.row for entry in batch.ids if isinstance(entry, Entry)]
        self._offsets[rows] = offsets - self._file.norm_bias(batch.vectors)

    def settle(self) -> None:
        self._offsets.flush()

    def share(self) -> Share:
        return FaissShare(url_of(self._file), self._file.stamp, self._model.fingerprint)

    def activate(self) -> None:
        assert self._run is not None
        pending, versions = Pending(self._file), KeptVersions(self._file)
        claim, offsets = pending.claim(), np.asarray(pending.offsets())
        assert claim is not None
        missing = np.isnan(offsets)
        if self.found == "active":
            offsets = np.where(missing, self._file.stored_offsets(), offsets)
        elif missing.any():
            raise StoreError(f"{self._file.url}: {missing.sum()} targets have no offset yet; run apply again")
        try:
            if self.found != "active":
                versions.begin(self._model, claim.made)
            if not missing.all():  # else all were right as they were
                self._file.upgrade(self._run, self._model, offsets, [pending.path])
            self._run.forget()
        except HubpluginError:
            self._run.forget()  # nothing of it would serve a later run, and the disk may be full
            raise
        finally:
            versions.settle()

    def close(self) -> None:
        if self._run is not None:
            if self.found == "active":
                self._run.forget()
            self._run.close()
