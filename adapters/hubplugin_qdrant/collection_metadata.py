"""The metadata collection as a job sees it: each request repeated while the server is away."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hubplugin.model import OffsetModel
from hubplugin.quarantine import Quarantine
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import metadata
from hubplugin_qdrant.manifest import Manifest, Version
from hubplugin_qdrant.transport import Transport
from hubplugin_qdrant.versioned_store import Metadata

Answer = TypeVar("Answer")


class CollectionMetadata(Metadata):
    """The metadata collection of the collection behind `transport`."""

    def __init__(self, transport: Transport):
        self._transport, self._name = transport, m.metadata_collection(transport.collection)

    def exists(self) -> bool:
        with self._transport.one_line("looking for the manifest"):
            return bool(self._transport.retry(self._transport.client.collection_exists, self._name))

    def create(self) -> None:
        replicas = self._transport.info.config.params.replication_factor
        self._ask("preparing", metadata.create, replicas)

    def delete(self) -> None:
        with self._transport.one_line("removing"):
            self._transport.client.delete_collection(self._name)

    def read_manifest(self) -> Manifest:
        return self._ask("reading the manifest", metadata.read_manifest) or Manifest()

    def write_manifest(self, manifest: Manifest) -> None:
        self._ask("writing the manifest", metadata.write_manifest, manifest)

    def is_off(self) -> bool:
        return self._ask("reading the switch", metadata.read_switch)

    def write_switch(self, off: bool) -> None:
        self._ask("switching", metadata.write_switch, off)

    def read_quarantine(self) -> Quarantine:
        return self._ask("reading the quarantine list", metadata.read_quarantine)

    def write_quarantine(self, quarantine: Quarantine) -> None:
        self._ask("writing the quarantine list", metadata.write_quarantine, quarantine)

    def read_model(self, version: Version) -> OffsetModel:
        model: OffsetModel = self._ask("reading the model", metadata.read_model, version)
        return model

    def write_model(self, model: OffsetModel) -> int:
        return int(self._ask("writing the model", metadata.write_model, model))

    def delete_model(self, version: Version) -> None:
        self._ask("deleting a model", metadata.delete_model, version)

    def _ask(self, doing: str, request: Callable[..., Answer], *given: object) -> Answer:
        with self._transport.one_line(doing):
            return self._transport.retry(request, self._transport.client, self._transport.collection, *given)
