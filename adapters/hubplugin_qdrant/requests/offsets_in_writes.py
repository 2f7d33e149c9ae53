"""Pure: what a user writes, with the offsets that its points store. Nothing here knows a client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

from qdrant_client import grpc, models
from qdrant_client.conversions.conversion import GrpcToRest

from hubplugin.errors import InputError
from hubplugin_qdrant.manifest import KEY, Manifest, Payload, augmented_vectors, payload_keys
from hubplugin_qdrant.operations import GivenVector, PointId, Points, ShardKey, Written
from hubplugin_qdrant.stored_offsets import StoredOffsets

Item = TypeVar("Item")

Offsets: TypeAlias = dict[PointId, dict[str, float]]
"""The numbers that points store, by id."""


def ids_of(points: Points | Written) -> list[PointId]:
    """The ids of what `upsert` takes, one a point."""
    return list(points.ids) if isinstance(points, models.Batch) else [point.id for point in points]


def vectors_of(points: Points | Written) -> list[GivenVector]:
    """The vectors of what `upsert` takes, one a point."""
    if isinstance(points, models.Batch):
        if isinstance(points.vectors, dict):
            count = len(points.ids)
            return [{name: column[row] for name, column in points.vectors.items()} for row in range(count)]
        return list(points.vectors)
    return [point.vector for point in points]


def payloads_of(points: Points | Written) -> list[Payload | None]:
    """The payloads of what `upsert` takes, one a point; an update of vectors has none."""
    if isinstance(points, models.Batch):
        given: list[Payload | None] = [None] * len(points.ids)
        return list(points.payloads or given)
    return [getattr(point, "payload", None) for point in points]


def as_rest(points: models.Batch | Iterable[object]) -> Points:
    """What `upsert` takes, with dicts and gRPC structures as REST ones."""
    if isinstance(points, models.Batch):
        return points
    return [_as_struct(point) for point in points]


def _as_struct(point: Any) -> models.PointStruct:
    if isinstance(point, grpc.PointStruct):
        return GrpcToRest.convert_point_struct(point)
    return models.PointStruct.model_validate(point) if isinstance(point, dict) else point


def with_stored(points: Points, stored: Sequence[StoredOffsets]) -> Points:
    """What `upsert` takes, with the offsets that its points store. Raises InputError if a payload has our key."""
    if isinstance(points, models.Batch):
        payloads = payloads_of(points)
        if not any(each.vectors for each in stored):
            return points.model_copy(
                update={"payloads": [with_offsets(p, each) for p, each in zip(payloads, stored, strict=True)]}
            )
        points = as_structs(points)
    return [
        point.model_copy(
            update={"payload": with_offsets(point.payload, each), "vector": with_vectors(point.vector, each)}
        )
        for point, each in zip(points, stored, strict=True)
    ]


def apart(points: Points, stored: Sequence[StoredOffsets]) -> tuple[list[StoredOffsets], Offsets]:
    """`stored` without the offsets of those `points` that bring no payload, and these offsets by id.

    A server 1.14 keeps the payload that a point has if it is written without one, or, by gRPC, with an empty one: an
    offset in a payload would take the place of it all. Later ones clear it.
    """
    bare = [not payload and bool(each.offsets) for payload, each in zip(payloads_of(points), stored, strict=True)]
    rest = [StoredOffsets({}, each.vectors) if alone else each for each, alone in zip(stored, bare, strict=True)]
    return rest, {key: each.offsets for key, each, alone in zip(ids_of(points), stored, bare, strict=True) if alone}


def as_structs(points: Points) -> list[models.PointStruct]:
    """What `upsert` takes, point by point."""
    if not isinstance(points, models.Batch):
        return list(points)
    rows = zip(points.ids, vectors_of(points), payloads_of(points), strict=True)
    return [models.PointStruct(id=key, vector=vector, payload=payload) for key, vector, payload in rows]


def set_all(offsets: Offsets, shard_key: ShardKey) -> list[models.SetPayloadOperation]:
    return [set_offsets(point, each, shard_key=shard_key) for point, each in offsets.items()]


def with_offsets(payload: Payload | None, stored: StoredOffsets) -> Payload | None:
    require_free(payload or ())
    return {**(payload or {}), KEY: stored.offsets} if stored.offsets else payload


def with_vectors(vector: GivenVector, stored: StoredOffsets) -> GivenVector:
    return {**named(vector), **stored.vectors} if stored.vectors else vector


def named(vector: GivenVector) -> dict[str, GivenVector]:
    """The vectors of a point by name; "" is the unnamed one."""
    if vector is None:
        return {}
    return vector if isinstance(vector, dict) else {"": vector}


def require_free(keys: Iterable[str | None]) -> None:
    """Raises InputError if one of the payload paths `keys` begins with our key."""
    for key in keys:
        if key is not None and str(key).partition(".")[0].partition("[")[0].strip('"') == KEY:
            raise InputError(f"payload key {key!r}: {KEY!r} is reserved for the offsets of hubplugin; use another name")


def set_offsets(point: PointId, offsets: dict[str, float], **also: Any) -> models.SetPayloadOperation:
    given = {"payload": offsets, "points": [point], "key": KEY} | also
    return models.SetPayloadOperation(set_payload=models.SetPayload(**given))


def check(operation: models.UpdateOperation) -> None:
    """Raises InputError if an update operation writes our key."""
    if isinstance(operation, models.SetPayloadOperation):
        given = operation.set_payload
        require_free([given.key] if given.key else given.payload)
    elif isinstance(operation, models.OverwritePayloadOperation):
        given = operation.overwrite_payload
        require_free([given.key] if given.key else given.payload)
    elif isinstance(operation, models.DeletePayloadOperation):
        require_free(operation.delete_payload.keys)


def points_of(operation: models.UpdateOperation) -> Points | list[models.PointVectors] | None:
    """The points, with vectors, that an update operation writes; None if it writes none."""
    if isinstance(operation, models.UpsertOperation):
        given = operation.upsert
        return given.batch if isinstance(given, models.PointsBatch) else given.points
    if isinstance(operation, models.UpdateVectorsOperation):
        return operation.update_vectors.points
    return None


def wiped(operation: models.UpdateOperation) -> models.SetPayload | models.PointsSelector | None:
    """The selector (`points`, `filter`, `shard_key`) of an operation that takes our key with it, if it does."""
    if isinstance(operation, models.OverwritePayloadOperation) and operation.overwrite_payload.key is None:
        return operation.overwrite_payload
    return operation.clear_payload if isinstance(operation, models.ClearPayloadOperation) else None


def completed(
    operation: models.UpdateOperation, manifest: Manifest, stored: Sequence[StoredOffsets], kept: Offsets
) -> tuple[list[models.UpdateOperation], int]:
    """`operation` and what must go with it, in order, and which of these is the operation itself.

    `stored` is what the points it writes store, `kept` the offsets of the points whose payload it wipes.
    """
    if isinstance(operation, models.UpsertOperation):
        given = operation.upsert
        points = given.batch if isinstance(given, models.PointsBatch) else given.points
        later: Offsets = {}
        if given.update_filter is None and given.update_mode is None:
            stored, later = apart(points, stored)
        options = {name: getattr(given, name) for name in type(given).model_fields if name not in ("batch", "points")}
        listed = models.PointsList(points=as_structs(with_stored(points, stored)), **options)
        return [models.UpsertOperation(upsert=listed), *set_all(later, given.shard_key)], 0
    if isinstance(operation, models.UpdateVectorsOperation):
        update = operation.update_vectors
        pairs = list(zip(update.points, stored, strict=True))
        changed = [p.model_copy(update={"vector": with_vectors(p.vector, each)}) for p, each in pairs]
        together = models.UpdateVectorsOperation(update_vectors=update.model_copy(update={"points": changed}))
        offsets = [set_offsets(p.id, each.offsets, **_also(update, p.id)) for p, each in pairs if each.offsets]
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
        # First the offsets: the filter may ask for the vector.
        first = models.DeletePayload(
            keys=list(keys), points=deleted.points, filter=deleted.filter, shard_key=deleted.shard_key
        )
        return [models.DeletePayloadOperation(delete_payload=first), operation], 1
    selector = wiped(operation)
    if selector is None:
        return [operation], 0
    shard_key = getattr(selector, "shard_key", None)
    return [operation, *set_all(kept, shard_key)], 0


def _also(update: models.UpdateVectors, point: PointId) -> dict[str, Any]:
    """The shard and the condition of an update of vectors, for the payload that goes with it."""
    also: dict[str, Any] = {"shard_key": update.shard_key}
    condition = getattr(update, "update_filter", None)
    if condition is not None:
        has_id = models.HasIdCondition(has_id=[point])
        also |= {"points": None, "filter": models.Filter(must=[has_id, condition])}
    return also


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    chunk: list[Item] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
