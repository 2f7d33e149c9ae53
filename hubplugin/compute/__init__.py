"""Bank x targets, tiled, on a device: similarities, what is reduced over them, Sinkhorn, search. The only package that
multiplies matrices."""

from hubplugin.compute.device import Compute as Compute
from hubplugin.compute.device import has_torch as has_torch
from hubplugin.compute.reductions import SMALLEST_LOG as SMALLEST_LOG
from hubplugin.compute.reductions import Answers as Answers
from hubplugin.compute.reductions import LogSum as LogSum
from hubplugin.compute.reductions import MeanOfLargest as MeanOfLargest
from hubplugin.compute.reductions import find_answers as find_answers
from hubplugin.compute.reductions import nearest_targets as nearest_targets
from hubplugin.compute.reductions import reduce as reduce
from hubplugin.compute.search import TIE as TIE
from hubplugin.compute.search import TopK as TopK
from hubplugin.compute.search import TruthCounts as TruthCounts
from hubplugin.compute.search import search as search
from hubplugin.compute.search import topk as topk
from hubplugin.compute.similarities import CACHE_BYTES as CACHE_BYTES
from hubplugin.compute.similarities import AnswerMask as AnswerMask
from hubplugin.compute.similarities import Similarities as Similarities
from hubplugin.compute.similarities import dense as dense
from hubplugin.compute.sinkhorn import Columns as Columns
from hubplugin.compute.sinkhorn import Scaling as Scaling
from hubplugin.compute.sinkhorn import count_cacheable as count_cacheable
from hubplugin.compute.sinkhorn import sinkhorn as sinkhorn
