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
import struct
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import numpy as np
from pydantic import BaseModel
from qdrant_client import grpc, models
from qdrant_client.conversions.conversion import GrpcToRest

from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin.model import QueryMap
from hubplugin_qdrant.manifest import QdrantManifest, QdrantVersion
from hubplugin_qdrant.plain_client import Arguments, ShardKey, copy_with, resolve

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


_FROM_GRPC: dict[type, Callable[..., object]] = {
    grpc.PrefetchQuery: GrpcToRest.convert_prefetch_query,
    grpc.Filter: GrpcToRest.convert_filter,
    grpc.SearchParams: GrpcToRest.convert_search_params,
    grpc.LookupLocation: GrpcToRest.convert_lookup_location,
    grpc.WithVectorsSelector: GrpcToRest.convert_with_vectors_selector,
}
_CONVERTED = (list, *_FROM_GRPC)


def as_request(arguments: Arguments) -> models.QueryRequest:
    """The arguments of `query_points` as one request. Raises what the plain client raises for a query that is none, and
    InputError for a limit or an offset that is no whole number."""
    fields = {"query": resolve(arguments.get("query"))}
    for name, value in arguments.items():
        if name in _FIELDS and name != "query":
            fields[_FIELDS[name]] = (
                to_rest(value) if isinstance(value, _CONVERTED) else value
            )
    for name in ("limit", "offset"):
        if isinstance(value := fields.get(name), (float, np.floating)):
            if not value.is_integer():
                raise InputError(f"{name}={value!r}: expected a whole number")
            fields[name] = int(value)
    prefetch = fields.get("prefetch")
    if dict in map(type, fields.values()) or (
        isinstance(prefetch, list) and dict in map(type, prefetch)
    ):
        return models.QueryRequest.model_validate({**_DEFAULTS.__dict__, **fields})
    return copy_with(_DEFAULTS, fields)


def as_requests(requests: Iterable[Any]) -> list[models.QueryRequest]:
    """The `requests` of `query_batch_points`, as the plain client understands them."""
    structs = [
        models.QueryRequest.model_validate(r) if isinstance(r, dict) else r
        for r in requests
    ]
    return [
        copy_with(request, {"query": resolve(request.query)}) for request in structs
    ]


def to_rest(value: object) -> Any:
    """`value`, an argument of the client, as a structure of REST."""
    if isinstance(value, list):
        return [to_rest(part) for part in value]
    convert = _FROM_GRPC.get(type(value))
    return value if convert is None else convert(value)


def as_arguments(arguments: Arguments, request: models.QueryRequest) -> Arguments:
    """`arguments` with the fields of `request` in their place."""
    fields = request.__dict__
    return arguments | {argument: fields[name] for name, argument in _ARGUMENTS.items()}


Node: TypeAlias = models.QueryRequest | models.Prefetch

LARGEST = 1e18
"""The length of a vector from which on its square is beyond float32."""


def prefetches_of(node: Node) -> list[models.Prefetch]:
    """The prefetches of a node, which has one, or several or none."""
    prefetch = node.prefetch
    if prefetch is None:
        return []
    return prefetch if isinstance(prefetch, list) else [prefetch]


def nearest(query: object) -> Any:
    """What a nearest query asks for the nearest of."""
    return query.nearest if isinstance(query, models.NearestQuery) else query


def version_for(
    query: object, using: str | None, manifest: QdrantManifest
) -> QdrantVersion | None:
    """The active version of `manifest` for what `query` searches, if it is a plain nearest query on `using`, a
    corrected vector."""
    version = manifest.active.get(using or "")
    if query is None or version is None or not is_nearest(query):
        return None
    target = nearest(query)
    if version.storage == "payload" or (
        isinstance(target, list) and len(target) == version.dim
    ):
        return version
    if isinstance(target, EMBEDDED):
        raise InputError(
            f"a {type(target).__name__} that the server embeds cannot be augmented for storage='vector': "
            "embed it in the client (cloud_inference=False), or apply storage='payload'"
        )
    return None  # another dimension, or a point that is not there, is the server's to refuse


def is_nearest(query: object) -> bool:
    """Whether `query` asks for the nearest of one dense vector, point or document, with no diversity (MMR) in it. A
    vector must not be so long that its scores, which no offset would change, are infinite."""
    if isinstance(query, models.NearestQuery):
        return getattr(query, "mmr", None) is None and is_nearest(query.nearest)
    if isinstance(query, list):
        return not query or (
            not isinstance(query[0], list) and math.hypot(*query) < LARGEST
        )
    return isinstance(query, (int, str, UUID, *EMBEDDED))


def hide_key(with_payload: object, key: str | None) -> object:
    """`with_payload` as a payload selector that leaves our `key` out, unless it names what it wants; None is no key."""
    if isinstance(with_payload, grpc.WithPayloadSelector):
        with_payload = GrpcToRest.convert_with_payload_selector(with_payload)
    if isinstance(with_payload, dict) and "exclude" in with_payload:
        with_payload = models.PayloadSelectorExclude.model_validate(with_payload)
    if key is not None and with_payload is True:
        return _all_but(key)
    if key is not None and isinstance(with_payload, models.PayloadSelectorExclude):
        return models.PayloadSelectorExclude(exclude=[*with_payload.exclude, key])
    return with_payload


@lru_cache
def _all_but(key: str) -> models.PayloadSelectorExclude:
    return models.PayloadSelectorExclude(exclude=[key])


def hide_vectors(
    vector: models.VectorStructOutput | None, names: tuple[str, ...]
) -> Any:
    """The vectors of a point, `vector`, without the augmented ones, which are called `names`."""
    if not isinstance(vector, dict):
        return vector
    theirs = {name: value for name, value in vector.items() if name not in names}
    return theirs[""] if names and set(theirs) == {""} else theirs


def has_vector(name: str) -> models.HasVectorCondition:
    return models.HasVectorCondition(has_vector=name)


def nothing() -> models.FilterSelector:
    """No point, in any shard: to delete it ends when all that was sent before is done."""
    return models.FilterSelector(
        filter=models.Filter(must=models.HasIdCondition(has_id=[str(uuid4())]))
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


def selector_fields(points: object, shard_key: ShardKey) -> dict[str, Any]:
    """The fields of an update operation for what the client takes as `points`, and `shard_key`; TypeError for anything
    else."""
    if isinstance(points, grpc.PointsSelector):
        points = GrpcToRest.convert_points_selector(points)
    if isinstance(points, (models.FilterSelector, models.PointIdsList)):
        fields = {
            name: value
            for name, value in points.__dict__.items()
            if name in ("filter", "points")
        }
        return fields | {
            "shard_key": shard_key if shard_key is not None else points.shard_key
        }
    if isinstance(points, (models.Filter, grpc.Filter)):
        return {"filter": to_rest(points), "shard_key": shard_key}
    if not isinstance(points, (list, tuple)):
        raise TypeError(
            f"expected ids, a Filter or a PointsSelector, got {type(points).__name__}"
        )
    ids = [
        GrpcToRest.convert_point_id(point) if isinstance(point, grpc.PointId) else point
        for point in points
    ]
    return {"points": ids, "shard_key": shard_key}


UNLISTED = 1e15
"""The score of a point that a prefetch should have listed and did not: beyond any other, and finite when squared."""

Points: TypeAlias = list[models.ScoredPoint]


@lru_cache
def _sum_with_key(key: str, metric: Metric, length: float) -> models.FormulaQuery:
    """The corrected similarity of a candidate: its score plus its offset, 0 for a point that has none. length: that of
    the mapped query, by which scores are multiplied."""
    similarity: models.Expression = "$score"
    if metric is Metric.EUCLIDEAN:
        similarity = models.MultExpression.model_construct(
            mult=[-0.5, "$score", "$score"]
        )
    elif length != 1.0:
        similarity = models.MultExpression.model_construct(mult=[length, "$score"])
    total = models.SumExpression.model_construct(sum=[similarity, key])
    return models.FormulaQuery.model_construct(formula=total, defaults={key: 0.0})


@lru_cache
def _sum_by_either_vector(
    metric: Metric, ceiling: float, augmented_vector: str
) -> models.FormulaQuery:
    """The corrected similarity of a point by its augmented vector, `$score[0]`, or, if it lacks that one, by its own,
    `$score[1]`. A re-scoring lists a point by both.

    A point that has an augmented vector and is not among those listed by it is worse than all of these.
    """
    has, lacks = (
        models.Filter(must=has_vector(augmented_vector)),
        models.Filter(must_not=has_vector(augmented_vector)),
    )
    terms: list[list[Any]] = [["$score[0]", has], ["$score[1]", lacks]]
    if metric is Metric.EUCLIDEAN:
        terms = [
            [-0.5, "$score[0]", *terms[0]],
            [ceiling, has],
            [-0.5, "$score[1]", *terms[1]],
        ]
    return models.FormulaQuery(
        formula=models.SumExpression(
            sum=[models.MultExpression(mult=term) for term in terms]
        ),
        defaults={
            "$score[0]": UNLISTED if metric is Metric.EUCLIDEAN else -UNLISTED,
            "$score[1]": 0.0,
        },
    )


def similarity_threshold(threshold: float | None, metric: Metric) -> float | None:
    """The score `threshold` of a search by `metric` as one on the corrected similarity."""
    if threshold is None or metric is not Metric.EUCLIDEAN:
        return threshold
    return -0.5 * threshold * abs(threshold)


Finish: TypeAlias = Callable[[Points], Points] | None
"""What makes of the points that a corrected request finds those that were asked for, if anything."""


def rewrite(
    request: models.QueryRequest, manifest: QdrantManifest, hidden: str | None = None
) -> tuple[models.QueryRequest, Finish]:
    """`request` with every nearest query on a vector that `manifest` corrects corrected, and the payload key `hidden`
    left out.

    For storage="vector" the query must be the vector itself: see `searches.references`.
    """
    fields, finish = _correct(request, manifest)
    fields["with_payload"] = hide_key(request.with_payload, hidden)
    return copy_with(request, fields), finish


SERVER_LIMIT = 10
"""The limit of a request or prefetch that states none."""


def _correct(node: Node, manifest: QdrantManifest) -> tuple[dict[str, Any], Finish]:
    """The fields of `node` that change, and how it is finished."""
    children = prefetches_of(node) if node.prefetch else []
    prefetches = (
        [copy_with(child, _correct(child, manifest)[0]) for child in children]
        if children
        else []
    )
    version = version_for(node.query, node.using, manifest)
    if version is None:
        query = map_examples(node.query, node.using, manifest)
        return {
            "prefetch": prefetches or None,
            "query": _over_distances(query, children, manifest),
        }, None
    if version.everywhere and version.metric is not Metric.EUCLIDEAN:
        return _augment(node, prefetches, version), None
    results = (node.limit or SERVER_LIMIT) + (
        getattr(node, "offset", None) or 0
    )  # that are needed, from the first on
    if version.storage == "vector":
        candidates = _by_augmented_vector(node, prefetches, results, version)
        query = _sum_by_either_vector(
            version.metric, version.ceiling, version.augmented_vector
        )
    else:
        candidates, length = _by_raw_score(node, prefetches, results, version)
        query = _sum_with_key(version.key, version.metric, length)
    threshold = similarity_threshold(node.score_threshold, version.metric)
    left_to_candidates = {"using": None, "filter": None, "lookup_from": None}
    fields = {
        "prefetch": candidates,
        "query": query,
        "score_threshold": threshold,
        **left_to_candidates,
    }
    return fields, _finisher(version.metric, threshold)


def _finisher(metric: Metric, threshold: float | None) -> Finish:
    """Turns the scores of points that a formula found into those of the collection's scale.

    threshold: on the corrected similarity. A server holds a formula to it from 1.17 on; older ones ignore it.
    """
    is_distance, least = (
        metric is Metric.EUCLIDEAN,
        np.float32(-np.inf if threshold is None else threshold),
    )

    def finish(points: Points) -> Points:
        points = [point for point in points if np.float32(point.score) >= least]
        if not is_distance:
            return points
        # sqrt(distance^2 - 2 offset), negative where the square is. In local mode one object may be in several groups.
        scores = [
            math.copysign(math.sqrt(2.0 * abs(point.score)), -point.score)
            for point in points
        ]
        return [
            copy_with(point, {"score": score})
            for point, score in zip(points, scores, strict=True)
        ]

    return finish if is_distance or threshold is not None else None


_PREFETCH = models.Prefetch()


def _prefetch(**fields: Any) -> models.Prefetch:
    """A prefetch of what is known to be valid: a copy takes a quarter of the time of a new one."""
    return copy_with(_PREFETCH, fields)


def _by_raw_score(
    node: Node, prefetches: list[models.Prefetch], results: int, version: QdrantVersion
) -> tuple[list[models.Prefetch], float]:
    """The raw query of `node`, mapped where there is a map, over as many candidates as its corrected results may hide
    among; and by what the scores of these are multiplied."""
    params = node.params
    codes = params.quantization if params is not None else None
    exact = params is not None and (
        params.exact is True or (codes is not None and codes.ignore is True)
    )
    limit = version.candidates(results, exact)
    limit = _over_all(prefetches, limit, version) if prefetches else limit
    # Local mode up to 1.19.0 takes no bare id in a prefetch.
    query, length = (
        node.query if isinstance(node.query, list) else resolve(node.query),
        1.0,
    )
    if version.mapped:
        target = nearest(query)
        if isinstance(target, EMBEDDED):
            raise unmappable(target)
        if isinstance(target, list):
            query, length = map_query(target, version)
    candidates = _prefetch(
        prefetch=prefetches or None,
        query=query,
        using=node.using,
        filter=node.filter,
        params=params,
        limit=limit,
        lookup_from=node.lookup_from,
    )
    return [candidates], length


def _over_all(
    prefetches: list[models.Prefetch], limit: int, version: QdrantVersion
) -> int:
    """`limit`, or as many as `prefetches` give: a re-scoring ranks what it is given, so all of that is candidates."""
    limit = max(limit, sum(child.limit or SERVER_LIMIT for child in prefetches))
    return min(limit, version.max_candidates or limit)


def _by_augmented_vector(
    node: Node, prefetches: list[models.Prefetch], results: int, version: QdrantVersion
) -> list[models.Prefetch]:
    """The query in d + 1 dimensions; and in d, among the points that lack the augmented vector, if there are any.

    Over prefetches both list all that these give: a filter for the lacking would change what these find.
    """
    limit = (
        results
        if version.everywhere or not prefetches
        else _over_all(prefetches, results, version)
    )
    augmented = _prefetch(
        filter=node.filter, limit=limit, **_augment(node, prefetches, version)
    )
    if version.everywhere:
        return [augmented]
    lacking = models.Filter(
        must=node.filter, must_not=has_vector(version.augmented_vector)
    )
    plain = _prefetch(
        query=node.query,
        using=node.using,
        filter=node.filter if prefetches else lacking,
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
    """The query of `node` in d + 1 dimensions, [q, 1] or, under Euclidean distance, [q, 0]: where it goes, over what,
    and how. The last component is unlike the others, so that codes made for those lose it."""
    query, params = nearest(node.query), node.params
    query = query if version.metric is not Metric.COSINE else as_unit(query)
    if version.codes:
        changes: dict[str, Any] = {"quantization": _FULL_VECTORS}
        if version.hnsw_ef is not None and (params is None or params.hnsw_ef is None):
            changes["hnsw_ef"] = version.hnsw_ef
        params = copy_with(params or _SEARCH_PARAMS, changes)
    return {
        "query": [*query, 0.0 if version.metric is Metric.EUCLIDEAN else 1.0],
        "using": version.augmented_vector,
        "prefetch": prefetches or None,
        "params": params,
    }


def _over_distances(
    query: object, children: list[models.Prefetch], manifest: QdrantManifest
) -> Any:
    """`query`; in a user's formula, what `children` yield as similarities now is made the distances that they were."""
    if not isinstance(query, models.FormulaQuery):
        return query
    versions = [version_for(child.query, child.using, manifest) for child in children]
    names = {
        f"$score[{n}]"
        for n, v in enumerate(versions)
        if v is not None and v.metric is Metric.EUCLIDEAN
    }
    if not names:
        return query
    if "$score[0]" in names:
        names.add("$score")
    defaults = {
        name: similarity_threshold(value, Metric.EUCLIDEAN) if name in names else value
        for name, value in (query.defaults or {}).items()
    }
    return models.FormulaQuery.model_construct(
        formula=_as_distances(query.formula, names), defaults=defaults
    )


def _as_distances(expression: models.Expression, names: set[str]) -> models.Expression:
    """`expression` with the similarities called `names` turned into distances: x / sqrt(|x|), x = -2 S."""
    if isinstance(expression, str) and expression in names:
        square = models.MultExpression(mult=[-2.0, expression])
        root = models.SqrtExpression(sqrt=models.AbsExpression(abs=square))
        return models.DivExpression(
            div=models.DivParams(left=square, right=root, by_zero_default=0.0)
        )
    if isinstance(expression, list):
        return [_as_distances(part, names) for part in expression]
    if not isinstance(expression, BaseModel) or isinstance(expression, models.Filter):
        return expression
    parts = {
        name: _as_distances(getattr(expression, name), names)
        for name in type(expression).model_fields
    }
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
"""By how much the length of a vector may differ from 1 for it to go as it is: what its numbers are rounded by."""

SMALL = 1e-20
"""The square of a length below which, as above its inverse, float32 loses it."""


def map_query(query: list[float], version: QdrantVersion) -> tuple[list[float], float]:
    """Maps a query as `version` does.

    Returns the vector that is searched with for `query`, and the factor of its scores: its length under cosine, since
    the server divides by that. A query of another dimension is the server's to refuse.
    """
    if len(query) != version.dim:
        return query, 1.0
    vector = as_float32(query)
    if version.metric is not Metric.COSINE:
        return version.map(vector).tolist(), 1.0
    square = float(vector @ vector)
    if not abs(square - 1.0) < UNIT:
        vector = (
            vector / math.sqrt(square)
            if SMALL < square < 1 / SMALL
            else as_float32(as_unit(query))
        )
    mapped = version.map(vector)
    return mapped.tolist(), math.sqrt(float(mapped @ mapped))


def as_float32(vector: list[float]) -> np.ndarray:
    """`vector` in a third of the time that numpy takes of a list."""
    return np.frombuffer(struct.pack(f"{len(vector)}f", *vector), np.float32)


def map_examples(query: Any, using: str | None, manifest: QdrantManifest) -> Any:
    """A `query` that is not corrected, with the vectors in it mapped where `manifest` has clients map those of
    `using`."""
    version = manifest.active.get(using or "")
    if (
        version is None
        or not version.mapped
        or version.storage == "vector"
        or not isinstance(query, WITH_EXAMPLES)
    ):
        return query
    return _map_within(query, version.map)


def _map_within(part: Any, query_map: QueryMap) -> Any:
    """`part` of a query with the vectors in it mapped. Each keeps its length, by which an average weighs it."""
    if isinstance(part, list):
        if not part or not isinstance(part[0], float):
            return [_map_within(item, query_map) for item in part]
        is_wrong = len(part) != len(query_map.step)  # the server's to refuse
        return part if is_wrong else query_map(np.array(part, np.float32)).tolist()
    if isinstance(part, EMBEDDED):
        raise unmappable(part)
    if not isinstance(part, BaseModel) or isinstance(part, models.SparseVector):
        return part
    return copy_with(
        part,
        {name: _map_within(value, query_map) for name, value in part.__dict__.items()},
    )


def unmappable(document: object) -> InputError:
    return InputError(
        f"a {type(document).__name__} that the server embeds cannot go through the query map of the correction: "
        "embed it in the client (cloud_inference=False), or apply without learn"
    )


def as_unit(vector: list[float]) -> list[float]:
    """`vector` divided by its length."""
    length = math.hypot(*vector) or 1.0
    return vector if abs(length - 1.0) < UNIT else [value / length for value in vector]
