"""The points of a collection as batches of targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from qdrant_client import models

from hubplugin.metric import Metric
from hubplugin.store import Batch, Id
from hubplugin_qdrant.manifest import KEY, Manifest, Version, augmented_vectors
from hubplugin_qdrant.stored_offsets import group_of, storage_of, value_at
from hubplugin_qdrant.transport import EVERY_ID, IdRange, Transport, plain_id
from hubplugin_qdrant.versioned_store import VersionedStore

AT_ONCE = 256
"""Payloads that are read at one time."""


@dataclass
class PointReader:
    """Turns records into batches, with the vector that `store` corrects and the offsets of `version`.

    group_by: the payload key whose values the batches have as groups. A vector of length 0 has no cosine and is in no
    batch; `undirected` collects, by shard key, the points with such a vector that hold something not neutral.
    """

    store: VersionedStore
    manifest: Manifest
    version: Version | None
    group_by: str | None
    undirected: dict[Id | None, list[Id]] = field(default_factory=dict)

    def read(
        self, transport: Transport, chosen: models.Filter | None = None, between: IdRange = EVERY_ID
    ) -> Iterator[Batch]:
        """Every point that has the vector, or of the `chosen`, or of those `between` two ids, in the order of ids."""
        for batches in transport.pages(self.batches, self.vectors, self.payload, chosen, between):
            yield from batches

    @property
    def vectors(self) -> list[str] | bool:
        """The names of the vectors that are read; of an unnamed one, all are."""
        if not self.store.using:
            return True
        return [self.store.using, *augmented_vectors([self.version] if self.version is not None else [])]

    @property
    def payload(self) -> list[str]:
        """The payload keys that are read."""
        return [KEY, self.group_by] if self.group_by else [KEY]

    def batches(self, records: Sequence[models.Record]) -> list[Batch]:
        """One batch for each shard key, by which its points are written, where the user shards by key."""
        batches = [self.batch(part, shard_key) for shard_key, part in by_shard(records).items()]
        return [batch for batch in batches if len(batch.ids)]

    def batch(self, records: Sequence[Any], shard_key: Id | None = None) -> Batch:
        """The records, of a server or of a shard, as one batch."""
        ids: list[Id] = []
        vectors, groups, payloads, written = [], [], [], []
        storage = storage_of(self.version) if self.version is not None else None
        for record in records:
            vector, augmented = self._vectors(record)
            if vector is None:
                continue
            if self.store.metric is Metric.COSINE and not any(vector):
                if storage is not None and not storage.is_neutral(record.payload, augmented):
                    self.undirected.setdefault(shard_key, []).append(plain_id(record.id))
                continue
            ids.append(plain_id(record.id))
            vectors.append(vector)
            if self.group_by is not None:
                groups.append(group_of(record.payload, self.group_by))
            payloads.append(record.payload)
            written.append(augmented)
        matrix = np.array(vectors, np.float32).reshape(len(ids), self.store.dim)
        absent = np.full(len(ids), np.nan, np.float32)
        return Batch(
            ids,
            matrix,
            absent if storage is None else storage.offsets(payloads, matrix, written),
            place=shard_key,
            foreign=sum(self.manifest.is_foreign(record.payload) for record in records),
            groups=groups if self.group_by is not None else None,
        )

    def _vectors(self, record: Any) -> tuple[Any, Any]:
        """The vector of a record and its augmented vector, None where it lacks one."""
        if not isinstance(record.vector, dict):
            return record.vector, None
        augmented = record.vector.get(self.version.augmented_vector) if self.version is not None else None
        return record.vector.get(self.store.using), augmented


def by_shard(records: Sequence[models.Record]) -> dict[Id | None, list[models.Record]]:
    """`records` by shard key."""
    found: dict[Id | None, list[models.Record]] = {}
    for record in records:
        found.setdefault(record.shard_key, []).append(record)
    return found


def texts_at(key: str, ids: Sequence[Id], retrieved: Callable[[Sequence[Id]], Sequence[Any]]) -> list[str | None]:
    """What lies under `key` with each of the points `ids`, as text. retrieved: gives the records of some of them."""
    found: dict[Id, object] = {}
    for start in range(0, len(ids), AT_ONCE):
        for record in retrieved(ids[start : start + AT_ONCE]):
            found[plain_id(record.id)] = value_at(record.payload, key)
    values = [found.get(each) for each in ids]
    return [None if value is None else str(value) for value in values]
