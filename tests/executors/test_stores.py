"""A store is read, fitted on and written by shards, and searched as if one process had done it."""

from pathlib import Path

import faiss
import numpy as np
import pytest

import hubplugin
from hubplugin.errors import InputError, StoreError
from hubplugin_faiss.store import _open_once
from tests.executors.conftest import Serial


@pytest.fixture
def bank(real):
    return real["bank_queries"][:300]


@pytest.fixture
def index_file(tmp_path, gallery):
    def made(name: str) -> str:
        vectors = np.tile(gallery.astype(np.float32), (2, 1))[
            :3100
        ]  # three pages of rows, one for each shard
        vectors += 1e-3 * np.random.default_rng(0).normal(size=vectors.shape).astype(
            np.float32
        )
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        faiss.write_index(index, str(tmp_path / name))
        return f"faiss:{tmp_path / name}"

    _open_once.cache_clear()
    return made


def test_a_faiss_file_by_shards_is_searched_as_by_one_process(
    index_file, bank, real, serial
):
    one, other = (
        hubplugin.open_store(index_file(name)) for name in ("one.faiss", "b.faiss")
    )
    # In float32 the shape of a product breaks a tie of two halves' answers.
    exactly = hubplugin.Compute(precision="float64")
    alone = hubplugin.apply(one, bank, compute=exactly)
    shared = hubplugin.apply(other, bank, executor=serial, shards=3, compute=exactly)
    assert (shared.scanned, shared.missing, shared.stale) == (
        alone.scanned,
        alone.missing,
        alone.stale,
    )
    assert str(shared.trial) == str(alone.trial)
    queries = real["test_queries"][:50].astype(np.float32)
    expected, found = one.search(queries, 5), other.search(queries, 5)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5)
    np.testing.assert_allclose(
        np.concatenate([batch.offsets for batch in other.scan()]),
        np.concatenate([batch.offsets for batch in one.scan()]),
        atol=1e-5,
    )
    assert len(serial.shards) == 6  # each of the three is read, and then written


def test_writing_that_was_cut_off_is_taken_up(index_file, bank, tmp_path):
    url = index_file("a.faiss")
    before = Path(url.removeprefix("faiss:")).read_bytes()
    with pytest.raises(KeyboardInterrupt):
        hubplugin.apply(hubplugin.open_store(url), bank, executor=Serial(5), shards=3)
    assert (
        Path(url.removeprefix("faiss:")).read_bytes() == before
    )  # searches are unchanged
    _open_once.cache_clear()
    rest, store = Serial(), hubplugin.open_store(url)
    done = hubplugin.apply(store, bank, executor=rest, shards=3)
    assert len(rest.shards) == 3  # nothing is fitted again
    assert done.scanned < 3100  # nor written
    assert store.correction().active
    assert sorted(path.name for path in (tmp_path / "a.faiss.hub").iterdir()) == [
        "1.model",
        "lock",
        "manifest.json",
    ]


def test_what_is_for_one_process_alone(index_file, bank, serial):
    store = hubplugin.open_store(index_file("a.faiss"))
    with pytest.raises(
        InputError, match="clicks need all targets in one process: leave executor= out"
    ):
        hubplugin.apply(
            store, hubplugin.Bank(bank, list(range(len(bank)))), executor=serial
        )


def test_a_local_collection_is_for_one_process(tmp_path, bank, gallery, serial):
    from qdrant_client import QdrantClient, models

    client = QdrantClient(path=str(tmp_path))
    client.create_collection(
        "c",
        vectors_config=models.VectorParams(size=384, distance=models.Distance.COSINE),
    )
    client.upsert(
        "c",
        models.Batch(
            ids=list(range(200)), vectors=gallery[:200].astype(float).tolist()
        ),
    )
    client.close()
    with pytest.raises(StoreError, match="other machines cannot open it"):
        hubplugin.apply(
            hubplugin.open_store(f"qdrant-local:{tmp_path}/c"),
            bank,
            force=True,
            executor=serial,
        )


@pytest.fixture
def collection(monkeypatch, gallery):
    """A store that workers seem to open by its URL; half of the ids are numbers, half are UUIDs."""
    import uuid

    from qdrant_client import QdrantClient, models

    from hubplugin_qdrant.store import QdrantStore

    client, vectors = QdrantClient(":memory:"), gallery[:900].astype(np.float32)
    dice = np.random.default_rng(3)
    ids = [
        *dice.choice(10**6, 450, replace=False).tolist(),
        *(str(uuid.UUID(bytes=dice.bytes(16))) for _ in range(450)),
    ]

    def made(name: str) -> QdrantStore:
        client.create_collection(
            name,
            vectors_config=models.VectorParams(
                size=384, distance=models.Distance.COSINE
            ),
        )
        client.upsert(name, models.Batch(ids=ids, vectors=vectors.tolist()))
        return opened(f"qdrant://here/{name}")

    def opened(url: str) -> QdrantStore:
        return QdrantStore(client, url.rpartition("/")[2], url=url)

    monkeypatch.setattr("hubplugin_qdrant.places._open", opened)
    return made


def offsets_of(store) -> dict[int | str, float]:
    return {
        each: value
        for batch in store.scan()
        for each, value in zip(batch.ids, batch.offsets.tolist(), strict=True)
    }


def test_a_collection_by_shards_has_the_offsets_of_one_process(
    collection, bank, serial
):
    one, other = collection("a"), collection("b")
    alone = hubplugin.apply(one, bank)
    shared = hubplugin.apply(other, bank, executor=serial, shards=4)
    assert (shared.scanned, shared.missing, shared.stale) == (
        alone.scanned,
        alone.missing,
        alone.stale,
    )
    expected, found = offsets_of(one), offsets_of(other)
    assert list(found) == list(expected)
    np.testing.assert_allclose(list(found.values()), list(expected.values()), atol=1e-5)
    assert other.correction().active


def test_a_second_coordinator_takes_over_and_the_first_activates_nothing(
    collection, bank, serial
):
    store = collection("a")
    model = hubplugin.fit(store, bank)
    other = hubplugin.fit(store, bank[:200])
    with store.begin(model) as first:
        shard = store.shards(1)[0]
        joined, writing, _ = first.share().join(shard)
        second = store.begin(other)
        with pytest.raises(
            StoreError, match="another run has begun since, and this one stops"
        ):
            first.share().join(shard)
        with (
            pytest.raises(
                StoreError, match="another run has begun since, and this one stops"
            ),
            writing,
        ):
            list(writing.scan())
        with pytest.raises(StoreError, match="another run has begun since"):
            first.activate()
        second.close()
    assert not joined.correction().active


@pytest.mark.parametrize("count", [1, None], ids=["one", "all of a shard"])
def test_zero_vectors_are_counted_by_the_workers_and_keep_the_offset_0(
    collection, bank, serial, count
):
    from qdrant_client import models

    store, dim = collection("a"), bank.shape[1]
    zeros = [key for batch in store.shards(3)[1].scan() for key in batch.ids][:count]
    store.client.update_vectors(
        "a", [models.PointVectors(id=key, vector=[0.0] * dim) for key in zeros]
    )
    done = hubplugin.apply(store, bank, executor=serial, shards=3, force=True)
    assert (done.model.gallery.count, done.scanned, done.invalid_vectors.count) == (
        900 - len(zeros),
        900,
        len(zeros),
    )
    assert done.invalid_vectors.named[zeros[0]] == "length 0"
    offsets = offsets_of(store)
    assert not any(offsets[key] for key in zeros)
    assert not np.isnan([*offsets.values()]).any()
