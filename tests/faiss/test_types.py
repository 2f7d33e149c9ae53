"""Every type that can be upgraded: same answers as the definition, same bytes after a downgrade, still plain Faiss."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import faiss
import numpy as np
import pytest

import hubplugin
import hubplugin_faiss
from hubplugin_faiss.encoding.layout import ids_of_list
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.base import IndexHandler
from hubplugin_faiss.handlers.lists import list_ranks
from hubplugin_faiss.scale import IndexScale
from tests.faiss import cases
from tests.faiss.cases import IP, L2, decoded, stored

faiss.omp_set_num_threads(1)


@cache
def pair(kind: str, metric: int) -> tuple[cases.Case, faiss.Index]:
    """A case and its upgraded index, both only to be looked at."""
    case = cases.made(kind, metric)
    return case, hubplugin_faiss.upgrade(case.index, case.offsets)


def fresh(kind: str, metric: int) -> tuple[cases.Case, faiss.Index]:
    case, upgraded = pair(kind, metric)
    copy = faiss.deserialize_index(faiss.serialize_index(upgraded))
    cases.look_everywhere(copy)
    return case, copy


both = pytest.mark.parametrize("metric", [IP, L2], ids=["ip", "l2"])


def kinds(*names: str):
    """A test of some kinds of index: of the few by `make check`, or of the first where none of them is among these, and
    of all by `make test`."""
    few = {*names} & {*cases.FEW} or {names[0]}
    return pytest.mark.parametrize("kind", cases.slow_but(few, names))


def types_in(index: faiss.Index) -> set[str]:
    index = faiss.downcast_index(index)
    inner = [
        getattr(index, part) for part in ("index", "base_index") if hasattr(index, part)
    ]
    return {type(index).__name__}.union(*map(types_in, inner))


@pytest.mark.slow
def test_every_type_that_has_a_handler_has_a_case():
    cased = {
        name
        for kind in cases.ALL
        for metric in (IP, L2)
        for name in types_in(pair(kind, metric)[0].index)
    }
    elsewhere = {"IndexFlatIP", "IndexFlatL2"}  # in the tests of stores
    assert {*IndexHandler.registry} - elsewhere == cased


@kinds(*cases.EXACT)
@both
def test_search_is_the_exact_corrected_ranking(kind, metric):
    case, upgraded = pair(kind, metric)
    truth = cases.similarities(case.queries, case.vectors, metric) + case.offsets
    cases.assert_ranked(upgraded.search(case.queries, 10)[1], truth, case.ids)


@kinds(*cases.ALL)
@both
def test_offsets_are_read_back_as_they_were_written(kind, metric):
    case, upgraded = pair(kind, metric)
    np.testing.assert_allclose(
        stored(upgraded), case.offsets, rtol=0, atol=cases.tolerance(kind)
    )


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
    index = cases.filled(kind, vectors, metric)
    upgraded = hubplugin_faiss.upgrade(index, offsets)
    assert np.abs(stored(upgraded) - offsets).max() < np.ptp(offsets) * (
        0.02 if "PQ6x8" in kind else 0.01
    )


@kinds("IVF32,Flat", "IVF32,SQ8", "IVF32,PQ8x4fs", "IVF32(SQ8),Flat")
@pytest.mark.filterwarnings("ignore:recall@10")
def test_offsets_that_make_up_for_lengths_leave_a_search_by_l2_what_it_finds(kind):
    """They are largest where vectors lie furthest from their centroid."""
    rng = np.random.default_rng(0)
    vectors, queries = (cases.unit(rng.normal(size=(rows, 16))) for rows in (4000, 400))
    vectors = (vectors * rng.lognormal(0, 0.15, size=(4000, 1))).astype(np.float32)
    index = cases.filled(kind, vectors, L2)
    faiss.ParameterSpace().set_index_parameter(index, "nprobe", 8)
    model = hubplugin.fit(vectors, queries[:200], "dbsn", metric="euclidean", tau=0.05)
    offsets = model.offsets(vectors)
    upgraded = hubplugin_faiss.upgrade(index, model, force=True)
    raw, asked = cases.similarities(queries[200:], vectors, L2), queries[200:]
    before = cases.recall(index.search(asked, 10)[1], cases.best(raw))
    assert (
        cases.recall(upgraded.search(asked, 10)[1], cases.best(raw + offsets))
        > before - 0.05
    )


def best_of_lists(vectors, offsets, lists, centres, queries, own, metric):
    """How far the best entry of each list scores above its centroid, in the mean of the queries that do not lie in it
    themselves, plainly and in float64."""

    def similarity(u, t):
        return -((u - t) ** 2).sum() / 2 if metric == L2 else u @ t

    vectors, centres, queries = (
        each.astype(np.float64) for each in (vectors, centres, queries)
    )
    ranks, sizes = np.zeros(len(centres)), np.bincount(lists, minlength=len(centres))
    for number in np.flatnonzero(sizes):
        ranks[number] = np.mean(
            [
                max(
                    similarity(u, vectors[row]) + offsets[row]
                    for row in np.flatnonzero(lists == number)
                )
                - similarity(u, centres[number])
                for u, lies_in in zip(queries, own, strict=True)
                if lies_in != number
            ]
        )
    ranks += offsets.mean() - (ranks * sizes).sum() / sizes.sum()
    return np.where(sizes > 0, np.clip(ranks, offsets.min(), offsets.max()), 0)


@pytest.mark.parametrize("metric", [IP, L2])
@pytest.mark.parametrize("within", [False, True])
def test_the_rank_of_a_list_is_that_of_its_best_entry_above_its_centroid(
    metric, within, rng
):
    vectors, centres, queries = (
        rng.normal(size=(rows, 6)).astype(np.float32) for rows in (200, 9, 25)
    )
    offsets, lists = (
        rng.normal(size=200).astype(np.float32),
        rng.integers(0, 8, 200),
    )  # the last list is empty
    own = lists[:25] if within else None
    blocks = [(vectors[part], part) for part in (slice(0, 70), slice(70, 200))]
    found = list_ranks(blocks, offsets, lists, centres, (queries, own), metric == L2)
    expected = best_of_lists(
        vectors,
        offsets,
        lists,
        centres,
        queries,
        np.full(25, -1) if own is None else own,
        metric,
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (found < offsets.max()).any()
    assert found[8] == 0


@kinds("IVF32,Flat", "IVF32(SQ8),Flat", "IVF32(HNSW8,SQ8),Flat", "IVF32(PCA8,Flat),Flat", "IVF32(PQ4x4),Flat",
       "IVF32(SQ8),PQ8x4fs")  # fmt: skip
def test_lists_are_ranked_by_what_the_bank_finds_in_them_whatever_holds_centroids(kind):
    rng = np.random.default_rng(0)
    vectors, queries, bank = (
        rng.normal(size=(rows, 16)).astype(np.float32) for rows in (3000, 100, 60)
    )
    index = cases.filled(kind, vectors)
    model = hubplugin.fit(index, bank, "csls", metric="dot")
    upgraded = hubplugin_faiss.upgrade(index, model, force=True)
    raw, ranked = (faiss.extract_index_ivf(each) for each in (index, upgraded))
    lists = np.empty(3000, np.int64)
    for number in range(32):
        lists[ids_of_list(raw.invlists, number)] = number
    centres = raw.quantizer.reconstruct_n(0, 32)
    ranks = best_of_lists(
        decoded(upgraded), stored(upgraded), lists, centres, bank, np.full(60, -1), IP
    )
    asked = queries
    for number in range(upgraded.chain.size() if ranked.d > 16 else 0):
        asked = upgraded.chain.at(number).apply(asked)
    assert (
        cases.recall(
            ranked.quantizer.search(asked, 5)[1],
            cases.best(queries @ centres.T + ranks, 5),
        )
        > 0.9
    )

    back = hubplugin_faiss.downgrade(upgraded)
    np.testing.assert_array_equal(
        faiss.serialize_index(back), faiss.serialize_index(index)
    )
    hubplugin_faiss.add(upgraded, queries, np.zeros(100))
    index.add(queries)
    back = hubplugin_faiss.downgrade(upgraded)
    raw, ours = (faiss.extract_index_ivf(each).invlists for each in (index, back))
    assert [raw.list_size(number) for number in range(32)] == [
        ours.list_size(number) for number in range(32)
    ]


@kinds("PQ6x8np", "PQ6x4np", "PQ6x4fs", "IVF2,PQ6x8np", "IVF2,PQ6x4fs", "IVF2,PQ6x4fsr")
@pytest.mark.parametrize("n", [2, 5, 50])
@both
def test_codebooks_of_few_offsets_have_a_code_for_what_plain_faiss_adds(
    kind, n, metric
):
    rng = np.random.default_rng(5)
    vectors = cases.unit(rng.normal(size=(1000, 24)))
    index = faiss.index_factory(24, kind, metric)
    index.train(vectors)
    index.add(vectors[:n])
    offsets = rng.uniform(-1.5, 1.5, n).astype(np.float32)
    upgraded = hubplugin_faiss.upgrade(index, offsets)
    np.testing.assert_allclose(stored(upgraded), offsets, atol=0.02)
    upgraded.add(vectors[n : n + 3])
    if metric == IP:
        np.testing.assert_allclose(
            stored(upgraded)[n:], 0, atol=1e-4 if "fs" not in kind else 0.02
        )
    else:
        assert (stored(upgraded)[n:] >= offsets.max()).all()
    between = np.linspace(offsets.min(), offsets.max(), 3)
    hubplugin_faiss.add(upgraded, vectors[:3], between)
    np.testing.assert_allclose(stored(upgraded)[n + 3 :], between, atol=0.1)


@kinds(*[kind for kind in cases.ALL if "PCA" not in kind and "_18" not in kind])
@both
def test_scores_are_similarity_plus_offset(kind, metric):
    case, upgraded = pair(kind, metric)
    queries = (
        cases.in_bf16(case.queries) if "bf16" in kind else case.queries
    )  # to which some CPUs round them
    scores, labels = upgraded.search(queries, 5)
    column = np.argsort(case.ids)[np.searchsorted(np.sort(case.ids), labels)]
    expected = cases.similarities(queries, decoded(upgraded), metric) + stored(upgraded)
    apart = cases.as_similarities(scores, metric) - np.take_along_axis(
        expected, column, axis=1
    )
    # Euclidean scores are shifted by one constant, since a distance cannot be negative.
    shift = apart.mean() if metric == L2 else 0.0
    # Fast scanning adds up distances in 8 bits.
    np.testing.assert_allclose(
        apart, shift, rtol=0, atol=1e-2 if "fs" in kind and "R" not in kind else 3e-4
    )


@pytest.mark.parametrize(
    ("kind", "metric", "bits"),
    [
        ("SQ8", IP, 16),
        ("SQ8", L2, 14),
        ("SQ6", IP, 11.8),
        ("SQ6", L2, 9.8),
        ("SQ4", IP, 11),
        ("SQ4", L2, 7.9),
    ],
)
def test_scalar_quantisers_hold_as_many_bits_of_an_offset_as_documented(
    kind, metric, bits
):
    case = cases.made(kind, metric, n=2000, d=64)
    wrong = np.abs(
        stored(hubplugin_faiss.upgrade(case.index, case.offsets)) - case.offsets
    ).max()
    assert bits - 0.1 < np.log2(np.ptp(case.offsets) / wrong) < bits + 0.3


def has_bf16() -> bool:
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and "avx512_bf16" in cpu.read_text()


@pytest.mark.slow
@pytest.mark.skipif(not has_bf16(), reason="needs a CPU with AVX512_BF16")
@pytest.mark.parametrize("d", [24, 30, 384])
def test_offsets_in_bf16_survive_kernels_that_round_queries(tmp_path, d):
    """As CPUs with AVX512_SPR have them; Faiss takes them for this one, too, if it is told to."""
    rng = np.random.default_rng(3)
    offsets = rng.uniform(-0.2, 0.2, 600).astype(np.float32)
    vectors, queries = (
        cases.in_bf16(cases.unit(rng.normal(size=(rows, d)))) for rows in (600, 40)
    )
    for metric in (IP, L2):
        upgraded = hubplugin_faiss.upgrade(
            cases.filled("SQbf16", vectors, metric), offsets
        )
        cases.written(tmp_path / f"{metric}.faiss", upgraded)
    np.save(tmp_path / "queries.npy", queries)
    program = (
        "import faiss, numpy as np; faiss.omp_set_num_threads(1); queries = np.load('queries.npy')\n"
        "for metric in (0, 1):\n"
        "    scores, labels = faiss.read_index(f'{metric}.faiss').search(queries, 600)\n"
        "    np.savez(f'{metric}.npz', scores=scores, labels=labels)\n"
    )
    levels = {**os.environ, "FAISS_SIMD_LEVEL": "AVX512_SPR"}
    subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, check=True, env=levels
    )
    for metric in (IP, L2):
        found = np.load(tmp_path / f"{metric}.npz")
        truth = cases.similarities(queries, vectors, metric) + offsets
        apart = cases.as_similarities(found["scores"], metric) - np.take_along_axis(
            truth, found["labels"], axis=1
        )
        np.testing.assert_allclose(apart, apart.mean(), rtol=0, atol=1e-5)


@kinds(
    "SQfp16",
    "IVF4,SQfp16",
    "HNSW8,SQfp16",
    "PQ6x8np,Refine(SQfp16)",
    "SQfp16,RFlat",
    "IDMap2,SQfp16,RFlat",
)
@both
def test_components_that_16_bits_cannot_hold_are_refused(kind, metric):
    rng = np.random.default_rng(3)
    vectors, offsets = (
        rng.normal(size=(600, 24)).astype(np.float32),
        np.zeros(600, np.float32),
    )
    with pytest.raises(
        hubplugin.StoreError,
        match=r"components beyond 65,504 are infinite in codes of 16 bits; scale",
    ):
        hubplugin_faiss.upgrade(cases.filled(kind, 1e6 * vectors, metric), offsets)
    upgraded = hubplugin_faiss.upgrade(cases.filled(kind, vectors, metric), offsets)
    before, ids = (
        faiss.serialize_index(upgraded),
        600 + np.arange(5) if "IDMap" in kind else None,
    )
    with pytest.raises(hubplugin.StoreError, match="components beyond 65,504"):
        hubplugin_faiss.add(upgraded, 1e6 * vectors[:5], offsets[:5], ids)
    np.testing.assert_array_equal(faiss.serialize_index(upgraded), before)


@pytest.mark.parametrize(
    "kind", ["PQ4x4np", "PQ4x4fs", "IVF4,PQ4x4np", "PQ4x8np", "SQbf16", "SQfp16"]
)
@pytest.mark.parametrize("size", [1e5, 1e16])
def test_offsets_are_held_or_refused_however_large_they_are(kind, size):
    rng = np.random.default_rng(3)
    vectors = cases.unit(rng.normal(size=(600, 64)))
    offsets = (size * rng.normal(size=600)).astype(np.float32)
    index = cases.filled(kind, vectors)
    if size > 1e15:
        says = r"offsets from -\S+ to \S+ do not fit (the codes of this Index|codes of 16 bits; scale the)"
        with pytest.raises(hubplugin.StoreError, match=says):
            hubplugin_faiss.upgrade(index, offsets)
    else:
        assert np.abs(
            stored(hubplugin_faiss.upgrade(index, offsets)) - offsets
        ).max() < 0.02 * np.ptp(offsets)


@kinds(*cases.ALL)
@both
def test_downgrade_gives_back_the_very_bytes(kind, metric):
    case, upgraded = pair(kind, metric)
    back = faiss.serialize_index(hubplugin_faiss.downgrade(upgraded))
    np.testing.assert_array_equal(back, faiss.serialize_index(case.index))


@pytest.mark.slow
@both
def test_an_interpreter_that_has_only_faiss_gets_the_same_answers(tmp_path, metric):
    for number, kind in enumerate(cases.ALL):
        case, upgraded = pair(kind, metric)
        cases.written(tmp_path / f"{number}.faiss", upgraded)
    np.save(tmp_path / "queries.npy", case.queries)
    program = (
        "import sys; sys.modules['hubplugin'] = sys.modules['hubplugin_faiss'] = None\n"
        "import faiss, numpy as np, glob, os\n"
        "faiss.omp_set_num_threads(1); queries = np.load('queries.npy')\n"
        "for path in glob.glob('*.faiss'):\n"
        "    np.save(path + '.npy', faiss.read_index(path).search(queries, 7)[1])\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    for number, kind in enumerate(cases.ALL):
        upgraded = faiss.read_index(str(tmp_path / f"{number}.faiss"))
        expected = upgraded.search(case.queries, 7)[1]
        np.testing.assert_array_equal(
            np.load(tmp_path / f"{number}.faiss.npy"), expected, err_msg=kind
        )
        np.testing.assert_array_equal(
            expected, pair(kind, metric)[1].search(case.queries, 7)[1], err_msg=kind
        )


@kinds(*cases.ALL)
@both
def test_what_is_added_has_its_offset_and_what_was_there_keeps_its(kind, metric):
    case, upgraded = fresh(kind, metric)
    rng = np.random.default_rng(5)
    new, offsets = (
        cases.unit(rng.normal(size=(7, 24))),
        rng.uniform(-0.2, 0.2, 7).astype(np.float32),
    )
    ids = 100_000 + np.arange(7) if "IDMap" in kind else None
    hubplugin_faiss.add(upgraded, new, offsets, ids)
    assert upgraded.ntotal == 607
    np.testing.assert_allclose(
        stored(upgraded),
        np.concatenate([case.offsets, offsets]),
        rtol=0,
        atol=cases.tolerance(kind),
    )
    if kind in (*cases.EXACT, "HNSW16,Flat"):
        labels = upgraded.search(new, 3)[1]
        truth = cases.similarities(new, np.concatenate([case.vectors, new]), metric)
        truth += np.concatenate([case.offsets, offsets])
        cases.assert_ranked(
            labels,
            truth,
            np.concatenate([case.ids, 600 + np.arange(7) if ids is None else ids]),
        )


def plain_tolerance(kind: str) -> float:
    """Plain Faiss rounds to a level of the first of 4 bits, and does not mend it in the second."""
    return 0.03 if "x4" in kind or kind == "IVF8,SQ4" else cases.tolerance(kind)


@kinds(*cases.ALL)
@both
def test_what_plain_faiss_adds_is_neutral_under_inner_product_and_has_the_largest_offset_under_l2(
    kind, metric
):
    case, upgraded = fresh(kind, metric)
    new = cases.unit(np.random.default_rng(6).normal(size=(3, 24)))
    cases.put(upgraded, new, 100_000 + np.arange(3))
    if metric == IP:
        np.testing.assert_allclose(stored(upgraded)[-3:], 0, atol=plain_tolerance(kind))
    else:
        assert (
            stored(upgraded)[-3:] >= case.offsets.max() - plain_tolerance(kind)
        ).all()


@kinds(*cases.EXACT, *cases.QUANTISED)
@both
def test_removing_ids_takes_their_offsets_along(kind, metric):
    case, upgraded = fresh(kind, metric)
    assert upgraded.remove_ids(case.ids[::3]) == 200
    assert upgraded.ntotal == 400
    kept = np.delete(case.offsets, np.arange(0, 600, 3))
    np.testing.assert_allclose(
        np.sort(handler_offsets(upgraded)),
        np.sort(kept),
        rtol=0,
        atol=cases.tolerance(kind),
    )
    if "IVF" in kind or "IDMap" in kind:  # the others number their entries anew
        assert not np.isin(upgraded.search(case.queries, 10)[1], case.ids[::3]).any()


@kinds(
    *cases.REFINED[:3], "IDMap2,SQ8", "IVF8,Flat", "IDMap2,IVF8,Flat", "IDMap,IVF8,SQ8"
)
@both
def test_both_stages_lose_the_same_entries_and_ids_stay_with_their_vectors(
    kind, metric
):
    """Faiss's own remove_ids mixes up ids over inverted lists, which keep the numbers that they had."""
    case, upgraded = fresh(kind, metric)
    gone = np.arange(0, 600, 3)
    assert hubplugin_faiss.remove_ids(upgraded, np.append(case.ids[gone], 10**9)) == 200
    assert upgraded.ntotal == 400
    copy = faiss.deserialize_index(faiss.serialize_index(upgraded))
    cases.look_everywhere(copy)
    scores, labels = copy.search(case.queries, 5)
    if kind == "IVF8,Flat" or "IDMap" in kind:
        places = np.argsort(case.ids)[np.searchsorted(np.sort(case.ids), labels)]
    else:
        places = np.delete(np.arange(600), gone)[labels]
    assert not np.isin(places, gone).any()
    truth = (
        cases.similarities(case.queries, decoded(pair(kind, metric)[1]), metric)
        + case.offsets
    )
    apart = cases.as_similarities(scores, metric) - np.take_along_axis(
        truth, places, axis=1
    )
    np.testing.assert_allclose(apart, apart.mean(), atol=5e-3)


SELECTORS = (
    np.arange(0, 600, 3),
    faiss.IDSelectorRange(100, 300),
    faiss.IDSelectorNot(faiss.IDSelectorBatch(np.arange(5, 600))),
)


@kinds(
    "IVF8,Flat",
    "IVF8,PQ6x4fs",
    "PCA12,IVF8,SQ8",
    "IVF8,PQ6x8np,RFlat",
    "IVF8,PQ6x4fs,RFlat",
    "IDMap2,IVF8,Flat",
)
@pytest.mark.parametrize(
    "direct_map", [faiss.DirectMap.Array, faiss.DirectMap.Hashtable]
)
@pytest.mark.parametrize("ids", SELECTORS, ids=["array", "range", "not"])
def test_entries_are_removed_by_any_selector_and_a_direct_map_knows_those_that_are_left(
    kind, direct_map, ids
):
    case = cases.made(kind, IP)
    faiss.extract_index_ivf(case.index).set_direct_map_type(direct_map)
    upgraded = hubplugin_faiss.upgrade(case.index, case.offsets)
    if (
        direct_map == faiss.DirectMap.Array
        and "RFlat" not in kind
        and "IDMap" not in kind
    ):
        before = faiss.serialize_index(upgraded)
        with pytest.raises(
            hubplugin.StoreError,
            match=r"direct map of this IndexIVF\w+ is an array, which can have no",
        ):
            hubplugin_faiss.remove_ids(upgraded, ids)
        np.testing.assert_array_equal(faiss.serialize_index(upgraded), before)
        return
    selector = ids if isinstance(ids, faiss.IDSelector) else faiss.IDSelectorBatch(ids)
    gone = np.array([selector.is_member(label) for label in case.ids.tolist()])
    assert hubplugin_faiss.remove_ids(upgraded, ids) == gone.sum()
    closed_up = np.arange((~gone).sum()) if "RFlat" in kind else case.ids[~gone]
    np.testing.assert_array_equal(
        np.sort(handler_for(upgraded).labels()), np.sort(closed_up)
    )
    np.testing.assert_allclose(
        np.sort(handler_offsets(upgraded)), np.sort(case.offsets[~gone]), atol=1e-2
    )
    copy = faiss.deserialize_index(faiss.serialize_index(upgraded))
    ivf = faiss.extract_index_ivf(copy)
    assert ivf.direct_map.type == direct_map
    if "fs" not in kind:
        ivf.reconstruct(int(ids_of_list(ivf.invlists, 0)[0]))


def handler_offsets(index: faiss.Index) -> np.ndarray:
    return np.concatenate([offsets for _, offsets in handler_for(index).scan(100)])


@kinds("HNSW16,Flat", "HNSW16,RFlat", "IVF8,Flat,Refine(HNSW8)", "IDMap2,HNSW16")
def test_what_plain_faiss_cannot_remove_from_loses_nothing_of_any_part(kind):
    _, upgraded = fresh(kind, IP)
    before = faiss.serialize_index(upgraded)
    for ids in (np.array([1]), np.array([10**6]), faiss.IDSelectorRange(0, 10)):
        with pytest.raises(
            hubplugin.StoreError,
            match="IndexHNSWFlat cannot remove entries, nor can plain Faiss",
        ):
            hubplugin_faiss.remove_ids(upgraded, ids)
    np.testing.assert_array_equal(faiss.serialize_index(upgraded), before)


def test_ids_that_are_no_whole_numbers_are_refused_and_none_removes_nothing():
    _, upgraded = fresh("Flat", IP)
    with pytest.raises(
        hubplugin.InputError, match=r"ids are of type float64: expected whole numbers"
    ):
        hubplugin_faiss.remove_ids(upgraded, np.array([0.5]))
    assert hubplugin_faiss.remove_ids(upgraded, []) == 0


# Faiss itself ends the process when it reconstructs from an IVF fast-scan index that was read back.
@kinds(
    *[
        kind
        for kind in cases.ALL
        if "IDMap," not in kind and not ("IVF" in kind and "fs" in kind)
    ]
)
@both
def test_reconstruct_gives_the_vector_that_the_raw_index_gives(kind, metric):
    case, upgraded = fresh(kind, metric)
    for index in (case.index, upgraded):
        if "IVF" in kind and kind not in cases.REFINED:
            faiss.extract_index_ivf(downcast_to_ivf(index)).make_direct_map()
    expected = case.index.reconstruct(int(case.ids[5]))
    np.testing.assert_allclose(
        upgraded.reconstruct(int(case.ids[5])), expected, rtol=0, atol=1e-6
    )


def downcast_to_ivf(index: faiss.Index) -> faiss.Index:
    index = faiss.downcast_index(index)
    return downcast_to_ivf(index.index) if hasattr(index, "index") else index


@kinds(
    "Flat",
    "IDMap,Flat",
    "IVF8,Flat",
    "SQ8",
    "IVF8,SQ8",
    "L2norm,Flat",
    "RR24,IVF8,Flat",
    "HNSW16,Flat",
)
@both
def test_range_search_returns_what_a_long_search_returns(kind, metric):
    case, upgraded = pair(kind, metric)
    scores, labels = upgraded.search(case.queries[:5], 20)
    radius = float(scores[:, 9].mean())
    limits, _found_scores, found = upgraded.range_search(case.queries[:5], radius)
    for query in range(5):
        within = scores[query] > radius if metric == IP else scores[query] < radius
        expected = set(labels[query][within])
        got = set(found[limits[query] : limits[query + 1]])
        assert expected <= got if "HNSW" not in kind else expected & got


@both
def test_range_search_of_two_stages_returns_all_within_an_unmultiplied_radius(metric):
    """Faiss asks the first stage for the radius times k_factor, beyond which under inner product there is nothing."""
    case, upgraded = fresh("PQ6x8np,RFlat", metric)
    scores, labels = upgraded.search(case.queries, 600)
    radius = float(scores[:, 9].mean())
    parameters = faiss.IndexRefineSearchParameters(
        k_factor=0 if metric == IP else 4
    )  # 4 is a second stage's own
    limits, _, found = upgraded.range_search(case.queries, radius, params=parameters)
    for query in range(len(case.queries)):
        within = scores[query] > radius if metric == IP else scores[query] < radius
        assert set(labels[query][within]) == set(
            found[limits[query] : limits[query + 1]]
        )
    if metric == IP:
        assert (
            np.diff(upgraded.range_search(case.queries, radius)[0]).sum() < limits[-1]
        )  # see docs/faiss-types.md


@kinds("Flat", "IDMap2,Flat", "IVF8,Flat", "HNSW16,Flat", "SQ8")
def test_id_selectors_select_by_the_ids_of_the_user(kind):
    case, upgraded = pair(kind, IP)
    allowed = case.ids[:200]
    selector = faiss.IDSelectorBatch(allowed)
    parameters = {
        "IVF8,Flat": faiss.SearchParametersIVF(nprobe=8, sel=selector),
        "HNSW16,Flat": faiss.SearchParametersHNSW(efSearch=600, sel=selector),
    }.get(kind, faiss.SearchParameters(sel=selector))
    assert np.isin(
        upgraded.search(case.queries, 10, params=parameters)[1], allowed
    ).all()


@kinds(
    "Flat",
    "IVF8,SQ8",
    "IVF8,PQ6x8np",
    "HNSW16,Flat",
    "PQ6x4fs",
    "OPQ6,PQ6x8np",
    "IVF8,PQ6x8np,RFlat",
)
@both
def test_an_upgrade_of_an_upgraded_index_replaces_every_offset(kind, metric):
    case, upgraded = pair(kind, metric)
    other = case.offsets[::-1].copy()
    np.testing.assert_allclose(
        stored(hubplugin_faiss.upgrade(upgraded, other)),
        other,
        rtol=0,
        atol=cases.tolerance(kind),
    )


@both
def test_training_lists_and_search_settings_are_kept(metric):
    case = cases.made("IVF8,Flat", metric)
    case.index.nprobe, case.index.parallel_mode, case.index.max_codes = 3, 1, 77
    upgraded = hubplugin_faiss.upgrade(case.index, case.offsets)
    raw, new = case.index, downcast_to_ivf(upgraded)
    assert (new.nprobe, new.parallel_mode, new.max_codes) == (3, 1, 77)
    for number in range(8):
        np.testing.assert_array_equal(
            ids_of_list(new.invlists, number), ids_of_list(raw.invlists, number)
        )
    np.testing.assert_array_equal(
        new.quantizer.reconstruct_n(0, 8)[:, :24], raw.quantizer.reconstruct_n(0, 8)
    )


@kinds("PQ6x4fs", "PQ3x4fs", "IVF8,PQ6x4fs")
@both
def test_fast_scan_codes_are_kept(kind, metric):
    case = cases.made(kind, metric)
    upgraded = hubplugin_faiss.upgrade(case.index, np.zeros(600, np.float32))
    np.testing.assert_array_equal(
        upgraded.search(case.queries, 5)[1], case.index.search(case.queries, 5)[1]
    )
    hubplugin_faiss.add(upgraded, case.vectors[:50], np.zeros(50, np.float32))
    case.index.add(case.vectors[:50])
    back = faiss.serialize_index(hubplugin_faiss.downgrade(upgraded))
    np.testing.assert_array_equal(back, faiss.serialize_index(case.index))


@both
def test_vectors_added_to_a_graph_are_linked_as_in_the_raw_graph(metric):
    case, upgraded = fresh("HNSW16,Flat", metric)
    new = cases.unit(np.random.default_rng(8).normal(size=(50, 24)))
    raw = faiss.deserialize_index(faiss.serialize_index(case.index))
    inner = downcast_to_ivf(upgraded)
    inner.hnsw.rng = raw.hnsw.rng
    hubplugin_faiss.add(upgraded, new, np.linspace(-0.2, 0.2, 50))
    raw.add(new)
    ours, theirs = (
        faiss.vector_to_array(index.hnsw.neighbors) for index in (inner, raw)
    )
    assert len(ours) == len(theirs)
    assert (ours == theirs).mean() > 0.99


@kinds("IVF8,Flat", "IVF8,SQ8", "IVF8,PQ6x8np", "IVF8,PQ6x4fs")
def test_direct_maps_know_what_was_added_and_an_array_refuses_ids_that_it_cannot_hold(
    kind,
):
    case = cases.made(kind, IP)
    case.index.make_direct_map()
    upgraded = hubplugin_faiss.upgrade(case.index, case.offsets)
    hubplugin_faiss.add(upgraded, case.vectors[:20], case.offsets[:20])
    np.testing.assert_allclose(
        upgraded.reconstruct(603), upgraded.reconstruct(3), atol=1e-6
    )
    before = faiss.serialize_index(upgraded)
    with pytest.raises(
        hubplugin.StoreError, match=r"holds no ids but 0, 1, 2, .*DirectMap\.Hashtable"
    ):
        hubplugin_faiss.add(
            upgraded, case.vectors[:3], case.offsets[:3], ids=np.array([900, 901, 902])
        )
    np.testing.assert_array_equal(faiss.serialize_index(upgraded), before)
    faiss.extract_index_ivf(upgraded).set_direct_map_type(faiss.DirectMap.Hashtable)
    hubplugin_faiss.add(
        upgraded, case.vectors[:3], case.offsets[:3], ids=np.array([900, 901, 902])
    )
    np.testing.assert_allclose(
        upgraded.reconstruct(902), upgraded.reconstruct(2), atol=1e-6
    )


@kinds("IVF8,Flat", "IVF8,SQ8", "IVF8,PQ6x8np", "SQ8", "PQ6x8np")
def test_plain_faiss_refuses_to_merge_codes_that_do_not_mean_the_same(kind):
    case = cases.made(kind, IP)
    first, second = (
        hubplugin_faiss.upgrade(case.index, offsets)
        for offsets in (case.offsets, case.offsets * 0.9)
    )
    with pytest.raises(RuntimeError):
        first.merge_from(second, 600)


def off_centre(
    kind: str, metric: int
) -> tuple[faiss.Index, np.ndarray, np.ndarray, np.ndarray]:
    """An index, its vectors, queries and a bank, whose mean is not 0."""
    rng = np.random.default_rng(7)
    centre = rng.normal(size=24)
    vectors, queries, bank = (
        cases.unit(rng.normal(size=(rows, 24)) + 0.3 * centre)
        for rows in (600, 40, 100)
    )
    index = cases.filled(kind, vectors, metric)
    cases.look_everywhere(index)
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
    index, vectors, queries, bank = off_centre(kind, metric)
    model = hubplugin.fit(vectors, bank, "nnn", k=5)
    upgraded = hubplugin_faiss.upgrade(index, model)
    rows = decoded(upgraded).astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1)
    nearness = (
        round(20 * np.sort(bank @ (rows / lengths[:, None]).T, axis=1)[:, -10].mean())
        / 20
    )
    norm_bias = nearness * lengths - (lengths**2 / 2 if metric == L2 else 0)
    wanted = lengths * model.offsets(rows.astype(np.float32)) - norm_bias
    apart = stored(upgraded) - wanted
    np.testing.assert_allclose(apart, apart.mean(), atol=1e-5 + cases.tolerance(kind))
    assert (
        abs(stored(upgraded).mean() - model.offsets(rows.astype(np.float32)).mean())
        < 0.01
    )

    truth = queries @ (rows / lengths[:, None]).T + model.offsets(
        rows.astype(np.float32)
    )
    plain = hubplugin_faiss.upgrade(index, model.offsets(rows.astype(np.float32)))
    of_model, of_numbers = (
        cases.recall(each.search(queries, 10)[1], cases.best(truth))
        for each in (upgraded, plain)
    )
    assert of_model > of_numbers

    hubplugin_faiss.add(upgraded, vectors[:50], model)
    np.testing.assert_allclose(
        stored(upgraded)[-50:], stored(upgraded)[:50], atol=1e-3 + cases.tolerance(kind)
    )


@pytest.mark.parametrize("kind", ["PCA12,Flat", "PCA20,IVF8,Flat", "IDMap2,PCA12,SQ8"])
def test_what_a_pca_adds_to_similarities_is_no_part_of_what_is_corrected(kind):
    """It takes the mean off targets and queries, which adds to the similarity of each target a bias of its own."""
    index, vectors, queries, bank = off_centre(kind, IP)
    model = hubplugin.fit(index, bank, "nnn", k=5, metric="dot")
    upgraded, offsets = (
        hubplugin_faiss.upgrade(index, model),
        model.offsets(decoded(index)),
    )
    np.testing.assert_allclose(
        stored(upgraded), offsets, atol=1e-3 if "SQ8" in kind else 1e-5
    )
    truth = queries @ decoded(upgraded).T + offsets
    as_numbers = hubplugin_faiss.upgrade(index, offsets)
    of_model, of_numbers = (
        cases.recall(each.search(queries, 10)[1], cases.best(truth))
        for each in (upgraded, as_numbers)
    )
    assert of_model > 0.95 > of_numbers + 0.05
    hubplugin_faiss.add(
        upgraded, vectors[:50], model, np.arange(600, 650) if "IDMap" in kind else None
    )
    np.testing.assert_allclose(stored(upgraded)[-50:], stored(upgraded)[:50], atol=1e-3)


@kinds(
    "PQ6x8np,RFlat",
    "IVF8,PQ6x8np,RFlat",
    "IVF8,PQ6x8np,Refine(SQfp16)",
    "PQ6x4fs,RFlat",
)
@both
def test_a_model_of_unit_vectors_is_exact_in_a_refined_index(kind, metric):
    """The codes of the first stage change lengths, those of the second do not: each gets offsets of its own."""
    case = cases.made(kind, metric)
    rng = np.random.default_rng(7)
    bank, queries = (cases.unit(rng.normal(size=(rows, 24))) for rows in (100, 40))
    model = hubplugin.fit(case.index, bank, "nnn", k=5)
    upgraded = hubplugin_faiss.upgrade(case.index, model)
    cases.look_everywhere(upgraded)
    faiss.ParameterSpace().set_index_parameter(upgraded, "k_factor_rf", 60)
    truth = queries @ case.vectors.T + model.offsets(case.vectors)
    cases.assert_ranked(
        upgraded.search(queries, 10)[1],
        truth,
        np.arange(600),
        2 * cases.tolerance(kind) + 1e-3,
    )
    hubplugin_faiss.add(upgraded, case.vectors[:50], model)
    np.testing.assert_allclose(stored(upgraded)[-50:], stored(upgraded)[:50], atol=1e-3)
    downgraded = hubplugin_faiss.downgrade(hubplugin_faiss.upgrade(case.index, model))
    np.testing.assert_array_equal(
        faiss.serialize_index(downgraded), faiss.serialize_index(case.index)
    )


def test_how_near_queries_come_is_seen_all_over_an_index_of_many_blocks(monkeypatch):
    """The first block of inverted lists is the first lists, and near to few queries."""
    rng = np.random.default_rng(0)
    centres = cases.unit(rng.normal(size=(40, 24)))
    vectors, bank = (
        cases.unit(
            centres[rng.integers(0, 40, rows)] + 0.1 * rng.normal(size=(rows, 24))
        )
        for rows in (4000, 200)
    )
    index = cases.filled("IVF40,PQ6x4np", vectors)
    monkeypatch.setattr("hubplugin_faiss.handlers.base.BLOCK_BYTES", 4 * 24 * 800)
    model = hubplugin.fit(vectors, bank, "nnn")
    rows = cases.unit(decoded(index))
    expected = np.sort(bank @ rows.T, axis=1)[:, -10].mean()
    assert abs(IndexScale.of(handler_for(index), model).nearness - expected) < 0.15
    first = cases.unit(next(handler_for(index).scan(800))[0])
    assert np.sort(bank @ first.T, axis=1)[:, -2].mean() < expected - 0.2


@kinds("SQ8", "PQ6x8np")
@both
def test_answers_of_the_bank_are_known_again_when_an_index_is_refreshed(kind, metric):
    """A blend leaves out what reaches the similarity of a query's nearest target, from which 16 bits would round it."""
    case = cases.made(kind, metric)
    bank = cases.unit(np.random.default_rng(1).normal(size=(300, 24)))
    model = hubplugin.fit(case.index, bank)
    upgraded = hubplugin_faiss.upgrade(case.index, model)
    again = hubplugin_faiss.upgrade(upgraded, model)
    np.testing.assert_allclose(stored(again), stored(upgraded), atol=1e-5)


@kinds("Flat", "SQ8", "PQ6x8np", "IVF8,SQ8", "HNSW16,SQ8")
def test_offsets_that_find_no_room_are_refused(kind):
    case = cases.made(kind, L2)
    upgraded = hubplugin_faiss.upgrade(case.index, case.offsets / 20)
    with pytest.raises(
        hubplugin.StoreError,
        match=r"find no room in the codes of this .*upgrade\(index, model\)",
    ):
        hubplugin_faiss.add(upgraded, case.vectors[:50], case.offsets[:50])
    assert upgraded.ntotal == 600
    hubplugin_faiss.add(upgraded, case.vectors[:50], case.offsets[:50] / 20)


@kinds(
    "IVF8,PQ8x8np",
    "IVF8,PQ8x4np",
    "IVF8,PQ8x4fsr",
    "IVF8,SQ8",
    "IVF8,SQ4",
    "IVF8,PQ8x8np,RFlat",
)
@both
def test_an_offset_that_finds_no_room_in_the_list_of_its_vector_is_refused(
    kind, metric
):
    """Codes of differences from centroids have room for what is usual in a list."""
    rng = np.random.default_rng(0)
    groups, centres = rng.integers(0, 8, 2000), 3 * rng.normal(size=(8, 32))
    vectors = (centres[groups] + 0.3 * rng.normal(size=(2000, 32))).astype(np.float32)
    of_groups = np.linspace(-1, 1, 8, dtype=np.float32)
    offsets = (of_groups[groups] + 0.05 * rng.normal(size=2000)).astype(np.float32)
    index = cases.filled(kind, vectors, metric)
    upgraded = hubplugin_faiss.upgrade(index, offsets)
    before, refused = faiss.serialize_index(upgraded), 0
    for group in range(8):
        new = (centres[group] + 0.3 * rng.normal(size=(1, 32))).astype(np.float32)
        for offset in of_groups:
            grown = faiss.deserialize_index(before)
            try:
                hubplugin_faiss.add(grown, new, offset[None])
            except hubplugin.StoreError:
                np.testing.assert_array_equal(faiss.serialize_index(grown), before)
                refused += 1
                continue
            first, wanted = grown, offset
            if "R" in kind:
                first = faiss.downcast_index(grown).base_index
            if (
                "R" in kind and metric == L2
            ):  # the first stage makes up for the lengths that it decodes, too
                wanted = handler_for(faiss.deserialize_index(before))._offsets_of_base(
                    new, offset[None]
                )[0]
            assert abs(stored(first)[2000] - wanted) < 0.3
    assert refused < 64 / 3


@kinds("PQ6x4fs", "IVF8,PQ6x4fs", "OPQ6,PQ6x4fs", "IDMap2,PQ6x4fs", "PQ6x4fs,RFlat")
def test_what_is_added_after_others_were_removed_has_its_own_code_and_offset(kind):
    """Faiss itself writes new codes over what is left of old ones."""
    case = cases.made(kind, IP)
    upgraded = hubplugin_faiss.upgrade(case.index, case.offsets)
    vectors, rows = (
        decoded(upgraded),
        np.concatenate([np.arange(50), np.arange(350, 600), np.arange(50, 250)]),
    )
    offsets = stored(upgraded)
    ids = (
        10**6 + np.arange(200)
        if "IDMap" in kind or kind.startswith("IVF8,PQ")
        else None
    )
    assert hubplugin_faiss.remove_ids(upgraded, case.ids[50:350]) == 300
    hubplugin_faiss.add(upgraded, case.vectors[50:250], case.offsets[50:250], ids)
    names = (
        np.arange(500) if ids is None else np.concatenate([case.ids[rows[:300]], ids])
    )
    handler = handler_for(upgraded)
    found, held = (
        np.concatenate(parts) for parts in zip(*handler.scan(100), strict=True)
    )
    order = np.argsort(handler.labels())
    np.testing.assert_array_equal(handler.labels()[order], np.sort(names))
    np.testing.assert_allclose(held[order], offsets[rows][np.argsort(names)], atol=1e-5)
    np.testing.assert_allclose(
        found[order], vectors[rows][np.argsort(names)], atol=1e-3
    )
    anew = cases.made(kind, IP).index
    anew.reset()
    cases.put(anew, case.vectors[rows], names)
    labels, expected = (
        each.search(case.queries, 5)[1]
        for each in (upgraded, hubplugin_faiss.upgrade(anew, case.offsets[rows]))
    )
    assert cases.recall(labels, expected if "IDMap" in kind else names[expected]) > 0.9


@kinds("Flat", "SQ8", "SQ4", "PQ6x8np", "IVF8,SQ6", "PQ6x8np,RFlat")
@both
@pytest.mark.parametrize("size", [0, 1e-3])
def test_offsets_that_are_nothing_or_small_find_room(kind, metric, size):
    case = cases.made(kind, metric)
    upgraded = hubplugin_faiss.upgrade(case.index, size * case.offsets)
    hubplugin_faiss.add(upgraded, case.vectors[:50], size * case.offsets[:50])
    expected = size * np.concatenate([case.offsets, case.offsets[:50]])
    np.testing.assert_allclose(
        stored(upgraded), expected, rtol=0, atol=size * cases.tolerance(kind) + 1e-6
    )
