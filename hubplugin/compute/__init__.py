"""Bank x targets, tiled, on a device: similarities, what is summed over them, Sinkhorn, search. The only package that
multiplies matrices."""

from hubplugin.compute.answers import SURVEYED as SURVEYED
from hubplugin.compute.answers import Answers as Answers
from hubplugin.compute.answers import Survey as Survey
from hubplugin.compute.answers import find_answers as find_answers
from hubplugin.compute.answers import nearest_targets as nearest_targets
from hubplugin.compute.answers import spacing_ratio as spacing_ratio
from hubplugin.compute.answers import survey as survey
from hubplugin.compute.search import TIE as TIE
from hubplugin.compute.search import TopK as TopK
from hubplugin.compute.search import TruthCounts as TruthCounts
from hubplugin.compute.search import search as search
from hubplugin.compute.similarities import CACHE_BYTES as CACHE_BYTES
from hubplugin.compute.similarities import MOST_ANSWERS as MOST_ANSWERS
from hubplugin.compute.similarities import Compute as Compute
from hubplugin.compute.similarities import LeftOut as LeftOut
from hubplugin.compute.similarities import Precision as Precision
from hubplugin.compute.similarities import Similarities as Similarities
from hubplugin.compute.similarities import dense as dense
from hubplugin.compute.similarities import dense_array as dense_array
from hubplugin.compute.similarities import has_torch as has_torch
from hubplugin.compute.similarities import torch as torch
from hubplugin.compute.sinkhorn import Columns as Columns
from hubplugin.compute.sinkhorn import Scaling as Scaling
from hubplugin.compute.sinkhorn import most_held as most_held
from hubplugin.compute.sinkhorn import sinkhorn as sinkhorn
from hubplugin.compute.terms import LogSum as LogSum
from hubplugin.compute.terms import MeanOfLargest as MeanOfLargest
from hubplugin.compute.terms import ShardResult as ShardResult
from hubplugin.compute.terms import Task as Task
from hubplugin.compute.terms import count_larger as count_larger
from hubplugin.compute.terms import dot as dot
from hubplugin.compute.terms import kth_largest as kth_largest
from hubplugin.compute.terms import reaches as reaches
from hubplugin.compute.terms import reduce as reduce
