"""Refuse corrections that would do harm, and describe the kind of a bank.

The guard holds out all queries for a target together. For a log with known answers, it
also tries targets that were asked for before: it holds out single queries whose target
the log also asks for in other words.
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
    Candidate,
    Figures,
    answers_of,
    change_of,
    cross_validate,
    fit_rows,
    fitted_by,
    folds_of,
    measure,
    paraphrase_folds,
    require_enough,
    sample_of,
    uncorrected,
    with_rows,
)
from hubplugin.vectors import VectorLike, original_rows, take_rows

FEW = 100
"""The fewest distinct bank queries for which much can be expected of a correction.

With fewer, nothing is said about what was asked before. With 100, the default gains 1.0
points of R@1 on the logs of docs/measurements/methods.md; with 300, it gains 1.6. Of 20
draws of 12 to 50 queries of `examples/data`, one lowers hubness by more than chance; of
four draws of 100, three do; of 16 draws of 150 to 1,200, all do."""

FEWEST_PARAPHRASES = 50
"""The fewest held-out wordings that show the effect on what was asked before."""

AS_OFTEN = 0.8
"""R@1 of other wordings, relative to all queries, below which clicks look wrong.

If a log asks for each target once, two queries share a target only through a wrong
click. On eight such logs with 10 to 50 % wrong clicks, the share is 0.42 to 0.92 if the
clicks are on any of the first ten results, and above the limit in one of 37 draws. Of
draws of clicks on the first result, which look right, half are above it. On logs with
true other wordings (commands, ICD, CWE, packages), it is 0.93 to 1.02."""

SMALLEST_PAIRED = 200
"""The fewest distinct bank queries for methods other than `blend`, with known answers.

With fewer, R@1 on text and code falls by up to 3 points, since these methods keep the
full strength of their offsets."""

SMALLEST = 400
"""As `SMALLEST_PAIRED`, without known answers, which would show a fall of R@1."""

MOVED_QUERIES = 64
MOVED_TARGETS = 2048
"""The numbers of bank queries and targets, evenly spaced, that `displacement` uses."""

FARTHEST = 0.05
"""The largest share of the gallery nearer to a query than its corrected first target.

On 27 banks of text and code, text and image, two languages and query logs, it is at
most 0.017 on average with `blend`, `dbsn`, `is` or `nnn`. On the same banks, altered as
if another model had embedded them, it is 0.11 to 0.47 (benchmarks/guard.py)."""


@dataclass(frozen=True, kw_only=True)
class Trial(Figures):
    """The trial of a correction on held-out bank queries, with any objections.

    raw: The figures without a correction.
    noise: The standard error of the change in skewness.
    bank: The profile of the bank.
    asked: R@1 of other wordings of queries for the targets of a log. None if the
        answers are not known, or if few targets are asked for more than once.
    objections: The reasons to refuse the correction.
    notes: Remarks that are not reasons for refusal.
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
        """True if hubness, or R@1 in `right` or `asked`, changes beyond chance."""
        # A sign is 0 if the change may be chance.
        signs = [side.change.sign for side in (self.right, self.asked) if side]
        return any([self.rise.sign, *signs])

    @property
    def rise(self) -> Figure:
        """The rise in skewness, with a 95 % interval over other held-out queries."""
        rise = self.skewness - self.raw.skewness
        margin = 1.96 * self.noise
        return Figure(rise, rise - margin, rise + margin)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def helps(self) -> bool | None:
        """True if R@1 rises beyond chance. False if there are objections.

        None if there are no objections, but also no known answers.
        """
        if self.objections:
            return False
        return None if self.right is None else self.right.change.sign > 0

    def outlook(self) -> str:
        """Return the forecast, worded to follow "it would"."""
        if self.objections:
            return f"be refused: {'; '.join(self.objections)}"
        if not self.measurable:
            return "be applied, but its effect cannot be measured"
        changes = {1: "raise hubness", 0: "leave hubness as it is", -1: "lower hubness"}
        hubness = changes[self.rise.sign]
        if self.right is None:
            unknown = "whether it would help is not known without answers (--answers)"
            return f"{hubness}; {unknown}"
        effects = {1: "help", 0: "neither help nor harm beyond chance", -1: "do harm"}
        return f"{effects[self.right.change.sign]}; it would {hubness}"

    def change_of_skewness(self) -> str:
        """Describe the change in skewness and its interval, as in `rise`."""
        change = _change(self.raw.skewness, self.skewness)
        return (
            f"hubness (skewness) goes {change} on {self.queries:,} held-out queries "
            f"(a change of {self.rise.low:+.2f} to {self.rise.high:+.2f})"
        )

    def __str__(self) -> str:
        lines = [f"{self.name} would {self.outlook()}", self.change_of_skewness()]
        if self.right is not None:
            lines.append(str(self.right))
        if not self.bank.objection:  # otherwise, the outlook contains it
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
    """Try a correction on held-out bank queries, and collect the objections to it.

    Like `hubplugin.apply`, `Trial.require_passed` raises CorrectionRefused if there is
    an objection. There is an objection

    - if the bank is of the wrong kind, see `BankProfile`;
    - with known answers, if R@1 of held-out queries falls beyond chance or, with 200
      such queries, if neither R@1 nor the mean rank of their targets improves;
    - with a log, also if R@1 of other wordings for its targets falls;
    - with a method other than `blend`, if the bank is small, if it looks like a log and
      the method keeps its answers, or, without known answers, if hubness does not fall.

    Args:
        targets, bank, method, metric, compute, **parameters: As in `hubplugin.fit`.
        seed: The seed of the random draws.

    Raises:
        InputError: An argument cannot be used.
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
        method: The method to try.
        seed: The seed of the random draws.
        bank_profile: The profile of the bank, if it is known already.
        learned: A candidate with a learned map, to try instead of the method alone.
    """
    sample = sample_of(bank, seed)
    candidates = [uncorrected, learned or fitted_by(method)]
    if bank.known_answers is None and isinstance(method, Blend):
        # Only the kind of the bank can be an objection, so the figures decide nothing.
        margins = measure(candidates, bank, sample, seed)
    else:
        margins = cross_validate(candidates, bank, folds_of(bank, seed), sample)
    bank_profile = bank_profile or profile_of(bank, seed, sample)
    asked = None
    if bank_profile.answered:
        # Resolve the method here: a fold would resolve it on few queries and targets.
        tried = learned or fitted_by(method.resolve(bank))
        asked = try_paraphrases(bank, tried, seed)
    trial = Trial.of(
        margins,
        1,
        method.name,
        method.parameters,
        raw=Figures.of(margins, 0),
        noise=margins.noise(0, 1),
        bank=bank_profile,
        asked=asked,
    )
    objections = [] if bank_profile.objection is None else [bank_profile.objection]
    objections += objections_to_method(method, trial)
    objections += objections_to_recall(trial, learned is not None)
    if asked is not None and asked.change.sign < 0:
        objections.append(f"targets asked for before are harmed: {asked}")
    notes = [*small_bank(bank_profile.distinct), *_notes(trial)]
    return replace(trial, objections=tuple(objections), notes=tuple(notes))


def profile_of(
    bank: PreparedBank, seed: int = 0, sample: np.ndarray | None = None
) -> BankProfile:
    """Return the profile of a bank, computed on samples.

    Args:
        bank: The bank, with its gallery.
        seed: The seed of the samples.
        sample: A sample of the gallery; by default, `sample_of` draws one.
    """
    if sample is None:
        sample = sample_of(bank, seed)
    rng = np.random.default_rng(seed)
    rows = rng.permutation(bank.distinct)[: fit_rows(bank)]
    targets = rng.permutation(sample)
    answered = bank.clicks is not None  # clicks name targets of the gallery
    if bank.pairs is not None:
        # Pairs name rows of the target bank. Estimate their share in the gallery from
        # their share in the sample. `with_rows` appends the answers that it lacks.
        _, places = with_rows(sample, answers_of(bank, bank.pairs[bank.distinct]))
        in_sample = float((places < len(sample)).mean())
        # The sample has `len(sample)` of the `bank.count` targets of the gallery.
        answered = in_sample * bank.count / len(sample) > 0.5
    return profile(bank, bank.query_bank[rows], targets, answered, rng)


def try_paraphrases(bank: PreparedBank, tried: Candidate, seed: int = 0) -> Side | None:
    """Try a correction on held-out wordings of targets that it saw in other wordings.

    Args:
        bank: The log.
        tried: The correction. Its method must be resolved on the whole bank and its
            gallery.
        seed: The seed of the folds.

    Returns:
        R@1 of the raw search and of `tried`. None if the log has few queries, or few
        targets with several wordings.
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
    """Return True if a raw search finds reworded queries' targets far too seldom.

    "Far too seldom" means an R@1 below `AS_OFTEN` times that of all queries, and lower
    by more than two standard errors.

    Args:
        asked: R@1 of queries that are other wordings of logged ones, see `Trial`.
        all_queries: R@1 of all held-out queries.
    """
    recall = all_queries.before  # of the raw search
    error = math.sqrt(recall * (1 - recall) / asked.queries)
    return asked.before < min(AS_OFTEN * recall, recall - 2 * error)


def objections_to_recall(trial: Trial, learned: bool = False) -> list[str]:
    """Return objections if R@1 falls, or if neither R@1 nor the mean rank improves.

    Without known answers, there are no objections. An improvement is not required of a
    trial with fewer than `SMALLEST_PAIRED` queries, which would not show it, nor of a
    `learned` map: a map gains most for targets that are asked for again, but the folds
    hold out all queries for a target.
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

    The default suits banks of any size, with or without answers.
    """
    if isinstance(method, Blend):
        return []
    bank = trial.bank
    objections = _objections_to_size(method, bank.distinct, trial.right is not None)
    if bank.kind == "log" and bank.answers_stand_out and method.answers == "kept":
        objections.append(
            f"{bank}, and {method.name!r} would push down its answers; pass "
            "answers='left out'"
        )
    if trial.right is None and trial.skewness >= trial.raw.skewness:
        objections.append(trial.change_of_skewness())
    return objections


def _objections_to_size(method: Method, distinct: int, paired: bool) -> list[str]:
    """Return an objection if `distinct` queries are too few for a method.

    `paired` is True for known answers. `blend` suits banks of any size.
    """
    smallest = SMALLEST_PAIRED if paired else SMALLEST
    if isinstance(method, Blend) or distinct >= smallest:
        return []
    return [
        f"{method.name!r} needs {smallest} distinct queries, the bank has {distinct}"
    ]


def _notes(trial: Trial) -> list[str]:
    """Return remarks on a trial that are no reason to refuse it."""
    notes = [] if trial.bank.doubt is None else [trial.bank.doubt]
    right = trial.right
    asked = trial.asked
    if asked is not None and asked.change.sign:
        notes.append(f"targets asked for before: {asked}")
    if not trial.measurable:
        line = f"the effect cannot be measured: {trial.change_of_skewness()}"
        if right is not None:
            line += f"; {right}"
        return [*notes, line]
    if trial.skewness > trial.raw.skewness:
        notes.append(trial.change_of_skewness())
    return notes


def small_bank(distinct: int) -> list[str]:
    """Return a note if the bank has few `distinct` queries, else an empty list."""
    if distinct >= FEW:
        return []
    return [
        f"the bank has {distinct} distinct queries: with fewer than {FEW}, expect "
        "little; collect 300 or more"
    ]


def require_kind(bank: PreparedBank) -> BankProfile:
    """Return the profile of a bank. Raises CorrectionRefused if its kind would do harm.

    The profile needs only samples, so it is cheap enough to compute before any fit.
    """
    bank_profile = profile_of(bank)
    if bank_profile.objection:
        raise _refusal(bank_profile.objection, *_remedy(bank_profile))
    return bank_profile


def require_size(bank: PreparedBank, method: Method) -> None:
    """Raise CorrectionRefused if a bank is too small for `method`.

    Raises InputError if the bank is too small for any method. The gallery is not used.
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
            "the offsets outweigh the similarities: the first corrected result of a "
            f"query would, on average, rank behind {share:.0%} of the gallery by "
            f"similarity alone (limit {FARTHEST:.0%})",
            "embed the bank with the gallery's model",
        )


def displacement(model: OffsetModel, bank: PreparedBank) -> float:
    """Return the share of targets nearer to a query than its corrected first target.

    Nearer means a larger similarity, without offsets. The share, 0 to 1, is the mean
    over samples of bank queries and targets.
    """
    gallery = bank.require_targets()
    rows = pick_evenly(np.arange(gallery.rows), MOVED_TARGETS)
    targets = take_rows(gallery, rows, bank.metric)
    queries = pick_evenly(bank.query_bank, MOVED_QUERIES)
    if model.query_map is not None:
        queries = model.query_map(queries)
    raw = compare(queries, targets, model.metric, bank.compute)
    if model.fitted is None:
        offsets = model.offsets(targets)
    else:
        # `fitted` also has the zero vectors, which `gallery` leaves out.
        offsets = model.fitted[original_rows(gallery)[rows]]
    first_target = np.argmax(raw + offsets, axis=1)
    similarity_of_first = np.take_along_axis(raw, first_target[:, None], axis=1)
    return float((raw > similarity_of_first).mean())


Parts: TypeAlias = tuple[str | Parameter, ...]
"""The parts of an error message, see `HubpluginError`."""

COLLECT: Parts = ("collect queries that people ask of this gallery",)
USE_BLEND: Parts = (
    "use ",
    Parameter("method", "blend"),
    ", which is made for banks of any kind and size",
)


def _remedy(bank: BankProfile, method: str = "blend") -> Parts:
    """Return the advice to a user whose fit of `method` on `bank` is refused."""
    answers = Parameter("answers")
    if bank.kind == "documents":
        return (
            *COLLECT,
            ", pass ",
            answers,
            " if documents are meant to be the queries",
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
    """Return an error that names the reason, the remedy, and the option `force`."""
    return CorrectionRefused(
        reason,
        "; nothing was changed: ",
        *remedy,
        ", or apply it all the same with ",
        Parameter("force", True),
    )


def _change(before: float, after: float) -> str:
    """Return the words of a change between two figures."""
    return f"from {before:.2f} to {after:.2f}"
