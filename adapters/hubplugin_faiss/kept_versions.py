"""The versions of an index file's correction: their numbers and dates, and the offsets of those that are kept.

photos.faiss.hub.versions/versions.json    number, date and description of each, the one that was active last at the end
photos.faiss.hub.versions/1.offsets        of a kept version: its model, and its offsets by entry

Which version is active the index says by the fingerprint that it has; whatever is here besides is kept. So the one step
from version to version is that in which the index file is replaced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hubplugin.errors import StoreError
from hubplugin.model import OffsetModel
from hubplugin.store import StoredVersion, now
from hubplugin_faiss.file_lock import writing
from hubplugin_faiss.file_reader import beside
from hubplugin_faiss.index_file import IndexFile


class Journal(BaseModel):
    """versions.json. A version's `state` is not read from it: the index and the files beside it say that."""

    format: int = 1
    versions: list[StoredVersion] = []


class KeptVersions:
    """The folder `<name>.hub.versions` beside `file`."""

    def __init__(self, file: IndexFile):
        self._file, self._folder = file, beside(file.path, ".hub.versions")

    def listed(self, pending: OffsetModel | None = None) -> list[StoredVersion]:
        """The active version, the kept ones, and that of `pending`, which is half-written: by number."""
        found, active = [], self._file.model()
        for version in self._known(active):
            if active is not None and version.model == active.fingerprint:
                found.append(replace(version, state="active"))
            elif pending is not None and version.model == pending.fingerprint:
                found.append(replace(version, state="half-written"))
            elif self._offsets_file(version.number).exists():
                found.append(replace(version, state="kept"))
        return sorted(found, key=lambda version: version.number)

    def begin(self, model: OffsetModel) -> None:
        """Gives the version of `model`, which is about to be written, its number and date."""
        known = self._known(self._file.model())
        number = max((version.number for version in known), default=0) + 1
        listed = {version.number for version in self.listed()}  # not what another run has given up
        others = [version for version in known if version.number in listed and version.model != model.fingerprint]
        self._write_journal([*others, StoredVersion.of(model, number, "half-written", now())])

    def keep_active(self) -> None:
        """Keeps the offsets that are in the index now, which is about to be replaced."""
        active = self._file.model()
        if active is None:
            return
        known = self._known(active)
        version = next(version for version in known if version.model == active.fingerprint)
        self._write_journal([*(each for each in known if each is not version), version])
        handler = self._file.handler
        content: dict[str, np.ndarray] = {
            "model": np.frombuffer(active.to_bytes(), np.uint8),
            "labels": np.ascontiguousarray(handler.labels(0, handler.count), np.int64),
            "offsets": np.ascontiguousarray(self._file.stored_offsets(), np.float32),
        }
        self._write(self._offsets_file(version.number), save(content))

    def return_to(self, number: int) -> None:
        """Puts the index with the offsets of the kept version `number` in the place of the file.

        Entries that came since have the offset 0, until they are refreshed.
        """
        if number not in {version.number for version in self.listed() if version.state == "kept"}:
            raise StoreError(f"{self._file.url} keeps no version {number}")
        model, labels, offsets = self._read(self._offsets_file(number))
        handler = self._file.handler
        now_there = handler.labels(0, handler.count)
        if not np.array_equal(labels, now_there):  # an id that there is twice takes the offset of its last entry
            by_label = dict(zip(labels.tolist(), offsets.tolist(), strict=True))
            offsets = np.array([by_label.get(label, 0.0) for label in now_there.tolist()], np.float32)
        with writing(self._file.path):
            self.keep_active()
            self._file.upgrade(model, offsets, [])
            self._offsets_file(number).unlink()

    def prune(self, keep: int) -> None:
        """Deletes the kept versions but for the `keep` that were active last."""
        kept = {version.number for version in self.listed() if version.state == "kept"}
        known = self._known(self._file.model())
        numbers = [version.number for version in known if version.number in kept]  # in the order of the journal
        gone = numbers[: max(len(numbers) - keep, 0)]
        if gone:
            self._write_journal([version for version in known if version.number not in gone])
        for number in gone:
            self._offsets_file(number).unlink()

    def delete(self) -> None:
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def _offsets_file(self, number: int) -> Path:
        return self._folder / f"{number}.offsets"

    def _known(self, active: OffsetModel | None) -> list[StoredVersion]:
        """The versions of the journal, and the active one, where it was written by other means and is not there."""
        known: list[StoredVersion] = []
        journal = self._folder / "versions.json"
        if journal.exists():
            try:
                read = Journal.model_validate_json(journal.read_bytes())
            except (OSError, ValidationError):
                raise StoreError(
                    f"{str(journal)!r} cannot be read; without that folder searches are the same, and no version "
                    "before is left: delete it"
                ) from None
            if read.format > 1:
                raise StoreError(f"{str(journal)!r} has format {read.format}; upgrade hubplugin")
            known = read.versions
        if active is not None and active.fingerprint not in {version.model for version in known}:
            number = max((version.number for version in known), default=0) + 1
            known = [*known, StoredVersion.of(active, number, "active", None)]
        return known

    def _write_journal(self, versions: Iterable[StoredVersion]) -> None:
        journal = Journal.model_validate({"versions": [asdict(version) for version in versions]})
        self._write(self._folder / "versions.json", journal.model_dump_json(indent=2).encode())

    def _write(self, path: Path, content: bytes) -> None:
        """Writes a file of the folder whole or not at all. Who may read the index may read it, and nobody else."""
        temporary = beside(path, ".new")
        try:
            self._folder.mkdir(exist_ok=True)
            with temporary.open("wb") as file:
                shutil.copymode(self._file.path, temporary)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StoreError(f"cannot write {str(path)!r}: {error.strerror}") from None

    def _read(self, path: Path) -> tuple[OffsetModel, np.ndarray, np.ndarray]:
        """Model, labels [n] and offsets [n] of a kept version."""
        try:
            content = load(path.read_bytes())
            model = OffsetModel.from_bytes(content["model"].tobytes(), str(path))
            return model, content["labels"], content["offsets"]
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise StoreError(f"{str(path)!r} is damaged ({error}); apply again") from None
