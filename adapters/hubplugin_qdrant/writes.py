"""The operations of a corrected client that write points, and those on collections.

One rule: the plain client writes what it is given, in whatever form. Then the points
that were touched are read by their ids, and what they lack of offsets is computed and
written. Points that are plain structures bring their offsets along, so an insert is
corrected from its first moment on. Whatever else is written is neutral, or has the
offset of its old vector, until the same call ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from qdrant_client import models

from hubplugin.model import OffsetModel
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import metadata, offsets, plain_client
from hubplugin_qdrant.calls import Call, Computing, Operation
from hubplugin_qdrant.manifest import KEY, QdrantManifest, QdrantVersion
from hubplugin_qdrant.metadata import (
    CHANGES,
    CachedManifest,
    CorrectionCache,
    OfClient,
    retry_on_conflict,
)
from hubplugin_qdrant.plain_client import Arguments, PointId, ShardKey, field_of
from hubplugin_qdrant.requests import nothing
from hubplugin_qdrant.transport import PASSING, Fault, chunks, fault_of

AT_ONCE = 256
"""Points whose offsets are computed and written together: beyond it the time for each
no longer falls."""

PART = 10_000
"""Points of an upload that are sent before the manifest is looked at again."""

Models: TypeAlias = Sequence[tuple[QdrantVersion, OffsetModel]]

Touched: TypeAlias = tuple[list[PointId], ShardKey]
"""Points whose offsets an operation may have changed, and where they lie."""


@retry_on_conflict
def upsert(
    cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
) -> Operation[Any]:
    if cached.manifest is None:
        return (yield Call(cache.raw.upsert, **arguments))
    points = arguments["points"]
    shard_key = arguments.get("shard_key_selector")
    written, others = points, plain_client.ids_of(points)
    if isinstance(points, list):
        pairs = yield from cache.read_models(cached)
        written, others = yield Computing(with_offsets, points, pairs)
    plain = Call(cache.raw.upsert, **arguments | {"points": written})
    touched = [(plain_client.ids_of(points), shard_key)]
    lacking = [(others, shard_key)]
    return (yield from _then(cache, cached, plain, touched, lacking))


def with_offsets(points: list[Any], pairs: Models) -> tuple[list[Any], list[PointId]]:
    """Return `points`, plain ones with their offsets, and the ids of the others."""
    plain = [point for point in points if _is_plain(point, pairs)]
    stored = offsets.compute_stored(plain, pairs)
    ready = dict(zip(map(id, plain), offsets.with_stored(plain, stored), strict=True))
    others = [point for point in points if id(point) not in ready]
    written = [ready.get(id(point), point) for point in points]
    return written, plain_client.ids_of(others)


def _is_plain(point: Any, pairs: Models) -> bool:
    """Tell whether `point` can bring its offset along.

    It is a structure whose vectors nobody has to embed. Where offsets lie in payloads
    it has one: a server 1.14 keeps the old payload of a point that comes without.
    """
    if type(point) is not models.PointStruct:
        return False
    vectors = offsets.by_name(point.vector)
    has_payload = isinstance(point.payload, dict) and len(point.payload) > 0
    for version, _ in pairs:
        if not isinstance(vectors.get(version.vector), list):
            return False
        if version.storage == "payload" and not has_payload:
            return False
    return True


def upload_points(cache: CorrectionCache, arguments: Arguments) -> Operation[None]:
    yield from _upload(cache, arguments, arguments["points"])


def upload_collection(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    cached = yield from cache.lookup(arguments["collection_name"])
    rest = dict(arguments)
    columns = {name: rest.pop(name, None) for name in ("vectors", "ids", "payload")}
    points = None
    if cached.manifest is not None:
        with suppress(*plain_client.UNREADABLE):
            points = plain_client.read_rows(**columns)
    if points is None:  # the plain client refuses what cannot be read
        return (yield Call(cache.raw.upload_collection, **arguments))
    yield from _upload(cache, rest, points)


def _upload(
    cache: CorrectionCache, arguments: Arguments, points: Iterable[Any]
) -> Operation[Any]:
    cached = yield from cache.lookup(arguments["collection_name"])
    if cached.manifest is None:
        return (yield Call(cache.raw.upload_points, **arguments | {"points": points}))
    for part in chunks(points, PART):
        yield from _upload_part(cache, arguments | {"points": part})


@retry_on_conflict
def _upload_part(
    cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
) -> Operation[None]:
    points = arguments["points"]
    shard_key = arguments.get("shard_key_selector")
    pairs = yield from cache.read_models(cached)
    lacking: list[PointId] = []

    def stream() -> Iterator[Any]:
        for chunk in chunks(points, AT_ONCE):
            written, others = with_offsets(chunk, pairs)
            lacking.extend(others)
            yield from written

    plain = Call(cache.raw.upload_points, **arguments | {"points": stream()})
    touched = [(plain_client.ids_of(points), shard_key)]
    yield from _then(cache, cached, plain, touched, [(lacking, shard_key)], wait=False)


def _change(name: str, selector: str = "points") -> OfClient:
    """Return the operation of the method `name`, which may drop offsets.

    selector: the argument that chooses the points.
    """

    @retry_on_conflict
    def change(
        cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
    ) -> Operation[Any]:
        plain = Call(getattr(cache.raw, name), **arguments)
        if cached.manifest is None:
            return (yield plain)
        offsets.require_free(arguments.get("payload"), cached.offset_key)
        shard_key = arguments.get("shard_key_selector")
        points = arguments.get(selector)
        touched = yield from _select(cache, cached, points, shard_key)
        return (yield from _then(cache, cached, plain, [touched], [touched]))

    return change


update_vectors = _change("update_vectors")
delete_vectors = _change("delete_vectors")
overwrite_payload = _change("overwrite_payload")
clear_payload = _change("clear_payload", "points_selector")


@retry_on_conflict
def set_payload(
    cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
) -> Operation[Any]:
    offsets.require_free(arguments.get("payload"), cached.offset_key)
    return (yield Call(cache.raw.set_payload, **arguments))


@retry_on_conflict
def batch_update_points(
    cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
) -> Operation[Any]:
    plain = Call(cache.raw.batch_update_points, **arguments)
    if cached.manifest is None:
        return (yield plain)
    touched: list[Touched] = []
    for body in plain_client.bodies_of(arguments["update_operations"]):
        offsets.require_free(field_of(body, "payload"), cached.offset_key)
        touched.append((yield from _select(cache, cached, body, None)))
    return (yield from _then(cache, cached, plain, touched, touched))


def _then(
    cache: CorrectionCache,
    cached: CachedManifest,
    plain: Call,
    touched: list[Touched],
    lacking: list[Touched],
    wait: bool = True,
) -> Operation[Any]:
    """Return the answer to `plain`, after which all points `touched` have offsets.

    Those `lacking` did not bring them along. A write that is refused for one point may
    have been done for others. Whoever changes the state of a collection writes its
    manifest first and looks at the points then: what is written before is seen there,
    what later, here.
    """
    try:
        result = yield plain
    except Exception as error:
        if fault_of(error) not in PASSING:
            with suppress(Exception):
                yield from _refresh(cache, cached, lacking, has_waited=True)
        raise
    name = plain.keywords["collection_name"]
    has_waited = wait and plain.keywords.get("wait", True)
    yield from _refresh(cache, cached, lacking, has_waited)
    for _ in range(CHANGES):
        if (yield from cache.is_unchanged(name, cached)):
            break
        now = yield from cache.lookup(name, cached)
        # An alias may have been moved before the write, or after it.
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
    """Return the ids of what the client takes as `points`; of a filter, as of now."""
    if shard_key is None:
        shard_key = field_of(points, "shard_key")
    chosen = points
    if not isinstance(points, models.Filter):
        chosen = field_of(points, "filter")
    if chosen is None:
        listed = field_of(points, "batch") or field_of(points, "points") or points
        return plain_client.ids_of(listed), shard_key
    ids: list[PointId] = []
    offset, more = None, True
    while more:
        records, offset = yield Call(
            cache.raw.scroll,
            cached.collection,
            chosen,
            limit=cached.page,
            offset=offset,
            with_payload=False,
            **_in_shard(shard_key),
        )
        ids += [record.id for record in records]
        more = offset is not None
    return ids, shard_key


def _in_shard(shard_key: ShardKey) -> Arguments:
    return {} if shard_key is None else {"shard_key_selector": shard_key}


def _refresh(
    cache: CorrectionCache,
    cached: CachedManifest,
    touched: list[Touched],
    has_waited: bool,
) -> Operation[None]:
    """Give the points `touched` the offsets of the vectors that they have now.

    What else of ours they hold is taken out. has_waited: all that was sent is done.
    """
    if not any(ids for ids, _ in touched):
        return
    names = [version.vector for version in cached.maintained]
    names += cached.augmented_vectors
    with_vectors = names if all(names) else True
    manifest = cached.manifest or QdrantManifest()
    try:
        if not has_waited:  # what was sent before is done once this is
            yield Call(cache.raw.delete, cached.collection, nothing(), wait=True)
        for points, shard_key in touched:
            for ids in chunks(dict.fromkeys(points), AT_ONCE):
                records = yield Call(
                    cache.raw.retrieve,
                    cached.collection,
                    ids=ids,
                    with_payload=[KEY],
                    with_vectors=with_vectors,
                    **_in_shard(shard_key),
                )
                stored = yield from cache.compute_stored(cached, records)
                operations: list[models.UpdateOperation] = []
                for record, each in zip(records, stored, strict=True):
                    operations += offsets.mend(record, each, manifest)
                if operations:
                    yield Call(
                        cache.raw.batch_update_points,
                        cached.collection,
                        operations,
                        wait=True,
                    )
    except Exception as error:
        if fault_of(error) is not Fault.MISSING:  # the collection is gone
            raise


def _forgetting(name: str, *, deletes: bool = False) -> OfClient:
    """Return the operation of the method `name`, after which nothing is known.

    deletes: the collection goes, and its metadata with it.
    """

    def operation(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
        result = yield Call(getattr(cache.raw, name), **arguments)
        cache.forget()
        if deletes:
            ours = m.metadata_collection(arguments["collection_name"])
            exists = yield Call(cache.raw.collection_exists, ours)
            if exists and metadata.is_metadata(
                (yield Call(cache.raw.get_collection, ours))
            ):
                yield Call(cache.raw.delete_collection, ours)
        return result

    return operation


delete_collection = _forgetting("delete_collection", deletes=True)
recreate_collection = _forgetting("recreate_collection", deletes=True)
create_collection = _forgetting("create_collection")
update_collection_aliases = _forgetting("update_collection_aliases")
delete_vector_name = _forgetting("delete_vector_name")
