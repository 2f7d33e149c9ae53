"""Whatever is written through the wrapper has the offset of its vector afterwards, and
keeps it."""

import numpy as np
import pytest
from qdrant_client import models

import hubplugin
from hubplugin import InputError
from tests.qdrant.conftest import (
    DIM,
    DOT,
    EUCLID,
    IN_BOTH,
    Photos,
    as_scores,
    clustered,
    names,
    similarities,
)

NEW = clustered(9, 3)


def test_a_collection_that_is_deleted_takes_its_correction_with_it(cosine):
    client = cosine.corrected()
    client.delete_collection("photos")
    assert names(cosine.plain) == []
    Photos(None, plain=cosine.plain)
    client.upsert("photos", [cosine.point(500, NEW[0])])
    assert not cosine.stored(500)


def scores_of(photos, client):
    found = photos.search(client, photos.queries[0], limit=500).points
    return {point.id: point.score for point in found}


ZEROS = [0.0] * DIM


@IN_BOTH
def test_a_vector_that_is_written_with_length_0_has_no_offset_at_once(storage):
    """Also in a search of one branch."""
    photos = Photos(storage=storage)
    client = photos.corrected()
    scores_of(photos, client)
    update = models.PointVectors(id=5, vector={"image": ZEROS})
    client.update_vectors("photos", [update])
    client.upsert("photos", [models.PointStruct(id=500, vector={"image": ZEROS})])
    found = scores_of(photos, client)
    assert (found[5], found[500]) == (0, 0)
    if storage == "vector":
        assert photos.stored(500) == {"hub_v1": [*ZEROS, 0.0]}
        assert all("hub_v1" in point.vector for point in photos.contents())


def test_distant_newcomers_under_euclidean_distance_are_right_and_not_stale():
    photos = Photos("image", EUCLID, "vector")
    client = photos.corrected()
    far = 3 * clustered(9, 40)
    points = [photos.point(500 + row, vector) for row, vector in enumerate(far)]
    client.upsert("photos", points)
    assert photos.wrong() == (0, 0)
    assert "DBSF" in str(hubplugin.inspect(photos.store(), queries=0))
    expected = similarities(EUCLID, photos.queries[:1], far)[0]
    expected = as_scores(EUCLID, expected + photos.model.offsets(far))
    scores = scores_of(photos, client)
    given = [scores[500 + row] for row in range(40)]
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-3)


THEIRS = {"hub_offset": 1}


def overwrite(photos, client):
    payload = models.SetPayload(payload=THEIRS, points=[3])
    operation = models.OverwritePayloadOperation(overwrite_payload=payload)
    client.batch_update_points("photos", [operation])


@pytest.mark.parametrize(
    "write",
    [
        lambda photos, client: client.upsert(
            "photos", [photos.point(3, NEW[0], **THEIRS)]
        ),
        lambda photos, client: client.set_payload("photos", THEIRS, points=[3]),
        overwrite,
    ],
)
def test_a_payload_with_our_key_is_refused_and_changes_nothing(cosine, write):
    client = cosine.corrected()
    before = cosine.contents()
    with pytest.raises(InputError, match="'hub_offset' is reserved"):
        write(cosine, client)
    assert cosine.contents() == before


OURS = {"image": NEW[0].tolist(), "hub_v1": [1.0] * (DIM + 1)}


@pytest.mark.parametrize(
    "write",
    [
        lambda client: client.upsert("photos", [models.PointStruct(id=3, vector=OURS)]),
        lambda client: client.delete_vectors("photos", ["hub_v1"], points=[3]),
    ],
)
def test_what_is_written_to_our_vector_is_mended_at_once(write):
    photos = Photos("image", DOT, "vector")
    write(photos.corrected())
    assert photos.wrong() == (0, 0)
