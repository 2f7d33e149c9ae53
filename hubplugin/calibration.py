"""Choose the width of a search and the scale of an offset, for all adapters."""

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
"""The number of calibration queries.

In 59 tests on real settings and three fits, 64 to 256 queries were calibrated for a
recall of 0.99; other queries then found 0.992 of their results on average. With 32
calibration queries they found 0.988 to 0.992
(`python -m benchmarks.qdrant_candidates`)."""

FIRST = 10
"""The number of first results of each query that `recall` compares."""

STEP = 1.25
"""The ratio between successive numbers of candidates, or `hnsw_ef` values, to try."""

ROUNDING = 1e-5
"""Scores that differ by less are equal, relative to the larger of 1 and the score."""


def choose_queries(model: OffsetModel, scan: Iterator[Batch]) -> np.ndarray:
    """Return calibration queries from the bank of `model`: [m, d].

    If the model keeps only the mean of its bank, return vectors from the first batch of
    `scan`.
    """
    bank = model.terms[0].bank
    if len(bank) == 1:
        bank = next(scan).vectors
        bank = bank[bank.any(axis=1)]
    return pick_evenly(bank, QUERIES)


def recall(hits: Hits, exact: Hits) -> float:
    """Return the share of the first `FIRST` exact results that `hits` contains.

    A target that ties with the last of these results counts as one of them, so `exact`
    should have more than `FIRST` results for each query.
    """
    found = 0
    wanted = 0
    for ids, exact_ids, scores in zip(hits.ids, exact.ids, exact.scores, strict=True):
        count = min(FIRST, len(exact_ids))
        if not count:
            continue
        last_score = scores[count - 1]
        tolerance = ROUNDING * max(1.0, abs(last_score))
        is_tied = [abs(score - last_score) <= tolerance for score in scores]
        accepted = {*exact_ids[:count], *itertools.compress(exact_ids, is_tied)}
        found += len(accepted & set(ids))
        wanted += count
    # With ties, more targets may be accepted than are wanted.
    return min(found / wanted, 1.0) if wanted else 1.0


def ratios(largest: float) -> list[float]:
    """Return the powers of `STEP` below `largest`, then `largest` itself."""
    # Less 1e-9: if `largest` is itself a power, rounding must not repeat it.
    steps = math.ceil(math.log(largest) / math.log(STEP) - 1e-9)
    return [*(STEP**step for step in range(steps)), largest]


def first_that(reaches: Callable[[int], bool], count: int) -> int:
    """Return the first number below `count` for which `reaches` is true.

    `reaches` must be true for all numbers after it. If it is true for none, return the
    last number.
    """
    # The larger a number, the slower the search that it stands for. Try the last of the
    # first 1, 2, 4, ... numbers, so that none far larger than needed is tried.
    tried = 1
    while tried < count and not reaches(tried - 1):
        tried *= 2
    # The first `tried // 2` numbers have failed. If all others before `last` fail,
    # `bisect_left` returns `last`.
    numbers = range(count)
    last = min(tried, count) - 1
    return bisect.bisect_left(numbers, True, tried // 2, last, key=reaches)


def largest_offset(model: OffsetModel) -> float:
    """Return a bound that no offset of `model` exceeds, for `augment_targets`.

    A model that was fitted without a gallery gives 0.
    """
    return 0.0 if model.gallery is None else model.gallery.largest


def query_component(model: OffsetModel) -> float:
    """Return e, the last component of an augmented query [q, e].

    The choice of e makes offset / e, the last component of the targets, spread half as
    far as any other component. An HNSW graph by inner product misses neighbours if one
    component outweighs the others or carries no weight.
    """
    spread = 0.0 if model.gallery is None else model.gallery.deviation
    if spread <= 0:
        return 1.0
    bank = model.terms[0].bank
    return 2 * spread / float(np.sqrt(np.square(bank, dtype=np.float64).mean()))
