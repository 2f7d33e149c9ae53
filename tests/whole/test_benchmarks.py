"""The settings that every default is measured by run on the data of the checkout alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import ot
import pytest

import hubplugin
from benchmarks.bank_settings import Family, code, further, one_wording
from benchmarks.banks_apart import earth_movers_distance, sweep
from benchmarks.contenders import STEPS
from benchmarks.settings import comparison, measure, merged
from benchmarks.tables import EXAMPLES

TINY = Family("tiny", "log", EXAMPLES, 2, partial(code, EXAMPLES, 60, 80, True))


@pytest.fixture(scope="module")
def rows():
    return measure(TINY, {"others"}, splits=2)


def test_a_setting_counts_the_right_answers_of_each_draw(rows):
    for seed, (first, tenth) in enumerate(rows["tiny: not asked"]["found"]["raw"]):
        setting = TINY.draw(seed)
        queries, truth = setting.tests["not asked"]
        ranked = np.argsort(-(queries @ setting.targets.T), axis=1)
        assert first == pytest.approx(100 * (ranked[:, 0] == truth).mean(), abs=0.01)
        assert tenth == pytest.approx(100 * (ranked[:, :10] == truth[:, None]).any(axis=1).mean(), abs=0.01)


def test_the_table_has_the_change_of_every_column_and_hindsight(rows):
    table = comparison(rows)
    found = rows["tiny: not asked"]["found"]
    change = np.mean(np.array(found["default"]) - np.array(found["raw"]), axis=0)
    assert f"| {change[0]:+.1f} / {change[1]:+.1f} |" in table
    assert "best in hindsight" in table
    assert "auto" not in table


def test_columns_that_were_not_measured_again_stay(rows):
    again = merged(rows["tiny: not asked"], measure(TINY, set(), splits=1)["tiny: not asked"])
    assert again["found"].keys() == rows["tiny: not asked"]["found"].keys()
    assert len(again["found"]["default"]) == 2


def test_the_examples_alone_give_settings(tmp_path):
    assert {family.source for family in further(tmp_path) if family.source.is_dir()} == {EXAMPLES}


def test_a_log_of_wordings_asks_for_each_target_once():
    truth = np.repeat(np.arange(9), 3)
    log = one_wording(5, np.random.default_rng(0), truth)
    assert log.sum() == len(set(truth[log])) == 5


def test_the_earth_movers_distance_is_that_of_pot(rng):
    first, second = rng.normal(size=(60, 5)), rng.normal(size=(60, 5)) + 1
    theirs = ot.emd2(ot.unif(60), ot.unif(60), ot.dist(first, second, metric="euclidean"))
    assert earth_movers_distance(first, second, 0) == pytest.approx(theirs)


def test_a_shifted_copy_lies_as_far_as_it_was_shifted(rng):
    vectors = rng.normal(size=(50, 4))
    assert earth_movers_distance(vectors, vectors + np.array([3, 0, 4, 0]), 0) == pytest.approx(5)


def test_sets_of_different_size_are_compared_on_equal_samples(rng):
    large, small = rng.normal(size=(3000, 3)), rng.normal(size=(40, 3)) + 10
    assert earth_movers_distance(large, small, 0) == pytest.approx(10 * 3**0.5, rel=0.1)


def test_a_sweep_over_temperatures_meets_the_method_at_its_own(rng):
    queries, targets, bank, asked_for = (rng.normal(size=(rows, 8)) + 0.5 for rows in (60, 60, 200, 200))
    found = sweep(queries, targets, bank, asked_for, (0.02, 0.05))
    own = hubplugin.evaluate(targets, bank, queries=queries, methods=["is"])["is"]
    point = found["is tau=0.05"]
    assert (point.recall[1], point.hubness.skewness) == (own.recall[1], own.hubness.skewness)


def test_each_step_of_a_fit_is_timed_in_functions_that_there_are():
    folder = Path(hubplugin.__file__).parent / "compute"
    for module, _, function in (name.partition(".") for names in STEPS.values() for name in names):
        assert f"def {function}(" in (folder / f"{module}.py").read_text()
