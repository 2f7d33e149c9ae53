"""Indexes on a GPU. Where there is none, or Faiss was built without, nothing here was seen working."""

from __future__ import annotations

import faiss
import numpy as np
import pytest

import hubplugin_faiss
from tests.faiss import cases
from tests.faiss.cases import IP, L2

pytestmark = pytest.mark.skipif(
    not hasattr(faiss, "GpuIndexFlat") or faiss.get_num_gpus() == 0,
    reason="needs a GPU and a Faiss that is built for it (faiss-gpu-cu12)",
)


@pytest.mark.parametrize("kind", ["Flat", "IVF8,Flat", "IVF8,SQ8", "IVF8,SQfp16", "IVF8,PQ12x8np", "IDMap,Flat"])
@pytest.mark.parametrize("metric", [IP, L2], ids=["ip", "l2"])
def test_an_index_on_a_gpu_is_upgraded_there(kind, metric):
    case = cases.made(kind, metric)
    on_gpu = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, case.index)
    cases.look_everywhere(on_gpu)
    upgraded = hubplugin_faiss.upgrade(on_gpu, case.offsets)
    on_cpu = hubplugin_faiss.upgrade(case.index, case.offsets)
    scores, labels = upgraded.search(case.queries, 10)
    wanted, names = on_cpu.search(case.queries, 10)
    np.testing.assert_allclose(scores, wanted, atol=1e-2)
    assert np.mean([len(np.intersect1d(a, b)) / 10 for a, b in zip(labels, names, strict=True)]) > 0.95

    if "IDMap" not in kind:
        hubplugin_faiss.add(upgraded, case.vectors[:5], case.offsets[:5])
        assert upgraded.ntotal == 605
    raw = hubplugin_faiss.downgrade(upgraded)
    assert type(faiss.downcast_index(raw)).__name__.startswith("Gpu") or "IDMap" in kind
    if "IDMap" not in kind:
        back = faiss.index_gpu_to_cpu(raw).reconstruct_n(0, 600)
        np.testing.assert_allclose(back, case.index.reconstruct_n(0, 600), atol=1e-6)
