"""A gallery for which there is no room: log alpha is sought on a sample, and the error is told."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import hubplugin
from hubplugin.compute import Compute
from tests.core.test_numerical_truth import unit

ROOM = "12MB"
"""For 12,000 targets beside a bank of 500, in float16."""


@pytest.fixture(scope="module")
def sets():
    """Bank [500, 32], targets [30,000, 32] and target bank [3,000, 32], not evenly spread."""
    rng = np.random.default_rng(0)
    centres = unit(rng, 40, 32)
    return tuple(unit_of(centres[rng.integers(40, size=n)] + 1.5 * unit(rng, n, 32)) for n in (500, 30_000, 3_000))


def unit_of(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def offsets(sets, method, memory, **parameters):
    bank, targets, second = sets
    compute = Compute("cpu", memory=memory)
    banks = hubplugin.Bank(bank, second) if method == "dbsn" else bank
    return hubplugin.fit(targets, banks, method, tau=0.05, compute=compute, **parameters).offsets(
        targets, compute=compute
    )


def told(caplog):
    return [record.getMessage() for record in caplog.records if "sample of" in record.getMessage()]


@pytest.mark.parametrize("answers", ["kept", "left out"])
@pytest.mark.parametrize("method", ["sn", "dbsn", "blend"])
def test_what_has_no_room_is_sampled_and_the_error_told(method, answers, sets, caplog):
    exact = offsets(sets, method, "1GiB", answers=answers)
    assert not told(caplog)
    sampled = offsets(sets, method, ROOM, answers=answers)
    (line,) = told(caplog)
    assert "sample of 30000 of 30000 targets" in line
    # Its last iteration saw all of them.
    assert np.abs(sampled - exact).mean() < 0.02 * exact.std()
    caplog.clear()
    some = offsets(sets, method, ROOM, answers=answers, sample=20_000)
    (line,) = told(caplog)
    assert "sample of 20000 of 30000 targets" in line
    assert np.abs(some - exact).mean() < 0.05 * exact.std()


def test_all_are_taken_where_that_is_asked_for(sets, caplog):
    exact = offsets(sets, "sn", "1GiB")
    np.testing.assert_allclose(offsets(sets, "sn", ROOM, sample="all"), exact, rtol=0, atol=1e-5)
    assert not told(caplog)


def test_where_there_is_room_for_few_all_are_read_again_and_again(sets, caplog):
    bank, targets, second = sets
    rows = np.repeat(bank, 2, axis=0) + np.float32(0)
    twice = (rows, targets, second)  # for 6,000 targets
    np.testing.assert_allclose(offsets(twice, "sn", ROOM), offsets(twice, "sn", "1GiB"), rtol=0, atol=1e-5)
    assert not told(caplog)


def test_the_error_that_is_told_is_that_of_the_sample(sets, caplog):
    changes = []
    for sample in (13_000, 30_000):
        caplog.clear()
        exact, some = offsets(sets, "sn", "1GiB"), offsets(sets, "sn", ROOM, sample=sample)
        changes.append(float(told(caplog)[0].split("at most ")[1].split(";")[0]))
        assert np.abs(some - exact).max() < changes[-1]
    assert changes[1] < changes[0]


def test_it_is_told_at_the_level_of_warnings(sets, caplog):
    offsets(sets, "sn", ROOM)
    assert {record.levelno for record in caplog.records if "sample of" in record.getMessage()} == {logging.WARNING}
