"""What known answers teach: the map is that of the formula, chosen by targets that were held out, and never ignored."""

from __future__ import annotations

import numpy as np
import pytest

import hubplugin
from hubplugin import learning
from hubplugin.compute import Compute
from hubplugin.errors import InputError
from hubplugin.model import FORMAT, MAPPED_FORMAT
from hubplugin.trial import Experiment
from tests.core import formulas

N, D, PAIRS = 600, 16, 400


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def asked(rng):
    """A gallery, queries that are turned by what can be learned, and what each asks for; two queries a target."""
    targets = unit(rng.normal(size=(N, D)))
    turn = np.eye(D) + 0.9 * rng.normal(size=(D, D)) / D**0.5
    answers = np.concatenate([rng.permutation(N)[: PAIRS // 2]] * 2)
    return targets, unit(targets[answers] @ turn + 0.1 * rng.normal(size=(PAIRS, D))), answers


@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_queries_are_mapped_as_the_formula_says(asked, metric):
    targets, queries, answers = asked
    model = hubplugin.fit(targets, hubplugin.Bank(queries, answers), metric=metric, learn=True)
    found = model.query_map
    assert found.strength == 1
    assert found.pairs == PAIRS
    plain = hubplugin.fit(targets, hubplugin.Bank(queries, answers), metric=metric)
    step = found.strength * formulas.query_map(queries, answers, targets, plain.parameters["tau"])
    np.testing.assert_allclose(found.step, step, rtol=0, atol=2e-5 * np.abs(step).max())
    wanted = queries.astype(np.float64) @ (np.eye(D) + step).T
    given = 3 * queries if metric == "cosine" else queries  # which comes to unit length before the map
    np.testing.assert_allclose(model.queries(given), wanted, rtol=0, atol=1e-4)


def test_the_map_finds_what_offsets_alone_do_not(asked, rng):
    targets, queries, answers = asked
    model = hubplugin.fit(targets, hubplugin.Bank(queries[50:], answers[50:]), learn=True)
    right = [
        ((q @ targets.T + model.offsets(targets)).argmax(1) == answers[:50]).mean()
        for q in (queries[:50], model.queries(queries[:50]))
    ]
    assert right[1] > right[0] + 0.1


def test_offsets_are_those_of_the_bank_as_it_is_searched_with(asked, rng):
    targets, queries, answers = asked
    bank = hubplugin.Bank(queries, answers)
    plain, learned = (hubplugin.fit(targets, bank, learn=learn) for learn in (False, True))
    assert plain.query_map is None
    np.testing.assert_allclose(plain.queries(2 * queries), queries, rtol=0, atol=1e-6)
    mapped = queries.astype(np.float64) @ (np.eye(D) + learned.query_map.step).T
    left_out, weights = formulas.without_answers(mapped @ targets.T)
    strength, tau = PAIRS / (PAIRS + 100), learned.parameters["tau"]
    parts = [
        formulas.log_of("sn", left_out, weights, tau=tau, iterations=10),
        formulas.log_of("nnn", left_out, weights, k=16, alpha=0.5),
    ]
    wanted = strength * (parts[0] + parts[1]) / 2
    np.testing.assert_allclose(learned.offsets(targets), wanted - wanted.mean(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(learned.terms[0].bank, queries, rtol=0, atol=1e-6)  # users' own, to search with
    assert learned.bank_fingerprint == plain.bank_fingerprint
    newcomers = unit(rng.normal(size=(50, D)))
    twin = hubplugin.fit(targets, learned.queries(queries), metric="dot", tau=tau)
    np.testing.assert_allclose(learned.offsets(newcomers), twin.offsets(newcomers), rtol=0, atol=1e-5)


def test_a_robust_model_bounds_the_lists_of_mapped_queries(asked):
    targets, queries, answers = asked
    model = hubplugin.fit(targets, hubplugin.Bank(queries, answers), learn=True, robust=True)
    mapped = model.queries(queries).astype(np.float64)
    newcomers = unit(np.concatenate([mapped.mean(0, keepdims=True), mapped[:20]]))
    levels = np.sort(mapped @ targets.T + model.members.offsets(targets), axis=1)[:, -10]
    shares = (mapped @ newcomers.T + model.offsets(newcomers) >= levels[:, None]).mean(axis=0)
    plain = hubplugin.fit(targets, hubplugin.Bank(queries, answers), learn=True)
    assert (mapped @ newcomers.T + plain.offsets(newcomers) >= levels[:, None]).mean(axis=0).max() > model.bound.share
    assert shares.max() <= model.bound.share


def test_a_trial_maps_what_it_holds_out_by_what_the_others_teach(asked):
    targets, queries, answers = asked
    given = hubplugin.Bank(queries, answers).prepare("cosine", Compute("cpu")).against(targets)
    method = hubplugin.METHODS["blend"]().resolved(given)
    how, experiment = learning.Learning(method, 0.5, 0.07), Experiment(given)
    model = hubplugin.fit(targets, hubplugin.Bank(queries, answers), learn=True)
    _, learned, old = experiment.run([None, how, model])
    hits: dict[str, list[float]] = {"learned": [], "old": []}
    for fold in range(5):
        held, seen = experiment.split.held_out(fold), experiment.split.fitted(fold, 10_000)
        step = 0.5 * formulas.query_map(queries[seen], answers[seen], targets, 0.07)
        mapped = [queries[rows].astype(np.float64) @ (np.eye(D) + step).T for rows in (seen, held)]
        offsets = hubplugin.fit(experiment.targets, mapped[0], metric="dot", tau=method.tau, strength=method.strength)
        own = answers[held]
        scores = mapped[1] @ experiment.targets.T + offsets.offsets(experiment.targets)
        hits["learned"] += (scores.argmax(1) == own).tolist()
        scores = model.queries(queries[held]) @ experiment.targets.T + model.offsets(experiment.targets)
        hits["old"] += (scores.argmax(1) == own).tolist()
    assert learned.hits.mean() == pytest.approx(np.mean(hits["learned"]), abs=0.003)
    assert old.hits.mean() == pytest.approx(np.mean(hits["old"]), abs=0.003)
    assert old.hits.mean() > learned.hits.mean()  # it has seen the answers


@pytest.mark.parametrize("answers_are", ["rows", "vectors"])
def test_gains_of_held_out_targets_are_those_of_the_formula(asked, answers_are):
    targets, queries, answers = asked
    if answers_are == "rows":
        bank, gallery, candidates, number = hubplugin.Bank(queries, answers), targets, targets, answers
    else:
        half = PAIRS // 2
        queries, answers = queries[:half], answers[:half]
        others = np.setdiff1d(np.arange(N), answers)
        bank, gallery = hubplugin.Bank(queries, targets[answers], pairs=True), targets[others]
        candidates, number = np.concatenate([targets[answers], gallery]), np.arange(half)
    given = bank.prepare("cosine", Compute("cpu")).against(gallery)
    pairs, tau = learning.KnownPairs.of(given), 0.07
    offsets = np.random.default_rng(3).normal(size=len(candidates)) / 50
    found = learning._gains(pairs, tau, given, offsets)

    rng = np.random.default_rng(0)  # the draws of the folds; all else is float64 from the formulas
    names = np.unique(number)
    fold_of = dict(zip(names, rng.permutation(len(names)) % 3, strict=True))
    fold = np.array([fold_of[each] for each in number])
    columns = []
    for held in range(3):
        probes, seen = rng.permutation(np.flatnonzero(fold == held))[:300], fold != held
        w = formulas.query_map(queries[seen], number[seen], candidates, tau)
        assert not set(number[seen]) & set(number[probes])
        for probe in probes:
            q, soft = queries[probe].astype(np.float64), []
            for strength in (0, 0.25, 0.5, 1):
                scores = (q + strength * w @ q) @ candidates.T.astype(np.float64) + offsets
                other = np.delete(scores, number[probe]).max()
                soft.append(1 / (1 + np.exp((other - scores[number[probe]]) / (0.4 * tau))))
            columns.append(np.array(soft[1:]) - soft[0])
    np.testing.assert_allclose(found, np.array(columns).T, rtol=0, atol=2e-4)


def test_pairs_by_chance_teach_nothing_and_a_warning_says_so(rng):
    targets, queries = unit(rng.normal(size=(N, 64))), unit(rng.normal(size=(PAIRS, 64)))
    bank = hubplugin.Bank(queries, rng.integers(0, N, PAIRS))
    with pytest.warns(UserWarning, match="the pairs taught nothing beyond the offsets"):
        model = hubplugin.fit(targets, bank, learn=True)
    assert model.query_map is None


@pytest.mark.parametrize(("share", "strength"), [(0.8, 0.5), (0.9, 0.0)])
def test_sets_that_lie_apart_need_two_standard_errors(asked, monkeypatch, share, strength):
    targets, queries, answers = asked
    given = hubplugin.Bank(queries, answers).prepare("cosine", Compute("cpu")).against(targets)
    each = np.array([[0.012], [0.015], [0.005]]) + 0.1 * np.array([1.0, -1.0] * 50)  # standard error 0.01
    monkeypatch.setattr(learning, "_gains", lambda *given: each)
    monkeypatch.setattr(learning, "own_share", lambda *given: share)
    assert learning.chosen_strength(learning.KnownPairs.of(given), 0.05, given, np.zeros(N)) == strength


def test_a_gain_below_a_thousandth_counts_as_none(asked, monkeypatch):
    targets, queries, answers = asked
    given = hubplugin.Bank(queries, answers).prepare("cosine", Compute("cpu")).against(targets)
    monkeypatch.setattr(learning, "_gains", lambda *given: np.array([[0.002], [0.0009], [0.0009]]) * np.ones(90))
    assert learning.chosen_strength(learning.KnownPairs.of(given), 0.05, given, np.zeros(N)) == 0.25


def test_a_pair_that_is_there_twice_counts_once(asked):
    targets, queries, answers = asked
    bank = hubplugin.Bank(np.tile(queries[:199], (3, 1)), np.tile(answers[:199], 3))
    with pytest.raises(InputError, match=r"the bank has 199 different pairs of 199 targets; learn=True needs 200"):
        hubplugin.fit(targets, bank, learn=True)
    repeated = hubplugin.Bank(np.concatenate([queries, queries[:9]]), np.concatenate([answers, answers[:9]]))
    assert hubplugin.fit(targets, repeated, learn=True).query_map.pairs == PAIRS


def test_what_cannot_learn_is_refused_in_one_line(asked):
    targets, queries, answers = asked
    bank = hubplugin.Bank(queries, answers)
    for expected, given in {
        "pass a Bank with answers=": {"bank": queries},
        "400 different pairs of 5 targets": {"bank": hubplugin.Bank(queries, answers % 5)},
        "default method, not with method='csls'": {"method": "csls"},
        "not for metric='euclidean'": {"metric": "euclidean"},
        "pass targets=": {"targets": None},
        "does not go with executor=": {"executor": object()},
    }.items():
        with pytest.raises(InputError, match=expected.replace("(", r"\(")) as said:
            hubplugin.fit(**({"targets": targets, "bank": bank, "learn": True} | given))
        assert "\n" not in str(said.value)


def test_a_file_with_a_map_has_a_format_of_its_own(asked, tmp_path):
    targets, queries, answers = asked
    model = hubplugin.fit(targets, hubplugin.Bank(queries, answers), learn=True)
    model.save(tmp_path / "m.hub")
    again = hubplugin.load(tmp_path / "m.hub")
    np.testing.assert_array_equal(again.queries(queries), model.queries(queries))
    assert (again.query_map.strength, again.query_map.pairs) == (model.query_map.strength, PAIRS)
    assert again.fingerprint == model.fingerprint
    assert f"queries mapped by {PAIRS} pairs" in repr(again)
    plain = model.having(query_map=None)
    assert plain.fingerprint != model.fingerprint
    assert FORMAT < MAPPED_FORMAT
    for each, version in ((model, MAPPED_FORMAT), (plain, FORMAT)):
        assert f'\\"format\\": {version},'.encode() in each.to_bytes()


def test_queries_of_other_dimensions_are_refused(asked):
    targets, queries, _ = asked
    model = hubplugin.fit(targets, queries)
    with pytest.raises(InputError, match="queries have 15 dimensions, the query bank of this model has 16"):
        model.queries(queries[:, :15])
