"""The operations of a corrected client that write points, each with its offsets, and those on whole collections."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from qdrant_client import models

from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import metadata, offsets, plain_client
from hubplugin_qdrant.manifest import KEY, Manifest
from hubplugin_qdrant.metadata import CHANGES, CachedManifest, CorrectionCache, Operation, again_if_changed
from hubplugin_qdrant.offsets import StoredOffsets, listed_id, stored_offsets
from hubplugin_qdrant.plain_client import Arguments, PointId
from hubplugin_qdrant.requests import filter_of, nothing, selector_fields
from hubplugin_qdrant.transport import PASSING, Fault, chunks, fault_of

OFFSETS_AT_ONCE = 256
"""Points of an upload whose offsets are computed together: beyond it the time for each no longer falls."""

NUMBERS_AT_ONCE = 4_000_000
"""Numbers of an upload, by each of its processes, that are sent before the manifest is looked at again: a second of
work or more, and some 130 MB as Python has them."""


@again_if_changed
def upsert(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation:
    if known.manifest is None:
        return (yield cache.raw.upsert(**arguments))
    options = _options(arguments)
    try:
        points = yield cache.compute(
            lambda: plain_client.embedded(cache.raw, plain_client.points_taken(cache.raw, arguments["points"]))
        )
    except plain_client.UNREADABLE:
        return (yield cache.raw.upsert(**arguments))  # which refuses it
    vectors = offsets.vectors_of(points)
    offsets.require_free_points(vectors, known.augmented_vectors)
    found = yield from cache.stored_offsets(known, vectors, offsets.payloads_of(points))
    shard_key, apart = arguments.get("shard_key_selector"), offsets.Offsets()
    is_conditional = arguments.get("update_filter") is not None or arguments.get("update_mode") is not None
    if not is_conditional and (yield from cache.keeps_payloads(known)):
        found, apart = offsets.apart(points, found)
    if apart:
        listed = models.PointsList(points=offsets.as_structs(offsets.with_stored(points, found)), shard_key=shard_key)
        operations = [
            models.UpsertOperation(upsert=listed),
            *offsets.set_all(apart, known.offset_key, shard_key),
        ]
        (result, *_) = yield cache.raw.batch_update_points(update_operations=operations, **options)
    else:
        result = yield cache.raw.upsert(**(arguments | {"points": offsets.with_stored(points, found)}))
    yield from _settle(cache, arguments["collection_name"], known, [offsets.by_id(offsets.ids_of(points), shard_key)])
    return result


def upload_points(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    if known.manifest is None:
        return (yield cache.raw.upload_points(**arguments))
    for part in chunks(arguments["points"], _points_at_once(known, arguments)):
        yield from _upload(cache, arguments | {"points": part})


def upload_collection(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    if known.manifest is None:
        return (yield cache.raw.upload_collection(**arguments))
    columns = {name: arguments.pop(name, None) for name in ("vectors", "ids", "payload")}
    try:
        rows = plain_client.rows_taken(**columns)
    except plain_client.UNREADABLE:
        return (yield cache.raw.upload_collection(**arguments, **columns))  # which refuses it
    for part in chunks(rows, _points_at_once(known, arguments)):
        yield from _upload(cache, arguments | {"points": part})


def _points_at_once(known: CachedManifest, arguments: Arguments) -> int:
    """How many points of an upload are uploaded before the manifest is looked at again: whole batches."""
    batch = max(1, int(arguments.get("batch_size", 64)))
    processes = int(arguments.get("parallel", 1)) or os.cpu_count() or 1
    numbers = sum(version.dim for version in known.kept_up) or 1
    return batch * processes * max(1, NUMBERS_AT_ONCE // (numbers * batch))


@again_if_changed
def _upload(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation:
    """Uploads the points of a list."""
    if known.manifest is None:
        return (yield cache.raw.upload_points(**arguments))
    fitted = yield from cache.fitted(known)
    ids: list[PointId] = []

    def points() -> Iterator[object]:
        for chunk in chunks(arguments["points"], OFFSETS_AT_ONCE):
            taken = _structs(chunk)
            embedded = plain_client.embedded(cache.raw, taken)
            offsets.require_free_points(offsets.vectors_of(embedded), known.augmented_vectors)
            found = stored_offsets(offsets.vectors_of(embedded), offsets.payloads_of(embedded), fitted)
            ids.extend(point.id for point in taken)
            yield from offsets.as_structs(offsets.with_stored(embedded, found))
            yield from chunk[len(taken) :]  # the first of them is none, and the client refuses it

    yield cache.raw.upload_points(**(arguments | {"points": points()}))
    by_id = [offsets.by_id(ids, arguments.get("shard_key_selector"))]
    yield from _settle(cache, arguments["collection_name"], known, by_id)


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
def batch_update_points(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation:
    if known.manifest is None:
        return (yield cache.raw.batch_update_points(**arguments))
    try:
        given = plain_client.operations_taken(cache.raw, arguments["update_operations"])
    except plain_client.UNREADABLE:
        return (yield cache.raw.batch_update_points(**arguments))  # which refuses it
    if not given:
        return (yield cache.raw.batch_update_points(**arguments))
    operations = yield cache.compute(lambda: plain_client.embedded(cache.raw, given))
    return (yield from _update(cache, known, operations, arguments))


@again_if_changed
def update_vectors(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation:
    def operation() -> models.UpdateOperation:
        points = plain_client.embedded(cache.raw, plain_client.updates_taken(cache.raw, arguments["points"]))
        condition = {}
        if arguments.get("update_filter") is not None:
            condition["update_filter"] = filter_of(arguments["update_filter"])
        update = models.UpdateVectors(points=[], shard_key=arguments.get("shard_key_selector"), **condition)
        return models.UpdateVectorsOperation(update_vectors=plain_client.changed(update, {"points": points}))

    return (yield from _single(cache, known, arguments, cache.raw.update_vectors, operation))


@again_if_changed
def delete_vectors(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation:
    def operation() -> models.UpdateOperation:
        selected = selector_fields(arguments["points"], arguments.get("shard_key_selector"))
        return models.DeleteVectorsOperation(
            delete_vectors=models.DeleteVectors(vector=list(arguments["vectors"]), **selected)
        )

    return (yield from _single(cache, known, arguments, cache.raw.delete_vectors, operation))


@again_if_changed
def overwrite_payload(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation:
    def operation() -> models.UpdateOperation:
        selected = selector_fields(arguments["points"], arguments.get("shard_key_selector"))
        payload = arguments["payload"]
        if payload is None and plain_client.is_local(cache.raw):  # which takes it
            payload = {}
        return models.OverwritePayloadOperation(overwrite_payload=models.SetPayload(payload=payload, **selected))

    return (yield from _single(cache, known, arguments, cache.raw.overwrite_payload, operation))


@again_if_changed
def clear_payload(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation:
    def operation() -> models.UpdateOperation:
        selected = selector_fields(arguments["points_selector"], arguments.get("shard_key_selector"))
        selector = models.FilterSelector if "filter" in selected else models.PointIdsList
        return models.ClearPayloadOperation(clear_payload=selector(**selected))

    return (yield from _single(cache, known, arguments, cache.raw.clear_payload, operation))


@again_if_changed
def set_payload(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation:
    offsets.require_free([arguments["key"]] if arguments.get("key") else arguments["payload"], known.offset_key)
    return (yield cache.raw.set_payload(**arguments))


@again_if_changed
def delete_payload(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation:
    offsets.require_free(arguments["keys"], known.offset_key)
    return (yield cache.raw.delete_payload(**arguments))


def _single(
    cache: CorrectionCache,
    known: CachedManifest,
    arguments: Arguments,
    raw: Any,
    operation: Callable[[], models.UpdateOperation],
) -> Operation:
    if known.manifest is None:
        return (yield raw(**arguments))
    try:
        made = yield cache.compute(operation)
    except plain_client.UNREADABLE:
        return (yield raw(**arguments))  # which refuses it
    return (yield from _update(cache, known, [made], arguments))[0]


def _update(
    cache: CorrectionCache, known: CachedManifest, operations: list[models.UpdateOperation], arguments: Arguments
) -> Operation:
    """The results of `operations`, one each, made in their order together with what must go with them."""
    for operation in operations:
        offsets.check(operation, known.offset_key, known.augmented_vectors)
    touched: list[offsets.Selected | None] = []
    try:
        results = yield from _in_order(cache, known, operations, _options(arguments), touched)
    except Exception as error:
        # Of an operation that a server refuses for a point that is not there, it does the rest; and what should have
        # brought the offsets in payloads along was not done, or done alone. What writes whole points does all or none.
        if fault_of(error) not in PASSING and known.offset_key is not None and known.manifest is not None:
            apart = [each for each in operations if not isinstance(each, models.UpsertOperation)]
            yield from _refresh(cache, known, map(offsets.touched, apart), [known.offset_key])
        raise
    yield from _settle(cache, arguments["collection_name"], known, touched)
    return results


def _in_order(
    cache: CorrectionCache,
    known: CachedManifest,
    operations: list[models.UpdateOperation],
    options: Arguments,
    touched: list[offsets.Selected | None],
) -> Operation:
    """In one request, unless only the store can tell what the operations before an operation leave, or which points one
    names. touched: takes the points whose offsets they bring along or take away, by id."""
    manifest = known.manifest or Manifest()
    pending: list[models.UpdateOperation] = []
    asked: list[int] = []  # which of the pending ones were asked for
    results: list[models.UpdateResult] = []

    def flush(**also: Any) -> Operation:
        if pending:
            done = yield cache.raw.batch_update_points(update_operations=pending, **(options | also))
            results.extend(done[number] for number in asked)
            pending.clear()
            asked.clear()

    keeps_payloads = yield from cache.keeps_payloads(known)
    held: offsets.Held | None = yield from _held_by_wiped(cache, known, operations)
    for operation in operations:
        points, selector = offsets.points_of(operation), offsets.wiped(operation)
        found: list[StoredOffsets] = []
        if points is not None:
            if isinstance(operation, models.UpdateVectorsOperation):
                payloads = yield from _groups_of(cache, known, operation.update_vectors, flush)
            else:
                payloads = offsets.payloads_of(points)
            found = yield from cache.stored_offsets(known, offsets.vectors_of(points), payloads)
        kept: offsets.Offsets = {}
        named: Any = offsets.touched(operation)
        if named is not None and getattr(named, "points", None) is None:  # but a filter
            yield from flush(wait=True)
            kept = yield from _held(cache, known, named)
            named = offsets.by_id(list(kept), named.shard_key)
        elif selector is not None:
            there = held if named.shard_key is None else None
            if there is None:
                yield from flush(wait=True)
                there = yield from _held(cache, known, named)
            kept = {key: there.get(listed_id(key), {}) for key in named.points}
        touched.append(named)
        together, itself = offsets.completed(operation, manifest, found, kept, keeps_payloads)
        asked.append(len(pending) + itself)
        pending.extend(together)
        held = None if held is None else offsets.left_by(operation, held, found, manifest)
    yield from flush()
    return results


def _held_by_wiped(
    cache: CorrectionCache, known: CachedManifest, operations: Sequence[models.UpdateOperation]
) -> Operation:
    """What the points hold whose payloads are wiped, as far as their ids are known."""
    found: offsets.Held = {}
    for selector in map(offsets.wiped, operations):
        if selector is not None and offsets.ids_named(selector) is not None and known.offset_key is not None:
            found |= yield from _held(cache, known, selector)
    return found


def _held(cache: CorrectionCache, known: CachedManifest, selector: offsets.Selected) -> Operation:
    """The numbers that each point of `selector` stores, by id."""
    key = known.offset_key
    records = yield from _records(cache, known, selector, with_payload=[key] if key is not None else False)
    return {listed_id(record.id): (record.payload or {}).get(key) or {} for record in records}


def _settle(
    cache: CorrectionCache, name: str, known: CachedManifest, touched: Sequence[offsets.Selected | None]
) -> Operation:
    """What was written by what is `known` of `name`, to the points `touched`, is brought to what is so now, if that is
    something else.

    Whoever changes the state of a collection writes its manifest first and looks at the points then. So what is written
    before that is seen there, and what is written later is seen here.
    """
    for _ in range(CHANGES):
        if (yield from cache.is_unchanged(name, known)):
            return
        now = yield from cache.lookup_again(name, known)
        # An alias may have been moved before the write, or after it.
        for collection in {now.collection, known.collection}:
            there = now if collection == now.collection else (yield from cache.lookup_again(collection, known))
            if there.state != known.state:
                keys = dict.fromkeys(key for key in (KEY, known.offset_key, there.offset_key) if key is not None)
                yield from _refresh(cache, there, touched, list(keys))
        known = now


def _refresh(
    cache: CorrectionCache, known: CachedManifest, touched: Iterable[offsets.Selected | None], keys: list[str]
) -> Operation:
    """Gives the points `touched` the offsets of the vectors that they have now, by what is `known`, and takes out what
    else of ours they hold, under the payload `keys` and in our vectors."""
    fields = [*keys, *(version.group_by for version in known.kept_up if version.group_by)]
    names = [*(version.vector for version in known.kept_up), *known.augmented_vectors]
    try:
        yield cache.raw.delete(known.collection, nothing(), wait=True)  # what was sent without waiting is done by then
        for part in (part for selected in touched for part in offsets.parts(selected, OFFSETS_AT_ONCE)):
            records = yield from _records(cache, known, part, with_payload=fields, with_vectors=not all(names) or names)
            payloads = [record.payload for record in records]
            found = yield from cache.stored_offsets(known, [record.vector for record in records], payloads)
            mended = [
                operation
                for record, each in zip(records, found, strict=True)
                for operation in offsets.mending(record, each, keys, known.manifest or Manifest(), part.shard_key)
            ]
            if mended:
                yield cache.raw.batch_update_points(known.collection, mended, wait=True)
    except Exception as error:
        if fault_of(error) is not Fault.MISSING:  # of a collection that is gone
            raise


def _options(arguments: Arguments) -> Arguments:
    """The arguments of a write that `batch_update_points` has, too."""
    return {key: arguments[key] for key in ("collection_name", "wait", "ordering", "timeout") if key in arguments}


def _groups_of(
    cache: CorrectionCache, known: CachedManifest, update: models.UpdateVectors, flush: Callable[..., Operation]
) -> Operation:
    """The payload of each point of `update`, as far as it says which group the point is in; None without groups."""
    keys = [version.group_by for version in (known.manifest or Manifest()).kept_up() if version.group_by]
    if not keys:
        return [None] * len(update.points)
    yield from flush(wait=True)  # an operation before may have changed it
    ids = [point.id for point in update.points]
    options = {} if update.shard_key is None else {"shard_key_selector": update.shard_key}
    records = yield cache.raw.retrieve(known.collection, ids=ids, with_payload=keys, **options)
    payloads = {str(record.id): record.payload for record in records}
    return [payloads.get(str(point)) for point in ids]


def _records(cache: CorrectionCache, known: CachedManifest, selected: offsets.Selected, **options: Any) -> Operation:
    """The points that `selected` names, and that are there. options: what is read of them."""
    points, condition = getattr(selected, "points", None), getattr(selected, "filter", None)
    shard_key = getattr(selected, "shard_key", None)
    options |= {} if shard_key is None else {"shard_key_selector": shard_key}
    if points is not None:
        return (yield cache.raw.retrieve(known.collection, ids=list(points), **options))
    found: list[models.Record] = []
    following: PointId | None = None
    limits = [version.max_candidates for version in (known.manifest or Manifest()).everything()]
    page = min(1000, *(limit for limit in limits if limit)) if any(limits) else 1000
    while True:
        records, following = yield cache.raw.scroll(
            known.collection, scroll_filter=condition, limit=page, offset=following, **options
        )
        found += records
        if following is None:
            return found


def delete_vector_name(cache: CorrectionCache, arguments: Arguments) -> Operation:
    """The correction of a vector goes with it: it is retired, and taken out by the next job or by `remove`.

    The manifest is written as it lies there: what this client knows of it has its own settings in it.
    """
    known = yield from cache.lookup(arguments["collection_name"])
    offsets.require_free_vectors([arguments["vector_name"]], known.augmented_vectors)
    result = yield cache.raw.delete_vector_name(**arguments)
    cache.forget()
    known = yield from cache.lookup(arguments["collection_name"])
    vector = arguments["vector_name"]
    if known.manifest is not None and any(version.vector == vector for version in known.manifest.kept_up()):
        manifest = yield from metadata.read_manifest(cache.raw, known.collection)
        yield from metadata.write_manifest(cache.raw, known.collection, m.retired(manifest, vector))
        cache.forget()
    return result


def delete_collection(cache: CorrectionCache, arguments: Arguments) -> Operation:
    result = yield cache.raw.delete_collection(**arguments)
    yield from _forget_correction(cache, arguments["collection_name"])
    return result


def create_collection(cache: CorrectionCache, arguments: Arguments) -> Operation:
    cache.forget()
    return (yield cache.raw.create_collection(**arguments))


def recreate_collection(cache: CorrectionCache, arguments: Arguments) -> Operation:
    result = yield cache.raw.recreate_collection(**arguments)
    yield from _forget_correction(cache, arguments["collection_name"])
    return result


def update_collection_aliases(cache: CorrectionCache, arguments: Arguments) -> Operation:
    cache.forget()
    return (yield cache.raw.update_collection_aliases(**arguments))


def _forget_correction(cache: CorrectionCache, collection: str) -> Operation:
    """What belonged to a collection goes with it; another of its name starts anew."""
    cache.forget()
    name = m.metadata_collection(collection)
    if (yield cache.raw.collection_exists(name)) and metadata.is_metadata((yield cache.raw.get_collection(name))):
        yield cache.raw.delete_collection(name)
