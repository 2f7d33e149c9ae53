"""How near the automatic choice comes to the best candidate in hindsight.

    python -m benchmarks.auto_choice [--splits 5] [--first 0] [--sets 1 2 3 4] [--write docs/choosing.md]

Each split draws bank and test pairs anew from one data set. The choice sees the bank and the gallery; hindsight tries
every candidate, fitted on the whole bank, on test queries that the choice never saw.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.tables import CODE_SEARCH, EXAMPLES, pairs, write_table
from hubplugin.methods import FitInput, configure
from hubplugin.metric import Metric
from hubplugin.reductions import Compute, HoldingCompute, Similarities, dense
from hubplugin.tuning import choose
from hubplugin.vectors import as_vectors

SETS = [
    ("examples", EXAMPLES, 300, 1_200),
    ("examples", EXAMPLES, 2_500, 1_200),
    ("code_search", CODE_SEARCH, 500, 3_000),
    ("code_search", CODE_SEARCH, 4_000, 3_000),
]


def recall(scores: np.ndarray) -> float:
    return 100 * float((scores.argmax(axis=1) == np.arange(len(scores))).mean())


def split(folder: Path, bank: int, test: int, seed: int) -> list[dict[str, float]]:
    queries, targets = pairs(folder)
    rows = np.random.default_rng(seed).permutation(len(queries))[: test + bank]
    asked, known = rows[:test], rows[test:]
    gallery, compute = as_vectors(targets[asked], "targets"), HoldingCompute(memory="2GiB")
    given = FitInput.read(queries[known], gallery, targets[known], Metric.COSINE, compute)
    scores = dense(Similarities(_unit(queries[asked]), Metric.COSINE, Compute()), gallery).numpy()
    results = []
    hindsight: dict[str, float] = {}
    for paired in (True, False):
        start = time.perf_counter()
        choice = choose(queries[known], gallery, targets[known], pairs=paired, seed=seed)
        seconds = time.perf_counter() - start
        for candidate in choice.candidates:
            if candidate.name not in hindsight:
                model = configure(candidate.method, **candidate.parameters).model(given)
                hindsight[candidate.name] = recall(scores + model.raw_offsets(gallery, compute))
        raw, best = recall(scores), max(hindsight[candidate.name] for candidate in choice.candidates)
        results.append(
            {"raw": raw, "chosen": hindsight[choice.winner.name], "best": max(best, raw), "seconds": seconds,
             "name": choice.winner.name}
        )  # fmt: skip
    return results


def _unit(vectors: np.ndarray) -> np.ndarray:
    wide = vectors.astype(np.float32)
    return wide / np.linalg.norm(wide, axis=1, keepdims=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first split")
    parser.add_argument("--sets", type=int, nargs="*", default=range(1, len(SETS) + 1), help="which, from 1")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    given = parser.parse_args()
    lines = [
        "| data | bank | chosen by | raw R@1 | chosen | best in hindsight | behind, mean | behind, worst | seconds |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, folder, bank, test in (SETS[number - 1] for number in given.sets):
        if not folder.exists():
            print(f"{name}: {folder.name} is not here; set HUBPLUGIN_CODE_SEARCH", file=sys.stderr)
            continue
        found = []
        for seed in range(given.first, given.first + given.splits):
            found.append(split(folder, bank, test, seed))
            for basis, part in zip(("pairs", "hubness"), found[-1], strict=True):
                print(f"{name} {bank} split {seed} by {basis}: {part}", file=sys.stderr, flush=True)
        for basis, parts in zip(("pairs", "hubness"), zip(*found, strict=True), strict=True):
            mean = {key: np.mean([part[key] for part in parts]) for key in ("raw", "chosen", "best", "seconds")}
            behind = [part["best"] - part["chosen"] for part in parts]
            error = stats.sem(behind) if len(behind) > 1 else float("nan")
            lines.append(
                f"| {name}, {test:,} targets | {bank:,} | {basis} | {mean['raw']:.2f} | {mean['chosen']:.2f} "
                f"| {mean['best']:.2f} | {np.mean(behind):.2f} ± {error:.2f} | {max(behind):.2f} "
                f"| {mean['seconds']:.0f} |"
            )
    table = "\n".join(lines)
    print(table)
    if given.write:
        write_table(given.write, "auto_choice", table)


if __name__ == "__main__":
    main()
