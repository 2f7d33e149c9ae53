"""The manifest, in a store of some seventy lines: what follows which, and a kill between any two steps."""

import itertools
import json

import numpy as np
import pytest

import hubplugin
from hubplugin import OffsetModel, StoreError, refresh
from hubplugin.corrections import FORMAT, Manifest, ManifestStore, Version
from hubplugin.jobs.write import write
from hubplugin.metric import Metric
from hubplugin.store import Batch, Hits, Writing
from hubplugin.testing import StoreConformance
from tests.galleries import clustered
from tests.refusals import refused


class Disk(dict):
    """What outlives a process. kill_at: before which change it is killed."""

    changes, kill_at = 0, None

    def touch(self):
        self.changes += 1
        if self.changes == self.kill_at:
            raise KeyboardInterrupt

    def __setitem__(self, name, value):
        self.touch()
        super().__setitem__(name, value)

    def drop(self, name):
        self.touch()
        self.pop(name, None)


class InMemory(ManifestStore[Version]):
    url, metric, dim = "memory:photos", Metric.COSINE, 24

    def __init__(self, disk, vectors):
        self.disk, self.vectors = disk, vectors

    def read_manifest(self):
        if "manifest" not in self.disk:
            return Manifest[Version]()
        return Manifest[Version].read(self.disk["manifest"], self.url, "delete it")

    def write_manifest(self, manifest):
        self.disk["manifest"] = manifest.model_dump_json()

    def delete_manifest(self):
        self.disk.drop("manifest")

    def new_version(self, model, number):
        return Version.of(model, number)

    def read_model(self, version):
        return OffsetModel.from_bytes(self.disk[f"model {version.number}"], self.url)

    def write_model(self, version, model):
        self.disk[f"model {version.number}"] = model.to_bytes()

    def delete_model(self, version):
        self.disk.drop(f"model {version.number}")

    def make_room(self, version):
        self.disk.setdefault(f"offsets {version.number}", {})

    def delete_offsets(self, versions):
        for version in versions:
            self.disk.drop(f"offsets {version.number}")

    def offsets(self, version):
        held = {} if version is None else self.disk[f"offsets {version.number}"]
        return np.array([held.get(key, np.nan) for key in self.vectors], np.float32)

    def count(self):
        return len(self.vectors)

    def scan(self, field=None):
        vectors = np.stack(list(self.vectors.values()))
        yield Batch(list(self.vectors), vectors, self.offsets(self.active()))

    def begin(self, model, progress=None):
        return InMemoryWriting(self, *self.start_version(model))

    def search(self, queries, k, *, raw=False):
        scores = queries @ np.stack(list(self.vectors.values())).T
        scores = scores + np.nan_to_num(self.offsets(None if raw else self.active()))
        rows = np.argsort(-scores, axis=1)[:, :k]
        ids = [[list(self.vectors)[row] for row in line] for line in rows]
        return Hits(ids, np.take_along_axis(scores, rows, axis=1).tolist())


class InMemoryWriting(Writing):
    def __init__(self, store, version, found):
        self.store, self.version, self.found = store, version, found

    def scan(self):
        for batch in self.store.scan():
            offsets = self.store.offsets(self.version)
            whole = Batch(batch.ids, batch.vectors, offsets)
            for rows in np.array_split(np.arange(len(offsets)), 3):
                yield whole.take(rows)

    def write(self, batch, offsets):
        self.store.require_owner(self.version)
        name = f"offsets {self.version.number}"
        written = dict(zip(batch.ids, offsets.tolist(), strict=True))
        self.store.disk[name] = self.store.disk[name] | written

    def activate(self):
        self.store.switch(self.version)
        self.store.clear()


class TestConformance(StoreConformance):
    def create(self, ids, vectors):
        return InMemory(Disk(), dict(zip(ids, vectors, strict=True)))

    def reopen(self, store):
        return InMemory(store.disk, store.vectors)

    def insert_plain(self, store, ids, vectors):
        added = dict(zip(ids, vectors, strict=True))
        return InMemory(store.disk, store.vectors | added)


@pytest.fixture
def vectors(rng):
    return dict(enumerate(clustered(rng, 60, 24)))


@pytest.fixture
def models(vectors):
    gallery = np.stack(list(vectors.values()))
    return [
        hubplugin.fit(gallery, gallery[:40] + 0.01, method)
        for method in ("is", "nnn", "csls")
    ]


def names(disk):
    """Of what kinds something lies there, and how many."""
    return sorted(name.partition(" ")[0] for name in disk)


WHOLE = ["manifest", "model", "model", "offsets"]
"""The active version and the model before it."""


def overtaken():
    return refused(StoreError, "another run has begun since, so this one")


def active_of(store):
    """Return the fingerprint of the active model."""
    version = store.active()
    return version and version.model


@pytest.mark.parametrize("job", ["apply", "resume", "roll back", "remove"])
def test_a_kill_before_any_change_leaves_the_old_or_the_new_and_the_next_run_finishes(
    vectors, models, job
):
    first, second, third = models
    expected = {"remove": None, "roll back": first}.get(job, third)

    def run(store):
        if expected is None:
            store.remove()
        else:
            write(store, expected)

    for number in itertools.count(1):
        disk = Disk()
        store = InMemory(disk, vectors)
        write(store, first)
        write(store, second)
        if job == "resume":
            store.begin(third)
        disk.changes, disk.kill_at = 0, number
        try:
            run(InMemory(disk, vectors))
        except KeyboardInterrupt:
            pass
        else:
            break
        disk.kill_at = None
        store = InMemory(disk, vectors)
        new = expected and expected.fingerprint
        assert active_of(store) in (second.fingerprint, new)
        if active_of(store) is not None:
            report = hubplugin.inspect(store, queries=0)
            assert (report.missing, report.stale) == (0, 0)
        removed = InMemory(Disk(disk), vectors)
        removed.remove()
        assert not removed.disk
        store = InMemory(disk, vectors)
        run(store)
        assert active_of(store) == new
        if expected is None:
            assert not disk
            continue
        assert names(disk) == WHOLE
        assert store.previous().fingerprint == second.fingerprint
    assert number > 4


def test_of_two_runs_the_one_that_began_last_writes_and_the_other_stops(
    vectors, models
):
    first, second, third = models
    store = InMemory(Disk(), vectors)
    write(store, first)
    older = store.begin(second)
    batch = next(older.scan())
    other = store.begin(third)
    with overtaken():
        older.write(batch, np.zeros(len(batch.ids), np.float32))
    with overtaken():
        older.activate()
    assert store.begin(third).found == "half-written"
    with overtaken():
        other.activate()
    write(store, third)
    assert names(store.disk) == WHOLE


@pytest.mark.parametrize(
    "other", ["remove", "refresh", "another model", "the same model"]
)
def test_a_run_that_another_overtakes_while_it_keeps_its_model_stops(
    other, vectors, models
):
    disk = Disk()
    first, second, third = models
    job, expected = {
        "remove": (lambda store: store.remove(), None),
        "refresh": (refresh, first),
        "another model": (lambda store: write(store, third), third),
        "the same model": (lambda store: write(store, second), second),
    }[other]
    write(InMemory(disk, vectors), first)

    class Overtaken(InMemory):
        def write_model(self, version, model):
            job(InMemory(disk, vectors))
            super().write_model(version, model)

    with overtaken():
        write(Overtaken(disk, vectors), second)
    store = InMemory(disk, vectors)
    assert active_of(store) == (expected and expected.fingerprint)
    store.search(np.ones((1, store.dim), np.float32), 3)
    store.remove()
    assert not disk


def test_an_amendment_of_what_another_run_has_replaced_stops(vectors, models):
    store = InMemory(Disk(), vectors)
    write(store, models[0])
    amending = store.begin(models[0])
    write(InMemory(store.disk, vectors), models[1])
    with overtaken():
        amending.activate()


def test_a_version_keeps_its_number_and_date_when_it_is_amended(vectors, models):
    store = InMemory(Disk(), vectors)
    write(store, models[0])
    before = store.active()
    refresh(store)
    assert store.active() == before


def test_a_model_that_another_thread_asks_for_meanwhile_is_no_answer(vectors):
    store = InMemory(Disk(), vectors)
    asked_meanwhile = []

    class Model:
        def __init__(self, name):
            self._name = name

        @property
        def fingerprint(self):
            while asked_meanwhile:
                store.model(asked_meanwhile.pop())
            return self._name

    store.read_model = lambda version: Model(version.model)
    store.model(version(1))
    asked_meanwhile.append(version(2))
    assert store.model(version(1)).fingerprint == "model 1"


DAMAGED = [
    ("", "not JSON"),
    ("{", "not JSON"),
    ("[]", "damaged"),
    ('{"active": {"": {"number": 1}}}', r"damaged at 'active\.\.model'"),
    ('{"invented": 1}', "damaged at 'invented'"),
    ('{"last_number": -5}', "damaged at 'last_number'"),
    (f'{{"last_number": {2**31}}}', "damaged at 'last_number'"),
    (
        json.dumps({"format": FORMAT + 1, "hubplugin": "9.0"}),
        "of hubplugin 9.0; .* upgrade hubplugin",
    ),
    (json.dumps({"format": 6, "hubplugin": "0.1"}), "of hubplugin 0.1; .* delete it"),
]


@pytest.mark.parametrize(("content", "said"), DAMAGED)
def test_a_manifest_that_cannot_be_read_is_refused_in_one_line_and_never_written_over(
    vectors, models, content, said
):
    store = InMemory(Disk(manifest=content), vectors)
    for job in (
        store.correction,
        store.remove,
        lambda: write(store, models[0]),
        lambda: refresh(store),
    ):
        with refused(StoreError, said):
            job()
    assert store.disk == {"manifest": content}


def version(number, vector="image", **fields):
    given = {"model": f"model {number}", "metric": "dot", "dim": 2, **fields}
    return Version(number=number, vector=vector, **given)


def applied(*numbers):
    manifest = Manifest[Version]()
    for number in numbers:
        manifest = manifest.begin(version(number)).activate(version(number))
    return manifest


def numbers(manifest):
    active = {name: each.number for name, each in manifest.active.items()}
    writing = manifest.writing and manifest.writing.number
    return active, writing, [each.number for each in manifest.retired]


def test_what_was_retired_meanwhile_stays_so():
    later = applied(1, 2, 3)
    assert numbers(later.clear(applied(1, 2).retired)) == ({"image": 3}, None, [2])


def test_an_amended_version_stays_active_beside_what_another_run_writes():
    manifest = applied(1).begin(version(2, "text"))
    amended = manifest.activate(version(1, owner="another"))
    assert numbers(amended) == ({"image": 1}, 2, [])
    assert amended.active["image"].owner == "another"


def test_the_correction_of_one_vector_goes_and_that_of_another_stays():
    manifest = applied(1, 2).begin(version(3, "text"))
    assert numbers(manifest.withdraw("image")) == ({}, 3, [1, 2, 1])
    assert numbers(manifest.withdraw("text")) == ({"image": 2}, None, [1, 3])
