"""How a bank lies towards the gallery and the queries: the distance between their distributions, and coverage."""

from __future__ import annotations

import numpy as np

from hubplugin.metric import Metric
from hubplugin.reductions import Compute
from hubplugin.search import TopK, search
from hubplugin.vectors import Vectors

SAMPLE = 1000


def earth_movers_distance(first: np.ndarray, second: np.ndarray, seed: int, sample: int = SAMPLE) -> float:
    """Mean distance that the vectors of `first` [a, d] must be moved to become those of `second` [b, d]: DBSN fig. 7.

    Euclidean distance, on equally many rows of both, `sample` at most, drawn with `seed`. Between two samples of one
    size and even weights the best transport plan is a one-to-one assignment (Birkhoff), which scipy finds exactly.
    A sample overstates the distance, by the more the smaller it is: compare figures of one sample size only.
    """
    from scipy.optimize import linear_sum_assignment
    from scipy.spatial.distance import cdist

    generator, rows = np.random.default_rng(seed), min(sample, len(first), len(second))
    drawn = [vectors[generator.choice(len(vectors), rows, replace=False)] for vectors in (first, second)]
    distances = cdist(*drawn)
    return float(distances[linear_sum_assignment(distances)].mean())


def coverage(bank: np.ndarray, targets: Vectors, metric: Metric, compute: Compute) -> float:
    """Share of the gallery that is the nearest target of some bank row, 0 to 1. `bank` is prepared, [m, d].

    What no bank query comes near, no bank query can tell to be a hub. m bank rows cover at most m / n.
    """
    nearest = TopK(1)
    search(bank, targets, metric, compute, nearest, what="coverage of the gallery")
    return len(np.unique(nearest.rows)) / targets.rows
