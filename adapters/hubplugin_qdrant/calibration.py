"""How widely a corrected search looks, chosen by searching with queries of the bank.

Each shard gives as many candidates as are asked for. If points are sharded by keys, as
tenants are, a search by one key gets them from its own shards alone: so each
calibration query goes to one key, drawn as the points are spread.

Searches by an index miss some of the exact results, corrected or not. A corrected one
need not miss fewer than a raw one: more candidates, or a wider search of the graph,
cost time and cannot mend the index.

Queries of the bank stand for those to come. Measured on 10,000 functions and five fits,
64 queries of the bank needed 22, 23, 32, 65 and 194 candidates for 0.99 of their
corrected top 10, and 64 that no fit had seen 22, 23, 30, 73, 162.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from qdrant_client import models

from hubplugin.calibration import first_that, ratios, recall
from hubplugin.store import Hits, Id
from hubplugin_qdrant.manifest import (
    MANY_CANDIDATES,
    SMALLEST_PAGE,
    QdrantManifest,
    QdrantVersion,
)
from hubplugin_qdrant.requests import rewrite
from hubplugin_qdrant.transport import QdrantTransport, as_hits

LOCAL_QUERIES = 32
"""Calibration queries in local mode, which ranks every point in Python."""

KEYED_QUERIES = 256
"""Calibration queries if points are sharded by keys: a tenant with a hundredth of the
points gets two or three."""

MOST_CANDIDATES = 10_240
"""More candidates than this cost a server more than the correction is worth."""

FEW_POINTS = SMALLEST_PAGE * MANY_CANDIDATES
"""Of so few points every one is a candidate, at a price that nobody notices."""

EXACT_MARGIN = 4.0
"""An exact search gets so many times the candidates with which all calibration queries
found all that they should. Of 800 queries that five fits had not seen, 2 to 11 needed
more than these did, up to 5 twice as many, none four times."""

DEFAULT_EF = 100
"""The hnsw_ef of a server if none is chosen."""

LARGEST_EF = 4096
"""The largest hnsw_ef that is tried."""


class Searches:
    """Searches of a collection for the calibration queries.

    exact_allowed: True if searches may be `exact`, and look at every point.
    largest_ef: How widely they may look.
    """

    def __init__(self, transport: QdrantTransport, using: str, queries: np.ndarray):
        """Search by the vector `using` for `queries` [m, d]."""
        self._transport = transport
        self._using = using
        if transport.is_local:
            queries = queries[:: max(1, len(queries) // LOCAL_QUERIES)]
        keys: Sequence[Id | None] = draw_keys(
            transport.points_of_shards(), KEYED_QUERIES
        )
        keys = keys or [None] * len(queries)
        rows = itertools.cycle(queries.tolist())
        self._queries = list(zip(rows, keys, strict=False))
        strict = transport.strict
        self.exact_allowed = strict.search_allow_exact is not False
        self.largest_ef = min(LARGEST_EF, strict.search_max_hnsw_ef or LARGEST_EF)
        self._limit = strict.max_query_limit or MOST_CANDIDATES

    def search_raw(self, limit: int, exact: bool) -> Hits:
        return self._search(QdrantManifest(), limit, exact)

    def search_corrected(self, version: QdrantVersion, limit: int, exact: bool) -> Hits:
        codes = not self._transport.is_local
        version = version.replace(everywhere=version.storage == "vector", codes=codes)
        manifest = QdrantManifest(active={version.vector: version})
        return self._search(manifest, limit, exact)

    def _search(self, manifest: QdrantManifest, limit: int, exact: bool) -> Hits:
        """Search corrected by `manifest`, with the requests of `HubQdrantClient`."""
        options: dict[str, Any] = {
            "using": self._using or None,
            "limit": min(limit, self._limit),
            "with_payload": False,
        }
        if exact and not self._transport.is_local:  # which warns
            options["params"] = models.SearchParams(exact=True)
        rewritten = [
            rewrite(
                models.QueryRequest(query=query, shard_key=key, **options), manifest
            )
            for query, key in self._queries
        ]
        search = self._transport.client.query_batch_points
        answers = self._transport.answers([sent for sent, _ in rewritten], search)
        return as_hits(
            finish(answer.points)
            for (_, finish), answer in zip(rewritten, answers, strict=True)
        )


def draw_keys(points: dict[Id, int], count: int) -> list[Id]:
    """Return `count` shard keys, each as often as its share of the `points`.

    None if there are no keys, or no points.
    """
    ends = np.cumsum([*points.values()])
    if not len(ends) or not ends[-1]:
        return []
    middles = (np.arange(count) + 0.5) * ends[-1] / count
    return [list(points)[row] for row in np.searchsorted(ends, middles, side="right")]


class Truth:
    """The exact results of the calibration queries, which others may change meanwhile.

    read: Searches for them, which takes as long as the widest search.
    moves: True until a second read gives the same results.
    """

    def __init__(self, read: Callable[[], Hits]):
        self._read = read
        self._hits = read()
        self.moves = True

    def has_moved(self) -> bool:
        """Read the truth again. Return True if it changed, so that others write."""
        before = self._hits
        self._hits = self._read()
        self.moves = before.ids != self._hits.ids
        return self.moves

    def recall(self, found: Hits, enough: float) -> float:
        """Return the recall of what was just `found`.

        Below `enough` it may be that others write: then what came or went between two
        reads of the truth, one before the search and one after it, does not count.
        """
        share = recall(found, self._hits)
        if share < enough and self.moves:
            before = self._hits
            self.has_moved()
            share = recall(found, expected(found, before, self._hits))
        return share


def expected(found: Hits, before: Hits, after: Hits) -> Hits:
    """Return what a search should have `found` between two reads of the truth.

    That is what lies in both. What lies in one of them comes first where it was found,
    and is not expected elsewhere.
    """
    ids: list[list[Id]] = []
    scores: list[list[float]] = []
    for row, true in enumerate(before.ids):
        moved = {*true} ^ {*after.ids[row]}
        ids.append([point for point in found.ids[row] if point in moved])
        scores.append([math.nan] * len(ids[row]))
        for point, score in zip(true, before.scores[row], strict=True):
            if point not in moved:
                ids[row].append(point)
                scores[row].append(score)
    return Hits(ids, scores)


def calibrate(version: QdrantVersion, points: int, searches: Searches) -> QdrantVersion:
    """Choose how widely corrected searches look.

    Args:
        version: The version that was written.
        points: How many points the collection has.
        searches: Raw and corrected searches for queries of the bank.

    Returns:
        `version` with the fewest candidates, or the smallest hnsw_ef, that give it
        `version.agreement` times the recall of the raw index, or with the most that are
        tried. And with the candidates that give exact searches everything: an index
        that misses much is no measure for these.
    """
    exact = searches.exact_allowed
    in_vector = version.storage == "vector"
    limit = version.max_candidates or MOST_CANDIDATES
    most = min(max(points, SMALLEST_PAGE), MOST_CANDIDATES, limit)
    widest = version.replace(oversampling=most / SMALLEST_PAGE)
    if not in_vector and points <= min(FEW_POINTS, limit):
        return widest
    raw_truth = Truth(lambda: searches.search_raw(2 * SMALLEST_PAGE, exact))
    raw = raw_truth.recall(searches.search_raw(SMALLEST_PAGE, False), 1.0)
    enough = version.agreement * raw
    if in_vector:
        wider_efs = ratios(searches.largest_ef / DEFAULT_EF)[1:]
        efs = [None, *(round(DEFAULT_EF * ratio) for ratio in wider_efs)]
        widths = [version.replace(hnsw_ef=ef) for ef in efs]
        if not exact:
            widest = widest.replace(hnsw_ef=searches.largest_ef)
    else:
        every = ratios(widest.oversampling)
        widths = [version.replace(oversampling=ratio) for ratio in every]
    widest = widest.replace(max_candidates=most)
    truth = Truth(lambda: searches.search_corrected(widest, 2 * SMALLEST_PAGE, exact))
    chosen = _choose(widths, enough, truth, searches)
    if not truth.moves and truth.has_moved():
        # Others began to write after the truth was last read.
        chosen = _choose(widths, enough, truth, searches)
    return chosen.replace(raw_recall=raw) if exact else chosen


def _choose(
    widths: list[QdrantVersion], enough: float, truth: Truth, searches: Searches
) -> QdrantVersion:
    """Return the first of `widths` whose recall is `enough`, or the last.

    It also gets the candidates that give exact searches everything.
    """
    recalls: dict[int, float] = {}

    def reaches(number: int) -> bool:
        found = searches.search_corrected(widths[number], SMALLEST_PAGE, False)
        recalls[number] = truth.recall(found, enough)
        return recalls[number] >= enough

    first = first_that(reaches, len(widths))
    if first not in recalls:  # the last, if none before it reaches
        reaches(first)
    chosen = widths[first].replace(recall=recalls[first])
    if chosen.storage == "vector" or not searches.exact_allowed:
        return chosen
    wider = widths[first:]

    def finds_all(number: int) -> bool:
        found = searches.search_corrected(wider[number], SMALLEST_PAGE, True)
        return truth.recall(found, 1.0) == 1.0

    least = wider[first_that(finds_all, len(wider))]
    return chosen.replace(exact_oversampling=EXACT_MARGIN * least.oversampling)
