"""A client that knows of a collection what is no longer so: its searches are answered and its writes end as they would
if it knew, and nothing of the state before stays behind."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin
import hubplugin_qdrant
from hubplugin_qdrant import metadata
from tests.qdrant.conftest import DIM, Photos, clustered

NEW = clustered(9, 40)


@pytest.fixture(autouse=True)
def seldom(monkeypatch):
    """No client looks again by itself."""
    monkeypatch.setattr(metadata, "MANIFEST_SECONDS", 1e6)


def struct(photos, row):
    return {photos.using: NEW[row].tolist()} if photos.using else NEW[row].tolist()


def is_number(key: int) -> models.Filter:
    return models.Filter(must=[models.FieldCondition(key="n", match=models.MatchValue(value=key))])


def in_batch(photos, key):
    vectors = struct(photos, key)
    columns = {name: [vector] for name, vector in vectors.items()} if photos.using else [vectors]
    return models.Batch(ids=[key], vectors=columns, payloads=[{"k": 1}])


def several(photos, key):
    moved = models.PointVectors(id=key, vector=struct(photos, key))
    return [
        models.UpdateVectorsOperation(update_vectors=models.UpdateVectors(points=[moved])),
        models.ClearPayloadOperation(clear_payload=models.PointIdsList(points=[key])),
    ]


WRITES: dict[str, Callable[[Any, Photos, int, str], Any]] = {
    "upsert": lambda c, p, key, name: c.upsert(name, [p.point(key, NEW[key])]),
    "upsert without waiting": lambda c, p, key, name: c.upsert(name, [p.point(key, NEW[key])], wait=False),
    "upsert without payload": lambda c, p, key, name: c.upsert(
        name, [models.PointStruct(id=key, vector=struct(p, key))]
    ),
    "upsert a batch": lambda c, p, key, name: c.upsert(name, in_batch(p, key)),
    "upsert of a length of 0": lambda c, p, key, name: c.upsert(name, [p.point(key, np.zeros(DIM))]),
    "update vectors": lambda c, p, key, name: c.update_vectors(
        name, [models.PointVectors(id=key, vector=struct(p, key))]
    ),
    "several operations": lambda c, p, key, name: c.batch_update_points(name, several(p, key)),
    "upload points": lambda c, p, key, name: c.upload_points(name, [p.point(key, NEW[key])]),
    "upload a collection": lambda c, p, key, name: c.upload_collection(
        name, {p.using: NEW[key : key + 1]} if p.using else NEW[key : key + 1], payload=[{"k": 1}], ids=[key]
    ),
    "upload without ids": lambda c, p, key, name: c.upload_collection(
        name, {p.using: NEW[key : key + 1]} if p.using else NEW[key : key + 1]
    ),
    "overwrite": lambda c, p, key, name: c.overwrite_payload(name, {"k": 1}, points=[key]),
    "overwrite by a filter": lambda c, p, key, name: c.overwrite_payload(name, {"k": 1}, points=is_number(key)),
    "clear": lambda c, p, key, name: c.clear_payload(name, points_selector=[key]),
    "clear by a filter": lambda c, p, key, name: c.clear_payload(name, points_selector=is_number(key)),
    "delete vectors": lambda c, p, key, name: c.delete_vectors(name, [p.using], points=[key]),
    "delete vectors by a filter": lambda c, p, key, name: c.delete_vectors(name, [p.using], points=is_number(key)),
    "set": lambda c, p, key, name: c.set_payload(name, {"k": 1}, points=[key]),
}


def clients_that_know(photos, name="photos"):
    """A client for each write, which has read the state of now, and the model."""
    clients = {}
    for number, write in enumerate(WRITES):
        clients[write] = photos.wrapped()
        clients[write].upsert(name, [photos.point(100 + number, photos.gallery[100 + number])])
    return clients


def write_all(photos, clients, name="photos"):
    for number, (write, client) in enumerate(clients.items()):
        WRITES[write](client, photos, number, name)


def of_ours(plain, name="photos") -> dict[Any, list[str]]:
    """What points hold of ours."""
    found = {}
    for point in plain.scroll(name, limit=1000, with_vectors=True)[0]:
        held = (point.payload or {}) | (point.vector if isinstance(point.vector, dict) else {})
        ours = [each for each, value in held.items() if each.startswith("hub_") and value]
        found |= {point.id: ours} if ours else {}
    return found


def wrong(plain, photos, name="photos"):
    store = hubplugin_qdrant.open_store(plain, name, vector=photos.using, storage=photos.storage)
    found = hubplugin.inspect(store, queries=0)
    return found.missing, found.stale, found.foreign


def without_vector(plain, photos, name="photos") -> dict[Any, list[str]]:
    """What of ours the points hold that have no vector."""
    held = of_ours(plain, name)
    points = plain.scroll(name, limit=1000, with_vectors=True)[0]
    bare = [each.id for each in points if not (each.vector.get("image") if photos.using else each.vector)]
    return {key: held[key] for key in bare if key in held}


def test_what_is_written_after_a_removal_leaves_nothing_of_ours(photos):
    photos.corrected()
    clients = clients_that_know(photos)
    hubplugin.remove(photos.store())
    write_all(photos, clients)
    assert of_ours(photos.plain) == {}


@pytest.mark.parametrize("times", [1, 2])
def test_what_is_written_after_another_fit_has_its_offsets(photos, times):
    photos.corrected()
    clients = clients_that_know(photos)
    for method in ("nnn", "csls")[:times]:
        photos.apply(method=method)
    write_all(photos, clients)
    assert wrong(photos.plain, photos) == (0, 0, 0)
    assert without_vector(photos.plain, photos) == {}
    hubplugin.remove(photos.store())
    assert of_ours(photos.plain) == {}


@pytest.mark.parametrize("to", ["another storage", "the same storage", "no correction"])
@pytest.mark.parametrize("fits", [1, 2])
def test_what_is_written_by_an_alias_that_was_moved_has_the_offsets_of_where_it_went(photos, to, fits):
    plain, clients = photos.plain, None
    other = Photos(QdrantClient(":memory:"), photos.using, photos.distance, photos.storage)
    plain._client.collections["prints"] = other.plain._client.collections["photos"]
    storage = photos.storage
    if to == "another storage":
        storage = "vector" if storage == "payload" and photos.using else "payload"
    if to != "no correction":
        for method in ("csls", "nnn")[:fits]:
            given = {"vector": photos.using, "method": method, "force": True, "storage": storage}
            hubplugin_qdrant.apply(plain, "prints", -photos.bank, **given)
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
        assert without_vector(plain, photos, "prints") == {}
        hubplugin.remove(hubplugin_qdrant.open_store(plain, "prints", vector=photos.using, storage=storage))
        assert of_ours(plain, "prints") == {}


@pytest.mark.parametrize("corrected", [True, False])
def test_what_is_written_to_a_collection_that_was_made_anew_is_right_there(photos, corrected):
    clients = photos.corrected() and clients_that_know(photos)
    photos.wrapped().delete_collection("photos")
    photos.__post_init__()
    if corrected:
        photos.apply(method="nnn")
    write_all(photos, clients)
    assert wrong(photos.plain, photos) == (0, 0, 0) if corrected else of_ours(photos.plain) == {}
