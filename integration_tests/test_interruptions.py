"""Processes that are killed and servers that go away while a correction is applied."""

import random
import threading
import time
from dataclasses import replace

import httpx
import numpy as np
import pytest
from qdrant_client import models

import hubplugin
import hubplugin_qdrant
import hubplugin_qdrant.transport
from hubplugin import Compute, apply, inspect
from hubplugin_qdrant import HubQdrantClient
from integration_tests import applying
from integration_tests.galleries import AGREED, APPLY, BANK, QUERIES, TARGETS, K, assert_same, payload
from tests.qdrant.conftest import apply_to


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
    report = inspect(store, queries=0)
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


class Stranger:
    """Another program that writes to a gallery past hubplugin, in a thread, and remembers what must be there: by id the
    vector and the payload that it wrote last. `step` is one write of it, which was done when it returns."""

    def __init__(self, client, gallery):
        self._client, self._gallery, self._random = client, gallery, random.Random(7)
        self.expected = {
            key: (vector, payload(row))
            for row, (key, vector) in enumerate(zip(gallery.ids, gallery.vectors, strict=True))
        }
        self._stop, self._failed = threading.Event(), []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._stop.set()
        self._thread.join()
        if self._failed and error == (None, None, None):
            raise self._failed[0]

    def _run(self):
        try:
            while not self._stop.is_set():
                self.step()
        except Exception as error:
            self._failed.append(error)

    def step(self):
        chosen, fresh = self._random.choice(list(self.expected)), 1_000_000 + len(self.expected)
        vector = np.float32(TARGETS[self._random.randrange(len(TARGETS))] + 0.05 * TARGETS[self._random.randrange(60)])
        given = {"collection_name": self._gallery.name, "wait": True}
        named = {self._gallery.using: vector.tolist()}
        kind = self._random.choice(["new", "another", "vector", "payload", "overwrite", "delete"])
        if kind in ("new", "another"):
            key, beside = fresh if kind == "new" else chosen, {"row": self._random.randrange(100)}
            self._client.upsert(points=[models.PointStruct(id=key, vector=named, payload=beside)], **given)
            self.expected[key] = (vector, beside)
        elif kind == "vector":
            self._client.update_vectors(points=[models.PointVectors(id=chosen, vector=named)], **given)
            self.expected[chosen] = (vector, self.expected[chosen][1])
        elif kind == "payload":
            self._client.set_payload(payload={"seen": True}, points=[chosen], **given)
            self.expected[chosen] = (self.expected[chosen][0], self.expected[chosen][1] | {"seen": True})
        elif kind == "overwrite":
            self._client.overwrite_payload(payload={"seen": False}, points=[chosen], **given)
            self.expected[chosen] = (self.expected[chosen][0], {"seen": False})
        elif len(self.expected) > 40:
            self._client.delete(points_selector=[chosen], **given)
            del self.expected[chosen]


@pytest.mark.needs("processes", "server")
def test_a_process_killed_while_a_stranger_writes_loses_nothing_of_either(backend, fill, storage, pytestconfig):
    gallery = fill(rows=60, using="code")
    gallery.url += f"&storage={storage}"
    moments, killed, bank, kills = random.Random(8), 0, 0, pytestconfig.getoption("--kills")
    longest = _finish(gallery, bank)
    hub = backend.wrapped()
    with Stranger(backend.client(), gallery) as stranger:
        while killed < kills:
            bank = 1 - bank
            process = applying.start(gallery.url, bank)
            process.join(moments.uniform(0, 2 * longest))
            process.kill()
            process.join()
            assert process.exitcode in (0, -9)
            killed += process.exitcode == -9
            for query in QUERIES[:5]:
                points = hub.query_points(gallery.name, query, "code", limit=K).points
                scores = [point.score for point in points]
                assert len(points) == K == len({point.id for point in points})
                assert scores == sorted(scores, reverse=True)
    _finish(gallery, bank)
    store, expected = gallery.store(), stranger.expected
    hubplugin.refresh(hubplugin_qdrant.open_store(store.client, gallery.name))
    report = inspect(store, queries=0)
    assert (report.count, report.missing, report.stale, report.foreign) == (len(expected), 0, 0, 0)
    gallery.ids, gallery.vectors = list(expected), np.array([vector for vector, _ in expected.values()])
    assert gallery.agreement(store.search(QUERIES, K).ids, report.correction.model) >= AGREED
    store.remove()
    unit = {key: {"code": vector / np.linalg.norm(vector)} for key, (vector, _) in expected.items()}
    assert_same(gallery.content(), {key: (unit[key], beside) for key, (_, beside) in expected.items()})
    assert list(store.client.get_collection(gallery.name).config.params.vectors) == ["code"]


def _finish(gallery, bank):
    """A run to its end; returns how many seconds it took."""
    with gallery.let_go():
        process, started = applying.start(gallery.url, bank), time.monotonic()
        process.join()
        assert process.exitcode == 0
        return time.monotonic() - started


@pytest.mark.needs("restart")
def test_a_server_restarted_in_mid_apply_is_waited_for(backend, fill, storage, monkeypatch):
    gallery = fill(using="code")
    monkeypatch.setattr(hubplugin_qdrant.transport, "BATCH", 20)
    back = threading.Thread(target=backend.start)

    def restart_once(what, done, total):
        if what == "writing offsets" and back.ident is None:
            backend.stop()
            back.start()

    try:
        model = apply(gallery.store(storage), BANK, compute=Compute(progress=restart_once), **APPLY).model
    finally:
        if back.ident is not None:
            back.join()
    store = gallery.store()
    assert store.storage == storage
    assert gallery.health()[1:] == (0, 0)
    assert gallery.agreement(store.search(QUERIES, K).ids, model) >= AGREED


@pytest.mark.needs("restart")
def test_a_restarted_server_still_corrects(backend, fill, storage):
    gallery = fill(using="code")
    model = apply_to(backend.client(), gallery.name, BANK, storage=storage, **APPLY).model
    before = answers(backend.wrapped(), gallery)
    assert gallery.agreement([[key for key, _ in found] for found in before], model) >= AGREED
    backend.stop()
    backend.start()
    assert answers(backend.wrapped(), gallery) == before
    assert gallery.health()[1:] == (0, 0)


def answers(hub, gallery):
    """The id and score of what is found for each query."""
    using = gallery.using or None
    found = [hub.query_points(gallery.name, query=query, using=using, limit=K).points for query in QUERIES]
    return [[(point.id, point.score) for point in points] for points in found]


def snapshot_of(client, address, name):
    """The content of a fresh snapshot of a collection."""
    return asked(address, "GET", f"collections/{name}/snapshots/{client.create_snapshot(name, wait=True).name}").content


def restore(address, name, content):
    given = {"files": {"snapshot": ("snapshot", content)}, "params": {"priority": "snapshot", "wait": "true"}}
    asked(address, "POST", f"collections/{name}/snapshots/upload", **given)


def asked(address, method, path, **given):
    """What the server answers to a request past the client."""
    key = {"api-key": address.api_key} if address.api_key else {}
    url = f"http://{address.host}:{address.http}/{path}"
    return httpx.request(method, url, headers=key, timeout=60, **given).raise_for_status()


@pytest.mark.needs("fresh")
@pytest.mark.parametrize("using", ["", "code"], ids=["unnamed", "named"])
def test_snapshots_restored_into_a_fresh_server_are_still_corrected(backend, fill, using, storage):
    gallery, client, fresh = fill(using=using), backend.client(), backend.fresh()
    apply_to(client, gallery.name, BANK, storage=storage, **APPLY)
    before = answers(backend.wrapped(), gallery)
    for name in (gallery.name, f"{gallery.name}--hub"):
        restore(fresh, name, snapshot_of(client, backend.address, name))
    restored = HubQdrantClient(**replace(fresh, prefer_grpc=backend.address.prefer_grpc).options())
    try:
        assert answers(restored, gallery) == before
        report = hubplugin.inspect(hubplugin_qdrant.open_store(restored.raw, gallery.name), queries=0)
        assert (report.count, report.missing, report.stale) == (len(gallery.ids), 0, 0)
        hubplugin.remove(hubplugin_qdrant.open_store(restored.raw, gallery.name))
        assert [each.name for each in restored.raw.get_collections().collections] == [gallery.name]
    finally:
        for name in (gallery.name, f"{gallery.name}--hub"):
            restored.raw.delete_collection(name)


@pytest.mark.needs("fresh")
def test_a_collection_restored_alone_is_searched_raw_with_a_warning_until_a_refresh(backend, fill, storage):
    """From a snapshot that is older than the correction."""
    gallery, client = fill(using="code"), backend.client()
    content = snapshot_of(client, backend.address, gallery.name)
    given = {"vector": "code", "storage": storage}
    model = apply_to(client, gallery.name, BANK, **given, **APPLY).model
    client.delete_collection(gallery.name)  # a server restores over no other set of vectors
    restore(backend.address, gallery.name, content)
    hub = backend.wrapped()
    says = "no point of .* has an offset of version 1.*run refresh" if storage == "payload" else "lost its augmented"
    with pytest.warns(UserWarning, match=says) as warned:
        assert gallery.agreement(gallery.found(hub), None) == 1
    assert len([each for each in warned if each.category is UserWarning]) == 1
    hubplugin.refresh(hubplugin_qdrant.open_store(client, gallery.name, vector="code"))
    assert gallery.agreement(gallery.found(backend.wrapped()), model) >= AGREED


@pytest.mark.needs("server")
def test_snapshots_restored_under_another_name_are_corrected_and_alone_raw(backend, fill, storage):
    gallery, client = fill(using="code"), backend.client()
    before = gallery.content()
    model = apply_to(client, gallery.name, BANK, vector="code", storage=storage, **APPLY).model
    copy, alone = fill(rows=0, using="code"), fill(rows=0, using="code")
    for each, suffix in ((copy, ""), (copy, "--hub"), (alone, "")):
        client.delete_collection(f"{each.name}{suffix}")
        restore(
            backend.address, f"{each.name}{suffix}", snapshot_of(client, backend.address, f"{gallery.name}{suffix}")
        )
    for each in (copy, alone):
        each.ids, each.vectors = gallery.ids, gallery.vectors
    assert gallery.agreement(copy.found(backend.wrapped()), model) >= AGREED
    assert copy.health() == (len(gallery.ids), 0, 0)
    hubplugin.remove(copy.store())
    assert_same(copy.content(), before)

    assert gallery.agreement(alone.found(backend.wrapped()), None) == 1
    (told,) = hubplugin.inspect(alone.store()).attention
    assert f"metadata is not in '{alone.name}--hub': searches are raw" in told
    if storage == "payload":
        hubplugin.remove(alone.store())
    else:
        client.delete_vector_name(alone.name, "hub_v1", wait=True)
    assert_same(alone.content(), before)
    assert not client.get_collection(alone.name).payload_schema


@pytest.mark.needs("storage-snapshot")
def test_a_snapshot_of_a_whole_storage_is_still_corrected(backend, fill, storage):
    gallery, client = fill(using="code"), backend.client()
    apply_to(client, gallery.name, BANK, storage=storage, **APPLY)
    snapshot = client.create_full_snapshot(wait=True).name
    content = asked(backend.address, "GET", f"snapshots/{snapshot}").content
    address = replace(backend.restored(content), prefer_grpc=backend.address.prefer_grpc)
    assert answers(HubQdrantClient(**address.options()), gallery) == answers(backend.wrapped(), gallery)
    report = hubplugin.inspect(hubplugin_qdrant.open_store(address.client(), gallery.name), queries=0)
    assert (report.count, report.missing, report.stale) == (len(gallery.ids), 0, 0)
