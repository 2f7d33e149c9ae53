from __future__ import annotations

import asyncio
from uuid import UUID

import pytest
import with_haystack as example
from haystack_integrations.components.retrievers.qdrant import (
    QdrantEmbeddingRetriever,
    QdrantHybridRetriever,
    QdrantSparseEmbeddingRetriever,
)
from haystack_integrations.document_stores.qdrant import QdrantDocumentStore
from haystack_integrations.document_stores.qdrant.converters import convert_id
from qdrant_client import QdrantClient
from stdlib_search import embed

from tests.frameworks.conftest import SHOUT, corrected, first_answers_right, reciprocal_ranks, stored_offsets

COLLECTION = example.COLLECTION


@pytest.fixture
def options(tmp_path):
    shape = {"embedding_dim": 384, "use_sparse_embeddings": True, "sparse_idf": True}
    return {"path": str(tmp_path), "index": COLLECTION, "progress_bar": False, **shape}


@pytest.fixture
def search(options, functions):
    """The collection, made by Haystack and corrected."""
    store = QdrantDocumentStore(**options)
    store.write_documents([example.document(each.code, each.metadata) for each in functions])
    store.close()
    plain = QdrantClient(path=options["path"])
    found = corrected(plain, COLLECTION, "text-dense", functions)
    plain.close()
    return found


@pytest.fixture
def store(options, search):
    store = example.HubQdrantDocumentStore(**options)
    yield store
    store.close()


@pytest.fixture
def shouted():
    return example.document(SHOUT, {"name": "shout"})


def test_a_search_returns_the_corrected_ranking(store, search):
    found = [example.dense(store, question) for question in search.questions]
    assert found == [search.best(question) for question in search.questions]
    assert found != [search.best(question, raw=True) for question in search.questions]


def test_an_awaited_search_returns_the_corrected_ranking(options, search):
    async def ask(question: str) -> list[str]:
        store = example.HubQdrantDocumentStore(**options)
        found = await QdrantEmbeddingRetriever(store, top_k=5).run_async(embed([question])[0])
        await store.close_async()
        return [document.meta["name"] for document in found["documents"]]

    assert asyncio.run(ask(search.questions[0])) == search.best(search.questions[0])


def test_a_hybrid_search_fuses_the_corrected_ranking(store, search):
    for question in search.questions:
        by_words = QdrantSparseEmbeddingRetriever(store, top_k=10).run(example.words(question))["documents"]
        fused = reciprocal_ranks([document.meta["name"] for document in by_words], list(search.scores(question))[:10])
        retriever = QdrantHybridRetriever(store, top_k=5)
        found = retriever.run(embed([question])[0], example.words(question))["documents"]
        assert [document.score for document in found] == pytest.approx(sorted(fused.values(), reverse=True)[:5])
        assert {document.meta["name"]: document.score for document in found}.items() <= fused.items()


def test_a_filtered_search_returns_the_corrected_ranking_of_what_is_left(store, search):
    email = {"field": "meta.package", "operator": "==", "value": "email"}
    question = search.questions[0]
    assert example.dense(store, question, filters=email) == search.best(question, package="email")


def test_a_written_document_has_its_offset(store, search, shouted):
    store.write_documents([shouted])
    offset = stored_offsets(store._client.raw, COLLECTION)[UUID(convert_id(shouted.id))]
    assert offset == pytest.approx(search.offset(SHOUT), abs=1e-6)


def test_documents_whose_metadata_is_updated_keep_their_offsets(store, shouted):
    store.write_documents([shouted])
    before = stored_offsets(store._client.raw, COLLECTION)
    named = {"field": "meta.name", "operator": "==", "value": "shout"}
    assert store.update_by_filter(named, {"volume": "loud"}) == 1
    assert store.filter_documents(named)[0].meta == {"name": "shout", "volume": "loud"}
    assert stored_offsets(store._client.raw, COLLECTION) == pytest.approx(before, abs=1e-6)


def test_a_deleted_document_is_found_no_more(store, shouted):
    store.write_documents([shouted])
    assert example.dense(store, "Shout a text.")[0] == "shout"
    store.delete_documents([shouted.id])
    assert "shout" not in example.dense(store, "Shout a text.")


def test_the_store_of_a_pipeline_comes_back_from_its_dictionary(store, search):
    written = store.to_dict()
    store.close()
    again = example.HubQdrantDocumentStore.from_dict(written)
    assert example.dense(again, search.questions[0]) == search.best(search.questions[0])
    again.close()


def test_the_example_finds_more_when_corrected(functions, capsys):
    example.main([])
    raw, corrected, *_ = first_answers_right(capsys.readouterr().out)
    assert corrected > raw
