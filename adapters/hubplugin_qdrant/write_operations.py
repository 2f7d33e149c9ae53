"""The operations of a corrected client that write points, each with its offsets."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from qdrant_client import models

from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import plain_client
from hubplugin_qdrant.cached_manifest import CachedManifest, CorrectionCache, again_if_changed
from hubplugin_qdrant.manifest import Manifest, Payload
from hubplugin_qdrant.newcomers import at_once, kept_out
from hubplugin_qdrant.operations import Arguments, GivenVector, Operation, PointId
from hubplugin_qdrant.requests import offsets_in_writes as writes
from hubplugin_qdrant.requests.selectors import selector_fields
from hubplugin_qdrant.stored_offsets import StoredOffsets, stored_offsets

OFFSETS_AT_ONCE = 256
"""Points of an upload whose offsets are computed together: beyond it the time for each no longer falls."""


@again_if_changed
def upsert(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    if known.manifest is None:
        return (yield cache.raw.upsert(**arguments))
    points = yield cache.compute(lambda: plain_client.embedded(cache.raw, writes.as_rest(arguments["points"])))
    ids, vectors = writes.ids_of(points), writes.vectors_of(points)
    held = _rows(ids, (yield from kept_out(cache, known, ids, vectors)))
    found = yield from cache.stored_offsets(known, vectors, writes.payloads_of(points), held)
    if arguments.get("update_filter") is None and arguments.get("update_mode") is None:
        found, apart = writes.apart(points, found)
        if apart:
            listed = models.PointsList(
                points=writes.as_structs(writes.with_stored(points, found)),
                shard_key=arguments.get("shard_key_selector"),
            )
            operations = [models.UpsertOperation(upsert=listed), *writes.set_all(apart, listed.shard_key)]
            return (yield cache.raw.batch_update_points(update_operations=operations, **_options(arguments)))[0]
    return (yield cache.raw.upsert(**(arguments | {"points": writes.with_stored(points, found)})))


def upload_points(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup_to_upload(arguments["collection_name"])
    if known.manifest is None:
        return (yield cache.raw.upload_points(**arguments))
    fitted, given, out = (yield from cache.fitted(known)), arguments["points"], frozenset[PointId]()
    if cache.admission is not None:  # which judges all before the first is written
        given = plain_client.embedded(cache.raw, writes.as_rest(given))
        out = yield from kept_out(cache, known, writes.ids_of(given), writes.vectors_of(given), at_once)

    def points() -> Iterator[models.PointStruct]:
        for chunk in writes.chunks(given, OFFSETS_AT_ONCE):
            embedded = plain_client.embedded(cache.raw, writes.as_rest(chunk))
            held = _rows(writes.ids_of(embedded), out)
            found = stored_offsets(writes.vectors_of(embedded), writes.payloads_of(embedded), fitted, held)
            yield from writes.as_structs(writes.with_stored(embedded, found))

    return (yield cache.raw.upload_points(**(arguments | {"points": points()})))


def upload_collection(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup_to_upload(arguments["collection_name"])
    if known.manifest is None:
        return (yield cache.raw.upload_collection(**arguments))
    fitted = yield from cache.fitted(known)
    vectors, payloads = arguments["vectors"], arguments.get("payload")
    if isinstance(vectors, dict):
        columns, shortest = vectors, min(map(len, vectors.values()))
        vectors = ({name: column[row] for name, column in columns.items()} for row in range(shortest))
    held: Collection[int] = ()
    if cache.admission is not None:  # which judges all before the first is written
        vectors, ids = plain_client.embedded(cache.raw, list(vectors)), arguments.get("ids")
        ids = [str(uuid.uuid4()) for _ in vectors] if ids is None else list(itertools.islice(ids, len(vectors)))
        held = _rows(ids, (yield from kept_out(cache, known, ids, vectors[: len(ids)], at_once)))
        arguments = arguments | {"ids": ids}

    def points() -> Iterator[tuple[GivenVector, Payload | None]]:
        """Each vector and payload with its offsets; ends with the shorter of the two."""
        beside = iter(payloads) if payloads is not None else itertools.repeat({})
        for number, chunk in enumerate(writes.chunks(vectors, OFFSETS_AT_ONCE)):
            embedded = plain_client.embedded(cache.raw, chunk)
            these = list(itertools.islice(beside, len(embedded)))
            rows = {row - number * OFFSETS_AT_ONCE for row in held}
            found = stored_offsets(embedded[: len(these)], these, fitted, rows)
            for vector, stored, payload in zip(embedded, found, these, strict=False):
                yield writes.with_vectors(vector, stored), writes.with_offsets(payload, stored)

    with_vectors, with_payloads = itertools.tee(points())
    changed = {
        "vectors": (vector for vector, _ in with_vectors),
        "payload": (payload for _, payload in with_payloads),
    }
    return (yield cache.raw.upload_collection(**(arguments | changed)))


@again_if_changed
def batch_update_points(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    if known.manifest is None:
        return (yield cache.raw.batch_update_points(**arguments))
    operations = yield cache.compute(lambda: plain_client.embedded(cache.raw, list(arguments["update_operations"])))
    return (yield from _update(cache, known, operations, arguments))


@again_if_changed
def update_vectors(cache: CorrectionCache, arguments: Arguments) -> Operation:
    def operation() -> models.UpdateOperation:
        points = plain_client.embedded(cache.raw, list(arguments["points"]))
        condition = {"update_filter": arguments["update_filter"]} if arguments.get("update_filter") is not None else {}
        update = models.UpdateVectors(points=points, shard_key=arguments.get("shard_key_selector"), **condition)
        return models.UpdateVectorsOperation(update_vectors=update)

    return (yield from _single(cache, arguments, cache.raw.update_vectors, operation))


@again_if_changed
def delete_vectors(cache: CorrectionCache, arguments: Arguments) -> Operation:
    def operation() -> models.UpdateOperation:
        selected = selector_fields(arguments["points"], arguments.get("shard_key_selector"))
        return models.DeleteVectorsOperation(
            delete_vectors=models.DeleteVectors(vector=list(arguments["vectors"]), **selected)
        )

    return (yield from _single(cache, arguments, cache.raw.delete_vectors, operation))


def overwrite_payload(cache: CorrectionCache, arguments: Arguments) -> Operation:
    def operation() -> models.UpdateOperation:
        selected = selector_fields(arguments["points"], arguments.get("shard_key_selector"))
        return models.OverwritePayloadOperation(
            overwrite_payload=models.SetPayload(payload=arguments["payload"], **selected)
        )

    return (yield from _single(cache, arguments, cache.raw.overwrite_payload, operation))


def clear_payload(cache: CorrectionCache, arguments: Arguments) -> Operation:
    def operation() -> models.UpdateOperation:
        selected = selector_fields(arguments["points_selector"], arguments.get("shard_key_selector"))
        selector = models.FilterSelector if "filter" in selected else models.PointIdsList
        return models.ClearPayloadOperation(clear_payload=selector(**selected))

    return (yield from _single(cache, arguments, cache.raw.clear_payload, operation))


def set_payload(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    if known.manifest is not None:
        writes.require_free([arguments["key"]] if arguments.get("key") else arguments["payload"])
    return (yield cache.raw.set_payload(**arguments))


def delete_payload(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    if known.manifest is not None:
        writes.require_free(arguments["keys"])
    return (yield cache.raw.delete_payload(**arguments))


def _single(
    cache: CorrectionCache, arguments: Arguments, raw: Any, operation: Callable[[], models.UpdateOperation]
) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    if known.manifest is None:
        return (yield raw(**arguments))
    return (yield from _update(cache, known, [(yield cache.compute(operation))], arguments))[0]


def _update(
    cache: CorrectionCache, known: CachedManifest, operations: list[models.UpdateOperation], arguments: Arguments
) -> Operation:
    """The results of `operations`, one each, made in their order together with what must go with them."""
    for operation in operations:
        writes.check(operation)
    written = [points for points in map(writes.points_of, operations) if points is not None]
    ids = [key for points in written for key in writes.ids_of(points)]
    out = yield from kept_out(cache, known, ids, [vector for points in written for vector in writes.vectors_of(points)])
    options = _options(arguments)
    pending: list[models.UpdateOperation] = []
    asked: list[int] = []  # which of the pending ones were asked for
    results: list[models.UpdateResult] = []

    def flush(**also: Any) -> Operation:
        if pending:
            done = yield cache.raw.batch_update_points(update_operations=pending, **(options | also))
            results.extend(done[number] for number in asked)
            pending.clear()
            asked.clear()

    for operation in operations:
        points, selector = writes.points_of(operation), writes.wiped(operation)
        found: list[StoredOffsets] = []
        if points is not None:
            if isinstance(operation, models.UpdateVectorsOperation):
                payloads = yield from _groups_of(cache, known, operation.update_vectors, flush)
            else:
                payloads = writes.payloads_of(points)
            held = _rows(writes.ids_of(points), out)
            found = yield from cache.stored_offsets(known, writes.vectors_of(points), payloads, held)
        kept: writes.Offsets = {}
        if selector is not None:
            yield from flush(wait=True)  # what is kept is what the operations before have left
            kept = yield from _kept(cache, known, selector)
        together, itself = writes.completed(operation, known.manifest or Manifest(), found, kept)
        asked.append(len(pending) + itself)
        pending.extend(together)
    yield from flush()
    return results


def _rows(ids: Sequence[PointId], out: Collection[PointId]) -> set[int]:
    """The rows of those of `ids` that are kept out."""
    return {row for row, key in enumerate(ids) if key in out} if out else set()


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


def _kept(
    cache: CorrectionCache, known: CachedManifest, selector: models.SetPayload | models.PointsSelector
) -> Operation:
    """The stored offsets of the points that `selector` names, by id."""
    kept: writes.Offsets = {}
    points, condition = getattr(selector, "points", None), getattr(selector, "filter", None)
    shard_key = getattr(selector, "shard_key", None)
    options: dict[str, Any] = {"with_payload": [m.KEY]}
    options |= {} if shard_key is None else {"shard_key_selector": shard_key}
    if points is not None:
        records = yield cache.raw.retrieve(known.collection, ids=list(points), **options)
        return {record.id: record.payload[m.KEY] for record in records if (record.payload or {}).get(m.KEY)}
    following: PointId | None = None
    limits = [version.max_candidates for version in (known.manifest or Manifest()).everything()]
    page = min(1000, *(limit for limit in limits if limit)) if any(limits) else 1000
    while True:
        records, following = yield cache.raw.scroll(
            known.collection, scroll_filter=condition, limit=page, offset=following, **options
        )
        kept |= {record.id: record.payload[m.KEY] for record in records if (record.payload or {}).get(m.KEY)}
        if following is None:
            return kept
