"""What hubplugin uses of qdrant-client's privates is there, and does what hubplugin takes it to do."""

from __future__ import annotations

import asyncio
import gc

import httpx
import pytest
from qdrant_client import AsyncQdrantClient, QdrantClient, models
from qdrant_client.conversions.conversion import RestToGrpc

from hubplugin_qdrant import HubQdrantClient, plain_client

DOCUMENT = models.Document(text="a dog", model="a model")


@pytest.fixture
def embedding(monkeypatch):
    """A client whose embedder makes [1, 0] of a document that is written, and [0, 1] of one that is asked for."""

    def embed(self, raw_models, is_query=False, batch_size=None):
        for each in raw_models:
            given = each.query.nearest if is_query else each.vector
            assert isinstance(given, models.Document)
            yield each.model_copy(update={"query": [0.0, 1.0]} if is_query else {"vector": [1.0, 0.0]})

    monkeypatch.setattr("qdrant_client.embed.model_embedder.ModelEmbedder.embed_models", embed)
    return QdrantClient(":memory:")


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


def test_an_async_client_over_the_connection_of_another_sees_the_same_collections():
    async def seen() -> bool:
        client = AsyncQdrantClient(":memory:")
        other = plain_client.over_connection_of(client, AsyncQdrantClient)
        await client.create_collection("photos", models.VectorParams(size=2, distance=models.Distance.DOT))
        return await other.collection_exists("photos")

    assert asyncio.run(seen())


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
    reader = plain_client.uncompressed(client)
    pages = [each.scroll("photos", limit=1) for each in (client, reader, client)]
    assert pages[0] == pages[1] == pages[2]
    assert pages[1][1] == 4
    assert ["gzip" in request.headers["accept-encoding"] for request in sent] == [True, False, True]
    assert sent[1].headers["accept-encoding"] == "identity"
    assert {request.headers["api-key"] for request in sent} == {"a key"}
    del reader
    gc.collect()
    assert client.scroll("photos", limit=1) == pages[0]
    local = QdrantClient(":memory:")
    assert plain_client.uncompressed(local) is local


def test_a_document_that_is_written_is_embedded_as_one_that_is_stored(embedding):
    points = [models.PointStruct(id=1, vector=DOCUMENT)]
    assert plain_client.embedded(embedding, points)[0].vector == [1.0, 0.0]


def test_what_has_no_documents_is_not_touched(embedding):
    points = [models.PointStruct(id=1, vector=[0.5, 0.5])]
    assert plain_client.embedded(embedding, points) is points
    assert not plain_client.has_documents(embedding, [models.QueryRequest(query=[0.5, 0.5])])


def test_a_document_that_is_asked_for_is_embedded_as_a_query(embedding):
    requests = [models.QueryRequest(query=DOCUMENT)]
    assert plain_client.has_documents(embedding, requests)
    assert plain_client.embedded_queries(embedding, requests)[0].query == [0.0, 1.0]


def test_documents_are_left_to_a_server_that_embeds():
    client = QdrantClient("http://localhost:1", cloud_inference=True, check_compatibility=False)
    points = [models.PointStruct(id=1, vector=DOCUMENT)]
    assert plain_client.embedded(client, points) is points
    assert not plain_client.has_documents(client, [models.QueryRequest(query=DOCUMENT)])


@pytest.mark.parametrize("kind", [QdrantClient, AsyncQdrantClient])
def test_a_prefetch_of_a_vector_is_sent_as_the_same_message_by_grpc(kind):
    matched = models.FieldCondition(key="colour", match=models.MatchValue(value="red"))
    given = models.Prefetch(query=[0.5, 0.25], using="image", filter=models.Filter(must=[matched]), limit=30)
    client = kind("http://localhost:1", prefer_grpc=True, check_compatibility=False)
    (message,) = plain_client.sendable(client, [given])
    expected = given.model_copy(update={"query": models.NearestQuery(nearest=[0.5, 0.25])})
    assert message == RestToGrpc.convert_prefetch_query(expected)


def test_prefetches_are_left_to_the_client_by_rest_and_where_one_is_no_vector():
    vector, document = models.Prefetch(query=[0.5, 0.25]), models.Prefetch(query=DOCUMENT)
    nested, several = models.Prefetch(query=[0.5], prefetch=[document]), models.Prefetch(query=[[0.5], [0.25]])
    rest = QdrantClient("http://localhost:1", check_compatibility=False)
    assert plain_client.sendable(rest, [vector]) == [vector]
    client = QdrantClient("http://localhost:1", prefer_grpc=True, check_compatibility=False)
    for other in (document, nested, several):
        assert plain_client.sendable(client, [vector, other]) == [vector, other]


@pytest.mark.parametrize("given", [models.QueryRequest(limit=3, using="a"), models.Prefetch(), models.SearchParams()])
def test_a_changed_copy_is_that_of_pydantic(given):
    fields = {"limit": 7, "filter": None} if "limit" in type(given).model_fields else {"exact": True}
    before, expected = given.model_dump(), given.model_copy(update=fields)
    made = plain_client.changed(given, fields)
    assert made == expected
    assert made.model_dump_json(exclude_unset=True) == expected.model_dump_json(exclude_unset=True)
    assert given.model_dump() == before
