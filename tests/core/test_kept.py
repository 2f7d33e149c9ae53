"""A fit keeps the offsets of its gallery, and gives them to that very gallery only."""

import numpy as np
import pytest

import hubplugin
from hubplugin.compute import Similarities
from hubplugin.model import offset_model as kept


@pytest.fixture
def sets(rng):
    return tuple(rng.normal(size=(rows, 16)).astype(np.float32) for rows in (60, 90, 40))


@pytest.fixture
def passes(monkeypatch):
    """What is multiplied, by the name that progress is reported under."""
    seen = []
    whole = Similarities.tiles

    def tiles(self, targets, what, **options):
        seen.append(what)
        return whole(self, targets, what, **options)

    monkeypatch.setattr(Similarities, "tiles", tiles)
    return seen


@pytest.mark.parametrize("method", ["blend", "is", "nnn", "dbsn", "dualis", "dn"])
@pytest.mark.parametrize("memory", ["1GiB", "1MiB"])
def test_offsets_of_the_fits_gallery_cost_no_product_and_those_of_another_precision_do(method, memory, sets, passes):
    bank, targets, second = sets
    model = hubplugin.fit(targets, hubplugin.Bank(bank, second), method, compute=hubplugin.Compute(memory=memory))
    del passes[:]
    model.offsets(targets)
    assert passes == []
    model.offsets(targets, compute=hubplugin.Compute(precision="float64"))
    assert passes


@pytest.mark.parametrize("change", ["one bit", "two rows swapped", "one more", "another shape"])
def test_a_gallery_that_changed_gets_new_offsets(change, sets):
    bank, targets, _ = sets
    model = hubplugin.fit(targets, bank, "is")
    if change == "one bit":
        targets[7, 3] = np.nextafter(targets[7, 3], np.float32(np.inf))
        targets[8] *= -1
    elif change == "two rows swapped":
        targets[[0, 1]] = targets[[1, 0]]
    elif change == "one more":
        targets = np.concatenate([targets, targets[:1]])
    else:
        targets = targets[:45]
    fresh = hubplugin.fit(None, bank, "is").offsets(targets)
    np.testing.assert_allclose(model.offsets(targets), np.minimum(fresh - model.centre, model.gallery.cap), atol=1e-6)


def test_large_galleries_are_not_kept_and_files_hold_none(sets, passes, monkeypatch, tmp_path):
    bank, targets, _ = sets
    hubplugin.fit(targets, bank, "is").save(tmp_path / "model.hub")
    loaded = hubplugin.load(tmp_path / "model.hub")
    monkeypatch.setattr(kept, "KEPT_BYTES", 8 * len(targets) - 1)
    for model in (loaded, hubplugin.fit(targets, bank, "is")):
        del passes[:]
        model.offsets(targets)
        assert passes == ["offsets"]


def test_who_writes_to_what_was_given_does_not_change_what_is_kept(sets):
    bank, targets, _ = sets
    model = hubplugin.fit(targets, bank, "nnn")
    first = model.offsets(targets)
    expected = first.copy()
    first[:] = 0
    np.testing.assert_array_equal(model.offsets(targets), expected)
