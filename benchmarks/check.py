"""Whether a fit has become slower beside the bare product: `python -m benchmarks.check`, which is `make ratios`.

Runs a few contenders on small random operands and compares their ratios, not their seconds, with those that
`python -m benchmarks.fit` has stored of the same family of processors. Of another family they are only printed: there a
product costs more or less beside an exponential. The bound is generous: what it catches is a pass too many, not a noisy
machine.
"""

from __future__ import annotations

from benchmarks.fit import CHECKED, run_apart, stored, summary
from benchmarks.tables import family

BOUND = 2.0
"""Times the stored ratio."""


def main() -> None:
    known, slower = stored(family()).get("check", {}), []
    if not known:
        print(f"nothing is stored of {family()}: ratios are printed and compared with nothing")
    for name in CHECKED:
        found = summary(run_apart(name, "random", repeats=5, threads=1))["ratio"]
        beside = f"; stored {known[name]:.2f}, allowed {BOUND:g} x" if name in known else ""
        print(f"{name}: {found:.2f} times the bare product{beside}", flush=True)
        if name in known and found > BOUND * known[name]:
            slower.append(name)
    if slower:
        raise SystemExit(f"slower than {BOUND:g} x the stored ratio: {', '.join(slower)}; see python -m benchmarks.fit")


if __name__ == "__main__":
    main()
