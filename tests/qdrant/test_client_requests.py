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
from tests.qdrant.conftest import (
    COSINE,
    DIM,
    DOT,
    EUCLID,
    RED,
    RRF,
    Photos,
    apply_to,
    ids,
)
from tests.qdrant.test_storage_choice import CODES

QUERY = "photos/points/query"
MANIFEST = "photos--hub/points"
SCROLL = "photos/points/scroll"
VECTOR = Photos.queries[0]


class Wire:
    """A server's stand-in, which notes each request.

    results: The answers, by path below /collections/.
    refused: Paths that answer a status instead.
    changes: Fields of the active version that differ from those of `photos`.
    params: Of the last request.
    """

    def __init__(self, photos):
        self._plain = photos.plain
        info = json.loads(self._plain.get_collection("photos").model_dump_json())
        self.results = {
            "photos": info,
            MANIFEST: None,
            QUERY: {"points": []},
            f"{QUERY}/batch": [{"points": []}],
            SCROLL: {"points": []},
            "photos/points": {"operation_id": 1, "status": "completed"},
            "other/points/query": {"points": []},
            "/aliases": {"aliases": []},
        }
        self.refused: dict[str, int] = {}
        self.changes: dict[str, object] = {}
        self.requests: list[tuple[str, dict]] = []

    def answer(self, sent):
        path = sent.url.path.removeprefix("/collections/")
        body = json.loads(sent.content or "{}")
        self.requests.append((path, body))
        self.params = dict(sent.url.params)
        status = self.refused.get(path, 200 if path in self.results else 404)
        if status != 200:
            return httpx.Response(status, json={"status": {"error": "refused"}})
        result = self.results[path]
        if path == MANIFEST:
            result = self._read(body["ids"])
        answer = {"result": result, "status": "ok", "time": 0.0}
        return httpx.Response(200, json=answer)

    def _read(self, keys):
        """Return points of the metadata collection."""
        points = self._plain.retrieve("photos--hub", keys)
        for point in points:
            if "active" in point.payload:
                point.payload["active"]["image"] |= self.changes
        return [point.model_dump(include={"id", "payload"}) for point in points]

    def paths(self):
        return [path for path, _ in self.requests]

    def body(self):
        """Return that of the last request."""
        return self.requests[-1][1]


@pytest.fixture
def wire(request):
    """A server with a corrected collection, by default in payloads."""
    photos = Photos("image", DOT, getattr(request, "param", "payload"))
    photos.corrected()
    return Wire(photos)


IN_VECTORS = pytest.mark.parametrize("wire", ["vector"], indirect=True)


def connected(kind, answer, **options):
    """Return a client that sends its requests to `answer`."""
    client = kind("http://localhost", check_compatibility=False, **options)
    client.http.client._client = httpx.Client(
        transport=httpx.MockTransport(answer), base_url="http://localhost"
    )
    return client


@pytest.fixture
def client(wire):
    return connected(HubQdrantClient, wire.answer)


def test_the_first_corrected_query_reads_the_manifest_and_one_point_alone(wire, client):
    client.query_points("photos", VECTOR, "image")
    assert wire.paths() == ["/aliases", MANIFEST, SCROLL, QUERY]
    one_point = {"limit": 1, "with_payload": ["hub_offset"]}
    assert one_point.items() <= wire.requests[2][1].items()
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
    for asked in (client, client, client.raw):
        asked.query_points("other", VECTOR, "image")
    query = "other/points/query"
    assert wire.paths() == ["/aliases", "other--hub/points", query, query, query]
    assert wire.requests[-1] == wire.requests[-2]


@pytest.mark.parametrize("status", [200, 403, 500])
def test_a_write_reads_the_manifest_once_more_and_is_done_though_that_fails(
    wire, client, status
):
    vectors = {"image": VECTOR.tolist()}
    points = [models.PointStruct(id=1, vector=vectors, payload={"n": 1})]
    client.upsert("photos", points)  # for which the model is read
    wire.requests.clear()
    wire.refused[MANIFEST] = status
    client.upsert("photos", points)
    assert wire.paths() == ["photos/points", MANIFEST]


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


class Answering:
    """A server's side of gRPC that answers every search with nothing."""

    def Query(self, message, timeout=None):  # noqa: N802
        return grpc.QueryResponse()


@cache
def asked(storage, by_grpc, distance=COSINE, lacking=None):
    """Return a client of a server that finds nothing, which knows of a correction.

    storage: The place of its offsets; None for a plain client.
    lacking: A point without its second vector.
    """
    found = {"result": {"points": []}, "status": "ok", "time": 0.0}
    answer = httpx.Response(200, json=found)
    remote = connected(QdrantClient, lambda _: answer, prefer_grpc=by_grpc)
    if storage is None:
        return remote
    photos = Photos("image", distance, storage)
    photos.corrected()
    if lacking is not None:
        photos.plain.delete_vectors("photos", ["hub_v1"], [lacking])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hubplugin_qdrant.metadata.MANIFEST_SECONDS", 1e6)
        return photos.knowing(remote)


def outcome(client, query):
    """Return what becomes of a query: the error that it raises, or that it is sent."""
    try:
        client.query_points("photos", query, "image")
    except Exception as error:
        return type(error), str(error)
    return "sent"


@pytest.fixture(params=[False, True], ids=["REST", "gRPC"])
def by_grpc(request, monkeypatch):
    monkeypatch.setattr(QdrantRemote, "grpc_points", Answering())
    return request.param


@pytest.mark.parametrize(
    ("storage", "lacking"), [("payload", None), ("vector", None), ("vector", 7)]
)
@pytest.mark.parametrize("distance", [DOT, EUCLID])
def test_a_corrected_request_of_each_form_can_be_sent(
    storage, lacking, distance, by_grpc
):
    client, query = asked(storage, by_grpc, distance, lacking), VECTOR.tolist()
    inner = models.Prefetch(query=query, using="image", limit=5)
    total = models.SumExpression(sum=["$score", 1.0])
    formula = models.FormulaQuery(formula=total, defaults={"$score": 0.5})
    client.query_points("photos", query, "image", query_filter=RED, limit=3)
    client.query_points("photos", query, "image", prefetch=[inner])
    client.query_points("photos", RRF, prefetch=[inner, inner])
    client.query_points("photos", formula, prefetch=inner)


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
    query, by_grpc
):
    plain = outcome(asked(None, by_grpc), query)
    for storage in ("payload", "vector"):
        assert outcome(asked(storage, by_grpc), query) == plain


@pytest.mark.parametrize(
    ("metric", "threshold", "scores"),
    [(Metric.DOT, 0.5, (0.9, 0.5, -0.1)), (Metric.EUCLIDEAN, 1.0, (-0.1, -0.5, -1.1))],
)
def test_a_threshold_that_the_server_ignores_is_held_by_the_client(
    wire, client, metric, threshold, scores
):
    """Servers before 1.17 ignore it over a formula, in searches and in groups.

    Under Euclidean distance a formula yields -distance^2 / 2.
    """
    wire.changes["metric"] = metric.value
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
        size=DIM, distance=DOT, quantization_config=CODES, **settings
    )
    client.create_collection("photos", {"image": first})
    client.upload_collection("photos", {"image": Photos.gallery})
    monkeypatch.setattr(
        client,
        "update_collection",
        lambda *given, **named: sent.append(named["vectors_config"]),
    )
    given = {"storage": "vector", "method": "is", "force": True}
    apply_to(client, "photos", Photos.bank, **given)
    assert sent == [{"hub_v1": models.VectorParamsDiff(**settings)}]
