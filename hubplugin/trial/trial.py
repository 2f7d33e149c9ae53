"""`Trial`: what the experiment on held-out queries gives for one candidate, and what there is to say against it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import Field

from hubplugin.bank import BankProfile
from hubplugin.errors import CorrectionRefused, InputError, Parameter
from hubplugin.methods import Method
from hubplugin.model import OffsetModel, Setting


@dataclass(frozen=True)
class Side:
    """R@1 of some `queries`, 0 to 1, before and after, and the standard error of the change; what the queries are."""

    before: float
    after: float
    error: float
    queries: Annotated[int, Field(serialization_alias="probes")]
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
            f"{100 * high:+.1f}, {self.queries} {self.what})"
        )


@dataclass(frozen=True)
class Sides:
    """asked: targets that the bank of the fit asks for. other: what it does not ask for. offset: mean offset of the
    bank's answers less that of the other targets, in units of the similarity; strongly negative where what was asked
    for is taken for a hub. known: whether answers say what the queries ask for."""

    asked: Side
    other: Side
    offset: float
    known: bool

    def sentences(self) -> list[str]:
        """What is seen beyond chance, a line each. Only known answers tell what was asked before."""
        guess = "" if self.known else ", by a guess"
        named = ((f"asked before{guess}", self.asked), (f"not asked before{guess}", self.other))
        return [f"{name}: {side}" for name, side in named if not side.is_noise]


@dataclass(frozen=True)
class Trial:
    """One candidate, tried on held-out queries of a bank.

    configuration: the method, a fitted model, or None for no correction. queries: how many were held out; 0 where
    nothing was tried, and there are no figures then. raw: the same of no correction; None of that itself.

    skewness: of the k-occurrence. cost: mean fall of the similarity of the first target, as a share of the mean
    distance between the two nearest. recall: R@1, 0 to 1; rank: geometric mean rank of the queries' own targets; both
    None without known answers. gain, error: of R@1 over no correction, and its standard error. largest, never: of the
    queries, the share that finds the worst hub, and of the targets tried, the share that none finds. noise: the
    standard error of the change of the skewness over no correction; None of several galleries together.

    Of the guard: bank, what kind it is; objections, if any; notes, what is no reason to refuse but worth knowing; sides
    of a log, what it asks for and what it does not; None of others.

    Of `method="auto"`: score, R@1 with a soft edge, by which is chosen; ahead, ahead_error, of the score over the
    default's, and its standard error; worst, the gain on the side of a log where it is less. reason: why this one was
    chosen, None of those that were not.
    """

    configuration: Method | OffsetModel | None
    queries: int
    raw: Trial | None = field(default=None, repr=False)
    skewness: float = math.nan
    cost: float = math.nan
    recall: float | None = None
    rank: float | None = None
    gain: float | None = None
    error: float | None = None
    largest: float | None = None
    never: float | None = None
    noise: float | None = None
    bank: BankProfile | None = None
    objections: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sides: Sides | None = None
    score: float | None = None
    ahead: float | None = None
    ahead_error: float | None = None
    worst: float | None = None
    reason: str | None = None

    @property
    def tried_method(self) -> Method:
        """The configuration, of a trial of a method."""
        assert isinstance(self.configuration, Method)
        return self.configuration

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
        """Whether the correction changes hubness, R@1 or a side of a log by more than chance."""
        changes = [(self.gain, self.error)]
        if self.raw is not None:
            changes.append((self.skewness - self.raw.skewness, self.noise))
        seen = any(change is not None and error is not None and abs(change) > 1.96 * error for change, error in changes)
        return seen or (self.sides is not None and bool(self.sides.sentences()))

    def figures(self) -> str:
        """In one line."""
        text = f"{self.name:34s} skewness {self.skewness:6.2f}  cost {self.cost:5.2f}"
        if self.recall is not None and self.gain is not None and self.error is not None:
            text += f"  R@1 {100 * self.recall:5.1f} ({100 * self.gain:+.1f} +- {196 * self.error:.1f})"
            text += f"  mean rank {self.rank:.2f}"
        return text

    def comparison(self) -> str:
        """Beside the default, in one line, as far as they were compared."""
        if self.recall is None or self.score is None or self.ahead is None or self.ahead_error is None:
            return self.name
        return (
            f"{self.name}: R@1 {100 * self.recall:.1f}, with a soft edge {100 * self.score:.1f} "
            f"({100 * self.ahead:+.1f} +- {196 * self.ahead_error:.1f} beside the default)"
        )

    def __str__(self) -> str:
        if self.bank is None:
            return self.figures() if self.score is None else self.comparison()
        verdict = "refused: " + "; ".join(self.objections) if self.objections else "passed"
        lines = [verdict, *([] if self.raw is None else [self.raw.figures()]), self.figures()]
        lines += [] if self.bank.objection else [str(self.bank)]  # which is among the objections
        return "\n  ".join([*lines, *(f"note: {note}" for note in self.notes)])

    def require_passed(self) -> Trial:
        """This trial; raises CorrectionRefused, with the numbers and what to do, where there is an objection."""
        if self.objections:
            raise CorrectionRefused(
                f"{self.name} would not help: {'; '.join(self.objections)}", *ways_out(remedy(self.bank, self.method))
            )
        return self


def _short(value: Setting) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def standard_error(differences: np.ndarray) -> float:
    return float(differences.std(ddof=1) / math.sqrt(len(differences)))


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
        return (*COLLECT, ", pass ", Parameter("kind", "documents"), " if documents are to be asked by documents")
    if bank is not None and bank.kind == "swapped":
        return ("pass the queries as the bank and the documents that answer them as ", Parameter("answers"))
    return COLLECT if method == "blend" or (bank is not None and bank.objection) else USE_BLEND


def ways_out(mend: Parts) -> Parts:
    """The end of a refusal: parts of its text."""
    return ("; nothing was changed: ", *mend, ", or apply it all the same with ", Parameter("force", True))
