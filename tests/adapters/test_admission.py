"""Newcomers that look planted are flagged when they are written, and admitted, kept from being found, or refused."""

from __future__ import annotations

import faiss
import numpy as np
import pytest

import hubplugin
import hubplugin_faiss
from hubplugin import InputError
from hubplugin.admission import Admission
from hubplugin.compute import Compute

ROWS = 400


def unit(vectors: np.ndarray) -> np.ndarray:
    vectors = np.asarray(vectors, np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def bank(real) -> np.ndarray:
    return unit(real["bank_queries"][:ROWS])


@pytest.fixture
def upgraded(real, bank):
    """A robust index and its model."""
    gallery = unit(real["test_targets"][:ROWS])
    model = hubplugin.fit(gallery, bank, robust=True)
    index = faiss.IndexFlatIP(384)
    index.add(gallery)
    return hubplugin_faiss.upgrade(index, model), model


@pytest.fixture
def newcomers(real, bank) -> np.ndarray:
    """Ten honest ones, and behind them a planted one."""
    return np.concatenate([unit(real["test_targets"][ROWS : ROWS + 10]), unit(bank.mean(axis=0, keepdims=True))])


def test_a_planted_newcomer_is_named_to_the_hook_with_the_reason(upgraded, newcomers):
    index, model = upgraded
    told = []
    admission = Admission(hook=lambda name, reason: told.append((name, reason)))
    hubplugin_faiss.add(index, newcomers, model, admission=admission)
    assert [name for name, _ in told] == [ROWS + 10]
    assert "of the bank" in told[0][1]
    assert index.ntotal == ROWS + 11


def test_the_share_in_the_reason_is_that_of_an_exact_count(upgraded, newcomers, bank):
    _, model = upgraded
    plain = model.raw_offsets(newcomers, Compute()) - model.centre
    reached = bank.astype(np.float64) @ newcomers.T + plain >= model.bound.levels[:, None]
    told = Admission(share=0.001).reasons(model, newcomers, Compute())
    assert f"{reached.mean(axis=0)[10]:.1%} of the bank" in told[10]
    assert set(told) == set(np.flatnonzero(reached.mean(axis=0) > 0.001).tolist())


def test_a_refused_newcomer_leaves_the_index_as_it_was(upgraded, newcomers):
    index, model = upgraded
    with pytest.raises(InputError, match=rf"1 of 11 newcomers look planted, and none is written: {ROWS + 10}"):
        hubplugin_faiss.add(index, newcomers, model, admission=Admission("refuse"))
    assert index.ntotal == ROWS


def test_a_quarantined_newcomer_is_written_and_not_found(upgraded, newcomers, bank):
    index, model = upgraded
    hubplugin_faiss.add(index, newcomers, model, admission=Admission("quarantine"))
    assert index.ntotal == ROWS + 11
    assert ROWS + 10 not in index.search(bank, 10)[1]


def test_what_is_far_from_everything_is_flagged(upgraded, bank):
    _, model = upgraded
    reasons = Admission().reasons(model, unit(-bank.mean(axis=0, keepdims=True)), Compute())
    assert "farther from the bank" in reasons[0]


def test_an_unknown_policy_is_refused_in_one_line():
    with pytest.raises(InputError, match="policy='block': use 'admit'"):
        Admission("block")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="share=2"):
        Admission(share=2)


def test_a_refresh_in_memory_takes_every_entry_for_a_member(upgraded, bank):
    index, model = upgraded
    refreshed = hubplugin_faiss.refresh(index, model)
    np.testing.assert_allclose(refreshed.search(bank[:20], 10)[0], index.search(bank[:20], 10)[0], atol=1e-5)
