"""Whether a fit has become slower beside the bare product: `python -m benchmarks.check`, part of `make test`.

Runs a few contenders on small random operands and compares their ratios, not their seconds, with those stored by
`python -m benchmarks.fit`. The bound is generous: what it catches is a pass too many, not a noisy machine.
"""

from __future__ import annotations

import json

from benchmarks.fit import run_apart, summary
from benchmarks.tables import RESULTS

BOUND = 2.0
"""Times the stored ratio. Of several turns the lowest counts, which other work on the machine disturbs the least."""


def main() -> None:
    slower = []
    for name, stored in json.loads((RESULTS / "fit.json").read_text())["check"].items():
        found = summary(run_apart(name, "random", repeats=5, threads=1))["low"]
        print(f"{name}: {found:.2f} times the bare product, stored {stored:.2f}", flush=True)
        if found > BOUND * stored:
            slower.append(name)
    if slower:
        raise SystemExit(f"slower than {BOUND} x the stored ratio: {', '.join(slower)}; see python -m benchmarks.fit")


if __name__ == "__main__":
    main()
