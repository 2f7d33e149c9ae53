"""What every method is: a checked configuration that turns banks and targets into the terms of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from hubplugin.errors import InputError, Parameter
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, Term
from hubplugin.reductions import Compute, prepared
from hubplugin.vectors import VectorLike, Vectors, as_vectors, fingerprint


@dataclass(frozen=True)
class FitInput:
    """Checked input of a fit. Banks are at unit length where the metric is cosine: [m, d] and [p, d]."""

    query_bank: np.ndarray
    targets: Vectors | None
    target_bank: np.ndarray | None
    metric: Metric
    compute: Compute

    @classmethod
    def read(
        cls,
        query_bank: VectorLike,
        targets: VectorLike | None,
        target_bank: VectorLike | None,
        metric: Metric,
        compute: Compute,
    ) -> FitInput:
        """The input as a user gave it, checked; raises InputError where it cannot be used."""
        bank = as_vectors(query_bank, "query bank")
        gallery = None if targets is None else as_vectors(targets, "targets")
        second = None if target_bank is None else as_vectors(target_bank, "target bank")
        for other in (gallery, second):
            if other is not None and other.dim != bank.dim:
                raise InputError(
                    f"{bank.name} has {bank.dim} dimensions, {other.name} has {other.dim}; "
                    "embed both with the same model"
                )
        return cls(
            query_bank=prepared(bank, metric),
            targets=gallery,
            target_bank=None if second is None else prepared(second, metric),
            metric=metric,
            compute=compute,
        )

    @cached_property
    def fingerprint(self) -> str:
        """Names both banks."""
        return fingerprint(self.query_bank, self.target_bank)

    @cached_property
    def target_bank_vectors(self) -> Vectors:
        """The target bank as columns beside the targets; one object, so that products with it can be held."""
        return as_vectors(self.require_target_bank("dbsn"), "target bank")

    def require_targets(self, method: str) -> Vectors:
        if self.targets is None:
            raise InputError(f"method {method!r} is fitted against the gallery: pass ", Parameter("targets"))
        return self.targets

    def require_target_bank(self, method: str) -> np.ndarray:
        if self.target_bank is None:
            raise InputError(f"method {method!r} needs a second bank: pass ", Parameter("target_bank"))
        return self.target_bank


@dataclass(frozen=True)
class Solution:
    """The terms of a model, and its raw offsets for the targets of the fit [n] where they came along the way."""

    terms: tuple[Term, ...]
    raw: np.ndarray | None = None


class Method(BaseModel, ABC):
    """Parameters of one method. Temperatures are in the units of the similarity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]

    @property
    def parameters(self) -> dict[str, Any]:
        """By name, without those that are not set."""
        return self.model_dump(exclude_none=True)

    def require_banks(self, given: FitInput) -> None:
        """Raises InputError where `given` lacks a bank that the method needs; the targets may come later."""

    @abstractmethod
    def terms(self, given: FitInput) -> tuple[Term, ...]:
        """The terms whose sum at t is offset(t), up to a constant."""

    def solve(self, given: FitInput) -> Solution:
        """`terms`, with what else the way to them gives."""
        return Solution(self.terms(given))

    def model(self, given: FitInput) -> OffsetModel:
        """The model of these parameters on `given`, not centred."""
        return self._model(given, self.terms(given))

    def _model(self, given: FitInput, terms: tuple[Term, ...]) -> OffsetModel:
        return OffsetModel(
            method=self.name,
            parameters=self.parameters,
            metric=given.metric,
            terms=terms,
            bank_fingerprint=given.fingerprint,
        )

    def made(self, model: OffsetModel, given: FitInput) -> bool:
        """Whether `model` is what these parameters gave on the banks of `given`, whatever the targets were."""
        return (model.method, model.parameters, model.metric, model.bank_fingerprint) == (
            self.name,
            self.parameters,
            given.metric,
            given.fingerprint,
        )

    def fit(self, given: FitInput) -> OffsetModel:
        """The model of these parameters on `given`, centred on its targets where it has some."""
        solution = self.solve(given)
        model = self._model(given, solution.terms)
        if given.targets is None:
            return model
        raw = model.raw_offsets(given.targets, given.compute) if solution.raw is None else solution.raw
        return model.centred_by(raw)
