"""Pure: a request and the manifest in, the corrected request out.

Nothing here knows a client. A nearest query becomes a prefetch of itself, over more
candidates, under a formula that adds the offset:

    query=q, limit=10
    -> prefetch=[query=q, limit=100], query=formula($score + hub_offset.v1), limit=10

With storage="vector" it goes to the augmented vector, and for points that another
client wrote without one, to their own:

    query=q, limit=10
    -> prefetch=[query=[q, 1] using hub_v1, query=q where there is no hub_v1], sum of both

If the model has a query map, S, the first form maps the query; in the second the map
lies in the augmented vectors:

    query=q, limit=10
    -> prefetch=[query=q + S q, limit=100], query=formula(|q + S q| * $score + hub_offset.v1)

Under cosine the server divides by that length. Any other query, as a recommendation, is
raw.

Nearest queries are corrected at every depth of the tree, so that a fusion, a user's
formula or a re-scoring above gets corrected candidates and scores. A formula ranks
descending, so under Euclidean distance it yields the similarity S = offset -
distance^2 / 2, and the answer is turned into distances again.
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
"""Queries that need an embedding: by the client, before a request is rewritten, or else
by the server."""

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
"""The fields of `QueryRequest`, and the names of the client's arguments for them."""

_FIELDS = {argument: name for name, argument in _ARGUMENTS.items()}

_DEFAULTS = models.QueryRequest(limit=10, with_payload=True, with_vector=False)
"""The request that the client's methods make without arguments."""


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
    """Return the prefetches of `node` as a list, however many it has."""
    prefetch = node.prefetch or []
    return prefetch if isinstance(prefetch, list) else [prefetch]


def nodes(node: Node) -> Iterator[Node]:
    """Yield the prefetches of `node` at every depth, then `node` itself."""
    for child in prefetches_of(node):
        yield from nodes(child)
    yield node


def nearest(query: object) -> Any:
    """Return the vector, point or document that a nearest query searches for."""
    return query.nearest if isinstance(query, models.NearestQuery) else query


def version_for(
    query: object, using: str | None, manifest: QdrantManifest
) -> QdrantVersion | None:
    """Return the active version of `manifest` that corrects `query` on `using`.

    None if the vector `using` has no correction, if `query` is no nearest query (see
    `is_nearest`), or if with storage="vector" it asks for no vector of that dimension.
    Raises InputError if with storage="vector" the server is to embed it.
    """
    version = manifest.active.get(using or "")
    if version is None or not is_nearest(query):
        return None
    if version.storage == "payload":
        return version
    asked = nearest(query)
    refuse_embedded(asked)
    # The request goes on as it is, and the server refuses a vector of another dimension
    # or the id of a missing point.
    if isinstance(asked, list) and len(asked) == version.dim:
        return version
    return None


def refuse_embedded(asked: object) -> None:
    """Raise InputError if the server is to embed what is `asked` for."""
    if isinstance(asked, EMBEDDED):
        raise InputError(
            f"a {type(asked).__name__} that the server embeds cannot be searched "
            "corrected, by storage='vector' or a query map: embed it in the client "
            "(cloud_inference=False), or apply storage='payload' without learn"
        )


def asked_point(
    request: models.QueryRequest, manifest: QdrantManifest
) -> tuple[int | str, QdrantVersion] | None:
    """Return the id of the point whose nearest `request` asks for in second vectors,
    and the version of these.

    Second vectors are searched by a vector only, so the caller has to replace the id.
    None for any other request. Raises InputError if a prefetch asks so.
    """
    for node in nodes(request):
        version = manifest.active.get(node.using or "")
        point = nearest(node.query)
        is_id = isinstance(point, (int, str, UUID)) and is_nearest(node.query)
        if version is None or version.storage != "vector" or not is_id:
            continue
        if node is not request:
            raise InputError(
                f"prefetch: the nearest of point {point!r}: with storage='vector' a "
                "prefetch takes vectors only; retrieve the point and pass its vector"
            )
        return point if isinstance(point, int) else str(point), version
    return None


def is_nearest(query: object) -> bool:
    """Return True if `query` asks for the nearest of one dense vector, point or
    document, without diversity (MMR)."""
    if isinstance(query, models.NearestQuery):
        return getattr(query, "mmr", None) is None and is_nearest(query.nearest)
    if isinstance(query, list):
        return not query or not isinstance(query[0], list)
    return isinstance(query, (int, str, UUID, *EMBEDDED))


def hide_key(with_payload: Any, key: str | None) -> Any:
    """Return the payload selector `with_payload` without our `key`.

    A selector that names the keys it wants stays as it is, and so does any without a
    `key` to hide.
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
    """Return the vectors of a point without the augmented ones, called `names`."""
    if not isinstance(vector, dict):
        return vector
    theirs = {name: value for name, value in vector.items() if name not in names}
    return theirs[""] if names and set(theirs) == {""} else theirs


def has_vector(name: str) -> models.HasVectorCondition:
    return models.HasVectorCondition(has_vector=name)


def nothing(shard_key: ShardKey = None) -> models.FilterSelector:
    """Return a selector of no point.

    A server does writes in order, so deleting no point with wait=True waits for all
    writes sent to the shards before.
    """
    return models.FilterSelector(
        filter=models.Filter(must=models.HasIdCondition(has_id=[str(uuid4())])),
        shard_key=shard_key,
    )


def lacks_augmented_vector(version: QdrantVersion) -> models.Filter:
    """Return a filter for points with the vector of `version` and no augmented one."""
    return models.Filter(
        must=has_vector(version.vector), must_not=has_vector(version.augmented_vector)
    )


def has_offset(version: QdrantVersion) -> models.Filter:
    """Return a filter for points with an offset of `version` in their payload."""
    return models.Filter(
        must_not=models.IsEmptyCondition(is_empty=models.PayloadField(key=version.key))
    )


UNLISTED = 1e15
"""The score of a point that a prefetch should have listed but did not: beyond any real
score, and finite when squared."""

Points: TypeAlias = list[models.ScoredPoint]


@lru_cache
def _sum_with_key(key: str, metric: Metric, length: float) -> models.FormulaQuery:
    """Return the formula of the corrected similarity: the score plus the offset under
    the payload `key`, or plus 0 without an offset.

    Scores are multiplied by `length`, the length of the mapped query.
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
    """Return the formula of the corrected similarity by the augmented vector,
    `$score[0]`, or for a point without one by its own vector, `$score[1]`.

    A re-scoring lists a point in both prefetches. A point with an augmented vector that
    the first prefetch does not list ranks behind all points that it lists.

    ceiling: The upper bound of the offsets, by which distances to augmented vectors are
        shifted; used under Euclidean distance only.
    """
    has = models.Filter(must=has_vector(augmented_vector))
    lacks = models.Filter(must_not=has_vector(augmented_vector))
    terms: list[list[Any]] = [["$score[0]", has], ["$score[1]", lacks]]
    unlisted = -UNLISTED
    if metric is Metric.EUCLIDEAN:
        terms = [
            [-0.5, "$score[0]", "$score[0]", has],
            [ceiling, has],
            [-0.5, "$score[1]", "$score[1]", lacks],
        ]
        unlisted = UNLISTED
    parts: list[Any] = [models.MultExpression(mult=term) for term in terms]
    return models.FormulaQuery(
        formula=models.SumExpression(sum=parts),
        defaults={"$score[0]": unlisted, "$score[1]": 0.0},
    )


def similarity_threshold(threshold: float | None, metric: Metric) -> float | None:
    """Return the score `threshold` as a threshold on the corrected similarity; None
    for no threshold."""
    if threshold is None or metric is not Metric.EUCLIDEAN:
        return threshold
    return -0.5 * threshold * abs(threshold)


Finish: TypeAlias = Callable[[Points], Points]
"""Turns the answer to a corrected request into the answer to the original one."""


SERVER_LIMIT = 10
"""The limit of a request or prefetch that states none."""


def rewrite(node: AnyNode, manifest: QdrantManifest) -> tuple[AnyNode, Finish]:
    """Correct every nearest query in `node` on a vector that `manifest` corrects.

    For storage="vector" such a query must be the vector itself: see `asked_point`.

    Returns:
        The corrected request or prefetch, and the finish of its answer.
    """
    children = prefetches_of(node)
    prefetches = [rewrite(child, manifest)[0] for child in children]
    version = version_for(node.query, node.using, manifest)
    fields: dict[str, Any]
    if version is None:
        query = _over_distances(node.query, children, manifest)
        fields = {"prefetch": prefetches or None, "query": query}
        return node.model_copy(update=fields), as_found
    if version.everywhere and version.metric is not Metric.EUCLIDEAN:
        fields = _augment(node, prefetches, version)
        return node.model_copy(update=fields), as_found
    # Correcting reorders results, so those before the offset are needed, too.
    results = (node.limit or SERVER_LIMIT) + (getattr(node, "offset", None) or 0)
    if version.storage == "vector":
        candidates = _by_augmented_vector(node, prefetches, results, version)
        query = _sum_by_either_vector(
            version.metric, version.ceiling, version.augmented_vector
        )
    else:
        candidates, length = _by_raw_score(node, prefetches, results, version)
        query = _sum_with_key(version.key, version.metric, length)
    threshold = similarity_threshold(node.score_threshold, version.metric)
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
    """Return `points`, the answer to a request that needs no finish."""
    return points


def _finisher(metric: Metric, threshold: float | None) -> Finish:
    """Return the finish that turns similarities into scores of the collection.

    It drops points below `threshold`, on the corrected similarity: servers before 1.17
    ignore the threshold of a formula.
    """
    if metric is not Metric.EUCLIDEAN and threshold is None:
        return as_found
    least = np.float32(-np.inf if threshold is None else threshold)

    def finish(points: Points) -> Points:
        points = [point for point in points if np.float32(point.score) >= least]
        if metric is not Metric.EUCLIDEAN:
            return points
        # In local mode one object may be in several groups: none is changed.
        return [
            point.model_copy(update={"score": as_distance(point.score)})
            for point in points
        ]

    return finish


def as_distance(similarity: float) -> float:
    """Return sqrt(distance^2 - 2 offset); with a negative square, -sqrt(-square)."""
    return math.copysign(math.sqrt(2.0 * abs(similarity)), -similarity)


def _by_raw_score(
    node: Node, prefetches: list[models.Prefetch], results: int, version: QdrantVersion
) -> tuple[list[models.Prefetch], float]:
    """Return a prefetch of the raw query of `node`, and the factor of its scores.

    It fetches so many candidates that the first `results` corrected ones are among
    them. A vector goes through the query map of `version`, if that has one.
    """
    params = node.params or _SEARCH_PARAMS
    codes = params.quantization
    exact = params.exact is True or (codes is not None and codes.ignore is True)
    limit = version.candidates(results, exact)
    if prefetches:
        limit = _over_all(prefetches, limit, version)
    # Local mode up to 1.19.0 takes no bare id in a prefetch.
    query = node.query if isinstance(node.query, list) else resolve(node.query)
    length = 1.0
    if version.mapped:
        asked = nearest(query)
        refuse_embedded(asked)
        if isinstance(asked, list):
            query, length = map_query(asked, version)
    candidates = models.Prefetch.model_construct(
        prefetch=prefetches or None,
        query=query,
        using=node.using,
        filter=node.filter,
        params=node.params,
        limit=limit,
        lookup_from=node.lookup_from,
    )
    return [candidates], length


def _over_all(
    prefetches: list[models.Prefetch], limit: int, version: QdrantVersion
) -> int:
    """Return `limit`, raised to the number of points that `prefetches` give.

    A re-scoring ranks the points that it is given, so all of them are candidates.
    """
    limit = max(limit, sum(child.limit or SERVER_LIMIT for child in prefetches))
    return min(limit, version.max_candidates or limit)


def _by_augmented_vector(
    node: Node, prefetches: list[models.Prefetch], results: int, version: QdrantVersion
) -> list[models.Prefetch]:
    """Return the query in d + 1 dimensions, and one for points without that vector.

    The second is the query in d dimensions, which is left out if every point has the
    augmented vector.
    Over `prefetches` both queries list all points that the prefetches give: a filter
    for points that lack the vector would change what the prefetches find.
    """
    limit = results
    if prefetches and not version.everywhere:
        limit = _over_all(prefetches, results, version)
    augmented = models.Prefetch.model_construct(
        filter=node.filter, limit=limit, **_augment(node, prefetches, version)
    )
    if version.everywhere:
        return [augmented]
    condition = node.filter
    if not prefetches:
        lacking = has_vector(version.augmented_vector)
        condition = models.Filter(must=node.filter, must_not=lacking)
    plain = models.Prefetch.model_construct(
        query=node.query,
        using=node.using,
        filter=condition,
        prefetch=prefetches or None,
        params=node.params,
        limit=limit,
    )
    return [augmented, plain]


_SEARCH_PARAMS = models.SearchParams()
_FULL_VECTORS = models.QuantizationSearchParams(ignore=True)


def _augment(
    node: Node, prefetches: list[models.Prefetch], version: QdrantVersion
) -> dict[str, Any]:
    """Return the fields that search the query of `node` in d + 1 dimensions.

    It is searched as [q, 1] or, under Euclidean distance, as [q, 0].
    The search ignores quantised codes: they clip the last component to the range of the
    others, and so lose it.
    """
    query = nearest(node.query)
    if version.metric is Metric.COSINE:
        query = as_unit(query)
    params = node.params
    if version.codes:
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


def _over_distances(
    query: object, children: list[models.Prefetch], manifest: QdrantManifest
) -> Any:
    """Return `query`, adapted to its corrected `children` if it is a user's formula.

    A corrected prefetch yields similarities under Euclidean distance, and the formula
    expects distances, so they are turned back.
    """
    if not isinstance(query, models.FormulaQuery):
        return query
    names: set[str] = set()
    for number, child in enumerate(children):
        version = version_for(child.query, child.using, manifest)
        if version is not None and version.metric is Metric.EUCLIDEAN:
            names.add(f"$score[{number}]")
    if not names:
        return query
    if "$score[0]" in names:
        names.add("$score")
    defaults = dict(query.defaults or {})
    text = query.model_dump_json(include={"formula"}, exclude_none=True, by_alias=True)
    for name in names:
        text = text.replace(f'"{name}"', DISTANCE.replace("S", f'"{name}"'))
        if name in defaults:
            defaults[name] = similarity_threshold(defaults[name], Metric.EUCLIDEAN)
    formula = models.FormulaQuery.model_validate_json(text).formula
    return models.FormulaQuery.model_construct(formula=formula, defaults=defaults)


DISTANCE = (
    '{"div": {"left": {"mult": [-2.0, S]}, "by_zero_default": 0.0, '
    '"right": {"sqrt": {"abs": {"mult": [-2.0, S]}}}}}'
)
"""The expression of the distance of a similarity S: x / sqrt(|x|) with x = -2 S. This
is sqrt(x), or -sqrt(-x) where x is negative."""

UNIT = 1e-6
"""How far from 1 rounding to float32 takes the length of a unit vector: vectors as
close as that are not divided by it."""


def map_query(query: list[float], version: QdrantVersion) -> tuple[list[float], float]:
    """Map a query as `version` does.

    Returns the vector to search with, and the factor of its scores. Under cosine the
    factor is the length of the vector, by which the server divides; else it is 1. A
    query of another dimension is not mapped: the server refuses it.
    """
    if len(query) != version.dim:
        return query, 1.0
    if version.metric is not Metric.COSINE:
        return version.map(np.array(query, np.float32)).tolist(), 1.0
    mapped = version.map(np.array(as_unit(query), np.float32))
    return mapped.tolist(), float(np.linalg.norm(mapped))


def as_unit(vector: list[float]) -> list[float]:
    """Return `vector` at unit length; a vector of zeros stays as it is."""
    length = math.hypot(*vector) or 1.0
    if abs(length - 1.0) < UNIT:
        return vector
    return [value / length for value in vector]
