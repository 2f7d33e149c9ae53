"""Draw what searches took while a job ran: python -m benchmarks.live_picture BEFORE.csv AFTER.csv FILE.svg

Each CSV is the `--seconds` of `benchmarks.qdrant_live`. The picture has a row for each,
with median and 95th percentile of every second on a logarithmic scale, and the time of
the job shaded. A dashed line is at three times the median 95th percentile before the jobs.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WIDTH = 800
HEIGHT = 190
LEFT = 60
TOP = 34
LOWEST, HIGHEST = 2.0, 2000.0
"""The range of milliseconds."""

STYLE = """text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #e6e9ed; }
.faint { fill: #a3abb5; }
path { fill: none; stroke-width: 1.5; }
.p50 { stroke: #56d3a2; }
.p95 { stroke: #ff8a80; }
.line { stroke: #3a424d; stroke-width: 1; }
.goal { stroke: #a3abb5; stroke-width: 1; stroke-dasharray: 4 4; }
.job { fill: #232a33; }"""


@dataclass
class Run:
    """The seconds of one run.

    seconds: The seconds with searches [n].
    p50, p95: Milliseconds in each of them [n].
    first, last: The seconds in which the job began and ended.
    """

    seconds: np.ndarray
    p50: np.ndarray
    p95: np.ndarray
    first: float
    last: float

    @classmethod
    def read(cls, file: str) -> Run:
        with open(file, newline="") as opened:
            rows = [row for row in csv.DictReader(opened) if row["p50"]]
        numbers = [
            [float(row[name]) for row in rows] for name in ("second", "p50", "p95")
        ]
        job = [float(row["second"]) for row in rows if row["task"]]
        seconds, p50, p95 = map(np.array, numbers)
        return cls(seconds, p50, p95, job[0], job[-1])

    @property
    def quiet(self) -> np.ndarray:
        """The 95th percentiles of the seconds before the job."""
        return self.p95[self.seconds < self.first]


def place(ms: float) -> float:
    """Return the height of `ms` milliseconds within a row, from its top."""
    share = math.log(min(max(ms, LOWEST), HIGHEST) / LOWEST)
    return HEIGHT * (1 - share / math.log(HIGHEST / LOWEST))


def draw_run(run: Run, name: str, goal: float, longest: float, top: float) -> list[str]:
    """Return the elements of one row, whose upper edge is at `top`."""

    def across(second: float) -> float:
        return LEFT + (WIDTH - LEFT - 10) * second / longest

    start, end = across(run.first), across(run.last)
    over = run.p95 > goal
    during = (run.seconds >= run.first) & (run.seconds <= run.last)
    took = run.last - run.first
    title = f"{name}: {took:.0f} s, {int((over & during).sum())} of them above"
    lines = [
        f'<text x="{LEFT}" y="{top - 10:.0f}">{title}</text>',
        f'<rect class="job" x="{start:.1f}" y="{top:.1f}" '
        f'width="{end - start:.1f}" height="{HEIGHT}"/>',
    ]
    for ms in (10, 100, 1000):
        y = top + place(ms)
        lines.append(f'<path class="line" d="M{LEFT} {y:.1f}H{WIDTH - 10}"/>')
        label = f"{ms} ms"
        lines.append(f'<text class="faint" x="4" y="{y + 4:.1f}">{label}</text>')
    y = top + place(goal)
    lines.append(f'<path class="goal" d="M{LEFT} {y:.1f}H{WIDTH - 10}"/>')
    for kind, values in (("p95", run.p95), ("p50", run.p50)):
        points = [
            f"{across(second):.1f} {top + place(ms):.1f}"
            for second, ms in zip(run.seconds, values, strict=True)
        ]
        lines.append(f'<path class="{kind}" d="M{"L".join(points)}"/>')
    step = 60 * max(1, round(longest / 60 / 8))
    for second in np.arange(0, longest, step):
        x = across(float(second))
        text = f"{second / 60:.0f} min"
        y = top + HEIGHT + 16
        lines.append(f'<text class="faint" x="{x:.0f}" y="{y:.0f}">{text}</text>')
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", help="with pace=all")
    parser.add_argument("after", help="by tenths")
    parser.add_argument("picture")
    given = parser.parse_args(arguments)
    runs = {"pace=all": Run.read(given.before), "by tenths": Run.read(given.after)}
    longest = max(float(run.seconds[-1]) for run in runs.values())
    quiet = np.concatenate([run.quiet for run in runs.values()])
    goal = 3 * float(np.median(quiet))
    row = HEIGHT + 70
    height = TOP + len(runs) * row
    lines = [
        f'<svg viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg" role="img">',
        f"<style>\n{STYLE}\n</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#181d23"/>',
        f'<text x="{LEFT}" y="20"><tspan fill="#56d3a2">median</tspan> and '
        '<tspan fill="#ff8a80">95th percentile</tspan> of plain searches, each second; '
        "dashed: 3 x quiet</text>",
    ]
    for number, (name, run) in enumerate(runs.items()):
        lines += draw_run(run, name, goal, longest, TOP + 30 + number * row)
    Path(given.picture).write_text("\n".join([*lines, "</svg>\n"]), encoding="utf-8")


if __name__ == "__main__":
    main()
