"""Search a corrected collection with Haystack. HubQdrantDocumentStore is a QdrantDocumentStore with a wrapped client.

pip install '.[frameworks]'
python examples/with_haystack.py                                # Qdrant in this process
python examples/with_haystack.py --url http://localhost:6333    # makes and deletes a collection on a server
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from haystack import Document
from haystack.dataclasses import SparseEmbedding
from haystack_integrations.components.retrievers.qdrant import (
    QdrantEmbeddingRetriever,
    QdrantHybridRetriever,
)
from haystack_integrations.document_stores.qdrant import QdrantDocumentStore
from qdrant_client import QdrantClient
from stdlib_search import compare, embed, functions, query_bank, sparse

import hubplugin
import hubplugin_qdrant
from hubplugin_qdrant.haystack import HubQdrantDocumentStore

COLLECTION = "hubplugin-with-haystack"


def document(code: str, metadata: dict[str, str]) -> Document:
    return Document(
        content=code,
        meta=metadata,
        embedding=embed([code])[0],
        sparse_embedding=words(code),
    )


def words(text: str) -> SparseEmbedding:
    return SparseEmbedding(*sparse(text))


def dense(store: QdrantDocumentStore, question: str, **how: Any) -> list[str]:
    found = QdrantEmbeddingRetriever(store, top_k=5).run(embed([question])[0], **how)
    return [each.meta["name"] for each in found["documents"]]


def hybrid(store: QdrantDocumentStore, question: str, **how: Any) -> list[str]:
    found = QdrantHybridRetriever(store, top_k=5).run(
        embed([question])[0], words(question), **how
    )
    return [each.meta["name"] for each in found["documents"]]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--url",
        help="a Qdrant server; by default Qdrant runs in this process, in a folder",
    )
    url = parser.parse_args(given).url
    with tempfile.TemporaryDirectory() as folder:
        where = {"url": url} if url else {"path": folder}
        options = where | {
            "index": COLLECTION,
            "embedding_dim": 384,
            "use_sparse_embeddings": True,
            "sparse_idf": True,
            "progress_bar": False,
        }
        documents = functions()
        embed([each.code for each in documents])  # all together, which is faster

        raw = QdrantDocumentStore(**options)
        raw.write_documents([document(each.code, each.metadata) for each in documents])
        answers = {
            search: [search(raw, each.question)[0] for each in documents]
            for search in (dense, hybrid)
        }
        raw.close()  # a folder allows one client at a time, a server many

        plain = QdrantClient(**where)
        hubplugin.apply(
            hubplugin_qdrant.open_store(plain, COLLECTION, "text-dense"), query_bank()
        )
        plain.close()

        corrected = HubQdrantDocumentStore(**options)
        for search in (dense, hybrid):
            found = [search(corrected, each.question)[0] for each in documents]
            compare(f"{search.__name__} search", documents, answers[search], found)

        email = {"field": "meta.package", "operator": "==", "value": "email"}
        print(
            "filtered by the package email:",
            dense(corrected, "Parse a header.", filters=email),
        )
        shout = document(
            "def shout(text):\n    return text.upper() + '!'", {"name": "shout"}
        )
        corrected.write_documents([shout])  # with its offset
        print("after adding a document:", dense(corrected, "Shout a text."))
        corrected.delete_documents([shout.id])
        print("after deleting it:", dense(corrected, "Shout a text."))
        corrected.close()

        plain = QdrantClient(**where)
        plain.delete_collection(COLLECTION)
        plain.close()


if __name__ == "__main__":
    main()
