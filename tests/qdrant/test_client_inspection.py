"""What an inspection tells of a collection as it stands."""

import numpy as np
import pytest
from qdrant_client import models

import hubplugin
from tests.qdrant.conftest import COSINE, DOT, EUCLID, IN_BOTH, ROWS, Photos, stopped


@pytest.mark.parametrize(
    "under", ["text", {"v7": 0.1}, {"v1": "text"}, {"v1": 0.1, "else": 0.2}]
)
def test_points_with_something_in_the_place_of_offsets_are_counted(cosine, under):
    cosine.apply()
    cosine.plain.set_payload("photos", {"hub_offset": under}, points=[3, 4])
    report = hubplugin.inspect(cosine.store(), queries=0)
    assert report.foreign == 2
    assert any("2 targets carry a foreign value" in line for line in report.attention)


def test_a_half_written_version_is_not_foreign(cosine):
    cosine.apply()
    with pytest.raises(KeyboardInterrupt):
        cosine.apply(method="nnn", compute=stopped("closing"))
    assert set(cosine.stored(0)) == {"v1", "v2"}
    assert hubplugin.inspect(cosine.store(), queries=0).foreign == 0


def test_without_a_bank_or_queries_no_search_is_made(cosine, monkeypatch):
    cosine.apply(method="dn")
    store = cosine.store()
    monkeypatch.setattr(store, "search", None)
    assert hubplugin.inspect(store).hubness is None


@IN_BOTH
@pytest.mark.parametrize("distance", [EUCLID, DOT])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_what_float32_rounds_is_not_stale_however_long_the_vectors_are(
    size, distance, storage
):
    photos = Photos("image", distance, storage)
    longer = size * photos.gallery
    photos.move(dict(enumerate(longer)))
    photos.bank = size * photos.bank
    photos.apply(method="nnn")
    assert photos.wrong() == (0, 0)
    photos.move({3: 1.01 * longer[3]})
    assert photos.wrong() == (0, 1)


@pytest.mark.parametrize("distance", [EUCLID, DOT, COSINE])
def test_offsets_that_a_server_keeps_as_float16_are_not_stale(distance):
    photos = Photos("image", distance, "vector")
    photos.apply(method="nnn")
    kept = np.array([photos.stored(row)["hub_v1"] for row in range(ROWS)])
    kept[[3, 4], -1] *= 1.01  # another offset, by as much as counts
    rows = [
        models.PointVectors(id=row, vector={"hub_v1": values})
        for row, values in enumerate(kept.astype(np.float16).tolist())
    ]
    photos.plain.update_vectors("photos", rows)
    assert photos.wrong() == (0, 2)
