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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import numpy as np
from pydantic import BaseModel
from qdrant_client import grpc, models
from qdrant_client.conversions.conversion import GrpcToRest

from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin_qdrant import plain_client
from hubplugin_qdrant.manifest import Manifest, Version
from hubplugin_qdrant.plain_client import Arguments, ShardKey, changed, resolved
from hubplugin_qdrant.query_maps import EMBEDDED, mapped, unit, unmappable, with_mapped_examples

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
    """The arguments of `query_points` as one request. Raises what the plain client raises for a query that is none, and
    InputError for a limit or an offset that is no whole number."""
    fields = {"query": plain_client.resolved(arguments.get("query"))}
    for name, value in arguments.items():
        if name in _FIELDS and name != "query":
            fields[_FIELDS[name]] = _rest(value) if isinstance(value, (list, *_FROM_GRPC)) else value
    for name in ("limit", "offset"):
        if isinstance(value := fields.get(name), (float, np.floating)):
            if not value.is_integer():
                raise InputError(f"{name}={value!r}: expected a whole number")
            fields[name] = int(value)
    prefetch = fields.get("prefetch")
    if dict in map(type, fields.values()) or (isinstance(prefetch, list) and dict in map(type, prefetch)):
        return models.QueryRequest.model_validate({**_DEFAULTS.__dict__, **fields})
    return plain_client.changed(_DEFAULTS, fields)


def as_requests(given: Iterable[Any]) -> list[models.QueryRequest]:
    """The `requests` of `query_batch_points`, as the plain client understands them."""
    requests = [models.QueryRequest.model_validate(each) if isinstance(each, dict) else each for each in given]
    return [plain_client.changed(each, {"query": plain_client.resolved(each.query)}) for each in requests]


_FROM_GRPC: dict[type, Callable[..., object]] = {
    grpc.PrefetchQuery: GrpcToRest.convert_prefetch_query,
    grpc.Filter: GrpcToRest.convert_filter,
    grpc.SearchParams: GrpcToRest.convert_search_params,
    grpc.LookupLocation: GrpcToRest.convert_lookup_location,
    grpc.WithVectorsSelector: GrpcToRest.convert_with_vectors_selector,
}


def _rest(value: object) -> Any:
    """`value`, an argument of the client, in the form that a prefetch takes."""
    if isinstance(value, list):
        return [_rest(each) for each in value]
    convert = _FROM_GRPC.get(type(value))
    return value if convert is None else convert(value)


def as_arguments(arguments: Arguments, request: models.QueryRequest) -> Arguments:
    """`arguments` with the fields of `request` in their place."""
    made, fields = dict(arguments), request.__dict__
    for name, argument in _ARGUMENTS.items():
        made[argument] = fields[name]
    return made


Node: TypeAlias = models.QueryRequest | models.Prefetch

LARGEST = 1e18
"""The length of a vector from which on its square is beyond float32."""


def prefetches_of(prefetch: list[models.Prefetch] | models.Prefetch | None) -> list[models.Prefetch]:
    """A prefetch of a node, or several or none, as a list."""
    if prefetch is None:
        return []
    return prefetch if isinstance(prefetch, list) else [prefetch]


def nearest(query: object) -> Any:
    """What a nearest query asks for the nearest of."""
    return query.nearest if isinstance(query, models.NearestQuery) else query


def corrected_version(query: object, using: str | None, manifest: Manifest) -> Version | None:
    """The active version for what `query` searches, if it is a plain nearest query on a corrected vector."""
    if query is None:
        return None
    version = manifest.active.get(using or "")
    if version is None or not is_nearest(query):
        return None
    wanted = nearest(query)
    if version.storage == "payload" or (isinstance(wanted, list) and len(wanted) == version.dim):
        return version
    if isinstance(wanted, EMBEDDED):
        raise InputError(
            f"a {type(wanted).__name__} that the server embeds cannot be augmented for storage='vector': "
            "embed it in the client (cloud_inference=False), or apply storage='payload'"
        )
    return None  # another dimension, or a point that is not there, is the server's to refuse


def is_exact(params: models.SearchParams) -> bool:
    """Whether a search asks to be more exact than the index is by itself: without the graph, or without codes."""
    return params.exact is True or (params.quantization is not None and params.quantization.ignore is True)


def is_nearest(query: object) -> bool:
    """Whether `query` asks for the nearest of one dense vector, point or document, with no diversity (MMR) in it. A
    vector must not be so long that its scores, which no offset would change, are infinite."""
    if isinstance(query, models.NearestQuery):
        return getattr(query, "mmr", None) is None and is_nearest(query.nearest)
    if isinstance(query, list):
        return not query or (not isinstance(query[0], list) and math.hypot(*query) < LARGEST)
    return isinstance(query, (int, str, UUID, models.Document, models.Image, models.InferenceObject))


def without_our_key(with_payload: object, key: str | None) -> object:
    """A payload selector that leaves our `key` out, unless it names what it wants; None is no key."""
    if isinstance(with_payload, grpc.WithPayloadSelector):
        with_payload = GrpcToRest.convert_with_payload_selector(with_payload)
    if isinstance(with_payload, dict) and "exclude" in with_payload:
        with_payload = models.PayloadSelectorExclude.model_validate(with_payload)
    if key is None:
        return with_payload
    if with_payload is True:
        return _all_but(key)
    if isinstance(with_payload, models.PayloadSelectorExclude):
        return models.PayloadSelectorExclude(exclude=[*with_payload.exclude, key])
    return with_payload


@lru_cache
def _all_but(key: str) -> models.PayloadSelectorExclude:
    return models.PayloadSelectorExclude(exclude=[key])


def without_vectors(vector: models.VectorStructOutput | None, names: tuple[str, ...]) -> Any:
    """The vectors of a point without the augmented ones, which are called `names`."""
    if not isinstance(vector, dict):
        return vector
    theirs = {name: value for name, value in vector.items() if name not in names}
    return theirs[""] if names and set(theirs) == {""} else theirs


def has_vector(name: str) -> models.HasVectorCondition:
    return models.HasVectorCondition(has_vector=name)


def nothing() -> models.FilterSelector:
    """No point, in any shard: to delete it ends when all that was sent before is done."""
    return models.FilterSelector(filter=models.Filter(must=models.HasIdCondition(has_id=[str(uuid4())])))


def lacking_augmented_vector(version: Version) -> models.Filter:
    """The points that have the vector of `version`, and no augmented one."""
    return models.Filter(must=has_vector(version.vector), must_not=has_vector(version.augmented_vector))


def holding_offset(version: Version) -> models.Filter:
    """The points that have an offset of `version` in their payload."""
    return models.Filter(must_not=models.IsEmptyCondition(is_empty=models.PayloadField(key=version.key)))


def filter_of(given: models.Filter | grpc.Filter) -> models.Filter:
    return GrpcToRest.convert_filter(given) if isinstance(given, grpc.Filter) else given


def selector_fields(points: object, shard_key: ShardKey) -> dict[str, Any]:
    """What the client takes as `points` or `points_selector`, as the fields of an update operation. Raises TypeError
    for anything else."""
    if isinstance(points, grpc.PointsSelector):
        points = GrpcToRest.convert_points_selector(points)
    if isinstance(points, (models.FilterSelector, models.PointIdsList)):
        fields = {name: value for name, value in points.__dict__.items() if name in ("filter", "points")}
        return fields | {"shard_key": shard_key if shard_key is not None else points.shard_key}
    if isinstance(points, (models.Filter, grpc.Filter)):
        return {"filter": filter_of(points), "shard_key": shard_key}
    if not isinstance(points, (list, tuple)):
        raise TypeError(f"expected ids, a Filter or a PointsSelector, got {type(points).__name__}")
    ids = [GrpcToRest.convert_point_id(point) if isinstance(point, grpc.PointId) else point for point in points]
    return {"points": ids, "shard_key": shard_key}


UNLISTED = 1e15
"""The score of a point that a prefetch should have listed and did not: beyond any other, and finite when squared."""

Points: TypeAlias = list[models.ScoredPoint]


def formula(version: Version, length: float = 1.0) -> models.FormulaQuery:
    """The corrected similarity of what a prefetch finds; see `hubplugin_qdrant.requests`. length: that of the mapped
    query, by which scores are multiplied."""
    if version.storage == "vector":
        return _sum_by_either_vector(version.metric, version.ceiling, version.augmented_vector)
    return _sum_with_key(version.key, version.metric, length)


@lru_cache
def _sum_with_key(key: str, metric: Metric, length: float) -> models.FormulaQuery:
    """The corrected similarity of a candidate: its score plus its offset, 0 for a point that has none."""
    similarity: models.Expression = "$score"
    if metric is Metric.EUCLIDEAN:
        similarity = models.MultExpression.model_construct(mult=[-0.5, "$score", "$score"])
    elif length != 1.0:
        similarity = models.MultExpression.model_construct(mult=[length, "$score"])
    summed = models.SumExpression.model_construct(sum=[similarity, key])
    return models.FormulaQuery.model_construct(formula=summed, defaults={key: 0.0})


@lru_cache
def _sum_by_either_vector(metric: Metric, ceiling: float, augmented_vector: str) -> models.FormulaQuery:
    """The corrected similarity of a point by its augmented vector, `$score[0]`, or, if it lacks that one, by its own,
    `$score[1]`. A re-scoring lists a point by both.

    A point that has an augmented vector and is not among those listed by it is worse than all of these.
    """
    has, lacks = models.Filter(must=has_vector(augmented_vector)), models.Filter(must_not=has_vector(augmented_vector))
    terms: list[list[Any]] = [["$score[0]", has], ["$score[1]", lacks]]
    if metric is Metric.EUCLIDEAN:
        terms = [[-0.5, "$score[0]", *terms[0]], [ceiling, has], [-0.5, "$score[1]", *terms[1]]]
    return models.FormulaQuery(
        formula=models.SumExpression(sum=[models.MultExpression(mult=each) for each in terms]),
        defaults={"$score[0]": UNLISTED if metric is Metric.EUCLIDEAN else -UNLISTED, "$score[1]": 0.0},
    )


def similarity_threshold(threshold: float | None, metric: Metric) -> float | None:
    """A threshold on the collection's own scale as one on the corrected similarity."""
    if threshold is None or metric is not Metric.EUCLIDEAN:
        return threshold
    return -0.5 * threshold * abs(threshold)


def distance(similarity: float) -> float:
    """The corrected distance sqrt(distance^2 - 2 offset) of a corrected similarity; negative where that is."""
    return math.copysign(math.sqrt(2.0 * abs(similarity)), -similarity)


def finishing(metric: Metric, threshold: float | None) -> Callable[[Points], Points] | None:
    """What makes of the points that a formula found those that were asked for, with scores on the collection's scale.

    threshold: on the corrected similarity. A server holds a formula to it from 1.17 on; older ones ignore it.
    """
    is_distance, least = metric is Metric.EUCLIDEAN, np.float32(-np.inf if threshold is None else threshold)

    def finish(points: Points) -> Points:
        kept = [point for point in points if np.float32(point.score) >= least]
        return [each.model_copy(update={"score": distance(each.score)}) for each in kept] if is_distance else kept

    return finish if is_distance or threshold is not None else None


def over_similarities(query: models.FormulaQuery, similarities: Iterable[int]) -> models.FormulaQuery:
    """A user's formula `query` over prefetches, of which those numbered `similarities` now yield similarities where
    they yielded distances."""
    names = {f"$score[{number}]" for number in similarities}
    if "$score[0]" in names:
        names.add("$score")
    if not names:
        return query
    defaults = {
        name: similarity_threshold(value, Metric.EUCLIDEAN) if name in names else value
        for name, value in (query.defaults or {}).items()
    }
    return models.FormulaQuery.model_construct(formula=_as_distances(query.formula, names), defaults=defaults)


def _as_distances(expression: models.Expression, names: set[str]) -> models.Expression:
    """`expression` with the similarities called `names` turned into distances: x / sqrt(|x|), x = -2 S."""
    if isinstance(expression, str) and expression in names:
        squared = models.MultExpression(mult=[-2.0, expression])
        root = models.SqrtExpression(sqrt=models.AbsExpression(abs=squared))
        return models.DivExpression(div=models.DivParams(left=squared, right=root, by_zero_default=0.0))
    if isinstance(expression, list):
        return [_as_distances(part, names) for part in expression]
    if not isinstance(expression, BaseModel) or isinstance(expression, models.Filter):
        return expression
    parts = {name: _as_distances(getattr(expression, name), names) for name in type(expression).model_fields}
    return expression.model_copy(update=parts)


SERVER_LIMIT = 10
"""The limit of a request or prefetch that states none."""


@dataclass(frozen=True)
class Rewritten:
    """A corrected request, and what makes of the points that it finds those that were asked for, if anything."""

    request: models.QueryRequest
    finish: Callable[[Points], Points] | None = None


def rewrite(request: models.QueryRequest, manifest: Manifest, hidden: str | None = None) -> Rewritten:
    """`request` with every nearest query on a corrected vector corrected, and the payload key `hidden` left out.

    For storage="vector" the query must be the vector itself: see `searches.references`.
    """
    fields, finish = _corrected(request, manifest)
    fields["with_payload"] = without_our_key(request.with_payload, hidden)
    return Rewritten(changed(request, fields), finish)


def _corrected(node: Node, manifest: Manifest) -> tuple[dict[str, Any], Callable[[Points], Points] | None]:
    """The fields of `node` that change, and what makes of the points that it finds those that were asked for."""
    children = prefetches_of(node.prefetch) if node.prefetch else []
    prefetches = [changed(child, _corrected(child, manifest)[0]) for child in children] if children else []
    version = corrected_version(node.query, node.using, manifest)
    if version is None:
        query = with_mapped_examples(node.query, node.using, manifest)
        return {"prefetch": prefetches or None, "query": _over_corrected(query, children, manifest)}, None
    if version.everywhere and version.metric is not Metric.EUCLIDEAN:
        return _augmented(node, prefetches, version), None
    results = (node.limit or SERVER_LIMIT) + (getattr(node, "offset", None) or 0)  # that are needed, from the first on
    candidates, query = _candidates(node, prefetches, results, version)
    threshold = similarity_threshold(node.score_threshold, version.metric)
    left_to_candidates = {"using": None, "filter": None, "lookup_from": None}
    fields = {"prefetch": candidates, "query": query, "score_threshold": threshold, **left_to_candidates}
    return fields, finishing(version.metric, threshold)


_PREFETCH = models.Prefetch()


def _prefetch(**fields: Any) -> models.Prefetch:
    """A prefetch of what is known to be valid: a copy takes a quarter of the time of a new one."""
    return changed(_PREFETCH, fields)


def _candidates(
    node: Node, prefetches: list[models.Prefetch], results: int, version: Version
) -> tuple[list[models.Prefetch], models.FormulaQuery]:
    """The raw query of `node`, mapped where there is a map, over as many candidates as its corrected results may hide
    among; and the formula that ranks them."""
    if version.storage == "vector":
        return _by_augmented_vector(node, prefetches, results, version), formula(version)
    limit = version.candidates(results, node.params is not None and is_exact(node.params))
    limit = _over_all(prefetches, limit, version) if prefetches else limit
    # Local mode up to 1.19.0 takes no bare id in a prefetch.
    query, length = node.query if isinstance(node.query, list) else resolved(node.query), 1.0
    if version.mapped:
        asked = nearest(query)
        if isinstance(asked, EMBEDDED):
            raise unmappable(asked)
        if isinstance(asked, list):
            query, length = mapped(asked, version)
    made = _prefetch(
        prefetch=prefetches or None,
        query=query,
        using=node.using,
        filter=node.filter,
        params=node.params,
        limit=limit,
        lookup_from=node.lookup_from,
    )
    return [made], formula(version, length)


def _over_all(prefetches: list[models.Prefetch], limit: int, version: Version) -> int:
    """`limit`, or as many as `prefetches` give: a re-scoring ranks what it is given, so all of that is candidates."""
    limit = max(limit, sum(child.limit or SERVER_LIMIT for child in prefetches))
    return min(limit, version.max_candidates or limit)


def _by_augmented_vector(
    node: Node, prefetches: list[models.Prefetch], results: int, version: Version
) -> list[models.Prefetch]:
    """The query in d + 1 dimensions; and in d, among the points that lack the augmented vector, if there are any.

    Over prefetches both list all that these give: a filter for the lacking would go down into them and change what they
    find.
    """
    limit = results if version.everywhere or not prefetches else _over_all(prefetches, results, version)
    augmented = _prefetch(filter=node.filter, limit=limit, **_augmented(node, prefetches, version))
    if version.everywhere:
        return [augmented]
    lacking = models.Filter(must=node.filter, must_not=has_vector(version.augmented_vector))
    plain = _prefetch(
        query=node.query,
        using=node.using,
        filter=node.filter if prefetches else lacking,
        prefetch=prefetches or None,
        params=node.params,
        limit=limit,
    )
    return [augmented, plain]


def _augmented(node: Node, prefetches: list[models.Prefetch], version: Version) -> dict[str, Any]:
    """The query of `node` in d + 1 dimensions, [q, 1] or, under Euclidean distance, [q, 0]: where it goes, over what,
    and how. The last component is unlike the others, so that codes made for those lose it."""
    query = nearest(node.query)
    query = query if version.metric is not Metric.COSINE else unit(query)
    last = 0.0 if version.metric is Metric.EUCLIDEAN else 1.0
    params = node.params
    if version.codes:
        more: dict[str, Any] = {"quantization": _FULL_VECTORS}
        if version.hnsw_ef is not None and (params is None or params.hnsw_ef is None):
            more["hnsw_ef"] = version.hnsw_ef
        params = changed(params or _SEARCH_PARAMS, more)
    return {
        "query": [*query, last],
        "using": version.augmented_vector,
        "prefetch": prefetches or None,
        "params": params,
    }


_SEARCH_PARAMS = models.SearchParams()
_FULL_VECTORS = models.QuantizationSearchParams(ignore=True)


def _over_corrected(query: object, children: list[models.Prefetch], manifest: Manifest) -> Any:
    """`query` over `children`, of which some now yield similarities where they yielded distances."""
    if not isinstance(query, models.FormulaQuery):
        return query
    versions = [corrected_version(child.query, child.using, manifest) for child in children]
    euclidean = [n for n, each in enumerate(versions) if each is not None and each.metric is Metric.EUCLIDEAN]
    return over_similarities(query, euclidean)
