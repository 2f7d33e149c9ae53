"""The automatic choice: what it measures, what it picks, and what it refuses to work with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

import hubplugin
from hubplugin import experiment
from hubplugin.experiment import FOLDS, Trial
from hubplugin.guard import judge
from hubplugin.methods import configure
from hubplugin.tuning import COST, _ranked
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


@pytest.fixture(scope="session")
def by_pairs(small):
    return hubplugin.choose(small["query_bank"], small["targets"], small["target_bank"])


@pytest.fixture(scope="session")
def by_hubness(small):
    return hubplugin.choose(small["query_bank"], small["targets"])


def recall(queries, targets, offsets=0.0):
    scores = formulas.similarity(queries, targets, "cosine") + offsets
    return float((scores.argmax(axis=1) == np.arange(len(queries))).mean())


def folds_of(rows, seed=0):
    """The probe rows of each fold: every fifth of one random order."""
    order = np.random.default_rng(seed).permutation(rows)
    return [order[fold::FOLDS] for fold in range(FOLDS)]


@pytest.mark.parametrize(
    ("method", "parameters"),
    [("dbsn", {"tau": 0.05, "iterations": 10}), ("is", {"tau": 0.05}), ("nnn", {"k": 16, "alpha": 0.5})],
)
def test_recall_and_hubness_are_those_of_an_independent_cross_validation(small, method, parameters):
    bank, second, targets = (small[name] for name in ("query_bank", "target_bank", "targets"))
    hits, log_ranks, occurrence, costs, gaps = [], [], np.zeros(len(targets)), [], []
    for probes in folds_of(len(bank)):
        rest = np.setdiff1d(np.arange(len(bank)), probes)
        gallery = np.concatenate([targets, second[probes]])
        offsets = formulas.offsets(method, bank[rest], gallery, "cosine", second[rest], **parameters)
        raw = formulas.similarity(bank[probes], gallery, "cosine")
        own = len(targets) + np.arange(len(probes))
        ranks = stats.rankdata(-(raw + offsets), axis=1)[np.arange(len(probes)), own]
        hits.append(ranks == 1)
        log_ranks.append(np.log(ranks))
        corrected = (raw + offsets)[:, : len(targets)]
        occurrence += np.bincount(np.argsort(-corrected, axis=1)[:, :10].ravel(), minlength=len(targets))
        near = np.sort(raw[:, : len(targets)], axis=1)[:, ::-1]
        costs.append(near[:, 0] - raw[np.arange(len(probes)), corrected.argmax(axis=1)])
        gaps.append((near[:, 0] - near[:, 1]).mean())
    found = judge(bank, targets, method, second, pairs=True, **parameters).candidate
    assert found.recall == pytest.approx(np.concatenate(hits).mean(), abs=1e-9)
    assert found.rank == pytest.approx(np.exp(np.concatenate(log_ranks).mean()), rel=1e-6)
    assert found.skewness == pytest.approx(stats.skew(occurrence), abs=1e-6)
    assert found.cost == pytest.approx(np.concatenate(costs).mean() / np.mean(gaps), rel=1e-4)


def test_what_is_chosen_by_pairs_raises_recall_on_queries_it_never_saw(small, by_pairs):
    model = hubplugin.fit(
        small["query_bank"], by_pairs.winner.method, small["targets"], small["target_bank"],
        **by_pairs.winner.parameters,
    )  # fmt: skip
    raw = recall(small["queries"], small["targets"])
    assert recall(small["queries"], small["targets"], model.offsets(small["targets"])) > raw


def test_the_winner_by_pairs_is_not_told_from_the_best_recall_and_has_the_least_rank(by_pairs):
    best = max(candidate.recall for candidate in by_pairs.candidates)
    assert by_pairs.basis == "pairs"
    assert by_pairs.winner.recall > best - 0.02
    assert all(by_pairs.winner.rank <= candidate.rank for candidate in by_pairs.candidates if candidate.recall == best)


def test_the_winner_by_hubness_lowers_it_and_keeps_similarity(by_hubness):
    assert by_hubness.basis == "hubness"
    assert by_hubness.winner.cost <= COST
    assert by_hubness.winner.skewness < by_hubness.uncorrected.skewness
    allowed = [candidate for candidate in by_hubness.candidates if candidate.cost <= COST]
    assert by_hubness.winner == min(allowed, key=lambda candidate: max(candidate.skewness, 0) + candidate.cost)


def test_every_candidate_is_reported_and_none_needs_a_bank_that_is_not_there(by_pairs, by_hubness):
    assert {candidate.method for candidate in by_pairs.candidates} == set(hubplugin.METHODS)
    assert {candidate.method for candidate in by_hubness.candidates} == set(hubplugin.METHODS) - {"dbsn", "dualis"}
    text = str(by_pairs)
    assert all(candidate.name in text for candidate in by_pairs.candidates)
    assert len({candidate.name for candidate in by_pairs.candidates}) == len(by_pairs.candidates)


def test_the_search_goes_finer_around_the_best(by_pairs):
    taus = sorted(c.parameters["tau"] for c in by_pairs.candidates if c.method == by_pairs.winner.method)
    steps = np.diff(np.log2(taus))
    assert steps.min() == pytest.approx(0.5)
    assert steps.max() == pytest.approx(1.0)


def test_the_same_seed_chooses_the_same(small, by_hubness):
    again = hubplugin.choose(small["query_bank"], small["targets"])
    assert again.winner == by_hubness.winner


def test_fit_auto_is_the_fit_of_what_choose_chooses(small, by_pairs):
    model = hubplugin.fit(small["query_bank"], "auto", small["targets"], small["target_bank"])
    assert (model.method, model.parameters) == (by_pairs.winner.method, by_pairs.winner.parameters)
    assert model.gallery.count == 300


def test_temperatures_follow_the_scale_of_the_similarity(small, by_hubness):
    four = [
        4 * x / np.linalg.norm(x.astype(float), axis=1, keepdims=True) for x in (small["query_bank"], small["targets"])
    ]
    choice = hubplugin.choose(*four, metric="dot")
    assert choice.winner.method == by_hubness.winner.method
    assert choice.winner.parameters["tau"] == pytest.approx(16 * by_hubness.winner.parameters["tau"], rel=1e-6)


def test_pairs_may_be_a_mapping_in_any_order(small):
    order = np.random.default_rng(3).permutation(400)
    place = np.argsort(order)
    shuffled = judge(small["query_bank"], small["targets"], "nnn", small["target_bank"][order], pairs=place)
    straight = judge(small["query_bank"], small["targets"], "nnn", small["target_bank"], pairs=True)
    assert shuffled.candidate.recall == straight.candidate.recall


def test_targets_that_the_gallery_holds_already_are_not_there_twice(small):
    held = np.concatenate([small["targets"], small["target_bank"]])
    found = judge(small["query_bank"], held, "nnn", small["target_bank"])
    scores = formulas.similarity(small["query_bank"], held, "cosine")
    own = 300 + np.arange(400)
    assert found.uncorrected.recall == pytest.approx((scores.argmax(axis=1) == own).mean(), abs=1e-9)


def test_queries_of_one_target_never_give_it_away_to_each_other(small):
    """Each bank query twice, a little changed: probes and fits are then those of each query once."""
    rng = np.random.default_rng(0)
    bank = small["query_bank"].astype(np.float32)
    twice = np.concatenate([bank, bank + rng.normal(size=bank.shape).astype(np.float32) * 1e-6])
    given = {"targets": small["targets"], "method": "is", "tau": 0.05}
    once = judge(bank, target_bank=small["target_bank"], pairs=True, **given)
    both = judge(twice, target_bank=small["target_bank"], pairs=np.tile(np.arange(400), 2), **given)
    assert both.probes == 2 * once.probes
    assert both.candidate.recall == pytest.approx(once.candidate.recall, abs=0.004)


@pytest.mark.parametrize("shuffled", [False, True])
def test_banks_of_equal_length_are_pairs_only_if_they_look_like_it(small, shuffled):
    second = small["target_bank"][np.random.default_rng(1).permutation(400)] if shuffled else small["target_bank"]
    judgement = judge(small["query_bank"], small["targets"], "nnn", second)
    assert (judgement.candidate.recall is None) is shuffled


def test_a_text_that_is_there_twice_never_probes_the_fit_that_saw_it(small):
    once = judge(small["query_bank"][:200], small["targets"], "is", pairs=False)
    twice = judge(np.repeat(small["query_bank"][:200], 2, axis=0), small["targets"], "is")
    assert twice.bank.distinct == once.bank.distinct == twice.probes == 200


def test_the_choice_does_not_grow_with_bank_and_gallery(small, monkeypatch):
    monkeypatch.setattr("hubplugin.experiment.FIT_ROWS", 50)
    monkeypatch.setattr("hubplugin.experiment.PROBES", 20)
    choice = hubplugin.choose(small["query_bank"], small["targets"], small["target_bank"])
    assert choice.probes == FOLDS * 20


def test_the_precision_that_a_fit_is_asked_for_is_that_of_its_choice(small, monkeypatch):
    seen = set()

    def dense(similarities, targets, unwatched=experiment.dense):
        seen.update(tile.s.dtype for tile in similarities.tiles(targets, "seen"))
        return unwatched(similarities, targets)

    monkeypatch.setattr(experiment, "dense", dense)
    hubplugin.fit(small["query_bank"][:60], "auto", small["targets"], precision="float64")
    assert seen == {torch.float64}


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean"])
def test_a_gallery_of_two_and_a_gallery_of_copies_are_judged_and_not_helped(small, metric):
    bank = small["query_bank"][:60]
    for gallery in (small["targets"][:2], np.repeat(small["targets"][:1], 40, axis=0)):
        assert judge(bank, gallery, "is", metric=metric).objections


def test_progress_reaches_the_whole(small):
    seen = []
    judge(small["query_bank"][:50], small["targets"], "is", progress=lambda *step: seen.append(step))
    assert ("trying candidates", 2 * FOLDS, 2 * FOLDS) in seen


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"query_bank": np.eye(9, 384)}, "9 distinct queries; holding some of them out needs at least 10"),
        ({"targets": np.eye(1, 384)}, "has one row; hubness needs at least 2 targets"),
        ({"targets": np.eye(5, 7)}, "has 7"),
        ({"pairs": True, "target_bank": None}, "without a target bank"),
        ({"pairs": True, "target_bank": np.eye(30, 384)}, "400 bank queries and 30 bank targets"),
        ({"pairs": [0] * 399 + [400]}, "bank query 399 belongs to row 400, which is outside the target bank of 400"),
        ({"pairs": [0.5] * 400}, "one row of the target bank for each of the 400 bank queries"),
        ({"pairs": [3] * 400}, "pairs name 1 targets of the target bank; holding some of them out needs at least 10"),
        ({"metric": "manhattan"}, "use one of cosine"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(small, change, says):
    given = {name: small[name] for name in ("query_bank", "targets", "target_bank")} | change
    with pytest.raises(hubplugin.InputError) as caught:
        hubplugin.choose(**given)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda b, t: hubplugin.fit(b, "auto"), "pass targets="),
        (lambda b, t: hubplugin.fit(b, "auto", t, tau=0.1), "takes no parameters, it chooses them: leave 'tau' out"),
        (lambda b, t: judge(b, t, "sinkhorn"), "unknown method 'sinkhorn': use one of blend, is, sn, dbsn"),
        (lambda b, t: judge(b, t, "nnn", alpha=0), "alpha=0 is refused: Input should be greater than 0"),
    ],
)
def test_methods_and_parameters_that_cannot_be_used_are_refused(small, call, says):
    with pytest.raises(hubplugin.InputError) as caught:
        call(small["query_bank"], small["targets"])
    assert says in str(caught.value)


@pytest.mark.parametrize(("cost", "first"), [(COST / 2, "dbsn"), (2 * COST, "sn")])
def test_dbsn_takes_the_place_of_sn_unless_it_costs_too_much(cost, first):
    def trial(method, cost):
        return Trial(configure(method, tau=0.1), np.arange(40), np.full(10, cost), 1.0, None, None)

    assert _ranked([trial("is", 0.2), trial("sn", 0.1), trial("dbsn", cost)])[0].method.name == first
