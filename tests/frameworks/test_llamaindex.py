from uuid import UUID

import pytest
import with_llamaindex as example
from llama_index.core import VectorStoreIndex
from llama_index.vector_stores.qdrant import QdrantVectorStore
from qdrant_client import QdrantClient

from hubplugin_qdrant import HubQdrantClient
from tests.frameworks.conftest import SHOUT, corrected, stored_offsets

COLLECTION = example.COLLECTION

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:Payload indexes have no effect in the local Qdrant"
    ),
]


@pytest.fixture
def plain(functions):
    client = QdrantClient(":memory:")
    example.index_of(client).insert_nodes(
        [example.node(each.code, each.metadata) for each in functions]
    )
    return client


@pytest.fixture
def search(plain, functions):
    return corrected(plain, COLLECTION, "text-dense", functions)


@pytest.fixture
def index(plain, search):
    return example.index_of(HubQdrantClient.wrap(plain))


def test_a_search_returns_the_corrected_ranking(plain, index, search):
    found = [example.names(index, question) for question in search.questions]
    assert found == [search.best(question) for question in search.questions]
    assert found != [
        example.names(example.index_of(plain), question)
        for question in search.questions
    ]


def test_a_search_of_an_index_without_hybrid_returns_the_corrected_ranking(functions):
    """Such an index makes a collection whose vector has no name."""
    plain = QdrantClient(":memory:")
    nodes = [example.node(each.code, each.metadata) for each in functions]
    VectorStoreIndex.from_vector_store(
        QdrantVectorStore("dense", plain), example.MiniLM()
    ).insert_nodes(nodes)
    search = corrected(plain, "dense", "", functions)
    store = QdrantVectorStore("dense", HubQdrantClient.wrap(plain))
    index = VectorStoreIndex.from_vector_store(store, example.MiniLM())
    found = [example.names(index, question) for question in search.questions]
    assert found == [search.best(question) for question in search.questions]


def test_a_hybrid_search_fuses_the_corrected_scores(plain, index, search):
    def scaled(scores: dict[str, float]) -> dict[str, float]:
        low, high = min(scores.values()), max(scores.values())
        return {name: (score - low) / (high - low) for name, score in scores.items()}

    question = search.questions[0]
    words = example.index_of(plain).as_retriever(
        vector_store_query_mode="sparse", sparse_top_k=5
    )
    sparse = scaled(
        {found.metadata["name"]: found.score for found in words.retrieve(question)}
    )
    dense = scaled(dict(list(search.scores(question).items())[:5]))
    fused = {
        name: 0.5 * sparse.get(name, 0) + 0.5 * dense.get(name, 0)
        for name in {*sparse, *dense}
    }
    retriever = index.as_retriever(
        vector_store_query_mode="hybrid", similarity_top_k=5, sparse_top_k=5, alpha=0.5
    )
    found = {node.metadata["name"]: node.score for node in retriever.retrieve(question)}
    assert found == pytest.approx({name: fused[name] for name in found}, abs=1e-5)
    assert sorted(found.values()) == pytest.approx(
        sorted(fused.values())[-5:], abs=1e-5
    )


def test_an_added_node_has_its_offset(plain, index, search):
    node = example.node(SHOUT, {"name": "shout"})
    index.insert_nodes([node])
    offset = stored_offsets(plain, COLLECTION)[UUID(node.node_id)]
    assert offset == pytest.approx(search.offset(SHOUT), abs=1e-6)
