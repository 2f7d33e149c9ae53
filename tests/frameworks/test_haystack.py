import asyncio
from functools import partial
from uuid import UUID

import pytest
import with_haystack as example
from haystack import Pipeline
from haystack.components.writers import DocumentWriter
from haystack_integrations.components.retrievers.qdrant import QdrantEmbeddingRetriever
from haystack_integrations.document_stores.qdrant import QdrantDocumentStore
from haystack_integrations.document_stores.qdrant.converters import convert_id
from qdrant_client import QdrantClient
from stdlib_search import embed

from hubplugin_qdrant.haystack import (
    HubQdrantDocumentStore,
    HubQdrantEmbeddingRetriever,
    HubQdrantHybridRetriever,
    HubQdrantSparseEmbeddingRetriever,
)
from tests.frameworks.conftest import SHOUT, corrected, stored_offsets

pytestmark = pytest.mark.slow

COLLECTION = example.COLLECTION


@pytest.fixture
def options(tmp_path):
    shape = {"embedding_dim": 384, "use_sparse_embeddings": True, "sparse_idf": True}
    return {"path": str(tmp_path), "index": COLLECTION, "progress_bar": False, **shape}


@pytest.fixture
def search(options, functions):
    """The collection, made by Haystack and corrected."""
    store = QdrantDocumentStore(**options)
    store.write_documents(
        [example.document(each.code, each.metadata) for each in functions]
    )
    store.close()
    plain = QdrantClient(path=options["path"])
    found = corrected(plain, COLLECTION, "text-dense", functions)
    plain.close()
    return found


@pytest.fixture
def store(options, search):
    store = HubQdrantDocumentStore(**options)
    yield store
    store.close()


def test_a_search_returns_the_corrected_ranking(store, search):
    search.check(partial(example.dense, store))


def test_an_awaited_search_returns_the_corrected_ranking(options, search):
    question = search.questions[0]

    async def ask():
        store = HubQdrantDocumentStore(**options)
        retriever = QdrantEmbeddingRetriever(store, top_k=5)
        found = await retriever.run_async(embed([question])[0])
        await store.close_async()
        return names(found)

    assert asyncio.run(ask()) == search.best(question)


def test_a_written_document_has_its_offset_and_keeps_it_when_its_metadata_is_updated(
    store, search
):
    shouted = example.document(SHOUT, {"name": "shout"})
    store.write_documents([shouted])
    before = stored_offsets(store._client.raw, COLLECTION)
    search.check_shout(before[UUID(convert_id(shouted.id))])
    named = {"field": "meta.name", "operator": "==", "value": "shout"}
    assert store.update_by_filter(named, {"volume": "loud"}) == 1
    assert store.filter_documents(named)[0].meta == {"name": "shout", "volume": "loud"}
    after = stored_offsets(store._client.raw, COLLECTION)
    assert after == pytest.approx(before, abs=1e-6)


def test_a_pipeline_comes_back_from_its_yaml_corrected(store, search):
    question = search.questions[0]
    dense = {"query_embedding": embed([question])[0]}
    sparse = {"query_sparse_embedding": example.words(question)}
    asked = {"dense": dense, "sparse": sparse, "hybrid": dense | sparse}
    pipeline = Pipeline()
    for name, kind in zip(asked, RETRIEVERS, strict=True):
        pipeline.add_component(name, kind(store, top_k=5))
    pipeline.add_component("writer", DocumentWriter(store))
    before = pipeline.run(asked | {"writer": {"documents": []}})
    written = pipeline.dumps()
    store.close()
    again = Pipeline.loads(written, allowed_modules=["hubplugin_qdrant.haystack"])
    for name in asked:
        retriever = again.get_component(name)
        assert names(retriever.run(**asked[name])) == names(before[name])
        retriever._document_store.close()  # a folder has one client at a time
    assert names(before["dense"]) == search.best(question)
    assert isinstance(
        again.get_component("writer").document_store, HubQdrantDocumentStore
    )


RETRIEVERS = (
    HubQdrantEmbeddingRetriever,
    HubQdrantSparseEmbeddingRetriever,
    HubQdrantHybridRetriever,
)


def names(found):
    return [document.meta["name"] for document in found["documents"]]
