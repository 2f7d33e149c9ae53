"""The settings that every default is measured by run on the data of the checkout alone."""

from functools import partial

import numpy as np
import pytest

from benchmarks.bank_settings import Family, code, further, one_wording
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
