"""What looks planted in a store is named by id."""

from __future__ import annotations

import faiss
import numpy as np
import pytest

import hubplugin
from hubplugin.compute import clusters
from hubplugin.errors import StoreError
from hubplugin.jobs.suspects import suspects


def unit(vectors: np.ndarray) -> np.ndarray:
    vectors = np.asarray(vectors, np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def bank(real) -> np.ndarray:
    return unit(real["bank_queries"][:600])


@pytest.fixture
def corrected(real, bank, tmp_path) -> str:
    """A corrected index of 400 targets, as a file."""
    index = faiss.IndexFlatIP(384)
    index.add(unit(real["test_targets"][:400]))
    path = tmp_path / "gallery.faiss"
    faiss.write_index(index, str(path))
    hubplugin.apply(hubplugin.open_store(f"faiss:{path}"), bank, force=True)
    return str(path)


def planted(path: str, vectors: np.ndarray) -> None:
    """Adds vectors as whoever knows nothing of the correction."""
    index = faiss.read_index(path)
    index.add(vectors)
    faiss.write_index(index, path)


def test_a_planted_vector_is_named_first_everywhere_it_stands_out(corrected, bank):
    planted(corrected, unit(bank.mean(axis=0, keepdims=True)))
    found = suspects(hubplugin.open_store(f"faiss:{corrected}"))
    assert found.raw_hubs[0][0] == found.corrected_hubs[0][0] == found.penalised[0][0] == 400
    assert any(name == 400 for name, _ in found.cluster_hubs)
    assert "skewness" in found.alarms[0]
    assert "ALARM" in str(found)
    assert found.stale == [400]


def test_the_shares_of_hubs_are_those_of_an_exact_search(corrected, bank):
    store = hubplugin.open_store(f"faiss:{corrected}")
    found = suspects(store)
    queries = bank[np.linspace(0, len(bank) - 1, 400).astype(int)].astype(np.float64)
    batch = next(iter(store.scan()))
    scores = queries @ batch.vectors.astype(np.float64).T + batch.offsets
    counts = np.bincount(np.argsort(-scores, axis=1)[:, :10].ravel(), minlength=400)
    assert found.corrected_hubs[0][1] == counts.max() / 400
    assert [share for _, share in found.corrected_hubs] == sorted(counts / 400, reverse=True)[:10]


def test_an_outlier_is_the_farthest_from_the_gallery(corrected, rng):
    planted(corrected, unit(rng.normal(size=(1, 384))))
    assert suspects(hubplugin.open_store(f"faiss:{corrected}")).far[0][0] == 400


def test_a_robust_correction_alarms_of_whatever_is_found_far_more_than_at_the_fit(real, bank, corrected):
    store = hubplugin.open_store(f"faiss:{corrected}")
    hubplugin.apply(store, bank, robust=True, force=True)
    assert not suspects(store).alarms
    planted(corrected, unit(bank.mean(axis=0, keepdims=True)))
    found = suspects(hubplugin.open_store(f"faiss:{corrected}"))
    assert any(alarm.startswith("400 is found by") and "at the fit" in alarm for alarm in found.alarms)


def test_a_refresh_bounds_what_came_without_an_offset_and_leaves_members_alone(real, bank, corrected):
    hubplugin.apply(hubplugin.open_store(f"faiss:{corrected}"), bank, robust=True, force=True)
    before = np.concatenate([batch.offsets for batch in hubplugin.open_store(f"faiss:{corrected}").scan()])
    planted(corrected, unit(bank.mean(axis=0, keepdims=True)))
    done = hubplugin.refresh(hubplugin.open_store(f"faiss:{corrected}"))
    assert (done.missing, done.stale) == (0, 1)
    store = hubplugin.open_store(f"faiss:{corrected}")
    after = np.concatenate([batch.offsets for batch in store.scan()])
    np.testing.assert_allclose(after[:400], before, rtol=0, atol=1e-6)
    assert sum(400 in ids for ids in store.search(bank, 10).ids) <= 0.02 * len(bank)
    assert hubplugin.refresh(store).stale == 0


def test_a_store_without_a_correction_is_refused(tmp_path, real):
    index = faiss.IndexFlatIP(384)
    index.add(unit(real["test_targets"][:20]))
    faiss.write_index(index, str(tmp_path / "raw.faiss"))
    with pytest.raises(StoreError, match="no active correction"):
        suspects(hubplugin.open_store(f"faiss:{tmp_path / 'raw.faiss'}"))


def test_clusters_part_what_lies_apart(rng):
    centres = 10 * np.eye(3, 8)
    labels = clusters((centres[np.arange(60) % 3] + 0.1 * rng.normal(size=(60, 8))).astype(np.float32), 3, seed=1)
    assert len({tuple(labels[start::3]) for start in range(3)}) in (2, 3)
    assert all(len(set(labels[start::3].tolist())) == 1 for start in range(3))
