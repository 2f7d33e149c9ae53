"""An index file as a store, and files that survive what interrupts their writing."""

import os
import re
from pathlib import Path

import faiss
import numpy as np
import pytest

import hubplugin
import hubplugin_faiss
from hubplugin import inspect, open_store, refresh
from hubplugin.jobs.write import Applied
from tests.faiss import cases
from tests.faiss.cases import IP, L2

RNG = np.random.default_rng(12)
BANK, GALLERY = (cases.unit(RNG.normal(size=(rows, 16)) + 0.3) for rows in (60, 500))


@pytest.fixture(scope="module")
def model() -> hubplugin.OffsetModel:
    """Only to be looked at."""
    return hubplugin.fit(GALLERY, BANK, "nnn", k=4)


def applied(path: Path, model: hubplugin.OffsetModel, **options) -> Applied:
    return hubplugin.apply(hubplugin_faiss.open_store(path), model, **options)


KINDS = (
    "Flat",
    "IDMap2,Flat",
    "IVF4,Flat",
    "HNSW8",
    "SQ8",
    "IVF4,SQ4",
    "PQ4x8np",
    "PQ8x4fs",
    "PCA8,Flat",
)


@pytest.fixture(params=cases.slow_but({"Flat", "IVF4,SQ4"}, KINDS))
def path(request, tmp_path) -> Path:
    index = cases.filled(request.param, GALLERY)
    cases.look_everywhere(index)
    return cases.written(tmp_path / "photos.faiss", index)


def test_apply_inspect_refresh_and_remove(path, model):
    before, (index, beside) = path.read_bytes(), hubplugin_faiss.read_index(path)
    assert beside is None
    store = open_store(f"faiss:{path}")
    raw = store.search(BANK[:5], 10)
    counted = hubplugin.apply(store, model, dry_run=True)
    assert (counted.written, counted.missing, path.read_bytes()) == (False, 500, before)
    done = hubplugin.apply(store, model)
    assert (done.scanned, done.missing) == (500, 500)
    found, beside = hubplugin_faiss.read_index(path)
    assert beside.fingerprint == model.fingerprint
    expected = hubplugin_faiss.upgrade(index, model).search(BANK, 5)[1]
    np.testing.assert_array_equal(found.search(BANK, 5)[1], expected)
    assert "every target has its offset" in str(inspect(open_store(f"faiss:{path}")))
    assert refresh(open_store(f"faiss:{path}")).stale == 0
    assert (
        open_store(f"faiss:{path}").search(BANK[:5], 10).ids
        == store.search(BANK[:5], 10).ids
        != raw.ids
    )
    assert store.search(BANK[:5], 10, raw=True).ids == raw.ids
    store.remove()
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("kind", ["PQ8x4np", "IVF4,PQ8x4np"])
def test_codes_find_as_much_by_l2_as_by_inner_product(tmp_path, kind):
    """Half of each decoded vector's squared length is no part of what is corrected."""
    rng = np.random.default_rng(2)
    vectors, queries, bank = (
        cases.unit(rng.normal(size=(rows, 16)) + 0.7) for rows in (1500, 200, 300)
    )
    truth = cases.similarities(queries, vectors, IP)
    truth += hubplugin.fit(vectors, bank).offsets(vectors)
    recalls = []
    for metric in (IP, L2):
        index = cases.filled(kind, vectors, metric)
        cases.look_everywhere(index)
        file = cases.written(tmp_path / "x.faiss", index)
        hubplugin.apply(
            hubplugin_faiss.open_store(file, metric="cosine"), bank, force=True
        )
        recalls.append(
            cases.recall(
                faiss.read_index(str(file)).search(queries, 10)[1], cases.best(truth)
            )
        )
        assert refresh(open_store(f"faiss:{file}")).stale == 0
        hubplugin.remove(open_store(f"faiss:{file}"))
    assert abs(recalls[1] - recalls[0]) < 0.02


def test_a_refresh_leaves_the_date_and_the_model_before_as_they_were(tmp_path, model):
    file = cases.written(tmp_path / "x.faiss", cases.filled("IVF4,Flat", GALLERY))
    for each in (hubplugin.fit(GALLERY, BANK, "csls", k=3), model):
        applied(file, each, force=True)
    manifest = Path(f"{file}.hub/manifest.json")
    manifest.write_text(
        re.sub(
            r'"made":"[^"]+"',
            '"made":"2001-09-09T01:46:40+00:00"',
            manifest.read_text(),
        )
    )
    cases.grow(file, BANK)
    store = open_store(f"faiss:{file}")
    assert refresh(store).stale
    for each in (store, open_store(f"faiss:{file}")):
        assert each.correction().made == "2001-09-09T01:46:40+00:00"
        assert each.previous().method == "csls"


CHANGE_LENGTHS = (
    "SQ8",
    "PQ4x8np",
    "IVF8,PQ4x8np",
    "PQ4x8np,Refine(SQ8)",
    "PCA8,Flat",
    "PCA8,SQ8",
)


@pytest.mark.parametrize(
    "kind", cases.slow_but({"SQ8", "IVF8,PQ4x8np", "PCA8,SQ8"}, CHANGE_LENGTHS)
)
@pytest.mark.parametrize("metric", [IP, L2])
def test_newcomers_make_no_offset_stale_where_codes_change_lengths(
    tmp_path, kind, metric
):
    """Offsets are on a scale that the index had when it was upgraded, and newcomers of another kind would move it."""
    rng = np.random.default_rng(3)
    centre = rng.normal(size=16)
    gallery, newcomers, bank = (
        cases.unit(rng.normal(size=(rows, 16)) + at * centre)
        for rows, at in ((500, 0.5), (200, 4), (60, 1.5))
    )
    file = tmp_path / "x.faiss"
    index = faiss.index_factory(16, kind, metric)
    index.train(np.concatenate([gallery, newcomers]))
    index.add(gallery)
    faiss.write_index(index, str(file))
    hubplugin.apply(
        hubplugin_faiss.open_store(file, metric="cosine"), bank, "nnn", k=5, force=True
    )
    index, kept = hubplugin_faiss.read_index(file)
    hubplugin_faiss.add(index, newcomers, kept)
    faiss.write_index(index, str(file))
    assert inspect(open_store(f"faiss:{file}")).stale == 0


@pytest.mark.parametrize(
    "kind",
    cases.slow_but(
        {"IVF8,PQ4x8np"}, ("PQ4x8np", "IVF8,PQ4x8np", "IVF8,PQ8x4fs", "SQ4")
    ),
)
@pytest.mark.parametrize("metric", [IP, L2])
def test_a_wrong_offset_is_told_from_one_that_codes_round(tmp_path, kind, metric):
    """By the level at which it lies, not by the worst of all levels, among which are those of a few hubs."""
    rng = np.random.default_rng(5)
    gallery, bank = (
        cases.unit(rng.normal(size=(rows, 16)) + 0.5) for rows in (2000, 60)
    )
    file = cases.written(tmp_path / "x.faiss", cases.filled(kind, gallery, metric))
    hubplugin.apply(
        hubplugin_faiss.open_store(file, metric="cosine"), bank, "nnn", k=5, force=True
    )
    store = hubplugin_faiss.open_store(file)
    assert inspect(store).stale == 0
    (batch,), model = store.scan(), store.correction().model
    offsets = model.offsets(batch.vectors)
    moved = offsets + 0.2 * offsets.std()
    right, wrong = (
        np.abs(batch.offsets - each) > batch.rounding(each) for each in (offsets, moved)
    )
    assert not right.any()
    assert wrong.mean() > 0.9


ZEROS = ("Flat", "SQ8", "SQ4", "SQfp16", "PQ8x8np", "PQ8x4fs", "IVF4,SQ8", "IVF4,PQ8x8np", "HNSW8,SQ8", "PCA12,SQ8",
         "PQ8x8np,RFlat", "L2norm,Flat")  # fmt: skip


@pytest.mark.parametrize("kind", cases.slow_but({"Flat", "SQ8", "IVF4,PQ8x8np"}, ZEROS))
@pytest.mark.parametrize("metric", [IP, L2])
def test_zero_vectors_are_counted_and_keep_the_offset_0_whatever_codes_make_of_them(
    tmp_path, kind, metric
):
    """Codes give a zero vector some direction and a small length, which the offset is not to make up for."""
    zero = np.zeros((1, 16), np.float32)
    index = faiss.index_factory(16, kind, metric)
    index.train(GALLERY)
    index.add(np.concatenate([GALLERY, zero]))
    cases.look_everywhere(index)
    file = cases.written(tmp_path / "x.faiss", index)
    found = (index.search(BANK, 10)[1] == 500).any(axis=1).mean()
    store = hubplugin_faiss.open_store(file, metric="cosine")
    done = hubplugin.apply(store, BANK, "nnn", k=4, force=True)
    assert done.model.gallery.count == 500
    assert (
        "1 with vectors that the model cannot judge, those of length 0 have the offset 0"
        in str(done)
    )
    index, kept = hubplugin_faiss.read_index(file)
    now = (index.search(BANK, 10)[1] == 500).any(axis=1).mean()
    assert (
        metric == L2 or now <= found
    )  # by L2 a zero vector is near to all queries, raw and corrected
    assert inspect(open_store(f"faiss:{file}"), queries=0).stale == 0

    hubplugin_faiss.add(index, zero, kept)
    assert abs(cases.stored(index)[-1]) < cases.tolerance(kind)
    cases.written(file, index)
    seen = inspect(open_store(f"faiss:{file}"), queries=0)
    assert (seen.stale, seen.invalid_vectors.count) == (0, 2)


CODED = ("SQ8", "SQ6", "SQ4", "IVF8,SQ8", "HNSW8,SQ8", "RR16,SQ8", "PQ8x8np", "PQ8x4fs", "IVF8,PQ8x8np",
         "SQ4,Refine(SQ8)", "PQ8x8np,Refine(SQ8)")  # fmt: skip


@pytest.mark.parametrize(
    "kind", cases.slow_but({"SQ8", "PQ8x8np", "IVF8,PQ8x8np"}, CODED)
)
@pytest.mark.parametrize("metric", [IP, L2])
def test_a_hub_whose_offset_the_codes_cannot_hold_is_stale_and_a_refresh_makes_room(
    tmp_path, kind, metric
):
    rng = np.random.default_rng(0)
    gallery, bank = (rng.normal(size=(rows, 16)) for rows in (1000, 300))
    gallery[:, 0] *= 0.1
    bank[:, 0] += 12
    hubs = np.repeat(cases.unit(bank.mean(axis=0, keepdims=True)), 3, axis=0)
    index = faiss.index_factory(16, kind, metric)
    index.train(np.concatenate([cases.unit(gallery), hubs]))
    index.add(cases.unit(gallery))
    cases.look_everywhere(index)
    file = cases.written(tmp_path / "x.faiss", index)
    asked = cases.unit(bank)
    store = hubplugin_faiss.open_store(file, metric="cosine")
    model = hubplugin.apply(store, asked, "nnn", k=16, alpha=1.5, force=True).model
    assert inspect(open_store(f"faiss:{file}"), queries=0).stale == 0
    cases.grow(file, hubs)
    assert inspect(open_store(f"faiss:{file}"), queries=0).stale_ids == [
        1000,
        1001,
        1002,
    ]

    refresh(open_store(f"faiss:{file}"))
    store = open_store(f"faiss:{file}")
    assert inspect(store, queries=0).stale == 0
    (batch,) = store.scan()
    planted = batch.take(np.flatnonzero(np.asarray(batch.ids) >= 1000))
    right = model.offsets(planted.vectors)
    assert right.max() < 2 * model.gallery.smallest
    np.testing.assert_allclose(planted.offsets, right, atol=0.02)
    assert not np.isin(store.search(asked, 10).ids, [1000, 1001, 1002]).any()


def test_a_vector_that_is_not_finite_hides_no_stale_offset_beside_it(tmp_path, model):
    file = cases.written(tmp_path / "x.faiss", cases.filled("PCA8,Flat", GALLERY))
    for method in ("nnn", "is"):
        hubplugin.apply(
            hubplugin_faiss.open_store(file, metric="cosine"), BANK, method, force=True
        )
    cases.grow(file, np.concatenate([BANK, np.full((1, 16), np.nan, np.float32)]))
    assert inspect(open_store(f"faiss:{file}")).stale >= 55
    refresh(open_store(f"faiss:{file}"))
    assert inspect(open_store(f"faiss:{file}")).stale <= 1


def foreign_rows() -> np.ndarray:
    """A vector of another length, one without length and one that is not finite, around a good one."""
    rows = np.stack(
        [0.5 * GALLERY[0], np.zeros(16), BANK[0], np.full(16, np.nan)]
    ).astype(np.float32)
    return np.ascontiguousarray(rows)


@pytest.mark.parametrize("kind", ["Flat", "IDMap2,Flat"])
def test_foreign_vectors_do_not_keep_a_refresh_from_the_others(tmp_path, model, kind):
    file = cases.written(tmp_path / "x.faiss", cases.filled(kind, GALLERY))
    applied(file, model)
    index, _ = hubplugin_faiss.read_index(file)
    cases.put(index, foreign_rows(), np.arange(500, 504))
    cases.written(file, index)
    assert inspect(open_store(f"faiss:{file}")).invalid_vectors.count == 3
    done = refresh(open_store(f"faiss:{file}"))
    assert done.stale == 3  # plain Faiss gave the zero vector the offset 0
    assert done.invalid_vectors.named == {
        500: "length 0.5",
        501: "length 0",
        503: "not finite",
    }
    says = "3 with vectors that the model cannot judge, those of length 0 have the offset 0, others its smallest: 500 ("
    assert says in str(done)
    smallest = model.gallery.smallest
    expected = np.array([smallest, 0, model.offsets(BANK[:1])[0], smallest])

    stored = cases.stored(hubplugin_faiss.read_index(file)[0])
    np.testing.assert_allclose(stored[500:], expected, atol=1e-5)
    np.testing.assert_allclose(stored[:500], model.offsets(GALLERY), atol=1e-5)
    assert inspect(open_store(f"faiss:{file}")).stale == 0


def test_a_model_of_cosine_for_vectors_of_all_lengths_is_refused_on_refresh(model):
    upgraded = hubplugin_faiss.upgrade(
        cases.filled("Flat", 3 * GALLERY), np.zeros(500, np.float32)
    )
    with pytest.raises(
        hubplugin.InputError,
        match="the model does not suit this IndexFlatIP: of 500 entries 500 with",
    ):
        hubplugin_faiss.upgrade(upgraded, model)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "x.faiss' does not exist"),
        (b"", "Faiss cannot read"),
        (b"\x93NUMPY", "x.faiss': it is no index, or of a type unknown to this Faiss"),
        (
            faiss.serialize_index(cases.filled("IVF4,SQ4", GALLERY)).tobytes()[:-300],
            "Faiss cannot read",
        ),
    ],
    ids=["missing", "empty", "of numpy", "cut off"],
)
def test_what_faiss_refuses_comes_back_as_one_line(tmp_path, content, says):
    file = tmp_path / "x.faiss"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(hubplugin.StoreError) as caught:
        open_store(f"faiss:{file}")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_metric_is_said_or_the_models_or_what_the_index_computes(tmp_path, model):
    file = tmp_path / "x.faiss"
    for metric, expected in ((IP, "dot"), (L2, "euclidean")):
        cases.written(file, cases.filled("PQ4x4np", GALLERY, metric))
        assert open_store(f"faiss:{file}").metric == expected
        assert open_store(f"faiss:{file}?metric=cosine").metric == "cosine"
        applied(file, model, force=True)
        assert open_store(f"faiss:{file}").metric == "cosine"
    cases.written(file, cases.filled("Flat", 3 * GALLERY))
    for said in ("", "?metric=cosine"):
        with pytest.raises(hubplugin.InputError, match="row 0 has length 3"):
            hubplugin.apply(open_store(f"faiss:{file}{said}"), model)
    with pytest.raises(hubplugin.InputError, match="the model is for cosine"):
        hubplugin.apply(open_store(f"faiss:{file}?metric=dot"), model)
    with pytest.raises(hubplugin.InputError, match="the only option is metric"):
        open_store(f"faiss:{file}?color=red")


@pytest.mark.parametrize(
    "kind", cases.slow_but({"IVF8,SQ8"}, ["IVF8,SQ8", "PQ4x8np,RFlat"])
)
@pytest.mark.parametrize("metric", [IP, L2])
def test_an_inspection_sees_an_index_whole_and_what_plain_faiss_adds(
    tmp_path, kind, metric
):
    rng = np.random.default_rng(12)
    gallery, bank, live = (
        cases.unit(rng.normal(size=(n, 16)) + at)
        for n, at in ((2000, 0.1), (300, 0.6), (300, 0.6))
    )
    index = cases.filled(kind, gallery, metric)
    cases.look_everywhere(index)
    file = cases.written(tmp_path / "x.faiss", index)
    hubplugin.apply(hubplugin_faiss.open_store(file, metric="cosine"), bank, force=True)
    seen = inspect(hubplugin_faiss.open_store(file), live)
    assert (seen.count, seen.missing, seen.stale) == (2000, 0, 0)
    assert seen.hubness.corrected < 0.8 * seen.hubness.raw
    cases.grow(file, np.ascontiguousarray(live))
    assert 0.9 * 300 <= inspect(hubplugin_faiss.open_store(file), live).stale <= 300
    refresh(hubplugin_faiss.open_store(file))
    assert inspect(hubplugin_faiss.open_store(file), live).stale == 0


def test_lists_on_disk_are_refused_until_they_are_loaded_into_memory(tmp_path, model):
    file, index = tmp_path / "x.faiss", cases.filled("IVF4,Flat", GALLERY)
    ivf = faiss.extract_index_ivf(index)
    place = str(tmp_path / "x.ivfdata")
    lists = faiss.OnDiskInvertedLists(ivf.nlist, ivf.code_size, place)
    lists.merge_from_1(ivf.invlists)
    ivf.replace_invlists(lists, True)
    lists.this.disown()
    cases.written(file, index)
    with pytest.raises(
        hubplugin.StoreError, match=r"lists on disk, in .*; load"
    ) as caught:
        open_store(f"faiss:{file}")
    index = faiss.read_index(str(file))
    call = str(caught.value).partition("then go on: ")[2]
    exec(call, {"faiss": faiss, "index": index})
    cases.written(file, index)
    applied(file, model, force=True)
    assert open_store(f"faiss:{file}").correction().active


def test_ids_below_0_are_ids(tmp_path, model):
    ids = np.random.default_rng(0).integers(-(2**62), 2**62, 500)
    index = faiss.index_factory(16, "IDMap,Flat", IP)
    index.add_with_ids(GALLERY, ids)
    file = cases.written(tmp_path / "x.faiss", index)
    applied(file, model)
    found = hubplugin_faiss.open_store(file).search(GALLERY[:50], 1, raw=True).ids
    assert [row[0] for row in found] == ids[:50].tolist()


def test_an_open_store_looks_at_the_file_as_it_is(tmp_path, model):
    file = cases.written(tmp_path / "x.faiss", cases.filled("Flat", GALLERY))
    store = hubplugin_faiss.open_store(file)
    hubplugin.apply(store, model)
    cases.grow(file, np.ascontiguousarray(3 * BANK))
    assert inspect(store, queries=0).count == 560
    assert store.search(BANK[:1], 1, raw=True).ids[0][0] >= 500
    refresh(store)
    assert inspect(hubplugin_faiss.open_store(file), queries=0).stale == 0
