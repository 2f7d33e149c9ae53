"""Real engines: Dask, whose workers and coordinator are killed; processes; Ray. HUBPLUGIN_KILLS says how many kills."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

import hubplugin
from hubplugin.cluster import DaskExecutor, RayExecutor
from hubplugin.errors import ClusterError, InputError

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("HUBPLUGIN_KILLS", "3"))


@pytest.fixture(scope="module")
def dask():
    distributed = pytest.importorskip("distributed", reason="pip install '.[cluster]'")
    from dask import config

    with (
        # A local cluster closes the nanny of a worker that is not there so long after it was killed: it may have been
        # killed again.
        config.set({"distributed.deploy.lost-worker-timeout": "1h"}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, memory_limit="2GiB", dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def bank(real):
    return real["bank_queries"][:300]


@pytest.fixture(scope="module")
def expected(bank, gallery):
    return hubplugin.fit(gallery, bank).offsets(gallery)


def test_dask_tells_whether_it_has_workers():
    distributed = pytest.importorskip("distributed", reason="pip install '.[cluster]'")
    with (
        distributed.LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
    ):
        executor = DaskExecutor(client)
        assert executor.has_workers()
        client.retire_workers(close_workers=True)
        assert not executor.has_workers()


def test_dask_gives_the_same_offsets(dask, bank, gallery, parts, expected):
    for executor in (DaskExecutor(dask), dask.get_executor()):
        found = hubplugin.fit(parts[8], bank, executor=executor).offsets(gallery)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


class Counting(Executor):
    """Counts the orders that are sent to `executor`."""

    def __init__(self, executor: Executor):
        self.executor, self.sent = executor, 0

    def submit(self, fn, /, *args):
        self.sent += 1
        return self.executor.submit(fn, *args)


@pytest.mark.filterwarnings("ignore")
def test_workers_that_are_killed_at_random_change_nothing(dask, bank, gallery, parts, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    quiet = Counting(DaskExecutor(dask))
    calm = hubplugin.fit(parts[8], bank, "sn", iterations=30, executor=quiet)
    killed, over = 0, threading.Event()

    def kill():
        nonlocal killed
        dice = random.Random(7)
        while killed < KILLS and not over.is_set():
            over.wait(dice.uniform(0.2, 3.0))
            # A nanny gives up a worker that dies while it starts.
            nannies = [each for each in dask.cluster.workers.values() if each.status.name == "running"]
            alive = [each.process.pid for each in nannies if each.process.status.name == "running"]
            if alive:
                os.kill(dice.choice(alive), signal.SIGKILL)
                killed += 1

    killer = threading.Thread(target=kill)
    killer.start()
    fits, sent = 0, 0
    try:
        while killer.is_alive():
            counting = Counting(DaskExecutor(dask))
            model = hubplugin.fit(parts[8], bank, "sn", iterations=30, executor=counting)
            np.testing.assert_allclose(model.offsets(gallery), calm.offsets(gallery), rtol=0, atol=1e-6)
            fits, sent = fits + 1, sent + counting.sent
    finally:
        over.set()
        killer.join()
    print(f"{killed} kills in {fits} fits; {sent} orders sent, {quiet.sent} a fit without kills")
    assert killed == KILLS
    # Dask does what a lost worker had done again by itself; we send an order again where it gave up, or a new worker
    # has not met the bank.
    assert sent <= fits * quiet.sent + 10 * killed
    assert not list(tmp_path.glob("hubplugin-*"))


COORDINATOR = """
import sys
import numpy as np
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import hubplugin

if __name__ == "__main__":
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        hubplugin.fit(sys.argv[2], np.load(sys.argv[1]), "sn", iterations=30, executor=executor,
                      workspace=sys.argv[3])
"""


def test_a_coordinator_that_is_killed_is_taken_up(bank, gallery, parts, tmp_path):
    from tests.cluster.conftest import Serial

    np.save(tmp_path / "bank.npy", bank)
    (tmp_path / "program.py").write_text(COORDINATOR)
    work = tmp_path / "work"
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "bank.npy"), parts[8], str(work)],
        start_new_session=True,
    )
    while len(list(work.rglob("*.npz"))) < 5:
        assert program.poll() is None
        time.sleep(0.05)
    os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    done = len(list(work.rglob("*.npz")))
    whole, rest = Serial(), Serial()
    calm = hubplugin.fit(parts[8], bank, "sn", iterations=30, executor=whole)
    model = hubplugin.fit(parts[8], bank, "sn", iterations=30, executor=rest, workspace=work)
    np.testing.assert_allclose(model.offsets(gallery), calm.offsets(gallery), rtol=0, atol=1e-6)
    assert len(rest.found) == len(whole.found) - done
    assert not work.exists()


def test_processes_give_the_same_offsets(bank, gallery, parts, expected):
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        found = hubplugin.fit(parts[3], bank, executor=executor).offsets(gallery)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_a_process_that_dies_breaks_a_pool_and_is_told(bank, parts, tmp_path):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        pid = executor.submit(os.getpid).result()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match="the executor has lost its workers"):
            hubplugin.fit(parts[8], bank, executor=executor, workspace=tmp_path / "work")


def test_ray_gives_the_same_offsets(bank, gallery, parts, expected):
    ray = pytest.importorskip("ray", reason="pip install '.[ray]'")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        found = hubplugin.fit(parts[8], bank, executor=RayExecutor(num_cpus=1)).offsets(gallery)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        with pytest.raises(InputError, match=r"^targets, shard 0 .gone.npy.: there is no file [^\n]*$"):
            hubplugin.fit([str(Path(parts[1]).parent / "gone.npy")], bank, executor=RayExecutor())
    finally:
        ray.shutdown()
