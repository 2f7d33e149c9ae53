"""Models: the terms over a bank, the model that sums them, and the model file."""

from hubplugin.model.file import FORMAT
from hubplugin.model.offset_model import (
    GalleryStatistics,
    HubnessAtFit,
    OffsetModel,
    Setting,
    Value,
    describe_method,
    load,
)
from hubplugin.model.query_map import QueryMap, refuse_query_map
from hubplugin.model.terms import Dot, LogSumExp, Term, TopKMean

__all__ = [
    "FORMAT",
    "Dot",
    "GalleryStatistics",
    "HubnessAtFit",
    "LogSumExp",
    "OffsetModel",
    "QueryMap",
    "Setting",
    "Term",
    "TopKMean",
    "Value",
    "describe_method",
    "load",
    "refuse_query_map",
]
