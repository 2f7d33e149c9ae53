"""The guard refuses a correction that would do harm, and says which kind of bank it sees.

It also looks at both sides of a log: at targets that were asked for before, and at those that were not.

Queries are held out and tried: for *asked*, single wordings of targets that the log asks for in others, too; for *not
asked*, all wordings of a target at once. What a query asks for is known from answers. Otherwise it is guessed:
queries that share a nearest target which stands out ask for it. They find it, so they show what is lost, and no gain.

Where each target has one wording, *stand-ins* take the place of others: bank queries whose nearest target stands out,
moved towards another bank query, drawn at random, until one in ten loses that target. Nearer to their bank query than
other wordings are, they show harm three to four times too large (docs/choosing.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hubplugin.bank import Bank, BankLike, BankProfile, PreparedBank
from hubplugin.bank.kinds import FARTHEST, displacement
from hubplugin.compute import MOST_ANSWERS, Compute, Similarities, dense, nearest_targets, torch
from hubplugin.errors import CorrectionRefused, Parameter
from hubplugin.learning import FEWEST_WORDINGS, folds_within
from hubplugin.measures.significance import Side
from hubplugin.methods import METHODS, FitInput, Method, configured
from hubplugin.methods.blend import Blend
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, Setting
from hubplugin.trial.experiment import (
    FOLDS,
    USE_BLEND,
    Experiment,
    Sides,
    Trial,
    change,
    remedy,
    require_enough,
    too_small_is_refused,
    ways_out,
    with_rows,
)
from hubplugin.vectors import VectorLike, Vectors, as_vectors, taken

FOUND = 0.9
"""Share of the stand-ins that find their target in the raw search. With fewer, all corrections look better than they
are; with more there is little left to win."""

ROWS = 2_048
"""Bank queries that are looked at."""

FEWEST = 100
"""Bank queries below which nothing is said."""

SHARED = 1 / 3
"""Share of the queries with a clear nearest target that have it in common with another, from which on these are taken
for wordings. Where each target has one wording, hubs alone are shared, by 0.14. In logs of several wordings it is 0.55
to 0.71 (benchmarks/both_sides.py)."""

STAND_INS = "stand-ins"


@dataclass(frozen=True)
class _Log:
    """Some distinct queries of the bank [m, d], and of its gallery a sample together with all answers [n, d].

    answer: [m], the place of each query's answer among the targets, or -1. clear: [m], whether the answer is known, or
    else stands out. sure: [m], whether the query finds its answer, by a clear margin.
    """

    fit_input: FitInput
    queries: np.ndarray
    gallery: Vectors
    answer: np.ndarray
    clear: np.ndarray
    sure: np.ndarray
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
    apart[log.clear] = folds_within(log.answer[log.clear], FOLDS)
    again, whole = apart >= 0, _offsets(log, method, np.ones(len(log.queries), bool))
    if again.sum() >= FEWEST_WORDINGS and (log.known or again.sum() >= SHARED * log.clear.sum()):
        what, scores, tried = "other wordings" if log.known else "guessed wordings", log.scores, again
        asked = _held_out(log, method, scores, again, apart, what)
    elif log.sure.sum() < FEWEST_WORDINGS // 2:
        return None  # nearly all of it finds one hub
    else:
        what, scores, tried = STAND_INS, _stand_ins(log, rng), log.sure
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
    sure = (answer >= 0) & (own >= first) & (first - second >= np.median(first - second)) & ~hubs[answer]
    clear = sure if known is None else answer >= 0
    return _Log(bank, queries, gallery, answer, clear, sure, scores, known is not None)


def _nearest_of(fit_input: FitInput, queries: np.ndarray) -> np.ndarray:
    """The nearest target of each of `queries` [m, d] in the whole gallery: [m, d]."""
    gallery = fit_input.require_targets("blend")
    _, nearest = nearest_targets(Similarities.of(queries, fit_input.metric, fit_input.compute), [gallery])
    rows, place = np.unique(nearest, return_inverse=True)
    found: np.ndarray = taken(gallery, rows, fit_input.metric)[place.reshape(-1)]
    return found


def _offsets(log: _Log, method: Method, seen: np.ndarray) -> np.ndarray:
    """Raw offsets [n] of a fit on the queries `seen` [m]."""
    return method.raw_offsets(
        FitInput(log.queries[seen], log.gallery, None, log.fit_input.metric, log.fit_input.compute.quiet)
    )


def _held_out(
    log: _Log, method: Method, scores: torch.Tensor, queries: np.ndarray, fold_of: np.ndarray, what: str
) -> Side:
    """The `queries` of each fold on a fit without it: bool [m]. fold_of: [m], -1 for what all fits see."""
    parts = []
    for fold in range(FOLDS):
        tried, seen = np.flatnonzero(queries & (fold_of == fold)), fold_of != fold
        if len(tried) and seen.any():
            parts.append((tried, _offsets(log, method, seen)))
    return _side(log, scores, parts, what)


def _side(log: _Log, scores: torch.Tensor, parts: list[tuple[np.ndarray, np.ndarray]], what: str) -> Side:
    """Of queries and the offsets that each is tried with."""
    before, after = [], []
    for queries, offsets in parts:
        part = scores[queries]
        before.append((part.argmax(dim=1).numpy() == log.answer[queries]).astype(float))
        after.append(((part + torch.from_numpy(offsets)).argmax(dim=1).numpy() == log.answer[queries]).astype(float))
    raw, corrected = np.concatenate(before), np.concatenate(after)
    return Side.of(raw, corrected, what)


def _stand_ins(log: _Log, rng: np.random.Generator) -> torch.Tensor:
    """The similarities [m, n]; queries that find their answers were moved so far that `FOUND` of them still do."""
    rows, scores = np.flatnonzero(log.sure), log.scores.clone()
    start = log.queries[rows]
    towards = log.queries[rng.integers(0, len(log.queries), len(rows))] - start
    lengths = np.linalg.norm(start, axis=1, keepdims=True)
    low, high = 0.0, 1.0
    for _ in range(10):
        step = (low + high) / 2
        moved = start + step * towards
        moved = (moved * lengths / np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-30)).astype(np.float32)
        scores[rows] = dense(Similarities(moved, log.fit_input.metric, log.fit_input.compute), log.gallery)
        found = scores[rows].argmax(dim=1).numpy() == log.answer[rows]
        low, high = (step, high) if found.mean() > FOUND else (low, step)
    return scores


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
    """Whether a correction would help, tried on held-out bank queries; arguments as in `hubplugin.fit`.

    `Trial.require_passed` raises CorrectionRefused where there is an objection, as `hubplugin.apply` does.

    There is an objection if the bank is of the wrong kind (see `BankProfile`). With known answers, if R@1 of held-out
    queries falls by more than two standard errors, or, with 200 of them, neither it nor the mean rank of their targets
    gets better. Of a log whose answers are known, also if R@1 of other wordings of what it asked for falls so much (see
    `Sides`). With another method than `blend`, if the bank is small, if it looks like a log and the method keeps its
    answers, or, without pairs or clicks, if hubness does not fall. Raises InputError for anything that cannot be used.
    """
    configuration = configured(METHODS, method, parameters, judge)
    prepared = Bank.of(bank).prepare(metric, compute).against(targets)
    return judge_by(Experiment(prepared, seed), [configuration])[0]


def judge_by(experiment: Experiment, configurations: Sequence[Method]) -> list[Trial]:
    """`judge` for several configurations on one experiment."""
    raw, *outcomes = experiment.run([None, *configurations])
    bank, trials = experiment.profile, []
    for method, outcome in zip(configurations, outcomes, strict=True):
        trial = outcome.trial(raw)
        objections = [
            *([bank.objection] if bank.objection else []),
            *_objections_to_method(method, trial, bank),
            *_objections_to_recall(trial),
        ]
        if experiment.answered > 0.5 or (bank.kind == "log" and experiment.bank.known is None):
            trial = replace(trial, sides=both_sides(experiment, method.resolved(experiment.bank)))
            objections += _objections_to_sides(trial.sides)
        notes = [*small_bank(bank.distinct), *_notes(trial, bank)]
        trials.append(replace(trial, bank=bank, objections=tuple(objections), notes=tuple(notes)))
    return trials


def _notes(trial: Trial, bank: BankProfile) -> list[str]:
    notes = [bank.doubt] if bank.doubt else []
    if not trial.measurable:
        return [*notes, trial.without_effect()]
    assert trial.raw is not None
    notes += [trial.change_of_skewness()] if trial.skewness > trial.raw.skewness else []
    return notes if trial.sides is None else [*notes, *trial.sides.sentences()]


def small_bank(distinct: int) -> list[str]:
    """What to expect of a bank of so few `distinct` queries; nothing of a larger one."""
    if distinct >= FEW:
        return []
    return [f"the bank has {distinct} distinct queries: below {FEW} expect little; collect 300 or more"]


def _objections_to_recall(trial: Trial) -> list[str]:
    """With known answers R@1 and the mean rank decide; of a few queries they say nothing."""
    raw = trial.raw
    if raw is None or raw.recall is None or trial.recall is None or trial.gain is None or trial.error is None:
        return []
    assert raw.rank is not None
    assert trial.rank is not None
    recall = f"R@1 of held-out bank queries goes {change(100 * raw.recall, 100 * trial.recall)}"
    if trial.gain < -2 * trial.error:
        return [recall]
    if trial.gain <= 0 and trial.rank >= raw.rank and trial.queries >= SMALLEST_PAIRED:
        return [f"{recall}, and the mean rank of their targets {change(raw.rank, trial.rank)}"]
    return []


def _objections_to_sides(sides: Sides | None) -> list[str]:
    """Where answers say what was asked for; a guess is reported and decides nothing."""
    if sides is None or not sides.known or sides.asked.what == STAND_INS:
        return []
    fall = sides.asked.before - sides.asked.after
    return [f"what was asked before is harmed: {sides.asked}"] if fall > 2 * sides.asked.error else []


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
        return judge_by(experiment, [configuration])[0].require_passed()
