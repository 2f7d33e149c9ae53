"""A cluster of three nodes: shards, replicas, nodes that go away, shard keys."""

import threading
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from qdrant_client import models

import hubplugin_qdrant.transport
from hubplugin import Compute, apply
from hubplugin.metric import normalise
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
        self._first, *_ = self._nodes = [
            f"http://{address.host}:{address.http}/collections/{collection}"
            for address in backend.addresses.values()
        ]

    def change(self, **operation) -> None:
        httpx.post(
            f"{self._first}/cluster", json=operation, timeout=60
        ).raise_for_status()

    def read(self, node: str | None = None) -> dict:
        return (
            httpx.get(f"{node or self._first}/cluster", timeout=60)
            .raise_for_status()
            .json()["result"]
        )

    def replicas(self) -> dict[int, tuple[int, str]]:
        """The node of each shard, of which there is one replica, and its state."""
        state = self.read()
        shards = [
            {"peer_id": state["peer_id"], **shard} for shard in state["local_shards"]
        ] + state["remote_shards"]
        return {
            shard["shard_id"]: (shard["peer_id"], shard["state"]) for shard in shards
        }

    def is_at_rest(self) -> bool:
        return not self.read()["shard_transfers"]

    def clean(self) -> None:
        """Takes out of each shard the points that another one has now."""
        for node in self._nodes:
            for shard in self.read(node)["local_shards"]:
                place = f"{node}/shards/{shard['shard_id']}/cleanup"
                httpx.post(
                    place, params={"wait": "true"}, timeout=60
                ).raise_for_status()


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
            (shard, *_), away = (
                state["local_shards"],
                state["remote_shards"][0]["peer_id"],
            )
            moves.append(
                {
                    "shard_id": shard["shard_id"],
                    "from_peer_id": state["peer_id"],
                    "to_peer_id": away,
                }
            )
            placement.change(move_shard=moves[0])

    model = gallery.correct(compute=Compute(progress=move_once))
    wait_until(placement.is_at_rest)
    (move,) = moves
    assert placement.replicas()[move["shard_id"]][0] == move["to_peer_id"]
    require_whole(gallery, model)


def reshard(placement: Placement, old: int) -> Iterator[None]:
    """Gives a collection of `old` shards one more, step by step, as an operator of the server does."""
    placement.change(start_resharding={"direction": "up"})
    wait_until(lambda: old in placement.replicas())
    yield
    to, _ = placement.replicas()[old]
    for shard in range(old):
        peer, _ = placement.replicas()[shard]
        way = {
            "from_peer_id": peer,
            "to_peer_id": to,
            "shard_id": shard,
            "to_shard_id": old,
        }
        placement.change(replicate_shard={**way, "method": "resharding_stream_records"})
        yield
        wait_until(placement.is_at_rest)
    placement.change(finish_migrating_points={"peer_id": to, "shard_id": old})
    wait_until(lambda: placement.replicas()[old] == (to, "Active"))
    yield
    placement.change(commit_read_hash_ring={})
    yield
    placement.change(commit_write_hash_ring={})
    yield
    placement.clean()
    placement.change(finish_resharding={})
    wait_until(lambda: not placement.read().get("resharding_operations"))


@pytest.mark.parametrize("storage", ["payload", "vector"])
def test_a_collection_that_gets_another_shard_during_apply_keeps_every_offset(
    backend, fill, storage, monkeypatch
):
    backend.require((1, 19), "resharding")  # the oldest where it was seen
    gallery = fill(shard_number=3, replication_factor=1)
    monkeypatch.setattr(hubplugin_qdrant.transport, "BATCH", 20)
    placement = Placement(backend, gallery.name)
    steps, tasks = reshard(placement, 3), set()

    def step(task, done, total):
        if task in ("writing offsets", "closing"):
            next(steps, None)
            tasks.add(task)

    model = gallery.correct(storage, compute=Compute(progress=step))
    assert next(steps, "ended") == "ended"
    assert tasks == {"writing offsets", "closing"}
    assert {
        shard: state for shard, (_, state) in placement.replicas().items()
    } == dict.fromkeys(range(4), "Active")
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


def test_custom_shard_keys_are_corrected_each_and_together(backend, fill):
    gallery, ids = fill_shards(
        fill, backend.client(), TARGETS, ("left", "right"), replicas=2
    )
    model, hub = gallery.correct(), backend.wrapped()
    assert gallery.agreement(hub, model) >= AGREED
    gallery.ids, gallery.vectors = ids["left"].tolist(), TARGETS[ids["left"]]
    assert gallery.agreement(hub, model, shard_key_selector="left") >= AGREED


@pytest.mark.parametrize("tenants", [8, 20])
def test_a_tenant_finds_by_a_shard_key_what_the_raw_index_would(
    backend, fill, storage, tenants
):
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(60, 32))

    def draw(count):
        rows = centres[rng.integers(60, size=count)] * 0.7 + 0.35
        rows += rng.normal(size=rows.shape) * rng.uniform(0.5, 1.2, (count, 1))
        wide = np.pad(rows, ((0, 0), (0, TARGETS.shape[1] - rows.shape[1])))
        return normalise(wide.astype(np.float32), "drawn")

    vectors, queries = draw(tenants * 250), draw(40)
    gallery, ids = fill_shards(
        fill, backend.client(), vectors, range(tenants), replicas=1, using="code"
    )
    model = apply(gallery.store(storage), draw(400), "nnn", force=True).model
    hub, shares = backend.wrapped(), []
    for key, rows in ids.items():
        gallery.ids, gallery.vectors = rows.tolist(), vectors[rows]
        shares.append(
            gallery.agreement(hub, model, queries=queries, shard_key_selector=key)
        )
    assert np.mean(shares) >= 0.985
    assert min(shares) >= AGREED
