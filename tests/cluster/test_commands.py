"""What a user types to work on a Dask cluster: `--dask ADDRESS`, and the example."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hubplugin
from tests.galleries import flat_index
from tests.whole.commands import hubplugin as typed
from tests.whole.commands import write_photos

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster_fit.py"


@pytest.fixture(scope="module")
def address():
    distributed = pytest.importorskip("distributed", reason="pip install '.[cluster]'")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        yield cluster.scheduler_address


@pytest.fixture
def bank(real, tmp_path) -> Path:
    np.save(tmp_path / "bank.npy", real["bank_queries"][:500])
    return tmp_path / "bank.npy"


def test_a_store_is_corrected_on_a_cluster_as_in_one_process(address, bank, real, tmp_path):
    found = []
    for name, more in (("alone", ()), ("shared", ("--dask", address, "--shards", 3))):
        (tmp_path / name).mkdir()
        write_photos(tmp_path / name, real)
        store = f"faiss:{tmp_path / name / 'photos.faiss'}"
        done = typed("apply", store, "--bank", bank, *more)
        assert done.returncode == 0, done.stderr
        assert "1200 targets, of which 1200 had no offset and 0 another one" in done.stdout
        found.append(np.concatenate([batch.offsets for batch in hubplugin.open_store(store).scan()]))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5)


def test_a_fault_on_a_cluster_is_one_line_that_names_shard_and_row(address, bank, real, tmp_path):
    vectors = real["test_targets"].astype(np.float32)
    vectors[700, 3] = np.nan
    store = flat_index(tmp_path / "photos.faiss", vectors)
    wrong = typed("apply", store, "--bank", bank, "--dask", address, "--shards", 2)
    assert wrong.returncode == 1
    assert re.fullmatch(
        r"hubplugin: faiss:.*, shard 1 \(from row 0 on\): row 700 holds a value .* NaN .*\n", wrong.stderr
    )


@pytest.mark.parametrize("nobody", ["tcp://127.0.0.1:9", "nonsense"])
def test_an_address_where_nobody_answers_is_one_line(nobody, bank, real, tmp_path):
    write_photos(tmp_path, real)
    wrong = typed("apply", f"faiss:{tmp_path / 'photos.faiss'}", "--bank", bank, "--dask", nobody)
    assert wrong.returncode == 1
    assert wrong.stderr.count("\n") == 1
    assert f"no Dask scheduler answers at '{nobody}'" in wrong.stderr


def run_example(*arguments: object) -> str:
    ran = subprocess.run([sys.executable, EXAMPLE, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_example_by_itself():
    told = run_example().splitlines()[-1]
    assert told.startswith("largest difference from a fit in one process: ")
    assert float(told.rpartition(" ")[2]) < 1e-5


def test_the_example_on_a_cluster(address, bank, real, tmp_path):
    for number, part in enumerate(np.array_split(real["test_targets"], 3)):
        np.save(tmp_path / f"part-{number}.npy", part)
    assert "gallery of 1200" in run_example(address, tmp_path / "part-*.npy", bank)
