"""What bfloat16 products would cost the offsets: `python -m benchmarks.bfloat16`.

Similarities of code_search, rounded in several ways and then treated in float64, beside exact ones. Bank and targets
are moved by their means first, so that less is rounded off; what was moved is added again exactly. High and low halves
of a number are its bfloat16, and that of what is left. Prints the time of products beside a float32 one, the largest
error of the offsets, and for how many queries the ten best stay the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import typer
from scipy.special import logsumexp

from benchmarks.tables import CODE_SEARCH, machine


def rounded(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.float32)).bfloat16()


def halves(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high = rounded(array).double().numpy()
    return high, rounded(array - high).double().numpy()


def similarities(bank: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    """s [n, m] in float64, by what was rounded."""
    b, t = bank.mean(axis=0), targets.mean(axis=0)
    moved_bank, moved = bank - b, targets - t
    (high, low), (high_bank, low_bank) = halves(targets), halves(bank)
    rest = (moved @ b)[:, None] + (bank @ t)[None, :]
    exact_bank, exact = rounded(moved_bank).double(), rounded(moved).double()
    return {
        "exact": targets @ bank.T,
        "operands and result in bfloat16": (rounded(targets) @ rounded(bank).T).double().numpy(),
        "the same, moved": (rounded(moved) @ rounded(moved_bank).T).double().numpy() + rest,
        "moved, result in float32": (exact @ exact_bank.T).numpy() + rest,
        "moved, only the bank rounded": moved @ exact_bank.numpy().T + rest,
        "two products, of the targets' halves": (high + low) @ high_bank.T,
        "three products, of high and low halves": (high + low) @ high_bank.T + high @ low_bank.T,
    }


def sinkhorn(s: np.ndarray, tau: float) -> np.ndarray:
    x, log_beta = s / tau, np.zeros(len(s))
    for _ in range(10):
        log_alpha = -logsumexp(x + log_beta[:, None], axis=0)
        log_beta = -logsumexp(x + log_alpha, axis=1)
    return tau * log_beta


METHODS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "is, tau .05": lambda s: -0.05 * logsumexp(s / 0.05, axis=1),
    "sn, tau .05": lambda s: sinkhorn(s, 0.05),
    "sn, tau .01": lambda s: sinkhorn(s, 0.01),
    "nnn k=16": lambda s: -0.5 * np.partition(s, s.shape[1] - 16, axis=1)[:, -16:].mean(axis=1),
}


def product_times() -> str:
    """Of a tile of 8 MiB, in turns, by the size of the bank. With float32 results torch rounds only the operands."""
    found = []
    for m in (2_000, 15_000):
        bank, targets = torch.randn(m, 384), torch.randn((2 << 20) // m, 384)
        out, half = torch.empty(len(targets), m), (targets.bfloat16(), bank.bfloat16().T)
        ways: dict[str, Callable[[], object]] = {
            "float32": partial(torch.mm, targets, bank.T, out=out),
            "bfloat16": partial(torch.mm, *half),
            "its result in float32": partial(through_bfloat16, targets, bank, out, 1),
            "three of them": partial(through_bfloat16, targets, bank, out, 3),
        }
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(15):
            for way, multiply in ways.items():
                start = time.process_time()
                multiply()
                best[way] = min(best[way], time.process_time() - start)
        beside = ", ".join(f"{way} {best[way] / best['float32']:.2f}" for way in list(ways)[1:])
        found.append(f"bank of {m:,}: beside a float32 product, {beside}")
    return "\n".join(found)


def through_bfloat16(targets: torch.Tensor, bank: torch.Tensor, out: torch.Tensor, products: int) -> None:
    """What as many products of halves cost; of the same numbers, since time alone is asked for."""
    torch.set_float32_matmul_precision("medium")
    torch.mm(targets, bank.T, out=out)
    for _ in range(products - 1):
        out.addmm_(targets, bank.T)
    torch.set_float32_matmul_precision("highest")


def main(rows: int = 1_500, queries: int = 500) -> None:
    torch.set_num_threads(1)
    read = [np.load(CODE_SEARCH / f"{part}.npy")[:rows] for part in ("bank_queries", "test_targets", "test_queries")]
    bank, targets, asked = (x / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True) for x in read)
    print(machine(1))
    print(product_times())
    found, scores = similarities(bank, targets), asked[:queries] @ targets.T
    for name, method in METHODS.items():
        exact = method(found["exact"])
        best = np.argsort(-(scores + exact), axis=1)[:, :10]
        for way, s in list(found.items())[1:]:
            offsets = method(s)
            error = (offsets - exact) - (offsets - exact).mean()
            same = (np.argsort(-(scores + offsets), axis=1)[:, :10] == best).all(axis=1).mean()
            print(f"{name}; {way}: offsets off by at most {np.abs(error).max():.0e}, ten best the same {same:.1%}")


if __name__ == "__main__":
    typer.run(main)
