"""Points of a collection read in batches, with the offsets that they hold."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from qdrant_client import models

from hubplugin.metric import Metric
from hubplugin.model import Value
from hubplugin.store import Batch, Id
from hubplugin_qdrant.manifest import (
    KEY,
    Payload,
    QdrantManifest,
    QdrantVersion,
    our_offsets,
)
from hubplugin_qdrant.offsets import as_targets, by_name, delete_keys
from hubplugin_qdrant.schema import Schema
from hubplugin_qdrant.transport import EVERY_ID, IdRange, chunks, plain_id

ROOM = 1e-2
"""An augmented vector is that of a point if their numbers differ by no more than this
share of themselves: float16 is exact to 1e-3."""

FLOAT16 = 2.0**-10
"""Twice the share of a number that its rounding to float16 moves it by."""


@dataclasses.dataclass
class PointReader:
    """Makes batches of points.

    schema: Knows the vector that is read.
    manifest: Knows whose offsets are ours.
    version: The version whose offsets are read; None for none.
    field: The payload key that is read as the values of the batches.
    left_over: The points that hold offsets of no version of `manifest`, by shard key
        and payload keys.
    """

    schema: Schema
    manifest: QdrantManifest
    version: QdrantVersion | None = None
    field: str | None = None
    left_over: defaultdict[tuple[Id | None, tuple[str, ...]], list[Id]] = (
        dataclasses.field(default_factory=lambda: defaultdict(list))
    )

    def read(self, between: IdRange = EVERY_ID) -> Iterator[Batch]:
        """Yield every point that has the vector, or those `between` two ids."""
        vectors: list[str] | bool = True  # all of them, for the unnamed one
        if self.schema.using:
            vectors = [self.schema.using]
            if self.version is not None and self.version.storage == "vector":
                vectors.append(self.version.augmented_vector)
        payload = [KEY] if self.field is None else [KEY, self.field]
        for records in self.schema.transport.pages(vectors, payload, between):
            yield from self.batches(records)

    def delete_left_over(self) -> None:
        """Start to delete the offsets of versions that nobody knows."""
        transport = self.schema.transport
        for (shard_key, keys), points in self.left_over.items():
            change = functools.partial(delete_keys, keys, shard_key)
            for part in chunks(points, transport.page_size):
                transport.send(part, change, shard_key)

    def batches(self, records: list[models.Record]) -> list[Batch]:
        """Return one batch for each shard key, by which points are written."""
        shards: dict[Any, list[models.Record]] = {}
        for record in records:
            shards.setdefault(record.shard_key, []).append(record)
        batches = [self._batch(part, key) for key, part in shards.items()]
        return [batch for batch in batches if len(batch.ids)]

    def _batch(self, records: list[models.Record], shard_key: Id | None) -> Batch:
        """Return `records` as one batch, without points that lack the vector."""
        using = self.schema.using
        version = self.version
        foreign = 0
        kept: list[models.Record] = []
        for record in records:
            foreign += self.manifest.is_foreign(record.payload)
            unknown = self.manifest.unknown_keys(record.payload)
            if unknown:
                self.left_over[shard_key, unknown].append(plain_id(record.id))
            if using in by_name(record.vector):
                kept.append(record)
        ids = [plain_id(record.id) for record in kept]
        payloads = [record.payload or {} for record in kept]
        vectors = [by_name(record.vector) for record in kept]
        rows = [named[using] for named in vectors]
        matrix = np.array(rows, np.float32).reshape(len(ids), self.schema.dim)
        offsets = np.full(len(ids), np.nan, np.float32)
        loss = np.zeros(len(ids))
        if version is not None and version.storage == "payload":
            for row, payload in enumerate(payloads):
                offsets[row] = our_offsets(payload).get(version.field, np.nan)
        elif version is not None:
            augmented = [named.get(version.augmented_vector) for named in vectors]
            _read_augmented(version, matrix, augmented, offsets, loss)
        values = None
        if self.field is not None:
            values = [group_of(payload, self.field) for payload in payloads]
        return Batch(
            ids,
            matrix,
            offsets,
            place=shard_key,
            foreign=foreign,
            values=values,
            rounding=lambda _: loss,
        )


def _read_augmented(
    version: QdrantVersion,
    vectors: np.ndarray,
    augmented: list[Any],
    offsets: np.ndarray,
    loss: np.ndarray,
) -> None:
    """Put the offsets of `version` in `augmented` vectors into `offsets` [b].

    An augmented vector of other `vectors` [b, d] counts as the offset infinity. `loss`
    [b] gets what rounding to float16 may have moved each offset by.
    """
    rows = [row for row, vector in enumerate(augmented) if vector is not None]
    if not rows:
        return
    stored = np.array([augmented[row] for row in rows], np.float32)
    held = stored[:, :-1]
    extra = stored[:, -1]
    expected = as_targets(version, vectors[rows])
    largest = np.abs(expected).max(axis=1, keepdims=True)
    room = ROOM * (largest + np.abs(held))
    is_own = (np.abs(expected - held) <= room).all(axis=1)
    values: np.ndarray = extra
    moved: np.ndarray = FLOAT16 * np.abs(extra)
    if version.metric is Metric.EUCLIDEAN:
        values = version.ceiling - extra**2 / 2
        moved = FLOAT16 * extra**2
    offsets[rows] = np.where(is_own, values, np.inf)
    # One number in 8,192 of float32 is one of float16, too: any other was not rounded.
    with np.errstate(over="ignore"):
        is_short = extra.astype(np.float16) == extra
    loss[rows] = np.where(is_short, moved, 0.0)


def group_of(payload: Payload, key: str) -> Value:
    """Return the value of `key`, a path such as "shop.tenant", in `payload`.

    None for anything but one text, number or truth value.
    """
    value: object = payload
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, (str, int)) else None
