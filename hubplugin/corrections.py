"""The one document that a store keeps of its corrections, the `Manifest`, and what a job does to it.

A *version* is one model written to one vector of a store. A vector has at most one active version, by which searches
rank, and one previous version, of which only the model is left: `rollback` writes it. A store has at most one version
that is being written. Everything else of which something may still lie in the store is retired, until it is deleted:

    begin, activate    the version that was active becomes the previous one, and its offsets are retired
    begin, give_up     another run writes another model
    withdraw           the correction of one vector goes
    clear              what was retired has been deleted

Each is a pure function: a manifest never changes, and each returns the next one. `ManifestStore` drives them: an
adapter gives it one document that is read and written in one step, a place for models, and room for one number a
target. A kill between any two steps leaves a manifest by which the next run goes on: it names what lies in the store
before that is made, and until it is gone.
"""

from __future__ import annotations

import json
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timezone
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import Self

from hubplugin._version import __version__
from hubplugin.errors import StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.store import Correction, Found, Store
from hubplugin.vectors import Progress

FORMAT = 7
"""Of a manifest. A reader refuses any other: up to 6, each store had its own."""


class Version(BaseModel):
    """One model for one vector of a store. An adapter adds fields of its own.

    number: no other version of the store has it, so that what belongs to a version can be named after it. vector: ""
    in a store with one. model: its fingerprint. metric, dim, mapped, group_by: of the model, whether it has a query map
    and the key within whose values it has offsets. made: when its writing began. owner: the run that writes it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    vector: str = ""
    model: str
    metric: Metric
    dim: int
    mapped: bool = False
    group_by: str | None = None
    made: str | None = None
    owner: str = ""

    @classmethod
    def of(
        cls, model: OffsetModel, number: int, vector: str = "", **fields: Any
    ) -> Self:
        """Version `number` of `vector`, by `model`, whose writing begins now, with the `fields` of a subclass."""
        return cls(
            number=number,
            vector=vector,
            model=model.fingerprint,
            metric=model.metric,
            dim=model.dim,
            mapped=model.query_map is not None,
            made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **fields,
        )

    def replace(self, **fields: Any) -> Self:
        return self.model_copy(update=fields)


V = TypeVar("V", bound=Version)


class Manifest(BaseModel, Generic[V]):
    """What a store knows of its corrections. `active` and `previous` are by the name of the vector."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    hubplugin: str = __version__
    last_number: int = 0
    active: dict[str, V] = {}
    previous: dict[str, V] = {}
    writing: V | None = None
    retired: tuple[V, ...] = ()

    @classmethod
    def read(
        cls, content: str | bytes | Mapping[str, Any], place: str, mend: str
    ) -> Self:
        """Reads a manifest. What is refused is never written over by a job.

        Args:
            content: JSON.
            place: where it lies, for errors.
            mend: says how its user does without it.

        Raises:
            StoreError: one line, where another version of hubplugin wrote it, or it is damaged.
        """
        try:
            values = content if isinstance(content, Mapping) else json.loads(content)
            written = values.get("format") if isinstance(values, Mapping) else None
            if (
                isinstance(written, int)
                and not isinstance(written, bool)
                and written != FORMAT
            ):
                raise StoreError(
                    f"{place} has a manifest in format {written} of hubplugin {values.get('hubplugin')}; this version "
                    f"({__version__}) reads format {FORMAT}: {'upgrade hubplugin' if written > FORMAT else mend}"
                )
            return cls.model_validate(values).replace(hubplugin=__version__)
        except ValidationError as error:
            at = ".".join(map(str, error.errors()[0]["loc"])) or "its beginning"
            raise StoreError(
                f"{place} has a manifest that is damaged at {at!r}; {mend}"
            ) from None
        except (ValueError, RecursionError):
            raise StoreError(
                f"{place} has a manifest that is damaged: it is no JSON; {mend}"
            ) from None

    def replace(self, **fields: Any) -> Self:
        return self.model_copy(update=fields)

    def find_current(self, vector: str = "") -> tuple[V | None, bool]:
        """The version that lies in `vector`, if any, and whether it is active; a half-written one is not."""
        if vector in self.active:
            return self.active[vector], True
        is_its_own = self.writing is not None and self.writing.vector == vector
        return self.writing if is_its_own else None, False

    @property
    def maintained(self) -> tuple[V, ...]:
        """The versions whose offsets a write must bring along."""
        return (*self.active.values(), *((self.writing,) if self.writing else ()))

    @property
    def everything(self) -> tuple[V, ...]:
        """Every version of which offsets may lie in the store."""
        return (*self.maintained, *self.retired)

    def find(self, vector: str, model: str, **fields: object) -> tuple[V | None, Found]:
        """The version of `vector` that has this `model`, a fingerprint, and these `fields`, and what it is: the active
        one, which is amended, or a half-written one, with which a run goes on."""
        required = {"vector": vector, "model": model, **fields}
        states: list[tuple[V | None, Found]] = [
            (self.active.get(vector), "active"),
            (self.writing, "half-written"),
        ]
        for version, state in states:
            if version is not None and all(
                getattr(version, name) == value for name, value in required.items()
            ):
                return version, state
        return None, "nothing"

    def give_up(self) -> Self:
        """Returns the manifest whose half-written version is retired."""
        return self.replace(
            writing=None,
            retired=(*self.retired, *((self.writing,) if self.writing else ())),
        )

    def begin(self, version: V) -> Self:
        """Returns the manifest while `version` is written, as a new one or by another run than before."""
        goes_on = self.writing is not None and self.writing.number == version.number
        manifest = self if goes_on else self.give_up()
        return manifest.replace(
            writing=version, last_number=max(self.last_number, version.number)
        )

    def activate(self, version: V) -> Self:
        """Returns the manifest by which searches use `version`. The version that they used becomes the previous one,
        whose offsets are retired; so is the one before it, for its model. An active version is only replaced by what is
        known of it now."""
        vector, replaced = version.vector, self.active.get(version.vector)
        active = self.active | {vector: version}
        if replaced is not None and replaced.number == version.number:
            return self.replace(active=active)
        if replaced is None:
            return self.replace(active=active, writing=None)
        gone = (
            (self.previous[vector], replaced)
            if vector in self.previous
            else (replaced,)
        )
        previous = self.previous | {vector: replaced}
        return self.replace(
            active=active,
            previous=previous,
            writing=None,
            retired=(*self.retired, *gone),
        )

    def withdraw(self, vector: str = "", *, only: V | None = None) -> Self:
        """Returns the manifest without the correction of `vector`, active, previous and half-written, which is retired;
        or without `only` one version of it."""
        stored = (*self.maintained, *self.previous.values())
        gone = [
            version
            for version in stored
            if version.vector == vector and only in (None, version)
        ]
        active, previous = (
            {name: version for name, version in versions.items() if version not in gone}
            for versions in (self.active, self.previous)
        )
        writing = None if self.writing in gone else self.writing
        return self.replace(
            active=active,
            previous=previous,
            writing=writing,
            retired=(*self.retired, *gone),
        )

    def clear(self, gone: Sequence[V]) -> Self:
        """Returns the manifest once the versions `gone`, which were retired, have been deleted."""
        numbers = {version.number for version in gone}
        return self.replace(
            retired=tuple(
                version for version in self.retired if version.number not in numbers
            )
        )


class ManifestStore(Store, Generic[V]):
    """A store whose corrections are the versions of one manifest.

    An adapter gives the nine small methods that follow, and `begin`, which returns its own `Writing` of what
    `start_version` gives. That calls `require_owner` before what must not be done beside another run, and `switch` and
    `clear` to activate.
    """

    vector: str = ""
    """The name of the vector that is corrected, in a store where one manifest is for several."""

    _known: OffsetModel | None = None

    @abstractmethod
    def read_manifest(self) -> Manifest[V]:
        """The manifest as it is now, an empty one if there is none. `Manifest.read` refuses what cannot be read."""

    @abstractmethod
    def write_manifest(self, manifest: Manifest[V]) -> None:
        """Puts `manifest` in the place of the one before, in one step."""

    @abstractmethod
    def delete_manifest(self) -> None:
        """Deletes the place of the manifest, in which nothing is left."""

    @abstractmethod
    def new_version(self, model: OffsetModel, number: int) -> V:
        """`Version.of` a `model` that is going to be written, with this `number` and what the adapter adds."""

    @abstractmethod
    def read_model(self, version: V) -> OffsetModel:
        """The model of `version`, whole. Raises StoreError or ModelFileError."""

    @abstractmethod
    def write_model(self, version: V, model: OffsetModel) -> None:
        """Keeps `model`, over whatever a kill has left under the number of `version`."""

    @abstractmethod
    def delete_model(self, version: V) -> None:
        """Deletes what `write_model` wrote, which may be gone."""

    @abstractmethod
    def make_room(self, version: V) -> None:
        """Makes room for one number a target, where there is none yet."""

    @abstractmethod
    def delete_offsets(self, versions: Sequence[V], progress: Progress | None) -> None:
        """Deletes what was written of `versions`, which may be gone, and tells `progress`."""

    def changing(self) -> AbstractContextManager[object]:
        """What keeps other runs from changing the manifest meanwhile, where a store has a lock or a transaction."""
        return nullcontext()

    def find(self, manifest: Manifest[V], model: OffsetModel) -> tuple[V | None, Found]:
        """`Manifest.find` in `manifest` for this store's vector and `model`."""
        return manifest.find(self.vector, model.fingerprint)

    def next_number(self, manifest: Manifest[V]) -> int:
        """A number that no version has had so far."""
        return manifest.last_number + 1

    def is_readable(self, version: V) -> bool:
        """Whether all that lies of `version` can be read. What a kill has damaged is written anew, as another one."""
        return True

    def correction(self) -> Correction | None:
        version, is_active = self.read_manifest().find_current(self.vector)
        return (
            None
            if version is None
            else Correction(self.model(version), is_active, version.made)
        )

    def previous(self) -> OffsetModel | None:
        version = self.read_manifest().previous.get(self.vector)
        return None if version is None else self.read_model(version)

    def active(self) -> V | None:
        """The version by which searches rank, None where they are raw."""
        return self.read_manifest().active.get(self.vector)

    def require_active(self) -> V:
        """Raises StoreError where no correction is active."""
        version = self.active()
        if version is None:
            raise StoreError(
                f"{self.url}: no correction is active; run `hubplugin apply` first"
            )
        return version

    def model(self, version: V) -> OffsetModel:
        """`read_model`, of the version that was read last without reading it again."""
        if self._known is None or self._known.fingerprint != version.model:
            self._known = self.read_model(version)
        return self._known

    def start_version(
        self, model: OffsetModel, progress: Progress | None = None
    ) -> tuple[V, Found]:
        """The version by which `begin` writes `model`, and what of it was found; `progress` is told of deletions.

        An active version stays as it is. A half-written version goes to this run, and the run that had it stops.
        Otherwise a new one is begun; another that was half-written is deleted before, so that it needs no room beside
        this one.
        """
        with self.changing():
            manifest = self.read_manifest()
            version, found = self.find(manifest, model)
            if version is not None and not self.is_readable(version):
                manifest, version, found = (
                    manifest.withdraw(version.vector, only=version),
                    None,
                    "nothing",
                )
            if version is None:
                if manifest.writing is not None or manifest.retired:
                    self.write_manifest(manifest.give_up())
                    manifest = self.clear(progress)
                version = self.new_version(model, self.next_number(manifest))
                named = manifest.replace(last_number=version.number, retired=(version,))
                self.write_manifest(named)  # before it is made
                self.write_model(version, model)
                manifest = self.read_manifest()
                if (version.number, version.model) not in [
                    (other.number, other.model) for other in manifest.retired
                ]:
                    self.delete_model(version)  # no manifest names it any more
                    raise self._overtaken()
                manifest = manifest.clear([version])
            if found != "active":
                version = version.replace(owner=uuid.uuid4().hex)
                self.write_manifest(manifest.begin(version))
            self.make_room(version)
        return version, found

    def require_owner(self, version: V) -> Manifest[V]:
        """The manifest as it is now. Raises StoreError if it no longer names `version` as written by this run."""
        manifest = self.read_manifest()
        if (version.number, version.owner) not in [
            (other.number, other.owner) for other in manifest.maintained
        ]:
            raise self._overtaken()
        return manifest

    def _overtaken(self) -> StoreError:
        return StoreError(
            f"{self.url}: another run has begun since, and this one stops; searches use nothing that it wrote"
        )

    def switch(self, version: V) -> None:
        """Searches use `version`, which this run has written, from now on. `clear` deletes what it replaces."""
        with self.changing():
            self.write_manifest(self.require_owner(version).activate(version))

    def clear(self, progress: Progress | None = None) -> Manifest[V]:
        """Deletes what is retired, and returns the manifest as it is then: another run may have begun meanwhile."""
        with self.changing():
            gone = self.read_manifest().retired
            if not gone:
                return self.read_manifest()
            self.delete_offsets(gone, progress)
            manifest = self.read_manifest()
            previous = {version.number for version in manifest.previous.values()}
            for version in gone:
                if version.number not in previous:
                    self.delete_model(version)
            manifest = manifest.clear(gone)
            self.write_manifest(manifest)
            return manifest

    def remove(self, progress: Progress | None = None) -> None:
        with self.changing():
            manifest = self.read_manifest().withdraw(self.vector)
            if manifest.retired:
                self.write_manifest(manifest)
                manifest = self.clear(progress)
            if not manifest.everything and not manifest.previous:
                self.delete_manifest()
