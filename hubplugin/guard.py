"""The guard refuses a correction that would do harm, and says what kind of bank it sees.

Of a log whose answers are known it also looks at what was asked before: single wordings
are held out, of targets that the log asks for in others, too. Otherwise all wordings of
a target are held out together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from pydantic import computed_field

from hubplugin.bank import Bank, BankLike, BankProfile, PreparedBank, compare, profile
from hubplugin.compute import Compute
from hubplugin.errors import CorrectionRefused, InputError, Parameter
from hubplugin.measures.hubness import pick_evenly
from hubplugin.measures.significance import Figure, Side
from hubplugin.methods import METHODS, Method, build_method
from hubplugin.methods.blend import Blend
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, Setting
from hubplugin.validation import (
    FEWER,
    FOLDS,
    Candidate,
    Figures,
    answers_of,
    change_of,
    cross_validate,
    fit_rows,
    fitted_by,
    folds_of,
    paraphrase_folds,
    require_enough,
    sample_of,
    uncorrected,
    with_rows,
)
from hubplugin.vectors import VectorLike, take_rows

FEW = 100
"""Distinct bank queries below which little is to be expected of a correction.

Nothing is said then of what was asked before. With 100 the default gains 1.0 points of
R@1 on the logs of docs/measurements/methods.md, where 300 gain 1.6. Of 20 draws of 12
to 50 queries of `examples/data` one lowers hubness by more than chance, of four draws
of 100 three do, of 16 draws of 150 to 1,200 all do."""

FEWEST_PARAPHRASES = 50
"""Other wordings of targets below which nothing is said of what was asked before."""

AS_OFTEN = 0.8
"""R@1 of other wordings, as a share of that of all queries, below which clicks are wrong.

If a log asks once for each target, two queries share one only by a wrong click. On eight
such logs with 10 to 50 % wrong clicks the share is below this in 36 of 37 draws of clicks
on any of the first ten (0.42 to 0.92), and in half of those on the first ones, which look
right. On logs with true other wordings (commands, ICD, CWE, packages) it is 0.93 to 1.02."""

SMALLEST_PAIRED = 200
"""Distinct bank queries that methods other than `blend` need, with known answers.

With fewer, R@1 falls on text and code by up to 3 points: their offsets keep their full
strength."""

SMALLEST = 400
"""The same without known answers, which alone would show the fall."""

MOVED_QUERIES = 64
MOVED_TARGETS = 2048
"""The bank queries and targets whose displacement is looked at, drawn evenly."""

FARTHEST = 0.05
"""The share of the gallery that may be nearer to a query than its corrected first target.

On 27 banks of text and code, text and image, two languages and query logs it is on
average at most 0.017, by `blend`, `dbsn`, `is` or `nnn`. On the same banks as if another
model had embedded them it is 0.11 to 0.47 (benchmarks/guard.py)."""


@dataclass(frozen=True, kw_only=True)
class Trial(Figures):
    """A correction on held-out queries of a bank, and what speaks against it.

    raw: The figures of no correction.
    noise: The standard error of the change of the skewness.
    bank: What kind of bank it is.
    asked: R@1 of other wordings of what a log asks for. None if its answers are not
        known, or few are asked again.
    objections: Reasons to refuse it.
    notes: What is no reason to refuse but worth knowing.
    """

    raw: Figures
    noise: float
    bank: BankProfile
    asked: Side | None = None
    objections: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def measurable(self) -> bool:
        """True if hubness, or R@1 of either kind, changes beyond chance."""
        signs = [side.change.sign for side in (self.right, self.asked) if side]
        return any([self.hubness, *signs])

    @property
    def hubness(self) -> int:
        """1 if hubness rises beyond chance, -1 if it falls, else 0."""
        return self.rise.sign

    @property
    def rise(self) -> Figure:
        """The rise of skewness, with its interval over other held-out queries."""
        rise = self.skewness - self.raw.skewness
        room = 1.96 * self.noise
        return Figure(rise, rise - room, rise + room)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def helps(self) -> bool | None:
        """True if R@1 rises beyond chance without an objection; None if not known."""
        if self.objections:
            return False
        return None if self.right is None else self.right.change.sign > 0

    def outlook(self) -> str:
        """Return the forecast in words that follow "it would"."""
        if self.objections:
            return f"be refused: {'; '.join(self.objections)}"
        if not self.measurable:
            return "be applied, and no effect can be measured"
        changes = {1: "raise hubness", 0: "leave hubness as it is", -1: "lower hubness"}
        hubness = changes[self.hubness]
        if self.right is None:
            unknown = "whether it would help is not known without answers (--answers)"
            return f"{hubness}; {unknown}"
        effects = {1: "help", 0: "neither help nor harm beyond chance", -1: "do harm"}
        return f"{effects[self.right.change.sign]}, and {hubness}"

    def change_of_skewness(self) -> str:
        """Describe the change with its 95 % interval over other held-out queries."""
        change = _change(self.raw.skewness, self.skewness)
        return (
            f"hubness (skewness) goes {change} on {self.queries:,} held-out queries "
            f"(a change of {self.rise.low:+.2f} to {self.rise.high:+.2f})"
        )

    def __str__(self) -> str:
        lines = [f"{self.name} would {self.outlook()}", self.change_of_skewness()]
        if self.right is not None:
            lines.append(str(self.right))
        if not self.bank.objection:  # which is in the outlook
            lines.append(str(self.bank))
        lines += [f"note: {note}" for note in self.notes]
        return "\n  ".join(lines)

    def require_passed(self) -> Trial:
        """Return this trial. Raises CorrectionRefused if there is an objection."""
        if self.objections:
            refused = f"{self.name} is refused: {'; '.join(self.objections)}"
            raise _refusal(refused, *_remedy(self.bank, self.method))
        return self


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
    """Try a correction on held-out bank queries: what would change, what is against it.

    `Trial.require_passed` raises CorrectionRefused if there is an objection, as
    `hubplugin.apply` does. There is one

    - if the bank is of the wrong kind, see `BankProfile`;
    - with known answers, if R@1 of held-out queries falls beyond chance, or, with 200
      of them, neither it nor the mean rank of their targets gets better;
    - with a log, also if R@1 of other wordings of what it asked for falls;
    - with another method than `blend`, if the bank is small, if it looks like a log and
      the method keeps its answers, or, without known answers, if hubness does not fall.

    Args:
        targets, bank, method, metric, compute, **parameters: As in `hubplugin.fit`.
        seed: The seed of what is drawn.

    Raises:
        InputError: Something cannot be used.
    """
    if seed < 0:
        raise InputError(Parameter("seed", seed), ": expected 0 or more")
    configuration = build_method(METHODS, method, parameters)
    prepared = Bank.of(bank).prepare(metric, compute).against(targets)
    return judge_by(prepared, configuration, seed)


def judge_by(
    bank: PreparedBank,
    method: Method,
    seed: int = 0,
    bank_profile: BankProfile | None = None,
    learned: Candidate | None = None,
) -> Trial:
    """Try a correction as `judge` does.

    Args:
        bank: The bank, with its gallery.
        method: The method that is tried.
        seed: The seed of what is drawn.
        bank_profile: That of the bank, if it is known.
        learned: Tried in the place of the method alone.
    """
    count = FOLDS
    if bank.known_answers is None and isinstance(method, Blend):
        count = FEWER  # nothing but its kind speaks against such a bank
    folds = folds_of(bank, seed, count)
    sample = sample_of(bank, seed)
    tried = learned or fitted_by(method)
    margins = cross_validate([uncorrected, tried], bank, folds, sample)
    bank_profile = bank_profile or profile_of(bank, seed, sample)
    trial = Trial.of(
        margins,
        1,
        method.name,
        method.parameters,
        raw=Figures.of(margins, 0),
        noise=margins.noise(0, 1),
        bank=bank_profile,
    )
    objections = [] if bank_profile.objection is None else [bank_profile.objection]
    objections += objections_to_method(method, trial)
    objections += objections_to_recall(trial, learned is not None)
    if _is_answered(bank, sample):
        tried = learned or fitted_by(method.resolve(bank))
        trial = replace(trial, asked=try_paraphrases(bank, tried, seed))
        if trial.asked is not None and trial.asked.change.sign < 0:
            objections.append(f"what was asked before is harmed: {trial.asked}")
    notes = [*small_bank(bank_profile.distinct), *_notes(trial)]
    return replace(trial, objections=tuple(objections), notes=tuple(notes))


def profile_of(
    bank: PreparedBank, seed: int = 0, sample: np.ndarray | None = None
) -> BankProfile:
    """Return the profile of a bank, from samples.

    Args:
        bank: The bank, with its gallery.
        seed: The seed of the samples.
        sample: A sample of the gallery; by default `sample_of`.
    """
    order = np.random.default_rng(seed).permutation(bank.distinct)
    queries = bank.query_bank[order[: 2 * fit_rows(bank)]]
    if sample is None:
        sample = sample_of(bank, seed)
    return profile(bank, queries, sample, _is_answered(bank, sample), seed)


def _is_answered(bank: PreparedBank, sample: np.ndarray) -> bool:
    """Return True if the answers are known to be in the gallery, most of them at least.

    Clicks name targets of the gallery. Pairs name rows of the target bank, so the share of
    these in the gallery is estimated from those in a `sample` of it.
    """
    if bank.pairs is None:
        return bank.clicks is not None
    _, columns = with_rows(sample, answers_of(bank, bank.pairs[bank.distinct]))
    share = float((columns < len(sample)).mean())
    return share * bank.count / len(sample) > 0.5


def try_paraphrases(bank: PreparedBank, tried: Candidate, seed: int = 0) -> Side | None:
    """Try a correction on held-out wordings of targets whose other wordings it was fitted on.

    Args:
        bank: The log.
        tried: The correction; a method must be resolved on the whole bank and gallery.
        seed: The seed of the folds.

    Returns:
        R@1 raw and under `tried`. None if the log has few queries, or few targets with
        several wordings.
    """
    if len(bank.distinct) < FEW:
        return None
    folds = paraphrase_folds(bank, seed)
    if sum(len(fold.test) for fold in folds) < FEWEST_PARAPHRASES:
        return None
    sample = sample_of(bank, seed)
    margins = cross_validate([uncorrected, tried], bank, folds, sample)
    return change_of(margins, 0, 1, "other wordings")


def look_like_wrong_clicks(asked: Side, all_queries: Side) -> bool:
    """Return True if other wordings find their target far less often than all queries."""
    usual = all_queries.before
    error = math.sqrt(usual * (1 - usual) / asked.queries)
    return asked.before < min(AS_OFTEN * usual, usual - 2 * error)


def objections_to_recall(trial: Trial, learned: bool = False) -> list[str]:
    """Return objections if R@1 falls, or if neither R@1 nor the mean rank improves.

    Return none without known answers. Fewer than `SMALLEST_PAIRED` queries do not show
    an improvement, and a `learned` map need not show one: it gains most for targets that
    are asked for again, while held-out targets were never asked for.
    """
    right = trial.right
    rank = trial.rank
    raw_rank = trial.raw.rank
    if right is None or rank is None or raw_rank is None:
        return []
    change = _change(100 * right.before, 100 * right.after)
    recall = f"R@1 of held-out bank queries goes {change}"
    if right.change.sign < 0:
        return [recall]
    is_better = right.change.value > 0 or rank < raw_rank
    if is_better or learned or trial.queries < SMALLEST_PAIRED:
        return []
    change_of_rank = _change(raw_rank, rank)
    return [f"{recall}, and the mean rank of their targets {change_of_rank}"]


def objections_to_method(method: Method, trial: Trial) -> list[str]:
    """Return objections to a method other than the default.

    The default is made for banks of any size, with or without answers.
    """
    if isinstance(method, Blend):
        return []
    bank = trial.bank
    objections = _objections_to_size(method, bank.distinct, trial.right is not None)
    if bank.kind == "log" and bank.answers_stand_out and method.answers == "kept":
        objections.append(
            f"{bank}, and {method.name!r} would push down what it asks for; "
            "pass answers='left out'"
        )
    if trial.right is None and trial.skewness >= trial.raw.skewness:
        objections.append(trial.change_of_skewness())
    return objections


def _objections_to_size(method: Method, distinct: int, paired: bool) -> list[str]:
    smallest = SMALLEST_PAIRED if paired else SMALLEST
    if isinstance(method, Blend) or distinct >= smallest:
        return []
    needs = f"needs {smallest} distinct queries, the bank has {distinct}"
    return [f"{method.name!r} {needs}"]


def _notes(trial: Trial) -> list[str]:
    notes = [] if trial.bank.doubt is None else [trial.bank.doubt]
    right = trial.right
    asked = trial.asked
    if asked is not None and asked.change.sign:
        notes.append(f"asked before: {asked}")
    if not trial.measurable:
        line = f"no effect can be measured: {trial.change_of_skewness()}"
        if right is not None:
            line += f"; {right}"
        return [*notes, line]
    if trial.skewness > trial.raw.skewness:
        notes.append(trial.change_of_skewness())
    return notes


def small_bank(distinct: int) -> list[str]:
    """Return a note on what to expect if the bank has few `distinct` queries, else none."""
    if distinct >= FEW:
        return []
    return [
        f"the bank has {distinct} distinct queries: below {FEW} expect little; "
        "collect 300 or more"
    ]


def require_kind(bank: PreparedBank) -> BankProfile:
    """Return the profile of a bank. Raises CorrectionRefused if its kind would do harm.

    Only samples are multiplied, so it is cheap enough to come before any fit.
    """
    seen = profile_of(bank)
    if seen.objection:
        raise _refusal(seen.objection, *_remedy(seen))
    return seen


def require_size(bank: PreparedBank, method: Method) -> None:
    """Raise CorrectionRefused if a bank is too small for `method`.

    Raises InputError if it is too small for any. It does not need the gallery.
    """
    distinct = len(bank.distinct)
    require_enough(distinct)
    is_paired = bank.known_answers is not None
    objections = _objections_to_size(method, distinct, is_paired)
    if objections:
        raise _refusal(*objections, *USE_BLEND)


def require_displacement(model: OffsetModel, bank: PreparedBank) -> None:
    """Raise CorrectionRefused if offsets outweigh similarities, see `FARTHEST`."""
    share = displacement(model, bank)
    if share > FARTHEST:
        raise _refusal(
            "the offsets are far wider than the similarities to the bank: what comes "
            f"first would have {share:.0%} of the gallery nearer to the query "
            f"({FARTHEST:.0%} at most)",
            "embed the bank with the gallery's model",
        )


def displacement(model: OffsetModel, bank: PreparedBank) -> float:
    """Return the share of targets that are nearer to a query than its corrected first one.

    It is the mean, 0 to 1, over a sample of bank queries and of targets.
    """
    gallery = bank.require_targets()
    rows = pick_evenly(np.arange(gallery.rows), MOVED_TARGETS)
    targets = take_rows(gallery, rows, bank.metric)
    queries = pick_evenly(bank.query_bank, MOVED_QUERIES)
    if model.query_map is not None:
        queries = model.query_map(queries)
    raw = compare(queries, targets, model.metric, bank.compute)
    best = np.argmax(raw + model.offsets(targets), axis=1)
    return float((raw > np.take_along_axis(raw, best[:, None], axis=1)).mean())


Parts: TypeAlias = tuple[str | Parameter, ...]

COLLECT: Parts = ("collect queries that people ask of this very gallery",)
USE_BLEND: Parts = (
    "use ",
    Parameter("method", "blend"),
    ", which is made for banks of any kind and size",
)


def _remedy(bank: BankProfile, method: str = "blend") -> Parts:
    """Return what to do if a fit of `method` on `bank` is refused."""
    answers = Parameter("answers")
    if bank.kind == "documents":
        return (
            *COLLECT,
            ", pass ",
            answers,
            " if documents are to be asked by documents",
        )
    if bank.kind == "swapped":
        return (
            "pass the queries as the bank and the documents that answer them as ",
            answers,
        )
    if method == "blend" or bank.objection:
        return COLLECT
    return USE_BLEND


def _refusal(reason: str, *remedy: str | Parameter) -> CorrectionRefused:
    """Return the error that names a reason, a remedy, and `force`."""
    return CorrectionRefused(
        reason,
        "; nothing was changed: ",
        *remedy,
        ", or apply it all the same with ",
        Parameter("force", True),
    )


def _change(first: float, second: float) -> str:
    return f"from {first:.2f} to {second:.2f}"
