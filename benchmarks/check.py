"""Whether a fit has become slower beside the bare product: `python -m benchmarks.check`, which is `make ratios`.

Runs a few contenders on small random operands and compares their ratios, not their seconds, with those stored by
`python -m benchmarks.fit`. The bound is generous: what it catches is a pass too many, not a noisy machine.
"""

from __future__ import annotations

import json

from benchmarks.fit import run_apart, summary
from benchmarks.tables import RESULTS, machine

SAME, OTHER = 2.0, 4.0
"""Times the stored ratio, on the processor it was stored on and on another, where a product costs more or less beside
an exponential. A processor is its name and its instruction set."""


def main() -> None:
    results = json.loads((RESULTS / "fit.json").read_text())
    same = results["machine"].partition(",")[0] == machine(1).partition(",")[0]
    bound = SAME if same else OTHER
    slower = []
    for name, stored in results["check"].items():
        found = summary(run_apart(name, "random", repeats=5, threads=1))["ratio"]
        print(f"{name}: {found:.2f} times the bare product; stored {stored:.2f}, allowed {bound:g} x", flush=True)
        if found > bound * stored:
            slower.append(name)
    if slower:
        told = f"slower than {bound:g} x the stored ratio: {', '.join(slower)}; see python -m benchmarks.fit"
        if same:
            raise SystemExit(told)
        print(f"{told}. The stored ratios are those of another processor, so this is no failure.")


if __name__ == "__main__":
    main()
