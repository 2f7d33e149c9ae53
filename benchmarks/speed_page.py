"""The table of fits in docs/speed.md, from what is stored of every family of processors.

python -m benchmarks.speed_page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.contenders import CONTENDERS
from benchmarks.tables import RESULTS, ROOT, markdown, write_table

PAGE = ROOT / "docs" / "speed.md"
FOLDER = RESULTS / "fit"


def file_of(family: str) -> Path:
    """Where the results of a family of processors lie."""
    return FOLDER / f"{family.lower().replace(' ', '-')}.json"


def write_pages() -> None:
    found = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    runs = {(each["family"], int(threads)): run for each in found for threads, run in sorted(each["runs"].items())}
    about = "\n".join(f"- {_named(*key)}: {_about(run)}" for key, run in runs.items()) + "\n\n"
    write_table(PAGE, "fit", about + table(runs, tuple(CONTENDERS)))


Runs: TypeAlias = dict[tuple[str, int], dict[str, Any]]
"""By family and number of threads."""


def table(runs: Runs, names: tuple[str, ...]) -> str:
    """A line for each contender, with its ratio in every run and its goal there."""
    lines = []
    for name in names:
        seen = [run["contenders"].get(name) for run in runs.values()]
        if not any(seen):
            continue
        differs = next((each["differs by"] for each in seen if each and each["differs by"]), "")
        memory = next((f"{each['memory_mib']:,}" for each in seen if each), "")
        cells = [_cell(each, CONTENDERS[name].goal) for each in seen]
        lines.append([name, *cells, memory, differs])
    lines.append(["FlashSinkhorn", *["needs a CUDA GPU"] * len(runs), "", ""])
    return markdown(["work", *(_named(*key) for key in runs), "MiB", "differs by"], lines)


def _cell(seen: dict[str, Any] | None, goal: float | None) -> str:
    allowed = f"; goal {goal:.3g}" if goal else ""
    return f"{seen['ratio']:.2f} ({seen['low']:.2f}-{seen['high']:.2f}){allowed}" if seen else ""


def _named(family: str, threads: int) -> str:
    return f"{family}, {threads} thread{'s' if threads > 1 else ''}"


def _about(run: dict[str, Any]) -> str:
    return f"{run['date']}; {run['operands']}; {run['machine']}; `{run['command']}`"


if __name__ == "__main__":
    write_pages()
