"""`PreparedBank`: checked queries, what is known of their answers, and the gallery once it is known."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hubplugin.bank.texts import list_first
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
from hubplugin.recording import is_number
from hubplugin.vectors import (
    Directed,
    Scannable,
    VectorLike,
    Vectors,
    as_vectors,
    draw_sample,
    fingerprint,
    locate_rows,
    to_tempfile,
)

logger = logging.getLogger(__name__)

SPREAD_SAMPLE = 4_096
"""Targets of which the spread of similarities is taken. On six sets (text and code, text and image, two languages, a
query log) these move it by at most 0.03 %, and which `SURVEYED` queries of the bank are drawn by at most 1.7 %. R@1 of
the default is the same as with all targets (benchmarks/settings.py)."""

SURVEYED = 512
"""Bank queries that the kind of a bank is judged by: the spacing ratio then has a standard error of about 0.05."""

SPACINGS = 10
"""Gaps between neighbours in a query's list that the spacing ratio reads: the first, and those it is compared with."""


def spacing_ratio(largest: np.ndarray) -> float:
    """Return how far the nearest target stands out: about 1 and below where answers are elsewhere, above 1 in a log.

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


@dataclass(frozen=True, eq=False)
class Survey:
    """The nearest targets of the queries `PreparedBank.surveyed`.

    largest: The `SPACINGS` + 1 largest similarities, the largest first [q, k].
    nearest: The row of the nearest target [q].
    """

    largest: np.ndarray
    nearest: np.ndarray


@dataclass(frozen=True, eq=False)
class Whole:
    """A gallery that workers have read, where `PreparedBank.targets` is a sample of it.

    count: Targets with a direction. zeros: Zero vectors beside these. survey: As in `PreparedBank`. answers: The
    answers of the bank; None where nobody asks.
    """

    count: int
    zeros: int
    survey: Survey
    answers: Answers | None


@dataclass(frozen=True, eq=False)
class PreparedBank:
    """Checked queries, what is known of their answers, and the gallery once it is known.

    Everything that tries or fits a correction takes this. A fold or a sample is a prepared bank with fewer rows.

    query_bank: [m, d], at unit length where the metric is cosine, as is target_bank.
    target_bank: Vectors of answers [p, d].
    pairs: The row of the target bank that belongs to each query, int [m].
    clicks: The row of the gallery that belongs to each query, or the id in a store; -1 for none.
    targets: The gallery, without zero vectors where the metric is cosine.
    whole: What workers found, where `targets` are a sample of the gallery.
    rows: The row of each query in what was given, int [m]; None where they were put together.
    """

    query_bank: np.ndarray
    metric: Metric
    compute: Compute
    target_bank: np.ndarray | None = None
    pairs: np.ndarray | None = None
    clicks: np.ndarray | None = None
    targets: Vectors | None = None
    whole: Whole | None = None
    rows: np.ndarray | None = None

    def against(
        self,
        targets: VectorLike,
        ids: Mapping[int | str, int] | None = None,
        *,
        trusted: bool = False,
    ) -> PreparedBank:
        """Return this bank with a gallery, which is read once for zero vectors if the metric is cosine.

        Args:
            targets: The gallery [n, d].
            ids: The row of each id, where a store was read.
            trusted: Does not look for zero vectors: a fit raises ZeroVector for one.

        Raises:
            InputError: The gallery has other dimensions, or lacks what was clicked.
        """
        clicks = self.clicks
        if clicks is not None and ids is None and isinstance(targets, Scannable):
            targets, ids = read_store(targets, clicks)
        whole = as_vectors(targets, "targets")
        if whole.dim != self.query_bank.shape[1]:
            raise InputError(
                f"{whole.name} has {whole.dim} dimensions, the query bank has {self.query_bank.shape[1]}; embed both "
                "with the same model"
            )
        gallery = whole if trusted else Directed.of(whole, self.metric)
        if clicks is not None:
            clicks = _rows_of(clicks, whole.rows, ids)
            if not (clicks >= 0).any():
                raise InputError(
                    f"answers: none of what they name is in {whole.name}; one for each query, they are ids"
                )
            clicks = locate_rows(gallery, clicks)
        return replace(self, targets=gallery, clicks=clicks)

    def with_pairs(self, pairs: PreparedBank) -> PreparedBank:
        """Return this bank with the queries and clicks of `pairs` behind its own."""
        clicks = [
            np.full(len(part.query_bank), -1) if part.clicks is None else part.clicks
            for part in (self, pairs)
        ]
        queries = np.concatenate([self.query_bank, pairs.query_bank])
        clicked = np.concatenate(clicks)
        return replace(self, query_bank=queries, clicks=clicked, rows=None)

    def take(self, rows: np.ndarray) -> PreparedBank:
        """Return this bank with the queries `rows` alone."""
        pairs = None if self.pairs is None else self.pairs[rows]
        clicks = None if self.clicks is None else self.clicks[rows]
        return replace(
            self,
            query_bank=self.query_bank[rows],
            pairs=pairs,
            clicks=clicks,
            rows=None,
        )

    @property
    def known_answers(self) -> np.ndarray | None:
        """The row of target bank or gallery that each query asks for, -1 where nothing is known."""
        return self.clicks if self.pairs is None else self.pairs

    def require_targets(self) -> Vectors:
        """Return the gallery. Raises InputError without one."""
        if self.targets is None:
            raise InputError(
                "this is fitted against the gallery, and none was given: pass ",
                Parameter("targets"),
            )
        return self.targets

    @property
    def count(self) -> int:
        """The number of targets with a direction in the whole gallery."""
        if self.whole is not None:
            return self.whole.count
        return self.require_targets().rows

    @property
    def zeros(self) -> int:
        """The number of zero vectors in the gallery, which have no cosine."""
        if self.whole is not None:
            return self.whole.zeros
        return self.targets.left_out if isinstance(self.targets, Directed) else 0

    @cached_property
    def same(self) -> np.ndarray:
        """The first of the bank's queries that is the same as each: int64 [m]."""
        first: dict[bytes, int] = {}
        numbers = np.empty(len(self.query_bank), np.int64)
        for number, row in enumerate(self.query_bank + 0.0):  # makes -0 the 0 it equals
            numbers[number] = first.setdefault(row.tobytes(), number)
        return numbers

    @cached_property
    def distinct(self) -> np.ndarray:
        """The rows of the queries that are no copy of an earlier one, in order."""
        return np.unique(self.same)

    @cached_property
    def fingerprint(self) -> str:
        """The name of both banks."""
        return fingerprint(self.query_bank, self.target_bank)

    @cached_property
    def answer_vectors(self) -> Vectors:
        """The target bank as columns beside the targets: one object, so that products with it can be held."""
        if self.target_bank is None:
            raise InputError(
                "the bank lacks the vectors of answers: pass ", Parameter("answers")
            )
        return as_vectors(self.target_bank, "target bank")

    @cached_property
    def surveyed(self) -> np.ndarray:
        """A sample of the queries [q, d]."""
        order = np.random.default_rng(0).permutation(len(self.query_bank))
        return self.query_bank[np.sort(order[:SURVEYED])]

    @cached_property
    def survey(self) -> Survey:
        """The nearest targets of `surveyed` in the whole gallery."""
        if self.whole is not None:
            return self.whole.survey
        return survey(self, self.require_targets())

    @cached_property
    def deviation(self) -> float:
        """The standard deviation of the similarities between bank and gallery, of a sample of both."""
        rng = np.random.default_rng(0)
        sample = draw_sample(self.require_targets(), SPREAD_SAMPLE, self.metric, rng)
        of_prepared = Metric.DOT if self.metric is Metric.COSINE else self.metric
        quiet = self.compute.without_progress
        similarities = Similarities(self.surveyed, of_prepared, quiet)
        return float(dense(similarities, as_vectors(sample, "targets")).std())

    @cached_property
    def answers_are_elsewhere(self) -> bool:
        """True if the target bank holds the answers: the nearest target stands out more there than in the gallery.

        Without a target bank nothing says so, and answers are left out: on seventeen settings that costs the default
        0.06 points of R@1 on average, while keeping them costs 3.3 on the worst log (benchmarks/settings.py).
        """
        # Too few answers have gaps to compare.
        if self.target_bank is None or len(self.target_bank) <= SPACINGS:
            return False
        in_target_bank = spacing_ratio(survey(self, self.answer_vectors).largest)
        return in_target_bank > spacing_ratio(self.survey.largest)

    @cached_property
    def answers(self) -> Answers | None:
        """The answers of the bank as they look in gallery and target bank."""
        if self.whole is not None:
            return self.whole.answers
        columns = [self.require_targets()]
        if self.target_bank is not None:
            columns.append(self.answer_vectors)
        similarities = Similarities(self.query_bank, self.metric, self.compute)
        return find_answers(similarities, columns)


def survey(bank: PreparedBank, targets: Vectors) -> Survey:
    """Find the nearest of `targets` for a sample of `bank`."""
    top = TopK(SPACINGS + 1)
    label = "looking at the bank"
    search(bank.surveyed, targets, bank.metric, bank.compute, top, label=label)
    return Survey(top.scores[0], top.rows[0, :, 0])


def require_rows(
    rows: np.ndarray, lowest: int, count: int, name: str, where: str
) -> None:
    """Raise InputError if one of `rows`, which errors call `name`, is outside `lowest` ... `count` - 1."""
    outside = np.flatnonzero((rows < lowest) | (rows >= count))
    if outside.size:
        raise InputError(
            f"{name}: bank query {outside[0]} belongs to row {rows[outside[0]]}, which is outside the {where} of "
            f"{count} rows"
        )


def _rows_of(
    clicks: np.ndarray, count: int, ids: Mapping[int | str, int] | None
) -> np.ndarray:
    """Return the rows [m] of what was clicked, -1 for nothing. The log names ids that are not in the store."""
    if ids is None:
        if clicks.dtype.kind not in "iu":
            raise InputError(
                "answers must be rows of the gallery, which are numbers, or vectors; -1 for none"
            )
        require_rows(clicks, -1, count, "answers", "gallery")
        return clicks.astype(np.int64)
    # Beside texts, numpy makes a text of -1.
    clicked = [id for id in clicks.tolist() if id not in (-1, "-1")]
    unknown = [id for id in clicked if id not in ids]
    if unknown:
        message = "%d of %d clicked ids are not in the store, and are left out: %s"
        logger.warning(message, len(unknown), len(clicked), list_first(unknown))
    return np.array([ids.get(id, -1) for id in clicks.tolist()], np.int64)


def places(
    ids: Sequence[int | str], first: int, clicked: Container[int | str]
) -> dict[int | str, int]:
    """Return the rows of the `ids` that were `clicked`; the first id has the row `first`.

    Clicks have digits as a number, a store of texts has them as a text.
    """
    rows: dict[int | str, int] = {}
    by_number: dict[int | str, int] = {}
    for row, id in enumerate(ids, start=first):
        if id in clicked:
            rows[id] = row
        if isinstance(id, str) and is_number(id) and int(id) in clicked:
            by_number[int(id)] = row
    return rows | by_number


def read_store(
    store: Scannable, clicks: np.ndarray
) -> tuple[Vectors, dict[int | str, int]]:
    """Read `store` once. Returns its vectors, and the rows of the ids in `clicks` [m]."""
    rows: dict[int | str, int] = {}
    wanted = set(clicks.tolist())

    def read() -> Iterator[np.ndarray]:
        first = 0
        for batch in store.scan():
            rows.update(places(batch.ids, first, wanted))
            first += len(batch.ids)
            yield batch.vectors

    return to_tempfile(read(), "targets"), rows
