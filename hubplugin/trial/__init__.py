"""What is chosen and what is refused: the experiment on held-out queries, the choice of a method, and the guard."""

from hubplugin.trial.choice import choose_by, chosen_by
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
    "choose_by",
    "chosen_by",
    "judge",
    "judge_by",
    "require_displacement",
    "require_enough",
    "require_kind",
    "require_size",
    "small_bank",
]
