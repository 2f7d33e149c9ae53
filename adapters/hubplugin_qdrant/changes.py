"""Which vectors of a collection are no longer those that were read, found out without reading them again.

The server is asked for the exact scores of known points for two random queries: a hundredth of the bytes of the
vectors. A vector that has changed scores differently, but by a chance of one in many millions.
"""

from __future__ import annotations

import numpy as np
from qdrant_client import models

from hubplugin.metric import Metric, normalise
from hubplugin.reductions import Compute, Similarities, dense
from hubplugin.store import Batch, Id
from hubplugin.vectors import as_vectors
from hubplugin_qdrant.requests.selectors import having
from hubplugin_qdrant.transport import Transport, plain_id

RANDOM_QUERIES = 2

ROUNDING = 2e-6
"""Scores that differ by less, of vectors of length 1, are those of the same vector: some 30 times the rounding of
float32. A vector that is taken for changed and is not costs one more reading and does no harm."""


def can_tell(transport: Transport) -> bool:
    """Whether the server is fast at exact searches, and allows these and filters on what may have no index yet."""
    strict = transport.strict
    allowed = strict.search_allow_exact is not False and strict.unindexed_filtering_retrieve is not False
    return allowed and not transport.is_local


def changed_ids(transport: Transport, using: str, metric: Metric, read: Batch) -> list[Id]:
    """The ids of those of `read` whose vector `using` is another one now; not those that are gone."""
    queries = random_queries(read.vectors)
    request = models.QueryRequest(
        using=using or None,
        filter=having(read.ids),
        limit=len(read.ids),
        params=models.SearchParams(exact=True),
        with_payload=False,
        shard_key=read.place,
    )
    places = {point: row for row, point in enumerate(read.ids)}
    found = np.full((len(queries), len(read.ids)), np.nan)
    for scores, answer in zip(found, transport.scores(request, queries.tolist()), strict=True):
        for point, score in answer:
            scores[places[plain_id(point)]] = score
    differs = (
        np.abs(found - expected_scores(metric, read.vectors, queries)) > rounding(metric, read.vectors, queries)
    ).any(axis=0)
    return [read.ids[row] for row in np.flatnonzero(differs).tolist()]


def random_queries(vectors: np.ndarray) -> np.ndarray:
    """Queries that lie where `vectors` [b, d] do: [2, d] float32."""
    drawn = np.random.default_rng().normal(size=(RANDOM_QUERIES, vectors.shape[1])) * vectors.std()
    return np.asarray(drawn, np.float32)


def expected_scores(metric: Metric, vectors: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """What a server answers of `vectors` [b, d] to `queries` [m, d]: [m, b] float64."""
    if metric is Metric.COSINE:
        queries = normalise(queries, "queries")
    similarities = Similarities(queries, metric, Compute("cpu", precision="float64"))
    found: np.ndarray = dense(similarities, as_vectors(vectors, "vectors")).numpy()
    return np.sqrt(np.maximum(-2 * found, 0)) if metric is Metric.EUCLIDEAN else found


def rounding(metric: Metric, vectors: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """By how much a score may differ from the expected one: [m, b]."""
    asked, given = np.linalg.norm(queries, axis=1)[:, None], np.linalg.norm(vectors, axis=1)
    sizes = {Metric.COSINE: np.ones((len(asked), len(given))), Metric.EUCLIDEAN: asked + given}
    size: np.ndarray = sizes.get(metric, asked * given)
    return ROUNDING * size
