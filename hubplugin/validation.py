"""Cross-validation: does a correction help queries that its fit has not seen?

The guard, the choice of a query map, `refit` and `diagnose` all call `cross_validate`.
With known answers, each query has a margin: the score of its own target minus that of
the best other target. Without known answers, only hubness can be measured.

A fold fits a correction on at most `FIT_ROWS` rows of the bank and twice as many
targets. All folds together try at most `HELD_OUT` queries, drawn at random. So the cost
does not grow with the gallery.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from typing_extensions import Self

from hubplugin.bank import PreparedBank, compare
from hubplugin.compute import topk
from hubplugin.errors import InputError
from hubplugin.measures.hubness import count_targets, k_occurrence, skewness
from hubplugin.measures.significance import Side
from hubplugin.methods import Method
from hubplugin.model import OffsetModel, QueryMap, Setting, describe_method
from hubplugin.vectors import as_vectors, draw_sample, take_rows

FOLDS = 5
"""The number of folds. Each fit keeps 4/5 of the bank, so that the best correction for
a fit is the best for the whole bank."""

FEWER_FOLDS = 3
"""The number of folds for figures that decide nothing."""

MEASURED_QUERIES = 1_000
"""The number of fitted and of held-out queries that suffice for such figures."""

HELD_OUT = 2_500
"""The most queries held out in all. For corrections that differ on 3 % of them, the
error of the difference is 0.35 points of R@1."""

FIT_ROWS = 2_048
"""The most bank rows in one fit."""

OCCURRENCE = 10
"""The k of the k-occurrence whose skewness measures hubness, as in DBSN and QB-Norm."""

RESAMPLES = 100
"""The number of bootstrap resamples of a skewness; its standard error is then known to
7 %."""


class Fold(NamedTuple):
    """The rows of a bank for one fold.

    train: The rows on which a correction may be fitted [s].
    test: The held-out rows, on which it is tried [h].
    teach: The rows that teach a map [p].
    """

    train: np.ndarray
    test: np.ndarray
    teach: np.ndarray


def make_folds(rows: np.ndarray, fold_of: np.ndarray) -> list[Fold]:
    """Make folds of the bank queries in `rows` [m].

    `fold_of` [m] has the fold in which each query is held out; a query with -1 is never
    held out, and all folds train on it. All folds together try at most `HELD_OUT`
    queries: each fold tries the first of its queries, in the order of `rows`.
    """
    count = int(fold_of.max()) + 1
    folds = []
    for number in range(count):
        train = np.sort(rows[fold_of != number])
        test = rows[fold_of == number][: HELD_OUT // count]
        folds.append(Fold(train, test, train))
    return folds


def folds_of(bank: PreparedBank, seed: int = 0, count: int = FOLDS) -> list[Fold]:
    """Split the distinct queries of a bank into folds.

    Duplicates are dropped, so no fold tries a query that its fit has seen. If answers
    are known, all wordings of a target are held out together, since one would give away
    the target of another.

    Args:
        bank: The bank.
        seed: The seed of the random order.
        count: The number of folds.

    Raises:
        InputError: There are too few distinct queries or targets to hold some out.
    """
    require_enough(len(bank.distinct))
    rng = np.random.default_rng(seed)
    if bank.known_answers is None:
        rows = rng.permutation(bank.distinct)
        return make_folds(rows, np.arange(len(rows)) % count)
    answered, place = _order_by_target(bank.distinct, bank.known_answers, rng)
    # Queries without an answer are never held out.
    unanswered = np.setdiff1d(bank.distinct, answered)
    fold_of = np.concatenate([place % count, np.full(len(unanswered), -1)])
    return make_folds(np.concatenate([answered, unanswered]), fold_of)


def folds_among(bank: PreparedBank, may_test: np.ndarray) -> list[Fold]:
    """Split the distinct queries of a bank into folds that hold out only some of them.

    Queries are held out one by one, so other wordings of the same target may stay in
    the fit. `may_test`, bool [m], is True for each query that may be held out.
    """
    rows = np.random.default_rng(0).permutation(bank.distinct)
    is_tested = may_test[rows]
    number = np.cumsum(is_tested) - 1  # of each query among those that may be held out
    return make_folds(rows, np.where(is_tested, number % FOLDS, -1))


def paraphrase_folds(bank: PreparedBank, seed: int = 0) -> list[Fold]:
    """Draw folds that hold out one wording of a target while others stay in the fit.

    At most `fit_rows` queries are drawn. From more, a fit would draw a sample, which
    might lack the other wordings.
    """
    answers = bank.require_answers()
    rng = np.random.default_rng(seed)
    rows, _ = _order_by_target(bank.distinct, answers, rng)
    rows = rows[: fit_rows(bank)]
    return make_folds(rows, folds_within(answers[rows], FOLDS))


def _order_by_target(
    rows: np.ndarray, answers: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Group the queries with known answers by target, with the targets in random order.

    Returns:
        The rows of the queries [m], and the place of each query's target in the random
        order of the targets [m]. Both are sorted by place.

    Raises:
        InputError: The answers name too few targets.
    """
    answered = rows[answers[rows] >= 0]
    numbers, target = np.unique(answers[answered], return_inverse=True)
    if len(numbers) < 2 * FOLDS:
        raise InputError(
            f"answers name {len(numbers)} targets; holding some of them out needs at "
            f"least {2 * FOLDS}"
        )
    # The position of each target in a random permutation, for each query.
    place = np.argsort(rng.permutation(len(numbers)))[target]
    return answered[np.argsort(place, kind="stable")], np.sort(place)


def folds_within(answer: np.ndarray, count: int) -> np.ndarray:
    """Spread the wordings of each target over `count` folds: return the folds [m].

    A query with the `answer` -1, or with an answer that no other query has, gets -1.
    """
    rows_of = defaultdict[int, list[int]](list)
    for row, target in enumerate(answer.tolist()):
        rows_of[target].append(row)
    rows_of.pop(-1, None)
    fold_of = np.full(len(answer), -1)
    for first_fold, rows in enumerate(rows_of.values()):
        if len(rows) > 1:
            # Successive targets begin at successive folds, so that all folds get about
            # the same number of queries.
            fold_of[rows] = (first_fold + np.arange(len(rows))) % count
    return fold_of


def require_enough(distinct: int) -> None:
    """Raise InputError if `distinct` bank queries are too few to hold some out."""
    if distinct < 2 * FOLDS:
        raise InputError(
            f"query bank has {distinct} distinct queries; holding some of them out needs "
            f"at least {2 * FOLDS}, so that each of {FOLDS} folds has 2 of them"
        )


def fit_rows(bank: PreparedBank) -> int:
    """Return `FIT_ROWS`, or fewer if memory does not suffice.

    A fit of r rows has 2 r targets and at most r rows of the target bank, so it holds
    about 5 r^2 float32 similarities. A Sinkhorn fit also holds exponentials, as far as
    memory has room. The limit of 32 r^2 bytes leaves 12 r^2 for them.
    """
    return min(FIT_ROWS, max(math.isqrt(bank.compute.bytes() // 32), 2 * FOLDS))


def sample_of(bank: PreparedBank, seed: int = 0) -> np.ndarray:
    """Draw targets [n, d] from the gallery. Raises InputError for fewer than two."""
    gallery = bank.require_targets()
    if gallery.rows < 2:
        raise InputError(
            f"{gallery.name} has one row; hubness needs at least 2 targets"
        )
    rng = np.random.default_rng([seed, 1])
    return draw_sample(gallery, 2 * fit_rows(bank), bank.metric, rng)


def answers_of(bank: PreparedBank, numbers: np.ndarray) -> np.ndarray:
    """Return the vectors [p, d] of the known answers `numbers` [p].

    The numbers are rows of the target bank if the bank has pairs, else of the gallery.
    """
    if bank.pairs is not None and bank.target_bank is not None:
        answers: np.ndarray = bank.target_bank[numbers]
        return answers
    # `take_rows` needs ascending rows, and reads each row once.
    rows, place = np.unique(numbers, return_inverse=True)
    vectors = take_rows(bank.require_targets(), rows, bank.metric)
    return vectors[place]


def pairs_of(
    bank: PreparedBank, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pairs in the `rows` of a bank with known answers.

    Returns:
        The queries [p, d], the row of each query's target in the third array [p], and
        the distinct targets of these queries [c, d].
    """
    answers = bank.require_answers()
    rows = rows[answers[rows] >= 0]
    numbers, place = np.unique(answers[rows], return_inverse=True)
    return bank.query_bank[rows], place, answers_of(bank, numbers)


def with_rows(targets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Append to `targets` [n, d] each of `rows` [p, d] that they lack, once.

    Returns:
        The extended targets, and the place of each of `rows` in them [p].
    """
    # Adding 0.0 turns -0.0 into 0.0, so that equal vectors have equal bytes.
    place_of = {target.tobytes(): place for place, target in enumerate(targets + 0.0)}
    lacking = list[np.ndarray]()
    places = []
    for row in rows + 0.0:
        next_place = len(targets) + len(lacking)
        place = place_of.setdefault(row.tobytes(), next_place)
        if place == next_place:
            lacking.append(row)
        places.append(place)
    if lacking:
        targets = np.concatenate([targets, lacking])
    return targets, np.array(places, np.int64)


def training_bank(
    bank: PreparedBank, rows: np.ndarray, targets: np.ndarray, seed: int
) -> PreparedBank:
    """Return a bank of at most `fit_rows` of the `rows`, against `targets` [n, d].

    Its target bank holds the answers of these rows or, without pairs, at most
    `fit_rows` random ones.
    """
    limit = fit_rows(bank)
    fitted = np.sort(rows[np.random.default_rng(seed).permutation(len(rows))[:limit]])
    target_bank = bank.target_bank
    if target_bank is not None:
        if bank.pairs is not None:
            members = np.unique(bank.pairs[fitted])
        else:
            members = np.random.default_rng(seed).permutation(len(target_bank))[:limit]
        target_bank = target_bank[members]
    return PreparedBank(
        bank.query_bank[fitted],
        bank.metric,
        bank.compute.without_progress,
        target_bank,
        targets=as_vectors(targets, "targets"),
    )


OffsetsAndMap: TypeAlias = tuple[np.ndarray | float, QueryMap | None]
"""The offsets [n] of the targets in a trial, and the query map or None."""

Candidate: TypeAlias = Callable[
    [PreparedBank, PreparedBank, np.ndarray], Sequence[OffsetsAndMap]
]
"""A function that returns one or more corrections to try.

Its arguments are the training bank of a fold, whose gallery has the targets of the
trial; the whole bank; and the rows of the whole bank that teach a map."""


def uncorrected(
    train: PreparedBank, bank: PreparedBank, teach: np.ndarray
) -> list[OffsetsAndMap]:
    """Return no correction. This function is a `Candidate`."""
    return [(0.0, None)]


def fitted_by(method: Method) -> Candidate:
    """Return a candidate that fits `method` on the training part of each fold."""
    return lambda train, bank, teach: [(method.raw_offsets(train), None)]


def as_it_is(model: OffsetModel) -> Candidate:
    """Return a candidate with the offsets and map of `model` in every fold."""

    def candidate(
        train: PreparedBank, bank: PreparedBank, teach: np.ndarray
    ) -> list[OffsetsAndMap]:
        offsets = model.raw_offsets(train.require_targets(), train.compute)
        return [(offsets, model.query_map)]

    return candidate


@dataclass(frozen=True, eq=False)
class Margins:
    """The results of each held-out query under each candidate: arrays [c, q].

    `margins`, `right` and `ranks` are None without known answers.

    targets: The number of sampled targets.
    hits: The numbers of the first k sampled targets [c, q, k].
    margins: The score of the query's own target minus that of the best other target.
    right: 1 if the own target comes first, 1/t if it ties with t - 1 others, else 0.
    ranks: The expected rank of the own target if ties are broken at random.
    """

    targets: int
    hits: np.ndarray
    margins: np.ndarray | None = None
    right: np.ndarray | None = None
    ranks: np.ndarray | None = None

    def noise(self, before: int, after: int) -> float:
        """Return the standard error of the change of skewness between two candidates.

        The bootstrap over queries is paired: both candidates rank the same resample.
        """
        rng = np.random.default_rng(0)
        count = self.hits.shape[1]
        changes = []
        for _ in range(RESAMPLES):
            rows = rng.integers(0, count, count)
            hubness_before = k_occurrence(self.hits[before, rows], self.targets)
            hubness_after = k_occurrence(self.hits[after, rows], self.targets)
            changes.append(skewness(hubness_after) - skewness(hubness_before))
        return float(np.std(changes))


def cross_validate(
    candidates: Sequence[Candidate],
    bank: PreparedBank,
    folds: Sequence[Fold],
    sample: np.ndarray | None = None,
    hits: int = OCCURRENCE,
) -> Margins:
    """Fit each candidate on one part of the bank, and try it on the rest.

    The loop over folds is the outer one, so that all candidates share the similarities
    of a fold.

    Args:
        candidates: The corrections.
        bank: The bank, with its gallery.
        folds: The folds of the bank.
        sample: The targets among which all queries are tried [s, d]; by default drawn
            by `sample_of`. Each fold adds the answers of its held-out queries.
        hits: The number of hits to keep, 0 if hubness does not matter.
    """
    if sample is None:
        sample = sample_of(bank)
    # In a tiny sample, ten targets would be a large part of it.
    count = min(hits, max(len(sample) // 4, 1))
    done = 0
    by_fold = []
    for number, fold in enumerate(folds):
        targets = sample
        gold = None
        if bank.known_answers is not None:
            # The sample may lack the answers of held-out queries.
            answers = answers_of(bank, bank.known_answers[fold.test])
            targets, gold = with_rows(sample, answers)
        train = training_bank(bank, fold.train, targets, number)
        queries = bank.query_bank[fold.test]
        raw = compare(queries, targets, bank.metric, train.compute)
        results = []
        for candidate in candidates:
            corrections = candidate(train, bank, fold.teach)
            for scores in _score(raw, queries, train, corrections):
                arrays = [np.empty((len(queries), 0))]
                if count:
                    # The added answers are left out, since they are no random sample.
                    arrays = [topk(scores[:, : len(sample)], count)[1]]
                if gold is not None:
                    arrays += _measure_gold(scores, gold)
                results.append(arrays)
            done += 1
            bank.compute.report("trying candidates", done, len(folds) * len(candidates))
        by_fold.append([np.stack(arrays) for arrays in zip(*results, strict=True)])
    # Join the queries of all folds: hits, then margins, right and ranks if known.
    joined = [np.concatenate(arrays, axis=1) for arrays in zip(*by_fold, strict=True)]
    return Margins(len(sample), *joined)


def measure(
    candidates: Sequence[Candidate], bank: PreparedBank, sample: np.ndarray, seed: int
) -> Margins:
    """Try candidates for figures that decide nothing, at the cost of few fits.

    A bank with twice `MEASURED_QUERIES` is not divided into folds: one fit on half of
    these queries is tried on the other half.

    Args:
        candidates, bank, sample: As in `cross_validate`.
        seed: The seed of the random order.
    """
    rows = np.random.default_rng(seed).permutation(bank.distinct)
    fitted = rows[MEASURED_QUERIES : 2 * MEASURED_QUERIES]
    folds = [Fold(fitted, rows[:MEASURED_QUERIES], fitted)]
    if len(fitted) < MEASURED_QUERIES:
        folds = folds_of(bank, seed, FEWER_FOLDS)
    return cross_validate(candidates, bank, folds, sample)


def _score(
    raw: np.ndarray,
    queries: np.ndarray,
    train: PreparedBank,
    corrections: Sequence[OffsetsAndMap],
) -> Iterator[np.ndarray]:
    """Yield the scores [h, n] under each correction.

    Args:
        raw: The raw similarities [h, n].
        queries: The held-out queries [h, d].
        train: The training bank, with the targets of the trial.
        corrections: The corrections; those with the same map follow each other.
    """
    similarities = raw
    last_map = None
    for offsets, query_map in corrections:
        if query_map is None:
            similarities = raw
        elif query_map is not last_map:
            targets = train.require_targets()
            mapped = query_map(queries)
            similarities = compare(mapped, targets, train.metric, train.compute)
        last_map = query_map
        yield similarities + offsets


def _measure_gold(scores: np.ndarray, gold: np.ndarray) -> list[np.ndarray]:
    """Return margin, right and rank of each query's answer, as defined in `Margins`.

    Ties are broken at random: `right` is the expected share of first places, and `rank`
    is the expected rank.

    Args:
        scores: The scores [h, n], which are overwritten.
        gold: The column of each query's answer [h].
    """
    rows = np.arange(len(gold))
    score = scores[rows, gold]
    greater = (scores > score[:, None]).sum(axis=1)
    equal = (scores == score[:, None]).sum(axis=1)  # counts the answer itself
    right = (greater == 0) / equal
    rank = greater + (equal + 1) / 2
    scores[rows, gold] = -np.inf
    return [score - scores.max(axis=1), right, rank]


@dataclass(frozen=True)
class Figures:
    """The figures of a correction on held-out queries.

    method: The fitted method; "none" without a correction.
    parameters: The parameters of the method.
    queries: The number of held-out queries.
    skewness: The skewness of the k-occurrence.
    largest: The share of the queries that find the worst hub.
    never: The share of the sampled targets that no query finds.
    right: R@1 without and with the correction; None without known answers.
    rank: The geometric mean rank of the queries' own targets; None without known
        answers.
    occurrences: The number of sampled targets with the k-occurrence N, by N.
    """

    method: str
    parameters: Mapping[str, Setting]
    queries: int
    skewness: float
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
        """Return the figures of a candidate, compared with candidate 0.

        Args:
            margins: The margins of all candidates.
            number: The number of the candidate.
            method, parameters: The method of the candidate.
            **fields: The additional fields of a subclass.
        """
        occurrence = k_occurrence(margins.hits[number], margins.targets)
        queries = margins.hits.shape[1]
        rank = None
        if margins.ranks is not None:
            rank = float(np.exp(np.log(margins.ranks[number]).mean()))
        return cls(
            method=method,
            parameters=parameters or {},
            queries=queries,
            skewness=skewness(occurrence),
            largest=float(occurrence.max() / queries),
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
    def name(self) -> str:
        """The method with its parameters."""
        return describe_method(self.method, self.parameters)


def change_of(
    margins: Margins, before: int, after: int, what: str = "queries"
) -> Side | None:
    """Return R@1 of two candidates, and its change; None without known answers.

    `before` and `after` are numbers of candidates. `what` names the queries.
    """
    right = margins.right
    return None if right is None else Side.of(right[before], right[after], what)
