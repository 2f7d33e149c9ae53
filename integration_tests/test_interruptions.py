"""Processes that are killed and servers that go away while a correction is applied."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import httpx
import pytest

import hubplugin_qdrant
import hubplugin_qdrant.transport
from hubplugin.jobs.correction import apply
from hubplugin.jobs.inspection import inspect
from hubplugin_qdrant import HubQdrantClient
from integration_tests import applying
from integration_tests.galleries import AGREED, APPLY, BANK, QUERIES, K, assert_same


@pytest.mark.needs("processes")
def test_a_process_killed_at_any_moment_leaves_searches_whole_and_the_next_goes_on(fill, pytestconfig):
    gallery = fill(rows=60)
    store = gallery.store()
    before, raw = gallery.content(), store.search(QUERIES, K).ids
    del store
    moments, killed, bank = random.Random(6), 0, 0
    longest = _finish(gallery, bank)  # an uninterrupted run, to know how long one takes
    while killed < pytestconfig.getoption("--kills"):
        bank = 1 - bank
        ended = False
        while not ended:
            with gallery.let_go():
                process = applying.start(gallery.url, bank)
                process.join(moments.uniform(0, longest))
                ended = process.exitcode is not None
                process.kill()
                process.join()
                assert process.exitcode in (0, -9)
                killed += process.exitcode == -9
            store = gallery.store()
            found, answers = _settled(store)
            if found is None or not found.active:
                assert answers == raw
            else:
                assert gallery.agreement(answers, found.model) >= AGREED
            ended = ended or killed >= pytestconfig.getoption("--kills")
            del store
    _finish(gallery, bank)
    store = gallery.store()
    report = inspect(store, probes=0)
    assert report.correction is not None
    assert (report.correction.active, report.missing, report.stale) == (True, 0, 0)
    store.remove()
    assert_same(gallery.content(), before)


def _settled(store):
    """The correction, and the answers under it: a server may still be doing what a killed process asked for."""
    while True:
        before, answers, after = store.correction(), store.search(QUERIES, K).ids, store.correction()
        if str(before) == str(after):
            return after, answers


def _finish(gallery, bank):
    """A run to its end; returns how many seconds it took."""
    with gallery.let_go():
        process, started = applying.start(gallery.url, bank), time.monotonic()
        process.join()
        assert process.exitcode == 0
        return time.monotonic() - started


@pytest.mark.needs("restart")
def test_a_server_restarted_in_mid_apply_is_waited_for(backend, gallery, monkeypatch):
    monkeypatch.setattr(hubplugin_qdrant.transport, "BATCH", 20)
    back = threading.Thread(target=backend.start)

    def restart_once(what, done, total):
        if what == "writing offsets" and back.ident is None:
            backend.stop()
            back.start()

    try:
        model = apply(gallery.store(), BANK, progress=restart_once, **APPLY).model
    finally:
        if back.ident is not None:
            back.join()
    store = gallery.store()
    report = inspect(store, probes=0)
    assert (report.missing, report.stale) == (0, 0)
    assert gallery.agreement(store.search(QUERIES, K).ids, model) >= AGREED


@pytest.mark.needs("restart")
def test_a_restarted_server_still_corrects(backend, gallery):
    hub = backend.wrapped()
    hubplugin_qdrant.apply(backend.client(), gallery.name, query_bank=BANK, **APPLY)
    before = [hub.query_points(gallery.name, query=query, limit=K).points for query in QUERIES]
    backend.stop()
    backend.start()
    assert [backend.wrapped().query_points(gallery.name, query=query, limit=K).points for query in QUERIES] == before


@pytest.mark.needs("fresh")
@pytest.mark.parametrize("using", ["", "code"], ids=["unnamed", "named"])
def test_snapshots_restored_into_a_fresh_server_are_still_corrected(backend, fill, using):
    gallery, client, fresh = fill(using=using), backend.client(), backend.fresh()
    hubplugin_qdrant.apply(client, gallery.name, query_bank=BANK, **APPLY)
    hub, using = backend.wrapped(), using or None
    before = [hub.query_points(gallery.name, query=query, using=using, limit=K).points for query in QUERIES]
    there = f"http://{backend.address.host}:{backend.address.http}/collections"
    here = f"http://{fresh.host}:{fresh.http}/collections"
    keys = [{"api-key": address.api_key} if address.api_key else {} for address in (backend.address, fresh)]
    for name in (gallery.name, f"{gallery.name}--hub"):
        snapshot = client.create_snapshot(name, wait=True).name
        content = httpx.get(f"{there}/{name}/snapshots/{snapshot}", headers=keys[0], timeout=60).raise_for_status()
        httpx.post(
            f"{here}/{name}/snapshots/upload",
            params={"priority": "snapshot", "wait": "true"},
            files={"snapshot": (snapshot, content.content)},
            headers=keys[1],
            timeout=60,
        ).raise_for_status()
    restored = HubQdrantClient(**replace(fresh, prefer_grpc=backend.address.prefer_grpc).options())
    try:
        after = [restored.query_points(gallery.name, query=query, using=using, limit=K).points for query in QUERIES]
        assert [[(p.id, p.score) for p in points] for points in after] == [
            [(p.id, p.score) for p in points] for points in before
        ]
    finally:
        for name in (gallery.name, f"{gallery.name}--hub"):
            restored.raw.delete_collection(name)


@pytest.mark.needs("storage-snapshot")
def test_a_snapshot_of_a_whole_storage_is_still_corrected(backend, fill):
    gallery, client = fill(using="code"), backend.client()
    hubplugin_qdrant.apply(client, gallery.name, query_bank=BANK, **APPLY)
    snapshot = client.create_full_snapshot(wait=True).name
    there = f"http://{backend.address.host}:{backend.address.http}/snapshots/{snapshot}"
    restored = backend.restored(httpx.get(there, timeout=60).raise_for_status().content)
    address = replace(restored, prefer_grpc=backend.address.prefer_grpc)
    answers = [
        [[(p.id, p.score) for p in hub.query_points(gallery.name, query, "code", limit=K).points] for query in QUERIES]
        for hub in (backend.wrapped(), HubQdrantClient(**address.options()))
    ]
    assert answers[0] == answers[1]
    report = hubplugin_qdrant.inspect(address.client(), gallery.name, probes=0)
    assert (report.count, report.missing, report.stale) == (len(gallery.ids), 0, 0)
