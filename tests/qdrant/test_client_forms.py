"""Queries in every form that a client takes, and what becomes of those that cannot be corrected."""

import inspect

import numpy as np
import pytest
from pydantic import BaseModel
from qdrant_client import QdrantClient, models

import hubplugin
from hubplugin import InputError
from hubplugin_qdrant import AsyncHubQdrantClient, HubQdrantClient
from tests.qdrant.conftest import DIM, RED, ROWS, RRF, Photos, ids

DOCUMENT = models.Document(text="3", model="a model")


@pytest.fixture
def elsewhere(photos):
    """A collection that holds the same vectors under other ids, for lookup_from."""
    photos.plain.create_collection(
        "elsewhere", {"copy": models.VectorParams(size=DIM, distance=photos.distance)}
    )
    copies = [
        models.PointStruct(id=1000 + row, vector={"copy": vector.tolist()})
        for row, vector in enumerate(photos.gallery)
    ]
    photos.plain.upload_points("elsewhere", copies)
    return models.LookupLocation(collection="elsewhere", vector="copy")


def assert_found_everywhere(client, asked, expected):
    """What `asked` finds alone, in groups, in a batch and in prefetches. Ids stand in prefetches by payload only."""
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
    place = {"using": photos.using or None, "query_filter": RED}
    expected = photos.best(vector, 5, reds)
    for query in (vector, vector.tolist(), models.NearestQuery(nearest=list(vector))):
        assert_found_everywhere(client, place | {"query": query}, expected)
    by_id = place | {"query": row}
    there = place | {"query": 1000 + row, "lookup_from": elsewhere}
    others = photos.best(vector, 5, [each for each in reds if each != row])
    if photos.storage == "payload":
        assert_found_everywhere(client, by_id, others)
        assert_found_everywhere(client, there, expected)
        return
    # A second vector is searched by vectors: an id stands at the top only.
    for asked, points in ((by_id, others), (there, expected)):
        assert ids(client.query_points("photos", limit=5, **asked)) == points
        prefetch = models.Prefetch(query=asked["query"], using=photos.using)
        with pytest.raises(InputError, match=r"prefetch.*point.*pass its vector"):
            client.query_points("photos", RRF, prefetch=prefetch)


def test_a_point_in_several_groups_has_its_score_in_each(photos):
    query, using = photos.queries[0], photos.using or None
    photos.plain.set_payload("photos", {"tags": ["a", "b"]}, models.Filter())
    client = photos.corrected()
    expected = client.query_points("photos", query, using, limit=5).points
    groups = client.query_points_groups(
        "photos", "tags", query, using, group_size=5
    ).groups
    assert sorted(group.id for group in groups) == ["a", "b"]
    for group in groups:
        assert [(hit.id, hit.score) for hit in group.hits] == [
            (point.id, point.score) for point in expected
        ]


def test_dicts_are_taken_where_the_plain_client_takes_them(photos):
    client, query = photos.corrected(), photos.queries[0].tolist()
    using = photos.using or None
    expected = ids(client.query_points("photos", query, using, query_filter=RED))
    red = RED.model_dump(exclude_none=True)
    request = {"query": query, "using": using, "filter": red, "limit": 10}
    exclude = {"exclude": ["n"]}
    found = photos.search(client, query, query_filter=red, with_payload=exclude)
    assert ids(found) == expected
    assert all(set(point.payload) == {"colour"} for point in found.points)
    for prefetch in (request, [request]):
        found = client.query_points("photos", query=RRF, prefetch=prefetch)
        assert ids(found) == expected
    (batch,) = client.query_batch_points("photos", [request])
    assert ids(batch) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": 2.5},
        {"offset": 0.5},
    ],
)
def test_what_no_request_can_hold_is_refused(photos, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        photos.search(photos.corrected(), photos.queries[0], **wrong)


MASKED = np.ma.masked_array(np.ones(DIM), mask=[True] + [False] * (DIM - 1))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"query": [1.0, 2.0]}, None),
        ({"using": "nope"}, "nope"),
        ({"collection_name": "pictures"}, "pictures"),
        ({"query": 999}, "999"),
        ({"query": MASKED}, "nearest"),
        ({"query": DOCUMENT}, "fastembed"),
        ({"nonsense": 1}, "nonsense"),
    ],
    ids=["dimension", "vector", "collection", "point", "masked", "document", "unknown"],
)
def test_what_cannot_be_searched_is_the_clients_own_error(photos, wrong, says):
    client = photos.corrected()
    asked = {
        "collection_name": "photos",
        "query": photos.queries[0],
        "using": photos.using or None,
    } | wrong
    with pytest.raises(Exception, match=says) as plain:
        photos.plain.query_points(**asked)
    with pytest.raises(type(plain.value)) as wrapped:
        client.query_points(**asked)
    assert str(wrapped.value) == str(plain.value)


@pytest.mark.parametrize("kind", [HubQdrantClient, AsyncHubQdrantClient])
def test_a_method_has_the_signature_of_the_plain_one(kind):
    for name in ("query_points", "upsert", "upload_points"):
        ours, plain = getattr(kind, name), getattr(kind._plain, name)
        assert inspect.signature(ours) == inspect.signature(plain)
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(plain)


@pytest.fixture
def embedding(monkeypatch):
    """Documents are embedded as the query, or where they are stored as the bank query, whose number they are, as
    fastembed would do it in the client."""

    def embedded(value, vectors):
        if isinstance(value, models.Document):
            return vectors[int(value.text)].tolist()
        if isinstance(value, list):
            return [embedded(part, vectors) for part in value]
        if isinstance(value, dict):
            return {name: embedded(part, vectors) for name, part in value.items()}
        if isinstance(value, BaseModel):
            return value.model_copy(
                update={
                    name: embedded(part, vectors)
                    for name, part in value
                    if part is not None
                }
            )
        return value

    def embed(self, raw_models, is_query=False, **options):
        for each in [raw_models] if isinstance(raw_models, BaseModel) else raw_models:
            yield embedded(each, Photos.queries if is_query else Photos.bank)

    for name in ("embed_models", "embed_models_strict"):
        monkeypatch.setattr(
            f"qdrant_client.embed.model_embedder.ModelEmbedder.{name}", embed
        )


def test_a_document_that_the_client_embeds_is_corrected(photos, embedding):
    client, using = photos.corrected(), photos.using or None
    expected = photos.best(photos.queries[3], 5)
    for query in (DOCUMENT, models.NearestQuery(nearest=DOCUMENT)):
        asked = {"query": query, "using": using, "query_filter": None}
        assert_found_everywhere(client, asked, expected)


def test_a_document_that_the_client_embeds_is_written_with_its_offset(
    in_payload, embedding
):
    client, named = in_payload.corrected(), in_payload.using
    expected = in_payload.model.offsets(in_payload.bank[3:4])[0]
    vector = {named: DOCUMENT} if named else DOCUMENT
    points = [models.PointStruct(id=key, vector=vector) for key in (500, 501)]
    client.upsert("photos", points[:1])
    client.upload_points("photos", points[1:])
    for key in (500, 501):
        assert in_payload.stored(key) == {"v1": pytest.approx(expected, abs=1e-5)}


def test_a_document_that_the_server_embeds_is_corrected_there_or_refused(
    photos, monkeypatch
):
    client, sent = photos.corrected(), []
    client.raw.cloud_inference = True
    monkeypatch.setattr(
        client.raw, "query_points", lambda **given: sent.append(given) or 1 / 0
    )
    if photos.storage == "vector":
        with pytest.raises(
            InputError,
            match=r"a Document that the server embeds.*embed it in the client",
        ):
            photos.search(client, DOCUMENT)
        assert not sent
        return
    with pytest.raises(ZeroDivisionError):
        photos.search(client, DOCUMENT)
    assert sent[0]["prefetch"][0].query == models.NearestQuery(nearest=DOCUMENT)
    assert isinstance(sent[0]["query"], models.FormulaQuery)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def made_anew(request):
    """A corrected collection that was deleted and made anew past the wrapper."""
    photos = Photos(
        QdrantClient(":memory:"), "image", models.Distance.DOT, "vector", request.param
    )
    photos.corrected()
    photos.plain.delete_collection("photos")
    photos.__post_init__()
    return photos


def test_a_collection_that_was_made_anew_past_the_wrapper_is_raw_until_a_refresh(
    made_anew,
):
    client, query = made_anew.wrapped(), made_anew.queries[0]
    says = "'photos' has lost its augmented vector; it is raw here: run refresh"
    with pytest.warns(UserWarning, match=says):
        found = client.query_points("photos", query, "image")
    assert found == made_anew.plain.query_points("photos", query, "image")
    client.upsert("photos", [made_anew.point(0, made_anew.gallery[0])])
    assert not made_anew.stored(0)
    attention = hubplugin.inspect(made_anew.store(), queries=0).attention
    assert any("run refresh" in line for line in attention)
    hubplugin.refresh(made_anew.store())
    assert made_anew.wrong() == (0, 0)
    found = made_anew.wrapped().query_points("photos", query, "image")
    assert ids(found) == made_anew.best(query)


def test_a_collection_that_is_migrated_stays_corrected(by_sync_client):
    photos = by_sync_client  # the async client has no migrate
    client, other = photos.corrected(), QdrantClient(":memory:")
    client.migrate(HubQdrantClient.wrap(other))
    found = photos.search(HubQdrantClient.wrap(other), photos.queries[0])
    assert ids(found) == photos.best(photos.queries[0])
