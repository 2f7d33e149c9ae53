"""Causes that lie in the queries: another model, a prefix that all of them lack, answers that are cut off too early."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from hubplugin.causes.finding import Finding

STANDS_OUT, ALIGNED = 0.3, 0.2
"""Queries are another model's if their nearest document does not stand out, *and* their mean does not point where that
of the documents points. Standing out is counted in standard deviations beside the nearest of as many random ones: other
models' queries have -0.2 to 0.17, and so have some of their own model whose answers are not there (0.06). The cosine of
the means tells these: 0.31 and more beside -0.06 to 0.11."""

APART = 0.25
"""Squared distance of the means of queries and documents, beside the variance of the documents, from which on the
queries are moved as a whole: 0.07 to 0.25 for texts of one kind (0.28 in a small log of twelve languages), 0.28 for E5
with the wrong prefix, 0.6 for Korean queries to English documents, 1.5 for captions to images."""

HUBBY = 0.35
"""Skewness above that of chance, from which on a search is called hubby."""

CUT_OFF = 0.2
"""Share of the queries whose answer stands behind the k first and not far behind, from which on k is too small."""

FEWEST = 50


def other_model(similarities: np.ndarray, queries: np.ndarray, targets: np.ndarray) -> Finding:
    """Whether the queries [m, d] know the documents [s, d], drawn at random, at all. similarities: [m, s]."""
    cause, advice = "another model", "embed the queries with the very model that embedded the documents"
    if min(similarities.shape) < FEWEST:
        return Finding(cause, None, f"{len(queries)} queries and {len(targets)} documents are too few to tell")
    excess, cosine = excess_of_nearest(similarities), cosine_of_means(queries, targets)
    says = (
        f"the nearest document of a query stands out by {excess:+.1f} standard deviations beside the nearest of as "
        f"many random ones, and the means of both have a cosine of {cosine:.2f} (where another model embedded the "
        f"queries: below {STANDS_OUT} and {ALIGNED})"
    )
    found = excess < STANDS_OUT and cosine < ALIGNED
    return Finding(cause, found, says, advice, {"excess": excess, "cosine_of_means": cosine})


def cosine_of_means(first: np.ndarray, second: np.ndarray) -> float:
    """Of the mean rows of both."""
    one, other = (part.mean(axis=0, dtype=np.float64) for part in (first, second))
    return float((one * other).sum() / max(np.linalg.norm(one) * np.linalg.norm(other), 1e-30))


def excess_of_nearest(similarities: np.ndarray) -> float:
    """Median over queries of (largest - mean) / deviation, less what the largest of as many normal numbers has."""
    spread = np.maximum(similarities.std(axis=1), 1e-30)
    largest = (similarities.max(axis=1) - similarities.mean(axis=1)) / spread
    return float(np.median(largest)) - NormalDist().inv_cdf(0.5 ** (1 / similarities.shape[1]))


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
            cause, None, "nothing says what the queries ask for", "pass --clicks, or run evaluate with --truth"
        )
    first, behind = float((ranks <= k).mean()), float(((ranks > k) & (ranks <= deep)).mean())
    says = (
        f"the right document is among the first {k} for {100 * first:.0f} % of the queries, and at places {k + 1} to "
        f"{deep} for {100 * behind:.0f} %"
    )
    return Finding(cause, behind >= CUT_OFF, says, advice, {"first": first, "behind": behind})
