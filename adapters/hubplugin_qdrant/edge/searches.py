"""A nearest query to a shard, raw or corrected by the engine's own formula."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import qdrant_edge as edge
from qdrant_client import models

from hubplugin.metric import Metric
from hubplugin.store import Hits
from hubplugin_qdrant.edge.shard import Shard, one_line
from hubplugin_qdrant.manifest import Version
from hubplugin_qdrant.requests import similarity_threshold, with_distances
from hubplugin_qdrant.transport import plain_id

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(TypedDict, total=False):
    """Further arguments of `qdrant_edge.QueryRequest`, by the same names."""

    offset: int
    filter: edge.Filter | None
    params: edge.SearchParams | None
    score_threshold: float | None
    with_payload: bool | list[str] | edge.PayloadSelector
    with_vector: bool | list[str]


def nearest(
    shard: Shard,
    version: Version | None,
    queries: np.ndarray,
    limit: int,
    hidden: str | None = None,
    **options: Unpack[Options],
) -> list[list[models.ScoredPoint]]:
    """The nearest of each of `queries` [m, d], best first, corrected by `version` unless it is None. hidden: the
    payload key that is left out, unless payload is asked for by name."""
    if hidden is not None and options.get("with_payload") is True:
        options["with_payload"] = edge.PayloadSelector.Exclude([hidden])
    requests = [_request(shard, version, query, limit, **options) for query in np.asarray(queries, np.float32)]
    with one_line(shard.url):
        found = shard.engine.query_batch(edge.QueryBatchRequest(requests))
        return [_points(points, version) for points in found]


def _request(
    shard: Shard, version: Version | None, query: np.ndarray, limit: int, **options: Unpack[Options]
) -> edge.QueryRequest:
    given: dict[str, Any] = {"with_payload": False, "with_vector": False, **options}
    offset = given.pop("offset", 0)
    raw = edge.Query.Nearest(query.tolist(), shard.using or None)
    if version is None:
        return edge.QueryRequest(limit, offset, raw, **given)
    filtered = {name: given.pop(name, None) for name in ("filter", "params")}
    params = filtered["params"]
    exact = params is not None and params.exact
    candidates = edge.Prefetch(version.candidates(limit + offset, exact), raw, **filtered)
    given["score_threshold"] = similarity_threshold(given.get("score_threshold"), version.metric)
    return edge.QueryRequest(limit, offset, formula(version), [candidates], **given)


def formula(version: Version) -> edge.Formula:
    """The corrected similarity of a candidate, as `hubplugin_qdrant.requests.formula` has it for a server."""
    score = edge.Expression.Variable("$score")
    if version.metric is Metric.EUCLIDEAN:
        score = edge.Expression.Mult([edge.Expression.Constant(-0.5), score, score])
    return edge.Formula(
        edge.Expression.Sum([score, edge.Expression.Variable(version.key)]), {version.key: version.missing}
    )


def _points(found: list[edge.ScoredPoint], version: Version | None) -> list[models.ScoredPoint]:
    points = [
        models.ScoredPoint.model_construct(
            id=point.id, version=point.version, score=point.score, payload=point.payload, vector=point.vector
        )
        for point in found
    ]
    euclidean = version is not None and version.metric is Metric.EUCLIDEAN
    return with_distances(points) if euclidean else points


def hits(found: list[list[models.ScoredPoint]]) -> Hits:
    return Hits(
        [[plain_id(point.id) for point in points] for points in found],
        [[point.score for point in points] for points in found],
    )


class CalibrationSearches:
    """Searches of `shard` for `queries` [m, d]; see `calibration.Searches`."""

    exact_allowed = True

    def __init__(self, shard: Shard, queries: np.ndarray):
        self._shard, self._queries = shard, queries

    def raw(self, limit: int, exact: bool) -> Hits:
        return self._found(None, limit, exact)

    def corrected(self, version: Version, limit: int, exact: bool) -> Hits:
        return self._found(version, limit, exact)

    def _found(self, version: Version | None, limit: int, exact: bool) -> Hits:
        return hits(nearest(self._shard, version, self._queries, limit, params=edge.SearchParams(exact=exact)))
