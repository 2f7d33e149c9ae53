"""Whatever is written through the wrapper has the offset of its vector afterwards, and keeps it."""

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin
import hubplugin_qdrant
from hubplugin import InputError
from hubplugin_qdrant.requests import lacks_augmented_vector
from tests.qdrant.conftest import DIM, Photos, apply_to, clustered, names

NEW = clustered(9, 3)


def check(photos, key, vector):
    """Point `key` holds the offset of `vector`, to float32."""
    expected = float(photos.model.offsets(vector[None])[0])
    (held,) = photos.stored(key).values()
    if photos.storage == "vector":
        version = photos.version
        held = (
            version.ceiling - held[-1] ** 2 / 2
            if photos.distance is models.Distance.EUCLID
            else held[-1]
        )
    assert held == pytest.approx(expected, abs=1e-5)


WRITES = {
    "upsert": lambda client, photos, points: client.upsert("photos", points),
    "batch": lambda client, photos, points: client.upsert(
        "photos",
        models.Batch(
            ids=[3, 500, 501],
            vectors=photos.struct(NEW),
            payloads=[each.payload for each in points],
        ),
    ),
    "upload": lambda client, photos, points: client.upload_points(
        "photos", iter(points), batch_size=2
    ),
    "collection": lambda client, photos, points: client.upload_collection(
        "photos",
        {photos.using: NEW} if photos.using else NEW,
        payload=(each.payload for each in points),
        ids=[3, 500, 501],
    ),
    "update": lambda client, photos, points: [
        client.upsert(
            "photos",
            [
                each.model_copy(update={"vector": photos.struct(NEW[0])})
                for each in points
            ],
        ),
        client.update_vectors(
            "photos",
            [models.PointVectors(id=each.id, vector=each.vector) for each in points],
        ),
    ],
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_is_written_has_its_own_offset_and_payload_whether_it_is_new_or_not(
    photos, write
):
    client, keys = photos.corrected(), (3, 500, 501)
    points = [
        photos.point(key, vector, k=1) for key, vector in zip(keys, NEW, strict=True)
    ]
    write(client, photos, points)
    for point, vector in zip(points, NEW, strict=True):
        check(photos, point.id, vector)
        assert client.retrieve("photos", [point.id])[0].payload == point.payload


NUMBER_3 = models.Filter(
    must=[models.FieldCondition(key="n", match=models.MatchValue(value=3))]
)


@pytest.mark.parametrize("wait", [True, False])
def test_a_conditional_update_of_vectors_brings_offsets_under_the_same_condition(
    photos, wait
):
    client = photos.corrected()
    updates = [
        models.PointVectors(id=key, vector=photos.struct(vector))
        for key, vector in zip((3, 4), NEW, strict=False)
    ]
    client.update_vectors("photos", updates, update_filter=NUMBER_3, wait=wait)
    check(photos, 3, NEW[0])
    check(photos, 4, photos.gallery[4])


def test_a_users_own_vector_that_is_called_like_ours_can_be_written():
    photos = Photos(QdrantClient(":memory:"), "image", models.Distance.DOT, "vector")
    photos.add_vector("hub_v70", photos.gallery[:9, :2])
    client = photos.corrected()
    client.update_vectors(
        "photos", [models.PointVectors(id=3, vector={"hub_v70": [1.0, 2.0]})]
    )
    (point,) = client.retrieve("photos", [3], with_vectors=True)
    assert point.vector["hub_v70"] == [1.0, 2.0]
    assert set(point.vector) == {"image", "hub_v70"}
    client.delete_vector_name("photos", "hub_v70")


def test_a_refresh_says_how_many_were_missing_and_stale(photos):
    photos.corrected()
    photos.plain.upsert(
        "photos", [photos.point(500, NEW[0]), photos.point(501, NEW[1])]
    )
    photos.plain.update_vectors(
        "photos", [models.PointVectors(id=3, vector=photos.struct(NEW[2]))]
    )
    refreshed = hubplugin.refresh(photos.store())
    assert (refreshed.missing, refreshed.stale) == (2, 1)
    assert photos.wrong() == (0, 0)


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


def test_a_refresh_makes_vectors_of_length_0_of_another_program_neutral(of_cosine):
    photos, _ = of_cosine
    photos.plain.update_vectors(
        "photos", [models.PointVectors(id=5, vector={"image": ZEROS})]
    )
    photos.plain.upsert("photos", [models.PointStruct(id=500, vector={"image": ZEROS})])
    hubplugin.refresh(photos.store())
    found = scores_of(photos, photos.wrapped())
    assert (found[5], found[500]) == (0, 0)
    if photos.storage == "vector":
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


@pytest.mark.parametrize("storage", ["payload", "vector"])
def test_what_is_left_of_a_deleted_vector_goes_by_the_removal_of_another(storage):
    plain = QdrantClient(":memory:")
    photos = Photos(plain, "image", models.Distance.DOT, storage)
    photos.add_vector("text", photos.gallery)
    photos.corrected()
    apply_to(plain, "photos", photos.bank, vector="text", **photos.settings())
    plain.delete_vector_name("photos", "image")
    hubplugin.remove(hubplugin_qdrant.open_store(plain, "photos", vector="text"))
    assert names(plain) == ["photos"]
    assert list(plain.get_collection("photos").config.params.vectors) == ["text"]
    assert all(
        set(point.payload) == {"n", "colour"}
        for point in plain.scroll("photos", limit=500)[0]
    )


@pytest.mark.parametrize(
    "write",
    [
        lambda client, photos: client.upsert(
            "photos", [photos.point(3, NEW[0], hub_offset=1)]
        ),
        lambda client, photos: client.upload_collection(
            "photos", NEW[:1], payload=[{"hub_offset": 1}], ids=[3]
        ),
        lambda client, photos: client.set_payload(
            "photos", {"hub_offset": 1}, points=[3]
        ),
        lambda client, photos: client.overwrite_payload(
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
        lambda client: client.upload_collection("photos", [OURS], ids=[3]),
        lambda client: client.update_vectors(
            "photos", [models.PointVectors(id=3, vector=OURS)]
        ),
        lambda client: client.delete_vectors("photos", ["hub_v1"], points=[3]),
        lambda client: client.batch_update_points(
            "photos",
            [
                models.DeleteVectorsOperation(
                    delete_vectors=models.DeleteVectors(vector=["hub_v1"], points=[3])
                )
            ],
        ),
    ],
)
def test_what_is_written_to_our_vector_is_mended_at_once(write):
    photos = Photos(QdrantClient(":memory:"), "image", models.Distance.DOT, "vector")
    write(photos.corrected())
    assert photos.wrong() == (0, 0)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_is_written_without_a_correction_is_as_the_plain_client_writes_it(
    cosine, write
):
    points = [
        cosine.point(key, vector, k=1)
        for key, vector in zip((3, 500, 501), NEW, strict=True)
    ]
    write(cosine.wrapped(), cosine, points)
    found = cosine.plain.retrieve("photos", [3, 500, 501])
    assert [point.payload for point in found] == [point.payload for point in points]
