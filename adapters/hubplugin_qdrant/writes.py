"""The operations of a corrected client that write points, each with its offsets, and those on whole collections."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from qdrant_client import models

from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import metadata, offsets, plain_client
from hubplugin_qdrant.manifest import Manifest
from hubplugin_qdrant.metadata import CachedManifest, CorrectionCache, Operation, again_if_changed
from hubplugin_qdrant.offsets import GivenVector, StoredOffsets, listed_id, stored_offsets
from hubplugin_qdrant.plain_client import Arguments, PointId
from hubplugin_qdrant.requests import filter_of, selector_fields
from hubplugin_qdrant.transport import PASSING, chunks, fault_of

Item = TypeVar("Item")

OFFSETS_AT_ONCE = 256
"""Points of an upload whose offsets are computed together: beyond it the time for each no longer falls."""


@again_if_changed
def upsert(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
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
    if arguments.get("update_filter") is None and arguments.get("update_mode") is None:
        found, apart = offsets.apart(points, found)
        if apart:
            listed = models.PointsList(
                points=offsets.as_structs(offsets.with_stored(points, found)),
                shard_key=arguments.get("shard_key_selector"),
            )
            operations = [
                models.UpsertOperation(upsert=listed),
                *offsets.set_all(apart, known.offset_key, listed.shard_key),
            ]
            return (yield cache.raw.batch_update_points(update_operations=operations, **options))[0]
    return (yield cache.raw.upsert(**(arguments | {"points": offsets.with_stored(points, found)})))


def upload_points(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup_to_upload(arguments["collection_name"])
    if known.manifest is None:
        return (yield cache.raw.upload_points(**arguments))
    fitted = yield from cache.fitted(known)

    def points() -> Iterator[object]:
        for chunk in chunks(arguments["points"], OFFSETS_AT_ONCE):
            taken = _structs(chunk)
            embedded = plain_client.embedded(cache.raw, taken)
            offsets.require_free_points(offsets.vectors_of(embedded), known.augmented_vectors)
            found = stored_offsets(offsets.vectors_of(embedded), offsets.payloads_of(embedded), fitted)
            yield from offsets.as_structs(offsets.with_stored(embedded, found))
            yield from chunk[len(taken) :]  # the first of them is none, and the client refuses it

    return (yield cache.raw.upload_points(**(arguments | {"points": points()})))


def _structs(points: Iterable[object]) -> list[models.PointStruct]:
    """`points` as structures, up to the first that is none."""
    found = []
    for point in points:
        try:
            found.append(plain_client.point_of(point))
        except plain_client.UNREADABLE:
            break
    return found


class _Counted(Sequence[Item]):
    """`items`, a stream, as a sequence of `count` that is read once: a client looks at the length of a sequence."""

    def __init__(self, items: Iterable[Item], count: int):
        self._items, self._count = items, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __getitem__(self, row: object) -> Any:
        raise TypeError("a stream is read in its order")


def upload_collection(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup_to_upload(arguments["collection_name"])
    if known.manifest is None:
        return (yield cache.raw.upload_collection(**arguments))
    fitted = yield from cache.fitted(known)
    vectors, payloads = arguments["vectors"], arguments.get("payload")
    if isinstance(vectors, dict):
        try:
            vectors = _rows_of(vectors)
        except plain_client.UNREADABLE:
            return (yield cache.raw.upload_collection(**arguments))  # which refuses it
    count = _length(vectors)

    def rows() -> Iterator[tuple[GivenVector, Any]]:
        """Each vector with its offsets, and the payload beside it with its own; `_ENDED` where there is none left."""
        beside = itertools.repeat(None) if payloads is None else iter(payloads)
        for chunk in chunks(vectors, OFFSETS_AT_ONCE):
            embedded = plain_client.embedded(cache.raw, chunk)
            offsets.require_free_points(embedded, known.augmented_vectors)
            these = list(itertools.islice(beside, len(embedded)))
            lacking = [_ENDED] * (len(embedded) - len(these))
            found = stored_offsets(embedded, [*these, *lacking], fitted)
            for vector, payload, stored in zip(embedded, [*these, *lacking], found, strict=True):
                yield offsets.with_vectors(vector, stored), offsets.with_offsets(payload, stored)

    with_vectors, with_payloads = itertools.tee(rows())
    changed = {
        "vectors": _counted((vector for vector, _ in with_vectors), count),
        "payload": _counted(
            (payload for _, payload in itertools.takewhile(lambda row: row[1] is not _ENDED, with_payloads)),
            count if payloads is None else _length(payloads),
        ),
    }
    return (yield cache.raw.upload_collection(**(arguments | changed)))


_ENDED: Any = object()


def _length(items: object) -> int | None:
    """How many `items` there are; None where only their end says so."""
    return len(items) if isinstance(items, (Sequence, np.ndarray)) else None


def _counted(items: Iterable[Item], count: int | None) -> Iterable[Item]:
    return items if count is None else _Counted(items, count)


def _rows_of(columns: dict[str, np.ndarray]) -> Iterable[dict[str, np.ndarray]]:
    """The vectors of each point, by name. Raises for columns that are no arrays, or of several lengths."""
    counts = {column.shape[0] for column in columns.values()}
    if len(counts) != 1 or not any(isinstance(column, np.ndarray) for column in columns.values()):
        raise ValueError("expected arrays of one length")
    (count,) = counts
    return _Counted(({name: column[row] for name, column in columns.items()} for row in range(count)), count)


@again_if_changed
def batch_update_points(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
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
def update_vectors(cache: CorrectionCache, arguments: Arguments) -> Operation:
    def operation() -> models.UpdateOperation:
        points = plain_client.embedded(cache.raw, plain_client.updates_taken(cache.raw, arguments["points"]))
        condition = {}
        if arguments.get("update_filter") is not None:
            condition["update_filter"] = filter_of(arguments["update_filter"])
        update = models.UpdateVectors(points=[], shard_key=arguments.get("shard_key_selector"), **condition)
        return models.UpdateVectorsOperation(update_vectors=plain_client.changed(update, {"points": points}))

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
        payload = arguments["payload"]
        if payload is None and plain_client.is_local(cache.raw):  # which takes it
            payload = {}
        return models.OverwritePayloadOperation(overwrite_payload=models.SetPayload(payload=payload, **selected))

    return (yield from _single(cache, arguments, cache.raw.overwrite_payload, operation))


def clear_payload(cache: CorrectionCache, arguments: Arguments) -> Operation:
    def operation() -> models.UpdateOperation:
        selected = selector_fields(arguments["points_selector"], arguments.get("shard_key_selector"))
        selector = models.FilterSelector if "filter" in selected else models.PointIdsList
        return models.ClearPayloadOperation(clear_payload=selector(**selected))

    return (yield from _single(cache, arguments, cache.raw.clear_payload, operation))


def set_payload(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    offsets.require_free([arguments["key"]] if arguments.get("key") else arguments["payload"], known.offset_key)
    return (yield cache.raw.set_payload(**arguments))


def delete_payload(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    offsets.require_free(arguments["keys"], known.offset_key)
    return (yield cache.raw.delete_payload(**arguments))


def _single(
    cache: CorrectionCache, arguments: Arguments, raw: Any, operation: Callable[[], models.UpdateOperation]
) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
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
    try:
        return (yield from _in_order(cache, known, operations, _options(arguments)))
    except Exception as error:
        if fault_of(error) not in PASSING:
            yield from _offsets_again(cache, known, operations)
        raise


def _in_order(
    cache: CorrectionCache, known: CachedManifest, operations: list[models.UpdateOperation], options: Arguments
) -> Operation:
    """In one request, unless only the store can tell what the operations before an operation leave."""
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
        if selector is not None:
            ids = offsets.ids_named(selector)
            if ids is None or held is None:
                yield from flush(wait=True)
                kept = yield from _held(cache, known, selector)
            else:
                kept = {key: held[listed_id(key)] for key in ids if held.get(listed_id(key))}
        together, itself = offsets.completed(operation, manifest, found, kept)
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
        if selector is not None and offsets.ids_named(selector) is not None:
            held = yield from _held(cache, known, selector)
            found |= {listed_id(key): numbers for key, numbers in held.items()}
    return found


def _held(cache: CorrectionCache, known: CachedManifest, selector: offsets.Selected) -> Operation:
    """The numbers that the points of `selector` store, by id."""
    key = known.offset_key
    if key is None:
        return {}
    records = yield from _records(cache, known, selector, with_payload=[key])
    return {record.id: record.payload[key] for record in records if (record.payload or {}).get(key)}


def _offsets_again(
    cache: CorrectionCache, known: CachedManifest, operations: Sequence[models.UpdateOperation]
) -> Operation:
    """Gives the points of `operations` the offsets of the vectors that they have now.

    Of an operation that a server refuses for a point that is not there, it does the rest; and what should have brought
    the offsets in payloads along was not done, or done alone.
    """
    manifest = known.manifest or Manifest()
    versions = manifest.kept_up()
    selectors = [selected for selected in map(offsets.written_apart, operations) if selected is not None]
    if not selectors or known.offset_key is None:  # else offsets lie in vectors alone
        return
    key = known.offset_key
    keys = [key, *(version.group_by for version in versions if version.group_by)]
    names = [version.vector for version in versions]
    for selected in selectors:
        records = yield from _records(
            cache, known, selected, with_payload=keys, with_vectors=names if all(names) else True
        )
        payloads = [record.payload for record in records]
        found = yield from cache.stored_offsets(known, [record.vector for record in records], payloads)
        mended = [
            offsets.offsets_of(record.id, each, manifest, getattr(selected, "shard_key", None))
            for record, each in zip(records, found, strict=True)
            if not offsets.is_held(each, (record.payload or {}).get(key))
        ]
        if mended:
            yield cache.raw.batch_update_points(known.collection, mended, wait=True)


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
