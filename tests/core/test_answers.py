"""An answer is no hub: what is left out of the sums, against float64 arithmetic that leaves out the same entries."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubplugin import Bank, Compute, OffsetModel, fit
from hubplugin.bank import spacing_ratio
from hubplugin.compute.reductions import SMALLEST_LOG
from tests.core.formulas import blend, log_of, similarity, without_answers
from tests.galleries import assert_near


def make_log(seed=0, m=60, n=90, d=16):
    """A log: each bank query is one of the first targets, moved a little."""
    rng = np.random.default_rng(seed)
    targets = rng.standard_normal((n, d)).astype(np.float32)
    bank = targets[rng.integers(0, n // 2, m)] + 0.4 * rng.standard_normal((m, d))
    return bank.astype(np.float32), targets


def test_answers_in_a_target_bank_are_kept_and_others_left_out(real):
    bank, second = real["bank_queries"], real["bank_targets"]
    clean = fit(real["test_targets"], Bank(bank, second))
    assert "answers" not in clean.parameters
    log = np.concatenate([real["test_targets"], second[:500]])
    for log_bank in (bank[:2_000], Bank(bank[:500], second[500:])):
        assert fit(log, log_bank).parameters["answers"] == "left out"


# Exponentials held in float32, in float16, not at all.
@pytest.mark.parametrize(
    "memory",
    [
        *(pytest.param(room, marks=pytest.mark.slow) for room in ("1GiB", "8MiB")),
        "1MiB",
    ],
)
def test_the_blend_is_what_fit_does_when_nothing_is_said(real, memory):
    bank, targets = real["bank_queries"], real["test_targets"]
    fitted = fit(targets, bank, compute=Compute(memory=memory))
    assert fitted.method == "blend"
    s = similarity(bank, targets, "cosine")
    tau = fitted.parameters["tau"]
    assert tau == pytest.approx(s.std() / 2, rel=0.03)  # of a sample of the bank
    expected = blend(s, tau)
    assert_near(fitted.offsets(targets), expected, 1e-4)
    assert fitted.gallery.deviation == pytest.approx(expected.std(), rel=1e-3)
    assert fitted.gallery.largest == pytest.approx(expected.max(), abs=1e-4)
    assert fitted.gallery.smallest == pytest.approx(expected.min(), abs=1e-4)


def test_a_later_target_is_an_answer_by_its_similarity():
    bank, targets = make_log()
    fitted = fit(targets, bank, "nnn", k=3, alpha=0.5, answers="left out")
    late = make_log(seed=3)[1][:20]
    of_gallery = similarity(bank, targets, "cosine")
    s = similarity(bank, late, "cosine")
    s[s >= of_gallery.max(axis=1)[:, None]] = -np.inf
    s[s.argmax(axis=0), np.arange(len(late))] = -np.inf
    raw = log_of("nnn", s, None, k=3)
    known, _ = without_answers(of_gallery)
    centre = log_of("nnn", known, None, k=3).mean()
    expected = np.minimum(raw - centre, fitted.gallery.largest)
    assert_near(fitted.offsets(late), expected)


def test_what_is_left_out_is_stored_with_the_model_and_the_bank_of_both_terms_once():
    bank, targets = make_log()
    fitted = fit(targets, bank, answers="left out")
    content = fitted.to_bytes()
    late = make_log(seed=5)[1]
    loaded = OffsetModel.from_bytes(content)
    assert np.array_equal(loaded.offsets(late), fitted.offsets(late))
    assert loaded.terms[0].bank is loaded.terms[1].bank
    assert len(content) < 1.5 * bank.nbytes + 8_000


def test_too_few_queries_leave_nothing_out():
    bank, targets = make_log(m=SMALLEST_LOG - 1)
    kept, left_out = (
        fit(targets, bank, "nnn", answers=answers).offsets(targets)
        for answers in ("kept", "left out")
    )
    np.testing.assert_array_equal(left_out, kept)


@pytest.mark.parametrize("memory", ["1GiB", "1MiB"])
def test_a_model_read_again_gives_what_the_fit_gave_if_queries_are_there_twice(memory):
    bank, targets = make_log(m=200, n=300)
    bank = np.concatenate([bank, bank[:60]])[np.random.default_rng(1).permutation(260)]
    fitted = fit(targets, bank, answers="left out", compute=Compute(memory=memory))
    found = OffsetModel.from_bytes(fitted.to_bytes()).offsets(targets)
    assert_near(found, fitted.offsets(targets))


def test_copies_of_queries_do_not_strengthen_a_correction():
    bank, targets = make_log(m=40)
    fitted = fit(targets, np.tile(bank, (5, 1)))
    assert fitted.parameters["strength"] == pytest.approx(40 / 140, rel=1e-3)


@settings(max_examples=40, deadline=None)
@given(scale=st.floats(0.01, 50), shift=st.floats(-5, 5), seed=st.integers(0, 5))
def test_the_spacing_ratio_knows_neither_scale_nor_origin(scale, shift, seed):
    largest = -np.sort(-np.random.default_rng(seed).standard_normal((30, 11)), axis=1)
    expected = pytest.approx(spacing_ratio(largest), rel=1e-6)
    assert spacing_ratio(scale * largest + shift) == expected
