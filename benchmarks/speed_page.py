"""The tables of fits in docs/speed.md and in the README, from what is stored of every family of processors.

python -m benchmarks.speed_page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.contenders import CONTENDERS
from benchmarks.tables import RESULTS, ROOT, markdown, write_table

PAGE, README = ROOT / "docs" / "speed.md", ROOT / "README.md"
FOLDER = RESULTS / "fit"

PEERS = {
    "is": None,
    "nnn k=128": "nnn k=128, nnn-retrieval",
    "dbsn and its offsets": "dbsn and its offsets, POT",
    "blend, the default": None,
}
"""What the README shows, and beside it the peer that a user would take."""


def file_of(family: str) -> Path:
    """Where the results of a family of processors lie."""
    return FOLDER / f"{family.lower().replace(' ', '-')}.json"


def write_pages() -> None:
    found = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    runs = {
        f"{each['family']}, {threads} thread{'s' if int(threads) > 1 else ''}": run
        for each in found
        for threads, run in sorted(each["runs"].items())
    }
    about = "\n".join(f"- {name}: {_about(run)}" for name, run in runs.items()) + "\n\n"
    write_table(PAGE, "fit", about + table(runs, tuple(CONTENDERS)))
    write_table(README, "speed", short(runs))


def short(runs: dict[str, dict[str, Any]]) -> str:
    """A line for each method of the newest run, with its peer where one was measured."""
    newest = max(runs, key=lambda name: runs[name]["date"])
    lines = []
    for name, peer in PEERS.items():
        seen = [
            f"{peer.split(', ')[1]} {run['contenders'][peer]['ratio']:.2f} ({where}, {run['date']})"
            for where, run in runs.items()
            if peer in run["contenders"]
        ]
        lines.append([name, f"{runs[newest]['contenders'][name]['ratio']:.2f}", *(seen[:1] or ["none known"])])
    return markdown(["work", f"{newest}, {runs[newest]['date']}", "peer"], lines)


def table(runs: dict[str, dict[str, Any]], names: tuple[str, ...]) -> str:
    """A line for each contender, with its ratio in every run."""
    lines = []
    for name in names:
        seen = [run["contenders"].get(name) for run in runs.values()]
        if not any(seen):
            continue
        goal = CONTENDERS[name].goal
        differs = next((each["differs by"] for each in seen if each and each["differs by"]), "")
        memory = next((f"{each['memory_mib']:,}" for each in seen if each), "")
        lines.append([name, *map(_cell, seen), f"{goal:g}" if goal else "", memory, differs])
    lines.append(["FlashSinkhorn", *["needs a CUDA GPU"] * len(runs), "", "", ""])
    return markdown(["work", *runs, "goal", "MiB", "differs by"], lines)


def _cell(seen: dict[str, Any] | None) -> str:
    return f"{seen['ratio']:.2f} ({seen['low']:.2f}-{seen['high']:.2f})" if seen else ""


def _about(run: dict[str, Any]) -> str:
    return f"{run['date']}; {run['operands']}; {run['machine']}; `{run['command']}`"


if __name__ == "__main__":
    write_pages()
