"""The experiment on held-out queries: what it measures, and what it refuses."""

import numpy as np
import pytest
from scipy import stats

from hubplugin import Bank, fit
from hubplugin.guard import judge
from hubplugin.validation import FOLDS
from tests.core import formulas
from tests.galleries import each_metric

ROWS = np.arange(400)


@pytest.fixture(scope="session")
def small(real):
    """A bank [400, 384], its answers, and a gallery of 300."""
    parts = (
        real["bank_queries"][:400],
        real["bank_targets"][:400],
        real["test_targets"][:300],
    )
    return [part.astype(np.float32) for part in parts]


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("dbsn", {"tau": 0.05, "iterations": 10}),
        ("is", {"tau": 0.05}),
        ("nnn", {"k": 16, "alpha": 0.5}),
    ],
)
def test_recall_and_hubness_are_those_of_an_independent_cross_validation(
    small, method, parameters
):
    bank, second, targets = small
    hits = []
    log_ranks = []
    occurrence = np.zeros(300)
    order = np.random.default_rng(0).permutation(400)
    for fold in range(FOLDS):
        probes = order[fold::FOLDS]
        rest = np.setdiff1d(ROWS, probes)
        gallery = np.concatenate([targets, second[probes]])
        offsets = formulas.offsets(
            method, bank[rest], gallery, "cosine", second[rest], **parameters
        )
        raw = formulas.similarity(bank[probes], gallery, "cosine")
        numbers = np.arange(len(probes))
        ranks = stats.rankdata(-(raw + offsets), axis=1)[numbers, 300 + numbers]
        hits += [*(ranks == 1)]
        log_ranks += [*np.log(ranks)]
        corrected = (raw + offsets)[:, :300]
        first = np.argsort(-corrected, axis=1)[:, :10]
        occurrence += np.bincount(first.ravel(), minlength=300)
    found = judge(targets, Bank(bank, second), method, **parameters)
    assert found.recall == pytest.approx(np.mean(hits), abs=1e-9)
    assert found.rank == pytest.approx(np.exp(np.mean(log_ranks)), rel=1e-6)
    assert found.skewness == pytest.approx(stats.skew(occurrence), abs=1e-6)


@pytest.mark.parametrize(
    ("share", "method", "parameters"),
    [(0, "nnn", {}), (1, "dbsn", {"tau": 0.05, "iterations": 3})],
)
def test_a_share_of_none_or_all_is_the_one_method_alone(
    small, share, method, parameters
):
    bank, second, targets = small
    pairs = Bank(bank, second)
    alone = fit(targets, pairs, method, **parameters).offsets(targets)
    blend = fit(targets, pairs, share=share, strength=0.7, tau=0.05, answers="kept")
    assert blend.offsets(targets) == pytest.approx(0.7 * alone, abs=1e-5)
    assert len(blend.terms) == 1


def test_targets_that_the_gallery_holds_already_are_not_there_twice(small):
    bank, second, targets = small
    held = np.concatenate([targets, second])
    first = formulas.similarity(bank, held, "cosine").argmax(axis=1)
    found = judge(held, Bank(bank, second), "nnn").raw
    assert found.recall == pytest.approx((first == 300 + ROWS).mean(), abs=1e-9)


def test_queries_of_one_target_never_give_it_away_to_each_other(small):
    """Each query twice, a little changed: folds are then those of each query once."""
    bank, second, targets = small
    rng = np.random.default_rng(0)
    changed = bank + rng.normal(size=bank.shape).astype(np.float32) * 1e-6
    twice = Bank(np.concatenate([bank, changed]), np.concatenate([second, second]))
    once = judge(targets, Bank(bank, second), "is", tau=0.05)
    both = judge(targets, twice, "is", tau=0.05)
    assert both.queries == 2 * once.queries
    assert both.recall == pytest.approx(once.recall, abs=0.004)


@pytest.mark.parametrize("shuffled", [False, True])
def test_banks_of_equal_length_are_pairs_only_if_they_look_like_it(small, shuffled):
    bank, second, targets = small
    if shuffled:
        second = np.random.default_rng(1).permutation(second)
    assert (judge(targets, Bank(bank, second), "nnn").recall is None) is shuffled


def test_a_text_that_is_there_twice_never_tries_the_fit_that_saw_it(small):
    bank, _, targets = small
    once = judge(targets, bank[:200], "is")
    twice = judge(targets, np.repeat(bank[:200], 2, axis=0), "is")
    assert twice.bank.distinct == once.bank.distinct == twice.queries == 200


def test_the_experiment_does_not_grow_with_bank_and_gallery(small, monkeypatch):
    monkeypatch.setattr("hubplugin.validation.FIT_ROWS", 50)
    monkeypatch.setattr("hubplugin.validation.HELD_OUT", 100)
    bank, second, targets = small
    assert judge(targets, Bank(bank, second)).queries == FOLDS * 20


@each_metric
def test_a_gallery_of_two_and_a_gallery_of_copies_are_judged_and_not_helped(
    small, metric
):
    bank, _, targets = small
    for gallery in (targets[:2], np.repeat(targets[:1], 40, axis=0)):
        assert judge(gallery, bank[:60], "is", metric=metric).objections
