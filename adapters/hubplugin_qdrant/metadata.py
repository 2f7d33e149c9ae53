"""The metadata collection, read and written: the manifest, and the models in parts.

`CollectionMetadata` is the same as a job sees it: each request repeated while the server is away.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, TypeVar

from qdrant_client import QdrantClient, models

from hubplugin.errors import StoreError
from hubplugin.model import OffsetModel
from hubplugin.quarantine import Quarantine, parse
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant.errors import Fault, fault_of
from hubplugin_qdrant.manifest import Manifest, Version
from hubplugin_qdrant.transport import Transport
from hubplugin_qdrant.versioned_store import Metadata


def read_manifest(client: QdrantClient, collection: str) -> Manifest | None:
    """The manifest of `collection` (no alias), or None if it has none."""
    found = _retrieved(client, collection, m.MANIFEST_ID)
    return m.parse(found[0].payload or {}, collection) if found else None


def _retrieved(client: QdrantClient, collection: str, point: int) -> list[models.Record]:
    """That point of the metadata collection of `collection`: an empty list where it, or the collection, is missing."""
    try:
        return client.retrieve(m.metadata_collection(collection), ids=[point], with_payload=True)
    except Exception as error:
        if fault_of(error) is Fault.MISSING:
            return []
        raise


def real_name(client: QdrantClient, name: str) -> str:
    """The collection behind an alias; `name` itself where it is none, or where the aliases may not be read."""
    try:
        aliases = client.get_aliases().aliases
    except Exception as error:
        if fault_of(error) is Fault.FORBIDDEN:
            return name
        raise
    return next((alias.collection_name for alias in aliases if alias.alias_name == name), name)


def write_manifest(client: QdrantClient, collection: str, manifest: Manifest) -> None:
    """Puts `manifest` in the place of the one before, in one step."""
    client.upsert(m.metadata_collection(collection), [manifest_point(manifest)], wait=True)


def read_switch(client: QdrantClient, collection: str) -> bool:
    """Whether the correction of `collection` is switched off."""
    found = _retrieved(client, collection, m.SWITCH_ID)
    return bool(found) and m.is_off(found[0].payload)


def write_switch(client: QdrantClient, collection: str, off: bool) -> None:
    """Switches the correction of `collection` off or on."""
    switch = models.PointStruct(id=m.SWITCH_ID, vector={}, payload={"off": off})
    client.upsert(m.metadata_collection(collection), [switch], wait=True)


def read_quarantine(client: QdrantClient, collection: str) -> Quarantine:
    """The quarantine list of `collection`, an empty one if it has none."""
    return quarantine_of(_retrieved(client, collection, m.QUARANTINE_ID), collection)


def quarantine_of(found: list[models.Record], collection: str) -> Quarantine:
    """The list in what was read of the metadata collection: an empty one where nothing was."""
    return parse(json.dumps(found[0].payload), repr(m.metadata_collection(collection))) if found else Quarantine()


def write_quarantine(client: QdrantClient, collection: str, quarantine: Quarantine) -> None:
    """Puts the list in the place of the one before, in one step."""
    client.upsert(m.metadata_collection(collection), [quarantine_point(quarantine)], wait=True)


def quarantine_point(quarantine: Quarantine) -> models.PointStruct:
    """The list as the point of the metadata collection that it is."""
    return models.PointStruct(id=m.QUARANTINE_ID, vector={}, payload=quarantine.model_dump(mode="json"))


def manifest_point(manifest: Manifest) -> models.PointStruct:
    """`manifest` as the point of the metadata collection that it is."""
    return models.PointStruct(id=m.MANIFEST_ID, vector={}, payload=manifest.model_dump(mode="json"))


def exists(client: QdrantClient, collection: str) -> bool:
    """Whether there is a metadata collection. Raises StoreError where the user has a collection of that name."""
    try:
        found = client.get_collection(m.metadata_collection(collection))
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


def create(client: QdrantClient, collection: str, replication_factor: int | None) -> None:
    """Creates the metadata collection of `collection`, as well replicated as that, if it is not there."""
    if exists(client, collection):
        return
    try:
        client.create_collection(
            m.metadata_collection(collection),
            vectors_config={},
            shard_number=1,
            replication_factor=replication_factor,
            on_disk_payload=True,
            strict_mode_config=models.StrictModeConfig(enabled=False),  # the limits of a server may be its default
        )
    except Exception:
        if not exists(client, collection):  # another run has been quicker
            raise


def write_model(client: QdrantClient, collection: str, model: OffsetModel) -> int:
    """Writes `model` to the metadata collection; returns in how many parts."""
    content = model.to_bytes()
    parts = range(0, len(content), m.PART_BYTES)
    for number, start in enumerate(parts):
        part = base64.b64encode(content[start : start + m.PART_BYTES]).decode()
        point = models.PointStruct(id=m.part_id(model.fingerprint, number), vector={}, payload={"part": part})
        client.upsert(m.metadata_collection(collection), [point], wait=True)
    return len(parts)


def read_model(client: QdrantClient, collection: str, version: Version) -> OffsetModel:
    """The model of `version`. Raises StoreError if a part is missing, ModelFileError if one is damaged."""
    place = m.metadata_collection(collection)
    return model_of([client.retrieve(place, ids=[part]) for part in part_ids(version)], version, collection)


def part_ids(version: Version) -> list[str]:
    return [m.part_id(version.model, number) for number in range(version.parts)]


def model_of(found: list[list[Any]], version: Version, collection: str) -> OffsetModel:
    """The model whose parts were retrieved, one by one, as `found`."""
    if not all(found):
        place = m.metadata_collection(collection)
        raise StoreError(f"the model of {collection!r} is incomplete in {place!r}; apply again")
    content = b"".join(base64.b64decode(records[0].payload["part"]) for records in found)
    return OffsetModel.from_bytes(content, f"the model in collection {m.metadata_collection(collection)!r}")


def delete_model(client: QdrantClient, collection: str, version: Version) -> None:
    selector = models.PointIdsList(points=list(part_ids(version)))
    client.delete(m.metadata_collection(collection), points_selector=selector, wait=True)


Answer = TypeVar("Answer")


class CollectionMetadata(Metadata):
    """The metadata collection of the collection behind `transport`."""

    def __init__(self, transport: Transport):
        self._transport, self._name = transport, m.metadata_collection(transport.collection)

    def exists(self) -> bool:
        return bool(self._ask("looking for the manifest", exists))

    def create(self) -> None:
        replicas = self._transport.info.config.params.replication_factor
        self._ask("preparing", create, replicas)

    def delete(self) -> None:
        with self._transport.one_line("removing"):
            self._transport.client.delete_collection(self._name)

    def read_manifest(self) -> Manifest:
        return self._ask("reading the manifest", read_manifest) or Manifest()

    def write_manifest(self, manifest: Manifest) -> None:
        self._ask("writing the manifest", write_manifest, manifest)

    def is_off(self) -> bool:
        return self._ask("reading the switch", read_switch)

    def write_switch(self, off: bool) -> None:
        self._ask("switching", write_switch, off)

    def read_quarantine(self) -> Quarantine:
        return self._ask("reading the quarantine list", read_quarantine)

    def write_quarantine(self, quarantine: Quarantine) -> None:
        self._ask("writing the quarantine list", write_quarantine, quarantine)

    def read_model(self, version: Version) -> OffsetModel:
        model: OffsetModel = self._ask("reading the model", read_model, version)
        return model

    def write_model(self, model: OffsetModel) -> int:
        return int(self._ask("writing the model", write_model, model))

    def delete_model(self, version: Version) -> None:
        self._ask("deleting a model", delete_model, version)

    def _ask(self, doing: str, request: Callable[..., Answer], *given: object) -> Answer:
        with self._transport.one_line(doing):
            return self._transport.retry(request, self._transport.client, self._transport.collection, *given)
