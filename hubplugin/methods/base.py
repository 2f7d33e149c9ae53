"""What every method is: a checked configuration that turns banks and targets into the terms of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, TypeAlias, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict
from typing_extensions import Self

from hubplugin.compute import (
    Answers,
    Compute,
    Similarities,
    TopK,
    dense,
    find_answers,
    search,
)
from hubplugin.errors import InputError, Parameter
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, Setting, Term
from hubplugin.vectors import (
    Directed,
    VectorLike,
    Vectors,
    as_vectors,
    draw_sample,
    fingerprint,
    prepare,
)

AnswersRule: TypeAlias = Literal["auto", "kept", "left out"]
"""What becomes of the answers of bank queries, see `Method`."""

Configuration = TypeVar("Configuration", bound="Method")

SPREAD_SAMPLE = 4_096
"""Targets of which the spread of similarities is taken. On six sets (text and code, text and image, two languages, a
query log) these move it by at most 0.03 %, and which `SURVEYED` queries of the bank are drawn by at most 1.7 %. R@1 of
the default is the same as with all targets (benchmarks/settings.py)."""


SURVEYED = 512
"""Bank queries that the kind of a bank is judged by: the spacing ratio then has a standard error of about 0.05."""

SPACINGS = 10
"""Gaps between neighbours in a query's list that the spacing ratio reads: the first, and those it is compared with."""


def spacing_ratio(largest: np.ndarray) -> float:
    """How far the nearest target stands out: about 1 and below where answers are elsewhere, above 1 in a log.

    largest: the `SPACINGS` + 1 largest similarities of each query, the largest first: [m, k].

    With s_1 >= s_2 >= ... the similarities of one query, the gaps j (s_j - s_j+1) have one mean for all j if the upper
    end of their distribution is exponential (Renyi's representation of order statistics). It is less for small j if
    the end is shorter. The ratio is the mean of the first gap over the mean of the others, over all queries: it knows
    neither scale nor metric. An answer makes the first gap larger. 1 where there are fewer than 3 targets.

    Measured (benchmarks/settings.py): banks whose answers are elsewhere 0.60 to 0.95, logs 0.95 to 3.5, on text and
    code, text and images, and across languages.
    """
    gaps = -np.diff(largest, axis=1) * np.arange(1, largest.shape[1])
    if gaps.shape[1] < 2 or not gaps[:, 1:].mean() > 0:
        return 1.0
    return float(gaps[:, 0].mean() / gaps[:, 1:].mean())


@dataclass(frozen=True)
class Whole:
    """What was found in a gallery of which a fit has a sample: how many targets, how many zero vectors beside these;
    of the queries `FitInput.surveyed` the `SPACINGS` + 1 largest similarities, the largest first [q, k], and the number
    of the nearest target [q]; and the answers of the bank, where somebody asks."""

    count: int
    zeros: int
    largest: np.ndarray
    nearest: np.ndarray
    answers: Answers | None


@dataclass(frozen=True)
class FitInput:
    """Checked input of a fit. Banks are at unit length where the metric is cosine: [m, d] and [p, d]. whole: where
    `targets` are a sample of the gallery. directed: no target is taken to be a zero vector, for which a fit raises
    ZeroVector."""

    query_bank: np.ndarray
    targets: Vectors | None
    target_bank: np.ndarray | None
    metric: Metric
    compute: Compute
    whole: Whole | None = None
    directed: bool = False

    @classmethod
    def read(
        cls,
        query_bank: VectorLike,
        targets: VectorLike | None,
        target_bank: VectorLike | None,
        metric: Metric,
        compute: Compute,
    ) -> Self:
        """Reads and checks the input as a user gave it.

        Args:
            query_bank: [m, d].
            targets: the gallery [n, d], where it is known.
            target_bank: vectors of answers [p, d], where the method takes them.
            metric: the similarity.
            compute: device, memory and progress.

        Raises:
            InputError: the input cannot be used.
        """
        bank = Directed.load(as_vectors(query_bank, "query bank"), metric)
        gallery = None if targets is None else as_vectors(targets, "targets")
        second = None if target_bank is None else as_vectors(target_bank, "target bank")
        for other in (gallery, second):
            if other is not None:
                _require_one_model(bank.name, bank.dim, other)
        return cls(
            query_bank=prepare(bank, metric),
            targets=gallery,
            target_bank=None
            if second is None
            else prepare(Directed.load(second, metric), metric),
            metric=metric,
            compute=compute,
        )

    def against(self, targets: VectorLike) -> Self:
        """The same banks with another gallery, likewise checked."""
        gallery = as_vectors(targets, "targets")
        _require_one_model("query bank", self.query_bank.shape[1], gallery)
        return replace(self, targets=gallery)

    @cached_property
    def gallery(self) -> Vectors | None:
        """The targets that have a direction, where the metric asks for one: they are read for it once, and only if this
        is asked for."""
        return (
            self.targets
            if self.targets is None or self.directed
            else Directed.of(self.targets, self.metric)
        )

    @cached_property
    def same(self) -> np.ndarray:
        """The first of the bank's queries that is the same as each: int64 [m]."""
        first: dict[bytes, int] = {}
        rows = (
            row.tobytes() for row in self.query_bank + 0.0
        )  # which makes -0 the 0 that it equals
        return np.fromiter(
            (first.setdefault(row, number) for number, row in enumerate(rows)), np.int64
        )

    @cached_property
    def distinct(self) -> np.ndarray:
        """The rows of the bank's queries that are no copy of an earlier one, in order."""
        return np.unique(self.same)

    @cached_property
    def fingerprint(self) -> str:
        """Names both banks."""
        return fingerprint(self.query_bank, self.target_bank)

    @cached_property
    def target_bank_vectors(self) -> Vectors:
        """The target bank as columns beside the targets; one object, so that products with it can be held."""
        return as_vectors(self.require_target_bank("dbsn"), "target bank")

    @cached_property
    def surveyed(self) -> np.ndarray:
        """A sample of the bank: [q, d]."""
        return self.query_bank[
            np.sort(
                np.random.default_rng(0).permutation(len(self.query_bank))[:SURVEYED]
            )
        ]

    @cached_property
    def deviation(self) -> float:
        """The standard deviation of the similarities between bank and gallery, of a sample of both."""
        sample = draw_sample(
            self.require_targets("blend"),
            SPREAD_SAMPLE,
            self.metric,
            np.random.default_rng(0),
        )
        of_prepared = Metric.DOT if self.metric is Metric.COSINE else self.metric
        similarities = Similarities(
            self.surveyed, of_prepared, self.compute.without_progress
        )
        return float(dense(similarities, as_vectors(sample, "targets")).std())

    @cached_property
    def spacing_ratio(self) -> float:
        """Of a sample of the bank in the whole gallery."""
        if self.whole is not None:
            return spacing_ratio(self.whole.largest)
        return self._spacing_ratio(self.require_targets("blend"))

    def _spacing_ratio(self, targets: Vectors) -> float:
        nearest = TopK(SPACINGS + 1)
        search(
            self.surveyed,
            targets,
            self.metric,
            self.compute,
            nearest,
            label="looking at the bank",
        )
        return spacing_ratio(nearest.scores[0])

    @cached_property
    def answers_are_elsewhere(self) -> bool:
        """Whether the target bank holds the answers: whether the nearest target stands out more there than in the
        gallery. Without a target bank nothing says so, and answers are left out: on seventeen settings that costs the
        default 0.06 points of R@1 on average, while keeping them costs 3.3 on the worst log (benchmarks/settings.py).
        """
        if (
            self.target_bank is None or len(self.target_bank) <= SPACINGS
        ):  # too few have gaps to compare
            return False
        return self._spacing_ratio(self.target_bank_vectors) > self.spacing_ratio

    @cached_property
    def answers(self) -> Answers | None:
        """The answers of the bank in gallery and target bank."""
        if self.whole is not None:
            return self.whole.answers
        columns = [self.require_targets("blend")] + (
            [] if self.target_bank is None else [self.target_bank_vectors]
        )
        return find_answers(
            Similarities(self.query_bank, self.metric, self.compute), columns
        )

    def require_targets(self, method: str) -> Vectors:
        if self.gallery is None:
            raise InputError(
                f"method {method!r} is fitted against the gallery: pass ",
                Parameter("targets"),
            )
        return self.gallery

    def require_target_bank(self, method: str) -> np.ndarray:
        if self.target_bank is None:
            raise InputError(
                f"method {method!r} needs the vectors of answers in the bank: pass ",
                Parameter("answers"),
            )
        return self.target_bank


def _require_one_model(bank: str, dim: int, other: Vectors) -> None:
    if other.dim != dim:
        raise InputError(
            f"{bank} has {dim} dimensions, {other.name} has {other.dim}; embed both with the same model"
        )


_UNSAID = (("answers", "kept"), ("sample", "auto"))


@dataclass(frozen=True)
class Solution:
    """The terms of a model, and its raw offsets for the targets of the fit [n] where they came along the way."""

    terms: tuple[Term, ...]
    raw: np.ndarray | None = None


class Method(BaseModel, ABC):
    """Parameters of one method. Temperatures are in the units of the similarity.

    answers: "kept", as in the papers, whose banks hold queries that have no answer in the gallery. "left out", for a
    log of queries that were asked of this gallery: each query's nearest target, and each target's largest similarity,
    have no part in the sums (see `compute.AnswerMask`). "auto" leaves them out unless a target bank holds the answers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    answers: AnswersRule = "kept"

    @property
    def parameters(self) -> dict[str, Setting]:
        """By name, without those that are not set, and without `answers` where the method is the paper's."""
        return {
            key: value
            for key, value in self.model_dump(exclude_none=True).items()
            if (key, value) not in _UNSAID
        }

    def resolve(self: Configuration, fit_input: FitInput) -> Configuration:
        """This configuration with a value in the place of all that depends on the bank and the gallery."""
        parameters = self.resolve_parameters(fit_input)
        if self.answers == "auto":
            parameters["answers"] = (
                "kept" if fit_input.answers_are_elsewhere else "left out"
            )
        return self.model_copy(update=parameters) if parameters else self

    def resolve_parameters(self, fit_input: FitInput) -> dict[str, Setting | None]:
        """The parameters of a subclass that depend on bank and gallery, by name."""
        return {}

    def find_answers(self, fit_input: FitInput) -> Answers | None:
        """The answers that a resolved configuration hides from its sums; None where it hides nothing."""
        if self.answers != "left out":
            return None
        fit_input.require_targets(self.name)
        return fit_input.answers

    def require_banks(self, fit_input: FitInput) -> None:
        """Raises InputError where `fit_input` lacks a bank that the method needs; the targets may come later."""

    @abstractmethod
    def solve(self, fit_input: FitInput) -> Solution:
        """The terms whose sum at t is offset(t), up to a constant, and what else the way to them gives. Of a resolved
        configuration."""

    def model(self, fit_input: FitInput) -> OffsetModel:
        """The model of these parameters on `fit_input`, not centred."""
        return self._run(fit_input)[0]

    def raw_offsets(self, fit_input: FitInput) -> np.ndarray:
        """What these parameters, fitted on `fit_input`, give its targets, not centred: float64 [n]."""
        model, raw = self._run(fit_input)
        return (
            model.raw_offsets(fit_input.require_targets(self.name), fit_input.compute)
            if raw is None
            else raw
        )

    def fit(self, fit_input: FitInput) -> OffsetModel:
        """The model of these parameters on `fit_input`, centred on its targets where it has some."""
        model, raw = self._run(fit_input)
        if fit_input.gallery is None:
            return model
        if raw is None:
            raw = model.raw_offsets(fit_input.gallery, fit_input.compute)
        model = model.centre_by(raw, fit_input.gallery)
        return (
            model if fit_input.whole is None else model.of_sample(fit_input.whole.count)
        )

    def _run(self, fit_input: FitInput) -> tuple[OffsetModel, np.ndarray | None]:
        """The model, not centred, and its raw offsets for the targets [n] where they came along the way."""
        method = self.resolve(fit_input)
        solution = method.solve(fit_input)
        names = method.name, method.parameters, fit_input.metric
        return OffsetModel(*names, solution.terms, fit_input.fingerprint), solution.raw

    def has_made(self, model: OffsetModel, fit_input: FitInput) -> bool:
        """Whether `model` is what these parameters gave on the banks of `fit_input`, whatever the targets were."""
        origin = model.method, model.metric, model.bank_fingerprint
        parameters = {
            key: value
            for key, value in self.parameters.items()
            if (key, value) != ("answers", "auto")
        }
        same_parameters = model.parameters | parameters == model.parameters
        return (
            origin == (self.name, fit_input.metric, fit_input.fingerprint)
            and same_parameters
        )


class OnePassMethod(Method):
    """A method whose terms need nothing of the gallery but, where answers are left out, the answers."""

    @abstractmethod
    def terms(
        self, fit_input: FitInput, thresholds: np.ndarray | None
    ) -> tuple[Term, ...]:
        """The terms of the offsets on the banks of `fit_input`. `thresholds` [m] are those of `Answers`, where answers
        are left out."""

    def solve(self, fit_input: FitInput) -> Solution:
        answers = self.find_answers(fit_input)
        return Solution(
            self.terms(fit_input, None if answers is None else answers.thresholds)
        )
