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
from hubplugin_qdrant import HubQdrantClient, metadata
from integration_tests.galleries import (
    AGREED,
    APPLY,
    BANK,
    OTHER_BANK,
    QUERIES,
    TARGETS,
    K,
    ids_of,
)
from integration_tests.test_connections import RunningServer

pytestmark = pytest.mark.needs("server")


@pytest.mark.parametrize("through", ["the wrapped client", "another client"])
def test_an_alias_that_is_switched_is_followed(backend, fill, through, monkeypatch):
    old, new, client, hub = (
        fill(using="code"),
        fill(using="code"),
        backend.client(),
        backend.wrapped(),
    )
    old_model, new_model = old.correct(), new.correct(bank=OTHER_BANK)
    alias = f"{old.name}-alias"

    def switch(to, by):
        delete = models.DeleteAliasOperation(
            delete_alias=models.DeleteAlias(alias_name=alias)
        )
        create = models.CreateAlias(collection_name=to.name, alias_name=alias)
        by.update_collection_aliases(
            [delete, models.CreateAliasOperation(create_alias=create)]
        )

    switch(old, client)
    assert old.agreement(hub, old_model, alias) >= AGREED
    if through == "another client":
        monkeypatch.setattr(metadata, "MANIFEST_SECONDS", 0.0)
        hub = backend.wrapped()
        assert old.agreement(hub, old_model, alias) >= AGREED
    switch(new, client if through == "another client" else hub)
    assert new.agreement(hub, new_model, alias) >= AGREED
    assert old.agreement(hub, old_model, alias) < AGREED


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("using", ["", "code"], ids=["unnamed", "named"])
def test_a_collection_under_constant_writes_is_corrected_and_nothing_is_lost(
    backend, fill, using, wrapped
):
    """200 points a second come or change from another thread, all the while that the correction is applied."""
    gallery, stop, written, changed = fill(using=using), threading.Event(), [], set()
    writer_client = backend.wrapped() if wrapped else backend.client()

    def write():
        rng, due = np.random.default_rng(0), time.monotonic()
        while not stop.is_set():
            ids = list(range(1_000_001 + len(written), 1_000_006 + len(written)))
            others = [
                gallery.ids[row] for row in rng.integers(len(gallery.ids), size=5)
            ]
            rows = TARGETS[rng.integers(len(TARGETS), size=10)] + 0.05 * rng.normal(
                size=(10, TARGETS.shape[1])
            )
            points = [
                gallery.point(key, row, {"row": key})
                for key, row in zip(ids, rows, strict=False)
            ]
            writer_client.upsert(gallery.name, points, wait=False)
            written.extend(ids)
            vectors = [
                models.PointVectors(id=key, vector=gallery.vector(row))
                for key, row in zip(others, rows[5:], strict=True)
            ]
            writer_client.update_vectors(gallery.name, vectors, wait=False)
            changed.update(others)
            due += 0.05
            stop.wait(max(0.0, due - time.monotonic()))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        gallery.correct()
    finally:
        stop.set()
        writer.join()
    count, missing, stale = gallery.health()
    assert count == len(gallery.ids) + len(written)
    assert missing + stale <= len(written) + len(changed)
    refreshed = hubplugin.refresh(gallery.store())
    assert refreshed.missing + refreshed.stale == missing + stale
    assert gallery.health()[1:] == (0, 0)
    assert {
        payload["row"]
        for key, (_, payload) in gallery.content().items()
        if key in set(written)
    } == set(written)


def test_tenants_of_one_collection_are_corrected_each(backend, fill, storage):
    gallery, client = (
        fill(
            using="code", rows=0, hnsw_config=models.HnswConfigDiff(m=0, payload_m=16)
        ),
        backend.client(),
    )
    tenant = models.KeywordIndexParams(
        type=models.KeywordIndexType.KEYWORD, is_tenant=True
    )
    client.create_payload_index(gallery.name, "tenant", tenant, wait=True)
    points = [
        gallery.point(row, vector, {"tenant": f"tenant {row % 2}"})
        for row, vector in enumerate(TARGETS)
    ]
    client.upsert(gallery.name, points, wait=True)
    model = gallery.correct(storage, group_by="tenant")
    for number in range(2):
        rows, name = np.arange(number, len(TARGETS), 2), f"tenant {number}"
        offsets = model.offsets(TARGETS[rows], groups=[name] * len(rows))
        scores = (
            QUERIES.astype(np.float64) @ TARGETS[rows].T.astype(np.float64) + offsets
        )
        mine = models.Filter(
            must=[
                models.FieldCondition(key="tenant", match=models.MatchValue(value=name))
            ]
        )
        answers = ids_of(gallery.search(backend.wrapped(), query_filter=mine))
        best = rows[np.argsort(-scores, axis=1)[:, :K]].tolist()
        assert (
            np.mean(
                [len(set(a) & set(b)) / K for a, b in zip(answers, best, strict=True)]
            )
            >= AGREED
        )


def test_vectors_on_disk_are_corrected(backend, fill, storage):
    gallery = fill(
        using="code", graph=True, vector={"on_disk": True}, on_disk_payload=True
    )
    model = gallery.correct(storage)
    vectors = backend.client().get_collection(gallery.name).config.params.vectors
    assert all(parameters.on_disk for parameters in vectors.values())
    assert gallery.agreement(backend.wrapped(), model) >= AGREED - 0.02


def test_a_strict_limit_on_candidates_is_kept_by_every_search(backend, fill, storage):
    limits = models.StrictModeConfig(
        enabled=True, max_query_limit=60, search_allow_exact=False
    )
    gallery = fill(using="code", strict_mode_config=limits)
    applied = hubplugin.apply(gallery.store(storage, agreement=1.0), BANK, **APPLY)
    hub = backend.wrapped(oversampling=1000)
    assert gallery.agreement(hub, applied.model) >= 0.9
    assert len(gallery.search(hub, queries=QUERIES[:1], limit=60)[0]) == 60
    (measured,) = [line for line in map(str, applied.notes) if "recall" in line]
    assert "raw index" not in measured  # which only exact searches could tell


def token(key, access, **claims):
    """A JSON web token with which a server that knows `key` allows `access`."""

    def part(content):
        return base64.urlsafe_b64encode(content).rstrip(b"=")

    head = part(json.dumps({"alg": "HS256", "typ": "JWT"}).encode())
    signed = head + b"." + part(json.dumps({"access": access} | claims).encode())
    return (
        signed + b"." + part(hmac.digest(key.encode(), signed, hashlib.sha256))
    ).decode()


@pytest.mark.needs("managed")
@pytest.mark.parametrize("using", ["", "code"], ids=["unnamed", "named"])
def test_keys_of_single_collections_do_what_they_allow(backend, using):
    there = RunningServer(backend.keyed())
    gallery, options = there.gallery(using=using), there.address.options()
    both = (gallery.name, f"{gallery.name}--hub")

    def client(kind, names, access):
        allowed = [{"collection": name, "access": access} for name in names]
        return kind(**(options | {"api_key": token(there.address.api_key, allowed)}))

    try:
        # Who may read or write the points, but make no collection, cannot begin ...
        for access in ("r", "rw"):
            with pytest.raises(
                hubplugin.StoreError, match="the api key may not do this"
            ):
                hubplugin.apply(
                    gallery.store(client=client(QdrantClient, both, access)),
                    BANK,
                    **APPLY,
                )
        model = gallery.correct()
        # ... but refreshes, who may read both searches corrected, and who may read the points alone is told.
        assert (
            hubplugin.refresh(
                gallery.store(client=client(QdrantClient, both, "rw"))
            ).stale
            == 0
        )
        assert gallery.agreement(client(HubQdrantClient, both, "r"), model) >= AGREED
        with pytest.warns(UserWarning, match="the api key may not read"):
            assert (
                gallery.agreement(client(HubQdrantClient, both[:1], "r"), None)
                >= AGREED
            )
        expired = options | {
            "api_key": token(there.address.api_key, "m", exp=1_000_000_000)
        }
        with pytest.raises(
            hubplugin.StoreError,
            match="opening: the api key is missing, wrong or expired",
        ):
            hubplugin.inspect(gallery.store(client=QdrantClient(**expired)))
    finally:
        gallery.drop()
