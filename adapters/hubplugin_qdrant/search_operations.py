"""The operations of a corrected client that search and read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from qdrant_client import grpc, models
from qdrant_client.conversions.conversion import GrpcToRest

from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import plain_client
from hubplugin_qdrant.cached_manifest import CachedManifest, CorrectionCache, again_if_changed
from hubplugin_qdrant.manifest import Manifest
from hubplugin_qdrant.operations import Arguments, Operation
from hubplugin_qdrant.recorded_queries import recorded
from hubplugin_qdrant.requests.arguments import as_arguments, as_request
from hubplugin_qdrant.requests.nodes import is_corrected
from hubplugin_qdrant.requests.references import Reference, references, resolved
from hubplugin_qdrant.requests.selectors import without_our_key, without_vectors
from hubplugin_qdrant.requests.trees import Rewritten, rewrite
from hubplugin_qdrant.shadow import Shadow, ShadowedSearch


@recorded
@again_if_changed
def query_points(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    if known.manifest is None:
        return (yield cache.raw.query_points(**arguments))
    request = as_request(arguments)

    def asked(corrected: list[bool]) -> Operation:
        (rewritten,) = yield from rewritten_requests(cache, known, [request], corrected)
        sent = as_arguments(arguments, rewritten.request)
        response = yield plain_client.query_points(cache.raw, sent, rewritten.request)
        return _finished(response, rewritten, request, known)

    return (yield from _answered(cache, known, [request], asked, lambda response: [_ids(response.points)]))


@recorded
@again_if_changed
def query_batch_points(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    if known.manifest is None:
        return (yield cache.raw.query_batch_points(**arguments))
    requests = [
        models.QueryRequest.model_validate(request) if isinstance(request, dict) else request
        for request in arguments["requests"]
    ]

    def asked(corrected: list[bool]) -> Operation:
        rewritten = yield from rewritten_requests(cache, known, requests, corrected)
        found = yield plain_client.query_batch_points(cache.raw, arguments, [each.request for each in rewritten])
        return [_finished(*each, known) for each in zip(found, rewritten, requests, strict=True)]

    return (yield from _answered(cache, known, requests, asked, lambda found: [_ids(each.points) for each in found]))


@recorded
@again_if_changed
def query_points_groups(cache: CorrectionCache, arguments: Arguments) -> Operation:
    known = yield from cache.lookup(arguments["collection_name"])
    if known.manifest is None:
        return (yield from _hidden_in_lookups(cache, arguments, (yield cache.raw.query_points_groups(**arguments))))
    request = as_request(arguments)  # the server multiplies the candidates by the size of a group

    def asked(corrected: list[bool]) -> Operation:
        (rewritten,) = yield from rewritten_requests(cache, known, [request], corrected)
        sent = as_arguments(arguments, rewritten.request)
        sent.pop("offset", None)
        result = yield plain_client.query_points(cache.raw, sent, rewritten.request, "query_points_groups")
        for group in result.groups:
            if rewritten.finish is not None:
                group.hits = rewritten.finish(group.hits)
            _hide_augmented_vectors(group.hits, arguments, known)
        result.groups = [group for group in result.groups if group.hits]
        return (yield from _hidden_in_lookups(cache, arguments, result))

    return (yield from _answered(cache, known, [request], asked, lambda result: [_ids(result.groups)]))


Asked: TypeAlias = Callable[[list[bool]], Operation]
"""Asks requests, each corrected or not, and returns what the client's method does."""

Found: TypeAlias = Callable[[Any], list[tuple[Any, ...]]]
"""The ids in what `Asked` returns, for each request."""


def _answered(
    cache: CorrectionCache, known: CachedManifest, requests: list[models.QueryRequest], asked: Asked, found: Found
) -> Operation:
    """What is `asked`, each request corrected or raw as this client's share and the switch have it; the shadow then
    asks the other way."""
    manifest = known.manifest or RAW
    corrected = [cache.corrects(request, manifest) for request in requests]
    response = yield from asked(corrected)
    if cache.shadow is not None and not manifest.off:
        answers = {n: ids for n, ids in enumerate(found(response)) if is_corrected(requests[n], manifest)}
        if answers:
            cache.shadow.begin(_compared(cache.shadow, known.collection, corrected, answers, asked, found))
    return response


def _compared(
    shadow: Shadow,
    collection: str,
    corrected: list[bool],
    answers: dict[int, tuple[Any, ...]],
    asked: Asked,
    found: Found,
) -> Operation:
    """Asks the other way, and reports it beside the `answers`, by number of request."""
    others = found((yield from asked([not each for each in corrected])))
    for number, answer in answers.items():
        if corrected[number]:
            shadow.report(ShadowedSearch(collection, "corrected", raw=others[number], corrected=answer))
        else:
            shadow.report(ShadowedSearch(collection, "raw", raw=answer, corrected=others[number]))


def _ids(found: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(each.id for each in found)


def corrected_request(cache: CorrectionCache, collection: str, request: models.QueryRequest) -> Operation:
    """`request` as it is sent to be answered corrected, and the manifest by which that was made."""
    known = yield from cache.lookup(collection)
    (rewritten,) = yield from rewritten_requests(cache, known, [request], [True])
    return rewritten.request, known.manifest or RAW


def rewritten_requests(
    cache: CorrectionCache, known: CachedManifest, requests: list[models.QueryRequest], corrected: list[bool]
) -> Operation:
    """`requests` as they are sent: each that is to be `corrected` rewritten, and our payload key left out of all."""
    manifests = [(known.manifest or RAW) if each else RAW for each in corrected]
    if known.augmented_vectors and any(corrected):
        requests = yield from _resolved(cache, known, requests, manifests)
    return [rewrite(*each) for each in zip(requests, manifests, strict=True)]


RAW = Manifest()
"""The manifest of a search that is not corrected."""


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


def _resolved(
    cache: CorrectionCache, known: CachedManifest, requests: list[models.QueryRequest], manifests: list[Manifest]
) -> Operation:
    """`requests` with the vectors of the points and documents that they ask for the nearest of, where that is a
    vector that their manifests correct."""
    if all(plain_client.is_vector(request.query) and not request.prefetch for request in requests):
        return requests  # at once, as most are
    requests = yield from cache.embedded_queries(list(requests))
    pairs = list(zip(requests, manifests, strict=True))
    vectors: dict[Reference, list[float]] = {}
    for reference in {found for request, manifest in pairs for found in references(request, manifest)}:
        place = reference.collection or known.collection
        found = yield cache.raw.retrieve(place, ids=[reference.point], with_payload=False, with_vectors=True)
        vector = found[0].vector if found else None
        vector = vector.get(reference.vector) if isinstance(vector, dict) else vector
        if vector is not None:
            vectors[reference] = vector
    return [resolved(request, manifest, vectors) for request, manifest in pairs]


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
