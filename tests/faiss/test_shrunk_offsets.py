"""The first stage of a refined index: its offsets are shrunk as its codes shrink similarities."""

from __future__ import annotations

import faiss
import numpy as np
import pytest

import hubplugin_faiss
from hubplugin_faiss.handlers import handler_for


@pytest.mark.parametrize("factory", ["PQ8x4fs,RFlat", "PQ8np,RFlat", "Flat,RFlat"])
def test_the_first_stage_has_offsets_times_the_slope_of_its_codes(factory):
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
    assert np.polyfit(offsets, found, 1)[0] == pytest.approx(slope, rel=0.1)
