"""How fast a fit is, beside the bare product of the same operands and beside its peers.

    python -m benchmarks.fit [--repeats 5] [--threads 1] [--operands code_search] [--only NAME]

Every contender runs in a process of its own, in turns with the product. Other work on the machine makes either slower
and never faster, so a ratio is the fastest turn of the contender over the fastest of the product; on one thread it is
processor time that counts. Results that must agree are compared before anything is printed. Writes
benchmarks/results/fit/FAMILY.json, a file for each family of processors, and the table of docs/speed.md, which is made
from all of these files (`benchmarks.speed_page`). A run that is cut off keeps what it has measured.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from benchmarks.contenders import CONTENDERS, operands
from benchmarks.speed_page import file_of, write_pages
from benchmarks.tables import CODE_SEARCH, ROOT, family, machine

USUAL = "code_search" if CODE_SEARCH.is_dir() else "examples"
"""The operands whose results are stored."""


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


def stored(family_name: str) -> dict[str, Any]:
    """What is stored of a family of processors: `runs` by the number of threads, and `check` of small operands."""
    path = file_of(family_name)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"family": family_name, "runs": {}}
    return found


def main(
    repeats: int = 5,
    threads: int = 1,
    data: Annotated[
        str, typer.Option("--operands", help="Of others than the usual ones, ratios are only printed.")
    ] = USUAL,
    only: Annotated[list[str] | None, typer.Option(help="A contender, and what it is compared with first.")] = None,
) -> None:
    chosen = "".join(f" --only '{name}'" for name in only or ())
    console, command = Console(width=150), f"python -m benchmarks.fit --repeats {repeats} --threads {threads}{chosen}"
    torch.set_num_threads(threads)
    results: dict[str, dict[str, Any]] = {}
    found = stored(family())
    run = found["runs"].setdefault(str(threads), {"contenders": {}})
    run |= {"machine": machine(threads), "command": command, "operands": str(operands(data)), "date": str(date.today())}
    for name in only or CONTENDERS:
        contender = CONTENDERS[name]
        if contender.needs and importlib.util.find_spec(contender.needs) is None:
            console.print(f"{name}: not measured, {contender.needs} is not installed (make bench installs it)")
            continue
        results[name] = run_apart(name, data, repeats, threads)
        line = summary(results[name]) | {"differs by": agreement(name, results)}
        run["contenders"][name] = line
        if data == USUAL:
            save(found)
        console.print(f"{name}: {line['ratio']:.2f} ({line['low']:.2f}-{line['high']:.2f})")
    if data != USUAL:
        return
    if threads == 1:
        found["check"] = {name: summary(run_apart(name, "random", repeats, 1))["ratio"] for name in CHECKED}
        save(found)
    write_pages()


def save(found: dict[str, Any]) -> None:
    path = file_of(found["family"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


CHECKED = ("is", "nnn k=16", "nnn k=16, answers left out", "dbsn", "dbsn and its offsets", "dbsn, nothing held")
"""What `benchmarks.check` runs again."""

if __name__ == "__main__":
    typer.run(main)
