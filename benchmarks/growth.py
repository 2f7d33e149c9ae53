"""How memory grows with the gallery: `python -m benchmarks.growth`.

A process corrects a gallery of which it never holds more than a block. Writes a table of docs/measurements/methods.md.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.fit import CPU, TAU, bare
from benchmarks.tables import ROOT, machine, markdown, peak, write_table
from hubplugin import fit
from hubplugin.vectors import Vectors

TARGETS = (10_000, 100_000, 1_000_000, 10_000_000)
BANK, DIM = 1_000, 64


class Repeated(Vectors):
    """As many targets as asked for, of which one block is held."""

    def __init__(self, block: np.ndarray, rows: int):
        super().__init__("targets", rows, block.shape[1])
        self._block = block

    def raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        size = min(size, len(self._block))
        for start in range(0, self.rows, size):
            yield self._block[: min(size, self.rows - start)]


def beyond(n: int) -> int:
    """MiB that this process takes beyond one block and one product."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    bank, block = (
        rng.normal(size=(rows, DIM)).astype(np.float32) for rows in (BANK, 16_384)
    )
    bare(block, bank)
    before = peak()
    fit(None, bank, "is", tau=TAU, compute=CPU).offsets(Repeated(block, n), compute=CPU)
    return (peak() - before) >> 20


def main() -> None:
    if sys.argv[1:]:
        print(beyond(int(sys.argv[1])))
        return
    lines = []
    for n in TARGETS:
        command = [sys.executable, "-m", "benchmarks.growth", str(n)]
        taken = int(
            subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout
        )
        lines.append([f"{n:,}", f"{taken:,}", f"{4 * n >> 20:,}"])
    table = markdown(["targets", "MiB", "part for the offsets"], lines)
    print(table + f"\n{machine(1)}")
    write_table(ROOT / "docs" / "measurements" / "methods.md", "memory", table)


if __name__ == "__main__":
    main()
