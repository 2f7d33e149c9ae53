"""The operations of a corrected client that write points, and those on collections.

One rule: the plain client writes what it is given, in whatever form. Then the points
that were touched are read by their ids, and the offsets that they lack are computed and
written. Points that are plain structures bring their offsets along, so an insert is
corrected from its first moment on. Any other point is neutral, or has the offset of its
old vector, until the same call ends.
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
"""Points whose offsets are computed and written together. With more, the time for each
no longer falls."""

PART = 10_000
"""Points of an upload that are sent before the manifest is looked at again."""

Models: TypeAlias = Sequence[tuple[QdrantVersion, OffsetModel]]

Touched: TypeAlias = tuple[list[PointId], ShardKey]
"""Points whose offsets an operation may have changed, and their shard key."""


def _write_points(name: str) -> OfClient:
    """Return the operation of the method `name`, which writes points.

    Plain structures in a list bring their offsets along. Other points get theirs
    afterwards.
    """

    def write_points(
        cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
    ) -> Operation[Any]:
        points = arguments["points"]
        shard_key = arguments.get("shard_key_selector")
        ids = plain_client.ids_of(points)
        lacking = ids
        if isinstance(points, list):
            versioned_models = yield from cache.read_models(cached)
            points, lacking = yield Computing(with_offsets, points, versioned_models)
        plain = Call(getattr(cache.raw, name), **arguments | {"points": points})
        touched = [(ids, shard_key)]
        return (yield from _then(cache, cached, plain, touched, [(lacking, shard_key)]))

    return corrected(write_points, name)


def with_offsets(
    points: list[Any], versioned_models: Models
) -> tuple[list[Any], list[PointId]]:
    """Return `points`, plain ones with their offsets, and the ids of the others."""
    plain = [point for point in points if _is_plain(point, versioned_models)]
    stored = offsets.compute_stored(plain, versioned_models)
    ready = {
        id(point): offsets.with_stored(point, each)
        for point, each in zip(plain, stored, strict=True)
    }
    others = [point for point in points if id(point) not in ready]
    written = [ready.get(id(point), point) for point in points]
    return written, plain_client.ids_of(others)


def _is_plain(point: Any, versioned_models: Models) -> bool:
    """Return True if `point` can bring its offset along.

    It must be a structure whose vectors need no embedding. If offsets lie in payloads,
    it must have a payload of its own: for a point without one, server 1.14 keeps the
    payload that it had before.
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
    """Upload by the plain client, and give offsets to the points whose ids it asked
    for."""
    name = arguments["collection_name"]
    cached = yield from cache.lookup(name)
    if cached.manifest is None:
        return (yield Call(cache.raw.upload_collection, **arguments))
    payload = arguments.get("payload")
    for row in payload if isinstance(payload, Sequence) else ():
        offsets.require_free(row, cached.offset_key)
    heard: list[PointId] = []
    ids = plain_client.listen(arguments.get("ids"), heard)
    touched = [(heard, arguments.get("shard_key_selector"))]

    def bring_offsets(
        cache: CorrectionCache, cached: CachedManifest, flush: Arguments
    ) -> Operation[Any]:
        plain = Call(cache.raw.delete, **flush)
        return (yield from _then(cache, cached, plain, touched, touched))

    bring = corrected(bring_offsets, "delete")
    flush = {"collection_name": name, "points_selector": nothing()}
    try:
        yield Call(cache.raw.upload_collection, **arguments | {"ids": ids})
    except Exception:
        with suppress(Exception):
            yield from bring(cache, flush)
        raise
    yield from bring(cache, flush)


def _change(name: str, selector: str = "points") -> OfClient:
    """Return the operation of the method `name`, which may drop offsets.

    selector: The argument that chooses the points, or that has the operations to do.
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
        return (yield from _then(cache, cached, plain, touched, touched))

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


def _then(
    cache: CorrectionCache,
    cached: CachedManifest,
    plain: Call,
    touched: list[Touched],
    lacking: list[Touched],
) -> Operation[Any]:
    """Return the answer to the call `plain`, once all points `touched` have offsets.

    If the manifest is unchanged, only points `lacking` need them: the others brought
    them along. If it has changed, all points touched need those of the new version. No
    point is missed: a job writes the manifest first and reads the points then, so a
    point written earlier is seen by the job, and a point written later here.
    """
    try:
        result = yield plain
    except Exception as error:
        if fault_of(error) not in PASSING:
            # A write that is refused for one point may have been done for others.
            with suppress(Exception):
                yield from _refresh(cache, cached, lacking, has_waited=True)
        raise
    name = plain.keywords["collection_name"]
    has_waited = plain.keywords.get("wait", True)
    yield from _refresh(cache, cached, lacking, has_waited)
    for _ in range(CHANGES):
        if (yield from cache.is_unchanged(name, cached)):
            break
        now = yield from cache.lookup(name, cached)
        # If an alias was moved meanwhile, the write may have gone to either collection.
        for collection in {now.collection, cached.collection}:
            current = now
            if collection != now.collection:
                current = yield from cache.lookup(collection, cached)
            if current.state != cached.state:
                yield from _refresh(cache, current, touched, has_waited=False)
        cached = now
    return result


def _select(
    cache: CorrectionCache, cached: CachedManifest, points: Any, shard_key: ShardKey
) -> Operation[Touched]:
    """Return the ids of `points`, in any form that the client takes, and their shard
    key.

    The points of a filter are those that match now.
    """
    if shard_key is None:
        shard_key = field_of(points, "shard_key")
    chosen = points
    if not isinstance(points, models.Filter):
        chosen = field_of(points, "filter")
    if chosen is None:
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
    """Give the points `touched` the offsets of the vectors that they have now.

    Offsets of other versions are deleted.

    has_waited: True if the writes that were sent before are done.
    """
    if not any(ids for ids, _ in touched):
        return
    names = [version.vector for version in cached.maintained]
    names += cached.augmented_vectors
    with_vectors = names if all(names) else True
    try:
        versioned_models = yield from cache.read_models(cached)
        if not has_waited:
            # Deleting nothing waits for all writes that were sent before.
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
                stored = yield Computing(
                    offsets.compute_stored, records, versioned_models
                )
                operations: list[models.UpdateOperation] = []
                for record, each in zip(records, stored, strict=True):
                    operations += offsets.mend(record, each, cached.known)
                if operations:
                    yield Call(
                        cache.raw.batch_update_points,
                        cached.collection,
                        operations,
                        wait=True,
                    )
    except Exception as error:
        # MISSING: the collection is gone, and its points with it.
        if fault_of(error) is not Fault.MISSING:
            raise


def _forgetting(name: str, *, deletes: bool = False) -> OfClient:
    """Return the operation of the method `name`, after which the cache is empty.

    deletes: True if the method deletes the collection: then its metadata goes, too.
    """

    def operation(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
        result = yield Call(getattr(cache.raw, name), **arguments)
        cache.manifests.clear()
        if deletes:
            ours = m.metadata_collection(arguments["collection_name"])
            info = yield from metadata.describe(cache.raw, ours)
            if info is not None and metadata.is_metadata(info):
                yield Call(cache.raw.delete_collection, ours)
        return result

    return operation


delete_collection = _forgetting("delete_collection", deletes=True)
recreate_collection = _forgetting("recreate_collection", deletes=True)
create_collection = _forgetting("create_collection")
update_collection_aliases = _forgetting("update_collection_aliases")
delete_vector_name = _forgetting("delete_vector_name")
