"""An index file as a store, and files that survive what interrupts their writing."""

import os
import re
from pathlib import Path

import faiss
import numpy as np
import pytest

import hubplugin_faiss
from hubplugin import InputError, StoreError, apply, fit, inspect, open_store, refresh
from hubplugin_faiss import add, read_index, upgrade
from tests.faiss import cases
from tests.faiss.cases import (
    IP,
    L2,
    both,
    bytes_of,
    draw,
    filled,
    grow,
    look_everywhere,
    put,
    slow_but,
    tolerance,
    unit,
    written,
)
from tests.galleries import assert_near
from tests.refusals import refused

RNG = np.random.default_rng(12)
BANK, GALLERY = draw(RNG, 60, 500, at=0.3)


@pytest.fixture(scope="module")
def model():
    """Only to be looked at."""
    return fit(GALLERY, BANK, "nnn", k=4)


def opened(file):
    return open_store(f"faiss:{file}")


def correct(file, index, *given, metric=None, **options):
    """Write `index` to the file, and apply what is `given`, a model or a bank."""
    store = hubplugin_faiss.open_store(written(file, index), metric=metric)
    return apply(store, *given, force=True, **options)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "photos.faiss"


KINDS = (
    "Flat", "IDMap2,Flat", "IVF4,Flat", "HNSW8", "SQ8", "IVF4,SQ4", "PQ4x8np", "PQ8x4fs", "PCA8,Flat",
)  # fmt: skip


@pytest.mark.parametrize("kind", slow_but({"Flat", "IVF4,SQ4"}, KINDS))
def test_apply_writes_what_upgrade_makes_and_remove_gives_back_the_bytes(
    file, model, kind
):
    index = filled(kind, GALLERY)
    before = written(file, index).read_bytes()
    store = opened(file)
    assert not apply(store, model, dry_run=True, force=True).written
    assert file.read_bytes() == before
    apply(store, model, force=True)
    found, beside = read_index(file)
    assert beside.fingerprint == model.fingerprint
    assert bytes_of(found) == bytes_of(upgrade(index, model, force=True))
    found = inspect(opened(file))
    assert (found.missing, found.stale) == (0, 0)
    store.remove()
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_a_refresh_leaves_the_date_and_the_model_before_as_they_were(file, model):
    correct(file, filled("IVF4,Flat", GALLERY), BANK, "csls", k=3)
    apply(opened(file), model, force=True)
    manifest = Path(f"{file}.hub/manifest.json")
    made = "2001-09-09T01:46:40+00:00"
    dated = re.sub(r'"made":"[^"]+"', f'"made":"{made}"', manifest.read_text())
    manifest.write_text(dated)
    grow(file, BANK)
    store = opened(file)
    assert refresh(store).stale
    for each in (store, opened(file)):
        assert each.correction().made == made
        assert each.previous().method == "csls"


CHANGE_LENGTHS = (
    "SQ8", "PQ4x8np", "IVF8,PQ4x8np", "PQ4x8np,Refine(SQ8)", "PCA8,Flat", "PCA8,SQ8",
)  # fmt: skip


@pytest.mark.parametrize(
    "kind", slow_but({"SQ8", "IVF8,PQ4x8np", "PCA8,SQ8"}, CHANGE_LENGTHS)
)
@both
def test_newcomers_make_no_offset_stale_where_codes_change_lengths(file, kind, metric):
    """Offsets are on a scale that the index had when it was upgraded, and newcomers of another kind would move it."""
    rng = np.random.default_rng(3)
    centre = rng.normal(size=16)
    (gallery,) = draw(rng, 500, at=0.5 * centre)
    (newcomers,) = draw(rng, 200, at=4 * centre)
    (bank,) = draw(rng, 60, at=1.5 * centre)
    index = faiss.index_factory(16, kind, metric)
    index.train(np.concatenate([gallery, newcomers]))
    index.add(gallery)
    correct(file, index, bank, "nnn", metric="cosine", k=5)
    index, kept = read_index(file)
    add(index, newcomers, kept)
    written(file, index)
    assert inspect(opened(file)).stale == 0


ROUNDED = "PQ4x8np", "IVF8,PQ4x8np", "IVF8,PQ8x4fs", "SQ4"


@pytest.mark.parametrize("kind", slow_but({"IVF8,PQ4x8np"}, ROUNDED))
@both
def test_a_wrong_offset_is_told_from_one_that_codes_round(file, kind, metric):
    """By the level at which it lies, not by the worst of all levels, among which are those of a few hubs."""
    gallery, bank = draw(np.random.default_rng(5), 2000, 60, at=0.5)
    index = filled(kind, gallery, metric)
    correct(file, index, bank, "nnn", metric="cosine", k=5)
    store = opened(file)
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


@pytest.mark.parametrize("kind", slow_but({"Flat", "SQ8", "IVF4,PQ8x8np"}, ZEROS))
@both
def test_zero_vectors_are_counted_and_keep_the_offset_0_whatever_codes_make_of_them(
    file, kind, metric
):
    """Codes give a zero vector some direction and a small length, which the offset is not to make up for."""
    zero = np.zeros((1, 16), np.float32)
    index = faiss.index_factory(16, kind, metric)
    index.train(GALLERY)
    index.add(np.concatenate([GALLERY, zero]))
    done = correct(file, index, BANK, "nnn", metric="cosine", k=4)
    assert done.model.gallery.count == 500
    assert done.invalid_vectors.count == 1
    assert inspect(opened(file), queries=0).stale == 0

    index, kept = read_index(file)
    add(index, zero, kept)
    assert_near(cases.stored(index)[-2:], 0, tolerance(kind))
    written(file, index)
    seen = inspect(opened(file), queries=0)
    assert (seen.stale, seen.invalid_vectors.count) == (0, 2)


CODED = ("SQ8", "SQ6", "SQ4", "IVF8,SQ8", "HNSW8,SQ8", "RR16,SQ8", "PQ8x8np", "PQ8x4fs", "IVF8,PQ8x8np",
         "SQ4,Refine(SQ8)", "PQ8x8np,Refine(SQ8)")  # fmt: skip


@pytest.mark.parametrize("kind", slow_but({"SQ8", "PQ8x8np", "IVF8,PQ8x8np"}, CODED))
@both
def test_a_hub_whose_offset_the_codes_cannot_hold_is_stale_and_a_refresh_makes_room(
    file, kind, metric
):
    rng = np.random.default_rng(0)
    gallery, bank = (rng.normal(size=(rows, 16)) for rows in (1000, 300))
    gallery[:, 0] *= 0.1
    bank[:, 0] += 12
    gallery, asked = unit(gallery), unit(bank)
    hubs = np.repeat(unit(bank.mean(axis=0, keepdims=True)), 3, axis=0)
    index = faiss.index_factory(16, kind, metric)
    index.train(np.concatenate([gallery, hubs]))
    index.add(gallery)
    look_everywhere(index)
    options = {"metric": "cosine", "k": 16, "alpha": 1.5}
    correct(file, index, asked, "nnn", **options)
    assert inspect(opened(file), queries=0).stale == 0
    grow(file, hubs)
    planted = [1000, 1001, 1002]
    assert inspect(opened(file), queries=0).stale_ids == planted

    refresh(opened(file))
    store = opened(file)
    assert inspect(store, queries=0).stale == 0
    assert not np.isin(store.search(asked, 10).ids, planted).any()


def test_a_vector_that_is_not_finite_hides_no_stale_offset_beside_it(file):
    index = filled("PCA8,Flat", GALLERY)
    correct(file, index, BANK, "is", metric="cosine")
    grow(file, np.concatenate([BANK, np.full((1, 16), np.nan, np.float32)]))
    assert inspect(opened(file)).stale >= 55
    refresh(opened(file))
    assert inspect(opened(file)).stale <= 1


@pytest.mark.parametrize("kind", ["Flat", "IDMap2,Flat"])
def test_foreign_vectors_do_not_keep_a_refresh_from_the_others(file, model, kind):
    correct(file, filled(kind, GALLERY), model)
    index, _ = read_index(file)
    foreign = np.stack([0.5 * GALLERY[0], np.zeros(16), BANK[0], np.full(16, np.nan)])
    put(index, foreign.astype(np.float32), np.arange(500, 504))
    written(file, index)
    assert inspect(opened(file)).invalid_vectors.count == 3
    done = refresh(opened(file))
    assert done.stale == 3  # plain Faiss gave the zero vector the offset 0
    wrong = {500: "length 0.5", 501: "length 0", 503: "not finite"}
    assert done.invalid_vectors.named == wrong
    smallest = model.gallery.smallest
    expected = np.array([smallest, 0, model.offsets(BANK[:1])[0], smallest])
    stored = cases.stored(read_index(file)[0])
    assert_near(stored[500:], expected)
    assert_near(stored[:500], model.offsets(GALLERY))
    assert inspect(opened(file)).stale == 0


def test_a_model_of_cosine_for_vectors_of_all_lengths_is_refused_on_refresh(model):
    raw = filled("Flat", 3 * GALLERY)
    upgraded = upgrade(raw, np.zeros(500, np.float32))
    says = "the model does not suit this IndexFlat: the model cannot judge 500 vectors"
    with refused(InputError, says):
        upgrade(upgraded, model)


CUT_OFF = bytes_of(filled("IVF4,SQ4", GALLERY))[:-300]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "does not exist"),
        (b"", "Faiss cannot read"),
        (b"\x93NUMPY", "it is not an index, or its type is unknown to this Faiss"),
        (CUT_OFF, "Faiss cannot read"),
    ],
    ids=["missing", "empty", "of numpy", "cut off"],
)
def test_what_faiss_refuses_comes_back_as_one_line(file, content, says):
    if content is not None:
        file.write_bytes(content)
    with refused(StoreError, says):
        opened(file)


def test_the_metric_is_said_or_the_models_or_what_the_index_computes(file, model):
    for metric, expected in ((IP, "dot"), (L2, "euclidean")):
        index = filled("PQ4x4np", GALLERY, metric)
        assert opened(written(file, index)).metric == expected
        assert open_store(f"faiss:{file}?metric=cosine").metric == "cosine"
        correct(file, index, model)
        assert opened(file).metric == "cosine"
    written(file, filled("Flat", 3 * GALLERY))
    wrong = {
        "": "row 0 has length 3",
        "?metric=cosine": "row 0 has length 3",
        "?metric=dot": "the model is for cosine",
        "?color=red": "the only option is metric",
    }
    for said, says in wrong.items():
        with refused(InputError, says):
            apply(open_store(f"faiss:{file}{said}"), model)


def test_lists_on_disk_are_refused_until_they_are_loaded_into_memory(file, model):
    index = filled("IVF4,Flat", GALLERY)
    ivf = faiss.extract_index_ivf(index)
    place = str(file.parent / "x.ivfdata")
    lists = faiss.OnDiskInvertedLists(ivf.nlist, ivf.code_size, place)
    lists.merge_from_1(ivf.invlists)
    ivf.replace_invlists(lists, True)
    lists.this.disown()
    written(file, index)
    says = r"lists on disk, in .*; load"
    with pytest.raises(StoreError, match=says) as caught:
        opened(file)
    index = faiss.read_index(str(file))
    exec(str(caught.value).partition("then go on: ")[2], locals() | {"faiss": faiss})
    correct(file, index, model)
    assert opened(file).correction().active


def test_ids_below_zero_are_found_as_plain_faiss_finds_them(file):
    """Signed 64-bit hashes are common; -1 alone means that nothing was found."""
    ids = RNG.integers(-(2**62), 2**62, len(GALLERY))
    index = faiss.index_factory(GALLERY.shape[1], "IDMap,Flat", IP)
    index.add_with_ids(GALLERY, ids)
    correct(file, index, BANK, "csls")
    _, expected = faiss.read_index(str(file)).search(GALLERY[:20], 3)
    assert (expected < 0).any()
    assert opened(file).search(GALLERY[:20], 3).ids == expected.tolist()


def test_queries_of_another_dimension_are_refused_by_naming_both(file):
    store = opened(written(file, filled("Flat", GALLERY)))
    dim = GALLERY.shape[1]
    for raw in (False, True):
        with refused(InputError, f"queries have {dim - 1} dimensions, .* has {dim};"):
            store.search(GALLERY[:2, 1:], 3, raw=raw)
