"""What becomes of targets that a log asked for, where its answers are known."""

from types import SimpleNamespace

import numpy as np
import pytest

import hubplugin
from hubplugin import Bank, Compute
from hubplugin.bank import find_missing, places
from hubplugin.guard import judge, look_like_wrong_clicks, try_paraphrases
from hubplugin.methods import METHODS
from hubplugin.store import Batch
from hubplugin.validation import FOLDS, fitted_by, folds_within
from tests.core import formulas
from tests.galleries import flat_store, unit


@pytest.fixture(scope="session")
def wordings(real):
    """Queries, a gallery of 500, and the row that each query asks for.

    Of 100 targets there are three wordings each, nearer to each other than to other
    queries, and of 100 one.
    """
    rng = np.random.default_rng(0)
    clicks = np.concatenate([np.repeat(np.arange(100), 3), np.arange(100, 200)])
    queries = real["bank_queries"].astype(np.float32)[clicks]
    queries = queries + 0.6 * rng.normal(size=queries.shape) / queries.shape[1] ** 0.5
    targets = np.concatenate([real["bank_targets"][:200], real["test_targets"][:300]])
    return queries.astype(np.float32), targets, clicks


def asked_before(wordings, method):
    queries, targets, rows = wordings
    banks = Bank(queries, rows).prepare("cosine", Compute()).against(targets)
    return try_paraphrases(banks, fitted_by(method.resolve(banks)))


def test_wordings_are_tried_on_a_fit_without_them_and_with_the_others(wordings):
    queries, targets, clicks = wordings
    raw = formulas.similarity(queries, targets, "cosine")
    fold_of = folds_within(clicks, 5)
    hits = []
    for fold in range(FOLDS):
        fitted = queries[fold_of != fold]
        offsets = formulas.offsets("is", fitted, targets, "cosine", tau=0.05)
        probes = np.flatnonzero(fold_of == fold)
        hits += [*((raw[probes] + offsets).argmax(axis=1) == clicks[probes])]
    asked = asked_before(wordings, METHODS["is"](tau=0.05))
    assert (asked.queries, asked.what) == (300, "other wordings")
    right = raw[:300].argmax(axis=1) == clicks[:300]
    assert asked.before == pytest.approx(right.mean())
    assert asked.after == pytest.approx(np.mean(hits), abs=0.01)


def test_with_clicks_a_correction_that_harms_what_was_asked_before_is_refused(wordings):
    queries, targets, clicks = wordings
    bank = Bank(queries, clicks)
    assert judge(targets, bank, "dbsn", tau=0.02, answers="left out").recall is not None
    harmful = judge(targets, bank, "dbsn", tau=0.02)
    (objection,) = (
        each
        for each in harmful.objections
        if each.startswith("targets asked for before are harmed: R@1 ")
    )
    assert ", 300 other wordings)" in objection
    assert "note: targets asked for before: R@1 " in str(harmful)
    default = judge(targets, bank)
    assert default.objections == ()
    assert not look_like_wrong_clicks(default.asked, default.right)


@pytest.mark.parametrize("share", [0, 0.2])
def test_wordings_that_wrong_clicks_alone_make_are_said_to_look_like_it(real, share):
    """Each function is asked for once: two queries share one only by a wrong click."""
    rng = np.random.default_rng(1)
    queries = unit(real["test_queries"])
    gallery = unit(real["test_targets"])
    clicks = np.arange(len(queries))
    wrong = np.flatnonzero(rng.random(len(queries)) < share)
    shown = np.argsort(-(queries @ gallery.T), axis=1)[:, :10]
    clicks[wrong] = shown[wrong, rng.integers(10, size=len(wrong))]
    trial = judge(gallery, Bank(queries, clicks))
    if share:
        assert look_like_wrong_clicks(trial.asked, trial.right)
    else:
        assert trial.asked is None


def test_a_sample_of_the_gallery_has_the_answers_added(monkeypatch, wordings):
    """Every query is its answer, but for a little: none that is missing is found."""
    monkeypatch.setattr("hubplugin.validation.FIT_ROWS", 250)
    _, targets, clicks = wordings
    noise = np.random.default_rng(0).normal(size=(400, 384)) * 1e-3
    queries = targets.astype(np.float32)[clicks] + noise
    asked = asked_before((queries, targets, clicks), METHODS["is"]())
    assert asked.before == 1
    assert asked.queries < 250
    assert judge(targets, Bank(queries, clicks), "is").raw.recall == 1


def test_of_small_banks_and_of_one_wording_each_nothing_is_said(wordings):
    queries, targets, clicks = wordings
    for rows in (np.arange(99), np.r_[0:300:3, 300:400]):
        few = (queries[rows], targets, clicks[rows])
        assert asked_before(few, METHODS["is"]()) is None


def test_clicks_name_the_ids_of_a_store(wordings, tmp_path):
    queries, targets, clicks = wordings
    targets = unit(targets)
    ids = 1_000 + np.arange(len(targets))
    store = flat_store(tmp_path, targets, ids)
    by_row = judge(targets, Bank(queries, clicks)).raw
    assert hubplugin.diagnose(store, Bank(queries, ids[clicks])).trial.raw == by_row
    some_gone = np.where(clicks < 190, ids[clicks], 7)
    trial = hubplugin.apply(store, Bank(queries, some_gone)).trial
    assert trial.queries == (clicks < 190).sum()
    assert trial.asked is not None
    names = ["a"] * len(clicks)
    for answers, given in ((clicks, "0"), (names, "'a'")):
        says = f"none of these ids .* look like {given}, but its ids look like 1000"
        with pytest.raises(hubplugin.InputError, match=says):
            hubplugin.apply(store, Bank(queries, answers))


def test_digits_are_the_same_as_a_number_and_as_a_text():
    wanted = {7, "042", "a", -1, 9}
    found = places(["7", "042", "a", "b", "-1"], 10, wanted)
    assert found == {7: 10, "042": 11, "a": 12, -1: 14}
    example = {42: 0}
    assert places([42, 7, "9"], 0, {7, 9}) == example | {7: 1, 9: 2}
    answers = Bank(np.eye(3), ["7", 9, -1]).clicks(3)
    assert answers.tolist() == [7, 9, -1]


def test_no_click_is_none_even_where_a_target_has_the_id_of_none(wordings):
    queries, targets, _ = wordings
    batch = Batch([-1, 5], targets[:2], np.full(2, np.nan))
    store = SimpleNamespace(scan=lambda: iter([batch]))
    bank = Bank(queries[:20], [5] + 19 * [-1]).prepare("cosine", Compute())
    assert bank.against(store).clicks.tolist() == [1] + 19 * [-1]
    assert find_missing(store, [5, 7, -1]) == {7}
