"""Pure: what a point holds for each version that is kept up, and how a user's writes bring it along.

A point has the offset of a version as a number in its payload, or in an augmented vector: the two storages.
"""

from __future__ import annotations

import itertools
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from qdrant_client import models

from hubplugin.errors import InputError
from hubplugin.metric import Metric, augment_targets, unit_or_zero
from hubplugin.model import OffsetModel, Value
from hubplugin_qdrant.manifest import Manifest, Payload, Version, augmented_vectors, our_fields, payload_keys
from hubplugin_qdrant.plain_client import PointId, ShardKey

GivenVector: TypeAlias = Any
"""A vector as a client gives it: a list, an array, a document to embed, a dict of these by name, or None."""

Points: TypeAlias = models.Batch | list[models.PointStruct]
"""What `upsert` takes, as REST structures."""

Written: TypeAlias = list[models.PointStruct] | list[models.PointVectors]
"""The points of an operation that writes vectors."""

Stored = TypeVar("Stored", float, list[float])
"""What is written to one point: the offset, or the augmented vector."""


FLOAT16 = 2.0**-10
"""Twice the share of a number that its rounding to float16 moves it by."""


@dataclass(frozen=True)
class StoredOffsets:
    """What one point holds for all versions: numbers under our payload `key`, {"v3": 0.0123}, and augmented vectors,
    {"hub_v3": [..., 0.0123]}. key: None where no version has its offsets in payloads."""

    key: str | None = None
    offsets: dict[str, float] = field(default_factory=dict)
    vectors: dict[str, list[float]] = field(default_factory=dict)


class Storage(ABC, Generic[Stored]):
    """How a point holds the offset of `version`. A *value* is what is written to one point."""

    def __init__(self, version: Version):
        self.version = version

    @abstractmethod
    def values(self, vectors: np.ndarray, offsets: np.ndarray) -> list[Stored]:
        """The value of each of `vectors` [b, d], as they lie in the collection, with its offset: `offsets` [b]."""

    @abstractmethod
    def neutral(self) -> Stored:
        """The value of a vector of length 0 under cosine: with the offset 0 it scores 0, as it does raw."""

    @abstractmethod
    def offsets(
        self, payloads: Sequence[Payload | None], vectors: np.ndarray, augmented: Sequence[Sequence[float] | None]
    ) -> np.ndarray:
        """The offsets that the points of `vectors` [b, d] hold, float32 [b]: NaN where there is none, infinity where it
        was made for another vector."""

    def rounding(self, augmented: Sequence[Sequence[float] | None]) -> np.ndarray | None:
        """By how much the offsets of these points may differ from what was written [b], None where float32 keeps
        them."""
        return None

    @abstractmethod
    def put(self, value: Stored, into: StoredOffsets) -> None:
        """Adds `value` to what a point holds."""


class PayloadStorage(Storage[float]):
    """{"hub_offset": {"v3": 0.0123}} in the payload."""

    def values(self, vectors: np.ndarray, offsets: np.ndarray) -> list[float]:
        numbers: list[float] = offsets.tolist()
        return numbers

    def neutral(self) -> float:
        return 0.0

    def offsets(
        self, payloads: Sequence[Payload | None], vectors: np.ndarray, augmented: Sequence[Sequence[float] | None]
    ) -> np.ndarray:
        held = [held_offset(self.version, payload) for payload in payloads]
        return np.array([np.nan if each is None else each for each in held], np.float32)

    def put(self, value: float, into: StoredOffsets) -> None:
        into.offsets[self.version.field] = value


class VectorStorage(Storage[list[float]]):
    """The augmented vector "hub_v3": [t, offset] or, under Euclidean distance, [t, sqrt(2 (ceiling - offset))].

    A query map lies in it, so that no query need be mapped: <q + S q, t> = <q, t + S' t>.
    """

    def values(self, vectors: np.ndarray, offsets: np.ndarray) -> list[list[float]]:
        targets = self._targets(vectors)
        augmented = augment_targets(targets, offsets, self.version.metric, max_offset=self.version.ceiling)
        listed: list[list[float]] = augmented.tolist()
        return listed

    def _targets(self, vectors: np.ndarray) -> np.ndarray:
        """What stands for `vectors` [b, d] in the augmented ones, before the offset."""
        if self.version.metric is Metric.COSINE:
            vectors = unit_or_zero(vectors)
        return self.version.map.on_targets(vectors) if self.version.mapped else vectors

    def neutral(self) -> list[float]:
        return [0.0] * (self.version.dim + 1)

    def offsets(
        self, payloads: Sequence[Payload | None], vectors: np.ndarray, augmented: Sequence[Sequence[float] | None]
    ) -> np.ndarray:
        found = np.full(len(vectors), np.nan, np.float32)
        rows = [row for row, each in enumerate(augmented) if each is not None]
        if not rows:
            return found
        written = np.array([augmented[row] for row in rows], np.float32)
        given = self._targets(vectors[rows])
        extra, written = written[:, -1], written[:, :-1]
        room = 1e-2 * (np.abs(given).max(axis=1, keepdims=True) + np.abs(written))  # float16 is exact to 1e-3
        same = (np.abs(given - written) <= room).all(axis=1)
        offsets = self.version.ceiling - extra**2 / 2 if self.version.metric is Metric.EUCLIDEAN else extra
        found[rows] = np.where(same, offsets, np.inf)
        return found

    def rounding(self, augmented: Sequence[Sequence[float] | None]) -> np.ndarray:
        """What float16 loses, where a vector of that type may be what was read: one number in 8,192 of float32 is one
        of float16, too."""
        extra = np.array([0.0 if each is None else each[-1] for each in augmented], np.float32)
        with np.errstate(over="ignore"):
            is_short = extra.astype(np.float16) == extra
        lost = FLOAT16 * (extra**2 if self.version.metric is Metric.EUCLIDEAN else np.abs(extra))
        rounding: np.ndarray = np.where(is_short, lost, 0.0)
        return rounding

    def put(self, value: list[float], into: StoredOffsets) -> None:
        into.vectors[self.version.augmented_vector] = value


def storage_of(version: Version) -> Storage[Any]:
    """The storage that `version` is written in."""
    return VectorStorage(version) if version.storage == "vector" else PayloadStorage(version)


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


def stored_offsets(
    vectors: Sequence[GivenVector],
    payloads: Sequence[Payload | None],
    fitted: Sequence[tuple[Version, OffsetModel]],
) -> list[StoredOffsets]:
    """What the points of `vectors` store. A client gives a vector as a list, an array, or a dict of them by name.

    payloads: of the same points; they say which group a point is in, where a model has groups.

    A vector that is absent, not yet embedded or of another dimension has no offset; whether it may be written is the
    server's to say. One of length 0, which has no cosine, gets the neutral value in the place of the one before.
    """
    key = next((version.offset_key for version, _ in fitted if version.storage == "payload"), None)
    found = [StoredOffsets(key) for _ in vectors]
    for version, model in fitted:
        storage = storage_of(version)
        rows, matrix, neutral = usable(vectors, version)
        for row in neutral:
            storage.put(storage.neutral(), found[row])
        if rows:
            by = version.group_by
            offsets = model.offsets(matrix, groups=[group_of(payloads[row], by) for row in rows] if by else None)
            for row, value in zip(rows, storage.values(matrix, offsets), strict=True):
                storage.put(value, found[row])
    return found


def usable(vectors: Sequence[GivenVector], version: Version) -> tuple[list[int], np.ndarray, list[int]]:
    """The rows of `vectors` that bring one that `version` can judge, these vectors [b, dim], and the rows of those of
    length 0, which have no cosine."""
    rows, dense, neutral = [], [], []
    for row, given in enumerate(vectors):
        vector = given.get(version.vector) if isinstance(given, dict) else None if version.vector else given
        array = _numbers(vector)
        if array is None or array.shape != (version.dim,) or not np.isfinite(array).all():
            continue
        if version.metric is Metric.COSINE and not array.any():
            neutral.append(row)
        else:
            rows.append(row)
            dense.append(array)
    return rows, np.array(dense, np.float32), neutral


def _numbers(vector: GivenVector) -> np.ndarray | None:
    """`vector` as an array, None if it is no dense vector."""
    if not isinstance(vector, (list, tuple, np.ndarray)):
        return None
    try:
        array = np.asarray(vector)
    except ValueError:  # lists of several lengths
        return None
    return array if array.dtype.kind in "fiub" else None


def awaits_embedding(vectors: Sequence[GivenVector], versions: Sequence[Version]) -> bool:
    """Whether a corrected vector among `vectors` is a document that only the server will embed."""
    objects = (models.Document, models.Image, models.InferenceObject)
    return any(
        isinstance(given.get(version.vector) if isinstance(given, dict) else given, objects)
        for given in vectors
        for version in versions
    )


Offsets: TypeAlias = dict[PointId, dict[str, float]]
"""The numbers that points store, by id."""

Held: TypeAlias = dict[int | str, dict[str, float]]
"""The same, by id as the server writes it."""

Selected: TypeAlias = models.SetPayload | models.PointsSelector | models.DeleteVectors
"""What names points by `points` or `filter`, in a shard."""


def listed_id(key: PointId) -> int | str:
    """`key` as the server writes it: a UUID has several forms."""
    if isinstance(key, int):
        return key
    try:
        return str(uuid.UUID(str(key)))
    except ValueError:  # the server's to refuse
        return str(key)


def ids_of(points: Points | Written) -> list[PointId]:
    """The ids of what `upsert` takes, one a point."""
    return list(points.ids) if isinstance(points, models.Batch) else [point.id for point in points]


def vectors_of(points: Points | Written) -> list[GivenVector]:
    """The vectors of what `upsert` takes, one a point; None where a batch has fewer of them than ids."""
    if not isinstance(points, models.Batch):
        return [point.vector for point in points]
    rows = range(len(points.ids))
    if isinstance(points.vectors, dict):
        columns = points.vectors.items()
        return [{name: column[row] for name, column in columns if row < len(column)} for row in rows]
    return [points.vectors[row] if row < len(points.vectors) else None for row in rows]


def payloads_of(points: Points | Written) -> list[Payload | None]:
    """The payloads of what `upsert` takes, one a point; an update of vectors has none."""
    if not isinstance(points, models.Batch):
        return [getattr(point, "payload", None) for point in points]
    given: list[Payload | None] = list(points.payloads or ())
    return [given[row] if row < len(given) else None for row in range(len(points.ids))]


def is_even(points: Points) -> bool:
    """Whether it has a vector, and a payload or none, for each id. A batch that is not even is the client's own to
    refuse: it stays a batch, with columns as long as they were."""
    if not isinstance(points, models.Batch):
        return True
    columns: list[Any] = list(points.vectors.values()) if isinstance(points.vectors, dict) else [points.vectors]
    columns += [] if points.payloads is None else [points.payloads]
    return all(len(column) == len(points.ids) for column in columns)


def with_stored(points: Points, stored: Sequence[StoredOffsets]) -> Points:
    """What `upsert` takes, with the offsets that its points store. Raises InputError if a payload has our key."""
    if isinstance(points, models.Batch):
        if is_even(points) and any(each.vectors for each in stored):
            points = as_structs(points)
        else:
            return points.model_copy(update=_columns(points, stored))
    return [
        point.model_copy(
            update={"payload": with_offsets(point.payload, each), "vector": with_vectors(point.vector, each)}
        )
        for point, each in zip(points, stored, strict=True)
    ]


def _columns(batch: models.Batch, stored: Sequence[StoredOffsets]) -> dict[str, Any]:
    """The columns of a batch with offsets, as many rows in each as there were."""
    given: list[Payload | None] = [None] * len(batch.ids) if batch.payloads is None else list(batch.payloads)
    changed = [with_offsets(payload, each) or {} for payload, each in zip(given, stored, strict=False)]
    columns: dict[str, Any] = {}
    if batch.payloads is not None or any(changed):
        columns["payloads"] = [*changed, *given[len(changed) :]]
    names = {name for each in stored for name in each.vectors}
    first = list(itertools.takewhile(lambda each: names == set(each.vectors), stored))
    if names and first:
        columns["vectors"] = named(batch.vectors) | {name: [each.vectors[name] for each in first] for name in names}
    return columns


def apart(points: Points, stored: Sequence[StoredOffsets]) -> tuple[list[StoredOffsets], Offsets]:
    """`stored` without the offsets of those `points` that bring no payload, and these offsets by id.

    A server 1.14 keeps the payload that a point has if it is written without one, or, by gRPC, with an empty one: an
    offset in a payload would take the place of it all. Later ones clear it, and the offset goes into the payload, so
    that no search finds the point without it.
    """
    if not is_even(points):
        return list(stored), {}
    bare = [not payload and bool(each.offsets) for payload, each in zip(payloads_of(points), stored, strict=True)]
    rest = [replace(each, offsets={}) if alone else each for each, alone in zip(stored, bare, strict=True)]
    ids = ids_of(points)
    last = {listed_id(key): row for row, key in enumerate(ids)}  # what a point is that stands there twice
    return rest, {ids[row]: stored[row].offsets for row in last.values() if bare[row]}


def as_structs(points: Points) -> list[models.PointStruct]:
    """What `upsert` takes, point by point."""
    if not isinstance(points, models.Batch):
        return list(points)
    rows = zip(points.ids, vectors_of(points), payloads_of(points), strict=True)
    return [models.PointStruct(id=key, vector=vector, payload=payload) for key, vector, payload in rows]


def set_all(offsets: Offsets, key: str | None, shard_key: ShardKey) -> list[models.SetPayloadOperation]:
    return [set_offsets(point, each, key, shard_key=shard_key) for point, each in offsets.items()]


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


def require_free_points(vectors: Iterable[GivenVector], ours: Collection[str]) -> None:
    """Raises InputError if one of the points whose `vectors` are written brings one of `ours`."""
    for vector in vectors:
        if isinstance(vector, dict):
            require_free_vectors(vector, ours)


def set_offsets(point: PointId, offsets: dict[str, float], key: str | None, **also: Any) -> models.SetPayloadOperation:
    given = {"payload": offsets, "points": [point], "key": key} | also
    return models.SetPayloadOperation(set_payload=models.SetPayload(**given))


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
            made.append(set_offsets(record.id, wanted, key, shard_key=shard_key))
        ours = our_fields(held) - wanted.keys() - {version.field for version in outgoing}
        if ours:
            fields = [f"{key}.{field}" for field in sorted(ours)]
            gone = fields if wanted or len(ours) < len(held) else [key]
            made.append(models.DeletePayloadOperation(delete_payload=models.DeletePayload(keys=gone, **chosen)))
    vectors = named(record.vector)
    lacking: Any = {name: each for name, each in stored.vectors.items() if each != vectors.get(name)}
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


def _is_held(offsets: dict[str, float], numbers: Any) -> bool:
    """Whether a point with these `numbers` under our key holds `offsets`, up to rounding."""
    ours = our_fields(numbers)
    return all(
        field in ours and math.isclose(each, numbers[field], rel_tol=1e-5, abs_tol=1e-6)
        for field, each in offsets.items()
    )


def check(operation: models.UpdateOperation, key: str | None, ours: Collection[str]) -> None:
    """Raises InputError if an update operation writes our `key`, or writes or deletes one of our vectors."""
    require_free_points(vectors_of(points_of(operation) or []), ours)
    if isinstance(operation, models.SetPayloadOperation):
        given = operation.set_payload
        require_free([given.key] if given.key else given.payload, key)
    elif isinstance(operation, models.OverwritePayloadOperation):
        given = operation.overwrite_payload
        require_free([given.key] if given.key else given.payload, key)
    elif isinstance(operation, models.DeletePayloadOperation):
        require_free(operation.delete_payload.keys, key)
    elif isinstance(operation, models.DeleteVectorsOperation):
        require_free_vectors(operation.delete_vectors.vector, ours)


def points_of(operation: models.UpdateOperation) -> Points | list[models.PointVectors] | None:
    """The points, with vectors, that an update operation writes; None if it writes none."""
    if isinstance(operation, models.UpsertOperation):
        given = operation.upsert
        return given.batch if isinstance(given, models.PointsBatch) else given.points
    if isinstance(operation, models.UpdateVectorsOperation):
        return operation.update_vectors.points
    return None


def wiped(operation: models.UpdateOperation) -> Selected | None:
    """The selector (`points`, `filter`, `shard_key`) of an operation that takes our key with it, if it does."""
    if isinstance(operation, models.OverwritePayloadOperation) and operation.overwrite_payload.key is None:
        return operation.overwrite_payload
    return operation.clear_payload if isinstance(operation, models.ClearPayloadOperation) else None


def ids_named(selector: Selected) -> list[PointId] | None:
    """The ids of the points that it names, in whichever shard; None if it names them otherwise."""
    return None if selector.shard_key is not None else getattr(selector, "points", None)


def left_by(
    operation: models.UpdateOperation, held: Held, stored: Sequence[StoredOffsets], manifest: Manifest
) -> Held | None:
    """What points hold after `operation` that before it hold what `held` says; None where the store decides which
    points it changes. stored: what the points that it writes store."""
    if isinstance(operation, models.UpsertOperation):
        if operation.upsert.update_filter is not None or operation.upsert.update_mode is not None:
            return None
        ids = ids_of(points_of(operation) or [])
        return held | {listed_id(key): each.offsets for key, each in zip(ids, stored, strict=True)}
    left = dict(held)
    if isinstance(operation, models.UpdateVectorsOperation):
        if getattr(operation.update_vectors, "update_filter", None) is not None:
            return None
        for point, each in zip(operation.update_vectors.points, stored, strict=True):
            left[listed_id(point.id)] = {**left.get(listed_id(point.id), {}), **each.offsets}
    elif isinstance(operation, models.DeleteVectorsOperation):
        if operation.delete_vectors.points is None:
            return None
        names = operation.delete_vectors.vector
        gone = {version.field for version in manifest.everything() if version.vector in names}
        for key in map(listed_id, operation.delete_vectors.points):
            left[key] = {name: each for name, each in left.get(key, {}).items() if name not in gone}
    elif isinstance(operation, models.DeleteOperation):
        if not isinstance(operation.delete, models.PointIdsList):
            return None
        left |= {listed_id(key): {} for key in operation.delete.points}
    return left


def by_id(ids: Sequence[PointId], shard_key: ShardKey) -> models.PointIdsList:
    """The points of these `ids`, which may be the server's to refuse."""
    return models.PointIdsList.model_construct(points=list(ids), shard_key=shard_key)


def parts(selected: Selected | None, size: int) -> list[Selected]:
    """The points that are `selected`, by as many ids at a time; those of a filter together."""
    ids = getattr(selected, "points", None)
    if selected is None or ids is None:
        return [] if selected is None else [selected]
    return [by_id(ids[first : first + size], selected.shard_key) for first in range(0, len(ids), size)]


def touched(operation: models.UpdateOperation) -> Selected | None:
    """The points whose offsets an operation brings along, or takes away; None if there are none."""
    given: Any = getattr(operation, "upsert", None) or getattr(operation, "update_vectors", None)
    if given is not None:
        return by_id(ids_of(points_of(operation) or []), given.shard_key)
    return operation.delete_vectors if isinstance(operation, models.DeleteVectorsOperation) else wiped(operation)


def completed(
    operation: models.UpdateOperation,
    manifest: Manifest,
    stored: Sequence[StoredOffsets],
    kept: Offsets,
    keeps_payloads: bool,
) -> tuple[list[models.UpdateOperation], int]:
    """`operation` and what must go with it, in order, and which of these is the operation itself.

    `stored` is what the points it writes store, `kept` the offsets of the points whose payload it wipes.
    keeps_payloads: see `apart`.
    """
    if isinstance(operation, models.UpsertOperation):
        given = operation.upsert
        points = given.batch if isinstance(given, models.PointsBatch) else given.points
        later: Offsets = {}
        if keeps_payloads and given.update_filter is None and given.update_mode is None:
            stored, later = apart(points, stored)
        options = {name: getattr(given, name) for name in type(given).model_fields if name not in ("batch", "points")}
        made = with_stored(points, stored)
        if isinstance(made, models.Batch) and not is_even(made):
            return [models.UpsertOperation(upsert=models.PointsBatch(batch=made, **options))], 0
        listed = models.PointsList(points=as_structs(made), **options)
        return [models.UpsertOperation(upsert=listed), *set_all(later, manifest.offset_key, given.shard_key)], 0
    if isinstance(operation, models.UpdateVectorsOperation):
        update = operation.update_vectors
        pairs = list(zip(update.points, stored, strict=True))
        changed = [p.model_copy(update={"vector": with_vectors(p.vector, each)}) for p, each in pairs]
        together = models.UpdateVectorsOperation(update_vectors=update.model_copy(update={"points": changed}))
        offsets = [
            set_offsets(p.id, each.offsets, each.key, **_also(update, p.id)) for p, each in pairs if each.offsets
        ]
        return [together, *offsets], 0
    if isinstance(operation, models.DeleteVectorsOperation):
        deleted = operation.delete_vectors
        versions = [version for version in manifest.everything() if version.vector in deleted.vector]
        keys, augmented = payload_keys(versions), augmented_vectors(versions)
        if augmented:
            deleted = deleted.model_copy(update={"vector": [*deleted.vector, *augmented]})
            operation = models.DeleteVectorsOperation(delete_vectors=deleted)
        if not keys:
            return [operation], 0
        chosen: dict[str, Any] = {name: getattr(deleted, name) for name in ("points", "filter", "shard_key")}
        beside = models.DeletePayloadOperation(delete_payload=models.DeletePayload(keys=list(keys), **chosen))
        # A filter may ask for the vector; and of ids that are not all there, a server does what it can, and no more.
        return ([beside, operation], 1) if deleted.points is None else ([operation, beside], 0)
    selector: Any = wiped(operation)
    key = manifest.offset_key
    if selector is None or key is None or not any(kept.values()):
        return [operation], 0
    # One payload that holds both, so that no search finds the point without its offset.
    payload = {} if isinstance(operation, models.ClearPayloadOperation) else selector.payload

    def overwritten(payload: Payload, points: list[PointId]) -> models.UpdateOperation:
        given = models.SetPayload(payload=payload, points=points, shard_key=selector.shard_key)
        return models.OverwritePayloadOperation(overwrite_payload=given)

    overwrites = [overwritten({**payload, key: numbers}, [point]) for point, numbers in kept.items() if numbers]
    others = [point for point, numbers in kept.items() if not numbers]
    overwrites += [overwritten(payload, others)] if others else []
    return overwrites, len(overwrites) - 1


def _also(update: models.UpdateVectors, point: PointId) -> dict[str, Any]:
    """The shard and the condition of an update of vectors, for the payload that goes with it."""
    also: dict[str, Any] = {"shard_key": update.shard_key}
    condition = getattr(update, "update_filter", None)
    if condition is not None:
        has_id = models.HasIdCondition(has_id=[point])
        also |= {"points": None, "filter": models.Filter(must=[has_id, condition])}
    return also
