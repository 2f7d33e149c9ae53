"""The guard refuses a correction that would do harm, and says which kind of bank it sees.

Of a log whose answers are known it also looks at what was asked before: single wordings are held out, of targets that
the log asks for in others, too. All wordings of a target are held out together otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from hubplugin.bank import Bank, BankLike, BankProfile, PreparedBank
from hubplugin.bank.kinds import FARTHEST, displacement
from hubplugin.compute import Compute
from hubplugin.errors import CorrectionRefused, Parameter
from hubplugin.learning import FEWEST_WORDINGS
from hubplugin.measures.significance import Side
from hubplugin.methods import METHODS, Method, configured
from hubplugin.methods.blend import Blend
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, Setting
from hubplugin.trial.experiment import (
    USE_BLEND,
    Experiment,
    Trial,
    change,
    remedy,
    require_enough,
    too_small_is_refused,
    ways_out,
)
from hubplugin.vectors import VectorLike, Vectors

FEWEST = 100
"""Bank queries below which nothing is said of what was asked before."""


def other_wordings(experiment: Experiment, method: Method) -> Side | None:
    """R@1 of held-out wordings of targets that the log asks for in others, too; None of a log that has few of them.
    method: resolved on the whole bank and gallery."""
    if experiment.distinct < FEWEST:
        return None
    again = Experiment(experiment.bank, experiment.seed, again=True)
    if (again.split.fold_of >= 0).sum() < FEWEST_WORDINGS:
        return None
    raw, corrected = again.run([None, method])
    assert raw.hits is not None
    assert corrected.hits is not None
    return Side.of(raw.hits, corrected.hits, "other wordings")


FEW = 100
"""Distinct bank queries below which little is to be expected. With 100 the default gains 1.0 points of R@1 on the logs
of docs/banks.md, where 300 gain 1.6. Of 20 draws of 12 to 50 queries of `examples/data` one lowers hubness by more than
chance, of four draws of 100 three do, of 16 draws of 150 to 1,200 all do."""

SMALLEST_PAIRED, SMALLEST = 200, 400
"""Distinct bank queries that a method needs whose offsets keep their full strength with a small bank: with fewer, R@1
falls on text and code by up to 3 points. Without pairs it takes more, since only pairs show the fall."""


def judge(
    targets: VectorLike,
    bank: BankLike,
    method: str = "blend",
    *,
    metric: Metric | str = "cosine",
    compute: Compute = Compute(),
    seed: int = 0,
    **parameters: Setting,
) -> Trial:
    """What a correction would change on held-out bank queries, and what speaks against it; arguments as in `fit`.

    `Trial.require_passed` raises CorrectionRefused where there is an objection, as `hubplugin.apply` does.

    There is an objection if the bank is of the wrong kind (see `BankProfile`). With known answers, if R@1 of held-out
    queries falls beyond chance, or, with 200 of them, neither it nor the mean rank of their targets gets better. Of a
    log whose answers are known, also if R@1 of other wordings of what it asked for falls beyond chance.
    With another method than `blend`, if the bank is small, if it looks like a log and the method keeps its answers, or,
    without pairs or clicks, if hubness does not fall. Raises InputError for anything that cannot be used.
    """
    configuration = configured(METHODS, method, parameters, judge)
    prepared = Bank.of(bank).prepare(metric, compute).against(targets)
    return judge_by(Experiment(prepared, seed), configuration)


def judge_by(experiment: Experiment, method: Method) -> Trial:
    """`judge` on an `experiment`."""
    raw, corrected = experiment.run([None, method])
    bank, trial = experiment.profile, corrected.trial(raw)
    objections = [
        *([bank.objection] if bank.objection else []),
        *_objections_to_method(method, trial, bank),
        *_objections_to_recall(trial),
    ]
    if experiment.answered > 0.5:
        asked = other_wordings(experiment, method.resolved(experiment.bank))
        trial = replace(trial, asked=asked)
        if asked is not None and asked.change.sign < 0:
            objections.append(f"what was asked before is harmed: {asked}")
    notes = [*small_bank(bank.distinct), *_notes(trial, bank)]
    return replace(trial, bank=bank, objections=tuple(objections), notes=tuple(notes))


def _notes(trial: Trial, bank: BankProfile) -> list[str]:
    notes = [bank.doubt] if bank.doubt else []
    if not trial.measurable:
        return [*notes, trial.without_effect()]
    assert trial.raw is not None
    notes += [trial.change_of_skewness()] if trial.skewness > trial.raw.skewness else []
    return notes if trial.asked is None or not trial.asked.change.sign else [*notes, f"asked before: {trial.asked}"]


def small_bank(distinct: int) -> list[str]:
    """What to expect of a bank of so few `distinct` queries; nothing of a larger one."""
    if distinct >= FEW:
        return []
    return [f"the bank has {distinct} distinct queries: below {FEW} expect little; collect 300 or more"]


def _objections_to_recall(trial: Trial) -> list[str]:
    """With known answers R@1 and the mean rank decide; of a few queries they say nothing."""
    raw = trial.raw
    if raw is None or raw.recall is None or trial.recall is None or trial.change is None:
        return []
    assert raw.rank is not None
    assert trial.rank is not None
    recall = f"R@1 of held-out bank queries goes {change(100 * raw.recall, 100 * trial.recall)}"
    if trial.change.sign < 0:
        return [recall]
    if trial.change.value <= 0 and trial.rank >= raw.rank and trial.queries >= SMALLEST_PAIRED:
        return [f"{recall}, and the mean rank of their targets {change(raw.rank, trial.rank)}"]
    return []


def _objections_to_method(method: Method, trial: Trial, bank: BankProfile) -> list[str]:
    """Of other methods than the default, which is made for banks of any size, with or without answers."""
    if isinstance(method, Blend):
        return []
    too_small = _objection_to_size(method, bank.distinct, trial.recall is not None)
    objections = [] if too_small is None else [too_small]
    if bank.kind == "log" and bank.answers_stand_out and method.answers == "kept":
        objections.append(f"{bank}, and {method.name!r} would push down what it asks for; pass answers='left out'")
    assert trial.raw is not None
    if trial.recall is None and trial.skewness >= trial.raw.skewness:
        objections.append(trial.change_of_skewness())
    return objections


def _objection_to_size(method: Method, distinct: int, paired: bool) -> str | None:
    """What there is to say against a fit of `method` on `distinct` bank queries."""
    smallest = SMALLEST_PAIRED if paired else SMALLEST
    if isinstance(method, Blend) or distinct >= smallest:
        return None
    return f"{method.name!r} needs {smallest} distinct queries, the bank has {distinct}"


def require_size(bank: PreparedBank, method: Method) -> None:
    """Raises CorrectionRefused for a bank that is too small, which is seen without the gallery."""
    distinct = len(bank.distinct)
    with too_small_is_refused():
        require_enough(distinct)
    objection = _objection_to_size(method, distinct, bank.known is not None)
    if objection:
        raise CorrectionRefused(objection, *ways_out(USE_BLEND))


def require_kind(experiment: Experiment) -> None:
    """Raises CorrectionRefused for a bank of the wrong kind, which costs a few products of samples."""
    bank = experiment.profile
    if bank.objection:
        raise CorrectionRefused(bank.objection, *ways_out(remedy(bank)))


def require_displacement(model: OffsetModel, bank: Vectors, gallery: Vectors, compute: Compute) -> None:
    """Raises CorrectionRefused if the offsets reach too far to be found among the candidates of a search."""
    share = displacement(model, bank, gallery, compute)
    if share > FARTHEST:
        raise CorrectionRefused(
            "the offsets are far wider than the similarities to the bank: what comes first would have "
            f"{share:.0%} of the gallery nearer to the query ({FARTHEST:.0%} at most); nothing was changed: embed the "
            "bank with the gallery's model, or pass ",
            Parameter("force", True),
        )


def check_by(experiment: Experiment, configuration: Method) -> Trial:
    """`judge` on an `experiment`; raises CorrectionRefused where there is an objection."""
    with too_small_is_refused():
        return judge_by(experiment, configuration).require_passed()
