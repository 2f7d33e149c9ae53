"""Workers hold the exponentials of their shards between iterations, within `memory`, and make them anew when lost."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import hubplugin
from hubplugin.cluster import work
from hubplugin.reductions import KERNELS, Similarities
from tests.cluster.conftest import Serial

MIB = 1 << 20
SHARD = 600 * 300 * 2
"""Bytes of the float16 of a shard of 600 targets beside a bank of 300."""


@pytest.fixture
def bank(real):
    return real["bank_queries"][:300]


@pytest.fixture
def folder(gallery, tmp_path):
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", gallery[600 * number : 600 * (number + 1)])
    return tmp_path


@pytest.fixture
def products(monkeypatch):
    """The rows of each product of bank and targets."""
    rows: list[int] = []
    multiply = Similarities._multiplied

    def counted(self, targets, what, *rest):
        if what != "looking at the bank":
            rows.append(targets.rows)
        yield from multiply(self, targets, what, *rest)

    monkeypatch.setattr(Similarities, "_multiplied", counted)
    return rows


def fit(bank, folder, executor, method="blend", **more):
    return hubplugin.fit(bank, method, targets=str(folder / "*.npy"), executor=executor, **more)


class Forgetful(Serial):
    """Its worker is another one after some of the orders."""

    def submit(self, fn, /, order):
        future = super().submit(fn, order)
        if len(self.found) % 5 == 0:
            work.let_go()
        return future


@pytest.mark.parametrize("method", ["blend", "sn"])
def test_each_shard_is_multiplied_once(method, bank, folder, products, serial):
    fit(bank, folder, serial, method)
    assert products.count(600) == 3
    assert sum(products) < 1.2 * 3 * 600  # of a few targets all answers are known in the end only


def test_nothing_is_held_after_a_fit(bank, folder, serial):
    fit(bank, folder, serial)
    assert not KERNELS._places


@pytest.mark.parametrize(("method", "more"), [("blend", {}), ("sn", {"tau": 0.005}), ("sn", {"answers": "left out"})])
def test_what_is_lost_is_made_again_the_same(method, more, bank, folder, products, serial):
    expected = fit(bank, folder, serial, method, **more)
    before = len(products)
    assert fit(bank, folder, Forgetful(), method, **more).fingerprint == expected.fingerprint
    assert len(products) > 2 * before


@pytest.mark.parametrize(("memory", "held"), [(2 * MIB, 3), (MIB, 2)])
def test_memory_bounds_what_a_worker_holds(memory, held, bank, folder, gallery, products, serial, caplog):
    found = fit(bank, folder, serial, "sn", memory=memory)
    assert 3 * SHARD > MIB > 2 * SHARD
    # One pass and nine iterations of the shard that is not held, and its offsets.
    assert products.count(600) == 3 + (3 - held) * 10
    told = [each.getMessage() for each in caplog.records if "room to hold 2 of 3 shards" in each.getMessage()]
    assert len(told) == (held < 3)
    expected = hubplugin.fit(bank, "sn", targets=gallery[:1800])
    np.testing.assert_allclose(found.offsets(gallery), expected.offsets(gallery), rtol=0, atol=1e-5)


def test_another_run_takes_the_place_of_one_that_was_cut_off(bank, folder, products):
    with pytest.raises(KeyboardInterrupt):
        fit(bank, folder, Serial(12), memory=2 * MIB)
    assert len(KERNELS._places) == 3
    products.clear()
    fit(bank, folder, Serial(), memory=2 * MIB)
    assert products.count(600) == 3


def test_two_threads_at_one_shard_do_not_share_what_is_held():
    with KERNELS.place(("run", "shard"), 10, 100) as place, KERNELS.place(("run", "shard"), 10, 100) as second:
        assert (place.room, second.room) == (10, 0)


def test_an_idle_worker_lets_go():
    called = threading.Event()
    work._Alarm(0.01, called.set).again()
    assert called.wait(5)
