"""What a client asks of a server, and how often: the requests on the wire."""

import json
from functools import cache

import httpx
import numpy as np
import pytest
from qdrant_client import QdrantClient, grpc, models
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse
from qdrant_client.qdrant_remote import QdrantRemote

import hubplugin
from hubplugin_qdrant import HubQdrantClient
from hubplugin_qdrant.manifest import QdrantManifest
from tests.qdrant.conftest import DIM, Photos, apply_to, ids, know

QUERY, MANIFEST, SCROLL = (
    "photos/points/query",
    "photos--hub/points",
    "photos/points/scroll",
)


@cache
def corrected(distance: models.Distance, storage: str) -> Photos:
    """A corrected collection, only to be looked at."""
    photos = Photos(QdrantClient(":memory:"), "image", distance, storage)
    photos.apply()
    return photos


@pytest.fixture
def wire(request):
    """A client whose requests are noted, and answered from a corrected collection with the storage asked for, that is
    payload if none is."""
    photos = corrected(models.Distance.DOT, getattr(request, "param", "payload"))
    manifest = {
        "id": 0,
        "payload": photos.plain.retrieve("photos--hub", [0])[0].payload,
    }
    info = json.loads(photos.plain.get_collection("photos").model_dump_json())
    results = {
        "/collections/photos": info,
        "/collections/photos--hub/points": [manifest],
        "/collections/photos/points/query": {"points": []},
        "/collections/photos/points/query/batch": [{"points": []}],
        "/collections/photos/points/scroll": {"points": []},
        "/collections/other/points/query": {"points": []},
        "/aliases": {"aliases": []},
    }

    def answer(sent: httpx.Request) -> httpx.Response:
        client.requests.append(
            (sent.url.path, json.loads(sent.content) if sent.content else None)
        )
        client.params = dict(sent.url.params)
        if sent.url.path in client.refused:
            return httpx.Response(
                client.refused[sent.url.path],
                json={"status": {"error": "no active replica"}},
            )
        if sent.url.path not in results:
            return httpx.Response(404, json={"status": {"error": "Not found"}})
        result = results[sent.url.path]
        result = result(json.loads(sent.content)) if callable(result) else result
        return httpx.Response(200, json={"result": result, "status": "ok", "time": 0.0})

    client = HubQdrantClient(url="http://localhost", check_compatibility=False)
    client.http.client._client = httpx.Client(
        transport=httpx.MockTransport(answer), base_url="http://localhost"
    )
    client.requests, client.refused, client.query, client.results = (
        [],
        {},
        photos.queries[0],
        results,
    )
    client.model = photos.model
    return client


def paths(client):
    return [path.removeprefix("/collections/") for path, _ in client.requests]


def test_the_first_corrected_query_reads_the_manifest_and_one_point_alone(wire):
    wire.query_points("photos", wire.query, "image")
    assert paths(wire) == ["/aliases", MANIFEST, SCROLL, QUERY]
    assert wire.requests[2][1] == {
        "limit": 1,
        "with_payload": ["hub_offset"],
        "with_vector": False,
    }
    wire.query_points("photos", wire.query, "image")
    wire.query_batch_points(
        "photos", [models.QueryRequest(query=wire.query.tolist(), using="image")]
    )
    assert paths(wire)[4:] == [QUERY, f"{QUERY}/batch"]


@pytest.mark.parametrize("wire", ["vector"], indirect=True)
def test_a_search_goes_straight_to_augmented_vectors_if_no_point_lacks_one(wire):
    wire.query_points("photos", wire.query, "image")
    wire.query_points("photos", wire.query, "image")
    assert paths(wire) == ["/aliases", MANIFEST, "photos", SCROLL, QUERY, QUERY]
    sent = wire.requests[-1][1]
    assert (sent["using"], sent.get("prefetch"), sent["params"]) == (
        "hub_v1",
        None,
        {"quantization": {"ignore": True}},
    )
    assert sent["query"]["nearest"] == pytest.approx([*wire.query.tolist(), 1.0])


def test_a_collection_without_a_correction_costs_two_small_requests(wire):
    wire.query_points("other", wire.query, "image")
    wire.query_points("other", wire.query, "image")
    assert paths(wire) == [
        "/aliases",
        "other--hub/points",
        "other/points/query",
        "other/points/query",
    ]
    plain = QdrantClient(url="http://localhost", check_compatibility=False)
    plain.http.client._client = wire.http.client._client
    plain.query_points("other", wire.query, "image")
    assert wire.requests[-1] == wire.requests[-2]


@pytest.mark.parametrize("status", [200, 403, 500])
def test_a_write_reads_the_manifest_once_more_and_is_done_though_that_fails(
    wire, status
):
    wire.query_points("photos", wire.query, "image")
    wire._corrections.fits[
        wire._corrections.manifests["photos"].manifest.active["image"].model
    ] = wire.model
    wire.results["/collections/photos/points"] = {
        "operation_id": 1,
        "status": "completed",
    }
    points = [
        models.PointStruct(
            id=1, vector={"image": wire.query.tolist()}, payload={"n": 1}
        )
    ]
    done = len(wire.requests)
    wire.refused = {f"/collections/{MANIFEST}": status} if status != 200 else {}
    wire.upsert("photos", points)
    wire.refused = {}
    assert paths(wire)[done:] == ["photos/points", MANIFEST]
    wire.upsert("photos", points)
    assert paths(wire)[done + 2 :][-2:] == ["photos/points", MANIFEST]


@pytest.mark.parametrize("status", [400, 403, 500, 503])
def test_a_metadata_collection_that_answers_an_error_breaks_no_search(
    wire, status, monkeypatch
):
    wire.refused[f"/collections/{MANIFEST}"] = status
    with pytest.warns(UserWarning, match=r"photos.*searches are raw here"):
        wire.query_points("photos", wire.query, "image")
    assert "prefetch" not in wire.requests[-1][1]
    wire.refused.clear()
    monkeypatch.setattr("hubplugin_qdrant.metadata.time.monotonic", lambda: 1e12)
    wire.query_points("photos", wire.query, "image")
    assert "prefetch" in wire.requests[-1][1]
    wire.refused[f"/collections/{MANIFEST}"] = status
    monkeypatch.setattr("hubplugin_qdrant.metadata.time.monotonic", lambda: 2e12)
    wire.query_points("photos", wire.query, "image")
    assert ("prefetch" in wire.requests[-1][1]) == (
        status != 403
    )  # who may not read it has no business with it


@pytest.mark.parametrize("wire", ["vector"], indirect=True)
def test_a_search_that_a_busy_server_refuses_is_refused_and_asked_no_more(wire):
    wire.refused[f"/collections/{QUERY}"] = 503
    with pytest.raises(UnexpectedResponse, match="503"):
        wire.query_points("photos", wire.query, "image")
    assert paths(wire) == ["/aliases", MANIFEST, "photos", SCROLL, QUERY]


@pytest.mark.parametrize("wire", ["vector"], indirect=True)
def test_where_nothing_can_be_looked_for_both_vectors_are_searched(wire):
    wire.refused[f"/collections/{SCROLL}"] = 400
    wire.query_points("photos", wire.query, "image")
    assert [each["using"] for each in wire.requests[-1][1]["prefetch"]] == [
        "hub_v1",
        "image",
    ]


def test_a_second_vector_has_the_graph_and_memory_of_the_first_but_no_codes(
    monkeypatch,
):
    client, sent = QdrantClient(":memory:"), []
    codes = models.ScalarQuantization(
        scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8)
    )
    settings = {"on_disk": True, "hnsw_config": models.HnswConfigDiff(m=24)}
    first = models.VectorParams(
        size=DIM, distance=models.Distance.DOT, quantization_config=codes, **settings
    )
    client.create_collection("photos", {"image": first})
    client.upload_collection("photos", {"image": Photos.gallery})
    monkeypatch.setattr(
        client,
        "update_collection",
        lambda *given, **named: sent.append(named["vectors_config"]),
    )
    apply_to(
        client,
        "photos",
        Photos.bank,
        vector="image",
        storage="vector",
        method="is",
        force=True,
    )
    assert sent == [{"hub_v1": models.VectorParamsDiff(**settings)}]


def test_where_and_how_to_ask_is_said_as_it_was(wire):
    filtered = models.Filter(must=[models.HasIdCondition(has_id=[1])])
    params = models.SearchParams(
        hnsw_ef=64, quantization=models.QuantizationSearchParams(rescore=True)
    )
    place = {"consistency": "majority", "timeout": 7, "shard_key_selector": "left"}
    wire.query_points(
        "photos",
        wire.query,
        "image",
        query_filter=filtered,
        search_params=params,
        **place,
    )
    body = wire.requests[-1][1]
    assert wire.params == {"consistency": "majority", "timeout": "7"}
    assert body["shard_key"] == "left"
    assert body["params"] == {"hnsw_ef": 64, "quantization": {"rescore": True}}
    (candidates,) = body["prefetch"]
    assert candidates["params"] == body["params"]
    assert candidates["filter"] == {"must": [{"has_id": [1]}]}
    assert "filter" not in body


def test_an_id_stands_in_a_prefetch_as_a_query_for_what_is_nearest(wire):
    """Local mode of qdrant-client up to 1.19.0 takes no bare id there."""
    wire.query_points("photos", 3, "image")
    assert [each["query"] for each in wire.requests[-1][1]["prefetch"]] == [
        {"nearest": 3}
    ]


@pytest.mark.parametrize("wire", ["vector"], indirect=True)
def test_a_server_leaves_the_points_that_are_queries_out_of_the_whole_request(wire):
    """As it does without us, with every id that stands anywhere in a request."""
    records = [{"id": key, "vector": {"image": [float(key)] * DIM}} for key in (3, 4)]
    asked = {
        "/collections/photos/points": lambda body: [
            each for each in records if each["id"] in body["ids"]
        ]
    }
    wire.results |= asked
    by_id = [models.Prefetch(query=key, using="image", limit=5) for key in (3, 4)]
    elsewhere = models.LookupLocation(collection="photos", vector="image")
    rrf, red = (
        models.FusionQuery(fusion=models.Fusion.RRF),
        models.Filter(must=[models.HasIdCondition(has_id=[3, 9])]),
    )
    wire.query_points("photos", rrf, prefetch=by_id, query_filter=red)
    body = wire.requests[-1][1]
    assert [each["query"] for each in body["prefetch"]] == [
        [*[float(key)] * DIM, 1.0] for key in (3, 4)
    ]
    assert body["filter"] == {
        "must": [{"must": [{"has_id": [3, 9]}]}, {"must_not": [{"has_id": [3, 4]}]}]
    }
    wire.query_points("photos", 3, "image", prefetch=by_id[1:], lookup_from=elsewhere)
    assert wire.requests[-1][1]["filter"] == {"must_not": [{"has_id": [4, 3]}]}


class Answering:
    """A server's side of gRPC that answers every search with nothing."""

    asked = 0

    def Query(self, message, timeout=None):  # noqa: N802
        self.asked += 1
        return grpc.QueryResponse()


@pytest.fixture(params=["REST", "gRPC"])
def outcome(request, monkeypatch):
    """What becomes of a query of a client: the error that it raises, or that it is sent."""
    url, by_rest = "http://localhost:1", request.param == "REST"
    client = QdrantClient(url, prefer_grpc=not by_rest, check_compatibility=False)
    found = {"result": {"points": []}, "status": "ok", "time": 0.0}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=found))
    client.http.client._client = httpx.Client(transport=transport, base_url=url)
    monkeypatch.setattr(QdrantRemote, "grpc_points", Answering())

    def outcome(storage, query):
        asked = client
        if storage is not None:
            version = corrected(models.Distance.COSINE, storage).version
            asked = HubQdrantClient.wrap(client)
            know(asked, "photos", QdrantManifest(active={"image": version}))
        try:
            asked.query_points("photos", query, "image")
        except Exception as error:
            return type(error), str(error)
        return "sent"

    return outcome


REST_OF_IT = [0.5] * (DIM - 1)


@pytest.mark.parametrize(
    "query",
    [
        [*REST_OF_IT, np.float32(0.5)],
        [np.float32(0.5), *REST_OF_IT],
        np.full(DIM, 0.5, np.float16),
        [*REST_OF_IT, np.int64(1)],
        [*REST_OF_IT, 1],
        [*REST_OF_IT, None],
        [*REST_OF_IT, "a"],
        [True, *REST_OF_IT],
        [*REST_OF_IT, True],
        [*REST_OF_IT, [0.5]],
        [[0.5], *REST_OF_IT],
        [*REST_OF_IT, 10**400],
        np.array([*REST_OF_IT, None], object),
        np.full(DIM, 0.5, complex),
        np.full((1, DIM), 0.5),
        tuple(REST_OF_IT),
        {"nearest": REST_OF_IT},
        3.5,
        [],
    ],
    ids=repr,
)
def test_what_the_plain_client_refuses_or_accepts_as_a_query_the_corrected_one_does(
    outcome, query
):
    assert outcome("payload", query) == outcome("vector", query) == outcome(None, query)


@pytest.mark.filterwarnings("ignore:what is known of 'photos'")
def test_a_server_that_goes_away_is_the_clients_own_error(wire):
    def gone(sent):
        raise httpx.ConnectError("connection refused")

    known, wire.http.client._client = (
        wire.http.client._client,
        httpx.Client(transport=httpx.MockTransport(gone)),
    )
    with pytest.raises(ResponseHandlingException, match="connection refused"):
        wire.query_points("photos", wire.query, "image")  # before anything is known
    wire.http.client._client = known
    wire._corrections.forget()
    wire.query_points("photos", wire.query, "image")
    wire.http.client._client = httpx.Client(
        transport=httpx.MockTransport(gone), base_url="http://localhost"
    )
    with pytest.raises(ResponseHandlingException, match="connection refused"):
        wire.query_points("photos", wire.query, "image")


@pytest.mark.parametrize(
    "distance",
    [models.Distance.DOT, models.Distance.EUCLID],
    ids=lambda each: each.value,
)
def test_a_threshold_that_the_server_ignores_is_held_by_the_client(wire, distance):
    """Servers before 1.17 ignore it over a formula, in searches and in groups."""
    found = {
        "points": [
            {"id": row, "version": 0, "score": score}
            for row, score in enumerate((0.9, 0.5, -0.1))
        ]
    }
    groups = {
        "groups": [
            {"id": row, "hits": [hit]} for row, hit in enumerate(found["points"])
        ]
    }
    euclidean = distance is models.Distance.EUCLID
    if euclidean:  # a formula yields -distance^2 / 2
        for point in found["points"]:
            point["score"] -= 1.0
        wire.query_points("photos", wire.query, "image")
        version = wire._corrections.manifests["photos"].manifest.active["image"]
        metric = hubplugin.metric.Metric.EUCLIDEAN
        changed = QdrantManifest(
            active={"image": version.model_copy(update={"metric": metric})}
        )
        know(wire, "photos", changed)
    wire.results[f"/collections/{QUERY}"] = found
    wire.results["/collections/photos/points/query/groups"] = groups
    given = {"using": "image", "score_threshold": 1.0 if euclidean else 0.5}
    points = wire.query_points("photos", query=wire.query, **given).points
    assert ids(points) == [0, 1]
    assert points[1].score == pytest.approx(1.0 if euclidean else 0.5)
    found = wire.query_points_groups("photos", "n", query=wire.query, **given)
    assert [group.id for group in found.groups] == [0, 1]
