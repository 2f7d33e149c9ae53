"""How large the last component of a query should be where a graph ranks copies [t, offset / e] by inner product.

    python -m benchmarks.extra_component

recall@10 of Chroma's HNSW (ef_search 100) against the exact corrected ranking. 1 x is where the last component of the
targets spreads as far as any other of a query; `hubplugin.copies.e_of` takes 2 x. "raw" has no offsets.
"""

from __future__ import annotations

import chromadb
import numpy as np

import hubplugin
from benchmarks.tables import EXAMPLES

TIMES = (0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)
BATCH = 500


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def clustered(rng: np.random.Generator, centres: np.ndarray, count: int, noise: float) -> np.ndarray:
    return unit(
        centres[rng.integers(len(centres), size=count)] + noise * unit(rng.normal(size=(count, centres.shape[1])))
    )


def galleries() -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """By name: targets [n, d], queries [m, d] and offsets [n]."""
    rng = np.random.default_rng(1)
    names = ("test_targets", "bank_queries", "test_queries")
    targets, bank, queries = (unit(np.load(EXAMPLES / f"{name}.npy")) for name in names)
    found = {}
    for method, settings in {"is": {"tau": 0.05}, "sn": {"tau": 0.05}, "nnn": {"k": 16, "alpha": 0.5}}.items():
        model = hubplugin.fit(targets, bank, method, **settings)
        found[f"examples/data, {method}"] = targets, queries, model.offsets(targets)
    centres = unit(rng.normal(size=(40, 128)))
    part = [clustered(rng, centres, count, noise) for count, noise in ((4000, 0.6), (600, 0.9), (300, 0.9))]
    found["clusters, sn"] = part[0], part[2], hubplugin.fit(part[0], part[1], "sn", tau=0.02).offsets(part[0])
    far = part[0] * rng.uniform(0.5, 3, size=(4000, 1)).astype(np.float32)
    offsets = hubplugin.fit(far, part[1], "is", metric="dot", tau=0.2).offsets(far)
    found["clusters of many lengths, is, dot"] = far, part[2], offsets
    spread = (unit(rng.normal(size=(3000, 32))) * rng.uniform(0.5, 3, size=(3000, 1))).astype(np.float32)
    found["lengths and offsets at random, dot"] = spread, rng.normal(size=(200, 32)), 3 * rng.normal(size=3000)
    return found


def recall(
    client: chromadb.ClientAPI, targets: np.ndarray, queries: np.ndarray, offsets: np.ndarray, e: float
) -> float:
    scores = queries.astype(np.float64) @ targets.T.astype(np.float64) + offsets
    exact = np.argsort(-scores, axis=1)[:, :10]
    index = {"hnsw": {"space": "ip", "ef_search": 100}}
    collection = client.create_collection("tried", configuration=index, embedding_function=None)
    stored = np.concatenate([targets, offsets[:, None] / e], axis=1).astype(np.float32)
    for start in range(0, len(stored), BATCH):
        part = stored[start : start + BATCH]
        collection.add(ids=[str(start + row) for row in range(len(part))], embeddings=part)
    asked = np.concatenate([queries, np.full((len(queries), 1), e)], axis=1).astype(np.float32)
    found = collection.query(query_embeddings=asked, n_results=10, include=[])["ids"]
    client.delete_collection("tried")
    pairs = zip(found, exact.tolist(), strict=True)
    return float(np.mean([len(set(map(int, ids)) & set(best)) / 10 for ids, best in pairs]))


def main() -> None:
    client = chromadb.EphemeralClient()
    print("| data | raw | " + " | ".join(f"{times:g} x" for times in TIMES) + " |")
    print("|---" * (2 + len(TIMES)) + "|")
    for name, (targets, queries, offsets) in galleries().items():
        once = float(np.std(offsets)) / float(np.sqrt(np.square(queries).mean()))
        raw = recall(client, targets, queries, 0 * offsets, 1.0)
        tried = [recall(client, targets, queries, offsets, times * once) for times in TIMES]
        print(f"| {name} | {raw:.4f} | " + " | ".join(f"{each:.4f}" for each in tried) + " |", flush=True)


if __name__ == "__main__":
    main()
