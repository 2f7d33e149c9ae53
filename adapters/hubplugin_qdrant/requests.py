"""Pure: a request and the manifest in, the corrected request out. Nothing here knows a client.

A nearest query becomes a prefetch of itself, over more candidates, under a formula that adds the offset:

    query=q, limit=10   ->   prefetch=[query=q, limit=100], query=formula($score + hub_offset.v1), limit=10

With storage="vector" it goes to the augmented vector, and for points that another client wrote without one, to
their own:

    query=q, limit=10   ->   prefetch=[query=[q, 1] using hub_v1, query=q where there is no hub_v1], sum of both

Where the model has a query map, S, the first form maps the query; in the second it lies in the augmented vectors:

    query=q, limit=10   ->   prefetch=[query=q + S q, limit=100], query=formula(|q + S q| * $score + hub_offset.v1)

Under cosine the server divides by that length. Every other query on such a vector, as a recommendation, has the vectors
in it mapped; points in it, named by their ids, are targets and stay.

This is done wherever it stands in the tree, so that a fusion, a user's formula or a re-scoring above it gets
corrected candidates and corrected scores. A formula ranks descending, so under Euclidean distance it yields the
similarity S = offset - distance^2 / 2, which is turned into a distance again in what is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import numpy as np
from pydantic import BaseModel
from qdrant_client import models

from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin.model import QueryMap
from hubplugin_qdrant.manifest import QdrantManifest, QdrantVersion
from hubplugin_qdrant.plain_client import Arguments, ShardKey, resolve

EMBEDDED = (models.Document, models.Image, models.InferenceObject)
"""What somebody embeds: the client, before a request is rewritten, or else the server."""

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
"""The fields of `QueryRequest`, and what they are called among the client's arguments."""

_FIELDS = {argument: name for name, argument in _ARGUMENTS.items()}

_DEFAULTS = models.QueryRequest(limit=10, with_payload=True, with_vector=False)
"""What the client's methods do without arguments."""


def as_request(arguments: Arguments) -> models.QueryRequest:
    """Return the arguments of `query_points` as one request; raises what pydantic
    raises for a value that a request cannot hold."""
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


def prefetches_of(node: Node) -> list[models.Prefetch]:
    """Return the prefetches of a node, which has one, or several or none."""
    prefetch = node.prefetch or []
    return prefetch if isinstance(prefetch, list) else [prefetch]


def nodes(node: Node) -> Iterator[Node]:
    """Yield all that is prefetched for `node`, and `node` itself."""
    for child in prefetches_of(node):
        yield from nodes(child)
    yield node


def nearest(query: object) -> Any:
    """Return the vector, point or document that a nearest query searches for."""
    return query.nearest if isinstance(query, models.NearestQuery) else query


def version_for(
    query: object, using: str | None, manifest: QdrantManifest
) -> QdrantVersion | None:
    """Return the active version of `manifest` that corrects `query`: a plain nearest
    query on the corrected vector `using`."""
    version = manifest.active.get(using or "")
    if version is None or not is_nearest(query):
        return None
    target = nearest(query)
    if version.storage == "payload":
        return version
    if isinstance(target, EMBEDDED):
        raise InputError(
            f"a {type(target).__name__} that the server embeds cannot be augmented for storage='vector': "
            "embed it in the client (cloud_inference=False), or apply storage='payload'"
        )
    # A vector of another dimension, or a missing point, is the server's to refuse.
    is_vector = isinstance(target, list) and len(target) == version.dim
    return version if is_vector else None


def asked_point(
    node: Node, manifest: QdrantManifest
) -> tuple[int | str, QdrantVersion] | None:
    """Return the id that `node` asks for the nearest of, and the version whose second
    vectors it would search: those take vectors only. None for any other node."""
    version = manifest.active.get(node.using or "")
    point = nearest(node.query)
    is_id = isinstance(point, (int, str, UUID)) and is_nearest(node.query)
    if version is None or version.storage != "vector" or not is_id:
        return None
    return (point if isinstance(point, int) else str(point)), version


def require_vectors(request: models.QueryRequest, manifest: QdrantManifest) -> None:
    """Raise InputError for an id in a prefetch of `request` on a second vector."""
    for child in prefetches_of(request):
        for node in nodes(child):
            if asked_point(node, manifest) is not None:
                raise InputError(
                    f"prefetch: the nearest of point {nearest(node.query)!r}: with "
                    "storage='vector' a prefetch takes vectors only; retrieve the "
                    "point and pass its vector"
                )


def is_nearest(query: object) -> bool:
    """Return whether `query` asks for the nearest of one dense vector, point or
    document, without diversity (MMR)."""
    if isinstance(query, models.NearestQuery):
        return getattr(query, "mmr", None) is None and is_nearest(query.nearest)
    if isinstance(query, list):
        return not query or not isinstance(query[0], list)
    return isinstance(query, (int, str, UUID, *EMBEDDED))


def hide_key(with_payload: object, key: str | None) -> object:
    """Return the payload selector `with_payload` without our `key`, unless it names
    the keys that it wants; None is no key."""
    if key is None:
        return with_payload
    if with_payload is True:
        return models.PayloadSelectorExclude(exclude=[key])
    if isinstance(with_payload, models.PayloadSelectorExclude):
        return models.PayloadSelectorExclude(exclude=[*with_payload.exclude, key])
    return with_payload


def hide_vectors(
    vector: models.VectorStructOutput | None, names: tuple[str, ...]
) -> Any:
    """Return the vectors of a point without the augmented ones, called `names`."""
    if not isinstance(vector, dict):
        return vector
    theirs = {name: value for name, value in vector.items() if name not in names}
    return theirs[""] if names and set(theirs) == {""} else theirs


def has_vector(name: str) -> models.HasVectorCondition:
    return models.HasVectorCondition(has_vector=name)


def nothing(shard_key: ShardKey = None) -> models.FilterSelector:
    """No point: to delete it ends when all that was sent to its shards before is done."""
    return models.FilterSelector(
        filter=models.Filter(must=models.HasIdCondition(has_id=[str(uuid4())])),
        shard_key=shard_key,
    )


def lacks_augmented_vector(version: QdrantVersion) -> models.Filter:
    """The points that have the vector of `version`, and no augmented one."""
    return models.Filter(
        must=has_vector(version.vector), must_not=has_vector(version.augmented_vector)
    )


def has_offset(version: QdrantVersion) -> models.Filter:
    """The points that have an offset of `version` in their payload."""
    return models.Filter(
        must_not=models.IsEmptyCondition(is_empty=models.PayloadField(key=version.key))
    )


UNLISTED = 1e15
"""The score of a point that a prefetch should have listed and did not: beyond any other, and finite when squared."""

Points: TypeAlias = list[models.ScoredPoint]


@lru_cache
def _sum_with_key(key: str, metric: Metric, length: float) -> models.FormulaQuery:
    """Return the corrected similarity of a candidate: its score plus its offset, or
    plus 0 without one. Scores are multiplied by `length`, of the mapped query."""
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
    """Return the corrected similarity of a point by its augmented vector, `$score[0]`,
    or, if it lacks that one, by its own, `$score[1]`.

    A re-scoring lists a point by both. A point that has an augmented vector and is not
    listed by it is worse than all that are.
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
    """Return the score `threshold` as one on the corrected similarity."""
    if threshold is None or metric is not Metric.EUCLIDEAN:
        return threshold
    return -0.5 * threshold * abs(threshold)


Finish: TypeAlias = Callable[[Points], Points]
"""Turns the points that a corrected request finds into those that were asked for."""


def rewrite(
    request: models.QueryRequest, manifest: QdrantManifest, hidden: str | None = None
) -> tuple[models.QueryRequest, Finish]:
    """Correct every nearest query in `request` on a vector that `manifest` corrects.

    For storage="vector" such a query must be the vector itself: see `asked_point`.
    The payload key `hidden` is left out of the answer.
    """
    fields, finish = _correct(request, manifest)
    fields["with_payload"] = hide_key(request.with_payload, hidden)
    return request.model_copy(update=fields), finish


SERVER_LIMIT = 10
"""The limit of a request or prefetch that states none."""


def _correct(node: Node, manifest: QdrantManifest) -> tuple[dict[str, Any], Finish]:
    """Return the fields of `node` that change, and how its answer is finished."""
    children = prefetches_of(node)
    prefetches = [
        child.model_copy(update=_correct(child, manifest)[0]) for child in children
    ]
    version = version_for(node.query, node.using, manifest)
    if version is None:
        query = map_examples(node.query, node.using, manifest)
        query = _over_distances(query, children, manifest)
        return {"prefetch": prefetches or None, "query": query}, as_found
    if version.everywhere and version.metric is not Metric.EUCLIDEAN:
        return _augment(node, prefetches, version), as_found
    # All results are needed, from the first on.
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
    return fields, _finisher(version.metric, threshold)


def as_found(points: Points) -> Points:
    """Return `points`, the answer to a request that needs no finish."""
    return points


def _finisher(metric: Metric, threshold: float | None) -> Finish:
    """Return what turns the scores of a formula into those of the collection's scale.

    `threshold` is on the corrected similarity. A server holds a formula to it from
    1.17 on; older ones ignore it, so it is applied here.
    """
    least = np.float32(-np.inf if threshold is None else threshold)

    def finish(points: Points) -> Points:
        points = [point for point in points if np.float32(point.score) >= least]
        if metric is not Metric.EUCLIDEAN:
            return points
        # In local mode one object may be in several groups: none is changed.
        return [point.model_copy(update={"score": distance(point)}) for point in points]

    def distance(point: models.ScoredPoint) -> float:
        """Return sqrt(distance^2 - 2 offset), negative where the square is."""
        return math.copysign(math.sqrt(2.0 * abs(point.score)), -point.score)

    is_unchanged = metric is not Metric.EUCLIDEAN and threshold is None
    return as_found if is_unchanged else finish


def _by_raw_score(
    node: Node, prefetches: list[models.Prefetch], results: int, version: QdrantVersion
) -> tuple[list[models.Prefetch], float]:
    """Return the raw query of `node` over as many candidates as its corrected results
    may hide among, mapped where there is a map, and the factor of its scores."""
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
        target = nearest(query)
        if isinstance(target, EMBEDDED):
            raise unmappable(target)
        if isinstance(target, list):
            query, length = map_query(target, version)
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
    """Return `limit`, or as many as `prefetches` give: a re-scoring ranks what it is
    given, so all of that is candidates."""
    limit = max(limit, sum(child.limit or SERVER_LIMIT for child in prefetches))
    return min(limit, version.max_candidates or limit)


def _by_augmented_vector(
    node: Node, prefetches: list[models.Prefetch], results: int, version: QdrantVersion
) -> list[models.Prefetch]:
    """Return the query in d + 1 dimensions and, unless every point has the augmented
    vector, the one in d dimensions among the points that lack it.

    Over prefetches both list all that these give: a filter for the lacking would
    change what these find.
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
    """Return the fields that search the query of `node` in d + 1 dimensions: as [q, 1]
    or, under Euclidean distance, as [q, 0].

    Codes are left out: they are made for the other components and lose the last one.
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
    """Return `query`; in a user's formula, similarities that corrected `children`
    yield are turned into the distances that they were."""
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
    for name in names & defaults.keys():
        defaults[name] = similarity_threshold(defaults[name], Metric.EUCLIDEAN)
    return models.FormulaQuery.model_construct(
        formula=_as_distances(query.formula, names), defaults=defaults
    )


def _as_distances(expression: models.Expression, names: set[str]) -> models.Expression:
    """Turn the similarities S called `names` in `expression` into distances:
    x / sqrt(|x|) with x = -2 S."""
    if isinstance(expression, str) and expression in names:
        square = models.MultExpression(mult=[-2.0, expression])
        root = models.SqrtExpression(sqrt=models.AbsExpression(abs=square))
        quotient = models.DivParams(left=square, right=root, by_zero_default=0.0)
        return models.DivExpression(div=quotient)
    if isinstance(expression, list):
        return [_as_distances(part, names) for part in expression]
    if not isinstance(expression, BaseModel) or isinstance(expression, models.Filter):
        return expression
    fields = expression.__dict__.items()
    parts = {name: _as_distances(value, names) for name, value in fields}
    return expression.model_copy(update=parts)


WITH_EXAMPLES = tuple(
    getattr(models, name)
    for name in (
        "NearestQuery",
        "RecommendQuery",
        "DiscoverQuery",
        "ContextQuery",
        "RelevanceFeedbackQuery",
    )
    if hasattr(models, name)  # qdrant-client 1.18 lacks the last
)
"""Queries that hold vectors, which a query map maps."""

UNIT = 1e-6
"""By how much the length of a vector may differ from 1 for it to go as it is: what its
numbers are rounded by."""


def map_query(query: list[float], version: QdrantVersion) -> tuple[list[float], float]:
    """Map a query as `version` does.

    Returns the vector to search with, and the factor of its scores: its length under
    cosine, by which the server divides. A query of another dimension is the server's
    to refuse.
    """
    if len(query) != version.dim:
        return query, 1.0
    if version.metric is not Metric.COSINE:
        return version.map(np.array(query, np.float32)).tolist(), 1.0
    mapped = version.map(np.array(as_unit(query), np.float32))
    return mapped.tolist(), float(np.linalg.norm(mapped))


def map_examples(query: Any, using: str | None, manifest: QdrantManifest) -> Any:
    """Return a `query` that is not corrected, with the vectors in it mapped if clients
    map the queries on `using`."""
    version = manifest.active.get(using or "")
    if version is None or not version.mapped or version.storage == "vector":
        return query
    if not isinstance(query, WITH_EXAMPLES):
        return query
    return _map_within(query, version.map)


def _map_within(part: Any, query_map: QueryMap) -> Any:
    """Map the vectors in `part` of a query. Each keeps its length, by which an average
    weighs it."""
    if isinstance(part, list):
        if not part or not isinstance(part[0], float):
            return [_map_within(item, query_map) for item in part]
        is_wrong = len(part) != len(query_map.step)  # the server's to refuse
        return part if is_wrong else query_map(np.array(part, np.float32)).tolist()
    if isinstance(part, EMBEDDED):
        raise unmappable(part)
    if not isinstance(part, BaseModel) or isinstance(part, models.SparseVector):
        return part
    fields = part.__dict__.items()
    return part.model_copy(
        update={name: _map_within(value, query_map) for name, value in fields}
    )


def unmappable(document: object) -> InputError:
    return InputError(
        f"a {type(document).__name__} that the server embeds cannot go through the query map of the correction: "
        "embed it in the client (cloud_inference=False), or apply without learn"
    )


def as_unit(vector: list[float]) -> list[float]:
    """Return `vector` divided by its length."""
    length = math.hypot(*vector) or 1.0
    if abs(length - 1.0) < UNIT:
        return vector
    return [value / length for value in vector]
