"""Corrections that depend on the query, in a client: the ranking of the rule over all that a search may return."""

from __future__ import annotations

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from hubplugin import InputError, fit_rule
from hubplugin_qdrant import QdrantStore
from tests.core.formulas import similarity
from tests.qdrant.conftest import COLLECTIONS, DIM, ROWS, Photos, clustered

EVERYTHING = {"oversampling": 12.0}
"""120 candidates for 10 results: the whole collection, so that the ranking is exact."""

ALL = np.arange(ROWS)
RED = models.Filter(must=[models.FieldCondition(key="colour", match=models.MatchValue(value="red"))])
REDS = np.arange(0, ROWS, 3)
DISTANCES = {models.Distance.COSINE: "cosine", models.Distance.DOT: "dot", models.Distance.EUCLID: "euclidean"}


def fitted(photos, method):
    targets = QdrantStore(photos.plain, "photos", photos.using)
    second = clustered(4, 40) if method in ("dualdis", "ssn") else None
    return fit_rule(photos.bank, method, targets, second, metric=targets.metric)


def client_with(photos, rule, **options):
    return photos.wrapped(rules={("photos", photos.using): rule}, **(EVERYTHING | options))


def scores(photos, rule, query, rows):
    """Of the rule for some rows of the gallery: float64, from the definition of the similarity."""
    similarities = similarity(query[None], photos.gallery[rows], DISTANCES[photos.distance])
    return rule.rescore(similarities, rule.keep(photos.gallery[rows]))[0]


def best(photos, rule, query, count=10, rows=ALL):
    order = np.argsort(-scores(photos, rule, query, rows), kind="stable")[:count]
    return [int(row) for row in rows[order]]


def search(photos, client, query, **given):
    return client.query_points("photos", query, photos.using or None, **given).points


def ids(points):
    return [point.id for point in points]


@pytest.mark.parametrize("method", ["dis", "dualdis", "dsl", "gc", "ssn"])
def test_nearest_queries_are_ranked_by_the_rule(in_payload, method):
    photos = in_payload
    rule = fitted(photos, method)
    client = client_with(photos, rule)
    for query in photos.queries[:5]:
        found = search(photos, client, query)
        exact = scores(photos, rule, query, ALL)
        np.testing.assert_allclose(exact[ids(found)], np.sort(exact)[::-1][:10], rtol=0, atol=1e-5)
        expected = exact[ids(found)]
        if photos.distance is models.Distance.EUCLID:
            expected = -np.sign(expected) * np.sqrt(2 * np.abs(expected))
        np.testing.assert_allclose([point.score for point in found], expected, rtol=1e-4, atol=1e-4)


def test_a_rule_takes_the_place_of_the_stored_offsets(photos):
    photos.apply()
    rule = fitted(photos, "gc")
    query = photos.queries[0]
    found = search(photos, client_with(photos, rule), query)
    assert ids(found) == best(photos, rule, query) != photos.best(query)
    assert all(set(point.payload) == {"n", "colour"} for point in found)


def test_a_filter_decides_which_target_is_the_nearest(in_payload):
    photos = in_payload
    rule = fitted(photos, "dis")
    client = client_with(photos, rule)
    for query in photos.queries:
        assert ids(search(photos, client, query, query_filter=RED)) == best(photos, rule, query, rows=REDS)


def test_pages_thresholds_payload_and_vectors_mean_what_they_did(in_payload):
    photos = in_payload
    rule = fitted(photos, "dis")
    client, query = client_with(photos, rule), photos.queries[1]
    whole = search(photos, client, query, limit=30)
    assert ids(search(photos, client, query, limit=10, offset=20)) == ids(whole)[20:]
    between = (whole[6].score + whole[7].score) / 2
    assert ids(search(photos, client, query, limit=30, score_threshold=between)) == ids(whole)[:7]
    assert all(point.vector is None and point.payload for point in whole)
    assert not search(photos, client, query, limit=1, with_payload=False)[0].payload
    assert search(photos, client, query, limit=1, with_payload=["n"])[0].payload == {"n": whole[0].id}
    raw = search(photos, photos.wrapped(), query, limit=ROWS, with_vectors=True)
    (shown,) = search(photos, client, query, limit=1, with_vectors=True)
    assert shown.vector == next(point.vector for point in raw if point.id == shown.id)


def test_a_batch_and_the_nearest_of_a_point_are_ranked_by_the_rule(in_payload):
    photos = in_payload
    rule, using = fitted(photos, "dis"), photos.using or None
    client = client_with(photos, rule)
    requests = [models.QueryRequest(query=query.tolist(), using=using, limit=5) for query in photos.queries]
    found = client.query_batch_points("photos", requests)
    assert [ids(each.points) for each in found] == [best(photos, rule, query, 5) for query in photos.queries]
    others = np.delete(np.arange(ROWS), 7)
    assert ids(search(photos, client, 7)) == best(photos, rule, photos.gallery[7], rows=others)


def test_a_rescoring_is_ranked_over_what_its_prefetch_gives(in_payload):
    photos = in_payload
    rule = fitted(photos, "dis")
    found = search(
        photos,
        client_with(photos, rule, oversampling=1.0),
        photos.queries[2],
        prefetch=models.Prefetch(filter=RED, limit=ROWS),
    )
    assert ids(found) == best(photos, rule, photos.queries[2], rows=REDS)


@pytest.mark.parametrize("applied", [False, True])
def test_prefetches_and_groups_have_the_stored_offsets_only_and_a_warning_says_so(photos, applied):
    plain = photos.apply() if applied else photos.wrapped()
    client = client_with(photos, fitted(photos, "gc"), oversampling=None)
    query, using = photos.queries[3].tolist(), photos.using or None
    fused = {
        "query": models.FusionQuery(fusion=models.Fusion.RRF),
        "prefetch": models.Prefetch(query=query, using=using),
    }
    grouped = {"group_by": "colour", "query": query, "using": using}
    with pytest.warns(UserWarning, match="a rule ranks the root of a request"):
        assert client.query_points("photos", **fused) == plain.query_points("photos", **fused)
    with pytest.warns(UserWarning, match="groups are not ranked by a rule"):
        assert client.query_points_groups("photos", **grouped) == plain.query_points_groups("photos", **grouped)


def test_other_vectors_and_collections_are_left_to_themselves(cosine):
    rule = fitted(cosine, "gc")
    client = cosine.wrapped(rules={("photos", "image"): rule, "others": rule})
    query = cosine.queries[0]
    assert search(cosine, client, query) == search(cosine, cosine.plain, query)


def test_a_rule_follows_an_alias(cosine):
    cosine.plain.update_collection_aliases(
        [models.CreateAliasOperation(create_alias=models.CreateAlias(collection_name="photos", alias_name="album"))]
    )
    rule, query = fitted(cosine, "gc"), cosine.queries[0]
    for place in ("photos", "album"):
        found = cosine.wrapped(rules={place: rule}, **EVERYTHING).query_points("album", query).points
        assert ids(found) == best(cosine, rule, query)


def test_a_vector_without_direction_is_left_out(cosine):
    rule = fitted(cosine, "dis")
    cosine.plain.upsert("photos", [cosine.point(900, np.zeros(DIM, np.float32))])
    found = search(cosine, client_with(cosine, rule, oversampling=20.0), cosine.queries[0], limit=ROWS + 1)
    assert sorted(ids(found)) == list(range(ROWS))


def test_a_rule_of_another_dimension_is_refused_with_both():
    photos = Photos(QdrantClient(":memory:"), *COLLECTIONS[0])
    client = client_with(photos, fit_rule(np.ones((5, 3)), "gc"))
    with pytest.raises(InputError, match="8 dimensions, the bank has 3"):
        search(photos, client, photos.queries[0])
