"""The operations of a corrected client that search and read, and what of them is recorded.

References are points whose stored vectors are the query, which must be read before a request can be rewritten.
Recorded are the dense vectors that somebody asks for the nearest of, also in prefetches. Points that are asked for by
their ids, recommendations and discoveries are documents and no queries; sparse vectors and multi-vectors have no
correction. A document in a prefetch or a batch is embedded out of sight.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import numpy as np
from qdrant_client import grpc, models
from qdrant_client.conversions.conversion import GrpcToRest

from hubplugin.errors import InputError, Parameter
from hubplugin.recording import Recorder
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import plain_client
from hubplugin_qdrant.manifest import KEY, Manifest
from hubplugin_qdrant.metadata import CachedManifest, CorrectionCache, OnState, Operation, again_if_changed
from hubplugin_qdrant.plain_client import Arguments
from hubplugin_qdrant.requests import (
    Node,
    Points,
    as_arguments,
    as_request,
    as_requests,
    nearest,
    prefetches_of,
    rewrite,
    without_our_key,
    without_vectors,
)


@dataclass(frozen=True)
class Reference:
    """A point whose vector is the query: its id, and where it lies if not in the collection searched."""

    point: int | str
    collection: str | None
    vector: str


def references(node: Node, manifest: Manifest, searched: str) -> list[Reference]:
    """The points in the tree of `node` whose vectors must be known before it can be rewritten. searched: the name of
    the collection."""
    found = [each for child in prefetches_of(node.prefetch) for each in references(child, manifest, searched)]
    reference = _reference(node, manifest, searched)
    return [*found, reference] if reference is not None else found


def dereferenced(
    request: models.QueryRequest,
    manifest: Manifest,
    searched: str,
    vectors: dict[Reference, list[float]],
    by_server: bool,
) -> models.QueryRequest:
    """`request` with the vectors of its `references` in the place of the ids.

    Points of the collection that is searched are left out as they are without us: by a server of the whole request, in
    local mode of what is found at the node that asks for them.
    """
    made: models.QueryRequest = _dereferenced(request, manifest, searched, vectors, by_server)
    if not by_server:
        return made
    found = [each for each in references(request, manifest, searched) if each in vectors]
    points = dict.fromkeys(each.point for each in found if each.collection is None)
    return made.model_copy(update={"filter": _without(points, made.filter)}) if points else made


def _dereferenced(
    node: Any, manifest: Manifest, searched: str, vectors: dict[Reference, list[float]], by_server: bool
) -> Any:
    update: dict[str, Any] = {}
    if node.prefetch is not None:
        children = prefetches_of(node.prefetch)
        update["prefetch"] = [_dereferenced(child, manifest, searched, vectors, by_server) for child in children]
    reference = _reference(node, manifest, searched)
    if reference is not None and reference in vectors:
        update |= {"query": vectors[reference], "lookup_from": None}
        if reference.collection is None and not by_server:
            update["filter"] = _without([reference.point], node.filter)
    return node.model_copy(update=update)


def _without(points: Iterable[int | str], chosen: models.Filter | None) -> models.Filter:
    """What is `chosen`, but for these `points`."""
    others = models.Filter(must_not=[models.HasIdCondition(has_id=list(points))])
    return others if chosen is None else models.Filter(must=[chosen, others])


def _reference(node: Node, manifest: Manifest, searched: str) -> Reference | None:
    version = manifest.active.get(node.using or "")
    query = nearest(node.query)
    if version is None or version.storage != "vector" or not isinstance(query, (int, str, UUID)):
        return None
    point, place = query if isinstance(query, int) else str(query), node.lookup_from
    if place is None:
        return Reference(point, None, version.vector)
    return Reference(point, None if place.collection == searched else place.collection, place.vector or version.vector)


def recorded(operation: OnState) -> OnState:
    """`operation`, a search, whose queries are recorded once it has been answered."""

    def recording(cache: CorrectionCache, known: CachedManifest, recorder: Recorder, arguments: Arguments) -> Operation:
        text, document = None, nearest(arguments.get("query"))
        if isinstance(document, models.Document):  # embedded here, so that its vector is known
            (request,) = yield from cache.embedded_queries([as_request(arguments)])
            text, arguments = document.text, arguments | {"query": request.query}
        found = yield from operation(cache, known, arguments)
        _record(recorder, known.collection, arguments, text)
        return found

    @functools.wraps(operation)
    def searched(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation:
        recorder = cache.recorder
        if recorder is None:
            return operation(cache, known, arguments)
        return recording(cache, known, recorder, arguments)

    return searched


def _record(recorder: Recorder, collection: str, arguments: Arguments, text: str | None) -> None:
    if not _keeps(recorder, arguments["collection_name"], collection):
        return
    try:
        for using, query in _dense_queries(arguments):
            recorder.within(collection, using).add(query, text)
    except Exception as error:  # a search that was answered never fails
        recorder.fail(error)


def _keeps(recorder: Recorder, *names: str) -> bool:
    """Whether `recorder` keeps the queries to the collection of these names."""
    return recorder.collections is None or not recorder.collections.isdisjoint(names)


def click(cache: CorrectionCache, collection_name: str, query: Any, target: Any, using: str | None) -> Operation:
    """Records a click beside the queries to the vector `using` of a collection."""
    recorder = cache.recorder
    if recorder is None:
        raise InputError("this client records nothing: name a folder where it is made, ", Parameter("record"))
    try:
        if isinstance(query, models.Document):
            (request,) = yield from cache.embedded_queries([models.QueryRequest(query=query)])
            query = request.query
        known = yield from cache.lookup(collection_name)
        if _keeps(recorder, collection_name, known.collection):
            recorder.within(known.collection, using or "").click(query, target)
    except Exception as error:  # who clicked has been sent on already
        recorder.fail(error, "a click is")


def _dense_queries(arguments: Arguments) -> Iterable[tuple[str, Any]]:
    if "requests" not in arguments:
        query = nearest(arguments.get("query"))
        if not arguments.get("prefetch"):
            return [(arguments.get("using") or "", query)] if _is_dense(query) else []
        return _of_node(as_request(arguments))
    return [found for request in as_requests(arguments["requests"]) for found in _of_node(request)]


def _of_node(root: Node) -> Iterator[tuple[str, Any]]:
    for node in _nodes(root):
        query = nearest(node.query)
        if _is_dense(query):
            yield node.using or "", query


def _is_dense(query: object) -> bool:
    if isinstance(query, np.ndarray):
        return query.ndim == 1
    return isinstance(query, list) and bool(query) and isinstance(query[0], (float, int))


@again_if_changed
@recorded
def query_points(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation:
    finish = None
    if known.manifest is not None:
        (rewritten,) = yield from rewritten_requests(cache, known, [as_request(arguments)])
        arguments, finish = as_arguments(arguments, rewritten.request), rewritten.finish
    response = yield cache.raw.query_points(**arguments)
    yield from _hide_ours(cache, known, response.points, arguments)
    return _finished(response, finish)


@again_if_changed
@recorded
def query_batch_points(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation:
    finishes: Iterable[Any] = itertools.repeat(None)
    if known.manifest is not None:
        rewritten = yield from rewritten_requests(cache, known, as_requests(arguments["requests"]))
        arguments = arguments | {"requests": [each.request for each in rewritten]}
        finishes = [each.finish for each in rewritten]
    found = yield cache.raw.query_batch_points(**arguments)
    for response, request in zip(found, arguments["requests"], strict=True):
        shown = {"with_vectors": request.with_vector, "with_payload": request.with_payload}
        yield from _hide_ours(cache, known, response.points, arguments | shown)
    return [_finished(*each) for each in zip(found, finishes, strict=False)]


@again_if_changed
@recorded
def query_points_groups(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation:
    finish = None
    if known.manifest is not None:  # the server multiplies the candidates by the size of a group
        (rewritten,) = yield from rewritten_requests(cache, known, [as_request(arguments)])
        arguments, finish = as_arguments(arguments, rewritten.request), rewritten.finish
        arguments.pop("offset", None)
        name = arguments["collection_name"]
        arguments["prefetch"] = plain_client.with_vectors(cache.raw, name, arguments["prefetch"])
    result = yield cache.raw.query_points_groups(**arguments)
    if finish is not None:
        for group in result.groups:
            group.hits = finish(group.hits)
        result.groups = [group for group in result.groups if group.hits]
    yield from _hide_ours(cache, known, [hit for group in result.groups for hit in group.hits], arguments)
    return (yield from _hide_in_lookups(cache, arguments, result))


def corrected_request(cache: CorrectionCache, collection: str, request: models.QueryRequest) -> Operation:
    """`request` as it is sent to be answered corrected, and the manifest by which that was made."""
    known = yield from cache.lookup(collection)
    (rewritten,) = yield from rewritten_requests(cache, known, [request])
    return rewritten.request, known.manifest


def rewritten_requests(cache: CorrectionCache, known: CachedManifest, requests: list[models.QueryRequest]) -> Operation:
    """`requests` as they are sent: corrected by what is `known`, and our payload key left out of all."""
    manifest = known.manifest or Manifest()
    if known.needs_vectors:
        requests = yield from _resolved(cache, known, requests, manifest)
    return [rewrite(request, manifest, known.offset_key) for request in requests]


def _nodes(node: Node) -> Iterator[Node]:
    """`node`, and all that is prefetched for it."""
    yield node
    for child in prefetches_of(node.prefetch):
        yield from _nodes(child)


def _hide_in_lookups(cache: CorrectionCache, arguments: Arguments, result: Any) -> Operation:
    """`result` with what is ours taken out of the points that its groups were looked up as."""
    lookup = arguments.get("with_lookup")
    if isinstance(lookup, str):
        lookup = models.WithLookup(collection=lookup)
    elif isinstance(lookup, dict):
        lookup = models.WithLookup.model_validate(lookup)
    elif isinstance(lookup, grpc.WithLookup):
        lookup = GrpcToRest.convert_with_lookup(lookup)
    if lookup is None:
        return result
    known = yield from cache.lookup(lookup.collection)
    points = [group.lookup for group in result.groups if group.lookup is not None]
    asked = {"collection_name": lookup.collection, "with_vectors": lookup.with_vectors}
    payload = {} if lookup.with_payload is None else {"with_payload": lookup.with_payload}
    yield from _hide_ours(cache, known, points, asked | payload)
    return result


def retrieve(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    records = yield cache.raw.retrieve(**_without_our_key(known, arguments))
    yield from _hide_ours(cache, known, records, arguments)
    return records


def scroll(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    records, following = yield cache.raw.scroll(**_without_our_key(known, arguments))
    yield from _hide_ours(cache, known, records, arguments)
    return records, following


def _resolved(
    cache: CorrectionCache, known: CachedManifest, requests: list[models.QueryRequest], manifest: Manifest
) -> Operation:
    """`requests` with the vectors of the points and documents that they ask for the nearest of, where that is a
    vector that `manifest` corrects."""
    if all(isinstance(nearest(request.query), list) and not request.prefetch for request in requests):
        return requests  # at once, as most are
    requests = yield from cache.embedded_queries(list(requests))
    vectors: dict[Reference, list[float]] = {}
    for reference in {found for each in requests for found in references(each, manifest, known.collection)}:
        place = reference.collection or known.collection
        found = yield cache.raw.retrieve(place, ids=[reference.point], with_payload=False, with_vectors=True)
        vector = found[0].vector if found else None
        vector = vector.get(reference.vector) if isinstance(vector, dict) else vector
        if vector is not None:
            vectors[reference] = vector
    by_server = not plain_client.is_local(cache.raw)
    return [dereferenced(each, manifest, known.collection, vectors, by_server) for each in requests]


def _hide_ours(
    cache: CorrectionCache,
    known: CachedManifest,
    points: Sequence[models.ScoredPoint | models.Record],
    asked: Arguments,
) -> Operation:
    """Takes our payload key and our vectors out of received `points`, unless they were `asked` for by name."""
    every_vector = asked.get("with_vectors") is True
    key, shown = known.offset_key or KEY, set[str]()
    every_key = isinstance(without_our_key(asked.get("with_payload", True), key), models.PayloadSelectorExclude)
    for point in points:
        if every_vector and isinstance(point.vector, dict):
            shown.update(point.vector)
        if every_key and key in (point.payload or ()):
            shown.add(key)
    if shown:
        known = yield from cache.lookup_shown(asked["collection_name"], known, shown)
    if known.manifest is None:
        return
    for point in points:
        if every_vector:
            point.vector = without_vectors(point.vector, known.augmented_vectors)
        if every_key and known.offset_key is not None and point.payload:
            point.payload = {name: value for name, value in point.payload.items() if name != known.offset_key}


def _finished(response: Any, finish: Callable[[Points], Points] | None) -> Any:
    return response if finish is None else response.model_copy(update={"points": finish(response.points)})


def _without_our_key(known: CachedManifest, arguments: Arguments) -> Arguments:
    if known.offset_key is None:
        return arguments
    return arguments | {"with_payload": without_our_key(arguments.get("with_payload", True), known.offset_key)}


def get_collections(cache: CorrectionCache, arguments: Arguments) -> Operation:
    """All but the metadata collections."""
    found = yield cache.raw.get_collections(**arguments)
    metadata_collections = {m.metadata_collection(each.name) for each in found.collections}
    return found.model_copy(
        update={"collections": [each for each in found.collections if each.name not in metadata_collections]}
    )


def get_collection(cache: CorrectionCache, arguments: Arguments) -> Operation:
    """The collection without our vectors and our payload indexes."""
    name = arguments["collection_name"]
    known = yield from cache.lookup(name)
    found = yield cache.raw.get_collection(**arguments)
    vectors = found.config.params.vectors
    keys = {key.partition(".")[0] for key in found.payload_schema or ()}
    known = yield from cache.lookup_shown(name, known, keys.union(vectors if isinstance(vectors, dict) else ()))
    if known.manifest is None:
        return found
    if not isinstance(vectors, dict):
        return _without_our_indexes(found, known.offset_key)
    vectors = {name: parameters for name, parameters in vectors.items() if name not in known.augmented_vectors}
    # As it is shown where no augmented vector has ever been beside it.
    shown = vectors[""] if set(vectors) == {""} else vectors
    params = found.config.params.model_copy(update={"vectors": shown})
    config = found.config.model_copy(update={"params": params})
    return _without_our_indexes(found.model_copy(update={"config": config}), known.offset_key)


def _without_our_indexes(found: models.CollectionInfo, key: str | None) -> models.CollectionInfo:
    if key is None:
        return found
    theirs = {name: index for name, index in (found.payload_schema or {}).items() if name.partition(".")[0] != key}
    return found.model_copy(update={"payload_schema": theirs})
