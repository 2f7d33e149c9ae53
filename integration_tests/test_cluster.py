"""A cluster of three nodes: shards, replicas, nodes that go away, shard keys."""

import threading

import httpx
import numpy as np
import pytest
from qdrant_client import models

import hubplugin
import hubplugin_qdrant.transport
from hubplugin import Compute
from integration_tests.galleries import AGREED, QUERIES, TARGETS, K
from integration_tests.waiting import wait_until

pytestmark = pytest.mark.needs("cluster")


def test_a_node_that_stops_and_comes_back_during_apply_loses_nothing(
    backend, gallery, monkeypatch
):
    monkeypatch.setattr(hubplugin_qdrant.transport, "BATCH", 20)

    away, back = (
        threading.Event(),
        threading.Thread(target=backend.start, args=["node3"]),
    )

    def stop_and_start(task, done, total):
        if task == "writing offsets" and not away.is_set():
            away.set()
            backend.stop("node3")
        elif task == "closing" and back.ident is None:
            back.start()

    try:
        model = gallery.correct(compute=Compute(progress=stop_and_start))
    finally:
        if back.ident is None:
            back.start()
        back.join()
    require_whole(gallery, model)


def test_searches_go_on_while_a_node_is_away(backend, gallery):
    model, hub = gallery.correct(), backend.wrapped()
    backend.stop("node2")
    try:
        assert gallery.agreement(hub, model) >= AGREED
    finally:
        backend.start("node2")


class Placement:
    """Where the shards of a collection lie, and what changes it."""

    def __init__(self, backend, collection: str):
        address = backend.address
        node = f"http://{address.host}:{address.http}"
        self._url = f"{node}/collections/{collection}/cluster"

    def change(self, **operation) -> None:
        httpx.post(self._url, json=operation, timeout=60).raise_for_status()

    def read(self) -> dict:
        answer = httpx.get(self._url, timeout=60).raise_for_status()
        return answer.json()["result"]

    def node_of(self, shard: int) -> int:
        """Where a shard lies, of which there is one replica."""
        state = self.read()
        for remote in state["remote_shards"]:
            if remote["shard_id"] == shard:
                return remote["peer_id"]
        return state["peer_id"]

    def is_at_rest(self) -> bool:
        return not self.read()["shard_transfers"]


def require_whole(gallery, model) -> None:
    assert gallery.health() == (len(gallery.ids), 0, 0)
    assert gallery.agreement(gallery.store().search(QUERIES, K).ids, model) >= AGREED


def test_shards_that_move_to_another_node_during_apply_keep_every_offset(
    backend, fill, monkeypatch
):
    gallery = fill(shard_number=3, replication_factor=1)
    monkeypatch.setattr(hubplugin_qdrant.transport, "BATCH", 20)
    placement, moves = Placement(backend, gallery.name), []

    def move_once(task, done, total):
        if task == "writing offsets" and not moves:
            state = placement.read()
            move = {
                "shard_id": state["local_shards"][0]["shard_id"],
                "from_peer_id": state["peer_id"],
                "to_peer_id": state["remote_shards"][0]["peer_id"],
            }
            moves.append(move)
            placement.change(move_shard=move)

    model = gallery.correct(compute=Compute(progress=move_once))
    wait_until(placement.is_at_rest)
    (move,) = moves
    assert placement.node_of(move["shard_id"]) == move["to_peer_id"]
    require_whole(gallery, model)


def fill_shards(fill, client, vectors, keys, replicas, using=""):
    """A gallery of `vectors` [n, d] under the ids 0, 1, ..., and the ids that lie under each of the shard keys."""
    sharding = {
        "sharding_method": models.ShardingMethod.CUSTOM,
        "shard_number": 1,
        "replication_factor": replicas,
    }
    gallery = fill(rows=0, using=using, **sharding)
    ids = dict(zip(keys, np.split(np.arange(len(vectors)), len(keys)), strict=True))
    for key, rows in ids.items():
        client.create_shard_key(gallery.name, key)
        points = [gallery.point(row, vectors[row]) for row in rows.tolist()]
        client.upsert(gallery.name, points, shard_key_selector=key, wait=True)
    gallery.ids, gallery.vectors = list(range(len(vectors))), vectors
    return gallery, ids


def test_custom_shard_keys_are_corrected_each_and_written_by_their_own(backend, fill):
    gallery, ids = fill_shards(
        fill, backend.client(), TARGETS, ("left", "right"), replicas=2
    )
    model, hub = gallery.correct(), backend.wrapped()
    assert gallery.agreement(hub, model) >= AGREED
    for key, rows in ids.items():
        changed = [
            gallery.point(row, TARGETS[row], {"row": 1}) for row in rows.tolist()
        ]
        hub.upsert(gallery.name, changed[:5], shard_key_selector=key)
        hub.overwrite_payload(
            gallery.name, {"row": 2}, points=rows[5:9].tolist(), shard_key_selector=key
        )
    assert gallery.health() == (len(TARGETS), 0, 0)
    both = gallery.ids, gallery.vectors
    gallery.ids, gallery.vectors = ids["left"].tolist(), TARGETS[ids["left"]]
    assert gallery.agreement(hub, model, shard_key_selector="left") >= AGREED
    gallery.ids, gallery.vectors = both
    hubplugin.remove(gallery.store())
    assert gallery.agreement(hub, None) == 1
