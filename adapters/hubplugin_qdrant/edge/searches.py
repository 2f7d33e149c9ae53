"""A nearest query to a shard, raw or corrected by the engine's own formula."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import qdrant_edge as edge
from qdrant_client import models

from hubplugin.metric import Metric
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant.calibration import with_oversampling
from hubplugin_qdrant.edge.shard import Shard, one_line
from hubplugin_qdrant.manifest import Version
from hubplugin_qdrant.requests.scores import similarity_threshold, with_distances

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(TypedDict, total=False):
    """Further arguments of `qdrant_edge.QueryRequest`, by the same names."""

    offset: int
    filter: edge.Filter | None
    params: edge.SearchParams | None
    score_threshold: float | None
    with_payload: Any
    with_vector: Any


def nearest(
    shard: Shard, version: Version | None, queries: np.ndarray, limit: int, **options: Unpack[Options]
) -> list[list[models.ScoredPoint]]:
    """The nearest of each of `queries` [m, d], best first, corrected by `version` unless it is None."""
    requests = [_request(shard, version, query, limit, **options) for query in np.asarray(queries, np.float32)]
    with one_line(shard.url):
        found = shard.engine.query_batch(edge.QueryBatchRequest(requests))
        return [_points(points, version) for points in found]


def _request(
    shard: Shard, version: Version | None, query: np.ndarray, limit: int, **options: Unpack[Options]
) -> edge.QueryRequest:
    given: dict[str, Any] = {"with_payload": False, "with_vector": False, **options}
    if given["with_payload"] is True:
        given["with_payload"] = edge.PayloadSelector.Exclude([m.KEY])
    offset = given.pop("offset", 0)
    raw = edge.Query.Nearest(query.tolist(), shard.using or None)
    if version is None:
        return edge.QueryRequest(limit, offset, raw, **given)
    filtered = {name: given.pop(name, None) for name in ("filter", "params")}
    candidates = edge.Prefetch(version.candidates(limit + offset), raw, **filtered)
    given["score_threshold"] = similarity_threshold(given.get("score_threshold"), version.metric)
    return edge.QueryRequest(limit, offset, formula(version), [candidates], **given)


def formula(version: Version) -> edge.Formula:
    """The corrected similarity of a candidate, as `hubplugin_qdrant.requests.scores.formula` has it for a server."""
    score = edge.Expression.Variable("$score")
    if version.metric is Metric.EUCLIDEAN:
        score = edge.Expression.Mult([edge.Expression.Constant(-0.5), score, score])
    return edge.Formula(edge.Expression.Sum([score, edge.Expression.Variable(version.key)]), {version.key: 0.0})


def _points(found: list[Any], version: Version | None) -> list[models.ScoredPoint]:
    points = [
        models.ScoredPoint.model_construct(
            id=point.id, version=point.version, score=point.score, payload=point.payload, vector=point.vector
        )
        for point in found
    ]
    euclidean = version is not None and version.metric is Metric.EUCLIDEAN
    return with_distances(points) if euclidean else points


def calibrated(shard: Shard, version: Version, queries: np.ndarray) -> Version:
    """`version` with the oversampling that suits the shard; see `calibration.with_oversampling`."""

    def similarities(version: Version | None, limit: int, offset: int = 0) -> np.ndarray:
        found = np.full((len(queries), limit), -np.inf)
        for row, points in enumerate(nearest(shard, version, queries, limit, offset=offset)):
            found[row, : len(points)] = [point.score for point in points]
        if shard.metric is Metric.EUCLIDEAN:
            found = -0.5 * found * np.abs(found)
        return found

    def corrected(oversampling: float) -> np.ndarray:
        return similarities(version.model_copy(update={"oversampling": oversampling}), m.SMALLEST_PAGE)

    return with_oversampling(
        version, shard.count(), corrected, lambda candidates: similarities(None, 1, candidates - 1)[:, 0]
    )
