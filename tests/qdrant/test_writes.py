"""Whatever is written through the wrapper has the offset of its vector afterwards, and keeps it."""

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin
from hubplugin import InputError
from hubplugin_qdrant.requests import lacks_augmented_vector
from tests.qdrant.conftest import DIM, Photos, clustered

NEW = clustered(9, 3)


def test_a_collection_that_is_deleted_takes_its_correction_with_it(cosine):
    client = cosine.corrected()
    client.delete_collection("photos")
    assert not cosine.plain.get_collections().collections
    Photos(cosine.plain, "", models.Distance.COSINE)
    client.upsert("photos", [cosine.point(500, NEW[0])])
    assert not cosine.stored(500)


@pytest.fixture(params=["payload", "vector"])
def of_cosine(request):
    photos = Photos(
        QdrantClient(":memory:"), "image", models.Distance.COSINE, request.param
    )
    return photos, photos.corrected()


def scores_of(photos, client):
    found = client.query_points("photos", photos.queries[0], "image", limit=500)
    return {point.id: point.score for point in found.points}


ZEROS = [0.0] * DIM


def test_a_vector_that_is_written_with_length_0_has_no_offset_at_once(of_cosine):
    """Also in a search of one branch."""
    photos, client = of_cosine
    scores_of(photos, client)
    client.update_vectors(
        "photos", [models.PointVectors(id=5, vector={"image": ZEROS})]
    )
    client.upsert("photos", [models.PointStruct(id=500, vector={"image": ZEROS})])
    found = scores_of(photos, client)
    assert (found[5], found[500]) == (0, 0)
    if photos.storage == "vector":
        assert photos.stored(500) == {"hub_v1": [*ZEROS, 0.0]}
        assert not photos.plain.scroll(
            "photos", lacks_augmented_vector(photos.version)
        )[0]


def test_distant_newcomers_under_euclidean_distance_are_right_and_not_stale():
    photos = Photos(QdrantClient(":memory:"), "image", models.Distance.EUCLID, "vector")
    client = photos.corrected()
    far = 3 * clustered(9, 40)
    client.upsert(
        "photos", [photos.point(500 + row, vector) for row, vector in enumerate(far)]
    )
    assert photos.wrong() == (0, 0)
    assert "DBSF" in str(hubplugin.inspect(photos.store(), queries=0))
    expected = (
        photos.model.offsets(far) - ((far - photos.queries[0]) ** 2).sum(axis=1) / 2
    )
    found = client.query_points("photos", photos.queries[0], "image", limit=500).points
    scores = {point.id: -np.sign(point.score) * point.score**2 / 2 for point in found}
    np.testing.assert_allclose(
        [scores[500 + row] for row in range(40)], expected, rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize(
    "write",
    [
        lambda client, photos: client.upsert(
            "photos", [photos.point(3, NEW[0], hub_offset=1)]
        ),
        lambda client, photos: client.set_payload(
            "photos", {"hub_offset": 1}, points=[3]
        ),
        lambda client, photos: client.batch_update_points(
            "photos",
            [
                models.OverwritePayloadOperation(
                    overwrite_payload=models.SetPayload(
                        payload={"hub_offset": 1}, points=[3]
                    )
                )
            ],
        ),
    ],
)
def test_a_payload_with_our_key_is_refused_and_changes_nothing(cosine, write):
    client = cosine.corrected()
    before = cosine.plain.retrieve("photos", [3], with_vectors=True)
    with pytest.raises(InputError, match="'hub_offset' is reserved"):
        write(client, cosine)
    assert cosine.plain.retrieve("photos", [3], with_vectors=True) == before


OURS = {"image": NEW[0].tolist(), "hub_v1": [1.0] * (DIM + 1)}


@pytest.mark.parametrize(
    "write",
    [
        lambda client: client.upsert("photos", [models.PointStruct(id=3, vector=OURS)]),
        lambda client: client.delete_vectors("photos", ["hub_v1"], points=[3]),
    ],
)
def test_what_is_written_to_our_vector_is_mended_at_once(write):
    photos = Photos(QdrantClient(":memory:"), "image", models.Distance.DOT, "vector")
    write(photos.corrected())
    assert photos.wrong() == (0, 0)
