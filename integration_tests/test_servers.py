"""What servers do otherwise than local mode, or than one another: each was read in their source before it was run."""

import threading

import pytest
from qdrant_client import models

import hubplugin
import hubplugin_qdrant.transport
from hubplugin import StoreError
from integration_tests.galleries import (
    AGREED,
    OTHER_BANK,
    QUERIES,
    TARGETS,
)
from integration_tests.waiting import wait_until

pytestmark = pytest.mark.needs("server")


@pytest.mark.parametrize("payload", [None, {}], ids=["none", "empty"])
def test_an_upsert_without_a_payload_leaves_what_a_plain_one_leaves(
    backend, gallery, payload
):
    """A server 1.14 keeps the payload of a point that was there, by gRPC also if an empty one is given; from 1.15 on it
    is cleared."""
    gallery.correct()
    hub, keys = backend.wrapped(), gallery.ids[:3]
    points = [gallery.point(key, TARGETS[0], payload) for key in keys]
    backend.client().upsert(gallery.name, points[:1], wait=True)
    hub.upsert(gallery.name, points[1:2], wait=True)
    hub.batch_update_points(
        gallery.name,
        [models.UpsertOperation(upsert=models.PointsList(points=points[2:]))],
    )
    left = [set(gallery.content()[key][1] or {}) - {"hub_offset"} for key in keys]
    assert left[0] == left[1] == left[2]
    hubplugin.refresh(gallery.store())
    assert gallery.health()[1:] == (0, 0)


def test_a_payload_that_is_overwritten_right_after_its_vector_keeps_the_new_offset(
    backend, gallery
):
    gallery.correct()
    key = gallery.ids[0]
    vectors = models.UpdateVectors(
        points=[models.PointVectors(id=key, vector=TARGETS[7].tolist())]
    )
    payload = models.SetPayload(payload={"row": "new"}, points=[key])
    operations = [
        models.UpdateVectorsOperation(update_vectors=vectors),
        models.OverwritePayloadOperation(overwrite_payload=payload),
    ]
    backend.wrapped().batch_update_points(gallery.name, operations, wait=False)
    wait_until(lambda: gallery.content()[key][1].get("row") == "new")
    wait_until(lambda: gallery.health()[1:] == (0, 0))


def assert_no_offset_is_left(gallery):
    assert not any("hub_offset" in payload for _, payload in gallery.content().values())


def test_points_deleted_while_offsets_are_taken_out_do_no_harm(
    backend, gallery, monkeypatch
):
    monkeypatch.setattr(hubplugin_qdrant.transport, "BATCH", 25)
    gallery.correct()

    def delete():
        for key in gallery.ids[::-3]:
            backend.client().delete(gallery.name, [key], wait=True)

    beside = threading.Thread(target=delete)
    beside.start()
    try:
        hubplugin.remove(gallery.store())
    finally:
        beside.join()
    assert_no_offset_is_left(gallery)


def strict(**limits):
    """Those of `limits` that the client knows."""
    limits = {
        name: value
        for name, value in limits.items()
        if name in models.StrictModeConfig.model_fields
    }
    return models.StrictModeConfig(enabled=True, **limits)


LIMITS = {
    "few results": {"max_query_limit": 15},
    "a narrow graph": {"search_max_hnsw_ef": 64},
    "small filters": {"condition_max_size": 5, "filter_max_conditions": 1},
    "one at a time": {"search_max_batchsize": 1, "upsert_max_batchsize": 20},
    "no room": {"max_points_count": len(TARGETS), "search_max_oversampling": 1.0},
    "several": {
        "max_query_limit": 100,
        "unindexed_filtering_retrieve": False,
        "unindexed_filtering_update": False,
        "search_allow_exact": False,
        "max_payload_index_count": 2,
    },
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_each_limit_of_strict_mode_is_kept(backend, fill, storage, limits):
    gallery, client = fill(using="code", graph=True), backend.client()
    # Groups are by a key with an index only: beside it there is room for one more.
    client.create_payload_index(
        gallery.name, "row", models.PayloadSchemaType.INTEGER, wait=True
    )
    client.update_collection(gallery.name, strict_mode_config=strict(**limits))
    model, hub = gallery.correct(storage), backend.wrapped()
    candidates = limits.get("max_query_limit", len(TARGETS))
    if storage == "vector" or candidates >= 100:  # few of the best are among 15
        agreed = 0.9 if storage == "payload" and candidates == 100 else AGREED
        assert gallery.agreement(hub, model) >= agreed
    hub.query_points_groups(
        gallery.name, "row", QUERIES[0], "code", limit=3, group_size=2
    )
    hub.upsert(
        gallery.name, [gallery.point(gallery.ids[0], TARGETS[1], {"row": 0})], wait=True
    )
    hub.overwrite_payload(gallery.name, {"row": 0}, points=gallery.ids[:5], wait=True)
    hubplugin.refresh(gallery.store())
    assert gallery.health()[1:] == (0, 0)
    if (
        "max_payload_index_count" not in limits
    ):  # a refit has one index more, until it is active
        gallery.correct(bank=OTHER_BANK)
    hubplugin.remove(gallery.store())
    client.update_collection(
        gallery.name, strict_mode_config=models.StrictModeConfig(enabled=False)
    )
    assert_no_offset_is_left(gallery)


@pytest.mark.parametrize("limit", [0, 1])
def test_a_strict_server_without_room_for_an_index_is_told_before_anything_is_written(
    backend, fill, limit
):
    gallery, client = fill(), backend.client()
    client.create_payload_index(
        gallery.name, "row", models.PayloadSchemaType.INTEGER, wait=True
    )
    client.update_collection(
        gallery.name, strict_mode_config=strict(max_payload_index_count=limit)
    )
    before = gallery.content()
    for dry_run in (True, False):
        with pytest.raises(
            StoreError,
            match=rf"strict mode allows {limit} .* there are 1: 'row'; delete one",
        ):
            gallery.correct("payload", dry_run=dry_run)
    assert gallery.content() == before
    assert not client.collection_exists(f"{gallery.name}--hub")


def test_rates_that_are_limited_are_waited_for(backend, fill):
    # A minute's worth of either is less than what making the gallery and correcting it takes.
    gallery = fill(
        rows=60, strict_mode_config=strict(read_rate_limit=150, write_rate_limit=90)
    )
    model = gallery.correct()
    backend.client().update_collection(
        gallery.name, strict_mode_config=models.StrictModeConfig(enabled=False)
    )
    assert gallery.health()[1:] == (0, 0)
    assert gallery.agreement(backend.wrapped(), model) >= AGREED
