"""Corrections looked after, on real vectors and real engines: what is worse is refused, what is wrong is seen."""

import dataclasses
import re

import faiss
import numpy as np
import pytest
from scipy.stats import skew

from hubplugin import (
    Bank,
    Compute,
    CorrectionRefused,
    InputError,
    OffsetModel,
    StoreError,
    apply,
    fit,
    inspect,
    open_store,
    refit,
)
from hubplugin.jobs.results import DRIFTED, HubnessNow, Inspection
from hubplugin.jobs.versus import WORSE, OldVersusNew
from hubplugin.measures.significance import Figure, Side
from hubplugin.metric import Metric
from hubplugin.model import HubnessAtFit
from hubplugin.results import Hub
from hubplugin.store import Correction
from hubplugin.validation import Figures
from tests.commands import STORE, asked, run, typed, unwrapped
from tests.galleries import unit
from tests.refusals import refused

pytestmark = pytest.mark.slow

FIT = HubnessAtFit(queries=200, raw=2.0, corrected=0.5, chance=0.3, largest=0.02)


@pytest.fixture
def bank(real):
    return real["bank_queries"]


@pytest.fixture
def photos(real, bank, here):
    """An index of real vectors, corrected by a model of half of the bank."""
    store = open_store(STORE)
    model = fit(real["test_targets"], bank[::2], "nnn", k=8)
    apply(store, model, force=True)
    return store


def add(vectors):
    """Plain Faiss adds vectors to the index."""
    index = faiss.read_index("photos.faiss")
    index.add(np.ascontiguousarray(vectors, np.float32))
    faiss.write_index(index, "photos.faiss")


def test_a_refit_keeps_the_method_and_its_parameters_on_a_new_bank(photos, bank):
    before = photos.correction().model
    done = refit(photos, bank[1::2])
    found = photos.correction().model
    assert (found.method, found.parameters["k"]) == ("nnn", 8)
    twin = fit(None, bank[1::2], "nnn")
    assert found.bank_fingerprint == twin.bank_fingerprint
    assert photos.previous().fingerprint == before.fingerprint
    assert done.versus.new.skewness < done.versus.raw.skewness
    assert done.versus.figures in unwrapped(done)
    assert done.trial is not None


def test_a_dry_run_says_where_the_new_bank_is_smaller_and_writes_nothing(photos, bank):
    before = photos.path.read_bytes()
    said = "the new bank has 400 queries, the old one had 1,250"
    fewer = refit(photos, bank[1:800:2], dry_run=True, force=True)
    assert said in unwrapped(fewer)
    done = refit(photos, bank, dry_run=True, force=True)
    assert "the new bank has" not in unwrapped(done)
    assert (done.written, done.scanned) == (False, 1200)
    assert photos.path.read_bytes() == before


def test_a_worse_correction_is_refused_with_both_figures_and_changes_nothing(
    photos, bank
):
    before = photos.path.read_bytes()
    said = r"from \d+\.\d+ to \d+\.\d+.*nothing was changed"
    with refused(CorrectionRefused, said):
        refit(photos, bank[:500], "nnn", k=1, alpha=4.0)
    assert photos.path.read_bytes() == before
    assert photos.previous() is None


def test_what_a_job_lacks_is_said_before_the_gallery_is_read(photos, bank):
    worked = []
    compute = Compute(progress=lambda *done: worked.append(done))
    with refused(InputError, "pass a Bank with answers="):
        apply(photos, bank, learn=True, compute=compute)
    assert worked == []
    with refused(InputError, r"no queries are recorded.*; pass bank="):
        refit(photos)
    answered = Bank(bank[:150], np.arange(150))
    with refused(InputError, r"live queries have no answers; evaluate measures R@1"):
        inspect(photos, answered)
    photos.remove()
    for job in (refit, inspect):
        with refused(StoreError, "no active correction"):
            job(photos, bank)
    (line,) = inspect(photos).attention
    assert "no correction" in line


def figures(skewness, recall=None):
    right = None
    if recall is not None:
        right = Side(0.5, recall, 0.01, 100, "queries", Figure(0.0, 0.0, 0.0))
    return Figures("none", {}, 100, skewness, 0.1, 0.1, right)


def versus(old, new, gain=None, error=None, share=1.0):
    change = None
    if gain is not None:
        figure = Figure(gain, gain - 2 * error, gain + 2 * error)
        change = Side(0.5, 0.5 + gain, error, 100, "queries", figure)
    return OldVersusNew(figures(2), old, new, change, share)


def test_recall_decides_where_it_is_known_and_hubness_elsewhere():
    known = figures(0.5, 0.5)
    assert versus(figures(0.5), figures(0.5 + 1.9 * WORSE)).objection is None
    assert versus(figures(0.5), figures(0.5 + 2.1 * WORSE)).objection
    assert versus(known, figures(1.9, 0.49), -0.01, 0.006).objection is None
    assert versus(known, figures(0.1, 0.48), -0.02, 0.006).objection


def test_a_smaller_bank_replaces_a_larger_one_only_where_a_fall_is_ruled_out():
    known = figures(0.5, 0.5)
    risky = versus(known, known, -0.02, 0.03, share=0.1)
    assert "do not rule out a fall of 8.0 points" in str(risky.objection)
    hopeful = versus(known, known, 0.02, 0.03, share=0.1)
    assert "do not rule out a fall of 4.0 points" in str(hopeful.objection)
    assert versus(known, known, 0.05, 0.03, share=0.1).objection is None
    assert versus(known, known, -0.02, 0.03).objection is None


def test_a_whole_correction_needs_no_attention(photos, bank):
    seen = inspect(photos, bank[1::2])
    assert seen.attention == []
    assert (seen.missing, seen.stale, seen.foreign) == (0, 0, 0)
    assert (seen.hubness.live, seen.hubness.queries) == (True, 200)
    assert seen.hubness.corrected < seen.hubness.raw
    assert 0.4 < seen.drift < DRIFTED


def test_queries_of_another_kind_are_drift_and_those_of_the_bank_are_no_live_ones(
    photos, bank, caplog
):
    apart = 0.1 * np.sign(np.arange(384) % 2 - 0.5)
    seen = inspect(photos, bank[:300] + apart)
    assert seen.drift > DRIFTED
    assert any("refit" in each for each in seen.attention)
    assert not caplog.records
    again = inspect(photos, bank[::2])
    assert (again.drift, again.hubness.live) == (None, False)
    said = "only 0 live queries are not in the bank, and 100 are needed"
    assert said in caplog.text


def test_what_is_found_too_often_is_named_and_hubness_is_told_beside_that_of_the_fit(
    here, real
):
    targets, bank = unit(real["test_targets"]), unit(real["bank_queries"])
    store = open_store(STORE)
    apply(store, bank, "nnn", k=8)
    model = store.correction().model
    at_fit = model.hubness_at_fit
    asked = bank[np.linspace(0, len(bank) - 1, 200).astype(int)].astype(np.float64)
    scores = asked @ targets.T
    for expected, offsets in (
        (at_fit.raw, 0),
        (at_fit.corrected, model.offsets(targets)),
    ):
        found = np.argsort(-(scores + offsets), axis=1)[:, :10]
        occurrence = np.bincount(found.ravel(), minlength=1200)
        assert expected == pytest.approx(skew(occurrence), rel=0.01)
    assert at_fit.largest == pytest.approx(occurrence.max() / 200, abs=0.01)
    seen = inspect(store)
    assert (seen.attention, seen.hubness.live) == ([], False)
    assert seen.hubness.corrected == pytest.approx(seen.hubness.fit.corrected, rel=0.01)
    add(unit(bank.mean(axis=0, keepdims=True)))
    seen = inspect(open_store(STORE))
    (line,) = [each for each in seen.attention if "found too often" in each]
    assert ": 1200 " in line
    assert max(seen.hubness.hubs, key=lambda hub: hub.found_by["corrected"]).id == 1200
    assert seen.stale_ids == [1200]
    assert "stale, for instance: 1200" in unwrapped(seen)
    assert "refresh" in [step.job for step in seen.page().steps]


def test_what_was_counted_at_the_fit_lies_in_the_model_and_makes_no_other(real):
    model = fit(real["test_targets"], real["bank_queries"], "nnn")
    with_fit = dataclasses.replace(model, hubness_at_fit=FIT)
    assert OffsetModel.from_bytes(with_fit.to_bytes()).hubness_at_fit == FIT
    assert OffsetModel.from_bytes(model.to_bytes()).hubness_at_fit is None
    assert with_fit.fingerprint == model.fingerprint


def hubs(*corrected):
    """Targets 7, 8 and so on, found by so many queries in a corrected search."""
    return [
        Hub(row, str(row), {"raw": 1, "corrected": count})
        for row, count in enumerate(corrected, 7)
    ]


def hubness(raw, corrected, *more):
    return {"hubness": HubnessNow(200, True, raw, corrected, 0.3, *more)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"missing": 49}, None),
        ({"missing": 30, "stale": 21}, "run refresh"),
        ({"foreign": 1}, "carry a foreign value"),
        ({"drift": 1.0}, "no longer like the bank"),
        (hubness(3.0, 3.6), "hubness is worse than raw"),
        (hubness(3.0, 3.4), None),
        (hubness(0.5, 0.9), None),
        (hubness(3.0, 1.4, FIT), None),
        (hubness(3.0, 1.0, FIT, hubs(14, 10)), None),
        (
            hubness(3.0, 1.0, FIT, hubs(18, 10)),
            "found too often (2.0% at most at the fit): 7 9.0%",
        ),
        ({"correction": None}, "no correction"),
        (
            {"correction": Correction(None, False), "missing": 1000},
            "the correction is half-written, and searches are raw: run apply",
        ),
    ],
)
def test_attention_is_asked_for_what_somebody_can_mend(changes, says):
    correction = Correction(None, True)
    fine = Inspection("faiss:x", Metric.COSINE, 3, 1000, correction)
    seen = dataclasses.replace(fine, **changes)
    assert [says in each for each in seen.attention] == ([] if says is None else [True])


def test_the_commands_end_with_the_exit_status_that_cron_acts_upon(photos, real, bank):
    np.save("new.npy", bank[1::2])
    np.save("few.npy", bank[:50])
    assert asked("inspect", STORE, "--live", "new.npy")["attention"] == []
    typed("refit", STORE, "--bank", "few.npy", status=3)
    typed("refit", STORE, status=1)
    typed("refit", status=2)
    typed("refit", STORE, "--bank", "new.npy", "--quiet")
    add(real["bank_targets"][:300])
    attention = asked("inspect", STORE, status=4)["attention"]
    assert any("run refresh" in each for each in attention)
    quiet = run("rollback", STORE, "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    typed("remove", STORE)
    typed("inspect", STORE, status=4)


@pytest.fixture
def clicked(real, here):
    """A raw index of real vectors, and a log of what people asked of it, with clicks."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 1200, 900)
    queries = real["test_queries"][rows] + 0.02 * rng.normal(size=(900, 384))
    log = Bank(unit(queries), rows)
    return open_store(STORE), log


def test_a_log_with_clicks_teaches_a_store_a_map_and_what_it_gains_is_said(clicked):
    store, log = clicked
    said = unwrapped(apply(store, log, learn=True))
    for part in (
        r"mapped at strength [\d.]+ \(learned from \d+ pairs\).*; over the raw search, asked for before: R@1",
        r"not asked for before: R@1 \d+\.\d -> \d+\.\d \(95 % interval of the change .* pairs\)",
    ):
        assert re.search(part, said)
    first = store.correction().model.query_map
    assert first.strength > 0
    again = refit(store, log).model.query_map
    assert again.pairs == first.pairs, "a correction with a map stays one"
    without = refit(store, log, learn=False, force=True)
    assert without.model.query_map is None
    assert refit(store, log, dry_run=True).model.query_map is None


def test_a_refit_compares_maps_on_queries_that_the_old_one_has_not_seen(clicked):
    store, log = clicked
    old = Bank(log.queries[:600], log.answers[:600])
    apply(store, old, learn=True)
    beside = refit(store, log, dry_run=True).versus
    assert beside.new.queries == beside.old.queries == 300
    # On what it was taught the old one would be ahead by 0.3.
    assert abs(beside.change.change.value) < 0.1
    found = store.search(log.queries[600:], 1).ids
    right = np.ravel(found) == log.answers[600:]
    assert beside.old.recall == pytest.approx(right.mean())
    assert store.correction().model.query_map.strength > 0
    # Both have seen all of it.
    beside = refit(store, old, dry_run=True).versus
    assert beside.change.change.value == pytest.approx(0, abs=0.01)


def test_what_cannot_have_a_map_is_refused_before_anything_is_read(
    clicked, monkeypatch
):
    store, log = clicked
    monkeypatch.setattr(type(store), "maps_queries", False)
    with refused(InputError, r"photos.faiss cannot hold a query map: leave out learn="):
        apply(store, log, learn=True)
    assert store.correction() is None
