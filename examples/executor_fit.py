"""Fit on the workers of an executor. The gallery is stored in parts, and no process reads all of it.

    python examples/executor_fit.py            # two processes of this machine
    python examples/executor_fit.py dask       # pip install distributed: a cluster of two workers on this machine
    python examples/executor_fit.py ray        # pip install ray

The offsets are the same as those of a fit in one process. `model.save(...)` saves the model for searches.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import hubplugin

DATA = Path(__file__).parent / "data"


class RayExecutor(Executor):
    """The workers of this process's Ray cluster. options: arguments of `ray.remote`, such as num_gpus=1."""

    def __init__(self, **options: Any):
        import ray

        self._remote: Any = ray.remote(**options)(call) if options else ray.remote(call)

    def submit(self, fn: Any, /, *args: Any, **named: Any) -> Future[Any]:
        return self._remote.remote(fn, args, named).future()  # type: ignore[no-any-return]


def call(fn: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return fn(*args, **named)


@contextmanager
def workers(engine: str) -> Iterator[Executor]:
    if engine == "dask":
        from distributed import Client, LocalCluster

        with (
            LocalCluster(
                n_workers=2, threads_per_worker=1, dashboard_address=":0"
            ) as cluster,
            Client(cluster) as client,
        ):
            yield client.get_executor(pure=False)
    elif engine == "ray":
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield RayExecutor()
        ray.shutdown()
    else:
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
            yield executor


def main(engine: str) -> None:
    gallery, bank = np.load(DATA / "test_targets.npy"), DATA / "bank_queries.npy"
    with tempfile.TemporaryDirectory() as folder, workers(engine) as executor:
        for number, part in enumerate(np.array_split(gallery, 5)):
            np.save(Path(folder) / f"part-{number}.npy", part)
        model = hubplugin.fit(f"{folder}/part-*.npy", bank, executor=executor)
    print(model)
    difference = np.abs(
        model.offsets(gallery) - hubplugin.fit(gallery, bank).offsets(gallery)
    ).max()
    print(f"largest difference from a fit in one process: {difference:.1e}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "processes")
