"""How fast a fit is, beside the bare product of the same operands and beside its peers.

    python -m benchmarks.fit [--repeats 5] [--threads 1] [--operands code_search] [--only NAME]

Every contender runs in a process of its own, in turns with the product. Other work on the machine makes either slower
and never faster, so a ratio is the fastest turn of the contender over the fastest of the product; on one thread it is
processor time that counts. Results that must agree are compared before anything is printed. Writes
benchmarks/results/fit.json, scaling.svg beside it, and the tables of docs/speed.md and of the README.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track

from benchmarks.contenders import CONTENDERS, TAU, bare, operands
from benchmarks.tables import CODE_SEARCH, RESULTS, ROOT, machine, markdown, write_table
from hubplugin import fit
from hubplugin.vectors import Vectors

PAGE = ROOT / "docs" / "speed.md"


def run_apart(name: str, data: str, repeats: int, threads: int) -> dict[str, Any]:
    """`contenders.measure` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        given = [name, data, f"--repeats={repeats}", f"--threads={threads}", f"--out={out}"]
        command = [sys.executable, "-m", "benchmarks.contenders", *given]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr.strip().splitlines()[-1]}")
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def agreement(name: str, results: dict[str, dict[str, Any]]) -> str:
    """How far the offsets are from those of the contender they must be like; ends the run where they are not."""
    contender = CONTENDERS[name]
    if contender.like is None:
        return ""
    ours, theirs = (np.array(results[who]["offsets"]) for who in (contender.like, name))
    ours, theirs = ours - ours.mean(), theirs - theirs.mean()
    if contender.correlates is not None:
        found = float(np.corrcoef(ours, theirs)[0, 1])
        if found < contender.correlates:
            raise SystemExit(f"{name} is not like {contender.like}: correlation {found:.4f}; no figure is printed")
        return f"r = {found:.4f}"
    assert contender.within is not None
    found = float(np.abs(ours - theirs).max())
    if found > contender.within:
        raise SystemExit(f"{name} is not like {contender.like}: offsets differ by {found:.2e}; no figure is printed")
    return f"{found:.0e}"


def summary(found: dict[str, Any]) -> dict[str, Any]:
    ratios = np.array(found["seconds"]) / np.array(found["floor"])
    return {
        "ratio": min(found["seconds"]) / min(found["floor"]),
        "low": float(ratios.min()),
        "high": float(ratios.max()),
        "seconds": min(found["seconds"]),
        "floor": min(found["floor"]),
        "memory_mib": found["memory_mib"],
    }


def row(name: str, found: dict[str, Any]) -> list[str]:
    """A line of the table."""
    goal = CONTENDERS[name].goal
    return [
        name,
        f"{found['ratio']:.2f}",
        f"{found['low']:.2f}-{found['high']:.2f}",
        f"{goal:g}" if goal else "",
        f"{found['seconds']:.2f}",
        f"{found['memory_mib']:,}",
        found.get("differs by", ""),
    ]


class Repeated(Vectors):
    """As many targets as asked for, of which one block is held."""

    def __init__(self, block: np.ndarray, rows: int):
        super().__init__("targets", rows, block.shape[1])
        self._block = block

    def _raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        size = min(size, len(self._block))
        for start in range(0, self.rows, size):
            yield self._block[: min(size, self.rows - start)]


def growth() -> dict[str, list[dict[str, float]]]:
    """Seconds of one pass (`is`) and of the bare product over three decades of the targets, the bank, and d."""
    rng = np.random.default_rng(0)
    decades = np.logspace(0, 3, 7)
    series = {
        "targets": [(1_000, round(1_000 * x), 64) for x in decades],
        "bank": [(round(100 * x), 4_000, 64) for x in decades],
        "d": [(1_000, 4_000, round(8 * x)) for x in decades],
    }
    found: dict[str, list[dict[str, float]]] = {}
    for name, sizes in series.items():
        for m, n, d in track(sizes, name, console=Console(stderr=True), transient=True):
            bank, block = (rng.normal(size=(rows, d)).astype(np.float32) for rows in (m, min(n, 16_384)))
            targets, model = Repeated(block, n), fit(bank, "is", tau=TAU, device="cpu")
            taken: list[tuple[float, float]] = []
            while len(taken) < 5:
                start = time.perf_counter()
                for part in targets._raw_blocks(16_384):
                    bare((part, bank))
                middle = time.perf_counter()
                model.offsets(targets, device="cpu")
                taken.append((middle - start, time.perf_counter() - middle))
            floor, seconds = np.median(np.array(taken), axis=0)
            found.setdefault(name, []).append({"m": m, "n": n, "d": d, "floor": floor, "seconds": seconds})
    return found


def slopes(series: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """d log(seconds) / d log(size) over the upper two of the three decades, where fixed costs no longer count."""
    found = {}
    for name, key in (("targets", "n"), ("bank", "m"), ("d", "d")):
        upper = series[name][2:]
        sizes, seconds = (np.log([row[field] for row in upper]) for field in (key, "seconds"))
        found[name] = float(np.polyfit(sizes, seconds, 1)[0])
    return found


def draw(series: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True, layout="constrained")
    for axis, (name, key) in zip(axes, (("targets", "n"), ("bank", "m"), ("d", "d")), strict=True):
        rows = series[name]
        for field, label in (("floor", "bare product"), ("seconds", "offsets (is)")):
            axis.loglog([row[key] for row in rows], [row[field] for row in rows], "o-", ms=3, label=label)
        axis.set_xlabel({"n": "targets n", "m": "bank m", "d": "dimensions d"}[key])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds")
    axes[0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(
    repeats: int = 5,
    threads: int = 1,
    data: Annotated[str, typer.Option("--operands")] = "code_search" if CODE_SEARCH.is_dir() else "examples",
    peers: Annotated[bool, typer.Option(help="Measure other libraries, or keep what is stored of them.")] = True,
    only: Annotated[str | None, typer.Option(help="One contender, printed and not written.")] = None,
) -> None:
    console, command = Console(width=150), f"python -m benchmarks.fit --repeats {repeats} --threads {threads}"
    command += "" if peers else " --no-peers"
    torch.set_num_threads(threads)
    results, rows = {}, []
    summaries: dict[str, dict[str, Any]] = {}
    stored = RESULTS / "fit.json"
    before = json.loads(stored.read_text())["contenders"] if stored.exists() else {}
    for name in [only] if only else CONTENDERS:
        contender = CONTENDERS[name]
        if contender.needs and not peers and name in before:
            summaries[name] = before[name]
            rows.append(row(name, before[name]))
            continue
        if contender.needs and importlib.util.find_spec(contender.needs) is None:
            rows.append([name, "not installed", "", "", "", "", ""])
            continue
        results[name] = run_apart(name, data, repeats, threads)
        found = summary(results[name]) | {"differs by": "" if only else agreement(name, results)}
        rows.append(row(name, found))
        summaries[name] = found
        console.print(*rows[-1], sep="\t")
    if only:
        return
    rows.append(["FlashSinkhorn", "needs a CUDA GPU", "", "", "", "", ""])
    series = growth()
    steep = slopes(series)
    RESULTS.mkdir(exist_ok=True)
    draw(series, RESULTS / "scaling.svg")
    small = {name: summary(run_apart(name, "random", repeats, 1))["ratio"] for name in CHECKED}
    text = json.dumps(
        {
            "machine": machine(threads),
            "command": command,
            "operands": str(operands(data)),
            "contenders": summaries,
            "growth": series,
            "slopes": steep,
            "check": small,
        },
        indent=1,
    )
    (RESULTS / "fit.json").write_text(text + "\n")
    head = ["work", "times the product", "from-to", "goal", "seconds", "MiB", "differs by"]
    about = f"{operands(data)}; {machine(threads)}; `{command}`\n\n"
    write_table(PAGE, "fit", about + markdown(head, rows))
    shown = [row for row in rows if row[0] in SHOWN]
    write_table(ROOT / "README.md", "speed", about + markdown(head, shown))
    lines = [[name, f"{slope:.2f}"] for name, slope in steep.items()]
    write_table(PAGE, "growth", markdown(["time grows with", "to the power of"], lines))


SHOWN = ("is", "nnn k=128", "nnn k=128, nnn-retrieval", "dbsn", "dbsn and its offsets",
         "dbsn and its offsets, POT", "dbsn and its offsets, geomloss", "blend, the default")  # fmt: skip
"""What the README shows."""

CHECKED = ("is", "nnn k=16", "nnn k=16, answers left out", "dbsn", "dbsn and its offsets", "dbsn, nothing held")
"""What `benchmarks.check` runs again."""

if __name__ == "__main__":
    typer.run(main)
