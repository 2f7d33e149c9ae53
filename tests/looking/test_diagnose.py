"""What `diagnose` says: the forecast, who the hubs are, what to do."""

import numpy as np
import pytest

from hubplugin import Bank, Recorder, apply, diagnose, fit, inspect, open_store
from hubplugin.measures.hubness import k_occurrence
from hubplugin.results import CORRECTED
from tests.galleries import flat_index, unit

QUERIES = 300


@pytest.fixture(scope="module")
def example(real):
    return unit(real["test_queries"][:QUERIES]), unit(real["test_targets"][:600])


@pytest.fixture(scope="module")
def answered(example):
    bank = Bank(example[0], np.arange(QUERIES))
    return diagnose(example[1], bank, learn=True)


def jobs(diagnosis):
    return [(step.job, step.learn) for step in diagnosis.page().steps]


def test_without_answers_it_says_what_would_tell(example):
    diagnosis = diagnose(example[1], example[0])
    assert "--answers" in str(diagnosis)
    assert diagnosis.trial.helps is None
    assert diagnosis.as_json()["lesson"] is None
    assert jobs(diagnosis) == [("apply", False)]


def test_with_answers_it_says_what_was_measured_on_held_out_queries(answered):
    right, other = answered.trial.right, answered.lesson.other
    said = str(answered)
    for side in (right, other):
        interval = f"{100 * side.change.low:+.1f} to {100 * side.change.high:+.1f}"
        shares = (f"{share:.1%}" for share in (side.before, side.after))
        for part in (*shares, interval):
            assert part in said
    assert answered.trial.helps == (right.change.low > 0)
    assert answered.as_json()["lesson"]["other"]["after"] == other.after
    assert jobs(answered) == [("apply", False), ("apply", True)]
    assert "hubplugin.apply(store, bank, learn=True)" in said


def test_the_headline_says_what_the_default_would_do(real):
    """Skewness and R@1 may go apart: both are in the first line, and so is a refusal."""
    diagnosis = diagnose(
        real["test_targets"], Bank(real["bank_queries"], real["bank_targets"])
    )
    headline = str(diagnosis).splitlines()[0]
    assert "There is hubness" in headline
    assert diagnosis.trial.outlook() in headline


def test_hubs_are_those_of_the_matrix_with_their_own_names(example):
    queries, targets = example
    nearest = np.argsort(-(queries @ targets.T), axis=1)[:, :10]
    occurrence = k_occurrence(nearest, len(targets))
    zero = np.zeros((1, targets.shape[1]), np.float32)
    with_zero = np.concatenate([zero, targets])
    plain = diagnose(targets, queries)
    shifted = diagnose(with_zero, queries)
    assert [hub.found_by["raw"] for hub in plain.hubs] == [
        occurrence[hub.id] for hub in plain.hubs
    ]
    assert plain.hubness.largest == occurrence.max()
    assert [hub.id - 1 for hub in shifted.hubs] == [hub.id for hub in plain.hubs]


def check_misled(hubs, raw, corrected, called="{}"):
    """Check the queries that hubs answer wrongly by the scores [q, n] of both searches; return the first.

    The answer to query i is target i. called: The name of a target, with its row.
    """
    shown = [(hub, misled) for hub in hubs for misled in hub.misled]
    for hub, misled in shown:
        row = int(misled.query.strip("“”").split()[1])
        assert raw[row].argmax() == hub.id != row
        assert misled.after == called.format(corrected[row].argmax())
        assert misled.right == (corrected[row].argmax() == row)
    return shown[0][1]


def test_a_hub_is_shown_corrected_and_with_queries_that_it_answers_wrongly(example):
    queries, targets = example
    texts = [f"question {row}" for row in range(QUERIES)]

    def embed(asked):
        return queries[[int(text.split()[1]) for text in asked]]

    answers = np.arange(QUERIES)
    diagnosis = diagnose(
        targets,
        Bank(texts, answers, embed=embed),
        show=lambda ids: [f"target {id}" for id in ids],
    )
    model = fit(targets, Bank(queries, answers))
    raw = queries @ targets.T
    corrected = raw + model.offsets(targets)
    found = k_occurrence(np.argsort(-corrected, axis=1)[:, :10], len(targets))
    for hub in diagnosis.hubs:
        assert hub.found_by[CORRECTED] == pytest.approx(found[hub.id], abs=1)
        assert len(hub.misled) <= 3
    misled = check_misled(diagnosis.hubs, raw, corrected, "target {}")
    assert f"→ {misled.after}" in str(diagnosis)
    assert str(misled) in diagnosis.as_text(verbose=True)


def test_inspect_shows_hubs_with_recorded_queries_and_what_was_clicked(
    example, tmp_path
):
    queries, targets = example
    store = open_store(flat_index(tmp_path / "photos.faiss", targets))
    apply(store, queries[150:], "nnn", k=8, force=True)
    store.record = tmp_path / "record"
    recorder = Recorder(store.record, texts=True)
    for row in range(150):
        recorder.add(queries[row], f"question {row}")
        recorder.click(queries[row], row)
    recorder.flush()
    seen = inspect(store)
    assert seen.hubness.live
    raw = queries @ targets.T
    corrected = raw + store.correction().model.offsets(targets)
    misled = check_misled(seen.hubness.hubs, raw, corrected)
    assert str(misled) in seen.as_text(verbose=True)


def test_copies_and_another_model_are_advised_upon_and_not_corrected(example):
    queries, targets = example
    copied = diagnose(np.concatenate([targets, targets]), queries)
    steps = copied.page().steps
    assert [step.job for step in steps] == [""]
    assert "keep one copy of each" in steps[0].text
    turned = np.linalg.qr(np.random.default_rng(0).normal(size=(384, 384)))[0]
    other = diagnose(targets, unit(queries @ turned))
    assert other.page().sign == -1
    assert any(
        "the model that embedded the documents" in step.text
        for step in other.page().steps
    )
