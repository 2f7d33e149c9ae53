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
from hubplugin.compute.similarities import (
    CACHE_BYTES,
    KEPT_SHARE,
    Similarities,
    dense,
)
from hubplugin.compute.sinkhorn import HALF_TAU, sinkhorn

__all__ = [
    "CACHE_BYTES",
    "HALF_TAU",
    "KEPT_SHARE",
    "SMALLEST_LOG",
    "TIE",
    "Answers",
    "Compute",
    "LogSum",
    "MeanOfLargest",
    "Similarities",
    "TopK",
    "TruthCounts",
    "dense",
    "find_answers",
    "has_torch",
    "nearest_targets",
    "reduce",
    "search",
    "sinkhorn",
    "topk",
]
