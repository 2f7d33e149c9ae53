"""Queries recorded by a corrected client: which, where, and without a search ever
failing for it."""

import numpy as np
import pytest
from qdrant_client import models

from hubplugin import InputError, Recorder
from hubplugin.recording import read
from hubplugin.store import read_recorded
from hubplugin_qdrant import HubQdrantClient
from tests.qdrant.conftest import COSINE, DIM, DOCUMENT, DOT, RRF, Photos, lead


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "queries"


def rows(folder):
    found = read(folder)
    return set() if found is None else asked(found.array())


def asked(queries):
    return {tuple(query) for query in np.asarray(queries, np.float32).tolist()}


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def live(request):
    """A collection that has the alias "live"."""
    photos = Photos(awaited=request.param)
    lead(photos.plain, "live", to="photos")
    return photos


def test_each_collection_and_vector_has_its_own_sample_before_any_correction(folder):
    client = HubQdrantClient(":memory:", record=folder)
    image, text = (models.VectorParams(size=size, distance=DOT) for size in (3, 2))
    client.create_collection("photos", {"image": image, "text": text})
    client.create_collection("a b", text)
    client.query_points("photos", [1.0, 2, 3], "image")
    client.query_points("photos", [1, 2], "text")
    client.query_points("a b", [3, 4])
    client.close()
    assert rows(folder / "photos" / "image") == {(1, 2, 3)}
    assert rows(folder / "photos" / "text") == {(1, 2)}
    assert rows(folder / "a%20b") == {(3, 4)}


@pytest.mark.parametrize("asked_for", ["first", "second"])
def test_a_client_wrapped_again_goes_on_recording_unless_another_folder_is_named(
    cosine, tmp_path, asked_for
):
    client = cosine.wrapped(record=tmp_path / "first")
    options = {} if asked_for == "first" else {"record": tmp_path / "second"}
    again = HubQdrantClient.wrap(client, **options)
    again.query_points("photos", cosine.queries[0], cosine.using)
    again.close()
    assert [path.name for path in tmp_path.iterdir()] == [asked_for]
    assert rows(tmp_path / asked_for / "photos") == asked(cosine.queries[:1])


@pytest.mark.parametrize("named", ["photos", "live"])
def test_only_the_collections_that_a_recorder_names_are_recorded(folder, live, named):
    parameters = models.VectorParams(size=DIM, distance=COSINE)
    live.plain.create_collection("other", parameters)
    client = live.wrapped(record=Recorder(folder, collections=[named]))
    client.query_points("live", live.queries[0], "image")
    client.query_points("other", live.queries[1])
    client.close()
    assert rows(folder / "photos" / "image") == asked([live.queries[0]])
    assert [path.name for path in folder.iterdir()] == ["photos"]


def test_the_queries_of_each_search_are_the_bank_and_what_is_no_query_is_not(
    photos, folder
):
    photos.corrected()
    client, using = photos.wrapped(record=folder), photos.using
    one, two, three, four, five, six, *_ = photos.queries.tolist()
    whole = [*five[:-1], 1.0]
    client.query_points("photos", one, using)
    request = models.QueryRequest(query=two, using=using)
    client.query_batch_points("photos", [request])
    client.query_points_groups("photos", "colour", three, using)
    client.query_points("photos", models.NearestQuery(nearest=four), using)
    prefetch = [
        models.Prefetch(query=query, using=using)
        for query in (five, models.NearestQuery(nearest=whole))
    ]
    client.query_points("photos", RRF, prefetch=prefetch)
    client.query_points("photos", 5, using)
    similar = models.RecommendInput(positive=[six])
    client.query_points("photos", models.RecommendQuery(recommend=similar), using)
    with pytest.raises(ValueError, match=r"shapes|dimension|broadcast|matmul|size"):
        client.query_points("photos", [1.0, 2.0], using)
    store = photos.store(record=folder)
    client.close()
    expected = asked([one, two, three, four, five, whole])
    assert asked(read_recorded(store).array()) == expected


def test_nothing_is_recorded_unless_a_client_is_told_to(cosine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    client = cosine.wrapped()
    cosine.search(client, cosine.queries[0])
    client.close()
    assert not [*tmp_path.iterdir()]
    says = "this client records nothing: pass a folder when you create it, record="
    with pytest.raises(InputError, match=says):
        client.click("photos", cosine.queries[0], 1)


def test_texts_are_kept_where_the_client_embeds_documents_and_is_asked_for_them(
    cosine, folder, embedding
):
    client = cosine.wrapped(record=Recorder(folder, texts=True))
    client.query_points("photos", DOCUMENT)
    client.close()
    assert read(folder / "photos").texts == [DOCUMENT.text]


def test_a_folder_that_cannot_be_written_fails_no_search(cosine, tmp_path, caplog):
    file = tmp_path / "file"
    client = cosine.wrapped(record=Recorder(file, seconds=0.001))
    file.touch()
    for record, says in ((["queries"], "expected a folder"), (file, "is a file")):
        with pytest.raises(InputError, match=says):
            cosine.wrapped(record=record)
    for query in cosine.queries:
        assert len(cosine.found(client, query)) == 10
    client.close()
    assert len([each for each in caplog.messages if "not recorded" in each]) == 1


def test_clicks_join_the_queries_of_their_collection_and_vector(
    folder, live, embedding
):
    client = live.wrapped(record=folder)
    one, two, _, three = live.queries[:4].tolist()
    for query in (one, two, three):
        live.search(client, query)
    client.click("live", Recorder.id_of(one), 17, using="image")
    client.click("photos", two, "17", "image")
    client.click("live", DOCUMENT, 18, "image")
    store = live.store(record=folder)
    client.close()
    recorded = read_recorded(store)
    assert sorted(recorded.answers) == [17, 17, 18]
    row = list(recorded.answers).index(18)
    assert asked(recorded.array()[[row]]) == asked([three])


@pytest.mark.parametrize(
    ("place", "query", "key", "lines"),
    [
        ("photos", Photos.queries[0], 999_999, 1),
        ("phtos", Photos.queries[0], 1, 1),
        ("photos", "red shoes", 1, 1),
        ("other", Photos.queries[0], 1, 0),
    ],
    ids=["no point", "no collection", "no query", "not recorded"],
)
def test_clicks_that_cannot_be_recorded_fail_nothing_and_are_one_line_in_the_log(
    cosine, folder, caplog, place, query, key, lines
):
    client = cosine.wrapped(record=Recorder(folder, collections=["photos", "phtos"]))
    cosine.search(client, cosine.queries[0])
    for _ in range(3):
        client.click(place, query, key)
    client.close()
    assert len(caplog.messages) == lines
    assert "shoes" not in caplog.text
    assert read(folder / "photos").answers is None


def test_more_collections_than_are_kept_apart_fail_no_search(
    folder, caplog, monkeypatch
):
    monkeypatch.setattr("hubplugin.recording.MOST_WITHIN", 2)
    client = HubQdrantClient(":memory:", record=folder)
    names = [f"tenant-{number}" for number in range(4)]
    for name in names:
        parameters = models.VectorParams(size=2, distance=DOT)
        client.create_collection(name, parameters)
        client.query_points(name, [1, 2])
    client.close()
    assert [rows(folder / name) for name in names] == [{(1, 2)}] * 2 + [set()] * 2
    (said,) = caplog.messages
    assert "tenant-2" in said
