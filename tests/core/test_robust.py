"""A robust model bounds in how much of the bank a newcomer stands among the nearest."""

from __future__ import annotations

import numpy as np
import pytest

import hubplugin
from hubplugin import InputError
from hubplugin.methods.robust import MOST, floor_of
from hubplugin.model.bound import MEMBERS

ROWS = 400
METHODS = ["blend", "is", "dbsn", "nnn"]


@pytest.fixture
def sets(real):
    """Bank, gallery, and newcomers: the mean of the bank, which is near to all of it, and honest ones."""
    bank, gallery = unit(real["bank_queries"][:ROWS]), unit(real["test_targets"][:ROWS])
    return bank, gallery, np.concatenate([unit(bank.mean(axis=0, keepdims=True)), unit(real["test_targets"][ROWS:500])])


def unit(vectors):
    vectors = np.asarray(vectors, np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def shares_of_lists(bank, gallery, offsets, newcomers, theirs):
    """In how much of the bank each newcomer stands among the 10 nearest, beside the gallery alone."""
    levels = np.sort(bank.astype(np.float64) @ gallery.T + offsets, axis=1)[:, -10]
    return (bank.astype(np.float64) @ newcomers.T + theirs >= levels[:, None]).mean(axis=0)


@pytest.mark.parametrize("method", METHODS)
def test_no_newcomer_stands_in_more_than_its_share_of_the_lists(method, sets):
    bank, gallery, newcomers = sets
    plain = hubplugin.fit(bank, method, gallery)
    model = hubplugin.fit(bank, method, gallery, robust=True)
    of_members = plain.offsets(gallery)
    assert shares_of_lists(bank, gallery, of_members, newcomers, plain.offsets(newcomers)).max() > MOST
    shares = shares_of_lists(bank, gallery, of_members, newcomers, model.offsets(newcomers))
    assert shares.max() <= model.bound.share <= MOST


def test_the_limit_is_that_of_the_formula(sets):
    bank, gallery, newcomers = sets
    model = hubplugin.fit(bank, "is", gallery, robust=True)
    plain = hubplugin.fit(bank, "is", gallery)
    levels = np.sort(bank.astype(np.float64) @ gallery.T + plain.offsets(gallery), axis=1)[:, -10]
    exponents = (bank.astype(np.float64) @ newcomers.T - levels[:, None]) / model.bound.tau
    limits = model.bound.tau * (np.log(model.bound.share * ROWS) - np.log(np.exp(exponents).sum(axis=0)))
    wanted = np.minimum(plain.offsets(newcomers), limits)
    np.testing.assert_allclose(model.offsets(newcomers), wanted, rtol=0, atol=1e-5)
    wider = model.bound.tau * np.log(MEMBERS)
    np.testing.assert_allclose(
        model.members.offsets(newcomers), np.minimum(plain.offsets(newcomers), limits + wider), rtol=0, atol=1e-5
    )


def test_members_keep_the_ranking_of_the_plain_fit(sets, real):
    bank, gallery, _ = sets
    queries = unit(real["test_queries"][:ROWS])
    found = [
        (np.argmax(queries @ gallery.T + offsets, axis=1) == np.arange(ROWS)).mean()
        for offsets in (
            hubplugin.fit(bank, targets=gallery).offsets(gallery),
            hubplugin.fit(bank, targets=gallery, robust=True).members.offsets(gallery),
        )
    ]
    assert found[1] >= found[0] - 0.01


def test_a_robust_model_is_the_same_when_it_is_read_back(sets, tmp_path):
    bank, gallery, newcomers = sets
    model = hubplugin.fit(bank, targets=gallery, robust=True)
    model.save(tmp_path / "m.hub")
    loaded = hubplugin.load(tmp_path / "m.hub")
    assert loaded.fingerprint == model.fingerprint != hubplugin.fit(bank, targets=gallery).fingerprint
    np.testing.assert_array_equal(loaded.offsets(newcomers), model.offsets(newcomers))
    np.testing.assert_array_equal(loaded.members.offsets(newcomers), model.members.offsets(newcomers))


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean"])
def test_nothing_with_the_offset_of_the_floor_is_found(metric, sets):
    bank, gallery, newcomers = sets
    model = hubplugin.fit(bank, "is", gallery, metric=metric, robust=True)

    def similarities(targets):
        if metric == "euclidean":
            return -((bank[:, None].astype(np.float64) - targets[None]) ** 2).sum(axis=2) / 2
        return bank.astype(np.float64) @ targets.T

    levels = np.sort(similarities(gallery) + model.members.offsets(gallery), axis=1)[:, -10]
    assert (similarities(newcomers) + floor_of(model) < levels[:, None]).all()


def test_a_method_without_a_bank_and_groups_are_refused_in_one_line(sets):
    bank, gallery, _ = sets
    with pytest.raises(InputError, match="'dn' keeps no bank"):
        hubplugin.fit(bank, "dn", gallery, robust=True)
    with pytest.raises(InputError, match="knows no offset"):
        floor_of(hubplugin.fit(bank, "is", gallery, metric="euclidean"))
