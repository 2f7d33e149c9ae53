"""The operations of a corrected client that write points or change collections.

First, the plain client writes the points in any form that it accepts. Then the touched
points are read by their ids, and missing offsets are computed and written. Points that
are plain structures are written with their offsets, so an insert is corrected from the
start. Until the call ends, any other point has no offset, or the offset of its old
vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from qdrant_client import models

from hubplugin.model import OffsetModel
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import metadata, offsets, plain_client
from hubplugin_qdrant.calls import Call, Computing, Operation
from hubplugin_qdrant.manifest import KEY, QdrantVersion
from hubplugin_qdrant.metadata import (
    CHANGES,
    CachedManifest,
    CorrectionCache,
    OfClient,
    corrected,
)
from hubplugin_qdrant.plain_client import Arguments, PointId, ShardKey, field_of
from hubplugin_qdrant.requests import nothing
from hubplugin_qdrant.transport import PASSING, Fault, chunks, fault_of

AT_ONCE = 256
"""The number of points whose offsets are computed and written together. A larger number
does not reduce the time per point."""

PART = 10_000
"""The number of points of an upload between two checks of the manifest."""

Models: TypeAlias = Sequence[tuple[QdrantVersion, OffsetModel]]

Touched: TypeAlias = tuple[list[PointId], ShardKey]
"""Points whose offsets an operation may have changed, and their shard key."""


def _write_points(name: str) -> OfClient:
    """Return the operation of the client's method `name`, which writes points.

    Points whose offsets can be computed at once (see `_can_take_offsets`) are written
    with their offsets. All other points get their offsets in a second write.
    """

    def write_points(
        cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
    ) -> Operation[Any]:
        points = arguments["points"]
        shard_key = arguments.get("shard_key_selector")
        ids = plain_client.ids_of(points)
        lacking = ids  # the ids of the points that are written without offsets
        if isinstance(points, list):
            versioned_models = yield from cache.read_models(cached)
            points, lacking = yield Computing(with_offsets, points, versioned_models)
        plain = Call(getattr(cache.raw, name), **arguments | {"points": points})
        touched = [(ids, shard_key)]
        return (
            yield from _write_then_refresh(
                cache, cached, plain, touched, [(lacking, shard_key)]
            )
        )

    return corrected(write_points, name)


def with_offsets(
    points: list[Any], versioned_models: Models
) -> tuple[list[Any], list[PointId]]:
    """Return `points` with offsets where possible, and the ids of those without.

    Offsets can be added to the points that `_can_take_offsets` accepts.
    """
    usable = [point for point in points if _can_take_offsets(point, versioned_models)]
    computed = offsets.compute_stored(usable, versioned_models)
    # The keys are identities of objects, since points may lack an id or share one.
    completed = {
        id(point): offsets.with_stored(point, each)
        for point, each in zip(usable, computed, strict=True)
    }
    others = [point for point in points if id(point) not in completed]
    written = [completed.get(id(point), point) for point in points]
    return written, plain_client.ids_of(others)


def _can_take_offsets(point: Any, versioned_models: Models) -> bool:
    """Return True if `point` can be written with its offsets.

    The point must be a structure whose vectors need no embedding. With offsets in
    payloads, it must also have a payload: if an upsert has none, server 1.14 keeps the
    old payload of the point.
    """
    if type(point) is not models.PointStruct:
        return False
    vectors = offsets.by_name(point.vector)
    has_payload = isinstance(point.payload, dict) and len(point.payload) > 0
    for version, _ in versioned_models:
        if not isinstance(vectors.get(version.vector), list):
            return False
        if version.storage == "payload" and not has_payload:
            return False
    return True


upsert = _write_points("upsert")
_upload_part = _write_points("upload_points")


def upload_points(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    cached = yield from cache.lookup(arguments["collection_name"])
    if cached.manifest is None:
        return (yield Call(cache.raw.upload_points, **arguments))
    for points in chunks(arguments["points"], PART):
        part = {"wait": False} | arguments | {"points": points}
        yield from _upload_part(cache, part)


def upload_collection(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    cached = yield from cache.lookup(arguments["collection_name"])
    if cached.manifest is None:
        return (yield Call(cache.raw.upload_collection, **arguments))
    columns = ("vectors", "payload", "ids")
    others = {name: value for name, value in arguments.items() if name not in columns}
    points = plain_client.points_of_columns(cache.raw, arguments)
    yield from upload_points(cache, others | {"points": points})


def _change(name: str, selector: str = "points") -> OfClient:
    """Return the operation of the method `name`, which may drop offsets.

    selector: The argument that selects the points, or that lists update operations.
    """

    def change(
        cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
    ) -> Operation[Any]:
        offsets.require_free(arguments.get("payload"), cached.offset_key)
        shard_key = arguments.get("shard_key_selector")
        bodies = [arguments.get(selector)]
        if selector == "update_operations":
            bodies = plain_client.bodies_of(bodies[0])
        touched: list[Touched] = []
        for body in bodies:
            offsets.require_free(field_of(body, "payload"), cached.offset_key)
            touched.append((yield from _select(cache, cached, body, shard_key)))
        plain = Call(getattr(cache.raw, name), **arguments)
        return (yield from _write_then_refresh(cache, cached, plain, touched, touched))

    return corrected(change, name)


update_vectors = _change("update_vectors")
delete_vectors = _change("delete_vectors")
overwrite_payload = _change("overwrite_payload")
clear_payload = _change("clear_payload", "points_selector")
batch_update_points = _change("batch_update_points", "update_operations")


@corrected
def set_payload(
    cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
) -> Operation[Any]:
    offsets.require_free(arguments.get("payload"), cached.offset_key)
    return (yield Call(cache.raw.set_payload, **arguments))


def _write_then_refresh(
    cache: CorrectionCache,
    cached: CachedManifest,
    plain: Call,
    touched: list[Touched],
    lacking: list[Touched],
) -> Operation[Any]:
    """Make the call `plain`, then write offsets. Return the answer to the call.

    If the manifest is unchanged, only the points in `lacking` need offsets: the other
    points were written with offsets. If the manifest has changed, all points `touched`
    need the offsets of the new version.

    No point is missed, because a job writes the manifest before it reads the points.
    The job sees every point that was written before the manifest. For a point written
    later, the changed manifest is seen here.
    """
    try:
        result = yield plain
    except Exception as error:
        if fault_of(error) not in PASSING:
            # The server has answered with an error, but it may have written a part of
            # the points.
            with suppress(Exception):
                yield from _refresh(cache, cached, lacking, has_waited=True)
        raise
    name = plain.keywords["collection_name"]
    has_waited = plain.keywords.get("wait", True)
    yield from _refresh(cache, cached, lacking, has_waited)
    for _ in range(CHANGES):
        if (yield from cache.is_unchanged(name, cached)):
            break
        behind_name = yield from cache.lookup(name, cached)
        # If the name is an alias that was moved, either collection may have the points.
        possibly_written = {behind_name.collection, cached.collection}
        for collection in possibly_written:
            current = behind_name
            if collection != behind_name.collection:
                current = yield from cache.lookup(collection, cached)
            if current.state != cached.state:
                yield from _refresh(cache, current, touched, has_waited=False)
        cached = behind_name
    return result


def _select(
    cache: CorrectionCache, cached: CachedManifest, points: Any, shard_key: ShardKey
) -> Operation[Touched]:
    """Return the ids and the shard key of `points`, in any form that a client accepts.

    A filter selects the points that match it now.
    """
    if shard_key is None:
        shard_key = field_of(points, "shard_key")
    chosen = points
    if not isinstance(points, models.Filter):
        chosen = field_of(points, "filter")
    if chosen is None:
        # `points` lists points or ids, alone or in the body of an operation.
        listed = field_of(points, "batch") or field_of(points, "points") or points
        return plain_client.ids_of(listed), shard_key
    ids: list[PointId] = []
    offset = None
    while True:
        records, offset = yield Call(
            cache.raw.scroll,
            cached.collection,
            chosen,
            limit=cached.page,
            offset=offset,
            with_payload=False,
            shard_key_selector=shard_key,
        )
        ids += [record.id for record in records]
        if offset is None:
            return ids, shard_key


def _refresh(
    cache: CorrectionCache,
    cached: CachedManifest,
    touched: list[Touched],
    has_waited: bool,
) -> Operation[None]:
    """Write the offsets of the points `touched`, computed from their current vectors.

    Offsets of other versions are deleted.

    has_waited: True if all earlier writes are done, so that their points can be read.
    """
    if not any(ids for ids, _ in touched):
        return
    names = [version.vector for version in cached.maintained]
    names += cached.augmented_vectors
    # The unnamed vector, "", can only be read with all others.
    with_vectors = names if all(names) else True
    try:
        versioned_models = yield from cache.read_models(cached)
        previous = cached.manifest_or_empty.previous.values()
        if not has_waited:
            # Deleting nothing, with wait=True, ends once all earlier writes are done.
            yield Call(cache.raw.delete, cached.collection, nothing(), wait=True)
        for points, shard_key in touched:
            for ids in chunks(dict.fromkeys(points), AT_ONCE):
                records = yield Call(
                    cache.raw.retrieve,
                    cached.collection,
                    ids=ids,
                    with_payload=[KEY],
                    with_vectors=with_vectors,
                    shard_key_selector=shard_key,
                )
                expected = yield Computing(
                    offsets.compute_stored, records, versioned_models
                )
                operations: list[models.UpdateOperation] = []
                for record, each in zip(records, expected, strict=True):
                    operations += offsets.mend(
                        record, each, previous, cached.augmented_vectors
                    )
                if operations:
                    yield Call(
                        cache.raw.batch_update_points,
                        cached.collection,
                        operations,
                        wait=True,
                    )
    except Exception as error:
        # A missing collection needs no offsets.
        if fault_of(error) is not Fault.MISSING:
            raise


def _clearing_cache(name: str, *, deletes: bool = False) -> OfClient:
    """Return the operation of the method `name`, which also clears the cache.

    deletes: True if the method deletes the collection. Then the operation also deletes
        the metadata collection.
    """

    def operation(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
        result = yield Call(getattr(cache.raw, name), **arguments)
        cache.manifests.clear()
        if deletes:
            metadata_name = m.metadata_collection(arguments["collection_name"])
            info = yield from metadata.describe(cache.raw, metadata_name)
            if info is not None and metadata.is_metadata(info):
                yield Call(cache.raw.delete_collection, metadata_name)
        return result

    return operation


delete_collection = _clearing_cache("delete_collection", deletes=True)
recreate_collection = _clearing_cache("recreate_collection", deletes=True)
create_collection = _clearing_cache("create_collection")
update_collection_aliases = _clearing_cache("update_collection_aliases")
delete_vector_name = _clearing_cache("delete_vector_name")
