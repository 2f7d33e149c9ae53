"""Robust models: no target stands in more than a stated share of the bank's lists of the 10 nearest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hubplugin.compute import TopK, clusters, search
from hubplugin.errors import InputError, Parameter
from hubplugin.measures.hubness import k_occurrence
from hubplugin.methods.base import FitInput
from hubplugin.metric import Metric
from hubplugin.model import Bound, Dot, OffsetModel

NEAREST = 10
"""How many targets of a query's list count."""

NEWCOMER, MOST, FEWEST = 2.0, 0.015, 2
"""A newcomer's share of the bank's lists is bounded by so many times the share that a target has on average. It is 1.5
% in a small gallery, where that is much, and two lists in a large one, where it is less than one. The bound is not
sharp: a vector made to reach it stands in a tenth to a quarter of that (benchmarks/planted.py)."""

MEMBER = 7.5
"""How many times the share of a newcomer, in a gallery that is not small, a target of the fit's own gallery may have:
R@1 of the gallery then stays as it was. Half of it costs half a point where some targets are asked for much more often
than others (benchmarks/planted.py)."""

TAU = 0.25
"""The temperature of the bound in standard deviations of the similarities. A lower one lets planted vectors stay just
below the levels of a bank that is known; a higher one costs newcomers R@1 (benchmarks/planted.py)."""

COSINE_WIDTH = 2.0
"""By how much two similarities to one unit vector can differ."""

BANK_QUERIES, CLUSTERS = 400, 8
"""Bank queries among which hubs are counted, at the fit and later, and into how many clusters they fall."""


def bounded(model: OffsetModel, given: FitInput) -> OffsetModel:
    """`model`, fitted on the banks and targets of `given`, with a `Bound`.

    Raises InputError for a method that keeps no bank (`dn`), and for a fit without targets.
    """
    targets = given.require_targets(model.method)
    if isinstance(model.terms[0], Dot):
        raise InputError(f"method {model.method!r} keeps no bank to bound offsets by; leave out ", Parameter("robust"))
    if model.query_map is not None:  # the lists are those that mapped queries find
        given = replace(given, query_bank=model.query_map.of_bank(model.terms[0].bank))
    plain = model.offsets(targets, compute=given.compute.quiet)
    longest = _longest(model)
    # What is bounded leaves its places to others, so that levels are taken again.
    first = replace(_bound(given, plain, longest), for_members=True)
    over_bank = replace(model.terms[0], bank=given.query_bank)
    offsets = first.lowered(plain, over_bank, given.metric, targets, given.compute)
    return model.having(bound=_bound(given, offsets, longest))


def _longest(model: OffsetModel) -> float:
    """The largest length of what is searched with for a query of length 1."""
    return 1.0 if model.query_map is None else model.query_map.longest


def _bound(given: FitInput, offsets: np.ndarray, longest: float) -> Bound:
    """The bound beside the targets of `given` with these `offsets` [n]; see `_longest`."""
    targets, bank, nearest = given.require_targets("robust"), given.query_bank, TopK(NEAREST)
    search(bank, targets, given.metric, given.compute, nearest, offsets=offsets[None], what="bounding")
    levels, chosen = nearest.scores[0][:, -1].astype(np.float32), rows_of_sample(len(bank))
    found, within = largest_shares(nearest.rows[0][chosen], bank[chosen])
    average, fewest = NEWCOMER * NEAREST / targets.rows, FEWEST / len(bank)
    return Bound(
        share=max(min(average, MOST), fewest),
        members_share=MEMBER * max(average, fewest),
        tau=max(TAU * given.survey.deviation, 1e-12),
        levels=levels,
        floor=_floor(given, offsets, levels, longest),
        largest=found,
        largest_within=within,
    )


def rows_of_sample(m: int, most: int = BANK_QUERIES) -> np.ndarray:
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
    return (0.0 if model.gallery is None else model.gallery.smallest) - COSINE_WIDTH * _longest(model)


def _floor(given: FitInput, offsets: np.ndarray, levels: np.ndarray, longest: float) -> float:
    """An offset with which no target comes among the 10 nearest of a bank query; under `dot`, none that is not longer
    than those of the gallery, which has these `offsets`."""
    smallest = float(offsets.min())
    if given.metric is Metric.COSINE:
        return smallest - COSINE_WIDTH * longest
    highest = float(given.survey.largest.max()) if given.metric is Metric.DOT else 0.0
    return float(min(levels.min() - highest, smallest)) - float(offsets.std())
