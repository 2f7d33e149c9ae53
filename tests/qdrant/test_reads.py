"""A corrected collection searched and read through `HubQdrantClient`, against the exact
corrected ranking."""

import warnings

import pytest
from qdrant_client import models

import hubplugin
from hubplugin import StoreError
from tests.qdrant.conftest import (
    COSINE,
    DOT,
    EUCLID,
    Photos,
    ids,
    lead,
    names,
    set_constants,
)


def test_what_is_read_shows_nothing_of_ours_unless_it_is_asked_for_by_name(photos):
    before = photos.plain.get_collection("photos")
    client = photos.corrected()
    query = photos.queries[0].tolist()
    asked = {"query": query, "using": photos.using, "limit": 1, "with_payload": True}
    request = models.QueryRequest(**asked, with_vector=True)
    asked["with_vectors"] = True
    for point in (
        client.query_points("photos", **asked).points[0],
        client.query_batch_points("photos", [request])[0].points[0],
        client.query_points_groups("photos", "n", **asked).groups[0].hits[0],
        client.retrieve("photos", [3], with_vectors=True)[0],
        client.scroll("photos", limit=1, with_vectors=True)[0][0],
    ):
        assert set(point.payload) == {"n", "colour"}
        if photos.using:
            assert set(point.vector) == {"image"}
        else:
            assert isinstance(point.vector, list)
    for selector, keys in (
        (False, set()),
        (["n"], {"n"}),
        (models.PayloadSelectorExclude(exclude=["n"]), {"colour"}),
        (["hub_offset"], {"hub_offset"} if photos.storage == "payload" else set()),
    ):
        found = photos.search(client, query, limit=1, with_payload=selector)
        assert set(found.points[0].payload or {}) == keys
    shown = client.get_collection("photos")
    assert shown.config.params.vectors == before.config.params.vectors


def test_a_description_leaves_our_payload_index_out(cosine, monkeypatch):
    client = cosine.corrected()
    index = models.PayloadIndexInfo(data_type="float", points=1)
    schema = {"colour": index, "hub_offset.v1": index}
    info = cosine.plain.get_collection("photos")
    info = info.model_copy(update={"payload_schema": schema})
    monkeypatch.setattr(client.raw, "get_collection", lambda **_: info)
    assert set(client.get_collection("photos").payload_schema) == {"colour"}


def test_another_collection_is_as_without_the_wrapper(photos):
    parameters = models.VectorParams(size=2, distance=DOT)
    photos.plain.create_collection("other", {"hub_v7": parameters})
    theirs = {"hub_offset": {"v1": 9}}
    point = models.PointStruct(id=1, vector={"hub_v7": [1, 2]}, payload=theirs)
    photos.plain.upsert("other", [point])
    client = photos.corrected()
    for method, given in [
        ("query_points", {"query": [1.0, 1.0], "using": "hub_v7"}),
        ("retrieve", {"ids": [1], "with_vectors": True}),
        ("get_collection", {}),
        ("set_payload", {"payload": {"hub_offset": 1}, "points": [1]}),
    ]:
        expected = getattr(photos.plain, method)("other", **given)
        assert getattr(client, method)("other", **given) == expected
    assert names(client) == names(photos.plain)


def test_an_alias_is_searched_corrected(photos):
    client = photos.corrected()
    lead(client, "pictures", to="photos")
    found = client.query_points("pictures", photos.queries[0], photos.using)
    assert ids(found) == photos.best(photos.queries[0])


def test_a_removal_made_elsewhere_is_noticed(photos, monkeypatch):
    client, query = photos.corrected(), photos.queries[0]
    corrected = photos.search(client, query).points
    hubplugin.remove(photos.store())
    photos.search(client, query)
    client.upsert("photos", [photos.point(500, photos.gallery[0])])
    monkeypatch.setattr("hubplugin_qdrant.metadata.time.monotonic", lambda: 1e12)
    raw = photos.search(client, query).points
    assert raw == photos.search(photos.plain, query).points != corrected


READS = "of hubplugin x; .* reads format 7: "


@pytest.mark.parametrize(
    ("fields", "of_version", "says"),
    [
        ({"format": 6, "hubplugin": "x"}, {}, f"{READS}delete .* and apply again"),
        ({"format": 99, "hubplugin": "x"}, {}, f"{READS}upgrade hubplugin"),
        ({}, {"oversampling": 1e308}, "damaged at .*oversampling"),
        ({}, {"max_candidates": -5}, "damaged at .*max_candidates"),
        ({}, {"ceiling": 1e308}, "damaged at .*ceiling"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_searched_raw_and_never_overwritten(
    cosine, fields, of_version, says
):
    cosine.apply()
    query = cosine.queries[0]
    (point,) = cosine.plain.retrieve("photos--hub", [0])
    manifest = point.payload | fields
    manifest["active"][""] |= of_version
    points = [models.PointStruct(id=0, vector={}, payload=manifest)]
    cosine.plain.upsert("photos--hub", points)
    with pytest.warns(UserWarning, match=f"{says}.*searches are raw here"):
        found = cosine.found(cosine.wrapped(), query)
    assert found == cosine.found(cosine.plain, query)
    with pytest.raises(StoreError, match=says):
        cosine.apply()
    assert cosine.plain.retrieve("photos--hub", [0])[0].payload == manifest


@pytest.mark.parametrize("distance", [COSINE, DOT, EUCLID])
def test_a_rescoring_of_more_than_strict_mode_allows_begins_with_the_best(distance):
    """With second vectors, of which some points have none: each of the two lists may
    have 12 of the candidates."""
    photos = Photos("image", distance, "vector")
    photos.corrected()
    lacking = [7, 50]
    photos.plain.delete_vectors(
        "photos", [photos.version.augmented_vector], points=lacking
    )
    set_constants(photos.store(), max_candidates=12)
    rows = [*range(12), *range(40, 52)]
    prefetch = []
    for part in (rows[:12], rows[12:]):
        inside = models.Filter(must=[models.HasIdCondition(has_id=part)])
        prefetch.append(models.Prefetch(filter=inside, limit=12))
    query = -3 * photos.gallery[rows].mean(axis=0)
    client = photos.wrapped()
    found = photos.found(client, query, prefetch=prefetch, limit=8)
    corrected = [key for key in found if key not in lacking]
    expected = [key for key in photos.best(query, 24, rows) if key not in lacking]
    assert len(corrected) >= 6
    assert corrected == expected[: len(corrected)]


def test_a_search_in_local_mode_gives_no_warning_that_the_plain_one_does_not(photos):
    client = photos.corrected()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        photos.search(client, photos.queries[0])
