"""The operations of a corrected client that write points, each with its offsets, and those on whole collections.

What writes whole points or vectors brings their offsets along. After anything that may have dropped an offset one rule
holds: the points that were touched, by id, are read, and what they lack is computed and written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias
from uuid import UUID

from qdrant_client import models

from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import metadata, offsets, plain_client
from hubplugin_qdrant.calls import Call, Computing, Operation
from hubplugin_qdrant.manifest import KEY, QdrantManifest
from hubplugin_qdrant.metadata import (
    CHANGES,
    CachedManifest,
    CorrectionCache,
    OfClient,
    retry_on_conflict,
)
from hubplugin_qdrant.offsets import StoredOffsets, compute_stored
from hubplugin_qdrant.plain_client import Arguments, PointId, ShardKey
from hubplugin_qdrant.requests import nothing, selector_fields
from hubplugin_qdrant.transport import PASSING, Fault, chunks, fault_of

OFFSETS_AT_ONCE = 256
"""Points of an upload whose offsets are computed together: beyond it the time for each no longer falls."""

NUMBERS_AT_ONCE = 4_000_000
"""Numbers of an upload, by each of its processes, that are sent before the manifest is looked at again: a second of
work or more, and some 130 MB as Python has them."""

Touched: TypeAlias = tuple[list[PointId], ShardKey]
"""Points whose offsets an operation may have changed, by their ids, which may be the server's to refuse."""


@retry_on_conflict
def upsert(
    cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
) -> Operation[Any]:
    if cached.manifest is None:
        return (yield Call(cache.raw.upsert, **arguments))
    try:
        points = yield Computing(
            plain_client.read_points, cache.raw, arguments["points"]
        )
    except plain_client.UNREADABLE:
        return (yield Call(cache.raw.upsert, **arguments))  # which refuses it
    offsets.require_free_points(points, cached.augmented_vectors)
    stored, is_bare = yield from _compute_writable(cache, cached, points)
    result = yield Call(
        cache.raw.upsert, **arguments | {"points": offsets.with_stored(points, stored)}
    )
    touched = [point.id for point in points], arguments.get("shard_key_selector")
    yield from _bring_up_to_date(cache, cached, arguments, [touched], dropped=is_bare)
    return result


def _compute_writable(
    cache: CorrectionCache, cached: CachedManifest, points: Sequence[models.PointStruct]
) -> Operation[tuple[list[StoredOffsets], bool]]:
    """What `points` store as they are written, and whether that lacks offsets. A server 1.14 keeps the payload of a
    point that is written without one, or, by gRPC, with an empty one: an offset would take the place of it all."""
    stored: list[StoredOffsets] = yield from cache.compute_stored(cached, points)
    bare = [
        not point.payload and bool(each.offsets)
        for point, each in zip(points, stored, strict=True)
    ]
    if not any(bare) or not (yield from cache.keeps_payloads()):
        return stored, False
    return [
        replace(each, offsets={}) if alone else each
        for alone, each in zip(bare, stored, strict=True)
    ], True


def upload_points(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    cached = yield from cache.lookup(arguments["collection_name"])
    if cached.manifest is None:
        return (yield Call(cache.raw.upload_points, **arguments))
    yield from _upload_parts(cache, cached, arguments, arguments["points"])


def upload_collection(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    cached = yield from cache.lookup(arguments["collection_name"])
    if cached.manifest is None:
        return (yield Call(cache.raw.upload_collection, **arguments))
    columns = {
        name: arguments.pop(name, None) for name in ("vectors", "ids", "payload")
    }
    try:
        rows = plain_client.read_rows(**columns)
    except plain_client.UNREADABLE:
        return (
            yield Call(cache.raw.upload_collection, **arguments, **columns)
        )  # which refuses it
    yield from _upload_parts(cache, cached, arguments, rows)


def _upload_parts(
    cache: CorrectionCache,
    cached: CachedManifest,
    arguments: Arguments,
    points: Iterable[Any],
) -> Operation[None]:
    """Uploads `points` in parts, of whole batches, before each of which the manifest is looked at again."""
    batch = max(1, int(arguments.get("batch_size", 64)))
    processes = int(arguments.get("parallel", 1)) or os.cpu_count() or 1
    numbers = sum(version.dim for version in cached.maintained) or 1
    for part in chunks(
        points, batch * processes * max(1, NUMBERS_AT_ONCE // (numbers * batch))
    ):
        yield from _upload(cache, arguments | {"points": part})


@retry_on_conflict
def _upload(
    cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
) -> Operation[Any]:
    """Uploads the points of a list."""
    if cached.manifest is None:
        return (yield Call(cache.raw.upload_points, **arguments))
    pairs = yield from cache.read_models(cached)
    ids: list[PointId] = []

    def points() -> Iterator[object]:
        for chunk in chunks(arguments["points"], OFFSETS_AT_ONCE):
            structs = []
            with suppress(
                *plain_client.UNREADABLE
            ):  # up to the first that is none, which the client refuses
                for point in chunk:
                    structs.append(plain_client.as_struct(point))
            ready = plain_client.embed(cache.raw, structs)
            offsets.require_free_points(ready, cached.augmented_vectors)
            ids.extend(point.id for point in structs)
            yield from offsets.with_stored(ready, compute_stored(ready, pairs))
            yield from chunk[len(structs) :]

    yield Call(cache.raw.upload_points, **arguments | {"points": points()})
    touched = ids, arguments.get("shard_key_selector")
    yield from _bring_up_to_date(cache, cached, arguments | {"wait": False}, [touched])


@retry_on_conflict
def batch_update_points(
    cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
) -> Operation[Any]:
    operations = None
    if cached.manifest is not None:
        with suppress(*plain_client.UNREADABLE):
            operations = yield Computing(
                plain_client.read_operations, cache.raw, arguments["update_operations"]
            )
    if not operations:
        return (
            yield Call(cache.raw.batch_update_points, **arguments)
        )  # which refuses what cannot be read
    return (yield from _update(cache, cached, operations, arguments))


def _single(build: Callable[[Any, Arguments], models.UpdateOperation]) -> OfClient:
    """What the method does that is called as `build`, which makes its one operation, of the plain client and the
    arguments: in the way of `batch_update_points`; where nothing of ours is in question, as it is."""

    @retry_on_conflict
    def change(
        cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
    ) -> Operation[Any]:
        plain = Call(getattr(cache.raw, build.__name__), **arguments)
        if cached.manifest is None:
            return (yield plain)
        try:
            operation = yield Computing(build, cache.raw, arguments)
        except plain_client.UNREADABLE:
            return (yield plain)  # which refuses it
        if not offsets.may_drop_offsets(operation, cached.maintained):
            offsets.require_free_operation(
                operation, cached.offset_key, cached.augmented_vectors
            )
            return (yield plain)
        return (yield from _update(cache, cached, [operation], arguments))[0]

    return change


def _selector_of(arguments: Arguments, name: str = "points") -> dict[str, Any]:
    """The fields of an operation that say on which points it is."""
    return selector_fields(arguments[name], arguments.get("shard_key_selector"))


@_single
def update_vectors(client: Any, arguments: Arguments) -> models.UpdateOperation:
    points = plain_client.read_updates(client, arguments["points"])
    condition = {}
    if arguments.get("update_filter") is not None:
        condition["update_filter"] = arguments["update_filter"]
    update = models.UpdateVectors(
        points=[], shard_key=arguments.get("shard_key_selector"), **condition
    )
    return models.UpdateVectorsOperation(
        update_vectors=plain_client.copy_with(update, {"points": points})
    )


@_single
def delete_vectors(client: Any, arguments: Arguments) -> models.UpdateOperation:
    delete = models.DeleteVectors(
        vector=list(arguments["vectors"]), **_selector_of(arguments)
    )
    return models.DeleteVectorsOperation(delete_vectors=delete)


@_single
def set_payload(client: Any, arguments: Arguments) -> models.UpdateOperation:
    payload = models.SetPayload(
        payload=arguments["payload"],
        key=arguments.get("key"),
        **_selector_of(arguments),
    )
    return models.SetPayloadOperation(set_payload=payload)


@_single
def overwrite_payload(client: Any, arguments: Arguments) -> models.UpdateOperation:
    payload = arguments["payload"]
    if payload is None and plain_client.is_local(client):  # which takes it
        payload = {}
    return models.OverwritePayloadOperation(
        overwrite_payload=models.SetPayload(payload=payload, **_selector_of(arguments))
    )


@_single
def clear_payload(client: Any, arguments: Arguments) -> models.UpdateOperation:
    selected = _selector_of(arguments, "points_selector")
    selector = models.FilterSelector if "filter" in selected else models.PointIdsList
    return models.ClearPayloadOperation(clear_payload=selector(**selected))


@_single
def delete_payload(client: Any, arguments: Arguments) -> models.UpdateOperation:
    delete = models.DeletePayload(
        keys=list(arguments["keys"]), **_selector_of(arguments)
    )
    return models.DeletePayloadOperation(delete_payload=delete)


def _update(
    cache: CorrectionCache,
    cached: CachedManifest,
    operations: list[models.UpdateOperation],
    arguments: Arguments,
) -> Operation[list[models.UpdateResult]]:
    """The results of `operations`, one each, made in their order together with what must go with them."""
    for operation in operations:
        offsets.require_free_operation(
            operation, cached.offset_key, cached.augmented_vectors
        )
    touched: list[Touched] = []
    try:
        results, dropped = yield from _in_order(
            cache, cached, operations, arguments, touched
        )
    except Exception as error:
        # Of an operation that a server refuses for a point that is not there, it does the rest.
        if fault_of(error) not in PASSING:
            with suppress(Exception):
                yield from _bring_up_to_date(
                    cache, cached, arguments, touched, dropped=True
                )
        raise
    yield from _bring_up_to_date(cache, cached, arguments, touched, dropped)
    return results


def _in_order(
    cache: CorrectionCache,
    cached: CachedManifest,
    operations: list[models.UpdateOperation],
    arguments: Arguments,
    touched: list[Touched],
) -> Operation[tuple[list[models.UpdateResult], bool]]:
    """Makes `operations` in one request, unless only the store can tell which points one names after those before it.
    Returns their results, and whether points may lack offsets now. touched: takes the points."""
    names = ("collection_name", "wait", "ordering", "timeout")
    options = {name: arguments[name] for name in names if name in arguments}
    pending: list[models.UpdateOperation] = []
    requested: list[int] = []  # the places of `operations` in `pending`
    results: list[models.UpdateResult] = []
    dropped = False

    def flush(**changes: Any) -> Operation[None]:
        if pending:
            answers = yield Call(
                cache.raw.batch_update_points,
                **options | changes,
                update_operations=[*pending],
            )
            results.extend(answers[number] for number in requested)
            pending.clear()
            requested.clear()

    for operation in operations:
        points, body = offsets.points_of(operation), offsets.body_of(operation)
        stored: list[StoredOffsets] = []
        numbers: dict[PointId, dict[str, float]] = {}
        is_upsert = isinstance(operation, models.UpsertOperation)
        drops = not is_upsert and offsets.may_drop_offsets(operation, cached.maintained)
        if is_upsert and points is not None:  # one that brings as many of each
            stored, drops = yield from _compute_writable(cache, cached, points)
        elif drops and points is not None:
            stored = yield from cache.compute_stored(cached, points)
        elif drops:
            if getattr(body, "points", None) is None:
                yield from flush(wait=True)
            numbers = yield from _read_numbers(cache, cached, body)
        if numbers or points is not None:
            ids = list(numbers) if points is None else [point.id for point in points]
            touched.append((ids, body.shard_key))
        dropped = dropped or drops
        pending += offsets.complete(
            operation, cached.manifest or QdrantManifest(), stored, numbers
        )
        requested.append(len(pending) - 1)
    yield from flush()
    return results, dropped


def _read_numbers(
    cache: CorrectionCache, cached: CachedManifest, body: Any
) -> Operation[dict[PointId, Any]]:
    """The points that the `body` of an operation selects, by id, with the numbers that each has under our key."""
    key, points = cached.offset_key, getattr(body, "points", None)
    if points is not None and key is None:
        return {point: {} for point in points}
    options = _in_shard(body.shard_key) | {
        "with_payload": [key] if key is not None else False
    }
    if points is not None:
        records = yield Call(
            cache.raw.retrieve, cached.collection, ids=list(points), **options
        )
    else:
        records, offset, more = [], None, True
        while more:
            part, offset = yield Call(
                cache.raw.scroll,
                cached.collection,
                body.filter,
                limit=cached.page,
                offset=offset,
                **options,
            )
            records += part
            more = offset is not None
    numbers = {
        record.id: (record.payload or {}).get(key or KEY) or {} for record in records
    }
    return (
        numbers
        if points is None
        else {point: numbers.get(_as_written(point), {}) for point in points}
    )


def _in_shard(shard_key: ShardKey) -> Arguments:
    return {} if shard_key is None else {"shard_key_selector": shard_key}


def _as_written(point: PointId) -> PointId:
    """An id as the server writes it: a UUID has several forms."""
    try:
        return point if isinstance(point, int) else str(UUID(str(point)))
    except ValueError:  # the server's to refuse
        return point


def _bring_up_to_date(
    cache: CorrectionCache,
    cached: CachedManifest,
    arguments: Arguments,
    touched: Sequence[Touched],
    dropped: bool = False,
) -> Operation[None]:
    """Brings the points `touched` to what is `cached`, where offsets may have been `dropped`; and to what is so now, if
    that is something else.

    Whoever changes the state of a collection writes its manifest first and looks at the points then. So what is written
    before that is seen there, and what is written later is seen here.
    """
    name, has_waited = arguments["collection_name"], arguments.get("wait", True)
    if dropped:
        yield from _refresh(cache, cached, touched, [cached.offset_key], has_waited)
    for _ in range(CHANGES):
        if (yield from cache.is_unchanged(name, cached)):
            return
        now = yield from cache.lookup(name, cached)
        # An alias may have been moved before the write, or after it.
        for collection in {now.collection, cached.collection}:
            current = (
                now
                if collection == now.collection
                else (yield from cache.lookup(collection, cached))
            )
            if current.state != cached.state:
                yield from _refresh(
                    cache,
                    current,
                    touched,
                    [KEY, cached.offset_key, current.offset_key],
                    False,
                )
        cached = now


def _refresh(
    cache: CorrectionCache,
    cached: CachedManifest,
    touched: Iterable[Touched],
    keys: Iterable[str | None],
    has_waited: bool,
) -> Operation[None]:
    """Gives the points `touched` the offsets of the vectors that they have now, by what is `cached`, and takes out what
    else of ours they hold, under the payload `keys` and in our vectors. has_waited: all that was sent is done."""
    ours = list(dict.fromkeys(key for key in keys if key is not None))
    names = [
        *(version.vector for version in cached.maintained),
        *cached.augmented_vectors,
    ]
    fields = {
        "with_payload": [
            *ours,
            *(version.group_by for version in cached.maintained if version.group_by),
        ],
        "with_vectors": not all(names) or names,
    }
    manifest = cached.manifest or QdrantManifest()
    try:
        if not has_waited:
            yield Call(
                cache.raw.delete, cached.collection, nothing(), wait=True
            )  # what was sent before is done then
        for points, shard_key in touched:
            for ids in chunks(points, OFFSETS_AT_ONCE):
                records = yield Call(
                    cache.raw.retrieve,
                    cached.collection,
                    ids=ids,
                    **_in_shard(shard_key),
                    **fields,
                )
                stored = yield from cache.compute_stored(cached, records)
                operations = [
                    operation
                    for record, each in zip(records, stored, strict=True)
                    for operation in offsets.mend(
                        record, each, ours, manifest, shard_key
                    )
                ]
                if operations:
                    yield Call(
                        cache.raw.batch_update_points,
                        cached.collection,
                        operations,
                        wait=True,
                    )
    except Exception as error:
        if fault_of(error) is not Fault.MISSING:  # of a collection that is gone
            raise


def delete_vector_name(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    """Deletes a vector as the client of `cache` does it with `arguments`. The correction goes with it: it is retired,
    and taken out by the next job or by `remove`.

    The manifest is written as it lies there: what this client knows of it has its own settings in it.
    """
    cached = yield from cache.lookup(arguments["collection_name"])
    vector = arguments["vector_name"]
    offsets.require_free_vectors([vector], cached.augmented_vectors)
    result = yield Call(cache.raw.delete_vector_name, **arguments)
    cache.forget()
    cached = yield from cache.lookup(arguments["collection_name"])
    if any(version.vector == vector for version in cached.maintained):
        manifest = yield from metadata.read_manifest(cache.raw, cached.collection)
        yield from metadata.write_manifest(
            cache.raw, cached.collection, manifest.withdraw(vector)
        )
        cache.forget()
    return result


def delete_collection(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    return (
        yield from _and_forget(cache, Call(cache.raw.delete_collection, **arguments))
    )


def recreate_collection(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    return (
        yield from _and_forget(cache, Call(cache.raw.recreate_collection, **arguments))
    )


def create_collection(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    cache.forget()
    return (yield Call(cache.raw.create_collection, **arguments))


def update_collection_aliases(
    cache: CorrectionCache, arguments: Arguments
) -> Operation[Any]:
    cache.forget()
    return (yield Call(cache.raw.update_collection_aliases, **arguments))


def _and_forget(cache: CorrectionCache, call: Call) -> Operation[Any]:
    """The answer to `call`, with which a collection goes, and all that belonged to it."""
    result = yield call
    cache.forget()
    name = m.metadata_collection(call.keywords["collection_name"])
    exists = yield Call(cache.raw.collection_exists, name)
    if exists and metadata.is_metadata((yield Call(cache.raw.get_collection, name))):
        yield Call(cache.raw.delete_collection, name)
    return result
