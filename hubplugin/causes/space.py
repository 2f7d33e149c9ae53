"""Causes that lie in the space: a few dimensions that hold everything, and lengths that outweigh directions."""

from __future__ import annotations

import numpy as np

from hubplugin.causes.finding import Finding
from hubplugin.metric import Metric

FEWEST_DIMENSIONS = 15.0
"""Effective dimensions below which there is no room to tell documents apart: models have 38 to 111 on all data tried,
the same vectors projected to 24 dimensions 17 to 20, to 12 dimensions 9 to 11."""

ALIKE = 0.6
"""Mean cosine of two documents drawn at random, from which on scores say little by themselves: no trouble for a
ranking, but one for thresholds."""

FEWEST = 100

LONG, LIFTED = 0.1, 3.0
"""The longest tenth of the vectors are a trouble where they take three times their share of all places."""


def collapsed(targets: np.ndarray) -> Finding:
    """Whether `targets` [s, d], a sample, lie in a few dimensions."""
    cause, advice = "collapsed space", "look at the model, its pooling and what became of the vectors on their way here"
    if len(targets) < FEWEST:
        return Finding(cause, None, f"{len(targets)} documents are too few to tell; {FEWEST} are needed")
    dimensions, cosine = effective_dimensions(targets), mean_cosine(targets)
    says = f"the documents spread over {dimensions:.0f} effective dimensions of {targets.shape[1]}"
    if cosine >= ALIKE:
        says += (
            f", and two of them drawn at random have a cosine of {cosine:.2f}: thresholds on scores mean little, "
            "rankings are none the worse"
        )
    # Of vectors with few components that is no collapse.
    trouble = dimensions < min(FEWEST_DIMENSIONS, targets.shape[1] / 4)
    return Finding(cause, trouble, says, advice, {"effective_dimensions": dimensions, "mean_cosine": cosine})


def effective_dimensions(vectors: np.ndarray) -> float:
    """The participation ratio of the variances along principal axes: (sum v)^2 / sum v^2."""
    centred = vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64)
    variances = np.linalg.svd(centred, compute_uv=False) ** 2
    total = float((variances**2).sum())
    return float(variances.sum()) ** 2 / total if total else 0.0


def mean_cosine(vectors: np.ndarray) -> float:
    """Of two different rows."""
    unit = vectors.astype(np.float64)
    unit = unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-30)
    count = len(unit)
    return float(((unit.sum(axis=0) ** 2).sum() - count) / (count * (count - 1)))


def lengths(places: np.ndarray, targets: np.ndarray, metric: Metric) -> Finding:
    """Whether long vectors win by their length. places, targets: lengths of the vectors in places of answers, and of
    targets drawn at random."""
    cause = "lengths"
    if metric is not Metric.DOT:
        return Finding(cause, False, f"{metric.value} does not rank by length")
    limit = float(np.quantile(targets, 1 - LONG))
    taken, own = float((places > limit).mean()), float((targets > limit).mean())
    says = (
        f"vectors have lengths of {targets.min():.3g} to {targets.max():.3g}, and the longest {100 * own:.0f} % take "
        f"{100 * taken:.0f} % of all places of a search by dot product"
    )
    trouble = own > 0 and taken >= LIFTED * own and float(np.ptp(targets)) > 0.01 * limit
    advice = "normalise the vectors or search by cosine, unless the model was trained for dot product"
    return Finding(cause, trouble, says, advice, {"places": taken, "documents": own})
