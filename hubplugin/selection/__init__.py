"""What is chosen and what is refused: banks, the experiment on them, the choice of a method, and the guard."""

from hubplugin.selection.banks import Banks, Pairs
from hubplugin.selection.choice import Choice, choose, choose_by
from hubplugin.selection.curve import CurvePoint, curve_by
from hubplugin.selection.experiment import Experiment
from hubplugin.selection.guard import Judgement, check, check_by, judge, judge_by, require_kind, require_size

__all__ = [
    "Banks",
    "Choice",
    "CurvePoint",
    "Experiment",
    "Judgement",
    "Pairs",
    "check",
    "check_by",
    "choose",
    "choose_by",
    "curve_by",
    "judge",
    "judge_by",
    "require_kind",
    "require_size",
]
