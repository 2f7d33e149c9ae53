"""What a fit returns: terms over a bank, the model that sums them, its form by groups, and its file."""

from hubplugin.model.file import FORMAT, MAPPED_FORMAT
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
from hubplugin.model.target_fold import TargetFold, unfolded

__all__ = [
    "FORMAT",
    "MAPPED_FORMAT",
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
    "TargetFold",
    "Term",
    "TopKMean",
    "Value",
    "group_key",
    "load",
    "reduction_of",
    "unfolded",
    "unmapped",
    "warn_if_swapped",
]
