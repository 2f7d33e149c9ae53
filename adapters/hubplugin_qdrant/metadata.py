"""The metadata collection `<collection>--hub`: the manifest and the models.

Point 0 is the manifest, which is replaced in one step. Other points hold the models, in
parts. A corrected client keeps manifests and models in a `CorrectionCache`, and reads
manifests again every few seconds.
"""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from qdrant_client import models

from hubplugin.errors import HubpluginError, StoreError
from hubplugin.model import OffsetModel
from hubplugin.recording import Recorder
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import plain_client
from hubplugin_qdrant.calls import Call, Operation
from hubplugin_qdrant.manifest import Payload, QdrantManifest, QdrantVersion
from hubplugin_qdrant.plain_client import Arguments, PointId
from hubplugin_qdrant.requests import has_offset, lacks_augmented_vector
from hubplugin_qdrant.transport import PASSING, Fault, fault_of

MANIFEST_ID = 0
"""The id of the manifest in the metadata collection."""


def _answer(call: Call, otherwise: Any, *faults: Fault) -> Operation[Any]:
    """Return the answer to `call`, or `otherwise` if it fails with one of the `faults`.

    Without `faults`, every fault except `Fault.OTHER` counts.
    """
    try:
        return (yield call)
    except Exception as error:
        fault = fault_of(error)
        if fault is Fault.OTHER or (faults and fault not in faults):
            raise
        return otherwise


def real_name(raw: Any, name: str) -> Operation[str]:
    """Return the name of the collection behind the alias `name`.

    Return `name` itself if it is no alias, or if the api key may not read aliases.
    """
    none = models.CollectionsAliasesResponse(aliases=[])
    answer = yield from _answer(Call(raw.get_aliases), none, Fault.FORBIDDEN)
    for alias in answer.aliases:
        if alias.alias_name == name:
            return str(alias.collection_name)
    return name


def read_payload(raw: Any, collection: str) -> Operation[Payload | None]:
    """Return the manifest of `collection` as stored; None if there is none."""
    call = Call(
        raw.retrieve,
        m.metadata_collection(collection),
        ids=[MANIFEST_ID],
        with_payload=True,
    )
    records = yield from _answer(call, [], Fault.MISSING)
    return (records[0].payload or {}) if records else None


def parse_manifest(payload: Payload | None, collection: str) -> QdrantManifest:
    """Return the manifest in the `payload` of point 0; an empty one for None.

    Raises StoreError if another version of hubplugin wrote the manifest, or if it is
    damaged.
    """
    if payload is None:
        return QdrantManifest()
    place = m.metadata_collection(collection)
    mend = f"delete the collection {place!r} and apply again"
    return QdrantManifest.read(payload, f"collection {collection!r}", mend)


def describe(raw: Any, collection: str) -> Operation[Any]:
    """Return the description of `collection`; None if it does not exist."""
    call = Call(raw.get_collection, collection)
    return (yield from _answer(call, None, Fault.MISSING))


def is_metadata(info: models.CollectionInfo) -> bool:
    """Return True if `info` describes a metadata collection, which has no vectors."""
    return not info.config.params.vectors and not info.config.params.sparse_vectors


def part_ids(version: QdrantVersion) -> list[PointId]:
    """Return the ids of the points that hold the model of `version`, in order."""
    name = f"hubplugin/{version.number}/{version.word}"
    return [
        str(uuid.uuid5(uuid.NAMESPACE_OID, f"{name}/{number}"))
        for number in range(version.parts)
    ]


def read_model(
    raw: Any, collection: str, version: QdrantVersion
) -> Operation[OffsetModel]:
    """Return the model of `version` of `collection`.

    Raises:
        StoreError: If a part is missing, or the parts belong to another version.
        ModelFileError: If a part is damaged.
    """
    place = m.metadata_collection(collection)
    records = []
    for point in part_ids(version):
        records += yield Call(raw.retrieve, place, ids=[point], with_payload=True)
    if len(records) == version.parts:
        texts = [record.payload["part"] for record in records]
        model = OffsetModel.from_texts(texts, f"the model in collection {place!r}")
        if model.fingerprint == version.model:
            return model
    raise StoreError(
        f"the model of version {version.number} is incomplete in {place!r}; apply again"
    )


MANIFEST_SECONDS = 10.0
"""The time for which a cached manifest is used, even if it is changed elsewhere."""

PATIENCE_SECONDS = 1.0
"""The time until a failed read of a manifest is tried again."""

SCROLLED = 1000
"""The number of points read at a time for a filter, if strict mode allows it."""


@dataclass
class CachedManifest:
    """The manifest of a collection, as read at some time.

    collection: The real name of the collection, never an alias.
    manifest: The manifest, without versions whose augmented vectors are gone. None for
        a collection without a correction.
    until: The time at which the manifest must be read again, in monotonic seconds.
    payload: The manifest as stored.

    The remaining attributes are derived from `manifest`.

    manifest_or_empty: The manifest, or an empty manifest instead of None.
    maintained: The versions whose offsets every write must include.
    augmented_vectors: The names of the augmented vectors.
    offset_key: The payload key of the offsets; None if no payload holds any.
    page: The number of points that may be read at a time.
    needs_vectors: True if a query must be a vector before it is rewritten.
    state: The part of the manifest that requests depend on.
    """

    collection: str
    manifest: QdrantManifest | None
    until: float
    payload: Payload | None = None

    def __post_init__(self) -> None:
        self.manifest_or_empty = manifest = self.manifest or QdrantManifest()
        active = manifest.active.values()
        self.maintained = manifest.maintained
        self.augmented_vectors = sorted(m.vectors_of(manifest.stored_versions))
        self.offset_key = manifest.offset_key
        limits = [version.max_candidates or SCROLLED for version in self.maintained]
        self.page = min([SCROLLED, *limits])
        self.needs_vectors = any(
            version.storage == "vector" or version.mapped for version in active
        )
        # Active versions come first in `maintained`, so their number tells them from a
        # half-written one.
        versions = [(version.number, version.word) for version in self.maintained]
        self.state = (self.collection, len(active), *versions)


@dataclass
class CorrectionCache:
    """The manifests and models of the collections that a corrected client uses.

    raw: The plain client.
    recorder: The recorder of queries; None if they are not recorded.
    manifests: The manifests, by the name or alias of the collection.
    fits: The models for writes and for searches with a query map, by fingerprint.
    warned: The warnings given so far: each is given once.
    """

    raw: Any
    recorder: Recorder | None = None
    manifests: dict[str, CachedManifest] = field(default_factory=dict)
    fits: dict[str, OffsetModel] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def lookup(
        self, name: str, stale: CachedManifest | None = None
    ) -> Operation[CachedManifest]:
        """Return the manifest of the collection or alias `name`.

        The manifest is read from the store if it is not cached or too old. Pass a
        manifest that has turned out to be wrong as `stale`: then the manifest is read
        again, unless another thread has already done so.
        """
        cached = self.manifests.get(name)
        if cached is not None:
            if stale is None:
                is_fresh = cached.until > time.monotonic()
            else:
                is_fresh = cached.state != stale.state
            if is_fresh:
                return cached
        try:
            return (yield from self._read(name))
        except Exception as error:
            if fault_of(error) is Fault.OTHER:
                raise
            if name not in self.manifests:
                self.warn(
                    f"the manifest of {name!r} cannot be read at present; until it can, "
                    "its searches are raw here"
                )
            # Use the old manifest until a new one can be read.
            cached = self.manifests.setdefault(name, CachedManifest(name, None, 0.0))
            cached.until = time.monotonic() + PATIENCE_SECONDS
            return cached

    def is_unchanged(self, name: str, cached: CachedManifest) -> Operation[bool]:
        """Return True if the manifest behind `name` is still the one in `cached`.

        Also return True if the server does not answer. Then the manifest is read again
        before its next use.
        """
        try:
            if cached.collection != name:
                real = yield from real_name(self.raw, name)
                if real != cached.collection:
                    return False
            payload = yield from read_payload(self.raw, cached.collection)
            return payload == cached.payload
        except Exception as error:
            if fault_of(error) is Fault.OTHER:
                raise
            cached.until = 0.0
            return True

    def _read(self, name: str) -> Operation[CachedManifest]:
        """Read the manifest of the collection or alias `name`.

        Warn if the collection is corrected, or may be, but searched raw here.
        """
        collection = name
        payload = None
        manifest = None
        # "--hub" ends the name of a metadata collection, which has no correction.
        if not name.endswith(m.metadata_collection("")):
            collection = yield from real_name(self.raw, name)
            try:
                payload = yield from read_payload(self.raw, collection)
            except Exception as error:
                if fault_of(error) is not Fault.FORBIDDEN:
                    raise
                self.warn(
                    f"the api key may not read {m.metadata_collection(collection)!r}: "
                    f"if collection {collection!r} is corrected, its searches are raw "
                    "here; let the key read that collection, too"
                )
        if payload is not None:
            try:
                manifest = parse_manifest(payload, collection)
                manifest = yield from self._as_used(collection, manifest)
            except HubpluginError as error:
                manifest = None
                self.warn(
                    f"{error}; until this is done, its searches are raw here, and "
                    "points written here get no offsets"
                )
        until = time.monotonic() + MANIFEST_SECONDS
        cached = CachedManifest(collection, manifest, until, payload)
        self.manifests[name] = cached
        return cached

    def _as_used(
        self, collection: str, manifest: QdrantManifest
    ) -> Operation[QdrantManifest]:
        """Return `manifest` with the fields that this client needs for searches.

        Versions whose augmented vectors are gone are dropped. Query maps are only read
        for offsets in payloads: augmented vectors already include the map.

        Raises the same errors as `read_model`.
        """
        if m.vectors_of(manifest.stored_versions):
            call = Call(self.raw.get_collection, collection)
            info = yield from _answer(call, None)
            if info is not None:
                vectors = info.config.params.vectors or ()
                manifest = self._without_lost(collection, manifest, vectors)
        active: dict[str, QdrantVersion] = {}
        for name, version in manifest.active.items():
            if version.storage == "vector":
                # Searches look for points that lack the augmented vector, unless there
                # are none. A count of vectors would include vectors of deleted points.
                is_lacking = yield from self._may_have_point(
                    collection, lacks_augmented_vector(version)
                )
                version = version.replace(
                    everywhere=not is_lacking,
                    searches_codes=not plain_client.is_local(self.raw),
                )
            else:
                yield from self._warn_if_lost(collection, version)
                if version.mapped:
                    model = yield from self._read_fit(collection, version)
                    version = version.replace(query_map=model.query_map)
            active[name] = version
        return manifest.replace(active=active)

    def _may_have_point(
        self, collection: str, condition: models.Filter
    ) -> Operation[bool]:
        """Return True if a point meets `condition`, or if no answer comes."""
        call = Call(self.raw.scroll, collection, condition, limit=1, with_payload=False)
        points, _ = yield from _answer(call, (True, None))
        return bool(points)

    def _without_lost(
        self, collection: str, manifest: QdrantManifest, vectors: Collection[str]
    ) -> QdrantManifest:
        """Return `manifest` without versions whose augmented vectors are gone."""
        lost_vectors = m.vectors_of(manifest.stored_versions).difference(vectors)

        def is_usable(version: QdrantVersion | None) -> bool:
            return version is not None and version.augmented_vector not in lost_vectors

        active = {n: v for n, v in manifest.active.items() if is_usable(v)}
        if len(active) < len(manifest.active):
            self.warn(
                f"collection {collection!r} has lost its augmented vector; it is raw "
                "here: run refresh"
            )
        return manifest.replace(
            active=active,
            writing=manifest.writing if is_usable(manifest.writing) else None,
            retired=tuple(filter(is_usable, manifest.retired)),
        )

    def _warn_if_lost(self, collection: str, version: QdrantVersion) -> Operation[None]:
        """Warn if there are points but none has an offset of `version`."""
        call = Call(self.raw.scroll, collection, limit=1, with_payload=[m.KEY])
        records, _ = yield from _answer(call, ((), None))
        if not records or version.field in m.our_offsets(records[0].payload):
            return  # nearly always, one point is enough to tell
        if not (yield from self._may_have_point(collection, has_offset(version))):
            self.warn(
                f"no point of {collection!r} has an offset of version "
                f"{version.number}, the active one in "
                f"{m.metadata_collection(collection)!r}: its searches are raw here; if "
                "a snapshot of the collection alone was restored, run refresh"
            )

    def _read_fit(
        self, collection: str, version: QdrantVersion
    ) -> Operation[OffsetModel]:
        """Return the model of `version`, reading it at most once."""
        if version.model not in self.fits:
            model = yield from read_model(self.raw, collection, version)
            self.fits[version.model] = model
        return self.fits[version.model]

    def read_models(
        self, cached: CachedManifest
    ) -> Operation[list[tuple[QdrantVersion, OffsetModel]]]:
        """Return each version whose offsets a write must include, with its model."""
        pairs: list[tuple[QdrantVersion, OffsetModel]] = []
        for version in cached.maintained:
            model = yield from self._read_fit(cached.collection, version)
            version = version.replace(query_map=model.query_map)
            pairs.append((version, model))
        return pairs

    def warn(self, text: str) -> None:
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, UserWarning, stacklevel=4)


OfClient: TypeAlias = Callable[[CorrectionCache, Arguments], Operation[Any]]
"""Starts the operation of one method of a client, given the arguments by name."""

OnState: TypeAlias = Callable[
    [CorrectionCache, CachedManifest, Arguments], Operation[Any]
]
"""Starts the operation of one method, given also the cached manifest."""

CHANGES = 10
"""The number of changes of a collection after which a request is not repeated."""


def corrected(operation: OnState, name: str | None = None) -> OfClient:
    """Return an operation that runs `operation` on corrected collections only.

    On other collections, the returned operation calls the plain method `name`; the
    default is the name of `operation`. If the state of the collection changes during a
    failed run, `operation` is run again.
    """
    plain_method = name or operation.__name__

    def method(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
        collection = arguments["collection_name"]
        cached = yield from cache.lookup(collection)
        changes = 0
        while cached.manifest is not None:
            try:
                return (yield from operation(cache, cached, arguments))
            except Exception as error:
                if fault_of(error) in PASSING or changes == CHANGES:
                    raise
                current = yield from cache.lookup(collection, cached)
                if current.state == cached.state:
                    raise
                cached = current
                changes += 1
        return (yield Call(getattr(cache.raw, plain_method), **arguments))

    return method
