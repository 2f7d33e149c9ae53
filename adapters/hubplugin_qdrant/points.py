"""The points of a collection as batches of targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from qdrant_client import models

from hubplugin.store import Batch, Id
from hubplugin_qdrant.manifest import KEY, Manifest, Version, augmented_vectors
from hubplugin_qdrant.offsets import group_of, held_offsets, rounding
from hubplugin_qdrant.schema import Schema
from hubplugin_qdrant.transport import IdRange, by_shard, plain_id


@dataclass
class PointReader:
    """Turns records into batches, with the vector of `schema` and the offsets of `version`.

    group_by: the payload key whose values the batches have as groups. `left_over` collects, by shard key and payload
    keys, the points that hold offsets of no version of `manifest` there.
    """

    schema: Schema
    manifest: Manifest
    version: Version | None
    group_by: str | None
    left_over: dict[tuple[Id | None, tuple[str, ...]], list[Id]] = field(default_factory=dict)

    def read(self, chosen: models.Filter | None = None, between: IdRange | None = None) -> Iterator[Batch]:
        """Every point that has the vector, or of the `chosen`, or of those `between` two ids, in the order of ids."""
        for batches in self.schema.transport.pages(self.batches, self.vectors, self.payload, chosen, between):
            yield from batches

    @property
    def vectors(self) -> list[str] | bool:
        """The names of the vectors that are read; of an unnamed one, all are."""
        if not self.schema.using:
            return True
        return [self.schema.using, *augmented_vectors([self.version] if self.version is not None else [])]

    @property
    def payload(self) -> list[str]:
        """The payload keys that are read."""
        return [key for key in (self.manifest.offset_key or KEY, self.group_by) if key]

    def batches(self, records: Sequence[models.Record]) -> list[Batch]:
        """One batch for each shard key, by which its points are written, where the user shards by key."""
        batches = [self.batch(part, shard_key) for shard_key, part in by_shard(records).items()]
        return [batch for batch in batches if len(batch.ids)]

    def batch(self, records: Sequence[Any], shard_key: Id | None = None) -> Batch:
        """`records` as one batch."""
        ids: list[Id] = []
        vectors, groups, payloads, written = [], [], [], []
        for record in records:
            keys = self.manifest.left_over(record.payload)
            if keys:
                self.left_over.setdefault((shard_key, keys), []).append(plain_id(record.id))
            vector, augmented = self._vectors(record)
            if vector is None:
                continue
            ids.append(plain_id(record.id))
            vectors.append(vector)
            if self.group_by is not None:
                groups.append(group_of(record.payload, self.group_by))
            payloads.append(record.payload)
            written.append(augmented)
        matrix = np.array(vectors, np.float32).reshape(len(ids), self.schema.dim)
        absent = np.full(len(ids), np.nan, np.float32)
        return Batch(
            ids,
            matrix,
            absent if self.version is None else held_offsets(self.version, matrix, payloads, written),
            place=shard_key,
            foreign=sum(self.manifest.is_foreign(record.payload) for record in records),
            groups=groups if self.group_by is not None else None,
            rounding=None if self.version is None else rounding(self.version, written),
        )

    def _vectors(self, record: Any) -> tuple[Any, Any]:
        """The vector of a record and its augmented vector, None where it lacks one."""
        if not isinstance(record.vector, dict):
            return record.vector, None
        augmented = record.vector.get(self.version.augmented_vector) if self.version is not None else None
        return record.vector.get(self.schema.using), augmented
