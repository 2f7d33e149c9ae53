"""CorrectedSearch: the exact corrected ranking from an index that knows no offsets, and a certificate that is true."""

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import hubplugin
from hubplugin import InputError, StoreError, fit
from hubplugin_faiss import CorrectedSearch, upgrade
from tests.core.formulas import similarity
from tests.faiss import cases
from tests.faiss.cases import (
    IP,
    L2,
    as_similarities,
    assert_ranked,
    draw,
    filled,
    made,
    recall,
    written,
)
from tests.galleries import assert_near, with_map
from tests.refusals import refused


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([IP, L2]),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.01, 0.3, 5.0]),
)
def test_certified_answers_are_the_exact_corrected_ranking(seed, metric, k, spread):
    rng = np.random.default_rng(seed)
    vectors, queries = draw(rng, 200, 8, d=9)
    offsets = (rng.normal(size=200) * spread).astype(np.float32)
    index = filled("Flat", vectors, metric)
    found = CorrectedSearch(index, offsets, limit=80).search_certified(queries, k)
    truth = cases.similarities(queries, vectors, metric) + offsets
    assert (found.fetched <= 80).all()
    for query in np.flatnonzero(found.certified):
        best = -np.sort(-truth[query])[:k]
        assert_near(truth[query, found.ids[query]], best)
        scores = as_similarities(found.scores[query], metric)
        assert_near(scores, best)


@pytest.mark.parametrize("metric", [IP, L2])
def test_a_query_map_is_part_of_the_ranking_that_is_certified(metric, rng):
    case = made("Flat", metric)
    step = (0.2 * rng.normal(size=(24, 24))).astype(np.float32)
    plain = fit(case.vectors, case.queries + 0.1, "is")
    model = with_map(plain, step).centre_on(case.vectors)
    truth = similarity(case.queries, case.vectors, "dot", model.query_map)
    truth += model.offsets(case.vectors)
    search = CorrectedSearch(case.index, model, targets=case.vectors)
    found = search.search_certified(case.queries, 10)
    assert found.certified.all()
    assert (found.fetched < case.index.ntotal).any()
    assert_ranked(found.ids, truth, case.ids)


def test_what_probes_too_little_certifies_nothing():
    case = made("IVF8,Flat", IP)
    search = CorrectedSearch(case.index, case.offsets, limit=600)
    case.index.nprobe = 1
    assert not search.search_certified(case.queries, 200).certified.any()
    case.index.nprobe = 8
    assert search.search_certified(case.queries, 200).certified.all()


def test_what_no_longer_fits_is_refused():
    case = made("Flat", IP)
    offsets = case.offsets.copy()
    search = CorrectedSearch(case.index, offsets)
    before = search.search(case.queries, 5)
    offsets[:] = 0
    assert_array_equal(search.search(case.queries, 5), before)
    for queries in (case.queries[:, :5], case.queries * np.nan):
        with refused(InputError, "expected finite queries"):
            search.search(queries, 5)
    case.index.remove_ids(np.arange(10))
    says = "the index holds 590 vectors now, and held 600"
    with refused(InputError, says):
        search.search(case.queries, 5)


@pytest.mark.parametrize(
    ("says", "kind", "metric", "arguments"),
    [
        ("has metric 2, neither inner", "Flat", faiss.METRIC_L1, {}),
        ("are not its rows: search the inner index", "IDMap2,Flat", IP, {}),
        (r"shape \[5\], the index holds 600", "Flat", IP, {"correction": np.zeros(5)}),
        (r"expected \[600, 24\]", "Flat", IP, {"vectors": np.zeros((5, 24))}),
        (
            "an OffsetModel needs the gallery: pass targets=",
            "Flat",
            IP,
            {"correction": fit(None, np.eye(24), "is")},
        ),
        (r"bits \(LSH\) has no similarities.*vectors=", "LSH", L2, {}),
    ],
)
def test_what_does_not_fit_is_refused(says, kind, metric, arguments):
    index = made(kind, metric).index
    with refused(InputError, says):
        CorrectedSearch(index, **{"correction": np.zeros(600), **arguments})


REFUSED = (
    ("RaBitQ", IP), ("RaBitQ4", L2), ("RaBitQfs", IP), ("IVF8,RaBitQ", L2), ("LSH", L2),
    ("ITQ,LSH", L2), ("RQ3x4", IP), ("LSQ2x4", L2), ("PRQ2x2x4", IP), ("PLSQ2x2x4", L2), ("RQ2x4fs", IP),
    ("IVF8,RQ3x4", L2), ("NSG16,Flat", IP), ("NSG16,SQ8", L2), ("PQ6x4fs_64", IP), ("IVF8,PQ6x4fs_96", L2),
    ("RaBitQ,RFlat", IP),
)  # fmt: skip
"""Kinds of index that cannot be upgraded, and a metric that Faiss makes each for."""


@pytest.mark.parametrize(("kind", "metric"), REFUSED)
def test_an_index_that_cannot_be_upgraded_says_so_and_finds_the_corrected_ranking(
    kind, metric, rng, tmp_path
):
    middle = 0.3 * rng.normal(size=24)
    queries, bank = draw(rng, 40, 100, d=24, at=middle)
    case = made(kind, metric)
    model = fit(case.vectors, bank)
    file = written(tmp_path / "x.faiss", case.index)
    says = r"^[^\n]*hubplugin_faiss\.CorrectedSearch\([^\n]*$"
    with refused(StoreError, says):
        upgrade(case.index, model)
    with refused(StoreError, says):
        hubplugin.open_store(f"faiss:{file}")
    search = CorrectedSearch(case.index, model, vectors=case.vectors)
    similarities = cases.similarities(queries, case.vectors, metric)
    truth = similarities + model.offsets(case.vectors)
    raw, corrected = (
        recall(each.search(queries, 10)[1], case.ids[cases.best(truth)])
        for each in (case.index, search)
    )
    assert corrected > raw + 0.1


def test_an_index_of_bits_proves_nothing():
    case = made("LSH", L2)
    given = {"vectors": case.vectors, "limit": 300}
    search = CorrectedSearch(case.index, case.offsets, **given)
    found = search.search_certified(case.queries, 5)
    assert not found.certified.any()
    assert (found.fetched == 300).all()
