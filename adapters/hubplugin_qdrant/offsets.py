"""Pure: what a point holds for each version that is maintained, and how a user's writes bring it along.

A point has the offset of a version as a number in its payload, {"hub_offset": {"v3": 0.0123}}, or in an augmented
vector, "hub_v3": [t, offset] or, under Euclidean distance, [t, sqrt(2 (ceiling - offset))]. A query map lies in the
latter, so that no query need be mapped: <q + S q, t> = <q, t + S' t>.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from qdrant_client import models

from hubplugin.errors import InputError
from hubplugin.metric import Metric, augment_targets, unit_or_zero
from hubplugin.model import OffsetModel, Value
from hubplugin_qdrant.manifest import (
    Payload,
    QdrantManifest,
    QdrantVersion,
    our_fields,
    vectors_of,
)
from hubplugin_qdrant.plain_client import PointId, ShardKey
from hubplugin_qdrant.requests import EMBEDDED

AnyVector: TypeAlias = Any
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

    def in_payload(self, payload: Payload | None) -> Payload | None:
        """`payload` with the offsets. Raises InputError if it has our key."""
        if payload and not isinstance(payload, Mapping):
            return payload  # none, for the client to refuse
        require_free(payload or (), self.key)
        return (
            {**(payload or {}), self.key: self.offsets}
            if self.key and self.offsets
            else payload
        )

    def beside(self, vector: AnyVector) -> AnyVector:
        """`vector`, or the vectors of a point by name, with the augmented ones."""
        return {**by_name(vector), **self.vectors} if self.vectors else vector


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
    under = (payload or {}).get(version.offset_key)
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
    """The offsets that `points`, which have a `vector` and perhaps a `payload`, get by each of `models`. The payload
    says which group a point is in, where a model has groups.

    A vector that is absent, not yet embedded or of another dimension has no offset; whether it may be written is the
    server's to say. A vector of length 0, which has no cosine, has the offset 0, with which it scores 0, as it does
    raw.
    """
    key = next(
        (version.offset_key for version, _ in models if version.storage == "payload"),
        None,
    )
    stored = [StoredOffsets(key) for _ in points]
    for version, model in models:
        rows, vectors = usable([point.vector for point in points], version)
        judged = (
            vectors.any(axis=1)
            if version.metric is Metric.COSINE
            else np.ones(len(rows), bool)
        )
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
    """The rows of `vectors` that bring one that `version` can judge, and these vectors [b, dim]."""
    rows, dense = [], []
    for row, vector in enumerate(vectors):
        vector = by_name(vector).get(version.vector)
        try:
            array = (
                np.asarray(vector)
                if isinstance(vector, (list, tuple, np.ndarray))
                else np.array(None)
            )
        except ValueError:  # lists of several lengths
            continue
        if (
            array.dtype.kind in "fiub"
            and array.shape == (version.dim,)
            and np.isfinite(array).all()
        ):
            rows.append(row)
            dense.append(array)
    return rows, np.array(dense, np.float32).reshape(len(rows), version.dim)


def awaits_embedding(points: Sequence[Any], versions: Sequence[QdrantVersion]) -> bool:
    """Whether a vector of `points` that `versions` correct is a document that only the server will embed."""
    names = {version.vector for version in versions}
    return any(
        isinstance(by_name(point.vector).get(name), EMBEDDED)
        for point in points
        for name in names
    )


def with_stored(
    points: Sequence[models.PointStruct], stored: Sequence[StoredOffsets]
) -> list[models.PointStruct]:
    """`points` with the offsets that each has in `stored`. Raises InputError if a payload has our key."""
    return [
        point.model_copy(
            update={
                "payload": each.in_payload(point.payload),
                "vector": each.beside(point.vector),
            }
        )
        for point, each in zip(points, stored, strict=True)
    ]


def by_name(vector: AnyVector) -> dict[str, AnyVector]:
    """The vectors of a point by name; "" is the unnamed one."""
    if vector is None:
        return {}
    return vector if isinstance(vector, dict) else {"": vector}


def require_free(keys: Iterable[str | None], ours: str | None) -> None:
    """Raises InputError if one of the payload paths `keys` begins with `ours`, our key; None is no key."""
    for key in keys if ours is not None else ():
        if (
            key is not None
            and str(key).partition(".")[0].partition("[")[0].strip('"') == ours
        ):
            raise InputError(
                f"payload key {key!r}: {ours!r} is reserved for the offsets of hubplugin; use another name"
            )


def require_free_vectors(names: Iterable[str], ours: Collection[str]) -> None:
    """Raises InputError if one of the vectors called `names` is one of `ours`."""
    for name in names:
        if name in ours:
            raise InputError(
                f"vector {name!r}: it is reserved for the offsets of hubplugin; use another name"
            )


def require_free_points(points: Iterable[Any], ours: Collection[str]) -> None:
    """Raises InputError if one of `points`, whose vectors are written, brings one of `ours`."""
    for point in points if ours else ():
        if isinstance(point.vector, dict):
            require_free_vectors(point.vector, ours)


def require_free_operation(
    operation: models.UpdateOperation, key: str | None, ours: Collection[str]
) -> None:
    """Raises InputError if `operation`, an update, writes our `key`, or writes or deletes `ours`, the names of our
    vectors."""
    require_free_points(points_of(operation) or (), ours)
    if isinstance(
        operation, (models.SetPayloadOperation, models.OverwritePayloadOperation)
    ):
        payload: models.SetPayload = body_of(operation)
        require_free([payload.key] if payload.key else payload.payload, key)
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
    writes_vectors = isinstance(
        operation, (models.UpsertOperation, models.UpdateVectorsOperation)
    )
    return getattr(body_of(operation), "points", None) if writes_vectors else None


def wipes_payloads(operation: models.UpdateOperation) -> bool:
    """Whether an operation takes our payload key with it."""
    if isinstance(operation, models.OverwritePayloadOperation):
        return operation.overwrite_payload.key is None
    return isinstance(operation, models.ClearPayloadOperation)


def may_drop_offsets(
    operation: models.UpdateOperation, versions: Sequence[QdrantVersion]
) -> bool:
    """Whether points may not have the offsets of `versions` that are theirs, once `operation` is done: their vectors
    are others, offsets in payloads are gone, or they have gone to another group."""
    if isinstance(
        operation, (models.UpdateVectorsOperation, models.DeleteVectorsOperation)
    ):
        return True
    payloads = (
        models.SetPayloadOperation,
        models.OverwritePayloadOperation,
        models.DeletePayloadOperation,
    )
    regroups = isinstance(operation, payloads) and any(
        version.group_by is not None for version in versions
    )
    return regroups or wipes_payloads(operation)


def complete(
    operation: models.UpdateOperation,
    manifest: QdrantManifest,
    stored: Sequence[StoredOffsets],
    numbers: Mapping[PointId, Mapping[str, float]],
) -> list[models.UpdateOperation]:
    """Adds to an operation what goes with it in the same step.

    Args:
        operation: an update.
        manifest: the manifest of its collection.
        stored: what the points that it writes store.
        numbers: the numbers under our key of the points whose payload it wipes, by id. Each of these points gets one
            payload that holds both, so that no search finds a point without its offset.

    Returns:
        The operations; the last one is the operation itself.
    """
    body = body_of(operation)
    if (
        isinstance(operation, models.UpsertOperation)
        and points_of(operation) is not None
    ):
        return [
            models.UpsertOperation(
                upsert=body.model_copy(
                    update={"points": with_stored(body.points, stored)}
                )
            )
        ]
    if isinstance(operation, models.UpdateVectorsOperation):
        pairs = zip(body.points, stored, strict=True)
        points = [
            point.model_copy(update={"vector": each.beside(point.vector)})
            for point, each in pairs
        ]
        return [
            models.UpdateVectorsOperation(
                update_vectors=body.model_copy(update={"points": points})
            )
        ]
    if isinstance(operation, models.DeleteVectorsOperation):
        ours = vectors_of(
            version for version in manifest.everything if version.vector in body.vector
        )
        delete = body.model_copy(update={"vector": [*body.vector, *ours]})
        return [models.DeleteVectorsOperation(delete_vectors=delete)]
    if not wipes_payloads(operation) or not any(numbers.values()):
        return [operation]
    payload: Payload = getattr(body, "payload", None) or {}

    def overwrite(points: list[PointId], payload: Payload) -> models.UpdateOperation:
        fields = models.SetPayload(
            payload=payload, points=points, shard_key=body.shard_key
        )
        return models.OverwritePayloadOperation(overwrite_payload=fields)

    key = str(manifest.offset_key)
    operations = [
        overwrite([point], {**payload, key: ours})
        for point, ours in numbers.items()
        if ours
    ]
    others = [point for point, ours in numbers.items() if not ours]
    return [*operations, overwrite(others, payload)] if others else operations


def mend(
    record: models.Record,
    stored: StoredOffsets,
    keys: Iterable[str],
    manifest: QdrantManifest,
    shard_key: ShardKey,
) -> list[models.UpdateOperation]:
    """Makes a point hold what it must store, and nothing else of ours but for what is outgoing.

    Args:
        record: the point.
        stored: what it must store.
        keys: the payload keys that may be ours.
        manifest: knows the vectors that are ours.
        shard_key: of the point.

    Returns:
        The operations that do it.
    """
    outgoing = manifest.outgoing()
    operations: list[models.UpdateOperation] = []
    target: dict[str, Any] = {"points": [record.id], "shard_key": shard_key}
    for key in keys:
        under: Any = (record.payload or {}).get(key)
        offsets = stored.offsets if key == stored.key else {}
        fields = our_fields(under)
        is_same = partial(math.isclose, rel_tol=ROUNDING, abs_tol=ROUNDING)
        if not all(
            name in fields and is_same(value, under[name])
            for name, value in offsets.items()
        ):
            operations.append(set_offsets(record.id, offsets, key, shard_key))
        surplus = fields - offsets.keys() - {version.field for version in outgoing}
        if surplus:
            is_all = not offsets and len(surplus) == len(under)
            paths = [key] if is_all else [f"{key}.{name}" for name in sorted(surplus)]
            delete_payload = models.DeletePayload(keys=paths, **target)
            operations.append(
                models.DeletePayloadOperation(delete_payload=delete_payload)
            )
    vectors = by_name(record.vector)
    lacking: Any = {
        name: vector
        for name, vector in stored.vectors.items()
        if name not in vectors
        or not np.allclose(vector, vectors[name], rtol=ROUNDING, atol=ROUNDING)
    }
    if lacking:
        points = [models.PointVectors(id=record.id, vector=lacking)]
        update = models.UpdateVectors(points=points, shard_key=shard_key)
        operations.append(models.UpdateVectorsOperation(update_vectors=update))
    surplus = {*vectors_of(manifest.everything)} & vectors.keys() - {
        *stored.vectors,
        *vectors_of(outgoing),
    }
    if surplus:
        delete = models.DeleteVectors(vector=sorted(surplus), **target)
        operations.append(models.DeleteVectorsOperation(delete_vectors=delete))
    return operations


def set_offsets(
    point: PointId, offsets: dict[str, float], key: str, shard_key: ShardKey
) -> models.UpdateOperation:
    """The operation that puts `offsets` under the payload `key` of the `point` with this `shard_key`."""
    fields = models.SetPayload(
        payload=offsets, points=[point], key=key, shard_key=shard_key
    )
    return models.SetPayloadOperation(set_payload=fields)
