"""What a service pays for hubplugin: importing it beside qdrant-client, and its environment on disk.

    python -m benchmarks.serving [--environment FOLDER] [--repeats 5]

Times are of the processor, the quickest of some fresh processes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

IMPORT = """
import resource, sys, time
def used(): return time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
import qdrant_client
before = used()
import hubplugin_qdrant
after = used()
print(*before, after[0] - before[0], after[1] - before[1], "torch" in sys.modules)
"""


def imported(repeats: int) -> list[float]:
    """Seconds and MB of qdrant_client, and what hubplugin_qdrant adds to either."""
    runs = []
    for _ in range(repeats):
        run = subprocess.run(
            [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
        )
        *figures, torch = run.stdout.split()
        assert torch == "False", "the import brought torch"
        runs.append([float(each) for each in figures])
    return list(np.min(runs, axis=0))


def megabytes(folder: Path) -> float:
    return (
        sum(
            path.stat().st_size
            for path in folder.rglob("*")
            if path.is_file() and not path.is_symlink()
        )
        / 2**20
    )


def main(
    environment: Annotated[
        Path | None, typer.Option(help="Its size on disk is told.")
    ] = None,
    repeats: int = 5,
) -> None:
    seconds, size, more_seconds, more_size = imported(repeats)
    print(f"import qdrant_client: {seconds:.2f} s, {size:.0f} MB")
    print(f"import hubplugin_qdrant: {more_seconds:.2f} s and {more_size:.0f} MB more")
    if environment is not None:
        print(f"environment: {megabytes(environment):.0f} MB")


if __name__ == "__main__":
    typer.run(main)
