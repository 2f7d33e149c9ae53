"""A cluster of three nodes: shards, replicas, nodes that go away, shard keys."""

import threading

import pytest
from qdrant_client import models

import hubplugin
import hubplugin_qdrant.transport
from hubplugin import Compute
from integration_tests.galleries import AGREED, TARGETS
from integration_tests.servers import wait_until

pytestmark = pytest.mark.nodes(3)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(hubplugin_qdrant.transport, "BATCH", 20)


def test_a_node_that_stops_and_comes_back_during_apply_loses_nothing(backend, gallery):
    away = threading.Event()
    back = threading.Thread(target=backend.start_node, args=["node3"])

    def stop_and_start(task, done, total):
        if task == "writing offsets" and not away.is_set():
            away.set()
            backend.stop_node("node3")
        elif task == "closing" and back.ident is None:
            back.start()

    try:
        model = gallery.correct(compute=Compute(progress=stop_and_start))
    finally:
        if back.ident is None:
            back.start()
        back.join()
    gallery.assert_whole(model)


def test_searches_go_on_while_a_node_is_away(backend, gallery):
    model, hub = gallery.correct(), backend.wrapped()
    backend.stop_node("node2")
    try:
        assert gallery.agreement(hub, model) >= AGREED
    finally:
        backend.start_node("node2")


def test_shards_that_move_to_another_node_during_apply_keep_every_offset(backend, fill):
    gallery = fill(shard_number=3, replication_factor=1)
    place, moves = f"collections/{gallery.name}/cluster", []

    def placement():
        return backend.address.request("GET", place).json()["result"]

    def move_once(task, done, total):
        if task == "writing offsets" and not moves:
            state = placement()
            move = {
                "shard_id": state["local_shards"][0]["shard_id"],
                "from_peer_id": state["peer_id"],
                "to_peer_id": state["remote_shards"][0]["peer_id"],
            }
            moves.append(move)
            backend.address.request("POST", place, json={"move_shard": move})

    model = gallery.correct(compute=Compute(progress=move_once))
    wait_until(lambda: not placement()["shard_transfers"])
    (move,) = moves
    peers = {each["shard_id"]: each["peer_id"] for each in placement()["remote_shards"]}
    assert peers[move["shard_id"]] == move["to_peer_id"]
    gallery.assert_whole(model)


def test_custom_shard_keys_are_corrected_each_and_written_by_their_own(backend, fill):
    client, hub = backend.client(), backend.wrapped()
    custom = models.ShardingMethod.CUSTOM
    gallery = fill(rows=0, sharding_method=custom, shard_number=1, replication_factor=2)
    keys = {"left": range(150), "right": range(150, 300)}
    for key, rows in keys.items():
        client.create_shard_key(gallery.name, key)
        points = [gallery.point(row, TARGETS[row]) for row in rows]
        client.upsert(gallery.name, points, shard_key_selector=key, wait=True)
    gallery.ids, gallery.vectors = [*range(300)], TARGETS
    model = gallery.correct()
    assert gallery.agreement(hub, model) >= AGREED
    for key, rows in keys.items():
        changed = [gallery.point(row, TARGETS[row], {"row": 1}) for row in rows[:5]]
        hub.upsert(gallery.name, changed, shard_key_selector=key)
        hub.overwrite_payload(
            gallery.name, {"row": 2}, points=[*rows[5:9]], shard_key_selector=key
        )
    assert gallery.health() == (300, 0, 0)
    gallery.ids, gallery.vectors = [*keys["left"]], TARGETS[:150]
    assert gallery.agreement(hub, model, shard_key_selector="left") >= AGREED
    hubplugin.remove(gallery.store())
    gallery.ids, gallery.vectors = [*range(300)], TARGETS
    assert gallery.agreement(hub, None) == 1
