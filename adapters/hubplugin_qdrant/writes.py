"""The operations of a corrected client that write points, each with its offsets, and those on whole collections.

What writes whole points or vectors brings their offsets along. After anything that may have dropped an offset one rule
holds: the points that were touched, by id, are read, and what they lack is computed and written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import UUID

from qdrant_client import models

from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import metadata, offsets, plain_client
from hubplugin_qdrant.calls import Call, Computing, Operation
from hubplugin_qdrant.manifest import KEY, Manifest
from hubplugin_qdrant.metadata import CHANGES, CachedManifest, CorrectionCache, again_if_changed
from hubplugin_qdrant.offsets import StoredOffsets, stored_offsets
from hubplugin_qdrant.plain_client import Arguments, PointId, ShardKey
from hubplugin_qdrant.requests import filter_of, nothing, selector_fields
from hubplugin_qdrant.transport import PASSING, Fault, chunks, fault_of

OFFSETS_AT_ONCE = 256
"""Points of an upload whose offsets are computed together: beyond it the time for each no longer falls."""

NUMBERS_AT_ONCE = 4_000_000
"""Numbers of an upload, by each of its processes, that are sent before the manifest is looked at again: a second of
work or more, and some 130 MB as Python has them."""


@again_if_changed
def upsert(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation[Any]:
    if known.manifest is None:
        return (yield Call(cache.raw.upsert, **arguments))
    try:
        points = yield Computing(plain_client.points_taken, cache.raw, arguments["points"])
    except plain_client.UNREADABLE:
        return (yield Call(cache.raw.upsert, **arguments))  # which refuses it
    offsets.require_free_points(points, known.augmented_vectors)
    stored, is_bare = yield from _stored_with(cache, known, points)
    result = yield Call(cache.raw.upsert, **arguments | {"points": offsets.with_stored(points, stored)})
    touched = Touched([point.id for point in points], arguments.get("shard_key_selector"))
    yield from _settle(cache, known, arguments, [touched], dropped=is_bare)
    return result


def _stored_with(
    cache: CorrectionCache, known: CachedManifest, points: Sequence[models.PointStruct]
) -> Operation[tuple[list[StoredOffsets], bool]]:
    """What `points` store as they are written, and whether that lacks offsets. A server 1.14 keeps the payload of a
    point that is written without one, or, by gRPC, with an empty one: an offset would take the place of it all."""
    stored: list[StoredOffsets] = yield from cache.stored_offsets(known, points)
    bare = [not point.payload and bool(each.offsets) for point, each in zip(points, stored, strict=True)]
    if not any(bare) or not (yield from cache.keeps_payloads()):
        return stored, False
    return [replace(each, offsets={}) if alone else each for alone, each in zip(bare, stored, strict=True)], True


def upload_points(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    known = yield from cache.lookup(arguments["collection_name"])
    if known.manifest is None:
        return (yield Call(cache.raw.upload_points, **arguments))
    for part in chunks(arguments["points"], _points_at_once(known, arguments)):
        yield from _upload(cache, arguments | {"points": part})


def upload_collection(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    known = yield from cache.lookup(arguments["collection_name"])
    if known.manifest is None:
        return (yield Call(cache.raw.upload_collection, **arguments))
    columns = {name: arguments.pop(name, None) for name in ("vectors", "ids", "payload")}
    try:
        rows = plain_client.rows_taken(**columns)
    except plain_client.UNREADABLE:
        return (yield Call(cache.raw.upload_collection, **arguments, **columns))  # which refuses it
    for part in chunks(rows, _points_at_once(known, arguments)):
        yield from _upload(cache, arguments | {"points": part})


def _points_at_once(known: CachedManifest, arguments: Arguments) -> int:
    """How many points of an upload are uploaded before the manifest is looked at again: whole batches."""
    batch = max(1, int(arguments.get("batch_size", 64)))
    processes = int(arguments.get("parallel", 1)) or os.cpu_count() or 1
    numbers = sum(version.dim for version in known.maintained) or 1
    return batch * processes * max(1, NUMBERS_AT_ONCE // (numbers * batch))


@again_if_changed
def _upload(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation[Any]:
    """Uploads the points of a list."""
    if known.manifest is None:
        return (yield Call(cache.raw.upload_points, **arguments))
    fitted = yield from cache.fitted(known)
    touched = Touched([], arguments.get("shard_key_selector"))

    def points() -> Iterator[object]:
        for chunk in chunks(arguments["points"], OFFSETS_AT_ONCE):
            taken = _structs(chunk)
            embedded = plain_client.embedded(cache.raw, taken)
            offsets.require_free_points(embedded, known.augmented_vectors)
            touched.ids.extend(point.id for point in taken)
            yield from offsets.with_stored(embedded, stored_offsets(embedded, fitted))
            yield from chunk[len(taken) :]  # the first of them is none, and the client refuses it

    yield Call(cache.raw.upload_points, **arguments | {"points": points()})
    yield from _settle(cache, known, arguments | {"wait": False}, [touched])


def _structs(points: Iterable[object]) -> list[models.PointStruct]:
    """`points` as structures, up to the first that is none."""
    found = []
    for point in points:
        try:
            found.append(plain_client.point_of(point))
        except plain_client.UNREADABLE:
            break
    return found


@again_if_changed
def batch_update_points(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation[Any]:
    if known.manifest is None:
        return (yield Call(cache.raw.batch_update_points, **arguments))
    try:
        given = yield Computing(plain_client.operations_taken, cache.raw, arguments["update_operations"])
    except plain_client.UNREADABLE:
        given = None
    if not given:
        return (yield Call(cache.raw.batch_update_points, **arguments))  # which refuses it
    return (yield from _update(cache, known, given, arguments))


@again_if_changed
def update_vectors(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation[Any]:
    def operation() -> models.UpdateOperation:
        points = plain_client.updates_taken(cache.raw, arguments["points"])
        condition = {}
        if arguments.get("update_filter") is not None:
            condition["update_filter"] = filter_of(arguments["update_filter"])
        update = models.UpdateVectors(points=[], shard_key=arguments.get("shard_key_selector"), **condition)
        return models.UpdateVectorsOperation(update_vectors=plain_client.changed(update, {"points": points}))

    return (yield from _single(cache, known, arguments, cache.raw.update_vectors, operation))


@again_if_changed
def delete_vectors(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation[Any]:
    def operation() -> models.UpdateOperation:
        selected = selector_fields(arguments["points"], arguments.get("shard_key_selector"))
        deleted = models.DeleteVectors(vector=list(arguments["vectors"]), **selected)
        return models.DeleteVectorsOperation(delete_vectors=deleted)

    return (yield from _single(cache, known, arguments, cache.raw.delete_vectors, operation))


@again_if_changed
def set_payload(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation[Any]:
    def operation() -> models.UpdateOperation:
        selected = selector_fields(arguments["points"], arguments.get("shard_key_selector"))
        given = models.SetPayload(payload=arguments["payload"], key=arguments.get("key"), **selected)
        return models.SetPayloadOperation(set_payload=given)

    return (yield from _single(cache, known, arguments, cache.raw.set_payload, operation))


@again_if_changed
def overwrite_payload(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation[Any]:
    def operation() -> models.UpdateOperation:
        selected = selector_fields(arguments["points"], arguments.get("shard_key_selector"))
        payload = arguments["payload"]
        if payload is None and plain_client.is_local(cache.raw):  # which takes it
            payload = {}
        return models.OverwritePayloadOperation(overwrite_payload=models.SetPayload(payload=payload, **selected))

    return (yield from _single(cache, known, arguments, cache.raw.overwrite_payload, operation))


@again_if_changed
def clear_payload(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation[Any]:
    def operation() -> models.UpdateOperation:
        selected = selector_fields(arguments["points_selector"], arguments.get("shard_key_selector"))
        selector = models.FilterSelector if "filter" in selected else models.PointIdsList
        return models.ClearPayloadOperation(clear_payload=selector(**selected))

    return (yield from _single(cache, known, arguments, cache.raw.clear_payload, operation))


@again_if_changed
def delete_payload(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation[Any]:
    def operation() -> models.UpdateOperation:
        selected = selector_fields(arguments["points"], arguments.get("shard_key_selector"))
        deleted = models.DeletePayload(keys=list(arguments["keys"]), **selected)
        return models.DeletePayloadOperation(delete_payload=deleted)

    return (yield from _single(cache, known, arguments, cache.raw.delete_payload, operation))


def _single(
    cache: CorrectionCache,
    known: CachedManifest,
    arguments: Arguments,
    plain: Any,
    operation: Callable[[], models.UpdateOperation],
) -> Operation[Any]:
    """What a method that makes one operation returns, made in the way of `batch_update_points`; where nothing of ours
    is in question, as it is."""
    if known.manifest is None:
        return (yield Call(plain, **arguments))
    try:
        made = yield Computing(operation)
    except plain_client.UNREADABLE:
        return (yield Call(plain, **arguments))  # which refuses it
    if not offsets.may_drop_offsets(made, known.maintained):
        offsets.require_free_operation(made, known.offset_key, known.augmented_vectors)
        return (yield Call(plain, **arguments))
    return (yield from _update(cache, known, [made], arguments))[0]


class Touched:
    """Points whose offsets an operation may have changed, by their ids, which may be the server's to refuse."""

    def __init__(self, ids: list[PointId], shard_key: ShardKey):
        self.ids, self.shard_key = ids, shard_key


def _update(
    cache: CorrectionCache, known: CachedManifest, operations: list[models.UpdateOperation], arguments: Arguments
) -> Operation[list[models.UpdateResult]]:
    """The results of `operations`, one each, made in their order together with what must go with them."""
    for operation in operations:
        offsets.require_free_operation(operation, known.offset_key, known.augmented_vectors)
    touched: list[Touched] = []
    try:
        results, dropped = yield from _in_order(cache, known, operations, arguments, touched)
    except Exception as error:
        # Of an operation that a server refuses for a point that is not there, it does the rest.
        if fault_of(error) not in PASSING:
            with suppress(Exception):
                yield from _settle(cache, known, arguments, touched, dropped=True)
        raise
    yield from _settle(cache, known, arguments, touched, dropped)
    return results


def _in_order(
    cache: CorrectionCache,
    known: CachedManifest,
    operations: list[models.UpdateOperation],
    arguments: Arguments,
    touched: list[Touched],
) -> Operation[tuple[list[models.UpdateResult], bool]]:
    """Makes `operations` in one request, unless only the store can tell which points one names after those before it.
    Returns their results, and whether points may lack offsets now. touched: takes the points."""
    names = ("collection_name", "wait", "ordering", "timeout")
    options = {name: arguments[name] for name in names if name in arguments}
    pending: list[models.UpdateOperation] = []
    asked: list[int] = []  # which of the pending ones were asked for
    results: list[models.UpdateResult] = []
    dropped = False

    def flush(**also: Any) -> Operation[None]:
        if pending:
            given = options | also | {"update_operations": [*pending]}
            done = yield Call(cache.raw.batch_update_points, **given)
            results.extend(done[number] for number in asked)
            pending.clear()
            asked.clear()

    for operation in operations:
        points, body = offsets.points_of(operation), offsets.body_of(operation)
        stored: list[StoredOffsets] = []
        held: dict[PointId, dict[str, float]] = {}
        if isinstance(operation, models.UpsertOperation):
            if points is not None:  # one that brings as many of each
                stored, is_bare = yield from _stored_with(cache, known, points)
                touched.append(Touched([point.id for point in points], body.shard_key))
                dropped = dropped or is_bare
        elif offsets.may_drop_offsets(operation, known.maintained):
            dropped = True
            if points is not None:
                stored = yield from cache.stored_offsets(known, points)
                touched.append(Touched([point.id for point in points], body.shard_key))
            else:
                if getattr(body, "points", None) is None:
                    yield from flush(wait=True)
                held = yield from _held(cache, known, body)
                touched.append(Touched(list(held), body.shard_key))
        pending += offsets.completed(operation, known.manifest or Manifest(), stored, held)
        asked.append(len(pending) - 1)
    yield from flush()
    return results, dropped


def _held(cache: CorrectionCache, known: CachedManifest, selected: Any) -> Operation[dict[PointId, dict[str, float]]]:
    """The points that `selected` names, by id, with the numbers that each has under our key."""
    key, points, condition = known.offset_key, getattr(selected, "points", None), getattr(selected, "filter", None)
    options = _in_shard(selected.shard_key) | {"with_payload": [key] if key is not None else False}
    records: list[models.Record] = []
    if points is not None and key is None:
        return {point: {} for point in points}
    if points is not None:
        records = yield Call(cache.raw.retrieve, known.collection, ids=list(points), **options)
    following, more = None, points is None
    while more:
        part, following = yield Call(
            cache.raw.scroll, known.collection, condition, limit=known.page, offset=following, **options
        )
        records += part
        more = following is not None
    numbers = {record.id: (record.payload or {}).get(key or KEY) or {} for record in records}
    if points is None:
        return numbers
    return {point: numbers.get(_as_listed(point), {}) for point in points}


def _in_shard(shard_key: ShardKey) -> Arguments:
    return {} if shard_key is None else {"shard_key_selector": shard_key}


def _as_listed(point: PointId) -> PointId:
    """An id as the server writes it: a UUID has several forms."""
    try:
        return point if isinstance(point, int) else str(UUID(str(point)))
    except ValueError:  # the server's to refuse
        return point


def _settle(
    cache: CorrectionCache,
    known: CachedManifest,
    arguments: Arguments,
    touched: Sequence[Touched],
    dropped: bool = False,
) -> Operation[None]:
    """Brings the points `touched` to what is `known`, where offsets may have been `dropped`; and to what is so now, if
    that is something else.

    Whoever changes the state of a collection writes its manifest first and looks at the points then. So what is written
    before that is seen there, and what is written later is seen here.
    """
    name, waited = arguments["collection_name"], arguments.get("wait", True)
    if dropped:
        yield from _refresh(cache, known, touched, [known.offset_key], waited)
    for _ in range(CHANGES):
        if (yield from cache.is_unchanged(name, known)):
            return
        now = yield from cache.lookup_again(name, known)
        # An alias may have been moved before the write, or after it.
        for collection in {now.collection, known.collection}:
            there = now if collection == now.collection else (yield from cache.lookup_again(collection, known))
            if there.state != known.state:
                yield from _refresh(cache, there, touched, [KEY, known.offset_key, there.offset_key], False)
        known = now


def _refresh(
    cache: CorrectionCache,
    known: CachedManifest,
    touched: Iterable[Touched],
    keys: Iterable[str | None],
    waited: bool,
) -> Operation[None]:
    """Gives the points `touched` the offsets of the vectors that they have now, by what is `known`, and takes out what
    else of ours they hold, under the payload `keys` and in our vectors. waited: whether all that was sent is done."""
    ours = list(dict.fromkeys(key for key in keys if key is not None))
    names = [*(version.vector for version in known.maintained), *known.augmented_vectors]
    read = {
        "with_payload": [*ours, *(version.group_by for version in known.maintained if version.group_by)],
        "with_vectors": not all(names) or names,
    }
    try:
        if not waited:
            yield Call(cache.raw.delete, known.collection, nothing(), wait=True)  # what was sent before is done then
        for each in touched:
            for ids in chunks(each.ids, OFFSETS_AT_ONCE):
                records = yield Call(cache.raw.retrieve, known.collection, ids=ids, **_in_shard(each.shard_key), **read)
                stored = yield from cache.stored_offsets(known, records)
                mended = [
                    operation
                    for record, found in zip(records, stored, strict=True)
                    for operation in offsets.mending(record, found, ours, known.manifest or Manifest(), each.shard_key)
                ]
                if mended:
                    yield Call(cache.raw.batch_update_points, known.collection, mended, wait=True)
    except Exception as error:
        if fault_of(error) is not Fault.MISSING:  # of a collection that is gone
            raise


def delete_vector_name(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    """The correction of a vector goes with it: it is retired, and taken out by the next job or by `remove`.

    The manifest is written as it lies there: what this client knows of it has its own settings in it.
    """
    known = yield from cache.lookup(arguments["collection_name"])
    vector = arguments["vector_name"]
    offsets.require_free_vectors([vector], known.augmented_vectors)
    result = yield Call(cache.raw.delete_vector_name, **arguments)
    cache.forget()
    known = yield from cache.lookup(arguments["collection_name"])
    if known.manifest is not None and any(version.vector == vector for version in known.manifest.maintained):
        manifest = yield from metadata.read_manifest(cache.raw, known.collection)
        yield from metadata.write_manifest(cache.raw, known.collection, manifest.withdraw(vector))
        cache.forget()
    return result


def delete_collection(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    result = yield Call(cache.raw.delete_collection, **arguments)
    yield from _forget_correction(cache, arguments["collection_name"])
    return result


def create_collection(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    cache.forget()
    return (yield Call(cache.raw.create_collection, **arguments))


def recreate_collection(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    result = yield Call(cache.raw.recreate_collection, **arguments)
    yield from _forget_correction(cache, arguments["collection_name"])
    return result


def update_collection_aliases(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    cache.forget()
    return (yield Call(cache.raw.update_collection_aliases, **arguments))


def _forget_correction(cache: CorrectionCache, collection: str) -> Operation[None]:
    """What belonged to a collection goes with it; another of its name starts anew."""
    cache.forget()
    name = m.metadata_collection(collection)
    exists = yield Call(cache.raw.collection_exists, name)
    if exists and metadata.is_metadata((yield Call(cache.raw.get_collection, name))):
        yield Call(cache.raw.delete_collection, name)
