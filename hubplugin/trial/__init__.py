"""What is refused, and why: the experiment on held-out queries, and the guard."""

from hubplugin.trial.experiment import FOLDS as FOLDS
from hubplugin.trial.experiment import OCCURRENCE as OCCURRENCE
from hubplugin.trial.experiment import Experiment as Experiment
from hubplugin.trial.experiment import Outcome as Outcome
from hubplugin.trial.experiment import Trial as Trial
from hubplugin.trial.experiment import require_enough as require_enough
from hubplugin.trial.guard import check_by as check_by
from hubplugin.trial.guard import judge as judge
from hubplugin.trial.guard import judge_by as judge_by
from hubplugin.trial.guard import require_displacement as require_displacement
from hubplugin.trial.guard import require_kind as require_kind
from hubplugin.trial.guard import require_size as require_size
from hubplugin.trial.guard import small_bank as small_bank
