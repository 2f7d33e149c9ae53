"""A cluster of three nodes: shards, replicas, nodes that go away, shard keys."""

from __future__ import annotations

import threading

import httpx
import pytest
from qdrant_client import models

import hubplugin_qdrant
import hubplugin_qdrant.transport
from hubplugin.jobs.correction import apply
from hubplugin.jobs.inspection import inspect
from integration_tests.galleries import AGREED, APPLY, BANK, QUERIES, TARGETS, K
from integration_tests.waiting import wait_until

pytestmark = pytest.mark.needs("cluster")


def test_many_shards_answer_as_one(backend, fill):
    gallery = fill(shard_number=12, replication_factor=2)
    model = hubplugin_qdrant.apply(backend.client(), gallery.name, query_bank=BANK, **APPLY).model
    hub = backend.wrapped()
    found = [hub.query_points(gallery.name, query=query, limit=K).points for query in QUERIES]
    assert all(len(points) == K for points in found)
    assert gallery.agreement([[point.id for point in points] for points in found], model) >= AGREED


def test_a_node_that_stops_and_comes_back_during_apply_loses_nothing(backend, gallery, monkeypatch):
    monkeypatch.setattr(hubplugin_qdrant.transport, "BATCH", 20)

    away, back = threading.Event(), threading.Thread(target=backend.start, args=["node3"])

    def stop_and_start(what, done, total):
        if what == "writing offsets" and not away.is_set():
            away.set()
            backend.stop("node3")
        elif what == "closing" and back.ident is None:
            back.start()

    try:
        model = apply(gallery.store(), BANK, progress=stop_and_start, **APPLY).model
    finally:
        if back.ident is None:
            back.start()
        back.join()
    store = gallery.store()
    report = inspect(store, probes=0)
    assert (report.count, report.missing, report.stale) == (len(gallery.ids), 0, 0)
    assert gallery.agreement(store.search(QUERIES, K).ids, model) >= AGREED


def test_searches_go_on_while_a_node_is_away(backend, gallery):
    model = hubplugin_qdrant.apply(backend.client(), gallery.name, query_bank=BANK, **APPLY).model
    hub = backend.wrapped()
    backend.stop("node2")
    try:
        found = [hub.query_points(gallery.name, query=query, limit=K).points for query in QUERIES]
        assert gallery.agreement([[point.id for point in points] for points in found], model) >= AGREED
    finally:
        backend.start("node2")


def test_shards_that_move_to_another_node_during_apply_keep_every_offset(backend, fill, monkeypatch):
    gallery = fill(shard_number=3, replication_factor=1)
    monkeypatch.setattr(hubplugin_qdrant.transport, "BATCH", 20)
    at = f"http://{backend.address.host}:{backend.address.http}/collections/{gallery.name}/cluster"

    def placed():
        return httpx.get(at, timeout=60).raise_for_status().json()["result"]

    def move():
        found = placed()
        (shard, *_), away = found["local_shards"], found["remote_shards"][0]["peer_id"]
        moved = {"shard_id": shard["shard_id"], "from_peer_id": found["peer_id"], "to_peer_id": away}
        httpx.post(at, json={"move_shard": moved}, timeout=60).raise_for_status()
        return moved

    asked = []

    def moving(what, done, total):
        if what == "writing offsets" and not asked:
            asked.append(move())

    model = apply(gallery.store(), BANK, progress=moving, **APPLY).model
    wait_until(lambda: not placed()["shard_transfers"])
    (moved,) = asked
    where = {shard["shard_id"]: shard["peer_id"] for shard in placed()["remote_shards"]}
    assert where[moved["shard_id"]] == moved["to_peer_id"]
    store = gallery.store()
    report = inspect(store, probes=0)
    assert (report.count, report.missing, report.stale) == (len(gallery.ids), 0, 0)
    assert gallery.agreement(store.search(QUERIES, K).ids, model) >= AGREED


def test_custom_shard_keys_are_corrected_each_and_together(backend, fill):
    gallery = fill(rows=0, sharding_method=models.ShardingMethod.CUSTOM, shard_number=1, replication_factor=2)
    client = backend.client()
    for number, key in enumerate(("left", "right")):
        client.create_shard_key(gallery.name, key)
        client.upsert(
            gallery.name,
            [models.PointStruct(id=row, vector=TARGETS[row].tolist()) for row in range(number, len(TARGETS), 2)],
            shard_key_selector=key,
            wait=True,
        )
    gallery.ids, gallery.vectors = list(range(len(TARGETS))), TARGETS
    model = hubplugin_qdrant.apply(client, gallery.name, query_bank=BANK, **APPLY).model
    hub = backend.wrapped()
    found = [hub.query_points(gallery.name, query=query, limit=K).points for query in QUERIES]
    assert gallery.agreement([[point.id for point in points] for points in found], model) >= AGREED
    gallery.ids, gallery.vectors = gallery.ids[::2], gallery.vectors[::2]
    left = [hub.query_points(gallery.name, query=query, limit=K, shard_key_selector="left").points for query in QUERIES]
    assert gallery.agreement([[point.id for point in points] for points in left], model) >= AGREED
