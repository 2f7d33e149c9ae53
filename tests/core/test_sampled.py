"""A gallery for which there is no room: log alpha is sought on a sample, and its size is told."""

import logging

import numpy as np
import pytest

import hubplugin
from hubplugin import Compute
from tests.galleries import assert_near, unit

ROOM = "20MB"
"""For 16,000 targets beside a bank of 500, in float16."""


@pytest.fixture(scope="module")
def sets():
    """Bank [500, 32], targets [30,000, 32] and target bank [3,000, 32], not evenly spread."""
    rng = np.random.default_rng(0)
    centres = unit(rng.normal(size=(40, 32)))
    return tuple(
        unit(centres[rng.integers(40, size=n)] + 1.5 * unit(rng.normal(size=(n, 32))))
        for n in (500, 30_000, 3_000)
    )


def offsets(sets, method, memory, **parameters):
    bank, targets, second = sets
    compute = Compute("cpu", memory=memory)
    banks = hubplugin.Bank(bank, second) if method == "dbsn" else bank
    return hubplugin.fit(
        targets, banks, method, tau=0.05, compute=compute, **parameters
    ).offsets(targets, compute=compute)


def warnings_of(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if "sample of" in record.getMessage()
    ]


@pytest.mark.parametrize("answers", ["kept", "left out"])
@pytest.mark.parametrize(
    ("method", "size"), [("sn", 16_000), ("dbsn", 13_000), ("blend", 16_000)]
)
def test_of_what_has_no_room_as_much_is_taken_as_has_and_that_is_told(
    method, size, answers, sets, caplog
):
    exact = offsets(sets, method, "1GiB", answers=answers)
    assert not warnings_of(caplog)
    sampled = offsets(sets, method, ROOM, answers=answers)
    assert warnings_of(caplog) == [
        f"Sinkhorn runs on a sample of {size} of 30000 targets; sample='all' uses all"
    ]
    assert {
        record.levelno
        for record in caplog.records
        if "sample of" in record.getMessage()
    } == {logging.WARNING}
    assert np.abs(sampled - exact).mean() < 0.05 * exact.std()


def test_a_larger_sample_comes_nearer(sets):
    exact = offsets(sets, "sn", "1GiB")
    sizes = (1_000, 8_000, 25_000, 40_000)  # of 30,000
    errors = [
        np.abs(offsets(sets, "sn", "1GiB", sample=size) - exact).mean()
        for size in sizes
    ]
    assert sorted(errors, reverse=True) == errors
    assert errors[2] < 0.03 * exact.std()
    assert errors[3] == 0


def test_all_are_taken_where_that_is_asked_for_and_where_there_is_room_for_few(
    sets, caplog
):
    bank, *others = sets
    twice = (np.repeat(bank, 2, axis=0), *others)  # with room for 8,000 targets
    for vectors, parameters in ((sets, {"sample": "all"}), (twice, {})):
        exact = offsets(vectors, "sn", "1GiB")
        assert_near(offsets(vectors, "sn", ROOM, **parameters), exact)
    assert not warnings_of(caplog)
