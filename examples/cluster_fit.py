"""Fits on a cluster: the gallery lies in parts that no process reads as a whole.

    pip install '.[cluster]'
    python examples/cluster_fit.py            # starts a cluster of two workers on this machine
    python examples/cluster_fit.py tcp://scheduler:8786 's3://bucket/parts/*.npy' bank.npy

The offsets are those of a fit in one process; `model.save(...)` keeps the model for those who search.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import hubplugin
from hubplugin.cluster import DaskExecutor, dask_cluster
from hubplugin.progress import bars

DATA = Path(__file__).parent / "data"


def main() -> None:
    with ExitStack() as held:
        if len(sys.argv) == 4:
            address, parts, bank = sys.argv[1:]
            executor = held.enter_context(dask_cluster(address))
        else:
            from distributed import Client, LocalCluster

            cluster = held.enter_context(LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0"))
            executor = DaskExecutor(held.enter_context(Client(cluster)))
            folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
            for number, part in enumerate(np.array_split(np.load(DATA / "test_targets.npy"), 5)):
                np.save(folder / f"part-{number}.npy", part)
            parts, bank = str(folder / "part-*.npy"), str(DATA / "bank_queries.npy")
        progress = held.enter_context(bars())
        model = hubplugin.fit(parts, bank, executor=executor, compute=hubplugin.Compute(progress=progress))
    print(model)
    if len(sys.argv) == 1:
        gallery = DATA / "test_targets.npy"
        difference = np.abs(model.offsets(gallery) - hubplugin.fit(gallery, bank).offsets(gallery)).max()
        print(f"largest difference from a fit in one process: {difference:.1e}")


if __name__ == "__main__":
    main()
