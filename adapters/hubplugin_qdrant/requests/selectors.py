"""Selectors: which points, payload keys and vectors a request names, and which of those hold offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qdrant_client import grpc, models
from qdrant_client.conversions.conversion import GrpcToRest

from hubplugin.errors import InputError
from hubplugin.store import Id
from hubplugin_qdrant.manifest import KEY, Version
from hubplugin_qdrant.operations import ShardKey


def without_our_key(with_payload: object) -> object:
    """A payload selector that leaves our key out, unless it names what it wants."""
    if isinstance(with_payload, grpc.WithPayloadSelector):
        with_payload = GrpcToRest.convert_with_payload_selector(with_payload)
    if isinstance(with_payload, dict) and "exclude" in with_payload:
        with_payload = models.PayloadSelectorExclude.model_validate(with_payload)
    if with_payload is True:
        return _ALL_BUT_OURS
    if isinstance(with_payload, models.PayloadSelectorExclude):
        return models.PayloadSelectorExclude(exclude=[*with_payload.exclude, KEY])
    return with_payload


_ALL_BUT_OURS = models.PayloadSelectorExclude(exclude=[KEY])


def without_vectors(vector: models.VectorStructOutput | None, names: tuple[str, ...]) -> Any:
    """The vectors of a point without the augmented ones, which are called `names`."""
    if not isinstance(vector, dict):
        return vector
    theirs = {name: value for name, value in vector.items() if name not in names}
    return theirs[""] if names and set(theirs) == {""} else theirs


def has_vector(name: str) -> models.HasVectorCondition:
    return models.HasVectorCondition(has_vector=name)


def having(ids: Sequence[Id]) -> models.Filter:
    """The points of these `ids`."""
    return models.Filter(must=models.HasIdCondition(has_id=list(ids)))


def lacking_augmented_vector(version: Version) -> models.Filter:
    """The points that have the vector of `version`, and no augmented one."""
    return models.Filter(must=has_vector(version.vector), must_not=has_vector(version.augmented_vector))


def lacking_offset(version: Version) -> models.Filter:
    """The points that have no offset of `version`, be it that they have no vector to have one for."""
    if version.storage == "vector":
        return lacking_augmented_vector(version)
    return models.Filter(must=models.IsEmptyCondition(is_empty=models.PayloadField(key=version.key)))


def selector_fields(points: object, shard_key: ShardKey) -> dict[str, Any]:
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
