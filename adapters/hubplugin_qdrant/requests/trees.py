"""Pure: a request and the manifest in, the corrected request out. Nothing here knows a client.

A nearest query becomes a prefetch of itself, over more candidates, under a formula that adds the offset:

    query=q, limit=10   ->   prefetch=[query=q, limit=100], query=formula($score + hub_offset.v1), limit=10

With storage="vector" it goes to the augmented vector, and for points that another client wrote without one, to
their own:

    query=q, limit=10   ->   prefetch=[query=[q, 1] using hub_v1, query=q where there is no hub_v1], sum of both

This is done wherever it stands in the tree, so that a fusion, a user's formula or a re-scoring above it gets
corrected candidates and corrected scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qdrant_client import models

from hubplugin.metric import Metric
from hubplugin_qdrant.manifest import Manifest, Version
from hubplugin_qdrant.plain_client import changed
from hubplugin_qdrant.requests.nodes import Node, corrected_version, is_exact, nearest, prefetches_of
from hubplugin_qdrant.requests.scores import Points, finishing, formula, over_similarities, similarity_threshold
from hubplugin_qdrant.requests.selectors import has_vector, without_our_key

SERVER_LIMIT = 10
"""The limit of a request or prefetch that states none."""

UNIT = 1e-6
"""By how much the length of a vector may differ from 1 for it to go as it is: what its numbers are rounded by."""


@dataclass(frozen=True)
class Rewritten:
    """A corrected request, and what makes of the points that it finds those that were asked for, if anything."""

    request: models.QueryRequest
    finish: Callable[[Points], Points] | None = None


def rewrite(request: models.QueryRequest, manifest: Manifest) -> Rewritten:
    """`request` with every nearest query on a corrected vector corrected, and our payload key left out.

    For storage="vector" the query must be the vector itself: see
    `references` and `resolved`.
    """
    version = corrected_version(request.query, request.using, manifest)
    shown = without_our_key(request.with_payload)
    prefetches = [rewrite_prefetch(child, manifest) for child in prefetches_of(request.prefetch)]
    if version is None:
        query = _over_corrected(request.query, prefetches_of(request.prefetch), manifest)
        fields = {"prefetch": prefetches or None, "query": query, "with_payload": shown}
        return Rewritten(changed(request, fields))
    if version.everywhere and version.metric is not Metric.EUCLIDEAN:
        return Rewritten(changed(request, _augmented(request, prefetches, version) | {"with_payload": shown}))
    corrected = changed(
        request,
        {
            "prefetch": _candidates(request, prefetches, _results(request), version),
            "query": formula(version),
            "using": None,
            "filter": None,
            "lookup_from": None,
            "score_threshold": similarity_threshold(request.score_threshold, version.metric),
            "with_payload": shown,
        },
    )
    return Rewritten(corrected, finishing(version.metric, corrected.score_threshold))


def _results(request: models.QueryRequest) -> int:
    """How many results, from the first on, are needed to answer `request`."""
    return (request.limit or SERVER_LIMIT) + (request.offset or 0)


def rewrite_prefetch(prefetch: models.Prefetch, manifest: Manifest) -> models.Prefetch:
    """`prefetch` with every nearest query on a corrected vector in it corrected."""
    children = prefetches_of(prefetch.prefetch)
    prefetches = [rewrite_prefetch(child, manifest) for child in children]
    version = corrected_version(prefetch.query, prefetch.using, manifest)
    if version is None:
        if not prefetches:
            return prefetch
        query = _over_corrected(prefetch.query, children, manifest)
        return changed(prefetch, {"prefetch": prefetches, "query": query})
    if version.everywhere and version.metric is not Metric.EUCLIDEAN:
        return changed(prefetch, _augmented(prefetch, prefetches, version))
    results = prefetch.limit or SERVER_LIMIT
    return _prefetch(
        prefetch=_candidates(prefetch, prefetches, results, version),
        query=formula(version),
        limit=results,
        score_threshold=similarity_threshold(prefetch.score_threshold, version.metric),
    )


_PREFETCH = models.Prefetch()


def _prefetch(**fields: Any) -> models.Prefetch:
    """A prefetch of what is known to be valid: a copy takes a quarter of the time of a new one."""
    return changed(_PREFETCH, fields)


def _candidates(
    node: Node,
    prefetches: list[models.Prefetch],
    results: int,
    version: Version,
) -> list[models.Prefetch]:
    """The raw query of `node` over as many candidates as its corrected results may hide among."""
    if version.storage == "vector":
        return _by_augmented_vector(node, prefetches, results, version)
    limit = _over_all(prefetches, version.candidates(results, is_exact(node.params)), version)
    return [
        _prefetch(
            prefetch=prefetches or None,
            query=nearest(node.query),
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


def _by_augmented_vector(
    node: Node, prefetches: list[models.Prefetch], results: int, version: Version
) -> list[models.Prefetch]:
    """The query in d + 1 dimensions; and in d, among the points that lack the augmented vector, if there are any.

    Over prefetches the latter ranks all that they give: a filter would go down into them and change what they find.
    """
    augmented = _prefetch(filter=node.filter, limit=results, **_augmented(node, prefetches, version))
    if version.everywhere:
        return [augmented]
    lacking = models.Filter(must=node.filter, must_not=has_vector(version.augmented_vector))
    plain = _prefetch(
        query=nearest(node.query),
        using=node.using,
        filter=node.filter if prefetches else lacking,
        prefetch=prefetches or None,
        params=node.params,
        limit=_over_all(prefetches, results, version),
    )
    return [augmented, plain]


def _augmented(node: Node, prefetches: list[models.Prefetch], version: Version) -> dict[str, Any]:
    """The query of `node` in d + 1 dimensions, [q, 1] or, under Euclidean distance, [q, 0]: where it goes, over what,
    and how. The last component is unlike the others, so that codes made for those lose it."""
    query = nearest(node.query)
    query = query if version.metric is not Metric.COSINE else _unit(query)
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


def _unit(vector: list[float]) -> list[float]:
    length = math.hypot(*vector) or 1.0
    if abs(length - 1.0) < UNIT:
        return vector
    return [value / length for value in vector]


def _over_corrected(query: object, children: list[models.Prefetch], manifest: Manifest) -> Any:
    """`query` over `children`, of which some now yield similarities where they yielded distances."""
    if not isinstance(query, models.FormulaQuery):
        return query
    versions = [corrected_version(child.query, child.using, manifest) for child in children]
    euclidean = [n for n, each in enumerate(versions) if each is not None and each.metric is Metric.EUCLIDEAN]
    return over_similarities(query, euclidean)
