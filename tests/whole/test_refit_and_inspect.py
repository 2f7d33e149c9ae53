"""Corrections looked after, on real vectors and real engines: what is worse is refused, what is wrong is seen."""

import dataclasses
import json
import re

import faiss
import numpy as np
import pytest
from scipy.stats import skew

import hubplugin
from hubplugin.jobs.correct import refit
from hubplugin.jobs.results import DRIFTED, HubnessNow, Inspection
from hubplugin.jobs.versus import WORSE, OldVersusNew
from hubplugin.jobs.write import write
from hubplugin.measures.significance import Figure, Side
from hubplugin.metric import Metric
from hubplugin.model import HubnessAtFit
from hubplugin.registry import open_store
from hubplugin.results import Hub
from hubplugin.store import Correction
from hubplugin.validation import Figures
from tests.whole.commands import hubplugin as typed
from tests.whole.commands import write_photos

pytestmark = pytest.mark.slow

MODEL = hubplugin.fit(None, np.eye(3), "nnn", k=2)
FIT = HubnessAtFit(queries=200, raw=2.0, corrected=0.5, chance=0.3, largest=0.02)


def unwrapped(result) -> str:
    """The text of a result without the ends of its lines."""
    return " ".join(str(result).split())


@pytest.fixture
def photos(real, tmp_path):
    """An index of real vectors, corrected by a model of half of the bank."""
    targets = write_photos(tmp_path, real)
    store = open_store(f"faiss:{tmp_path / 'photos.faiss'}")
    write(store, hubplugin.fit(targets, real["bank_queries"][::2], "nnn", k=8))
    return store


def test_a_refit_keeps_the_method_and_its_parameters_on_a_new_bank(photos, real):
    before = photos.correction().model
    done = refit(photos, real["bank_queries"][1::2])
    found = photos.correction().model
    assert (found.method, found.parameters["k"]) == ("nnn", 8)
    assert (
        found.bank_fingerprint
        == hubplugin.fit(None, real["bank_queries"][1::2], "nnn").bank_fingerprint
    )
    assert photos.previous().fingerprint == before.fingerprint
    assert done.versus.new.skewness < done.versus.raw.skewness
    assert done.versus.figures in unwrapped(done)
    assert done.trial is not None


def test_a_dry_run_says_where_the_new_bank_is_smaller_and_writes_nothing(photos, real):
    before = photos.path.read_bytes()
    said = "the new bank has 400 queries, the old one had 1,250"
    fewer = refit(photos, real["bank_queries"][1:800:2], dry_run=True, force=True)
    assert said in unwrapped(fewer)
    done = refit(photos, real["bank_queries"], dry_run=True, force=True)
    assert "the new bank has" not in unwrapped(done)
    assert (done.written, done.scanned) == (False, 1200)
    assert photos.path.read_bytes() == before


def test_a_worse_correction_is_refused_with_both_figures_and_changes_nothing(
    photos, real
):
    before = photos.path.read_bytes()
    with pytest.raises(
        hubplugin.CorrectionRefused,
        match=r"from \d+\.\d+ to \d+\.\d+.*nothing was changed",
    ):
        refit(photos, real["bank_queries"][:500], "nnn", k=1, alpha=4.0)
    assert photos.path.read_bytes() == before
    assert photos.previous() is None


def test_a_refit_without_queries_or_without_a_correction_says_what_is_missing(
    photos, real
):
    with pytest.raises(
        hubplugin.InputError, match=r"no queries are recorded.*; pass bank="
    ):
        refit(photos)
    photos.remove()
    with pytest.raises(hubplugin.StoreError, match="no active correction"):
        refit(photos, real["bank_queries"])


def test_learning_without_answers_is_refused_before_the_gallery_is_read(photos, real):
    worked = []
    compute = hubplugin.Compute(progress=lambda *done: worked.append(done))
    with pytest.raises(hubplugin.InputError, match="pass a Bank with answers="):
        hubplugin.apply(photos, real["bank_queries"], learn=True, compute=compute)
    assert worked == []


def figures(skewness: float, recall: float | None = None) -> Figures:
    right = None
    if recall is not None:
        right = Side(0.5, recall, 0.01, 100, "queries", Figure(0.0, 0.0, 0.0))
    return Figures("none", {}, 100, skewness, 0.1, 0.1, 0.1, right)


def versus(old: Figures, new: Figures, gain=None, error=None) -> OldVersusNew:
    return OldVersusNew(figures(2), old, new, gain, error)


def test_recall_decides_where_it_is_known_and_hubness_elsewhere():
    known = figures(0.5, 0.5)
    assert versus(figures(0.5), figures(0.5 + 1.9 * WORSE)).objection is None
    assert versus(figures(0.5), figures(0.5 + 2.1 * WORSE)).objection
    assert versus(known, figures(1.9, 0.49), -0.01, 0.006).objection is None
    assert versus(known, figures(0.1, 0.48), -0.02, 0.006).objection


def test_a_smaller_bank_replaces_a_larger_one_only_where_a_fall_is_ruled_out():
    known = figures(0.5, 0.5)
    fewer = {"queries": 200, "share": 0.1}
    risky = OldVersusNew(known, known, known, -0.02, 0.03, **fewer)
    assert "do not rule out a fall of 8.0 points" in str(risky.objection)
    hopeful = OldVersusNew(known, known, known, 0.02, 0.03, **fewer)
    assert "do not rule out a fall of 4.0 points" in str(hopeful.objection)
    assert OldVersusNew(known, known, known, 0.05, 0.03, **fewer).objection is None
    as_many = OldVersusNew(known, known, known, -0.02, 0.03, 200, 1.0)
    assert as_many.objection is None


def test_a_whole_correction_needs_no_attention(photos, real):
    seen = hubplugin.inspect(photos, real["bank_queries"][1::2])
    assert seen.attention == []
    assert (seen.missing, seen.stale, seen.foreign) == (0, 0, 0)
    assert (seen.hubness.live, seen.hubness.queries) == (True, 200)
    assert seen.hubness.corrected < seen.hubness.raw
    assert 0.4 < seen.drift < DRIFTED


def test_queries_of_another_kind_are_drift_and_those_of_the_bank_are_no_live_ones(
    photos, real, caplog
):
    apart = real["bank_queries"][:300] + 0.1 * np.sign(np.arange(384) % 2 - 0.5).astype(
        np.float32
    )
    seen = hubplugin.inspect(photos, apart)
    assert seen.drift > DRIFTED
    assert any("refit" in each for each in seen.attention)
    assert not caplog.records
    again = hubplugin.inspect(photos, real["bank_queries"][::2])
    assert (again.drift, again.hubness.live) == (None, False)
    assert (
        "of the live queries 0 are not in the bank, and 100 are needed" in caplog.text
    )


def test_live_queries_need_a_correction_and_no_answers(photos, real):
    with pytest.raises(
        hubplugin.InputError, match=r"without answers; evaluate measures R@1"
    ):
        hubplugin.inspect(
            photos, hubplugin.Bank(real["test_queries"][:150], np.arange(150))
        )
    photos.remove()
    with pytest.raises(hubplugin.StoreError, match="no active correction"):
        hubplugin.inspect(photos, real["bank_queries"])
    (line,) = hubplugin.inspect(photos).attention
    assert "no correction" in line


def test_what_is_found_too_often_is_named_and_hubness_is_told_beside_that_of_the_fit(
    tmp_path, real
):
    targets = write_photos(tmp_path, real)
    bank = real["bank_queries"] / np.linalg.norm(
        real["bank_queries"], axis=1, keepdims=True
    )
    store = open_store(f"faiss:{tmp_path / 'photos.faiss'}")
    hubplugin.apply(store, bank, "nnn", k=8)
    model = store.correction().model
    asked = bank[np.linspace(0, len(bank) - 1, 200).astype(int)].astype(np.float64)
    scores = asked @ targets.T.astype(np.float64)
    for expected, offsets in (
        (model.hubness_at_fit.raw, 0),
        (model.hubness_at_fit.corrected, model.offsets(targets)),
    ):
        found = np.argsort(-(scores + offsets), axis=1)[:, :10]
        occurrence = np.bincount(found.ravel(), minlength=1200)
        assert expected == pytest.approx(skew(occurrence), rel=0.01)
    assert model.hubness_at_fit.largest == pytest.approx(
        occurrence.max() / 200, abs=0.01
    )
    seen = hubplugin.inspect(store)
    assert (seen.attention, seen.hubness.live) == ([], False)
    assert seen.hubness.corrected == pytest.approx(seen.hubness.fit.corrected, rel=0.01)
    planted = bank.mean(axis=0, keepdims=True) / np.linalg.norm(bank.mean(axis=0))
    index = faiss.read_index(str(tmp_path / "photos.faiss"))
    index.add(planted.astype(np.float32))
    faiss.write_index(index, str(tmp_path / "photos.faiss"))
    seen = hubplugin.inspect(open_store(store.url))
    assert any(
        "found too often" in each and ": 1200 " in each for each in seen.attention
    )
    assert max(seen.hubness.hubs, key=lambda hub: hub.found_by["corrected"]).id == 1200
    assert seen.stale_ids == [1200]
    assert "stale, for instance: 1200" in unwrapped(seen)
    assert "refresh" in [step.job for step in seen.page().steps]


def test_what_was_counted_at_the_fit_lies_in_the_model_and_makes_no_other(real):
    model = hubplugin.fit(real["test_targets"], real["bank_queries"], "nnn")
    with_fit = dataclasses.replace(model, hubness_at_fit=FIT)
    assert hubplugin.OffsetModel.from_bytes(with_fit.to_bytes()).hubness_at_fit == FIT
    assert hubplugin.OffsetModel.from_bytes(model.to_bytes()).hubness_at_fit is None
    assert with_fit.fingerprint == model.fingerprint


def hubs(*corrected: int) -> list[Hub]:
    """Targets 7, 8 and so on, found by so many queries in a corrected search."""
    return [
        Hub(row, str(row), {"raw": 1, "corrected": count})
        for row, count in enumerate(corrected, 7)
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"missing": 49}, None),
        ({"missing": 30, "stale": 21}, "run refresh"),
        ({"foreign": 1}, "carry something else"),
        ({"drift": 1.0}, "no longer like the bank"),
        (
            {"hubness": HubnessNow(200, True, 3.0, 3.6, 0.3)},
            "hubness is worse than raw",
        ),
        ({"hubness": HubnessNow(200, True, 3.0, 3.4, 0.3)}, None),
        ({"hubness": HubnessNow(200, True, 0.5, 0.9, 0.3)}, None),
        ({"hubness": HubnessNow(200, True, 3.0, 1.4, 0.3, FIT)}, None),
        ({"correction": None}, "no correction"),
        ({"hubness": HubnessNow(200, True, 3.0, 1.0, 0.3, FIT, hubs(14, 10))}, None),
        (
            {"hubness": HubnessNow(200, True, 3.0, 1.0, 0.3, FIT, hubs(18, 10))},
            "found too often (2.0% at most at the fit): 7 9.0%",
        ),
        (
            {
                "correction": Correction(MODEL, False),
                "missing": 1000,
            },
            "the correction is half-written, and searches are raw: run apply",
        ),
    ],
)
def test_attention_is_asked_for_what_somebody_can_mend(changes, says):
    fine = Inspection(
        "faiss:x",
        Metric.COSINE,
        3,
        1000,
        Correction(MODEL, True),
    )
    seen = dataclasses.replace(fine, **changes)
    assert [says in each for each in seen.attention] == ([] if says is None else [True])


def test_the_commands_end_with_the_exit_status_that_cron_acts_upon(
    photos, real, tmp_path
):
    np.save(tmp_path / "new.npy", real["bank_queries"][1::2])
    np.save(tmp_path / "few.npy", real["bank_queries"][:5])
    store = photos.url
    seen = typed("inspect", store, "--live", tmp_path / "new.npy", "--json")
    assert (seen.returncode, json.loads(seen.stdout)["attention"]) == (0, []), (
        seen.stderr
    )
    assert typed("refit", store, "--bank", tmp_path / "few.npy").returncode == 3
    assert typed("refit", store).returncode == 1
    assert typed("refit").returncode == 2
    assert (
        typed("refit", store, "--bank", tmp_path / "new.npy", "--quiet").returncode == 0
    )
    index = faiss.read_index(store.removeprefix("faiss:"))
    index.add(
        np.ascontiguousarray(np.tile(real["bank_targets"][:300], (1, 1)), np.float32)
    )
    faiss.write_index(index, store.removeprefix("faiss:"))
    seen = typed("inspect", store, "--json")
    found = json.loads(seen.stdout)
    assert seen.returncode == 4
    assert any("run refresh" in each for each in found["attention"])
    quiet = typed("rollback", store, "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    typed("remove", store)
    assert typed("inspect", store).returncode == 4


@pytest.fixture
def clicked(real, tmp_path):
    """A raw index of real vectors, and a log of what people asked of it, with clicks."""
    targets = write_photos(tmp_path, real)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, len(targets), 900)
    queries = real["test_queries"][rows] + 0.02 * rng.normal(
        size=(900, targets.shape[1])
    )
    return open_store(f"faiss:{tmp_path / 'photos.faiss'}"), hubplugin.Bank(
        queries.astype(np.float32), rows
    )


def test_a_log_with_clicks_teaches_a_store_a_map_and_what_it_gains_is_said(clicked):
    store, log = clicked
    said = unwrapped(hubplugin.apply(store, log, learn=True))
    assert re.search(
        r"mapped at strength [\d.]+, as \d+ pairs taught.*; over the raw search, asked before: R@1",
        said,
    )
    assert re.search(
        r"not asked before: R@1 \d+\.\d -> \d+\.\d \(95 % interval of the change .* pairs\)",
        said,
    )
    first = store.correction().model
    assert first.query_map.strength > 0
    assert refit(store, log).model.query_map.pairs == first.query_map.pairs, (
        "a correction with a map stays one"
    )
    assert refit(store, log, learn=False, force=True).model.query_map is None
    assert refit(store, log, dry_run=True).model.query_map is None


def test_a_refit_compares_maps_on_queries_that_the_old_one_has_not_seen(clicked):
    store, log = clicked
    old = hubplugin.Bank(log.queries[:600], log.answers[:600])
    hubplugin.apply(store, old, learn=True)
    beside = refit(store, log, dry_run=True).versus
    assert beside.new.queries == beside.old.queries == 300
    assert abs(beside.gain) < 0.1, (
        "the old one would be ahead by 0.3 on what it was taught"
    )
    model = store.correction().model
    asked = log.queries[600:] / np.linalg.norm(
        log.queries[600:], axis=1, keepdims=True
    )  # as Faiss has to be asked
    found = store.search(asked, 1).ids
    assert beside.old.recall == pytest.approx(
        np.mean(
            [each == [row] for each, row in zip(found, log.answers[600:], strict=True)]
        )
    )
    assert model.query_map.strength > 0
    assert refit(store, old, dry_run=True).versus.gain == pytest.approx(0, abs=0.01), (
        "both have seen all of it"
    )


def test_judged_clicks_are_ids_of_the_store(clicked):
    store, log = clicked
    judged = hubplugin.Bank(log.queries[:80], log.answers[:80])
    done = hubplugin.apply(store, log, learn=True, judged=judged, dry_run=True)
    assert done.model.query_map.strength > 0


def test_what_cannot_have_a_map_is_refused_before_anything_is_read(
    clicked, monkeypatch
):
    store, log = clicked
    monkeypatch.setattr(type(store), "maps_queries", False)
    with pytest.raises(
        hubplugin.InputError,
        match=r"photos.faiss holds no map of queries: leave out learn=",
    ):
        hubplugin.apply(store, log, learn=True)
    assert store.correction() is None
