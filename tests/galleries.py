"""Galleries as many tests need them."""

from dataclasses import replace

import numpy as np
import pytest

from hubplugin import open_store
from hubplugin.model import QueryMap


def unit(rows):
    """`rows` [n, d] at length 1, as float32."""
    rows = np.asarray(rows, np.float64)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def flat_store(folder, vectors, ids=None):
    """Return the store of such an index in a folder."""
    return open_store(flat_index(folder / "photos.faiss", vectors, ids))


def collection(client, vectors, payload=None, name="photos"):
    """Make a Qdrant collection of `vectors` [n, d], compared by cosine, under the ids 0, 1, ..."""
    from qdrant_client import models

    cosine = models.VectorParams(size=vectors.shape[1], distance=models.Distance.COSINE)
    client.create_collection(name, cosine)
    client.upload_collection(name, vectors, payload, ids=range(len(vectors)))


def flat_index(file, vectors, ids=None):
    """Write `vectors` as an index that is searched exactly by inner product, under `ids` if given; return its URL."""
    faiss = pytest.importorskip(
        "faiss", reason="needs faiss-cpu: pip install '.[faiss]'"
    )
    index = faiss.IndexFlatIP(vectors.shape[1])
    if ids is None:
        index.add(vectors)
    else:
        index = faiss.IndexIDMap2(index)
        index.add_with_ids(vectors, ids)
    faiss.write_index(index, str(file))
    return f"faiss:{file}"


def assert_near(found, expected, atol=1e-5):
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


def normal(rng, *shape):
    """Return normally distributed numbers, as float32."""
    return rng.normal(size=shape).astype(np.float32)


def clustered(rng, count, dim):
    """Return unit vectors about eight centres, so that some are hubs."""
    centres = rng.normal(size=(8, dim))[rng.integers(8, size=count)]
    return unit(centres + rng.normal(size=(count, dim)))


def with_map(model, step):
    """`model` with a query map, which says that it has 200 pairs."""
    step = np.asarray(step, np.float32)
    return replace(model, query_map=QueryMap(step, 1.0, 200))


each_metric = pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean"])
