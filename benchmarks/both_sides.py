"""Whether the two sides of a log that the guard reports are those that other wordings show.

    python -m benchmarks.both_sides [--data FOLDER] [--splits 2] [--write docs/choosing.md]

Of each log the change of R@1, in points, on test queries that the guard never saw (truth), and what the guard reports:
from the bank alone, and with clicks, which say what each bank query asked for.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.bank_settings import Family, Setting, few_hot, package_log, popular, wordings_log
from benchmarks.tables import SHARED, markdown, write_table
from hubplugin.bank import Bank
from hubplugin.compute import Compute
from hubplugin.methods import FitInput, Method, configure
from hubplugin.metric import Metric
from hubplugin.trial import Experiment
from hubplugin.trial.guard import both_sides

METHODS = (configure("dbsn", tau=0.05), configure("blend"))
HEAD = ["log", "method", "side", "truth", "from the bank alone", "tried on", "with clicks", "tried on"]


def logs(data: Path) -> list[Family]:
    debian, tldr = data / "debian", data / "tldr_log"
    return [
        *(
            Family(f"packages, log of {log:,}", "log", debian, 3, partial(package_log, debian, log))
            for log in (1500, 300, 100)
        ),
        Family("commands, popular log", "popular log", tldr, 3, partial(wordings_log, tldr, popular)),
        Family("commands, 60 hot targets", "popular log", tldr, 3, partial(wordings_log, tldr, few_hot)),
    ]


def truth(setting: Setting, given: FitInput, method: Method) -> list[float]:
    """Change of R@1 of what was asked, and of what was not, in points."""
    offsets = method.fit(given).offsets(setting.targets)
    changes = []
    for name in ("asked", "not asked"):
        queries, rows = setting.tests[name]
        scores = queries @ setting.targets.T
        right = [float((part.argmax(axis=1) == rows).mean()) for part in (scores + offsets, scores)]
        changes.append(100 * (right[0] - right[1]))
    return changes


def rows_of(family: Family, splits: int) -> list[list[str]]:
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    tried: dict[tuple[str, int], str] = {}
    for seed in range(min(splits, family.splits)):
        setting = family.draw(seed)
        banks = Bank(setting.bank).prepare(Metric.COSINE, Compute("cpu", "2GiB")).against(setting.targets)
        for method in METHODS:
            changes = [truth(setting, banks, method)]
            for number, clicks in enumerate((None, setting.clicks)):
                with closing(Experiment(replace(banks, clicks=clicks), seed)) as experiment:
                    sides = both_sides(experiment, method.resolved(banks))
                assert sides is not None
                changes.append([100 * (side.after - side.before) for side in (sides.asked, sides.other)])
                for name, side in (("asked", sides.asked), ("not asked", sides.other)):
                    tried[name, number] = f"{side.queries} {side.what}"
            for name, values in zip(("asked", "not asked"), zip(*changes, strict=True), strict=True):
                found.setdefault((method.name, name), []).append(values)
                print(family.name, seed, method.name, name, *np.round(values, 2), sep="\t", file=sys.stderr, flush=True)
    lines = []
    for (method_name, name), values in found.items():
        first, alone, clicked = (f"{value:+.1f}" for value in np.mean(values, axis=0))
        lines.append([family.name, method_name, name, first, alone, tried[name, 0], clicked, tried[name, 1]])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=SHARED, help="folder of debian and tldr_log")
    parser.add_argument("--splits", type=int, default=3, help="at most so many draws a log")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = [line for family in logs(given.data) if family.source.is_dir() for line in rows_of(family, given.splits)]
    text = markdown(HEAD, lines)
    print(text)
    if given.write:
        write_table(given.write, "both sides", text)


if __name__ == "__main__":
    main()
