"""A collection whose model maps queries ranks as model.queries(q) @ t + offset, however it is asked."""

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin
from hubplugin import InputError
from hubplugin.jobs.write import write
from hubplugin.recording import read
from tests.qdrant.conftest import ROWS, RRF, Photos, clustered, ids, widen
from tests.qdrant.test_explain import sent

COSINE, DOT = models.Distance.COSINE, models.Distance.DOT

KINDS = {
    "cosine-payload": ("", COSINE, "payload"),
    "cosine-vector": ("image", COSINE, "vector"),
    "dot-payload-async": ("image", DOT, "payload", True),
    "dot-vector-async": ("image", DOT, "vector", True),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def photos(request):
    return Photos(QdrantClient(":memory:"), *request.param)


@pytest.fixture(params=[COSINE, DOT], ids=["cosine", "dot"])
def in_payload(request):
    return Photos(QdrantClient(":memory:"), "image", request.param)


def test_a_search_returns_the_ranking_and_the_scores_of_the_definition(photos):
    client = photos.apply_mapped()
    unmapped = photos.raw(photos.queries[:1])[0] + photos.model.offsets(photos.gallery)
    assert photos.best(photos.queries[0]) != np.argsort(-unmapped)[:10].tolist(), (
        "else the map would not be seen"
    )
    for query in 3 * photos.queries:
        found = photos.search(client, query).points
        assert ids(found) == photos.best(query)
        scores = np.sort(photos.similarities([query])[0])[::-1]
        given = [point.score for point in found]
        np.testing.assert_allclose(given, scores[:10], rtol=1e-5, atol=1e-5)
    least = float(scores[29]) - 1e-4
    found = photos.search(client, query, score_threshold=least, limit=ROWS).points
    assert len(found) == 30
    second = photos.search(client, query, limit=10, offset=10).points
    assert ids(second) == photos.best(query, 20)[10:]


def test_prefetches_are_mapped(photos):
    client, using = photos.apply_mapped(), photos.using or None
    queries = photos.queries.tolist()
    inner = models.Prefetch(query=queries[0], using=using, limit=4)
    nested = models.Prefetch(prefetch=inner, query=queries[1], using=using, limit=3)
    found = client.query_points("photos", RRF, prefetch=[nested]).points
    given = photos.best(queries[0], 4)
    assert ids(found) == photos.best(queries[1], 3, rows=given)


def test_queries_that_are_not_corrected_are_not_mapped(in_payload):
    client, (one, two, *_), step = in_payload.apply_mapped(), in_payload.queries, 3
    a, b = one.tolist(), two.tolist()
    similar = models.RecommendInput(positive=[a, step], negative=[b])
    pair = models.ContextPair(positive=b, negative=5)
    discover = models.DiscoverInput(target=a, context=[pair])
    mmr = models.Mmr(diversity=0.5, candidates_limit=50)
    for query in (
        models.RecommendQuery(recommend=similar),
        models.DiscoverQuery(discover=discover),
        models.ContextQuery(context=pair),
        models.NearestQuery(nearest=a, mmr=mmr),
    ):
        plain = ids(in_payload.plain.query_points("photos", query, "image"))
        assert ids(client.query_points("photos", query, "image")) == plain
        prefetch = models.Prefetch(query=query, using="image", limit=10)
        assert ids(client.query_points("photos", RRF, prefetch=prefetch)) == plain


def test_a_point_named_by_its_id_is_a_target_and_is_not_mapped(in_payload):
    client = in_payload.apply_mapped()
    scores = in_payload.raw(in_payload.gallery[7:8])[0] + in_payload.model.offsets(
        in_payload.gallery
    )
    best = [int(row) for row in np.argsort(-scores) if row != 7][:10]
    assert ids(client.query_points("photos", 7, "image").points) == best


def test_a_document_that_the_server_embeds_is_refused_in_one_line(in_payload):
    client = in_payload.apply_mapped()
    client.raw.cloud_inference = True
    with pytest.raises(
        InputError,
        match=r"a Document that the server embeds.*query map.*cloud_inference=False",
    ):
        client.query_points("photos", models.Document(text="a dog", model="m"), "image")


@pytest.mark.parametrize("kind", ["cosine-vector", "dot-vector-async"])
def test_what_is_written_has_the_map_in_its_second_vector(kind):
    photos = Photos(QdrantClient(":memory:"), *KINDS[kind])
    client = photos.apply_mapped()
    changed = clustered(12, 1)[0]
    client.upsert("photos", [photos.point(1, changed)])
    unit = changed / np.linalg.norm(changed) if photos.distance is COSINE else changed
    wanted = photos.model.query_map.on_targets(unit[None])[0]
    held = photos.stored(1)["hub_v1"][:-1]
    np.testing.assert_allclose(held, wanted, rtol=0, atol=1e-5)
    photos.plain.update_vectors(
        "photos", [models.PointVectors(id=3, vector={"image": changed.tolist()})]
    )
    assert photos.wrong() == (0, 1)
    hubplugin.refresh(photos.store())
    assert photos.stored(3)["hub_v1"] == pytest.approx(photos.stored(1)["hub_v1"])


def test_a_point_without_its_second_vector_is_found_by_its_raw_score():
    in_vector = Photos(QdrantClient(":memory:"), *KINDS["cosine-vector"])
    in_vector.apply_mapped()
    query = in_vector.queries[0]
    in_vector.plain.upsert("photos", [in_vector.point(ROWS, query)])
    found = (
        in_vector.wrapped()
        .query_points("photos", query, "image", limit=ROWS + 1)
        .points
    )
    assert {point.id: point.score for point in found}[ROWS] == pytest.approx(
        1, abs=1e-5
    )
    assert [key for key in ids(found) if key != ROWS] == in_vector.best(query, ROWS)


def test_a_recorder_keeps_what_was_asked(photos, tmp_path):
    photos.apply_mapped()
    client, asked = photos.wrapped(record=tmp_path), photos.queries[:2].tolist()
    photos.search(client, asked[0])
    prefetch = models.Prefetch(query=asked[1], using=photos.using or None)
    client.query_points("photos", RRF, prefetch=prefetch)
    client.close()
    found = read(tmp_path / "photos" / photos.using)
    assert found is not None
    np.testing.assert_allclose(sorted(found.array().tolist()), sorted(asked), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.*search_params:UserWarning")
def test_a_plain_client_finds_the_same_by_the_printed_request(photos):
    client = photos.apply_mapped()
    explained = photos.store().explain(photos.queries[0], 10)
    expected = ids(photos.search(client, photos.queries[0]).points)
    assert ids(sent(photos, explained)) == expected


def test_a_model_that_is_lost_makes_searches_raw_with_a_warning(in_payload):
    in_payload.apply_mapped()
    points = [
        record.id
        for record in in_payload.plain.scroll("photos--hub")[0]
        if record.id != 0
    ]
    in_payload.plain.delete("photos--hub", points)
    query = in_payload.queries[0]
    with pytest.warns(
        UserWarning, match=r"model of version 1 is incomplete.*searches are raw here"
    ):
        found = in_payload.wrapped().query_points("photos", query, "image").points
    assert ids(found) == ids(
        in_payload.plain.query_points("photos", query, "image").points
    )


def test_the_map_is_read_once_and_again_for_another_model(in_payload, monkeypatch):
    client, reads = in_payload.apply_mapped(), []
    retrieve = in_payload.plain.retrieve

    def counted(name, ids, **given):
        reads.append(ids)
        return retrieve(name, ids=ids, **given)

    monkeypatch.setattr(client.raw, "retrieve", counted)
    for _ in range(3):
        client.query_points("photos", in_payload.queries[0], "image")
        client._corrections.forget()
    assert len(reads) == 4, "three manifests and one model"
    write(in_payload.store(), in_payload.without_map())
    widen(in_payload.store(), ROWS / 10)
    hits = client.query_points("photos", in_payload.queries[0], "image").points
    assert ids(hits) == in_payload.best(in_payload.queries[0])
