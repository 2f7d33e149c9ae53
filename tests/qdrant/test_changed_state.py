"""A client that knows of a collection what is no longer so: its searches are answered and its writes end as they would
if it knew, and nothing of the state before stays behind."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin
import hubplugin_qdrant
from hubplugin_qdrant import metadata, writes
from tests.qdrant.conftest import Photos, apply_to, clustered, ids

NEW = clustered(9, 40)


@pytest.fixture(autouse=True)
def seldom(monkeypatch):
    """No client looks again by itself."""
    monkeypatch.setattr(metadata, "MANIFEST_SECONDS", 1e6)


def is_number(key: int) -> models.Filter:
    return models.Filter(
        must=[models.FieldCondition(key="n", match=models.MatchValue(value=key))]
    )


def in_batch(photos, key):
    vectors = photos.struct(NEW[key])
    columns = (
        {name: [vector] for name, vector in vectors.items()}
        if photos.using
        else [vectors]
    )
    return models.Batch(ids=[key], vectors=columns, payloads=[{"k": 1}])


def several(photos, key):
    moved = models.PointVectors(id=key, vector=photos.struct(NEW[key]))
    return [
        models.UpdateVectorsOperation(
            update_vectors=models.UpdateVectors(points=[moved])
        ),
        models.ClearPayloadOperation(clear_payload=models.PointIdsList(points=[key])),
    ]


WRITES: dict[str, Callable[[Any, Photos, int, str], Any]] = {
    "upsert": lambda c, p, key, name: c.upsert(name, [p.point(key, NEW[key])]),
    "upsert without waiting": lambda c, p, key, name: c.upsert(
        name, [p.point(key, NEW[key])], wait=False
    ),
    "upsert a batch": lambda c, p, key, name: c.upsert(name, in_batch(p, key)),
    "update vectors": lambda c, p, key, name: c.update_vectors(
        name, [models.PointVectors(id=key, vector=p.struct(NEW[key]))]
    ),
    "several operations": lambda c, p, key, name: c.batch_update_points(
        name, several(p, key)
    ),
    "upload points": lambda c, p, key, name: c.upload_points(
        name, [p.point(key, NEW[key])]
    ),
    "upload a collection": lambda c, p, key, name: c.upload_collection(
        name,
        {p.using: NEW[key : key + 1]} if p.using else NEW[key : key + 1],
        payload=[{"k": 1}],
        ids=[key],
    ),
    "overwrite": lambda c, p, key, name: c.overwrite_payload(
        name, {"k": 1}, points=[key]
    ),
    "clear by a filter": lambda c, p, key, name: c.clear_payload(
        name, points_selector=is_number(key)
    ),
    "delete vectors": lambda c, p, key, name: c.delete_vectors(
        name, [p.using], points=[key]
    ),
    "set": lambda c, p, key, name: c.set_payload(name, {"k": 1}, points=[key]),
}


def clients_that_know(photos, name="photos"):
    """A client for each write, which has read the state of now, and the model."""
    clients = {}
    for number, write in enumerate(WRITES):
        clients[write] = photos.wrapped()
        clients[write].upsert(
            name, [photos.point(100 + number, photos.gallery[100 + number])]
        )
    return clients


def write_all(photos, clients, name="photos"):
    for number, (write, client) in enumerate(clients.items()):
        WRITES[write](client, photos, number, name)


def of_ours(plain, name="photos") -> dict[Any, list[str]]:
    """What points hold of ours."""
    found = {}
    for point in plain.scroll(name, limit=1000, with_vectors=True)[0]:
        held = (point.payload or {}) | (
            point.vector if isinstance(point.vector, dict) else {}
        )
        ours = [
            each for each, value in held.items() if each.startswith("hub_") and value
        ]
        found |= {point.id: ours} if ours else {}
    return found


def wrong(plain, photos, name="photos"):
    store = hubplugin_qdrant.open_store(
        plain, name, vector=photos.using, storage=photos.storage
    )
    found = hubplugin.inspect(store, queries=0)
    return found.missing, found.stale, found.foreign


def check(photos, key, vector):
    """Point `key` holds the offset of `vector`, to float32."""
    expected = float(photos.model.offsets(vector[None])[0])
    (held,) = photos.stored(key).values()
    if photos.storage == "vector":
        held = held[-1]
        if photos.distance is models.Distance.EUCLID:
            held = photos.version.ceiling - held**2 / 2
    assert held == pytest.approx(expected, abs=1e-5)


def test_what_is_written_has_the_offset_of_the_vector_that_is_there(photos):
    photos.corrected()
    write_all(photos, clients_that_know(photos))
    for point in photos.plain.scroll("photos", limit=20, with_vectors=True)[0]:
        vector = point.vector
        if photos.using:
            vector = vector.get(photos.using)
        if vector:
            check(photos, point.id, np.array(vector, np.float32))


def test_a_conditional_update_of_vectors_brings_offsets_under_the_same_condition(
    photos,
):
    client = photos.corrected()
    updates = [
        models.PointVectors(id=key, vector=photos.struct(NEW[key])) for key in (3, 4)
    ]
    client.update_vectors("photos", updates, update_filter=is_number(3))
    check(photos, 3, NEW[3])
    check(photos, 4, photos.gallery[4])


def test_what_is_written_after_a_removal_leaves_nothing_of_ours(photos):
    photos.corrected()
    clients = clients_that_know(photos)
    hubplugin.remove(photos.store())
    write_all(photos, clients)
    assert of_ours(photos.plain) == {}


def test_what_is_written_after_two_other_fits_has_its_offsets(photos):
    photos.corrected()
    clients = clients_that_know(photos)
    for method in ("nnn", "csls"):
        photos.apply(method=method)
    write_all(photos, clients)
    assert wrong(photos.plain, photos) == (0, 0, 0)
    hubplugin.remove(photos.store())
    assert of_ours(photos.plain) == {}


@pytest.mark.parametrize("to", ["another storage", "the same storage", "no correction"])
def test_what_is_written_by_a_moved_alias_has_the_offsets_of_where_it_leads(photos, to):
    plain, clients = photos.plain, None
    other = Photos(
        QdrantClient(":memory:"), photos.using, photos.distance, photos.storage
    )
    plain._client.collections["prints"] = other.plain._client.collections["photos"]
    storage = photos.storage
    if to == "another storage":
        storage = "vector" if storage == "payload" and photos.using else "payload"
    if to != "no correction":
        for method in ("csls", "nnn"):
            given = {
                "vector": photos.using,
                "method": method,
                "force": True,
                "storage": storage,
            }
            apply_to(plain, "prints", -photos.bank, **given)
    photos.corrected()
    moved = models.CreateAlias(collection_name="photos", alias_name="all")
    plain.update_collection_aliases([models.CreateAliasOperation(create_alias=moved)])
    clients = clients_that_know(photos, "all")
    moved = models.CreateAlias(collection_name="prints", alias_name="all")
    plain.update_collection_aliases([models.CreateAliasOperation(create_alias=moved)])
    write_all(photos, clients, "all")
    assert wrong(plain, photos) == (0, 0, 0)
    if to == "no correction":
        assert of_ours(plain, "prints") == {}
    else:
        assert wrong(plain, photos, "prints") == (0, 0, 0)
        hubplugin.remove(
            hubplugin_qdrant.open_store(
                plain, "prints", vector=photos.using, storage=storage
            )
        )
        assert of_ours(plain, "prints") == {}


@pytest.mark.parametrize("corrected", [True, False])
def test_what_is_written_to_a_collection_that_was_made_anew_is_right_there(
    photos, corrected
):
    clients = photos.corrected() and clients_that_know(photos)
    photos.wrapped().delete_collection("photos")
    photos.__post_init__()
    if corrected:
        photos.apply(method="nnn")
    write_all(photos, clients)
    assert (
        wrong(photos.plain, photos) == (0, 0, 0)
        if corrected
        else of_ours(photos.plain) == {}
    )


@pytest.mark.parametrize("storage", ["payload", "vector"])
@pytest.mark.parametrize("change", ["remove", "apply"])
def test_an_upload_during_which_the_state_changes_ends_in_the_new_one(
    storage, change, monkeypatch
):
    monkeypatch.setattr(writes, "PART", 4)
    photos = Photos(QdrantClient(":memory:"), "image", models.Distance.COSINE, storage)
    client = photos.corrected()

    def rows():
        for row, vector in enumerate(NEW):
            if row == 6:
                hubplugin.remove(photos.store())
                if change == "apply":
                    photos.apply(method="nnn")
            yield photos.point(500 + row, vector)

    client.upload_points("photos", rows(), batch_size=2)
    assert photos.plain.count("photos").count == len(photos.gallery) + len(NEW)
    if change == "apply":
        assert wrong(photos.plain, photos) == (0, 0, 0)
    else:
        assert of_ours(photos.plain) == {}


@pytest.fixture
def in_vector():
    return Photos(QdrantClient(":memory:"), "image", models.Distance.COSINE, "vector")


def test_a_search_is_answered_though_the_state_changes_again_and_again(
    in_vector, monkeypatch
):
    """And though another thread has seen a change first."""
    client = in_vector.corrected()
    plain, query = client.raw.query_points, in_vector.queries[0]
    client.query_points("photos", query, "image")
    methods = ["nnn", "csls", "is", "nnn"]
    answers = []

    def meanwhile(**given):
        if methods:
            in_vector.apply(method=methods.pop())
            in_vector.apply(method=methods.pop())
            answers.append(client.query_points("photos", query, "image"))
        return plain(**given)

    monkeypatch.setattr(client.raw, "query_points", meanwhile)
    answers.append(client.query_points("photos", query, "image"))
    assert [ids(each) for each in answers] == [in_vector.best(query)] * 3


@pytest.mark.parametrize("storage", ["payload", "vector"])
def test_offsets_of_an_unknown_version_are_counted_refreshed_and_removed(storage):
    """As a client leaves them that is killed between a write and the look at the manifest."""
    photos = Photos(QdrantClient(":memory:"), "image", models.Distance.COSINE, storage)
    photos.corrected()
    for mend in (hubplugin.refresh, hubplugin.remove):
        photos.plain.set_payload(
            "photos", {"v7": 0.25}, points=[3, 4], key="hub_offset"
        )
        assert wrong(photos.plain, photos) == (0, 0, 2)
        mend(photos.store())
        if mend is hubplugin.refresh:
            assert wrong(photos.plain, photos) == (0, 0, 0)
    assert of_ours(photos.plain) == {}
    photos.plain.set_payload("photos", {"v7": 0.25}, points=[3, 4], key="hub_offset")
    hubplugin.remove(photos.store())  # once more, after the manifest is gone
    assert of_ours(photos.plain) == {}


NOT_NEW = models.Filter(must_not=[models.HasIdCondition(has_id=[500])])


def test_a_second_vector_that_is_about_to_be_added_is_not_taken_for_lost(
    in_vector, monkeypatch, recwarn
):
    """A job names a version in the manifest before it adds its vector."""
    in_vector.corrected()
    create, query, seen = in_vector.plain.create_vector_name, in_vector.queries[0], []

    def meanwhile(*given, **named):
        client = in_vector.wrapped()
        client.upsert("photos", [in_vector.point(500, NEW[0])])
        seen.append(in_vector.stored(500).keys())
        found = client.query_points("photos", query, "image", query_filter=NOT_NEW)
        seen.append(ids(found) == in_vector.best(query))
        return create(*given, **named)

    monkeypatch.setattr(in_vector.plain, "create_vector_name", meanwhile)
    in_vector.apply(method="nnn")
    assert seen == [{"hub_v1"}, True]
    assert in_vector.wrong() == (0, 0)
    assert not [
        each for each in recwarn if "lost its augmented vector" in str(each.message)
    ]
