"""A search of vectors that goes to the server past the client's own method is the one that this would have sent."""

from __future__ import annotations

import asyncio
import inspect

import httpx
import pytest
from pydantic import ValidationError
from qdrant_client import AsyncQdrantClient, QdrantClient, grpc, models

from hubplugin_qdrant import plain_client
from hubplugin_qdrant.requests.arguments import as_arguments, as_request

DOCUMENT = models.Document(text="a dog", model="a model")


def by_rest(kind=QdrantClient):
    """A client that gets one point for every request, and what it sends."""
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        found = {"points": [{"id": 3, "version": 1, "score": 0.5}]}
        if request.url.path.endswith("batch"):
            found = [found]
        elif request.url.path.endswith("groups"):
            found = {"groups": [{"id": "red", "hits": found["points"]}]}
        return httpx.Response(200, json={"result": found, "status": "ok", "time": 0.0})

    client = kind("http://localhost:1", check_compatibility=False)
    given = {"transport": httpx.MockTransport(answer), "headers": {"api-key": "a key"}}
    if kind is QdrantClient:
        client.http.client._client = httpx.Client(**given)
    else:
        client.http.client._async_client = httpx.AsyncClient(**given)
    return client, sent


def awaited(answer):
    """What a client's method returned, or what its coroutine returns."""

    async def waited():
        return await answer

    return asyncio.run(waited()) if inspect.isawaitable(answer) else answer


def first(found):
    """The first point of an answer, of several, or in groups."""
    if isinstance(found, models.GroupsResult):
        return found.groups[0].hits[0]
    return (found[0] if isinstance(found, list) else found).points[0]


RED = models.Filter(must=[models.FieldCondition(key="colour", match=models.MatchValue(value="red"))])
FORMULA = models.FormulaQuery(formula=models.SumExpression(sum=["$score", "hub_offset.v1"]), defaults={"a": 0.0})
ASKED = {
    "a vector": {
        "query": [0.5, 0.25],
        "using": "image",
        "search_params": models.SearchParams(hnsw_ef=64),
        "query_filter": RED,
        "offset": 2,
        "with_vectors": ["image"],
        "lookup_from": models.LookupLocation(collection="others", vector="image"),
        "consistency": models.ReadConsistencyType.MAJORITY,
        "timeout": 7,
    },
    "a formula": {
        "query": FORMULA,
        "prefetch": [models.Prefetch(query=[0.5, 0.25], using="image", filter=RED, limit=30)],
        "limit": 3,
        "score_threshold": 0.5,
        "with_payload": models.PayloadSelectorExclude(exclude=["hub_offset"]),
        "shard_key_selector": ["europe", 3],
    },
    "two prefetches": {
        "query": FORMULA,
        "prefetch": [
            models.Prefetch(query=[0.5, 0.25, 1.0], using="hub_v1", params=models.SearchParams(exact=True)),
            models.Prefetch(
                query=[0.5, 0.25], filter=models.Filter(must_not=[models.HasVectorCondition(has_vector="a")])
            ),
        ],
    },
}


def both(client, asked):
    """The answers of `plain_client` and of `client` itself to `asked`."""
    request = as_request(asked)
    ours = plain_client.query_points(client, as_arguments(asked, request), request)
    return awaited(ours), awaited(client.query_points(**asked))


def both_in_groups(client, asked):
    """The same in groups."""
    asked = {name: given for name, given in asked.items() if name != "offset"} | {"group_by": "colour", "group_size": 2}
    request = as_request(asked)
    sent = {name: given for name, given in as_arguments(asked, request).items() if name != "offset"}
    ours = plain_client.query_points(client, sent, request, "query_points_groups")
    return awaited(ours), awaited(client.query_points_groups(**asked))


def both_of_batch(client, asked):
    """The same of two searches at once."""
    requests = [
        as_request(asked).model_copy(update={"shard_key": asked.get("shard_key_selector")}),
        models.QueryRequest(query=[1.0, 2.0], limit=7),
    ]
    place = {"collection_name": "photos", "consistency": asked.get("consistency"), "timeout": asked.get("timeout")}
    ours = plain_client.query_batch_points(client, place, requests)
    return awaited(ours), awaited(client.query_batch_points(**place, requests=requests))


KINDS = pytest.mark.parametrize("kind", [QdrantClient, AsyncQdrantClient])
EACH = pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
SEARCHES = pytest.mark.parametrize("searched", [both, both_in_groups, both_of_batch])


@EACH
@KINDS
@SEARCHES
def test_a_search_by_rest_is_the_request_that_the_client_makes(searched, kind, asked):
    client, sent = by_rest(kind)
    ours, own = searched(client, {"collection_name": "photos", **asked})
    assert ours == own
    assert first(ours).id == 3
    assert sent[0].url == sent[1].url
    assert sent[0].content == sent[1].content
    assert sent[0].headers == sent[1].headers


FOUND = [grpc.ScoredPoint(id=grpc.PointId(num=3), score=0.5)]


class Answering:
    """A server's side of gRPC that keeps what it is asked."""

    def __init__(self):
        self.asked = []

    def Query(self, message, timeout=None):  # noqa: N802
        self.asked.append((message, timeout))
        return grpc.QueryResponse(result=FOUND)

    def QueryGroups(self, message, timeout=None):  # noqa: N802
        self.asked.append((message, timeout))
        group = grpc.PointGroup(id=grpc.GroupId(string_value="red"), hits=FOUND)
        return grpc.QueryGroupsResponse(result=grpc.GroupsResult(groups=[group]))

    def QueryBatch(self, message, timeout=None):  # noqa: N802
        self.asked.append((message, timeout))
        return grpc.QueryBatchResponse(result=[grpc.BatchResult(result=FOUND)])


class AsyncAnswering(Answering):
    async def Query(self, message, timeout=None):  # noqa: N802
        return super().Query(message, timeout)

    async def QueryGroups(self, message, timeout=None):  # noqa: N802
        return super().QueryGroups(message, timeout)

    async def QueryBatch(self, message, timeout=None):  # noqa: N802
        return super().QueryBatch(message, timeout)


@EACH
@KINDS
@SEARCHES
def test_a_search_by_grpc_is_the_message_that_the_client_makes(searched, kind, asked, monkeypatch):
    client = kind("http://localhost:1", prefer_grpc=True, check_compatibility=False)
    stub = Answering() if kind is QdrantClient else AsyncAnswering()
    monkeypatch.setattr(type(client._client), "grpc_points", stub)
    ours, own = searched(client, {"collection_name": "photos", **asked})
    assert ours == own
    assert first(ours).id == 3
    assert stub.asked[0] == stub.asked[1]


@pytest.mark.parametrize("by_grpc", [False, True])
def test_a_search_of_vectors_is_not_looked_through_for_documents(by_grpc, monkeypatch):
    client, _ = by_rest()
    if by_grpc:
        client = QdrantClient("http://localhost:1", prefer_grpc=True, check_compatibility=False)
        monkeypatch.setattr(type(client._client), "grpc_points", Answering())
    monkeypatch.setattr(client, "_inference_inspector", None)
    request = as_request(ASKED["a formula"])
    arguments = as_arguments({"collection_name": "photos", **ASKED["a formula"]}, request)
    assert first(plain_client.query_points(client, arguments, request)).id == 3
    assert first(plain_client.query_batch_points(client, {"collection_name": "photos"}, [request])).id == 3


@pytest.mark.parametrize("asked", [{"limit": "many"}, {"query_filter": "red"}, {"shard_key_selector": 0.5}])
def test_a_search_by_rest_is_validated_as_by_the_client(asked):
    client, sent = by_rest()
    asked = {"collection_name": "photos", "query": [0.5, 0.25], **asked}
    request = as_request(asked)
    with pytest.raises(ValidationError) as own:
        client.query_points(**asked)
    with pytest.raises(ValidationError) as ours:
        plain_client.query_points(client, as_arguments(asked, request), request)
    assert str(ours.value) == str(own.value)
    assert not sent


class Instrumented(QdrantClient):
    def query_points(self, *args, **given):
        return "instrumented"

    query_points_groups = query_batch_points = query_points


def one(client):
    request = as_request(ASKED["a vector"])
    return plain_client.query_points(client, {"collection_name": "photos", **ASKED["a vector"]}, request)


def in_groups(client):
    asked = {"collection_name": "photos", "query": [0.5, 0.25], "group_by": "colour"}
    return plain_client.query_points(client, asked, as_request(asked), "query_points_groups")


def several(client):
    return plain_client.query_batch_points(client, {"collection_name": "photos"}, [as_request(ASKED["a vector"])])


@pytest.mark.parametrize(
    ("name", "answer"),
    [("query_points", one), ("query_points_groups", in_groups), ("query_batch_points", several)],
)
def test_a_client_whose_search_is_not_its_own_is_asked_by_that(name, answer, monkeypatch):
    assert answer(Instrumented("http://localhost:1", check_compatibility=False)) == "instrumented"
    client, sent = by_rest()
    with monkeypatch.context() as patched:
        patched.setattr(client, name, lambda **given: "patched")
        assert answer(client) == "patched"
    assert not sent
    client, sent = by_rest()  # the other one may keep the method as its own
    with monkeypatch.context() as patched:
        patched.setattr(QdrantClient, name, lambda self, **given: "patched class")
        assert answer(client) == "patched class"
    assert not sent
    assert first(answer(client)).id == 3


VECTOR = models.Prefetch(query=[0.5, 0.25])


@pytest.mark.parametrize(
    "request_",
    [
        models.QueryRequest(query=DOCUMENT),
        models.QueryRequest(query=7),
        models.QueryRequest(query=[[0.5], [0.25]]),
        models.QueryRequest(query=models.FusionQuery(fusion=models.Fusion.RRF), prefetch=[VECTOR]),
        models.QueryRequest(query=FORMULA, prefetch=VECTOR),
        models.QueryRequest(query=FORMULA, prefetch=[VECTOR, models.Prefetch(query=DOCUMENT)]),
        models.QueryRequest(query=FORMULA, prefetch=[models.Prefetch(query=[0.5], prefetch=[VECTOR])]),
        models.QueryRequest(query=FORMULA, prefetch=[models.Prefetch(query=[[0.5], [0.25]])]),
    ],
)
def test_other_searches_than_of_vectors_are_left_to_the_client(request_, monkeypatch):
    client, asked = QdrantClient("http://localhost:1", check_compatibility=False), []
    for name in ("query_points", "query_batch_points"):
        monkeypatch.setattr(QdrantClient, name, lambda self, **given: asked.append(given))
        monkeypatch.setattr(type(client._client), name, None)
    monkeypatch.setattr(plain_client, "_OWN", {QdrantClient.query_points, QdrantClient.query_batch_points})
    plain_client.query_points(client, {"collection_name": "photos", "limit": 3}, request_)
    requests = [models.QueryRequest(query=[0.5, 0.25]), request_]
    plain_client.query_batch_points(client, {"collection_name": "photos"}, requests)
    assert asked == [{"collection_name": "photos", "limit": 3}, {"collection_name": "photos", "requests": requests}]


def test_local_mode_is_asked_by_its_client():
    client = QdrantClient(":memory:")
    client.create_collection("photos", models.VectorParams(size=2, distance=models.Distance.DOT))
    client.upsert("photos", [models.PointStruct(id=3, vector=[1.0, 0.0])])
    for searched in (both, both_of_batch):
        ours, own = searched(client, {"collection_name": "photos", "query": [0.5, 0.25]})
        assert ours == own
        assert first(ours).id == 3
