"""Both ways in which an offset lies in a collection: as payload, and as one more dimension of a second vector."""

from __future__ import annotations

import numpy as np
import pytest

import hubplugin_qdrant
from hubplugin_qdrant import QdrantStore
from integration_tests.galleries import APPLY, BANK, LATER, QUERIES, K, assert_same, point_id

pytestmark = pytest.mark.needs("client")


@pytest.fixture(params=["payload", "vector"])
def storage(request, backend):
    if request.param == "vector" and "server" in backend.can and backend.version() < (1, 18):
        pytest.skip("storage='vector' needs server 1.18")
    return request.param


def search(backend, gallery):
    hub = backend.wrapped()
    return [
        [point.id for point in hub.query_points(gallery.name, query=query, using=gallery.using, limit=K).points]
        for query in QUERIES
    ]


def test_either_storage_corrects_is_kept_up_and_is_removed_without_a_trace(backend, fill, storage):
    gallery = fill(using="code")
    before, client = gallery.content(), backend.client()
    given = {"using": "code", "storage": storage}
    model = hubplugin_qdrant.apply(client, gallery.name, query_bank=BANK, **given, **APPLY).model
    assert gallery.agreement(search(backend, gallery), model) >= 0.99

    ids, vectors = gallery.ids, gallery.vectors
    fresh = [point_id(len(ids) + row) for row in range(len(LATER))]
    gallery.insert(fresh, LATER)
    gallery.ids, gallery.vectors = ids + fresh, np.concatenate([vectors, LATER])
    found = search(backend, gallery)
    assert set(fresh) & {key for line in found for key in line}
    assert hubplugin_qdrant.inspect(client, gallery.name, using="code").missing == len(LATER)
    hubplugin_qdrant.refresh(client, gallery.name, using="code")
    assert gallery.agreement(search(backend, gallery), model) >= 0.99

    client.delete(gallery.name, fresh, wait=True)
    gallery.ids, gallery.vectors = ids, vectors
    hubplugin_qdrant.remove(client, gallery.name, using="code")
    assert_same(gallery.content(), before)
    assert gallery.agreement(search(backend, gallery), None) == 1


@pytest.mark.needs("client", "graph")
def test_either_storage_reaches_the_recall_of_the_raw_graph(backend, fill, storage):
    gallery = fill(using="code", graph=True)
    given = {"using": "code", "storage": storage}
    model = hubplugin_qdrant.apply(backend.client(), gallery.name, query_bank=BANK, **given, **APPLY).model
    raw = gallery.agreement(QdrantStore(backend.client(), gallery.name, "code").search(QUERIES, K, raw=True).ids, None)
    assert gallery.agreement(search(backend, gallery), model) >= raw - 0.02
