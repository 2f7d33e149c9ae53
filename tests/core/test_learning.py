"""What known answers teach: the map is that of the formula, chosen by targets that were held out, and never ignored."""

import re
from dataclasses import replace

import numpy as np
import pytest

import hubplugin
from hubplugin import learning
from hubplugin.bank import PreparedBank
from hubplugin.compute import Compute
from hubplugin.errors import CorrectionRefused, InputError
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
from tests.galleries import flat_index, unit

N, D, PAIRS = 600, 16, 400


@pytest.fixture
def pairs(rng):
    """A gallery, queries that are turned by what can be learned, and the answer of each; two queries a target."""
    targets = unit(rng.normal(size=(N, D)))
    turn = np.eye(D) + 0.9 * rng.normal(size=(D, D)) / D**0.5
    answers = np.concatenate([rng.permutation(N)[: PAIRS // 2]] * 2)
    return (
        targets,
        unit(targets[answers] @ turn + 0.1 * rng.normal(size=(PAIRS, D))),
        answers,
    )


def prepared(targets, queries, answers=None):
    bank = hubplugin.Bank(queries, answers)
    return bank.prepare("cosine", Compute("cpu")).against(targets)


def teachers_of(targets, log, learn=True):
    banks = learning.Teachers.read(log, learn, "cosine", Compute("cpu"))
    return banks.against(targets)


def banks_of(targets, *banks):
    """Return what banks teach, given as for `teachers_of`."""
    return learning.learn_query_map(METHODS["blend"](), teachers_of(targets, *banks))


@pytest.mark.parametrize("apart_from", learning.STEPS)
@pytest.mark.parametrize("whitens", [False, True])
def test_each_map_is_that_of_its_formula(pairs, apart_from, whitens):
    targets, queries, answers = pairs
    z = formulas.whitening(queries, targets) if whitens else np.eye(D)
    fit = learning.MapFit(
        METHODS["blend"](),
        0.5,
        0.07,
        targets,
        z.astype(np.float32) if whitens else None,
        apart_from=apart_from,
    )
    numbers, place = np.unique(answers, return_inverse=True)
    query_map = fit.learn((queries, place, targets[numbers]))
    w = formulas.query_map(queries @ z, answers, targets, 0.07, apart_from)
    expected = (np.eye(D) + 0.5 * w) @ z - np.eye(D)
    np.testing.assert_allclose(query_map.step, expected, rtol=0, atol=1e-4)


def step_of(how, queries, answers, targets, bank=None):
    """Return the step that `how` takes by the formula, S of (I + S) q."""
    bank = queries if bank is None else bank
    z = np.eye(D) if how.whitening is None else formulas.whitening(bank, targets)
    tau = hubplugin.fit(targets, bank @ z, metric="dot").parameters["tau"]
    w = formulas.query_map(queries @ z, answers, targets, tau, how.apart_from)
    return (np.eye(D) + how.strength * w) @ z - np.eye(D)


@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_queries_are_mapped_as_the_formula_says(pairs, metric):
    targets, queries, answers = pairs
    bank = hubplugin.Bank(queries, answers)
    model = hubplugin.fit(targets, bank, metric=metric, learn=True)
    query_map = model.query_map
    assert query_map.strength > 0
    assert query_map.pairs == PAIRS
    step = step_of(banks_of(targets, bank).how, queries, answers, targets)
    np.testing.assert_allclose(
        query_map.step, step, rtol=0, atol=1e-4 * np.abs(step).max()
    )
    expected = queries.astype(np.float64) @ (np.eye(D) + step).T
    searched = (
        3 * queries if metric == "cosine" else queries
    )  # which comes to unit length before the map
    np.testing.assert_allclose(model.queries(searched), expected, rtol=0, atol=1e-4)


def test_offsets_are_those_of_the_bank_as_it_is_searched_with(pairs, rng):
    targets, queries, answers = pairs
    bank = hubplugin.Bank(queries, answers)
    plain, learned = (
        hubplugin.fit(targets, bank, learn=learn) for learn in (False, True)
    )
    assert plain.query_map is None
    np.testing.assert_allclose(plain.queries(2 * queries), queries, rtol=0, atol=1e-6)
    mapped = queries.astype(np.float64) @ (np.eye(D) + learned.query_map.step).T
    left_out, weights = formulas.without_answers(mapped @ targets.T)
    strength, tau = PAIRS / (PAIRS + 100), learned.parameters["tau"]
    parts = [
        formulas.log_of("sn", left_out, weights, tau=tau, iterations=3),
        formulas.log_of("nnn", left_out, weights, k=16, alpha=0.5),
    ]
    expected = strength * (parts[0] + parts[1]) / 2
    np.testing.assert_allclose(
        learned.offsets(targets), expected - expected.mean(), rtol=0, atol=1e-5
    )
    np.testing.assert_allclose(
        learned.terms[0].bank, queries, rtol=0, atol=1e-6
    )  # users' own, to search with
    assert learned.bank_fingerprint == plain.bank_fingerprint
    added = unit(rng.normal(size=(50, D)))
    twin = hubplugin.fit(targets, learned.queries(queries), metric="dot", tau=tau)
    np.testing.assert_allclose(
        learned.offsets(added), twin.offsets(added), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("method", ["sn", "dbsn"])
def test_a_low_temperature_serves_queries_that_a_map_makes_longer(method, pairs):
    targets, queries, _ = pairs
    mapped = np.concatenate(
        [3 * targets[:50], queries]
    )  # exponents up to 150, beyond float32
    bank = PreparedBank(mapped, Metric.COSINE, Compute()).against(targets)
    offsets = METHODS[method](tau=0.02).raw_offsets(bank)
    expected = formulas.offsets(method, mapped, targets, "dot", tau=0.02, iterations=10)
    np.testing.assert_allclose(offsets - offsets.mean(), expected, rtol=0, atol=1e-5)


def test_a_trial_maps_what_it_holds_out_by_what_the_others_teach(pairs):
    targets, queries, answers = pairs
    bank = prepared(targets, queries, answers)
    method = METHODS["blend"]().resolve(bank)
    map_fit, folds, sample = (
        learning.MapFit(method, 0.5, 0.07, sample_of(bank)),
        folds_of(bank),
        sample_of(bank),
    )
    model = hubplugin.fit(targets, hubplugin.Bank(queries, answers), learn=True)
    _, learned, old = cross_validate(
        [uncorrected, map_fit, as_it_is(model)], bank, folds
    ).right
    hits: dict[str, list[float]] = {"learned": [], "old": []}
    for fold in folds:
        held, seen = fold.test, fold.train
        step = 0.5 * formulas.query_map(queries[seen], answers[seen], targets, 0.07)
        mapped = [
            queries[rows].astype(np.float64) @ (np.eye(D) + step).T
            for rows in (seen, held)
        ]
        offsets = hubplugin.fit(
            sample, mapped[0], metric="dot", tau=method.tau, strength=method.strength
        )
        answer = answers[held]
        scores = mapped[1] @ sample.T + offsets.offsets(sample)
        hits["learned"] += (scores.argmax(1) == answer).tolist()
        scores = model.queries(queries[held]) @ sample.T + model.offsets(sample)
        hits["old"] += (scores.argmax(1) == answer).tolist()
    assert learned.mean() == pytest.approx(np.mean(hits["learned"]), abs=0.003)
    assert old.mean() == pytest.approx(np.mean(hits["old"]), abs=0.003)
    assert old.mean() > learned.mean()  # it has seen the answers


@pytest.mark.parametrize("answers_are", ["rows", "vectors"])
def test_margins_of_held_out_pairs_are_those_of_the_formula(pairs, answers_are):
    targets, queries, answers = pairs
    if answers_are == "rows":
        gallery = targets
        number = answers
        bank = prepared(gallery, queries, answers)
    else:
        queries, number = queries[: PAIRS // 2], np.arange(PAIRS // 2)
        gallery = targets[np.setdiff1d(np.arange(N), answers)]
        asked_vectors = targets[answers[: PAIRS // 2]]
        bank = prepared(gallery, queries, asked_vectors)
    z, asked_for = formulas.whitening(queries, gallery), targets[answers]
    asked_of = targets if answers_are == "rows" else asked_for
    method = METHODS["nnn"](k=5)
    bases = [
        learning.MapFit(method, 0.0, 0.07, sample_of(bank), first)
        for first in (None, z.astype(np.float32))
    ]
    sides = learning.draw_sides(learning.Teachers(bank), learning.find_pairs(bank))
    # Two wordings a target; of pairs from outside of the gallery none is asked again.
    assert set(sides) == ({"other", "asked"} if answers_are == "rows" else {"other"})
    for side, folds in sides.items():
        margins = cross_validate(
            [base.try_variants for base in bases], bank, folds
        ).margins
        assert sorted(np.concatenate([fold.test for fold in folds])) == list(
            range(len(queries))
        )
        expected = []
        for fold in folds:
            shared = set(number[fold.train]) & set(number[fold.test])
            assert shared == (set(number[fold.test]) if side == "asked" else set())
            held_targets = (
                np.zeros((0, D)) if answers_are == "rows" else asked_for[fold.test]
            )
            candidates = np.concatenate([gallery, held_targets])
            columns = (
                number[fold.test]
                if answers_are == "rows"
                else len(gallery) + np.arange(len(fold.test))
            )
            for first in (np.eye(D), z):
                offsets = formulas.offsets(
                    "nnn",
                    queries[fold.train] @ first,
                    candidates,
                    "dot",
                    k=5,
                    alpha=0.5,
                )
                q = queries[fold.test].astype(np.float64) @ first
                train = queries[fold.train] @ first, number[fold.train]
                for variant in bases[0].variants:
                    w = formulas.query_map(
                        *train, asked_of, 0.07, variant.apart_from, gallery
                    )
                    scores = (q + variant.strength * q @ w.T) @ candidates.T.astype(
                        np.float64
                    ) + variant.share * offsets
                    own = scores[np.arange(len(columns)), columns]
                    scores[np.arange(len(columns)), columns] = -np.inf
                    expected.append(own - scores.max(axis=1))
        count = 2 * len(bases[0].variants)
        expected = np.concatenate(
            [
                np.stack(expected[first : first + count])
                for first in range(0, len(expected), count)
            ],
            axis=1,
        )
        np.testing.assert_allclose(margins, expected, rtol=0, atol=2e-5)


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


ONLY_MAPS = np.array([True, False, False, True, True, True])


@pytest.mark.parametrize(
    ("sides", "chosen"),
    [
        ({"other": trial_of(0.02, 0.06, 0.04)}, 4),
        ({"other": trial_of(0.02, 0.06, 0.04), "asked": trial_of(0.1, 0.0, 0.05)}, 3),
        ({"other": trial_of(0.019, 0.0, 0.0)}, 0),  # ahead by less than two errors
        ({"other": trial_of(-0.01, -0.02, -0.03)}, 0),
        # A fifth of what the very pairs that taught gain counts beside the others.
        ({"other": trial_of(0.06, 0.05, 0.04), "taught": trial_of(0.1, 0.15, 0.25)}, 5),
        ({"other": trial_of(0.06, 0.05, 0.04), "taught": trial_of(0.1, 0.1, 0.1)}, 3),
    ],
)
def test_the_map_is_chosen_that_gains_most_on_the_mean_of_the_sides(sides, chosen):
    assert learning.choose(sides, 0.05, ONLY_MAPS, False) == chosen


def test_a_map_is_not_used_whose_held_out_figure_falls():
    sides = {
        "other": trial_of(0.06, 0.05, 0.04, right=(5, 5, 0)),
        "asked": trial_of(0.06, 0.05, 0.04, right=(-1, 0, 0)),
    }
    assert learning.choose(sides, 0.05, ONLY_MAPS, False) == 4


@pytest.mark.parametrize(("apart", "chosen"), [(False, 3), (True, 4)])
def test_no_side_is_behind_the_offsets_alone_across_modalities(apart, chosen):
    sides = {
        "other": trial_of(-0.001, 0.001, 0.0),
        "asked": trial_of(0.1, 0.06, 0.0),
    }
    assert learning.choose(sides, 0.05, ONLY_MAPS, apart) == chosen


def test_where_queries_and_targets_lie_apart_nothing_is_whitened_and_offsets_stay():
    base = learning.MapFit(METHODS["blend"](), 1.0, 0.05, np.zeros((0, D)))
    white = replace(base, whitening=np.eye(D, dtype=np.float32))
    half = replace(base, share=0.5)
    for apart, expected in ((False, [True] * 3), (True, [True, False, False])):
        found = [fit.may_be_chosen(apart, False) for fit in (base, white, half)]
        assert found == expected
    assert not half.may_be_chosen(False, True), "titles tell nothing of hubs"
    assert not replace(half, strength=0.0).may_be_chosen(False, False)


def test_a_log_of_one_wording_a_target_is_tried_on_what_it_taught(pairs):
    targets, queries, answers = pairs
    once = hubplugin.Bank(queries[:200], answers[:200])
    banks = teachers_of(targets, once)
    sides = learning.draw_sides(banks, learning.find_pairs(banks.bank))
    assert set(sides) == {"other", "taught"}
    (fold,) = sides["taught"]
    assert set(fold.test) <= set(fold.teach)


def test_clicks_that_somebody_has_looked_at_choose_beside_a_noisy_log(pairs, rng):
    targets, queries, answers = pairs
    noisy = np.where(rng.random(PAIRS) < 0.2, rng.permutation(answers), answers)
    looked_at = hubplugin.Bank(queries, np.where(np.arange(PAIRS) < 60, answers, -1))
    lesson = banks_of(targets, looked_at, hubplugin.Bank(queries, noisy))
    assert lesson.other.queries == 60
    assert lesson.model.query_map.strength > 0
    assert len(lesson.model.terms[0].bank) == PAIRS


def test_titles_that_mislead_do_not_teach_beside_clicks(pairs, rng):
    targets, queries, answers = pairs
    other_turn = np.eye(D) + 0.9 * rng.normal(size=(D, D)) / D**0.5
    titles = unit(targets @ other_turn + 0.1 * rng.normal(size=(N, D)))
    log = hubplugin.Bank(queries, answers)
    lesson = banks_of(targets, log, hubplugin.Bank(titles, np.arange(N)))
    assert lesson.model.query_map.pairs == PAIRS
    clicks_alone = hubplugin.fit(targets, log, learn=True)
    np.testing.assert_allclose(
        lesson.model.query_map.step, clicks_alone.query_map.step, atol=1e-5
    )


def test_clicks_that_disagree_with_the_raw_search_are_said_to(pairs, rng):
    targets, queries, answers = pairs
    wrong = answers.copy()
    some = rng.random(PAIRS) < 0.3
    wrong[some] = rng.permutation(answers[some])
    for clicks, said in ((answers, False), (wrong, True)):
        notes = banks_of(targets, hubplugin.Bank(queries, clicks)).notes
        assert any("nearer to another's answer" in note for note in notes) is said


def test_where_offsets_lose_the_map_is_applied_without_them_and_judged_so(
    pairs, tmp_path, monkeypatch
):
    """On offsets alone the guard refuses this log."""
    targets, queries, answers = pairs
    bank = hubplugin.Bank(queries, answers)
    store = hubplugin.open_store(flat_index(tmp_path / "photos.faiss", targets))
    harmful = {"strength": 60.0}  # so that offsets are far wider than similarities
    with pytest.raises(hubplugin.CorrectionRefused):
        hubplugin.apply(store, bank, **harmful)
    result = hubplugin.apply(store, bank, learn=True, **harmful)
    assert result.trial.right.after > result.trial.right.before
    assert result.model.query_map is not None
    assert any("without offsets" in note for note in result.notes)
    assert np.ptp(result.model.offsets(targets)) == 0


def test_pairs_that_teach_nothing_are_said_to(pairs, monkeypatch):
    targets, queries, answers = pairs
    monkeypatch.setattr(learning, "choose", lambda *_: 0)
    with pytest.warns(UserWarning, match="the pairs taught nothing beyond the offsets"):
        model = hubplugin.fit(targets, hubplugin.Bank(queries, answers), learn=True)
    assert model.query_map is None
    np.testing.assert_array_equal(
        model.offsets(targets), hubplugin.fit(targets, queries).offsets(targets)
    )


def test_pairs_of_another_gallery_or_another_model_are_refused_in_one_line(pairs, rng):
    targets, queries, answers = pairs
    turned = np.linalg.qr(rng.normal(size=(D, D)))[0].astype(np.float32)
    for bank in (
        hubplugin.Bank(queries, rng.permutation(answers)),
        hubplugin.Bank(queries @ turned, answers),
    ):
        with pytest.raises(
            hubplugin.CorrectionRefused,
            match=r"the answers of the bank do not belong to its queries: \d\d% of",
        ) as error:
            hubplugin.fit(targets, bank, learn=True)
        assert "\n" not in str(error.value)


def test_a_pair_that_is_there_twice_counts_once(pairs):
    targets, queries, answers = pairs
    bank = hubplugin.Bank(np.tile(queries[:49], (3, 1)), np.tile(answers[:49], 3))
    with pytest.raises(
        InputError,
        match=r"the bank has 49 different pairs of 49 targets; learn=True needs 50",
    ):
        hubplugin.fit(targets, bank, learn=True)
    repeated = hubplugin.Bank(
        np.concatenate([queries, queries[:9]]), np.concatenate([answers, answers[:9]])
    )
    assert hubplugin.fit(targets, repeated, learn=True).query_map.pairs == PAIRS


def test_what_cannot_learn_is_refused_in_one_line(pairs):
    targets, queries, answers = pairs
    bank = hubplugin.Bank(queries, answers)
    for expected, arguments in {
        "pass a Bank with answers=": {"bank": queries},
        "400 different pairs of 5 targets": {
            "bank": hubplugin.Bank(queries, answers % 5)
        },
        "the default method, an inner product, a gallery and no executor: change method=": {
            "method": "csls"
        },
        "change metric=": {"metric": "euclidean"},
        "change targets=": {"targets": None},
        "change executor=": {"executor": object()},
        "learn=: expected True, False, or pairs as Bank(titles, ids), got str": {
            "learn": "fold"
        },
        "learn=: the pairs lack ids or rows; pass Bank(titles, ids)": {
            "learn": hubplugin.Bank(queries, queries)
        },
    }.items():
        with pytest.raises(InputError, match=re.escape(expected)) as error:
            hubplugin.fit(
                **({"targets": targets, "bank": bank, "learn": True} | arguments)
            )
        assert "\n" not in str(error.value)


def test_a_file_has_the_map(pairs, tmp_path):
    targets, queries, answers = pairs
    model = hubplugin.fit(targets, hubplugin.Bank(queries, answers), learn=True)
    model.save(tmp_path / "m.hub")
    again = hubplugin.load(tmp_path / "m.hub")
    np.testing.assert_array_equal(again.queries(queries), model.queries(queries))
    assert (again.query_map.strength, again.query_map.pairs) == (
        model.query_map.strength,
        PAIRS,
    )
    assert again.fingerprint == model.fingerprint
    assert f"queries mapped by {PAIRS} pairs" in repr(again)
    plain = replace(model, query_map=None)
    assert plain.fingerprint != model.fingerprint


def test_the_interval_of_a_change_is_wider_than_that_of_held_out_pairs_alone(rng):
    before, after = (rng.random(300) < 0.5 for _ in range(2))
    side = Side.of(before.astype(float), after.astype(float), "pairs")
    wider = learning.widen(side)
    assert (wider.change.value, wider.before, wider.after) == (
        side.change.value,
        side.before,
        side.after,
    )
    unseen = 3 / 300
    assert wider.change.high - wider.change.value == pytest.approx(
        1.4 * (side.change.high - side.change.value) + unseen
    )
    assert wider.change.value - wider.change.low == pytest.approx(
        1.4 * (side.change.value - side.change.low) + unseen
    )


def test_a_change_that_no_held_out_pair_sees_is_not_said_to_be_impossible():
    right = np.ones(100)
    change = learning.widen(Side.of(right, right, "pairs")).change
    assert change.low == pytest.approx(-0.03)
    assert change.high == pytest.approx(0.03)


def test_titles_teach_the_map_of_a_log_without_answers(pairs):
    targets, queries, answers = pairs
    rows, log = answers[:200], queries[200:]
    titles = hubplugin.Bank(queries[:200], rows)
    model = hubplugin.fit(targets, log, learn=titles)
    query_map = model.query_map
    assert query_map.pairs == 200
    how = banks_of(targets, hubplugin.Bank(log), titles).how
    step = step_of(how, queries[:200], rows, targets, bank=log)
    np.testing.assert_allclose(
        query_map.step, step, rtol=0, atol=1e-4 * np.abs(step).max()
    )
    np.testing.assert_allclose(model.terms[0].bank, log, rtol=0, atol=1e-6)
    mapped = hubplugin.fit(
        targets, model.queries(log), metric="dot", **model.parameters
    )
    np.testing.assert_allclose(
        model.offsets(targets), mapped.offsets(targets), rtol=0, atol=1e-5
    )


def test_answers_of_the_log_choose_in_the_place_of_titles(pairs):
    targets, queries, answers = pairs
    titles = hubplugin.Bank(queries[:200], answers[:200])
    for known, unasked in ((60, False), (49, True)):
        log = hubplugin.Bank(
            queries[200:260], np.where(np.arange(60) < known, answers[200:260], -1)
        )
        lesson = banks_of(targets, log, titles)
        assert lesson.unasked == unasked
        assert lesson.model.query_map.pairs == (200 if unasked else 260), (
            "of 49 answers nothing is learned"
        )
        assert lesson.other.queries == (200 if unasked else 60)
        assert (
            any("real queries gained 0 to 6 points" in note for note in lesson.notes)
            == unasked
        )


def test_a_trial_of_titles_holds_out_queries_of_the_log_alone(pairs):
    targets, queries, answers = pairs
    titles = hubplugin.Bank(queries[:200], answers[:200])
    for log_answers, right in ((None, None), (answers[200:], 200)):
        log = prepared(targets, queries[200:], log_answers)
        how = banks_of(targets, hubplugin.Bank(queries[200:], log_answers), titles).how
        trial = judge_by(log, how.offsets, learned=how)
        assert trial.queries == 200
        assert (None if trial.right is None else trial.right.queries) == right


def test_titles_unlike_the_queries_are_refused_unless_real_ones_choose(pairs, rng):
    targets, queries, answers = pairs
    elsewhere = unit(queries[200:] + 3 * unit(rng.normal(size=(1, D))))
    titles = hubplugin.Bank(queries[:200], answers[:200])
    with pytest.raises(
        CorrectionRefused,
        match=r"the pairs are unlike the queries of the bank: 1?\d\d% of nearest",
    ):
        hubplugin.fit(targets, elsewhere, learn=titles)
    few = np.where(np.arange(200) < 100, answers[200:], -1)
    assert not banks_of(targets, hubplugin.Bank(elsewhere, few), titles).unasked


def test_titles_that_stand_in_their_documents_are_refused_unless_real_queries_choose(
    pairs, rng
):
    targets, queries, answers = pairs
    titles = hubplugin.Bank(
        unit(targets[:200] + 0.1 * rng.normal(size=(200, D))), np.arange(200)
    )
    with pytest.raises(
        CorrectionRefused,
        match=r"the raw search finds 1?\d\d% of the pairs \(80% is too much\)",
    ):
        hubplugin.fit(targets, queries, learn=titles)
    assert not banks_of(targets, hubplugin.Bank(queries, answers), titles).unasked


def test_wrong_answers_are_refused_beside_titles_too(pairs, rng):
    targets, queries, answers = pairs
    titles = hubplugin.Bank(queries[:200], answers[:200])
    with pytest.raises(
        CorrectionRefused, match="the answers of the bank do not belong to its queries"
    ):
        hubplugin.fit(
            targets,
            hubplugin.Bank(queries[200:], rng.permutation(answers[200:])),
            learn=titles,
        )


def test_pairs_that_the_bank_has_teach_nothing_that_is_held_out(pairs):
    targets, queries, answers = pairs
    log = hubplugin.Bank(queries, answers)
    twice = hubplugin.Bank(
        np.concatenate([queries, queries[:50]]), np.concatenate([answers, answers[:50]])
    )
    banks = teachers_of(targets, log, twice)
    assert len(banks.pairs.query_bank) == 0
    alone = hubplugin.fit(targets, log, learn=True)
    np.testing.assert_allclose(
        hubplugin.fit(targets, log, learn=twice).query_map.whole,
        alone.query_map.whole,
        atol=1e-6,
    )
    few = hubplugin.Bank(queries[:300], answers[:300])
    banks = teachers_of(targets, few, twice)
    np.testing.assert_allclose(banks.pairs.query_bank, queries[300:], rtol=0, atol=1e-6)
