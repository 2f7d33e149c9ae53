"""Offsets that outweigh the similarities are refused."""

import re

import numpy as np
import pytest

from hubplugin import Bank, Compute, CorrectionRefused, fit
from hubplugin.guard import require_displacement
from tests.galleries import unit
from tests.refusals import refused

RNG = np.random.default_rng(0)
GALLERY = unit(RNG.normal(size=(400, 16)))
BANK = unit(GALLERY[:100] + 0.1 * RNG.normal(size=(100, 16)))


@pytest.mark.parametrize("alpha", [0.5, 5.0, 50.0])
def test_offsets_that_rank_by_themselves_are_refused_with_their_reach(alpha):
    """The reach is the share of the gallery that is nearer than the corrected first."""
    given = Bank(BANK).prepare("cosine", Compute()).against(GALLERY)
    model = fit(GALLERY, BANK, "nnn", k=1, alpha=alpha)
    if alpha < 1:
        require_displacement(model, given)
        return
    chosen = BANK[np.linspace(0, 99, 64).astype(int)]
    scores = chosen.astype(np.float64) @ GALLERY.T
    first = np.argmax(scores + model.offsets(GALLERY), axis=1)
    nearer = scores > np.take_along_axis(scores, first[:, None], axis=1)
    with refused(CorrectionRefused, "the offsets outweigh the similarities") as caught:
        require_displacement(model, given)
    told = re.search(r"behind (\d+)% of the gallery", str(caught.value))[1]
    assert float(told) == pytest.approx(100 * nearer.mean(), abs=1)
