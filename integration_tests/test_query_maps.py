"""A map of the query that pairs have taught: every search ranks as model.queries(q) @ t + offset does in float64."""

from dataclasses import replace

import numpy as np
import pytest
from qdrant_client import models

import hubplugin
from hubplugin import OffsetModel
from hubplugin.jobs.write import write
from integration_tests.galleries import (
    AGREED,
    EXACT,
    LATER,
    PAIRS,
    QUERIES,
    TARGETS,
    K,
    assert_same,
    exact_scores,
    ids_of,
    payload,
    point_id,
)

ROUNDING = 1e-5
"""By how much a score may differ from float64: what float32 loses of an offset, a sum over the bank, is most of it."""


@pytest.fixture(scope="session")
def model() -> OffsetModel:
    """A default model with the map that 2,500 pairs teach, which changes half of the rankings."""
    fitted = hubplugin.fit(TARGETS, PAIRS, learn=True)
    mapped, plain = (
        exact_scores(QUERIES, TARGETS, model) for model in (fitted, without_map(fitted))
    )
    different = (np.argsort(-mapped)[:, :K] != np.argsort(-plain)[:, :K]).any(axis=1)
    assert different.mean() > 0.5
    return fitted


def without_map(model):
    return replace(model, query_map=None).centre_on(TARGETS)


def assert_exact(found, scores):
    """found: the points of each query, best first; scores: exact ones of all points [queries, targets]."""
    best = -np.sort(-scores, axis=1)[:, :K]
    np.testing.assert_allclose(
        [[point.score for point in points] for points in found],
        best,
        rtol=0,
        atol=ROUNDING,
    )


@pytest.fixture
def mapped(backend, fill, storage, model):
    """A collection that was given the model, its exact scores, and the client that an application has."""
    gallery = fill(using="code")
    gallery.before = gallery.content()
    write(gallery.store(storage), model)
    gallery.scores = exact_scores(QUERIES, gallery.vectors, model)
    gallery.hub = backend.wrapped(
        oversampling=len(gallery.ids) / K
    )  # every point is a candidate
    return gallery


def test_single_searches_batches_and_prefetches_rank_by_the_mapped_query(mapped):
    name, hub = mapped.name, mapped.hub
    alone = mapped.search(hub, queries=2 * QUERIES, search_params=EXACT)
    assert_exact(alone, mapped.scores)
    requests = [
        models.QueryRequest(query=query.tolist(), using="code", limit=K, params=EXACT)
        for query in QUERIES
    ]
    assert_exact(
        [response.points for response in hub.query_batch_points(name, requests)],
        mapped.scores,
    )
    for query, points in zip(QUERIES[:5], alone, strict=False):
        inner = models.Prefetch(
            query=query.tolist(), using="code", limit=K, params=EXACT
        )
        fused = hub.query_points(
            name,
            models.FusionQuery(fusion=models.Fusion.RRF),
            prefetch=[inner],
            limit=K,
        ).points
        assert ids_of([fused]) == ids_of([points])


def test_thresholds_and_groups_are_of_the_mapped_query(mapped):
    threshold = float(np.quantile(mapped.scores[0], 0.9))
    (points,) = mapped.search(
        mapped.hub,
        queries=QUERIES[:1],
        limit=100,
        score_threshold=threshold,
        search_params=EXACT,
    )
    assert len(points) == (mapped.scores[0] >= threshold).sum()
    groups = mapped.hub.query_points_groups(
        mapped.name,
        "row",
        QUERIES[0],
        "code",
        limit=K,
        group_size=1,
        search_params=EXACT,
    ).groups
    assert_exact([[group.hits[0] for group in groups]], mapped.scores[:1])


def test_a_plain_client_finds_the_same_by_the_printed_request(backend, mapped, storage):
    store = mapped.store()
    for row, query in enumerate(QUERIES[:5]):
        body = store.explain(query, K).request["body"]
        (response,) = backend.client().query_batch_points(
            mapped.name, [models.QueryRequest.model_validate(body)]
        )
        if storage == "vector":
            assert_exact([response.points], mapped.scores[row : row + 1])
        else:  # among as many candidates as were calibrated
            found = np.array(
                [
                    mapped.scores[row, mapped.ids.index(point.id)]
                    for point in response.points
                ]
            )
            np.testing.assert_allclose(
                [point.score for point in response.points], found, rtol=0, atol=ROUNDING
            )
            assert (
                found >= -np.sort(-mapped.scores[row])[K - 1] - ROUNDING
            ).mean() >= AGREED - 0.1


def test_later_targets_a_rollback_and_a_removal_know_the_map(backend, mapped, model):
    fresh = [point_id(len(mapped.ids) + row) for row in range(len(LATER))]
    mapped.insert(fresh[:20], LATER[:20])
    points = [
        mapped.point(key, vector, payload(0))
        for key, vector in zip(fresh[20:], LATER[20:], strict=True)
    ]
    mapped.hub.upsert(mapped.name, points, wait=True)
    assert mapped.health()[1:] == (20, 0)
    hubplugin.refresh(mapped.store())
    assert mapped.health()[1:] == (0, 0)
    vectors = np.concatenate([mapped.vectors, LATER])

    def assert_ranks_by(model):
        hub = backend.wrapped(oversampling=len(vectors) / K)
        assert_exact(
            mapped.search(hub, search_params=EXACT),
            exact_scores(QUERIES, vectors, model),
        )

    assert_ranks_by(model)
    plain = without_map(model)
    write(mapped.store(), plain)
    assert_ranks_by(plain)
    hubplugin.rollback(mapped.store())
    assert_ranks_by(model)
    backend.client().delete(mapped.name, fresh, wait=True)
    hubplugin.remove(mapped.store())
    assert_same(mapped.content(), mapped.before)


@pytest.mark.needs("server")
def test_a_graph_finds_as_much_of_the_mapped_ranking_as_of_the_raw_one(
    fill, storage, model
):
    gallery = fill(using="code", graph=True)
    store = gallery.store(storage)
    write(store, model)
    raw = gallery.agreement(store.search(QUERIES, K, raw=True).ids, None)
    assert (
        gallery.agreement(gallery.store().search(QUERIES, K).ids, model) >= raw - 0.02
    )
