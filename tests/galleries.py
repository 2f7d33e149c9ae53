"""Galleries as many tests need them."""

import numpy as np
import pytest


def unit(rows):
    """`rows` [n, d] at length 1, as float32."""
    rows = np.asarray(rows, np.float64)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def flat_index(file, vectors, ids=None):
    """Writes `vectors` as an index that is searched exactly by inner product, under `ids` if given; returns its URL."""
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
