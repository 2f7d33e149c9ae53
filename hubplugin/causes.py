"""Causes of bad searches besides hubness, each a test on samples: in the queries, the documents, or the space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hubplugin.bank.kinds import CHANCE, typical_similarity
from hubplugin.compute import Compute
from hubplugin.metric import Metric
from hubplugin.report import percent


@dataclass(frozen=True)
class Finding:
    """One possible cause.

    found: whether it is there; None where nothing shows that. says: what was seen, one sentence. advice: what to do if
    it is there, or what to pass so that it can be seen. figures: the numbers behind `found`.
    """

    cause: str
    found: bool | None
    says: str
    advice: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        verdict = {True: "YES", False: "no", None: "?"}[self.found]
        advice = f"; {self.advice}" if self.advice and self.found is not False else ""
        return f"{self.cause}: {verdict}. {self.says}{advice}"


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
        f"{percent(places)} of all places are taken by copies of a document higher up ({percent(exact / lists.size)} "
        f"by exact ones); {percent(documents)} of the documents have a copy"
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
        return Finding(cause, None, "no texts were given", "pass texts= in Python, a function from ids to their texts")
    limit = SHORT * float(np.median(own))
    shares = [float((part < limit).mean()) for part in (taken, own)]
    trouble = shares[0] >= TAKEN and shares[0] >= LIFTED * shares[1]
    says = (
        f"documents below {limit:.0f} characters, a quarter of the median, take {percent(shares[0])} of all places "
        f"and are {percent(shares[1])} of the documents"
    )
    return Finding(cause, trouble, says, advice, {"places": shares[0], "documents": shares[1], "characters": limit})


APART = 0.25
"""Squared distance of the means of queries and documents, beside the variance of the documents, from which on the
queries are moved as a whole. Seen were 0.07 to 0.25 for texts of one kind (0.28 in a small log of twelve languages),
0.28 for E5 with the wrong prefix, 0.6 for Korean queries to English documents, 1.5 for captions to images."""

HUBBY = 0.35
"""Skewness above that of chance, from which on a search is called hubby."""

CUT_OFF = 0.2
"""Share of the queries whose answer stands behind the k first and not far behind, from which on k is too small."""

FEWEST = 50


def other_model(
    queries: np.ndarray, targets: np.ndarray, metric: Metric, compute: Compute, rng: np.random.Generator
) -> Finding:
    """Whether the queries [m, d] know the documents [s, d], drawn at random, at all."""
    cause, advice = "another model", "embed the queries with the very model that embedded the documents"
    if min(len(queries), len(targets)) < FEWEST:
        return Finding(cause, None, f"{len(queries)} queries and {len(targets)} documents are too few to tell")
    near = typical_similarity(queries, targets, metric, compute, rng)
    says = (
        f"the queries come {max(near, 0):.0%} as near to the documents as these to each other, where 0% is chance "
        f"(below {CHANCE:.0%} another model embedded the queries)"
    )
    return Finding(cause, near < CHANCE, says, advice, {"near": near})


def shifted(queries: np.ndarray, targets: np.ndarray) -> Finding:
    """Whether all queries [m, d] are moved the same way beside the documents [s, d]. What moved them, a prefix that
    they lack or a modality that they have, vectors alone do not tell."""
    cause = "prefix or shift"
    moved = ((queries.mean(axis=0, dtype=np.float64) - targets.mean(axis=0, dtype=np.float64)) ** 2).sum()
    apart = float(moved / max(targets.var(axis=0, dtype=np.float64).sum(), 1e-30))
    says = (
        f"the means of queries and documents lie apart by {apart:.2f} of the documents' variance ({APART} or more "
        "where something moves all queries)"
    )
    advice = (
        "captions beside images and queries in another language are moved, which is no trouble; else see whether both "
        "got the prefix that the model asks for, such as 'query: ' and 'passage: '"
    )
    return Finding(cause, None if apart >= APART else False, says, advice, {"apart": apart})


def cut_off(ranks: np.ndarray | None, k: int, deep: int) -> Finding:
    """Whether answers stand just behind the `k` first. ranks [a]: of the known answers, from 1; more than `deep` where
    they are not among so many."""
    cause, advice = "k too small", f"ask for more than {k}, and let a re-ranker or the reader choose among them"
    if ranks is None or len(ranks) < FEWEST:
        return Finding(
            cause,
            None,
            "nothing says which of these the queries ask for",
            "pass ids by --answers, or run evaluate with --truth",
        )
    first, behind = float((ranks <= k).mean()), float(((ranks > k) & (ranks <= deep)).mean())
    says = (
        f"the right document is among the first {k} for {100 * first:.0f} % of the queries, and at places {k + 1} to "
        f"{deep} for {100 * behind:.0f} %"
    )
    return Finding(cause, behind >= CUT_OFF, says, advice, {"first": first, "behind": behind})


FEWEST_DIMENSIONS = 15.0
"""Effective dimensions below which there is no room to tell documents apart: models have 38 to 111 on all data tried,
the same vectors projected to 24 dimensions 17 to 20, to 12 dimensions 9 to 11."""

ALIKE = 0.6
"""Mean cosine of two documents drawn at random, from which on scores say little by themselves: no trouble for a
ranking, but one for thresholds."""

FEWEST_TARGETS = 100

LONG, LIFTED = 0.1, 3.0
"""The longest tenth of the vectors are a trouble where they take three times their share of all places."""


def collapsed(targets: np.ndarray) -> Finding:
    """Whether `targets` [s, d], a sample, lie in a few dimensions."""
    cause, advice = "collapsed space", "look at the model, its pooling and what became of the vectors on their way here"
    if len(targets) < FEWEST_TARGETS:
        return Finding(cause, None, f"{len(targets)} documents are too few to tell; {FEWEST_TARGETS} are needed")
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
