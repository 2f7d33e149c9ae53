"""The operations of a corrected client that search and read, and what of them is recorded.

References are points whose stored vectors are the query, which must be read before a request can be rewritten.
Recorded are the dense vectors that somebody asks for the nearest of, also in prefetches. Points that are asked for by
their ids, recommendations and discoveries are documents and no queries; sparse vectors and multi-vectors have no
correction. A document in a prefetch or a batch is embedded out of sight.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from qdrant_client import grpc, models
from qdrant_client.conversions.conversion import GrpcToRest

from hubplugin.errors import InputError, Parameter
from hubplugin.recording import Recorder
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import plain_client
from hubplugin_qdrant.calls import Call, Operation
from hubplugin_qdrant.manifest import KEY, Manifest
from hubplugin_qdrant.metadata import CachedManifest, CorrectionCache, OnState, again_if_changed
from hubplugin_qdrant.plain_client import Arguments
from hubplugin_qdrant.requests import (
    Node,
    Rewritten,
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
    found = (_reference(each, manifest, searched) for each in nodes(node))
    return [each for each in found if each is not None]


def _reference(node: Node, manifest: Manifest, searched: str) -> Reference | None:
    version = manifest.active.get(node.using or "")
    query = nearest(node.query)
    if version is None or version.storage != "vector" or not isinstance(query, (int, str, UUID)):
        return None
    point, place = query if isinstance(query, int) else str(query), node.lookup_from
    if place is None:
        return Reference(point, None, version.vector)
    return Reference(point, None if place.collection == searched else place.collection, place.vector or version.vector)


def nodes(node: Node) -> Iterator[Node]:
    """All that is prefetched for `node`, and `node` itself."""
    for child in prefetches_of(node.prefetch):
        yield from nodes(child)
    yield node


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

    def made(node: Any) -> Any:
        update: dict[str, Any] = {}
        if node.prefetch is not None:
            update["prefetch"] = [made(child) for child in prefetches_of(node.prefetch)]
        reference = _reference(node, manifest, searched)
        if reference is not None and reference in vectors:
            update |= {"query": vectors[reference], "lookup_from": None}
            if reference.collection is None and not by_server:
                update["filter"] = _without([reference.point], node.filter)
        return node.model_copy(update=update)

    whole: models.QueryRequest = made(request)
    found = references(request, manifest, searched) if by_server else []
    points = dict.fromkeys(each.point for each in found if each in vectors and each.collection is None)
    return whole.model_copy(update={"filter": _without(points, whole.filter)}) if points else whole


def _without(points: Iterable[int | str], chosen: models.Filter | None) -> models.Filter:
    """What is `chosen`, but for these `points`."""
    others = models.Filter(must_not=[models.HasIdCondition(has_id=list(points))])
    return others if chosen is None else models.Filter(must=[chosen, others])


def recorded(operation: OnState) -> OnState:
    """`operation`, a search, whose queries are recorded once it has been answered."""

    def recording(
        cache: CorrectionCache, known: CachedManifest, recorder: Recorder, arguments: Arguments
    ) -> Operation[Any]:
        text, document = None, nearest(arguments.get("query"))
        if isinstance(document, models.Document):  # embedded here, so that its vector is known
            (request,) = yield from cache.embedded_queries([as_request(arguments)])
            text, arguments = document.text, arguments | {"query": request.query}
        found = yield from operation(cache, known, arguments)
        try:
            if _keeps(recorder, arguments["collection_name"], known.collection):
                for using, query in _dense_queries(arguments):
                    recorder.within(known.collection, using).add(query, text)
        except Exception as error:  # a search that was answered never fails
            recorder.fail(error)
        return found

    @functools.wraps(operation)
    def searched(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation[Any]:
        recorder = cache.recorder
        if recorder is None:
            return operation(cache, known, arguments)
        return recording(cache, known, recorder, arguments)

    return searched


def _keeps(recorder: Recorder, *names: str) -> bool:
    """Whether `recorder` keeps the queries to the collection of these names."""
    return recorder.collections is None or not recorder.collections.isdisjoint(names)


def _dense_queries(arguments: Arguments) -> Iterator[tuple[str, Any]]:
    """The dense vectors that are asked for the nearest of, each with the vector that it searches."""
    requests = as_requests(arguments["requests"]) if "requests" in arguments else [as_request(arguments)]
    for request in requests:
        for node in nodes(request):
            query = nearest(node.query)
            if isinstance(query, list) and query and isinstance(query[0], (float, int)):
                yield node.using or "", query


def click(cache: CorrectionCache, collection_name: str, query: Any, target: Any, using: str | None) -> Operation[None]:
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


@again_if_changed
@recorded
def query_points(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation[Any]:
    finish = None
    if known.manifest is not None:
        (rewritten,) = yield from rewritten_requests(cache, known, [as_request(arguments)])
        arguments, finish = as_arguments(arguments, rewritten.request), rewritten.finish
    response = yield Call(cache.raw.query_points, **arguments)
    yield from _hide_ours(cache, known, response.points, arguments)
    return response if finish is None else response.model_copy(update={"points": finish(response.points)})


@again_if_changed
@recorded
def query_batch_points(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation[Any]:
    requests = list(arguments["requests"])
    rewritten = [Rewritten(each) for each in requests]
    if known.manifest is not None:
        rewritten = yield from rewritten_requests(cache, known, as_requests(requests))
        arguments = arguments | {"requests": [each.request for each in rewritten]}
    found = yield Call(cache.raw.query_batch_points, **arguments)
    answers = []
    for response, sent in zip(found, rewritten, strict=True):
        vectors, payload = (getattr(sent.request, name, None) for name in ("with_vector", "with_payload"))
        asked = {"with_vectors": vectors, "with_payload": payload}
        yield from _hide_ours(cache, known, response.points, arguments | asked)
        if sent.finish is not None:
            response = response.model_copy(update={"points": sent.finish(response.points)})
        answers.append(response)
    return answers


@again_if_changed
@recorded
def query_points_groups(cache: CorrectionCache, known: CachedManifest, arguments: Arguments) -> Operation[Any]:
    finish = None
    if known.manifest is not None:  # the server multiplies the candidates by the size of a group
        (rewritten,) = yield from rewritten_requests(cache, known, [as_request(arguments)])
        arguments, finish = as_arguments(arguments, rewritten.request), rewritten.finish
        arguments.pop("offset", None)
        name = arguments["collection_name"]
        arguments["prefetch"] = plain_client.with_vectors(cache.raw, name, arguments["prefetch"])
    result = yield Call(cache.raw.query_points_groups, **arguments)
    if finish is not None:
        for group in result.groups:
            group.hits = finish(group.hits)
        result.groups = [group for group in result.groups if group.hits]
    yield from _hide_ours(cache, known, [hit for group in result.groups for hit in group.hits], arguments)
    yield from _hide_in_lookups(cache, arguments.get("with_lookup"), result)
    return result


def rewritten_requests(
    cache: CorrectionCache, known: CachedManifest, requests: list[models.QueryRequest]
) -> Operation[list[Rewritten]]:
    """`requests` as they are sent: corrected by what is `known`, and our payload key left out of all."""
    manifest = known.manifest or Manifest()
    if known.needs_vectors:
        requests = yield from _resolved(cache, known, requests, manifest)
    return [rewrite(request, manifest, known.offset_key) for request in requests]


def _resolved(
    cache: CorrectionCache, known: CachedManifest, requests: list[models.QueryRequest], manifest: Manifest
) -> Operation[list[models.QueryRequest]]:
    """`requests` with the vectors of the points and documents that they ask for the nearest of, where that is a
    vector that `manifest` corrects."""
    if all(isinstance(nearest(request.query), list) and not request.prefetch for request in requests):
        return requests  # at once, as most are
    requests = yield from cache.embedded_queries(list(requests))
    vectors: dict[Reference, list[float]] = {}
    for reference in {found for each in requests for found in references(each, manifest, known.collection)}:
        place = reference.collection or known.collection
        found = yield Call(cache.raw.retrieve, place, ids=[reference.point], with_payload=False, with_vectors=True)
        vector = found[0].vector if found else None
        vector = vector.get(reference.vector) if isinstance(vector, dict) else vector
        if vector is not None:
            vectors[reference] = vector
    by_server = not plain_client.is_local(cache.raw)
    return [dereferenced(each, manifest, known.collection, vectors, by_server) for each in requests]


def retrieve(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    known = yield from cache.lookup(arguments["collection_name"])
    records = yield Call(cache.raw.retrieve, **_without_our_key(known, arguments))
    yield from _hide_ours(cache, known, records, arguments)
    return records


def scroll(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    known = yield from cache.lookup(arguments["collection_name"])
    records, following = yield Call(cache.raw.scroll, **_without_our_key(known, arguments))
    yield from _hide_ours(cache, known, records, arguments)
    return records, following


def _without_our_key(known: CachedManifest, arguments: Arguments) -> Arguments:
    if known.offset_key is None:
        return arguments
    return arguments | {"with_payload": without_our_key(arguments.get("with_payload", True), known.offset_key)}


def _hide_ours(
    cache: CorrectionCache,
    known: CachedManifest,
    points: Sequence[models.ScoredPoint | models.Record],
    asked: Arguments,
) -> Operation[None]:
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
    if not shown or known.manifest is None:
        return
    for point in points:
        if every_vector:
            point.vector = without_vectors(point.vector, known.augmented_vectors)
        if every_key and known.offset_key is not None and point.payload:
            point.payload = {name: value for name, value in point.payload.items() if name != known.offset_key}


def _hide_in_lookups(cache: CorrectionCache, lookup: Any, result: models.GroupsResult) -> Operation[None]:
    """Takes what is ours out of the points that the groups of `result` were looked up as."""
    if lookup is None:
        return
    if isinstance(lookup, grpc.WithLookup):
        lookup = GrpcToRest.convert_with_lookup(lookup)
    elif not isinstance(lookup, models.WithLookup):
        lookup = models.WithLookup.model_validate({"collection": lookup} if isinstance(lookup, str) else lookup)
    known = yield from cache.lookup(lookup.collection)
    asked = {"collection_name": lookup.collection, "with_vectors": lookup.with_vectors}
    payload = {} if lookup.with_payload is None else {"with_payload": lookup.with_payload}
    points = [group.lookup for group in result.groups if group.lookup is not None]
    yield from _hide_ours(cache, known, points, asked | payload)


def get_collections(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    """All but the metadata collections."""
    found = yield Call(cache.raw.get_collections, **arguments)
    ours = {m.metadata_collection(each.name) for each in found.collections}
    return found.model_copy(update={"collections": [each for each in found.collections if each.name not in ours]})


def get_collection(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    """The collection without our vectors and our payload indexes."""
    name = arguments["collection_name"]
    known = yield from cache.lookup(name)
    found = yield Call(cache.raw.get_collection, **arguments)
    vectors = found.config.params.vectors
    keys = {key.partition(".")[0] for key in found.payload_schema or ()}
    known = yield from cache.lookup_shown(name, known, {*keys, *(vectors if isinstance(vectors, dict) else ())})
    if known.manifest is None:
        return found
    schema = {
        key: index for key, index in (found.payload_schema or {}).items() if key.partition(".")[0] != known.offset_key
    }
    # As they are shown where no augmented vector has ever been beside them.
    params = found.config.params.model_copy(update={"vectors": without_vectors(vectors, known.augmented_vectors)})
    config = found.config.model_copy(update={"params": params})
    return found.model_copy(update={"payload_schema": schema, "config": config})
