"""Queries in every form that a client takes, and what becomes of those that cannot be corrected."""

import warnings

import numpy as np
import pytest
from pydantic import BaseModel
from qdrant_client import QdrantClient, models
from qdrant_client.conversions.conversion import RestToGrpc

import hubplugin
from hubplugin import InputError
from hubplugin_qdrant import HubQdrantClient
from tests.qdrant.conftest import (
    DIM,
    ONLY_NEWER_LOCAL_MODE,
    RED,
    ROWS,
    RRF,
    Photos,
    ids,
)

EXACT = models.SearchParams(exact=True)


def forms(photos, row):
    """Ways to ask for the nearest of the vector of point `row`, and whether they leave the point itself out."""
    vector, using = photos.gallery[row], photos.using or None
    elsewhere = models.LookupLocation(collection="elsewhere", vector="copy")
    return [
        ({"query": vector, "using": using}, False),
        ({"query": vector.tolist(), "using": using}, False),
        (
            {"query": models.NearestQuery(nearest=vector.tolist()), "using": using},
            False,
        ),
        ({"query": models.NearestQuery(nearest=row), "using": using}, True),
        ({"query": row, "using": using}, True),
        ({"query": RestToGrpc.convert_extended_point_id(row), "using": using}, True),
        ({"query": 1000 + row, "using": using, "lookup_from": elsewhere}, False),
    ]


@pytest.fixture
def elsewhere(photos):
    """A collection that holds the same vectors under other ids, for lookup_from."""
    photos.plain.create_collection(
        "elsewhere", {"copy": models.VectorParams(size=8, distance=photos.distance)}
    )
    copies = [
        models.PointStruct(id=1000 + row, vector={"copy": vector.tolist()})
        for row, vector in enumerate(photos.gallery)
    ]
    photos.plain.upload_points("elsewhere", copies)


def test_groups_by_the_id_of_a_point_are_corrected(in_payload):
    client, using = in_payload.apply(), in_payload.using or None
    found = client.query_points_groups(
        "photos", "n", 7, using=using, limit=5, group_size=1
    )
    others = [row for row in range(ROWS) if row != 7]
    assert [group.id for group in found.groups] == in_payload.best(
        in_payload.gallery[7], 5, others
    )


def test_every_form_is_corrected_wherever_it_stands(photos, elsewhere):
    client = photos.corrected()
    for asked, left_out in forms(photos, 7):
        expected = photos.best(
            photos.gallery[7],
            5,
            [row for row in range(0, ROWS, 3) if row != 7 or not left_out],
        )
        assert (
            ids(client.query_points("photos", query_filter=RED, limit=5, **asked))
            == expected
        ), asked
        grouped = client.query_points_groups(
            "photos", "n", query_filter=RED, limit=5, group_size=1, **asked
        )
        assert [group.id for group in grouped.groups] == expected, asked
        if isinstance(
            asked["query"], (list, int, models.NearestQuery)
        ):  # what a request or prefetch takes
            request = models.QueryRequest(filter=RED, limit=5, **asked)
            assert ids(client.query_batch_points("photos", [request])[0]) == expected, (
                asked
            )
            prefetch = models.Prefetch(filter=RED, limit=5, **asked)
            assert (
                ids(client.query_points("photos", RRF, prefetch=prefetch, limit=5))
                == expected
            ), asked
            nested = models.Prefetch(prefetch=prefetch, query=RRF, limit=5)
            assert (
                ids(client.query_points("photos", RRF, prefetch=nested, limit=5))
                == expected
            ), asked


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


def test_structures_of_grpc_are_taken_where_the_plain_client_takes_them(photos):
    client, query, using = photos.corrected(), photos.queries[0], photos.using or None
    rest = {"query_filter": RED, "search_params": EXACT, "with_payload": True}
    structures = {
        "query_filter": RestToGrpc.convert_filter(RED),
        "search_params": RestToGrpc.convert_search_params(EXACT),
        "with_payload": RestToGrpc.convert_with_payload_interface(True),
    }
    expected = client.query_points("photos", query, using, **rest)
    assert client.query_points("photos", query, using, **structures) == expected


DOCUMENT = models.Document(text="3", model="a model")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"query": [1.0, 2.0]}, ""),
        ({"using": "nope"}, "nope"),
        ({"collection_name": "pictures"}, "pictures"),
        ({"query": 999}, "999"),
        (
            {
                "query": np.ma.masked_array(
                    np.ones(DIM), mask=[True] + [False] * (DIM - 1)
                )
            },
            "nearest",
        ),
        ({"query": DOCUMENT}, "fastembed"),
    ],
    ids=[
        "dimension",
        "vector",
        "collection",
        "point",
        "masked",
        "document without fastembed",
    ],
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


INFINITE = [float("inf"), *[1.0] * (DIM - 1)]


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize(
    "query",
    [INFINITE, [-value for value in INFINITE], [1e39] * DIM, np.full(DIM, np.inf)],
)
def test_a_query_whose_scores_are_infinite_is_answered_as_by_the_plain_client(
    photos, query
):
    client, using = photos.corrected(), photos.using or None
    expected = photos.plain.query_points("photos", query, using)
    assert ids(client.query_points("photos", query, using)) == ids(expected)
    prefetch = models.Prefetch(query=list(query), using=using, limit=5)
    assert (
        ids(client.query_points("photos", RRF, prefetch=prefetch)) == ids(expected)[:5]
    )


@pytest.mark.parametrize(
    "wrong", [{"limit": 2.5}, {"offset": 0.5}, {"limit": float("inf")}]
)
def test_a_limit_that_is_no_whole_number_is_refused_in_one_line(photos, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(InputError, match=f"^{name}={value}: expected a whole number$"):
        photos.corrected().query_points(
            "photos", photos.queries[0], photos.using or None, **wrong
        )


def test_a_limit_that_is_a_whole_number_is_taken_in_every_form(photos):
    client, query, using = photos.corrected(), photos.queries[0], photos.using or None
    for limit in (3.0, np.float32(3), np.int64(3)):
        assert ids(
            client.query_points("photos", query, using, limit=limit)
        ) == photos.best(query, 3)


@ONLY_NEWER_LOCAL_MODE
def test_points_that_are_queries_are_left_out_where_plain_leaves_them_out(photos):
    using = photos.using or None
    itself = models.LookupLocation(collection="photos", vector=using)

    def by(point, **given):
        return models.Prefetch(query=point, using=using, limit=ROWS, **given)

    asked = [
        {"query": RRF, "prefetch": [by(3), by(4)]},
        {"query": 3, "using": using, "prefetch": by(4)},
        {"query": photos.queries[0], "using": using, "prefetch": [by(4), by(5)]},
        {
            "query": RRF,
            "prefetch": models.Prefetch(
                query=3, using=using, prefetch=[by(4)], limit=ROWS
            ),
        },
        {"query": 3, "using": using, "lookup_from": itself},
        {"query": RRF, "prefetch": by(3, lookup_from=itself)},
    ]
    expected = [
        set(ids(photos.plain.query_points("photos", **each, limit=ROWS)))
        for each in asked
    ]
    client = photos.corrected()
    assert [
        set(ids(client.query_points("photos", **each, limit=ROWS))) for each in asked
    ] == expected
    assert len(expected[0]) == ROWS
    assert expected[4] == {*range(ROWS)} - {3}


def test_diversity_stays_raw_in_a_prefetch_too(photos):
    client, using = photos.corrected(), photos.using or None
    diverse = models.NearestQuery(
        nearest=photos.queries[0].tolist(), mmr=models.Mmr(diversity=0.5)
    )
    prefetch = models.Prefetch(query=diverse, using=using, limit=5)
    expected = photos.plain.query_points("photos", diverse, using, limit=5)
    assert ids(client.query_points("photos", RRF, prefetch=prefetch, limit=5)) == ids(
        expected
    )


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

    def embed(self, raw_models, is_query=False, batch_size=None):
        for each in [raw_models] if isinstance(raw_models, BaseModel) else raw_models:
            yield embedded(each, Photos.queries if is_query else Photos.bank)

    monkeypatch.setattr(
        "qdrant_client.embed.model_embedder.ModelEmbedder.embed_models", embed
    )


def test_a_document_that_the_client_embeds_is_corrected(photos, embedding):
    client, using, expected = (
        photos.corrected(),
        photos.using or None,
        photos.best(photos.queries[3]),
    )
    for query in (DOCUMENT, models.NearestQuery(nearest=DOCUMENT)):
        assert ids(client.query_points("photos", query, using)) == expected
        request = models.QueryRequest(query=query, using=using)
        assert ids(client.query_batch_points("photos", [request])[0]) == expected
        prefetch = models.Prefetch(query=query, using=using)
        assert ids(client.query_points("photos", RRF, prefetch=prefetch)) == expected


def test_a_document_that_the_client_embeds_is_written_with_its_offset(
    in_payload, embedding
):
    client, named = in_payload.corrected(), in_payload.using
    expected = pytest.approx(
        in_payload.model.offsets(in_payload.bank[3:4])[0], abs=1e-5
    )
    points = [
        models.PointStruct(id=key, vector={named: DOCUMENT} if named else DOCUMENT)
        for key in (500, 501)
    ]
    client.upsert("photos", points[:1])
    client.upload_points("photos", points[1:])
    assert [in_payload.stored(key) for key in (500, 501)] == [{"v1": expected}] * 2


def test_a_document_that_the_server_embeds_has_no_offset_and_a_warning_says_so(
    cosine, monkeypatch
):
    client, sent = cosine.corrected(), []
    client.raw.cloud_inference = True
    monkeypatch.setattr(
        client.raw._client,
        "upsert",
        lambda *given, **named: sent.append(named["points"]),
    )
    with pytest.warns(
        UserWarning,
        match="documents that the server embeds get no offset here; run refresh",
    ):
        client.upsert(
            "photos", [models.PointStruct(id=500, vector=DOCUMENT, payload={"n": 1})]
        )
    assert [(point.vector, point.payload) for point in sent[0]] == [
        (DOCUMENT, {"n": 1})
    ]


def test_a_document_that_the_server_embeds_is_corrected_there_or_refused(
    photos, monkeypatch
):
    client, using = photos.corrected(), photos.using or None
    sent = []
    raw = client.raw
    raw.cloud_inference = True
    monkeypatch.setattr(
        type(raw), "query_points", lambda self, **given: sent.append(given) or 1 / 0
    )
    if photos.storage == "vector":
        with pytest.raises(
            InputError,
            match=r"a Document that the server embeds.*embed it in the client",
        ):
            client.query_points("photos", DOCUMENT, using)
        assert not sent
    else:
        with pytest.raises(ZeroDivisionError):
            client.query_points("photos", DOCUMENT, using)
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


def test_a_collection_that_was_made_anew_past_the_wrapper_is_searched_raw(made_anew):
    client, query = made_anew.wrapped(), made_anew.queries[0]
    with pytest.warns(
        UserWarning,
        match="'photos' has lost its augmented vector; it is raw here: run refresh",
    ):
        found = client.query_points("photos", query, "image")
    assert found == made_anew.plain.query_points("photos", query, "image")


def test_a_refresh_corrects_a_collection_that_was_made_anew_past_the_wrapper(made_anew):
    assert any(
        "run refresh" in each for each in hubplugin.inspect(made_anew.store()).attention
    )
    hubplugin.refresh(made_anew.store())
    assert made_anew.wrong() == (0, 0)
    found = made_anew.wrapped().query_points("photos", made_anew.queries[0], "image")
    assert ids(found) == made_anew.best(made_anew.queries[0])


@pytest.mark.parametrize(
    "vector", [(DIM + 1, models.Distance.DOT), (DIM, models.Distance.COSINE)], ids=str
)
def test_a_collection_made_anew_with_other_vectors_asks_for_a_fit_on_these(
    made_anew, vector
):
    made_anew.plain.delete_collection("photos")
    made_anew.plain.create_collection(
        "photos", {"image": models.VectorParams(size=vector[0], distance=vector[1])}
    )
    made_anew.plain.upsert(
        "photos", [models.PointStruct(id=1, vector={"image": [1.0] * vector[0]})]
    )
    with pytest.raises(InputError, match=r"the model .*; fit"):
        hubplugin.inspect(made_anew.store())


def test_uploads_go_through_to_a_collection_that_was_made_anew_past_the_wrapper(
    made_anew,
):
    photos, vector = made_anew, made_anew.gallery[:1]
    with pytest.warns(UserWarning, match="'photos' has lost its augmented vector"):
        photos.wrapped().upload_points("photos", [photos.point(500, vector[0])])
    with pytest.warns(UserWarning, match="'photos' has lost its augmented vector"):
        photos.wrapped().upload_collection("photos", {"image": vector}, ids=[501])
    points = photos.plain.retrieve("photos", [500, 501], with_vectors=True)
    assert [set(point.vector) for point in points] == [{"image"}] * 2


def test_a_collection_that_is_migrated_stays_corrected(by_sync_client):
    photos = by_sync_client  # the async client has no migrate
    client, other = photos.corrected(), QdrantClient(":memory:")
    client.migrate(HubQdrantClient.wrap(other))
    found = HubQdrantClient.wrap(other).query_points(
        "photos", photos.queries[0], photos.using or None
    )
    assert ids(found) == photos.best(photos.queries[0])


def test_dicts_are_taken_where_the_plain_client_takes_them(photos):
    client, query, using = (
        photos.corrected(),
        photos.queries[0].tolist(),
        photos.using or None,
    )
    expected = ids(client.query_points("photos", query, using, query_filter=RED))
    red = RED.model_dump(exclude_none=True)
    dicts = {
        "query_filter": red,
        "search_params": {"exact": True},
        "with_payload": {"exclude": ["n"]},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # local mode: search_params have no effect
        found = client.query_points("photos", query, using, **dicts)
        assert ids(found) == expected
        assert all(set(point.payload) == {"colour"} for point in found.points)
        prefetch = {
            "query": query,
            "using": using,
            "filter": red,
            "limit": 10,
            "params": {"exact": True},
        }
        for given in (prefetch, [prefetch]):
            assert (
                ids(client.query_points("photos", query=RRF, prefetch=given))
                == expected
            )
        (batch,) = client.query_batch_points(
            "photos", [{"query": query, "using": using, "filter": red}]
        )
    assert ids(batch) == expected


@pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("corrected", [False, True], ids=["raw", "corrected"])
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda client: client.query_points(),
            r"query_points\(\) missing .*'collection_name'",
        ),
        (
            lambda client: client.scroll("photos", collection_name="photos"),
            "multiple values .*'collection_name'",
        ),
        (
            lambda client: client.upsert("photos", [], nonsense=1),
            "unexpected keyword argument 'nonsense'",
        ),
        (
            lambda client: client.upload_points("photos", [], nonsense=1),
            "unexpected keyword argument 'nonsense'",
        ),
        (
            lambda client: client.retrieve(
                "photos", [1], True, False, None, None, None, 7, 8
            ),
            "too many positional",
        ),
    ],
    ids=["missing", "twice", "unknown", "upload", "too many"],
)
def test_arguments_that_the_plain_client_does_not_have_are_a_type_error(
    awaited, corrected, call, says
):
    photos = Photos(
        QdrantClient(":memory:"), "", models.Distance.COSINE, awaited=awaited
    )
    client = photos.corrected() if corrected else photos.wrapped()
    with pytest.raises(TypeError, match=says):
        call(client)
