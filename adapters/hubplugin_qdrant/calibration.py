"""How many candidates a corrected search must fetch: found with calibration queries and the collection's own search."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from qdrant_client import QdrantClient, models

from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.store import Batch
from hubplugin_qdrant.client import HubQdrantClient
from hubplugin_qdrant.manifest import SMALLEST_PAGE, Manifest, Version
from hubplugin_qdrant.requests.scores import similarity_threshold

CALIBRATION_QUERIES = 32
"""Calibration queries: 320 results."""

MARGIN = 2
"""Times the candidates that gave every query its exact top 10. Measured on 20,000 functions: where they needed
80, other queries agreed to 0.985 with 80 and to 0.996 with 160."""

MOST_CANDIDATES = 10_240
"""More candidates than this cost a server more than the correction is worth; storage="vector" needs none."""

ROUNDING = 1e-5
"""Scores that differ by less are the same."""


def chosen_queries(model: OffsetModel, scan: Iterator[Batch]) -> np.ndarray:
    """Queries of the bank of `model`: [m, d]; where it keeps no more than their mean, vectors of the gallery."""
    bank = model.terms[0].bank
    if len(bank) == 1:
        bank = next(scan).vectors
    rows = np.linspace(0, len(bank) - 1, min(CALIBRATION_QUERIES, len(bank))).astype(int)
    queries: np.ndarray = bank[rows]
    return queries


Asked: TypeAlias = Callable[[QdrantClient, list[models.QueryRequest]], list[models.QueryResponse]]
"""Puts requests to a client, as many at a time as the server takes, and again where it must."""


def calibrated(
    client: QdrantClient, collection: str, version: Version, queries: np.ndarray, points: int, asked: Asked
) -> Version:
    """`version` with the oversampling that suits `collection`; see `with_oversampling`."""

    def last(candidates: int) -> np.ndarray:
        """The raw similarity of the last candidate of each query: [m]."""
        return _similarities(asked(client, _requests(version, queries, 1, candidates - 1)), 1, version)[:, 0]

    def corrected(oversampling: float) -> np.ndarray:
        """The corrected similarities of the best 10 for each query, best first, -inf where there are fewer."""
        wrapped = HubQdrantClient.wrap(client, oversampling=oversampling)
        wrapped._corrections.keep(collection, Manifest(active={version.vector: version}))
        return _similarities(asked(wrapped, _requests(version, queries, SMALLEST_PAGE, 0)), SMALLEST_PAGE, version)

    return with_oversampling(version, points, corrected, last)


def with_oversampling(
    version: Version, points: int, corrected: Callable[[float], np.ndarray], last: Callable[[int], np.ndarray]
) -> Version:
    """`version` with twice the oversampling that gives each query its exact corrected top 10.

    The number of candidates is doubled until the top 10 is certain: no point outside the candidates can score above
    the last candidate's score plus the largest offset. `corrected(oversampling)` are the corrected similarities of the
    best 10 of each query [m, 10], `last(candidates)` the raw one of its last candidate [m]; `points` is how many
    there are.
    """
    most = max(min(points, MOST_CANDIDATES, version.max_candidates or points), SMALLEST_PAGE)
    tried: list[tuple[float, np.ndarray]] = []
    candidates, certain = SMALLEST_PAGE, False
    while not certain and candidates < most:
        candidates = min(2 * candidates, most)
        oversampling = candidates / SMALLEST_PAGE
        found = corrected(oversampling)
        certain = candidates >= points or bool((found[:, -1] >= last(candidates) + version.largest - ROUNDING).all())
        tried.append((oversampling, found))
    if not tried:
        return version.model_copy(update={"oversampling": 1.0, "certain": True})
    exact = tried[-1][1][:, -1:]
    agreements = [float((found >= exact - ROUNDING).mean()) for _, found in tried]
    enough = agreements.index(1.0)  # the last is compared with itself
    oversampling = min(MARGIN * tried[enough][0], most / SMALLEST_PAGE)
    return version.model_copy(update={"oversampling": oversampling, "certain": certain})


def _requests(version: Version, queries: np.ndarray, limit: int, offset: int) -> list[models.QueryRequest]:
    return [
        models.QueryRequest(query=query, using=version.vector or None, limit=limit, offset=offset, with_payload=False)
        for query in queries.tolist()
    ]


def _similarities(found: list[models.QueryResponse], width: int, version: Version) -> np.ndarray:
    scores = np.full((len(found), width), -np.inf)
    for row, response in enumerate(found):
        scores[row, : len(response.points)] = [point.score for point in response.points]
    if version.metric is Metric.EUCLIDEAN:
        finite = np.isfinite(scores)
        scores[finite] = [similarity_threshold(score, version.metric) or 0.0 for score in scores[finite]]
    return scores
