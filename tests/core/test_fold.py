"""What clicks fold into targets: the shift of the formula, known by the target's vector, chosen by held-out clicks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies

import hubplugin
from hubplugin import learning
from hubplugin.compute import Compute
from hubplugin.errors import InputError
from hubplugin.model import FORMAT, MAPPED_FORMAT, TargetFold
from hubplugin.trial import Experiment
from tests.core import formulas

N, D, CLICKS = 600, 16, 450


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def log(rng):
    """A gallery, queries with words of their own for each target, and what was clicked: three queries a target."""
    targets = unit(rng.normal(size=(N, D)))
    answers = np.tile(rng.permutation(N)[: CLICKS // 3], 3)
    words = 0.8 * rng.normal(size=(N, D)) / D**0.5
    queries = unit(targets[answers] + words[answers] + 0.4 * rng.normal(size=(CLICKS, D)) / D**0.5)
    return targets, queries, answers


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(learning, "chosen_fold", lambda *given: len(learning.FOLD_STRENGTHS) - 1)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_targets_are_folded_as_the_formula_says(log, metric):
    targets, queries, answers = log
    if metric == "dot":
        targets = targets * np.linspace(0.8, 1.2, N, dtype=np.float32)[:, None]
    model = hubplugin.fit(targets, hubplugin.Bank(queries, answers), metric=metric, learn="fold")
    asked = queries.astype(np.float64)
    if model.query_map is not None:
        asked = asked @ (np.eye(D) + model.query_map.step.astype(np.float64)).T
    wanted = targets.astype(np.float64)
    for number, shift in formulas.shifts(asked, answers, targets).items():
        wanted[number] += 0.2 * shift
    given_longer = 3 * targets if metric == "cosine" else targets  # which comes to unit length first
    np.testing.assert_allclose(model.targets(given_longer), wanted, rtol=0, atol=1e-5)
    assert (model.fold.strength, model.fold.pairs) == (0.2, CLICKS)
    map_alone = hubplugin.fit(targets, hubplugin.Bank(queries, answers), metric=metric, learn=True)
    np.testing.assert_array_equal(model.offsets(targets), map_alone.offsets(targets))
    np.testing.assert_array_equal(map_alone.targets(targets), targets if metric == "dot" else unit(targets))


def test_a_fold_finds_what_is_asked_again_and_spares_the_others(log, rng):
    targets, queries, answers = log
    kept = np.arange(CLICKS) < CLICKS * 2 // 3
    bank = hubplugin.Bank(queries[kept], answers[kept])
    others = np.setdiff1d(np.arange(N), answers)
    unasked = unit(targets[others] + 0.5 * rng.normal(size=(len(others), D)) / D**0.5)
    found = {}
    for learn in (True, "fold"):
        model = hubplugin.fit(targets, bank, learn=learn)
        for side, (asked, truth) in {"asked": (queries[~kept], answers[~kept]), "not": (unasked, others)}.items():
            scores = model.queries(asked) @ model.targets(targets).T + model.offsets(targets)
            found[side, learn] = (scores.argmax(1) == truth).mean()
    assert model.fold.strength > 0
    assert found["asked", "fold"] > found["asked", True] + 0.02
    assert found["not", "fold"] > found["not", True] - 0.01


@given(
    seed=strategies.integers(0, 2**32 - 1),
    count=strategies.integers(1, 60),
    known=strategies.integers(1, 40),
    dim=strategies.integers(2, 12),
    scale=strategies.sampled_from([1e-3, 1.0, 300.0]),
)
@settings(max_examples=60, deadline=None)
def test_a_target_is_known_by_its_vector(seed, count, known, dim, scale):
    rng = np.random.default_rng(seed)
    at = (scale * rng.normal(size=(known, dim))).astype(np.float32)
    fold = TargetFold(at, np.ones_like(at), 0.1, 200)
    wanted = rng.integers(-1, known, count)
    strange = scale * rng.normal(size=(count, dim))
    targets = np.where((wanted >= 0)[:, None], at[wanted] * (1 + rng.uniform(-4e-4, 4e-4, (count, dim))), strange)
    apart = np.linalg.norm(strange[:, None] - at[None], axis=2).min(1) / np.linalg.norm(strange, axis=1)
    clear = (wanted >= 0) | (apart > 0.01)
    np.testing.assert_array_equal(fold.rows_of(targets.astype(np.float32))[clear], wanted[clear])
    np.testing.assert_array_equal(fold(at), at + 1)


def test_of_two_that_are_almost_the_same_the_nearer_is_taken():
    at = np.array([[1, 0], [1.0006, 0], [1, 1]], np.float32)
    fold = TargetFold(at, np.zeros_like(at), 0.1, 200)
    assert fold.rows_of(np.array([[1.0001, 0], [1.0005, 0], [0, 1]], np.float32)).tolist() == [0, 1, -1]


def test_targets_that_have_much_in_common_are_told_apart(rng):
    at = (5 + 0.05 * rng.normal(size=(2000, 24))).astype(np.float32)
    fold = TargetFold(at, np.zeros_like(at), 0.1, 200)
    np.testing.assert_array_equal(fold.rows_of(at), np.arange(2000))
    assert (fold.rows_of((5 + 0.05 * rng.normal(size=(500, 24))).astype(np.float32)) == -1).all()


@pytest.mark.parametrize(
    ("at", "shifts"),
    [(np.ones((3, 4)), np.ones((3, 5))), (np.ones((3, 4)), np.full((3, 4), np.nan)), (np.ones(3),) * 2],
)
def test_a_fold_that_cannot_be_is_refused(at, shifts):
    with pytest.raises(ValueError, match="do not belong together"):
        TargetFold(at.astype(np.float32), shifts.astype(np.float32), 0.1, 200)


@pytest.mark.usefixtures("always")
def test_targets_of_the_same_vector_are_folded_alike(log):
    targets, queries, answers = log
    first, second = np.unique(answers)[:2]
    targets[second] = targets[first]
    together = np.where(answers == second, first, answers)
    model = hubplugin.fit(targets, hubplugin.Bank(queries, answers), learn="fold")
    stored = model.targets(targets)
    np.testing.assert_array_equal(stored[first], stored[second])
    asked = model.queries(queries).astype(np.float64)
    shift = formulas.shifts(asked, together, targets)[first]
    np.testing.assert_allclose(stored[first], targets[first] + 0.2 * shift, rtol=0, atol=1e-5)


@pytest.mark.parametrize("twins", [0, 60])
def test_margins_of_held_out_clicks_are_those_of_the_formula(log, twins):
    targets, queries, answers = log
    unasked = np.setdiff1d(np.arange(N), answers)[:twins]
    targets[unasked] = targets[np.unique(answers)[:twins]]  # a fold moves all targets of one vector
    bank = hubplugin.Bank(queries, answers).prepare("cosine", Compute("cpu")).against(targets)
    pairs, tau = learning.KnownPairs.of(bank), 0.07
    offsets = np.random.default_rng(3).normal(size=N) / 50
    how = learning.Learning(
        hubplugin.METHODS["blend"](), 0.5, tau, centre=learning.mean_of(bank.require_targets(""), bank.metric)
    )
    base = learning.Base(replace(how, strength=0.0), None, offsets.astype(np.float32))
    for side, folds in learning.sides_of(pairs, pairs).items():
        found, columns = learning.fold_margins(pairs, pairs, folds, base, how, bank), []
        for rows, seen in folds:
            shared = set(answers[seen]) & set(answers[rows])
            assert shared == (set(answers[rows]) if side == "asked" else set())
            step = 0.5 * formulas.query_map(queries[seen], answers[seen], targets, tau)
            mapped = queries.astype(np.float64) @ (np.eye(D) + step).T
            shift = formulas.shifts(mapped[seen], answers[seen], targets)
            for strength in learning.FOLD_STRENGTHS:
                stored = targets.astype(np.float64)
                for number, each in shift.items():
                    stored[(targets == targets[number]).all(axis=1)] += strength * each
                scores = mapped[rows] @ stored.T + offsets
                own = scores[np.arange(len(rows)), answers[rows]]
                scores[np.arange(len(rows)), answers[rows]] = -np.inf
                columns.append(own - scores.max(axis=1))
        count = len(learning.FOLD_STRENGTHS)
        wanted = np.stack([np.concatenate(columns[place::count]) for place in range(count)])
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


def test_that_nothing_is_folded_is_said(log, monkeypatch):
    targets, queries, answers = log
    bank = hubplugin.Bank(queries, answers).prepare("cosine", Compute("cpu")).against(targets)
    for chosen, said in ((0, True), (4, False)):
        monkeypatch.setattr(learning, "chosen_fold", lambda *given, chosen=chosen: chosen)
        notes = learning.taught(hubplugin.METHODS["blend"](), bank, learn="fold").notes
        assert any("no target is folded" in note for note in notes) == said
        assert any("150 targets are folded at strength 0.2" in note for note in notes) == (not said)
    assert not any("fold" in note for note in learning.taught(hubplugin.METHODS["blend"](), bank).notes)


def margins_of(*gains):
    """Margins [5, 400] whose soft R@1 is 0.5 and, at the strengths above 0, more by `gains`, with an error of .01."""
    noise = 0.2 * np.array([1.0, -1.0] * 200)
    soft = 0.5 + np.array([np.zeros(400), *(gain + noise for gain in gains)])
    return 0.4 * 0.05 * np.log(soft / (1 - soft))


@pytest.mark.parametrize(
    ("sides", "strength"),
    [
        ([(0.02, 0.02, 0.02, 0.02)], 4),
        ([(0.02, 0.011, 0.009, 0.009)], 2),  # one standard error is needed
        ([(0.009, 0.02, 0.011, 0.0)], 3),  # the largest, not the best
        ([(0.0, 0.0, 0.0, 0.0)], 0),
        ([(0.02, 0.02, 0.02, 0.02), (0.011, 0.0, 0.0, 0.0)], 1),  # the other side decides, too
    ],
)
def test_the_strength_is_the_largest_that_is_ahead_on_all_sides(sides, strength):
    assert learning.chosen_fold([margins_of(*gains) for gains in sides], 0.05, 1.0) == strength


def test_a_trial_folds_what_the_others_clicked(log):
    targets, queries, answers = log
    bank = hubplugin.Bank(queries, answers).prepare("cosine", Compute("cpu")).against(targets)
    method = hubplugin.METHODS["blend"]().resolved(bank)
    centre = learning.mean_of(bank.require_targets(""), bank.metric)
    how, experiment = learning.Learning(method, 0.0, 0.07, fold=0.2, centre=centre), Experiment(bank)
    learned, plain = experiment.run([how, method])
    hits = []
    for fold in range(5):
        held, seen = experiment.split.held_out(fold), experiment.split.fitted(fold, 10_000)
        stored = experiment.targets.astype(np.float64)  # the whole gallery, in its order
        for number, shift in formulas.shifts(queries[seen], answers[seen], targets).items():
            stored[number] += 0.2 * shift
        offsets = hubplugin.fit(experiment.targets, queries[seen], tau=method.tau, strength=method.strength).offsets(
            experiment.targets
        )
        scores = queries[held] @ stored.T + offsets
        hits += (scores.argmax(1) == answers[held]).tolist()
    assert learned.hits.mean() == pytest.approx(np.mean(hits), abs=0.003)
    assert learned.hits.mean() > plain.hits.mean()


@pytest.mark.usefixtures("always")
def test_an_evaluation_ranks_by_what_is_stored(log):
    targets, queries, answers = log
    model = hubplugin.fit(targets, hubplugin.Bank(queries, answers), learn="fold")
    found = hubplugin.evaluate(targets, queries=queries, truth=answers, methods=[], models={"folded": model})
    scores = model.queries(queries).astype(np.float64) @ model.targets(targets).T + model.offsets(targets)
    assert found.methods[1].recall[1].value == pytest.approx((scores.argmax(1) == answers).mean(), abs=2e-3)


@pytest.mark.usefixtures("always")
def test_a_file_with_a_fold_is_refused_by_older_versions(log, tmp_path):
    targets, queries, answers = log
    model = hubplugin.fit(targets, hubplugin.Bank(queries, answers), learn="fold").having(query_map=None)
    model.save(tmp_path / "m.hub")
    again = hubplugin.load(tmp_path / "m.hub")
    np.testing.assert_array_equal(again.targets(targets), model.targets(targets))
    assert (again.fold.strength, again.fold.pairs) == (model.fold.strength, CLICKS)
    assert again.fingerprint == model.fingerprint != model.having(fold=None).fingerprint
    assert f"{CLICKS // 3} targets folded" in repr(again)
    for each, version in ((model, MAPPED_FORMAT), (model.having(fold=None), FORMAT)):
        assert f'\\"format\\": {version},'.encode() in each.to_bytes()


def test_what_cannot_be_folded_is_refused_in_one_line(log):
    targets, queries, answers = log
    bank = hubplugin.Bank(queries, answers)
    for expected, changed in {
        "learn='all': expected True or 'fold'": {"learn": "all"},
        "pass ids or rows as answers=": {"bank": hubplugin.Bank(queries, targets[answers], pairs=True)},
        "the bank has 199 different pairs": {"bank": hubplugin.Bank(queries[:199], answers[:199])},
    }.items():
        with pytest.raises(InputError, match=expected) as said:
            hubplugin.fit(**({"targets": targets, "bank": bank, "learn": "fold"} | changed))
        assert "\n" not in str(said.value)
