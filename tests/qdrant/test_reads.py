"""A corrected collection searched through `HubQdrantClient`, against the exact corrected ranking."""

import itertools
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from qdrant_client import QdrantClient, models
from qdrant_client.conversions.conversion import RestToGrpc

import hubplugin
from hubplugin import StoreError
from hubplugin_qdrant import HubQdrantClient
from hubplugin_qdrant.manifest import QdrantManifest
from hubplugin_qdrant.requests import rewrite
from tests.qdrant.conftest import RED, ROWS, Photos, ids, know, names


def test_a_nearest_query_returns_the_exact_corrected_ranking_and_scores(photos):
    client = photos.corrected()
    for query in photos.queries:
        found = photos.search(client, query).points
        assert ids(found) == photos.best(query)
        expected = np.sort(photos.similarities([query])[0])[::-1][:10]
        if photos.distance is models.Distance.EUCLID:
            expected = -np.sign(expected) * np.sqrt(
                np.abs(2 * expected)
            )  # sqrt(d^2 - 2 offset)
            assert all(np.diff([point.score for point in found]) >= 0)
        np.testing.assert_allclose(
            [point.score for point in found], expected, rtol=1e-5, atol=1e-5
        )


def test_pages_follow_one_another_to_the_end(photos):
    client = photos.corrected()
    query = photos.queries[1]
    pages = [
        ids(photos.search(client, query, limit=30, offset=start))
        for start in range(0, 150, 30)
    ]
    assert [len(page) for page in pages] == [30] * 4 + [0]
    assert [key for page in pages for key in page] == photos.best(query, ROWS)


def test_payload_and_vectors_come_as_asked_and_without_our_key(photos):
    client = photos.corrected()
    query = photos.queries[0]
    best = photos.best(query, 1)[0]
    colour = photos.point(best, photos.gallery[best]).payload
    whole = photos.search(client, query, limit=1, with_vectors=True).points[0]
    assert whole.payload == colour
    vector = whole.vector[photos.using] if photos.using else whole.vector
    assert len(vector) == photos.gallery.shape[1]
    assert (
        not photos.search(client, query, limit=1, with_payload=False).points[0].payload
    )
    assert photos.search(client, query, limit=1, with_payload=["n"]).points[
        0
    ].payload == {"n": best}
    without = models.PayloadSelectorExclude(exclude=["n"])
    shown = (
        photos.search(client, query, limit=1, with_payload=without).points[0].payload
    )
    assert shown == {"colour": colour["colour"]}
    for read in readings(client, photos):
        point = read()
        assert set(point.payload) == {"n", "colour"}
        assert (
            set(point.vector) == {"image"}
            if photos.using
            else isinstance(point.vector, list)
        )
    looked_up = client.query_points_groups(
        "photos", "n", query, photos.using or None, with_lookup="photos"
    ).groups
    assert all(set(group.lookup.payload) == {"n", "colour"} for group in looked_up)
    asked = (
        photos.search(client, query, limit=1, with_payload=["hub_offset"])
        .points[0]
        .payload
    )
    assert asked == (
        {"hub_offset": photos.stored(best)} if photos.storage == "payload" else {}
    )


def test_recommend_order_by_sample_and_mmr_stay_raw(cosine):
    raw = [
        models.RecommendQuery(recommend=models.RecommendInput(positive=[1, 2])),
        models.OrderByQuery(order_by="n"),
        models.NearestQuery(
            nearest=cosine.queries[0].tolist(), mmr=models.Mmr(diversity=0.5)
        ),
        None,
    ]
    before = [ids(cosine.plain.query_points("photos", query)) for query in raw]
    client = cosine.corrected()
    assert [ids(client.query_points("photos", query)) for query in raw] == before


def test_another_collection_and_another_vector_are_as_without_the_wrapper(photos):
    photos.plain.create_collection(
        "other", models.VectorParams(size=2, distance=models.Distance.DOT)
    )
    photos.plain.upsert(
        "other",
        [models.PointStruct(id=1, vector=[1, 2], payload={"hub_offset": {"v1": 9}})],
    )
    client = photos.corrected()
    for method, given in [
        ("query_points", {"query": [1.0, 1.0]}),
        ("retrieve", {"ids": [1]}),
        ("scroll", {}),
        ("set_payload", {"payload": {"hub_offset": 1}, "points": [1]}),
    ]:
        assert getattr(client, method)("other", **given) == getattr(
            photos.plain, method
        )("other", **given)


def test_a_collection_without_a_correction_is_read_as_by_the_plain_client(cosine):
    client, selector = cosine.wrapped(), {"exclude": ["n"]}
    assert client.retrieve("photos", [1], selector) == cosine.plain.retrieve(
        "photos", [1], selector
    )
    assert client.scroll("photos", with_payload=selector) == cosine.plain.scroll(
        "photos", with_payload=selector
    )


def test_an_alias_is_searched_corrected(photos):
    client = photos.corrected()
    rename = models.CreateAlias(collection_name="photos", alias_name="pictures")
    client.update_collection_aliases([models.CreateAliasOperation(create_alias=rename)])
    found = client.query_points("pictures", photos.queries[0], photos.using or None)
    assert ids(found) == photos.best(photos.queries[0])


def test_a_client_that_knows_only_where_the_store_is_searches_corrected(tmp_path):
    photos = Photos(QdrantClient(path=str(tmp_path)), "", models.Distance.COSINE)
    photos.apply()
    expected = photos.best(photos.queries[0])
    photos.plain.close()
    client = HubQdrantClient(path=str(tmp_path))
    assert isinstance(client, QdrantClient)
    assert ids(client.query_points("photos", photos.queries[0])) == expected


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
    client, query, using = photos.wrapped(), photos.queries[0], photos.using or None
    with pytest.warns(
        UserWarning,
        match="no point of 'photos' has an offset of version 1.*run refresh",
    ) as warned:
        found = client.query_points("photos", query, using)
    assert len(warned) == 1
    assert ids(found) == ids(photos.plain.query_points("photos", query, using))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr("hubplugin_qdrant.metadata.time.monotonic", lambda: 1e12)
        client.query_points(
            "photos", query, using
        )  # after another look at the manifest
        hubplugin.refresh(photos.store())
        assert ids(
            photos.wrapped().query_points("photos", query, using)
        ) == photos.best(query)


def test_where_some_point_or_no_vector_is_left_nothing_is_said_of_lost_offsets(
    in_payload,
):
    photos = in_payload
    photos.corrected()
    others = models.Filter(must_not=[models.HasIdCondition(has_id=[ROWS - 1])])
    photos.plain.delete_payload("photos", ["hub_offset"], points=others)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        photos.search(photos.wrapped(), photos.queries[0])
        photos.plain.delete("photos", models.Filter())
        photos.search(photos.wrapped(), photos.queries[0])


def readings(client, photos):
    """Every way of reading a point with all that it has."""
    query, using = photos.queries[0].tolist(), photos.using or None
    lookup = models.WithLookup(
        collection="photos", with_payload=True, with_vectors=True
    )
    request = models.QueryRequest(
        query=query, using=using, limit=1, with_vector=True, with_payload=True
    )
    asked = {"query": query, "using": using, "limit": 1}

    def group(**given):
        return client.query_points_groups("photos", "n", **asked, **given).groups[0]

    return [
        lambda: client.query_points("photos", **asked, with_vectors=True).points[0],
        lambda: client.query_batch_points("photos", [request])[0].points[0],
        lambda: group(with_vectors=True).hits[0],
        lambda: group(with_payload=False, with_lookup=lookup).lookup,
        lambda: client.retrieve("photos", [3], with_vectors=True)[0],
        lambda: client.scroll("photos", limit=1, with_vectors=True)[0][0],
    ]


def test_a_client_that_lives_through_an_apply_elsewhere_shows_nothing_of_ours(photos):
    described = photos.plain.get_collection("photos").config.params.vectors
    client = photos.wrapped()
    photos.search(client, photos.queries[0])
    for settings in ({}, {"tau": 0.07}):
        photos.apply(**settings)
        before = client._corrections.manifests["photos"]
        for read in readings(client, photos):
            client._corrections.manifests["photos"] = replace(
                before
            )  # as one that has not read the manifest since
            point = read()
            assert set(point.payload) == {"n", "colour"}
            assert (
                set(point.vector) == {"image"}
                if photos.using
                else isinstance(point.vector, list)
            )
        client._corrections.manifests["photos"] = replace(before)
        assert client.get_collection("photos").config.params.vectors == described


def test_a_users_own_names_that_look_like_ours_are_shown_and_cost_one_look(monkeypatch):
    plain = QdrantClient(":memory:")
    plain.create_collection(
        "other", {"hub_v7": models.VectorParams(size=2, distance=models.Distance.DOT)}
    )
    plain.upsert(
        "other",
        [
            models.PointStruct(
                id=1, vector={"hub_v7": [1, 2]}, payload={"hub_offset": "mine"}
            )
        ],
    )
    client, read = HubQdrantClient.wrap(plain), []
    retrieve = plain.retrieve
    monkeypatch.setattr(
        plain,
        "retrieve",
        lambda name, **given: read.append(name) or retrieve(name, **given),
    )
    for _ in range(3):
        (point,) = client.query_points(
            "other", [1.0, 1.0], "hub_v7", with_vectors=True
        ).points
        assert (set(point.vector), point.payload) == (
            {"hub_v7"},
            {"hub_offset": "mine"},
        )
        assert client.get_collection("other") == plain.get_collection("other")
    assert read.count("other--hub") == 2


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
    client, said = (
        HubQdrantClient.wrap(cosine.plain),
        rf"format {written} of hubplugin x; .* reads format 7: {way_out}",
    )
    with pytest.warns(UserWarning, match=said):
        found = client.query_points("photos", cosine.queries[0])
    assert ids(found) == ids(cosine.plain.query_points("photos", cosine.queries[0]))
    with pytest.raises(StoreError, match=f"{said}$"):
        cosine.apply()


def test_a_corrected_request_is_valid_for_rest_and_grpc(photos):
    photos.corrected()
    written = QdrantManifest.model_validate(
        photos.plain.retrieve("photos--hub", [0])[0].payload
    )
    complete = {"everywhere": photos.storage == "vector"}
    everywhere = {
        name: version.model_copy(update=complete)
        for name, version in written.active.items()
    }
    inner = models.Prefetch(
        query=photos.queries[0].tolist(),
        using=photos.using or None,
        limit=5,
        score_threshold=0.1,
    )
    formula = models.FormulaQuery(
        formula=models.SumExpression(sum=["$score", 1.0]), defaults={"$score": 0.5}
    )
    requests = (
        models.QueryRequest(
            query=photos.queries[0].tolist(),
            using=photos.using or None,
            filter=RED,
            limit=3,
        ),
        models.QueryRequest(
            query=models.FusionQuery(fusion=models.Fusion.DBSF), prefetch=[inner, inner]
        ),
        models.QueryRequest(query=formula, prefetch=inner),
        models.QueryRequest(
            query=photos.queries[0].tolist(),
            using=photos.using or None,
            prefetch=[inner],
        ),
    )
    for request, manifest in itertools.product(
        requests, (written, written.replace(active=everywhere))
    ):
        corrected = rewrite(request, manifest)[0]
        text = corrected.model_dump_json(exclude_none=True)
        assert json.loads(
            models.QueryRequest.model_validate_json(text).model_dump_json(
                exclude_none=True
            )
        ) == json.loads(text)
        RestToGrpc.convert_query(QdrantClient._resolve_query(corrected.query))
        for prefetch in corrected.prefetch or []:
            RestToGrpc.convert_prefetch_query(prefetch)


def test_the_documented_lines_rank_candidates_by_a_rule(tmp_path, monkeypatch):
    """docs/qdrant.md: a correction that depends on the query, over all points of the collection."""
    page = (Path(__file__).parents[2] / "docs" / "qdrant.md").read_text()
    (lines,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "fit_rule" in block
    ]
    photos = Photos(QdrantClient(":memory:"), "image", models.Distance.COSINE)
    np.save(tmp_path / "bank.npy", photos.bank)
    monkeypatch.chdir(tmp_path)
    found = {"client": photos.plain, "query": photos.queries[0]}
    exec(lines.replace("limit=100", f"limit={ROWS}"), found)
    vectors, query = (
        x / np.linalg.norm(x, axis=-1, keepdims=True)
        for x in (photos.gallery, photos.queries[:1])
    )
    rule = found["rule"]
    scores = rule.rescore(
        (query @ vectors.T).astype(np.float64), rule.keep(photos.gallery)
    )[0]
    best = [found["found"][number].id for number in found["order"]]
    assert best[:10] == np.argsort(-scores)[:10].tolist()


@pytest.mark.parametrize(
    "distance", [models.Distance.COSINE, models.Distance.DOT, models.Distance.EUCLID]
)
def test_a_rescoring_ranks_what_its_prefetch_gives_and_nothing_else(distance):
    """With second vectors, of which one point of the prefetch and one outside it have none."""
    photos = Photos(QdrantClient(":memory:"), "image", distance, "vector")
    photos.corrected()
    query, fresh = photos.queries[0], photos.queries[:2]
    photos.plain.upsert(
        "photos", [photos.point(500 + row, vector) for row, vector in enumerate(fresh)]
    )
    inside = models.Filter(must=[models.HasIdCondition(has_id=[3, 4, 5, 500])])
    given = {
        "prefetch": models.Prefetch(filter=inside, limit=4),
        "query": query.tolist(),
        "using": "image",
    }
    found = photos.wrapped().query_points("photos", **given).points
    plain = photos.plain.query_points("photos", **given).points
    assert {point.id for point in found} == {3, 4, 5, 500}
    (raw,) = [point.score for point in plain if point.id == 500]
    (score,) = [point.score for point in found if point.id == 500]
    assert score == pytest.approx(raw, abs=1e-3)  # neutral
    assert [point.id for point in found if point.id != 500] == photos.best(
        query, rows=[3, 4, 5]
    )


@pytest.mark.parametrize(
    "distance", [models.Distance.COSINE, models.Distance.DOT, models.Distance.EUCLID]
)
def test_one_point_without_a_second_vector_changes_no_other_score_of_a_rescoring(
    distance,
):
    photos = Photos(QdrantClient(":memory:"), "image", distance, "vector")
    client, far = photos.apply(), (-photos.queries[0]).tolist()
    given = {
        "prefetch": models.Prefetch(
            query=photos.queries[0].tolist(), using="image", limit=40
        ),
        "limit": 5,
    }
    previous = client.query_points("photos", far, "image", **given).points
    photos.plain.upsert("photos", [photos.point(500, 10 * photos.queries[2])])
    after = photos.wrapped().query_points("photos", far, "image", **given).points
    assert [point.id for point in after] == [point.id for point in previous]
    np.testing.assert_allclose(
        [p.score for p in after], [p.score for p in previous], rtol=1e-4, atol=1e-4
    )


def test_a_rescoring_finds_points_without_a_second_vector_among_all_its_candidates():
    """Also those that are not the first by the raw score: the others fall behind them by their offsets."""
    photos, lacking = (
        Photos(QdrantClient(":memory:"), "image", models.Distance.DOT, "vector"),
        list(range(0, 60, 3)),
    )
    photos.corrected()
    photos.plain.delete_vectors(
        "photos", [photos.version.augmented_vector], points=lacking
    )
    expected = photos.similarities(photos.queries)[:, :60]
    expected[:, lacking] -= photos.model.offsets(photos.gallery)[lacking]
    chosen = models.Filter(must=[models.HasIdCondition(has_id=list(range(60)))])
    client = photos.wrapped()
    for query, scores in zip(photos.queries, expected, strict=True):
        prefetch = models.Prefetch(filter=chosen, limit=60)
        found = client.query_points(
            "photos", query, "image", prefetch=prefetch, limit=5
        ).points
        assert [point.id for point in found] == np.argsort(-scores)[:5].tolist()


@pytest.mark.parametrize(
    "distance", [models.Distance.COSINE, models.Distance.DOT, models.Distance.EUCLID]
)
def test_a_rescoring_of_more_than_strict_mode_allows_begins_with_the_best(distance):
    """With second vectors, of which some points have none: each of the two lists may have 12 of the candidates."""
    photos = Photos(QdrantClient(":memory:"), "image", distance, "vector")
    client = photos.corrected()
    photos.plain.delete_vectors(
        "photos", [photos.version.augmented_vector], points=[7, 50]
    )
    limited = photos.version.model_copy(update={"max_candidates": 12})
    know(client, "photos", QdrantManifest(active={"image": limited}))
    parts = [range(12), range(40, 52)]
    rows = [row for part in parts for row in part]
    query = -3 * photos.gallery[rows].mean(axis=0)
    prefetch = [
        models.Prefetch(
            filter=models.Filter(must=[models.HasIdCondition(has_id=list(rows))]),
            limit=12,
        )
        for rows in parts
    ]
    found = client.query_points(
        "photos", query, "image", prefetch=prefetch, limit=8
    ).points
    expected = [
        row for row in photos.best(query, len(rows), rows) if row not in (7, 50)
    ]
    corrected = [point.id for point in found if point.id not in (7, 50)]
    assert len(corrected) >= 6
    assert corrected == expected[: len(corrected)]


def test_a_search_in_local_mode_gives_no_warning_that_the_plain_one_does_not(photos):
    client = photos.corrected()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        photos.search(client, photos.queries[0])


def test_a_list_of_collections_and_a_description_show_nothing_of_ours(photos):
    client = photos.corrected()
    plain = photos.plain.get_collection("photos")
    shown = client.get_collection("photos")
    before = Photos(
        QdrantClient(":memory:"), photos.using, photos.distance
    ).plain.get_collection("photos")
    assert shown.config.params.vectors == before.config.params.vectors
    assert photos.plain.get_collection("photos") == plain, (
        "local mode hands out what it works with"
    )
    assert names(client) == ["photos"]
    photos.plain.create_collection("stranger--hub", vectors_config={})
    assert names(client) == ["photos", "stranger--hub"]
    assert "photos--hub" in names(photos.plain)


def test_a_description_leaves_our_payload_index_out(cosine, monkeypatch):
    client = cosine.corrected()
    info, index = (
        cosine.plain.get_collection("photos"),
        models.PayloadIndexInfo(data_type="float", points=1),
    )
    schema = {"colour": index, "hub_offset.v1": index}
    monkeypatch.setattr(
        client.raw,
        "get_collection",
        lambda **_: info.model_copy(update={"payload_schema": schema}),
    )
    assert set(client.get_collection("photos").payload_schema) == {"colour"}
