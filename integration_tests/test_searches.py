"""What an application asks of a corrected collection beside its ten nearest."""

import numpy as np
import pytest
from qdrant_client import models

from hubplugin.metric import normalise
from integration_tests.galleries import EXACT, QUERIES, K, exact_scores

RRF = models.FusionQuery(fusion=models.Fusion.RRF)


@pytest.fixture
def corrected(backend, gallery):
    """A gallery with a correction, its exact corrected scores, and the client that an application has."""
    model = gallery.correct()
    gallery.scores = exact_scores(QUERIES, gallery.vectors, model)
    gallery.unit, gallery.offsets = (
        normalise(gallery.vectors, "targets"),
        model.offsets(gallery.vectors),
    )
    gallery.hub = backend.wrapped(
        oversampling=len(gallery.ids) / K
    )  # every point is a candidate
    return gallery


def ids(points):
    return [point.id for point in points]


def best(scores, k=K):
    return np.sort(scores)[::-1][:k]


def assert_scores(points, expected, atol=1e-4):
    np.testing.assert_allclose(
        [point.score for point in points], expected, rtol=0, atol=atol
    )


def test_groups_hold_the_corrected_best_of_each(corrected):
    modules = np.arange(len(corrected.ids)) % 40
    for row, query in enumerate(QUERIES[:5]):
        groups = corrected.hub.query_points_groups(
            corrected.name,
            group_by="module",
            query=query,
            limit=5,
            group_size=2,
            search_params=EXACT,
        ).groups
        by_module = [
            best(corrected.scores[row, modules == module], 2) for module in range(40)
        ]
        expected = sorted(by_module, key=lambda scores: -scores[0])[:5]
        for group, scores in zip(groups, expected, strict=True):
            assert_scores(group.hits, scores[: len(group.hits)])


def test_a_hybrid_search_fuses_the_corrected_ranking(backend, fill):
    gallery = fill(using="code", sparse=True)
    gallery.correct()
    hub = backend.wrapped()
    words = models.SparseVector(indices=list(range(0, 384, 3)), values=[1.0] * 128)
    dense = hub.query_points(
        gallery.name, query=QUERIES[0], using="code", limit=20, search_params=EXACT
    ).points
    sparse = hub.query_points(gallery.name, query=words, using="words", limit=20).points
    prefetch = [
        models.Prefetch(
            query=QUERIES[0].tolist(), using="code", limit=20, params=EXACT
        ),
        models.Prefetch(query=words, using="words", limit=20),
    ]
    fused = hub.query_points(gallery.name, prefetch=prefetch, query=RRF, limit=K).points
    shares: dict[int | str, float] = {}
    for ranking in (ids(dense), ids(sparse)):
        for rank, key in enumerate(ranking):
            shares[key] = shares.get(key, 0.0) + 1 / (2 + rank)
    assert set(ids(fused)) <= set(shares)
    assert_scores(fused, best(list(shares.values())), atol=1e-5)


def test_every_form_of_a_query_is_corrected_wherever_it_stands(corrected, fill):
    hub, name, elsewhere, row = corrected.hub, corrected.name, fill(rows=40), 8
    key, vector = corrected.ids[row], corrected.vectors[row].tolist()
    whole = corrected.unit @ corrected.unit[row] + corrected.offsets
    others = np.delete(whole, row)
    place = models.LookupLocation(collection=elsewhere.name)
    for request, scores in (
        ({"query": vector}, whole),
        ({"query": models.NearestQuery(nearest=vector)}, whole),
        ({"query": key}, others),
        ({"query": elsewhere.ids[row], "lookup_from": place}, None),
    ):
        found = hub.query_points(name, limit=K, search_params=EXACT, **request).points
        if (
            scores is None
        ):  # the server leaves an id that is a query out, wherever it lies
            scores = others if key not in ids(found) else whole
        assert_scores(found, best(scores))
        prefetch = models.Prefetch(limit=K, params=EXACT, **request)
        fused = hub.query_points(name, prefetch=prefetch, query=RRF, limit=K).points
        assert set(ids(fused)) == set(ids(found))
        # Several shards rank a fusion in a prefetch each by itself: what a plain client gets is right.
        nested = models.Prefetch(prefetch=prefetch, query=RRF, limit=K)
        by_hand = models.Prefetch(
            prefetch=corrected_by_hand(request, len(corrected.ids)), query=RRF, limit=K
        )
        fused, expected = (
            client.query_points(name, prefetch=tree, query=RRF, limit=K).points
            for client, tree in ((hub, nested), (hub.raw, by_hand))
        )
        assert set(ids(fused)) == set(ids(expected))


@pytest.mark.needs("server")
def test_a_fusion_by_ids_leaves_out_the_points_that_are_asked_for(
    backend, fill, storage
):
    gallery = fill(using="code")
    gallery.correct(storage)
    hub, near = backend.wrapped(), gallery.vectors @ gallery.vectors.T
    for row in range(0, 100, 5):
        pair = [
            gallery.ids[place] for place in np.argsort(-near[row])[:2]
        ]  # a point and its nearest neighbour
        prefetch = [models.Prefetch(query=key, using="code", limit=20) for key in pair]
        found = hub.query_points(gallery.name, RRF, prefetch=prefetch, limit=K).points
        assert len(found) == K
        assert not set(pair) & set(ids(found))


def corrected_by_hand(request, candidates):
    """The query of `request` over so many candidates, corrected as a plain client would write it."""
    raw = models.Prefetch(limit=candidates, params=EXACT, **request)
    formula = models.SumExpression(sum=["$score", "hub_offset.v1"])
    return models.Prefetch(
        prefetch=raw,
        query=models.FormulaQuery(formula=formula, defaults={"hub_offset.v1": 0.0}),
        limit=K,
    )
