"""Pure: what a point holds for each version that is kept up, and how a user's writes bring it along.

A point has the offset of a version as a number in its payload, {"hub_offset": {"v3": 0.0123}}, or in an augmented
vector, "hub_v3": [t, offset] or, under Euclidean distance, [t, sqrt(2 (ceiling - offset))]. A query map lies in the
latter, so that no query need be mapped: <q + S q, t> = <q, t + S' t>.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from qdrant_client import models

from hubplugin.errors import InputError
from hubplugin.metric import Metric, augment_targets, unit_or_zero
from hubplugin.model import OffsetModel, Value
from hubplugin_qdrant.manifest import Manifest, Payload, Version, augmented_vectors, our_fields
from hubplugin_qdrant.plain_client import PointId, ShardKey

GivenVector: TypeAlias = Any
"""A vector as a client gives it: a list, an array, a document to embed, a dict of these by name, or None."""

FLOAT16 = 2.0**-10
"""Twice the share of a number that its rounding to float16 moves it by."""

ROUNDING = 1e-6
"""Numbers of a point that differ by less, or by less of themselves, are those that were written."""


@dataclass(frozen=True)
class StoredOffsets:
    """What one point holds for all versions: numbers under our payload `key`, {"v3": 0.0123}, and augmented vectors,
    {"hub_v3": [..., 0.0123]}. key: None where no version has its offsets in payloads."""

    key: str | None = None
    offsets: dict[str, float] = field(default_factory=dict)
    vectors: dict[str, list[float]] = field(default_factory=dict)


def written_values(version: Version, vectors: np.ndarray, offsets: np.ndarray) -> list[Any]:
    """What is written to each of the points of `vectors` [b, d], as they lie in the collection, for its offset, of
    `offsets` [b]: a number, or an augmented vector."""
    if version.storage == "vector":
        targets = _targets(version, vectors)
        offsets = augment_targets(targets, offsets, version.metric, max_offset=version.ceiling)
    values: list[Any] = offsets.tolist()
    return values


def _targets(version: Version, vectors: np.ndarray) -> np.ndarray:
    """What stands for `vectors` [b, d] in the augmented ones, before the offset."""
    if version.metric is Metric.COSINE:
        vectors = unit_or_zero(vectors)
    return version.map.on_targets(vectors) if version.mapped else vectors


def held_offsets(
    version: Version,
    vectors: np.ndarray,
    payloads: Sequence[Payload | None],
    augmented: Sequence[Sequence[float] | None],
) -> np.ndarray:
    """The offsets that the points of `vectors` [b, d] hold, float32 [b]: NaN where there is none, infinity where it was
    made for another vector."""
    if version.storage == "payload":
        held = [held_offset(version, payload) for payload in payloads]
        return np.array([np.nan if each is None else each for each in held], np.float32)
    found = np.full(len(vectors), np.nan, np.float32)
    rows = [row for row, each in enumerate(augmented) if each is not None]
    if rows:
        written = np.array([augmented[row] for row in rows], np.float32)
        given = _targets(version, vectors[rows])
        extra, written = written[:, -1], written[:, :-1]
        room = 1e-2 * (np.abs(given).max(axis=1, keepdims=True) + np.abs(written))  # float16 is exact to 1e-3
        same = (np.abs(given - written) <= room).all(axis=1)
        offsets = version.ceiling - extra**2 / 2 if version.metric is Metric.EUCLIDEAN else extra
        found[rows] = np.where(same, offsets, np.inf)
    return found


def rounding(
    version: Version, augmented: Sequence[Sequence[float] | None]
) -> Callable[[np.ndarray], np.ndarray] | None:
    """`Batch.rounding` of these points: what float16 loses, where a vector of that type may be what was read. One
    number in 8,192 of float32 is one of float16, too."""
    if version.storage == "payload":
        return None
    extra = np.array([0.0 if each is None else each[-1] for each in augmented], np.float32)
    with np.errstate(over="ignore"):
        is_short = extra.astype(np.float16) == extra
    lost = FLOAT16 * (extra**2 if version.metric is Metric.EUCLIDEAN else np.abs(extra))
    return lambda _offsets: np.where(is_short, lost, 0.0)


def held_offset(version: Version, payload: Payload | None) -> float | None:
    """The offset of `version` in the payload of a point, None if there is none."""
    under = (payload or {}).get(version.offset_key)
    value: Any = under.get(version.field) if isinstance(under, dict) else None
    return float(value) if type(value) in (int, float) else None


def group_of(payload: Payload | None, key: str) -> Value:
    """The value of `key`, a path such as "shop.tenant", if it is one text, number or truth value."""
    found: object = payload
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, (str, int)) else None


def stored_offsets(points: Sequence[Any], fitted: Sequence[tuple[Version, OffsetModel]]) -> list[StoredOffsets]:
    """What `points`, which have a `vector` and perhaps a `payload`, store. The payload says which group a point is in,
    where a model has groups.

    A vector that is absent, not yet embedded or of another dimension has no offset; whether it may be written is the
    server's to say. One of length 0, which has no cosine, has the offset 0, with which it scores 0, as it does raw.
    """
    key = next((version.offset_key for version, _ in fitted if version.storage == "payload"), None)
    found = [StoredOffsets(key) for _ in points]
    for version, model in fitted:
        rows, vectors = usable([point.vector for point in points], version)
        judged = vectors.any(axis=1) if version.metric is Metric.COSINE else np.ones(len(rows), bool)
        offsets = np.zeros(len(rows), np.float32)
        if judged.any():
            groups = None
            if version.group_by is not None:
                asked = [getattr(points[rows[number]], "payload", None) for number in np.flatnonzero(judged)]
                groups = [group_of(payload, version.group_by) for payload in asked]
            offsets[judged] = model.offsets(vectors[judged], groups=groups)
        for row, value in zip(rows, written_values(version, vectors, offsets), strict=True):
            if version.storage == "vector":
                found[row].vectors[version.augmented_vector] = value
            else:
                found[row].offsets[version.field] = value
    return found


def usable(vectors: Sequence[GivenVector], version: Version) -> tuple[list[int], np.ndarray]:
    """The rows of `vectors` that bring one that `version` can judge, and these vectors [b, dim]."""
    rows, dense = [], []
    for row, given in enumerate(vectors):
        vector = given.get(version.vector) if isinstance(given, dict) else None if version.vector else given
        try:
            array = np.asarray(vector) if isinstance(vector, (list, tuple, np.ndarray)) else np.array(None)
        except ValueError:  # lists of several lengths
            continue
        if array.dtype.kind in "fiub" and array.shape == (version.dim,) and np.isfinite(array).all():
            rows.append(row)
            dense.append(array)
    return rows, np.array(dense, np.float32).reshape(len(rows), version.dim)


def awaits_embedding(points: Sequence[Any], versions: Sequence[Version]) -> bool:
    """Whether a corrected vector of `points` is a document that only the server will embed."""
    objects = (models.Document, models.Image, models.InferenceObject)
    return any(
        isinstance(point.vector.get(version.vector) if isinstance(point.vector, dict) else point.vector, objects)
        for point in points
        for version in versions
    )


def with_stored(points: Sequence[models.PointStruct], stored: Sequence[StoredOffsets]) -> list[models.PointStruct]:
    """`points` with the offsets that they store. Raises InputError if a payload has our key."""
    return [
        point.model_copy(
            update={"payload": with_offsets(point.payload, each), "vector": with_vectors(point.vector, each)}
        )
        for point, each in zip(points, stored, strict=True)
    ]


def with_offsets(payload: Payload | None, stored: StoredOffsets) -> Payload | None:
    if payload and not isinstance(payload, Mapping):
        return payload  # none, for the client to refuse
    require_free(payload or (), stored.key)
    return {**(payload or {}), stored.key: stored.offsets} if stored.key and stored.offsets else payload


def with_vectors(vector: GivenVector, stored: StoredOffsets) -> GivenVector:
    return {**named(vector), **stored.vectors} if stored.vectors else vector


def named(vector: GivenVector) -> dict[str, GivenVector]:
    """The vectors of a point by name; "" is the unnamed one."""
    if vector is None:
        return {}
    return vector if isinstance(vector, dict) else {"": vector}


def require_free(keys: Iterable[str | None], ours: str | None) -> None:
    """Raises InputError if one of the payload paths `keys` begins with our key; None is no key."""
    for key in keys if ours is not None else ():
        if key is not None and str(key).partition(".")[0].partition("[")[0].strip('"') == ours:
            raise InputError(
                f"payload key {key!r}: {ours!r} is reserved for the offsets of hubplugin; use another name"
            )


def require_free_vectors(names: Iterable[str], ours: Collection[str]) -> None:
    """Raises InputError if one of the vectors called `names` is one of `ours`."""
    for name in names:
        if name in ours:
            raise InputError(f"vector {name!r}: it is reserved for the offsets of hubplugin; use another name")


def require_free_points(points: Iterable[Any], ours: Collection[str]) -> None:
    """Raises InputError if one of `points`, whose vectors are written, brings one of `ours`."""
    for point in points if ours else ():
        if isinstance(point.vector, dict):
            require_free_vectors(point.vector, ours)


def require_free_operation(operation: models.UpdateOperation, key: str | None, ours: Collection[str]) -> None:
    """Raises InputError if an update operation writes our `key`, or writes or deletes one of our vectors."""
    require_free_points(points_of(operation) or (), ours)
    if isinstance(operation, (models.SetPayloadOperation, models.OverwritePayloadOperation)):
        given: models.SetPayload = body_of(operation)
        require_free([given.key] if given.key else given.payload, key)
    elif isinstance(operation, models.DeletePayloadOperation):
        require_free(operation.delete_payload.keys, key)
    elif isinstance(operation, models.DeleteVectorsOperation):
        require_free_vectors(operation.delete_vectors.vector, ours)


def body_of(operation: models.UpdateOperation) -> Any:
    """What an update operation says, in its only field; None of what is none, which is the client's to refuse."""
    fields = getattr(type(operation), "model_fields", ())
    return getattr(operation, next(iter(fields))) if len(fields) == 1 else None


def points_of(operation: models.UpdateOperation) -> list[Any] | None:
    """The points, with vectors, that an update operation writes one by one; None if it writes none so."""
    if isinstance(operation, (models.UpsertOperation, models.UpdateVectorsOperation)):
        points: list[Any] | None = getattr(body_of(operation), "points", None)
        return points
    return None


def wipes_payloads(operation: models.UpdateOperation) -> bool:
    """Whether an operation takes our payload key with it."""
    if isinstance(operation, models.OverwritePayloadOperation):
        return operation.overwrite_payload.key is None
    return isinstance(operation, models.ClearPayloadOperation)


def may_drop_offsets(operation: models.UpdateOperation, versions: Sequence[Version]) -> bool:
    """Whether points may not have the offsets of `versions` that are theirs, once `operation` is done: their vectors
    are others, offsets in payloads are gone, or they have gone to another group."""
    if isinstance(operation, (models.UpdateVectorsOperation, models.DeleteVectorsOperation)):
        return True
    payloads = (models.SetPayloadOperation, models.OverwritePayloadOperation, models.DeletePayloadOperation)
    regroups = isinstance(operation, payloads) and any(version.group_by is not None for version in versions)
    return regroups or wipes_payloads(operation)


def completed(
    operation: models.UpdateOperation,
    manifest: Manifest,
    stored: Sequence[StoredOffsets],
    held: Mapping[PointId, Mapping[str, float]],
) -> list[models.UpdateOperation]:
    """`operation` with what goes with it in the same step; the last one is the operation itself.

    stored: of the points that it writes. held: the numbers under our key of the points whose payload it wipes, by id;
    each gets one payload that holds both, so that no search finds a point without its offset.
    """
    body = body_of(operation)
    if isinstance(operation, models.UpsertOperation) and points_of(operation) is not None:
        return [models.UpsertOperation(upsert=body.model_copy(update={"points": with_stored(body.points, stored)}))]
    if isinstance(operation, models.UpdateVectorsOperation):
        pairs = zip(body.points, stored, strict=True)
        points = [point.model_copy(update={"vector": with_vectors(point.vector, each)}) for point, each in pairs]
        return [models.UpdateVectorsOperation(update_vectors=body.model_copy(update={"points": points}))]
    if isinstance(operation, models.DeleteVectorsOperation):
        ours = augmented_vectors(version for version in manifest.everything if version.vector in body.vector)
        deleted = body.model_copy(update={"vector": [*body.vector, *ours]})
        return [models.DeleteVectorsOperation(delete_vectors=deleted)]
    if not wipes_payloads(operation) or not any(held.values()):
        return [operation]
    payload: Payload = getattr(body, "payload", None) or {}

    def overwritten(points: list[PointId], payload: Payload) -> models.UpdateOperation:
        given = models.SetPayload(payload=payload, points=points, shard_key=body.shard_key)
        return models.OverwritePayloadOperation(overwrite_payload=given)

    made = [overwritten([key], {**payload, str(manifest.offset_key): each}) for key, each in held.items() if each]
    others = [key for key, each in held.items() if not each]
    return [*made, overwritten(others, payload)] if others else made


def mending(
    record: models.Record, stored: StoredOffsets, keys: Iterable[str], manifest: Manifest, shard_key: ShardKey
) -> list[models.UpdateOperation]:
    """What makes the point of `record` hold of ours what is `stored`, and nothing else under the payload `keys` and in
    the vectors that `manifest` knows, but for what is outgoing."""
    outgoing = manifest.outgoing()
    made: list[models.UpdateOperation] = []
    chosen: dict[str, Any] = {"points": [record.id], "shard_key": shard_key}
    for key in keys:
        held: Any = (record.payload or {}).get(key)
        wanted = stored.offsets if key == stored.key else {}
        if wanted and not _is_held(wanted, held):
            made.append(set_offsets(record.id, wanted, key, shard_key))
        ours = our_fields(held) - wanted.keys() - {version.field for version in outgoing}
        if ours:
            fields = [f"{key}.{field}" for field in sorted(ours)]
            gone = fields if wanted or len(ours) < len(held) else [key]
            made.append(models.DeletePayloadOperation(delete_payload=models.DeletePayload(keys=gone, **chosen)))
    vectors = named(record.vector)
    lacking: Any = {
        name: each
        for name, each in stored.vectors.items()
        if name not in vectors or not np.allclose(each, vectors[name], rtol=ROUNDING, atol=ROUNDING)
    }
    if lacking:
        moved = [models.PointVectors(id=record.id, vector=lacking)]
        made.append(
            models.UpdateVectorsOperation(update_vectors=models.UpdateVectors(points=moved, shard_key=shard_key))
        )
    kept = {*stored.vectors, *augmented_vectors(outgoing)}
    left = [name for name in manifest.augmented_vectors() if name in vectors and name not in kept]
    if left:
        made.append(models.DeleteVectorsOperation(delete_vectors=models.DeleteVectors(vector=left, **chosen)))
    return made


def set_offsets(point: PointId, offsets: dict[str, float], key: str | None, shard_key: ShardKey) -> Any:
    given = models.SetPayload(payload=offsets, points=[point], key=key, shard_key=shard_key)
    return models.SetPayloadOperation(set_payload=given)


def _is_held(offsets: dict[str, float], numbers: Any) -> bool:
    """Whether a point with these `numbers` under our key holds `offsets`, up to rounding."""
    ours = our_fields(numbers)
    return all(
        field in ours and math.isclose(each, numbers[field], rel_tol=ROUNDING, abs_tol=ROUNDING)
        for field, each in offsets.items()
    )
