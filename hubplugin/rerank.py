"""Corrections that depend on the query, which no stored offset can express.

They re-rank a list of candidates. A rule is fitted once. Its method `keep` returns all
that the rule needs to know about a target when a query comes: numbers or bits, which
any store can hold beside the vector:

    dis        the offset that the target has already, and one bit
    dualdis    for each of two banks, a part of the offset and one bit
    dsl        one number
    gc         nothing: it reads the candidates' own vectors

New targets need no refit: `keep` returns their values, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from hubplugin.bank import Bank, BankLike, PreparedBank
from hubplugin.compute import Compute, LogSum, Similarities, TopK, reduce, search
from hubplugin.compute.device import to_host
from hubplugin.errors import InputError
from hubplugin.methods import build_method
from hubplugin.methods.inverted_softmax import DualInvertedSoftmax, InvertedSoftmax
from hubplugin.metric import Metric
from hubplugin.model import LogSumExp, OffsetModel, Setting
from hubplugin.vectors import VectorLike, as_vectors

NO_SIMILARITY = 1e-7
"""The value with which `DualDynamic` replaces a similarity that is not positive: the
float32 rounding of 1."""


@dataclass(frozen=True)
class Rule(ABC):
    """A fitted correction that depends on the query.

    fitted: The model or the similarities made from the bank.
    """

    fitted: OffsetModel | Similarities

    @property
    def dim(self) -> int:
        """The number of dimensions of the bank and of every query."""
        return self.fitted.dim

    @property
    def metric(self) -> Metric:
        """The similarity whose values `rescore` takes."""
        return self.fitted.metric

    @abstractmethod
    def keep(self, targets: VectorLike) -> np.ndarray:
        """Return the values to store for each target [n, d]: float32, n rows."""

    @abstractmethod
    def rescore(self, similarities: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """Return corrected scores [q, L] of q queries on the same L targets.

        Args:
            similarities: The similarities s(q, t) [q, L]. Each query's raw nearest
                target must be one of the L targets.
            kept: The values that `keep` returned for the L targets.
        """


@dataclass(frozen=True)
class Reranker:
    """A rule, and a function that looks up the values it keeps for each target.

    kept: A function from ids to the values that `rule.keep` returned for them, in the
        same order. An adapter reads these from its store; for arrays the function is
        `rule.keep(targets).__getitem__`.
    """

    rule: Rule
    kept: Callable[[Sequence[object]], np.ndarray]

    def rerank(
        self,
        query: np.ndarray,
        candidate_ids: Sequence[object],
        candidate_scores: Sequence[float],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rank the candidates of one query by corrected scores.

        Args:
            query: [d].
            candidate_ids: The ids of the candidates.
            candidate_scores: The raw similarities of the candidates, the larger the
                nearer; -distance^2 / 2 for Euclidean.

        Returns:
            The positions in `candidate_ids` and the corrected scores, best first. Equal
            scores keep the order of the candidates.

        Raises:
            InputError: The lengths or the dimensions do not match.
        """
        if np.shape(query) != (self.rule.dim,):
            raise InputError(
                f"query has shape {np.shape(query)}, the bank of this rule has "
                f"{self.rule.dim} dimensions"
            )
        if len(candidate_ids) != len(candidate_scores):
            raise InputError(
                f"{len(candidate_ids)} candidate ids came with {len(candidate_scores)} "
                "scores; expected one for each"
            )
        if not len(candidate_ids):
            return np.empty(0, np.int64), np.empty(0)
        similarities = np.asarray(candidate_scores, np.float64)[None, :]
        scores = self.rule.rescore(similarities, self.kept(candidate_ids))[0]
        order = np.argsort(-scores, kind="stable")
        return order, scores[order]


ROUNDING = 1e-6
"""The largest difference between two float32 products of one pair, relative to the
larger of 1 and the similarity."""


@dataclass(frozen=True)
class Dynamic(Rule):
    """A model's offsets, for queries whose raw nearest target is in the activation set.

    All other queries keep their raw similarities: QB-Norm eq. 2 (`dis`). If the model
    has a query map, `rescore` takes the similarities of `model.queries(q)` for every
    query.

    Corrected scores are in the log domain, tau * log of the paper's. Each query is
    ranked either by corrected scores or by raw ones, never by a mixture.

    thresholds: The similarity of each bank member's k-th nearest target, one array [m]
        for each term. The activation set has every target, also a later one, that is at
        least as similar to some member as the member's threshold.
    """

    fitted: OffsetModel
    thresholds: Sequence[np.ndarray]

    @classmethod
    def of(
        cls,
        model: OffsetModel,
        targets: VectorLike,
        k: int = 1,
        compute: Compute = Compute(),
    ) -> Dynamic:
        """Find the threshold of each bank query, and return the rule of a model.

        Args:
            model: The model; its terms keep the bank queries.
            targets: The gallery [n, d].
            k: The number of nearest targets of each bank query in the activation set.
            compute: Device, memory and progress.

        Raises:
            InputError: k is not between 1 and n.
        """
        vectors = as_vectors(targets, "targets")
        if not 1 <= k <= vectors.rows:
            raise InputError(
                f"activation set: k={k} is not between 1 and the {vectors.rows} targets "
                "of the gallery"
            )
        thresholds = []
        label = "activation set"
        for term in model.terms:
            nearest = TopK(k)
            bank = model.similarities(term, compute).bank
            search(bank, vectors, model.metric, compute, nearest, label=label)
            (scores,) = nearest.scores  # of one candidate: [m, k], in descending order
            thresholds.append(scores[:, -1])
        return cls(model, thresholds)

    def is_activated(self, targets: VectorLike) -> np.ndarray:
        """Return which targets [n, d] are in the activation set: bool [n]."""
        vectors = as_vectors(targets, "targets")
        activated = np.zeros(vectors.rows, bool)
        model = self.fitted
        for term, thresholds in zip(model.terms, self.thresholds, strict=True):
            similarities = model.similarities(term, Compute())
            # Here, a product may be rounded differently than in `of`.
            slack = ROUNDING * max(1.0, float(np.abs(thresholds).max()))
            library = similarities.library
            lowered = library.to_device(thresholds - slack)
            for tile in similarities.tiles(vectors, "activation set"):
                s = tile.s  # [targets, bank queries]
                is_near = s >= library.xp.astype(lowered, s.dtype, copy=False)
                activated[tile.rows] |= to_host(is_near.any(1))
        return activated

    def keep(self, targets: VectorLike) -> np.ndarray:
        """Return [n, 2]: the offset, and 1 if the target is activated, else 0."""
        vectors = as_vectors(targets, "targets")
        offsets = self.fitted.offsets(vectors)
        return np.column_stack([offsets, self.is_activated(vectors)])

    def rescore(self, similarities: np.ndarray, kept: np.ndarray) -> np.ndarray:
        offsets = kept[:, 0]
        is_activated = kept[:, 1] > 0
        # The activation of a query's nearest target decides for all its candidates.
        is_corrected = is_activated[similarities.argmax(axis=1)]
        scores: np.ndarray = similarities + is_corrected[:, None] * offsets
        return scores


@dataclass(frozen=True)
class DualDynamic(Rule):
    """`dualis`, with the raw similarity in place of a factor that does not apply.

    NNN appendix A1 (`dualdis`). The score of eq. 3 is a product with one factor for
    each bank: exp(s/tau) / sum_u exp(s(b_u, t)/tau) for a query whose raw nearest
    target is in the bank's activation set, and s for every other query.

    Scores are in the log domain. If at least one factor applies to a query, they are
    lambda * log of the paper's up to a constant, with lambda as in `dualis`; if none
    applies, they are s. If only one factor applies, a similarity takes the place of the
    other probability, so it should be positive. Any other similarity is replaced by
    `NO_SIMILARITY`, which leaves the ranking to the factor that applies.

    factors: A rule of one term for the query bank, then one for the target bank.
    """

    factors: Sequence[Dynamic]

    def keep(self, targets: VectorLike) -> np.ndarray:
        """Return [n, 4]: the two values of `Dynamic.keep` for each factor."""
        vectors = as_vectors(targets, "targets")
        return np.hstack([factor.keep(vectors) for factor in self.factors])

    def rescore(self, similarities: np.ndarray, kept: np.ndarray) -> np.ndarray:
        # `kept` has the offset and the activation for the query bank, then both for the
        # target bank. The activation of a query's nearest target decides.
        nearest = similarities.argmax(axis=1)
        by_query = kept[nearest, 1, None] > 0
        by_target = kept[nearest, 3, None] > 0
        by_both = by_query & by_target
        scores: np.ndarray = similarities + by_both * (kept[:, 0] + kept[:, 2])
        positive = np.maximum(similarities, NO_SIMILARITY)
        for applies_alone, factor, offsets in (
            (by_query & ~by_target, self.factors[0], kept[:, 0]),
            (by_target & ~by_query, self.factors[1], kept[:, 2]),
        ):
            term = cast(LogSumExp, factor.fitted.terms[0])
            logarithm = np.log(positive) + similarities / term.tau
            corrected = offsets - term.scale * logarithm
            scores = np.where(applies_alone, corrected, scores)
        return scores


@dataclass(frozen=True)
class DualSoftmax(Rule):
    """s * exp(T s) / ( exp(T s) + sum_u exp(T s(b_u, t)) ): Sinkhorn paper section 3.

    This is dual softmax with only the query itself and the bank at hand. It multiplies
    a similarity by a probability, so it is meaningful only if the similarities of the
    candidates are positive.
    """

    fitted: Similarities
    temperature: float

    def keep(self, targets: VectorLike) -> np.ndarray:
        """Return [n]: LSE_u( T s(b_u, t) )."""
        vectors = as_vectors(targets, "targets")
        (from_bank,) = reduce(self.fitted, vectors, [LogSum(1 / self.temperature)])
        return from_bank.astype(np.float32)

    def rescore(self, similarities: np.ndarray, kept: np.ndarray) -> np.ndarray:
        exponent = self.temperature * similarities
        # The fraction of the definition, from the logarithm of its denominator.
        share = np.exp(exponent - np.logaddexp(exponent, kept))
        scores: np.ndarray = similarities * share
        return scores


@dataclass(frozen=True)
class GloballyCorrected(Rule):
    """s(q, t) minus its rank among s(b_1, t) ... s(b_m, t): QB-Norm 3.4 (`gc`)."""

    fitted: Similarities

    def keep(self, targets: VectorLike) -> np.ndarray:
        """Return the targets' vectors [n, d], which their store has already."""
        return as_vectors(targets, "targets").array()

    def rescore(self, similarities: np.ndarray, kept: np.ndarray) -> np.ndarray:
        library = self.fitted.library
        scores = np.array(similarities, np.float64)
        vectors = as_vectors(kept, "candidates")
        # The rank is the number of bank queries that are nearer to the target.
        for tile in self.fitted.tiles(vectors, "ranks in the bank"):
            for row, s in zip(scores, similarities[:, tile.rows], strict=True):
                own_score = library.to_device(s, tile.s.dtype)[:, None]
                row[tile.rows] -= to_host(library.xp.sum(tile.s > own_score, axis=1))
        return scores


class QueryMethod(BaseModel, ABC):
    """The parameters of a correction that depends on the query."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]

    @abstractmethod
    def rule(self, bank: PreparedBank) -> Rule:
        """Return the fitted rule."""


class DynamicInvertedSoftmax(QueryMethod):
    """`is` for queries whose raw nearest target is among the k nearest of a bank query.

    QB-Norm eq. 2, with k = 1 as in the paper and tau as in `is`. If the bank covers
    only a part of the gallery, searches for the rest do not change.
    """

    name: ClassVar[str] = "dis"
    tau: float = Field(0.05, gt=0)
    k: int = Field(1, ge=1)

    def rule(self, bank: PreparedBank) -> Rule:
        targets = bank.require_targets()
        model = InvertedSoftmax(tau=self.tau).fit(bank)
        return Dynamic.of(model, targets, self.k, bank.compute.without_progress)


class DualDynamicInvertedSoftmax(QueryMethod):
    """`dualis`, with each bank's factor only for queries near its members.

    A bank's factor applies if the query's raw nearest target is among the k nearest of
    one of the bank's members, see `DualDynamic`. NNN appendix A1, with k = 1 as in
    QB-Norm and the temperatures of `dualis`.
    """

    name: ClassVar[str] = "dualdis"
    tau_query: float = Field(0.05, gt=0)
    tau_target: float = Field(0.5, gt=0)
    k: int = Field(1, ge=1)

    def rule(self, bank: PreparedBank) -> Rule:
        targets = bank.require_targets()
        quiet = bank.compute.without_progress
        method = DualInvertedSoftmax(
            tau_query=self.tau_query, tau_target=self.tau_target
        )
        model, _ = method.run(bank)
        factors = []
        for term in model.terms:  # of the query bank, then of the target bank
            factor = replace(model, terms=(term,), fitted=None)
            factor = factor.centre_on(targets, compute=quiet)
            factors.append(Dynamic.of(factor, targets, self.k, quiet))
        return DualDynamic(model, factors)


class SingleQueryDualSoftmax(QueryMethod):
    """Dual softmax for a single query, see `DualSoftmax`.

    temperature: The inverse of tau; 20 corresponds to the default tau of 0.05
        elsewhere.
    """

    name: ClassVar[str] = "dsl"
    temperature: float = Field(20.0, gt=0)

    def rule(self, bank: PreparedBank) -> Rule:
        return DualSoftmax(bank.similarities, self.temperature)


class GlobalCorrection(QueryMethod):
    """Global correction without parameters, see `GloballyCorrected`."""

    name: ClassVar[str] = "gc"

    def rule(self, bank: PreparedBank) -> Rule:
        return GloballyCorrected(bank.similarities)


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
    targets: VectorLike | None,
    bank: BankLike,
    method: str,
    *,
    metric: Metric | str = "cosine",
    compute: Compute = Compute(),
    **parameters: Setting,
) -> Rule:
    """Fit a correction that depends on the query.

    Args:
        targets: The gallery [n, d], which dis and dualdis need; None for others.
        bank: As in `hubplugin.fit`; dualdis needs the vectors of answers.
        method: dis | dualdis | dsl | gc; `QUERY_METHODS` has the parameters, equation
            and defaults of each.
        metric: As in `hubplugin.fit`.
        compute: As in `hubplugin.fit`.
        **parameters: The parameters of the method.

    Returns:
        The fitted rule.

    Raises:
        InputError: An argument cannot be used; the message is one line.
    """
    configuration = build_method(QUERY_METHODS, method, parameters)
    prepared = replace(Bank.of(bank).prepare(metric, compute), clicks=None)
    if targets is not None:
        prepared = prepared.against(targets)
    return configuration.rule(prepared)
