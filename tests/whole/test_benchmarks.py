"""The settings that every default is measured by run on the data of the checkout alone, and the count of a card needs
no card."""

from functools import partial

import numpy as np
import pytest
import torch

from benchmarks import gpu
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
        assert tenth == pytest.approx(
            100 * (ranked[:, :10] == truth[:, None]).any(axis=1).mean(), abs=0.01
        )


def test_the_table_has_the_change_of_every_column_and_hindsight(rows):
    table = comparison(rows)
    found = rows["tiny: not asked"]["found"]
    change = np.mean(np.array(found["default"]) - np.array(found["raw"]), axis=0)
    assert f"| {change[0]:+.1f} / {change[1]:+.1f} |" in table
    assert "best in hindsight" in table


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a card is there: the benchmark times it"
)
def test_what_a_card_would_wait_for_is_counted_without_one(monkeypatch):
    monkeypatch.setattr(
        gpu,
        "WORKS",
        [
            gpu.Work("is", {"tau": 0.05}),
            gpu.Work("sn", {"tau": 0.05, "iterations": 10}),
        ],
    )
    rows = [
        [cell.strip() for cell in line.split("|")[2:6]]
        for line in gpu.count(1_000, 1_000, 300).splitlines()[-2:]
    ]
    waits = [int(row[2]) for row in rows]
    launches = [int(row[1]) for row in rows]
    assert waits[0] < 10 <= waits[1]  # an iteration brings its sums back
    assert launches[0] < launches[1]
