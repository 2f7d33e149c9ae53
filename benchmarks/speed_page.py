"""The table of fits in docs/speed.md, from what is stored of every family of processors.

python -m benchmarks.speed_page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.contenders import CONTENDERS
from benchmarks.tables import RESULTS, ROOT, markdown, write_table

PAGE = ROOT / "docs" / "speed.md"
FOLDER = RESULTS / "fit"


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
