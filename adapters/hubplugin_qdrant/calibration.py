"""How widely a corrected search must look to be as exact as the raw index: found by searching with queries of the bank.

Each shard gives as many candidates as are asked for. Where points are sharded by keys, as tenants are, a search by one
key gets them from its own shards alone: so each calibration query goes to one key, drawn as the points are spread.

Searches by an index miss some of the exact results, corrected or not. A corrected one need not miss fewer than a raw
one: more candidates, or a wider search of the graph, cost time and cannot mend the index.

Queries of the bank stand for those to come. Measured on 10,000 functions and five fits, 64 queries of the bank needed
22, 23, 32, 65 and 194 candidates for 0.99 of their corrected top 10, and 64 that no fit had seen 22, 23, 30, 73, 162.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from qdrant_client import models

from hubplugin.calibration import first_that, ratios, recall
from hubplugin.store import Hits, Id
from hubplugin_qdrant.manifest import SMALLEST_PAGE, Manifest, Version
from hubplugin_qdrant.requests import Rewritten, as_requests, rewrite
from hubplugin_qdrant.transport import Transport

LOCAL_QUERIES = 32
"""Calibration queries in local mode, which ranks every point in Python."""

KEYED_QUERIES = 256
"""Calibration queries where points are sharded by keys: a tenant with a hundredth of the points gets two or three."""

MOST_CANDIDATES = 10_240
"""More candidates than this cost a server more than the correction is worth; storage="vector" needs none."""

EXACT_MARGIN = 4.0
"""An exact search gets so many times the candidates with which all calibration queries found all that they should. Of
800 queries that five fits had not seen, 2 to 11 needed more than these did, up to 5 twice as many, none four times."""

DEFAULT_EF, LARGEST_EF = 100, 4096
"""The hnsw_ef of a server where none is chosen, and the largest that is tried."""


class Searches:
    """Searches of the collection behind `transport` for the calibration queries [m, d] by the vector `using`. `exact`
    ones look at every point; `exact_allowed` says whether they may, `largest_ef` how widely they may look."""

    def __init__(self, transport: Transport, using: str, queries: np.ndarray):
        self._transport, self._using, is_local = transport, using, transport.is_local
        asked = (queries[:: max(1, len(queries) // LOCAL_QUERIES)] if is_local else queries).tolist()
        keys: Sequence[Id | None] = drawn(transport.points_of_shards(), KEYED_QUERIES) or [None] * len(asked)
        self._asked = list(zip(itertools.cycle(asked), keys, strict=False))
        strict = transport.strict
        self.exact_allowed = strict.search_allow_exact is not False
        self.largest_ef = min(LARGEST_EF, strict.search_max_hnsw_ef or LARGEST_EF)
        self._limit = strict.max_query_limit or MOST_CANDIDATES

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
            models.QueryRequest(
                query=query,
                using=self._using or None,
                limit=min(limit, self._limit),
                params=params,
                with_payload=False,
                shard_key=key,
            )
            for query, key in self._asked
        )
        sent = [Rewritten(each) if manifest is None else rewrite(each, manifest) for each in requests]
        found: list[Any] = []
        for one, response in zip(sent, self._transport.answers([each.request for each in sent]), strict=True):
            found.append(response.points if one.finish is None else one.finish(response.points))
        return Hits([[p.id for p in points] for points in found], [[p.score for p in points] for points in found])


def drawn(points: dict[Id, int], count: int) -> list[Id]:
    """`count` shard keys, each as often as its share of the `points`; none where there are no keys."""
    ends = np.cumsum([*points.values()])
    if not len(ends) or not ends[-1]:
        return []
    middles = (np.arange(count) + 0.5) * ends[-1] / count
    return [list(points)[row] for row in np.searchsorted(ends, middles, side="right")]


def calibrated(version: Version, points: int, searches: Searches) -> Version:
    """`version` with the fewest candidates, or the smallest hnsw_ef, that give it `version.agreement` times the recall
    of the raw index in a collection of `points`; or with the most that are tried. And with the candidates that give
    exact searches everything, for which an index that misses much is no measure."""
    exact = searches.exact_allowed
    raw = recall(searches.raw(SMALLEST_PAGE, False), searches.raw(2 * SMALLEST_PAGE, exact))
    most = min(max(points, SMALLEST_PAGE), MOST_CANDIDATES, version.max_candidates or MOST_CANDIDATES)
    widest = version.model_copy(update={"oversampling": most / SMALLEST_PAGE, "max_candidates": most, "hnsw_ef": None})
    if not exact and version.storage == "vector":
        widest = widest.model_copy(update={"hnsw_ef": searches.largest_ef})
    truth = searches.corrected(widest, 2 * SMALLEST_PAGE, exact)
    widths = _widths(version, most, searches.largest_ef)
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


def _widths(version: Version, most: int, largest_ef: int) -> list[Version]:
    """`version` with each number of candidates, or hnsw_ef, that may be chosen, ascending."""
    if version.storage == "vector":
        larger = [round(DEFAULT_EF * ratio) for ratio in ratios(largest_ef / DEFAULT_EF)[1:]]
        return [version.model_copy(update={"hnsw_ef": each}) for each in (None, *larger)]
    return [version.model_copy(update={"oversampling": each}) for each in ratios(most / SMALLEST_PAGE)]
