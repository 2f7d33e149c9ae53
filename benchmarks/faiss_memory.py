"""How much memory `upgrade` and `apply` take: peak resident set of a process that does nothing else.

    python -m benchmarks.faiss_memory [--gigabytes 2.5] [--folder FOLDER]

`upgrade` in memory is compared with the size of its index, `apply` writes a model into files of the given
size, Flat and IVF.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
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


def write(kind: str, rows: int, path: Path) -> None:
    index = faiss.index_factory(D, kind, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors(50_000, 0))
    for start in range(0, rows, 100_000):
        index.add(vectors(min(100_000, rows - start), start + 1))
    faiss.write_index(index, str(path))


def main(
    gigabytes: Annotated[float, typer.Option(help="Size of the files for apply.")] = 2.5,
    folder: Annotated[Path | None, typer.Option(help="Where the files are written, and deleted again.")] = None,
) -> None:
    import hubplugin

    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
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
