"""How time and memory grow with targets, bank and dimensions.

    python -m benchmarks.growth

One pass (`is`) and the bare product, in turns: over four decades of targets (to 10 million), three of the bank and
three of d. Then the memory of a process that corrects a gallery of which it never holds more than a block.
Writes two tables of docs/speed.md.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track

from benchmarks.fit import TAU, bare
from benchmarks.tables import ROOT, machine, markdown, peak, write_table
from hubplugin import Compute, fit
from hubplugin.vectors import Vectors

PAGE = ROOT / "docs" / "speed.md"
MEMORY = (10_000, 100_000, 1_000_000, 10_000_000)
SIZES = {
    "targets": [(1_000, round(1_000 * x), 64) for x in np.logspace(0, 4, 9)],
    "bank": [(round(100 * x), 4_000, 64) for x in np.logspace(0, 3, 7)],
    "d": [(1_000, 4_000, round(8 * x)) for x in np.logspace(0, 3, 7)],
}
"""Of bank, targets and dimensions (m, n, d), by what grows."""

FIELDS = {"targets": "n", "bank": "m", "d": "d"}


class Repeated(Vectors):
    """As many targets as asked for, of which one block is held."""

    def __init__(self, block: np.ndarray, rows: int):
        super().__init__("targets", rows, block.shape[1])
        self._block = block

    def _raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        size = min(size, len(self._block))
        for start in range(0, self.rows, size):
            yield self._block[: min(size, self.rows - start)]


def measured(m: int, n: int, d: int) -> dict[str, float]:
    """Processor seconds of one pass and of the bare product: the fastest of up to five turns in half a minute."""
    rng = np.random.default_rng(0)
    bank, block = (rng.normal(size=(rows, d)).astype(np.float32) for rows in (m, min(n, 16_384)))
    targets, model = Repeated(block, n), fit(None, bank, "is", tau=TAU, compute=Compute("cpu"))
    taken: list[tuple[float, float]] = []
    while not taken or (len(taken) < 5 and sum(map(sum, taken)) < 30):
        start = time.process_time()
        for part in targets._raw_blocks(16_384):
            bare(part, bank)
        middle = time.process_time()
        model.offsets(targets, compute=Compute("cpu"))
        taken.append((middle - start, time.process_time() - middle))
    floor, seconds = np.min(np.array(taken), axis=0)
    return {"m": m, "n": n, "d": d, "floor": float(floor), "seconds": float(seconds)}


def slopes(series: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """d log(seconds) / d log(size) but for the lowest decade, where fixed costs still count."""
    found = {}
    for name, key in FIELDS.items():
        sizes, seconds = (np.log([row[field] for row in series[name][2:]]) for field in (key, "seconds"))
        found[name] = float(np.polyfit(sizes, seconds, 1)[0])
    return found


def memory(n: int) -> dict[str, int]:
    """MiB that a process takes beyond one block and one product, and how many of them are the offsets themselves."""
    command = [sys.executable, "-m", "benchmarks.growth", "--apart", str(n)]
    beyond = int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    return {"n": n, "mib": beyond, "offsets_mib": 4 * n >> 20}


def _beyond(n: int) -> int:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    bank, block = (rng.normal(size=(rows, 64)).astype(np.float32) for rows in (1_000, 16_384))
    bare(block, bank)
    before = peak()
    fit(None, bank, "is", tau=TAU, compute=Compute("cpu")).offsets(Repeated(block, n), compute=Compute("cpu"))
    return (peak() - before) >> 20


def main(apart: int = typer.Option(0, hidden=True)) -> None:
    if apart:
        print(_beyond(apart))
        return
    torch.set_num_threads(1)
    console = Console(stderr=True)
    series = {
        name: [measured(*size) for size in track(sizes, name, console=console, transient=True)]
        for name, sizes in SIZES.items()
    }
    steep, taken = slopes(series), [memory(n) for n in MEMORY]
    lines = [[name, f"{slope:.2f}"] for name, slope in steep.items()]
    about = f"{machine(1)}; `python -m benchmarks.growth`\n\n"
    write_table(PAGE, "growth", about + markdown(["time grows with", "to the power of"], lines))
    lines = [[f"{row['n']:,}", f"{row['mib']:,}", f"{row['offsets_mib']:,}"] for row in taken]
    write_table(PAGE, "memory", markdown(["targets", "MiB", "of which the offsets"], lines))


if __name__ == "__main__":
    typer.run(main)
