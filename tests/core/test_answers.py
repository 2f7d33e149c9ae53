"""An answer is no hub: what is left out of the sums, against float64 arithmetic that leaves out the same entries."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hubplugin
from hubplugin.bank import spacing_ratio
from hubplugin.compute import Compute, MeanOfLargest, Similarities, reduce
from hubplugin.compute.reductions import SMALLEST_LOG
from hubplugin.metric import Metric
from hubplugin.vectors import as_vectors
from tests.core.formulas import blend, log_of, similarity, without_answers

METRICS = ("cosine", "dot", "euclidean")


def make_log(seed=0, m=60, n=90, d=16):
    """A log: each bank query is one of the first targets, moved a little."""
    rng = np.random.default_rng(seed)
    targets = rng.standard_normal((n, d)).astype(np.float32)
    bank = (
        targets[rng.integers(0, n // 2, m)] + 0.4 * rng.standard_normal((m, d))
    ).astype(np.float32)
    return bank, targets


def centred(offsets):
    return offsets - offsets.mean()


def test_answers_in_a_target_bank_are_kept_and_others_left_out(real):
    bank, targets = real["bank_queries"], real["test_targets"]
    clean = hubplugin.fit(targets, hubplugin.Bank(bank, real["bank_targets"]))
    assert "answers" not in clean.parameters
    log = np.concatenate([targets, real["bank_targets"][:500]])
    for size, second in ((2_000, None), (500, real["bank_targets"][500:])):
        assert (
            hubplugin.fit(log, hubplugin.Bank(bank[:size], second)).parameters[
                "answers"
            ]
            == "left out"
        )


# Exponentials held in float32, in float16, not at all.
@pytest.mark.parametrize(
    "memory",
    [
        *(pytest.param(room, marks=pytest.mark.slow) for room in ("1GiB", "8MiB")),
        "1MiB",
    ],
)
def test_the_blend_is_what_fit_does_when_nothing_is_said(real, memory):
    fitted = hubplugin.fit(
        real["test_targets"],
        real["bank_queries"],
        compute=hubplugin.Compute(memory=memory),
    )
    assert fitted.method == "blend"
    s = similarity(real["bank_queries"], real["test_targets"], "cosine")
    tau = fitted.parameters["tau"]
    assert tau == pytest.approx(s.std() / 2, rel=0.03)  # of a sample of the bank
    expected = blend(s, leave_out=True, tau=tau)
    np.testing.assert_allclose(
        fitted.offsets(real["test_targets"]), expected, atol=1e-4
    )
    assert fitted.gallery.deviation == pytest.approx(expected.std(), rel=1e-3)
    assert fitted.gallery.largest == pytest.approx(expected.max(), abs=1e-4)
    assert fitted.gallery.smallest == pytest.approx(expected.min(), abs=1e-4)


def test_a_later_target_is_an_answer_by_its_similarity():
    bank, targets = make_log()
    fitted = hubplugin.fit(targets, bank, "nnn", k=3, alpha=0.5, answers="left out")
    late = make_log(seed=3)[1][:20]
    s = similarity(bank, late, "cosine")
    nearest = similarity(bank, targets, "cosine").max(axis=1)
    s[s >= nearest[:, None]] = -np.inf
    s[s.argmax(axis=0), np.arange(len(late))] = -np.inf
    raw = -0.5 * np.sort(s, axis=0)[::-1][:3].mean(axis=0)
    known, _ = without_answers(similarity(bank, targets, "cosine"))
    centre = log_of("nnn", known, None, k=3, alpha=0.5).mean()
    expected = np.minimum(raw - centre, fitted.gallery.cap)
    np.testing.assert_allclose(fitted.offsets(late), expected, atol=1e-5)


def test_a_hub_that_takes_every_first_place_is_sunk(real):
    bank, targets = (
        real["bank_queries"].astype(np.float32),
        real["test_targets"].astype(np.float32),
    )
    queries, hubs = real["test_queries"].astype(np.float32), targets.copy()
    hubs[0] = 3 * bank.mean(axis=0) / np.linalg.norm(bank.mean(axis=0))
    before = ((queries @ hubs.T).argmax(axis=1) == np.arange(len(queries))).mean()
    offsets = hubplugin.fit(hubs, bank, metric="dot").offsets(hubs)
    after = (
        (queries @ hubs.T + offsets).argmax(axis=1) == np.arange(len(queries))
    ).mean()
    assert offsets.argmin() == 0
    assert after > before + 0.3


def test_what_is_left_out_is_stored_with_the_model_and_the_bank_of_both_terms_once():
    bank, targets = make_log()
    fitted = hubplugin.fit(targets, bank, answers="left out")
    content, late = fitted.to_bytes(), make_log(seed=5)[1]
    loaded = hubplugin.OffsetModel.from_bytes(content)
    assert np.array_equal(loaded.offsets(late), fitted.offsets(late))
    assert loaded.terms[0].bank is loaded.terms[1].bank
    assert len(content) < 1.5 * bank.nbytes + 8_000


def test_too_few_queries_leave_nothing_out():
    bank, targets = make_log(m=SMALLEST_LOG - 1)
    kept = hubplugin.fit(targets, bank, "nnn")
    np.testing.assert_array_equal(
        hubplugin.fit(targets, bank, "nnn", answers="left out").offsets(targets),
        kept.offsets(targets),
    )


@pytest.mark.parametrize("memory", ["1GiB", "1MiB"])
def test_a_model_read_again_gives_what_the_fit_gave_if_queries_are_there_twice(memory):
    bank, targets = make_log(m=200, n=300)
    bank = np.concatenate([bank, bank[:60]])[np.random.default_rng(1).permutation(260)]
    fitted = hubplugin.fit(
        targets, bank, answers="left out", compute=Compute(memory=memory)
    )
    loaded = hubplugin.OffsetModel.from_bytes(fitted.to_bytes())
    np.testing.assert_allclose(
        loaded.offsets(targets), fitted.offsets(targets), atol=1e-5
    )


def test_copies_of_queries_do_not_strengthen_a_correction():
    bank, targets = make_log(m=40)
    fitted = hubplugin.fit(targets, np.tile(bank, (5, 1)))
    assert fitted.parameters["strength"] == pytest.approx(40 / 140, rel=1e-3)


@settings(max_examples=40, deadline=None)
@given(scale=st.floats(0.01, 50), shift=st.floats(-5, 5), seed=st.integers(0, 5))
def test_the_spacing_ratio_knows_neither_scale_nor_origin(scale, shift, seed):
    largest = -np.sort(-np.random.default_rng(seed).standard_normal((30, 11)), axis=1)
    assert spacing_ratio(scale * largest + shift) == pytest.approx(
        spacing_ratio(largest), rel=1e-6
    )


def test_a_mean_of_fewer_than_k_takes_what_is_left():
    bank, targets = make_log(m=30)
    levels = np.full(30, 1e9)  # nothing is an answer; each target's largest goes
    (mean,) = reduce(
        Similarities(bank, Metric.DOT, Compute()),
        as_vectors(targets, "t"),
        [MeanOfLargest(30)],
        levels,
    )
    s = np.sort(similarity(bank, targets, "dot"), axis=0)[:-1]
    np.testing.assert_allclose(mean, s.mean(axis=0), rtol=1e-5, atol=1e-5)
