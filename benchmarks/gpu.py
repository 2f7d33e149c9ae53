"""What a fit costs on a card, beside the bare float32 product of the same operands there: `python -m benchmarks.gpu`.

On a card (`make gpu`): fits to a mapped .npy of targets, its reading and uploading included, and peers that are
installed, by wall clock, each the best of three after one that warms up. Offsets are compared with float64's.

Without one it counts. torch's fake tensors have a device "cuda" that need not be there; each return to the host is a
synchronisation. Figures of neither are those of the other.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import hubplugin
from benchmarks.tables import markdown

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


class Counted(TorchFunctionMode):
    """What is asked of fake tensors on "cuda": bytes that go there and come back, and how often the host waits. What
    comes back is made up."""

    def __init__(self) -> None:
        self.up = self.down = self.waits = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        name = getattr(func, "__name__", "")
        if (
            tensor is not None
            and name == "numpy"
            and tensor.device.type == "cpu"
            and type(tensor) is not torch.Tensor
        ):
            dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
            numbers = np.random.default_rng(0).uniform(0.1, 1, tuple(tensor.shape))
            return (
                numbers.astype(dtype)
                if dtype.kind == "f"
                else np.ones(tuple(tensor.shape), dtype)
            )
        if (
            tensor is not None
            and tensor.is_cuda
            and name in ("item", "__bool__", "__float__", "__int__", "__index__")
        ):
            self.waits, self.down = self.waits + 1, self.down + tensor.element_size()
            return {"__bool__": True, "__int__": 1, "__index__": 1}.get(name, 1.0)
        result = func(*args, **(kwargs or {}))
        if (
            tensor is not None
            and isinstance(result, torch.Tensor)
            and tensor.device.type != result.device.type
        ):
            if tensor.is_cuda:
                self.waits, self.down = self.waits + 1, self.down + tensor.nbytes
            else:
                self.up += tensor.nbytes
        return result


def count(n: int = 20_000, m: int = 2_000) -> str:
    """How often a fit waits for a card, and what goes over the bus, by method: no card is needed."""
    rng, lines = np.random.default_rng(0), []
    targets, bank = (rng.normal(size=(rows, DIM)).astype(np.float32) for rows in (n, m))

    def kernel(rows: tuple[torch.Tensor, ...], *_: object) -> torch.Tensor:
        return torch.empty(len(rows[0]), device=rows[0].device)

    for work in WORKS:
        fake, fused = (
            FakeTensorMode(allow_non_fake_inputs=True),
            patch("hubplugin.compute.kernels.log_sum_exp", kernel),
        )
        with fused, fake, Counted() as seen:
            work.fit(targets, bank, hubplugin.Compute("cuda", memory="1GiB"))
        sent = f"{seen.up / targets.nbytes:.1f}"
        lines.append(
            [
                str(work),
                str(seen.waits),
                sent,
                f"{seen.down:,}",
                f"{seen.down / (n + m):.0f}",
            ]
        )
    head = [
        "work",
        "synchronisations",
        "times the targets are sent",
        "bytes back",
        "a target or bank row",
    ]
    return (
        f"no card: counted for {n:,} targets, a bank of {m:,}, d {DIM}\n\n"
        + markdown(head, lines)
    )


if __name__ == "__main__":
    print(measure() if torch.cuda.is_available() else count())
