"""How fast a fit is, beside the bare product of the same operands and beside its peers.

    python -m benchmarks.fit [--repeats 5] [--threads 1] [--data code_search] [--only NAME ...]
    python -m benchmarks.fit --data million --repeats 1 --only "is" "blend, the default"
    python -m benchmarks.fit --check        # which is `make ratios`
    python -m benchmarks.fit --apply        # how often the fit `apply` takes, and where its time goes
    python -m benchmarks.fit --goals        # on a machine at rest: medians of five, one thread, beside their goals

Each contender runs in a process of its own, in turns with the product. Other work on the machine makes either slower
and never faster, so a ratio is the fastest turn of the contender over the fastest of the product. On one thread it is
processor time that counts. Results that must agree are compared before anything is printed. Results are kept in
benchmarks/results/fit, a file for each family of processors, and docs/measurements/methods.md has the table of all of
them. "before" are those of the code that had a path of its own for each method (0.2.0 until commit f987aa5). Peers that
are not installed are named, and left out: `make bench` installs them. `million` are 1,000,000 targets in a mapped file.

--check runs a few contenders on small random operands and fails where a ratio is more than twice the stored one of the
same family of processors: what it catches is a pass too many, not a noisy machine.
"""

from __future__ import annotations

import argparse
import atexit
import cProfile
import importlib.util
import json
import os
import pstats
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

import hubplugin
from benchmarks.tables import (
    CODE_SEARCH,
    EXAMPLES,
    RESULTS,
    ROOT,
    family,
    machine,
    markdown,
    own_memory,
    write_table,
)
from hubplugin.compute import CACHE_BYTES

TAU = 0.05
CPU, NUMPY = hubplugin.Compute("cpu"), hubplugin.Compute("numpy")
USUAL = "code_search" if CODE_SEARCH.is_dir() else "examples"
"""The operands whose results are stored."""

ABOUT = {"million": "bank 15,000, targets 1,000,000 in a mapped file, d 384"}

BOUND = 2.0
"""Times the stored ratio that `--check` lets pass."""

GOALS = {"is": 1.2, "nnn k=16": 0.9, "dbsn": 1.4, "blend, the default": 2.4}
"""Products that a fit may take, in the median, of 8,000 targets and a bank of 4,000."""

APPLY_GOAL = 2.2
"""Fits that `apply` may take."""


@dataclass(frozen=True)
class Operands:
    """Unit vectors, float32: bank [m, d], targets [n, d], second (the target bank) [p, d], and both of these."""

    bank: np.ndarray
    targets: np.ndarray
    second: np.ndarray
    gallery: np.ndarray

    @classmethod
    def named(cls, name: str) -> Operands:
        """code_search, examples (what comes with the repository), million, goals (for `--goals`), or random (small, for
        `--check`)."""
        if name == "million":
            return cls(*_million())
        drawn = {
            "random": (128, 3_000, 2_000, 2_000),
            "goals": (384, 4_000, 6_000, 2_000),
        }
        if name in drawn:
            rng = np.random.default_rng(0)
            dim, *sizes = drawn[name]
            centre = rng.normal(size=dim)
            parts = [rng.normal(size=(rows, dim)) + centre for rows in sizes]
        else:
            folder = {"code_search": CODE_SEARCH, "examples": EXAMPLES}[name]
            parts = [
                np.load(folder / f"{part}.npy")
                for part in ("bank_queries", "test_targets", "bank_targets")
            ]
        bank, targets, second = (
            (part / np.linalg.norm(part, axis=1, keepdims=True)).astype(np.float32)
            for part in parts
        )
        # A fit takes equal answers as one target, and peers must see the same targets.
        gallery = np.concatenate([targets, np.unique(second, axis=0)])
        return cls(bank, targets, second, gallery)

    def __str__(self) -> str:
        m, d = self.bank.shape
        return f"bank {m:,}, targets {len(self.targets):,}, target bank {len(self.second):,}, d {d}"


def _million() -> tuple[np.ndarray, ...]:
    """1,000,000 targets about one direction, in a mapped file that goes with this process, and a bank of 15,000."""
    rng, folder = np.random.default_rng(0), tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    centre = rng.normal(size=384)

    def drawn(rows: int) -> np.ndarray:
        vectors = (rng.standard_normal((rows, 384), np.float32) + centre).astype(
            np.float32
        )
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors

    path = Path(folder.name, "targets.npy")
    written = np.lib.format.open_memmap(path, "w+", np.float32, (1_000_000, 384))
    for start in range(0, len(written), 50_000):
        written[start : start + 50_000] = drawn(50_000)
    written.flush()
    targets = np.load(path, mmap_mode="r")
    return drawn(15_000), targets, drawn(0), targets


def bare(columns: np.ndarray, bank: np.ndarray) -> None:
    """The product of both and nothing else, in tiles that fit the cache."""
    height = max(CACHE_BYTES // (4 * len(bank)), 1)
    factor, out = torch.from_numpy(bank).T, torch.empty((height, len(bank)))
    for start in range(0, len(columns), height):
        part = columns[start : start + height]
        part = torch.from_numpy(part if part.flags.writeable else part.copy())
        torch.mm(part, factor, out=out[: len(part)])


@dataclass(frozen=True)
class Contender:
    """One way from operands to offsets. like: whose offsets must come out, and how near: the largest difference
    (`within`), or where the mathematics differ, a correlation (`correlates`). needs: the package of a peer."""

    run: Callable[[Operands], np.ndarray]
    like: str | None = None
    within: float | None = None
    correlates: float | None = None
    needs: str | None = None


def _single(
    method: str, compute: hubplugin.Compute = CPU, **parameters: float
) -> Callable[[Operands], np.ndarray]:
    return lambda of: hubplugin.fit(
        None, of.bank, method, compute=compute, **parameters
    ).offsets(of.gallery, compute=compute)


def _whole(
    method: str, compute: hubplugin.Compute = CPU, **parameters: Any
) -> Callable[[Operands], np.ndarray]:
    """A fit on the gallery, and its offsets."""

    def run(of: Operands) -> np.ndarray:
        fitted = hubplugin.fit(
            of.gallery, of.bank, method, compute=compute, **parameters
        ).fitted
        assert fitted is not None
        return fitted

    return run


def _dbsn(compute: hubplugin.Compute) -> Callable[[Operands], np.ndarray]:
    def run(of: Operands) -> np.ndarray:
        bank = hubplugin.Bank(of.bank, of.second)
        fitted = hubplugin.fit(
            of.targets, bank, "dbsn", tau=TAU, compute=compute
        ).fitted
        assert fitted is not None
        return fitted

    return run


def _pot(of: Operands) -> np.ndarray:
    """As DBSN's release does it: the whole cost matrix in float64, `ot.sinkhorn` with 10 iterations."""
    import ot

    cost = 1 - of.gallery.astype(np.float64) @ of.bank.T.astype(np.float64)
    a, b = (
        np.full(len(of.gallery), 1 / len(of.gallery)),
        np.full(len(of.bank), 1 / len(of.bank)),
    )
    log = ot.sinkhorn(a, b, cost, TAU, numItermax=10, stopThr=0, warn=False, log=True)[
        1
    ]
    return np.asarray(TAU * np.log(log["u"][: len(of.targets)]))


def _geomloss(of: Operands) -> np.ndarray:
    """Its own schedule of temperatures down to tau, its own number of iterations: another way to the same limit."""
    from geomloss import SamplesLoss

    loss = SamplesLoss(
        "sinkhorn",
        p=2,
        blur=TAU**0.5,
        debias=False,
        potentials=True,
        backend="tensorized",
    )
    with torch.no_grad():
        potential = loss(torch.from_numpy(of.gallery), torch.from_numpy(of.bank))[0]
    return np.asarray(potential.flatten()[: len(of.targets)].numpy())


CONTENDERS = {
    "is": Contender(_single("is", tau=TAU)),
    "nnn k=16": Contender(_single("nnn", k=16)),
    "nnn k=128": Contender(_single("nnn", k=128, alpha=0.75)),
    "nnn k=16, answers left out": Contender(_whole("nnn", answers="left out")),
    "dbsn": Contender(_dbsn(CPU)),
    "dbsn, POT": Contender(_pot, like="dbsn", within=1e-4, needs="ot"),
    "dbsn, geomloss": Contender(
        _geomloss, like="dbsn", correlates=0.95, needs="geomloss"
    ),
    "dbsn, nothing held": Contender(
        _dbsn(hubplugin.Compute("cpu", "16MiB")), like="dbsn", within=1e-5
    ),
    "dbsn, answers left out": Contender(_whole("dbsn", answers="left out")),
    "blend, the default": Contender(_whole("blend")),
    "is, by numpy": Contender(_single("is", NUMPY, tau=TAU), like="is", within=1e-5),
    "nnn k=16, by numpy": Contender(
        _single("nnn", NUMPY, k=16), like="nnn k=16", within=1e-5
    ),
    "dbsn, by numpy": Contender(_dbsn(NUMPY), like="dbsn", within=1e-5),
    "blend, by numpy": Contender(
        _whole("blend", NUMPY), like="blend, the default", within=1e-5
    ),
}
CHECKED = ("is", "nnn k=16", "nnn k=16, answers left out", "dbsn", "dbsn, nothing held")
"""What `--check` runs."""


class Memory(threading.Thread):
    """The most memory of its own that this process takes beyond what it had, in bytes: looked at each 10 ms, since what
    the system counts includes pages of mapped files."""

    def __enter__(self) -> Memory:
        self.beyond, self._over, self._before = 0, threading.Event(), own_memory()
        self.start()
        return self

    def run(self) -> None:
        while not self._over.wait(0.01):
            self.beyond = max(self.beyond, own_memory() - self._before)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def measure(name: str, data: str, repeats: int, threads: int) -> dict[str, Any]:
    """Seconds of the contender and of the bare product of bank and gallery, in turns, MiB beyond the operands and one
    product, and the offsets."""
    torch.set_num_threads(threads)
    contender, of = CONTENDERS[name], Operands.named(data)
    bare(of.gallery, of.bank)
    clock, taken = time.process_time if threads == 1 else time.perf_counter, []
    with Memory() as memory:
        for _ in range(repeats):
            start = clock()
            bare(of.gallery, of.bank)
            middle = clock()
            offsets = contender.run(of)
            taken.append((middle - start, clock() - middle))
    return {
        "taken": taken,
        "memory_mib": memory.beyond >> 20,
        "offsets": offsets.tolist(),
    }


def run_apart(name: str, data: str, repeats: int, threads: int) -> dict[str, Any]:
    """`measure` in a process of its own, with the ratio and its range."""
    given = [
        "--apart",
        name,
        "--data",
        data,
        "--repeats",
        str(repeats),
        "--threads",
        str(threads),
    ]
    names = (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
    )  # which numpy reads when it is imported
    environment = os.environ | dict.fromkeys(names, str(threads))
    command = [sys.executable, "-m", "benchmarks.fit", *given]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    floors, seconds = np.array(found.pop("taken")).T
    turns = seconds / floors
    return found | {
        "ratio": seconds.min() / floors.min(),
        "median": np.median(turns),
        "low": turns.min(),
        "high": turns.max(),
    }


def agreement(name: str, results: dict[str, dict[str, Any]]) -> str:
    """How far the offsets are from those of the contender they must be like; ends the run where they are not."""
    contender = CONTENDERS[name]
    if contender.like not in results:
        return ""
    ours, theirs = (np.array(results[who]["offsets"]) for who in (contender.like, name))
    ours, theirs = ours - ours.mean(), theirs - theirs.mean()
    if contender.correlates is not None:
        found, good = float(np.corrcoef(ours, theirs)[0, 1]), contender.correlates
        said, agrees = f"r = {found:.4f}", found >= good
    else:
        found = float(np.abs(ours - theirs).max())
        said, agrees = f"{found:.0e}", found <= (contender.within or 0)
    if not agrees:
        raise SystemExit(
            f"{name} is not like {contender.like}: {said}; no figure is printed"
        )
    return said


def stored() -> dict[str, Any]:
    """What is stored of this family of processors: `runs` by the number of threads, and `check` of small operands."""
    path = RESULTS / "fit" / f"{family().lower().replace(' ', '-')}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return (
        {"runs": {}, "check": {}, "before": {}}
        | found
        | {"family": family(), "path": path}
    )


def save(found: dict[str, Any]) -> None:
    path = found["path"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(
            {key: found[key] for key in ("family", "runs", "check", "before")}, indent=1
        )
        + "\n"
    )


def write_page() -> None:
    """The table of docs/measurements/methods.md, columns for each family of processors."""
    families = [
        json.loads(path.read_text())
        for path in sorted((RESULTS / "fit").glob("*.json"))
    ]
    runs = {
        f"{each['family']}, {name}": run
        for each in families
        for name, run in sorted(each["runs"].items())
    }
    before = {
        f"{each['family']}, before": each["before"]
        for each in families
        if each.get("before")
    }
    lines = []
    for name in CONTENDERS:
        seen = [run["contenders"].get(name) for run in runs.values()]
        cells = [
            f"{each['ratio']:.2f} ({each['low']:.2f}-{each['high']:.2f})"
            if each
            else ""
            for each in seen
        ]
        cells += [f"{old[name]:.2f}" if name in old else "" for old in before.values()]
        memory = next(
            (f"{each['memory_mib']:,}" for each in seen if each and each["memory_mib"]),
            "",
        )
        differs = next((each["differs by"] for each in seen if each), "")
        if any(cells):
            lines.append([name, *cells, memory, differs])
    about = "".join(f"- {name}: {run['about']}\n" for name, run in runs.items())
    table = markdown(["work", *runs, *before, "MiB", "differs by"], lines)
    write_table(
        ROOT / "docs" / "measurements" / "methods.md", "fit", f"{about}\n{table}"
    )


def check() -> None:
    known, slower = stored()["check"], []
    if not known:
        print(
            f"nothing is stored of {family()}: ratios are printed and compared with nothing"
        )
    for name in CHECKED:
        ratio = run_apart(name, "random", 5, 1)["ratio"]
        beside = (
            f"; stored {known[name]:.2f}, allowed {BOUND:g} x" if name in known else ""
        )
        print(f"{name}: {ratio:.2f} times the bare product{beside}", flush=True)
        slower += [name] if name in known and ratio > BOUND * known[name] else []
    if slower:
        raise SystemExit(
            f"slower than {BOUND:g} x the stored ratio: {', '.join(slower)}; see python -m benchmarks.fit"
        )


def goals(repeats: int) -> None:
    """Print the median of each ratio beside its goal, and what `apply` takes."""
    print(f"{Operands.named('goals')}; {machine(1)}; medians of {repeats} in turns")
    for name, goal in GOALS.items():
        median = run_apart(name, "goals", repeats, 1)["median"]
        print(f"{name}: {median:.2f} products; goal {goal:g}", flush=True)
    for size in (8_000, 20_000):
        apply(repeats, size)


def apply(repeats: int, size: int, *, profiles: bool = False) -> None:
    """Print how many fits `apply` takes, on one thread and in turns.

    It writes to a flat Faiss index of `size` targets of 384 dimensions, with a log of
    3,000 queries without answers. `profiles` shows where the time goes.
    """
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    rng = np.random.default_rng(0)
    of = Operands.named(USUAL)
    known = of.gallery[rng.permutation(len(of.gallery))[:size]]
    # Such as these, if there are fewer.
    more = known[rng.integers(0, len(known), size - len(known))]
    noise = rng.normal(size=more.shape).astype(np.float32)
    targets = np.concatenate([known, more + noise / 2 / known.shape[1] ** 0.5])
    targets /= np.linalg.norm(targets, axis=1, keepdims=True)
    bank = of.bank[:3_000]
    index = faiss.IndexFlatIP(targets.shape[1])
    index.add(targets)
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/x.faiss"
        for _ in range(repeats + 1):
            faiss.write_index(index, file)
            store = hubplugin.open_store(f"faiss:{file}")
            start = time.process_time()
            hubplugin.apply(store, bank, compute=CPU)
            middle = time.process_time()
            hubplugin.fit(targets, bank, compute=CPU)
            taken.append((middle - start, time.process_time() - middle))
        # The first one imports.
        whole, fit = np.median(taken[1:], axis=0)
        print(
            f"{size:,} targets: apply {whole:.2f} s, fit {fit:.2f} s of processor time: "
            f"{whole / fit:.2f} times; goal {APPLY_GOAL}; {machine(1)}",
            flush=True,
        )
        if profiles:
            faiss.write_index(index, file)
            store = hubplugin.open_store(f"faiss:{file}")
            with cProfile.Profile() as profile:
                hubplugin.apply(store, bank, compute=CPU)
            pstats.Stats(profile).sort_stats("cumtime").print_stats("hubplugin", 40)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--data",
        default=USUAL,
        help="Of others than the usual ones, ratios are only printed.",
    )
    parser.add_argument("--only", nargs="*", default=list(CONTENDERS))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--apply", action="store_true")
    parser.add_argument("--goals", action="store_true")
    parser.add_argument("--apart", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.apart:
        print(
            json.dumps(measure(given.apart, given.data, given.repeats, given.threads))
        )
        return
    if given.check:
        check()
        return
    if given.apply:
        apply(given.repeats, 20_000, profiles=True)
        return
    if given.goals:
        goals(given.repeats)
        return
    results: dict[str, dict[str, Any]] = {}
    found, kept = stored(), given.data in (USUAL, "million")
    name = (
        "1,000,000 targets" if given.data == "million" else f"{given.threads} thread(s)"
    )
    run = found["runs"].setdefault(name, {"contenders": {}})
    run["about"] = (
        f"{date.today()}; {ABOUT.get(given.data) or Operands.named(given.data)}; {machine(given.threads)}"
    )
    for name in given.only:
        needs = CONTENDERS[name].needs
        if needs and importlib.util.find_spec(needs) is None:
            print(
                f"{name}: not measured, {needs} is not installed (make bench installs it)"
            )
            continue
        results[name] = run_apart(name, given.data, given.repeats, given.threads)
        line = {key: value for key, value in results[name].items() if key != "offsets"}
        run["contenders"][name] = line | {"differs by": agreement(name, results)}
        print(
            f"{name}: {line['ratio']:.2f} ({line['low']:.2f}-{line['high']:.2f}), {line['memory_mib']} MiB",
            flush=True,
        )
        if kept:
            save(found)
    if given.data == USUAL and given.threads == 1:
        found["check"] = {
            name: run_apart(name, "random", given.repeats, 1)["ratio"]
            for name in CHECKED
        }
        save(found)
    if kept:
        write_page()


if __name__ == "__main__":
    main()
