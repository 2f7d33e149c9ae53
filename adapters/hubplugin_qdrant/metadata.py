"""The metadata collection `<collection>--hub`: manifest and models, read and written.

Its point 0 is the manifest, which is replaced in one step; a model lies in other points, in parts. `CorrectionCache` is
what a corrected client knows: manifests that are read again every few seconds, and models.
"""

from __future__ import annotations

import functools
import math
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
from hubplugin_qdrant.manifest import Manifest, Payload, Version
from hubplugin_qdrant.offsets import StoredOffsets, awaits_embedding, held_offset, stored_offsets
from hubplugin_qdrant.plain_client import Arguments
from hubplugin_qdrant.requests import has_vector, holding_offset, lacking_augmented_vector
from hubplugin_qdrant.transport import PASSING, Fault, fault_of

MANIFEST_ID = 0
"""Id of the point of the metadata collection that is the manifest."""


def real_name(raw: Any, name: str) -> Operation[str]:
    """The collection behind an alias; `name` itself where it is none, or where the aliases may not be read."""
    try:
        aliases = yield Call(raw.get_aliases)
    except Exception as error:
        if fault_of(error) is Fault.FORBIDDEN:
            return name
        raise
    return next((alias.collection_name for alias in aliases.aliases if alias.alias_name == name), name)


def written_manifest(raw: Any, collection: str) -> Operation[Payload | None]:
    """The manifest of `collection` as it is written, None if there is none."""
    try:
        found = yield Call(raw.retrieve, m.metadata_collection(collection), ids=[MANIFEST_ID], with_payload=True)
    except Exception as error:
        if fault_of(error) is Fault.MISSING:
            return None
        raise
    return (found[0].payload or {}) if found else None


def read_manifest(raw: Any, collection: str) -> Operation[Manifest]:
    """The manifest of `collection` (no alias), an empty one if it has none."""
    written = yield from written_manifest(raw, collection)
    return Manifest() if written is None else m.read(written, collection)


def write_manifest(raw: Any, collection: str, manifest: Manifest) -> Operation[None]:
    """Puts `manifest` in the place of the one before, in one step."""
    yield from _write(raw, collection, MANIFEST_ID, manifest.model_dump(mode="json"))


def _write(raw: Any, collection: str, point: int | str, payload: Payload) -> Operation[None]:
    made = models.PointStruct(id=point, vector={}, payload=payload)
    yield Call(raw.upsert, m.metadata_collection(collection), [made], wait=True)


def exists(raw: Any, collection: str) -> Operation[bool]:
    """Whether there is a metadata collection. Raises StoreError where the user has a collection of that name."""
    try:
        found = yield Call(raw.get_collection, m.metadata_collection(collection))
    except Exception as error:
        if fault_of(error) is Fault.MISSING:
            return False
        raise
    if not is_metadata(found):
        raise StoreError(
            f"collection {m.metadata_collection(collection)!r} has vectors, so it is yours; hubplugin keeps the "
            f"correction of {collection!r} in a collection of that name, which must be free"
        )
    return True


def is_metadata(found: models.CollectionInfo) -> bool:
    """Whether a collection of our name is ours, which has no vectors."""
    return not found.config.params.vectors and not found.config.params.sparse_vectors


def create(raw: Any, collection: str, replication_factor: int | None) -> Operation[None]:
    """Creates the metadata collection of `collection`, as well replicated as that, if it is not there."""
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
            strict_mode_config=models.StrictModeConfig(enabled=False),  # the limits of a server may be its default
        )
    except Exception:
        if not (yield from exists(raw, collection)):  # another run has been quicker
            raise


def part_id(version: int, part: int) -> str:
    """The id of one part of the model of a version, given its number."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"hubplugin/{version}/{part}"))


def write_model(raw: Any, collection: str, version: Version, model: OffsetModel) -> Operation[None]:
    """Writes `model`, in parts, as that of `version`."""
    for number, part in enumerate(model.to_texts()):
        yield from _write(raw, collection, part_id(version.number, number), {"part": part})


def read_model(raw: Any, collection: str, version: Version) -> Operation[OffsetModel]:
    """The model of `version` of `collection`. Raises StoreError if a part of it is missing or it is that of another
    version, ModelFileError if one is damaged."""
    place, found = m.metadata_collection(collection), []
    for number in range(version.parts):
        found += yield Call(raw.retrieve, place, ids=[part_id(version.number, number)], with_payload=True)
    if len(found) == version.parts:
        texts = [record.payload["part"] for record in found]
        model = OffsetModel.from_texts(texts, f"the model in collection {place!r}")
        if model.fingerprint == version.model:
            return model
    raise StoreError(f"the model of version {version.number} is incomplete in {place!r}; apply again")


def delete_model(raw: Any, collection: str, version: Version) -> Operation[None]:
    parts: list[Any] = [part_id(version.number, number) for number in range(version.parts)]
    selector = models.PointIdsList(points=parts)
    yield Call(raw.delete, m.metadata_collection(collection), points_selector=selector, wait=True)


MANIFEST_SECONDS = 10.0
"""For how long a manifest is taken to be the current one; a change made elsewhere is noticed within it."""

PATIENCE_SECONDS = 1.0
"""When the manifest is asked for again while its collection is away for a moment."""

SCROLLED = 1000
"""Points that a filter chooses, read at a time, where strict mode does not limit them."""


@dataclass
class CachedManifest:
    """The manifest of a collection, valid until `until` (monotonic seconds; inf: it never expires).

    collection: its real name, where it was looked up by an alias. manifest: None if it has no correction; without the
    versions whose augmented vectors are not there. written: the manifest as it lies in the store. theirs: names that
    look like ours, and were not when they were last seen.

    What follows of `manifest`: augmented_vectors, offset_key: what of the collection is ours. page: how many points may
    be read at a time. needs_vectors: whether a query must be a vector before it is rewritten, for which a document is
    embedded. maintained: the versions that a write must bring along. state: what of all this a request depends on.
    """

    collection: str
    manifest: Manifest | None
    until: float
    written: Payload | None = None
    theirs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        manifest = self.manifest or Manifest()
        self.maintained, active = manifest.maintained, manifest.active.values()
        self.augmented_vectors, self.offset_key = manifest.augmented_vectors(), manifest.offset_key
        self.page = min(SCROLLED, *(version.max_candidates or SCROLLED for version in self.maintained), SCROLLED)
        self.needs_vectors = any(version.storage == "vector" or version.mapped for version in active)
        versions = [(each.number, each.vector, each.storage, each.model, each.offset_key) for each in self.maintained]
        self.state = (self.collection, len(active), *versions)

    def strange(self, names: Iterable[str]) -> frozenset[str]:
        """Those of `names` that look like ours, and of which `manifest` does not tell."""
        ours = (*self.augmented_vectors, self.offset_key)
        return frozenset(name for name in names if name not in ours and m.looks_ours(name))


@dataclass
class CorrectionCache:
    """What a corrected client adds to the plain one: the manifests and models of the collections that it uses.

    raw: the plain client. oversampling, hnsw_ef: take the places of the calibrated ones. recorder: keeps the queries,
    if they are to be kept. maps: of a collection and a vector, the version that was active when its model was read,
    with its map. is_old: see `keeps_payloads`.
    """

    raw: Any
    oversampling: float | None = None
    hnsw_ef: int | None = None
    recorder: Recorder | None = None
    known: dict[str, CachedManifest] = field(default_factory=dict)
    fits: dict[str, OffsetModel] = field(default_factory=dict)
    maps: dict[tuple[str, str], Version] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    is_old: bool | None = None

    def lookup(self, name: str) -> Operation[CachedManifest]:
        """What is known of the collection or alias `name`, read if it is not known or too old."""
        found = self.known.get(name)
        if found is not None and found.until > time.monotonic():
            return found
        return (yield from self._read_again(name, found))

    def lookup_again(self, name: str, known: CachedManifest) -> Operation[CachedManifest]:
        """What is so now of `name`, which is no longer, or not only, what was `known`; as it is read here, or was by
        another thread that has seen the change."""
        found = self.known.get(name)
        if found is not None and found.state != known.state:
            return found
        return (yield from self._read_again(name, found))

    def _read_again(self, name: str, found: CachedManifest | None) -> Operation[CachedManifest]:
        try:
            return (yield from self._looked_up(name))
        except Exception as error:
            if fault_of(error) is Fault.OTHER:
                raise
            if found is None:
                self.warn(f"what is known of {name!r} cannot be read just now; until it can, its searches are raw here")
                found = CachedManifest(name, None, 0.0)
            self.known[name] = found
            found.until = time.monotonic() + PATIENCE_SECONDS  # until then the old one serves
            return found

    def is_unchanged(self, name: str, known: CachedManifest) -> Operation[bool]:
        """Whether the manifest behind `name` is still the one that is `known`, as far as the store tells just now."""
        if known.until == math.inf:
            return True
        try:
            if known.collection != name and (yield from real_name(self.raw, name)) != known.collection:
                return False
            return (yield from written_manifest(self.raw, known.collection)) == known.written
        except Exception as error:
            if fault_of(error) is Fault.OTHER:
                raise
            known.until = 0.0
            return True

    def lookup_shown(self, name: str, known: CachedManifest, shown: Collection[str]) -> Operation[CachedManifest]:
        """`known`, or what is so now if the collection has shown names that look like ours and are not known to be:
        somebody may have applied since."""
        if known.until == math.inf or known.strange(shown) <= known.theirs:
            return known
        known.until = 0.0
        known = yield from self.lookup(name)
        known.theirs = known.strange(shown)
        return known

    def _looked_up(self, name: str) -> Operation[CachedManifest]:
        collection, written, manifest, doubt = name, None, None, None
        if not name.endswith(m.metadata_collection("")):
            collection = yield from real_name(self.raw, name)
            written = yield from self._read(collection)
        if written is not None:
            try:
                manifest = yield from self._mapping(collection, m.read(written, collection))
            except HubpluginError as error:
                doubt = f"{error}; until then its searches are raw here, and what is written gets no offsets"
        if manifest is not None:
            active = manifest.active
            manifest = yield from self._with_vectors_there(collection, manifest)
            if len(manifest.active) < len(active):
                doubt = f"collection {name!r} has lost its augmented vector; it is raw here: run refresh"
            manifest = yield from self._seen(collection, manifest)
        if doubt is not None:
            if (yield from self._read(collection)) != written:
                return (yield from self._looked_up(name))  # a job is at it
            self.warn(doubt)
        found = CachedManifest(collection, manifest, time.monotonic() + MANIFEST_SECONDS, written)
        self.known[name] = found
        return found

    def _read(self, collection: str) -> Operation[Payload | None]:
        try:
            return (yield from written_manifest(self.raw, collection))
        except Exception as error:
            if fault_of(error) is not Fault.FORBIDDEN:
                raise
            self.warn(
                f"the api key may not read {m.metadata_collection(collection)!r}: if collection {collection!r} "
                "is corrected, its searches are raw here; let the key read that collection, too"
            )
            return None

    def _answer(self, call: Call, otherwise: Any) -> Operation[Any]:
        """The answer to `call`, or what is taken to be so `otherwise`, where the server gives none."""
        try:
            return (yield call)
        except Exception as error:
            if fault_of(error) is Fault.OTHER:
                raise
            return otherwise

    def _with_vectors_there(self, collection: str, manifest: Manifest) -> Operation[Manifest]:
        """`manifest` without the versions whose augmented vectors are not there: not yet, where one is being written,
        or no more, in a collection that was made anew."""
        if not manifest.augmented_vectors():
            return manifest
        found = yield from self._answer(Call(self.raw.get_collection, collection), None)
        if found is None:
            return manifest
        vectors = found.config.params.vectors or ()

        def is_there(version: Version) -> bool:
            return version.storage == "payload" or version.augmented_vector in vectors

        active = {name: version for name, version in manifest.active.items() if is_there(version)}
        writing = manifest.writing if manifest.writing is not None and is_there(manifest.writing) else None
        return manifest.replace(active=active, writing=writing, retired=tuple(filter(is_there, manifest.retired)))

    def _mapping(self, collection: str, manifest: Manifest) -> Operation[Manifest]:
        """`manifest` with the maps by which this client maps queries, out of their models; that of the version before
        is forgotten. Raises what `read_model` raises."""
        active = dict(manifest.active)
        for vector, version in manifest.active.items():
            if not version.mapped or version.storage == "vector":  # where the map lies in the augmented vectors
                continue
            known = self.maps.get((collection, vector))
            if known is None or known.model != version.model:
                model = yield from read_model(self.raw, collection, version)
                known = self.maps[collection, vector] = version.having(model)
            active[vector] = version.having(known)
        return manifest.replace(active=active)

    def _seen(self, collection: str, manifest: Manifest) -> Operation[Manifest]:
        """`manifest` with what is so for now: whether a point lacks its augmented vector, and whether there are codes;
        and with what this client was told to search with. Warns of offsets in payloads that are all gone.

        Without such points no search need look for them, which would take a look at every point. (A count would count
        vectors of deleted points.)
        """
        active = dict(manifest.active)
        given = {"oversampling": self.oversampling, "hnsw_ef": self.hnsw_ef}
        chosen = {name: value for name, value in given.items() if value is not None}
        for name, version in manifest.active.items():
            if version.storage == "payload":
                active[name] = version.replace(**chosen)
                yield from self._warn_if_lost(collection, version)
            else:
                asked = Call(
                    self.raw.scroll, collection, lacking_augmented_vector(version), limit=1, with_payload=False
                )
                lacking, _ = yield from self._answer(asked, (True, None))
                codes = not plain_client.is_local(self.raw)
                active[name] = version.replace(everywhere=not lacking, codes=codes, **chosen)
        return manifest.replace(active=active)

    def _warn_if_lost(self, collection: str, version: Version) -> Operation[None]:
        """Warns if points have the vector of `version`, and not one of them has an offset of it."""
        text = (
            f"no point of {collection!r} has an offset of version {version.number}, the active one in "
            f"{m.metadata_collection(collection)!r}: its searches are raw here; if a snapshot of the collection alone "
            "was restored, run refresh"
        )
        if text in self.warned:
            return
        one = Call(self.raw.scroll, collection, limit=1)
        first, _ = yield from self._answer(Call(one, with_payload=[version.offset_key]), ((), None))
        if not first or held_offset(version, first[0].payload) is not None:
            return  # at once, as nearly always
        holding = Call(one, scroll_filter=holding_offset(version), with_payload=False)
        if (yield from self._answer(holding, (True, None)))[0]:
            return
        having = Call(one, scroll_filter=models.Filter(must=has_vector(version.vector)), with_payload=False)
        if (yield from self._answer(having, ((), None)))[0]:
            self.warn(text)

    def fitted(self, known: CachedManifest) -> Operation[list[tuple[Version, OffsetModel]]]:
        """The versions of a collection that a write must bring along, each with its model."""
        pairs: list[tuple[Version, OffsetModel]] = []
        for version in known.maintained:
            if version.model not in self.fits:
                self.fits[version.model] = yield from read_model(self.raw, known.collection, version)
            model = self.fits[version.model]
            pairs.append((version.having(model) if version.mapped else version, model))
        return pairs

    def stored_offsets(self, known: CachedManifest, points: Sequence[Any]) -> Operation[list[StoredOffsets]]:
        """What each of `points` stores; see `offsets.stored_offsets`."""
        fitted = yield from self.fitted(known)
        if awaits_embedding(points, known.maintained):
            self.warn(
                f"collection {known.collection!r}: documents that the server embeds get no offset here; run refresh"
            )
        found: list[StoredOffsets] = yield Computing(stored_offsets, points, fitted)
        return found

    def keeps_payloads(self) -> Operation[bool]:
        """Whether the server keeps the payload of a point that is written without one, as 1.14 does, or may do so."""
        if self.is_old is None:
            found = None if plain_client.is_local(self.raw) else (yield from self._answer(Call(self.raw.info), True))
            if found is True:
                return True
            self.is_old = found is not None and found.version.startswith("1.14.")
        return self.is_old

    def embedded_queries(self, requests: list[models.QueryRequest]) -> Operation[list[models.QueryRequest]]:
        """`requests` with the documents that they ask for the nearest of embedded, as the plain client would do it."""
        if not plain_client.has_documents(self.raw, requests):
            return requests
        made: list[models.QueryRequest] = yield Computing(plain_client.embedded_queries, self.raw, requests)
        return made

    def warn(self, text: str) -> None:
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, UserWarning, stacklevel=4)

    def keep(self, collection: str, manifest: Manifest | None) -> None:
        """Takes `manifest` for that of `collection` from now on, without ever reading it."""
        self.known[collection] = CachedManifest(collection, manifest, math.inf)

    def forget(self) -> None:
        self.known.clear()


OfClient: TypeAlias = Callable[[CorrectionCache, Arguments], Operation[Any]]
"""What a client does for one method, given the arguments by name."""


OnState: TypeAlias = Callable[[CorrectionCache, CachedManifest, Arguments], Operation[Any]]
"""The same, given what is known of the collection."""

CHANGES = 10
"""How many changes of a collection may come one after the other while one request is made."""


def again_if_changed(operation: OnState) -> OfClient:
    """`operation` on what is known of its collection; made again if it fails because somebody has changed that
    meanwhile."""

    @functools.wraps(operation)
    def repeated(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
        name = arguments["collection_name"]
        known = yield from cache.lookup(name)
        for _ in range(CHANGES):
            try:
                return (yield from operation(cache, known, arguments))
            except Exception as error:
                if known.manifest is None or known.until == math.inf or fault_of(error) in PASSING:
                    raise
                now = yield from cache.lookup_again(name, known)
                if now.state == known.state and not (_lacks_ours(error, now) or _lacks_ours(error, known)):
                    raise
                known = now
        return (yield from operation(cache, known, arguments))

    return repeated


def _lacks_ours(error: Exception, known: CachedManifest) -> bool:
    """Whether `error` says that a vector of ours is not there, which is `known` to be: an alias was moved, and back."""
    return not isinstance(error, HubpluginError) and any(name in str(error) for name in known.augmented_vectors)
