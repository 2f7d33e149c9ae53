"""What a client asks of a server, and how often: the requests on the wire."""

from __future__ import annotations

import json

import httpx
import pytest
from qdrant_client import QdrantClient, models

from hubplugin_qdrant import HubQdrantClient
from tests.qdrant.conftest import Photos

QUERY, MANIFEST, LACKING = "photos/points/query", "photos--hub/points", "photos/points/scroll"


@pytest.fixture
def wire(request):
    """A client whose requests are noted, and answered from a corrected collection with the storage asked for."""
    photos = Photos(QdrantClient(":memory:"), "image", models.Distance.DOT, request.param)
    photos.apply()
    manifest = {"id": 0, "payload": photos.plain.retrieve("photos--hub", [0])[0].payload}
    results = {
        "/collections/photos--hub/points": [manifest],
        "/collections/photos/points/query": {"points": []},
        "/collections/photos/points/query/batch": [{"points": []}],
        "/collections/photos/points/scroll": {"points": []},
        "/collections/other/points/query": {"points": []},
        "/aliases": {"aliases": []},
    }

    def answer(sent: httpx.Request) -> httpx.Response:
        client.requests.append((sent.url.path, json.loads(sent.content) if sent.content else None))
        if sent.url.path not in results:
            return httpx.Response(404, json={"status": {"error": "Not found"}})
        return httpx.Response(200, json={"result": results[sent.url.path], "status": "ok", "time": 0.0})

    client = HubQdrantClient(url="http://localhost", check_compatibility=False)
    client.http.client._client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://localhost")
    client.requests, client.query = [], photos.queries[0]
    return client


def paths(client):
    return [path.removeprefix("/collections/") for path, _ in client.requests]


@pytest.mark.parametrize("wire", ["payload"], indirect=True)
def test_the_first_corrected_query_adds_one_reading_of_the_manifest_and_nothing_else(wire):
    wire.query_points("photos", wire.query, "image")
    assert paths(wire) == [MANIFEST, QUERY]
    wire.query_points("photos", wire.query, "image")
    wire.query_batch_points("photos", [models.QueryRequest(query=wire.query.tolist(), using="image")])
    assert paths(wire)[2:] == [QUERY, f"{QUERY}/batch"]


@pytest.mark.parametrize("wire", ["vector"], indirect=True)
def test_with_second_vectors_it_looks_for_points_without_and_goes_straight_to_them_if_there_are_none(wire):
    wire.query_points("photos", wire.query, "image")
    wire.query_points("photos", wire.query, "image")
    assert paths(wire) == [MANIFEST, LACKING, QUERY, QUERY]
    sent = wire.requests[-1][1]
    assert (sent["using"], sent.get("prefetch"), sent["params"]) == ("hub_v1", None, {"quantization": {"ignore": True}})
    assert sent["query"]["nearest"] == pytest.approx([*wire.query.tolist(), 1.0])


@pytest.mark.parametrize("wire", ["payload"], indirect=True)
def test_a_collection_without_a_correction_costs_two_small_requests_and_gets_the_query_as_it_was(wire):
    wire.query_points("other", wire.query, "image")
    wire.query_points("other", wire.query, "image")
    assert paths(wire) == ["other--hub/points", "/aliases", "other/points/query", "other/points/query"]
    plain = QdrantClient(url="http://localhost", check_compatibility=False)
    plain.http.client._client = wire.http.client._client
    plain.query_points("other", wire.query, "image")
    assert wire.requests[-1] == wire.requests[-2]
