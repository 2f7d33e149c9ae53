"""An index file as a store, and files that survive what interrupts their writing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import faiss
import numpy as np
import pytest

import hubplugin
import hubplugin_faiss
from hubplugin import correction
from hubplugin.store import open_store
from tests.faiss import cases
from tests.faiss.cases import IP, L2

RNG = np.random.default_rng(12)
BANK, GALLERY = (cases.unit(RNG.normal(size=(rows, 16)) + 0.3) for rows in (60, 500))


@pytest.fixture
def model() -> hubplugin.OffsetModel:
    return hubplugin.fit(BANK, "nnn", targets=GALLERY, k=4)


@pytest.fixture(params=["Flat", "IDMap2,Flat", "IVF4,Flat", "HNSW8", "SQ8"])
def path(request, tmp_path) -> Path:
    index = faiss.index_factory(16, request.param, IP)
    index.train(GALLERY)
    if "IDMap" in request.param:
        index.add_with_ids(GALLERY, 3 * np.arange(500))
    else:
        index.add(GALLERY)
    cases.look_everywhere(index)
    file = tmp_path / "photos.faiss"
    faiss.write_index(index, str(file))
    return file


def test_apply_inspect_refresh_and_remove(path, model):
    before = path.read_bytes()
    store = open_store(f"faiss:{path}")
    raw = store.search(BANK[:5], 10)
    applied = correction.write(store, model)
    assert (applied.scanned, applied.missing) == (500, 500)
    assert "every target has its offset" in str(correction.inspect(open_store(f"faiss:{path}")))
    assert correction.refresh(open_store(f"faiss:{path}")).stale == 0
    assert open_store(f"faiss:{path}").search(BANK[:5], 10).ids == store.search(BANK[:5], 10).ids != raw.ids
    assert store.search(BANK[:5], 10, raw=True).ids == raw.ids
    store.remove()
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_the_metric_is_read_off_the_index(tmp_path):
    file = tmp_path / "x.faiss"
    for metric, vectors, expected in ((IP, GALLERY, "cosine"), (IP, 3 * GALLERY, "dot"), (L2, GALLERY, "euclidean")):
        index = faiss.IndexFlat(16, metric)
        index.add(vectors)
        faiss.write_index(index, str(file))
        assert open_store(f"faiss:{file}").metric == expected
    assert open_store(f"faiss:{file}?metric=cosine").metric == "cosine"


def test_what_plain_faiss_adds_is_stale_until_it_is_refreshed(tmp_path, model):
    file = tmp_path / "x.faiss"
    index = faiss.IndexFlatIP(16)
    index.add(GALLERY)
    faiss.write_index(index, str(file))
    hubplugin_faiss.upgrade_file(file, model)
    index, _ = hubplugin_faiss.read_index(file)
    index.add(BANK)
    faiss.write_index(index, str(file))
    assert correction.inspect(open_store(f"faiss:{file}")).stale >= 55
    assert correction.refresh(open_store(f"faiss:{file}")).stale >= 55
    assert correction.inspect(open_store(f"faiss:{file}")).stale == 0


def test_a_half_written_correction_is_taken_up_where_it_stopped(path, model):
    store = open_store(f"faiss:{path}")
    assert store.begin(model) is None
    batch = next(iter(store.scan()))
    half = type(batch)(batch.ids[:200], batch.vectors[:200], batch.offsets[:200], 200)
    store.write(half, model.offsets(half.vectors))
    again = open_store(f"faiss:{path}")
    found = again.correction()
    assert found is not None
    assert not found.active
    assert again.begin(model) == 200
    assert sum(len(part.ids) for part in again.scan(200)) == 300


def test_upgrade_file_leaves_the_model_beside_and_reads_both_back(path, model, tmp_path):
    out = tmp_path / "out.faiss"
    before = path.read_bytes()
    hubplugin_faiss.upgrade_file(path, model, out)
    assert path.read_bytes() == before
    index, beside = hubplugin_faiss.read_index(out)
    assert beside is not None
    assert beside.fingerprint == model.fingerprint
    assert hubplugin_faiss.read_index(path)[1] is None
    np.testing.assert_array_equal(
        index.search(BANK, 5)[1], hubplugin_faiss.upgrade(faiss.read_index(str(path)), model).search(BANK, 5)[1]
    )


def test_a_model_that_is_missing_or_of_another_index_is_noticed(path, model):
    hubplugin_faiss.upgrade_file(path, model)
    other = hubplugin.fit(BANK, "nnn", targets=GALLERY, k=5)
    other.save(f"{path}.hub")
    with pytest.raises(hubplugin.StoreError, match=r"photos\.faiss\.hub is the model of another index"):
        hubplugin_faiss.read_index(path)
    os.unlink(f"{path}.hub")
    with pytest.raises(hubplugin.StoreError, match=r"its model photos\.faiss\.hub is missing"):
        hubplugin_faiss.read_index(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "Faiss cannot read"), (b"\x80\x04pickle", "Faiss cannot read")],
)
def test_what_faiss_refuses_comes_back_as_one_line(tmp_path, content, says):
    file = tmp_path / "x.faiss"
    file.write_bytes(content)
    with pytest.raises(hubplugin.StoreError) as caught:
        open_store(f"faiss:{file}")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_comes_back_as_one_line(path):
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(hubplugin.StoreError, match="Faiss cannot read"):
        open_store(f"faiss:{path}")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(hubplugin.StoreError, match="there is no file"):
        open_store(f"faiss:{tmp_path}/nowhere.faiss")


def test_the_same_file_may_be_opened_by_a_url_that_is_wrong_only_in_its_options(path):
    with pytest.raises(hubplugin.InputError, match="unknown option 'color'"):
        open_store(f"faiss:{path}?color=red")


@pytest.mark.parametrize("kind", ["Flat", "IVF64,Flat"])
def test_a_kill_at_any_moment_leaves_a_whole_file_and_a_rerun_finishes(tmp_path, kind):
    rng = np.random.default_rng(3)
    gallery, bank = cases.unit(rng.normal(size=(20_000, 64))), cases.unit(rng.normal(size=(50, 64)))
    index = faiss.index_factory(64, kind, IP)
    index.train(gallery[:4000])
    index.add(gallery)
    file = tmp_path / "x.faiss"
    faiss.write_index(index, str(file))
    old = file.read_bytes()
    model = hubplugin.fit(bank, "nnn", targets=gallery, k=4)
    model.save(tmp_path / "model.hub")
    expected = hubplugin_faiss.upgrade(index, model).search(bank, 5)[1]
    program = (
        "import hubplugin, hubplugin_faiss, torch, faiss\n"
        "torch.set_num_threads(1); faiss.omp_set_num_threads(1)\n"
        "model = hubplugin.load('model.hub')\n"
        "print('ready', flush=True)\n"
        "hubplugin_faiss.upgrade_file('x.faiss', model)\n"
        "print('done', flush=True)\n"
    )

    def started() -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    whole = started()
    begin = time.perf_counter()
    assert whole.communicate()[0] == "done\n"
    duration = time.perf_counter() - begin
    seen = set()
    for share in np.linspace(0.02, 1.0, 8):
        file.write_bytes(old)
        for leftover in tmp_path.glob("x.faiss.*"):
            leftover.unlink()
        process = started()
        try:
            process.wait(timeout=duration * share)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.communicate()
        index, found = hubplugin_faiss.read_index(file)
        seen.add(found is not None)
        assert found is not None or file.read_bytes() == old
    hubplugin_faiss.upgrade_file(file, model)
    index, found = hubplugin_faiss.read_index(file)
    assert found is not None
    np.testing.assert_array_equal(index.search(bank, 5)[1], expected)
    assert sorted(os.listdir(tmp_path)) == ["model.hub", "x.faiss", "x.faiss.hub"]
