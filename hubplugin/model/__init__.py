"""Models: terms over a bank, the model that sums them, and its file."""

from hubplugin.model.file import FORMAT as FORMAT
from hubplugin.model.offset_model import Dot as Dot
from hubplugin.model.offset_model import GalleryStatistics as GalleryStatistics
from hubplugin.model.offset_model import HubnessAtFit as HubnessAtFit
from hubplugin.model.offset_model import LogSumExp as LogSumExp
from hubplugin.model.offset_model import OffsetModel as OffsetModel
from hubplugin.model.offset_model import Setting as Setting
from hubplugin.model.offset_model import Term as Term
from hubplugin.model.offset_model import TopKMean as TopKMean
from hubplugin.model.offset_model import Value as Value
from hubplugin.model.offset_model import describe_method as describe_method
from hubplugin.model.offset_model import load as load
from hubplugin.model.offset_model import warn_if_swapped as warn_if_swapped
from hubplugin.model.query_map import QueryMap as QueryMap
from hubplugin.model.query_map import refuse_query_map as refuse_query_map
