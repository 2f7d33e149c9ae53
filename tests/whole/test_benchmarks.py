"""The settings that every default is measured by run on the data of the checkout alone."""

from functools import partial

import numpy as np
import pytest

from benchmarks.bank_settings import Family, code
from benchmarks.settings import comparison, measure
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
