"""What an application asks of a corrected collection beside its ten nearest."""

import numpy as np
import pytest
from qdrant_client import models

import hubplugin
from hubplugin.metric import normalise
from integration_tests.galleries import APPLY, BANK, QUERIES, K, exact_scores
from tests.qdrant.conftest import apply_to

RRF = models.FusionQuery(fusion=models.Fusion.RRF)
EXACT = models.SearchParams(exact=True)


@pytest.fixture
def corrected(backend, gallery):
    """A gallery with a correction, its exact corrected scores, and the client that an application has."""
    model = apply_to(backend.client(), gallery.name, BANK, **APPLY).model
    gallery.scores = exact_scores(QUERIES, gallery.vectors, model)
    gallery.unit, gallery.offsets = normalise(gallery.vectors, "targets"), model.offsets(gallery.vectors)
    gallery.hub = backend.wrapped(oversampling=len(gallery.ids) / K)  # every point is a candidate
    return gallery


def ids(points):
    return [point.id for point in points]


def expected_scores(scores, k=K):
    return np.sort(scores)[::-1][:k]


def test_groups_hold_the_corrected_best_of_each(backend, corrected):
    modules = np.arange(len(corrected.ids)) % 40
    for row, query in enumerate(QUERIES[:5]):
        groups = corrected.hub.query_points_groups(
            corrected.name, group_by="module", query=query, limit=5, group_size=2, search_params=EXACT
        ).groups
        best = sorted(
            (expected_scores(corrected.scores[row, modules == module], 2) for module in range(40)),
            key=lambda scores: -scores[0],
        )[:5]
        for group, scores in zip(groups, best, strict=True):
            np.testing.assert_allclose([hit.score for hit in group.hits], scores[: len(group.hits)], rtol=0, atol=1e-4)


def test_a_hybrid_search_fuses_the_corrected_ranking(backend, fill):
    gallery = fill(using="code", sparse=True)
    apply_to(backend.client(), gallery.name, BANK, vector="code", **APPLY)
    hub = backend.wrapped()
    words = models.SparseVector(indices=list(range(0, 384, 3)), values=[1.0] * 128)
    dense = hub.query_points(gallery.name, query=QUERIES[0], using="code", limit=20, search_params=EXACT).points
    sparse = hub.query_points(gallery.name, query=words, using="words", limit=20).points
    fused = hub.query_points(
        gallery.name,
        prefetch=[
            models.Prefetch(query=QUERIES[0].tolist(), using="code", limit=20, params=EXACT),
            models.Prefetch(query=words, using="words", limit=20),
        ],
        query=RRF,
        limit=K,
    ).points
    shares: dict[int | str, float] = {}
    for ranking in (ids(dense), ids(sparse)):
        for rank, key in enumerate(ranking):
            shares[key] = shares.get(key, 0.0) + 1 / (2 + rank)
    best = sorted(shares.values(), reverse=True)[:K]
    assert {point.id for point in fused} <= set(shares)
    np.testing.assert_allclose([point.score for point in fused], best, rtol=0, atol=1e-5)


def test_every_form_of_a_query_is_corrected_wherever_it_stands(backend, corrected, fill):
    elsewhere = fill(rows=40)
    row = 8
    own, others = corrected.ids[row], np.delete(corrected.unit @ corrected.unit[row] + corrected.offsets, row)
    whole = corrected.unit @ corrected.unit[row] + corrected.offsets
    place = models.LookupLocation(collection=elsewhere.name)
    for asked, scores in (
        ({"query": corrected.vectors[row].tolist()}, whole),
        ({"query": models.NearestQuery(nearest=corrected.vectors[row].tolist())}, whole),
        ({"query": own}, others),
        ({"query": elsewhere.ids[row], "lookup_from": place}, None),
    ):
        found = corrected.hub.query_points(corrected.name, limit=K, search_params=EXACT, **asked).points
        if scores is None:  # the server leaves an id that is a query out, wherever it lies
            scores = others if own not in ids(found) else whole
        expected = expected_scores(scores)
        np.testing.assert_allclose([point.score for point in found], expected, rtol=0, atol=1e-4)
        prefetch = models.Prefetch(limit=K, params=EXACT, **asked)
        fused = corrected.hub.query_points(corrected.name, prefetch=prefetch, query=RRF, limit=K).points
        assert set(ids(fused)) == set(ids(found))
        # Several shards rank a fusion in a prefetch each by itself: what a plain client gets is right.
        nested = models.Prefetch(prefetch=prefetch, query=RRF, limit=K)
        by_hand = models.Prefetch(prefetch=corrected_by_hand(asked, len(corrected.ids)), query=RRF, limit=K)
        fused, expected_points = (
            client.query_points(corrected.name, prefetch=tree, query=RRF, limit=K).points
            for client, tree in ((corrected.hub, nested), (corrected.hub.raw, by_hand))
        )
        assert set(ids(fused)) == set(ids(expected_points))


@pytest.mark.needs("server")
def test_a_fusion_by_ids_leaves_out_the_points_that_are_asked_for(backend, fill, storage):
    gallery = fill(using="code")
    hubplugin.apply(gallery.store(storage), BANK, **APPLY)
    hub, near = backend.wrapped(), gallery.vectors @ gallery.vectors.T
    for row in range(0, 100, 5):
        asked = [gallery.ids[each] for each in np.argsort(-near[row])[:2]]  # a point and its nearest neighbour
        prefetch = [models.Prefetch(query=key, using="code", limit=20) for key in asked]
        found = hub.query_points(gallery.name, RRF, prefetch=prefetch, limit=K).points
        assert len(found) == K
        assert not set(asked) & set(ids(found))


def corrected_by_hand(asked, candidates):
    """The query `asked` over so many candidates, corrected as a plain client would write it."""
    raw = models.Prefetch(limit=candidates, params=EXACT, **asked)
    formula = models.SumExpression(sum=["$score", "hub_offset.v1"])
    return models.Prefetch(
        prefetch=raw, query=models.FormulaQuery(formula=formula, defaults={"hub_offset.v1": 0.0}), limit=K
    )
