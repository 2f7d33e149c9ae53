"""Check for causes of bad searches, besides hubness, that a user can act on.

Samples of queries and documents suffice for each check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hubplugin.bank.kinds import CHANCE, typical_similarity
from hubplugin.compute import Compute
from hubplugin.metric import Metric


@dataclass(frozen=True)
class Finding:
    """A possible cause of bad searches.

    found: True if the cause is present, False if not, None if the samples cannot tell.
    says: The observation, in one sentence.
    advice: The remedy if the cause is present, or what to check if `found` is None.
    figures: The numbers behind `found`.
    """

    cause: str
    found: bool | None
    says: str
    advice: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        mark = {False: "✓ not", True: "✗", None: "?"}[self.found]
        line = f"{mark} {self.cause}: {self.says}"
        if self.found is False or not self.advice:
            return line
        return f"{line}; {self.advice}"


FEWEST_VECTORS = 50
"""The fewest queries and documents from which `check_model` can tell."""


def check_model(
    queries: np.ndarray,
    targets: np.ndarray,
    metric: Metric,
    compute: Compute,
    rng: np.random.Generator,
) -> Finding:
    """Check whether another model embedded the queries.

    Args:
        queries: A sample of the queries, [m, d].
        targets: Documents drawn at random, [s, d].
        metric: The metric of the search.
        compute: Device, memory and progress.
        rng: Draws random directions, which show how near vectors lie by chance.
    """
    cause = "another model"
    if min(len(queries), len(targets)) < FEWEST_VECTORS:
        few = f"{len(queries)} queries and {len(targets)} documents are too few to tell"
        return Finding(cause, None, few)
    nearness = typical_similarity(queries, targets, metric, compute, rng)
    says = (
        f"queries come {max(nearness, 0):.0%} as near to documents as documents come "
        f"to each other; below {CHANCE:.0%}, another model embedded them"
    )
    advice = "embed the queries with the model that embedded the documents"
    return Finding(cause, nearness < CHANCE, says, advice, {"near": nearness})


SHIFTED_FROM = 0.25
"""The squared distance between the two means from which all queries may be shifted.

It is a multiple of the variance of the documents. For texts of one kind it is 0.07 to
0.25, and 0.28 in a small log of twelve languages. For E5 with the wrong prefix it is
0.28, for Korean queries to English documents 0.6, and for captions to images 1.5."""


def check_shift(queries: np.ndarray, targets: np.ndarray) -> Finding:
    """Check whether all queries [m, d] are shifted the same way from documents [s, d].

    The vectors do not show the reason, such as a missing prefix or another modality.
    """
    mean = targets.mean(axis=0, dtype=np.float64)
    distance = np.square(queries.mean(axis=0, dtype=np.float64) - mean).sum()
    variance = targets.var(axis=0, dtype=np.float64).sum()
    variances = float(distance / max(variance, 1e-30))
    # A large shift may be normal, see the advice, so it is never found for certain.
    found = None if variances >= SHIFTED_FROM else False
    says = (
        f"the means of queries and documents lie {variances:.2f} variances apart; from "
        f"{SHIFTED_FROM} on, something shifts all queries"
    )
    advice = (
        "a shift is normal if captions search for images, or queries are in another "
        "language; otherwise check that both got the prefix that the model asks for, "
        "such as 'query: ' and 'passage: '"
    )
    return Finding("prefix or shift", found, says, advice, {"apart": variances})


COPY_DISTANCE = 0.05
"""The squared distance up to which two targets are copies.

It is a share of the mean squared distance between any two targets, since models differ
in how close together they place all vectors. With the mean, copies are found even in a
gallery that is full of them."""

EXACT_COPY_DISTANCE = 1e-6
"""The squared distance up to which two vectors differ only by rounding.

It is a share of the mean squared length."""

MANY_DIMENSIONS = 16
"""The fewest dimensions in which only copies are within `COPY_DISTANCE` of each other.

Of the ten nearest among 50,000 random vectors, 30 % are within `COPY_DISTANCE` of one
higher up in 8 dimensions, 0.2 % in 12, and none in 16 or more. In real galleries of 384
or 512 dimensions, 0 to 1.3 % are, and 6 % among names of diseases that differ by a word
(`python -m benchmarks.causes --chance`)."""

MOST_COPIES = 0.05
"""The share of all places from which copies are a problem."""


def check_copies(found: np.ndarray, targets: np.ndarray) -> Finding:
    """Check whether copies of a document take places below it in the same answer.

    Args:
        found: The documents that each query finds, best first, [m, k, d].
        targets: Documents drawn at random, [s, d].
    """
    squared_length = float(np.square(found, dtype=np.float64).sum(axis=2).mean())
    # All limits and distances are half of a squared distance.
    exact_limit = EXACT_COPY_DISTANCE * squared_length / 2
    if found.shape[2] < MANY_DIMENSIONS:
        limit = exact_limit
    else:
        # Twice the variance is the mean squared distance between two documents.
        variance = float(targets.var(axis=0, dtype=np.float64).sum())
        limit = max(COPY_DISTANCE * variance, exact_limit)
    distances = np.stack([distance_to_earlier(vectors) for vectors in found])
    places = float((distances <= limit).mean())
    exact = float((distances <= exact_limit).mean())
    says = (
        f"copies of a document that is ranked above them take {places:.1%} of all "
        f"places, exact copies {exact:.1%}"
    )
    advice = (
        "keep one copy of each document, or group results by document: no offset can "
        "tell copies apart"
    )
    figures = {"places": places, "places_exact": exact}
    return Finding("copies", places >= MOST_COPIES, says, advice, figures)


def distance_to_earlier(vectors: np.ndarray) -> np.ndarray:
    """Return half the squared distance to the nearest vector ranked before each: [k].

    The distance is infinite for the first of `vectors` [k, d], which are in ranked
    order.
    """
    rows = vectors.astype(np.float64)
    distance = ((rows[:, None, :] - rows[None, :, :]) ** 2).sum(axis=2) / 2
    # Each row keeps only the vectors before it, not the vector itself or later ones.
    distance[np.triu_indices(len(rows))] = np.inf
    nearest: np.ndarray = distance.min(axis=1)
    return nearest


LARGEST_RATIO = 3.0
"""The ratio from which long vectors are a problem: of their share of the places in the
results to their share of the documents."""

LONG_SHARE = 0.1
"""The share of the vectors that count as long."""


def check_lengths(found: np.ndarray, targets: np.ndarray, metric: Metric) -> Finding:
    """Check whether long vectors win by their length.

    Args:
        found: The documents that each query finds, [m, k, d].
        targets: Documents drawn at random, [s, d].
        metric: The metric of the search.
    """
    cause = "lengths"
    if metric is not Metric.DOT:
        return Finding(cause, False, f"{metric.value} does not rank by length")
    lengths = np.linalg.norm(targets, axis=1)
    limit = float(np.quantile(lengths, 1 - LONG_SHARE))
    # The shares of the places and of the documents that have long vectors.
    places = float((np.linalg.norm(found, axis=2) > limit).mean())
    documents = float((lengths > limit).mean())
    # Lengths within 1 % of each other count as equal.
    if not np.ptp(lengths) > 0.01 * limit:
        return Finding(cause, False, "all vectors have the same length")
    says = (
        f"vectors have lengths of {lengths.min():.3g} to {lengths.max():.3g}, and the "
        f"longest {documents:.0%} take {places:.0%} of all places of a search by dot "
        "product"
    )
    advice = (
        "normalise the vectors or search by cosine, unless the model was trained for dot "
        "product"
    )
    is_present = documents > 0 and places >= LARGEST_RATIO * documents
    figures = {"places": places, "documents": documents}
    return Finding(cause, is_present, says, advice, figures)


HUBBY = 0.35
"""The skewness above chance from which a search counts as hubby."""
