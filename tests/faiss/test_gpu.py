"""Upgraded indexes that Faiss can clone to a GPU: tried with the cloner that a move to a GPU uses, on the CPU."""

import faiss
import pytest
from numpy.testing import assert_array_equal

import hubplugin
import hubplugin_faiss
from hubplugin import StoreError
from hubplugin_faiss import upgrade
from tests.faiss.cases import IP, L2, both, draw, filled
from tests.galleries import assert_near, normal, with_map
from tests.refusals import refused

D = 16
MOVED = [
    "Flat", "SQfp16", "IDMap,Flat", "IDMap2,IVF4,Flat", "IVF4,Flat", "IVF4,SQ8", "IVF4,SQ4", "IVF4_HNSW4,SQ8",
    "IVF4,PQ4", "IVF4_HNSW4,PQ4", "PCA8,Flat", "OPQ4,IVF4,PQ4", "Pad24,IVF4,Flat",
]  # fmt: skip


def upgraded(factory, metric, rng):
    vectors, queries = draw(rng, 1_000, 40)
    offsets = 0.05 * rng.normal(size=1_000)
    return upgrade(filled(factory, vectors, metric), offsets), queries


@both
@pytest.mark.parametrize("factory", MOVED)
def test_a_copy_for_a_gpu_is_cloned_and_finds_the_same(factory, metric, rng):
    index, queries = upgraded(factory, metric, rng)
    with pytest.raises(RuntimeError, match="clone"):
        faiss.clone_index(index)
    before = index.search(queries, 10)
    copy = hubplugin_faiss.for_gpu(index)
    del index  # nothing of the copy belongs to what it was made from
    for each in (copy, faiss.clone_index(copy)):
        scores, ids = each.search(queries, 10)
        assert_array_equal(ids, before[1])
        # Parts of PQ codes that hold 0 change the order in which Faiss sums.
        assert_near(scores, before[0], 1e-6 if "PQ" in factory else 0)


def test_pq_codes_have_a_number_of_parts_that_a_gpu_reads(rng):
    copy = hubplugin_faiss.for_gpu(upgraded("IVF4,PQ4", L2, rng)[0])
    assert (
        faiss.downcast_index(copy.index).pq.M == 8
    )  # four and that of the offsets, and three that hold 0


def test_a_query_map_goes_along(rng):
    vectors, bank, queries = draw(rng, 1_000, 300, 40)
    model = with_map(hubplugin.fit(vectors, bank), 0.3 * normal(rng, D, D))
    index = upgrade(filled("Flat", vectors), model)
    found = faiss.clone_index(hubplugin_faiss.for_gpu(index)).search(queries, 10)
    for part, expected in zip(found, index.search(queries, 10), strict=True):
        assert_array_equal(part, expected)


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("HNSW8", "not support this IndexHNSWFlat"),
        ("SQ8", "not support this IndexScalarQuantizer"),
        ("IVF4,PQ4x4", "at most 96 parts of 8 bits; .* this IndexIVFPQ have 6 of 4"),
        ("IVF4,PQ4x4fs", "not support this IndexIVFPQFastScan"),
        ("Flat,RFlat", "not support this IndexRefine"),
        ("L2norm,Flat", "normalise vectors and queries"),
    ],
)
def test_what_has_no_counterpart_on_a_gpu_is_refused_in_one_line(factory, says, rng):
    index, _ = upgraded(factory, IP, rng)
    with refused(StoreError, says):
        hubplugin_faiss.for_gpu(index)
