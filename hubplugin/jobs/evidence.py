"""What is looked at to tell the causes of bad searches apart: samples of what a search found, and of the gallery."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from hubplugin.causes import Finding, collapsed, copies, cut_off, lengths, other_model, shifted, short_texts
from hubplugin.jobs.naming import Naming
from hubplugin.methods import FitInput
from hubplugin.metric import Metric
from hubplugin.reductions import Compute, Similarities, dense, sampled, taken
from hubplugin.search import TopK, search
from hubplugin.selection import Banks
from hubplugin.selection.trials import OCCURRENCE
from hubplugin.store import Id
from hubplugin.vectors import as_vectors

DEEP = 50
"""How many of the nearest are looked at for each query: five answers of ten."""

QUERIES, TARGETS, TEXTS = 500, 2_000, 1_000
"""Queries, targets and texts that are looked at, drawn at random: shares come out to within 2 points."""


def findings(
    banks: Banks, found: np.ndarray, texts: Naming | None, ids_of: Callable[[np.ndarray], Sequence[Id]], seed: int
) -> list[Finding]:
    """All causes, looked for. found [m, DEEP]: the rows that each bank query finds in the gallery, best first. ids_of:
    the ids of some rows, by which `texts` knows them."""
    given, rng = banks.given, np.random.default_rng(seed)
    quiet = replace(given, compute=replace(given.compute, progress=None))
    asking = np.sort(rng.permutation(len(found))[:QUERIES])
    targets = sampled(given.require_targets("auto"), TARGETS, given.metric, rng)
    lists = found[asking, :OCCURRENCE]
    rows, place = np.unique(lists, return_inverse=True)
    place = place.reshape(lists.shape)
    vectors = taken(given.require_targets("auto"), rows, given.metric)
    queries = given.query_bank[asking]
    spread = float(targets.var(axis=0, dtype=np.float64).sum())  # half the mean squared distance of any two
    long = [np.linalg.norm(part, axis=1) for part in (vectors, targets)]
    return [
        other_model(_dense(queries, targets, quiet.metric, quiet.compute), queries, targets),
        shifted(queries, targets),
        copies(place, vectors, _spacing(targets[: len(targets) // 4 + 1], quiet), spread),
        collapsed(targets / np.maximum(long[1], 1e-30)[:, None] if given.metric is Metric.DOT else targets),
        lengths(long[0][place.reshape(-1)], long[1], given.metric),
        _short(lists, given, texts, ids_of, rng),
        cut_off(_ranks(banks, found), OCCURRENCE, found.shape[1]),
    ]


def _short(
    lists: np.ndarray,
    given: FitInput,
    texts: Naming | None,
    ids_of: Callable[[np.ndarray], Sequence[Id]],
    rng: np.random.Generator,
) -> Finding:
    if texts is None:
        return short_texts([], [])
    places = rng.permutation(lists.reshape(-1))[:TEXTS]
    drawn = rng.permutation(given.require_targets("auto").rows)[:TEXTS]
    rows, place = np.unique(np.concatenate([places, drawn]), return_inverse=True)
    known = texts(list(ids_of(rows)))
    each = [known[row] for row in place.reshape(-1).tolist()]
    return short_texts(each[: len(places)], each[len(places) :])


def _spacing(targets: np.ndarray, given: FitInput) -> np.ndarray:
    """Half the squared distance of each of `targets` [s, d], of the gallery, to its nearest other."""
    metric = given.metric if given.metric is Metric.COSINE else Metric.EUCLIDEAN
    nearest = TopK(2)
    search(targets, given.require_targets("auto"), metric, given.compute, nearest)
    scores = nearest.scores[0]
    distance = (1 - scores if metric is Metric.COSINE else -scores)[:, -1]
    spacing: np.ndarray = np.maximum(distance, 0.0)
    return spacing


def _dense(queries: np.ndarray, targets: np.ndarray, metric: Metric, compute: Compute) -> np.ndarray:
    found: np.ndarray = dense(Similarities(queries, metric, compute), as_vectors(targets, "targets")).numpy()
    return found


def _ranks(banks: Banks, found: np.ndarray) -> np.ndarray | None:
    """The rank of what each query clicked, from 1; one more than are looked at where it is not among them. None where
    nothing was clicked: the targets of pairs are outside of the gallery."""
    if banks.clicks is None:
        return None
    known = np.flatnonzero(banks.clicks >= 0)
    hit = found[known] == banks.clicks[known, None]
    ranks: np.ndarray = np.where(hit.any(axis=1), hit.argmax(axis=1) + 1, found.shape[1] + 1)
    return ranks
