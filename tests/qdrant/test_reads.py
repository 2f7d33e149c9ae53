"""A corrected collection searched and read through `HubQdrantClient`, against the exact corrected ranking."""

import warnings

import numpy as np
import pytest
from qdrant_client import QdrantClient, models
from qdrant_client.conversions.conversion import RestToGrpc

import hubplugin
from hubplugin import StoreError
from hubplugin_qdrant import HubQdrantClient
from hubplugin_qdrant.manifest import QdrantManifest
from hubplugin_qdrant.requests import rewrite
from tests.qdrant.conftest import RED, RRF, Photos, ids, know, names


def test_a_nearest_query_returns_the_exact_corrected_ranking_and_scores(photos):
    client = photos.corrected()
    for query in photos.queries:
        found = photos.search(client, query).points
        assert ids(found) == photos.best(query)
        expected = np.sort(photos.similarities([query])[0])[::-1][:10]
        if photos.distance is models.Distance.EUCLID:  # sqrt(d^2 - 2 offset)
            expected = -np.sign(expected) * np.sqrt(np.abs(2 * expected))
        scores = [point.score for point in found]
        np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)


def test_what_is_read_shows_nothing_of_ours_unless_it_is_asked_for_by_name(photos):
    before = photos.plain.get_collection("photos")
    client = photos.corrected()
    query, using = photos.queries[0].tolist(), photos.using or None
    asked = {"query": query, "using": using, "limit": 1, "with_vectors": True}
    request = models.QueryRequest(
        query=query, using=using, limit=1, with_vector=True, with_payload=True
    )
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
        (point,) = photos.search(
            client, photos.queries[0], limit=1, with_payload=selector
        ).points
        assert set(point.payload or {}) == keys
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


def test_diversity_and_what_is_no_nearest_query_stay_raw(cosine):
    diverse = models.NearestQuery(
        nearest=cosine.queries[0].tolist(), mmr=models.Mmr(diversity=0.5)
    )
    raw = [
        {"query": models.RecommendQuery(recommend={"positive": [1, 2]})},
        {"query": models.OrderByQuery(order_by="n")},
        {"query": diverse},
        {"query": RRF, "prefetch": models.Prefetch(query=diverse)},
        {"query": None},
    ]
    before = [ids(cosine.plain.query_points("photos", **each)) for each in raw]
    client = cosine.corrected()
    assert [ids(client.query_points("photos", **each)) for each in raw] == before


def test_another_collection_is_as_without_the_wrapper(photos):
    parameters = models.VectorParams(size=2, distance=models.Distance.DOT)
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
    rename = models.CreateAlias(collection_name="photos", alias_name="pictures")
    client.update_collection_aliases([models.CreateAliasOperation(create_alias=rename)])
    found = client.query_points("pictures", photos.queries[0], photos.using or None)
    assert ids(found) == photos.best(photos.queries[0])


def test_a_removal_made_elsewhere_is_noticed(photos, monkeypatch):
    client, query, using = photos.corrected(), photos.queries[0], photos.using or None
    corrected = client.query_points("photos", query, using).points
    hubplugin.remove(photos.store())
    client.query_points("photos", query, using)
    client.upsert("photos", [photos.point(500, photos.gallery[0])])
    monkeypatch.setattr("hubplugin_qdrant.metadata.time.monotonic", lambda: 1e12)
    raw = client.query_points("photos", query, using).points
    assert raw == photos.plain.query_points("photos", query, using).points != corrected


def test_a_collection_restored_without_offsets_is_searched_raw_with_one_warning(
    in_payload, monkeypatch
):
    """As from a snapshot that was taken before the correction."""
    photos = in_payload
    photos.corrected()
    photos.plain.delete_payload("photos", ["hub_offset"], points=models.Filter())
    client, query = photos.wrapped(), photos.queries[0]
    with pytest.warns(
        UserWarning,
        match="no point of 'photos' has an offset of version 1.*run refresh",
    ) as warned:
        found = photos.search(client, query)
    assert len(warned) == 1
    assert ids(found) == ids(photos.search(photos.plain, query))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr("hubplugin_qdrant.metadata.time.monotonic", lambda: 1e12)
        photos.search(client, query)  # after another look at the manifest
        hubplugin.refresh(photos.store())
        assert ids(photos.search(photos.wrapped(), query)) == photos.best(query)


@pytest.mark.parametrize(
    ("written", "way_out"),
    [
        (6, "delete the collection 'photos--hub' and apply again"),
        (99, "upgrade hubplugin"),
    ],
)
def test_a_manifest_of_another_format_is_searched_raw_and_never_overwritten(
    cosine, written, way_out
):
    cosine.apply()
    cosine.plain.set_payload(
        "photos--hub", {"format": written, "hubplugin": "x", "kept": []}, points=[0]
    )
    client = HubQdrantClient.wrap(cosine.plain)
    said = rf"format {written} of hubplugin x; .* reads format 7: {way_out}"
    with pytest.warns(UserWarning, match=said):
        found = client.query_points("photos", cosine.queries[0])
    assert ids(found) == ids(cosine.plain.query_points("photos", cosine.queries[0]))
    with pytest.raises(StoreError, match=f"{said}$"):
        cosine.apply()


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_corrected_request_is_valid_for_rest_and_grpc(photos, everywhere):
    photos.corrected()
    version = photos.version.model_copy(update={"everywhere": everywhere})
    manifest = QdrantManifest(active={photos.using: version})
    query = photos.queries[0].tolist()
    inner = models.Prefetch(query=query, using=photos.using or None, limit=5)
    formula = models.FormulaQuery(
        formula=models.SumExpression(sum=["$score", 1.0]), defaults={"$score": 0.5}
    )
    for request in (
        models.QueryRequest(query=query, using=inner.using, filter=RED, limit=3),
        models.QueryRequest(query=RRF, prefetch=[inner, inner]),
        models.QueryRequest(query=formula, prefetch=inner),
        models.QueryRequest(query=query, using=inner.using, prefetch=[inner]),
    ):
        corrected = rewrite(request, manifest)[0]
        text = corrected.model_dump_json(exclude_none=True)
        again = models.QueryRequest.model_validate_json(text)
        assert again.model_dump_json(exclude_none=True) == text
        RestToGrpc.convert_query(QdrantClient._resolve_query(corrected.query))
        for prefetch in corrected.prefetch or []:
            RestToGrpc.convert_prefetch_query(prefetch)


@pytest.mark.parametrize(
    "distance", [models.Distance.COSINE, models.Distance.DOT, models.Distance.EUCLID]
)
def test_a_rescoring_of_more_than_strict_mode_allows_begins_with_the_best(distance):
    """With second vectors, of which some points have none: each of the two lists may have 12 of the candidates."""
    photos = Photos(QdrantClient(":memory:"), "image", distance, "vector")
    client = photos.corrected()
    lacking = (7, 50)
    photos.plain.delete_vectors(
        "photos", [photos.version.augmented_vector], points=list(lacking)
    )
    limited = photos.version.model_copy(update={"max_candidates": 12})
    know(client, "photos", QdrantManifest(active={"image": limited}))
    parts = [list(range(12)), list(range(40, 52))]
    prefetch = []
    for part in parts:
        inside = models.Filter(must=[models.HasIdCondition(has_id=part)])
        prefetch.append(models.Prefetch(filter=inside, limit=12))
    rows = parts[0] + parts[1]
    query = -3 * photos.gallery[rows].mean(axis=0)
    found = client.query_points("photos", query, "image", prefetch=prefetch, limit=8)
    corrected = [key for key in ids(found) if key not in lacking]
    expected = [
        key for key in photos.best(query, len(rows), rows) if key not in lacking
    ]
    assert len(corrected) >= 6
    assert corrected == expected[: len(corrected)]


def test_a_search_in_local_mode_gives_no_warning_that_the_plain_one_does_not(photos):
    client = photos.corrected()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        photos.search(client, photos.queries[0])
