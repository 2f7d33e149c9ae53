"""What a corrected client does for each method, once for the sync and the async one.

A flow is a generator that yields what the plain client's methods return, and is sent their results: for the sync
client those are the results themselves, for the async one they are awaitables.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from qdrant_client import grpc, models
from qdrant_client.conversions.conversion import GrpcToRest
from qdrant_client.local.async_qdrant_local import AsyncQdrantLocal
from qdrant_client.local.qdrant_local import QdrantLocal

from hubplugin.errors import StoreError
from hubplugin.model import OffsetModel
from hubplugin_qdrant import companion, rewrite, writes
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant.errors import PASSING, Fault, fault_of
from hubplugin_qdrant.manifest import Manifest, Version

Flow = Generator[Any, Any, Any]

MANIFEST_SECONDS = 10.0
"""For how long a manifest is taken to be the current one; a change made elsewhere is noticed within it."""

PATIENCE_SECONDS = 1.0
"""When the manifest is asked for again while its collection is away for a moment."""

OFFSETS_AT_ONCE = 256
"""Points of an upload whose offsets are computed together: beyond it the time for each no longer falls."""


@dataclass
class Known:
    """What is known of a collection until `until`, for good if that is infinite: its real name, and its manifest, if it
    has one, with the names of the vectors that are ours."""

    collection: str
    manifest: Manifest | None
    until: float
    seconds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.seconds = self.manifest.seconds() if self.manifest is not None else ()


@dataclass
class Hub:
    """What a corrected client adds to the plain one, `raw`. `compute` runs a function, in a thread if it is async."""

    raw: Any
    compute: Callable[[Callable[[], Any]], Any]
    oversampling: float | None = None
    known: dict[str, Known] = field(default_factory=dict)
    fits: dict[str, OffsetModel] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def lookup(self, name: str) -> Flow:
        """What is known of the collection or alias `name`, read if it is not known or too old."""
        found = self.known.get(name)
        if found is not None and found.until > time.monotonic():
            return found
        try:
            return (yield from self._looked_up(name))
        except Exception as error:
            if fault_of(error) is Fault.OTHER:
                raise
            if found is None:
                self.warn(f"what is known of {name!r} cannot be read just now; until it can, its searches are raw here")
                found = Known(name, None, 0.0)
            self.known[name] = found
            found.until = time.monotonic() + PATIENCE_SECONDS  # what was known serves until the companion answers
            return found

    def lookup_to_upload(self, name: str) -> Flow:
        """What is known of `name`, whose second vectors were seen to be there: an upload cannot be made once more."""
        known = yield from self.lookup(name)
        active = known.manifest.active.values() if known.manifest is not None else ()
        seconds = {version.second for version in active if version.storage == "vector"}
        if seconds:
            there = (yield self.raw.get_collection(name)).config.params.vectors
            if not isinstance(there, dict) or not seconds <= set(there):
                return self.without_second(name, known)
        return known

    def without_second(self, name: str, known: Known) -> Known:
        """Takes the collection for what it is: another one than the manifest says."""
        self.warn(f"collection {name!r} has lost its second vector; it is raw here: remove and apply again")
        self.known[name] = replace(known, manifest=None)
        return self.known[name]

    def _looked_up(self, name: str) -> Flow:
        collection, manifest = name, None
        if not name.endswith(m.companion("")):
            manifest = yield from self._read(name)
            if manifest is None:
                collection = yield from self._real_name(name)
                if collection != name:
                    manifest = yield from self._read(collection)
        if manifest is not None:
            manifest = yield from self._seen(collection, manifest)
        found = Known(collection, manifest, time.monotonic() + MANIFEST_SECONDS)
        self.known[name] = found
        return found

    def _seen(self, collection: str, manifest: Manifest) -> Flow:
        """`manifest` with what is so for now: whether any point lacks its second vector, and whether there are codes.

        Without such points no search need look for them, which would take a look at every point. (A count would count
        vectors of deleted points.)
        """
        active = dict(manifest.active)
        for name, version in active.items():
            if version.storage == "vector":
                try:
                    lacking, _ = yield self.raw.scroll(
                        collection, rewrite.lacking_second(version), limit=1, with_payload=False
                    )
                except Exception as error:
                    if fault_of(error) is Fault.OTHER:
                        raise
                    lacking = True
                codes = not isinstance(self.raw._client, (QdrantLocal, AsyncQdrantLocal))
                active[name] = version.model_copy(update={"everywhere": not lacking, "codes": codes})
        return manifest.changed(active=active)

    def _read(self, collection: str) -> Flow:
        try:
            found = yield self.raw.retrieve(m.companion(collection), ids=[m.MANIFEST_ID], with_payload=True)
        except Exception as error:
            if fault_of(error) is Fault.MISSING:
                return None
            if fault_of(error) is Fault.FORBIDDEN:
                self.warn(
                    f"the api key may not read {m.companion(collection)!r}: if collection {collection!r} is corrected, "
                    "its searches are raw here; let the key read that collection, too"
                )
                return None
            raise
        try:
            return m.parse(found[0].payload or {}, collection) if found else None
        except StoreError as error:
            self.warn(f"{error}; until then its searches are raw here, and what is written gets no offsets")
            return None

    def _real_name(self, name: str) -> Flow:
        try:
            aliases = yield self.raw.get_aliases()
        except Exception as error:
            if fault_of(error) is Fault.FORBIDDEN:
                return name
            raise
        return next((alias.collection_name for alias in aliases.aliases if alias.alias_name == name), name)

    def fitted(self, known: Known) -> Flow:
        """The versions of a collection that a write must bring along, each with its model."""
        pairs: list[tuple[Version, OffsetModel]] = []
        for version in known.manifest.kept_up() if known.manifest else ():
            if version.model not in self.fits:
                found = []
                for part in companion.part_ids(version):
                    found.append((yield self.raw.retrieve(m.companion(known.collection), ids=[part])))
                self.fits[version.model] = companion.model_of(found, version, known.collection)
            pairs.append((version, self.fits[version.model]))
        return pairs

    def marks(self, known: Known, vectors: list[Any], payloads: list[Any]) -> Flow:
        fitted = yield from self.fitted(known)
        if known.manifest and writes.awaits_embedding(vectors, known.manifest):
            self.warn(
                f"collection {known.collection!r}: documents that the server embeds get no offset here; run refresh"
            )
        return (yield self.compute(lambda: writes.marks(vectors, payloads, fitted)))

    def embedded(self, objects: Any) -> Any:
        """`objects` with the documents in them embedded, as the plain client would do it."""
        if self.raw.cloud_inference or not self.raw._inference_inspector.inspect(objects):
            return objects
        size = self.raw.local_inference_batch_size
        if isinstance(objects, models.Batch):
            return next(iter(self.raw._embed_models(objects, is_query=False, batch_size=size)))
        return list(self.raw._embed_models(objects, is_query=False, batch_size=size))

    def embedded_queries(self, requests: list[models.QueryRequest]) -> Flow:
        """`requests` with the documents that they ask for the nearest of embedded, as the plain client would do it."""
        if self.raw.cloud_inference or not self.raw._inference_inspector.inspect(requests):
            return requests
        plain = [each.model_copy(update={"query": self.raw._resolve_query(each.query)}) for each in requests]
        size = self.raw.local_inference_batch_size
        return (yield self.compute(lambda: list(self.raw._embed_models(plain, is_query=True, batch_size=size))))

    def warn(self, text: str) -> None:
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, UserWarning, stacklevel=4)

    def forget(self) -> None:
        self.known.clear()


_CLIENT_NAMES = {"filter": "query_filter", "params": "search_params", "with_vector": "with_vectors"}
"""What `QueryRequest` calls otherwise than the methods of the client."""


def _again_if_changed(flow: Callable[[Hub, dict[str, Any]], Flow]) -> Callable[[Hub, dict[str, Any]], Flow]:
    """`flow`, done once more if it fails for looking for what somebody has removed meanwhile; raw, if the collection
    is another one now than the manifest says."""

    @functools.wraps(flow)
    def again(hub: Hub, given: dict[str, Any]) -> Flow:
        name = given["collection_name"]
        try:
            return (yield from flow(hub, given))
        except Exception as error:
            before = hub.known.get(name)
            if before is None or before.manifest is None or before.until == math.inf or fault_of(error) in PASSING:
                raise
            del hub.known[name]
            now = yield from hub.lookup(name)
            if now.manifest is not None and now.manifest.everything() == before.manifest.everything():
                if not any(second in str(error) for second in now.seconds):
                    raise
                hub.without_second(name, now)
        return (yield from flow(hub, given))

    return again


@_again_if_changed
def query_points(hub: Hub, given: dict[str, Any]) -> Flow:
    known = yield from hub.lookup(given["collection_name"])
    if known.manifest is None:
        return (yield hub.raw.query_points(**given))
    request = _request(given)
    if known.seconds:
        request = (yield from _resolved(hub, known, [request]))[0]
    rewritten = rewrite.rewrite(request, known.manifest, hub.oversampling)
    response = yield hub.raw.query_points(**_arguments(given, rewritten.request))
    return _finished(response, rewritten, request, known)


@_again_if_changed
def query_batch_points(hub: Hub, given: dict[str, Any]) -> Flow:
    known = yield from hub.lookup(given["collection_name"])
    if known.manifest is None:
        return (yield hub.raw.query_batch_points(**given))
    requests = [
        models.QueryRequest.model_validate(request) if isinstance(request, dict) else request
        for request in given["requests"]
    ]
    if known.seconds:
        requests = yield from _resolved(hub, known, requests)
    rewritten = [rewrite.rewrite(request, known.manifest, hub.oversampling) for request in requests]
    found = yield hub.raw.query_batch_points(**(given | {"requests": [each.request for each in rewritten]}))
    return [_finished(*each, known) for each in zip(found, rewritten, requests, strict=True)]


@_again_if_changed
def query_points_groups(hub: Hub, given: dict[str, Any]) -> Flow:
    known = yield from hub.lookup(given["collection_name"])
    if known.manifest is None:
        return (yield from _looked_up_hidden(hub, given, (yield hub.raw.query_points_groups(**given))))
    request = _request(given)  # the server multiplies the candidates by the size of a group
    if known.seconds:
        request = (yield from _resolved(hub, known, [request]))[0]
    rewritten = rewrite.rewrite(request, known.manifest, hub.oversampling)
    arguments = _arguments(given, rewritten.request)
    arguments.pop("offset", None)
    result = yield hub.raw.query_points_groups(**arguments)
    for group in result.groups:
        if rewritten.finish is not None:
            group.hits = rewritten.finish(group.hits)
        _hide_seconds(group.hits, given, known)
    return (yield from _looked_up_hidden(hub, given, result))


def _looked_up_hidden(hub: Hub, given: dict[str, Any], result: Any) -> Flow:
    """`result` with what is ours taken out of the points that its groups were looked up as."""
    lookup = given.get("with_lookup")
    if isinstance(lookup, str):
        lookup = models.WithLookup(collection=lookup)
    elif isinstance(lookup, dict):
        lookup = models.WithLookup.model_validate(lookup)
    elif isinstance(lookup, grpc.WithLookup):
        lookup = GrpcToRest.convert_with_lookup(lookup)
    if lookup is None:
        return result
    known = yield from hub.lookup(lookup.collection)
    if known.manifest is not None:
        points = [group.lookup for group in result.groups if group.lookup is not None]
        _hide_seconds(points, {"with_vectors": lookup.with_vectors}, known)
        if lookup.with_payload in (None, True) or isinstance(lookup.with_payload, models.PayloadSelectorExclude):
            for point in points:
                point.payload = {key: value for key, value in (point.payload or {}).items() if key != m.KEY}
    return result


def retrieve(hub: Hub, given: dict[str, Any]) -> Flow:
    known = yield from hub.lookup(given["collection_name"])
    records = yield hub.raw.retrieve(**_without_our_key(known, given))
    _hide_seconds(records, given, known)
    return records


def scroll(hub: Hub, given: dict[str, Any]) -> Flow:
    known = yield from hub.lookup(given["collection_name"])
    records, following = yield hub.raw.scroll(**_without_our_key(known, given))
    _hide_seconds(records, given, known)
    return records, following


@_again_if_changed
def upsert(hub: Hub, given: dict[str, Any]) -> Flow:
    known = yield from hub.lookup(given["collection_name"])
    if known.manifest is None:
        return (yield hub.raw.upsert(**given))
    points = yield hub.compute(lambda: hub.embedded(writes.as_rest(given["points"])))
    found = yield from hub.marks(known, writes.vectors_of(points), writes.payloads_of(points))
    if given.get("update_filter") is None and given.get("update_mode") is None:
        found, apart = writes.apart(points, found)
        if apart:
            listed = models.PointsList(
                points=writes.as_structs(writes.marked(points, found)), shard_key=given.get("shard_key_selector")
            )
            operations = [models.UpsertOperation(upsert=listed), *writes.set_all(apart, listed.shard_key)]
            return (yield hub.raw.batch_update_points(update_operations=operations, **_options(given)))[0]
    return (yield hub.raw.upsert(**(given | {"points": writes.marked(points, found)})))


def upload_points(hub: Hub, given: dict[str, Any]) -> Flow:
    known = yield from hub.lookup_to_upload(given["collection_name"])
    if known.manifest is None:
        return (yield hub.raw.upload_points(**given))
    fitted = yield from hub.fitted(known)

    def points() -> Any:
        for chunk in writes.chunks(given["points"], OFFSETS_AT_ONCE):
            embedded = hub.embedded(writes.as_rest(chunk))
            found = writes.marks(writes.vectors_of(embedded), writes.payloads_of(embedded), fitted)
            yield from writes.marked(embedded, found)

    return (yield hub.raw.upload_points(**(given | {"points": points()})))


def upload_collection(hub: Hub, given: dict[str, Any]) -> Flow:
    known = yield from hub.lookup_to_upload(given["collection_name"])
    if known.manifest is None:
        return (yield hub.raw.upload_collection(**given))
    fitted = yield from hub.fitted(known)
    vectors, payloads = given["vectors"], given.get("payload")
    if isinstance(vectors, dict):
        columns, shortest = vectors, min(map(len, vectors.values()))
        vectors = ({name: column[row] for name, column in columns.items()} for row in range(shortest))

    def points() -> Any:
        """Each vector and payload with its mark, ending with the shorter of the two."""
        beside = iter(payloads) if payloads is not None else itertools.repeat({})
        for chunk in writes.chunks(vectors, OFFSETS_AT_ONCE):
            embedded = hub.embedded(chunk)
            these = list(itertools.islice(beside, len(embedded)))
            found = writes.marks(embedded[: len(these)], these, fitted)
            for vector, mark, payload in zip(embedded, found, these, strict=False):
                yield writes.with_vectors(vector, mark), writes.with_offsets(payload, mark)

    marked_vectors, marked_payloads = itertools.tee(points())
    arguments = {
        "vectors": (vector for vector, _ in marked_vectors),
        "payload": (payload for _, payload in marked_payloads),
    }
    return (yield hub.raw.upload_collection(**(given | arguments)))


@_again_if_changed
def batch_update_points(hub: Hub, given: dict[str, Any]) -> Flow:
    known = yield from hub.lookup(given["collection_name"])
    if known.manifest is None:
        return (yield hub.raw.batch_update_points(**given))
    operations = yield hub.compute(lambda: hub.embedded(list(given["update_operations"])))
    return (yield from _update(hub, known, operations, given))


@_again_if_changed
def update_vectors(hub: Hub, given: dict[str, Any]) -> Flow:
    def operation() -> Any:
        points = hub.embedded(list(given["points"]))
        condition = {"update_filter": given["update_filter"]} if given.get("update_filter") is not None else {}
        update = models.UpdateVectors(points=points, shard_key=given.get("shard_key_selector"), **condition)
        return models.UpdateVectorsOperation(update_vectors=update)

    return (yield from _single(hub, given, hub.raw.update_vectors, operation))


@_again_if_changed
def delete_vectors(hub: Hub, given: dict[str, Any]) -> Flow:
    def operation() -> Any:
        selected = writes.selector_fields(given["points"], given.get("shard_key_selector"))
        return models.DeleteVectorsOperation(
            delete_vectors=models.DeleteVectors(vector=list(given["vectors"]), **selected)
        )

    return (yield from _single(hub, given, hub.raw.delete_vectors, operation))


def overwrite_payload(hub: Hub, given: dict[str, Any]) -> Flow:
    def operation() -> Any:
        selected = writes.selector_fields(given["points"], given.get("shard_key_selector"))
        return models.OverwritePayloadOperation(
            overwrite_payload=models.SetPayload(payload=given["payload"], **selected)
        )

    return (yield from _single(hub, given, hub.raw.overwrite_payload, operation))


def clear_payload(hub: Hub, given: dict[str, Any]) -> Flow:
    def operation() -> Any:
        selected = writes.selector_fields(given["points_selector"], given.get("shard_key_selector"))
        selector = models.FilterSelector if "filter" in selected else models.PointIdsList
        return models.ClearPayloadOperation(clear_payload=selector(**selected))

    return (yield from _single(hub, given, hub.raw.clear_payload, operation))


def set_payload(hub: Hub, given: dict[str, Any]) -> Flow:
    known = yield from hub.lookup(given["collection_name"])
    if known.manifest is not None:
        writes.require_free([given["key"]] if given.get("key") else given["payload"])
    return (yield hub.raw.set_payload(**given))


def delete_payload(hub: Hub, given: dict[str, Any]) -> Flow:
    known = yield from hub.lookup(given["collection_name"])
    if known.manifest is not None:
        writes.require_free(given["keys"])
    return (yield hub.raw.delete_payload(**given))


def delete_vector_name(hub: Hub, given: dict[str, Any]) -> Flow:
    """The correction of a vector goes with it: it is retired, and taken out by the next job or by `remove`."""
    result = yield hub.raw.delete_vector_name(**given)
    hub.forget()
    known = yield from hub.lookup(given["collection_name"])
    gone = [each for each in known.manifest.kept_up() if each.vector == given["vector_name"]] if known.manifest else []
    if gone:
        active = {name: version for name, version in known.manifest.active.items() if version not in gone}
        writing = known.manifest.writing if known.manifest.writing not in gone else None
        manifest = known.manifest.changed(active=active, writing=writing, retired=(*known.manifest.retired, *gone))
        yield hub.raw.upsert(m.companion(known.collection), [companion.manifest_point(manifest)])
        hub.forget()
    return result


def get_collections(hub: Hub, given: dict[str, Any]) -> Flow:
    """Those that are not companions of others."""
    found = yield hub.raw.get_collections(**given)
    ours = {m.companion(each.name) for each in found.collections}
    return found.model_copy(update={"collections": [each for each in found.collections if each.name not in ours]})


def get_collection(hub: Hub, given: dict[str, Any]) -> Flow:
    """The collection without our vectors and our payload indexes."""
    known = yield from hub.lookup(given["collection_name"])
    found = yield hub.raw.get_collection(**given)
    vectors = found.config.params.vectors
    if not isinstance(vectors, dict):
        return found if known.manifest is None else _without_our_indexes(found)
    vectors = {name: parameters for name, parameters in vectors.items() if name not in known.seconds}
    # As it is shown where no second vector has ever been beside it.
    shown = vectors[""] if set(vectors) == {""} else vectors
    params = found.config.params.model_copy(update={"vectors": shown})
    config = found.config.model_copy(update={"params": params})
    return _without_our_indexes(found.model_copy(update={"config": config}))


def _without_our_indexes(found: Any) -> Any:
    theirs = {key: index for key, index in (found.payload_schema or {}).items() if key.partition(".")[0] != m.KEY}
    return found.model_copy(update={"payload_schema": theirs})


def delete_collection(hub: Hub, given: dict[str, Any]) -> Flow:
    result = yield hub.raw.delete_collection(**given)
    yield from _forget_companion(hub, given["collection_name"])
    return result


def create_collection(hub: Hub, given: dict[str, Any]) -> Flow:
    hub.forget()
    return (yield hub.raw.create_collection(**given))


def recreate_collection(hub: Hub, given: dict[str, Any]) -> Flow:
    result = yield hub.raw.recreate_collection(**given)
    yield from _forget_companion(hub, given["collection_name"])
    return result


def update_collection_aliases(hub: Hub, given: dict[str, Any]) -> Flow:
    hub.forget()
    return (yield hub.raw.update_collection_aliases(**given))


def _forget_companion(hub: Hub, collection: str) -> Flow:
    """What belonged to a collection goes with it; another of its name starts anew."""
    hub.forget()
    if (yield hub.raw.collection_exists(m.companion(collection))):
        yield hub.raw.delete_collection(m.companion(collection))


def _without_our_key(known: Known, given: dict[str, Any]) -> dict[str, Any]:
    if known.manifest is None:
        return given
    return given | {"with_payload": rewrite.without_our_key(given.get("with_payload", True))}


def _single(hub: Hub, given: dict[str, Any], raw: Any, operation: Callable[[], Any]) -> Flow:
    known = yield from hub.lookup(given["collection_name"])
    if known.manifest is None:
        return (yield raw(**given))
    return (yield from _update(hub, known, [(yield hub.compute(operation))], given))[0]


def _update(hub: Hub, known: Known, operations: list[Any], given: dict[str, Any]) -> Flow:
    """The results of `operations`, one each, made in their order together with what must go with them."""
    for operation in operations:
        writes.check(operation)
    options = _options(given)
    pending: list[Any] = []
    asked: list[int] = []  # which of the pending ones were asked for
    results: list[Any] = []

    def flush(**also: Any) -> Flow:
        if pending:
            done = yield hub.raw.batch_update_points(update_operations=pending, **(options | also))
            results.extend(done[number] for number in asked)
            pending.clear()
            asked.clear()

    for operation in operations:
        points, selector = writes.points_of(operation), writes.wiped(operation)
        found: list[writes.Mark] = []
        if points is not None:
            if isinstance(operation, models.UpdateVectorsOperation):
                payloads = yield from _groups_of(hub, known, operation.update_vectors, flush)
            else:
                payloads = writes.payloads_of(points)
            found = yield from hub.marks(known, writes.vectors_of(points), payloads)
        kept: dict[Any, Any] = {}
        if selector is not None:
            yield from flush(wait=True)  # what is kept is what the operations before have left
            kept = yield from _kept(hub, known, selector)
        together, itself = writes.completed(operation, known.manifest or Manifest(), found, kept)
        asked.append(len(pending) + itself)
        pending.extend(together)
    yield from flush()
    return results


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Those of a write that `batch_update_points` has, too."""
    return {key: given[key] for key in ("collection_name", "wait", "ordering", "timeout") if key in given}


def _groups_of(hub: Hub, known: Known, update: models.UpdateVectors, flush: Callable[..., Flow]) -> Flow:
    """Of each point of `update` what of its payload says which group it is in, where that matters."""
    keys = [version.group_by for version in (known.manifest or Manifest()).kept_up() if version.group_by]
    if not keys:
        return [None] * len(update.points)
    yield from flush(wait=True)  # an operation before may have changed it
    ids = [point.id for point in update.points]
    options = {} if update.shard_key is None else {"shard_key_selector": update.shard_key}
    records = yield hub.raw.retrieve(known.collection, ids=ids, with_payload=keys, **options)
    payloads = {str(record.id): record.payload for record in records}
    return [payloads.get(str(point)) for point in ids]


def _kept(hub: Hub, known: Known, selector: Any) -> Flow:
    """The marks of the points that `selector` names, by id."""
    kept: dict[Any, Any] = {}
    points, condition = getattr(selector, "points", None), getattr(selector, "filter", None)
    shard_key = getattr(selector, "shard_key", None)
    options: dict[str, Any] = {"with_payload": [m.KEY]}
    options |= {} if shard_key is None else {"shard_key_selector": shard_key}
    if points is not None:
        records = yield hub.raw.retrieve(known.collection, ids=list(points), **options)
        return {record.id: record.payload[m.KEY] for record in records if (record.payload or {}).get(m.KEY)}
    following: Any = None
    limits = [version.max_candidates for version in (known.manifest or Manifest()).everything()]
    page = min(1000, *(limit for limit in limits if limit)) if any(limits) else 1000
    while True:
        records, following = yield hub.raw.scroll(
            known.collection, scroll_filter=condition, limit=page, offset=following, **options
        )
        kept |= {record.id: record.payload[m.KEY] for record in records if (record.payload or {}).get(m.KEY)}
        if following is None:
            return kept


def _request(given: dict[str, Any]) -> models.QueryRequest:
    """The arguments of `query_points` as one request."""
    fields = _fields(given)
    if any(isinstance(each, dict) for value in fields.values() for each in (value, *_items(value))):
        return models.QueryRequest.model_validate(fields)
    return _REQUEST.model_copy(update=fields)


def _items(value: Any) -> list[Any]:
    """The prefetches in a list of them."""
    return value if isinstance(value, list) and value and not isinstance(value[0], (int, float)) else []


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "prefetch": _rest(given.get("prefetch")),
        "query": _rest(given.get("query")),
        "using": given.get("using"),
        "filter": _rest(given.get("query_filter")),
        "params": _rest(given.get("search_params")),
        "score_threshold": given.get("score_threshold"),
        "limit": given.get("limit", 10),
        "offset": given.get("offset"),
        "with_payload": given.get("with_payload", True),
        "with_vector": _rest(given.get("with_vectors", False)),
        "lookup_from": _rest(given.get("lookup_from")),
    }


_REQUEST = models.QueryRequest()


_FROM_GRPC: dict[type, Callable[[Any], Any]] = {
    grpc.PointId: GrpcToRest.convert_point_id,
    grpc.PrefetchQuery: GrpcToRest.convert_prefetch_query,
    grpc.Filter: GrpcToRest.convert_filter,
    grpc.SearchParams: GrpcToRest.convert_search_params,
    grpc.LookupLocation: GrpcToRest.convert_lookup_location,
    grpc.WithVectorsSelector: GrpcToRest.convert_with_vectors_selector,
}


def _rest(value: Any) -> Any:
    """`value`, an argument of the client, in the form that a prefetch takes."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list) and value and isinstance(value[0], grpc.PrefetchQuery):
        return [_rest(each) for each in value]
    convert = _FROM_GRPC.get(type(value))
    return value if convert is None else convert(value)


def _arguments(given: dict[str, Any], request: models.QueryRequest) -> dict[str, Any]:
    """`given` with what is in `request` in the place of what was."""
    fields = (
        "prefetch",
        "query",
        "using",
        "filter",
        "params",
        "score_threshold",
        "limit",
        "offset",
        "with_payload",
        "with_vector",
        "lookup_from",
    )
    return given | {_CLIENT_NAMES.get(name, name): getattr(request, name) for name in fields}


def _resolved(hub: Hub, known: Known, requests: Any) -> Flow:
    """`requests` with the vectors of the points, and of the documents, that they ask for the nearest of."""
    manifest = known.manifest or Manifest()
    requests = yield from hub.embedded_queries(list(requests))
    vectors: dict[rewrite.Reference, list[float]] = {}
    for reference in {found for request in requests for found in rewrite.references(request, manifest)}:
        place = reference.collection or known.collection
        found = yield hub.raw.retrieve(place, ids=[reference.point], with_payload=False, with_vectors=True)
        vector = found[0].vector if found else None
        vector = vector.get(reference.vector) if isinstance(vector, dict) else vector
        if vector is not None:
            vectors[reference] = vector
    return [rewrite.resolved(request, manifest, vectors) for request in requests]


def _hide_seconds(points: Any, given: dict[str, Any], known: Known) -> None:
    """Takes our vectors out of what was just received, unless vectors were asked for by name."""
    if known.seconds and given.get("with_vectors") is True:
        for point in points:
            point.vector = rewrite.without_second(point.vector, known.seconds)


def _finished(response: Any, rewritten: rewrite.Rewritten, request: models.QueryRequest, known: Known) -> Any:
    _hide_seconds(response.points, {"with_vectors": request.with_vector}, known)
    if rewritten.finish is None:
        return response
    return response.model_copy(update={"points": rewritten.finish(response.points)})
