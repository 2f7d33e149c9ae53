"""Every type that can be upgraded: same answers as the definition, same bytes after a downgrade, still plain Faiss."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import faiss
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from hubplugin import StoreError, fit
from hubplugin_faiss import add, downgrade, remove_ids, upgrade
from hubplugin_faiss.handlers import handler_for
from tests.faiss.cases import (
    ALL,
    FEW,
    IP,
    L2,
    REFINED,
    as_similarities,
    assert_ranked,
    best,
    both,
    bytes_of,
    decoded,
    draw,
    filled,
    look_everywhere,
    made,
    put,
    recall,
    reread,
    rows_of,
    similarities,
    slow_but,
    stored,
    tolerance,
    unit,
    written,
)
from tests.galleries import assert_near
from tests.refusals import refused

faiss.omp_set_num_threads(1)


@cache
def pair(kind, metric):
    """A case and its upgraded index, both only to be looked at."""
    case = made(kind, metric)
    return case, upgrade(case.index, case.offsets)


def fresh(kind, metric):
    case, upgraded = pair(kind, metric)
    return case, reread(upgraded)


def kinds(*names):
    """A test of some kinds of index: of the few by `make check`, or of the first where none of them is among these, and
    of all by `make test`."""
    few = {*names} & {*FEW} or {names[0]}
    return pytest.mark.parametrize("kind", slow_but(few, names))


@kinds(
    "IVF8(SQ8),SQ8",
    "IVF8(SQ8),SQ6",
    "IVF8(SQ8),SQ4",
    "IVF8(SQ8),PQ6x8np",
    "IVF8(SQ8),PQ6x4fsr",
    "IVF8(SQfp16),SQ4",
)
@both
def test_offsets_that_differ_by_list_survive_a_coarse_quantizer_without_floats(
    kind, metric
):
    rng = np.random.default_rng(4)
    groups, centres = rng.integers(0, 8, 2000), 2 * rng.normal(size=(8, 24))
    vectors = (centres[groups] + rng.normal(size=(2000, 24))).astype(np.float32)
    offsets = (rng.normal(size=8)[groups] + 0.05 * rng.normal(size=2000)).astype(
        np.float32
    )
    index = filled(kind, vectors, metric)
    upgraded = upgrade(index, offsets)
    lost = np.abs(stored(upgraded) - offsets).max()
    assert lost < np.ptp(offsets) * (0.02 if "PQ6x8" in kind else 0.01)


@kinds("IVF32,Flat", "IVF32,SQ8", "IVF32,PQ8x4fs", "IVF32(SQ8),Flat")
@pytest.mark.filterwarnings("ignore:recall@10")
def test_offsets_that_make_up_for_lengths_leave_a_search_by_l2_what_it_finds(kind):
    """They are largest where vectors lie furthest from their centroid."""
    rng = np.random.default_rng(0)
    vectors, queries = draw(rng, 4000, 400)
    vectors = (vectors * rng.lognormal(0, 0.15, size=(4000, 1))).astype(np.float32)
    index = filled(kind, vectors, L2)
    faiss.ParameterSpace().set_index_parameter(index, "nprobe", 8)
    model = fit(vectors, queries[:200], "dbsn", metric="euclidean", tau=0.05)
    offsets = model.offsets(vectors)
    upgraded = upgrade(index, model, force=True)
    raw, asked = similarities(queries[200:], vectors, L2), queries[200:]
    before = recall(index.search(asked, 10)[1], best(raw))
    after = recall(upgraded.search(asked, 10)[1], best(raw + offsets))
    assert after > before - 0.05


@kinds(*[kind for kind in ALL if "PCA" not in kind and "_18" not in kind])
@both
def test_scores_are_similarity_plus_offset(kind, metric):
    case, upgraded = pair(kind, metric)
    queries = case.queries
    as_written = fresh(kind, metric)[1]  # by Faiss, in bytes, and read
    scores, labels = as_written.search(queries, 5)
    expected = similarities(queries, decoded(upgraded), metric) + stored(upgraded)
    expected = np.take_along_axis(expected, rows_of(labels, case.ids), axis=1)
    apart = as_similarities(scores, metric) - expected
    # Euclidean scores are shifted by one constant, since a distance cannot be negative.
    shift = apart.mean() if metric == L2 else 0.0
    # Fast scanning adds up distances in 8 bits.
    is_rough = ("fs" in kind and "R" not in kind) or "bf16" in kind
    assert_near(apart, shift, 1e-2 if is_rough else 3e-4)


@pytest.mark.parametrize(
    "kind", ["PQ4x4np", "PQ4x4fs", "IVF4,PQ4x4np", "PQ4x8np", "SQbf16", "SQfp16"]
)
@pytest.mark.parametrize("size", [1e5, 1e16])
def test_offsets_are_held_or_refused_however_large_they_are(kind, size):
    rng = np.random.default_rng(3)
    vectors = unit(rng.normal(size=(600, 64)))
    offsets = (size * rng.normal(size=600)).astype(np.float32)
    index = filled(kind, vectors)
    if size > 1e15:
        says = r"offsets from -\S+ to \S+ do not fit the codes of this Index"
        with refused(StoreError, says):
            upgrade(index, offsets)
    else:
        held = stored(upgrade(index, offsets))
        assert np.abs(held - offsets).max() < 0.02 * np.ptp(offsets)


@kinds("PQ6x8np", "PQ6x4np", "PQ6x4fs", "IVF2,PQ6x8np", "IVF2,PQ6x4fs")
@both
def test_codebooks_of_few_offsets_have_a_code_for_what_is_added_later(kind, metric):
    rng = np.random.default_rng(5)
    (vectors,) = draw(rng, 1000, d=24)
    for n in (2, 5, 50):
        index = faiss.index_factory(24, kind, metric)
        index.train(vectors)
        index.add(vectors[:n])
        offsets = rng.uniform(-1.5, 1.5, n).astype(np.float32)
        upgraded = upgrade(index, offsets)
        assert_near(stored(upgraded), offsets, 0.02)
        upgraded.add(vectors[n : n + 3])
        if metric == IP:
            assert_near(stored(upgraded)[n:], 0, 0.02)
        else:
            assert (stored(upgraded)[n:] >= offsets.max()).all()
        between = np.linspace(offsets.min(), offsets.max(), 3)
        add(upgraded, vectors[:3], between)
        assert_near(stored(upgraded)[n + 3 :], between, 0.1)


def in_bf16(rows):
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    return (bits >> 16 << 16).view(np.float32)


CPU = Path("/proc/cpuinfo")


@pytest.mark.slow
@pytest.mark.skipif(
    not CPU.exists() or "avx512_bf16" not in CPU.read_text(),
    reason="needs a CPU with AVX512_BF16",
)
@pytest.mark.parametrize("d", [24, 384])
@both
def test_offsets_in_bf16_survive_kernels_that_round_queries(tmp_path, d, metric):
    """As CPUs with AVX512_SPR have them, which Faiss takes for others if it is told to."""
    rng = np.random.default_rng(3)
    vectors, queries = map(in_bf16, draw(rng, 600, 40, d=d))
    offsets = rng.uniform(-0.2, 0.2, 600).astype(np.float32)
    upgraded = upgrade(filled("SQbf16", vectors, metric), offsets)
    written(tmp_path / "x.faiss", upgraded)
    np.save(tmp_path / "queries.npy", queries)
    program = (
        "import faiss, numpy as np\n"
        "found = faiss.read_index('x.faiss').search(np.load('queries.npy'), 600)\n"
        "np.savez('found.npz', scores=found[0], labels=found[1])"
    )
    environment = os.environ | {"FAISS_SIMD_LEVEL": "AVX512_SPR"}
    run = [sys.executable, "-c", program]
    subprocess.run(run, cwd=tmp_path, check=True, env=environment)
    found = np.load(tmp_path / "found.npz")
    truth = similarities(queries, vectors, metric) + offsets
    expected = np.take_along_axis(truth, found["labels"], axis=1)
    apart = as_similarities(found["scores"], metric) - expected
    assert_near(apart, apart.mean())


@pytest.mark.parametrize("kind", ["Flat", "SQfp16", "IVF8,Flat"])
@both
def test_upgraded_shards_rank_as_one_index(kind, metric):
    vectors, queries, bank = draw(np.random.default_rng(9), 600, 40, 100, d=24)
    model = fit(vectors, bank, "csls")
    shards = faiss.IndexShards(24, False, True)  # ids go on from shard to shard
    indexes = [filled(kind, part, metric) for part in np.split(vectors, [200])]
    parts = [upgrade(index, model, force=True) for index in indexes]
    for part in parts:
        look_everywhere(part)
        shards.add_shard(part)
    truth = similarities(queries, vectors, metric) + model.offsets(vectors)
    assert_ranked(shards.search(queries, 10)[1], truth, np.arange(600), 1e-3)


@kinds(*ALL)
@both
def test_downgrade_gives_back_the_very_bytes(kind, metric):
    case, upgraded = pair(kind, metric)
    assert bytes_of(downgrade(upgraded)) == bytes_of(case.index)


@kinds(*ALL)
@both
def test_what_is_added_has_its_offset_and_what_was_there_keeps_its(kind, metric):
    case, upgraded = fresh(kind, metric)
    rng = np.random.default_rng(5)
    (new,) = draw(rng, 7, d=24)
    offsets = rng.uniform(-0.2, 0.2, 7).astype(np.float32)
    ids = 100_000 + np.arange(7) if "IDMap" in kind else None
    add(upgraded, new, offsets, ids)
    assert upgraded.ntotal == 607
    wanted = np.concatenate([case.offsets, offsets])
    assert_near(stored(upgraded), wanted, tolerance(kind))


@kinds(*ALL)
@both
def test_what_plain_faiss_adds_is_neutral_under_inner_product_and_has_the_largest_offset_under_l2(
    kind, metric
):
    case, upgraded = fresh(kind, metric)
    (new,) = draw(np.random.default_rng(6), 3, d=24)
    put(upgraded, new, 100_000 + np.arange(3))
    atol = tolerance(kind)
    if "x4" in kind or kind == "IVF8,SQ4":
        atol = 0.03  # a level of the first of 4 bits, not mended in the second
    if metric == IP:
        assert_near(stored(upgraded)[-3:], 0, atol)
    else:
        assert stored(upgraded)[-3:].min() >= case.offsets.max() - atol


@kinds(
    "PQ6x4fs",
    *REFINED,
    *("IDMap2,SQ8", "IVF8,Flat", "IDMap2,IVF8,Flat", "IDMap,IVF8,SQ8"),
    *("IVF8,PQ6x4fs", "OPQ6,PQ6x4fs", "IDMap2,PQ6x4fs"),
)
@both
def test_what_is_added_after_others_were_removed_has_its_own_id_code_and_offset(
    kind, metric
):
    """Faiss itself mixes up ids over inverted lists, and writes new codes over what is left of old ones."""
    case, upgraded = fresh(kind, metric)
    vectors, offsets = decoded(upgraded), stored(upgraded)
    gone, again = np.arange(50, 350), np.arange(50, 250)
    kept = np.delete(np.arange(600), gone)
    rows, names, ids = np.append(kept, again), np.arange(500), None
    if "IDMap" in kind or kind in ("IVF8,Flat", "IVF8,PQ6x4fs"):
        ids = 10**6 + np.arange(200)
        names = np.append(case.ids[kept], ids)
    assert remove_ids(upgraded, np.append(case.ids[gone], 10**9)) == 300
    add(upgraded, case.vectors[again], case.offsets[again], ids)
    assert upgraded.ntotal == 500
    (batch,) = handler_for(upgraded).scan()
    order = np.argsort(names)
    found = batch.take(np.argsort(batch.ids))
    assert_array_equal(found.ids, names[order])
    assert_near(found.offsets, offsets[rows[order]])
    assert_near(found.vectors, vectors[rows[order]], 1e-3)
    scores, labels = reread(upgraded).search(case.queries, 5)
    truth = similarities(case.queries, vectors[rows], metric) + offsets[rows]
    expected = np.take_along_axis(truth, rows_of(labels, names), axis=1)
    apart = as_similarities(scores, metric) - expected
    assert_near(apart, apart.mean(), 1e-2)


# Faiss itself ends the process when it reconstructs from an IVF fast-scan index that was read back.
@kinds(*[k for k in ALL if "IDMap," not in k and not ("IVF" in k and "fs" in k)])
@both
def test_reconstruct_gives_the_vector_that_the_raw_index_gives(kind, metric):
    case, upgraded = fresh(kind, metric)
    for index in (case.index, upgraded):
        if "IVF" in kind and kind not in REFINED:
            faiss.extract_index_ivf(downcast_to_ivf(index)).make_direct_map()
    found, expected = (
        index.reconstruct(int(case.ids[5])) for index in (upgraded, case.index)
    )
    assert_near(found, expected, 1e-6)


def downcast_to_ivf(index):
    index = faiss.downcast_index(index)
    return downcast_to_ivf(index.index) if hasattr(index, "index") else index


@both
def test_search_settings_that_faiss_writes_into_no_file_are_kept(metric):
    case = made("IVF8,Flat", metric)
    case.index.parallel_mode, case.index.max_codes = 1, 77
    upgraded = upgrade(case.index, case.offsets)
    new = downcast_to_ivf(upgraded)
    assert (new.parallel_mode, new.max_codes) == (1, 77)


@both
def test_vectors_added_to_a_graph_are_linked_as_in_the_raw_graph(metric):
    case, upgraded = fresh("HNSW16,Flat", metric)
    (new,) = draw(np.random.default_rng(8), 50, d=24)
    raw = reread(case.index)
    inner = downcast_to_ivf(upgraded)
    inner.hnsw.rng = raw.hnsw.rng
    add(upgraded, new, np.linspace(-0.2, 0.2, 50))
    raw.add(new)
    assert_array_equal(
        faiss.vector_to_array(inner.hnsw.neighbors),
        faiss.vector_to_array(raw.hnsw.neighbors),
    )


@kinds("IVF8,Flat", "IVF8,SQ8", "IVF8,PQ6x8np", "IVF8,PQ6x4fs")
def test_direct_maps_know_what_was_added_and_an_array_refuses_ids_that_it_cannot_hold(
    kind,
):
    case = made(kind, IP)
    case.index.make_direct_map()
    upgraded = upgrade(case.index, case.offsets)
    add(upgraded, case.vectors[:20], case.offsets[:20])
    found, expected = upgraded.reconstruct(603), upgraded.reconstruct(3)
    assert_near(found, expected, 1e-6)
    before = bytes_of(upgraded)
    more = {"ids": np.array([900, 901, 902])}
    given = upgraded, case.vectors[:3], case.offsets[:3]
    says = r"can only hold the ids 0, 1, 2, .*DirectMap\.Hashtable"
    with refused(StoreError, says):
        add(*given, **more)
    assert bytes_of(upgraded) == before
    faiss.extract_index_ivf(upgraded).set_direct_map_type(faiss.DirectMap.Hashtable)
    add(*given, **more)
    found, expected = upgraded.reconstruct(902), upgraded.reconstruct(2)
    assert_near(found, expected, 1e-6)
    assert remove_ids(upgraded, faiss.IDSelectorRange(100, 300)) == 200
    labels = handler_for(upgraded).labels()
    assert_array_equal(np.sort(labels), np.r_[:100, 300:620, 900:903])
    assert (
        faiss.extract_index_ivf(upgraded).direct_map.type == faiss.DirectMap.Hashtable
    )
    with refused(StoreError, "has its own ids: pass ids="):
        add(*given)


@kinds("IVF8,Flat", "IVF8,SQ8", "IVF8,PQ6x8np", "SQ8", "PQ6x8np")
def test_plain_faiss_refuses_to_merge_codes_that_do_not_mean_the_same(kind):
    case = made(kind, IP)
    first = upgrade(case.index, case.offsets)
    second = upgrade(case.index, case.offsets * 0.9)
    with pytest.raises(RuntimeError):
        first.merge_from(second, 600)


def off_centre(kind, metric):
    """An index, its vectors, queries and a bank, whose mean is not 0."""
    rng = np.random.default_rng(7)
    centre = rng.normal(size=24)
    vectors, queries, bank = draw(rng, 600, 40, 100, d=24, at=0.3 * centre)
    index = filled(kind, vectors, metric)
    look_everywhere(index)
    return index, vectors, queries, bank


@pytest.mark.parametrize(
    ("kind", "metric"),
    [
        ("PCA12,Flat", IP),
        ("PCA20,IVF8,Flat", IP),
        ("PQ6x8np", IP),
        ("PQ6x8np", L2),
        ("SQ4", IP),
    ],
)
def test_offsets_of_a_model_are_on_the_scale_of_the_index_without_its_norm_bias(
    kind, metric
):
    """The mean that a PCA takes off, and the length that codes leave: the ranking comes near that by cosine."""
    index, vectors, _, bank = off_centre(kind, metric)
    model = fit(vectors, bank, "nnn", k=5)
    upgraded = upgrade(index, model)
    rows = decoded(upgraded).astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1)
    tenth = np.sort(bank @ (rows / lengths[:, None]).T, axis=1)[:, -10]
    nearness = round(20 * tenth.mean()) / 20
    norm_bias = nearness * lengths - (lengths**2 / 2 if metric == L2 else 0)
    offsets = model.offsets(rows.astype(np.float32))
    apart = stored(upgraded) - (lengths * offsets - norm_bias)
    assert_near(apart, apart.mean(), 1e-5 + tolerance(kind))
    assert abs(stored(upgraded).mean() - offsets.mean()) < 0.01

    add(upgraded, vectors[:50], model)
    assert_near(stored(upgraded)[-50:], stored(upgraded)[:50], 1e-3 + tolerance(kind))


@pytest.mark.parametrize("kind", ["PCA12,Flat", "PCA20,IVF8,Flat", "IDMap2,PCA12,SQ8"])
def test_what_a_pca_adds_to_similarities_is_no_part_of_what_is_corrected(kind):
    """It takes the mean off targets and queries, which adds to the similarity of each target a bias of its own."""
    index, vectors, queries, bank = off_centre(kind, IP)
    model = fit(index, bank, "nnn", k=5, metric="dot")
    upgraded = upgrade(index, model)
    offsets = model.offsets(decoded(index))
    atol = 1e-3 if "SQ8" in kind else 1e-5
    assert_near(stored(upgraded), offsets, atol)
    truth = queries @ decoded(upgraded).T + offsets
    as_numbers = upgrade(index, offsets)
    of_model, of_numbers = (
        recall(each.search(queries, 10)[1], best(truth))
        for each in (upgraded, as_numbers)
    )
    assert of_model > 0.95 > of_numbers + 0.05
    ids = np.arange(600, 650) if "IDMap" in kind else None
    add(upgraded, vectors[:50], model, ids)
    assert_near(stored(upgraded)[-50:], stored(upgraded)[:50], 1e-3)


@kinds("Flat", "SQ8", "PQ6x8np", "IVF8,SQ8", "HNSW16,SQ8")
def test_offsets_that_find_no_room_are_refused(kind):
    case = made(kind, L2)
    upgraded = upgrade(case.index, case.offsets / 20)
    says = r"do not fit the codes of this .*upgrade\(index, model\)"
    with refused(StoreError, says):
        add(upgraded, case.vectors[:50], case.offsets[:50])
    assert upgraded.ntotal == 600
    add(upgraded, case.vectors[:50], case.offsets[:50] / 20)


@both
def test_the_rank_of_a_list_is_that_of_its_best_entry_above_its_centroid(metric):
    index, vectors, _, bank = off_centre("IVF8,Flat", metric)
    lists = index.quantizer.search(vectors, 1)[1].ravel()
    vectors, lists = vectors[lists > 0], lists[lists > 0]
    index.reset()
    index.add(vectors)  # nothing to the first list
    upgraded = upgrade(index, fit(vectors, bank, "nnn", k=5), force=True)
    offsets, sizes = stored(upgraded), np.bincount(lists)
    centres = downcast_to_ivf(upgraded).quantizer.reconstruct_n(0, 8)
    found = handler_for(upgraded).extras[0].offsets(centres[:, 24:])
    scores = similarities(bank, vectors, metric) + offsets
    above = scores - similarities(bank, centres[:, :24], metric)[:, lists]
    best_above = [above[:, lists == each].max(axis=1).mean() for each in range(1, 8)]
    expected = np.array([0, *best_above])
    expected[1:] += offsets.mean() - (expected * sizes).sum() / len(lists)
    expected[1:] = expected[1:].clip(offsets.min(), offsets.max())
    assert_near(found, expected)


def test_a_graph_that_plain_faiss_cannot_remove_from_loses_nothing():
    _, upgraded = fresh("HNSW16,Flat", IP)
    before = bytes_of(upgraded)
    with refused(StoreError, "cannot remove entries, nor can"):
        remove_ids(upgraded, np.array([1]))
    assert bytes_of(upgraded) == before
