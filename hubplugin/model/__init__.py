"""What a fit returns: terms over a bank, the model that sums them, its form by groups, and its file."""

from hubplugin.model.file import FORMAT
from hubplugin.model.grouped import Group, GroupedModel, group_key
from hubplugin.model.offset_model import (
    Activation,
    Dot,
    GalleryStatistics,
    HubnessAtFit,
    LogSumExp,
    OffsetModel,
    Setting,
    Term,
    TopKMean,
    Value,
    load,
    reduction_of,
    warn_if_swapped,
)
from hubplugin.model.query_map import QueryMap, unmapped

__all__ = [
    "FORMAT",
    "Activation",
    "Dot",
    "GalleryStatistics",
    "Group",
    "GroupedModel",
    "HubnessAtFit",
    "LogSumExp",
    "OffsetModel",
    "QueryMap",
    "Setting",
    "Term",
    "TopKMean",
    "Value",
    "group_key",
    "load",
    "reduction_of",
    "unmapped",
    "warn_if_swapped",
]
