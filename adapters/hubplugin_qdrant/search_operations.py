"""The operations of a corrected client that search and read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from qdrant_client import grpc, models
from qdrant_client.conversions.conversion import GrpcToRest

from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import plain_client
from hubplugin_qdrant.cached_manifest import CachedManifest, CorrectionCache, again_if_changed
from hubplugin_qdrant.manifest import Manifest
from hubplugin_qdrant.operations import Arguments, Operation
from hubplugin_qdrant.requests.arguments import as_arguments, as_request
from hubplugin_qdrant.requests.references import Reference, references, resolved
from hubplugin_qdrant.requests.selectors import without_our_key, without_vectors
from hubplugin_qdrant.requests.trees import Rewritten, rewrite


@again_if_changed
def query_points(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    if known.manifest is None:
        return (yield cache.raw.query_points(**arguments))
    request = as_request(arguments)
    if known.augmented_vectors:
        request = (yield from _resolved(cache, known, [request]))[0]
    rewritten = rewrite(request, known.manifest)
    sent = as_arguments(arguments, rewritten.request)
    if sent["prefetch"]:
        sent["prefetch"] = plain_client.sendable(cache.raw, sent["prefetch"])
    response = yield cache.raw.query_points(**sent)
    return _finished(response, rewritten, request, known)


@again_if_changed
def query_batch_points(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    if known.manifest is None:
        return (yield cache.raw.query_batch_points(**arguments))
    requests = [
        models.QueryRequest.model_validate(request) if isinstance(request, dict) else request
        for request in arguments["requests"]
    ]
    if known.augmented_vectors:
        requests = yield from _resolved(cache, known, requests)
    rewritten = [rewrite(request, known.manifest) for request in requests]
    found = yield cache.raw.query_batch_points(**(arguments | {"requests": [each.request for each in rewritten]}))
    return [_finished(*each, known) for each in zip(found, rewritten, requests, strict=True)]


@again_if_changed
def query_points_groups(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    if known.manifest is None:
        return (yield from _hidden_in_lookups(cache, arguments, (yield cache.raw.query_points_groups(**arguments))))
    request = as_request(arguments)  # the server multiplies the candidates by the size of a group
    if known.augmented_vectors:
        request = (yield from _resolved(cache, known, [request]))[0]
    rewritten = rewrite(request, known.manifest)
    sent = as_arguments(arguments, rewritten.request)
    sent.pop("offset", None)
    result = yield cache.raw.query_points_groups(**sent)
    for group in result.groups:
        if rewritten.finish is not None:
            group.hits = rewritten.finish(group.hits)
        _hide_augmented_vectors(group.hits, arguments, known)
    result.groups = [group for group in result.groups if group.hits]
    return (yield from _hidden_in_lookups(cache, arguments, result))


def _hidden_in_lookups(cache: CorrectionCache, arguments: Arguments, result: Any) -> Operation:
    """`result` without our payload key and vectors in the points that its groups were looked up as."""
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
    if known.manifest is not None:
        points = [group.lookup for group in result.groups if group.lookup is not None]
        _hide_augmented_vectors(points, {"with_vectors": lookup.with_vectors}, known)
        if lookup.with_payload in (None, True) or isinstance(lookup.with_payload, models.PayloadSelectorExclude):
            for point in points:
                point.payload = {key: value for key, value in (point.payload or {}).items() if key != m.KEY}
    return result


def retrieve(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    records = yield cache.raw.retrieve(**_without_our_key(known, arguments))
    _hide_augmented_vectors(records, arguments, known)
    return records


def scroll(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    records, following = yield cache.raw.scroll(**_without_our_key(known, arguments))
    _hide_augmented_vectors(records, arguments, known)
    return records, following


def _resolved(cache: CorrectionCache, known: CachedManifest, requests: Any) -> Operation:
    """`requests` with the vectors of the points and documents that they ask for the nearest of."""
    manifest = known.manifest or Manifest()
    requests = yield from cache.embedded_queries(list(requests))
    vectors: dict[Reference, list[float]] = {}
    for reference in {found for request in requests for found in references(request, manifest)}:
        place = reference.collection or known.collection
        found = yield cache.raw.retrieve(place, ids=[reference.point], with_payload=False, with_vectors=True)
        vector = found[0].vector if found else None
        vector = vector.get(reference.vector) if isinstance(vector, dict) else vector
        if vector is not None:
            vectors[reference] = vector
    return [resolved(request, manifest, vectors) for request in requests]


def _hide_augmented_vectors(
    points: Iterable[models.ScoredPoint | models.Record], arguments: Arguments, known: CachedManifest
) -> None:
    """Takes the augmented vectors out of received `points`, unless vectors were asked for by name."""
    if known.augmented_vectors and arguments.get("with_vectors") is True:
        for point in points:
            point.vector = without_vectors(point.vector, known.augmented_vectors)


def _finished(response: Any, rewritten: Rewritten, request: models.QueryRequest, known: CachedManifest) -> Any:
    _hide_augmented_vectors(response.points, {"with_vectors": request.with_vector}, known)
    if rewritten.finish is None:
        return response
    return response.model_copy(update={"points": rewritten.finish(response.points)})


def _without_our_key(known: CachedManifest, arguments: Arguments) -> Arguments:
    if known.manifest is None:
        return arguments
    return arguments | {"with_payload": without_our_key(arguments.get("with_payload", True))}
