"""What the speed of a fit is measured on: hubplugin's methods and their peers, each from the same arrays to offsets.

`python -m benchmarks.contenders NAME OPERANDS [--repeats 5]` runs one of them in a process of its own, in turns with
the bare product, and prints one line of JSON. `benchmarks.fit` puts them side by side.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

import hubplugin
from benchmarks.tables import CODE_SEARCH, EXAMPLES, peak
from hubplugin.compute import CACHE_BYTES
from hubplugin.trial import Experiment, choose_by

TAU = 0.05


@dataclass(frozen=True)
class Operands:
    """Unit vectors, float32: bank [m, d], targets [n, d], second (the target bank) [p, d]."""

    bank: np.ndarray
    targets: np.ndarray
    second: np.ndarray

    @property
    def gallery(self) -> np.ndarray:
        """Targets and second bank as one gallery."""
        return np.concatenate([self.targets, self.second])

    def __str__(self) -> str:
        m, d = self.bank.shape
        return f"bank {m:,}, targets {len(self.targets):,}, target bank {len(self.second):,}, d {d}"


CPU = hubplugin.Compute("cpu")


def operands(name: str) -> Operands:
    """code_search: the case that goals are for; examples: what comes with the repository; random: small, for the check
    in CI. With a number behind a colon, as in code_search:2000, so many bank queries."""
    name, _, rows = name.partition(":")
    if name == "random":
        rng = np.random.default_rng(0)
        centre = rng.normal(size=128)
        parts = [rng.normal(size=(rows, 128)) + centre for rows in (3_000, 2_000, 2_000)]
    else:
        folder = {"code_search": CODE_SEARCH, "examples": EXAMPLES}[name]
        parts = [np.load(folder / f"{part}.npy") for part in ("bank_queries", "test_targets", "bank_targets")]
    bank, targets, second = (np.asarray(part, np.float32) for part in parts)
    bank = bank[: int(rows) if rows else None]
    return Operands(*(part / np.linalg.norm(part, axis=1, keepdims=True) for part in (bank, targets, second)))


def bare(*pairs: tuple[np.ndarray, np.ndarray]) -> None:
    """The products of (columns, bank) and nothing else, in tiles that fit the cache."""
    for columns, bank in pairs:
        height = max(CACHE_BYTES // (4 * len(bank)), 1)
        rows, factor = torch.from_numpy(columns), torch.from_numpy(bank).T
        out = torch.empty((height, len(bank)))
        for start in range(0, len(rows), height):
            part = rows[start : start + height]
            torch.mm(part, factor, out=out[: len(part)])


@dataclass(frozen=True)
class Contender:
    """One way from operands to offsets.

    `run` is timed; `prepare` before it and `finish` after it are not. `floor` does the products that nobody can do
    without. goal: the most times the floor that hubplugin allows itself. like: whose offsets must come out, and how
    near: the largest difference (`within`), or where the mathematics differ, a correlation (`correlates`).
    """

    run: Callable
    floor: Callable[[Operands], None]
    goal: float | None = None
    like: str | None = None
    within: float | None = None
    correlates: float | None = None
    needs: str | None = None
    prepare: Callable = field(default=lambda given: given)
    finish: Callable = field(default=lambda offsets, given: offsets)


def _to_targets(given: Operands) -> None:
    bare((given.targets, given.bank))


def _to_both(given: Operands) -> None:
    bare((given.gallery, given.bank))


def _single(method: str, **parameters: float) -> Callable:
    return lambda given: hubplugin.fit(None, given.bank, method, compute=CPU, **parameters).offsets(
        given.gallery, compute=CPU
    )


def _dbsn(memory: str) -> Callable:
    return lambda given: hubplugin.fit(
        given.targets,
        hubplugin.Bank(given.bank, given.second),
        "dbsn",
        tau=TAU,
        compute=hubplugin.Compute(device="cpu", memory=memory),
    )


def _log(method: str, answers: str) -> Callable:
    """A fit and the offsets of its gallery, with or without the answers of the bank."""
    return lambda given: hubplugin.fit(given.gallery, given.bank, method, answers=answers, compute=CPU).offsets(
        given.gallery, compute=CPU
    )


def _sn(memory: str, **parameters: int) -> Callable:
    return lambda given: hubplugin.fit(
        given.gallery, given.bank, "sn", tau=TAU, compute=hubplugin.Compute("cpu", memory), **parameters
    )


def _offsets(model: hubplugin.OffsetModel, given: Operands) -> np.ndarray:
    return model.offsets(given.targets, compute=CPU)


def _new_targets(prepared: tuple) -> np.ndarray:
    model, targets = prepared
    return model.offsets(targets, compute=CPU)


def _pot(given: Operands) -> np.ndarray:
    """As DBSN's release does it: the whole cost matrix in float64, `ot.sinkhorn` with 10 iterations."""
    import ot

    columns = given.gallery
    cost = 1 - columns.astype(np.float64) @ given.bank.T.astype(np.float64)
    a, b = np.full(len(columns), 1 / len(columns)), np.full(len(given.bank), 1 / len(given.bank))
    log = ot.sinkhorn(a, b, cost, TAU, numItermax=10, stopThr=0, warn=False, log=True)[1]
    return TAU * np.log(log["u"][: len(given.targets)])


def _geomloss(given: Operands) -> np.ndarray:
    """Its own schedule of temperatures down to tau, its own number of iterations: another way to the same limit."""
    from geomloss import SamplesLoss

    loss = SamplesLoss("sinkhorn", p=2, blur=TAU**0.5, debias=False, potentials=True, backend="tensorized")
    with torch.no_grad():
        potential = loss(torch.from_numpy(given.gallery), torch.from_numpy(given.bank))[0]
    return potential.flatten()[: len(given.targets)].numpy()


def _nnn_retrieval(given: Operands) -> np.ndarray:
    from nnn import NNNRanker, NNNRetriever

    ranker = NNNRanker(NNNRetriever(given.bank.shape[1]), given.gallery, given.bank, alternate_ks=128)
    return -0.75 * ranker.alignment_means.flatten().numpy()


CONTENDERS = {
    "is": Contender(_single("is", tau=TAU), _to_both, 1.2),
    "is, fitted to the targets": Contender(
        lambda given: hubplugin.fit(given.targets, given.bank, "is", compute=CPU).offsets(
            given.targets, compute=CPU
        ),
        _to_targets, 1.2,
    ),
    "csls": Contender(_single("csls"), _to_both, 1.2),
    "nnn k=16": Contender(_single("nnn", k=16), _to_both, 1.2),
    "nnn k=128": Contender(_single("nnn", k=128, alpha=0.75), _to_both, 1.2),
    "nnn k=128, nnn-retrieval": Contender(_nnn_retrieval, _to_both, like="nnn k=128", within=1e-5, needs="nnn"),
    "dualis": Contender(
        lambda given: hubplugin.fit(None, hubplugin.Bank(given.bank, given.second), "dualis", compute=CPU).offsets(
            given.targets, compute=CPU
        ),
        lambda given: bare((given.targets, given.bank), (given.targets, given.second)),
        1.2,
    ),
    "offsets of new targets (dbsn)": Contender(
        _new_targets,
        _to_targets,
        1.2,
        prepare=lambda given: (
            hubplugin.fit(given.second[:500], given.bank, "sn", tau=TAU, compute=CPU),
            given.targets,
        ),
    ),
    "dbsn": Contender(_dbsn("1GiB"), _to_both, 1.5, finish=_offsets),
    "dbsn and its offsets": Contender(lambda given: _offsets(_dbsn("1GiB")(given), given), _to_both),
    "dbsn and its offsets, POT": Contender(_pot, _to_both, like="dbsn", within=1e-4, needs="ot"),
    "dbsn and its offsets, geomloss": Contender(
        _geomloss, _to_both, like="dbsn", correlates=0.95, needs="geomloss"
    ),
    "dbsn, nothing held": Contender(_dbsn("16MiB"), _to_both, 11.0, like="dbsn", within=1e-5, finish=_offsets),
    "sn": Contender(_sn("1GiB"), _to_both, 1.5, finish=_offsets),
    "sn, a tenth sampled": Contender(
        lambda given: _sn("1GiB", sample=len(given.gallery) // 10)(given), _to_both, 1.3,
        like="sn", correlates=0.9, finish=_offsets,
    ),
    **{
        f"{name}, answers {answers}": Contender(_log(method, answers), _to_both)
        for name, method in (("nnn k=16", "nnn"), ("dbsn", "dbsn"), ("blend", "blend"))
        for answers in ("kept", "left out")
    },
    "blend, the default": Contender(
        lambda given: hubplugin.fit(given.gallery, given.bank, compute=CPU).offsets(
            given.gallery, compute=CPU
        ),
        _to_both,
    ),
    "auto, without pairs": Contender(
        lambda given: choose_by(Experiment(hubplugin.Bank(given.bank).prepare("cosine", CPU).against(given.gallery))),
        _to_both,
        finish=lambda choice, given: np.zeros(0),
    ),
}  # fmt: skip


def measure(name: str, operand_name: str, repeats: int) -> dict:
    """Seconds (of the processor, on one thread) of the contender and of the bare product, in turns, and memory beyond
    the operands and one product."""
    contender, given = CONTENDERS[name], operands(operand_name)
    prepared = contender.prepare(given)
    contender.floor(given)
    before = peak()
    seconds, floors, result = [], [], None
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(repeats):
        start = clock()
        contender.floor(given)
        middle = clock()
        result = contender.run(prepared)
        floors.append(middle - start)
        seconds.append(clock() - middle)
    memory = (peak() - before) / 2**20
    offsets = contender.finish(result, given)
    return {"seconds": seconds, "floor": floors, "memory_mib": round(memory), "offsets": offsets.tolist()}


def main(
    name: str,
    operands: str,
    repeats: int = 5,
    threads: int = 1,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here.")] = None,
) -> None:
    torch.set_num_threads(threads)
    text = json.dumps(measure(name, operands, repeats))
    (out.write_text if out else sys.stdout.write)(text)


if __name__ == "__main__":
    typer.run(main)
