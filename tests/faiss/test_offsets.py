"""Any type, metric, d, number of entries, offsets and ids: the definition holds."""

import zlib

import faiss
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hubplugin_faiss import downgrade, upgrade
from hubplugin_faiss.encoding.offsets import UpgradeSpec
from tests.faiss import cases
from tests.faiss.cases import (
    IP,
    L2,
    as_similarities,
    bytes_of,
    look_everywhere,
    put,
    rows_of,
    unit,
)
from tests.galleries import assert_near, normal

faiss.omp_set_num_threads(1)

KINDS = ("Flat", "IDMap,Flat", "IDMap2,Flat", "IVF1,Flat", "IVF3,Flat", "HNSW8", "SQfp16", "SQ8", "SQ4", "SQ6",
         "IVF3,SQ8", "IVF3,SQ4", "L2norm,Flat", "IVF3,SQfp16")  # fmt: skip

shapes = st.sampled_from(
    ["spread", "constant", "one hub", "all negative", "all positive", "zero"]
)
sizes = st.sampled_from([1e-9, 1e-4, 0.2, 30.0, 1e6])


def offsets_of(shape, size, n, rng):
    values = {
        "spread": rng.uniform(-1, 1, n),
        "constant": np.full(n, 0.7),
        "one hub": -np.eye(1, n)[0],
        "all negative": rng.uniform(-1, -0.5, n),
        "all positive": rng.uniform(0.5, 1, n),
        "zero": np.zeros(n),
    }[shape]
    return (values * size).astype(np.float32)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    metric=st.sampled_from([IP, L2]),
    d=st.sampled_from([1, 2, 7, 8, 9, 16, 17, 33]),
    n=st.sampled_from([1, 2, 5, 60]),
    shape=shapes,
    size=sizes,
    seed=st.integers(0, 2**31),
)
def test_scores_ids_and_bytes(kind, metric, d, n, shape, size, seed):
    rng = np.random.default_rng(seed)
    vectors, queries, others = (normal(rng, rows, d) for rows in (n, 4, 200))
    index = faiss.index_factory(d, kind, metric)
    index.train(np.concatenate([vectors, others]))
    ids = rng.permutation(1000)[:n] if "IDMap" in kind else np.arange(n)
    put(index, vectors, ids)
    look_everywhere(index)
    offsets = offsets_of(shape, size, n, rng)

    upgraded = upgrade(index, offsets)

    assert bytes_of(downgrade(upgraded)) == bytes_of(index)
    stored = cases.stored(upgraded)
    decoded = cases.decoded(upgraded)
    spread = max(float(offsets.max()), 0.0) - min(float(offsets.min()), 0.0)
    rounding = {"SQ4": 0.02, "SQ6": 0.005, "SQ8": 0.0005}.get(kind.split(",")[-1], 3e-6)
    assert_near(stored, offsets, rounding * 2 * spread + 1e-7)

    scores, found = upgraded.search(queries, n)
    asked = unit(queries) if kind == "L2norm,Flat" else queries
    truth = cases.similarities(asked, decoded, metric) + stored
    scale = float(np.abs(truth).max() + np.abs(offsets).max())
    rounded = 1e-5 * scale + 2e-6
    # A graph need not reach every entry, nor does the raw one.
    assert (found >= 0).all() or kind == "HNSW8"
    for labels, line, expected in zip(found, scores, truth, strict=True):
        rows = rows_of(labels[labels >= 0], ids)
        assert len(set(rows)) == len(rows) > 0
        apart = as_similarities(line[: len(rows)], metric) - expected[rows]
        assert_near(apart, apart.mean(), rounded)
        if metric == IP:
            # 16 bits hold huge offsets only in larger units, by whose square all scores are shifted alike.
            shift = 2e-8 * np.abs(offsets).max() ** 2
            assert abs(apart.mean()) <= shift + rounded + 1e-5


def test_a_model_is_never_taken_for_none():
    names = (f"{number:016x}" for number in range(20_000))
    like_none = next(name for name in names if zlib.crc32(name.encode()) % 2**12 == 0)
    extra = UpgradeSpec(0, 0, False, like_none).extra_dimensions([0.0], 1)
    assert extra.has_fingerprint(like_none)
    assert not extra.has_fingerprint("")
