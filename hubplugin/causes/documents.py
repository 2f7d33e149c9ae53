"""Causes that lie in the documents: copies of one another, and texts with next to nothing in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hubplugin.causes.finding import Finding

NEAR = 0.05
"""Targets are near duplicates if they lie nearer than this share of the mean squared distance of any two. A share,
since models differ in how near they put everything; of any two, so that a gallery may be full of copies."""

SAME = 1e-6
"""Squared distance, as a share of the squared length, below which two vectors are one and the same but for rounding."""

COPIES = 0.05
"""Share of all places that copies take, from which on they are a trouble."""

SHORT, LIFTED, TAKEN = 0.25, 3.0, 0.1
"""Texts below a quarter of the median length are short; they are a trouble where they take a tenth of all places, and
three times their share of the documents."""

FEWEST_TEXTS = 50


def copies(lists: np.ndarray, vectors: np.ndarray, spacing: np.ndarray, spread: float) -> Finding:
    """Whether places in answers are taken by copies of what stands higher in the same answer.

    lists [m, k]: rows of `vectors` [v, d] that each query found, best first. spacing [s]: half the squared distance of
    some targets to their nearest other; spread: its mean over any two targets.
    """
    same = SAME * float((vectors.astype(np.float64) ** 2).sum(axis=1).mean()) / 2
    near = max(NEAR * spread, same)
    exact = close = 0
    for found in lists:
        distance = nearest_above(vectors[found])
        exact += int((distance <= same).sum())
        close += int((distance <= near).sum())
    places, documents = close / lists.size, float((spacing <= near).mean())
    says = (
        f"{_percent(places)} of all places are taken by copies of a document higher up ({_percent(exact / lists.size)} "
        f"by exact ones); {_percent(documents)} of the documents have a copy"
    )
    figures = {"places": places, "places_exact": exact / lists.size, "documents": documents}
    advice = "keep one of each, or group answers by what they are copies of: no offset can tell copies apart"
    return Finding("copies", places >= COPIES, says, advice, figures)


def nearest_above(found: np.ndarray) -> np.ndarray:
    """Half the squared distance of each of `found` [k, d] to the nearest of those before it; infinite for the first."""
    rows = found.astype(np.float64)
    distance = ((rows[:, None, :] - rows[None, :, :]) ** 2).sum(axis=2) / 2
    distance[np.triu_indices(len(rows))] = np.inf
    nearest: np.ndarray = distance.min(axis=1)
    return nearest


def short_texts(places: Sequence[str | None], documents: Sequence[str | None]) -> Finding:
    """Whether very short documents push others out. places: the texts in places of answers, drawn at random.
    documents: those of documents drawn at random."""
    cause, advice = "short texts", "leave out or merge what says next to nothing before it is embedded"
    taken, own = (np.array([len(text.strip()) for text in part if text is not None]) for part in (places, documents))
    if min(len(taken), len(own)) < FEWEST_TEXTS:
        return Finding(cause, None, "no texts were given", "pass --texts payload.KEY, or a file with one a line")
    limit = SHORT * float(np.median(own))
    shares = [float((part < limit).mean()) for part in (taken, own)]
    trouble = shares[0] >= TAKEN and shares[0] >= LIFTED * shares[1]
    says = (
        f"documents below {limit:.0f} characters, a quarter of the median, take {_percent(shares[0])} of all places "
        f"and are {_percent(shares[1])} of the documents"
    )
    return Finding(cause, trouble, says, advice, {"places": shares[0], "documents": shares[1], "characters": limit})


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
