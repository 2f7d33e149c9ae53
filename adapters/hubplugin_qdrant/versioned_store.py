"""What the stores of a collection and of a shard share: which version they search, write and give up."""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from hubplugin.errors import InputError, Parameter, StoreError
from hubplugin.model import OffsetModel
from hubplugin.quarantine import Quarantine
from hubplugin.store import Correction, Found, Id, Store, StoredVersion, Writing
from hubplugin.vectors import Progress
from hubplugin_qdrant import versions
from hubplugin_qdrant.manifest import KEY, Manifest, Payload, Version, written_fields


class Metadata(ABC):
    """Where the manifest and the models lie: a metadata collection, or a folder."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether it is there. Raises StoreError where the user has something in its place."""

    @abstractmethod
    def create(self) -> None:
        """Makes the place, if it is not there."""

    @abstractmethod
    def delete(self) -> None: ...

    @abstractmethod
    def read_manifest(self) -> Manifest:
        """The manifest as it is now, an empty one if there is none."""

    @abstractmethod
    def write_manifest(self, manifest: Manifest) -> None:
        """Puts `manifest` in the place of the one before, in one step."""

    @abstractmethod
    def is_off(self) -> bool:
        """Whether searches are raw because the correction is switched off."""

    @abstractmethod
    def write_switch(self, off: bool) -> None:
        """Switches the correction off or on, beside whatever job is running."""

    @abstractmethod
    def read_quarantine(self) -> Quarantine:
        """The quarantine list, an empty one if there is none."""

    @abstractmethod
    def write_quarantine(self, quarantine: Quarantine) -> None:
        """Puts the list in the place of the one before, in one step."""

    @abstractmethod
    def read_model(self, version: Version) -> OffsetModel: ...

    @abstractmethod
    def write_model(self, model: OffsetModel) -> int:
        """Returns in how many parts it was written."""

    @abstractmethod
    def delete_model(self, version: Version) -> None: ...


class VersionedStore(Store):
    """The vector `using` ("" is the unnamed one), with its offsets as `storage`, and their `metadata`. offset_key: the
    payload key that was named for them, None where none was."""

    using: str
    storage: Literal["payload", "vector"] = "payload"
    offset_key: str | None = None
    metadata: Metadata

    def correction(self) -> Correction | None:
        version, active = self.metadata.read_manifest().lying(self.using)
        return None if version is None else Correction(self.metadata.read_model(version), active)

    def active_version(self) -> Version:
        """The version that searches use. Raises StoreError if there is none."""
        version = self.metadata.read_manifest().active.get(self.using)
        if version is None:
            raise StoreError(f"{self.url}: no correction is active; run `hubplugin apply` first")
        return version

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raises StoreError where the payload key of the offsets, or the place of the manifest, holds something that no
        correction has written."""
        self.metadata.exists()
        if self.storage == "payload":
            manifest = self.metadata.read_manifest()
            key = self.key_for(manifest)
            if manifest.offset_key is None:  # else the manifest says that it is ours
                self._require_free(key)

    def key_for(self, manifest: Manifest) -> str:
        """The payload key under which a new version has its offsets: one for all versions. Raises StoreError if
        another one was named than that of the correction in place."""
        lying = manifest.offset_key
        if lying is not None and self.offset_key not in (None, lying):
            raise StoreError(
                f"{self.url}: the offsets of the correction in place lie under the payload key {lying!r}; remove it "
                "before you name another: ",
                Parameter("offset_key", self.offset_key),
            )
        return lying or self.offset_key or KEY

    def _require_free(self, key: str) -> None:
        """Offsets of a correction whose manifest was lost are ours, too, and written over."""
        seen: set[str] = set()
        while found := self.holding(key, seen):
            for point, payload in found.items():
                fields = written_fields(payload.get(key))
                if not fields:
                    raise StoreError(
                        f"{self.url}: the payload key {key!r} holds something of yours, in point {point!r}; "
                        "name another key for the offsets: ",
                        Parameter("offset_key", f"{key}_2"),
                    )
                seen |= fields

    @abstractmethod
    def holding(self, key: str, without: Collection[str]) -> Mapping[Id, Payload]:
        """Some of the points that hold anything under the payload key `key`, but for those that hold a number in one of
        the fields `without` of it, with what they hold; none if there are no such points."""

    def switch(self, on: bool, *, dry_run: bool = False) -> None:
        if not self.metadata.exists():
            raise StoreError(f"{self.url}: there is no correction to switch on or off")
        if not dry_run:
            self.metadata.write_switch(not on)

    def quarantined(self) -> Quarantine:
        return self.metadata.read_quarantine()

    def write_quarantine(self, quarantine: Quarantine) -> None:
        self.metadata.write_quarantine(quarantine)

    def switched(self) -> Sequence[str]:
        """What there is to say of the switch: nothing while the correction is on."""
        off = self.metadata.is_off()
        return [f"switched off: clients search raw, until `hubplugin switch {self.url!r} on`"] if off else []

    def versions(self) -> Sequence[StoredVersion]:
        return self.metadata.read_manifest().stored(self.using)

    def return_to(self, number: int) -> None:
        manifest = self.metadata.read_manifest()
        for version in manifest.kept:
            if (version.number, version.vector) == (number, self.using):
                self.metadata.write_manifest(versions.returned(manifest, version))
                return
        raise StoreError(f"{self.url} keeps no version {number}")

    def prune(self, keep: int, progress: Progress | None = None) -> None:
        manifest = self.metadata.read_manifest()
        pruned = versions.pruned(manifest, self.using, keep)
        if pruned.retired != manifest.retired:
            self.metadata.write_manifest(pruned)
            self.metadata.write_manifest(self._cleared(pruned, progress))

    def remove(self, progress: Progress | None = None) -> None:
        """Deletes the offsets, indexes and vectors of which the manifest tells, the metadata, and nothing else; goes on
        where it was cut off."""
        if not self.metadata.exists():
            return
        manifest = self.metadata.read_manifest()
        for vector in (self.using, *self.deleted_vectors(manifest)):
            manifest = versions.retired(manifest, vector)
        self.metadata.write_manifest(manifest)
        if manifest.kept_up():
            self.metadata.write_manifest(self._cleared(manifest, progress))
        else:
            self.delete(manifest.retired, last=True, progress=progress)
            self.metadata.delete()

    def deleted_vectors(self, manifest: Manifest) -> Collection[str]:
        """The corrected vectors that are no longer there: what is left of their corrections goes by any removal."""
        return ()

    @abstractmethod
    def delete(self, gone: Sequence[Version], last: bool = False, progress: Progress | None = None) -> None:
        """Deletes from the points what the versions `gone` have written. last: there are no others, so that the payload
        key goes, too, where nothing else lies under it."""

    def _cleared(self, manifest: Manifest, progress: Progress | None) -> Manifest:
        """`manifest` without what is retired, once that is deleted from the points."""
        self.delete(manifest.retired, progress=progress)
        for version in versions.unused_models(manifest):
            self.metadata.delete_model(version)
        return versions.cleared(manifest)

    def next_number(self, manifest: Manifest) -> int:
        """The number of a new version."""
        return manifest.last_number + 1

    def version_of(self, model: OffsetModel, progress: Progress | None) -> tuple[Version, Found]:
        """The version that a writing of `model` writes, and what of it was found."""
        self.metadata.create()
        manifest = self.metadata.read_manifest()
        given = (self.using, model.fingerprint, self.storage)
        version = versions.amended(manifest, *given)
        if version is not None:
            return version, "active"
        version, owner = versions.half_written(manifest, *given), uuid.uuid4().hex
        found: Found = "nothing" if version is None else "half-written"
        if version is not None:
            version = version.model_copy(update={"owner": owner})
        else:
            # Of a store that others write to, another run may still be writing what is half-written.
            manifest = self._cleared(manifest if self.shared else versions.given_up(manifest, self.using), progress)
            parts, number = self.metadata.write_model(model), self.next_number(manifest)
            where = {"offset_key": self.key_for(manifest)} if self.storage == "payload" else {}
            version = Version.of(model, number, self.using, parts, storage=self.storage, owner=owner, **where)
        self.metadata.write_manifest(versions.begun(manifest, version))
        return version, found


class VersionWriting(Writing):
    """The offsets of `version` on their way into `store`, which no other run may write meanwhile."""

    def __init__(self, store: VersionedStore, version: Version, found: Found):
        self.store, self.version, self.found = store, version, found
        self.is_taken_out = False  # what another run has taken out is taken out once more, with what came later

    def undisturbed(self) -> Manifest:
        """The manifest as it is now. Raises StoreError if it no longer names this version as written by this run."""
        manifest = self.store.metadata.read_manifest()
        if versions.is_undisturbed(manifest, self.version):
            return manifest
        self.is_taken_out = self.version.number not in {version.number for version in manifest.everything()}
        raise StoreError(
            f"{self.store.url}: another run has begun since, and this one stops; searches use nothing that it wrote"
        )

    def activate(self) -> None:
        version = self.finished()
        manifest = self.undisturbed()
        self.store.metadata.write_manifest(versions.activated(manifest, version))

    @abstractmethod
    def finished(self) -> Version:
        """The version ready to be searched, once all of it is written."""

    def close(self) -> None:
        if self.is_taken_out:
            self.store.delete([self.version])


def usable_key(offset_key: str | None) -> str | None:
    """`offset_key`, as a user has named it. Raises InputError for what cannot be a payload key of offsets."""
    if offset_key is not None and not (
        isinstance(offset_key, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", offset_key)
    ):
        raise InputError(Parameter("offset_key", offset_key), ": expected a name of letters, digits and _")
    return offset_key
