"""Corrections that depend on the query, against float64 arithmetic from the papers' equations."""

import numpy as np
import pytest

from hubplugin import Bank, InputError
from hubplugin.rerank import Reranker, fit_rule
from tests.core.formulas import offsets, similarity
from tests.galleries import assert_near, each_metric
from tests.refusals import refused

TAU = 0.05
TAUS = {"tau_query": TAU, "tau_target": 0.1}


@pytest.fixture
def sets(rng):
    """bank [60, 12], targets [90, 12], queries [25, 12], target bank [40, 12], about one centre."""
    centre = rng.normal(size=12)
    return [
        (centre + rng.normal(size=(rows, 12))).astype(np.float32) / 4
        for rows in (60, 90, 25, 40)
    ]


def rescored(rule, queries, targets, metric):
    return rule.rescore(similarity(queries, targets, metric), rule.keep(targets))


def assert_near_but_for_a_constant(found, expected):
    shift = found - expected
    assert_near(shift, shift.mean())


def active_set(bank, targets, metric, k):
    """{ j : j among the k largest of s(b_i, .) for some i }: QB-Norm section 3.4."""
    nearest = np.argsort(-similarity(bank, targets, metric), axis=1)[:, :k]
    return np.isin(np.arange(len(targets)), nearest)


@each_metric
@pytest.mark.parametrize("k", [1, 3])
def test_dis_is_equation_2_of_qb_norm(sets, metric, k):
    bank, targets, queries, _ = sets
    s = similarity(queries, targets, metric)
    corrected = active_set(bank, targets, metric, k)[s.argmax(axis=1)]
    assert 0 < corrected.sum() < len(queries) or k > 1
    rule = fit_rule(targets, bank, "dis", metric=metric, tau=TAU, k=k)
    corrected_by = offsets("is", bank, targets, metric, tau=TAU)
    expected = np.where(corrected[:, None], s + corrected_by, s)
    assert_near(rescored(rule, queries, targets, metric), expected)


@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_dualdis_is_appendix_a1_of_nnn(sets, metric, rng):
    """s^R s^Q, in which the raw s stands for a factor whose activation set lacks the query's nearest target."""
    bank, targets, _, target_bank = sets
    queries = targets[rng.integers(90, size=150)] + rng.normal(size=(150, 12)) / 8
    s = similarity(queries, targets, metric)
    paper = np.ones_like(s)
    states = []
    for members, tau in ((bank, TAU), (target_bank, 0.1)):
        total = np.exp(similarity(members, targets, metric) / tau).sum(axis=0)
        is_active = active_set(members, targets, metric, 1)[s.argmax(axis=1)]
        paper *= np.where(is_active[:, None], np.exp(s / tau) / total, s)
        states.append(is_active)
    both = Bank(bank, target_bank)
    rule = fit_rule(targets, both, "dualdis", metric=metric, **TAUS)
    ours = rescored(rule, queries, targets, metric)
    seen = set(zip(*states, strict=True))
    assert len(seen) == 4
    for row, state in enumerate(zip(*states, strict=True)):
        positive = s[row] > 0
        assert positive.sum() > 30
        if any(state):
            expected = np.log(paper[row, positive]) * TAU * 0.1 / (TAU + 0.1)
            assert_near_but_for_a_constant(ours[row, positive], expected)
        else:
            assert_near(ours[row, positive], s[row, positive])


def test_dualdis_leaves_what_has_no_positive_similarity_to_the_other_factor(sets):
    bank, targets, queries, target_bank = sets
    s = similarity(queries, targets, "euclidean")
    both = Bank(bank, target_bank)
    rule = fit_rule(targets, both, "dualdis", metric="euclidean", **TAUS)
    ours = rescored(rule, queries, targets, "euclidean")
    own, other = (
        active_set(members, targets, "euclidean", 1)[s.argmax(axis=1)]
        for members in (bank, target_bank)
    )
    alone = np.flatnonzero(own & ~other)
    assert alone.size
    scale = 0.1 / (TAU + 0.1)  # of one factor's share of the score
    expected = scale * (s + offsets("is", bank, targets, "euclidean", tau=TAU))
    for row in alone:
        assert_near_but_for_a_constant(ours[row], expected[row])


@each_metric
def test_single_query_dsl_needs_one_number_a_target(sets, metric):
    bank, targets, queries, _ = sets
    s = similarity(queries, targets, metric)
    t = 20.0
    from_bank = np.exp(t * similarity(bank, targets, metric)).sum(axis=0)
    rule = fit_rule(None, bank, "dsl", metric=metric, temperature=t)
    assert rule.keep(targets).shape == (len(targets),)
    expected = s * np.exp(t * s) / (np.exp(t * s) + from_bank)
    assert_near(rescored(rule, queries, targets, metric), expected)


@each_metric
def test_gc_is_the_similarity_less_its_rank_in_the_bank(sets, metric):
    bank, targets, queries, _ = sets
    s = similarity(queries, targets, metric)
    probe = similarity(bank, targets, metric)
    rule = fit_rule(None, bank, "gc", metric=metric)
    expected = s - (probe[None, :, :] > s[:, None, :]).sum(axis=1)
    assert_near(rescored(rule, queries, targets, metric), expected)


@pytest.mark.parametrize("method", ["dis", "dualdis", "dsl", "gc"])
def test_candidates_are_ranked_as_in_the_whole_gallery(method, sets):
    bank, targets, queries, target_bank = sets
    rule = fit_rule(targets, Bank(bank, target_bank), method)
    kept = rule.keep(targets)
    s = similarity(queries, targets, "cosine")
    reranker = Reranker(rule, kept.__getitem__)
    for query, raw, corrected in zip(queries, s, rule.rescore(s, kept), strict=True):
        found = np.argsort(-raw, kind="stable")[:30]
        order, scores = reranker.rerank(query, found, raw[found])
        expected = sorted(found, key=lambda j: -corrected[j])
        assert found[order].tolist() == expected
        ranked = np.sort(corrected[found])[::-1]
        assert_near(scores, ranked, 1e-6)
    assert not any(map(len, reranker.rerank(queries[0], [], [])))


def test_a_later_target_is_in_the_set_exactly_if_a_bank_query_would_rank_it_k_th(
    sets, rng
):
    bank, targets, _, _ = sets
    rule = fit_rule(targets, bank, "dis", k=2)
    late = targets[rng.permutation(90)[:30]] + rng.normal(size=(30, 12)) / 10
    late = late.astype(np.float32)
    kth = np.sort(similarity(bank, targets, "cosine"), axis=1)[:, -2]
    expected = (similarity(bank, late, "cosine") >= kth[:, None]).any(axis=0)
    assert 0 < expected.sum() < 30
    np.testing.assert_array_equal(rule.is_activated(late), expected)
    np.testing.assert_array_equal(rule.keep(late)[:, 1], expected)


def test_what_cannot_be_used_is_refused_in_one_line(sets):
    bank, targets, *_ = sets
    reranker = Reranker(fit_rule(None, bank, "dsl"), len)
    for said, call in {
        "unknown method 'disco': use one of dis, dualdis, dsl, gc": (
            lambda: fit_rule(targets, bank, "disco")
        ),
        "k=91 is not between 1 and the 90 targets": (
            lambda: fit_rule(targets, bank, "dis", k=91)
        ),
        "pass targets=": lambda: fit_rule(None, bank, "dis"),
        "pass answers=": lambda: fit_rule(targets, bank, "dualdis"),
        "2 candidate ids came with 1": (
            lambda: reranker.rerank(bank[0], [1, 2], [0.5])
        ),
        "12 dimensions": lambda: reranker.rerank(bank[0][:3], [1, 2], [0.5, 0.4]),
    }.items():
        with refused(InputError, said):
            call()
