"""Processes that are killed and servers that go away while a correction is applied."""

import random
import threading
import time

import numpy as np
import pytest

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


def runs(gallery, kills):
    """Apply banks in processes, and yield after each.

    So many are killed, at random moments. A first and a last one run to their ends.
    """
    moments, killed, bank = random.Random(6), 0, 0
    process, started = applying.start(gallery.url, bank), time.monotonic()
    process.join()
    longest = time.monotonic() - started
    assert process.exitcode == 0
    while killed < kills:
        if process.exitcode == 0:
            bank = 1 - bank
        process = applying.start(gallery.url, bank)
        process.join(moments.uniform(0, 1.5 * longest))
        process.kill()
        process.join()
        assert process.exitcode in (0, -9)
        killed += process.exitcode == -9
        yield
    process = applying.start(gallery.url, bank)
    process.join()
    assert process.exitcode == 0


def test_a_process_killed_at_any_moment_leaves_searches_whole_and_the_next_goes_on(
    fill, pytestconfig
):
    gallery = fill(rows=60)
    before, raw = gallery.content(), gallery.found()
    for _ in runs(gallery, pytestconfig.getoption("--kills")):
        correction, answers = wait_until_still(gallery)
        if correction is None or not correction.active:
            assert answers == raw
        else:
            assert gallery.agreement(answers, correction.model) >= AGREED
    assert gallery.health()[1:] == (0, 0)
    hubplugin.remove(gallery.store())
    assert_same(gallery.content(), before)


def wait_until_still(gallery):
    """Return the correction, and the answers under it: a server may still be doing what
    a killed process asked for."""
    store = gallery.store()
    while True:
        before = store.correction()
        answers = store.search(QUERIES, K).ids
        after = store.correction()
        if str(before) == str(after):
            return after, answers


class Stranger:
    """Another program that writes to a gallery past hubplugin, in a thread.

    expected: By id the vector and the payload that it wrote last.
    """

    def __init__(self, client, gallery):
        self._client = client
        self._gallery = gallery
        self._random = random.Random(7)
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
        """Write once; it is done on return."""
        where = {"collection_name": self._gallery.name, "wait": True}
        key = self._random.choice(list(self.expected))
        vector, stored = self.expected[key]
        row = self._random.randrange(len(TARGETS))
        other = np.float32(TARGETS[row] + 0.05 * TARGETS[self._random.randrange(60)])
        kind = self._random.choice(["new", "another", "vector", "payload", "delete"])
        if kind == "delete":
            if len(self.expected) > 40:
                self._client.delete(points_selector=[key], **where)
                del self.expected[key]
            return
        if kind in ("new", "another"):
            if kind == "new":
                key = 1_000_000 + len(self.expected)
            vector, stored = other, {"row": row}
            point = self._gallery.point(key, vector, stored)
            self._client.upsert(points=[point], **where)
        elif kind == "vector":
            vector = other
            update = self._gallery.moved(key, vector)
            self._client.update_vectors(points=[update], **where)
        else:
            stored = {"seen": False}
            self._client.overwrite_payload(payload=stored, points=[key], **where)
        self.expected[key] = (vector, stored)


def test_a_process_killed_while_a_stranger_writes_loses_nothing_of_either(
    backend, fill, storage, pytestconfig
):
    gallery = fill(rows=60, using="code")
    gallery.url += f"&storage={storage}"
    hub = backend.wrapped()
    every_run = runs(gallery, pytestconfig.getoption("--kills"))
    with Stranger(backend.client(), gallery) as stranger:
        for _ in every_run:
            for points in gallery.search(hub, queries=QUERIES[:5]):
                scores = [point.score for point in points]
                assert len(points) == K == len({point.id for point in points})
                assert scores == sorted(scores, reverse=True)
    hubplugin.refresh(gallery.store())
    report = inspect(gallery.store(), queries=0)
    expected = stranger.expected
    assert report.count == len(expected)
    assert (report.missing, report.stale, report.foreign) == (0, 0, 0)
    gallery.ids = list(expected)
    gallery.vectors = np.array([vector for vector, _ in expected.values()])
    gallery.assert_whole(report.correction.model)
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


@pytest.mark.nodes(1)
@pytest.mark.parametrize("job", JOBS)
def test_a_server_killed_in_the_middle_of_a_job_is_waited_for(
    backend, fill, storage, job, monkeypatch
):
    gallery = fill(using="code")
    before = gallery.content()
    monkeypatch.setattr(hubplugin_qdrant.transport, "BATCH", 20)
    for bank in {"apply": [], "rollback": [BANK, OTHER_BANK]}.get(job, [BANK]):
        gallery.correct(storage, bank)
    back = threading.Thread(target=backend.start)
    at, run = JOBS[job]

    def kill_once(task, done, total):
        if task == at and back.ident is None:
            backend.kill()
            back.start()

    try:
        run(gallery.store(storage), {"compute": Compute(progress=kill_once)})
    finally:
        back.join()
    if job == "remove":
        assert_same(gallery.content(), before)
        return
    store = gallery.store()
    assert store.storage == storage
    gallery.assert_whole(store.correction().model)


def copy(address, name, other):
    """Restore a fresh snapshot of the collection `name` as the collection `other`."""
    snapshots = f"collections/{name}/snapshots"
    made = address.request("POST", f"{snapshots}?wait=true").json()["result"]
    content = address.request("GET", f"{snapshots}/{made['name']}").content
    address.request(
        "POST",
        f"collections/{other}/snapshots/upload?priority=snapshot&wait=true",
        files={"snapshot": ("snapshot", content)},
    )


@pytest.mark.nodes(1)  # of a cluster each node has a part
def test_snapshots_restored_under_another_name_are_corrected_and_alone_raw(
    backend, fill, storage
):
    gallery, client = fill(using="code"), backend.client()
    before = gallery.content()
    model = gallery.correct(storage)
    both, alone = fill(rows=0, using="code"), fill(rows=0, using="code")
    for restored, suffix in ((both, ""), (both, "--hub"), (alone, "")):
        other = f"{restored.name}{suffix}"
        client.delete_collection(other)
        copy(backend.address, f"{gallery.name}{suffix}", other)
        restored.ids, restored.vectors = gallery.ids, gallery.vectors
    assert both.agreement(backend.wrapped(), model) >= AGREED
    both.assert_whole(model)
    hubplugin.remove(both.store())
    assert_same(both.content(), before)

    assert alone.agreement(backend.wrapped(), None) == 1
    if storage == "payload":
        hubplugin.remove(alone.store())
    else:
        client.delete_vector_name(alone.name, "hub_v1", wait=True)
    assert_same(alone.content(), before)
    assert not client.get_collection(alone.name).payload_schema
