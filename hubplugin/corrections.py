"""The `Manifest`, a store's one document of its corrections, and its driver.

A *version* is one model written to one vector of a store. A vector has at most one
active version, by which searches rank, and one previous version, of which only the
model is left: `rollback` writes it. A store has at most one version that is being
written. Any other version is retired until nothing of it is left in the store:

    begin, activate    the active version becomes the previous one; its offsets retire
    begin, give_up     a half-written version retires; another model is written
    withdraw           all versions of one vector retire
    clear              retired versions have been deleted

Each is a pure function: a manifest never changes, and each returns the next one.
`ManifestStore` drives them: an adapter gives it one document that is read and written
in one step, a place for models, and room for one number a target. A kill between any
two steps leaves a manifest by which the next run goes on: a version is listed before any
of it is written, and until all of it is deleted.
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
"""The version of a manifest. A reader refuses any other: up to 6, each store had its
own."""


class Record(BaseModel):
    """A part of a manifest, which never changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def replace(self, **fields: Any) -> Self:
        """Return a copy with other `fields`."""
        return self.model_copy(update=fields)


class Version(Record):
    """One model for one vector of a store. An adapter adds fields of its own.

    number: Names the offsets in the targets.
    word: A random name, since two runs that begin at once choose the same number. What a
        run deletes is named after it.
    vector: The name of the vector; "" in a store with one vector.
    model: The fingerprint of the model.
    metric, dim: Metric and dimensions of the model.
    mapped: True if the model has a query map.
    made: The time when its writing began.
    owner: The run that writes it.
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
        """Return version `number` of `vector`, by `model`, whose writing begins now."""
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
    """All corrections of a store; `active` and `previous` by the name of the vector."""

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
        """Read a manifest. A job never overwrites a manifest that is refused.

        Args:
            content: The JSON, as text or parsed.
            place: The place of the manifest, for errors.
            mend: What the user can do, for errors.

        Raises:
            StoreError: Another version of hubplugin wrote it, or it is damaged.
        """
        damaged = f"{place} has a manifest that is damaged"
        try:
            values = content if isinstance(content, Mapping) else json.loads(content)
            written = values.get("format") if isinstance(values, Mapping) else FORMAT
            if type(written) is int and written != FORMAT:
                advice = "upgrade hubplugin" if written > FORMAT else mend
                raise StoreError(
                    f"{place} has a manifest in format {written} of hubplugin "
                    f"{values.get('hubplugin')}; this version ({__version__}) reads "
                    f"format {FORMAT}: {advice}"
                )
            return cls.model_validate(values).replace(hubplugin=__version__)
        except ValidationError as error:
            at = ".".join(map(str, error.errors()[0]["loc"])) or "its beginning"
            raise StoreError(f"{damaged} at {at!r}; {mend}") from None
        except (ValueError, RecursionError):
            raise StoreError(f"{damaged}: it is no JSON; {mend}") from None

    def find_current(self, vector: str = "") -> tuple[V | None, bool]:
        """Return the active or half-written version of `vector`, and True if active."""
        if vector in self.active:
            return self.active[vector], True
        if self.writing is not None and self.writing.vector == vector:
            return self.writing, False
        return None, False

    @property
    def maintained(self) -> tuple[V, ...]:
        """The versions whose offsets a write to a target must bring up to date."""
        active = tuple(self.active.values())
        return active if self.writing is None else (*active, self.writing)

    @property
    def everything(self) -> tuple[V, ...]:
        """Every version whose offsets may lie in the store."""
        return (*self.maintained, *self.retired)

    def find(self, vector: str, model: str, **fields: object) -> tuple[V | None, Found]:
        """Return the version of `vector` that has this `model` and these `fields`.

        Also return its state: an active version is amended, a half-written one finished.
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
        """Return the manifest whose half-written version is retired."""
        if self.writing is None:
            return self
        return self.replace(writing=None, retired=(*self.retired, self.writing))

    def begin(self, version: V) -> Self:
        """Return the manifest while `version` is written, by whichever run."""
        goes_on = self.writing is not None and self.writing.number == version.number
        manifest = self if goes_on else self.give_up()
        last = max(self.last_number, version.number)
        return manifest.replace(writing=version, last_number=last)

    def activate(self, version: V) -> Self:
        """Return the manifest by which searches use `version`.

        The version that they used becomes the previous one, and its offsets retire. The
        former previous version retires with its model. If `version` was active already,
        only its fields are updated.
        """
        vector = version.vector
        replaced = self.active.get(vector)
        active = self.active | {vector: version}
        if replaced is None:
            return self.replace(active=active, writing=None)
        if replaced.number == version.number:
            return self.replace(active=active)
        gone = [replaced]
        before = self.previous.get(vector)
        if before is not None and before.number != version.number:
            gone.insert(0, before)
        return self.replace(
            active=active,
            previous=self.previous | {vector: replaced},
            writing=None,
            retired=(*self.retired, *gone),
        )

    def withdraw(self, vector: str = "") -> Self:
        """Return the manifest without a correction of `vector`.

        The active, the previous and the half-written version retire.
        """
        gone = [
            version
            for version in (*self.maintained, *self.previous.values())
            if version.vector == vector
        ]
        return self.replace(
            active={n: v for n, v in self.active.items() if n != vector},
            previous={n: v for n, v in self.previous.items() if n != vector},
            writing=None if self.writing in gone else self.writing,
            retired=(*self.retired, *gone),
        )

    def clear(self, gone: Sequence[V]) -> Self:
        """Return the manifest once the retired versions `gone` are deleted."""
        numbers = {version.number for version in gone}
        left = tuple(v for v in self.retired if v.number not in numbers)
        return self.replace(retired=left)


class ManifestStore(Store, Generic[V]):
    """A store whose corrections are the versions of one manifest.

    An adapter gives the nine small methods that follow, and `begin`, which returns its
    own `Writing` of the version that `start_version` returns. The writing calls
    `require_owner` before each step that another run must not interfere with, and
    `switch` and `clear` to activate.
    """

    vector: str = ""
    """The name of the corrected vector, where one manifest is for several."""

    _known: OffsetModel | None = None

    @abstractmethod
    def read_manifest(self) -> Manifest[V]:
        """Return the manifest as it is now, an empty one if there is none.

        `Manifest.read` refuses what cannot be read.
        """

    @abstractmethod
    def write_manifest(self, manifest: Manifest[V]) -> None:
        """Put `manifest` in the place of the one before, in one step."""

    @abstractmethod
    def delete_manifest(self) -> None:
        """Delete the manifest, which is empty, with its place."""

    @abstractmethod
    def new_version(self, model: OffsetModel, number: int) -> V:
        """Return `Version.of` the `model`, with what the adapter adds."""

    @abstractmethod
    def read_model(self, version: V) -> OffsetModel:
        """Return the model of `version`, whole. Raises StoreError or ModelFileError."""

    @abstractmethod
    def write_model(self, version: V, model: OffsetModel) -> None:
        """Keep `model`, over whatever a kill left under the number of `version`."""

    @abstractmethod
    def delete_model(self, version: V) -> None:
        """Delete what `write_model` wrote, which may be gone."""

    @abstractmethod
    def make_room(self, version: V) -> None:
        """Make room for one number a target if there is none yet."""

    @abstractmethod
    def delete_offsets(self, versions: Sequence[V], progress: Progress | None) -> None:
        """Delete the offsets of `versions`, which may be gone, and tell `progress`."""

    def changing(self) -> AbstractContextManager[object]:
        """Return the lock or transaction that keeps other runs from the manifest."""
        return nullcontext()

    def find(self, manifest: Manifest[V], model: OffsetModel) -> tuple[V | None, Found]:
        """Return what `manifest` has of `model` for this store's vector."""
        return manifest.find(self.vector, model.fingerprint)

    def next_number(self, manifest: Manifest[V]) -> int:
        """Return a number that no version has had so far."""
        return manifest.last_number + 1

    def seen(self) -> Manifest[V]:
        """Return the manifest for reading only; an adapter may return a cached one."""
        return self.read_manifest()

    def correction(self) -> Correction | None:
        version, is_active = self.seen().find_current(self.vector)
        if version is None:
            return None
        return Correction(self.model(version), is_active, version.made)

    def previous(self) -> OffsetModel | None:
        version = self.seen().previous.get(self.vector)
        return None if version is None else self.read_model(version)

    def active(self) -> V | None:
        """Return the version by which searches rank, None if they are raw."""
        return self.seen().active.get(self.vector)

    def require_active(self) -> V:
        """Return the active version. Raises StoreError if no correction is active."""
        version = self.active()
        if version is None:
            raise StoreError(
                f"{self.url}: no correction is active; run `hubplugin apply` first"
            )
        return version

    def model(self, version: V) -> OffsetModel:
        """Return the model of `version`; the last one is not read again."""
        if self._known is None or self._known.fingerprint != version.model:
            self._known = self.read_model(version)
        return self._known

    def start_version(
        self, model: OffsetModel, progress: Progress | None = None
    ) -> tuple[V, Found]:
        """Return the version of `model` that `begin` writes, and the state it was found in.

        An active version stays as it is. This run takes over a half-written version, and
        the run that had it stops. Otherwise a new version is begun; a half-written one of
        another model is deleted first, so that both need not fit at once.
        """
        with self.changing():
            manifest = self.read_manifest()
            version, found = self.find(manifest, model)
            if version is None:
                if manifest.writing is not None or manifest.retired:
                    self.write_manifest(manifest.give_up())
                    manifest = self.clear(progress)
                manifest, version = self._store_new_version(manifest, model)
            if found != "active":
                version = version.replace(owner=uuid.uuid4().hex)
                self.write_manifest(manifest.begin(version))
            self.make_room(version)
        return version, found

    def _store_new_version(
        self, manifest: Manifest[V], model: OffsetModel
    ) -> tuple[Manifest[V], V]:
        """Write `model` as a new version.

        It is first listed as retired, so that a run killed here leaves something that
        `clear` deletes. If another run has rewritten the manifest meanwhile, undo and
        raise StoreError.
        """
        version = self.new_version(model, self.next_number(manifest))
        listed = manifest.replace(last_number=version.number, retired=(version,))
        self.write_manifest(listed)
        self.write_model(version, model)
        manifest = self.read_manifest()
        if version.word not in {other.word for other in manifest.retired}:
            self.delete_model(version)  # no manifest names it any more
            raise self._overtaken()
        return manifest.clear([version]), version

    def require_owner(self, version: V) -> Manifest[V]:
        """Return the manifest as it is now.

        Raises StoreError if it no longer names `version` as written by this run.
        """
        manifest = self.read_manifest()
        if version.owner not in {other.owner for other in manifest.maintained}:
            raise self._overtaken()
        return manifest

    def _overtaken(self) -> StoreError:
        return StoreError(
            f"{self.url}: another run has begun since, and this one stops; searches "
            "use nothing that it wrote"
        )

    def switch(self, version: V) -> None:
        """Let searches use `version`, which this run has written, from now on.

        `clear` deletes what it replaces.
        """
        with self.changing():
            self.write_manifest(self.require_owner(version).activate(version))

    def clear(self, progress: Progress | None = None) -> Manifest[V]:
        """Delete the retired versions. Return the manifest after that.

        It is read again, since another run may have begun meanwhile.
        """
        with self.changing():
            manifest = self.read_manifest()
            gone = manifest.retired
            if gone:
                self.delete_offsets(gone, progress)
                manifest = self.read_manifest()
                kept = {version.word for version in manifest.previous.values()}
                for version in gone:
                    if version.word not in kept:
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
