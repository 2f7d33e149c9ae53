"""What is done to a running server: aliases are switched, others write, tenants share it, keys are limited."""

import base64
import hashlib
import hmac
import json
import threading
import time

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin
import hubplugin_qdrant
from hubplugin_qdrant import HubQdrantClient, metadata
from integration_tests.galleries import AGREED, APPLY, BANK, OTHER_BANK, QUERIES, TARGETS, K
from integration_tests.test_connections import There
from tests.qdrant.conftest import apply_to

pytestmark = pytest.mark.needs("server")


@pytest.mark.parametrize("through", ["the wrapped client", "another client"])
def test_an_alias_that_is_switched_is_followed(backend, fill, through, monkeypatch):
    old, new, client, hub = fill(using="code"), fill(using="code"), backend.client(), backend.wrapped()
    models_of = [
        apply_to(client, gallery.name, bank, **APPLY).model for gallery, bank in ((old, BANK), (new, OTHER_BANK))
    ]
    alias = f"{old.name}-alias"

    def switched(to, by):
        delete = models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=alias))
        create = models.CreateAlias(collection_name=to.name, alias_name=alias)
        by.update_collection_aliases([delete, models.CreateAliasOperation(create_alias=create)])

    switched(old, client)
    assert old.agreement(old.found(hub, alias), models_of[0]) >= AGREED
    if through == "another client":
        monkeypatch.setattr(metadata, "MANIFEST_SECONDS", 0.0)
        hub = backend.wrapped()
        assert old.agreement(old.found(hub, alias), models_of[0]) >= AGREED
    switched(new, client if through == "another client" else hub)
    assert new.agreement(new.found(hub, alias), models_of[1]) >= AGREED
    assert old.agreement(old.found(hub, alias), models_of[0]) < AGREED


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("using", ["", "code"], ids=["unnamed", "named"])
def test_a_collection_under_constant_writes_is_corrected_and_nothing_is_lost(backend, fill, using, wrapped):
    """200 points a second come or change from another thread, all the while that the correction is applied."""
    gallery, stop, written, changed = fill(using=using), threading.Event(), [], []
    writer_client = backend.wrapped() if wrapped else backend.client()

    def write():
        rng, due = np.random.default_rng(0), time.monotonic()
        while not stop.is_set():
            ids = list(range(1_000_001 + len(written), 1_000_006 + len(written)))
            before = [gallery.ids[row] for row in rng.integers(len(gallery.ids), size=5)]
            rows = TARGETS[rng.integers(len(TARGETS), size=10)] + 0.05 * rng.normal(size=(10, TARGETS.shape[1]))
            points = [
                models.PointStruct(id=key, vector={using: row} if using else row, payload={"row": key})
                for key, row in zip(ids, rows[:5].tolist(), strict=True)
            ]
            writer_client.upsert(gallery.name, points, wait=False)
            written.extend(ids)
            others = [
                models.PointVectors(id=key, vector={using: row} if using else row)
                for key, row in zip(before, rows[5:].tolist(), strict=True)
            ]
            writer_client.update_vectors(gallery.name, others, wait=False)
            changed.extend(before)
            due += 0.05
            stop.wait(max(0.0, due - time.monotonic()))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        apply_to(backend.client(), gallery.name, BANK, **APPLY)
    finally:
        stop.set()
        writer.join()
    client = backend.client()
    report = hubplugin.inspect(hubplugin_qdrant.open_store(client, gallery.name), queries=0)
    assert report.count == len(gallery.ids) + len(written)
    assert report.missing + report.stale <= len(written) + len(set(changed))
    refreshed = hubplugin.refresh(hubplugin_qdrant.open_store(client, gallery.name))
    assert refreshed.missing + refreshed.stale == report.missing + report.stale
    healed = hubplugin.inspect(hubplugin_qdrant.open_store(client, gallery.name), queries=0)
    assert (healed.missing, healed.stale) == (0, 0)
    assert {beside["row"] for key, (_, beside) in gallery.content().items() if key in set(written)} == set(written)


def test_tenants_of_one_collection_are_corrected_each(backend, fill, storage):
    gallery, client = fill(using="code", rows=0, hnsw_config=models.HnswConfigDiff(m=0, payload_m=16)), backend.client()
    tenant = models.KeywordIndexParams(type=models.KeywordIndexType.KEYWORD, is_tenant=True)
    client.create_payload_index(gallery.name, "tenant", tenant, wait=True)
    points = [
        models.PointStruct(id=row, vector={"code": vector.tolist()}, payload={"tenant": f"tenant {row % 2}"})
        for row, vector in enumerate(TARGETS)
    ]
    client.upsert(gallery.name, points, wait=True)
    given = {"bank": BANK, "vector": "code", "storage": storage, "group_by": "tenant"}
    apply_to(client, gallery.name, **given, **APPLY)
    correction = hubplugin_qdrant.open_store(client, gallery.name, vector="code").correction()
    hub = backend.wrapped()
    for number in range(2):
        rows = np.arange(number, len(TARGETS), 2)
        offsets = correction.model.offsets(TARGETS[rows], groups=[f"tenant {number}"] * len(rows))
        scores = QUERIES.astype(np.float64) @ TARGETS[rows].T.astype(np.float64) + offsets
        condition = models.FieldCondition(key="tenant", match=models.MatchValue(value=f"tenant {number}"))
        mine, agreed = models.Filter(must=[condition]), 0
        for query, row in zip(QUERIES, scores, strict=True):
            found = hub.query_points(gallery.name, query, "code", query_filter=mine, limit=K).points
            agreed += len({point.id for point in found} & set(rows[np.argsort(-row)[:K]].tolist()))
        assert agreed / (K * len(QUERIES)) >= AGREED


def test_vectors_on_disk_are_corrected(backend, fill, storage):
    gallery = fill(using="code", graph=True, vector={"on_disk": True}, on_disk_payload=True)
    client = backend.client()
    model = apply_to(client, gallery.name, BANK, storage=storage, **APPLY).model
    vectors = client.get_collection(gallery.name).config.params.vectors
    assert all(parameters.on_disk for parameters in vectors.values())
    assert gallery.agreement(gallery.found(backend.wrapped()), model) >= AGREED - 0.02


def test_a_strict_limit_on_candidates_is_kept_by_every_search(backend, fill, storage):
    limits = models.StrictModeConfig(enabled=True, max_query_limit=60, search_allow_exact=False)
    gallery, client = fill(using="code", strict_mode_config=limits), backend.client()
    applied = apply_to(client, gallery.name, BANK, storage=storage, agreement=1.0, **APPLY)
    hub = backend.wrapped(oversampling=1000)
    assert gallery.agreement(gallery.found(hub), applied.model) >= 0.9
    assert len(hub.query_points(gallery.name, QUERIES[0], "code", limit=60).points) == 60
    (measured,) = [line for line in map(str, applied.notes) if "recall" in line]
    assert "raw index" not in measured  # which only exact searches could tell


def token(key, access, **claims):
    """A JSON web token with which a server that knows `key` allows `access`."""

    def part(content):
        return base64.urlsafe_b64encode(content).rstrip(b"=")

    head = part(json.dumps({"alg": "HS256", "typ": "JWT"}).encode())
    signed = head + b"." + part(json.dumps({"access": access} | claims).encode())
    return (signed + b"." + part(hmac.digest(key.encode(), signed, hashlib.sha256))).decode()


@pytest.mark.needs("server", "jwt")
@pytest.mark.parametrize("using", ["", "code"], ids=["unnamed", "named"])
def test_keys_of_single_collections_do_what_they_allow(backend, using):
    there = There(backend.keyed())
    gallery, options = there.gallery(using=using), there.address.options()
    both = (gallery.name, f"{gallery.name}--hub")

    def client(kind, names, access):
        allowed = [{"collection": name, "access": access} for name in names]
        return kind(**(options | {"api_key": token(there.address.api_key, allowed)}))

    try:
        # Who may read or write the points, but make no collection, cannot begin ...
        for access in ("r", "rw"):
            with pytest.raises(hubplugin.StoreError, match="the api key may not do this"):
                apply_to(client(QdrantClient, both, access), gallery.name, BANK, **APPLY)
        model = apply_to(there.client(), gallery.name, BANK, **APPLY).model
        # ... but refreshes, who may read both searches corrected, and who may read the points alone is told.
        assert hubplugin.refresh(hubplugin_qdrant.open_store(client(QdrantClient, both, "rw"), gallery.name)).stale == 0
        assert gallery.agreement(gallery.found(client(HubQdrantClient, both, "r")), model) >= AGREED
        with pytest.warns(UserWarning, match="the api key may not read"):
            assert gallery.agreement(gallery.found(client(HubQdrantClient, both[:1], "r")), None) >= AGREED
        expired = token(there.address.api_key, "m", exp=1_000_000_000)
        with pytest.raises(hubplugin.StoreError, match="opening: the api key is missing, wrong or expired"):
            hubplugin.inspect(
                hubplugin_qdrant.open_store(QdrantClient(**(options | {"api_key": expired})), gallery.name)
            )
    finally:
        gallery.drop()
