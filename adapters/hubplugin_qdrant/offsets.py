"""Compute what a point stores for each maintained version, without any I/O.

A point stores the offset of a version as a number in its payload, {"hub_offset": {"v3":
0.0123}}, or in an augmented vector, "hub_v3": [t, offset] or, under Euclidean distance,
[t, sqrt(2 (ceiling - offset))]. Augmented vectors also include the query map, so that
queries need no map: <q + S q, t> = <q, t + S' t>.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from qdrant_client import models

from hubplugin.errors import InputError
from hubplugin.metric import Metric, augment_targets, unit_or_zero
from hubplugin.model import OffsetModel
from hubplugin.store import Id
from hubplugin_qdrant.manifest import (
    KEY,
    QdrantVersion,
    our_offsets,
    vectors_of,
)
from hubplugin_qdrant.plain_client import PointId, ShardKey

AnyVector: TypeAlias = Any
"""A vector as passed to a client: a list, an array, a document to embed, a dict of
these by name, or None."""

ROUNDING = 1e-6
"""The absolute and the relative difference below which numbers count as equal."""


@dataclass(frozen=True)
class StoredOffsets:
    """The offsets of one point for all versions.

    offsets: The numbers under our payload key, {"v3": 0.0123}.
    vectors: The augmented vectors, {"hub_v3": [..., 0.0123]}.
    """

    offsets: dict[str, float] = field(default_factory=dict)
    vectors: dict[str, list[float]] = field(default_factory=dict)


def values_of(
    version: QdrantVersion, vectors: np.ndarray, offsets: np.ndarray
) -> list[Any]:
    """Return the value to write to each point: a number or an augmented vector.

    Args:
        version: The version to write.
        vectors: The vectors of the points as stored in the collection [b, d].
        offsets: The offsets of the points [b].
    """
    values = offsets
    if version.storage == "vector":
        targets = as_targets(version, vectors)
        values = augment_targets(
            targets, offsets, version.metric, max_offset=version.ceiling
        )
    return list(values.tolist())


def as_targets(version: QdrantVersion, vectors: np.ndarray) -> np.ndarray:
    """Return the first d components of the augmented vectors of `vectors` [b, d]."""
    if version.metric is Metric.COSINE:
        vectors = unit_or_zero(vectors)
    if version.mapped:
        vectors = version.map.on_targets(vectors)
    return vectors


def compute_stored(
    points: Sequence[Any], models: Sequence[tuple[QdrantVersion, OffsetModel]]
) -> list[StoredOffsets]:
    """Compute the offsets of `points`, objects with a `vector`, by each of `models`.

    A vector that is absent, not yet embedded or of another dimension gets no offset:
    the server decides whether the vector may be written. A vector of length 0 has no
    cosine and gets the offset 0, so that it scores 0 as in a raw search.
    """
    stored = [StoredOffsets() for _ in points]
    for version, model in models:
        rows, vectors = select_usable([point.vector for point in points], version)
        has_offset = np.ones(len(rows), bool)
        if version.metric is Metric.COSINE:
            has_offset &= vectors.any(axis=1)
        offsets = np.zeros(len(rows), np.float32)
        if has_offset.any():
            offsets[has_offset] = model.offsets(vectors[has_offset])
        for row, value in zip(rows, values_of(version, vectors, offsets), strict=True):
            if version.storage == "vector":
                stored[row].vectors[version.augmented_vector] = value
            else:
                stored[row].offsets[version.field] = value
    return stored


def select_usable(
    vectors: Sequence[AnyVector], version: QdrantVersion
) -> tuple[list[int], np.ndarray]:
    """Select the `vectors` that can have an offset of `version`.

    Returns the rows of the selected vectors, and the vectors as an array [b, dim].
    """
    rows = []
    dense = []
    for row, vector in enumerate(vectors):
        vector = by_name(vector).get(version.vector)
        if not isinstance(vector, (list, tuple, np.ndarray)):
            continue
        try:
            array = np.asarray(vector)
        except ValueError:  # a multi-vector of unequal lengths
            continue
        is_dense = array.dtype.kind in "fiub" and array.shape == (version.dim,)
        if is_dense and np.isfinite(array).all():
            rows.append(row)
            dense.append(array)
    return rows, np.array(dense, np.float32).reshape(len(rows), version.dim)


def with_stored(point: models.PointStruct, stored: StoredOffsets) -> models.PointStruct:
    """Return `point` with the `stored` offsets added.

    Raises InputError if the payload already has our key.
    """
    update: dict[str, Any] = {}
    if stored.offsets:
        require_free(point.payload, KEY)
        update["payload"] = {**(point.payload or {}), KEY: stored.offsets}
    if stored.vectors:
        update["vector"] = by_name(point.vector) | stored.vectors
    return point.model_copy(update=update)


def by_name(vector: AnyVector) -> dict[str, AnyVector]:
    """Return the vectors of a point by name; "" is the unnamed one."""
    if vector is None:
        return {}
    if isinstance(vector, dict):
        return vector
    return {"": vector}


def require_free(payload: object, key: str | None) -> None:
    """Raise InputError if `payload` has our `key`. Without a key, do nothing."""
    if key is not None and isinstance(payload, Mapping) and key in payload:
        raise InputError(
            f"payload key {key!r} is reserved for hubplugin's offsets; use another name"
        )


def mend(
    record: models.Record,
    stored: StoredOffsets,
    previous: Collection[QdrantVersion],
    augmented_vectors: Collection[str],
) -> list[models.UpdateOperation]:
    """Return the operations that bring the offsets of a point up to date.

    The operations write missing or wrong offsets, and delete the offsets of other
    versions. Offsets of the previous version are kept, since some clients still search
    by them.

    Args:
        record: The point as stored.
        stored: The offsets that the point must have.
        previous: The versions that were replaced.
        augmented_vectors: The names of all augmented vectors.
    """
    operations: list[models.UpdateOperation] = []
    shard_key = record.shard_key
    held_offsets = our_offsets(record.payload)
    if _differing(stored.offsets, held_offsets):
        operations.append(set_offsets(record.id, stored.offsets, shard_key))
    kept_fields = {
        version.field for version in previous if version.storage == "payload"
    }
    surplus_fields = held_offsets.keys() - stored.offsets.keys() - kept_fields
    if surplus_fields:
        paths = [f"{KEY}.{name}" for name in sorted(surplus_fields)]
        under_key: Any = (record.payload or {})[KEY]
        if not stored.offsets and len(surplus_fields) == len(under_key):
            paths = [KEY]  # leave no empty dict behind
        operations += delete_keys(paths, shard_key, [record.id])
    vectors = by_name(record.vector)
    outdated = _differing(stored.vectors, vectors)
    if outdated:
        operations.append(set_vectors({record.id: outdated}, shard_key))
    held_vectors = vectors.keys() & augmented_vectors
    surplus_vectors = held_vectors - stored.vectors.keys() - vectors_of(previous)
    if surplus_vectors:
        delete = models.DeleteVectors(
            vector=sorted(surplus_vectors), points=[record.id], shard_key=shard_key
        )
        operations.append(models.DeleteVectorsOperation(delete_vectors=delete))
    return operations


def _differing(expected: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `expected` numbers or vectors that are missing or differ in `held`."""
    return {
        name: value
        for name, value in expected.items()
        if name not in held
        or not np.allclose(value, held[name], rtol=ROUNDING, atol=ROUNDING)
    }


def set_values(
    version: QdrantVersion, values: Mapping[Id, Any], shard_key: ShardKey
) -> list[models.UpdateOperation]:
    """Return the operations that write `values`, as from `values_of`, by point id."""
    if version.storage == "payload":
        return [
            set_offsets(key, {version.field: offset}, shard_key)
            for key, offset in values.items()
        ]
    name = version.augmented_vector
    vectors = {key: {name: vector} for key, vector in values.items()}
    return [set_vectors(vectors, shard_key)]


def set_offsets(
    point: PointId, offsets: dict[str, float], shard_key: ShardKey
) -> models.UpdateOperation:
    """Return the operation that writes `offsets` under our payload key of `point`."""
    fields = models.SetPayload(
        payload=offsets, points=[point], key=KEY, shard_key=shard_key
    )
    return models.SetPayloadOperation(set_payload=fields)


def set_vectors(
    vectors: Mapping[Any, Any], shard_key: ShardKey
) -> models.UpdateOperation:
    """Return the operation that writes `vectors`, by point id and vector name."""
    points = [
        # Skip the validation, which is slow and not needed for vectors of numbers.
        models.PointVectors.model_construct(id=key, vector=by_vector_name)
        for key, by_vector_name in vectors.items()
    ]
    update = models.UpdateVectors(points=points, shard_key=shard_key)
    return models.UpdateVectorsOperation(update_vectors=update)


def delete_keys(
    keys: Sequence[str], shard_key: ShardKey, points: Sequence[Any]
) -> list[models.UpdateOperation]:
    """Return the operations that delete the payload `keys` of `points`."""
    if not keys:
        return []
    delete = models.DeletePayload(
        keys=list(keys), points=list(points), shard_key=shard_key
    )
    return [models.DeletePayloadOperation(delete_payload=delete)]
