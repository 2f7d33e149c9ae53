"""Choose how widely a corrected search looks, by searching with queries of the bank.

Each shard returns as many candidates as a search asks for. If points are sharded by
keys, for example by tenant, a search by one key reads only the shards of that key. So
each calibration query searches one key, and keys with more points get more queries.

Searches by an index miss some of the exact results, corrected or not. A corrected
search need not miss fewer than a raw one: more candidates, or a wider search of the
graph, cost time and cannot repair the index.

Queries of the bank represent future queries. In measurements on 10,000 functions and
five fits, 64 queries of the bank needed 22, 23, 32, 65 and 194 candidates for 0.99 of
their corrected top 10, and 64 queries unknown to the fits needed 22, 23, 30, 73 and
162.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
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

AGREEMENT = 0.99
"""The share of the raw index's recall that a corrected search must reach. The last
percent costs as much as the rest, and a loss of 0.1 results in 10 is not noticed."""

LOCAL_QUERIES = 32
"""The number of calibration queries in local mode, which ranks every point in Python."""

KEYED_QUERIES = 256
"""The number of calibration queries if points are sharded by keys. A tenant with one
percent of the points gets two or three."""

MOST_CANDIDATES = 10_240
"""The largest number of candidates that is tried: more would cost a server more than
the correction is worth."""

FEW_POINTS = SMALLEST_PAGE * MANY_CANDIDATES
"""With at most this many points, all points become candidates at a negligible cost."""

EXACT_MARGIN = 4.0
"""The safety factor for the candidates of exact searches, above the number with which
every calibration query finds all expected results. Of 800 queries
unknown to five fits, 2 to 11 needed more candidates than the calibration queries, up to
5 needed twice as many, and none needed four times as many."""

MOST_ATTEMPTS = 4
"""The most times that a width is chosen. Each choice takes 10 to 20 s, in which the
server goes on completing its graph."""

RISE = 0.01
"""The rise of the raw index's recall above which a width is chosen again.

In a collection of 100,000 points, a raw search found 0.85 of the exact results until
the last segments were merged, and then 0.998."""

DEFAULT_EF = 100
"""The hnsw_ef that a server uses by default."""

LARGEST_EF = 4096
"""The largest hnsw_ef that is tried."""


class Searches:
    """Searches of a collection for the calibration queries.

    exact_allowed: True if searches may be `exact`, which compare every point.
    largest_ef: The largest hnsw_ef that a search may use.
    """

    def __init__(self, transport: QdrantTransport, using: str, queries: np.ndarray):
        """Prepare searches on the vector `using` for `queries` [m, d]."""
        self._transport = transport
        self._using = using
        if transport.is_local:
            queries = queries[:: max(1, len(queries) // LOCAL_QUERIES)]
        keys: Sequence[Id | None] = draw_keys(
            transport.points_of_shards(), KEYED_QUERIES
        )
        keys = keys or [None] * len(queries)
        # Each key gets a query; queries are repeated if there are more keys.
        rows = itertools.cycle(queries.tolist())
        self._queries = list(zip(rows, keys, strict=False))
        strict = transport.strict
        self.exact_allowed = strict.search_allow_exact is not False
        self.largest_ef = min(LARGEST_EF, strict.search_max_hnsw_ef or LARGEST_EF)
        self._limit = strict.max_query_limit or MOST_CANDIDATES

    def search_raw(self, limit: int = SMALLEST_PAGE, exact: bool = False) -> Hits:
        """Return the first `limit` results of each query, without a correction."""
        return self._search(QdrantManifest(), limit, exact)

    def search_corrected(
        self, version: QdrantVersion, limit: int = SMALLEST_PAGE, exact: bool = False
    ) -> Hits:
        """Return the first `limit` results of each query, corrected by `version`."""
        version = version.replace(
            everywhere=version.storage == "vector",  # all points have been written
            searches_codes=not self._transport.is_local,
        )
        manifest = QdrantManifest(active={version.vector: version})
        return self._search(manifest, limit, exact)

    def _search(self, manifest: QdrantManifest, limit: int, exact: bool) -> Hits:
        """Search with the requests that `HubQdrantClient` sends for `manifest`."""
        options: dict[str, Any] = {
            "using": self._using or None,
            "limit": min(limit, self._limit),
            "with_payload": False,
        }
        # Local mode is always exact, and warns if it is asked for exact results.
        if exact and not self._transport.is_local:
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

    The list is empty if there are no keys or no points.
    """
    keys = list(points)
    ends = np.cumsum([*points.values()])
    if not keys or not ends[-1]:
        return []
    # Lay the points of all keys end to end, and take the keys at even distances.
    middles = (np.arange(count) + 0.5) * ends[-1] / count
    return [keys[row] for row in np.searchsorted(ends, middles, side="right")]


class Truth:
    """The exact results of the calibration queries.

    Other clients may change these results during the calibration, by writing to the
    collection.

    read: A function that searches for the results.
    is_settled: True if the last two reads returned the same results; False after the
        first read.
    """

    def __init__(self, read: Callable[[], Hits]):
        self._read = read
        self._hits = read()
        self.is_settled = False

    def read_again(self) -> bool:
        """Read the results again. Return True if another client has changed them."""
        before = self._hits
        self._hits = self._read()
        self.is_settled = before.ids == self._hits.ids
        return not self.is_settled

    def recall(self, found: Hits, least_recall: float) -> float:
        """Return the recall of the hits that a search has just `found`.

        A recall below `least_recall` may be due to writes by other clients. So unless
        the exact results are settled, they are read again, and points that differ
        between the two reads do not count.
        """
        share = recall(found, self._hits)
        if share < least_recall and not self.is_settled:
            before = self._hits
            self.read_again()
            share = recall(found, expected_hits(found, before, self._hits))
        return share


def expected_hits(found: Hits, before: Hits, after: Hits) -> Hits:
    """Return the hits expected of a search between two reads of the exact results.

    A search must find every point that is in both reads. A point in only one of the two
    came or went meanwhile: it is expected, and listed first, only if the search has
    `found` it.
    """
    ids: list[list[Id]] = []
    scores: list[list[float]] = []
    for row, ids_before in enumerate(before.ids):
        changed_ids = {*ids_before} ^ {*after.ids[row]}
        ids.append([point for point in found.ids[row] if point in changed_ids])
        scores.append([math.nan] * len(ids[row]))  # NaN ties with no score
        for point, score in zip(ids_before, before.scores[row], strict=True):
            if point not in changed_ids:
                ids[row].append(point)
                scores[row].append(score)
    return Hits(ids, scores)


def calibrate(version: QdrantVersion, points: int, searches: Searches) -> QdrantVersion:
    """Choose how widely corrected searches look.

    Searches by the index must reach `AGREEMENT` times the recall of the raw index.
    Exact searches get a separate, larger number of candidates, `exact_oversampling`, so
    that they find every result even if the index misses some.

    Args:
        version: The version that was written.
        points: The number of points in the collection.
        searches: Raw and corrected searches for queries of the bank.

    Returns:
        `version` with the fewest candidates, or the smallest hnsw_ef, that reach the
        required recall. If none does, the largest value tried is chosen.
    """
    exact = searches.exact_allowed
    version = version.replace(exact_oversampling=None)
    # The versions to try, from the narrowest to the widest search.
    if version.storage == "vector":
        # The first ratio is 1, for which the server's default applies.
        wider_ratios = ratios(searches.largest_ef / DEFAULT_EF)[1:]
        every_ef = [None, *(round(DEFAULT_EF * ratio) for ratio in wider_ratios)]
        versions = [version.replace(hnsw_ef=ef) for ef in every_ef]
    else:
        limit = version.max_candidates or MOST_CANDIDATES
        most_candidates = min(max(points, SMALLEST_PAGE), MOST_CANDIDATES, limit)
        every_ratio = ratios(most_candidates / SMALLEST_PAGE)
        versions = [version.replace(oversampling=ratio) for ratio in every_ratio]
        if points <= min(FEW_POINTS, limit):
            # All points become candidates, so no result can be missed.
            return versions[-1]
    # The truth holds two pages, to see which results are tied at the end of the first.
    raw_truth = Truth(partial(searches.search_raw, 2 * SMALLEST_PAGE, exact))
    raw_recall = raw_truth.recall(searches.search_raw(), least_recall=1.0)
    complete, truth = _find_truth(versions[-1], searches)
    for _ in range(MOST_ATTEMPTS):
        chosen = _choose(versions, AGREEMENT * raw_recall, truth, searches)
        # Choose again if the raw index finds more than before, since the server may
        # still be completing its graph, or if another client has written meanwhile:
        # once the truth has settled, `_choose` does not read it again.
        earlier_recall = raw_recall
        raw_recall = raw_truth.recall(searches.search_raw(), least_recall=1.0)
        is_stable = raw_recall <= earlier_recall + RISE
        if is_stable and not (truth.is_settled and truth.read_again()):
            break
    if exact:
        chosen = chosen.replace(raw_recall=raw_recall)
        if version.storage == "payload":
            # With this oversampling, `_find_truth` found every result.
            chosen = chosen.replace(exact_oversampling=complete.oversampling)
    return chosen


def _find_truth(
    widest: QdrantVersion, searches: Searches
) -> tuple[QdrantVersion, Truth]:
    """Return a version so wide that it finds every corrected result, and its results.

    With offsets in payloads, the number of candidates is raised until a quarter of them
    contain the results. An exact search with as many candidates as `widest` would
    occupy a server for a long time.
    """
    search = partial(searches.search_corrected, exact=searches.exact_allowed)
    if widest.storage == "vector":
        return widest, Truth(partial(search, widest, 2 * SMALLEST_PAGE))
    oversampling = FEW_POINTS / SMALLEST_PAGE
    while True:
        oversampling = min(oversampling, widest.oversampling)
        wide = widest.replace(oversampling=oversampling)
        truth = Truth(partial(search, wide, 2 * SMALLEST_PAGE))
        quarter = wide.replace(oversampling=oversampling / EXACT_MARGIN)
        is_widest = wide == widest
        if is_widest or truth.recall(search(quarter), least_recall=1.0) == 1.0:
            return wide, truth
        oversampling *= EXACT_MARGIN


def _choose(
    versions: list[QdrantVersion],
    least_recall: float,
    truth: Truth,
    searches: Searches,
) -> QdrantVersion:
    """Return the first of `versions` with the `least_recall`, or else the last.

    The versions differ only in how widely a search looks, and the widest is the last.
    """

    def recall_of(index: int) -> float:
        found = searches.search_corrected(versions[index])
        return truth.recall(found, least_recall)

    first_index = first_that(
        lambda index: recall_of(index) >= least_recall, len(versions)
    )
    return versions[first_index].replace(recall=recall_of(first_index))
