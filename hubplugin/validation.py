"""One cross-validation: a part of the bank is left out of the fit, and the margins of its queries tell if it helps.

The guard, the strength of a query map, `refit` and `diagnose` all ask `cross_validate`. Where answers are known, each
query has a margin: the score of its own target less that of the best other. Without, only the hubness of what the
queries find can be measured.

A fold sees at most `FIT_ROWS` of the bank and twice as many targets, and all folds together try `HELD_OUT` queries,
drawn at random: it costs the same whatever the size of the gallery.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from typing_extensions import Self

from hubplugin.bank import PreparedBank
from hubplugin.compute import Similarities, dense, topk
from hubplugin.errors import InputError
from hubplugin.measures.hubness import count_targets, k_occurrence, skewness
from hubplugin.measures.significance import Figure, Side
from hubplugin.methods import Method
from hubplugin.model import OffsetModel, QueryMap, Setting, describe_method
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


class Fold(NamedTuple):
    """Rows of a bank: `train` [s] may be fitted on, `test` [h] are tried, and `teach` [p] teach a map."""

    train: np.ndarray
    test: np.ndarray
    teach: np.ndarray


def make_folds(
    rows: np.ndarray, fold_of: np.ndarray, limit: int | None = None
) -> list[Fold]:
    """Make folds of the bank queries `rows` [m]. Each is held out in the fold `fold_of` [m]; -1: in none.

    All folds together try at most `limit` queries, by default `HELD_OUT`.
    """
    count = int(fold_of.max()) + 1
    size = (limit or HELD_OUT) // max(count, 1)
    folds = []
    for number in range(count):
        train = np.sort(rows[fold_of != number])
        folds.append(Fold(train, rows[fold_of == number][:size], train))
    return folds


def folds_of(
    bank: PreparedBank,
    seed: int = 0,
    count: int = FOLDS,
    may_test: np.ndarray | None = None,
) -> list[Fold]:
    """Split the distinct queries of a bank into folds. Duplicates are dropped, so no fold tries a fit that saw it.

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
    rng = np.random.default_rng(seed)
    answers = bank.known_answers
    if answers is not None and may_test is None:
        rows, place = _by_target(bank, rng)
        others = np.setdiff1d(bank.distinct, rows)
        never = np.full(len(others), -1)
        fold_of = np.concatenate([place % count, never])
        return make_folds(np.concatenate([rows, others]), fold_of)
    rows = rng.permutation(bank.distinct)
    is_tested = np.ones(len(rows), bool)
    if answers is not None and may_test is not None:
        is_tested = may_test[rows] & (answers[rows] >= 0)
    return make_folds(rows, np.where(is_tested, (np.cumsum(is_tested) - 1) % count, -1))


def paraphrase_folds(bank: PreparedBank, seed: int = 0) -> list[Fold]:
    """Draw folds with `seed` that hold out single wordings of targets that are asked for in others, too.

    They are made of as many queries as one fit has, or a fold might not see the other wordings.
    """
    rows = _by_target(bank, np.random.default_rng(seed))[0][: fit_rows(bank)]
    assert bank.known_answers is not None
    return make_folds(rows, folds_within(bank.known_answers[rows], FOLDS))


def _by_target(
    bank: PreparedBank, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct queries [m] whose answer is known, by their targets in random order, and the place of each
    one's target in that order, ascending."""
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
    """Return the fold of each query, one of `count`: -1 where no other has the same `answer` [m], or the answer is -1.

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
    """Raise InputError where of so many bank queries none can be held out."""
    if distinct < 2 * FOLDS:
        raise InputError(
            f"query bank has {distinct} distinct queries; holding some of them out needs at least {2 * FOLDS}, so that "
            f"each of {FOLDS} folds has 2 of them"
        )


def fit_rows(bank: PreparedBank) -> int:
    """Return `FIT_ROWS`, or as many rows as memory allows.

    A fit holds rows x (targets + target bank), target bank x targets, and a Sinkhorn fit its exponentials.
    """
    return min(FIT_ROWS, max(math.isqrt(bank.compute.bytes() // 32), 2 * FOLDS))


def sample_of(bank: PreparedBank, seed: int = 0) -> np.ndarray:
    """Draw targets of the gallery of `bank` [n, d] at random with `seed`."""
    gallery = bank.require_targets()
    if gallery.rows < 2:
        raise InputError(
            f"{gallery.name} has one row; hubness needs at least 2 targets"
        )
    rng = np.random.default_rng([seed, 1])
    return draw_sample(gallery, 2 * fit_rows(bank), bank.metric, rng)


def answers_of(bank: PreparedBank, numbers: np.ndarray) -> np.ndarray:
    """Return the targets that `PreparedBank.known_answers` calls `numbers` [p]: [p, d]."""
    if bank.pairs is not None and bank.target_bank is not None:
        gold: np.ndarray = bank.target_bank[numbers]
        return gold
    clicked, place = np.unique(numbers, return_inverse=True)
    rows = take_rows(bank.require_targets(), clicked, bank.metric)
    return rows[place.reshape(-1)]


def pairs_of(
    bank: PreparedBank, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pairs in the `rows` of a bank with known answers.

    Returns:
        Queries [p, d], the place of each one's target [p] among those asked for, and these [c, d].
    """
    assert bank.known_answers is not None
    rows = rows[bank.known_answers[rows] >= 0]
    numbers, place = np.unique(bank.known_answers[rows], return_inverse=True)
    return bank.query_bank[rows], place.reshape(-1), answers_of(bank, numbers)


def with_rows(targets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add to `targets` [n, d] those of `rows` [p, d] that are not among them, once each.

    Returns:
        All of them, and the place of each row [p].
    """
    places = {row.tobytes(): place for place, row in enumerate(targets)}
    added = list[int]()
    columns = np.empty(len(rows), np.int64)
    for number, row in enumerate(rows):
        place = len(targets) + len(added)
        columns[number] = places.setdefault(row.tobytes(), place)
        if columns[number] == place:
            added.append(number)
    whole = np.concatenate([targets, rows[np.array(added, np.int64)]])
    return whole, columns


def training_bank(
    bank: PreparedBank, rows: np.ndarray, targets: np.ndarray, seed: int
) -> PreparedBank:
    """Return `FIT_ROWS` of the `rows` of a bank, with as much of the target bank, against `targets` [n, d]."""
    limit = fit_rows(bank)
    seen = np.sort(rows[np.random.default_rng(seed).permutation(len(rows))[:limit]])
    target_bank = bank.target_bank
    if target_bank is not None and bank.pairs is not None:
        target_bank = target_bank[np.unique(bank.pairs[seen])]
    elif target_bank is not None:
        order = np.random.default_rng(seed).permutation(len(target_bank))
        target_bank = target_bank[order[:limit]]
    quiet = bank.compute.without_progress
    vectors = as_vectors(targets, "targets")
    return PreparedBank(
        bank.query_bank[seen], bank.metric, quiet, target_bank, targets=vectors
    )


OffsetsAndMap: TypeAlias = tuple[np.ndarray | float, QueryMap | None]
"""The offsets of the targets that queries are tried among, [n], and what maps the queries."""

Candidate: TypeAlias = Callable[
    [PreparedBank, PreparedBank, np.ndarray], Sequence[OffsetsAndMap]
]
"""What is tried: one correction, or several. It gets the bank that it is fitted on, against the targets that are tried,
the whole bank, and the rows of the whole bank that teach."""


def uncorrected(
    train: PreparedBank, bank: PreparedBank, teach: np.ndarray
) -> list[OffsetsAndMap]:
    """A `Candidate`: no correction."""
    return [(0.0, None)]


def fitted_by(method: Method) -> Candidate:
    """Return the candidate that fits a method on what each fold leaves."""
    return lambda train, bank, teach: [(method.raw_offsets(train), None)]


def as_it_is(model: OffsetModel) -> Candidate:
    """Return the candidate that is a model, whatever the fold."""

    def candidate(
        train: PreparedBank, bank: PreparedBank, teach: np.ndarray
    ) -> list[OffsetsAndMap]:
        offsets = model.raw_offsets(train.require_targets(), train.compute)
        return [(offsets, model.query_map)]

    return candidate


@dataclass(frozen=True, eq=False)
class Margins:
    """The ranks of each held-out query under each candidate: [c, q].

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
        """Return the standard error of the change of the skewness from configuration `before` to `after`: a bootstrap
        of the queries, which are the same ones."""
        rng = np.random.default_rng(0)
        count = self.hits.shape[1]
        changes = []
        for _ in range(RESAMPLES):
            rows = rng.integers(0, count, count)
            first = k_occurrence(self.hits[before, rows], self.targets)
            second = k_occurrence(self.hits[after, rows], self.targets)
            changes.append(skewness(second) - skewness(first))
        return float(np.std(changes))


def cross_validate(
    candidates: Sequence[Candidate],
    bank: PreparedBank,
    folds: Sequence[Fold],
    sample: np.ndarray | None = None,
) -> Margins:
    """Fit each candidate on what each fold leaves, and try it on what the fold holds out.

    The folds are the outer loop, so that each is multiplied once.

    Args:
        candidates: What is tried.
        bank: The bank, with its gallery.
        folds: Those of the bank.
        sample: Targets that all queries are tried among [s, d]; by default `sample_of` the gallery.
    """
    if sample is None:
        sample = sample_of(bank)
    total = len(folds) * len(candidates)
    by_fold = list[list[np.ndarray]]()
    gaps = list[float]()
    for number, fold in enumerate(folds):
        targets, gold = sample, None
        if bank.known_answers is not None:
            # The gallery holds what held-out queries ask for.
            own = answers_of(bank, bank.known_answers[fold.test])
            targets, gold = with_rows(sample, own)
        train = training_bank(bank, fold.train, targets, number)
        trial = _FoldTrial(train, bank.query_bank[fold.test], len(sample), gold)
        gaps.append(float((trial.nearest[:, 0] - trial.nearest[:, -1]).mean()))
        tried = list[tuple[np.ndarray, ...]]()
        for place, candidate in enumerate(candidates):
            tried += trial.measure(candidate(train, bank, fold.teach))
            done = number * len(candidates) + place + 1
            bank.compute.report("trying candidates", done, total)
        by_fold.append([np.stack(arrays) for arrays in zip(*tried, strict=True)])
    joined = [np.concatenate(arrays, axis=1) for arrays in zip(*by_fold, strict=True)]
    return Margins(len(sample), max(float(np.mean(gaps)), 1e-12), *joined)


class _FoldTrial:
    """The held-out `queries` [h, d] of one fold among the targets of `train`, of which the first `sampled` were drawn.

    gold: The column of each query's answer [h], None without answers.
    """

    def __init__(
        self,
        train: PreparedBank,
        queries: np.ndarray,
        sampled: int,
        gold: np.ndarray | None,
    ):
        self._train = train
        self._queries = queries
        self._sampled = sampled
        self._gold = gold
        self._similarities = self._multiply(queries)
        few = min(2, sampled)
        self.nearest = topk(self._similarities[:, :sampled], few)[0]

    def _multiply(self, queries: np.ndarray) -> np.ndarray:
        similarities = Similarities(queries, self._train.metric, self._train.compute)
        return dense(similarities, self._train.require_targets())

    def measure(
        self, corrections: Sequence[OffsetsAndMap]
    ) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield hits and costs under each correction and, with known answers, margin, right and rank."""
        mapped = self._similarities
        last = None
        for offsets, query_map in corrections:
            if query_map is not last:  # several offsets share one map
                last = query_map
                mapped = self._similarities
                if query_map is not None:
                    mapped = self._multiply(query_map(self._queries))
            scores = mapped + offsets
            count = min(OCCURRENCE, max(self._sampled // 4, 1))
            hits = topk(scores[:, : self._sampled], count)[1]
            first = np.take_along_axis(self._similarities, hits[:, :1], axis=1)[:, 0]
            costs = self.nearest[:, 0] - first
            if self._gold is None:
                yield hits, costs
            else:
                yield hits, costs, *_measure_gold(scores, self._gold)


def _measure_gold(scores: np.ndarray, gold: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return margin, right and rank of the targets in the columns `gold` [p]; `scores` [p, n] are overwritten."""
    rows = np.arange(len(gold))
    score = scores[rows, gold]
    greater = (scores > score[:, None]).sum(axis=1)
    equal = (scores == score[:, None]).sum(axis=1)
    scores[rows, gold] = -np.inf
    return score - scores.max(axis=1), (greater == 0) / equal, greater + (equal + 1) / 2


@dataclass(frozen=True)
class Figures:
    """A correction on held-out queries, in figures.

    method, parameters: Those of the correction; "none" is no correction.
    skewness: Of the k-occurrence.
    cost: Mean fall of the similarity of the first target, as a share of the mean distance between the two nearest.
    largest: The share of the queries that finds the worst hub.
    never: The share of the targets tried that no query finds.
    right: R@1 of no correction and of this; None without known answers.
    rank: Geometric mean rank of the queries' own targets; None without known answers.
    occurrences: How many of the targets tried have the k-occurrence N, by N.
    """

    method: str
    parameters: Mapping[str, Setting]
    queries: int
    skewness: float
    cost: float
    largest: float
    never: float
    right: Side | None = None
    rank: float | None = None
    occurrences: Mapping[int, int] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        margins: Margins,
        number: int,
        method: str = "none",
        parameters: Mapping[str, Setting] | None = None,
        **fields: Any,
    ) -> Self:
        """Return the figures of candidate `number` in `margins` against number 0, with the `fields` of a subclass."""
        occurrence = k_occurrence(margins.hits[number], margins.targets)
        costs = margins.costs[number]
        rank = None
        if margins.ranks is not None:
            rank = float(np.exp(np.log(margins.ranks[number]).mean()))
        return cls(
            method=method,
            parameters=parameters or {},
            queries=len(costs),
            skewness=skewness(occurrence),
            cost=float(costs.mean() / margins.gap),
            largest=float(occurrence.max() / len(costs)),
            never=float((occurrence == 0).mean()),
            right=change_of(margins, 0, number),
            rank=rank,
            occurrences=count_targets(occurrence),
            **fields,
        )

    @property
    def recall(self) -> float | None:
        """R@1, 0 to 1."""
        return None if self.right is None else self.right.after

    @property
    def change(self) -> Figure | None:
        """The change of R@1 over no correction, with its interval."""
        return None if self.right is None else self.right.change

    @property
    def name(self) -> str:
        """The method with its parameters."""
        return describe_method(self.method, self.parameters)

    def figures(self) -> str:
        """Return the figures in one line."""
        text = f"{self.name:34s} skewness {self.skewness:6.2f}  cost {self.cost:5.2f}"
        right = self.right
        if right is not None:
            change = f"{100 * right.change.value:+.1f} +- {196 * right.error:.1f}"
            text += f"  R@1 {100 * right.after:5.1f} ({change})"
            text += f"  mean rank {self.rank:.2f}"
        return text


def change_of(
    margins: Margins, first: int, second: int, what: str = "queries"
) -> Side | None:
    """Return R@1 under the configurations number `first` and `second`, for queries called `what`. None without known
    answers."""
    right = margins.right
    return None if right is None else Side.of(right[first], right[second], what)
