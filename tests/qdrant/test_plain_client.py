"""What hubplugin uses of qdrant-client's privates is there, and does what hubplugin takes it to do."""

import gc
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from qdrant_client import AsyncQdrantClient, QdrantClient, grpc, models
from qdrant_client.conversions.conversion import RestToGrpc

from hubplugin_qdrant import HubQdrantClient, plain_client
from hubplugin_qdrant.transport import Fault, fault_of


@pytest.mark.parametrize("kind", [QdrantClient, AsyncQdrantClient])
def test_local_mode_is_told_from_a_server(kind):
    assert plain_client.is_local(kind(":memory:"))
    assert not plain_client.is_local(kind("http://localhost:1", check_compatibility=False))


def test_a_client_over_the_connection_of_another_sees_the_same_collections():
    client = QdrantClient(":memory:")
    other = plain_client.over_connection_of(client, HubQdrantClient)
    assert isinstance(other, HubQdrantClient)
    client.create_collection("photos", models.VectorParams(size=2, distance=models.Distance.DOT))
    assert QdrantClient.collection_exists(other, "photos")


def test_pages_are_read_without_compression_over_the_connection_of_a_client():
    """Which goes on as before, and is open when what reads is forgotten."""
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        found = {"points": [{"id": 3, "payload": {}}], "next_page_offset": 4}
        return httpx.Response(200, json={"result": found, "status": "ok", "time": 0.0})

    client = QdrantClient("http://localhost:1", check_compatibility=False)
    connection = httpx.Client(transport=httpx.MockTransport(answer), headers={"api-key": "a key"})
    client.http.client._client = connection
    scroll = plain_client.scrolling(client)
    asked = {"limit": 1, "offset": None, "with_vectors": False, "with_payload": True}
    pages = [each("photos", **asked) for each in (client.scroll, scroll, client.scroll)]
    assert pages[0] == pages[1] == pages[2]
    assert pages[1][1] == 4
    assert ["gzip" in request.headers["accept-encoding"] for request in sent] == [True, False, True]
    assert sent[1].headers["accept-encoding"] == "identity"
    assert {request.headers["api-key"] for request in sent} == {"a key"}
    del scroll
    gc.collect()
    assert client.scroll("photos", **asked) == pages[0]
    local = QdrantClient(":memory:")
    assert plain_client.scrolling(local) == local.scroll


class Stub:
    """A server's side of gRPC, over any channel, that keeps what it is asked, and gives `answer`."""

    def __init__(self, answer):
        self.answer, self.asked, self.timeouts = answer, [], []

    def __call__(self, channel):
        return self

    def _answered(self, message, timeout=None):
        self.asked.append(message)
        self.timeouts.append(timeout)
        return self.answer

    Scroll = UpdateVectors = QueryBatch = _answered


@pytest.fixture
def by_grpc(monkeypatch) -> Callable[..., QdrantClient]:
    """A client that gets the answers of a stub."""

    def client(stub: Stub, url: str = "http://localhost:1", **options) -> QdrantClient:
        monkeypatch.setattr(grpc, "PointsStub", stub)
        return QdrantClient(url, prefer_grpc=True, check_compatibility=False, **options)

    return client


def test_pages_by_grpc_come_uncompressed_over_a_connection_like_that_of_the_client(by_grpc, monkeypatch):
    stub = Stub(grpc.ScrollResponse())
    client = by_grpc(
        stub,
        "https://there:8333",
        grpc_port=8334,
        api_key="a key",
        auth_token_provider=lambda: "a token",
        grpc_options={"grpc.max_receive_message_length": 7},
    )
    own, made = client._client, []
    monkeypatch.setattr(plain_client, "get_channel", lambda *given, **named: made.append((given, named)))
    scroll = plain_client.scrolling(client)
    assert scroll("photos", limit=1, offset=None, with_vectors=True, with_payload=False) == ([], None)
    (((host, port, ssl, headers, used), named),) = made
    assert (host, port, ssl) == ("there", 8334, True)
    assert ("api-key", "a key") in headers
    assert named == {"auth_token_provider": own._auth_token_provider}
    assert used == own._grpc_options | {"grpc.compression_enabled_algorithms_bitset": 1}
    assert used["grpc.max_receive_message_length"] == 7
    assert stub.timeouts == [60]


def point(number: int, vectors: grpc.VectorsOutput, **also) -> grpc.RetrievedPoint:
    return grpc.RetrievedPoint(id=grpc.PointId(num=number), vectors=vectors, **also)


def named_vectors(**vectors: grpc.VectorOutput) -> grpc.VectorsOutput:
    return grpc.VectorsOutput(vectors=grpc.NamedVectorsOutput(vectors=vectors))


def test_pages_by_grpc_are_those_of_the_client_with_dense_vectors_as_arrays(by_grpc):
    dense = grpc.VectorOutput(dense=grpc.DenseVector(data=[0.1, 0.2]))
    sparse = grpc.VectorOutput(sparse=grpc.SparseVector(indices=[4], values=[0.5]))
    before_1_16 = grpc.VectorOutput(data=[0.3, 0.4])
    payload = {"n": grpc.Value(integer_value=7), "tags": grpc.Value(list_value=grpc.ListValue(values=[]))}
    found = [
        point(1, named_vectors(image=dense, words=sparse), payload=payload),
        point(2, grpc.VectorsOutput(vector=dense), shard_key=grpc.ShardKey(keyword="europe")),
        point(3, named_vectors(image=before_1_16)),
        grpc.RetrievedPoint(id=grpc.PointId(uuid="d1b5a3a5-6f43-4ad1-9d71-0f7b6ad0e2f1")),
    ]
    stub = Stub(grpc.ScrollResponse(result=found, next_page_offset=grpc.PointId(num=9)))
    client = by_grpc(stub)
    red = models.Filter(must=[models.FieldCondition(key="colour", match=models.MatchValue(value="red"))])
    asked = {"limit": 4, "offset": 1, "with_vectors": ["image", "words"], "with_payload": ["n", "tags"]}
    (records, following), (expected, after) = [
        scroll("photos", red, **asked) for scroll in (plain_client.scrolling(client), client.scroll)
    ]
    assert stub.asked[0] == stub.asked[1]
    assert following == after == 9
    arrays = [records[0].vector["image"], records[1].vector]
    assert all(isinstance(each, np.ndarray) and each.dtype == np.float32 for each in arrays)
    records[0].vector["image"], records[1].vector = (each.tolist() for each in arrays)
    assert records == expected


@pytest.mark.parametrize("shard_key", [None, "europe", 3])
def test_vectors_are_written_by_grpc_as_the_client_writes_them(by_grpc, shard_key):
    done = grpc.UpdateResult(operation_id=3, status=grpc.UpdateStatus.Completed)
    stub = Stub(grpc.PointsOperationResponse(result=done))
    client = by_grpc(stub)
    ids, vectors = [5, "d1b5a3a5-6f43-4ad1-9d71-0f7b6ad0e2f1"], [[0.1, 0.2], [0.3, 0.4]]
    given = list(zip(ids, vectors, strict=True))
    answer = plain_client.update_vectors(client, "photos", "hub_v1", given, shard_key)
    points = [models.PointVectors(id=point, vector={"hub_v1": vector}) for point, vector in given]
    assert answer == client.update_vectors("photos", points, shard_key_selector=shard_key)
    assert stub.asked[0] == stub.asked[1]


def test_scores_by_grpc_are_asked_for_and_read_as_the_client_does(by_grpc):
    uuid = "d1b5a3a5-6f43-4ad1-9d71-0f7b6ad0e2f1"
    ids = [grpc.PointId(num=0), grpc.PointId(uuid=uuid)]
    found = [[grpc.ScoredPoint(id=each, score=score) for each in ids] for score in (0.5, -0.25)]
    stub = Stub(grpc.QueryBatchResponse(result=[grpc.BatchResult(result=each) for each in found]))
    client, queries = by_grpc(stub), [[0.5, 0.25], [1.0, 2.0]]
    request = models.QueryRequest(
        using="image",
        filter=models.Filter(must=models.HasIdCondition(has_id=[0, uuid])),
        limit=2,
        params=models.SearchParams(exact=True),
        with_payload=False,
        shard_key="europe",
    )
    assert plain_client.scores(client, "photos", request, queries) == [
        [(0, 0.5), (uuid, 0.5)],
        [(0, -0.25), (uuid, -0.25)],
    ]
    requests = [request.model_copy(update={"query": query}) for query in queries]
    expected = client.query_batch_points("photos", requests)
    assert [[point.id for point in each.points] for each in expected] == [[0, uuid], [0, uuid]]
    assert stub.asked[0].query_points == stub.asked[1].query_points
    assert stub.timeouts[0] == 60


def test_prefetches_of_groups_name_no_points_where_local_mode_would_not_look_them_up():
    client = QdrantClient(":memory:")
    client.create_collection("photos", {"image": models.VectorParams(size=2, distance=models.Distance.DOT)})
    client.upsert("photos", [models.PointStruct(id=7, vector={"image": [1.0, 2.0]})])
    by_id = models.Prefetch(query=models.NearestQuery(nearest=7), using="image")
    (found,) = plain_client.with_vectors(client, "photos", [by_id])
    assert found.query.nearest == [1.0, 2.0]


@pytest.mark.parametrize("given", [models.QueryRequest(limit=3, using="a"), models.Prefetch(), models.SearchParams()])
def test_a_changed_copy_is_that_of_pydantic(given):
    fields = {"limit": 7, "filter": None} if "limit" in type(given).model_fields else {"exact": True}
    before, expected = given.model_dump(), given.model_copy(update=fields)
    made = plain_client.changed(given, fields)
    assert made == expected
    assert made.model_dump_json(exclude_unset=True) == expected.model_dump_json(exclude_unset=True)
    assert given.model_dump() == before


POINT = models.PointStruct(id=1, vector=[1.0, 2.0], payload={"n": 1})
FORMS = {
    "structure": POINT,
    "record": models.Record(id=1, vector=[1.0, 2.0], payload={"n": 1}),
    "namespace": SimpleNamespace(id=1, vector=[1.0, 2.0], payload={"n": 1}),
    "message": RestToGrpc.convert_point_struct(POINT),
    "dict": {"id": 1, "vector": [1.0, 2.0], "payload": {"n": 1}},
    "dict of too little": {"id": 1},
    "none": None,
    "text": "x",
}
CHANGES = {
    "structure": models.PointVectors(id=1, vector=[1.0, 2.0]),
    "namespace": SimpleNamespace(id=1, vector=[1.0, 2.0]),
    "message": RestToGrpc.convert_point_vectors(models.PointVectors(id=1, vector=[1.0, 2.0])),
    "dict": {"id": 1, "vector": [1.0, 2.0]},
    "none": None,
    "no id": models.PointVectors.model_construct(id=None, vector=[1.0, 2.0]),
}
OPERATION = models.UpsertOperation(upsert=models.PointsList(points=[POINT]))
OPERATIONS = {
    "structure": OPERATION,
    "message": RestToGrpc.convert_update_operation(OPERATION),
    "dict": {"upsert": {"points": [FORMS["dict"]]}},
    "none": None,
}


@pytest.fixture(params=[False, True], ids=["rest", "grpc"])
def of_a_server(request):
    """Clients of a server that nobody runs; test_refused_writes.py is of local mode."""
    return QdrantClient("http://127.0.0.1:1", grpc_port=1, prefer_grpc=request.param, check_compatibility=False)


def is_taken(call: Callable[[], object]) -> bool:
    """Whether it does something, or gets as far as to the server that is not there."""
    try:
        call()
    except Exception as error:
        return fault_of(error) is Fault.AWAY
    return True


@pytest.mark.parametrize("container", [list, tuple, deque])
@pytest.mark.parametrize("form", FORMS)
def test_points_are_taken_that_the_client_takes(of_a_server, form, container):
    points = container([FORMS[form]])
    by_client = is_taken(lambda: of_a_server.upsert("photos", points))
    if container is not list and not plain_client._speaks_grpc(of_a_server):
        by_client = False  # it sends whatever it is, and the server refuses it
    assert is_taken(lambda: plain_client.points_taken(of_a_server, points)) == by_client
    if by_client:
        assert plain_client.points_taken(of_a_server, points) == [POINT]


@pytest.mark.parametrize(
    "vectors", [np.eye(2), {"image": np.eye(2)}, iter(np.eye(2).tolist())], ids=["array", "by name", "stream"]
)
def test_columns_of_an_upload_are_taken_as_points_with_ids_of_their_own(vectors):
    points = list(plain_client.rows_taken(vectors, None, ({"n": row} for row in range(9))))
    assert [point.payload for point in points] == [{"n": 0}, {"n": 1}]
    assert len({point.id for point in points}) == 2
    rows = [[1.0, 0.0], [0.0, 1.0]]
    by_name = [{"image": row} for row in rows]
    assert [point.vector for point in points] == (by_name if isinstance(vectors, dict) else rows)


@pytest.mark.parametrize("container", [list, tuple, deque])
@pytest.mark.parametrize("form", CHANGES)
def test_vectors_are_taken_that_the_client_takes(of_a_server, form, container):
    points = container([CHANGES[form]])
    by_client = is_taken(lambda: of_a_server.update_vectors("photos", points)) and form != "no id"  # for the server
    assert is_taken(lambda: plain_client.updates_taken(of_a_server, points)) == by_client
    if by_client:
        assert plain_client.updates_taken(of_a_server, points) == [CHANGES["structure"]]


@pytest.mark.parametrize("form", OPERATIONS)
def test_operations_that_the_client_refuses_are_left_as_they_are(of_a_server, form):
    operations = [OPERATIONS[form]]
    if is_taken(lambda: of_a_server.batch_update_points("photos", operations)):
        assert plain_client.operations_taken(of_a_server, operations) == [OPERATION]
    elif plain_client._speaks_grpc(of_a_server):
        assert plain_client.operations_taken(of_a_server, operations) == operations
    else:
        with pytest.raises(plain_client.UNREADABLE):
            plain_client.operations_taken(of_a_server, operations)


def test_a_stream_is_taken(of_a_server):
    assert plain_client.updates_taken(of_a_server, iter([CHANGES["structure"]])) == [CHANGES["structure"]]
    assert plain_client.operations_taken(of_a_server, iter([OPERATION])) == [OPERATION]
