"""The `Manifest`, one document that lists a store's corrections, and its driver.

A *version* is one model written to one vector of a store. A vector has at most one
active version, with which searches rank, and one previous version, of which only the
model is kept, for `rollback`. A store has at most one version that is being written.
Any other version is retired until all its data is deleted from the store:

    begin        a run writes a version
    activate     this version becomes the active one; the version that was active
                 becomes the previous one, and its offsets retire
    give_up      a half-written version retires, since another model is to be written
    withdraw     all versions of one vector retire
    clear        retired versions have been deleted

Each is a pure function: a manifest never changes, and each function returns the next
manifest. `ManifestStore` calls them. An adapter provides one document that is read and
written in one step, a place for models, and room for one number per target. If a run is
killed between two steps, the next run continues from the manifest: a version is listed
from before its first write until after its last deletion.
"""

from __future__ import annotations

import json
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timezone
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Self

from hubplugin._version import __version__
from hubplugin.errors import StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.store import Correction, Found, Store
from hubplugin.vectors import Progress

FORMAT = 7
"""The format of a manifest. Readers refuse all others; up to 6, formats differed by
store."""


class Record(BaseModel):
    """An immutable part of a manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def replace(self, **fields: Any) -> Self:
        """Return a copy with these `fields` replaced."""
        return self.model_copy(update=fields)


class Version(Record):
    """One model for one vector of a store. Adapters may add fields.

    number: The number that names the version's offsets in the targets.
    word: A random name of the version's data. Two runs that begin at the same time
        choose the same number, and each may delete only its own data.
    vector: The name of the vector; "" in a store with one vector.
    model: The fingerprint of the model.
    metric, dim: Metric and dimensions of the model.
    mapped: True if the model has a query map.
    made: The time at which its writing began.
    owner: The identifier of the run that writes it.
    """

    number: int = Field(ge=1, le=2**31 - 1)
    word: str = Field(default="", max_length=32, pattern="^[0-9a-f]*$")
    vector: str = ""
    model: str
    metric: Metric
    dim: int = Field(ge=1, le=2**20)
    mapped: bool = False
    made: str | None = None
    owner: str = ""

    @classmethod
    def of(
        cls, model: OffsetModel, number: int, vector: str = "", **fields: Any
    ) -> Self:
        """Return version `number` of `vector`, for `model`, with the current time."""
        return cls(
            number=number,
            word=uuid.uuid4().hex,
            vector=vector,
            model=model.fingerprint,
            metric=model.metric,
            dim=model.dim,
            mapped=model.query_map is not None,
            made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **fields,
        )


V = TypeVar("V", bound=Version)


class Manifest(Record, Generic[V]):
    """All versions of a store; the keys of `active` and `previous` name vectors."""

    format: int = FORMAT
    hubplugin: str = __version__
    last_number: int = Field(default=0, ge=0, le=2**31 - 2)
    active: dict[str, V] = {}
    previous: dict[str, V] = {}
    writing: V | None = None
    retired: tuple[V, ...] = ()

    @classmethod
    def read(
        cls, content: str | bytes | Mapping[str, Any], place: str, mend: str
    ) -> Self:
        """Read a manifest. Jobs never overwrite a manifest that this method refuses.

        Args:
            content: The JSON, as text or parsed.
            place: The place of the manifest, for error messages.
            mend: The advice to the user in error messages.

        Raises:
            StoreError: Another version of hubplugin wrote it, or it is damaged.
        """
        damaged = f"the manifest of {place} is damaged"
        try:
            values = content if isinstance(content, Mapping) else json.loads(content)
            # Only a whole number can name another format. Below, `model_validate`
            # refuses any other damage.
            number = values.get("format") if isinstance(values, Mapping) else FORMAT
            if type(number) is int and number != FORMAT:
                advice = "upgrade hubplugin" if number > FORMAT else mend
                raise StoreError(
                    f"{place} has a manifest in format {number} of hubplugin "
                    f"{values.get('hubplugin')}; this version ({__version__}) reads "
                    f"format {FORMAT}: {advice}"
                )
            return cls.model_validate(values).replace(hubplugin=__version__)
        except ValidationError as error:
            at = ".".join(map(str, error.errors()[0]["loc"])) or "its beginning"
            raise StoreError(f"{damaged} at {at!r}; {mend}") from None
        except (ValueError, RecursionError):
            raise StoreError(f"{damaged}: it is not JSON; {mend}") from None

    def find_current(self, vector: str = "") -> tuple[V | None, bool]:
        """Return the active or half-written version of `vector`, and True if active."""
        if vector in self.active:
            return self.active[vector], True
        if self.writing is not None and self.writing.vector == vector:
            return self.writing, False
        return None, False

    @property
    def maintained(self) -> tuple[V, ...]:
        """The versions whose offsets must be updated when a target is written."""
        active = tuple(self.active.values())
        return active if self.writing is None else (*active, self.writing)

    @property
    def stored_versions(self) -> tuple[V, ...]:
        """All versions whose offsets may be in the store."""
        return (*self.maintained, *self.retired)

    def find(self, vector: str, model: str, **fields: object) -> tuple[V | None, Found]:
        """Return the version of `vector` with this `model` and `fields`, and its state.

        Versions that are active or half-written are found; retired ones are not, since
        their data may be half deleted.

        Args:
            vector: The name of the vector.
            model: The fingerprint of the model.
            **fields: More fields that the version must have.
        """
        required = {"vector": vector, "model": model, **fields}
        active = self.active.get(vector)
        if active is not None and required.items() <= dict(active).items():
            return active, "active"
        writing = self.writing
        if writing is not None and required.items() <= dict(writing).items():
            return writing, "half-written"
        return None, "nothing"

    def give_up(self) -> Self:
        """Return the manifest with its half-written version retired."""
        if self.writing is None:
            return self
        return self.replace(writing=None, retired=(*self.retired, self.writing))

    def begin(self, version: V) -> Self:
        """Return the manifest while a run writes `version`."""
        manifest = self
        if self.writing is not None and self.writing.number != version.number:
            manifest = self.give_up()  # another version was half-written
        last_number = max(self.last_number, version.number)
        return manifest.replace(writing=version, last_number=last_number)

    def activate(self, version: V) -> Self:
        """Return the manifest with `version` active.

        The version that was active becomes the previous one, and its offsets retire.
        The former previous version retires with its model. If `version` was already
        active, only its fields are updated.
        """
        vector = version.vector
        replaced = self.active.get(vector)
        active = self.active | {vector: version}
        if replaced is None:
            return self.replace(active=active, writing=None)
        if replaced.number == version.number:
            # The half-written version, if there is one, is another.
            return self.replace(active=active)
        # `ManifestStore.clear` keeps the model of a retired version that is previous.
        retiring = [replaced]
        former = self.previous.get(vector)
        if former is not None and former.number != version.number:
            retiring.insert(0, former)
        return self.replace(
            active=active,
            previous=self.previous | {vector: replaced},
            writing=None,
            retired=(*self.retired, *retiring),
        )

    def withdraw(self, vector: str = "") -> Self:
        """Return the manifest without a correction of `vector`.

        The active, the previous and the half-written version retire.
        """
        retiring = [
            version
            for version in (*self.maintained, *self.previous.values())
            if version.vector == vector
        ]
        return self.replace(
            active={name: v for name, v in self.active.items() if name != vector},
            previous={name: v for name, v in self.previous.items() if name != vector},
            writing=None if self.writing in retiring else self.writing,
            retired=(*self.retired, *retiring),
        )

    def clear(self, deleted: Sequence[V]) -> Self:
        """Return the manifest without the retired versions `deleted`."""
        numbers = {version.number for version in deleted}
        remaining = tuple(v for v in self.retired if v.number not in numbers)
        return self.replace(retired=remaining)


class ManifestStore(Store, Generic[V]):
    """A store whose corrections are listed in one manifest.

    An adapter implements the nine small methods that follow, and `begin`, which returns
    a `Writing` of the version that `start_version` returns. The writing calls
    `require_owner` before each step in which another run must not interfere. To
    activate, it calls `switch`, then `clear`.
    """

    vector: str = ""
    """The name of the corrected vector, if one manifest covers several."""

    _cached_model: OffsetModel | None = None

    @abstractmethod
    def read_manifest(self) -> Manifest[V]:
        """Return the current manifest, or an empty one if there is none.

        Raises the same errors as `Manifest.read`.
        """

    @abstractmethod
    def write_manifest(self, manifest: Manifest[V]) -> None:
        """Replace the stored manifest by `manifest` in one step."""

    @abstractmethod
    def delete_manifest(self) -> None:
        """Delete the manifest, once it lists no version any more, and its place."""

    @abstractmethod
    def new_version(self, model: OffsetModel, number: int) -> V:
        """Return `Version.of` for `model`, with the fields that the adapter adds."""

    @abstractmethod
    def read_model(self, version: V) -> OffsetModel:
        """Return the model of `version`. Raises StoreError or ModelFileError."""

    @abstractmethod
    def write_model(self, version: V, model: OffsetModel) -> None:
        """Store `model`. Replace what a killed run left under the version's number."""

    @abstractmethod
    def delete_model(self, version: V) -> None:
        """Delete the model that `write_model` stored, if it is there."""

    @abstractmethod
    def make_room(self, version: V) -> None:
        """Make room for one number per target, unless there is room already."""

    @abstractmethod
    def delete_offsets(self, versions: Sequence[V]) -> None:
        """Delete the offsets of `versions`, if they are there."""

    def changing(self) -> AbstractContextManager[object]:
        """Return the lock or transaction that keeps other runs from the manifest."""
        return nullcontext()

    def find(self, manifest: Manifest[V], model: OffsetModel) -> tuple[V | None, Found]:
        """Return the version of `model` for this store's vector, and its state."""
        return manifest.find(self.vector, model.fingerprint)

    def next_number(self, manifest: Manifest[V]) -> int:
        """Return a number that no version has had so far."""
        return manifest.last_number + 1

    def view_manifest(self) -> Manifest[V]:
        """Return the manifest for reading only; an adapter may return a cached one."""
        return self.read_manifest()

    def correction(self) -> Correction | None:
        version, is_active = self.view_manifest().find_current(self.vector)
        if version is None:
            return None
        return Correction(self.model(version), is_active, version.made)

    def previous(self) -> OffsetModel | None:
        version = self.view_manifest().previous.get(self.vector)
        return None if version is None else self.read_model(version)

    def active(self) -> V | None:
        """Return the version with which searches rank, or None without a correction."""
        return self.view_manifest().active.get(self.vector)

    def require_active(self) -> V:
        """Return the active version. Raises StoreError if no correction is active."""
        version = self.active()
        if version is None:
            raise StoreError(
                f"{self.url}: no correction is active; run `hubplugin apply` first"
            )
        return version

    def model(self, version: V) -> OffsetModel:
        """Return the model of `version`. The latest model is cached."""
        model = self._cached_model
        if model is None or model.fingerprint != version.model:
            model = self.read_model(version)
            self._cached_model = model
        return model

    def start_version(self, model: OffsetModel) -> tuple[V, Found]:
        """Return the version of `model` that `begin` writes, and its state before.

        If `model` is active, its version is kept, and this run only amends the offsets.
        If `model` is half-written, this run takes over its version, and the run that
        was writing that version stops. Otherwise, this run begins a new version. First,
        to save space, it deletes retired versions and a half-written one of another
        model.
        """
        with self.changing():
            manifest = self.read_manifest()
            version, found = self.find(manifest, model)
            if version is None:
                if manifest.writing is not None or manifest.retired:
                    self.write_manifest(manifest.give_up())
                    manifest = self.clear()
                manifest, version = self._store_new_version(manifest, model)
            if found != "active":
                # A run that is writing this version will find that it has a new owner.
                version = version.replace(owner=uuid.uuid4().hex)
                self.write_manifest(manifest.begin(version))
            self.make_room(version)
        return version, found

    def _store_new_version(
        self, manifest: Manifest[V], model: OffsetModel
    ) -> tuple[Manifest[V], V]:
        """Store `model` as a new version, and return the next manifest and the version.

        The version is first listed as retired, so that `clear` deletes it if this run
        is killed. If another run replaces the manifest meanwhile, the model is deleted
        and StoreError raised.
        """
        version = self.new_version(model, self.next_number(manifest))
        # `start_version` has cleared all other retired versions.
        listed = manifest.replace(last_number=version.number, retired=(version,))
        self.write_manifest(listed)
        self.write_model(version, model)
        manifest = self.read_manifest()
        if version.word not in {other.word for other in manifest.retired}:
            self.delete_model(version)  # no manifest names it any more
            raise self.overtaken()
        # The new version is no longer listed as retired. Nothing is deleted.
        return manifest.clear([version]), version

    def require_owner(self, version: V) -> Manifest[V]:
        """Return the current manifest.

        Raises StoreError if it no longer names this run as the owner of `version`.
        """
        manifest = self.read_manifest()
        if version.owner not in {other.owner for other in manifest.maintained}:
            raise self.overtaken()
        return manifest

    def overtaken(self) -> StoreError:
        """Return the error for a run that another run has replaced."""
        return StoreError(
            f"{self.url}: another run has begun since, so this one stops; no search "
            "uses what this one wrote"
        )

    def switch(self, version: V) -> None:
        """Activate `version`, which this run has written.

        `clear` then deletes the offsets that it replaces.
        """
        with self.changing():
            self.write_manifest(self.require_owner(version).activate(version))

    def clear(self) -> Manifest[V]:
        """Delete the retired versions, and return the manifest without them.

        The model of a previous version is kept, for `rollback`.
        """
        with self.changing():
            manifest = self.read_manifest()
            retired = manifest.retired
            if retired:
                self.delete_offsets(retired)
                # Read it again: another run may have begun meanwhile.
                manifest = self.read_manifest()
                previous = {version.word for version in manifest.previous.values()}
                for version in retired:
                    if version.word not in previous:
                        self.delete_model(version)
                manifest = manifest.clear(retired)
                self.write_manifest(manifest)
            return manifest

    def remove(self, progress: Progress | None = None) -> None:
        with self.changing():
            manifest = self.read_manifest().withdraw(self.vector)
            if manifest.retired:
                self.write_manifest(manifest)
                manifest = self.clear()
            # Another vector may still have a correction, which the manifest lists.
            if not manifest.stored_versions and not manifest.previous:
                self.delete_manifest()
