"""Processes that are killed and servers that go away while a correction is applied."""

import random
import threading
import time

import httpx
import numpy as np
import pytest
from qdrant_client import models

import hubplugin
import hubplugin_qdrant.transport
from hubplugin import Compute, apply, inspect, refit
from integration_tests import applying
from integration_tests.galleries import (
    AGREED,
    APPLY,
    BANK,
    OTHER_BANK,
    QUERIES,
    TARGETS,
    K,
    assert_same,
    payload,
)


def test_a_process_killed_at_any_moment_leaves_searches_whole_and_the_next_goes_on(
    fill, pytestconfig
):
    gallery = fill(rows=60)
    before, raw = gallery.content(), gallery.store().search(QUERIES, K).ids
    moments, killed, bank, kills = (
        random.Random(6),
        0,
        0,
        pytestconfig.getoption("--kills"),
    )
    longest = run_whole(
        gallery, bank
    )  # an uninterrupted run, to know how long one takes
    while killed < kills:
        bank = 1 - bank
        was_killed = True
        while was_killed and killed < kills:
            with gallery.let_go():
                was_killed = start_and_kill(gallery, bank, moments.uniform(0, longest))
            killed += was_killed
            correction, answers = wait_until_still(gallery)
            if correction is None or not correction.active:
                assert answers == raw
            else:
                assert gallery.agreement(answers, correction.model) >= AGREED
    run_whole(gallery, bank)
    assert gallery.health()[1:] == (0, 0)
    hubplugin.remove(gallery.store())
    assert_same(gallery.content(), before)


def start_and_kill(gallery, bank, seconds):
    """Kills a run that applies a bank, after so many seconds at most; whether it had not ended by then."""
    process = applying.start(gallery.url, bank)
    process.join(seconds)
    process.kill()
    process.join()
    assert process.exitcode in (0, -9)
    return process.exitcode == -9


def wait_until_still(gallery):
    """The correction, and the answers under it: a server may still be doing what a killed process asked for."""
    store = gallery.store()
    while True:
        before, answers, after = (
            store.correction(),
            store.search(QUERIES, K).ids,
            store.correction(),
        )
        if str(before) == str(after):
            return after, answers


def run_whole(gallery, bank):
    """A run to its end; returns how many seconds it took."""
    with gallery.let_go():
        process, started = applying.start(gallery.url, bank), time.monotonic()
        process.join()
        assert process.exitcode == 0
        return time.monotonic() - started


class Stranger:
    """Another program that writes to a gallery past hubplugin, in a thread, and remembers what must be there: by id the
    vector and the payload that it wrote last. `step` is one write of it, which was done when it returns."""

    def __init__(self, client, gallery):
        self._client, self._gallery, self._random = client, gallery, random.Random(7)
        rows = zip(gallery.ids, gallery.vectors, strict=True)
        self.expected = {
            key: (vector, payload(row)) for row, (key, vector) in enumerate(rows)
        }
        self._stop, self._errors = threading.Event(), []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._stop.set()
        self._thread.join()
        if self._errors and error == (None, None, None):
            raise self._errors[0]

    def _run(self):
        try:
            while not self._stop.is_set():
                self.step()
        except Exception as error:
            self._errors.append(error)

    def step(self):
        where = {"collection_name": self._gallery.name, "wait": True}
        key = self._random.choice(list(self.expected))
        vector, stored = self.expected[key]
        row = self._random.randrange(len(TARGETS))
        moved = np.float32(TARGETS[row] + 0.05 * TARGETS[self._random.randrange(60)])
        kind = self._random.choice(["new", "another", "vector", "payload", "delete"])
        if kind == "delete":
            if len(self.expected) > 40:
                self._client.delete(points_selector=[key], **where)
                del self.expected[key]
            return
        if kind in ("new", "another"):
            if kind == "new":
                key = 1_000_000 + len(self.expected)
            vector, stored = moved, {"row": row}
            point = self._gallery.point(key, vector, stored)
            self._client.upsert(points=[point], **where)
        elif kind == "vector":
            vector = moved
            update = models.PointVectors(id=key, vector=self._gallery.vector(moved))
            self._client.update_vectors(points=[update], **where)
        else:
            stored = {"seen": False}
            self._client.overwrite_payload(payload=stored, points=[key], **where)
        self.expected[key] = (vector, stored)


@pytest.mark.needs("server")
def test_a_process_killed_while_a_stranger_writes_loses_nothing_of_either(
    backend, fill, storage, pytestconfig
):
    gallery = fill(rows=60, using="code")
    gallery.url += f"&storage={storage}"
    moments, killed, bank = random.Random(8), 0, 0
    longest = run_whole(gallery, bank)
    hub = backend.wrapped()
    with Stranger(backend.client(), gallery) as stranger:
        while killed < pytestconfig.getoption("--kills"):
            bank = 1 - bank
            killed += start_and_kill(gallery, bank, moments.uniform(0, 2 * longest))
            for points in gallery.search(hub, queries=QUERIES[:5]):
                scores = [point.score for point in points]
                assert len(points) == K == len({point.id for point in points})
                assert scores == sorted(scores, reverse=True)
    run_whole(gallery, bank)
    expected = stranger.expected
    hubplugin.refresh(gallery.store())
    report = inspect(gallery.store(), queries=0)
    assert report.count == len(expected)
    assert (report.missing, report.stale, report.foreign) == (0, 0, 0)
    gallery.ids = list(expected)
    gallery.vectors = np.array([vector for vector, _ in expected.values()])
    found = gallery.store().search(QUERIES, K).ids
    assert gallery.agreement(found, report.correction.model) >= AGREED
    hubplugin.remove(gallery.store())
    left = {
        key: ({"code": vector / np.linalg.norm(vector)}, stored)
        for key, (vector, stored) in expected.items()
    }
    assert_same(gallery.content(), left)
    vectors = gallery.client.get_collection(gallery.name).config.params.vectors
    assert list(vectors) == ["code"]


JOBS = {
    "apply": ("writing offsets", lambda store, on: apply(store, BANK, **APPLY | on)),
    "refit": (
        "writing offsets",
        lambda store, on: refit(store, OTHER_BANK, **APPLY | on),
    ),
    "rollback": ("closing", lambda store, on: hubplugin.rollback(store, **on)),
    "remove": ("removing offsets", lambda store, on: hubplugin.remove(store, **on)),
}
"""By name, the task in which the server is killed, and the job."""


@pytest.mark.needs("managed")
@pytest.mark.parametrize("job", JOBS)
def test_a_server_killed_in_the_middle_of_a_job_is_waited_for(
    backend, fill, storage, job, monkeypatch
):
    gallery = fill(using="code")
    before = gallery.content()
    monkeypatch.setattr(hubplugin_qdrant.transport, "BATCH", 20)
    for bank in {"apply": [], "rollback": [BANK, OTHER_BANK]}.get(job, [BANK]):
        gallery.correct(storage, bank=bank)
    back = threading.Thread(target=backend.start)

    def kill_once(task, done, total):
        if task == at and back.ident is None:
            backend.kill()
            back.start()

    at, run = JOBS[job]
    try:
        run(gallery.store(storage), {"compute": Compute(progress=kill_once)})
    finally:
        back.join()
    if job == "remove":
        assert_same(gallery.content(), before)
        return
    store = gallery.store()
    assert store.storage == storage
    assert gallery.health() == (len(gallery.ids), 0, 0)
    model = store.correction().model
    assert gallery.agreement(store.search(QUERIES, K).ids, model) >= AGREED


def request(address, method, path, **options):
    """What the server answers to a request past the client."""
    headers = {"api-key": address.api_key} if address.api_key else {}
    url = f"http://{address.host}:{address.http}/{path}"
    return httpx.request(
        method, url, headers=headers, timeout=60, **options
    ).raise_for_status()


def make_snapshot(backend, name):
    """The content of a fresh snapshot of a collection."""
    snapshot = backend.client().create_snapshot(name, wait=True).name
    return request(
        backend.address, "GET", f"collections/{name}/snapshots/{snapshot}"
    ).content


def restore(address, name, content):
    options = {
        "files": {"snapshot": ("snapshot", content)},
        "params": {"priority": "snapshot", "wait": "true"},
    }
    request(address, "POST", f"collections/{name}/snapshots/upload", **options)


@pytest.mark.needs("managed")  # of a cluster each node has a part
def test_snapshots_restored_under_another_name_are_corrected_and_alone_raw(
    backend, fill, storage
):
    gallery, client = fill(using="code"), backend.client()
    before = gallery.content()
    model = gallery.correct(storage)
    copy, alone = fill(rows=0, using="code"), fill(rows=0, using="code")
    for restored, suffix in ((copy, ""), (copy, "--hub"), (alone, "")):
        client.delete_collection(f"{restored.name}{suffix}")
        restore(
            backend.address,
            f"{restored.name}{suffix}",
            make_snapshot(backend, f"{gallery.name}{suffix}"),
        )
        restored.ids, restored.vectors = gallery.ids, gallery.vectors
    assert copy.agreement(backend.wrapped(), model) >= AGREED
    assert copy.health() == (len(gallery.ids), 0, 0)
    hubplugin.remove(copy.store())
    assert_same(copy.content(), before)

    assert alone.agreement(backend.wrapped(), None) == 1
    if storage == "payload":
        hubplugin.remove(alone.store())
    else:
        client.delete_vector_name(alone.name, "hub_v1", wait=True)
    assert_same(alone.content(), before)
    assert not client.get_collection(alone.name).payload_schema
