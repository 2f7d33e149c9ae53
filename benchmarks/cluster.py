"""A fit in shards beside a fit in one process: time, memory of a worker, and what a sample of the targets costs.

    python -m benchmarks.cluster [--targets 1000000] [--dim 384] [--bank 2000] [--shards 8] [--workers 2]
        [--turns 1] [--memory 1GiB]
    python -m benchmarks.cluster --targets 10000000 --dim 64 --no-alone        # in shards only
    python -m benchmarks.cluster --sample 100000 --sample 200000               # their error, beside all targets

Vectors are drawn around 200 centres of unequal weight, which makes hubs, shard by shard: nothing is held here.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.lib.format import open_memmap

import hubplugin
from hubplugin.cluster import DaskExecutor

CENTRES, BLOCK = 200, 16_384
ONE = {"OMP_NUM_THREADS": "1"}
"""Each worker has one thread; the one process has as many as there are workers."""


def drawn(rng: np.random.Generator, centres: np.ndarray, rows: int) -> np.ndarray:
    weights = 1 / np.arange(1, len(centres) + 1)
    near = centres[rng.choice(len(centres), rows, p=weights / weights.sum())]
    vectors = near + 0.8 / np.sqrt(centres.shape[1]) * rng.normal(size=near.shape).astype(np.float32)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def written(folder: Path, targets: int, dim: int, shards: int) -> np.ndarray:
    """Writes gallery.npy; returns the centres."""
    centres = np.random.default_rng(0).normal(size=(CENTRES, dim)).astype(np.float32)
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    gallery = open_memmap(folder / "gallery.npy", "w+", np.float32, (targets, dim))
    for start in range(0, targets, BLOCK):
        rows = min(BLOCK, targets - start)
        gallery[start : start + rows] = drawn(np.random.default_rng([1, start]), centres, rows)
    return centres


def held_by(pid: int) -> tuple[int, int]:
    """Peak of a process in MiB, and what of it now is no page of a file."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) >> 10, int(lines["RssAnon"].split()[0]) >> 10


class Watched:
    """The largest anonymous memory of some processes, looked at four times a second."""

    def __init__(self, pids: list[int]):
        self.pids, self.largest, self._over = pids, 0, threading.Event()
        self.before = max(held_by(pid)[1] for pid in pids)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.25):
            self.largest = max(self.largest, *(held_by(pid)[1] for pid in self.pids))

    def told(self) -> str:
        self._over.set()
        self._thread.join()
        return f"{self.before} MiB of a worker before, at most {self.largest} MiB at work, pages of files aside"


class Steps:
    """Seconds of processors by the step that a fit tells its progress in."""

    def __init__(self, pids: list[int]):
        self.seconds: dict[str, float] = {}
        self._pids, self._last = pids, processor(pids)

    def __call__(self, what: str, done: int, total: int) -> None:
        now, name = processor(self._pids), what.split(",")[0].split(" of ")[0]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def told(self) -> str:
        return "; ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())


def processor(pids: list[int]) -> float:
    """Seconds of a processor that this process and `pids` have had, which others on the machine do not move."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    ticks = sum(int(field[11]) + int(field[12]) for field in fields)
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def timed(
    what: str, pids: list[int], fit: Callable[[], hubplugin.OffsetModel]
) -> tuple[hubplugin.OffsetModel, float, float]:
    """The model, and seconds by the clock and of processors."""
    started, before = time.perf_counter(), processor(pids)
    model = fit()
    seconds, busy = time.perf_counter() - started, processor(pids) - before
    print(f"{what}: {seconds:.1f} s, of processors {busy:.1f} s; load {os.getloadavg()[0]:.1f}", flush=True)
    return model, seconds, busy


def main(
    targets: int = 1_000_000,
    dim: int = 384,
    bank: int = 2000,
    shards: int = 8,
    workers: int = 2,
    turns: int = 1,
    method: str = "blend",
    alone: bool = True,
    memory: str = "1GiB",
    sample: Annotated[list[int] | None, typer.Option()] = None,
    folder: Path | None = None,
) -> None:
    from distributed import Client, LocalCluster

    with tempfile.TemporaryDirectory(dir=folder) as place:
        centres = written(Path(place), targets, dim, shards)
        queries, gallery = drawn(np.random.default_rng(2), centres, bank), Path(place) / "gallery.npy"
        print(f"{targets:,} targets x {dim}, bank {bank:,}, {shards} shards, {workers} workers, {method}", flush=True)
        cluster = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0", memory_limit=0, env=ONE)
        with cluster, Client(cluster) as client:
            executor = DaskExecutor(client)
            pids = list(client.run(os.getpid).values())
            client.run(_import)
            torch.set_num_threads(workers)

            def fitted(steps: Steps | None = None, **more: Any) -> hubplugin.OffsetModel:
                compute = hubplugin.Compute(memory=memory, progress=steps)
                return hubplugin.fit(gallery, queries, method, compute=compute, **more)

            def by_shards(**more: Any) -> hubplugin.OffsetModel:
                return fitted(executor=executor, shards=shards, **more)

            whole = None
            for _ in range(turns):
                watched = Watched(pids)
                steps = Steps(pids)
                whole, together, busy = timed("in shards", pids, lambda steps=steps: by_shards(steps=steps))
                print(f"{watched.told()}; of processors by step: {steps.told()}", flush=True)
                if alone:
                    one, single, alone_busy = timed("one process", [], fitted)
                    clock, processors = together / single, busy / alone_busy
                    print(
                        f"in shards / one process: {clock:.2f} by the clock, {processors:.2f} of processors", flush=True
                    )
                    print(f"gallery: {one.gallery} and {whole.gallery}", flush=True)
            for size in sample or ():
                some, _, _ = timed(f"sample of {size:,}", pids, lambda size=size: by_shards(sample=size))
                drawn_rows = np.load(gallery, mmap_mode="r")[:: max(targets // 50_000, 1)]
                assert whole is not None
                a, b = whole.offsets(drawn_rows), some.offsets(drawn_rows)
                error, spread = np.abs(a - b), a.std()
                print(f"sample {size:,}: differs by {error.mean():.2e} on average, {error.max():.2e} at most;", end=" ")
                print(f"deviation {spread:.2e}, correlation {np.corrcoef(a, b)[0, 1]:.5f}", flush=True)


def _import() -> None:
    import hubplugin.cluster  # noqa: F401


if __name__ == "__main__":
    typer.run(main)
