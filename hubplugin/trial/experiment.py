"""The experiment by which a correction passes or is refused, and what a configuration does in it, as values.

The bank is split into folds; what a fold leaves is fitted, and the fold's own queries are held out to try it. Where
answers are known, R@1 can be measured, on a gallery that holds the targets of held-out queries too. Without, only the
hubness of what these find can be.

It sees at most `FIT_ROWS` of the bank, twice as many targets and `HELD_OUT` queries a fold, drawn at random, so that it
costs the same whatever the size of the gallery.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from hubplugin.bank import BankProfile, PreparedBank, profile
from hubplugin.compute import Similarities, dense, largest
from hubplugin.errors import CorrectionRefused, InputError, Parameter
from hubplugin.learning import Learning, folds_within
from hubplugin.measures.hubness import Hubness, k_occurrence, skewness
from hubplugin.measures.significance import Figure, Side, paired, standard_error
from hubplugin.methods import FitInput, Method
from hubplugin.model import OffsetModel, QueryMap, Setting
from hubplugin.vectors import as_vectors, sampled, taken


@dataclass(frozen=True)
class Trial:
    """One candidate, tried on held-out queries of a bank.

    configuration: the method, a fitted model, or None for no correction. queries: how many were held out. raw: the
    same of no correction; None of that itself.

    skewness: of the k-occurrence. cost: mean fall of the similarity of the first target, as a share of the mean
    distance between the two nearest. recall: R@1, 0 to 1; rank: geometric mean rank of the queries' own targets; both
    None without known answers. gain, error: of R@1 over no correction, and its standard error; change: the gain
    with its interval. largest, never: of the queries, the share that finds the worst hub, and of the targets tried, the
    share that none finds. noise: the
    standard error of the change of the skewness over no correction; None of several galleries together.

    Of the guard: bank, what kind it is; objections, if any; notes, what is no reason to refuse but worth knowing;
    asked, R@1 of other wordings of what a log asks for, None where its answers are not known, or few are asked again.
    """

    configuration: Method | OffsetModel | None
    queries: int
    skewness: float
    cost: float
    largest: float
    never: float
    raw: Trial | None = field(default=None, repr=False)
    recall: float | None = None
    rank: float | None = None
    gain: float | None = None
    error: float | None = None
    change: Figure | None = None
    noise: float | None = None
    bank: BankProfile | None = None
    objections: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    asked: Side | None = None

    @property
    def method(self) -> str:
        tried = self.configuration
        return "none" if tried is None else tried.name if isinstance(tried, Method) else tried.method

    @property
    def parameters(self) -> dict[str, Setting]:
        return {} if self.configuration is None else self.configuration.parameters

    @property
    def name(self) -> str:
        """The method with its parameters."""
        settings = (f"{key}={_short(value)}" for key, value in self.parameters.items())
        return f"{self.method}({', '.join(settings)})"

    @property
    def measurable(self) -> bool:
        """Whether the correction changes hubness, or R@1 of either kind, by more than chance."""
        changes = (self.change, None if self.asked is None else self.asked.change)
        return bool(self.hubness) or any(each is not None and each.sign for each in changes)

    @property
    def hubness(self) -> int:
        """1 where hubness rises beyond chance, -1 where it falls, else 0."""
        if self.raw is None or self.noise is None:
            return 0
        rise = self.skewness - self.raw.skewness
        return 0 if abs(rise) <= 1.96 * self.noise else 1 if rise > 0 else -1

    @property
    def helps(self) -> bool | None:
        """Whether nothing is objected and more right answers come first, beyond chance; None without known answers."""
        return False if self.objections else None if self.change is None else self.change.sign > 0

    def outlook(self) -> str:
        """In words that follow "it would"."""
        if self.objections:
            return f"be refused: {'; '.join(self.objections)}"
        if not self.measurable:
            return "be applied, and no effect can be measured"
        hubness = {1: "raise hubness", 0: "leave hubness as it is", -1: "lower hubness"}[self.hubness]
        if self.change is None:
            return f"{hubness}; whether it would help is not known without answers (--answers)"
        helps = {1: "help", 0: "neither help nor harm beyond chance", -1: "do harm"}[self.change.sign]
        return f"{helps}, and {hubness}"

    def change_of_skewness(self) -> str:
        """With its 95 % interval, of held-out queries that are drawn anew."""
        assert self.raw is not None
        told = f"hubness (skewness) goes {change(self.raw.skewness, self.skewness)}"
        if self.noise is None:
            return told
        low, high = (self.skewness - self.raw.skewness + side * 1.96 * self.noise for side in (-1, 1))
        return f"{told} on {self.queries:,} held-out queries (a change of {low:+.2f} to {high:+.2f})"

    def without_effect(self) -> str:
        """That no effect is measurable, with the figures."""
        told = [self.change_of_skewness()]
        if self.raw is not None and self.raw.recall is not None and self.recall is not None and self.error is not None:
            told.append(f"R@1 {change(100 * self.raw.recall, 100 * self.recall)} (+- {196 * self.error:.1f})")
        return f"no effect can be measured: {', '.join(told)}"

    def figures(self) -> str:
        """In one line."""
        text = f"{self.name:34s} skewness {self.skewness:6.2f}  cost {self.cost:5.2f}"
        if self.recall is not None and self.gain is not None and self.error is not None:
            text += f"  R@1 {100 * self.recall:5.1f} ({100 * self.gain:+.1f} +- {196 * self.error:.1f})"
            text += f"  mean rank {self.rank:.2f}"
        return text

    def __str__(self) -> str:
        if self.bank is None:
            return self.figures()
        verdict = "refused: " + "; ".join(self.objections) if self.objections else "passed"
        lines = [verdict, *([] if self.raw is None else [self.raw.figures()]), self.figures()]
        lines += [] if self.bank.objection else [str(self.bank)]  # which is among the objections
        return "\n  ".join([*lines, *(f"note: {note}" for note in self.notes)])

    def require_passed(self) -> Trial:
        """This trial; raises CorrectionRefused, with the numbers and what to do, where there is an objection."""
        if self.objections:
            raise CorrectionRefused(
                f"{self.name} is refused: {'; '.join(self.objections)}", *ways_out(remedy(self.bank, self.method))
            )
        return self


def change(before: float, after: float) -> str:
    return f"from {before:.2f} to {after:.2f}"


def _short(value: Setting) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


FOLDS = 5
"""Each fit keeps 4/5 of the bank, so that what is best for it is best for the whole."""


class TooSmall(InputError):
    """A bank of which nothing can be held out."""


def require_enough(distinct: int) -> None:
    """Raises TooSmall where of so many bank queries none can be held out."""
    if distinct < 2 * FOLDS:
        raise TooSmall(
            f"query bank has {distinct} distinct queries; holding some of them out needs at least {2 * FOLDS}, so that "
            f"each of {FOLDS} folds has 2 of them"
        )


@contextmanager
def too_small_is_refused() -> Iterator[None]:
    """Raises CorrectionRefused where a bank is `TooSmall`."""
    try:
        yield
    except TooSmall as error:
        raise CorrectionRefused(*error.args, *ways_out(COLLECT)) from None


Parts = tuple[str | Parameter, ...]
COLLECT: Parts = ("collect queries that people ask of this very gallery",)
USE_BLEND: Parts = ("use ", Parameter("method", "blend"), ", which is made for banks of any kind and size")


def remedy(bank: BankProfile | None, method: str = "blend") -> Parts:
    """What to do about an objection to a fit of `method` on `bank`."""
    if bank is not None and bank.kind == "documents":
        return (*COLLECT, ", pass ", Parameter("answers"), " if documents are to be asked by documents")
    if bank is not None and bank.kind == "swapped":
        return ("pass the queries as the bank and the documents that answer them as ", Parameter("answers"))
    return COLLECT if method == "blend" or (bank is not None and bank.objection) else USE_BLEND


def ways_out(mend: Parts) -> Parts:
    """The end of a refusal: parts of its text."""
    return ("; nothing was changed: ", *mend, ", or apply it all the same with ", Parameter("force", True))


OCCURRENCE = 10
"""Hubness is the skewness of the 10-occurrence, as in DBSN and QB-Norm."""


RESAMPLES = 100
"""Of the bootstrap of a skewness: its standard error comes out to 7 %."""


@dataclass(frozen=True)
class Outcome:
    """What one configuration, or model (None: no correction), did over all folds. costs [queries]; hits, log_ranks
    [queries] or None. nearest: the rows that each query found [queries, k], which `occurrence` [n] counts; None of
    several galleries together."""

    configuration: Method | OffsetModel | None
    occurrence: np.ndarray
    costs: np.ndarray
    gap: float
    hits: np.ndarray | None
    log_ranks: np.ndarray | None
    nearest: np.ndarray | None = None

    def trial(self, raw: Outcome) -> Trial:
        """These figures, beside those of no correction. The standard error of the change of the skewness is that of a
        bootstrap of the queries, which are the same ones."""
        noise = None if self.nearest is None or raw.nearest is None else 0.0
        if self is not raw and self.nearest is not None and raw.nearest is not None:
            rng, n, changes = np.random.default_rng(0), len(self.occurrence), list[float]()
            for _ in range(RESAMPLES):
                rows = rng.integers(0, len(self.nearest), len(self.nearest))
                after, before = (skewness(k_occurrence(each[rows], n)) for each in (self.nearest, raw.nearest))
                changes.append(after - before)
            noise = float(np.std(changes))
        known: dict[str, Any] = {}
        if self.hits is not None and self.log_ranks is not None and raw.hits is not None:
            difference = self.hits - raw.hits
            known = {
                "recall": float(self.hits.mean()),
                "rank": float(np.exp(self.log_ranks.mean())),
                "gain": float(difference.mean()),
                "error": standard_error(difference),
                "change": paired(raw.hits, self.hits).difference,
            }
        hubness = Hubness.of(self.occurrence, OCCURRENCE)
        return Trial(
            self.configuration,
            len(self.costs),
            skewness=hubness.skewness,
            cost=float(self.costs.mean()) / self.gap,
            largest=hubness.largest / len(self.costs),
            never=hubness.anti_hub_share,
            raw=None if self is raw else raw.trial(raw),
            noise=noise,
            **known,
        )


HELD_OUT = 500
"""Queries held out a fold: 2,500 in all tell corrections that differ for 3 % of them to 0.35 points of R@1."""

FIT_ROWS = 2_048
"""Bank rows of one fit: a trial costs the same with banks and galleries of any size."""


Tried: TypeAlias = Method | Learning | OffsetModel | None
"""What an experiment tries: None is no correction."""


@dataclass(frozen=True)
class Fold:
    """Fitted on `fit_input`, whose targets are the gallery's and then those that held-out queries ask for and it lacks.
    fitted: the rows of its bank. queries [p, d] are held out; similarities [p, ...] of these to the targets; own [p],
    the column of each one's target, or None."""

    fit_input: FitInput
    fitted: np.ndarray
    queries: np.ndarray
    similarities: np.ndarray
    own: np.ndarray | None


@dataclass(frozen=True)
class Split:
    """The distinct bank queries `rows` [m] in random order, and the fold that holds each of them out, -1 for none."""

    rows: np.ndarray
    fold_of: np.ndarray

    def held_out(self, fold: int) -> np.ndarray:
        found: np.ndarray = self.rows[self.fold_of == fold][:HELD_OUT]
        return found

    def fitted(self, fold: int, count: int) -> np.ndarray:
        """At most `count` of the rows that this fold does not hold out, ascending."""
        rest = np.sort(self.rows[self.fold_of != fold])
        return np.sort(rest[np.random.default_rng(fold).permutation(len(rest))[:count]])


class Experiment:
    """Of a bank and its gallery. Nothing is computed until it is asked for; what is asked for then raises InputError
    for banks of which nothing can be held out.

    By default all wordings of a target are held out together. again: of a log whose answers are known, hold out single
    wordings of targets that are asked for in others, too, so that what is held out was asked before. tried: whether
    each query may be held out, bool [m]; then each for itself, and what it asks for stays asked for.
    """

    def __init__(self, bank: PreparedBank, seed: int = 0, *, again: bool = False, tried: np.ndarray | None = None):
        if seed < 0:
            raise InputError(Parameter("seed", seed), ": expected 0 or more")
        self.bank, self.seed, self._again, self._only = bank, seed, again, tried
        # Held at one time: fit x (targets + target bank), target bank x targets, and a Sinkhorn fit's exponentials.
        self._fit_rows = min(FIT_ROWS, max(math.isqrt(self.bank.compute.bytes() // 32), 2 * FOLDS))

    @property
    def distinct(self) -> int:
        return len(self.bank.distinct)

    @cached_property
    def split(self) -> Split:
        # A text that is there twice would try the fit that saw it.
        distinct, known = self.bank.distinct, self.bank.known
        require_enough(len(distinct))
        rng = np.random.default_rng(self.seed)
        if known is None:
            order = rng.permutation(len(distinct))
            return Split(distinct[order], np.arange(len(distinct)) % FOLDS)
        if self._only is not None:
            order = rng.permutation(distinct)
            kept = self._only[order] & (known[order] >= 0)
            return Split(order, np.where(kept, np.cumsum(kept) % FOLDS, -1))
        # Queries of one target stay together: they would give it away to each other.
        answered = distinct[known[distinct] >= 0]
        groups = np.unique(known[answered], return_inverse=True)[1].reshape(-1)
        count = int(groups.max()) + 1 if len(groups) else 0
        if count < 2 * FOLDS:
            raise InputError(f"answers name {count} targets; holding some of them out needs at least {2 * FOLDS}")
        place = np.argsort(rng.permutation(count))[groups]
        rows, fold_of = answered[np.argsort(place, kind="stable")], np.sort(place) % FOLDS
        if self._again:  # of as many as one fit has, or a fold might not see the other wordings
            rows = rows[: self._fit_rows]
            return Split(rows, folds_within(known[rows], FOLDS))
        others = np.setdiff1d(distinct, answered)
        return Split(np.concatenate([rows, others]), np.concatenate([fold_of, np.full(len(others), -1)]))

    @cached_property
    def targets(self) -> np.ndarray:
        """A sample of the gallery: [n, d]."""
        gallery = self.bank.targets or self.bank.require_targets("blend")  # of which the sample alone is read
        if gallery.rows < 2:
            raise InputError(f"{gallery.name} has one row; hubness needs at least 2 targets")
        return sampled(gallery, 2 * self._fit_rows, self.bank.metric, np.random.default_rng([self.seed, 1]))

    def answers(self, rows: np.ndarray) -> np.ndarray:
        """The targets that bank queries `rows` [p], all of which are known, ask for: [p, d]."""
        if self.bank.pairs is not None:
            own: np.ndarray = self.bank.require_target_bank("blend")[self.bank.pairs[rows]]
            return own
        assert self.bank.clicks is not None
        clicked, place = np.unique(self.bank.clicks[rows], return_inverse=True)
        vectors = taken(self.bank.require_targets("blend"), clicked, self.bank.metric)
        return vectors[place.reshape(-1)]

    @cached_property
    def profile(self) -> BankProfile:
        """What kind of bank it is. Pairs and clicks tell what each query asks for, so documents may ask by them."""
        queries = self.bank.query_bank[self.split.rows[: 2 * self._fit_rows]]
        known = self.bank.known is not None
        return profile(self.bank, queries, self.targets, known, self.answered > 0.5, self.seed)

    def _fold(self, number: int) -> Fold:
        bank = self.bank
        held_out, fitted = self.split.held_out(number), self.split.fitted(number, self._fit_rows)
        targets, second, own = self.targets, bank.target_bank, None
        if bank.known is not None:
            targets, own = with_rows(targets, self.answers(held_out))
        if second is not None and bank.pairs is not None:
            second = second[np.unique(bank.pairs[fitted])]
        elif second is not None:
            second = second[np.random.default_rng(number).permutation(len(second))[: self._fit_rows]]
        compute = bank.compute.quiet
        vectors = as_vectors(targets, "targets")
        return Fold(
            FitInput(bank.query_bank[fitted], vectors, second, bank.metric, compute),
            fitted,
            bank.query_bank[held_out],
            dense(Similarities(bank.query_bank[held_out], bank.metric, compute), vectors),
            own,
        )

    def run(self, configurations: Sequence[Tried]) -> list[Outcome]:
        """Each configuration over all folds; the folds are the outer loop, so that each is multiplied once. A model
        is tried as it is; where it maps queries, or a fold learns to, those held out are mapped."""
        n, total = len(self.targets), FOLDS * len(configurations)
        found: list[list[tuple[np.ndarray, ...]]] = [[] for _ in configurations]
        gaps = []
        for number in range(FOLDS):
            fold = self._fold(number)
            nearest = largest(fold.similarities[:, :n], min(2, n))[0]
            gaps.append(float((nearest[:, 0] - nearest[:, -1]).mean()))
            for place, configuration in enumerate(configurations):
                found[place].append(self._tried(fold, configuration, nearest[:, 0]))
                self.bank.compute.report("trying candidates", number * len(configurations) + place + 1, total)
        gap = max(float(np.mean(gaps)), 1e-12)
        outcomes = []
        for configuration, parts in zip(configurations, found, strict=True):
            rows, costs, *paired = (np.concatenate(column) for column in zip(*parts, strict=True))
            hits, log_ranks = paired or (None, None)
            method = configuration.method if isinstance(configuration, Learning) else configuration
            outcomes.append(Outcome(method, k_occurrence(rows, n), costs, gap, hits, log_ranks, rows))
        return outcomes

    def _tried(self, fold: Fold, configuration: Tried, nearest: np.ndarray) -> tuple[np.ndarray, ...]:
        """The nearest targets [p, k], costs [p] and, with answers, hits and log ranks [p] of one fold's queries."""
        n, scores = len(self.targets), fold.similarities
        if configuration is not None:
            offsets, query_map = self._fitted(configuration, fold)
            if query_map is not None:
                asked = Similarities(query_map(fold.queries), self.bank.metric, fold.fit_input.compute)
                scores = dense(asked, fold.fit_input.require_targets("blend"))
            scores = scores + offsets
        found = largest(scores[:, :n], min(OCCURRENCE, max(n // 4, 1)))[1]
        costs = nearest - np.take_along_axis(fold.similarities, found[:, :1], axis=1)[:, 0]
        if fold.own is None:
            return found, costs
        own = np.take_along_axis(scores, fold.own[:, None], axis=1)
        greater, equal = (scores > own).sum(axis=1), (scores == own).sum(axis=1)
        hits = (greater == 0) / equal
        ranks = greater + (equal + 1) / 2  # the expected rank among equals
        return found, costs, hits, np.log(ranks)

    @property
    def answered(self) -> float:
        """Share of the bank queries whose own target is in the gallery, seen on its sample: 1 with clicks, 0 where
        nothing says."""
        if self.bank.pairs is None:
            return 0.0 if self.bank.clicks is None else 1.0
        _, columns = with_rows(self.targets, self.answers(self.split.rows))
        share = float((columns < len(self.targets)).mean())
        return min(share * self.bank.require_targets("blend").rows / len(self.targets), 1.0)

    def _fitted(self, configuration: Method | Learning | OffsetModel, fold: Fold) -> tuple[np.ndarray, QueryMap | None]:
        """Offsets [n] of the targets of a fold, and what maps its queries. A model is tried as it is; all else is
        fitted on what the fold does not hold out."""
        given = fold.fit_input
        if isinstance(configuration, Method):
            return configuration.raw_offsets(given), None
        if isinstance(configuration, Learning):
            query_map = self._learned(configuration, fold)
            if query_map is None:
                return configuration.method.raw_offsets(given), None
            configuration = configuration.fit(given, query_map)
        targets = given.require_targets(configuration.method)
        return configuration.raw_offsets(targets, given.compute), configuration.query_map

    def _learned(self, configuration: Learning, fold: Fold) -> QueryMap | None:
        """What the known answers that a fold does not hold out teach."""
        assert self.bank.known is not None
        rows = fold.fitted[self.bank.known[fold.fitted] >= 0]
        _, first, own = np.unique(self.bank.known[rows], return_index=True, return_inverse=True)
        return configuration.query_map(self.bank.query_bank[rows], own.reshape(-1), self.answers(rows[first]))


def with_rows(targets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`targets` [n, d] with those of `rows` [p, d] that are not among them, once each; and the place of each: [p]."""
    places = {row.tobytes(): place for place, row in enumerate(targets)}
    known = len(places)
    columns = np.array([places.setdefault(row.tobytes(), len(targets) + len(places) - known) for row in rows])
    new = np.unique(columns, return_index=True)[1][np.unique(columns) >= len(targets)]
    return np.concatenate([targets, rows[new]]), columns
