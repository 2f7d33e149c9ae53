"""The offset of a later target is capped at the largest of the gallery."""

import numpy as np
import pytest

from hubplugin import Bank, Compute, fit
from tests.core import formulas
from tests.galleries import assert_near, each_metric

METHODS = ["is", "sn", "dbsn", "dualis", "nnn", "csls", "dn"]


@pytest.fixture
def sets(rng):
    """Bank, gallery and target bank about one centre, and later targets that no bank query is near."""
    centre = rng.normal(size=12)
    bank, gallery, second = (
        centre + rng.normal(size=(rows, 12)) for rows in (60, 90, 40)
    )
    return bank, gallery, second, -3 * centre + rng.normal(size=(20, 12))


@each_metric
@pytest.mark.parametrize("method", METHODS)
def test_a_later_target_gets_no_more_than_the_largest_offset_of_the_gallery(
    method, metric, sets
):
    bank, gallery, second, later = sets
    model = fit(gallery, Bank(bank, second), method, metric=metric)
    largest = model.fitted.max()
    far = model.raw_offsets(later, Compute("numpy")) - model.centre
    far = far.astype(np.float32)
    assert (far > largest * 1.2).any()  # what there is to cap
    np.testing.assert_array_equal(model.offsets(later), np.minimum(far, largest))


def test_a_model_without_a_gallery_has_no_cap(sets):
    bank, _, _, later = sets
    expected = formulas.raw_offsets("is", bank, later, "cosine", tau=0.05)
    found = fit(None, bank, "is").offsets(later)
    assert_near(found, expected)
