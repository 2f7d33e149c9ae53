"""What a client asks of a server, and how often: the requests on the wire."""

import json
from functools import cache

import httpx
import numpy as np
import pytest
from qdrant_client import QdrantClient, grpc, models
from qdrant_client.qdrant_remote import QdrantRemote

from hubplugin.metric import Metric
from hubplugin_qdrant import HubQdrantClient
from hubplugin_qdrant.manifest import QdrantManifest
from tests.qdrant.conftest import DIM, Photos, apply_to, ids, know
from tests.qdrant.test_storage_choice import CODES

QUERY = "photos/points/query"
MANIFEST = "photos--hub/points"
SCROLL = "photos/points/scroll"


@cache
def corrected(distance: models.Distance, storage: str) -> Photos:
    """A corrected collection, only to be looked at."""
    photos = Photos(QdrantClient(":memory:"), "image", distance, storage)
    photos.apply()
    return photos


class Wire:
    """A server's stand-in: notes each request and answers it out of `results`, by path below /collections/.

    refused: paths that answer a status instead. params: of the last request.
    """

    def __init__(self, photos: Photos):
        info = json.loads(photos.plain.get_collection("photos").model_dump_json())
        manifest = photos.plain.retrieve("photos--hub", [0])[0].payload
        self.results = {
            "photos": info,
            MANIFEST: [{"id": 0, "payload": manifest}],
            QUERY: {"points": []},
            f"{QUERY}/batch": [{"points": []}],
            SCROLL: {"points": []},
            "photos/points": {"operation_id": 1, "status": "completed"},
            "other/points/query": {"points": []},
            "/aliases": {"aliases": []},
        }
        self.refused: dict[str, int] = {}
        self.requests: list[tuple[str, dict | None]] = []

    def answer(self, sent: httpx.Request) -> httpx.Response:
        path = sent.url.path.removeprefix("/collections/")
        self.requests.append((path, json.loads(sent.content or "null")))
        self.params = dict(sent.url.params)
        status = self.refused.get(path, 200 if path in self.results else 404)
        if status != 200:
            return httpx.Response(status, json={"status": {"error": "refused"}})
        return httpx.Response(
            200, json={"result": self.results[path], "status": "ok", "time": 0.0}
        )

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    def body(self) -> dict:
        """Of the last request."""
        return self.requests[-1][1] or {}


@pytest.fixture
def wire(request):
    """One that has a corrected collection with the storage asked for, which is payload by default."""
    return Wire(corrected(models.Distance.DOT, getattr(request, "param", "payload")))


IN_VECTORS = pytest.mark.parametrize("wire", ["vector"], indirect=True)
VECTOR = Photos.queries[0]


def speak_to(client, answer):
    """Lets `client` send its requests to `answer`."""
    client.http.client._client = httpx.Client(
        transport=httpx.MockTransport(answer), base_url="http://localhost"
    )
    return client


@pytest.fixture
def client(wire):
    client = HubQdrantClient(url="http://localhost", check_compatibility=False)
    return speak_to(client, wire.answer)


def test_the_first_corrected_query_reads_the_manifest_and_one_point_alone(wire, client):
    client.query_points("photos", VECTOR, "image")
    assert wire.paths() == ["/aliases", MANIFEST, SCROLL, QUERY]
    one_point = wire.requests[2][1]
    assert (one_point["limit"], one_point["with_payload"]) == (1, ["hub_offset"])
    client.query_points("photos", VECTOR, "image")
    request = models.QueryRequest(query=VECTOR.tolist(), using="image")
    client.query_batch_points("photos", [request])
    assert wire.paths()[4:] == [QUERY, f"{QUERY}/batch"]


@IN_VECTORS
def test_a_search_goes_straight_to_augmented_vectors_if_no_point_lacks_one(
    wire, client
):
    client.query_points("photos", VECTOR, "image")
    client.query_points("photos", VECTOR, "image")
    assert wire.paths() == ["/aliases", MANIFEST, "photos", SCROLL, QUERY, QUERY]
    sent = wire.body()
    assert sent["using"] == "hub_v1"
    assert sent["params"] == {"quantization": {"ignore": True}}
    assert sent["query"]["nearest"] == pytest.approx([*VECTOR.tolist(), 1.0])
    assert "prefetch" not in sent


@IN_VECTORS
def test_where_nothing_can_be_looked_for_both_vectors_are_searched(wire, client):
    wire.refused[SCROLL] = 400
    client.query_points("photos", VECTOR, "image")
    assert [each["using"] for each in wire.body()["prefetch"]] == ["hub_v1", "image"]


def test_a_collection_without_a_correction_costs_two_small_requests(wire, client):
    client.query_points("other", VECTOR, "image")
    client.query_points("other", VECTOR, "image")
    query = "other/points/query"
    assert wire.paths() == ["/aliases", "other--hub/points", query, query]
    client.raw.query_points("other", VECTOR, "image")
    assert wire.requests[-1] == wire.requests[-2]


@pytest.mark.parametrize("status", [200, 403, 500])
def test_a_write_reads_the_manifest_once_more_and_is_done_though_that_fails(
    wire, client, status
):
    client.query_points("photos", VECTOR, "image")
    version = client._corrections.manifests["photos"].manifest.active["image"]
    model = corrected(models.Distance.DOT, "payload").model
    client._corrections.fits[version.model] = model
    wire.refused = {MANIFEST: status}
    point = models.PointStruct(
        id=1, vector={"image": VECTOR.tolist()}, payload={"n": 1}
    )
    client.upsert("photos", [point])
    assert wire.paths()[-2:] == ["photos/points", MANIFEST]


@pytest.mark.parametrize("status", [400, 403, 503])
def test_a_metadata_collection_that_answers_an_error_breaks_no_search(
    wire, client, status, monkeypatch
):
    wire.refused[MANIFEST] = status
    with pytest.warns(UserWarning, match=r"photos.*searches are raw here"):
        client.query_points("photos", VECTOR, "image")
    assert "prefetch" not in wire.body()
    wire.refused.clear()
    monkeypatch.setattr("hubplugin_qdrant.metadata.time.monotonic", lambda: 1e12)
    client.query_points("photos", VECTOR, "image")
    assert "prefetch" in wire.body()
    wire.refused[MANIFEST] = status
    monkeypatch.setattr("hubplugin_qdrant.metadata.time.monotonic", lambda: 2e12)
    client.query_points("photos", VECTOR, "image")
    # Who may not read it has no business with it.
    assert ("prefetch" in wire.body()) == (status != 403)


def test_where_and_how_to_ask_is_said_as_it_was(wire, client):
    codes = models.QuantizationSearchParams(rescore=True)
    client.query_points(
        "photos",
        VECTOR,
        "image",
        query_filter=models.Filter(must=[models.HasIdCondition(has_id=[1])]),
        search_params=models.SearchParams(hnsw_ef=64, quantization=codes),
        consistency="majority",
        timeout=7,
        shard_key_selector="left",
    )
    body = wire.body()
    assert wire.params == {"consistency": "majority", "timeout": "7"}
    assert body["shard_key"] == "left"
    assert body["params"] == {"hnsw_ef": 64, "quantization": {"rescore": True}}
    (candidates,) = body["prefetch"]
    assert candidates["params"] == body["params"]
    assert candidates["filter"] == {"must": [{"has_id": [1]}]}
    assert "filter" not in body


@IN_VECTORS
def test_the_point_that_a_second_vector_is_asked_for_is_left_out(wire, client):
    """As it is by a server; from another collection as well if that is this one."""
    wire.results["photos/points"] = [{"id": 3, "vector": {"image": [3.0] * DIM}}]
    itself = models.LookupLocation(collection="photos", vector="image")
    for lookup in (None, itself):
        client.query_points("photos", 3, "image", lookup_from=lookup)
        body = wire.body()
        assert body["query"] == {"nearest": [*[3.0] * DIM, 1.0]}
        assert body["filter"] == {"must_not": {"has_id": [3]}}


class Answering:
    """A server's side of gRPC that answers every search with nothing."""

    def Query(self, message, timeout=None):  # noqa: N802
        return grpc.QueryResponse()


@pytest.fixture(params=["REST", "gRPC"])
def outcome(request, monkeypatch):
    """What becomes of a query of a client: the error that it raises, or that it is sent."""
    by_grpc = request.param == "gRPC"
    client = QdrantClient(
        "http://localhost:1", prefer_grpc=by_grpc, check_compatibility=False
    )
    found = {"result": {"points": []}, "status": "ok", "time": 0.0}
    speak_to(client, lambda _: httpx.Response(200, json=found))
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


@pytest.mark.parametrize(
    ("metric", "threshold", "scores"),
    [(Metric.DOT, 0.5, (0.9, 0.5, -0.1)), (Metric.EUCLIDEAN, 1.0, (-0.1, -0.5, -1.1))],
)
def test_a_threshold_that_the_server_ignores_is_held_by_the_client(
    wire, client, metric, threshold, scores
):
    """Servers before 1.17 ignore it over a formula, in searches and in groups. Under Euclidean distance a formula
    yields -distance^2 / 2."""
    version = corrected(models.Distance.DOT, "payload").version
    version = version.model_copy(update={"metric": metric})
    know(client, "photos", QdrantManifest(active={"image": version}))
    points = [
        {"id": row, "version": 0, "score": score} for row, score in enumerate(scores)
    ]
    wire.results[QUERY] = {"points": points}
    wire.results[f"{QUERY}/groups"] = {
        "groups": [{"id": point["id"], "hits": [point]} for point in points]
    }
    given = {"query": VECTOR, "using": "image", "score_threshold": threshold}
    found = client.query_points("photos", **given).points
    assert ids(found) == [0, 1]
    assert found[1].score == pytest.approx(threshold)
    groups = client.query_points_groups("photos", "n", **given).groups
    assert [group.id for group in groups] == [0, 1]


def test_a_second_vector_has_the_graph_and_memory_of_the_first_but_no_codes(
    monkeypatch,
):
    client, sent = QdrantClient(":memory:"), []
    settings = {"on_disk": True, "hnsw_config": models.HnswConfigDiff(m=24)}
    first = models.VectorParams(
        size=DIM, distance=models.Distance.DOT, quantization_config=CODES, **settings
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
