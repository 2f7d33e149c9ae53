"""`PreparedBank`: checked queries, known answers, and the gallery once it is known."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
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
from hubplugin.recording import plain_id
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
"""Targets from which `PreparedBank.deviation` is estimated.

On six sets (text and code, text and image, two languages, a query log) the sample of
targets moves the deviation by at most 0.03 %, and the sample of `SURVEYED` queries by at
most 1.7 %. R@1 of the default method is the same as with all targets
(benchmarks/settings.py)."""

SURVEYED = 512
"""Bank queries that the kind of a bank is judged by.

The spacing ratio then has a standard error of about 0.05."""

SPACINGS = 10
"""Gaps between neighbours in a query's list that the spacing ratio reads."""


def spacing_ratio(largest: np.ndarray) -> float:
    """Return how far the nearest target stands out, as a ratio of gaps.

    It is about 1 or less if answers are elsewhere, and above 1 in a log. With
    s_1 >= s_2 >= ... the similarities of one query, the gaps j (s_j - s_j+1) have one
    mean for all j if the upper end of their distribution is exponential (Renyi's
    representation of order statistics). If that end is shorter, the mean is less for
    small j. The ratio is the mean of the first gap over the mean of the others, over all
    queries, so it depends on neither scale nor metric. An answer makes the first gap
    larger. Return 1 for fewer than 3 targets, or if all other gaps are 0.

    Measured (benchmarks/settings.py): banks whose answers are elsewhere 0.60 to 0.95,
    logs 0.95 to 3.5, on text and code, text and images, and across languages.

    Args:
        largest: The `SPACINGS` + 1 largest similarities of each query, the largest
            first: [m, k].
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
    """A gallery that workers have read; `PreparedBank.targets` is then a sample of it.

    count: Targets with a direction.
    zeros: Zero vectors beside these.
    survey: As in `PreparedBank`.
    answers: The answers found by similarity; None if the method keeps answers, or if
        bank or gallery is too small for a log.
    """

    count: int
    zeros: int
    survey: Survey
    answers: Answers | None


@dataclass(frozen=True, eq=False)
class PreparedBank:
    """Checked queries, known answers, and the gallery once it is known.

    Everything that tries or fits a correction takes this. A fold or a sample is a
    prepared bank with fewer rows.

    query_bank: [m, d], at unit length if the metric is cosine, as is target_bank.
    target_bank: Vectors of answers [p, d].
    pairs: The row of the target bank that belongs to each query, int [m].
    clicks: The row of the gallery that belongs to each query, or the id in a store; -1
        for none.
    targets: The gallery, without zero vectors if the metric is cosine.
    whole: What workers found, if `targets` are a sample of the gallery.
    """

    query_bank: np.ndarray
    metric: Metric
    compute: Compute
    target_bank: np.ndarray | None = None
    pairs: np.ndarray | None = None
    clicks: np.ndarray | None = None
    targets: Vectors | None = None
    whole: Whole | None = None

    def against(
        self,
        targets: VectorLike,
        ids: Mapping[int | str, int] | None = None,
        *,
        trusted: bool = False,
    ) -> PreparedBank:
        """Return this bank with a gallery, read once for zero vectors under cosine.

        Args:
            targets: The gallery [n, d].
            ids: The row of each clicked id if the store was read already, as `places`
                gives them.
            trusted: Skip the search for zero vectors; a fit raises ZeroVector if there
                is one.

        Raises:
            InputError: The gallery has other dimensions, or lacks what was clicked.
        """
        clicks = self.clicks
        if clicks is not None and ids is None and isinstance(targets, Scannable):
            targets, ids = read_store(targets, clicks)
        whole = as_vectors(targets, "targets")
        dim = self.query_bank.shape[1]
        if whole.dim != dim:
            raise InputError(
                f"{whole.name} has {whole.dim} dimensions, the query bank has {dim}; "
                "embed both with the same model"
            )
        gallery = whole if trusted else Directed.of(whole, self.metric)
        if clicks is not None:
            clicks = locate_rows(gallery, _rows_of(clicks, whole, ids))
        return replace(self, targets=gallery, clicks=clicks)

    def with_pairs(self, pairs: PreparedBank) -> PreparedBank:
        """Return this bank with the queries and clicks of `pairs` behind its own.

        A bank without clicks has -1 for each query.
        """
        clicks = []
        for part in (self, pairs):
            unknown = np.full(len(part.query_bank), -1)
            clicks.append(unknown if part.clicks is None else part.clicks)
        queries = np.concatenate([self.query_bank, pairs.query_bank])
        clicked = np.concatenate(clicks)
        return replace(self, query_bank=queries, clicks=clicked)

    def take(self, rows: np.ndarray) -> PreparedBank:
        """Return this bank with only the queries in `rows`."""
        pairs = None if self.pairs is None else self.pairs[rows]
        clicks = None if self.clicks is None else self.clicks[rows]
        queries = self.query_bank[rows]
        return replace(self, query_bank=queries, pairs=pairs, clicks=clicks)

    @property
    def known_answers(self) -> np.ndarray | None:
        """The row of target bank or gallery that each query asks for, -1 if unknown."""
        return self.clicks if self.pairs is None else self.pairs

    def require_answers(self) -> np.ndarray:
        """Return the known answers [m]. Raises InputError without any."""
        answers = self.known_answers
        if answers is None:
            raise InputError(
                "it is not known what each query asks for: pass a Bank with ",
                Parameter("answers"),
                ", or pairs such as titles (docs/titles.md)",
            )
        return answers

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
        """The row of the first query that equals each query: int64 [m]."""
        return number_rows(self.query_bank)

    @cached_property
    def distinct(self) -> np.ndarray:
        """The rows of the queries that are no copy of an earlier one, in order."""
        return np.unique(self.same)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of query bank and target bank, which names them."""
        return fingerprint(self.query_bank, self.target_bank)

    def require_target_bank(self) -> np.ndarray:
        """Return the target bank. Raises InputError without one."""
        if self.target_bank is None:
            raise InputError(
                "the bank lacks the vectors of answers: pass ", Parameter("answers")
            )
        return self.target_bank

    @cached_property
    def answer_vectors(self) -> Vectors:
        """The target bank as `Vectors`, always the same: similarities are cached by it."""
        return as_vectors(self.require_target_bank(), "target bank")

    @property
    def similarities(self) -> Similarities:
        """The query bank, which is to be multiplied with targets."""
        return Similarities(self.query_bank, self.metric, self.compute)

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
        return self._survey(self.require_targets())

    def _survey(self, targets: Vectors) -> Survey:
        top = TopK(SPACINGS + 1)
        label = "looking at the bank"
        search(self.surveyed, targets, self.metric, self.compute, top, label=label)
        return Survey(top.scores[0], top.rows[0, :, 0])

    @cached_property
    def deviation(self) -> float:
        """The standard deviation of the similarities between bank and gallery.

        It is estimated from a sample of both.
        """
        rng = np.random.default_rng(0)
        sample = draw_sample(self.require_targets(), SPREAD_SAMPLE, self.metric, rng)
        of_prepared = Metric.DOT if self.metric is Metric.COSINE else self.metric
        quiet = self.compute.without_progress
        return float(compare(self.surveyed, sample, of_prepared, quiet).std())

    @cached_property
    def answers_are_elsewhere(self) -> bool:
        """True if the target bank holds the answers, not the gallery.

        The nearest target stands out more there than in the gallery. It is False without
        a target bank, so a fit leaves answers in the gallery out: on seventeen settings
        that costs the default 0.06 points of R@1 on average, while keeping them costs
        3.3 on the worst log (benchmarks/settings.py).
        """
        # Too few answers have gaps to compare.
        if self.target_bank is None or len(self.target_bank) <= SPACINGS:
            return False
        in_target_bank = spacing_ratio(self._survey(self.answer_vectors).largest)
        return in_target_bank > spacing_ratio(self.survey.largest)

    @cached_property
    def answers(self) -> Answers | None:
        """The answers found by similarity in gallery and target bank; None as in `Whole`."""
        if self.whole is not None:
            return self.whole.answers
        columns = [self.require_targets()]
        if self.target_bank is not None:
            columns.append(self.answer_vectors)
        return find_answers(self.similarities, columns)


def compare(
    queries: np.ndarray, targets: VectorLike, metric: Metric, compute: Compute
) -> np.ndarray:
    """Return the similarities of all queries [m, d] and all targets [n, d]: [m, n]."""
    similarities = Similarities(queries, metric, compute)
    return dense(similarities, as_vectors(targets, "targets"))


def number_rows(vectors: np.ndarray) -> np.ndarray:
    """Return the row of the first vector that equals each of `vectors`: int64 [m]."""
    first: dict[bytes, int] = {}
    numbers = np.empty(len(vectors), np.int64)
    for number, row in enumerate(vectors + 0.0):  # makes -0 the 0 it equals
        numbers[number] = first.setdefault(row.tobytes(), number)
    return numbers


def _rows_of(
    clicks: np.ndarray, gallery: Vectors, ids: Mapping[int | str, int] | None
) -> np.ndarray:
    """Return the row of the gallery that each query clicked [m], -1 for none.

    Ids that the gallery lacks count as none, and are named in the log. Raises InputError
    if it lacks all of them.
    """
    clicked = [id for id in clicks.tolist() if id != -1]
    if not clicked:
        raise InputError("answers: all of them are -1, which stands for none")
    if ids is None:
        if clicks.dtype.kind not in "iu":
            raise InputError(
                "answers must be rows of the gallery, which are numbers, or vectors; -1 "
                f"for none; given: {clicked[0]!r}"
            )
        outside = np.flatnonzero((clicks < -1) | (clicks >= gallery.rows))
        if outside.size:
            raise InputError(
                f"answers: bank query {outside[0]} belongs to row {clicks[outside[0]]}, "
                f"which is outside the gallery of {gallery.rows} rows"
            )
        return clicks.astype(np.int64)
    unknown = [id for id in clicked if id not in ids]
    example = next(iter(ids), None)
    if len(unknown) == len(clicked):
        raise InputError(
            f"answers: none of the ids that they name is in {gallery.name}: they are "
            f"such as {clicked[0]!r}, and its ids are such as {example!r}"
        )
    if unknown:
        message = (
            "%d of %d clicked ids are not in the store, and are left out: %s; its ids "
            "are such as %r"
        )
        first = list_first(unknown)
        logger.warning(message, len(unknown), len(clicked), first, example)
    known = {**ids, -1: -1}
    return np.array([known.get(id, -1) for id in clicks.tolist()], np.int64)


def places(
    ids: Sequence[int | str], first: int, clicked: Container[int | str]
) -> dict[int | str, int]:
    """Return the rows of the `ids` that were `clicked`; the first id has the row `first`.

    Digits count as a number, which clicks and stores may write as texts. The id of row 0
    is always returned, as an example of the store's ids.
    """
    rows: dict[int | str, int] = {}
    for row, id in enumerate(map(plain_id, ids), start=first):
        if id in clicked or not row:
            rows[id] = row
    return rows


def read_store(
    store: Scannable, clicks: np.ndarray
) -> tuple[Vectors, dict[int | str, int]]:
    """Read a store once. Return its vectors, and the rows of the ids in `clicks` [m]."""
    rows: dict[int | str, int] = {}
    wanted = set(clicks.tolist())

    def read() -> Iterator[np.ndarray]:
        first = 0
        for batch in store.scan():
            rows.update(places(batch.ids, first, wanted))
            first += len(batch.ids)
            yield batch.vectors

    return to_tempfile(read(), "targets"), rows


def find_missing(store: Scannable, clicked: Iterable[int | str]) -> set[int | str]:
    """Read a store. Return the `clicked` ids that are not in it."""
    missing = set(clicked)
    for batch in store.scan():
        missing -= places(batch.ids, 0, missing).keys()
    return missing
