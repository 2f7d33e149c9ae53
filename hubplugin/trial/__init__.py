"""What is refused, and why: the experiment on held-out queries, and the guard."""

from hubplugin.trial.experiment import (
    FOLDS,
    OCCURRENCE,
    Experiment,
    Outcome,
    Trial,
    require_enough,
)
from hubplugin.trial.guard import (
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
    "Experiment",
    "Outcome",
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
