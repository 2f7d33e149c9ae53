"""The operations of a corrected client that search, read and record.

Recording keeps the dense vectors of nearest-neighbour queries, also in prefetches. It
leaves out searches by point id, recommendations and discoveries, which start from
documents and not from queries, and sparse vectors and multi-vectors, which have no
correction. Documents in a prefetch or a batch are not recorded either, because their
vectors are not seen here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from qdrant_client import models

from hubplugin.errors import InputError, Parameter
from hubplugin.recording import Recorder, as_target_id
from hubplugin.store import Explanation
from hubplugin_qdrant import plain_client
from hubplugin_qdrant.calls import Call, Computing, Operation
from hubplugin_qdrant.metadata import (
    CachedManifest,
    CorrectionCache,
    OfClient,
    corrected,
)
from hubplugin_qdrant.plain_client import Arguments
from hubplugin_qdrant.requests import (
    Finish,
    as_arguments,
    as_request,
    as_requests,
    asked_point,
    hide_key,
    hide_vectors,
    nearest,
    nodes,
    rewrite,
)


def record(operation: OfClient) -> OfClient:
    """Return the search `operation` with recording of answered queries."""

    def search(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
        recorder = cache.recorder
        if recorder is None:
            return (yield from operation(cache, arguments))
        text = None
        document = nearest(arguments.get("query"))
        if isinstance(document, models.Document):
            # Embed the document here, to see the vector.
            vector = yield from _embed(cache, document)
            text = document.text
            arguments = arguments | {"query": vector}
        answer = yield from operation(cache, arguments)
        try:
            name = arguments["collection_name"]
            cached = yield from cache.lookup(name)
            if _keeps(recorder, name, cached.collection):
                for using, query in _dense_queries(arguments):
                    recorder.within(cached.collection, using).add(query, text)
        except Exception as error:  # a failed recording must not fail the search
            recorder.fail(error)
        return answer

    return search


def _embed(cache: CorrectionCache, document: models.Document) -> Operation[Any]:
    """Return `document` embedded by the client of `cache`."""
    request = models.QueryRequest(query=document)
    (embedded,) = yield Computing(plain_client.embed, cache.raw, [request])
    return embedded.query


def _keeps(recorder: Recorder, *names: str) -> bool:
    """Return True if `recorder` keeps queries to a collection with one of `names`."""
    return recorder.collections is None or not recorder.collections.isdisjoint(names)


def _dense_queries(arguments: Arguments) -> Iterator[tuple[str, Any]]:
    """Yield the dense query vectors of a search, each after the name of its vector."""
    batch = arguments.get("requests")
    requests = [as_request(arguments)] if batch is None else as_requests(batch)
    for request in requests:
        for node in nodes(request):
            query = nearest(node.query)
            if isinstance(query, list) and query and isinstance(query[0], (float, int)):
                yield node.using or "", query


def click(
    cache: CorrectionCache,
    collection_name: str,
    query: Any,
    target: Any,
    using: str | None,
) -> Operation[None]:
    """Record that `target`, a point id, was clicked in the answer to `query`."""
    recorder = cache.recorder
    if recorder is None:
        raise InputError(
            "this client records nothing: pass a folder when you create it, ",
            Parameter("record"),
        )
    try:
        if isinstance(query, models.Document):
            query = nearest((yield from _embed(cache, query)))
        cached = yield from cache.lookup(collection_name)
        if _keeps(recorder, collection_name, cached.collection):
            place = cached.collection
            ids = [as_target_id(target)]
            if not (yield Call(cache.raw.retrieve, place, ids, with_payload=False)):
                raise InputError(
                    f"the clicked id is not a point of {collection_name!r}"
                )
            recorder.within(place, using or "").click(query, target)
    except Exception as error:  # a failed recording must not stop the user
        recorder.fail(error, "a click is")


@record
@corrected
def query_points(
    cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
) -> Operation[Any]:
    arguments, finish = yield from _rewrite_arguments(cache, cached, arguments)
    response = yield Call(cache.raw.query_points, **arguments)
    response.points = finish(response.points)
    return response


@record
@corrected
def query_points_groups(
    cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
) -> Operation[Any]:
    # The server multiplies the candidates by the size of the groups, so no more are
    # needed here.
    arguments, finish = yield from _rewrite_arguments(cache, cached, arguments)
    del arguments["offset"]  # `query_points_groups` has no offset
    result = yield Call(cache.raw.query_points_groups, **arguments)
    for group in result.groups:
        group.hits = finish(group.hits)
    result.groups = [group for group in result.groups if group.hits]
    return result


@record
@corrected
def query_batch_points(
    cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
) -> Operation[Any]:
    requests = as_requests(arguments["requests"])
    rewritten = yield from rewrite_requests(cache, cached, requests)
    arguments = arguments | {"requests": [request for request, _ in rewritten]}
    responses = yield Call(cache.raw.query_batch_points, **arguments)
    for response, (_, finish) in zip(responses, rewritten, strict=True):
        response.points = finish(response.points)
    return responses


def _rewrite_arguments(
    cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
) -> Operation[tuple[Arguments, Finish]]:
    """Rewrite the `arguments` of a single query, as `rewrite_requests` does."""
    requests = [as_request(arguments)]
    ((request, finish),) = yield from rewrite_requests(cache, cached, requests)
    return as_arguments(arguments, request), finish


def rewrite_requests(
    cache: CorrectionCache, cached: CachedManifest, requests: list[models.QueryRequest]
) -> Operation[list[tuple[models.QueryRequest, Finish]]]:
    """Correct `requests` to one collection, and hide offsets from the answers.

    If the correction needs query vectors, documents and point ids are first replaced by
    their vectors.

    Returns:
        Each rewritten request, and the function that finishes its answer.
    """
    # A vector without prefetches needs no embedding, and no point id is replaced.
    is_simple = all(
        isinstance(nearest(request.query), list) and not request.prefetch
        for request in requests
    )
    if cached.needs_vectors and not is_simple:
        embedded = yield Computing(plain_client.embed, cache.raw, requests)
        requests = []
        for request in embedded:
            requests.append((yield from _replace_point_id(cache, cached, request)))
    rewritten = []
    for request in requests:
        if plain_client.is_local(cache.raw):
            _require_dimensions(request, cached)
        sent, finish = rewrite(request, cached.manifest_or_empty)
        sent.with_payload = hide_key(request.with_payload, cached.offset_key)
        if request.with_vector is True and cached.augmented_vectors:
            finish = _then_hide_vectors(cached, finish)
        rewritten.append((sent, finish))
    return rewritten


def _require_dimensions(request: models.QueryRequest, cached: CachedManifest) -> None:
    """Raise InputError if a query vector has other dimensions than a corrected vector.

    Local mode would only name the shapes of two arrays. A server names the dimensions.
    """
    version = cached.manifest_or_empty.active.get(request.using or "")
    query = nearest(request.query)
    if version is None or not isinstance(query, list) or len(query) == version.dim:
        return
    raise InputError(
        f"the query has {len(query)} dimensions, vector {version.vector!r} of "
        f"collection {cached.collection!r} has {version.dim}; embed the query with the "
        "collection's model"
    )


def _then_hide_vectors(cached: CachedManifest, finish: Finish) -> Finish:
    """Return `finish`, extended to remove the augmented vectors."""
    return lambda points: _hide_ours(cached, finish(points), with_vectors=True)


def _replace_point_id(
    cache: CorrectionCache, cached: CachedManifest, request: models.QueryRequest
) -> Operation[models.QueryRequest]:
    """Replace a point id in the query of `request` by the vector of the point.

    As on a server, a point of the searched collection is excluded from the answer.
    """
    asked = asked_point(request, cached.manifest_or_empty)
    if asked is None:
        return request
    point, version = asked
    place = request.lookup_from or models.LookupLocation(collection=cached.collection)
    records = yield Call(
        cache.raw.retrieve,
        place.collection,
        ids=[point],
        with_payload=False,
        with_vectors=True,
    )
    vector = records[0].vector if records else None
    if isinstance(vector, dict):
        vector = vector.get(place.vector or version.vector)
    if vector is None:  # the server refuses the request
        return request
    condition = request.filter
    if place.collection == cached.collection:
        itself = models.HasIdCondition(has_id=[point])
        condition = models.Filter(must=condition, must_not=itself)
    return request.model_copy(
        update={"query": vector, "lookup_from": None, "filter": condition}
    )


def explain(
    raw: Any, collection: str, request: models.QueryRequest
) -> Operation[Explanation]:
    """Return the corrected `request` as other clients would have to send it.

    docs/other-clients.md explains the numbers in it, and the differences with Euclidean
    distance and with a query map.
    """
    cache = CorrectionCache(raw)
    cached = yield from cache.lookup(collection)
    ((sent, _),) = yield from rewrite_requests(cache, cached, [request])
    fields = sent.model_dump_json(
        exclude_none=True, exclude_defaults=True, by_alias=True
    )
    # Local mode has no server: show the default address of one.
    server = getattr(raw._client, "rest_uri", "http://localhost:6333").rstrip("/")
    path = f"/collections/{collection}/points/query"
    quoted = fields.replace("'", "'\\''")
    lines = [
        f"curl -X POST {server}{path}",
        "  -H 'Content-Type: application/json'",
        f"  -d '{quoted}'",
    ]
    if "QDRANT_API_KEY" in os.environ:
        lines.insert(2, '  -H "api-key: $QDRANT_API_KEY"')
    as_json = {"method": "POST", "path": path, "body": json.loads(fields)}
    return Explanation(" \\\n".join(lines), as_json)


def retrieve(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    cached = yield from cache.lookup(arguments["collection_name"])
    records = yield Call(cache.raw.retrieve, **_without_key(cached, arguments))
    return _hide_ours(cached, records, arguments.get("with_vectors"))


def scroll(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    cached = yield from cache.lookup(arguments["collection_name"])
    records, next_offset = yield Call(
        cache.raw.scroll, **_without_key(cached, arguments)
    )
    return _hide_ours(cached, records, arguments.get("with_vectors")), next_offset


def _without_key(cached: CachedManifest, arguments: Arguments) -> Arguments:
    """Return `arguments` with a payload selector that excludes our key."""
    selector = hide_key(arguments.get("with_payload", True), cached.offset_key)
    return arguments | {"with_payload": selector}


def _hide_ours(cached: CachedManifest, points: list[Any], with_vectors: object) -> Any:
    """Return `points` without augmented vectors.

    Unless `with_vectors` asks for all vectors, the points have none.
    """
    if with_vectors is True and cached.augmented_vectors:
        for point in points:
            point.vector = hide_vectors(point.vector, cached.augmented_vectors)
    return points


def get_collection(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    """Describe a collection without augmented vectors and indexes on offsets."""
    cached = yield from cache.lookup(arguments["collection_name"])
    info = yield Call(cache.raw.get_collection, **arguments)
    schema = {
        path: index
        for path, index in info.payload_schema.items()
        if path.partition(".")[0] != cached.offset_key
    }
    vectors = hide_vectors(info.config.params.vectors, cached.augmented_vectors)
    params = info.config.params.model_copy(update={"vectors": vectors})
    config = info.config.model_copy(update={"params": params})
    return info.model_copy(update={"payload_schema": schema, "config": config})
