"""Offsets that are far wider than the similarities are refused."""

import numpy as np
import pytest

from hubplugin import CorrectionRefused, fit
from hubplugin.bank import Bank
from hubplugin.compute import Compute
from hubplugin.guard import displacement, require_displacement
from tests.galleries import unit

RNG = np.random.default_rng(0)
GALLERY = unit(RNG.normal(size=(400, 16)))
BANK = unit(GALLERY[:100] + 0.1 * RNG.normal(size=(100, 16)))


@pytest.fixture
def given():
    return Bank(BANK).prepare("cosine", Compute()).against(GALLERY)


@pytest.mark.parametrize("alpha", [0.5, 5.0, 50.0])
def test_the_reach_is_the_share_of_the_gallery_before_the_corrected_first(given, alpha):
    model = fit(GALLERY, BANK, "nnn", k=1, alpha=alpha)
    chosen = BANK[np.linspace(0, 99, 64).astype(int)]
    scores = chosen.astype(np.float64) @ GALLERY.T
    first = np.argmax(scores + model.offsets(GALLERY), axis=1)
    nearer = scores > np.take_along_axis(scores, first[:, None], axis=1)
    assert displacement(model, given) == pytest.approx(nearer.mean(), abs=1e-3)


def test_offsets_that_rank_by_themselves_are_refused_with_the_reason(given):
    require_displacement(fit(GALLERY, BANK, "nnn", k=16, alpha=0.5), given)
    said = r"far wider than the similarities.*% of the gallery nearer"
    with pytest.raises(CorrectionRefused, match=said):
        require_displacement(fit(GALLERY, BANK, "nnn", k=1, alpha=50.0), given)
