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
from hubplugin_qdrant import HubQdrantClient
from integration_tests.galleries import (
    AGREED,
    APPLY,
    BANK,
    TARGETS,
)

pytestmark = pytest.mark.needs("server")


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
            rows = TARGETS[rng.integers(len(TARGETS), size=10)]
            rows = rows + 0.05 * rng.normal(size=rows.shape)
            points = [
                gallery.point(key, row, {"row": key})
                for key, row in zip(ids, rows[:5], strict=True)
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
    content = gallery.content()
    assert [content[key][1]["row"] for key in written] == written


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
    there = backend.keyed()
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
        both_written = client(QdrantClient, both, "rw")
        assert hubplugin.refresh(gallery.store(client=both_written)).stale == 0
        assert gallery.agreement(client(HubQdrantClient, both, "r"), model) >= AGREED
        alone = client(HubQdrantClient, both[:1], "r")
        with pytest.warns(UserWarning, match="the api key may not read"):
            assert gallery.agreement(alone, None) >= AGREED
    finally:
        gallery.drop()
