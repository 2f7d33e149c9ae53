"""The guard refuses a correction that would do harm, and says which kind of bank it sees.

It also looks at both sides of a log: at targets that were asked for before, and at those that were not.

Queries are held out and tried: for *asked*, single wordings of targets that the log asks for in others, too; for *not
asked*, all wordings of a target at once. What a query asks for is known from clicks or pairs. Otherwise it is guessed:
queries that share a nearest target which stands out ask for it. They find it, so they show what is lost, and no gain.

Where each target has one wording, *stand-ins* take the place of others: bank queries whose nearest target stands out,
moved towards another bank query, drawn at random, until one in ten loses that target. Nearer to their bank query than
other wordings are, they show harm three to four times too large (docs/choosing.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import ParamSpec

import numpy as np
import torch

from hubplugin.bank import Bank, BankLike, BankProfile, PreparedBank
from hubplugin.compute import MOST_ANSWERS, Nearest, Similarities, dense, taken
from hubplugin.errors import CorrectionRefused, Parameter
from hubplugin.methods import METHODS, FitInput, Method, configured
from hubplugin.methods.blend import Blend
from hubplugin.metric import Metric
from hubplugin.model import Setting
from hubplugin.resources import Compute
from hubplugin.trial.experiment import (
    FOLDS,
    Candidate,
    Experiment,
    TooSmall,
    folds_within,
    require_enough,
    standard_error,
    with_rows,
)
from hubplugin.vectors import VectorLike, Vectors, as_vectors

FOUND = 0.9
"""Share of the stand-ins that find their target in the raw search. With fewer, all corrections look better than they
are; with more there is little left to win."""

ROWS = 2_048
"""Bank queries that are looked at."""

FEWEST = 100
"""Bank queries below which nothing is said."""

FEWEST_WORDINGS = 50
"""Held-out wordings of targets that stay asked for, below which stand-ins take their place."""

SHARED = 1 / 3
"""Share of the queries with a clear nearest target that have it in common with another, from which on these are taken
for wordings: where each target has one, hubs alone are shared, by 0.14; in logs of several wordings it is 0.55 to 0.71
(benchmarks/both_sides.py)."""

STAND_INS = "stand-ins"


@dataclass(frozen=True)
class Side:
    """R@1 of `probes` queries, 0 to 1, before and after, and the standard error of the change; what the queries are."""

    before: float
    after: float
    error: float
    probes: int
    what: str

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the change."""
        change = self.after - self.before
        return change - 1.96 * self.error, change + 1.96 * self.error

    @property
    def is_noise(self) -> bool:
        """Whether the change is none beyond chance."""
        low, high = self.interval
        return low <= 0 <= high

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"R@1 {100 * self.before:.1f} -> {100 * self.after:.1f} (95 % interval of the change {100 * low:+.1f} to "
            f"{100 * high:+.1f}, {self.probes} {self.what})"
        )


@dataclass(frozen=True)
class Sides:
    """asked: targets that the bank of the fit asks for. other: what it does not ask for. offset: mean offset of the
    bank's answers less that of the other targets, in units of the similarity; strongly negative where what was asked
    for is taken for a hub. known: whether clicks or pairs say what the probes ask for."""

    asked: Side
    other: Side
    offset: float
    known: bool

    def sentences(self) -> list[str]:
        """What is seen beyond chance, a line each. Only clicks and pairs know what was asked before."""
        guess = "" if self.known else ", by a guess"
        named = ((f"asked before{guess}", self.asked), (f"not asked before{guess}", self.other))
        return [f"{name}: {side}" for name, side in named if not side.is_noise]


@dataclass(frozen=True)
class _Log:
    """Some distinct queries of the bank [m, d], and of its gallery a sample together with all answers [n, d].

    answer: [m], the place of each query's answer among the targets, or -1. clear: [m], whether the answer is known, or
    else stands out. found: [m], whether the query finds its answer, by a clear margin.
    """

    given: FitInput
    queries: np.ndarray
    gallery: Vectors
    answer: np.ndarray
    clear: np.ndarray
    found: np.ndarray
    scores: torch.Tensor
    known: bool


def both_sides(experiment: Experiment, method: Method) -> Sides | None:
    """See `Sides`; None for a bank of less than `FEWEST` queries. method: resolved on the whole bank and gallery."""
    if experiment.distinct < FEWEST:
        return None
    log, rng = _look(experiment), np.random.default_rng(experiment.seed)
    together = rng.integers(0, FOLDS, log.gallery.rows)[log.answer]  # all that asked for a target in one fold
    together[log.answer < 0] = -1
    apart = np.full(len(log.queries), -1)
    apart[log.clear] = folds_within(log.answer[log.clear])
    again, whole = apart >= 0, _offsets(log, method, np.ones(len(log.queries), bool))
    if again.sum() >= FEWEST_WORDINGS and (log.known or again.sum() >= SHARED * log.clear.sum()):
        what, scores, tried = "other wordings" if log.known else "guessed wordings", log.scores, again
        asked = _held_out(log, method, scores, again, apart, what)
    elif log.found.sum() < FEWEST_WORDINGS // 2:
        return None  # nearly all of it finds one hub
    else:
        what, scores, tried = STAND_INS, _stand_ins(log, rng), log.found
        asked = _side(log, scores, [(np.flatnonzero(tried), whole)], what)
    if log.known:
        what, scores, tried = "queries", log.scores, log.clear
    other = _held_out(log, method, scores, tried, together, what)
    answered = np.zeros(log.gallery.rows, bool)
    answered[log.answer[log.answer >= 0]] = True
    offset = 0.0 if answered.all() else float(whole[answered].mean() - whole[~answered].mean())
    return Sides(asked, other, offset, log.known)


def _look(experiment: Experiment) -> _Log:
    bank, rows = experiment.bank, np.sort(experiment.split.rows[:ROWS])
    queries, known = bank.query_bank[rows], bank.known
    targets, answer = experiment.targets, np.full(len(rows), -1)
    if known is not None:
        asking = np.flatnonzero(known[rows] >= 0)
        targets, answer[asking] = with_rows(targets, experiment.answers(rows[asking]))
    else:
        targets, answer = with_rows(targets, _nearest_of(bank, queries))
    gallery = as_vectors(targets, "targets")
    scores = dense(Similarities(queries, bank.metric, bank.compute), gallery)
    first, second = scores.topk(2, dim=1).values.numpy().T
    own = scores.numpy()[np.arange(len(rows)), answer]
    hubs = np.bincount(answer[answer >= 0], minlength=len(targets)) > MOST_ANSWERS * len(rows)
    found = (answer >= 0) & (own >= first) & (first - second >= np.median(first - second)) & ~hubs[answer]
    clear = found if known is None else answer >= 0
    return _Log(bank, queries, gallery, answer, clear, found, scores, known is not None)


def _nearest_of(given: FitInput, queries: np.ndarray) -> np.ndarray:
    """The nearest target of each of `queries` [m, d] in the whole gallery: [m, d]."""
    gallery, nearest = given.require_targets("auto"), Nearest(len(queries))
    for tile in Similarities.of(queries, given.metric, given.compute).tiles(gallery, "answers of the bank"):
        nearest.see(tile, 0)
    rows, place = np.unique(nearest.rows, return_inverse=True)
    found: np.ndarray = taken(gallery, rows, given.metric)[place.reshape(-1)]
    return found


def _offsets(log: _Log, method: Method, kept: np.ndarray) -> np.ndarray:
    """Raw offsets [n] of a fit on the queries `kept` [m]."""
    return method.raw_offsets(FitInput(log.queries[kept], log.gallery, None, log.given.metric, log.given.compute.quiet))


def _held_out(
    log: _Log, method: Method, scores: torch.Tensor, probes: np.ndarray, fold_of: np.ndarray, what: str
) -> Side:
    """The `probes` of each fold on a fit without it. probes: bool [m]. fold_of: [m], -1 for what all fits see."""
    parts = []
    for fold in range(FOLDS):
        tried, kept = np.flatnonzero(probes & (fold_of == fold)), fold_of != fold
        if len(tried) and kept.any():
            parts.append((tried, _offsets(log, method, kept)))
    return _side(log, scores, parts, what)


def _side(log: _Log, scores: torch.Tensor, parts: list[tuple[np.ndarray, np.ndarray]], what: str) -> Side:
    """Of probes and the offsets that each is tried with."""
    before, after = [], []
    for probes, offsets in parts:
        part = scores[probes]
        before.append((part.argmax(dim=1).numpy() == log.answer[probes]).astype(float))
        after.append(((part + torch.from_numpy(offsets)).argmax(dim=1).numpy() == log.answer[probes]).astype(float))
    raw, corrected = np.concatenate(before), np.concatenate(after)
    return Side(float(raw.mean()), float(corrected.mean()), standard_error(corrected - raw), len(raw), what)


def _stand_ins(log: _Log, rng: np.random.Generator) -> torch.Tensor:
    """The similarities [m, n]; queries that find their answers were moved so far that `FOUND` of them still do."""
    rows, scores = np.flatnonzero(log.found), log.scores.clone()
    start = log.queries[rows]
    towards = log.queries[rng.integers(0, len(log.queries), len(rows))] - start
    lengths = np.linalg.norm(start, axis=1, keepdims=True)
    low, high = 0.0, 1.0
    for _ in range(10):
        step = (low + high) / 2
        moved = start + step * towards
        moved = (moved * lengths / np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-30)).astype(np.float32)
        scores[rows] = dense(Similarities(moved, log.given.metric, log.given.compute), log.gallery)
        found = scores[rows].argmax(dim=1).numpy() == log.answer[rows]
        low, high = (step, high) if found.mean() > FOUND else (low, step)
    return scores


P = ParamSpec("P")

FEW = 100
"""Distinct bank queries below which little is to be expected. With 100 the default gains 1.0 points of R@1 on the logs
of docs/banks.md, where 300 gain 1.6. Of 20 draws of 12 to 50 queries of `examples/data` one lowers hubness by more than
chance, of four draws of 100 three do, of 16 draws of 150 to 1,200 all do."""

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

    @property
    def measurable(self) -> bool:
        """Whether the correction changes hubness, R@1 or a side of a log by more than chance."""
        return _measurable(self.uncorrected, self.candidate, self.sides)

    def __str__(self) -> str:
        verdict = "refused: " + "; ".join(self.objections) if self.objections else "passed"
        lines = [verdict, str(self.uncorrected), str(self.candidate)]
        lines += [] if self.bank.objection else [str(self.bank)]  # which is among the objections
        return "\n  ".join([*lines, *(f"note: {note}" for note in self.notes)])


def judge(
    targets: VectorLike,
    bank: BankLike,
    method: str = "blend",
    *,
    metric: Metric | str = "cosine",
    compute: Compute = Compute(),
    seed: int = 0,
    **parameters: Setting,
) -> Judgement:
    """Whether a correction would help, tried on held-out bank queries; arguments as in `hubplugin.fit`.

    There is an objection if the bank is of the wrong kind (see `BankProfile`). With pairs or clicks, if R@1 of held-out
    queries falls by more than two standard errors, or, with 200 of them, neither it nor the mean rank of their targets
    gets better. Of a log whose answers are known, also if R@1 of other wordings of what it asked for falls so much (see
    `Sides`). With another method than `blend`, if the bank is small, if it looks like a log and the method keeps its
    answers, or, without pairs or clicks, if hubness does not fall. Raises InputError for anything that cannot be used.
    """
    configuration = configured(METHODS, method, parameters, judge)
    prepared = Bank.of(bank).prepare(metric, compute).against(targets)
    with closing(Experiment(prepared, seed)) as experiment:
        return judge_by(experiment, [configuration])[0]


def judge_by(experiment: Experiment, configurations: Sequence[Method]) -> list[Judgement]:
    """`judge` for several configurations, by an experiment that others ask too."""
    uncorrected, *trials = experiment.run([None, *configurations])
    before, bank = uncorrected.candidate(uncorrected), experiment.profile
    judgements = []
    for trial in trials:
        after = trial.candidate(uncorrected)
        objections = [
            *([bank.objection] if bank.objection else []),
            *_objections_to_method(trial.method, before, after, bank),
            *_objections_to_recall(before, after, experiment.probes),
        ]
        sides = None
        if experiment.answered > 0.5 or (bank.kind == "log" and experiment.bank.known is None):
            sides = both_sides(experiment, trial.method.resolved(experiment.bank))
            objections += _objections_to_sides(sides)
        notes = [*small_bank(bank.distinct), *_notes(before, after, bank, sides, experiment.probes)]
        judgements.append(Judgement(after, before, bank, experiment.probes, objections, notes, sides))
    return judgements


def _notes(before: Candidate, after: Candidate, bank: BankProfile, sides: Sides | None, probes: int) -> list[str]:
    notes = [bank.doubt] if bank.doubt else []
    if not _measurable(before, after, sides):
        return [*notes, _not_measurable(before, after, probes)]
    notes += [_change_of_skewness(before, after)] if after.skewness > before.skewness else []
    return notes if sides is None else [*notes, *sides.sentences()]


def small_bank(distinct: int) -> list[str]:
    """What to expect of a bank of so few `distinct` queries; nothing of a larger one."""
    if distinct >= FEW:
        return []
    return [f"the bank has {distinct} distinct queries: below {FEW} expect little; collect 300 or more"]


def _measurable(before: Candidate, after: Candidate, sides: Sides | None) -> bool:
    changes = [(after.skewness - before.skewness, after.noise), (after.gain, after.error)]
    seen = any(change is not None and error is not None and abs(change) > 1.96 * error for change, error in changes)
    return seen or (sides is not None and bool(sides.sentences()))


def _not_measurable(before: Candidate, after: Candidate, probes: int) -> str:
    assert after.noise is not None
    found = [f"{_change_of_skewness(before, after)} (+- {1.96 * after.noise:.2f})"]
    if before.recall is not None and after.recall is not None and after.error is not None:
        found.append(f"R@1 {_change(100 * before.recall, 100 * after.recall)} (+- {196 * after.error:.1f})")
    return f"no effect can be measured with {probes} held-out queries: {', '.join(found)}"


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
    return [f"what was asked before is harmed: {sides.asked}"] if fall > 2 * sides.asked.error else []


def _objections_to_method(method: Method, before: Candidate, after: Candidate, bank: BankProfile) -> list[str]:
    """Of other methods than the default, which is made for banks of any size, with or without answers."""
    if isinstance(method, Blend):
        return []
    found = [_objection_to_size(method, bank.distinct, after.recall is not None)]
    if bank.kind == "log" and bank.answers_stand_out and method.answers == "kept":
        found.append(f"{bank}, and {method.name!r} would push down what it asks for; pass answers='left out'")
    if after.recall is None and after.skewness >= before.skewness:
        found.append(_change_of_skewness(before, after))
    return [objection for objection in found if objection]


def _objection_to_size(method: Method | None, distinct: int, paired: bool) -> str | None:
    """What there is to say against a fit of `method` on `distinct` bank queries; None: one that is still looked for."""
    smallest = SMALLEST_PAIRED if paired else SMALLEST
    if method is None or isinstance(method, Blend) or distinct >= smallest:
        return None
    return f"{method.name!r} needs {smallest} distinct queries, the bank has {distinct}"


def require_size(bank: PreparedBank, method: Method | None) -> None:
    """Raises CorrectionRefused for a bank that is too small, which is seen without the gallery. method: None where it
    is still looked for."""
    distinct = len(bank.distinct)
    with _too_small_is_refused():
        require_enough(distinct)
    objection = _objection_to_size(method, distinct, bank.known is not None)
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
USE_BLEND: Parts = ("use ", Parameter("method", "blend"), ", which is made for banks of any kind and size")


def _remedy(bank: BankProfile, method: str = "blend") -> Parts:
    if bank.kind == "documents":
        return (*COLLECT, ", pass ", Parameter("kind", "documents"), " if documents are to be asked by documents")
    if bank.kind == "swapped":
        return ("pass the queries as the bank and the documents that answer them as ", Parameter("answers"))
    return COLLECT if bank.objection or method == "blend" else USE_BLEND


def _ways_out(mend: Parts) -> Parts:
    """The end of a refusal: parts of its text."""
    return ("; nothing was changed: ", *mend, ", or apply it all the same with ", Parameter("force", True))


def _change_of_skewness(before: Candidate, after: Candidate) -> str:
    return f"hubness (skewness) goes {_change(before.skewness, after.skewness)}"


def _change(before: float, after: float) -> str:
    return f"from {before:.2f} to {after:.2f}"
