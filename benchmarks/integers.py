"""What products of eight-bit integers save, and cost the offsets: `python -m benchmarks.integers`.

Prints the time of a tile beside that of its float32 product, in turns, by the size of the bank, and of what else a tile
takes; then how far offsets are from float64's, and for how many queries the ten best are others than by
float32 and float64, and for how many they would be by some offsets that are as near.
`--small`: with integers for sets of fewer targets, too, than they are used for. `--anywhere`: on a processor without
such products, too, by float32, which forms the same sums; no times then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import typer

import hubplugin
from benchmarks.tables import EXAMPLES, SHARED, machine
from hubplugin.compute import integers, largest, similarities
from hubplugin.compute.integers import IntegerBank, are_fast

METHODS: dict[str, tuple[str, dict[str, float]]] = {
    "is": ("is", {"tau": 0.05}),
    "sn": ("sn", {"tau": 0.05}),
    "nnn": ("nnn", {"k": 16}),
    "csls": ("csls", {}),
    "blend": ("blend", {}),
}


def sets() -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """Name, bank, targets and queries of every data set that is there."""
    for name, folder, *files in (
        ("examples", EXAMPLES, "bank_queries", "test_targets", "test_queries"),
        ("code_search", SHARED / "code_search", "bank_queries", "test_targets", "test_queries"),
        ("debian", SHARED / "debian", "queries_a", "targets", "queries_b"),
        ("tldr_ko", SHARED / "tldr_ko", "queries", "targets", "queries"),
        ("tldr_log", SHARED / "tldr_log", "wordings", "targets", "wordings"),
    ):
        if (folder / f"{files[0]}.npy").exists():
            bank, targets, queries = (unit(folder / f"{file}.npy") for file in files)
            yield name, bank[:4_000], targets[:4_000], queries[-1_000:]


def unit(path: Path) -> np.ndarray:
    rows = np.load(path).astype(np.float32)
    normal: np.ndarray = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return normal


def times(m: int) -> str:
    bank, targets = torch.randn(m, 384) / 384**0.5, torch.randn((2 << 20) // m, 384) / 384**0.5
    out, bias, ready = torch.empty(len(targets), m), torch.zeros(m), IntegerBank(bank)
    exponents = (targets @ bank.T).mul_(20)
    ways: dict[str, Callable[[], object]] = {
        "float32": lambda: torch.addmm(bias, targets, bank.T, out=out),
        "integers": lambda: ready.product(bias, targets, out),
        "halves of the bank, once": lambda: IntegerBank(bank),
        "exponential": lambda: torch.exp(exponents, out=out),
        "sums": lambda: out.sum(1),
        "the 16 largest": lambda: largest(exponents, 16),
        "the 128 largest": lambda: largest(exponents, 128),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(10):
        for way, run in ways.items():
            start = time.process_time()
            run()
            best[way] = min(best[way], time.process_time() - start)
    return ", ".join(f"{way} {best[way] / best['float32']:.2f}" for way in ways)


def form_in_float32() -> None:
    """Lets sums of integers be formed in float32, which is exact: of 768 numbers below 128 they are below 2^24."""

    def sums(self: integers._AsTheyLie, high: torch.Tensor, both: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        small, large = (one.float() @ other.float().T for one, other in ((both, self._both), (high, self._high)))
        return out.copy_(small.double().add_(large, alpha=integers.LOW)).mul_(self._scale)

    integers._AsTheyLie.sums = sums
    integers._flags = frozenset
    similarities.are_fast = lambda: True


def offsets(bank: np.ndarray, targets: np.ndarray, name: str, precision: str) -> np.ndarray:
    method, parameters = METHODS[name]
    compute = hubplugin.Compute("cpu", precision=precision)  # type: ignore[arg-type]
    return hubplugin.fit(targets, bank, method, compute=compute, **parameters).offsets(targets, compute=compute)


def main(threads: int = 1, small: bool = False, anywhere: bool = False) -> None:
    torch.set_num_threads(threads)
    print(machine(threads))
    if anywhere:
        form_in_float32()
    elif not are_fast():
        raise SystemExit("this processor has no AVX-512 with VNNI: integers are not multiplied; use --anywhere")
    for m in () if anywhere else (2_000, 15_000):
        print(f"bank of {m:,}: {times(m)}")
    if small:
        similarities.MANY_TARGETS = 1
    for data, bank, targets, queries in sets():
        scores = queries @ targets.T
        for name in METHODS:
            found = {each: offsets(bank, targets, name, each) for each in ("auto", "float32", "float64")}
            error = np.abs(found["auto"].astype(np.float64) - found["float64"]).max()
            ten = {each: np.argsort(-(scores + offset), axis=1)[:, :10] for each, offset in found.items()}
            others, rounded, alone = (
                int((ten[one] != ten[other]).any(axis=1).sum())
                for one, other in (("auto", "float32"), ("float32", "float64"), ("auto", "float64"))
            )
            gaps = np.diff(-np.sort(-(scores + found["float64"]), axis=1)[:, :11], axis=1)
            ties = int((-gaps < 2 * error).any(axis=1).sum())
            lists = f"of {len(queries):,} queries {others} have another list of ten than by float32"
            lists += (
                f", {alone} than by float64, float32 itself {rounded}; in {ties} two lie closer than twice the error"
            )
            print(f"{data}, {name}: off by at most {error:.1e}; {lists}", flush=True)


if __name__ == "__main__":
    typer.run(main)
