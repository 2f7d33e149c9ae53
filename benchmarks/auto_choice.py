"""How much `auto` finds with pairs over the default, and how near it comes to the best candidate in hindsight.

    python -m benchmarks.auto_choice [--splits 4] [--first 10] [--only coco] [--write docs/choosing.md]

Each split draws bank and test pairs anew. The choice sees bank and gallery; hindsight tries every candidate, fitted on
the whole bank, on the test queries, which the choice never saw. Sets that are not there are left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from benchmarks.tables import CODE_SEARCH, EXAMPLES, pairs, write_table
from hubplugin import Bank
from hubplugin.compute import Compute, HoldingCompute, Similarities, dense
from hubplugin.methods import FitInput
from hubplugin.methods.blend import Blend
from hubplugin.metric import Metric
from hubplugin.trial import Experiment, choose_by
from hubplugin.vectors import as_vectors

SHARED = CODE_SEARCH.parent


class Split(NamedTuple):
    """Test queries and their targets, the gallery; bank queries and their targets. Row i belongs to row i."""

    queries: np.ndarray
    targets: np.ndarray
    bank: np.ndarray
    second: np.ndarray


def arrays(folder: Path, *names: str) -> list[np.ndarray]:
    return [unit(np.load(folder / f"{name}.npy")) for name in names]


def unit(vectors: np.ndarray) -> np.ndarray:
    wide = vectors.astype(np.float32)
    scaled: np.ndarray = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    return scaled


def settings(seed: int) -> Iterator[tuple[str, Split]]:
    """One split of every set that is there."""
    rng = np.random.default_rng(seed)
    for folder, forth, back in (
        ("coco500", "text to image, 250 targets", "image to text, 250 targets"),
        ("tldr_ko", "Korean to English, 1,000 targets", "English to Korean, 1,000 targets"),
    ):
        if (SHARED / folder).exists():
            first, second = arrays(SHARED / folder, "queries", "targets")
            test, bank = np.array_split(rng.permutation(len(first)), 2)
            yield forth, Split(first[test], second[test], first[bank], second[bank])
            yield back, Split(second[test], first[test], second[bank], first[bank])
    if (SHARED / "debian").exists():
        asked, other, targets = arrays(SHARED / "debian", "queries_a", "queries_b", "targets")
        test, bank = rng.permutation(len(targets))[:3_000].reshape(2, -1)
        for size in (1_500, 500):
            kept = bank[:size]
            yield "package search, 1,500 targets", Split(other[test], targets[test], asked[kept], targets[kept])
    for name, folder, size, banks in (
        ("code search, 2,000 targets", CODE_SEARCH, 2_000, (4_000, 1_500, 400)),
        ("examples, 1,200 targets", EXAMPLES, 1_200, (2_500, 300)),
    ):
        if folder.exists():
            queries, targets = map(unit, pairs(folder))
            rows = rng.permutation(len(queries))
            for count in banks:
                test, bank = rows[:size], rows[size : size + count]
                yield name, Split(queries[test], targets[test], queries[bank], targets[bank])


def measure(split: Split, seed: int) -> dict[str, float]:
    """R@1 in per cent: raw, of the default, of the choice, of the best candidate in hindsight; and seconds."""
    gallery, compute = as_vectors(split.targets, "targets"), HoldingCompute(memory="2GiB")
    start = time.perf_counter()
    bank = Bank(split.bank, split.second, pairs=True).prepare(Metric.COSINE, Compute())
    choice = choose_by(Experiment(bank.against(gallery), seed))
    seconds = time.perf_counter() - start
    given = FitInput.read(split.bank, gallery, split.second, Metric.COSINE, compute)
    scores = dense(Similarities(split.queries, Metric.COSINE, compute), gallery).numpy()
    fitted = {}

    def recall(offsets: np.ndarray | float = 0.0) -> float:
        return 100 * float(((scores + offsets).argmax(axis=1) == np.arange(len(scores))).mean())

    def of(blend: Blend) -> float:
        total = np.zeros(len(split.targets))
        for weight, part in blend.parts:
            if part not in fitted:
                fitted[part] = part.model(given).raw_offsets(gallery, compute)
            total += weight * fitted[part]
        return recall(total)

    tried = [trial.tried_method for trial in choice]
    return {
        "raw": recall(),
        "default": of(Blend.model_validate({}).resolved(given)),
        "chosen": of(choice[0].tried_method),
        "best": max(of(blend) for blend in tried),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--splits", type=int, default=4)
    parser.add_argument("--first", type=int, default=10, help="the seed of the first split")
    parser.add_argument("--only", default="", help="settings whose name holds this")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    given = parser.parse_args()
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for seed in range(given.first, given.first + given.splits):
        for name, split in settings(seed):
            if given.only in name:
                part = measure(split, seed)
                found.setdefault((name, len(split.bank)), []).append(part)
                print(name, len(split.bank), seed, part, file=sys.stderr, flush=True)
    lines = [
        "| data | bank | raw R@1 | default | auto | auto over default | best in hindsight | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    gains = []
    for (name, bank), parts in found.items():
        mean = {key: np.mean([part[key] for part in parts]) for key in parts[0]}
        gain = [part["chosen"] - part["default"] for part in parts]
        gains.append(np.mean(gain))
        error = stats.sem(gain) if len(gain) > 1 else float("nan")
        lines.append(
            f"| {name} | {bank:,} | {mean['raw']:.1f} | {mean['default']:.1f} | {mean['chosen']:.1f} "
            f"| {np.mean(gain):+.2f} ± {error:.2f} | {mean['best']:.1f} | {mean['seconds']:.0f} |"
        )
    lines.append(f"| mean | | | | | {np.mean(gains):+.2f} | | |")
    table = "\n".join(lines)
    print(table)
    if given.write:
        write_table(given.write, "auto_choice", table)


if __name__ == "__main__":
    main()
