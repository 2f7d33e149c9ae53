"""The metadata collection `<collection>--hub`: manifest and models, read and written.

Its point 0 is the manifest, which is replaced in one step; a model lies in other points, in parts. `CorrectionCache` is
what a corrected client knows: manifests that are read again every few seconds, and models.
"""

from __future__ import annotations

import functools
import time
import uuid
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from qdrant_client import models

from hubplugin.errors import HubpluginError, StoreError
from hubplugin.model import OffsetModel, QueryMap
from hubplugin.recording import Recorder
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import plain_client
from hubplugin_qdrant.calls import Call, Computing, Operation
from hubplugin_qdrant.manifest import Payload, QdrantManifest, QdrantVersion
from hubplugin_qdrant.offsets import read_offset
from hubplugin_qdrant.plain_client import Arguments, PointId
from hubplugin_qdrant.requests import has_offset, has_vector, lacks_augmented_vector
from hubplugin_qdrant.transport import PASSING, Fault, fault_of

MANIFEST_ID = 0
"""Id of the point of the metadata collection that is the manifest."""


def _answer(call: Call, otherwise: Any, *faults: Fault) -> Operation[Any]:
    """Return the answer to `call`, or `otherwise` if it fails with one of the `faults`;
    without `faults`, if it fails with any fault of a connection."""
    try:
        return (yield call)
    except Exception as error:
        fault = fault_of(error)
        if fault is Fault.OTHER or (faults and fault not in faults):
            raise
        return otherwise


def real_name(raw: Any, name: str) -> Operation[str]:
    """Return the collection behind the alias `name`, as the client `raw` knows it.

    Return `name` itself if it is no alias, or if the api key may not read aliases.
    """
    answer = yield from _answer(Call(raw.get_aliases), None, Fault.FORBIDDEN)
    if answer is not None:
        for alias in answer.aliases:
            if alias.alias_name == name:
                return str(alias.collection_name)
    return name


def read_payload(raw: Any, collection: str) -> Operation[Payload | None]:
    """Return the manifest of `collection` as the client `raw` reads it; None if there
    is none."""
    call = Call(
        raw.retrieve,
        m.metadata_collection(collection),
        ids=[MANIFEST_ID],
        with_payload=True,
    )
    records = yield from _answer(call, [], Fault.MISSING)
    return (records[0].payload or {}) if records else None


def parse_manifest(payload: Payload, collection: str) -> QdrantManifest:
    """Return the manifest of `collection` in the `payload` of point 0.

    Raises StoreError if another version wrote it, or it is damaged.
    """
    mend = (
        f"delete the collection {m.metadata_collection(collection)!r} and apply again"
    )
    return QdrantManifest.read(payload, f"collection {collection!r}", mend)


def read_manifest(raw: Any, collection: str) -> Operation[QdrantManifest]:
    """The manifest of `collection` (no alias) in the store of `raw`, an empty one if it has none."""
    payload = yield from read_payload(raw, collection)
    return QdrantManifest() if payload is None else parse_manifest(payload, collection)


def write_manifest(
    raw: Any, collection: str, manifest: QdrantManifest
) -> Operation[None]:
    """Replaces the manifest of `collection` in the store of `raw` by `manifest`, in one step."""
    yield from _write(raw, collection, MANIFEST_ID, manifest.model_dump(mode="json"))


def _write(
    raw: Any, collection: str, point: PointId, payload: Payload
) -> Operation[None]:
    points = [models.PointStruct(id=point, vector={}, payload=payload)]
    yield Call(raw.upsert, m.metadata_collection(collection), points, wait=True)


def exists(raw: Any, collection: str) -> Operation[bool]:
    """Tell whether `collection` has a metadata collection in the store of `raw`.

    Raises StoreError where the user has a collection of that name.
    """
    name = m.metadata_collection(collection)
    info = yield from _answer(Call(raw.get_collection, name), None, Fault.MISSING)
    if info is not None and not is_metadata(info):
        raise StoreError(
            f"collection {name!r} has vectors, so it is yours; hubplugin keeps the "
            f"correction of {collection!r} in a collection of that name, which must be "
            "free"
        )
    return info is not None


def is_metadata(info: models.CollectionInfo) -> bool:
    """Whether a collection of our name is ours, which has no vectors."""
    return not info.config.params.vectors and not info.config.params.sparse_vectors


def create(
    raw: Any, collection: str, replication_factor: int | None
) -> Operation[None]:
    """Create the metadata collection of `collection`, unless it is there."""
    try:
        yield Call(
            raw.create_collection,
            m.metadata_collection(collection),
            vectors_config={},
            shard_number=1,
            replication_factor=replication_factor,
            on_disk_payload=True,
            # The limits of a server may be its default.
            strict_mode_config=models.StrictModeConfig(enabled=False),
        )
    except Exception:
        if not (yield from exists(raw, collection)):
            raise


def part_ids(version: QdrantVersion) -> list[PointId]:
    """Return the ids of the points that hold the model of `version`, in order."""
    name = f"hubplugin/{version.number}/{version.word}"
    return [
        str(uuid.uuid5(uuid.NAMESPACE_OID, f"{name}/{number}"))
        for number in range(version.parts)
    ]


def write_model(
    raw: Any, collection: str, version: QdrantVersion, model: OffsetModel
) -> Operation[None]:
    """Write `model` as that of `version` of `collection`, in parts."""
    for point, part in zip(part_ids(version), model.to_texts(), strict=True):
        yield from _write(raw, collection, point, {"part": part})


def read_model(
    raw: Any, collection: str, version: QdrantVersion
) -> Operation[OffsetModel]:
    """Return the model of `version` of `collection`.

    Raises:
        StoreError: A part of it is missing, or it is that of another version.
        ModelFileError: A part of it is damaged.
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


def delete_model(raw: Any, collection: str, version: QdrantVersion) -> Operation[None]:
    place = m.metadata_collection(collection)
    selector = models.PointIdsList(points=part_ids(version))
    yield Call(raw.delete, place, points_selector=selector, wait=True)


MANIFEST_SECONDS = 10.0
"""For how long a manifest is taken to be the current one; a change made elsewhere is noticed within it."""

PATIENCE_SECONDS = 1.0
"""When the manifest is asked for again while its collection is away for a moment."""

SCROLLED = 1000
"""Points that a filter chooses, read at a time, where strict mode does not limit them."""


@dataclass
class CachedManifest:
    """The manifest of a collection, valid until `until`, in monotonic seconds.

    collection: its real name, where it was looked up by an alias. manifest: None if it
    has no correction; without the versions whose augmented vectors are not there.
    payload: the manifest as it lies in the store.

    What follows of `manifest`: augmented_vectors, offset_key: what of the collection is
    ours. page: how many points may be read at a time. needs_vectors: whether a query
    must be a vector before it is rewritten, for which a document is embedded.
    maintained: the versions that a write must bring along. state: what of all this a
    request depends on.
    """

    collection: str
    manifest: QdrantManifest | None
    until: float
    payload: Payload | None = None

    def __post_init__(self) -> None:
        manifest = self.manifest or QdrantManifest()
        active = manifest.active.values()
        self.maintained = manifest.maintained
        self.augmented_vectors = m.vectors_of(manifest.everything)
        self.offset_key = manifest.offset_key
        limits = [version.max_candidates or SCROLLED for version in self.maintained]
        self.page = min(SCROLLED, *limits, SCROLLED)
        self.needs_vectors = any(
            version.storage == "vector" or version.mapped for version in active
        )
        versions = [(version.number, version.word) for version in self.maintained]
        self.state = (self.collection, len(active), *versions)


@dataclass
class CorrectionCache:
    """What a corrected client knows: the manifests and models of its collections.

    raw: the plain client. recorder: keeps the queries, if they are to be kept. fits,
    maps: models for writes and query maps for searches, by the fingerprint of the
    model.
    """

    raw: Any
    recorder: Recorder | None = None
    manifests: dict[str, CachedManifest] = field(default_factory=dict)
    fits: dict[str, OffsetModel] = field(default_factory=dict)
    maps: dict[str, QueryMap | None] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def lookup(
        self, name: str, stale: CachedManifest | None = None
    ) -> Operation[CachedManifest]:
        """Return the manifest of the collection or alias `name`.

        It is read if it is not cached or too old. A `stale` manifest is no longer so,
        or not only; it is read again, unless another thread has seen the change.
        """
        cached = self.manifests.get(name)
        if cached is not None:
            is_fresh = cached.until > time.monotonic()
            if stale is not None:
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
                    f"what is known of {name!r} cannot be read just now; until it can, "
                    "its searches are raw here"
                )
            # Until it can be read again the old one serves.
            cached = self.manifests.setdefault(name, CachedManifest(name, None, 0.0))
            cached.until = time.monotonic() + PATIENCE_SECONDS
            return cached

    def is_unchanged(self, name: str, cached: CachedManifest) -> Operation[bool]:
        """Tell whether the manifest behind `name` is still the one that is `cached`."""
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
        """Read what is so now of `name`, and warn of what keeps its searches raw."""
        collection, payload, manifest = name, None, None
        if not name.endswith(m.metadata_collection("")):
            collection = yield from real_name(self.raw, name)
            payload = yield from self._read_payload(collection)
        if payload is not None:
            try:
                manifest = parse_manifest(payload, collection)
                manifest = yield from self._as_used(collection, manifest)
            except HubpluginError as error:
                manifest = None
                self.warn(
                    f"{error}; until then its searches are raw here, and what is "
                    "written gets no offsets"
                )
        until = time.monotonic() + MANIFEST_SECONDS
        cached = CachedManifest(collection, manifest, until, payload)
        self.manifests[name] = cached
        return cached

    def _read_payload(self, collection: str) -> Operation[Payload | None]:
        try:
            return (yield from read_payload(self.raw, collection))
        except Exception as error:
            if fault_of(error) is not Fault.FORBIDDEN:
                raise
            self.warn(
                f"the api key may not read {m.metadata_collection(collection)!r}: if "
                f"collection {collection!r} is corrected, its searches are raw here; "
                "let the key read that collection, too"
            )
            return None

    def _as_used(
        self, collection: str, manifest: QdrantManifest
    ) -> Operation[QdrantManifest]:
        """Return `manifest` with what this client searches by.

        That is the maps of queries, and whether a point lacks its augmented vector:
        without such points no search need look for them. (A count would count vectors
        of deleted points.) Versions whose augmented vectors are gone are left out.
        Raises what `read_model` raises.
        """
        if m.vectors_of(manifest.everything):
            call = Call(self.raw.get_collection, collection)
            info = yield from _answer(call, None)
            if info is not None:
                manifest = self._without_lost(
                    collection, manifest, info.config.params.vectors or ()
                )
        active: dict[str, QdrantVersion] = {}
        for name, version in manifest.active.items():
            if version.storage == "vector":
                condition = lacks_augmented_vector(version)
                lacking = Call(
                    self.raw.scroll, collection, condition, limit=1, with_payload=False
                )
                points, _ = yield from _answer(lacking, (True, None))
                codes = not plain_client.is_local(self.raw)
                version = version.replace(everywhere=not points, codes=codes)
            else:
                yield from self._warn_if_lost(collection, version)
                if version.mapped:  # else the map lies in the augmented vectors
                    query_map = yield from self._read_map(collection, version)
                    version = version.replace(query_map=query_map)
            active[name] = version
        return manifest.replace(active=active)

    def _without_lost(
        self, collection: str, manifest: QdrantManifest, vectors: Collection[str]
    ) -> QdrantManifest:
        """Return `manifest` without versions whose augmented vectors are gone."""
        lost = {*m.vectors_of(manifest.everything)}.difference(vectors)
        is_there = [
            version
            for version in manifest.everything
            if version.storage == "payload" or version.augmented_vector not in lost
        ]
        if lost & {*m.vectors_of(manifest.active.values())}:
            self.warn(
                f"collection {collection!r} has lost its augmented vector; it is raw "
                "here: run refresh"
            )
        return manifest.replace(
            active={n: v for n, v in manifest.active.items() if v in is_there},
            writing=manifest.writing if manifest.writing in is_there else None,
            retired=tuple(v for v in manifest.retired if v in is_there),
        )

    def _warn_if_lost(self, collection: str, version: QdrantVersion) -> Operation[None]:
        """Warn if points have the vector of `version`, and none has its offset."""
        one = Call(self.raw.scroll, collection, limit=1)
        first, _ = yield from _answer(Call(one, with_payload=[m.KEY]), ((), None))
        if not first or read_offset(version, first[0].payload) is not None:
            return  # at once, as nearly always
        call = Call(one, scroll_filter=has_offset(version), with_payload=False)
        with_offset, _ = yield from _answer(call, (True, None))
        condition = models.Filter(must=has_vector(version.vector))
        call = Call(one, scroll_filter=condition, with_payload=False)
        with_vector, _ = yield from _answer(call, ((), None))
        if with_offset or not with_vector:
            return
        self.warn(
            f"no point of {collection!r} has an offset of version {version.number}, "
            f"the active one in {m.metadata_collection(collection)!r}: its searches "
            "are raw here; if a snapshot of the collection alone was restored, run "
            "refresh"
        )

    def _read_map(
        self, collection: str, version: QdrantVersion
    ) -> Operation[QueryMap | None]:
        if version.model not in self.maps:
            model = yield from read_model(self.raw, collection, version)
            self.maps[version.model] = model.query_map
        return self.maps[version.model]

    def read_models(
        self, cached: CachedManifest
    ) -> Operation[list[tuple[QdrantVersion, OffsetModel]]]:
        """Return the versions that a write must bring along, each with its model."""
        pairs: list[tuple[QdrantVersion, OffsetModel]] = []
        for version in cached.maintained:
            model = self.fits.get(version.model)
            if model is None:
                model = yield from read_model(self.raw, cached.collection, version)
                self.fits[version.model] = model
            pairs.append((version.with_map(model), model))
        return pairs

    def embed_queries(
        self, requests: list[models.QueryRequest]
    ) -> Operation[list[models.QueryRequest]]:
        """`requests` with the documents that they ask for the nearest of embedded, as
        the plain client would do it."""
        requests = [
            r.model_copy(update={"query": plain_client.resolve(r.query)})
            for r in requests
        ]
        embedded: list[models.QueryRequest] = yield Computing(
            plain_client.embed, self.raw, requests, True
        )
        return embedded

    def warn(self, text: str) -> None:
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, UserWarning, stacklevel=4)

    def forget(self) -> None:
        self.manifests.clear()


OfClient: TypeAlias = Callable[[CorrectionCache, Arguments], Operation[Any]]
"""What a client does for one method, given the arguments by name."""


OnState: TypeAlias = Callable[
    [CorrectionCache, CachedManifest, Arguments], Operation[Any]
]
"""The same, given what is known of the collection."""

CHANGES = 10
"""How many changes of a collection may come one after the other while one request is made."""


def retry_on_conflict(operation: OnState) -> OfClient:
    """Return `operation`, which is made again where the state of its collection changes."""

    @functools.wraps(operation)
    def retry(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
        name = arguments["collection_name"]
        cached = yield from cache.lookup(name)
        for _ in range(CHANGES):
            try:
                return (yield from operation(cache, cached, arguments))
            except Exception as error:
                if cached.manifest is None or fault_of(error) in PASSING:
                    raise
                now = yield from cache.lookup(name, cached)
                if now.state == cached.state:
                    raise
                cached = now
        return (yield from operation(cache, cached, arguments))

    return retry
