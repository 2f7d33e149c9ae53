"""Robust models: what arrives after the fit stands in a stated share of the bank's lists at most."""

from __future__ import annotations

import numpy as np

from hubplugin.errors import InputError, Parameter
from hubplugin.measures.hubness import k_occurrence
from hubplugin.methods.base import FitInput
from hubplugin.methods.blend import SPREAD_SHARE
from hubplugin.metric import Metric
from hubplugin.model import Bound, Dot, OffsetModel
from hubplugin.reductions import clusters
from hubplugin.search import TopK, search

NEAREST = 10
"""How many targets of a query's list count."""

NATURAL_SHARES, MOST = 2.5, 0.02
"""A newcomer's share of the bank's lists is bounded by so many times the share that a target has on average, and by 2 %
in a small gallery, where that is much. The bound is not sharp: a vector made to reach it stands in a tenth to a quarter
of that, as much as half an honest target (benchmarks/planted.py)."""

COSINE_WIDTH = 2.0

PROBES, CLUSTERS = 400, 8
"""Bank queries among which hubs are counted, at the fit and later, and into how many clusters they fall."""


def bounded(model: OffsetModel, given: FitInput) -> OffsetModel:
    """`model`, fitted on the banks and targets of `given`, with a `Bound`.

    Raises InputError for a method that keeps no bank (`dn`), and for a fit without targets.
    """
    targets = given.require_targets(model.method)
    if isinstance(model.terms[0], Dot):
        raise InputError(f"method {model.method!r} keeps no bank to bound offsets by; leave out ", Parameter("robust"))
    offsets, nearest = model.offsets(targets, memory=given.compute.memory, device=given.compute.device), TopK(NEAREST)
    search(given.query_bank, targets, given.metric, given.compute, nearest, offsets=offsets[None], what="bounding")
    levels = nearest.scores[0][:, -1].astype(np.float32)
    found, within = largest_shares(nearest.rows[0][probes(len(levels))], given.query_bank[probes(len(levels))])
    bound = Bound(
        share=float(f"{min(MOST, NATURAL_SHARES * NEAREST / targets.rows):.4g}"),
        tau=float(f"{max(SPREAD_SHARE * given.survey.deviation, 1e-12):.4g}"),
        levels=levels,
        floor=_floor(model, given, levels),
        largest=found,
        largest_within=within,
    )
    return model.having(bound=bound)


def probes(m: int, most: int = PROBES) -> np.ndarray:
    """The rows of a bank of `m` queries among which hubs are counted."""
    return np.linspace(0, m - 1, min(most, m)).astype(int)


def largest_shares(found: np.ndarray, queries: np.ndarray) -> tuple[float, float]:
    """The largest share of `queries` [q, d] that find one target, and the largest share of one cluster of them, from
    the rows that each finds, `found` [q, k]."""
    labels = clusters(queries, CLUSTERS)
    parts = [found[labels == label] for label in range(CLUSTERS)]
    within = [k_occurrence(part, 1).max() / len(part) for part in parts if len(part) >= NEAREST]
    return float(k_occurrence(found, 1).max() / len(found)), float(max(within, default=0.0))


def floor_of(model: OffsetModel) -> float:
    """An offset with which a target is not found. Raises InputError where the model knows none."""
    if model.bound is not None:
        return model.bound.floor
    if model.metric is not Metric.COSINE:
        raise InputError(
            f"{model.method!r} knows no offset with which a target is not found by {model.metric.value}; fit with ",
            Parameter("robust", True),
        )
    return (0.0 if model.gallery is None else model.gallery.smallest) - COSINE_WIDTH


def _floor(model: OffsetModel, given: FitInput, levels: np.ndarray) -> float:
    """An offset with which no target comes among the 10 nearest of a bank query; under `dot`, none that is not longer
    than those of the gallery."""
    assert model.gallery is not None
    if given.metric is Metric.COSINE:
        return model.gallery.smallest - COSINE_WIDTH
    highest = float(given.survey.largest.max()) if given.metric is Metric.DOT else 0.0
    return float(min(levels.min() - highest, model.gallery.smallest)) - model.gallery.deviation
