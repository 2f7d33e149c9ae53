"""Causes of bad searches besides hubness, each told by samples of queries, of documents, and of what was found."""

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


FEWEST, FEWEST_TARGETS = 50, 100
"""Queries or texts, and documents in a space, below which a cause cannot be told."""

LIFTED = 3.0
"""Documents of a kind are a trouble from three times their share of the places on."""


def check_model(
    queries: np.ndarray,
    targets: np.ndarray,
    metric: Metric,
    compute: Compute,
    rng: np.random.Generator,
) -> Finding:
    """Checks whether another model embedded the queries.

    Args:
        queries: a sample of them, [m, d].
        targets: documents drawn at random, [s, d].
        metric: of the search.
        compute: multiplies them.
        rng: draws the directions that lie as near as by chance.
    """
    cause, advice = (
        "another model",
        "embed the queries with the very model that embedded the documents",
    )
    if min(len(queries), len(targets)) < FEWEST:
        return Finding(
            cause,
            None,
            f"{len(queries)} queries and {len(targets)} documents are too few to tell",
        )
    near = typical_similarity(queries, targets, metric, compute, rng)
    says = (
        f"the queries come {max(near, 0):.0%} as near to the documents as these to each other, where 0% is chance "
        f"(below {CHANCE:.0%} another model embedded the queries)"
    )
    return Finding(cause, near < CHANCE, says, advice, {"near": near})


APART = 0.25
"""Squared distance of the means of queries and documents, beside the variance of the documents, from which on the
queries are moved as a whole. Seen were 0.07 to 0.25 for texts of one kind (0.28 in a small log of twelve languages),
0.28 for E5 with the wrong prefix, 0.6 for Korean queries to English documents, 1.5 for captions to images."""


def check_shift(queries: np.ndarray, targets: np.ndarray) -> Finding:
    """Checks whether all `queries` [m, d] are moved the same way beside the documents `targets` [s, d]. Vectors do not
    tell what moved them: a prefix that they lack, or a modality that they have."""
    cause = "prefix or shift"
    distance = (
        (
            queries.mean(axis=0, dtype=np.float64)
            - targets.mean(axis=0, dtype=np.float64)
        )
        ** 2
    ).sum()
    apart = float(distance / max(targets.var(axis=0, dtype=np.float64).sum(), 1e-30))
    says = (
        f"the means of queries and documents lie apart by {apart:.2f} of the documents' variance ({APART} or more "
        "where something moves all queries)"
    )
    advice = (
        "captions beside images and queries in another language are moved, which is no trouble; else see whether both "
        "got the prefix that the model asks for, such as 'query: ' and 'passage: '"
    )
    return Finding(
        cause, None if apart >= APART else False, says, advice, {"apart": apart}
    )


NEAR = 0.05
"""Targets are near duplicates if they lie nearer than this share of the mean squared distance of any two. A share,
since models differ in how near they put everything; of any two, so that a gallery may be full of copies."""

SAME = 1e-6
"""Squared distance, as a share of the squared length, below which two vectors are one and the same but for rounding."""

COPIES = 0.05
"""Share of all places that copies take, from which on they are a trouble."""


def check_copies(
    lists: np.ndarray, vectors: np.ndarray, spacing: np.ndarray, spread: float
) -> Finding:
    """Checks whether copies of a document take places below it in the same answer.

    Args:
        lists: rows of `vectors` that each query finds, best first, [m, k].
        vectors: the documents in these lists, [v, d].
        spacing: half the squared distance of some documents to their nearest other, [s].
        spread: half the mean squared distance of any two documents.
    """
    same = SAME * float((vectors.astype(np.float64) ** 2).sum(axis=1).mean()) / 2
    near = max(NEAR * spread, same)
    exact = close = 0
    for rows in lists:
        distance = distance_above(vectors[rows])
        exact += int((distance <= same).sum())
        close += int((distance <= near).sum())
    places, documents = close / lists.size, float((spacing <= near).mean())
    says = (
        f"{percent(places)} of all places are taken by copies of a document higher up ({percent(exact / lists.size)} "
        f"by exact ones); {percent(documents)} of the documents have a copy"
    )
    figures = {
        "places": places,
        "places_exact": exact / lists.size,
        "documents": documents,
    }
    advice = "keep one of each, or group answers by what they are copies of: no offset can tell copies apart"
    return Finding("copies", places >= COPIES, says, advice, figures)


def distance_above(vectors: np.ndarray) -> np.ndarray:
    """Half the squared distance of each of `vectors` [k, d] to the nearest above it; infinite for the first."""
    rows = vectors.astype(np.float64)
    distance = ((rows[:, None, :] - rows[None, :, :]) ** 2).sum(axis=2) / 2
    distance[np.triu_indices(len(rows))] = np.inf
    nearest: np.ndarray = distance.min(axis=1)
    return nearest


FEWEST_DIMENSIONS = 15.0
"""Effective dimensions below which there is no room to tell documents apart: models have 38 to 111 on all data tried,
the same vectors projected to 24 dimensions 17 to 20, to 12 dimensions 9 to 11."""

ALIKE = 0.6
"""Mean cosine of two documents drawn at random, from which on scores say little by themselves: no trouble for a
ranking, but one for thresholds."""


def check_collapse(targets: np.ndarray) -> Finding:
    """Checks whether `targets` [s, d], a sample, lie in a few dimensions."""
    cause, advice = (
        "collapsed space",
        "look at the model, its pooling and what became of the vectors on their way here",
    )
    if len(targets) < FEWEST_TARGETS:
        return Finding(
            cause,
            None,
            f"{len(targets)} documents are too few to tell; {FEWEST_TARGETS} are needed",
        )
    dimensions, cosine = effective_dimensions(targets), mean_cosine(targets)
    says = f"the documents spread over {dimensions:.0f} effective dimensions of {targets.shape[1]}"
    if cosine >= ALIKE:
        says += (
            f", and two of them drawn at random have a cosine of {cosine:.2f}: thresholds on scores mean little, "
            "rankings are none the worse"
        )
    # Vectors of few components have not collapsed.
    trouble = dimensions < min(FEWEST_DIMENSIONS, targets.shape[1] / 4)
    return Finding(
        cause,
        trouble,
        says,
        advice,
        {"effective_dimensions": dimensions, "mean_cosine": cosine},
    )


def effective_dimensions(vectors: np.ndarray) -> float:
    """The participation ratio of the variances along principal axes: (sum v)^2 / sum v^2."""
    centred = vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64)
    variances = np.linalg.svd(centred, compute_uv=False) ** 2
    total = float((variances**2).sum())
    return float(variances.sum()) ** 2 / total if total else 0.0


def mean_cosine(vectors: np.ndarray) -> float:
    """The mean over any two different rows."""
    unit = vectors.astype(np.float64)
    unit = unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-30)
    count = len(unit)
    return float(((unit.sum(axis=0) ** 2).sum() - count) / (count * (count - 1)))


LONG = 0.1
"""The share of the vectors that count as long: those of the largest length."""


def check_lengths(places: np.ndarray, targets: np.ndarray, metric: Metric) -> Finding:
    """Checks whether long vectors win by their length.

    Args:
        places: lengths of the vectors in places of answers.
        targets: lengths of documents drawn at random, [s].
        metric: of the search.
    """
    cause = "lengths"
    if metric is not Metric.DOT:
        return Finding(cause, False, f"{metric.value} does not rank by length")
    limit = float(np.quantile(targets, 1 - LONG))
    taken, documents = float((places > limit).mean()), float((targets > limit).mean())
    says = (
        f"vectors have lengths of {targets.min():.3g} to {targets.max():.3g}, and the longest {100 * documents:.0f} % "
        f"take {100 * taken:.0f} % of all places of a search by dot product"
    )
    trouble = (
        documents > 0
        and taken >= LIFTED * documents
        and float(np.ptp(targets)) > 0.01 * limit
    )
    advice = "normalise the vectors or search by cosine, unless the model was trained for dot product"
    return Finding(
        cause, trouble, says, advice, {"places": taken, "documents": documents}
    )


SHORT, CROWDED = 0.25, 0.1
"""Texts below a quarter of the median length are short; they are a trouble where they take a tenth of all places, and
three times their share of the documents."""


def check_short_texts(
    places: Sequence[str | None], documents: Sequence[str | None]
) -> Finding:
    """Checks whether very short documents push others out.

    Args:
        places: the texts in places of answers, drawn at random.
        documents: the texts of documents drawn at random.
    """
    cause, advice = (
        "short texts",
        "leave out or merge what says next to nothing before it is embedded",
    )
    found, drawn = (
        np.array([len(text.strip()) for text in texts if text is not None])
        for texts in (places, documents)
    )
    if min(len(found), len(drawn)) < FEWEST:
        return Finding(
            cause,
            None,
            "no texts were given",
            "pass texts= in Python, a function from ids to their texts",
        )
    limit = SHORT * float(np.median(drawn))
    taken, share = float((found < limit).mean()), float((drawn < limit).mean())
    says = (
        f"documents below {limit:.0f} characters, a quarter of the median, take {percent(taken)} of all places and are "
        f"{percent(share)} of the documents"
    )
    trouble = taken >= CROWDED and taken >= LIFTED * share
    return Finding(
        cause,
        trouble,
        says,
        advice,
        {"places": taken, "documents": share, "characters": limit},
    )


CUT_OFF = 0.2
"""Share of the queries whose answer stands behind the k first and not far behind, from which on k is too small."""


def check_cut_off(ranks: np.ndarray | None, k: int, deep: int) -> Finding:
    """Checks whether answers stand just behind the first `k`.

    Args:
        ranks: of the known answers, from 1, [a]; more than `deep` for one that is not among so many. None if no answer
            is known.
        k: how many a search shows.
        deep: how many were looked at.
    """
    cause, advice = (
        "k too small",
        f"ask for more than {k}, and let a re-ranker or the reader choose among them",
    )
    if ranks is None or len(ranks) < FEWEST:
        unknown = "nothing says which of these the queries ask for"
        return Finding(
            cause, None, unknown, "pass ids by --answers, or run evaluate with --truth"
        )
    first, behind = (
        float((ranks <= k).mean()),
        float(((ranks > k) & (ranks <= deep)).mean()),
    )
    says = (
        f"the right document is among the first {k} for {100 * first:.0f} % of the queries, and at places {k + 1} to "
        f"{deep} for {100 * behind:.0f} %"
    )
    return Finding(
        cause, behind >= CUT_OFF, says, advice, {"first": first, "behind": behind}
    )


HUBBY = 0.35
"""Skewness above that of chance, from which on a search is called hubby."""
