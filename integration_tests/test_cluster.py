"""A cluster of three nodes: shards, replicas, nodes that go away, shard keys."""

import threading
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from qdrant_client import models

import hubplugin_qdrant
import hubplugin_qdrant.transport
from hubplugin import Compute, apply
from hubplugin.metric import normalise
from integration_tests.galleries import AGREED, APPLY, BANK, QUERIES, TARGETS, K
from integration_tests.waiting import wait_until
from tests.qdrant.conftest import apply_to

pytestmark = pytest.mark.needs("cluster")


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
        model = apply(gallery.store(), BANK, compute=Compute(progress=stop_and_start), **APPLY).model
    finally:
        if back.ident is None:
            back.start()
        back.join()
    require_whole(gallery, model)


def test_searches_go_on_while_a_node_is_away(backend, gallery):
    model = apply_to(backend.client(), gallery.name, BANK, **APPLY).model
    hub = backend.wrapped()
    backend.stop("node2")
    try:
        assert gallery.agreement(gallery.found(hub), model) >= AGREED
    finally:
        backend.start("node2")


class Placement:
    """Where the shards of a collection lie, and what changes it."""

    def __init__(self, backend, collection: str):
        self._first, *_ = self._nodes = [
            f"http://{address.host}:{address.http}/collections/{collection}" for address in backend.addresses.values()
        ]

    def ask(self, **change) -> None:
        httpx.post(f"{self._first}/cluster", json=change, timeout=60).raise_for_status()

    def found(self, node: str | None = None) -> dict:
        return httpx.get(f"{node or self._first}/cluster", timeout=60).raise_for_status().json()["result"]

    def replicas(self) -> dict[int, tuple[int, str]]:
        """The node of each shard, of which there is one replica, and its state."""
        found = self.found()
        here = [{"peer_id": found["peer_id"], **shard} for shard in found["local_shards"]]
        return {each["shard_id"]: (each["peer_id"], each["state"]) for each in here + found["remote_shards"]}

    def at_rest(self) -> bool:
        return not self.found()["shard_transfers"]

    def clean(self) -> None:
        """Takes out of each shard the points that another one has now."""
        for node in self._nodes:
            for shard in self.found(node)["local_shards"]:
                at = f"{node}/shards/{shard['shard_id']}/cleanup"
                httpx.post(at, params={"wait": "true"}, timeout=60).raise_for_status()


def require_whole(gallery, model) -> None:
    assert gallery.health() == (len(gallery.ids), 0, 0)
    assert gallery.agreement(gallery.store().search(QUERIES, K).ids, model) >= AGREED


def test_shards_that_move_to_another_node_during_apply_keep_every_offset(backend, fill, monkeypatch):
    gallery = fill(shard_number=3, replication_factor=1)
    monkeypatch.setattr(hubplugin_qdrant.transport, "BATCH", 20)
    placement, asked = Placement(backend, gallery.name), []

    def moving(what, done, total):
        if what == "writing offsets" and not asked:
            found = placement.found()
            (shard, *_), away = found["local_shards"], found["remote_shards"][0]["peer_id"]
            asked.append({"shard_id": shard["shard_id"], "from_peer_id": found["peer_id"], "to_peer_id": away})
            placement.ask(move_shard=asked[0])

    model = apply(gallery.store(), BANK, compute=Compute(progress=moving), **APPLY).model
    wait_until(placement.at_rest)
    (moved,) = asked
    assert placement.replicas()[moved["shard_id"]][0] == moved["to_peer_id"]
    require_whole(gallery, model)


def resharding(placement: Placement, old: int) -> Iterator[None]:
    """Gives a collection of `old` shards one more, step by step, as an operator of the server does."""
    placement.ask(start_resharding={"direction": "up"})
    wait_until(lambda: old in placement.replicas())
    yield
    to, _ = placement.replicas()[old]
    for shard in range(old):
        given, _ = placement.replicas()[shard]
        way = {"from_peer_id": given, "to_peer_id": to, "shard_id": shard, "to_shard_id": old}
        placement.ask(replicate_shard={**way, "method": "resharding_stream_records"})
        yield
        wait_until(placement.at_rest)
    placement.ask(finish_migrating_points={"peer_id": to, "shard_id": old})
    wait_until(lambda: placement.replicas()[old] == (to, "Active"))
    yield
    placement.ask(commit_read_hash_ring={})
    yield
    placement.ask(commit_write_hash_ring={})
    yield
    placement.clean()
    placement.ask(finish_resharding={})
    wait_until(lambda: not placement.found().get("resharding_operations"))


@pytest.mark.parametrize("storage", ["payload", "vector"])
def test_a_collection_that_gets_another_shard_during_apply_keeps_every_offset(backend, fill, storage, monkeypatch):
    backend.require((1, 19), "resharding")  # the oldest where it was seen
    gallery = fill(shard_number=3, replication_factor=1)
    monkeypatch.setattr(hubplugin_qdrant.transport, "BATCH", 20)
    placement = Placement(backend, gallery.name)
    steps, phases = resharding(placement, 3), []

    def stepping(what, done, total):
        if what in ("writing offsets", "closing"):
            next(steps, None)
            phases.append(what)

    model = apply_to(
        backend.client(), gallery.name, BANK, storage=storage, compute=Compute(progress=stepping), **APPLY
    ).model
    assert next(steps, "ended") == "ended"
    assert set(phases) == {"writing offsets", "closing"}
    assert {shard: state for shard, (_, state) in placement.replicas().items()} == dict.fromkeys(range(4), "Active")
    require_whole(gallery, model)


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
    model = apply_to(client, gallery.name, BANK, **APPLY).model
    hub = backend.wrapped()
    assert gallery.agreement(gallery.found(hub), model) >= AGREED
    gallery.ids, gallery.vectors = gallery.ids[::2], gallery.vectors[::2]
    assert gallery.agreement(gallery.found(hub, shard_key_selector="left"), model) >= AGREED


@pytest.mark.parametrize("tenants", [8, 20])
def test_a_tenant_finds_by_a_shard_key_what_the_raw_index_would(backend, fill, storage, tenants):
    rng, each = np.random.default_rng(0), 250
    centres = rng.normal(size=(60, 32))

    def drawn(count):
        made = centres[rng.integers(60, size=count)] * 0.7 + 0.35
        made += rng.normal(size=made.shape) * rng.uniform(0.5, 1.2, (count, 1))
        wide = np.pad(made, ((0, 0), (0, TARGETS.shape[1] - made.shape[1])))
        return normalise(wide.astype(np.float32), "drawn")

    vectors, queries, client = drawn(tenants * each), drawn(40), backend.client()
    gallery = fill(
        rows=0,
        using="code",
        sharding_method=models.ShardingMethod.CUSTOM,
        shard_number=1,
        replication_factor=1,
    )
    for number in range(tenants):
        client.create_shard_key(gallery.name, number)
        rows = range(number * each, (number + 1) * each)
        points = [models.PointStruct(id=row, vector={"code": vectors[row].tolist()}) for row in rows]
        client.upsert(gallery.name, points, shard_key_selector=number, wait=True)
    model = apply(gallery.store(storage), drawn(400), "nnn", force=True).model
    hub, found = backend.wrapped(), []
    for number in range(tenants):
        gallery.ids = list(range(number * each, (number + 1) * each))
        gallery.vectors = vectors[gallery.ids]
        answers = [
            hub.query_points(gallery.name, query, "code", limit=K, shard_key_selector=number) for query in queries
        ]
        ids = [[point.id for point in answer.points] for answer in answers]
        found.append(gallery.agreement(ids, model, queries))
    assert np.mean(found) >= 0.985
    assert min(found) >= AGREED
