from functools import partial
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


def test_a_search_returns_the_corrected_ranking(index, search):
    search.check(partial(example.names, index))


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
    search.check(partial(example.names, index))


def test_an_added_node_has_its_offset(plain, index, search):
    node = example.node(SHOUT, {"name": "shout"})
    index.insert_nodes([node])
    search.check_shout(stored_offsets(plain, COLLECTION)[UUID(node.node_id)])
