"""How many calibration queries the candidates of a corrected search need: python -m benchmarks.qdrant_candidates

For each setting and method, 32 to 256 queries of the bank choose candidates a result as the adapter for Qdrant does:
the fewest, in steps of a quarter, among which lie 0.99 of their corrected top 10. Test queries, which chose nothing,
then say how much of theirs lies among these. Raw searches are exact here, so nothing else is lost. Needs no server.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

import hubplugin
from benchmarks.bank_settings import further, seventeen
from benchmarks.tables import SHARED, markdown
from hubplugin.calibration import STEP

K, AGREEMENT, SMALLEST_GALLERY, TESTS, DRAWS = 10, 0.99, 900, 1_000, 2
METHODS = (("dbsn", {"tau": 0.05}), ("nnn", {}), ("is", {"tau": 0.02}))
COUNTS = (32, 64, 128, 256)


def places(queries: np.ndarray, targets: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Where each of the corrected top 10 stands in the raw ranking, from 0: [q, 10]."""
    scores = queries @ targets.T
    best = np.argpartition(-(scores + offsets), K, axis=1)[:, :K]
    own = np.take_along_axis(scores, best, 1)
    return np.stack(
        [(scores > own[:, [column]]).sum(axis=1) for column in range(K)], axis=1
    )


def chosen(found: np.ndarray, most: float) -> float:
    """The fewest candidates a result among which AGREEMENT of what was `found` lies."""
    ratio = 1.0
    while ratio < most and (found < round(K * ratio)).mean() < AGREEMENT:
        ratio *= STEP
    return min(ratio, most)


def main() -> None:
    recalls: dict[tuple[str, int], list[float]] = defaultdict(list)
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    families = [
        each
        for group in (seventeen, further)
        for each in group(SHARED)
        if each.source.is_dir()
    ]
    settings = [
        family.draw(seed)
        for family in families
        for seed in range(min(DRAWS, family.splits))
    ]
    for setting in (each for each in settings if len(each.targets) >= SMALLEST_GALLERY):
        for method, parameters in METHODS:
            offsets = hubplugin.fit(
                setting.targets, setting.bank, method, **parameters
            ).offsets(setting.targets)
            tests = [
                places(queries[:TESTS], setting.targets, offsets)
                for queries, _ in setting.tests.values()
            ]
            for count in COUNTS:
                rows = np.linspace(
                    0, len(setting.bank) - 1, min(count, len(setting.bank))
                ).astype(int)
                own = places(setting.bank[rows], setting.targets, offsets)
                ratio = chosen(own, len(setting.targets) / K)
                recalls[method, count] += [
                    float((found < round(K * ratio)).mean()) for found in tests
                ]
                ratios[method, count].append(ratio)
    lines = [
        [
            f"`{method}`",
            str(count),
            str(len(values)),
            f"{np.mean(values):.4f}",
            f"{min(values):.3f}",
            f"{np.mean(np.array(values) < AGREEMENT - 0.005):.2f}",
            f"{np.exp(np.mean(np.log(ratios[method, count]))):.1f}",
        ]
        for (method, count), values in recalls.items()
    ]
    head = [
        "method",
        "calibration queries",
        "tests",
        "recall of test queries, mean",
        "worst",
        "share below 0.985",
    ]
    print(markdown([*head, "candidates a result, geometric mean"], lines))


if __name__ == "__main__":
    main()
