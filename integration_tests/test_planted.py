"""Vectors that somebody planted: a robust correction bounds them, and a list keeps them back."""

from __future__ import annotations

import pytest
from qdrant_client import models

import hubplugin
import hubplugin_qdrant
from hubplugin.jobs.versions import quarantine
from integration_tests.galleries import APPLY, BANK, QUERIES, K

pytestmark = pytest.mark.needs("client")

PLANTED = 1_000_001
NEAR_ALL = BANK.mean(axis=0)
"""What lies nearest to the whole bank."""


@pytest.fixture
def gallery(backend, fill, storage):
    """A gallery with a robust correction."""
    gallery = fill(using="code")
    given = {"bank": BANK, "vector": "code", "storage": storage, "robust": True}
    hubplugin_qdrant.apply(backend.client(), gallery.name, **given, **APPLY)
    return gallery


def point(key, vector, payload=None):
    return models.PointStruct(id=key, vector={"code": vector.tolist()}, payload=payload)


def reach(client, gallery, key):
    """The share of the queries that find the point `key`."""
    answers = [client.query_points(gallery.name, query, "code", limit=K).points for query in QUERIES]
    return sum(key in {found.id for found in points} for points in answers) / len(QUERIES)


def inspected(backend, gallery):
    return hubplugin.inspect(hubplugin_qdrant.open_store(backend.client(), gallery.name, vector="code"), queries=20)


def test_a_planted_vector_is_bounded_whoever_writes_it(backend, gallery):
    client = backend.client()
    gallery.insert([PLANTED], NEAR_ALL[None])
    assert reach(client, gallery, PLANTED) > 0.1  # raw
    assert reach(backend.wrapped(), gallery, PLANTED) == 0
    assert inspected(backend, gallery).missing_ids == [PLANTED]
    assert hubplugin.refresh(hubplugin_qdrant.open_store(client, gallery.name, vector="code")).missing == 1
    assert reach(backend.wrapped(), gallery, PLANTED) <= 0.05
    client.delete(gallery.name, [PLANTED], wait=True)
    backend.wrapped().upsert(gallery.name, [point(PLANTED, NEAR_ALL)], wait=True)
    assert reach(backend.wrapped(), gallery, PLANTED) <= 0.05
    assert (inspected(backend, gallery).missing, inspected(backend, gallery).stale) == (0, 0)


@pytest.mark.parametrize("storage", ["payload"])
def test_a_forged_offset_counts_as_none_and_is_named(backend, gallery):
    client = backend.client()
    client.upsert(gallery.name, [point(PLANTED, NEAR_ALL, {"hub_offset": {"v1": 5.0}})], wait=True)
    assert reach(backend.wrapped(), gallery, PLANTED) == 0
    assert inspected(backend, gallery).stale_ids == [PLANTED]
    hubplugin.refresh(hubplugin_qdrant.open_store(client, gallery.name, vector="code"))
    assert inspected(backend, gallery).stale == 0


def test_what_is_in_quarantine_is_found_by_plain_clients_alone_until_it_is_let_out(backend, gallery):
    client, store = backend.client(), hubplugin_qdrant.open_store(backend.client(), gallery.name, vector="code")
    best = backend.wrapped().query_points(gallery.name, QUERIES[0], "code").points[0].id
    quarantine(store, "add", [best], "looks planted", who="a test")
    assert reach(backend.wrapped(), gallery, best) == 0 < reach(client, gallery, best)
    hubplugin.refresh(hubplugin_qdrant.open_store(client, gallery.name, vector="code"))
    assert reach(backend.wrapped(), gallery, best) == 0
    quarantine(store, "remove", [best], "it is none")
    assert reach(backend.wrapped(), gallery, best) > 0
