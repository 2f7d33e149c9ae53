"""How widely a corrected search must look to be as exact as the raw index: found by searching with queries of the bank.

Searches by an index miss some of the exact results, corrected or not. A corrected one need not miss fewer than a raw
one: more candidates, or a wider search of the graph, cost time and cannot mend the index.

Queries of the bank stand for those to come. Measured on 10,000 functions and five fits, 64 queries of the bank needed
22, 23, 32, 65 and 194 candidates for 0.99 of their corrected top 10, and 64 that no fit had seen 22, 23, 30, 73, 162.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from qdrant_client import models

from hubplugin.calibration import first_that, ratios, recall
from hubplugin.store import Hits
from hubplugin_qdrant.manifest import SMALLEST_PAGE, Manifest, Version
from hubplugin_qdrant.requests import Rewritten, as_requests, rewrite
from hubplugin_qdrant.transport import Transport

LOCAL_QUERIES = 32
"""Calibration queries in local mode, which ranks every point in Python."""

MOST_CANDIDATES = 10_240
"""More candidates than this cost a server more than the correction is worth; storage="vector" needs none."""

EXACT_MARGIN = 4.0
"""An exact search gets so many times the candidates with which all calibration queries found all that they should. Of
800 queries that five fits had not seen, 2 to 11 needed more than these did, up to 5 twice as many, none four times."""

DEFAULT_EF, LARGEST_EF = 100, 4096
"""The hnsw_ef of a server where none is chosen, and the largest that is tried."""


class Searches:
    """Searches of the collection behind `transport` for the calibration queries [m, d] by the vector `using`. `exact`
    ones look at every point; `exact_allowed` says whether they may."""

    def __init__(self, transport: Transport, using: str, queries: np.ndarray):
        self._transport, self._using, is_local = transport, using, transport.is_local
        self._queries = (queries[:: max(1, len(queries) // LOCAL_QUERIES)] if is_local else queries).tolist()
        self.exact_allowed = transport.strict.search_allow_exact is not False

    def raw(self, limit: int, exact: bool) -> Hits:
        return self._search(None, limit, exact)

    def corrected(self, version: Version, limit: int, exact: bool) -> Hits:
        codes = not self._transport.is_local
        seen = version.model_copy(update={"everywhere": version.storage == "vector", "codes": codes})
        return self._search(Manifest(active={version.vector: seen}), limit, exact)

    def _search(self, manifest: Manifest | None, limit: int, exact: bool) -> Hits:
        """Corrected by `manifest` if there is one: the request of `HubQdrantClient`, which need not look it up."""
        params = models.SearchParams(exact=True) if exact and not self._transport.is_local else None  # which warns
        requests = as_requests(
            models.QueryRequest(query=query, using=self._using or None, limit=limit, params=params, with_payload=False)
            for query in self._queries
        )
        sent = [Rewritten(each) if manifest is None else rewrite(each, manifest) for each in requests]
        found: list[Any] = []
        for one, response in zip(sent, self._transport.answers([each.request for each in sent]), strict=True):
            found.append(response.points if one.finish is None else one.finish(response.points))
        return Hits([[p.id for p in points] for points in found], [[p.score for p in points] for points in found])


def calibrated(version: Version, points: int, searches: Searches) -> Version:
    """`version` with the fewest candidates, or the smallest hnsw_ef, that give it `version.agreement` times the recall
    of the raw index in a collection of `points`; or with the most that are tried. And with the candidates that give
    exact searches everything, for which an index that misses much is no measure."""
    exact = searches.exact_allowed
    raw = recall(searches.raw(SMALLEST_PAGE, False), searches.raw(2 * SMALLEST_PAGE, exact))
    most = max(min(points, MOST_CANDIDATES, version.max_candidates or points), SMALLEST_PAGE)
    widest = version.model_copy(update={"oversampling": most / SMALLEST_PAGE, "max_candidates": most, "hnsw_ef": None})
    if not exact and version.storage == "vector":
        widest = widest.model_copy(update={"hnsw_ef": LARGEST_EF})
    truth = searches.corrected(widest, 2 * SMALLEST_PAGE, exact)
    widths = _widths(version, most)
    tried: dict[int, float] = {}

    def reaches(number: int) -> bool:
        tried[number] = recall(searches.corrected(widths[number], SMALLEST_PAGE, False), truth)
        return tried[number] >= version.agreement * raw

    chosen = first_that(reaches, len(widths))
    if chosen not in tried:  # the last, where none before it reaches
        reaches(chosen)
    measured: dict[str, Any] = {"recall": tried[chosen], "raw_recall": raw if exact else None}
    if exact and version.storage == "payload":
        wider = widths[chosen:]

        def finds_all(number: int) -> bool:
            return recall(searches.corrected(wider[number], SMALLEST_PAGE, True), truth) == 1.0

        enough = first_that(finds_all, len(wider))
        measured["exact_oversampling"] = EXACT_MARGIN * wider[enough].oversampling
    return widths[chosen].model_copy(update=measured)


def _widths(version: Version, most: int) -> list[Version]:
    """`version` with each number of candidates, or hnsw_ef, that may be chosen, ascending."""
    if version.storage == "vector":
        larger = [round(DEFAULT_EF * ratio) for ratio in ratios(LARGEST_EF / DEFAULT_EF)[1:]]
        return [version.model_copy(update={"hnsw_ef": each}) for each in (None, *larger)]
    return [version.model_copy(update={"oversampling": each}) for each in ratios(most / SMALLEST_PAGE)]
