"""What of a collection is the user's, though it has a name that we would use: it is
never written over nor deleted."""

import pytest
from qdrant_client import models

import hubplugin
import hubplugin_qdrant
from hubplugin import StoreError
from tests.qdrant.conftest import DIM, DOT, IN_BOTH, ROWS, Photos, clustered, names


@pytest.mark.parametrize("dry_run", [True, False], ids=["dry", "real"])
@pytest.mark.parametrize(
    "value",
    [5, "", None, {}, {"v1": "one"}, {"v1": 0.5, "city": 3}, [1, 2]],
    ids=repr,
)
def test_a_payload_key_that_the_user_has_is_refused_before_anything_is_written(
    cosine, value, dry_run
):
    point = cosine.point(17, cosine.gallery[17], hub_offset=value)
    cosine.plain.upsert("photos", [point])
    before = cosine.contents()
    says = r"'hub_offset' holds data that are not hubplugin's, in point 17; rename it"
    with pytest.raises(StoreError, match=says):
        cosine.apply(dry_run=dry_run)
    assert cosine.contents() == before
    assert names(cosine.plain) == ["photos"]


def test_offsets_whose_manifest_was_lost_are_not_taken_for_the_users(cosine):
    cosine.apply()
    cosine.apply(method="nnn")
    cosine.plain.delete_payload("photos", ["hub_offset.v1"], points=[1, 2, 3])
    cosine.plain.delete_collection("photos--hub")
    client = cosine.apply()
    assert cosine.found(client, cosine.queries[0]) == cosine.best(cosine.queries[0])


@IN_BOTH
def test_a_removal_leaves_what_others_wrote_under_our_key(storage):
    photos = Photos("image", DOT, storage)
    photos.apply()
    values = {1: {"v77": "1.5"}, 2: "text", 3: {"city": 1}, 4: [], 5: None}
    points = [
        photos.point(key, photos.gallery[key], hub_offset=value)
        for key, value in values.items()
    ]
    photos.plain.upsert("photos", points)
    photos.plain.set_payload("photos", {"city": 2}, points=[6], key="hub_offset")
    hubplugin.remove(photos.store())
    left = {
        point.id: point.payload["hub_offset"]
        for point in photos.contents()
        if "hub_offset" in point.payload
    }
    assert left == values | {6: {"city": 2}}


@pytest.mark.parametrize("size", [DIM, DIM + 1, None], ids=["d", "d + 1", "sparse"])
def test_a_vector_that_has_the_name_of_ours_stays_the_users(size):
    photos = Photos("image", DOT, "vector")
    client = photos.plain
    if size is None:
        config = models.SparseVectorNameConfig(sparse=models.SparseVectorConfig())
        client.create_vector_name("photos", "hub_v1", config)
        theirs = models.SparseVector(indices=[1, 5], values=[0.25, 0.5])
        update = models.PointVectors(id=3, vector={"hub_v1": theirs})
        client.update_vectors("photos", [update])
    else:
        photos.add_vector("hub_v1", clustered(9, 2 * ROWS).reshape(ROWS, -1)[:, :size])
    before = photos.contents()
    tried = hubplugin.apply(photos.store(), photos.bank, force=True, dry_run=True)
    assert "'hub_v2'" in str(tried)
    wrapped = photos.apply()
    query = photos.queries[0]
    assert photos.found(wrapped, query) == photos.best(query)
    shown = wrapped.scroll("photos", limit=9, with_vectors=True)[0]
    assert any("hub_v1" in point.vector for point in shown)
    theirs = {"hub_v1": before[3].vector["hub_v1"]}
    wrapped.update_vectors("photos", [models.PointVectors(id=3, vector=theirs)])
    hubplugin.remove(photos.store())
    assert photos.contents() == before


def test_a_collection_that_has_the_name_of_the_metadata_stays_the_users(cosine):
    parameters = models.VectorParams(size=2, distance=DOT)
    cosine.plain.create_collection("photos--hub", parameters)
    theirs = models.PointStruct(id=7, vector=[1, 2], payload={"mine": True})
    cosine.plain.upsert("photos--hub", [theirs])
    for call in (
        lambda: cosine.apply(dry_run=True),
        cosine.apply,
        lambda: hubplugin.remove(cosine.store()),
    ):
        with pytest.raises(
            StoreError, match="'photos--hub' has vectors, so it is not hub"
        ):
            call()
    cosine.wrapped().delete_collection("photos")
    (left,) = cosine.plain.scroll("photos--hub", with_vectors=True)[0]
    assert (left.id, left.vector, left.payload) == (7, [1, 2], {"mine": True})


@pytest.mark.parametrize("by", ["wrapped", "plain"])
@IN_BOTH
@pytest.mark.parametrize(
    ("others", "vector"),
    [([], None), (["text"], None), (["text"], "image")],
    ids=["none is left", "another is left", "by name"],
)
def test_the_correction_of_a_vector_that_was_deleted_can_be_removed(
    storage, by, others, vector
):
    photos = Photos("image", DOT, storage)
    for name in others:
        photos.add_vector(name, photos.gallery[:, :2])
    clients = {"wrapped": photos.apply(), "plain": photos.plain}
    clients[by].delete_vector_name("photos", "image")
    hubplugin.remove(hubplugin_qdrant.open_store(photos.plain, "photos", vector))
    assert names(photos.plain) == ["photos"]
    vectors = photos.plain.get_collection("photos").config.params.vectors
    assert list(vectors) == others
    assert all(point.payload.keys() == {"n", "colour"} for point in photos.contents())
