"""Pure: a request and the manifest in, the corrected request out. Nothing here knows a client.

A nearest query becomes a prefetch of itself, over more candidates, under a formula that adds the offset:

    query=q, limit=10   ->   prefetch=[query=q, limit=100], query=formula($score + hub_offset.v1), limit=10

With storage="vector" it goes to the second vector, and, where points lack it that another client wrote, to the first:

    query=q, limit=10   ->   prefetch=[query=[q, 1] using hub_v1, query=q where there is no hub_v1], sum of both

This is done wherever it stands in the tree, so that a fusion, a user's formula or a re-scoring above it gets
corrected candidates and corrected scores. A formula ranks descending, so under Euclidean distance it yields the
similarity S = offset - distance^2 / 2, which is turned back into a distance: sqrt(distance^2 - 2 offset), negative
where the offset is the larger of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias
from uuid import UUID

import numpy as np
from pydantic import BaseModel
from qdrant_client import grpc, models
from qdrant_client.conversions.conversion import GrpcToRest

from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin_qdrant.manifest import KEY, Manifest, Version

SERVER_LIMIT = 10
"""The limit of a request or prefetch that states none."""


Points: TypeAlias = list[models.ScoredPoint]


@dataclass(frozen=True)
class Rewritten:
    """A corrected request, and what turns the scores of the points that it finds back into distances, if anything."""

    request: models.QueryRequest
    finish: Callable[[Points], Points] | None = None


def rewrite(request: models.QueryRequest, manifest: Manifest, oversampling: float | None = None) -> Rewritten:
    """`request` with every nearest query on a corrected vector corrected, and our payload key left out.

    `oversampling` takes the place of the manifest's. For storage="vector" the query must be the vector itself: see
    `references` and `resolved`.
    """
    version = _corrected_vector(request.query, request.using, manifest)
    shown = without_our_key(request.with_payload)
    prefetches = [rewrite_prefetch(child, manifest, oversampling) for child in _listed(request.prefetch)]
    if version is None:
        query = _over_corrected(request.query, _listed(request.prefetch), manifest)
        fields = {"prefetch": prefetches or None, "query": query, "with_payload": shown}
        return Rewritten(request.model_copy(update=fields))
    if version.everywhere and version.metric is not Metric.EUCLIDEAN:
        return Rewritten(request.model_copy(update=_augmented(request, prefetches, version) | {"with_payload": shown}))
    corrected = request.model_copy(
        update={
            "prefetch": _candidates(request, prefetches, _results(request), version, oversampling),
            "query": _formula(version),
            "using": None,
            "filter": None,
            "lookup_from": None,
            "score_threshold": similarity_threshold(request.score_threshold, version.metric),
            "with_payload": shown,
        }
    )
    return Rewritten(corrected, with_distances if version.metric is Metric.EUCLIDEAN else None)


def _results(request: models.QueryRequest) -> int:
    """How many results, from the first on, are needed to answer `request`."""
    return (request.limit or SERVER_LIMIT) + (request.offset or 0)


def rewrite_prefetch(
    prefetch: models.Prefetch, manifest: Manifest, oversampling: float | None = None
) -> models.Prefetch:
    """`prefetch` with every nearest query on a corrected vector in it corrected."""
    children = _listed(prefetch.prefetch)
    prefetches = [rewrite_prefetch(child, manifest, oversampling) for child in children]
    version = _corrected_vector(prefetch.query, prefetch.using, manifest)
    if version is None:
        if not prefetches:
            return prefetch
        query = _over_corrected(prefetch.query, children, manifest)
        return prefetch.model_copy(update={"prefetch": prefetches, "query": query})
    if version.everywhere and version.metric is not Metric.EUCLIDEAN:
        return prefetch.model_copy(update=_augmented(prefetch, prefetches, version))
    results = prefetch.limit or SERVER_LIMIT
    return _prefetch(
        prefetch=_candidates(prefetch, prefetches, results, version, oversampling),
        query=_formula(version),
        limit=results,
        score_threshold=similarity_threshold(prefetch.score_threshold, version.metric),
    )


_PREFETCH = models.Prefetch()


def _prefetch(**fields: Any) -> models.Prefetch:
    """A prefetch of what is known to be valid: a copy takes half the time of a new one."""
    return _PREFETCH.model_copy(update=fields)


def _formula(version: Version) -> models.FormulaQuery:
    if version.storage == "vector":
        return sum_formula(version.metric, version.ceiling, version.second)
    return formula(version.key, version.metric)


@lru_cache
def sum_formula(metric: Metric, ceiling: float, second_name: str) -> models.FormulaQuery:
    """The corrected similarity of a point that is found by its second vector or, if it lacks that one, by its first.

    A point that is found by both counts by its second: a re-scoring ranks all that it is given by either.
    """
    lacking: Any = models.Filter(must_not=has_vector(second_name))
    if metric is not Metric.EUCLIDEAN:
        first = models.MultExpression(mult=["$score[1]", lacking])
        return models.FormulaQuery(
            formula=models.SumExpression(sum=["$score[0]", first]), defaults={"$score[0]": 0.0, "$score[1]": 0.0}
        )
    # The score of the prefetch that lacks the point is such that its share comes to 0.
    second = models.MultExpression(mult=[-0.5, "$score[0]", "$score[0]"])
    first = models.MultExpression(mult=[-0.5, "$score[1]", "$score[1]", lacking])
    return models.FormulaQuery(
        formula=models.SumExpression(sum=[second, ceiling, first]),
        defaults={"$score[0]": math.sqrt(2 * max(ceiling, 0.0)), "$score[1]": 0.0},
    )


@lru_cache
def formula(key: str, metric: Metric) -> models.FormulaQuery:
    """The corrected similarity of a candidate: its score plus its offset, 0 for a point that has none."""
    return models.FormulaQuery.model_construct(
        formula=models.SumExpression.model_construct(sum=[_similarity(metric), key]), defaults={key: 0.0}
    )


def _similarity(metric: Metric) -> Any:
    if metric is not Metric.EUCLIDEAN:
        return "$score"
    return models.MultExpression.model_construct(mult=[-0.5, "$score", "$score"])


def similarity_threshold(threshold: float | None, metric: Metric) -> float | None:
    """A threshold on the collection's own scale as one on the corrected similarity."""
    if threshold is None or metric is not Metric.EUCLIDEAN:
        return threshold
    return -0.5 * threshold * abs(threshold)


def distance(similarity: float) -> float:
    """The corrected distance sqrt(distance^2 - 2 offset) of a corrected similarity; negative where that is."""
    return math.copysign(math.sqrt(2.0 * abs(similarity)), -similarity)


def without_our_key(with_payload: Any) -> Any:
    """A payload selector that leaves our key out, unless it names what it wants."""
    if isinstance(with_payload, grpc.WithPayloadSelector):
        with_payload = GrpcToRest.convert_with_payload_selector(with_payload)
    if isinstance(with_payload, dict) and "exclude" in with_payload:
        with_payload = models.PayloadSelectorExclude.model_validate(with_payload)
    if with_payload is True:
        return _ALL_BUT_OURS
    if isinstance(with_payload, models.PayloadSelectorExclude):
        return models.PayloadSelectorExclude(exclude=[*with_payload.exclude, KEY])
    return with_payload


_ALL_BUT_OURS = models.PayloadSelectorExclude(exclude=[KEY])


def without_second(vector: Any, names: tuple[str, ...]) -> Any:
    """The vectors of a point without those that are ours."""
    if not isinstance(vector, dict):
        return vector
    theirs = {name: value for name, value in vector.items() if name not in names}
    return theirs[""] if names and set(theirs) == {""} else theirs


def with_distances(points: Points) -> Points:
    """`points` with their corrected similarities as corrected distances."""
    return [point.model_copy(update={"score": distance(point.score)}) for point in points]


def _candidates(
    node: models.QueryRequest | models.Prefetch,
    prefetches: list[models.Prefetch],
    results: int,
    version: Version,
    oversampling: float | None,
) -> list[models.Prefetch]:
    """The raw query of `node` over as many candidates as its corrected results may hide among."""
    if version.storage == "vector":
        return _by_second_vector(node, prefetches, results, version)
    limit = _over_all(prefetches, version.candidates(results, oversampling), version)
    return [
        _prefetch(
            prefetch=prefetches or None,
            query=_nearest(node.query),
            using=node.using,
            filter=node.filter,
            params=node.params,
            limit=limit,
            lookup_from=node.lookup_from,
        )
    ]


def _over_all(prefetches: list[models.Prefetch], limit: int, version: Version) -> int:
    """`limit`, or as many as `prefetches` give: a re-scoring ranks what it is given, so all of that is candidates."""
    if not prefetches:
        return limit
    limit = max(limit, sum(child.limit or SERVER_LIMIT for child in prefetches))
    return min(limit, version.max_candidates or limit)


def _by_second_vector(
    node: models.QueryRequest | models.Prefetch, prefetches: list[models.Prefetch], results: int, version: Version
) -> list[models.Prefetch]:
    """The query in d + 1 dimensions; and in d, among the points that lack the second vector, if there are any.

    Over prefetches the latter ranks all that they give: a filter would go down into them and change what they find.
    """
    augmented = _prefetch(filter=node.filter, limit=results, **_augmented(node, prefetches, version))
    if version.everywhere:
        return [augmented]
    lacking = models.Filter(must=node.filter, must_not=has_vector(version.second))
    plain = _prefetch(
        query=_nearest(node.query),
        using=node.using,
        filter=node.filter if prefetches else lacking,
        prefetch=prefetches or None,
        params=node.params,
        limit=_over_all(prefetches, results, version),
    )
    return [augmented, plain]


def _augmented(
    node: models.QueryRequest | models.Prefetch, prefetches: list[models.Prefetch], version: Version
) -> dict[str, Any]:
    """The query of `node` in d + 1 dimensions, [q, 1] or, under Euclidean distance, [q, 0]: where it goes, over what,
    and how. The last component is unlike the others, so that codes made for those lose it."""
    query = _nearest(node.query)
    query = query if version.metric is not Metric.COSINE else _unit(query)
    last = 0.0 if version.metric is Metric.EUCLIDEAN else 1.0
    params = node.params
    if version.codes:
        params = (params or _SEARCH_PARAMS).model_copy(update={"quantization": _FULL_VECTORS})
    return {"query": [*query, last], "using": version.second, "prefetch": prefetches or None, "params": params}


_SEARCH_PARAMS = models.SearchParams()
_FULL_VECTORS = models.QuantizationSearchParams(ignore=True)


def _nearest(query: Any) -> Any:
    """What a nearest query asks for the nearest of."""
    return query.nearest if isinstance(query, models.NearestQuery) else query


def has_vector(name: str) -> models.HasVectorCondition:
    return models.HasVectorCondition(has_vector=name)


def lacking_second(version: Version) -> models.Filter:
    """The points that have the vector of `version`, and no second one beside it."""
    return models.Filter(must=has_vector(version.vector), must_not=has_vector(version.second))


def _unit(vector: list[float]) -> list[float]:
    length = math.sqrt(math.fsum(value * value for value in vector)) or 1.0
    return [value / length for value in vector]


@dataclass(frozen=True)
class Reference:
    """A point whose vector is the query: its id, and where it lies if not in the collection searched."""

    point: int | str
    collection: str | None
    vector: str


def references(node: models.QueryRequest | models.Prefetch, manifest: Manifest) -> list[Reference]:
    """The points in the tree of `node` whose vectors must be known before it can be rewritten."""
    found = [reference for child in _listed(node.prefetch) for reference in references(child, manifest)]
    reference = _reference(node, manifest)
    return [*found, reference] if reference is not None else found


def resolved(node: Any, manifest: Manifest, vectors: dict[Reference, list[float]]) -> Any:
    """`node` with the vectors of its `references` in the place of the ids; the points themselves are left out."""
    update: dict[str, Any] = {}
    if node.prefetch is not None:
        update["prefetch"] = [resolved(child, manifest, vectors) for child in _listed(node.prefetch)]
    reference = _reference(node, manifest)
    if reference is not None and reference in vectors:
        update |= {"query": vectors[reference], "lookup_from": None}
        if reference.collection is None:
            itself = models.Filter(must_not=[models.HasIdCondition(has_id=[reference.point])])
            update["filter"] = itself if node.filter is None else models.Filter(must=[node.filter, itself])
    return node.model_copy(update=update)


def _reference(node: models.QueryRequest | models.Prefetch, manifest: Manifest) -> Reference | None:
    version = manifest.active.get(node.using or "")
    query = _nearest(node.query)
    if version is None or version.storage != "vector" or not isinstance(query, (int, str, UUID)):
        return None
    place = node.lookup_from
    if place is None:
        return Reference(query if isinstance(query, int) else str(query), None, version.vector)
    return Reference(query if isinstance(query, int) else str(query), place.collection, place.vector or version.vector)


def _corrected_vector(query: Any, using: str | None, manifest: Manifest) -> Version | None:
    """The active version for what `query` searches, if it is a plain nearest query on a corrected vector."""
    if query is None:
        return None
    version = manifest.active.get(using or "")
    if version is None or not is_nearest(query):
        return None
    nearest = _nearest(query)
    if version.storage == "payload" or (isinstance(nearest, list) and len(nearest) == version.dim):
        return version
    if isinstance(nearest, (models.Document, models.Image, models.InferenceObject)):
        raise InputError(
            f"a {type(nearest).__name__} that the server embeds cannot be augmented for storage='vector': "
            "embed it in the client (cloud_inference=False), or apply storage='payload'"
        )
    return None  # another dimension, or a point that is not there, is the server's to refuse


def is_nearest(query: Any) -> bool:
    """Whether `query` asks for the nearest of one dense vector, point or document, with no diversity (MMR) in it."""
    if isinstance(query, models.NearestQuery):
        return getattr(query, "mmr", None) is None and is_nearest(query.nearest)
    if isinstance(query, list):
        return not query or not isinstance(query[0], list)
    return isinstance(
        query, (int, str, UUID, np.ndarray, models.Document, models.Image, models.InferenceObject, grpc.PointId)
    )


def _over_corrected(query: Any, children: list[models.Prefetch], manifest: Manifest) -> Any:
    """A user's formula over prefetches of which some now yield similarities where they yielded distances."""
    if not isinstance(query, models.FormulaQuery):
        return query
    names: dict[str, int] = {}
    for number, child in enumerate(children):
        version = _corrected_vector(child.query, child.using, manifest)
        if version is not None and version.metric is Metric.EUCLIDEAN:
            names |= {f"$score[{number}]": number} | ({"$score": 0} if number == 0 else {})
    if not names:
        return query
    defaults = {
        name: similarity_threshold(value, Metric.EUCLIDEAN) if name in names else value
        for name, value in (query.defaults or {}).items()
    }
    return models.FormulaQuery.model_construct(formula=_as_distances(query.formula, set(names)), defaults=defaults)


def _as_distances(expression: Any, names: set[str]) -> Any:
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


def _listed(prefetch: Any) -> list[models.Prefetch]:
    if prefetch is None:
        return []
    return prefetch if isinstance(prefetch, list) else [prefetch]
