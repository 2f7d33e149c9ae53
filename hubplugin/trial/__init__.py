"""What is refused, and why: the experiment on held-out queries, and the guard."""

from hubplugin.trial.experiment import (
    FOLDS,
    OCCURRENCE,
    Experiment,
    Outcome,
    Sides,
    Trial,
    require_enough,
)
from hubplugin.trial.guard import (
    STAND_INS,
    check_by,
    judge,
    judge_by,
    require_displacement,
    require_kind,
    require_size,
    small_bank,
)

__all__ = [
    "FOLDS",
    "OCCURRENCE",
    "STAND_INS",
    "Experiment",
    "Outcome",
    "Sides",
    "Trial",
    "check_by",
    "judge",
    "judge_by",
    "require_displacement",
    "require_enough",
    "require_kind",
    "require_size",
    "small_bank",
]
