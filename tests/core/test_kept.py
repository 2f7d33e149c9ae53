"""A fit gives the offsets of its gallery, and a model computes those of any targets."""

import numpy as np
import pytest

from hubplugin import OffsetModel, apply, fit, inspect, open_store
from hubplugin.compute import Similarities
from tests.galleries import flat_index, unit


@pytest.fixture
def sets(rng):
    return [rng.normal(size=(rows, 16)).astype(np.float32) for rows in (60, 90, 40)]


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
