"""One cross-validation: a part of the bank is left out of the fit, and the margins of its queries tell if it helps.

The guard, the strength of a query map, `refit` and `diagnose` all ask `cross_validate`. Where answers are known, each
query has a margin: the score of its own target less that of the best other. Without, only the hubness of what the
queries find can be measured.

A fold sees at most `FIT_ROWS` of the bank and twice as many targets, and all folds together try `HELD_OUT` queries,
drawn at random: it costs the same whatever the size of the gallery.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, TypeAlias

import numpy as np
from pydantic import Field, computed_field

from hubplugin.bank import PreparedBank
from hubplugin.compute import Similarities, dense, topk
from hubplugin.errors import InputError
from hubplugin.measures.hubness import k_occurrence, skewness
from hubplugin.measures.significance import Figure, Side
from hubplugin.methods import FitInput, Method
from hubplugin.model import OffsetModel, QueryMap, Setting
from hubplugin.vectors import as_vectors, draw_sample, take_rows

FOLDS, FEWER = 5, 3
"""Each fit keeps 4/5 of the bank, so that what is best for it is best for the whole. `FEWER` are enough for figures
that decide nothing; fits take four fifths of the time."""

HELD_OUT = 2_500
"""Queries held out in all: they tell corrections that differ for 3 % of them to 0.35 points of R@1."""

FIT_ROWS = 2_048
"""Bank rows of one fit."""

OCCURRENCE = 10
"""Hubness is the skewness of the 10-occurrence, as in DBSN and QB-Norm."""

RESAMPLES = 100
"""Of the bootstrap of a skewness: its standard error comes out to 7 %."""


@dataclass(frozen=True)
class Fold:
    """Rows of a bank: `train` [s] may be fitted on, `test` [h] are tried, and `teach` [p] teach a map; by default those
    of `train`."""

    train: np.ndarray
    test: np.ndarray
    teach: np.ndarray | None = None


def make_folds(
    rows: np.ndarray, fold_of: np.ndarray, limit: int | None = None
) -> list[Fold]:
    """The folds of the bank queries `rows` [m], each of which is held out in the fold `fold_of` [m]; -1: in none. Of
    all of them at most `limit` are tried, by default `HELD_OUT`."""
    count = int(fold_of.max()) + 1
    size = (limit or HELD_OUT) // max(count, 1)
    return [
        Fold(np.sort(rows[fold_of != fold]), rows[fold_of == fold][:size])
        for fold in range(count)
    ]


def folds_of(
    bank: PreparedBank,
    seed: int = 0,
    count: int = FOLDS,
    may_test: np.ndarray | None = None,
) -> list[Fold]:
    """Divides the distinct queries of a bank into folds: of equal ones there is one, or the others would try a fit that
    saw it.

    Args:
        bank: its known answers decide which queries are held out together.
        seed: of the order.
        count: of the folds.
        may_test: whether each query of known answer may be held out, bool [m]; then each for itself, and what it asks
            for stays asked for. By default all wordings of a target are held out together: they would give it away to
            each other.

    Raises:
        InputError: no query can be held out.
    """
    require_enough(len(bank.distinct))
    rng, answers = np.random.default_rng(seed), bank.known_answers
    if answers is not None and may_test is None:
        rows, place = _by_target(bank, rng)
        others = np.setdiff1d(bank.distinct, rows)
        return make_folds(
            np.concatenate([rows, others]),
            np.concatenate([place % count, np.full(len(others), -1)]),
        )
    rows = rng.permutation(bank.distinct)
    is_tested = np.ones(len(rows), bool)
    if answers is not None and may_test is not None:
        is_tested = may_test[rows] & (answers[rows] >= 0)
    return make_folds(rows, np.where(is_tested, (np.cumsum(is_tested) - 1) % count, -1))


def paraphrase_folds(bank: PreparedBank, seed: int = 0) -> list[Fold]:
    """Folds of a `bank` with known answers, drawn with `seed`, that hold out single wordings of targets that are asked
    for in others, too.

    They are made of as many queries as one fit has, or a fold might not see the other wordings.
    """
    rows = _by_target(bank, np.random.default_rng(seed))[0][: fit_rows(bank)]
    assert bank.known_answers is not None
    return make_folds(rows, folds_within(bank.known_answers[rows], FOLDS))


def _by_target(
    bank: PreparedBank, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The distinct queries [m] whose answer is known, by their targets in random order; and the place of each one's
    target in that order, ascending."""
    assert bank.known_answers is not None
    answered = bank.distinct[bank.known_answers[bank.distinct] >= 0]
    numbers, target = np.unique(bank.known_answers[answered], return_inverse=True)
    if len(numbers) < 2 * FOLDS:
        raise InputError(
            f"answers name {len(numbers)} targets; holding some of them out needs at least {2 * FOLDS}"
        )
    place = np.argsort(rng.permutation(len(numbers)))[target.reshape(-1)]
    return answered[np.argsort(place, kind="stable")], np.sort(place)


def folds_within(answer: np.ndarray, count: int) -> np.ndarray:
    """The fold of each query, one of `count`: -1 where no other query has the same `answer` [m], or the answer is -1.
    The wordings of one target are spread over the folds, so that each fold leaves some of them."""
    order = np.argsort(answer, kind="stable")
    _, first, group, times = np.unique(
        answer[order], return_index=True, return_inverse=True, return_counts=True
    )
    group = group.reshape(-1)
    fold_of = np.empty(len(answer), np.int64)
    fold_of[order] = np.where(
        times[group] < 2, -1, (np.arange(len(answer)) - first[group] + group) % count
    )
    fold_of[answer < 0] = -1
    return fold_of


def require_enough(distinct: int) -> None:
    """Raises InputError where of so many bank queries none can be held out."""
    if distinct < 2 * FOLDS:
        raise InputError(
            f"query bank has {distinct} distinct queries; holding some of them out needs at least {2 * FOLDS}, so that "
            f"each of {FOLDS} folds has 2 of them"
        )


def fit_rows(bank: FitInput) -> int:
    """`FIT_ROWS`, or as many as memory allows: a fit holds rows x (targets + target bank), target bank x targets, and
    a Sinkhorn fit its exponentials."""
    return min(FIT_ROWS, max(math.isqrt(bank.compute.bytes() // 32), 2 * FOLDS))


def sample_of(bank: PreparedBank, seed: int = 0) -> np.ndarray:
    """Targets of the gallery of `bank` [n, d], drawn at random with `seed`."""
    gallery = bank.targets or bank.require_targets(
        "blend"
    )  # of which the sample alone is read
    if gallery.rows < 2:
        raise InputError(
            f"{gallery.name} has one row; hubness needs at least 2 targets"
        )
    return draw_sample(
        gallery, 2 * fit_rows(bank), bank.metric, np.random.default_rng([seed, 1])
    )


def answers_of(bank: PreparedBank, numbers: np.ndarray) -> np.ndarray:
    """The targets of `bank` that `PreparedBank.known_answers` calls `numbers` [p]: rows of the target bank or of the
    gallery, [p, d]."""
    if bank.pairs is not None:
        gold: np.ndarray = bank.require_target_bank("blend")[numbers]
        return gold
    clicked, place = np.unique(numbers, return_inverse=True)
    return take_rows(bank.require_targets("blend"), clicked, bank.metric)[
        place.reshape(-1)
    ]


def with_rows(targets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`targets` [n, d] with those of `rows` [p, d] that are not among them, once each; and the place of each: [p]."""
    places = {row.tobytes(): place for place, row in enumerate(targets)}
    distinct = len(places)
    columns = np.array(
        [
            places.setdefault(row.tobytes(), len(targets) + len(places) - distinct)
            for row in rows
        ]
    )
    numbers, first = np.unique(columns, return_index=True)
    return np.concatenate([targets, rows[first[numbers >= len(targets)]]]), columns


@dataclass(frozen=True, eq=False)
class Training:
    """What a fold trains on: `fit_input`, `FIT_ROWS` of its queries with the targets that they are tried among; and the
    `rows` of the bank whose pairs teach."""

    fit_input: FitInput
    bank: PreparedBank
    rows: np.ndarray

    @cached_property
    def pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries [p, d], the place of each one's target [p] among those asked for, and these [c, d]."""
        assert self.bank.known_answers is not None
        rows = self.rows[self.bank.known_answers[self.rows] >= 0]
        numbers, gold = np.unique(self.bank.known_answers[rows], return_inverse=True)
        return (
            self.bank.query_bank[rows],
            gold.reshape(-1),
            answers_of(self.bank, numbers),
        )

    def with_pairs(self, pairs: PreparedBank) -> Training:
        """The same, where `pairs` teach, too."""
        added = len(self.bank.query_bank) + np.arange(len(pairs.query_bank))
        return Training(
            self.fit_input,
            self.bank.with_pairs(pairs),
            np.concatenate([self.rows, added]),
        )


def _train(
    bank: PreparedBank, fold: Fold, number: int, sample: np.ndarray
) -> tuple[Training, np.ndarray | None]:
    """What a fold trains on, and the column of each held-out query's answer: [h], None without answers."""
    targets, target_bank, gold, limit = sample, bank.target_bank, None, fit_rows(bank)
    if (
        bank.known_answers is not None
    ):  # the gallery holds what held-out queries ask for
        targets, gold = with_rows(
            sample, answers_of(bank, bank.known_answers[fold.test])
        )
    seen = np.sort(
        fold.train[np.random.default_rng(number).permutation(len(fold.train))[:limit]]
    )
    if target_bank is not None:
        subset = np.random.default_rng(number).permutation(len(target_bank))[:limit]
        target_bank = target_bank[
            subset if bank.pairs is None else np.unique(bank.pairs[seen])
        ]
    vectors = as_vectors(targets, "targets")
    fit_input = FitInput(
        bank.query_bank[seen],
        vectors,
        target_bank,
        bank.metric,
        bank.compute.without_progress,
    )
    return Training(
        fit_input, bank, fold.train if fold.teach is None else fold.teach
    ), gold


OffsetsAndMap: TypeAlias = tuple[np.ndarray | float, QueryMap | None]
"""The offsets of the targets that queries are tried among, [n], and what maps the queries."""

Configuration: TypeAlias = (
    Method | OffsetModel | Callable[[Training], list[OffsetsAndMap]] | None
)
"""What is tried: a method, fitted on what a fold leaves; a model as it is; several corrections at once; None is no
correction."""


def _corrections(
    configuration: Configuration, training: Training
) -> list[OffsetsAndMap]:
    if configuration is None:
        return [(0.0, None)]
    if isinstance(configuration, Method):
        return [(configuration.raw_offsets(training.fit_input), None)]
    if isinstance(configuration, OffsetModel):
        targets = training.fit_input.require_targets(configuration.method)
        return [
            (
                configuration.raw_offsets(targets, training.fit_input.compute),
                configuration.query_map,
            )
        ]
    return configuration(training)


@dataclass(frozen=True, eq=False)
class Margins:
    """What each configuration did with each held-out query: [c, q].

    hits [c, q, k]: the first of the `targets` that were sampled. costs: how much nearer the raw first target is than
    the corrected one; gap: of the two nearest, on average. margins: how far a query's own target is ahead of the best
    other; right: whether it comes first, shared among equals; ranks: the expected one. The last three are None where
    answers are not known.
    """

    targets: int
    gap: float
    hits: np.ndarray
    costs: np.ndarray
    margins: np.ndarray | None = None
    right: np.ndarray | None = None
    ranks: np.ndarray | None = None

    def noise(self, before: int, after: int) -> float:
        """The standard error of the change of the skewness from configuration `before` to `after`: a bootstrap of the
        queries, which are the same ones."""
        rng, count, changes = (
            np.random.default_rng(0),
            self.hits.shape[1],
            list[float](),
        )
        for _ in range(RESAMPLES):
            rows = rng.integers(0, count, count)
            first, second = (
                skewness(k_occurrence(hits[rows], self.targets))
                for hits in self.hits[[before, after]]
            )
            changes.append(second - first)
        return float(np.std(changes))


def cross_validate(
    configurations: Sequence[Configuration],
    bank: PreparedBank,
    folds: Sequence[Fold],
    seed: int = 0,
) -> Margins:
    """Fits each configuration on what each fold leaves, and tries it on what the fold holds out.

    The folds are the outer loop, so that each is multiplied once.

    Args:
        configurations: None is no correction.
        bank: the bank, with its gallery.
        folds: of the bank.
        seed: of the sample of the gallery.
    """
    sample, total = sample_of(bank, seed), len(folds) * len(configurations)
    n, gaps = len(sample), list[float]()
    parts: list[list[tuple[np.ndarray, ...]]] = []
    for number, fold in enumerate(folds):
        training, gold = _train(bank, fold, number, sample)
        targets, compute = (
            training.fit_input.require_targets("blend"),
            training.fit_input.compute,
        )
        queries = bank.query_bank[fold.test]
        similarities = dense(Similarities(queries, bank.metric, compute), targets)
        nearest = topk(similarities[:, :n], min(2, n))[0]
        gaps.append(float((nearest[:, 0] - nearest[:, -1]).mean()))
        parts.append([])
        for place, configuration in enumerate(configurations):
            mapped, by_map = similarities, None
            for offsets, query_map in _corrections(configuration, training):
                if query_map is not by_map:  # several offsets beside one map
                    mapped_queries = (
                        queries if query_map is None else query_map(queries)
                    )
                    mapped, by_map = (
                        dense(
                            Similarities(mapped_queries, bank.metric, compute), targets
                        ),
                        query_map,
                    )
                scores = mapped + offsets
                hits = topk(scores[:, :n], min(OCCURRENCE, max(n // 4, 1)))[1]
                costs = (
                    nearest[:, 0]
                    - np.take_along_axis(similarities, hits[:, :1], axis=1)[:, 0]
                )
                parts[-1].append(
                    (
                        hits,
                        costs,
                        *([] if gold is None else _measure_gold(scores, gold)),
                    )
                )
            bank.compute.report(
                "trying candidates", number * len(configurations) + place + 1, total
            )
    by_fold = [
        [np.stack(arrays) for arrays in zip(*part, strict=True)] for part in parts
    ]
    arrays = (
        np.concatenate(folds_of_array, axis=1)
        for folds_of_array in zip(*by_fold, strict=True)
    )
    return Margins(n, max(float(np.mean(gaps)), 1e-12), *arrays)


def _measure_gold(scores: np.ndarray, gold: np.ndarray) -> tuple[np.ndarray, ...]:
    """Margin, right and rank of the targets in the columns `gold` [p]; `scores` [p, n] are overwritten."""
    rows = np.arange(len(gold))
    score = scores[rows, gold]
    greater, equal = (
        (scores > score[:, None]).sum(axis=1),
        (scores == score[:, None]).sum(axis=1),
    )
    scores[rows, gold] = -np.inf
    return score - scores.max(axis=1), (greater == 0) / equal, greater + (equal + 1) / 2


@dataclass(frozen=True)
class Figures:
    """One configuration on held-out queries; None is no correction.

    skewness: of the k-occurrence. cost: mean fall of the similarity of the first target, as a share of the mean
    distance between the two nearest. largest, never: of the queries, the share that finds the worst hub, and of the
    targets tried, the share that none finds. right: R@1 of no correction and of this; rank: geometric mean rank of the
    queries' own targets; both None without known answers.
    """

    configuration: Annotated[Method | OffsetModel | None, Field(exclude=True)]
    queries: int
    skewness: float
    cost: float
    largest: float
    never: float
    right: Side | None = None
    rank: float | None = None

    @classmethod
    def of(
        cls,
        margins: Margins,
        number: int,
        configuration: Method | OffsetModel | None,
    ) -> Figures:
        """Return the figures of `configuration`, number `number` in `margins`, against number 0."""
        occurrence = k_occurrence(margins.hits[number], margins.targets)
        costs = margins.costs[number]
        rank = None
        if margins.ranks is not None:
            rank = float(np.exp(np.log(margins.ranks[number]).mean()))
        return cls(
            configuration,
            len(costs),
            skewness=skewness(occurrence),
            cost=float(costs.mean() / margins.gap),
            largest=float(occurrence.max() / len(costs)),
            never=float((occurrence == 0).mean()),
            right=change_of(margins, 0, number),
            rank=rank,
        )

    @property
    def recall(self) -> float | None:
        """R@1, 0 to 1."""
        return None if self.right is None else self.right.after

    @property
    def change(self) -> Figure | None:
        """Of R@1 over no correction, with its interval."""
        return None if self.right is None else self.right.change

    @computed_field  # type: ignore[prop-decorator]
    @property
    def method(self) -> str:
        configuration = self.configuration
        if isinstance(configuration, Method):
            return configuration.name
        return "none" if configuration is None else configuration.method

    @computed_field  # type: ignore[prop-decorator]
    @property
    def parameters(self) -> dict[str, Setting]:
        return {} if self.configuration is None else self.configuration.parameters

    @property
    def name(self) -> str:
        """The method with its parameters."""
        short = {
            key: f"{value:.3g}" if isinstance(value, float) else value
            for key, value in self.parameters.items()
        }
        return f"{self.method}({', '.join(f'{key}={value}' for key, value in short.items())})"

    def figures(self) -> str:
        """In one line."""
        text = f"{self.name:34s} skewness {self.skewness:6.2f}  cost {self.cost:5.2f}"
        if self.right is not None:
            gain, error = 100 * self.right.change.value, 196 * self.right.error
            text += f"  R@1 {100 * self.right.after:5.1f} ({gain:+.1f} +- {error:.1f})  mean rank {self.rank:.2f}"
        return text


def change_of(
    margins: Margins, first: int, second: int, what: str = "queries"
) -> Side | None:
    """Return R@1 under the configurations number `first` and `second`, for queries called `what`. None without known
    answers."""
    right = margins.right
    return None if right is None else Side.of(right[first], right[second], what)
