"""What servers do otherwise than local mode, or than one another: each was read in their source before it was run."""

import threading

import pytest
from qdrant_client import QdrantClient, models

import hubplugin
import hubplugin_qdrant
import hubplugin_qdrant.transport
from hubplugin import StoreError
from hubplugin_qdrant import HubQdrantClient
from integration_tests.galleries import AGREED, APPLY, BANK, OTHER_BANK, QUERIES, TARGETS
from integration_tests.waiting import wait_until
from tests.qdrant.conftest import apply_to


@pytest.mark.parametrize("given", [None, {}], ids=["none", "empty"])
def test_an_upsert_without_a_payload_leaves_what_a_plain_one_leaves(backend, gallery, given):
    """A server 1.14 keeps the payload of a point that was there, by gRPC also if an empty one is given; from 1.15 on it
    is cleared."""
    apply_to(backend.client(), gallery.name, BANK, **APPLY)
    hub, keys = backend.wrapped(), gallery.ids[:3]
    for client, key in ((backend.client(), keys[0]), (hub, keys[1])):
        point = models.PointStruct(id=key, vector=TARGETS[0].tolist(), payload=given)
        client.upsert(gallery.name, [point], wait=True)
    point = models.PointStruct(id=keys[2], vector=TARGETS[0].tolist(), payload=given)
    operation = models.UpsertOperation(upsert=models.PointsList(points=[point]))
    hub.batch_update_points(gallery.name, [operation])
    left = [set(gallery.content()[key][1] or {}) - {"hub_offset"} for key in keys]
    assert left[0] == left[1] == left[2]
    hubplugin.refresh(hubplugin_qdrant.open_store(backend.client(), gallery.name))
    assert gallery.health()[1:] == (0, 0)


def test_a_payload_that_is_overwritten_right_after_its_vector_keeps_the_new_offset(backend, gallery):
    apply_to(backend.client(), gallery.name, BANK, **APPLY)
    key = gallery.ids[0]
    vectors = models.UpdateVectors(points=[models.PointVectors(id=key, vector=TARGETS[7].tolist())])
    payload = models.SetPayload(payload={"row": "new"}, points=[key])
    operations = [
        models.UpdateVectorsOperation(update_vectors=vectors),
        models.OverwritePayloadOperation(overwrite_payload=payload),
    ]
    backend.wrapped().batch_update_points(gallery.name, operations, wait=False)
    wait_until(lambda: gallery.content()[key][1].get("row") == "new")
    wait_until(lambda: gallery.health()[1:] == (0, 0))


@pytest.mark.needs("threads")
def test_points_deleted_while_offsets_are_taken_out_do_no_harm(backend, gallery, monkeypatch):
    monkeypatch.setattr(hubplugin_qdrant.transport, "BATCH", 25)
    apply_to(backend.client(), gallery.name, BANK, **APPLY)

    def delete():
        for key in gallery.ids[::-3]:
            backend.client().delete(gallery.name, [key], wait=True)

    beside = threading.Thread(target=delete)
    beside.start()
    try:
        hubplugin.remove(hubplugin_qdrant.open_store(backend.client(), gallery.name))
    finally:
        beside.join()
    assert not any("hub_offset" in beside for _, beside in gallery.content().values())


STRICT = {
    "enabled": True,
    "max_query_limit": 100,
    "unindexed_filtering_retrieve": False,
    "search_allow_exact": False,
    "upsert_max_batchsize": 50,
    "search_max_batchsize": 4,
    "max_payload_index_count": 2,
}


@pytest.mark.needs("server")
def test_a_strict_server_is_searched_written_and_left_within_its_limits(backend, fill):
    known = {name: value for name, value in STRICT.items() if name in models.StrictModeConfig.model_fields}
    gallery = fill(strict_mode_config=models.StrictModeConfig(**known))
    # Groups are by a key with an index only: beside it there is room for one more.
    backend.client().create_payload_index(gallery.name, "row", models.PayloadSchemaType.INTEGER, wait=True)
    model = apply_to(backend.client(), gallery.name, BANK, **APPLY).model
    hub = backend.wrapped()
    assert gallery.agreement(gallery.found(hub), model) >= 0.9  # among 100 candidates, which is all that it allows
    hub.query_points_groups(gallery.name, group_by="row", query=QUERIES[0], limit=3, group_size=2)
    hub.overwrite_payload(gallery.name, {"row": 0}, points=gallery.ids[:5])
    hubplugin.refresh(hubplugin_qdrant.open_store(backend.client(), gallery.name))
    assert gallery.health()[1:] == (0, 0)
    hubplugin.remove(hubplugin_qdrant.open_store(backend.client(), gallery.name))
    assert not any("hub_offset" in beside for _, beside in gallery.content().values())


LIMITS = {
    "few results": {"max_query_limit": 15},
    "a narrow graph": {"search_max_hnsw_ef": 64},
    "small filters": {"condition_max_size": 5, "filter_max_conditions": 1},
    "no unindexed updates": {"unindexed_filtering_update": False, "unindexed_filtering_retrieve": False},
    "one at a time": {"search_max_batchsize": 1, "upsert_max_batchsize": 20},
    "no room": {"max_points_count": len(TARGETS), "search_max_oversampling": 1.0},
}


@pytest.mark.needs("server")
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_each_limit_of_strict_mode_is_kept(backend, fill, storage, limits):
    gallery, client = fill(using="code", graph=True), backend.client()
    known = {name: each for name, each in limits.items() if name in models.StrictModeConfig.model_fields}
    client.update_collection(gallery.name, strict_mode_config=models.StrictModeConfig(enabled=True, **known))
    model = hubplugin.apply(gallery.store(storage), BANK, **APPLY).model
    hub = backend.wrapped()
    if "max_query_limit" not in limits or storage == "vector":  # else few of the best are among 15 candidates
        assert gallery.agreement(gallery.found(hub), model) >= AGREED
    point = models.PointStruct(id=gallery.ids[0], vector={"code": TARGETS[1].tolist()}, payload={"row": 0})
    hub.upsert(gallery.name, [point], wait=True)
    hub.overwrite_payload(gallery.name, {"row": 0}, points=gallery.ids[:5], wait=True)
    hubplugin.refresh(gallery.store())
    assert gallery.health()[1:] == (0, 0)
    hubplugin.apply(gallery.store(), OTHER_BANK, **APPLY)
    hubplugin.remove(gallery.store())
    client.update_collection(gallery.name, strict_mode_config=models.StrictModeConfig(enabled=False))
    assert not any("hub_offset" in beside for _, beside in gallery.content().values())


@pytest.mark.needs("server")
@pytest.mark.parametrize("limit", [0, 1])
def test_a_strict_server_without_room_for_an_index_is_told_before_anything_is_written(backend, fill, limit):
    gallery, client = fill(), backend.client()
    client.create_payload_index(gallery.name, "row", models.PayloadSchemaType.INTEGER, wait=True)
    client.update_collection(
        gallery.name, strict_mode_config=models.StrictModeConfig(enabled=True, max_payload_index_count=limit)
    )
    before = gallery.content()
    for job in (
        lambda: hubplugin.apply(gallery.store("payload"), BANK, dry_run=True, **APPLY),
        lambda: hubplugin.apply(gallery.store("payload"), BANK, **APPLY),
    ):
        with pytest.raises(StoreError, match=rf"strict mode allows {limit} .* there are 1: 'row'; delete one"):
            job()
    assert gallery.content() == before
    assert not client.collection_exists(f"{gallery.name}--hub")


@pytest.mark.needs("server")
@pytest.mark.parametrize("kind", ["integer", "keyword", "datetime"])
def test_a_payload_index_that_hides_offsets_is_named_and_mended_by_a_refresh(backend, gallery, kind):
    client = backend.client()
    model = apply_to(client, gallery.name, BANK, **APPLY).model
    client.delete_payload_index(gallery.name, "hub_offset.v1", wait=True)
    client.create_payload_index(gallery.name, "hub_offset.v1", kind, wait=True)
    assert any(f"is of the type {kind!r}" in each for each in hubplugin.inspect(gallery.store()).attention)
    hubplugin.refresh(gallery.store())
    assert hubplugin.inspect(gallery.store()).attention == []
    assert gallery.agreement(gallery.found(backend.wrapped()), model) >= AGREED


@pytest.mark.needs("server")
def test_rates_that_are_limited_are_waited_for(backend, fill):
    client = backend.client()
    # A minute's worth of either is less than what making the gallery and correcting it takes.
    limits = models.StrictModeConfig(enabled=True, read_rate_limit=150, write_rate_limit=90)
    gallery = fill(rows=60, strict_mode_config=limits)
    model = apply_to(client, gallery.name, BANK, **APPLY).model
    client.update_collection(gallery.name, strict_mode_config=models.StrictModeConfig(enabled=False))
    assert gallery.health()[1:] == (0, 0)
    assert gallery.agreement(gallery.found(backend.wrapped()), model) >= AGREED


@pytest.mark.needs("server")
def test_a_client_with_the_default_patience_is_enough(backend, gallery):
    options = {name: value for name, value in backend.address.options().items() if name != "timeout"}
    model = apply_to(QdrantClient(**options), gallery.name, BANK, **APPLY).model
    assert gallery.agreement(gallery.found(HubQdrantClient(**options)), model) >= AGREED
    hubplugin.remove(hubplugin_qdrant.open_store(QdrantClient(**options), gallery.name))
