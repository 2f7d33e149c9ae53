"""The metadata collection `<collection>--hub`: manifest and models, read and written.

Its point 0 is the manifest, which is replaced in one step; a model lies in other points, in parts. `CorrectionCache` is
what a corrected client knows: manifests that are read again every few seconds, and models.
"""

from __future__ import annotations

import functools
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from qdrant_client import models

from hubplugin.errors import HubpluginError, StoreError
from hubplugin.model import OffsetModel
from hubplugin.recording import Recorder
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import plain_client
from hubplugin_qdrant.calls import Call, Computing, Operation
from hubplugin_qdrant.manifest import Payload, QdrantManifest, QdrantVersion
from hubplugin_qdrant.offsets import (
    StoredOffsets,
    awaits_embedding,
    compute_stored,
    read_offset,
)
from hubplugin_qdrant.plain_client import Arguments
from hubplugin_qdrant.requests import has_offset, has_vector, lacks_augmented_vector
from hubplugin_qdrant.transport import PASSING, Fault, fault_of

MANIFEST_ID = 0
"""Id of the point of the metadata collection that is the manifest."""


def _answer(call: Call, otherwise: Any, *faults: Fault) -> Operation[Any]:
    """The answer to `call`, or what is taken to be so `otherwise`: at one of the `faults`, or at any that there is."""
    try:
        return (yield call)
    except Exception as error:
        fault = fault_of(error)
        if fault is Fault.OTHER or (faults and fault not in faults):
            raise
        return otherwise


def real_name(raw: Any, name: str) -> Operation[str]:
    """The collection behind an alias, asked of `raw`; `name` itself where it is none, or where the aliases may not be
    read."""
    found = yield from _answer(Call(raw.get_aliases), None, Fault.FORBIDDEN)
    aliases = found.aliases if found is not None else ()
    return next(
        (alias.collection_name for alias in aliases if alias.alias_name == name), name
    )


def read_payload(raw: Any, collection: str) -> Operation[Payload | None]:
    """The manifest of `collection` as it is written in the store of `raw`, None if there is none."""
    call = Call(
        raw.retrieve,
        m.metadata_collection(collection),
        ids=[MANIFEST_ID],
        with_payload=True,
    )
    records = yield from _answer(call, [], Fault.MISSING)
    return (records[0].payload or {}) if records else None


def parse_manifest(payload: Payload, collection: str) -> QdrantManifest:
    """The manifest of `collection` in the `payload` of point 0. Raises StoreError if another version wrote it, or it is
    damaged."""
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
    raw: Any, collection: str, point: int | str, payload: Payload
) -> Operation[None]:
    points = [models.PointStruct(id=point, vector={}, payload=payload)]
    yield Call(raw.upsert, m.metadata_collection(collection), points, wait=True)


def exists(raw: Any, collection: str) -> Operation[bool]:
    """Whether `collection` has a metadata collection in the store of `raw`. Raises StoreError where the user has a
    collection of that name."""
    name = m.metadata_collection(collection)
    info = yield from _answer(Call(raw.get_collection, name), None, Fault.MISSING)
    if info is not None and not is_metadata(info):
        raise StoreError(
            f"collection {name!r} has vectors, so it is yours; hubplugin keeps the correction of {collection!r} in a "
            "collection of that name, which must be free"
        )
    return info is not None


def is_metadata(info: models.CollectionInfo) -> bool:
    """Whether a collection of our name is ours, which has no vectors."""
    return not info.config.params.vectors and not info.config.params.sparse_vectors


def create(
    raw: Any, collection: str, replication_factor: int | None
) -> Operation[None]:
    """Creates the metadata collection of `collection` with `raw`, if it is not there, with the `replication_factor` of
    that."""
    if (yield from exists(raw, collection)):
        return
    try:
        yield Call(
            raw.create_collection,
            m.metadata_collection(collection),
            vectors_config={},
            shard_number=1,
            replication_factor=replication_factor,
            on_disk_payload=True,
            strict_mode_config=models.StrictModeConfig(
                enabled=False
            ),  # the limits of a server may be its default
        )
    except Exception:
        if not (yield from exists(raw, collection)):  # another run has been quicker
            raise


def part_id(version: int, part: int) -> str:
    """The id of part number `part` of the model of version number `version`."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"hubplugin/{version}/{part}"))


def write_model(
    raw: Any, collection: str, version: QdrantVersion, model: OffsetModel
) -> Operation[None]:
    """Writes `model` as that of `version` of `collection`, in parts, with the client `raw`."""
    for number, part in enumerate(model.to_texts()):
        yield from _write(
            raw, collection, part_id(version.number, number), {"part": part}
        )


def read_model(
    raw: Any, collection: str, version: QdrantVersion
) -> Operation[OffsetModel]:
    """The model of `version` of `collection` in the store of `raw`.

    Raises:
        StoreError: a part of it is missing, or it is that of another version.
        ModelFileError: a part of it is damaged.
    """
    place, records = m.metadata_collection(collection), []
    for number in range(version.parts):
        records += yield Call(
            raw.retrieve,
            place,
            ids=[part_id(version.number, number)],
            with_payload=True,
        )
    if len(records) == version.parts:
        texts = [record.payload["part"] for record in records]
        model = OffsetModel.from_texts(texts, f"the model in collection {place!r}")
        if model.fingerprint == version.model:
            return model
    raise StoreError(
        f"the model of version {version.number} is incomplete in {place!r}; apply again"
    )


def delete_model(raw: Any, collection: str, version: QdrantVersion) -> Operation[None]:
    selector = models.PointIdsList(
        points=[part_id(version.number, number) for number in range(version.parts)]
    )
    yield Call(
        raw.delete,
        m.metadata_collection(collection),
        points_selector=selector,
        wait=True,
    )


MANIFEST_SECONDS = 10.0
"""For how long a manifest is taken to be the current one; a change made elsewhere is noticed within it."""

PATIENCE_SECONDS = 1.0
"""When the manifest is asked for again while its collection is away for a moment."""

SCROLLED = 1000
"""Points that a filter chooses, read at a time, where strict mode does not limit them."""


@dataclass
class CachedManifest:
    """The manifest of a collection, valid until `until`, in monotonic seconds.

    collection: its real name, where it was looked up by an alias. manifest: None if it has no correction; without the
    versions whose augmented vectors are not there. payload: the manifest as it lies in the store. theirs: names that
    look like ours, and were not when they were last seen.

    What follows of `manifest`: augmented_vectors, offset_key: what of the collection is ours. page: how many points may
    be read at a time. needs_vectors: whether a query must be a vector before it is rewritten, for which a document is
    embedded. maintained: the versions that a write must bring along. state: what of all this a request depends on.
    """

    collection: str
    manifest: QdrantManifest | None
    until: float
    payload: Payload | None = None
    theirs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        manifest = self.manifest or QdrantManifest()
        self.maintained, active = manifest.maintained, manifest.active.values()
        self.augmented_vectors, self.offset_key = (
            m.vectors_of(manifest.everything),
            manifest.offset_key,
        )
        self.page = min(
            SCROLLED,
            *(version.max_candidates or SCROLLED for version in self.maintained),
            SCROLLED,
        )
        self.needs_vectors = any(
            version.storage == "vector" or version.mapped for version in active
        )
        versions = [
            (v.number, v.vector, v.storage, v.model, v.offset_key)
            for v in self.maintained
        ]
        self.state = (self.collection, len(active), *versions)

    def strange(self, names: Iterable[str]) -> frozenset[str]:
        """Those of `names` that look like ours, and of which `manifest` does not tell."""
        like_ours = {
            name
            for name in names
            if name == m.KEY or m.AUGMENTED_VECTOR.fullmatch(name)
        }
        return frozenset(like_ours - {*self.augmented_vectors, self.offset_key})


@dataclass
class CorrectionCache:
    """What a corrected client adds to the plain one: the manifests and models of the collections that it uses.

    raw: the plain client. recorder: keeps the queries, if they are to be kept. maps: of a
    collection and a vector, the version that was active when its model was read, with
    its map. is_old: see `keeps_payloads`.
    """

    raw: Any
    recorder: Recorder | None = None
    manifests: dict[str, CachedManifest] = field(default_factory=dict)
    fits: dict[str, OffsetModel] = field(default_factory=dict)
    maps: dict[tuple[str, str], QdrantVersion] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    is_old: bool | None = None

    def lookup(
        self, name: str, stale: CachedManifest | None = None
    ) -> Operation[CachedManifest]:
        """The manifest of the collection or alias `name`, read if it is not cached or too old.

        A `stale` manifest is no longer so, or not only; it is read again, unless another thread has seen the change.
        """
        cached = self.manifests.get(name)
        if cached is not None and (
            cached.until > time.monotonic()
            if stale is None
            else cached.state != stale.state
        ):
            return cached
        try:
            return (yield from self._read(name))
        except Exception as error:
            if fault_of(error) is Fault.OTHER:
                raise
            if name not in self.manifests:
                self.warn(
                    f"what is known of {name!r} cannot be read just now; until it can, its searches are raw here"
                )
            cached = self.manifests.setdefault(name, CachedManifest(name, None, 0.0))
            cached.until = (
                time.monotonic() + PATIENCE_SECONDS
            )  # until then the old one serves
            return cached

    def is_unchanged(self, name: str, cached: CachedManifest) -> Operation[bool]:
        """Whether the manifest behind `name` is still the one that is `cached`, as far as the store tells just now."""
        try:
            if (
                cached.collection != name
                and (yield from real_name(self.raw, name)) != cached.collection
            ):
                return False
            return (
                yield from read_payload(self.raw, cached.collection)
            ) == cached.payload
        except Exception as error:
            if fault_of(error) is Fault.OTHER:
                raise
            cached.until = 0.0
            return True

    def lookup_shown(
        self, name: str, cached: CachedManifest, shown: Collection[str]
    ) -> Operation[CachedManifest]:
        """`cached` of the collection or alias `name`, read again if `shown`, names that the server lists, has unknown
        ones that look like ours."""
        if cached.strange(shown) <= cached.theirs:
            return cached
        cached.until = 0.0
        cached = yield from self.lookup(name)
        cached.theirs = cached.strange(shown)
        return cached

    def _read(self, name: str) -> Operation[CachedManifest]:
        """Read what is so now of `name`; warn of what keeps its searches raw."""
        collection = name
        payload = None
        manifest = None
        if not name.endswith(m.metadata_collection("")):
            collection = yield from real_name(self.raw, name)
            payload = yield from self._read_payload(collection)
        if payload is not None:
            try:
                written = parse_manifest(payload, collection)
                manifest = yield from self._as_used(collection, written)
                if len(manifest.active) < len(written.active):
                    self.warn(
                        f"collection {name!r} has lost its augmented vector; it is raw here: run refresh"
                    )
            except HubpluginError as error:
                self.warn(
                    f"{error}; until then its searches are raw here, and what is written gets no offsets"
                )
        cached = CachedManifest(
            collection, manifest, time.monotonic() + MANIFEST_SECONDS, payload
        )
        self.manifests[name] = cached
        return cached

    def _read_payload(self, collection: str) -> Operation[Payload | None]:
        try:
            return (yield from read_payload(self.raw, collection))
        except Exception as error:
            if fault_of(error) is not Fault.FORBIDDEN:
                raise
            self.warn(
                f"the api key may not read {m.metadata_collection(collection)!r}: if collection {collection!r} "
                "is corrected, its searches are raw here; let the key read that collection, too"
            )
            return None

    def _as_used(
        self, collection: str, manifest: QdrantManifest
    ) -> Operation[QdrantManifest]:
        """`manifest` with what is so for now: the maps by which this client maps
        queries, out of their models; whether a point lacks its augmented vector, and
        whether there are codes. Without such points no search need look for them, which
        would take a look at every point. (A count would count vectors of deleted points.)

        Versions whose augmented vectors are not there are left out: not yet, where one is being written, or no more, in
        a collection that was made anew. Raises what `read_model` raises. Warns where all offsets in payloads are gone.
        """
        active: dict[str, QdrantVersion] = {}
        for name, version in manifest.active.items():
            if (
                version.mapped and version.storage == "payload"
            ):  # else the map lies in the augmented vectors
                known = self.maps.get((collection, name))
                if known is None or known.model != version.model:
                    model = yield from read_model(self.raw, collection, version)
                    known = self.maps[collection, name] = version.with_map(model)
                version = version.with_map(known)
            active[name] = version
        manifest = manifest.replace(active=active)
        if m.vectors_of(manifest.everything):
            info = yield from _answer(Call(self.raw.get_collection, collection), None)
            manifest = (
                manifest
                if info is None
                else _without_lost(manifest, info.config.params.vectors or ())
            )
        active = dict(manifest.active)
        for name, version in manifest.active.items():
            if version.storage == "payload":
                yield from self._warn_if_lost(collection, version)
            else:
                condition = lacks_augmented_vector(version)
                lacking = Call(
                    self.raw.scroll, collection, condition, limit=1, with_payload=False
                )
                points, _ = yield from _answer(lacking, (True, None))
                active[name] = version.replace(
                    everywhere=not points, codes=not plain_client.is_local(self.raw)
                )
        return manifest.replace(active=active)

    def _warn_if_lost(self, collection: str, version: QdrantVersion) -> Operation[None]:
        """Warns if points have the vector of `version`, and not one of them has an offset of it."""
        text = (
            f"no point of {collection!r} has an offset of version {version.number}, the active one in "
            f"{m.metadata_collection(collection)!r}: its searches are raw here; if a snapshot of the collection alone "
            "was restored, run refresh"
        )
        if text in self.warned:
            return
        one = Call(self.raw.scroll, collection, limit=1)
        first, _ = yield from _answer(
            Call(one, with_payload=[version.offset_key]), ((), None)
        )
        if not first or read_offset(version, first[0].payload) is not None:
            return  # at once, as nearly always
        with_offset = Call(one, scroll_filter=has_offset(version), with_payload=False)
        if (yield from _answer(with_offset, (True, None)))[0]:
            return
        with_vector = Call(
            one,
            scroll_filter=models.Filter(must=has_vector(version.vector)),
            with_payload=False,
        )
        if (yield from _answer(with_vector, ((), None)))[0]:
            self.warn(text)

    def read_models(
        self, cached: CachedManifest
    ) -> Operation[list[tuple[QdrantVersion, OffsetModel]]]:
        """The versions of a collection that a write must bring along, each with its model."""
        pairs: list[tuple[QdrantVersion, OffsetModel]] = []
        for version in cached.maintained:
            if version.model not in self.fits:
                self.fits[version.model] = yield from read_model(
                    self.raw, cached.collection, version
                )
            model = self.fits[version.model]
            pairs.append(
                (version.with_map(model) if version.mapped else version, model)
            )
        return pairs

    def compute_stored(
        self, cached: CachedManifest, points: Sequence[Any]
    ) -> Operation[list[StoredOffsets]]:
        """What each of `points` stores in the collection of `cached`; see `offsets.compute_stored`."""
        pairs = yield from self.read_models(cached)
        if awaits_embedding(points, cached.maintained):
            self.warn(
                f"collection {cached.collection!r}: documents that the server embeds get no offset here; run refresh"
            )
        stored: list[StoredOffsets] = yield Computing(compute_stored, points, pairs)
        return stored

    def keeps_payloads(self) -> Operation[bool]:
        """Whether the server keeps the payload of a point that is written without one, as 1.14 does, or may do so."""
        if self.is_old is None and not plain_client.is_local(self.raw):
            info = yield from _answer(Call(self.raw.info), None)
            if info is None:
                return True
            self.is_old = info.version.startswith("1.14.")
        return bool(self.is_old)

    def embed_queries(
        self, requests: list[models.QueryRequest]
    ) -> Operation[list[models.QueryRequest]]:
        """`requests` with the documents that they ask for the nearest of embedded, as the plain client would do it."""
        requests = [
            plain_client.copy_with(r, {"query": plain_client.resolve(r.query)})
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


def _without_lost(manifest: QdrantManifest, vectors: Collection[str]) -> QdrantManifest:
    """`manifest` without the versions whose augmented vectors are not among the `vectors`."""

    def is_there(version: QdrantVersion) -> bool:
        return version.storage == "payload" or version.augmented_vector in vectors

    active = {
        name: version for name, version in manifest.active.items() if is_there(version)
    }
    writing = (
        manifest.writing
        if manifest.writing is not None and is_there(manifest.writing)
        else None
    )
    return manifest.replace(
        active=active,
        writing=writing,
        retired=tuple(filter(is_there, manifest.retired)),
    )


OfClient: TypeAlias = Callable[[CorrectionCache, Arguments], Operation[Any]]
"""What a client does for one method, given the arguments by name."""


OnState: TypeAlias = Callable[
    [CorrectionCache, CachedManifest, Arguments], Operation[Any]
]
"""The same, given what is known of the collection."""

CHANGES = 10
"""How many changes of a collection may come one after the other while one request is made."""


def retry_on_conflict(operation: OnState) -> OfClient:
    """`operation` on what is known of its collection; made again if it fails because that has changed meanwhile."""

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
                if now.state == cached.state and not (
                    _lacks_ours(error, now) or _lacks_ours(error, cached)
                ):
                    raise
                cached = now
        return (yield from operation(cache, cached, arguments))

    return retry


def _lacks_ours(error: Exception, cached: CachedManifest) -> bool:
    """Whether `error` says that a vector of ours is not there, which is `cached`: an alias was moved, and back."""
    return not isinstance(error, HubpluginError) and any(
        name in str(error) for name in cached.augmented_vectors
    )
