"""Causes that lie in the queries: another model, a prefix that all of them lack, answers that are cut off too early."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from hubplugin.causes.finding import Finding

STANDS_OUT = 0.25
"""Standard deviations by which the nearest document must be nearer than the nearest of as many random ones: queries of
the model have 0.4 to 2.3, other models' -0.2 to 0.16."""

APART = 0.25
"""Squared distance of the means of queries and documents, beside the variance of the documents, from which on the
queries are moved as a whole: 0.07 to 0.23 for texts of one kind, 0.28 for E5 with the wrong prefix, 0.6 for Korean
queries to English documents, 1.5 for captions to images."""

HUBBY = 0.35
"""Skewness above that of chance, from which on a search is called hubby."""

CUT_OFF = 0.2
"""Share of the queries whose answer stands behind the k first and not far behind, from which on k is too small."""

FEWEST = 50


def other_model(similarities: np.ndarray) -> Finding:
    """Whether the queries know the documents at all. similarities [m, s]: of queries to documents drawn at random; the
    nearest of these stands out for a query of their own model, even where its answer is not among them."""
    cause, advice = "another model", "embed the queries with the very model that embedded the documents"
    if min(similarities.shape) < FEWEST:
        return Finding(
            cause, None, f"{similarities.shape[0]} queries and {similarities.shape[1]} documents are too few"
        )
    excess = excess_of_nearest(similarities)
    says = (
        f"the nearest document of a query stands out by {excess:+.1f} standard deviations beside the nearest of as "
        f"many random ones ({STANDS_OUT} or more where one model embedded both)"
    )
    return Finding(cause, excess < STANDS_OUT, says, advice, {"excess": excess})


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
