"""How much memory `upgrade` and `apply` take: peak resident set of a process that does nothing else.

    python -m benchmarks.faiss_memory [--gigabytes 2.5] [--folder FOLDER]
    python -m benchmarks.faiss_memory --rows 250000 --rows 1000000 [--folder FOLDER]

The second is of inverted lists alone, of so many clustered vectors of 64 dimensions: processor seconds of adding the
vectors, of `upgrade` and of `apply`, and the peak of each less what the process had before and the index itself.

`upgrade` in memory is compared with the size of its index, `apply` writes a model into files of the given
size, Flat and IVF.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import faiss
import numpy as np
import typer

D = 128
ROWS = {"SQ8": 3_200_000, "IVF64,SQ8": 3_200_000, "HNSW16": 500_000, "PQ32x4fs": 6_400_000, "IVF64,PQ32x4fs": 6_400_000}
PEAK = """
def peak():  # not ru_maxrss, which a child has from its parent
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
"""
FILE = """
import hubplugin, hubplugin_faiss, torch, faiss
torch.set_num_threads(1); faiss.omp_set_num_threads(1)
model = hubplugin.load("model.hub")
hubplugin.apply(hubplugin_faiss.open_store("big.faiss"), model, compute=hubplugin.Compute(memory="64MiB"))
print(peak())
"""
MEMORY = """
import os, hubplugin_faiss, faiss, numpy as np
faiss.omp_set_num_threads(1)
index = faiss.read_index("small.faiss")
def resident(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
offsets = np.linspace(-0.1, 0.1, index.ntotal, dtype=np.float32)
before = resident() - os.path.getsize("small.faiss")
upgraded = hubplugin_faiss.upgrade(index, offsets)
print(peak() - before)
"""


TIMED = """
import os, sys, time, faiss, hubplugin, hubplugin_faiss, torch
torch.set_num_threads(1); faiss.omp_set_num_threads(1)
model, size = hubplugin.load("model.hub"), os.path.getsize("big.faiss")
if sys.argv[1] == "upgrade":
    index = faiss.read_index("big.faiss")
    before, start = peak(), time.process_time()
    index = hubplugin_faiss.upgrade(index, model)
else:
    before, start = peak() + size, time.process_time()  # a file of less than 1 GiB is read
    hubplugin.apply(hubplugin_faiss.open_store("big.faiss"), model)
seconds, beyond = time.process_time() - start, peak() - before - size
print(f"{seconds:.1f} s, {beyond / 2**20:.0f} MiB")
"""
KINDS = "IVF1024,SQ8", "IVF1024,PQ32x4fs"


def run(program: str, folder: Path) -> int:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PEAK + program], cwd=folder, capture_output=True, text=True
    )
    if result.returncode:
        raise SystemExit(result.stderr)
    return int(result.stdout)


def vectors(rows: int, seed: int) -> np.ndarray:
    rows_ = np.random.default_rng(seed).normal(size=(rows, D)).astype(np.float32)
    return rows_ / np.linalg.norm(rows_, axis=1, keepdims=True)


def clustered(rows: int, seed: int, d: int = 64) -> np.ndarray:
    """Unit vectors [rows, d] about a thousand centres."""
    rng, centres = np.random.default_rng(seed), np.random.default_rng(0).normal(size=(1000, d))
    found = (centres[rng.integers(0, 1000, rows)] + 0.7 * rng.normal(size=(rows, d))).astype(np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def print_lists(rows: int, place: Path) -> None:
    """Of `rows` vectors in inverted lists: a line for each type."""
    import hubplugin

    hubplugin.fit(clustered(20_000, 8), clustered(500, 9), "nnn").save(place / "model.hub")
    for kind in KINDS:
        index = faiss.index_factory(64, kind, faiss.METRIC_INNER_PRODUCT)
        index.train(clustered(50_000, 1))
        index.nprobe, start = 16, time.process_time()
        for first in range(0, rows, 100_000):
            index.add(clustered(min(100_000, rows - first), 2 + first))
        added = time.process_time() - start
        faiss.write_index(index, str(place / "big.faiss"))
        size, command = (place / "big.faiss").stat().st_size, [sys.executable, "-W", "ignore", "-c", PEAK + TIMED]
        told = [
            f"{what} {subprocess.run([*command, what], cwd=place, capture_output=True, text=True, check=True).stdout}"
            for what in ("upgrade", "apply")
        ]
        text = "; ".join(line.strip() for line in told)
        print(f"{kind:18} {rows:9,} vectors, {size / 2**20:5.0f} MiB: add {added:.1f} s; {text}", flush=True)


def write(kind: str, rows: int, path: Path) -> None:
    index = faiss.index_factory(D, kind, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors(50_000, 0))
    for start in range(0, rows, 100_000):
        index.add(vectors(min(100_000, rows - start), start + 1))
    faiss.write_index(index, str(path))


def main(
    gigabytes: Annotated[float, typer.Option(help="Size of the files for apply.")] = 2.5,
    folder: Annotated[Path | None, typer.Option(help="Where the files are written, and deleted again.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Of inverted lists alone, of so many vectors.")] = None,
) -> None:
    import hubplugin

    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        faiss.omp_set_num_threads(1)
        for count in rows or ():
            print_lists(count, place)
        if rows:
            return
        hubplugin.fit(vectors(1000, 8), vectors(64, 9), "nnn", k=4).save(place / "model.hub")
        for kind in ("Flat", "SQ8", "IVF64,Flat", "IVF64,SQ8", "HNSW16", "PQ32x4fs", "IVF64,PQ32x4fs"):
            write(kind, ROWS.get(kind, 800_000), place / "small.faiss")
            size, peak = (place / "small.faiss").stat().st_size, run(MEMORY, place)
            print(f"upgrade       {kind:12} {size / 2**20:8.0f} MiB index, peak {peak / size:.2f}x", flush=True)
        for kind in ("Flat", "IVF1024,Flat"):
            write(kind, int(gigabytes * 2**30 / 4 / D), place / "big.faiss")
            size, peak = (place / "big.faiss").stat().st_size, run(FILE, place)
            print(f"apply  {kind:12} {size / 2**20:8.0f} MiB file,  peak {peak / 2**20:.0f} MiB", flush=True)
            (place / "out.faiss").unlink()


if __name__ == "__main__":
    typer.run(main)
