"""A fit gives the offsets of its gallery, and a model computes those of any targets."""

import numpy as np
import pytest

from hubplugin import Bank, Compute, OffsetModel, apply, fit, inspect, open_store
from hubplugin.compute import Similarities
from tests.core.formulas import sinkhorn
from tests.galleries import assert_near, flat_index, unit


@pytest.fixture
def sets(rng):
    return [rng.normal(size=(rows, 16)).astype(np.float32) for rows in (60, 90, 40)]


@pytest.mark.parametrize("method", ["blend", "is", "nnn", "dbsn", "dualis", "dn"])
@pytest.mark.parametrize("memory", ["1GiB", "1MiB"])
@pytest.mark.parametrize("zeros", [0, 3])
def test_a_fit_gives_the_offsets_of_its_gallery(method, memory, zeros, sets):
    bank, targets, second = sets
    targets[:zeros] = 0
    compute = Compute(memory=memory)
    given = Bank(bank, second)
    model = fit(targets, given, method, compute=compute)
    assert model.fitted.dtype == np.float32
    assert_near(model.fitted, model.offsets(targets))
    assert not model.fitted[:zeros].any()


def test_other_terms_and_files_have_none_and_nobody_can_write_to_them(sets):
    bank, targets, _ = sets
    model = fit(targets, bank, "is")
    assert OffsetModel.from_bytes(model.to_bytes()).fitted is None
    assert fit(None, bank, "is").fitted is None
    with pytest.raises(ValueError, match="read-only"):
        model.fitted[0] = 0


def test_what_a_store_gets_is_not_computed_again(sets, monkeypatch, tmp_path):
    passes = []
    whole = Similarities.tiles

    def tiles(self, targets, label, **options):
        passes.append(label)
        return whole(self, targets, label, **options)

    monkeypatch.setattr(Similarities, "tiles", tiles)
    bank, targets, _ = map(unit, sets)
    store = open_store(flat_index(tmp_path / "photos.faiss", targets))
    done = apply(store, bank, force=True)
    assert "offsets" not in passes
    assert done.missing == len(targets)
    assert not inspect(store).stale


@pytest.mark.parametrize("tau", [0.05, 0.1])
@pytest.mark.parametrize("device", ["numpy", "cpu"])
def test_exponentials_kept_in_halves_are_within_the_stated_bound(tau, device, rng):
    targets = rng.normal(size=(900, 16)).astype(np.float32)
    bank = targets[rng.integers(0, 900, 400)] + 0.8 * rng.normal(size=(400, 16))
    compute = Compute(device, memory="1MiB")
    model = fit(targets, bank, "sn", tau=tau, compute=compute)
    expected = sinkhorn(bank.astype(np.float32), targets, "cosine", tau, 10)
    expected -= expected.mean()
    assert_near(model.fitted, expected, 5e-4 * tau)
