"""Rewrite a request to the corrected request, by the manifest and without any I/O.

A nearest query becomes a prefetch of more candidates, under a formula that adds the
offset:

    query=q, limit=10
    -> prefetch=[query=q, limit=100], query=formula($score + hub_offset.v1), limit=10

With storage="vector", the query searches the augmented vectors. Points that another
client wrote without an augmented vector are searched by the raw vector:

    query=q, limit=10
    -> prefetch=[query=[q, 1] using hub_v1, query=q where there is no hub_v1], sum of both

If the model has a query map, S, storage="payload" maps the query. With
storage="vector", the augmented vectors include the map, and the query stays as it is:

    query=q, limit=10
    -> prefetch=[query=q + S q, limit=100], query=formula(|q + S q| * $score + hub_offset.v1)

The factor |q + S q| is used under cosine only, where the server divides by it. Any
other query, such as a recommendation, stays raw.

Nearest queries are corrected at every depth of the tree, so that a fusion, a user's
formula or another nearest query above them gets corrected candidates and scores. A
formula ranks in descending order. So under Euclidean distance, it returns the
similarity offset - distance^2 / 2. In the answer, but not in a prefetch, the similarity
is turned back into a distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar
from uuid import UUID, uuid4

import numpy as np
from qdrant_client import models

from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin_qdrant.manifest import QdrantManifest, QdrantVersion
from hubplugin_qdrant.plain_client import Arguments, ShardKey, resolve

EMBEDDED = (models.Document, models.Image, models.InferenceObject)
"""Queries that need an embedding. The client computes it before a request is rewritten,
or else the server does."""

_ARGUMENTS = {
    "prefetch": "prefetch",
    "query": "query",
    "using": "using",
    "filter": "query_filter",
    "params": "search_params",
    "score_threshold": "score_threshold",
    "limit": "limit",
    "offset": "offset",
    "with_payload": "with_payload",
    "with_vector": "with_vectors",
    "lookup_from": "lookup_from",
}
"""The client's argument for each field of `QueryRequest`."""

_FIELDS = {argument: name for name, argument in _ARGUMENTS.items()}

_DEFAULTS = models.QueryRequest(limit=10, with_payload=True, with_vector=False)
"""The request that the client sends if only defaults are used."""


def as_request(arguments: Arguments) -> models.QueryRequest:
    """Return the arguments of `query_points` as one request.

    Raises pydantic's ValidationError for a value that a request cannot hold.
    """
    fields = {
        _FIELDS[name]: value for name, value in arguments.items() if name in _FIELDS
    }
    fields["query"] = resolve(arguments.get("query"))
    return models.QueryRequest.model_validate(_DEFAULTS.__dict__ | fields)


def as_requests(requests: Iterable[Any]) -> list[models.QueryRequest]:
    """Return the `requests` of `query_batch_points` as the plain client reads them."""
    structs = map(models.QueryRequest.model_validate, requests)
    return [each.model_copy(update={"query": resolve(each.query)}) for each in structs]


def as_arguments(arguments: Arguments, request: models.QueryRequest) -> Arguments:
    """Return `arguments` with the fields of `request` in their place."""
    fields = request.__dict__
    return arguments | {argument: fields[name] for name, argument in _ARGUMENTS.items()}


Node: TypeAlias = models.QueryRequest | models.Prefetch

AnyNode = TypeVar("AnyNode", models.QueryRequest, models.Prefetch)


def prefetches_of(node: Node) -> list[models.Prefetch]:
    """Return the prefetches of `node` as a list, which may be empty."""
    prefetch = node.prefetch or []
    return prefetch if isinstance(prefetch, list) else [prefetch]


def nodes(node: Node) -> Iterator[Node]:
    """Yield the prefetches of `node` at every depth, then `node` itself."""
    for child in prefetches_of(node):
        yield from nodes(child)
    yield node


def nearest(query: object) -> Any:
    """Return the vector, point or document that a nearest query searches for.

    A query of another kind is returned unchanged.
    """
    return query.nearest if isinstance(query, models.NearestQuery) else query


def version_for(
    query: object, using: str | None, manifest: QdrantManifest
) -> QdrantVersion | None:
    """Return the active version of `manifest` that corrects `query` on `using`.

    Return None if the vector `using` has no correction, or if `query` is not a nearest
    query (see `is_nearest`). With storage="vector", the query must also be a vector of
    the right dimension. Raises InputError if with storage="vector" the server would
    have to embed the query.
    """
    version = manifest.active.get(using or "")
    if version is None or not is_nearest(query):
        return None
    if version.storage == "payload":
        return version
    asked = nearest(query)
    refuse_embedded(asked)
    # Any other query is sent unchanged: the server refuses a vector of another
    # dimension and the id of a missing point.
    if isinstance(asked, list) and len(asked) == version.dim:
        return version
    return None


def refuse_embedded(asked: object) -> None:
    """Raise InputError if the server would have to embed the query `asked`."""
    if isinstance(asked, EMBEDDED):
        raise InputError(
            f"a {type(asked).__name__} that the server embeds cannot be corrected with "
            "storage='vector' or a query map: embed it in the client "
            "(cloud_inference=False), or apply storage='payload' without learn"
        )


def asked_point(
    request: models.QueryRequest, manifest: QdrantManifest
) -> tuple[int | str, QdrantVersion] | None:
    """Return the point id that `request` searches for by storage="vector".

    Augmented vectors can only be searched by a vector, so the caller has to replace the
    id.

    Returns:
        The id and the active version, or None for any other request.

    Raises:
        InputError: If a prefetch searches by a point id.
    """
    for node in nodes(request):
        version = manifest.active.get(node.using or "")
        point = nearest(node.query)
        is_id = isinstance(point, (int, str, UUID)) and is_nearest(node.query)
        if version is None or version.storage != "vector" or not is_id:
            continue
        if node is not request:
            raise InputError(
                f"prefetch: nearest to point {point!r}: with storage='vector', a "
                "prefetch accepts only vectors; retrieve the point and pass its vector"
            )
        return (point if isinstance(point, int) else str(point)), version
    return None


def is_nearest(query: object) -> bool:
    """Return True if `query` searches for neighbours of one vector, point or document.

    The vector must be dense. A query with diversity (MMR) does not count.
    """
    if isinstance(query, models.NearestQuery):
        return getattr(query, "mmr", None) is None and is_nearest(query.nearest)
    if isinstance(query, list):
        return not query or not isinstance(query[0], list)
    return isinstance(query, (int, str, UUID, *EMBEDDED))


def hide_key(with_payload: Any, key: str | None) -> Any:
    """Return the payload selector `with_payload` without our `key`.

    A selector that lists the keys to return is not changed. Without a `key`, no
    selector is changed.
    """
    if key is None:
        return with_payload
    if with_payload is True:
        return models.PayloadSelectorExclude(exclude=[key])
    if isinstance(with_payload, models.PayloadSelectorExclude):
        return models.PayloadSelectorExclude(exclude=[*with_payload.exclude, key])
    return with_payload


def hide_vectors(
    vector: models.VectorStructOutput | None, names: Collection[str]
) -> Any:
    """Return the vectors of a point without the augmented vectors `names`."""
    if not isinstance(vector, dict):
        return vector
    kept = {name: value for name, value in vector.items() if name not in names}
    # Without the augmented vectors, an unnamed vector is alone, and returned as such.
    return kept[""] if names and set(kept) == {""} else kept


def has_vector(name: str) -> models.HasVectorCondition:
    return models.HasVectorCondition(has_vector=name)


def nothing(shard_key: ShardKey = None) -> models.FilterSelector:
    """Return a selector that matches no point.

    A server does writes in order. So deleting with this selector and wait=True waits
    for all writes that were sent to the shards before.
    """
    return models.FilterSelector(
        filter=models.Filter(must=models.HasIdCondition(has_id=[str(uuid4())])),
        shard_key=shard_key,
    )


def lacks_augmented_vector(version: QdrantVersion) -> models.Filter:
    """Return a filter for points with the corrected vector but no augmented one."""
    return models.Filter(
        must=has_vector(version.vector), must_not=has_vector(version.augmented_vector)
    )


def has_offset(version: QdrantVersion) -> models.Filter:
    """Return a filter for points with an offset of `version` in the payload."""
    return models.Filter(
        must_not=models.IsEmptyCondition(is_empty=models.PayloadField(key=version.key))
    )


UNLISTED = 1e15
"""The absolute score of a point that a prefetch should have listed but did not. It
exceeds any real score, and its square is a finite float32."""

Points: TypeAlias = list[models.ScoredPoint]


@lru_cache
def _sum_with_key(key: str, metric: Metric, length: float) -> models.FormulaQuery:
    """Return the formula that adds the offset under the payload `key` to the score.

    A missing offset counts as 0. Scores are multiplied by `length`, the length of the
    mapped query.
    """
    similarity: models.Expression = "$score"
    if metric is Metric.EUCLIDEAN:
        similarity = models.MultExpression(mult=[-0.5, "$score", "$score"])
    elif length != 1.0:
        similarity = models.MultExpression(mult=[length, "$score"])
    total = models.SumExpression(sum=[similarity, key])
    return models.FormulaQuery(formula=total, defaults={key: 0.0})


@lru_cache
def _sum_by_either_vector(
    metric: Metric, ceiling: float, augmented_vector: str
) -> models.FormulaQuery:
    """Return the formula that combines searches by the augmented and the raw vector.

    A point with an augmented vector gets its score in the first prefetch, `$score[0]`,
    even if both prefetches list the point. If only the second one lists the point, it
    ranks behind all points of the first. A point without an augmented vector gets its
    score in the second prefetch, `$score[1]`.

    In a product, a condition counts as 1 if the point meets it, and otherwise as 0.
    Under Euclidean distance, scores are distances d, and the similarity is -d^2 / 2.
    For an augmented vector, which contains sqrt(2 (ceiling - offset)), this is raw
    similarity + offset - ceiling. So the ceiling is added.

    Args:
        metric: The metric of the collection.
        ceiling: The upper bound of the offsets, for Euclidean distance only.
        augmented_vector: The name of the augmented vector.
    """
    has = models.Filter(must=has_vector(augmented_vector))
    lacks = models.Filter(must_not=has_vector(augmented_vector))
    terms: list[list[Any]]
    if metric is Metric.EUCLIDEAN:
        terms = [
            [-0.5, "$score[0]", "$score[0]", has],
            [ceiling, has],
            [-0.5, "$score[1]", "$score[1]", lacks],
        ]
        unlisted = UNLISTED
    else:
        terms = [["$score[0]", has], ["$score[1]", lacks]]
        unlisted = -UNLISTED
    parts: list[Any] = [models.MultExpression(mult=term) for term in terms]
    return models.FormulaQuery(
        formula=models.SumExpression(sum=parts),
        defaults={"$score[0]": unlisted, "$score[1]": 0.0},
    )


Finish: TypeAlias = Callable[[Points], Points]
"""A function that turns the answer to a corrected request into the final answer."""


SERVER_LIMIT = 10
"""The server's limit for a request or prefetch without one."""


def rewrite(node: AnyNode, manifest: QdrantManifest) -> tuple[AnyNode, Finish]:
    """Correct every nearest query in `node` on a vector that `manifest` corrects.

    With storage="vector", such a query must be a vector, not an id: see `asked_point`.

    Returns:
        The corrected request or prefetch, and the function that finishes its answer.
    """
    prefetches = [rewrite(child, manifest)[0] for child in prefetches_of(node)]
    version = version_for(node.query, node.using, manifest)
    fields: dict[str, Any]
    if version is None:
        return node.model_copy(update={"prefetch": prefetches or None}), as_found
    if version.everywhere and version.metric is not Metric.EUCLIDEAN:
        # The scores of augmented vectors are corrected scores: no formula is needed.
        fields = _augment(node, prefetches, version)
        return node.model_copy(update=fields), as_found
    # Correcting reorders results, so the results before `offset` are needed, too.
    results = (node.limit or SERVER_LIMIT) + (getattr(node, "offset", None) or 0)
    if version.storage == "vector":
        candidates = _by_augmented_vector(node, prefetches, results, version)
        query = _sum_by_either_vector(
            version.metric, version.ceiling, version.augmented_vector
        )
    else:
        candidates, length = _by_raw_score(node, prefetches, results, version)
        query = _sum_with_key(version.key, version.metric, length)
    threshold = node.score_threshold
    if threshold is not None and version.metric is Metric.EUCLIDEAN:
        # Turn a distance into a similarity: the inverse of `as_distance`.
        threshold = -0.5 * threshold * abs(threshold)
    fields = {
        "prefetch": candidates,
        "query": query,
        "score_threshold": threshold,
        "using": None,
        "filter": None,
        "lookup_from": None,
    }
    return node.model_copy(update=fields), _finisher(version.metric, threshold)


def as_found(points: Points) -> Points:
    """Return `points` unchanged, for a request that needs no finish."""
    return points


def _finisher(metric: Metric, threshold: float | None) -> Finish:
    """Return the finish that turns similarities into scores of the collection.

    The finish also drops points whose corrected similarity is below `threshold`,
    because servers before 1.17 ignore the threshold of a formula.
    """
    if metric is not Metric.EUCLIDEAN and threshold is None:
        return as_found
    lowest = np.float32(-np.inf if threshold is None else threshold)

    def finish(points: Points) -> Points:
        # A server compares scores and thresholds as float32.
        points = [point for point in points if np.float32(point.score) >= lowest]
        if metric is not Metric.EUCLIDEAN:
            return points
        # Copy the points: in local mode, several groups may share one object.
        return [
            point.model_copy(update={"score": as_distance(point.score)})
            for point in points
        ]

    return finish


def as_distance(similarity: float) -> float:
    """Return the corrected distance for a corrected `similarity`.

    It is sqrt(x) with x = distance^2 - 2 offset, or -sqrt(-x) if x is negative.
    """
    return math.copysign(math.sqrt(2.0 * abs(similarity)), -similarity)


def _by_raw_score(
    node: Node, prefetches: list[models.Prefetch], results: int, version: QdrantVersion
) -> tuple[list[models.Prefetch], float]:
    """Return a prefetch of candidates by raw score, and the factor for their scores.

    The prefetch fetches enough candidates to contain the first `results` corrected
    results. If `version` has a query map, the query vector of `node` is mapped. Under
    cosine, the factor is then the length of the mapped vector, by which the server
    divides.
    """
    params = node.params or _SEARCH_PARAMS
    codes = params.quantization
    ignores_codes = codes is not None and codes.ignore is True
    # Without codes, a search finds nearly as much as an exact one.
    limit = version.candidates(results, params.exact is True or ignores_codes)
    if prefetches:
        limit = _raise_limit(prefetches, limit, version)
    query = node.query
    factor = 1.0
    if version.mapped:
        asked = nearest(query)
        refuse_embedded(asked)
        if isinstance(asked, list):
            query, factor = map_query(asked, version)
    candidates = models.Prefetch.model_construct(
        prefetch=prefetches or None,
        query=query,
        using=node.using,
        filter=node.filter,
        params=node.params,
        limit=limit,
        lookup_from=node.lookup_from,
    )
    return [candidates], factor


def _raise_limit(
    prefetches: list[models.Prefetch], limit: int, version: QdrantVersion
) -> int:
    """Return `limit`, raised to the number of points that `prefetches` return.

    A nearest query over prefetches ranks all of these points, so all of them must be
    candidates. The limit of strict mode still applies.
    """
    limit = max(limit, sum(child.limit or SERVER_LIMIT for child in prefetches))
    return min(limit, version.max_candidates or limit)


def _by_augmented_vector(
    node: Node, prefetches: list[models.Prefetch], results: int, version: QdrantVersion
) -> list[models.Prefetch]:
    """Return a search by the augmented vector, and a search by the raw vector.

    The latter finds the points that have no augmented vector. If every point has one,
    this search is omitted.
    """
    augmented = models.Prefetch.model_construct(
        filter=node.filter, limit=results, **_augment(node, prefetches, version)
    )
    if version.everywhere:
        return [augmented]
    raw = models.Prefetch.model_construct(
        query=node.query,
        using=node.using,
        filter=node.filter,
        prefetch=prefetches or None,
        params=node.params,
        limit=results,
    )
    if prefetches:
        # A filter would also apply to the prefetches and change what they return. So
        # both searches rank all of these points, and the formula picks one of the two
        # scores of each point.
        raw.limit = augmented.limit = _raise_limit(prefetches, results, version)
    else:
        is_augmented = has_vector(version.augmented_vector)
        raw.filter = models.Filter(must=node.filter, must_not=is_augmented)
    return [augmented, raw]


_SEARCH_PARAMS = models.SearchParams()
_FULL_VECTORS = models.QuantizationSearchParams(ignore=True)


def _augment(
    node: Node, prefetches: list[models.Prefetch], version: QdrantVersion
) -> dict[str, Any]:
    """Return the fields of a search for the query of `node` in d + 1 dimensions.

    The augmented query is [q, 1] or, under Euclidean distance, [q, 0]. The search
    ignores quantised codes, which lose the last component by clipping it to the range
    of the other components.
    """
    query = nearest(node.query)
    if version.metric is Metric.COSINE:
        query = as_unit(query)
    params = node.params
    if version.searches_codes:
        params = params or _SEARCH_PARAMS
        changes: dict[str, Any] = {"quantization": _FULL_VECTORS}
        if version.hnsw_ef is not None and params.hnsw_ef is None:
            changes["hnsw_ef"] = version.hnsw_ef
        params = params.model_copy(update=changes)
    last = 0.0 if version.metric is Metric.EUCLIDEAN else 1.0
    return {
        "query": [*query, last],
        "using": version.augmented_vector,
        "prefetch": prefetches or None,
        "params": params,
    }


UNIT = 1e-6
"""The deviation from length 1 that rounding to float32 may cause. A vector with at most
this deviation is not normalised again."""


def map_query(query: list[float], version: QdrantVersion) -> tuple[list[float], float]:
    """Apply the query map of `version` to `query`.

    A query of another dimension is not mapped: the server refuses it.

    Returns:
        The vector to search with, and the factor for its scores. Under cosine, the
        factor is the length of the vector, because the server divides by it. Otherwise
        it is 1.
    """
    if len(query) != version.dim:
        return query, 1.0
    if version.metric is not Metric.COSINE:
        return version.map(np.array(query, np.float32)).tolist(), 1.0
    mapped = version.map(np.array(as_unit(query), np.float32))
    return mapped.tolist(), float(np.linalg.norm(mapped))


def as_unit(vector: list[float]) -> list[float]:
    """Return `vector` scaled to unit length; a vector of zeros is not changed."""
    length = math.hypot(*vector) or 1.0
    if abs(length - 1.0) < UNIT:
        return vector
    return [value / length for value in vector]
