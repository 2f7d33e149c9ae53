"""The experiment on held-out queries: what it measures, and what it refuses to work with."""

import numpy as np
import pytest
from scipy import stats

import hubplugin
from hubplugin.compute import Compute
from hubplugin.guard import judge
from hubplugin.methods import configure
from hubplugin.validation import FOLDS
from tests.core import formulas


@pytest.fixture(scope="session")
def small(real):
    """bank [400, 384] with its targets, and a gallery of 300 with its queries."""
    return {
        "query_bank": real["bank_queries"][:400],
        "target_bank": real["bank_targets"][:400],
        "targets": real["test_targets"][:300],
        "queries": real["test_queries"][:300],
    }


def given(small):
    bank = hubplugin.Bank(small["query_bank"], small["target_bank"])
    return bank.prepare("cosine", Compute()).against(small["targets"])


def folds_of(rows, seed=0):
    """The probe rows of each fold: every fifth of one random order."""
    order = np.random.default_rng(seed).permutation(rows)
    return [order[fold::FOLDS] for fold in range(FOLDS)]


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
    bank, second, targets = (
        small[name] for name in ("query_bank", "target_bank", "targets")
    )
    hits, log_ranks, occurrence, costs, gaps = [], [], np.zeros(len(targets)), [], []
    for probes in folds_of(len(bank)):
        rest = np.setdiff1d(np.arange(len(bank)), probes)
        gallery = np.concatenate([targets, second[probes]])
        offsets = formulas.offsets(
            method, bank[rest], gallery, "cosine", second[rest], **parameters
        )
        raw = formulas.similarity(bank[probes], gallery, "cosine")
        own = len(targets) + np.arange(len(probes))
        ranks = stats.rankdata(-(raw + offsets), axis=1)[np.arange(len(probes)), own]
        hits.append(ranks == 1)
        log_ranks.append(np.log(ranks))
        corrected = (raw + offsets)[:, : len(targets)]
        occurrence += np.bincount(
            np.argsort(-corrected, axis=1)[:, :10].ravel(), minlength=len(targets)
        )
        near = np.sort(raw[:, : len(targets)], axis=1)[:, ::-1]
        costs.append(near[:, 0] - raw[np.arange(len(probes)), corrected.argmax(axis=1)])
        gaps.append((near[:, 0] - near[:, 1]).mean())
    found = judge(
        targets,
        hubplugin.Bank(bank, second, pairs=np.arange(len(bank))),
        method,
        **parameters,
    )
    assert found.recall == pytest.approx(np.concatenate(hits).mean(), abs=1e-9)
    assert found.rank == pytest.approx(
        np.exp(np.concatenate(log_ranks).mean()), rel=1e-6
    )
    assert found.skewness == pytest.approx(stats.skew(occurrence), abs=1e-6)
    assert found.cost == pytest.approx(
        np.concatenate(costs).mean() / np.mean(gaps), rel=1e-4
    )


@pytest.mark.parametrize(
    ("share", "method", "parameters"),
    [(0, "nnn", {}), (1, "dbsn", {"tau": 0.05, "iterations": 3})],
)
def test_a_share_of_none_or_all_is_the_one_method_alone(
    small, share, method, parameters
):
    alone = configure(method, **parameters).fit(given(small)).offsets(small["targets"])
    blend = configure("blend", share=share, strength=0.7, tau=0.05, answers="kept").fit(
        given(small)
    )
    assert blend.offsets(small["targets"]) == pytest.approx(0.7 * alone, abs=1e-5)
    assert len(blend.terms) == 1


def test_targets_that_the_gallery_holds_already_are_not_there_twice(small):
    held = np.concatenate([small["targets"], small["target_bank"]])
    found = judge(
        held, hubplugin.Bank(small["query_bank"], small["target_bank"]), "nnn"
    )
    scores = formulas.similarity(small["query_bank"], held, "cosine")
    own = 300 + np.arange(400)
    assert found.raw.recall == pytest.approx(
        (scores.argmax(axis=1) == own).mean(), abs=1e-9
    )


def test_queries_of_one_target_never_give_it_away_to_each_other(small):
    """Each bank query twice, a little changed: probes and fits are then those of each query once."""
    rng = np.random.default_rng(0)
    bank = small["query_bank"].astype(np.float32)
    twice = np.concatenate(
        [bank, bank + rng.normal(size=bank.shape).astype(np.float32) * 1e-6]
    )
    given = {"targets": small["targets"], "method": "is", "tau": 0.05}
    once = judge(
        bank=hubplugin.Bank(bank, small["target_bank"], pairs=np.arange(400)), **given
    )
    both = judge(
        bank=hubplugin.Bank(
            twice, small["target_bank"], pairs=np.tile(np.arange(400), 2)
        ),
        **given,
    )
    assert both.queries == 2 * once.queries
    assert both.recall == pytest.approx(once.recall, abs=0.004)


@pytest.mark.parametrize("shuffled", [False, True])
def test_banks_of_equal_length_are_pairs_only_if_they_look_like_it(small, shuffled):
    second = (
        small["target_bank"][np.random.default_rng(1).permutation(400)]
        if shuffled
        else small["target_bank"]
    )
    judgement = judge(
        small["targets"], hubplugin.Bank(small["query_bank"], second), "nnn"
    )
    assert (judgement.recall is None) is shuffled


def test_a_text_that_is_there_twice_never_tries_the_fit_that_saw_it(small):
    once = judge(small["targets"], small["query_bank"][:200], "is")
    twice = judge(
        small["targets"], np.repeat(small["query_bank"][:200], 2, axis=0), "is"
    )
    assert twice.bank.distinct == once.bank.distinct == twice.queries == 200


def test_the_experiment_does_not_grow_with_bank_and_gallery(small, monkeypatch):
    monkeypatch.setattr("hubplugin.validation.FIT_ROWS", 50)
    monkeypatch.setattr("hubplugin.validation.HELD_OUT", 100)
    found = judge(
        small["targets"],
        hubplugin.Bank(small["query_bank"], small["target_bank"], pairs=np.arange(400)),
    )
    assert found.queries == FOLDS * 20


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean"])
def test_a_gallery_of_two_and_a_gallery_of_copies_are_judged_and_not_helped(
    small, metric
):
    bank = small["query_bank"][:60]
    for gallery in (small["targets"][:2], np.repeat(small["targets"][:1], 40, axis=0)):
        assert judge(gallery, bank, "is", metric=metric).objections
