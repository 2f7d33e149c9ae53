"""How far the banks of the example set lie apart, and what the temperature does to recall and hubness.

    python -m benchmarks.banks_apart

Distances are earth mover's distances of Euclidean cost (DBSN fig. 7), on samples of equal size.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

import hubplugin
from benchmarks.tables import EXAMPLES, markdown
from hubplugin import Metric
from hubplugin.evaluation import Results
from hubplugin.metric import normalise
from hubplugin.vectors import as_vectors, sampled

SAMPLE = 1000

SWEPT = ("is", "sn", "dbsn")
TEMPERATURES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.2)
"""The papers' settings and a decade around, for cosine."""


def earth_movers_distance(first: np.ndarray, second: np.ndarray, seed: int, sample: int = SAMPLE) -> float:
    """Mean distance that the vectors of `first` [a, d] must be moved to become those of `second` [b, d].

    On equally many rows of both, `sample` at most, drawn with `seed`. Between two samples of one size and even weights
    the best transport plan is a one-to-one assignment (Birkhoff), which scipy finds exactly.
    A sample overstates the distance, by the more the smaller it is: compare figures of one sample size only.
    """
    generator, rows = np.random.default_rng(seed), min(sample, len(first), len(second))
    drawn = [vectors[generator.choice(len(vectors), rows, replace=False)] for vectors in (first, second)]
    distances = cdist(*drawn)
    return float(distances[linear_sum_assignment(distances)].mean())


def sweep(
    queries: np.ndarray,
    targets: np.ndarray,
    query_bank: np.ndarray,
    target_bank: np.ndarray,
    temperatures: tuple[float, ...] = TEMPERATURES,
) -> Results:
    """Each of the `SWEPT` at each temperature, labelled as in "is tau=0.05", on pairs row by row."""
    methods = [f"{method} tau={tau:g}" for method in SWEPT for tau in temperatures]
    return hubplugin.evaluate(targets, hubplugin.Bank(query_bank, target_bank), queries=queries, methods=methods)


def main() -> None:
    parts = {
        f"{part}_{side}": np.load(EXAMPLES / f"{part}_{side}.npy")
        for part in ("test", "bank")
        for side in ("queries", "targets")
    }
    unit = {name: normalise(vectors.astype(np.float32), name) for name, vectors in parts.items()}
    gallery = sampled(as_vectors(parts["test_targets"], "targets"), SAMPLE, Metric.COSINE, np.random.default_rng(0))
    apart = {
        "queries to targets": (unit["test_queries"], gallery),
        "query bank to queries": (unit["bank_queries"], unit["test_queries"]),
        "query bank to targets": (unit["bank_queries"], gallery),
        "query bank to both target sets": (unit["bank_queries"], np.concatenate([gallery, unit["bank_targets"]])),
    }
    rows = [[name, f"{earth_movers_distance(*pair, seed=0):.3f}"] for name, pair in apart.items()]
    print(markdown(["between", "earth mover's distance"], rows))
    found = sweep(*parts.values())
    rows = [[m.label, f"{100 * m.recall[1].value:.1f}", f"{m.hubness.skewness:.2f}"] for m in found.methods]
    print(markdown(["method", "R@1", "skewness"], rows))


if __name__ == "__main__":
    main()
