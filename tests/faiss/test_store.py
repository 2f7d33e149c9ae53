"""An index file as a store, and files that survive what interrupts their writing."""

import os
import re
import stat
import warnings
from pathlib import Path

import faiss
import numpy as np
import pytest

import hubplugin
import hubplugin_faiss
from hubplugin import inspect, open_store, refresh
from hubplugin.bank import BankProfile
from hubplugin.guard import Trial
from hubplugin.jobs.write import Applied
from hubplugin.measures.significance import Figure, Side
from hubplugin.validation import Figures
from hubplugin_faiss import files
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.base import nearness_of
from hubplugin_faiss.scale import IndexScale
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


def test_the_metric_is_read_off_the_index(tmp_path):
    file = tmp_path / "x.faiss"
    for metric, vectors, expected in (
        (IP, GALLERY, "cosine"),
        (IP, 3 * GALLERY, "dot"),
        (L2, GALLERY, "euclidean"),
    ):
        cases.written(file, cases.filled("Flat", vectors, metric))
        assert open_store(f"faiss:{file}").metric == expected
    assert open_store(f"faiss:{file}?metric=cosine").metric == "cosine"


@pytest.mark.parametrize(
    ("kind", "told"),
    [*((kind, 0.3) for kind in ("PQ4x4np", "IVF4,SQ4", "PQ4x4np,RFlat")), ("PCA12,SQ8", None), ("PCA8,Flat", None),
     *((kind, 0.08) for kind in ("SQ8", "SQ4", "HNSW8,SQ8"))],
)  # fmt: skip
@pytest.mark.parametrize(("metric", "other"), [(L2, "euclidean"), (IP, "dot")])
def test_the_metric_is_cosine_where_codes_have_changed_unit_lengths_and_no_others(
    tmp_path, kind, metric, other, told
):
    """told: how far logarithms of lengths spread that codes let through; codes of some components let none through."""
    assert metric_seen(tmp_path, kind, metric, 0.0) == "cosine"
    assert told is None or metric_seen(tmp_path, kind, metric, told) == other


@pytest.mark.parametrize(
    ("kind", "metric", "other"),
    [("PQ4x8np", IP, "dot"), ("PQ4x8np", L2, "euclidean"), ("SQ8", L2, "")],
)
def test_a_metric_that_codes_do_not_tell_is_said_to_be_assumed(
    tmp_path, kind, metric, other
):
    assert metric_seen(tmp_path, kind, metric, 0.0) == "cosine"
    path = tmp_path / "x.faiss"
    told = " ".join(
        hubplugin.apply(hubplugin_faiss.open_store(path), BANK, force=True).notes
    )
    assert ("cosine is assumed" in told and f"metric={other}" in told) == bool(other)
    hubplugin.remove(hubplugin_faiss.open_store(path))
    given = hubplugin_faiss.open_store(path, metric="cosine")
    assert "assumed" not in " ".join(hubplugin.apply(given, BANK, force=True).notes)


def metric_seen(folder: Path, kind: str, metric: int, lengths: float) -> str:
    """lengths: the spread of their logarithms."""
    vectors = GALLERY * np.random.default_rng(0).lognormal(0, lengths, (500, 1)).astype(
        np.float32
    )
    cases.written(folder / "x.faiss", cases.filled(kind, vectors, metric))
    return hubplugin_faiss.open_store(folder / "x.faiss").metric


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
        hubplugin.apply(hubplugin_faiss.open_store(file), bank, force=True)
        recalls.append(
            cases.recall(
                faiss.read_index(str(file)).search(queries, 10)[1], cases.best(truth)
            )
        )
        assert refresh(open_store(f"faiss:{file}")).stale == 0
        hubplugin.remove(open_store(f"faiss:{file}"))
    assert abs(recalls[1] - recalls[0]) < 0.02


def answered() -> tuple[np.ndarray, hubplugin.Bank]:
    """A gallery, and queries that each lie near to their answer, some of which are asked for often."""
    rng = np.random.default_rng(0)
    vectors, rows = cases.unit(rng.normal(size=(1000, 16))), rng.integers(0, 1000, 400)
    return vectors, hubplugin.Bank(
        cases.unit(vectors[rows] + 0.1 * rng.normal(size=(400, 16))), rows
    )


@pytest.mark.parametrize("kind", ["SQ8", "IVF4,Flat", "HNSW16"])
def test_known_answers_that_are_found_less_often_keep_a_file_as_it_was(
    tmp_path, monkeypatch, kind
):
    """The guard tries exact rankings, which know nothing of what an index itself loses."""
    vectors, bank = answered()
    index = cases.filled(kind, vectors)
    cases.look_everywhere(index)
    file = cases.written(tmp_path / "x.faiss", index)
    content = file.read_bytes()
    monkeypatch.setattr("hubplugin.jobs.correct.check", lambda *_: None)
    monkeypatch.setattr("hubplugin.jobs.correct.require_displacement", lambda *_: None)
    monkeypatch.setattr("hubplugin_faiss.index.require_recall", lambda *_: None)
    says = r"R@1 of \d+ bank queries with known answers from \d+\.\d to \d+\.\d \(\d+\.\d \+- \d\.\d points less\)"
    with pytest.raises(
        hubplugin.CorrectionRefused,
        match=f"would take {says}; nothing was changed; force=True",
    ):
        hubplugin.apply(hubplugin_faiss.open_store(file), bank, "nnn", k=1, alpha=5.0)
    assert file.read_bytes() == content
    with pytest.warns(UserWarning, match=f"the upgrade took {says}"):
        hubplugin.apply(
            hubplugin_faiss.open_store(file), bank, "nnn", k=1, alpha=5.0, force=True
        )
    assert file.read_bytes() != content


def log_in_lists(gap: float, file: Path) -> hubplugin.Bank:
    """Queries of half of a gallery, all moved into one direction, so that some targets are hubs; and an index of it
    that searches one list of sixteen."""
    rng = np.random.default_rng(0)
    vectors, rows = cases.unit(rng.normal(size=(1000, 16))), np.arange(500)
    rng.shuffle(rows)
    cases.written(file, cases.filled("IVF16,Flat", vectors))
    return hubplugin.Bank(
        cases.unit(
            vectors[rows] + 0.25 * rng.normal(size=(500, 16)) + gap * np.eye(16)[0]
        ),
        rows,
    )


def test_what_offsets_gain_for_the_queries_they_were_fitted_on_hides_no_loss(
    tmp_path, monkeypatch
):
    """The bank's own find more first, 25.8 to 30.6 %, though half of what they gain exactly is lost in lists."""
    file = tmp_path / "x.faiss"
    bank = log_in_lists(0.35, file)
    content = file.read_bytes()
    monkeypatch.setattr("hubplugin_faiss.index.require_recall", lambda *_: None)
    none = Side(0.3, 0.3, 0.001, 500, "queries", Figure(0.0, -0.002, 0.002))
    raw = Figures("is", {}, 500, 1.0, 0.0, 0.1, 0.1, none, 1.0)
    unchanged = Trial(**vars(raw), raw=raw, noise=0.1, bank=BankProfile(500))
    monkeypatch.setattr("hubplugin.jobs.correct.check", lambda *_: unchanged)
    says = r"where held-out ones gain 0\.0 by an exact ranking\); nothing was changed"
    with pytest.raises(hubplugin.CorrectionRefused, match=says):
        hubplugin.apply(hubplugin_faiss.open_store(file), bank, "dbsn", tau=0.05)
    assert file.read_bytes() == content


def test_what_held_out_queries_gain_makes_up_for_what_lists_lose(tmp_path, monkeypatch):
    file = tmp_path / "x.faiss"
    bank = log_in_lists(0.35, file)
    monkeypatch.setattr("hubplugin_faiss.index.require_recall", lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hubplugin.apply(hubplugin_faiss.open_store(file), bank, "dbsn", tau=0.05)


LISTS_AND_REFINED = "IVF8,SQ8", "IVF8,PQ8x4fs", "PQ4x8np,RFlat", "IVF8,PQ4x8np,RFlat"


@pytest.mark.parametrize(
    "kind", cases.slow_but({"IVF8,PQ8x4fs", "PQ4x8np,RFlat"}, LISTS_AND_REFINED)
)
@pytest.mark.parametrize("metric", [IP, L2])
def test_an_inspection_sees_lists_and_refined_indexes_whole_and_what_plain_faiss_adds(
    tmp_path, kind, metric
):
    rng = np.random.default_rng(12)
    centre = 0.5 * rng.normal(size=16)
    bank, gallery, live = (
        cases.unit(rng.normal(size=(n, 16)) + centre + at)
        for n, at in ((300, 0.5), (2000, 0), (300, 0.5))
    )
    index = cases.filled(kind, gallery, metric)
    cases.look_everywhere(index)
    file = cases.written(tmp_path / "x.faiss", index)
    hubplugin.apply(hubplugin_faiss.open_store(file), bank, force=True)
    seen = hubplugin.inspect(hubplugin_faiss.open_store(file), live)
    assert (seen.count, seen.missing, seen.stale, seen.attention) == (2000, 0, 0, [])
    assert seen.hubness.live
    assert seen.hubness.corrected < 0.8 * seen.hubness.raw
    cases.grow(file, np.ascontiguousarray(live))
    seen = hubplugin.inspect(hubplugin_faiss.open_store(file), live)
    assert 0.9 * 300 <= seen.stale <= 300
    assert any("run refresh" in each for each in seen.attention)
    refresh(hubplugin_faiss.open_store(file))
    assert hubplugin.inspect(hubplugin_faiss.open_store(file), live).stale == 0


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


def nearness_now(index: faiss.Index, model: hubplugin.OffsetModel) -> float:
    """What an upgrade would take for it."""
    handler = handler_for(index)
    return nearness_of(
        model.terms[0].bank,
        np.concatenate([vectors for vectors, _ in handler.sample()]),
        handler.count,
    )


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
    before = nearness_now(index, kept)
    scale = IndexScale.of(handler_for(index), kept)
    hubplugin_faiss.add(index, newcomers, kept)
    assert nearness_now(index, kept) > before
    assert IndexScale.of(handler_for(index), kept) == scale
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


@pytest.mark.parametrize("kind", ["SQfp16", "SQbf16", "IVF4,SQbf16", "HNSW8,SQfp16"])
def test_newcomers_have_the_offset_of_what_the_codes_keep_of_them(
    tmp_path, model, kind
):
    file = cases.written(tmp_path / "x.faiss", cases.filled(kind, GALLERY))
    applied(file, model, force=True)
    index, _ = hubplugin_faiss.read_index(file)
    hubplugin_faiss.add(
        index, cases.unit(np.random.default_rng(0).normal(size=(300, 16))), model
    )
    cases.written(file, index)
    assert inspect(open_store(f"faiss:{file}"), queries=0).stale == 0


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
    index.add(zero)
    cases.written(file, index)
    refresh(open_store(f"faiss:{file}"))
    seen = inspect(open_store(f"faiss:{file}"), queries=0)
    assert (seen.stale, seen.invalid_vectors.count) == (0, 3)
    assert np.abs(
        cases.stored(hubplugin_faiss.read_index(file)[0])[-3:]
    ).max() < cases.tolerance(kind)


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
    index = hubplugin_faiss.upgrade(cases.filled(kind, GALLERY), model)
    cases.put(index, foreign_rows(), np.arange(500, 504))
    file = cases.written(tmp_path / "x.faiss", index)
    Path(f"{file}.hub").mkdir()
    model.save(f"{file}.hub/model.hub")

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

    with pytest.warns(
        UserWarning, match=r"of 504 entries 3 with vectors that the model cannot judge"
    ):
        in_memory = hubplugin_faiss.upgrade(index, model)
    for upgraded in (hubplugin_faiss.read_index(file)[0], in_memory):
        stored = cases.stored(upgraded)
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
    "given", [{"method": "nnn"}, {"tau": 0.1}, {"learn": True}, {"group_by": "shop"}]
)
def test_a_fitted_model_takes_no_second_method_and_no_bank(tmp_path, model, given):
    faiss.write_index(cases.filled("IVF4,Flat", GALLERY), str(tmp_path / "x.faiss"))
    with pytest.raises(
        hubplugin.InputError,
        match=f"its method already: leave out {next(iter(given))}=$",
    ):
        applied(tmp_path / "x.faiss", model, **given)


@pytest.mark.parametrize("of", ["no model", "another model"])
def test_an_index_that_was_upgraded_in_memory_gets_other_offsets(tmp_path, model, of):
    file, other = tmp_path / "x.faiss", hubplugin.fit(GALLERY, BANK, "csls", k=3)
    upgraded = hubplugin_faiss.upgrade(
        cases.filled("IVF4,Flat", GALLERY), np.zeros(500) if of == "no model" else other
    )
    faiss.write_index(upgraded, str(file))
    if of == "another model":
        Path(f"{file}.hub").mkdir()
        other.save(f"{file}.hub/model.hub")
    assert applied(file, model).scanned == 500
    np.testing.assert_allclose(
        np.sort(cases.stored(faiss.read_index(str(file)))),
        np.sort(model.offsets(GALLERY)),
        atol=1e-5,
    )


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


@pytest.mark.parametrize(
    "kind",
    ["IVF4,SQ8", "IVF4,PQ4x4fs", "IDMap2,Flat", "HNSW8", "PCA8,Flat", "PQ4x8np,RFlat"],
)
def test_an_index_whose_parts_do_not_fit_is_refused_before_it_is_looked_into(
    tmp_path, kind
):
    index = cases.filled(kind, GALLERY)
    index.ntotal += 1
    file = cases.written(tmp_path / "x.faiss", index)
    for way in (hubplugin_faiss.read_index, hubplugin_faiss.open_store):
        with pytest.raises(
            hubplugin.StoreError,
            match=r"Faiss cannot read|is damaged: .*, expected 501; restore it",
        ):
            way(file)


def test_the_same_file_may_be_opened_by_a_url_that_is_wrong_only_in_its_options(path):
    with pytest.raises(hubplugin.InputError, match="unknown option 'color'"):
        open_store(f"faiss:{path}?color=red")


def on_disk(index: faiss.Index, folder: Path) -> None:
    """Puts the lists of `index` into the file x.ivfdata, and writes it to x.faiss."""
    ivf = faiss.extract_index_ivf(index)
    lists = faiss.OnDiskInvertedLists(
        ivf.nlist, ivf.code_size, str(folder / "x.ivfdata")
    )
    lists.merge_from_1(ivf.invlists)
    ivf.replace_invlists(lists, True)
    lists.this.disown()
    faiss.write_index(index, str(folder / "x.faiss"))


def no_folder_flushed(descriptor: int) -> None:
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise OSError(22, "Invalid argument")


@pytest.mark.parametrize("step", ["apply", "remove"])
def test_an_index_in_a_folder_that_cannot_be_flushed_is_whole(
    tmp_path, model, monkeypatch, step
):
    file, index = tmp_path / "x.faiss", cases.filled("IVF4,Flat", GALLERY)
    faiss.write_index(index, str(file))
    if step == "remove":
        applied(file, model)
    monkeypatch.setattr(os, "fsync", no_folder_flushed)
    run = {
        "apply": lambda: applied(file, model),
        "remove": lambda: hubplugin_faiss.open_store(file).remove(),
    }[step]
    with pytest.warns(
        UserWarning,
        match=r"x\.faiss' is written; the folder could not be flushed: Invalid argument",
    ):
        run()
    found, beside = hubplugin_faiss.read_index(file)
    assert (beside is None) == (step == "remove")
    expected = (
        index
        if step == "remove"
        else hubplugin_faiss.upgrade(cases.filled("IVF4,Flat", GALLERY), model)
    )
    np.testing.assert_array_equal(found.search(BANK, 5)[1], expected.search(BANK, 5)[1])
    assert len(os.listdir(tmp_path)) == 1 + (step != "remove")
    assert step == "remove" or sorted(os.listdir(f"{file}.hub")) == [
        "1.model",
        "lock",
        "manifest.json",
    ]


@pytest.mark.parametrize("kind", ["IVF4,Flat", "PCA8,IVF4,SQ8"])
def test_lists_on_disk_are_refused_until_they_are_loaded_into_memory(
    tmp_path, model, kind
):
    file, before = tmp_path / "x.faiss", cases.filled(kind, GALLERY)
    found = before.search(BANK, 5)[1]
    on_disk(before, tmp_path)
    for way in (
        open_store,
        hubplugin_faiss.read_index,
        lambda path: hubplugin_faiss.upgrade(before, model),
    ):
        with pytest.raises(
            hubplugin.StoreError, match=r"lists on disk, in '.*x\.ivfdata'; load them"
        ) as caught:
            way(f"{'faiss:' if way is open_store else ''}{file}")
    index = faiss.read_index(str(file))
    _, _, call = str(caught.value).partition("then go on: ")
    exec(call, {"faiss": faiss, "index": index})
    np.testing.assert_array_equal(index.search(BANK, 5)[1], found)
    faiss.write_index(index, str(file))
    (tmp_path / "x.ivfdata").unlink()
    applied(file, model, force=True)
    assert open_store(f"faiss:{file}").correction().active


def test_a_file_larger_than_memory_is_refused_before_it_is_read(
    tmp_path, model, monkeypatch
):
    file = cases.written(tmp_path / "x.faiss", cases.filled("IVF4,Flat", GALLERY))
    size = file.stat().st_size
    monkeypatch.setattr(faiss, "read_index", None)
    monkeypatch.setattr(files, "available_memory", lambda: size - 1)
    with pytest.raises(
        hubplugin.StoreError,
        match=rf"x\.faiss' takes {size:,} bytes of memory, and {size - 1:,} are",
    ):
        open_store(f"faiss:{file}")


@pytest.mark.parametrize("copies", [1, 2])
def test_an_index_that_finds_no_memory_for_the_new_one_is_refused_before_the_gallery_is_read(
    tmp_path, model, monkeypatch, copies
):
    file = cases.written(tmp_path / "x.faiss", cases.filled("IVF4,Flat", GALLERY))
    if copies == 2:  # one without offsets, and one with others
        applied(file, model)
    store, size, content = (
        open_store(f"faiss:{file}"),
        file.stat().st_size,
        file.read_bytes(),
    )
    monkeypatch.setattr(files, "available_memory", lambda: copies * size - 1)
    monkeypatch.setattr(type(store), "scan", None)
    says = f"takes {copies * size:,} bytes of memory, and {copies * size - 1:,} are available"
    for run in (lambda: hubplugin.apply(store, BANK), lambda: applied(file, model)):
        with pytest.raises(hubplugin.StoreError, match=says):
            run()
    assert file.read_bytes() == content


def test_the_memory_that_is_available_is_no_more_than_a_container_may_have(
    tmp_path, monkeypatch
):
    unlimited = files.available_memory()
    if unlimited is None:
        pytest.skip("this system does not say how much memory is available")
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(files, "LIMITS", (str(tmp_path / "nowhere"), str(limit)))
    for text, expected in (("1048576\n", 1 << 20), ("max\n", None)):
        limit.write_text(text)
        assert files.available_memory() == expected or expected is None


def test_explain_names_what_the_index_itself_appends_to_a_query(tmp_path, rng):
    vectors = rng.normal(size=(60, 4)).astype(np.float32)
    model = hubplugin.fit(
        vectors, rng.normal(size=(40, 4)), "is", metric="dot", tau=0.5
    )
    upgraded = hubplugin_faiss.upgrade(cases.filled("Flat", vectors), model)
    path = cases.written(tmp_path / "photos.faiss", upgraded)
    explained = open_store(f"faiss:{path}").explain(vectors[0])
    inside = vectors[:1]
    for number in range(upgraded.chain.size()):
        inside = upgraded.chain.at(number).apply(inside)
    np.testing.assert_allclose(
        [*vectors[0], *explained.request["appended"]], inside[0], rtol=1e-6
    )
    assert "4 components as before" in explained.text
