"""What a corrected client knows of collections: their manifests, read again every few seconds, and their models."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from qdrant_client import models

from hubplugin.errors import HubpluginError, StoreError
from hubplugin.model import OffsetModel
from hubplugin.recording import Recorder
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import metadata, plain_client
from hubplugin_qdrant.errors import PASSING, Fault, fault_of
from hubplugin_qdrant.manifest import Manifest, Version
from hubplugin_qdrant.operations import Arguments, Operation
from hubplugin_qdrant.requests import has_vector, holding_offset, lacking_augmented_vector
from hubplugin_qdrant.stored_offsets import awaits_embedding, stored_offsets

MANIFEST_SECONDS = 10.0
"""For how long a manifest is taken to be the current one; a change made elsewhere is noticed within it."""

PATIENCE_SECONDS = 1.0
"""When the manifest is asked for again while its collection is away for a moment."""


@dataclass
class CachedManifest:
    """The manifest of a collection, valid until `until` (monotonic seconds; inf: it never expires).

    collection: its real name, where it was looked up by an alias. manifest: None if it has no correction.
    augmented_vectors, offset_key: what of the collection is ours, as `manifest` tells. theirs: names that look like
    ours, and were not when they were last seen.
    """

    collection: str
    manifest: Manifest | None
    until: float
    augmented_vectors: tuple[str, ...] = ()
    offset_key: str | None = None
    theirs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.augmented_vectors = self.manifest.augmented_vectors() if self.manifest is not None else ()
        self.offset_key = self.manifest.offset_key if self.manifest is not None else None

    def strange(self, names: Iterable[str]) -> frozenset[str]:
        """Those of `names` that look like ours, and of which `manifest` does not tell."""
        ours = (*self.augmented_vectors, self.offset_key)
        return frozenset(name for name in names if name not in ours and m.looks_ours(name))


RAW = m.Manifest()
"""The manifest of a search that is not corrected."""


@dataclass
class CorrectionCache:
    """What a corrected client adds to the plain one: the manifests and models of the collections that it uses.

    raw: the plain client. compute: runs a function, in a thread for the async client. oversampling, hnsw_ef: take the
    places of the calibrated ones. recorder: keeps the queries, if they are to be kept. heeds_switch: whether a
    correction that is switched off is not searched.
    """

    raw: Any
    compute: Callable[[Callable[[], Any]], Any]
    oversampling: float | None = None
    hnsw_ef: int | None = None
    recorder: Recorder | None = None
    heeds_switch: bool = True
    known: dict[str, CachedManifest] = field(default_factory=dict)
    fits: dict[str, OffsetModel] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def lookup(self, name: str) -> Operation:
        """What is known of the collection or alias `name`, read if it is not known or too old."""
        found = self.known.get(name)
        if found is not None and found.until > time.monotonic():
            return found
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

    def lookup_shown(self, name: str, known: CachedManifest, shown: Collection[str]) -> Operation:
        """`known`, or what is so now if the collection has shown names that look like ours and are not known to be:
        somebody may have applied since."""
        if known.until == math.inf or known.strange(shown) <= known.theirs:
            return known
        known.until = 0.0
        known = yield from self.lookup(name)
        known.theirs = known.strange(shown)
        return known

    def lookup_to_upload(self, name: str) -> Operation:
        """What is known of `name`, whose augmented vectors are seen to be there: an upload cannot be repeated."""
        known = yield from self.lookup(name)
        active = known.manifest.active.values() if known.manifest is not None else ()
        augmented = set(m.augmented_vectors(active))
        if augmented:
            there = (yield self.raw.get_collection(name)).config.params.vectors
            if not isinstance(there, dict) or not augmented <= set(there):
                return self.as_raw(name, known)
        return known

    def as_raw(self, name: str, known: CachedManifest) -> CachedManifest:
        """Takes the collection for what it is: another one than the manifest says."""
        self.warn(f"collection {name!r} has lost its augmented vector; it is raw here: remove and apply again")
        self.known[name] = replace(known, manifest=None)
        return self.known[name]

    def _looked_up(self, name: str) -> Operation:
        collection, manifest = name, None
        if not name.endswith(m.metadata_collection("")):
            manifest = yield from self._read(name)
            if manifest is None:
                collection = yield from self._real_name(name)
                if collection != name:
                    manifest = yield from self._read(collection)
        if manifest is not None:
            manifest = yield from self._seen(collection, manifest)
        found = CachedManifest(collection, manifest, time.monotonic() + MANIFEST_SECONDS)
        self.known[name] = found
        return found

    def _seen(self, collection: str, manifest: Manifest) -> Operation:
        """`manifest` with what is so for now: whether a point lacks its augmented vector, and whether there are codes;
        and with what this client was told to search with. Warns of offsets in payloads that are all gone.

        Without such points, or where a robust model keeps them from being found, no search need look for them, which
        would take a look at every point. (A count would count vectors of deleted points.)
        """
        active = dict(manifest.active)
        given = {"oversampling": self.oversampling, "hnsw_ef": self.hnsw_ef}
        chosen = {name: value for name, value in given.items() if value is not None}
        for name, version in manifest.active.items():
            if chosen:
                active[name] = version = version.model_copy(update=chosen)
            if version.storage == "payload":
                yield from self._warn_if_lost(collection, version)
            else:
                try:
                    lacking, _ = yield self.raw.scroll(
                        collection, lacking_augmented_vector(version), limit=1, with_payload=False
                    )
                except Exception as error:
                    if fault_of(error) is Fault.OTHER:
                        raise
                    lacking = True
                codes = not plain_client.is_local(self.raw)
                active[name] = version.model_copy(
                    update={"everywhere": not lacking or version.missing < 0, "codes": codes}
                )
        return manifest.changed(active=active)

    def _warn_if_lost(self, collection: str, version: Version) -> Operation:
        """Warns if points have the vector of `version`, and not one of them has an offset of it."""
        text = (
            f"no point of {collection!r} has an offset of version {version.number}, the active one in "
            f"{m.metadata_collection(collection)!r}: its searches are raw here; if a snapshot of the collection alone "
            "was restored, run refresh"
        )
        if text in self.warned:
            return
        try:
            first, _ = yield self.raw.scroll(collection, limit=1, with_payload=[version.offset_key])
            if not first or version.held(first[0].payload) is not None:
                return  # at once, as nearly always
            one: Arguments = {"limit": 1, "with_payload": False}
            holding, _ = yield self.raw.scroll(collection, holding_offset(version), **one)
            if holding:
                return
            having, _ = yield self.raw.scroll(collection, models.Filter(must=has_vector(version.vector)), **one)
            if having:
                self.warn(text)
        except Exception as error:
            if fault_of(error) is Fault.OTHER:
                raise

    def _read(self, collection: str) -> Operation:
        try:
            found = yield self.raw.retrieve(
                m.metadata_collection(collection), ids=[m.MANIFEST_ID, m.SWITCH_ID], with_payload=True
            )
        except Exception as error:
            if fault_of(error) is Fault.MISSING:
                return None
            if fault_of(error) is Fault.FORBIDDEN:
                self.warn(
                    f"the api key may not read {m.metadata_collection(collection)!r}: if collection {collection!r} "
                    "is corrected, its searches are raw here; let the key read that collection, too"
                )
                return None
            raise
        payloads = {point.id: point.payload or {} for point in found}
        if m.MANIFEST_ID not in payloads:
            return None
        try:
            return m.parse(payloads[m.MANIFEST_ID], collection).changed(off=m.is_off(payloads.get(m.SWITCH_ID)))
        except StoreError as error:
            self.warn(f"{error}; until then its searches are raw here, and what is written gets no offsets")
            return None

    def _real_name(self, name: str) -> Operation:
        try:
            aliases = yield self.raw.get_aliases()
        except Exception as error:
            if fault_of(error) is Fault.FORBIDDEN:
                return name
            raise
        return next((alias.collection_name for alias in aliases.aliases if alias.alias_name == name), name)

    def fitted(self, known: CachedManifest) -> Operation:
        """The versions of a collection that a write must bring along, each with its model."""
        pairs: list[tuple[Version, OffsetModel]] = []
        for version in known.manifest.kept_up() if known.manifest else ():
            if version.model not in self.fits:
                found = []
                for part in metadata.part_ids(version):
                    found.append((yield self.raw.retrieve(m.metadata_collection(known.collection), ids=[part])))
                self.fits[version.model] = metadata.model_of(found, version, known.collection)
            pairs.append((version, self.fits[version.model]))
        return pairs

    def stored_offsets(
        self, known: CachedManifest, vectors: list[Any], payloads: list[Any], held: Collection[int] = ()
    ) -> Operation:
        """What the points of `vectors` and `payloads` store, one each; see `stored_offsets.stored_offsets`."""
        fitted = yield from self.fitted(known)
        if known.manifest and awaits_embedding(vectors, known.manifest):
            self.warn(
                f"collection {known.collection!r}: documents that the server embeds get no offset here; run refresh"
            )
        return (yield self.compute(lambda: stored_offsets(vectors, payloads, fitted, held)))

    def embedded_queries(self, requests: list[models.QueryRequest]) -> Operation:
        """`requests` with the documents that they ask for the nearest of embedded, as the plain client would do it."""
        if not plain_client.has_documents(self.raw, requests):
            return requests
        return (yield self.compute(lambda: plain_client.embedded_queries(self.raw, requests)))

    def warn(self, text: str) -> None:
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, UserWarning, stacklevel=4)

    def keep(self, collection: str, manifest: Manifest | None) -> None:
        """Takes `manifest` for that of `collection` from now on, without ever reading it."""
        self.known[collection] = CachedManifest(collection, manifest, math.inf)

    def forget(self) -> None:
        self.known.clear()


OfClient: TypeAlias = Callable[[CorrectionCache, Arguments], Operation]
"""What a client does for one method, given the arguments by name."""


def again_if_changed(operation: OfClient) -> OfClient:
    """`operation`, repeated once if it fails because somebody has changed the correction meanwhile; raw, if the
    collection is another one now than the manifest says."""

    @functools.wraps(operation)
    def repeated(cache: CorrectionCache, arguments: Arguments) -> Operation:
        name = arguments["collection_name"]
        try:
            return (yield from operation(cache, arguments))
        except Exception as error:
            before = cache.known.get(name)
            if before is None or before.manifest is None or before.until == math.inf or fault_of(error) in PASSING:
                raise
            del cache.known[name]
            now = yield from cache.lookup(name)
            if now.manifest is not None and now.manifest.everything() == before.manifest.everything():
                refused_here = isinstance(error, HubpluginError)
                if refused_here or not any(name in str(error) for name in now.augmented_vectors):
                    raise
                cache.as_raw(name, now)
        return (yield from operation(cache, arguments))

    return repeated
