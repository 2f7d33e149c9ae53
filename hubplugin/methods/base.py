"""`Method`: a checked configuration that turns a bank and targets into a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict
from typing_extensions import Self

from hubplugin.bank import PreparedBank
from hubplugin.model import OffsetModel, Setting, Term

AnswersRule: TypeAlias = Literal["auto", "kept", "left out"]
"""What a fit does with the answers of bank queries, see `Method`."""

_AS_PUBLISHED = (("answers", "kept"), ("sample", "auto"))
"""Values that `Method.parameters` leaves out."""


@dataclass(frozen=True)
class Solution:
    """The terms of a model.

    raw: The raw offsets of the targets of the fit [n], if `solve` computed them.
    topk_means: The mean of the k largest similarities of each target [n], if `solve`
        computed it.
    """

    terms: tuple[Term, ...]
    raw: np.ndarray | None = None
    topk_means: np.ndarray | None = None


class Method(BaseModel, ABC):
    """The parameters of a method. Temperatures are in the units of the similarity.

    answers: "kept", as in the papers, whose banks hold queries without an answer in the
        gallery. "left out", for a log of queries that people asked of this gallery: the
        sums leave out each query's nearest target, and each target's largest similarity
        (see `compute.similarities`). "auto" leaves them out unless a target bank holds
        the answers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    answers: AnswersRule = "kept"

    @property
    def parameters(self) -> dict[str, Setting]:
        """The parameters that are set, except those in `_AS_PUBLISHED`."""
        return {
            key: value
            for key, value in self.model_dump(exclude_none=True).items()
            if (key, value) not in _AS_PUBLISHED
        }

    def resolve(self, bank: PreparedBank) -> Self:
        """Return this method with all parameters that depend on bank and gallery."""
        parameters = self.resolve_parameters(bank)
        if self.answers == "auto":
            parameters["answers"] = "left out"
            if bank.answers_are_elsewhere:
                parameters["answers"] = "kept"
        return self.model_copy(update=parameters)

    def resolve_parameters(self, bank: PreparedBank) -> dict[str, Setting | None]:
        """Return the subclass's parameters that depend on the bank and the gallery."""
        return {}

    def require_banks(self, bank: PreparedBank) -> None:
        """Raise InputError if `bank` lacks anything needed besides the targets."""

    def thresholds(self, bank: PreparedBank) -> np.ndarray | None:
        """Return the thresholds of the answers to leave out [m], or None."""
        if self.answers != "left out" or bank.answers is None:
            return None
        return bank.answers.thresholds

    @abstractmethod
    def solve(self, bank: PreparedBank) -> Solution:
        """Return the terms whose sum at t is offset(t), up to a constant.

        The method must be resolved.
        """

    def raw_offsets(self, bank: PreparedBank) -> np.ndarray:
        """Return the offsets of the targets before centring: float64 [n]."""
        model, raw = self.run(bank)
        if raw is None:
            raw = model.raw_offsets(bank.require_targets(), bank.compute)
        return raw

    def fit(self, bank: PreparedBank) -> OffsetModel:
        """Fit the model, and centre it on the targets if there are any."""
        model, raw = self.run(bank)
        if bank.targets is None:
            return model
        if raw is None:
            raw = model.raw_offsets(bank.targets, bank.compute)
        model = model.centre_by(raw, bank.targets)
        if bank.whole is None or model.gallery is None:
            return model
        # The targets are a sample of the gallery, so `fitted` would lack most offsets.
        gallery = replace(model.gallery, count=bank.whole.count)
        return replace(model, gallery=gallery, fitted=None)

    def run(self, bank: PreparedBank) -> tuple[OffsetModel, np.ndarray | None]:
        """Return the model before centring, and its raw offsets [n] if computed."""
        method = self.resolve(bank)
        with ThreadPoolExecutor(1) as thread:  # hashing is slow and releases the GIL
            fingerprint = thread.submit(lambda: bank.fingerprint)
            solution = method.solve(bank)
        model = OffsetModel(
            method.name,
            method.parameters,
            bank.metric,
            solution.terms,
            fingerprint.result(),
        )
        return model, solution.raw

    def has_made(self, model: OffsetModel, bank: PreparedBank) -> bool:
        """Return True if these parameters made `model` from `bank` and any targets."""
        required = self.parameters
        if required.get("answers") == "auto":
            del required["answers"]  # the model may have either rule
        same_banks = model.bank_fingerprint == bank.fingerprint
        same_method = (model.method, model.metric) == (self.name, bank.metric)
        same_parameters = required.items() <= model.parameters.items()
        return same_banks and same_method and same_parameters
