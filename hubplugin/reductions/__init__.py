"""Reductions of bank x targets, tiled, on a device. The only package that multiplies matrices, `search` aside."""

from hubplugin.reductions.answers import SMALLEST_LOG, Answers, Nearest, Survey, find_answers, survey
from hubplugin.reductions.clusters import clusters
from hubplugin.reductions.held import KERNELS
from hubplugin.reductions.kernel import HALF_PEAK, HALF_TERMS, SAFE_DRIFT, Columns
from hubplugin.reductions.lowering import Limit
from hubplugin.reductions.preparation import distinct_rows, prepared, prepared_blocks, sampled, taken
from hubplugin.reductions.scaling import Scaling, sinkhorn
from hubplugin.reductions.seeking import reduce_and_seek
from hubplugin.reductions.similarities import (
    ANSWER_SLACK,
    CACHE_BYTES,
    FLOAT32_SIMILARITY,
    MOST_ANSWERS,
    SAFE_EXPONENT,
    Compute,
    HeldSimilarities,
    HoldingCompute,
    LeftOut,
    Precision,
    Similarities,
    Tile,
    dense,
)
from hubplugin.reductions.tasks import Found, Task
from hubplugin.reductions.terms import (
    LogSum,
    MeanOfLargest,
    count_larger,
    count_reaching,
    dot,
    kth_largest,
    log_sum_exp,
    reaches,
    reduce,
)

__all__ = [
    "ANSWER_SLACK",
    "CACHE_BYTES",
    "FLOAT32_SIMILARITY",
    "HALF_PEAK",
    "HALF_TERMS",
    "KERNELS",
    "MOST_ANSWERS",
    "SAFE_DRIFT",
    "SAFE_EXPONENT",
    "SMALLEST_LOG",
    "Answers",
    "Columns",
    "Compute",
    "Found",
    "HeldSimilarities",
    "HoldingCompute",
    "LeftOut",
    "Limit",
    "LogSum",
    "MeanOfLargest",
    "Nearest",
    "Precision",
    "Scaling",
    "Similarities",
    "Survey",
    "Task",
    "Tile",
    "clusters",
    "count_larger",
    "count_reaching",
    "dense",
    "distinct_rows",
    "dot",
    "find_answers",
    "kth_largest",
    "log_sum_exp",
    "prepared",
    "prepared_blocks",
    "reaches",
    "reduce",
    "reduce_and_seek",
    "sampled",
    "sinkhorn",
    "survey",
    "taken",
]
