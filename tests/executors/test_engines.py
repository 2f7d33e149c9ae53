"""Real engines: processes, Dask, whose workers are killed, and Ray. HUBPLUGIN_KILLS says how many kills."""

import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

import hubplugin
from hubplugin.errors import ClusterError

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("HUBPLUGIN_KILLS", "3"))


@pytest.fixture(scope="module")
def dask():
    distributed = pytest.importorskip("distributed", reason="pip install distributed")
    from dask import config

    with (
        # A local cluster closes the nanny of a worker that is not there so long after it was killed: it may have been
        # killed again.
        config.set(
            {
                "distributed.deploy.lost-worker-timeout": "1h",
                "distributed.scheduler.allowed-failures": 20,
            }
        ),
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            memory_limit="2GiB",
            dashboard_address=":0",
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


@pytest.mark.filterwarnings("ignore")
def test_workers_that_are_killed_at_random_change_nothing(
    dask, bank, gallery, parts, expected
):
    killed, over = 0, threading.Event()

    def kill():
        nonlocal killed
        dice = random.Random(7)
        while killed < KILLS and not over.is_set():
            over.wait(dice.uniform(0.2, 3.0))
            # A nanny gives up a worker that dies while it starts.
            nannies = [
                each
                for each in dask.cluster.workers.values()
                if each.status.name == "running"
            ]
            alive = [
                each.process.pid
                for each in nannies
                if each.process.status.name == "running"
            ]
            if alive:
                os.kill(dice.choice(alive), signal.SIGKILL)
                killed += 1

    killer = threading.Thread(target=kill)
    killer.start()
    fits = 0
    try:
        while killer.is_alive():
            model = hubplugin.fit(
                parts[8], bank, executor=dask.get_executor(pure=False)
            )
            np.testing.assert_allclose(
                model.offsets(gallery), expected, rtol=0, atol=1e-5
            )
            fits += 1
    finally:
        over.set()
        killer.join()
    print(f"{killed} kills in {fits} fits")
    assert killed == KILLS


def test_a_process_that_dies_breaks_a_pool_and_is_told(bank, parts):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        pid = executor.submit(os.getpid).result()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match="the executor has lost its workers"):
            hubplugin.fit(parts[8], bank, executor=executor)


@pytest.mark.parametrize("engine", ["processes", "dask", "ray"])
def test_the_example_runs_on_each_engine(engine):
    example = Path(__file__).parents[2] / "examples" / "executor_fit.py"
    ran = subprocess.run(
        [sys.executable, example, engine], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    told = ran.stdout.splitlines()[-1]
    assert told.startswith("largest difference from a fit in one process: ")
    assert float(told.rpartition(" ")[2]) < 1e-5
