"""Search a corrected collection with LlamaIndex's QdrantVectorStore. Only the client that it gets is another one.

pip install '.[frameworks]'
python examples/with_llamaindex.py                                # Qdrant in this process
python examples/with_llamaindex.py --url http://localhost:6333    # makes and deletes a collection on a server
"""

from __future__ import annotations

import argparse
from typing import Any

from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters
from llama_index.vector_stores.qdrant import QdrantVectorStore
from qdrant_client import QdrantClient, models
from stdlib_search import compare, embed, functions, query_bank, sparse

import hubplugin
import hubplugin_qdrant
from hubplugin_qdrant import HubQdrantClient

COLLECTION = "hubplugin-with-llamaindex"


class MiniLM(BaseEmbedding):
    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return embed(texts)

    def _get_text_embedding(self, text: str) -> list[float]:
        return embed([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return embed([query])[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return embed([query])[0]


def words(texts: list[str]) -> tuple[list[list[int]], list[list[float]]]:
    indices, values = zip(*map(sparse, texts), strict=True)
    return list(indices), list(values)


def index_of(client: QdrantClient) -> VectorStoreIndex:
    store = QdrantVectorStore(
        COLLECTION,
        client,
        enable_hybrid=True,
        sparse_config=models.SparseVectorParams(modifier=models.Modifier.IDF),
        sparse_doc_fn=words,
        sparse_query_fn=words,
    )
    return VectorStoreIndex.from_vector_store(store, embed_model=MiniLM())


def node(code: str, metadata: dict[str, str]) -> TextNode:
    hidden = list(metadata)  # only the code is embedded
    return TextNode(text=code, metadata=metadata, excluded_embed_metadata_keys=hidden)


def names(
    index: VectorStoreIndex, question: str, mode: str = "default", **how: Any
) -> list[str]:
    retriever = index.as_retriever(
        vector_store_query_mode=mode, similarity_top_k=5, **how
    )
    return [found.metadata["name"] for found in retriever.retrieve(question)]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--url", help="a Qdrant server; by default Qdrant runs in this process"
    )
    url = parser.parse_args(given).url
    plain = QdrantClient(url=url) if url else QdrantClient(":memory:")
    documents = functions()
    raw = index_of(plain)
    try:
        raw.insert_nodes(
            [node(each.code, each.metadata) for each in documents]
        )  # makes the collection

        hubplugin.apply(
            hubplugin_qdrant.open_store(plain, COLLECTION, "text-dense"), query_bank()
        )
        client = HubQdrantClient.wrap(
            plain
        )  # in an application, replace QdrantClient(url=...) by HubQdrantClient(url=...)

        corrected = index_of(client)
        for mode in ("default", "hybrid"):
            answers = (
                [names(each, d.question, mode)[0] for d in documents]
                for each in (raw, corrected)
            )
            compare(f"{mode} search", documents, *answers)

        email = MetadataFilters(filters=[MetadataFilter(key="package", value="email")])
        print(
            "filtered by the package email:",
            names(corrected, "Parse a header.", filters=email),
        )
        shout = node(
            "def shout(text):\n    return text.upper() + '!'", {"name": "shout"}
        )
        corrected.insert_nodes([shout])  # with its offset
        print("after adding a document:", names(corrected, "Shout a text."))
        corrected.vector_store.delete_nodes([shout.node_id])
        print("after deleting it:", names(corrected, "Shout a text."))
    finally:
        hubplugin.remove(hubplugin_qdrant.open_store(plain, COLLECTION))
        plain.delete_collection(COLLECTION)


if __name__ == "__main__":
    main()
