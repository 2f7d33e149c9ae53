"""What of a collection is the user's, though it has a name that we would use: it is never written over nor deleted."""

import pytest
from qdrant_client import QdrantClient, models

import hubplugin
import hubplugin_qdrant
from hubplugin import StoreError
from tests.qdrant.conftest import (
    DIM,
    ROWS,
    Photos,
    apply_to,
    clustered,
    contents,
    ids,
    names,
)


def named(storage="payload"):
    return Photos(QdrantClient(":memory:"), "image", models.Distance.DOT, storage)


THEIRS = [5, "", None, {}, {"v1": "one"}, {"v1": 0.5, "city": 3}, [1, 2]]


@pytest.mark.parametrize("dry_run", [True, False], ids=["dry", "real"])
@pytest.mark.parametrize("value", THEIRS, ids=repr)
def test_a_payload_key_that_the_user_has_is_refused_before_anything_is_written(
    cosine, value, dry_run
):
    cosine.plain.upsert(
        "photos", [cosine.point(17, cosine.gallery[17], hub_offset=value)]
    )
    before = contents(cosine.plain)
    with pytest.raises(
        StoreError,
        match=r"'hub_offset' holds something of yours, in point 17; call it otherwise",
    ):
        cosine.apply(dry_run=dry_run)
    assert contents(cosine.plain) == before
    assert names(cosine.plain) == ["photos"]


def test_offsets_whose_manifest_was_lost_are_not_taken_for_the_users(cosine):
    cosine.apply()
    cosine.apply(method="nnn")
    cosine.plain.delete_payload("photos", ["hub_offset.v1"], points=[1, 2, 3])
    cosine.plain.delete_collection("photos--hub")
    client = cosine.apply()
    found = client.query_points("photos", cosine.queries[0]).points
    assert ids(found) == cosine.best(cosine.queries[0])


@pytest.mark.parametrize("correction_in", ["payload", "vector"])
def test_a_removal_leaves_what_others_wrote_under_our_key(correction_in):
    photos = named(correction_in)
    photos.apply()
    values = {1: {"v77": "1.5"}, 2: "text", 3: {"city": 1}, 4: [], 5: None}
    photos.plain.upsert(
        "photos",
        [
            photos.point(key, photos.gallery[key], hub_offset=values[key])
            for key in values
        ],
    )
    photos.plain.set_payload("photos", {"city": 2}, points=[6], key="hub_offset")
    hubplugin.remove(photos.store())
    found = {point.id: point.payload for point in contents(photos.plain)}
    assert {key: found[key]["hub_offset"] for key in (*values, 6)} == values | {
        6: {"city": 2}
    }
    assert sum("hub_offset" in payload for payload in found.values()) == len(values) + 1


@pytest.mark.parametrize("size", [DIM, DIM + 1, None], ids=["d", "d + 1", "sparse"])
def test_a_vector_that_has_the_name_of_ours_stays_the_users(size):
    photos = named("vector")
    client = photos.plain
    if size is None:
        config = models.SparseVectorNameConfig(sparse=models.SparseVectorConfig())
        client.create_vector_name("photos", "hub_v1", config)
        theirs = models.SparseVector(indices=[1, 5], values=[0.25, 0.5])
        update = models.PointVectors(id=3, vector={"hub_v1": theirs})
        client.update_vectors("photos", [update])
    else:
        photos.add_vector("hub_v1", clustered(9, 2 * ROWS).reshape(ROWS, -1)[:, :size])
    before = contents(client)
    tried = apply_to(
        client, "photos", photos.bank, dry_run=True, vector="image", **photos.settings()
    )
    assert "'hub_v2'" in str(tried)
    wrapped = photos.apply()
    query = photos.queries[0]
    found = wrapped.query_points("photos", query, "image", with_vectors=True).points
    assert ids(found) == photos.best(query)
    assert any(
        "hub_v1" in point.vector
        for point in wrapped.scroll("photos", limit=9, with_vectors=True)[0]
    )
    theirs = {"hub_v1": before[3].vector["hub_v1"]}
    wrapped.update_vectors("photos", [models.PointVectors(id=3, vector=theirs)])
    hubplugin.remove(photos.store())
    assert contents(client) == before


def test_a_collection_that_has_the_name_of_the_metadata_stays_the_users(cosine):
    cosine.plain.create_collection(
        "photos--hub", models.VectorParams(size=2, distance=models.Distance.DOT)
    )
    cosine.plain.upsert(
        "photos--hub", [models.PointStruct(id=7, vector=[1, 2], payload={"mine": True})]
    )
    for call in (
        lambda: cosine.apply(dry_run=True),
        cosine.apply,
        lambda: hubplugin.remove(cosine.store()),
    ):
        with pytest.raises(
            StoreError, match="'photos--hub' has vectors, so it is yours"
        ):
            call()
    cosine.wrapped().delete_collection("photos")
    (left,) = cosine.plain.scroll("photos--hub", with_vectors=True)[0]
    assert (left.id, left.vector, left.payload) == (7, [1, 2], {"mine": True})


@pytest.mark.parametrize("by", ["wrapped", "plain"])
@pytest.mark.parametrize("storage", ["payload", "vector"])
@pytest.mark.parametrize(
    ("others", "given"),
    [(0, {}), (1, {}), (1, {"vector": "image"})],
    ids=["none is left", "another is left", "by name"],
)
def test_the_correction_of_a_vector_that_was_deleted_can_be_removed(
    storage, by, others, given
):
    photos = named(storage)
    if others:
        photos.add_vector("text", photos.gallery[:, :2])
    client = photos.apply()
    (client if by == "wrapped" else photos.plain).delete_vector_name("photos", "image")
    hubplugin.remove(hubplugin_qdrant.open_store(photos.plain, "photos", **given))
    assert names(photos.plain) == ["photos"]
    assert (
        list(photos.plain.get_collection("photos").config.params.vectors)
        == ["text"][:others]
    )
    assert all(
        set(point.payload) == {"n", "colour"} for point in contents(photos.plain)
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("oversampling", 1e308), ("max_candidates", -5)],
)
def test_a_number_in_the_manifest_that_no_job_writes_is_damage(cosine, field, value):
    client = cosine.apply()
    payload = cosine.plain.retrieve("photos--hub", [0])[0].payload
    payload["active"][""][field] = value
    damaged = models.PointStruct(id=0, vector={}, payload=payload)
    cosine.plain.upsert("photos--hub", [damaged])
    with pytest.raises(StoreError, match=f"damaged at .*{field}"):
        cosine.store()
    with pytest.warns(UserWarning, match="searches are raw here"):
        cosine.wrapped().query_points("photos", cosine.queries[0])
    assert client.query_points("photos", cosine.queries[0])  # which has not looked
