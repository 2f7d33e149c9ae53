"""Queries in every form that a client takes, and what becomes of those that cannot be
corrected."""

import inspect

import numpy as np
import pytest
from qdrant_client import AsyncQdrantClient, QdrantClient, models

import hubplugin
from hubplugin import InputError
from hubplugin_qdrant import AsyncHubQdrantClient, HubQdrantClient, metadata
from tests.qdrant.conftest import (
    DIM,
    DOCUMENT,
    DOT,
    IN_BOTH,
    RED,
    ROWS,
    RRF,
    Photos,
    ids,
    named,
)


@pytest.fixture
def elsewhere(photos):
    """A collection that holds the same vectors under other ids, for lookup_from."""
    photos.plain.create_collection(
        "elsewhere", {"copy": models.VectorParams(size=DIM, distance=photos.distance)}
    )
    photos.plain.upload_collection(
        "elsewhere", {"copy": photos.gallery}, ids=range(1000, 1000 + ROWS)
    )
    return models.LookupLocation(collection="elsewhere", vector="copy")


def assert_found_everywhere(client, asked, expected):
    """Assert what `asked` finds alone, in groups, in a batch and in prefetches."""
    assert ids(client.query_points("photos", limit=5, **asked)) == expected, asked
    groups = client.query_points_groups("photos", "n", limit=5, group_size=1, **asked)
    assert [group.id for group in groups.groups] == expected, asked
    asked = dict(asked)
    asked["filter"] = asked.pop("query_filter")
    if isinstance(asked["query"], np.ndarray):  # which no request takes
        asked["query"] = asked["query"].tolist()
    request = models.QueryRequest(limit=5, **asked)
    assert ids(client.query_batch_points("photos", [request])[0]) == expected, asked
    prefetch = models.Prefetch(limit=5, **asked)
    nested = models.Prefetch(prefetch=prefetch, query=RRF, limit=5)
    for fused in (prefetch, nested):
        found = client.query_points("photos", RRF, prefetch=fused, limit=5)
        assert ids(found) == expected, asked


def test_every_form_is_corrected_wherever_it_stands(photos, elsewhere):
    client, row = photos.corrected(), 7
    vector = photos.gallery[row]
    reds = range(0, ROWS, 3)
    place = {"using": photos.using, "query_filter": RED}
    expected = photos.best(vector, 5, reds)
    for query in (vector, vector.tolist(), models.NearestQuery(nearest=list(vector))):
        assert_found_everywhere(client, place | {"query": query}, expected)
    others = photos.best(vector, 5, [each for each in reds if each != row])
    there = {"query": 1000 + row, "lookup_from": elsewhere}
    itself = models.LookupLocation(collection="photos", vector=photos.using)
    here = {"query": row, "lookup_from": itself}
    for asked, points in (
        ({"query": row}, others),
        (here, others),
        (there, expected),
    ):
        asked = place | asked
        if photos.storage == "payload":
            assert_found_everywhere(client, asked, points)
            continue
        # A second vector is searched by vectors: an id stands at the top only.
        assert ids(client.query_points("photos", limit=5, **asked)) == points
        prefetch = models.Prefetch(query=asked["query"], using=photos.using)
        with pytest.raises(InputError, match=r"prefetch.*point.*pass its vector"):
            client.query_points("photos", RRF, prefetch=prefetch)


def test_a_point_in_several_groups_has_its_score_in_each(photos):
    query = photos.queries[0]
    photos.plain.set_payload("photos", {"tags": ["a", "b"]}, models.Filter())
    client = photos.corrected()
    expected = photos.search(client, query, limit=5).points
    groups = client.query_points_groups(
        "photos", "tags", query, photos.using, group_size=5
    ).groups
    assert sorted(group.id for group in groups) == ["a", "b"]
    for group in groups:
        found = [(hit.id, hit.score) for hit in group.hits]
        assert found == [(point.id, point.score) for point in expected]


def test_dicts_are_taken_where_the_plain_client_takes_them(photos):
    client, query = photos.corrected(), photos.queries[0].tolist()
    expected = photos.found(client, query, query_filter=RED)
    red = RED.model_dump(exclude_none=True)
    exclude = {"exclude": ["n"]}
    found = photos.search(client, query, query_filter=red, with_payload=exclude)
    assert ids(found) == expected
    assert all(set(point.payload) == {"colour"} for point in found.points)
    request = {"query": query, "using": photos.using, "filter": red, "limit": 10}
    for prefetch in (request, [request]):
        found = client.query_points("photos", query=RRF, prefetch=prefetch)
        assert ids(found) == expected
    (batch,) = client.query_batch_points("photos", [request])
    assert ids(batch) == expected


@pytest.mark.parametrize("wrong", [{"limit": 2.5}, {"offset": 0.5}], ids=str)
def test_what_no_request_can_hold_is_refused(photos, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        photos.search(photos.corrected(), photos.queries[0], **wrong)


MASKED = np.ma.masked_array(np.ones(DIM), mask=[True] + [False] * (DIM - 1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"using": "nope"},
        {"collection_name": "pictures"},
        {"query": 999},
        {"query": MASKED},
        {"query": DOCUMENT},
        {"nonsense": 1},
    ],
    ids=["vector", "collection", "point", "masked", "document", "unknown"],
)
def test_what_cannot_be_searched_is_the_clients_own_error(photos, wrong):
    client = photos.corrected()
    asked = {"collection_name": "photos", "using": photos.using}
    asked |= {"query": photos.queries[0]} | wrong
    with pytest.raises(Exception) as plain:  # noqa: PT011
        photos.plain.query_points(**asked)
    with pytest.raises(type(plain.value)) as wrapped:
        client.query_points(**asked)
    assert str(wrapped.value) == str(plain.value)


def test_in_local_mode_a_query_of_other_dimensions_is_told_those_of_the_collection(
    photos,
):
    with pytest.raises(InputError, match=rf"has 2 dimensions, .* 'photos' has {DIM};"):
        photos.search(photos.corrected(), [1.0, 2.0])


@pytest.mark.parametrize(
    ("kind", "like"),
    [(HubQdrantClient, QdrantClient), (AsyncHubQdrantClient, AsyncQdrantClient)],
)
@pytest.mark.parametrize("name", ["query_points", "upsert", "upload_points"])
def test_a_method_has_the_signature_of_the_plain_one(kind, like, name):
    ours, plain = getattr(kind, name), getattr(like, name)
    assert inspect.signature(ours) == inspect.signature(plain)
    assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(plain)


def test_a_document_that_the_client_embeds_is_corrected(photos, embedding):
    client = photos.corrected()
    expected = photos.best(photos.queries[3], 5)
    for query in (DOCUMENT, models.NearestQuery(nearest=DOCUMENT)):
        asked = {"query": query, "using": photos.using, "query_filter": None}
        assert_found_everywhere(client, asked, expected)


def test_a_document_that_the_client_embeds_is_written_with_its_offset(
    photos, embedding
):
    client = photos.corrected()
    points = [
        models.PointStruct(
            id=key, vector=named(photos.using, DOCUMENT), payload={"n": 1}
        )
        for key in (500, 501)
    ]
    client.upsert("photos", points[:1])
    client.upload_points("photos", points[1:])
    assert photos.stored(500) == photos.stored(501) != {}
    assert photos.wrong() == (0, 0)


def test_a_document_that_the_server_embeds_is_corrected_there_or_refused(
    photos, monkeypatch
):
    client, sent = photos.corrected(), []
    client.raw.cloud_inference = True
    monkeypatch.setattr(
        client.raw, "query_points", lambda **given: sent.append(given) or 1 / 0
    )
    if photos.storage == "vector":
        says = r"a Document that the server embeds.*embed it in the client"
        with pytest.raises(InputError, match=says):
            photos.search(client, DOCUMENT)
        assert not sent
        return
    with pytest.raises(ZeroDivisionError):
        photos.search(client, DOCUMENT)
    assert sent[0]["prefetch"][0].query == models.NearestQuery(nearest=DOCUMENT)
    assert isinstance(sent[0]["query"], models.FormulaQuery)


@IN_BOTH
def test_a_collection_that_has_lost_its_offsets_is_raw_with_one_warning_until_a_refresh(
    storage, monkeypatch
):
    """Made anew past the wrapper, or restored from a snapshot of before.

    Each search looks again.
    """
    monkeypatch.setattr(metadata, "MANIFEST_SECONDS", 0.0)
    photos = Photos("image", DOT, storage)
    photos.corrected()
    if storage == "vector":
        says = "'photos' has lost its augmented vector; it is raw here: run refresh"
        photos.plain.delete_collection("photos")
        photos.__post_init__()
    else:
        says = "no point of 'photos' has an offset of version 1.*run refresh"
        photos.plain.delete_payload("photos", ["hub_offset"], points=models.Filter())
    client, query = photos.wrapped(), photos.queries[0]
    with pytest.warns(UserWarning, match=says) as warned:
        found = [photos.found(client, query) for _ in range(2)]
    assert len(warned) == 1
    assert found == [photos.found(photos.plain, query)] * 2
    client.upsert("photos", [photos.point(0, photos.gallery[0])])
    assert bool(photos.stored(0)) == (storage == "payload")
    attention = hubplugin.inspect(photos.store(), queries=0).attention
    assert any("run refresh" in line for line in attention)
    hubplugin.refresh(photos.store())
    assert photos.wrong() == (0, 0)
    assert photos.found(photos.wrapped(), query) == photos.best(query)


@IN_BOTH
def test_a_collection_that_is_migrated_stays_corrected(storage):
    photos = Photos(storage=storage)
    client, other = photos.corrected(), QdrantClient(":memory:")
    client.migrate(HubQdrantClient.wrap(other))
    found = photos.found(HubQdrantClient.wrap(other), photos.queries[0])
    assert found == photos.best(photos.queries[0])
