"""What products of eight-bit integers would save, and cost the offsets: `python -m benchmarks.integers`.

A number is its row's largest over 127 times a high half, and a 254th of that times a low one. Prints the time of a tile
beside a float32 product, in turns, by the size of the bank; then how far offsets of code_search are from float64's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
import typer

from benchmarks.bfloat16 import METHODS
from benchmarks.tables import CODE_SEARCH, machine


def halves(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The high half [b, d], low and high half side by side [b, 2 d], and the scale [b, 1]."""
    scale = rows.abs().amax(dim=1, keepdim=True) / 127
    high = (rows / scale).round()
    low = ((rows / scale - high) * 254).round()
    return high.to(torch.int8), torch.cat([low, high], dim=1).to(torch.int8), scale


def product(targets: torch.Tensor, bank: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The tile [b, m]: halves of `targets` are formed, those of the bank [hi], [hi lo] are there."""
    high, both, scale = halves(targets)
    small = torch._int_mm(both, bank[1].T)
    small.add_(torch._int_mm(high, bank[0].T), alpha=254)
    return small.float().mul_(bank[2].T / 254).mul_(scale)


def swapped(bank: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    high, both, scale = halves(bank)
    return high, both.roll(bank.shape[1], dims=1).contiguous(), scale


def times(m: int) -> str:
    bank, targets = torch.randn(m, 384), torch.randn((2 << 20) // m, 384)
    ready = swapped(bank)
    ways: dict[str, Callable[[], object]] = {
        "float32": lambda: targets @ bank.T,
        "halves of the targets, products, scaling": lambda: product(targets, ready),
        "halves of the bank, once": lambda: swapped(bank),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(10):
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            best[way] = min(best[way], time.perf_counter() - start)
    return ", ".join(f"{way} {best[way] / best['float32']:.2f}" for way in ways)


def main(rows: int = 1_500, threads: int = 1) -> None:
    torch.set_num_threads(threads)
    print(machine(threads))
    for m in (2_000, 15_000):
        print(f"bank of {m:,}: {times(m)}")
    read = [np.load(CODE_SEARCH / f"{part}.npy")[:rows].astype(np.float32) for part in ("bank_queries", "test_targets")]
    bank, targets = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in read)
    exact = targets.astype(np.float64) @ bank.T.astype(np.float64)
    found = product(torch.from_numpy(targets), swapped(torch.from_numpy(bank))).double().numpy()
    print(
        f"similarities off by {np.abs(found - exact).mean():.1e} in the mean, {np.abs(found - exact).max():.1e} at most"
    )
    for name, method in METHODS.items():
        error = method(found) - method(exact)
        print(f"{name}: offsets off by at most {np.abs(error - error.mean()).max():.1e}")


if __name__ == "__main__":
    typer.run(main)
