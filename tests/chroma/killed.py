"""Steps on the collection `photos`, in a process that may be killed: python killed.py FOLDER STEP...

Prints what each step says.
"""

import sys
import warnings

import chromadb
import numpy as np

import hubplugin.store

warnings.simplefilter("ignore")


def apply(store: hubplugin.store.Store, folder: str) -> str:
    hubplugin.apply(store, hubplugin.load(f"{folder}/next.hub"), force=True)
    return "applied"


def look(store: hubplugin.store.Store, folder: str) -> str:
    """What a search answers from: the ranking itself is compared with the model's, in float64."""
    queries, vectors = (
        np.load(f"{folder}/queries.npy"),
        np.load(f"{folder}/vectors.npy").astype(np.float64),
    )
    found, similarity = (
        store.search(queries, 10),
        queries.astype(np.float64) @ vectors.T,
    )
    offsets = (
        hubplugin.load(f"{folder}/next.hub")
        .offsets(vectors.astype(np.float32))
        .astype(np.float64)
    )
    for name, scores in (("raw", similarity), ("corrected", similarity + offsets)):
        nearest = np.sort(1 - scores, axis=1)[:, :10]
        if np.abs(nearest - np.array(found.scores)).max() < 1e-5:
            return name
    raise AssertionError("a search is neither raw nor corrected")


def remove(store: hubplugin.store.Store, folder: str) -> str:
    store.remove()
    return ",".join(
        collection.name
        for collection in chromadb.PersistentClient(folder).list_collections()
    )


if __name__ == "__main__":
    place, *steps = sys.argv[1:]
    for step in steps:
        print(
            globals()[step](hubplugin.open_store(f"chroma:{place}/photos"), place),
            flush=True,
        )
