"""The versions of an index file's correction: their numbers and dates, and the offsets of those that are kept.

Which version is active the index says by the fingerprint that it has; whatever is here besides is kept. So the one step
from version to version is that in which the index file is replaced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Literal

import numpy as np
from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hubplugin.errors import StoreError
from hubplugin.model import OffsetModel, Setting
from hubplugin_faiss.index_file import IndexFile


@dataclass(frozen=True)
class StoredVersion:
    """One version of a correction. made: when its writing began; None where that is not known. model: its
    fingerprint."""

    number: int
    state: Literal["active", "kept", "half-written"]
    made: str | None
    method: str
    parameters: Mapping[str, Setting]
    model: str
    bank_fingerprint: str

    @classmethod
    def of(
        cls, model: OffsetModel, number: int, state: Literal["active", "half-written"], made: str | None
    ) -> StoredVersion:
        return cls(number, state, made, model.method, model.parameters, model.fingerprint, model.bank_fingerprint)


class Journal(BaseModel):
    """versions.json: the version that was active last at the end. A version's `state` is not read from it: the index
    and the files beside it say that."""

    format: int = 1
    versions: list[StoredVersion] = []


@dataclass(frozen=True)
class Offsets:
    """The offsets [n] of a kept version, as they are stored, and the labels [n] and `names` [n] of their entries."""

    model: OffsetModel
    labels: np.ndarray
    names: np.ndarray
    offsets: np.ndarray


class KeptVersions:
    """The versions of the correction of `file`, in its folder."""

    def __init__(self, file: IndexFile):
        self._file, self._folder = file, file.folder

    def listed(self, pending: tuple[OffsetModel, str] | None = None) -> list[StoredVersion]:
        """The active version, the kept ones, and that of the `pending` model with its date, which is half-written: by
        number."""
        active = self._active()
        found = [version for version in self._known() if self._folder.offsets_of(version.number).is_file()]
        if active is not None:
            found = [*(version for version in found if version.number != active.number), active]
        found.sort(key=lambda version: version.number)
        if pending is not None and (active is None or pending[0].fingerprint != active.model):
            model, made = pending
            found.append(StoredVersion.of(model, self._next(), "half-written", made))
        return found

    def begin(self, model: OffsetModel, made: str) -> None:
        """Keeps the offsets that are in the index now, and gives the version of `model`, by which they are about to be
        replaced, its number."""
        new = StoredVersion.of(model, self._next(), "active", made)
        self._keep_active()
        self._write_journal([*self._known(), new])

    def settle(self) -> None:
        """Deletes what is said here of versions but for the active one and the one before, and offsets that are active.
        Where another index is in place than was read, that is the next run's to do."""
        if self._file.is_changed():
            return
        before = {version.number for version in self._kept()[-1:]}
        listed = [each for each in self.listed() if each.state == "active" or each.number in before]
        kept = {self._folder.offsets_of(number) for number in before}
        for path in self._folder.path.glob("*.offsets"):
            if path not in kept:
                path.unlink()
        if self._folder.versions.exists():
            there = {version.number for version in listed}
            self._write_journal([version for version in self._known() if version.number in there])

    def previous(self) -> OffsetModel | None:
        """The model of the version that was active before; None without one."""
        kept = self._kept()
        return self._read(kept[-1].number).model if kept else None

    def _kept(self) -> list[StoredVersion]:
        """The kept versions, the one that was active last at the end."""
        kept = {version.number for version in self.listed() if version.state == "kept"}
        return [version for version in self._known() if version.number in kept]

    def _keep_active(self) -> None:
        """Keeps the offsets that are in the index now, which is about to be replaced."""
        active, model = self._active(), self._file.model()
        if active is None or model is None:
            return
        labels, names, offsets = self._entries()
        content: dict[str, np.ndarray] = {
            "model": np.frombuffer(model.to_bytes(), np.uint8), "labels": labels, "names": names, "offsets": offsets,
        }  # fmt: skip
        self._folder.write(self._folder.offsets_of(active.number), save(content))
        self._write_journal([*(each for each in self._known() if each.number != active.number), active])

    def _entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Labels int64, names uint64 and stored offsets float32 of the entries, NaN in an index without: [n] each."""
        handler = self._file.handler
        labels, names = np.empty(handler.count, np.int64), np.empty(handler.count, np.uint64)
        offsets = np.full(handler.count, np.nan, np.float32)
        for rows, vectors, own in self._file.blocks():
            labels[rows], names[rows] = handler.labels(rows.start, rows.stop), _names(vectors)
            if own is not None:
                offsets[rows] = own
        return labels, names, offsets

    def _active(self) -> StoredVersion | None:
        """The active version. Where it was written by other means it has no date; where its model is not to be had, no
        description either."""
        if not self._file.handler.is_upgraded():
            return None
        known = self._known()
        number = max((version.number for version in known), default=0) + 1
        try:
            model = self._file.model()
        except StoreError:
            return StoredVersion(number, "active", None, "unknown", {}, "unknown", "unknown")
        if model is None:
            return None
        same = [version for version in known if version.model == model.fingerprint]
        return replace(same[-1], state="active") if same else StoredVersion.of(model, number, "active", None)

    def _next(self) -> int:
        """The number of the next version."""
        active = self._active()
        numbers = [version.number for version in self._known()] + ([] if active is None else [active.number])
        return max(numbers, default=0) + 1

    def _known(self) -> list[StoredVersion]:
        """The versions of the journal."""
        journal = self._folder.versions
        self._folder.require()
        try:
            read = Journal.model_validate_json(journal.read_bytes())
            for made in (version.made for version in read.versions if version.made is not None):
                datetime.fromisoformat(made)
        except FileNotFoundError:
            return []
        except (OSError, ValueError):
            raise StoreError(
                f"{str(journal)!r} cannot be read; without it searches are the same, and no version before is left: "
                "delete it"
            ) from None
        if read.format > 1:
            raise StoreError(f"{str(journal)!r} has format {read.format}; upgrade hubplugin")
        return [replace(version, state="kept") for version in read.versions]

    def _write_journal(self, versions: Sequence[StoredVersion]) -> None:
        if not versions:
            self._folder.versions.unlink(missing_ok=True)
            return
        journal = Journal.model_validate({"versions": [asdict(version) for version in versions]})
        self._folder.write(self._folder.versions, journal.model_dump_json(indent=2).encode())

    def _read(self, number: int) -> Offsets:
        path = self._folder.offsets_of(number)
        try:
            content = load(path.read_bytes())
            model = OffsetModel.from_bytes(content["model"].tobytes(), str(path))
            return Offsets(model, content["labels"], content["names"], content["offsets"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise StoreError(f"{str(path)!r} is damaged ({error}); apply again") from None


def _names(vectors: np.ndarray) -> np.ndarray:
    """What each of `vectors` [b, d] is recognised by, to the last bit: uint64 [b]."""
    rows = np.ascontiguousarray(vectors, np.float32)
    return np.array(
        [int.from_bytes(hashlib.blake2b(row.data, digest_size=8).digest(), "little") for row in rows], np.uint64
    )
