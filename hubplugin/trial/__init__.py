"""What is chosen and what is refused: the experiment on held-out queries, the choice of a method, and the guard."""

from hubplugin.trial.choice import Choice, choose, choose_by
from hubplugin.trial.experiment import OCCURRENCE, Candidate, Experiment, Trial, pooled, standard_error
from hubplugin.trial.guard import (
    Judgement,
    check,
    check_by,
    judge,
    judge_by,
    require_kind,
    require_size,
    small_bank,
)

__all__ = [
    "OCCURRENCE",
    "Candidate",
    "Choice",
    "Experiment",
    "Judgement",
    "Trial",
    "check",
    "check_by",
    "choose",
    "choose_by",
    "judge",
    "judge_by",
    "pooled",
    "require_kind",
    "require_size",
    "small_bank",
    "standard_error",
]
