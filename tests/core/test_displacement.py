"""Offsets that are far wider than the similarities are refused: they would rank by themselves."""

import numpy as np
import pytest

from hubplugin import CorrectionRefused, fit
from hubplugin.bank import Bank
from hubplugin.compute import Compute
from hubplugin.guard import displacement, require_displacement

GALLERY = np.random.default_rng(0).normal(size=(400, 16)).astype(np.float32)
BANK = GALLERY[:100] + 0.5 * np.random.default_rng(1).normal(size=(100, 16)).astype(
    np.float32
)


@pytest.mark.parametrize("alpha", [0.5, 5.0, 50.0])
def test_the_reach_is_the_share_of_the_gallery_before_the_corrected_first(alpha):
    model = fit(GALLERY, BANK, "nnn", k=1, alpha=alpha)
    unit, queries = (
        x / np.linalg.norm(x, axis=1, keepdims=True) for x in (GALLERY, BANK)
    )
    chosen = queries[np.linspace(0, 99, 64).astype(int)].astype(np.float64)
    scores, offsets = chosen @ unit.T.astype(np.float64), model.offsets(GALLERY)
    shares = [(row > row[np.argmax(row + offsets)]).mean() for row in scores]
    found = displacement(
        model, Bank(BANK).prepare("cosine", Compute()).against(GALLERY)
    )
    assert found == pytest.approx(np.mean(shares), abs=1e-3)


def test_offsets_that_rank_by_themselves_are_refused_with_the_reason():
    given = Bank(BANK).prepare("cosine", Compute()).against(GALLERY)
    require_displacement(fit(GALLERY, BANK, "nnn", k=16, alpha=0.5), given)
    with pytest.raises(
        CorrectionRefused,
        match=r"far wider than the similarities.*% of the gallery nearer",
    ):
        require_displacement(fit(GALLERY, BANK, "nnn", k=1, alpha=50.0), given)
