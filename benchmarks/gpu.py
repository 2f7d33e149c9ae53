"""What a fit costs on a card, in float32 products there: python -m benchmarks.gpu

On a card (`make gpu`): fits to a mapped .npy of targets, its reading and uploading included, and peers that are
installed, by wall clock, each the best of three after one that warms up. Offsets are compared with float64's.

Without one it counts, by a card that is not there (tests/core/pretended_card.py):
launches, waits, bytes, peak memory, and the time predicted from them. Figures of neither
are those of the other. `--write benchmarks/results/gpu.md` keeps the table.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import hubplugin
from benchmarks.tables import markdown
from tests.core.pretended_card import Card

TAU, DIM, BANK, MANY, FEW = 0.05, 384, 15_000, 1_000_000, 20_000


@dataclass(frozen=True)
class Work:
    """A fit, and how many products of bank and targets it may take. second: with a target bank, which is then most of
    the columns, as in `code_search`."""

    method: str
    parameters: dict[str, Any]
    targets: int = MANY
    goal: float | None = None
    second: bool = False

    def __str__(self) -> str:
        return ", ".join(
            [self.method, *(f"{key}={value}" for key, value in self.parameters.items())]
        )

    def fit(
        self, targets: np.ndarray, bank: np.ndarray, compute: hubplugin.Compute
    ) -> np.ndarray:
        gallery, given = targets, hubplugin.Bank(bank)
        if self.second:
            gallery, given = (
                targets[: len(targets) // 4],
                hubplugin.Bank(bank, np.array(targets[len(targets) // 4 :])),
            )
        fitted = hubplugin.fit(
            gallery, given, self.method, compute=compute, **self.parameters
        ).fitted
        assert fitted is not None
        return fitted


LEFT_OUT = {"answers": "left out"}
WORKS = [
    Work("is", {"tau": TAU}, goal=0.5),
    Work("nnn", {"k": 16, **LEFT_OUT}, goal=3),
    Work("sn", {"tau": TAU, "iterations": 10, "sample": "all"}, goal=3),
    Work("blend", {}, goal=5),
    Work("dbsn", {"tau": TAU, "iterations": 10}, FEW, goal=8, second=True),
    Work("nnn", {"k": 128}),
    Work("csls", {}),
    Work("dualis", {}, FEW, second=True),
    Work("dbsn", {"tau": TAU, **LEFT_OUT}, FEW, second=True),
]


def operands(rows: int, bank: int, device: str) -> list[np.ndarray]:
    """Unit vectors about one direction, as a joint space has them: targets [rows, DIM] and bank [bank, DIM]."""
    generator = torch.Generator(device).manual_seed(0)
    centre = torch.randn(DIM, generator=generator, device=device)
    made = (
        torch.randn(each, DIM, generator=generator, device=device) + centre
        for each in (rows, bank)
    )
    return [torch.nn.functional.normalize(each).cpu().numpy() for each in made]


def best(run: Callable[[], object], device: str, repeats: int = 3) -> float:
    """Seconds of the quickest of `repeats` after one."""
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def product(targets: torch.Tensor, bank: torch.Tensor) -> None:
    for start in range(0, len(targets), 8192):
        targets[start : start + 8192] @ bank.T


def peers(targets: torch.Tensor, bank: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Ten iterations of Sinkhorn by each of the peers that are installed; geomloss has its own schedule."""
    found: dict[str, Callable[[], object]] = {}
    if importlib.util.find_spec("flash_sinkhorn") and targets.is_cuda:
        import flash_sinkhorn

        options: dict[str, Any] = {
            "eps": TAU,
            "n_iters": 10,
            "use_epsilon_scaling": False,
            "half_cost": True,
        }
        flash = flash_sinkhorn.SamplesLoss("sinkhorn", potentials=True, **options)
        found["flash-sinkhorn, TF32"] = lambda: flash(targets, bank)
    if importlib.util.find_spec("geomloss"):
        import geomloss

        options = {
            "blur": TAU**0.5,
            "debias": False,
            "potentials": True,
            "backend": "tensorized",
        }
        tensorized = geomloss.SamplesLoss("sinkhorn", p=2, **options)
        found["geomloss, tensorized"] = lambda: tensorized(targets, bank)
    if importlib.util.find_spec("ot"):
        import ot

        ones = [
            torch.full((len(each),), 1 / len(each), device=each.device)
            for each in (targets, bank)
        ]
        options = {
            "method": "sinkhorn_log",
            "numItermax": 10,
            "stopThr": 0,
            "warn": False,
        }
        found["POT, log domain"] = lambda: ot.sinkhorn(
            *ones, 1 - targets @ bank.T, TAU, **options
        )
    return found


def measure(
    device: str = "cuda", many: int = MANY, few: int = FEW, m: int = BANK
) -> str:
    """The table of all works and peers."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    compute, exact = (
        hubplugin.Compute(device),
        hubplugin.Compute(device, precision="float64"),
    )
    targets, bank = operands(many, m, device)
    lines = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        np.save(Path(folder, "targets.npy"), targets)
        mapped = np.load(Path(folder, "targets.npy"), mmap_mode="r")
        there, bank_there = (
            torch.from_numpy(targets).to(device),
            torch.from_numpy(bank).to(device),
        )
        floors = {
            n: best(partial(product, there[:n], bank_there), device)
            for n in (many, few)
        }
        for work in WORKS:
            n = many if work.targets == MANY else few
            seconds = best(partial(work.fit, mapped[:n], bank, compute), device)
            error = np.abs(
                work.fit(mapped[:few], bank, compute)
                - work.fit(mapped[:few], bank, exact)
            ).max()
            goal = "" if work.goal is None else f"{work.goal:g}"
            ratio, taken = f"{seconds / floors[n]:.2f}", f"{1e3 * seconds:.0f}"
            lines.append(
                [f"{m:,} x {n:,} {work}", ratio, goal, taken, f"{error:.0e}", name]
            )
            print(*lines[-1], sep=" | ", flush=True)
        for peer, run in peers(there[:few], bank_there).items():
            seconds = best(run, device)
            ratio, taken = f"{seconds / floors[few]:.2f}", f"{1e3 * seconds:.0f}"
            lines.append([f"{m:,} x {few:,} {peer}", ratio, "", taken, "", name])
    return markdown(["work", "products", "goal", "ms", "off float64", "on"], lines)


FLOAT, HALF, MEMORY, BUS = 50e12, 600e12, 3.0e12, 50e9
"""An H100: products in float32 and of halves, bytes of its memory and of pinned uploads,
each a second. Of these figures no card has been asked here."""

SINKHORN = importlib.import_module("hubplugin.compute.sinkhorn")
"""The module: its package has a function of the same name."""

SAMPLE = 65_536
"""Targets that are counted in the place of a million."""


def count(sample: int = SAMPLE, few: int = FEW, m: int = BANK) -> str:
    """Count what fits ask of a card that is not there, and predict their time from it.

    Args:
        sample: targets that are counted in the place of `MANY`.
        few: those that are counted in the place of `FEW`.
        m: the size of the bank.
    """
    rng = np.random.default_rng(0)
    lines = []
    for work in WORKS:
        n = sample if work.targets == MANY else few
        targets = rng.normal(size=(n, DIM)).astype(np.float32)
        bank = rng.normal(size=(m, DIM)).astype(np.float32)
        if work.method == "blend":  # whose tau comes of values that are not there
            work = replace(work, parameters={"tau": TAU, **work.parameters})
        # Without values, nothing changes from one iteration to the next: count them all.
        every_iteration = mock.patch.object(SINKHORN, "CONVERGED", -1.0)
        with every_iteration, Card(values=False) as card:
            work.fit(targets, bank, hubplugin.Compute("cuda"))
        scale = work.targets / n
        product = 2 * work.targets * m * DIM / FLOAT
        taken = scale * (card.moved / MEMORY + card.up / BUS)
        for kind, flops in card.flops.items():
            is_half = "halves" in kind or "float16" in kind
            if not kind.startswith("mv"):  # whose bytes are counted
                taken += scale * flops / (HALF if is_half else FLOAT)
        goal = "" if work.goal is None else f"{work.goal:g}"
        lines.append(
            [
                f"{m:,} x {work.targets:,} {work}",
                f"{card.moved / (n * m):.0f}",
                str(card.launches),
                str(card.waits),
                f"{card.peak / 2**30:.1f}",
                f"{taken / product:.2f}",
                goal,
            ]
        )
        print(*lines[-1], sep=" | ", flush=True)
    head = [
        "work",
        "bytes an entry",
        "launches",
        "waits",
        "peak GiB",
        "products",
        "goal",
    ]
    note = (
        f"No card: counted, for {sample:,} targets in the place of {MANY:,}. The products "
        "are predicted for an H100, without what the host does before and after.\n\n"
    )
    return note + markdown(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="a page for the table")
    given = parser.parse_args()
    table = measure() if torch.cuda.is_available() else count()
    print(table)
    if given.write:
        given.write.write_text(f"# {__doc__.splitlines()[0]}\n\n{table}\n")


if __name__ == "__main__":
    main()
