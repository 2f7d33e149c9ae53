from functools import partial
from uuid import UUID

import pytest
import with_langchain as example
from langchain_core.documents import Document
from langchain_qdrant import RetrievalMode
from qdrant_client import QdrantClient

from hubplugin_qdrant import HubQdrantClient
from hubplugin_qdrant.langchain import HubQdrantVectorStore
from tests.frameworks.conftest import SHOUT, corrected, stored_offsets

pytestmark = pytest.mark.slow

DENSE, SPARSE, HYBRID = RetrievalMode.DENSE, RetrievalMode.SPARSE, RetrievalMode.HYBRID
COLLECTION = example.COLLECTION
AGAIN = "00000000-0000-0000-0000-0000000000aa"
"""The id of a text that is added a second time."""


@pytest.fixture
def plain(functions):
    client = QdrantClient(":memory:")
    example.create_collection(client)
    texts = [each.code for each in functions]
    metadata = [each.metadata for each in functions]
    example.store(client, HYBRID).add_texts(texts, metadata)
    return client


@pytest.fixture
def search(plain, functions):
    return corrected(plain, COLLECTION, "dense", functions)


@pytest.fixture
def client(plain, search):
    return HubQdrantClient.wrap(plain)


def test_a_search_returns_the_corrected_ranking(client, search):
    search.check(partial(example.names, example.store(client, DENSE)))


def test_a_hybrid_search_fuses_the_corrected_ranking(plain, client, search):
    for question in search.questions:
        words = example.names(example.store(plain, SPARSE), question)
        fused: dict[str, float] = {}
        for ranking in (search.best(question), words):
            # Qdrant's reciprocal rank fusion, ranks from 0.
            for rank, name in enumerate(ranking):
                fused[name] = fused.get(name, 0.0) + 1 / (2 + rank)
        found = example.store(client, HYBRID).similarity_search_with_score(
            question, k=5
        )
        assert [score for _, score in found] == pytest.approx(
            sorted(fused.values(), reverse=True)[: len(found)]
        )
        assert {
            d.metadata["name"]: score for d, score in found
        }.items() <= fused.items()


def test_an_added_text_has_its_offset(plain, client, search):
    ids = example.store(client, HYBRID).add_texts([SHOUT], [{"name": "shout"}])
    search.check_shout(stored_offsets(plain, COLLECTION)[UUID(ids[0])])


def test_every_way_to_make_a_wrapped_store_gives_a_corrected_one(
    plain, search, functions, tmp_path
):
    """`from_texts`, `from_documents` and `from_existing_collection` connect by
    themselves."""
    path = str(tmp_path / "store")
    own = QdrantClient(path=path)
    plain.migrate(own, [COLLECTION, f"{COLLECTION}--hub"])
    own.close()
    given = {
        "collection_name": COLLECTION,
        "path": path,
        "vector_name": "dense",
        "retrieval_mode": DENSE,
    }
    words, vectors = [functions[0].code], example.MiniLM()
    for make in (
        lambda: HubQdrantVectorStore.from_existing_collection(
            embedding=vectors, **given
        ),
        lambda: HubQdrantVectorStore.from_texts(words, vectors, ids=[AGAIN], **given),
        lambda: HubQdrantVectorStore.from_documents(
            [Document(page_content=words[0])], vectors, ids=[AGAIN], **given
        ),
    ):
        store = make()
        assert isinstance(store.client, HubQdrantClient)
        if store.get_by_ids([AGAIN]):
            assert UUID(AGAIN) in stored_offsets(store.client.raw, COLLECTION)
            store.delete([AGAIN])
        search.check(partial(example.names, store))
        store.client.close()
