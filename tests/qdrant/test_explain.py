"""What `explain` prints, sent by a plain client, finds what the wrapped one finds."""

import json

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import StoreError
from tests.qdrant.conftest import Photos, ids


def sent(photos, explained):
    """What a plain client finds by the printed body, and nothing but that."""
    request = models.QueryRequest.model_validate(
        json.loads(json.dumps(explained.request["body"]))
    )
    return photos.plain.query_batch_points("photos", [request])[0].points


def printed_body(text):
    return json.loads(text.split("-d '")[1].split("'\n")[0])


@pytest.fixture
def photos(by_sync_client):
    return by_sync_client


@pytest.fixture
def store(photos):
    photos.apply(agreement=1.0)
    return hubplugin_qdrant.open_store(photos.plain, "photos", vector=photos.using)


@pytest.mark.filterwarnings("ignore:.*search_params:UserWarning")
def test_the_printed_request_finds_what_the_wrapped_client_finds(photos, store):
    for query in photos.queries[:4]:
        explained = store.explain(query, 5)
        expected = (
            photos.wrapped(oversampling=None)
            .query_points("photos", query, photos.using or None, limit=5)
            .points
        )
        found = sent(photos, explained)
        assert ids(found) == ids(expected)
        assert printed_body(explained.text) == explained.request["body"]
        assert all("hub_offset" not in point.payload for point in found)
        if photos.distance is models.Distance.EUCLID:
            assert "sqrt(-2 s)" in explained.text
            distances = np.sqrt(-2 * np.array([point.score for point in found]))
            np.testing.assert_allclose(
                distances, [point.score for point in expected], rtol=1e-5
            )


@pytest.mark.filterwarnings("ignore:.*search_params:UserWarning")
def test_a_request_for_a_point_leaves_the_point_itself_out(photos, store):
    found = [point.id for point in sent(photos, store.explain(7))]
    wrapped = photos.wrapped(oversampling=None)
    assert found == [
        point.id
        for point in wrapped.query_points("photos", 7, photos.using or None).points
    ]
    assert 7 not in found


def test_the_constants_are_those_of_the_manifest(cosine, monkeypatch):
    cosine.apply()
    store = hubplugin_qdrant.open_store(cosine.plain, "photos")
    explained = store.explain(cosine.queries[0], 10)
    body = explained.request["body"]
    assert explained.text.startswith(
        "curl -X POST http://localhost:6333/collections/photos/points/query"
    )
    assert body["query"] == {
        "formula": {"sum": ["$score", "hub_offset.v1"]},
        "defaults": {"hub_offset.v1": 0.0},
    }
    (candidates,) = body["prefetch"]
    assert candidates["limit"] == cosine.version.candidates(10)
    assert candidates["query"] == pytest.approx(cosine.queries[0].tolist())
    assert "GET /collections/photos--hub/points/0" in explained.text
    assert "api-key" not in explained.text
    monkeypatch.setenv("QDRANT_API_KEY", "secret")
    text = store.explain(cosine.queries[0]).text
    assert '"api-key: $QDRANT_API_KEY"' in text
    assert "secret" not in text


def test_without_a_correction_there_is_no_request_to_explain():
    photos = Photos(QdrantClient(":memory:"), "", models.Distance.COSINE)
    with pytest.raises(
        StoreError, match=r"no correction is active; run `hubplugin apply` first"
    ):
        hubplugin_qdrant.open_store(photos.plain, "photos").explain(photos.queries[0])
