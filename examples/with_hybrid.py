"""Hybrid search in Qdrant: a dense search fused with BM25, first raw, then with the dense half corrected.

pip install '.[qdrant]'
python examples/with_hybrid.py    # Qdrant in this process

It searches for functions of the Python standard library by their docstrings. The request is the same before and after.
`HubQdrantClient` corrects the dense prefetch, and leaves the sparse prefetch and the fusion as they are.
"""

from __future__ import annotations

import json
import re
import sysconfig
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
from make_data import DATA, read_pairs, source_files
from numpy.typing import NDArray
from qdrant_client import QdrantClient, models

import hubplugin
import hubplugin_qdrant
from hubplugin_qdrant import HubQdrantClient

COLLECTION = "functions"
ASKED = 300
"""The number of docstrings that are searched for."""

K1, B = 1.2, 0.75
"""BM25's usual parameters: K1 limits the weight of a repeated word, and B reduces the weight of words in long texts."""


def load(name: str) -> NDArray[np.float32]:
    vectors: NDArray[np.float32] = np.load(DATA / f"{name}.npy").astype(np.float32)
    return vectors


def texts() -> list[str]:
    """Return each function's name and code, or only the name if this Python lacks the function."""
    names = json.loads((DATA / "names.json").read_text())["test"]
    code = {
        pair.name: pair.target
        for pair in read_pairs(source_files(Path(sysconfig.get_path("stdlib"))))
    }
    return [f"{name} {code.get(name, '')}" for name in names]


def words(text: str) -> Counter[int]:
    """Count the occurrences of each word, by its number. `getPeerName` and `get_peer_name` have the same words."""
    apart = re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower()
    return Counter(
        zlib.crc32(word.encode()) for word in re.findall(r"[a-z]+|\d+", apart)
    )


def bm25_document(text: str, usual: float) -> models.SparseVector:
    """Return the weights of a document's words, which Qdrant multiplies by the IDF. usual: the mean document length."""
    counts = words(text)
    slow = K1 * (1 - B + B * counts.total() / usual)
    return models.SparseVector(
        indices=list(counts),
        values=[times * (K1 + 1) / (times + slow) for times in counts.values()],
    )


def bm25_query(text: str) -> models.SparseVector:
    counts = words(text)
    return models.SparseVector(indices=list(counts), values=[1.0] * len(counts))


def create_collection(client: QdrantClient) -> None:
    documents = texts()
    usual = float(np.mean([words(text).total() for text in documents]))
    client.create_collection(
        COLLECTION,
        vectors_config={
            "dense": models.VectorParams(size=384, distance=models.Distance.COSINE)
        },
        sparse_vectors_config={
            "words": models.SparseVectorParams(modifier=models.Modifier.IDF)
        },
    )
    client.upload_points(
        COLLECTION,
        [
            models.PointStruct(
                id=row,
                vector={"dense": vector.tolist(), "words": bm25_document(text, usual)},
            )
            for row, (vector, text) in enumerate(
                zip(load("test_targets"), documents, strict=True)
            )
        ],
    )


def dense(client: QdrantClient, vector: list[float], text: str) -> list[object]:
    """Return the ids of the ten nearest functions, best first. The text is ignored."""
    return [
        point.id
        for point in client.query_points(
            COLLECTION, vector, using="dense", limit=10
        ).points
    ]


def hybrid(client: QdrantClient, vector: list[float], text: str) -> list[object]:
    prefetch = [
        models.Prefetch(query=vector, using="dense", limit=50),
        models.Prefetch(query=bm25_query(text), using="words", limit=50),
    ]
    fusion = models.FusionQuery(fusion=models.Fusion.DBSF)
    return [
        point.id
        for point in client.query_points(
            COLLECTION, fusion, prefetch=prefetch, limit=10
        ).points
    ]


def main() -> dict[str, float]:
    """Print how many docstrings find their own function. Return the share that finds it first, by search."""
    plain = QdrantClient(":memory:")
    create_collection(plain)
    bank = hubplugin.Bank(load("bank_queries"), load("bank_targets"))
    hubplugin.apply(hubplugin_qdrant.open_store(plain, COLLECTION, "dense"), bank)
    corrected = HubQdrantClient.wrap(
        plain
    )  # in an application, replace QdrantClient(url=...) by HubQdrantClient(url=...)

    asked = json.loads((DATA / "test_texts.json").read_text())
    questions = list(zip(load("test_queries").tolist(), asked, strict=True))[:ASKED]
    shares = {}
    for search in (dense, hybrid):
        for name, client in (("raw", plain), ("corrected", corrected)):
            answers = [search(client, vector, text) for vector, text in questions]
            first, ten = (
                float(np.mean([row in ids[:k] for row, ids in enumerate(answers)]))
                for k in (1, 10)
            )
            shares[f"{search.__name__}, {name}"] = first
            print(
                f"{search.__name__}, {name}: {100 * first:.1f} % first, {100 * ten:.1f} % among the first ten"
            )
    return shares


if __name__ == "__main__":
    main()
