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
from hubplugin_qdrant.manifest import KEY, QdrantManifest
from hubplugin_qdrant.metadata import (
    CachedManifest,
    CorrectionCache,
    OnState,
    retry_on_conflict,
)
from hubplugin_qdrant.plain_client import Arguments
from hubplugin_qdrant.requests import (
    Finish,
    Node,
    as_arguments,
    as_request,
    as_requests,
    hide_key,
    hide_vectors,
    nearest,
    prefetches_of,
    rewrite,
)


@dataclass(frozen=True)
class Reference:
    """A point whose vector is the query: its id, and where it lies if not in the collection searched."""

    point: int | str
    collection: str | None
    vector: str


def references(node: Node, manifest: QdrantManifest, searched: str) -> set[Reference]:
    """The points in the tree of `node`, a request to `searched`, whose vectors must be known to rewrite it by
    `manifest`."""
    return {
        point
        for part in nodes(node)
        if (point := _reference(part, manifest, searched)) is not None
    }


def _reference(node: Node, manifest: QdrantManifest, searched: str) -> Reference | None:
    version = manifest.active.get(node.using or "")
    query = nearest(node.query)
    if (
        version is None
        or version.storage != "vector"
        or not isinstance(query, (int, str, UUID))
    ):
        return None
    point, place = query if isinstance(query, int) else str(query), node.lookup_from
    if place is None:
        return Reference(point, None, version.vector)
    return Reference(
        point,
        None if place.collection == searched else place.collection,
        place.vector or version.vector,
    )


def nodes(node: Node) -> Iterator[Node]:
    """All that is prefetched for `node`, and `node` itself."""
    for child in prefetches_of(node):
        yield from nodes(child)
    yield node


def dereference(
    request: models.QueryRequest,
    manifest: QdrantManifest,
    searched: str,
    vectors: dict[Reference, list[float]],
    by_server: bool,
) -> models.QueryRequest:
    """Puts vectors in the place of the ids in a request.

    Points of the collection that is searched are left out as they are without us: by a server of the whole request, in
    local mode of what is found at the node that asks for them.

    Args:
        request: the request.
        manifest: that of the collection.
        searched: the name of the collection.
        vectors: those of the `references` of the request.
        by_server: a server searches, not local mode.
    """
    points: list[int | str] = []

    def replace(node: Any) -> Any:
        update: dict[str, Any] = {}
        if node.prefetch is not None:
            update["prefetch"] = [replace(child) for child in prefetches_of(node)]
        reference = _reference(node, manifest, searched)
        if reference is not None and reference in vectors:
            update |= {"query": vectors[reference], "lookup_from": None}
            if reference.collection is None:
                points.append(reference.point)
                if not by_server:
                    update["filter"] = _without([reference.point], node.filter)
        return node.model_copy(update=update)

    whole: models.QueryRequest = replace(request)
    if not points or not by_server:
        return whole
    return whole.model_copy(
        update={"filter": _without(dict.fromkeys(points), whole.filter)}
    )


def _without(
    points: Iterable[int | str], condition: models.Filter | None
) -> models.Filter:
    """What meets the `condition`, but for these `points`."""
    others = models.Filter(must_not=[models.HasIdCondition(has_id=list(points))])
    return others if condition is None else models.Filter(must=[condition, others])


def record(operation: OnState) -> OnState:
    """`operation`, a search, whose queries are recorded once it has been answered."""

    @functools.wraps(operation)
    def search(
        cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
    ) -> Operation[Any]:
        recorder = cache.recorder
        if recorder is None:
            return (yield from operation(cache, cached, arguments))
        text, document = None, nearest(arguments.get("query"))
        if isinstance(
            document, models.Document
        ):  # embedded here, so that its vector is known
            (request,) = yield from cache.embed_queries([as_request(arguments)])
            text, arguments = document.text, arguments | {"query": request.query}
        answer = yield from operation(cache, cached, arguments)
        try:
            if _keeps(recorder, arguments["collection_name"], cached.collection):
                for using, query in _dense_queries(arguments):
                    recorder.within(cached.collection, using).add(query, text)
        except Exception as error:  # a search that was answered never fails
            recorder.fail(error)
        return answer

    return search


def _keeps(recorder: Recorder, *names: str) -> bool:
    """Whether `recorder` keeps the queries to the collection of these names."""
    return recorder.collections is None or not recorder.collections.isdisjoint(names)


def _dense_queries(arguments: Arguments) -> Iterator[tuple[str, Any]]:
    """The dense vectors that are asked for the nearest of, each with the vector that it searches."""
    requests = (
        as_requests(arguments["requests"])
        if "requests" in arguments
        else [as_request(arguments)]
    )
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
    """Records a click beside the queries to a vector.

    Args:
        cache: knows the recorder.
        collection_name: a collection or an alias.
        query: the query that was asked.
        target: the id of the point that was clicked.
        using: the name of the vector.
    """
    recorder = cache.recorder
    if recorder is None:
        raise InputError(
            "this client records nothing: name a folder where it is made, ",
            Parameter("record"),
        )
    try:
        if isinstance(query, models.Document):
            (request,) = yield from cache.embed_queries(
                [models.QueryRequest(query=query)]
            )
            query = request.query
        cached = yield from cache.lookup(collection_name)
        if _keeps(recorder, collection_name, cached.collection):
            recorder.within(cached.collection, using or "").click(query, target)
    except Exception as error:  # who clicked has been sent on already
        recorder.fail(error, "a click is")


@retry_on_conflict
@record
def query_points(
    cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
) -> Operation[Any]:
    finish = None
    if cached.manifest is not None:
        ((request, finish),) = yield from rewrite_requests(
            cache, cached, [as_request(arguments)]
        )
        arguments = as_arguments(arguments, request)
    response = yield Call(cache.raw.query_points, **arguments)
    yield from _hide_ours(cache, cached, response.points, arguments)
    if finish is not None:
        response.points = finish(response.points)
    return response


@retry_on_conflict
@record
def query_batch_points(
    cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
) -> Operation[Any]:
    rewritten: list[tuple[Any, Finish]] = [
        (request, None) for request in arguments["requests"]
    ]
    if cached.manifest is not None:
        rewritten = yield from rewrite_requests(
            cache, cached, as_requests(request for request, _ in rewritten)
        )
    arguments = arguments | {"requests": [request for request, _ in rewritten]}
    responses = yield Call(cache.raw.query_batch_points, **arguments)
    for response, (request, finish) in zip(responses, rewritten, strict=True):
        vectors, payload = (
            getattr(request, name, None) for name in ("with_vector", "with_payload")
        )
        shown = {"with_vectors": vectors, "with_payload": payload}
        yield from _hide_ours(cache, cached, response.points, arguments | shown)
        if finish is not None:
            response.points = finish(response.points)
    return responses


@retry_on_conflict
@record
def query_points_groups(
    cache: CorrectionCache, cached: CachedManifest, arguments: Arguments
) -> Operation[Any]:
    finish = None
    if (
        cached.manifest is not None
    ):  # the server multiplies the candidates by the size of a group
        ((request, finish),) = yield from rewrite_requests(
            cache, cached, [as_request(arguments)]
        )
        arguments = as_arguments(arguments, request)
        arguments.pop("offset", None)
        name = arguments["collection_name"]
        arguments["prefetch"] = plain_client.resolve_prefetches(
            cache.raw, name, arguments["prefetch"]
        )
    result = yield Call(cache.raw.query_points_groups, **arguments)
    if finish is not None:
        for group in result.groups:
            group.hits = finish(group.hits)
        result.groups = [group for group in result.groups if group.hits]
    yield from _hide_ours(
        cache, cached, [hit for group in result.groups for hit in group.hits], arguments
    )
    yield from _hide_in_lookups(cache, arguments.get("with_lookup"), result)
    return result


def rewrite_requests(
    cache: CorrectionCache, cached: CachedManifest, requests: list[models.QueryRequest]
) -> Operation[list[tuple[models.QueryRequest, Finish]]]:
    """Rewrites requests as they are sent: corrected, and without our payload key.

    Where a query must be a vector before, points and documents that are asked for the nearest of become their vectors.

    Args:
        cache: embeds documents and reads points.
        cached: corrects the requests.
        requests: all of one collection.

    Returns:
        Each request, and how its answer is finished.
    """
    manifest, searched = cached.manifest or QdrantManifest(), cached.collection
    is_simple = all(
        isinstance(nearest(request.query), list) and not request.prefetch
        for request in requests
    )
    if cached.needs_vectors and not is_simple:
        requests = yield from cache.embed_queries(requests)
        vectors: dict[Reference, list[float]] = {}
        for reference in {
            point
            for request in requests
            for point in references(request, manifest, searched)
        }:
            place = reference.collection or searched
            records = yield Call(
                cache.raw.retrieve,
                place,
                ids=[reference.point],
                with_payload=False,
                with_vectors=True,
            )
            vector = records[0].vector if records else None
            vector = (
                vector.get(reference.vector) if isinstance(vector, dict) else vector
            )
            if vector is not None:
                vectors[reference] = vector
        by_server = not plain_client.is_local(cache.raw)
        requests = [
            dereference(request, manifest, searched, vectors, by_server)
            for request in requests
        ]
    return [rewrite(request, manifest, cached.offset_key) for request in requests]


def retrieve(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    cached = yield from cache.lookup(arguments["collection_name"])
    records = yield Call(
        cache.raw.retrieve, **_without_key(arguments, cached.offset_key)
    )
    yield from _hide_ours(cache, cached, records, arguments)
    return records


def scroll(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    cached = yield from cache.lookup(arguments["collection_name"])
    records, next_offset = yield Call(
        cache.raw.scroll, **_without_key(arguments, cached.offset_key)
    )
    yield from _hide_ours(cache, cached, records, arguments)
    return records, next_offset


def _without_key(arguments: Arguments, key: str | None) -> Arguments:
    """`arguments` that leave our `key` out; as they are where there is none."""
    if key is None:
        return arguments
    return arguments | {
        "with_payload": hide_key(arguments.get("with_payload", True), key)
    }


def _hide_ours(
    cache: CorrectionCache,
    cached: CachedManifest,
    points: Sequence[models.ScoredPoint | models.Record],
    arguments: Arguments,
) -> Operation[None]:
    """Takes our payload key and our vectors out of received `points`, unless the `arguments` ask for them by name."""
    every_vector = arguments.get("with_vectors") is True
    key, shown = cached.offset_key or KEY, set[str]()
    every_key = isinstance(
        hide_key(arguments.get("with_payload", True), key),
        models.PayloadSelectorExclude,
    )
    for point in points:
        if every_vector and isinstance(point.vector, dict):
            shown.update(point.vector)
        if every_key and key in (point.payload or ()):
            shown.add(key)
    if shown:
        cached = yield from cache.lookup_shown(
            arguments["collection_name"], cached, shown
        )
    if not shown or cached.manifest is None:
        return
    for point in points:
        if every_vector:
            point.vector = hide_vectors(point.vector, cached.augmented_vectors)
        if every_key and cached.offset_key is not None and point.payload:
            point.payload = {
                name: value
                for name, value in point.payload.items()
                if name != cached.offset_key
            }


def _hide_in_lookups(
    cache: CorrectionCache, lookup: Any, result: models.GroupsResult
) -> Operation[None]:
    """Takes what is ours out of the points that the groups of `result` were looked up as."""
    if lookup is None:
        return
    if isinstance(lookup, grpc.WithLookup):
        lookup = GrpcToRest.convert_with_lookup(lookup)
    elif not isinstance(lookup, models.WithLookup):
        lookup = models.WithLookup.model_validate(
            {"collection": lookup} if isinstance(lookup, str) else lookup
        )
    cached = yield from cache.lookup(lookup.collection)
    arguments = {
        "collection_name": lookup.collection,
        "with_vectors": lookup.with_vectors,
    }
    payload = (
        {} if lookup.with_payload is None else {"with_payload": lookup.with_payload}
    )
    points = [group.lookup for group in result.groups if group.lookup is not None]
    yield from _hide_ours(cache, cached, points, arguments | payload)


def get_collections(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    """The answer of the client of `cache` to `arguments`, without the metadata collections."""
    response = yield Call(cache.raw.get_collections, **arguments)
    ours = {
        m.metadata_collection(collection.name) for collection in response.collections
    }
    theirs = [
        collection for collection in response.collections if collection.name not in ours
    ]
    return response.model_copy(update={"collections": theirs})


def get_collection(cache: CorrectionCache, arguments: Arguments) -> Operation[Any]:
    """The answer of the client of `cache` to `arguments`, without our vectors and our payload indexes."""
    name = arguments["collection_name"]
    cached = yield from cache.lookup(name)
    info = yield Call(cache.raw.get_collection, **arguments)
    vectors, schema = info.config.params.vectors, info.payload_schema or {}
    keys = {path.partition(".")[0] for path in schema}
    cached = yield from cache.lookup_shown(
        name, cached, {*keys, *(vectors if isinstance(vectors, dict) else ())}
    )
    if cached.manifest is None:
        return info
    schema = {
        path: index
        for path, index in schema.items()
        if path.partition(".")[0] != cached.offset_key
    }
    # As they are shown where no augmented vector has ever been beside them.
    params = info.config.params.model_copy(
        update={"vectors": hide_vectors(vectors, cached.augmented_vectors)}
    )
    config = info.config.model_copy(update={"params": params})
    return info.model_copy(update={"payload_schema": schema, "config": config})
