"""The first stage of a refined index: its share of the offsets."""

from __future__ import annotations

import faiss
import numpy as np
import pytest

import hubplugin
import hubplugin_faiss
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.base import nearness_of
from tests.faiss import cases


@pytest.mark.parametrize("factory", ["PQ8x4fs,RFlat", "PQ8np,RFlat", "Flat,RFlat"])
def test_the_first_stage_has_offsets_times_the_square_of_the_slope_of_its_codes(factory):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(500, 32)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    offsets = rng.normal(size=500).astype(np.float32) / 10
    raw = faiss.index_factory(32, factory, faiss.METRIC_INNER_PRODUCT)
    raw.train(vectors)
    raw.add(vectors)
    true = vectors.astype(np.float64)
    coded = faiss.downcast_index(faiss.downcast_index(raw).base_index).reconstruct_n(0, 500).astype(np.float64)
    true, coded = true - true.mean(axis=0), coded - coded.mean(axis=0)
    slope = (true * coded).sum() / (true * true).sum()

    index = hubplugin_faiss.upgrade(raw, offsets)
    first = handler_for(faiss.downcast_index(index).base_index)
    found = np.concatenate([own for _, own in first.scan(0, 500)])
    assert np.corrcoef(found, offsets)[0, 1] > 0.9
    # The slope is taken from a part of the entries, and codes round offsets.
    assert np.polyfit(offsets, found, 1)[0] == pytest.approx(slope**2, rel=0.1)


def lengths(vectors):
    return np.linalg.norm(vectors.astype(np.float64), axis=1)


@pytest.mark.parametrize("metric", [faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2])
def test_newcomers_have_the_share_of_offsets_of_those_that_were_there(metric):
    rng = np.random.default_rng(0)
    vectors, bank = (rng.normal(size=(rows, 32)) + 1.5 for rows in (600, 80))
    vectors, bank = ((part / lengths(part)[:, None]).astype(np.float32) for part in (vectors, bank))
    raw = faiss.index_factory(32, "PQ4np,RFlat", metric)
    raw.train(vectors)
    raw.add(vectors[:500])
    model = hubplugin.fit(vectors[:500], bank)
    coded = faiss.downcast_index(faiss.downcast_index(raw).base_index).reconstruct_n(0, 500).astype(np.float64)
    true, coded = vectors[:500] - vectors[:500].mean(axis=0), coded - coded.mean(axis=0)
    share = ((true * coded).sum() / (true * true).sum()) ** 2
    assert 0.1 < share < 0.8

    index = hubplugin_faiss.upgrade(raw, model, force=True)
    hubplugin_faiss.add(index, vectors[500:], model)
    first = handler_for(faiss.downcast_index(index).base_index)
    coded, found = (np.concatenate(part) for part in zip(*first.scan(0, 600), strict=True))
    nearness = nearness_of(handler_for(raw), model)
    bias = nearness * lengths(coded) - (lengths(coded) ** 2 / 2 if metric == faiss.METRIC_L2 else 0)
    for part in (slice(0, 500), slice(500, 600)):
        slope = np.polyfit(model.offsets(vectors[part]), (found + bias)[part], 1)[0]
        assert slope == pytest.approx(share, rel=0.1)


def test_the_first_stage_has_room_for_a_norm_bias_wider_than_the_offsets():
    case = cases.made("PQ6x8np,RFlat", faiss.METRIC_L2)
    model = hubplugin.fit(case.index, case.queries, metric="cosine")
    upgraded = hubplugin_faiss.upgrade(case.index, model, force=True)  # which raises where codes have no room
    (vectors, stored), *_ = handler_for(faiss.downcast_index(upgraded).base_index).scan(0, 600)
    offsets = model.offsets(case.vectors)
    assert np.ptp(stored) > 1.5 * np.ptp(offsets)
    bias = nearness_of(handler_for(case.index), model) * lengths(vectors) - lengths(vectors) ** 2 / 2
    slope, _ = np.polyfit(offsets, stored + bias, 1)
    left = stored + bias - slope * offsets
    assert np.abs(left - left.mean()).max() < 1e-3
