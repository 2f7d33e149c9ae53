"""A collection whose model maps queries ranks as model.queries(q) @ t + offset, however
it is asked."""

from dataclasses import replace

import numpy as np
import pytest
from qdrant_client import models

from hubplugin import InputError
from hubplugin.jobs.write import write
from tests.qdrant.conftest import (
    COSINE,
    DOT,
    ROWS,
    RRF,
    Photos,
    ids,
    widen,
)


@pytest.fixture(params=[COSINE, DOT], ids=["cosine", "dot"])
def in_payload(request):
    return Photos("image", request.param)


@pytest.mark.parametrize("storage", ["payload", "vector"])
@pytest.mark.parametrize("distance", [COSINE, DOT])
def test_prefetches_are_mapped(distance, storage):
    photos = Photos("image", distance, storage, awaited=distance is DOT)
    client, using = photos.apply_mapped(), photos.using
    one, two = photos.queries[:2].tolist()
    inner = models.Prefetch(query=one, using=using, limit=4)
    nested = models.Prefetch(prefetch=inner, query=two, using=using, limit=3)
    found = client.query_points("photos", RRF, prefetch=[nested])
    assert ids(found) == photos.best(two, 3, rows=photos.best(one, 4))


def test_diversity_and_what_is_no_nearest_query_stay_raw(in_payload):
    client, (a, b) = in_payload.apply_mapped(), in_payload.queries[:2].tolist()
    assert in_payload.found(client, None) == in_payload.found(in_payload.plain, None)
    similar = models.RecommendInput(positive=[a, 3], negative=[b])
    pair = models.ContextPair(positive=b, negative=5)
    discover = models.DiscoverInput(target=a, context=[pair])
    mmr = models.Mmr(diversity=0.5, candidates_limit=50)
    for query in (
        models.RecommendQuery(recommend=similar),
        models.DiscoverQuery(discover=discover),
        models.ContextQuery(context=pair),
        models.OrderByQuery(order_by="n"),
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
