"""What becomes of targets that a log asked for, where its answers are known."""

from types import SimpleNamespace

import numpy as np
import pytest

import hubplugin
from hubplugin.bank import Bank, find_missing, places
from hubplugin.compute import Compute
from hubplugin.guard import judge, try_paraphrases
from hubplugin.methods import configure
from hubplugin.metric import Metric
from hubplugin.registry import open_store
from hubplugin.store import Batch
from hubplugin.validation import FOLDS, fitted_by, folds_within
from tests.core import formulas
from tests.galleries import flat_index, unit


@pytest.fixture(scope="session")
def wordings(real):
    """Of 100 targets three wordings each, nearer to each other than to other queries, and of 100 one; and what they
    ask for, rows of a gallery of 500."""
    rng = np.random.default_rng(0)
    clicks = np.concatenate([np.repeat(np.arange(100), 3), np.arange(100, 200)])
    queries = real["bank_queries"].astype(np.float32)[clicks]
    queries = queries + 0.6 * rng.normal(size=queries.shape) / queries.shape[1] ** 0.5
    targets = np.concatenate([real["bank_targets"][:200], real["test_targets"][:300]])
    return queries.astype(np.float32), targets, clicks


def asked_before(wordings, method, metric=Metric.COSINE):
    queries, targets, rows = wordings
    banks = Bank(queries, rows).prepare(metric, Compute()).against(targets)
    return try_paraphrases(banks, fitted_by(method.resolve(banks)))


def test_clicks_say_what_each_query_asks_for_and_all_that_is_asked_again_is_tried(
    wordings,
):
    queries, targets, clicks = wordings
    right = formulas.similarity(queries, targets, "cosine").argmax(axis=1) == clicks
    asked = asked_before(wordings, configure("is"))
    assert (asked.queries, asked.what) == (300, "other wordings")
    assert asked.before == pytest.approx(right[:300].mean())


def test_wordings_are_tried_on_a_fit_without_them_and_with_the_others(wordings):
    queries, targets, clicks = wordings
    raw = formulas.similarity(queries, targets, "cosine")
    fold_of, hits = folds_within(clicks, 5), []
    for fold in range(FOLDS):
        offsets = formulas.offsets(
            "is", queries[fold_of != fold], targets, "cosine", tau=0.05
        )
        probes = np.flatnonzero(fold_of == fold)
        hits.append((raw[probes] + offsets).argmax(axis=1) == clicks[probes])
    asked = asked_before(wordings, configure("is", tau=0.05))
    assert asked.after == pytest.approx(np.concatenate(hits).mean(), abs=0.01)


def test_with_clicks_a_correction_that_harms_what_was_asked_before_is_refused(wordings):
    queries, targets, clicks = wordings
    judgement = judge(
        targets, hubplugin.Bank(queries, clicks), "dbsn", tau=0.02, answers="left out"
    )
    assert judgement.recall is not None
    harmful = judge(targets, hubplugin.Bank(queries, clicks), "dbsn", tau=0.02)
    (objection,) = (
        each
        for each in harmful.objections
        if each.startswith("what was asked before is harmed: R@1 ")
    )
    assert ", 300 other wordings)" in objection
    assert "note: asked before: R@1 " in str(harmful)
    assert judge(targets, hubplugin.Bank(queries, clicks)).objections == ()


def test_a_sample_of_the_gallery_has_the_answers_added(monkeypatch, wordings):
    """Every query is its answer, but for a little: none that is missing could be found."""
    monkeypatch.setattr("hubplugin.validation.FIT_ROWS", 250)
    _, targets, clicks = wordings
    queries = (
        targets.astype(np.float32)[clicks]
        + np.random.default_rng(0).normal(size=(400, 384)) * 1e-3
    )
    asked = asked_before((queries, targets, clicks), configure("is"))
    assert (asked.before, asked.queries < 250) == (1, True)
    assert judge(targets, hubplugin.Bank(queries, clicks), "is").raw.recall == 1


def test_of_small_banks_and_of_one_wording_each_nothing_is_said(wordings):
    queries, targets, clicks = wordings
    assert asked_before((queries[:99], targets, clicks[:99]), configure("is")) is None
    one = np.r_[0:300:3, 300:400]
    assert asked_before((queries[one], targets, clicks[one]), configure("is")) is None


def test_clicks_name_the_ids_of_a_store(wordings, tmp_path):
    queries, targets, clicks = wordings
    store = open_store(
        flat_index(
            tmp_path / "photos.faiss", unit(targets), 1_000 + np.arange(len(targets))
        )
    )
    by_row = judge(unit(targets), hubplugin.Bank(queries, clicks))
    assert (
        hubplugin.diagnose(store, hubplugin.Bank(queries, 1_000 + clicks)).trial.raw
        == by_row.raw
    )
    some_gone = np.where(clicks < 190, 1_000 + clicks, 7)
    applied = hubplugin.apply(store, hubplugin.Bank(queries, some_gone))
    assert applied.trial.queries == (clicks < 190).sum()
    assert applied.trial.asked is not None
    with pytest.raises(
        hubplugin.InputError,
        match=r"none of the ids that they name is in .*photos.faiss: they are such as 0 "
        r"\(int\), and its ids are such as 1000 \(int\)",
    ):
        hubplugin.apply(store, hubplugin.Bank(queries, clicks))
    texts = [str(1_000 + row) for row in clicks]
    with pytest.raises(hubplugin.InputError, match=r"'1000' \(str\), .* 1000 \(int\)"):
        hubplugin.apply(store, hubplugin.Bank(queries, texts))


def test_digits_that_were_clicked_are_a_text_in_a_store_of_texts():
    wanted = {7, "042", "a", -1, 9}
    found = places(["7", "042", "a", "b", "-1"], 10, wanted)
    assert found == {7: 10, "7": 10, "042": 11, "a": 12}, "the first is an example"
    assert places([7, 42, 9], 0, wanted) == {7: 0, 9: 2}


def test_no_click_is_none_even_where_a_target_has_the_id_of_none(wordings):
    queries, targets, _ = wordings
    batch = Batch([-1, 5], targets[:2], np.full(2, np.nan))
    store = SimpleNamespace(scan=lambda: iter([batch]))
    bank = Bank(queries[:20], [5] + 19 * [-1]).prepare("cosine", Compute())
    assert bank.against(store).clicks.tolist() == [1] + 19 * [-1]
    assert find_missing(store, [5, 7, -1]) == {7}


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
    assert trial.clicks_look_wrong is (share > 0)
    assert ("these look like wrong clicks" in str(trial)) is (share > 0)


def test_true_wordings_do_not_look_like_wrong_clicks(wordings):
    queries, targets, clicks = wordings
    trial = judge(targets, Bank(queries, clicks))
    assert trial.asked is not None
    assert not trial.clicks_look_wrong
