"""What servers do otherwise than local mode, or than one another: each was read in
their source before it was run."""

import base64
import hashlib
import hmac
import json
import threading

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin
import hubplugin_qdrant.transport
from hubplugin import StoreError
from hubplugin_qdrant import HubQdrantClient
from integration_tests.galleries import (
    AGREED,
    APPLY,
    BANK,
    LATER,
    OTHER_BANK,
    QUERIES,
    TARGETS,
    point_id,
)
from integration_tests.servers import wait_until


@pytest.mark.parametrize("payload", [None, {}], ids=["none", "empty"])
def test_an_upsert_without_a_payload_leaves_what_a_plain_one_leaves(
    backend, gallery, payload
):
    """A server 1.14 keeps the payload of a point that was there, by gRPC also if an
    empty one is given; from 1.15 on it is cleared."""
    gallery.correct()
    hub, keys = backend.wrapped(), gallery.ids[:3]
    one, two, three = ([gallery.point(key, TARGETS[0], payload)] for key in keys)
    backend.client().upsert(gallery.name, one, wait=True)
    hub.upsert(gallery.name, two, wait=True)
    operation = models.UpsertOperation(upsert=models.PointsList(points=three))
    hub.batch_update_points(gallery.name, [operation])
    content = gallery.content()
    left = [(content[key][1] or {}).keys() - {"hub_offset"} for key in keys]
    assert left[0] == left[1] == left[2]
    hubplugin.refresh(gallery.store())
    assert gallery.health()[1:] == (0, 0)


def test_a_payload_that_is_overwritten_right_after_its_vector_keeps_the_new_offset(
    backend, gallery
):
    gallery.correct()
    key = gallery.ids[0]
    vectors = models.UpdateVectors(points=[gallery.moved(key, TARGETS[7])])
    payload = models.SetPayload(payload={"row": "new"}, points=[key])
    operations = [
        models.UpdateVectorsOperation(update_vectors=vectors),
        models.OverwritePayloadOperation(overwrite_payload=payload),
    ]
    backend.wrapped().batch_update_points(gallery.name, operations, wait=False)
    wait_until(lambda: gallery.content()[key][1].get("row") == "new")
    wait_until(lambda: gallery.health()[1:] == (0, 0))


FRESH = point_id(1_000)


def test_what_misses_a_point_leaves_the_others_their_offsets(backend, gallery):
    gallery.correct()
    hub, name = backend.wrapped(), gallery.name
    one, two, three = ([key, FRESH] for key in gallery.ids[:3])
    for write in (
        lambda: hub.update_vectors(name, [gallery.moved(key, LATER[0]) for key in one]),
        lambda: hub.overwrite_payload(name, {"row": "overwritten"}, points=two),
        lambda: hub.clear_payload(name, points_selector=three),
    ):
        # The client cuts off what a cluster says.
        with pytest.raises(Exception, match=f"{FRESH}|No point with id"):
            write()
    assert gallery.health() == (len(gallery.ids), 0, 0)
    content = gallery.content()
    assert content[two[0]][1]["row"] == "overwritten"
    np.testing.assert_allclose(content[one[0]][0], LATER[0], atol=1e-6)


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
    """Return strict mode with those of `limits` that the client knows."""
    known = models.StrictModeConfig.model_fields
    limits = {name: value for name, value in limits.items() if name in known}
    return models.StrictModeConfig(enabled=bool(limits), **limits)


def index_row(gallery):
    integer = models.PayloadSchemaType.INTEGER
    gallery.client.create_payload_index(gallery.name, "row", integer, wait=True)


def limit(gallery, **limits):
    gallery.client.update_collection(gallery.name, strict_mode_config=strict(**limits))


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
    gallery = fill(using="code", graph=True)
    # Groups are by a key with an index only: beside it there is room for one more.
    index_row(gallery)
    limit(gallery, **limits)
    model, hub = gallery.correct(storage), backend.wrapped()
    candidates = limits.get("max_query_limit", len(TARGETS))
    if storage == "vector" or candidates >= 100:  # few of the best are among 15
        agreed = 0.9 if storage == "payload" and candidates == 100 else AGREED
        assert gallery.agreement(hub, model) >= agreed
    hub.query_points_groups(
        gallery.name, "row", QUERIES[0], "code", limit=3, group_size=2
    )
    changed = gallery.point(gallery.ids[0], TARGETS[1], {"row": 0})
    hub.upsert(gallery.name, [changed], wait=True)
    hub.overwrite_payload(gallery.name, {"row": 0}, points=gallery.ids[:5], wait=True)
    hubplugin.refresh(gallery.store())
    assert gallery.health()[1:] == (0, 0)
    # A refit has one index more, until it is active.
    if "max_payload_index_count" not in limits:
        gallery.correct(bank=OTHER_BANK)
    hubplugin.remove(gallery.store())
    limit(gallery)
    assert_no_offset_is_left(gallery)


@pytest.mark.parametrize("count", [0, 1])
def test_a_strict_server_without_room_for_an_index_is_told_before_anything_is_written(
    backend, gallery, count
):
    index_row(gallery)
    limit(gallery, max_payload_index_count=count)
    before = gallery.content()
    says = rf"strict mode allows {count} .* there are 1: 'row'; delete one"
    for dry_run in (True, False):
        with pytest.raises(StoreError, match=says):
            gallery.correct("payload", dry_run=dry_run)
    assert gallery.content() == before
    assert not backend.client().collection_exists(f"{gallery.name}--hub")


def test_rates_that_are_limited_are_waited_for(fill):
    # To make the gallery and correct it takes more than a minute's worth of either.
    rates = strict(read_rate_limit=150, write_rate_limit=90)
    gallery = fill(rows=60, strict_mode_config=rates)
    model = gallery.correct()
    limit(gallery)
    gallery.assert_whole(model)


def token(key, access):
    """Return a JSON web token with which a server that knows `key` allows `access`."""
    head, claims = (
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=")
        for part in ({"alg": "HS256", "typ": "JWT"}, {"access": access})
    )
    digest = hmac.digest(key.encode(), head + b"." + claims, hashlib.sha256)
    signature = base64.urlsafe_b64encode(digest).rstrip(b"=")
    return b".".join([head, claims, signature]).decode()


@pytest.mark.nodes(1)
@pytest.mark.parametrize("using", ["", "code"], ids=["unnamed", "named"])
def test_keys_of_single_collections_do_what_they_allow(backend, using):
    address = backend.keyed.address
    gallery = backend.keyed.gallery(using=using)

    def client(kind, access, *suffixes):
        allowed = [
            {"collection": f"{gallery.name}{suffix}", "access": access}
            for suffix in suffixes
        ]
        key = token(address.api_key, allowed)
        return kind(**(address.options() | {"api_key": key}))

    try:
        # Who may read or write the points, but make no collection, cannot begin ...
        for access in ("r", "rw"):
            store = gallery.store(client=client(QdrantClient, access, "", "--hub"))
            with pytest.raises(StoreError, match="the api key may not do this"):
                hubplugin.apply(store, BANK, **APPLY)
        model = gallery.correct()
        # ... but refreshes, who may read both searches corrected, and who may read the
        # points alone is told.
        both_written = client(QdrantClient, "rw", "", "--hub")
        assert hubplugin.refresh(gallery.store(client=both_written)).stale == 0
        both_read = client(HubQdrantClient, "r", "", "--hub")
        assert gallery.agreement(both_read, model) >= AGREED
        alone = client(HubQdrantClient, "r", "")
        with pytest.warns(UserWarning, match="the api key may not read"):
            assert gallery.agreement(alone, None) >= AGREED
    finally:
        gallery.drop()
