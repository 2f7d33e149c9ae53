"""Compare a bank with targets in tiles: similarities, reductions, Sinkhorn and search.

Only this package multiplies matrices.
"""

from hubplugin.compute.device import Compute, has_torch
from hubplugin.compute.reductions import (
    SMALLEST_LOG,
    Answers,
    LogSum,
    MeanOfLargest,
    find_answers,
    nearest_targets,
    reduce,
)
from hubplugin.compute.search import TIE, TopK, TruthCounts, search, topk
from hubplugin.compute.similarities import CACHE_BYTES, Similarities, dense
from hubplugin.compute.sinkhorn import Columns, count_cacheable, sinkhorn

__all__ = [
    "CACHE_BYTES",
    "SMALLEST_LOG",
    "TIE",
    "Answers",
    "Columns",
    "Compute",
    "LogSum",
    "MeanOfLargest",
    "Similarities",
    "TopK",
    "TruthCounts",
    "count_cacheable",
    "dense",
    "find_answers",
    "has_torch",
    "nearest_targets",
    "reduce",
    "search",
    "sinkhorn",
    "topk",
]
