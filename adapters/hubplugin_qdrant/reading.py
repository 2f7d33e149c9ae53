"""Read the points of a collection in batches, with their stored offsets."""

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
from hubplugin.vectors import Progress
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
"""The largest relative difference at which an augmented vector still counts as computed
from the point's current vector. Rounding to float16 causes up to 1e-3."""

FLOAT16 = 2.0**-10
"""Twice the relative error of rounding to float16."""


@dataclasses.dataclass
class PointReader:
    """A reader that makes batches of points.

    schema: The schema of the vector to read.
    manifest: The manifest, which tells known offsets from unknown ones.
    version: The version whose offsets are read; None to read no offsets.
    field: The payload key to read as the values of the batches.
    left_over: The points with payload offsets of versions unknown to `manifest`, by
        shard key and payload keys. Each batch that is read adds its points.
    """

    schema: Schema
    manifest: QdrantManifest
    version: QdrantVersion | None = None
    field: str | None = None
    left_over: defaultdict[tuple[Id | None, tuple[str, ...]], list[Id]] = (
        dataclasses.field(default_factory=lambda: defaultdict(list))
    )

    def read(self, between: IdRange = EVERY_ID) -> Iterator[Batch]:
        """Yield every point that has the vector, within the id range `between`."""
        vectors: list[str] | bool = True  # the unnamed vector is read with all others
        if self.schema.using:
            vectors = [self.schema.using]
            if self.version is not None and self.version.storage == "vector":
                vectors.append(self.version.augmented_vector)
        payload = [KEY] if self.field is None else [KEY, self.field]
        for records in self.schema.transport.pages(vectors, payload, between):
            yield from self.batches(records)

    def delete_left_over(self, progress: Progress | None) -> None:
        """Start to delete the offsets in `left_over`."""
        transport = self.schema.transport
        for (shard_key, keys), points in self.left_over.items():
            change = functools.partial(delete_keys, keys, shard_key)
            for part in chunks(points, transport.page_size):
                self.schema.keep_pace(len(part), progress)
                transport.send(part, change, shard_key)

    def batches(self, records: list[models.Record]) -> list[Batch]:
        """Return one batch per shard key, since points are written by shard key.

        Points with offsets of unknown versions are added to `left_over`.
        """
        shards: dict[Any, list[models.Record]] = {}
        for record in records:
            shards.setdefault(record.shard_key, []).append(record)
            unknown = self.manifest.unknown_keys(record.payload)
            if unknown:
                self.left_over[record.shard_key, unknown].append(plain_id(record.id))
        batches = [self._batch(part, key) for key, part in shards.items()]
        return [batch for batch in batches if len(batch.ids)]

    def _batch(self, records: list[models.Record], shard_key: Id | None) -> Batch:
        """Return `records` as one batch, without points that lack the vector."""
        using = self.schema.using
        version = self.version
        foreign = sum(self.manifest.is_foreign(record.payload) for record in records)
        records_with_vector = [
            record for record in records if using in by_name(record.vector)
        ]
        ids = [plain_id(record.id) for record in records_with_vector]
        payloads = [record.payload or {} for record in records_with_vector]
        vectors = [by_name(record.vector) for record in records_with_vector]
        rows = [each[using] for each in vectors]
        matrix = np.array(rows, np.float32).reshape(len(ids), self.schema.dim)
        offsets = np.full(len(ids), np.nan, np.float32)
        errors = np.zeros(len(ids))
        if version is not None and version.storage == "payload":
            numbers = [our_offsets(payload).get(version.field) for payload in payloads]
            offsets = np.array(numbers, np.float32)  # None becomes NaN
        elif version is not None:
            augmented = [each.get(version.augmented_vector) for each in vectors]
            offsets, errors = _read_augmented(version, matrix, augmented)
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
            rounding=lambda _: errors,
        )


def _read_augmented(
    version: QdrantVersion, vectors: np.ndarray, augmented: list[Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Read the offsets of `version` from `augmented` vectors.

    Args:
        version: The version whose offsets are read.
        vectors: The vectors of the points [b, d].
        augmented: The augmented vector of each point, or None.

    Returns:
        The offsets [b], and the error that rounding to float16 may have caused in each
        [b]. An offset is NaN without an augmented vector, and infinite if the augmented
        vector was computed from another vector.
    """
    offsets = np.full(len(augmented), np.nan, np.float32)
    errors = np.zeros(len(augmented))
    rows = [row for row, vector in enumerate(augmented) if vector is not None]
    if not rows:
        return offsets, errors
    stored = np.array([augmented[row] for row in rows], np.float32)
    stored_targets = stored[:, :-1]
    last_components = stored[:, -1]
    expected = as_targets(version, vectors[rows])
    largest = np.abs(expected).max(axis=1, keepdims=True)
    tolerance = ROOM * (largest + np.abs(stored_targets))
    is_current = (np.abs(expected - stored_targets) <= tolerance).all(axis=1)
    if version.metric is Metric.EUCLIDEAN:
        values: np.ndarray = version.ceiling - last_components**2 / 2
        rounding = FLOAT16 * last_components**2
    else:
        values = last_components
        rounding = FLOAT16 * np.abs(last_components)
    offsets[rows] = np.where(is_current, values, np.inf)
    # A number that float16 cannot hold is stored as float32. By chance, only one
    # float32 number in 8,192 is also a float16 number.
    with np.errstate(over="ignore"):
        fits_float16 = last_components.astype(np.float16) == last_components
    errors[rows] = np.where(fits_float16, rounding, 0.0)
    return offsets, errors


def group_of(payload: Payload, key: str) -> Value:
    """Return the value of `key`, a path such as "shop.tenant", in `payload`.

    The value is None unless it is a single string, integer or boolean.
    """
    value: object = payload
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, (str, int)) else None
