"""`HubCollection`: an application searches and writes as before, corrected, and both collections stay the same."""

import base64
import sqlite3
import time

import chromadb
import numpy as np
import pytest

import hubplugin
from hubplugin_chroma import HubCollection, open_store
from tests.galleries import assert_near

pytestmark = pytest.mark.slow


def clustered(rng, count=200, dim=16):
    vectors = rng.normal(size=(8, dim))[rng.integers(8, size=count)] + rng.normal(
        size=(count, dim)
    )
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def create(client, vectors, space="cosine", **hnsw):
    """The collection `photos`, of `vectors` [n, d] under the ids p0, p1, ..."""
    plain = client.create_collection(
        "photos", configuration={"hnsw": {"space": space, **hnsw}}
    )
    ids = [f"p{number}" for number in range(len(vectors))]
    metadatas = [{"even": number % 2 == 0} for number in range(len(vectors))]
    plain.add(ids=ids, embeddings=vectors, metadatas=metadatas, documents=ids)
    return plain


def correct(client, plain, vectors, metric="cosine"):
    """The store of the collection, corrected."""
    store = open_store(client, plain)
    hubplugin.apply(
        store,
        hubplugin.fit(vectors, vectors[:100] + 0.1, "is", metric=metric),
        force=True,
    )
    return store


def plain_of(collection):
    """`collection` as a program has it that knows nothing of hubplugin."""
    return chromadb.Collection(collection._client, collection._model)


@pytest.fixture(params=["cosine", "l2"])
def photos(request, tmp_path, rng):
    """A corrected collection as an application has it, its store, and the vectors."""
    client, vectors = chromadb.PersistentClient(tmp_path), clustered(rng)
    plain = create(client, vectors, request.param)
    store = correct(
        client, plain, vectors, "cosine" if request.param == "cosine" else "euclidean"
    )
    return HubCollection(client, client.get_collection("photos")), store, vectors


@pytest.fixture
def folder(tmp_path, rng):
    """The same in a folder, with the metric cosine: a client, the plain collection, and the vectors."""
    client, vectors = chromadb.PersistentClient(tmp_path), clustered(rng)
    return client, create(client, vectors), vectors


def rank(store, vectors, query):
    """The numbers of the targets `vectors`, nearest first, and their corrected distances, in float64."""
    offsets = store.correction().model.offsets(vectors).astype(np.float64)
    similarity = vectors.astype(np.float64) @ query.astype(np.float64)
    distance = (
        1 - similarity - offsets
        if store.metric.value == "cosine"
        else 2 - 2 * similarity - 2 * offsets
    )
    return np.argsort(distance), np.sort(distance)


def names(numbers):
    return [f"p{number}" for number in numbers]


def test_a_query_answers_corrected_with_all_that_was_asked_for(photos):
    collection, store, vectors = photos
    found = collection.query(
        vectors[:3],
        n_results=5,
        include=["documents", "distances", "embeddings", "metadatas"],
    )
    for row in range(3):
        order, distances = rank(store, vectors, vectors[row])
        assert found["ids"][row] == names(order[:5])
        assert found["documents"][row] == found["ids"][row]
        assert_near(found["distances"][row], distances[:5])
        assert_near(found["embeddings"][row], vectors[order[:5]], 1e-6)
    assert found["uris"] is None
    assert (
        collection.query(query_embeddings=vectors[0], n_results=5, include=[])[
            "distances"
        ]
        is None
    )


def test_a_filter_is_kept_and_ranks_corrected(photos):
    collection, store, vectors = photos
    order, _ = rank(store, vectors[::2], vectors[1])
    query = {"query_embeddings": [vectors[1].tolist()], "n_results": 5}
    assert collection.query(**query, where={"even": True})["ids"][0] == names(
        2 * order[:5]
    )
    assert sorted(collection.query(**query, ids=["p7", "p8"])["ids"][0]) == ["p7", "p8"]
    assert collection.query(
        query_embeddings=vectors[:1], where_document={"$contains": "nowhere"}
    )["ids"] == [[]]


def test_what_is_written_has_its_offset_at_once(photos, rng):
    collection, store, vectors = photos
    fresh = clustered(rng, 3)
    collection.add(ids=["a", "b"], embeddings=fresh[:2])
    collection.upsert(["c"], fresh[2:], None, ["text"])
    collection.update(ids="p0", embeddings=fresh[2].tolist())
    collection.delete(where={"even": False})
    report = hubplugin.inspect(store, queries=0)
    assert (report.count, report.missing, report.stale) == (103, 0, 0)
    ids = [*names(range(0, 200, 2)), "a", "b", "c"]
    order, _ = rank(
        store, np.concatenate([fresh[2:], vectors[2::2], fresh]), vectors[5]
    )
    assert collection.query(vectors[5], n_results=8)["ids"][0] == [
        ids[number] for number in order[:8]
    ]


def test_a_wrapped_collection_sees_within_a_second_what_others_refreshed(
    photos, rng, monkeypatch
):
    collection, store, vectors = photos
    fresh = clustered(rng, 3)
    collection.query(fresh, n_results=5)
    plain_of(collection).update(ids=["p3", "p4", "p5"], embeddings=fresh)
    hubplugin.refresh(store)
    later = time.monotonic() + 1.1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    now = np.concatenate([vectors[:3], fresh, vectors[6:]])
    order, _ = rank(store, now, vectors[8])
    assert collection.query(vectors[8], n_results=5)["ids"][0] == names(order[:5])


def test_whatever_a_plain_query_may_include_a_corrected_one_may(photos):
    collection, _, vectors = photos
    plain = plain_of(collection)
    for include in (["uris", "data"], ["data", "documents"]):
        query = {"query_embeddings": vectors[:2], "n_results": 200}
        corrected, raw = (
            photos.query(**query, include=list(include))
            for photos in (collection, plain)
        )
        assert corrected.keys() == raw.keys()
        assert (corrected["data"], corrected["included"]) == (
            raw["data"],
            raw["included"],
        )


def test_no_row_of_a_folder_keeps_a_query_that_two_corrections_have_left(
    folder, tmp_path, rng
):
    client, plain, _ = folder
    store, bank = open_store(client, plain), clustered(rng, 120)
    hubplugin.apply(store, bank[:50], "is", force=True)
    parts = [
        base64.b64encode(bytes(shift) + bank[3].tobytes())[
            4 * (shift > 0) : -4
        ].decode()
        for shift in range(3)
    ]

    def count_rows():
        query, count = "SELECT count(*) FROM {} WHERE instr(coalesce({}, ''), ?)", 0
        with sqlite3.connect(tmp_path / "chroma.sqlite3") as database:
            for column in (
                ("embeddings_queue", "metadata"),
                ("embedding_metadata", "string_value"),
            ):
                count += sum(
                    database.execute(query.format(*column), [part]).fetchone()[0]
                    for part in parts
                )
        return count

    assert count_rows()
    for start in (40, 60):
        hubplugin.refit(store, bank[start : start + 60], force=True)
    assert not count_rows()


def test_a_second_after_a_removal_it_is_the_collection(photos, monkeypatch):
    collection, store, vectors = photos
    corrected = collection.query(vectors[:20], n_results=5)["ids"]
    store.remove()
    later = time.monotonic() + 1.1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    plain = plain_of(collection)
    raw = plain.query(vectors[:20], n_results=5)
    assert collection.query(vectors[:20], n_results=5) == raw
    assert raw["ids"] != corrected
    assert isinstance(collection, chromadb.Collection)
    collection.add(ids=["new"], embeddings=vectors[:1])
    assert [each.name for each in collection._client.list_collections()] == ["photos"]


def test_the_collection_itself_is_never_written_to(folder):
    client, plain, vectors = folder
    everything = ["documents", "embeddings", "metadatas"]
    before = plain.get(include=everything)
    correct(client, plain, vectors)
    after = plain.get(include=everything)
    np.testing.assert_array_equal(after.pop("embeddings"), before.pop("embeddings"))
    assert after == before
    open_store(client, plain).remove()
    assert [each.name for each in client.list_collections()] == ["photos"]


def test_a_collection_of_the_same_name_does_not_inherit_the_correction(tmp_path, rng):
    client, vectors = chromadb.PersistentClient(tmp_path), clustered(rng)
    for _ in range(2):
        plain = create(client, vectors)
        assert open_store(client, plain).correction() is None
        assert correct(client, plain, vectors).correction().active
        client.delete_collection("photos")


@pytest.mark.parametrize(
    ("url", "line"),
    [
        (
            "chroma:{folder}/sub/photos",
            "no folder of Chroma; expected chroma:FOLDER/COLLECTION",
        ),
        ("chroma://localhost:1/photos", "Could not connect to a Chroma server"),
        (
            "chroma://localhost:1/photos?tenants=a",
            r"with no more than \?record=FOLDER and, of a server, tenant=T&database=D",
        ),
        (
            "chroma://me:geheim@localhost:1/photos",
            "a client with a password or other settings goes to",
        ),
    ],
)
def test_a_store_that_is_not_there_is_named_in_one_line(url, line, tmp_path):
    chromadb.PersistentClient(tmp_path)
    with pytest.raises(hubplugin.StoreError, match=line) as raised:
        hubplugin.open_store(url.format(folder=tmp_path))
    assert "\n" not in str(raised.value)
    assert "geheim" not in str(raised.value)
