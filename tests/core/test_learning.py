"""What known answers teach: the map is that of the formula, chosen by targets that were held out, and never ignored."""

from dataclasses import replace

import numpy as np
import pytest

import hubplugin
from hubplugin import Bank, Compute, CorrectionRefused, InputError, apply, learning
from hubplugin.bank import PreparedBank
from hubplugin.guard import judge_by
from hubplugin.measures.significance import Side
from hubplugin.methods import METHODS
from hubplugin.metric import Metric
from hubplugin.validation import (
    Margins,
    as_it_is,
    cross_validate,
    folds_of,
    sample_of,
    uncorrected,
)
from tests.core import formulas
from tests.galleries import assert_near, flat_store, unit
from tests.refusals import refused

N, D, PAIRS = 600, 16, 400


@pytest.fixture
def pairs(rng):
    """A gallery, queries that are turned by what can be learned, and the answer of each; two queries a target."""
    targets = unit(rng.normal(size=(N, D)))
    turn = np.eye(D) + 0.9 * rng.normal(size=(D, D)) / D**0.5
    answers = np.concatenate([rng.permutation(N)[: PAIRS // 2]] * 2)
    queries = targets[answers] @ turn + 0.1 * rng.normal(size=(PAIRS, D))
    return targets, unit(queries), answers


@pytest.fixture
def targets(pairs):
    return pairs[0]


@pytest.fixture
def queries(pairs):
    return pairs[1]


@pytest.fixture
def answers(pairs):
    return pairs[2]


@pytest.fixture
def log(queries, answers):
    return Bank(queries, answers)


@pytest.fixture
def titles(queries, answers):
    """The first half of the pairs, one for a target."""
    return Bank(queries[:200], answers[:200])


def prepared(targets, *given):
    bank = Bank(*given).prepare("cosine", Compute("cpu"))
    return bank.against(targets)


def teachers_of(targets, log, learn=True):
    banks = learning.Teachers.read(log, learn, "cosine", Compute("cpu"))
    return banks.against(targets)


def banks_of(targets, *banks):
    """Return what banks teach, given as for `teachers_of`."""
    return learning.learn_query_map(METHODS["blend"](), teachers_of(targets, *banks))


@pytest.mark.parametrize("negatives", learning.STEPS)
@pytest.mark.parametrize("ridge", [1.0, 0.25])
@pytest.mark.parametrize("whitens", [False, True])
def test_each_map_is_that_of_its_formula(
    targets, queries, answers, whitens, ridge, negatives
):
    step = {"negatives": negatives, "ridge": ridge}
    fit = learning.MapFit(METHODS["blend"](), 0.5, 0.07, whitens, **step)
    z = formulas.whitening(queries, answers, targets) if whitens else np.eye(D)
    numbers, place = np.unique(answers, return_inverse=True)
    query_map = fit.learn((queries, place, targets[numbers]))
    w = formulas.query_map(queries @ z, answers, targets, 0.07, **step)
    assert_near(query_map.step, (np.eye(D) + 0.5 * w) @ z - np.eye(D), 1e-4)


def step_of(map_fit, queries, answers, targets, bank=None):
    """Return the step that `map_fit` takes by the formula, S of (I + S) q."""
    z = np.eye(D)
    if map_fit.whitens:
        z = formulas.whitening(queries, answers, targets)
    tau = hubplugin.fit(targets, queries if bank is None else bank).parameters["tau"]
    step = {"negatives": map_fit.negatives, "ridge": map_fit.ridge}
    w = formulas.query_map(queries @ z, answers, targets, tau, **step)
    return (np.eye(D) + map_fit.strength * w) @ z - np.eye(D)


@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_queries_are_mapped_as_the_formula_says(targets, queries, answers, log, metric):
    model = hubplugin.fit(targets, log, metric=metric, learn=True)
    query_map = model.query_map
    assert query_map.strength > 0
    assert query_map.pairs == PAIRS
    assert f"query map of {PAIRS} pairs" in repr(model)
    assert replace(model, query_map=None).fingerprint != model.fingerprint
    step = step_of(banks_of(targets, log).map_fit, queries, answers, targets)
    assert_near(query_map.step, step, 1e-4 * np.abs(step).max())
    # By cosine queries come to unit length before the map.
    searched = 3 * queries if metric == "cosine" else queries
    expected = queries.astype(np.float64) @ (np.eye(D) + step).T
    assert_near(model.queries(searched), expected, 1e-4)


def test_offsets_are_those_of_the_bank_as_it_is_searched_with(
    targets, queries, log, rng
):
    plain, learned = (
        hubplugin.fit(targets, log, learn=learn) for learn in (False, True)
    )
    assert plain.query_map is None
    assert_near(plain.queries(2 * queries), queries, 1e-6)
    mapped = queries.astype(np.float64) @ (np.eye(D) + learned.query_map.step).T
    share = learned.parameters["strength"] / plain.parameters["strength"]
    assert share in learning.SHARES
    tau = learned.parameters["tau"]
    expected = share * formulas.blend(mapped @ targets.T, tau)
    assert_near(learned.offsets(targets), expected)
    # Users' own, to search with.
    assert_near(learned.terms[0].bank, queries, 1e-6)
    assert learned.bank_fingerprint == plain.bank_fingerprint
    added = unit(rng.normal(size=(50, D)))
    given = learned.parameters | {"metric": "dot"}
    twin = hubplugin.fit(targets, learned.queries(queries), **given)
    assert_near(learned.offsets(added), twin.offsets(added))


@pytest.mark.parametrize("method", ["sn", "dbsn"])
def test_a_low_temperature_serves_queries_that_a_map_makes_longer(
    method, targets, queries
):
    # Exponents up to 150, beyond float32.
    mapped = np.concatenate([3 * targets[:50], queries])
    bank = PreparedBank(mapped, Metric.COSINE, Compute()).against(targets)
    offsets = METHODS[method](tau=0.02).raw_offsets(bank)
    expected = formulas.offsets(method, mapped, targets, "dot", tau=0.02, iterations=10)
    assert_near(offsets - offsets.mean(), expected)


def test_a_trial_maps_what_it_holds_out_by_what_the_others_teach(
    targets, queries, answers, log
):
    bank = prepared(targets, queries, answers)
    method = METHODS["blend"]().resolve(bank)
    sample = sample_of(bank)
    map_fit = learning.MapFit(method, 0.5, 0.07)
    folds = folds_of(bank)
    model = hubplugin.fit(targets, log, learn=True)
    tried = [uncorrected, map_fit, as_it_is(model)]
    _, learned, old = cross_validate(tried, bank, folds).right
    right = {"learned": [], "old": []}
    for fold in folds:
        seen = fold.train
        step = 0.5 * formulas.query_map(queries[seen], answers[seen], targets, 0.07)
        whole = np.eye(D) + step
        fitted, asked = (
            queries[rows].astype(np.float64) @ whole.T for rows in (seen, fold.test)
        )
        given = {"metric": "dot", "tau": method.tau, "strength": method.strength}
        offsets = hubplugin.fit(sample, fitted, **given).offsets(sample)
        old_scores = model.queries(queries[fold.test]) @ sample.T
        for name, scores in (
            ("learned", asked @ sample.T + offsets),
            ("old", old_scores + model.offsets(sample)),
        ):
            right[name] += [*(scores.argmax(axis=1) == answers[fold.test])]
    assert learned.mean() == pytest.approx(np.mean(right["learned"]), abs=0.003)
    assert old.mean() == pytest.approx(np.mean(right["old"]), abs=0.003)
    assert old.mean() > learned.mean()  # it has seen the answers


@pytest.mark.parametrize("answers_are", ["rows", "vectors"])
def test_margins_of_held_out_pairs_are_those_of_the_formula(
    targets, queries, answers, answers_are
):
    if answers_are == "rows":
        gallery = targets
        asked_of = targets
        number = answers
        held = np.zeros((PAIRS, 0, D))  # no more candidates than the gallery
        bank = prepared(gallery, queries, answers)
    else:
        queries = queries[: PAIRS // 2]
        gallery = targets[np.setdiff1d(np.arange(N), answers)]
        asked_of = targets[answers[: PAIRS // 2]]
        number = np.arange(PAIRS // 2)
        held = asked_of[:, None]
        bank = prepared(gallery, queries, asked_of)
    method = METHODS["nnn"](k=5)
    bases = [learning.MapFit(method, 0.0, 0.07, whitens) for whitens in (False, True)]
    sides = learning.draw_sides(learning.Teachers(bank), learning.find_pairs(bank))
    # Two wordings a target; of pairs from outside of the gallery none is asked again.
    assert set(sides) == ({"other", "asked"} if answers_are == "rows" else {"other"})
    for side, folds in sides.items():
        tried = [base.try_variants for base in bases]
        margins = cross_validate(tried, bank, folds).margins
        tested = np.concatenate([fold.test for fold in folds])
        assert sorted(tested) == list(range(len(queries)))
        expected = []
        for fold in folds:
            train, test = fold.train, fold.test
            shared = set(number[train]) & set(number[test])
            assert shared == (set(number[test]) if side == "asked" else set())
            candidates = np.concatenate([gallery, *held[test]])
            own = np.arange(len(test)), number[test]
            if answers_are == "vectors":
                own = own[0], len(gallery) + own[0]
            of_fold = []
            z = formulas.whitening(queries[train], number[train], asked_of)
            for first in (np.eye(D), z):
                seen = queries[train] @ first
                offsets = formulas.offsets(
                    "nnn", seen, candidates, "dot", k=5, alpha=0.5
                )
                q = queries[test].astype(np.float64) @ first
                for variant in bases[0].variants:
                    step = {"negatives": variant.negatives, "ridge": variant.ridge}
                    w = formulas.query_map(seen, number[train], asked_of, 0.07, **step)
                    mapped = q + variant.strength * q @ w.T
                    scores = mapped @ candidates.T + variant.share * offsets
                    right = scores[own]
                    scores[own] = -np.inf
                    of_fold.append(right - scores.max(axis=1))
            expected.append(of_fold)
        assert_near(margins, np.concatenate(expected, axis=1), 2e-5)


def trial_of(*gains, error=0.01, right=(0, 0, 0)):
    """Margins of candidates whose soft R@1 is 0.5 and more by `gains`, each with an
    `error` but for the first three: offsets alone, half of them, and the raw search.
    right: how much more of the 400 queries are right than by the raw search."""
    noise = np.resize([1.0, -1.0], 400) * error * 20
    rows = [np.full(400, 0.5)] * 3 + [0.5 + gain + noise for gain in gains]
    soft = np.array(rows)
    hits = np.zeros(soft.shape)
    for row, more in enumerate((0, 0, 0, *right)):
        hits[row, : 200 + more] = 1
    margins = 0.4 * 0.05 * np.log(soft / (1 - soft))
    nothing = np.zeros((*soft.shape, 1), np.int64)
    return Margins(100, nothing, margins, hits)


BEHIND = {"other": trial_of(-0.001, 0.001, 0.0), "asked": trial_of(0.1, 0.06, 0.0)}


@pytest.mark.parametrize(
    ("sides", "chosen"),
    [
        ({"other": trial_of(0.02, 0.06, 0.04)}, 4),
        ({"other": trial_of(0.02, 0.06, 0.04), "asked": trial_of(0.1, 0.0, 0.05)}, 3),
        ({"other": trial_of(0.009, 0.0, 0.0)}, 0),  # ahead by less than its error
        ({"other": trial_of(-0.01, -0.02, -0.03)}, 0),
        # A fifth of what the very pairs that taught gain counts beside the others.
        ({"other": trial_of(0.06, 0.05, 0.04), "taught": trial_of(0.1, 0.15, 0.25)}, 5),
        ({"other": trial_of(0.06, 0.05, 0.04), "taught": trial_of(0.1, 0.1, 0.1)}, 3),
        # Not one whose held-out figure falls.
        (
            {
                "other": trial_of(0.06, 0.05, 0.04, right=(5, 5, 0)),
                "asked": trial_of(0.06, 0.05, 0.04, right=(-1, 0, 0)),
            },
            4,
        ),
        # Across modalities no side is behind the offsets alone.
        (BEHIND, 3),
        (BEHIND | {"apart": True}, 4),
    ],
)
def test_the_map_is_chosen_that_gains_most_on_the_mean_of_the_sides(sides, chosen):
    apart = sides.get("apart", False)
    sides = {side: trial for side, trial in sides.items() if side != "apart"}
    only_maps = np.array([True, False, False, True, True, True])
    assert learning.choose(sides, 0.05, only_maps, apart) == chosen


def test_where_queries_and_targets_lie_apart_nothing_is_whitened_and_offsets_stay():
    base = learning.MapFit(METHODS["blend"](), 1.0, 0.05)
    white = replace(base, whitens=True)
    half = replace(base, share=0.5)
    for apart, expected in ((False, [True] * 3), (True, [True, False, False])):
        found = [fit.may_be_chosen(apart, False) for fit in (base, white, half)]
        assert found == expected
    assert not half.may_be_chosen(False, True), "titles tell nothing of hubs"
    assert not replace(half, strength=0.0).may_be_chosen(False, False)


def test_a_log_of_one_wording_a_target_is_tried_on_what_it_taught(targets, titles):
    banks = teachers_of(targets, titles)
    sides = learning.draw_sides(banks, banks.find_teaching())
    assert set(sides) == {"other", "taught"}
    (fold,) = sides["taught"]
    assert set(fold.test) <= set(fold.teach)


def test_a_log_of_doubtful_clicks_is_not_tried_on_what_it_taught(targets, titles):
    titles.answers[:80] = np.roll(titles.answers[:80], 1)
    banks = teachers_of(targets, titles)
    assert set(learning.draw_sides(banks, banks.find_teaching())) == {"other"}


def test_clicks_that_somebody_has_looked_at_choose_beside_a_noisy_log(
    targets, queries, answers, rng
):
    noisy = np.where(rng.random(PAIRS) < 0.2, rng.permutation(answers), answers)
    looked_at = Bank(queries, np.where(np.arange(PAIRS) < 60, answers, -1))
    lesson = banks_of(targets, looked_at, Bank(queries, noisy))
    assert lesson.other.queries == 60
    assert lesson.model.query_map.strength > 0
    assert len(lesson.model.terms[0].bank) == PAIRS


def test_titles_that_mislead_do_not_teach_beside_clicks(targets, log, rng):
    other_turn = np.eye(D) + 0.9 * rng.normal(size=(D, D)) / D**0.5
    wrong = unit(targets @ other_turn + 0.1 * rng.normal(size=(N, D)))
    lesson = banks_of(targets, log, Bank(wrong, np.arange(N)))
    found = lesson.model.query_map
    assert found.pairs == PAIRS
    clicks_alone = hubplugin.fit(targets, log, learn=True)
    assert_near(found.step, clicks_alone.query_map.step)


@pytest.mark.parametrize("share", [0, 0.3])
def test_clicks_that_disagree_with_the_raw_search_are_said_to(
    targets, queries, answers, rng, share
):
    some = rng.random(PAIRS) < share
    answers[some] = rng.permutation(answers[some])
    notes = banks_of(targets, Bank(queries, answers)).notes
    assert any("nearer to another query's answer" in note for note in notes) is bool(
        share
    )


def test_where_offsets_lose_the_map_is_applied_without_them_and_judged_so(
    targets, log, tmp_path
):
    """On offsets alone the guard refuses this log."""
    store = flat_store(tmp_path, targets)
    harmful = {"strength": 60.0}  # so that offsets are far wider than similarities
    with pytest.raises(CorrectionRefused):
        apply(store, log, **harmful)
    result = apply(store, log, learn=True, **harmful)
    assert result.trial.right.after > result.trial.right.before
    assert result.model.query_map is not None
    assert any("without offsets" in note for note in result.notes)
    assert np.ptp(result.model.offsets(targets)) == 0


def test_pairs_that_teach_nothing_are_said_to(targets, queries, log, monkeypatch):
    monkeypatch.setattr(learning, "choose", lambda *_: 0)
    with pytest.warns(UserWarning, match="the pairs taught nothing beyond the offsets"):
        model = hubplugin.fit(targets, log, learn=True)
    assert model.query_map is None
    plain = hubplugin.fit(targets, queries)
    np.testing.assert_array_equal(model.offsets(targets), plain.offsets(targets))


def test_pairs_of_another_gallery_or_another_model_are_refused(
    targets, queries, answers, titles, rng
):
    turned = np.linalg.qr(rng.normal(size=(D, D)))[0].astype(np.float32)
    wrong = Bank(queries, rng.permutation(answers))
    others = Bank(queries @ turned, answers)
    said = r"do not belong to its queries: \d\d% of .* another's \(57% is needed"
    for bank, learn in ((wrong, True), (others, True), (wrong, titles)):
        with refused(CorrectionRefused, said):
            hubplugin.fit(targets, bank, learn=learn)


def test_what_cannot_learn_is_refused_in_one_line(targets, queries, answers, log):
    thrice = Bank(np.tile(queries[:49], (3, 1)), np.tile(answers[:49], 3))
    for said, wrong in {
        "pass a Bank with answers=": {"bank": queries},
        "400 different pairs of 5 targets": {"bank": Bank(queries, answers % 5)},
        "the bank has 49 different pairs of 49 targets; learn=True needs 50": {
            "bank": thrice
        },
        "no executor: change method=": {"method": "csls"},
        "change metric=": {"metric": "euclidean"},
        "change targets=": {"targets": None},
        "change executor=": {"executor": object()},
        "learn=: expected True, False, or pairs as Bank(titles, ids), got str": {
            "learn": "fold"
        },
        "learn=: the pairs lack ids or rows; pass Bank(titles, ids)": {
            "learn": Bank(queries, queries)
        },
    }.items():
        with refused(InputError, said):
            hubplugin.fit(**{"targets": targets, "bank": log, "learn": True} | wrong)


@pytest.mark.parametrize("ends", [(0.5, 0.5), (1, 1)], ids=["random", "all right"])
def test_the_interval_of_a_change_is_wider_than_that_of_held_out_pairs_alone(rng, ends):
    """What no held-out pair sees is not said to be impossible."""
    before, after = (1.0 * (rng.random(300) < share) for share in ends)
    side = Side.of(before, after, "pairs")
    right = np.stack([before, before, before, after])
    hits = np.zeros((*right.shape, 1), np.int64)
    wider = learning.forecast(Margins(100, hits, right=right), 3, "pairs")
    value = side.change.value
    assert (wider.before, wider.after) == (side.before, side.after)
    assert wider.change.value == value
    unseen = 3 / 300
    for found, held in (
        (wider.change.high - value, side.change.high - value),
        (value - wider.change.low, value - side.change.low),
    ):
        assert found == pytest.approx(1.4 * held + unseen)


def test_titles_teach_the_map_of_a_log_without_answers(
    targets, queries, answers, titles
):
    log = queries[200:]
    model = hubplugin.fit(targets, log, learn=titles)
    query_map = model.query_map
    assert query_map.pairs == 200
    map_fit = banks_of(targets, Bank(log), titles).map_fit
    step = step_of(map_fit, queries[:200], answers[:200], targets, bank=log)
    assert_near(query_map.step, step, 1e-4 * np.abs(step).max())
    assert_near(model.terms[0].bank, log, 1e-6)
    searched = model.queries(log)
    mapped = hubplugin.fit(targets, searched, metric="dot", **model.parameters)
    assert_near(model.offsets(targets), mapped.offsets(targets))


@pytest.mark.parametrize(("known", "unasked"), [(60, False), (49, True)])
def test_answers_of_the_log_choose_in_the_place_of_titles(
    targets, queries, answers, titles, known, unasked
):
    rows = np.where(np.arange(60) < known, answers[200:260], -1)
    lesson = banks_of(targets, Bank(queries[200:260], rows), titles)
    assert lesson.unasked == unasked
    # Of 49 answers nothing is learned.
    assert lesson.model.query_map.pairs == (200 if unasked else 260)
    assert lesson.other.queries == (200 if unasked else 60)
    said = "real queries gained 0 to 10 points"
    assert any(said in note for note in lesson.notes) == unasked


@pytest.mark.parametrize("has_answers", [False, True])
def test_a_trial_of_titles_holds_out_queries_of_the_log_alone(
    targets, queries, answers, titles, has_answers
):
    given = (queries[200:], answers[200:] if has_answers else None)
    map_fit = banks_of(targets, Bank(*given), titles).map_fit
    trial = judge_by(prepared(targets, *given), map_fit.offset_method, learned=map_fit)
    assert trial.queries == 200
    assert (trial.right and trial.right.queries) == (200 if has_answers else None)


def test_titles_unlike_the_queries_are_refused_unless_real_ones_choose(
    targets, queries, answers, titles, rng
):
    elsewhere = unit(queries[200:] + 3 * unit(rng.normal(size=(1, D))))
    said = r"the pairs are unlike the queries of the bank: 1?\d\d% of nearest"
    with refused(CorrectionRefused, said):
        hubplugin.fit(targets, elsewhere, learn=titles)
    few = np.where(np.arange(200) < 100, answers[200:], -1)
    assert not banks_of(targets, Bank(elsewhere, few), titles).unasked


def test_titles_that_stand_in_their_documents_are_refused_unless_real_queries_choose(
    targets, queries, log, rng
):
    same = unit(targets[:200] + 0.1 * rng.normal(size=(200, D)))
    titles = Bank(same, np.arange(200))
    said = r"the raw search finds 1?\d\d% of the pairs \(80% is too much\)"
    with refused(CorrectionRefused, said):
        hubplugin.fit(targets, queries, learn=titles)
    assert not banks_of(targets, log, titles).unasked


def test_pairs_that_the_bank_has_teach_nothing_that_is_held_out(
    targets, queries, answers, log
):
    rows = np.r_[:PAIRS, :50]
    twice = Bank(queries[rows], answers[rows])
    assert len(teachers_of(targets, log, twice).pairs.query_bank) == 0
    alone, beside = (
        hubplugin.fit(targets, log, learn=learn).query_map.matrix
        for learn in (True, twice)
    )
    assert_near(beside, alone, 1e-6)
    few = Bank(queries[:300], answers[:300])
    banks = teachers_of(targets, few, twice)
    assert_near(banks.pairs.query_bank, queries[300:], 1e-6)
