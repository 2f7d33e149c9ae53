"""What bfloat16 products would cost the offsets: `python -m benchmarks.bfloat16`.

Similarities of code_search, rounded in several ways and then treated in float64, beside exact ones. Bank and targets
are moved by their means first, so that less is rounded off; what was moved is added again exactly. Prints the time of
the product beside a float32 one, the largest error of the offsets, and for how many queries the ten best stay the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
import typer
from scipy.special import logsumexp

from benchmarks.tables import CODE_SEARCH, machine


def rounded(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.float32)).bfloat16()


def similarities(bank: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    """s [n, m] in float64, by what was rounded."""
    b, t = bank.mean(axis=0), targets.mean(axis=0)
    moved_bank, moved = bank - b, targets - t
    rest = (moved @ b)[:, None] + (bank @ t)[None, :]
    exact_bank, exact = rounded(moved_bank).double(), rounded(moved).double()
    return {
        "exact": targets @ bank.T,
        "operands and result in bfloat16": (rounded(targets) @ rounded(bank).T).double().numpy(),
        "the same, moved": (rounded(moved) @ rounded(moved_bank).T).double().numpy() + rest,
        "moved, result in float32": (exact @ exact_bank.T).numpy() + rest,
        "moved, only the bank rounded": moved @ exact_bank.numpy().T + rest,
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


def fastest(multiply: Callable[[], torch.Tensor]) -> float:
    seconds = []
    for _ in range(7):
        start = time.process_time()
        multiply()
        seconds.append(time.process_time() - start)
    return min(seconds)


def main(rows: int = 1_500, queries: int = 500) -> None:
    torch.set_num_threads(1)
    read = [np.load(CODE_SEARCH / f"{part}.npy")[:rows] for part in ("bank_queries", "test_targets", "test_queries")]
    bank, targets, asked = (x / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True) for x in read)
    t, b = torch.from_numpy(targets[:512]).float(), torch.from_numpy(bank).float().T
    half = rounded(targets[:512]), rounded(bank).T
    print(machine(1))
    print(f"a product takes {fastest(lambda: half[0] @ half[1]) / fastest(lambda: t @ b):.2f} of a float32 one")
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
