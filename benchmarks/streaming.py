"""An evaluation that fits no memory: every query against every target, in blocks.

    python -m benchmarks.streaming [--queries 100000] [--targets 1000000] [--dim 64]

Top 10 and true ranks in one pass over a memory-mapped gallery; prints the time and the peak of the memory, which counts
the pages of the mapped file that happen to be resident.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import typer
from rich.console import Console

from benchmarks.tables import machine, peak
from hubplugin.compute import Compute, TopK, TruthCounts, search
from hubplugin.metric import Metric
from hubplugin.progress import bars
from hubplugin.vectors import BLOCK_ROWS, as_vectors


def main(queries: int = 100_000, targets: int = 1_000_000, dim: int = 64, threads: int = 1) -> None:
    torch.set_num_threads(threads)
    rng = np.random.default_rng(0)
    asked = rng.normal(size=(queries, dim)).astype(np.float32)
    asked /= np.linalg.norm(asked, axis=1, keepdims=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "targets.npy"
        gallery = np.lib.format.open_memmap(path, "w+", np.float32, (targets, dim))
        for start in range(0, targets, BLOCK_ROWS):
            gallery[start : start + BLOCK_ROWS] = rng.normal(size=(min(BLOCK_ROWS, targets - start), dim))
        del gallery
        nearest, ranks = TopK(10), TruthCounts(np.arange(queries), np.arange(queries) % targets)
        with bars(Console(stderr=True)) as progress:
            compute, started = Compute("cpu", progress=progress), time.perf_counter()
            search(asked, as_vectors(path, "targets"), Metric.COSINE, compute, nearest, ranks)
            seconds = time.perf_counter() - started
    most = peak() / 2**20
    print(
        f"{queries:,} queries x {targets:,} targets, d {dim}: {seconds:.0f} s, peak {most:.0f} MiB, of which the file"
    )
    print(f"has {targets * dim * 4 / 2**20:.0f}; {machine(threads)}")


if __name__ == "__main__":
    typer.run(main)
