"""A store is read, fitted on and written by shards, and searched as if one process had done it."""

import uuid

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import Bank, InputError, StoreError, apply, fit, open_store
from hubplugin_qdrant.store import QdrantStore
from tests.galleries import flat_index
from tests.refusals import refused

COSINE = models.VectorParams(size=384, distance=models.Distance.COSINE)


@pytest.fixture
def bank(real):
    return real["bank_queries"][:300]


def test_a_faiss_file_is_for_one_process(tmp_path, gallery, bank, serial):
    url = flat_index(tmp_path / "a.faiss", gallery.astype(np.float32))
    store = open_store(url)
    with refused(StoreError, "cannot be read in parts by other machines"):
        apply(store, bank, executor=serial)


def test_a_local_collection_is_for_one_process(gallery, bank, serial):
    client = QdrantClient(":memory:")
    client.create_collection("c", COSINE)
    client.upload_collection("c", gallery[:200])
    store = hubplugin_qdrant.open_store(client, "c")
    with refused(StoreError, "other machines cannot open it"):
        apply(store, bank, force=True, executor=serial)


@pytest.fixture
def collection(monkeypatch, gallery):
    """A store that workers seem to open by its URL; half of the ids are numbers, half are UUIDs."""
    client = QdrantClient(":memory:")
    vectors = gallery[:900].astype(np.float32).tolist()
    dice = np.random.default_rng(3)
    ids = [
        *dice.choice(10**6, 450, replace=False).tolist(),
        *(str(uuid.UUID(bytes=dice.bytes(16))) for _ in range(450)),
    ]

    def made(name):
        client.create_collection(name, COSINE)
        client.upsert(name, models.Batch(ids=ids, vectors=vectors))
        return opened(f"qdrant://here/{name}")

    def opened(url):
        return QdrantStore(client, url.rpartition("/")[2], url=url)

    monkeypatch.setattr("hubplugin_qdrant.places._open", opened)
    return made


def offsets_of(store):
    offsets = {}
    for batch in store.scan():
        offsets.update(zip(batch.ids, batch.offsets.tolist(), strict=True))
    return offsets


def test_a_collection_by_shards_has_the_offsets_of_one_process(
    collection, bank, serial
):
    one, other = collection("a"), collection("b")
    alone = apply(one, bank)
    shared = apply(other, bank, executor=serial, shards=4)
    for name in ("scanned", "missing", "stale"):
        assert getattr(shared, name) == getattr(alone, name)
    expected = offsets_of(one)
    assert list(offsets_of(other)) == list(expected)
    assert offsets_of(other) == pytest.approx(expected, abs=1e-5, rel=0)
    assert other.correction().active


def test_clicks_are_for_one_process(collection, bank, serial):
    clicks = Bank(bank, list(range(len(bank))))
    with refused(InputError, "clicks need all targets in one process"):
        apply(collection("a"), clicks, executor=serial)


def test_a_second_coordinator_takes_over_and_the_first_activates_nothing(
    collection, bank, serial
):
    store = collection("a")
    model = fit(store, bank)
    other = fit(store, bank[:200])
    with store.begin(model) as first:
        shard = store.shards(1)[0]
        joined, writing, _ = first.share().join(shard)
        second = store.begin(other)
        said = "another run has begun since, so this one stops"
        with refused(StoreError, said):
            first.share().join(shard)
        with refused(StoreError, said), writing:
            list(writing.scan())
        with refused(StoreError, said):
            first.activate()
        second.close()
    assert not joined.correction().active


def test_zero_vectors_are_counted_by_the_workers_and_keep_the_offset_0(
    collection, bank, serial
):
    store = collection("a")
    zeros = [key for batch in store.shards(3)[1].scan() for key in batch.ids]
    vector = [0.0] * bank.shape[1]
    points = [models.PointVectors(id=key, vector=vector) for key in zeros]
    store.client.update_vectors("a", points)
    done = apply(store, bank, executor=serial, shards=3, force=True)
    assert done.model.gallery.count == 900 - len(zeros)
    assert (done.scanned, done.invalid_vectors.count) == (900, len(zeros))
    assert done.invalid_vectors.named[zeros[0]] == "length 0"
    offsets = offsets_of(store)
    assert not any(offsets[key] for key in zeros)
    assert not np.isnan([*offsets.values()]).any()
