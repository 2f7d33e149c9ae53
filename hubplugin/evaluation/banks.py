"""How a bank lies towards the gallery and the queries: the distance between their distributions, and coverage."""

from __future__ import annotations

from functools import partial

import numpy as np

from hubplugin.evaluation.result import BankFigures
from hubplugin.evaluation.scene import Scene
from hubplugin.metric import Metric
from hubplugin.reductions import Compute, sampled
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


def bank_figures(scene: Scene) -> BankFigures:
    """How the banks of an evaluation lie."""
    gallery = sampled(scene.targets, SAMPLE, scene.metric, np.random.default_rng(scene.seed))
    distance = partial(earth_movers_distance, seed=scene.seed)
    given = scene.given
    if given is None:
        sample = min(SAMPLE, len(scene.queries), len(gallery))
        return BankFigures(sample=sample, queries_to_targets=distance(scene.queries, gallery, sample=sample))
    both = None if given.target_bank is None else np.concatenate([gallery, given.target_bank])
    sample = min(SAMPLE, len(scene.queries), len(gallery), len(given.query_bank))
    distance = partial(distance, sample=sample)
    return BankFigures(
        sample=sample,
        queries_to_targets=distance(scene.queries, gallery),
        query_bank_to_queries=distance(given.query_bank, scene.queries),
        query_bank_to_targets=distance(given.query_bank, gallery),
        query_bank_to_targets_and_target_bank=None if both is None else distance(given.query_bank, both),
        coverage=coverage(given.query_bank, scene.targets, scene.metric, scene.compute),
    )
