"""Queries recorded by a corrected client: which, where, and without a search ever failing for it."""

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import InputError, Recorder
from hubplugin.recording import read
from hubplugin.store import read_recorded
from hubplugin_qdrant import HubQdrantClient
from tests.qdrant.conftest import DIM, RRF, Photos


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "queries"


def rows(folder):
    found = read(folder)
    return set() if found is None else {tuple(row) for row in found.array().tolist()}


def asked(queries):
    return {tuple(query) for query in np.asarray(queries, np.float32).tolist()}


def embed_as(vector, monkeypatch):
    """Every query is a document from now on, of which the client makes `vector`."""

    def embed(client, requests, is_query=False):
        assert is_query
        return [each.model_copy(update={"query": vector.tolist()}) for each in requests]

    monkeypatch.setattr("hubplugin_qdrant.plain_client.embed", embed)


def also_live(photos):
    """`photos`, whose collection has the alias "live" from now on."""
    alias = models.CreateAlias(collection_name="photos", alias_name="live")
    photos.plain.update_collection_aliases(
        [models.CreateAliasOperation(create_alias=alias)]
    )
    return photos


def test_each_collection_and_vector_has_its_own_sample_before_any_correction(folder):
    client = HubQdrantClient(":memory:", record=folder)
    sizes = {"image": models.VectorParams(size=3, distance=models.Distance.DOT)}
    sizes["text"] = models.VectorParams(size=2, distance=models.Distance.DOT)
    client.create_collection("photos", sizes)
    client.create_collection("a b", sizes["text"])
    client.query_points("photos", [1.0, 2, 3], "image")
    client.query_points("photos", [1, 2], "text")
    client.query_points("a b", [3, 4])
    client.close()
    assert rows(folder / "photos" / "image") == {(1, 2, 3)}
    assert rows(folder / "photos" / "text") == {(1, 2)}
    assert rows(folder / "a%20b") == {(3, 4)}


@pytest.mark.parametrize("named", ["photos", "live"])
def test_only_the_collections_that_a_recorder_names_are_recorded(folder, named):
    photos = also_live(
        Photos(QdrantClient(":memory:"), "image", models.Distance.COSINE)
    )
    photos.plain.create_collection(
        "other", models.VectorParams(size=DIM, distance=models.Distance.COSINE)
    )
    client = photos.wrapped(record=Recorder(folder, collections=[named]))
    client.query_points("live", photos.queries[0], "image")
    client.query_points("other", photos.queries[1])
    client.close()
    assert rows(folder / "photos" / "image") == asked([photos.queries[0]])
    assert [path.name for path in folder.iterdir()] == ["photos"]


def test_the_queries_of_each_search_are_the_bank_and_what_is_no_query_is_not(
    photos, folder
):
    photos.apply()
    client = photos.wrapped(record=folder)
    using = photos.using or None
    one, two, three, four, five, six, *_ = photos.queries.tolist()
    client.query_points("photos", one, using)
    request = models.QueryRequest(query=two, using=using)
    client.query_batch_points("photos", [request])
    client.query_points_groups("photos", "colour", three, using)
    client.query_points("photos", models.NearestQuery(nearest=four), using)
    prefetch = [
        models.Prefetch(query=five, using=using),
        models.Prefetch(
            query=models.NearestQuery(nearest=[*five[:-1], 1.0]), using=using
        ),
    ]
    client.query_points("photos", RRF, prefetch=prefetch)
    client.query_points("photos", 5, using)
    similar = models.RecommendInput(positive=[six])
    client.query_points("photos", models.RecommendQuery(recommend=similar), using)
    with pytest.raises(ValueError, match=r"shapes|dimension|broadcast|matmul|size"):
        client.query_points("photos", [1.0, 2.0], using)
    store = hubplugin_qdrant.open_store(
        photos.plain, "photos", vector=photos.using, record=folder
    )
    client.close()
    expected = asked([one, two, three, four, five, [*five[:-1], 1.0]])
    assert rows(folder / "photos" / photos.using) == expected
    recorded = read_recorded(store)
    assert recorded is not None
    assert (recorded.rows, recorded.dim) == (6, DIM)


def test_nothing_is_recorded_unless_a_client_is_told_to(cosine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    client = cosine.apply()
    client.query_points("photos", cosine.queries[0])
    client.close()
    assert list(tmp_path.iterdir()) == []


def test_texts_are_kept_where_the_client_embeds_documents_and_is_asked_for_them(
    cosine, folder, monkeypatch
):
    embed_as(cosine.queries[0], monkeypatch)
    client = cosine.wrapped(record=Recorder(folder, texts=True))
    client.query_points("photos", models.Document(text="red shoes", model="some/model"))
    client.close()
    recorded = read(folder / "photos")
    assert recorded is not None
    assert recorded.texts == ["red shoes"]


def test_a_folder_that_cannot_be_written_fails_no_search(cosine, tmp_path, caplog):
    client = cosine.wrapped(record=Recorder(tmp_path / "file", seconds=0.001))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="expected a folder"):
        cosine.wrapped(record=["queries"])
    with pytest.raises(InputError, match="file is a file"):
        cosine.wrapped(record=tmp_path / "file")
    for query in cosine.queries:
        assert len(client.query_points("photos", query).points) == 10
    client.close()
    assert len([each for each in caplog.records if "not recorded" in each.message]) == 1


@pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])
def test_clicks_join_the_queries_of_their_collection_and_vector(
    folder, awaited, monkeypatch
):
    photos = also_live(
        Photos(
            QdrantClient(":memory:"), "image", models.Distance.COSINE, awaited=awaited
        )
    )
    client = photos.wrapped(record=folder)
    one, two, three = photos.queries[:3].tolist()
    for query in (one, two, three):
        client.query_points("photos", query, "image")
    embed_as(photos.queries[2], monkeypatch)
    client.click("live", Recorder.id_of(one), 17, using="image")
    client.click("photos", two, "17", "image")
    document = models.Document(text="red shoes", model="some/model")
    client.click("live", document, 18, "image")
    store = hubplugin_qdrant.open_store(
        photos.plain, "photos", vector="image", record=folder
    )
    client.close()
    recorded = read_recorded(store)
    assert sorted(recorded.answers) == [17, 17, 18]
    row = list(recorded.answers).index(18)
    assert tuple(recorded.array()[row].tolist()) in asked([three])


@pytest.mark.parametrize("place", ["photos", "phtos"])
def test_clicks_on_what_is_no_point_are_one_line_in_the_log(folder, caplog, place):
    photos = Photos(QdrantClient(":memory:"), "", models.Distance.COSINE)
    client = photos.wrapped(record=folder)
    client.query_points("photos", photos.queries[0])
    for _ in range(3):
        client.click(place, photos.queries[0], 999_999)
    client.close()
    assert read(folder / "photos").answers is None
    (record,) = caplog.records
    assert place in record.message


def test_a_click_that_cannot_be_recorded_fails_nothing(folder, caplog):
    photos = Photos(QdrantClient(":memory:"), "", models.Distance.COSINE)
    client = photos.wrapped(record=Recorder(folder, collections=["photos"]))
    client.click("photos", "red shoes", 1)
    client.click("other", photos.queries[0], 1)
    client.close()
    (record,) = caplog.records
    assert "a click is not recorded in" in record.message
    assert "shoes" not in record.message
    assert not folder.exists()
    with pytest.raises(
        InputError,
        match="this client records nothing: name a folder where it is made, record=",
    ):
        photos.wrapped().click("photos", photos.queries[0], 1)


def test_more_collections_than_are_kept_apart_fail_no_search(
    folder, caplog, monkeypatch
):
    monkeypatch.setattr("hubplugin.recording.MOST_WITHIN", 2)
    client = HubQdrantClient(":memory:", record=folder)
    for number in range(4):
        client.create_collection(
            f"tenant-{number}",
            models.VectorParams(size=2, distance=models.Distance.DOT),
        )
        client.query_points(f"tenant-{number}", [1, 2])
    client.close()
    assert [rows(folder / f"tenant-{number}") for number in range(4)] == [
        {(1, 2)},
        {(1, 2)},
        set(),
        set(),
    ]
    assert len(caplog.records) == 1
    assert "tenant-2" in caplog.text
