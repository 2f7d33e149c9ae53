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


@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_queries_are_mapped_as_the_formula_says(pairs, metric):
    targets, queries, answers = pairs
    model = hubplugin.fit(
        targets, hubplugin.Bank(queries, answers), metric=metric, learn=True
    )
    query_map = model.query_map
    assert query_map.strength == 2
    assert query_map.pairs == PAIRS
    z = formulas.whitening(queries, targets) if query_map.whitened else np.eye(D)
    tau = hubplugin.fit(targets, queries @ z, metric="dot").parameters["tau"]
    step = (
        np.eye(D)
        + query_map.strength * formulas.query_map(queries @ z, answers, targets, tau)
    ) @ z - np.eye(D)
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
    bank = (
        hubplugin.Bank(queries, answers)
        .prepare("cosine", Compute("cpu"))
        .against(targets)
    )
    method = hubplugin.methods.METHODS["blend"]().resolve(bank)
    map_fit, folds, sample = (
        learning.MapFit(method, 0.5, 0.07),
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
        bank, gallery, number = hubplugin.Bank(queries, answers), targets, answers
    else:
        queries, number = queries[: PAIRS // 2], np.arange(PAIRS // 2)
        gallery = targets[np.setdiff1d(np.arange(N), answers)]
        bank = hubplugin.Bank(queries, targets[answers[: PAIRS // 2]], pairs=number)
    prepared = bank.prepare("cosine", Compute("cpu")).against(gallery)
    z, asked_for = formulas.whitening(queries, gallery), targets[answers]
    asked_of = targets if answers_are == "rows" else asked_for
    method = hubplugin.methods.METHODS["nnn"](k=5)
    bases = [
        learning.MapFit(method, 0.0, 0.07, first)
        for first in (None, z.astype(np.float32))
    ]
    sides = learning.draw_sides(
        learning.Teachers(prepared), learning.find_pairs(prepared)
    )
    assert set(sides) == ({"other", "asked"} if answers_are == "rows" else {"other"})
    for side, folds in sides.items():
        margins = cross_validate(
            [base.try_all_strengths for base in bases], prepared, folds
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
                w = formulas.query_map(
                    queries[fold.train] @ first, number[fold.train], asked_of, 0.07
                )
                q = queries[fold.test].astype(np.float64) @ first
                for strength in learning.STRENGTHS:
                    for share in learning.SHARES:
                        scores = (q + strength * q @ w.T) @ candidates.T.astype(
                            np.float64
                        ) + share * offsets
                        own = scores[np.arange(len(columns)), columns]
                        scores[np.arange(len(columns)), columns] = -np.inf
                        expected.append(own - scores.max(axis=1))
        count = 2 * len(learning.STRENGTHS) * len(learning.SHARES)
        expected = np.concatenate(
            [
                np.stack(expected[first : first + count])
                for first in range(0, len(expected), count)
            ],
            axis=1,
        )
        np.testing.assert_allclose(margins, expected, rtol=0, atol=2e-5)


def margins_of(*gains, half=0.0, none=0.0):
    """Margins [1, 6, 3, 400] whose soft R@1 is 0.5 and, at the strengths above 0, more by `gains`, with an error of .01
    each; where gains are lacking, less. Those of strengths above 1 differ from the one before with an error of .014.
    With `half` of the offsets, or with `none`, it is more by as much, with an error of .005."""
    noise, other = np.array([1.0, -1.0] * 200), np.array([1.0, 1.0, -1.0, -1.0] * 100)
    gains = [0.0, *gains, *[-0.1] * (5 - len(gains))]
    scales = [0 * noise, noise, noise, noise, other, noise]
    soft = 0.5 + np.array(
        [gain + 0.2 * scale for gain, scale in zip(gains, scales, strict=True)]
    )
    soft = np.stack(
        [soft, soft + half + 0.1 * noise, soft + none + 0.1 * noise], axis=1
    )
    return (0.4 * 0.05 * np.log(soft / (1 - soft)))[None]


@pytest.mark.parametrize(
    ("sides", "errors", "strength"),
    [
        ([(0.01, 0.02, 0.03)], 0.0, 3),
        ([(0.01, 0.02, -0.001)], 0.0, 2),  # behind none
        ([(0.05, 0.02, 0.03)], 0.0, 3),  # the strongest, not the best
        ([(0.021, 0.021, 0.019)], 2.0, 2),
        ([(0.019, 0.019, 0.019)], 2.0, 0),
        (
            [(0.01, 0.02, 0.03), (0.01, -0.001, -0.001)],
            0.0,
            1,
        ),  # the other side decides, too
        (
            [(0.01, -0.019, -0.021)],
            -2.0,
            2,
        ),  # behind by no more than two standard errors
        (
            [(0.01, 0.02, 0.03, 0.06, 0.09)],
            -2.0,
            5,
        ),  # each clearly ahead of the one before
        ([(0.01, 0.02, 0.03, 0.05, 0.09)], -2.0, 3),  # 1.5 is not, and bars the way
        ([(0.01, 0.02, -0.021, 0.06, 0.09)], -2.0, 2),
        ([(0.01, 0.02, 0.03, 0.06, 0.09), (0.01, 0.02, 0.03, 0.06, 0.08)], -2.0, 4),
    ],
)
def test_the_strength_is_the_largest_that_no_side_is_behind_with(
    sides, errors, strength
):
    assert learning.choose([margins_of(*gains) for gains in sides], 0.05, errors) == (
        0,
        strength,
        0,
    )


@pytest.mark.parametrize(
    ("sides", "share"),
    [
        ([(0.009, 0.009)], 0),  # ahead by less than two standard errors
        ([(0.011, 0.009)], 1),
        ([(0.011, 0.022)], 2),  # no offsets are ahead of half of them
        ([(0.011, 0.022), (0.011, 0.009)], 1),  # the other side decides, too
        ([(0.03, 0.03), (-0.001, -0.001)], 0),
    ],
)
def test_less_of_the_offsets_is_taken_where_it_is_clearly_ahead_on_every_side(
    sides, share
):
    margins = [
        margins_of(0.01, 0.02, 0.03, half=half, none=none) for half, none in sides
    ]
    assert learning.choose(margins, 0.05, -2.0) == (0, 3, share)


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


def test_a_bank_is_whitened_where_no_side_is_behind_with_it():
    plain, ahead, behind = (
        margins_of(0, 0, 0),
        margins_of(0, 0, 0) + 0.001,
        margins_of(0, 0, 0) - 0.001,
    )
    both = [np.concatenate([plain, change]) for change in (ahead, behind)]
    assert learning.choose([both[0]], 0.05, 0.0)[0] == 1
    assert learning.choose([both[0], both[1]], 0.05, 0.0)[0] == 0


@pytest.mark.parametrize(
    ("probes", "gain", "whitens"),
    [(200, -0.001, 1), (140, -0.001, 0), (140, 0.016, 0), (140, 0.018, 1)],
)
def test_few_pairs_must_show_that_a_whitening_gains(probes, gain, whitens):
    soft = np.full((2, len(learning.STRENGTHS), 3, probes), 0.5)
    soft[1] += gain + 0.2 * np.resize(
        [1.0, -1.0], probes
    )  # with an error of 0.0169 for 140 probes
    margins = 0.4 * 0.05 * np.log(soft / (1 - soft))
    assert learning.choose([margins], 0.05, -2.0)[0] == whitens


def test_pairs_that_teach_nothing_are_said_to(pairs, monkeypatch):
    targets, queries, answers = pairs
    monkeypatch.setattr(learning, "choose", lambda *_: (0, 0, 0))
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
        "default method, not with method='csls'": {"method": "csls"},
        "not for metric='euclidean'": {"metric": "euclidean"},
        "pass targets=": {"targets": None},
        "does not go with executor=": {"executor": object()},
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


def test_a_judged_bank_that_cannot_choose_is_refused(pairs):
    targets, queries, answers = pairs
    bank = hubplugin.Bank(queries, answers)
    for expected, judged, arguments in (
        (
            "the judged bank has 49 different pairs",
            hubplugin.Bank(queries[:49], answers[:49]),
            {},
        ),
        (
            "judged= is for logs",
            hubplugin.Bank(queries, targets[answers], pairs=np.arange(len(queries))),
            {},
        ),
        ("pass learn=True", bank, {"learn": False}),
    ):
        with pytest.raises(InputError, match=expected.replace("(", r"\(")):
            hubplugin.fit(
                **(
                    {"targets": targets, "bank": bank, "judged": judged, "learn": True}
                    | arguments
                )
            )
    model = hubplugin.fit(
        targets, bank, learn=True, judged=hubplugin.Bank(queries[:60], answers[:60])
    )
    assert model.query_map.strength == 2


def test_the_interval_of_a_change_is_wider_than_that_of_held_out_pairs_alone(rng):
    before, after = (rng.random(300) < 0.5 for _ in range(2))
    side = Side.of(before.astype(float), after.astype(float), "pairs")
    wider = learning.widen(side)
    assert (wider.change.value, wider.before, wider.after) == (
        side.change.value,
        side.before,
        side.after,
    )
    assert wider.change.high - wider.change.value == pytest.approx(
        1.2 * (side.change.high - side.change.value)
    )
    assert wider.change.value - wider.change.low == pytest.approx(
        1.2 * (side.change.value - side.change.low)
    )


def test_titles_teach_the_map_of_a_log_without_answers(pairs):
    targets, queries, answers = pairs
    titles, rows, log = queries[:200], answers[:200], queries[200:]
    model = hubplugin.fit(targets, log, learn=hubplugin.Bank(titles, rows))
    query_map = model.query_map
    assert query_map.pairs == 200
    z = formulas.whitening(log, targets) if query_map.whitened else np.eye(D)
    tau = hubplugin.fit(targets, log @ z, metric="dot").parameters["tau"]
    step = (
        np.eye(D)
        + query_map.strength * formulas.query_map(titles @ z, rows, targets, tau)
    ) @ z - np.eye(D)
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


def banks_of(targets, log, titles, judged=None):
    banks = learning.Teachers.read(
        log, titles, judged, "cosine", Compute("cpu")
    ).against(targets)
    return learning.learn_query_map(METHODS["blend"](), banks)


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
    judged = hubplugin.Bank(queries[260:320], answers[260:320])
    lesson = banks_of(targets, hubplugin.Bank(queries[200:260]), titles, judged)
    assert (lesson.unasked, lesson.other.queries, lesson.model.query_map.pairs) == (
        False,
        60,
        200,
    )


def test_a_trial_of_titles_holds_out_queries_of_the_log_alone(pairs):
    targets, queries, answers = pairs
    titles = hubplugin.Bank(queries[:200], answers[:200])
    for log_answers, right in ((None, None), (answers[200:], 200)):
        log = (
            hubplugin.Bank(queries[200:], log_answers)
            .prepare("cosine", Compute("cpu"))
            .against(targets)
        )
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
    judged = hubplugin.Bank(elsewhere[:100], answers[200:300])
    assert not banks_of(targets, hubplugin.Bank(elsewhere), titles, judged).unasked


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
    banks = learning.Teachers.read(log, twice, None, "cosine", Compute("cpu")).against(
        targets
    )
    assert len(banks.pairs.query_bank) == 0
    alone = hubplugin.fit(targets, log, learn=True)
    np.testing.assert_allclose(
        hubplugin.fit(targets, log, learn=twice).query_map.whole,
        alone.query_map.whole,
        atol=1e-6,
    )
    few = hubplugin.Bank(queries[:300], answers[:300])
    banks = learning.Teachers.read(few, twice, None, "cosine", Compute("cpu")).against(
        targets
    )
    np.testing.assert_allclose(banks.pairs.query_bank, queries[300:], rtol=0, atol=1e-6)
