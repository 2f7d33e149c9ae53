"""Indexes to upgrade, and what their results must be, in float64 straight from the definition."""

from dataclasses import dataclass

import faiss
import numpy as np
import pytest

from hubplugin_faiss.handlers import handler_for
from tests.core import formulas
from tests.galleries import assert_near, unit

IP, L2 = faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2
both = pytest.mark.parametrize("metric", [IP, L2], ids=["ip", "l2"])

EXACT = (
    "Flat",
    "IDMap,Flat",
    "IDMap2,Flat",
    "IVF8,Flat",
    "IDMap2,IVF8,Flat",
    "L2norm,Flat",
    "IVF8_HNSW8,Flat",
)
"""All are searched exhaustively in the tests, so their results are the exact corrected ranking."""

QUANTISED = (
    "SQfp16", "SQbf16", "SQ8", "SQ6", "SQ4", "PQ6x8np", "PQ6x4np", "PQ6x6np",
    "IVF8,SQfp16", "IVF8,SQ8", "IVF8,SQ6", "IVF8,SQ4", "IVF8,PQ6x8np", "IVF8,PQ6x4np",
    "PQ6x4fs", "PQ3x4fs", "IVF8,PQ6x4fs", "IVF8,PQ6x4fsr", "IDMap2,PQ6x4fs", "OPQ6,PQ6x4fs",
    "OPQ6,PQ6x8np", "OPQ6_18,IVF8,PQ6x8np", "PCA12,SQ8", "RR24,IVF8,Flat", "IDMap2,SQ8",
)  # fmt: skip
GRAPHS = ("HNSW16,Flat", "HNSW16,SQ8", "HNSW16,PQ6x8np", "IDMap2,HNSW16")
REFINED = (
    "PQ6x8np,RFlat",
    "IVF8,PQ6x8np,RFlat",
    "IVF8,PQ6x8np,Refine(SQfp16)",
    "PQ6x4fs,RFlat",
)
ALL = EXACT + QUANTISED + GRAPHS + REFINED
FEW = (
    "Flat",
    "IDMap2,IVF8,Flat",
    "SQ8",
    "IVF8,PQ6x8np",
    "PQ6x4fs",
    "HNSW16,Flat",
    "PQ6x8np,RFlat",
)
"""One for each way of keeping codes and of upgrading them: those of `make check`."""


def slow_but(few, kinds):
    """`kinds` as parameters of a test: the few are always tried, the rest where slow tests run."""
    return [
        kind if kind in few else pytest.param(kind, marks=pytest.mark.slow)
        for kind in kinds
    ]


TOLERANCE = {
    "SQ8": 1e-4,
    "SQ6": 1e-3,
    "SQ4": 4e-3,
    "x8": 6e-3,
    "x6": 1e-3,
    "x4": 8e-3,
    "bf16": 1e-4,
}
"""By how much a quantiser may move an offset whose range is 0.4."""


@dataclass
class Case:
    """Unit vectors, queries, offsets and ids for one index."""

    index: faiss.Index
    vectors: np.ndarray
    queries: np.ndarray
    offsets: np.ndarray
    ids: np.ndarray


def made(kind, metric, *, n=600, d=24, seed=3):
    rng = np.random.default_rng(seed)
    vectors, queries = draw(rng, n, 40, d=d)
    offsets = (rng.uniform(-0.2, 0.2, n)).astype(np.float32)
    offsets -= offsets.mean()
    if kind == "HNSW16,PQ6x8np":  # the factory knows it for L2 only
        index = faiss.IndexHNSWPQ(d, 6, 16, 8, metric)
        faiss.downcast_index(index.storage).do_polysemous_training = False
    else:
        index = faiss.index_factory(d, kind, metric)
    index.train(vectors)
    ids = rng.permutation(10 * n)[:n] if "IDMap" in kind else np.arange(n)
    put(index, vectors, ids)
    look_everywhere(index)
    return Case(index, vectors, queries, offsets, ids)


def put(index, vectors, ids):
    """Adds `vectors` [n, d] through plain Faiss, with their ids if it takes any."""
    if isinstance(faiss.downcast_index(index), faiss.IndexIDMap):
        index.add_with_ids(vectors, ids)
    else:
        index.add(vectors)


def filled(kind, vectors, metric=IP):
    """An index that is trained on `vectors` [n, d] and holds them."""
    index = faiss.index_factory(vectors.shape[1], kind, metric)
    index.train(vectors)
    put(index, vectors, np.arange(len(vectors)))
    return index


def bytes_of(index):
    return faiss.serialize_index(index).tobytes()


def reread(index):
    """Returns an index as it is written and read, which searches everything."""
    copy = faiss.deserialize_index(faiss.serialize_index(index))
    look_everywhere(copy)
    return copy


def written(path, index):
    faiss.write_index(index, str(path))
    return path


def grow(path, vectors):
    """Plain Faiss adds `vectors` to the index in a file."""
    index = faiss.read_index(str(path))
    index.add(vectors)
    written(path, index)


def stored(index):
    """Return the offsets in an upgraded index, by row of the vectors that were added."""
    return _scanned(index, "offsets")


def decoded(index):
    """Return the vectors in an upgraded index, likewise."""
    return _scanned(index, "vectors")


def _scanned(index, part):
    handler = handler_for(index)
    found = np.concatenate([getattr(batch, part) for batch in handler.scan(100)])
    rows = np.empty_like(found)
    rows[handler.order()] = found
    return rows


def rows_of(labels, ids):
    """The rows at which the `labels` stand among `ids` [n]."""
    return np.argsort(ids)[np.searchsorted(np.sort(ids), labels)]


def best(scores, k=10):
    """The columns of the k largest of `scores` [m, n] in each row: [m, k]."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def recall(found, expected):
    """The share of `expected` [m, k] that is in `found` [m, k]."""
    pairs = zip(expected, found, strict=True)
    return np.mean([np.isin(row, found_row).mean() for row, found_row in pairs])


def draw(rng, *rows, d=16, at=0):
    """Unit vectors around `at`: arrays of so many `rows`."""
    return [unit(rng.normal(size=(n, d)) + at) for n in rows]


def look_everywhere(index):
    index = faiss.downcast_index(index)
    for part in ("index", "base_index"):
        if hasattr(index, part):
            look_everywhere(getattr(index, part))
    if isinstance(index, faiss.IndexIVF):
        index.nprobe = index.nlist
    if isinstance(index, faiss.IndexHNSW):
        index.hnsw.efSearch = 64


def tolerance(kind):
    if "RFlat" in kind or "fp16" in kind:
        return 1e-5
    return next((value for name, value in TOLERANCE.items() if name in kind), 2e-6)


def similarities(queries, vectors, metric):
    return formulas.similarity(queries, vectors, "dot" if metric == IP else "euclidean")


def as_similarities(scores, metric):
    return scores.astype(np.float64) if metric == IP else -scores.astype(np.float64) / 2


def assert_ranked(labels, truth, ids, ties=1e-5):
    """`labels` [m, k] are the k best of the scores `truth` [m, n], up to scores that differ by less than `ties`."""
    found = np.take_along_axis(truth, rows_of(labels, ids), axis=1)
    best = -np.sort(-truth, axis=1)[:, : labels.shape[1]]
    assert_near(found, best, ties)
