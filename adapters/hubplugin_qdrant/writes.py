"""Pure: what a user writes, with the offsets that belong to it. Nothing here knows a client.

A *mark* is what a point holds for each version that is kept up: a number under our key, {"v3": 0.0123}, or a second
vector, {"hub_v3": [..., 0.0123]}.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from qdrant_client import grpc, models
from qdrant_client.conversions.conversion import GrpcToRest

from hubplugin.errors import InputError
from hubplugin.metric import Metric, augment_targets, normalise
from hubplugin.model import OffsetModel, Value
from hubplugin_qdrant.manifest import KEY, Manifest, Version


@dataclass(frozen=True)
class Mark:
    """What goes into a point's payload, under our key, and what beside its vectors."""

    offsets: dict[str, float] = field(default_factory=dict)
    vectors: dict[str, list[float]] = field(default_factory=dict)

    def add(self, version: Version, value: Any) -> None:
        """Adds what `values` or `neutral` have for `version`."""
        if version.storage == "vector":
            self.vectors[version.second] = value
        else:
            self.offsets[version.field] = value


def values(vectors: np.ndarray, offsets: np.ndarray, version: Version) -> list[Any]:
    """What each of `vectors` [b, d] holds of its offset: the number, or the second vector."""
    found = second_vectors(vectors, offsets, version) if version.storage == "vector" else offsets
    listed: list[Any] = found.tolist()
    return listed


def neutral(version: Version) -> Any:
    """What a vector of length 0 holds under cosine: the offset 0, so that it scores 0 as it does raw."""
    return [0.0] * (version.dim + 1) if version.storage == "vector" else 0.0


def second_vectors(vectors: np.ndarray, offsets: np.ndarray, version: Version) -> np.ndarray:
    """Vectors [b, d] as they lie in the collection, with their offsets [b], for storage="vector": [b, d + 1]."""
    if version.metric is Metric.COSINE:
        vectors = normalise(vectors, "vectors")
    return augment_targets(vectors, offsets, version.metric, max_offset=version.ceiling)


def stored_offset(vector: Sequence[float], second: Sequence[float] | None, version: Version) -> float:
    """The offset in a second vector: NaN if there is none, infinity if it belongs to another vector."""
    if second is None:
        return float("nan")
    one = np.asarray(vector, np.float64)
    other, extra = np.asarray(second[:-1], np.float64), float(second[-1])
    if version.metric is Metric.COSINE:
        one = one / (np.linalg.norm(one) or 1.0)
    if not np.allclose(one, other, rtol=1e-2, atol=1e-2 * np.abs(one).max()):  # float16 is exact to 1e-3
        return float("inf")
    return version.ceiling - extra**2 / 2 if version.metric is Metric.EUCLIDEAN else extra


def group_of(payload: dict[str, Any] | None, key: str) -> Value:
    """The value of `key`, a path such as "shop.tenant", if it is one text, number or truth value."""
    found: Any = payload
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, (str, int)) else None


def marks(
    vectors: Sequence[Any], payloads: Sequence[dict[str, Any] | None], fitted: Sequence[tuple[Version, OffsetModel]]
) -> list[Mark]:
    """The mark of each of `vectors`, as clients give them: a list, an array, or a dict of them by name.

    payloads: of the same points; they say which group a point is in, where a model has groups.

    A vector that is absent, not yet embedded or of another dimension has no offset; whether it may be written is the
    server's to say. One of length 0, which has no cosine, gets the neutral mark in the place of the one before.
    """
    found = [Mark() for _ in vectors]
    for version, model in fitted:
        rows, dense = [], []
        for row, given in enumerate(vectors):
            vector = given.get(version.vector) if isinstance(given, dict) else None if version.vector else given
            if isinstance(vector, (list, tuple, np.ndarray)) and len(vector) == version.dim:
                array = np.asarray(vector)
                usable = array.ndim == 1 and array.dtype.kind in "fiu" and np.isfinite(array).all()
                if usable and version.metric is Metric.COSINE and not array.any():
                    found[row].add(version, neutral(version))
                elif usable:
                    rows.append(row)
                    dense.append(array)
        if rows:
            matrix = np.array(dense, np.float32)
            key = version.group_by
            offsets = model.offsets(matrix, groups=[group_of(payloads[row], key) for row in rows] if key else None)
            for row, value in zip(rows, values(matrix, offsets, version), strict=True):
                found[row].add(version, value)
    return found


def awaits_embedding(vectors: Sequence[Any], manifest: Manifest) -> bool:
    """Whether a corrected vector among `vectors` is a document that only the server will embed."""
    objects = (models.Document, models.Image, models.InferenceObject)
    return any(
        isinstance(given.get(version.vector) if isinstance(given, dict) else given, objects)
        for given in vectors
        for version in manifest.kept_up()
    )


def vectors_of(points: Any) -> list[Any]:
    """The vectors of what `upsert` takes, one a point."""
    if isinstance(points, models.Batch):
        if isinstance(points.vectors, dict):
            count = len(points.ids)
            return [{name: column[row] for name, column in points.vectors.items()} for row in range(count)]
        return list(points.vectors)
    return [point.vector for point in points]


def payloads_of(points: Any) -> list[Any]:
    """The payloads of what `upsert` takes, one a point."""
    if isinstance(points, models.Batch):
        given: list[Any] = [None] * len(points.ids)
        return list(points.payloads or given)
    return [point.payload for point in points]


def as_rest(points: Any) -> Any:
    """What `upsert` takes, with dicts and gRPC structures as REST ones."""
    if isinstance(points, models.Batch):
        return points
    return [_as_struct(point) for point in points]


def _as_struct(point: Any) -> Any:
    if isinstance(point, grpc.PointStruct):
        return GrpcToRest.convert_point_struct(point)
    return models.PointStruct.model_validate(point) if isinstance(point, dict) else point


def marked(points: Any, found: Sequence[Mark]) -> Any:
    """What `upsert` takes, with its marks. Raises InputError if a payload has our key."""
    if isinstance(points, models.Batch):
        payloads: Any = points.payloads or [None] * len(points.ids)
        if not any(mark.vectors for mark in found):
            return points.model_copy(
                update={"payloads": [with_offsets(p, mark) for p, mark in zip(payloads, found, strict=True)]}
            )
        points = as_structs(points)
    return [
        point.model_copy(
            update={"payload": with_offsets(point.payload, mark), "vector": with_vectors(point.vector, mark)}
        )
        for point, mark in zip(points, found, strict=True)
    ]


def apart(points: Any, found: Sequence[Mark]) -> tuple[list[Mark], dict[Any, dict[str, float]]]:
    """The marks without the offsets of those `points` that bring no payload, and these offsets by id.

    A server 1.14 keeps the payload that a point has if it is written without one, or, by gRPC, with an empty one: an
    offset in a payload would take the place of it all. Later ones clear it.
    """
    ids = points.ids if isinstance(points, models.Batch) else [point.id for point in points]
    bare = [not payload and bool(mark.offsets) for payload, mark in zip(payloads_of(points), found, strict=True)]
    rest = [Mark({}, mark.vectors) if alone else mark for mark, alone in zip(found, bare, strict=True)]
    return rest, {key: mark.offsets for key, mark, alone in zip(ids, found, bare, strict=True) if alone}


def as_structs(points: Any) -> list[models.PointStruct]:
    """What `upsert` takes, point by point."""
    if not isinstance(points, models.Batch):
        return list(points)
    rows = zip(points.ids, vectors_of(points), payloads_of(points), strict=True)
    return [models.PointStruct(id=key, vector=vector, payload=payload) for key, vector, payload in rows]


def set_all(offsets: dict[Any, dict[str, float]], shard_key: Any) -> list[models.SetPayloadOperation]:
    return [set_offsets(point, each, shard_key=shard_key) for point, each in offsets.items()]


def with_offsets(payload: dict[str, Any] | None, mark: Mark) -> dict[str, Any] | None:
    require_free(payload or ())
    return {**(payload or {}), KEY: mark.offsets} if mark.offsets else payload


def with_vectors(vector: Any, mark: Mark) -> Any:
    return {**named(vector), **mark.vectors} if mark.vectors else vector


def named(vector: Any) -> dict[str, Any]:
    """The vectors of a point by name; "" is the unnamed one."""
    if vector is None:
        return {}
    return vector if isinstance(vector, dict) else {"": vector}


def require_free(keys: Any) -> None:
    """Raises InputError if one of the payload paths `keys` begins with our key."""
    for key in keys:
        if key is not None and str(key).partition(".")[0].partition("[")[0].strip('"') == KEY:
            raise InputError(f"payload key {key!r}: {KEY!r} is reserved for the offsets of hubplugin; use another name")


def set_offsets(point: Any, offsets: dict[str, float], **also: Any) -> models.SetPayloadOperation:
    given = {"payload": offsets, "points": [point], "key": KEY} | also
    return models.SetPayloadOperation(set_payload=models.SetPayload(**given))


def check(operation: Any) -> None:
    """Raises InputError if an update operation writes our key."""
    if isinstance(operation, models.SetPayloadOperation):
        given = operation.set_payload
        require_free([given.key] if given.key else given.payload)
    elif isinstance(operation, models.OverwritePayloadOperation):
        given = operation.overwrite_payload
        require_free([given.key] if given.key else given.payload)
    elif isinstance(operation, models.DeletePayloadOperation):
        require_free(operation.delete_payload.keys)


def points_of(operation: Any) -> Any:
    """The points, with vectors, that an update operation writes; None if it writes none."""
    if isinstance(operation, models.UpsertOperation):
        given = operation.upsert
        return given.batch if isinstance(given, models.PointsBatch) else given.points
    if isinstance(operation, models.UpdateVectorsOperation):
        return operation.update_vectors.points
    return None


def wiped(operation: Any) -> Any:
    """The selector (`points`, `filter`, `shard_key`) of an operation that takes our key with it, if it does."""
    if isinstance(operation, models.OverwritePayloadOperation) and operation.overwrite_payload.key is None:
        return operation.overwrite_payload
    return operation.clear_payload if isinstance(operation, models.ClearPayloadOperation) else None


def completed(
    operation: Any, manifest: Manifest, found: Sequence[Mark], kept: dict[Any, dict[str, float]]
) -> tuple[list[Any], int]:
    """`operation` and what must go with it, in order, and which of these is the operation itself.

    `found` are the marks of the points it writes, `kept` the offsets of the points whose payload it wipes.
    """
    if isinstance(operation, models.UpsertOperation):
        given = operation.upsert
        points = given.batch if isinstance(given, models.PointsBatch) else given.points
        later: dict[Any, dict[str, float]] = {}
        if getattr(given, "update_filter", None) is None and getattr(given, "update_mode", None) is None:
            found, later = apart(points, found)
        options = {name: getattr(given, name) for name in type(given).model_fields if name not in ("batch", "points")}
        listed = models.PointsList(points=as_structs(marked(points, found)), **options)
        return [models.UpsertOperation(upsert=listed), *set_all(later, given.shard_key)], 0
    if isinstance(operation, models.UpdateVectorsOperation):
        update = operation.update_vectors
        pairs = list(zip(update.points, found, strict=True))
        changed = [p.model_copy(update={"vector": with_vectors(p.vector, mark)}) for p, mark in pairs]
        together = models.UpdateVectorsOperation(update_vectors=update.model_copy(update={"points": changed}))
        offsets = [set_offsets(p.id, mark.offsets, **_also(update, p.id)) for p, mark in pairs if mark.offsets]
        return [together, *offsets], 0
    if isinstance(operation, models.DeleteVectorsOperation):
        deleted = operation.delete_vectors
        versions = [version for version in manifest.everything() if version.vector in deleted.vector]
        keys = [version.key for version in versions if version.storage == "payload"]
        seconds = [version.second for version in versions if version.storage == "vector"]
        if seconds:
            deleted = deleted.model_copy(update={"vector": [*deleted.vector, *seconds]})
            operation = models.DeleteVectorsOperation(delete_vectors=deleted)
        if not keys:
            return [operation], 0
        # First the offsets: the filter may ask for the vector.
        first = models.DeletePayload(
            keys=keys, points=deleted.points, filter=deleted.filter, shard_key=deleted.shard_key
        )
        return [models.DeletePayloadOperation(delete_payload=first), operation], 1
    selector = wiped(operation)
    if selector is None:
        return [operation], 0
    shard_key = getattr(selector, "shard_key", None)
    return [operation, *set_all(kept, shard_key)], 0


def _also(update: models.UpdateVectors, point: Any) -> dict[str, Any]:
    """The shard and the condition of an update of vectors, for the payload that goes with it."""
    also: dict[str, Any] = {"shard_key": update.shard_key}
    condition = getattr(update, "update_filter", None)
    if condition is not None:
        has_id = models.HasIdCondition(has_id=[point])
        also |= {"points": None, "filter": models.Filter(must=[has_id, condition])}
    return also


def selector_fields(points: Any, shard_key: Any) -> dict[str, Any]:
    """What the client takes as `points` or `points_selector`, as the fields of an update operation."""
    if isinstance(points, grpc.PointsSelector):
        points = GrpcToRest.convert_points_selector(points)
    elif isinstance(points, grpc.Filter):
        points = GrpcToRest.convert_filter(points)
    if isinstance(points, models.Filter):
        return {"filter": points, "shard_key": shard_key}
    if isinstance(points, models.FilterSelector):
        return {"filter": points.filter, "shard_key": shard_key if shard_key is not None else points.shard_key}
    if isinstance(points, models.PointIdsList):
        return {"points": points.points, "shard_key": shard_key if shard_key is not None else points.shard_key}
    if not isinstance(points, (list, tuple)):
        raise InputError(
            f"unsupported points selector {type(points).__name__}: expected ids, a Filter or a PointsSelector"
        )
    ids = [GrpcToRest.convert_point_id(point) if isinstance(point, grpc.PointId) else point for point in points]
    return {"points": ids, "shard_key": shard_key}


def chunks(items: Any, size: int) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
