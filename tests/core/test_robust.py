"""A robust model bounds in how much of the bank a newcomer stands among the nearest."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import brentq

import hubplugin
from hubplugin import InputError
from hubplugin.methods.robust import FEWEST, MEMBER, MOST, NEWCOMER, bounded, floor_of
from hubplugin.model import QueryMap
from hubplugin.model.offset_model import WIDER

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
    plain = hubplugin.fit(gallery, bank, method)
    model = hubplugin.fit(gallery, bank, method, robust=True)
    assert shares_of_lists(bank, gallery, plain.offsets(gallery), newcomers, plain.offsets(newcomers)).max() > MOST
    shares = shares_of_lists(bank, gallery, model.members.offsets(gallery), newcomers, model.offsets(newcomers))
    assert shares.max() <= model.bound.share <= MOST


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean"])
def test_offsets_are_lowered_as_the_formula_says(metric, sets):
    bank, gallery, newcomers = sets
    bank = unit(bank + unit(bank.mean(axis=0, keepdims=True)))  # as queries of another modality lie
    gallery = np.concatenate([gallery[1:], unit(bank.mean(axis=0, keepdims=True))])
    model = hubplugin.fit(gallery, bank, "nnn", metric=metric, robust=True)
    plain, bound = hubplugin.fit(gallery, bank, "nnn", metric=metric), model.bound
    assert bound.share == max(min(10 * NEWCOMER / ROWS, MOST), FEWEST / ROWS)
    assert bound.members_share == 10 * MEMBER * NEWCOMER / ROWS
    for targets, found, share, tau in (
        (newcomers, model.offsets(newcomers), bound.share, WIDER * bound.tau),
        (gallery, model.members.offsets(gallery), bound.members_share, bound.tau),
    ):
        above, before = similarities(metric, bank, targets) - bound.levels[:, None], plain.offsets(targets)
        wanted = [
            lowered(column / tau, offset / tau, share * ROWS / 2) * tau
            for column, offset in zip(above.T, before, strict=True)
        ]
        assert (np.array(wanted) < before - 1e-6).any()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * tau)


def similarities(metric, bank, targets):
    if metric == "euclidean":
        return -((bank[:, None].astype(np.float64) - targets[None]) ** 2).sum(axis=2) / 2
    return bank.astype(np.float64) @ targets.T


def lowered(above, offset, count):
    """The largest number up to `offset` with sum sigmoid(above + it) <= count."""

    def total(o):
        return (1 / (1 + np.exp(-(above + o)))).sum() - count

    return offset if total(offset) <= 0 else brentq(total, offset - 200, offset, xtol=1e-9)


def test_what_lies_very_near_to_one_query_keeps_its_offset():
    rng = np.random.default_rng(0)
    bank, gallery = (unit(rng.normal(size=(ROWS, 16)) + 1.0) for _ in range(2))
    bank[0] = unit(-bank.mean(axis=0, keepdims=True))  # far from all others, and nothing in the gallery is as near
    model, plain = (hubplugin.fit(gallery, bank, "nnn", robust=robust) for robust in (True, False))
    few, many = bank[:1], unit(bank.mean(axis=0, keepdims=True))
    assert model.offsets(few) == plain.offsets(few)
    assert model.offsets(many) < plain.offsets(many)


def test_what_was_planted_before_the_fit_has_the_share_of_members(sets):
    bank, gallery, _ = sets
    apart = unit(bank + unit(bank.mean(axis=0, keepdims=True)))  # as queries of another modality lie
    poisoned = np.concatenate([gallery, unit(apart.mean(axis=0, keepdims=True))])
    model, plain = (hubplugin.fit(poisoned, apart, "nnn", robust=robust) for robust in (True, False))
    without, bounded = (
        shares_of_lists(apart, gallery, given[:-1], poisoned[-1:], given[-1:])[0]
        for given in (plain.offsets(poisoned), model.members.offsets(poisoned))
    )
    assert bounded <= model.bound.members_share < without


def test_members_keep_the_ranking_of_the_plain_fit(sets, real):
    bank, gallery, _ = sets
    queries = unit(real["test_queries"][:ROWS])
    found = [
        (np.argmax(queries @ gallery.T + offsets, axis=1) == np.arange(ROWS)).mean()
        for offsets in (
            hubplugin.fit(gallery, bank).offsets(gallery),
            hubplugin.fit(gallery, bank, robust=True).members.offsets(gallery),
        )
    ]
    assert found[1] >= found[0] - 0.01


def test_a_robust_model_is_the_same_when_it_is_read_back(sets, tmp_path):
    bank, gallery, newcomers = sets
    model = hubplugin.fit(gallery, bank, robust=True)
    model.save(tmp_path / "m.hub")
    loaded = hubplugin.load(tmp_path / "m.hub")
    assert loaded.fingerprint == model.fingerprint != hubplugin.fit(gallery, bank).fingerprint
    np.testing.assert_array_equal(loaded.offsets(newcomers), model.offsets(newcomers))
    np.testing.assert_array_equal(loaded.members.offsets(newcomers), model.members.offsets(newcomers))


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean"])
def test_nothing_with_the_offset_of_the_floor_is_found(metric, sets):
    bank, gallery, newcomers = sets
    model = hubplugin.fit(gallery, bank, "is", metric=metric, robust=True)

    levels = np.sort(similarities(metric, bank, gallery) + model.members.offsets(gallery), axis=1)[:, -10]
    assert (similarities(metric, bank, newcomers) + floor_of(model) < levels[:, None]).all()


@pytest.mark.parametrize("robust", [False, True])
def test_what_is_in_quarantine_is_found_by_no_query_that_a_map_makes_longer(robust, sets):
    bank, gallery, _ = sets
    gallery = unit(gallery - 3 * bank.mean(axis=0) / np.linalg.norm(bank.mean(axis=0)))  # opposite to what is asked
    given = hubplugin.Bank(bank).read("cosine", hubplugin.Compute(), targets=gallery)
    model = hubplugin.fit(gallery, bank, "is").having(query_map=QueryMap(4 * np.eye(bank.shape[1], dtype="f4"), 1.0, 0))
    model = bounded(model, given) if robust else model

    asked = model.queries(bank)
    best = (asked @ gallery.T + model.members.offsets(gallery)).max(axis=1)
    assert ((asked * bank).sum(axis=1) + floor_of(model) < best).all(), "a copy of the query itself"
    assert floor_of(model) > model.gallery.smallest - 10.1


def test_a_method_without_a_bank_and_groups_are_refused_in_one_line(sets):
    bank, gallery, _ = sets
    with pytest.raises(InputError, match="'dn' keeps no bank"):
        hubplugin.fit(gallery, bank, "dn", robust=True)
    with pytest.raises(InputError, match="knows no offset"):
        floor_of(hubplugin.fit(gallery, bank, "is", metric="euclidean"))
