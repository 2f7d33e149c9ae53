"""What `explain` prints, sent by a plain client, finds what the wrapped one finds."""

import json

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from hubplugin import StoreError
from tests.qdrant.conftest import Photos, ids


def sent(photos, explained):
    """What a plain client finds by the printed body, and nothing but that."""
    request = models.QueryRequest.model_validate(explained.request["body"])
    return photos.plain.query_batch_points("photos", [request])[0].points


@pytest.mark.filterwarnings("ignore:.*search_params:UserWarning")
def test_the_printed_request_finds_what_the_wrapped_client_finds(by_sync_client):
    photos = by_sync_client
    client, store = photos.apply(), photos.store()
    for query in (*photos.queries[:3], 7):
        explained = store.explain(query, 5)
        found = sent(photos, explained)
        expected = photos.search(client, query, limit=5).points
        assert ids(found) == ids(expected)
        assert all("hub_offset" not in point.payload for point in found)
        printed = explained.text.split("-d '")[1].removesuffix("'")
        assert json.loads(printed) == explained.request["body"]
        if photos.distance is models.Distance.EUCLID:
            distances = np.sqrt(-2 * np.array([point.score for point in found]))
            wanted = [point.score for point in expected]
            np.testing.assert_allclose(distances, wanted, rtol=1e-5)


def test_the_command_names_the_server_and_never_the_key(cosine, monkeypatch):
    cosine.apply()
    command = cosine.store().explain(cosine.queries[0], 10).text
    place = "http://localhost:6333/collections/photos/points/query"
    assert command.startswith(f"curl -X POST {place}")
    assert "api-key" not in command
    monkeypatch.setenv("QDRANT_API_KEY", "secret")
    command = cosine.store().explain(cosine.queries[0]).text
    assert '"api-key: $QDRANT_API_KEY"' in command
    assert "secret" not in command


def test_without_a_correction_there_is_no_request_to_explain():
    photos = Photos(QdrantClient(":memory:"), "", models.Distance.COSINE)
    with pytest.raises(
        StoreError, match=r"no correction is active; run `hubplugin apply` first"
    ):
        photos.store().explain(photos.queries[0])
