"""A client that knows of a collection what is no longer so: its searches are answered
and its writes end as they would if it knew, and nothing of the state before stays
behind."""

import pytest
from qdrant_client import models

import hubplugin
import hubplugin_qdrant
from hubplugin_qdrant import metadata, writes
from tests.qdrant.conftest import (
    IN_BOTH,
    Photos,
    apply_to,
    clustered,
    lead,
    named,
    where,
)

NEW = clustered(9, 40)


@pytest.fixture(autouse=True)
def seldom(monkeypatch):
    """No client looks again by itself."""
    monkeypatch.setattr(metadata, "MANIFEST_SECONDS", 1e6)


def writes_of(photos, key):
    """Return the writes of a point: each method, and what it is given."""
    vector = NEW[key : key + 1]
    points = [photos.point(key, NEW[key])]
    moved = [models.PointVectors(id=key, vector=photos.struct(NEW[key]))]
    update = models.UpdateVectors(points=moved)
    clear = models.PointIdsList(points=[key])
    payload = {"k": 1}
    columns = models.Batch(ids=[key], vectors=photos.struct(vector), payloads=[payload])
    operations = [
        models.UpdateVectorsOperation(update_vectors=update),
        models.ClearPayloadOperation(clear_payload=clear),
    ]
    upload = {
        "vectors": named(photos.using, vector),
        "payload": [payload],
        "ids": [key],
    }
    return [
        ("upsert", {"points": points}),
        ("upsert", {"points": points, "wait": False}),
        ("upsert", {"points": columns}),
        ("update_vectors", {"points": moved}),
        ("batch_update_points", {"update_operations": operations}),
        ("upload_points", {"points": points}),
        ("upload_collection", upload),
        ("overwrite_payload", {"payload": payload, "points": [key]}),
        ("clear_payload", {"points_selector": where("n", key)}),
        ("delete_vectors", {"vectors": [photos.using or ""], "points": [key]}),
        ("set_payload", {"payload": payload, "points": [key]}),
    ]


def clients_that_know(photos, name="photos"):
    """Return a client for each write, which has read state and model of now."""
    clients = [photos.wrapped() for _ in writes_of(photos, 0)]
    for number, client in enumerate(clients, 100):
        client.upsert(name, [photos.point(number, photos.gallery[number])])
    return clients


def write_all(photos, clients, name="photos"):
    """Write a point with each client, each by a method of its own."""
    for number, client in enumerate(clients):
        method, given = writes_of(photos, number)[number]
        getattr(client, method)(name, **given)


def of_ours(photos, name="photos"):
    """Return what points hold of ours."""
    found = {}
    for point in photos.plain.scroll(name, limit=1000, with_vectors=True)[0]:
        held = dict(point.payload or {})
        if isinstance(point.vector, dict):
            held |= point.vector
        ours = [each for each, value in held.items() if each[:4] == "hub_" and value]
        found |= {point.id: ours} if ours else {}
    return found


def check_offsets(photos, name="photos"):
    """No offset is missing, stale or foreign, and a removal leaves nothing of ours."""
    store = hubplugin_qdrant.open_store(photos.plain, name, photos.using)
    found = hubplugin.inspect(store, queries=0)
    assert (found.missing, found.stale, found.foreign) == (0, 0, 0)
    hubplugin.remove(store)
    assert of_ours(photos, name) == {}


def make_anew(photos):
    photos.wrapped().delete_collection("photos")
    photos.__post_init__()


def nothing(photos):
    pass


def fit_twice(photos):
    for method in ("nnn", "csls"):
        photos.apply(method=method)


def make_anew_corrected(photos):
    make_anew(photos)
    photos.apply(method="nnn")


@pytest.mark.parametrize(
    "change",
    [
        nothing,
        fit_twice,
        make_anew,
        make_anew_corrected,
        lambda photos: hubplugin.remove(photos.store()),
    ],
)
def test_what_is_written_after_a_change_ends_in_the_state_of_now(photos, change):
    photos.corrected()
    clients = clients_that_know(photos)
    change(photos)
    write_all(photos, clients)
    check_offsets(photos)


@pytest.mark.parametrize("to", ["another storage", "the same storage", "no correction"])
def test_what_is_written_by_a_moved_alias_has_the_offsets_of_where_it_leads(photos, to):
    local = photos.plain._client
    other = Photos(photos.using, photos.distance)
    local.collections["prints"] = other.plain._client.collections["photos"]
    storage = photos.storage
    if to == "another storage":
        storage = "vector" if storage == "payload" and photos.using else "payload"
    for method in ("csls", "nnn"):
        if to != "no correction":
            given = {"method": method, "storage": storage, "vector": photos.using}
            apply_to(photos.plain, "prints", -photos.bank, force=True, **given)

    photos.corrected()
    lead(photos.plain, "all", to="photos")
    clients = clients_that_know(photos, "all")
    lead(photos.plain, "all", to="prints")
    write_all(photos, clients, "all")
    check_offsets(photos)
    check_offsets(photos, "prints")


@IN_BOTH
@pytest.mark.parametrize("change", ["remove", "apply"])
def test_an_upload_during_which_the_state_changes_ends_in_the_new_one(
    storage, change, monkeypatch
):
    monkeypatch.setattr(writes, "PART", 4)
    photos = Photos(storage=storage)
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
    check_offsets(photos)


def test_a_search_is_answered_though_the_state_changes_again_and_again(
    in_vector, monkeypatch
):
    """And though another thread has seen a change first."""
    client = in_vector.corrected()
    plain, query = client.raw.query_points, in_vector.queries[0]
    in_vector.search(client, query)
    methods = ["nnn", "csls", "is", "nnn"]
    answers = []

    def meanwhile(**given):
        if methods:
            in_vector.apply(method=methods.pop())
            in_vector.apply(method=methods.pop())
            answers.append(in_vector.found(client, query))
        return plain(**given)

    monkeypatch.setattr(client.raw, "query_points", meanwhile)
    answers.append(in_vector.found(client, query))
    assert answers == [in_vector.best(query)] * 3


@IN_BOTH
def test_offsets_of_an_unknown_version_are_counted_refreshed_and_removed(storage):
    """As a client leaves them that is killed between a write and the look at the
    manifest."""
    photos = Photos(storage=storage)
    photos.corrected()

    def leave():
        payload = {"v7": 0.25}
        photos.plain.set_payload("photos", payload, points=[3, 4], key="hub_offset")

    leave()
    assert hubplugin.inspect(photos.store(), queries=0).foreign == 2
    hubplugin.refresh(photos.store())
    assert hubplugin.inspect(photos.store(), queries=0).foreign == 0
    for _ in range(2):  # once more after the manifest is gone
        leave()
        hubplugin.remove(photos.store())
        assert of_ours(photos) == {}


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
        found = in_vector.found(client, query, query_filter=NOT_NEW)
        seen.append(found == in_vector.best(query))
        return create(*given, **named)

    monkeypatch.setattr(in_vector.plain, "create_vector_name", meanwhile)
    in_vector.apply(method="nnn")
    assert seen == [{"hub_v1"}, True]
    assert in_vector.wrong() == (0, 0)
    assert not any("lost its augmented vector" in str(each.message) for each in recwarn)
