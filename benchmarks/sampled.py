"""What a gallery for which there is no room costs, and how far its offsets are off: `python -m benchmarks.sampled`.

The gallery is made: clusters of unit vectors. Times are of the processor, as multiples of one bare product of bank and
gallery. `--targets 1000000 --bank 15000 --sample 200000 --memory 1GiB` is the default's case at full size, of which the
other defaults are a small copy. Offsets are compared with those of a fit that held all, unless --no-exact.
"""

from __future__ import annotations

import logging
import time

import numpy as np
import torch
import typer

import hubplugin
from benchmarks.contenders import bare
from benchmarks.tables import machine

DIM, TAU = 384, 0.05


def clustered(rows: int, centres: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Unit vectors around `centres`, in float32 throughout: [rows, d]."""
    found = rng.standard_normal((rows, DIM), dtype=np.float32)
    found *= 1.5 / DIM**0.5
    found += centres[rng.integers(len(centres), size=rows)]
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    return found


def offsets(targets: np.ndarray, bank: np.ndarray, sample: int | str, memory: str) -> tuple[np.ndarray, float]:
    compute, start = hubplugin.Compute("cpu", memory), time.process_time()
    model = hubplugin.fit(targets, bank, "sn", tau=TAU, sample=sample, compute=compute)
    return model.offsets(targets, compute=compute), time.process_time() - start


def main(
    targets: int = 200_000,
    bank: int = 3_000,
    sample: int = 40_000,
    memory: str = "100MB",
    exact: bool = True,
    threads: int = 1,
) -> None:
    torch.set_num_threads(threads)
    logging.basicConfig(format="%(message)s")
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((200, DIM), dtype=np.float32) / DIM**0.5
    queries, gallery = (clustered(rows, centres, rng) for rows in (bank, targets))
    print(f"{machine(threads)}; {targets:,} targets, bank {bank:,}, d {DIM}, sample {sample:,}, {memory}", flush=True)
    start = time.process_time()
    bare((gallery, queries))
    product = time.process_time() - start
    found, seconds = offsets(gallery, queries, sample, memory)
    print(f"{seconds / product:.2f} times the product ({product:.1f} s)", flush=True)
    if exact:
        true, seconds = offsets(gallery, queries, "all", "4GiB")
        error = np.abs(found - true)
        print(f"all held: {seconds / product:.2f} times the product")
        mean, most = error.mean() / true.std(), error.max() / true.std()
        print(f"off by {mean:.2%} of the deviation on average, {most:.1%} at most")


if __name__ == "__main__":
    typer.run(main)
