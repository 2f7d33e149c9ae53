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
    found = photos.search(client, photos.queries[0], limit=500).points
    scores = {point.id: point.score for point in found}
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


def test_what_is_written_to_our_vector_is_mended_at_once():
    photos = Photos("image", DOT, "vector")
    ours = {"image": NEW[0].tolist(), "hub_v1": [1.0] * (DIM + 1)}
    photos.corrected().upsert("photos", [models.PointStruct(id=3, vector=ours)])
    assert photos.wrong() == (0, 0)
