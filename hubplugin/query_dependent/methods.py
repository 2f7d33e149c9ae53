"""The configurations of query-dependent corrections, one class a method, and `fit_rule`, which fits one by its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from hubplugin.methods import FitInput, configured
from hubplugin.methods.inverted_softmax import DualInvertedSoftmax, InvertedSoftmax
from hubplugin.metric import Metric
from hubplugin.model import Setting
from hubplugin.query_dependent.rules import DualDynamic, DualSoftmax, Dynamic, GloballyCorrected, Rule
from hubplugin.reductions import Compute, Similarities
from hubplugin.vectors import Progress, VectorLike


class QueryMethod(BaseModel, ABC):
    """Parameters of a correction that depends on the query."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]

    @abstractmethod
    def rule(self, given: FitInput) -> Rule:
        """The fitted rule."""


class DynamicInvertedSoftmax(QueryMethod):
    """`is` where the query's raw nearest target is among the k nearest of a bank query, no correction elsewhere.

    QB-Norm eq. 2; k = 1 as there, tau as in `is`. A bank that knows only a part of the gallery leaves the searches
    of the rest as they are.
    """

    name: ClassVar[str] = "dis"
    tau: float = Field(0.05, gt=0)
    k: int = Field(1, ge=1)

    def rule(self, given: FitInput) -> Rule:
        targets, compute = given.require_targets(self.name), given.compute
        model = InvertedSoftmax(tau=self.tau).fit(given)
        return Dynamic(model.with_activation(targets, self.k, device=compute.device, memory=compute.memory))


class DualDynamicInvertedSoftmax(QueryMethod):
    """`dualis`, of which the part of a bank applies where the query's raw nearest target is among the k nearest of a
    member of that bank. See `DualDynamic`.

    NNN appendix A1; k = 1 as in QB-Norm, temperatures as in `dualis`.
    """

    name: ClassVar[str] = "dualdis"
    tau_query: float = Field(0.05, gt=0)
    tau_target: float = Field(0.5, gt=0)
    k: int = Field(1, ge=1)

    def rule(self, given: FitInput) -> Rule:
        targets, compute = given.require_targets(self.name), given.compute
        model = DualInvertedSoftmax(tau_query=self.tau_query, tau_target=self.tau_target).model(given)
        options: dict[str, Any] = {"device": compute.device, "memory": compute.memory}
        of_queries, of_targets = (
            replace(model, terms=(term,)).centred_on(targets, **options).with_activation(targets, self.k, **options)
            for term in model.terms
        )
        return DualDynamic((of_queries, of_targets))


class SingleQueryDualSoftmax(QueryMethod):
    """See `DualSoftmax`. temperature T is an inverse one; 20 is the tau of 0.05 that the other defaults have."""

    name: ClassVar[str] = "dsl"
    temperature: float = Field(20.0, gt=0)

    def rule(self, given: FitInput) -> Rule:
        return DualSoftmax(_bank(given), self.temperature)


class GlobalCorrection(QueryMethod):
    """See `GloballyCorrected`. It has no parameters."""

    name: ClassVar[str] = "gc"

    def rule(self, given: FitInput) -> Rule:
        return GloballyCorrected(_bank(given))


def _bank(given: FitInput) -> Similarities:
    return Similarities(given.query_bank, given.metric, given.compute)


QUERY_METHODS: dict[str, type[QueryMethod]] = {
    method.name: method
    for method in (
        DynamicInvertedSoftmax,
        DualDynamicInvertedSoftmax,
        SingleQueryDualSoftmax,
        GlobalCorrection,
    )
}


def fit_rule(
    query_bank: VectorLike,
    method: str,
    targets: VectorLike | None = None,
    target_bank: VectorLike | None = None,
    metric: Metric | str = "cosine",
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
    **parameters: Setting,
) -> Rule:
    """Fits a correction that depends on the query; arguments as in `hubplugin.fit`.

    method: dis | dualdis | dsl | gc; `QUERY_METHODS` has each one's parameters, equation and defaults.
    targets: the gallery [n, d]; needed by dis and dualdis. target_bank: [p, d]; needed by dualdis.

    Raises InputError, one line, for anything that cannot be used as given.
    """
    configuration = configured(QUERY_METHODS, method, parameters, fit_rule)
    compute = Compute(device, memory, progress)
    return configuration.rule(FitInput.read(query_bank, targets, target_bank, Metric.parse(metric), compute))
