"""Pure: what a point holds for each version that is maintained, and how a user's writes bring it along.

A point has the offset of a version as a number in its payload, {"hub_offset": {"v3": 0.0123}}, or in an augmented
vector, "hub_v3": [t, offset] or, under Euclidean distance, [t, sqrt(2 (ceiling - offset))]. A query map lies in the
latter, so that no query need be mapped: <q + S q, t> = <q, t + S' t>.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from qdrant_client import models

from hubplugin.errors import InputError
from hubplugin.metric import Metric, augment_targets, unit_or_zero
from hubplugin.model import OffsetModel, Value
from hubplugin_qdrant.manifest import (
    KEY,
    Payload,
    QdrantManifest,
    QdrantVersion,
    our_fields,
    vectors_of,
)
from hubplugin_qdrant.plain_client import PointId, ShardKey

AnyVector: TypeAlias = Any
"""A vector as a client gives it: a list, an array, a document to embed, a dict of these by name, or None."""

FLOAT16 = 2.0**-10
"""Twice the share of a number that its rounding to float16 moves it by."""

ROUNDING = 1e-6
"""Numbers of a point that differ by less, or by less of themselves, are those that were written."""


@dataclass(frozen=True)
class StoredOffsets:
    """What one point holds for all versions.

    offsets: numbers under our payload key, {"v3": 0.0123}. vectors: augmented ones,
    {"hub_v3": [..., 0.0123]}.
    """

    offsets: dict[str, float] = field(default_factory=dict)
    vectors: dict[str, list[float]] = field(default_factory=dict)


def values_of(
    version: QdrantVersion, vectors: np.ndarray, offsets: np.ndarray
) -> list[Any]:
    """What is written to points for their offsets.

    Args:
        version: the version that is written.
        vectors: of the points, as they lie in the collection [b, d].
        offsets: [b].

    Returns:
        A number of each point, or an augmented vector.
    """
    if version.storage == "vector":
        offsets = augment_targets(
            _as_targets(version, vectors),
            offsets,
            version.metric,
            max_offset=version.ceiling,
        )
    values: list[Any] = offsets.tolist()
    return values


def _as_targets(version: QdrantVersion, vectors: np.ndarray) -> np.ndarray:
    """What stands for `vectors` [b, d] in the augmented ones, before the offset."""
    if version.metric is Metric.COSINE:
        vectors = unit_or_zero(vectors)
    return version.map.on_targets(vectors) if version.mapped else vectors


def read_offsets(
    version: QdrantVersion,
    vectors: np.ndarray,
    payloads: Sequence[Payload | None],
    augmented: Sequence[Sequence[float] | None],
) -> np.ndarray:
    """The offsets that points hold.

    Args:
        version: the version of the offsets.
        vectors: of the points [b, d].
        payloads, augmented: what each point holds in its payload, and its augmented vector, for where `version` has
            one.

    Returns:
        float32 [b]: NaN for no offset, infinity for one of another vector.
    """
    if version.storage == "payload":
        numbers = [read_offset(version, payload) for payload in payloads]
        return np.array(
            [np.nan if number is None else number for number in numbers], np.float32
        )
    offsets = np.full(len(vectors), np.nan, np.float32)
    rows = [row for row, vector in enumerate(augmented) if vector is not None]
    if rows:
        stored = np.array([augmented[row] for row in rows], np.float32)
        expected, extra, stored = (
            _as_targets(version, vectors[rows]),
            stored[:, -1],
            stored[:, :-1],
        )
        room = 1e-2 * (
            np.abs(expected).max(axis=1, keepdims=True) + np.abs(stored)
        )  # float16 is exact to 1e-3
        same = (np.abs(expected - stored) <= room).all(axis=1)
        values = (
            version.ceiling - extra**2 / 2
            if version.metric is Metric.EUCLIDEAN
            else extra
        )
        offsets[rows] = np.where(same, values, np.inf)
    return offsets


def rounding(
    version: QdrantVersion, augmented: Sequence[Sequence[float] | None]
) -> Callable[[np.ndarray], np.ndarray] | None:
    """`Batch.rounding` of points with these `augmented` vectors of `version`: what float16 loses, where a vector of
    that type may be what was read. One number in 8,192 of float32 is one of float16, too."""
    if version.storage == "payload":
        return None
    extra = np.array(
        [0.0 if vector is None else vector[-1] for vector in augmented], np.float32
    )
    with np.errstate(over="ignore"):
        is_short = extra.astype(np.float16) == extra
    loss = FLOAT16 * (extra**2 if version.metric is Metric.EUCLIDEAN else np.abs(extra))
    return lambda _offsets: np.where(is_short, loss, 0.0)


def read_offset(version: QdrantVersion, payload: Payload | None) -> float | None:
    """The offset of `version` in the `payload` of a point, None if there is none."""
    under = (payload or {}).get(KEY)
    value: Any = under.get(version.field) if isinstance(under, dict) else None
    return float(value) if type(value) in (int, float) else None


def group_of(payload: Payload | None, key: str) -> Value:
    """The value of `key`, a path such as "shop.tenant", in `payload`, if it is one text, number or truth value."""
    value: object = payload
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, (str, int)) else None


def compute_stored(
    points: Sequence[Any], models: Sequence[tuple[QdrantVersion, OffsetModel]]
) -> list[StoredOffsets]:
    """Return the offsets that `points`, which have a `vector`, get by each of `models`.

    A vector that is absent, not yet embedded or of another dimension has no offset;
    whether it may be written is the server's to say. A vector of length 0, which has no
    cosine, has the offset 0, with which it scores 0, as it does raw.
    """
    stored = [StoredOffsets() for _ in points]
    for version, model in models:
        rows, vectors = usable([point.vector for point in points], version)
        judged = np.ones(len(rows), bool)
        if version.metric is Metric.COSINE:
            judged &= vectors.any(axis=1)
        offsets = np.zeros(len(rows), np.float32)
        if judged.any():
            offsets[judged] = model.offsets(vectors[judged])
        for row, value in zip(rows, values_of(version, vectors, offsets), strict=True):
            if version.storage == "vector":
                stored[row].vectors[version.augmented_vector] = value
            else:
                stored[row].offsets[version.field] = value
    return stored


def usable(
    vectors: Sequence[AnyVector], version: QdrantVersion
) -> tuple[list[int], np.ndarray]:
    """Return the rows of `vectors` that `version` can judge, and these [b, dim]."""
    rows, dense = [], []
    for row, vector in enumerate(vectors):
        vector = by_name(vector).get(version.vector)
        if not isinstance(vector, (list, tuple, np.ndarray)):
            continue
        try:
            array = np.asarray(vector)
        except ValueError:  # lists of several lengths
            continue
        is_dense = array.dtype.kind in "fiub" and array.shape == (version.dim,)
        if is_dense and np.isfinite(array).all():
            rows.append(row)
            dense.append(array)
    return rows, np.array(dense, np.float32).reshape(len(rows), version.dim)


def with_stored(
    points: Sequence[models.PointStruct], stored: Sequence[StoredOffsets]
) -> list[models.PointStruct]:
    """Return `points` with the offsets that each has in `stored`.

    Raises InputError if a payload has our key.
    """
    written = []
    for point, each in zip(points, stored, strict=True):
        update: dict[str, Any] = {}
        if each.offsets:
            require_free(point.payload, KEY)
            update["payload"] = {**(point.payload or {}), KEY: each.offsets}
        if each.vectors:
            update["vector"] = {**by_name(point.vector), **each.vectors}
        written.append(point.model_copy(update=update))
    return written


def by_name(vector: AnyVector) -> dict[str, AnyVector]:
    """The vectors of a point by name; "" is the unnamed one."""
    if vector is None:
        return {}
    return vector if isinstance(vector, dict) else {"": vector}


def require_free(payload: object, key: str | None) -> None:
    """Raise InputError if `payload` has our `key`; None is no key."""
    if key is not None and isinstance(payload, Mapping) and key in payload:
        raise InputError(
            f"payload key {key!r} is reserved for the offsets of hubplugin; "
            "use another name"
        )


def mend(
    record: models.Record, stored: StoredOffsets, manifest: QdrantManifest
) -> list[models.UpdateOperation]:
    """Return what makes a point hold what it must store, and nothing else of ours.

    The version before stays as it is: some clients still search by it.

    Args:
        record: The point.
        stored: What it must store.
        manifest: Knows which vectors are ours.
    """
    operations: list[models.UpdateOperation] = []
    target: dict[str, Any] = {"points": [record.id], "shard_key": record.shard_key}
    before = manifest.previous.values()
    under: Any = (record.payload or {}).get(KEY)
    fields = our_fields(under)
    held = {name: under[name] for name in fields}
    if not all(_is_same(x, held.get(name)) for name, x in stored.offsets.items()):
        operations.append(set_offsets(record.id, stored.offsets, record.shard_key))
    kept = {version.field for version in before if version.storage == "payload"}
    surplus = fields - stored.offsets.keys() - kept
    if surplus:
        paths = [f"{KEY}.{name}" for name in sorted(surplus)]
        if not stored.offsets and len(surplus) == len(under):
            paths = [KEY]
        delete_payload = models.DeletePayload(keys=paths, **target)
        operations.append(models.DeletePayloadOperation(delete_payload=delete_payload))
    vectors = by_name(record.vector)
    lacking: Any = {
        name: vector
        for name, vector in stored.vectors.items()
        if not _is_same(vector, vectors.get(name))
    }
    if lacking:
        points = [models.PointVectors(id=record.id, vector=lacking)]
        update = models.UpdateVectors(points=points, shard_key=record.shard_key)
        operations.append(models.UpdateVectorsOperation(update_vectors=update))
    ours = set(vectors_of(manifest.everything)) & vectors.keys()
    surplus = ours - stored.vectors.keys() - set(vectors_of(before))
    if surplus:
        delete = models.DeleteVectors(vector=sorted(surplus), **target)
        operations.append(models.DeleteVectorsOperation(delete_vectors=delete))
    return operations


def _is_same(expected: Any, held: Any) -> bool:
    """Tell whether `held`, a number or a vector, is the one that was written."""
    if held is None:
        return False
    return bool(np.allclose(expected, held, rtol=ROUNDING, atol=ROUNDING))


def set_offsets(
    point: PointId, offsets: dict[str, float], shard_key: ShardKey
) -> models.UpdateOperation:
    """Return the operation that puts `offsets` under our key of the `point`."""
    fields = models.SetPayload(
        payload=offsets, points=[point], key=KEY, shard_key=shard_key
    )
    return models.SetPayloadOperation(set_payload=fields)
