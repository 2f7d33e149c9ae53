"""The guard: refuses a correction that would do harm, and says which kind of bank it sees."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import ParamSpec

from hubplugin.errors import CorrectionRefused, Parameter
from hubplugin.methods import METHODS, Method, configured
from hubplugin.methods.blend import Blend
from hubplugin.metric import Metric
from hubplugin.model import Setting
from hubplugin.reductions import Compute, Precision
from hubplugin.selection.banks import Banks, Pairs
from hubplugin.selection.experiment import Experiment, TooSmall, require_enough
from hubplugin.selection.profile import BankProfile
from hubplugin.selection.sides import STAND_INS, Sides, both_sides
from hubplugin.selection.trials import Candidate
from hubplugin.vectors import Progress, VectorLike

P = ParamSpec("P")

SMALLEST_PAIRED, SMALLEST = 200, 400
"""Distinct bank queries that a method needs whose offsets keep their full strength with a small bank: with fewer, R@1
falls on text and code by up to 3 points. Without pairs it takes more, since only pairs show the fall."""


@dataclass(frozen=True)
class Judgement:
    """What the guard found: the correction tried, what no correction does, the bank, and the `objections`, if any.
    notes: what is no reason to refuse, but worth knowing. sides: what it does to both sides of a log; None of others.
    """

    candidate: Candidate
    uncorrected: Candidate
    bank: BankProfile
    probes: int
    objections: list[str]
    notes: list[str]
    sides: Sides | None = None

    def __str__(self) -> str:
        verdict = "refused: " + "; ".join(self.objections) if self.objections else "passed"
        lines = [verdict, str(self.uncorrected), str(self.candidate)]
        lines += [] if self.bank.objection else [str(self.bank)]  # which is among the objections
        return "\n  ".join([*lines, *(f"note: {note}" for note in self.notes)])


def judge(
    query_bank: VectorLike,
    targets: VectorLike,
    method: str = "blend",
    target_bank: VectorLike | None = None,
    *,
    pairs: Pairs = None,
    same_kind: bool = False,
    metric: Metric | str = "cosine",
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
    precision: Precision = "float32",
    seed: int = 0,
    **parameters: Setting,
) -> Judgement:
    """Whether a correction would help, tried on held-out bank queries; arguments as in `choose` and `hubplugin.fit`.

    same_kind: documents are meant to be asked by documents, such as duplicates; a bank that looks like documents is
    then no objection. Pairs say so too, since they tell what each bank query asks for.

    There is an objection if the bank is of the wrong kind (see `BankProfile`). With pairs or clicks, if R@1 of held-out
    queries falls by more than two standard errors, or, with 200 of them, neither it nor the mean rank of their targets
    gets better. Of a log whose answers are known, also if R@1 of other wordings of what it asked for falls so much (see
    `Sides`). With another method than `blend`, if the bank is small, if it looks like a log and the method keeps its
    answers, or, without pairs or clicks, if hubness does not fall. Raises InputError for anything that cannot be used.
    """
    configuration = configured(METHODS, method, parameters, judge)
    compute = Compute(device, memory, progress, precision)
    banks = Banks.read(query_bank, target_bank, pairs, metric, compute, same_kind).against(targets)
    with closing(Experiment(banks, seed)) as experiment:
        return judge_by(experiment, [configuration])[0]


def judge_by(experiment: Experiment, configurations: Sequence[Method]) -> list[Judgement]:
    """`judge` for several configurations, by an experiment that others ask too."""
    uncorrected, *trials = experiment.run([None, *configurations])
    before, bank, given = uncorrected.candidate(uncorrected), experiment.profile, experiment.given
    judgements = []
    for trial in trials:
        after = trial.candidate(uncorrected)
        objections = [
            *([bank.objection] if bank.objection else []),
            *_objections_to_method(trial.method, before, after, bank),
            *_objections_to_recall(before, after, experiment.probes),
        ]
        notes = [bank.doubt] if bank.doubt else []
        notes += [_change_of_skewness(before, after)] if after.skewness > before.skewness else []
        sides = None
        if experiment.answered > 0.5 or (bank.kind == "log" and experiment.banks.known is None):
            sides = both_sides(experiment, trial.method.resolved(given))
            notes += [] if sides is None else [str(sides)]
            objections += _objections_to_sides(sides)
        judgements.append(Judgement(after, before, bank, experiment.probes, objections, notes, sides))
    return judgements


def _objections_to_recall(before: Candidate, after: Candidate, probes: int) -> list[str]:
    """With pairs R@1 and the mean rank decide; of a few probes they say nothing."""
    if before.recall is None or after.recall is None or after.gain is None or after.error is None:
        return []
    assert before.rank is not None
    assert after.rank is not None
    recall = f"R@1 of held-out bank queries goes {_change(100 * before.recall, 100 * after.recall)}"
    if after.gain < -2 * after.error:
        return [recall]
    if after.gain <= 0 and after.rank >= before.rank and probes >= SMALLEST_PAIRED:
        return [f"{recall}, and the mean rank of their targets {_change(before.rank, after.rank)}"]
    return []


def _objections_to_sides(sides: Sides | None) -> list[str]:
    """Where clicks or pairs say what was asked for; a guess is reported and decides nothing."""
    if sides is None or not sides.known or sides.asked.what == STAND_INS:
        return []
    fall = sides.asked.before - sides.asked.after
    return [f"R@1 of what was asked before goes: {sides.asked}"] if fall > 2 * sides.asked.error else []


def _objections_to_method(method: Method, before: Candidate, after: Candidate, bank: BankProfile) -> list[str]:
    """Of other methods than the default, which is made for banks of any size, with or without answers."""
    if isinstance(method, Blend):
        return []
    found = [_objection_to_size(method, bank.distinct, after.recall is not None)]
    if bank.kind == "log" and method.answers == "kept":
        found.append(f"{bank}, and {method.name!r} takes what was asked for for a hub unless answers='left out'")
    if after.recall is None and after.skewness >= before.skewness:
        found.append(_change_of_skewness(before, after))
    return [objection for objection in found if objection]


def _objection_to_size(method: Method | None, distinct: int, paired: bool) -> str | None:
    """What there is to say against a fit of `method` on `distinct` bank queries; None: one that is still looked for."""
    smallest = SMALLEST_PAIRED if paired else SMALLEST
    if method is None or isinstance(method, Blend) or distinct >= smallest:
        return None
    return f"{method.name!r} needs {smallest} distinct queries, the bank has {distinct}"


def require_size(banks: Banks, method: Method | None) -> None:
    """Raises CorrectionRefused for a bank that is too small, which is seen without the gallery. method: None where it
    is still looked for."""
    distinct = len(banks.given.distinct)
    with _too_small_is_refused():
        require_enough(distinct)
    objection = _objection_to_size(method, distinct, banks.known is not None)
    if objection:
        raise CorrectionRefused(objection, *_ways_out(USE_BLEND))


def require_kind(experiment: Experiment) -> None:
    """Raises CorrectionRefused for a bank of the wrong kind, which costs a few products of samples."""
    bank = experiment.profile
    if bank.objection:
        raise CorrectionRefused(bank.objection, *_ways_out(_remedy(bank)))


def _refusing(judged: Callable[P, Judgement]) -> Callable[P, Judgement]:
    @functools.wraps(judged, assigned=("__module__",))  # so that its arguments are those of `judge`
    def check(*args: P.args, **options: P.kwargs) -> Judgement:
        """The guard: `judge`, raising CorrectionRefused with the numbers and what to do if there is an objection."""
        with _too_small_is_refused():
            return _passed(judged(*args, **options))

    return check


def check_by(experiment: Experiment, configuration: Method) -> Judgement:
    """`check`, by an experiment that others ask too."""
    with _too_small_is_refused():
        return _passed(judge_by(experiment, [configuration])[0])


@contextmanager
def _too_small_is_refused() -> Iterator[None]:
    try:
        yield
    except TooSmall as error:
        raise CorrectionRefused(*error.args, *_ways_out(COLLECT)) from None


def _passed(judgement: Judgement) -> Judgement:
    if judgement.objections:
        candidate, reasons = judgement.candidate, "; ".join(judgement.objections)
        raise CorrectionRefused(
            f"{candidate.name} would not help: {reasons}", *_ways_out(_remedy(judgement.bank, candidate.method))
        )
    return judgement


check = _refusing(judge)

Parts = tuple[str | Parameter, ...]
COLLECT: Parts = ("collect queries that people ask of this very gallery",)
USE_BLEND: Parts = (Parameter("method", "blend"), " is made for banks of any kind and size")


def _remedy(bank: BankProfile, method: str = "blend") -> Parts:
    if bank.kind == "documents":
        return (*COLLECT, ", or pass ", Parameter("same_kind", True), " if documents are to be asked by documents")
    if bank.kind == "swapped":
        return ("pass the queries as the query bank and their answers as ", Parameter("target_bank"))
    return COLLECT if bank.objection or method == "blend" else USE_BLEND


def _ways_out(mend: Parts) -> Parts:
    """The end of a refusal: parts of its text."""
    return ("; nothing was changed; ", *mend, ", or ", Parameter("force", True), " applies it all the same")


def _change_of_skewness(before: Candidate, after: Candidate) -> str:
    return f"hubness (skewness) goes {_change(before.skewness, after.skewness)}"


def _change(before: float, after: float) -> str:
    return f"from {before:.2f} to {after:.2f}"
