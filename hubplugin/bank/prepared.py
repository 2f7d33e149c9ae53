"""`PreparedBank`: checked queries, known answers and, once it was read, the gallery."""

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
"""The number of targets from which `PreparedBank.deviation` is estimated.

The sample of targets moves the deviation by at most 0.03 %, and the sample of
`SURVEY_QUERIES` queries by at most 1.7 %, on six sets: text and code, text and image,
two languages, a query log. R@1 of the default method is the same as with all targets
(benchmarks/settings.py)."""

SURVEY_QUERIES = 512
"""The number of queries from which the kind of a bank is judged.

The spacing ratio then has a standard error of about 0.05."""

SPACINGS = 10
"""The number of gaps between a query's nearest targets that the spacing ratio uses."""


def spacing_ratio(largest: np.ndarray) -> float:
    """Return how far the nearest target stands out from the next ones: a ratio of gaps.

    If the gallery holds the answers to the queries, as for a query log, each answer
    stands out, and the ratio is mostly above 1. Otherwise, it is about 1 or less.
    Measured values (benchmarks/settings.py) are 0.95 to 3.5 for logs, and 0.60 to 0.95
    for banks whose answers are elsewhere, on text and code, text and images, and across
    languages.

    Let s_1 >= s_2 >= ... be the similarities of one query. The weighted gaps j (s_j -
    s_j+1) have the same mean for all j if the upper tail of the similarities is
    exponential (Renyi's representation of order statistics). If the tail is shorter,
    the mean is smaller for small j. The ratio divides the mean first gap by the mean of
    the other gaps, both over all queries, so it depends on neither scale nor metric. It
    is 1 for fewer than 3 targets, or if all other gaps are 0.

    Args:
        largest: The `SPACINGS` + 1 largest similarities of each query, in descending
            order [m, k].
    """
    gaps = -np.diff(largest, axis=1) * np.arange(1, largest.shape[1])
    if gaps.shape[1] < 2 or not gaps[:, 1:].mean() > 0:
        return 1.0
    return float(gaps[:, 0].mean() / gaps[:, 1:].mean())


@dataclass(frozen=True, eq=False)
class Survey:
    """The nearest targets of the queries in `PreparedBank.survey_queries`.

    largest: The `SPACINGS` + 1 largest similarities, in descending order [q, k].
    nearest: The row of the nearest target [q].
    """

    largest: np.ndarray
    nearest: np.ndarray


@dataclass(frozen=True, eq=False)
class WholeGallery:
    """A gallery that workers have read; `PreparedBank.targets` is then a sample of it.

    count: The number of targets, without zero vectors.
    survey: The nearest targets of the queries in `PreparedBank.survey_queries`.
    answers: The answers found by similarity; None if the method keeps answers, or if
        the bank or the gallery is too small for a log.
    """

    count: int
    survey: Survey
    answers: Answers | None


@dataclass(frozen=True, eq=False)
class PreparedBank:
    """Checked queries, known answers and, once it was read, the gallery.

    Every function that tries or fits a correction takes a prepared bank. A fold or a
    sample is a prepared bank with fewer rows.

    query_bank: The queries [m, d]; under cosine, they and `target_bank` have unit
        length.
    target_bank: The vectors of answers [p, d].
    pairs: The row of the target bank that answers each query, int [m].
    clicks: The row of the gallery, or the id in the store, that answers each query [m];
        -1 for none.
    targets: The gallery, without zero vectors if the metric is cosine.
    whole: The findings of the workers, if `targets` are a sample of the gallery.
    """

    query_bank: np.ndarray
    metric: Metric
    compute: Compute
    target_bank: np.ndarray | None = None
    pairs: np.ndarray | None = None
    clicks: np.ndarray | None = None
    targets: Vectors | None = None
    whole: WholeGallery | None = None

    def against(
        self,
        targets: VectorLike,
        ids: Mapping[int | str, int] | None = None,
        *,
        has_no_zeros: bool = False,
    ) -> PreparedBank:
        """Return this bank with a gallery; under cosine, zero vectors are left out.

        Args:
            targets: The gallery [n, d].
            ids: The row of each clicked id, as returned by `places`, if a store was
                already read into `targets`. None if clicks are rows, or if `targets` is
                a store.
            has_no_zeros: Skip the search for zero vectors. A fit raises ZeroVector if
                there is one after all.

        Raises:
            InputError: The dimensions differ, or the gallery lacks clicked targets.
        """
        clicks = self.clicks
        if clicks is not None and ids is None and isinstance(targets, Scannable):
            targets, ids = read_store(targets, clicks)
        vectors = as_vectors(targets, "targets")
        dim = self.query_bank.shape[1]
        if vectors.dim != dim:
            raise InputError(
                f"{vectors.name} has {vectors.dim} dimensions, the query bank has "
                f"{dim}; embed both with the same model"
            )
        gallery = vectors if has_no_zeros else Directed.of(vectors, self.metric)
        if clicks is None:
            return replace(self, targets=gallery)
        # Clicks count rows with the zero vectors, which `gallery` leaves out.
        rows = _rows_of(clicks, vectors, ids)
        return replace(self, targets=gallery, clicks=locate_rows(gallery, rows))

    def with_pairs(self, pairs: PreparedBank) -> PreparedBank:
        """Return this bank with the queries and clicks of `pairs` appended.

        Queries of a bank without clicks get the click -1.
        """
        clicks = []
        for bank in (self, pairs):
            unknown = np.full(len(bank.query_bank), -1)
            clicks.append(unknown if bank.clicks is None else bank.clicks)
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
        """The row in target bank or gallery that answers each query, -1 if unknown."""
        return self.clicks if self.pairs is None else self.pairs

    def require_answers(self) -> np.ndarray:
        """Return the known answers [m]. Raises InputError if there are none."""
        answers = self.known_answers
        if answers is None:
            raise InputError(
                "the answers to the queries are not known: pass a Bank with ",
                Parameter("answers"),
                ", or pairs such as titles (docs/titles.md)",
            )
        return answers

    def require_targets(self) -> Vectors:
        """Return the gallery. Raises InputError if there is none."""
        if self.targets is None:
            raise InputError(
                "this needs the gallery, and none was given: pass ",
                Parameter("targets"),
            )
        return self.targets

    @property
    def count(self) -> int:
        """The number of targets in the whole gallery, without zero vectors."""
        if self.whole is not None:
            return self.whole.count
        return self.require_targets().rows

    @cached_property
    def same(self) -> np.ndarray:
        """The row of the first query that equals each query: int64 [m]."""
        return number_rows(self.query_bank)

    @cached_property
    def distinct(self) -> np.ndarray:
        """The rows of the queries that do not repeat an earlier one, in order."""
        return np.unique(self.same)

    @cached_property
    def fingerprint(self) -> str:
        """A hash that identifies the query bank and the target bank."""
        return fingerprint(self.query_bank, self.target_bank)

    def require_target_bank(self) -> np.ndarray:
        """Return the target bank. Raises InputError if there is none."""
        if self.target_bank is None:
            raise InputError(
                "the bank has no vectors of its answers: pass ", Parameter("answers")
            )
        return self.target_bank

    @cached_property
    def answer_vectors(self) -> Vectors:
        """The target bank as `Vectors`. Raises InputError if there is none."""
        return as_vectors(self.require_target_bank(), "target bank")

    @cached_property
    def similarities(self) -> Similarities:
        """The query bank, ready to be multiplied with targets."""
        return Similarities(self.query_bank, self.metric, self.compute)

    @cached_property
    def survey_queries(self) -> np.ndarray:
        """A sample of the queries [q, d]."""
        order = np.random.default_rng(0).permutation(len(self.query_bank))
        return self.query_bank[np.sort(order[:SURVEY_QUERIES])]

    @cached_property
    def survey(self) -> Survey:
        """The nearest targets of `survey_queries` in the whole gallery."""
        if self.whole is not None:
            return self.whole.survey
        return self.survey_of(self.require_targets())

    def survey_of(self, targets: Vectors) -> Survey:
        """Search `targets` for the nearest to each query of `survey_queries`."""
        top = TopK(SPACINGS + 1)
        search(
            self.survey_queries,
            targets,
            self.metric,
            self.compute,
            top,
            label="examining the bank",
        )
        # Index 0 is the only candidate; the nearest target is in the first column.
        return Survey(top.scores[0], top.rows[0][:, 0])

    @cached_property
    def deviation(self) -> float:
        """The standard deviation of the similarities between bank and gallery.

        It is estimated from samples of both.
        """
        rng = np.random.default_rng(0)
        sample = draw_sample(self.require_targets(), SPREAD_SAMPLE, self.metric, rng)
        # The vectors of both samples already have unit length under cosine.
        metric = Metric.DOT if self.metric is Metric.COSINE else self.metric
        quiet = self.compute.without_progress
        return float(compare(self.survey_queries, sample, metric, quiet).std())

    @cached_property
    def answers_are_elsewhere(self) -> bool:
        """True if the target bank holds the answers, and the gallery does not.

        The nearest target then stands out more in the target bank than in the gallery.
        Without a target bank this cannot be measured. The property is then False: a fit
        assumes that the answers are in the gallery, and leaves their entries out. On
        seventeen settings this costs the default method 0.06 points of R@1 on average,
        while keeping the entries of answers costs 3.3 points on the worst log
        (benchmarks/settings.py).
        """
        # A small target bank has too few gaps to compare.
        if self.target_bank is None or len(self.target_bank) <= SPACINGS:
            return False
        in_target_bank = spacing_ratio(self.survey_of(self.answer_vectors).largest)
        return in_target_bank > spacing_ratio(self.survey.largest)

    @cached_property
    def answers(self) -> Answers | None:
        """The answers found by similarity in gallery and target bank.

        None if bank or gallery is too small for a log. If workers have read the
        gallery, also None if the method keeps answers.
        """
        if self.whole is not None:
            return self.whole.answers
        searched = [self.require_targets()]
        if self.target_bank is not None:
            searched.append(self.answer_vectors)
        return find_answers(self.similarities, searched)


def compare(
    queries: np.ndarray, targets: VectorLike, metric: Metric, compute: Compute
) -> np.ndarray:
    """Return the similarity [m, n] of each query [m, d] to each target [n, d]."""
    similarities = Similarities(queries, metric, compute)
    return dense(similarities, as_vectors(targets, "targets"))


def number_rows(vectors: np.ndarray) -> np.ndarray:
    """Return the row of the first vector that equals each of `vectors`: int64 [m]."""
    first_rows: dict[bytes, int] = {}
    numbers = np.empty(len(vectors), np.int64)
    # Adding 0.0 turns -0.0 into 0.0, so that equal vectors have equal bytes.
    for row, vector in enumerate(vectors + 0.0):
        numbers[row] = first_rows.setdefault(vector.tobytes(), row)
    return numbers


def _rows_of(
    clicks: np.ndarray, gallery: Vectors, ids: Mapping[int | str, int] | None
) -> np.ndarray:
    """Return the row of the gallery that was clicked for each query [m], -1 for none.

    Clicks on ids that the gallery lacks become -1, and a warning names the ids. Raises
    InputError if the gallery lacks all of them.

    Args:
        clicks: The clicked ids or rows [m], -1 for none.
        gallery: The gallery.
        ids: The row of each id; None if clicks are rows.
    """
    clicked = [id for id in clicks.tolist() if id != -1]
    if not clicked:
        raise InputError(
            "answers: all of them are -1, which means none; pass at least one"
        )
    if ids is None:
        if clicks.dtype.kind not in "iu":
            raise InputError(
                f"answers: {clicked[0]!r} was given; expected row numbers of the "
                "gallery (-1 for none), or vectors"
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
            f"answers: none of these ids is in {gallery.name}: they look like "
            f"{clicked[0]!r}, but its ids look like {example!r}"
        )
    if unknown:
        logger.warning(
            "%d of %d clicked ids are not in the store and are left out: %s; its ids "
            "look like %r",
            len(unknown),
            len(clicked),
            list_first(unknown),
            example,
        )
    rows = {**ids, -1: -1}
    return np.array([rows.get(id, -1) for id in clicks.tolist()], np.int64)


def places(
    ids: Sequence[int | str], first: int, clicked: Container[int | str]
) -> dict[int | str, int]:
    """Return the rows of those `ids` that are in `clicked`.

    An id of digits counts as a number, even if clicks or store write it as text. The id
    of row 0 is always returned, as an example of the store's ids.

    Args:
        ids: The ids of consecutive rows.
        first: The row of the first id.
        clicked: The clicked ids.
    """
    rows: dict[int | str, int] = {}
    for row, id in enumerate(map(plain_id, ids), start=first):
        if id in clicked or row == 0:
            rows[id] = row
    return rows


def read_store(
    store: Scannable, clicks: np.ndarray
) -> tuple[Vectors, dict[int | str, int]]:
    """Read a store once; return its vectors and the rows of the ids in `clicks` [m]."""
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
    """Return the `clicked` ids that a store lacks. The whole store is read."""
    missing = set(clicked)
    for batch in store.scan():
        missing -= places(batch.ids, 0, missing).keys()
    return missing
