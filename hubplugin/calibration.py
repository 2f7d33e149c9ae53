"""Choose what adapters share: how widely to search, and the scale of an offset."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from hubplugin.measures.hubness import pick_evenly
from hubplugin.model import OffsetModel
from hubplugin.store import Batch, Hits

QUERIES = 64
"""Calibration queries.

In 59 tests on real settings and three fits, queries that had calibrated nothing found on
average 0.992 of their results where 64 to 256 queries had asked for 0.99, and 0.988 to
0.992 where 32 had (`python -m benchmarks.qdrant_candidates`)."""

FIRST = 10
"""How many results of each count."""

STEP = 1.25
"""The ratio of one number of candidates, or of one hnsw_ef, to the next that is tried."""

ROUNDING = 1e-5
"""Scores that differ by less are the same."""


def choose_queries(model: OffsetModel, scan: Iterator[Batch]) -> np.ndarray:
    """Return queries of the bank of `model`: [m, d].

    If the model keeps no more than their mean, return vectors of the first batch of
    `scan`.
    """
    bank = model.terms[0].bank
    if len(bank) == 1:
        bank = next(scan).vectors
        bank = bank[bank.any(axis=1)]
    return pick_evenly(bank, QUERIES)


def recall(hits: Hits, exact: Hits) -> float:
    """Return the share of the exact first results that is among `hits`.

    The lists in `exact` are longer: what scores the same as the last of the first ten
    counts, too.
    """
    found = 0
    wanted = 0
    for ids, true, scores in zip(hits.ids, exact.ids, exact.scores, strict=True):
        first = min(FIRST, len(true))
        if not first:
            continue
        last = scores[first - 1]
        room = ROUNDING * max(1.0, abs(last))
        ties = [abs(score - last) <= room for score in scores]
        right = {*true[:first], *itertools.compress(true, ties)}
        found += len(right & set(ids))
        wanted += first
    return min(found / wanted, 1.0) if wanted else 1.0


def ratios(largest: float) -> list[float]:
    """1, 1.25, 1.56, ..., `largest`."""
    steps = math.ceil(math.log(largest) / math.log(STEP) - 1e-9)
    return [*(STEP**step for step in range(steps)), largest]


def first_that(reaches: Callable[[int], bool], count: int) -> int:
    """Return the first of the numbers below `count` that `reaches`, if those behind it
    do, too; the last, if none does."""
    width = 1  # wide searches are slow: look at none that is far wider than needed
    while width < count and not reaches(width - 1):
        width *= 2
    numbers = range(count)
    last = min(width, count) - 1
    return bisect.bisect_left(numbers, True, width // 2, last, key=reaches)


def largest_offset(model: OffsetModel) -> float:
    """Return a bound that no offset of `model` exceeds, as Euclidean distance needs."""
    return 0.0 if model.gallery is None else model.gallery.cap


def query_component(model: OffsetModel) -> float:
    """Return e, the last component of an augmented query [q, e].

    It is chosen so that offset / e, the last component of the targets, spreads half as
    far as any other. A graph (HNSW) by inner product misses neighbours where one
    component outweighs the others, or weighs nothing.
    """
    spread = 0.0 if model.gallery is None else model.gallery.deviation
    if spread <= 0:
        return 1.0
    bank = model.terms[0].bank
    return 2 * spread / float(np.sqrt(np.square(bank, dtype=np.float64).mean()))
