"""Search a corrected collection with LangChain's QdrantVectorStore. Only the client that it gets is another one.

pip install '.[frameworks]'
python examples/with_langchain.py                                # Qdrant in this process
python examples/with_langchain.py --url http://localhost:6333    # makes and deletes a collection on a server
"""

from __future__ import annotations

import argparse
from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_qdrant import (
    QdrantVectorStore,
    RetrievalMode,
    SparseEmbeddings,
    SparseVector,
)
from qdrant_client import QdrantClient, models
from stdlib_search import compare, embed, functions, query_bank, sparse

import hubplugin
import hubplugin_qdrant
from hubplugin_qdrant import HubQdrantClient

COLLECTION = "hubplugin-with-langchain"


class MiniLM(Embeddings):
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return embed(texts)

    def embed_query(self, text: str) -> list[float]:
        return embed([text])[0]


class Words(SparseEmbeddings):
    def embed_documents(self, texts: list[str]) -> list[SparseVector]:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> SparseVector:
        indices, values = sparse(text)
        return SparseVector(indices=indices, values=values)


def create_collection(client: QdrantClient) -> None:
    client.create_collection(
        COLLECTION,
        vectors_config={
            "dense": models.VectorParams(size=384, distance=models.Distance.COSINE)
        },
        sparse_vectors_config={
            "sparse": models.SparseVectorParams(modifier=models.Modifier.IDF)
        },
    )


def store(client: QdrantClient, mode: RetrievalMode) -> QdrantVectorStore:
    return QdrantVectorStore(
        client,
        COLLECTION,
        MiniLM(),
        mode,
        vector_name="dense",
        sparse_embedding=Words(),
        sparse_vector_name="sparse",
    )


def names(found: QdrantVectorStore, question: str, **how: Any) -> list[str]:
    return [
        document.metadata["name"]
        for document in found.similarity_search(question, k=5, **how)
    ]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--url", help="a Qdrant server; by default Qdrant runs in this process"
    )
    url = parser.parse_args(given).url
    plain = QdrantClient(url=url) if url else QdrantClient(":memory:")
    documents = functions()
    create_collection(plain)
    try:
        texts, metadata = (
            [each.code for each in documents],
            [each.metadata for each in documents],
        )
        store(plain, RetrievalMode.HYBRID).add_texts(texts, metadata)

        hubplugin.apply(
            hubplugin_qdrant.open_store(plain, COLLECTION, "dense"), query_bank()
        )
        client = HubQdrantClient.wrap(
            plain
        )  # in an application, replace QdrantClient(url=...) by HubQdrantClient(url=...)

        for mode in (RetrievalMode.DENSE, RetrievalMode.HYBRID):
            raw, corrected = store(plain, mode), store(client, mode)
            answers = (
                [names(each, d.question)[0] for d in documents]
                for each in (raw, corrected)
            )
            compare(f"{mode.value} search", documents, *answers)

        corrected = store(client, RetrievalMode.HYBRID)
        email = models.FieldCondition(
            key="metadata.package", match=models.MatchValue(value="email")
        )
        print(
            "filtered by the package email:",
            names(corrected, "Parse a header.", filter=models.Filter(must=[email])),
        )
        shout = "def shout(text):\n    return text.upper() + '!'"
        ids = corrected.add_texts([shout], [{"name": "shout"}])  # with its offset
        print("after adding a document:", names(corrected, "Shout a text."))
        corrected.delete(ids)
        print("after deleting it:", names(corrected, "Shout a text."))
    finally:
        hubplugin.remove(hubplugin_qdrant.open_store(plain, COLLECTION))
        plain.delete_collection(COLLECTION)


if __name__ == "__main__":
    main()
