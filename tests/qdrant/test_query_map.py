"""A collection whose model maps queries ranks as model.queries(q) @ t + offset, however
it is asked."""

from dataclasses import replace

import numpy as np
import pytest
from qdrant_client import models

import hubplugin
from hubplugin import InputError
from hubplugin.jobs.write import write
from hubplugin.recording import read
from tests.galleries import assert_near
from tests.qdrant.conftest import (
    COSINE,
    DOT,
    ROWS,
    RRF,
    Photos,
    clustered,
    ids,
    widen,
)
from tests.qdrant.test_other_clients import sent

KINDS = {
    "cosine-payload": (None, COSINE, "payload"),
    "cosine-vector": ("image", COSINE, "vector"),
    "dot-payload-async": ("image", DOT, "payload", True),
    "dot-vector-async": ("image", DOT, "vector", True),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def photos(request):
    return Photos(*request.param)


@pytest.fixture(params=[COSINE, DOT], ids=["cosine", "dot"])
def in_payload(request):
    return Photos("image", request.param)


def test_a_search_returns_the_ranking_and_the_scores_of_the_definition(photos):
    client = photos.apply_mapped()
    queries = photos.queries
    unmapped = photos.raw(queries[:1])[0] + photos.model.offsets(photos.gallery)
    best = np.argsort(-unmapped)[:10].tolist()
    assert photos.best(queries[0]) != best, "else the map would not be seen"
    for query in 3 * queries:
        found = photos.search(client, query, limit=20).points
        assert ids(found) == photos.best(query, 20)
        scores = np.sort(photos.similarities([query])[0])[::-1]
        given = [point.score for point in found]
        np.testing.assert_allclose(given, scores[:20], rtol=1e-5, atol=1e-5)
    least = float(scores[29]) - 1e-4
    assert len(photos.found(client, query, score_threshold=least, limit=ROWS)) == 30
    assert photos.found(client, query, offset=10) == photos.best(query, 20)[10:]


def test_prefetches_are_mapped(photos):
    client, using = photos.apply_mapped(), photos.using
    one, two = photos.queries[:2].tolist()
    inner = models.Prefetch(query=one, using=using, limit=4)
    nested = models.Prefetch(prefetch=inner, query=two, using=using, limit=3)
    found = client.query_points("photos", RRF, prefetch=[nested])
    assert ids(found) == photos.best(two, 3, rows=photos.best(one, 4))


def test_queries_that_are_not_corrected_are_not_mapped(in_payload):
    client, (a, b) = in_payload.apply_mapped(), in_payload.queries[:2].tolist()
    similar = models.RecommendInput(positive=[a, 3], negative=[b])
    pair = models.ContextPair(positive=b, negative=5)
    discover = models.DiscoverInput(target=a, context=[pair])
    mmr = models.Mmr(diversity=0.5, candidates_limit=50)
    for query in (
        models.RecommendQuery(recommend=similar),
        models.DiscoverQuery(discover=discover),
        models.ContextQuery(context=pair),
        models.NearestQuery(nearest=a, mmr=mmr),
    ):
        plain = in_payload.found(in_payload.plain, query)
        assert in_payload.found(client, query) == plain
        prefetch = models.Prefetch(query=query, using="image", limit=10)
        fused = client.query_points("photos", RRF, prefetch=prefetch)
        assert ids(fused) == plain


def test_a_point_named_by_its_id_is_a_target_and_is_not_mapped(in_payload):
    client = in_payload.apply_mapped()
    scores = in_payload.raw(in_payload.gallery[7:8])[0]
    scores += in_payload.model.offsets(in_payload.gallery)
    best = [row for row in np.argsort(-scores).tolist() if row != 7][:10]
    assert in_payload.found(client, 7) == best


def test_a_document_that_the_server_embeds_is_refused_in_one_line():
    photos = Photos()
    client = photos.apply_mapped()
    client.raw.cloud_inference = True
    says = r"a Document that the server embeds.*query map.*cloud_inference=False"
    with pytest.raises(InputError, match=says):
        photos.search(client, models.Document(text="a dog", model="m"))


@pytest.mark.parametrize("kind", ["cosine-vector", "dot-vector-async"])
def test_what_is_written_has_the_map_in_its_second_vector(kind):
    photos = Photos(*KINDS[kind])
    client = photos.apply_mapped()
    changed = clustered(12, 1)[0]
    client.upsert("photos", [photos.point(1, changed)])
    targets = changed[None]
    if photos.distance is COSINE:
        targets = targets / np.linalg.norm(targets)
    wanted = photos.model.query_map.on_targets(targets)[0]
    held = photos.stored(1)["hub_v1"]
    assert_near(held[:-1], wanted)
    photos.move({3: changed})
    assert photos.wrong() == (0, 1)
    hubplugin.refresh(photos.store())
    assert photos.stored(3)["hub_v1"] == pytest.approx(held)


def test_a_recorder_keeps_what_was_asked(photos, tmp_path):
    photos.apply_mapped()
    client, asked = photos.wrapped(record=tmp_path), photos.queries[:2].tolist()
    photos.search(client, asked[0])
    prefetch = models.Prefetch(query=asked[1], using=photos.using)
    client.query_points("photos", RRF, prefetch=prefetch)
    client.close()
    found = read(tmp_path / "photos" / (photos.using or "")).array()
    np.testing.assert_allclose(sorted(found.tolist()), sorted(asked), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.*search_params:UserWarning")
def test_a_plain_client_finds_the_same_by_the_printed_request(photos):
    client, query = photos.apply_mapped(), photos.queries[0]
    found = sent(photos, photos.store().explain(query, 10))
    assert ids(found) == photos.found(client, query)


def test_a_model_that_is_lost_makes_searches_raw_with_a_warning(cosine):
    cosine.apply_mapped()
    is_model = models.Filter(must_not=[models.HasIdCondition(has_id=[0])])
    cosine.plain.delete("photos--hub", is_model)
    query = cosine.queries[0]
    says = r"model of version 1 is incomplete.*searches are raw here"
    with pytest.warns(UserWarning, match=says):
        found = cosine.found(cosine.wrapped(), query)
    assert found == cosine.found(cosine.plain, query)


def test_the_map_is_read_once_and_again_for_another_model(cosine, monkeypatch):
    monkeypatch.setattr("hubplugin_qdrant.metadata.MANIFEST_SECONDS", 0.0)
    client, reads, query = cosine.apply_mapped(), [], cosine.queries[0]
    retrieve = cosine.plain.retrieve

    def counted(name, ids, **given):
        reads.append(ids)
        return retrieve(name, ids=ids, **given)

    monkeypatch.setattr(client.raw, "retrieve", counted)
    for _ in range(3):
        cosine.search(client, query)
    assert len(reads) == 4, "three manifests and one model"
    unmapped = replace(cosine.model, query_map=None).centre_on(cosine.gallery)
    write(cosine.store(), unmapped)
    widen(cosine.store(), ROWS / 10)
    assert cosine.found(client, query) == cosine.best(query)
