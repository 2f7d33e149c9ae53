"""`HubCollection`: an application searches and writes as before, corrected, and both collections stay the same."""

import base64
import sqlite3
import time

import chromadb
import numpy as np
import pytest

import hubplugin
from hubplugin import StoreError, apply, fit, inspect, refit
from hubplugin_chroma import HubCollection, open_store
from tests.core.formulas import similarity
from tests.galleries import assert_near, clustered
from tests.refusals import refused

pytestmark = pytest.mark.slow

DIM = 16
METRICS = {"cosine": "cosine", "l2": "euclidean"}
"""By Chroma's spaces."""


def create(client, vectors, space="cosine"):
    """The collection `photos`, of `vectors` [n, d] under the ids p0, p1, ..."""
    configuration = {"hnsw": {"space": space}}
    plain = client.create_collection("photos", configuration=configuration)
    ids = names(range(len(vectors)))
    metadatas = [{"even": number % 2 == 0} for number in range(len(vectors))]
    plain.add(ids=ids, embeddings=vectors, metadatas=metadatas, documents=ids)
    return plain


def correct(client, plain, vectors, space="cosine"):
    """The store of the collection, corrected."""
    store = open_store(client, plain)
    model = fit(vectors, vectors[:100] + 0.1, "is", metric=METRICS[space])
    apply(store, model, force=True)
    return store


def plain_of(collection):
    """`collection` as a program has it that knows nothing of hubplugin."""
    return chromadb.Collection(collection._client, collection._model)


def names(numbers):
    return [f"p{number}" for number in numbers]


@pytest.fixture(params=METRICS)
def photos(request, tmp_path, rng):
    """A corrected collection as an application has it, its store, and the vectors."""
    client, vectors = chromadb.PersistentClient(tmp_path), clustered(rng, 200, DIM)
    plain = create(client, vectors, request.param)
    store = correct(client, plain, vectors, request.param)
    return HubCollection(client, client.get_collection("photos")), store, vectors


@pytest.fixture
def folder(tmp_path, rng):
    """A client of a folder, its plain collection, and the vectors."""
    client, vectors = chromadb.PersistentClient(tmp_path), clustered(rng, 200, DIM)
    return client, create(client, vectors), vectors


def rank(store, vectors, query):
    """The numbers of the targets `vectors`, nearest first, and their corrected distances, in float64."""
    (distance,) = -similarity([query], vectors, store.metric.value)
    distance = distance - store.correction().model.offsets(vectors)
    if store.metric.value == "euclidean":
        distance = 2 * distance
    else:
        distance = 1 + distance
    return np.argsort(distance), np.sort(distance)


def test_a_query_answers_corrected_with_all_that_was_asked_for(photos):
    collection, store, vectors = photos
    included = ["documents", "distances", "embeddings", "metadatas"]
    found = collection.query(vectors[:3], n_results=5, include=included)
    for row in range(3):
        order, distances = rank(store, vectors, vectors[row])
        assert found["ids"][row] == names(order[:5])
        assert found["documents"][row] == found["ids"][row]
        assert_near(found["distances"][row], distances[:5])
        assert_near(found["embeddings"][row], vectors[order[:5]], 1e-6)
    assert found["uris"] is None
    bare = collection.query(query_embeddings=vectors[0], n_results=5, include=[])
    assert bare["distances"] is None


def test_what_is_written_while_another_correction_takes_over_has_its_offset(
    photos, rng, monkeypatch
):
    collection, store, vectors = photos
    newer = [fit(vectors, vectors[:90] + 0.1, "nnn", metric=store.metric)]
    model = type(store).model

    def replaced_meanwhile(self, version):
        found = model(self, version)
        while newer:
            apply(store, newer.pop())
        return found

    monkeypatch.setattr(type(store), "model", replaced_meanwhile)
    collection.add(ids=["new"], embeddings=vectors[:1])
    assert newer == []
    assert inspect(store, queries=0).missing == 0
    store.remove()
    assert [each.name for each in collection._client.list_collections()] == ["photos"]


def test_a_filter_is_kept_and_ranks_corrected(photos):
    collection, store, vectors = photos

    def ids(**filters):
        query = [vectors[1].tolist()]
        found = collection.query(query_embeddings=query, n_results=5, **filters)
        return found["ids"][0]

    order, _ = rank(store, vectors[::2], vectors[1])
    assert ids(where={"even": True}) == names(2 * order[:5])
    assert sorted(ids(ids=["p7", "p8"])) == ["p7", "p8"]
    assert ids(where_document={"$contains": "nowhere"}) == []


def test_what_is_written_has_its_offset_at_once(photos, rng):
    collection, store, vectors = photos
    fresh = clustered(rng, 3, DIM)
    collection.add(ids=["a", "b"], embeddings=fresh[:2])
    collection.upsert(["c"], fresh[2:], None, ["text"])
    collection.update(ids="p0", embeddings=fresh[2].tolist())
    collection.delete(where={"even": False})
    report = inspect(store, queries=0)
    assert (report.count, report.missing, report.stale) == (103, 0, 0)
    ids = [*names(range(0, 200, 2)), "a", "b", "c"]
    now = np.concatenate([fresh[2:], vectors[2::2], fresh])
    order, _ = rank(store, now, vectors[5])
    found = collection.query(vectors[5], n_results=8)["ids"][0]
    assert found == [ids[number] for number in order[:8]]


@pytest.mark.parametrize("include", [["uris", "data"], ["data", "documents"]])
def test_whatever_a_plain_query_may_include_a_corrected_one_may(photos, include):
    collection, _, vectors = photos
    corrected, raw = (
        each.query(vectors[:2], n_results=200, include=[*include])
        for each in (collection, plain_of(collection))
    )
    assert corrected.keys() == raw.keys()
    for name in ("data", "included"):
        assert corrected[name] == raw[name]


def test_no_row_of_a_folder_keeps_a_query_that_two_corrections_have_left(
    folder, tmp_path, rng
):
    client, plain, _ = folder
    store, bank = open_store(client, plain), clustered(rng, 120, DIM)
    apply(store, bank[:50], "is", force=True)
    query = bank[3].tobytes()
    parts = [base64.b64encode(query)[:-4]]  # at each place within four letters
    parts += [base64.b64encode(bytes(shift) + query)[4:-4] for shift in (1, 2)]

    def count_rows():
        count = 0
        with sqlite3.connect(tmp_path / "chroma.sqlite3") as database:
            for table, column in (
                ("embeddings_queue", "metadata"),
                ("embedding_metadata", "string_value"),
            ):
                has = f"SELECT count(*) FROM {table} WHERE instr(coalesce({column}, ''), ?)"
                for part in parts:
                    count += database.execute(has, [part.decode()]).fetchone()[0]
        return count

    assert count_rows()
    for start in (40, 60):
        refit(store, bank[start : start + 60], force=True)
    assert not count_rows()


def test_a_second_after_a_removal_it_is_the_collection(photos, monkeypatch):
    collection, store, vectors = photos
    corrected = collection.query(vectors[:20], n_results=5)["ids"]
    store.remove()
    later = time.monotonic() + 1.1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    raw = plain_of(collection).query(vectors[:20], n_results=5)
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
    client, vectors = chromadb.PersistentClient(tmp_path), clustered(rng, 200, DIM)
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
            "is not a folder of Chroma; expected chroma:FOLDER/COLLECTION",
        ),
        ("chroma://localhost:1/photos", "Could not connect to a Chroma server"),
        (
            "chroma://localhost:1/photos?tenants=a",
            r"optionally followed by \?record=FOLDER&tenant=T&database=D",
        ),
        (
            "chroma://me:secret@localhost:1/photos",
            "pass a client with a password or other settings to",
        ),
    ],
)
def test_a_store_that_is_not_there_is_named_in_one_line(url, line, tmp_path):
    chromadb.PersistentClient(tmp_path)
    with refused(StoreError, line):
        hubplugin.open_store(url.format(folder=tmp_path))
